//! What all CTAs of all launches share: device memory, the clock, and the random choices.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::config::{Config, DeviceId, Timing};
use crate::delayed::Delayed;
use crate::memory::GlobalMemory;
use crate::program::Program;
use crate::race::{AgentId, AgentSet, Clock, CtaAgents, LaunchAgents, Snapshot};
use crate::random::Random;
use crate::stream::{LaunchId, Streams};

/// Where a warp is: indices into the machine's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockRef {
    pub(crate) grid: u32,
    pub(crate) block: u32,
}

/// State outside of CTAs.
pub(crate) struct World {
    pub(crate) memory: GlobalMemory,
    /// Simulated time in picoseconds.
    pub(crate) clock_ps: u64,
    pub(crate) timing: Timing,
    /// Choices of completion times.
    pub(crate) chance: Random,
    /// In random times, one turn in this many completes a copy: from soon after the issue to so late that copies
    /// overtake each other by many.
    pub(crate) pace: usize,
    /// CTAs with copies to shared memory under way, one entry per copy, oldest first.
    pub(crate) copies: VecDeque<BlockRef>,
    /// Stores to other devices' memory under way.
    pub(crate) delayed: Delayed,
    /// CTAs other than the executing one in which something has happened that may end a wait.
    pub(crate) woken: Vec<BlockRef>,
    /// Counts changes that another thread could observe; polling leaves it alone.
    pub(crate) effects: u64,
    /// Counts instructions that look for such changes.
    pub(crate) polls: u64,
    pub(crate) streams: Streams,
    /// What warps of launches have acquired from other launches, by a launch's first agent.
    learned: Vec<(AgentId, Snapshot)>,
    /// Something happened that may let a launch start or a dependency wait pass.
    pub(crate) streams_changed: bool,
}

impl World {
    pub(crate) fn new(config: &Config) -> World {
        let seed = match config.timing {
            Timing::Seeded { seed } => seed,
            Timing::Early | Timing::Late => 0,
        };
        let mut chance = Random::new(seed, 2);
        let pace = 8 << (3 * chance.below(4));
        World {
            memory: GlobalMemory::new(config.devices, config.memory_bytes),
            // Not 0: a kernel that mistakes an absent time for the present should show.
            clock_ps: 1_000_000_000,
            timing: config.timing,
            chance,
            pace,
            copies: VecDeque::new(),
            delayed: Delayed::default(),
            woken: Vec::new(),
            effects: 0,
            polls: 0,
            streams: Streams::new(),
            learned: Vec::new(),
            streams_changed: true,
        }
    }

    /// A warp of `launch` has ended.
    pub(crate) fn learn(&mut self, launch: &LaunchAgents, clock: &Clock) {
        let Some(learned) = clock.learned() else { return };
        let first = AgentId(launch.first);
        match self.learned.iter_mut().find(|entry| entry.0 == first) {
            Some((_, known)) => known.join(&learned),
            None => self.learned.push((first, learned)),
        }
    }

    /// What whoever sees all launches of `view` knows from them of others.
    pub(crate) fn learned_by(&self, view: &AgentSet) -> Option<Snapshot> {
        let mut seen = self.learned.iter().filter(|entry| view.contains(entry.0)).map(|entry| &entry.1);
        let mut all = seen.next()?.clone();
        seen.for_each(|learned| all.join(learned));
        Some(all)
    }

    /// Forgets what launches have learned: all of them happened before whatever comes.
    pub(crate) fn forget_learned(&mut self) {
        self.learned.clear();
    }

    /// Whether an asynchronous operation issued now completes now.
    pub(crate) fn completes_at_once(&mut self) -> bool {
        match self.timing {
            Timing::Early => true,
            Timing::Late => false,
            Timing::Seeded { .. } => self.chance.one_in(self.pace / 2),
        }
    }
}

impl LaunchInfo {
    /// The clock of a warp that starts.
    pub(crate) fn start_clock(&self, cta: CtaAgents, warp: u32) -> Clock {
        let mut clock = Clock::new(cta, warp, self.start_view.clone());
        self.start_learned.iter().for_each(|learned| clock.acquire(learned));
        clock
    }

    /// The dependency wait passes.
    pub(crate) fn pass_wait(&self, clock: &mut Clock) {
        clock.see(&self.wait_view);
        self.wait_learned.iter().for_each(|learned| clock.acquire(learned));
    }
}

/// A launch as its CTAs see it.
pub(crate) struct LaunchInfo {
    pub(crate) id: LaunchId,
    pub(crate) program: Arc<Program>,
    pub(crate) grid: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) params: Vec<u8>,
    pub(crate) device: DeviceId,
    pub(crate) agents: LaunchAgents,
    /// What a CTA sees when it starts.
    pub(crate) start_view: AgentSet,
    /// What those launches had acquired from others.
    pub(crate) start_learned: Option<Snapshot>,
    /// Whether everything that this launch depends on has completed.
    pub(crate) dependencies_done: bool,
    /// What a CTA sees in addition once they have.
    pub(crate) wait_view: AgentSet,
    /// What those launches had acquired from others.
    pub(crate) wait_learned: Option<Snapshot>,
}

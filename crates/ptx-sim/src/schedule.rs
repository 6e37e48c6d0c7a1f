//! Which warp runs next.

use std::collections::VecDeque;

use crate::config::Schedule;
use crate::random::Random;
use crate::world::BlockRef;

/// Instructions of a turn in a fixed order, and at most in a random one.
const QUANTUM: u32 = 2048;
const RANDOM_QUANTUM: u32 = 64;

/// A warp of a resident CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct WarpRef {
    pub(crate) block: BlockRef,
    pub(crate) warp: u32,
}

/// The runnable warps.
pub(crate) struct Scheduler {
    ready: VecDeque<WarpRef>,
    random: Option<Random>,
}

impl Scheduler {
    pub(crate) fn new(schedule: Schedule) -> Scheduler {
        let random = match schedule {
            Schedule::RoundRobin => None,
            Schedule::Random { seed } => Some(Random::new(seed, 1)),
        };
        Scheduler { ready: VecDeque::new(), random }
    }

    /// Adds a warp that can run.
    pub(crate) fn push(&mut self, warp: WarpRef) {
        self.ready.push_back(warp);
    }

    /// Takes the warp that runs next.
    pub(crate) fn pop(&mut self) -> Option<WarpRef> {
        match &mut self.random {
            Some(random) if !self.ready.is_empty() => {
                let at = random.below(self.ready.len());
                self.ready.swap_remove_back(at)
            }
            _ => self.ready.pop_front(),
        }
    }

    /// Runnable warps.
    pub(crate) fn len(&self) -> usize {
        self.ready.len()
    }

    /// Instructions of the next turn.
    pub(crate) fn quantum(&mut self) -> u32 {
        match &mut self.random {
            Some(random) => 1 + random.below(RANDOM_QUANTUM as usize) as u32,
            None => QUANTUM,
        }
    }

    /// The generator of a random schedule.
    pub(crate) fn random(&mut self) -> Option<&mut Random> {
        self.random.as_mut()
    }

    /// Forgets every warp.
    pub(crate) fn clear(&mut self) {
        self.ready.clear();
    }
}

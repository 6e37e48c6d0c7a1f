//! The machine: devices, streams, and the loop that runs warps until every stream has drained.

mod queue;
mod quiet;
mod report;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use crate::cluster::{Peers, exit_race};
use crate::config::{Config, DeviceId, Schedule, Timing};
use crate::grid::Grid;
use crate::program::Program;
use crate::race::AgentSet;
use crate::random::mix;
use crate::schedule::{Scheduler, WarpRef};
use crate::step::{Exec, TurnEnd, check_exit};
use crate::stream::{EventId, StreamId, Streams};
use crate::trap::{Fault, MemoryError, Stop, TrapKind};
use crate::warp::{IdlePolls, Wait};
use crate::world::{BlockRef, World};

use queue::{Past, Queue};
use quiet::Quiet;

pub use queue::{Command, Launch};

/// The simulated machine.
pub struct Machine {
    config: Config,
    world: World,
    queues: Vec<Queue>,
    events: u32,
    grids: Vec<Option<Grid>>,
    scheduler: Scheduler,
    sleepers: BinaryHeap<Reverse<(u64, WarpRef)>>,
    /// By the address of the kernel, which the program keeps alive.
    programs: HashMap<usize, Arc<Program>>,
    /// By launch; `None` for host commands.
    past: Vec<Option<Past>>,
    quiet: Quiet,
    executed: u64,
    hash: u64,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("config", &self.config)
            .field("streams", &self.queues.len())
            .field("executed", &self.executed)
            .finish_non_exhaustive()
    }
}

impl Machine {
    /// A machine with nothing allocated.
    pub fn new(config: Config) -> Machine {
        Machine {
            config,
            world: World::new(&config),
            queues: Vec::new(),
            events: 0,
            grids: Vec::new(),
            scheduler: Scheduler::new(config.schedule),
            sleepers: BinaryHeap::new(),
            programs: HashMap::new(),
            past: Vec::new(),
            quiet: Quiet::new(1),
            executed: 0,
            hash: 0,
        }
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Warp instructions executed so far.
    pub fn executed(&self) -> u64 {
        self.executed
    }

    /// A digest of everything that was executed, in order: equal for two runs with the same seeds and inputs.
    pub fn execution_hash(&self) -> u64 {
        self.hash
    }

    /// A new stream.
    ///
    /// # Panics
    /// If the device does not exist.
    pub fn create_stream(&mut self, device: DeviceId) -> StreamId {
        assert!((device.0 as usize) < self.config.devices, "device {} of {}", device.0, self.config.devices);
        self.queues.push(Queue { device, commands: VecDeque::new() });
        self.world.streams.create_stream()
    }

    /// A new event.
    pub fn create_event(&mut self) -> EventId {
        self.events += 1;
        self.world.streams.create_event()
    }

    /// Reserves device memory; the address is 256-byte aligned and never used again.
    ///
    /// # Errors
    /// When the device does not exist or is full.
    pub fn alloc(&mut self, device: DeviceId, bytes: u64) -> Result<u64, MemoryError> {
        self.world.memory.alloc(device, bytes)
    }

    /// Frees an allocation; later accesses are faults.
    ///
    /// # Errors
    /// When the address is not the start of a live allocation.
    pub fn free(&mut self, address: u64) -> Result<(), MemoryError> {
        self.world.memory.free(address)
    }

    /// A multicast address under which `bytes` bytes from each of `members` on are written together; it is never used again.
    ///
    /// # Errors
    /// When a member is not 256-byte aligned memory inside a live allocation, or two are on one device.
    pub fn multicast(&mut self, members: &[u64], bytes: u64) -> Result<u64, MemoryError> {
        self.world.memory.multicast(members, bytes)
    }

    /// Writes device memory at once, not in stream order; the bytes become initialised.
    ///
    /// # Errors
    /// When the range is not inside a live allocation.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.world.memory.host_write(address, bytes)
    }

    /// Reads device memory at once, not in stream order; bytes that nothing wrote read as [`POISON`](crate::POISON).
    ///
    /// # Errors
    /// When the range is not inside a live allocation.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        self.world.memory.host_read(address, out)
    }

    /// Executes everything queued in all streams.
    ///
    /// # Errors
    /// The first fault. Everything queued or under way is then abandoned; memory stays as it is.
    pub fn run(&mut self) -> Result<(), Fault> {
        let result = self.drain();
        if result.is_err() {
            self.queues.iter_mut().for_each(|q| q.commands.clear());
            self.grids.clear();
            self.scheduler.clear();
            self.world.copies.clear();
            self.world.delayed.clear();
            self.world.woken.clear();
            // Launches that will never complete go with everything else that streams remember.
            self.world.streams = Streams::new();
            self.queues.iter().for_each(|_| _ = self.world.streams.create_stream());
            (0..self.events).for_each(|_| _ = self.world.streams.create_event());
        }
        // The host has seen everything: nothing races with what comes.
        self.sleepers.clear();
        self.world.streams.reset();
        self.world.forget_learned();
        self.world.memory.clear_shadows();
        self.past.clear();
        self.grids.clear();
        result
    }

    fn drain(&mut self) -> Result<(), Fault> {
        let limit = self.executed.saturating_add(self.config.fuel);
        self.world.streams_changed = true;
        loop {
            if std::mem::take(&mut self.world.streams_changed) {
                self.advance_streams()?;
            }
            self.wake_sleepers();
            let Some(warp) = self.scheduler.pop() else {
                if self.idle()? {
                    return Ok(());
                }
                continue;
            };
            self.turn(warp)?;
            if self.executed > limit {
                return Err(self.out_of_fuel(warp));
            }
            if let Timing::Seeded { .. } = self.world.timing
                && !self.world.copies.is_empty()
                && self.world.chance.one_in(self.world.pace)
            {
                self.complete_one_copy()?;
            }
            if !self.world.delayed.is_empty()
                && self.scheduler.random().is_some_and(|random| random.one_in(self.world.pace))
            {
                self.deliver_some();
            }
            if self.quiet.warps > 0 && self.quiet.warps >= self.scheduler.len() {
                self.quiet_round()?;
            }
        }
    }

    /// Starts CTAs while there is room.
    fn fill(&mut self, grid: u32) {
        let Some(g) = &mut self.grids[grid as usize] else { return };
        while let Some(blocks) = g.start_next() {
            for block in blocks {
                let block_ref = BlockRef { grid, block };
                let Some(b) = &mut g.blocks[block as usize] else { continue };
                for warp in &mut b.warps {
                    warp.queued = true;
                    self.scheduler.push(WarpRef { block: block_ref, warp: warp.index });
                }
            }
        }
    }

    /// Puts every waiting warp of a CTA into the ready list: each looks for itself whether its wait is over.
    fn wake_block(&mut self, at: BlockRef) {
        let Some(Some(grid)) = self.grids.get_mut(at.grid as usize) else { return };
        let Some(Some(block)) = grid.blocks.get_mut(at.block as usize) else { return };
        for warp in &mut block.warps {
            if !warp.queued && !warp.finished() {
                warp.queued = true;
                self.scheduler.push(WarpRef { block: at, warp: warp.index });
            }
        }
    }

    fn wake_sleepers(&mut self) {
        while let Some(&Reverse((until_ps, at))) = self.sleepers.peek() {
            if until_ps > self.world.clock_ps {
                return;
            }
            self.sleepers.pop();
            self.wake_warp(at);
        }
    }

    fn wake_warp(&mut self, at: WarpRef) {
        let Some(Some(grid)) = self.grids.get_mut(at.block.grid as usize) else { return };
        let Some(Some(block)) = grid.blocks.get_mut(at.block.block as usize) else { return };
        let warp = &mut block.warps[at.warp as usize];
        if !warp.queued && !warp.finished() {
            warp.queued = true;
            self.scheduler.push(at);
        }
    }

    /// Lets a warp execute for a while.
    fn turn(&mut self, at: WarpRef) -> Result<(), Fault> {
        let quantum = self.scheduler.quantum();
        let runnable = self.scheduler.len() as u64 + 1;
        let grid = self.grids[at.block.grid as usize].as_mut().expect("ready warps belong to live launches");
        let size = grid.cluster_size as usize;
        let number = at.block.block as usize / size;
        let (before, rest) = grid.blocks[number * size..][..size].split_at_mut(at.block.block as usize % size);
        let (own, after) = rest.split_first_mut().expect("a slot of its cluster");
        let block = own.as_mut().expect("ready warps belong to live CTAs");
        let (events, effects, polls) = (block.cta.events, self.world.effects, self.world.polls);
        let mut exec = Exec {
            program: &grid.info.program,
            launch: &grid.info,
            cta: &mut block.cta,
            peers: Peers::new(before, after),
            cluster: &mut grid.clusters[number],
            warp: &mut block.warps[at.warp as usize],
            clock: &mut block.clocks[at.warp as usize],
            world: &mut self.world,
            here: at.block,
            random: self.scheduler.random(),
            executed: 0,
            pc: 0,
            mask: 0,
        };
        let result = exec.turn(quantum);
        let (executed, pc) = (exec.executed, exec.pc);
        self.executed += u64::from(executed);
        self.world.clock_ps += u64::from(executed) * 1000 / runnable + 1;
        let end = match result {
            Ok(end) => end,
            Err(stop) => return Err(self.fault(at, pc, *stop)),
        };
        grid.hits[pc as usize] = grid.hits[pc as usize].saturating_add(1);
        self.hash = mix(self.hash ^ u64::from(pc) ^ u64::from(executed) << 32)
            .wrapping_add(u64::from(at.block.block) << 40 | u64::from(at.warp) << 32 | u64::from(at.block.grid));

        let quiet = self.world.effects == effects;
        if !quiet {
            self.quiet.restart();
        } else {
            self.quiet.instructions += u64::from(executed);
            self.quiet.polled |= self.world.polls != polls;
        }
        let woken = block.cta.events != events;
        let warp = &mut block.warps[at.warp as usize];
        if quiet && end == TurnEnd::Poll {
            if warp.quiet.period != self.quiet.period {
                warp.quiet = IdlePolls { period: self.quiet.period, ..IdlePolls::default() };
            }
            warp.quiet.polls += 1;
            // Each of its groups has had its turn; there may be fewer of them than when it began.
            if !warp.quiet.counted && warp.quiet.polls as usize >= warp.groups().count() {
                warp.quiet.counted = true;
                self.quiet.warps += 1;
            }
        } else if warp.quiet.period == self.quiet.period && end != TurnEnd::Quantum {
            self.quiet.warps -= usize::from(warp.quiet.counted);
            warp.quiet = IdlePolls::default();
        }
        match end {
            TurnEnd::Quantum | TurnEnd::Poll => self.scheduler.push(at),
            TurnEnd::Blocked => {
                warp.queued = false;
                for group in warp.groups() {
                    if let Wait::Sleep { until_ps } = group.wait {
                        self.sleepers.push(Reverse((until_ps, at)));
                    }
                }
            }
            TurnEnd::Finished => {
                warp.queued = false;
                let cta = &mut block.cta;
                cta.live_warps -= 1;
                let live = cta.live_warps * 32;
                if grid.clusters[number].end_warp(warp.cluster_arrival) {
                    let first = (number * size) as u32;
                    let blocks = first..first + size as u32;
                    self.world.woken.extend(blocks.map(|block| BlockRef { block, ..at.block }));
                }
                for barrier in &mut cta.barriers {
                    if barrier.threads.is_none() && barrier.advance(live) {
                        cta.events += 1;
                    }
                }
                if live == 0 {
                    self.end_block(at, pc)?;
                } else {
                    self.wake_block(at.block);
                }
                self.wake_others();
                return Ok(());
            }
        }
        if woken {
            self.wake_block(at.block);
        }
        self.wake_others();
        Ok(())
    }

    /// Wakes the CTAs that the last turn has done something for.
    fn wake_others(&mut self) {
        while let Some(block) = self.world.woken.pop() {
            self.wake_block(block);
        }
    }

    /// All warps of a CTA have ended, the last at `pc`.
    fn end_block(&mut self, at: WarpRef, pc: u32) -> Result<(), Fault> {
        let grid = self.grids[at.block.grid as usize].as_mut().expect("the CTA's launch");
        let block = grid.blocks[at.block.block as usize].as_mut().expect("the CTA");
        if let Err(stop) = check_exit(&mut block.cta, &mut self.world.memory, &grid.info.program.ir) {
            return Err(self.fault(at, pc, *stop));
        }
        let World { delayed, memory, .. } = &mut self.world;
        if !delayed.is_empty() {
            delayed.deliver(|store| store.block == at.block, memory);
        }
        if grid.cluster_size > 1
            && let Some(race) = exit_race(block, pc)
        {
            let field = crate::shared::field(&grid.info.program.ir, race.offset as usize);
            let message = format!(
                "the CTA ends, but nothing orders its end after an access to {field} of its shared memory: {}",
                self.party_text(&race.first)
            );
            let address = u64::from(crate::shared::BASE) + race.offset;
            return Err(self.fault(at, pc, *Stop::new(TrapKind::ExitInFlight, message).address(address)));
        }
        let mut view = AgentSet::new();
        for clock in &block.clocks {
            view.unite(clock.visible());
            self.world.learn(&grid.info.agents, clock);
        }
        self.world.streams.end_cta(grid.info.id, block.cta.linear, &view);
        self.world.streams_changed = true;
        self.world.effects += 1;
        grid.end(at.block.block);
        if grid.is_complete() {
            self.grids[at.block.grid as usize] = None;
        } else {
            self.fill(at.block.grid);
        }
        Ok(())
    }

    fn out_of_fuel(&self, at: WarpRef) -> Fault {
        let fuel = self.config.fuel;
        let Some(grid) = self.grids.get(at.block.grid as usize).and_then(Option::as_ref) else {
            let hint = "the launch that used it has just ended";
            return self.fault(at, 0, *Stop::new(TrapKind::FuelExhausted, format!("{fuel} warp instructions: {hint}")));
        };
        let hottest = (0..grid.hits.len()).max_by_key(|pc| grid.hits[*pc]).unwrap_or(0) as u32;
        let message = format!("{fuel} warp instructions executed: possible livelock, most often at this line");
        self.fault(at, hottest, *Stop::new(TrapKind::FuelExhausted, message))
    }
}

/// Which order of warps a trap names for its replay.
fn replay(config: &Config) -> (Schedule, Timing) {
    (config.schedule, config.timing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_can_move_between_threads() {
        fn is_send<T: Send>(_: &T) {}
        let machine = Machine::new(Config::default());
        is_send(&machine);
        assert!(format!("{machine:?}").starts_with("Machine"));
    }
}

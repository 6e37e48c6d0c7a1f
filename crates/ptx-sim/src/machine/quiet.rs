//! What happens when no warp gets anywhere: copies complete, stores arrive, time passes, or it is a deadlock.

use std::cmp::Reverse;

use ptx::op::Op;

use super::Machine;
use crate::config::Timing;
use crate::schedule::WarpRef;
use crate::step::{complete_copy, complete_stores};
use crate::trap::{Fault, SimError};
use crate::warp::Wait;
use crate::world::{BlockRef, World};

/// First jump of the clock when everybody polls; doubles while nothing happens.
const JUMP_PS: u64 = 1_000_000;
const JUMP_MAX_PS: u64 = 1_000_000_000_000;
/// The clock stops jumping here, after half a year.
const CLOCK_MAX_PS: u64 = 1 << 63;
/// Rounds in which every warp only timed out before that is a deadlock.
const TIMEOUTS_MAX: u64 = 10_000;
/// Instructions of pure polling before that is a deadlock: seconds of host time, hours of simulated time.
const POLLS_MAX: u64 = 50_000_000;

/// Progress of polling: how long nothing that another thread could see has changed.
#[derive(Default)]
pub(super) struct Quiet {
    /// Number of the current period, from 1.
    pub(super) period: u64,
    /// Ready warps that have polled in it.
    pub(super) warps: usize,
    /// Periods, and instructions, without an effect.
    pub(super) rounds: u64,
    pub(super) instructions: u64,
    pub(super) jump_ps: u64,
    /// Something other than a timed-out wait was executed.
    pub(super) polled: bool,
}

impl Quiet {
    /// The start of period `period`.
    pub(super) fn new(period: u64) -> Quiet {
        Quiet { period, jump_ps: JUMP_PS, ..Quiet::default() }
    }

    /// Something has happened.
    pub(super) fn restart(&mut self) {
        *self = Quiet::new(self.period + 1);
    }
}

impl Machine {
    /// Completes the bulk stores that nothing has waited for yet. Whether there was one.
    pub(super) fn complete_bulk_stores(&mut self) -> Result<bool, Fault> {
        let mut any = false;
        for g in 0..self.grids.len() {
            let Some(grid) = &mut self.grids[g] else { continue };
            for b in 0..grid.blocks.len() {
                let Some(block) = &mut grid.blocks[b] else { continue };
                match complete_stores(&mut block.cta, &mut self.world.memory) {
                    Ok(found) => any |= found,
                    Err(stop) => {
                        let block = BlockRef { grid: g as u32, block: b as u32 };
                        return Err(self.fault(WarpRef { block, warp: 0 }, 0, *stop));
                    }
                }
            }
        }
        if any {
            self.quiet.restart();
        }
        Ok(any)
    }

    /// Completes a copy to shared memory: the oldest, or any if times are random; then bulk stores. Whether there was one.
    pub(super) fn complete_one_copy(&mut self) -> Result<bool, Fault> {
        let n = self.world.copies.len();
        if n == 0 {
            return self.complete_bulk_stores();
        }
        let i = if matches!(self.world.timing, Timing::Seeded { .. }) { self.world.chance.below(n) } else { 0 };
        let at = self.world.copies.remove(i).expect("below the length");
        let Some(Some(grid)) = self.grids.get_mut(at.grid as usize) else { return Ok(true) };
        let Some(Some(block)) = grid.blocks.get_mut(at.block as usize) else { return Ok(true) };
        if block.cta.copies.is_empty() {
            return Ok(true);
        }
        let k = if matches!(self.world.timing, Timing::Seeded { .. }) {
            self.world.chance.below(block.cta.copies.len())
        } else {
            0
        };
        let copy = block.cta.copies.remove(k);
        let result = complete_copy(&mut block.cta, &mut self.world.memory, &grid.info.program.ir, &copy);
        if let Err(stop) = result {
            let warp = WarpRef { block: at, warp: copy.issuer.warp };
            return Err(self.fault(warp, copy.issuer.pc, *stop));
        }
        self.quiet.restart();
        self.wake_block(at);
        Ok(true)
    }

    /// Every ready warp has polled in vain: something asynchronous completes, or time passes.
    pub(super) fn quiet_round(&mut self) -> Result<(), Fault> {
        if self.deliver_some() {
            return Ok(());
        }
        if self.complete_one_copy()? {
            return Ok(());
        }
        self.pass_time();
        self.check_progress()
    }

    /// A deadlock, if nothing has happened for long enough.
    pub(super) fn check_progress(&self) -> Result<(), Fault> {
        if !self.quiet.polled && self.quiet.rounds > TIMEOUTS_MAX {
            return Err(self.deadlock("nothing can run"));
        }
        if self.quiet.instructions > POLLS_MAX {
            return Err(self.deadlock("everybody polls, and nothing changes"));
        }
        Ok(())
    }

    /// Lets time pass in which nothing happens.
    pub(super) fn pass_time(&mut self) {
        let mut jump = self.quiet.jump_ps;
        if let Some(&Reverse((until_ps, _))) = self.sleepers.peek() {
            jump = jump.min(until_ps.saturating_sub(self.world.clock_ps));
        }
        self.world.clock_ps = self.world.clock_ps.saturating_add(jump).min(CLOCK_MAX_PS);
        self.quiet.jump_ps = (2 * self.quiet.jump_ps).min(JUMP_MAX_PS);
        self.quiet.rounds += 1;
        self.quiet.period += 1;
        self.quiet.warps = 0;
        self.time_out_waits();
    }

    /// Suspended mbarrier waits give up for now.
    pub(super) fn time_out_waits(&mut self) {
        for g in 0..self.grids.len() {
            let Some(grid) = &mut self.grids[g] else { continue };
            for b in 0..grid.blocks.len() {
                let Some(block) = &mut grid.blocks[b] else { continue };
                for warp in &mut block.warps {
                    let suspended = !warp.queued
                        && warp.others.iter().any(|group| {
                            matches!(group.wait, Wait::Event { .. })
                                && matches!(grid.info.program.ops[group.pc as usize], Op::MbarTryWait { .. })
                        });
                    if suspended {
                        warp.timed_out = true;
                        warp.queued = true;
                        let block = BlockRef { grid: g as u32, block: b as u32 };
                        self.scheduler.push(WarpRef { block, warp: warp.index });
                    }
                }
            }
        }
    }

    /// Lets stores to other devices arrive, if some are under way. Whether there were.
    pub(super) fn deliver_some(&mut self) -> bool {
        let World { delayed, memory, .. } = &mut self.world;
        let Some(random) = self.scheduler.random().filter(|_| !delayed.is_empty()) else { return false };
        if delayed.deliver_some(random, memory) {
            self.quiet.restart();
        }
        true
    }

    /// No warp can run. Whether everything is done.
    pub(super) fn idle(&mut self) -> Result<bool, Fault> {
        if self.deliver_some() {
            return Ok(false);
        }
        if self.complete_one_copy()? {
            return Ok(false);
        }
        if let Some(&Reverse((until_ps, _))) = self.sleepers.peek() {
            self.world.clock_ps = self.world.clock_ps.max(until_ps);
            return Ok(false);
        }
        if self.grids.iter().all(Option::is_none) {
            if self.queues.iter().all(|q| q.commands.is_empty()) {
                return Ok(true);
            }
            let stuck = self.queues.iter().filter(|q| !q.commands.is_empty()).count();
            return Err(SimError::StreamsStuck(format!("{stuck} streams have commands that cannot start")).into());
        }
        self.pass_time();
        if self.scheduler.len() == 0 {
            return Err(self.deadlock("nothing can run"));
        }
        self.check_progress()?;
        Ok(false)
    }
}

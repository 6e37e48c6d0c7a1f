//! Operations of the lanes of one warp together.
//!
//! The lanes that the mask names must meet at the instruction; a group that comes first waits for the others.

use std::ops::ControlFlow;

use ptx::op::{Op, Operand, Redux, RegId, Shuffle, Vote};

use super::{Exec, Flow, lanes_text, name};
use crate::registers::{LANES, Lanes};
use crate::trap::{Stop, TrapKind};
use crate::warp::Wait;

/// Instructions that the whole warp must execute together.
pub(super) fn is_aligned(op: &Op) -> bool {
    matches!(
        op,
        Op::BarSync { .. }
            | Op::BarArrive { .. }
            | Op::ClusterArrive { .. }
            | Op::ClusterWait
            | Op::Elect { .. }
            | Op::LdMatrix { .. }
            | Op::MmaBf16 { .. }
            | Op::WgmmaFence
            | Op::Wgmma { .. }
            | Op::WgmmaCommit
            | Op::WgmmaWait { .. }
            | Op::SetMaxNReg { .. }
    )
}

/// Goes on if the lanes are there, returns from the instruction otherwise.
macro_rules! converge {
    ($exec:expr, $required:expr) => {
        if let std::ops::ControlFlow::Break(flow) = $exec.converge($required)? {
            return Ok(flow);
        }
    };
}
pub(super) use converge;

impl Exec<'_> {
    /// Waits until the lanes of `required` are at this instruction; a fault if some of them have ended.
    pub(super) fn converge(&self, required: u32) -> Result<ControlFlow<Flow>, Box<Stop>> {
        if required & !self.mask == 0 {
            return Ok(ControlFlow::Continue(()));
        }
        if required & self.warp.exited != 0 {
            return Err(self.divergence(self.pc, self.mask, "lanes that it needs have ended"));
        }
        Ok(ControlFlow::Break(Flow::Retry(Wait::Converge { required })))
    }

    /// As [`converge`](Self::converge) for the lanes of a collective's mask, all of which must be in it.
    pub(super) fn collective(&self, mask: u32) -> Result<ControlFlow<Flow>, Box<Stop>> {
        let outside = self.mask & !mask;
        if outside != 0 {
            let op = name(&self.program.ops[self.pc as usize]);
            let message = format!("{} execute {op} but are not in its mask {mask:#010x}", lanes_text(outside));
            return Err(Stop::new(TrapKind::Collective, message).lane(outside.trailing_zeros()));
        }
        self.converge(mask)
    }

    pub(super) fn shfl(
        &mut self,
        mode: Shuffle,
        dst: RegId,
        src: Operand,
        lane: Operand,
        mask: u32,
    ) -> Result<Flow, Box<Stop>> {
        if let ControlFlow::Break(flow) = self.collective(mask)? {
            return Ok(flow);
        }
        let (values, b) = (self.r32(src)?, self.r32(lane)?);
        let mut out = [0; LANES];
        for i in Lanes(self.mask) {
            // Only the low five bits of the lane operand count.
            let n = (b[i] & 31) as usize;
            let from = match mode {
                Shuffle::Bfly => i ^ n,
                Shuffle::Idx => n,
                Shuffle::Up => i.checked_sub(n).unwrap_or(i),
                Shuffle::Down => {
                    if i + n < LANES {
                        i + n
                    } else {
                        i
                    }
                }
            };
            if mask >> from & 1 == 0 {
                let message = format!("shuffle reads lane {from}, which is not in its mask {mask:#010x}");
                return Err(Stop::new(TrapKind::Collective, message).lane(i as u32));
            }
            out[i] = values[from];
        }
        self.w32(dst, &out)?;
        Ok(Flow::Next)
    }

    pub(super) fn vote(&mut self, op: Vote, dst: RegId, p: RegId, mask: u32) -> Result<Flow, Box<Stop>> {
        if let ControlFlow::Break(flow) = self.collective(mask)? {
            return Ok(flow);
        }
        let p = self.r_pred(p)?;
        let holds = match op {
            Vote::All => p & mask == mask,
            Vote::Any => p & mask != 0,
        };
        self.w_pred(dst, if holds { u32::MAX } else { 0 })?;
        Ok(Flow::Next)
    }

    pub(super) fn ballot(&mut self, dst: RegId, p: RegId, mask: u32) -> Result<Flow, Box<Stop>> {
        if let ControlFlow::Break(flow) = self.collective(mask)? {
            return Ok(flow);
        }
        let p = self.r_pred(p)?;
        self.w32(dst, &[p & mask; LANES])?;
        Ok(Flow::Next)
    }

    pub(super) fn redux(&mut self, op: Redux, dst: RegId, src: Operand, mask: u32) -> Result<Flow, Box<Stop>> {
        if let ControlFlow::Break(flow) = self.collective(mask)? {
            return Ok(flow);
        }
        let values = self.r32(src)?;
        let f: fn(u32, u32) -> u32 = match op {
            Redux::AddU32 => u32::wrapping_add,
            Redux::MinU32 => |a, b| a.min(b),
            Redux::MaxU32 => |a, b| a.max(b),
            Redux::MinS32 => |a, b| (a as i32).min(b as i32) as u32,
            Redux::MaxS32 => |a, b| (a as i32).max(b as i32) as u32,
            Redux::And => |a, b| a & b,
            Redux::Or => |a, b| a | b,
            Redux::Xor => |a, b| a ^ b,
        };
        let total = Lanes(self.mask).map(|lane| values[lane]).reduce(f).unwrap_or(0);
        self.w32(dst, &[total; LANES])?;
        Ok(Flow::Next)
    }

    pub(super) fn match_any(&mut self, dst: RegId, src: Operand, mask: u32) -> Result<Flow, Box<Stop>> {
        if let ControlFlow::Break(flow) = self.collective(mask)? {
            return Ok(flow);
        }
        let values = self.r32(src)?;
        let out = std::array::from_fn(|i| {
            Lanes(mask).filter(|j| values[*j] == values[i]).fold(0u32, |bits, j| bits | 1 << j)
        });
        self.w32(dst, &out)?;
        Ok(Flow::Next)
    }

    /// Elects a lane: any may be chosen, so a seeded run does not always choose the first.
    pub(super) fn elect(&mut self, dst: RegId) -> Result<Flow, Box<Stop>> {
        converge!(self, u32::MAX);
        let lane = match &mut self.random {
            Some(random) => random.below(LANES),
            None => 0,
        };
        self.w_pred(dst, 1 << lane)?;
        Ok(Flow::Next)
    }

    pub(super) fn bar_warp(&mut self, mask: u32) -> Result<Flow, Box<Stop>> {
        if let ControlFlow::Break(flow) = self.collective(mask)? {
            return Ok(flow);
        }
        if mask == u32::MAX {
            self.clock.sync_warp();
        } else {
            let published = self.clock.release(mask);
            self.clock.acquire(&published);
        }
        Ok(Flow::Visible)
    }

    /// `setmaxnreg`: moves registers between the warp and its CTA's pool, which holds what warps have given up since the
    /// launch; to grow is to wait until the pool has enough.
    pub(super) fn set_max_nreg(&mut self, grows: bool, count: u32) -> Result<Flow, Box<Stop>> {
        converge!(self, u32::MAX);
        let allotted = self.warp.allotted;
        if grows && count < allotted || !grows && count > allotted {
            let direction = if grows { "grow" } else { "shrink" };
            let message = format!("a warp of {allotted} registers a thread cannot {direction} to {count}");
            return Err(Stop::new(TrapKind::Operand, message));
        }
        let free = self.cta.free_registers + allotted;
        if free < count {
            return Ok(Flow::Retry(Wait::Event { seen: self.cta.events }));
        }
        self.cta.free_registers = free - count;
        self.warp.allotted = count;
        self.cta.events += 1;
        self.world.effects += 1;
        Ok(Flow::Visible)
    }
}

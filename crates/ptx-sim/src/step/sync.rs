//! CTA barriers and mbarriers.

use ptx::Scope;
use ptx::op::{Address, Operand, RegId};

use super::warp_ops::converge;
use super::{Exec, Flow};
use crate::mbarrier::MbarrierError;
use crate::race::ALL_LANES;
use crate::registers::{LANES, Lanes};
use crate::trap::{Stop, TrapKind};
use crate::warp::Wait;

impl Exec<'_> {
    /// `bar.sync`: the warp arrives as a whole and waits.
    pub(super) fn bar_sync(&mut self, id: Operand, threads: Option<u32>) -> Result<Flow, Box<Stop>> {
        converge!(self, !self.warp.exited);
        let id = self.barrier_id(id)?;
        let generation = self.cta.barriers[id as usize].generation;
        self.cta.barriers[id as usize].waiting |= 1 << self.warp.index;
        let done = self.bar_arrive_common(id, threads)?;
        if done {
            self.clock.acquire(&self.cta.barriers[id as usize].completed);
            return Ok(Flow::Visible);
        }
        Ok(Flow::Then(Wait::Barrier { id, generation }))
    }

    /// `bar.arrive`: the warp arrives as a whole and goes on.
    pub(super) fn bar_arrive(&mut self, id: Operand, threads: u32) -> Result<Flow, Box<Stop>> {
        converge!(self, !self.warp.exited);
        let id = self.barrier_id(id)?;
        if self.cta.barriers[id as usize].waiting >> self.warp.index & 1 == 1 {
            let message = format!("warp {} arrives at barrier {id}, at which it waits", self.warp.index);
            return Err(Stop::new(TrapKind::Mismatch, message));
        }
        self.bar_arrive_common(id, Some(threads))?;
        Ok(Flow::Visible)
    }

    fn barrier_id(&self, id: Operand) -> Result<u32, Box<Stop>> {
        let ids = self.r32(id)?;
        let first = ids[self.mask.trailing_zeros() as usize];
        if let Some(lane) = Lanes(self.mask).find(|lane| ids[*lane] != first) {
            let message = format!("lanes name different barriers, {first} and {}", ids[lane]);
            return Err(Stop::new(TrapKind::Mismatch, message).lane(lane as u32));
        }
        if first >= 16 {
            return Err(Stop::new(TrapKind::Operand, format!("barrier {first}, ids are below 16")));
        }
        Ok(first)
    }

    /// Counts the warp's arrival; whether the round ended.
    fn bar_arrive_common(&mut self, id: u32, threads: Option<u32>) -> Result<bool, Box<Stop>> {
        let barrier = &mut self.cta.barriers[id as usize];
        match barrier.first {
            None => (barrier.first, barrier.threads) = (Some(self.pc), threads),
            Some(first) if barrier.threads != threads => {
                let count = |n: Option<u32>| n.map_or("all threads".into(), |n| format!("{n} threads"));
                let message = format!(
                    "barrier {id} is for {} here and for {} at {}",
                    count(threads),
                    count(barrier.threads),
                    self.program.location(first)
                );
                return Err(Stop::new(TrapKind::Mismatch, message));
            }
            Some(_) => {}
        }
        // A barrier counts whole warps.
        barrier.arrived += LANES as u32;
        let expected = threads.unwrap_or(self.cta.live_warps * LANES as u32);
        if barrier.arrived > expected {
            let message = format!("{} threads arrive at barrier {id} of {expected}", barrier.arrived);
            return Err(Stop::new(TrapKind::Mismatch, message));
        }
        self.clock.release_into(ALL_LANES, &mut barrier.arriving);
        self.world.effects += 1;
        let done = barrier.advance(expected);
        if done {
            self.cta.events += 1;
        }
        Ok(done)
    }

    pub(super) fn mbar_init(&mut self, addr: Address, count: u32) -> Result<Flow, Box<Stop>> {
        let addresses = self.shared_addresses(addr)?;
        for lane in Lanes(self.mask) {
            let offset = self.mbar_offset(addresses[lane], lane)?;
            // The bytes must be nobody's: initialising is a write.
            self.record_mbar_write(offset, lane)?;
            let mut queue = self.cta.new_queue();
            let mut used = false;
            let result = self.cta.mbarriers.init(offset, count, || {
                used = true;
                queue.take().unwrap_or(crate::race::AgentId(u32::MAX))
            });
            match result {
                Ok(barrier) if barrier.queue().0 == u32::MAX => {
                    return Err(Stop::unsupported("more asynchronous queues than a CTA has"));
                }
                Ok(_) => {}
                Err(error) => return Err(self.mbar_fault(&error, offset, lane)),
            }
            if !used && let Some(queue) = queue {
                self.cta.return_queue(queue);
            }
            self.cta.shared.set_barrier(offset as usize, true);
            self.world.effects += 1;
        }
        Ok(Flow::Visible)
    }

    pub(super) fn mbar_inval(&mut self, addr: Address) -> Result<Flow, Box<Stop>> {
        let addresses = self.shared_addresses(addr)?;
        for lane in Lanes(self.mask) {
            let offset = self.mbar_offset(addresses[lane], lane)?;
            self.cta.mbarriers.invalidate(offset).map_err(|e| self.mbar_fault(&e, offset, lane))?;
            self.record_mbar_write(offset, lane)?;
            self.cta.shared.set_barrier(offset as usize, false);
            self.world.effects += 1;
        }
        Ok(Flow::Visible)
    }

    pub(super) fn mbar_arrive(&mut self, addr: Address, count: u32) -> Result<Flow, Box<Stop>> {
        let addresses = self.shared_addresses(addr)?;
        // Lanes that arrive at one barrier publish together; for others it is one lane each.
        for lane in Lanes(self.mask) {
            let offset = self.mbar_use(addresses[lane], lane)?;
            let barrier = self.cta.mbarriers.get_mut(offset);
            let done = barrier.and_then(|b| b.arrive(count, 1 << lane, self.clock));
            self.mbar_advanced(done, offset, lane)?;
        }
        Ok(Flow::Visible)
    }

    pub(super) fn mbar_arrive_expect_tx(&mut self, addr: Address, bytes: Operand) -> Result<Flow, Box<Stop>> {
        let addresses = self.shared_addresses(addr)?;
        let bytes = self.r32(bytes)?;
        for lane in Lanes(self.mask) {
            let offset = self.mbar_use(addresses[lane], lane)?;
            let barrier = self.cta.mbarriers.get_mut(offset);
            let done = barrier.and_then(|b| b.arrive_expect_tx(bytes[lane], 1 << lane, self.clock));
            self.mbar_advanced(done, offset, lane)?;
        }
        Ok(Flow::Visible)
    }

    pub(super) fn mbar_expect_tx(&mut self, addr: Address, bytes: Operand) -> Result<Flow, Box<Stop>> {
        let addresses = self.shared_addresses(addr)?;
        let bytes = self.r32(bytes)?;
        for lane in Lanes(self.mask) {
            let offset = self.mbar_use(addresses[lane], lane)?;
            let done = self.cta.mbarriers.get_mut(offset).and_then(|b| b.expect_tx(bytes[lane]));
            self.mbar_advanced(done, offset, lane)?;
        }
        Ok(Flow::Visible)
    }

    /// `try_wait` (which suspends) and `test_wait`.
    pub(super) fn mbar_wait(
        &mut self,
        dst: RegId,
        addr: Address,
        parity: Operand,
        scope: Scope,
        suspend: bool,
    ) -> Result<Flow, Box<Stop>> {
        let addresses = self.shared_addresses(addr)?;
        let parity = self.r32(parity)?;
        let mut complete = 0u32;
        for lane in Lanes(self.mask) {
            let offset = self.mbar_use(addresses[lane], lane)?;
            let barrier = self.cta.mbarriers.get(offset).map_err(|e| self.mbar_fault(&e, offset, lane))?;
            if barrier.test_wait(parity[lane], scope, self.clock) {
                complete |= 1 << lane;
            }
        }
        let timed_out = std::mem::take(&mut self.warp.timed_out);
        if suspend && complete == 0 && !timed_out {
            return Ok(Flow::Retry(Wait::Event { seen: self.cta.events }));
        }
        self.warp.polled |= complete != self.mask;
        self.world.polls += u64::from(!suspend);
        self.w_pred(dst, complete)?;
        Ok(Flow::Visible)
    }

    /// Counts the phase that an arrival completed, or makes its error a fault.
    pub(super) fn mbar_advanced(
        &mut self,
        done: Result<bool, MbarrierError>,
        offset: u32,
        lane: usize,
    ) -> Result<(), Box<Stop>> {
        if done.map_err(|e| self.mbar_fault(&e, offset, lane))? {
            self.cta.events += 1;
        }
        self.world.effects += 1;
        Ok(())
    }

    /// Byte offset of an mbarrier operand.
    pub(super) fn mbar_offset(&self, address: u32, lane: usize) -> Result<u32, Box<Stop>> {
        let offset = self
            .cta
            .shared
            .offset(&self.program.ir, address, crate::mbarrier::MBARRIER_BYTES)
            .map_err(|stop| stop.lane(lane as u32))?;
        if !offset.is_multiple_of(8) {
            return Err(self.mbar_fault(&MbarrierError::Misaligned, offset as u32, lane));
        }
        Ok(offset as u32)
    }

    /// As [`mbar_offset`](Self::mbar_offset) for a use of an initialised barrier, which must be ordered after its
    /// initialisation.
    pub(super) fn mbar_use(&mut self, address: u32, lane: usize) -> Result<u32, Box<Stop>> {
        let offset = self.mbar_offset(address, lane)?;
        let who = crate::race::Access::generic(self.clock, lane as u8, self.pc, ptx::Sem::Weak);
        self.cta
            .shadow
            .check_read(offset.into(), crate::mbarrier::MBARRIER_BYTES, &who, self.clock)
            .map_err(|race| self.shared_race(&race))?;
        Ok(offset)
    }

    fn record_mbar_write(&mut self, offset: u32, lane: usize) -> Result<(), Box<Stop>> {
        let who = crate::race::Access::generic(self.clock, lane as u8, self.pc, ptx::Sem::Weak);
        self.cta
            .shadow
            .check_write(offset.into(), crate::mbarrier::MBARRIER_BYTES, &who, self.clock)
            .map_err(|race| self.shared_race(&race))
    }

    #[cold]
    pub(super) fn mbar_fault(&self, error: &MbarrierError, offset: u32, lane: usize) -> Box<Stop> {
        mbar_fault(&self.program.ir, error, offset).lane(lane as u32)
    }
}

/// An mbarrier error as a fault.
pub(crate) fn mbar_fault(ir: &ptx::KernelIr, error: &MbarrierError, offset: u32) -> Box<Stop> {
    let kind = match error {
        MbarrierError::Misaligned => TrapKind::Misaligned,
        MbarrierError::TxOverflow(_) | MbarrierError::PendingTx { .. } => TrapKind::ExpectTx,
        MbarrierError::NotInitialised
        | MbarrierError::AlreadyInitialised
        | MbarrierError::BadCount(_)
        | MbarrierError::TooManyArrivals { .. } => TrapKind::Mbarrier,
    };
    Stop::new(kind, format!("{error}: {}", crate::shared::field(ir, offset as usize)))
        .address(u64::from(crate::shared::BASE + offset))
}

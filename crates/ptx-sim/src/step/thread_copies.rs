//! `cp.async`: copies of 16 bytes in groups of the issuing thread.
//!
//! Until the thread has waited for a copy nobody may touch its destination; by then it has completed, early or late by
//! seed. From the wait on it is an ordinary write of that thread: other lanes need a warp barrier, other warps a CTA
//! barrier, and asynchronous reads the proxy fence.

use std::collections::BTreeMap;

use ptx::Sem;
use ptx::op::Address;

use super::memory::{global_race, misaligned};
use super::{Exec, Flow, Step};
use crate::block::{Cta, Issuer, Piece, ThreadCopies, ThreadCopy};
use crate::memory::GlobalMemory;
use crate::race::{Access, AgentId, Proxy};
use crate::registers::Lanes;
use crate::trap::{Stop, TrapKind};

/// Bytes of a copy, and the alignment of both its ends.
const BYTES: u32 = 16;

impl Exec<'_> {
    pub(super) fn cp_async(&mut self, dst: Address, src: Address) -> Result<Flow, Box<Stop>> {
        let destinations = self.shared_addresses(dst)?;
        let sources = self.global_addresses(src)?;
        self.deliver_followed(&sources, BYTES);
        let queue = self.copy_queue()?;
        for lane in Lanes(self.mask) {
            let of_lane = |stop: Box<Stop>| stop.lane(lane as u32);
            let (shared, address) = (destinations[lane], sources[lane]);
            let offset = self.cta.shared.offset(&self.program.ir, shared, BYTES).map_err(of_lane)? as u32;
            if let Some(odd) = [u64::from(shared), address].into_iter().find(|x| x % u64::from(BYTES) != 0) {
                return Err(misaligned(odd, BYTES, lane));
            }
            let copies = self.cta.thread_copies.entry(self.warp.index * 32 + lane as u32).or_default();
            let (lane8, epoch) = (lane as u8, copies.epoch());
            let generic = Access::generic(self.clock, lane8, self.pc, Sem::Weak);
            let who = Access { agent: queue, epoch, proxy: Proxy::Generic, ..generic };
            let place = self.world.memory.place(address, BYTES.into()).map_err(of_lane)?;
            let a = self.world.memory.at_mut(place);
            a.shadow
                .check_read(place.offset as u64, BYTES, &who, self.clock)
                .map_err(|race| of_lane(global_race(a.base, &race)))?;
            self.cta
                .shadow
                .check_write(offset.into(), BYTES, &who, self.clock)
                .map_err(|race| of_lane(self.shared_race(&race)))?;
            let range = offset as usize..(offset + BYTES) as usize;
            self.cta.shared.expect(&self.program.ir, range).map_err(of_lane)?;
            let mut copy = ThreadCopy {
                issuer: self.issuer(lane),
                piece: Piece { offset, len: BYTES, address: Some(address) },
                arrived: false,
            };
            if self.world.completes_at_once() {
                arrive(self.cta, &mut self.world.memory, &mut copy)?;
            }
            self.cta.thread_copies.entry(self.warp.index * 32 + lane as u32).or_default().open.push(copy);
            self.world.effects += 1;
        }
        Ok(Flow::Visible)
    }

    /// The asynchronous queue of the warp's copies; its batches are each lane's groups.
    fn copy_queue(&mut self) -> Result<AgentId, Box<Stop>> {
        let warp = self.warp.index;
        if let Some(queue) = self.cta.copy_queues.get(&warp) {
            return Ok(*queue);
        }
        let queue = self.cta.new_queue().ok_or_else(|| Stop::unsupported("more asynchronous queues than a CTA has"))?;
        self.cta.copy_queues.insert(warp, queue);
        Ok(queue)
    }

    pub(super) fn cp_async_commit(&mut self) -> Result<Flow, Box<Stop>> {
        for lane in Lanes(self.mask) {
            let copies = self.cta.thread_copies.entry(self.warp.index * 32 + lane as u32).or_default();
            let group = std::mem::take(&mut copies.open);
            copies.groups.push_back(group);
        }
        Ok(Flow::Next)
    }

    /// Waits for the threads' groups, which complete in the wait at the latest.
    pub(super) fn cp_async_wait(&mut self, pending: u32) -> Result<Flow, Box<Stop>> {
        let Some(queue) = self.cta.copy_queues.get(&self.warp.index).copied() else { return Ok(Flow::Next) };
        let mut waited: BTreeMap<u32, u32> = BTreeMap::new();
        let mut done = Vec::new();
        for lane in Lanes(self.mask) {
            let Some(copies) = self.cta.thread_copies.get_mut(&(self.warp.index * 32 + lane as u32)) else { continue };
            let count = copies.groups.len().saturating_sub(pending as usize);
            if count > 0 {
                copies.first += count as u32;
                *waited.entry(copies.first - 1).or_default() |= 1 << lane;
                done.extend(copies.groups.drain(..count).flatten());
            }
        }
        for (group, lanes) in waited {
            self.clock.observe_lanes(queue, group, lanes);
        }
        for mut copy in done {
            let Issuer { lane, pc, .. } = copy.issuer;
            arrive(self.cta, &mut self.world.memory, &mut copy)?;
            let who = Access::generic(self.clock, lane as u8, pc, Sem::Weak);
            self.cta
                .shadow
                .check_write(copy.piece.offset.into(), BYTES, &who, self.clock)
                .map_err(|race| self.shared_race(&race).issued_by(copy.issuer))?;
            self.world.effects += 1;
        }
        Ok(Flow::Visible)
    }
}

/// The bytes of a copy arrive, if they have not.
fn arrive(cta: &mut Cta, memory: &mut GlobalMemory, copy: &mut ThreadCopy) -> Step {
    if !std::mem::replace(&mut copy.arrived, true) {
        let mut bytes = [0; BYTES as usize];
        let address = copy.piece.address.expect("a copy has a source");
        memory.read_checked(address, &mut bytes).map_err(|stop| stop.issued_by(copy.issuer))?;
        cta.shared.arrive(copy.piece.offset as usize, &bytes);
    }
    Ok(())
}

/// What a CTA's end requires of its threads' copies: that each was waited for.
pub(super) fn check_exit(cta: &Cta, ir: &ptx::KernelIr) -> Step {
    match cta.thread_copies.values().find_map(ThreadCopies::oldest) {
        None => Ok(()),
        Some(copy) => {
            let field = crate::shared::field(ir, copy.piece.offset as usize);
            let message = format!("the CTA ends before a wait for a copy of {BYTES} bytes to {field}");
            Err(Stop::new(TrapKind::ExitInFlight, message).issued_by(copy.issuer))
        }
    }
}

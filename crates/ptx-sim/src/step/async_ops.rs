//! Bulk and tensor copies.

use ptx::TensorMapDesc;
use ptx::op::{Address, Operand, RegId};

use super::memory::global_race;
use super::sync::mbar_fault;
use super::{Exec, Flow, PARAM_BASE, Step};
use crate::block::{CopyIn, CopyOut, Cta, Piece, StoreQueue};
use crate::memory::GlobalMemory;
use crate::race::Access;
use crate::registers::Lanes;
use crate::shared::BASE;
use crate::tensor_copy::{TensorCopy, TensorCopyError};
use crate::trap::{Stop, TrapKind};

/// Alignment of both ends and of the size of a bulk copy.
const BULK_ALIGN: u64 = 16;

impl Exec<'_> {
    /// The tensor map that a lane names.
    pub(super) fn tensor_map(&mut self, map: RegId, lane: usize) -> Result<TensorMapDesc, Box<Stop>> {
        let address = self.r64(Operand::Reg(map))?[lane];
        let stop = |kind, message: &str| Err(Stop::new(kind, message).lane(lane as u32).address(address));
        if address % 64 != 0 {
            return stop(TrapKind::Misaligned, "address of a tensor map is not 64-byte aligned");
        }
        let mut bytes = [0u8; 128];
        match address.checked_sub(PARAM_BASE) {
            Some(offset) if offset + 128 <= self.launch.params.len() as u64 => {
                bytes.copy_from_slice(&self.launch.params[offset as usize..offset as usize + 128]);
            }
            _ => self.world.memory.read_checked(address, &mut bytes).map_err(|stop| stop.lane(lane as u32))?,
        }
        match TensorMapDesc::from_simulated(&bytes) {
            Some(map) => Ok(map),
            None => stop(TrapKind::Operand, "the bytes at this address are no tensor map"),
        }
    }

    pub(super) fn tensor_g2s(
        &mut self,
        dst: Address,
        map: RegId,
        coords: &[Operand],
        mbar: Address,
    ) -> Result<Flow, Box<Stop>> {
        let destinations = self.shared_addresses(dst)?;
        let barriers = self.shared_addresses(mbar)?;
        let coords = coords.iter().map(|c| self.r32(*c)).collect::<Result<Vec<_>, _>>()?;
        for lane in Lanes(self.mask) {
            let map = self.tensor_map(map, lane)?;
            let at: Vec<i32> = coords.iter().map(|c| c[lane] as i32).collect();
            let shared = destinations[lane];
            let copy = TensorCopy::new(&map, &at, shared).map_err(|error| {
                let kind = match error {
                    TensorCopyError::Misaligned { .. } => TrapKind::Misaligned,
                    TensorCopyError::Rank { .. } => TrapKind::Operand,
                };
                Stop::new(kind, error.to_string()).lane(lane as u32).address(shared.into())
            })?;
            let bytes = copy.bytes();
            let mut pieces = Vec::with_capacity(bytes as usize / 16);
            for piece in copy {
                let offset = self
                    .cta
                    .shared
                    .offset(&self.program.ir, piece.shared, piece.len)
                    .map_err(|stop| stop.lane(lane as u32))?;
                pieces.push(Piece { offset: offset as u32, len: piece.len, address: piece.global });
            }
            self.copy_in(lane, pieces, bytes, barriers[lane])?;
        }
        Ok(Flow::Visible)
    }

    pub(super) fn bulk_g2s(
        &mut self,
        dst: Address,
        src: Address,
        bytes: Operand,
        mbar: Address,
    ) -> Result<Flow, Box<Stop>> {
        let destinations = self.shared_addresses(dst)?;
        let sources = self.global_addresses(src)?;
        let barriers = self.shared_addresses(mbar)?;
        let bytes = self.r32(bytes)?;
        for lane in Lanes(self.mask) {
            let (shared, address, n) = (destinations[lane], sources[lane], bytes[lane]);
            check_bulk(shared, address, n, lane)?;
            let offset = self.cta.shared.offset(&self.program.ir, shared, n).map_err(|stop| stop.lane(lane as u32))?;
            let piece = Piece { offset: offset as u32, len: n, address: Some(address) };
            self.copy_in(lane, vec![piece], n, barriers[lane])?;
        }
        Ok(Flow::Visible)
    }

    /// Starts a copy to shared memory.
    fn copy_in(&mut self, lane: usize, pieces: Vec<Piece>, bytes: u32, mbar: u32) -> Step {
        let mbarrier = self.mbar_use(mbar, lane)?;
        let barrier = self.cta.mbarriers.get(mbarrier).map_err(|e| self.mbar_fault(&e, mbarrier, lane))?;
        let who = Access::asynchronous(barrier.queue(), barrier.epoch(), lane as u8, self.pc);
        let of_lane = |stop: Box<Stop>| stop.lane(lane as u32);
        for piece in &pieces {
            if let Some(address) = piece.address {
                let place = self.world.memory.place(address, piece.len.into()).map_err(of_lane)?;
                let a = self.world.memory.at_mut(place);
                a.shadow
                    .check_read(place.offset as u64, piece.len, &who, self.clock)
                    .map_err(|race| of_lane(global_race(a.base, &race)))?;
            }
            self.cta
                .shadow
                .check_write(piece.offset.into(), piece.len, &who, self.clock)
                .map_err(|race| of_lane(self.shared_race(&race)))?;
            let range = piece.offset as usize..(piece.offset + piece.len) as usize;
            self.cta.shared.expect(&self.program.ir, range).map_err(of_lane)?;
        }
        let copy = CopyIn { issuer: self.issuer(lane), pieces, payload: None, bytes, mbarrier };
        self.world.effects += 1;
        if self.world.completes_at_once() {
            complete_copy(self.cta, &mut self.world.memory, &self.program.ir, &copy)
        } else {
            self.cta.copies.push(copy);
            self.world.copies.push_back(self.here);
            Ok(())
        }
    }

    pub(super) fn bulk_s2g(&mut self, dst: Address, src: Address, bytes: Operand) -> Result<Flow, Box<Stop>> {
        let destinations = self.global_addresses(dst)?;
        let sources = self.shared_addresses(src)?;
        let bytes = self.r32(bytes)?;
        for lane in Lanes(self.mask) {
            let (shared, address, n) = (sources[lane], destinations[lane], bytes[lane]);
            let of_lane = |stop: Box<Stop>| stop.lane(lane as u32);
            check_bulk(shared, address, n, lane)?;
            let offset = self.cta.shared.offset(&self.program.ir, shared, n).map_err(of_lane)? as u32;
            let mut copy = CopyOut { issuer: self.issuer(lane), offset, len: n, address, bytes: None };
            self.cta.shared.check_async_read(&self.program.ir, copy.range()).map_err(of_lane)?;
            let thread = self.thread(lane);
            if !self.cta.stores.contains_key(&thread) {
                let all = || Stop::unsupported("more asynchronous queues than a CTA has");
                let queues = [self.cta.new_queue().ok_or_else(all)?, self.cta.new_queue().ok_or_else(all)?];
                let queue = StoreQueue { queues, first: 1, groups: Default::default(), open: Vec::new() };
                self.cta.stores.insert(thread, queue);
            }
            let queue = &self.cta.stores[&thread];
            let [reads, writes] = queue.queues.map(|q| Access::asynchronous(q, queue.epoch(), lane as u8, self.pc));
            self.cta
                .shadow
                .check_read(offset.into(), n, &reads, self.clock)
                .map_err(|race| of_lane(self.shared_race(&race)))?;
            let place = self.world.memory.place(address, n.into()).map_err(of_lane)?;
            let a = self.world.memory.at_mut(place);
            a.shadow
                .check_write(place.offset as u64, n, &writes, self.clock)
                .map_err(|race| of_lane(global_race(a.base, &race)))?;
            if self.world.completes_at_once() {
                self.world.memory.write_checked(address, self.cta.shared.bytes(copy.range())).map_err(of_lane)?;
                // Nothing is left to write.
                copy.bytes = Some(Vec::new());
            } else {
                self.cta.shared.set_leaving(copy.range(), true);
            }
            self.world.effects += 1;
            self.cta.stores.get_mut(&thread).expect("inserted above").open.push(copy);
        }
        Ok(Flow::Visible)
    }

    /// Number of a lane's thread in the CTA.
    fn thread(&self, lane: usize) -> u32 {
        self.warp.index * 32 + lane as u32
    }

    pub(super) fn bulk_commit(&mut self) -> Result<Flow, Box<Stop>> {
        for lane in Lanes(self.mask) {
            let thread = self.thread(lane);
            if let Some(queue) = self.cta.stores.get_mut(&thread) {
                let group = std::mem::take(&mut queue.open);
                queue.groups.push_back(group);
            }
        }
        Ok(Flow::Next)
    }

    /// Waits for bulk stores, which complete in the wait at the latest.
    pub(super) fn bulk_wait(&mut self, pending: u32, read: bool) -> Result<Flow, Box<Stop>> {
        for lane in Lanes(self.mask) {
            let thread = self.thread(lane);
            let Some(queue) = self.cta.stores.get_mut(&thread) else { continue };
            let count = queue.groups.len().saturating_sub(pending as usize);
            if count == 0 {
                continue;
            }
            let [reads, writes] = queue.queues;
            let last = queue.first + count as u32 - 1;
            self.clock.observe(reads, last);
            let mut released = Vec::new();
            for copy in queue.groups.iter_mut().take(count).flatten() {
                if copy.bytes.is_none() {
                    copy.bytes = Some(self.cta.shared.bytes(copy.range()).to_vec());
                    released.push(copy.range());
                }
            }
            if !read {
                self.clock.observe(writes, last);
                queue.first = last + 1;
                let groups: Vec<_> = queue.groups.drain(..count).collect();
                groups.iter().flatten().try_for_each(|copy| finish_store(&mut self.world.memory, copy))?;
            }
            self.world.effects += 1;
            self.cta.release_leaving(released.into_iter());
        }
        Ok(Flow::Visible)
    }
}

fn check_bulk(shared: u32, global: u64, bytes: u32, lane: usize) -> Step {
    let odd = [u64::from(shared), global, bytes.into()].into_iter().find(|x| x % BULK_ALIGN != 0);
    if odd.is_some() || bytes == 0 {
        let message = format!(
            "bulk copy of {bytes} bytes between shared {shared:#x} and global {global:#x}: \
             size and addresses must be multiples of {BULK_ALIGN}, the size positive"
        );
        return Err(Stop::new(TrapKind::Misaligned, message).lane(lane as u32).address(global));
    }
    Ok(())
}

/// The bytes of a copy to shared memory arrive.
pub(crate) fn complete_copy(cta: &mut Cta, memory: &mut GlobalMemory, ir: &ptx::KernelIr, copy: &CopyIn) -> Step {
    let mut buffer = Vec::new();
    for piece in &copy.pieces {
        buffer.clear();
        buffer.resize(piece.len as usize, 0);
        if let Some(payload) = &copy.payload {
            buffer.copy_from_slice(payload);
        } else if let Some(address) = piece.address {
            memory.read_checked(address, &mut buffer).map_err(|stop| stop.issued_by(copy.issuer))?;
        }
        cta.shared.arrive(piece.offset as usize, &buffer);
    }
    let done = cta.mbarriers.get_mut(copy.mbarrier).and_then(|b| match copy.payload {
        Some(_) => b.complete_store(copy.bytes),
        None => b.complete_tx(copy.bytes),
    });
    if done.map_err(|e| mbar_fault(ir, &e, copy.mbarrier).issued_by(copy.issuer))? {
        cta.events += 1;
    }
    Ok(())
}

/// Completes all bulk stores of a CTA; whether there was one under way.
pub(crate) fn complete_stores(cta: &mut Cta, memory: &mut GlobalMemory) -> Result<bool, Box<Stop>> {
    let mut released = Vec::new();
    let mut any = false;
    for queue in cta.stores.values_mut() {
        for copy in queue.groups.iter_mut().flatten().chain(&mut queue.open) {
            if copy.bytes.is_none() {
                released.push(copy.range());
                copy.bytes = Some(cta.shared.bytes(copy.range()).to_vec());
            }
            any |= copy.bytes.as_ref().is_some_and(|bytes| !bytes.is_empty());
            finish_store(memory, copy)?;
            // Nothing is left to write.
            copy.bytes = Some(Vec::new());
        }
    }
    cta.release_leaving(released.into_iter());
    Ok(any)
}

/// The bytes of a bulk store, read before, arrive in device memory.
pub(crate) fn finish_store(memory: &mut GlobalMemory, copy: &CopyOut) -> Step {
    match &copy.bytes {
        Some(bytes) => memory.write_checked(copy.address, bytes).map_err(|stop| stop.issued_by(copy.issuer)),
        None => Ok(()),
    }
}

/// What a CTA's end requires of its asynchronous operations; `BASE` turns offsets into addresses.
pub(crate) fn check_exit(cta: &mut Cta, memory: &mut GlobalMemory, ir: &ptx::KernelIr) -> Step {
    if let Some(copy) = cta.copies.first() {
        let field = crate::shared::field(ir, copy.pieces.first().map_or(0, |p| p.offset as usize));
        let message = format!("the CTA ends while a copy of {} bytes to {field} is under way", copy.bytes);
        let address = u64::from(BASE) + copy.pieces.first().map_or(0, |p| u64::from(p.offset));
        return Err(Stop::new(TrapKind::ExitInFlight, message).address(address).issued_by(copy.issuer));
    }
    super::thread_copies::check_exit(cta, ir)?;
    if let Err((offset, error)) = cta.mbarriers.check_exit() {
        return Err(mbar_fault(ir, &error, offset));
    }
    for warpgroup in &cta.warpgroups {
        if !warpgroup.is_idle() {
            let mut stop = Stop::new(TrapKind::ExitInFlight, "the CTA ends before a wait for its warpgroup MMAs");
            if let Some(mma) = warpgroup.mmas.front() {
                stop = stop.issued_by(mma.issuer);
            }
            return Err(stop);
        }
    }
    for queue in std::mem::take(&mut cta.stores).into_values() {
        for copy in queue.groups.iter().flatten().chain(&queue.open) {
            if copy.bytes.is_none() {
                let field = crate::shared::field(ir, copy.offset as usize);
                let message = format!("the CTA ends while a bulk store reads {} bytes from {field}", copy.len);
                return Err(Stop::new(TrapKind::ExitInFlight, message).issued_by(copy.issuer));
            }
            finish_store(memory, copy)?;
        }
    }
    Ok(())
}

//! Shared memory of other CTAs, and the barrier of the cluster.
//!
//! An address of CTA `r` is its own address plus `(r + 1) << 24`; without that, it is one of the executing CTA.

use ptx::op::{Address, Operand, RegId};
use ptx::slots::memory_class;
use ptx::{Class, Scope, Sem, Ty};

use super::async_ops::complete_copy;
use super::memory::{misaligned, shared_race};
use super::sync::mbar_fault;
use super::warp_ops::converge;
use super::{Exec, Flow, Step};
use crate::block::{CopyIn, Cta, Piece};
use crate::mbarrier::{MBARRIER_BYTES, MbarrierError};
use crate::race::{ALL_LANES, Access, Proxy};
use crate::registers::{LANES, Lanes};
use crate::trap::{Stop, TrapKind};
use crate::warp::Wait;
use crate::world::BlockRef;

/// log2 of the bytes between the shared memories of two ranks.
const WINDOW_SHIFT: u32 = 24;

impl Exec<'_> {
    pub(super) fn mapa(&mut self, dst: RegId, addr: RegId, rank: Operand) -> Step {
        let (addresses, ranks) = (self.r32(Operand::Reg(addr))?, self.r32(rank)?);
        let size = self.launch.agents.cluster;
        let mut mapped = [0; LANES];
        for lane in Lanes(self.mask) {
            let (address, rank) = (addresses[lane], ranks[lane]);
            if rank >= size {
                let message = format!("rank {rank} in a cluster of {size} CTAs");
                return Err(Stop::new(TrapKind::Operand, message).lane(lane as u32));
            }
            if address >> WINDOW_SHIFT != 0 {
                let message = format!("{address:#x} is no address in this CTA's shared memory");
                return Err(Stop::new(TrapKind::Operand, message).lane(lane as u32));
            }
            mapped[lane] = address | (rank + 1) << WINDOW_SHIFT;
        }
        self.w32(dst, &mapped)
    }

    /// Rank and address in that CTA's shared memory of a cluster address.
    fn locate(&self, address: u32, lane: usize) -> Result<(u32, u32), Box<Stop>> {
        match address >> WINDOW_SHIFT {
            0 => Ok((self.cta.rank, address)),
            n if n <= self.launch.agents.cluster => Ok((n - 1, address & ((1 << WINDOW_SHIFT) - 1))),
            _ => {
                let message = format!("{address:#x} lies in no CTA of the cluster");
                Err(Stop::new(TrapKind::OutOfBounds, message).lane(lane as u32).address(address.into()))
            }
        }
    }

    /// CTA `rank`, which must have started and not ended.
    fn target(&mut self, rank: u32, lane: usize) -> Result<&mut Cta, Box<Stop>> {
        let whose = || format!("the shared memory of CTA {rank} of the cluster");
        let own = rank == self.cta.rank;
        let Some(cta) = self.peers.cta(self.cta, rank) else {
            return Err(Stop::new(TrapKind::Freed, format!("access to {}, which has ended", whose())).lane(lane as u32));
        };
        if !own && !self.clock.knows(cta.agents.start(), 1) {
            let message = format!("access to {}: no cluster barrier orders it after that CTA's start", whose());
            return Err(Stop::new(TrapKind::DataRace, message).lane(lane as u32));
        }
        Ok(cta)
    }

    /// Rank and byte offset of an aligned access to shared memory of the cluster.
    fn place(&mut self, address: u32, size: u32, lane: usize) -> Result<(u32, usize), Box<Stop>> {
        let (rank, local) = self.locate(address, lane)?;
        let program = self.program;
        let cta = self.target(rank, lane)?;
        let offset = cta.shared.offset(&program.ir, local, size).map_err(|stop| stop.lane(lane as u32))?;
        if !local.is_multiple_of(size) {
            return Err(misaligned(address.into(), size, lane));
        }
        Ok((rank, offset))
    }

    pub(super) fn ld_cluster(&mut self, sem: Sem, addr: Address, size: u32, values: &mut [u128; LANES]) -> Step {
        weak_only(sem)?;
        let addresses = self.shared_addresses(addr)?;
        for lane in Lanes(self.mask) {
            let (rank, offset) = self.place(addresses[lane], size, lane)?;
            let who = Access::generic(self.clock, lane as u8, self.pc, sem);
            let (ir, clock) = (&self.program.ir, &*self.clock);
            let Some(cta) = self.peers.cta(self.cta, rank) else { continue };
            cta.shadow.check_read(offset as u64, size, &who, clock).map_err(|race| shared_race(ir, &race))?;
            values[lane] = cta.shared.load(ir, offset, size as usize).map_err(|stop| stop.lane(lane as u32))?;
        }
        Ok(())
    }

    pub(super) fn st_cluster(&mut self, sem: Sem, addr: Address, size: u32, values: &[u128; LANES]) -> Step {
        weak_only(sem)?;
        let addresses = self.shared_addresses(addr)?;
        for lane in Lanes(self.mask) {
            let (rank, offset) = self.place(addresses[lane], size, lane)?;
            let who = Access::generic(self.clock, lane as u8, self.pc, sem);
            let (ir, clock) = (&self.program.ir, &*self.clock);
            let Some(cta) = self.peers.cta(self.cta, rank) else { continue };
            cta.shadow.check_write(offset as u64, size, &who, clock).map_err(|race| shared_race(ir, &race))?;
            let changed = cta.shared.store(ir, offset, size as usize, values[lane]);
            self.world.effects += u64::from(changed.map_err(|stop| stop.lane(lane as u32))?);
        }
        Ok(())
    }

    /// An asynchronous store: its bytes arrive later and complete on the target's mbarrier.
    pub(super) fn st_async(
        &mut self,
        ty: Ty,
        srcs: &[Operand],
        addr: Address,
        mbar: Address,
    ) -> Result<Flow, Box<Stop>> {
        let size = ty.bytes() * srcs.len() as u32;
        let mut payloads: [Vec<u8>; LANES] = std::array::from_fn(|_| Vec::with_capacity(size as usize));
        for src in srcs {
            if memory_class(ty) == Class::B64 {
                let values = self.r64(*src)?;
                payloads.iter_mut().zip(values).for_each(|(p, v)| p.extend(v.to_le_bytes()));
            } else {
                let values = self.r32(*src)?;
                payloads.iter_mut().zip(values).for_each(|(p, v)| p.extend(v.to_le_bytes()));
            }
        }
        let (addresses, barriers) = (self.shared_addresses(addr)?, self.shared_addresses(mbar)?);
        self.release_to(&barriers)?;
        for lane in Lanes(self.mask) {
            let of_lane = |stop: Box<Stop>| stop.lane(lane as u32);
            let (rank, offset) = self.place(addresses[lane], size, lane)?;
            let (barrier_rank, mbarrier) = self.place(barriers[lane], MBARRIER_BYTES, lane)?;
            if rank != barrier_rank {
                let message = format!("data for CTA {rank} of the cluster, but the mbarrier of CTA {barrier_rank}");
                return Err(of_lane(Stop::new(TrapKind::Operand, message)));
            }
            let user = Access::generic(self.clock, lane as u8, self.pc, Sem::Weak);
            let issuer = self.issuer(lane);
            let target = BlockRef { block: self.here.block - self.cta.rank + rank, ..self.here };
            let (ir, clock) = (&self.program.ir, &*self.clock);
            let Some(cta) = self.peers.cta(self.cta, rank) else { continue };
            let race = |race: Box<_>| of_lane(shared_race(ir, &race));
            let misuse = |e: MbarrierError| of_lane(mbar_fault(ir, &e, mbarrier as u32));
            let barrier = cta.mbarriers.get(mbarrier as u32).map_err(misuse)?;
            let (agent, epoch) = (barrier.queue(), barrier.epoch());
            let who = Access { agent, epoch, proxy: Proxy::Generic, ..user };
            // After its initialisation; over when the phase is.
            cta.shadow.check_read(mbarrier as u64, MBARRIER_BYTES, &who, clock).map_err(race)?;
            cta.shadow.check_write(offset as u64, size, &who, clock).map_err(race)?;
            cta.shared.expect(ir, offset..offset + size as usize).map_err(of_lane)?;
            let copy = CopyIn {
                issuer,
                pieces: vec![Piece { offset: offset as u32, len: size, address: None }],
                payload: Some(std::mem::take(&mut payloads[lane])),
                bytes: size,
                mbarrier: mbarrier as u32,
            };
            self.world.effects += 1;
            if self.world.completes_at_once() {
                complete_copy(cta, &mut self.world.memory, ir, &copy)?;
                self.world.woken.push(target);
            } else {
                cta.copies.push(copy);
                self.world.copies.push_back(target);
            }
        }
        Ok(Flow::Visible)
    }

    /// What comes before asynchronous stores is released by their completion on mbarriers: lanes with the same one together.
    fn release_to(&mut self, barriers: &[u32; LANES]) -> Step {
        let mut rest = self.mask;
        while rest != 0 {
            let first = rest.trailing_zeros() as usize;
            let same = Lanes(rest).filter(|lane| barriers[*lane] == barriers[first]);
            let lanes = same.fold(0, |lanes, lane| lanes | 1 << lane);
            rest &= !lanes;
            let (rank, mbarrier) = self.place(barriers[first], MBARRIER_BYTES, first)?;
            let ir = &self.program.ir;
            let Some(cta) = self.peers.cta(self.cta, rank) else { continue };
            let barrier = cta.mbarriers.get_mut(mbarrier as u32);
            let misuse = |e: MbarrierError| mbar_fault(ir, &e, mbarrier as u32).lane(first as u32);
            barrier.map_err(misuse)?.store(lanes, self.clock);
        }
        Ok(())
    }

    /// `fence.mbarrier_init`: what it covers travels with a relaxed arrival at the cluster's barrier.
    pub(super) fn fence_mbarrier_init(&mut self) -> Result<Flow, Box<Stop>> {
        if self.launch.agents.cluster > 1 {
            let mask = self.mask;
            self.clock.release_into(mask, &mut self.cta.init_fenced);
        }
        Ok(Flow::Visible)
    }

    pub(super) fn cluster_arrive(&mut self, release: bool) -> Result<Flow, Box<Stop>> {
        converge!(self, !self.warp.exited);
        if self.warp.cluster_arrival.is_some() {
            let message = "the warp arrives at the barrier of the cluster again without having waited";
            return Err(Stop::new(TrapKind::Mismatch, message));
        }
        let arriving = &mut self.cluster.arriving;
        if release {
            self.clock.release_into(ALL_LANES, arriving);
        } else {
            self.clock.release_fenced_into(Scope::Cluster, arriving);
            arriving.join(&self.cta.init_fenced);
        }
        arriving.observe(self.cta.agents.start(), 1);
        self.warp.cluster_arrival = Some(self.cluster.generation);
        self.cluster.arrived += 1;
        self.world.effects += 1;
        if self.cluster.advance() {
            let first = self.here.block - self.cta.rank;
            let blocks = first..first + self.launch.agents.cluster;
            self.world.woken.extend(blocks.map(|block| BlockRef { block, ..self.here }));
        }
        Ok(Flow::Visible)
    }

    pub(super) fn cluster_wait(&mut self) -> Result<Flow, Box<Stop>> {
        converge!(self, !self.warp.exited);
        let Some(generation) = self.warp.cluster_arrival else {
            let message = "the warp waits at the barrier of the cluster without having arrived";
            return Err(Stop::new(TrapKind::Mismatch, message));
        };
        if self.cluster.generation == generation {
            return Ok(Flow::Then(Wait::Cluster { generation }));
        }
        self.pass_cluster_barrier();
        Ok(Flow::Visible)
    }

    /// The wait at the cluster's barrier is over.
    pub(super) fn pass_cluster_barrier(&mut self) {
        self.clock.acquire(&self.cluster.completed);
        self.warp.cluster_arrival = None;
    }
}

fn weak_only(sem: Sem) -> Step {
    match sem {
        Sem::Weak => Ok(()),
        _ => Err(Stop::unsupported(format!("a {sem:?} access to shared memory of the cluster"))),
    }
}

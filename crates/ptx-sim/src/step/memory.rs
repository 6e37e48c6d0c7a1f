//! Loads, stores and atomics.

use ptx::op::{Address, Atomic, Operand, RegId, Space};
use ptx::slots::memory_class;
use ptx::{Class, Scope, Sem, Ty};

use super::{Exec, Step};
use crate::delayed::Store;
use crate::memory::Place;
use crate::numeric::{bf16, float};
use crate::race::{Access, Missing, Race};
use crate::registers::{LANES, Lanes};
use crate::trap::{Stop, TrapKind};
use crate::world::World;

/// Addresses of the active lanes.
type Addresses = [u64; LANES];

impl Exec<'_> {
    /// Byte addresses of a shared access.
    #[inline(always)]
    pub(super) fn shared_addresses(&self, addr: Address) -> Result<[u32; LANES], Box<Stop>> {
        let mut a = self.r32(addr.base)?;
        a.iter_mut().for_each(|a| *a = a.wrapping_add(addr.offset as u32));
        Ok(a)
    }

    /// Byte addresses of a global access.
    #[inline(always)]
    pub(super) fn global_addresses(&self, addr: Address) -> Result<Addresses, Box<Stop>> {
        let mut a = self.r64(addr.base)?;
        a.iter_mut().for_each(|a| *a = a.wrapping_add(addr.offset as i64 as u64));
        Ok(a)
    }

    /// Checks alignment and finds the byte offsets of a shared access.
    #[inline(always)]
    fn shared_offsets(&self, addr: Address, size: u32) -> Result<Addresses, Box<Stop>> {
        let addresses = self.shared_addresses(addr)?;
        let mut offsets = [0; LANES];
        for lane in Lanes(self.mask) {
            let a = addresses[lane];
            let offset = self.cta.shared.offset(&self.program.ir, a, size).map_err(|stop| stop.lane(lane as u32))?;
            // Sizes are powers of two.
            if a & (size - 1) != 0 {
                return Err(misaligned(a.into(), size, lane));
            }
            offsets[lane] = offset as u64;
        }
        Ok(offsets)
    }

    /// Finds the place of a global access of some lanes: those in the same allocation as the first of `lanes`.
    /// Returns that allocation, the lanes, and their offsets in it.
    #[inline(always)]
    fn global_places(
        &mut self,
        addresses: &Addresses,
        lanes: u32,
        size: u32,
    ) -> Result<(Place, u32, Addresses), Box<Stop>> {
        let first = lanes.trailing_zeros() as usize;
        let place = self.world.memory.place(addresses[first], size.into()).map_err(|stop| stop.lane(first as u32))?;
        let (base, len) = {
            let a = self.world.memory.at(place);
            (a.base, a.len)
        };
        let mut offsets = [0; LANES];
        let mut same = 0;
        for lane in Lanes(lanes) {
            let offset = addresses[lane].wrapping_sub(base);
            if offset < len && u64::from(size) <= len - offset {
                if addresses[lane] & u64::from(size - 1) != 0 {
                    return Err(misaligned(addresses[lane], size, lane));
                }
                offsets[lane] = offset;
                same |= 1 << lane;
            }
        }
        Ok((place, same, offsets))
    }

    /// Load of consecutive elements.
    pub(super) fn ld(&mut self, space: Space, ty: Ty, sem: Sem, dsts: &[RegId], addr: Address) -> Step {
        let size = ty.bytes() * dsts.len() as u32;
        let mut values = [0u128; LANES];
        if sem != Sem::Weak {
            self.observe();
        }
        let who = Access::generic(self.clock, 0, self.pc, sem);
        match space {
            Space::Shared => {
                let offsets = self.shared_offsets(addr, size)?;
                self.cta
                    .shadow
                    .check_warp_read(&offsets, self.mask, size, &who, self.clock)
                    .map_err(|race| self.shared_race(&race))?;
                for lane in Lanes(self.mask) {
                    values[lane] = self
                        .cta
                        .shared
                        .load(&self.program.ir, offsets[lane] as usize, size as usize)
                        .map_err(|stop| stop.lane(lane as u32))?;
                    if sem != Sem::Weak {
                        self.cta.shadow.sync_load(offsets[lane], size, sem, self.clock);
                    }
                }
            }
            Space::Cluster => self.ld_cluster(sem, addr, size, &mut values)?,
            Space::Global => {
                let addresses = self.global_addresses(addr)?;
                self.deliver_followed(&addresses, size);
                let mut left = self.mask;
                while left != 0 {
                    let (place, lanes, offsets) = self.global_places(&addresses, left, size)?;
                    left &= !lanes;
                    let a = self.world.memory.at_mut(place);
                    for lane in Lanes(lanes) {
                        values[lane] =
                            a.load(offsets[lane] as usize, size as usize).map_err(|stop| stop.lane(lane as u32))?;
                    }
                    a.shadow
                        .check_warp_read(&offsets, lanes, size, &who, self.clock)
                        .map_err(|race| global_race(a.base, &race))?;
                    if sem != Sem::Weak {
                        for lane in Lanes(lanes) {
                            a.shadow.sync_load(offsets[lane], size, sem, self.clock);
                        }
                    }
                }
            }
        }
        let bits = 8 * ty.bytes();
        for (i, dst) in dsts.iter().enumerate() {
            let shift = bits * i as u32;
            if ty.bytes() == 8 {
                self.w64(*dst, &std::array::from_fn(|lane| (values[lane] >> shift) as u64))?;
            } else {
                let keep = u32::MAX >> (32 - bits);
                self.w32(*dst, &std::array::from_fn(|lane| (values[lane] >> shift) as u32 & keep))?;
            }
        }
        Ok(())
    }

    /// Store of consecutive elements; whether it has been done entirely. In a random schedule a strong 16-byte store is
    /// done in two halves, in either order, between which other warps run: only 8 bytes are sure to stay together.
    pub(super) fn st(
        &mut self,
        space: Space,
        ty: Ty,
        sem: Sem,
        srcs: &[Operand],
        addr: Address,
    ) -> Result<bool, Box<Stop>> {
        let mut size = ty.bytes() * srcs.len() as u32;
        let bits = 8 * ty.bytes();
        let mut values = [0u128; LANES];
        for (i, src) in srcs.iter().enumerate() {
            let shift = bits * i as u32;
            match memory_class(ty) {
                Class::B64 => {
                    let v = self.r64(*src)?;
                    for lane in 0..LANES {
                        values[lane] |= u128::from(v[lane]) << shift;
                    }
                }
                Class::B32 => {
                    let v = self.r32(*src)?;
                    let keep = u32::MAX >> (32 - bits);
                    for lane in 0..LANES {
                        values[lane] |= u128::from(v[lane] & keep) << shift;
                    }
                }
                Class::B16 | Class::Pred => return Err(Stop::unsupported(format!("St of {ty:?}"))),
            }
        }
        let who = Access::generic(self.clock, 0, self.pc, sem);
        let mut whole = true;
        match space {
            Space::Shared => {
                let offsets = self.shared_offsets(addr, size)?;
                let mut rest = self.mask;
                while let Err(race) = self.cta.shadow.check_warp_write(&offsets, rest, size, &who, self.clock) {
                    rest = past_benign(&race, rest, &offsets, &values, &who).ok_or_else(|| self.shared_race(&race))?;
                }
                let sync = self.cta.shadow.needs_sync(sem, self.clock);
                for lane in Lanes(self.mask) {
                    let changed = self
                        .cta
                        .shared
                        .store(&self.program.ir, offsets[lane] as usize, size as usize, values[lane])
                        .map_err(|stop| stop.lane(lane as u32))?;
                    self.world.effects += u64::from(changed);
                    if sync {
                        self.cta.shadow.sync_store(offsets[lane], size, sem, lane as u8, self.clock);
                    }
                }
            }
            Space::Cluster => self.st_cluster(sem, addr, size, &values)?,
            Space::Global => {
                let mut addresses = self.global_addresses(addr)?;
                if size == 16
                    && sem != Sem::Weak
                    && let Some(random) = &mut self.random
                {
                    let half = match self.warp.half_stored.take() {
                        Some(first) => 1 - first,
                        None => {
                            let first = random.below(2) as u32;
                            self.warp.half_stored = Some(first);
                            first
                        }
                    };
                    for lane in Lanes(self.mask) {
                        if addresses[lane] % 16 != 0 {
                            return Err(misaligned(addresses[lane], size, lane));
                        }
                        addresses[lane] += 8 * u64::from(half);
                        values[lane] = values[lane] >> (64 * half) & u128::from(u64::MAX);
                    }
                    size = 8;
                    whole = self.warp.half_stored.is_none();
                }
                let travels = self.random.is_some() && matches!(sem, Sem::Relaxed(_) | Sem::Volatile) && size <= 8;
                if !travels {
                    self.deliver_followed(&addresses, size);
                }
                if releases_to_all(sem) {
                    self.deliver_released();
                }
                let mut left = self.mask;
                while left != 0 {
                    let (place, lanes, offsets) = self.global_places(&addresses, left, size)?;
                    left &= !lanes;
                    let travels = travels && place.device() != self.launch.device;
                    let a = self.world.memory.at_mut(place);
                    let mut rest = lanes;
                    while let Err(race) = a.shadow.check_warp_write(&offsets, rest, size, &who, self.clock) {
                        rest = past_benign(&race, rest, &offsets, &values, &who)
                            .ok_or_else(|| global_race(a.base, &race))?;
                    }
                    let sync = a.shadow.needs_sync(sem, self.clock);
                    for lane in Lanes(lanes) {
                        if travels {
                            self.world.delayed.send(Store {
                                address: addresses[lane],
                                bytes: size,
                                value: values[lane] as u64,
                                agent: who.agent,
                                epoch: who.epoch,
                                lane: lane as u8,
                                block: self.here,
                            });
                            self.world.effects += 1;
                        } else {
                            let changed = a.store(offsets[lane] as usize, size as usize, values[lane]);
                            self.world.effects += u64::from(changed);
                        }
                        if sync {
                            a.shadow.sync_store(offsets[lane], size, sem, lane as u8, self.clock);
                        }
                    }
                }
            }
        }
        Ok(whole)
    }

    /// Atomic read-modify-write.
    #[allow(clippy::too_many_arguments)] // the instruction's own fields
    pub(super) fn atom(
        &mut self,
        space: Space,
        op: Atomic,
        ty: Ty,
        sem: Sem,
        dst: Option<RegId>,
        addr: Address,
        a: Operand,
        b: Option<Operand>,
    ) -> Step {
        let size = ty.bytes();
        let wide = |exec: &Self, o: Operand| -> Result<[u64; LANES], Box<Stop>> {
            if size == 8 { exec.r64(o) } else { Ok(exec.r32(o)?.map(u64::from)) }
        };
        let x = wide(self, a)?;
        let y = match b {
            Some(b) => wide(self, b)?,
            None => [0; LANES],
        };
        self.observe();
        let mut old = [0u64; LANES];
        match space {
            Space::Shared => {
                let offsets = self.shared_offsets(addr, size)?;
                for lane in Lanes(self.mask) {
                    let offset = offsets[lane];
                    let who = Access::generic(self.clock, lane as u8, self.pc, sem);
                    self.cta
                        .shadow
                        .check_write(offset, size, &who, self.clock)
                        .map_err(|race| self.shared_race(&race))?;
                    let ir = &self.program.ir;
                    let memory = &mut self.cta.shared;
                    let was = memory.load(ir, offset as usize, size as usize).map_err(|s| s.lane(lane as u32))? as u64;
                    let new = modify(op, ty, was, x[lane], y[lane])?;
                    let changed = memory
                        .store(ir, offset as usize, size as usize, new.into())
                        .map_err(|s| s.lane(lane as u32))?;
                    self.world.effects += u64::from(changed);
                    self.cta.shadow.sync_atomic(offset, size, sem, lane as u8, self.clock);
                    old[lane] = was;
                }
            }
            Space::Cluster => return Err(Stop::unsupported(format!("atomic {op:?} on shared memory of the cluster"))),
            Space::Global => {
                let addresses = self.global_addresses(addr)?;
                self.deliver_followed(&addresses, size);
                if releases_to_all(sem) {
                    self.deliver_released();
                }
                for lane in Lanes(self.mask) {
                    let (place, _, offsets) = self.global_places(&addresses, 1 << lane, size)?;
                    let offset = offsets[lane];
                    let who = Access::generic(self.clock, lane as u8, self.pc, sem);
                    let a = self.world.memory.at_mut(place);
                    let was = a.load(offset as usize, size as usize).map_err(|s| s.lane(lane as u32))? as u64;
                    a.shadow.check_write(offset, size, &who, self.clock).map_err(|race| global_race(a.base, &race))?;
                    let new = modify(op, ty, was, x[lane], y[lane])?;
                    let changed = a.store(offset as usize, size as usize, new.into());
                    self.world.effects += u64::from(changed);
                    a.shadow.sync_atomic(offset, size, sem, lane as u8, self.clock);
                    old[lane] = was;
                }
            }
        }
        match dst {
            None => Ok(()),
            Some(dst) if size == 8 => self.w64(dst, &old),
            Some(dst) => self.w32(dst, &old.map(|v| v as u32)),
        }
    }

    /// Stores under way to the bytes of an access that follows them arrive before it.
    #[inline(always)]
    pub(super) fn deliver_followed(&mut self, addresses: &Addresses, size: u32) {
        if !self.world.delayed.is_empty() {
            self.deliver_followed_slow(addresses, size);
        }
    }

    #[cold]
    fn deliver_followed_slow(&mut self, addresses: &Addresses, size: u32) {
        let World { delayed, memory, effects, .. } = &mut *self.world;
        for lane in Lanes(self.mask) {
            let follows = |store: &Store| self.clock.follows(store.agent, store.epoch, store.lane);
            *effects += u64::from(delayed.deliver_at(addresses[lane], size, follows, memory));
        }
    }

    /// Every store under way that happened before a release at system scope arrives before it.
    pub(super) fn deliver_released(&mut self) {
        let World { delayed, memory, effects, .. } = &mut *self.world;
        if !delayed.is_empty() {
            let follows = |store: &Store| self.clock.follows(store.agent, store.epoch, store.lane);
            *effects += u64::from(delayed.deliver(follows, memory));
        }
    }

    /// An L2 prefetch: only its operands are checked.
    pub(super) fn prefetch_l2(&mut self, addr: Address, bytes: Operand) -> Step {
        let addresses = self.global_addresses(addr)?;
        let bytes = self.r32(bytes)?;
        for lane in Lanes(self.mask) {
            let (address, n) = (addresses[lane], bytes[lane]);
            if n == 0 {
                continue;
            }
            if n % 16 != 0 || address % 16 != 0 {
                let message = format!("prefetch of {n} bytes: size and address must be multiples of 16");
                return Err(Stop::new(TrapKind::Misaligned, message).lane(lane as u32).address(address));
            }
            self.world.memory.place(address, n.into()).map_err(|stop| stop.lane(lane as u32))?;
        }
        Ok(())
    }

    /// A race in shared memory as a fault.
    #[cold]
    pub(super) fn shared_race(&self, race: &Race) -> Box<Stop> {
        shared_race(&self.program.ir, race)
    }
}

/// A race in some CTA's shared memory as a fault.
#[cold]
pub(super) fn shared_race(ir: &ptx::KernelIr, race: &Race) -> Box<Stop> {
    let stop = race_stop(race, &crate::shared::field(ir, race.offset as usize));
    stop.address(u64::from(crate::shared::BASE) + race.offset)
}

/// Whether an access releases to every device.
fn releases_to_all(sem: Sem) -> bool {
    matches!(sem, Sem::Release(Scope::Sys) | Sem::AcqRel(Scope::Sys))
}

/// A race in device memory as a fault.
#[cold]
pub(crate) fn global_race(base: u64, race: &Race) -> Box<Stop> {
    race_stop(race, &format!("byte {} of the buffer at {base:#x}", race.offset)).address(base + race.offset)
}

fn race_stop(race: &Race, place: &str) -> Box<Stop> {
    let kind = if race.missing == Missing::ProxyFence { TrapKind::ProxyFence } else { TrapKind::DataRace };
    let mut stop = Stop::new(kind, place);
    if let Some(lane) = race.second.lane {
        stop = stop.lane(lane.into());
    }
    stop.race = Some(Box::new(race.clone()));
    stop
}

/// Lanes of one store may write the same value to one address. The lanes left to check after such a finding, `None` if
/// it is a race.
fn past_benign(race: &Race, rest: u32, offsets: &Addresses, values: &[u128; LANES], who: &Access) -> Option<u32> {
    let lane = usize::from(race.second.lane?);
    let own = race.first.agent == who.agent && race.first.instruction == who.instruction && race.first.is_write;
    let mut twins = 0;
    for other in (0..LANES).filter(|other| *other != lane && offsets[*other] == offsets[lane]) {
        if rest >> other & 1 == 1 || other < lane {
            twins += 1;
            if values[other] != values[lane] {
                return None;
            }
        }
    }
    (own && twins > 0).then_some(rest & !((2u64 << lane) - 1) as u32)
}

#[cold]
pub(super) fn misaligned(address: u64, size: u32, lane: usize) -> Box<Stop> {
    Stop::new(TrapKind::Misaligned, format!("{size}-byte access is not aligned to its size"))
        .lane(lane as u32)
        .address(address)
}

/// The new value of an atomic.
fn modify(op: Atomic, ty: Ty, old: u64, a: u64, b: u64) -> Result<u64, Box<Stop>> {
    let new = match (op, ty) {
        (Atomic::Add, Ty::U32 | Ty::S32) => u64::from((old as u32).wrapping_add(a as u32)),
        (Atomic::Add, Ty::U64 | Ty::S64) => old.wrapping_add(a),
        // Global FP32 atomics keep subnormals.
        (Atomic::Add, Ty::F32) => float::add(old as u32, a as u32).into(),
        (Atomic::Add, Ty::Bf16x2) => bf16::add_x2(old as u32, a as u32).into(),
        (Atomic::Min, Ty::U32 | Ty::U64) => old.min(a),
        (Atomic::Max, Ty::U32 | Ty::U64) => old.max(a),
        (Atomic::Min, Ty::S32) => u64::from((old as i32).min(a as i32) as u32),
        (Atomic::Max, Ty::S32) => u64::from((old as i32).max(a as i32) as u32),
        (Atomic::Min, Ty::S64) => (old as i64).min(a as i64) as u64,
        (Atomic::Max, Ty::S64) => (old as i64).max(a as i64) as u64,
        (Atomic::And, _) => old & a,
        (Atomic::Or, _) => old | a,
        (Atomic::Xor, _) => old ^ a,
        (Atomic::Exch, _) => a,
        (Atomic::Cas, _) => {
            if old == a {
                b
            } else {
                old
            }
        }
        (Atomic::Add, Ty::U8 | Ty::U16 | Ty::Bf16 | Ty::F16x2 | Ty::U16x2)
        | (Atomic::Min | Atomic::Max, Ty::U8 | Ty::U16 | Ty::F32 | Ty::Bf16 | Ty::Bf16x2 | Ty::F16x2 | Ty::U16x2) => {
            return Err(Stop::unsupported(format!("atomic {op:?} on {ty:?}")));
        }
    };
    Ok(new)
}

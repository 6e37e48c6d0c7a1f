//! Stores to multicast addresses.

use ptx::op::{Address, Operand, RegId};
use ptx::slots::memory_class;
use ptx::{Class, Scope, Sem, Ty};

use super::memory::{global_race, misaligned};
use super::{Exec, Step};
use crate::delayed::Store;
use crate::race::Access;
use crate::registers::{LANES, Lanes};

/// Every access of a multicast store is strong at the scope that holds all its devices.
const SEM: Sem = Sem::Relaxed(Scope::Sys);

impl Exec<'_> {
    /// Store of consecutive elements to every member of a multicast object. In a random schedule each member's 8-byte
    /// parts arrive at times of their own, those of this device too: the store goes through the switch.
    pub(super) fn multimem_st(&mut self, ty: Ty, srcs: &[RegId], addr: Address) -> Step {
        let (bits, size) = (8 * ty.bytes(), ty.bytes() * srcs.len() as u32);
        let mut values = [0u128; LANES];
        for (i, src) in srcs.iter().enumerate() {
            let words = match memory_class(ty) {
                Class::B64 => self.r64(Operand::Reg(*src))?,
                _ => self.r32(Operand::Reg(*src))?.map(u64::from),
            };
            for (value, word) in values.iter_mut().zip(words) {
                *value |= u128::from(word) << (bits * i as u32);
            }
        }
        let addresses = self.global_addresses(addr)?;
        let who = Access::generic(self.clock, 0, self.pc, SEM);
        let part = size.min(8);
        for lane in Lanes(self.mask) {
            let who = Access { lane: lane as u8, ..who };
            if addresses[lane] & u64::from(size - 1) != 0 {
                return Err(misaligned(addresses[lane], size, lane));
            }
            let members = self.world.memory.multicast_members(addresses[lane], size.into());
            for member in members.map_err(|stop| stop.lane(lane as u32))? {
                let place = self.world.memory.place(member, size.into()).map_err(|stop| stop.lane(lane as u32))?;
                let a = self.world.memory.at_mut(place);
                let offset = place.offset as u64;
                a.shadow.check_write(offset, size, &who, self.clock).map_err(|race| global_race(a.base, &race))?;
                if a.shadow.needs_sync(SEM, self.clock) {
                    a.shadow.sync_store(offset, size, SEM, lane as u8, self.clock);
                }
                for at in (0..size).step_by(8) {
                    let value = (values[lane] >> (8 * at)) as u64;
                    if self.random.is_some() {
                        self.world.delayed.send(Store {
                            address: member + u64::from(at),
                            bytes: part,
                            value,
                            agent: who.agent,
                            epoch: who.epoch,
                            lane: who.lane,
                            block: self.here,
                        });
                        self.world.effects += 1;
                    } else {
                        let to = place.offset + at as usize;
                        let changed = self.world.memory.at_mut(place).store(to, part as usize, value.into());
                        self.world.effects += u64::from(changed);
                    }
                }
            }
        }
        Ok(())
    }
}

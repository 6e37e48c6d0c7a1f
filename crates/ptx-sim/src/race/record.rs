//! One remembered access.
//!
//! | word | content |
//! |---|---|
//! | 0 | agent |
//! | 1 | epoch; 0: no record |
//! | 2 | instruction |
//! | 3 | bits 0..6 lane (32: several), 6..10 bytes, 10..13 scope + 1 if strong, 13 write, 14 asynchronous, 15 crowd, 16..20 device, 20..22 stripe |
//!
//! A *crowd* stands for many readers of one launch. In the record of a line the byte bits are all set and mean the whole
//! line; a *stripe* of 1 or 2 says that each next word, or pair of words, was touched by the next lane.

use ptx::Scope;

use super::vector_clock::SEVERAL_LANES;
use super::{Access, AgentId, Clock, Missing, Party, Proxy};

const LANE: u32 = 0x3F;
pub(super) const BYTES_SHIFT: u32 = 6;
pub(super) const BYTES: u32 = 0xF << BYTES_SHIFT;
const SCOPE_SHIFT: u32 = 10;
const SCOPE: u32 = 7 << SCOPE_SHIFT;
pub(super) const WRITE: u32 = 1 << 13;
pub(super) const ASYNC: u32 = 1 << 14;
pub(super) const CROWD: u32 = 1 << 15;
const DEVICE_SHIFT: u32 = 16;
const STRIPE_SHIFT: u32 = 20;
const STRIPE: u32 = 3 << STRIPE_SHIFT;

#[derive(Clone, Copy, Default)]
pub(super) struct Record {
    pub(super) agent: u32,
    pub(super) epoch: u32,
    pub(super) instruction: u32,
    pub(super) meta: u32,
}

const SCOPES: [Scope; 4] = [Scope::Cta, Scope::Cluster, Scope::Gpu, Scope::Sys];

impl Record {
    /// Of `who`, performed or issued by the owner of `clock`, on no bytes yet.
    pub(super) fn new(who: &Access, is_write: bool, clock: &Clock) -> Self {
        let strong = who.strong.map_or(0, |scope| scope as u32 + 1);
        let meta = u32::from(who.lane)
            | strong << SCOPE_SHIFT
            | if is_write { WRITE } else { 0 }
            | if who.proxy == Proxy::Async { ASYNC } else { 0 }
            | u32::from(clock.cta().device & 15) << DEVICE_SHIFT;
        Self { agent: who.agent.0, epoch: who.epoch, instruction: who.instruction, meta }
    }

    #[inline]
    pub(super) fn on(self, bytes: u32) -> Self {
        Self { meta: self.meta & !BYTES | bytes, ..self }
    }

    #[inline]
    pub(super) fn is_present(&self) -> bool {
        self.epoch != 0
    }

    /// Touched bytes, in place in `meta`.
    #[inline]
    pub(super) fn bytes(&self) -> u32 {
        self.meta & BYTES
    }

    #[inline]
    pub(super) fn lane(&self) -> u8 {
        (self.meta & LANE) as u8
    }

    pub(super) fn set_lane(&mut self, lane: u8) {
        self.meta = self.meta & !LANE | u32::from(lane);
    }

    /// As an access of a whole line in which the word `w` is touched by lane `lane + w / words`.
    pub(super) fn striped(mut self, lane: u8, words: u32) -> Self {
        self.set_lane(lane);
        let stripe = match words {
            1 => 1,
            2 => 2,
            _ => 0,
        };
        Self { meta: self.meta & !(BYTES | STRIPE) | BYTES | stripe << STRIPE_SHIFT, ..self }
    }

    /// The part of a line's record that concerns its cell number `cell`.
    pub(super) fn of_cell(mut self, cell: u32) -> Self {
        match (self.meta & STRIPE) >> STRIPE_SHIFT {
            0 => {}
            stripe => self.set_lane(self.lane() + (cell >> (stripe - 1)) as u8),
        }
        self.meta &= !STRIPE;
        self
    }

    /// Whether every cell of a line would judge this record and `now`, both of the whole line, as the line does, which
    /// sees their first lanes only.
    #[inline]
    pub(super) fn fits_line(&self, now: &Record, clock: &Clock) -> bool {
        if !self.is_present() || (self.meta | now.meta) & STRIPE == 0 {
            return true;
        }
        if self.is(STRIPE) && clock.knows_single_lanes() && (now.is(ASYNC) || self.agent() != clock.agent()) {
            return false;
        }
        self.agent() != clock.agent()
            || (self.meta ^ now.meta) & (LANE | STRIPE) == 0
            || clock.is_after_all_lanes(self.agent(), self.epoch)
    }

    pub(super) fn scope(&self) -> Option<Scope> {
        match (self.meta & SCOPE) >> SCOPE_SHIFT {
            0 => None,
            n => Some(SCOPES[n as usize - 1]),
        }
    }

    #[inline]
    pub(super) fn is(&self, flag: u32) -> bool {
        self.meta & flag != 0
    }

    pub(super) fn agent(&self) -> AgentId {
        AgentId(self.agent)
    }

    pub(super) fn party(&self) -> Party {
        Party {
            agent: self.agent(),
            lane: (self.lane() != SEVERAL_LANES).then(|| self.lane()),
            instruction: self.instruction,
            is_write: self.is(WRITE),
            strong: self.scope(),
            proxy: if self.is(ASYNC) { Proxy::Async } else { Proxy::Generic },
        }
    }

    /// Whether `self`, recorded earlier, happened before the access `now` that the owner of `clock` performs or issues.
    #[inline]
    pub(super) fn is_before(&self, now: &Record, clock: &Clock) -> bool {
        let needs_fence = now.is(ASYNC) && self.meta & (WRITE | ASYNC) == WRITE;
        clock.is_after(self.agent(), self.epoch, self.lane(), now.lane())
            && (!needs_fence || clock.is_fenced(self.agent(), self.epoch, self.lane()))
    }

    /// Whether `self`, a read since the write `write`, is strong with it: both at scopes that surely hold the other.
    pub(super) fn observes(&self, write: &Record) -> bool {
        let needed = if (self.meta ^ write.meta) >> DEVICE_SHIFT & 15 == 0 { Scope::Gpu } else { Scope::Sys };
        matches!((self.scope(), write.scope()), (Some(a), Some(b)) if a.min(b) >= needed)
    }

    /// `self` is earlier and unordered, and has bytes in common with `now`: what is missing, if it is a race.
    #[cold]
    pub(super) fn conflict(&self, now: &Record, clock: &Clock) -> Option<Missing> {
        if self.is(CROWD) && clock.cta().launch_contains(self.agent()) {
            return None;
        }
        if let (Some(a), Some(b)) = (self.scope(), now.scope()) {
            let needed = if clock.cta().contains(self.agent()) {
                Scope::Cta
            } else if clock.cta().cluster_contains(self.agent()) {
                Scope::Cluster
            } else if (self.meta ^ now.meta) >> DEVICE_SHIFT & 15 == 0 {
                Scope::Gpu
            } else {
                Scope::Sys
            };
            return (a.min(b) < needed).then_some(Missing::Scope);
        }
        Some(if self.is(ASYNC) {
            Missing::Wait
        } else if now.is(ASYNC) && clock.is_after(self.agent(), self.epoch, self.lane(), now.lane()) {
            Missing::ProxyFence
        } else if self.agent() == clock.agent() {
            Missing::WarpBarrier
        } else {
            Missing::Order
        })
    }
}

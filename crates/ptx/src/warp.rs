//! Warp-wide operations and special registers.

use crate::builder::emit;
use crate::op::{Op, Operand, Redux, Shuffle, Special, Vote};
use crate::ty::{Class, Int, Scalar};
use crate::value::{Pred, Reg, def, def_pred};

/// Every lane.
pub const FULL_MASK: u32 = u32::MAX;

/// Reads a 32-bit special register.
///
/// # Panics
/// For the 64-bit clocks; see [`globaltimer`] and [`clock64`].
#[track_caller]
pub fn special(reg: Special) -> Reg<u32> {
    assert_eq!(reg.class(), Class::B32, "{reg:?} is 64 bits wide");
    def(|dst| Op::Special { dst, reg })
}

/// The nanosecond clock.
#[track_caller]
pub fn globaltimer() -> Reg<u64> {
    def(|dst| Op::Special { dst, reg: Special::Globaltimer })
}

/// The multiprocessor's cycle counter.
#[track_caller]
pub fn clock64() -> Reg<u64> {
    def(|dst| Op::Special { dst, reg: Special::Clock64 })
}

/// Thread index in the CTA.
#[track_caller]
pub fn thread_index() -> Reg<u32> {
    special(Special::TidX)
}

/// CTA index in the grid (x).
#[track_caller]
pub fn cta_index() -> Reg<u32> {
    special(Special::CtaidX)
}

/// Lane index in the warp.
#[track_caller]
pub fn lane_index() -> Reg<u32> {
    special(Special::Laneid)
}

/// Warp index in the CTA, made uniform for the assembler by a broadcast from lane 0.
#[track_caller]
pub fn warp_index() -> Reg<u32> {
    shuffle(Shuffle::Idx, thread_index() >> 5, 0)
}

/// Shuffle within the full warp.
#[track_caller]
pub fn shuffle<T: Scalar>(mode: Shuffle, value: Reg<T>, lane: impl Into<Reg<u32>>) -> Reg<T> {
    let lane = lane.into().operand();
    def(|dst| Op::Shfl { mode, dst, src: value.operand(), lane, mask: FULL_MASK })
}

/// The value of lane `lane ^ mask`.
#[track_caller]
pub fn shuffle_xor<T: Scalar>(value: Reg<T>, mask: u32) -> Reg<T> {
    shuffle(Shuffle::Bfly, value, mask)
}

/// The value of lane `lane`.
#[track_caller]
pub fn broadcast<T: Scalar>(value: Reg<T>, lane: impl Into<Reg<u32>>) -> Reg<T> {
    shuffle(Shuffle::Idx, value, lane)
}

/// Whether `p` holds in every lane.
#[track_caller]
pub fn all(p: Pred) -> Pred {
    def_pred(|dst| Op::Vote { op: Vote::All, dst, p: p.reg(), mask: FULL_MASK })
}

/// Whether `p` holds in some lane.
#[track_caller]
pub fn any(p: Pred) -> Pred {
    def_pred(|dst| Op::Vote { op: Vote::Any, dst, p: p.reg(), mask: FULL_MASK })
}

/// The lanes where `p` holds.
#[track_caller]
pub fn ballot(p: Pred) -> Reg<u32> {
    def(|dst| Op::Ballot { dst, p: p.reg(), mask: FULL_MASK })
}

/// Warp reduction of 32-bit values.
#[track_caller]
pub fn redux<T: Int>(op: Redux, value: Reg<T>) -> Reg<T> {
    def(|dst| Op::Redux { op, dst, src: value.operand(), mask: FULL_MASK })
}

/// The lanes that hold the same value.
#[track_caller]
pub fn match_any(value: Reg<u32>) -> Reg<u32> {
    def(|dst| Op::MatchAny { dst, src: value.operand(), mask: FULL_MASK })
}

/// The currently active lanes.
#[track_caller]
pub fn active_mask() -> Reg<u32> {
    def(|dst| Op::ActiveMask { dst })
}

/// Holds in exactly one lane of the (converged) warp.
#[track_caller]
pub fn elect() -> Pred {
    def_pred(|dst| Op::Elect { dst })
}

/// Warp barrier: memory accesses of all lanes before it are visible to all lanes after it.
#[track_caller]
pub fn sync_warp() {
    emit(Op::BarWarp { mask: FULL_MASK });
}

/// CTA barrier over every thread.
#[track_caller]
pub fn sync_threads() {
    emit(Op::BarSync { id: Operand::Imm(0), threads: None });
}

/// Named barrier `id` (1..=15) over `threads` threads.
#[track_caller]
pub fn sync_named(id: impl Into<Reg<u32>>, threads: u32) {
    emit(Op::BarSync { id: id.into().operand(), threads: Some(threads) });
}

/// Arrives at named barrier `id` of `threads` threads without waiting.
#[track_caller]
pub fn arrive_named(id: impl Into<Reg<u32>>, threads: u32) {
    emit(Op::BarArrive { id: id.into().operand(), threads });
}

/// Suspends the thread for about `ns` nanoseconds.
#[track_caller]
pub fn nanosleep(ns: impl Into<Reg<u32>>) {
    emit(Op::Nanosleep { ns: ns.into().operand() });
}

//! [`Ownership`] and the exchange's epochs on the device. All values are below 2^21, so 32 bits suffice.

use ptx::Reg;

use crate::ownership::Ownership;

fn shift(own: Ownership) -> u32 {
    own.interleave().trailing_zeros()
}

fn within(own: Ownership) -> u32 {
    own.interleave() as u32 - 1
}

/// [`Ownership::rank_of`].
#[track_caller]
pub fn rank_of(own: Ownership, global: Reg<u32>) -> Reg<u32> {
    (global >> shift(own)) % own.ranks() as u32
}

/// [`Ownership::local_of`].
#[track_caller]
pub fn local_of(own: Ownership, global: Reg<u32>) -> Reg<u32> {
    let round = (global >> shift(own)) / own.ranks() as u32;
    (round << shift(own)) | (global & within(own))
}

/// [`Ownership::global_of`].
#[track_caller]
pub fn global_of(own: Ownership, rank: Reg<u32>, local: Reg<u32>) -> Reg<u32> {
    let block = (local >> shift(own)).mad(own.ranks() as u32, rank);
    (block << shift(own)) | (local & within(own))
}

/// [`Ownership::local_end`]: at or below 0 is none.
#[track_caller]
pub fn local_end(own: Ownership, rank: Reg<u32>, global_end: Reg<i32>) -> Reg<u32> {
    let (interleave, ranks) = (own.interleave() as u32, own.ranks() as u32);
    let end = global_end.max(0).as_u32();
    let rounds = end / (interleave * ranks);
    let rest = end - rounds * (interleave * ranks);
    let before = rank * interleave;
    rounds * interleave + (rest.max(before) - before).min(interleave)
}

/// [`next_epoch`](crate::layout::ll_slot::next_epoch).
#[track_caller]
pub fn next_epoch(epoch: Reg<u32>) -> Reg<u32> {
    let next = epoch + 1;
    next.eq(0).select::<u32>(2u32, next)
}

//! Radix selection over 16-bit keys: two histograms of 8 bits, the second of the keys in the threshold's bin of the first,
//! each summed by one warp.

use ptx::{Atomic, Reg, Scope, Sem, Shared, SharedArray, ballot, broadcast};

use super::scan::warp_inclusive;

/// Bins of a digit that one warp sums.
pub const WARP_BINS: u32 = 256;
/// Bits of such a digit.
pub const WARP_DIGIT_BITS: u32 = WARP_BINS.trailing_zeros();

/// Adds one to a shared counter.
#[track_caller]
pub fn count(bin: Shared<u32>) {
    bin.reduce(Atomic::Add, Sem::Relaxed(Scope::Cta), 1u32);
}

/// Where a running count from the top down crosses a target.
#[derive(Clone, Copy)]
pub struct Crossing {
    /// The bin in which it does.
    pub bin: Reg<u32>,
    /// The count in the bins above that one (below the target).
    pub above: Reg<u32>,
}

/// Where a running count from the top down crosses a target, and what surrounds it.
#[derive(Clone, Copy)]
pub struct WarpCrossing {
    /// The bin in which it does; meaningless if the total is below the target.
    pub bin: Reg<u32>,
    /// The count in the bins above that one.
    pub above: Reg<u32>,
    /// The count in that bin.
    pub here: Reg<u32>,
    /// The count in all bins.
    pub total: Reg<u32>,
}

/// The bin of `hist`, of [`WARP_BINS`] from a 16-byte boundary on, at which the counts summed from the highest bin down reach `need`
/// (at least 1); by one whole warp, without a barrier.
#[track_caller]
pub fn find_topdown_in_warp(hist: SharedArray<u32>, need: impl Into<Reg<u32>>, lane: Reg<u32>) -> WarpCrossing {
    const PER_LANE: u32 = WARP_BINS / 32;
    assert!(hist.len() >= WARP_BINS);
    let need = need.into();
    // The highest bins first.
    let first_bin = (Reg::<u32>::from(31) - lane) * PER_LANE;
    let at = hist.ptr().at(first_bin);
    let bins: Vec<Reg<u32>> = (0..PER_LANE / 4).flat_map(|i| at.offset(4 * i as i32).load_vec::<4>()).collect();
    find_topdown_over_lanes(&bins, first_bin, need, lane)
}

/// As [`find_topdown_in_warp`] for counts that the lanes hold: `bins`, the same number in each, of consecutive bins from
/// `first_bin` on, lane 0's the highest.
#[track_caller]
pub fn find_topdown_over_lanes(
    bins: &[Reg<u32>],
    first_bin: Reg<u32>,
    need: impl Into<Reg<u32>>,
    lane: Reg<u32>,
) -> WarpCrossing {
    let need = need.into();
    let sum = sum_pairwise(bins);
    let inclusive = warp_inclusive(sum, lane);
    let total = broadcast(inclusive, 31u32);
    let crossing_lane = ballot(inclusive.ge(need)).reverse_bits().clz().min(31);
    let mut through = inclusive - sum;
    let (mut bin, mut above, mut here) = (first_bin, through, bins[0]);
    for i in (0..bins.len() as u32).rev() {
        let reaches_here = through.lt(need);
        bin = reaches_here.select::<u32>(first_bin + i, bin);
        above = reaches_here.select::<u32>(through, above);
        here = reaches_here.select::<u32>(bins[i as usize], here);
        through = through + bins[i as usize];
    }
    let [bin, above, here] = [bin, above, here].map(|value| broadcast(value, crossing_lane));
    WarpCrossing { bin, above, here, total }
}

/// The sum of some values in few dependent steps.
#[track_caller]
pub fn sum_pairwise(values: &[Reg<u32>]) -> Reg<u32> {
    match values {
        [one] => *one,
        _ => {
            let (left, right) = values.split_at(values.len() / 2);
            sum_pairwise(left) + sum_pairwise(right)
        }
    }
}

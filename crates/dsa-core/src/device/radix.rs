//! Radix selection over 16-bit keys: an 11-bit histogram, then the low 5 bits of the keys in the threshold's bin; or two of
//! 8 bits, each summed by one warp.

use ptx::{Atomic, Reg, Scope, Sem, Shared, SharedArray, ballot, broadcast, sync_threads, when};

use super::scan::{Thread, warp_inclusive, warps_before};

/// Bins of the first digit (the key's upper 11 bits).
pub const BINS: u32 = 2048;
/// Bins of the second digit (the key's lower 5 bits).
pub const LOW_BINS: u32 = 32;
/// Bits of the second digit.
pub const LOW_BITS: u32 = 5;

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

/// Words of shared memory that [`find_topdown`] needs, aligned to 8 bytes: the warps' sums, the crossing, the highest bin.
pub fn crossing_words(t: Thread) -> u32 {
    t.warps().next_multiple_of(2) + 4
}

/// After [`find_topdown`]: a bin above which nothing was counted, at most three above the highest that holds something.
#[track_caller]
pub fn highest_bin(scratch: SharedArray<u32>, t: Thread) -> Reg<u32> {
    scratch.at(t.warps().next_multiple_of(2) + 2).load()
}

/// The bin of `hist` at which the counts summed from the highest bin down reach `need` (at least 1). Bin 0 holds whatever
/// is missing: it need not be counted.
///
/// All threads call it after a barrier that orders their counting. It contains two barriers; `scratch` of
/// [`crossing_words`] may be reused by the next call without another.
#[track_caller]
pub fn find_topdown(
    hist: SharedArray<u32>,
    need: impl Into<Reg<u32>>,
    scratch: SharedArray<u32>,
    t: Thread,
) -> Crossing {
    let need = need.into();
    let per_thread = hist.len() / t.threads;
    assert!(matches!(per_thread, 1 | 2 | 4) && per_thread * t.threads == hist.len(), "{} bins", hist.len());
    assert!(scratch.len() >= crossing_words(t));
    let found = scratch.ptr().offset(t.warps().next_multiple_of(2) as i32);
    // Thread 0 has the highest bins: thread order is top down.
    let first = (Reg::<u32>::from(t.threads - 1) - t.index) * per_thread;
    let at = hist.ptr().at(first);
    let bins = match per_thread {
        1 => vec![at.load()],
        2 => at.load_vec::<2>().to_vec(),
        _ => at.load_vec::<4>().to_vec(),
    };
    let own = bins.iter().skip(1).fold(bins[0], |a, b| a + *b);
    let inclusive = warp_inclusive(own, t.lane);
    when(t.lane.eq(31), || scratch.at(t.warp).store(inclusive));
    sync_threads(); // ORDER: the warps' sums, before every warp reads them.
    let reached = warps_before(scratch, t) + inclusive;
    let above = reached - own;
    when(above.eq(0) & own.ne(0), || found.offset(2).store(first + (per_thread - 1)));
    when(above.lt(need) & (reached.ge(need) | first.eq(0)), || {
        // From the top bin down; the crossing is the last bin whose sum above does not reach the target.
        let (mut bin, mut above_bin, mut through) = (first, above, above);
        for i in (0..per_thread).rev() {
            let here = through.lt(need);
            bin = here.select::<u32>(first + i, bin);
            above_bin = here.select::<u32>(through, above_bin);
            through = through + bins[i as usize];
        }
        found.store_vec([bin, above_bin]);
    });
    sync_threads(); // ORDER: the crossing, before every warp reads it.
    let [bin, above] = found.load_vec::<2>();
    Crossing { bin, above }
}

/// The first lane at which the inclusive sum of `value` over the lanes reaches `need`, and the sum before that lane.
#[track_caller]
fn first_reaching(value: Reg<u32>, need: Reg<u32>, lane: Reg<u32>) -> (Reg<u32>, Reg<u32>) {
    let inclusive = warp_inclusive(value, lane);
    // Lane 31 if none does: no total is that small, but nothing may be addressed by 32.
    let first = ballot(inclusive.ge(need)).reverse_bits().clz().min(31);
    (first, broadcast(inclusive - value, first))
}

/// As [`find_topdown`] over 32 bins, by every warp for itself and without a barrier.
#[track_caller]
pub fn find_low_digit(hist: SharedArray<u32>, need: impl Into<Reg<u32>>, t: Thread) -> Crossing {
    // Reversed so that the running sum comes from the top bin down.
    let from_top = Reg::<u32>::from(LOW_BINS - 1) - t.lane;
    let (lane, above) = first_reaching(hist.at(from_top).load(), need.into(), t.lane);
    Crossing { bin: Reg::<u32>::from(LOW_BINS - 1) - lane, above }
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

/// As [`find_topdown`] over [`WARP_BINS`] bins by one whole warp, without a barrier; 16-byte aligned bins.
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

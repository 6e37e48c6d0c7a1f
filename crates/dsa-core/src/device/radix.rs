//! Radix selection over 16-bit keys: an 11-bit histogram, then the low 5 bits of the keys in the threshold's bin.

use ptx::{Atomic, Reg, Scope, Sem, Shared, SharedArray, Shuffle, Var, ballot, broadcast, shuffle};
use ptx::{sync_threads, when};

use super::scan::{Thread, block_exclusive, warp_inclusive};

/// Bins of the first digit (the key's upper 11 bits).
pub const BINS: u32 = 2048;
/// Bins of the second digit (the key's lower 5 bits).
pub const LOW_BINS: u32 = 32;
/// Bits of the second digit.
pub const LOW_BITS: u32 = 5;

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

/// Shared words that [`find_topdown`] needs.
#[derive(Clone, Copy)]
pub struct TopdownScratch {
    warps: SharedArray<u32>,
    found: SharedArray<u32>,
}

impl TopdownScratch {
    /// Reserves them in the shared layout.
    pub fn new(warps: u32) -> Self {
        TopdownScratch {
            warps: SharedArray::new("topdown_warps", warps),
            found: SharedArray::aligned("topdown_found", 2, 8),
        }
    }
}

/// The bin of `hist` at which the counts summed from the highest bin down reach `need` (1 <= need <= the total).
///
/// All threads call it after a barrier that orders their counting; it contains two barriers, after which `scratch` may
/// not be reused before another one.
#[track_caller]
pub fn find_topdown(hist: SharedArray<u32>, need: impl Into<Reg<u32>>, scratch: TopdownScratch, t: Thread) -> Crossing {
    let need = need.into();
    let bins = hist.len();
    // Thread 0 holds the highest bins. A vector load gives up to four adjacent bins, highest last.
    let per_thread = bins.div_ceil(t.threads);
    assert!(per_thread.is_power_of_two() && per_thread <= 4 && bins.is_multiple_of(per_thread), "{bins} bins");
    let counts: Vec<Var<u32>> = (0..per_thread).map(|_| Var::new(0u32)).collect();
    let first = Reg::<u32>::from(bins - per_thread) - t.index * per_thread;
    let load = || {
        let at = hist.ptr().at(first);
        match per_thread {
            1 => counts[0].set(at.load()),
            2 => at.load_vec::<2>().into_iter().zip(&counts).for_each(|(v, c)| c.set(v)),
            _ => at.load_vec::<4>().into_iter().zip(&counts).for_each(|(v, c)| c.set(v)),
        }
    };
    if per_thread * t.threads == bins {
        load()
    } else {
        when(t.index.lt(bins / per_thread), load)
    }
    let counts: Vec<Reg<u32>> = counts.iter().map(|c| c.get()).collect();
    let sum = counts.iter().skip(1).fold(counts[0], |a, b| a + *b);
    let (before, _) = block_exclusive(sum, scratch.warps, t);
    when(before.lt(need) & (before + sum).ge(need), || {
        let bin = Var::new(first);
        let above = Var::new(before);
        // From the top bin of this thread down; the crossing is in the last one that the sum above does not reach.
        let mut sum_above = before;
        for i in (0..per_thread).rev() {
            let through = sum_above + counts[i as usize];
            let here = sum_above.lt(need) & through.ge(need);
            bin.set(here.select::<u32>(first + i, bin.get()));
            above.set(here.select::<u32>(sum_above, above.get()));
            sum_above = through;
        }
        scratch.found.ptr().store_vec([bin.get(), above.get()]);
    });
    sync_threads(); // ORDER: the finder's two words, before every thread reads them.
    let [bin, above] = scratch.found.ptr().load_vec::<2>();
    Crossing { bin, above }
}

/// As [`find_topdown`] over 32 bins, by every warp for itself and without a barrier: lane `b` holds bin `b`'s count.
#[track_caller]
pub fn find_low_digit(count: Reg<u32>, need: impl Into<Reg<u32>>, t: Thread) -> Crossing {
    let need = need.into();
    // Reversed so that the running sum comes from the top bin down.
    let reversed = shuffle(Shuffle::Idx, count, Reg::<u32>::from(31) - t.lane);
    let inclusive = warp_inclusive(reversed, t.lane);
    let reached = ballot(inclusive.ge(need));
    // First lane that reaches the target.
    let first = reached.reverse_bits().clz();
    let above = broadcast(inclusive - reversed, first);
    Crossing { bin: Reg::<u32>::from(31) - first, above }
}

//! Prefix sums over the lanes of a warp and the threads of a CTA.

use ptx::{Redux, redux, warp_index, when};
use ptx::{Reg, Shared, SharedArray, Shuffle, Var, lane_index, shuffle, sync_threads, thread_index};

/// Who a thread is, read once.
#[derive(Clone, Copy)]
pub struct Thread {
    /// Index in the CTA.
    pub index: Reg<u32>,
    /// Lane in the warp.
    pub lane: Reg<u32>,
    /// Warp in the CTA, uniform.
    pub warp: Reg<u32>,
    /// Threads of the CTA.
    pub threads: u32,
}

impl Thread {
    /// Of the kernel being built.
    #[track_caller]
    pub fn current() -> Thread {
        Thread { index: thread_index(), lane: lane_index(), warp: warp_index(), threads: ptx::bounds().threads }
    }

    /// Warps of the CTA.
    pub fn warps(&self) -> u32 {
        self.threads / 32
    }
}

/// Inclusive sum over the lanes up to this one.
#[track_caller]
pub fn warp_inclusive(value: Reg<u32>, lane: Reg<u32>) -> Reg<u32> {
    warp_inclusive_each([value], lane)[0]
}

/// [`warp_inclusive`] of several values at once: their shuffles overlap.
#[track_caller]
pub fn warp_inclusive_each<const N: usize>(values: [Reg<u32>; N], lane: Reg<u32>) -> [Reg<u32>; N] {
    let mut sums = values;
    for step in [1u32, 2, 4, 8, 16] {
        let below = sums.map(|sum| shuffle(Shuffle::Up, sum, step));
        let inside = lane.ge(step);
        sums = std::array::from_fn(|i| sums[i] + inside.select::<u32>(below[i], 0u32));
    }
    sums
}

/// (exclusive sum over the threads before this one in order, total). Contains one CTA barrier, which also orders the
/// shared-memory accesses of its callers; `scratch` holds one word per warp and may be reused after the next barrier.
#[track_caller]
pub fn block_exclusive(value: Reg<u32>, scratch: SharedArray<u32>, t: Thread) -> (Reg<u32>, Reg<u32>) {
    assert!(scratch.len() >= t.warps());
    let inclusive = warp_inclusive(value, t.lane);
    when(t.lane.eq(31), || scratch.at(t.warp).store(inclusive));
    sync_threads(); // ORDER: the warps' totals, before every warp reads them.
    let (before, total) = warp_prefix(scratch, t);
    (before + inclusive - value, total)
}

/// (sum of `totals` over the warps before this one, sum over all), computed by every warp for itself.
#[track_caller]
pub fn warp_prefix(totals: SharedArray<u32>, t: Thread) -> (Reg<u32>, Reg<u32>) {
    let mine = Var::new(0u32);
    if t.warps() == 32 {
        mine.set(totals.at(t.lane).load());
    } else {
        when(t.lane.lt(t.warps()), || mine.set(totals.at(t.lane).load()));
    }
    let total = redux(Redux::AddU32, mine.get());
    let before = redux(Redux::AddU32, t.lane.lt(t.warp).select::<u32>(mine.get(), 0u32));
    (before, total)
}

/// The first half of [`warp_prefix`] alone.
#[track_caller]
pub fn warps_before(totals: SharedArray<u32>, t: Thread) -> Reg<u32> {
    let mine = Var::new(0u32);
    when(t.lane.lt(t.warp), || mine.set(totals.at(t.lane).load()));
    redux(Redux::AddU32, mine.get())
}

/// Sum over every thread of the CTA; one CTA barrier, as [`block_exclusive`].
#[track_caller]
pub fn block_sum(value: Reg<u32>, scratch: SharedArray<u32>, t: Thread) -> Reg<u32> {
    let sum = redux(Redux::AddU32, value);
    when(t.lane.eq(0), || scratch.at(t.warp).store(sum));
    sync_threads(); // ORDER: the warps' sums, before every warp reads them.
    let mine = Var::new(0u32);
    when(t.lane.lt(t.warps()), || mine.set(scratch.at(t.lane).load()));
    redux(Redux::AddU32, mine.get())
}

/// Fills `array` with `value`, all threads together; visible after the next CTA barrier.
#[track_caller]
pub fn fill(array: SharedArray<u32>, value: u32, t: Thread) {
    let vectors = array.len() / 4;
    let quad = |at: Shared<u32>| at.store_vec([Reg::from(value); 4]);
    let mut first = 0;
    while first < vectors {
        let i = t.index + first;
        if first + t.threads <= vectors {
            quad(array.ptr().at(i * 4));
        } else {
            when(i.lt(vectors), || quad(array.ptr().at(i * 4)));
        }
        first += t.threads;
    }
    let rest = array.len() - vectors * 4;
    if rest > 0 {
        when(t.index.lt(rest), || array.ptr().at(t.index + vectors * 4).store(value));
    }
}

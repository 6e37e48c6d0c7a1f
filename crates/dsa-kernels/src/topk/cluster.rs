//! The CTAs of a cluster that share a row: each has consecutive octets of it, all find the same cut.
//!
//! They meet by asynchronous stores alone, which complete on an mbarrier of the CTA that they go to: a barrier of the cluster
//! with release and acquire costs a device-wide fence. Each exchange has its own slots and its own mbarrier, so nothing is
//! written twice and no CTA tells another that it has read something.
//!
//! | exchange | each CTA sends | to |
//! |---|---|---|
//! | a digit | its counts of 256 bins, 16 bits each | every CTA, itself too |
//! | a list | its listed chunks or vectors | the CTA of each one's place |
//! | the planes of a B' row | its bits | CTA 0 |
//!
//! A CTA waits for every exchange before it ends, so nobody writes to one that has ended; that all have started is known from a
//! relaxed barrier of the cluster before the first exchange.

use dsa_core::consts::TOPK_MAX;
use dsa_core::device::radix::{Crossing, WARP_BINS, find_topdown_over_lanes, sum_pairwise};
use dsa_core::device::scan::Thread;
use ptx::{
    Global, Mbarrier, MbarrierArray, Redux, Reg, Shared, SharedArray, Var, cluster_arrive_relaxed, cluster_rank,
    cluster_wait, fence_mbarrier_init, for_range, redux, sync_threads, when, when_else,
};

use super::Row;

/// CTAs that may share a row. 16 were slower than 8 in every case of select.
const CLUSTERS: [u32; 4] = [1, 2, 4, 8];
/// Keys of the longest row for each CTA at least, or the exchanges cost more than the sharing gains.
const KEYS_PER_CTA_MIN: usize = 4096;
/// Rows of up to this many keys are one CTA's, for the same reason.
const ALONE_MAX: usize = 8192;

/// As many CTAs for each of `rows` rows of up to `length_max` keys as pay, all together at most `ctas_max`: as measured on an
/// H200.
pub(crate) fn choose(rows: usize, length_max: usize, ctas_max: usize) -> u32 {
    let pays = |cluster: u32| {
        let fit = rows.saturating_mul(cluster as usize) <= ctas_max;
        cluster == 1 || (fit && length_max >= KEYS_PER_CTA_MIN * cluster as usize && length_max > ALONE_MAX)
    };
    CLUSTERS.into_iter().filter(|cluster| pays(*cluster)).max().unwrap_or(1)
}

/// Exchanges of digits at most: two; of what is listed one, which may turn out to be too narrow, then two.
fn digits_max(lists: u32) -> u32 {
    2 + 3 * lists
}

/// Words of one CTA's counts.
const COUNT_WORDS: u32 = WARP_BINS / 2;
/// Counts of a lane that packs or sums them.
const PER_LANE: u32 = WARP_BINS / 32;
/// CTAs whose counts are loaded at once where registers are short.
const AT_ONCE: u32 = 4;
const _: () = assert!(PER_LANE == 8, "one 16-byte packet a lane");

/// Whether `cluster` CTAs can share a row.
pub(crate) fn may_share(cluster: u32) -> bool {
    CLUSTERS.contains(&cluster)
}

/// What counts are cut to: their share of 16 bits, so that the sum over the CTAs has 16.
const fn count_max(cluster: u32) -> u32 {
    u16::MAX as u32 / cluster
}

const _: () = assert!(TOPK_MAX as u32 <= count_max(CLUSTERS[CLUSTERS.len() - 1]), "a count tells that K is reached");

/// A CTA's part in the cluster.
#[derive(Clone, Copy)]
pub(super) struct Cluster {
    pub(super) size: u32,
    pub(super) rank: Reg<u32>,
    /// Of each exchange and CTA: its counts, two to a word, that of the lower bin in the lower half.
    counts: SharedArray<u32>,
    /// The crossing.
    found: SharedArray<u32>,
    /// Of the last warp: keys above the cut and at it, those of the CTAs before (lower half) and this one's (upper half), at most
    /// as many as counts are cut to. Not beside the crossing, or the assembler reads both at once, before the tally is done.
    tally: SharedArray<u32>,
    /// What is this CTA's of each list.
    lists: SharedArray<u32>,
    /// Entries of a list that are its.
    share: u32,
    /// Of each CTA: the planes of its keys. In CTA 0 of those that gather them.
    planes: Option<SharedArray<u32>>,
    /// With them, where the row lies and its length: the registers are the keys'.
    kept: Option<SharedArray<u64>>,
    /// Of each exchange of digits, then of each list, then of the planes.
    arrived: MbarrierArray,
    /// Exchanges of digits at most.
    digits: u32,
    /// Exchanges of digits before.
    exchange: Var<u32>,
    t: Thread,
}

/// A CTA's consecutive places among the K.
#[derive(Clone, Copy)]
pub struct Slice {
    /// The first.
    pub first: Reg<u32>,
    /// The one after the last.
    pub end: Reg<u32>,
}

impl Slice {
    /// The multiple of four at or before the first place: what the CTA's list begins with, so that four places that are
    /// aligned in a row are aligned in the list.
    pub fn base(&self) -> Reg<u32> {
        self.first & 0xFFFF_FFFCu32
    }
}

impl Cluster {
    /// Reserves its part of the shared layout, for `lists` lists at most, also to gather `planes` words of each CTA if it says so;
    /// `found` has two words, aligned to 8 bytes.
    pub(super) fn new(
        size: u32,
        k: u32,
        lists: u32,
        planes: Option<u32>,
        found: SharedArray<u32>,
        t: Thread,
    ) -> Cluster {
        assert!(may_share(size) && size > 1 && size <= t.warps(), "clusters of {size}");
        let (digits, share) = (digits_max(lists), k / size);
        Cluster {
            size,
            rank: cluster_rank(),
            counts: SharedArray::aligned("counts", digits * size * COUNT_WORDS, 16),
            found,
            tally: SharedArray::aligned("tally", 2, 8),
            lists: SharedArray::aligned("dealt", lists * share, 16),
            share,
            planes: planes.map(|words| SharedArray::aligned("planes", size * words, 16)),
            kept: planes.map(|_| SharedArray::new("kept", 2)),
            arrived: MbarrierArray::new("arrived", digits + lists + u32::from(planes.is_some())),
            digits,
            exchange: Var::new(0u32),
            t,
        }
    }

    /// The first thing of every CTA.
    pub(super) fn arrive(&self) {
        when(self.t.index.eq(0), || {
            (0..self.arrived.len()).for_each(|i| self.arrived.at(i).init(1));
            fence_mbarrier_init();
        });
        cluster_arrive_relaxed();
    }

    /// Waits until every CTA has arrived. ORDER: a peer's start and its mbarriers, before the first store to it.
    pub(super) fn meet(&self) {
        cluster_wait();
    }

    /// Keeps where the row lies and its length, out of registers if there is room; a barrier of the CTA must follow.
    pub(super) fn keep(&self, row: Row) {
        if let Some(kept) = self.kept {
            when(self.t.index.eq(0), || {
                kept.at(0u32).store(row.logits.address());
                kept.at(1u32).store(row.length.to_u64());
            });
        }
    }

    /// Where the row lies, as kept if it is.
    pub(super) fn recall_logits(&self, row: Row) -> Global<u16> {
        self.kept.map_or(row.logits, |kept| Global::from_address(kept.at(0u32).load()))
    }

    /// The length of the row, as kept if it is.
    pub(super) fn recall_length(&self, row: Row) -> Reg<u32> {
        self.kept.map_or(row.length, |kept| kept.at(1u32).load().low())
    }

    /// What is this CTA's of list `number`.
    pub(super) fn list(&self, number: Reg<u32>) -> Shared<u32> {
        self.lists.at(number * self.share)
    }

    /// Counts of this exchange.
    fn counts_of(&self, rank: impl Into<Reg<u32>>) -> Shared<u32> {
        let slot = self.exchange.get().mad(self.size, rank);
        self.counts.ptr().at(slot * COUNT_WORDS)
    }

    /// A new search, after a barrier that orders the reads of the last one's tally.
    pub(super) fn begin(&self) {
        when(self.tallies() & self.t.lane.eq(0), || self.above().store(0u32));
    }

    /// The tally's keys above the cut.
    fn above(&self) -> Shared<u32> {
        self.tally.ptr()
    }

    /// As [`find_topdown`](super::RowTopk::find_topdown) over the `bins` of all CTAs, every bin counted. All
    /// threads of all CTAs call it after a barrier that orders their CTA's counting; ends with a barrier of the CTA, after
    /// which the bins may be reused.
    pub(super) fn find_topdown(&self, bins: SharedArray<u32>, need: Reg<u32>) -> Crossing {
        let Cluster { size, t, found, .. } = self;
        when(t.warp.lt(*size), || self.send(bins));
        when(t.warp.eq(0), || {
            let arrived = self.arrived.at(self.exchange.get());
            self.wait(arrived, size * COUNT_WORDS * 4); // ORDER: every CTA's counts.
            let first = Reg::<u32>::from(31) - t.lane;
            let at = self.counts_of(0u32).at(first * (PER_LANE / 2));
            let sum = |at: Shared<u32>, ranks: u32| {
                let more = |rank: u32| at.offset((rank * COUNT_WORDS) as i32).load_vec::<4>();
                (1..ranks).map(more).fold(at.load_vec::<4>(), |sum, more| std::array::from_fn(|w| sum[w] + more[w]))
            };
            let words = match self.sums_in_turn() {
                true => {
                    let words: [Var<u32>; 4] = sum(at, AT_ONCE).map(Var::new);
                    for_range(AT_ONCE, *size, AT_ONCE, |rank| {
                        let more = sum(at.at(rank * COUNT_WORDS), AT_ONCE);
                        words.iter().zip(more).for_each(|(sum, more)| sum.add(more));
                    });
                    words.map(|word| word.get())
                }
                false => sum(at, *size),
            };
            let counts: Vec<_> = words.into_iter().flat_map(|word| [word & 0xFFFF, word >> 16]).collect();
            let crossing = find_topdown_over_lanes(&counts, first * PER_LANE, need, t.lane);
            when(t.lane.eq(0), || found.ptr().store_vec([crossing.bin, crossing.above]));
        });
        sync_threads(); // ORDER: the crossing, before every warp reads it; every CTA's counts, for the last warp.
        let [bin, above] = found.ptr().load_vec::<2>();
        when(self.tallies(), || self.tally(bin));
        self.exchange.add(1u32);
        Crossing { bin, above }
    }

    /// Whether counts are not all loaded before the first is added: where the registers are short.
    fn sums_in_turn(&self) -> bool {
        self.size > if self.planes.is_some() { AT_ONCE } else { 2 * AT_ONCE }
    }

    /// One warp sends to one CTA.
    fn send(&self, bins: SharedArray<u32>) {
        let Cluster { size, t, .. } = self;
        let at = bins.ptr().at(t.lane * PER_LANE);
        let counts: Vec<_> = [at, at.offset(4)].iter().flat_map(|at| at.load_vec::<4>()).collect();
        // No count above the crossing is cut, as all of them together are below K.
        let counts: Vec<_> = counts.into_iter().map(|count| count.min(count_max(*size))).collect();
        let words: [Reg<u32>; 4] = std::array::from_fn(|w| counts[2 * w].permute(counts[2 * w + 1], 0x5410u32));
        let to = self.counts_of(self.rank).at(t.lane * (PER_LANE / 2)).of_cta(t.warp);
        to.store_async(words, self.arrived.at(self.exchange.get()).of_cta(t.warp));
    }

    /// Expects `bytes` at a barrier and waits for them; by the first warp.
    fn wait(&self, arrived: Mbarrier, bytes: u32) {
        when(self.t.lane.eq(0), || arrived.arrive_expect(bytes));
        arrived.wait_cluster(0);
    }

    /// The warp that tallies, beside what the others do next: the one that has octets last.
    fn tallies(&self) -> ptx::Pred {
        self.t.warp.eq(self.t.warps() - 1)
    }

    /// Adds the keys in the bins above `bin`, and takes those in it for the tied.
    fn tally(&self, bin: Reg<u32>) {
        let Cluster { size, rank, t, .. } = self;
        let at = self.counts_of(0u32);
        let packet = at.at(t.lane * (PER_LANE / 2));
        let before: [Var<u32>; 4] = std::array::from_fn(|_| Var::new(0u32));
        // By fours, so that no more are under way at once: there are no registers for all.
        for first in (0..size - 1).step_by(4) {
            when(rank.gt(first), || {
                for r in first..(size - 1).min(first + 4) {
                    when(rank.gt(r), || {
                        let more = packet.offset((r * COUNT_WORDS) as i32).load_vec::<4>();
                        before.iter().zip(more).for_each(|(sum, more)| sum.add(more));
                    });
                }
            });
        }
        let own = packet.at(*rank * COUNT_WORDS).load_vec::<4>();
        let higher: [Reg<u32>; 4] = std::array::from_fn(|w| {
            let low = t.lane * PER_LANE + 2 * w as u32;
            low.gt(bin).select::<u32>(0xFFFFu32, 0u32) | (low + 1).gt(bin).select::<u32>(0xFFFF_0000u32, 0u32)
        });
        let in_higher = |counts: [Reg<u32>; 4]| {
            let pairs = sum_pairwise(&counts.iter().zip(higher).map(|(pair, mask)| *pair & mask).collect::<Vec<_>>());
            (pairs & 0xFFFF) + (pairs >> 16)
        };
        let above = in_higher(before.map(|sum| sum.get())) | (in_higher(own) << 16);
        let above = redux(Redux::AddU32, above);
        // Lane r looks at the counts of CTA r.
        let here = Var::new(0u32);
        when(t.lane.lt(*size), || {
            let pair = at.at(t.lane.mad(COUNT_WORDS, bin >> 1)).load();
            here.set((pair >> ((bin & 1) * 16)) & 0xFFFF);
        });
        let here = here.get();
        let tied = t.lane.eq(*rank).select::<u32>(here << 16, t.lane.lt(*rank).select::<u32>(here, 0u32));
        let tied = redux(Redux::AddU32, tied);
        when(t.lane.eq(0), || self.above().store_vec([self.above().load() + above, tied]));
    }

    /// How many keys above the threshold and at it the CTAs before have, and this one. After a barrier of the CTA that orders the
    /// tally of the last digit.
    pub(super) fn tallied(&self) -> [[Reg<u32>; 2]; 2] {
        let words = self.above().load_vec::<2>();
        [words.map(|word| word & 0xFFFF), words.map(|word| word >> 16)]
    }

    /// How many keys above the threshold and at it the CTAs before have, and this one's places, if the first `ties` at it are
    /// taken.
    pub(super) fn slice(&self, ties: Reg<u32>) -> ([Reg<u32>; 2], Slice) {
        // Those at it may be more than were counted, but then as many as are taken were.
        let [before, own] = self.tallied();
        let places = |above: Reg<u32>, tied: Reg<u32>| above + tied.min(ties);
        let first = places(before[0], before[1]);
        (before, Slice { first, end: places(before[0] + own[0], before[1] + own[1]) })
    }

    /// Deals list `number` to the CTAs by its places; `from` holds this CTA's, from the place `slice.base()` on. All
    /// threads call it after a barrier that orders their CTA's list; after it each may read [`list`](Cluster::list).
    pub(super) fn deal_list(&self, number: Reg<u32>, from: SharedArray<u32>, slice: Slice) {
        let Cluster { t, share, .. } = self;
        let (list, arrived) = (self.list(number), self.arrived.at(number + self.digits));
        let first = slice.base();
        let fours = (share * self.size / 4).div_ceil(t.threads);
        for round in 0..fours {
            let place = first + (t.index + round * t.threads) * 4;
            when(place.lt(slice.end), || {
                let vectors = from.at(place - first).load_vec::<4>();
                let (owner, at) = (place / *share, place % *share);
                let (to, arrived) = (list.at(at).of_cta(owner), arrived.of_cta(owner));
                when_else(
                    place.ge(slice.first) & (place + 4).le(slice.end),
                    || to.store_async(vectors, arrived),
                    || {
                        for (i, vector) in (0u32..).zip(vectors) {
                            let place = place + i;
                            when(place.ge(slice.first) & place.lt(slice.end), || {
                                to.offset(i as i32).store_async([vector], arrived);
                            });
                        }
                    },
                );
            });
        }
        when(t.index.eq(0), || arrived.arrive_expect(share * 4));
        arrived.wait_cluster(0); // ORDER: this CTA's part of the list, before its threads read it.
    }

    /// Sends this CTA's planes at `from` to CTA 0; by one warp, after a barrier that orders them. If any CTA calls it, all do.
    pub(super) fn send_planes(&self, from: Shared<u32>) {
        let Cluster { rank, t, .. } = self;
        let (planes, words) = self.gathered_planes();
        assert!(words / 4 <= 32, "one 16-byte packet a lane");
        when(t.lane.lt(words / 4), || {
            let to = planes.ptr().at(rank.mad(words, t.lane * 4)).of_cta(0u32);
            to.store_async(from.at(t.lane * 4).load_vec::<4>(), self.planes_arrived().of_cta(0u32));
        });
    }

    /// Waits for the planes of all CTAs; by all threads of CTA 0 if any has been sent.
    pub(super) fn await_planes(&self) {
        let arrived = self.planes_arrived();
        when(self.t.index.eq(0), || arrived.arrive_expect(self.gathered_planes().0.len() * 4));
        arrived.wait_cluster(0); // ORDER: every CTA's planes, before this one's threads read them.
    }

    /// Two words of the planes from `at` on, of all CTAs; in CTA 0 after [`await_planes`](Cluster::await_planes).
    pub(super) fn two_of_planes(&self, at: Reg<u32>) -> [Reg<u32>; 2] {
        let (planes, words) = self.gathered_planes();
        let of = |rank: u32| planes.ptr().at(at).offset((rank * words) as i32).load_vec::<2>();
        (1..self.size).map(of).fold(of(0), |[a, b], [c, d]| [a | c, b | d])
    }

    /// What says that they are all there.
    fn planes_arrived(&self) -> Mbarrier {
        self.arrived.at(self.arrived.len() - 1)
    }

    /// Where they are gathered, and how many words each CTA has.
    fn gathered_planes(&self) -> (SharedArray<u32>, u32) {
        let planes = self.planes.expect("a cluster that gathers planes");
        (planes, planes.len() / self.size)
    }
}

//! The candidates of a row in their total order, and the radix select of the K-th.

use dsa_core::device::keys::lowest_bit;
use dsa_core::device::ownership::global_of;
use dsa_core::device::radix::{WARP_BINS, WARP_DIGIT_BITS, count, find_topdown_in_warp};
use dsa_core::device::scan::fill;
use ptx::*;

use super::kernel::Merge;

/// Pairs of words that a thread looks at together.
const PAIRS: u32 = 4;
/// Ties whose order is found by comparing each with all; more take a radix select of their ids.
pub(super) const TIES: u32 = 256;
/// Lanes that compare a tie with the others, each with its share of them.
const TIE_LANES: u32 = 2;
/// Ties that these lanes look at together.
pub(super) const TIES_AT_ONCE: u32 = 32;

/// A word that a rank sent.
#[derive(Clone, Copy)]
pub(super) struct Candidate<'a> {
    /// It is not empty, and its rank is asked for its words.
    pub(super) live: Pred,
    /// Its order16.
    pub(super) order: Reg<u32>,
    /// Computes its global id where it is called.
    pub(super) gid: &'a dyn Fn() -> Reg<u32>,
}

/// Takes whether each of some candidates is live, its order16, and what computes the global id of the `i`-th.
type OnBatch<'a> = &'a dyn Fn(&[(Pred, Reg<u32>)], &dyn Fn(Reg<u32>) -> Reg<u32>);

/// The K-th candidate; (0, 0) if there are fewer.
#[derive(Clone, Copy)]
pub(super) struct Kth {
    pub(super) order: Var<u32>,
    pub(super) gid: Var<u32>,
}

impl Kth {
    /// The key comes before the K-th, and is not empty.
    pub(super) fn is_below(self, order: Reg<u32>, gid: Reg<u32>) -> Pred {
        order.gt(self.order.get()) | (order.eq(self.order.get()) & gid.lt(self.gid.get()) & order.ne(0))
    }

    /// The key is the K-th or comes before it, and is not empty.
    pub(super) fn admits(self, order: Reg<u32>, gid: Reg<u32>) -> Pred {
        order.gt(self.order.get()) | (order.eq(self.order.get()) & gid.le(self.gid.get()) & order.ne(0))
    }
}

/// Which ranks are saturated; 0 in round 1.
#[derive(Clone, Copy)]
pub(super) struct Saturated {
    /// One bit per rank.
    pub(super) mask: Reg<u32>,
    /// How many.
    pub(super) count: Reg<u32>,
}

/// Where a digit of the K-th candidate was found.
struct Digit {
    bin: Reg<u32>,
    /// Candidates in higher bins.
    above: Reg<u32>,
    /// Candidates in its own.
    here: Reg<u32>,
    /// Candidates in all.
    total: Reg<u32>,
}

impl Merge {
    /// Local index of `word`, the `j`-th of a B' row of `slots` in shared memory.
    pub(super) fn local_of_word(&self, row: Shared<u32>, slots: Reg<u32>, j: Reg<u32>, word: Reg<u32>) -> Reg<u32> {
        let low = (word & 0xFFFF) ^ 0xFFFF;
        if !self.has_planes() {
            return low;
        }
        let plane = row.at((j >> 5) + slots).load();
        (((plane >> (j & 31)) & 1) << 16) | low
    }

    /// Whether a local index may need its bit 16.
    pub(super) fn has_planes(&self) -> bool {
        self.shape.exchange().local_len_max() > 1 << 16
    }

    /// The B' row of `rank` in shared memory.
    pub(super) fn row_of(&self, rank: Reg<u32>) -> Shared<u32> {
        self.smem.words.ptr().at(rank * self.row_words())
    }

    /// `body` for each candidate: the words of the ranks that are not saturated, and the lists of those that are.
    pub(super) fn for_each_candidate(&self, saturated: Saturated, body: impl Fn(Candidate<'_>)) {
        self.for_each_batch(saturated, |batch, gid| {
            for (i, (live, order)) in batch.iter().enumerate() {
                body(Candidate { live: *live, order: *order, gid: &|| gid(Reg::from(i as u32)) });
            }
        });
    }

    /// As [`for_each_candidate`](Merge::for_each_candidate) for all that a thread looks at together: whether each is live,
    /// its order16, and what computes the global id of the `i`-th.
    fn for_each_batch(&self, saturated: Saturated, body: impl Fn(&[(Pred, Reg<u32>)], &dyn Fn(Reg<u32>) -> Reg<u32>)) {
        let (n, k, own) = (self.n(), self.k(), self.own());
        let per_rank = n / 2;
        self.for_each_pair(
            ((self.ranks() * per_rank).into(), self.ranks() * per_rank, true),
            &|index| {
                let (rank, pair) = (index / per_rank, index % per_rank);
                let asked = ((saturated.mask >> rank) & 1).eq(0);
                (asked, self.row_of(rank).at(pair * 2).load_vec::<2>())
            },
            &|index, odd| {
                let (rank, pair) = (index / per_rank, index % per_rank);
                let (row, j) = (self.row_of(rank), pair * 2 + odd);
                global_of(own, rank, self.local_of_word(row, n.into(), j, row.at(j).load()))
            },
            &body,
        );
        if self.shape.is_direct() {
            return;
        }
        let per_list = k / 2;
        self.for_each_pair(
            (saturated.count * per_list, self.slots() * per_list, false),
            &|index| (Pred::constant(true), self.list_pair(index / per_list, index % per_list)),
            &|index, odd| {
                let (slot, j) = (index / per_list, (index % per_list) * 2 + odd);
                let mut local = (self.list_word(slot, j) & 0xFFFF) ^ 0xFFFF;
                if self.has_planes() {
                    local = local | (((self.list_word(slot, (j >> 5) + k) >> (j & 31)) & 1) << 16);
                }
                global_of(own, self.smem.owner.at(slot).load(), local)
            },
            &body,
        );
    }

    /// The words of `(pairs, at most, whether always that many)` pairs in batches: `load` says of pair `i` whether it is asked
    /// for, and its words; `gid` is the global id of its first or second one.
    fn for_each_pair(
        &self,
        (total, most, always): (Reg<u32>, u32, bool),
        load: &dyn Fn(Reg<u32>) -> (Pred, [Reg<u32>; 2]),
        gid: &dyn Fn(Reg<u32>, Reg<u32>) -> Reg<u32>,
        body: OnBatch<'_>,
    ) {
        let t = self.t;
        let together = most.div_ceil(t.threads).min(PAIRS);
        let whole = always && most.is_multiple_of(t.threads * together);
        // Beyond the end the last pair once more, which is not live there.
        let clamped = |index: Reg<u32>| if whole { index } else { index.min(total - 1) };
        for_range(t.index, total, t.threads * together, |first| {
            let loaded: Vec<_> = (0..together)
                .map(|i| {
                    let index = first + i * t.threads;
                    let live = if whole { Pred::constant(true) } else { index.lt(total) };
                    let (asked, words) = load(clamped(index));
                    (live & asked, words)
                })
                .collect();
            let batch: Vec<_> = (loaded.into_iter())
                .flat_map(|(asked, words)| words.map(|word| (asked & word.ne(0), word >> 16)))
                .collect();
            body(&batch, &|i| gid(clamped(first + (i >> 1) * t.threads), i & 1));
        });
    }

    /// Clears what [`find_kth`](Merge::find_kth) counts in; a CTA barrier must follow.
    pub(super) fn clear_counts(&self) {
        self.smem.digits.iter().for_each(|bins| fill(*bins, 0, self.t));
        when(self.t.index.eq(0), || self.smem.tie_count.at(0).store(0u32));
    }

    /// Counts the upper digit of every candidate, once [cleared](Merge::clear_counts); a CTA barrier must follow.
    pub(super) fn count_upper(&self, saturated: Saturated) {
        self.for_each_candidate(saturated, |candidate| self.count_upper_of(candidate.live, candidate.order));
    }

    /// Counts the upper digit of one candidate, if it is `live`.
    pub(super) fn count_upper_of(&self, live: Pred, order: Reg<u32>) {
        self.count_digit(0, live, order >> WARP_DIGIT_BITS);
    }

    /// Counts a digit, or something in a bin that nobody sums: that costs less than a branch.
    fn count_digit(&self, which: usize, live: Pred, digit: Reg<u32>) {
        count(self.smem.digits[which].at(live.select::<u32>(digit, WARP_BINS)));
    }

    /// Finds the K-th candidate, whose upper digits are counted. All threads call it together.
    pub(super) fn find_kth(&self, saturated: Saturated, kth: Kth) {
        let k = self.k();
        let upper = self.find_digit(0, k.into());
        kth.order.set(0u32);
        kth.gid.set(0u32);
        when(upper.total.ge(k), || {
            self.for_each_candidate(saturated, |candidate| {
                let here = candidate.live & (candidate.order >> WARP_DIGIT_BITS).eq(upper.bin);
                self.count_digit(1, here, candidate.order & ((1 << WARP_DIGIT_BITS) - 1));
            });
            sync_threads(); // ORDER: the lower digits counted, before they are summed.
            let need = Reg::<u32>::from(k) - upper.above;
            let lower = self.find_digit(1, need);
            let order = (upper.bin << WARP_DIGIT_BITS) | lower.bin;
            kth.order.set(order);
            // Of the keys with that order16 the `ties` lowest ids.
            let ties = need - lower.above;
            when_else(
                lower.here.le(TIES),
                || kth.gid.set(self.find_tie(saturated, order, lower.here, ties)),
                || kth.gid.set(self.find_tie_by_radix(saturated, order, ties)),
            );
        });
    }

    /// Where `digits[which]` counted from the top reaches `need`. Contains a CTA barrier.
    fn find_digit(&self, which: usize, need: Reg<u32>) -> Digit {
        let Merge { smem, t, .. } = self;
        let found = smem.found[which];
        when(t.warp.eq(0), || {
            let crossing = find_topdown_in_warp(smem.digits[which], need, t.lane);
            let words = [crossing.bin, crossing.above, crossing.here, crossing.total];
            when(t.lane.eq(0), || found.ptr().store_vec(words));
        });
        sync_threads(); // ORDER: what warp 0 found, before every warp reads it.
        let [bin, above, here, total] = found.ptr().load_vec::<4>();
        Digit { bin, above, here, total }
    }

    /// The `rank`-th lowest id (from 1) of the `count` candidates whose order16 is `order`: each is compared with all.
    fn find_tie(&self, saturated: Saturated, order: Reg<u32>, count: Reg<u32>, rank: Reg<u32>) -> Reg<u32> {
        let Merge { smem, t, .. } = self;
        self.for_each_batch(saturated, |batch, gid| {
            let bit = |(i, (live, its)): (usize, &(Pred, Reg<u32>))| (*live & its.eq(order)).as_u32() << i as u32;
            let tied = batch.iter().enumerate().map(bit).reduce(|a, b| a | b).expect("some candidate");
            // Few threads have any, and these seldom more than one.
            when(tied.ne(0), || {
                let slots = smem.tie_count.at(0).atomic(Atomic::Add, Sem::Relaxed(Scope::Cta), tied.popc());
                let (slot, rest) = (Var::new(slots), Var::new(tied));
                while_(
                    || rest.get().ne(0),
                    || {
                        // No more than were counted; were they more, memory would still be safe.
                        smem.ties.at(slot.get().min(TIES - 1)).store(gid(lowest_bit(rest.get())));
                        slot.add(1);
                        rest.set(rest.get() & (rest.get() - 1));
                    },
                );
            });
        });
        // What the last vectors hold beyond them comes after all.
        when(t.index.lt(TIES_AT_ONCE), || smem.ties.at(count + t.index).store(u32::MAX));
        sync_threads(); // ORDER: every tie, before they are compared.
        // Neighbouring lanes share a tie. Whole warps, since they add their counts.
        let (tie, part) = (t.index >> TIE_LANES.ilog2(), t.index & (TIE_LANES - 1));
        when((t.warp * (32 / TIE_LANES)).lt(count), || {
            let mine = smem.ties.at(tie.min(count)).load();
            let before = Var::new(0u32);
            for_range(0u32, count, TIES_AT_ONCE, |first| {
                let at = smem.ties.ptr().at(first + part * 4);
                let vectors = TIES_AT_ONCE / TIE_LANES / 4;
                let others: Vec<_> =
                    (0..vectors).flat_map(|i| at.offset((i * TIE_LANES * 4) as i32).load_vec::<4>()).collect();
                let below: Vec<_> = others.into_iter().map(|other| other.lt(mine).as_u32()).collect();
                before.add(below.into_iter().reduce(|a, b| a + b).expect("some tie"));
            });
            let mut sum = before.get();
            for lanes in (0..TIE_LANES.ilog2()).map(|bit| 1 << bit) {
                sum = sum + shuffle_xor(sum, lanes);
            }
            when((sum + 1).eq(rank) & part.eq(0) & tie.lt(count), || smem.tie.at(0).store(mine));
        });
        sync_threads(); // ORDER: the tie, before every warp reads it.
        smem.tie.at(0).load()
    }

    /// As [`find_tie`](Merge::find_tie) for any number of them.
    fn find_tie_by_radix(&self, saturated: Saturated, order: Reg<u32>, rank: Reg<u32>) -> Reg<u32> {
        let bits = self.own().gid_bits();
        // The lowest ids have the highest complements.
        let ones = (1u32 << bits) - 1;
        let (mut prefix, mut need, mut unknown) = (Reg::<u32>::from(0), rank, bits);
        while unknown > 0 {
            let width = unknown.min(WARP_DIGIT_BITS);
            let shift = unknown - width;
            fill(self.smem.digits[0], 0, self.t);
            sync_threads(); // ORDER: the cleared bins, before keys are counted.
            self.for_each_candidate(saturated, |candidate| {
                let comp = (candidate.gid)() ^ ones;
                let here = candidate.live & candidate.order.eq(order) & (comp >> unknown).eq(prefix);
                self.count_digit(0, here, (comp >> shift) & ((1 << width) - 1));
            });
            sync_threads(); // ORDER: the digits counted, before they are summed.
            let digit = self.find_digit(0, need);
            prefix = (prefix << width) | digit.bin;
            need = need - digit.above;
            unknown = shift;
        }
        prefix ^ ones
    }

    /// The ranks all of whose words come before the K-th candidate of round 1.
    pub(super) fn find_saturated(&self, kth: Kth) -> Reg<u32> {
        let (n, own, t) = (self.n(), self.own(), self.t);
        let precedes = |rank: Reg<u32>, j: Reg<u32>| {
            let row = self.row_of(rank);
            let word = row.at(j).load();
            kth.is_below(word >> 16, global_of(own, rank, self.local_of_word(row, n.into(), j, word)))
        };
        // Seldom does even the last word, the smallest of a row of more than N keys.
        let suspect = Var::new(0u32);
        when(t.lane.lt(self.ranks()), || suspect.set(precedes(t.lane, (n - 1).into()).as_u32()));
        let mask = Var::new(ballot(suspect.get().ne(0)));
        when(mask.get().ne(0), || {
            for_range(t.index, self.ranks() * n, t.threads, |i| {
                // A warp's lanes have words of one rank.
                let (rank, j) = (i / n, i % n);
                let hides_none = !all(precedes(rank, j));
                when(hides_none & t.lane.eq(0), || {
                    self.smem.unsaturated.at(rank).reduce(Atomic::Or, Sem::Relaxed(Scope::Cta), 1u32);
                });
            });
            sync_threads(); // ORDER: every warp's verdicts, before they are read.
            let unsaturated = Var::new(1u32);
            when(t.lane.lt(self.ranks()), || unsaturated.set(self.smem.unsaturated.at(t.lane).load()));
            mask.set(ballot(unsaturated.get().eq(0)));
        });
        mask.get()
    }
}

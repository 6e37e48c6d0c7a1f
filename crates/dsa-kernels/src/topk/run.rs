//! The keys that a thread holds in registers, eight at a time, and how they are counted.

use dsa_core::device::keys::{Keys8, both_halves, foreign_keys, order16_x2, sort_halves};
use dsa_core::device::radix::{WARP_BINS, WARP_DIGIT_BITS, count};
use dsa_core::device::scan::Thread;
use ptx::{Global, Reg, SharedArray, Var, when};

use super::KEYS;
use super::cluster::Cluster;

/// Eight consecutive keys and their place: key `i` has index `8 * base + i`. Key 0 is "no key".
#[derive(Clone, Copy)]
pub(super) struct Octet {
    pub(super) base: Var<u32>,
    pub(super) words: [Var<u32>; 4],
}

impl Octet {
    fn load(&self, from: Global<u32>) {
        for (word, loaded) in self.words.iter().zip(from.load_vec::<4>()) {
            word.set(loaded);
        }
    }

    /// "No key" eight times.
    fn clear(&self) {
        self.words.iter().for_each(|word| word.set(0u32));
    }

    pub(super) fn keys(&self) -> Keys8 {
        self.words.map(|w| w.get())
    }

    /// Index of key 0.
    pub(super) fn first_index(&self) -> Reg<u32> {
        self.base.get() * KEYS
    }
}

/// The CTA's octets: lines of 32, a line's octet `l` in lane `l`, `share` consecutive lines a warp. So loads are coalesced,
/// and (warp, line, lane) is the order of the indices.
pub(super) struct Run {
    octets: Vec<Octet>,
    /// Their vectors were each lane given consecutive ones of its warp's.
    by_lane: Vec<Var<u32>>,
    /// Lines of a warp, the same in all.
    share: Var<u32>,
    part: Option<Part>,
    t: Thread,
}

/// Of a CTA that is one of several.
struct Part {
    ctas: u32,
    rank: Reg<u32>,
    /// Number of its first octet.
    first: Var<u32>,
}

impl Run {
    /// Room for `octets` lines a warp.
    pub(super) fn new(octets: u32, cluster: Option<&Cluster>, t: Thread) -> Run {
        let octet = || Octet { base: Var::new(0u32), words: std::array::from_fn(|_| Var::new(0u32)) };
        let part = cluster.map(|cluster| Part { ctas: cluster.size, rank: cluster.rank, first: Var::new(0u32) });
        let by_lane = (0..octets).map(|_| Var::new(0u32)).collect();
        Run { octets: (0..octets).map(|_| octet()).collect(), by_lane, share: Var::new(0u32), part, t }
    }

    /// Octets of a thread at most.
    pub(super) fn len(&self) -> usize {
        self.octets.len()
    }

    /// Deals `total` octets out, consecutive ones to each CTA, in equal shares; returns how many of them are this CTA's and
    /// the rounds that they take.
    pub(super) fn deal(&self, total: Reg<u32>) -> (Reg<u32>, Reg<u32>) {
        let lines = (total + 31) >> 5;
        let Some(Part { ctas, rank, first }) = &self.part else { return (total, self.spread(lines)) };
        let own_lines = (lines + (ctas - 1)) >> ctas.trailing_zeros();
        let most = own_lines * 32;
        first.set(*rank * most);
        let own = (total.max(first.get()) - first.get()).min(most);
        (own, self.spread(own_lines))
    }

    /// Deals `total` octets of this CTA alone to its warps; returns the rounds that they take.
    pub(super) fn deal_own(&self, total: Reg<u32>) -> Reg<u32> {
        if let Some(Part { first, .. }) = &self.part {
            first.set(0u32);
        }
        self.spread((total + 31) >> 5)
    }

    /// Deals lines to the warps.
    fn spread(&self, lines: Reg<u32>) -> Reg<u32> {
        let (warps, most) = (self.t.warps(), self.octets.len() as u32);
        assert!(warps.is_power_of_two() && most.is_power_of_two(), "shifts divide");
        self.share.set(((lines + (warps - 1)) >> warps.trailing_zeros()).min(most));
        (lines + (warps * most - 1)) >> (warps * most).trailing_zeros()
    }

    /// Octets of one round of all CTAs.
    pub(super) fn capacity(&self) -> u32 {
        self.octets.len() as u32 * self.t.threads * self.part.as_ref().map_or(1, |part| part.ctas)
    }

    /// Number of this thread's octet `j` in `round`, among those of the CTA.
    pub(super) fn number(&self, round: Reg<u32>, j: usize) -> Reg<u32> {
        let line = round.mad(self.t.warps(), self.t.warp).mad(self.share.get(), j as u32);
        line.mad(32u32, self.t.lane)
    }

    /// As [`number`](Run::number) of the `j`th of as many consecutive octets of its warp's that fall to each lane.
    pub(super) fn number_by_lane(&self, round: Reg<u32>, j: usize) -> Reg<u32> {
        let lane = round.mad(self.t.warps(), self.t.warp) * 32 + self.t.lane;
        lane.mad(self.share.get(), j as u32)
    }

    /// The vector of that octet.
    pub(super) fn vector_by_lane(&self, j: usize) -> Reg<u32> {
        self.by_lane[j].get()
    }

    /// Lines of a warp.
    pub(super) fn share(&self) -> Reg<u32> {
        self.share.get()
    }

    /// Loads this thread's octets of a round among the `total` of the CTA, 16 bytes each; octet 0 of all CTAs is at `from`.
    pub(super) fn load(&self, round: Reg<u32>, total: Reg<u32>, from: Global<u32>) {
        let vector = |n: Reg<u32>| self.part.as_ref().map_or(n, |part| part.first.get() + n);
        self.each(|j, octet| {
            let n = self.number(round, j);
            octet.base.set(vector(n));
            octet.clear();
            when(n.lt(total), || octet.load(from.at(octet.base.get() * 4)));
            self.by_lane[j].set(vector(self.number_by_lane(round, j)));
        });
    }

    /// As [`load`](Run::load) for the octets of a list, of `all`.
    pub(super) fn load_listed(&self, total: Reg<u32>, from: Global<u32>, list: SharedArray<u32>, all: Reg<u32>) {
        let last = all - 1;
        let vector = |n: Reg<u32>| {
            // Lists ascend and end within the row, unless tops past its end are not 0. The last may be cut short.
            let bound = (n + 1).lt(total).select::<u32>(last - 1, last);
            list.at(n).load().min(bound)
        };
        self.each(|j, octet| {
            let n = self.number(Reg::from(0u32), j);
            octet.clear();
            when(n.lt(total), || {
                octet.base.set(vector(n));
                octet.load(from.at(octet.base.get() * 4));
            });
            let n = self.number_by_lane(Reg::from(0u32), j);
            when(n.lt(total), || self.by_lane[j].set(vector(n)));
        });
    }

    /// Makes keys of loaded logits, those of the first `length` of a row.
    pub(super) fn logits_to_keys(&self, total: Reg<u32>, length: Reg<u32>, foreign: bool) {
        self.each(|j, octet| {
            for word in octet.words {
                word.set(if foreign { foreign_keys(word.get()) } else { order16_x2(word.get()) });
            }
            // Only the last vector can reach past the row's end, and there is nothing after it.
            let n = self.number(Reg::from(0u32), j);
            when((n + 1).ge(total), || {
                let valid = n.lt(total).select::<u32>(length - octet.first_index(), 0u32);
                for (w, word) in octet.words.iter().enumerate() {
                    let first = 2 * w as u32;
                    let mask = valid.gt(first).select::<u32>(0xFFFFu32, 0u32)
                        | valid.gt(first + 1).select::<u32>(0xFFFF_0000u32, 0u32);
                    word.set(word.get() & mask);
                }
            });
        });
    }

    /// `body` for each octet in use, in order.
    pub(super) fn each(&self, mut body: impl FnMut(usize, &Octet)) {
        for (j, octet) in self.octets.iter().enumerate() {
            when(self.share.get().gt(j as u32), || body(j, octet));
        }
    }

    /// Counts the upper digit of every key ("no key" lands in bin 0, of which no more than is missing counts).
    pub(super) fn count_high(&self, bins: SharedArray<u32>) {
        let mask = (WARP_BINS - 1) << 2;
        self.each(|_, octet| {
            for word in octet.keys() {
                count(bins.ptr().byte_at((word >> (WARP_DIGIT_BITS - 2)) & mask));
                count(bins.ptr().byte_at((word >> (16 + WARP_DIGIT_BITS - 2)) & mask));
            }
        });
    }

    /// Counts the lower digit of the keys whose upper digit is `high`, and all others in one more bin: a branch around the
    /// count would take longer.
    pub(super) fn count_low(&self, high: Reg<u32>, bins: SharedArray<u32>) {
        let (value, none) = (both_halves(high << WARP_DIGIT_BITS), both_halves(Reg::from(WARP_BINS)));
        self.each(|_, octet| {
            for word in octet.keys() {
                let digits = (word ^ value).min_u16x2(none) << 2;
                for digit in [digits & 0xFFFF, digits >> 16] {
                    count(bins.ptr().byte_at(digit));
                }
            }
        });
    }

    /// Counts the keys above `low` by their distance from it; the last bin holds all that are further away, and bin 0, of
    /// which no more than is missing counts, all others that are looked at. Made for octets of which only the largest keys, if
    /// any, are above.
    pub(super) fn count_from(&self, low: Reg<u32>, bins: SharedArray<u32>) {
        let low = both_halves(low);
        let limit = both_halves(Reg::from(WARP_BINS - 1));
        let count_two = |word: Reg<u32>| {
            // Byte offsets of two bins, which fit 16 bits.
            let distance = (word.max_u16x2(low) - low).min_u16x2(limit) << 2;
            for bin in [distance & 0xFFFF, distance >> 16] {
                count(bins.ptr().byte_at(bin));
            }
        };
        self.each(|_, octet| {
            let [first, second, third, fourth] = sort_halves(octet.keys());
            count_two(first);
            count_two(second);
            when(third.max_u16x2(low).ne(low), || {
                count_two(third);
                count_two(fourth);
            });
        });
    }
}

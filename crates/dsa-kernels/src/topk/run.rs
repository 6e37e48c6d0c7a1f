//! The keys that a thread holds in registers, eight at a time, and how they are counted.

use dsa_core::device::keys::{Keys8, both_halves, foreign_keys, order16_x2, sort_halves};
use dsa_core::device::radix::{WARP_BINS, WARP_DIGIT_BITS, count};
use dsa_core::device::scan::Thread;
use ptx::{Global, Pred, Reg, Shared, SharedArray, Var, shuffle_xor, when};

use super::cluster::Cluster;
use super::{CHUNK_TOPS, KEYS};

/// Chunks of an octet of supertops, and lanes that load them together.
const CHUNKS: u32 = KEYS;
const _: () = assert!(CHUNK_TOPS == 8, "tops of one load");

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
    /// Their places were each lane given consecutive ones of its warp's.
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

/// One step of a transposition: lanes that differ in `mask`, 2 or 4, exchange the words whose numbers differ from theirs there;
/// `upper`: whether this one has the bit.
fn exchange(words: [Reg<u32>; 4], mask: u32, upper: Pred) -> [Reg<u32>; 4] {
    let step = mask as usize / 2;
    let mut words = words;
    for low in (0..4).filter(|p| p & step == 0) {
        let high = low | step;
        let received = shuffle_xor(upper.select(words[low], words[high]), mask);
        words[low] = upper.select(received, words[low]);
        words[high] = upper.select(words[high], received);
    }
    words
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

    /// Deals `total` octets out, consecutive ones to each CTA, in equal shares; returns how many of them are this CTA's.
    pub(super) fn deal(&self, total: Reg<u32>) -> Reg<u32> {
        let lines = (total + 31) >> 5;
        let Some(Part { ctas, rank, first }) = &self.part else {
            self.spread(lines);
            return total;
        };
        let own_lines = (lines + (ctas - 1)) >> ctas.trailing_zeros();
        let most = own_lines * 32;
        first.set(*rank * most);
        self.spread(own_lines);
        (total.max(first.get()) - first.get()).min(most)
    }

    /// Deals `total` octets of this CTA alone to its warps.
    pub(super) fn deal_own(&self, total: Reg<u32>) {
        if let Some(Part { first, .. }) = &self.part {
            first.set(0u32);
        }
        self.spread((total + 31) >> 5);
    }

    /// Deals lines to the warps: no more than fit, or what is past the end is not looked at.
    fn spread(&self, lines: Reg<u32>) {
        let (warps, most) = (self.t.warps(), self.octets.len() as u32);
        assert!(warps.is_power_of_two(), "a shift divides");
        self.share.set(((lines + (warps - 1)) >> warps.trailing_zeros()).min(most));
    }

    /// Octets that all CTAs hold.
    pub(super) fn capacity(&self) -> u32 {
        self.octets.len() as u32 * self.t.threads * self.part.as_ref().map_or(1, |part| part.ctas)
    }

    /// Number of the first octet of this warp's line `j`, among those of the CTA.
    fn line(&self, j: usize) -> Reg<u32> {
        self.t.warp.mad(self.share.get(), j as u32) << 5
    }

    /// Number of this thread's octet `j`, among those of the CTA.
    pub(super) fn number(&self, j: usize) -> Reg<u32> {
        self.t.warp.mad(self.share.get(), j as u32).mad(32u32, self.t.lane)
    }

    /// As [`number`](Run::number) of the `j`th of as many consecutive octets of its warp's that fall to each lane.
    pub(super) fn number_by_lane(&self, j: impl Into<Reg<u32>>) -> Reg<u32> {
        (self.t.warp * 32 + self.t.lane).mad(self.share.get(), j.into())
    }

    /// The place of that octet: its keys have the indices from 8 times it on.
    pub(super) fn base_by_lane(&self, j: usize) -> Reg<u32> {
        self.by_lane[j].get()
    }

    /// Lines of a warp.
    pub(super) fn share(&self) -> Reg<u32> {
        self.share.get()
    }

    /// Number among those of all CTAs of the CTA's octet `n`.
    fn among_all(&self, n: Reg<u32>) -> Reg<u32> {
        self.part.as_ref().map_or(n, |part| part.first.get() + n)
    }

    /// Loads this thread's octets among the `total` of the CTA, 16 bytes each; octet 0 of all CTAs is at `from`.
    pub(super) fn load(&self, total: Reg<u32>, from: Global<u32>) {
        self.each(|j, octet| {
            let n = self.number(j);
            octet.base.set(self.among_all(n));
            octet.clear();
            when(n.lt(total), || octet.load(from.at(octet.base.get() * 4)));
            self.by_lane[j].set(self.among_all(self.number_by_lane(j as u32)));
        });
    }

    /// As [`load`](Run::load) for octets of supertops: key `i` of octet `n` is the largest top of chunk `8 n + i`, 16 bytes, of
    /// the `chunks` from `from` on.
    ///
    /// Eight lanes read the eight octets that are theirs one after the other, a chunk each, so that a warp's loads are of
    /// whole lines; then they give each other what is each one's.
    pub(super) fn load_supertops(&self, total: Reg<u32>, from: Global<u32>, chunks: Reg<u32>) {
        let end = (self.among_all(total) * CHUNKS).min(chunks);
        let lane = self.t.lane;
        let odd = (lane & 1).ne(0);
        self.each(|j, octet| {
            self.by_lane[j].set(self.among_all(self.number_by_lane(j as u32)));
            // This lane's chunk of the first of the eight octets.
            let first = self.among_all(self.line(j) + (lane & !(CHUNKS - 1))).mad(CHUNKS, lane & (CHUNKS - 1));
            let at = from.at(first * 4);
            // Word p: this lane's chunk of the octets 2 p and 2 p + 1.
            let pairs: [Var<u32>; 4] = std::array::from_fn(|_| Var::new(0u32));
            // Half of them under way at once: there are no registers for all.
            for (half, pairs) in pairs.chunks(2).enumerate() {
                let first = first + 4 * half as u32 * CHUNKS;
                let at = at.offset(16 * (half as u32 * CHUNKS) as i32);
                when(first.lt(end), || {
                    let largest: [Reg<u32>; 4] = std::array::from_fn(|i| {
                        let words: [Var<u32>; 4] = std::array::from_fn(|_| Var::new(0u32));
                        let chunk = i as u32 * CHUNKS;
                        when((first + chunk).lt(end), || {
                            let loaded = at.offset(4 * chunk as i32).load_vec::<4>();
                            words.iter().zip(loaded).for_each(|(word, loaded)| word.set(loaded));
                        });
                        let [a, b, c, d] = words.map(|word| word.get());
                        a.max_u16x2(b).max_u16x2(c.max_u16x2(d))
                    });
                    for (pair, largest) in pairs.iter().zip(largest.chunks(2)) {
                        let (even, odd) = (largest[0], largest[1]);
                        pair.set(even.permute(odd, 0x5410u32).max_u16x2(even.permute(odd, 0x7632u32)));
                    }
                });
            }
            let words = pairs.map(|pair| pair.get());
            // Then this lane's and its neighbour's chunk of one of these, of octet 2 p + (lane & 1).
            let selector = odd.select::<u32>(0x3276u32, 0x5410u32);
            let words = words.map(|word| word.permute(shuffle_xor(word, 1), selector));
            // What is left is to transpose four words of four lanes.
            let words = [2u32, 4].into_iter().fold(words, |words, mask| exchange(words, mask, (lane & mask).ne(0)));
            octet.words.iter().zip(words).for_each(|(word, value)| word.set(value));
        });
    }

    /// As [`load`](Run::load) for the octets of a list, of `all`.
    pub(super) fn load_listed(&self, total: Reg<u32>, from: Global<u32>, list: Shared<u32>, all: Reg<u32>) {
        let last = all - 1;
        let base = |n: Reg<u32>| {
            // Lists ascend and end within the row, unless tops past its end are not 0. The last may be cut short.
            let bound = (n + 1).lt(total).select::<u32>(last - 1, last);
            list.at(n).load().min(bound)
        };
        self.each(|j, octet| {
            let n = self.number(j);
            octet.clear();
            when(n.lt(total), || {
                octet.base.set(base(n));
                octet.load(from.at(octet.base.get() * 4));
            });
            let n = self.number_by_lane(j as u32);
            when(n.lt(total), || self.by_lane[j].set(base(n)));
        });
    }

    /// Makes keys of loaded logits, those of the first `length` of a row.
    pub(super) fn logits_to_keys(&self, total: Reg<u32>, length: Reg<u32>, foreign: bool) {
        self.each(|j, octet| {
            for word in octet.words {
                word.set(if foreign { foreign_keys(word.get()) } else { order16_x2(word.get()) });
            }
            // Only the last vector can reach past the row's end, and there is nothing after it.
            let n = self.number(j);
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

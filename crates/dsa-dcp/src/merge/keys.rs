//! The candidates of a row in their total order, and the radix select of the K-th.

use dsa_core::device::ownership::global_of;
use dsa_core::device::radix::{BINS, LOW_BITS, count, find_low_digit, find_topdown};
use dsa_core::device::scan::{block_sum, fill};
use ptx::*;

use super::kernel::Merge;
use crate::shape::ExchangeShape;

/// Bits of the first digit of a complemented id.
const ID_HIGH_BITS: u32 = BINS.trailing_zeros();

/// A candidate: `order16 << gid_bits | comp`.
#[derive(Clone, Copy)]
pub(super) struct Key {
    /// Its order16, 0 if empty.
    pub(super) order: Reg<u32>,
    /// Its global id.
    pub(super) gid: Reg<u32>,
    /// The id's complement in `gid_bits` bits.
    pub(super) comp: Reg<u32>,
}

impl Key {
    /// From a B' word and the bit 16 of its local index. Words come from elsewhere: whatever they are, the id is one that
    /// the bitmap has.
    pub(super) fn decode(shape: ExchangeShape, rank: Reg<u32>, word: Reg<u32>, high: Reg<u32>) -> Key {
        let own = shape.ownership();
        let local = (high << 16) | ((word & 0xFFFF) ^ 0xFFFF);
        let gid = global_of(own, rank, local).min(shape.ids() as u32 - 1);
        let ones = (1u32 << own.gid_bits()) - 1;
        Key { order: word >> 16, gid, comp: gid ^ ones }
    }

    /// Greater than `k`, and not empty.
    pub(super) fn above(self, k: Kth) -> Pred {
        self.order.gt(k.order.get()) | (self.order.eq(k.order.get()) & self.comp.gt(k.comp.get()) & self.order.ne(0))
    }

    /// At least `k`, and not empty.
    pub(super) fn reaches(self, k: Kth) -> Pred {
        self.order.gt(k.order.get()) | (self.order.eq(k.order.get()) & self.comp.ge(k.comp.get()) & self.order.ne(0))
    }
}

/// The K-th key; (0, 0) if there are fewer.
#[derive(Clone, Copy)]
pub(super) struct Kth {
    pub(super) order: Var<u32>,
    pub(super) comp: Var<u32>,
}

/// Which ranks are saturated; 0 in round 1.
#[derive(Clone, Copy)]
pub(super) struct Saturated {
    /// One bit per rank.
    pub(super) mask: Reg<u32>,
    /// How many.
    pub(super) count: Reg<u32>,
}

impl Merge {
    /// Word `j` of `rank` in shared memory, and the bit 16 of its local index.
    pub(super) fn word(&self, rank: Reg<u32>, j: Reg<u32>) -> (Reg<u32>, Reg<u32>) {
        let (n, row_words) = (self.n(), self.row_words());
        let row = self.smem.words.ptr().at(rank * row_words);
        let plane = row.at((j >> 5) + n).load();
        (row.at(j).load(), (plane >> (j & 31)) & 1)
    }

    /// `body` for each candidate: the words of the ranks that are not saturated, and the lists of those that are. Warps
    /// stay whole as long as `body` keeps them so; empty words are left out.
    pub(super) fn for_each_key(&self, saturated: Saturated, body: impl Fn(Key)) {
        let (n, shape, t) = (self.n(), self.shape.exchange(), self.t);
        for_range(t.index, self.ranks() * n, t.threads, |i| {
            let rank = i / n;
            let (word, high) = self.word(rank, i - rank * n);
            let silent = (saturated.mask >> rank) & 1;
            when(word.ne(0) & silent.eq(0), || body(Key::decode(shape, rank, word, high)));
        });
        let k = self.k();
        for_range(t.index, saturated.count * k, t.threads, |i| {
            let slot = i / k;
            let j = i - slot * k;
            let list = self.list(slot);
            let strong = LoadMode::relaxed(Scope::Sys);
            let word = list.at(j).load_as(strong);
            when(word.ne(0), || {
                let plane = list.at((j >> 5) + k).load_as(strong);
                body(Key::decode(shape, self.smem.owner.at(slot).load(), word, (plane >> (j & 31)) & 1));
            });
        });
    }

    /// Finds the K-th candidate and one id that is not below any. All threads call it together; the candidates must be in
    /// place.
    pub(super) fn find_kth(&self, saturated: Saturated, kth: Kth) {
        let (k, own, t) = (self.k(), self.own(), self.t);
        let [first, second] = self.topk.bins();
        let low = self.topk.low_bins();
        let id_low_bits = own.gid_bits() - ID_HIGH_BITS;
        self.topk.clear();
        sync_threads(); // ORDER: the cleared bins, before keys are counted.
        let (mine, last) = (Var::<u32>::new(0u32), Var::<u32>::new(0u32));
        self.for_each_key(saturated, |key| {
            count(first.at(key.order >> LOW_BITS));
            mine.add(1);
            last.set(last.get().max(key.gid));
        });
        let last = redux(Redux::MaxU32, last.get());
        let cell = self.smem.last_id.at(0);
        when(t.lane.eq(0), || cell.reduce(Atomic::Max, Sem::Relaxed(Scope::Cta), last));
        // Its barrier also orders the counts, and the largest id before its readers.
        let total = block_sum(mine.get(), self.topk.scratch(), t);
        kth.order.set(0u32);
        kth.comp.set(0u32);
        when(total.ge(k), || {
            let high = find_topdown(first, k, self.smem.group_sums, t);
            self.for_each_key(saturated, |key| {
                when((key.order >> LOW_BITS).eq(high.bin), || count(low.at(key.order & ((1 << LOW_BITS) - 1))));
            });
            sync_threads(); // ORDER: the low digits counted, before they are summed; the first bins read, before they are cleared.
            fill(first, 0, t);
            let need = Reg::<u32>::from(k) - high.above;
            let digit = find_low_digit(low.at(t.lane).load(), need, t);
            let (order, ties) = ((high.bin << LOW_BITS) | digit.bin, need - digit.above);

            // Of the keys with that order16 the `ties` lowest ids: the largest complements.
            self.for_each_key(saturated, |key| {
                when(key.order.eq(order), || count(second.at(key.comp >> id_low_bits)));
            });
            sync_threads(); // ORDER: the ties counted, before they are summed; the first bins cleared, before they are counted in.
            let high = find_topdown(second, ties, self.smem.group_sums, t);
            self.for_each_key(saturated, |key| {
                let here = key.order.eq(order) & (key.comp >> id_low_bits).eq(high.bin);
                when(here, || count(first.at(key.comp & ((1 << id_low_bits) - 1))));
            });
            sync_threads(); // ORDER: the last digits counted, before they are summed.
            let last = find_topdown(first, ties - high.above, self.smem.group_sums, t);
            kth.order.set(order);
            kth.comp.set((high.bin << id_low_bits) | last.bin);
        });
    }

    /// The ranks all of whose words are above the K-th candidate of round 1.
    pub(super) fn find_saturated(&self, kth: Kth) -> Reg<u32> {
        let (n, shape, t) = (self.n(), self.shape.exchange(), self.t);
        for_range(t.index, self.ranks() * n, t.threads, |i| {
            // A warp's lanes have words of one rank.
            let rank = i / n;
            let (word, high) = self.word(rank, i - rank * n);
            let hides_none = !all(Key::decode(shape, rank, word, high).above(kth));
            when(hides_none & t.lane.eq(0), || {
                self.smem.unsaturated.at(rank).reduce(Atomic::Or, Sem::Relaxed(Scope::Cta), 1u32);
            });
        });
        sync_threads(); // ORDER: every warp's verdicts, before they are read.
        let unsaturated = Var::new(1u32);
        when(t.lane.lt(self.ranks()), || unsaturated.set(self.smem.unsaturated.at(t.lane).load()));
        ballot(unsaturated.get().eq(0))
    }
}

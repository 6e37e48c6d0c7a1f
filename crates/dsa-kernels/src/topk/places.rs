//! Where each selected key of a run goes: the selected keys before it.

use dsa_core::device::keys::{both_halves, compare_codes};
use dsa_core::device::scan::{Thread, warp_inclusive, warps_before};
use ptx::{Reg, SharedArray, Var, sync_threads, sync_warp, when, while_};

use super::run::Run;
use super::{Cut, KEYS};

/// Octets whose codes share a word, two bits a key.
const PER_WORD: usize = 2;
/// In each pair of bits: the key is at the threshold.
const AT: u32 = 0x5555_5555;

/// How the keys of a run compare with a threshold, dealt out anew: each lane has as many consecutive octets of its warp's as
/// it holds in registers, so that one count a lane tells all places.
pub(super) struct Places {
    words: Vec<Word>,
    /// Keys above (upper half) and at the threshold (lower half) before the lane's.
    before: Reg<u32>,
}

/// Two consecutive octets.
struct Word {
    /// Of each key, the first in the lowest bits: 2 above the threshold, 1 at it.
    codes: Reg<u32>,
    /// Their places in multiples of eight indices.
    bases: [Reg<u32>; PER_WORD],
}

impl Places {
    /// Contains one CTA barrier; `scratch` holds one word per warp and may be reused after the next, as may `codes`, which
    /// hold one element per octet.
    pub(super) fn find(
        run: &Run,
        threshold: Reg<u32>,
        codes: SharedArray<u16>,
        scratch: SharedArray<u32>,
        t: Thread,
    ) -> Places {
        // No key is at 0: it is below every key's, and so would be "no key".
        let below = both_halves(threshold - 1);
        run.each(|j, octet| codes.at(run.number(j)).store(compare_codes(octet.keys(), below)));
        sync_warp(); // ORDER: the warp's codes, before its lanes read each other's.
        let read: Vec<_> = (0..run.len()).map(|_| Var::new(0u32)).collect();
        run.each(|j, _| read[j].set(codes.at(run.number_by_lane(j)).load()));
        let get = |j: usize, from: &dyn Fn(usize) -> Reg<u32>| if j < run.len() { from(j) } else { Reg::from(0) };
        let words: Vec<Word> = (0..run.len())
            .step_by(PER_WORD)
            .map(|j| Word {
                codes: get(j, &|j| read[j].get()) | (get(j + 1, &|j| read[j].get()) << 16),
                bases: std::array::from_fn(|i| get(j + i, &|j| run.base_by_lane(j))),
            })
            .collect();
        // At most 8 keys for each of the CTA's octets, which fit a half.
        let own = words
            .iter()
            .fold(Reg::from(0), |sum, word| sum + ((word.codes & !AT).popc() << 16) + (word.codes & AT).popc());
        let inclusive = warp_inclusive(own, t.lane);
        when(t.lane.eq(31), || scratch.at(t.warp).store(inclusive));
        sync_threads(); // ORDER: the warps' totals, before every warp reads them.
        Places { words, before: warps_before(scratch, t) + inclusive - own }
    }

    /// With so many keys above (upper half) and at (lower half) the threshold before the run: fewer than fit a half.
    pub(super) fn after(self, before: Reg<u32>) -> Places {
        Places { before: self.before + before, ..self }
    }

    /// For each two octets of the lane: a bit for each of their keys above and for each of their ties that are taken, at the
    /// lower of the key's two bits, and how many of either come before, given that `before` such keys come before the run.
    fn each(
        &self,
        run: &Run,
        ties: Reg<u32>,
        before: [Reg<u32>; 2],
        body: impl Fn(&Word, [Reg<u32>; 2], [Reg<u32>; 2]),
    ) {
        let above_before = Var::new((self.before >> 16) + before[0]);
        let tied_before = Var::new((self.before & 0xFFFF) + before[1]);
        for (w, word) in self.words.iter().enumerate() {
            when(run.share().gt((w * PER_WORD) as u32), || {
                let above = (word.codes >> 1) & AT;
                let tied = word.codes & AT;
                let taken_before = tied_before.get().min(ties);
                let left = ties - taken_before;
                let taken = Var::new(tied);
                // At most one lane holds both ties that are taken and ties that are not.
                when(tied.popc().gt(left), || {
                    taken.set(left.eq(0).select::<u32>(0u32, taken.get()));
                    while_(
                        || taken.get().popc().gt(left),
                        || taken.set(taken.get() & !(Reg::<u32>::from(0x8000_0000u32) >> taken.get().clz())),
                    );
                });
                body(word, [above, taken.get()], [above_before.get(), taken_before]);
                above_before.add(above.popc());
                tied_before.add(tied.popc());
            });
        }
    }

    /// Writes the indices of the keys above the threshold, and of the first `ties` at it, in order. `before`: such keys
    /// that come before this run; `base`: the place of the list's first word, 0 if none. If the threshold is that of other keys,
    /// as with tops that are not their logits' own, there may be too many: those are left out.
    pub(super) fn write_indices(
        &self,
        run: &Run,
        ties: Reg<u32>,
        before: [Reg<u32>; 2],
        list: SharedArray<u32>,
        base: Option<Reg<u32>>,
    ) {
        self.each(run, ties, before, |word, [above, taken], [above_before, taken_before]| {
            let place = above_before + taken_before;
            let place = base.map_or(place, |base| place - base);
            let selected = above | taken;
            let end = place + selected.popc();
            let selected = (place.le(end) & end.le(list.len())).select::<u32>(selected, 0u32);
            // Straight on, since of each key in use many are selected: a loop over those waits for every step's result.
            let slot = Var::new(list.at(place).address());
            for i in 0..PER_WORD as u32 * KEYS {
                when((selected & (1 << (2 * i))).ne(0), || {
                    let first = word.bases[(i / KEYS) as usize] * KEYS;
                    ptx::Shared::<u32>::from_address(slot.get()).store(first + i % KEYS);
                    slot.add(4);
                });
            }
        });
    }

    /// Calls `sink(slot, index, tied)` for the keys above the threshold, with slots from 0 on, and for the first
    /// `cut.ties` at it, with slots from `first_tie` on. Both are in order.
    pub(super) fn emit_apart(&self, run: &Run, cut: Cut, first_tie: Reg<u32>, sink: impl Fn(Reg<u32>, Reg<u32>, bool)) {
        let none = Reg::<u32>::from(0);
        self.each(run, cut.ties, [none, none], |word, [above, taken], [above_before, taken_before]| {
            // Never more, unless the threshold is that of other keys.
            let above = (above_before + above.popc()).le(first_tie).select::<u32>(above, 0u32);
            word.for_each(above, above_before, |slot, index| sink(slot, index, false));
            word.for_each(taken, first_tie + taken_before, |slot, index| sink(slot, index, true));
        });
    }
}

impl Word {
    /// `body(slot, index)` for each key of `selected`, in order, with the slots from `first` on; made for few.
    fn for_each(&self, selected: Reg<u32>, first: Reg<u32>, body: impl Fn(Reg<u32>, Reg<u32>)) {
        // The index that either octet's place gives the last key of the word.
        let lasts = [self.bases[0] * KEYS + (2 * KEYS - 1), self.bases[1] * KEYS + (KEYS - 1)];
        let (left, slot) = (Var::new(selected), Var::new(first));
        while_(
            || left.get().ne(0),
            || {
                let mask = left.get();
                let others = mask - 1;
                left.set(mask & others);
                // Two bits a key.
                let zeros = (mask & !others).clz();
                let index = zeros.lt(16).select::<u32>(lasts[1], lasts[0]) - (zeros >> 1);
                body(slot.get(), index);
                slot.add(1);
            },
        );
    }
}

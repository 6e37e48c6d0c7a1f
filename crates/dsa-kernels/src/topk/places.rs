//! Where each selected key of a run goes: the selected keys before it.

use dsa_core::device::keys::{Keys8, both_halves, compare_codes};
use dsa_core::device::scan::{Thread, warp_inclusive, warps_before};
use ptx::{Atomic, Reg, Scope, Sem, Shared, SharedArray, Var, sync_threads, sync_warp, when, while_};

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
        run.each(|j, _| read[j].set(codes.at(run.number_by_lane(j as u32)).load()));
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

    /// For each two octets of the lane, by number: a bit for each of their keys above and for each of their ties that are taken, at the
    /// lower of the key's two bits, and how many of either come before, given that `before` such keys come before the run.
    fn each(
        &self,
        run: &Run,
        ties: Reg<u32>,
        before: [Reg<u32>; 2],
        body: impl Fn(usize, [Reg<u32>; 2], [Reg<u32>; 2]),
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
                body(w, [above, taken.get()], [above_before.get(), taken_before]);
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
        self.each(run, ties, before, |w, [above, taken], [above_before, taken_before]| {
            let word = &self.words[w];
            let place = above_before + taken_before;
            let place = base.map_or(place, |base| place - base);
            let selected = above | taken;
            let end = place + selected.popc();
            let selected = (place.le(end) & end.le(list.len())).select::<u32>(selected, 0u32);
            word.store_each(selected, list.at(place), |octet, i| word.bases[octet] * KEYS + i);
        });
    }

    /// Writes the words of a B' row: of the keys above the threshold from slot 0 on, of the first `cut.ties` at it from
    /// `first_tie` on, both in order. Keys are the `staged` ones, if there are any, else `key_of(index)`.
    pub(super) fn write_b_words(
        &self,
        run: &Run,
        cut: Cut,
        first_tie: Reg<u32>,
        to: BWords,
        staged: Option<Staged>,
        key_of: impl Fn(Reg<u32>) -> Reg<u32>,
    ) {
        let none = Reg::<u32>::from(0);
        self.each(run, cut.ties, [none, none], |w, [above, taken], [above_before, taken_before]| {
            let word = &self.words[w];
            // Never more, unless the threshold is that of other keys.
            let above = (above_before + above.popc()).le(first_tie).select::<u32>(above, 0u32);
            let write = |slot: Reg<u32>, index: Reg<u32>, key: Reg<u32>| {
                to.words.at(slot).store((key << 16) | ((index & 0xFFFF) ^ 0xFFFF));
                to.mark_high(slot, index);
            };
            match staged {
                None => word.for_each(above, above_before, |slot, index| write(slot, index, key_of(index))),
                Some(staged) => {
                    let octets = std::array::from_fn(|i| {
                        let last = run.share() - 1;
                        staged.octet(run.number_by_lane(Reg::<u32>::from((w * PER_WORD + i) as u32).min(last)))
                    });
                    word.write_b_words(above, octets, to.words.at(above_before));
                    when(word.bases[0].max(word.bases[1]).ge(HIGH_BASE), || {
                        word.for_each(above, above_before, |slot, index| to.mark_high(slot, index));
                    });
                }
            }
            word.for_each(taken, first_tie + taken_before, |slot, index| write(slot, index, cut.threshold));
        });
    }
}

/// The first place of an octet whose indices have more than 16 bits.
const HIGH_BASE: u32 = (1 << 16) / KEYS;

/// Where a B' row is put together.
#[derive(Clone, Copy)]
pub(super) struct BWords {
    pub(super) words: SharedArray<u32>,
    pub(super) planes: Shared<u32>,
}

impl BWords {
    /// The plane's bit of a slot whose index has more than 16 bits.
    fn mark_high(&self, slot: Reg<u32>, index: Reg<u32>) {
        when(index.ge(1 << 16), || {
            let bit = Reg::<u32>::from(1) << (slot & 31);
            self.planes.at(slot >> 5).reduce(Atomic::Or, Sem::Relaxed(Scope::Cta), bit);
        });
    }
}

/// Octets of a CTA in shared memory, for the lanes that emit them.
#[derive(Clone, Copy)]
pub(super) struct Staged(SharedArray<u32>);

impl Staged {
    /// Room for `octets` of them.
    pub(super) fn new(octets: u32) -> Staged {
        Staged(SharedArray::aligned("staged", octets * KEYS / 2, 16))
    }

    /// Where octet `n` is: lanes that take every second or fourth octet find them in different banks.
    fn at(&self, n: Reg<u32>) -> Shared<u32> {
        self.0.at((n ^ ((n >> 3) & 7)) * (KEYS / 2))
    }

    /// Puts the run's octets there, for the lanes of their warp.
    pub(super) fn fill(&self, run: &Run) {
        run.each(|j, octet| self.at(run.number(j)).store_vec(octet.keys()));
        sync_warp(); // ORDER: the warp's octets, before its lanes read each other's.
    }

    /// The keys of octet `n`.
    fn octet(&self, n: Reg<u32>) -> Keys8 {
        self.at(n).load_vec::<4>()
    }
}

impl Word {
    /// Stores the B' words of the `selected` keys of two octets, in order, from `first` on.
    fn write_b_words(&self, selected: Reg<u32>, octets: [Keys8; PER_WORD], first: Shared<u32>) {
        // The complement of the first index ends in ones.
        let complements = self.bases.map(|base| !(base * KEYS));
        self.store_each(selected, first, |octet, i| {
            let selector = if i % 2 == 0 { 0x1054u32 } else { 0x3254 };
            octets[octet][i as usize / 2].permute(complements[octet] - i, selector)
        });
    }

    /// Stores `value(octet, key)` for each key of `selected`, in order, from `first` on. Straight on, for where many are: a loop
    /// waits for every step's result.
    fn store_each(&self, selected: Reg<u32>, first: Shared<u32>, value: impl Fn(usize, u32) -> Reg<u32>) {
        let slot = Var::new(first.address());
        for key in 0..PER_WORD as u32 * KEYS {
            when((selected & (1 << (2 * key))).ne(0), || {
                Shared::<u32>::from_address(slot.get()).store(value((key / KEYS) as usize, key % KEYS));
                slot.add(4);
            });
        }
    }

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

//! Runs of consecutive keys in a thread's registers, eight at a time, and what is asked of them.

use dsa_core::consts::KEYS_PER_TOP;
use dsa_core::device::keys::{Keys8, above_mask, both_halves, lowest_bit, matching_mask};
use dsa_core::device::radix::{BINS, LOW_BINS, LOW_BITS, count};
use ptx::{Global, Reg, SharedArray, Var, when, while_};

use super::Cut;

const KEYS: u32 = KEYS_PER_TOP as u32;

/// Eight consecutive keys of a thread and their place: key `i` has index `8 * base + i`. Key 0 is "no key".
#[derive(Clone, Copy)]
pub(super) struct Octet {
    pub(super) base: Var<u32>,
    pub(super) words: [Var<u32>; 4],
}

impl Octet {
    pub(super) fn load(&self, from: Global<u32>) {
        for (word, loaded) in self.words.iter().zip(from.load_vec::<4>()) {
            word.set(loaded);
        }
    }

    fn keys(&self) -> Keys8 {
        self.words.map(|w| w.get())
    }
}

/// A thread's octets, in index order.
pub(super) struct Run {
    pub(super) octets: Vec<Octet>,
}

/// For each octet of a run, the keys above and at a threshold, as bit masks.
pub(super) struct Taken {
    above: Vec<Reg<u32>>,
    tied: Vec<Reg<u32>>,
}

impl Taken {
    /// How many are above (upper half) and at (lower half) the threshold.
    pub(super) fn counts(&self) -> Reg<u32> {
        let total = |masks: &[Reg<u32>]| pack_masks(masks).map(|m| m.popc()).reduce(|a, b| a + b).expect("some octet");
        (total(&self.above) << 16) | total(&self.tied)
    }
}

/// Masks of up to four octets per word.
fn pack_masks(masks: &[Reg<u32>]) -> impl Iterator<Item = Reg<u32>> {
    masks
        .chunks(4)
        .map(|four| four.iter().enumerate().skip(1).fold(four[0], |word, (i, mask)| word | (*mask << (8 * i as u32))))
}

/// `body(bit)` for each set bit of `mask`, lowest first.
fn for_each_bit(mask: Reg<u32>, body: impl FnOnce(Reg<u32>)) {
    let rest = Var::new(mask);
    while_(
        || rest.get().ne(0),
        || {
            body(lowest_bit(rest.get()));
            rest.set(rest.get() & (rest.get() - 1));
        },
    );
}

/// `mask` without all but its `count` lowest bits.
fn keep_lowest(mask: Var<u32>, count: Var<u32>) {
    while_(
        || mask.get().popc().gt(count.get()),
        || mask.set(mask.get() & !(Reg::<u32>::from(0x8000_0000u32) >> mask.get().clz())),
    );
}

/// Base of the octet that holds key `bit` of up to four.
fn base_in(octets: &[Octet], bit: Reg<u32>) -> Reg<u32> {
    octets
        .iter()
        .enumerate()
        .skip(1)
        .fold(octets[0].base.get(), |base, (i, octet)| bit.ge(8 * i as u32).select::<u32>(octet.base.get(), base))
}

/// Index of key `bit` of up to four octets.
fn index_in(octets: &[Octet], bit: Reg<u32>) -> Reg<u32> {
    base_in(octets, bit) * KEYS + (bit & (KEYS - 1))
}

/// Key `bit` of up to four octets.
fn pick_in(octets: &[Octet], bit: Reg<u32>) -> Reg<u32> {
    let keys = octets.iter().enumerate().skip(1).fold(octets[0].keys(), |keys, (i, octet)| {
        let here = bit.ge(8 * i as u32);
        let own = octet.keys();
        std::array::from_fn(|w| here.select::<u32>(own[w], keys[w]))
    });
    pick(keys, bit & (KEYS - 1))
}

/// Key `i` of eight.
fn pick(keys: Keys8, i: Reg<u32>) -> Reg<u32> {
    let high_pair = i.ge(4);
    let odd_word = (i & 2).ne(0);
    let low = odd_word.select::<u32>(keys[1], keys[0]);
    let high = odd_word.select::<u32>(keys[3], keys[2]);
    (high_pair.select::<u32>(high, low) >> ((i & 1) << 4)) & 0xFFFF
}

impl Run {
    pub(super) fn new(octets: u32) -> Run {
        let octet = || Octet { base: Var::new(0u32), words: std::array::from_fn(|_| Var::new(0u32)) };
        Run { octets: (0..octets).map(|_| octet()).collect() }
    }

    /// Counts the upper digit of every key ("no key" lands in bin 0, which no crossing reaches).
    pub(super) fn count_high(&self, bins: SharedArray<u32>) {
        for octet in &self.octets {
            let keys = octet.keys();
            // Octets fill up in order, so for most warps the last ones are all empty.
            when((keys[0] | keys[1] | keys[2] | keys[3]).ne(0), || {
                for word in keys {
                    count(bins.at((word >> LOW_BITS) & (BINS - 1)));
                    count(bins.at(word >> (16 + LOW_BITS)));
                }
            });
        }
    }

    /// Counts the keys that are at least `low` (>= 1) by their distance from it; the last bin holds all that are
    /// further away.
    pub(super) fn count_from(&self, low: Reg<u32>, bins: SharedArray<u32>) {
        let below = both_halves(low - 1);
        for octet in &self.octets {
            let keys = octet.keys();
            for_each_bit(above_mask(keys, below), |i| count(bins.at((pick(keys, i) - low).min(BINS - 1))));
        }
    }

    /// Counts the lower digit of the keys whose upper digit is `high`.
    pub(super) fn count_low(&self, high: Reg<u32>, bins: SharedArray<u32>) {
        let value = both_halves(high << LOW_BITS);
        let upper = ((BINS - 1) << LOW_BITS) * 0x0001_0001;
        for octet in &self.octets {
            let keys = octet.keys();
            for_each_bit(matching_mask(keys, value, upper), |i| {
                count(bins.at(pick(keys, i) & (LOW_BINS - 1)));
            });
        }
    }

    pub(super) fn compare(&self, threshold: Reg<u32>) -> Taken {
        let (at, below) = (both_halves(threshold), both_halves(threshold - 1));
        let above: Vec<_> = self.octets.iter().map(|octet| above_mask(octet.keys(), at)).collect();
        let tied = self.octets.iter().zip(&above).map(|(octet, above)| above_mask(octet.keys(), below) ^ *above);
        Taken { tied: tied.collect(), above }
    }

    /// Writes the indices of the keys above the threshold, and of the first `ties` at it, in order: `above` and `tied`
    /// such keys come before this thread's.
    pub(super) fn emit(&self, taken: &Taken, above: Reg<u32>, tied: Reg<u32>, ties: Reg<u32>, list: SharedArray<u32>) {
        let ties_before = tied.min(ties);
        let slot = Var::new(above + ties_before);
        let ties_left = Var::new(ties - ties_before);
        let masks = pack_masks(&taken.above).zip(pack_masks(&taken.tied));
        for (octets, (above, tied)) in self.octets.chunks(4).zip(masks) {
            let tied = Var::new(ties_left.get().eq(0).select::<u32>(0u32, tied));
            // At most one thread holds both ties that are taken and ties that are not.
            keep_lowest(tied, ties_left);
            ties_left.set(ties_left.get() - tied.get().popc());
            for_each_bit(above | tied.get(), |bit| {
                let base = base_in(octets, bit);
                list.at(slot.get()).store(base * KEYS + (bit & (KEYS - 1)));
                slot.add(1);
            });
        }
    }

    /// Calls `sink(slot, key, index)` for the keys above the threshold, with slots from `above` on, and for the first
    /// ties at it, with slots from `first_tie` on. Both are in order; `tied` ties come before this thread's.
    pub(super) fn emit_apart(
        &self,
        taken: &Taken,
        above: Reg<u32>,
        tied: Reg<u32>,
        cut: Cut,
        first_tie: Reg<u32>,
        sink: impl Fn(Reg<u32>, Reg<u32>, Reg<u32>),
    ) {
        let ties_before = tied.min(cut.ties);
        let (slot, tie_slot) = (Var::new(above), Var::new(first_tie + ties_before));
        let ties_left = Var::new(cut.ties - ties_before);
        let masks = pack_masks(&taken.above).zip(pack_masks(&taken.tied));
        for (octets, (above, tied)) in self.octets.chunks(4).zip(masks) {
            for_each_bit(above, |bit| {
                sink(slot.get(), pick_in(octets, bit), index_in(octets, bit));
                slot.add(1);
            });
            let tied = Var::new(ties_left.get().eq(0).select::<u32>(0u32, tied));
            keep_lowest(tied, ties_left);
            ties_left.set(ties_left.get() - tied.get().popc());
            for_each_bit(tied.get(), |bit| {
                sink(tie_slot.get(), cut.threshold, index_in(octets, bit));
                tie_slot.add(1);
            });
        }
    }
}

//! Where each selected key of a run goes: the selected keys before it.

use dsa_core::device::keys::{above_mask, both_halves, byte_counts, equal_mask};
use dsa_core::device::scan::{Thread, warp_inclusive_each, warp_prefix, warps_before};
use ptx::{Redux, Reg, SharedArray, Var, redux, sync_threads, when, while_};

use super::run::{Octet, Run};
use super::{Cut, KEYS};

/// Octets whose masks share a word.
const PER_WORD: usize = 4;

/// The keys of a run above and at a threshold, and how many of either come before each octet.
pub(super) struct Places {
    words: Vec<Word>,
    /// For each octet: the keys before its line, above (upper half) and at (lower half) the threshold.
    lines: Vec<Reg<u32>>,
}

/// Of up to four octets, a byte each.
#[derive(Clone, Copy)]
struct Word {
    /// Masks of the keys above the threshold.
    above: Reg<u32>,
    /// Masks of the keys at it.
    tied: Reg<u32>,
    /// How many those are.
    ties: Reg<u32>,
    /// How many come before in the lanes of the octet's line.
    above_before: Reg<u32>,
    tied_before: Reg<u32>,
}

/// Byte `i` of a word.
fn byte(word: Reg<u32>, i: usize) -> Reg<u32> {
    match i {
        3 => word >> 24,
        _ => (word >> (8 * i as u32)) & 0xFF,
    }
}

/// Sums over the warp of each byte of two words of counts (at most 8 a lane): of the first in the upper half.
fn line_totals(above: Reg<u32>, tied: Reg<u32>) -> [Reg<u32>; PER_WORD] {
    let sum = |bytes: Reg<u32>| redux(Redux::AddU32, bytes & 0x00FF_00FFu32);
    let [even, odd] = [(tied, above), (tied >> 8, above >> 8)].map(|(tied, above)| (sum(tied), sum(above)));
    let pair = |(tied, above): (Reg<u32>, Reg<u32>), selector: u32| tied.permute(above, selector);
    [pair(even, 0x5410), pair(odd, 0x5410), pair(even, 0x7632), pair(odd, 0x7632)]
}

impl Places {
    /// Contains one CTA barrier; `scratch` holds one word per warp and may be reused after the next.
    pub(super) fn find(run: &Run, threshold: Reg<u32>, scratch: SharedArray<u32>, t: Thread) -> Places {
        let at = both_halves(threshold);
        let masks: Vec<[Var<u32>; 2]> =
            (0..run.len().div_ceil(PER_WORD)).map(|_| [Var::new(0u32), Var::new(0u32)]).collect();
        run.each(|j, octet| {
            let [above, tied] = masks[j / PER_WORD];
            let shift = 8 * (j % PER_WORD) as u32;
            above.set(above.get() | (above_mask(octet.keys(), at) << shift));
            tied.set(tied.get() | (equal_mask(octet.keys(), at) << shift));
        });
        let mut words = Vec::new();
        let mut lines = Vec::new();
        let mut before_line = Reg::<u32>::from(0);
        for (word, [above, tied]) in masks.iter().enumerate() {
            let (above, tied) = (above.get(), tied.get());
            let counts = [byte_counts(above), byte_counts(tied)];
            let totals = line_totals(counts[0], counts[1]);
            // A byte's exclusive sum is at most 31 * 8. The inclusive one may carry, which the subtraction takes back.
            let [above_sums, tied_sums] = warp_inclusive_each(counts, t.lane);
            words.push(Word {
                above,
                tied,
                ties: counts[1],
                above_before: above_sums - counts[0],
                tied_before: tied_sums - counts[1],
            });
            for total in &totals[..PER_WORD.min(run.len() - word * PER_WORD)] {
                lines.push(before_line);
                before_line = before_line + *total;
            }
        }
        // At most 8 keys for each of the octets, which fit a half.
        when(t.lane.eq(0), || scratch.at(t.warp).store(before_line));
        sync_threads(); // ORDER: the warps' totals, before every warp reads them.
        let before = warps_before(scratch, t);
        Places { words, lines: lines.into_iter().map(|line| line + before).collect() }
    }

    /// Keys above (upper half) and at (lower half) the threshold in the CTA, before `scratch` is reused.
    pub(super) fn total(scratch: SharedArray<u32>, t: Thread) -> Reg<u32> {
        warp_prefix(scratch, t).1
    }

    /// For each octet: the mask of its keys above, the mask of its ties that are taken, and how many of either come before,
    /// given that `before` such keys come before the run.
    fn each(
        &self,
        run: &Run,
        ties: Reg<u32>,
        before: [Reg<u32>; 2],
        body: impl Fn(&Octet, [Reg<u32>; 2], [Reg<u32>; 2]),
    ) {
        run.each(|j, octet| {
            let (word, i) = (self.words[j / PER_WORD], j % PER_WORD);
            let line = self.lines[j];
            let above_before = (line >> 16) + byte(word.above_before, i) + before[0];
            let taken_before = ((line & 0xFFFF) + byte(word.tied_before, i) + before[1]).min(ties);
            let left = ties - taken_before;
            let taken = Var::new(byte(word.tied, i));
            // At most one octet holds both ties that are taken and ties that are not.
            when(byte(word.ties, i).gt(left), || {
                taken.set(left.eq(0).select::<u32>(0u32, taken.get()));
                while_(
                    || taken.get().popc().gt(left),
                    || taken.set(taken.get() & !(Reg::<u32>::from(0x8000_0000u32) >> taken.get().clz())),
                );
            });
            body(octet, [byte(word.above, i), taken.get()], [above_before, taken_before]);
        });
    }

    /// Writes the indices of the keys above the threshold, and of the first `ties` at it, in order. `before`: such keys
    /// that come before this run; `base`: the place of the list's first word, 0 if none. The list has [`KEYS`] words to
    /// spare: if the threshold is that of other keys, as with tops that are not their logits' own, there may be too many.
    pub(super) fn write_indices(
        &self,
        run: &Run,
        ties: Reg<u32>,
        before: [Reg<u32>; 2],
        list: SharedArray<u32>,
        base: Option<Reg<u32>>,
    ) {
        self.each(run, ties, before, |octet, [above, taken], [above_before, taken_before]| {
            let place = above_before + taken_before;
            let place = base.map_or(place, |base| place - base);
            let slot = Var::new(list.at(place).address());
            let selected = place.lt(list.len() - KEYS).select::<u32>(above | taken, 0u32);
            let first = octet.first_index();
            for i in 0..KEYS {
                when((selected & (1 << i)).ne(0), || {
                    ptx::Shared::<u32>::from_address(slot.get()).store(first + i);
                    slot.add(4);
                });
            }
        });
    }

    /// Calls `sink(slot, key, index)` for the keys above the threshold, with slots from 0 on, and for the first
    /// `cut.ties` at it, with slots from `first_tie` on. Both are in order. Keys are in the upper half, indices are of
    /// the octet's first key and the key's number.
    pub(super) fn emit_apart(
        &self,
        run: &Run,
        cut: Cut,
        first_tie: Reg<u32>,
        sink: impl Fn(Reg<u32>, Reg<u32>, (Reg<u32>, u32)),
    ) {
        let none = Reg::<u32>::from(0);
        self.each(run, cut.ties, [none, none], |octet, [above, taken], [above_before, taken_before]| {
            // Never so, unless the threshold is that of other keys.
            let too_many = (above_before + above.popc()).gt(first_tie);
            let above = too_many.select::<u32>(0u32, above);
            let first = octet.first_index();
            let emit_all = |mask: Reg<u32>, slot: Reg<u32>| {
                let slot = Var::new(slot);
                for i in 0..KEYS {
                    when((mask & (1 << i)).ne(0), || {
                        let word = octet.words[i as usize / 2].get();
                        let key = if i % 2 == 0 { word << 16 } else { word & 0xFFFF_0000u32 };
                        sink(slot.get(), key, (first, i));
                        slot.add(1);
                    });
                }
            };
            emit_all(above, above_before);
            when(taken.ne(0), || emit_all(taken, first_tie + taken_before));
        });
    }
}

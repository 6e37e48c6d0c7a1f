//! The physical rows of the selected keys that this rank owns, in ascending order.
//!
//! This rank's own B' row holds them: its keys above its threshold in index order, then those at it in index order. Of each
//! of these two runs the selected keys keep their order, so a key's place is the number of selected keys before it in its
//! run and, found by bisection, in the other: where both have some, all of the first are selected, and the lowest of the
//! second.

use dsa_core::device::ownership::global_of;
use dsa_core::device::scan::block_exclusive;
use ptx::*;

use super::kernel::Merge;
use super::keys::Kth;

/// A B' row of this rank in shared memory.
#[derive(Clone, Copy)]
pub(super) struct OwnRow {
    words: Shared<u32>,
    /// Its slots.
    slots: u32,
}

impl Merge {
    /// What this rank sent in round 1.
    pub(super) fn own_words(&self) -> OwnRow {
        OwnRow { words: self.row_of(self.p.rank), slots: self.n() }
    }

    /// This rank's list.
    pub(super) fn own_list(&self) -> OwnRow {
        OwnRow { words: self.topk.b_row().ptr(), slots: self.k() }
    }

    /// Consecutive slots of a B' row of `slots` that are one thread's.
    pub(super) fn slots_per_thread(&self, slots: u32) -> u32 {
        slots.div_ceil(self.t.threads).next_power_of_two()
    }

    /// The first of this thread's slots, and their words: 0 for a thread that has none.
    fn own_slots(&self, own: OwnRow) -> (Reg<u32>, Vec<Var<u32>>) {
        let each = self.slots_per_thread(own.slots);
        let words: Vec<Var<u32>> = (0..each).map(|_| Var::new(0u32)).collect();
        let first = self.t.index * each;
        let load = |first: Reg<u32>| {
            let at = own.words.at(first);
            let loaded = match each {
                1 => vec![at.load()],
                2 => at.load_vec::<2>().to_vec(),
                _ => (0..each / 4).flat_map(|i| at.offset(4 * i as i32).load_vec::<4>()).collect(),
            };
            words.iter().zip(loaded).for_each(|(word, loaded)| word.set(loaded));
        };
        if each * self.t.threads == own.slots {
            load(first);
            return (first, words);
        }
        when(first.lt(own.slots), || load(first));
        (first.min(own.slots - each), words)
    }

    /// This row's part of the MLA table.
    fn table(&self) -> Global<i32> {
        self.p.table.at64((self.row / self.shape.q()).mul_wide(self.p.table_stride))
    }

    /// The MLA block of a local index.
    fn block(&self, local: Reg<u32>) -> Reg<u32> {
        let at = local.min(self.p.length_max - 1) >> self.shape.page().trailing_zeros();
        self.table().at(at).load_as(LoadMode::STREAM).as_u32()
    }

    /// Starts to load the blocks of the keys that this thread has in `own`, long before it is known whether they are
    /// selected. The table is step metadata.
    pub(super) fn load_blocks(&self, own: OwnRow, blocks: &[Var<u32>]) {
        let (first, words) = self.own_slots(own);
        for ((slot, word), block) in (0u32..).zip(words).zip(blocks) {
            let word = word.get();
            when(word.ne(0), || {
                block.set(self.block(self.local_of_word(own.words, own.slots.into(), first + slot, word)));
            });
        }
    }

    /// Writes the rows and their count; the rest is -1. Everything that is read in shared memory is in place. `mask`: the
    /// saturated ranks; `blocks`: those of this thread's slots of its rank's list, if that is saturated, or of its words.
    /// Contains a CTA barrier, none at its end.
    pub(super) fn write_rows(&self, mask: Reg<u32>, kth: Kth, blocks: &[Var<u32>]) {
        if self.shape.is_direct() {
            return self.write_rows_of(self.own_words(), kth, blocks);
        }
        when_else(
            ((mask >> self.p.rank) & 1).ne(0),
            || self.write_rows_of(self.own_list(), kth, blocks),
            || self.write_rows_of(self.own_words(), kth, blocks),
        );
    }

    fn write_rows_of(&self, own: OwnRow, kth: Kth, blocks: &[Var<u32>]) {
        let Merge { shape, p, topk, smem, t, row, .. } = self;
        let slots: Reg<u32> = own.slots.into();
        let (first, words) = self.own_slots(own);
        let words: Vec<Reg<u32>> = words.into_iter().map(Var::get).collect();
        let local_of = |(slot, word): (u32, &Reg<u32>)| self.local_of_word(own.words, slots, first + slot, *word);
        let locals: Vec<Reg<u32>> = (0..).zip(&words).map(local_of).collect();
        // Of a full row with two runs the second is of this order.
        let last_order = own.words.at(own.slots - 1).load() >> 16;
        // How many are selected, in the second run in the upper half.
        let counts: Vec<Reg<u32>> = (words.iter().zip(&locals))
            .map(|(word, local)| {
                let admitted = kth.admits(*word >> 16, global_of(self.own(), p.rank, *local));
                let one = (*word >> 16).eq(last_order).select::<u32>(1 << 16, 1u32);
                admitted.select::<u32>(one, 0u32)
            })
            .collect();
        let falls = |slot: usize, before: Reg<u32>| {
            when(words[slot].ne(0) & before.gt(locals[slot]), || {
                smem.second_run.at(0).store(first + slot as u32);
            });
        };
        when(words[0].ne(0) & first.ne(0), || {
            falls(0, self.local_of_word(own.words, slots, first - 1, own.words.at(first - 1).load()));
        });
        (1..words.len()).for_each(|slot| falls(slot, locals[slot - 1]));
        let (before, total) =
            block_exclusive(counts.iter().copied().reduce(|a, b| a + b).expect("a slot"), topk.scratch(), *t);
        let in_run = [total & 0xFFFF, total >> 16];
        let count = in_run[0] + in_run[1];
        let second = smem.second_run.at(0).load().min(slots);
        // Unless this rank's threshold is the row's, one run has all that is selected.
        let both_runs = second.lt(slots) & in_run[0].ne(0) & in_run[1].ne(0);

        self.start_writing();
        let rows_out = p.rows_out.at64(row.mul_wide(self.k()));
        for_range(t.index, self.k(), t.threads, |slot| {
            when(slot.ge(count), || rows_out.at(slot).store(-1i32));
        });
        when(t.index.eq(0), || p.valid_out.at(*row).store(count.as_i32()));
        let mut running = before;
        for (slot, ((local, selected), block)) in (0u32..).zip(locals.iter().zip(&counts).zip(blocks)) {
            let (local, at) = (*local, first + slot);
            when(selected.ne(0), || {
                let place = Var::new((running & 0xFFFF) + (running >> 16));
                // Then all of the first run is selected, and the first of the second.
                when(both_runs, || {
                    let in_second = at.ge(second);
                    let from = in_second.select::<u32>(0u32, second);
                    let to = in_second.select::<u32>(second, second + in_run[1]);
                    let others = self.first_not_below(own, from, to.min(slots), local) - from;
                    place.set(others + in_second.select::<u32>(at - second, at));
                });
                let inside = local.min(p.length_max - 1) & (shape.page() - 1);
                let physical = block.get().mad(p.block_rows, inside).as_i32();
                let physical = block.get().lt(p.blocks).select::<i32>(physical, -1i32);
                rows_out.at(place.get().min(self.k() - 1)).store(physical);
            });
            running = running + *selected;
        }
    }

    /// The first of the ascending slots `from..to` that is empty or whose local index is not below `local`.
    fn first_not_below(&self, own: OwnRow, from: Reg<u32>, to: Reg<u32>, local: Reg<u32>) -> Reg<u32> {
        let found = Var::new(from);
        // Powers of two whose sum covers any number of slots.
        for step in (0..=own.slots.ilog2()).rev().map(|bit| 1u32 << bit) {
            let next = found.get() + step;
            when(next.le(to), || {
                let word = own.words.at(next - 1).load();
                let below = self.local_of_word(own.words, own.slots.into(), next - 1, word).lt(local);
                found.set((word.ne(0) & below).select::<u32>(next, found.get()));
            });
        }
        found.get()
    }

    /// Writes a row without keys.
    pub(super) fn write_nothing(&self) {
        let Merge { shape, p, t, row, .. } = self;
        let base = row.mul_wide(self.k());
        for_range(t.index, self.k(), t.threads, |slot| {
            p.rows_out.at64(base).at(slot).store(-1i32);
            if shape.ids() {
                p.ids.at64(base).at(slot).store(-1i32);
            }
        });
        when(t.index.eq(0), || p.valid_out.at(*row).store(0i32));
    }
}

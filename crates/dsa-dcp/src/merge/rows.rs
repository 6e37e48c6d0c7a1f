//! The physical rows of the selected keys that this rank owns, in ascending order.
//!
//! This rank's own B' row holds them: its keys above its threshold in index order, then those at it in index order. Of each
//! of these two runs the selected keys keep their order, so a key's place is the number of selected keys before it in its
//! run and, found by bisection, in the other.

use dsa_core::device::ownership::global_of;
use dsa_core::device::scan::block_exclusive;
use ptx::*;

use super::kernel::Merge;
use super::keys::Kth;

/// A B' row of this rank in shared memory.
#[derive(Clone, Copy)]
struct OwnRow {
    words: Shared<u32>,
    /// Its slots.
    slots: Reg<u32>,
}

impl Merge {
    fn own_words(&self) -> OwnRow {
        OwnRow { words: self.row_of(self.p.rank), slots: self.n().into() }
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

    /// Starts to load the block of the key that this thread has among this rank's words, long before it is known whether
    /// that key is selected. The table is step metadata.
    pub(super) fn load_blocks_early(&self, failed: Reg<u32>) -> Var<u32> {
        let (own, slot, block) = (self.own_words(), self.t.index, Var::new(0u32));
        when(failed.eq(0) & slot.lt(own.slots), || {
            let word = own.words.at(slot).load();
            when(word.ne(0), || block.set(self.block(self.local_of_word(own.words, own.slots, slot, word))));
        });
        block
    }

    /// Writes the rows and their count; the rest is -1. Everything that is read in shared memory is in place. `mask`: the
    /// saturated ranks; `early`: this thread's [block](Merge::load_blocks_early). Contains CTA barriers, none at its end.
    pub(super) fn write_rows(&self, mask: Reg<u32>, kth: Kth, early: Var<u32>) {
        let Merge { shape, p, topk, smem, t, row, .. } = self;
        let saturated = ((mask >> p.rank) & 1).ne(0);
        let (list, sent) = (topk.b_row().ptr(), self.own_words());
        let words = Shared::from_address(saturated.select::<u32>(list.address(), sent.words.address()));
        let own = OwnRow { words, slots: saturated.select::<u32>(self.k(), sent.slots) };

        let count = Var::new(0u32);
        for_range(0u32, own.slots, t.threads, |first| {
            let slot = first + t.index;
            let selected = Var::new(0u32);
            when(slot.lt(own.slots), || {
                let word = own.words.at(slot).load();
                when(word.ne(0), || {
                    let local = self.local_of_word(own.words, own.slots, slot, word);
                    selected.set(kth.admits(word >> 16, global_of(self.own(), p.rank, local)).as_u32());
                    when(slot.gt(0), || {
                        let before = own.words.at(slot - 1).load();
                        let falls = self.local_of_word(own.words, own.slots, slot - 1, before).gt(local);
                        when(falls, || smem.second_run.at(0).store(slot));
                    });
                });
            });
            let (before, total) = block_exclusive(selected.get(), topk.scratch(), *t);
            when(slot.lt(own.slots), || smem.selected_before.at(slot).store(count.get() + before));
            count.add(total);
            sync_threads(); // ORDER: the counts and the second run, before their readers; the scan's words, before the next.
        });
        let count = count.get();
        let second = smem.second_run.at(0).load().min(own.slots);
        let before = |slot: Reg<u32>| {
            let inside = smem.selected_before.at(slot.min(own.slots - 1)).load();
            slot.lt(own.slots).select::<u32>(inside, count)
        };
        let in_first = before(second);
        // Unless this rank's threshold is the row's, one run has all that is selected.
        let both_runs = in_first.ne(0) & in_first.ne(count);

        self.start_writing();
        let rows_out = p.rows_out.at64(row.mul_wide(self.k()));
        for_range(t.index, self.k(), t.threads, |slot| {
            when(slot.ge(count), || rows_out.at(slot).store(-1i32));
        });
        when(t.index.eq(0), || p.valid_out.at(*row).store(count.as_i32()));
        for_range(t.index, own.slots, t.threads, |slot| {
            let place = Var::new(before(slot));
            let selected = before(slot + 1).ne(place.get());
            when(selected, || {
                let local = self.local_of_word(own.words, own.slots, slot, own.words.at(slot).load());
                let block = Var::new(early.get());
                when(saturated | slot.ge(t.threads), || block.set(self.block(local)));
                when(both_runs, || {
                    let in_second = slot.ge(second);
                    let from = in_second.select::<u32>(0u32, second);
                    let to = in_second.select::<u32>(second, own.slots);
                    let others = before(self.first_not_below(own, from, to, local)) - before(from);
                    let own_run = in_second.select::<u32>(place.get() - in_first, place.get());
                    place.set(own_run + others);
                });
                let inside = local.min(p.length_max - 1) & (shape.page() - 1);
                let physical = block.get().mad(p.block_rows, inside).as_i32();
                let physical = block.get().lt(p.blocks).select::<i32>(physical, -1i32);
                rows_out.at(place.get().min(self.k() - 1)).store(physical);
            });
        });
    }

    /// The first of the ascending slots `from..to` that is empty or whose local index is not below `local`.
    fn first_not_below(&self, own: OwnRow, from: Reg<u32>, to: Reg<u32>, local: Reg<u32>) -> Reg<u32> {
        let found = Var::new(from);
        // Powers of two whose sum covers any number of slots.
        for step in (0..=self.k().ilog2()).rev().map(|bit| 1u32 << bit) {
            let next = found.get() + step;
            when(next.le(to), || {
                let word = own.words.at(next - 1).load();
                let below = self.local_of_word(own.words, own.slots, next - 1, word).lt(local);
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

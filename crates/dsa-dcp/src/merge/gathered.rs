//! Words and lists that an all-gather has brought, laid out by [`gathered`](crate::gathered): nothing is polled, and the
//! lists of all ranks are there already.

use ptx::*;

use super::kernel::Merge;
use super::keys::Saturated;

impl Merge {
    /// Brings the row's words into shared memory, and counts their upper digits.
    pub(super) fn load_words(&self) {
        let Merge { smem, t, row, .. } = self;
        // ORDER: what the gather brought, before it is read.
        wait_for_dependencies();
        let vectors = self.row_words() / 4;
        for_range(t.index, self.ranks() * vectors, t.threads, |i| {
            let (rank, vector) = (i / vectors, i % vectors);
            let words = self.part(rank).at64(row.mul_wide(self.row_words())).at(vector * 4).load_vec::<4>();
            smem.words.at(i * 4).store_vec(words);
            // The last vectors of a rank are planes.
            let holds_keys = vector.lt(self.n() / 4);
            words.into_iter().for_each(|word| self.count_upper_of(holds_keys & word.ne(0), word >> 16));
        });
    }

    /// Makes the lists of the saturated ranks the rescue slots' lists, and this rank's own, and counts the upper digit of
    /// all that can be selected. Counts must be cleared. Contains CTA barriers; one must follow.
    pub(super) fn take_lists(&self, saturated: Saturated, blocks: &[Var<u32>]) {
        let Merge { p, topk, smem, t, .. } = self;
        self.name_owners(saturated.mask);
        let vectors = self.list_words() / 4;
        let own = self.gathered_list(p.rank);
        let mine = ((saturated.mask >> p.rank) & 1).ne(0);
        when(mine, || {
            for_range(t.index, vectors, t.threads, |vector| {
                topk.b_row().ptr().at(vector * 4).store_vec(own.at(vector * 4).load_vec::<4>());
            });
        });
        sync_threads(); // ORDER: the owners, this rank's list and the cleared counts, before every warp uses them.
        when(mine, || self.load_blocks(self.own_list(), blocks));
        if let Some(lists) = smem.lists {
            for_range(t.index, saturated.count * vectors, t.threads, |i| {
                let (slot, vector) = (i / vectors, i % vectors);
                let from = self.gathered_list(smem.owner.at(slot).load());
                lists.ptr().at(i * 4).store_vec(from.at(vector * 4).load_vec::<4>());
            });
            sync_threads(); // ORDER: the copies, before they are read.
        }
        self.count_upper(saturated);
    }

    /// The list of `rank` for this row.
    pub(super) fn gathered_list(&self, rank: Reg<u32>) -> Global<u32> {
        let lists = self.part(rank).at64(self.p.slot_rows.mul_wide(self.row_words()));
        lists.at64(self.row.mul_wide(self.list_words()))
    }

    /// What `rank` sent.
    fn part(&self, rank: Reg<u32>) -> Global<u32> {
        let rows_before = rank * self.p.slot_rows;
        let lists = if self.shape.is_direct() { 0 } else { self.list_words() };
        self.p.memory.cast::<u32>().at64(rows_before.mul_wide(self.row_words() + lists))
    }
}

//! Round 2: saturated ranks push the first K keys of their row, and everybody waits for them.

use dsa_core::consts::KEYS_PER_TOP;
use dsa_kernels::rows::clamp_length;
use dsa_kernels::topk::Row;
use ptx::*;

use super::kernel::Merge;
use crate::layout::LATE_LIST;

impl Merge {
    /// Word `j` of the list in rescue slot `slot`, once [rescued](Merge::rescue).
    pub(super) fn list_word(&self, slot: Reg<u32>, j: Reg<u32>) -> Reg<u32> {
        match self.smem.lists {
            Some(lists) => lists.at(slot.mad(self.list_words(), j)).load(),
            None => self.list(slot).at(j).load_as(LoadMode::relaxed(Scope::Sys)),
        }
    }

    /// The list in rescue slot `slot` of this row, in this rank's memory.
    fn list(&self, slot: Reg<u32>) -> Global<u32> {
        if self.shape.gathered {
            return self.gathered_list(self.smem.owner.at(slot).load());
        }
        let at = self.row.mad(self.slots(), slot).mul_wide(self.list_words());
        self.p.memory.byte_at(self.p.rescue_at).cast::<u32>().at64(at)
    }

    /// Pushes this rank's list if it is saturated, and waits for everybody's. Ends with a CTA barrier.
    pub(super) fn rescue(&self, mask: Reg<u32>, sequence: Reg<u32>) {
        let t = self.t;
        self.name_owners(mask);
        when(((mask >> self.p.rank) & 1).ne(0), || self.push_list(mask, sequence));
        when(t.warp.eq(0), || self.wait_for_lists(mask, sequence));
        sync_threads(); // ORDER: the lists acquired by warp 0 and the owners, before every warp reads them.
        if let Some(lists) = self.smem.lists {
            let from = self.list(0.into());
            for_range(t.index, mask.popc() * (self.list_words() / 4), t.threads, |vector| {
                let words = from.at(vector * 4).load_vec_as::<4>(LoadMode::relaxed(Scope::Sys));
                lists.at(vector * 4).store_vec(words);
            });
            sync_threads(); // ORDER: the copies, before they are read.
        }
    }

    /// Notes which rank each rescue slot belongs to; a CTA barrier must follow.
    pub(super) fn name_owners(&self, mask: Reg<u32>) {
        let rank = self.t.index;
        when(rank.lt(self.ranks()), || {
            when(((mask >> rank) & 1).ne(0), || self.smem.owner.at(self.slot_of(mask, rank)).store(rank));
        });
    }

    /// Rescue slot of a saturated rank.
    fn slot_of(&self, mask: Reg<u32>, rank: Reg<u32>) -> Reg<u32> {
        (mask & ((Reg::<u32>::from(1) << rank) - 1)).popc()
    }

    fn push_list(&self, mask: Reg<u32>, sequence: Reg<u32>) {
        let Merge { p, topk, t, row, .. } = self;
        topk.clear();
        sync_threads(); // ORDER: the cleared bins, before keys are counted.
        let end = Var::new(0i32);
        when(row.lt(p.rows), || end.set(p.row_ends.at(*row).load_as(LoadMode::STREAM)));
        let length = clamp_length(end.get(), p.length_max);
        let first = row.mul_wide(p.pitch);
        let tops = p.tops.at64(first >> KEYS_PER_TOP.trailing_zeros());
        topk.write_b_row(Row { logits: p.logits.at64(first), tops, length });
        sync_threads(); // ORDER: the finished list, before it is copied.
        let words = self.list_words();
        let at = row.mad(self.slots(), self.slot_of(mask, p.rank)).mul_wide(words);
        for_range(t.index, self.ranks() * (words / 4), t.threads, |i| {
            let (peer, vector) = (i / (words / 4), i % (words / 4));
            let list = self.peer(peer).byte_at(p.rescue_at).cast::<u32>().at64(at);
            let values = topk.b_row().ptr().at(vector * 4).load_vec::<4>();
            list.at(vector * 4).store_vec_as(Sem::Relaxed(Scope::Sys), values);
        });
        sync_threads(); // ORDER: every thread's stores, before they are released together.
        when(t.index.lt(self.ranks()), || {
            // ORDER: the list, to whoever acquires the flag.
            let flag = self.flag(self.peer(t.index), p.rank);
            flag.store_as(Sem::Release(Scope::Sys), sequence);
        });
    }

    /// The flag of `source` for this row, in the memory at `base`.
    fn flag(&self, base: Global<u64>, source: Reg<u32>) -> Global<u32> {
        let at = source.mad_wide(self.p.slot_rows, self.row.to_u64());
        base.byte_at(self.p.flags_at).cast::<u32>().at64(at)
    }

    /// Warp 0: polls the saturated ranks' flags, one a lane.
    fn wait_for_lists(&self, mask: Reg<u32>, sequence: Reg<u32>) {
        let lane = self.t.lane;
        let wanted = (mask >> lane) & 1;
        let flag = self.flag(self.p.memory, lane.min(self.ranks() - 1));
        let start = globaltimer();
        repeat(|l| {
            let here = Var::new(1u32);
            when(wanted.ne(0), || {
                // ORDER: the list that the flag releases.
                here.set(flag.load_as(LoadMode::acquire(Scope::Sys)).eq(sequence).as_u32());
            });
            let ready = here.get().ne(0);
            l.break_if(all(ready));
            let expired = any((globaltimer() - start).gt(self.p.timeout_ns));
            when(expired, || self.note_late(LATE_LIST, !ready, lane, sequence));
            l.break_if(expired);
        });
    }
}

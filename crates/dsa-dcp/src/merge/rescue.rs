//! The first K keys of this rank: what a direct merge sends at once, and a saturated rank in round 2.

use dsa_core::consts::KEYS_PER_TOP;
use dsa_core::layout::ll_slot::PAIR_BYTES;
use dsa_kernels::rows::clamp_length;
use dsa_kernels::topk::Row;
use ptx::*;

use super::kernel::Merge;
use super::keys::Saturated;
use super::poll::{Incoming, LIST_POLLS_MAX, polls};
use crate::layout::LATE_LIST;

impl Merge {
    /// The `other`-th of the ranks that are not this one.
    pub(super) fn other(&self, other: Reg<u32>) -> Reg<u32> {
        other + other.ge(self.p.rank).as_u32()
    }

    /// Selects this rank's list. All threads call it, once the logits are there. Contains CTA barriers, and ends with one.
    pub(super) fn select_list(&self) {
        let Merge { p, topk, row, .. } = self;
        topk.clear();
        sync_threads(); // ORDER: the cleared bins, before keys are counted; all else that was cleared, before its use.
        let end = Var::new(0i32);
        when(row.lt(p.rows), || end.set(p.row_ends.at(*row).load_as(LoadMode::STREAM)));
        let length = clamp_length(end.get(), p.length_max);
        let first = row.mul_wide(p.pitch);
        let tops = p.tops.at64(first >> KEYS_PER_TOP.trailing_zeros());
        topk.write_b_row(Row { logits: p.logits.at64(first), tops, length });
        sync_threads(); // ORDER: the finished list, before it is read.
    }

    /// Pushes this rank's list, as pairs of `tag`, to byte `first` of every rank's memory; not to its own, if it is `kept`.
    fn push_list(&self, first: Reg<u64>, tag: Reg<u32>, kept: bool) {
        let Merge { topk, smem, t, .. } = self;
        let pairs = self.list_pairs();
        let targets = if kept { self.ranks() - 1 } else { self.ranks() };
        for_range(t.index, targets * pairs, t.threads, |i| {
            let (target, pair) = (i / pairs, i % pairs);
            let target = if kept { self.other(target) } else { target };
            let base = Global::<u64>::from_address(smem.peers.at(target).load());
            let [w0, w1] = topk.b_row().ptr().at(pair * 2).load_vec::<2>();
            // ORDER: none. Each 8-byte half says by its tag which call it belongs to.
            base.byte_at(first).at(pair * 2).store_vec_as(Sem::Relaxed(Scope::Sys), [w0.pack(tag), w1.pack(tag)]);
        });
    }

    /// Pairs of a list that are sent.
    fn list_pairs(&self) -> u32 {
        if self.has_planes() { self.list_words() / 2 } else { self.k() / 2 }
    }

    /// Pushes this rank's list as its words of round 1. No barrier.
    pub(super) fn push_words(&self, epoch: Reg<u32>) {
        let slot = ((epoch & 1).mad(self.ranks(), self.p.rank)).mad_wide(self.p.slot_rows, self.row.to_u64());
        self.push_list(slot * (self.row_words() / 2 * PAIR_BYTES as u32), epoch, true);
    }

    /// This rank's list becomes its words at `to`, and its upper digits are counted. No barrier.
    pub(super) fn take_own_list(&self, to: Shared<u32>) {
        let Merge { topk, t, .. } = self;
        for_range(t.index, self.list_words() / 4, t.threads, |vector| {
            let words = topk.b_row().ptr().at(vector * 4).load_vec::<4>();
            to.at(vector * 4).store_vec(words);
            // The last vectors are planes.
            let holds_keys = vector.lt(self.k() / 4);
            words.into_iter().for_each(|word| self.count_upper_of(holds_keys & word.ne(0), word >> 16));
        });
    }

    /// Words `2 pair` and `2 pair + 1` of the list in rescue slot `slot`.
    pub(super) fn list_pair(&self, slot: Reg<u32>, pair: Reg<u32>) -> [Reg<u32>; 2] {
        match self.smem.lists {
            Some(lists) => lists.ptr().at(slot.mad(self.list_words(), pair * 2)).load_vec::<2>(),
            None if self.shape.gathered => {
                self.gathered_list(self.smem.owner.at(slot).load()).at(pair * 2).load_vec::<2>()
            }
            None => {
                let halves = self.list(slot).at(pair * 2).load_vec_as::<2>(LoadMode::relaxed(Scope::Sys));
                halves.map(|half| half.unpack().0)
            }
        }
    }

    /// Word `j` of that list.
    pub(super) fn list_word(&self, slot: Reg<u32>, j: Reg<u32>) -> Reg<u32> {
        match self.smem.lists {
            Some(lists) => lists.at(slot.mad(self.list_words(), j)).load(),
            None if self.shape.gathered => self.gathered_list(self.smem.owner.at(slot).load()).at(j).load(),
            None => self.list(slot).at(j).load_as(LoadMode::relaxed(Scope::Sys)).unpack().0,
        }
    }

    /// The first pair of the list that arrives in rescue slot `slot` of this row.
    fn list(&self, slot: Reg<u32>) -> Global<u64> {
        self.p.memory.byte_at(self.list_at(slot))
    }

    /// Its byte in the memory of any rank.
    fn list_at(&self, slot: Reg<u32>) -> Reg<u64> {
        let lists_before = slot.mad_wide(self.p.slot_rows, self.row.to_u64());
        lists_before * (self.list_words() / 2 * PAIR_BYTES as u32) + self.p.lists_at
    }

    /// Round 2: pushes this rank's list if it is saturated, waits for everybody's, and counts the upper digit of all that
    /// can be selected. Counts must be cleared. Contains CTA barriers; one must follow.
    pub(super) fn rescue(&self, saturated: Saturated, sequence: Reg<u32>, blocks: &[Var<u32>]) {
        let Merge { p, smem, .. } = self;
        let kept = smem.lists.is_some();
        self.name_owners(saturated.mask);
        let slot = self.slot_of(saturated.mask, p.rank);
        let mine = ((saturated.mask >> p.rank) & 1).ne(0);
        when(mine, || {
            self.select_list();
            self.push_list(self.list_at(slot), sequence, kept);
            self.load_blocks(self.own_list(), blocks);
        });
        sync_threads(); // ORDER: the owners and the cleared counts, before they are used.
        // While the lists are on their way.
        self.count_upper(Saturated { count: 0u32.into(), ..saturated });
        if let Some(lists) = smem.lists {
            when(mine, || self.take_own_list(lists.ptr().at(slot * self.list_words())));
        }
        let pairs = self.list_pairs();
        // The slots that others fill: this rank's own, if it is kept, is left out.
        let others = if kept { saturated.count - mine.as_u32() } else { saturated.count };
        let slot_of = |i: Reg<u32>| {
            let number = i / pairs;
            if kept { number + (mine & number.ge(slot)).as_u32() } else { number }
        };
        self.poll(Incoming {
            pairs: others * pairs,
            most: self.slots() * pairs,
            always: false,
            together: polls(self.slots() * pairs, self.t.threads).min(LIST_POLLS_MAX),
            at: &|i| self.list(slot_of(i)).at((i % pairs) * 2),
            rank: &|i| smem.owner.at(slot_of(i)).load(),
            tag: sequence,
            what: LATE_LIST,
            take: &|i, live, words| {
                let pair = i % pairs;
                if let Some(lists) = smem.lists {
                    when(live, || lists.ptr().at(slot_of(i).mad(self.list_words(), pair * 2)).store_vec(words));
                }
                let holds_keys = live & pair.lt(self.k() / 2);
                words.into_iter().for_each(|word| self.count_upper_of(holds_keys & word.ne(0), word >> 16));
            },
        });
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
}

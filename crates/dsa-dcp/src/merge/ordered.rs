//! The selected ids in ascending order: a bitmap over the ids and counts of the bits before each group of 128.

use dsa_core::device::scan::block_exclusive;
use ptx::*;

use super::kernel::Merge;
use super::keys::{Kth, Saturated};

impl Merge {
    /// Writes the selected ids to the shared list in ascending order; returns how many there are. Ends with a CTA
    /// barrier.
    pub(super) fn order_ids(&self, saturated: Saturated, kth: Kth) -> Reg<u32> {
        let (t, k, list) = (self.t, self.k(), self.topk.ids());
        let (bitmap, before) = (self.smem.bitmap, self.smem.before);
        let groups = (self.smem.last_id.at(0).load() >> 7) + 1;
        for_range(t.index, groups, t.threads, |group| {
            bitmap.at(group * 4).store_vec([Reg::from(0u32); 4]);
        });
        sync_threads(); // ORDER: the cleared bitmap, before bits are set.
        self.for_each_key(saturated, |key| {
            when(key.reaches(kth), || {
                let bit = Reg::<u32>::from(1) << (key.gid & 31);
                bitmap.at(key.gid >> 5).reduce(Atomic::Or, Sem::Relaxed(Scope::Cta), bit);
            });
        });
        sync_threads(); // ORDER: every bit, before they are counted.
        let share = (groups + (t.threads - 1)) / t.threads;
        let begin = (t.index * share).min(groups);
        let end = (begin + share).min(groups);
        let bits = |group: Reg<u32>| {
            let [a, b, c, d] = bitmap.at(group * 4).load_vec::<4>();
            a.popc() + b.popc() + c.popc() + d.popc()
        };
        let mine = Var::new(0u32);
        for_range(begin, end, 1u32, |group| mine.add(bits(group)));
        let (start, total) = block_exclusive(mine.get(), self.topk.scratch(), t);
        let running = Var::new(start);
        for_range(begin, end, 1u32, |group| {
            before.at(group).store(running.get());
            running.add(bits(group));
        });
        sync_threads(); // ORDER: the counts, before ids look up their places.
        self.for_each_key(saturated, |key| {
            when(key.reaches(kth), || {
                let group = key.gid >> 7;
                let words = bitmap.at(group * 4).load_vec::<4>();
                let own_word = (key.gid >> 5) & 3;
                let below = (Reg::<u32>::from(1) << (key.gid & 31)) - 1;
                let place = words.into_iter().enumerate().fold(before.at(group).load(), |place, (i, word)| {
                    let i = i as u32;
                    let mask = own_word.gt(i).select::<u32>(u32::MAX, own_word.eq(i).select::<u32>(below, 0u32));
                    place + (word & mask).popc()
                });
                // Keys are distinct, so K of them reach the K-th; were they not, memory would still be safe.
                list.at(place.min(k - 1)).store(key.gid);
            });
        });
        sync_threads(); // ORDER: the ordered ids, before they are mapped to rows.
        total.min(k)
    }
}

//! All selected ids in ascending order: a bitmap over the ids and counts of the bits before each group of 128.

use dsa_core::device::scan::block_exclusive;
use ptx::*;

use super::kernel::Merge;
use super::keys::{Kth, Saturated};

/// The shared layout of a merge that writes ids.
#[derive(Clone, Copy)]
pub(super) struct Bitmap {
    /// Bit `g % 32` of word `g / 32`: id `g` is selected.
    bits: SharedArray<u32>,
    /// Selected ids before each group of 128.
    before: SharedArray<u16>,
}

impl Bitmap {
    pub(super) fn new(groups: u32) -> Bitmap {
        Bitmap {
            bits: SharedArray::aligned("bitmap", groups * 4, 16),
            before: SharedArray::aligned("before", groups, 16),
        }
    }
}

impl Merge {
    /// Writes the selected ids, then -1. The words, the lists and their owners are in place; the dependency wait is over.
    pub(super) fn write_ids(&self, bitmap: Bitmap, saturated: Saturated, kth: Kth) {
        let Merge { shape, p, topk, t, row, .. } = self;
        let (k, Bitmap { bits, before }) = (self.k(), bitmap);
        let groups = shape.groups();
        // Words come from elsewhere: whatever they are, the id is one that the bitmap has.
        let id = |gid: Reg<u32>| gid.min(shape.exchange().ids() as u32 - 1);
        for_range(t.index, groups, t.threads, |group| bits.at(group * 4).store_vec([Reg::from(0u32); 4]));
        sync_threads(); // ORDER: the cleared bitmap, before bits are set; this rank's list read, before ids overwrite it.
        self.for_each_candidate(saturated, |candidate| {
            let gid = (candidate.gid)();
            when(candidate.live & kth.admits(candidate.order, gid), || {
                let bit = Reg::<u32>::from(1) << (gid & 31);
                bits.at(id(gid) >> 5).reduce(Atomic::Or, Sem::Relaxed(Scope::Cta), bit);
            });
        });
        sync_threads(); // ORDER: every bit, before they are counted.
        let share = groups.div_ceil(t.threads);
        let begin = (t.index * share).min(groups);
        let end = (begin + share).min(groups);
        let selected = |group: Reg<u32>| {
            let [a, b, c, d] = bits.at(group * 4).load_vec::<4>();
            a.popc() + b.popc() + c.popc() + d.popc()
        };
        let mine = Var::new(0u32);
        for_range(begin, end, 1u32, |group| mine.add(selected(group)));
        let (start, total) = block_exclusive(mine.get(), topk.scratch(), *t);
        let running = Var::new(start);
        for_range(begin, end, 1u32, |group| {
            before.at(group).store(running.get());
            running.add(selected(group));
        });
        sync_threads(); // ORDER: the counts, before ids look up their places.
        let list = topk.ids();
        self.for_each_candidate(saturated, |candidate| {
            let gid = (candidate.gid)();
            when(candidate.live & kth.admits(candidate.order, gid), || {
                let group = id(gid) >> 7;
                let words = bits.at(group * 4).load_vec::<4>();
                let own_word = (gid >> 5) & 3;
                let below = (Reg::<u32>::from(1) << (gid & 31)) - 1;
                let place = words.into_iter().enumerate().fold(before.at(group).load(), |place, (i, word)| {
                    let i = i as u32;
                    let mask = own_word.gt(i).select::<u32>(u32::MAX, own_word.eq(i).select::<u32>(below, 0u32));
                    place + (word & mask).popc()
                });
                // Keys are distinct, so K of them reach the K-th; were they not, memory would still be safe.
                list.at(place.min(k - 1)).store(gid);
            });
        });
        sync_threads(); // ORDER: the ordered ids, before they are written out.
        let ids = p.ids.at64(row.mul_wide(k));
        for_range(t.index, k, t.threads, |slot| {
            let value = Var::new(-1i32);
            when(slot.lt(total.min(k)), || value.set(list.at(slot).load().as_i32()));
            ids.at(slot).store(value.get());
        });
    }
}

//! The selection as a [`BRow`], by one CTA or by those of a cluster.
//!
//! In a cluster the consecutive keys of a CTA have two runs of places, those above the threshold and those at it. Their words are
//! in its own shared memory, each at its place in the row. To a word of the planes several CTAs may add: the first one gathers them,
//! if any index has more than 16 bits.

use dsa_core::consts::LOCAL_CONTEXT_MAX;
use dsa_core::device::scan::Thread;
use dsa_core::layout::b_row::BRow;
use ptx::{Pred, Reg, SharedArray, Var, for_range, when, when_else};

use super::places::{BWords, Staged};
use super::{KEYS, Row, RowTopk, Selected, Slice};

/// What a CTA of a cluster has of a row that the cluster wrote.
#[derive(Clone, Copy)]
pub struct BRowPart {
    /// Places of its keys above the threshold, and of those at it.
    runs: [Slice; 2],
    /// Whether any CTA may have bits in the planes.
    planes: Pred,
}

impl BRowPart {
    /// `body(group, run)` for every group of `size` (a power of two) places, aligned in the row, that holds some of a run, dealt to
    /// threads that start at `start` and go on by `step`; once for each run that it holds some of.
    pub fn each_group(&self, size: u32, start: Reg<u32>, step: u32, body: impl FnOnce(Reg<u32>, Slice)) {
        let shift = size.trailing_zeros();
        let [above, tied] = self.runs;
        let [(above_first, above_groups), (tied_first, tied_groups)] = [above, tied].map(|run| {
            let first = run.first >> shift;
            (first, ((run.end + (size - 1)) >> shift) - first)
        });
        for_range(start, above_groups + tied_groups, step, |i| {
            let at_threshold = i.ge(above_groups);
            let of = |tied: Reg<u32>, above: Reg<u32>| at_threshold.select::<u32>(tied, above);
            let group = of(tied_first - above_groups, above_first) + i;
            body(group, Slice { first: of(tied.first, above.first), end: of(tied.end, above.end) });
        });
    }
}

impl RowTopk {
    /// As [`new`](RowTopk::new) for rows of up to [`LOCAL_CONTEXT_MAX`] keys, with room for the selection as a [`BRow`].
    ///
    /// `staged` keys take 16 bytes of shared memory an octet, 32 KB or more, and spare the writing lanes a load for each word.
    pub fn with_b_row(k: u32, cluster: u32, foreign: bool, staged: bool, t: Thread) -> RowTopk {
        let words = BRow::new(k as usize).words() as u32;
        let topk = Self::with_list(k, words + KEYS, LOCAL_CONTEXT_MAX, cluster, Some(words - k), foreign, t);
        let staged = staged.then(|| Staged::new(topk.octets));
        RowTopk { staged, ..topk }
    }

    /// The words of the row that [`write_b_row`](RowTopk::write_b_row) left: in a cluster those of the CTA's part, at their places.
    pub fn b_row(&self) -> SharedArray<u32> {
        self.smem.list
    }

    /// Words of the planes.
    fn plane_words(&self) -> u32 {
        self.smem.list.len() - KEYS - self.k
    }

    /// The first K keys of `row`, however short, as a [`BRow`]; returns how many there are, and in a cluster this CTA's part. All
    /// threads call it after the barrier that [`clear`](RowTopk::clear) needs. A CTA barrier must follow before the row is read.
    pub fn write_b_row(&self, row: Row) -> (Reg<u32>, Option<BRowPart>) {
        let RowTopk { k, smem, cluster, foreign, staged, .. } = self;
        let planes = smem.list.ptr().at(*k);
        // First place and end of either run.
        let runs = cluster.map(|_| [[Var::new(0u32), Var::new(0u32)], [Var::new(0u32), Var::new(0u32)]]);
        // Set at the end of either branch: until then they need no register.
        let (length, count) = (Var::new(0u32), Var::new(0u32));
        when_else(
            row.length.le(*k),
            || {
                self.take_all(row, runs.map(|[above, _]| above));
                count.set(row.length);
                length.set(0u32);
                runs.iter().flat_map(|[_, tied]| tied).for_each(|place| place.set(0u32));
            },
            || {
                let Selected { run, places, cut, .. } = self.search(row, || (), false);
                let first_tie = Reg::<u32>::from(*k) - cut.ties;
                let places = match cluster {
                    None => places,
                    Some(cluster) => {
                        let [above, tied] = cluster.tallied()[0];
                        places.after((above << 16) | tied.min(cut.ties)) // no more than those matter
                    }
                };
                let row = Row { logits: cluster.map_or(row.logits, |cluster| cluster.recall_logits(row)), ..row };
                if let Some(staged) = staged {
                    staged.fill(&run);
                }
                let to = BWords { words: smem.list, planes };
                places.write_b_words(&run, cut, first_tie, to, *staged, |index| row.key(index, *foreign));
                if let (Some(cluster), Some([above, tied])) = (cluster, runs) {
                    // Read again rather than kept in registers.
                    length.set(cluster.recall_length(row));
                    let [before, own] = cluster.tallied();
                    above[0].set(before[0]);
                    above[1].set(before[0] + own[0]);
                    // Those at it may be more than were counted, but then as many as are taken were.
                    tied[0].set(first_tie + before[1].min(cut.ties));
                    tied[1].set(first_tie + (before[1] + own[1]).min(cut.ties));
                }
                count.set(*k);
            },
        );
        let part = runs.map(|runs| BRowPart {
            runs: runs.map(|[first, end]| Slice { first: first.get(), end: end.get() }),
            planes: length.get().gt(1 << 16),
        });
        (count.get(), part)
    }

    /// Every key of a short row; an equal share of the places to each CTA, whose `run` they become.
    fn take_all(&self, row: Row, run: Option<[Var<u32>; 2]>) {
        let RowTopk { k, smem, t, foreign, .. } = self;
        let share = k / self.ctas();
        let first = self.rank() * share;
        match run {
            None => {
                let planes = smem.list.ptr().at(*k);
                when(t.index.lt(self.plane_words()), || planes.at(t.index).store(0u32));
            }
            Some([from, to]) => {
                from.set(first);
                to.set(first + share);
            }
        }
        for_range(t.index, share, t.threads, |i| {
            let slot = if run.is_some() { first + i } else { i };
            let value = Var::new(0u32);
            when(slot.lt(row.length), || {
                value.set((row.key(slot, *foreign) << 16) | ((slot & 0xFFFF) ^ 0xFFFF));
            });
            smem.list.at(slot).store(value.get());
        });
    }

    /// In a cluster, after the barrier that follows [`write_b_row`](RowTopk::write_b_row): the planes on their way to the first
    /// CTA, if there can be any. All threads of all CTAs call it.
    pub fn send_planes(&self, part: &BRowPart) {
        let Some(cluster) = &self.cluster else { return };
        when(part.planes & self.t.warp.eq(0), || cluster.send_planes(self.smem.list.ptr().at(self.k)));
    }

    /// Waits for them; all threads of the first CTA call it.
    pub fn await_planes(&self, part: &BRowPart) {
        when(part.planes, || self.cluster.iter().for_each(|cluster| cluster.await_planes()));
    }

    /// The two words of the planes from `at` on: in the first CTA, after [`await_planes`](RowTopk::await_planes).
    pub fn two_of_planes(&self, part: &BRowPart, at: Reg<u32>) -> [Reg<u32>; 2] {
        let words = [Var::new(0u32), Var::new(0u32)];
        when(part.planes, || {
            let found = self.cluster.expect("a part is of a cluster").two_of_planes(at);
            words.iter().zip(found).for_each(|(word, found)| word.set(found));
        });
        words.map(|word| word.get())
    }
}

//! The device code of [`merge`](super).

use dsa_core::Ownership;
use dsa_core::consts::RANKS_MAX;
use dsa_core::device::ownership::{local_of, next_epoch, rank_of};
use dsa_core::device::scan::{Thread, block_exclusive};
use dsa_core::layout::ll_slot::PAIR_BYTES;
use dsa_kernels::topk::RowTopk;
use ptx::*;

use super::MergeShape;
use super::keys::{Kth, Saturated};
use crate::layout::{LATE_WORDS, STATUS_WORDS};

kernel_args! {
    /// Arguments of the merge. Logits, tops, row ends and `length_max` must be those that local top-k was given.
    pub struct MergeArgs / MergeParams {
        /// int32 `[rows of the grid, topk]`: this rank's physical KV rows in ascending id order, -1 past the count; output
        pub rows_out: DevicePtr<i32>,
        /// int32 `[rows of the grid]`: how many; output
        pub valid_out: DevicePtr<i32>,
        /// int32 `[rows of the grid, topk]`: all selected global ids ascending, -1 after; output, unused without ids
        pub ids: DevicePtr<i32>,
        /// this rank's memory of the exchange
        pub memory: DevicePtr<u64>,
        /// `[ranks]`: address of every rank's memory
        pub peers: DevicePtr<u64>,
        /// u32 `[slot_rows]`: epoch of each row's last merge, in and out
        pub epochs: DevicePtr<u32>,
        /// u32 `[slot_rows]`: sequence of each row's last rescue, in and out
        pub sequences: DevicePtr<u32>,
        /// u32 `[4]`: the status block, in and out
        pub status: DevicePtr<u32>,
        /// pitched BF16 logits
        pub logits: DevicePtr<u16>,
        /// order16 of the largest of every 8 logits
        pub tops: DevicePtr<u16>,
        /// int32 `[requests, ..]`: MLA block ids of each request on this rank
        pub table: DevicePtr<i32>,
        /// int32 `[rows]`: keys that each row has on this rank
        pub row_ends: DevicePtr<i32>,
        /// byte of the rescue lists in the exchange's memory
        pub rescue_at: u64,
        /// byte of the flags in the exchange's memory
        pub flags_at: u64,
        /// how long a poll may take, in nanoseconds
        pub timeout_ns: u64,
        /// elements from one logits row to the next
        pub pitch: u32,
        /// longest local row that tables and scratch allow, in keys
        pub length_max: u32,
        /// live rows; the rows of the grid beyond them have no keys
        pub rows: u32,
        /// entries from one table row to the next
        pub table_stride: u32,
        /// MLA rows from one block to the next
        pub block_rows: u32,
        /// this rank
        pub rank: u32,
        /// rows of the slots
        pub slot_rows: u32,
    }
}

/// Pairs that a thread polls at a time.
const POLLS: u32 = 4;

/// The shared layout, beside that of the row top-k.
pub(super) struct Smem {
    /// `[rank][n + n / 32]`: the B' rows.
    pub(super) words: SharedArray<u32>,
    /// Bit `g % 32` of word `g / 32`: id `g` is selected.
    pub(super) bitmap: SharedArray<u32>,
    /// Selected ids before each group of 128.
    pub(super) before: SharedArray<u16>,
    pub(super) group_sums: SharedArray<u32>,
    /// Non-zero for ranks that hide nothing.
    pub(super) unsaturated: SharedArray<u32>,
    /// Rank of each rescue slot.
    pub(super) owner: SharedArray<u32>,
    /// The largest id among the candidates.
    pub(super) last_id: SharedArray<u32>,
    /// Non-zero: the exchange had failed before.
    pub(super) broken: SharedArray<u32>,
    /// What became late here, and row, rank, epoch: a status block.
    pub(super) late: SharedArray<u32>,
}

impl Smem {
    fn new(shape: &MergeShape, t: Thread) -> Smem {
        let ranks = shape.exchange.ranks() as u32;
        Smem {
            words: SharedArray::aligned("words", ranks * shape.exchange.words().words() as u32, 16),
            bitmap: SharedArray::aligned("bitmap", shape.groups() * 4, 16),
            before: SharedArray::aligned("before", shape.groups(), 16),
            group_sums: SharedArray::new("group_sums_merge", t.warps()),
            unsaturated: SharedArray::new("unsaturated", RANKS_MAX as u32),
            owner: SharedArray::new("owner", RANKS_MAX as u32),
            last_id: SharedArray::new("last_id", 1),
            broken: SharedArray::new("broken", 1),
            late: SharedArray::new("late", STATUS_WORDS as u32),
        }
    }
}

/// Builds the kernel of `shape` for `target`.
///
/// # Errors
/// Only if the builder's verifier refuses the result, which is a defect here.
pub fn build(shape: &MergeShape, target: Target) -> Result<Kernel<MergeArgs>, VerifyError> {
    let bounds = LaunchBounds::threads(shape.threads());
    let shape = *shape;
    ptx::build::<MergeArgs>(&shape.name(), target, bounds, |p| {
        let t = Thread::current();
        let topk = RowTopk::with_b_row(shape.exchange.topk() as u32, shape.foreign, t);
        let smem = Smem::new(&shape, t);
        Merge { shape, p, topk, smem, t, row: cta_index() }.emit()
    })
}

pub(super) struct Merge {
    pub(super) shape: MergeShape,
    pub(super) p: MergeParams,
    /// Its arrays serve every selection here.
    pub(super) topk: RowTopk,
    pub(super) smem: Smem,
    pub(super) t: Thread,
    pub(super) row: Reg<u32>,
}

impl Merge {
    pub(super) fn own(&self) -> Ownership {
        self.shape.exchange.ownership()
    }

    pub(super) fn ranks(&self) -> u32 {
        self.own().ranks() as u32
    }

    /// Words that a rank sends in round 1, without planes.
    pub(super) fn n(&self) -> u32 {
        self.shape.exchange.n() as u32
    }

    pub(super) fn k(&self) -> u32 {
        self.shape.exchange.topk() as u32
    }

    pub(super) fn row_words(&self) -> u32 {
        self.shape.exchange.words().words() as u32
    }

    pub(super) fn list_words(&self) -> u32 {
        self.shape.exchange.list().words() as u32
    }

    /// Rescue slots of a row.
    pub(super) fn slots(&self) -> u32 {
        self.shape.exchange.rescue_slots() as u32
    }

    /// The memory of a rank.
    pub(super) fn peer(&self, rank: Reg<u32>) -> Global<u64> {
        Global::from_address(self.p.peers.at(rank).load())
    }

    fn emit(&self) {
        let Merge { p, smem, t, row, .. } = self;
        when(t.index.lt(RANKS_MAX as u32), || smem.unsaturated.at(t.index).store(0u32));
        when(t.index.lt(STATUS_WORDS as u32), || smem.late.at(t.index).store(0u32));
        when(t.index.eq(0), || {
            smem.last_id.at(0).store(0u32);
            // Strong: a CTA of this launch may be failing.
            smem.broken.at(0).store(p.status.load_as(LoadMode::relaxed(Scope::Gpu)));
        });
        let epoch = next_epoch(p.epochs.at(*row).load());
        let sequence = next_epoch(p.sequences.at(*row).load());
        sync_threads(); // ORDER: what was initialised, before it is used.
        let broken = smem.broken.at(0).load();
        when(broken.eq(0), || self.poll_words(epoch));
        sync_threads(); // ORDER: every word, and whether one is late, before every warp reads them.

        let failed = Var::new(broken | smem.late.at(0).load());
        let (mask, sat_count) = (Var::new(0u32), Var::new(0u32));
        let kth = Kth { order: Var::new(0u32), comp: Var::new(0u32) };
        when(failed.get().eq(0), || {
            repeat(|l| {
                self.find_kth(Saturated { mask: mask.get(), count: sat_count.get() }, kth);
                l.break_if(mask.get().ne(0)); // that was round 2
                mask.set(self.find_saturated(kth));
                sat_count.set(mask.get().popc());
                // Words that local top-k wrote never saturate more ranks than there are slots.
                let impossible = sat_count.get().gt(self.slots());
                mask.set(impossible.select::<u32>(0u32, mask.get()));
                sat_count.set(mask.get().popc());
                l.break_if(mask.get().eq(0));
                // ORDER: the logits of the row, before the list is selected from them.
                wait_for_dependencies();
                self.rescue(mask.get(), sequence);
                failed.set(smem.late.at(0).load());
                l.break_if(failed.get().ne(0));
            });
        });
        when_else(
            failed.get().ne(0),
            || {
                self.start_writing();
                when(broken.eq(0), || self.record_late());
                self.write_row(Reg::from(0u32), None);
            },
            || {
                let total = self.order_ids(Saturated { mask: mask.get(), count: sat_count.get() }, kth);
                self.start_writing();
                self.write_row(total, Some(self.owned(total)));
                // The next call's epoch: every word of this one is read, and its push is over.
                when(t.index.eq(0), || {
                    p.epochs.at(*row).store(epoch);
                    when(mask.get().ne(0), || p.sequences.at(*row).store(sequence));
                });
            },
        );
    }

    /// Waits for local top-k to end; from here on memory is written.
    fn start_writing(&self) {
        wait_for_dependencies();
        if !self.shape.hold {
            launch_dependents();
        }
    }

    /// Brings the row's words into shared memory as they arrive.
    fn poll_words(&self, epoch: Reg<u32>) {
        let Merge { p, smem, t, row, .. } = self;
        let pairs = self.row_words() / 2;
        let total = self.ranks() * pairs;
        let first_rank = (epoch & 1) * self.ranks();
        let start = globaltimer();
        for_range(0u32, total, t.threads * POLLS, |base| {
            let polls: [Poll; POLLS as usize] = std::array::from_fn(|i| {
                let i = i as u32;
                let index = base + t.index + i * t.threads;
                let live = index.lt(total);
                let index = index.min(total - 1);
                let rank = index / pairs;
                let pair = index - rank * pairs;
                let slot = (first_rank + rank).mad_wide(p.slot_rows, row.to_u64());
                let at = p.memory.byte_at(slot * (pairs * PAIR_BYTES as u32)).at(pair * 2);
                let word = smem.words.ptr().at(index * 2);
                Poll { live, rank, at, word, w0: Var::new(0u32), w1: Var::new(0u32), here: Var::new(0u32) }
            });
            repeat(|l| {
                // ORDER: none. Each half is this call's iff its epoch is. All loads are under way together.
                let loaded = polls.each_ref().map(|poll| poll.at.load_vec_as::<2>(LoadMode::relaxed(Scope::Sys)));
                for (poll, [a, b]) in polls.iter().zip(loaded) {
                    let ((w0, e0), (w1, e1)) = (a.unpack(), b.unpack());
                    poll.w0.set(w0);
                    poll.w1.set(w1);
                    poll.here.set((!poll.live | (e0.eq(epoch) & e1.eq(epoch))).as_u32());
                }
                let here = polls.iter().map(|poll| poll.here.get()).reduce(|a, b| a & b).expect("some poll");
                let ready = here.ne(0);
                l.break_if(all(ready));
                let expired = any((globaltimer() - start).gt(p.timeout_ns));
                when(expired, || {
                    let missing = polls
                        .iter()
                        .rev()
                        .fold(Reg::<u32>::from(0), |rank, poll| poll.here.get().eq(0).select::<u32>(poll.rank, rank));
                    self.note_late(LATE_WORDS, !ready, missing, epoch);
                });
                l.break_if(expired);
            });
            for poll in &polls {
                when(poll.live, || poll.word.store_vec([poll.w0.get(), poll.w1.get()]));
            }
        });
    }

    /// Notes the first of this warp's lanes with `missing` as late, unless another warp has noted one. The warp is whole.
    pub(super) fn note_late(&self, what: u32, missing: Pred, rank: Reg<u32>, expected: Reg<u32>) {
        let late = self.smem.late;
        let first = ballot(missing).reverse_bits().clz();
        when(self.t.lane.eq(first), || {
            let before = late.at(0).compare_swap(Sem::Relaxed(Scope::Cta), 0u32, what);
            when(before.eq(0), || {
                late.at(1).store(self.row);
                late.at(2).store(rank);
                late.at(3).store(expected);
            });
        });
    }

    /// Thread 0: what was late becomes the exchange's status, unless it has one.
    fn record_late(&self) {
        let Merge { p, smem, t, .. } = self;
        when(t.index.eq(0), || {
            let before = p.status.compare_swap(Sem::Relaxed(Scope::Gpu), 0u32, smem.late.at(0).load());
            when(before.eq(0), || {
                for word in 1..STATUS_WORDS as u32 {
                    p.status.at(word).store(smem.late.at(word).load());
                }
            });
        });
    }

    /// This thread's share of the ordered ids of which this rank owns some.
    fn owned(&self, total: Reg<u32>) -> Owned {
        let Merge { p, topk, t, .. } = self;
        let share = self.k().div_ceil(t.threads);
        let ids: Vec<(Reg<u32>, Var<u32>)> = (0..share)
            .map(|i| {
                let slot = t.index * share + i;
                let (id, mine) = (Var::new(0u32), Var::new(0u32));
                when(slot.lt(total), || {
                    id.set(topk.ids().at(slot).load());
                    mine.set(rank_of(self.own(), id.get()).eq(p.rank).as_u32());
                });
                (id.get(), mine)
            })
            .collect();
        let mine = ids.iter().fold(Reg::<u32>::from(0), |sum, (_, mine)| sum + mine.get());
        // The scan's words were last read before the barrier that published the ids.
        let (first, count) = block_exclusive(mine, topk.scratch(), *t);
        Owned { ids, first, count }
    }

    /// The outputs: `total` ids, and the rows of those that are `owned`.
    fn write_row(&self, total: Reg<u32>, owned: Option<Owned>) {
        let Merge { shape, p, topk, t, row, .. } = self;
        let base = row.mul_wide(self.k());
        let (rows_out, ids) = (p.rows_out.at64(base), p.ids.at64(base));
        let count = owned.as_ref().map_or(Reg::from(0u32), |owned| owned.count);
        if let Some(owned) = &owned {
            let table = p.table.at64((*row / shape.q).mul_wide(p.table_stride));
            let slot = Var::new(owned.first);
            for (id, mine) in &owned.ids {
                when(mine.get().ne(0), || {
                    let local = local_of(self.own(), *id).min(p.length_max - 1);
                    let block = table.at(local >> shape.page.trailing_zeros()).load_as(LoadMode::STREAM).as_u32();
                    rows_out.at(slot.get()).store(block.mad(p.block_rows, local & (shape.page - 1)).as_i32());
                    slot.add(1);
                });
            }
        }
        for_range(t.index, self.k(), t.threads, |slot| {
            when(slot.ge(count), || rows_out.at(slot).store(-1i32));
            if shape.ids {
                let id = Var::new(-1i32);
                when(slot.lt(total), || id.set(topk.ids().at(slot).load().as_i32()));
                ids.at(slot).store(id.get());
            }
        });
        when(t.index.eq(0), || p.valid_out.at(*row).store(count.as_i32()));
    }
}

/// A pair on its way.
struct Poll {
    live: Pred,
    rank: Reg<u32>,
    at: Global<u64>,
    word: Shared<u32>,
    w0: Var<u32>,
    w1: Var<u32>,
    here: Var<u32>,
}

/// The ids of a thread's share, which of them this rank owns, and where those go.
struct Owned {
    ids: Vec<(Reg<u32>, Var<u32>)>,
    first: Reg<u32>,
    count: Reg<u32>,
}

//! The device code of [`merge`](super).

use dsa_core::Ownership;
use dsa_core::consts::RANKS_MAX;
use dsa_core::device::ownership::next_epoch;
use dsa_core::device::radix::WARP_BINS;
use dsa_core::device::scan::Thread;
use dsa_kernels::topk::RowTopk;
use ptx::*;

use super::MergeShape;
use super::ids::Bitmap;
use super::keys::{Kth, Saturated, TIES, TIES_AT_ONCE};
use crate::layout::STATUS_WORDS;

kernel_args! {
    /// Arguments of the merge. Logits, tops, row ends and `length_max` must be those that local top-k was given.
    pub struct MergeArgs / MergeParams {
        /// int32 `[rows of the grid, topk]`: this rank's physical KV rows in ascending id order, -1 past the count; output
        pub rows_out: DevicePtr<i32>,
        /// int32 `[rows of the grid]`: how many; output
        pub valid_out: DevicePtr<i32>,
        /// int32 `[rows of the grid, topk]`: all selected global ids ascending, -1 after; output, unused without ids
        pub ids: DevicePtr<i32>,
        /// this rank's memory of the exchange; all ranks' parts if they were gathered
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
        /// byte of the lists in the exchange's memory
        pub lists_at: u64,
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
        /// blocks of the MLA cache: a table entry that names none gives row -1
        pub blocks: u32,
        /// this rank
        pub rank: u32,
        /// rows of the slots; of each rank's part if they were gathered
        pub slot_rows: u32,
    }
}

/// The shared layout, beside that of the row top-k.
pub(super) struct Smem {
    /// `[ranks]`: address of every rank's memory.
    pub(super) peers: SharedArray<u64>,
    /// `[rank][n + n / 32]`: the B' rows, of K if the merge is direct.
    pub(super) words: SharedArray<u32>,
    /// `[slot][k + k / 32]`: the lists of saturated ranks, if there is room for them.
    pub(super) lists: Option<SharedArray<u32>>,
    /// Counts of the upper and of the lower digit of the candidates' order16; one bin more, and a vector's worth of padding.
    pub(super) digits: [SharedArray<u32>; 2],
    /// Where each digit was found: bin, candidates above it, in it, and in all bins.
    pub(super) found: [SharedArray<u32>; 2],
    /// Ids of the candidates that have the K-th one's order16, and padding.
    pub(super) ties: SharedArray<u32>,
    pub(super) tie_count: SharedArray<u32>,
    /// The last of them that is selected.
    pub(super) tie: SharedArray<u32>,
    /// Slot at which the second run of this rank's B' row begins.
    pub(super) second_run: SharedArray<u32>,
    /// Non-zero for ranks that hide nothing.
    pub(super) unsaturated: SharedArray<u32>,
    /// Rank of each rescue slot.
    pub(super) owner: SharedArray<u32>,
    /// Non-zero: the exchange had failed before.
    pub(super) broken: SharedArray<u32>,
    /// What became late here, and row, rank, epoch: a status block.
    pub(super) late: SharedArray<u32>,
    bitmap: Option<Bitmap>,
}

impl Smem {
    fn new(shape: &MergeShape) -> Smem {
        let exchange = shape.exchange();
        let ranks = exchange.ranks() as u32;
        let array = |name, len| SharedArray::aligned(name, len, 16);
        Smem {
            peers: SharedArray::new("peers", ranks),
            words: array("words", ranks * shape.sent().words() as u32),
            lists: shape.list_words_shared().map(|words| array("lists", words)),
            digits: ["upper_digits", "lower_digits"].map(|name| array(name, WARP_BINS + 4)),
            found: ["upper_found", "lower_found"].map(|name| array(name, 4)),
            ties: array("ties", TIES + TIES_AT_ONCE),
            tie_count: SharedArray::new("tie_count", 1),
            tie: SharedArray::new("tie", 1),
            second_run: SharedArray::new("second_run", 1),
            unsaturated: SharedArray::new("unsaturated", RANKS_MAX as u32),
            owner: SharedArray::new("owner", RANKS_MAX as u32),
            broken: SharedArray::new("broken", 1),
            late: SharedArray::new("late", STATUS_WORDS as u32),
            bitmap: shape.ids().then(|| Bitmap::new(shape.groups())),
        }
    }
}

/// Builds the kernel of `shape` for `target`.
///
/// # Errors
/// Only if the builder's verifier refuses the result, which is a defect here.
pub fn build(shape: &MergeShape, target: Target) -> Result<Kernel<MergeArgs>, VerifyError> {
    let bounds = LaunchBounds::threads(shape.threads()).min_ctas(shape.ctas());
    let shape = *shape;
    ptx::build::<MergeArgs>(&shape.name(), target, bounds, |p| {
        let t = Thread::current();
        let topk = RowTopk::with_b_row(shape.exchange.topk() as u32, 1, shape.foreign, false, t);
        Merge { shape, p, topk, smem: Smem::new(&shape), t, row: cta_index() }.emit()
    })
}

pub(super) struct Merge {
    pub(super) shape: MergeShape,
    pub(super) p: MergeParams,
    /// Selects this rank's list, and keeps it.
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

    /// Words that a rank sends in round 1, without planes: K if the merge is direct.
    pub(super) fn n(&self) -> u32 {
        if self.shape.is_direct() { self.k() } else { self.shape.exchange.n() as u32 }
    }

    pub(super) fn k(&self) -> u32 {
        self.shape.exchange.topk() as u32
    }

    pub(super) fn row_words(&self) -> u32 {
        self.shape.sent().words() as u32
    }

    pub(super) fn list_words(&self) -> u32 {
        self.shape.exchange.list().words() as u32
    }

    /// Rescue slots of a row.
    pub(super) fn slots(&self) -> u32 {
        self.shape.exchange.rescue_slots() as u32
    }

    fn emit(&self) {
        let Merge { shape, p, smem, t, row, .. } = self;
        let (direct, selects) = (shape.is_direct(), shape.selects());
        self.clear_counts();
        when(t.index.lt(RANKS_MAX as u32), || smem.unsaturated.at(t.index).store(0u32));
        when(t.index.lt(STATUS_WORDS as u32), || smem.late.at(t.index).store(0u32));
        if !shape.gathered {
            when(t.index.lt(self.ranks()), || smem.peers.at(t.index).store(p.peers.at(t.index).load()));
        }
        if selects {
            // ORDER: what its predecessors wrote, before it is read. Nothing is written that they still read.
            wait_for_dependencies();
            if !shape.hold {
                launch_dependents();
            }
        }
        when(t.index.eq(0), || {
            smem.tie.at(0).store(0u32);
            smem.second_run.at(0).store(u32::MAX);
            // Strong: a CTA of this launch may be failing.
            smem.broken.at(0).store(p.status.load_as(LoadMode::relaxed(Scope::Gpu)));
        });
        // What was gathered needs no epochs.
        let next = |counters: Global<u32>| next_epoch(counters.at(*row).load());
        let counters = (!shape.gathered).then(|| (next(p.epochs), next(p.sequences)));
        match selects {
            true => self.select_list(),
            false => sync_threads(), // ORDER: what was initialised, before it is used.
        }
        let broken = smem.broken.at(0).load();
        let early: Vec<Var<u32>> = (0..self.slots_per_thread(self.k())).map(|_| Var::new(0u32)).collect();
        when(broken.eq(0), || match counters {
            None => self.load_words(),
            Some((epoch, _)) => {
                if selects {
                    self.push_words(epoch);
                    self.load_blocks(self.own_list(), &early);
                    self.take_own_list(self.row_of(p.rank));
                }
                self.poll_words(epoch);
            }
        });
        sync_threads(); // ORDER: every word counted, and whether one is late, before every warp reads them.

        let failed = Var::new(broken | smem.late.at(0).load());
        let (mask, sat_count) = (Var::new(0u32), Var::new(0u32));
        let saturated = || Saturated { mask: mask.get(), count: sat_count.get() };
        let kth = Kth { order: Var::new(0u32), gid: Var::new(0u32) };
        when(failed.get().eq(0), || {
            if !selects {
                self.load_blocks(self.own_words(), &early);
            }
            if direct {
                return self.find_kth(saturated(), kth);
            }
            repeat(|l| {
                self.find_kth(saturated(), kth);
                l.break_if(mask.get().ne(0)); // that was round 2
                mask.set(self.find_saturated(kth));
                sat_count.set(mask.get().popc());
                // Words that local top-k wrote never saturate more ranks than there are slots.
                let impossible = sat_count.get().gt(self.slots());
                mask.set(impossible.select::<u32>(0u32, mask.get()));
                sat_count.set(mask.get().popc());
                l.break_if(mask.get().eq(0));
                self.clear_counts();
                // ORDER: the logits of the row, before the list is selected from them.
                wait_for_dependencies();
                match counters {
                    Some((_, sequence)) => self.rescue(saturated(), sequence, &early),
                    None => self.take_lists(saturated(), &early),
                }
                sync_threads(); // ORDER: every candidate counted, and whether a list is late, before every warp reads them.
                failed.set(smem.late.at(0).load());
                l.break_if(failed.get().ne(0));
            });
        });
        when_else(
            failed.get().ne(0),
            || {
                self.start_writing();
                when(broken.eq(0), || self.record_late());
                self.write_nothing();
            },
            || {
                self.write_rows(mask.get(), kth, &early);
                if let Some(bitmap) = smem.bitmap {
                    self.write_ids(bitmap, saturated(), kth);
                }
                if let Some((epoch, sequence)) = counters {
                    // The next call's epoch: every word of this one is read, and its push is over.
                    when(t.index.eq(0), || {
                        p.epochs.at(*row).store(epoch);
                        when(mask.get().ne(0), || p.sequences.at(*row).store(sequence));
                    });
                }
            },
        );
    }

    /// Waits for local top-k to end; from here on memory is written.
    pub(super) fn start_writing(&self) {
        if self.shape.selects() {
            return; // it has waited
        }
        wait_for_dependencies();
        if !self.shape.hold {
            launch_dependents();
        }
    }
}

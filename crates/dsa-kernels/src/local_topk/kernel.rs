//! The device code of [`local_topk`](super).

use dsa_core::consts::KEYS_PER_TOP;
use dsa_core::device::ownership::next_epoch;
use dsa_core::device::scan::Thread;
use dsa_core::layout::ll_slot::PAIR_BYTES;
use ptx::*;

use super::LocalTopkShape;
use crate::rows::clamp_length;
use crate::topk::{Row, RowTopk};

kernel_args! {
    /// Arguments of local top-k. The last five are read by a kernel that pushes.
    pub struct LocalTopkArgs / LocalTopkParams {
        /// u32 `[rows of the grid, n + n / 32]`: B' rows, output
        pub out: DevicePtr<u32>,
        /// int32 `[rows of the grid]`: keys of each row, output
        pub counts: DevicePtr<i32>,
        /// BF16 logits, row `t` at `t * pitch`
        pub logits: DevicePtr<u16>,
        /// order16 of the largest of every 8 logits
        pub tops: DevicePtr<u16>,
        /// int32 `[rows]`: keys that each row has on this rank
        pub row_ends: DevicePtr<i32>,
        /// elements from one logits row to the next
        pub pitch: u32,
        /// longest row that the scratch allows, in keys
        pub length_max: u32,
        /// live rows; the rows of the grid beyond them are empty
        pub rows: u32,
        /// `[ranks]`: address of each rank's slots
        pub peers: DevicePtr<u64>,
        /// u32 `[slot_rows]`: epoch of each row's last merge
        pub epochs: DevicePtr<u32>,
        /// u32: 0 while the exchange works
        pub status: DevicePtr<u32>,
        /// this rank
        pub rank: u32,
        /// rows of the slots
        pub slot_rows: u32,
    }
}

/// Builds the kernel of `shape` for `target`.
///
/// # Errors
/// Only if the builder's verifier refuses the result, which is a defect here.
pub fn build(shape: &LocalTopkShape, target: Target) -> Result<Kernel<LocalTopkArgs>, VerifyError> {
    let bounds = LaunchBounds { max_registers: shape.registers(), ..LaunchBounds::threads(shape.threads()) };
    let shape = *shape;
    ptx::build::<LocalTopkArgs>(&shape.name(), target, bounds, |p| {
        let t = Thread::current();
        let topk = RowTopk::with_b_row(shape.n, shape.foreign, t);
        let peers = SharedArray::new("peers", shape.push_ranks.unwrap_or(1));
        LocalTopk { shape, p, topk, t, peers }.emit()
    })
}

struct LocalTopk {
    shape: LocalTopkShape,
    p: LocalTopkParams,
    topk: RowTopk,
    t: Thread,
    /// Address of each rank's slots.
    peers: SharedArray<u64>,
}

/// Where and whether a row is pushed.
#[derive(Clone, Copy)]
struct Push {
    ranks: u32,
    epoch: Reg<u32>,
    status: Reg<u32>,
}

impl LocalTopk {
    fn emit(&self) {
        let LocalTopk { p, topk, t, .. } = self;
        let row = cta_index();
        let end = Var::new(0i32);
        when(row.lt(p.rows), || end.set(p.row_ends.at(row).load_as(LoadMode::STREAM)));
        let length = clamp_length(end.get(), p.length_max);
        topk.clear();
        sync_threads(); // ORDER: the cleared bins, before keys are counted.
        // ORDER: from here on the kernel reads what its predecessors wrote, and writes what they may read.
        wait_for_dependencies();
        launch_dependents();
        let push = self.shape.push_ranks.map(|ranks| self.prepare_push(row, ranks));
        let first = row.mul_wide(p.pitch);
        let tops = p.tops.at64(first >> KEYS_PER_TOP.trailing_zeros());
        let count = topk.write_b_row(Row { logits: p.logits.at64(first), tops, length });
        sync_threads(); // ORDER: the finished row, before it is copied.
        self.copy_row(row);
        when(t.index.eq(0), || p.counts.at(row).store(count.as_i32()));
        if let Some(push) = push {
            // A failed exchange stays silent until it is reset: its epochs no longer tell calls apart.
            when(push.status.eq(0), || self.push(row, push));
        }
    }

    /// Reads what the push needs, while the keys are on their way. A CTA barrier must follow.
    fn prepare_push(&self, row: Reg<u32>, ranks: u32) -> Push {
        let LocalTopk { p, t, .. } = self;
        when(t.index.lt(ranks), || self.peers.at(t.index).store(p.peers.at(t.index).load()));
        Push { ranks, epoch: next_epoch(p.epochs.at(row).load()), status: p.status.load() }
    }

    /// The row to `out`.
    fn copy_row(&self, row: Reg<u32>) {
        let LocalTopk { shape, p, topk, t, .. } = self;
        let words = shape.row().words() as u32;
        let out = p.out.at64(row.mul_wide(words));
        for_range(t.index, words / 4, t.threads, |i| {
            out.at(i * 4).store_vec(topk.b_row().ptr().at(i * 4).load_vec::<4>());
        });
    }

    /// The row to this rank's slot on every rank.
    fn push(&self, row: Reg<u32>, Push { ranks, epoch, .. }: Push) {
        let LocalTopk { shape, p, topk, t, peers } = self;
        let pairs = shape.row().words() as u32 / 2;
        let slot = ((epoch & 1).mad(ranks, p.rank)).mul_wide(p.slot_rows) + row.to_u64();
        let first = slot * (pairs * PAIR_BYTES as u32);
        for_range(t.index, ranks * pairs, t.threads, |i| {
            let (rank, pair) = (i / pairs, i % pairs);
            let base = Global::<u64>::from_address(peers.at(rank).load());
            let [w0, w1] = topk.b_row().ptr().at(pair * 2).load_vec::<2>();
            // ORDER: none. Each 8-byte half says by its epoch which call it belongs to.
            base.byte_at(first).at(pair * 2).store_vec_as(Sem::Relaxed(Scope::Sys), [w0.pack(epoch), w1.pack(epoch)]);
        });
    }
}

//! The device code of [`select`](super).

use dsa_core::consts::{KEYS_PER_TOP, TILE};
use dsa_core::device::scan::{Thread, block_sum};
use ptx::*;

use super::SelectShape;
use crate::rows::{TILE_SHIFT, clamp_length, longest_row, tiles};
use crate::topk::{Row, RowTopk};

kernel_args! {
    /// Arguments of select. `row_ends` and `length_max` must be those that score was given.
    pub struct SelectArgs / SelectParams {
        /// int32 `[rows, topk]`: physical KV rows in ascending key order, -1 past the count; output
        pub out: DevicePtr<i32>,
        /// int32 `[rows]`: selected keys, output
        pub counts: DevicePtr<i32>,
        /// int32 `[rows, topk]`: the keys' indices, -1 past the count; output, unused without ids
        pub ids: DevicePtr<i32>,
        /// compact BF16 logits
        pub logits: DevicePtr<u16>,
        /// order16 of the largest of every 8 logits
        pub tops: DevicePtr<u16>,
        /// int32 `[requests, ..]`: MLA block ids of each request
        pub table: DevicePtr<i32>,
        /// int32 `[rows]`: keys that each row sees
        pub row_ends: DevicePtr<i32>,
        /// entries from one table row to the next
        pub table_stride: u32,
        /// MLA rows from one block to the next
        pub block_rows: u32,
        /// blocks of the MLA cache: a table entry that names none gives row -1
        pub blocks: u32,
        /// longest row that tables and scratch allow, in keys
        pub length_max: u32,
        /// live rows; the rows of the grid beyond them come out empty
        pub rows: u32,
    }
}

/// Builds the kernel of `shape` for `target`.
///
/// # Errors
/// Only if the builder's verifier refuses the result, which is a defect here.
pub fn build(shape: &SelectShape, target: Target) -> Result<Kernel<SelectArgs>, VerifyError> {
    let bounds = LaunchBounds::threads(shape.threads());
    let shape = *shape;
    ptx::build::<SelectArgs>(&shape.name(), target, bounds, |p| {
        let t = Thread::current();
        let topk = RowTopk::new(shape.topk, shape.foreign, t);
        Select { shape, p, topk, t }.emit()
    })
}

struct Select {
    shape: SelectShape,
    p: SelectParams,
    topk: RowTopk,
    t: Thread,
}

impl Select {
    fn emit(&self) {
        let Select { shape, p, topk, .. } = self;
        let row = cta_index();
        let request = row / shape.q;
        let end = Var::new(0i32);
        when(row.lt(p.rows), || end.set(p.row_ends.at(row).load_as(LoadMode::STREAM)));
        let length = clamp_length(end.get(), p.length_max);
        when_else(
            length.le(shape.topk),
            || {
                self.start();
                self.take_all(row, request, length);
            },
            || {
                topk.clear();
                // Its barrier also orders the cleared bins before the counting below.
                let first = self.row_start(row, request);
                self.start();
                let logits = p.logits.at64(first);
                let tops = p.tops.at64(first >> KEYS_PER_TOP.trailing_zeros());
                topk.select(Row { logits, tops, length }).write_ids(topk.ids());
                sync_threads(); // ORDER: the selected ids, before they are mapped to rows.
                self.write_row(row, request, Reg::from(shape.topk), |slot| topk.ids().at(slot).load());
            },
        );
    }

    /// Waits for score; from here on its output may be read and this kernel's outputs written.
    fn start(&self) {
        // ORDER: score's logits and tops, before they are read; the last consumer's reads, before the rows are written.
        wait_for_dependencies();
        if !self.shape.hold {
            launch_dependents();
        }
    }

    /// First element of the row's logits: the tiles of the requests before, then the row's place in its own.
    fn row_start(&self, row: Reg<u32>, request: Reg<u32>) -> Reg<u64> {
        let Select { shape, p, t, .. } = self;
        let (q, topk) = (shape.q, shape.topk);
        let mine = Var::new(0u32);
        for_range(t.index, request, t.threads, |r| {
            mine.add(tiles(longest_row(p.row_ends, r, q, p.length_max), topk));
        });
        let before = block_sum(mine.get(), self.topk.scratch(), *t);
        let own = tiles(longest_row(p.row_ends, request, q, p.length_max), topk);
        let within = (row - request * q) * (own << TILE_SHIFT);
        before.mul_wide(q * TILE as u32) + within.to_u64()
    }

    /// Every key of a short row.
    fn take_all(&self, row: Reg<u32>, request: Reg<u32>, length: Reg<u32>) {
        self.write_row(row, request, length, |slot| slot);
    }

    /// Maps `id(slot)` for `slot < n` to physical rows; -1 after.
    fn write_row(&self, row: Reg<u32>, request: Reg<u32>, n: Reg<u32>, id: impl Fn(Reg<u32>) -> Reg<u32>) {
        let Select { shape, p, t, .. } = self;
        let page_shift = shape.page.trailing_zeros();
        let table = p.table.at64(request.mul_wide(p.table_stride));
        let base = row.mul_wide(shape.topk);
        let (out, ids) = (p.out.at64(base), p.ids.at64(base));
        let round = |slot: Reg<u32>| {
            let physical = Var::new(-1i32);
            let logical = Var::new(-1i32);
            when(slot.lt(n), || {
                let id = id(slot);
                let block = table.at(id >> page_shift).load_as(LoadMode::STREAM).as_u32();
                let row = block.mad(p.block_rows, id & (shape.page - 1)).as_i32();
                physical.set(block.lt(p.blocks).select::<i32>(row, -1i32));
                logical.set(id.as_i32());
            });
            out.at(slot).store(physical.get());
            if shape.ids {
                ids.at(slot).store(logical.get());
            }
        };
        for start in (0..shape.topk).step_by(t.threads as usize) {
            let slot = t.index + start;
            if start + t.threads <= shape.topk { round(slot) } else { when(slot.lt(shape.topk), || round(slot)) }
        }
        when(t.index.eq(0), || p.counts.at(row).store(n.as_i32()));
    }
}

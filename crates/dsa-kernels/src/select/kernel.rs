//! The device code of [`select`](super).

use dsa_core::consts::{KEYS_PER_TOP, TILE, TOPK_MULTIPLE};
use dsa_core::device::scan::{Thread, block_sum};
use ptx::*;

use super::SelectShape;
use crate::rows::{clamp_length, longest_row, tiles};
use crate::topk::{Row, RowTopk, Slice};

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
        /// rows per request, 1 to 8
        pub q: u32,
    }
}

/// Builds the kernel of `shape` for `target`.
///
/// # Errors
/// Only if the builder's verifier refuses the result, which is a defect here.
pub fn build(shape: &SelectShape, target: Target) -> Result<Kernel<SelectArgs>, VerifyError> {
    let bounds = LaunchBounds {
        max_registers: shape.registers(),
        cluster: (shape.cluster > 1).then_some(shape.cluster),
        ..LaunchBounds::threads(shape.threads())
    };
    let shape = *shape;
    ptx::build::<SelectArgs>(&shape.name(), target, bounds, |p| {
        let t = Thread::current();
        let topk = RowTopk::new(shape.topk, shape.cluster, shape.foreign, t);
        Select { shape, p, topk, t, table: SharedArray::new("table", TABLE_ENTRIES) }.emit()
    })
}

struct Select {
    shape: SelectShape,
    p: SelectParams,
    topk: RowTopk,
    t: Thread,
    /// The row's table, if it fits.
    table: SharedArray<u32>,
}

/// Entries of a table row that are brought into shared memory: 128k keys of 64-token pages.
const TABLE_ENTRIES: u32 = 2048;

/// Consecutive slots of the output that a thread fills.
const SLOTS: u32 = 4;
const _: () = assert!(TOPK_MULTIPLE.is_multiple_of(SLOTS as usize));

/// Four slots: their ids and the blocks that the table names for them.
struct Quad {
    /// The first.
    slot: Reg<u32>,
    /// Its place in the list of ids.
    listed: Reg<u32>,
    /// The last round of slots is not everybody's.
    inside: Option<Pred>,
    /// The CTA's slots, which may begin and end within the four.
    slice: Option<Slice>,
    ids: [Var<u32>; SLOTS as usize],
    blocks: [Var<u32>; SLOTS as usize],
}

impl Quad {
    fn when_inside(&self, body: impl FnOnce()) {
        match self.inside {
            Some(inside) => when(inside, body),
            None => body(),
        }
    }

    /// Whether all four are the CTA's, if that is a question.
    fn is_whole(&self) -> Option<Pred> {
        self.slice.map(|slice| self.slot.ge(slice.first) & (self.slot + SLOTS).le(slice.end))
    }

    /// `body` if slot `i` is the CTA's.
    fn when_in_slice(&self, i: u32, body: impl FnOnce()) {
        match self.slice {
            Some(slice) => when((self.slot + i).ge(slice.first) & (self.slot + i).lt(slice.end), body),
            None => body(),
        }
    }
}

impl Select {
    fn emit(&self) {
        let Select { shape, p, topk, .. } = self;
        topk.arrive();
        let row = topk.row();
        // A division takes a while, but this is before the wait.
        let request = row / p.q;
        let end = Var::new(0i32);
        when(row.lt(p.rows), || end.set(p.row_ends.at(row).load_as(LoadMode::STREAM)));
        let length = clamp_length(end.get(), p.length_max);
        // Here, where every CTA passes, whatever its row.
        topk.meet();
        when_else(
            length.le(shape.topk),
            || self.take_all(request, length),
            || {
                topk.clear();
                let entries = self.read_table(request, length);
                // Its barrier also orders the cleared bins before the counting below, and the table before its readers.
                let first = self.row_start(row, request);
                let logits = p.logits.at64(first);
                let tops = p.tops.at64(first >> KEYS_PER_TOP.trailing_zeros());
                let slice = topk.write_ids(Row { logits, tops, length }, || self.start());
                let quads = match slice {
                    Some(slice) => self.quads(shape.topk, slice.base(), Some(slice)),
                    None => self.quads(shape.topk, 0u32.into(), None),
                };
                for quad in &quads {
                    quad.when_inside(|| {
                        let ids = topk.ids().ptr().at(quad.listed).load_vec::<{ SLOTS as usize }>();
                        quad.ids.iter().zip(ids).for_each(|(id, loaded)| id.set(loaded));
                    });
                }
                when_else(
                    entries.le(TABLE_ENTRIES),
                    || self.find_blocks(&quads, |entry| self.table.at(entry).load()),
                    || {
                        let table = self.table_row(self.topk.row() / p.q);
                        self.find_blocks(&quads, |entry| table.at(entry).load_as(LoadMode::STREAM).as_u32());
                    },
                );
                self.write_row(&quads, Reg::from(shape.topk));
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

    /// First element of the row's logits: after the tiles of all rows of the requests before, and of the rows before it in its
    /// own.
    fn row_start(&self, row: Reg<u32>, request: Reg<u32>) -> Reg<u64> {
        let Select { shape, p, t, .. } = self;
        let (q, topk) = (p.q, shape.topk);
        let mine = Var::new(0u32);
        for_range(t.index, request + 1, t.threads, |r| {
            let rows = r.lt(request).select::<u32>(q, row - request * q);
            mine.add(tiles(longest_row(p.row_ends, r, q, p.length_max), topk) * rows);
        });
        block_sum(mine.get(), self.topk.scratch(), *t).mul_wide(TILE as u32)
    }

    /// Every key of a short row; an equal share of the slots to each CTA.
    fn take_all(&self, request: Reg<u32>, length: Reg<u32>) {
        let share = self.shape.topk / self.shape.cluster;
        let quads = self.quads(share, self.topk.rank() * share, None);
        let table = self.table_row(request);
        for quad in &quads {
            for (i, (id, block)) in quad.ids.iter().zip(&quad.blocks).enumerate() {
                let slot = quad.slot + i as u32;
                id.set(slot);
                // Slots past the end read nothing: there may be no table entry at all.
                when(slot.lt(length), || {
                    let entry = slot >> self.shape.page.trailing_zeros();
                    block.set(table.at(entry).load_as(LoadMode::STREAM).as_u32());
                });
            }
        }
        self.start();
        self.write_row(&quads, length);
    }

    /// The request's MLA block ids.
    fn table_row(&self, request: Reg<u32>) -> Global<i32> {
        self.p.table.at64(request.mul_wide(self.p.table_stride))
    }

    /// Brings the table of a row of `length` keys into shared memory, if it fits; returns its entries. A CTA barrier must
    /// follow.
    fn read_table(&self, request: Reg<u32>, length: Reg<u32>) -> Reg<u32> {
        let Select { shape, t, .. } = self;
        let entries = (length + (shape.page - 1)) >> shape.page.trailing_zeros();
        when(entries.le(TABLE_ENTRIES), || {
            let table = self.table_row(request);
            let rounds = (0..TABLE_ENTRIES).step_by(t.threads as usize);
            // All loads before the first store, so that they are under way together.
            let loaded = rounds.map(|start| {
                let (at, block) = (t.index + start, Var::new(0i32));
                when(at.lt(entries), || block.set(table.at(at).load_as(LoadMode::STREAM)));
                (at, block)
            });
            for (at, block) in loaded.collect::<Vec<_>>() {
                self.table.at(at).store(block.get().as_u32());
            }
        });
        entries
    }

    /// This thread's slots of the output row: of `most` from `first` on, or as far as the CTA's slice goes.
    fn quads(&self, most: u32, first: Reg<u32>, slice: Option<Slice>) -> Vec<Quad> {
        let t = self.t;
        let all = most / SLOTS;
        let quad = |round: u32| {
            let index = t.index + round;
            let listed = index * SLOTS;
            let slot = if first.constant() == Some(0) { listed } else { first + listed };
            let inside = match slice {
                Some(slice) => Some(slot.lt(slice.end)),
                None => (round + t.threads > all).then(|| index.lt(all)),
            };
            let vars = || std::array::from_fn(|_| Var::new(0u32));
            Quad { slot, listed, inside, slice, ids: vars(), blocks: vars() }
        };
        (0..all).step_by(t.threads as usize).map(quad).collect()
    }

    /// The blocks of the slots' ids, by `block(entry)` of the table.
    fn find_blocks(&self, quads: &[Quad], block: impl Fn(Reg<u32>) -> Reg<u32>) {
        for quad in quads {
            quad.when_inside(|| {
                for (id, found) in quad.ids.iter().zip(&quad.blocks) {
                    found.set(block(id.get() >> self.shape.page.trailing_zeros()));
                }
            });
        }
    }

    /// Writes the first `n` slots as physical rows, -1 after, and the count.
    fn write_row(&self, quads: &[Quad], n: Reg<u32>) {
        let Select { shape, p, t, .. } = self;
        let row = self.topk.row();
        let base = row.mul_wide(shape.topk);
        let outputs = [Some(p.out.at64(base)), shape.ids.then(|| p.ids.at64(base))];
        for quad in quads {
            let (mut rows, mut logical) = (Vec::new(), Vec::new());
            for (i, (id, block)) in quad.ids.iter().zip(&quad.blocks).enumerate() {
                let (id, block, taken) = (id.get(), block.get(), (quad.slot + i as u32).lt(n));
                let physical = block.mad(p.block_rows, id & (shape.page - 1)).as_i32();
                rows.push((taken & block.lt(p.blocks)).select::<i32>(physical, -1i32));
                logical.push(taken.select::<i32>(id.as_i32(), -1i32));
            }
            quad.when_inside(|| {
                for (output, values) in outputs.iter().zip([rows, logical]) {
                    let Some(output) = output else { continue };
                    let at = output.at(quad.slot);
                    let values: [Reg<i32>; SLOTS as usize] = values.try_into().expect("four slots");
                    let aligned = (at.address().low() & 15).eq(0);
                    when_else(
                        quad.is_whole().map_or(aligned, |whole| aligned & whole),
                        || at.store_vec(values),
                        || {
                            (0..SLOTS)
                                .for_each(|i| quad.when_in_slice(i, || at.offset(i as i32).store(values[i as usize])))
                        },
                    );
                }
            });
        }
        let first = match shape.cluster {
            1 => t.index.eq(0),
            _ => (t.index | self.topk.rank()).eq(0),
        };
        when(first, || p.counts.at(row).store(n.as_i32()));
    }
}

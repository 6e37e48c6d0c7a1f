//! The consumer warpgroups: products, head sums, and the finished rows on their way out.

use dsa_core::consts::{DIM, KEYS_PER_TOP, PAGE, TILE};
use dsa_core::device::keys::order16_x2;
use dsa_core::device::scan::Thread;
use ptx::*;

use super::head_sum::{Keys, Weights};
use super::kernel::{GROUP_BARRIER, HEADS_U32, QUERY_ROW_BYTES, QUERY_SLOTS, Ring, STAGED_ROW_BYTES, Score, Smem};
use super::schedule::{Schedule, Walk};
use super::{STAGE_BYTES, ScoreForm, ScoreShape};
use crate::rows::TILE_SHIFT;

/// The rows of an item that a consumer group scores: at most four.
struct Part {
    first: u32,
    rows: u32,
    accumulator: Accumulator,
}

impl Part {
    /// All parts of an item's rows, of equal size but perhaps for the last.
    fn all(shape: &ScoreShape) -> impl Iterator<Item = Part> {
        let (q, rows) = (shape.q, shape.part_rows());
        (0..q).step_by(rows as usize).map(move |first| {
            let rows = rows.min(q - first);
            Part { first, rows, accumulator: Accumulator::new(rows * HEADS_U32) }
        })
    }

    /// Starts `accumulator = keys of the page . queries`, 4 k-steps of 32.
    fn multiply(&self, page: Shared<u8>, queries: Reg<u64>) {
        let keys = page.descriptor_k_major_128();
        // ORDER: the last page's reads of the accumulators, before they are overwritten.
        wgmma_fence();
        for step in 0..(DIM / 32) as i32 {
            let advance = 2 * step; // 32 bytes along K
            self.accumulator.mma_e4m3(keys + advance, queries + advance, step > 0);
        }
        wgmma_commit();
    }
}

impl Score {
    /// A consumer warpgroup.
    pub(super) fn consume(&self, smem: Smem, stages: u32, schedule: Schedule, walk: Walk, t: Thread) {
        let parts = self.shape.parts();
        // ORDER: the scratch written below may still be read by the predecessors.
        wait_for_dependencies();
        launch_dependents();
        for part in Part::all(&self.shape) {
            let consume = || self.consume_part(&part, smem, stages, schedule, walk, t);
            match parts {
                1 => consume(),
                _ => when(((t.warp >> 2) % parts).eq(part.first / self.shape.part_rows()), consume),
            }
        }
    }

    /// Scores `part`'s rows for one of every `teams` pages of the range.
    fn consume_part(&self, part: &Part, smem: Smem, stages: u32, schedule: Schedule, walk: Walk, t: Thread) {
        let q = self.shape.q;
        let group = t.warp >> 2;
        let (team, teams) = (group / self.shape.parts(), self.shape.teams());
        // With few rows the product is too short to hide the stores of the page before.
        let defers_stores = q > 2;
        let slots = Ring::new(QUERY_SLOTS, 0u32);
        let ring = Ring::new(stages, team);
        // Pages until this team's next one.
        let skip = Var::new(team);
        let keys = Keys::new(t);
        let staging = Staging::new(smem, part, self.shape.staged_bytes(), keys, t);
        while_(
            || walk.more(),
            || {
                let item = walk.next();
                let slot = slots.slot.get();
                // ORDER: the copied queries and the producer's stores, before they are read.
                smem.query_full.at(slot).wait(slots.parity.get());
                let lengths = smem.row_lengths.ptr().at(slot * 8);
                let longest = (1..q).fold(lengths.load(), |longest, i| longest.max(lengths.offset(i as i32).load()));
                let pages = self.live_pages(item, longest);
                let rows = OutputRows { schedule, request: item.request, lengths };
                let queries = smem.queries.at(slot * (q * QUERY_ROW_BYTES) + part.first * QUERY_ROW_BYTES);
                let queries = queries.descriptor_k_major_128();
                let weights = Weights::new(smem, slot, q, part.first..part.first + part.rows, keys);

                let next = skip;
                let first_key = || (item.page + next.get()) << PAGE.trailing_zeros();
                let store = |first_key: Reg<u32>| {
                    // ORDER: the group's staged rows, before one of its warps reads them.
                    sync_named(group + GROUP_BARRIER, 128);
                    self.store_rows(part, rows, first_key, staging, t);
                };
                let staged_before: Var<u32> = Var::new(0u32);
                let store_page_before = || {
                    when(staged_before.get().ne(0), || store(first_key() - teams * PAGE as u32));
                };
                while_(
                    || next.get().lt(pages),
                    || {
                        let stage = ring.slot.get();
                        // ORDER: the copied page, before the product and the scales read it.
                        smem.page_full.at(stage).wait(ring.parity.get());
                        let page = smem.pages.at(stage * STAGE_BYTES);
                        part.multiply(page, queries);
                        if defers_stores {
                            store_page_before();
                            staged_before.set(1u32);
                        }
                        let scales = keys.scales(page, self.shape.scale_form);
                        // ORDER: the product's reads of the page and the accumulators, before either is touched again.
                        wgmma_wait(0);
                        sync_warp(); // ORDER: every lane's reads of the page, before lane 0 gives it back.
                        when(t.lane.eq(0), || smem.page_empty.at(stage).arrive());
                        self.stage_rows(part, &weights, scales, keys, staging);
                        if !defers_stores {
                            store(first_key());
                        }
                        ring.advance(teams);
                        next.add(teams);
                    },
                );
                if defers_stores {
                    store_page_before();
                }
                // Counted from the next item's first page.
                skip.set(next.get() - pages);
                smem.query_empty.at(slot).arrive(); // ORDER: each thread's reads of the slot, before it is filled again.
                slots.advance(1);
            },
        );
    }

    /// First element of the item's row 0, and elements from one row to the next.
    fn output_rows(&self, OutputRows { schedule, request, .. }: OutputRows) -> (Reg<u64>, Reg<u32>) {
        let q = self.shape.q;
        match self.shape.form {
            ScoreForm::Compact { .. } => {
                let first = schedule.first_tile(request);
                let tiles = schedule.first_tile(request + 1) - first;
                (first.mul_wide(q * TILE as u32), tiles << TILE_SHIFT)
            }
            ScoreForm::Pitched => ((request * q).mul_wide(self.p.pitch), self.p.pitch),
        }
    }

    /// Relu, head sums and scale of one page's logits, into shared memory.
    fn stage_rows(&self, part: &Part, weights: &Weights, scales: [Reg<f32>; 2], keys: Keys, staging: Staging) {
        let sums: Vec<Reg<Bf16x2>> = (0..part.rows)
            .map(|row| {
                weights.chain(row, |s| {
                    // Register 2 holds this thread's second key.
                    let j = row * 16 + (s / 2) * 4 + s % 2;
                    [part.accumulator.get(j), part.accumulator.get(j + 2)]
                })
            })
            .collect();
        let total = keys.reduce_quad(&sums);
        let scaled = Reg::<Bf16x2>::from_f32(total.low_f32() * scales[0], total.high_f32() * scales[1]);
        // -0 + +0 is +0; everything else is unchanged.
        let bits = (scaled + Reg::from(Bf16x2(0))).to_bits();
        // Rows are dealt to the threads of each quad: one row a thread, or duplicates that store nothing.
        let store = || {
            let staged = staging.slot().byte_at(staging.key).cast::<u16>();
            staged.store(bits);
            staged.offset(8).store(bits >> 16);
        };
        match part.rows {
            1 => when(keys.quad.eq(0), store),
            2 => when((keys.quad & 1).eq(0), store),
            3 => when(keys.quad.lt(3), store),
            _ => store(),
        }
    }

    /// One warp stores the staged rows and their tops: a lane eight keys of a row, one top.
    fn store_rows(&self, part: &Part, rows: OutputRows, first_key: Reg<u32>, staging: Staging, t: Thread) {
        // Group g's warp g: each of the multiprocessor's four schedulers has one that stores.
        let mut stores = (t.warp & 3).eq(t.warp >> 2);
        if part.rows < 4 {
            stores = stores & t.lane.lt(8 * part.rows);
        }
        when(stores, || {
            // Eight lanes a row, eight keys a lane.
            let row = (t.lane >> 3) + part.first;
            let key = first_key + (t.lane & 7) * KEYS_PER_TOP as u32;
            let length = rows.lengths.at(row).load();
            let staged = staging.slot().byte_at((t.lane >> 3) * STAGED_ROW_BYTES + (t.lane & 7) * 16);
            let logits: [Var<u32>; 4] = staged.cast::<u32>().load_vec::<4>().map(Var::new);
            let orders = logits.map(|logit| order16_x2(logit.get()));
            let top = Var::new(orders.into_iter().reduce(|a, b| a.max_u16x2(b)).expect("four pairs"));
            // Only NaN (0x7FFF here) has key 0xFFFF.
            let nan = top.get().max_u16x2(0xFFFE_FFFEu32).ne(0xFFFE_FFFEu32);
            when(nan | (key + KEYS_PER_TOP as u32).gt(length), || {
                top.set(0u32);
                for (key, logit) in (0..).step_by(2).map(|i| key + i).zip(logits) {
                    let replaced = |bits: Reg<u32>, shift: u32| {
                        let nan = ((bits >> shift) & 0xFFFF).eq(0x7FFF);
                        // 0xFFFE, whose key is 1.
                        nan.select::<u32>(bits ^ (0x8001 << shift), bits)
                    };
                    // Keys at or past the row's end: logit +0, no key.
                    let mask = key.lt(length).select::<u32>(0xFFFFu32, 0u32)
                        | (key + 1).lt(length).select::<u32>(0xFFFF_0000u32, 0u32);
                    logit.set(replaced(replaced(logit.get(), 0), 16) & mask);
                    top.set(top.get().max_u16x2(order16_x2(logit.get()) & mask));
                }
            });
            // The scratch is read by the next kernel: worth more in L2 than pages, which come once.
            let policy = Policy::evict_last();
            let (first, stride) = self.output_rows(rows);
            let element = row.mad_wide(stride, first) + key.to_u64();
            let to = self.p.logits.at64(element).cast::<u32>();
            to.store_vec_with::<4>(policy, std::array::from_fn(|i| logits[i].get()));
            let store_top = || {
                let top = (top.get() & 0xFFFF).max(top.get() >> 16);
                self.p.tops.at64(element >> KEYS_PER_TOP.trailing_zeros()).store_vec_with(policy, [top]);
            };
            match self.shape.form {
                ScoreForm::Compact { .. } => store_top(),
                ScoreForm::Pitched => when(self.p.tops.address().ne(0), store_top),
            }
        });
        staging.advance();
    }
}

/// What tells where an item's rows go. Read again for every page, by the one warp that stores: registers are short.
#[derive(Clone, Copy)]
struct OutputRows {
    schedule: Schedule,
    request: Reg<u32>,
    lengths: Shared<u32>,
}

/// A group's two staging slots, used in turn: a slot's stores are over before the barrier of the page after, and only
/// then is it written again.
#[derive(Clone, Copy)]
struct Staging {
    base: Shared<u8>,
    /// Byte of this thread's first key in a slot.
    key: Reg<u32>,
    slot_bytes: u32,
    offset: Var<u32>,
}

impl Staging {
    fn new(smem: Smem, part: &Part, slot_bytes: u32, keys: Keys, t: Thread) -> Staging {
        let base = smem.staged.ptr().byte_at((t.warp >> 2) * (2 * slot_bytes));
        let row = match part.rows {
            1 => Reg::from(0),
            2 => keys.quad >> 1,
            n => keys.quad.min(n - 1),
        };
        let key = row * STAGED_ROW_BYTES + (keys.block * 16 + keys.lane_row) * 2;
        Staging { base, key, slot_bytes, offset: Var::new(0u32) }
    }

    fn slot(self) -> Shared<u8> {
        self.base.byte_at(self.offset.get())
    }

    fn advance(self) {
        self.offset.set(Reg::<u32>::from(self.slot_bytes) - self.offset.get());
    }
}

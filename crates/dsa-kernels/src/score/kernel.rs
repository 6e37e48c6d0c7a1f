//! The device code of [`score`](super).

use dsa_core::consts::{DIM, HEADS, PAGE};
use dsa_core::device::scan::Thread;
use dsa_core::layout::fp8_page;
use ptx::*;

use super::schedule::{Item, Schedule, Walk};
use super::{GROUPS, STAGE_BYTES, ScoreForm, ScoreShape, stages};
use crate::rows::clamp_length;

kernel_args! {
    /// Arguments of score. Sizes that the device reads are those of the live step: fewer rows than the scratch holds
    /// are fine.
    pub struct ScoreArgs / ScoreParams {
        /// compact or pitched BF16 logits, output
        pub logits: DevicePtr<u16>,
        /// order16 of the largest of every 8 logits, output; null for a pitched launch without
        pub tops: DevicePtr<u16>,
        /// E4M3 `[rows, 32, 128]`, from [`query_map`](super::query_map)
        pub queries: TensorMap,
        /// the index cache, from [`key_map`](super::key_map)
        pub keys: TensorMap,
        /// BF16 `[rows, 32]`
        pub weights: DevicePtr<u16>,
        /// int32 `[requests, table_width]`: block ids of each request
        pub table: DevicePtr<i32>,
        /// int32 `[rows]`: keys that each row sees
        pub row_ends: DevicePtr<i32>,
        /// entries from one table row to the next
        pub table_stride: u32,
        /// live rows, a multiple of q
        pub rows: u32,
        /// longest row that tables and scratch allow, in keys
        pub length_max: u32,
        /// elements from one logits row to the next (pitched form)
        pub pitch: u32,
    }
}

pub(super) const QUERY_SLOTS: u32 = 2;
pub(super) const HEADS_U32: u32 = HEADS as u32;
pub(super) const QUERY_ROW_BYTES: u32 = (HEADS * DIM) as u32;
/// Bytes of shared memory that hold one row's head weights, BF16, chain by chain.
pub(super) const WEIGHT_ROW_BYTES: u32 = 2 * HEADS_U32;

/// The shared layout.
#[derive(Clone, Copy)]
pub(super) struct Smem {
    pub(super) pages: SharedArray<u8>,
    pub(super) queries: SharedArray<u8>,
    pub(super) weights: SharedArray<u16>,
    /// Per query slot: the q clamped row lengths.
    pub(super) row_lengths: SharedArray<u32>,
    pub(super) page_full: MbarrierArray,
    pub(super) page_empty: MbarrierArray,
    pub(super) query_full: MbarrierArray,
    pub(super) query_empty: MbarrierArray,
    /// Per consumer group, two pages' worth of finished logits.
    pub(super) staged: SharedArray<u8>,
}

impl Smem {
    fn new(shape: &ScoreShape, stages: u32) -> Smem {
        let q = shape.q;
        let spare = super::spare_bytes(shape, stages, target());
        if spare > 0 {
            SharedArray::<u8>::new("spare", spare);
        }
        Smem {
            pages: SharedArray::aligned("pages", stages * STAGE_BYTES, 1024),
            queries: SharedArray::aligned("queries", QUERY_SLOTS * q * QUERY_ROW_BYTES, 1024),
            weights: SharedArray::aligned("weights", QUERY_SLOTS * q * HEADS_U32, 16),
            row_lengths: SharedArray::new("row_lengths", QUERY_SLOTS * 8),
            page_full: MbarrierArray::new("page_full", stages),
            page_empty: MbarrierArray::new("page_empty", stages),
            query_full: MbarrierArray::new("query_full", QUERY_SLOTS),
            query_empty: MbarrierArray::new("query_empty", QUERY_SLOTS),
            staged: SharedArray::aligned("staged", GROUPS * 2 * shape.staged_bytes(), 16),
        }
    }
}

/// A page's finished row in shared memory: 64 logits, padded so that the rows of a quad lie in different banks.
pub(super) const STAGED_ROW_BYTES: u32 = (PAGE * 2 + 16) as u32;
/// Named barrier of consumer group 0; group g has the g-th after it.
pub(super) const GROUP_BARRIER: u32 = 1;

/// Pages whose copies are issued before an item's weights have arrived.
const EARLY_PAGES: u32 = 8;

/// Metadata of an item, read ahead.
#[derive(Clone, Copy)]
struct Ahead {
    request: Var<u32>,
    page: Var<u32>,
    pages: Var<u32>,
    /// Lane i: the row end of row i, as it is in memory.
    length: Var<u32>,
    /// Lane i: the block id of page i.
    id: Var<u32>,
}

impl Ahead {
    fn new() -> Ahead {
        let zero = || Var::new(0u32);
        Ahead { request: zero(), page: zero(), pages: zero(), length: zero(), id: zero() }
    }
}

/// A position in a ring of mbarrier-guarded slots.
#[derive(Clone, Copy)]
pub(super) struct Ring {
    pub(super) slots: u32,
    pub(super) slot: Var<u32>,
    pub(super) parity: Var<u32>,
}

impl Ring {
    pub(super) fn new(slots: u32, first: impl Into<Reg<u32>>) -> Ring {
        Ring { slots, slot: Var::new(first), parity: Var::new(0u32) }
    }

    pub(super) fn advance(self, by: u32) {
        let next = self.slot.get() + by;
        let wraps = next.ge(self.slots);
        self.slot.set(wraps.select::<u32>(next - self.slots, next));
        self.parity.xor(wraps.as_u32());
    }
}

/// Builds the kernel of `shape` for `target`.
///
/// # Errors
/// Only if the builder's verifier refuses the result, which is a defect here.
pub fn build(shape: &ScoreShape, target: Target) -> Result<Kernel<ScoreArgs>, VerifyError> {
    let bounds = LaunchBounds::threads(shape.threads());
    let shape = *shape;
    ptx::build::<ScoreArgs>(&shape.name(), target, bounds, |p| Score { shape, p }.emit())
}

pub(super) struct Score {
    pub(super) shape: ScoreShape,
    pub(super) p: ScoreParams,
}

impl Score {
    fn emit(&self) {
        let q = self.shape.q;
        let stages = stages(&self.shape, target());
        let smem = Smem::new(&self.shape, stages);
        let t = Thread::current();
        let (producer_warp, parts) = (4 * GROUPS, self.shape.parts());
        when(t.warp.eq(producer_warp), || {
            when(t.lane.lt(stages), || {
                smem.page_full.at(t.lane).init(1);
                smem.page_empty.at(t.lane).init(4 * parts); // one arrival per consuming warp
            });
            when(t.lane.lt(QUERY_SLOTS), || {
                // One arrival per thread that fills or reads the slot.
                smem.query_full.at(t.lane).init(32);
                smem.query_empty.at(t.lane).init(32 * producer_warp);
            });
            // ORDER: the initialised barriers, before the copies that complete on them.
            fence_mbarrier_init();
            when(t.lane.eq(0), || {
                prefetch_tensor_map(self.p.keys);
                prefetch_tensor_map(self.p.queries);
            });
        });
        let requests = self.p.rows / q;
        let topk = match self.shape.form {
            ScoreForm::Compact { topk } => topk,
            ScoreForm::Pitched => 0,
        };
        // Its barriers also publish the initialised mbarriers.
        let schedule = Schedule::compute(&self.p, requests, q, topk, t);
        // Equal shares; the first CTAs take the remainder.
        let (pages, cta, ctas) = (schedule.pages(), cta_index(), special(Special::NctaidX));
        let (share, rest) = (pages / ctas, pages % ctas);
        let first = cta.mad(share, cta.min(rest));
        let walk = schedule.walk(first, first + share + cta.lt(rest).as_u32(), t);
        when_else(
            t.warp.eq(producer_warp),
            || self.produce(smem, stages, walk, t),
            || self.consume(smem, stages, schedule, walk, t),
        );
    }

    /// Pages of `item` that hold keys of its longest row: the second page of a request's last tile may not.
    pub(super) fn live_pages(&self, item: Item, longest: Reg<u32>) -> Reg<u32> {
        let pages = (longest + (PAGE as u32 - 1)) >> PAGE.trailing_zeros();
        // The item may consist of just that dead page.
        item.pages.min(pages.max(item.page) - item.page)
    }

    /// The producer warp: per item the queries, weights and row lengths, then its pages.
    fn produce(&self, smem: Smem, stages: u32, walk: Walk, t: Thread) {
        let q = self.shape.q;
        let p = &self.p;
        let ring = Ring::new(stages, 0u32);
        let slots = Ring::new(QUERY_SLOTS, 0u32);
        let policy = Policy::evict_first();
        // Step metadata of the next item, read one item ahead so that its latency hides behind the current pages:
        // lane i has row i's length and page id i.
        let ahead = Ahead::new();
        let look_ahead = || {
            when_else(
                walk.more(),
                || {
                    let item = walk.next();
                    let row = item.request.mad(q, t.lane.min(q - 1));
                    ahead.length.set(p.row_ends.at(row).load_as(LoadMode::STREAM).as_u32());
                    ahead.request.set(item.request);
                    ahead.page.set(item.page);
                    ahead.pages.set(item.pages);
                    when(t.lane.lt(item.pages), || {
                        let table = p.table.at64(item.request.mul_wide(p.table_stride));
                        // The second page of a last tile may lie past what the table holds.
                        let last = ((p.length_max + (PAGE as u32 - 1)) >> PAGE.trailing_zeros()) - 1;
                        let column = (item.page + t.lane).min(last);
                        ahead.id.set(table.at(column).load_as(LoadMode::STREAM).as_u32());
                    });
                },
                || ahead.pages.set(0u32),
            );
        };
        look_ahead();
        // ORDER: from here on the kernel reads what its predecessors wrote.
        wait_for_dependencies();
        launch_dependents();
        while_(
            || ahead.pages.get().ne(0),
            || {
                let item = Item { request: ahead.request.get(), page: ahead.page.get(), pages: ahead.pages.get() };
                let length = clamp_length(ahead.length.get().as_i32(), p.length_max);
                let first_ids = ahead.id.get();
                let pages = self.live_pages(item, redux(Redux::MaxU32, length));
                let first_row = item.request * q;
                // Lane h holds head h's weight of each row.
                let weights: Vec<Reg<u32>> = (0..q)
                    .map(|row| {
                        let at = p.weights.at64((first_row + row).mul_wide(HEADS_U32) + t.lane.to_u64());
                        at.load_as(LoadMode::NO_ALLOCATE)
                    })
                    .collect();
                look_ahead();

                let slot = slots.slot.get();
                // ORDER: the consumers' reads of the slot's last item, before it is filled again.
                smem.query_empty.at(slot).wait(slots.parity.get() ^ 1);
                let full = smem.query_full.at(slot);
                when(t.lane.eq(0), || {
                    full.expect(q * QUERY_ROW_BYTES);
                    let dst = smem.queries.at(slot * (q * QUERY_ROW_BYTES));
                    let zero = Reg::<u32>::from(0);
                    copy_tensor(dst, p.queries, &[zero, zero, zero, zero, first_row], full, None);
                });
                let copy_pages = |ids: Reg<u32>, count: Reg<u32>| {
                    for_range(0u32, count, 1u32, |i| {
                        let id = broadcast(ids, i);
                        let stage = ring.slot.get();
                        // ORDER: the consumers' reads of the stage's last page, before the next copy into it.
                        smem.page_empty.at(stage).wait(ring.parity.get() ^ 1);
                        when(t.lane.eq(0), || {
                            let full = smem.page_full.at(stage);
                            full.arrive_expect(fp8_page::BYTES as u32);
                            let zero = Reg::<u32>::from(0);
                            copy_tensor(
                                smem.pages.at(stage * STAGE_BYTES),
                                p.keys,
                                &[zero, zero, id],
                                full,
                                Some(policy),
                            );
                        });
                        ring.advance(1);
                    });
                };
                // The consumers can do nothing with pages before the weights are there, but the ring has room for these.
                let early = pages.min(EARLY_PAGES.min(stages));
                copy_pages(first_ids, early);
                when(t.lane.lt(q), || smem.row_lengths.at(slot * 8 + t.lane).store(length));
                for (row, weight) in weights.iter().enumerate() {
                    // Chain c = h % 4 in order s = h / 4.
                    let chain_element = (t.lane & 3) * (HEADS_U32 / 4) + (t.lane >> 2);
                    let element = slot * (q * HEADS_U32) + row as u32 * HEADS_U32 + chain_element;
                    smem.weights.at(element).store(*weight);
                }
                full.arrive(); // ORDER: each lane's stores, before the consumers' reads.
                slots.advance(1);

                let rest = shuffle(Shuffle::Idx, first_ids, (t.lane + early) & 31);
                copy_pages(rest, pages.min(32u32) - early);
                // Page ids of long items, 32 at a time, one per lane.
                let table = p.table.at64(item.request.mul_wide(p.table_stride));
                for_range(32u32, pages, 32u32, |base| {
                    let mine = Var::new(0u32);
                    let column = base + t.lane;
                    when(column.lt(pages), || {
                        mine.set(table.at(item.page + column).load_as(LoadMode::STREAM).as_u32());
                    });
                    copy_pages(mine.get(), (pages - base).min(32u32));
                });
            },
        );
        // Nothing may be in flight when the CTA ends: the consumers wait for every copy issued here.
    }
}

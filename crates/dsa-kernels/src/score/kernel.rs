//! The device code of [`score`](super).

use dsa_core::consts::{DIM, HEADS, KEYS_PER_TOP, PAGE, TILE};
use dsa_core::device::keys::order16_x2;
use dsa_core::device::scan::Thread;
use dsa_core::layout::fp8_page::{self, ScaleForm};
use ptx::*;

use super::schedule::{Item, Schedule, Walk};
use super::{STAGE_BYTES, ScoreForm, ScoreShape, stages};
use crate::rows::{TILE_SHIFT, clamp_length};

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

const QUERY_SLOTS: u32 = 2;
const HEADS_U32: u32 = HEADS as u32;
const QUERY_ROW_BYTES: u32 = (HEADS * DIM) as u32;
/// Bytes of shared memory that hold one row's head weights: each BF16 twice in a word, chain by chain.
const WEIGHT_ROW_WORDS: u32 = HEADS_U32;

/// The shared layout.
#[derive(Clone, Copy)]
struct Smem {
    pages: SharedArray<u8>,
    queries: SharedArray<u8>,
    weights: SharedArray<u32>,
    /// Per query slot: the q clamped row lengths.
    row_lengths: SharedArray<u32>,
    page_full: MbarrierArray,
    page_empty: MbarrierArray,
    query_full: MbarrierArray,
    query_empty: MbarrierArray,
    /// Per consumer group, two pages' worth of finished logits and tops: `q` rows of [`STAGED_ROW_BYTES`].
    staged: SharedArray<u8>,
}

impl Smem {
    fn new(q: u32, stages: u32, groups: u32) -> Smem {
        Smem {
            pages: SharedArray::aligned("pages", stages * STAGE_BYTES, 1024),
            queries: SharedArray::aligned("queries", QUERY_SLOTS * q * QUERY_ROW_BYTES, 1024),
            weights: SharedArray::aligned("weights", QUERY_SLOTS * q * WEIGHT_ROW_WORDS, 16),
            row_lengths: SharedArray::new("row_lengths", QUERY_SLOTS * 8),
            page_full: MbarrierArray::new("page_full", stages),
            page_empty: MbarrierArray::new("page_empty", stages),
            query_full: MbarrierArray::new("query_full", QUERY_SLOTS),
            query_empty: MbarrierArray::new("query_empty", QUERY_SLOTS),
            staged: SharedArray::aligned("staged", groups * 2 * q * STAGED_ROW_BYTES, 16),
        }
    }
}

/// A page's finished row in shared memory: 64 logits, then their 8 tops.
const STAGED_ROW_BYTES: u32 = (PAGE * 2 + PAGE / KEYS_PER_TOP * 2) as u32;
/// Byte of the first top in a staged row.
const STAGED_TOPS: u32 = (PAGE * 2) as u32;
/// Named barrier of consumer group 0; group g has the g-th after it.
const GROUP_BARRIER: u32 = 1;

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
struct Ring {
    slots: u32,
    slot: Var<u32>,
    parity: Var<u32>,
}

impl Ring {
    fn new(slots: u32, first: impl Into<Reg<u32>>) -> Ring {
        Ring { slots, slot: Var::new(first), parity: Var::new(0u32) }
    }

    fn advance(self, by: u32) {
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

struct Score {
    shape: ScoreShape,
    p: ScoreParams,
}

impl Score {
    fn emit(&self) {
        let q = self.shape.q;
        let stages = stages(&self.shape, target());
        let smem = Smem::new(q, stages, self.shape.groups());
        let t = Thread::current();
        let producer_warp = 4 * self.shape.groups();
        when(t.warp.eq(producer_warp), || {
            when(t.lane.lt(stages), || {
                smem.page_full.at(t.lane).init(1);
                smem.page_empty.at(t.lane).init(4); // one arrival per consuming warp
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
    fn live_pages(&self, item: Item, longest: Reg<u32>) -> Reg<u32> {
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
                    // Chain c = h % 4 in order s = h / 4, the BF16 in both halves.
                    let chain_word = (t.lane & 3) * (HEADS_U32 / 4) + (t.lane >> 2);
                    let word = slot * (q * WEIGHT_ROW_WORDS) + row as u32 * WEIGHT_ROW_WORDS + chain_word;
                    smem.weights.at(word).store(weight.permute(0, 0x1010u32));
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

    /// A consumer warpgroup: one of every `groups` pages of the range.
    fn consume(&self, smem: Smem, stages: u32, schedule: Schedule, walk: Walk, t: Thread) {
        let q = self.shape.q;
        let (group, groups) = (t.warp >> 2, self.shape.groups());
        // ORDER: the scratch written below may still be read by the predecessors.
        wait_for_dependencies();
        launch_dependents();
        let slots = Ring::new(QUERY_SLOTS, 0u32);
        let ring = Ring::new(stages, group);
        // Pages until this group's next one.
        let skip = Var::new(group);
        let keys = Keys::new(t);
        let staging = Staging::new(smem, q, group, t);
        let accumulator = Accumulator::new(q * HEADS_U32);
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
                let rows = self.output_rows(schedule, item);
                let queries = smem.queries.at(slot * (q * QUERY_ROW_BYTES)).descriptor_k_major_128();
                let weights = Weights::new(smem, slot, q, keys);

                let next = skip;
                while_(
                    || next.get().lt(pages),
                    || {
                        let stage = ring.slot.get();
                        // ORDER: the copied page, before the product and the scales read it.
                        smem.page_full.at(stage).wait(ring.parity.get());
                        let page = smem.pages.at(stage * STAGE_BYTES);
                        multiply(&accumulator, page, queries);
                        let scales = keys.scales(page, self.shape.scale_form);
                        sync_warp(); // ORDER: every lane's reads of the page, before lane 0 gives it back.
                        when(t.lane.eq(0), || smem.page_empty.at(stage).arrive());
                        let first_key = (item.page + next.get()) << PAGE.trailing_zeros();
                        self.finish_rows(&accumulator, &weights, lengths, scales, first_key, keys, staging);
                        // ORDER: the group's staged rows, before its threads store them.
                        sync_named(group + GROUP_BARRIER, 128);
                        self.store_rows(rows, first_key, staging);
                        ring.advance(groups);
                        next.add(groups);
                    },
                );
                // Counted from the next item's first page.
                skip.set(next.get() - pages);
                smem.query_empty.at(slot).arrive(); // ORDER: each thread's reads of the slot, before it is filled again.
                slots.advance(1);
            },
        );
    }

    /// Where the item's rows go.
    fn output_rows(&self, schedule: Schedule, item: Item) -> OutputRows {
        let q = self.shape.q;
        match self.shape.form {
            ScoreForm::Compact { .. } => {
                let first = schedule.first_tile(item.request);
                let tiles = schedule.first_tile(item.request + 1) - first;
                OutputRows { first: first.mul_wide(q * TILE as u32), stride: tiles << TILE_SHIFT }
            }
            ScoreForm::Pitched => OutputRows { first: (item.request * q).mul_wide(self.p.pitch), stride: self.p.pitch },
        }
    }

    /// Relu, head sums and scale of one page's logits, and their tops, into shared memory.
    #[allow(clippy::too_many_arguments)]
    fn finish_rows(
        &self,
        accumulator: &Accumulator,
        weights: &Weights,
        lengths: Shared<u32>,
        scales: [Reg<f32>; 2],
        first_key: Reg<u32>,
        keys: Keys,
        staging: Staging,
    ) {
        let q = self.shape.q;
        let chain = |row: u32| -> Reg<Bf16x2> {
            let w = weights.row(row);
            (0..8u32).fold(Reg::from(Bf16x2(0)), |sum, s| {
                // Register 2 holds this thread's second key.
                let j = row * 16 + (s / 2) * 4 + s % 2;
                Reg::<Bf16x2>::from_f32_relu(accumulator.get(j), accumulator.get(j + 2)).fma(w[s as usize], sum)
            })
        };
        // Rows in groups of up to four, dealt to the threads of a quad: one row a thread, or duplicates.
        let dealt: Vec<Dealt> = (0..q)
            .step_by(4)
            .map(|first| {
                let count = (q - first).min(4);
                let sums: Vec<Reg<Bf16x2>> = (0..count).map(|i| chain(first + i)).collect();
                let total = keys.reduce_quad(&sums);
                let scaled = Reg::<Bf16x2>::from_f32(total.low_f32() * scales[0], total.high_f32() * scales[1]);
                // -0 + +0 is +0; everything else is unchanged.
                let bits = (scaled + Reg::from(Bf16x2(0))).to_bits();
                Dealt { first, count, bits: Var::new(bits), order: Var::new(order16_x2(bits)) }
            })
            .collect();
        // Only NaN (0x7FFF here) has key 0xFFFF.
        let largest = dealt.iter().map(|d| d.order.get()).reduce(|a, b| a.max_u16x2(b)).expect("q >= 1");
        when(largest.max_u16x2(0xFFFE_FFFEu32).ne(0xFFFE_FFFEu32), || {
            for d in &dealt {
                for shift in [0u32, 16] {
                    let nan = ((d.order.get() >> shift) & 0xFFFF).eq(0xFFFF);
                    let put = |word: Var<u32>, half: u32| {
                        let replaced = (word.get() & !(0xFFFFu32 << shift)) | (half << shift);
                        word.set(nan.select::<u32>(replaced, word.get()));
                    };
                    put(d.bits, 0xFFFE);
                    put(d.order, 1);
                }
            }
        });
        let key = first_key + keys.first;
        for d in &dealt {
            // The row of this thread, and whether it is the one of its duplicates that stores.
            let (row, stores) = match d.count {
                1 => (Reg::from(d.first), Some(keys.quad.eq(0))),
                2 => ((keys.quad >> 1) + d.first, Some((keys.quad & 1).eq(0))),
                3 => (keys.quad.min(2u32) + d.first, Some(keys.quad.lt(3))),
                _ => (keys.quad + d.first, None),
            };
            let length = lengths.at(row).load();
            // Keys at or past the row's end: logit +0, no key.
            let mask = key.lt(length).select::<u32>(0xFFFFu32, 0u32)
                | (key + 8).lt(length).select::<u32>(0xFFFF_0000u32, 0u32);
            let (bits, order) = (d.bits.get() & mask, d.order.get() & mask);
            let staged = staging.slot().byte_at(row * STAGED_ROW_BYTES);
            let store = || {
                let logits = staged.byte_at(keys.first * 2).cast::<u16>();
                logits.store(bits);
                logits.offset(8).store(bits >> 16);
            };
            match stores {
                Some(p) => when(p, store),
                None => store(),
            }
            let top = [4, 8, 16].into_iter().fold(order, |top, step| top.max_u16x2(shuffle_xor(top, step)));
            // Keys 0..8 and 8..16 of the warp's sixteen: two adjacent tops.
            let first_lanes = keys.lane_row.eq(0);
            when(stores.map_or(first_lanes, |p| p & first_lanes), || {
                staged.byte_offset(STAGED_TOPS as i32).byte_at(keys.block * 4).cast::<u32>().store(top);
            });
        }
    }

    /// Stores the staged rows: thread `8 r + i` of the group chunk `i` of row `r`'s logits, thread `8 q + r` its tops.
    fn store_rows(&self, rows: OutputRows, first_key: Reg<u32>, staging: Staging) {
        let q = self.shape.q;
        let thread = staging.thread;
        // The scratch is read by the next kernel: worth more in L2 than pages, which come once.
        let policy = Policy::evict_last();
        when(thread.lt(8 * q), || {
            let (row, chunk) = (thread >> 3, thread & 7);
            let from = staging.slot().byte_at(row * STAGED_ROW_BYTES + chunk * 16).cast::<u32>();
            let element = row.mad_wide(rows.stride, rows.first) + (first_key + chunk * 8).to_u64();
            self.p.logits.at64(element).cast::<u32>().store_vec_with(policy, from.load_vec::<4>());
        });
        let mut stores_tops = thread.ge(8 * q) & thread.lt(9 * q);
        if self.shape.form == ScoreForm::Pitched {
            stores_tops = stores_tops & self.p.tops.address().ne(0);
        }
        when(stores_tops, || {
            let row = thread - 8 * q;
            let from = staging.slot().byte_at(row * STAGED_ROW_BYTES + STAGED_TOPS).cast::<u32>();
            let element = row.mad_wide(rows.stride, rows.first) + first_key.to_u64();
            let tops = self.p.tops.at64(element >> KEYS_PER_TOP.trailing_zeros()).cast::<u32>();
            tops.store_vec_with(policy, from.load_vec::<4>());
        });
        staging.advance();
    }
}

/// Up to four rows of a page, dealt to the threads of each quad: this thread's two logits and their keys.
struct Dealt {
    first: u32,
    count: u32,
    bits: Var<u32>,
    order: Var<u32>,
}

/// A group's two staging slots, used in turn: a slot's stores are over before the barrier of the page after, and only
/// then is it written again.
#[derive(Clone, Copy)]
struct Staging {
    base: Shared<u8>,
    slot_bytes: u32,
    offset: Var<u32>,
    /// Thread within the group.
    thread: Reg<u32>,
}

impl Staging {
    fn new(smem: Smem, q: u32, group: Reg<u32>, t: Thread) -> Staging {
        let slot_bytes = q * STAGED_ROW_BYTES;
        let base = smem.staged.ptr().byte_at(group * (2 * slot_bytes));
        Staging { base, slot_bytes, offset: Var::new(0u32), thread: t.index & 127 }
    }

    fn slot(self) -> Shared<u8> {
        self.base.byte_at(self.offset.get())
    }

    fn advance(self) {
        self.offset.set(Reg::<u32>::from(self.slot_bytes) - self.offset.get());
    }
}

/// First element of an item's row 0, and elements from one row to the next.
#[derive(Clone, Copy)]
struct OutputRows {
    first: Reg<u64>,
    stride: Reg<u32>,
}

/// `accumulator = keys of the page . queries`, 4 k-steps of 32; returns when it is complete.
fn multiply(accumulator: &Accumulator, page: Shared<u8>, queries: Reg<u64>) {
    let keys = page.descriptor_k_major_128();
    // ORDER: the last page's reads of the accumulators, before they are overwritten.
    wgmma_fence();
    for step in 0..(DIM / 32) as i32 {
        let advance = 2 * step; // 32 bytes along K
        accumulator.mma_e4m3(keys + advance, queries + advance, step > 0);
    }
    wgmma_commit();
    // ORDER: the product's reads of the page and the accumulators, before either is touched again.
    wgmma_wait(0);
}

/// Which keys of a page and which chain of heads a consumer thread has.
#[derive(Clone, Copy)]
struct Keys {
    /// The thread's chain, 0..4: its place in the quad.
    quad: Reg<u32>,
    /// Row of the warp's 8-row block, 0..8.
    lane_row: Reg<u32>,
    /// The warp's block of 16 keys, 0..4.
    block: Reg<u32>,
    /// First of its two keys in the page; the other is 8 further on.
    first: Reg<u32>,
}

impl Keys {
    fn new(t: Thread) -> Keys {
        let lane_row = t.lane >> 2;
        let block = t.warp & 3;
        Keys { quad: t.lane & 3, lane_row, block, first: block * 16 + lane_row }
    }

    /// The scales of this thread's two keys: word `key` of the page's last two 128-byte rows, swizzled as the copy
    /// left them (row 64 as is, row 65 with its 16-byte chunks exchanged in pairs).
    fn scales(self, page: Shared<u8>, form: ScaleForm) -> [Reg<f32>; 2] {
        [0u32, 8].map(|offset| {
            let key = self.first + offset;
            let swizzle = (key >> 5) << 4;
            let byte = (key << 2) ^ swizzle;
            let at = page.byte_offset(fp8_page::SCALES.start as i32).byte_at(byte);
            match form {
                ScaleForm::Fp32 => at.cast::<f32>().load(),
                ScaleForm::Ue8m0 => {
                    let exponent = at.cast::<u32>().load() & 0xFF;
                    // 2^(e - 127); byte 0 is the subnormal 2^-127.
                    exponent.eq(0).select::<u32>(0x0040_0000u32, exponent << 23).bitcast()
                }
            }
        })
    }

    /// The rows' totals `(chain 0 + chain 2) + (chain 1 + chain 3)`. Of up to four rows, thread `c` of the quad ends up
    /// with row `c` (four or three rows), `c / 2` (two) or 0 (one).
    fn reduce_quad(self, sums: &[Reg<Bf16x2>]) -> Reg<Bf16x2> {
        let high = (self.quad & 2).ne(0);
        let odd = (self.quad & 1).ne(0);
        // Keeps `a` in the lanes where the bit is clear and `b` where it is set, adding what the partner sends.
        let exchange = |bit: Pred, mask: u32, a: Reg<Bf16x2>, b: Reg<Bf16x2>| {
            let (keep, send) = (bit.select::<Bf16x2>(b, a), bit.select::<Bf16x2>(a, b));
            keep + shuffle_xor(send, mask)
        };
        let fold = |mask: u32, a: Reg<Bf16x2>| a + shuffle_xor(a, mask);
        match *sums {
            [a] => fold(1, fold(2, a)),
            [a, b] => fold(1, exchange(high, 2, a, b)),
            // After the first exchange the high lanes hold the later row of each pair; the second deals out the pairs.
            [a, b, c] => exchange(odd, 1, exchange(high, 2, a, c), fold(2, b)),
            [a, b, c, d] => exchange(odd, 1, exchange(high, 2, a, c), exchange(high, 2, b, d)),
            _ => unreachable!("one to four rows"),
        }
    }
}

/// Head weights of a query slot.
struct Weights {
    /// In registers while they fit.
    registers: Vec<[Reg<Bf16x2>; 8]>,
    /// First word of this thread's chain in row 0.
    base: Shared<u32>,
}

impl Weights {
    /// Rows whose weights stay in registers for a whole item; beyond, they are read again for every page.
    const ROWS_IN_REGISTERS: u32 = 4;

    fn new(smem: Smem, slot: Reg<u32>, q: u32, keys: Keys) -> Weights {
        let base = smem.weights.ptr().at(slot * (q * WEIGHT_ROW_WORDS) + keys.quad * (HEADS_U32 / 4));
        let mut weights = Weights { registers: Vec::new(), base };
        if q <= Self::ROWS_IN_REGISTERS {
            weights.registers = (0..q).map(|row| weights.load(row)).collect();
        }
        weights
    }

    fn load(&self, row: u32) -> [Reg<Bf16x2>; 8] {
        let at = self.base.offset((row * WEIGHT_ROW_WORDS) as i32);
        let [a, b, c, d] = at.load_vec::<4>();
        let [e, f, g, h] = at.offset(4).load_vec::<4>();
        [a, b, c, d, e, f, g, h].map(Reg::<Bf16x2>::from_bits)
    }

    fn row(&self, row: u32) -> [Reg<Bf16x2>; 8] {
        match self.registers.get(row as usize) {
            Some(w) => *w,
            None => self.load(row),
        }
    }
}

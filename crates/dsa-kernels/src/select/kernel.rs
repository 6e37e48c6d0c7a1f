//! The device code of [`select`](super).

use dsa_core::consts::{KEYS_PER_TOP, PAGE, TILE, TOPK_MAX};
use dsa_core::device::keys::{foreign_keys, half, order16_x2};
use dsa_core::device::radix::{BINS, LOW_BINS, LOW_BITS, TopdownScratch, count, find_low_digit, find_topdown};
use dsa_core::device::scan::{Thread, block_exclusive, block_sum, fill};
use ptx::*;

use super::SelectShape;
use crate::rows::{TILE_SHIFT, clamp_length, longest_row, tiles};

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
        /// longest row that tables and scratch allow, in keys
        pub length_max: u32,
    }
}

/// Chunks of 8 tops that a thread holds in registers at a time.
const CHUNKS_PER_THREAD: u32 = 2;
const KEYS: u32 = KEYS_PER_TOP as u32;
/// Tops of one 16-byte load: one page.
const CHUNK_TOPS: u32 = 8;
const _: () = assert!(CHUNK_TOPS as usize * KEYS_PER_TOP == PAGE);
// Counts of keys above and at the threshold share a word.
const _: () = assert!(TOPK_MAX * KEYS_PER_TOP < 1 << 16);

/// The shared layout.
#[derive(Clone, Copy)]
struct Smem {
    /// Counts of the tops' upper 11 bits, then of the keys'.
    top_bins: SharedArray<u32>,
    key_bins: SharedArray<u32>,
    top_low: SharedArray<u32>,
    key_low: SharedArray<u32>,
    /// Listed vectors in index order, later the selected ids.
    list: SharedArray<u32>,
    topdown: TopdownScratch,
    scan_a: SharedArray<u32>,
    scan_b: SharedArray<u32>,
}

impl Smem {
    fn new(shape: &SelectShape) -> Smem {
        let warps = shape.threads() / 32;
        Smem {
            top_bins: SharedArray::aligned("top_bins", BINS, 16),
            key_bins: SharedArray::aligned("key_bins", BINS, 16),
            top_low: SharedArray::aligned("top_low", LOW_BINS, 16),
            key_low: SharedArray::aligned("key_low", LOW_BINS, 16),
            list: SharedArray::aligned("list", shape.topk, 16),
            topdown: TopdownScratch::new(warps),
            scan_a: SharedArray::new("scan_a", warps),
            scan_b: SharedArray::new("scan_b", warps),
        }
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
        let smem = Smem::new(&shape);
        let t = Thread::current();
        Select { shape, p, smem, t }.emit()
    })
}

struct Select {
    shape: SelectShape,
    p: SelectParams,
    smem: Smem,
    t: Thread,
}

impl Select {
    fn emit(&self) {
        let Select { shape, p, smem, t } = self;
        let row = cta_index();
        let request = row / shape.q;
        let length = clamp_length(p.row_ends.at(row).load_as(LoadMode::STREAM), p.length_max);
        when_else(
            length.le(shape.topk),
            || {
                self.start();
                self.take_all(row, request, length);
            },
            || {
                for bins in [smem.top_bins, smem.key_bins, smem.top_low, smem.key_low] {
                    fill(bins, 0, *t);
                }
                // Its barrier also orders the zeroed bins before the counting below.
                let first = self.row_start(row, request);
                self.start();
                let vectors = (length + (KEYS - 1)) / KEYS;
                let low = Var::new(1u32); // key 0 is "no key"
                let listed = Var::new(vectors);
                when(vectors.gt(shape.topk), || {
                    low.set(self.list_vectors(first, vectors));
                    listed.set(shape.topk);
                });
                self.select_keys(row, request, length, first, vectors, listed.get(), low.get());
            },
        );
    }

    /// Waits for score; from here on its output may be read and this kernel's outputs written.
    fn start(&self) {
        wait_for_dependencies();
        if !self.shape.hold {
            launch_dependents();
        }
    }

    /// First element of the row's logits: the tiles of the requests before, then the row's place in its own.
    fn row_start(&self, row: Reg<u32>, request: Reg<u32>) -> Reg<u64> {
        let Select { shape, p, smem, t } = self;
        let (q, topk) = (shape.q, shape.topk);
        let mine = Var::new(0u32);
        for_range(t.index, request, t.threads, |r| {
            mine.add(tiles(longest_row(p.row_ends, r, q, p.length_max), topk));
        });
        let before = block_sum(mine.get(), smem.scan_a, *t);
        let own = tiles(longest_row(p.row_ends, request, q, p.length_max), topk);
        let within = (row - request * q) * (own << TILE_SHIFT);
        before.mul_wide(q * TILE as u32) + within.to_u64()
    }

    /// Lists the K first vectors by (top descending, index ascending) in index order; returns the K-th one's top.
    fn list_vectors(&self, first: Reg<u64>, vectors: Reg<u32>) -> Reg<u32> {
        let Select { shape, p, smem, t } = self;
        let tops = Tops::new(p.tops.at64(first >> KEYS.trailing_zeros()), vectors, *t);
        tops.for_each(true, |top, _| when(top.ne(0), || count(smem.top_bins.at(top >> LOW_BITS))));
        sync_threads(); // ORDER: every top counted, before the bins are summed.
        let high = find_topdown(smem.top_bins, shape.topk, smem.topdown, *t);
        tops.for_each(false, |top, _| {
            when((top >> LOW_BITS).eq(high.bin), || count(smem.top_low.at(top & (LOW_BINS - 1))));
        });
        sync_threads(); // ORDER: the low digits counted, before they are summed.
        let need = Reg::<u32>::from(shape.topk) - high.above;
        let digit = find_low_digit(smem.top_low.at(t.lane).load(), need, *t);
        let threshold = (high.bin << LOW_BITS) | digit.bin;
        let ties = need - digit.above;

        // Thread order is index order within a round of the tops, rounds follow each other.
        let (above_before, tied_before) = (Var::new(0u32), Var::new(0u32));
        tops.for_each_round(false, |round| {
            let counts = Var::new(0u32);
            tops.for_each_in(round, |top, _| {
                let above = top.gt(threshold).select::<u32>(1u32 << 16, 0u32);
                counts.add(top.eq(threshold).select::<u32>(1u32, above));
            });
            // Up to 16 tops per thread and 1024 threads: 2^14 of each.
            let (before, total) = block_exclusive(counts.get(), smem.scan_b, *t);
            let above = Var::new(above_before.get() + (before >> 16));
            let tied = Var::new(tied_before.get() + (before & 0xFFFF));
            when(counts.get().ne(0), || {
                tops.for_each_in(round, |top, vector| {
                    let is_above = top.gt(threshold);
                    let is_tied = top.eq(threshold);
                    when(is_above | (is_tied & tied.get().lt(ties)), || {
                        smem.list.at(above.get() + tied.get().min(ties)).store(vector);
                    });
                    above.add(is_above.as_u32());
                    tied.add(is_tied.as_u32());
                });
            });
            above_before.add(total >> 16);
            tied_before.add(total & 0xFFFF);
            sync_threads(); // ORDER: the list, before its readers; and the scan's words, before the next round's.
        });
        threshold
    }

    /// Selects among the keys of the listed vectors (`listed` = `vectors`: all of them) that are at least `low`.
    #[allow(clippy::too_many_arguments)]
    fn select_keys(
        &self,
        row: Reg<u32>,
        request: Reg<u32>,
        length: Reg<u32>,
        first: Reg<u64>,
        vectors: Reg<u32>,
        listed: Reg<u32>,
        low: Reg<u32>,
    ) {
        let Select { shape, smem, t, .. } = self;
        let run = self.load_run(length, first, vectors, listed);
        run.for_each(|key, _| when(key.ge(low), || count(smem.key_bins.at(key >> LOW_BITS))));
        sync_threads(); // ORDER: every candidate counted, before the bins are summed.
        let high = find_topdown(smem.key_bins, shape.topk, smem.topdown, *t);
        run.for_each(|key, _| {
            when((key >> LOW_BITS).eq(high.bin) & key.ge(low), || count(smem.key_low.at(key & (LOW_BINS - 1))));
        });
        sync_threads(); // ORDER: the low digits counted, before they are summed.
        let need = Reg::<u32>::from(shape.topk) - high.above;
        let digit = find_low_digit(smem.key_low.at(t.lane).load(), need, *t);
        let threshold = (high.bin << LOW_BITS) | digit.bin;
        let ties = need - digit.above;

        let counts = Var::new(0u32);
        run.for_each(|key, _| {
            let above = key.gt(threshold).select::<u32>(1u32 << 16, 0u32);
            counts.add(key.eq(threshold).select::<u32>(1u32, above));
        });
        // Its barrier also ends the reads of the list, which the ids overwrite.
        let (before, _) = block_exclusive(counts.get(), smem.scan_a, *t);
        let above = Var::new(before >> 16);
        let tied = Var::new(before & 0xFFFF);
        when(counts.get().ne(0), || {
            run.for_each(|key, id| {
                let is_above = key.gt(threshold);
                let is_tied = key.eq(threshold);
                when(is_above | (is_tied & tied.get().lt(ties)), || {
                    smem.list.at(above.get() + tied.get().min(ties)).store(id());
                });
                above.add(is_above.as_u32());
                tied.add(is_tied.as_u32());
            });
        });
        sync_threads(); // ORDER: the selected ids, before they are mapped to rows.
        self.write_row(row, request, Reg::from(shape.topk), |slot| smem.list.at(slot).load());
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
                physical.set(block.mad(p.block_rows, id & (shape.page - 1)).as_i32());
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

    /// This thread's run of the listed vectors, as keys in registers; keys past the row's end have key 0.
    fn load_run(&self, length: Reg<u32>, first: Reg<u64>, vectors: Reg<u32>, listed: Reg<u32>) -> Run {
        let Select { shape, p, smem, t } = self;
        let per_thread = shape.vectors_per_thread();
        // Even shares; thread order is list order.
        let share = (listed + (t.threads - 1)) / t.threads;
        let begin = (t.index * share).min(listed);
        let end = (begin + share).min(listed);
        let row = p.logits.at64(first);
        let all = listed.eq(vectors);
        let run: Vec<(Var<u32>, [Var<u32>; 4])> =
            (0..per_thread).map(|_| (Var::new(0u32), std::array::from_fn(|_| Var::new(0u32)))).collect();
        for (i, (vector, words)) in run.iter().enumerate() {
            let at = begin + i as u32;
            when(at.lt(end), || {
                vector.set(at);
                when(!all, || vector.set(smem.list.at(at).load()));
                let bits = row.cast::<u32>().at(vector.get() * (KEYS / 2)).load_vec::<4>();
                for (word, bits) in words.iter().zip(bits) {
                    word.set(bits);
                }
            });
        }
        for (i, (vector, words)) in run.iter().enumerate() {
            when((begin + i as u32).lt(end), || {
                for word in words {
                    let keys = if shape.foreign { foreign_keys(word.get()) } else { order16_x2(word.get()) };
                    word.set(keys);
                }
                // Only the row's last vector can reach past its end.
                let valid = length - vector.get() * KEYS;
                when(valid.lt(KEYS), || {
                    for (w, word) in words.iter().enumerate() {
                        let first = 2 * w as u32;
                        let mask = valid.gt(first).select::<u32>(0xFFFFu32, 0u32)
                            | valid.gt(first + 1).select::<u32>(0xFFFF_0000u32, 0u32);
                        word.set(word.get() & mask);
                    }
                });
            });
        }
        Run { vectors: run }
    }
}

/// The tops of a row, dealt in rounds: round `r` gives thread `t` chunks `(r * threads + t) * CHUNKS_PER_THREAD ..`.
struct Tops {
    base: Global<u16>,
    chunks: Reg<u32>,
    rounds: Reg<u32>,
    words: Vec<[Var<u32>; 4]>,
    t: Thread,
}

impl Tops {
    fn new(base: Global<u16>, vectors: Reg<u32>, t: Thread) -> Tops {
        let chunks = (vectors + (CHUNK_TOPS - 1)) / CHUNK_TOPS;
        let per_round = t.threads * CHUNKS_PER_THREAD;
        let rounds = (chunks + (per_round - 1)) / per_round;
        let words = (0..CHUNKS_PER_THREAD).map(|_| std::array::from_fn(|_| Var::new(0u32))).collect();
        Tops { base, chunks, rounds, words, t }
    }

    fn chunk(&self, round: Reg<u32>, i: u32) -> Reg<u32> {
        (round * self.t.threads + self.t.index) * CHUNKS_PER_THREAD + i
    }

    /// Calls `body` once per round, the thread's tops of that round in registers. A row of one round is loaded only
    /// when `first` says that nothing is there yet.
    fn for_each_round(&self, first: bool, body: impl FnOnce(Reg<u32>)) {
        for_range(0u32, self.rounds, 1u32, |round| {
            let load = || {
                for (i, words) in self.words.iter().enumerate() {
                    let chunk = self.chunk(round, i as u32);
                    for word in words {
                        word.set(0u32); // key 0: no vector
                    }
                    when(chunk.lt(self.chunks), || {
                        let loaded = self.base.cast::<u32>().at(chunk * (CHUNK_TOPS / 2)).load_vec::<4>();
                        for (word, loaded) in words.iter().zip(loaded) {
                            word.set(loaded);
                        }
                    });
                }
            };
            if first {
                load()
            } else {
                when(self.rounds.gt(1), load)
            }
            body(round);
        });
    }

    /// `body(top, vector)` for this thread's tops of `round`, in index order.
    fn for_each_in(&self, round: Reg<u32>, mut body: impl FnMut(Reg<u32>, Reg<u32>)) {
        for (i, words) in self.words.iter().enumerate() {
            let vector = self.chunk(round, i as u32) * CHUNK_TOPS;
            for (w, word) in words.iter().enumerate() {
                let word = word.get();
                for e in 0..2 {
                    body(half(word, e), vector + (2 * w as u32 + e));
                }
            }
        }
    }

    fn for_each(&self, first: bool, body: impl FnMut(Reg<u32>, Reg<u32>)) {
        self.for_each_round(first, |round| self.for_each_in(round, body));
    }
}

/// A thread's vectors: their index and their eight keys.
struct Run {
    vectors: Vec<(Var<u32>, [Var<u32>; 4])>,
}

impl Run {
    /// `body(key, id)` in order; `id()` emits the key's index.
    fn for_each(&self, mut body: impl FnMut(Reg<u32>, &dyn Fn() -> Reg<u32>)) {
        for (vector, words) in &self.vectors {
            for (w, word) in words.iter().enumerate() {
                let keys = word.get();
                for e in 0..2 {
                    let id = || vector.get() * KEYS + (2 * w as u32 + e);
                    body(half(keys, e), &id);
                }
            }
        }
    }
}

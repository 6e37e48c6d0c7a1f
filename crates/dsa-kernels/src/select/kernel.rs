//! The device code of [`select`](super).

use dsa_core::consts::{KEYS_PER_TOP, PAGE, TILE, TOPK_MAX};
use dsa_core::device::keys::{Keys8, above_mask, both_halves, foreign_keys, lowest_bit, matching_mask, order16_x2};
use dsa_core::device::radix::{BINS, Crossing, LOW_BINS, LOW_BITS, count, find_low_digit, find_topdown};
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
        /// live rows; the rows of the grid beyond them come out empty
        pub rows: u32,
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
    group_sums: SharedArray<u32>,
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
            group_sums: SharedArray::new("group_sums", warps),
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
        tops.for_each_round(true, |_| tops.run.count_high(smem.top_bins));
        sync_threads(); // ORDER: every top counted, before the bins are summed.
        let high = find_topdown(smem.top_bins, shape.topk, smem.group_sums, *t);
        tops.for_each_round(false, |_| tops.run.count_low(high.bin, smem.top_low));
        sync_threads(); // ORDER: the low digits counted, before they are summed.
        let cut = self.cut(high, smem.top_low);

        // Thread order is index order within a round of the tops, rounds follow each other.
        let (above_before, tied_before) = (Var::new(0u32), Var::new(0u32));
        tops.for_each_round(false, |_| {
            let taken = tops.run.compare(cut.threshold);
            // Up to 16 tops per thread and 1024 threads: 2^14 of each.
            let (before, total) = block_exclusive(taken.counts(), smem.scan_b, *t);
            let above = above_before.get() + (before >> 16);
            let tied = tied_before.get() + (before & 0xFFFF);
            tops.run.emit(&taken, above, tied, cut.ties, smem.list);
            above_before.add(total >> 16);
            tied_before.add(total & 0xFFFF);
            sync_threads(); // ORDER: the list, before its readers; and the scan's words, before the next round's.
        });
        cut.threshold
    }

    /// The K-th key and how many keys equal to it are taken, from the crossing of the upper digit and the counts of the
    /// lower digit in its bin.
    fn cut(&self, high: Crossing, low_counts: SharedArray<u32>) -> Cut {
        let need = Reg::<u32>::from(self.shape.topk) - high.above;
        let digit = find_low_digit(low_counts.at(self.t.lane).load(), need, self.t);
        Cut { threshold: (high.bin << LOW_BITS) | digit.bin, ties: need - digit.above }
    }

    /// Selects among the keys of the listed vectors (`listed` = `vectors`: all of them), the K-th of which is at least
    /// `low`.
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
        // Of a listed vector about one key in eight is a candidate; of a short row's keys most are.
        when_else(listed.eq(vectors), || run.count_high(smem.key_bins), || run.count_high_from(low, smem.key_bins));
        sync_threads(); // ORDER: every candidate counted, before the bins are summed.
        let high = find_topdown(smem.key_bins, shape.topk, smem.group_sums, *t);
        run.count_low(high.bin, smem.key_low);
        sync_threads(); // ORDER: the low digits counted, before they are summed.
        let cut = self.cut(high, smem.key_low);

        let taken = run.compare(cut.threshold);
        // Its barrier also ends the reads of the list, which the ids overwrite.
        let (before, _) = block_exclusive(taken.counts(), smem.scan_a, *t);
        run.emit(&taken, before >> 16, before & 0xFFFF, cut.ties, smem.list);
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
        let run = Run::new(per_thread);
        for (i, octet) in run.octets.iter().enumerate() {
            let at = begin + i as u32;
            when(at.lt(end), || {
                octet.base.set(at);
                when(!all, || octet.base.set(smem.list.at(at).load()));
                octet.load(row.cast::<u32>().at(octet.base.get() * (KEYS / 2)));
            });
        }
        for (i, octet) in run.octets.iter().enumerate() {
            when((begin + i as u32).lt(end), || {
                for word in octet.words {
                    let keys = if shape.foreign { foreign_keys(word.get()) } else { order16_x2(word.get()) };
                    word.set(keys);
                }
                // Only the row's last vector can reach past its end.
                let valid = length - octet.base.get() * KEYS;
                when(valid.lt(KEYS), || {
                    for (w, word) in octet.words.iter().enumerate() {
                        let first = 2 * w as u32;
                        let mask = valid.gt(first).select::<u32>(0xFFFFu32, 0u32)
                            | valid.gt(first + 1).select::<u32>(0xFFFF_0000u32, 0u32);
                        word.set(word.get() & mask);
                    }
                });
            });
        }
        run
    }
}

/// The K-th key of an order, and how many of the keys equal to it belong to the first K.
#[derive(Clone, Copy)]
struct Cut {
    threshold: Reg<u32>,
    ties: Reg<u32>,
}

/// The tops of a row, dealt in rounds: round `r` gives thread `t` chunks `(r * threads + t) * CHUNKS_PER_THREAD ..`.
struct Tops {
    base: Global<u16>,
    chunks: Reg<u32>,
    rounds: Reg<u32>,
    run: Run,
    t: Thread,
}

impl Tops {
    fn new(base: Global<u16>, vectors: Reg<u32>, t: Thread) -> Tops {
        let chunks = (vectors + (CHUNK_TOPS - 1)) / CHUNK_TOPS;
        let per_round = t.threads * CHUNKS_PER_THREAD;
        let rounds = (chunks + (per_round - 1)) / per_round;
        Tops { base, chunks, rounds, run: Run::new(CHUNKS_PER_THREAD), t }
    }

    /// Calls `body` once per round, the thread's tops of that round in registers. A row of one round is loaded only
    /// when `first` says that nothing is there yet.
    fn for_each_round(&self, first: bool, body: impl FnOnce(Reg<u32>)) {
        for_range(0u32, self.rounds, 1u32, |round| {
            let load = || {
                for (i, octet) in self.run.octets.iter().enumerate() {
                    let chunk = (round * self.t.threads + self.t.index) * CHUNKS_PER_THREAD + i as u32;
                    octet.base.set(chunk);
                    for word in octet.words {
                        word.set(0u32); // key 0: no vector
                    }
                    when(chunk.lt(self.chunks), || octet.load(self.base.cast::<u32>().at(chunk * (CHUNK_TOPS / 2))));
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
}

/// Eight consecutive keys of a thread and their place: key `i` has index `8 * base + i`. Key 0 is "no key".
#[derive(Clone, Copy)]
struct Octet {
    base: Var<u32>,
    words: [Var<u32>; 4],
}

impl Octet {
    fn load(&self, from: Global<u32>) {
        for (word, loaded) in self.words.iter().zip(from.load_vec::<4>()) {
            word.set(loaded);
        }
    }

    fn keys(&self) -> Keys8 {
        self.words.map(|w| w.get())
    }
}

/// A thread's octets, in index order.
struct Run {
    octets: Vec<Octet>,
}

/// For each octet of a run, the keys above and at a threshold, as bit masks.
struct Taken {
    above: Vec<Reg<u32>>,
    tied: Vec<Reg<u32>>,
}

impl Taken {
    /// How many are above (upper half) and at (lower half) the threshold.
    fn counts(&self) -> Reg<u32> {
        let total = |masks: &[Reg<u32>]| pack_masks(masks).map(|m| m.popc()).reduce(|a, b| a + b).expect("some octet");
        (total(&self.above) << 16) | total(&self.tied)
    }
}

/// Masks of up to four octets per word.
fn pack_masks(masks: &[Reg<u32>]) -> impl Iterator<Item = Reg<u32>> {
    masks
        .chunks(4)
        .map(|four| four.iter().enumerate().skip(1).fold(four[0], |word, (i, mask)| word | (*mask << (8 * i as u32))))
}

/// `body(bit)` for each set bit of `mask`, lowest first.
fn for_each_bit(mask: Reg<u32>, body: impl FnOnce(Reg<u32>)) {
    let rest = Var::new(mask);
    while_(
        || rest.get().ne(0),
        || {
            body(lowest_bit(rest.get()));
            rest.set(rest.get() & (rest.get() - 1));
        },
    );
}

/// Key `i` of eight.
fn pick(keys: Keys8, i: Reg<u32>) -> Reg<u32> {
    let high_pair = i.ge(4);
    let odd_word = (i & 2).ne(0);
    let low = odd_word.select::<u32>(keys[1], keys[0]);
    let high = odd_word.select::<u32>(keys[3], keys[2]);
    (high_pair.select::<u32>(high, low) >> ((i & 1) << 4)) & 0xFFFF
}

impl Run {
    fn new(octets: u32) -> Run {
        let octet = || Octet { base: Var::new(0u32), words: std::array::from_fn(|_| Var::new(0u32)) };
        Run { octets: (0..octets).map(|_| octet()).collect() }
    }

    /// Counts the upper digit of every key ("no key" lands in bin 0, which no crossing reaches).
    fn count_high(&self, bins: SharedArray<u32>) {
        for octet in &self.octets {
            let keys = octet.keys();
            // Octets fill up in order, so for most warps the last ones are all empty.
            when((keys[0] | keys[1] | keys[2] | keys[3]).ne(0), || {
                for word in keys {
                    count(bins.at((word >> LOW_BITS) & (BINS - 1)));
                    count(bins.at(word >> (16 + LOW_BITS)));
                }
            });
        }
    }

    /// Counts the upper digit of the keys that are at least `low` (>= 1).
    fn count_high_from(&self, low: Reg<u32>, bins: SharedArray<u32>) {
        let below = both_halves(low - 1);
        for octet in &self.octets {
            let keys = octet.keys();
            for_each_bit(above_mask(keys, below), |i| count(bins.at(pick(keys, i) >> LOW_BITS)));
        }
    }

    /// Counts the lower digit of the keys whose upper digit is `high`.
    fn count_low(&self, high: Reg<u32>, bins: SharedArray<u32>) {
        let value = both_halves(high << LOW_BITS);
        let upper = ((BINS - 1) << LOW_BITS) * 0x0001_0001;
        for octet in &self.octets {
            let keys = octet.keys();
            for_each_bit(matching_mask(keys, value, upper), |i| {
                count(bins.at(pick(keys, i) & (LOW_BINS - 1)));
            });
        }
    }

    fn compare(&self, threshold: Reg<u32>) -> Taken {
        let (at, below) = (both_halves(threshold), both_halves(threshold - 1));
        let above: Vec<_> = self.octets.iter().map(|octet| above_mask(octet.keys(), at)).collect();
        let tied = self.octets.iter().zip(&above).map(|(octet, above)| above_mask(octet.keys(), below) ^ *above);
        Taken { tied: tied.collect(), above }
    }

    /// Writes the indices of the keys above the threshold, and of the first `ties` at it, in order: `above` and `tied`
    /// such keys come before this thread's.
    fn emit(&self, taken: &Taken, above: Reg<u32>, tied: Reg<u32>, ties: Reg<u32>, list: SharedArray<u32>) {
        let ties_before = tied.min(ties);
        let slot = Var::new(above + ties_before);
        let ties_left = Var::new(ties - ties_before);
        let masks = pack_masks(&taken.above).zip(pack_masks(&taken.tied));
        for (octets, (above, tied)) in self.octets.chunks(4).zip(masks) {
            let tied = Var::new(ties_left.get().eq(0).select::<u32>(0u32, tied));
            // At most one thread holds both ties that are taken and ties that are not.
            while_(
                || tied.get().popc().gt(ties_left.get()),
                || tied.set(tied.get() & !(Reg::<u32>::from(0x8000_0000u32) >> tied.get().clz())),
            );
            ties_left.set(ties_left.get() - tied.get().popc());
            for_each_bit(above | tied.get(), |bit| {
                let base = octets.iter().enumerate().skip(1).fold(octets[0].base.get(), |base, (i, octet)| {
                    bit.ge(8 * i as u32).select::<u32>(octet.base.get(), base)
                });
                list.at(slot.get()).store(base * KEYS + (bit & (KEYS - 1)));
                slot.add(1);
            });
        }
    }
}

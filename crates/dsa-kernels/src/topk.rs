//! The exact top-k of one row by one CTA, shared by every selecting kernel.
//!
//! Call the 8 keys of one top a vector. **The K keys lie in the K first vectors by (top descending, index ascending)**:
//! were a selected key in a later vector, the K vectors before it would each hold a key (their top) that precedes it.
//! So the tops bound the work exactly, whatever the ties, and no fallback is needed:
//! 1. a row of at most K vectors takes every vector; a longer one finds the K-th vector by a radix select over the tops (11
//!    bits, then 5) and lists the K vectors in index order;
//! 2. each thread holds a run of the vectors in registers; a radix select over their keys (for listed vectors usually a
//!    single digit, the distance from the K-th top) gives the threshold and how many keys equal to it are taken, an
//!    ordered scan gives every selected key its place.
//!
//! A thread owns consecutive tops and consecutive listed vectors, so thread order is key order.

mod octets;

use dsa_core::consts::{KEYS_PER_TOP, PAGE, TOPK_MAX};
use dsa_core::device::keys::{foreign_keys, order16_x2};
use dsa_core::device::radix::{BINS, Crossing, LOW_BINS, LOW_BITS, find_low_digit, find_topdown};
use dsa_core::device::scan::{Thread, block_exclusive, fill};
use dsa_core::layout::b_row::BRow;
use ptx::{Atomic, Global, Pred, Reg, Scope, Sem, SharedArray, Var, for_range, sync_threads, when, when_else};

use octets::{Run, Taken};

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
    /// Listed vectors in index order, later the selected ids or the B' row.
    list: SharedArray<u32>,
    group_sums: SharedArray<u32>,
    scan_a: SharedArray<u32>,
    scan_b: SharedArray<u32>,
}

/// A row to select from.
#[derive(Clone, Copy)]
pub struct Row {
    /// Its BF16 logits, 16-byte aligned; whole vectors are readable.
    pub logits: Global<u16>,
    /// Its tops, 16-byte aligned; the tops of whole pages are readable.
    pub tops: Global<u16>,
    /// Its keys.
    pub length: Reg<u32>,
}

/// The selection of K keys by the whole CTA.
pub struct RowTopk {
    k: u32,
    /// Whether logits may hold any NaN pattern and -0.
    foreign: bool,
    smem: Smem,
    t: Thread,
}

impl RowTopk {
    /// Selects `k` keys, a multiple of 128; reserves its part of the shared layout. `foreign` logits may hold any NaN
    /// pattern and -0.
    pub fn new(k: u32, foreign: bool, t: Thread) -> RowTopk {
        Self::with_list(k, k, foreign, t)
    }

    /// As [`new`](RowTopk::new), with room for the selection as a [`BRow`].
    pub fn with_b_row(k: u32, foreign: bool, t: Thread) -> RowTopk {
        Self::with_list(k, BRow::new(k as usize).words() as u32, foreign, t)
    }

    fn with_list(k: u32, list_words: u32, foreign: bool, t: Thread) -> RowTopk {
        let warps = t.warps();
        let smem = Smem {
            top_bins: SharedArray::aligned("top_bins", BINS, 16),
            key_bins: SharedArray::aligned("key_bins", BINS, 16),
            top_low: SharedArray::aligned("top_low", LOW_BINS, 16),
            key_low: SharedArray::aligned("key_low", LOW_BINS, 16),
            list: SharedArray::aligned("list", list_words, 16),
            group_sums: SharedArray::new("group_sums", warps),
            scan_a: SharedArray::new("scan_a", warps),
            scan_b: SharedArray::new("scan_b", warps),
        };
        RowTopk { k, foreign, smem, t }
    }

    /// Zeroes the bins; a CTA barrier must follow before [`select`](RowTopk::select).
    pub fn clear(&self) {
        for bins in [self.smem.top_bins, self.smem.key_bins, self.smem.top_low, self.smem.key_low] {
            fill(bins, 0, self.t);
        }
    }

    /// One word per warp, free until [`select`](RowTopk::select).
    pub fn scratch(&self) -> SharedArray<u32> {
        self.smem.scan_a
    }

    /// K words that hold the ids after [`Selected::write_ids`].
    pub fn ids(&self) -> SharedArray<u32> {
        self.smem.list
    }

    /// The words of the row that [`write_b_row`](RowTopk::write_b_row) left.
    pub fn b_row(&self) -> SharedArray<u32> {
        self.smem.list
    }

    /// Two arrays of [`BINS`] counters, cleared by [`clear`](RowTopk::clear), for callers between selections.
    pub fn bins(&self) -> [SharedArray<u32>; 2] {
        [self.smem.top_bins, self.smem.key_bins]
    }

    /// Counters of a lower digit, cleared by [`clear`](RowTopk::clear), for callers between selections.
    pub fn low_bins(&self) -> SharedArray<u32> {
        self.smem.key_low
    }

    /// The first K keys of `row`, however short, as a [`BRow`]; returns how many there are. All threads call it after the
    /// barrier that [`clear`](RowTopk::clear) needs. A CTA barrier must follow before the row is read.
    pub fn write_b_row(&self, row: Row) -> Reg<u32> {
        let RowTopk { k, smem, t, foreign } = self;
        let planes = smem.list.ptr().at(*k);
        let word = |key: Reg<u32>, index: Reg<u32>| (key << 16) | ((index & 0xFFFF) ^ 0xFFFF);
        when_else(
            row.length.le(*k),
            || {
                for_range(t.index, *k, t.threads, |slot| {
                    let value = Var::new(0u32);
                    when(slot.lt(row.length), || {
                        let bits = row.logits.at(slot).load();
                        let keys = if *foreign { foreign_keys(bits) } else { order16_x2(bits) };
                        value.set(word(keys & 0xFFFF, slot));
                    });
                    smem.list.at(slot).store(value.get());
                });
                when(t.index.lt(k / 32), || planes.at(t.index).store(0u32));
            },
            || {
                let selected = self.select(row);
                // Its barriers end the reads of the list; the planes are nobody's before this one.
                when(t.index.lt(k / 32), || planes.at(t.index).store(0u32));
                sync_threads(); // ORDER: the zeroed planes, before bits are set in them.
                let Selected { run, taken, above, tied, cut } = &selected;
                let first_tie = Reg::<u32>::from(*k) - cut.ties;
                run.emit_apart(taken, *above, *tied, *cut, first_tie, |slot, key, index| {
                    smem.list.at(slot).store(word(key, index));
                    when(index.ge(1 << 16), || {
                        let bit = Reg::<u32>::from(1) << (slot & 31);
                        planes.at(slot >> 5).reduce(Atomic::Or, Sem::Relaxed(Scope::Cta), bit);
                    });
                });
            },
        );
        row.length.min(*k)
    }

    /// Vectors that a thread holds in registers.
    fn vectors_per_thread(&self) -> u32 {
        self.k.div_ceil(self.t.threads)
    }

    /// Selects the K first keys of a row of more. Ends with a CTA barrier.
    pub fn select(&self, row: Row) -> Selected {
        let RowTopk { k, smem, t, .. } = self;
        let vectors = (row.length + (KEYS - 1)) / KEYS;
        let low = Var::new(1u32); // key 0 is "no key"
        let listed = Var::new(vectors);
        when(vectors.gt(*k), || {
            low.set(self.list_vectors(row.tops, vectors));
            listed.set(*k);
        });
        let (low, listed) = (low.get(), listed.get());
        let run = self.load_run(row, vectors, listed);
        let cut = self.cut_keys(&run, listed.ne(vectors), low);
        let taken = run.compare(cut.threshold);
        // Its barrier also ends the reads of the list, which the ids overwrite.
        let (before, _) = block_exclusive(taken.counts(), smem.scan_a, *t);
        Selected { run, taken, above: before >> 16, tied: before & 0xFFFF, cut }
    }

    /// Lists the K first vectors by (top descending, index ascending) in index order; returns the K-th one's top.
    fn list_vectors(&self, tops: Global<u16>, vectors: Reg<u32>) -> Reg<u32> {
        let RowTopk { k, smem, t, .. } = self;
        let tops = Tops::new(tops, vectors, *t);
        tops.for_each_round(true, |_| tops.run.count_high(smem.top_bins));
        sync_threads(); // ORDER: every top counted, before the bins are summed.
        let high = find_topdown(smem.top_bins, *k, smem.group_sums, *t);
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

    /// The K-th key of the run. `listed`: the run holds the K vectors with the largest tops, of which about one key in
    /// eight is a candidate and none of interest is below `low`; else most keys of the run are candidates.
    fn cut_keys(&self, run: &Run, listed: Pred, low: Reg<u32>) -> Cut {
        let RowTopk { k, smem, t, .. } = self;
        // Candidates seldom span more keys than there are bins: then one digit tells the threshold.
        when_else(listed, || run.count_from(low, smem.key_bins), || run.count_high(smem.key_bins));
        sync_threads(); // ORDER: every candidate counted, before the bins are summed.
        let first = find_topdown(smem.key_bins, *k, smem.group_sums, *t);
        let (bin, above) = (Var::new(first.bin), Var::new(first.above));
        let threshold = Var::new(low + first.bin);
        let ties = Var::new(Reg::<u32>::from(*k) - first.above);
        let wide = first.bin.eq(BINS - 1); // the bin of all keys that are further away
        when(listed & wide, || {
            sync_threads(); // ORDER: every warp's reads of the bins, before they are cleared.
            fill(smem.key_bins, 0, *t);
            sync_threads(); // ORDER: the cleared bins, before they are counted in again.
            run.count_high(smem.key_bins);
            sync_threads(); // ORDER: every key counted, before the bins are summed.
            let high = find_topdown(smem.key_bins, *k, smem.group_sums, *t);
            bin.set(high.bin);
            above.set(high.above);
        });
        when(!listed | wide, || {
            run.count_low(bin.get(), smem.key_low);
            sync_threads(); // ORDER: the low digits counted, before they are summed.
            let cut = self.cut(Crossing { bin: bin.get(), above: above.get() }, smem.key_low);
            threshold.set(cut.threshold);
            ties.set(cut.ties);
        });
        Cut { threshold: threshold.get(), ties: ties.get() }
    }

    /// The K-th key and how many keys equal to it are taken, from the crossing of the upper digit and the counts of the
    /// lower digit in its bin.
    fn cut(&self, high: Crossing, low_counts: SharedArray<u32>) -> Cut {
        let need = Reg::<u32>::from(self.k) - high.above;
        let digit = find_low_digit(low_counts.at(self.t.lane).load(), need, self.t);
        Cut { threshold: (high.bin << LOW_BITS) | digit.bin, ties: need - digit.above }
    }

    /// This thread's run of the listed vectors, as keys in registers; keys past the row's end have key 0.
    fn load_run(&self, row: Row, vectors: Reg<u32>, listed: Reg<u32>) -> Run {
        let RowTopk { smem, t, foreign, .. } = self;
        // Even shares; thread order is list order.
        let share = (listed + (t.threads - 1)) / t.threads;
        let begin = (t.index * share).min(listed);
        let end = (begin + share).min(listed);
        let all = listed.eq(vectors);
        let run = Run::new(self.vectors_per_thread());
        for (i, octet) in run.octets.iter().enumerate() {
            let at = begin + i as u32;
            when(at.lt(end), || {
                octet.base.set(at);
                when(!all, || octet.base.set(smem.list.at(at).load()));
                octet.load(row.logits.cast::<u32>().at(octet.base.get() * (KEYS / 2)));
            });
        }
        for (i, octet) in run.octets.iter().enumerate() {
            when((begin + i as u32).lt(end), || {
                for word in octet.words {
                    let keys = if *foreign { foreign_keys(word.get()) } else { order16_x2(word.get()) };
                    word.set(keys);
                }
                // Only the row's last vector can reach past its end.
                let valid = row.length - octet.base.get() * KEYS;
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

/// A finished selection, spread over the threads.
pub struct Selected {
    run: Run,
    taken: Taken,
    /// Keys above the threshold in the threads before this one.
    above: Reg<u32>,
    /// Keys at the threshold in the threads before this one.
    tied: Reg<u32>,
    cut: Cut,
}

impl Selected {
    /// Writes the selected keys' ids in ascending order; a CTA barrier must follow before they are read.
    pub fn write_ids(&self, list: SharedArray<u32>) {
        self.run.emit(&self.taken, self.above, self.tied, self.cut.ties, list);
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

//! The exact top-k of one row by one CTA or by a cluster, shared by every selecting kernel.
//!
//! Call the 8 keys of one top a vector. **The K keys lie in the K first vectors by (top descending, index ascending)**:
//! were a selected key in a later vector, the K vectors before it would each hold a key (their top) that precedes it.
//! So the tops bound the work exactly, whatever the ties, and no fallback is needed:
//! 1. a row of at most K vectors takes every vector; a longer one finds the K-th vector by a radix select over the tops (two
//!    digits of 8 bits) and lists the K vectors in index order;
//! 2. the CTA holds the vectors in registers; a radix select over their keys (for listed vectors usually a single digit,
//!    the distance from the K-th top) gives the threshold and how many keys equal to it are taken, an ordered scan gives
//!    every selected key its place.
//!
//! The same holds one level up: call the largest of the 8 tops of one 16-byte load (a chunk: one page) a supertop, and the K first
//! tops lie in the K first chunks by (supertop descending, index ascending). So a row whose tops do not fit the registers
//! starts with its supertops, then takes the tops of K listed chunks, then the keys of K listed vectors: three passes of the
//! same code, each over no more than the registers hold.
//!
//! A CTA has registers for more vectors than K where K is small: then longer rows need no list either. Several CTAs of a
//! cluster may share a row: each holds its part and sends its 256 counts of a digit to all. What is listed is dealt to them by
//! place, so that each has K over their number, wherever in the row it lies.

mod b_row;
mod cluster;
mod places;
mod run;

pub use b_row::BRowPart;
pub use cluster::Slice;
pub(crate) use cluster::{choose, may_share};

use dsa_core::consts::{CONTEXT_MAX, KEYS_PER_TOP, PAGE, TOPK_MAX};
use dsa_core::device::keys::{foreign_keys, order16_x2};
use dsa_core::device::radix::{Crossing, WARP_BINS, WARP_DIGIT_BITS, find_topdown_in_warp};
use dsa_core::device::scan::{Thread, fill};
use ptx::{Global, Pred, Reg, SharedArray, Var, cta_index, repeat, sync_threads, when, when_else};

use cluster::Cluster;
use places::{Places, Staged};
use run::Run;

/// Vectors that a CTA holds in registers at least.
const VECTORS_MIN: u32 = 2048;
const KEYS: u32 = KEYS_PER_TOP as u32;
/// Tops of one 16-byte load: one page.
const CHUNK_TOPS: u32 = 8;
const _: () = assert!(CHUNK_TOPS as usize * KEYS_PER_TOP == PAGE);
// The supertops of every row fit the registers.
const _: () = assert!(CONTEXT_MAX.div_ceil(PAGE).div_ceil(KEYS_PER_TOP) <= VECTORS_MIN as usize);
// Counts of keys above and at the threshold share a word.
const _: () = assert!(TOPK_MAX * KEYS_PER_TOP < 1 << 16);

/// The shared layout.
#[derive(Clone, Copy)]
struct Smem {
    /// Counts of the upper digit, or of the distance from the K-th top; zero between uses.
    bins: SharedArray<u32>,
    /// Counts of the lower digit, likewise, and of all keys that have another upper one.
    low: SharedArray<u32>,
    /// Listed chunks or vectors in index order, later the selected ids or the B' row.
    list: SharedArray<u32>,
    crossing: SharedArray<u32>,
    scan: SharedArray<u32>,
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

/// Octets of keys, of tops, of supertops: how many levels lie below.
const OF_TOPS: u32 = 1;
const OF_SUPERTOPS: u32 = 2;

impl Row {
    /// Vectors that hold its keys.
    fn vectors(&self) -> Reg<u32> {
        eighth(self.length)
    }

    /// Chunks that hold its tops.
    fn chunks(&self) -> Reg<u32> {
        eighth(self.vectors())
    }

    /// The key of its logit `index`; the upper half means nothing.
    fn key(&self, index: Reg<u32>, foreign: bool) -> Reg<u32> {
        let bits = self.logits.at(index).load();
        if foreign { foreign_keys(bits) } else { order16_x2(bits) }
    }
}

/// Groups of eight that hold `n`.
fn eighth(n: Reg<u32>) -> Reg<u32> {
    const _: () = assert!(KEYS == 8 && CHUNK_TOPS == 8);
    (n + 7) >> 3
}

/// Octets that one of `cluster` CTAs of `threads` holds in registers; each takes two bytes of shared memory.
pub fn octets_of_cta(k: u32, cluster: u32, threads: u32) -> u32 {
    (k / cluster).max(VECTORS_MIN).div_ceil(threads).next_power_of_two() * threads
}

/// The selection of K keys by the whole CTA, or by all CTAs of a cluster.
pub struct RowTopk {
    k: u32,
    /// Whether logits may hold any NaN pattern and -0.
    foreign: bool,
    /// Octets of the CTA.
    octets: u32,
    /// Whether a row may have more tops than fit.
    supertops: bool,
    smem: Smem,
    /// The CTA's part of the row, if several share it.
    cluster: Option<Cluster>,
    /// Where the octets of the last pass are kept for a B' row.
    staged: Option<Staged>,
    t: Thread,
}

impl RowTopk {
    /// Selects `k` keys, a multiple of 128, by `cluster` CTAs together; reserves its part of the shared layout. `foreign` logits
    /// may hold any NaN pattern and -0.
    pub fn new(k: u32, cluster: u32, foreign: bool, t: Thread) -> RowTopk {
        Self::with_list(k, k + KEYS, CONTEXT_MAX, cluster, None, foreign, t)
    }

    /// For rows of up to `length_max` keys, with a list of so many words, and `planes` words of each CTA to gather, if any.
    fn with_list(
        k: u32,
        list_words: u32,
        length_max: usize,
        cluster: u32,
        planes: Option<u32>,
        foreign: bool,
        t: Thread,
    ) -> RowTopk {
        let smem = Smem {
            bins: SharedArray::aligned("bins", WARP_BINS, 16),
            low: SharedArray::aligned("low", WARP_BINS + 1, 16),
            list: SharedArray::aligned("list", list_words, 16),
            crossing: SharedArray::aligned("crossing", 2, 8),
            scan: SharedArray::new("scan", t.warps()),
        };
        let octets = octets_of_cta(k, cluster, t.threads);
        let supertops = length_max.div_ceil(PAGE) as u32 > octets * cluster;
        let lists = 1 + u32::from(supertops);
        let cluster = (cluster > 1).then(|| Cluster::new(cluster, k, lists, planes, smem.crossing, t));
        RowTopk { k, foreign, octets, supertops, smem, cluster, staged: None, t }
    }

    /// CTAs that share the row.
    pub fn ctas(&self) -> u32 {
        self.cluster.map_or(1, |cluster| cluster.size)
    }

    /// The CTA's row. Asked for where it is needed, so that no register need hold it meanwhile.
    pub fn row(&self) -> Reg<u32> {
        match self.ctas() {
            1 => cta_index(),
            ctas => cta_index() >> ctas.trailing_zeros(),
        }
    }

    /// This one's rank among them.
    pub fn rank(&self) -> Reg<u32> {
        self.cluster.map_or(Reg::from(0), |cluster| cluster.rank)
    }

    /// The first thing of every CTA, whatever its row.
    pub fn arrive(&self) {
        self.cluster.iter().for_each(Cluster::arrive);
    }

    /// Before the first selection, and before any CTA ends: waits until all CTAs of the row have arrived.
    pub fn meet(&self) {
        self.cluster.iter().for_each(Cluster::meet);
    }

    /// Zeroes the bins; a CTA barrier must follow before a selection.
    pub fn clear(&self) {
        fill(self.smem.bins, 0, self.t);
        fill(self.smem.low, 0, self.t);
        // A CTA's places may begin and end within four words that are read together; and with tops that are not their logits'
        // own not all are written.
        fill(self.smem.list, 0, self.t);
    }

    /// One word per warp, free until a selection.
    pub fn scratch(&self) -> SharedArray<u32> {
        self.smem.scan
    }

    /// K words that hold the ids after [`write_ids`](RowTopk::write_ids): those of the CTA's places, from
    /// [`Slice::base`] on; the words before and after them up to multiples of four hold ids too.
    pub fn ids(&self) -> SharedArray<u32> {
        self.smem.list
    }

    /// Writes the ids of the K first keys of a row of more in ascending order; `start` is called before the row is read.
    /// Returns which places of the K are this CTA's, none if all are. All threads call it after the barrier that
    /// [`clear`](RowTopk::clear) needs. Ends with a CTA barrier.
    pub fn write_ids(&self, row: Row, start: impl FnOnce()) -> Option<Slice> {
        self.search(row, start, true).slice
    }

    /// Selects the K first keys of a row of more, after `start`; with `ids` also writes those to the list and ends with a
    /// CTA barrier.
    fn search(&self, row: Row, start: impl FnOnce(), ids: bool) -> Selected {
        let RowTopk { k, smem, t, cluster, .. } = self;
        let run = Run::new(self.octets / t.threads, cluster.as_ref(), *t);
        let codes = SharedArray::<u16>::new("codes", self.octets);
        // Up to three times through the same code: over supertops, over tops, and over keys.
        let (vectors, chunks) = (row.vectors(), row.chunks());
        let above = Var::new(vectors.gt(run.capacity()).as_u32());
        let (total, from) = (Var::new(vectors), Var::new(row.logits.address()));
        when(above.get().ne(0), || {
            total.set(chunks);
            from.set(row.tops.address());
        });
        if self.supertops {
            when(chunks.gt(run.capacity()), || {
                above.set(OF_SUPERTOPS);
                total.set(eighth(chunks));
            });
        }
        let listed = Var::<u32>::new(0u32);
        total.set(run.deal(total.get()));
        let low = Var::new(0u32); // one below the K-th of the listed groups' largest
        let mut places = None;
        let mut slice = None;
        let (threshold, ties) = (Var::new(0u32), Var::new(0u32));
        cluster.iter().for_each(|cluster| cluster.keep(row));
        start();
        repeat(|l| {
            let above_keys = above.get().ne(0);
            let pass = Pass {
                total: total.get(),
                from: Global::from_address(from.get()),
                above: above.get(),
                listed: listed.get().ne(0),
                row,
            };
            self.load(&run, &pass);
            when(above.get().eq(0), || run.logits_to_keys(pass.total, row.length, self.foreign));
            self.cut(&run, pass.listed, low.get(), threshold, ties);
            if !ids {
                // All reads of the list were before the cut's barriers. A B' row ors its planes, and holds no index but its
                // own even if fewer than K keys are found, as with tops that are not their logits' own.
                fill(smem.list, 0, *t);
            }
            let cut = Cut { threshold: threshold.get(), ties: ties.get() };
            // Its barrier also ends the reads of the list and of the low digits.
            let found = Places::find(&run, cut.threshold, codes, smem.scan, *t);
            fill(smem.low, 0, *t);
            let own = cluster.map(|cluster| cluster.slice(cut.ties));
            let write = || {
                let (before, base) = match own {
                    Some((before, slice)) => (before, Some(slice.base())),
                    None => ([Reg::from(0); 2], None),
                };
                found.write_indices(&run, cut.ties, before, smem.list, base);
                sync_threads(); // ORDER: the list, before its readers; and the scan's words, before the next pass's.
            };
            if ids {
                write();
            } else {
                when(above_keys, write);
            }
            (places, slice) = (Some(found), own.map(|(_, slice)| slice));
            l.break_if(!above_keys);
            above.set(above.get() - 1);
            if let (Some(cluster), Some(slice)) = (cluster, slice) {
                cluster.deal_list(self.list_number(above.get()), smem.list, slice);
            }
            listed.set(1u32);
            let own_k = Reg::from(k / self.ctas());
            total.set(own_k);
            run.deal_own(own_k);
            let logits = cluster.map_or(row.logits, |cluster| cluster.recall_logits(row));
            from.set(above.get().ne(0).select(row.tops.address(), logits.address()));
            // One below: ties at the K-th must have a bin of their own, in which all of them are counted.
            low.set(cut.threshold - 1);
        });
        let cut = Cut { threshold: threshold.get(), ties: ties.get() };
        Selected { run, places: places.expect("the body was emitted"), cut, slice }
    }

    /// The bin at which the counts of all CTAs' `bins` reach `need`. All threads call it after a barrier that orders the
    /// counting; ends with a barrier, after which the bins may be reused.
    fn find_topdown(&self, bins: SharedArray<u32>, need: Reg<u32>) -> Crossing {
        let RowTopk { smem, t, cluster, .. } = self;
        if let Some(cluster) = cluster {
            return cluster.find_topdown(bins, need);
        }
        let found = smem.crossing.ptr();
        when(t.warp.eq(0), || {
            let crossing = find_topdown_in_warp(bins, need, t.lane);
            when(t.lane.eq(0), || found.store_vec([crossing.bin, crossing.above]));
        });
        sync_threads(); // ORDER: the crossing, before every warp reads it.
        let [bin, above] = found.load_vec::<2>();
        Crossing { bin, above }
    }

    /// Number of the list that says which octets of this level are looked at.
    fn list_number(&self, above: Reg<u32>) -> Reg<u32> {
        if self.supertops { above } else { Reg::from(0) }
    }

    /// Loads the pass's octets.
    fn load(&self, run: &Run, pass: &Pass) {
        let Pass { total, from, above, listed, row } = *pass;
        let supertops = || run.load_supertops(total, from, row.chunks());
        let octets = || run.load(total, from);
        let unlisted = || match self.supertops {
            true => when_else(above.eq(OF_SUPERTOPS), supertops, octets),
            false => octets(),
        };
        when_else(
            listed,
            || {
                let number = self.list_number(above);
                let list = self.cluster.map_or(self.smem.list.ptr(), |cluster| cluster.list(number));
                let all = match self.supertops {
                    true => above.eq(OF_TOPS).select(row.chunks(), row.vectors()),
                    false => row.vectors(),
                };
                run.load_listed(total, from, list, all);
            },
            unlisted,
        );
    }

    /// Finds the K-th key of a pass and how many keys equal to it are taken; the tally of a cluster may be read after the
    /// next barrier.
    fn cut(&self, run: &Run, listed: Pred, low: Reg<u32>, threshold: Var<u32>, ties: Var<u32>) {
        let RowTopk { k, smem, t, .. } = self;
        let k = Reg::<u32>::from(*k);
        // Of what is listed the distance from the K-th of the largest usually says all.
        let narrow = Var::new(listed.as_u32());
        let upper = [Var::new(0u32), Var::new(0u32)];
        self.cluster.iter().for_each(Cluster::begin);
        repeat(|l| {
            let near = || run.count_from(low, smem.bins);
            when_else(narrow.get().ne(0), near, || run.count_high(smem.bins));
            sync_threads(); // ORDER: every key counted, before the bins are summed or sent.
            let found = self.find_topdown(smem.bins, k);
            fill(smem.bins, 0, *t);
            upper[0].set(found.bin);
            upper[1].set(found.above);
            // The last bin holds all that are further above, which is rarely the K-th key: then both digits.
            l.break_if(narrow.get().eq(0) | found.bin.ne(smem.bins.len() - 1));
            narrow.set(0u32);
            sync_threads(); // ORDER: the zeroed bins, before keys are counted again.
        });
        let [bin, above] = upper.map(|var| var.get());
        threshold.set(low + bin);
        ties.set(k - above);
        when(narrow.get().eq(0), || {
            run.count_low(bin, smem.low);
            sync_threads(); // ORDER: the low digits counted, before they are summed or sent; and the zeroed bins.
            let need = k - above;
            let digit = self.find_topdown(smem.low, need);
            threshold.set((bin << WARP_DIGIT_BITS) | digit.bin);
            ties.set(need - digit.above);
        });
    }
}

/// One way through the search: over supertops, over tops, or over keys.
struct Pass {
    /// Octets that are this CTA's.
    total: Reg<u32>,
    /// Where the first octet of all CTAs lies, of supertops their tops.
    from: Global<u32>,
    /// [`OF_TOPS`], [`OF_SUPERTOPS`], or 0 of keys.
    above: Reg<u32>,
    /// The list says which octets.
    listed: Pred,
    row: Row,
}

/// A finished selection, spread over the threads.
struct Selected {
    run: Run,
    places: Places,
    cut: Cut,
    /// With ids: the CTA's places, if there are others.
    slice: Option<Slice>,
}

/// The K-th key of an order, and how many of the keys equal to it belong to the first K.
#[derive(Clone, Copy)]
struct Cut {
    threshold: Reg<u32>,
    ties: Reg<u32>,
}

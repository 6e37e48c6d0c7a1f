//! `IndexerLocalTopk`: a rank's first N keys of every row as a B' row, and, if asked, pushed to every rank.
//!
//! ```text
//! order: a key precedes another if its order16 is larger, or equal with a lower local index
//! out[row] = BRow of the first min(length, N) keys: those above the N-th in index order, then those equal to it
//! push: pair c = (word 2c, e, word 2c + 1, e) to slot [e & 1][this rank][row] of every rank, e = next_epoch(epochs[row])
//! ```
//!
//! # Layout
//! Logits and tops of [`pitched_scratch`](dsa_core::layout::pitched_scratch); output rows of
//! [`b_row`](dsa_core::layout::b_row); slots of [`ll_slot`](dsa_core::layout::ll_slot). A local index is 17 bits, so a row
//! has at most 2^17 keys.
//!
//! # Algorithm
//! The [`topk`] module's, with N for K. The row is put together in shared memory, then copied and pushed from
//! there, 16 bytes a thread.
//!
//! # Decomposition
//! One CTA per row, or a cluster of CTAs ([`LocalTopkShape::for_launch`] says how many pay): each has consecutive keys of the row,
//! hence two runs of places, above the N-th key and at it, and writes and pushes those; 8-byte halves where two CTAs share a pair. To a word of
//! the planes several CTAs may add: they send theirs to the first, which writes and pushes them all. The outputs do not
//! depend on the number of CTAs. Rows beyond the live ones have no keys, but are written and pushed like the others: every
//! rank must take part in every row.
//!
//! # Synchronisation
//! CTA barriers, each with what it orders. Row ends are step metadata and are read before the dependency wait; logits, tops
//! and epochs after it. The push is made of relaxed 16-byte stores at system scope whose 8-byte halves each carry the
//! epoch: no fence and no flag. An epoch's counter moves only in the merge, after its own dependency wait, so this
//! kernel's wait covers it. A rank whose exchange has failed pushes nothing more.
//!
//! Between the CTAs of a row as in [`select`](crate::select): asynchronous stores, each exchange with its own mbarrier; every CTA passes the one
//! barrier of the cluster and waits for everything that is sent to it before it ends. Planes are sent where a row has more than
//! 2^16 keys, which all its CTAs see alike.
//!
//! # Bound
//! Latency, as select; with a push, also N (1 + 1/32) times 8 bytes per row and rank over the links: [`cost`].

mod kernel;
mod launch;

pub use kernel::{LocalTopkArgs, LocalTopkParams, build};
pub use launch::{IndexerLocalTopk, LocalTopkStep, Push};

use dsa_core::ShapeError;
use dsa_core::consts::{KEYS_PER_TOP, RANKS_MAX, TOPK_MAX, TOPK_MULTIPLE};
use dsa_core::layout::b_row::BRow;
use dsa_core::layout::ll_slot::PAIR_BYTES;

use crate::cost::Cost;
use crate::topk;

/// What a local top-k kernel is specialised for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LocalTopkShape {
    n: u32,
    cluster: u32,
    push_ranks: Option<u32>,
    foreign: bool,
}

impl LocalTopkShape {
    /// `n` keys per row, for a top-k of `topk` over all ranks.
    ///
    /// # Errors
    /// A top-k outside the limits; an `n` that is no multiple of 128 below it.
    pub fn new(n: usize, topk: usize) -> Result<Self, ShapeError> {
        let full = Self::full(topk)?;
        if n == 0 || !n.is_multiple_of(TOPK_MULTIPLE) || n >= topk {
            return Err(ShapeError::LocalTopkUnsupported { n, topk });
        }
        Ok(LocalTopkShape { n: n as u32, ..full })
    }

    /// All `topk` keys that a top-k over all ranks can take from a row: what a rank sends that nobody will ask for more.
    ///
    /// # Errors
    /// A top-k outside the limits.
    pub fn full(topk: usize) -> Result<Self, ShapeError> {
        if topk == 0 || !topk.is_multiple_of(TOPK_MULTIPLE) || topk > TOPK_MAX {
            return Err(ShapeError::TopkUnsupported { topk });
        }
        Ok(LocalTopkShape { n: topk as u32, cluster: 1, push_ranks: None, foreign: false })
    }

    /// Also pushes the rows to the slots of each of `ranks` ranks, this one's own included.
    ///
    /// # Errors
    /// Ranks outside 1..=16.
    pub fn with_push(self, ranks: usize) -> Result<Self, ShapeError> {
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(ShapeError::RanksOutOfRange { ranks });
        }
        Ok(LocalTopkShape { push_ranks: Some(ranks as u32), ..self })
    }

    /// `cluster` CTAs share each row.
    ///
    /// # Errors
    /// Others than 1, 2, 4 or 8.
    pub fn with_cluster(self, cluster: u32) -> Result<Self, ShapeError> {
        if !topk::may_share(cluster) {
            return Err(ShapeError::ClusterUnsupported { cluster });
        }
        Ok(LocalTopkShape { cluster, ..self })
    }

    /// With as many CTAs for each row as pay in a launch of `rows` rows of up to `length_max` local keys on a device of `sms`
    /// multiprocessors.
    pub fn for_launch(self, rows: usize, length_max: usize, sms: u32) -> Self {
        LocalTopkShape { cluster: topk::choose(rows, length_max, sms as usize), ..self }
    }

    /// For logits that this project's score did not write: any NaN pattern ranks lowest, -0 equals +0.
    pub fn with_foreign_logits(self, foreign: bool) -> Self {
        LocalTopkShape { foreign, ..self }
    }

    /// Keys per row.
    pub fn n(&self) -> u32 {
        self.n
    }

    /// CTAs that share a row.
    pub fn cluster(&self) -> u32 {
        self.cluster
    }

    /// Ranks that rows are pushed to.
    pub fn push_ranks(&self) -> Option<u32> {
        self.push_ranks
    }

    /// Layout of the output rows.
    pub fn row(&self) -> BRow {
        BRow::new(self.n as usize)
    }

    /// Entry name.
    pub fn name(&self) -> String {
        let cluster = if self.cluster > 1 { format!("_c{}", self.cluster) } else { String::new() };
        let push = self.push_ranks.map_or(String::new(), |ranks| format!("_push{ranks}"));
        let foreign = if self.foreign { "_foreign" } else { "" };
        format!("local_topk_n{}{cluster}{push}{foreign}", self.n)
    }

    /// Threads of a CTA.
    pub fn threads(&self) -> u32 {
        512
    }

    /// Registers of a thread at most, for a CTA to start beside score's.
    fn registers(&self) -> Option<u32> {
        (self.n / self.cluster <= 2048).then_some(64)
    }
}

/// Bytes of one step: tops and the vectors of N tops of each row, the output rows, and the pairs pushed to other ranks.
///
/// `lengths` are the clamped local lengths of all rows of the launch.
pub fn cost(shape: &LocalTopkShape, lengths: &[usize]) -> Cost {
    let n = shape.n as usize;
    let words = shape.row().words();
    let pushed = shape.push_ranks.map_or(0, |ranks| ranks as usize * words / 2 * PAIR_BYTES);
    let vector_bytes = 2 * KEYS_PER_TOP;
    let hbm_bytes = lengths
        .iter()
        .map(|&len| {
            let vectors = len.div_ceil(KEYS_PER_TOP);
            let read = match (len <= n, vectors <= n) {
                (true, _) => 2 * len,
                (_, true) => vectors * vector_bytes,
                _ => vectors * 2 + n * vector_bytes,
            };
            (read + words * 4 + 4 + pushed) as u64
        })
        .sum();
    Cost { hbm_bytes, flops: 0 }
}

//! `IndexerSelect`: the exact top-k of every row as physical KV rows in ascending key order.
//!
//! ```text
//! order: a key precedes another if its order16 is larger, or equal with a lower index
//! out[row, 0..count) = table[request, id / page] * block_rows + id % page,  ids = first K keys of that order, ascending
//! out[row, count..K) = -1,  count = min(max(end, 0), K)
//! A table entry that names no block of the cache gives -1 for its keys.
//! ```
//!
//! # Layout
//! Logits and tops as score writes them ([`tp_scratch`](dsa_core::layout::tp_scratch)). Every top of the pages up to a
//! row's end is present; keys past its end have logit +0 and count for nothing.
//!
//! # Algorithm
//! Rows of at most K keys take all of them, without reading logits. Of longer ones the `topk` module selects: the K
//! vectors with the largest tops, then the K keys among them, exactly and without a fallback; of the longest the K pages with
//! the largest tops first. The ids go through shared memory so that row stores are coalesced; the row's table waits there too
//! if it has at most 2048 entries.
//!
//! # Decomposition
//! One CTA per row, or a cluster of CTAs ([`SelectShape::for_launch`] says how many pay): each has consecutive keys of the row,
//! hence consecutive places of the output, and writes those. The outputs do not depend on the number of CTAs.
//!
//! # Synchronisation
//! CTA barriers, each with what it orders; between the CTAs of a row asynchronous stores into each other's shared memory, each
//! exchange with its own mbarrier. Every CTA passes the one barrier of the cluster, which says that all have started, and
//! waits for everything that is sent to it before it ends. Row ends and the table are step metadata and may be read before the
//! dependency wait; logits and tops after it. `hold` keeps the next kernel from starting early, for a consumer that reads
//! the rows without waiting.
//!
//! # Bound
//! Latency: about nine barriers and one dependent round of loads, twice or three times if there are lists, and the instructions
//! of four warps a scheduler; with several CTAs also two exchanges of digits, or three and one of a list; bytes are `tops` once,
//! of the longest rows K pages' again, K vectors of logits, and the outputs.

mod kernel;
mod launch;

pub use kernel::{SelectArgs, SelectParams, build};
pub use launch::{IndexerSelect, SelectStep};

use dsa_core::consts::{CONTEXT_MAX, KEYS_PER_TOP};
use dsa_core::shape::check_kv_page;
use dsa_core::{IndexShape, ShapeError};

use crate::cost::Cost;
use crate::topk;

/// What a select kernel is specialised for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SelectShape {
    topk: u32,
    page: u32,
    cluster: u32,
    ids: bool,
    hold: bool,
    foreign: bool,
}

impl SelectShape {
    /// `topk` keys per row, MLA pages of `page` tokens.
    ///
    /// # Errors
    /// `topk` or `page` outside the supported limits.
    pub fn new(topk: usize, page: usize) -> Result<Self, ShapeError> {
        IndexShape::new(0, 1, topk, CONTEXT_MAX)?;
        check_kv_page(page)?;
        let (topk, page) = (topk as u32, page as u32);
        Ok(SelectShape { topk, page, cluster: 1, ids: false, hold: false, foreign: false })
    }

    /// `cluster` CTAs share each row.
    ///
    /// # Errors
    /// Others than 1, 2, 4 or 8.
    pub fn with_cluster(self, cluster: u32) -> Result<Self, ShapeError> {
        if !topk::may_share(cluster) {
            return Err(ShapeError::ClusterUnsupported { cluster });
        }
        Ok(SelectShape { cluster, ..self })
    }

    /// With as many CTAs for each row as pay in a launch of `rows` rows of up to `length_max` keys on a device of `sms`
    /// multiprocessors, between two launches of score: as measured on an H200.
    pub fn for_launch(self, rows: usize, length_max: usize, sms: u32) -> Self {
        // Where clusters take more than half, score's next CTAs double up on the multiprocessors left, and a step becomes slower.
        let cluster = topk::choose(rows, length_max, sms as usize / 2);
        SelectShape { cluster, ..self }
    }

    /// Also writes the selected key indices.
    pub fn with_ids(mut self, ids: bool) -> Self {
        self.ids = ids;
        self
    }

    /// Does not let the next kernel start before this one has ended.
    pub fn with_hold(mut self, hold: bool) -> Self {
        self.hold = hold;
        self
    }

    /// For logits that this project's score did not write: any NaN pattern ranks lowest, -0 equals +0.
    pub fn with_foreign_logits(mut self, foreign: bool) -> Self {
        self.foreign = foreign;
        self
    }

    /// Keys per row.
    pub fn topk(&self) -> u32 {
        self.topk
    }

    /// Tokens per MLA page.
    pub fn page(&self) -> u32 {
        self.page
    }

    /// CTAs that share a row.
    pub fn cluster(&self) -> u32 {
        self.cluster
    }

    /// Whether ids are written.
    pub fn ids(&self) -> bool {
        self.ids
    }

    /// Entry name.
    pub fn name(&self) -> String {
        let flag = |set: bool, name: &str| if set { format!("_{name}") } else { String::new() };
        format!(
            "select_topk_k{}_page{}{}{}{}{}",
            self.topk,
            self.page,
            if self.cluster > 1 { format!("_c{}", self.cluster) } else { String::new() },
            flag(self.ids, "ids"),
            flag(self.hold, "hold"),
            flag(self.foreign, "foreign")
        )
    }

    /// Threads of a CTA: few enough for one to start beside score's, whose tail its prologue then hides behind.
    pub fn threads(&self) -> u32 {
        512
    }

    /// Registers of a thread at most, for the same reason.
    fn registers(&self) -> Option<u32> {
        (self.topk / self.cluster <= 2048).then_some(64)
    }
}

/// Bytes of one step: tops and K vectors of each row that is selected from, row outputs, ids.
///
/// `lengths` are the clamped row lengths.
pub fn cost(shape: &SelectShape, lengths: &[usize]) -> Cost {
    let topk = shape.topk as usize;
    let vector_bytes = 2 * KEYS_PER_TOP;
    let hbm_bytes = lengths
        .iter()
        .map(|&len| {
            let vectors = len.div_ceil(KEYS_PER_TOP);
            let read = match (len <= topk, vectors <= topk) {
                (true, _) => 0,
                (_, true) => vectors * vector_bytes,
                _ => vectors * 2 + topk * vector_bytes,
            };
            (read + topk * 4 * (1 + shape.ids as usize) + 4) as u64
        })
        .sum();
    Cost { hbm_bytes, flops: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_counts_what_each_length_reads() {
        let shape = SelectShape::new(128, 64).unwrap();
        let output = 128 * 4 + 4;
        assert_eq!(cost(&shape, &[128]).hbm_bytes, output);
        assert_eq!(cost(&shape, &[129]).hbm_bytes, 17 * 16 + output);
        assert_eq!(cost(&shape, &[1024]).hbm_bytes, 128 * 16 + output);
        assert_eq!(cost(&shape, &[1025]).hbm_bytes, 129 * 2 + 128 * 16 + output);
        assert_eq!(cost(&shape.with_ids(true), &[0, 0]).hbm_bytes, 2 * (output + 128 * 4));
    }
}

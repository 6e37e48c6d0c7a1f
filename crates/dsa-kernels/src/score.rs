//! `IndexerScore`: BF16 logits of every row over its request's paged FP8 keys.
//!
//! ```text
//! dot(t, h, k) = q[t, h] . key[k]                     FP32, FP8 tensor core
//! r            = bf16(relu(dot))
//! chain m      = fma_bf16 over heads m, m+4, .., m+28  (m = 0..4, from 0)
//! total        = (chain 0 + chain 2) + (chain 1 + chain 3)
//! logit        = bf16(total * key scale), -0 as +0, NaN as 0xFFFE
//! ```
//!
//! # Layout
//! Keys: pages of [`fp8_page`], each loaded whole (64 key rows and two rows of scale words) by
//! one tensor copy. Scratch: [`tp_scratch`](dsa_core::layout::tp_scratch), or
//! [`pitched_scratch`](dsa_core::layout::pitched_scratch), whose `tops` may be left out. Whole pages are written: keys from a
//! row's end to the end of its last page have logit +0 and top 0.
//!
//! Query heads are permuted on the way into shared memory: column `8 j + 2 c + b` of a row holds head
//! `4 (2 j + b) + c`. The accumulator layout then gives thread `c` of every four exactly the heads of chain `c`, in
//! order, for two keys: the specification's sum costs one BF16x2 FMA per head and two shuffles per row.
//!
//! # Decomposition
//! Persistent, one CTA per multiprocessor. The pages of all requests, in order, are cut into equal ranges, one per CTA,
//! so each page is read once per step whatever the lengths. A producer warp copies pages into a ring of shared-memory
//! stages. Four consumer warpgroups score them: with up to four rows a request, each takes every fourth page; with more, each
//! has one half of the rows and takes every second page. Per page one m64 x (32 rows) product, then the sums, then one warp of
//! the group stores the page's finished rows, a lane eight keys of a row and their top.
//!
//! # Synchronisation
//! `page_full[s]` (tensor copy -> consumers) and `page_empty[s]` (consumers' reads -> next copy) per stage;
//! `query_full` / `query_empty` likewise for the two query slots, whose row ends and weights the
//! producer writes with ordinary stores before it arrives. A named barrier a group (staged rows -> the storing warp). Row
//! ends and tables are step metadata and are read before the dependency wait; queries, keys and weights after it.
//!
//! # Bound
//! Memory: [`cost`] bytes over bandwidth up to q = 4. Beyond, the schedulers: on an H200 a page takes the cycles of its product
//! (64 q) and those of its instructions (about 80, and 20 a row, for each group that takes the page) one after the other, since
//! FP8 products leave the register file little bandwidth. Sustained, the power limit lowers the clock before either.

mod consume;
mod head_sum;
mod kernel;
mod launch;
mod schedule;

pub use kernel::{ScoreArgs, ScoreParams, build};
pub use launch::{IndexerScore, KeyCache, ScoreOutput, ScoreStep};

use dsa_core::consts::{CONTEXT_MAX, DIM, HEADS, PAGE, PITCH_MULTIPLE, Q_MAX, REQUESTS_MAX, TILE};
use dsa_core::layout::fp8_page::{self, ScaleForm};
use dsa_core::{IndexCacheShape, ShapeError};
use ptx::{DevicePtr, Swizzle, Target, TensorMapDesc, TensorMapError};

use crate::cost::Cost;

/// Where the logits go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScoreForm {
    /// Request-compact scratch with tops; requests whose rows all have at most `topk` keys are not scored.
    Compact {
        /// Keys that select picks.
        topk: u32,
    },
    /// Row `t` at `t * pitch`, every request scored.
    Pitched,
}

/// What a score kernel is specialised for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScoreShape {
    q: u32,
    form: ScoreForm,
    scale_form: ScaleForm,
    alone: bool,
}

impl ScoreShape {
    /// `q` rows per request.
    ///
    /// # Errors
    /// `q` outside 1..=8, or a top-k that select refuses.
    pub fn new(q: usize, form: ScoreForm, scale_form: ScaleForm) -> Result<Self, ShapeError> {
        if !(1..=Q_MAX).contains(&q) {
            return Err(ShapeError::RowsPerRequestOutOfRange { q });
        }
        if let ScoreForm::Compact { topk } = form {
            dsa_core::IndexShape::new(0, q, topk as usize, CONTEXT_MAX)?;
        }
        Ok(ScoreShape { q: q as u32, form, scale_form, alone: false })
    }

    /// Takes so much shared memory that a multiprocessor holds one CTA: where the kernel before fills some multiprocessors, two
    /// do not share another. CTAs of other kernels fit beside it only if
    /// [more shared memory is asked for](gpu::Function::prefer_shared_memory).
    pub fn with_alone(self, alone: bool) -> Self {
        ScoreShape { alone, ..self }
    }

    /// Rows per request.
    pub fn q(&self) -> u32 {
        self.q
    }

    /// Where the logits go.
    pub fn form(&self) -> ScoreForm {
        self.form
    }

    /// How a key's scale word is read.
    pub fn scale_form(&self) -> ScaleForm {
        self.scale_form
    }

    /// Entry name.
    pub fn name(&self) -> String {
        let form = match self.form {
            ScoreForm::Compact { topk } => format!("k{topk}"),
            ScoreForm::Pitched => "pitched".into(),
        };
        let scale = match self.scale_form {
            ScaleForm::Ue8m0 => "ue8m0",
            ScaleForm::Fp32 => "fp32",
        };
        let alone = if self.alone { "_alone" } else { "" };
        format!("score_keys_fp8_q{}_{form}_{scale}{alone}", self.q)
    }

    /// Parts that the rows are cut into; a consumer group has one of them, at most [`PART_ROWS_MAX`] rows.
    pub(crate) fn parts(&self) -> u32 {
        self.q.div_ceil(PART_ROWS_MAX)
    }

    /// Rows of a part; the last may have fewer.
    pub(crate) fn part_rows(&self) -> u32 {
        self.q.div_ceil(self.parts())
    }

    /// Teams of groups that take pages in turn: one group for each part.
    pub(crate) fn teams(&self) -> u32 {
        GROUPS / self.parts()
    }

    /// Shared memory for a group's finished rows of one page.
    fn staged_bytes(&self) -> u32 {
        self.part_rows() * kernel::STAGED_ROW_BYTES
    }

    /// Threads of a CTA: the consumer warpgroups and the producer warp.
    pub fn threads(&self) -> u32 {
        128 * GROUPS + 32
    }

    /// Every specialisation that a deployment can ask for at the given top-k values.
    pub fn all(topks: &[u32]) -> Vec<ScoreShape> {
        let forms = topks.iter().map(|&topk| ScoreForm::Compact { topk }).chain([ScoreForm::Pitched]);
        forms
            .flat_map(|form| {
                (1..=Q_MAX as u32).flat_map(move |q| {
                    [ScaleForm::Ue8m0, ScaleForm::Fp32].map(|scale_form| ScoreShape {
                        q,
                        form,
                        scale_form,
                        alone: false,
                    })
                })
            })
            .collect()
    }
}

/// The tensor map of a paged FP8 index cache at `base`, one page per copy.
///
/// # Errors
/// A base or stride off 16 bytes.
pub fn key_map(base: DevicePtr<u8>, cache: IndexCacheShape) -> Result<TensorMapDesc, TensorMapError> {
    let rows = (fp8_page::BYTES / DIM) as u64;
    TensorMapDesc::new(
        base.address(),
        &[DIM as u64, rows, cache.blocks().max(1) as u64],
        &[DIM as u64, cache.page_stride() as u64],
        &[DIM as u32, rows as u32, 1],
        Swizzle::B128,
    )
}

/// The tensor map of FP8 queries `[rows, 32, 128]` at `base`: one copy brings a request's `q` rows in chain order.
///
/// # Errors
/// A base off 16 bytes.
pub fn query_map(base: DevicePtr<u8>, rows: usize, q: u32) -> Result<TensorMapDesc, TensorMapError> {
    let head = DIM as u64;
    // Dimensions: byte, b, c, j, row for head 4 (2 j + b) + c.
    TensorMapDesc::new(
        base.address(),
        &[head, 2, 4, 4, rows.max(1) as u64],
        &[4 * head, head, 8 * head, HEADS as u64 * head],
        &[DIM as u32, 2, 4, 4, q],
        Swizzle::B128,
    )
}

/// Largest `length_max` that a pitched scratch of `pitch` elements per row allows.
///
/// # Errors
/// A pitch that is no positive multiple of 512.
pub fn check_pitch(pitch: usize) -> Result<usize, ShapeError> {
    if pitch == 0 || !pitch.is_multiple_of(PITCH_MULTIPLE) {
        return Err(ShapeError::BufferLength {
            buffer: "pitch",
            found: pitch,
            needed: pitch.next_multiple_of(512).max(512),
        });
    }
    Ok(pitch.min(CONTEXT_MAX))
}

/// Bytes and operations of one step: each page once, the queries and weights once per request, logits and tops written.
///
/// `lengths` are the clamped row lengths, `q` per request; tops count in the pitched form too.
pub fn cost(shape: &ScoreShape, lengths: &[usize]) -> Cost {
    let topk = match shape.form {
        ScoreForm::Compact { topk } => topk as usize,
        ScoreForm::Pitched => 0,
    };
    let q = shape.q as usize;
    let mut cost = Cost::default();
    for rows in lengths.chunks(q) {
        let longest = rows.iter().copied().max().unwrap_or(0);
        if longest <= topk {
            continue;
        }
        let keys = (longest.div_ceil(PAGE) * PAGE) as u64;
        cost.hbm_bytes += keys / PAGE as u64 * fp8_page::BYTES as u64;
        cost.hbm_bytes += (q * HEADS * (DIM + 2)) as u64;
        cost.hbm_bytes += keys * q as u64 * 2 + keys * q as u64 / 4;
        cost.flops += 2 * keys * (q * HEADS * DIM) as u64;
    }
    cost
}

/// Shared-memory stages of one page that fit beside the rest.
///
/// A multiple of the teams: then each stage has one team for good. Otherwise the groups that take a stage's next page could
/// look at its barrier while the copy before is still under way (copies may land in any order), and a parity cannot tell a
/// phase from the one two before it.
pub(crate) fn stages(shape: &ScoreShape, target: Target) -> u32 {
    let start = 4 * (REQUESTS_MAX as u32 + 1);
    let other = 1024 /* alignment */ + 1024 /* barriers, row ends */;
    let fit = (target.shared_bytes_max() - row_bytes(shape) - start - other) / STAGE_BYTES;
    let stages = fit.min(STAGES_MAX);
    stages - stages % shape.teams()
}

/// Shared memory of two items' queries and weights and of the finished rows.
fn row_bytes(shape: &ScoreShape) -> u32 {
    2 * shape.q * (HEADS * DIM + HEADS * 2) as u32 + 2 * GROUPS * shape.staged_bytes()
}

/// Shared memory that is left unused, of a kernel that shares no multiprocessor with itself.
pub(crate) fn spare_bytes(shape: &ScoreShape, stages: u32, target: Target) -> u32 {
    let used = stages * STAGE_BYTES + row_bytes(shape);
    if shape.alone { (shared_half(target) + 16).saturating_sub(used) } else { 0 }
}

/// What two CTAs of a multiprocessor can have each.
fn shared_half(target: Target) -> u32 {
    const RESERVED: u32 = 1024; // of each CTA, beside its own
    (target.shared_bytes_max() + RESERVED) / 2 - RESERVED
}

/// Consumer warpgroups: four warps a scheduler, so that sums hide behind other groups' products and each other's latency.
pub(crate) const GROUPS: u32 = 4;
/// Rows whose accumulators and weights fit the 96 registers a thread that so many groups leave.
const PART_ROWS_MAX: u32 = 4;
/// A stage is one page, padded to the 1024 bytes of the swizzle's period.
pub(crate) const STAGE_BYTES: u32 = (fp8_page::BYTES as u32).next_multiple_of(1024);
/// More stages do not raise the bandwidth, and keep the next kernel's CTAs from starting beside this one's.
const STAGES_MAX: u32 = 9;

const _: () = assert!(TILE == 2 * PAGE && fp8_page::BYTES.is_multiple_of(DIM));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_has_one_team_for_good() {
        for shape in ScoreShape::all(&[512, 2048]) {
            let stages = stages(&shape, Target::Sm90a);
            assert!(stages >= shape.teams() && stages.is_multiple_of(shape.teams()), "{}: {stages}", shape.name());
        }
    }

    #[test]
    fn alone_means_one_cta_a_multiprocessor() {
        for shape in ScoreShape::all(&[2048]) {
            let shared = |shape: &ScoreShape| build(shape, Target::Sm90a).unwrap().ir().shared_bytes;
            let (plain, alone, half) = (shared(&shape), shared(&shape.with_alone(true)), shared_half(Target::Sm90a));
            // What is not counted as used: the requests' first tiles, barriers, row ends.
            let most = plain.max(half) + 4 * (REQUESTS_MAX as u32 + 1) + 1024;
            assert!((half + 1..=most).contains(&alone), "{}: {plain}, {alone}", shape.name());
        }
    }

    #[test]
    fn cost_counts_each_page_once_whatever_q() {
        let cost_of =
            |q: usize, form, lengths: &[usize]| cost(&ScoreShape::new(q, form, ScaleForm::Ue8m0).unwrap(), lengths);
        let compact = ScoreForm::Compact { topk: 128 };
        // 65 keys take two pages; a request whose rows all fit top-k is not scored.
        let one = cost_of(1, compact, &[129, 128]);
        let keys = 192;
        assert_eq!(one.hbm_bytes, 3 * 8448 + 32 * 130 + keys * 2 + keys / 4);
        assert_eq!(one.flops, 2 * keys * 32 * 128);
        let two = cost_of(2, compact, &[129, 129]);
        assert_eq!(two.hbm_bytes, 3 * 8448 + 2 * (32 * 130 + keys * 2 + keys / 4));
        assert_eq!(two.flops, 2 * one.flops);
        assert_eq!(cost_of(1, compact, &[0, 1, 128]), Cost::default());
    }

    #[test]
    fn the_floor_is_the_larger_of_the_two_times() {
        let cost = Cost { hbm_bytes: 4_000_000, flops: 2_000_000 };
        assert_eq!(cost.floor_us(1e12, 1e12), 4.0);
        assert_eq!(cost.floor_us(1e12, 1e11), 20.0);
    }
}

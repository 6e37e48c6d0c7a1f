//! What a layer needs, and whether it can be served.

use dsa_core::consts::{PAGE, POOL_ROWS_MAX};
use dsa_core::layout::fp8_page::{self, ScaleForm};
use dsa_core::{IndexCacheShape, IndexShape, KvShape, ShapeError};
use dsa_kernels::score::{ScoreForm, ScoreShape};
use dsa_kernels::select::SelectShape;
use gpu::Device;
use ptx::Target;

use crate::scratch::ScratchSpec;

/// The sizes that a step is captured with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StepShape {
    /// Rows: requests x `q`. The live rows of a step may be fewer.
    pub rows: usize,
    /// Rows per request.
    pub q: usize,
}

impl std::fmt::Display for StepShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} rows at q = {}", self.rows, self.q)
    }
}

/// What is known of a layer before its caches exist: plain numbers, validated by
/// [`FusedIndexer::supports`](crate::FusedIndexer::supports).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSpec {
    /// Keys picked per row.
    pub topk: usize,
    /// Longest context, in tokens.
    pub context_len_max: usize,
    /// How a key's scale word is read.
    pub scale_form: ScaleForm,
    /// Tokens per page of the indexer cache; 64.
    pub index_page: usize,
    /// Pages of the indexer cache; 0 only for steps of no rows.
    pub index_blocks: usize,
    /// Bytes from one page of the indexer cache to the next, below 2^40: a stride of a tensor copy.
    pub index_page_stride: usize,
    /// Tokens per page of the MLA cache, a power of two up to 2^20.
    pub kv_page: usize,
    /// MLA cache rows from one block to the next, below 2^31.
    pub kv_block_rows: usize,
    /// Blocks of the MLA cache.
    pub kv_blocks: usize,
}

impl LayerSpec {
    /// Sizes of the indexer cache.
    ///
    /// # Errors
    /// A stride or a number of blocks outside the limits.
    pub fn index_cache(&self) -> Result<IndexCacheShape, ShapeError> {
        IndexCacheShape::new(self.index_blocks, fp8_page::BYTES, self.index_page_stride)
    }

    /// Sizes of the MLA cache.
    ///
    /// # Errors
    /// A page that is no power of two, overlapping blocks, or a pool of 2^31 rows or more.
    pub fn kv(&self) -> Result<KvShape, ShapeError> {
        KvShape::new(self.kv_page, self.kv_block_rows, self.kv_blocks)
    }

    /// The score kernel of steps of `shape`.
    pub(crate) fn score_shape(&self, shape: StepShape) -> Result<ScoreShape, ShapeError> {
        // A top-k that does not fit is none that is supported.
        let topk = u32::try_from(self.topk).map_err(|_| ShapeError::TopkUnsupported { topk: self.topk })?;
        ScoreShape::new(shape.q, ScoreForm::Compact { topk }, self.scale_form)
    }

    /// The score kernel of steps of `shape` of a rank that has a part of the context.
    pub(crate) fn pitched_score_shape(&self, shape: StepShape) -> Result<ScoreShape, ShapeError> {
        ScoreShape::new(shape.q, ScoreForm::Pitched, self.scale_form)
    }

    /// The select kernel of one CTA per row, without ids and hold.
    pub(crate) fn select_shape(&self) -> Result<SelectShape, ShapeError> {
        SelectShape::new(self.topk, self.kv_page)
    }

    /// The longest row that can occur: no row has more keys than the cache.
    pub fn row_len_max(&self) -> usize {
        self.context_len_max.min(self.index_blocks.saturating_mul(PAGE))
    }
}

/// Why the fused indexer cannot serve a layer's steps.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// `q`, rows, top-k, page strides, KV pages or the size of the KV pool are outside the limits.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The device's architecture has no kernels.
    #[error("compute capability {}.{}: the score kernel is built for {needed}", .found.0, .found.1)]
    Architecture {
        /// The device's compute capability (major, minor).
        found: (u32, u32),
        /// The target that has kernels.
        needed: Target,
    },
    /// An indexer page of another size.
    #[error("indexer pages of {found} tokens: {PAGE} needed")]
    IndexPage {
        /// Tokens per page.
        found: usize,
    },
    /// An indexer cache whose pages lie further apart than a tensor copy can step.
    #[error("indexer pages {found} bytes apart: below 2^40 needed, the largest stride of a tensor copy")]
    IndexPageStride {
        /// Bytes from one page to the next.
        found: usize,
    },
    /// Rows over an indexer cache without pages.
    #[error("{rows} rows over an indexer cache of no pages: at least one page needed")]
    NoIndexPages {
        /// Rows of the step.
        rows: usize,
    },
    /// MLA blocks further apart than a physical row can number.
    #[error("KV blocks {found} rows apart: at most {POOL_ROWS_MAX} needed, physical rows are 32-bit")]
    KvBlockRows {
        /// Rows from one block to the next.
        found: usize,
    },
    /// More rows than the scratch holds.
    #[error("{rows} rows: the scratch holds {rows_max}")]
    ScratchRows {
        /// Rows of the step.
        rows: usize,
        /// Rows reserved.
        rows_max: usize,
    },
    /// A context longer than a row of the scratch.
    #[error("rows of up to {length} keys: the scratch holds {length_max}")]
    ScratchLength {
        /// Keys of the longest row that can occur.
        length: usize,
        /// Keys reserved per row.
        length_max: usize,
    },
    /// A top-k larger than an output row of the scratch.
    #[error("top-k {topk}: the scratch holds {topk_max} per row")]
    ScratchTopk {
        /// Keys picked per row.
        topk: usize,
        /// Keys reserved per row.
        topk_max: usize,
    },
    /// A layer of another top-k or context than the scratch that its ranks share.
    #[error(
        "a layer of top-{topk} over {context_len_max} tokens: the ranks share a scratch of top-{of_topk} over {of_context_len_max}"
    )]
    ScratchShared {
        /// Keys picked per row.
        topk: usize,
        /// The layer's longest context, in tokens.
        context_len_max: usize,
        /// The scratch's keys per row.
        of_topk: usize,
        /// The scratch's longest context, in tokens.
        of_context_len_max: usize,
    },
    /// Steps that no transport between the ranks serves.
    #[error("{rows} rows cannot be exchanged: {reason}")]
    NoTransport {
        /// Rows of the step.
        rows: usize,
        /// Why not.
        reason: String,
    },
    /// Ids asked for, but the scratch was reserved without them.
    #[error("ids were asked for, but the scratch was reserved without room for them")]
    ScratchIds,
}

/// Strides of a tensor copy are below this many bytes.
const INDEX_PAGE_STRIDE_END: usize = 1 << 40;

/// The first reason why steps of `shape` of `layer` cannot run on `device` over a scratch of `scratch`.
pub(crate) fn supports(
    device: &Device,
    scratch: &ScratchSpec,
    layer: &LayerSpec,
    shape: StepShape,
) -> Result<(), Unsupported> {
    check_layer(device, layer, shape)?;
    layer.score_shape(shape)?;
    layer.select_shape()?;
    if shape.rows > scratch.rows_max {
        return Err(Unsupported::ScratchRows { rows: shape.rows, rows_max: scratch.rows_max });
    }
    if layer.topk > scratch.topk {
        return Err(Unsupported::ScratchTopk { topk: layer.topk, topk_max: scratch.topk });
    }
    if layer.row_len_max() > scratch.length_max {
        return Err(Unsupported::ScratchLength { length: layer.row_len_max(), length_max: scratch.length_max });
    }
    scratch.validate()?;
    Ok(())
}

/// As [`supports`], for what does not depend on a scratch.
pub(crate) fn check_layer(device: &Device, layer: &LayerSpec, shape: StepShape) -> Result<(), Unsupported> {
    if device.info().target != Some(Target::Sm90a) {
        return Err(Unsupported::Architecture { found: device.info().compute_capability, needed: Target::Sm90a });
    }
    IndexShape::from_rows(shape.rows, shape.q, layer.topk, layer.context_len_max)?;
    if layer.index_page != PAGE {
        return Err(Unsupported::IndexPage { found: layer.index_page });
    }
    layer.index_cache()?;
    if layer.index_page_stride >= INDEX_PAGE_STRIDE_END {
        return Err(Unsupported::IndexPageStride { found: layer.index_page_stride });
    }
    if layer.index_blocks == 0 && shape.rows > 0 {
        return Err(Unsupported::NoIndexPages { rows: shape.rows });
    }
    layer.kv()?;
    // A pool of no blocks, which is one of unknown size, says nothing of their distance.
    if layer.kv_block_rows as u64 > POOL_ROWS_MAX {
        return Err(Unsupported::KvBlockRows { found: layer.kv_block_rows });
    }
    Ok(())
}

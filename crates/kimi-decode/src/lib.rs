//! The lightning indexer as one decode layer: score, then select, over scratch that all layers of a device share.
//!
//! - [`IndexerScratch`]: logits, tops, outputs and compiled kernels, reserved once per device.
//! - [`FusedIndexer`]: one layer. [`FusedIndexer::supports`] says why a step cannot be served; [`FusedIndexer::run`]
//!   launches the two kernels, allocating and waiting for nothing, so it can be captured in a [`gpu::Graph`].
//! - [`DcpScratch`], [`FusedIndexer::sharded`]: the same for contexts that are spread over ranks.
//!   [`FusedIndexer::run_exchange`] selects exactly what one device with the whole context would.
//! - [`DecodeLayer`]: the MLA query before it, or beside its end.
//! - [`step_file`]: decode steps as safetensors files, with expected answers; [`check`] compares a device's answer.
//!
//! ```
//! use dsa_core::{generate::StepSpec, layout::fp8_page::ScaleForm};
//! use kimi_decode::{FusedIndexer, IndexerConfig, IndexerScratch, LayerSpec, ScratchSpec, Step, StepShape, StepTable};
//!
//! // Two requests of one row: one picks its 128 best keys of 200, the other takes all its 5.
//! let input = StepSpec::new(7, 1, 128, &[200, 5]).build()?;
//! let device = gpu::Device::simulated(gpu::SimConfig::default());
//! let stream = device.stream()?;
//!
//! let spec = ScratchSpec { rows_max: 2, length_max: input.context_len_max, topk: 128, ids: true };
//! let scratch = IndexerScratch::reserve(&device, spec)?;
//! let cache = device.upload(&input.cache)?;
//! let shape = StepShape { rows: 2, q: 1 };
//! let layer = LayerSpec {
//!     topk: 128,
//!     context_len_max: input.context_len_max,
//!     scale_form: ScaleForm::Ue8m0,
//!     index_page: 64,
//!     index_blocks: input.blocks,
//!     index_page_stride: input.page_stride,
//!     kv_page: input.kv_page,
//!     kv_block_rows: input.kv_block_rows,
//!     kv_blocks: 16,
//! };
//! let indexer = FusedIndexer::new(IndexerConfig {
//!     scratch: &scratch,
//!     layer,
//!     keys: cache.as_view(),
//!     shapes: &[shape],
//!     hold: &[],
//!     ids: true,
//! })?;
//!
//! let (queries, weights) = (device.upload(&input.queries)?, device.upload(&input.weights)?);
//! let row_ends = device.upload(&input.row_ends)?;
//! let (table, kv_table) = (device.upload(&input.table)?, device.upload(&input.kv_table)?);
//! let selected = indexer.run(
//!     &stream,
//!     &Step {
//!         shape,
//!         queries: queries.as_view(),
//!         weights: weights.as_view(),
//!         row_ends: row_ends.as_view(),
//!         index_table: StepTable::per_request(table.as_view(), input.table_stride, input.table_width),
//!         kv_table: StepTable::per_request(kv_table.as_view(), input.kv_table_stride, input.kv_table_width),
//!     },
//! )?;
//! assert_eq!(selected.counts.copy_to_vec(&stream)?, [128, 5]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod check;
mod dcp;
mod decode_layer;
mod error;
mod indexer;
mod kernels;
mod layer;
mod scratch;
mod step;
pub mod step_file;

pub use dcp::{DcpGroup, DcpScratch, DcpSpec, Transport};
pub use decode_layer::DecodeLayer;
pub use error::Error;
pub use indexer::{DcpIndexerConfig, FusedIndexer, IndexerConfig, Packed, Selected, Sharded, Whole};
pub use layer::{LayerSpec, StepShape, Unsupported};
pub use scratch::{IndexerScratch, ScratchSpec};
pub use step::{Step, StepTable, TablePer};

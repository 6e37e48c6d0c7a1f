//! The lightning indexer's kernels: [`score`] (FP8 keys to BF16 logits), [`select`] (logits to the exact top-k) and
//! [`local_topk`] (logits of one rank to its share of a top-k over several).
//!
//! [`IndexerScore`](score::IndexerScore), [`IndexerSelect`](select::IndexerSelect) and
//! [`IndexerLocalTopk`](local_topk::IndexerLocalTopk) are the kernels loaded on a device: they check what the host can
//! see, then launch without allocating or waiting.
//!
//! Each kernel module follows one order: what it computes, layout, decomposition, synchronisation, bound; then the
//! validated shape, the arguments, `build`, and `cost`.
#![forbid(unsafe_code)]

pub mod cost;
pub mod error;
pub mod local_topk;
pub mod rows;
pub mod score;
pub mod select;
pub mod table;
pub mod topk;

pub use cost::Cost;
pub use error::KernelError;
pub use table::Table;

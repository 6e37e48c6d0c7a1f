//! The lightning indexer's kernels: [`score`] (FP8 keys to BF16 logits) and [`select`] (logits to the exact top-k).
//!
//! [`IndexerScore`](score::IndexerScore) and [`IndexerSelect`](select::IndexerSelect) are the kernels loaded on a
//! device: they check what the host can see, then launch without allocating or waiting.
//!
//! Each kernel module follows one order: what it computes, layout, decomposition, synchronisation, bound; then the
//! validated shape, the arguments, `build`, and `cost`.
#![forbid(unsafe_code)]

pub mod cost;
pub mod error;
mod rows;
pub mod score;
pub mod select;
pub mod table;
mod topk;

pub use cost::Cost;
pub use error::KernelError;
pub use table::Table;

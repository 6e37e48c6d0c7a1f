//! The lightning indexer's kernels: [`score`] (FP8 keys to BF16 logits) and [`select`] (logits to the exact top-k).
//!
//! Each kernel module follows one order: what it computes, layout, decomposition, synchronisation, bound; then the
//! validated shape, the arguments, `build`, and `cost`.
#![forbid(unsafe_code)]

pub mod cost;
pub mod error;
mod rows;
pub mod score;
pub mod select;

pub use cost::Cost;
pub use error::KernelError;

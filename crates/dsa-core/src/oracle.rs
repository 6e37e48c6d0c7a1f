//! Scalar, sequential, obvious answers that the kernels are held to. Nothing here shares code with a kernel.

pub mod merge;
pub mod mla_query;
pub mod score;
pub mod select;
pub mod step;

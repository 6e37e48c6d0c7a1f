//! What the kernels of the sparse-attention front end agree on, host side: number formats, memory layouts, limits,
//! validated shapes, scalar oracles, and the named input generators that tests and benches share.
#![forbid(unsafe_code)]

pub mod consts;
pub mod error;
pub mod layout;
pub mod numerics;
pub mod oracle;
pub mod shape;
pub mod step;

pub use error::ShapeError;
pub use shape::{IndexCacheShape, IndexShape, KvShape};
pub use step::DecodeStep;

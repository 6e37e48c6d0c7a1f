//! What the kernels of the sparse-attention front end agree on, host side: number formats, memory layouts, limits,
//! validated shapes, scalar oracles, and the named input generators that tests and benches share.
//!
//! ```
//! use dsa_core::generate::StepSpec;
//! use dsa_core::oracle::{score::dot_exact, step};
//!
//! // Two requests of two rows each; the second one's last row sees no key.
//! let step = StepSpec::new(42, 2, 128, &[300, 301, 5, 0]).build()?;
//! let logits = step::logits(&step, dot_exact);
//! let selected = step::select(&step, &logits)?;
//! assert_eq!(selected.iter().map(|row| row.count).collect::<Vec<_>>(), [128, 128, 5, 0]);
//! # Ok::<(), dsa_core::ShapeError>(())
//! ```
#![forbid(unsafe_code)]

pub mod consts;
pub mod device;
pub mod error;
pub mod generate;
pub mod layout;
pub mod numerics;
pub mod oracle;
pub mod ownership;
pub mod shape;
mod shard;
pub mod step;

pub use error::ShapeError;
pub use ownership::Ownership;
pub use shape::{IndexCacheShape, IndexShape, KvShape};
pub use step::DecodeStep;

//! The MLA query of a decode step: normalises the compressed query and the new KV row, projects and absorbs the query of
//! every head, and writes the KV row into its page.
//!
//! [`MlaQuery`] is the kernel of one [`MlaShape`] loaded on a device: it checks what the host can see, then launches
//! without allocating or waiting. The module [`query`] says what it computes and how.
#![forbid(unsafe_code)]

pub mod error;
pub mod plan;
pub mod query;
pub mod shape;
pub mod tiled;

pub use error::MlaError;
pub use plan::{MlaPlan, MlaRequest};
pub use query::{MlaCache, MlaQuery, MlaStep, MlaWeights};
pub use shape::{MlaShape, Publication};

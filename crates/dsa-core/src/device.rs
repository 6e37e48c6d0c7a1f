//! Device forms of the shared numerics and of the scan and radix helpers, as kernel-builder functions.
//!
//! Each has its host form in [`crate::numerics`] or a one-line definition in its doc, and tests that run both.

pub mod keys;
pub mod ownership;
pub mod radix;
pub mod scan;

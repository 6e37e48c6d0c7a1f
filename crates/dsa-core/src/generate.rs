//! Named, seeded inputs that tests and benches share. The same name and seed give the same bits on every machine.

pub mod logits;
pub mod rng;
pub mod step;

pub use logits::LogitPattern;
pub use rng::SplitMix64;
pub use step::{Contents, StepSpec};

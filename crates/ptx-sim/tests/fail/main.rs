//! Tiny failing kernels, one per fault: each must end in its trap, at the Rust line at fault.

#[path = "../common/mod.rs"]
mod common;

mod asynchronous;
mod clusters;
mod convergence;
mod mbarriers;
mod memory;
mod mma;
mod multicast;
mod progress;
mod races;
mod thread_copies;

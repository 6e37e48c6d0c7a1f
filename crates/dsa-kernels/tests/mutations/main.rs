//! Does the simulator notice? Each test breaks a real kernel in one place and demands a fault of the right kind that
//! names the Rust file.
//!
//! Two of the simulator's checks have no mutation here: these kernels give the asynchronous proxy nothing that ordinary
//! stores wrote, and they contain no `trap`.

#[path = "../common/mod.rs"]
mod common;
mod local_topk;
mod score;
mod select;
mod select_cluster;

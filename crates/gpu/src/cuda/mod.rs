//! The CUDA backend: raw driver calls, each on a bound context and each result checked.

mod context;
pub(crate) mod driver;
mod graph;
mod ipc;
mod launch;
mod memory;
mod module;
mod nccl;
mod stream;

pub(crate) use context::Context;
pub(crate) use graph::{Capture, Graph};
pub(crate) use ipc::{HANDLE_BYTES, Mapping};
pub(crate) use launch::Launch;
pub(crate) use module::{Attributes, Loaded};
pub(crate) use nccl::{ID_BYTES, NcclComm, unique_id, version as nccl_version};
pub(crate) use stream::{Event, Stream};

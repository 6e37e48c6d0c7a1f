//! Devices, buffers, streams, events, graphs and launches, on CUDA or on the simulator.
//!
//! A [`Device`] is one or the other; code that uses it does not know which. Kernels come from the `ptx` crate and are
//! compiled when they are [loaded](Device::load), never on the hot path: a [launch](Function::launch) allocates
//! nothing and waits for nothing.
//!
//! - **No GPU, old driver, wrong architecture**: a typed [`Error`] that names what was found and what is needed. The
//!   driver is looked up at run time, so the same binary runs with and without one.
//! - **Interoperation**: the device's primary context is used, so handles and addresses of other libraries in the
//!   process are valid here. [`Device::from_cuda`], [`Stream::from_cuda`] and [`Device::wrap_cuda`] take what an engine
//!   already has.
//! - **Other processes and nodes**: [`View::ipc_handle`] and [`Device::open_ipc`] map memory of other processes on the
//!   same node; [`nccl`] gathers over whatever links there are. NCCL too is looked up at run time.
//! - **Threads**: every handle is `Send + Sync`; each driver call, drops included, first makes its own context current
//!   on the calling thread. The thread's current context is left changed, as the bindings do.
//! - **Faults**: an illegal access surfaces at a later call. Every call from then on reports that first fault, with the
//!   kernel it suspects; dropping what belongs to the device stays safe.
//!
//! This is the only crate with `unsafe` code. Launching is safe Rust: device memory is outside the language's model,
//! and what keeps a kernel inside its buffers is the kernel (and the simulator that checks it).

mod buffer;
mod cuda;
mod device;
mod error;
mod function;
mod graph;
mod ipc;
mod jit;
pub mod nccl;
mod sim;
mod stream;

pub use buffer::{Buffer, View};
pub use device::{Device, DeviceInfo, L2Promotion, Version};
pub use error::Error;
pub use function::{Function, LaunchConfig};
pub use graph::{Graph, GraphInfo};
pub use ipc::IpcHandle;
pub use jit::JitReport;
pub use stream::{Event, Stream};

/// A simulated machine's size and behaviour, for [`Device::simulated`], and how its runs can end, for [`Error::Sim`].
pub use ptx_sim::{Config as SimConfig, Fault as SimFault, SimError, Trap as SimTrap, TrapKind as SimTrapKind};

/// The bindings that [`Device::from_cuda`], [`Stream::from_cuda`] and [`Device::wrap_cuda`] interoperate with.
pub use cudarc;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_handle_crosses_threads() {
        fn check<T: Send + Sync>() {}
        check::<Device>();
        check::<Stream>();
        check::<Event>();
        check::<Buffer<u32>>();
        check::<View<'static, u32>>();
        check::<Function<()>>();
        check::<Graph>();
        check::<IpcHandle>();
        check::<nccl::Communicator>();
        check::<Error>();
    }
}

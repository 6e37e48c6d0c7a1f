//! Kernels as Rust functions: a typed builder over one PTX instruction list, its verifier and its printer.
//!
//! A kernel is built at run time by ordinary Rust: plain `if` and `for` specialise and unroll, [`when`],
//! [`for_range`] and friends decide on the device. The same [`KernelIr`] is printed as PTX for the driver and executed
//! by the simulator crate, so what is tested is what runs.
//!
//! ```
//! use ptx::*;
//!
//! kernel_args! {
//!     /// `y += a * x`
//!     pub struct AxpyArgs / AxpyParams {
//!         /// [n] in and out
//!         pub y: DevicePtr<f32>,
//!         /// [n] input
//!         pub x: DevicePtr<f32>,
//!         /// factor
//!         pub a: f32,
//!         /// elements
//!         pub n: u32,
//!     }
//! }
//!
//! let kernel = build::<AxpyArgs>("axpy", Target::Sm90a, LaunchBounds::threads(256), |p| {
//!     let i = cta_index().mad(256, thread_index());
//!     when(i.lt(p.n), || {
//!         let y = p.y.at(i);
//!         y.store(p.x.at(i).load().fma(p.a, y.load()));
//!     });
//! })?;
//! assert!(kernel.ptx().contains("fma.rn.f32"));
//! # Ok::<(), ptx::VerifyError>(())
//! ```
#![forbid(unsafe_code)]

pub mod args;
mod async_copy;
mod builder;
mod cluster;
mod control;
mod convert;
mod divide;
mod kernel;
mod memory;
mod mma;
mod multicast;
pub mod op;
pub mod print;
pub mod slots;
mod tensor_map;
mod ty;
mod value;
pub mod verify;
mod warp;
mod wgmma;

pub use args::{ArgBuffer, DevicePtr, KernelArgs};
pub use async_copy::*;
pub use builder::{bounds, build, target};
pub use cluster::*;
pub use control::*;
pub use convert::e4m3x2_from_f32;
pub use kernel::{Inst, Kernel, KernelIr, LaunchBounds, SharedField, Target};
pub use memory::*;
pub use mma::MmaTile;
pub use multicast::Multicast;
pub use op::{Atomic, Math, Redux, Scope, Sem, Shuffle, Special};
pub use tensor_map::*;
pub use ty::{Bf16, Bf16x2, Class, Elem, F16x2, Int, Num, Scalar, Ty};
pub use value::{Pred, Reg, Var};
pub use verify::VerifyError;
pub use warp::*;
pub use wgmma::*;

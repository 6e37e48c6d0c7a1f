//! Executes the instruction list of a [`ptx`] kernel on the CPU, warp by warp, and checks what a GPU does not: bounds,
//! alignment, initialisation, races, divergence, deadlock, asynchronous operations.
//!
//! | file | holds |
//! |---|---|
//! | [`Machine`] (`machine`) | devices, streams, the loop that runs warps |
//! | `grid`, `block`, `warp`, `registers`, `warpgroup` | state of a launch, a CTA, a warp |
//! | `memory`, `shared`, `bits` | device and shared memory |
//! | `program` | a kernel in executable form |
//! | `step` | the meaning of every instruction, by family |
//! | `schedule`, `random`, `world` | order of warps, random choices, what everybody shares |
//! | [`Trap`] (`trap`) | every way a run can fail |
//! | [`numeric`] | arithmetic of one lane, bit for bit |
//! | [`race`], [`mbarrier`], [`stream`], [`tensor_copy`], [`wgmma`] | models of their own, tested by themselves |
//!
//! Three outcomes, never blurred: finished; a [`Trap`] is the kernel's fault; a [`SimError`] is the simulator's.
//! `MODEL.md` lists what is modelled, what is not, and what that means for false alarms and missed bugs.
//!
//! ```
//! use ptx::*;
//! use ptx_sim::*;
//!
//! kernel_args! {
//!     /// `y[i] = i`
//!     pub struct IotaArgs / IotaParams {
//!         /// [32] output
//!         pub y: DevicePtr<u32>,
//!     }
//! }
//! let kernel = build::<IotaArgs>("iota", Target::Sm90a, LaunchBounds::threads(32), |p| {
//!     p.y.at(thread_index()).store(thread_index());
//! })?;
//! let mut machine = Machine::new(Config::default());
//! let stream = machine.create_stream(DeviceId(0));
//! let y = machine.alloc(DeviceId(0), 128)?;
//! let params = ArgBuffer::pack(&IotaArgs { y: DevicePtr::from_address(y) }).bytes().to_vec();
//! let launch = Launch { kernel: kernel.ir().clone(), grid: [1, 1, 1], shared_bytes: 0, params, overlap: false };
//! machine.enqueue(stream, Command::Launch(launch))?;
//! machine.run()?;
//! let mut last = [0; 4];
//! machine.read(y + 124, &mut last)?;
//! assert_eq!(u32::from_le_bytes(last), 31);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod bits;
mod block;
mod cluster;
mod config;
mod delayed;
mod grid;
mod machine;
pub mod mbarrier;
mod memory;
pub mod numeric;
mod program;
pub mod race;
mod random;
mod registers;
mod schedule;
mod shared;
mod step;
pub mod stream;
pub mod tensor_copy;
mod trap;
mod warp;
mod warpgroup;
pub mod wgmma;
mod world;

pub use config::{Config, DeviceId, Schedule, Timing};
pub use machine::{Command, Launch, Machine};
pub use memory::POISON;
pub use shared::BASE as SHARED_BASE;
pub use stream::{EventId, StreamId};
pub use trap::{Fault, LaunchError, MemoryError, SimError, Trap, TrapKind};

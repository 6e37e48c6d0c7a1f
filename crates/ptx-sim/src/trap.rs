//! Every way a run can end other than well. A [`Trap`] is the kernel's fault, a [`SimError`] is ours.

use std::fmt;

use crate::block::Issuer;
use crate::config::{DeviceId, Schedule, Timing};
use crate::race::Race;

/// What a kernel did wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrapKind {
    /// Access outside every allocation, or outside the CTA's shared memory.
    OutOfBounds,
    /// Access that is not aligned to its size.
    Misaligned,
    /// Read of a register, or of shared or device memory, that nothing wrote.
    Uninitialized,
    /// Access to a freed buffer, or to the shared memory of a CTA that has ended.
    Freed,
    /// Part of a warp executed an instruction that the whole warp must execute together.
    Divergent,
    /// Lanes named in the mask of a collective do not take part.
    Collective,
    /// Participants of a barrier, or the warps of a warpgroup, disagree about it.
    Mismatch,
    /// Nothing can run, but work is unfinished.
    Deadlock,
    /// The run used up its fuel: probably a livelock.
    FuelExhausted,
    /// A CTA ended while asynchronous operations, or its cluster, may still use its memory or registers.
    ExitInFlight,
    /// The bytes that arrived at an mbarrier do not fit what it expects.
    ExpectTx,
    /// Misuse of an mbarrier: not initialised, too many arrivals, plain access to its bytes.
    Mbarrier,
    /// Access to the destination of an asynchronous operation before the wait that covers it.
    ResultPending,
    /// Write to memory or registers that an asynchronous operation still reads.
    OperandInUse,
    /// A warpgroup MMA without `wgmma.fence` since its registers could be accessed.
    WgmmaFence,
    /// Shared memory written by ordinary stores is read asynchronously without `fence.proxy.async`.
    ProxyFence,
    /// Two accesses without an ordering between them, at least one a write.
    DataRace,
    /// An operand that the instruction does not accept.
    Operand,
    /// The `trap` instruction.
    TrapInstruction,
}

/// A fault of a kernel: where, who, what, and how to see it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trap {
    /// Class of the fault.
    pub kind: TrapKind,
    /// Kernel name.
    pub kernel: String,
    /// Rust `file:line:column` that emitted the instruction.
    pub at: String,
    /// Device that executed it.
    pub device: DeviceId,
    /// CTA index in the grid.
    pub cta: [u32; 3],
    /// Warp index in the CTA.
    pub warp: u32,
    /// Lane, if one lane is at fault.
    pub lane: Option<u32>,
    /// Address, if memory is concerned.
    pub address: Option<u64>,
    /// What happened, with numbers.
    pub message: String,
    /// Schedule to replay it with.
    pub schedule: Schedule,
    /// Timing to replay it with.
    pub timing: Timing,
}

impl fmt::Display for Trap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Trap { kind, kernel, at, device, cta: [x, y, z], warp, message, .. } = self;
        write!(
            f,
            "{kind:?} in kernel {kernel} at {at}: {message} (device {}, CTA ({x}, {y}, {z}), warp {warp}",
            device.0
        )?;
        if let Some(lane) = self.lane {
            write!(f, ", lane {lane}")?;
        }
        if let Some(address) = self.address {
            write!(f, ", address {address:#x}")?;
        }
        write!(f, "); replay with {:?}, {:?}", self.schedule, self.timing)
    }
}

impl std::error::Error for Trap {}

/// Something that the simulator cannot do. Never a verdict about the kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimError {
    /// An instruction form that is not simulated.
    #[error("kernel {kernel} at {at}: {what} is not simulated")]
    Unsupported {
        /// Kernel name.
        kernel: String,
        /// Rust `file:line:column` that emitted the instruction.
        at: String,
        /// The form.
        what: String,
    },
    /// Streams wait for each other, or for an event that no stream will record.
    #[error("streams cannot proceed: {0}")]
    StreamsStuck(String),
    /// A queued host command failed.
    #[error("queued command failed: {0}")]
    Command(#[from] MemoryError),
}

/// Why [`run`](crate::Machine::run) stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The kernel is at fault.
    #[error("{0}")]
    Trap(Box<Trap>),
    /// The simulator is.
    #[error("simulator: {0}")]
    Sim(#[from] SimError),
}

/// A host-side memory request that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// No such device.
    #[error("device {0} does not exist")]
    NoDevice(u32),
    /// Over the device's limit.
    #[error("device {device} has {free} of {capacity} bytes left, {requested} are needed")]
    OutOfMemory {
        /// Device.
        device: u32,
        /// Bytes asked for.
        requested: u64,
        /// Bytes left.
        free: u64,
        /// The device's limit.
        capacity: u64,
    },
    /// Not an allocation's start.
    #[error("{0:#x} is not the start of an allocation")]
    NotAllocated(u64),
    /// The allocation was freed before.
    #[error("{0:#x} was freed already")]
    Freed(u64),
    /// Not 256-byte aligned, or on the same device as another member.
    #[error("{0:#x} cannot be a member of a multicast object: it is off 256 bytes, or its device is a member already")]
    NotMulticast(u64),
    /// The range is not inside one live allocation.
    #[error("{len} bytes at {address:#x} are not inside one live allocation")]
    OutOfBounds {
        /// First byte.
        address: u64,
        /// Length.
        len: u64,
    },
}

/// A command that is refused when it is queued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// No such stream.
    #[error("stream {0} does not exist")]
    NoStream(u32),
    /// No such event.
    #[error("event {0} does not exist")]
    NoEvent(u32),
    /// A grid dimension is out of range.
    #[error("kernel {kernel}: grid {grid:?} is outside 1..=2147483647 x 1..=65535 x 1..=65535")]
    Grid {
        /// Kernel name.
        kernel: String,
        /// Requested grid.
        grid: [u32; 3],
    },
    /// A grid that is not whole clusters.
    #[error("kernel {kernel}: {ctas} CTAs along x are not whole clusters of {cluster}")]
    Cluster {
        /// Kernel name.
        kernel: String,
        /// Requested CTAs along x.
        ctas: u32,
        /// The kernel's cluster size.
        cluster: u32,
    },
    /// Less shared memory than the layout, or more than the target has.
    #[error(
        "kernel {kernel}: {shared_bytes} bytes of shared memory, the layout needs {needed}, the target allows {allowed}"
    )]
    Shared {
        /// Kernel name.
        kernel: String,
        /// Requested bytes.
        shared_bytes: u32,
        /// The kernel's layout.
        needed: u32,
        /// The target's limit.
        allowed: u32,
    },
    /// The parameter block has another size than the kernel declares.
    #[error("kernel {kernel}: {got} parameter bytes, {needed} are declared")]
    Params {
        /// Kernel name.
        kernel: String,
        /// Given bytes.
        got: usize,
        /// Declared bytes.
        needed: u32,
    },
    /// Overlap is asked for a kernel that never waits for its predecessor.
    #[error("kernel {kernel} never waits for its dependencies, so it cannot be launched with overlap")]
    Overlap {
        /// Kernel name.
        kernel: String,
    },
    /// More CTAs are queued than can be told apart.
    #[error("too many CTAs are queued: run first")]
    TooMany,
    /// A host command outside live memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A fault before the executing warp's identity is attached.
#[derive(Clone, Debug)]
pub(crate) struct Stop {
    pub(crate) kind: TrapKind,
    pub(crate) lane: Option<u32>,
    pub(crate) address: Option<u64>,
    pub(crate) message: String,
    /// Another instruction than the one that executes, if that is the guilty one.
    pub(crate) at: Option<u32>,
    /// Another warp of the CTA than the one that executes, likewise.
    pub(crate) warp: Option<u32>,
    /// The race, whose parties are named later.
    pub(crate) race: Option<Box<Race>>,
    /// The form that is not simulated: then this is a [`SimError`].
    pub(crate) unsupported: bool,
}

impl Stop {
    pub(crate) fn new(kind: TrapKind, message: impl Into<String>) -> Box<Stop> {
        Box::new(Stop {
            kind,
            lane: None,
            address: None,
            message: message.into(),
            at: None,
            warp: None,
            race: None,
            unsupported: false,
        })
    }

    pub(crate) fn unsupported(what: impl Into<String>) -> Box<Stop> {
        let mut stop = Stop::new(TrapKind::Operand, what);
        stop.unsupported = true;
        stop
    }

    pub(crate) fn lane(mut self: Box<Self>, lane: u32) -> Box<Stop> {
        self.lane = Some(lane);
        self
    }

    pub(crate) fn address(mut self: Box<Self>, address: u64) -> Box<Stop> {
        self.address = Some(address);
        self
    }

    pub(crate) fn at(mut self: Box<Self>, pc: u32) -> Box<Stop> {
        self.at = Some(pc);
        self
    }

    /// Blames the operation that `issuer` started.
    pub(crate) fn issued_by(mut self: Box<Self>, issuer: Issuer) -> Box<Stop> {
        (self.at, self.warp, self.lane) = (Some(issuer.pc), Some(issuer.warp), Some(issuer.lane));
        self
    }
}

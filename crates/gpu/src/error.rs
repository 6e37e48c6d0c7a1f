//! What can go wrong, as facts with numbers. Nothing in this crate panics for want of a GPU or after a fault.

use ptx::Target;

use crate::device::Version;

/// Why an operation on a device was refused or failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No usable CUDA driver library on this machine.
    #[error("no CUDA driver: {reason}; install an NVIDIA driver of CUDA {needed} or newer, or use the simulator")]
    NoDriver {
        /// What was found instead.
        reason: String,
        /// The oldest driver that works.
        needed: Version,
    },
    /// The driver lacks something this crate calls.
    #[error("CUDA driver {found} is too old: CUDA {needed} or newer is needed{}", missing_text(.missing))]
    DriverTooOld {
        /// Level of the driver found.
        found: Version,
        /// Oldest level that works.
        needed: Version,
        /// The first function that the driver library lacks, if that is how it showed.
        missing: Option<String>,
    },
    /// There is no device of that number.
    #[error("no CUDA device {ordinal}: {count} visible")]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// Devices that the driver shows.
        count: usize,
    },
    /// The device cannot run what was generated for another architecture.
    #[error(
        "compute capability {}.{} is not supported{}: {} needed",
        .found.0, .found.1, kernel_text(.kernel), targets_text(.supported)
    )]
    UnsupportedArchitecture {
        /// The kernel refused, if there is one already.
        kernel: Option<String>,
        /// The device's compute capability (major, minor).
        found: (u32, u32),
        /// What would do.
        supported: Vec<Target>,
    },
    /// The driver's assembler refused a kernel's text.
    #[error("kernel {kernel}: PTX {ptx_version} refused by driver {driver}: {reason}\n{log}")]
    PtxRefused {
        /// Kernel name.
        kernel: String,
        /// The text's `.version`.
        ptx_version: String,
        /// Level of the driver.
        driver: Version,
        /// The driver's error.
        reason: String,
        /// The assembler's error log.
        log: String,
    },
    /// Device memory is exhausted.
    #[error("out of device memory: {requested} bytes requested{}", free_text(.free))]
    OutOfMemory {
        /// Bytes requested.
        requested: u64,
        /// Bytes free at that time, if known.
        free: Option<u64>,
    },
    /// A launch whose shape or attributes the device cannot honour; nothing was launched.
    #[error("kernel {kernel}: launch refused: {reason}")]
    LaunchRefused {
        /// Kernel name.
        kernel: String,
        /// The violated rule.
        reason: String,
    },
    /// The kernel needs more shared memory than a CTA may have.
    #[error("kernel {kernel}: {requested} bytes of shared memory, the device allows {limit}")]
    SharedTooLarge {
        /// Kernel name.
        kernel: String,
        /// Bytes the kernel declares.
        requested: u32,
        /// Most bytes of one CTA.
        limit: u32,
    },
    /// An earlier launch failed on the device. The context is lost: every later operation on it reports this same
    /// fault, and dropping what belongs to it is safe.
    #[error("device fault{}: {reason}", suspect_text(.kernel))]
    Fault {
        /// The first launch that is not known to have finished: the likely culprit.
        kernel: Option<String>,
        /// The driver's error.
        reason: String,
    },
    /// One device cannot map another's memory.
    #[error("device {from} cannot access the memory of device {to}: {reason}")]
    PeerAccess {
        /// The accessing device.
        from: String,
        /// The owner of the memory.
        to: String,
        /// Why.
        reason: String,
    },
    /// No multicast address for these buffers.
    #[error("device {device} has no multicast address for them: {reason}")]
    Multicast {
        /// The storing device.
        device: String,
        /// Why.
        reason: String,
    },
    /// Memory that cannot be mapped by other processes.
    #[error("memory at {address:#x} cannot be shared with other processes: {reason}")]
    NotShareable {
        /// Its address.
        address: u64,
        /// Why.
        reason: String,
    },
    /// Another process's memory that this device cannot map.
    #[error("device {device} cannot map another process's memory: {reason}")]
    NotMappable {
        /// The accessing device.
        device: String,
        /// Why.
        reason: String,
    },
    /// No usable NCCL library on this machine.
    #[error("no NCCL: {reason}; install NCCL {needed} or newer where the dynamic linker finds libnccl.so.2")]
    NoNccl {
        /// What was found instead.
        reason: String,
        /// The oldest version that works.
        needed: Version,
    },
    /// A failure that NCCL reports. The communicator is of no more use.
    #[error("{call}: NCCL result {code}, {reason}")]
    Nccl {
        /// The function.
        call: &'static str,
        /// Its numeric result.
        code: i32,
        /// NCCL's explanation.
        reason: String,
    },
    /// The other ranks of a communicator did not do their part in time; the communicator was aborted.
    #[error("{call}: the other ranks did not come within {limit:?}")]
    NcclTimeout {
        /// The function.
        call: &'static str,
        /// How long was waited.
        limit: std::time::Duration,
    },
    /// An operation that graph capture does not allow, or a capture that failed.
    #[error("graph capture: {reason}")]
    Capture {
        /// The violated rule.
        reason: String,
    },
    /// Objects of different devices were mixed.
    #[error("{what} belongs to {found}, not to {expected}")]
    WrongDevice {
        /// The misplaced object.
        what: &'static str,
        /// Its device.
        found: String,
        /// The device of the operation.
        expected: String,
    },
    /// A host slice and a device range differ in length, or a range leaves its buffer.
    #[error("{what}: {found} elements, {expected} expected")]
    SizeMismatch {
        /// The operation.
        what: &'static str,
        /// Elements given.
        found: usize,
        /// Elements expected.
        expected: usize,
    },
    /// The kernel itself is malformed.
    #[error(transparent)]
    Verify(#[from] ptx::VerifyError),
    /// The tensor map is malformed.
    #[error(transparent)]
    TensorMap(#[from] ptx::TensorMapError),
    /// The simulator stopped: a kernel's fault, or something it cannot do. The machine is lost, as a CUDA context
    /// would be.
    #[error("{0}")]
    Sim(#[source] Box<ptx_sim::Fault>),
    /// The simulator does not offer this.
    #[error("the simulator does not model {what}")]
    NotSimulated {
        /// The missing feature.
        what: String,
    },
    /// Any other failure of a driver call.
    #[error("{call}: {name} ({code})")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// Its numeric result.
        code: u32,
        /// The result's name and the driver's explanation.
        name: String,
    },
}

fn missing_text(missing: &Option<String>) -> String {
    missing.as_ref().map_or(String::new(), |name| format!(" (it has no {name})"))
}

fn kernel_text(kernel: &Option<String>) -> String {
    kernel.as_ref().map_or(String::new(), |name| format!(" by kernel {name}"))
}

fn suspect_text(kernel: &Option<String>) -> String {
    kernel.as_ref().map_or(String::new(), |name| format!(", kernel {name} suspected"))
}

fn free_text(free: &Option<u64>) -> String {
    free.map_or(String::new(), |bytes| format!(", {bytes} free"))
}

fn targets_text(targets: &[Target]) -> String {
    let names: Vec<String> = targets
        .iter()
        .map(|t| {
            let (major, minor) = t.compute_capability();
            format!("{major}.{minor} ({t})")
        })
        .collect();
    names.join(" or ")
}

impl Error {
    /// Whether the device context is lost for good, as after an illegal access.
    pub fn is_fault(&self) -> bool {
        matches!(self, Error::Fault { .. } | Error::Sim(_))
    }

    /// Whether there is simply no usable GPU here, so that the simulator is the natural alternative.
    pub fn is_unavailable(&self) -> bool {
        matches!(
            self,
            Error::NoDriver { .. }
                | Error::DriverTooOld { .. }
                | Error::NoDevice { .. }
                | Error::UnsupportedArchitecture { kernel: None, .. }
        )
    }
}

//! Why a kernel cannot be planned, built or launched.

use dsa_core::ShapeError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A size outside the supported limits.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A tensor map that the hardware cannot express.
    #[error(transparent)]
    TensorMap(#[from] ptx::TensorMapError),
    /// The device refused a module, an allocation or a launch.
    #[error(transparent)]
    Device(#[from] gpu::Error),
    /// A device buffer is too short for the step.
    #[error("{kernel}: {buffer} has {found} elements, the step needs {needed}")]
    BufferTooShort {
        /// Kernel.
        kernel: &'static str,
        /// Argument.
        buffer: &'static str,
        /// Elements found.
        found: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A device buffer whose address the kernel's vector accesses cannot use.
    #[error("{kernel}: {buffer} starts at {address:#x}, which is not {align}-byte aligned")]
    Misaligned {
        /// Kernel.
        kernel: &'static str,
        /// Argument.
        buffer: &'static str,
        /// Address found.
        address: u64,
        /// Alignment needed, in bytes.
        align: u64,
    },
    /// A kernel that does not exist for the device's architecture.
    #[error("{kernel} is not available for {target}: it needs sm_90a")]
    UnsupportedTarget {
        /// Kernel.
        kernel: &'static str,
        /// The device's target.
        target: ptx::Target,
    },
    /// The builder refused a kernel.
    #[error(transparent)]
    Verify(#[from] ptx::VerifyError),
}

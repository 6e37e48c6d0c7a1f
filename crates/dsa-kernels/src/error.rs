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
    /// The builder refused a kernel.
    #[error(transparent)]
    Verify(#[from] ptx::VerifyError),
}

//! Why a layer cannot be built, or a step not be run.

use dsa_kernels::KernelError;

use crate::layer::{StepShape, Unsupported};

/// An error of the decode layer. From [`FusedIndexer::run`](crate::FusedIndexer::run), everything but
/// [`Error::Kernel`], [`Error::Dcp`] and [`Error::Device`] means that nothing was launched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The layer or one of its step shapes is outside what the kernels or the scratch serve.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A step of a shape that the indexer was not built for.
    #[error("steps of {shape} were not planned when the indexer was built")]
    NotPlanned {
        /// The step's shape.
        shape: StepShape,
    },
    /// Live rows that the step's shape does not hold.
    #[error("{live} live rows do not fit steps of {shape}: whole requests, at most as many rows")]
    LiveRows {
        /// Row ends given.
        live: usize,
        /// The step's shape.
        shape: StepShape,
    },
    /// A device buffer is too short for the step.
    #[error("{buffer} has {found} elements, the step needs {needed}")]
    TooShort {
        /// Which buffer.
        buffer: &'static str,
        /// Elements found.
        found: usize,
        /// Elements needed.
        needed: usize,
    },
    /// Table rows that overlap.
    #[error("{table} rows are {stride} entries apart but {width} wide")]
    TableStride {
        /// Which table.
        table: &'static str,
        /// Entries from one row to the next.
        stride: usize,
        /// Entries of a row.
        width: usize,
    },
    /// A buffer whose address the kernels' copies cannot take.
    #[error("{buffer} at {address:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// Which buffer.
        buffer: &'static str,
        /// Its address.
        address: u64,
        /// Bytes it must be aligned to.
        align: u64,
    },
    /// A buffer or stream of another device than the scratch.
    #[error("{what} belongs to {found}, the scratch to {expected}")]
    WrongDevice {
        /// The misplaced object.
        what: &'static str,
        /// Its device.
        found: String,
        /// The scratch's device.
        expected: String,
    },
    /// The exchange with other ranks could not be set up, or has failed.
    #[error(transparent)]
    Dcp(#[from] dsa_dcp::DcpError),
    /// A query that runs before the indexer but stores nothing that the indexer's query could be made from.
    #[error("{query} stores no q_c: build it with q_c, or late")]
    NoQc {
        /// The kernel.
        query: String,
    },
    /// The MLA query could not be built or launched.
    #[error(transparent)]
    Query(#[from] mla_query::MlaError),
    /// A kernel could not be built or launched.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The device refused an allocation or a copy.
    #[error(transparent)]
    Device(#[from] gpu::Error),
}

impl From<dsa_core::ShapeError> for Error {
    fn from(error: dsa_core::ShapeError) -> Self {
        Error::Unsupported(error.into())
    }
}

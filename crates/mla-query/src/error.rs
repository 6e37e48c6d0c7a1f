//! Why a query cannot be planned, built or launched.

use dsa_core::consts::{MLA_HEADS_MAX, REQUESTS_MAX};

use crate::shape::PAGE_TOKENS_MAX;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MlaError {
    /// A number of heads outside 1..=96.
    #[error("{heads} heads per rank are outside 1..={MLA_HEADS_MAX}")]
    HeadsOutOfRange {
        /// Heads asked for.
        heads: usize,
    },
    /// A number of tokens outside 1..=1024.
    #[error("a batch of {batch} tokens is outside 1..={REQUESTS_MAX}")]
    BatchOutOfRange {
        /// Tokens asked for.
        batch: usize,
    },
    /// A page of no tokens, or of more than can be.
    #[error("a page of {page_tokens} tokens is outside 1..={PAGE_TOKENS_MAX}")]
    PageOutOfRange {
        /// Tokens per page asked for.
        page_tokens: usize,
    },
    /// A stride that is too small, or off the kernel's alignment.
    #[error("{what} of {stride} is not a multiple of {multiple} of at least {needed}")]
    StrideUnsupported {
        /// Which stride, with its unit.
        what: &'static str,
        /// The stride.
        stride: usize,
        /// Least stride.
        needed: usize,
        /// What it must be a multiple of.
        multiple: usize,
    },
    /// A size that the kernel's 32-bit arguments cannot hold.
    #[error("{what} of {value} does not fit 32 bits")]
    TooLarge {
        /// Which size, with its unit.
        what: &'static str,
        /// The size.
        value: usize,
    },
    /// A mailbox of other heads, another element or fewer tokens than the query's.
    #[error("a mailbox of {mailbox} does not take the rows of {shape}")]
    MailboxUnsupported {
        /// The mailbox's sizes.
        mailbox: String,
        /// The kernel.
        shape: String,
    },
    /// A late kernel that publishes: it would refill a box that an attention before it may still read.
    #[error("a late kernel cannot publish its rows")]
    LatePublication,
    /// A mailbox other than the one that the kernel was built for.
    #[error("the kernel publishes in a mailbox of {kernel}, this one is of {mailbox}")]
    WrongMailbox {
        /// What the kernel expects.
        kernel: String,
        /// What it was given.
        mailbox: String,
    },
    /// A kernel that stores to a multicast address, and a mailbox without one.
    #[error("the kernel stores to a multicast address, the mailbox has none: build it without")]
    NoMulticast,
    /// A device buffer is too short for the step.
    #[error("{buffer} has {found} elements, the step needs {needed}")]
    BufferTooShort {
        /// Argument.
        buffer: &'static str,
        /// Elements found.
        found: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A device buffer whose address the kernel's vector accesses cannot use.
    #[error("{buffer} starts at {address:#x}, which is not {align}-byte aligned")]
    Misaligned {
        /// Argument.
        buffer: &'static str,
        /// Address found.
        address: u64,
        /// Alignment needed, in bytes.
        align: u64,
    },
    /// An argument that the shape has no use for, or one that it needs and that is absent.
    #[error("{buffer} is {}, which {shape} does not take", if *.given { "given" } else { "absent" })]
    Presence {
        /// Argument.
        buffer: &'static str,
        /// Whether it was given.
        given: bool,
        /// The kernel.
        shape: String,
    },
    /// Weights that were prepared for another shape.
    #[error("the weights are prepared for {found}, the kernel is built for {needed}")]
    WrongWeights {
        /// Heads and columns per CTA of the weights.
        found: String,
        /// Those of the kernel.
        needed: String,
    },
    /// A number of tokens per cluster that no kernel takes.
    #[error("{} for a batch of {batch}: tiles have 16, 32 or 64 tokens, and at most 8 tokens go one by one",
        match .tile { Some(n) => format!("tiles of {n} tokens"), None => "tokens one by one".into() })]
    TileUnsupported {
        /// Tokens per tile asked for, `None` for one by one.
        tile: Option<usize>,
        /// Tokens of the batch.
        batch: usize,
    },
    /// Copies by threads of what a tiled kernel must have swizzled.
    #[error("Q_B by copies of threads in tiles of {tile} tokens, which need the tensor copies' swizzle")]
    ThreadCopiesUnsupported {
        /// Tokens per tile.
        tile: usize,
    },
    /// A query that would run beside an indexer where there is none.
    #[error("a late query runs beside the indexer's last kernel; a step with the cache form {form:?} has no indexer")]
    LateUnsupported {
        /// The cache form.
        form: dsa_core::layout::mla_entry::MlaCacheForm,
    },
    /// A kernel that does not exist for the device's architecture.
    #[error("the MLA query is not available for {target}: it needs sm_90a")]
    UnsupportedTarget {
        /// The device's target.
        target: ptx::Target,
    },
    /// A tensor map that the hardware cannot express.
    #[error(transparent)]
    TensorMap(#[from] ptx::TensorMapError),
    /// The device refused a module, an allocation or a launch.
    #[error(transparent)]
    Device(#[from] gpu::Error),
    /// The builder refused a kernel.
    #[error(transparent)]
    Verify(#[from] ptx::VerifyError),
}

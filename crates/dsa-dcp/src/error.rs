//! Why an exchange cannot be set up, or has failed.

use dsa_core::ShapeError;
use dsa_kernels::KernelError;

use crate::rendezvous::RendezvousError;

/// What a kernel waited for when its time ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// The words that a rank's local top-k pushes.
    Words,
    /// The list that a saturated rank's merge pushes.
    Rescue,
    /// The heads that a rank's query kernel publishes.
    Query,
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Waiting::Words => "local top-k words",
            Waiting::Rescue => "rescue list",
            Waiting::Query => "query rows",
        })
    }
}

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DcpError {
    /// A size outside the supported limits.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A launch that does not fit its buffers.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The device refused a module, an allocation or a launch.
    #[error(transparent)]
    Device(#[from] gpu::Error),
    /// The builder refused a kernel.
    #[error(transparent)]
    Verify(#[from] ptx::VerifyError),
    /// The ranks did not all come together.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// Two ranks of which one cannot map the other's memory. Gathering is what is left.
    #[error("rank {rank} cannot map the memory of rank {peer}: {reason}")]
    PeerUnmappable {
        /// The rank that would access.
        rank: usize,
        /// The rank that owns the memory.
        peer: usize,
        /// Why.
        reason: String,
    },
    /// An all-gather that did not end in time. Nothing more is gathered until
    /// [`reset`](crate::GatheredExchange::reset).
    #[error("rank {rank} waited {limit:?} in vain for the all-gather of the top-k candidates: reset the exchange")]
    GatherLate {
        /// This rank.
        rank: usize,
        /// How long was waited.
        limit: std::time::Duration,
    },
    /// A rank that cannot take part in the group's all-gather.
    #[error("rank {rank} cannot gather: {reason}")]
    NoAllGather {
        /// The rank.
        rank: usize,
        /// Why.
        reason: String,
    },
    /// A merge whose candidates and ids do not fit a multiprocessor's shared memory.
    #[error(
        "a merge of {ranks} x {n} candidates, top-{topk}, over {context_len_max} tokens needs {needed} bytes of shared \
         memory, {limit} are available: choose a smaller local top-N or a shorter context"
    )]
    MergeTooLarge {
        /// Ranks.
        ranks: usize,
        /// Local top-N.
        n: usize,
        /// Top-k.
        topk: usize,
        /// Longest context, in tokens.
        context_len_max: usize,
        /// Bytes needed.
        needed: usize,
        /// Bytes of one CTA at most.
        limit: usize,
    },
    /// More or fewer tokens than a mailbox can hold.
    #[error("{tokens} mailbox tokens are outside 1..={max}")]
    TokensOutOfRange {
        /// Tokens asked for.
        tokens: usize,
        /// Most tokens of a call.
        max: usize,
    },
    /// Query rows that sparse attention does not take, or that do not hold all ranks' heads.
    #[error("{ranks} ranks with {heads} heads each do not fit query rows of {q_heads} heads: 64 and 128 are possible")]
    HeadsUnsupported {
        /// Ranks.
        ranks: usize,
        /// Heads of each.
        heads: usize,
        /// Heads of a row.
        q_heads: usize,
    },
    /// A kernel built for another mailbox.
    #[error("the kernel was built for a mailbox of {kernel}, this one is of {mailbox}")]
    WrongMailbox {
        /// What the kernel expects.
        kernel: String,
        /// What it was given.
        mailbox: String,
    },
    /// An output that the kernel does not write.
    #[error("{buffer} is given, which this kernel does not write")]
    UnusedOutput {
        /// Argument.
        buffer: &'static str,
    },
    /// An output whose address 16-byte accesses cannot use.
    #[error("{buffer} starts at {address:#x}, which is not 16-byte aligned")]
    Misaligned {
        /// Argument.
        buffer: &'static str,
        /// Address found.
        address: u64,
    },
    /// More or fewer rows than an exchange can hold.
    #[error("{rows} exchange rows are outside 1..={max}")]
    RowsOutOfRange {
        /// Rows asked for.
        rows: usize,
        /// Most rows of a step.
        max: usize,
    },
    /// A rank that set up another exchange than this one.
    #[error("rank {peer} set up an exchange of {theirs}, rank {rank} one of {ours}")]
    PeerMismatch {
        /// This rank.
        rank: usize,
        /// The other.
        peer: usize,
        /// What this rank has.
        ours: String,
        /// What the other has.
        theirs: String,
    },
    /// A group of another size than the shape's ranks.
    #[error("the group has {group} ranks, the shape {shape}")]
    GroupSize {
        /// Ranks of the group.
        group: usize,
        /// Ranks of the shape.
        shape: usize,
    },
    /// An exchange that would have to grow, but is part of a graph.
    #[error(
        "an exchange of {have} rows cannot grow to {rows}: a graph of rank {rank} has captured it; plan every shape before \
         the first capture"
    )]
    Captured {
        /// The rank with the graph.
        rank: usize,
        /// Rows asked for.
        rows: usize,
        /// Rows that there are.
        have: usize,
    },
    /// A merge built for another exchange.
    #[error("the merge was built for {merge}, the exchange is one of {exchange}")]
    WrongExchange {
        /// What the merge expects.
        merge: String,
        /// What it was given.
        exchange: String,
    },
    /// A rank's data did not arrive in time. The exchange, or mailbox, does nothing more until it is
    /// [reset](crate::Exchange::reset).
    #[error(
        "rank {rank} waited in vain for the {waiting} of rank {peer}, row {row}, epoch {epoch}: reset the {}",
        if *.waiting == Waiting::Query { "mailbox" } else { "exchange" }
    )]
    PeerLate {
        /// This rank.
        rank: usize,
        /// The rank that did not deliver.
        peer: usize,
        /// Row of the step.
        row: usize,
        /// Epoch (of words) or sequence (of a list) that was expected.
        epoch: u32,
        /// What was waited for.
        waiting: Waiting,
    },
}

impl DcpError {
    /// Another rank did not come, or not in time: it, or a third, knows the reason.
    pub fn is_another_ranks(&self) -> bool {
        match self {
            DcpError::PeerLate { .. } | DcpError::GatherLate { .. } => true,
            DcpError::Rendezvous(error) => matches!(
                error,
                RendezvousError::Timeout { .. } | RendezvousError::Abandoned { .. } | RendezvousError::Lost { .. }
            ),
            _ => false,
        }
    }
}

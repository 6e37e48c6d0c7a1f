//! Decode context parallelism: a context's keys are spread over up to 16 ranks, and each row's top-k is found over all of
//! them, exactly.
//!
//! Every rank's [local top-k](dsa_kernels::local_topk) pushes its first N keys of a row to every rank
//! ([`Exchange`]); [`ExchangeMerge`] then picks the first K of all, asks the ranks that may still hide some for more, and
//! writes the KV rows that this rank owns. Where even all ranks' first N are too few, few ranks do without a local top-k: the
//! merge selects and pushes its rank's first K by itself. [`recommended_local_topk`] says which N seldom needs either. The ids
//! equal those of a single rank that holds the whole context.
//!
//! The query of the attention that follows has heads on every rank; the [`QueryMailbox`] brings them to every rank.
//!
//! A rank that does not answer in time becomes a [`DcpError::PeerLate`]; [`Exchange::reset`] restores service.
#![forbid(unsafe_code)]

pub mod all_gather;
pub mod error;
pub mod exchange;
pub mod gathered;
mod group_shape;
pub mod layout;
pub mod local_ends;
pub mod mailbox;
pub mod merge;
pub mod rendezvous;
pub mod rounds;
pub mod shape;

pub use all_gather::{AllGather, NcclAllGather};
pub use error::{DcpError, Waiting};
pub use exchange::{Exchange, Limits};
pub use gathered::{GatheredExchange, GatheredStep, GatheredTopk};
pub use local_ends::LocalEnds;
pub use mailbox::{Gather, GatherShape, GatherStep, MailboxShape, QueryElement, QueryMailbox};
pub use merge::{ExchangeMerge, MergeShape, MergeStep};
pub use rendezvous::{InProcess, Rendezvous, RendezvousError, TcpRendezvous};
pub use rounds::{Rounds, recommended_local_topk};
pub use shape::ExchangeShape;

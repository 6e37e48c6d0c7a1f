//! The query mailbox: every rank's heads of the MLA query, gathered on every rank.
//!
//! With a context spread over ranks each of them attends over its own keys for *all* heads, so the rows that each rank's
//! query kernel computes for its own heads must reach all of them. They are stored right where attention reads them; what
//! has arrived says so itself, because what has not is a sentinel that no query holds.
//!
//! ```text
//! call n:  refill the box of call n - 1 with sentinels; publish own heads to that of call n on every rank; wait until it is full
//! ```
//!
//! Three boxes follow each other in turn. Which one is a call's is a word of the state: numbers of calls wrap, and 2^32 is no
//! multiple of three.
//!
//! # Layout
//! [`layout`].
//!
//! # Synchronisation
//! - The query kernel of call n refills this rank's box of call n - 1 after its dependency wait: whoever read that box is
//!   then done, as long as every kernel in between waits for its own dependencies.
//! - Each thread that publishes call n + 1 has seen that refill, by its dependency wait, and fences at system scope before its
//!   first store to a peer. With two boxes call n itself would have to wait for its refill before it publishes, up to 1 us more
//!   (`docs/experiments.md`, "Three boxes"); with three no publication waits for a refill of its own call.
//! - A peer that has gathered call n + 1 has polled something of this rank, and acquired it by a fence at system scope. So its
//!   stores of call n + 2, into the box of call n - 1, in kernels after that gather, come after the refill.
//! - The number of the call is on the device and moves once per query kernel, when all of its CTAs have read it: eager and
//!   captured calls share one sequence, and nothing depends on how many calls a graph holds. What gathers reads it after
//!   its own dependency wait.
//! - A store may become visible word by word: readiness is looked for in every word of a 16-byte chunk.
//! - Polls are bounded. When time runs out the kernel notes who is late and ends; rows that did not arrive are NaN where
//!   they are copied, and whatever the box holds in place. The rank then publishes nothing until the mailbox is
//!   [reset](QueryMailbox::reset), so that its peers run out of time in turn.
//!
//! All ranks make the same calls with the same number of tokens, and gather each before they publish the next. A rank that skips
//! a gather may write into a box that a peer still refills; one that skips a call takes its peers' rows of that call for those of
//! its next, without an error, until it waits for one that they do not make. A rank that publishes reads no peer's memory, and
//! what gathers starts after its own rank's query kernel has ended: no CTA waits for one that cannot start.
//!
//! # Bound
//! The links: each rank sends its heads to every other, [`cost`] bytes, or once to a multicast address.

pub mod device;
pub mod gather;
pub mod layout;
mod shape;

use std::panic::resume_unwind;
use std::sync::Arc;

use dsa_kernels::Cost;
use gpu::{Buffer, Device, Stream, View};

use crate::error::DcpError;
use crate::exchange::Limits;
use crate::group_shape::agree_on_shape;
use crate::rendezvous::{PeerMemory, Rendezvous, in_process};

pub use gather::{Gather, GatherShape, GatherStep};
pub use shape::{MailboxShape, QueryElement};

/// Bytes of one call of `tokens` tokens: own rows to all other ranks (`link`), and what this rank's memory takes: rows
/// that arrive, the refill, the poll.
pub fn cost(shape: &MailboxShape, tokens: usize) -> (u64, Cost) {
    let own = tokens * shape.heads() * shape.row_bytes();
    let all = tokens * shape.published() * shape.row_bytes();
    (((shape.ranks() - 1) * own) as u64, Cost { hbm_bytes: 3 * all as u64, flops: 0 })
}

/// What a query kernel needs to publish.
#[derive(Clone, Debug)]
pub struct Publish<'a> {
    /// The sizes.
    pub shape: MailboxShape,
    /// This rank's boxes.
    pub boxes: View<'a, u64>,
    /// `[ranks]`: address of every rank's boxes.
    pub peers: View<'a, u64>,
    /// The address of every rank's boxes at once, if there is one.
    pub multicast: Option<u64>,
    /// The [call's state](layout::STATE_WORDS).
    pub state: View<'a, u32>,
    /// Non-zero: the mailbox has failed.
    pub status: View<'a, u32>,
    /// This rank.
    pub rank: usize,
}

/// The query mailbox of one rank, shared by all layers of its device. Cheap to clone; all clones are the same mailbox.
#[derive(Clone)]
pub struct QueryMailbox {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    group: Arc<dyn Rendezvous>,
    shape: MailboxShape,
    limits: Limits,
    peers: Buffer<u64>,
    multicast: Option<u64>,
    state: Buffer<u32>,
    status: Buffer<u32>,
    // After buffers of this device, whose freeing waits for its kernels: none of them writes to a peer any more.
    memory: Arc<Buffer<u64>>,
    /// Every rank's memory, for as long as this rank may write there.
    _peer_memory: Vec<PeerMemory>,
}

impl std::fmt::Debug for QueryMailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QueryMailbox(rank {} of {}, {:?})", self.rank(), self.inner.shape, self.inner.device)
    }
}

impl QueryMailbox {
    /// Sets up the mailbox of `group` on `device`. Collective: every rank calls it with the same shape.
    ///
    /// # Errors
    /// A group of another size, ranks with other shapes or that do not come, memory that cannot be shared.
    pub fn new(device: &Device, group: Arc<dyn Rendezvous>, shape: MailboxShape) -> Result<Self, DcpError> {
        Self::with_limits(device, group, shape, Limits::default())
    }

    /// The mailbox of every rank of a group that is all in this process: rank `r` on `devices[r]`.
    ///
    /// # Errors
    /// Of the first rank that has one, as [`QueryMailbox::new`]; as many devices as ranks are wanted.
    pub fn in_process(devices: &[Device], shape: MailboxShape, limits: Limits) -> Result<Vec<Self>, DcpError> {
        let members = in_process(devices.len());
        std::thread::scope(|scope| {
            let set_up =
                |(member, device)| scope.spawn(move || Self::with_limits(device, Arc::new(member), shape, limits));
            let ranks: Vec<_> = members.into_iter().zip(devices).map(set_up).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        })
    }

    /// As [`QueryMailbox::new`] with other limits.
    ///
    /// # Errors
    /// As [`QueryMailbox::new`].
    pub fn with_limits(
        device: &Device,
        group: Arc<dyn Rendezvous>,
        shape: MailboxShape,
        limits: Limits,
    ) -> Result<Self, DcpError> {
        agree_on_shape(&*group, &shape, limits.collective)?;
        let memory = Arc::new(device.alloc::<u64>(shape.bytes() / 8)?);
        let stream = device.stream()?;
        // Refilled before any peer learns the address.
        memory.fill_bytes(&stream, layout::SENTINEL_BYTE)?;
        stream.synchronize()?;
        let state = device.alloc_zeros(layout::STATE_WORDS)?;
        let status = device.alloc_zeros(crate::layout::STATUS_WORDS)?;
        let peer_memory = group.share(device, memory.clone(), limits.collective)?;
        let multicast = group.multicast(device, &memory, limits.collective)?;
        let addresses: Vec<u64> = peer_memory.iter().map(|peer| peer.address).collect();
        let peers = device.upload(&addresses)?;
        let inner = Inner {
            device: device.clone(),
            group,
            shape,
            limits,
            peers,
            multicast,
            state,
            status,
            memory,
            _peer_memory: peer_memory,
        };
        Ok(QueryMailbox { inner: Arc::new(inner) })
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Its sizes.
    pub fn shape(&self) -> MailboxShape {
        self.inner.shape
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.inner.group.rank()
    }

    /// How long it waits for other ranks.
    pub fn limits(&self) -> Limits {
        self.inner.limits
    }

    /// Whether the ranks' memory has a multicast address.
    pub fn has_multicast(&self) -> bool {
        self.inner.multicast.is_some()
    }

    /// What a query kernel publishes with.
    pub fn publish(&self) -> Publish<'_> {
        Publish {
            shape: self.inner.shape,
            boxes: self.inner.memory.as_view(),
            peers: self.inner.peers.as_view(),
            multicast: self.inner.multicast,
            state: self.inner.state.as_view(),
            status: self.inner.status.as_view(),
            rank: self.rank(),
        }
    }

    /// The boxes, laid out by [`layout`]. Attention that reads them in place takes the one that the
    /// [state](QueryMailbox::state) names.
    pub fn memory(&self) -> &Buffer<u64> {
        &self.inner.memory
    }

    /// `[4]`: the [call's state](layout::STATE_WORDS); word 0 is the number of the last call, word 2 its box.
    pub fn state(&self) -> &Buffer<u32> {
        &self.inner.state
    }

    /// The status block, laid out by [`layout`](crate::layout).
    pub fn status(&self) -> &Buffer<u32> {
        &self.inner.status
    }

    /// Waits for `stream`, and says whether every call so far was complete. Not for the hot path.
    ///
    /// # Errors
    /// [`DcpError::PeerLate`] for the first wait that ran out.
    pub fn check(&self, stream: &Stream) -> Result<(), DcpError> {
        crate::layout::decode_status(&self.inner.status.copy_to_vec(stream)?, self.rank())
    }

    /// Starts over, as if newly set up. Collective; every rank's streams that use the mailbox must be `stream` or idle.
    ///
    /// # Errors
    /// Ranks that do not come; what the device reports.
    pub fn reset(&self, stream: &Stream) -> Result<(), DcpError> {
        let Inner { group, limits, memory, state, status, .. } = &*self.inner;
        stream.synchronize()?;
        // Nobody's kernels write here any more.
        group.all_gather(&[], limits.collective)?;
        memory.fill_bytes(stream, layout::SENTINEL_BYTE)?;
        state.fill_bytes(stream, 0)?;
        status.fill_bytes(stream, 0)?;
        stream.synchronize()?;
        // Everybody's memory is clear.
        group.all_gather(&[], limits.collective)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_counts_rows_to_others_and_rows_here() {
        let shape = MailboxShape::new(4, 12, 64, 16, QueryElement::Bf16).unwrap();
        let (link, local) = cost(&shape, 3);
        assert_eq!(link, 3 * 3 * 12 * 1152);
        assert_eq!(local.hbm_bytes, 3 * 3 * 48 * 1152);
    }
}

//! All-gathers over NCCL, between processes, devices and nodes. The library is looked up at run time: without it every call
//! is [`Error::NoNccl`], and nothing else changes.
//!
//! NCCL demands a device per rank: two ranks cannot share one.

use std::time::Duration;

use bytemuck::Pod;

use crate::buffer::View;
use crate::cuda;
use crate::device::{Backend, Device, Version};
use crate::error::Error;
use crate::graph;
use crate::stream::Stream;

/// The version of the NCCL library found.
///
/// # Errors
/// [`Error::NoNccl`].
pub fn version() -> Result<Version, Error> {
    cuda::nccl_version()
}

/// What the ranks of a communicator find each other by. One rank makes it, and all others get its bytes by any means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; cuda::ID_BYTES]);

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

impl UniqueId {
    /// Length of [`to_bytes`](UniqueId::to_bytes).
    pub const BYTES: usize = cuda::ID_BYTES;

    /// A new one. It serves one communicator, for as long as this process lives.
    ///
    /// # Errors
    /// [`Error::NoNccl`], or what NCCL reports.
    pub fn new() -> Result<Self, Error> {
        cuda::unique_id().map(UniqueId)
    }

    /// As bytes.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.0
    }

    /// What [`to_bytes`](UniqueId::to_bytes) gave; `None` if the length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(UniqueId)
    }
}

/// One rank of a group of devices that gather. Calls are collective: every rank makes the same ones in the same order.
///
/// Dropping it aborts what is still under way: wait for the streams first, and drop the graphs that captured its gathers.
pub struct Communicator {
    device: Device,
    backend: cuda::NcclComm,
    rank: usize,
    ranks: usize,
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator(rank {} of {} on {})", self.rank, self.ranks, self.device.info().name)
    }
}

impl Communicator {
    /// Joins the communicator of `id` as `rank` of `ranks`. Collective; each rank calls it from a thread or process of its
    /// own, on a device of its own. `limit` bounds this and every other wait for the other ranks' hosts.
    ///
    /// # Errors
    /// [`Error::NoNccl`]; [`Error::NcclTimeout`] if the others do not come; what NCCL reports, two ranks on one device
    /// included; [`Error::NotSimulated`]; [`Error::Capture`] inside a capture.
    pub fn new(device: &Device, id: &UniqueId, rank: usize, ranks: usize, limit: Duration) -> Result<Self, Error> {
        graph::refuse_while_capturing("joining a communicator")?;
        let Backend::Cuda(context) = device.backend() else {
            return Err(Error::NotSimulated { what: "NCCL".into() });
        };
        if rank >= ranks || i32::try_from(ranks).is_err() {
            return Err(Error::SizeMismatch { what: "rank of a communicator", found: rank, expected: ranks });
        }
        let backend = cuda::NcclComm::join(context, id.0, rank as i32, ranks as i32, limit)?;
        Ok(Communicator { device: device.clone(), backend, rank, ranks })
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Enqueues an all-gather: `received[r * sent.len()..][..sent.len()]` becomes rank `r`'s `sent`. Collective. It can be
    /// captured once a gather of this communicator has run. What is enqueued has no time limit: see
    /// [`abort`](Communicator::abort).
    ///
    /// # Errors
    /// [`Error::SizeMismatch`] unless `received` is `ranks` times as long as `sent`; [`Error::WrongDevice`];
    /// [`Error::NcclTimeout`]; what NCCL reports.
    pub fn all_gather<T: Pod>(&self, stream: &Stream, sent: &View<'_, T>, received: &View<'_, T>) -> Result<(), Error> {
        self.device.expect_same("stream", stream.device())?;
        self.device.expect_same("sent memory", sent.device())?;
        self.device.expect_same("received memory", received.device())?;
        if received.len() != sent.len().saturating_mul(self.ranks) {
            let (found, expected) = (received.len(), sent.len().saturating_mul(self.ranks));
            return Err(Error::SizeMismatch { what: "received memory of an all-gather", found, expected });
        }
        if sent.bytes() == 0 {
            return Ok(());
        }
        let stream = stream.cuda_stream().expect("the stream is of this device, which is a CUDA device");
        self.backend.all_gather(stream, sent.ptr().address(), received.ptr().address(), sent.bytes())
    }

    /// What has gone wrong since the last call, as far as NCCL noticed by itself. Waits for nothing.
    ///
    /// # Errors
    /// What NCCL reports.
    pub fn check(&self) -> Result<(), Error> {
        self.backend.check()
    }

    /// Ends every gather under way, so that the streams go on; their outputs are undefined. This is how a rank gets free
    /// of one that never comes. The communicator is of no more use.
    pub fn abort(&self) {
        self.backend.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_the_wire() {
        let id = UniqueId(std::array::from_fn(|i| i as u8));
        assert_eq!(UniqueId::from_bytes(&id.to_bytes()), Some(id));
        assert_eq!(UniqueId::from_bytes(&[0; UniqueId::BYTES - 1]), None);
    }
}

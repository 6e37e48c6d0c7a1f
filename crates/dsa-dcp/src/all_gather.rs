//! All-gathers of device memory, for ranks that cannot write to each other's.
//!
//! [`NcclAllGather`] goes over whatever links there are, other nodes' included, and can be captured. A group of
//! [threads](InProcess) gathers by copies between its devices, simulated ones too, and waits on the host.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::nccl::{Communicator, UniqueId};
use gpu::{Buffer, Device, Stream};
use parking_lot::RwLock;

use crate::error::DcpError;
use crate::rendezvous::{InProcess, Rendezvous, agree, deadline};

/// A group's all-gather. Calls are collective: every rank makes the same ones in the same order.
pub trait AllGather: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn ranks(&self) -> usize;

    /// Enqueues the gather of the first `len` elements of every rank's `sent`: those of rank `r` arrive at
    /// `received[r * len..]`.
    ///
    /// # Errors
    /// Buffers that are too short; ranks that do not come, as far as this call waits for them; what the device reports.
    fn enqueue(
        &self,
        stream: &Stream,
        sent: &Arc<Buffer<u64>>,
        len: usize,
        received: &Buffer<u64>,
    ) -> Result<(), DcpError>;

    /// Ends what is enqueued and waits for ranks that do not come, so that the streams go on. What it would have received
    /// is undefined. Nothing more is gathered until [`reset`](AllGather::reset).
    fn abort(&self);

    /// Starts over. Collective. Graphs that captured gathers must be captured anew if a rank was
    /// [aborted](AllGather::abort).
    ///
    /// # Errors
    /// Ranks that do not come within `limit`.
    fn reset(&self, limit: Duration) -> Result<(), DcpError>;
}

/// Lengths of a gather's buffers.
fn check(sent: &Buffer<u64>, len: usize, received: &Buffer<u64>, ranks: usize) -> Result<(), gpu::Error> {
    sent.view(..len)?;
    received.view(..len.saturating_mul(ranks))?;
    Ok(())
}

/// Over NCCL, which must be on every rank's machine; a device per rank.
pub struct NcclAllGather {
    device: Device,
    group: Arc<dyn Rendezvous>,
    communicator: RwLock<Communicator>,
}

impl NcclAllGather {
    /// Joins `group`'s communicator on `device`. Collective: it succeeds on all ranks or on none. `limit` bounds this and
    /// every other wait for other ranks' hosts.
    ///
    /// # Errors
    /// [`gpu::Error::NoNccl`] where there is no library; what NCCL reports on any rank; ranks that do not come.
    pub fn new(device: &Device, group: Arc<dyn Rendezvous>, limit: Duration) -> Result<Self, DcpError> {
        let communicator = join(device, &*group, limit)?;
        Ok(NcclAllGather { device: device.clone(), group, communicator: RwLock::new(communicator) })
    }
}

fn join(device: &Device, group: &dyn Rendezvous, limit: Duration) -> Result<Communicator, DcpError> {
    let (rank, ranks) = (group.rank(), group.ranks());
    // Every rank must have the library before any waits for the others inside it.
    let id = if rank == 0 { UniqueId::new().map(Some) } else { gpu::nccl::version().map(|_| None) };
    let offer = match &id {
        Ok(id) => [&[1], &id.map_or(Vec::new(), |id| id.to_bytes().to_vec())[..]].concat(),
        Err(error) => [&[0], error.to_string().as_bytes()].concat(),
    };
    let offers = group.all_gather(&offer, limit)?;
    id?;
    if let Some(peer) = offers.iter().position(|offer| offer.first() != Some(&1)) {
        let reason = String::from_utf8_lossy(offers[peer].get(1..).unwrap_or_default()).into_owned();
        return Err(DcpError::NoAllGather { rank: peer, reason });
    }
    let id = offers[0].get(1..).and_then(UniqueId::from_bytes);
    let id = id.ok_or_else(|| DcpError::NoAllGather { rank: 0, reason: "its id is of another version".into() })?;
    let joined = Communicator::new(device, &id, rank, ranks, limit).and_then(|communicator| {
        // Connections are made by the first gather, and must be there before one is captured.
        let stream = device.stream()?;
        let (sent, received) = (device.alloc_zeros::<u64>(1)?, device.alloc_zeros::<u64>(ranks)?);
        communicator.all_gather(&stream, &sent.as_view(), &received.as_view())?;
        if !finished(&stream, limit)? {
            communicator.abort();
            return Err(gpu::Error::NcclTimeout { call: "the first gather", limit });
        }
        Ok(communicator)
    });
    let verdict = joined.as_ref().err().map(|error| (rank, error.to_string()));
    match (agree(group, verdict, limit), joined) {
        (Ok(()), joined) => Ok(joined?),
        (_, Err(error)) => Err(error.into()),
        (Err(DcpError::PeerUnmappable { rank, reason, .. }), _) => Err(DcpError::NoAllGather { rank, reason }),
        (Err(error), _) => Err(error),
    }
}

/// Waits for `stream`, but no longer than `limit`. Returns whether it has finished.
pub(crate) fn finished(stream: &Stream, limit: Duration) -> Result<bool, gpu::Error> {
    let deadline = deadline(limit);
    while !stream.is_idle()? {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(true)
}

impl AllGather for NcclAllGather {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn ranks(&self) -> usize {
        self.group.ranks()
    }

    fn enqueue(
        &self,
        stream: &Stream,
        sent: &Arc<Buffer<u64>>,
        len: usize,
        received: &Buffer<u64>,
    ) -> Result<(), DcpError> {
        let received = received.view(..len.saturating_mul(self.ranks()))?;
        Ok(self.communicator.read().all_gather(stream, &sent.view(..len)?, &received)?)
    }

    fn abort(&self) {
        self.communicator.read().abort();
    }

    fn reset(&self, limit: Duration) -> Result<(), DcpError> {
        let mut communicator = self.communicator.write();
        communicator.abort();
        *communicator = join(&self.device, &*self.group, limit)?;
        Ok(())
    }
}

/// Waits on the host for every rank: each must call from a thread of its own, and nothing can be captured. A rank that does
/// not come within [`InProcess::GATHER_LIMIT`] is an error.
impl AllGather for InProcess {
    fn rank(&self) -> usize {
        Rendezvous::rank(self)
    }

    fn ranks(&self) -> usize {
        Rendezvous::ranks(self)
    }

    fn enqueue(
        &self,
        stream: &Stream,
        sent: &Arc<Buffer<u64>>,
        len: usize,
        received: &Buffer<u64>,
    ) -> Result<(), DcpError> {
        check(sent, len, received, AllGather::ranks(self))?;
        // What is sent is there, and everybody may read it.
        stream.synchronize()?;
        let all = self.meet_with(sent.clone(), Self::GATHER_LIMIT)?;
        for (theirs, peer) in all.iter().zip(0..) {
            received.view(peer * len..(peer + 1) * len)?.copy_from_device(stream, &theirs.view(..len)?)?;
        }
        // Everybody has read, and what is sent may change.
        stream.synchronize()?;
        Rendezvous::all_gather(self, &[], Self::GATHER_LIMIT)?;
        Ok(())
    }

    fn abort(&self) {}

    fn reset(&self, limit: Duration) -> Result<(), DcpError> {
        Rendezvous::all_gather(self, &[], limit)?;
        Ok(())
    }
}

impl InProcess {
    /// How long a gather of device memory waits for the other threads.
    pub const GATHER_LIMIT: Duration = Duration::from_secs(10);
}

#[cfg(test)]
mod tests {
    use gpu::SimConfig;

    use super::*;
    use crate::rendezvous::{RendezvousError, in_process};

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn threads_gather_each_other_s_memory_call_by_call() {
        let devices = Device::simulated_group(SimConfig { devices: 3, ..SimConfig::default() });
        std::thread::scope(|scope| {
            for (member, device) in in_process(3).into_iter().zip(&devices) {
                scope.spawn(move || {
                    let stream = device.stream().unwrap();
                    let sent = Arc::new(device.alloc_zeros::<u64>(40).unwrap());
                    let received = device.alloc_zeros::<u64>(120).unwrap();
                    for (call, len) in [(0, 40), (1, 7), (2, 1), (3, 0)] {
                        let words = |rank: usize| (0..40).map(move |i| (rank * 1000 + call * 100 + i) as u64);
                        let mine: Vec<u64> = words(AllGather::rank(&member)).collect();
                        sent.copy_from(&stream, &mine).unwrap();
                        member.enqueue(&stream, &sent, len, &received).unwrap();
                        let got = received.view(..3 * len).unwrap().copy_to_vec(&stream).unwrap();
                        assert_eq!(got, (0..3).flat_map(|rank| words(rank).take(len)).collect::<Vec<_>>());
                    }
                    let short = member.enqueue(&stream, &sent, 41, &received).unwrap_err();
                    assert!(matches!(short, DcpError::Device(gpu::Error::SizeMismatch { .. })), "{short}");
                    member.reset(LIMIT).unwrap();
                });
            }
        });
    }

    #[test]
    fn without_nccl_every_rank_is_told_so() {
        if gpu::nccl::version().is_ok() {
            println!("SKIPPED: there is an NCCL library here");
            return;
        }
        let device = Device::simulated(SimConfig::default());
        std::thread::scope(|scope| {
            for member in in_process(2) {
                let device = &device;
                scope.spawn(move || {
                    let error = NcclAllGather::new(device, Arc::new(member), LIMIT).err().unwrap();
                    assert!(matches!(error, DcpError::Device(gpu::Error::NoNccl { .. })), "{error}");
                });
            }
        });
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let device = Device::simulated(SimConfig::default());
        let mut members = in_process(2);
        let absent = members.pop().unwrap();
        let member = Arc::new(members.pop().unwrap());
        let error = NcclAllGather::new(&device, member, Duration::from_millis(30)).err().unwrap();
        assert!(matches!(error, DcpError::Rendezvous(RendezvousError::Timeout { rank: 0, missing: 1, .. })), "{error}");
        drop(absent);
    }
}

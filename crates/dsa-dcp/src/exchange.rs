//! The exchange of one device: the memory that peers write, its epochs, and its state of health.
//!
//! All layers of a device share one exchange. A row's epoch counter advances once per call, on every rank alike, eagerly
//! launched or replayed from a graph: both share one space of epochs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dsa_kernels::local_topk::Push;
use gpu::{Buffer, Device, Stream};

use crate::error::DcpError;
use crate::group_shape::agree_on_shape;
use crate::layout::{STATUS_WORDS, SymmetricLayout, decode_status};
use crate::rendezvous::{PeerMemory, Rendezvous};
use crate::shape::ExchangeShape;

/// How long to wait for other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Of a kernel, for another rank's data.
    pub poll: Duration,
    /// Of a collective call, for the other ranks to join it.
    pub collective: Duration,
}

impl Limits {
    /// [`poll`](Limits::poll) in nanoseconds, as kernels take it.
    pub fn poll_ns(&self) -> u64 {
        self.poll.as_nanos().try_into().unwrap_or(u64::MAX)
    }
}

impl Default for Limits {
    /// 2 s and 60 s.
    fn default() -> Self {
        Limits { poll: Duration::from_secs(2), collective: Duration::from_secs(60) }
    }
}

/// The exchange of one rank. Cheap to clone; all clones are the same exchange.
///
/// Other ranks write to its memory. Threads keep each other's; between processes, drop it only once every rank's kernels are
/// done with the exchange, for instance after a last collective call of the group.
#[derive(Clone)]
pub struct Exchange {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    group: Arc<dyn Rendezvous>,
    shape: ExchangeShape,
    limits: Limits,
    peers: Buffer<u64>,
    epochs: Buffer<u32>,
    sequences: Buffer<u32>,
    status: Buffer<u32>,
    /// Whether a graph has captured its addresses.
    captured: AtomicBool,
    // After buffers of this device, whose freeing waits for its kernels: none of them writes to a peer any more.
    memory: Arc<Buffer<u64>>,
    /// Every rank's memory, for as long as this rank may write there.
    _peer_memory: Vec<PeerMemory>,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Exchange(rank {} of {}, {:?})", self.rank(), self.inner.shape, self.inner.device)
    }
}

/// No rank of `group` has `captured`. Collective.
pub(crate) fn refuse_captured(
    group: &dyn Rendezvous,
    captured: &AtomicBool,
    (have, rows): (usize, usize),
    limit: Duration,
) -> Result<(), DcpError> {
    let captured = group.all_gather(&[u8::from(captured.load(Ordering::Relaxed))], limit)?;
    match captured.iter().position(|flag| flag != &[0]) {
        Some(rank) => Err(DcpError::Captured { rank, rows, have }),
        None => Ok(()),
    }
}

impl Exchange {
    /// Sets up the exchange of `group` on `device`. Collective: every rank calls it with the same shape.
    ///
    /// # Errors
    /// A group of another size, ranks with other shapes or that do not come, memory that cannot be shared.
    pub fn new(device: &Device, group: Arc<dyn Rendezvous>, shape: ExchangeShape) -> Result<Self, DcpError> {
        Self::with_limits(device, group, shape, Limits::default())
    }

    /// As [`Exchange::new`] with other limits.
    ///
    /// # Errors
    /// As [`Exchange::new`].
    pub fn with_limits(
        device: &Device,
        group: Arc<dyn Rendezvous>,
        shape: ExchangeShape,
        limits: Limits,
    ) -> Result<Self, DcpError> {
        agree_on_shape(&*group, &shape, limits.collective)?;
        let words = SymmetricLayout::new(shape).bytes().div_ceil(8);
        // Zeroed before any peer learns the address.
        let memory = Arc::new(device.alloc_zeros::<u64>(words)?);
        let epochs = device.alloc_zeros(shape.rows())?;
        let sequences = device.alloc_zeros(shape.rows())?;
        let status = device.alloc_zeros(STATUS_WORDS)?;
        let peer_memory = group.share(device, memory.clone(), limits.collective)?;
        let addresses: Vec<u64> = peer_memory.iter().map(|peer| peer.address).collect();
        let peers = device.upload(&addresses)?;
        let inner = Inner {
            device: device.clone(),
            group,
            shape,
            limits,
            memory,
            _peer_memory: peer_memory,
            peers,
            epochs,
            sequences,
            status,
            captured: AtomicBool::new(false),
        };
        Ok(Exchange { inner: Arc::new(inner) })
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Its sizes.
    pub fn shape(&self) -> ExchangeShape {
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

    /// The group that it was set up with.
    pub fn group(&self) -> &Arc<dyn Rendezvous> {
        &self.inner.group
    }

    /// Where local top-k pushes its rows; nowhere if the exchange is [direct](ExchangeShape::is_direct).
    pub fn push(&self) -> Option<Push<'_>> {
        let Inner { peers, epochs, status, shape, .. } = &*self.inner;
        (!shape.is_direct()).then(|| Push {
            peers: peers.as_view(),
            epochs: epochs.as_view(),
            status: status.as_view(),
            rank: self.rank(),
            length_max: shape.local_len_max(),
        })
    }

    /// `[ranks]`: address of every rank's [memory](Exchange::memory).
    pub fn peers(&self) -> &Buffer<u64> {
        &self.inner.peers
    }

    /// The memory that peers write, laid out by [`SymmetricLayout`].
    pub fn memory(&self) -> &Buffer<u64> {
        &self.inner.memory
    }

    /// `[rows]`: epoch of each row's last merge.
    pub fn epochs(&self) -> &Buffer<u32> {
        &self.inner.epochs
    }

    /// `[rows]`: sequence of each row's last rescue.
    pub fn sequences(&self) -> &Buffer<u32> {
        &self.inner.sequences
    }

    /// The status block, laid out by [`layout`](crate::layout).
    pub fn status(&self) -> &Buffer<u32> {
        &self.inner.status
    }

    /// Notes whether a launch is captured.
    pub(crate) fn note_launch(&self, stream: &Stream) -> Result<(), gpu::Error> {
        let captured = &self.inner.captured;
        if !captured.load(Ordering::Relaxed) && stream.is_capturing()? {
            captured.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The exchange for steps of up to `rows` rows that takes this one's place, as if newly set up. Collective; every rank's
    /// streams that use this exchange must be `stream` or idle. Kernels built for this exchange serve the new one.
    ///
    /// # Errors
    /// [`DcpError::Captured`] if a graph of any rank has captured this one, whose memory it would go on using; as
    /// [`Exchange::new`]. It succeeds on all ranks or on none, and this exchange stays.
    pub fn grown(&self, stream: &Stream, rows: usize) -> Result<Exchange, DcpError> {
        let Inner { device, group, shape, limits, captured, .. } = &*self.inner;
        let shape = shape.with_rows(rows)?;
        stream.synchronize()?;
        // After this, nobody's kernels write here any more.
        refuse_captured(&**group, captured, (self.inner.shape.rows(), rows), limits.collective)?;
        Exchange::with_limits(device, group.clone(), shape, *limits)
    }

    /// Waits for `stream`, and says whether every exchange so far was complete. Not for the hot path.
    ///
    /// # Errors
    /// [`DcpError::PeerLate`] for the first wait that ran out; the outputs of that step and of all since are empty.
    pub fn check(&self, stream: &Stream) -> Result<(), DcpError> {
        decode_status(&self.inner.status.copy_to_vec(stream)?, self.rank())
    }

    /// Starts over, as if newly set up. Collective; every rank's streams that use the exchange must be `stream` or idle.
    ///
    /// # Errors
    /// Ranks that do not come; what the device reports.
    pub fn reset(&self, stream: &Stream) -> Result<(), DcpError> {
        let Inner { group, limits, memory, epochs, sequences, status, .. } = &*self.inner;
        stream.synchronize()?;
        // Nobody's kernels write here any more.
        group.all_gather(&[], limits.collective)?;
        memory.fill_bytes(stream, 0)?;
        for words in [epochs, sequences, status] {
            words.fill_bytes(stream, 0)?;
        }
        stream.synchronize()?;
        // Everybody's memory is clear.
        group.all_gather(&[], limits.collective)?;
        Ok(())
    }
}

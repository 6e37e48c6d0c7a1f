//! What the sharded indexers of one rank share: buffers, kernels, and the exchanges with the other ranks.

use std::collections::BTreeMap;
use std::sync::Arc;

use dsa_core::consts::{KEYS_PER_TOP, Q_MAX, REQUESTS_MAX};
use dsa_core::layout::b_row::BRow;
use dsa_core::layout::pitched_scratch::PitchedScratch;
use dsa_core::{IndexShape, Ownership, ShapeError};
use dsa_dcp::{AllGather, DcpError, Exchange, ExchangeShape, GatheredExchange, Limits, LocalEnds, Rendezvous};
use gpu::{Buffer, Device, Stream, View};
use parking_lot::RwLock;

use crate::error::Error;
use crate::kernels::KernelSet;
use crate::step::expect_device;

/// How candidates get from rank to rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Every rank writes into every other's memory, over peer access.
    Push,
    /// By an all-gather.
    Gather,
}

/// The ranks that share contexts, and how they reach each other.
#[derive(Clone)]
pub struct DcpGroup {
    /// The group; its calls order the collective ones here.
    pub group: Arc<dyn Rendezvous>,
    /// For ranks that cannot map each other's memory, and steps of more rows than are pushed.
    pub gather: Option<Arc<dyn AllGather>>,
    /// How long to wait for other ranks.
    pub limits: Limits,
    /// The only transport to use; without one, what can be pushed is pushed and the rest gathered. Equal on every rank.
    pub transport: Option<Transport>,
}

impl DcpGroup {
    /// A group whose ranks map each other's memory, with the default limits.
    pub fn new(group: Arc<dyn Rendezvous>) -> Self {
        DcpGroup { group, gather: None, limits: Limits::default(), transport: None }
    }
}

impl std::fmt::Debug for DcpGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DcpGroup(rank {} of {})", self.group.rank(), self.group.ranks())
    }
}

/// How much to reserve; equal on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DcpSpec {
    /// Most rows of a step.
    pub rows_max: usize,
    /// Most rows of a step that is pushed; larger ones are gathered.
    pub push_rows_max: usize,
    /// Consecutive tokens dealt to a rank at a time, a power of two.
    pub interleave: usize,
    /// Longest context over all ranks, in tokens.
    pub context_len_max: usize,
    /// Keys picked per row.
    pub topk: usize,
    /// Whether there is room for the selected ids besides the physical rows.
    pub ids: bool,
}

impl DcpSpec {
    /// How tokens are dealt to `ranks` ranks.
    ///
    /// # Errors
    /// Ranks or an interleave outside the limits.
    pub fn ownership(&self, ranks: usize) -> Result<Ownership, ShapeError> {
        Ownership::new(ranks, self.interleave)
    }

    pub(crate) fn validate(&self, ranks: usize) -> Result<Ownership, ShapeError> {
        IndexShape::new(0, 1, self.topk, self.context_len_max)?;
        if self.rows_max > REQUESTS_MAX * Q_MAX {
            return Err(ShapeError::TooManyRequests { requests: self.rows_max.div_ceil(Q_MAX) });
        }
        let own = self.ownership(ranks)?;
        own.local_len_max(self.context_len_max)?;
        Ok(own)
    }
}

/// Logits, tops, B' rows, outputs, compiled kernels and exchanges of the sharded indexers of one rank.
///
/// Layers use it one after another, as they do an [`IndexerScratch`](crate::IndexerScratch). All layers of one local top-N
/// share one exchange. It grows when a layer with larger steps is built, which is collective, and no more once a graph has
/// captured it.
pub struct DcpScratch {
    device: Device,
    pub(crate) group: DcpGroup,
    spec: DcpSpec,
    own: Ownership,
    local_len_max: usize,
    /// BF16 `[rows_max, pitch]`.
    pub(crate) logits: Buffer<u16>,
    /// order16 of the largest of every 8 logits.
    pub(crate) tops: Buffer<u16>,
    /// int32 `[rows_max]`, and a word that nobody reads.
    row_ends: Buffer<i32>,
    /// As wide as the widest local top-N.
    pub(crate) b_rows: Buffer<u32>,
    /// int32 `[rows_max]`: keys in each B' row.
    pub(crate) b_counts: Buffer<i32>,
    /// int32 `[rows_max, topk]`.
    pub(crate) rows: Buffer<i32>,
    /// int32 `[rows_max]`.
    pub(crate) counts: Buffer<i32>,
    /// int32 `[rows_max, topk]`.
    pub(crate) ids: Option<Buffer<i32>>,
    pub(crate) kernels: KernelSet,
    local_ends: LocalEnds,
    exchanges: RwLock<Exchanges>,
}

/// The exchanges by local top-N, in an order that is the same on every rank.
#[derive(Default)]
struct Exchanges {
    pushed: BTreeMap<usize, Exchange>,
    gathered: BTreeMap<usize, GatheredExchange>,
    /// Why nothing can be pushed.
    unmappable: Option<String>,
}

impl std::fmt::Debug for DcpScratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DcpScratch({:?}, {:?} on {:?})", self.spec, self.group, self.device)
    }
}

impl DcpScratch {
    /// Reserves the buffers. Not collective: exchanges are set up for the layers that need them.
    ///
    /// # Errors
    /// Sizes outside the limits, a gather of another group, or a device without the memory.
    pub fn reserve(device: &Device, group: DcpGroup, spec: DcpSpec) -> Result<Arc<Self>, Error> {
        let own = spec.validate(group.group.ranks())?;
        let local_len_max = own.local_len_max(spec.context_len_max)?;
        let pitched = PitchedScratch::new(spec.rows_max, local_len_max);
        let outputs = || -> Result<Buffer<i32>, gpu::Error> {
            let buffer = device.alloc(spec.rows_max * spec.topk)?;
            let stream = device.stream()?;
            buffer.fill_bytes(&stream, 0xFF)?;
            stream.synchronize()?;
            Ok(buffer)
        };
        Ok(Arc::new(DcpScratch {
            device: device.clone(),
            spec,
            own,
            local_len_max,
            logits: device.alloc(pitched.logits_len())?,
            tops: device.alloc(pitched.tops_len())?,
            row_ends: device.alloc_zeros(spec.rows_max + 1)?,
            b_rows: device.alloc(spec.rows_max * BRow::new(spec.topk).words())?,
            b_counts: device.alloc_zeros(spec.rows_max)?,
            rows: outputs()?,
            counts: device.alloc_zeros(spec.rows_max)?,
            ids: spec.ids.then(outputs).transpose()?,
            kernels: KernelSet::default(),
            local_ends: LocalEnds::new(device, own, group.group.rank(), spec.context_len_max)?,
            exchanges: RwLock::default(),
            group,
        }))
    }

    /// The device it lies on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What was reserved.
    pub fn spec(&self) -> &DcpSpec {
        &self.spec
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.group.group.rank()
    }

    /// How tokens are dealt to the ranks.
    pub fn ownership(&self) -> Ownership {
        self.own
    }

    /// Most tokens of a context on one rank.
    pub fn local_len_max(&self) -> usize {
        self.local_len_max
    }

    /// Elements from one row of logits to the next.
    pub fn pitch(&self) -> usize {
        PitchedScratch::new(self.spec.rows_max, self.local_len_max).pitch()
    }

    /// BF16 `[rows_max, pitch]`: this rank's logits of the last step; past a row's end anything.
    pub fn logits(&self) -> View<'_, u16> {
        self.logits.as_view()
    }

    /// Kernels compiled so far, by all layers together.
    pub fn kernels_compiled(&self) -> usize {
        self.kernels.len()
    }

    /// This rank's row ends of a step from the global ones, each from its own: what [`Step::row_ends`](crate::Step::row_ends)
    /// takes. One small launch for all layers of a step, before the first of them, in their stream or ordered with it. The
    /// view is of the scratch, so that a captured sequence sees the ends of its own time, whether this is part of it or not.
    ///
    /// # Errors
    /// More rows than the scratch holds; what the device refuses.
    pub fn local_ends(&self, stream: &Stream, global_ends: &View<'_, i32>) -> Result<View<'_, i32>, Error> {
        expect_device(&self.device, "row_ends", global_ends.device())?;
        expect_device(&self.device, "stream", stream.device())?;
        let live = global_ends.len();
        if live > self.spec.rows_max {
            return Err(Error::TooShort { buffer: "scratch row_ends", found: self.spec.rows_max, needed: live });
        }
        self.local_ends.launch(stream, global_ends, &self.row_ends.as_view())?;
        // ORDER: the ends, before a step's kernels, which read them ahead of their dependency wait: behind something that is no
        // kernel they do not start early.
        self.row_ends.view(self.spec.rows_max..)?.fill_bytes(stream, 0)?;
        Ok(self.row_ends.view(..live)?)
    }

    /// Waits for `stream`, and says whether every exchange so far was complete. Not for the hot path.
    ///
    /// # Errors
    /// [`DcpError::PeerLate`] or [`DcpError::GatherLate`] for the first wait that ran out; the outputs of that step and of
    /// all since are empty.
    pub fn check(&self, stream: &Stream) -> Result<(), Error> {
        let exchanges = self.exchanges.read();
        // These wait with a limit, and the others then need not wait.
        exchanges.gathered.values().try_for_each(|exchange| exchange.check(stream))?;
        exchanges.pushed.values().try_for_each(|exchange| exchange.check(stream))?;
        Ok(())
    }

    /// Restores service after an exchange has failed: all of them start over. Collective; every rank's streams that use the
    /// scratch must be `stream` or idle. Graphs stay valid, but for those with gathers if a rank had given up on one.
    ///
    /// # Errors
    /// Ranks that do not come; what the device reports.
    pub fn reset(&self, stream: &Stream) -> Result<(), Error> {
        let exchanges = self.exchanges.read();
        exchanges.gathered.values().try_for_each(|exchange| exchange.reset(stream))?;
        exchanges.pushed.values().try_for_each(|exchange| exchange.reset(stream))?;
        Ok(())
    }

    /// The exchange of a local top-`n`, for steps of up to `rows` rows.
    pub(crate) fn shape(&self, n: usize, rows: usize) -> Result<ExchangeShape, DcpError> {
        ExchangeShape::new(self.own, rows, n, self.spec.topk, self.spec.context_len_max)
    }

    /// How steps of up to `rows` rows are exchanged.
    pub(crate) fn transport(&self, rows: usize) -> Result<Transport, String> {
        let DcpGroup { gather, transport, .. } = &self.group;
        let unmappable = self.exchanges.read().unmappable.clone();
        let pushed = match (transport, unmappable) {
            (Some(Transport::Gather), _) => Err("only gathers were asked for".to_string()),
            (_, Some(reason)) => Err(reason),
            _ if rows > self.spec.push_rows_max => Err(format!("{} rows at most are pushed", self.spec.push_rows_max)),
            _ => Ok(Transport::Push),
        };
        match (pushed, transport, gather) {
            (Ok(push), _, _) => Ok(push),
            (Err(reason), Some(Transport::Push), _) => Err(format!("{reason}, and only pushes were asked for")),
            (Err(_), _, Some(_)) => Ok(Transport::Gather),
            (Err(reason), _, None) => Err(format!("{reason}, and the group has no all-gather")),
        }
    }

    /// Makes sure of an exchange for steps of up to `rows` rows. Collective. Returns false where ranks cannot map each
    /// other's memory, which is then known for good.
    pub(crate) fn set_up_push(&self, n: usize, rows: usize) -> Result<bool, Error> {
        let mut exchanges = self.exchanges.write();
        let made = match exchanges.pushed.get(&n) {
            Some(exchange) if exchange.shape().rows() >= rows => return Ok(true),
            Some(exchange) => exchange.grown(&self.device.stream()?, rows),
            None => {
                let DcpGroup { group, limits, .. } = &self.group;
                Exchange::with_limits(&self.device, group.clone(), self.shape(n, rows)?, *limits)
            }
        };
        match made {
            Ok(exchange) => exchanges.pushed.insert(n, exchange),
            Err(error @ DcpError::PeerUnmappable { .. }) if self.group.transport.is_none() => {
                exchanges.unmappable = Some(error.to_string());
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        Ok(true)
    }

    /// Makes sure of a gathered exchange for steps of up to `rows` rows. Collective.
    pub(crate) fn set_up_gather(&self, n: usize, rows: usize, gather: &Arc<dyn AllGather>) -> Result<(), Error> {
        let mut exchanges = self.exchanges.write();
        let made = match exchanges.gathered.get(&n) {
            Some(exchange) if exchange.shape().rows() >= rows => return Ok(()),
            Some(exchange) => exchange.grown(&self.device.stream()?, rows)?,
            None => {
                let DcpGroup { group, limits, .. } = &self.group;
                let shape = self.shape(n, rows)?;
                GatheredExchange::new(&self.device, group.clone(), gather.clone(), shape, *limits)?
            }
        };
        exchanges.gathered.insert(n, made);
        Ok(())
    }

    /// The exchange of a local top-`n`, once set up.
    pub(crate) fn pushed(&self, n: usize) -> Option<Exchange> {
        self.exchanges.read().pushed.get(&n).cloned()
    }

    /// The gathered exchange of a local top-`n`, once set up.
    pub(crate) fn gathered(&self, n: usize) -> Option<GatheredExchange> {
        self.exchanges.read().gathered.get(&n).cloned()
    }

    /// Device bytes of the logits, tops, B' rows and outputs of a scratch of `spec` over `ranks` ranks, without exchanges.
    ///
    /// # Errors
    /// Sizes outside the limits.
    pub fn bytes(spec: &DcpSpec, ranks: usize) -> Result<u64, Error> {
        let local_len_max = spec.validate(ranks)?.local_len_max(spec.context_len_max)?;
        let logits = PitchedScratch::new(spec.rows_max, local_len_max).logits_len() as u64;
        let slots = spec.topk as u64 * (1 + u64::from(spec.ids)) + BRow::new(spec.topk).words() as u64 + 3;
        Ok(2 * (logits + logits / KEYS_PER_TOP as u64) + 4 * spec.rows_max as u64 * slots)
    }
}

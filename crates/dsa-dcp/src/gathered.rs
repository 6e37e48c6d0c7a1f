//! The exchange of ranks that cannot write to each other's memory: one all-gather a call.
//!
//! Every rank sends, for every row, its first N keys **and** its first K, as two B' rows; the [merge](crate::merge) reads the
//! first, and the second of the ranks that turn out saturated. If the exchange is [direct](ExchangeShape::is_direct), it
//! sends the second alone. So there is one gather whatever the keys, of a size that does
//! not depend on them, which a graph can capture.
//!
//! The alternatives: a second gather for the saturated ranks' lists would have to take place in every call too, since the
//! host does not see who is saturated and all ranks must make the same calls; K keys alone would make every merge one of
//! W K candidates instead of W N, in four times the time at N = K / 4, and in shared memory that 16 ranks do not have.
//!
//! | field of a rank's part | words | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | words | `0..rows n'` | [`b_row`](dsa_core::layout::b_row) of N, n' = N + N / 32 words each; none if it is direct | rows of the call | 16 | local top-k | merge |
//! | lists | `rows n'..rows (n' + k')` | [`b_row`](dsa_core::layout::b_row) of K, k' = K + K / 32 words each | rows of the call | 16 | full local top-k | merge |
//!
//! NCCL's kernels wait for other ranks without a limit. What bounds the wait is [`GatheredExchange::check`], which gives up
//! on the group: the merges behind an aborted gather then write empty rows. The host cannot see whether a stream waits for
//! other ranks or for work before the gather, so that limit is no poll's but half that of a collective call, for which the
//! other ranks then wait in [`GatheredExchange::reset`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dsa_kernels::local_topk::{IndexerLocalTopk, LocalTopkShape, LocalTopkStep};
use gpu::{Buffer, Device, Stream, View};
use parking_lot::Mutex;

use crate::all_gather::{AllGather, finished};
use crate::error::DcpError;
use crate::exchange::{Limits, refuse_captured};
use crate::group_shape::agree_on_shape;
use crate::layout::{LATE_GATHER, STATUS_WORDS, decode_status};
use crate::rendezvous::Rendezvous;
use crate::shape::ExchangeShape;

/// The inputs of one step's candidates. `row_ends` gives the live rows.
#[derive(Clone, Debug)]
pub struct GatheredStep<'a> {
    /// Pitched BF16 logits, as score wrote them; 16-byte aligned.
    pub logits: View<'a, u16>,
    /// Their tops.
    pub tops: View<'a, u16>,
    /// Elements from one logits row to the next, a multiple of 512.
    pub pitch: usize,
    /// The *local* row ends that score was given.
    pub row_ends: View<'a, i32>,
    /// The longest row that score was given.
    pub length_max: usize,
    /// int32 `[rows]`: keys sent of each row, at most N, or K if the exchange is direct; output. Its length gives the rows,
    /// equal on every rank.
    pub counts: View<'a, i32>,
}

/// The local top-k kernels whose rows are gathered.
#[derive(Clone)]
pub struct GatheredTopk {
    first: IndexerLocalTopk,
    full: IndexerLocalTopk,
}

impl GatheredTopk {
    /// Builds and compiles both kernels of an exchange for steps of its most rows; `foreign` as in [`LocalTopkShape::with_foreign_logits`].
    ///
    /// # Errors
    /// A device that refuses them.
    pub fn new(device: &Device, shape: &ExchangeShape, foreign: bool) -> Result<Self, DcpError> {
        let (rows, length_max, sms) = (shape.rows(), shape.local_len_max(), device.info().sms);
        let kernel = |local: LocalTopkShape| {
            IndexerLocalTopk::new(device, local.with_foreign_logits(foreign).for_launch(rows, length_max, sms))
        };
        let first = kernel(LocalTopkShape::new(shape.n(), shape.topk())?)?;
        Ok(GatheredTopk { first, full: kernel(LocalTopkShape::full(shape.topk())?)? })
    }

    /// From compiled kernels of [`LocalTopkShape::new`] and [`LocalTopkShape::full`].
    pub fn from_kernels(first: IndexerLocalTopk, full: IndexerLocalTopk) -> Self {
        GatheredTopk { first, full }
    }
}

/// The exchange of one rank. Cheap to clone; all clones are the same exchange.
#[derive(Clone)]
pub struct GatheredExchange {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    group: Arc<dyn Rendezvous>,
    gather: Arc<dyn AllGather>,
    shape: ExchangeShape,
    limits: Limits,
    sent: Arc<Buffer<u64>>,
    received: Buffer<u64>,
    full_counts: Buffer<i32>,
    status: Buffer<u32>,
    /// For what must not queue behind a gather.
    aside: Mutex<Stream>,
    gave_up: AtomicBool,
    /// Whether a graph has captured its addresses.
    captured: AtomicBool,
}

impl std::fmt::Debug for GatheredExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GatheredExchange(rank {} of {}, {:?})", self.rank(), self.inner.shape, self.inner.device)
    }
}

impl GatheredExchange {
    /// Sets up the exchange of `group`, which gathers by `gather`, on `device`. Collective: every rank calls it with the
    /// same shape.
    ///
    /// # Errors
    /// A group or a gather of another size, ranks with other shapes or that do not come.
    pub fn new(
        device: &Device,
        group: Arc<dyn Rendezvous>,
        gather: Arc<dyn AllGather>,
        shape: ExchangeShape,
        limits: Limits,
    ) -> Result<Self, DcpError> {
        if (gather.rank(), gather.ranks()) != (group.rank(), group.ranks()) {
            return Err(DcpError::GroupSize { group: gather.ranks(), shape: group.ranks() });
        }
        agree_on_shape(&*group, &shape, limits.collective)?;
        let len = |rows| part_words(&shape, rows) / 2;
        let sent = Arc::new(device.alloc_zeros(len(shape.rows()))?);
        let received = device.alloc_zeros(len(shape.rows()) * shape.ranks())?;
        // What a gather sets up at its first use, it sets up here and not in a capture.
        let stream = device.stream()?;
        for rows in [shape.rows(), 1] {
            gather.enqueue(&stream, &sent, len(rows), &received)?;
            if !finished(&stream, limits.collective)? {
                gather.abort();
                return Err(DcpError::GatherLate { rank: group.rank(), limit: limits.collective });
            }
        }
        let inner = Inner {
            device: device.clone(),
            shape,
            limits,
            sent,
            received,
            full_counts: device.alloc_zeros(shape.rows())?,
            status: device.alloc_zeros(STATUS_WORDS)?,
            aside: Mutex::new(device.stream()?),
            gave_up: AtomicBool::new(false),
            captured: AtomicBool::new(false),
            group,
            gather,
        };
        Ok(GatheredExchange { inner: Arc::new(inner) })
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

    /// Every rank's part of the last call, one after another.
    pub fn received(&self) -> &Buffer<u64> {
        &self.inner.received
    }

    /// The status block, laid out by [`layout`](crate::layout).
    pub fn status(&self) -> &Buffer<u32> {
        &self.inner.status
    }

    /// Selects a step's candidates and gathers every rank's: two launches and a gather. Collective.
    ///
    /// # Errors
    /// Sizes that disagree, before anything is launched; ranks that do not come, as far as the gather's host side waits for
    /// them; what the device refuses.
    pub fn launch(&self, stream: &Stream, topk: &GatheredTopk, step: &GatheredStep<'_>) -> Result<(), DcpError> {
        let Inner { shape, sent, received, full_counts, gather, captured, .. } = &*self.inner;
        let rows = step.counts.len();
        if !captured.load(Ordering::Relaxed) && stream.is_capturing()? {
            captured.store(true, Ordering::Relaxed);
        }
        if rows > shape.rows() {
            return Err(DcpError::RowsOutOfRange { rows, max: shape.rows() });
        }
        let first = rows * first_words(shape);
        let lists = rows * shape.list().words();
        let part = sent.as_view().cast::<u32>()?;
        let local = |out, counts| LocalTopkStep {
            logits: step.logits.clone(),
            tops: step.tops.clone(),
            pitch: step.pitch,
            row_ends: step.row_ends.clone(),
            length_max: step.length_max,
            out,
            counts,
            push: None,
        };
        let mut counts = step.counts.clone();
        if !shape.is_direct() {
            topk.first.launch(stream, &local(part.view(..first)?, counts))?;
            counts = full_counts.view(..rows)?;
        }
        topk.full.launch(stream, &local(part.view(first..first + lists)?, counts))?;
        gather.enqueue(stream, sent, (first + lists) / 2, received)
    }

    /// As [`Exchange::grown`](crate::Exchange::grown).
    ///
    /// # Errors
    /// As [`Exchange::grown`](crate::Exchange::grown).
    pub fn grown(&self, stream: &Stream, rows: usize) -> Result<GatheredExchange, DcpError> {
        let Inner { device, group, gather, shape, limits, captured, .. } = &*self.inner;
        let larger = shape.with_rows(rows)?;
        stream.synchronize()?;
        refuse_captured(&**group, captured, (shape.rows(), rows), limits.collective)?;
        GatheredExchange::new(device, group.clone(), gather.clone(), larger, *limits)
    }

    /// Waits for `stream`, but no longer than half the limit of a collective call, and says whether every exchange so far was
    /// complete. Not for the hot path.
    ///
    /// # Errors
    /// [`DcpError::GatherLate`] if the time ran out, or had before: the outputs of the steps that were under way and of all
    /// since are empty.
    pub fn check(&self, stream: &Stream) -> Result<(), DcpError> {
        let Inner { gather, limits, status, aside, gave_up, .. } = &*self.inner;
        let limit = limits.collective / 2;
        if !gave_up.load(Ordering::Acquire) && !finished(stream, limit)? {
            gave_up.store(true, Ordering::Release);
            // Before the gather ends: the merge behind it must not take what is there for an answer.
            status.view(..1)?.copy_from(&aside.lock(), &[LATE_GATHER])?;
            gather.abort();
        }
        let status = status.copy_to_vec(stream)?;
        if gave_up.load(Ordering::Acquire) || status[0] == LATE_GATHER {
            return Err(DcpError::GatherLate { rank: self.rank(), limit });
        }
        decode_status(&status, self.rank())
    }

    /// Starts over, as if newly set up. Collective; every rank's streams that use the exchange must be `stream` or idle.
    /// Graphs that captured gathers must be captured anew if any rank had given up.
    ///
    /// # Errors
    /// Ranks that do not come; what the device reports.
    pub fn reset(&self, stream: &Stream) -> Result<(), DcpError> {
        let Inner { group, gather, limits, status, gave_up, .. } = &*self.inner;
        // Frees this rank of what is under way, whatever it says.
        if let Err(error @ DcpError::Device(_)) = self.check(stream) {
            return Err(error);
        }
        let any_gave_up = group.all_gather(&[u8::from(gave_up.load(Ordering::Acquire))], limits.collective)?;
        if any_gave_up.iter().any(|flag| flag != &[0]) {
            gather.reset(limits.collective)?;
        }
        status.fill_bytes(stream, 0)?;
        stream.synchronize()?;
        gave_up.store(false, Ordering::Release);
        group.all_gather(&[], limits.collective)?;
        Ok(())
    }
}

/// 32-bit words of a rank's part of a call of `rows` rows.
pub(crate) fn part_words(shape: &ExchangeShape, rows: usize) -> usize {
    rows * (first_words(shape) + shape.list().words())
}

/// Words of a row's first N keys, which a direct exchange does not send.
fn first_words(shape: &ExchangeShape) -> usize {
    if shape.is_direct() { 0 } else { shape.words().words() }
}

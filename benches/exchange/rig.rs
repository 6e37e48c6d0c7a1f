//! Ranks with a step of random logits each: local top-k, exchange, merge, and the check of what they write.

use std::sync::Arc;
use std::time::Duration;

use dsa_core::generate::LogitPattern;
use dsa_core::layout::pitched_scratch::PitchedScratch;
use dsa_core::numerics::order16::canonical_logit;
use dsa_core::oracle::merge::{merge_ids, owned_rows};
use dsa_core::oracle::score::tops;
use dsa_core::{KvShape, Ownership};
use dsa_dcp::layout::SymmetricLayout;
use dsa_dcp::merge::MergeArgs;
use dsa_dcp::rendezvous::in_process;
use dsa_dcp::{DcpError, Exchange, ExchangeMerge, ExchangeShape, Limits, MergeShape, MergeStep, Rendezvous};
use dsa_kernels::Table;
use dsa_kernels::local_topk::{IndexerLocalTopk, LocalTopkShape, LocalTopkStep, Push};
use gpu::{Buffer, Device, LaunchConfig, Stream};
use ptx::DevicePtr;

use crate::common::Result;

/// Tokens of an MLA page.
const PAGE: usize = 64;
/// Distinct rows of a step; the others repeat them.
const DISTINCT_ROWS: usize = 16;

/// What a group of ranks is timed with.
#[derive(Clone, Copy)]
pub struct Spec {
    pub ranks: usize,
    pub n: usize,
    pub topk: usize,
    pub rows: usize,
    /// Keys of each row on each rank.
    pub local_len: usize,
    /// Rank 0 has all that is selected.
    pub skewed: bool,
    /// CTAs of local top-k a row, or as many as pay.
    pub cluster: Option<u32>,
}

impl Spec {
    pub fn exchange(&self) -> Result<ExchangeShape> {
        let own = Ownership::new(self.ranks, 1)?;
        Ok(ExchangeShape::new(own, self.rows, self.n, self.topk, self.ranks * self.local_len)?)
    }

    /// With the CTAs that were asked for, or chosen.
    fn local_topk(&self, device: &Device, shape: LocalTopkShape) -> Result<IndexerLocalTopk> {
        let shape = match self.cluster {
            Some(cluster) => shape.with_cluster(cluster)?,
            None => shape.for_launch(self.rows, self.local_len, device.info().sms),
        };
        Ok(IndexerLocalTopk::new(device, shape)?)
    }

    pub fn scratch(&self) -> PitchedScratch {
        PitchedScratch::new(self.rows, self.local_len)
    }

    pub fn label(&self) -> String {
        format!("W={} N={}{} rows={}", self.ranks, self.n, if self.skewed { " skewed" } else { "" }, self.rows)
    }
}

/// One rank and its step.
pub struct Rank {
    pub stream: Stream,
    pub exchange: Exchange,
    /// Local top-k that pushes, if merges do not select by themselves, and one that only writes the rows that are sent.
    pub pushing: Option<IndexerLocalTopk>,
    pub quiet: IndexerLocalTopk,
    pub merge: ExchangeMerge,
    /// Of what an all-gather has brought, if all ranks send their lists at once.
    gathered: Option<ExchangeMerge>,
    logits: Buffer<u16>,
    tops: Buffer<u16>,
    row_ends: Buffer<i32>,
    table: Buffer<i32>,
    pub b_rows: Buffer<u32>,
    counts: Buffer<i32>,
    rows_out: Buffer<i32>,
    valid_out: Buffer<i32>,
}

/// All ranks, rank `r` on device `r % devices`.
pub struct Rig {
    pub spec: Spec,
    pub ranks: Vec<Rank>,
    /// `[row][rank]`: the distinct rows' logits.
    logits: Vec<Vec<Vec<u16>>>,
}

impl Rig {
    pub fn new(devices: &[Device], spec: Spec) -> Result<Rig> {
        let distinct = DISTINCT_ROWS.min(spec.rows);
        let row = |row: usize, rank: usize| -> Vec<u16> {
            let seed = (row * spec.ranks + rank + 1) as u64;
            let low = if spec.skewed && rank > 0 { 0x8000 } else { 0 };
            let logits = LogitPattern::Gaussian.row(seed, spec.local_len).into_iter();
            logits.map(|logit| canonical_logit(logit | low)).collect()
        };
        let logits: Vec<Vec<Vec<u16>>> =
            (0..distinct).map(|r| (0..spec.ranks).map(|rank| row(r, rank)).collect()).collect();
        let members = in_process(spec.ranks);
        let ranks = std::thread::scope(|scope| -> Result<Vec<Rank>> {
            let logits = &logits;
            let threads: Vec<_> = (members.into_iter().enumerate())
                .map(|(rank, member)| {
                    let device = devices[rank % devices.len()].clone();
                    scope.spawn(move || {
                        Rank::new(&device, spec, rank, Arc::new(member), logits).map_err(|e| e.to_string())
                    })
                })
                .collect();
            threads.into_iter().map(|thread| Ok(thread.join().expect("no rank panics")?)).collect()
        })?;
        Ok(Rig { spec, ranks, logits })
    }

    /// Every rank once, checked.
    pub fn run_checked(&self) -> Result<()> {
        for rank in &self.ranks {
            rank.launch_push(&rank.stream)?;
        }
        for rank in &self.ranks {
            rank.launch_merge(self.spec, &rank.stream)?;
        }
        self.check()
    }

    /// The exchange works, and the outputs of the first, the last and some other rows are the oracle's on every rank.
    pub fn check(&self) -> Result<()> {
        for (r, rank) in self.ranks.iter().enumerate() {
            rank.exchange.check(&rank.stream)?;
            self.check_rank(r)?;
        }
        Ok(())
    }

    /// The outputs of rank `r` alone.
    pub fn check_rank(&self, r: usize) -> Result<()> {
        let Spec { ranks, topk, rows, .. } = self.spec;
        let own = Ownership::new(ranks, 1)?;
        let rank = &self.ranks[r];
        let (got, counts) = (rank.rows_out.copy_to_vec(&rank.stream)?, rank.valid_out.copy_to_vec(&rank.stream)?);
        for row in [0, rows / 2, rows - 1] {
            let ids = merge_ids(&self.logits[row % self.logits.len()], own, topk);
            let mut want = owned_rows(&ids, r, own, |local| physical(self.spec, row, local));
            if counts[row] as usize != want.len() {
                return Err(format!("rank {r}, row {row}: {} rows, want {}", counts[row], want.len()).into());
            }
            want.resize(topk, -1);
            if let Some(slot) = (0..topk).find(|&slot| got[row * topk + slot] != want[slot]) {
                return Err(format!("rank {r}, row {row}, slot {slot}: not the oracle's row").into());
            }
        }
        Ok(())
    }
}

/// Blocks lie in order, request after request.
fn physical(spec: Spec, row: usize, local: usize) -> i32 {
    (row * spec.local_len.div_ceil(PAGE) * PAGE + local) as i32
}

impl Rank {
    fn new(
        device: &Device,
        spec: Spec,
        rank: usize,
        member: Arc<dyn Rendezvous>,
        logits: &[Vec<Vec<u16>>],
    ) -> Result<Rank> {
        let (shape, scratch) = (spec.exchange()?, spec.scratch());
        let merge = MergeShape::new(shape, 1, PAGE)?;
        let quiet = match shape.is_direct() {
            true => LocalTopkShape::full(spec.topk)?,
            false => LocalTopkShape::new(spec.n, spec.topk)?,
        };
        let gathered = || ExchangeMerge::new(device, merge.with_gathered(true));
        let mut all = vec![0u16; scratch.logits_len()];
        let mut all_tops = vec![0u16; scratch.tops_len()];
        for row in 0..spec.rows {
            let values = &logits[row % logits.len()][rank];
            let at = scratch.row_start(row);
            all[at..at + values.len()].copy_from_slice(values);
            let row_tops = tops(values, values.len());
            all_tops[at / 8..at / 8 + row_tops.len()].copy_from_slice(&row_tops);
        }
        let blocks: Vec<i32> = (0..(spec.rows * spec.local_len.div_ceil(PAGE)) as i32).collect();
        let limits = Limits { poll: Duration::from_secs(2), collective: Duration::from_secs(30) };
        Ok(Rank {
            stream: device.stream()?,
            exchange: Exchange::with_limits(device, member, shape, limits)?,
            pushing: shape.local_topk()?.map(|shape| spec.local_topk(device, shape)).transpose()?,
            quiet: spec.local_topk(device, quiet)?,
            merge: ExchangeMerge::new(device, merge)?,
            gathered: shape.is_direct().then(gathered).transpose()?,
            logits: device.upload(&all)?,
            tops: device.upload(&all_tops)?,
            row_ends: device.upload(&vec![spec.local_len as i32; spec.rows])?,
            table: device.upload(&blocks)?,
            b_rows: device.alloc(spec.rows * shape.sent().words())?,
            counts: device.alloc(spec.rows)?,
            rows_out: device.alloc(spec.rows * spec.topk)?,
            valid_out: device.alloc(spec.rows)?,
        })
    }

    fn local_step<'a>(&'a self, push: Option<Push<'a>>) -> LocalTopkStep<'a> {
        let rows = self.row_ends.len();
        LocalTopkStep {
            logits: self.logits.as_view(),
            tops: self.tops.as_view(),
            pitch: self.logits.len() / rows,
            row_ends: self.row_ends.as_view(),
            length_max: self.exchange.shape().local_len_max(),
            out: self.b_rows.as_view(),
            counts: self.counts.as_view(),
            push,
        }
    }

    pub fn launch_push(&self, stream: &Stream) -> Result<(), DcpError> {
        if let Some(pushing) = &self.pushing {
            pushing.launch(stream, &self.local_step(self.exchange.push()))?;
        }
        Ok(())
    }

    pub fn launch_quiet(&self, stream: &Stream) -> Result<(), DcpError> {
        Ok(self.quiet.launch(stream, &self.local_step(None))?)
    }

    pub fn launch_merge(&self, spec: Spec, stream: &Stream) -> Result<(), DcpError> {
        let width = spec.local_len.div_ceil(PAGE);
        let step = MergeStep {
            logits: self.logits.as_view(),
            tops: self.tops.as_view(),
            pitch: spec.scratch().pitch(),
            row_ends: self.row_ends.as_view(),
            length_max: spec.local_len,
            table: Table { ids: self.table.as_view(), stride: width, width },
            kv: KvShape::new(PAGE, PAGE, 0)?,
            rows_out: self.rows_out.as_view(),
            valid_out: self.valid_out.as_view(),
            ids: None,
        };
        self.merge.launch(stream, &self.exchange, &step)
    }

    /// Merges what was gathered into `received` as this exchange sends it.
    pub fn launch_gathered(&self, spec: Spec, received: &Buffer<u32>, stream: &Stream) -> Result<()> {
        let merge = self.gathered.as_ref().ok_or("only lists are merged from a gather")?;
        let args = MergeArgs { memory: received.as_view().cast::<u64>()?.ptr(), ..self.merge_args(spec) };
        Ok(merge.function().launch(stream, LaunchConfig::new(spec.rows as u32), &args)?)
    }

    fn merge_args(&self, spec: Spec) -> MergeArgs {
        MergeArgs {
            rows_out: self.rows_out.ptr(),
            valid_out: self.valid_out.ptr(),
            ids: DevicePtr::NULL,
            memory: self.exchange.memory().ptr(),
            peers: self.exchange.peers().ptr(),
            epochs: self.exchange.epochs().ptr(),
            sequences: self.exchange.sequences().ptr(),
            status: self.exchange.status().ptr(),
            logits: self.logits.ptr(),
            tops: self.tops.ptr(),
            table: self.table.ptr(),
            row_ends: self.row_ends.ptr(),
            lists_at: SymmetricLayout::new(self.exchange.shape()).lists() as u64,
            timeout_ns: self.exchange.limits().poll_ns(),
            pitch: spec.scratch().pitch() as u32,
            length_max: spec.local_len as u32,
            rows: spec.rows as u32,
            table_stride: spec.local_len.div_ceil(PAGE) as u32,
            block_rows: PAGE as u32,
            blocks: (spec.rows * spec.local_len.div_ceil(PAGE)) as u32,
            rank: self.exchange.rank() as u32,
            slot_rows: spec.rows as u32,
        }
    }

    /// `launches` merges of the last words that were pushed, as often as one likes. `alone`: back to back, which only merges
    /// without a second round may be, since each reads its sequence before the one before has ended.
    pub fn merges_again(&self, spec: Spec, launches: usize, alone: bool) -> Result<MergesAgain<'_>> {
        let device = self.stream.device();
        let epochs = device.alloc_zeros(launches * spec.rows)?;
        let sequences = if alone { Some(device.alloc_zeros(launches * spec.rows)?) } else { None };
        Ok(MergesAgain { rank: self, spec, epochs, sequences })
    }

    /// Forgets what the last run wrote.
    pub fn poison(&self) -> Result<()> {
        self.rows_out.fill_bytes(&self.stream, 0xA5)?;
        Ok(self.valid_out.fill_bytes(&self.stream, 0xA5)?)
    }
}

/// Merges whose words are all there: each has epochs of its own, so that the exchange's do not move.
pub struct MergesAgain<'a> {
    rank: &'a Rank,
    spec: Spec,
    epochs: Buffer<u32>,
    sequences: Option<Buffer<u32>>,
}

impl MergesAgain<'_> {
    /// Turns the epochs back to those before the exchange's last call.
    pub fn prepare(&self) -> Result<()> {
        let stream = &self.rank.stream;
        let last = self.rank.exchange.epochs().copy_to_vec(stream)?[0];
        self.epochs.copy_from(stream, &vec![last - 1; self.epochs.len()])?;
        Ok(stream.synchronize()?)
    }

    pub fn launch(&self, launch: usize, stream: &Stream) -> Result<(), DcpError> {
        let MergesAgain { rank, spec, epochs, sequences } = self;
        let counters = launch * spec.rows..(launch + 1) * spec.rows;
        let sequences = match sequences {
            Some(own) => own.view(counters.clone())?.ptr(),
            None => rank.exchange.sequences().ptr(),
        };
        let args = MergeArgs { epochs: epochs.view(counters)?.ptr(), sequences, ..rank.merge_args(*spec) };
        let config = LaunchConfig::new(spec.rows as u32).overlap(true);
        Ok(rank.merge.function().launch(stream, config, &args)?)
    }
}

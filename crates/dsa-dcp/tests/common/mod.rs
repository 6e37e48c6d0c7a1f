//! Groups of ranks that run whole exchanges and are held to a single rank's answer. One body, two executors: as many
//! simulated devices as ranks always, and the ranks dealt to the GPUs when there are some.

// Every test file uses its own part.
#![allow(dead_code)]

use std::sync::Arc;
use std::time::Duration;

use dsa_core::consts::{KEYS_PER_TOP, PAGE};
use dsa_core::generate::SplitMix64;
use dsa_core::layout::ll_slot::next_epoch;
use dsa_core::layout::pitched_scratch::PitchedScratch;
use dsa_core::numerics::order16::canonical_logit;
use dsa_core::oracle::merge::{Saturation, merge_ids, owned_rows, two_rounds};
use dsa_core::oracle::score::tops;
use dsa_core::oracle::select::select_ids;
use dsa_core::{KvShape, Ownership};
use dsa_dcp::merge::{MergeArgs, build as build_merge};
use dsa_dcp::rendezvous::in_process;
use dsa_dcp::{DcpError, Exchange, ExchangeMerge, ExchangeShape, Limits, MergeShape, MergeStep, Rendezvous};
use dsa_kernels::Table;
use dsa_kernels::local_topk::{IndexerLocalTopk, LocalTopkArgs, LocalTopkShape, LocalTopkStep, build as build_local};
use gpu::{Buffer, Device, Function, Graph, LaunchConfig, SimConfig, Stream};
use parking_lot::Mutex;
use ptx::{Kernel, KernelIr, Target};
use test_devices::gpu_only;
pub use test_devices::sim_config;

/// What outputs hold before a run.
pub const POISON: u8 = 0xA5;
/// [`POISON`] as the outputs' elements.
pub const POISON32: i32 = i32::from_ne_bytes([POISON; 4]);
/// Elements after each output that must keep the poison.
pub const GUARD: usize = 64;

/// What a group of ranks is built for.
#[derive(Clone, Debug)]
pub struct Spec {
    pub ranks: usize,
    pub interleave: usize,
    pub n: usize,
    pub topk: usize,
    pub q: usize,
    pub page: usize,
    pub context_len_max: usize,
    /// Rows of the exchange.
    pub rows: usize,
    pub foreign: bool,
    /// How long a kernel waits.
    pub poll: Duration,
    pub hold: bool,
    /// Whether the merge writes ids.
    pub ids: bool,
}

impl Spec {
    /// One row per request, tokens dealt singly, pages of 64, 4 exchange rows, contexts up to 8192 tokens.
    pub fn new(ranks: usize, n: usize, topk: usize) -> Spec {
        Spec {
            ranks,
            interleave: 1,
            n,
            topk,
            q: 1,
            page: 64,
            context_len_max: 8192,
            rows: 4,
            foreign: false,
            poll: Duration::from_millis(200),
            hold: false,
            ids: true,
        }
    }

    pub fn own(&self) -> Ownership {
        Ownership::new(self.ranks, self.interleave).unwrap()
    }

    pub fn exchange(&self) -> ExchangeShape {
        ExchangeShape::new(self.own(), self.rows, self.n, self.topk, self.context_len_max).unwrap()
    }

    pub fn limits(&self) -> Limits {
        Limits { poll: self.poll, collective: Duration::from_secs(30) }
    }

    pub fn merge(&self) -> MergeShape {
        let shape = MergeShape::new(self.exchange(), self.q, self.page).unwrap();
        shape.with_ids(self.ids).with_hold(self.hold).with_foreign_logits(self.foreign)
    }
}

/// `full` with `DSA_FULL=1` in the environment, for runs that take many minutes; else `short`.
pub fn full_or(full: usize, short: usize) -> usize {
    if std::env::var("DSA_FULL").is_ok_and(|v| v == "1") { full } else { short }
}

/// Rewrites a kernel's instruction list, for tests that break it.
pub type Rewrite<'a> = &'a dyn Fn(&mut KernelIr);

ptx::kernel_args! {
    /// How long to sleep.
    pub struct SleepArgs / SleepParams {
        /// milliseconds
        pub ms: u32,
    }
}

/// Longer than a call takes on the simulator or a GPU, much shorter than the limit of a poll.
const SLEEP_MS: u32 = 20;

/// A kernel that does nothing for a while.
fn sleeper(device: &Device) -> Function<SleepArgs> {
    let kernel = ptx::build::<SleepArgs>("sleep", Target::Sm90a, ptx::LaunchBounds::threads(32), |p| {
        ptx::wait_for_dependencies();
        ptx::for_range(0u32, p.ms, 1u32, |_| ptx::nanosleep(1_000_000u32));
    });
    device.load(&kernel.unwrap()).unwrap()
}

/// One rank.
pub struct Rank {
    pub device: Device,
    pub stream: Stream,
    pub exchange: Exchange,
    /// None if merges select by themselves.
    pub local_topk: Option<IndexerLocalTopk>,
    pub merge: ExchangeMerge,
    sleeper: Function<SleepArgs>,
}

/// All ranks, in one process.
pub struct Group {
    pub spec: Spec,
    pub ranks: Vec<Rank>,
}

/// Runs `body` as every rank at once.
pub fn as_every_rank<T: Send>(ranks: usize, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || body(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

impl Group {
    /// On a machine of its own, one device per rank.
    pub fn simulated(spec: &Spec, config: SimConfig) -> Group {
        let devices = Device::simulated_group(SimConfig { devices: spec.ranks, ..config });
        Group::new(spec, &devices, None, None)
    }

    /// With kernels rewritten, if asked.
    pub fn new(spec: &Spec, devices: &[Device], local: Option<Rewrite<'_>>, merge: Option<Rewrite<'_>>) -> Group {
        let local_topk = spec.exchange().local_topk().unwrap().map(|shape| {
            let shape = shape.with_foreign_logits(spec.foreign);
            let kernel = build_local(&shape, Target::Sm90a).unwrap();
            let Some(rewrite) = local else { return (shape, kernel) };
            let mut ir = KernelIr::clone(kernel.ir());
            rewrite(&mut ir);
            (shape, Kernel::<LocalTopkArgs>::from_ir(ir).unwrap())
        });
        let mut merged = build_merge(&spec.merge(), Target::Sm90a).unwrap();
        if let Some(rewrite) = merge {
            let mut ir = KernelIr::clone(merged.ir());
            rewrite(&mut ir);
            merged = Kernel::<MergeArgs>::from_ir(ir).unwrap();
        }
        let members: Vec<Arc<dyn Rendezvous>> =
            in_process(spec.ranks).into_iter().map(|member| Arc::new(member) as Arc<dyn Rendezvous>).collect();
        let ranks = as_every_rank(spec.ranks, |rank| {
            let device = devices[rank].clone();
            let load = |(shape, kernel): &(LocalTopkShape, Kernel<LocalTopkArgs>)| {
                IndexerLocalTopk::from_kernel(&device, *shape, kernel).unwrap()
            };
            Rank {
                stream: device.stream().unwrap(),
                exchange: Exchange::with_limits(&device, members[rank].clone(), spec.exchange(), spec.limits())
                    .unwrap(),
                local_topk: local_topk.as_ref().map(load),
                merge: ExchangeMerge::from_kernel(&device, spec.merge(), &merged).unwrap(),
                sleeper: sleeper(&device),
                device,
            }
        });
        Group { spec: spec.clone(), ranks }
    }

    /// Lets `rank` do nothing for a while.
    pub fn sleep(&self, rank: usize) -> Result<(), gpu::Error> {
        let Rank { stream, sleeper, .. } = &self.ranks[rank];
        sleeper.launch(stream, LaunchConfig::new(1).overlap(true), &SleepArgs { ms: SLEEP_MS })
    }

    /// Launches the local top-k of `rank`, if the exchange has one.
    pub fn select(&self, layer: &Layer, rank: usize) -> Result<(), DcpError> {
        let Rank { stream, exchange, local_topk, .. } = &self.ranks[rank];
        if let Some(local_topk) = local_topk {
            local_topk.launch(stream, &layer.local_step(rank, Some(exchange)))?;
        }
        Ok(())
    }

    /// As [`launch`](Group::launch) with one rank asleep before its local top-k, or between it and the merge: the others
    /// run ahead as far as the protocol lets them.
    pub fn launch_skewed(&self, layer: &Layer, slow: usize, between: bool) -> Result<(), DcpError> {
        for rank in 0..self.ranks.len() {
            if rank == slow && !between {
                self.sleep(rank)?;
            }
            self.select(layer, rank)?;
            if rank == slow && between {
                self.sleep(rank)?;
            }
        }
        for (rank, Rank { stream, exchange, merge, .. }) in self.ranks.iter().enumerate() {
            merge.launch(stream, exchange, &layer.merge_step(rank))?;
        }
        Ok(())
    }

    /// Launches a call on `ranks`. The local top-k of all first: ranks that share a GPU may share its launch queues.
    pub fn launch_on(&self, layer: &Layer, ranks: &[usize]) -> Result<(), DcpError> {
        ranks.iter().try_for_each(|&rank| self.select(layer, rank))?;
        for &rank in ranks {
            let Rank { stream, exchange, merge, .. } = &self.ranks[rank];
            merge.launch(stream, exchange, &layer.merge_step(rank))?;
        }
        Ok(())
    }

    /// Lets every row's counters start at these.
    pub fn set_counters(&self, epoch: u32, sequence: u32) {
        for Rank { exchange, stream, .. } in &self.ranks {
            exchange.epochs().copy_from(stream, &vec![epoch; self.spec.rows]).unwrap();
            exchange.sequences().copy_from(stream, &vec![sequence; self.spec.rows]).unwrap();
        }
    }

    /// Launches a call on every rank.
    pub fn launch(&self, layer: &Layer) {
        self.launch_on(layer, &(0..self.spec.ranks).collect::<Vec<_>>()).unwrap();
    }

    /// Every rank's verdict on the exchanges so far.
    pub fn check(&self) -> Vec<Result<(), DcpError>> {
        self.ranks.iter().map(|rank| rank.exchange.check(&rank.stream)).collect()
    }

    /// Resets every rank.
    pub fn reset(&self) {
        let results = as_every_rank(self.spec.ranks, |rank| {
            let Rank { stream, exchange, .. } = &self.ranks[rank];
            exchange.reset(stream)
        });
        results.into_iter().for_each(|result| result.unwrap());
    }

    /// Launches, and compares with a single rank. Round 2 takes place for exactly the rows for which the oracle has one.
    #[track_caller]
    pub fn run(&self, layer: &Layer) {
        layer.poison(self);
        let before = self.counters();
        self.launch(layer);
        self.check().into_iter().for_each(|verdict| verdict.unwrap());
        layer.verify(self);
        let rescued = layer.rescued();
        for (rank, (before, after)) in before.into_iter().zip(self.counters()).enumerate() {
            for (row, rescued) in rescued.iter().enumerate() {
                let [epoch, sequence] = [before[0][row], before[1][row]];
                let next = if *rescued { next_epoch(sequence) } else { sequence };
                assert_eq!(
                    [after[0][row], after[1][row]],
                    [next_epoch(epoch), next],
                    "counters of rank {rank}, row {row}"
                );
            }
        }
    }

    /// Every rank's epochs and sequences.
    pub fn counters(&self) -> Vec<[Vec<u32>; 2]> {
        let of = |Rank { exchange, stream, .. }: &Rank| {
            [exchange.epochs(), exchange.sequences()].map(|words| words.copy_to_vec(stream).unwrap())
        };
        self.ranks.iter().map(of).collect()
    }

    /// A call on one rank as a graph.
    pub fn capture(&self, layers: &[&Layer], rank: usize) -> Graph {
        let Rank { stream, exchange, merge, .. } = &self.ranks[rank];
        Graph::capture(stream, |stream| {
            for layer in layers {
                self.select(layer, rank).unwrap();
                merge.launch(stream, exchange, &layer.merge_step(rank)).unwrap();
            }
            Ok(())
        })
        .unwrap()
    }
}

/// One rank's buffers of a layer.
pub struct Buffers {
    pub logits: Buffer<u16>,
    pub tops: Buffer<u16>,
    pub row_ends: Buffer<i32>,
    pub table: Buffer<i32>,
    pub b_rows: Buffer<u32>,
    pub counts: Buffer<i32>,
    pub rows_out: Buffer<i32>,
    pub valid_out: Buffer<i32>,
    pub ids: Buffer<i32>,
}

/// The logits of a step over all ranks, dealt out.
pub struct Layer {
    spec: Spec,
    /// Per live row, in global order.
    pub rows: Vec<Vec<u16>>,
    /// Rows that take part without keys.
    pub spare: usize,
    table: Vec<Vec<i32>>,
    pub buffers: Vec<Buffers>,
}

const BLOCK_ROWS_EXTRA: usize = 3;

impl Layer {
    /// `rows` live rows and `spare` others, on the devices of `group`.
    pub fn new(group: &Group, rows: Vec<Vec<u16>>, spare: usize) -> Layer {
        let spec = group.spec.clone();
        let canonical = |row: Vec<u16>| match spec.foreign {
            true => row,
            false => row.into_iter().map(canonical_logit).collect::<Vec<_>>(),
        };
        let rows: Vec<Vec<u16>> = rows.into_iter().map(canonical).collect();
        assert!(rows.len().is_multiple_of(spec.q) && rows.iter().all(|row| row.len() <= spec.context_len_max));
        let width = spec.exchange().local_len_max().div_ceil(spec.page);
        let requests = rows.len() / spec.q;
        let table = (0..spec.ranks)
            .map(|rank| {
                let mut blocks: Vec<i32> = (0..(requests * width) as i32).collect();
                SplitMix64::new(rank as u64).shuffle(&mut blocks);
                blocks
            })
            .collect();
        let mut layer = Layer { spec, rows, spare, table, buffers: Vec::new() };
        layer.buffers = (0..group.spec.ranks).map(|rank| layer.on_device(&group.ranks[rank], rank)).collect();
        layer.poison(group);
        layer
    }

    fn total(&self) -> usize {
        self.rows.len() + self.spare
    }

    fn scratch(&self) -> PitchedScratch {
        PitchedScratch::new(self.rows.len(), self.spec.exchange().local_len_max())
    }

    /// The logits of `row` that `rank` holds.
    fn dealt(&self, row: usize, rank: usize) -> Vec<u16> {
        let own = self.spec.own();
        let row = &self.rows[row];
        (0..own.local_len(rank, row.len())).map(|local| row[own.global_of(rank, local)]).collect()
    }

    /// Lays a rank's logits out as the pitched score does: only pages that hold keys are written.
    fn on_device(&self, on: &Rank, rank: usize) -> Buffers {
        let (device, stream, scratch) = (&on.device, &on.stream, self.scratch());
        let logits = device.alloc::<u16>(scratch.logits_len()).unwrap();
        let all_tops = device.alloc::<u16>(scratch.tops_len()).unwrap();
        if !device.info().simulated {
            logits.fill_bytes(stream, 0x7F).unwrap();
            all_tops.fill_bytes(stream, 0xFF).unwrap();
        }
        let mut ends = Vec::new();
        for row in 0..self.rows.len() {
            let values = self.dealt(row, rank);
            ends.push(values.len() as i32);
            let mut padded = values.clone();
            padded.resize(values.len().next_multiple_of(PAGE), 0x7F80); // +infinity past the end
            let at = scratch.row_start(row);
            logits.view(at..at + padded.len()).unwrap().copy_from(stream, &padded).unwrap();
            let mut row_tops = tops(&values, values.len());
            row_tops.resize(padded.len() / KEYS_PER_TOP, 0);
            let at = at / KEYS_PER_TOP;
            all_tops.view(at..at + row_tops.len()).unwrap().copy_from(stream, &row_tops).unwrap();
        }
        let (total, topk) = (self.total(), self.spec.topk);
        Buffers {
            logits,
            tops: all_tops,
            row_ends: device.upload(&ends).unwrap(),
            table: device.upload(&self.table[rank]).unwrap(),
            b_rows: device.alloc(total * self.spec.exchange().words().words()).unwrap(),
            counts: device.alloc(total).unwrap(),
            rows_out: device.alloc(total * topk + GUARD).unwrap(),
            valid_out: device.alloc(total + GUARD).unwrap(),
            ids: device.alloc(total * topk + GUARD).unwrap(),
        }
    }

    /// Other logits of the same lengths.
    pub fn replace(&mut self, group: &Group, rows: Vec<Vec<u16>>) {
        assert!(rows.iter().map(Vec::len).eq(self.rows.iter().map(Vec::len)));
        let other = Layer::new(group, rows, self.spare);
        for (rank, (to, from)) in group.ranks.iter().zip(self.buffers.iter().zip(&other.buffers)) {
            to.logits.copy_from_device(&rank.stream, &from.logits.as_view()).unwrap();
            to.tops.copy_from_device(&rank.stream, &from.tops.as_view()).unwrap();
            rank.stream.synchronize().unwrap();
        }
        self.rows = other.rows;
    }

    pub fn poison(&self, group: &Group) {
        for (buffers, rank) in self.buffers.iter().zip(&group.ranks) {
            for output in [&buffers.rows_out, &buffers.valid_out, &buffers.ids] {
                output.fill_bytes(&rank.stream, POISON).unwrap();
            }
        }
    }

    pub fn local_step<'a>(&'a self, rank: usize, exchange: Option<&'a Exchange>) -> LocalTopkStep<'a> {
        let buffers = &self.buffers[rank];
        LocalTopkStep {
            logits: buffers.logits.as_view(),
            tops: buffers.tops.as_view(),
            pitch: self.scratch().pitch(),
            row_ends: buffers.row_ends.as_view(),
            length_max: self.spec.exchange().local_len_max(),
            out: buffers.b_rows.as_view(),
            counts: buffers.counts.as_view(),
            push: exchange.and_then(Exchange::push),
        }
    }

    fn kv(&self) -> KvShape {
        Layer::kv_of(&self.spec, 0)
    }

    /// An MLA cache of `blocks` blocks, 0 if their number is not known.
    pub fn kv_of(spec: &Spec, blocks: usize) -> KvShape {
        KvShape::new(spec.page, spec.page + BLOCK_ROWS_EXTRA, blocks).unwrap()
    }

    pub fn merge_step(&self, rank: usize) -> MergeStep<'_> {
        let buffers = &self.buffers[rank];
        let (total, topk) = (self.total(), self.spec.topk);
        let width = self.spec.exchange().local_len_max().div_ceil(self.spec.page);
        MergeStep {
            logits: buffers.logits.as_view(),
            tops: buffers.tops.as_view(),
            pitch: self.scratch().pitch(),
            row_ends: buffers.row_ends.as_view(),
            length_max: self.spec.exchange().local_len_max(),
            table: Table { ids: buffers.table.as_view(), stride: width, width },
            kv: self.kv(),
            rows_out: buffers.rows_out.view(..total * topk).unwrap(),
            valid_out: buffers.valid_out.view(..total).unwrap(),
            ids: self.spec.ids.then(|| buffers.ids.view(..total * topk).unwrap()),
        }
    }

    /// Which rows need a second round: none of a direct exchange.
    pub fn rescued(&self) -> Vec<bool> {
        if self.spec.exchange().is_direct() {
            return vec![false; self.total()];
        }
        let Spec { n, topk, .. } = self.spec;
        let rescued = |row: usize| {
            let dealt: Vec<_> = (0..self.spec.ranks).map(|rank| self.dealt(row, rank)).collect();
            !two_rounds(&dealt, self.spec.own(), n, topk, Saturation::FullKey).saturated.is_empty()
        };
        (0..self.total()).map(|row| row < self.rows.len() && rescued(row)).collect()
    }

    /// What `rank` must have written: (ids, rows, counts).
    pub fn expected(&self, rank: usize) -> [Vec<i32>; 3] {
        let (own, topk) = (self.spec.own(), self.spec.topk);
        let width = self.spec.exchange().local_len_max().div_ceil(self.spec.page);
        let [mut ids, mut rows, mut counts] = [const { Vec::new() }; 3];
        for row in 0..self.total() {
            let global: &[u16] = self.rows.get(row).map_or(&[], |row| row);
            let selected = select_ids(global, topk);
            let dealt: Vec<Vec<u16>> = (0..self.spec.ranks)
                .map(|rank| self.rows.get(row).map_or(Vec::new(), |_| self.dealt(row, rank)))
                .collect();
            assert_eq!(merge_ids(&dealt, own, topk), selected, "the oracles agree");
            let table = &self.table[rank];
            let physical = |local: usize| {
                let block = table[row / self.spec.q * width + local / self.spec.page] as usize;
                (block * self.kv().block_rows() + local % self.spec.page) as i32
            };
            let mut owned = owned_rows(&selected, rank, own, physical);
            counts.push(owned.len() as i32);
            owned.resize(topk, -1);
            rows.extend(owned);
            let mut selected: Vec<i32> = selected.into_iter().map(|id| id as i32).collect();
            selected.resize(topk, -1);
            ids.extend(if self.spec.ids { selected } else { vec![POISON32; topk] });
        }
        [ids, rows, counts]
    }

    /// What `rank` has written; what follows each output must be poison, and so must ids that nobody writes.
    pub fn read(&self, group: &Group, rank: usize) -> [Vec<i32>; 3] {
        let (buffers, stream) = (&self.buffers[rank], &group.ranks[rank].stream);
        [&buffers.ids, &buffers.rows_out, &buffers.valid_out].map(|output| {
            let mut values = output.copy_to_vec(stream).unwrap();
            let guard = values.split_off(values.len() - GUARD);
            assert!(guard.iter().all(|x| *x == POISON32), "a write past an output of rank {rank}");
            values
        })
    }

    /// Every rank has a single rank's ids, and exactly its own rows of them.
    #[track_caller]
    pub fn verify(&self, group: &Group) {
        if let Err(difference) = self.difference(group) {
            panic!("{difference}\n{:?}", self.spec);
        }
        let counts: Vec<Vec<i32>> = (0..self.spec.ranks).map(|rank| self.read(group, rank)[2].clone()).collect();
        for row in 0..self.total() {
            let sum: i32 = counts.iter().map(|counts| counts[row]).sum();
            let keys = self.rows.get(row).map_or(0, Vec::len);
            assert_eq!(sum as usize, keys.min(self.spec.topk), "row {row}: the ranks' counts together");
        }
    }

    /// The first difference from the oracle.
    pub fn difference(&self, group: &Group) -> Result<(), String> {
        for rank in 0..self.spec.ranks {
            let (got, want) = (self.read(group, rank), self.expected(rank));
            for (name, per_row, output) in [("id", self.spec.topk, 0), ("row", self.spec.topk, 1), ("count", 1, 2)] {
                if let Some(at) = (0..want[output].len()).find(|&i| got[output][i] != want[output][i]) {
                    let (row, slot) = (at / per_row, at % per_row);
                    let (got, want) = (got[output][at], want[output][at]);
                    return Err(format!("rank {rank}, row {row}, slot {slot}: {name} {got}, want {want}"));
                }
            }
        }
        Ok(())
    }

    /// Every output of `rank` is empty.
    pub fn is_empty(&self, group: &Group, rank: usize) -> bool {
        let [ids, rows, counts] = self.read(group, rank);
        let no_id = if self.spec.ids { -1 } else { POISON32 };
        ids.iter().all(|x| *x == no_id) && rows.iter().all(|x| *x == -1) && counts.iter().all(|x| *x == 0)
    }
}

/// Runs `body` on simulated devices in fixed order.
pub fn on_sim(spec: &Spec, body: impl Fn(&Group)) {
    in_orders([sim_config()], spec, body);
}

/// Runs `body` on simulated devices in fixed orders and in `seeds` random ones.
pub fn in_every_order(spec: &Spec, seeds: u64, body: impl Fn(&Group)) {
    in_orders(std::iter::once(sim_config()).chain((1..=seeds).map(SimConfig::seeded)), spec, body);
}

fn in_orders(configs: impl IntoIterator<Item = SimConfig>, spec: &Spec, body: impl Fn(&Group)) {
    if gpu_only() {
        return;
    }
    configs.into_iter().for_each(|config| body(&Group::simulated(spec, config)));
}

/// Every GPU here; the reason why there is none.
pub fn gpus() -> Result<Vec<Device>, gpu::Error> {
    (0..Device::cuda_count()?).map(Device::cuda).collect()
}

/// Runs `body` on the GPUs here, if there are any: rank `r` on GPU `r % GPUs`, each with its own stream and memory.
///
/// At most 8 ranks a GPU: more streams than the driver has queues could order one rank's merge before another's push.
pub fn on_gpu(spec: &Spec, body: impl Fn(&Group)) {
    // One group at a time: ranks of several could queue behind each other.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock();
    match gpus() {
        Ok(gpus) => {
            assert!(spec.ranks <= 8 * gpus.len());
            let devices: Vec<_> = gpus.iter().cycle().take(spec.ranks).cloned().collect();
            body(&Group::new(spec, &devices, None, None));
        }
        Err(error) if error.is_unavailable() => println!("SKIPPED: no CUDA device ({error})"),
        Err(error) => panic!("a CUDA device is present but unusable: {error}"),
    }
}

/// A row of `len` logits whose keys fall from rank to rank: all of the first top-k lie on `favourite`.
pub fn on_one_rank(spec: &Spec, favourite: usize, len: usize, seed: u64) -> Vec<u16> {
    let own = spec.own();
    let mut rng = SplitMix64::new(seed);
    (0..len)
        .map(|id| {
            let level = if own.rank_of(id) == favourite { 0x4200 } else { 0x3E00 }; // 32 and more, 0.125 and more
            level + rng.below(0x80) as u16
        })
        .collect()
}

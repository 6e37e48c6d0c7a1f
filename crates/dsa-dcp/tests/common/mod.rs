//! Groups of ranks that run whole exchanges and are held to a single rank's answer. One body, two executors: as many
//! simulated devices as ranks always, and the ranks dealt to the GPUs when there are some.

// Every test file uses its own part.
#![allow(dead_code)]

mod layer;

use std::sync::Arc;
use std::time::Duration;

use dsa_core::Ownership;
use dsa_core::generate::SplitMix64;
use dsa_core::layout::ll_slot::next_epoch;
use dsa_dcp::merge::{MergeArgs, build as build_merge};
use dsa_dcp::rendezvous::in_process;
use dsa_dcp::{DcpError, Exchange, ExchangeMerge, ExchangeShape, Limits, MergeShape, Rendezvous};
use dsa_kernels::local_topk::{IndexerLocalTopk, LocalTopkArgs, LocalTopkShape, build as build_local};
use gpu::{Device, Function, Graph, LaunchConfig, SimConfig, Stream};
use parking_lot::Mutex;
use ptx::{Kernel, KernelIr, Target};
use test_devices::gpu_only;
pub use test_devices::sim_config;

pub use layer::Layer;

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
    /// CTAs of the local top-k a row.
    pub cluster: u32,
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
            cluster: 1,
        }
    }

    pub fn own(&self) -> Ownership {
        Ownership::new(self.ranks, self.interleave).unwrap()
    }

    pub fn exchange(&self) -> ExchangeShape {
        ExchangeShape::new(self.own(), self.rows, self.n, self.topk, self.context_len_max).unwrap()
    }

    /// Says that its merges select by themselves.
    #[track_caller]
    pub fn direct(self) -> Spec {
        assert!(self.exchange().is_direct(), "{self:?}");
        self
    }

    /// Says that its ranks push what a local top-k selects, and lists in a second round.
    #[track_caller]
    pub fn ordinary(self) -> Spec {
        assert!(!self.exchange().is_direct(), "{self:?}");
        self
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
            let shape = shape.with_foreign_logits(spec.foreign).with_cluster(spec.cluster).unwrap();
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
        Ok(gpus) if spec.ranks > 8 * gpus.len() => {
            println!("SKIPPED: {} ranks need more GPUs than {}", spec.ranks, gpus.len());
        }
        Ok(gpus) => {
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

//! A rank per process: memory shared over CUDA IPC, and NCCL. The other ranks are this binary once more.
//!
//! Two processes on one GPU, and on two where there are two.

mod common;

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::{Group, Layer, Rank, Spec, on_one_rank};
use dsa_core::generate::LogitPattern;
use dsa_dcp::gathered::{GatheredExchange, GatheredStep, GatheredTopk};
use dsa_dcp::{
    AllGather, DcpError, Exchange, ExchangeMerge, Limits, NcclAllGather, Rendezvous, RendezvousError, TcpRendezvous,
};
use gpu::{Device, Graph, SimConfig};

/// Tells a child its case, the group's address, its rank, and its device (none for the simulator).
const CHILD: &str = "DSA_TEST_PROCESS";
const RANKS: usize = 2;
const LIMIT: Duration = Duration::from_secs(60);

/// What a process does; `Err` is what the case expects to see.
type Case = fn(Arc<dyn Rendezvous>, Option<Device>);

const CASES: [(&str, Case); 6] = [
    ("calls", calls),
    ("late", late),
    ("gone", gone),
    ("unmappable", unmappable),
    ("nccl", nccl),
    ("nccl_late", nccl_late),
];

fn case(name: &str) -> Case {
    CASES.iter().find(|(case, _)| *case == name).unwrap().1
}

/// Not a test of its own: what a child process does.
#[test]
fn child() {
    let Ok(what) = std::env::var(CHILD) else { return };
    let [name, address, rank, device] = what.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let device = (device != "sim").then(|| Device::cuda(device.parse().unwrap()).unwrap());
    let group = TcpRendezvous::join(address.parse().unwrap(), rank.parse().unwrap(), RANKS, name, LIMIT).unwrap();
    case(name)(Arc::new(group), device);
}

/// Ends a child that is still there.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // It has mostly ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One case at a time: this process has one context a device, in which a case that allocates waits for kernels of the others,
/// which wait for their peers. Two communicators can wait for each other so for ever.
static TURN: Mutex<()> = Mutex::new(());

/// Runs a case as rank 0 on the first device and, in another process, as rank 1 on the second.
fn run(name: &str, devices: [Option<usize>; RANKS]) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let device = devices[1].map_or("sim".to_string(), |ordinal| ordinal.to_string());
    let what = format!("{name} {} 1 {device}", listener.local_addr().unwrap());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env(CHILD, what).stdout(Stdio::null());
    let mut child = Reaped(command.spawn().unwrap());
    let group = TcpRendezvous::host(listener, RANKS, name, LIMIT).unwrap();
    case(name)(Arc::new(group), devices[0].map(|ordinal| Device::cuda(ordinal).unwrap()));
    let start = Instant::now();
    let status = loop {
        match child.0.try_wait().unwrap() {
            Some(status) => break status,
            None => assert!(start.elapsed() < LIMIT, "{name}: the other process does not end"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success(), "{name}: the other process {status}");
}

/// The devices of two ranks: one GPU for both, then one each.
fn on_gpus(name: &str) {
    let Some(count) = gpus() else { return };
    run(name, [Some(0), Some(0)]);
    match count {
        1 => println!("SKIPPED: {name} on two GPUs (one found)"),
        _ => run(name, [Some(0), Some(1)]),
    }
}

fn gpus() -> Option<usize> {
    match Device::cuda(0).and_then(|_| Device::cuda_count()) {
        Ok(count) => Some(count),
        Err(error) if error.is_unavailable() => {
            println!("SKIPPED: no CUDA device ({error})");
            None
        }
        Err(error) => panic!("a CUDA device is present but unusable: {error}"),
    }
}

fn spec() -> Spec {
    // Processes take turns on a GPU that they share: a wait may be long.
    Spec { interleave: 4, rows: 3, poll: Duration::from_secs(10), ..Spec::new(RANKS, 256, 384) }.ordinary()
}

/// As [`spec`] for merges that select by themselves.
fn direct() -> Spec {
    Spec { n: 128, ..spec() }.direct()
}

/// Rows of which the second saturates a rank.
fn rows(spec: &Spec, seed: u64) -> Vec<Vec<u16>> {
    vec![
        LogitPattern::Gaussian.row(seed, 900),
        on_one_rank(spec, seed as usize % spec.ranks, 800, seed),
        LogitPattern::FewDistinct(3).row(seed, 700),
    ]
}

/// This process's rank of a group of processes. The other ranks of the result only hold what the test compares with.
fn join(spec: &Spec, group: &Arc<dyn Rendezvous>, device: &Device) -> Group {
    let mut all = Group::new(spec, &vec![device.clone(); spec.ranks], None, None);
    let exchange = Exchange::with_limits(device, group.clone(), spec.exchange(), spec.limits()).unwrap();
    all.ranks[group.rank()].exchange = exchange;
    all
}

/// Every process has come this far.
fn barrier(group: &Arc<dyn Rendezvous>) {
    group.all_gather(&[], LIMIT).unwrap();
}

fn verify(all: &Group, rank: usize, layer: &Layer) {
    let Rank { exchange, stream, .. } = &all.ranks[rank];
    exchange.check(stream).unwrap();
    assert_eq!(layer.read(all, rank), layer.expected(rank), "rank {rank}");
}

/// Eager calls, captured ones, and both mixed.
fn calls(group: Arc<dyn Rendezvous>, device: Option<Device>) {
    let device = device.unwrap();
    [spec(), direct()].into_iter().for_each(|spec| calls_of(spec, &group, device.clone()));
}

fn calls_of(spec: Spec, group: &Arc<dyn Rendezvous>, device: Device) {
    let rank = group.rank();
    let all = join(&spec, group, &device);
    let layers = [1, 2].map(|seed| Layer::new(&all, rows(&spec, seed), 0));
    barrier(group);
    for call in 0..6 {
        all.launch_on(&layers[call % 2], &[rank]).unwrap();
    }
    layers.iter().for_each(|layer| verify(&all, rank, layer));
    // An odd number of calls, so that neighbouring replays use opposite parities.
    let graph = all.capture(&[&layers[0], &layers[1], &layers[0]], rank);
    layers.iter().for_each(|layer| layer.poison(&all));
    for replay in 0..100 {
        graph.launch(&all.ranks[rank].stream).unwrap();
        if replay % 7 == 0 {
            all.launch_on(&layers[1], &[rank]).unwrap();
        }
    }
    layers.iter().for_each(|layer| verify(&all, rank, layer));
    // A new exchange cannot take the place of one that a graph uses.
    let Rank { exchange, stream, .. } = &all.ranks[rank];
    assert!(matches!(exchange.grown(stream, 5), Err(DcpError::Captured { rank: 0, .. })));
    barrier(group);
}

/// Rank 1 leaves a call out; rank 0 is told in time, and a reset restores service.
fn late(group: Arc<dyn Rendezvous>, device: Option<Device>) {
    let spec = Spec { poll: Duration::from_millis(500), ..spec() };
    let (device, rank) = (device.unwrap(), group.rank());
    let all = join(&spec, &group, &device);
    let layer = Layer::new(&all, rows(&spec, 3), 0);
    barrier(&group);
    let Rank { exchange, stream, .. } = &all.ranks[rank];
    if rank == 0 {
        let start = Instant::now();
        all.launch_on(&layer, &[rank]).unwrap();
        let verdict = exchange.check(stream);
        assert!(matches!(verdict, Err(DcpError::PeerLate { rank: 0, peer: 1, .. })), "{verdict:?}");
        assert!(start.elapsed() < Duration::from_secs(20));
        assert!(layer.is_empty(&all, rank));
    }
    exchange.reset(stream).unwrap();
    for _ in 0..3 {
        layer.poison(&all);
        all.launch_on(&layer, &[rank]).unwrap();
        verify(&all, rank, &layer);
    }
    barrier(&group);
}

/// The process of rank 1 ends without a word.
fn gone(group: Arc<dyn Rendezvous>, device: Option<Device>) {
    let spec = Spec { poll: Duration::from_millis(500), ..spec() };
    let (device, rank) = (device.unwrap(), group.rank());
    let all = join(&spec, &group, &device);
    let layer = Layer::new(&all, rows(&spec, 4), 0);
    barrier(&group);
    if rank == 1 {
        std::process::exit(0);
    }
    // So that its memory is gone, as far as the driver lets it go.
    std::thread::sleep(Duration::from_millis(300));
    all.launch_on(&layer, &[rank]).unwrap();
    let Rank { exchange, stream, .. } = &all.ranks[rank];
    let verdict = exchange.check(stream);
    assert!(matches!(verdict, Err(DcpError::PeerLate { rank: 0, peer: 1, .. })), "{verdict:?}");
    assert!(layer.is_empty(&all, rank));
    let reset = exchange.reset(stream);
    assert!(matches!(reset, Err(DcpError::Rendezvous(RendezvousError::Lost { peer: 1, .. }))), "{reset:?}");
    // The device is none the worse.
    device.upload(&[1u32]).unwrap();
}

/// Devices that share nothing between processes: both ranks learn of the first pair.
fn unmappable(group: Arc<dyn Rendezvous>, device: Option<Device>) {
    assert!(device.is_none());
    let device = Device::simulated(SimConfig::default());
    let error = Exchange::with_limits(&device, group, spec().exchange(), spec().limits()).unwrap_err();
    let DcpError::PeerUnmappable { rank: 0, peer: 0, reason } = &error else { panic!("{error:?}") };
    assert!(reason.contains("simulator"), "{reason}");
}

/// This process's rank of an exchange by NCCL.
struct Gathering {
    exchange: GatheredExchange,
    topk: GatheredTopk,
    merge: ExchangeMerge,
    rank: usize,
}

impl Gathering {
    fn join(spec: &Spec, group: &Arc<dyn Rendezvous>, device: &Device, limits: Limits) -> Gathering {
        let gather: Arc<dyn AllGather> = Arc::new(NcclAllGather::new(device, group.clone(), LIMIT).unwrap());
        let shape = spec.exchange();
        Gathering {
            exchange: GatheredExchange::new(device, group.clone(), gather, shape, limits).unwrap(),
            topk: GatheredTopk::new(device, &shape, false).unwrap(),
            merge: ExchangeMerge::new(device, spec.merge().with_gathered(true)).unwrap(),
            rank: group.rank(),
        }
    }

    fn launch(&self, stream: &gpu::Stream, layer: &Layer) {
        let local = layer.local_step(self.rank, None);
        let step = GatheredStep {
            logits: local.logits,
            tops: local.tops,
            pitch: local.pitch,
            row_ends: local.row_ends,
            length_max: local.length_max,
            counts: local.counts,
        };
        self.exchange.launch(stream, &self.topk, &step).unwrap();
        self.merge.launch_gathered(stream, &self.exchange, &layer.merge_step(self.rank)).unwrap();
    }
}

/// Eager and captured gathers.
fn nccl(group: Arc<dyn Rendezvous>, device: Option<Device>) {
    let (spec, device, rank) = (spec(), device.unwrap(), group.rank());
    let all = Group::new(&spec, &vec![device.clone(); spec.ranks], None, None);
    let stream = &all.ranks[rank].stream;
    let mut layers = [1, 2].map(|seed| Layer::new(&all, rows(&spec, seed), 0));
    let gathering = Gathering::join(&spec, &group, &device, spec.limits());
    let verify = |layers: &[Layer]| {
        gathering.exchange.check(stream).unwrap();
        layers.iter().for_each(|layer| assert_eq!(layer.read(&all, rank), layer.expected(rank), "rank {rank}"));
    };
    for _ in 0..3 {
        layers.iter().for_each(|layer| gathering.launch(stream, layer));
    }
    verify(&layers);
    let graph = Graph::capture(stream, |stream| {
        layers.iter().for_each(|layer| gathering.launch(stream, layer));
        Ok(())
    });
    let graph = graph.unwrap();
    for seed in 3..9 {
        layers.iter_mut().zip(0..).for_each(|(layer, i)| {
            layer.replace(&all, rows(&spec, 2 * seed + i));
            layer.poison(&all);
        });
        for _ in 0..10 {
            graph.launch(stream).unwrap();
        }
        verify(&layers);
    }
    drop(graph);
    barrier(&group);
}

/// Rank 1 leaves a gather out; rank 0 gives up in time, and a reset restores service.
fn nccl_late(group: Arc<dyn Rendezvous>, device: Option<Device>) {
    let (spec, device, rank) = (spec(), device.unwrap(), group.rank());
    let all = Group::new(&spec, &vec![device.clone(); spec.ranks], None, None);
    let stream = &all.ranks[rank].stream;
    let layer = Layer::new(&all, rows(&spec, 3), 0);
    let limits = Limits { collective: Duration::from_secs(5), ..spec.limits() };
    let gathering = Gathering::join(&spec, &group, &device, limits);
    if rank == 0 {
        let start = Instant::now();
        gathering.launch(stream, &layer);
        let verdict = gathering.exchange.check(stream);
        assert!(matches!(verdict, Err(DcpError::GatherLate { rank: 0, .. })), "{verdict:?}");
        assert!(start.elapsed() < Duration::from_secs(20));
        assert!(layer.is_empty(&all, rank));
    }
    gathering.exchange.reset(stream).unwrap();
    layer.poison(&all);
    gathering.launch(stream, &layer);
    gathering.exchange.check(stream).unwrap();
    assert_eq!(layer.read(&all, rank), layer.expected(rank), "rank {rank}");
    barrier(&group);
}

#[test]
fn calls_between_processes_select_what_a_single_rank_does() {
    on_gpus("calls");
}

#[test]
fn a_process_that_is_late_is_named_and_a_reset_restores_service() {
    on_gpus("late");
}

#[test]
fn a_process_that_ends_is_named() {
    on_gpus("gone");
}

#[test]
fn memory_that_cannot_be_mapped_is_named_by_pair_in_both_processes() {
    run("unmappable", [None, None]);
}

/// NCCL takes a device per rank.
fn on_two_gpus(name: &str) {
    match (gpus(), gpu::nccl::version()) {
        (None, _) => {}
        (Some(1), _) => println!("SKIPPED: {name} needs two GPUs, one found"),
        (_, Err(error)) => println!("SKIPPED: {error}"),
        _ => run(name, [Some(0), Some(1)]),
    }
}

#[test]
fn gathers_between_processes_select_what_a_single_rank_does() {
    on_two_gpus("nccl");
}

#[test]
fn a_gather_without_a_rank_is_given_up_and_a_reset_restores_service() {
    on_two_gpus("nccl_late");
}

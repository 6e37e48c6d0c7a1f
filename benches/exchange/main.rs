//! Time of the exchange: local select, merge, and both across ranks, against what the link alone takes.
//!
//! On GPUs: inside CUDA graphs with programmatic overlap, answers checked in the same run; what is compared runs in turn. Rank
//! `r` is on GPU `r % GPUs`. Words that have just arrived lie in the L2, so the inputs stay there. Examples of lines:
//!
//! ```text
//! merge W=8 N=512 rows=64 | 4.36 us | floor 0.66 us, HBM 2.9 MB at 4.37 TB/s, 0.0 GFLOP | 0.15 of the roofline
//! exchange+merge W=2 N=1152 rows=8 | 4.79 us
//! ```
//!
//! With two GPUs also NCCL's all-gather of the same rows and the same merge. Without a GPU it says so and times the simulator
//! on a tiny case. `BENCH_PARTS=local,merge,exchange,link` restricts the parts, `BENCH_ROWS=1,8` the rows; `BENCH_CLUSTER=1,2,4`
//! times the local select with so many CTAs a row in turn, instead of the choice; `BENCH_SAMPLES` sets the samples per line;
//! `BENCH_JSON=FILE` keeps the results.

#[path = "../common/mod.rs"]
mod common;
mod group;
mod link;
mod rig;

use std::time::Instant;

use dsa_dcp::merge;
use dsa_kernels::local_topk;
use gpu::{Device, Graph, SimConfig};

use common::{
    Peak, Report, Result, Samples, forced_clusters, graph_us, in_turn, number, numbers, print_device, wanted,
};
use group::Group;
use rig::{Rank, Rig, Spec};

/// Keys of a row on each rank.
const LOCAL_LEN: usize = 16_384;
const TOPK: usize = 2048;
/// The deployed ranks and local top-N.
const RANKS: usize = 8;
const N: usize = 512;
/// Launches in one graph.
const LAUNCHES: usize = 64;

struct Bench {
    devices: Vec<Device>,
    report: Report,
    samples: usize,
}

impl Bench {
    /// `name`'s time against the bytes of its inputs and outputs.
    fn line(&mut self, name: &str, samples: &Samples, cost: dsa_kernels::Cost) -> f64 {
        let peak = Peak::of(&self.devices[0]);
        self.report.line(name, samples, cost, peak, |peak| peak.fp8_flops_per_s)
    }

    /// The local select, with its push and without, of each number of CTAs a row in turn.
    fn local(&mut self) -> Result<()> {
        for rows in numbers("BENCH_ROWS", &[1, 8, 64, 132])? {
            let rigs = forced_clusters()?.into_iter().map(|cluster| {
                let spec = Spec { ranks: RANKS, n: N, topk: TOPK, rows, local_len: LOCAL_LEN, skewed: false, cluster };
                let rig = Rig::new(&self.devices[..1], spec)?;
                rig.run_checked()?;
                Ok(rig)
            });
            let rigs = rigs.collect::<Result<Vec<_>>>()?;
            let graph = |rank: &Rank, push: bool| {
                Graph::capture_with(&rank.stream, |stream| {
                    (0..LAUNCHES).try_for_each(|_| match push {
                        true => rank.launch_push(stream),
                        false => rank.launch_quiet(stream),
                    })
                })
            };
            let mut forms = Vec::new();
            for rig in &rigs {
                let rank = &rig.ranks[0];
                let pushing = rank.pushing.as_ref().ok_or("merges select by themselves")?;
                forms.push(("local", rank, rank.quiet.shape(), graph(rank, false)?));
                forms.push(("local+push", rank, pushing.shape(), graph(rank, true)?));
            }
            let once: Vec<_> =
                forms.iter().map(|(_, rank, _, graph)| move || graph_us(&rank.stream, graph, LAUNCHES)).collect();
            let once: Vec<_> = once.iter().map(|once| once as &dyn Fn() -> Result<f64>).collect();
            let timed = in_turn(self.samples, &once)?;
            let mut b_rows = Vec::new();
            for rig in &rigs {
                rig.run_checked()?;
                let rank = &rig.ranks[0];
                for push in [true, false] {
                    rank.b_rows.fill_bytes(&rank.stream, 0xA5)?;
                    if push {
                        rank.launch_push(&rank.stream)?
                    } else {
                        rank.launch_quiet(&rank.stream)?
                    }
                    b_rows.push(rank.b_rows.copy_to_vec(&rank.stream)?);
                }
            }
            if b_rows.iter().any(|rows| *rows != b_rows[0]) {
                return Err("the forms of local top-k differ".into());
            }
            let lengths = vec![LOCAL_LEN; rows];
            for ((name, _, shape, _), samples) in forms.iter().zip(&timed) {
                let label = format!("{name:14} {} CTAs per row {}", rigs[0].spec.label(), shape.cluster());
                self.line(&label, samples, local_topk::cost(shape, &lengths));
            }
        }
        Ok(())
    }

    /// The merge of words that are all there.
    fn merge(&mut self) -> Result<()> {
        for rows in numbers("BENCH_ROWS", &[1, 8, 64, 132, 310])? {
            let spec =
                Spec { ranks: RANKS, n: N, topk: TOPK, rows, local_len: LOCAL_LEN, skewed: false, cluster: None };
            let rig = Rig::new(&self.devices[..1], spec)?;
            rig.run_checked()?;
            let rank = &rig.ranks[0];
            rank.poison()?;
            let again = rank.merges_again(spec, LAUNCHES, true)?;
            let graph = Graph::capture_with(&rank.stream, |stream| {
                (0..LAUNCHES).try_for_each(|launch| again.launch(launch, stream))
            })?;
            let once = || {
                again.prepare()?;
                graph_us(&rank.stream, &graph, LAUNCHES)
            };
            let timed = in_turn(self.samples, &[&once])?;
            rank.exchange.check(&rank.stream)?;
            rig.check_rank(0)?;
            self.line(&format!("{:14} {}", "merge", spec.label()), &timed[0], merge::cost(&rank.merge.shape(), rows));
        }
        Ok(())
    }

    /// Whole steps across ranks.
    fn exchange(&mut self) -> Result<()> {
        let several = self.devices.len() > 1;
        // On one GPU all CTAs of all ranks must be resident together.
        let rows_max = if several { usize::MAX } else { 64 };
        for n in [N, 1152] {
            for rows in numbers("BENCH_ROWS", &[1, 8, 64, 310])?.into_iter().filter(|rows| *rows <= rows_max) {
                let spec = Spec { ranks: 2, n, topk: TOPK, rows, local_len: LOCAL_LEN, skewed: false, cluster: None };
                Group::new(&self.devices, spec)?.bench(&mut self.report, self.samples)?;
            }
        }
        for skewed in [false, true] {
            for rows in numbers("BENCH_ROWS", &[1, 8])?.into_iter().filter(|rows| *rows <= 8) {
                let spec = Spec { ranks: RANKS, n: N, topk: TOPK, rows, local_len: LOCAL_LEN, skewed, cluster: None };
                Group::new(&self.devices, spec)?.bench(&mut self.report, self.samples)?;
            }
        }
        Ok(())
    }
}

fn bench_gpu(devices: Vec<Device>) -> Result<()> {
    print_device(&devices[0], "warm");
    println!("{} GPUs", devices.len());
    let samples = number("BENCH_SAMPLES")?.unwrap_or(15);
    let mut bench = Bench { devices, report: Report::default(), samples };
    if wanted("BENCH_PARTS", "link") {
        group::link(&bench.devices, &mut bench.report, samples)?;
    }
    if wanted("BENCH_PARTS", "local") {
        bench.local()?;
    }
    if wanted("BENCH_PARTS", "merge") {
        bench.merge()?;
    }
    if wanted("BENCH_PARTS", "exchange") {
        bench.exchange()?;
    }
    bench.report.finish()
}

/// A tiny step of two ranks.
fn bench_simulator(why: &str) -> Result<()> {
    println!("no GPU ({why}): timing the simulator, which says nothing about the kernels");
    let devices = Device::simulated_group(SimConfig { devices: 2, ..SimConfig::default() });
    let spec = Spec { ranks: 2, n: 256, topk: 384, rows: 2, local_len: 600, skewed: false, cluster: None };
    let rig = Rig::new(&devices, spec)?;
    let started = Instant::now();
    rig.run_checked()?;
    println!("{} | simulated and checked in {:.3} s", spec.label(), started.elapsed().as_secs_f64());
    let again = rig.ranks[0].merges_again(spec, 2, true)?;
    rig.ranks[0].poison()?;
    again.prepare()?;
    (0..2).try_for_each(|launch| again.launch(launch, &rig.ranks[0].stream))?;
    rig.check_rank(0)?;
    group::check_link(&devices)
}

fn main() {
    // With a driver but no device, the first says so.
    let gpus = Device::cuda_count().and_then(|count| (0..count.max(1)).map(Device::cuda).collect());
    common::run(gpus, bench_gpu, bench_simulator);
}

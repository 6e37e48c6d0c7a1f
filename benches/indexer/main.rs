//! Time of score, of score and select, per case of the reference table (batch x context), and of the worst cases.
//!
//! On a GPU: inside CUDA graphs with programmatic overlap, key pages rotated past the L2, answers checked first. Each line
//! shows the median, the floor and their ratio:
//!
//! ```text
//! score b64_64k q=1 | 130.0 us | floor 128.9 us, HBM 563.3 MB at 4.37 TB/s | 0.99 of the roofline
//! ```
//!
//! Without one it says so and times the simulator and the oracle on a tiny case instead. `cargo bench -- --test` runs each
//! bench once. `BENCH_CASES=b64_64k,b1_8k` and `BENCH_Q=1,2` restrict the cases; `BENCH_TOPK` sets the top-k; `BENCH_JSON=FILE`
//! keeps the results; `BENCH_CLUSTER=1,2,4,8` times select with so many CTAs a row in turn, instead of the choice;
//! `BENCH_PAUSE_MS=6` pauses before each sample, which keeps the card off its power limit; `BENCH_L2_MB=24` reserves that much of
//! the L2 for the scratch ([`Device::reserve_l2`]); `BENCH_CARVEOUT=100` asks for that share of shared memory for both kernels
//! ([`prefer_shared_memory`](gpu::Function::prefer_shared_memory)), `BENCH_ALONE=1` for one CTA of score a multiprocessor. `BENCH_SERVE=1` answers requests of another program
//! instead (`benches/compare_topk.py` is one).

mod cases;
#[path = "../common/mod.rs"]
mod common;
mod rig;
mod serve;

use std::time::Instant;

use criterion::Criterion;
use dsa_core::consts::PAGE;
use dsa_core::generate::StepSpec;
use dsa_core::layout::fp8_page::{self, ScaleForm};
use dsa_core::{DecodeStep, oracle};
use dsa_kernels::{Cost, score, select};
use gpu::Device;
use kimi_decode::{FusedIndexer, IndexerConfig, IndexerScratch, LayerSpec, ScratchSpec, StepShape};

use cases::{Case, Data};
use common::{Peak, Report, Result, forced_clusters, number, numbers, print_device, time_graph};
use rig::{Pool, Rig};

const DEFAULT_TOPK: usize = 2048;
/// Pages of the pool that the cases draw from: 1 GB, so that even small cases can rotate past the L2.
const POOL_PAGES: usize = 120_000;
/// Launches of each kernel in one graph.
const LAUNCHES_MAX: usize = 64;
/// How much longer than random data other data may take.
const WORST_RATIO: f64 = 1.5;

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Score,
    /// Of logits that are there.
    Select,
    Pair,
}

impl What {
    const ALL: [What; 3] = [What::Score, What::Select, What::Pair];

    fn name(self) -> &'static str {
        match self {
            What::Score => "score",
            What::Select => "select",
            What::Pair => "score+select",
        }
    }

    fn parse(name: &str) -> Result<What> {
        Ok(What::ALL.into_iter().find(|what| what.name() == name).ok_or("no such kernel")?)
    }
}

/// Launches in one graph of `case`.
fn launches(case: &Case) -> usize {
    if case.keys() > 1 << 20 { 4 } else { LAUNCHES_MAX }
}

struct Bench<'a> {
    criterion: &'a mut Criterion,
    device: &'a Device,
    report: Report,
    topk: usize,
}

impl Bench<'_> {
    /// Building and compiling what a deployment runs: 1 to 64 requests at q = 1, 2 and 4. Cold only if the driver keeps
    /// no earlier compilation: in a fresh machine, or with `CUDA_CACHE_DISABLE=1`.
    fn compile(&mut self) -> Result<()> {
        const REQUESTS: usize = 64;
        let (context, blocks) = (131_072, 4096);
        let spec = ScratchSpec { rows_max: REQUESTS * 4, length_max: context, topk: self.topk, ids: false };
        let scratch = IndexerScratch::reserve(self.device, spec)?;
        let layer = LayerSpec {
            topk: self.topk,
            context_len_max: context,
            scale_form: ScaleForm::Ue8m0,
            index_page: PAGE,
            index_blocks: blocks,
            index_page_stride: fp8_page::BYTES,
            kv_page: PAGE,
            kv_block_rows: PAGE,
            kv_blocks: blocks,
        };
        let keys = self.device.alloc::<u8>(blocks * fp8_page::BYTES)?;
        let shapes: Vec<StepShape> =
            [1, 2, 4].into_iter().flat_map(|q| (1..=REQUESTS).map(move |n| StepShape { rows: n * q, q })).collect();
        let started = Instant::now();
        FusedIndexer::new(IndexerConfig {
            scratch: &scratch,
            layer,
            keys: keys.as_view(),
            shapes: &shapes,
            hold: &[],
            ids: false,
        })?;
        let cache = if std::env::var("CUDA_CACHE_DISABLE").is_ok_and(|v| v == "1") { "cold" } else { "cache allowed" };
        let label = format!("compile {} shapes, {} kernels ({cache})", shapes.len(), scratch.kernels_compiled());
        self.report.number(&label, started.elapsed().as_secs_f64(), "s");
        Ok(())
    }

    /// The reference cases with random keys.
    fn reference(&mut self) -> Result<()> {
        let pool = Pool::new(self.device, &self.device.stream()?, POOL_PAGES, Data::Random)?;
        for case in cases::reference() {
            for &q in &numbers("BENCH_Q", &[1, 2, 4, 8])? {
                for cluster in forced_clusters()? {
                    let rig = Rig::new(self.device, POOL_PAGES, &case, q, self.topk, cluster)?;
                    rig.check(&pool)?;
                    let score = self.time(&rig, &pool, &case, q, Data::Random, What::Score)?;
                    let pair = self.time(&rig, &pool, &case, q, Data::Random, What::Pair)?;
                    let ctas = rig.select.shape().cluster();
                    let label = format!("select added {:12} q={q} CTAs per row {ctas}", case.name);
                    self.report.number(&label, pair - score, "us");
                }
            }
        }
        Ok(())
    }

    /// Each of the worst cases with every kind of data, against its own time with random keys.
    fn worst(&mut self) -> Result<()> {
        let cases = cases::worst();
        let mut random = vec![Vec::new(); cases.len()];
        for data in Data::ALL {
            if cases.is_empty() {
                break;
            }
            let pool = Pool::new(self.device, &self.device.stream()?, POOL_PAGES, data)?;
            for (case, random) in cases.iter().zip(&mut random) {
                for (i, &q) in case.q.iter().enumerate() {
                    let us = self.pair(&pool, case, q, data)?;
                    let against = if data == Data::Random {
                        random.push(us);
                        // The skewed batch, against its keys in one row.
                        match case.name {
                            "one_1m_of_64" => self.pair(&pool, &cases::one_row_of_1m(), q, data)?,
                            _ => us,
                        }
                    } else {
                        random[i]
                    };
                    let ratio = us / against;
                    let verdict = if ratio > WORST_RATIO { " OVER" } else { "" };
                    self.report.number(
                        &format!("worst {:12} q={q} {}{verdict}", case.name, data.name()),
                        ratio,
                        "of random data's time",
                    );
                }
            }
        }
        Ok(())
    }

    fn pair(&mut self, pool: &Pool, case: &Case, q: usize, data: Data) -> Result<f64> {
        let rig = Rig::new(self.device, POOL_PAGES, case, q, self.topk, None)?;
        rig.check(pool)?;
        self.time(&rig, pool, case, q, data, What::Pair)
    }

    fn time(&mut self, rig: &Rig, pool: &Pool, case: &Case, q: usize, data: Data, what: What) -> Result<f64> {
        let launches = launches(case);
        let graph = rig.graph(pool, launches, what)?;
        let data = if data == Data::Random { String::new() } else { format!(" {}", data.name()) };
        let ctas = rig.select.shape().cluster();
        let shared = if what == What::Score || ctas == 1 { String::new() } else { format!(" c{ctas}") };
        let label = format!("{:12} {:12} q={q}{data}{shared}", what.name(), case.name);
        let id = label.split_whitespace().collect::<Vec<_>>().join("/");
        let samples = time_graph(self.criterion, &id, &rig.stream, &graph, launches)?;
        let score_cost = score::cost(&rig.score.shape(), &rig.lengths);
        let select_cost = select::cost(&rig.select.shape(), &rig.lengths);
        let cost = match what {
            What::Score => score_cost,
            What::Select => select_cost,
            What::Pair => Cost { hbm_bytes: score_cost.hbm_bytes + select_cost.hbm_bytes, ..score_cost },
        };
        Ok(self.report.line(&label, &samples, cost, Peak::of(self.device), |peak| peak.fp8_flops_per_s))
    }
}

fn bench_gpu(criterion: &mut Criterion, device: &Device) -> Result<()> {
    let topk = number("BENCH_TOPK")?.unwrap_or(DEFAULT_TOPK);
    if std::env::var_os("BENCH_SERVE").is_some() {
        return serve::serve(device, POOL_PAGES, topk);
    }
    print_device(device, "cold");
    if let Some(mb) = number("BENCH_L2_MB")? {
        println!("{} MB of L2 reserved for lines stored with evict-last", device.reserve_l2(mb << 20)? >> 20);
    }
    let mut bench = Bench { criterion, device, report: Report::default(), topk };
    bench.compile()?;
    bench.reference()?;
    bench.worst()?;
    bench.report.finish()
}

/// A tiny step through the simulator and the oracle.
fn bench_simulator(c: &mut Criterion, why: &str) -> Result<()> {
    println!("no GPU ({why}): timing the simulator and the oracles on a tiny step, these are not kernel times");
    let device = Device::simulated(gpu::SimConfig::default());
    let case = Case { name: "tiny", lengths: vec![700, 130], q: &[] };
    for data in Data::ALL {
        let pool = Pool::new(&device, &device.stream()?, 64, data)?;
        let rig = Rig::new(&device, 64, &case, 2, 128, None)?;
        rig.check(&pool)?;
        c.bench_function(&format!("simulator/score+select/{}", data.name()), |b| {
            b.iter(|| {
                rig.launch_score(&pool, 0, &rig.stream).expect("checked above");
                rig.launch_select(0, &rig.stream).expect("checked above");
                rig.stream.synchronize().expect("checked above");
            });
        });
    }
    let step: DecodeStep = StepSpec::new(3, 2, 128, &[700, 699, 130, 129]).build()?;
    c.bench_function("oracle/logits", |b| {
        b.iter(|| oracle::step::logits(&step, oracle::score::dot_exact));
    });
    Ok(())
}

fn main() {
    let started = Instant::now();
    let summed_up = |bench: &dyn Fn(&mut Criterion) -> Result<()>| {
        let mut criterion = common::criterion();
        bench(&mut criterion)?;
        criterion.final_summary();
        Ok(())
    };
    common::run(
        Device::cuda(0),
        |device| summed_up(&|criterion| bench_gpu(criterion, &device)),
        |why| summed_up(&|criterion| bench_simulator(criterion, why)),
    );
    println!("benches took {:.1} s", started.elapsed().as_secs_f64());
}

//! Time of score, of score and select, per case of the reference table (batch x context).
//!
//! On a GPU: inside CUDA graphs with programmatic overlap, key pages rotated past the L2, answers checked first. Each line
//! shows the median, the floor and their ratio:
//!
//! ```text
//! score b64_64k q=1 | 132.8 us | floor 126.7 us, HBM 553.6 MB at 4.37 TB/s | 0.95 of the roofline
//! ```
//!
//! Without one it says so and times the simulator and the oracle on a tiny case instead. `cargo bench -- --test` runs each
//! bench once. `BENCH_CASES=b64_64k,b1_8k` and `BENCH_Q=1,2` restrict the cases; `BENCH_TOPK` sets the top-k.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use criterion::Criterion;
use dsa_core::consts::{DIM, HEADS, PAGE};
use dsa_core::generate::{SplitMix64, StepSpec};
use dsa_core::layout::fp8_page::{self, ScaleForm};
use dsa_core::layout::tp_scratch::TpScratch;
use dsa_core::{DecodeStep, IndexCacheShape, KvShape, oracle};
use dsa_kernels::score::{self, IndexerScore, KeyCache, ScoreForm, ScoreOutput, ScoreShape, ScoreStep};
use dsa_kernels::select::{self, IndexerSelect, SelectShape, SelectStep};
use dsa_kernels::{Cost, KernelError, Table};
use gpu::{Buffer, Device, Graph, Stream};

/// Read bandwidth and FP8 rate of the devices that have been measured; the floor of others is not printed.
struct Peak {
    device: &'static str,
    /// Measured read-only stream over 1 GiB.
    bytes_per_s: f64,
    /// Datasheet, dense FP8.
    flops_per_s: f64,
}

const PEAKS: [Peak; 1] = [Peak { device: "NVIDIA H200", bytes_per_s: 4.37e12, flops_per_s: 1979e12 }];

const DEFAULT_TOPK: usize = 2048;
/// Pages of the pool that the cases draw from: 1 GB, so that even small cases can rotate past the L2.
const POOL_PAGES: usize = 120_000;
/// Launches of each kernel in one graph.
const LAUNCHES_MAX: usize = 64;

struct Case {
    name: &'static str,
    lengths: Vec<usize>,
}

fn cases() -> Vec<Case> {
    let case = |name, lengths| Case { name, lengths };
    // 1k to 128k tokens in equal ratios.
    let mixed = (0..32).map(|i| (1024.0 * 128f64.powf(i as f64 / 31.0)) as usize).collect();
    let all = vec![
        case("b1_8k", vec![8192]),
        case("b1_128k", vec![131_072]),
        case("b8_32k", vec![32_768; 8]),
        case("b64_8k", vec![8192; 64]),
        case("b64_64k", vec![65_536; 64]),
        case("b32_mixed", mixed),
    ];
    match std::env::var("BENCH_CASES") {
        Ok(names) => all.into_iter().filter(|c| names.split(',').any(|n| n == c.name)).collect(),
        Err(_) => all,
    }
}

fn numbers(variable: &str, default: &[usize]) -> Vec<usize> {
    match std::env::var(variable) {
        Ok(list) => list.split(',').filter_map(|n| n.parse().ok()).collect(),
        Err(_) => default.to_vec(),
    }
}

/// Key pages of a pool, filled once: E4M3 keys of moderate size and UE8M0 scales round 1.
struct Pool {
    cache: KeyCache,
    pages: Vec<u8>,
    _bytes: Buffer<u8>,
}

/// Distinct pages; the pool repeats them, which no kernel can tell.
const DISTINCT_PAGES: usize = 1000;

impl Pool {
    fn new(device: &Device, stream: &Stream, pages: usize) -> Result<Pool, Box<dyn std::error::Error>> {
        let mut rng = SplitMix64::new(5);
        let distinct = DISTINCT_PAGES.min(pages);
        let mut chunk = vec![0u8; distinct * fp8_page::BYTES];
        for page in chunk.chunks_exact_mut(fp8_page::BYTES) {
            let (keys, scales) = page.split_at_mut(fp8_page::SCALES.start);
            keys.iter_mut().for_each(|byte| *byte = moderate_e4m3(&mut rng));
            scales.chunks_exact_mut(4).for_each(|word| word.fill(120 + (rng.next_u64() & 3) as u8));
        }
        let bytes = device.alloc::<u8>(pages * fp8_page::BYTES)?;
        for first in (0..pages).step_by(distinct) {
            let n = distinct.min(pages - first) * fp8_page::BYTES;
            let at = first * fp8_page::BYTES;
            bytes.view(at..at + n)?.copy_from(stream, &chunk[..n])?;
        }
        let shape = IndexCacheShape::new(pages, fp8_page::BYTES, fp8_page::BYTES)?;
        Ok(Pool { cache: KeyCache::new(device, &bytes.as_view(), shape)?, pages: chunk, _bytes: bytes })
    }
}

/// A finite E4M3 below 2 in magnitude.
fn moderate_e4m3(rng: &mut SplitMix64) -> u8 {
    let bits = rng.next_u64() as u8;
    (bits & 0x80) | ((bits & 0x7F) % 0x40)
}

/// One case on the device.
struct Rig {
    stream: Stream,
    score: IndexerScore,
    select: IndexerSelect,
    q: usize,
    topk: usize,
    lengths: Vec<usize>,
    length_max: usize,
    table_width: usize,
    host_queries: Vec<u8>,
    host_weights: Vec<u16>,
    host_tables: Vec<Vec<i32>>,
    queries: Buffer<u8>,
    weights: Buffer<u16>,
    row_ends: Buffer<i32>,
    tables: Vec<Buffer<i32>>,
    logits: Buffer<u16>,
    tops: Buffer<u16>,
    out: Buffer<i32>,
    counts: Buffer<i32>,
}

impl Rig {
    fn new(
        device: &Device,
        pool_pages: usize,
        case: &Case,
        q: usize,
        topk: usize,
    ) -> Result<Rig, Box<dyn std::error::Error>> {
        let mut rng = SplitMix64::new(9);
        let rows = case.lengths.len() * q;
        let pages: Vec<usize> = case.lengths.iter().map(|len| len.div_ceil(PAGE)).collect();
        let total: usize = pages.iter().sum();
        let table_width = pages.iter().copied().max().unwrap_or(1);
        let length_max = table_width * PAGE;
        let scratch = TpScratch::capacity(rows, length_max);
        let host_queries: Vec<u8> = (0..rows * HEADS * DIM).map(|_| moderate_e4m3(&mut rng)).collect();
        // Small signed weights.
        let host_weights: Vec<u16> = (0..rows * HEADS).map(|_| (rng.next_u64() as u16 & 0x807F) | 0x3E00).collect();
        // Verify rows see one key more each.
        let row_ends: Vec<i32> =
            case.lengths.iter().flat_map(|len| (0..q).map(move |i| (len - (q - 1 - i)) as i32)).collect();
        let mut order: Vec<i32> = (0..pool_pages as i32).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, (rng.next_u64() % (i as u64 + 1)) as usize);
        }
        let sets = (pool_pages / total).clamp(1, 16);
        let mut next = order.iter().copied().cycle();
        let host_tables: Vec<Vec<i32>> = (0..sets)
            .map(|_| {
                let mut table = vec![0i32; pages.len() * table_width];
                for (request, n) in pages.iter().enumerate() {
                    let row = &mut table[request * table_width..][..*n];
                    row.iter_mut().for_each(|id| *id = next.next().expect("a cycle"));
                }
                table
            })
            .collect();
        let form = ScoreForm::Compact { topk: topk as u32 };
        Ok(Rig {
            stream: device.stream()?,
            score: IndexerScore::new(device, ScoreShape::new(q, form, ScaleForm::Ue8m0)?)?,
            select: IndexerSelect::new(device, SelectShape::new(q, topk, PAGE)?)?,
            q,
            topk,
            lengths: row_ends.iter().map(|end| *end as usize).collect(),
            length_max,
            table_width,
            queries: device.upload(&host_queries)?,
            weights: device.upload(&host_weights)?,
            row_ends: device.upload(&row_ends)?,
            tables: host_tables.iter().map(|t| device.upload(t)).collect::<Result<_, _>>()?,
            logits: device.alloc(scratch)?,
            tops: device.alloc(scratch / 8)?,
            out: device.alloc(rows * topk)?,
            counts: device.alloc(rows)?,
            host_queries,
            host_weights,
            host_tables,
        })
    }

    fn launch_score(&self, pool: &Pool, set: usize, stream: &Stream) -> Result<(), KernelError> {
        let table = Table { ids: self.tables[set].as_view(), stride: self.table_width, width: self.table_width };
        let step = ScoreStep {
            queries: self.queries.as_view(),
            weights: self.weights.as_view(),
            cache: &pool.cache,
            table,
            row_ends: self.row_ends.as_view(),
            length_max: self.length_max,
        };
        let output = ScoreOutput::Compact { logits: self.logits.as_view(), tops: self.tops.as_view() };
        self.score.launch(stream, &step, &output)
    }

    /// The index table serves as the KV table too: 64-token pages.
    fn launch_select(&self, set: usize, stream: &Stream) -> Result<(), KernelError> {
        let step = SelectStep {
            logits: self.logits.as_view(),
            tops: self.tops.as_view(),
            table: Table { ids: self.tables[set].as_view(), stride: self.table_width, width: self.table_width },
            kv: KvShape::new(PAGE, PAGE, 0).expect("64-token pages"),
            row_ends: self.row_ends.as_view(),
            length_max: self.length_max,
            out: self.out.as_view(),
            counts: self.counts.as_view(),
            ids: None,
        };
        self.select.launch(stream, &step)
    }

    /// A graph of `launches` rounds, table sets in turn.
    fn graph(&self, pool: &Pool, launches: usize, what: What) -> Result<Graph, KernelError> {
        Graph::capture_with(&self.stream, |stream| {
            for i in 0..launches {
                let set = i % self.tables.len();
                self.launch_score(pool, set, stream)?;
                if what == What::Pair {
                    self.launch_select(set, stream)?;
                }
            }
            Ok(())
        })
    }

    /// Checks the first and the last row: logits against the exact dot product to 2 BF16 ulp on a sample of keys,
    /// the selection exactly for the device's own logits.
    fn check(&self, pool: &Pool) -> Result<(), Box<dyn std::error::Error>> {
        self.launch_score(pool, 0, &self.stream)?;
        self.launch_select(0, &self.stream)?;
        self.stream.synchronize()?;
        let ends: Vec<i32> = self.lengths.iter().map(|len| *len as i32).collect();
        let plan = TpScratch::plan(&ends, self.q, self.topk, self.length_max)?;
        let (out, counts) = (self.out.copy_to_vec(&self.stream)?, self.counts.copy_to_vec(&self.stream)?);
        for row in [0, ends.len() - 1] {
            let len = self.lengths[row];
            let table = &self.host_tables[0][row / self.q * self.table_width..][..self.table_width];
            let kv = oracle::select::KvTableRow { blocks: table, page: PAGE, block_rows: PAGE };
            let logits = match plan.row_start(row) {
                Some(at) => self.logits.view(at..at + len)?.copy_to_vec(&self.stream)?,
                None => vec![0; len],
            };
            let want = oracle::select::select_row(&logits, ends[row], self.topk, kv)?;
            let got = &out[row * self.topk..][..self.topk];
            oracle::select::check_selection(&[want], self.topk, got, &counts[row..=row], None)?;
            if plan.row_start(row).is_some() {
                self.check_logits(pool, row, table, &logits);
            }
        }
        Ok(())
    }

    fn check_logits(&self, pool: &Pool, row: usize, table: &[i32], logits: &[u16]) {
        let query: &[u8; HEADS * DIM] =
            self.host_queries[row * HEADS * DIM..][..HEADS * DIM].try_into().expect("a row");
        let weights: &[u16; HEADS] = self.host_weights[row * HEADS..][..HEADS].try_into().expect("a row");
        for key in (0..logits.len()).step_by(logits.len() / 64 + 1) {
            let page = &pool.pages[table[key / PAGE] as usize % DISTINCT_PAGES * fp8_page::BYTES..][..fp8_page::BYTES];
            let (bytes, word) = fp8_page::read(page, key % PAGE);
            let scale = ScaleForm::Ue8m0.decode(word);
            let dots: [f32; HEADS] = std::array::from_fn(|h| {
                let head: &[u8; DIM] = query[h * DIM..][..DIM].try_into().expect("a head");
                ptx_sim_dot(head, bytes)
            });
            let want = oracle::score::logit(oracle::score::head_sum(&dots, weights), scale);
            assert_eq!(logits[key], want, "logit of row {row}, key {key}");
        }
    }
}

/// The tensor core's dot product: four chained k-steps.
fn ptx_sim_dot(query: &[u8; DIM], key: &[u8; DIM]) -> f32 {
    let part = |x: &[u8; DIM], k: usize| -> [u8; 32] { x[32 * k..][..32].try_into().expect("32 bytes") };
    (0..4).fold(0.0, |acc, k| ptx_sim::numeric::tensor_core::dot_e4m3_k32(&part(key, k), &part(query, k), acc))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Score,
    Pair,
}

impl What {
    fn name(self) -> &'static str {
        match self {
            What::Score => "score",
            What::Pair => "score+select",
        }
    }
}

fn bench_gpu(c: &mut Criterion, device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let info = device.info();
    let peak = PEAKS.iter().find(|p| info.name.contains(p.device));
    println!(
        "{} ({} SMs, {} MB L2), driver {:?}; cold L2, CUDA graphs, programmatic launches; medians",
        info.name,
        info.sms,
        info.l2_bytes >> 20,
        info.driver_version
    );
    let topk = numbers("BENCH_TOPK", &[DEFAULT_TOPK])[0];
    let pool = Pool::new(device, &device.stream()?, POOL_PAGES)?;
    for case in cases() {
        for &q in &numbers("BENCH_Q", &[1, 2, 4, 8]) {
            let rig = Rig::new(device, POOL_PAGES, &case, q, topk)?;
            rig.check(&pool)?;
            let launches = if case.lengths.iter().sum::<usize>() > 1 << 20 { 4 } else { LAUNCHES_MAX };
            let mut medians = Vec::new();
            for what in [What::Score, What::Pair] {
                let graph = rig.graph(&pool, launches, what)?;
                medians.push(time_graph(c, &rig, &graph, launches, &format!("{}/{}_q{q}", what.name(), case.name))?);
            }
            let score_cost = score::cost(&rig.score.shape(), &rig.lengths);
            let select_cost = select::cost(&rig.select.shape(), &rig.lengths);
            report(&format!("score        {:9} q={q}", case.name), medians[0], score_cost, peak);
            let pair = Cost { hbm_bytes: score_cost.hbm_bytes + select_cost.hbm_bytes, flops: score_cost.flops };
            report(&format!("score+select {:9} q={q}", case.name), medians[1], pair, peak);
            println!("select added {:9} q={q} | {:8.2} us", case.name, medians[1] - medians[0]);
        }
    }
    Ok(())
}

/// Median time of one launch of a graph of `launches`, in microseconds.
fn time_graph(
    c: &mut Criterion,
    rig: &Rig,
    graph: &Graph,
    launches: usize,
    id: &str,
) -> Result<f64, Box<dyn std::error::Error>> {
    let (start, end) = (rig.stream.device().event()?, rig.stream.device().event()?);
    let once = || -> Result<f64, gpu::Error> {
        start.record(&rig.stream)?;
        graph.launch(&rig.stream)?;
        end.record(&rig.stream)?;
        end.synchronize()?;
        let ms = start.elapsed_ms(&end)?.expect("a CUDA event has a time");
        Ok(f64::from(ms) * 1e3 / launches as f64)
    };
    for _ in 0..3 {
        once()?;
    }
    let samples = RefCell::new(Vec::new());
    c.bench_function(id, |b| {
        b.iter_custom(|iters| {
            let mut total = 0.0;
            for _ in 0..iters {
                let us = once().expect("the warm-up ran");
                samples.borrow_mut().push(us);
                total += us;
            }
            Duration::from_secs_f64(total * 1e-6)
        });
    });
    let mut samples = samples.into_inner();
    samples.sort_by(f64::total_cmp);
    Ok(samples.get(samples.len() / 2).copied().unwrap_or(f64::NAN))
}

fn report(label: &str, us: f64, cost: Cost, peak: Option<&Peak>) {
    match peak {
        Some(peak) => {
            let floor = cost.floor_us(peak.bytes_per_s, peak.flops_per_s);
            println!(
                "{label} | {us:8.2} us | floor {floor:7.2} us, HBM {:.1} MB at {:.2} TB/s, {:.1} GFLOP | {:.2} of the roofline",
                cost.hbm_bytes as f64 / 1e6,
                peak.bytes_per_s / 1e12,
                cost.flops as f64 / 1e9,
                floor / us
            );
        }
        None => println!("{label} | {us:8.2} us | HBM {:.1} MB (no measured peak)", cost.hbm_bytes as f64 / 1e6),
    }
}

/// A tiny step through the simulator and the oracle.
fn bench_simulator(c: &mut Criterion, why: &str) -> Result<(), Box<dyn std::error::Error>> {
    println!("no GPU ({why}): timing the simulator and the oracles on a tiny step, these are not kernel times");
    let device = Device::simulated(gpu::SimConfig::default());
    let pool = Pool::new(&device, &device.stream()?, 64)?;
    let case = Case { name: "tiny", lengths: vec![700, 130] };
    let rig = Rig::new(&device, 64, &case, 2, 128)?;
    rig.check(&pool)?;
    c.bench_function("simulator/score+select", |b| {
        b.iter(|| {
            rig.launch_score(&pool, 0, &rig.stream).expect("checked above");
            rig.launch_select(0, &rig.stream).expect("checked above");
            rig.stream.synchronize().expect("checked above");
        });
    });
    let step: DecodeStep = StepSpec::new(3, 2, 128, &[700, 699, 130, 129]).build()?;
    c.bench_function("oracle/logits", |b| {
        b.iter(|| oracle::step::logits(&step, oracle::score::dot_exact));
    });
    Ok(())
}

fn main() {
    let started = Instant::now();
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(50))
        .measurement_time(Duration::from_millis(200))
        .configure_from_args();
    let result = match Device::cuda(0) {
        Ok(device) => bench_gpu(&mut criterion, &device),
        Err(error) => bench_simulator(&mut criterion, &error.to_string()),
    };
    if let Err(error) = result {
        eprintln!("bench failed: {error}");
        std::process::exit(1);
    }
    criterion.final_summary();
    println!("benches took {:.1} s", started.elapsed().as_secs_f64());
}

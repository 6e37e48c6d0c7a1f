//! What the benches share: ceilings of the devices, timing of graphs, the line each result prints, and the file that keeps them.
#![allow(dead_code, reason = "each bench uses its part")]

use std::cell::RefCell;
use std::io::{BufRead, Write};
use std::time::Duration;

use criterion::Criterion;
use dsa_kernels::Cost;
use gpu::{Device, Graph, Stream};
use serde_json::{Value, json};

pub type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// What a device was measured to reach, or its datasheet says; no floor is printed for others.
#[derive(Clone, Copy)]
pub struct Peak {
    device: &'static str,
    /// Measured read-only stream over 1 GiB.
    pub bytes_per_s: f64,
    /// Datasheet, dense FP8 on the tensor cores.
    pub fp8_flops_per_s: f64,
    /// Datasheet, dense BF16 on the tensor cores.
    pub bf16_flops_per_s: f64,
    /// Datasheet, FP32.
    pub fp32_flops_per_s: f64,
}

const PEAKS: [Peak; 1] = [Peak {
    device: "NVIDIA H200",
    bytes_per_s: 4.37e12,
    fp8_flops_per_s: 1979e12,
    bf16_flops_per_s: 989e12,
    fp32_flops_per_s: 67e12,
}];

impl Peak {
    pub fn of(device: &Device) -> Option<Peak> {
        PEAKS.into_iter().find(|peak| device.info().name.contains(peak.device))
    }
}

/// The first line of a GPU bench; `l2` says what the L2 holds when a launch starts.
pub fn print_device(device: &Device, l2: &str) {
    let info = device.info();
    println!(
        "{} ({} SMs, {} MB L2), driver {:?}; {l2} L2, CUDA graphs, programmatic launches; medians",
        info.name,
        info.sms,
        info.l2_bytes >> 20,
        info.driver_version
    );
}

/// The numbers of an environment variable, separated by commas.
///
/// # Errors
/// Anything else in it, or nothing.
pub fn numbers(variable: &str, default: &[usize]) -> Result<Vec<usize>> {
    let Some(list) = std::env::var_os(variable) else { return Ok(default.to_vec()) };
    let list = list.to_string_lossy();
    list.split(',')
        .map(|n| n.trim().parse().map_err(|_| format!("{variable}={list}: {n:?} is no number").into()))
        .collect()
}

/// The one number of an environment variable, if it is set.
///
/// # Errors
/// Anything else in it.
pub fn number(variable: &str) -> Result<Option<usize>> {
    match numbers(variable, &[])?[..] {
        [] => Ok(None),
        [n] => Ok(Some(n)),
        _ => Err(format!("{variable} is one number").into()),
    }
}

/// CTAs per row that `BENCH_CLUSTER` asks for, or the choice.
///
/// # Errors
/// Anything else in it than numbers.
pub fn forced_clusters() -> Result<Vec<Option<u32>>> {
    Ok(match &numbers("BENCH_CLUSTER", &[])?[..] {
        [] => vec![None],
        forced => forced.iter().map(|ctas| Some(*ctas as u32)).collect(),
    })
}

/// Runs `gpu` on what was found, or `simulator` where there is no GPU that could be used; exits with 1 if that fails. A
/// GPU that is there and does not work is a failure.
pub fn run<T>(
    found: Result<T, gpu::Error>,
    gpu: impl FnOnce(T) -> Result<()>,
    simulator: impl FnOnce(&str) -> Result<()>,
) {
    let result = match found {
        Ok(found) => gpu(found),
        Err(error) if error.is_unavailable() => simulator(&error.to_string()),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = result {
        eprintln!("bench failed: {error}");
        std::process::exit(1);
    }
}

/// Whether an environment variable, a list of names, has `name`; true if it is not set.
pub fn wanted(variable: &str, name: &str) -> bool {
    std::env::var(variable).map_or(true, |names| names.split(',').any(|n| n == name))
}

/// Microseconds per launch, sorted.
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn new(mut us: Vec<f64>) -> Samples {
        us.sort_by(f64::total_cmp);
        Samples(us)
    }

    /// The sample that a share `p` in 0..=1 of the samples does not exceed; NaN of none.
    pub fn quantile(&self, p: f64) -> f64 {
        let at = (p * self.0.len().saturating_sub(1) as f64).round() as usize;
        self.0.get(at).copied().unwrap_or(f64::NAN)
    }

    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }
}

/// Microseconds of one launch of a graph of `launches`, once, after a pause of `BENCH_PAUSE_MS` (none). Back to back, a kernel
/// that is near the power limit runs at the clock that the limit leaves, after pauses at the highest.
pub fn graph_us(stream: &Stream, graph: &Graph, launches: usize) -> Result<f64> {
    std::thread::sleep(Duration::from_millis(number("BENCH_PAUSE_MS")?.unwrap_or(0) as u64));
    let (start, end) = (stream.device().event()?, stream.device().event()?);
    start.record(stream)?;
    graph.launch(stream)?;
    end.record(stream)?;
    end.synchronize()?;
    let ms = start.elapsed_ms(&end)?.ok_or("the device's events carry no time")?;
    Ok(f64::from(ms) * 1e3 / launches as f64)
}

/// Times a graph of `launches` under criterion, after three unmeasured runs.
pub fn time_graph(c: &mut Criterion, id: &str, stream: &Stream, graph: &Graph, launches: usize) -> Result<Samples> {
    for _ in 0..3 {
        graph_us(stream, graph, launches)?;
    }
    let samples = RefCell::new(Vec::new());
    c.bench_function(id, |b| {
        b.iter_custom(|iters| {
            let total: f64 = (0..iters)
                .map(|_| {
                    let us = graph_us(stream, graph, launches).expect("the runs before succeeded");
                    samples.borrow_mut().push(us);
                    us
                })
                .sum();
            Duration::from_secs_f64(total * 1e-6)
        });
    });
    Ok(Samples::new(samples.into_inner()))
}

/// Times what is to be compared in turn, after one unmeasured run of each: `rounds` samples of every variant, each of which
/// runs once and says what it took.
pub fn in_turn(rounds: usize, variants: &[&dyn Fn() -> Result<f64>]) -> Result<Vec<Samples>> {
    variants.iter().try_for_each(|variant| variant().map(drop))?;
    let mut samples = vec![Vec::new(); variants.len()];
    for _ in 0..rounds {
        for (variant, samples) in variants.iter().zip(&mut samples) {
            samples.push(variant()?);
        }
    }
    samples.iter_mut().for_each(|samples| samples.sort_by(f64::total_cmp));
    Ok(samples.into_iter().map(Samples).collect())
}

/// Samples on demand, so that another program can measure its own kernels in turn with these on the same device: for each
/// line of the input one with the microseconds that `answer` gives, or `error TEXT`. Ends with the input.
pub fn serve(mut answer: impl FnMut(&str) -> Result<f64>) -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "ready")?;
    out.flush()?;
    for line in std::io::stdin().lock().lines() {
        match answer(line?.trim()) {
            Ok(us) => writeln!(out, "{us:.3}")?,
            Err(error) => writeln!(out, "error {error}")?,
        }
        out.flush()?;
    }
    Ok(())
}

/// The median of a few graphs, as an answer of [`serve`].
pub fn median_us(stream: &Stream, graph: &Graph, launches: usize) -> Result<f64> {
    const GRAPHS: usize = 5;
    let samples = (0..GRAPHS).map(|_| graph_us(stream, graph, launches)).collect::<Result<_>>()?;
    Ok(Samples::new(samples).median())
}

/// The criterion of every bench: short, since one sample is a graph of many launches.
pub fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(50))
        .measurement_time(Duration::from_millis(200))
        .configure_from_args()
}

/// Prints one line per result; with `BENCH_JSON` set, [`finish`](Report::finish) keeps them in that file.
#[derive(Default)]
pub struct Report {
    lines: Vec<Value>,
}

impl Report {
    /// A result against the floor of `cost`; `flops_per_s` picks the peak's rate for its arithmetic. Returns the median.
    pub fn line(
        &mut self,
        label: &str,
        samples: &Samples,
        cost: Cost,
        peak: Option<Peak>,
        flops_per_s: fn(&Peak) -> f64,
    ) -> f64 {
        let us = samples.median();
        let floor = peak.map(|peak| cost.floor_us(peak.bytes_per_s, flops_per_s(&peak)));
        match (peak, floor) {
            (Some(peak), Some(floor)) => println!(
                "{label} | {us:8.2} us | floor {floor:7.2} us, HBM {:.1} MB at {:.2} TB/s, {:.1} GFLOP | {:.2} of the roofline",
                cost.hbm_bytes as f64 / 1e6,
                peak.bytes_per_s / 1e12,
                cost.flops as f64 / 1e9,
                floor / us
            ),
            _ => println!("{label} | {us:8.2} us | HBM {:.1} MB (no measured peak)", cost.hbm_bytes as f64 / 1e6),
        }
        self.lines.push(json!({
            "label": label.split_whitespace().collect::<Vec<_>>().join(" "),
            "median_us": us, "p10_us": samples.quantile(0.1), "p90_us": samples.quantile(0.9), "samples": samples.0.len(),
            "floor_us": floor, "hbm_bytes": cost.hbm_bytes, "flops": cost.flops,
        }));
        us
    }

    /// A derived number, such as a difference or a ratio, with its unit.
    pub fn number(&mut self, label: &str, value: f64, unit: &str) {
        println!("{label} | {value:8.2} {unit}");
        self.lines.push(json!({
            "label": label.split_whitespace().collect::<Vec<_>>().join(" "), "value": value, "unit": unit,
        }));
    }

    /// Writes the file that `BENCH_JSON` names: an array of one object per line.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn finish(self) -> Result<()> {
        if let Ok(path) = std::env::var("BENCH_JSON") {
            std::fs::write(&path, serde_json::to_vec_pretty(&self.lines)?)?;
            println!("{} results in {path}", self.lines.len());
        }
        Ok(())
    }
}

//! Time of the MLA query per heads, tokens and cache form.
//!
//! On a GPU: a graph of launches with programmatic overlap, one per layer, whose weights together exceed the L2; the answer is
//! checked first. Each line shows the median, the floor and their ratio:
//!
//! ```text
//! mla_query h6 t1 Fp8Ds | 2.45 us | floor 0.99 us, HBM 4.3 MB at 4.37 TB/s | 0.41 of the roofline
//! ```
//!
//! The floor is that of one launch alone; behind a predecessor the next layer's weights load early, so only latency is left.
//! `BENCH_HEADS=6,12` and `BENCH_TOKENS=1,64` restrict the cases; `BENCH_VARIANTS=single,threads,tile16,tile32,tile64` times
//! those kernels in turn, round by round, instead of the planned one; other variants are `planned`, `publish8`, which publishes
//! to the mailboxes of eight ranks on this device, and `gathered`, which publishes to itself and adds the kernel that gathers; their
//! floor is the query's alone.
//! `BENCH_JSON=FILE` keeps the results. `BENCH_SERVE=1` answers requests of another program instead (`benches/compare_mla.py`
//! is one). Without a GPU it says so and times the simulator on the smallest case.

#[path = "../common/mod.rs"]
mod common;
mod rig;
mod serve;

use std::time::Instant;

use criterion::Criterion;
use dsa_core::layout::mla_entry::MlaCacheForm;
use gpu::{Device, Graph};
use mla_query::query::cost;

use common::{Peak, Report, Result, Samples, graph_us, numbers, print_device, time_graph};
use rig::{Rig, Variant};

/// Rounds of variants in turn.
const ROUNDS: usize = 21;

struct Bench<'a> {
    criterion: &'a mut Criterion,
    device: &'a Device,
    report: Report,
}

impl Bench<'_> {
    fn rig(&self, heads: usize, tokens: usize, form: MlaCacheForm, variant: Variant) -> Result<(Rig, Graph)> {
        let rig = Rig::new(self.device, heads, tokens, form, variant, None)?;
        rig.check().map_err(|error| format!("h{heads} t{tokens} {form:?} {variant}: {error}"))?;
        let graph = rig.graph()?;
        Ok((rig, graph))
    }

    fn line(&mut self, label: &str, rig: &Rig, samples: &Samples) {
        let rate = match rig.shape.is_tiled() {
            true => |peak: &Peak| peak.bf16_flops_per_s,
            false => |peak: &Peak| peak.fp32_flops_per_s,
        };
        self.report.line(label, samples, cost(&rig.shape, rig.tokens), Peak::of(self.device), rate);
    }

    fn time(&mut self, heads: usize, tokens: usize, form: MlaCacheForm) -> Result<()> {
        let (rig, graph) = self.rig(heads, tokens, form, Variant::Planned)?;
        let label = format!("mla_query h{heads} t{tokens} {form:?}");
        let samples = time_graph(self.criterion, &label.replace(' ', "/"), &rig.stream, &graph, rig.launches())?;
        self.line(&label, &rig, &samples);
        Ok(())
    }

    /// Times variants in turn.
    fn compare(&mut self, heads: usize, tokens: usize, variants: &[Variant]) -> Result<()> {
        let mut rigs = Vec::new();
        for variant in variants {
            // Tokens one by one are for few.
            let single = matches!(variant, Variant::Single | Variant::Threads);
            if !single || tokens <= mla_query::shape::TOKENS_MAX as usize {
                let (rig, graph) = self.rig(heads, tokens, MlaCacheForm::Fp8Ds, *variant)?;
                rigs.push((variant, rig, graph, Vec::new()));
            }
        }
        for round in 0..ROUNDS + 3 {
            for (_, rig, graph, samples) in &mut rigs {
                let us = graph_us(&rig.stream, graph, rig.launches())?;
                if round >= 3 {
                    samples.push(us);
                }
            }
        }
        for (variant, rig, _, samples) in rigs {
            self.line(&format!("mla_query h{heads} t{tokens:<3} {variant:8}"), &rig, &Samples::new(samples));
        }
        Ok(())
    }
}

fn bench_gpu(criterion: &mut Criterion, device: &Device) -> Result<()> {
    if std::env::var_os("BENCH_SERVE").is_some() {
        return serve::serve(device);
    }
    print_device(device, "cold");
    let variants = match std::env::var("BENCH_VARIANTS") {
        Ok(names) => names.split(',').map(Variant::parse).collect::<Result<Vec<_>>>()?,
        Err(_) => Vec::new(),
    };
    let mut bench = Bench { criterion, device, report: Report::default() };
    for heads in numbers("BENCH_HEADS", &[6, 12])? {
        for tokens in numbers("BENCH_TOKENS", &[1, 2, 4, 8, 16, 32, 64, 128])? {
            match variants[..] {
                [] => bench.time(heads, tokens, MlaCacheForm::Fp8Ds)?,
                _ => bench.compare(heads, tokens, &variants)?,
            }
        }
        if variants.is_empty() {
            for form in [MlaCacheForm::Fp8Divide, MlaCacheForm::Fp8Multiply, MlaCacheForm::Nvfp4Ds] {
                bench.time(heads, 8, form)?;
            }
        }
    }
    bench.report.finish()
}

fn bench_simulator(why: &str) -> Result<()> {
    println!("no GPU ({why}): timing the simulator, which says nothing about the kernel");
    let device = Device::simulated(gpu::SimConfig::default());
    for (tokens, variant) in [
        (1, Variant::Single),
        (1, Variant::Threads),
        (9, Variant::Tiled(16)),
        (1, Variant::Publish),
        (1, Variant::Gathered),
    ] {
        let rig = Rig::new(&device, 1, tokens, MlaCacheForm::Fp8Ds, variant, Some(1))?;
        let started = Instant::now();
        rig.check()?;
        println!(
            "mla_query h1 t{tokens} {variant} | simulated and checked in {:.3} s",
            started.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

fn main() {
    common::run(Device::cuda(0), |device| bench_gpu(&mut common::criterion(), &device), bench_simulator);
}

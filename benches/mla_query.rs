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
//! Without a GPU it says so and times the simulator on the smallest case. `BENCH_JSON=FILE` keeps the results.

mod common;

use std::time::Instant;

use criterion::Criterion;
use dsa_core::consts::{KV_LORA, NOPE, Q_HEAD, Q_LORA};
use dsa_core::generate::SplitMix64;
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_core::layout::mla_rows::{QKV, QUERY};
use dsa_core::numerics::bf16;
use dsa_core::oracle::mla_query::{self as oracle, Approximate, QueryNorm};
use gpu::{Buffer, Device, Graph, Stream};
use mla_query::query::cost;
use mla_query::{MlaCache, MlaError, MlaQuery, MlaShape, MlaStep, MlaWeights};

use common::{Peak, Report, Result, print_device, time_graph};

/// Weights of all layers together: several times an L2.
const WEIGHT_BYTES: usize = 240 << 20;
const EPS: f32 = 1e-5;
const PAGE_TOKENS: usize = 64;

/// The layers of one case on a device.
struct Rig {
    stream: Stream,
    shape: MlaShape,
    tokens: usize,
    layers: Vec<(MlaWeights, [Buffer<u16>; 4])>,
    host: Vec<u16>,
    w_qa: Vec<u16>,
    qkv: Buffer<u16>,
    slots: Buffer<i64>,
    scale: Buffer<f32>,
    query: Buffer<u8>,
    q_c: Buffer<u16>,
    cache: Buffer<u8>,
    dropped: Buffer<u32>,
}

impl Rig {
    fn new(device: &Device, heads: usize, tokens: usize, form: MlaCacheForm, layers: usize) -> Result<Rig> {
        let shape = MlaShape::new(heads, tokens, form, PAGE_TOKENS)?.with_qc(true);
        let mut rng = SplitMix64::new(1);
        let mut values = |n: usize, scale: f32| -> Vec<u16> {
            (0..n).map(|_| bf16::from_f32(scale * (rng.next_u64() as i64 as f32) * 2f32.powi(-63))).collect()
        };
        let w_qa = values(Q_LORA, 1.0);
        let weights = [
            w_qa.clone(),
            values(KV_LORA, 1.0),
            values(heads * Q_HEAD * Q_LORA, 0.05),
            values(heads * NOPE * KV_LORA, 0.1),
        ];
        let layers = (0..layers)
            .map(|_| {
                let memory = [0, 1, 2, 3].map(|i| device.upload(&weights[i]));
                let [a, b, c, d] = memory;
                let memory = [a?, b?, c?, d?];
                let [q_a, kv_a, q_b, uk] = memory.each_ref().map(Buffer::as_view);
                Ok((MlaWeights::new(device, &shape, &q_a, &kv_a, &q_b, &uk)?, memory))
            })
            .collect::<Result<Vec<_>>>()?;
        let host = values(tokens * QKV, 2.0);
        let pages = tokens.div_ceil(PAGE_TOKENS);
        Ok(Rig {
            stream: device.stream()?,
            shape,
            tokens,
            layers,
            qkv: device.upload(&host)?,
            host,
            w_qa,
            slots: device.upload(&(0..tokens as i64).collect::<Vec<_>>())?,
            scale: device.upload(&[1.0])?,
            query: device.alloc(tokens * heads * QUERY * 2)?,
            q_c: device.alloc(tokens * Q_LORA)?,
            cache: device.alloc(pages * PAGE_TOKENS * form.entry_bytes())?,
            dropped: device.alloc_zeros(1)?,
        })
    }

    fn step(&self, layer: usize) -> MlaStep<'_> {
        let entry = self.shape.form().entry_bytes();
        MlaStep {
            tokens: self.tokens,
            qkv: self.qkv.as_view(),
            qkv_stride: QKV,
            slots: self.slots.as_view(),
            weights: &self.layers[layer].0,
            q_scale_inv: self.shape.is_fp8().then(|| self.scale.as_view()),
            k_scale: self.shape.takes_k_scale().then(|| self.scale.as_view()),
            eps: EPS,
            query: self.query.as_view(),
            q_c: Some(self.q_c.as_view()),
            cache: MlaCache {
                bytes: self.cache.as_view(),
                pages: self.tokens.div_ceil(PAGE_TOKENS),
                page_stride: PAGE_TOKENS * entry,
                token_stride: entry,
            },
            mailbox: None,
            dropped: self.dropped.as_view(),
        }
    }

    /// One launch whose `q_c` is the oracle's, to 1 ulp of its `rsqrt`, and whose slots all land.
    fn check(&self, query: &MlaQuery) -> Result<()> {
        query.launch(&self.stream, &self.step(0))?;
        let norm = if self.shape.is_k3() { QueryNorm::K3 } else { QueryNorm::Dsa };
        let got = self.q_c.copy_to_vec(&self.stream)?;
        for (row, got) in self.host.chunks(QKV).zip(got.chunks(Q_LORA)) {
            let want = oracle::query_c(row, &self.w_qa, EPS, norm, Approximate::exact());
            let near = got.iter().zip(&want).all(|(a, b)| a.abs_diff(*b) <= 1);
            if !near {
                return Err("q_c is not the oracle's".into());
            }
        }
        match self.dropped.copy_to_vec(&self.stream)?[0] {
            0 => Ok(()),
            n => Err(format!("{n} slots were dropped").into()),
        }
    }

    fn graph(&self, query: &MlaQuery) -> Result<Graph, MlaError> {
        Graph::capture_with(&self.stream, |stream| {
            (0..self.layers.len()).try_for_each(|layer| query.launch(stream, &self.step(layer)))
        })
    }
}

struct Bench<'a> {
    criterion: &'a mut Criterion,
    device: &'a Device,
    report: Report,
}

impl Bench<'_> {
    fn time(&mut self, heads: usize, tokens: usize, form: MlaCacheForm) -> Result<()> {
        let layers = WEIGHT_BYTES / (2 * heads * (Q_HEAD * Q_LORA + NOPE * KV_LORA));
        let rig = Rig::new(self.device, heads, tokens, form, layers)?;
        let query = MlaQuery::new(self.device, rig.shape)?;
        rig.check(&query)?;
        let graph = rig.graph(&query)?;
        let label = format!("mla_query h{heads} t{tokens} {form:?}");
        let samples = time_graph(self.criterion, &label.replace(' ', "/"), &rig.stream, &graph, layers)?;
        let cost = cost(&rig.shape, tokens);
        self.report.line(&label, &samples, cost, Peak::of(self.device), |peak| peak.fp32_flops_per_s);
        Ok(())
    }
}

fn bench_gpu(criterion: &mut Criterion, device: &Device) -> Result<()> {
    print_device(device);
    let mut bench = Bench { criterion, device, report: Report::default() };
    for heads in [6, 12] {
        for tokens in [1, 2, 4, 8, 16, 64] {
            bench.time(heads, tokens, MlaCacheForm::Fp8Ds)?;
        }
        bench.time(heads, 8, MlaCacheForm::Nvfp4Ds)?;
    }
    bench.report.finish()
}

fn bench_simulator(why: &str) -> Result<()> {
    println!("no GPU ({why}): timing the simulator, which says nothing about the kernel");
    let rig = Rig::new(&Device::simulated(gpu::SimConfig::default()), 1, 1, MlaCacheForm::Fp8Ds, 1)?;
    let query = MlaQuery::new(rig.stream.device(), rig.shape)?;
    let started = Instant::now();
    rig.check(&query)?;
    println!("mla_query h1 t1 Fp8Ds | simulated and checked in {:.3} s", started.elapsed().as_secs_f64());
    Ok(())
}

fn main() {
    let result = match Device::cuda(0) {
        Ok(device) => bench_gpu(&mut common::criterion(), &device),
        Err(error) => bench_simulator(&error.to_string()),
    };
    if let Err(error) = result {
        eprintln!("bench failed: {error}");
        std::process::exit(1);
    }
}

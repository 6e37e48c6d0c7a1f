//! Runs the MLA query on a device and compares with the oracle. One body, two executors: the simulator always, a GPU when
//! there is one.

// Every test file uses its own part.
#![allow(dead_code)]

use dsa_core::consts::{KV_LORA, NOPE, Q_HEAD, Q_LORA};
use dsa_core::generate::SplitMix64;
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_core::layout::mla_rows::{K_PE, KV_C, QKV, QUERY};
use dsa_core::numerics::{bf16, e4m3, order16};
use dsa_core::oracle::mla_query::{self as oracle, Approximate, QueryNorm};
use gpu::{Buffer, Device, Stream};
use mla_query::{MlaCache, MlaError, MlaQuery, MlaShape, MlaStep, MlaWeights};
use ptx_sim::numeric::{approx, float};
#[allow(unused_imports)] // some tests only simulate
pub use test_devices::*;

/// What outputs hold before a run.
pub const POISON: u8 = 0xA5;
/// Elements after each output that must keep the poison.
pub const GUARD: usize = 64;
/// Epsilon of both norms.
pub const EPS: f32 = 1e-5;

/// The hardware's `rsqrt.approx`, and `div.full` by an immediate: a product with the rounded reciprocal.
pub fn hardware() -> Approximate<'static> {
    Approximate {
        rsqrt: &|x| f32::from_bits(approx::rsqrt(x.to_bits())),
        div_full_1536: &|x| f32::from_bits(float::mul(x.to_bits(), (1.0f32 / 1536.0).to_bits())),
    }
}

/// One step on the host.
#[derive(Clone)]
pub struct Step {
    pub heads: usize,
    pub tokens: usize,
    pub q_a: Vec<u16>,
    pub kv_a: Vec<u16>,
    pub q_b: Vec<u16>,
    pub uk: Vec<u16>,
    /// Rows `qkv_stride` apart.
    pub qkv: Vec<u16>,
    pub qkv_stride: usize,
    pub slots: Vec<i64>,
    pub q_scale_inv: f32,
    pub k_scale: f32,
    pub pages: usize,
    pub page_tokens: usize,
    /// Bytes between pages and entries beyond the least.
    pub page_gap: usize,
    pub token_gap: usize,
}

impl Step {
    /// Random weights and rows; token `t` goes to slot `3 t`.
    pub fn random(seed: u64, heads: usize, tokens: usize) -> Step {
        let mut rng = SplitMix64::new(seed);
        let mut values = |n: usize, scale: f32, offset: f32| -> Vec<u16> {
            (0..n).map(|_| bf16::from_f32(offset + scale * rng.gaussian())).collect()
        };
        Step {
            heads,
            tokens,
            q_a: values(Q_LORA, 0.3, 1.0),
            kv_a: values(KV_LORA, 0.3, 1.0),
            q_b: values(heads * Q_HEAD * Q_LORA, 0.05, 0.0),
            uk: values(heads * NOPE * KV_LORA, 0.1, 0.0),
            qkv: values(tokens * QKV, 2.0, 0.0),
            qkv_stride: QKV,
            slots: (0..tokens as i64).map(|t| 3 * t).collect(),
            q_scale_inv: 1.7,
            k_scale: 0.037,
            pages: 3,
            page_tokens: 64,
            page_gap: 0,
            token_gap: 0,
        }
    }

    pub fn row(&self, token: usize) -> &[u16] {
        &self.qkv[token * self.qkv_stride..][..QKV]
    }

    pub fn token_stride(&self, form: MlaCacheForm) -> usize {
        form.entry_bytes() + self.token_gap
    }

    pub fn page_stride(&self, form: MlaCacheForm) -> usize {
        self.page_tokens * self.token_stride(form) + self.page_gap
    }

    pub fn cache_bytes(&self, form: MlaCacheForm) -> usize {
        self.pages * self.page_stride(form)
    }

    pub fn capacity(&self) -> i64 {
        (self.pages * self.page_tokens) as i64
    }

    /// The oracle's cache over poison.
    pub fn cache(&self, form: MlaCacheForm) -> Vec<u8> {
        let mut cache = vec![POISON; self.cache_bytes(form)];
        for (token, slot) in self.slots.iter().take(self.tokens).enumerate() {
            if !(0..self.capacity()).contains(slot) {
                continue;
            }
            let slot = *slot as usize;
            let at =
                slot / self.page_tokens * self.page_stride(form) + slot % self.page_tokens * self.token_stride(form);
            let entry = oracle::insert(form, self.row(token), &self.kv_a, EPS, self.k_scale, hardware());
            cache[at..at + entry.len()].copy_from_slice(&entry);
        }
        cache
    }

    /// The oracle's `q_c`, row after row.
    pub fn q_c(&self, form: MlaCacheForm) -> Vec<u16> {
        let norm = if form == MlaCacheForm::Fp8Multiply { QueryNorm::K3 } else { QueryNorm::Dsa };
        (0..self.tokens).flat_map(|t| oracle::query_c(self.row(t), &self.q_a, EPS, norm, hardware())).collect()
    }

    /// The oracle's BF16 query.
    pub fn query(&self, form: MlaCacheForm) -> Vec<u16> {
        let q_c = self.q_c(form);
        let weights = oracle::MlaWeights { q_a: &self.q_a, kv_a: &self.kv_a, q_b: &self.q_b, uk: &self.uk };
        q_c.chunks(Q_LORA)
            .flat_map(|q_c| {
                (0..self.heads).flat_map(|head| oracle::query_head(q_c, &weights, head)).collect::<Vec<_>>()
            })
            .collect()
    }
}

/// What a step left on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outputs {
    pub query: Vec<u8>,
    pub q_c: Option<Vec<u16>>,
    pub cache: Vec<u8>,
    pub dropped: u32,
}

/// A step on a device, its outputs poisoned, with guards.
pub struct Resident {
    pub stream: Stream,
    pub weights: MlaWeights,
    pub shape: MlaShape,
    memory: [Buffer<u16>; 4],
    pub qkv: Buffer<u16>,
    pub slots: Buffer<i64>,
    q_scale_inv: Buffer<f32>,
    k_scale: Buffer<f32>,
    query: Buffer<u8>,
    q_c: Buffer<u16>,
    cache: Buffer<u8>,
    dropped: Buffer<u32>,
}

impl Resident {
    pub fn new(device: &Device, step: &Step, shape: MlaShape) -> Resident {
        let memory = [&step.q_a, &step.kv_a, &step.q_b, &step.uk].map(|w| device.upload(w).unwrap());
        let [q_a, kv_a, q_b, uk] = memory.each_ref().map(Buffer::as_view);
        let weights = MlaWeights::new(device, &shape, &q_a, &kv_a, &q_b, &uk).unwrap();
        let k_scale = if shape.is_k3() { 1.0 / step.k_scale } else { step.k_scale };
        let query_bytes = step.tokens * step.heads * QUERY * shape.query_bytes();
        Resident {
            stream: device.stream().unwrap(),
            weights,
            shape,
            qkv: device.upload(&step.qkv).unwrap(),
            slots: device.upload(&step.slots).unwrap(),
            q_scale_inv: device.upload(&[step.q_scale_inv]).unwrap(),
            k_scale: device.upload(&[k_scale]).unwrap(),
            query: device.alloc(query_bytes + GUARD).unwrap(),
            q_c: device.alloc(step.tokens * Q_LORA + GUARD).unwrap(),
            cache: device.alloc(step.cache_bytes(shape.form()) + GUARD).unwrap(),
            dropped: device.alloc_zeros(1).unwrap(),
            memory,
        }
    }

    pub fn step(&self, step: &Step) -> MlaStep<'_> {
        let (shape, form) = (&self.shape, self.shape.form());
        MlaStep {
            tokens: step.tokens,
            qkv: self.qkv.as_view(),
            qkv_stride: step.qkv_stride,
            slots: self.slots.as_view(),
            weights: &self.weights,
            q_scale_inv: shape.is_fp8().then(|| self.q_scale_inv.as_view()),
            k_scale: shape.takes_k_scale().then(|| self.k_scale.as_view()),
            eps: EPS,
            query: self.query.as_view(),
            q_c: shape.store_qc().then(|| self.q_c.as_view()),
            cache: MlaCache {
                bytes: self.cache.as_view(),
                pages: step.pages,
                page_stride: step.page_stride(form),
                token_stride: step.token_stride(form),
            },
            mailbox: None,
            dropped: self.dropped.as_view(),
        }
    }

    pub fn poison(&self) {
        self.query.fill_bytes(&self.stream, POISON).unwrap();
        self.q_c.fill_bytes(&self.stream, POISON).unwrap();
        self.cache.fill_bytes(&self.stream, POISON).unwrap();
        self.dropped.fill_bytes(&self.stream, 0).unwrap();
    }

    pub fn launch(&self, query: &MlaQuery, step: &Step) -> Result<(), MlaError> {
        query.launch(&self.stream, &self.step(step))
    }

    pub fn read(&self, step: &Step) -> Outputs {
        let mut query = self.query.copy_to_vec(&self.stream).unwrap();
        let mut q_c = self.q_c.copy_to_vec(&self.stream).unwrap();
        let mut cache = self.cache.copy_to_vec(&self.stream).unwrap();
        let poison16 = u16::from_ne_bytes([POISON; 2]);
        let bytes = step.tokens * step.heads * QUERY * self.shape.query_bytes();
        assert!(query.drain(bytes..).all(|b| b == POISON), "a write past the query");
        let elements = if self.shape.store_qc() { step.tokens * Q_LORA } else { 0 };
        assert!(q_c.drain(elements..).all(|x| x == poison16), "a write past q_c");
        assert!(cache.drain(step.cache_bytes(self.shape.form())..).all(|b| b == POISON), "a write past the cache");
        let q_c = self.shape.store_qc().then_some(q_c);
        Outputs { query, q_c, cache, dropped: self.dropped.copy_to_vec(&self.stream).unwrap()[0] }
    }

    /// One poisoned run.
    pub fn run(&self, query: &MlaQuery, step: &Step) -> Outputs {
        self.poison();
        self.launch(query, step).unwrap();
        self.read(step)
    }
}

/// The shape of a step, with `q_c`: up to 8 tokens one by one, whatever is planned.
pub fn shape_of(step: &Step, form: MlaCacheForm) -> MlaShape {
    let shape = MlaShape::new(step.heads, step.tokens.max(1), form, step.page_tokens).unwrap().with_qc(true);
    shape.with_tile(None).unwrap_or(shape)
}

/// Runs a step once.
pub fn run(device: &Device, step: &Step, shape: MlaShape) -> Outputs {
    let query = MlaQuery::new(device, shape).unwrap();
    Resident::new(device, step, shape).run(&query, step)
}

/// BF16 values between two, along the order of numbers.
pub fn ulps(a: u16, b: u16) -> u16 {
    order16::key_of(a).abs_diff(order16::key_of(b))
}

/// E4M3 codes between two, along the order of numbers.
pub fn steps(a: u8, b: u8) -> u32 {
    let line = |c: u8| i32::from(c & 0x7F) * if c & 0x80 != 0 { -1 } else { 1 };
    line(a).abs_diff(line(b))
}

/// Checks outputs against the oracle: `q_c` and the cache bit for bit, the query within the rounding of its sums.
#[track_caller]
pub fn check(step: &Step, shape: MlaShape, got: &Outputs) {
    let form = shape.form();
    if let Some(q_c) = &got.q_c {
        for (i, (got, want)) in q_c.iter().zip(step.q_c(form)).enumerate() {
            assert_eq!(*got, want, "q_c of token {}, column {}", i / Q_LORA, i % Q_LORA);
        }
    }
    check_query(step, shape, &got.query, &step.query(form));
    let cache = step.cache(form);
    if let Some(at) = (0..cache.len()).find(|at| got.cache[*at] != cache[*at]) {
        let (page, within) = (at / step.page_stride(form), at % step.page_stride(form));
        let (token, byte) = (within / step.token_stride(form), within % step.token_stride(form));
        panic!("{form:?}: page {page}, token {token}, byte {byte}: {:02x}, want {:02x}", got.cache[at], cache[at]);
    }
    let outside = step.slots.iter().take(step.tokens).filter(|slot| **slot >= step.capacity()).count();
    assert_eq!(got.dropped as usize, outside, "slots past the capacity");
}

/// Checks a query within 2 BF16 ulp, or 1/256 of its head's largest magnitude; E4M3 within that or one code.
#[track_caller]
pub fn check_query(step: &Step, shape: MlaShape, got: &[u8], want: &[u16]) {
    let near = |got: f32, want: f32, largest: f32| (got - want).abs() <= largest / 256.0;
    let mut differ = 0;
    for (row, want) in want.chunks(QUERY).enumerate() {
        let largest = want.iter().map(|x| bf16::to_f32(*x).abs()).fold(0.0, f32::max);
        let bytes = &got[row * QUERY * shape.query_bytes()..][..QUERY * shape.query_bytes()];
        let place = |i: usize| format!("token {}, head {}, column {i}", row / step.heads, row % step.heads);
        if shape.is_fp8() {
            let want_codes = oracle::query_fp8(want, step.q_scale_inv);
            for (i, (got, want)) in bytes.iter().zip(want_codes).enumerate() {
                let (g, w) = (e4m3::to_f32(*got), e4m3::to_f32(want));
                let close = *got == want || steps(*got, want) <= 1 || near(g, w, largest * step.q_scale_inv);
                assert!(close, "{}: {got:02x}, want {want:02x}", place(i));
                differ += usize::from(*got != want);
            }
        } else {
            for (i, (got, want)) in bytes.chunks(2).zip(want).enumerate() {
                let got = u16::from_le_bytes([got[0], got[1]]);
                let close =
                    got == *want || ulps(got, *want) <= 2 || near(bf16::to_f32(got), bf16::to_f32(*want), largest);
                assert!(close, "{}: {got:04x}, want {want:04x}", place(i));
            }
        }
    }
    assert!(differ * 100 <= want.len(), "{differ} of {} codes differ", want.len());
}

/// Elements of the parts of a row, for tests that write them.
pub const PARTS: [std::ops::Range<usize>; 3] = [0..Q_LORA, KV_C, K_PE];

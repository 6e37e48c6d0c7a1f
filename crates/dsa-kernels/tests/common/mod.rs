//! Runs score and select on a device and compares with the oracles. One body, two executors: the simulator always, a
//! GPU when there is one.

// Every test file uses its own part.
#![allow(dead_code, unused_imports)]

mod mutant;
mod packing;
mod producer;
mod scoring;
mod selecting;

pub use mutant::*;
pub use packing::*;
pub use producer::*;
pub use scoring::*;
pub use selecting::*;
pub use test_devices::*;

use dsa_core::consts::KEYS_PER_TOP;
use dsa_core::layout::fp8_page;
use dsa_core::layout::tp_scratch::TpScratch;
use dsa_core::{DecodeStep, IndexCacheShape, KvShape, oracle};
use dsa_kernels::score::{IndexerScore, KeyCache, ScoreForm, ScoreOutput, ScoreShape, ScoreStep};
use dsa_kernels::select::{IndexerSelect, SelectShape, SelectStep};
use dsa_kernels::{KernelError, Table};
use gpu::{Buffer, Device, Stream};

/// What outputs and scratch hold before a run.
pub const POISON: u8 = 0xA5;
/// [`POISON`] as the scratch's elements.
pub const POISON16: u16 = u16::from_ne_bytes([POISON; 2]);
/// [`POISON`] as the outputs' elements.
pub const POISON32: i32 = i32::from_ne_bytes([POISON; 4]);
/// Elements after each buffer that must keep the poison.
pub const GUARD: usize = 64;

/// A step's inputs of score on a device.
pub struct Inputs {
    pub device: Device,
    pub stream: Stream,
    pub queries: Buffer<u8>,
    pub weights: Buffer<u16>,
    pub cache: KeyCache,
    pub cache_bytes: Buffer<u8>,
    pub table: Buffer<i32>,
    pub row_ends: Buffer<i32>,
}

impl Inputs {
    pub fn new(device: &Device, step: &DecodeStep) -> Inputs {
        let cache_bytes = device.upload(&step.cache).unwrap();
        Inputs {
            device: device.clone(),
            stream: device.stream().unwrap(),
            queries: device.upload(&step.queries).unwrap(),
            weights: device.upload(&step.weights).unwrap(),
            cache: KeyCache::new(device, &cache_bytes.as_view(), cache_shape(step)).unwrap(),
            cache_bytes,
            table: device.upload(&step.table).unwrap(),
            row_ends: device.upload(&step.row_ends).unwrap(),
        }
    }

    pub fn score_step(&self, step: &DecodeStep) -> ScoreStep<'_> {
        ScoreStep {
            queries: self.queries.as_view(),
            weights: self.weights.as_view(),
            cache: &self.cache,
            table: Table { ids: self.table.as_view(), stride: step.table_stride, width: step.table_width },
            row_ends: self.row_ends.as_view(),
            length_max: step.len_max(),
        }
    }
}

/// The index cache of a step.
pub fn cache_shape(step: &DecodeStep) -> IndexCacheShape {
    IndexCacheShape::new(step.blocks, fp8_page::BYTES, step.page_stride).unwrap()
}

/// A step's inputs on a device, its scratch and outputs poisoned, with guards.
pub struct Resident {
    pub inputs: Inputs,
    pub kv_table: Buffer<i32>,
    pub logits: Buffer<u16>,
    pub tops: Buffer<u16>,
    pub out: Buffer<i32>,
    pub counts: Buffer<i32>,
    pub ids: Buffer<i32>,
}

impl Resident {
    pub fn new(device: &Device, step: &DecodeStep) -> Resident {
        let scratch = TpScratch::capacity(step.rows, step.len_max());
        let resident = Resident {
            inputs: Inputs::new(device, step),
            kv_table: device.upload(&step.kv_table).unwrap(),
            logits: device.alloc(scratch + GUARD).unwrap(),
            tops: device.alloc(scratch / KEYS_PER_TOP + GUARD).unwrap(),
            out: device.alloc(step.rows * step.topk + GUARD).unwrap(),
            counts: device.alloc(step.rows + GUARD).unwrap(),
            ids: device.alloc(step.rows * step.topk + GUARD).unwrap(),
        };
        resident.poison(step);
        resident
    }

    pub fn stream(&self) -> &Stream {
        &self.inputs.stream
    }

    /// Poisons the outputs, and the guards after the scratch: the scratch itself stays uninitialised, so that the
    /// simulator sees any read of what score did not write.
    pub fn poison(&self, step: &DecodeStep) {
        let stream = self.stream();
        let scratch = TpScratch::capacity(step.rows, step.len_max());
        self.logits.view(scratch..).unwrap().fill_bytes(stream, POISON).unwrap();
        self.tops.view(scratch / KEYS_PER_TOP..).unwrap().fill_bytes(stream, POISON).unwrap();
        for buffer in [&self.out, &self.counts, &self.ids] {
            buffer.fill_bytes(stream, POISON).unwrap();
        }
    }

    /// One poisoned run.
    pub fn run(&self, step: &DecodeStep, score: &IndexerScore, select: &IndexerSelect) -> Outputs {
        self.poison(step);
        self.launch(step, score, select, self.stream()).unwrap();
        self.read(step)
    }

    /// Launches score and select.
    pub fn launch(
        &self,
        step: &DecodeStep,
        score: &IndexerScore,
        select: &IndexerSelect,
        stream: &Stream,
    ) -> Result<(), KernelError> {
        score.launch(stream, &self.inputs.score_step(step), &self.compact())?;
        select.launch(stream, &self.select_step(step))
    }

    pub fn compact(&self) -> ScoreOutput<'_> {
        ScoreOutput::Compact { logits: self.logits.as_view(), tops: self.tops.as_view() }
    }

    pub fn select_step(&self, step: &DecodeStep) -> SelectStep<'_> {
        let rows = step.rows;
        SelectStep {
            logits: self.logits.as_view(),
            tops: self.tops.as_view(),
            table: Table { ids: self.kv_table.as_view(), stride: step.kv_table_stride, width: step.kv_table_width },
            kv: KvShape::new(step.kv_page, step.kv_block_rows, 0).unwrap(),
            row_ends: self.inputs.row_ends.as_view(),
            q: step.q,
            length_max: step.len_max(),
            out: self.out.view(..rows * step.topk).unwrap(),
            counts: self.counts.view(..rows).unwrap(),
            ids: Some(self.ids.view(..rows * step.topk).unwrap()),
        }
    }

    pub fn read(&self, step: &DecodeStep) -> Outputs {
        let stream = self.stream();
        let plan = TpScratch::plan(&step.row_ends, step.q, step.topk, step.len_max()).unwrap();
        let logits = self.logits.copy_to_vec(stream).unwrap();
        let tops = self.tops.copy_to_vec(stream).unwrap();
        let scratch = TpScratch::capacity(step.rows, step.len_max());
        assert!(logits[scratch..].iter().all(|x| *x == POISON16), "a write past the logits");
        assert!(tops[scratch / KEYS_PER_TOP..].iter().all(|x| *x == POISON16), "a write past the tops");
        let row = |row: usize| plan.row_start(row).map(|at| (at, step.row_len(row)));
        Outputs {
            logits: (0..step.rows).map(|r| row(r).map(|(at, n)| logits[at..at + n].to_vec())).collect(),
            tops: (0..step.rows)
                .map(|r| row(r).map(|(at, n)| tops[at / 8..at / 8 + n.div_ceil(KEYS_PER_TOP)].to_vec()))
                .collect(),
            out: read_guarded(&self.out, step.rows * step.topk, stream),
            counts: read_guarded(&self.counts, step.rows, stream),
            ids: read_guarded(&self.ids, step.rows * step.topk, stream),
        }
    }
}

/// The first `len` elements of an output; what follows them must be poison.
#[track_caller]
pub fn read_guarded(buffer: &Buffer<i32>, len: usize, stream: &Stream) -> Vec<i32> {
    let mut values = buffer.copy_to_vec(stream).unwrap();
    assert!(values[len..].iter().all(|x| *x == POISON32), "a write past an output");
    values.truncate(len);
    values
}

/// What a step left on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outputs {
    /// Per row, if it was scored.
    pub logits: Vec<Option<Vec<u16>>>,
    pub tops: Vec<Option<Vec<u16>>>,
    pub out: Vec<i32>,
    pub counts: Vec<i32>,
    pub ids: Vec<i32>,
}

/// The kernels of a step.
pub fn kernels(device: &Device, step: &DecodeStep) -> (IndexerScore, IndexerSelect) {
    let form = ScoreForm::Compact { topk: step.topk as u32 };
    let score = ScoreShape::new(step.q, form, step.scale_form).unwrap();
    let select = SelectShape::new(step.topk, step.kv_page).unwrap().with_ids(true);
    (IndexerScore::new(device, score).unwrap(), IndexerSelect::new(device, select).unwrap())
}

/// The tensor core's dot product: four chained k-steps.
pub fn dot_tensor_core(query: &[u8; 128], key: &[u8; 128]) -> f32 {
    let step = |x: &[u8; 128], k: usize| -> [u8; 32] { x[32 * k..32 * k + 32].try_into().unwrap() };
    (0..4).fold(0.0, |acc, k| ptx_sim::numeric::tensor_core::dot_e4m3_k32(&step(key, k), &step(query, k), acc))
}

/// Runs a step and checks logits and tops bit for bit against the oracle with the tensor core's arithmetic, and the
/// selection against the oracle on the device's own logits.
#[track_caller]
pub fn check_step(device: &Device, step: &DecodeStep) -> Outputs {
    let resident = Resident::new(device, step);
    let (score, select) = kernels(device, step);
    let got = resident.run(step, &score, &select);
    check_outputs(step, &got);
    got
}

/// The checks of [`check_step`].
#[track_caller]
pub fn check_outputs(step: &DecodeStep, got: &Outputs) {
    let want = oracle::step::logits(step, dot_tensor_core);
    let mut device_logits = want.clone();
    for row in 0..step.rows {
        let Some(logits) = &got.logits[row] else { continue };
        for (key, (got, want)) in logits.iter().zip(&want[row]).enumerate() {
            assert_eq!(got, want, "logit of row {row}, key {key}: {got:#06x}, want {want:#06x}");
        }
        let tops = oracle::score::tops(logits, logits.len());
        assert_eq!(got.tops[row].as_deref(), Some(&tops[..]), "tops of row {row}");
        device_logits[row][..logits.len()].copy_from_slice(logits);
    }
    let selected = oracle::step::select(step, &device_logits).unwrap();
    oracle::select::check_selection(&selected, step.topk, &got.out, &got.counts, Some(&got.ids))
        .unwrap_or_else(|mismatch| panic!("{mismatch}"));
}

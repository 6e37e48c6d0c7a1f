//! Layers on the devices that are here, and what the oracle answers for them.
#![allow(dead_code)]

use std::sync::Arc;

use dsa_core::DecodeStep;
use dsa_core::consts::PAGE;
use dsa_core::oracle::select::{Selection, check_selection};
use dsa_core::oracle::step;
use gpu::{Buffer, Device, SimConfig, Stream};
use kimi_decode::check::device_dot;
use kimi_decode::{
    Error, FusedIndexer, IndexerConfig, IndexerScratch, LayerSpec, ScratchSpec, Selected, Step, StepShape, StepTable,
};
pub use test_devices::cuda;
use test_devices::gpu_only;

/// The simulator in its own order and in two random ones, and a GPU if there is one.
pub fn devices() -> Vec<Device> {
    let orders = [SimConfig::default(), SimConfig::seeded(1), SimConfig { sms: 7, ..SimConfig::seeded(2) }];
    let simulated = orders.into_iter().filter(|_| !gpu_only()).map(Device::simulated);
    simulated.chain(cuda()).collect()
}

/// The spec of a layer over a step's caches.
pub fn layer_of(step: &DecodeStep) -> LayerSpec {
    LayerSpec {
        topk: step.topk,
        context_len_max: step.context_len_max,
        scale_form: step.scale_form,
        index_page: PAGE,
        index_blocks: step.blocks,
        index_page_stride: step.page_stride,
        kv_page: step.kv_page,
        kv_block_rows: step.kv_block_rows,
        kv_blocks: (i32::MAX as usize / step.kv_block_rows).min(1 << 20),
    }
}

/// A scratch for steps like this one.
pub fn scratch_of(step: &DecodeStep) -> ScratchSpec {
    ScratchSpec { rows_max: step.rows, length_max: step.context_len_max, topk: step.topk, ids: true }
}

/// A layer and its step's inputs on a device.
pub struct Layer {
    pub stream: Stream,
    pub indexer: FusedIndexer,
    pub shape: StepShape,
    pub inputs: Inputs,
}

/// A step's tensors.
pub struct Inputs {
    pub queries: Buffer<u8>,
    pub weights: Buffer<u16>,
    pub cache: Buffer<u8>,
    pub table: Buffer<i32>,
    pub row_ends: Buffer<i32>,
    pub kv_table: Buffer<i32>,
    strides: [usize; 4],
}

impl Inputs {
    pub fn upload(device: &Device, step: &DecodeStep) -> Self {
        Inputs {
            queries: device.upload(&step.queries).unwrap(),
            weights: device.upload(&step.weights).unwrap(),
            cache: device.upload(&step.cache).unwrap(),
            table: device.upload(&step.table).unwrap(),
            row_ends: device.upload(&step.row_ends).unwrap(),
            kv_table: device.upload(&step.kv_table).unwrap(),
            strides: [step.table_stride, step.table_width, step.kv_table_stride, step.kv_table_width],
        }
    }

    pub fn step(&self, shape: StepShape) -> Step<'_> {
        let [stride, width, kv_stride, kv_width] = self.strides;
        Step {
            shape,
            queries: self.queries.as_view(),
            weights: self.weights.as_view(),
            row_ends: self.row_ends.as_view(),
            index_table: StepTable::per_request(self.table.as_view(), stride, width),
            kv_table: StepTable::per_request(self.kv_table.as_view(), kv_stride, kv_width),
        }
    }
}

impl Layer {
    /// A layer alone on its device.
    pub fn new(device: &Device, step: &DecodeStep) -> Self {
        let scratch = IndexerScratch::reserve(device, scratch_of(step)).unwrap();
        Self::sharing(&scratch, step, &device.stream().unwrap())
    }

    /// A layer that shares the scratch of others.
    pub fn sharing(scratch: &Arc<IndexerScratch>, step: &DecodeStep, stream: &Stream) -> Self {
        let shape = StepShape { rows: step.rows, q: step.q };
        Self::planned(scratch, step, stream, &[shape], &[]).unwrap()
    }

    /// As [`Layer::sharing`], for other shapes.
    pub fn planned(
        scratch: &Arc<IndexerScratch>,
        step: &DecodeStep,
        stream: &Stream,
        shapes: &[StepShape],
        hold: &[StepShape],
    ) -> Result<Self, Error> {
        let inputs = Inputs::upload(scratch.device(), step);
        let indexer = FusedIndexer::new(IndexerConfig {
            scratch,
            layer: layer_of(step),
            keys: inputs.cache.as_view(),
            shapes,
            hold,
            ids: true,
        })?;
        Ok(Layer { stream: stream.clone(), indexer, shape: shapes[0], inputs })
    }

    /// Runs the step as it was uploaded.
    pub fn run(&self) -> Selected<'_> {
        self.indexer.run(&self.stream, &self.inputs.step(self.shape)).unwrap()
    }

    /// The outputs on the host.
    pub fn read(&self, selected: &Selected<'_>) -> Outputs {
        Outputs {
            rows: selected.rows.copy_to_vec(&self.stream).unwrap(),
            counts: selected.counts.copy_to_vec(&self.stream).unwrap(),
            ids: selected.ids.as_ref().unwrap().copy_to_vec(&self.stream).unwrap(),
        }
    }

    /// Fills the outputs and the scratch with garbage.
    pub fn poison(&self, selected: &Selected<'_>) {
        let scratch = self.indexer.scratch();
        scratch.logits().fill_bytes(&self.stream, 0xA5).unwrap();
        scratch.tops().fill_bytes(&self.stream, 0xFF).unwrap();
        for output in [&selected.rows, &selected.counts, selected.ids.as_ref().unwrap()] {
            output.fill_bytes(&self.stream, 0x5A).unwrap();
        }
    }
}

/// A step's outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outputs {
    pub rows: Vec<i32>,
    pub counts: Vec<i32>,
    pub ids: Vec<i32>,
}

impl Outputs {
    /// Checks the first rows against the oracle, and that the others are empty.
    #[track_caller]
    pub fn expect(&self, what: &str, step: &DecodeStep) {
        let want = oracle(step);
        let slots = step.rows * step.topk;
        check_selection(&want, step.topk, &self.rows[..slots], &self.counts[..step.rows], Some(&self.ids[..slots]))
            .unwrap_or_else(|mismatch| panic!("{what}: {mismatch}"));
        assert!(self.counts[step.rows..].iter().all(|&count| count == 0), "{what}: counts past the live rows");
        let past = self.rows[slots..].iter().chain(&self.ids[slots..]);
        assert!(past.copied().all(|slot| slot == -1), "{what}: slots past the live rows");
    }
}

/// The oracle's answer with the dot products of the only target so far.
pub fn oracle(step: &DecodeStep) -> Vec<Selection> {
    step.validate().unwrap();
    let dot = device_dot(ptx::Target::Sm90a).unwrap();
    step::select(step, &step::logits(step, dot)).unwrap()
}

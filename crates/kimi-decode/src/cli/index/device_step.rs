//! A step file on a device.

use std::time::{Duration, Instant};

use dsa_core::consts::PAGE;
use dsa_core::layout::fp8_page;
use dsa_core::layout::pitched_scratch::PitchedScratch;
use dsa_core::layout::tp_scratch::TpScratch;
use dsa_core::{DecodeStep, IndexCacheShape};
use dsa_kernels::Table;
use dsa_kernels::score::{IndexerScore, KeyCache, ScoreForm, ScoreOutput, ScoreShape, ScoreStep};
use gpu::{Buffer, Device, Graph, Stream, View};
use kimi_decode::check::Answer;
use kimi_decode::step_file::StepFile;
use kimi_decode::{
    Error, FusedIndexer, IndexerConfig, IndexerScratch, LayerSpec, ScratchSpec, Step, StepShape, StepTable,
};

use crate::cli::Failure;

/// What the step's two kernels took.
#[derive(Debug, Clone, Copy)]
pub enum StepTime {
    /// On the device, the median of graph replays.
    Device(Duration),
    /// The simulator's own time, which says nothing about a GPU.
    Simulator(Duration),
}

impl std::fmt::Display for StepTime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StepTime::Device(time) => write!(f, "{:.1} us", time.as_secs_f64() * 1e6),
            StepTime::Simulator(time) => write!(f, "{:.2} s simulating", time.as_secs_f64()),
        }
    }
}

/// The step's tensors on the device.
pub struct Inputs {
    queries: Buffer<u8>,
    weights: Buffer<u16>,
    cache: Buffer<u8>,
    table: Buffer<i32>,
    row_ends: Buffer<i32>,
    kv_table: Buffer<i32>,
}

impl Inputs {
    /// Uploads a step.
    pub fn upload(device: &Device, step: &DecodeStep) -> Result<Self, gpu::Error> {
        // A cache has a page even if the step has no keys.
        let empty = [0; fp8_page::BYTES];
        let cache: &[u8] = if step.blocks == 0 { &empty } else { &step.cache };
        Ok(Inputs {
            queries: device.upload(&step.queries)?,
            weights: device.upload(&step.weights)?,
            cache: device.upload(cache)?,
            table: device.upload(&step.table)?,
            row_ends: device.upload(&step.row_ends)?,
            kv_table: device.upload(&step.kv_table)?,
        })
    }

    /// E4M3 `[rows, 32, 128]`.
    pub fn queries(&self) -> &Buffer<u8> {
        &self.queries
    }

    /// The indexer cache.
    pub fn keys(&self) -> View<'_, u8> {
        self.cache.as_view()
    }

    /// The step.
    pub fn step(&self, step: &DecodeStep) -> Step<'_> {
        Step {
            shape: shape_of(step),
            queries: self.queries.as_view(),
            weights: self.weights.as_view(),
            row_ends: self.row_ends.as_view(),
            index_table: StepTable::per_request(self.table.as_view(), step.table_stride, step.table_width),
            kv_table: StepTable::per_request(self.kv_table.as_view(), step.kv_table_stride, step.kv_table_width),
        }
    }
}

/// The shape that a file's step is run with.
pub fn shape_of(step: &DecodeStep) -> StepShape {
    StepShape { rows: step.rows, q: step.q }
}

/// A scratch for a file's step.
pub fn scratch_of(step: &DecodeStep) -> ScratchSpec {
    ScratchSpec { rows_max: step.rows, length_max: step.context_len_max, topk: step.topk, ids: true }
}

/// The layer over a file's caches.
pub fn layer_of(file: &StepFile) -> LayerSpec {
    let step = &file.step;
    LayerSpec {
        topk: step.topk,
        context_len_max: step.context_len_max,
        scale_form: step.scale_form,
        index_page: PAGE,
        index_blocks: step.blocks.max(1),
        index_page_stride: step.page_stride,
        kv_page: step.kv_page,
        kv_block_rows: step.kv_block_rows,
        kv_blocks: file.kv.blocks(),
    }
}

/// Runs the step, and compares the two forms of its logits.
pub fn run(device: &Device, file: &StepFile, stage: impl Fn(&'static str)) -> Result<(Answer, StepTime), Failure> {
    let (answer, compact, time) = run_both_forms(device, file, stage)?;
    for (row, (compact, pitched)) in compact.iter().zip(&answer.logits).enumerate() {
        if let Some(key) = compact.iter().zip(pitched).position(|(a, b)| a != b) {
            let (a, b) = (compact[key], pitched[key]);
            return Err(Failure::Mismatch(format!(
                "row {row} key {key}: the compact score wrote {a:#06x}, the pitched one {b:#06x}"
            )));
        }
    }
    Ok((answer, time))
}

/// Runs the fused indexer, then scores every row once more in the pitched form, because the compact one leaves out
/// requests that need no scores. Also returns the compact logits, which select read, row by row; none for rows left out.
fn run_both_forms(
    device: &Device,
    file: &StepFile,
    stage: impl Fn(&'static str),
) -> Result<(Answer, Vec<Vec<u16>>, StepTime), Error> {
    let step = &file.step;
    stage("loading");
    let stream = device.stream()?;
    let inputs = Inputs::upload(device, step)?;
    let scratch = IndexerScratch::reserve(device, scratch_of(step))?;
    let indexer = FusedIndexer::new(IndexerConfig {
        scratch: &scratch,
        layer: layer_of(file),
        keys: inputs.keys(),
        shapes: &[shape_of(step)],
        hold: &[],
        ids: true,
    })?;
    let device_step = inputs.step(step);

    stage("score and select");
    let start = Instant::now();
    let selected = indexer.run(&stream, &device_step)?;
    stream.synchronize()?;
    let mut time = StepTime::Simulator(start.elapsed());
    if !device.info().simulated && step.rows > 0 {
        let graph = Graph::capture_with(&stream, |stream| indexer.run(stream, &device_step).map(drop))?;
        time = StepTime::Device(replay_time(&stream, &graph)?);
    }

    let ids = selected.ids.as_ref().expect("the indexer was built with ids");
    let mut answer = Answer {
        logits: Vec::new(),
        ids: ids.copy_to_vec(&stream)?,
        rows: selected.rows.copy_to_vec(&stream)?,
        counts: selected.counts.copy_to_vec(&stream)?,
    };
    stage("score every row");
    answer.logits = score_every_row(&stream, &inputs, step)?;
    let compact = compact_logits(&stream, &scratch, step)?;
    Ok((answer, compact, time))
}

/// The median of a few replays of a captured step. The inputs stay in the L2, as a short step's do in a real layer.
pub fn replay_time(stream: &Stream, graph: &Graph) -> Result<Duration, Error> {
    const REPLAYS: usize = 21;
    let (start, end) = (stream.device().event()?, stream.device().event()?);
    let mut times = Vec::with_capacity(REPLAYS);
    for _ in 0..REPLAYS {
        start.record(stream)?;
        graph.launch(stream)?;
        end.record(stream)?;
        end.synchronize()?;
        times.push(start.elapsed_ms(&end)?.unwrap_or(0.0));
    }
    times.sort_by(f32::total_cmp);
    Ok(Duration::from_secs_f32(times[REPLAYS / 2] / 1e3))
}

/// The logits of every row, each as long as the row.
pub fn score_every_row(stream: &Stream, inputs: &Inputs, step: &DecodeStep) -> Result<Vec<Vec<u16>>, Error> {
    let device = stream.device();
    if step.rows == 0 {
        return Ok(Vec::new());
    }
    let scratch = PitchedScratch::new(step.rows, step.context_len_max);
    let logits = device.alloc::<u16>(scratch.logits_len())?;
    let shape = ScoreShape::new(step.q, ScoreForm::Pitched, step.scale_form)?;
    let cache = IndexCacheShape::new(step.blocks.max(1), fp8_page::BYTES, step.page_stride)?;
    let cache = KeyCache::new(device, &inputs.cache.as_view(), cache)?;
    IndexerScore::new(device, shape)?.launch(
        stream,
        &ScoreStep {
            queries: inputs.queries.as_view(),
            weights: inputs.weights.as_view(),
            cache: &cache,
            table: Table { ids: inputs.table.as_view(), stride: step.table_stride, width: step.table_width },
            row_ends: inputs.row_ends.as_view(),
            length_max: step.len_max(),
        },
        &ScoreOutput::Pitched { logits: logits.as_view(), tops: None, pitch: scratch.pitch() },
    )?;
    let row = |row: usize| {
        let start = scratch.row_start(row);
        Ok(logits.view(start..start + step.row_len(row))?.copy_to_vec(stream)?)
    };
    (0..step.rows).map(row).collect()
}

/// The compact logits of the rows that have some.
fn compact_logits(stream: &Stream, scratch: &IndexerScratch, step: &DecodeStep) -> Result<Vec<Vec<u16>>, Error> {
    let plan = TpScratch::plan(&step.row_ends, step.q, step.topk, step.len_max())?;
    let row = |row: usize| match plan.row_start(row) {
        Some(start) => Ok(scratch.logits().view(start..start + step.row_len(row))?.copy_to_vec(stream)?),
        None => Ok(Vec::new()),
    };
    (0..step.rows).map(row).collect()
}

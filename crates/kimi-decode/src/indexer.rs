//! The fused indexer of one layer.

mod sharded;

pub use sharded::{DcpIndexerConfig, Packed, Sharded};

use std::sync::Arc;

use dsa_core::KvShape;
use dsa_kernels::score::{IndexerScore, KeyCache, ScoreOutput, ScoreStep};
use dsa_kernels::select::{IndexerSelect, SelectStep};
use gpu::{Device, Stream, View};

use crate::error::Error;
use crate::layer::{self, LayerSpec, StepShape, Unsupported};
use crate::scratch::{IndexerScratch, ScratchSpec};
use crate::step::{Checked, Step, expect_device};

/// What a layer's indexer is built from.
#[derive(Debug, Clone)]
pub struct IndexerConfig<'a> {
    /// The device's scratch, shared by its layers.
    pub scratch: &'a Arc<IndexerScratch>,
    /// The layer's sizes.
    pub layer: LayerSpec,
    /// The layer's indexer cache. It must stay in place for as long as steps run.
    pub keys: View<'a, u8>,
    /// Every shape that will be run; all of it is compiled here.
    pub shapes: &'a [StepShape],
    /// Those of `shapes` whose select must not let its successor start early, because that reads the rows without
    /// waiting for them.
    pub hold: &'a [StepShape],
    /// Also write the selected key indices.
    pub ids: bool,
}

/// The outputs of a step, in the scratch: valid until the next step of any layer that shares it.
#[derive(Debug, Clone)]
pub struct Selected<'a> {
    /// int32 `[rows, topk]`: physical rows of the MLA cache in ascending key order, -1 past the count.
    pub rows: View<'a, i32>,
    /// int32 `[rows]`: min(keys that the row sees, top-k); 0 for the rows past the live ones.
    pub counts: View<'a, i32>,
    /// int32 `[rows, topk]`: the selected key indices, ascending, -1 past the count. If the indexer writes them.
    pub ids: Option<View<'a, i32>>,
}

/// A shape and its kernels.
struct Plan {
    shape: StepShape,
    score: IndexerScore,
    select: IndexerSelect,
}

/// The indexer of one layer: score and select of [whole](Whole) contexts, or, with a [part](Sharded) of each on every
/// rank, score, local top-k, exchange and merge.
pub struct FusedIndexer<F = Whole> {
    layer: LayerSpec,
    keys: KeyCache,
    kv: KvShape,
    ids: bool,
    form: F,
}

/// Contexts lie on one device.
pub struct Whole {
    scratch: Arc<IndexerScratch>,
    plans: Vec<Plan>,
}

impl std::fmt::Debug for FusedIndexer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FusedIndexer({:?} over {:?})", self.layer, self.form.scratch)
    }
}

impl<F> FusedIndexer<F> {
    /// The layer's sizes.
    pub fn layer(&self) -> &LayerSpec {
        &self.layer
    }
}

impl FusedIndexer {
    /// Whether steps of `shape` of a layer can run on `device` over such a scratch. Needs no cache and allocates nothing,
    /// so an engine can ask while it plans.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn supports(
        device: &Device,
        scratch: &ScratchSpec,
        layer: &LayerSpec,
        shape: StepShape,
    ) -> Result<(), Unsupported> {
        layer::supports(device, scratch, layer, shape)
    }

    /// Checks the configuration and compiles its kernels, as far as no other layer has.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for the first shape that cannot be served, [`Error::NotPlanned`] for a `hold` that is no
    /// shape, a cache that is too short, misaligned or of another device, or a device that refuses a kernel.
    pub fn new(config: IndexerConfig<'_>) -> Result<Self, Error> {
        let IndexerConfig { scratch, layer, keys, shapes, hold, ids } = config;
        let device = scratch.device();
        for &shape in shapes {
            layer::supports(device, scratch.spec(), &layer, shape)?;
        }
        if let Some(&shape) = hold.iter().find(|shape| !shapes.contains(shape)) {
            return Err(Error::NotPlanned { shape });
        }
        if ids && scratch.ids.is_none() {
            return Err(Unsupported::ScratchIds.into());
        }
        expect_device(device, "indexer cache", keys.device())?;
        let cache = layer.index_cache()?;
        let kv = layer.kv()?;
        let keys = KeyCache::new(device, &keys, cache)?;
        let mut plans: Vec<Plan> = Vec::with_capacity(shapes.len());
        for &shape in shapes {
            if plans.iter().any(|plan| plan.shape == shape) {
                continue;
            }
            // Score depends on q, not on the rows; select on the CTAs that so many rows leave for each, not on q.
            let select = layer.select_shape()?.with_ids(ids).with_hold(hold.contains(&shape));
            let select = select.for_launch(shape.rows, layer.row_len_max(), device.info().sms);
            plans.push(Plan {
                shape,
                score: scratch.kernels.score(device, layer.score_shape(shape)?)?,
                select: scratch.kernels.select(device, select)?,
            });
        }
        Ok(FusedIndexer { layer, keys, kv, ids, form: Whole { scratch: scratch.clone(), plans } })
    }

    /// The scratch that holds the outputs.
    pub fn scratch(&self) -> &Arc<IndexerScratch> {
        &self.form.scratch
    }

    /// Scores and selects a step: two launches on `stream`, each overlapping its predecessor as far as dependent launches
    /// allow. Allocates nothing and waits for nothing, so it can be captured; replays see the row ends, tables, queries,
    /// weights and keys of their own time. A step of no rows launches nothing.
    ///
    /// Rows longer than the tables or the scratch allow are clamped on the device, negative ends count as 0.
    ///
    /// # Errors
    /// A shape that was not planned, or sizes that disagree, before anything is launched; what the device refuses.
    pub fn run(&self, stream: &Stream, step: &Step<'_>) -> Result<Selected<'_>, Error> {
        let StepShape { rows, q } = step.shape;
        let selected = self.outputs(rows)?;
        if rows == 0 {
            return Ok(selected);
        }
        let (plan, checked) = self.check(stream, step)?;
        plan.score.launch(
            stream,
            &ScoreStep {
                queries: step.queries.clone(),
                weights: step.weights.clone(),
                cache: &self.keys,
                table: checked.index_table,
                row_ends: step.row_ends.clone(),
                length_max: checked.length_max,
            },
            &ScoreOutput::Compact { logits: self.form.scratch.logits(), tops: self.form.scratch.tops() },
        )?;
        plan.select.launch(
            stream,
            &SelectStep {
                logits: self.form.scratch.logits(),
                tops: self.form.scratch.tops(),
                table: checked.kv_table,
                kv: self.kv,
                row_ends: step.row_ends.clone(),
                q,
                length_max: checked.length_max,
                out: selected.rows.clone(),
                counts: selected.counts.clone(),
                ids: selected.ids.clone(),
            },
        )?;
        Ok(selected)
    }

    /// What runs a step of some rows, once that is sure to fit.
    fn check<'a>(&self, stream: &Stream, step: &Step<'a>) -> Result<(&Plan, Checked<'a>), Error> {
        let scratch = &self.form.scratch;
        let plan = self.form.plans.iter().find(|plan| plan.shape == step.shape);
        let plan = plan.ok_or(Error::NotPlanned { shape: step.shape })?;
        expect_device(scratch.device(), "stream", stream.device())?;
        Ok((plan, step.check(scratch.device(), self.kv.page(), scratch.spec().length_max)?))
    }

    /// Whether [`run`](FusedIndexer::run) takes a step, for a caller that launches other things first.
    ///
    /// # Errors
    /// As [`run`](FusedIndexer::run), before anything is launched.
    pub fn check_step(&self, stream: &Stream, step: &Step<'_>) -> Result<(), Error> {
        self.outputs(step.shape.rows)?;
        if step.shape.rows > 0 {
            self.check(stream, step)?;
        }
        Ok(())
    }

    /// The first `rows` rows of the scratch's outputs.
    fn outputs(&self, rows: usize) -> Result<Selected<'_>, Error> {
        let rows_max = self.form.scratch.spec().rows_max;
        if rows > rows_max {
            return Err(Unsupported::ScratchRows { rows, rows_max }.into());
        }
        let slots = rows * self.layer.topk;
        let ids = self.form.scratch.ids.as_ref().filter(|_| self.ids);
        Ok(Selected {
            rows: self.form.scratch.rows.view(..slots)?,
            counts: self.form.scratch.counts.view(..rows)?,
            ids: ids.map(|ids| ids.view(..slots)).transpose()?,
        })
    }
}

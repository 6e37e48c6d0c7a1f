//! The indexer of a layer whose contexts are spread over ranks.

use std::sync::Arc;

use dsa_dcp::gathered::{GatheredStep, GatheredTopk};
use dsa_dcp::{ExchangeMerge, MergeShape, MergeStep, Rounds, recommended_local_topk};
use dsa_kernels::local_topk::{IndexerLocalTopk, LocalTopkShape, LocalTopkStep};
use dsa_kernels::score::{IndexerScore, KeyCache, ScoreOutput, ScoreStep};
use gpu::{Device, Stream, View};

use super::{FusedIndexer, Selected};
use crate::dcp::{DcpScratch, DcpSpec, Transport};
use crate::error::Error;
use crate::layer::{LayerSpec, StepShape, Unsupported, check_layer};
use crate::step::{Checked, Step, expect_device};

/// What a sharded layer's indexer is built from.
#[derive(Debug, Clone)]
pub struct DcpIndexerConfig<'a> {
    /// The rank's scratch, shared by its layers.
    pub scratch: &'a Arc<DcpScratch>,
    /// The layer's sizes: its context over all ranks, its caches on this one.
    pub layer: LayerSpec,
    /// The layer's indexer cache on this rank: its tokens in order of their local indices. It must stay in place for as long
    /// as steps run.
    pub keys: View<'a, u8>,
    /// Keys that each rank sends of a row, a multiple of 128 below the top-k; if not given, as many as
    /// [`recommended_local_topk`] says. Equal on every rank.
    pub local_topk: Option<usize>,
    /// Every shape that will be run; all of it is compiled here.
    pub shapes: &'a [StepShape],
    /// Those of `shapes` whose merge must not let its successor start early, because that reads the rows without waiting
    /// for them.
    pub hold: &'a [StepShape],
    /// Also write the selected global ids.
    pub ids: bool,
}

/// This rank's candidates of a step, in the scratch: valid until the next step of any layer that shares it.
#[derive(Debug, Clone)]
pub struct Packed<'a> {
    /// u32 `[rows, n + n / 32]`: the first N keys of each row as B' rows
    /// ([`b_row`](dsa_core::layout::b_row)).
    pub b_rows: View<'a, u32>,
    /// int32 `[rows]`: keys in each; 0 for the rows past the live ones.
    pub counts: View<'a, i32>,
    /// BF16 `[rows_max, pitch]`: this rank's logits, to be read again for more of a row.
    pub logits: View<'a, u16>,
    /// order16 of the largest of every 8 logits.
    pub tops: View<'a, u16>,
    /// Elements from one row of logits to the next.
    pub pitch: usize,
}

/// A part of every context lies on each rank.
pub struct Sharded {
    scratch: Arc<DcpScratch>,
    local_topk: usize,
    rounds: Rounds,
    plans: Vec<Plan>,
}

/// A shape and its kernels.
struct Plan {
    shape: StepShape,
    score: IndexerScore,
    pack: IndexerLocalTopk,
    /// Or why there is none.
    path: Result<Path, String>,
}

/// How the shape's candidates are exchanged.
enum Path {
    /// Without a local top-k if merges select by themselves.
    Push {
        topk: Option<IndexerLocalTopk>,
        merge: ExchangeMerge,
    },
    Gather {
        topk: GatheredTopk,
        merge: ExchangeMerge,
    },
}

impl std::fmt::Debug for FusedIndexer<Sharded> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "FusedIndexer({:?}, top-{} of each rank, over {:?})",
            self.layer, self.form.local_topk, self.form.scratch
        )
    }
}

impl FusedIndexer<Sharded> {
    /// Whether steps of `shape` of a layer can run over `ranks` ranks with such a scratch. Needs no cache, allocates nothing
    /// and asks no other rank. Whether ranks reach each other shows when the indexer is built:
    /// [`exchanges`](FusedIndexer::exchanges).
    ///
    /// # Errors
    /// The first reason why not.
    pub fn supports_sharded(
        device: &Device,
        scratch: &DcpSpec,
        ranks: usize,
        layer: &LayerSpec,
        local_topk: Option<usize>,
        shape: StepShape,
    ) -> Result<(), Error> {
        check_layer(device, layer, shape)?;
        if shape.rows > scratch.rows_max {
            return Err(Unsupported::ScratchRows { rows: shape.rows, rows_max: scratch.rows_max }.into());
        }
        if (layer.topk, layer.context_len_max) != (scratch.topk, scratch.context_len_max) {
            let (topk, context_len_max) = (layer.topk, layer.context_len_max);
            let (of_topk, of_context_len_max) = (scratch.topk, scratch.context_len_max);
            return Err(Unsupported::ScratchShared { topk, context_len_max, of_topk, of_context_len_max }.into());
        }
        layer.pitched_score_shape(shape)?;
        let own = scratch.validate(ranks)?;
        let (topk, context) = (scratch.topk, scratch.context_len_max);
        let local_topk = chosen(local_topk, ranks, topk)?;
        let exchange = dsa_dcp::ExchangeShape::new(own, shape.rows.max(1), local_topk, topk, context)?;
        MergeShape::new(exchange, shape.q, layer.kv_page)?;
        Ok(())
    }

    /// Checks the configuration, compiles its kernels as far as no other layer has, and sets up the exchanges that its
    /// shapes need. Collective: every rank builds its layers in the same order, with the same shapes; no stream uses the
    /// scratch meanwhile.
    ///
    /// # Errors
    /// As [`FusedIndexer::supports_sharded`]; [`Error::NotPlanned`] for a `hold` that is no shape; a cache that is too short,
    /// misaligned or of another device; [`DcpError::Captured`](dsa_dcp::DcpError::Captured) if an exchange had to grow that a
    /// graph has captured; ranks that do not come or disagree; what the device refuses.
    pub fn sharded(config: DcpIndexerConfig<'_>) -> Result<Self, Error> {
        let DcpIndexerConfig { scratch, layer, keys, local_topk, shapes, hold, ids } = config;
        let (device, kernels) = (scratch.device(), &scratch.kernels);
        for &shape in shapes {
            let ranks = scratch.ownership().ranks();
            Self::supports_sharded(device, scratch.spec(), ranks, &layer, local_topk, shape)?;
        }
        if let Some(&shape) = hold.iter().find(|shape| !shapes.contains(shape)) {
            return Err(Error::NotPlanned { shape });
        }
        if ids && scratch.ids.is_none() {
            return Err(Unsupported::ScratchIds.into());
        }
        expect_device(device, "indexer cache", keys.device())?;
        let kv = layer.kv()?;
        let keys = KeyCache::new(device, &keys, layer.index_cache()?)?;
        let local_topk = chosen(local_topk, scratch.ownership().ranks(), layer.topk)?;
        set_up(scratch, local_topk, shapes)?;

        let one_row = scratch.shape(local_topk, 1)?;
        let rounds = one_row.rounds();
        let mut plans: Vec<Plan> = Vec::with_capacity(shapes.len());
        for &shape in shapes {
            if plans.iter().any(|plan| plan.shape == shape) {
                continue;
            }
            let merge =
                MergeShape::new(one_row, shape.q, layer.kv_page)?.with_ids(ids).with_hold(hold.contains(&shape));
            // Merges serve any rows, local top-k those for which it has as many CTAs each.
            let (length_max, sms) = (scratch.local_len_max(), device.info().sms);
            let local =
                |local: LocalTopkShape| kernels.local_topk(device, local.for_launch(shape.rows, length_max, sms));
            let pack = local(LocalTopkShape::new(local_topk, layer.topk)?)?;
            let path = match scratch.transport(shape.rows) {
                Ok(Transport::Push) => Ok(Path::Push {
                    topk: one_row.local_topk()?.map(local).transpose()?,
                    merge: kernels.merge(device, merge)?,
                }),
                Ok(Transport::Gather) => {
                    let full = local(LocalTopkShape::full(layer.topk)?)?;
                    let topk = GatheredTopk::from_kernels(pack.clone(), full);
                    Ok(Path::Gather { topk, merge: kernels.merge(device, merge.with_gathered(true))? })
                }
                Err(reason) => Err(reason),
            };
            plans.push(Plan { shape, score: kernels.score(device, layer.pitched_score_shape(shape)?)?, pack, path });
        }
        Ok(FusedIndexer { layer, keys, kv, ids, form: Sharded { scratch: scratch.clone(), local_topk, rounds, plans } })
    }

    /// The scratch that holds the outputs.
    pub fn scratch(&self) -> &Arc<DcpScratch> {
        &self.form.scratch
    }

    /// Keys that each rank sends of a row.
    pub fn local_topk(&self) -> usize {
        self.form.local_topk
    }

    /// How many rounds its rows take.
    pub fn rounds(&self) -> Rounds {
        self.form.rounds
    }

    /// Whether [`run_dcp`](FusedIndexer::run_dcp) serves steps of `shape`, and, if not, why: every planned shape, however
    /// many rows share a multiprocessor.
    ///
    /// # Errors
    /// [`Error::NotPlanned`].
    pub fn packs(&self, shape: StepShape) -> Result<(), Error> {
        self.plan(shape).map(|_| ())
    }

    /// How [`run_exchange`](FusedIndexer::run_exchange) serves steps of `shape`, or why it does not. The same on every rank.
    ///
    /// # Errors
    /// [`Error::NotPlanned`]; [`Unsupported::NoTransport`] for ranks that cannot map each other's memory, or more rows than
    /// are pushed, in a group without an all-gather.
    pub fn exchanges(&self, shape: StepShape) -> Result<Transport, Error> {
        match &self.plan(shape)?.path {
            Ok(Path::Push { .. }) => Ok(Transport::Push),
            Ok(Path::Gather { .. }) => Ok(Transport::Gather),
            Err(reason) => Err(Unsupported::NoTransport { rows: shape.rows, reason: reason.clone() }.into()),
        }
    }

    /// Scores this rank's keys and selects each row's first N: two launches, for an engine that exchanges and merges by
    /// itself. Not collective. [`Step::row_ends`] are this rank's, from [`DcpScratch::local_ends`]; both tables are this
    /// rank's, over local indices.
    ///
    /// # Errors
    /// As [`FusedIndexer::run`].
    pub fn run_dcp(&self, stream: &Stream, step: &Step<'_>) -> Result<Packed<'_>, Error> {
        let plan = self.plan(step.shape)?;
        let packed = self.packed(step.shape.rows)?;
        if step.shape.rows == 0 {
            return Ok(packed);
        }
        let checked = self.score(plan, stream, step)?;
        plan.pack.launch(stream, &self.local_step(&packed, step, checked.length_max))?;
        Ok(packed)
    }

    /// Scores this rank's keys, exchanges each row's first N keys with the other ranks, and merges: the selected ids are
    /// those of a single rank with the whole context, and the rows those of them that this rank owns. Collective: every rank
    /// runs the same shapes in the same order, its live rows included. Inputs as for [`run_dcp`](FusedIndexer::run_dcp).
    ///
    /// Allocates nothing, and, pushed, waits for nothing, so it can be captured: a rank that does not come shows in
    /// [`DcpScratch::check`]. What a gather does on the host is up to the group's
    /// [`AllGather`](dsa_dcp::AllGather).
    ///
    /// # Errors
    /// As [`FusedIndexer::run`] and [`exchanges`](FusedIndexer::exchanges).
    pub fn run_exchange(&self, stream: &Stream, step: &Step<'_>) -> Result<Selected<'_>, Error> {
        self.run_push(stream, step)?;
        self.run_merge(stream, step)
    }

    /// The first part of [`run_exchange`](FusedIndexer::run_exchange), up to the merge: for work to be put between, and for
    /// ranks that share a device, which must all have pushed before one may wait.
    ///
    /// # Errors
    /// As [`run_exchange`](FusedIndexer::run_exchange).
    pub fn run_push(&self, stream: &Stream, step: &Step<'_>) -> Result<(), Error> {
        let (plan, rows) = (self.plan(step.shape)?, step.shape.rows);
        let path = self.path(plan)?;
        if rows == 0 {
            return Ok(());
        }
        let packed = self.packed(rows)?;
        let checked = self.score(plan, stream, step)?;
        let local = self.local_step(&packed, step, checked.length_max);
        match path {
            Path::Push { topk, .. } => {
                if let Some(topk) = topk {
                    let exchange = self.form.scratch.pushed(self.form.local_topk).expect("set up with the plan");
                    topk.launch(stream, &LocalTopkStep { push: exchange.push(), ..local })?;
                }
            }
            Path::Gather { topk, .. } => {
                let exchange = self.form.scratch.gathered(self.form.local_topk).expect("set up with the plan");
                let LocalTopkStep { logits, tops, pitch, row_ends, length_max, counts, .. } = local;
                exchange.launch(stream, topk, &GatheredStep { logits, tops, pitch, row_ends, length_max, counts })?;
            }
        }
        Ok(())
    }

    /// The second part of [`run_exchange`](FusedIndexer::run_exchange): the merge, of the same step.
    ///
    /// # Errors
    /// As [`run_exchange`](FusedIndexer::run_exchange).
    pub fn run_merge(&self, stream: &Stream, step: &Step<'_>) -> Result<Selected<'_>, Error> {
        let (plan, rows) = (self.plan(step.shape)?, step.shape.rows);
        let path = self.path(plan)?;
        let selected = self.selected(rows)?;
        if rows == 0 {
            return Ok(selected);
        }
        let checked = self.check_step(stream, step)?;
        let scratch = &self.form.scratch;
        let merge_step = MergeStep {
            logits: scratch.logits.as_view(),
            tops: scratch.tops.as_view(),
            pitch: scratch.pitch(),
            row_ends: step.row_ends.clone(),
            length_max: checked.length_max,
            table: checked.kv_table,
            kv: self.kv,
            rows_out: selected.rows.clone(),
            valid_out: selected.counts.clone(),
            ids: selected.ids.clone(),
        };
        match path {
            Path::Push { merge, .. } => {
                let exchange = scratch.pushed(self.form.local_topk).expect("set up with the plan");
                merge.launch(stream, &exchange, &merge_step)?;
            }
            Path::Gather { merge, .. } => {
                let exchange = scratch.gathered(self.form.local_topk).expect("set up with the plan");
                merge.launch_gathered(stream, &exchange, &merge_step)?;
            }
        }
        Ok(selected)
    }

    fn plan(&self, shape: StepShape) -> Result<&Plan, Error> {
        self.form.plans.iter().find(|plan| plan.shape == shape).ok_or(Error::NotPlanned { shape })
    }

    fn path<'a>(&self, plan: &'a Plan) -> Result<&'a Path, Error> {
        let refused =
            |reason: &String| Unsupported::NoTransport { rows: plan.shape.rows, reason: reason.clone() }.into();
        plan.path.as_ref().map_err(refused)
    }

    fn check_step<'a>(&self, stream: &Stream, step: &Step<'a>) -> Result<Checked<'a>, Error> {
        let scratch = &self.form.scratch;
        expect_device(scratch.device(), "stream", stream.device())?;
        step.check(scratch.device(), self.kv.page(), scratch.local_len_max())
    }

    /// Scores into the scratch.
    fn score<'a>(&self, plan: &Plan, stream: &Stream, step: &Step<'a>) -> Result<Checked<'a>, Error> {
        let checked = self.check_step(stream, step)?;
        let scratch = &self.form.scratch;
        plan.score.launch(
            stream,
            &ScoreStep {
                queries: step.queries.clone(),
                weights: step.weights.clone(),
                cache: &self.keys,
                table: checked.index_table.clone(),
                row_ends: step.row_ends.clone(),
                length_max: checked.length_max,
            },
            &ScoreOutput::Pitched {
                logits: scratch.logits.as_view(),
                tops: Some(scratch.tops.as_view()),
                pitch: scratch.pitch(),
            },
        )?;
        Ok(checked)
    }

    fn local_step<'a>(&self, packed: &Packed<'a>, step: &Step<'a>, length_max: usize) -> LocalTopkStep<'a> {
        LocalTopkStep {
            logits: packed.logits.clone(),
            tops: packed.tops.clone(),
            pitch: packed.pitch,
            row_ends: step.row_ends.clone(),
            length_max,
            out: packed.b_rows.clone(),
            counts: packed.counts.clone(),
            push: None,
        }
    }

    /// The candidates of `rows` rows in the scratch.
    fn packed(&self, rows: usize) -> Result<Packed<'_>, Error> {
        let scratch = &self.form.scratch;
        let words = dsa_core::layout::b_row::BRow::new(self.form.local_topk).words();
        Ok(Packed {
            b_rows: scratch.b_rows.view(..rows * words)?,
            counts: scratch.b_counts.view(..rows)?,
            logits: scratch.logits.as_view(),
            tops: scratch.tops.as_view(),
            pitch: scratch.pitch(),
        })
    }

    /// The outputs of `rows` rows in the scratch, as [`run_exchange`](FusedIndexer::run_exchange) returns them.
    ///
    /// # Errors
    /// More rows than the scratch holds.
    pub fn selected(&self, rows: usize) -> Result<Selected<'_>, Error> {
        let scratch = &self.form.scratch;
        let rows_max = scratch.spec().rows_max;
        if rows > rows_max {
            return Err(Unsupported::ScratchRows { rows, rows_max }.into());
        }
        let slots = rows * self.layer.topk;
        let ids = scratch.ids.as_ref().filter(|_| self.ids);
        Ok(Selected {
            rows: scratch.rows.view(..slots)?,
            counts: scratch.counts.view(..rows)?,
            ids: ids.map(|ids| ids.view(..slots)).transpose()?,
        })
    }
}

/// The local top-N asked for, or the one to choose.
fn chosen(local_topk: Option<usize>, ranks: usize, topk: usize) -> Result<usize, dsa_core::ShapeError> {
    local_topk.map_or_else(|| recommended_local_topk(ranks, topk), Ok)
}

/// Sets up what the shapes need, in an order that is the same on every rank.
fn set_up(scratch: &DcpScratch, local_topk: usize, shapes: &[StepShape]) -> Result<(), Error> {
    let most = |scratch: &DcpScratch, wanted: Transport| {
        let rows = shapes.iter().map(|shape| shape.rows).filter(|&rows| rows > 0);
        rows.filter(|&rows| scratch.transport(rows) == Ok(wanted)).max()
    };
    if let Some(rows) = most(scratch, Transport::Push) {
        // If ranks cannot map each other's memory, all shapes have another transport from here on, or none.
        let _mapped: bool = scratch.set_up_push(local_topk, rows)?;
    }
    if let (Some(rows), Some(gather)) = (most(scratch, Transport::Gather), &scratch.group.gather) {
        scratch.set_up_gather(local_topk, rows, gather)?;
    }
    Ok(())
}

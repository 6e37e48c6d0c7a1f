//! One rank of a spread step.

use std::sync::Arc;
use std::time::Duration;

use dsa_core::DecodeStep;
use dsa_dcp::rendezvous::InProcess;
use dsa_dcp::{AllGather, Limits, Rounds};
use gpu::{Buffer, Device, Graph, Stream, View};
use kimi_decode::step_file::StepFile;
use kimi_decode::{
    DcpGroup, DcpIndexerConfig, DcpScratch, DcpSpec, FusedIndexer, LayerSpec, Sharded, Step, StepShape, Transport,
};

use super::Sharding;
use crate::cli::Failure;
use crate::cli::index::device_step::{Inputs, layer_of, shape_of};

/// A rank, its part of the step, and its indexer.
pub struct Rank {
    stream: Stream,
    /// Its part.
    shard: DecodeStep,
    inputs: Inputs,
    global_ends: Buffer<i32>,
    scratch: Arc<DcpScratch>,
    indexer: FusedIndexer<Sharded>,
}

impl Rank {
    /// Sets a rank up. Collective.
    pub fn new(device: &Device, member: Arc<InProcess>, file: &StepFile, sharding: Sharding) -> Result<Self, Failure> {
        let (step, rank) = (&file.step, dsa_dcp::Rendezvous::rank(&*member));
        let shard = step.shard(sharding.own, rank).map_err(Failure::unusable)?;
        let spec = DcpSpec {
            rows_max: step.rows,
            push_rows_max: step.rows,
            interleave: sharding.own.interleave(),
            context_len_max: step.context_len_max,
            topk: step.topk,
            ids: true,
        };
        let group = DcpGroup {
            group: member.clone(),
            gather: Some(member as Arc<dyn AllGather>),
            limits: Limits::default(),
            transport: sharding.transport,
        };
        let scratch = DcpScratch::reserve(device, group, spec)?;
        let inputs = Inputs::upload(device, &shard).map_err(Failure::unusable)?;
        let indexer = FusedIndexer::sharded(DcpIndexerConfig {
            scratch: &scratch,
            layer: LayerSpec {
                index_blocks: shard.blocks.max(1),
                index_page_stride: shard.page_stride,
                ..layer_of(file)
            },
            keys: inputs.keys(),
            local_topk: Some(sharding.local_topk),
            shapes: &[shape_of(step)],
            hold: &[],
            ids: true,
        })?;
        Ok(Rank {
            stream: device.stream().map_err(Failure::unusable)?,
            global_ends: device.upload(&step.row_ends).map_err(Failure::unusable)?,
            shard,
            inputs,
            scratch,
            indexer,
        })
    }

    fn shape(&self) -> StepShape {
        shape_of(&self.shard)
    }

    /// How candidates get from rank to rank.
    pub fn transport(&self) -> Result<Transport, Failure> {
        Ok(self.indexer.exchanges(self.shape())?)
    }

    /// How many rounds its rows take.
    pub fn rounds(&self) -> Rounds {
        self.indexer.rounds()
    }

    /// The step, its ends from the global ones.
    fn step(&self) -> Result<Step<'_>, Failure> {
        let row_ends = self.scratch.local_ends(&self.stream, &self.global_ends.as_view())?;
        Ok(Step { row_ends, ..self.inputs.step(&self.shard) })
    }

    /// Up to the merge.
    pub fn push(&self) -> Result<(), Failure> {
        Ok(self.indexer.run_push(&self.stream, &self.step()?)?)
    }

    /// The merge.
    pub fn merge(&self) -> Result<(), Failure> {
        Ok(self.indexer.run_merge(&self.stream, &self.step()?).map(drop)?)
    }

    /// Waits, and says whether the other ranks came.
    pub fn check(&self) -> Result<(), Failure> {
        Ok(self.scratch.check(&self.stream)?)
    }

    /// This rank's logits, row by row.
    pub fn logits(&self) -> Result<Vec<Vec<u16>>, Failure> {
        let (all, pitch) = (self.scratch.logits(), self.scratch.pitch());
        let row = |row: usize| {
            let view = all.view(row * pitch..row * pitch + self.shard.row_len(row))?;
            view.copy_to_vec(&self.stream)
        };
        (0..self.shard.rows).map(row).collect::<Result<_, gpu::Error>>().map_err(Failure::unusable)
    }

    /// Ids, rows and counts.
    pub fn outputs(&self) -> Result<[Vec<i32>; 3], Failure> {
        let selected = self.indexer.selected(self.shard.rows)?;
        let read = |output: &View<'_, i32>| output.copy_to_vec(&self.stream).map_err(Failure::unusable);
        let ids = selected.ids.as_ref().expect("the indexer was built with ids");
        Ok([read(ids)?, read(&selected.rows)?, read(&selected.counts)?])
    }

    /// The step as a graph, between what `first` and `last` enqueue.
    pub fn capture(
        &self,
        first: impl FnOnce(&Stream) -> Result<(), Failure>,
        last: impl FnOnce(&Stream) -> Result<(), Failure>,
    ) -> Result<Graph, Failure> {
        let step = self.step()?;
        Graph::capture_with(&self.stream, |stream| {
            first(stream)?;
            self.indexer.run_exchange(stream, &step)?;
            last(stream)
        })
    }

    /// Launches a graph on the rank's stream.
    pub fn replay(&self, graph: &Graph) -> Result<(), Failure> {
        graph.launch(&self.stream).map_err(Failure::unusable)
    }
}

/// The median time on rank 0 of a few replays of the captured step, launched rank by rank: the launches of the other ranks
/// are part of it.
pub fn replay_time(ranks: &[Rank]) -> Result<Duration, Failure> {
    let capture = |rank: &Rank| rank.capture(|_| Ok(()), |_| Ok(()));
    replay_time_of(ranks, &ranks.iter().map(capture).collect::<Result<Vec<_>, _>>()?)
}

/// As [`replay_time`], of each rank's graph.
pub fn replay_time_of(ranks: &[Rank], graphs: &[Graph]) -> Result<Duration, Failure> {
    const REPLAYS: usize = 21;
    let stream = &ranks[0].stream;
    let replay = || -> Result<f32, gpu::Error> {
        let (start, end) = (stream.device().event()?, stream.device().event()?);
        start.record(stream)?;
        for (graph, rank) in graphs.iter().zip(ranks) {
            graph.launch(&rank.stream)?;
        }
        end.record(stream)?;
        ranks.iter().try_for_each(|rank| rank.stream.synchronize())?;
        Ok(start.elapsed_ms(&end)?.unwrap_or(0.0))
    };
    let mut times = (0..REPLAYS).map(|_| replay()).collect::<Result<Vec<_>, _>>().map_err(Failure::unusable)?;
    ranks.iter().try_for_each(Rank::check)?;
    times.sort_by(f32::total_cmp);
    Ok(Duration::from_secs_f32(times[REPLAYS / 2] / 1e3))
}

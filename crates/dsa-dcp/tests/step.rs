//! A whole sharded step: every rank scores its own keys, selects, exchanges and merges; the answer is the unsharded one.

mod common;

use common::{Group, Rank, Spec, in_every_order, on_gpu};
use dsa_core::consts::PAGE;
use dsa_core::generate::{Contents, StepSpec};
use dsa_core::layout::fp8_page;
use dsa_core::layout::pitched_scratch::PitchedScratch;
use dsa_core::oracle::merge::owned_rows;
use dsa_core::oracle::score::dot_exact;
use dsa_core::oracle::select::Selection;
use dsa_core::oracle::step::{logits, select};
use dsa_core::{DecodeStep, IndexCacheShape, KvShape, Ownership};
use dsa_dcp::MergeStep;
use dsa_kernels::Table;
use dsa_kernels::local_topk::LocalTopkStep;
use dsa_kernels::score::{IndexerScore, KeyCache, ScoreForm, ScoreOutput, ScoreShape, ScoreStep};
use gpu::Buffer;

/// `rank`'s part of a step. The MLA cache has the same pages as its index cache.
fn shard(step: &DecodeStep, own: Ownership, rank: usize) -> DecodeStep {
    let shard = step.shard(own, rank).unwrap();
    DecodeStep {
        kv_table: shard.table.clone(),
        kv_table_stride: shard.table_stride,
        kv_table_width: shard.table_width,
        ..shard
    }
}

/// A rank's part on its device, and its outputs.
struct Resident {
    step: DecodeStep,
    queries: Buffer<u8>,
    weights: Buffer<u16>,
    cache: KeyCache,
    _cache_bytes: Buffer<u8>,
    table: Buffer<i32>,
    row_ends: Buffer<i32>,
    logits: Buffer<u16>,
    tops: Buffer<u16>,
    b_rows: Buffer<u32>,
    counts: Buffer<i32>,
    rows_out: Buffer<i32>,
    valid_out: Buffer<i32>,
    ids: Buffer<i32>,
    scratch: PitchedScratch,
    score: IndexerScore,
}

impl Resident {
    fn new(rank: &Rank, spec: &Spec, step: DecodeStep) -> Resident {
        let device = &rank.device;
        let cache_bytes = device.upload(&step.cache).unwrap();
        let shape = IndexCacheShape::new(step.blocks, fp8_page::BYTES, step.page_stride).unwrap();
        let scratch = PitchedScratch::new(step.rows, step.context_len_max);
        let rows = step.rows;
        Resident {
            queries: device.upload(&step.queries).unwrap(),
            weights: device.upload(&step.weights).unwrap(),
            cache: KeyCache::new(device, &cache_bytes.as_view(), shape).unwrap(),
            _cache_bytes: cache_bytes,
            table: device.upload(&step.table).unwrap(),
            row_ends: device.upload(&step.row_ends).unwrap(),
            logits: device.alloc(scratch.logits_len()).unwrap(),
            tops: device.alloc(scratch.tops_len()).unwrap(),
            b_rows: device.alloc(rows * spec.exchange().words().words()).unwrap(),
            counts: device.alloc(rows).unwrap(),
            rows_out: device.alloc(rows * spec.topk).unwrap(),
            valid_out: device.alloc(rows).unwrap(),
            ids: device.alloc(rows * spec.topk).unwrap(),
            score: IndexerScore::new(device, ScoreShape::new(step.q, ScoreForm::Pitched, step.scale_form).unwrap())
                .unwrap(),
            scratch,
            step,
        }
    }

    fn table(&self) -> Table<'_> {
        Table { ids: self.table.as_view(), stride: self.step.table_stride, width: self.step.table_width }
    }

    fn launch_until_pushed(&self, rank: &Rank) {
        let (pitch, length_max) = (self.scratch.pitch(), self.step.context_len_max);
        let score = ScoreStep {
            queries: self.queries.as_view(),
            weights: self.weights.as_view(),
            cache: &self.cache,
            table: self.table(),
            row_ends: self.row_ends.as_view(),
            length_max,
        };
        let (logits, tops) = (self.logits.as_view(), self.tops.as_view());
        let output = ScoreOutput::Pitched { logits: logits.clone(), tops: Some(tops.clone()), pitch };
        self.score.launch(&rank.stream, &score, &output).unwrap();
        let local = LocalTopkStep {
            logits,
            tops,
            pitch,
            row_ends: self.row_ends.as_view(),
            length_max,
            out: self.b_rows.as_view(),
            counts: self.counts.as_view(),
            push: rank.exchange.push(),
        };
        if let Some(local_topk) = &rank.local_topk {
            local_topk.launch(&rank.stream, &local).unwrap();
        }
    }

    fn launch_merge(&self, rank: &Rank) {
        let step = MergeStep {
            logits: self.logits.as_view(),
            tops: self.tops.as_view(),
            pitch: self.scratch.pitch(),
            row_ends: self.row_ends.as_view(),
            length_max: self.step.context_len_max,
            table: self.table(),
            kv: KvShape::new(PAGE, PAGE, self.step.blocks).unwrap(),
            rows_out: self.rows_out.as_view(),
            valid_out: self.valid_out.as_view(),
            ids: Some(self.ids.as_view()),
        };
        rank.merge.launch(&rank.stream, &rank.exchange, &step).unwrap();
    }
}

fn check(spec: &Spec, step: &DecodeStep, group: &Group, want: &[Selection]) {
    let own = spec.own();
    let shards: Vec<_> =
        group.ranks.iter().enumerate().map(|(r, rank)| Resident::new(rank, spec, shard(step, own, r))).collect();
    // Two layers' worth: the second call finds everything of the first in place.
    for _ in 0..2 {
        shards.iter().zip(&group.ranks).for_each(|(shard, rank)| shard.launch_until_pushed(rank));
        shards.iter().zip(&group.ranks).for_each(|(shard, rank)| shard.launch_merge(rank));
    }
    group.check().into_iter().for_each(|verdict| verdict.unwrap());
    for (r, (shard, rank)) in shards.iter().zip(&group.ranks).enumerate() {
        let read = |output: &Buffer<i32>| output.copy_to_vec(&rank.stream).unwrap();
        let (ids, rows, counts) = (read(&shard.ids), read(&shard.rows_out), read(&shard.valid_out));
        for (row, want) in want.iter().enumerate() {
            let slots = row * spec.topk..(row + 1) * spec.topk;
            assert_eq!(ids[slots.clone()], want.ids, "rank {r}, row {row}: ids");
            let selected: Vec<usize> = want.ids[..want.count].iter().map(|&id| id as usize).collect();
            let table = &shard.step.table[row / step.q * shard.step.table_stride..];
            let mut owned =
                owned_rows(&selected, r, own, |local| table[local / PAGE] * PAGE as i32 + (local % PAGE) as i32);
            assert_eq!(counts[row] as usize, owned.len(), "rank {r}, row {row}: count");
            owned.resize(spec.topk, -1);
            assert_eq!(rows[slots], owned, "rank {r}, row {row}: rows");
        }
    }
}

#[test]
fn a_sharded_step_selects_what_an_unsharded_one_does() {
    for (ranks, interleave, contents) in
        [(2, 1, Contents::SmallIntegers), (3, 4, Contents::Hostile), (4, 64, Contents::SmallIntegers)]
    {
        let spec = Spec { q: 2, interleave, context_len_max: 1600, rows: 6, ..Spec::new(ranks, 128, 256) };
        // Draft rows of one request end at different tokens, each on another rank.
        let ends = [1500, 1501, 900, 257, 3, 0];
        let step = StepSpec { contents, context_len_max: 1600, ..StepSpec::new(ranks as u64, 2, 256, &ends) };
        let step = step.build().unwrap();
        let want = select(&step, &logits(&step, dot_exact)).unwrap();
        let body = |group: &Group| check(&spec, &step, group, &want);
        in_every_order(&spec, 1, body);
        on_gpu(&spec, body);
    }
}

//! The data of a step on every rank, and what a single rank answers to it.

use dsa_core::KvShape;
use dsa_core::consts::{KEYS_PER_TOP, PAGE};
use dsa_core::generate::SplitMix64;
use dsa_core::layout::pitched_scratch::PitchedScratch;
use dsa_core::numerics::order16::canonical_logit;
use dsa_core::oracle::merge::{Saturation, merge_ids, owned_rows, two_rounds};
use dsa_core::oracle::score::tops;
use dsa_core::oracle::select::select_ids;
use dsa_dcp::{Exchange, MergeStep};
use dsa_kernels::Table;
use dsa_kernels::local_topk::LocalTopkStep;
use gpu::Buffer;

use super::{GUARD, Group, POISON, POISON32, Rank, Spec};

/// One rank's buffers of a layer.
pub struct Buffers {
    pub logits: Buffer<u16>,
    pub tops: Buffer<u16>,
    pub row_ends: Buffer<i32>,
    pub table: Buffer<i32>,
    pub b_rows: Buffer<u32>,
    pub counts: Buffer<i32>,
    pub rows_out: Buffer<i32>,
    pub valid_out: Buffer<i32>,
    pub ids: Buffer<i32>,
}

/// The logits of a step over all ranks, dealt out.
pub struct Layer {
    spec: Spec,
    /// Per live row, in global order.
    pub rows: Vec<Vec<u16>>,
    /// Rows that take part without keys.
    pub spare: usize,
    table: Vec<Vec<i32>>,
    pub buffers: Vec<Buffers>,
}

const BLOCK_ROWS_EXTRA: usize = 3;

impl Layer {
    /// `rows` live rows and `spare` others, on the devices of `group`.
    pub fn new(group: &Group, rows: Vec<Vec<u16>>, spare: usize) -> Layer {
        let spec = group.spec.clone();
        let canonical = |row: Vec<u16>| match spec.foreign {
            true => row,
            false => row.into_iter().map(canonical_logit).collect::<Vec<_>>(),
        };
        let rows: Vec<Vec<u16>> = rows.into_iter().map(canonical).collect();
        assert!(rows.len().is_multiple_of(spec.q) && rows.iter().all(|row| row.len() <= spec.context_len_max));
        let width = spec.exchange().local_len_max().div_ceil(spec.page);
        let requests = rows.len() / spec.q;
        let table = (0..spec.ranks)
            .map(|rank| {
                let mut blocks: Vec<i32> = (0..(requests * width) as i32).collect();
                SplitMix64::new(rank as u64).shuffle(&mut blocks);
                blocks
            })
            .collect();
        let mut layer = Layer { spec, rows, spare, table, buffers: Vec::new() };
        layer.buffers = (0..group.spec.ranks).map(|rank| layer.on_device(&group.ranks[rank], rank)).collect();
        layer.poison(group);
        layer
    }

    fn total(&self) -> usize {
        self.rows.len() + self.spare
    }

    fn scratch(&self) -> PitchedScratch {
        PitchedScratch::new(self.rows.len(), self.spec.exchange().local_len_max())
    }

    /// The logits of `row` that `rank` holds.
    fn dealt(&self, row: usize, rank: usize) -> Vec<u16> {
        let own = self.spec.own();
        let row = &self.rows[row];
        (0..own.local_len(rank, row.len())).map(|local| row[own.global_of(rank, local)]).collect()
    }

    /// Lays a rank's logits out as the pitched score does: only pages that hold keys are written.
    fn on_device(&self, on: &Rank, rank: usize) -> Buffers {
        let (device, stream, scratch) = (&on.device, &on.stream, self.scratch());
        let logits = device.alloc::<u16>(scratch.logits_len()).unwrap();
        let all_tops = device.alloc::<u16>(scratch.tops_len()).unwrap();
        if !device.info().simulated {
            logits.fill_bytes(stream, 0x7F).unwrap();
            all_tops.fill_bytes(stream, 0xFF).unwrap();
        }
        let mut ends = Vec::new();
        for row in 0..self.rows.len() {
            let values = self.dealt(row, rank);
            ends.push(values.len() as i32);
            let mut padded = values.clone();
            padded.resize(values.len().next_multiple_of(PAGE), 0x7F80); // +infinity past the end
            let at = scratch.row_start(row);
            logits.view(at..at + padded.len()).unwrap().copy_from(stream, &padded).unwrap();
            let mut row_tops = tops(&values, values.len());
            row_tops.resize(padded.len() / KEYS_PER_TOP, 0);
            let at = at / KEYS_PER_TOP;
            all_tops.view(at..at + row_tops.len()).unwrap().copy_from(stream, &row_tops).unwrap();
        }
        let (total, topk) = (self.total(), self.spec.topk);
        Buffers {
            logits,
            tops: all_tops,
            row_ends: device.upload(&ends).unwrap(),
            table: device.upload(&self.table[rank]).unwrap(),
            b_rows: device.alloc(total * self.spec.exchange().words().words()).unwrap(),
            counts: device.alloc(total).unwrap(),
            rows_out: device.alloc(total * topk + GUARD).unwrap(),
            valid_out: device.alloc(total + GUARD).unwrap(),
            ids: device.alloc(total * topk + GUARD).unwrap(),
        }
    }

    /// Other logits of the same lengths.
    pub fn replace(&mut self, group: &Group, rows: Vec<Vec<u16>>) {
        assert!(rows.iter().map(Vec::len).eq(self.rows.iter().map(Vec::len)));
        let other = Layer::new(group, rows, self.spare);
        for (rank, (to, from)) in group.ranks.iter().zip(self.buffers.iter().zip(&other.buffers)) {
            to.logits.copy_from_device(&rank.stream, &from.logits.as_view()).unwrap();
            to.tops.copy_from_device(&rank.stream, &from.tops.as_view()).unwrap();
            rank.stream.synchronize().unwrap();
        }
        self.rows = other.rows;
    }

    pub fn poison(&self, group: &Group) {
        for (buffers, rank) in self.buffers.iter().zip(&group.ranks) {
            for output in [&buffers.rows_out, &buffers.valid_out, &buffers.ids] {
                output.fill_bytes(&rank.stream, POISON).unwrap();
            }
        }
    }

    pub fn local_step<'a>(&'a self, rank: usize, exchange: Option<&'a Exchange>) -> LocalTopkStep<'a> {
        let buffers = &self.buffers[rank];
        LocalTopkStep {
            logits: buffers.logits.as_view(),
            tops: buffers.tops.as_view(),
            pitch: self.scratch().pitch(),
            row_ends: buffers.row_ends.as_view(),
            length_max: self.spec.exchange().local_len_max(),
            out: buffers.b_rows.as_view(),
            counts: buffers.counts.as_view(),
            push: exchange.and_then(Exchange::push),
        }
    }

    fn kv(&self) -> KvShape {
        Layer::kv_of(&self.spec, 0)
    }

    /// An MLA cache of `blocks` blocks, 0 if their number is not known.
    pub fn kv_of(spec: &Spec, blocks: usize) -> KvShape {
        KvShape::new(spec.page, spec.page + BLOCK_ROWS_EXTRA, blocks).unwrap()
    }

    pub fn merge_step(&self, rank: usize) -> MergeStep<'_> {
        let buffers = &self.buffers[rank];
        let (total, topk) = (self.total(), self.spec.topk);
        let width = self.spec.exchange().local_len_max().div_ceil(self.spec.page);
        MergeStep {
            logits: buffers.logits.as_view(),
            tops: buffers.tops.as_view(),
            pitch: self.scratch().pitch(),
            row_ends: buffers.row_ends.as_view(),
            length_max: self.spec.exchange().local_len_max(),
            table: Table { ids: buffers.table.as_view(), stride: width, width },
            kv: self.kv(),
            rows_out: buffers.rows_out.view(..total * topk).unwrap(),
            valid_out: buffers.valid_out.view(..total).unwrap(),
            ids: self.spec.ids.then(|| buffers.ids.view(..total * topk).unwrap()),
        }
    }

    /// Which rows need a second round: none of a direct exchange.
    pub fn rescued(&self) -> Vec<bool> {
        if self.spec.exchange().is_direct() {
            return vec![false; self.total()];
        }
        let Spec { n, topk, .. } = self.spec;
        let rescued = |row: usize| {
            let dealt: Vec<_> = (0..self.spec.ranks).map(|rank| self.dealt(row, rank)).collect();
            !two_rounds(&dealt, self.spec.own(), n, topk, Saturation::FullKey).saturated.is_empty()
        };
        (0..self.total()).map(|row| row < self.rows.len() && rescued(row)).collect()
    }

    /// What `rank` must have written: (ids, rows, counts).
    pub fn expected(&self, rank: usize) -> [Vec<i32>; 3] {
        let (own, topk) = (self.spec.own(), self.spec.topk);
        let width = self.spec.exchange().local_len_max().div_ceil(self.spec.page);
        let [mut ids, mut rows, mut counts] = [const { Vec::new() }; 3];
        for row in 0..self.total() {
            let global: &[u16] = self.rows.get(row).map_or(&[], |row| row);
            let selected = select_ids(global, topk);
            let dealt: Vec<Vec<u16>> = (0..self.spec.ranks)
                .map(|rank| self.rows.get(row).map_or(Vec::new(), |_| self.dealt(row, rank)))
                .collect();
            assert_eq!(merge_ids(&dealt, own, topk), selected, "the oracles agree");
            let table = &self.table[rank];
            let physical = |local: usize| {
                let block = table[row / self.spec.q * width + local / self.spec.page] as usize;
                (block * self.kv().block_rows() + local % self.spec.page) as i32
            };
            let mut owned = owned_rows(&selected, rank, own, physical);
            counts.push(owned.len() as i32);
            owned.resize(topk, -1);
            rows.extend(owned);
            let mut selected: Vec<i32> = selected.into_iter().map(|id| id as i32).collect();
            selected.resize(topk, -1);
            ids.extend(if self.spec.ids { selected } else { vec![POISON32; topk] });
        }
        [ids, rows, counts]
    }

    /// What `rank` has written; what follows each output must be poison, and so must ids that nobody writes.
    pub fn read(&self, group: &Group, rank: usize) -> [Vec<i32>; 3] {
        let (buffers, stream) = (&self.buffers[rank], &group.ranks[rank].stream);
        [&buffers.ids, &buffers.rows_out, &buffers.valid_out].map(|output| {
            let mut values = output.copy_to_vec(stream).unwrap();
            let guard = values.split_off(values.len() - GUARD);
            assert!(guard.iter().all(|x| *x == POISON32), "a write past an output of rank {rank}");
            values
        })
    }

    /// Every rank has a single rank's ids, and exactly its own rows of them.
    #[track_caller]
    pub fn verify(&self, group: &Group) {
        if let Err(difference) = self.difference(group) {
            panic!("{difference}\n{:?}", self.spec);
        }
        let counts: Vec<Vec<i32>> = (0..self.spec.ranks).map(|rank| self.read(group, rank)[2].clone()).collect();
        for row in 0..self.total() {
            let sum: i32 = counts.iter().map(|counts| counts[row]).sum();
            let keys = self.rows.get(row).map_or(0, Vec::len);
            assert_eq!(sum as usize, keys.min(self.spec.topk), "row {row}: the ranks' counts together");
        }
    }

    /// The first difference from the oracle.
    pub fn difference(&self, group: &Group) -> Result<(), String> {
        for rank in 0..self.spec.ranks {
            let (got, want) = (self.read(group, rank), self.expected(rank));
            for (name, per_row, output) in [("id", self.spec.topk, 0), ("row", self.spec.topk, 1), ("count", 1, 2)] {
                if let Some(at) = (0..want[output].len()).find(|&i| got[output][i] != want[output][i]) {
                    let (row, slot) = (at / per_row, at % per_row);
                    let (got, want) = (got[output][at], want[output][at]);
                    return Err(format!("rank {rank}, row {row}, slot {slot}: {name} {got}, want {want}"));
                }
            }
        }
        Ok(())
    }

    /// Every output of `rank` is empty.
    pub fn is_empty(&self, group: &Group, rank: usize) -> bool {
        let [ids, rows, counts] = self.read(group, rank);
        let no_id = if self.spec.ids { -1 } else { POISON32 };
        ids.iter().all(|x| *x == no_id) && rows.iter().all(|x| *x == -1) && counts.iter().all(|x| *x == 0)
    }
}

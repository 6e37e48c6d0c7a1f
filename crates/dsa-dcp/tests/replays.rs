//! Call after call, their rows changing in between and one rank or another late: replayed from a graph thousands of times, and
//! eager and captured calls mixed in random schedules.

mod common;

use common::{Group, Layer, Spec, full_or, in_every_order, on_gpu, on_one_rank};
use dsa_core::generate::{LogitPattern, SplitMix64};
use dsa_core::layout::ll_slot::next_epoch;
use gpu::{Buffer, SimConfig};

/// Calls between two looks at what they wrote: until then nothing makes the ranks wait for each other.
const UNSEEN: usize = 20;
/// Contents that a layer's rows change between.
const CONTENTS: u64 = 5;

/// Rows of the same lengths for every seed, of which the second saturates a rank.
fn rows(spec: &Spec, seed: u64) -> Vec<Vec<u16>> {
    let mut rows = vec![
        LogitPattern::Gaussian.row(seed, 900),
        on_one_rank(spec, seed as usize % spec.ranks, 800, seed),
        LogitPattern::FewDistinct(3).row(seed, 700),
    ];
    rows.truncate(spec.rows);
    rows
}

/// A layer, what its rows may hold, and what one rank must then write: `want[contents][rank]` of ids, rows, counts.
struct Changing {
    layer: Layer,
    contents: Vec<Layer>,
    want: Vec<Vec<[Vec<i32>; 3]>>,
}

impl Changing {
    fn new(group: &Group, first_seed: u64) -> Changing {
        let spec = &group.spec;
        let at = |seed: u64| Layer::new(group, rows(spec, seed), 0);
        let contents: Vec<Layer> = (first_seed..first_seed + CONTENTS).map(at).collect();
        let want = |layer: &Layer| (0..spec.ranks).map(|rank| layer.expected(rank)).collect();
        Changing { layer: at(first_seed), want: contents.iter().map(want).collect(), contents }
    }

    /// Changes the rows of one rank, in stream order.
    fn change(&self, group: &Group, rank: usize, to: usize) {
        let (buffers, from) = (&self.layer.buffers[rank], &self.contents[to].buffers[rank]);
        let stream = &group.ranks[rank].stream;
        buffers.logits.copy_from_device(stream, &from.logits.as_view()).unwrap();
        buffers.tops.copy_from_device(stream, &from.tops.as_view()).unwrap();
    }
}

/// `calls` calls of two layers in turn, which share their slots. `captured(call)`: replayed from a graph.
fn call_many(group: &Group, calls: usize, seed: u64, captured: impl Fn(usize) -> bool) {
    let spec = &group.spec;
    let layers = [0, 50].map(|first| Changing::new(group, first));
    let graphs = layers
        .each_ref()
        .map(|changing| (0..spec.ranks).map(|rank| group.capture(&[&changing.layer], rank)).collect::<Vec<_>>());
    let lengths = layers[0].want[0][0].each_ref().map(Vec::len);
    // What each rank wrote since the last look: ids, rows, counts.
    let kept: Vec<[Buffer<i32>; 3]> =
        group.ranks.iter().map(|rank| lengths.map(|len| rank.device.alloc(UNSEEN * len).unwrap())).collect();
    let started = group.counters()[0][0][0];
    let mut rng = SplitMix64::new(seed);
    let mut unseen = Vec::new();
    for call in 0..calls {
        let (which, to) = (call % 2, rng.below(CONTENTS as usize));
        let changing = &layers[which];
        let late = (rng.below(8) == 0).then(|| rng.below(spec.ranks));
        for rank in 0..spec.ranks {
            changing.change(group, rank, to);
            if late == Some(rank) {
                group.sleep(rank).unwrap();
            }
        }
        if captured(call) {
            for (graph, on) in graphs[which].iter().zip(&group.ranks) {
                graph.launch(&on.stream).unwrap();
            }
        } else {
            group.launch(&changing.layer);
        }
        for ((on, buffers), kept) in group.ranks.iter().zip(&changing.layer.buffers).zip(&kept) {
            for ((kept, output), len) in
                kept.iter().zip([&buffers.ids, &buffers.rows_out, &buffers.valid_out]).zip(lengths)
            {
                let slot = kept.view(unseen.len() * len..(unseen.len() + 1) * len).unwrap();
                slot.copy_from_device(&on.stream, &output.view(..len).unwrap()).unwrap();
            }
        }
        unseen.push((call, which, to));
        if unseen.len() == UNSEEN || call + 1 == calls {
            group.check().into_iter().for_each(|verdict| verdict.unwrap());
            for (rank, (on, kept)) in group.ranks.iter().zip(&kept).enumerate() {
                for (output, (kept, len)) in kept.iter().zip(lengths).enumerate() {
                    let kept = kept.view(..unseen.len() * len).unwrap().copy_to_vec(&on.stream).unwrap();
                    for ((call, which, to), got) in unseen.iter().zip(kept.chunks(len)) {
                        let want = &layers[*which].want[*to][rank][output];
                        assert_eq!(got, want, "seed {seed}, call {call}, rank {rank}, output {output}");
                    }
                }
            }
            unseen.clear();
        }
    }
    let epoch = (0..calls).fold(started, |epoch, _| next_epoch(epoch));
    assert!(group.counters().iter().all(|counters| counters[0] == vec![epoch; spec.rows]));
}

#[test]
fn every_replay_has_its_own_rows_answer() {
    for ranks in [2, 4, 8] {
        let spec = Spec { interleave: 4, rows: 3, ..Spec::new(ranks, 128, 256) };
        if ranks < 8 {
            in_every_order(&spec, 1, |group| call_many(group, 12, 77, |_| true));
        }
        on_gpu(&spec, |group| call_many(group, 2000, 77, |_| true));
    }
}

#[test]
fn no_schedule_loses_tears_or_keeps_a_row() {
    let schedules = full_or(2000, 24);
    for seed in 0..schedules as u64 {
        let ranks = [2, 4, 8][seed as usize % 3];
        let spec =
            Spec { interleave: 4, rows: 2, hold: seed % 5 == 0, ids: seed % 2 == 0, ..Spec::new(ranks, 128, 256) };
        let group = Group::simulated(&spec, SimConfig::seeded(seed));
        if seed % 4 == 0 {
            group.set_counters(u32::MAX - 3, u32::MAX - 2);
        }
        call_many(&group, 7, seed, |call| (seed >> (call % 8)) & 1 == 0);
    }
}

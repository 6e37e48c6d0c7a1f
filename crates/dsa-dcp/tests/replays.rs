//! A captured call replayed thousands of times, its rows changing between replays and one rank or another late.

mod common;

use common::{Group, Layer, Spec, in_every_order, on_gpu, on_one_rank};
use dsa_core::generate::{LogitPattern, SplitMix64};
use gpu::Buffer;

/// Replays on the simulator; on a GPU.
const SIMULATED: usize = 12;
const ON_GPU: usize = 2000;
/// Replays between two looks at what they wrote: until then nothing makes the ranks wait for each other.
const UNSEEN: usize = 20;

fn spec(ranks: usize) -> Spec {
    Spec { interleave: 4, rows: 3, ..Spec::new(ranks, 128, 256) }
}

/// Rows of the same lengths for every seed, of which the second saturates a rank.
fn rows(spec: &Spec, seed: u64) -> Vec<Vec<u16>> {
    vec![
        LogitPattern::Gaussian.row(seed, 900),
        on_one_rank(spec, seed as usize % spec.ranks, 800, seed),
        LogitPattern::FewDistinct(3).row(seed, 700),
    ]
}

/// What one rank wrote in the replays since the last look: ids, rows, counts.
struct History {
    kept: [Buffer<i32>; 3],
}

fn replay_many(group: &Group, replays: usize) {
    let spec = &group.spec;
    let contents: Vec<Layer> = (0..6).map(|seed| Layer::new(group, rows(spec, seed), 0)).collect();
    let want: Vec<Vec<[Vec<i32>; 3]>> =
        contents.iter().map(|layer| (0..spec.ranks).map(|rank| layer.expected(rank)).collect()).collect();
    let layer = Layer::new(group, rows(spec, 0), 0);
    let lengths = want[0][0].each_ref().map(Vec::len);
    let graphs: Vec<_> = (0..spec.ranks).map(|rank| group.capture(&[&layer], rank)).collect();
    let histories: Vec<History> = (group.ranks.iter())
        .map(|rank| History { kept: lengths.map(|len| rank.device.alloc(UNSEEN * len).unwrap()) })
        .collect();
    let mut rng = SplitMix64::new(77);
    let mut unseen = Vec::new();
    for replay in 0..replays {
        let which = rng.below(contents.len());
        let late = (rng.below(8) == 0).then(|| rng.below(spec.ranks));
        for (rank, on) in group.ranks.iter().enumerate() {
            let (to, from) = (&layer.buffers[rank], &contents[which].buffers[rank]);
            to.logits.copy_from_device(&on.stream, &from.logits.as_view()).unwrap();
            to.tops.copy_from_device(&on.stream, &from.tops.as_view()).unwrap();
            if late == Some(rank) {
                group.sleep(rank).unwrap();
            }
        }
        for (graph, on) in graphs.iter().zip(&group.ranks) {
            graph.launch(&on.stream).unwrap();
        }
        for ((on, buffers), history) in group.ranks.iter().zip(&layer.buffers).zip(&histories) {
            for ((kept, output), len) in
                history.kept.iter().zip([&buffers.ids, &buffers.rows_out, &buffers.valid_out]).zip(lengths)
            {
                let slot = kept.view(unseen.len() * len..(unseen.len() + 1) * len).unwrap();
                slot.copy_from_device(&on.stream, &output.view(..len).unwrap()).unwrap();
            }
        }
        unseen.push((replay, which));
        if unseen.len() == UNSEEN || replay + 1 == replays {
            group.check().into_iter().for_each(|verdict| verdict.unwrap());
            for (rank, (on, history)) in group.ranks.iter().zip(&histories).enumerate() {
                for (output, (kept, len)) in history.kept.iter().zip(lengths).enumerate() {
                    let kept = kept.view(..unseen.len() * len).unwrap().copy_to_vec(&on.stream).unwrap();
                    for ((replay, which), got) in unseen.iter().zip(kept.chunks(len)) {
                        assert_eq!(got, want[*which][rank][output], "replay {replay}, rank {rank}, output {output}");
                    }
                }
            }
            unseen.clear();
        }
    }
    assert!(group.counters().iter().all(|counters| counters[0] == [replays as u32; 3]));
}

#[test]
fn every_replay_has_its_own_rows_answer() {
    for ranks in [2, 4, 8] {
        let spec = spec(ranks);
        if ranks < 8 {
            in_every_order(&spec, 1, |group| replay_many(group, SIMULATED));
        }
        on_gpu(&spec, |group| replay_many(group, ON_GPU));
    }
}

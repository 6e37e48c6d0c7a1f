//! The exchange by an all-gather selects what a single rank does, on every rank, rescues included.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Group, Layer, Spec, as_every_rank, in_every_order, on_gpu, on_one_rank, on_sim};
use dsa_core::Ownership;
use dsa_core::generate::{LogitPattern, SplitMix64};
use dsa_dcp::gathered::{GatheredExchange, GatheredStep, GatheredTopk};
use dsa_dcp::layout::LATE_GATHER;
use dsa_dcp::rendezvous::in_process;
use dsa_dcp::{DcpError, ExchangeMerge, ExchangeShape, Limits};
use gpu::{Device, SimConfig};

/// One rank's part.
struct Gathering {
    exchange: GatheredExchange,
    topk: GatheredTopk,
    merge: ExchangeMerge,
}

/// Sets up every rank of `group` once more, to gather instead of pushing. Collective.
fn gatherings(group: &Group) -> Vec<Gathering> {
    let members: Vec<_> = in_process(group.spec.ranks).into_iter().map(Arc::new).collect();
    as_every_rank(group.spec.ranks, |rank| {
        let (device, member, shape) = (&group.ranks[rank].device, members[rank].clone(), group.spec.exchange());
        Gathering {
            exchange: GatheredExchange::new(device, member.clone(), member, shape, group.spec.limits()).unwrap(),
            topk: GatheredTopk::new(device, &shape, group.spec.foreign).unwrap(),
            merge: ExchangeMerge::new(device, group.spec.merge().with_gathered(true)).unwrap(),
        }
    })
}

fn step<'a>(layer: &'a Layer, rank: usize) -> GatheredStep<'a> {
    let local = layer.local_step(rank, None);
    GatheredStep {
        logits: local.logits,
        tops: local.tops,
        pitch: local.pitch,
        row_ends: local.row_ends,
        length_max: local.length_max,
        counts: local.counts,
    }
}

/// A call on every rank, one after another for each of `layers`.
fn launch(group: &Group, gatherings: &[Gathering], layers: &[&Layer]) {
    as_every_rank(group.spec.ranks, |rank| {
        let (stream, Gathering { exchange, topk, merge }) = (&group.ranks[rank].stream, &gatherings[rank]);
        for layer in layers {
            exchange.launch(stream, topk, &step(layer, rank)).unwrap();
            merge.launch_gathered(stream, exchange, &layer.merge_step(rank)).unwrap();
        }
        exchange.check(stream).unwrap();
    });
}

#[track_caller]
fn run(group: &Group, rows: Vec<Vec<u16>>, spare: usize) {
    let layer = Layer::new(group, rows, spare);
    launch(group, &gatherings(group), &[&layer]);
    layer.verify(group);
}

/// Rows that are long, tied, saturating one rank, short.
fn rows(spec: &Spec, seed: u64) -> Vec<Vec<u16>> {
    let long = (spec.ranks * spec.n * 2).min(spec.context_len_max);
    vec![
        LogitPattern::Gaussian.row(seed, long),
        LogitPattern::Ties.row(seed, long - 5),
        on_one_rank(spec, seed as usize % spec.ranks, long.min(3 * spec.topk), seed),
        LogitPattern::FewDistinct(3).row(seed, spec.topk + 1),
    ]
}

fn matrix(ranks: &[usize]) -> Vec<Spec> {
    let each = |ranks: usize| {
        [(128, 256), (256, 512), (512, 640)].into_iter().flat_map(move |(n, topk)| {
            [1, 4, 64].map(move |interleave| Spec { interleave, context_len_max: 20_000, ..Spec::new(ranks, n, topk) })
        })
    };
    ranks.iter().flat_map(|&ranks| each(ranks)).collect()
}

#[test]
fn ids_equal_a_single_rank_s_for_1_to_4_ranks() {
    for (seed, spec) in matrix(&[1, 2, 3, 4]).into_iter().enumerate() {
        on_sim(&spec, |group| run(group, rows(&spec, seed as u64), 0));
    }
}

#[test]
fn ids_equal_a_single_rank_s_for_8_and_16_ranks() {
    for (seed, spec) in matrix(&[8, 16]).into_iter().enumerate() {
        on_sim(&spec, |group| run(group, rows(&spec, seed as u64), 0));
    }
}

#[test]
fn ids_equal_a_single_rank_s_on_a_gpu() {
    for (seed, spec) in matrix(&[1, 2, 3, 4, 8]).into_iter().enumerate() {
        on_gpu(&spec, |group| run(group, rows(&spec, seed as u64), 0));
    }
}

#[test]
fn saturated_ranks_ties_nan_and_rows_without_keys() {
    for spec in [Spec::new(8, 128, 512).ordinary(), Spec::new(4, 128, 512).direct()] {
        let spec = Spec { interleave: 4, foreign: true, rows: 9, ..spec };
        let mut rows: Vec<_> = (0..4).map(|rank| on_one_rank(&spec, rank, 5000, 3)).collect();
        // Three ranks hold all selected keys, so all three are saturated.
        let own = spec.own();
        let held = |id: usize| [0, 1, 3].contains(&own.rank_of(id));
        rows.push((0..4000).map(|id| if held(id) { 0x4000 + (id % 7) as u16 } else { 0 }).collect());
        rows.push(vec![0x4000; 3000]);
        rows.push(LogitPattern::NanMix.row(5, 1000));
        rows.push(vec![]);
        let body = |group: &Group| run(group, rows.clone(), 1);
        in_every_order(&spec, 1, body);
        on_gpu(&spec, body);
    }
}

#[test]
fn random_problems() {
    let mut rng = SplitMix64::new(4711);
    for seed in 0..25 {
        let ranks = 1 + rng.below(8);
        let n = 128 * (1 + rng.below(3));
        let topk = n + 128 * (1 + rng.below(5));
        let (interleave, q, page) = (1 << rng.below(8), 1 + rng.below(3), 1 << rng.below(9));
        let spec = Spec { interleave, q, page, rows: 2 * q, ..Spec::new(ranks, n, topk) };
        let rows: Vec<Vec<u16>> = (0..2 * q)
            .map(|row| {
                let len = [rng.below(6000), rng.below(2 * topk), rng.below(300)][rng.below(3)];
                match rng.below(3) {
                    0 => on_one_rank(&spec, rng.below(ranks), len, seed),
                    1 => (0..len).map(|id| 0x4000 - (id * 5 / (len + 1)) as u16).collect(),
                    _ => LogitPattern::ALL[rng.below(LogitPattern::ALL.len())].row(seed + row as u64, len),
                }
            })
            .collect();
        println!("problem {seed}: {spec:?}");
        let config = if seed % 2 == 0 { SimConfig::default() } else { SimConfig::seeded(seed) };
        run(&Group::simulated(&spec, config), rows, 0);
    }
}

#[test]
fn calls_of_other_numbers_of_rows_share_the_buffers() {
    let spec = Spec { rows: 6, ..Spec::new(3, 128, 256) };
    let body = |group: &Group| {
        let gatherings = gatherings(group);
        let row = |seed| on_one_rank(&spec, seed as usize % 3, 900, seed);
        let layers = [(1, 0), (4, 2), (0, 3), (2, 0)]
            .map(|(live, spare)| Layer::new(group, (0..live).map(|i| row(i + live)).collect(), spare));
        for _ in 0..2 {
            layers.iter().for_each(|layer| layer.poison(group));
            launch(group, &gatherings, &layers.each_ref());
            layers.iter().for_each(|layer| layer.verify(group));
        }
    };
    in_every_order(&spec, 3, body);
    on_gpu(&spec, body);
}

#[test]
fn after_a_gather_that_was_given_up_rows_are_empty_until_a_reset() {
    let spec = Spec { rows: 2, ..Spec::new(2, 128, 256) };
    let body = |group: &Group| {
        let gatherings = gatherings(group);
        let layer = Layer::new(group, vec![LogitPattern::Gaussian.row(1, 900), on_one_rank(&spec, 1, 700, 2)], 0);
        // What giving up leaves behind on rank 1.
        let stream = &group.ranks[1].stream;
        gatherings[1].exchange.status().view(..1).unwrap().copy_from(stream, &[LATE_GATHER]).unwrap();
        as_every_rank(2, |rank| {
            let (stream, Gathering { exchange, topk, merge }) = (&group.ranks[rank].stream, &gatherings[rank]);
            exchange.launch(stream, topk, &step(&layer, rank)).unwrap();
            merge.launch_gathered(stream, exchange, &layer.merge_step(rank)).unwrap();
            match (rank, exchange.check(stream)) {
                (0, verdict) => verdict.unwrap(),
                (_, verdict) => assert!(matches!(verdict, Err(DcpError::GatherLate { rank: 1, .. })), "{verdict:?}"),
            }
        });
        assert_eq!(layer.read(group, 0), layer.expected(0));
        assert!(layer.is_empty(group, 1));
        as_every_rank(2, |rank| gatherings[rank].exchange.reset(&group.ranks[rank].stream).unwrap());
        launch(group, &gatherings, &[&layer]);
        layer.verify(group);
    };
    in_every_order(&spec, 1, body);
    on_gpu(&spec, body);
}

#[test]
fn what_does_not_fit_is_refused() {
    let spec = Spec { rows: 2, ..Spec::new(2, 128, 256) };
    let group = Group::simulated(&spec, SimConfig::default());
    let gatherings = gatherings(&group);
    let (rank, Gathering { exchange, topk, merge }) = (&group.ranks[0], &gatherings[0]);
    let layer = Layer::new(&group, vec![vec![0x4000; 9]], 0);
    // A kernel for pushes, and one for another exchange.
    let pushes = rank.merge.launch_gathered(&rank.stream, exchange, &layer.merge_step(0)).unwrap_err();
    assert!(matches!(&pushes, DcpError::WrongExchange { exchange, .. } if exchange.contains("gathered")), "{pushes}");
    let gathers = merge.launch(&rank.stream, &rank.exchange, &layer.merge_step(0)).unwrap_err();
    assert!(matches!(&gathers, DcpError::WrongExchange { merge, .. } if merge.contains("gathered")), "{gathers}");
    let many = Layer::new(&group, vec![vec![0x4000; 9]; 3], 0);
    let many = exchange.launch(&rank.stream, topk, &step(&many, 0)).unwrap_err();
    assert!(matches!(many, DcpError::RowsOutOfRange { rows: 3, max: 2 }), "{many}");
    // A gather of another group.
    let device = Device::simulated(SimConfig::default());
    let [two, three] = [2, 3].map(|ranks| Arc::new(in_process(ranks).swap_remove(0)));
    let shape = ExchangeShape::new(Ownership::new(2, 1).unwrap(), 1, 128, 256, 99).unwrap();
    let limits = Limits { collective: Duration::from_millis(30), ..Limits::default() };
    let other = GatheredExchange::new(&device, two, three, shape, limits).unwrap_err();
    assert!(matches!(other, DcpError::GroupSize { group: 3, shape: 2 }), "{other}");
}

//! Call after call on the same slots: epochs, parities, graphs, and ranks that do not come.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Group, Layer, Spec, as_every_rank, in_every_order, on_gpu, on_one_rank};
use dsa_core::Ownership;
use dsa_core::generate::LogitPattern;
use dsa_dcp::local_ends::LocalEnds;
use dsa_dcp::rendezvous::{RendezvousError, in_process};
use dsa_dcp::{DcpError, Exchange, ExchangeMerge, ExchangeShape, Limits, MergeStep, Rendezvous, Waiting};
use dsa_kernels::KernelError;
use dsa_kernels::local_topk::LocalTopkStep;
use gpu::{Device, SimConfig};

fn spec(ranks: usize) -> Spec {
    Spec { interleave: 4, rows: 3, ..Spec::new(ranks, 128, 256) }
}

/// As [`spec`] for merges that select by themselves.
fn direct(ranks: usize) -> Spec {
    let spec = Spec { topk: 512, ..spec(ranks) };
    assert!(spec.exchange().is_direct());
    spec
}

/// Rows of which the second saturates a rank.
fn rows(spec: &Spec, seed: u64) -> Vec<Vec<u16>> {
    let favourite = seed as usize % spec.ranks;
    vec![
        LogitPattern::Gaussian.row(seed, 900),
        on_one_rank(spec, favourite, 800, seed),
        LogitPattern::FewDistinct(3).row(seed, 700),
    ]
}

/// Every test body in every order on the simulator, and on a GPU.
fn everywhere(spec: &Spec, seeds: u64, body: impl Fn(&Group)) {
    in_every_order(spec, seeds, &body);
    on_gpu(spec, body);
}

#[test]
fn layers_share_slots_back_to_back() {
    for ranks in [2, 3, 4] {
        let spec = spec(ranks);
        everywhere(&spec, 8, |group| {
            let layers = [1, 2].map(|seed| Layer::new(group, rows(&spec, seed), 0));
            // Nothing between the calls: a rank may be one ahead of another, and in half of them one is.
            for call in 0..8 {
                match call / 2 % 2 {
                    0 => group.launch(&layers[call % 2]),
                    _ => group.launch_skewed(&layers[call % 2], ranks - 1, call < 4).unwrap(),
                }
            }
            group.check().into_iter().for_each(|verdict| verdict.unwrap());
            layers.iter().for_each(|layer| layer.verify(group));
            let rescued = layers.each_ref().map(Layer::rescued);
            let want: Vec<u32> = (0..3).map(|row| 4 * (rescued[0][row] as u32 + rescued[1][row] as u32)).collect();
            let second_rounds = if spec.exchange().is_direct() { 0 } else { 8 };
            assert_eq!(want[1], second_rounds, "one rank has all selected keys of row 1");
            for [epochs, sequences] in group.counters() {
                assert_eq!((epochs, sequences), (vec![8; 3], want.clone()));
            }
        });
    }
}

#[test]
fn direct_and_ordinary_exchanges_take_turns_on_a_stream() {
    everywhere(&spec(3), 6, |ordinary| {
        let devices: Vec<_> = ordinary.ranks.iter().map(|rank| rank.device.clone()).collect();
        let mut direct = Group::new(&direct(3), &devices, None, None);
        for (to, from) in direct.ranks.iter_mut().zip(&ordinary.ranks) {
            to.stream = from.stream.clone();
        }
        let groups = [ordinary, &direct];
        let layers = groups.map(|group| [1, 2].map(|seed| Layer::new(group, rows(&group.spec, seed), 0)));
        // One, then two of a kind in a row, one rank behind at either place of a call.
        for (call, which) in [0, 1, 0, 0, 1, 1, 0, 1, 1, 0].into_iter().enumerate() {
            groups[which].launch_skewed(&layers[which][call % 2], call % 3, call % 4 < 2).unwrap();
        }
        for (group, layers) in groups.iter().zip(&layers) {
            layers.iter().for_each(|layer| group.launch(layer));
            group.check().into_iter().for_each(|verdict| verdict.unwrap());
            layers.iter().for_each(|layer| layer.verify(group));
        }
    });
}

#[test]
fn steps_of_fewer_rows_leave_the_other_rows_epochs() {
    let spec = spec(3);
    everywhere(&spec, 2, |group| {
        let all = Layer::new(group, rows(&spec, 1), 0);
        let fewer = Layer::new(group, rows(&spec, 2)[..1].to_vec(), 1);
        for layer in [&all, &fewer, &fewer, &all, &fewer] {
            group.run(layer);
        }
        assert!(group.counters().iter().all(|counters| counters[0] == [5, 5, 2]));
    });
}

#[test]
fn epochs_and_sequences_wrap() {
    for ranks in [2, 3] {
        let spec = spec(ranks);
        everywhere(&spec, 8, |group| {
            group.set_counters(u32::MAX - 3, u32::MAX - 2);
            let layers = [3, 4].map(|seed| Layer::new(group, rows(&spec, seed), 0));
            for call in 0..8 {
                group.launch_skewed(&layers[call % 2], 1, true).unwrap();
            }
            group.check().into_iter().for_each(|verdict| verdict.unwrap());
            layers.iter().for_each(|layer| layer.verify(group));
            // 0 is the epoch of empty slots; 1 would follow an odd epoch.
            assert!(group.counters().iter().all(|counters| counters[0] == [6; 3]));
        });
    }
}

#[test]
fn a_rank_that_never_comes_is_an_error_in_time_and_reset_restores_service() {
    [spec(3), direct(3)].iter().for_each(never_comes);
}

fn never_comes(spec: &Spec) {
    everywhere(spec, 4, |group| {
        let layer = Layer::new(group, rows(spec, 1), 0);
        group.run(&layer);
        layer.poison(group);
        let start = Instant::now();
        group.launch_on(&layer, &[0, 2]).unwrap();
        for rank in [0, 2] {
            let verdict = group.ranks[rank].exchange.check(&group.ranks[rank].stream);
            assert!(
                matches!(
                    verdict,
                    Err(DcpError::PeerLate { rank: own, peer: 1, epoch: 2, waiting: Waiting::Words, row: 0..3 })
                    if own == rank
                ),
                "{verdict:?}"
            );
            assert!(layer.is_empty(group, rank), "rank {rank} wrote something");
        }
        assert!(start.elapsed() < Duration::from_secs(20));
        // A failed exchange does nothing more, whoever comes now.
        layer.poison(group);
        group.launch(&layer);
        for (rank, verdict) in group.check().into_iter().enumerate() {
            // Rank 1 finds what the others pushed for its missed call, and no more.
            match rank {
                1 => assert!(verdict.is_ok(), "{verdict:?}"),
                _ => assert!(matches!(verdict, Err(DcpError::PeerLate { peer: 1, epoch: 2, .. }))),
            }
            assert_eq!(layer.is_empty(group, rank), rank != 1, "rank {rank}");
        }
        layer.poison(group);
        group.launch(&layer);
        let verdict = group.ranks[1].exchange.check(&group.ranks[1].stream);
        assert!(matches!(verdict, Err(DcpError::PeerLate { rank: 1, peer: 0 | 2, epoch: 3, .. })), "{verdict:?}");
        assert!((0..3).all(|rank| layer.is_empty(group, rank)));

        group.reset();
        for seed in 5..9 {
            group.run(&Layer::new(group, rows(spec, seed), 0));
        }
    });
}

#[test]
fn a_failed_rank_does_not_spoil_a_slower_one() {
    // Rank 2 comes after rank 0 has given up and gone on to other data; rank 1 comes with rank 2.
    [spec(3), direct(3)].iter().for_each(fails_early);
}

fn fails_early(spec: &Spec) {
    everywhere(spec, 2, |group| {
        let [first, second] = [1, 2].map(|seed| Layer::new(group, rows(spec, seed), 0));
        group.launch_on(&first, &[0]).unwrap();
        assert!(group.ranks[0].exchange.check(&group.ranks[0].stream).is_err());
        group.launch_on(&second, &[0]).unwrap();
        group.ranks[0].stream.synchronize().unwrap();
        group.launch_on(&first, &[1, 2]).unwrap();
        for rank in [1, 2] {
            // What rank 0 pushed before it failed is whole: the call's answer, not a mixture.
            group.ranks[rank].exchange.check(&group.ranks[rank].stream).unwrap();
            assert_eq!(first.read(group, rank), first.expected(rank));
        }
        assert!(first.is_empty(group, 0) && second.is_empty(group, 0));
    });
}

#[test]
fn a_rank_that_dies_between_the_rounds_is_named() {
    // Rank 1 pushes its words, of which all are selected, but never merges.
    let spec = Spec { rows: 1, ..spec(3) };
    everywhere(&spec, 2, |group| {
        let layer = Layer::new(group, vec![on_one_rank(&spec, 1, 900, 7)], 0);
        group.select(&layer, 1).unwrap();
        group.launch_on(&layer, &[0, 2]).unwrap();
        for rank in [0, 2] {
            let verdict = group.ranks[rank].exchange.check(&group.ranks[rank].stream);
            assert!(
                matches!(
                    verdict,
                    Err(DcpError::PeerLate { rank: own, peer: 1, row: 0, epoch: 1, waiting: Waiting::Rescue })
                    if own == rank
                ),
                "{verdict:?}"
            );
            assert!(layer.is_empty(group, rank));
        }
        group.reset();
        group.run(&layer);
    });
}

#[test]
fn graphs_replay_with_new_data_and_mix_with_eager_calls() {
    let spec = spec(2);
    everywhere(&spec, 3, |group| {
        let mut layers = [1, 2, 3].map(|seed| Layer::new(group, rows(&spec, seed), 0));
        for _ in 0..3 {
            group.run(&layers[0]);
        }
        // An odd number of exchanges per graph: neighbouring replays use opposite parities.
        let graphs: Vec<_> = (0..2).map(|rank| group.capture(&[&layers[0], &layers[1], &layers[2]], rank)).collect();
        let replay = || {
            for (graph, rank) in graphs.iter().zip(&group.ranks) {
                graph.launch(&rank.stream).unwrap();
            }
        };
        for round in 0..4 {
            for (i, layer) in layers.iter_mut().enumerate() {
                layer.replace(group, rows(&spec, 10 * round + i as u64));
                layer.poison(group);
            }
            replay();
            group.check().into_iter().for_each(|verdict| verdict.unwrap());
            layers.iter().for_each(|layer| layer.verify(group));
        }
        for _ in 0..3 {
            replay();
        }
        group.launch(&layers[1]);
        replay();
        group.check().into_iter().for_each(|verdict| verdict.unwrap());
        layers.iter().for_each(|layer| layer.verify(group));
        assert!(group.counters().iter().all(|counters| counters[0] == [3 + 3 * 8 + 1; 3]));
    });
}

#[test]
fn launches_that_do_not_fit_are_refused() {
    let spec = spec(2);
    let group = Group::simulated(&spec, SimConfig::default());
    let layer = Layer::new(&group, rows(&spec, 1), 0);
    let rank = &group.ranks[0];
    let refused = |step: MergeStep<'_>| match rank.merge.launch(&rank.stream, &rank.exchange, &step) {
        Err(DcpError::Kernel(KernelError::BufferTooShort { buffer, .. })) => buffer,
        other => panic!("{other:?}"),
    };
    let step = || layer.merge_step(0);
    let buffers = &layer.buffers[0];
    assert_eq!(refused(MergeStep { ids: None, ..step() }), "ids");
    assert_eq!(refused(MergeStep { ids: Some(buffers.ids.view(..767).unwrap()), ..step() }), "ids");
    assert_eq!(refused(MergeStep { rows_out: buffers.rows_out.view(..767).unwrap(), ..step() }), "rows_out");
    assert_eq!(refused(MergeStep { valid_out: buffers.valid_out.view(..2).unwrap(), ..step() }), "valid_out");
    assert_eq!(refused(MergeStep { valid_out: buffers.valid_out.view(..4).unwrap(), ..step() }), "exchange rows");
    assert_eq!(refused(MergeStep { pitch: 512, ..step() }), "pitch");
    assert_eq!(refused(MergeStep { length_max: 4097, ..step() }), "exchange rows in keys");
    assert_eq!(refused(MergeStep { logits: buffers.logits.view(..100).unwrap(), ..step() }), "logits");
    let other = Spec { interleave: 2, ..spec.clone() };
    for shape in [other.merge(), spec.merge().with_gathered(true)] {
        let merge = ExchangeMerge::new(&rank.device, shape).unwrap();
        let wrong = merge.launch(&rank.stream, &rank.exchange, &step());
        assert!(matches!(wrong, Err(DcpError::WrongExchange { .. })));
    }
    // Nothing was launched.
    assert_eq!(group.counters()[0][0], [0; 3]);
}

#[test]
fn memory_of_another_device_is_refused_by_name() {
    let group = Group::simulated(&spec(3), SimConfig::default());
    let layer = Layer::new(&group, rows(&group.spec, 1), 0);
    let (rank, other, theirs) = (&group.ranks[0], &group.ranks[1], &layer.buffers[1]);
    let (merge_step, theirs_merged) = (|| layer.merge_step(0), || layer.merge_step(1));
    let merged = |exchange: &Exchange, step: MergeStep<'_>| match rank.merge.launch(&rank.stream, exchange, &step) {
        Err(DcpError::Device(gpu::Error::WrongDevice { what, .. })) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(merged(&other.exchange, merge_step()), "exchange");
    let own = &rank.exchange;
    assert_eq!(merged(own, MergeStep { logits: theirs.logits.as_view(), ..merge_step() }), "logits");
    assert_eq!(merged(own, MergeStep { tops: theirs.tops.as_view(), ..merge_step() }), "tops");
    assert_eq!(merged(own, MergeStep { row_ends: theirs.row_ends.as_view(), ..merge_step() }), "row ends");
    assert_eq!(merged(own, MergeStep { table: theirs_merged().table, ..merge_step() }), "kv table");
    assert_eq!(merged(own, MergeStep { rows_out: theirs_merged().rows_out, ..merge_step() }), "rows_out");
    assert_eq!(merged(own, MergeStep { valid_out: theirs_merged().valid_out, ..merge_step() }), "valid_out");
    assert_eq!(merged(own, MergeStep { ids: theirs_merged().ids, ..merge_step() }), "ids");

    let local_step = || layer.local_step(0, Some(own));
    let local_topk = rank.local_topk.as_ref().expect("two rounds");
    let selected = |step: LocalTopkStep<'_>| match local_topk.launch(&rank.stream, &step) {
        Err(KernelError::Device(gpu::Error::WrongDevice { what, .. })) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(selected(layer.local_step(0, Some(&other.exchange))), "exchange");
    assert_eq!(selected(LocalTopkStep { logits: theirs.logits.as_view(), ..local_step() }), "logits");
    assert_eq!(selected(LocalTopkStep { tops: theirs.tops.as_view(), ..local_step() }), "tops");
    assert_eq!(selected(LocalTopkStep { row_ends: theirs.row_ends.as_view(), ..local_step() }), "row ends");
    assert_eq!(selected(LocalTopkStep { out: theirs.b_rows.as_view(), ..local_step() }), "out");
    assert_eq!(selected(LocalTopkStep { counts: theirs.counts.as_view(), ..local_step() }), "counts");

    let ends = LocalEnds::new(&rank.device, group.spec.own(), 0, 4096).unwrap();
    let (mine, theirs) = (layer.buffers[0].row_ends.as_view(), theirs.row_ends.as_view());
    for (from, to) in [(&mine, &theirs), (&theirs, &mine)] {
        let refused = ends.launch(&rank.stream, from, to);
        assert!(matches!(refused, Err(DcpError::Device(gpu::Error::WrongDevice { .. }))), "{refused:?}");
    }
    // Nothing was launched.
    assert_eq!(group.counters()[0][0], [0; 3]);
}

#[test]
fn ranks_that_disagree_or_stay_away_cannot_set_up() {
    let own = Ownership::new(2, 1).unwrap();
    let shapes = [4, 5].map(|rows| ExchangeShape::new(own, rows, 128, 256, 4096).unwrap());
    let devices = Device::simulated_group(SimConfig { devices: 2, ..SimConfig::default() });
    let members = || -> Vec<Arc<dyn Rendezvous>> {
        in_process(2).into_iter().map(|member| Arc::new(member) as Arc<dyn Rendezvous>).collect()
    };
    let group = members();
    let errors = as_every_rank(2, |rank| Exchange::new(&devices[rank], group[rank].clone(), shapes[rank]).unwrap_err());
    for (rank, error) in errors.into_iter().enumerate() {
        let DcpError::PeerMismatch { rank: own, peer, theirs, .. } = error else { panic!("{error:?}") };
        assert_eq!((own, peer, theirs), (rank, 1 - rank, shapes[1 - rank].to_string()));
    }

    let limits = Limits { collective: Duration::from_millis(50), ..Limits::default() };
    let error = Exchange::with_limits(&devices[0], members()[0].clone(), shapes[0], limits).unwrap_err();
    assert!(matches!(error, DcpError::Rendezvous(RendezvousError::Timeout { rank: 0, missing: 1, .. })), "{error:?}");

    let three = ExchangeShape::new(Ownership::new(3, 1).unwrap(), 4, 128, 256, 4096).unwrap();
    let error = Exchange::new(&devices[0], members()[0].clone(), three).unwrap_err();
    assert!(matches!(error, DcpError::GroupSize { group: 2, shape: 3 }));

    // Devices of two machines do not see each other's memory.
    let strangers = [Device::simulated(SimConfig::default()), Device::simulated(SimConfig::default())];
    let group = members();
    let errors = as_every_rank(2, |rank| Exchange::new(&strangers[rank], group[rank].clone(), shapes[0]).unwrap_err());
    for error in errors {
        assert!(matches!(error, DcpError::PeerUnmappable { rank: 0, peer: 1, .. }), "{error:?}");
    }
}

//! An exchange grows for larger steps, until a graph has captured it.

mod common;

use common::{Group, Layer, Rank, Spec, as_every_rank, in_every_order, on_gpu, on_one_rank};
use dsa_core::generate::LogitPattern;
use dsa_dcp::DcpError;

fn rows(spec: &Spec, n: u64) -> Vec<Vec<u16>> {
    (0..n).map(|i| on_one_rank(spec, i as usize % spec.ranks, 600 + i as usize, i)).collect()
}

#[test]
fn a_grown_exchange_serves_larger_steps_with_the_same_kernels() {
    [Spec::new(3, 128, 256).ordinary(), Spec::new(3, 128, 384).direct()].into_iter().for_each(grows);
}

fn grows(spec: Spec) {
    let spec = &Spec { rows: 2, ..spec };
    let body = |group: &mut Group| {
        let small = Layer::new(group, rows(spec, 2), 0);
        (0..3).for_each(|_| group.run(&small));
        let grown = as_every_rank(3, |rank| {
            let Rank { exchange, stream, .. } = &group.ranks[rank];
            exchange.grown(stream, 7).unwrap()
        });
        for (rank, grown) in group.ranks.iter_mut().zip(grown) {
            assert_eq!((grown.shape().rows(), grown.rank()), (7, rank.exchange.rank()));
            assert!(grown.shape().shares_kernels(&rank.exchange.shape()));
            rank.exchange = grown;
        }
        // A new space of epochs, and the merges that were built for the other.
        let large = Layer::new(group, [rows(spec, 5), vec![LogitPattern::Ties.row(1, 900)]].concat(), 1);
        (0..2).for_each(|_| large_run(group, &large));
        small.poison(group);
        group.launch(&small);
        group.check().into_iter().for_each(|verdict| verdict.unwrap());
        small.verify(group);
    };
    in_every_order(spec, 1, |group| body(&mut regroup(group)));
    on_gpu(spec, |group| body(&mut regroup(group)));
}

/// The same ranks, to be changed.
fn regroup(group: &Group) -> Group {
    let devices: Vec<_> = group.ranks.iter().map(|rank| rank.device.clone()).collect();
    Group::new(&group.spec, &devices, None, None)
}

fn large_run(group: &Group, layer: &Layer) {
    layer.poison(group);
    group.launch(layer);
    group.check().into_iter().for_each(|verdict| verdict.unwrap());
    layer.verify(group);
}

#[test]
fn an_exchange_that_one_rank_has_captured_does_not_grow_on_any() {
    let spec = Spec { rows: 2, ..Spec::new(2, 128, 256) };
    let body = |group: &Group| {
        let layer = Layer::new(group, rows(&spec, 2), 0);
        let graph = group.capture(&[&layer], 1);
        let errors = as_every_rank(2, |rank| {
            let Rank { exchange, stream, .. } = &group.ranks[rank];
            exchange.grown(stream, 3).unwrap_err()
        });
        for error in errors {
            assert!(matches!(error, DcpError::Captured { rank: 1, rows: 3, have: 2 }), "{error}");
        }
        // It goes on as it is.
        drop(graph);
        group.run(&layer);
    };
    in_every_order(&spec, 0, body);
    on_gpu(&spec, body);
}

#[test]
fn growth_beyond_the_limits_is_refused() {
    let spec = Spec { rows: 2, ..Spec::new(1, 128, 256) };
    in_every_order(&spec, 0, |group| {
        let Rank { exchange, stream, .. } = &group.ranks[0];
        for rows in [0, 8193] {
            let error = exchange.clone().grown(stream, rows).unwrap_err();
            assert!(matches!(error, DcpError::RowsOutOfRange { max: 8192, .. }), "{error}");
        }
    });
}

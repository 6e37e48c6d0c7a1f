//! The select kernel where the CTAs of a cluster share a row.

use dsa_core::generate::LogitPattern;
use dsa_kernels::select;
use gpu::{SimConfig, SimTrapKind as Kind};
use ptx::op::{Bin, Op, Operand};
use ptx::{Scope, Target};

use crate::common::*;
use crate::select::{check_select_mutant, run_select_mutant};

const CLUSTER: Source = Source { path: "topk/cluster.rs", text: include_str!("../../src/topk/cluster.rs") };

/// Rows of every way through the kernel of a cluster of two: from supertops on; a list whose keys do not spread beyond the
/// bins, and one whose keys do; no list, one vector a thread and several; all keys.
fn shared_rows() -> Rows {
    let rows = [(300_000, LogitPattern::Gaussian), (34_000, LogitPattern::FewDistinct(9))];
    let rows = rows.into_iter().chain([(34_000, LogitPattern::Descending), (700, LogitPattern::Gaussian)]);
    let rows = rows.chain([20_000, 100].map(|len| (len, LogitPattern::Gaussian)));
    Rows::new(128, rows.map(|(len, pattern)| pattern.row(len as u64, len)).collect()).cluster(2)
}

const IN_CLUSTER: [&str; 8] = [
    "select/kernel.rs",
    "src/topk.rs",
    "topk/run.rs",
    "topk/places.rs",
    "topk/cluster.rs",
    "device/scan.rs",
    "device/radix.rs",
    "ptx/src/cluster.rs",
];

#[test]
fn shared_select_as_it_is_passes_in_every_mutation_order() {
    let rows = shared_rows();
    let kernel = select::build(&rows.shape(), Target::Sm90a).unwrap();
    for config in orders(4) {
        let end = run_select_mutant(SimConfig { sms: 1, ..config }, &rows, &kernel);
        assert!(matches!(end, End::Finished { right: true }), "{end:?}");
    }
}

#[test]
fn shared_select_needs_every_one_of_its_barriers() {
    let rows = shared_rows();
    let whole = Mutant::of(&select::build(&rows.shape(), Target::Sm90a).unwrap());
    for at in whole.barriers() {
        println!("without the barrier of {}", whole.0.insts[at].loc);
        let kinds = [Kind::DataRace, Kind::Uninitialized];
        check_select_mutant(&rows, Expected { kinds: &kinds, files: &IN_CLUSTER, orders: Orders::Some }, |m| {
            m.0.insts.remove(at);
        });
    }
}

/// Its only barrier of the cluster says that all CTAs have started.
#[test]
fn shared_select_needs_its_barrier_of_the_cluster() {
    let kinds = [Kind::DataRace, Kind::Mbarrier, Kind::OutOfBounds, Kind::Freed];
    check_select_mutant(&shared_rows(), Expected { kinds: &kinds, files: &IN_CLUSTER, orders: Orders::Some }, |m| {
        m.0.insts.retain(|inst| !matches!(inst.op, Op::ClusterArrive { .. } | Op::ClusterWait));
    });
}

#[test]
fn shared_select_needs_its_barriers_initialised_for_peers() {
    let kinds = [Kind::DataRace, Kind::Mbarrier];
    check_select_mutant(&shared_rows(), Expected { kinds: &kinds, files: &IN_CLUSTER, orders: Orders::Every }, |m| {
        m.drop(CLUSTER, ("fn arrive", "fence_mbarrier_init();"), |op| *op == Op::FenceMbarrierInit);
    });
}

#[test]
fn shared_select_needs_every_wait_for_its_peers() {
    let kinds = [Kind::DataRace, Kind::Uninitialized, Kind::ResultPending, Kind::ExitInFlight];
    for place in [("fn wait", "arrived.wait_cluster(0);"), ("fn deal_list", "arrived.wait_cluster(0);")] {
        let expected = Expected { kinds: &kinds, files: &IN_CLUSTER, orders: Orders::Every };
        check_select_mutant(&shared_rows(), expected, |m| m.never_wait(CLUSTER, place));
        // Of this CTA's scope only.
        check_select_mutant(&shared_rows(), expected, |m| {
            m.edit(CLUSTER, place, |op| match *op {
                Op::MbarTryWait { dst, addr, parity, .. } => {
                    Some(Op::MbarTryWait { dst, addr, parity, scope: Scope::Cta })
                }
                _ => None,
            });
        });
    }
}

#[test]
fn shared_select_expects_exactly_what_its_peers_send() {
    for place in [("fn wait", "arrived.arrive_expect(bytes)"), ("fn deal_list", "arrived.arrive_expect(")] {
        for more in [-4, 4] {
            let premature = [Kind::ResultPending, Kind::DataRace];
            let kinds =
                [&[Kind::ExpectTx, Kind::Deadlock, Kind::Mbarrier, Kind::ExitInFlight][..], &premature].concat();
            let expected = Expected { kinds: &kinds, files: &IN_CLUSTER, orders: Orders::Few };
            check_select_mutant(&shared_rows(), expected, |m| {
                m.edit(CLUSTER, place, |op| match *op {
                    Op::MbarArriveExpectTx { addr, bytes: Operand::Imm(bytes) } => {
                        let bytes = Operand::Imm(bytes.wrapping_add_signed(more));
                        Some(Op::MbarArriveExpectTx { addr, bytes })
                    }
                    _ => None,
                });
            });
        }
    }
}

/// A second list by the barrier of the first, whose phase is over: nobody would wait for it.
#[test]
fn shared_select_needs_a_barrier_of_its_own_for_each_list() {
    let kinds =
        [Kind::DataRace, Kind::Mbarrier, Kind::ResultPending, Kind::ExpectTx, Kind::Deadlock, Kind::ExitInFlight];
    check_select_mutant(&shared_rows(), Expected { kinds: &kinds, files: &IN_CLUSTER, orders: Orders::Every }, |m| {
        m.edit(CLUSTER, ("fn deal_list", "number + self.digits"), |op| match op {
            Op::Bin { op: Bin::Add, dst, b, .. } => Some(Op::Mov { dst: *dst, src: *b }),
            _ => None,
        });
    });
}

/// A second exchange in the slots of the first: a peer may not have read those yet.
#[test]
fn shared_select_needs_slots_of_their_own_for_each_exchange() {
    let kinds = [Kind::DataRace, Kind::Mbarrier, Kind::ResultPending, Kind::Deadlock, Kind::ExpectTx];
    check_select_mutant(&shared_rows(), Expected { kinds: &kinds, files: &IN_CLUSTER, orders: Orders::Every }, |m| {
        m.edit(CLUSTER, ("fn find_topdown", "self.exchange.add(1u32);"), |op| match op {
            Op::Bin { op: Bin::Add, dst, a, .. } => Some(Op::Mov { dst: *dst, src: *a }),
            _ => None,
        });
    });
}

//! Local top-k with its push: by one CTA a row, and where the CTAs of a cluster share it.

use dsa_core::generate::LogitPattern;
use dsa_core::numerics::order16::bits_of;
use dsa_kernels::local_topk::{self, IndexerLocalTopk, LocalTopkArgs, LocalTopkShape, LocalTopkStep};
use gpu::{Device, SimConfig, SimTrapKind as Kind};
use ptx::op::{Bin, Op, Operand};
use ptx::{Kernel, Scope, Target};

use crate::common::*;

const KERNEL: Source = Source { path: "local_topk/kernel.rs", text: include_str!("../../src/local_topk/kernel.rs") };
const B_ROW: Source = Source { path: "topk/b_row.rs", text: include_str!("../../src/topk/b_row.rs") };
const PLACES: Source = Source { path: "topk/places.rs", text: include_str!("../../src/topk/places.rs") };
const CLUSTER: Source = Source { path: "topk/cluster.rs", text: include_str!("../../src/topk/cluster.rs") };

const N: usize = 128;
const RANKS: usize = 2;

/// What a mutation may be noticed in.
const FILES: [&str; 10] = [
    "local_topk/kernel.rs",
    "src/topk.rs",
    "topk/b_row.rs",
    "topk/run.rs",
    "topk/places.rs",
    "topk/cluster.rs",
    "device/scan.rs",
    "device/radix.rs",
    "device/ownership.rs",
    "ptx/src/cluster.rs",
];

fn shape(cluster: u32) -> LocalTopkShape {
    LocalTopkShape::full(N).unwrap().with_cluster(cluster).unwrap().with_push(RANKS).unwrap()
}

fn kernel(cluster: u32) -> Kernel<LocalTopkArgs> {
    local_topk::build(&shape(cluster), Target::Sm90a).unwrap()
}

/// Rows of every way through the kernel of up to two CTAs: planes, to some word of which both have bits; a list whose keys do
/// not spread beyond the bins, and one whose keys do; no list, several vectors a thread; all keys.
fn rows() -> Vec<Vec<u16>> {
    let planes = (0..131_072).map(|i| bits_of(if i % 1100 == 3 { 0xA000 } else { 0x9000 + (i % 5) as u16 })).collect();
    let rows = [(40_000, LogitPattern::FewDistinct(9)), (34_000, LogitPattern::Descending)];
    let rows = rows.into_iter().chain([(9_000, LogitPattern::FewDistinct(4)), (100, LogitPattern::Gaussian)]);
    let rows = rows.map(|(len, pattern)| canonical(pattern.row(len as u64, len)));
    [planes].into_iter().chain(rows).collect()
}

fn run(config: SimConfig, cluster: u32, rows: &[Vec<u16>], kernel: &Kernel<LocalTopkArgs>) -> End {
    let device = Device::simulated(config);
    let topk = IndexerLocalTopk::from_kernel(&device, shape(cluster), kernel).unwrap();
    let rig = LocalRig::new(&device, N, rows, 1);
    let boxes = Boxes::new(&device, N, [RANKS, 1], &vec![7; rig.rows]);
    let status = device.upload(&[0u32; 4]).unwrap();
    let push = Some(boxes.push(&status, rig.length_max));
    topk.launch(&rig.stream, &LocalTopkStep { push, ..rig.step() }).unwrap();
    End::of(rig.stream.synchronize().map(|()| {
        let pushed = boxes.expected(N, rows, rig.rows);
        rig.read() == expected_b_rows(N, rows, 1) && boxes.read(&rig.stream).iter().all(|slots| *slots == pushed)
    }))
}

/// Breaks the kernel and expects the simulator to say so.
#[track_caller]
fn check(cluster: u32, kinds: &[Kind], orders: Orders, mutate: impl FnOnce(&mut Mutant)) {
    let mut mutant = Mutant::of(&kernel(cluster));
    mutate(&mut mutant);
    let (rows, kernel) = (rows(), mutant.kernel());
    let expected = Expected { kinds, files: &FILES, orders };
    check_mutant(expected, |config| run(config, cluster, &rows, &kernel));
}

/// Breaks the kernel so that what it writes is wrong, or the simulator says more.
#[track_caller]
fn check_wrong(cluster: u32, mutate: impl FnOnce(&mut Mutant)) {
    let mut mutant = Mutant::of(&kernel(cluster));
    mutate(&mut mutant);
    let (rows, kernel) = (rows(), mutant.kernel());
    for config in orders(1) {
        let end = run(SimConfig { sms: 1, fuel: 20_000_000, ..config }, cluster, &rows, &kernel);
        assert!(!matches!(end, End::Finished { right: true }), "not noticed");
    }
}

#[test]
fn local_topk_needs_its_staged_octets_before_lanes_read_each_others() {
    for cluster in [1, 2] {
        check(cluster, &[Kind::DataRace, Kind::Uninitialized], Orders::Every, |m| {
            m.drop(PLACES, ("pub(super) fn fill(&self, run", "sync_warp(); // ORDER"), |op| {
                matches!(op, Op::BarWarp { .. })
            });
        });
    }
}

#[test]
fn local_topk_as_it_is_passes_in_every_mutation_order() {
    for cluster in [1, 2] {
        let (rows, kernel) = (rows(), kernel(cluster));
        for config in orders(4) {
            let end = run(SimConfig { sms: 1, ..config }, cluster, &rows, &kernel);
            assert!(matches!(end, End::Finished { right: true }), "{end:?}");
        }
    }
}

#[test]
fn local_topk_needs_every_one_of_its_barriers() {
    for cluster in [1, 2] {
        for at in Mutant::of(&kernel(cluster)).barriers() {
            println!("clusters of {cluster}, without the barrier of {}", Mutant::of(&kernel(cluster)).0.insts[at].loc);
            check(cluster, &[Kind::DataRace, Kind::Uninitialized], Orders::Some, |m| {
                m.0.insts.remove(at);
            });
        }
    }
}

/// Its only barrier of the cluster says that all CTAs have started.
#[test]
fn shared_local_topk_needs_its_barrier_of_the_cluster() {
    let kinds = [Kind::DataRace, Kind::Mbarrier, Kind::OutOfBounds, Kind::Freed];
    check(2, &kinds, Orders::Some, |m| {
        m.0.insts.retain(|inst| !matches!(inst.op, Op::ClusterArrive { .. } | Op::ClusterWait));
    });
}

#[test]
fn shared_local_topk_needs_its_barriers_initialised_for_peers() {
    check(2, &[Kind::DataRace, Kind::Mbarrier], Orders::Every, |m| {
        m.drop(CLUSTER, ("fn arrive", "fence_mbarrier_init();"), |op| *op == Op::FenceMbarrierInit);
    });
}

#[test]
fn shared_local_topk_needs_every_wait_for_its_peers() {
    let kinds = [Kind::DataRace, Kind::Uninitialized, Kind::ResultPending, Kind::ExitInFlight];
    for anchor in ["fn wait", "fn deal_list", "fn await_planes"] {
        let place = (anchor, "arrived.wait_cluster(0);");
        check(2, &kinds, Orders::Every, |m| m.never_wait(CLUSTER, place));
        // Of this CTA's scope only.
        check(2, &kinds, Orders::Every, |m| {
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
fn shared_local_topk_expects_exactly_what_its_peers_send() {
    let kinds =
        [Kind::ExpectTx, Kind::Deadlock, Kind::Mbarrier, Kind::ExitInFlight, Kind::ResultPending, Kind::DataRace];
    for anchor in ["fn wait", "fn deal_list", "fn await_planes"] {
        for more in [-4, 4] {
            check(2, &kinds, Orders::Few, |m| {
                m.edit(CLUSTER, (anchor, "arrived.arrive_expect("), |op| match *op {
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

/// A second exchange in the slots of the first: a peer may not have read those yet.
#[test]
fn shared_local_topk_needs_slots_of_their_own_for_each_exchange() {
    let kinds = [Kind::DataRace, Kind::Mbarrier, Kind::ResultPending, Kind::Deadlock, Kind::ExpectTx];
    check(2, &kinds, Orders::Every, |m| {
        m.edit(CLUSTER, ("fn find_topdown", "self.exchange.add(1u32);"), |op| match op {
            Op::Bin { op: Bin::Add, dst, a, .. } => Some(Op::Mov { dst: *dst, src: *a }),
            _ => None,
        });
    });
}

#[test]
fn shared_local_topk_sends_planes_of_every_cta() {
    check(2, &[Kind::ExpectTx, Kind::Deadlock], Orders::Few, |m| {
        m.drop(CLUSTER, ("fn send_planes", "to.store_async("), |op| matches!(op, Op::StAsync { .. }));
    });
    // A slot for each: one would be written by all.
    check(2, &[Kind::DataRace, Kind::Uninitialized], Orders::Every, |m| {
        m.edit(CLUSTER, ("fn send_planes", "rank.mad("), |op| match op {
            Op::Mad { dst, c, .. } => Some(Op::Mov { dst: *dst, src: *c }),
            _ => None,
        });
    });
    // The bits of both.
    check_wrong(2, |m| {
        m.edit(CLUSTER, ("fn two_of_planes", "[a | c, b | d]"), |op| match op {
            Op::Bin { op: Bin::Or, dst, a, .. } => Some(Op::Mov { dst: *dst, src: *a }),
            _ => None,
        });
    });
}

#[test]
fn shared_local_topk_waits_for_planes_only_where_they_are_sent() {
    for (anchor, snippet) in [("fn send_planes", "when(part.planes"), ("fn await_planes", "when(part.planes")] {
        println!("{anchor}");
        check_wrong(2, |m| {
            m.drop(B_ROW, (anchor, snippet), |op| matches!(op, Op::Bra { .. }));
        });
    }
}

/// Words and pairs that two CTAs, or two runs, share.
#[test]
fn shared_local_topk_pushes_its_own_halves_alone() {
    check_wrong(2, |m| m.decide(KERNEL, ("fn push(", "let own = [0, 1]"), true));
}

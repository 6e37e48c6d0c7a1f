//! The select kernel.

use dsa_core::generate::LogitPattern;
use dsa_core::numerics::order16::bits_of;
use dsa_kernels::select::{self, IndexerSelect, SelectArgs};
use gpu::{Device, SimConfig, SimTrapKind as Kind};
use ptx::op::{Bin, Cmp, Op, Operand, Space};
use ptx::{Kernel, Target};

use crate::common::*;

const SELECT: Source = Source { path: "select/kernel.rs", text: include_str!("../../src/select/kernel.rs") };
const RUN: Source = Source { path: "topk/run.rs", text: include_str!("../../src/topk/run.rs") };
const PLACES: Source = Source { path: "topk/places.rs", text: include_str!("../../src/topk/places.rs") };
const SCAN: Source = Source { path: "device/scan.rs", text: include_str!("../../../dsa-core/src/device/scan.rs") };

/// Rows of every way through the kernel: from supertops on, from tops on to a list whose keys span more than the bins, and to one
/// whose keys do not, all vectors, several a thread and one, all keys.
fn select_rows() -> Rows {
    let rows =
        [(140_000, LogitPattern::Gaussian), (17_000, LogitPattern::Descending), (18_000, LogitPattern::FewDistinct(9))];
    let rows = rows.into_iter().chain([10_000, 300, 100].map(|len| (len, LogitPattern::Gaussian)));
    Rows::new(128, rows.map(|(len, pattern)| pattern.row(len as u64, len)).collect())
}

pub fn run_select_mutant(config: SimConfig, rows: &Rows, kernel: &Kernel<SelectArgs>) -> End {
    let device = Device::simulated(config);
    let select = IndexerSelect::from_kernel(&device, rows.shape(), kernel).unwrap();
    let rig = SelectRig::new(&device, rows);
    rig.poison();
    select.launch(&rig.stream, &rig.step()).unwrap();
    End::of(rig.stream.synchronize().map(|()| {
        let want = rows.expected();
        let [out, counts, ids] = rig.read();
        dsa_core::oracle::select::check_selection(&want, rows.topk, &out, &counts, Some(&ids)).is_ok()
    }))
}

/// Breaks the select kernel of `rows` and expects the simulator to say so.
#[track_caller]
pub fn check_select_mutant(rows: &Rows, expected: Expected<'_>, mutate: impl FnOnce(&mut Mutant)) {
    let mut mutant = Mutant::of(&select::build(&rows.shape(), Target::Sm90a).unwrap());
    mutate(&mut mutant);
    let kernel = mutant.kernel();
    check_mutant(expected, |config| run_select_mutant(config, rows, &kernel));
}

fn in_select<'a>(kinds: &'a [Kind], orders: Orders) -> Expected<'a> {
    Expected { kinds, files: &["select/kernel.rs", "src/topk.rs", "topk/run.rs", "topk/places.rs"], orders }
}

#[test]
fn select_needs_every_one_of_its_barriers() {
    let rows = select_rows();
    let whole = Mutant::of(&select::build(&rows.shape(), Target::Sm90a).unwrap());
    let kinds = [Kind::DataRace, Kind::Uninitialized];
    let files =
        ["select/kernel.rs", "src/topk.rs", "topk/run.rs", "topk/places.rs", "device/scan.rs", "device/radix.rs"];
    for at in whole.barriers() {
        println!("without the barrier of {}", whole.0.insts[at].loc);
        check_select_mutant(&rows, Expected { kinds: &kinds, files: &files, orders: Orders::Some }, |m| {
            m.0.insts.remove(at);
        });
    }
}

#[test]
fn select_needs_its_codes_before_lanes_read_each_others() {
    let kinds = [Kind::DataRace, Kind::Uninitialized];
    check_select_mutant(&select_rows(), in_select(&kinds, Orders::Every), |m| {
        m.drop(PLACES, ("pub(super) fn find", "sync_warp(); // ORDER"), |op| matches!(op, Op::BarWarp { .. }));
    });
}

#[test]
fn select_needs_its_zeroed_bins() {
    check_select_mutant(&select_rows(), in_select(&[Kind::Uninitialized], Orders::Every), |m| {
        let is_store = |op: &Op| matches!(op, Op::St { space: Space::Shared, .. });
        m.drop(SCAN, ("pub fn fill", "at.store_vec([Reg::from(value); 4])"), is_store);
    });
}

#[test]
fn select_must_not_read_past_its_tops() {
    let rows = Rows::new(128, vec![LogitPattern::Gaussian.row(1, 17_000)]);
    let kinds = [Kind::Uninitialized, Kind::OutOfBounds];
    check_select_mutant(&rows, in_select(&kinds, Orders::Every), |m| {
        m.edit(RUN, ("pub(super) fn load(&self", "n.lt(total)"), |op| match op {
            Op::Setp { cmp: Cmp::Lt, ty, dst, a, b } => {
                Some(Op::Setp { cmp: Cmp::Le, ty: *ty, dst: *dst, a: *a, b: *b })
            }
            _ => None,
        });
    });
}

#[test]
fn select_must_not_read_past_the_tops_that_its_supertops_are_of() {
    let rows = Rows::new(128, vec![LogitPattern::Gaussian.row(1, 140_000)]);
    let kinds = [Kind::Uninitialized, Kind::OutOfBounds];
    check_select_mutant(&rows, in_select(&kinds, Orders::Every), |m| {
        m.edit(RUN, ("fn load_supertops", "(first + chunk).lt(end)"), |op| match op {
            Op::Setp { cmp: Cmp::Lt, ty, dst, a, b } => {
                Some(Op::Setp { cmp: Cmp::Le, ty: *ty, dst: *dst, a: *a, b: *b })
            }
            _ => None,
        });
    });
}

/// The lanes of a chunk's loads give the words to each other: in another order they are other chunks' supertops.
#[test]
fn select_must_transpose_its_supertops() {
    let row = (0..140_000).map(|i| bits_of(0x9000 + u16::from(i >= 70_000 && i / 64 % 8 == 3)));
    let rows = Rows::new(128, vec![row.collect()]);
    let kernel = select::build(&rows.shape(), Target::Sm90a).unwrap();
    assert!(matches!(run_select_mutant(SimConfig::default(), &rows, &kernel), End::Finished { right: true }));
    let mut mutant = Mutant::of(&kernel);
    mutant.edit(RUN, ("fn exchange", "shuffle_xor("), |op| match op.clone() {
        Op::Shfl { mode, dst, src, lane: _, mask } => Some(Op::Shfl { mode, dst, src, lane: Operand::Imm(0), mask }),
        _ => None,
    });
    let end = run_select_mutant(SimConfig::default(), &rows, &mutant.kernel());
    assert!(!matches!(end, End::Finished { right: true }), "{end:?}");
}

#[test]
fn select_must_not_write_past_its_row() {
    // The last 352 threads have no slots. What follows an output may be another one, which then is raced for.
    let rows = Rows::new(640, vec![LogitPattern::Gaussian.row(1, 700)]);
    check_select_mutant(
        &rows,
        in_select(&[Kind::OutOfBounds, Kind::Uninitialized, Kind::DataRace], Orders::Every),
        |m| {
            m.decide(SELECT, ("fn quads", "index.lt(all)"), true);
        },
    );
}

#[test]
fn select_must_not_read_ends_of_rows_that_are_not_live() {
    let rows = Rows { spare: 1, ..select_rows() };
    check_select_mutant(&rows, in_select(&[Kind::OutOfBounds], Orders::Every), |m| {
        m.decide(SELECT, ("fn emit", "when(row.lt(p.rows)"), true);
    });
}

#[test]
fn select_loads_whole_aligned_vectors() {
    check_select_mutant(&select_rows(), in_select(&[Kind::Misaligned], Orders::Every), |m| {
        m.edit(RUN, ("fn load(&self, from", "from.load_vec::<4>()"), |op| match op.clone() {
            Op::Ld { space, ty, sem, cache, dsts, mut addr } => {
                addr.offset += 2;
                Some(Op::Ld { space, ty, sem, cache, dsts, addr })
            }
            _ => None,
        });
    });
}

#[test]
fn select_barriers_cannot_stand_where_one_lane_goes() {
    check_select_mutant(&select_rows(), in_select(&[Kind::Divergent, Kind::Deadlock], Orders::Few), |m| {
        let barrier = Op::BarSync { id: Operand::Imm(0), threads: None };
        m.insert(SELECT, ("fn write_row", "when(first, || p.counts"), barrier);
    });
}

#[test]
fn select_loops_end() {
    // 127 ties are taken, which ends within an octet.
    let mut row = vec![0x3F80; 300];
    row[200] = 0x4000;
    let rows = Rows::new(128, vec![row]);
    let mut mutant = Mutant::of(&select::build(&rows.shape(), Target::Sm90a).unwrap());
    mutant.edit(PLACES, ("fn each", "|| taken.set(taken.get() & !("), |op| match op {
        Op::Bin { op: Bin::And, dst, a, .. } => Some(Op::Mov { dst: *dst, src: *a }),
        _ => None,
    });
    let kernel = mutant.kernel();
    check_mutant(in_select(&[Kind::FuelExhausted], Orders::Every), |config| {
        run_select_mutant(SimConfig { fuel: 1_000_000, ..config }, &rows, &kernel)
    });
}

/// Select after a producer that writes its logits late.
#[test]
fn select_needs_its_dependency_wait() {
    let rows = Rows::new(128, vec![LogitPattern::Gaussian.row(1, 640)]);
    let mut mutant = Mutant::of(&select::build(&rows.shape(), Target::Sm90a).unwrap());
    // The way of short rows keeps its wait, or the launch could not overlap at all.
    let waits = |m: &Mutant| (0..m.0.insts.len()).filter(|i| m.0.insts[*i].op == Op::GridDepWait).collect::<Vec<_>>();
    let launches =
        |m: &Mutant| (0..m.0.insts.len()).filter(|i| m.0.insts[*i].op == Op::GridDepLaunch).collect::<Vec<_>>();
    assert_eq!((waits(&mutant).len(), launches(&mutant).len()), (2, 2));
    let at = launches(&mutant)[1];
    mutant.0.insts.remove(at);
    let at = waits(&mutant)[1];
    mutant.0.insts.remove(at);
    let kernel: Kernel<SelectArgs> = mutant.kernel();
    check_mutant(in_select(&[Kind::DataRace], Orders::Every), |config| {
        let device = Device::simulated(SimConfig { sms: 4, ..config });
        let select = IndexerSelect::from_kernel(&device, rows.shape(), &kernel).unwrap();
        let producer = Producer::new(&device);
        let (rig, from) = (SelectRig::new(&device, &rows), SelectRig::new(&device, &rows));
        producer.launch(&rig.stream, rig.taken_from(&from)).unwrap();
        select.launch(&rig.stream, &rig.step()).unwrap();
        End::of(rig.stream.synchronize().map(|()| true))
    });
}

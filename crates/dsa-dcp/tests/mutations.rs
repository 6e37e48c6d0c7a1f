//! Kernels broken one instruction at a time: the simulator's runs must notice each.

mod common;

use common::{Group, Layer, Rewrite, Spec, on_one_rank};
use dsa_core::generate::LogitPattern;
use dsa_dcp::merge::build;
use gpu::{Device, SimConfig};
use ptx::op::{Bin, Cmp, Op, Operand, RegId, Space};
use ptx::{KernelIr, Scope, Sem, Target, Ty};

const CALLS: usize = 6;

fn spec() -> Spec {
    Spec { interleave: 4, rows: 2, ..Spec::new(3, 128, 256) }
}

/// What goes wrong in a few calls back to back, one rank always behind the others, in one of `seeds` random orders.
fn fault(
    spec: &Spec,
    seeds: u64,
    epoch: u32,
    local: Option<Rewrite<'_>>,
    merge: Option<Rewrite<'_>>,
) -> Option<String> {
    (1..=seeds).find_map(|seed| {
        let config = SimConfig { devices: spec.ranks, ..SimConfig::seeded(seed) };
        let group = Group::new(spec, &Device::simulated_group(config), local, merge);
        group.set_counters(epoch, 0);
        let rows = |seed: u64| {
            vec![LogitPattern::Gaussian.row(seed, 900), on_one_rank(spec, seed as usize % spec.ranks, 800, seed)]
        };
        let layers = [1, 2].map(|seed| Layer::new(&group, rows(seed), 0));
        for call in 0..CALLS {
            if let Err(error) = group.launch_skewed(&layers[call % 2], seed as usize % spec.ranks, true) {
                return Some(error.to_string());
            }
        }
        if let Some(error) = group.check().into_iter().find_map(Result::err) {
            return Some(error.to_string());
        }
        layers.iter().find_map(|layer| layer.difference(&group).err())
    })
}

#[track_caller]
fn assert_caught(what: &str, seeds: u64, local: Option<Rewrite<'_>>, merge: Option<Rewrite<'_>>) -> String {
    let caught = fault(&spec(), seeds, 0, local, merge);
    let caught = caught.unwrap_or_else(|| panic!("{what}: nobody noticed in {seeds} orders"));
    println!("{what}: {}", caught.lines().next().unwrap_or_default());
    caught
}

/// Positions of instructions.
fn positions(ir: &KernelIr, is: impl Fn(&Op) -> bool) -> Vec<usize> {
    (0..ir.insts.len()).filter(|&i| is(&ir.insts[i].op)).collect()
}

/// The registers of each polled pair: its two halves.
fn polled_pairs(ir: &KernelIr) -> Vec<[RegId; 2]> {
    let pair = |op: &Op| match op {
        Op::Ld { space: Space::Global, ty: Ty::U64, sem: Sem::Relaxed(Scope::Sys), dsts, .. } => {
            Some(<[RegId; 2]>::try_from(&dsts[..]).expect("pairs of halves"))
        }
        _ => None,
    };
    ir.insts.iter().filter_map(|inst| pair(&inst.op)).collect()
}

/// Makes the check of one half's epoch always succeed.
fn ignore_epoch_of(half: usize) -> impl Fn(&mut KernelIr) {
    move |ir| {
        let pairs = polled_pairs(ir);
        assert!(!pairs.is_empty());
        for pair in pairs {
            let mut tags = ir.insts.iter().filter_map(|inst| match &inst.op {
                Op::Unpack { hi, src: Operand::Reg(src), .. } if *src == pair[half] => Some(*hi),
                _ => None,
            });
            let tag = tags.next().expect("the half is unpacked");
            drop(tags);
            let mut checks = 0;
            for inst in &mut ir.insts {
                if let Op::Setp { cmp: Cmp::Eq, a, b, .. } = &mut inst.op
                    && *a == Operand::Reg(tag)
                {
                    *a = *b;
                    checks += 1;
                }
            }
            assert_eq!(checks, 1);
        }
    }
}

/// Replaces the parity of the epoch by 0: `epoch & 1` becomes `epoch & 0`, for the first such instruction.
fn one_parity(ir: &mut KernelIr) {
    let is_parity = |op: &Op| matches!(op, Op::Bin { op: Bin::And, ty: Ty::U32, b: Operand::Imm(1), .. });
    // The epoch is the first value that is masked after it was loaded and advanced.
    let advanced = positions(ir, |op| matches!(op, Op::Selp { a: Operand::Imm(2), .. }));
    let Op::Selp { dst: epoch, .. } = ir.insts[advanced[0]].op else { unreachable!() };
    let mut changed = 0;
    for inst in &mut ir.insts {
        if is_parity(&inst.op)
            && let Op::Bin { a, b, .. } = &mut inst.op
            && *a == Operand::Reg(epoch)
        {
            *b = Operand::Imm(0);
            changed += 1;
        }
    }
    assert_eq!(changed, 1, "{}", ir.name);
}

#[test]
fn nothing_is_found_in_the_kernels_as_they_are() {
    assert_eq!(fault(&spec(), 8, 0, None, None), None);
    assert_eq!(fault(&Spec { hold: true, ..spec() }, 4, 0, None, None), None);
    assert_eq!(fault(&spec(), 4, u32::MAX - 2, None, None), None);
}

#[test]
fn each_half_needs_its_epoch() {
    for half in [0, 1] {
        let ignore = ignore_epoch_of(half);
        assert_caught(&format!("epoch of half {half} ignored"), 40, None, Some(&ignore));
    }
}

#[test]
fn one_parity_is_not_enough() {
    assert_caught("one parity", 40, Some(&one_parity), Some(&one_parity));
}

#[test]
fn an_epoch_of_the_wrong_parity_after_the_wrap_is_not_enough() {
    // Skipping 0 alone: the epoch after u32::MAX is 1, in the slot of u32::MAX.
    let skip_zero_alone = |ir: &mut KernelIr| {
        for inst in &mut ir.insts {
            if let Op::Selp { a: a @ Operand::Imm(2), .. } = &mut inst.op {
                *a = Operand::Imm(1);
            }
        }
    };
    let caught = fault(&spec(), 60, u32::MAX - 2, Some(&skip_zero_alone), Some(&skip_zero_alone));
    println!("{}", caught.expect("a rank overwrites what a slower one still reads"));
}

#[test]
fn the_epoch_moves_only_after_local_topk_has_ended() {
    let without_wait = |ir: &mut KernelIr| {
        // The last one, on the way to the outputs.
        let at = positions(ir, |op| *op == Op::GridDepWait).pop().unwrap();
        ir.insts.remove(at);
    };
    for hold in [false, true] {
        let caught =
            fault(&Spec { hold, ..spec() }, 10, 0, None, Some(&without_wait)).expect("a race with local top-k");
        assert!(caught.contains("race"), "{caught}");
    }
}

#[test]
fn the_list_is_complete_before_its_flag() {
    // The barrier between the stores of all threads and the release by some.
    let without_barrier = |ir: &mut KernelIr| {
        let flag = positions(ir, |op| matches!(op, Op::St { sem: Sem::Release(Scope::Sys), .. }));
        assert_eq!(flag.len(), 1);
        let before = positions(ir, |op| matches!(op, Op::BarSync { .. }));
        let at = before.into_iter().rfind(|&at| at < flag[0]).unwrap();
        ir.insts.remove(at);
    };
    assert_caught("no barrier before the flag", 40, None, Some(&without_barrier));
}

#[test]
fn the_flag_releases_its_list() {
    let relaxed = |ir: &mut KernelIr| {
        let mut changed = 0;
        for inst in &mut ir.insts {
            if let Op::St { sem: sem @ Sem::Release(Scope::Sys), .. } = &mut inst.op {
                *sem = Sem::Relaxed(Scope::Sys);
                changed += 1;
            }
        }
        assert_eq!(changed, 1);
    };
    assert_caught("flag not released", 40, None, Some(&relaxed));
    // Released to the wrong audience.
    let narrow = |ir: &mut KernelIr| {
        for inst in &mut ir.insts {
            if let Op::St { sem: sem @ Sem::Release(Scope::Sys), .. } = &mut inst.op {
                *sem = Sem::Release(Scope::Gpu);
            }
        }
    };
    assert_caught("flag released to one GPU", 40, None, Some(&narrow));
}

#[test]
fn everything_that_peers_write_is_accessed_at_system_scope() {
    let strong =
        |sem: Sem| matches!(sem, Sem::Relaxed(Scope::Sys) | Sem::Acquire(Scope::Sys) | Sem::Release(Scope::Sys));
    let merge = build(&spec().merge(), Target::Sm90a).unwrap();
    let count = |is: &dyn Fn(&Op) -> bool| positions(merge.ir(), is).len();
    // The flag is released and acquired; words and lists are relaxed.
    assert_eq!(count(&|op| matches!(op, Op::St { sem: Sem::Release(Scope::Sys), ty: Ty::U32, .. })), 1);
    assert_eq!(count(&|op| matches!(op, Op::Ld { sem: Sem::Acquire(Scope::Sys), ty: Ty::U32, .. })), 1);
    assert!(count(&|op| matches!(op, Op::Ld { space: Space::Global, sem, .. } if strong(*sem))) > 1);
    let text = merge.ptx();
    assert_eq!(text.matches("st.release.sys.global.b32").count(), 1);
    assert_eq!(text.matches("ld.acquire.sys.global.b32").count(), 1);
    assert!(text.matches("ld.relaxed.sys.global.v2.b64").count() > 0);
    let local = dsa_kernels::local_topk::build(&spec().exchange().local_topk().unwrap(), Target::Sm90a).unwrap();
    assert_eq!(local.ptx().matches("st.relaxed.sys.global.v2.b64").count(), 1);
    // An address of a weak access never is a peer's: those are all loaded from memory at run time.
    let loaded: Vec<RegId> = local
        .ir()
        .insts
        .iter()
        .filter_map(|inst| match &inst.op {
            Op::Ld { space: Space::Global, ty: Ty::U64, dsts, .. } => Some(dsts[0]),
            _ => None,
        })
        .collect();
    assert_eq!(loaded.len(), 1, "the peer's address");
}

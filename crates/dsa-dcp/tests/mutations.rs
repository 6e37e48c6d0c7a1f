//! Kernels broken one instruction at a time: the simulator's runs must notice each.

mod common;

use common::{Group, Layer, Rewrite, Spec, on_one_rank};
use dsa_core::generate::LogitPattern;
use dsa_dcp::ExchangeMerge;
use dsa_dcp::merge::build;
use gpu::{Device, SimConfig};
use ptx::op::{Bin, Cmp, Op, Operand, RegId, Space};
use ptx::{Kernel, KernelIr, Scope, Sem, Target, Ty};

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
            let saturating = |len| on_one_rank(spec, seed as usize % spec.ranks, len, seed);
            let mut rows =
                vec![LogitPattern::Gaussian.row(seed, 900), saturating(800), saturating(2400), vec![0x4000; 2400]];
            rows.truncate(spec.rows);
            rows
        };
        // Three, so that slots of either parity hold something else than what comes next.
        let layers = [1, 2, 3].map(|seed| Layer::new(&group, rows(seed), 0));
        for call in 0..CALLS {
            if let Err(error) = group.launch_skewed(&layers[call % 3], seed as usize % spec.ranks, true) {
                return Some(error.to_string());
            }
        }
        if let Some(error) = group.check().into_iter().find_map(Result::err) {
            return Some(error.to_string());
        }
        layers.iter().find_map(|layer| layer.difference(&group).err())
    })
}

/// Merges that select by themselves: their lists are what they push.
fn direct() -> Spec {
    let spec = Spec { topk: 512, ..spec() };
    assert!(spec.exchange().is_direct());
    spec
}

#[track_caller]
fn assert_caught(what: &str, seeds: u64, local: Option<Rewrite<'_>>, merge: Option<Rewrite<'_>>) -> String {
    assert_caught_in(&spec(), what, seeds, local, merge)
}

#[track_caller]
fn assert_caught_in(
    spec: &Spec,
    what: &str,
    seeds: u64,
    local: Option<Rewrite<'_>>,
    merge: Option<Rewrite<'_>>,
) -> String {
    let caught = fault(spec, seeds, 0, local, merge);
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

/// Makes the check of one half's tag always succeed, in the polls of words, or of lists.
fn ignore_tag_of(half: usize, polls: std::ops::Range<usize>) -> impl Fn(&mut KernelIr) {
    move |ir| {
        for pair in polled_pairs(ir)[polls.clone()].to_vec() {
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

/// Replaces the parity of the epoch by 0 wherever it is used: `epoch & 1` becomes `epoch & 0`.
fn one_parity(ir: &mut KernelIr) {
    // The epoch is the first value that is masked after it was loaded and advanced.
    let advanced = positions(ir, |op| matches!(op, Op::Selp { a: Operand::Imm(2), .. }));
    let Op::Selp { dst: epoch, .. } = ir.insts[advanced[0]].op else { unreachable!() };
    // Local top-k keeps it in shared memory, with the status.
    let kept = ir.insts.iter().filter_map(|inst| match &inst.op {
        Op::Ld { space: Space::Shared, dsts, .. } if dsts.len() == 2 => Some(dsts[0]),
        _ => None,
    });
    let kept: Vec<RegId> = kept.collect();
    let mut without_parity = |is_epoch: &dyn Fn(RegId) -> bool| {
        let mut changed = 0;
        for inst in &mut ir.insts {
            if let Op::Bin { op: Bin::And, ty: Ty::U32, a: Operand::Reg(a), b, .. } = &mut inst.op
                && *b == Operand::Imm(1)
                && is_epoch(*a)
            {
                *b = Operand::Imm(0);
                changed += 1;
            }
        }
        changed
    };
    let changed = match without_parity(&|a| a == epoch) {
        0 => without_parity(&|a| kept.contains(&a)),
        changed => changed,
    };
    assert!(changed > 0, "{}", ir.name);
}

/// The stores of pairs to peers.
fn pushes(ir: &KernelIr) -> Vec<usize> {
    positions(ir, |op| matches!(op, Op::St { space: Space::Global, sem: Sem::Relaxed(Scope::Sys), .. }))
}

/// Removes the barrier before the list is pushed.
fn push_unfinished(ir: &mut KernelIr) {
    let push = pushes(ir)[0];
    let barrier = positions(ir, |op| matches!(op, Op::BarSync { .. })).into_iter().rfind(|&at| at < push).unwrap();
    ir.insts.remove(barrier);
}

/// Removes the barrier after the last pair that is polled.
fn use_unfinished(ir: &mut KernelIr) {
    let is_poll =
        |op: &Op| matches!(op, Op::Ld { space: Space::Global, ty: Ty::U64, sem: Sem::Relaxed(Scope::Sys), .. });
    let last = positions(ir, is_poll).pop().unwrap();
    let barrier = positions(ir, |op| matches!(op, Op::BarSync { .. })).into_iter().find(|&at| at > last).unwrap();
    ir.insts.remove(barrier);
}

/// Stores pairs for this GPU alone.
fn push_nearby(ir: &mut KernelIr) {
    for at in pushes(ir) {
        if let Op::St { sem, .. } = &mut ir.insts[at].op {
            *sem = Sem::Weak;
        }
    }
}

#[test]
fn nothing_is_found_in_the_kernels_as_they_are() {
    assert_eq!(fault(&spec(), 8, 0, None, None), None);
    assert_eq!(fault(&Spec { hold: true, ..spec() }, 4, 0, None, None), None);
    assert_eq!(fault(&spec(), 4, u32::MAX - 2, None, None), None);
    assert_eq!(fault(&direct(), 4, 0, None, None), None);
    assert_eq!(fault(&Spec { hold: true, ..direct() }, 2, u32::MAX - 2, None, None), None);
}

/// Those of the row top-k are `dsa-kernels`' to check.
#[test]
fn every_barrier_of_the_merge_is_needed() {
    // With rows of which all warps select a part, and of so many ties that they are searched by their ids.
    for spec in [spec(), direct()].map(|spec| Spec { rows: 4, ..spec }) {
        assert_eq!(fault(&spec, 4, 0, None, None), None);
        let whole = build(&spec.merge(), Target::Sm90a).unwrap();
        let barriers = positions(whole.ir(), |op| matches!(op, Op::BarSync { .. }));
        let (mut checked, is_own) = (0, |at: &usize| whole.ir().insts[*at].loc.file().contains("src/merge/"));
        for at in barriers.into_iter().filter(is_own) {
            let what = format!("without the barrier of {}", whole.ir().insts[at].loc);
            let remove = move |ir: &mut KernelIr| drop(ir.insts.remove(at));
            assert_caught_in(&spec, &what, 12, None, Some(&remove));
            checked += 1;
        }
        assert!(checked >= 20, "only {checked} barriers");
    }
}

#[test]
fn each_half_needs_its_epoch() {
    // The words' poll comes first.
    for half in [0, 1] {
        let ignore = ignore_tag_of(half, 0..1);
        assert_caught(&format!("epoch of half {half} ignored"), 40, None, Some(&ignore));
        assert_caught_in(&direct(), &format!("direct, epoch of half {half} ignored"), 40, None, Some(&ignore));
    }
}

#[test]
fn each_half_of_a_list_needs_its_sequence() {
    for half in [0, 1] {
        let ignore = ignore_tag_of(half, 1..2);
        assert_caught(&format!("sequence of half {half} ignored"), 40, None, Some(&ignore));
    }
}

#[test]
fn every_rescue_has_its_own_sequence() {
    let keep = |ir: &mut KernelIr| {
        // The last store of the kernel, after the epoch's.
        let at = positions(ir, |op| matches!(op, Op::St { space: Space::Global, ty: Ty::U32, .. })).pop().unwrap();
        ir.insts.remove(at);
    };
    assert_caught("sequence not advanced", 40, None, Some(&keep));
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
fn a_direct_merge_waits_before_it_reads() {
    // Only once it has selected its list.
    let late_wait = |ir: &mut KernelIr| {
        let push = pushes(ir)[0];
        let barriers = positions(ir, |op| matches!(op, Op::BarSync { .. }));
        let barrier = barriers.into_iter().rfind(|&at| at < push).unwrap();
        let wait = positions(ir, |op| *op == Op::GridDepWait);
        assert_eq!(wait.len(), 1);
        ir.insts[wait[0]..barrier].rotate_left(1);
    };
    let caught = assert_caught_in(&direct(), "a late wait", 10, None, Some(&late_wait));
    assert!(caught.contains("race"), "{caught}");
}

/// What goes wrong if one rank sleeps between its push and its polls.
fn fault_of_a_slow_reader(spec: &Spec, seed: u64, rewrite: Rewrite<'_>) -> Option<String> {
    let config = SimConfig { devices: spec.ranks, ..SimConfig::seeded(seed) };
    let mut group = Group::new(spec, &Device::simulated_group(config), None, Some(rewrite));
    let mut ir = KernelIr::clone(build(&spec.merge(), Target::Sm90a).unwrap().ir());
    rewrite(&mut ir);
    let push = pushes(&ir)[0];
    // Behind the loop that pushes.
    let end = positions(&ir, |op| matches!(op, Op::Label { .. })).into_iter().find(|&at| at > push).unwrap();
    let mut sleep = ir.insts[end].clone();
    sleep.op = Op::Nanosleep { ns: Operand::Imm(1_000_000) };
    (0..20).for_each(|_| ir.insts.insert(end + 1, sleep.clone()));
    let slow = &mut group.ranks[1];
    slow.merge = ExchangeMerge::from_kernel(&slow.device, spec.merge(), &Kernel::from_ir(ir).unwrap()).unwrap();
    let layers =
        [1, 2, 3].map(|seed| Layer::new(&group, vec![LogitPattern::Gaussian.row(seed, 900 + seed as usize)], 0));
    layers.iter().for_each(|layer| group.launch(layer));
    let failed = group.check().into_iter().find_map(Result::err).map(|error| error.to_string());
    failed.or_else(|| layers.iter().find_map(|layer| layer.difference(&group).err()))
}

#[test]
fn one_parity_is_not_enough_for_direct_merges() {
    let spec = Spec { rows: 1, ..direct() };
    for seed in 1..=4 {
        assert_eq!(fault_of_a_slow_reader(&spec, seed, &|_| ()), None);
        println!(
            "{}",
            fault_of_a_slow_reader(&spec, seed, &one_parity).expect("a list is overwritten before it is read")
        );
    }
}

#[test]
fn lists_are_finished_before_they_are_pushed_and_used() {
    for spec in [spec(), direct()] {
        assert_caught_in(&spec, "no barrier before the push", 40, None, Some(&push_unfinished));
        assert_caught_in(&spec, "no barrier after the polls", 40, None, Some(&use_unfinished));
        assert_caught_in(&spec, "weak stores to peers", 40, None, Some(&push_nearby));
    }
}

#[test]
fn everything_that_peers_write_is_accessed_at_system_scope() {
    let words = "relaxed.sys.global.v2.b64";
    for spec in [spec(), direct()] {
        let text = build(&spec.merge(), Target::Sm90a).unwrap().ptx();
        // One loop pushes a list; one polls words, or the lists of a direct merge, and one the lists of saturated ranks.
        let polls = if spec.exchange().is_direct() { 1 } else { 2 };
        assert_eq!(text.matches(&format!("st.{words}")).count(), 1);
        assert_eq!(text.matches(&format!("ld.{words}")).count(), polls);
        // No flag, and so no fence.
        for word in [".release", ".acquire", "fence", "membar"] {
            assert!(!text.contains(word), "{word}");
        }
    }
    let shape = spec().exchange().local_topk().unwrap().expect("two rounds");
    let local = dsa_kernels::local_topk::build(&shape, Target::Sm90a).unwrap();
    assert_eq!(local.ptx().matches(&format!("st.{words}")).count(), 1);
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

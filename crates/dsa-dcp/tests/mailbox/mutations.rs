//! Kernels broken one instruction at a time: the simulator's runs must notice each.

use gpu::{Device, SimConfig};
use ptx::op::{Bin, Cmp, Op, Operand, Space};
use ptx::{KernelIr, Scope, Sem, Special, Ty};

use crate::common::{Rewrite, full_or};
use crate::group::{Group, Spec, Step};

const CALLS: usize = 9;
/// Tokens of the calls in turn: more steps than boxes, so that a box never gets the rows that it had.
const TOKENS: [usize; 4] = [1, 2, 3, 3];

/// What goes wrong in a few calls back to back, one rank always behind the others, in one of `seeds` random orders.
fn fault(spec: &Spec, seeds: u64, send: Option<Rewrite<'_>>, gather: Option<Rewrite<'_>>) -> Option<String> {
    let ranks = spec.shape.ranks();
    (1..=seeds).find_map(|seed| {
        let config = SimConfig { devices: ranks, ..SimConfig::seeded(seed) };
        let group = Group::new(spec, &Device::simulated_group(config), send, gather);
        let steps: Vec<Step> = (1..).zip(TOKENS).map(|(seed, tokens)| Step::new(&group, seed, tokens)).collect();
        for call in 0..CALLS {
            let late = (call % 3 == 2).then_some((seed as usize % ranks, 5));
            if let Err(error) = group.launch_on(&steps[call % TOKENS.len()], &group.all(), late) {
                return Some(error.to_string());
            }
        }
        if let Some(error) = group.check().into_iter().find_map(Result::err) {
            return Some(error.to_string());
        }
        steps.iter().find_map(|step| group.all().into_iter().find_map(|rank| step.difference(&group, rank).err()))
    })
}

#[track_caller]
fn assert_caught(what: &str, send: Option<Rewrite<'_>>, gather: Option<Rewrite<'_>>) -> String {
    for multicast in [true, false] {
        let spec = Spec { multicast, ..Spec::new(3) };
        let caught = fault(&spec, 40, send, gather).unwrap_or_else(|| panic!("{what}: nobody noticed"));
        println!("{what}: {}", caught.lines().next().unwrap_or_default());
        if !multicast {
            return caught;
        }
    }
    unreachable!("the last form returns")
}

/// Removes the instructions for which `is` holds, of which there are `n`.
fn without(n: usize, is: impl Fn(&Op) -> bool) -> impl Fn(&mut KernelIr) {
    move |ir| {
        let before = ir.insts.len();
        ir.insts.retain(|inst| !is(&inst.op));
        assert_eq!(before - ir.insts.len(), n, "{}", ir.name);
    }
}

fn is_system_fence(op: &Op) -> bool {
    matches!(op, Op::Fence { scope: Scope::Sys })
}

/// The stores of four constant sentinels.
fn is_refill(op: &Op) -> bool {
    let constant = |src: &Operand| matches!(src, Operand::Imm(value) if *value as u32 == u32::MAX);
    matches!(op, Op::St { space: Space::Global, sem: Sem::Weak, srcs, .. } if srcs.iter().all(constant))
}

#[test]
fn nothing_is_found_in_the_kernels_as_they_are() {
    for multicast in [false, true] {
        for (copy, hold) in [(false, false), (true, true)] {
            let spec = Spec { multicast, copy, hold, ..Spec::new(3) };
            assert_eq!(fault(&spec, full_or(20, 3) as u64, None, None), None);
        }
    }
}

#[test]
fn the_box_before_must_be_refilled() {
    assert_caught("no refill", Some(&without(1, is_refill)), None);
    // Also where nothing but strong accesses reads the rows.
    let copying = Spec { copy: true, ..Spec::new(3) };
    let caught = fault(&copying, 40, Some(&without(1, is_refill)), None).expect("rows of two calls before");
    assert!(caught.contains("want"), "{caught}");
}

#[test]
fn fewer_than_three_boxes_are_not_enough() {
    for boxes in [1, 2] {
        let fewer = |ir: &mut KernelIr| {
            // Ranks are compared with their number before.
            let last = ir.insts.iter_mut().rev().find_map(|inst| match &mut inst.op {
                Op::Setp { cmp: Cmp::Ge, ty: Ty::U32, b: b @ Operand::Imm(3), .. } => Some(b),
                _ => None,
            });
            *last.expect("the box after the last") = Operand::Imm(boxes);
        };
        let caught = assert_caught(&format!("boxes: {boxes}"), Some(&fewer), None);
        assert!(caught.contains("race"), "{caught}");
    }
}

#[test]
fn the_refill_is_released() {
    let caught = assert_caught("refill not released", Some(&without(1, is_system_fence)), None);
    assert!(caught.contains("race"), "{caught}");
    let narrow = |ir: &mut KernelIr| {
        for inst in &mut ir.insts {
            if let Op::Fence { scope } = &mut inst.op {
                *scope = Scope::Gpu;
            }
        }
    };
    let caught = assert_caught("refill released to one GPU", Some(&narrow), None);
    assert!(caught.contains("race"), "{caught}");
}

#[test]
fn the_reads_of_the_state_are_released_by_their_count() {
    // The fence still comes before every store to a peer.
    let late = |ir: &mut KernelIr| {
        let fence = ir.insts.iter().position(|inst| is_system_fence(&inst.op)).unwrap();
        let count = ir.insts.iter().position(|inst| matches!(inst.op, Op::Atom { .. })).unwrap();
        // Past the end of the branch that counts.
        let end = (count..).find(|i| matches!(ir.insts[*i].op, Op::Label { .. })).unwrap();
        assert!(fence < count);
        ir.insts[fence..=end].rotate_left(1);
    };
    let caught = assert_caught("counted before the fence", Some(&late), None);
    assert!(caught.contains("race"), "{caught}");
}

#[test]
fn the_refill_is_acquired() {
    let caught = assert_caught("refill not acquired", None, Some(&without(1, is_system_fence)));
    assert!(caught.contains("race"), "{caught}");
}

#[test]
fn all_of_a_cta_has_read_the_state_before_it_is_counted() {
    let caught = assert_caught("no barrier", Some(&without(1, |op| matches!(op, Op::BarSync { .. }))), None);
    assert!(caught.contains("race"), "{caught}");
}

#[test]
fn the_refill_waits_for_the_readers() {
    let early = |ir: &mut KernelIr| {
        // The verifier wants a wait, so it moves to the end.
        let at = ir.insts.iter().position(|inst| inst.op == Op::GridDepWait).unwrap();
        let wait = ir.insts.remove(at);
        let end = ir.insts.len() - 1;
        ir.insts.insert(end, wait);
    };
    let caught = assert_caught("refill before the wait", Some(&early), None);
    assert!(caught.contains("race"), "{caught}");
}

#[test]
fn the_number_moves_after_every_cta_has_read_it() {
    // The first CTA to arrive moves it.
    let first = |ir: &mut KernelIr| {
        let mut changed = 0;
        for inst in &mut ir.insts {
            if let Op::Setp { cmp: Cmp::Eq, b: b @ Operand::Imm(3), .. } = &mut inst.op {
                *b = Operand::Imm(1);
                changed += 1;
            }
        }
        assert_eq!(changed, 1);
    };
    assert_caught("number moved by the first CTA", Some(&first), None);
    let unfenced = without(1, |op| matches!(op, Op::Fence { scope: Scope::Gpu }));
    let caught = assert_caught("arrivals not acquired", Some(&unfenced), None);
    assert!(caught.contains("race"), "{caught}");
}

#[test]
fn every_word_of_a_chunk_is_looked_at() {
    // Each of the three maxima over a chunk's words takes its first operand twice.
    let loaded = |ir: &KernelIr| ir.insts.iter().filter(|inst| is_maximum(&inst.op)).count();
    fn is_maximum(op: &Op) -> bool {
        matches!(op, Op::Bin { op: Bin::Max, ty: Ty::U32, .. })
    }
    for word in 0..3 {
        let blind = |ir: &mut KernelIr| {
            assert!(loaded(ir).is_multiple_of(3) && loaded(ir) > 0);
            for inst in ir.insts.iter_mut().filter(|inst| is_maximum(&inst.op)).skip(word).step_by(3) {
                if let Op::Bin { a, b, .. } = &mut inst.op {
                    *b = *a;
                }
            }
        };
        // What is copied is what was polled.
        let copying = Spec { copy: true, ..Spec::new(3) };
        let caught =
            fault(&copying, 40, None, Some(&blind)).unwrap_or_else(|| panic!("word {}: nobody noticed", word + 1));
        assert!(caught.contains("copied ffffffff") || caught.contains("race"), "{caught}");
    }
}

#[test]
fn polls_are_bounded() {
    // The time never runs out: a rank that stays away is waited for for ever, which the simulator ends.
    let unbounded = |ir: &mut KernelIr| {
        let mut changed = 0;
        for inst in &mut ir.insts {
            if let Op::Setp { cmp: Cmp::Gt, ty: Ty::U64, b, .. } = &mut inst.op {
                *b = Operand::Imm(u64::MAX);
                changed += 1;
            }
        }
        assert_eq!(changed, 1);
        assert!(ir.insts.iter().any(|inst| matches!(inst.op, Op::Special { reg: Special::Globaltimer, .. })));
    };
    let spec = Spec::new(2);
    for rewrite in [None, Some(&unbounded as Rewrite<'_>)] {
        let devices = Device::simulated_group(SimConfig { devices: 2, ..SimConfig::default() });
        let group = Group::new(&spec, &devices, None, rewrite);
        group.launch_on(&Step::new(&group, 1, 1), &[0], None).unwrap();
        let verdict = group.ranks[0].mailbox.check(&group.ranks[0].stream).unwrap_err().to_string();
        let want = if rewrite.is_some() { ["deadlock", "Deadlock"] } else { ["waited in vain"; 2] };
        assert!(want.iter().any(|want| verdict.contains(want)), "{verdict}");
    }
}

#[test]
fn what_peers_write_is_accessed_at_system_scope() {
    let shape = Spec::new(3).shape;
    let gather = dsa_dcp::mailbox::gather::build(&dsa_dcp::GatherShape::new(shape), ptx::Target::Sm90a).unwrap();
    let text = gather.ptx();
    assert_eq!(text.matches("ld.relaxed.sys.global.v4.b32").count(), 4, "{text}");
    assert_eq!(text.matches("fence.acq_rel.sys").count(), 1);
}

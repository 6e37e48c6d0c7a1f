//! Barriers and collectives that part of a warp does not reach.

use crate::common::*;
use ptx::op::{Op, Operand};
use ptx::*;
use ptx_sim::*;

#[track_caller]
fn fails(threads: u32, kind: TrapKind, lines: &[u32], body: impl FnOnce(TestParams)) -> Trap {
    fails_in(&modes(), &kernel(threads, body), 1, kind, file!(), lines)
}

#[test]
fn barrier_in_half_a_warp() {
    let line = line!() + 2;
    fails(64, TrapKind::Divergent, &[line], |_| {
        when(lane_index().lt(16u32), || sync_threads());
    });
}

#[test]
fn different_barriers_in_the_branches() {
    let line = line!() + 2;
    let trap = fails(64, TrapKind::Divergent, &[line], |_| {
        when_else(lane_index().lt(16u32), || sync_named(1u32, 64), || sync_named(2u32, 64));
    });
    assert!(trap.message.contains("16 lanes"), "{trap}");
}

#[test]
fn shuffle_in_half_a_warp() {
    let line = line!() + 4;
    let trap = fails(32, TrapKind::Collective, &[line], |p| {
        let x = Var::new(lane_index());
        when(lane_index().lt(16u32), || {
            x.set(shuffle_xor(x.get(), 1));
        });
        p.out.at(lane_index()).store(x.get());
    });
    assert!(trap.message.contains("Shfl") && trap.message.contains("16 lanes"), "{trap}");
}

#[test]
fn vote_after_lanes_have_ended() {
    let line = line!() + 3;
    fails(32, TrapKind::Collective, &[line], |p| {
        exit_if(lane_index().ge(30u32));
        let b = ballot(lane_index().lt(3u32));
        p.out.at(lane_index()).store(b);
    });
}

#[test]
fn elect_in_a_branch() {
    let line = line!() + 3;
    fails(32, TrapKind::Divergent, &[line], |p| {
        when(lane_index().ge(2u32), || {
            when(elect(), || {
                p.out.store(1u32);
            });
        });
    });
}

#[test]
fn warp_barrier_in_a_branch() {
    let line = line!() + 3;
    fails(32, TrapKind::Collective, &[line], |_| {
        when(lane_index().ge(2u32), || {
            sync_warp();
        });
    });
}

#[test]
fn barriers_that_disagree_about_their_threads() {
    let line = line!() + 2;
    fails(96, TrapKind::Mismatch, &[line], |_| {
        when_else(warp_index().lt(1u32), || sync_named(1u32, 64), || sync_named(1u32, 96));
    });
}

#[test]
fn barrier_numbers_that_differ_within_a_warp() {
    let line = line!() + 2;
    fails(32, TrapKind::Mismatch, &[line], |_| {
        sync_named((lane_index() & 1) + 1, 32);
    });
}

#[test]
fn barrier_number_out_of_range() {
    let line = line!() + 2;
    fails(32, TrapKind::Operand, &[line], |p| {
        sync_named(p.n + 16, 32);
    });
}

#[test]
fn a_barrier_that_all_lanes_reach_by_themselves_is_fine() {
    // Lanes leave the loop at different times but meet behind it.
    let k = kernel(64, |p| {
        let x = Var::new(Reg::<u32>::from(0));
        for_range(0u32, lane_index(), 1u32, |_| x.add(1u32));
        sync_threads();
        p.out.at(thread_index()).store(x.get());
    });
    check(&k, 1, |i| i as u32 % 32, 64);
    assert!(k.ir().insts.iter().any(|i| matches!(i.op, Op::BarSync { id: Operand::Imm(0), threads: None })));
}

#[test]
fn exited_lanes_do_not_hold_up_a_barrier() {
    let k = kernel(64, |p| {
        exit_if((thread_index() & 3).eq(3u32));
        sync_threads();
        p.out.at(thread_index()).store(1u32);
    });
    check(&k, 1, |i| if i % 4 == 3 { POISON_WORD } else { 1 }, 64);
}

const POISON_WORD: u32 = u32::from_le_bytes([POISON; 4]);

#[test]
fn exited_warps_do_not_hold_up_a_barrier() {
    let k = kernel(128, |p| {
        exit_if(thread_index().ge(96u32));
        sync_threads();
        p.out.at(thread_index()).store(1u32);
    });
    check(&k, 1, |_| 1, 96);
}

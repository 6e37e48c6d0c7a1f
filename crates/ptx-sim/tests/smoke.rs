//! Whole small kernels that must run in every schedule and timing.

mod common;

use common::*;
use ptx::*;

#[test]
fn every_thread_writes_its_index() {
    let k = kernel(64, |p| {
        let i = cta_index().mad(64, thread_index());
        p.out.at(i).store(p.src.at(i).load() * 3);
    });
    check(&k, 8, |i| 3 * i as u32, 512);
}

#[test]
fn divergent_loops_reconverge() {
    // Each lane loops `lane` times, then a shuffle needs all of them.
    let k = kernel(32, |p| {
        let lane = lane_index();
        let sum = Var::new(Reg::<u32>::from(0));
        for_range(0u32, lane, 1u32, |i| sum.add(i + 1));
        let other = shuffle_xor(sum.get(), 1);
        p.out.at(lane).store(other);
    });
    check(
        &k,
        1,
        |i| {
            let n = (i ^ 1) as u32;
            n * (n + 1) / 2
        },
        32,
    );
}

#[test]
fn a_barrier_orders_shared_memory() {
    let k = kernel(128, |p| {
        let buf = SharedArray::<u32>::new("buf", 128);
        let t = thread_index();
        buf.at(t).store(t * 7);
        sync_threads();
        p.out.at(t).store(buf.at(t ^ 64).load());
    });
    check(&k, 1, |i| 7 * (i as u32 ^ 64), 128);
}

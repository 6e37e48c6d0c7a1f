//! Warpgroup MMAs: accumulators under way, operands, order of the four warps.

use crate::common::*;
use ptx::*;
use ptx_sim::*;

#[track_caller]
fn fails(modes: &[Config], kind: TrapKind, lines: &[u32], body: impl FnOnce(TestParams)) -> Trap {
    fails_in(modes, &kernel(128, body), 1, kind, file!(), lines)
}

/// A filled A and B tile, ready for MMAs.
fn tiles() -> (SharedArray<u32>, SharedArray<u32>) {
    let (a, b) = (SharedArray::<u32>::aligned("a", 2048, 1024), SharedArray::<u32>::aligned("b", 256, 1024));
    for i in 0..16u32 {
        a.at(thread_index() + 128 * i).store(0x3838_3838u32);
    }
    for i in 0..2u32 {
        b.at(thread_index() + 128 * i).store(0x3838_3838u32);
    }
    fence_proxy_async();
    sync_threads();
    (a, b)
}

fn sum(acc: &Accumulator) -> Reg<u32> {
    (acc.get(0) + acc.get(1)).bitcast::<u32>()
}

#[test]
fn accumulator_read_before_the_wait() {
    let line = line!() + 7;
    fails(&modes(), TrapKind::ResultPending, &[line], |p| {
        let (a, b) = tiles();
        let acc = Accumulator::new(8);
        wgmma_fence();
        acc.mma_e4m3(a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128(), false);
        wgmma_commit();
        let x = acc.get(1).bitcast::<u32>() + 1u32;
        p.out.at(thread_index()).store(x);
        wgmma_wait(0);
    });
}

#[test]
fn group_that_the_wait_does_not_cover() {
    let line = line!() + 12;
    fails(&modes(), TrapKind::ResultPending, &[line], |p| {
        let (a, b) = tiles();
        let (x, y) = (Accumulator::new(8), Accumulator::new(8));
        let (a, b) = (a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128());
        wgmma_fence();
        x.mma_e4m3(a, b, false);
        wgmma_commit();
        y.mma_e4m3(a, b, false);
        wgmma_commit();
        wgmma_wait(1);
        p.out.at(thread_index()).store(x.get(0).bitcast::<u32>());
        p.out.at(thread_index()).store(y.get(0).bitcast::<u32>());
        wgmma_wait(0);
    });
}

#[test]
fn accumulator_that_nothing_initialised() {
    let line = line!() + 8;
    fails(&modes(), TrapKind::Uninitialized, &[line], |p| {
        let (a, b) = tiles();
        let acc = Accumulator::new(8);
        let (a, b) = (a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128());
        // Skipped by every lane.
        when(p.n.ne(0u32), || acc.mma_e4m3(a, b, false));
        wgmma_fence();
        acc.mma_e4m3(a, b, true);
        wgmma_commit();
        wgmma_wait(0);
    });
}

#[test]
fn no_fence_before_the_first_mma() {
    let line = line!() + 4;
    fails(&modes(), TrapKind::WgmmaFence, &[line], |_| {
        let (a, b) = tiles();
        let acc = Accumulator::new(8);
        acc.mma_e4m3(a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128(), false);
        wgmma_commit();
        wgmma_wait(0);
    });
}

#[test]
fn operands_without_the_proxy_fence() {
    let line = line!() + 12;
    fails(&modes(), TrapKind::ProxyFence, &[line], |_| {
        let (a, b) = (SharedArray::<u32>::aligned("a", 2048, 1024), SharedArray::<u32>::aligned("b", 256, 1024));
        for i in 0..16u32 {
            a.at(thread_index() + 128 * i).store(0u32);
        }
        for i in 0..2u32 {
            b.at(thread_index() + 128 * i).store(0u32);
        }
        sync_threads();
        let acc = Accumulator::new(8);
        wgmma_fence();
        acc.mma_e4m3(a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128(), false);
        wgmma_commit();
        wgmma_wait(0);
    });
}

#[test]
fn operand_overwritten_before_the_wait() {
    let line = line!() + 7;
    fails(&modes(), TrapKind::DataRace, &[line], |_| {
        let (a, b) = tiles();
        let acc = Accumulator::new(8);
        wgmma_fence();
        acc.mma_e4m3(a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128(), false);
        wgmma_commit();
        when(thread_index().eq(0u32), || b.at(0u32).store(0u32));
        wgmma_wait(0);
    });
}

#[test]
fn one_warp_of_the_warpgroup_does_something_else() {
    let line = line!() + 6;
    fails(&modes(), TrapKind::Mismatch, &[line], |_| {
        let (a, b) = tiles();
        let acc = Accumulator::new(8);
        let (a, b) = (a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128());
        wgmma_fence();
        when_else(warp_index().eq(2u32), || acc.mma_e4m3(a + 2u64, b + 2u64, false), || acc.mma_e4m3(a, b, false));
        wgmma_commit();
        wgmma_wait(0);
    });
}

#[test]
fn one_warp_of_the_warpgroup_stays_away() {
    let line = line!() + 9;
    let trap = fails(&modes(), TrapKind::Deadlock, &[line], |_| {
        let (a, b) = tiles();
        let acc = Accumulator::new(8);
        when(warp_index().ne(3u32), || {
            wgmma_fence();
            acc.mma_e4m3(a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128(), false);
            wgmma_commit();
            // The wait is on the next line.
            wgmma_wait(0);
        });
        sync_threads();
    });
    assert!(trap.message.contains("WgmmaWait"), "{trap}");
}

#[test]
fn exit_before_the_wait() {
    let line = line!() + 5;
    fails(&[Config::default()], TrapKind::ExitInFlight, &[line], |_| {
        let (a, b) = tiles();
        let acc = Accumulator::new(8);
        wgmma_fence();
        acc.mma_e4m3(a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128(), false);
        wgmma_commit();
    });
}

#[test]
fn unused_helper_sums_two_registers() {
    // Keeps the positive path beside the failing ones: 1.0 x 1.0 over K = 32.
    let k = kernel(128, |p| {
        let (a, b) = tiles();
        let acc = Accumulator::new(8);
        wgmma_fence();
        acc.mma_e4m3(a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128(), false);
        wgmma_commit();
        wgmma_wait(0);
        p.out.at(thread_index()).store(sum(&acc));
    });
    check(&k, 1, |_| 64f32.to_bits(), 128);
}

#[test]
fn warp_product_of_half_a_warp() {
    let line = line!() + 5;
    let k = kernel(32, |p| {
        let pair = Reg::<Bf16x2>::from_bits(p.n);
        let tile = MmaTile::zero();
        when(lane_index().lt(16), || {
            tile.mma_bf16([pair; 4], [pair; 2]);
        });
        p.out.at(lane_index()).store(tile.get(0).bitcast::<u32>());
    });
    fails_in(&modes(), &k, 1, TrapKind::Divergent, file!(), &[line]);
}

//! Misuse of mbarriers.

use crate::common::*;
use ptx::*;
use ptx_sim::*;

#[track_caller]
fn fails(threads: u32, kind: TrapKind, line: u32, body: impl FnOnce(TestParams)) -> Trap {
    fails_in(&modes(), &kernel(threads, body), 1, kind, file!(), &[line])
}

/// One initialised barrier of `count` arrivals.
fn barrier(count: u32) -> Mbarrier {
    let bar = MbarrierArray::new("full", 1).at(0u32);
    when(thread_index().eq(0u32), || {
        bar.init(count);
        fence_mbarrier_init();
    });
    sync_threads();
    bar
}

#[test]
fn not_initialised() {
    let line = line!() + 3;
    let trap = fails(32, TrapKind::Mbarrier, line, |_| {
        let bar = MbarrierArray::new("full", 2).at(1u32);
        bar.arrive();
    });
    assert!(trap.message.contains("byte 8 of \"full\""), "{trap}");
}

#[test]
fn too_many_arrivals() {
    let line = line!() + 4;
    fails(32, TrapKind::Mbarrier, line, |_| {
        let bar = barrier(3);
        when(lane_index().eq(0u32), || bar.expect(64));
        when(lane_index().lt(4u32), || bar.arrive());
    });
}

#[test]
fn bytes_read_as_data() {
    let line = line!() + 4;
    fails(32, TrapKind::Mbarrier, line, |p| {
        barrier(1);
        let words = Shared::<u64>::from_address(Reg::from(SHARED_BASE));
        let x = words.load();
        p.out.cast::<u64>().store(x);
    });
}

#[test]
fn wait_that_nobody_ends() {
    let line = line!() + 3;
    let trap = fails(64, TrapKind::Deadlock, line, |_| {
        let bar = barrier(2);
        bar.wait(0u32);
    });
    assert!(trap.message.contains("MbarTryWait"), "{trap}");
}

#[test]
fn bytes_that_never_come() {
    let line = line!() + 4;
    let trap = fails(32, TrapKind::ExpectTx, line, |_| {
        let bar = barrier(1);
        when(lane_index().eq(0u32), || bar.arrive_expect(64u32));
        exit();
    });
    assert!(trap.message.contains("64 bytes") && trap.message.contains("\"full\""), "{trap}");
}

#[test]
fn used_before_the_barrier_that_publishes_it() {
    // Which of the two comes first depends on the schedule; a fixed order initialises first.
    let line = line!() + 4;
    let k = kernel(64, |_| {
        let bar = MbarrierArray::new("full", 1).at(0u32);
        when(thread_index().eq(0u32), || bar.init(1));
        when(thread_index().eq(32u32), || bar.arrive());
    });
    fails_in(&[Config::default()], &k, 1, TrapKind::DataRace, file!(), &[line]);
}

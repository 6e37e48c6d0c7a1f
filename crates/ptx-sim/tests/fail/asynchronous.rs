//! Asynchronous copies: early reads, late writes, missing fences, bytes that do not add up.

use crate::common::*;
use ptx::*;
use ptx_sim::*;

/// Every schedule, with copies that complete as late as they may.
fn late() -> Vec<Config> {
    let random = (0..3).map(|seed| Config { schedule: Schedule::Random { seed }, ..Config::default() });
    std::iter::once(Config::default()).chain(random).collect()
}

#[track_caller]
fn fails(modes: &[Config], threads: u32, kind: TrapKind, line: u32, body: impl FnOnce(TestParams)) -> Trap {
    fails_in(modes, &kernel(threads, body), 1, kind, file!(), &[line])
}

/// A 256-byte array and a barrier of one arrival.
fn stage() -> (SharedArray<u32>, Mbarrier) {
    let buf = SharedArray::<u32>::aligned("stage", 64, 128);
    let bar = MbarrierArray::new("full", 1).at(0u32);
    when(thread_index().eq(0u32), || {
        bar.init(1);
        fence_mbarrier_init();
    });
    sync_threads();
    (buf, bar)
}

#[test]
fn read_before_the_wait() {
    let line = line!() + 8;
    let body = |p: TestParams| {
        let (buf, bar) = stage();
        when(thread_index().eq(0u32), || {
            bar.arrive_expect(256u32);
            copy_bulk(buf.ptr(), p.src, 256u32, bar, None);
        });
        sync_threads();
        let x = buf.at(thread_index()).load();
        p.out.at(thread_index()).store(x);
        bar.wait(0u32);
    };
    // Whether or not the bytes are there already, nothing orders the read after them.
    let trap = fails(&modes(), 64, TrapKind::DataRace, line, body);
    assert!(trap.message.contains("asynchronous write") && trap.message.contains("not been waited for"), "{trap}");
}

#[test]
fn stage_is_refilled_while_it_is_read() {
    let line = line!() + 14;
    fails(&modes(), 64, TrapKind::DataRace, line, |p| {
        let (buf, bar) = stage();
        when(thread_index().eq(0u32), || {
            bar.arrive_expect(256u32);
            copy_bulk(buf.ptr(), p.src, 256u32, bar, None);
        });
        bar.wait(0u32);
        let x = buf.at(thread_index()).load();
        p.out.at(thread_index()).store(x);
        // No barrier: the other warp may not have read yet.
        when(thread_index().eq(0u32), || {
            bar.arrive_expect(256u32);
            nanosleep(100_000u32);
            copy_bulk(buf.ptr(), p.src, 256u32, bar, None);
        });
        bar.wait(1u32);
    });
}

#[test]
fn bulk_store_without_the_proxy_fence() {
    let line = line!() + 6;
    fails(&modes(), 32, TrapKind::ProxyFence, line, |p| {
        let buf = SharedArray::<u32>::aligned("stage", 32, 128);
        buf.at(thread_index()).store(thread_index());
        sync_threads();
        when(thread_index().eq(0u32), || {
            store_bulk(p.out, buf.ptr(), 128u32);
            commit_bulk();
            wait_bulk(0);
        });
    });
}

#[test]
fn bulk_store_of_what_another_warp_did_not_fence() {
    let line = line!() + 8;
    fails(&modes(), 64, TrapKind::ProxyFence, line, |p| {
        let buf = SharedArray::<u32>::aligned("stage", 64, 128);
        buf.at(thread_index()).store(thread_index());
        // Only the first warp fences its own writes.
        when(thread_index().lt(32u32), || fence_proxy_async());
        sync_threads();
        when(thread_index().eq(0u32), || {
            store_bulk(p.out, buf.ptr(), 256u32);
            commit_bulk();
            wait_bulk(0);
        });
    });
}

#[test]
fn source_of_a_bulk_store_is_overwritten() {
    let line = line!() + 9;
    fails(&modes(), 32, TrapKind::DataRace, line, |p| {
        let buf = SharedArray::<u32>::aligned("stage", 32, 128);
        buf.at(thread_index()).store(thread_index());
        fence_proxy_async();
        sync_threads();
        when(thread_index().eq(0u32), || {
            store_bulk(p.out, buf.ptr(), 128u32);
            commit_bulk();
            buf.at(0u32).store(9u32);
            wait_bulk(0);
        });
    });
}

#[test]
fn exit_while_a_copy_is_under_way() {
    let line = line!() + 5;
    let trap = fails(&late(), 32, TrapKind::ExitInFlight, line, |p| {
        let (buf, bar) = stage();
        when(thread_index().eq(0u32), || {
            bar.arrive_expect(256u32);
            copy_bulk(buf.ptr(), p.src, 256u32, bar, None);
        });
    });
    assert!(trap.message.contains("\"stage\""), "{trap}");
}

#[test]
fn exit_while_a_bulk_store_reads() {
    let line = line!() + 6;
    fails(&late(), 32, TrapKind::ExitInFlight, line, |p| {
        let buf = SharedArray::<u32>::aligned("stage", 32, 128);
        buf.at(thread_index()).store(thread_index());
        fence_proxy_async();
        sync_threads();
        when(thread_index().eq(0u32), || store_bulk(p.out, buf.ptr(), 128u32));
    });
}

#[test]
fn fewer_bytes_than_expected() {
    let line = line!() + 7;
    let trap = fails(&modes(), 32, TrapKind::ExpectTx, line, |p| {
        let (buf, bar) = stage();
        when(thread_index().eq(0u32), || {
            bar.arrive_expect(256u32);
            copy_bulk(buf.ptr(), p.src, 128u32, bar, None);
        });
        bar.wait(0u32);
    });
    assert!(trap.message.contains("lacks 0 of 1 arrivals and 128 bytes"), "{trap}");
}

#[test]
fn more_bytes_than_expected() {
    let line = line!() + 9;
    // The phase never completes with the balance below zero.
    let trap = fails(&modes(), 32, TrapKind::ExpectTx, line, |p| {
        let (buf, bar) = stage();
        when(thread_index().eq(0u32), || {
            bar.arrive_expect(128u32);
            copy_bulk(buf.ptr(), p.src, 256u32, bar, None);
        });
        // The wait is on the next line.
        bar.wait(0u32);
    });
    assert!(trap.message.contains("and -128 bytes"), "{trap}");
}

#[test]
fn unaligned_bulk_copy() {
    let line = line!() + 4;
    fails(&modes(), 32, TrapKind::Misaligned, line, |p| {
        let (buf, bar) = stage();
        when(thread_index().eq(0u32), || {
            copy_bulk(buf.ptr(), p.src.offset(1), 128u32, bar, None);
        });
    });
}

#[test]
fn bulk_copy_past_the_end_of_the_source() {
    let line = line!() + 4;
    fails(&modes(), 32, TrapKind::OutOfBounds, line, |p| {
        let (buf, bar) = stage();
        when(thread_index().eq(0u32), || {
            copy_bulk(buf.ptr(), p.src.offset(WORDS as i32 - 32), 256u32, bar, None);
        });
    });
}

#[test]
fn bulk_copy_of_uninitialised_bytes() {
    let line = line!() + 5;
    fails(&modes(), 32, TrapKind::Uninitialized, line, |p| {
        let (buf, bar) = stage();
        when(thread_index().eq(0u32), || {
            bar.arrive_expect(256u32);
            copy_bulk(buf.ptr(), p.out, 256u32, bar, None);
        });
        bar.wait(0u32);
    });
}

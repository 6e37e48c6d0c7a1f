//! `cp.async` and `ldmatrix`: results used early or by others, sources overwritten, addresses.

use crate::common::*;
use ptx::*;
use ptx_sim::*;

#[track_caller]
fn fails(threads: u32, kind: TrapKind, line: u32, body: impl FnOnce(TestParams)) -> Trap {
    fails_in(&modes(), &kernel(threads, body), 1, kind, file!(), &[line])
}

fn stage() -> SharedArray<u32> {
    SharedArray::<u32>::aligned("stage", 256, 128)
}

/// Every thread's own 16 bytes, in one group.
fn copy(p: &TestParams, to: SharedArray<u32>) {
    copy_16(to.at(thread_index() * 4), p.src.at(thread_index() * 4), None);
    commit_copies();
}

#[test]
fn own_bytes_before_the_wait() {
    let line = line!() + 4;
    fails(32, TrapKind::DataRace, line, |p| {
        let buf = stage();
        copy(&p, buf);
        let x = buf.at(thread_index() * 4).load();
        wait_copies(0);
        p.out.at(thread_index()).store(x);
    });
}

#[test]
fn a_group_that_the_wait_does_not_cover() {
    let line = line!() + 7;
    fails(32, TrapKind::DataRace, line, |p| {
        let buf = stage();
        copy(&p, buf);
        copy_16(buf.at(thread_index() * 4 + 128), p.src, None);
        commit_copies();
        wait_copies(1);
        let x = buf.at(thread_index() * 4).load() + buf.at(thread_index() * 4 + 128).load();
        wait_copies(0);
        p.out.at(thread_index()).store(x);
    });
}

#[test]
fn a_copy_in_no_group() {
    let line = line!() + 5;
    fails(32, TrapKind::DataRace, line, |p| {
        let buf = stage();
        copy_16(buf.at(thread_index() * 4), p.src, None);
        wait_copies(0);
        let x = buf.at(thread_index() * 4).load();
        commit_copies();
        wait_copies(0);
        p.out.at(thread_index()).store(x);
    });
}

#[test]
fn another_warps_bytes_without_a_barrier() {
    let (copied, read) = (line!() + 6, line!() + 10);
    let k = kernel(64, |p| {
        let buf = stage();
        buf.at(thread_index() * 4).store_vec([Reg::from(0u32); 4]);
        sync_threads();
        let (to, from) = (buf.at(thread_index() * 4), p.src.at(thread_index() * 4));
        copy_16(to, from, None);
        commit_copies();
        // Each thread waits for its own copy alone.
        wait_copies(0);
        let x = buf.at((thread_index() ^ 32) * 4).load();
        p.out.at(thread_index()).store(x);
    });
    fails_in(&modes(), &k, 1, TrapKind::DataRace, file!(), &[copied, read]);
}

#[test]
fn another_lanes_bytes_without_a_warp_barrier() {
    let line = line!() + 5;
    fails(32, TrapKind::DataRace, line, |p| {
        let buf = stage();
        copy(&p, buf);
        wait_copies(0);
        let x = buf.at((thread_index() ^ 1) * 4).load();
        p.out.at(thread_index()).store(x);
    });
}

#[test]
fn a_barrier_before_the_wait() {
    let line = line!() + 6;
    fails(64, TrapKind::DataRace, line, |p| {
        let buf = stage();
        copy(&p, buf);
        sync_threads();
        wait_copies(0);
        let x = buf.at((thread_index() ^ 32) * 4).load();
        p.out.at(thread_index()).store(x);
    });
}

#[test]
fn a_wait_by_the_wrong_lanes() {
    let line = line!() + 6;
    fails(32, TrapKind::DataRace, line, |p| {
        let buf = stage();
        copy(&p, buf);
        when(lane_index().lt(16), || wait_copies(0));
        sync_threads();
        let x = buf.at(thread_index() * 4).load();
        wait_copies(0);
        p.out.at(thread_index()).store(x);
    });
}

#[test]
fn the_destination_is_written_meanwhile() {
    let line = line!() + 4;
    fails(32, TrapKind::DataRace, line, |p| {
        let buf = stage();
        copy(&p, buf);
        buf.at(thread_index() * 4).store(1);
        wait_copies(0);
    });
}

#[test]
fn the_destination_is_still_read() {
    let (read, copied) = (line!() + 5, line!() + 9);
    let k = kernel(64, |p| {
        let buf = stage();
        buf.at(thread_index() * 4).store(1);
        sync_threads();
        let x = buf.at((thread_index() ^ 32) * 4).load();
        p.out.at(thread_index()).store(x);
        // No barrier: the other warp may not have read yet.
        let to = buf.at(thread_index() * 4);
        copy_16(to, p.src, None);
        commit_copies();
        wait_copies(0);
    });
    fails_in(&modes(), &k, 1, TrapKind::DataRace, file!(), &[read, copied]);
}

#[test]
fn the_source_is_overwritten_meanwhile() {
    let line = line!() + 5;
    fails(32, TrapKind::DataRace, line, |p| {
        let buf = stage();
        copy(&p, buf);
        // Copies read when they like until the wait.
        p.src.at(thread_index() * 4).store(1);
        wait_copies(0);
    });
}

#[test]
fn the_kernel_ends_without_a_wait() {
    let line = line!() + 3;
    let trap = fails(32, TrapKind::ExitInFlight, line, |p| {
        let buf = stage();
        copy_16(buf.at(thread_index() * 4), p.src, None);
        commit_copies();
    });
    assert!(trap.message.contains("before a wait"), "{trap}");
}

#[test]
fn an_unaligned_source() {
    let line = line!() + 3;
    fails(32, TrapKind::Misaligned, line, |p| {
        let buf = stage();
        copy_16(buf.at(thread_index() * 4), p.src.offset(1), None);
        commit_copies();
        wait_copies(0);
    });
}

#[test]
fn an_unaligned_destination() {
    let line = line!() + 3;
    fails(32, TrapKind::Misaligned, line, |p| {
        let buf = stage();
        copy_16(buf.at(thread_index() * 4 + 2), p.src, None);
        commit_copies();
        wait_copies(0);
    });
}

#[test]
fn a_source_past_the_end() {
    let line = line!() + 3;
    fails(32, TrapKind::OutOfBounds, line, |p| {
        let buf = stage();
        copy_16(buf.at(thread_index() * 4), p.src.offset(WORDS as i32), None);
        commit_copies();
        wait_copies(0);
    });
}

#[test]
fn a_destination_past_the_end() {
    let line = line!() + 3;
    fails(32, TrapKind::OutOfBounds, line, |p| {
        let buf = stage();
        copy_16(buf.at(thread_index() * 4 + 252), p.src, None);
        commit_copies();
        wait_copies(0);
    });
}

#[test]
fn a_source_that_nothing_wrote() {
    let line = line!() + 3;
    fails(32, TrapKind::Uninitialized, line, |p| {
        let buf = stage();
        copy_16(buf.at(thread_index() * 4), p.out, None);
        commit_copies();
        wait_copies(0);
    });
}

#[test]
fn asynchronous_reads_of_copied_bytes_need_the_proxy_fence() {
    let line = line!() + 6;
    fails(32, TrapKind::ProxyFence, line, |p| {
        let buf = stage();
        copy(&p, buf);
        wait_copies(0);
        sync_threads();
        when(thread_index().eq(0), || store_bulk(p.out, buf.ptr(), 512));
        commit_bulk();
        wait_bulk(0);
    });
}

/// Four matrices of 8 rows, written by the warp's lanes, a row each.
fn rows() -> SharedArray<u32> {
    let buf = SharedArray::<u32>::aligned("rows", 128, 16);
    buf.at(lane_index() * 4).store_vec([lane_index(); 4]);
    buf
}

#[test]
fn matrices_of_other_lanes_without_a_warp_barrier() {
    let line = line!() + 3;
    fails(32, TrapKind::DataRace, line, |p| {
        let buf = rows();
        let [x] = buf.at(lane_index() * 4).load_matrices::<1>();
        p.out.at(thread_index()).store(x.to_bits());
    });
    let line = line!() + 3;
    fails(32, TrapKind::DataRace, line, |p| {
        let buf = rows();
        let [x, _] = buf.at(lane_index() * 4).load_matrices_transposed::<2>();
        p.out.at(thread_index()).store(x.to_bits());
    });
}

#[test]
fn a_matrix_row_that_nothing_wrote() {
    let line = line!() + 5;
    let trap = fails(32, TrapKind::Uninitialized, line, |p| {
        let buf = SharedArray::<u32>::aligned("rows", 128, 16);
        when(lane_index().ne(9), || buf.at(lane_index() * 4).store_vec([lane_index(); 4]));
        sync_warp();
        let [_, x] = buf.at(lane_index() * 4).load_matrices::<2>();
        p.out.at(thread_index()).store(x.to_bits());
    });
    assert!(trap.message.contains("byte 144 of \"rows\""), "{trap}");
}

#[test]
fn an_unaligned_matrix_row() {
    let line = line!() + 4;
    let trap = fails(32, TrapKind::Misaligned, line, |p| {
        let buf = rows();
        sync_warp();
        let [x] = buf.at(lane_index() * 4 + lane_index().eq(5).as_u32() * 2).load_matrices::<1>();
        p.out.at(thread_index()).store(x.to_bits());
    });
    assert_eq!(trap.lane, Some(5), "{trap}");
}

#[test]
fn a_matrix_row_past_the_end() {
    let line = line!() + 4;
    fails(32, TrapKind::OutOfBounds, line, |p| {
        let buf = rows();
        sync_warp();
        let [x, ..] = buf.at(lane_index() * 4 + 4).load_matrices::<4>();
        p.out.at(thread_index()).store(x.to_bits());
    });
}

#[test]
fn matrices_by_a_part_of_the_warp() {
    let line = line!() + 5;
    fails(32, TrapKind::Divergent, line, |p| {
        let buf = rows();
        sync_warp();
        when(lane_index().lt(8), || {
            let [x] = buf.at(lane_index() * 4).load_matrices::<1>();
            p.out.at(thread_index()).store(x.to_bits());
        });
    });
}

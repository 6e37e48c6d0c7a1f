//! `cp.async` and `ldmatrix` used as they should be, in every schedule and timing.

mod common;

use common::*;
use ptx::*;

#[test]
fn a_thread_reads_its_own_copies_group_by_group() {
    const GROUPS: u32 = 4;
    let k = kernel(64, |p| {
        let buf = SharedArray::<u32>::aligned("stage", 64 * 4 * GROUPS, 16);
        let at = |group: u32| (thread_index() + group * 64) * 4;
        for group in 0..GROUPS {
            copy_16(buf.at(at(group)), p.src.at(at(group)), None);
            commit_copies();
        }
        for group in 0..GROUPS {
            wait_copies(GROUPS - 1 - group);
            p.out.at(at(group)).store_vec(buf.at(at(group)).load_vec::<4>());
        }
    });
    check(&k, 1, |i| i as u32, 64 * 4 * GROUPS as usize);
}

#[test]
fn others_read_after_the_wait_and_a_barrier() {
    let k = kernel(128, |p| {
        let buf = SharedArray::<u32>::aligned("stage", 512, 16);
        copy_16(buf.at(thread_index() * 4), p.src.at(thread_index() * 4), Some(Policy::evict_first()));
        commit_copies();
        wait_copies(0);
        sync_threads();
        let x = buf.at(Reg::from(511u32) - thread_index()).load();
        p.out.at(thread_index()).store(x);
        // Refilled once everybody has read.
        sync_threads();
        copy_16(buf.at(thread_index() * 4), p.src.at(thread_index() * 4 + 512), None);
        commit_copies();
        wait_copies(0);
        sync_warp();
        p.out.at(thread_index() + 128).store(buf.at((thread_index() ^ 31) * 4).load());
    });
    let expected = |i: usize| if i < 128 { 511 - i as u32 } else { 512 + 4 * ((i as u32 - 128) ^ 31) };
    check(&k, 1, expected, 256);
}

#[test]
fn lanes_may_differ_in_their_groups() {
    let k = kernel(32, |p| {
        let buf = SharedArray::<u32>::aligned("stage", 256, 16);
        // The upper lanes close a group, with nothing in it, before the copy's.
        when(lane_index().ge(16), commit_copies);
        copy_16(buf.at(thread_index() * 4), p.src.at(thread_index() * 4), None);
        commit_copies();
        when(lane_index().lt(16), || {
            copy_16(buf.at(thread_index() * 4 + 128), p.src.at(thread_index() * 4 + 128), None);
            commit_copies();
        });
        when_else(lane_index().lt(16), || wait_copies(1), || wait_copies(0));
        p.out.at(thread_index()).store(buf.at(thread_index() * 4 + 3).load());
        wait_copies(0);
        sync_warp();
        when(lane_index().ge(16), || p.out.at(thread_index()).store(buf.at(thread_index() * 4 + 64).load()));
    });
    check(&k, 1, |i| if i < 16 { 4 * i as u32 + 3 } else { 64 + 4 * i as u32 }, 32);
}

#[test]
fn asynchronous_reads_follow_a_proxy_fence() {
    let k = kernel(64, |p| {
        let buf = SharedArray::<u32>::aligned("stage", 256, 16);
        copy_16(buf.at(thread_index() * 4), p.src.at(thread_index() * 4), None);
        commit_copies();
        wait_copies(0);
        fence_proxy_async();
        sync_threads();
        when(thread_index().eq(0), || {
            store_bulk(p.out, buf.ptr(), 1024);
            commit_bulk();
            wait_bulk(0);
        });
    });
    check(&k, 1, |i| i as u32, 256);
}

/// Element (row, column) of matrix m, as `rows` lays them out: 144 bytes from one row to the next.
fn element(m: usize, row: usize, column: usize) -> u32 {
    (m << 6 | row << 3 | column) as u32
}

/// Matrices of numbered elements, the rows of all of them one after the other.
fn rows() -> Shared<u16> {
    const PITCH: u32 = 72;
    let buf = SharedArray::<u16>::aligned("rows", 32 * PITCH, 16);
    let row = buf.at(lane_index() * PITCH);
    for column in 0..8u32 {
        row.offset(column as i32).store((lane_index() << 3) | column);
    }
    sync_warp();
    row
}

#[test]
fn every_lane_receives_its_elements() {
    let stored = |transposed: bool| {
        move |p: TestParams| {
            let row = rows();
            let (one, two, four) = match transposed {
                false => (row.load_matrices::<1>(), row.load_matrices::<2>(), row.load_matrices::<4>()),
                true => (
                    row.load_matrices_transposed::<1>(),
                    row.load_matrices_transposed::<2>(),
                    row.load_matrices_transposed::<4>(),
                ),
            };
            for (i, x) in one.into_iter().chain(two).chain(four).enumerate() {
                p.out.at(lane_index() + i as u32 * 32).store(x.to_bits());
            }
        }
    };
    for transposed in [false, true] {
        let expected = |i: usize| {
            let (m, g, q) = ([0, 0, 1, 0, 1, 2, 3][i / 32], i % 32 / 4, i % 4);
            let pair = [2 * q, 2 * q + 1].map(|k| if transposed { element(m, k, g) } else { element(m, g, k) });
            pair[0] | pair[1] << 16
        };
        check(&kernel(32, stored(transposed)), 1, expected, 7 * 32);
    }
}

#[test]
fn addresses_of_lanes_without_a_row_do_not_matter() {
    let k = kernel(32, |p| {
        let buf = SharedArray::<u32>::aligned("rows", 32, 16);
        buf.at(lane_index()).store(lane_index());
        sync_warp();
        let beyond = lane_index().ge(8).as_u32() * 0x10_0003;
        let [x] = buf.ptr().byte_at(lane_index() * 16 + beyond).load_matrices::<1>();
        p.out.at(lane_index()).store(x.to_bits());
    });
    check(&k, 1, |i| i as u32, 32);
}

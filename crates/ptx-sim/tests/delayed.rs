//! Stores to another device's memory arrive late and in any order, but never past what orders them.

mod common;

use std::collections::HashSet;

use common::*;
use ptx::*;
use ptx_sim::*;

const SYS: Scope = Scope::Sys;
const SEEDS: u64 = 80;

/// What a reader on device 0 reports, over many random schedules, while a writer of `threads` threads on device 1 runs.
/// Memory starts as zeros.
fn outcomes(threads: u32, write: impl Fn(TestParams), read: impl Fn(TestParams)) -> HashSet<Vec<u32>> {
    let k = kernel(threads, |p| {
        when_else(
            p.n.eq(1u32),
            || {
                write(p);
                // A CTA's end waits for its stores; this leaves them time to arrive by themselves.
                nanosleep(20_000u32);
            },
            || when(thread_index().eq(0u32), || read(p)),
        )
    });
    let run = |seed: u64| {
        let mut bench = Bench::new(Config { devices: 2, ..Config::seeded(seed) });
        let (out, src) = (bench.out, bench.src);
        bench.write(src, &[0; 256]);
        bench.write(out, &[0; 8]);
        let other = bench.machine.create_stream(DeviceId(1));
        let (reader, writer) = (bench.launch_of(&k, 1, 0, false), bench.launch_of(&k, 1, 1, false));
        bench.machine.enqueue(bench.stream, reader).unwrap();
        bench.machine.enqueue(other, writer).unwrap();
        bench.machine.run().unwrap();
        let mut result = bench.read(out, 2);
        // What is in memory in the end.
        result.extend(bench.read(src, 2));
        result
    };
    (0..SEEDS).map(run).collect()
}

/// The reader waits for word 64 to become 1 and then reports word 0.
fn wait_then_read(p: TestParams, wait: LoadMode) {
    while_(|| p.src.at(64u32).load_as(wait).eq(0u32), || {});
    p.out.store(p.src.load_as(LoadMode::relaxed(SYS)));
}

fn reported(outcomes: &HashSet<Vec<u32>>) -> HashSet<u32> {
    outcomes.iter().map(|outcome| outcome[0]).collect()
}

#[test]
fn a_relaxed_flag_may_overtake_relaxed_data() {
    let seen = outcomes(
        32,
        |p| {
            when(lane_index().eq(0u32), || {
                p.src.store_as(Sem::Relaxed(SYS), 7u32);
                p.src.at(64u32).store_as(Sem::Relaxed(SYS), 1u32);
            });
        },
        |p| wait_then_read(p, LoadMode::relaxed(SYS)),
    );
    assert_eq!(reported(&seen), HashSet::from([0, 7]));
    assert!(seen.iter().all(|outcome| outcome[2] == 7), "everything arrives in the end");
}

#[test]
fn a_released_flag_does_not() {
    let write = |p: TestParams| {
        when(lane_index().eq(0u32), || {
            p.src.store_as(Sem::Relaxed(SYS), 7u32);
            p.src.at(64u32).store_as(Sem::Release(SYS), 1u32);
        });
    };
    let seen = outcomes(32, write, |p| wait_then_read(p, LoadMode::acquire(SYS)));
    assert_eq!(reported(&seen), HashSet::from([7]));
}

#[test]
fn a_fence_before_the_flag_will_do() {
    for (scope, expected) in [(SYS, HashSet::from([7])), (Scope::Gpu, HashSet::from([0, 7]))] {
        let write = |p: TestParams| {
            when(lane_index().eq(0u32), || {
                p.src.store_as(Sem::Relaxed(SYS), 7u32);
                fence(scope);
                p.src.at(64u32).store_as(Sem::Relaxed(SYS), 1u32);
            });
        };
        let seen = outcomes(32, write, |p| wait_then_read(p, LoadMode::relaxed(SYS)));
        assert_eq!(reported(&seen), expected, "{scope:?}");
    }
}

#[test]
fn a_release_covers_the_stores_of_warps_met_at_a_barrier_and_of_no_others() {
    for (barrier, expected) in [(true, HashSet::from([7])), (false, HashSet::from([0, 7]))] {
        let write = |p: TestParams| {
            when(thread_index().eq(32u32), || p.src.store_as(Sem::Relaxed(SYS), 7u32));
            if barrier {
                sync_threads();
            }
            when(thread_index().eq(0u32), || p.src.at(64u32).store_as(Sem::Release(SYS), 1u32));
        };
        let seen = outcomes(64, write, |p| wait_then_read(p, LoadMode::acquire(SYS)));
        assert_eq!(reported(&seen), expected, "barrier {barrier}");
    }
}

#[test]
fn an_atomic_releases_too() {
    let write = |p: TestParams| {
        when(lane_index().eq(0u32), || {
            p.src.store_as(Sem::Relaxed(SYS), 7u32);
            p.src.at(64u32).reduce(Atomic::Add, Sem::Release(SYS), 1u32);
        });
    };
    let seen = outcomes(32, write, |p| wait_then_read(p, LoadMode::acquire(SYS)));
    assert_eq!(reported(&seen), HashSet::from([7]));
}

#[test]
fn a_thread_sees_its_own_stores_and_the_last_one_stays() {
    let write = |p: TestParams| {
        when(lane_index().eq(0u32), || {
            for value in 1..=5u32 {
                p.src.store_as(Sem::Relaxed(SYS), value);
                // Read back, in the one case of five that is not overwritten at once.
                if value == 3 {
                    p.src.offset(1).store_as(Sem::Relaxed(SYS), p.src.load_as(LoadMode::relaxed(SYS)));
                }
            }
        });
    };
    let seen = outcomes(32, write, |_| ());
    assert!(seen.iter().all(|outcome| outcome[2..] == [5, 3]), "{seen:?}");
}

#[test]
fn halves_of_a_pair_arrive_apart() {
    // The reader waits for either half, and reports whether it saw one alone.
    let read = |p: TestParams| {
        repeat(|l| {
            let v = p.src.load_vec_as::<4>(LoadMode::relaxed(SYS));
            p.out.store(v[1] + v[3] * 2);
            l.break_if((v[1] | v[3]).ne(0u32));
        });
    };
    let write = |p: TestParams| {
        when(lane_index().eq(0u32), || p.src.store_vec_as(Sem::Relaxed(SYS), [1u32; 4].map(Reg::from)));
    };
    assert_eq!(reported(&outcomes(32, write, read)), HashSet::from([1, 2, 3]));
}

#[test]
fn stores_arrive_before_their_kernel_ends() {
    let k = kernel(32, |p| {
        when_else(
            p.n.eq(1u32),
            || p.src.at(lane_index()).store_as(Sem::Relaxed(SYS), lane_index() + 5),
            || p.out.at(lane_index()).store(p.src.at(lane_index()).load()),
        );
    });
    for seed in 0..20 {
        let mut bench = Bench::new(Config { devices: 2, ..Config::seeded(seed) });
        let src = bench.src;
        bench.write(src, &[0; 32]);
        let other = bench.machine.create_stream(DeviceId(1));
        let done = bench.machine.create_event();
        let (reader, writer) = (bench.launch_of(&k, 1, 0, false), bench.launch_of(&k, 1, 1, false));
        bench.machine.enqueue(other, writer).unwrap();
        bench.machine.enqueue(other, Command::Record(done)).unwrap();
        bench.machine.enqueue(bench.stream, Command::Wait(done)).unwrap();
        bench.machine.enqueue(bench.stream, reader).unwrap();
        bench.machine.run().unwrap();
        assert_eq!(bench.read(bench.out, 32), (5..37).collect::<Vec<_>>());
    }
}

#[test]
fn a_seed_replays_the_arrivals() {
    let k = kernel(64, |p| {
        let at = p.src.at(thread_index());
        when_else(
            p.n.eq(1u32),
            || at.store_as(Sem::Relaxed(SYS), 1u32),
            || while_(|| at.load_as(LoadMode::relaxed(SYS)).eq(0u32), || {}),
        );
    });
    let hash = |seed: u64| {
        let mut bench = Bench::new(Config { devices: 2, ..Config::seeded(seed) });
        let src = bench.src;
        bench.write(src, &[0; 64]);
        let other = bench.machine.create_stream(DeviceId(1));
        for (stream, n) in [(bench.stream, 0), (other, 1)] {
            let launch = bench.launch_of(&k, 1, n, false);
            bench.machine.enqueue(stream, launch).unwrap();
        }
        bench.machine.run().unwrap();
        bench.machine.execution_hash()
    };
    for seed in 0..5 {
        assert_eq!(hash(seed), hash(seed));
    }
}

//! Small programs that pin the memory model: what is ordered, and what is a race.

mod common;

use common::*;
use ptx::*;
use ptx_sim::*;

/// The verdicts of a kernel over all modes: how many runs end well, and the kinds of traps.
fn verdicts(kernel: &Kernel<TestArgs>, grid: u32) -> (usize, Vec<TrapKind>) {
    let mut good = 0;
    let mut bad = Vec::new();
    for config in modes() {
        let mut bench = Bench::new(config);
        let (out, src) = (bench.out, bench.src);
        bench.write(out, &[0; 64]);
        bench.write(src, &[0; 64]);
        match bench.run(kernel, grid, 0) {
            Ok(()) => good += 1,
            Err(Fault::Trap(trap)) => bad.push(trap.kind),
            Err(other) => panic!("{other}"),
        }
    }
    (good, bad)
}

#[track_caller]
fn is_ordered(kernel: &Kernel<TestArgs>, grid: u32) {
    let (good, bad) = verdicts(kernel, grid);
    assert!(good > 0 && bad.is_empty(), "{bad:?}");
}

#[track_caller]
fn is_racy(kernel: &Kernel<TestArgs>, grid: u32) {
    let (good, bad) = verdicts(kernel, grid);
    assert!(good == 0 && bad.iter().all(|kind| *kind == TrapKind::DataRace), "{good} good, {bad:?}");
}

/// Message passing from CTA 0 to CTA 1 through a flag.
fn message_passing(store: Sem, load: LoadMode, fences: Option<Scope>) -> Kernel<TestArgs> {
    kernel(32, move |p| {
        let (data, flag) = (p.src, p.src.offset(1));
        when(lane_index().eq(0u32), || {
            when_else(
                cta_index().eq(0u32),
                || {
                    data.store(42u32);
                    if let Some(scope) = fences {
                        fence(scope);
                    }
                    flag.store_as(store, 1u32);
                },
                || {
                    while_(|| flag.load_as(load).eq(0u32), || {});
                    if let Some(scope) = fences {
                        fence(scope);
                    }
                    p.out.store(data.load());
                },
            );
        });
    })
}

#[test]
fn release_acquire_passes_a_message() {
    let scope = Scope::Gpu;
    is_ordered(&message_passing(Sem::Release(scope), LoadMode::acquire(scope), None), 2);
}

#[test]
fn fences_make_relaxed_accesses_pass_a_message() {
    let scope = Scope::Gpu;
    is_ordered(&message_passing(Sem::Relaxed(scope), LoadMode::relaxed(scope), Some(scope)), 2);
    is_ordered(&message_passing(Sem::Volatile, LoadMode::VOLATILE, Some(Scope::Sys)), 2);
}

#[test]
fn relaxed_accesses_alone_do_not() {
    let scope = Scope::Gpu;
    is_racy(&message_passing(Sem::Relaxed(scope), LoadMode::relaxed(scope), None), 2);
    is_racy(&message_passing(Sem::Volatile, LoadMode::VOLATILE, None), 2);
}

#[test]
fn half_of_a_pair_does_not() {
    let scope = Scope::Gpu;
    is_racy(&message_passing(Sem::Release(scope), LoadMode::relaxed(scope), None), 2);
    is_racy(&message_passing(Sem::Relaxed(scope), LoadMode::acquire(scope), None), 2);
}

#[test]
fn cta_scope_does_not_reach_another_cta() {
    is_racy(&message_passing(Sem::Release(Scope::Cta), LoadMode::acquire(Scope::Gpu), None), 2);
    is_racy(&message_passing(Sem::Relaxed(Scope::Gpu), LoadMode::relaxed(Scope::Gpu), Some(Scope::Cta)), 2);
}

/// A peer writes, its next kernel releases a flag, a kernel acquires it, and a later one of that kernel's stream reads what was
/// written.
#[test]
fn what_a_kernel_has_acquired_is_seen_by_what_comes_after_it_in_its_stream() {
    let k = |acquire: bool| {
        kernel(32, move |p| {
            when(p.n.eq(2u32), wait_for_dependencies);
            let (data, flag) = (p.src, p.src.offset(1));
            let sem = if acquire { LoadMode::acquire(Scope::Sys) } else { LoadMode::relaxed(Scope::Sys) };
            when(lane_index().eq(0u32), || {
                when(p.n.eq(0u32), || data.store(42u32));
                when(p.n.eq(4u32), || flag.store_as(Sem::Release(Scope::Sys), 1u32));
                when(p.n.eq(1u32), || while_(|| flag.load_as(sem).eq(0u32), || {}));
                when(p.n.eq(2u32) | p.n.eq(3u32), || p.out.store(data.load()));
            });
        })
    };
    // By a launch with overlap (2) and one without (3), right after it, or after something else.
    for (last, between) in [(2, 0), (3, 0), (2, 1), (3, 1), (3, 2)] {
        for (acquire, config) in
            [true, false].into_iter().flat_map(|acquire| modes().into_iter().map(move |c| (acquire, c)))
        {
            let k = k(acquire);
            let mut bench = Bench::new(Config { devices: 2, ..config });
            let (src, out) = (bench.src, bench.out);
            bench.write(src, &[0; 2]);
            let peer = bench.machine.create_stream(DeviceId(1));
            for n in [0, 4] {
                let launch = bench.launch_of(&k, 1, n, false);
                bench.machine.enqueue(peer, launch).unwrap();
            }
            bench.enqueue(&k, 1, 1, false);
            for _ in 0..between {
                let fill = Command::Fill { address: out + 8, len: 4, byte: 1 };
                bench.machine.enqueue(bench.stream, fill).unwrap();
            }
            bench.enqueue(&k, 1, last, last == 2);
            let result = bench.machine.run();
            if acquire {
                result.unwrap();
                assert_eq!(bench.read(out, 1), [42]);
            } else {
                assert_eq!(trapped(result).kind, TrapKind::DataRace);
            }
        }
    }
}

#[test]
fn gpu_scope_does_not_reach_another_device() {
    for (scope, ordered) in [(Scope::Gpu, false), (Scope::Sys, true)] {
        let k = kernel(32, move |p| {
            let (data, flag) = (p.src, p.src.offset(1));
            when(lane_index().eq(0u32), || {
                when_else(
                    p.n.eq(0u32),
                    || {
                        data.store(42u32);
                        flag.store_as(Sem::Release(scope), 1u32);
                    },
                    || {
                        while_(|| flag.load_as(LoadMode::acquire(scope)).eq(0u32), || {});
                        p.out.store(data.load());
                    },
                );
            });
        });
        for config in modes() {
            let mut bench = Bench::new(Config { devices: 2, ..config });
            let src = bench.src;
            bench.write(src, &[0; 2]);
            let peer = bench.machine.create_stream(DeviceId(1));
            let (a, b) = (bench.launch_of(&k, 1, 0, false), bench.launch_of(&k, 1, 1, false));
            bench.machine.enqueue(bench.stream, a).unwrap();
            bench.machine.enqueue(peer, b).unwrap();
            let result = bench.machine.run();
            if ordered {
                result.unwrap();
                assert_eq!(bench.read(bench.out, 1), [42]);
            } else {
                assert_eq!(trapped(result).kind, TrapKind::DataRace);
            }
        }
    }
}

#[test]
fn data_that_carries_its_flag_needs_no_fence() {
    // Each 8-byte half of the pair holds a word and the epoch, and is polled by itself.
    let k = kernel(32, |p| {
        let slot = p.src.cast::<u32>();
        when(lane_index().eq(0u32), || {
            when_else(
                cta_index().eq(0u32),
                || slot.store_vec_as(Sem::Relaxed(Scope::Sys), [7u32, 1, 8, 1].map(Reg::from)),
                || {
                    repeat(|l| {
                        let v = slot.load_vec_as::<4>(LoadMode::relaxed(Scope::Sys));
                        p.out.store(v[0]);
                        p.out.offset(1).store(v[2]);
                        l.break_if(v[1].eq(1u32) & v[3].eq(1u32));
                    });
                },
            );
        });
    });
    is_ordered(&k, 2);
}

#[test]
fn a_16_byte_store_may_tear_into_halves_but_no_further() {
    // The reader polls the first half only, and reports what it then finds in all four words.
    let k = kernel(32, |p| {
        when(lane_index().eq(0u32), || {
            when_else(
                cta_index().eq(0u32),
                || p.src.store_vec_as(Sem::Relaxed(Scope::Sys), [1u32; 4].map(Reg::from)),
                || {
                    repeat(|l| {
                        let v = p.src.load_vec_as::<4>(LoadMode::relaxed(Scope::Sys));
                        p.out.store_vec(v);
                        l.break_if((v[1] | v[3]).ne(0u32));
                    });
                },
            );
        });
    });
    let seen = |config| {
        let mut bench = Bench::new(config);
        let src = bench.src;
        bench.write(src, &[0; 4]);
        bench.run(&k, 2, 0).unwrap();
        bench.read(bench.out, 4)
    };
    assert_eq!(seen(Config::default()), [1; 4]);
    let all: Vec<_> = (0..200).map(|seed| seen(Config::seeded(seed))).collect();
    for half in [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]] {
        assert!(all.iter().any(|v| *v == half), "{half:?} never seen");
    }
    assert!(all.iter().all(|v| v[0] == v[1] && v[2] == v[3]));
}

#[test]
fn atomics_count_without_a_race_and_without_loss() {
    let k = kernel(64, |p| {
        for _ in 0..4 {
            p.out.reduce(Atomic::Add, Sem::Relaxed(Scope::Gpu), 1u32);
        }
    });
    for config in modes() {
        let mut bench = Bench::new(config);
        let out = bench.out;
        bench.write(out, &[0]);
        bench.run(&k, 9, 0).unwrap();
        assert_eq!(bench.read(out, 1), [64 * 4 * 9]);
    }
}

#[test]
fn the_last_cta_sees_what_all_have_written() {
    // The classic: write a partial result, fence, count; the last to count adds up.
    let k = kernel(32, |p| {
        let last = SharedArray::<u32>::new("last", 1);
        let parts = p.src.offset(16);
        when(lane_index().eq(0u32), || {
            parts.at(cta_index()).store(cta_index() + 1u32);
            fence(Scope::Gpu);
            let before = p.src.atomic(Atomic::Add, Sem::Relaxed(Scope::Gpu), 1u32);
            fence(Scope::Gpu);
            last.at(0u32).store(before);
        });
        sync_threads();
        when(last.at(0u32).load().eq(6u32), || {
            when(lane_index().eq(0u32), || {
                let sum = Var::new(Reg::<u32>::from(0));
                for_range(0u32, 7u32, 1u32, |i| sum.add(parts.at(i).load()));
                p.out.store(sum.get());
            });
        });
    });
    for config in modes() {
        let mut bench = Bench::new(config);
        let src = bench.src;
        bench.write(src, &[0]);
        bench.run(&k, 7, 0).unwrap();
        assert_eq!(bench.read(bench.out, 1), [28]);
    }
}

#[test]
fn named_barriers_hand_over_in_one_direction() {
    let k = kernel(64, |p| {
        let box_ = SharedArray::<u32>::new("box", 32);
        when_else(
            warp_index().eq(0u32),
            || {
                box_.at(lane_index()).store(lane_index() + 9u32);
                arrive_named(3u32, 64);
            },
            || {
                sync_named(3u32, 64);
                p.out.at(lane_index()).store(box_.at(lane_index() ^ 5u32).load());
            },
        );
    });
    check(&k, 2 - 1, |i| (i as u32 ^ 5) + 9, 32);
}

#[test]
fn a_warp_barrier_orders_its_lanes() {
    let k = kernel(32, |p| {
        let buf = SharedArray::<u32>::new("buf", 32);
        buf.at(lane_index()).store(lane_index());
        sync_warp();
        p.out.at(lane_index()).store(buf.at(lane_index() ^ 1u32).load());
    });
    check(&k, 1, |i| i as u32 ^ 1, 32);
}

#[test]
fn a_lane_may_wait_for_another_of_its_warp() {
    let k = kernel(32, |p| {
        let flag = SharedArray::<u32>::new("flag", 1);
        when(lane_index().eq(0u32), || flag.at(0u32).store(0u32));
        sync_warp();
        when_else(
            lane_index().eq(0u32),
            || {
                let at = flag.at(0u32);
                while_(|| at.load_as(LoadMode::relaxed(Scope::Cta)).ne(31u32), || {});
            },
            || flag.at(0u32).reduce(Atomic::Add, Sem::Relaxed(Scope::Cta), 1u32),
        );
        sync_warp();
        p.out.at(lane_index()).store(flag.at(0u32).load());
    });
    check(&k, 1, |_| 31, 32);
}

#[test]
fn ctas_take_turns() {
    // A token passes through all CTAs three times.
    let k = kernel(32, |p| {
        when(lane_index().eq(0u32), || {
            for round in 0..3u32 {
                let mine = cta_index() + 4 * round;
                while_(|| p.src.load_as(LoadMode::acquire(Scope::Gpu)).ne(mine), || {});
                p.out.offset(round as i32).store(cta_index());
                p.src.store_as(Sem::Release(Scope::Gpu), mine + 1u32);
            }
        });
    });
    is_ordered(&k, 4);
}

#[test]
fn events_order_streams() {
    for with_event in [true, false] {
        let write = kernel(32, |p| p.src.at(lane_index()).store(lane_index() + 1u32));
        let read = kernel(32, |p| p.out.at(lane_index()).store(p.src.at(lane_index()).load()));
        for config in modes() {
            let mut bench = Bench::new(config);
            let src = bench.src;
            bench.write(src, &[0; 32]);
            let other = bench.machine.create_stream(DeviceId(0));
            let event = bench.machine.create_event();
            bench.enqueue(&write, 1, 0, false);
            bench.machine.enqueue(bench.stream, Command::Record(event)).unwrap();
            if with_event {
                bench.machine.enqueue(other, Command::Wait(event)).unwrap();
            }
            let launch = bench.launch_of(&read, 1, 0, false);
            bench.machine.enqueue(other, launch).unwrap();
            let result = bench.machine.run();
            if with_event {
                result.unwrap();
                assert_eq!(bench.read(bench.out, 3), [1, 2, 3]);
            } else {
                assert_eq!(trapped(result).kind, TrapKind::DataRace);
            }
        }
    }
}

#[test]
fn dependent_launches_overlap_and_wait() {
    let producer = kernel(64, |p| {
        wait_for_dependencies();
        launch_dependents();
        nanosleep(50_000u32);
        p.out.at(cta_index().mad(64, thread_index())).store(thread_index());
    });
    let consumer = kernel(64, |p| {
        let at = cta_index().mad(64, thread_index());
        wait_for_dependencies();
        p.src.at(at).store(p.out.at(at).load() + 100u32);
    });
    for config in modes() {
        let mut bench = Bench::new(config);
        bench.enqueue(&producer, 6, 0, false);
        bench.enqueue(&consumer, 6, 0, true);
        // A third that must not overtake the second, and a host command behind it.
        bench.enqueue(&producer, 6, 0, true);
        let (out, src) = (bench.out, bench.src);
        bench.machine.enqueue(bench.stream, Command::Copy { dst: out, src, len: 256 }).unwrap();
        bench.machine.run().unwrap();
        assert_eq!(bench.read(out, 64), (100..164).collect::<Vec<_>>());
    }
}

/// On device 1 a kernel writes data, raises a flag, and runs on until it is told to end. On device 0 one kernel waits for the
/// flag, and the next, plain or dependent, overwrites the data.
fn handed_on(fenced: bool, overlap: bool) -> Result<(), Fault> {
    let sys = || LoadMode::relaxed(Scope::Sys);
    let k = kernel(32, |p| {
        wait_for_dependencies();
        let (data, flag, end) = (p.src, p.src.offset(32), p.src.offset(64));
        let fenced = || {
            if fenced {
                fence(Scope::Sys)
            }
        };
        when(lane_index().eq(0u32), || {
            when(p.n.eq(0u32), || {
                while_(|| flag.load_as(sys()).eq(0u32), || {});
                fenced();
            });
            when(p.n.eq(1u32), || {
                data.store(1u32);
                fence(Scope::Sys);
                flag.store_as(Sem::Relaxed(Scope::Sys), 1u32);
                while_(|| end.load_as(sys()).eq(0u32), || {});
            });
            when(p.n.eq(2u32), || {
                data.store(2u32);
                end.store_as(Sem::Relaxed(Scope::Sys), 1u32);
            });
        });
    });
    for config in modes() {
        let mut bench = Bench::new(Config { devices: 2, ..config });
        let (src, other) = (bench.src, bench.machine.create_stream(DeviceId(1)));
        bench.write(src, &[0; 128]);
        let write = bench.launch_of(&k, 1, 1, false);
        bench.machine.enqueue(other, write).unwrap();
        bench.enqueue(&k, 1, 0, false);
        bench.enqueue(&k, 1, 2, overlap);
        bench.machine.run()?;
        assert_eq!(bench.read(src, 1), [2]);
    }
    Ok(())
}

#[test]
fn what_a_launch_acquired_its_successors_know() {
    for overlap in [false, true] {
        handed_on(true, overlap).unwrap();
        assert_eq!(trapped(handed_on(false, overlap)).kind, TrapKind::DataRace);
    }
}

#[test]
fn overlap_without_a_wait_is_refused() {
    let k = kernel(32, |p| p.out.at(lane_index()).store(0u32));
    let mut bench = Bench::new(Config::default());
    let launch = bench.launch_of(&k, 1, 0, true);
    let error = bench.machine.enqueue(bench.stream, launch).unwrap_err();
    assert_eq!(error, LaunchError::Overlap { kernel: "test_kernel".into() });
}

#[test]
fn launches_are_validated() {
    let k = kernel(32, |p| {
        SharedArray::<u32>::new("buf", 32);
        p.out.at(lane_index()).store(0u32);
    });
    let mut bench = Bench::new(Config::default());
    let mut refused = |change: fn(&mut Launch)| {
        let Command::Launch(mut launch) = bench.launch_of(&k, 1, 0, false) else { unreachable!() };
        change(&mut launch);
        bench.machine.enqueue(bench.stream, Command::Launch(launch)).unwrap_err()
    };
    assert!(matches!(refused(|l| l.grid = [0, 1, 1]), LaunchError::Grid { .. }));
    assert!(matches!(refused(|l| l.grid = [1, 65_536, 1]), LaunchError::Grid { .. }));
    assert!(matches!(refused(|l| l.shared_bytes = 64), LaunchError::Shared { needed: 128, .. }));
    assert!(matches!(refused(|l| l.shared_bytes = 1 << 20), LaunchError::Shared { .. }));
    assert!(matches!(refused(|l| _ = l.params.pop()), LaunchError::Params { .. }));
    let fill = Command::Fill { address: 1 << 40, len: 1, byte: 0 };
    assert!(matches!(bench.machine.enqueue(bench.stream, fill), Err(LaunchError::Memory(_))));
    assert_eq!(bench.machine.enqueue(StreamId(9), Command::Record(EventId(0))), Err(LaunchError::NoStream(9)));
    assert_eq!(bench.machine.enqueue(bench.stream, Command::Wait(EventId(0))), Err(LaunchError::NoEvent(0)));
}

#[test]
fn host_commands_run_in_stream_order() {
    let k = kernel(32, |p| p.out.at(lane_index()).store(p.out.at(lane_index()).load() + 1u32));
    let mut bench = Bench::new(Config::default());
    let (out, stream) = (bench.out, bench.stream);
    let zero = Command::Fill { address: out, len: 128, byte: 0 };
    bench.machine.enqueue(stream, zero).unwrap();
    bench.enqueue(&k, 1, 0, false);
    bench.enqueue(&k, 1, 0, false);
    bench.machine.enqueue(stream, Command::Copy { dst: out + 128, src: out, len: 64 }).unwrap();
    bench.machine.enqueue(stream, Command::Write { address: out, bytes: vec![9; 4] }).unwrap();
    bench.enqueue(&k, 1, 0, false);
    bench.machine.run().unwrap();
    assert_eq!(bench.read(out, 2), [0x0909_090A, 3]);
    assert_eq!(bench.read(out + 128, 16), [2; 16]);
}

#[test]
fn a_seed_replays_the_execution() {
    let k = kernel(128, |p| {
        let buf = SharedArray::<u32>::new("buf", 128);
        for round in 0..4u32 {
            buf.at(thread_index()).store(thread_index() + round);
            sync_threads();
            p.out.reduce(Atomic::Add, Sem::Relaxed(Scope::Gpu), buf.at(thread_index() ^ 1u32).load());
            sync_threads();
        }
    });
    let hash = |config: Config| {
        let mut bench = Bench::new(config);
        let out = bench.out;
        bench.write(out, &[0]);
        bench.run(&k, 5, 0).unwrap();
        bench.machine.execution_hash()
    };
    let hashes: Vec<u64> = (0..4).map(|seed| hash(Config::seeded(seed))).collect();
    assert_eq!(hashes, (0..4).map(|seed| hash(Config::seeded(seed))).collect::<Vec<_>>());
    assert!((1..4).all(|i| !hashes[..i].contains(&hashes[i])), "seeds give different schedules: {hashes:x?}");
    assert_eq!(hash(Config::default()), hash(Config::default()));
}

//! Runs that cannot end.

use crate::common::*;
use ptx::*;
use ptx_sim::*;

#[test]
fn barrier_that_a_warp_never_reaches() {
    let line = line!() + 3;
    let k = kernel(96, |p| {
        when(warp_index().ne(1u32), || {
            sync_named(1u32, 96);
        });
        p.out.at(thread_index()).store(0u32);
    });
    let trap = fails_in(&modes(), &k, 1, TrapKind::Deadlock, file!(), &[line]);
    assert!(trap.message.contains("barrier 1 (64 of 96 threads)"), "{trap}");
}

#[test]
fn flag_that_nobody_sets() {
    let line = line!() + 3;
    let k = kernel(32, |p| {
        let flag = p.src.offset(5);
        while_(|| flag.load_as(LoadMode::relaxed(Scope::Gpu)).eq(5u32), || {});
        p.out.at(thread_index()).store(0u32);
    });
    let trap = fails_in(&[Config::default()], &k, 1, TrapKind::Deadlock, file!(), &[line]);
    assert!(trap.message.contains("polls"), "{trap}");
}

/// Two warpgroups of four warps launched with 96 registers a thread: the first grows to 128, the second shrinks to `left`.
fn trade(left: u32) -> Kernel<TestArgs> {
    build("test_kernel", Target::Sm90a, LaunchBounds::threads(256).max_registers(96), |p: TestParams| {
        when_else(warp_index().lt(4u32), || grow_registers(128), || shrink_registers(left));
        p.out.at(thread_index()).store(thread_index());
    })
    .unwrap()
}

#[test]
fn registers_beyond_those_of_the_launch() {
    // 4 x (96 - 72) are free: enough for three warps that want 32 more.
    let line = line!() - 9;
    let trap = fails_in(&modes(), &trade(72), 1, TrapKind::Deadlock, file!(), &[line]);
    assert!(trap.message.contains("1x waiting in SetMaxNReg"), "{trap}");
    for config in modes() {
        Bench::new(config).run(&trade(64), 1, 0).unwrap();
    }
}

#[test]
fn registers_moved_the_wrong_way() {
    let line = line!() + 5;
    for grows in [true, false] {
        let bounds = LaunchBounds::threads(128).max_registers(112);
        let k = build("test_kernel", Target::Sm90a, bounds, |p: TestParams| {
            if grows {
                grow_registers(96)
            } else {
                shrink_registers(128)
            }
            p.out.store(0u32);
        });
        let trap = fails_in(&modes(), &k.unwrap(), 1, TrapKind::Operand, file!(), &[line, line + 2]);
        assert!(trap.message.contains("a warp of 112 registers a thread cannot"), "{trap}");
    }
}

#[test]
fn fuel() {
    let line = line!() + 3;
    let k = kernel(32, |p| {
        let x = Var::new(p.n);
        while_(|| x.get().ne(1u32), || x.add(2u32));
        p.out.at(thread_index()).store(0u32);
    });
    let config = Config { fuel: 100_000, ..Config::default() };
    let trap = fails_in(&[config], &k, 1, TrapKind::FuelExhausted, file!(), &[line]);
    assert!(trap.message.contains("livelock"), "{trap}");
}

#[test]
fn two_ctas_that_are_never_resident_together() {
    // The first CTA waits for the second, which gets its multiprocessor only afterwards.
    let line = line!() + 3;
    let k = kernel(512, |p| {
        when(cta_index().eq(0u32), || {
            while_(|| p.out.load_as(LoadMode::acquire(Scope::Gpu)).eq(0u32), || {});
        });
        when(cta_index().eq(1u32), || p.out.store_as(Sem::Release(Scope::Gpu), 1u32));
    });
    let config = Config { sms: 1, ..Config::default() };
    let mut bench = Bench::new(config);
    let out = bench.out;
    bench.write(out, &[0]);
    let trap = trapped(bench.run(&k, 2, 0));
    assert_eq!(trap.kind, TrapKind::Deadlock);
    assert!(trap.at.contains(&format!("progress.rs:{line}:")), "{trap}");
    // With two multiprocessors it runs.
    let mut bench = Bench::new(Config { sms: 2, ..Config::default() });
    let out = bench.out;
    bench.write(out, &[0]);
    bench.run(&k, 2, 0).unwrap();
}

/// Every lane polls for what never comes, from `start` on for two seconds, and says that it was late.
fn poll_in_vain(p: TestParams, start: Reg<u64>) {
    let late = Var::new(Reg::<u32>::from(0));
    repeat(|l| {
        let seen = p.src.load_as(LoadMode::relaxed(Scope::Sys));
        l.break_if(seen.ne(0u32));
        when((globaltimer() - start).gt(2_000_000_000u64), || late.set(Reg::from(1u32)));
        l.break_if(late.get().ne(0u32));
    });
    p.out.at(cta_index().mad(32, lane_index())).store(late.get());
}

#[test]
fn a_bounded_poll_runs_out_in_simulated_time() {
    let k = kernel(32, |p| {
        let start = globaltimer();
        poll_in_vain(p, start);
    });
    check(&k, 3, |_| 1, 96);
}

#[test]
fn a_warp_that_was_divided_when_it_first_polled_lets_time_pass_all_the_same() {
    let k = kernel(32, |p| {
        let start = globaltimer();
        // The lanes leave this one after another, right after the timer was read.
        let rounds = Var::new(Reg::<u32>::from(0));
        while_(|| rounds.get().lt(lane_index()), || rounds.add(1u32));
        poll_in_vain(p, start);
    });
    check(&k, 3, |_| 1, 96);
}

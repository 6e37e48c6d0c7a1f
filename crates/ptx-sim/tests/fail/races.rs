//! Accesses that nothing orders.

use crate::common::*;
use ptx::*;
use ptx_sim::*;

#[track_caller]
fn fails(threads: u32, grid: u32, lines: &[u32], body: impl FnOnce(TestParams)) -> Trap {
    fails_in(&modes(), &kernel(threads, body), grid, TrapKind::DataRace, file!(), lines)
}

#[test]
fn shared_memory_without_a_barrier() {
    let line = line!() + 5;
    let trap = fails(64, 1, &[line, line + 1], |p| {
        let buf = SharedArray::<u32>::new("exchange", 64);
        buf.at(thread_index()).store(0u32);
        sync_threads();
        buf.at(thread_index()).store(1u32);
        let x = buf.at(thread_index() ^ 32u32).load();
        p.out.at(thread_index()).store(x);
    });
    assert!(trap.message.contains("\"exchange\"") && trap.message.contains("(1)"), "{trap}");
}

#[test]
fn lanes_of_one_warp_without_a_warp_barrier() {
    let line = line!() + 4;
    let trap = fails(32, 1, &[line], |p| {
        let buf = SharedArray::<u32>::new("exchange", 32);
        buf.at(lane_index()).store(lane_index());
        let x = buf.at(lane_index() ^ 1u32).load();
        p.out.at(lane_index()).store(x);
    });
    assert!(trap.message.contains("warp barrier"), "{trap}");
}

#[test]
fn second_write_after_the_read() {
    let line = line!() + 6;
    fails(64, 1, &[line, line - 1], |p| {
        let buf = SharedArray::<u32>::new("exchange", 64);
        buf.at(thread_index()).store(1u32);
        sync_threads();
        p.out.at(thread_index()).store(buf.at(thread_index() ^ 32u32).load());
        buf.at(thread_index()).store(2u32);
    });
}

#[test]
fn two_ctas_write_one_word() {
    let line = line!() + 2;
    fails(32, 2, &[line], |p| {
        when(lane_index().eq(0u32), || p.out.store(cta_index()));
    });
}

#[test]
fn lanes_write_different_values_to_one_word() {
    let line = line!() + 2;
    fails(32, 1, &[line], |p| {
        p.out.store(lane_index());
    });
}

#[test]
fn lanes_write_one_value_to_one_word() {
    let k = kernel(32, |p| p.out.store(7u32));
    check(&k, 1, |_| 7, 1);
}

#[test]
fn atomics_of_too_small_a_scope() {
    let line = line!() + 2;
    let k = kernel(32, |p| {
        p.src.reduce(Atomic::Add, Sem::Relaxed(Scope::Cta), 1u32);
    });
    let trap = fails_in(&modes(), &k, 2, TrapKind::DataRace, file!(), &[line]);
    assert!(trap.message.contains("scope"), "{trap}");
}

#[test]
fn consumer_launch_reads_before_its_wait() {
    let produce_line = line!() + 4;
    let producer = kernel(32, |p| {
        wait_for_dependencies();
        launch_dependents();
        p.out.at(thread_index()).store(5u32);
    });
    let consume_line = line!() + 2;
    let consumer = kernel(32, |p| {
        let early = p.out.at(thread_index()).load();
        wait_for_dependencies();
        p.src.at(thread_index()).store(early);
    });
    for config in modes() {
        let mut bench = Bench::new(config);
        let out = bench.out;
        bench.write(out, &[1; 32]);
        bench.enqueue(&producer, 1, 0, false);
        bench.enqueue(&consumer, 1, 0, true);
        let trap = trapped(bench.machine.run());
        assert_eq!(trap.kind, TrapKind::DataRace, "{trap}");
        let lines = [format!("races.rs:{produce_line}:"), format!("races.rs:{consume_line}:")];
        assert!(lines.iter().all(|line| trap.message.contains(line)), "{trap}");
    }
}

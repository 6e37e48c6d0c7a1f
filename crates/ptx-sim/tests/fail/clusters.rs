//! Misuse of clusters.

use crate::common::*;
use ptx::*;
use ptx_sim::*;

fn clustered(threads: u32, body: impl FnOnce(TestParams)) -> Kernel<TestArgs> {
    build("test_kernel", Target::Sm90a, LaunchBounds::threads(threads).cluster(2), body).unwrap()
}

#[track_caller]
fn fails(threads: u32, kind: TrapKind, line: u32, body: impl FnOnce(TestParams)) -> Trap {
    fails_in(&modes(), &clustered(threads, body), 2, kind, file!(), &[line])
}

fn words() -> SharedArray<u32> {
    SharedArray::new("words", 32)
}

/// One barrier that expects `bytes`, known to the cluster.
fn barrier(bytes: u32) -> Mbarrier {
    let bar = MbarrierArray::new("arrived", 1).at(0);
    when(thread_index().eq(0), || {
        bar.init(1);
        fence_mbarrier_init();
        bar.arrive_expect(bytes);
    });
    cluster_arrive_relaxed();
    cluster_wait();
    bar
}

#[test]
fn peer_that_need_not_have_started() {
    let line = line!() + 2;
    let trap = fails(32, TrapKind::DataRace, line, |_| {
        words().at(lane_index()).of_cta(cluster_rank() ^ 1).store(1);
        cluster_sync();
    });
    assert!(trap.message.contains("after that CTA's start"), "{trap}");
}

#[test]
fn peer_that_may_have_ended() {
    let k = clustered(32, |p| {
        let words = words();
        words.at(lane_index()).store(3);
        cluster_sync();
        when(cluster_rank().eq(1), || p.out.at(lane_index()).store(words.at(lane_index()).of_cta(0u32).load()));
    });
    // The peer is gone already, or its end comes too early: a fault in every order.
    for config in modes() {
        let trap = trapped(Bench::new(config).run(&k, 2, 0));
        assert!(matches!(trap.kind, TrapKind::ExitInFlight | TrapKind::Freed), "{config:?}: {trap}");
        assert!(trap.message.contains("ends") || trap.message.contains("has ended"), "{trap}");
    }
}

#[test]
fn data_that_a_relaxed_arrival_does_not_publish() {
    let line = line!() + 6;
    let trap = fails(32, TrapKind::DataRace, line, |p| {
        let words = words();
        words.at(lane_index()).store(3);
        cluster_arrive_relaxed();
        cluster_wait();
        let got = words.at(lane_index()).of_cta(cluster_rank() ^ 1).load();
        p.out.at(cta_index().mad(32, lane_index())).store(got);
        cluster_sync();
    });
    assert!(trap.message.contains("\"words\"") && trap.message.contains("nothing orders them"), "{trap}");
}

#[test]
fn write_to_a_peer_that_reads_it() {
    let lines = [line!() + 5, line!() + 6];
    let k = clustered(32, |p| {
        let words = words();
        words.at(lane_index()).store(3);
        cluster_sync();
        words.at(lane_index()).of_cta(cluster_rank() ^ 1).store(4);
        p.out.at(cta_index().mad(32, lane_index())).store(words.at(lane_index()).load());
        cluster_sync();
    });
    fails_in(&modes(), &k, 2, TrapKind::DataRace, file!(), &lines);
}

#[test]
fn rank_outside_the_cluster() {
    let line = line!() + 3;
    let trap = fails(32, TrapKind::Operand, line, |_| {
        cluster_sync();
        words().ptr().of_cta(cluster_rank() + 2).store(1);
    });
    assert!(trap.message.contains("in a cluster of 2 CTAs"), "{trap}");
}

#[test]
fn peer_memory_past_its_end() {
    let line = line!() + 4;
    let trap = fails(32, TrapKind::OutOfBounds, line, |_| {
        let words = words();
        cluster_sync();
        words.at(lane_index() + 1).of_cta(cluster_rank() ^ 1).store(1);
    });
    assert_eq!(trap.lane, Some(31), "{trap}");
}

#[test]
fn peer_address_in_an_ordinary_access() {
    let line = line!() + 4;
    fails(32, TrapKind::OutOfBounds, line, |p| {
        cluster_sync();
        let window = Reg::from(SHARED_BASE + (1 << 24));
        p.out.store(Shared::<u32>::from_address(window).load());
    });
}

#[test]
fn misaligned_asynchronous_store() {
    let line = line!() + 4;
    fails(32, TrapKind::Misaligned, line, |p| {
        let (words, bar) = (words(), barrier(16));
        let to = words.at(1u32).of_cta(cluster_rank() ^ 1);
        to.store_async([p.n; 4], bar.of_cta(cluster_rank() ^ 1));
    });
}

#[test]
fn mbarrier_of_another_cta_than_the_data() {
    let line = line!() + 4;
    let trap = fails(32, TrapKind::Operand, line, |p| {
        let (words, bar) = (words(), barrier(4));
        let to = words.at(lane_index()).of_cta(0u32);
        to.store_async([p.n], bar.of_cta(1u32));
    });
    assert!(trap.message.contains("CTA 0") && trap.message.contains("CTA 1"), "{trap}");
}

#[test]
fn mbarrier_that_the_cluster_does_not_know() {
    // Initialised without the fence that the relaxed arrival publishes.
    let lines = [line!() + 7];
    let k = clustered(32, |p| {
        let (words, bar) = (words(), MbarrierArray::new("arrived", 1).at(0));
        when(thread_index().eq(0), || bar.init(1));
        cluster_arrive_relaxed();
        cluster_wait();
        let (peer, to) = (cluster_rank() ^ 1, words.at(lane_index()));
        to.of_cta(peer).store_async([p.n], bar.of_cta(peer));
    });
    fails_in(&modes(), &k, 2, TrapKind::DataRace, file!(), &lines);
}

#[test]
fn arrived_bytes_read_before_the_wait() {
    let line = line!() + 6;
    let k = clustered(32, |p| {
        let (words, bar) = (words(), barrier(128));
        let (peer, to) = (cluster_rank() ^ 1, words.at(lane_index()));
        to.of_cta(peer).store_async([p.n], bar.of_cta(peer));
        cluster_sync();
        p.out.at(cta_index().mad(32, lane_index())).store(to.load());
        bar.wait_cluster(0u32);
    });
    for config in modes() {
        let trap = trapped(Bench::new(config).run(&k, 2, 0));
        assert!(matches!(trap.kind, TrapKind::ResultPending | TrapKind::DataRace), "{config:?}: {trap}");
        assert!(trap.at.contains(&format!("{}:{line}:", file!())), "{trap}");
    }
}

#[test]
fn a_wait_of_the_ctas_scope_does_not_acquire_a_peers_stores() {
    let line = line!() + 6;
    fails(32, TrapKind::DataRace, line, |p| {
        let (words, bar) = (words(), barrier(128));
        let (peer, to) = (cluster_rank() ^ 1, words.at(lane_index()));
        to.of_cta(peer).store_async([p.n], bar.of_cta(peer));
        bar.wait(0u32);
        p.out.at(cta_index().mad(32, lane_index())).store(to.load());
        cluster_sync();
    });
}

#[test]
fn a_read_after_the_store_that_says_it_was_done() {
    let line = line!() + 8;
    let k = clustered(32, |p| {
        let (words, signals, bar) = (words(), SharedArray::<u32>::new("signals", 32), barrier(128));
        let (peer, t) = (cluster_rank() ^ 1, lane_index());
        words.at(t).store(p.n);
        signals.at(t).of_cta(peer).store_async([p.n], bar.of_cta(peer));
        let late = words.at(t).load();
        bar.wait_cluster(0u32);
        words.at(t).of_cta(peer).store(p.n);
        cluster_sync();
        p.out.at(cta_index().mad(32, t)).store(late);
    });
    fails_in(&modes(), &k, 2, TrapKind::DataRace, file!(), &[line, line - 2]);
}

#[test]
fn a_wait_of_the_ctas_scope_does_not_acquire_what_a_peers_stores_release() {
    let line = line!() + 7;
    let k = clustered(32, |p| {
        let (words, signals, bar) = (words(), SharedArray::<u32>::new("signals", 32), barrier(128));
        let (peer, t) = (cluster_rank() ^ 1, lane_index());
        words.at(t).store(p.n);
        signals.at(t).of_cta(peer).store_async([words.at(t).load()], bar.of_cta(peer));
        bar.wait(0u32);
        words.at(t).of_cta(peer).store(p.n);
        cluster_sync();
        p.out.at(cta_index().mad(32, t)).store(words.at(t).load());
    });
    fails_in(&modes(), &k, 2, TrapKind::DataRace, file!(), &[line]);
}

#[test]
fn stores_under_way_when_the_target_ends() {
    let k = clustered(32, |p| {
        let (words, bar) = (words(), barrier(128));
        let (peer, to) = (cluster_rank() ^ 1, words.at(lane_index()));
        to.of_cta(peer).store_async([p.n], bar.of_cta(peer));
        cluster_sync();
    });
    for config in modes() {
        let trap = trapped(Bench::new(config).run(&k, 2, 0));
        assert_eq!(trap.kind, TrapKind::ExitInFlight, "{config:?}: {trap}");
    }
}

#[test]
fn bytes_that_no_peer_sends() {
    let line = line!() + 3;
    let trap = fails(32, TrapKind::ExpectTx, line, |_| {
        let bar = barrier(64);
        bar.wait_cluster(0u32);
    });
    assert!(trap.message.contains("64 bytes"), "{trap}");
}

#[test]
fn cluster_barrier_that_half_a_warp_reaches() {
    let line = line!() + 3;
    fails(32, TrapKind::Divergent, line, |_| {
        when(lane_index().lt(16), || {
            cluster_arrive();
        });
        sync_warp();
    });
}

#[test]
fn cluster_barrier_that_one_cta_does_not_reach() {
    let lines = [line!() + 4, line!() + 6];
    let k = clustered(64, |_| {
        // Only rank 0 arrives; one warp of rank 1 waits for a named barrier that nobody completes.
        when(cluster_rank().eq(0) | warp_index().eq(1), || {
            cluster_sync();
        });
        when(cluster_rank().eq(1) & warp_index().eq(0), || sync_named(1, 64));
    });
    let trap = fails_in(&modes(), &k, 2, TrapKind::Deadlock, file!(), &lines);
    assert!(trap.message.contains("barrier"), "{trap}");
}

#[test]
fn two_arrivals_without_a_wait() {
    let line = line!() + 3;
    fails(32, TrapKind::Mismatch, line, |_| {
        cluster_arrive();
        cluster_arrive();
    });
}

#[test]
fn a_wait_without_an_arrival() {
    let line = line!() + 2;
    fails(32, TrapKind::Mismatch, line, |_| {
        cluster_wait();
    });
}

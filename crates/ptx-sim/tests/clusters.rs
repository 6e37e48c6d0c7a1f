//! Clusters: ranks, the barrier, shared memory of peers, asynchronous stores.

mod common;

use common::*;
use ptx::*;
use ptx_sim::*;

fn clustered(threads: u32, size: u32, body: impl FnOnce(TestParams)) -> Kernel<TestArgs> {
    build("test_kernel", Target::Sm90a, LaunchBounds::threads(threads).cluster(size), body).unwrap()
}

#[test]
fn ranks_count_within_each_cluster() {
    let k = clustered(32, 4, |p| {
        p.out.at(cta_index().mad(32, lane_index())).store((cluster_rank() << 8) + cluster_size());
    });
    check(&k, 12, |i| ((i / 32 % 4) << 8) as u32 + 4, 12 * 32);
}

#[test]
fn values_go_round_the_cluster_by_loads() {
    let k = clustered(64, 8, |p| {
        let words = SharedArray::<u32>::new("words", 64);
        let t = thread_index();
        words.at(t).store(cta_index() * 1000 + t);
        cluster_sync();
        let next = (cluster_rank() + 1) & 7;
        let got = words.at(t).of_cta(next).load();
        p.out.at(cta_index().mad(64, t)).store(got);
        // ORDER: the reads of peers, before they end.
        cluster_sync();
    });
    check(&k, 16, |i| ((i / 64 / 8 * 8 + (i / 64 + 1) % 8) * 1000 + i % 64) as u32, 16 * 64);
}

#[test]
fn values_go_round_the_cluster_by_stores_and_back() {
    let k = clustered(32, 2, |p| {
        let words = SharedArray::<u32>::aligned("words", 128, 16);
        let t = thread_index();
        cluster_sync();
        let peer = cluster_rank() ^ 1;
        let v = cta_index() * 100 + t;
        words.at(t * 4).of_cta(peer).store_vec([v, v + 1, v + 2, v + 3]);
        cluster_sync();
        let [a, _, _, d] = words.at(t * 4).of_cta(cluster_rank()).load_vec();
        let own = words.at(t * 4 + 1).load();
        p.out.at(cta_index().mad(32, t)).store(a + d + own);
    });
    check(&k, 6, |i| 3 * (((i / 32) ^ 1) * 100 + i % 32) as u32 + 4, 6 * 32);
}

/// Every CTA sends one value per thread to every CTA, which sums what arrives.
#[test]
fn asynchronous_stores_complete_on_the_targets_barrier() {
    const SIZE: u32 = 4;
    let k = clustered(32, SIZE, |p| {
        let words = SharedArray::<u32>::aligned("words", SIZE * 32, 16);
        let bar = MbarrierArray::new("arrived", 1).at(0);
        let t = thread_index();
        when(t.eq(0), || {
            bar.init(1);
            fence_mbarrier_init();
            bar.arrive_expect(SIZE * 32 * 4);
        });
        // ORDER: every CTA has started and initialised its barrier, before anybody's stores.
        cluster_arrive_relaxed();
        cluster_wait();
        for rank in 0..SIZE {
            let to = words.at(cluster_rank().mad(32, t)).of_cta(rank);
            to.store_async([cta_index() * 100 + t], bar.of_cta(rank));
        }
        bar.wait_cluster(0);
        let sum = (0..SIZE).fold(Reg::from(0u32), |sum, from| sum + words.at(t + from * 32).load());
        p.out.at(cta_index().mad(32, t)).store(sum);
    });
    let sum = |i: usize| {
        let first = i / 32 / 4 * 4;
        (first..first + 4).map(|cta| cta * 100 + i % 32).sum::<usize>() as u32
    };
    check(&k, 8, sum, 8 * 32);
}

/// A lane reads its word, tells the peer so, and the peer overwrites the word.
#[test]
fn asynchronous_stores_release_what_came_before_them() {
    let k = clustered(32, 2, |p| {
        let (words, signals) = (SharedArray::<u32>::new("words", 32), SharedArray::<u32>::new("signals", 32));
        let bar = MbarrierArray::new("read", 1).at(0);
        let t = thread_index();
        when(t.eq(0), || {
            bar.init(1);
            fence_mbarrier_init();
            bar.arrive_expect(128u32);
        });
        words.at(t).store(cta_index() * 100 + t);
        cluster_arrive_relaxed();
        cluster_wait();
        let peer = cluster_rank() ^ 1;
        let own = words.at(t).load();
        signals.at(t).of_cta(peer).store_async([t], bar.of_cta(peer));
        bar.wait_cluster(0); // ORDER: the peer's reads, before their places are written.
        words.at(t).of_cta(peer).store(own * 2);
        cluster_sync();
        p.out.at(cta_index().mad(32, t)).store(own + words.at(t).load());
    });
    let own = |cta: usize, i: usize| cta * 100 + i % 32;
    check(&k, 4, |i| (own(i / 32, i) + 2 * own((i / 32) ^ 1, i)) as u32, 4 * 32);
}

#[test]
fn vectors_of_every_width_arrive() {
    let k = clustered(32, 2, |p| {
        let words = SharedArray::<u32>::aligned("words", 32 * 16, 16);
        let bar = MbarrierArray::new("arrived", 1).at(0);
        let t = thread_index();
        when(t.eq(0), || {
            bar.init(1);
            fence_mbarrier_init();
            bar.arrive_expect(32u32 * 44);
        });
        cluster_arrive_relaxed();
        cluster_wait();
        let peer = cluster_rank() ^ 1;
        let (to, mbar) = (words.at(t * 16), bar.of_cta(peer));
        to.of_cta(peer).store_async([t, t + 1, t + 2, t + 3], mbar);
        to.offset(4).of_cta(peer).store_async([t + 4, t + 5], mbar);
        to.offset(6).of_cta(peer).store_async([t + 6], mbar);
        let long = |n| (t + n).to_u64() | ((t + n + 1).to_u64() << 32);
        to.offset(8).cast::<u64>().of_cta(peer).store_async([long(8), long(10)], mbar);
        bar.wait_cluster(0);
        for i in (0..12).filter(|i| *i != 7) {
            p.out.at(cta_index().mad(512, t * 16 + i)).store(words.at(t * 16 + i).load());
        }
    });
    for config in modes() {
        let mut bench = Bench::new(config);
        bench.run(&k, 2, 0).unwrap_or_else(|fault| panic!("{config:?}: {fault}"));
        let out = bench.read(bench.out, 1024);
        for (at, got) in out.iter().enumerate().filter(|(at, _)| at % 16 < 12 && at % 16 != 7) {
            assert_eq!(*got as usize, at % 512 / 16 + at % 16, "word {at}, {config:?}");
        }
    }
}

#[test]
fn ended_warps_count_as_arrived() {
    let k = clustered(96, 2, |p| {
        // The last warp never arrives, the one before it arrives and does not wait.
        exit_if(warp_index().eq(2));
        cluster_arrive();
        exit_if(warp_index().eq(1));
        cluster_wait();
        p.out.at(cta_index().mad(32, lane_index())).store(7);
    });
    check(&k, 4, |_| 7, 4 * 32);
}

#[test]
fn clusters_run_one_after_the_other_on_a_small_machine() {
    let k = clustered(32, 16, |p| {
        cluster_sync();
        cluster_sync();
        p.out.at(cta_index().mad(32, lane_index())).store(cta_index());
    });
    for config in [Config { sms: 1, ..Config::default() }, Config { sms: 20, ..Config::seeded(3) }] {
        let mut bench = Bench::new(config);
        bench.run(&k, 64, 0).unwrap();
        assert!(bench.read(bench.out, 2048).iter().enumerate().all(|(i, got)| *got as usize == i / 32));
    }
}

#[test]
fn a_grid_of_broken_clusters_is_refused() {
    let k = clustered(32, 4, |_| cluster_sync());
    let mut bench = Bench::new(Config::default());
    let command = bench.launch_of(&k, 6, 0, false);
    let refused = bench.machine.enqueue(bench.stream, command).unwrap_err();
    assert_eq!(refused, LaunchError::Cluster { kernel: "test_kernel".into(), ctas: 6, cluster: 4 });
}

//! Local top-k with several CTAs a row, where it differs from one: the runs of each CTA, planes, in many schedules. That every
//! number of CTAs gives the same rows is checked wherever local top-k is.

mod common;

use common::*;
use dsa_core::ShapeError;
use dsa_core::consts::LOCAL_CONTEXT_MAX;
use dsa_core::generate::{LogitPattern, SplitMix64};
use dsa_core::numerics::order16::bits_of;
use dsa_kernels::local_topk::{IndexerLocalTopk, LocalTopkShape};
use gpu::{Device, SimConfig};

fn shared() -> impl Iterator<Item = u32> {
    CLUSTERS.into_iter().filter(|cluster| *cluster > 1)
}

fn shape(n: usize, cluster: u32) -> LocalTopkShape {
    LocalTopkShape::full(n).unwrap().with_cluster(cluster).unwrap()
}

/// Checks the rows in `out`, and pushed to `ranks` ranks.
#[track_caller]
fn check_shared(device: &Device, shape: LocalTopkShape, ranks: usize, rows: &[Vec<u16>], spare: usize) {
    check_shared_again(device, shape, ranks, rows, spare, 1);
}

/// As [`check_shared`], `runs` times with the same kernels.
#[track_caller]
fn check_shared_again(
    device: &Device,
    shape: LocalTopkShape,
    ranks: usize,
    rows: &[Vec<u16>],
    spare: usize,
    runs: usize,
) {
    let rig = LocalRig::new(device, shape.n() as usize, rows, spare);
    let counters: Vec<u32> = (0..rig.rows as u32).map(|row| row * 3).collect();
    let boxes = Boxes::new(device, rig.n, [ranks, 0], &counters);
    let kernels = [IndexerLocalTopk::new(device, shape).unwrap()];
    let pushing = IndexerLocalTopk::new(device, shape.with_push(ranks).unwrap()).unwrap();
    for _ in 0..runs {
        check_local_with(&kernels, &rig, rows);
        boxes.check_push(&pushing, &rig, rows);
    }
}

/// Keys of the longest row that the registers of the cluster hold; a longer one takes a list.
fn unlisted_max(cluster: u32) -> usize {
    8 * 2048 * cluster as usize
}

#[test]
fn rows_are_exact_either_side_of_what_the_cluster_holds() {
    on_every_device(|device| {
        for cluster in [2, 4, 8] {
            let fit = unlisted_max(cluster);
            for (n, pattern) in [(128, LogitPattern::Ties), (512, LogitPattern::Gaussian), (4096, LogitPattern::Ties)] {
                let lengths = [fit - 1, fit, fit + 1, fit + 64].map(|len| len.min(LOCAL_CONTEXT_MAX));
                let lengths = if n == 128 { &lengths[..] } else { &lengths[1..3] };
                let rows: Vec<_> = lengths.iter().map(|len| canonical(pattern.row(*len as u64, *len))).collect();
                check_shared(device, shape(n, cluster), 2, &rows, 0);
            }
        }
    });
}

/// Lengths around N and around the parts of a cluster, down to rows in which most CTAs have nothing.
#[test]
fn rows_are_exact_around_n_and_the_parts() {
    on_every_device(|device| {
        for cluster in shared() {
            let n = if cluster == 4 { 384 } else { 128 };
            let part = 256 * cluster as usize; // a line of every CTA
            let lengths = [0, 1, n - 1, n, n + 1, n + 7, part - 1, part, part + 1, 2 * part + 9];
            let row = |len: &usize| canonical(LogitPattern::FewDistinct(9).row(*len as u64, *len));
            check_shared(device, shape(n, cluster), 3, &lengths.iter().map(row).collect::<Vec<_>>(), 1);
        }
    });
}

/// The first keys, or the ties, in a CTA's part alone, or few in every part: runs that are empty, whole, or share a pair.
#[test]
fn skewed_rows_are_exact() {
    on_every_device(|device| {
        for cluster in shared() {
            for len in [5000, unlisted_max(cluster) + 3000] {
                let len = len.min(LOCAL_CONTEXT_MAX);
                let part = len / cluster as usize;
                let row = |first: usize, every: usize, spread: usize| -> Vec<u16> {
                    let key = |i: usize| if i >= first && (i - first).is_multiple_of(every) { 0xA000 } else { 0x9000 };
                    (0..len).map(|i| bits_of(key(i) + (i % spread) as u16)).collect()
                };
                let rows =
                    [(0, 1, 7), (len - 1, 1, 7), (len - 300, 1, 1), (len - part, 1, 7), (part + 3, 3, 1), (1, 37, 1)];
                let rows = rows.map(|(first, every, spread)| row(first, every, spread));
                check_shared(device, shape(256, cluster), 2, &rows, 0);
            }
        }
    });
}

/// Index bits in words of the planes that one CTA or several have a part in; the largest N.
#[test]
fn planes_come_from_every_cta() {
    on_every_device(|device| {
        let len = LOCAL_CONTEXT_MAX;
        for cluster in shared() {
            // Every how many keys one is large: so many places lie in each CTA's part.
            let spread =
                |every: usize| (0..len).map(|i| bits_of(if i % every == 0 { 0xA000 } else { 0x9000 })).collect();
            let ends: Vec<u16> = (0..len)
                .map(|i| bits_of(if i < 40 || i >= len - 70 { 0xA000 + (i % 3) as u16 } else { 0x9000 }))
                .collect();
            let middle: Vec<u16> =
                (0..len).map(|i| bits_of(if (65_500..65_600).contains(&i) { 0xA000 } else { 0x9000 })).collect();
            let mut rows: Vec<Vec<u16>> = vec![spread(1100), spread(900), ends, middle];
            // One key more than have 16 bits, and as many as have; the last is the largest.
            rows.extend([65_537, 65_536].map(|len| [&rows[0][..len - 1], &[bits_of(0xB000)]].concat()));
            check_shared(device, shape(128, cluster), 2, &rows, 0);
        }
        let rows = [canonical(LogitPattern::Gaussian.row(3, len))];
        [2, 8].into_iter().for_each(|cluster| check_shared(device, shape(4096, cluster), 1, &rows, 0));
    });
}

/// Rows of every way side by side, CTAs of other rows ending while some are at work: no CTA leaves its cluster early.
#[test]
fn lengths_may_differ_in_one_launch() {
    let body = |device: &Device, runs: usize| {
        for cluster in shared() {
            let lengths = [0, 10, 128, 129, 90_000, 0, 1000, 300];
            let row = |(i, len): (usize, usize)| canonical(LogitPattern::FewDistinct(50).row(i as u64, len));
            let rows: Vec<_> = lengths.into_iter().enumerate().map(row).collect();
            check_shared_again(device, shape(128, cluster), 2, &rows, 2, runs);
        }
    };
    for config in orders(1) {
        // As many clusters at once as there are, or one after another.
        for sms in [1, 24] {
            body(&Device::simulated(SimConfig { sms, ..config }), 1);
        }
    }
    on_gpu(|device| body(device, 100));
}

#[test]
fn many_schedules_give_the_same_bits() {
    let full = std::env::var_os("DSA_FULL").is_some_and(|v| v == "1");
    for (cluster, few) in [(2, 40), (4, 25), (8, 15)] {
        let mut rng = SplitMix64::new(u64::from(cluster));
        // All keys; no list; for the smallest also a list and planes.
        let mut lengths = vec![100, 130, 4000];
        lengths.extend((cluster == 2).then_some(70_000));
        let rows: Vec<Vec<u16>> =
            lengths.iter().map(|len| canonical(LogitPattern::FewDistinct(200).row(rng.next_u64(), *len))).collect();
        for seed in 1..=if full { 500 } else { few } {
            println!("clusters of {cluster}, seed {seed}");
            let device = Device::simulated(SimConfig::seeded(seed));
            let kernel = IndexerLocalTopk::new(&device, shape(128, cluster).with_push(2).unwrap()).unwrap();
            let boxes = Boxes::new(&device, 128, [2, 1], &vec![7; rows.len()]);
            boxes.check_push(&kernel, &LocalRig::new(&device, 128, &rows, 0), &rows);
        }
    }
}

#[test]
fn a_cluster_is_accepted_or_refused_when_planned() {
    for n in [128, 2048, 4096] {
        let shape = LocalTopkShape::full(n).unwrap();
        for cluster in [0, 1, 2, 3, 4, 8, 12, 16, 32] {
            let fits = CLUSTERS.contains(&cluster);
            match shape.with_cluster(cluster) {
                Ok(shape) => assert!(fits && shape.cluster() == cluster, "{cluster}, N = {n}"),
                Err(error) => {
                    assert!(!fits, "{cluster}, N = {n}");
                    assert_eq!(error, ShapeError::ClusterUnsupported { cluster });
                }
            }
        }
    }
}

/// The choice for the cases of the bench on an H200, and at its edges.
#[test]
fn the_choice_follows_rows_lengths_and_multiprocessors() {
    let chosen =
        |rows, length_max, sms| LocalTopkShape::new(512, 2048).unwrap().for_launch(rows, length_max, sms).cluster();
    let on_h200 = [(1, 16_384, 4), (8, 16_384, 4), (64, 16_384, 2), (132, 16_384, 1), (64, 8192, 1), (8, 131_072, 8)];
    for (rows, length_max, want) in on_h200 {
        assert_eq!(chosen(rows, length_max, 132), want, "{rows} rows of {length_max}");
    }
    assert_eq!([8192, 8193, 16_383, 16_384, 32_767, 32_768].map(|len| chosen(1, len, 132)), [1, 2, 2, 4, 4, 8]);
    assert_eq!([16, 17, 33, 34, 66, 67].map(|rows| chosen(rows, 1 << 17, 132)), [8, 4, 4, 2, 2, 1]);
    assert_eq!([0, usize::MAX].map(|rows| chosen(rows, 1 << 17, 132)), [8, 1]);
    assert_eq!(chosen(1, 1 << 17, 1), 1);
}

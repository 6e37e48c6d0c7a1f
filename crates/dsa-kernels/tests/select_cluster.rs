//! Select with several CTAs a row, where it differs from one: how a row is shared, in many schedules. That every number of
//! CTAs gives the same answers is checked wherever select is.

mod common;

use common::*;
use dsa_core::ShapeError;
use dsa_core::consts::CONTEXT_MAX;
use dsa_core::generate::{LogitPattern, SplitMix64};
use dsa_core::numerics::order16::bits_of;
use dsa_kernels::select::{IndexerSelect, SelectShape};
use gpu::{Device, SimConfig};

fn shared() -> impl Iterator<Item = u32> {
    CLUSTERS.into_iter().filter(|cluster| *cluster > 1)
}

fn kernel(device: &Device, rows: &Rows, cluster: u32) -> [IndexerSelect; 1] {
    [IndexerSelect::new(device, rows.shape().with_cluster(cluster).unwrap()).unwrap()]
}

/// Keys of the longest row that the registers of the cluster hold; a longer one takes a list.
fn unlisted_max(cluster: u32) -> usize {
    8 * 2048 * cluster as usize
}

#[test]
fn rows_are_exact_either_side_of_what_the_cluster_holds() {
    on_every_device(|device| {
        for cluster in shared() {
            let fit = unlisted_max(cluster);
            for (topk, pattern) in
                [(128, LogitPattern::Ties), (2048, LogitPattern::Gaussian), (4096, LogitPattern::NanMix)]
            {
                let lengths = if topk == 128 { &[fit - 1, fit, fit + 1, fit + 64][..] } else { &[fit, fit + 9] };
                let rows = lengths.iter().map(|len| pattern.row(*len as u64, *len)).collect();
                let rows = Rows::new(topk, rows).foreign(true);
                check_select_with(device, &kernel(device, &rows, cluster), &rows, 1);
            }
        }
    });
}

/// Rows that start with their supertops, and the longest that do not.
#[test]
fn rows_are_exact_either_side_of_where_the_cluster_holds_their_tops() {
    on_every_device(|device| {
        for cluster in [2, 4] {
            let fit = 8 * unlisted_max(cluster);
            for pattern in [LogitPattern::Gaussian, LogitPattern::FewDistinct(3)] {
                let lengths = [fit, fit + 1, fit + 70_001];
                let rows = Rows::new(256, lengths.map(|len| pattern.row(3, len)).into());
                check_select_with(device, &kernel(device, &rows, cluster), &rows, 1);
            }
        }
        // Eight hold those of the longest row.
        if !device.info().simulated || full() {
            for cluster in shared() {
                let row = |pattern: LogitPattern| pattern.row(9, CONTEXT_MAX - 5);
                let patterns = [LogitPattern::Gaussian, LogitPattern::AllEqual, LogitPattern::Ascending];
                let rows = Rows::new(2048, patterns.map(row).into());
                check_select_with(device, &kernel(device, &rows, cluster), &rows, 1);
            }
        }
    });
}

/// All of the first chunks, vectors or keys in one CTA's part, or as many in each.
#[test]
fn supertops_may_be_skewed() {
    on_every_device(|device| {
        for cluster in [2, 4] {
            let len = 8 * unlisted_max(cluster) + 3001;
            let row = |first: usize, every: usize| -> Vec<u16> {
                let key = |i: usize| if i >= first && (i - first).is_multiple_of(every) { 0xA000 } else { 0x9000 };
                (0..len).map(|i| bits_of(key(i) + (i / 64 % 7) as u16)).collect()
            };
            let rows = [(0, 1), (len - 1, 1), (len - 300, 1), (len / 2 - 100, 3), (1, 997)];
            let rows = Rows::new(256, rows.map(|(first, every)| row(first, every)).into());
            check_select_with(device, &kernel(device, &rows, cluster), &rows, 1);
        }
    });
}

/// More equal keys than a count of 16 bits, in one CTA's part of the row or in all.
#[test]
fn counts_may_exceed_their_bits() {
    on_every_device(|device| {
        let len = 1_048_576;
        for (from, to) in [(0, len), (0, len / 2), (len / 2, len), (len - 70_000, len)] {
            let row = (0..len).map(|i| bits_of(if (from..to).contains(&i) { 0xC000 } else { 0x9000 })).collect();
            let rows = Rows::new(128, vec![row]);
            check_select_with(device, &kernel(device, &rows, 2), &rows, 1);
        }
    });
}

/// The first keys in a CTA's part alone, or few in every part, so that parts of a list come from one CTA or lie across several.
#[test]
fn skewed_rows_are_exact() {
    on_every_device(|device| {
        for cluster in shared() {
            for len in [5000, unlisted_max(cluster) + 3000] {
                let part = len / cluster as usize;
                let row = |first: usize, every: usize| -> Vec<u16> {
                    let key = |i: usize| if i >= first && (i - first).is_multiple_of(every) { 0xA000 } else { 0x9000 };
                    (0..len).map(|i| bits_of(key(i) + (i % 7) as u16)).collect()
                };
                let rows = [(0, 1), (len - 1, 1), (len - 300, 1), (len - part, 1), (part + 3, 3), (1, 37)];
                let rows = Rows::new(256, rows.map(|(first, every)| row(first, every)).into());
                check_select_with(device, &kernel(device, &rows, cluster), &rows, 1);
            }
        }
    });
}

/// Nearly all that is listed from one CTA's part, with one selected key in each vector: it deals more places than its threads have
/// in one round.
#[test]
fn one_part_may_hold_the_whole_list() {
    on_every_device(|device| {
        let topk = 3968; // not as many as fill the last round
        for cluster in [2, 4, 8] {
            let part = 8 * (topk + 64);
            let len = part * cluster as usize;
            assert!(len > unlisted_max(cluster));
            let row = |first: usize| -> Vec<u16> {
                let large = first..first + 8 * topk;
                let key = |i: usize| if large.contains(&i) && i % 8 == i / 8 % 8 { 0xA000 } else { 0x9000 };
                (0..len).map(|i| bits_of(key(i) + (i % 7) as u16)).collect()
            };
            // The first part; the last, three vectors of the one before.
            let rows = Rows::new(topk, [0, len - part - 24].map(row).into());
            check_select_with(device, &kernel(device, &rows, cluster), &rows, 1);
        }
    });
}

/// Rows of every way side by side, CTAs of other rows ending while some are at work: no CTA leaves its cluster early.
#[test]
fn lengths_may_differ_in_one_launch() {
    let body = |device: &Device, runs: usize| {
        for cluster in shared() {
            let lengths = [0, 10, 128, 129, 90_000, 0, 1000, 300];
            let row = |(i, len): (usize, usize)| LogitPattern::FewDistinct(50).row(i as u64, len);
            let rows = Rows::new(128, lengths.into_iter().enumerate().map(row).collect());
            let rows = Rows { spare: 2, ..rows };
            check_select_with(device, &kernel(device, &rows, cluster), &rows, runs);
        }
    };
    for config in orders(2) {
        // As many clusters at once as there are, or one after another.
        for sms in [1, 24] {
            body(&Device::simulated(SimConfig { sms, ..config }), 1);
        }
    }
    on_gpu(|device| body(device, 5000));
}

fn full() -> bool {
    std::env::var_os("DSA_FULL").is_some_and(|v| v == "1")
}

/// `seeds` with `DSA_FULL=1`, else fewer.
fn schedules(few: u64) -> u64 {
    if full() { 500 } else { few }
}

#[test]
fn many_schedules_give_the_same_bits_from_supertops_on() {
    let len = 8 * unlisted_max(2) + 500;
    let spread = (0..len).map(|i| bits_of(if i / 64 % 900 == 3 { 0xB000 } else { 0x8800 + (i / 64 % 3) as u16 }));
    let rows = Rows::new(128, vec![LogitPattern::FewDistinct(200).row(5, len), spread.collect()]);
    let want = rows.expected();
    for seed in 1..=schedules(8) {
        let device = Device::simulated(SimConfig::seeded(seed));
        let rig = SelectRig::new(&device, &rows);
        let [select] = kernel(&device, &rows, 2);
        println!("seed {seed}");
        rig.check(&want, &rig.run(&select));
    }
}

#[test]
fn many_schedules_give_the_same_bits() {
    for (cluster, few) in [(2, 60), (4, 40), (8, 25)] {
        let mut rng = SplitMix64::new(u64::from(cluster));
        // Without a list and with one, narrow and too narrow.
        let long = unlisted_max(2) + 500;
        let mut lengths = vec![130, 4000];
        lengths.extend((cluster == 2).then_some(long));
        let mut logits: Vec<Vec<u16>> =
            lengths.iter().map(|len| LogitPattern::FewDistinct(200).row(rng.next_u64(), *len)).collect();
        if cluster == 2 {
            logits.push(
                (0..long).map(|i| bits_of(if i % 8 == 0 { 0x8000 } else { 0x9000 * (i < 3000) as u16 + 1 })).collect(),
            );
        }
        let rows = Rows::new(128, logits);
        let want = rows.expected();
        for seed in 1..=schedules(few) {
            let device = Device::simulated(SimConfig::seeded(seed));
            let rig = SelectRig::new(&device, &rows);
            let [select] = kernel(&device, &rows, cluster);
            println!("clusters of {cluster}, seed {seed}");
            rig.check(&want, &rig.run(&select));
        }
    }
}

#[test]
fn a_cluster_is_accepted_or_refused_when_planned() {
    for topk in [128, 2048, 4096] {
        let shape = SelectShape::new(topk, 64).unwrap();
        for cluster in [0, 1, 2, 3, 4, 8, 12, 16, 32] {
            let fits = CLUSTERS.contains(&cluster);
            match shape.with_cluster(cluster) {
                Ok(shape) => assert!(fits && shape.cluster() == cluster, "{cluster}, top-{topk}"),
                Err(error) => {
                    assert!(!fits, "{cluster}, top-{topk}");
                    assert_eq!(error, ShapeError::ClusterUnsupported { cluster });
                }
            }
        }
    }
}

/// The choice for the cases of the benches on an H200, and at its edges.
#[test]
fn the_choice_follows_rows_lengths_and_multiprocessors() {
    let chosen =
        |rows, length_max, sms| SelectShape::new(2048, 64).unwrap().for_launch(rows, length_max, sms).cluster();
    let on_h200 = [(1, 8192, 1), (1, 131_072, 8), (8, 32_768, 8), (64, 8192, 1), (64, 65_536, 1), (32, 131_072, 2)];
    for (rows, length_max, want) in on_h200 {
        assert_eq!(chosen(rows, length_max, 132), want, "{rows} rows of {length_max}");
    }
    assert_eq!([8192, 8193, 16_383, 16_384, 32_767, 32_768].map(|len| chosen(1, len, 132)), [1, 2, 2, 4, 4, 8]);
    assert_eq!([8, 9, 16, 17, 33, 34].map(|rows| chosen(rows, 1 << 20, 132)), [8, 4, 4, 2, 2, 1]);
    assert_eq!([0, usize::MAX].map(|rows| chosen(rows, 1 << 20, 132)), [8, 1]);
    assert_eq!(chosen(1, 1 << 20, 1), 1);
}

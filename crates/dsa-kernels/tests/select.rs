//! Select on logits laid down directly: exact whatever the values, lengths and shapes.

mod common;

use std::time::{Duration, Instant};

use common::*;
use dsa_core::ShapeError;
use dsa_core::consts::CONTEXT_MAX;
use dsa_core::generate::{LogitPattern, SplitMix64};
use dsa_core::numerics::bf16;
use dsa_core::numerics::order16::bits_of;
use dsa_kernels::select::{IndexerSelect, SelectShape, SelectStep};
use gpu::Device;

const INFINITY: u16 = 0x7F80;
const MINUS_INFINITY: u16 = 0xFF80;

/// Top-k values with partial and whole rounds of output, one to four vectors a thread.
const TOPKS: [usize; 6] = [128, 512, 640, 1024, 1920, 2048];

/// Rows of the pattern, one of each length.
fn rows_of(pattern: LogitPattern, topk: usize, lengths: &[usize]) -> Rows {
    Rows::new(topk, lengths.iter().enumerate().map(|(seed, &len)| pattern.row(seed as u64, len)).collect())
}

/// Keys of the longest row whose vectors all fit the registers; a longer one takes a list.
fn unlisted_max(topk: usize) -> usize {
    8 * topk.next_power_of_two().max(2048)
}

/// Lengths at which the kernel changes its way: none, all kept, all vectors in registers, a list of vectors.
fn edge_lengths(topk: usize) -> Vec<usize> {
    let around = |n: usize| [n - 1, n, n + 1];
    let mut lengths = vec![0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129];
    lengths.extend(around(topk));
    lengths.extend([topk + 7, topk + 8, topk + 9]);
    lengths.extend(around(topk.next_multiple_of(512) + 64));
    lengths.extend(8 * topk - 8..=8 * topk + 9);
    let fit = unlisted_max(topk);
    lengths.extend([fit - 1, fit, fit + 1, fit + 8, fit + 9]);
    lengths
}

#[test]
fn every_pattern_is_exact_either_side_of_every_edge() {
    on_every_device(|device| {
        for topk in TOPKS {
            let lengths = edge_lengths(topk);
            for foreign in [false, true] {
                let kernels = Rows::new(topk, vec![]).foreign(foreign).kernels(device);
                // On the simulator the long edges of each top-k meet a few patterns, the short ones all.
                for (i, pattern) in LogitPattern::ALL.into_iter().enumerate() {
                    let all = !device.info().simulated || topk == 128 || i % 4 == topk / 128 % 4;
                    let kept = lengths.iter().copied().filter(|len| all || *len < 3 * topk);
                    let rows = rows_of(pattern, topk, &kept.collect::<Vec<_>>()).foreign(foreign);
                    check_select_with(device, one_in(3, i, &kernels), &rows, 1);
                }
            }
        }
    });
}

/// All kernels in every `n`-th case, else that of one CTA a row alone, where there are not all of them: on the simulator eight
/// CTAs take eight times as long.
fn one_in(n: usize, case: usize, kernels: &[IndexerSelect]) -> &[IndexerSelect] {
    if kernels.len() == 2 && !case.is_multiple_of(n) { &kernels[..1] } else { kernels }
}

/// Among listed vectors one digit decides, the distance from the K-th top, as long as it has a bin of its own.
#[test]
fn listed_keys_may_spread_beyond_the_bins() {
    on_every_device(|device| {
        for topk in [128, 2048] {
            // The K-th top is `low`, the K-th key `distance` above it, the highest `over` further; `ties` more equal the
            // K-th.
            let row = |(low, over): (u16, u16), distance: u16, ties: usize| -> Vec<u16> {
                let full = topk / 8;
                let mut vectors: Vec<[u16; 8]> = vec![[low + distance + over; 8]; full];
                vectors[full - 1][3] = low + distance;
                vectors.extend((full..topk - 1).map(|i| {
                    let top = if i - full < ties { low + distance } else { low + distance.saturating_sub(1).min(3) };
                    [top, 0x7000, 1, 0x7000, 0x0100, 0x7000, 0x7000, 1]
                }));
                vectors.push([low; 8]);
                vectors.extend(vec![[low - 1; 8]; (unlisted_max(topk) / 8 + 1).saturating_sub(topk).max(100)]);
                SplitMix64::new(u64::from(distance)).shuffle(&mut vectors);
                vectors.concat().into_iter().map(bits_of).collect()
            };
            // The last bin is that of 254 and beyond.
            let distances = [0, 1, 31, 32, 252, 253, 254, 255, 256, 257, 2047, 20_000];
            for bounds in [(0x8100, 5), (0x80FF, 1)] {
                let rows = distances.iter().flat_map(|&d| [0, 1, 40].map(|ties| row(bounds, d, ties)));
                check_select(device, &Rows::new(topk, rows.collect()));
            }
        }
    });
}

#[test]
fn the_largest_topk_is_exact() {
    on_every_device(|device| {
        let lengths = [4095, 4096, 4097, 5000, 32_767, 32_768, 32_769, 40_000];
        for pattern in [LogitPattern::Gaussian, LogitPattern::Ties, LogitPattern::NanMix] {
            check_select(device, &rows_of(pattern, 4096, &lengths).foreign(true));
        }
    });
}

/// Keys of the longest row whose tops all fit the registers; a longer one starts with its supertops.
fn unlisted_tops_max(topk: usize) -> usize {
    8 * unlisted_max(topk)
}

fn full() -> bool {
    std::env::var_os("DSA_FULL").is_some_and(|v| v == "1")
}

#[test]
fn rows_are_exact_either_side_of_where_their_tops_fit() {
    on_every_device(|device| {
        let few = device.info().simulated && !full();
        for topk in [128, 640, 2048, 4096] {
            let fit = unlisted_tops_max(topk);
            // Ends within a vector, a chunk of tops, an octet of supertops and a line of those.
            let lengths = [fit + 1, fit, fit - 1, fit + 63, fit + 64, fit + 65, fit + 512, fit + 513, 2 * fit + 9];
            let lengths = match (few, topk) {
                (false, _) | (_, 128) => &lengths[..],
                _ => &lengths[..2],
            };
            let patterns = [LogitPattern::Gaussian, LogitPattern::Ties, LogitPattern::AllEqual];
            let others = [LogitPattern::Ascending, LogitPattern::Descending, LogitPattern::FewDistinct(3)];
            for (i, pattern) in patterns.into_iter().chain(others).enumerate() {
                let lengths = if few && i > 0 { &lengths[..1] } else { lengths };
                let rows = rows_of(pattern, topk, lengths);
                check_select_with(device, one_in(3, i, &rows.kernels(device)), &rows, 1);
            }
        }
    });
}

/// The first keys in one chunk, in a few, one in each; ties of supertops, of tops, of keys, and none of them near the others.
#[test]
fn supertops_bound_the_work_whatever_lies_in_their_chunks() {
    on_every_device(|device| {
        for topk in if device.info().simulated && !full() { vec![128] } else { vec![128, 2048, 4096] } {
            let len = unlisted_tops_max(topk) + 5000 + 3;
            let row = |key: &dyn Fn(usize) -> u16| (0..len).map(|i| bits_of(key(i))).collect::<Vec<u16>>();
            let high_from = |first: usize| move |i: usize| if i >= first { 0xC000 } else { 0x9000 };
            let logits = vec![
                // One key of the last vector; all of the last chunks; just more and just fewer than K keys at the end.
                row(&high_from(len - 1)),
                row(&high_from(len - 64 * 9)),
                row(&high_from(len - topk - 1)),
                row(&high_from(len - topk + 1)),
                // One in each chunk, at another place in each: the first K of equal ones.
                row(&|i| if i % 64 == i / 64 * 13 % 64 { 0xA001 } else { 0x8001 + (i % 5) as u16 }),
                // Few chunks hold all: the K-th top is far above the K-th supertop, the K-th key too.
                row(&|i| if i / 64 % 700 == 3 { 0xB000 + (i % 61) as u16 } else { 0x8800 + (i / 64 % 3) as u16 }),
                row(&|i| if i / 8 % 5600 == 44 { 0xB000 } else { 0x8800 + (i % 8 == 7) as u16 }),
                // The K-th top is within the bins of the K-th supertop, ties at either.
                row(&|i| 0x9000 + (i / 64 % 7) as u16 * 16 + (i / 8 % 8) as u16),
                row(&|i| 0x9000 + u16::from(i % 1024 == 1023)),
            ];
            check_select(device, &Rows::new(topk, logits));
        }
    });
}

#[test]
fn a_row_of_the_longest_context_is_exact() {
    on_every_device(|device| {
        let few = device.info().simulated && !full();
        let lengths = [CONTEXT_MAX, CONTEXT_MAX - 1, CONTEXT_MAX - 63, 1_000_000];
        let rows = |pattern, n| rows_of(pattern, 2048, &lengths[..n]);
        let rows = if few {
            vec![rows(LogitPattern::Gaussian, 1)]
        } else {
            [LogitPattern::Gaussian, LogitPattern::AllEqual, LogitPattern::Ascending].map(|p| rows(p, 4)).into()
        };
        for rows in rows {
            let kernels = rows.kernels(device);
            check_select_with(device, if few { &kernels[..1] } else { &kernels }, &rows, 1);
        }
    });
}

#[test]
fn topk_is_accepted_or_refused_when_planned() {
    for topk in [128, 512, 640, 1024, 1920, 2048, 4096] {
        assert_eq!(SelectShape::new(topk, 64).unwrap().topk() as usize, topk);
    }
    for topk in [0, 1, 64, 1000, 2051, 4224] {
        assert_eq!(SelectShape::new(topk, 64), Err(ShapeError::TopkUnsupported { topk }));
    }
    for page in [0, 3, 48, (1 << 21) + 1] {
        assert_eq!(SelectShape::new(128, page), Err(ShapeError::PageNotPowerOfTwo { page }));
    }
    assert!(SelectShape::new(128, 1 << 20).is_ok());
    assert_eq!(SelectShape::new(128, 1 << 21), Err(ShapeError::KvPageTooLarge { page: 1 << 21 }));
}

#[test]
fn every_page_size_maps_to_physical_rows() {
    on_every_device(|device| {
        for page in [1, 16, 64, 256, 2048] {
            for block_rows in [page, page + 13] {
                let rows = rows_of(LogitPattern::Gaussian, 512, &[0, 1, 500, 512, 513, 2500, 5000]);
                check_select(device, &Rows { page, block_rows, ..rows });
            }
        }
    });
}

#[test]
fn physical_rows_reach_the_end_of_an_int32_pool() {
    on_every_device(|device| {
        let rows = rows_of(LogitPattern::Gaussian, 128, &[100, 1000, 3000]);
        // Three tables of 47 blocks, the last of which ends at row 2^31 - 1.
        let rows = Rows { block_first: (1 << 25) - 3 * 47, ..rows };
        let highest = rows.expected().iter().flat_map(|row| row.rows.clone()).max().unwrap();
        assert!(highest > i32::MAX - 64 * 3 * 47);
        check_select(device, &rows);
    });
}

#[test]
fn every_q_finds_its_rows_whatever_their_order() {
    on_every_device(|device| {
        for q in 1..=8 {
            // Requests of only short rows take no scratch; in the others, short rows take room but are not read.
            let lengths = [900, 128, 0, 129, 2000, 64, 1024, 500, 100, 128, 1, 0, 2, 3, 127, 64, 130, 1, 1, 1];
            let mut rows = rows_of(LogitPattern::FewDistinct(100), 128, &lengths[..lengths.len() / q * q]);
            rows.q = q;
            check_select(device, &rows);
        }
    });
}

#[test]
fn a_crowded_bin_loses_no_key() {
    on_every_device(|device| {
        let edges = [4096, 8192, 16_384, 40_000];
        for (len, rows, runs) in edges.iter().flat_map(|&edge| {
            let lens = [edge - 1, edge, edge + 1];
            lens.into_iter().flat_map(|len| [(len, 1, 20), (len, 33, 2)])
        }) {
            let rows = sized(device, if rows == 1 || len % 8 == 0 { rows } else { 3 }, rows);
            let runs = sized(device, runs.min(3), runs);
            check_select_runs(device, &rows_of(LogitPattern::Ties, 2048, &vec![len; rows]), runs);
        }
    });
}

#[test]
fn twenty_runs_agree_bit_for_bit_on_heavy_ties() {
    in_every_order(2, |device| {
        let rows = Rows::new(
            512,
            [LogitPattern::FewDistinct(2), LogitPattern::AllEqual, LogitPattern::SignedZeros, LogitPattern::NanMix]
                .map(|pattern| pattern.row(1, 17_000))
                .into(),
        );
        check_select_runs(device, &rows.foreign(true), sized(device, 5, 20));
    });
}

#[test]
fn keys_past_the_row_end_are_never_picked() {
    on_every_device(|device| {
        for topk in [512, 2048] {
            let lengths = [0, 1, topk - 1, topk, topk + 1];
            let mut rows = rows_of(LogitPattern::Descending, topk, &lengths);
            // Everything past the end is +inf, as far as the last page of a longer row.
            for (row, len) in rows.logits.iter_mut().zip(lengths) {
                row.resize((len + 3).next_multiple_of(64), INFINITY);
            }
            let want = rows.expected();
            assert_eq!(want.iter().map(|row| row.count).collect::<Vec<_>>(), [0, 1, topk - 1, topk, topk]);
            assert_eq!(want[4].ids.last(), Some(&(topk as i32 - 1)), "only the smallest is dropped");
            check_select(device, &rows);
        }
    });
}

#[test]
fn nan_ranks_lowest_and_zeros_tie() {
    on_every_device(|device| {
        let finite = LogitPattern::Ascending.row(0, 3000);
        let half_nan = (0..3000).map(|i| match i % 4 {
            0 => 0x7FC1,
            2 => 0xFFC1,
            _ => finite[i],
        });
        // Ten of each infinity, zeros of both signs around the 2048-th place.
        let zeros = (0..3000).map(|i| match i {
            0..10 => INFINITY,
            100..110 => MINUS_INFINITY,
            1000..1500 => bf16::from_f32(1.0),
            _ => (i as u16 % 2) << 15,
        });
        let rows = Rows::new(2048, vec![half_nan.collect(), zeros.collect(), vec![0x7FFF; 3000], vec![0xFFFF; 2049]]);
        let want = rows.clone().foreign(true).expected();
        let odd = |ids: &[i32]| ids.iter().filter(|id| *id % 2 == 1).count();
        assert_eq!(odd(&want[0].ids), 1500, "every finite value precedes every NaN");
        for foreign in [false, true] {
            check_select(device, &rows.clone().foreign(foreign));
        }
    });
}

/// Row of K + 1 keys of which the first or the last must be dropped; the others are +inf.
#[test]
fn every_ordered_pair_of_scores_is_ordered_by_value_then_index() {
    let scores = [f32::NEG_INFINITY, -2.0, -1.0, -0.0, 0.0, 1e-40, 1.0, f32::INFINITY, f32::NAN, -f32::NAN];
    let pairs: Vec<(f32, f32)> = scores.iter().flat_map(|&a| scores.map(|b| (a, b))).collect();
    let topk = 128;
    let row = |(a, b): (f32, f32)| -> Vec<u16> {
        (0..=topk).map(|i| [a, f32::INFINITY, b][(i > 0) as usize + (i == topk) as usize]).map(bf16::from_f32).collect()
    };
    on_every_device(|device| {
        let rows = Rows::new(topk, pairs.iter().map(|&pair| row(pair)).collect()).foreign(true);
        for select in rows.kernels(device) {
            let [_, counts, ids] = SelectRig::new(device, &rows).run(&select);
            assert_eq!(counts, vec![topk as i32; pairs.len()]);
            for (&(a, b), ids) in pairs.iter().zip(ids.chunks(topk)) {
                // Stated without the kernels' key order: numbers by value, NaN below all of them, ties to the lower index.
                let first_is_dropped = if a.is_nan() { !b.is_nan() } else { a < b };
                let want: Vec<i32> = (0..topk as i32).map(|i| i + first_is_dropped as i32).collect();
                assert_eq!(ids, want, "{a} at 0, {b} at {topk}, clusters of {}", select.shape().cluster());
            }
        }
    });
}

#[test]
fn pairs_are_ordered_across_listed_vectors_too() {
    let bits = [MINUS_INFINITY, 0xC000, 0x8000, 0x0000, 0x0001, 0x3F80, INFINITY, 0x7FFF, 0xFFC0];
    let topk = 128;
    on_every_device(|device| {
        // More vectors than K: K - 1 of them hold a +inf, the first and the last the pair, everything else is NaN.
        let row = |a: u16, b: u16| -> Vec<u16> {
            let len = unlisted_max(topk) + 40;
            (0..len)
                .map(|i| match i {
                    3 => a,
                    i if i == len - 2 => b,
                    i if i % 8 == 5 && (1..topk).contains(&(i / 8)) => INFINITY,
                    _ => 0xFFFE,
                })
                .collect()
        };
        let rows = bits.iter().flat_map(|&a| bits.map(|b| row(a, b))).collect();
        check_select(device, &Rows::new(topk, rows).foreign(true));
    });
}

#[test]
fn negative_ends_are_empty_rows_and_end_in_time() {
    let body = |device: &Device| {
        let mut rows = Rows::new(2048, vec![vec![0x3F80; 2]; 8]);
        rows.row_ends = vec![-1, 0, 1, 2, -3, -2, -1, i32::MIN];
        rows.q = 4;
        rows.length_max = 4096;
        for select in rows.kernels(device) {
            let rig = SelectRig::new(device, &rows);
            rig.poison();
            select.launch(&rig.stream, &rig.step()).unwrap();
            let started = Instant::now();
            while !rig.stream.is_idle().unwrap() {
                assert!(started.elapsed() < Duration::from_secs(2), "select hangs on negative row ends");
            }
            let got = rig.read();
            assert_eq!(got[1], [0, 0, 1, 2, 0, 0, 0, 0]);
            rig.check(&rows.expected(), &got);
        }
    };
    // The simulator's watchdog.
    body(&Device::simulated(gpu::SimConfig { fuel: 10_000_000, ..sim_config() }));
    on_gpu(body);
}

#[test]
fn ends_past_the_table_are_clamped() {
    on_every_device(|device| {
        for length_max in [100, 512, 513, 1000] {
            let mut rows = rows_of(LogitPattern::Gaussian, 512, &[length_max; 3]);
            rows.row_ends = vec![i32::MAX, length_max as i32 + 1, length_max as i32];
            check_select(device, &rows);
        }
    });
}

#[test]
fn lanes_past_the_row_end_are_no_candidates() {
    on_every_device(|device| {
        for topk in [128, 2048] {
            // K - 5 ordinary values, the rest as low as logits go.
            let row = |extra: usize| -> Vec<u16> {
                let mut row = LogitPattern::Gaussian.row(extra as u64, topk - 5);
                let low = [bf16::from_f32(-1e30), MINUS_INFINITY];
                row.extend((0..5 + extra).map(|i| low[i % 2]));
                SplitMix64::new(extra as u64).shuffle(&mut row);
                row
            };
            check_select(device, &Rows::new(topk, (1..=16).map(row).collect()));
        }
    });
}

#[test]
fn selection_is_exact_for_bf16_whatever_fp32_would_say() {
    on_every_device(|device| {
        let mut rng = SplitMix64::new(62);
        for (name, spread) in [("random", 1.0), ("clustered", 0.01)] {
            let scores: Vec<f32> = (0..20_000).map(|_| 1.0 + spread * rng.gaussian()).collect();
            let rows = Rows::new(2048, vec![scores.iter().map(|&x| bf16::from_f32(x)).collect()]);
            check_select(device, &rows);
            let mut order: Vec<i32> = (0..20_000).collect();
            order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
            let selected = &rows.expected()[0].ids;
            let both = order[..2048].iter().filter(|id| selected.contains(id)).count();
            println!("{name} scores: {both} of 2048 also among the first by FP32");
        }
    });
}

#[test]
fn without_ids_nothing_is_written_to_them() {
    on_every_device(|device| {
        let rows = rows_of(LogitPattern::Gaussian, 640, &[0, 640, 641, 9000]);
        check_select(device, &Rows { ids: false, ..rows });
    });
}

/// 16-byte stores where the rows allow them, others where not; nothing beside the rows is touched.
#[test]
fn outputs_may_start_at_any_element() {
    on_every_device(|device| {
        let kernels = [128, 640].map(|topk| Rows::new(topk, vec![]).kernels(device));
        for select in kernels.iter().flatten() {
            let topk = select.shape().topk() as usize;
            let rows = rows_of(LogitPattern::Gaussian, topk, &[0, 5, topk, topk + 1, 3000]);
            let rig = SelectRig::new(device, &rows);
            let want = rows.expected();
            let n = rows.live() * topk;
            for (out, ids) in [(0, 1), (1, 0), (2, 3), (3, 2), (4, 4)] {
                rig.poison();
                let step = SelectStep {
                    out: rig.out.view(out..out + n).unwrap(),
                    ids: Some(rig.ids.view(ids..ids + n).unwrap()),
                    ..rig.step()
                };
                select.launch(&rig.stream, &step).unwrap();
                let [out, ids] = [(&rig.out, out), (&rig.ids, ids)].map(|(buffer, start)| {
                    let mut values = read_guarded(buffer, start + n, &rig.stream);
                    let before = values.drain(..start);
                    assert!(before.into_iter().all(|x| x == POISON32), "a write before an output");
                    values
                });
                rig.check(&want, &[out, read_guarded(&rig.counts, rows.live(), &rig.stream), ids]);
            }
        }
    });
}

/// Tops of other logits, as in scratch that another step left: wrong ids, but of the row, and nothing is touched beside the
/// outputs.
#[test]
fn tops_that_are_not_their_logits_own_do_no_harm() {
    on_every_device(|device| {
        for topk in [128, 2048] {
            let lengths = [2 * unlisted_max(topk) + 77, 4 * unlisted_max(topk) + 3, 500];
            for pattern in [LogitPattern::Gaussian, LogitPattern::AllEqual, LogitPattern::Descending] {
                let mut lengths = lengths;
                if pattern == LogitPattern::Gaussian {
                    lengths[1] = unlisted_tops_max(topk) + 1003;
                }
                let rows = rows_of(pattern, topk, &lengths);
                let rig = SelectRig::new(device, &rows);
                let mut rng = SplitMix64::new(topk as u64);
                type Top = fn(&mut SplitMix64) -> u16;
                let tops: [Top; 6] = [
                    |_| 0,
                    |_| 1,
                    |_| 0x8000,
                    |_| u16::MAX,
                    |rng| rng.next_u64() as u16,
                    |rng| if rng.below(8) == 0 { 0x8200 } else { rng.below(2) as u16 },
                ];
                for top in tops {
                    let garbage: Vec<u16> = (0..rig.tops.len()).map(|_| top(&mut rng)).collect();
                    rig.tops.copy_from(&rig.stream, &garbage).unwrap();
                    for select in rows.kernels(device) {
                        let [out, counts, ids] = rig.run(&select);
                        assert_eq!(counts, lengths.map(|len| len.min(topk) as i32));
                        for ((len, ids), out) in lengths.iter().zip(ids.chunks(topk)).zip(out.chunks(topk)) {
                            let taken = topk.min(*len);
                            assert!(
                                ids[..taken].iter().all(|id| (0..*len as i32).contains(id)),
                                "{pattern:?}: up to {:?} of {len}",
                                ids.iter().max()
                            );
                            assert!(out[..taken].iter().all(|row| *row >= 0));
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn output_rows_beyond_the_live_ones_come_out_empty() {
    on_every_device(|device| {
        for lengths in [&[][..], &[3, 700]] {
            let rows = rows_of(LogitPattern::Gaussian, 512, lengths);
            check_select(device, &Rows { spare: 3, ..rows });
        }
    });
}

#[test]
fn random_rows_are_exact() {
    on_every_device(|device| {
        let mut rng = SplitMix64::new(2026);
        let longest = sized(device, 3000, 140_000);
        // Every q, a mixture of the rest.
        for (q, topk, page, foreign, ids) in [
            (1, 2048, 64, false, true),
            (2, 2048, 1, true, false),
            (3, 128, 2048, false, true),
            (4, 512, 64, true, true),
            (5, 1024, 256, false, false),
            (6, 640, 16, true, true),
            (7, 256, 64, false, true),
            (8, 4096, 64, true, true),
        ] {
            let mut rows = Rows::new(topk, vec![]).foreign(foreign);
            (rows.q, rows.page, rows.block_rows, rows.length_max, rows.ids) = (q, page, page, longest, ids);
            let kernels = rows.kernels(device);
            let mut done = 0;
            while done < 256 {
                rows.block_rows = page + rng.below(3);
                rows.spare = rng.below(3);
                (rows.logits, rows.row_ends) = (vec![], vec![]);
                for _ in 0..q * (1 + rng.below(96 / q)) {
                    // Three rows in four are longer than K, where the table allows.
                    let len = if rng.below(4) > 0 { topk.min(longest) + rng.below(longest) } else { rng.below(topk) };
                    let len = len.min(longest);
                    rows.logits.push(random_row(&mut rng, len));
                    rows.row_ends.push(len as i32 - if len == 0 { rng.below(5) as i32 } else { 0 });
                }
                done += rows.live();
                check_select_with(device, one_in(4, done, &kernels), &rows, 1);
            }
        }
    });
}

/// A row of one pattern, or of pieces of several.
fn random_row(rng: &mut SplitMix64, len: usize) -> Vec<u16> {
    let mut row = Vec::new();
    let pieces = 1 + rng.below(3);
    while row.len() < len {
        let pattern = LogitPattern::ALL[rng.below(LogitPattern::ALL.len())];
        let piece = len.div_ceil(pieces).min(len - row.len());
        row.extend(pattern.row(rng.next_u64(), piece));
    }
    if rng.below(2) == 0 {
        rng.shuffle(&mut row);
    }
    row
}

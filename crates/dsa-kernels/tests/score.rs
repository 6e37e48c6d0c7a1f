//! Score alone. Each check compares every element of a poisoned scratch with the oracle: what must be written, and what
//! must not.

mod common;

use common::*;
use dsa_core::DecodeStep;
use dsa_core::consts::{DIM, HEADS};
use dsa_core::generate::{Contents, SplitMix64, StepSpec};
use dsa_core::layout::fp8_page::{self, ScaleForm};
use dsa_core::layout::query_row;
use dsa_core::numerics::{bf16, e4m3};
use dsa_kernels::Table;
use dsa_kernels::score::{IndexerScore, KeyCache, ScoreForm, ScoreOutput, ScoreShape, ScoreStep};
use gpu::Device;

const BOTH_SCALES: [ScaleForm; 2] = [ScaleForm::Ue8m0, ScaleForm::Fp32];

/// Lengths around a page, a tile, and their multiples.
const EDGES: [i32; 13] = [0, 1, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257];

/// A step whose tables are exactly as wide as its longest row, the last row ending at the end of the allocation.
fn exact(seed: u64, q: usize, ends: &[i32]) -> StepSpec {
    let spec = StepSpec::new(seed, q, 128, ends);
    let longest = *ends.iter().max().unwrap() as usize;
    StepSpec { context_len_max: longest.max(1), table_gap: 0, spare_blocks: 0, ..spec }
}

/// Checks both forms; the logits of a scored row are the same in both, bit for bit.
#[track_caller]
fn check_both_forms(device: &Device, step: &DecodeStep) {
    let pitched = check_score(device, step, ScoreForm::Pitched);
    assert_eq!(check_score(device, step, compact(step)), pitched);
}

/// A page's key and scale of `token` of a request, replaced.
fn set_key(step: &mut DecodeStep, request: usize, token: usize, key: &[u8; DIM], word: u32) {
    let block = step.table_row(request)[token / 64] as usize;
    fp8_page::write(&mut step.cache[block * step.page_stride..], token % 64, key, word);
}

/// A query with `codes(head, element)`.
fn set_query(step: &mut DecodeStep, row: usize, codes: impl Fn(usize, usize) -> u8) {
    let query = &mut step.queries[row * query_row::BYTES..][..query_row::BYTES];
    query.iter_mut().enumerate().for_each(|(i, code)| *code = codes(i / DIM, i % DIM));
}

fn set_weights(step: &mut DecodeStep, row: usize, weight: impl Fn(usize) -> f32) {
    let weights = &mut step.weights[row * HEADS..][..HEADS];
    weights.iter_mut().enumerate().for_each(|(head, w)| *w = bf16::from_f32(weight(head)));
}

#[test]
fn logits_follow_the_position_through_the_table() {
    on_every_device(|device| {
        for len in [65, 100] {
            let mut spec = exact(8, 1, &[len]);
            (spec.scale_form, spec.spare_blocks) = (ScaleForm::Fp32, 8);
            let mut step = spec.build().unwrap();
            step.table.copy_from_slice(&[7, 2]);
            // Key t is one-hot in dimension t mod 128 with scale 1 + t / 256; the query's head 5 tells dimensions apart.
            for token in 0..len as usize {
                let key = std::array::from_fn(|dim| e4m3::from_f32((dim == token % DIM) as u8 as f32));
                set_key(&mut step, 0, token, &key, (1.0 + token as f32 / 256.0).to_bits());
            }
            let value = |dim: usize| 1.0 + (dim % 8) as f32 / 8.0;
            set_query(&mut step, 0, |head, dim| e4m3::from_f32(if head == 5 { value(dim) } else { 0.0 }));
            set_weights(&mut step, 0, |head| (head == 5) as u8 as f32);
            let logits = check_score(device, &step, ScoreForm::Pitched);
            let want = |t: usize| bf16::from_f32(value(t % DIM) * (1.0 + t as f32 / 256.0));
            assert_eq!(logits[0], (0..len as usize).map(want).collect::<Vec<_>>());
        }
    });
}

#[test]
fn nothing_past_the_table_row_is_read() {
    on_every_device(|device| {
        for len in EDGES.into_iter().filter(|len| *len > 0) {
            let tight = exact(9, 1, &[len, len]);
            let wide = StepSpec { context_len_max: 1024, table_gap: 5, ..tight.clone() };
            let step = tight.build().unwrap();
            assert_eq!(step.table.len(), 2 * (len as usize).div_ceil(64));
            let mut guarded = step.clone();
            guarded.table.extend([i32::MAX; 64]);
            let want = check_score(device, &step, ScoreForm::Pitched);
            assert_eq!(check_score(device, &guarded, ScoreForm::Pitched), want);
            assert_eq!(check_score(device, &wide.build().unwrap(), ScoreForm::Pitched), want);
            assert_eq!(check_score(device, &step, compact(&step)), want);
        }
    });
}

#[test]
fn every_edge_length_and_q_is_exact_in_both_forms() {
    on_every_device(|device| {
        for q in 1..=8 {
            // Requests of any mixture of ends, in no order.
            let ends: Vec<i32> = (0..4 * q).map(|i| EDGES[(i * 5 + q) % EDGES.len()]).collect();
            for scale_form in BOTH_SCALES {
                check_both_forms(device, &StepSpec { scale_form, ..exact(q as u64, q, &ends) }.build().unwrap());
            }
        }
    });
}

#[test]
fn gaussian_contents_match_the_tensor_core_bit_for_bit() {
    on_every_device(|device| {
        let len = sized(device, 700, 20_000);
        for scale_form in BOTH_SCALES {
            let spec = StepSpec::new(3, 2, 128, &[len, len - 1, 300, 129]);
            let step = StepSpec { contents: Contents::Gaussian, scale_form, ..spec }.build().unwrap();
            check_both_forms(device, &step);
        }
    });
}

#[test]
fn negative_products_are_cut_before_the_head_weight() {
    on_every_device(|device| {
        let mut step = exact(17, 1, &[130]).build().unwrap();
        let one_hot = std::array::from_fn(|dim| e4m3::from_f32((dim == 0) as u8 as f32));
        for token in 0..130 {
            set_key(&mut step, 0, token, &one_hot, u32::from_le_bytes([127; 4]));
        }
        // Products -3 and 2, weights 1 and -1.
        let first = |head: usize| [-3.0, 2.0].get(head).copied().unwrap_or(0.0);
        set_query(&mut step, 0, |head, dim| e4m3::from_f32(if dim == 0 { first(head) } else { 0.0 }));
        set_weights(&mut step, 0, |head| [1.0, -1.0].get(head).copied().unwrap_or(0.0));
        for form in [ScoreForm::Pitched, compact(&step)] {
            assert_eq!(check_score(device, &step, form)[0], vec![bf16::from_f32(-2.0); 130]);
        }
    });
}

#[test]
fn padding_does_not_beat_negative_scores() {
    on_every_device(|device| {
        // 228 keys in slots for 256, all scores below 0: the unused slots' raw score 0 must not be selected.
        let mut step = exact(18, 1, &[228, 200]).build().unwrap();
        step.queries.iter_mut().for_each(|code| *code = *code & 0x7F | 0x30);
        step.weights.fill(bf16::from_f32(-0.5));
        for token in 0..228 {
            for request in 0..1 + (token < 200) as usize {
                let (key, word) = (*step.key(request, token).0, u32::from_le_bytes([120; 4]));
                set_key(&mut step, request, token, &key.map(|code| code & 0x7F), word);
            }
        }
        let got = check_step(device, &step);
        assert!(got.logits.iter().flatten().flatten().all(|bits| bits & 0x8000 != 0), "a score is not negative");
        for (row, ids) in got.ids.chunks(128).enumerate() {
            assert!(ids.iter().all(|id| (0..step.row_ends[row]).contains(id)), "row {row}: {ids:?}");
        }
    });
}

#[test]
fn requests_without_keys_are_skipped() {
    on_every_device(|device| {
        let mut cases = vec![vec![0; 32], vec![0, 0, 5, 0], vec![0], vec![0, 0, 300, 0], vec![-5, 300, i32::MIN, 0]];
        cases.push((0..100).map(|r| if r % 33 == 7 { 200 + r } else { 0 }).collect());
        for ends in cases {
            check_both_forms(device, &StepSpec::new(19, 1, 128, &ends).build().unwrap());
        }
    });
}

#[test]
fn the_most_requests_of_every_q_are_scored() {
    on_every_device(|device| {
        for q in sized(device, vec![1, 8], (1..=8).collect()) {
            let end = |row: usize| if row / q % 100 == 1 || row / q == 1023 { 129 + (row % 7) as i32 } else { 0 };
            let ends: Vec<i32> = (0..1024 * q).map(end).collect();
            let step = StepSpec::new(20, q, 128, &ends).build().unwrap();
            check_score(device, &step, compact(&step));
        }
    });
}

#[test]
fn row_ends_past_the_context_are_clamped() {
    on_every_device(|device| {
        for context_len_max in [320, 333] {
            // Drafts that reach past the tables' last page.
            let base = context_len_max as i32 - 1;
            let ends = [base, base + 1, base + 2, base + 3, 5, i32::MAX, 1, 2, -1, -1, 300, 0];
            let spec = StepSpec { context_len_max, table_gap: 0, ..StepSpec::new(22, 4, 128, &ends) };
            check_both_forms(device, &spec.build().unwrap());
        }
    });
}

#[test]
fn rows_of_a_request_equal_single_row_calls() {
    on_every_device(|device| {
        for q in 1..=8usize {
            // Lengths q, 65 and 130 with the usual causal bounds, most recent row last.
            let ends: Vec<i32> =
                [q, 65.max(q), 130].iter().flat_map(|len| (0..q).map(move |i| (len - q + 1 + i) as i32)).collect();
            let step = StepSpec { contents: Contents::Gaussian, ..exact(23, q, &ends) }.build().unwrap();
            let together = check_score(device, &step, ScoreForm::Pitched);
            for i in 0..q {
                let rows = |row: usize| (row % q == i).then_some(row);
                let single = DecodeStep {
                    q: 1,
                    rows: 3,
                    queries: (0..3 * q).filter_map(rows).flat_map(|row| *step.query(row)).collect(),
                    weights: (0..3 * q).filter_map(rows).flat_map(|row| *step.head_weights(row)).collect(),
                    row_ends: (0..3 * q).filter_map(rows).map(|row| step.row_ends[row]).collect(),
                    ..step.clone()
                };
                let alone = check_score(device, &single, ScoreForm::Pitched);
                for (request, alone) in alone.iter().enumerate() {
                    assert_eq!(alone, &together[request * q + i], "q {q}, row {i} of request {request}");
                }
            }
        }
    });
}

#[test]
fn row_ends_of_a_request_come_in_any_order() {
    on_every_device(|device| {
        let ends = [300, 10, 257, 129, 0, 0, 400, -1, 128, 128, 128, 129];
        check_both_forms(device, &StepSpec::new(24, 4, 128, &ends).build().unwrap());
    });
}

/// 300 launches of 128 rows on a GPU, half of them with a second stream that hogs the memory, half with the L2 flushed.
#[test]
fn repeated_launches_agree_bit_for_bit() {
    let body = |device: &Device| {
        let simulated = device.info().simulated;
        let ends: Vec<i32> = match simulated {
            true => vec![1, 700, 129, 64, 513, 300],
            false => (0..128).map(|row| 1 + row * 4095 / 127).collect(),
        };
        let spec = StepSpec { contents: Contents::Gaussian, ..StepSpec::new(41, 1, 128, &ends) };
        let step = spec.build().unwrap();
        check_score(device, &step, compact(&step));
        let inputs = Inputs::new(device, &step);
        let score = score_kernel(device, &step, compact(&step));
        let want = run_score(&inputs, &step, &score);
        let alone = IndexerScore::new(device, score.shape().with_alone(true)).unwrap();
        assert!(run_score(&inputs, &step, &alone) == want, "one CTA a multiprocessor differs");
        let hog = device.alloc::<u8>(sized(device, 256, 1 << 30)).unwrap();
        let second = device.stream().unwrap();
        for launch in 0..sized(device, 2, 300) {
            let stream = if launch % 2 == 0 { &second } else { &inputs.stream };
            hog.fill_bytes(stream, launch as u8).unwrap();
            assert!(run_score(&inputs, &step, &score) == want, "launch {launch} differs");
        }
        second.synchronize().unwrap();
    };
    in_every_order(4, body);
}

#[test]
fn pitched_rows_leave_their_padding_alone() {
    on_every_device(|device| {
        // The pitch is 4608; every element is compared, the last row ends with the buffer.
        let step = exact(42, 1, &[4097, 4096, 1, 4097]).build().unwrap();
        assert_eq!(pitch(&step), 4608);
        check_score(device, &step, ScoreForm::Pitched);
    });
}

#[test]
fn a_pitched_scratch_of_more_than_2_to_the_32_elements_is_addressed_in_64_bits() {
    on_every_device(|device| {
        let (q, rows) = (8, 8192);
        let mut ends = vec![0; rows];
        ends[..8].fill(200);
        ends[rows - 8..].copy_from_slice(&[300, 299, 129, 1, 0, 64, 65, 257]);
        let step = StepSpec::new(43, q, 128, &ends).build().unwrap();
        let pitch = 524_800;
        let len = rows * pitch;
        assert!(len > 1 << 32);
        let inputs = Inputs::new(device, &step);
        let logits = device.alloc::<u16>(len).unwrap();
        let output = ScoreOutput::Pitched { logits: logits.as_view(), tops: None, pitch };
        let view = |row: usize| logits.view(row * pitch..row * pitch + 512).unwrap();
        let checked: Vec<usize> = (0..8).chain([8, rows / 2]).chain(rows - 8..rows).collect();
        for &row in &checked {
            view(row).fill_bytes(&inputs.stream, POISON).unwrap();
        }
        let score = score_kernel(device, &step, ScoreForm::Pitched);
        score.launch(&inputs.stream, &inputs.score_step(&step), &output).unwrap();
        let want = dsa_core::oracle::step::logits(&step, dot_tensor_core);
        for &row in &checked {
            let longest = [200, 0, 300][(row >= 8) as usize + (row >= rows - 8) as usize];
            let mut expected = want[row].clone();
            expected.resize(usize::next_multiple_of(longest, 64), 0);
            expected.resize(512, POISON16);
            assert_eq!(view(row).copy_to_vec(&inputs.stream).unwrap(), expected, "row {row}");
        }
    });
}

/// The step with its pages moved to a cache of another stride, all other bytes 0xA5.
fn with_page_stride(step: &DecodeStep, page_stride: usize) -> DecodeStep {
    let mut cache = vec![0xA5; step.blocks * page_stride];
    for block in 0..step.blocks {
        let page = &step.cache[block * step.page_stride..][..fp8_page::BYTES];
        cache[block * page_stride..][..fp8_page::BYTES].copy_from_slice(page);
    }
    DecodeStep { page_stride, cache, ..step.clone() }
}

#[test]
fn pages_may_lie_apart_and_start_anywhere() {
    on_every_device(|device| {
        let dense = exact(45, 2, &[257, 256, 65, 129]).build().unwrap();
        let want = check_score(device, &dense, ScoreForm::Pitched);
        let strided = with_page_stride(&dense, 3 * fp8_page::BYTES + 576);
        assert_eq!(check_score(device, &strided, ScoreForm::Pitched), want);
        // The same pool at an offset, the last page without its padding.
        for offset in [16, 576, 8448] {
            let mut bytes = vec![0xA5; offset];
            let used = (strided.blocks - 1) * strided.page_stride + fp8_page::BYTES;
            bytes.extend(&strided.cache[..used]);
            let mut inputs = Inputs::new(device, &strided);
            inputs.cache_bytes = device.upload(&bytes).unwrap();
            let pool = inputs.cache_bytes.view(offset..).unwrap();
            inputs.cache = KeyCache::new(device, &pool, cache_shape(&strided)).unwrap();
            assert_eq!(check_score_of(&inputs, &strided, ScoreForm::Pitched), want);
            assert_eq!(inputs.cache_bytes.copy_to_vec(&inputs.stream).unwrap(), bytes, "the cache changed");
        }
    });
}

#[test]
fn requests_share_prefix_pages() {
    on_every_device(|device| {
        let mut step = exact(59, 1, &[256, 250, 200]).build().unwrap();
        let width = step.table_width;
        // Requests 0 and 1 share three pages and have equal queries; request 2 lists its first page twice.
        step.table.copy_within(..3, width);
        step.table[2 * width + 2] = step.table[2 * width];
        step.queries.copy_within(..query_row::BYTES, query_row::BYTES);
        step.weights.copy_within(..HEADS, HEADS);
        for form in [ScoreForm::Pitched, compact(&step)] {
            let logits = check_score(device, &step, form);
            assert_eq!(logits[0][..192], logits[1][..192]);
            assert_ne!(logits[0][192..250], logits[1][192..]);
            assert_eq!(logits[2][..64], logits[2][128..192], "both positions of the repeated page");
        }
        // A key written to page 4 of request 0 alone does not move request 1.
        let before = check_score(device, &step, ScoreForm::Pitched);
        set_key(&mut step, 0, 200, &[0x38; DIM], u32::from_le_bytes([120; 4]));
        let after = check_score(device, &step, ScoreForm::Pitched);
        assert_ne!(before[0], after[0]);
        assert_eq!(before[1..], after[1..]);
    });
}

#[test]
fn nan_infinity_and_zero_signs_propagate_as_specified() {
    on_every_device(|device| {
        for (seed, q) in [(1, 1), (2, 3), (3, 5), (4, 8)] {
            let len = sized(device, 300, 5000);
            let ends: Vec<i32> = (0..2 * q as i32).map(|i| len - i).collect();
            for scale_form in BOTH_SCALES {
                let spec = StepSpec { contents: Contents::Hostile, scale_form, ..exact(seed, q, &ends) };
                let mut step = spec.build().unwrap();
                if scale_form == ScaleForm::Ue8m0 {
                    // Scale bytes at both ends, whose other three bytes do not count.
                    let mut rng = SplitMix64::new(seed);
                    for token in (0..len as usize - 2 * q).step_by(7) {
                        let key = *step.key(0, token).0;
                        let word = rng.next_u64() as u32 & !0xFF | [0, 255, 1, 254][token % 4];
                        set_key(&mut step, 0, token, &key, word);
                    }
                }
                check_both_forms(device, &step);
            }
        }
    });
}

#[test]
fn page_ids_outside_the_cache_read_as_zero_keys() {
    on_every_device(|device| {
        for id in [-1, i32::MIN, i32::MAX, 1 << 30] {
            let mut step = exact(60, 1, &[300, 257]).build().unwrap();
            // The oracle sees a page of zeros in place of each that does not exist.
            let (zero, outside) = (step.blocks, if id == 1 << 30 { step.blocks as i32 } else { id });
            step.cache.extend([0; fp8_page::BYTES]);
            step.blocks += 1;
            let width = step.table_width;
            (step.table[1], step.table[width + 4]) = (zero as i32, zero as i32);
            let mut inputs = Inputs::new(device, &step);
            let mut table = step.table.clone();
            (table[1], table[width + 4]) = (outside, outside);
            inputs.table = device.upload(&table).unwrap();
            let shape = dsa_core::IndexCacheShape::new(step.blocks - 1, fp8_page::BYTES, step.page_stride).unwrap();
            inputs.cache = KeyCache::new(device, &inputs.cache_bytes.as_view(), shape).unwrap();
            let logits = check_score_of(&inputs, &step, ScoreForm::Pitched);
            assert_eq!(logits[0][64..128], [0; 64]);
        }
    });
}

#[test]
fn page_ids_beyond_8_gib_are_addressed_in_64_bits() {
    on_every_device(|device| {
        // 1,016,801 pages of 8448 bytes are the first past 2^33 bytes.
        let blocks = 1_020_000;
        let pool = match device.alloc::<u8>(blocks * fp8_page::BYTES) {
            Ok(pool) => pool,
            Err(error) => return println!("SKIPPED: {error}"),
        };
        let step = exact(61, 2, &[500, 499, 300, 130]).build().unwrap();
        let mut inputs = Inputs::new(device, &step);
        // Near the end of the pool, and either side of 2 GiB, 4 GiB and 8 GiB.
        let spots = [254_200, 254_201, 508_400, 508_401, 1_016_800, 1_016_801, 1_016_802];
        let place = |id: usize| spots.get(id).copied().unwrap_or(blocks - 1 - id);
        for id in 0..step.blocks {
            let page = &step.cache[id * step.page_stride..][..fp8_page::BYTES];
            let at = place(id) * fp8_page::BYTES;
            pool.view(at..at + page.len()).unwrap().copy_from(&inputs.stream, page).unwrap();
        }
        let moved = |id: &i32| match usize::try_from(*id) {
            Ok(id) if id < step.blocks => place(id) as i32,
            _ => *id,
        };
        inputs.table = device.upload(&step.table.iter().map(moved).collect::<Vec<_>>()).unwrap();
        let shape = dsa_core::IndexCacheShape::new(blocks, fp8_page::BYTES, fp8_page::BYTES).unwrap();
        inputs.cache = KeyCache::new(device, &pool.as_view(), shape).unwrap();
        check_score_of(&inputs, &step, ScoreForm::Pitched);
    });
}

#[test]
fn queries_and_weights_of_other_rows_do_not_matter() {
    on_every_device(|device| {
        // Live rows are a prefix: what follows them in the buffers is never looked at.
        let step = StepSpec::new(62, 2, 128, &[300, 200, 150, 129]).build().unwrap();
        let mut inputs = Inputs::new(device, &step);
        let want = check_score_of(&inputs, &step, ScoreForm::Pitched);
        inputs.queries = device.upload(&[&step.queries[..], &[0x7F; 4096]].concat()).unwrap();
        inputs.weights = device.upload(&[&step.weights[..], &[0x7FFF; 32]].concat()).unwrap();
        assert_eq!(check_score_of(&inputs, &step, ScoreForm::Pitched), want);
    });
}

#[test]
fn fewer_live_rows_write_only_their_own() {
    on_every_device(|device| {
        let step = StepSpec::new(63, 2, 128, &[300, 200, 150, 129, 400, 1]).build().unwrap();
        let inputs = Inputs::new(device, &step);
        let live = DecodeStep { rows: 4, row_ends: step.row_ends[..4].to_vec(), ..step.clone() };
        let want = dsa_core::oracle::step::logits(&live, dot_tensor_core);
        let pitch = pitch(&step);
        let logits = device.alloc::<u16>(6 * pitch).unwrap();
        logits.fill_bytes(&inputs.stream, POISON).unwrap();
        let score = score_kernel(device, &step, ScoreForm::Pitched);
        let row_ends = inputs.row_ends.view(..4).unwrap();
        let output = ScoreOutput::Pitched { logits: logits.as_view(), tops: None, pitch };
        score.launch(&inputs.stream, &ScoreStep { row_ends, ..inputs.score_step(&step) }, &output).unwrap();
        let got = logits.copy_to_vec(&inputs.stream).unwrap();
        let expected = expected_scratch(&live, ScoreForm::Pitched, &want).logits;
        assert_eq!(got[..4 * pitch], expected[..4 * pitch]);
        assert!(got[4 * pitch..].iter().all(|x| *x == POISON16), "a row that is not live was written");
    });
}

#[test]
fn a_table_per_row_is_a_table_of_q_times_the_stride() {
    on_every_device(|device| {
        let step = StepSpec::new(64, 3, 128, &[300, 200, 150, 129, 400, 1]).build().unwrap();
        let inputs = Inputs::new(device, &step);
        let want = run_score(&inputs, &step, &score_kernel(device, &step, ScoreForm::Pitched));
        // Each row repeats its request's entries; rows other than the first hold garbage to show that none is read.
        let width = step.table_width;
        let per_row: Vec<i32> = (0..step.rows)
            .flat_map(|row| match row % 3 {
                0 => step.table_row(row / 3).to_vec(),
                _ => vec![i32::MAX; width],
            })
            .collect();
        let ids = device.upload(&per_row).unwrap();
        let table = Table { ids: ids.as_view(), stride: 3 * width, width };
        let score =
            IndexerScore::new(device, ScoreShape::new(3, ScoreForm::Pitched, step.scale_form).unwrap()).unwrap();
        let logits = device.alloc::<u16>(step.rows * pitch(&step)).unwrap();
        logits.fill_bytes(&inputs.stream, POISON).unwrap();
        let output = ScoreOutput::Pitched { logits: logits.as_view(), tops: None, pitch: pitch(&step) };
        score.launch(&inputs.stream, &ScoreStep { table, ..inputs.score_step(&step) }, &output).unwrap();
        assert_eq!(logits.copy_to_vec(&inputs.stream).unwrap(), want.logits[..step.rows * pitch(&step)]);
    });
}

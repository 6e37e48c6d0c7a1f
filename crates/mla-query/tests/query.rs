//! The query against the oracle: sizes, strides, slots, numbers, orders.

mod common;

use common::*;
use dsa_core::consts::{KV_LORA, Q_LORA};
use dsa_core::layout::mla_entry::{self, MlaCacheForm};
use dsa_core::layout::mla_rows::{K_PE, KV_C, Q_A, QKV};
use dsa_core::numerics::bf16;
use gpu::Device;
use mla_query::{MlaQuery, MlaShape};

fn b(x: f32) -> u16 {
    bf16::from_f32(x)
}

#[track_caller]
fn check_on(device: &Device, step: &Step, form: MlaCacheForm) -> Outputs {
    let shape = shape_of(step, form);
    let got = run(device, step, shape);
    check(step, shape, &got);
    got
}

#[test]
fn every_number_of_tokens_of_a_cluster() {
    on_every_device(|device| {
        for tokens in 1..=8 {
            check_on(device, &Step::random(tokens as u64, 1, tokens), MlaCacheForm::ALL[tokens % 4]);
        }
    });
}

#[test]
fn numbers_of_heads_either_side_of_the_wide_cluster() {
    on_every_device(|device| {
        for (heads, tokens) in [(7, 1), (8, 2), (12, 3)] {
            check_on(device, &Step::random(heads as u64, heads, tokens), MlaCacheForm::ALL[heads % 4]);
        }
    });
}

#[test]
fn tiles_of_every_fill_and_number() {
    on_every_device(|device| {
        // One head has fewer CTAs than a tile has tokens; seven have more.
        for (heads, tokens) in [(1, 9), (1, 15), (1, 16), (2, 17), (1, 32), (1, 33), (7, 10), (12, 31)] {
            let step = Step { pages: 2, ..Step::random(tokens as u64, heads, tokens) };
            check_on(device, &step, MlaCacheForm::ALL[(heads + tokens) % 4]);
        }
    });
}

#[test]
fn every_tile_fits_any_batch() {
    on_every_device(|device| {
        for (tile, tokens) in [(16, 3), (16, 33), (32, 7), (32, 50), (64, 1), (64, 63), (64, 70)] {
            for form in [MlaCacheForm::Fp8Ds, MlaCacheForm::Fp8Multiply] {
                let step = Step { pages: 4, ..Step::random(tile as u64, 1, tokens) };
                let shape = shape_of(&step, form).with_tile(Some(tile)).unwrap();
                assert_eq!((shape.tokens(), shape.is_tiled()), (tile as u32, true));
                check(&step, shape, &run(device, &step, shape));
            }
        }
    });
}

#[test]
fn all_tiles_give_the_same_bits() {
    on_every_device(|device| {
        let step = Step::random(92, 2, 21);
        let shape = shape_of(&step, MlaCacheForm::Nvfp4Ds);
        let [a, b, c] = [16, 32, 64].map(|tile| run(device, &step, shape.with_tile(Some(tile)).unwrap()));
        assert!(a == b && b == c, "every sum has one order");
    });
}

/// The halves of every product cancel but for the rounding of their sums, which shows the order of the parts.
#[test]
fn all_tiles_add_parts_that_cancel_in_the_same_order() {
    on_every_device(|device| {
        const HALF: usize = Q_LORA / 2;
        let mut step = Step::random(92, 1, 9);
        step.q_a.fill(b(1.0));
        step.qkv.chunks_mut(QKV).for_each(|row| row.copy_within(..HALF, HALF));
        for row in step.q_b.chunks_mut(Q_LORA) {
            (0..HALF).for_each(|c| row[HALF + c] = row[c] ^ 0x8000);
        }
        let shape = shape_of(&step, MlaCacheForm::Fp8Ds); // a BF16 query: FP8 would round the rest to zero
        let [a, b, c] = [16, 32, 64].map(|tile| run(device, &step, shape.with_tile(Some(tile)).unwrap()));
        assert!(a.query.iter().any(|byte| byte & 0x7F != 0), "rounding leaves something");
        assert!(a == b && b == c, "every sum has one order");
    });
}

#[test]
fn weights_copied_by_threads_change_nothing() {
    on_every_device(|device| {
        // Both cluster sizes.
        for (heads, tokens) in [(1, 1), (2, 8), (8, 3)] {
            let step = Step::random(93, heads, tokens);
            let shape = shape_of(&step, MlaCacheForm::ALL[tokens % 4]);
            let copied = run(device, &step, shape.with_thread_copies(true).unwrap());
            assert_eq!(copied, run(device, &step, shape), "{heads} heads, {tokens} tokens");
            check(&step, shape, &copied);
        }
    });
}

#[test]
fn the_batch_does_not_show_in_norms_and_entries() {
    on_every_device(|device| {
        for form in MlaCacheForm::ALL {
            let large = Step::random(90, 1, 18);
            let small = Step { tokens: 5, slots: large.slots[..5].to_vec(), ..large.clone() };
            let (tiled, single) = (check_on(device, &large, form), check_on(device, &small, form));
            let rows = 5 * Q_LORA;
            assert_eq!(tiled.q_c.unwrap()[..rows], single.q_c.unwrap()[..rows], "{form:?}");
            let bytes = form.entry_bytes();
            for slot in small.slots {
                let entry = slot as usize * bytes..(slot as usize + 1) * bytes;
                assert_eq!(tiled.cache[entry.clone()], single.cache[entry], "{form:?}, slot {slot}");
            }
        }
    });
}

#[test]
fn the_most_heads_and_the_largest_batch() {
    on_gpu(|device| {
        let forms = MlaCacheForm::ALL.into_iter().cycle();
        for ((heads, tokens), form) in [(96, 5), (12, 1), (12, 8), (12, 64), (96, 20), (96, 1)].into_iter().zip(forms) {
            check_on(device, &Step::random(1, heads, tokens), form);
        }
        let step = Step { pages: 49, ..Step::random(2, 1, 1024) };
        for form in MlaCacheForm::ALL {
            check_on(device, &step, form);
        }
    });
}

#[test]
fn fewer_tokens_than_the_batch_leave_the_rest_alone() {
    on_every_device(|device| {
        for (batch, tokens) in [(8, 5), (8, 1), (20, 9), (2, 1)] {
            let step = Step::random(9, 2, tokens);
            let form = MlaCacheForm::ALL[tokens % 4];
            let shape = MlaShape::new(2, batch, form, step.page_tokens).unwrap().with_qc(true);
            check(&step, shape, &run(device, &step, shape));
        }
        let step = Step::random(9, 2, 0);
        let shape = MlaShape::new(2, 4, MlaCacheForm::Fp8Ds, 64).unwrap();
        let got = run(device, &step, shape);
        assert!(got.query.is_empty() && got.cache.iter().all(|b| *b == POISON), "no token, no write");
    });
}

#[test]
fn slots_outside_the_cache_change_nothing_and_are_counted() {
    on_every_device(|device| {
        for form in MlaCacheForm::ALL {
            let mut step = Step::random(13, 1, 6);
            let cap = step.capacity();
            step.slots = vec![5, -1, cap - 1, cap, i64::from(i32::MIN), (1 << 40) + 17];
            // What belongs to no slot may hold anything.
            for token in [1, 3, 4, 5] {
                step.qkv[token * QKV..][KV_C.start..QKV].fill(0x7FC1);
            }
            // The same in a tile, whose other tokens have no slot.
            let mut tile = Step { tokens: 10, ..step.clone() };
            tile.slots.extend([-7; 4]);
            tile.qkv.extend(vec![0x7FC1; 4 * QKV]);
            let tiled = run(device, &tile, shape_of(&tile, form));
            let got = check_on(device, &step, form);
            assert_eq!((&tiled.cache, tiled.dropped), (&got.cache, 2), "{form:?}");
            assert_eq!(got.dropped, 2, "{form:?}");
            let bytes = form.entry_bytes();
            let untouched = |slot: usize| got.cache[slot * bytes..][..bytes].iter().all(|b| *b == POISON);
            let touched: Vec<usize> = (0..cap as usize).filter(|slot| !untouched(*slot)).collect();
            assert_eq!(touched, [5, cap as usize - 1], "{form:?}");
        }
        let mut step = Step::random(13, 1, 2);
        step.slots = vec![i64::MIN, i64::MAX];
        assert_eq!(check_on(device, &step, MlaCacheForm::Fp8Ds).dropped, 1);
        // A cache of no page has no slot.
        let step = Step { pages: 0, slots: vec![0, -1], ..step };
        assert_eq!(check_on(device, &step, MlaCacheForm::Nvfp4Ds).dropped, 1);
    });
}

#[test]
fn rows_pages_and_entries_may_be_strided() {
    on_every_device(|device| {
        for form in MlaCacheForm::ALL {
            for tokens in [3, 11] {
                let packed = Step::random(46, 1, tokens);
                let mut step = Step {
                    qkv_stride: QKV + 64,
                    page_gap: 3 * 16 + 576,
                    token_gap: 32,
                    page_tokens: 7,
                    ..packed.clone()
                };
                step.pages = 5;
                step.slots = (0..tokens as i64).map(|t| (20 + 8 * t) % 35).collect();
                step.qkv = vec![0x7FC1; tokens * step.qkv_stride];
                for token in 0..tokens {
                    step.qkv[token * step.qkv_stride..][..QKV].copy_from_slice(packed.row(token));
                }
                let got = check_on(device, &step, form);
                let contiguous = check_on(device, &packed, form);
                assert_eq!((got.query, got.q_c), (contiguous.query, contiguous.q_c), "{form:?}");
            }
        }
    });
}

#[test]
fn pages_of_any_size() {
    on_every_device(|device| {
        for (page_tokens, pages) in [(1, 12), (3, 4), (16, 2), (65, 1), (128, 1)] {
            let step = Step { page_tokens, pages, ..Step::random(page_tokens as u64, 1, 4) };
            check_on(device, &step, MlaCacheForm::Nvfp4Ds);
        }
    });
}

#[test]
fn rows_of_zeros_tiny_and_large_values() {
    on_every_device(|device| {
        let mut step = Step::random(47, 1, 4);
        step.qkv[..QKV].fill(0);
        step.qkv[QKV..2 * QKV].fill(b(1e-4));
        step.qkv[2 * QKV..3 * QKV].fill(b(0.01));
        for at in [0, 700, Q_LORA, Q_LORA + 300] {
            step.qkv[2 * QKV + at] = b(60_000.0);
        }
        // Large enough that the squares overflow: the norm is 0, and so is the row.
        step.qkv[3 * QKV..][Q_A].fill(b(1e30));
        for form in MlaCacheForm::ALL {
            let got = check_on(device, &step, form);
            let q_c = got.q_c.unwrap();
            assert!(q_c[..Q_LORA].iter().all(|x| *x == 0), "a zero row stays zero");
            assert!(q_c[3 * Q_LORA..].iter().all(|x| x & 0x7FFF == 0), "an overflowing one becomes zero");
        }
    });
}

#[test]
fn ones_become_the_weights_and_small_entries_keep_their_precision() {
    on_every_device(|device| {
        let mut step = Step::random(48, 1, 2);
        step.q_a = (0..Q_LORA).map(|i| b([1.0, 2.0][i % 2])).collect();
        step.qkv[..QKV].fill(b(1.0));
        step.qkv[QKV..].fill(b(0.01));
        (step.qkv[QKV], step.qkv[QKV + 1]) = (b(3000.0), b(3000.0));
        let q_c = check_on(device, &step, MlaCacheForm::Fp8Divide).q_c.unwrap();
        assert_eq!(q_c[..Q_LORA], step.q_a);
        let r = f64::sqrt(1536.0 / (2.0 * 3000.0 * 3000.0));
        for (i, x) in q_c[Q_LORA + 2..].iter().enumerate() {
            let want = f64::from(bf16::to_f32(b(0.01))) * r * [1.0, 2.0][i % 2];
            assert!((f64::from(bf16::to_f32(*x)) / want - 1.0).abs() < 0.01, "column {}", i + 2);
        }
    });
}

#[test]
fn the_stored_query_is_normalised() {
    on_every_device(|device| {
        let step = Step::random(89, 1, 1);
        let mut scaled = step.clone();
        scaled.qkv.iter_mut().for_each(|x| *x = b(8.0 * bf16::to_f32(*x)));
        let [one, other] = [&step, &scaled].map(|s| check_on(device, s, MlaCacheForm::Fp8Ds).q_c.unwrap());
        assert!(one.iter().zip(&other).all(|(a, b)| ulps(*a, *b) <= 1), "the input's scale does not show");
    });
}

/// A step whose normalised latent is `latent`: rows of ones, so that the weights come through.
fn with_latent(latent: &[u16]) -> Step {
    let mut step = Step::random(50, 1, 1);
    step.qkv[KV_C].fill(b(1.0));
    step.kv_a = latent.to_vec();
    step
}

#[test]
fn tile_scales_are_powers_of_two_that_fit() {
    let up = |x: f32| bf16::to_f32(b(x) + 1);
    let groups =
        [[56.0, up(56.0), 0.0, 3e-38], [57.3, 448.0, up(448.0), 0.3], [1e-3, 0.0448, up(0.0448), f32::INFINITY]];
    on_every_device(|device| {
        for amaxes in groups {
            let latent: Vec<u16> = (0..KV_LORA).map(|i| b(amaxes[i / 128] * [1.0, -0.5, 0.25][i % 3])).collect();
            let step = with_latent(&latent);
            let got = check_on(device, &step, MlaCacheForm::Fp8Ds);
            for (tile, amax) in amaxes.iter().enumerate() {
                let at = mla_entry::ds_scale(tile);
                let scale = f32::from_le_bytes(got.cache[at..at + 4].try_into().unwrap());
                assert!(scale >= bf16::to_f32(b(*amax)) / 448.0 && scale.to_bits() & 0x7F_FFFF == 0, "{amax}: {scale}");
            }
            check_on(device, &step, MlaCacheForm::Fp8Divide);
            check_on(device, &step, MlaCacheForm::Fp8Multiply);
            check_on(device, &step, MlaCacheForm::Nvfp4Ds);
        }
    });
}

#[test]
fn four_bit_codes_round_to_even_at_every_midpoint() {
    // Each block of 16 holds a 6, so that its scale is 1 and values are codes.
    let mut values = vec![0.0, -0.0, f32::NAN, -f32::NAN, 6.0, -6.0, 1e-30, -1e-30];
    for midpoint in [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] {
        let bits = b(midpoint);
        for x in [bits - 1, bits, bits + 1].map(bf16::to_f32) {
            values.extend([x, -x]);
        }
    }
    let mut latent = vec![0u16; KV_LORA];
    for (i, x) in latent.iter_mut().enumerate() {
        let n = i / 16 * 15 + i % 16;
        *x = if i % 16 == 15 { b(6.0) } else { b(values[n % values.len()]) };
    }
    on_every_device(|device| {
        let got = check_on(device, &with_latent(&latent), MlaCacheForm::Nvfp4Ds);
        assert!(got.cache[mla_entry::NVFP4_SCALES].iter().all(|code| *code == 0x38), "every scale is 1");
    });
}

#[test]
fn four_bit_scales_of_every_size() {
    on_every_device(|device| {
        for first in [-14i32, 3] {
            // Blocks of increasing magnitude, half of them just past a scale's code.
            let latent: Vec<u16> = (0..KV_LORA as i32)
                .map(|i| {
                    let amax = 2f32.powi(first + i / 32) * [6.0, 6.4][i as usize / 16 % 2];
                    b(amax * (1.0 - (i % 16) as f32 / 11.0))
                })
                .collect();
            check_on(device, &with_latent(&latent), MlaCacheForm::Nvfp4Ds);
        }
    });
}

#[test]
fn rope_keeps_or_converts_extreme_values() {
    let values =
        [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 448.0, 464.0, -480.0, 1e-3, 2f32.powi(-10), 3e38];
    on_every_device(|device| {
        for form in MlaCacheForm::ALL {
            for k_scale in [1.0, 0.037] {
                let mut step = Step { k_scale, ..Step::random(51, 1, 1) };
                step.qkv[K_PE].iter_mut().enumerate().for_each(|(i, x)| *x = b(values[i % values.len()]));
                check_on(device, &step, form);
            }
        }
    });
}

#[test]
fn every_order_of_warps_and_copies_gives_the_same_bits() {
    for (form, tokens) in MlaCacheForm::ALL.into_iter().chain(MlaCacheForm::ALL).zip([1, 2, 3, 8, 9, 18, 12, 20]) {
        let step = Step::random(60, 2, tokens);
        let mut first = None;
        for config in orders(3) {
            let got = check_on(&Device::simulated(config), &step, form);
            assert_eq!(*first.get_or_insert(got.clone()), got, "{config:?}");
            if tokens <= 8 {
                let shape = shape_of(&step, form).with_thread_copies(true).unwrap();
                assert_eq!(run(&Device::simulated(config), &step, shape), got, "copies by threads, {config:?}");
            }
        }
    }
}

#[test]
fn simulator_and_gpu_agree_bit_for_bit() {
    on_gpu(|gpu| {
        let forms = MlaCacheForm::ALL.into_iter().cycle();
        for (form, (heads, tokens)) in forms.zip([(6, 8), (6, 1), (6, 3), (12, 2), (12, 8), (6, 12), (2, 20), (2, 70)])
        {
            let step = Step { pages: 4, ..Step::random(61, heads, tokens) };
            let shapes = match tokens {
                n if n <= 8 => [None, Some(16)],
                _ => [Some(32), Some(64)],
            };
            for tile in shapes {
                let shape = shape_of(&step, form).with_tile(tile).unwrap();
                let simulated = run(&Device::simulated(sim_config()), &step, shape);
                assert_eq!(run(gpu, &step, shape), simulated, "{form:?}, {heads} heads, {tokens} tokens, {tile:?}");
            }
        }
    });
}

#[test]
fn without_its_store_the_normalised_query_stays_inside() {
    on_every_device(|device| {
        let step = Step::random(62, 1, 2);
        let shape = MlaShape::new(1, 2, MlaCacheForm::Fp8Multiply, 64).unwrap();
        let got = run(device, &step, shape);
        check(&step, shape, &got);
        assert_eq!(got.q_c, None);
    });
}

#[test]
fn shapes_of_equal_cuts_share_a_kernel() {
    let name = |heads, batch| MlaShape::new(heads, batch, MlaCacheForm::Fp8Ds, 64).unwrap().name();
    assert_eq!(name(1, 3), name(7, 3));
    assert_ne!(name(7, 3), name(8, 3));
    assert_eq!([name(1, 4), name(12, 17), name(12, 33)], [name(96, 16), name(96, 32), name(96, 1000)]);
    assert_ne!(name(1, 3), name(1, 4));
    on_every_device(|device| {
        // The kernel of one shape runs another's step.
        let (one, other) = (Step::random(63, 3, 4), Step::random(64, 5, 4));
        let kernel = mla_query::query::build(&shape_of(&one, MlaCacheForm::Fp8Ds), device.target().unwrap()).unwrap();
        let shape = shape_of(&other, MlaCacheForm::Fp8Ds);
        let query = MlaQuery::from_kernel(device, shape, &kernel).unwrap();
        check(&other, shape, &Resident::new(device, &other, shape).run(&query, &other));
    });
}

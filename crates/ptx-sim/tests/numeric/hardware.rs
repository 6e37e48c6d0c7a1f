//! Tensor-core results recorded on an H200, and the rules that the recordings do not reach.

use std::path::Path;

use proptest::prelude::*;
use ptx_sim::numeric::tensor_core::{dot_bf16_k16, dot_e4m3_k32, mma_bf16_k16, mma_e4m3_k32};

/// Columns of every recorded tile.
const COLUMNS: usize = 8;
/// Bytes of a row or column of operands.
const OPERAND_BYTES: usize = 32;

/// One recorded MMA: `result[row * 8 + column]` from rows of A, columns of B and accumulators.
struct Tile {
    a: Vec<[u8; OPERAND_BYTES]>,
    b: Vec<[u8; OPERAND_BYTES]>,
    acc: Vec<f32>,
    result: Vec<u32>,
}

/// Reads a recording: u32 tiles, rows, 8, 32; per tile rows x 32 bytes of A, 8 x 32 of B, rows x 8 accumulators,
/// rows x 8 results, all little-endian.
fn recording(name: &str) -> Vec<Tile> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/hardware").join(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut rest = bytes.as_slice();
    let mut take = |count: usize| {
        let (head, tail) = rest.split_at(count);
        rest = tail;
        head
    };
    let words = |bytes: &[u8]| -> Vec<u32> {
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    let operands = |bytes: &[u8]| -> Vec<[u8; OPERAND_BYTES]> {
        bytes.chunks_exact(OPERAND_BYTES).map(|chunk| chunk.try_into().unwrap()).collect()
    };
    let header = words(take(16));
    let (tiles, rows) = (header[0] as usize, header[1] as usize);
    assert_eq!(header[2..], [COLUMNS as u32, OPERAND_BYTES as u32]);
    let recorded: Vec<Tile> = (0..tiles)
        .map(|_| Tile {
            a: operands(take(rows * OPERAND_BYTES)),
            b: operands(take(COLUMNS * OPERAND_BYTES)),
            acc: words(take(rows * COLUMNS * 4)).into_iter().map(f32::from_bits).collect(),
            result: words(take(rows * COLUMNS * 4)),
        })
        .collect();
    assert!(rest.is_empty(), "{} bytes after the last tile", rest.len());
    assert_eq!(recorded.iter().map(|tile| tile.result.len()).sum::<usize>(), 102_400);
    recorded
}

fn bf16_operands(bytes: &[u8; OPERAND_BYTES]) -> [u16; 16] {
    std::array::from_fn(|k| u16::from_le_bytes([bytes[2 * k], bytes[2 * k + 1]]))
}

#[track_caller]
fn assert_bits(tile: usize, computed: &[f32], recorded: &[u32]) {
    for (i, (computed, &recorded)) in computed.iter().zip(recorded).enumerate() {
        let computed = computed.to_bits();
        assert!(
            computed == recorded,
            "tile {tile} row {} column {}: got {computed:#010x}, want {recorded:#010x}",
            i / COLUMNS,
            i % COLUMNS
        );
    }
}

#[test]
fn wgmma_e4m3_equals_every_recorded_result() {
    for (index, tile) in recording("wgmma_e4m3_k32.bin").iter().enumerate() {
        let singles: Vec<f32> = (0..tile.acc.len())
            .map(|i| dot_e4m3_k32(&tile.a[i / COLUMNS], &tile.b[i % COLUMNS], tile.acc[i]))
            .collect();
        assert_bits(index, &singles, &tile.result);
        let mut acc = tile.acc.clone();
        mma_e4m3_k32(&tile.a, &tile.b, &mut acc);
        assert_bits(index, &acc, &tile.result);
    }
}

#[track_caller]
fn check_bf16_recording(name: &str) {
    for (index, tile) in recording(name).iter().enumerate() {
        let a: Vec<[u16; 16]> = tile.a.iter().map(bf16_operands).collect();
        let b: Vec<[u16; 16]> = tile.b.iter().map(bf16_operands).collect();
        let singles: Vec<f32> =
            (0..tile.acc.len()).map(|i| dot_bf16_k16(&a[i / COLUMNS], &b[i % COLUMNS], tile.acc[i])).collect();
        assert_bits(index, &singles, &tile.result);
        let mut acc = tile.acc.clone();
        mma_bf16_k16(&a, &b, &mut acc);
        assert_bits(index, &acc, &tile.result);
    }
}

#[test]
fn wgmma_bf16_equals_every_recorded_result() {
    check_bf16_recording("wgmma_bf16_k16.bin");
}

#[test]
fn mma_sync_bf16_equals_every_recorded_result() {
    check_bf16_recording("mma_sync_bf16_k16.bin");
}

/// The model as the module states it, by exact integers: `products` and `acc` as (significand, exponent field, fraction
/// bits), the cut below the largest exponent, and the fraction bits kept.
fn model(products: &[(i128, i32)], fraction_bits: i32, acc: f32, cut: i32, kept: i32) -> f32 {
    let bits = acc.to_bits();
    let field = (bits >> 23 & 0xFF) as i32;
    let fraction = i128::from(bits & 0x7F_FFFF);
    let magnitude = if field == 0 { fraction } else { fraction | 1 << 23 };
    let acc_term = (if acc < 0.0 { -magnitude } else { magnitude }, field.max(1) - 127, 23);
    let terms: Vec<(i128, i32, i32)> = products
        .iter()
        .map(|&(significand, exponent)| (significand, exponent, fraction_bits))
        .chain([acc_term])
        .filter(|&(significand, ..)| significand != 0)
        .collect();
    let Some(largest) = terms.iter().map(|&(_, exponent, _)| exponent).max() else { return 0.0 };
    let unit = largest - cut;
    // Rust's integer division is the cut: toward zero.
    let sum: i128 = terms
        .iter()
        .map(|&(significand, exponent, fraction_bits)| match exponent - fraction_bits - unit {
            up @ 0.. => significand << up,
            down => significand / (1i128 << (-down).min(100)),
        })
        .sum();
    let top = 127 - sum.unsigned_abs().leading_zeros() as i32;
    let last = (top - kept).max(-126 - kept - unit).max(0);
    let truncated = sum / (1i128 << last.min(126)) * (1i128 << last.min(126));
    (truncated as f64 * 2f64.powi(unit)) as f32 + 0.0
}

fn e4m3_significand(code: u8) -> (i128, i32) {
    let field = i32::from(code >> 3 & 15);
    let magnitude = i128::from(code & 7) + if field == 0 { 0 } else { 8 };
    (if code & 0x80 != 0 { -magnitude } else { magnitude }, field.max(1) - 7)
}

fn bf16_significand(bits: u16) -> (i128, i32) {
    let field = i32::from(bits >> 7 & 0xFF);
    let magnitude = i128::from(bits & 0x7F) + if field == 0 { 0 } else { 0x80 };
    (if bits & 0x8000 != 0 { -magnitude } else { magnitude }, field.max(1) - 127)
}

fn products<T: Copy>(a: &[T], b: &[T], significand: fn(T) -> (i128, i32)) -> Vec<(i128, i32)> {
    let pair = |(&a, &b): (&T, &T)| {
        let ((a, a_exponent), (b, b_exponent)) = (significand(a), significand(b));
        (a * b, a_exponent + b_exponent)
    };
    a.iter().zip(b).map(pair).collect()
}

/// Finite accumulators of any exponent, those of sums of products most of all.
fn accumulator() -> impl Strategy<Value = f32> {
    prop_oneof![
        2 => any::<u32>(),
        4 => (any::<u32>(), 100u32..150).prop_map(|(bits, field)| bits & 0x807F_FFFF | field << 23),
        1 => any::<u32>().prop_map(|bits| bits & 0x807F_FFFF),
        1 => Just(0),
    ]
    .prop_map(f32::from_bits)
    .prop_filter("finite", |x| x.is_finite())
}

/// E4M3 codes: numbers, with zeros and subnormals common in some vectors.
fn e4m3_codes() -> impl Strategy<Value = [u8; 32]> {
    prop_oneof![Just(0xFFu8), Just(0x87), Just(0xBF), Just(0x80)].prop_flat_map(|mask| {
        prop::array::uniform32(any::<u8>().prop_map(move |code| {
            let code = code & mask;
            if code & 0x7F == 0x7F { code & 0x80 } else { code }
        }))
    })
}

/// BF16 numbers around a common exponent, or anywhere.
fn bf16_numbers() -> impl Strategy<Value = [u16; 16]> {
    (0u16..255, prop::sample::select(vec![1u16, 4, 16, 255])).prop_flat_map(|(center, spread)| {
        prop::array::uniform16(
            any::<(u16, u16)>()
                .prop_map(move |(bits, offset)| bits & 0x807F | (center + offset % spread).min(254) << 7),
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30_000))]

    #[test]
    fn e4m3_steps_follow_the_stated_model(a in e4m3_codes(), b in e4m3_codes(), acc in accumulator()) {
        let expected = model(&products(&a, &b, e4m3_significand), 6, acc, 13, 13);
        prop_assert_eq!(dot_e4m3_k32(&a, &b, acc).to_bits(), expected.to_bits());
    }

    #[test]
    fn bf16_steps_follow_the_stated_model(a in bf16_numbers(), b in bf16_numbers(), acc in accumulator()) {
        let expected = model(&products(&a, &b, bf16_significand), 14, acc, 25, 23);
        prop_assert_eq!(dot_bf16_k16(&a, &b, acc).to_bits(), expected.to_bits());
    }
}

const NAN: u32 = 0x7FFF_FFFF;

#[test]
fn e4m3_steps_propagate_nan_and_infinite_accumulators() {
    let one = [0x38; 32];
    for (position, nan) in [(0, 0x7F), (31, 0xFF)] {
        let mut a = [0; 32];
        a[position] = nan;
        assert_eq!(dot_e4m3_k32(&a, &one, 1.0).to_bits(), NAN);
        assert_eq!(dot_e4m3_k32(&one, &a, f32::INFINITY).to_bits(), NAN);
    }
    assert_eq!(dot_e4m3_k32(&one, &one, f32::from_bits(0xFFC0_0001)).to_bits(), NAN);
    assert_eq!(dot_e4m3_k32(&one, &one, f32::INFINITY), f32::INFINITY);
    assert_eq!(dot_e4m3_k32(&one, &one, f32::NEG_INFINITY), f32::NEG_INFINITY);
}

#[test]
fn e4m3_steps_return_plus_zero_and_keep_13_fraction_bits() {
    let (zero, one, minus_one) = ([0x80; 32], [0x38; 32], [0xB8; 32]);
    assert_eq!(dot_e4m3_k32(&zero, &one, -0.0).to_bits(), 0);
    assert_eq!(dot_e4m3_k32(&zero, &one, f32::from_bits(0x8000_03FF)).to_bits(), 0);
    assert_eq!(dot_e4m3_k32(&one, &minus_one, 32.0).to_bits(), 0);
    assert_eq!(dot_e4m3_k32(&zero, &one, f32::from_bits(0xBFFF_FFFF)).to_bits(), 0xBFFF_FC00);
    assert_eq!(dot_e4m3_k32(&one, &one, 0.0), 32.0);
}

#[test]
fn bf16_steps_treat_special_terms_as_ieee_754_does() {
    let step = |a: &[u16], b: &[u16], acc: f32| {
        let pad = |x: &[u16]| std::array::from_fn(|k| x.get(k).copied().unwrap_or(0));
        dot_bf16_k16(&pad(a), &pad(b), acc).to_bits()
    };
    let (one, infinity, minus_infinity, nan) = (0x3F80, 0x7F80, 0xFF80, 0x7FC1);
    let (plus, minus) = (f32::INFINITY.to_bits(), f32::NEG_INFINITY.to_bits());
    assert_eq!(step(&[infinity], &[one], 1.0), plus);
    assert_eq!(step(&[infinity], &[minus_infinity], 1.0), minus);
    assert_eq!(step(&[infinity], &[0], 1.0), NAN);
    assert_eq!(step(&[infinity, infinity], &[one, 0xBF80], 1.0), NAN);
    assert_eq!(step(&[infinity], &[one], f32::NEG_INFINITY), NAN);
    assert_eq!(step(&[one], &[one], f32::NEG_INFINITY), minus);
    assert_eq!(step(&[nan], &[one], 0.0), NAN);
    assert_eq!(step(&[one], &[one], f32::NAN), NAN);
    // Finite operands: 2^127 + 2^127 is infinite, and the largest finite sum is not rounded up.
    assert_eq!(step(&[0x7F00, 0x7F00], &[one, one], 0.0), plus);
    assert_eq!(step(&[one], &[one], f32::MAX), f32::MAX.to_bits());
}

#[test]
#[should_panic(expected = "rows x columns")]
fn a_tile_refuses_accumulators_of_another_shape() {
    mma_e4m3_k32(&[[0; 32]; 2], &[[0; 32]; 3], &mut [0.0; 5]);
}

//! BF16, FP16, E4M3, E2M1 and UE8M0, over all their patterns.

use float8::F8E4M3;
use proptest::prelude::*;
use ptx_sim::numeric::{F32_NAN, HALF_NAN, bf16, f16, float, fp4, fp8};

use crate::exact::{BF16, product};

/// FP32 patterns that decide roundings to any format with at least 8 fraction bits dropped: every upper half with
/// lower halves at, just below and just above the ends, the middle, and a bit below that.
fn deciding_f32() -> impl Iterator<Item = u32> {
    let lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
    (0..=0xFFFFu32).flat_map(move |upper| lower.into_iter().map(move |lower| upper << 16 | lower))
}

#[test]
fn bf16_conversions_equal_half_but_for_nan() {
    for x in 0..=u16::MAX {
        // The payload of a NaN survives widening, as in the hardware; `half` quiets it.
        assert_eq!(bf16::to_f32(x), u32::from(x) << 16);
        assert_eq!(bf16::is_nan(x), half::bf16::from_bits(x).is_nan());
        let back = bf16::from_f32(bf16::to_f32(x));
        assert_eq!(back, if bf16::is_nan(x) { HALF_NAN } else { x });
    }
    for x in deciding_f32() {
        let value = f32::from_bits(x);
        let expected = if value.is_nan() { HALF_NAN } else { half::bf16::from_f32(value).to_bits() };
        assert_eq!(bf16::from_f32(x), expected, "{x:#010x}");
        let relu = if expected & 0x8000 != 0 { 0 } else { expected };
        assert_eq!(bf16::from_f32_relu(x), relu, "{x:#010x}");
    }
    assert_eq!(bf16::from_f32_relu(0xFFC0_0000), HALF_NAN);
}

#[test]
fn f16_conversions_equal_half_but_for_nan() {
    for x in 0..=u16::MAX {
        let value = half::f16::from_bits(x);
        assert_eq!(f16::is_nan(x), value.is_nan());
        let expected = if value.is_nan() { F32_NAN } else { value.to_f32().to_bits() };
        assert_eq!(f16::to_f32(x), expected, "{x:#06x}");
    }
    for x in deciding_f32() {
        let value = f32::from_bits(x);
        let expected = if value.is_nan() { HALF_NAN } else { half::f16::from_f32(value).to_bits() };
        assert_eq!(f16::from_f32(x), expected, "{x:#010x}");
    }
}

#[test]
fn e4m3_codes_stand_for_the_numbers_of_float8() {
    for code in 0..=u8::MAX {
        let value = F8E4M3::from_bits(code).to_f32();
        let expected = if value.is_nan() { F32_NAN } else { value.to_bits() };
        assert_eq!(fp8::e4m3_to_f32(code), expected, "{code:#04x}");
        assert_eq!(fp8::e4m3_from_f32(fp8::e4m3_to_f32(code)), if code & 0x7F == 0x7F { 0x7F } else { code });
    }
}

/// The code among `codes` nearest to `x`, the even one of two equally near; codes ascend with their magnitudes.
fn nearest_code(x: f64, magnitudes: &[f64]) -> u8 {
    let distance = |code: usize| (magnitudes[code] - x.abs()).abs();
    let mut best = 0;
    for code in 1..magnitudes.len() {
        if distance(code) < distance(best) || distance(code) == distance(best) && code % 2 == 0 {
            best = code;
        }
    }
    best as u8
}

#[test]
fn e4m3_conversion_picks_the_nearest_code_and_saturates() {
    let magnitudes: Vec<f64> = (0..=0x7E).map(|code| f64::from(F8E4M3::from_bits(code).to_f32())).collect();
    for x in (0..=0xFFFFu32).flat_map(|upper| [0, 1, 0xFFFF].map(|lower| upper << 16 | lower)) {
        let value = f64::from(f32::from_bits(x));
        let expected = if value.is_nan() {
            0x7F
        } else {
            // Beyond the table every distance grows alike, so the largest code wins; infinity needs the clamp.
            (x >> 24) as u8 & 0x80 | nearest_code(value.clamp(-1e6, 1e6), &magnitudes)
        };
        assert_eq!(fp8::e4m3_from_f32(x), expected, "{x:#010x}");
    }
    assert_eq!(fp8::e4m3_from_f32(f32::INFINITY.to_bits()), 0x7E);
    assert_eq!(fp8::e4m3_from_f32(f32::NEG_INFINITY.to_bits()), 0xFE);
    assert_eq!(fp8::e4m3_from_f32(0xFFFF_FFFF), 0x7F);
}

#[test]
fn packed_conversions_put_the_first_source_high() {
    let (one, two) = (1.0f32.to_bits(), (-2.0f32).to_bits());
    assert_eq!(bf16::from_f32_x2(one, two), 0x3F80_C000);
    assert_eq!(bf16::from_f32_relu_x2(one, two), 0x3F80_0000);
    assert_eq!(f16::from_f32_x2(one, two), 0x3C00_C000);
    assert_eq!(fp8::e4m3x2_from_f32(one, two), 0x38C0);
    assert_eq!(fp8::e4m3x2_from_f16x2(0x3C00_C000), 0x38C0);
    assert_eq!(fp8::e4m3x2_to_f16x2(0x38C0), 0x3C00_C000);
    assert_eq!(fp8::e4m3x2_to_f16x2(0xFF7F), 0x7FFF_7FFF);
    assert_eq!(fp4::e2m1x2_from_f32(one, two), 0x2C);
    assert_eq!(fp4::e2m1x2_from_f16x2(0x3C00_C000), 0x2C);
    assert_eq!(fp4::e2m1x2_to_f16x2(0x2C), 0x3C00_C000);
    assert_eq!(fp4::ue8m0x2_to_bf16x2(0x7F80), 0x3F80_4000);
}

#[test]
fn e4m3_from_f16_rounds_every_half_as_its_number() {
    for x in 0..=u16::MAX {
        let number = half::f16::from_bits(x).to_f32();
        let expected = fp8::e4m3_from_f32(number.to_bits());
        assert_eq!(fp8::e4m3x2_from_f16x2(u32::from(x)), u16::from(expected));
        assert_eq!(fp8::e4m3x2_from_f16x2(u32::from(x) << 16), u16::from(expected) << 8);
    }
}

#[test]
fn e2m1_conversion_picks_the_nearest_code_and_saturates() {
    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for code in 0..16u8 {
        let number = magnitudes[usize::from(code & 7)] as f32;
        let number = if code & 8 == 0 { number } else { -number };
        assert_eq!(fp4::e2m1_to_f32(code), number.to_bits());
        assert_eq!(fp4::e2m1_from_f32(number.to_bits()), code);
    }
    for x in (0..=0xFFFFu32).flat_map(|upper| [0, 1, 0xFFFF].map(|lower| upper << 16 | lower)) {
        let value = f64::from(f32::from_bits(x));
        let sign = (x >> 28) as u8 & 8;
        let expected = if value.is_nan() { 7 } else { sign | nearest_code(value.clamp(-1e6, 1e6), &magnitudes) };
        assert_eq!(fp4::e2m1_from_f32(x), expected, "{x:#010x}");
    }
}

#[test]
fn ue8m0_scales_are_powers_of_two() {
    for e in 0..=254u8 {
        let expected = 2f64.powi(i32::from(e) - 127);
        assert_eq!(f64::from(f32::from_bits(fp4::ue8m0_to_f32(e))), expected);
        assert_eq!(f64::from(f32::from_bits(bf16::to_f32(fp4::ue8m0_to_bf16(e)))), expected);
    }
    assert_eq!(fp4::ue8m0_to_f32(255), F32_NAN);
    assert_eq!(fp4::ue8m0_to_bf16(255), HALF_NAN);
}

/// BF16 operands that meet every class: zeros, subnormals, powers of two and their neighbours, extremes, infinities, NaN.
const CLASSES: [u16; 24] = [
    0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x0081, 0x80FF, 0x3F7F, 0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x4049,
    0x1234, 0xA5A5, 0x7F7E, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF,
];

/// The rounded-once result by IEEE 754: exact arithmetic for finite results, the host's for special values and zeros.
fn bf16_fma_oracle(a: u16, b: u16, c: u16) -> u16 {
    let number = |x: u16| f64::from(f32::from_bits(u32::from(x) << 16));
    let host = number(a) * number(b) + number(c);
    let wide = [a, b, c].map(u32::from);
    if host.is_nan() {
        HALF_NAN
    } else if wide.iter().all(|&x| BF16.is_finite(x)) {
        let rounded = BF16.sum(product(BF16.term(wide[0]), BF16.term(wide[1])), BF16.term(wide[2])) as u16;
        // FP64 has a zero exactly where the sum is zero, with the sign that the rule gives.
        if host == 0.0 { if host.is_sign_negative() { 0x8000 } else { 0 } } else { sign_of(host) | rounded & 0x7FFF }
    } else {
        sign_of(host) | 0x7F80
    }
}

fn sign_of(x: f64) -> u16 {
    if x.is_sign_negative() { 0x8000 } else { 0 }
}

#[test]
fn bf16_arithmetic_rounds_once_for_every_pattern_against_every_class() {
    let (one, minus_zero) = (0x3F80, 0x8000);
    for a in 0..=u16::MAX {
        for b in CLASSES {
            // a * 1 + b and a * b + (-0) are the sum and the product, signs of zeros included.
            assert_eq!(bf16::add(a, b), bf16_fma_oracle(a, one, b), "{a:#06x} + {b:#06x}");
            assert_eq!(bf16::sub(a, b), bf16_fma_oracle(a, one, b ^ 0x8000), "{a:#06x} - {b:#06x}");
            let product_zero = if (a ^ b) & 0x8000 == 0 { 0 } else { minus_zero };
            assert_eq!(bf16::mul(a, b), bf16_fma_oracle(a, b, product_zero), "{a:#06x} * {b:#06x}");
        }
    }
}

#[test]
fn bf16_selection_is_that_of_f32_for_every_pattern_against_every_class() {
    for a in 0..=u16::MAX {
        for b in CLASSES {
            let narrow = |x: u32| if float::is_nan(x) { HALF_NAN } else { (x >> 16) as u16 };
            let (x, y) = (u32::from(a) << 16, u32::from(b) << 16);
            assert_eq!(bf16::max(a, b), narrow(float::max(x, y)));
            assert_eq!(bf16::min(a, b), narrow(float::min(x, y)));
            assert_eq!(bf16::max_nan(a, b), narrow(float::max_nan(x, y)));
            assert_eq!(bf16::min_nan(a, b), narrow(float::min_nan(x, y)));
        }
        let nan = half::bf16::from_bits(a).is_nan();
        assert_eq!(bf16::neg(a), if nan { HALF_NAN } else { a ^ 0x8000 });
        assert_eq!(bf16::abs(a), if nan { HALF_NAN } else { a & 0x7FFF });
    }
    assert_eq!(bf16::max(0x7FC0, 0x8000), 0x8000);
    assert_eq!(bf16::max_nan(0x7F81, 0x3F80), HALF_NAN);
    assert_eq!(bf16::max(0x8000, 0), 0);
    assert_eq!(bf16::min(0, 0x8000), 0x8000);
}

/// Operands whose products and addends meet: random, with close exponents half the time.
fn bf16_bits() -> impl Strategy<Value = u16> {
    prop_oneof![
        any::<u16>(),
        (any::<u16>(), 118u16..138).prop_map(|(bits, field)| bits & 0x807F | field << 7),
        (any::<u16>(), 0u16..12).prop_map(|(bits, field)| bits & 0x807F | field << 7),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300_000))]

    #[test]
    fn bf16_fma_rounds_the_exact_value_once(a in bf16_bits(), b in bf16_bits(), c in bf16_bits()) {
        let expected = bf16_fma_oracle(a, b, c);
        prop_assert_eq!(bf16::fma(a, b, c), expected);
        prop_assert_eq!(bf16::fma_relu(a, b, c), if expected & 0x8000 != 0 { 0 } else { expected });
    }

    #[test]
    fn packed_bf16_arithmetic_works_on_each_half(a: u32, b: u32, c: u32) {
        let halves = |x: u32| (x as u16, (x >> 16) as u16);
        let ((a0, a1), (b0, b1), (c0, c1)) = (halves(a), halves(b), halves(c));
        let pair = |low: u16, high: u16| u32::from(high) << 16 | u32::from(low);
        prop_assert_eq!(bf16::add_x2(a, b), pair(bf16::add(a0, b0), bf16::add(a1, b1)));
        prop_assert_eq!(bf16::sub_x2(a, b), pair(bf16::sub(a0, b0), bf16::sub(a1, b1)));
        prop_assert_eq!(bf16::mul_x2(a, b), pair(bf16::mul(a0, b0), bf16::mul(a1, b1)));
        prop_assert_eq!(bf16::fma_x2(a, b, c), pair(bf16::fma(a0, b0, c0), bf16::fma(a1, b1, c1)));
        prop_assert_eq!(bf16::fma_relu_x2(a, b, c), pair(bf16::fma_relu(a0, b0, c0), bf16::fma_relu(a1, b1, c1)));
        prop_assert_eq!(bf16::max_x2(a, b), pair(bf16::max(a0, b0), bf16::max(a1, b1)));
        prop_assert_eq!(bf16::min_x2(a, b), pair(bf16::min(a0, b0), bf16::min(a1, b1)));
        prop_assert_eq!(bf16::max_nan_x2(a, b), pair(bf16::max_nan(a0, b0), bf16::max_nan(a1, b1)));
        prop_assert_eq!(bf16::min_nan_x2(a, b), pair(bf16::min_nan(a0, b0), bf16::min_nan(a1, b1)));
        prop_assert_eq!(bf16::neg_x2(a), pair(bf16::neg(a0), bf16::neg(a1)));
        prop_assert_eq!(bf16::abs_x2(a), pair(bf16::abs(a0), bf16::abs(a1)));
    }
}

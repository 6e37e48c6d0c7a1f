//! FP32 arithmetic.

use proptest::prelude::*;
use ptx_sim::numeric::F32_NAN;
use ptx_sim::numeric::float::{self, ToInt};

use crate::exact::{F32, product};

/// FP32 bits with every class of number likely, and pairs of close exponents likely too.
fn f32_bits() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => any::<u32>(),
        4 => (any::<u32>(), 120u32..136).prop_map(|(bits, field)| bits & 0x807F_FFFF | field << 23),
        1 => any::<u32>().prop_map(|bits| bits & 0x807F_FFFF),
        1 => prop::sample::select(SPECIAL.to_vec()),
    ]
}

const SPECIAL: [u32; 16] = [
    0,
    0x8000_0000,
    1,
    0x8000_0001,
    0x007F_FFFF,
    0x0080_0000,
    0x3F80_0000,
    0xBF80_0000,
    0x7F7F_FFFF,
    0xFF7F_FFFF,
    0x7F80_0000,
    0xFF80_0000,
    0x7FC0_0000,
    0x7F80_0001,
    0xFFFF_FFFF,
    0x7FFF_FFFF,
];

/// Bits of what the host computes, NaN made canonical.
fn host(x: f32) -> u32 {
    if x.is_nan() { F32_NAN } else { x.to_bits() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200_000))]

    #[test]
    fn fma_rounds_the_exact_value_once(a in f32_bits(), b in f32_bits(), c in f32_bits()) {
        let computed = float::fma(a, b, c);
        prop_assert_eq!(computed, host(f32::from_bits(a).mul_add(f32::from_bits(b), f32::from_bits(c))));
        if F32.is_finite(a) && F32.is_finite(b) && F32.is_finite(c) {
            let exact = F32.sum(product(F32.term(a), F32.term(b)), F32.term(c));
            if exact & !F32.sign() != 0 {
                prop_assert_eq!(computed, exact);
            }
        }
    }

    #[test]
    fn selection_follows_the_numbers(a in f32_bits(), b in f32_bits()) {
        let (x, y) = (f32::from_bits(a), f32::from_bits(b));
        if x.is_nan() || y.is_nan() {
            let other = if x.is_nan() { b } else { a };
            let expected = if f32::from_bits(other).is_nan() { F32_NAN } else { other };
            prop_assert_eq!(float::max(a, b), expected);
            prop_assert_eq!(float::min(a, b), expected);
            prop_assert_eq!(float::max_nan(a, b), F32_NAN);
            prop_assert_eq!(float::min_nan(a, b), F32_NAN);
        } else if x != y {
            prop_assert_eq!(float::max(a, b), if x > y { a } else { b });
            prop_assert_eq!(float::min(a, b), if x > y { b } else { a });
            prop_assert_eq!(float::max_nan(a, b), float::max(a, b));
            prop_assert_eq!(float::min_nan(a, b), float::min(a, b));
        }
    }
}

#[test]
fn zeros_are_ordered_by_sign() {
    let (plus, minus) = (0, 0x8000_0000);
    for (a, b) in [(plus, minus), (minus, plus)] {
        assert_eq!(float::max(a, b), plus);
        assert_eq!(float::min(a, b), minus);
    }
    assert_eq!(float::max(minus, minus), minus);
    assert_eq!(float::min(plus, plus), plus);
}

#[test]
fn special_operands_give_the_canonical_nan_or_the_host_result() {
    for a in SPECIAL {
        let x = f32::from_bits(a);
        assert_eq!(float::sqrt(a), host(x.sqrt()));
        assert_eq!(float::neg(a), host(-x));
        assert_eq!(float::abs(a), host(x.abs()));
        for b in SPECIAL {
            let y = f32::from_bits(b);
            assert_eq!(float::add(a, b), host(x + y), "{a:#x} + {b:#x}");
            assert_eq!(float::sub(a, b), host(x - y), "{a:#x} - {b:#x}");
            assert_eq!(float::mul(a, b), host(x * y), "{a:#x} * {b:#x}");
            assert_eq!(float::div(a, b), host(x / y), "{a:#x} / {b:#x}");
        }
    }
    assert_eq!(float::add(0x7F80_0000, 0xFF80_0000), 0x7FFF_FFFF);
    assert_eq!(float::mul(0x7F80_0000, 0x8000_0000), 0x7FFF_FFFF);
    assert_eq!(float::neg(0x7FC0_1234), 0x7FFF_FFFF);
}

#[test]
fn flushing_keeps_signs_and_touches_subnormals_alone() {
    assert_eq!(float::ftz(0x007F_FFFF), 0);
    assert_eq!(float::ftz(0x8000_0001), 0x8000_0000);
    assert_eq!(float::ftz(0x0080_0000), 0x0080_0000);
    let (smallest_normal, half, largest_subnormal) = (0x0080_0000, 0x3F00_0000, 0x007F_FFFF);
    assert_eq!(float::mul(smallest_normal, half), 0x0040_0000);
    assert_eq!(float::mul_ftz(smallest_normal, half), 0);
    assert_eq!(float::add(largest_subnormal, 1), smallest_normal);
    assert_eq!(float::add_ftz(largest_subnormal, 1), 0);
    assert_eq!(float::sub_ftz(0x8080_0000, 0x8080_0001), 0);
    assert_eq!(float::sub_ftz(0x8080_0001, 0x8080_0000), 0x8000_0000);
    assert_eq!(float::fma_ftz(smallest_normal, half, 0x8000_0000), 0);
    assert_eq!(float::fma_ftz(largest_subnormal, 0x4000_0000, 0x3F80_0000), 0x3F80_0000);
}

#[test]
fn integer_conversions_round_saturate_and_zero_nan() {
    let bits = f32::to_bits;
    for (x, nearest, zero, down, up) in
        [(2.5, 2, 2, 2, 3), (3.5, 4, 3, 3, 4), (-2.5, -2, -2, -3, -2), (-0.75, -1, 0, -1, 0), (7.0, 7, 7, 7, 7)]
    {
        assert_eq!(float::to_s32(bits(x), ToInt::Nearest), nearest);
        assert_eq!(float::to_s32(bits(x), ToInt::Zero), zero);
        assert_eq!(float::to_s32(bits(x), ToInt::Down), down);
        assert_eq!(float::to_s32(bits(x), ToInt::Up), up);
        assert_eq!(float::to_s64(bits(x), ToInt::Down), i64::from(down));
    }
    assert_eq!(float::round(bits(-0.25), ToInt::Nearest), 0x8000_0000);
    assert_eq!(float::to_s32(bits(3e9), ToInt::Zero), i32::MAX);
    assert_eq!(float::to_s32(bits(f32::NEG_INFINITY), ToInt::Zero), i32::MIN);
    assert_eq!(float::to_u32(bits(-1.0), ToInt::Zero), 0);
    assert_eq!(float::to_u32(bits(f32::INFINITY), ToInt::Zero), u32::MAX);
    assert_eq!(float::to_u64(bits(1e30), ToInt::Zero), u64::MAX);
    assert_eq!(float::to_s32(F32_NAN, ToInt::Zero), 0);
    assert_eq!(float::to_u32(F32_NAN, ToInt::Zero), 0);
    assert_eq!(float::to_s64(F32_NAN, ToInt::Zero), i64::MIN);
    assert_eq!(float::to_u64(F32_NAN, ToInt::Zero), 1 << 63);
    assert_eq!(float::from_u32(0x0100_0001), bits(16_777_216.0));
    assert_eq!(float::from_u32(0x0100_0003), bits(16_777_220.0));
    assert_eq!(float::from_s32(i32::MIN), bits(-2_147_483_648.0));
    assert_eq!(float::from_u64(u64::MAX), bits(18_446_744_073_709_551_616.0));
    assert_eq!(float::from_s64(-3), bits(-3.0));
}

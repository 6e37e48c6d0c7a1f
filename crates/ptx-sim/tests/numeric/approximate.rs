//! Division and the approximate functions.

use ptx_sim::numeric::{F32_NAN, approx, float};

const ONE: u32 = 0x3F80_0000;
const FOUR: u32 = 0x4080_0000;
const INFINITY: u32 = 0x7F80_0000;
const MINUS: u32 = 0x8000_0000;

/// Whether the midpoint of the FP32 `r` in (0.25, 1) and its successor exceeds 1 / sqrt(x), exactly, for `x` in [1, 4).
fn midpoint_is_above_rsqrt(r: u32, x: u32) -> bool {
    let in_units_of = |unit: i32, bits: u32| {
        let last_bit = (bits >> 23) as i32 - 127 - 23;
        u128::from(bits & 0x7F_FFFF | 0x80_0000) << (last_bit - unit)
    };
    // Half the sum of multiples of 2^-25 is a multiple of 2^-26.
    let midpoint = in_units_of(-25, r) + in_units_of(-25, r + 1);
    midpoint * midpoint * in_units_of(-23, x) > 1 << (26 + 26 + 23)
}

#[test]
fn rsqrt_adds_the_recorded_difference_to_the_correctly_rounded_result() {
    let mut counts = [[0u32; 4]; 2];
    for x in ONE..FOUR {
        let rounded = approx::rsqrt_correctly_rounded(f32::from_bits(x)).to_bits();
        if x == ONE {
            assert_eq!(rounded, ONE);
        } else {
            assert!(midpoint_is_above_rsqrt(rounded, x), "{x:#010x} rounds up");
            assert!(!midpoint_is_above_rsqrt(rounded - 1, x), "{x:#010x} rounds down");
        }
        let difference = approx::rsqrt(x).wrapping_sub(rounded) as i32;
        assert!((-1..=2).contains(&difference));
        counts[((x - ONE) >> 23) as usize][(difference + 1) as usize] += 1;
    }
    // -1 (8 of them really -2), 0, +1, +2: 77.5 % and 79.1 % correctly rounded.
    assert_eq!(counts, [[1_265_305, 6_505_163, 618_140, 0], [1_079_094, 6_637_923, 671_591, 0]]);
}

#[test]
fn rsqrt_is_invariant_under_powers_of_four() {
    for x in (ONE..FOUR).step_by(4099) {
        let result = approx::rsqrt(x);
        for half in -63..=62i32 {
            let scaled = x.wrapping_add_signed((2 * half) << 23);
            assert_eq!(approx::rsqrt(scaled), result.wrapping_add_signed(-half << 23), "{scaled:#010x}");
        }
    }
}

#[test]
fn rsqrt_of_subnormals_scales_them_or_flushes_them() {
    for x in (1..0x0080_0000).step_by(997) {
        let scaled = (f32::from_bits(x) * 16_777_216.0).to_bits();
        assert_eq!(f32::from_bits(approx::rsqrt(x)), f32::from_bits(approx::rsqrt(scaled)) * 4096.0);
        assert_eq!(approx::rsqrt_ftz(x), INFINITY);
        assert_eq!(approx::rsqrt_ftz(MINUS | x), MINUS | INFINITY);
        assert_eq!(approx::rsqrt(MINUS | x), F32_NAN);
    }
    assert_eq!(approx::rsqrt_ftz(0x4049_0FDB), approx::rsqrt(0x4049_0FDB));
}

#[test]
fn rsqrt_of_special_values() {
    for rsqrt in [approx::rsqrt, approx::rsqrt_ftz] {
        assert_eq!(rsqrt(0), INFINITY);
        assert_eq!(rsqrt(MINUS), MINUS | INFINITY);
        assert_eq!(rsqrt(INFINITY), 0);
        assert_eq!(rsqrt(MINUS | INFINITY), F32_NAN);
        assert_eq!(rsqrt(MINUS | ONE), F32_NAN);
        assert_eq!(rsqrt(0x7F80_0001), F32_NAN);
        assert_eq!(rsqrt(0xFFFF_FFFF), F32_NAN);
        assert_eq!(rsqrt(ONE), ONE);
        assert_eq!(rsqrt(FOUR), 0x3F00_0000);
    }
}

/// Distance of `computed` from `exact` in ulps of the FP32 binade that holds `exact`.
fn error_ulps(computed: u32, exact: f64) -> f64 {
    let exponent = exact.abs().log2().floor().max(-126.0) as i32;
    (f64::from(f32::from_bits(computed)) - exact).abs() / 2f64.powi(exponent - 23)
}

/// Largest error of `div_full(x, divisor)` over the significands of a binade, and the share of results above the
/// correctly rounded one.
fn div_full_profile(divisor: f32) -> (f64, f64) {
    let (mut worst, mut above) = (0f64, 0u32);
    for x in ONE..ONE + (1 << 23) {
        let computed = approx::div_full(x, divisor.to_bits());
        assert_eq!(computed, (f32::from_bits(x) * (1.0 / divisor)).to_bits());
        worst = worst.max(error_ulps(computed, f64::from(f32::from_bits(x)) / f64::from(divisor)));
        above += computed.wrapping_sub(float::div(x, divisor.to_bits()));
    }
    (worst, f64::from(above) / f64::from(1 << 23))
}

#[test]
fn div_full_by_1536_has_the_measured_profile() {
    let (worst, above) = div_full_profile(1536.0);
    assert!((0.66..0.67).contains(&worst), "{worst}");
    assert!((0.32..0.34).contains(&above), "{above}");
    let by_three = approx::div_full(0x4049_0FDB, 3f32.to_bits());
    assert_eq!(approx::div_full(0x4049_0FDB, 1536f32.to_bits()), by_three - (9 << 23));
}

#[test]
fn div_full_by_448_has_the_measured_error() {
    let (worst, _) = div_full_profile(448.0);
    assert!((1.13..1.15).contains(&worst), "{worst}");
}

#[test]
fn div_full_by_powers_of_two_is_exact_up_to_2_126() {
    for field in 1..=253u32 {
        for x in [0x3FC0_0000, 0x4049_0FDB, MINUS | 0x3F9D_F3B6] {
            assert_eq!(approx::div_full(x, field << 23), float::div(x, field << 23), "2^{}", field as i32 - 127);
        }
    }
}

#[test]
fn div_full_covers_the_full_range_of_divisors() {
    for divisor in (1..INFINITY).step_by(86_413) {
        for x in [0x3F80_0001, 0x3FFF_FFFF] {
            let exact = f64::from(f32::from_bits(x)) / f64::from(f32::from_bits(divisor));
            if (2f64.powi(-126)..2f64.powi(127)).contains(&exact) {
                assert!(error_ulps(approx::div_full(x, divisor), exact) <= 2.0, "{x:#x} / {divisor:#x}");
            }
        }
    }
    for div_full in [approx::div_full, approx::div_full_ftz] {
        assert_eq!(div_full(ONE, 0), INFINITY);
        assert_eq!(div_full(ONE, MINUS), MINUS | INFINITY);
        assert_eq!(div_full(0, 0), F32_NAN);
        assert_eq!(div_full(ONE, INFINITY), 0);
        assert_eq!(div_full(INFINITY, INFINITY), F32_NAN);
        assert_eq!(div_full(F32_NAN, ONE), F32_NAN);
        assert_eq!(div_full(ONE, 0xFFC0_0000), F32_NAN);
    }
    assert_eq!(approx::div_full_ftz(ONE, 0x007F_FFFF), INFINITY);
    assert_eq!(approx::div_full_ftz(0x0080_0000, 0x4000_0000), 0);
}

#[test]
fn rcp_stays_within_one_ulp() {
    for x in (0x0080_0000..INFINITY).step_by(9973) {
        let exact = 1.0 / f64::from(f32::from_bits(x));
        assert!(error_ulps(approx::rcp(x), exact) <= 0.98, "{x:#010x}");
        let flushed = approx::rcp_ftz(x);
        if exact >= 2f64.powi(-126) {
            assert!(error_ulps(flushed, exact) <= 0.98, "{x:#010x}");
        } else {
            assert_eq!(flushed, 0);
        }
    }
    for rcp in [approx::rcp, approx::rcp_ftz] {
        assert_eq!(rcp(0), INFINITY);
        assert_eq!(rcp(MINUS), MINUS | INFINITY);
        assert_eq!(rcp(MINUS | INFINITY), MINUS);
        assert_eq!(rcp(0xFF80_0001), F32_NAN);
    }
    assert_eq!(approx::rcp_ftz(MINUS | 1), MINUS | INFINITY);
    assert_eq!(approx::rcp(0x0040_0000), 0x7F00_0000);
}

#[test]
fn ex2_stays_within_its_error() {
    let exact = |x: u32| f64::from(f32::from_bits(x)).exp2();
    for x in (0..0x4300_0000).step_by(7919) {
        for x in [x, MINUS | x] {
            if f32::from_bits(x) >= -126.0 {
                assert!(error_ulps(approx::ex2(x), exact(x)) <= 0.5001, "{x:#010x}");
                assert_eq!(approx::ex2_ftz(x), approx::ex2(x));
            }
        }
    }
    for x in (MINUS | 0x42FC_0000..MINUS | 0x4320_0000).step_by(1009) {
        assert!(error_ulps(approx::ex2(x), exact(x)) <= 2.06, "{x:#010x}");
    }
    for ex2 in [approx::ex2, approx::ex2_ftz] {
        assert_eq!(ex2(0), ONE);
        assert_eq!(ex2(MINUS | 1), ONE);
        assert_eq!(ex2(10f32.to_bits()), 1024f32.to_bits());
        assert_eq!(ex2((-126f32).to_bits()), 0x0080_0000);
        assert_eq!(ex2(128f32.to_bits()), INFINITY);
        assert_eq!(ex2(INFINITY), INFINITY);
        assert_eq!(ex2(MINUS | INFINITY), 0);
        assert_eq!(ex2(0xFFC0_0000), F32_NAN);
    }
    assert_eq!(approx::ex2((-149f32).to_bits()), 1);
    assert_eq!(approx::ex2_ftz((-127f32).to_bits()), 0);
}

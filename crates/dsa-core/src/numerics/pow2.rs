//! Powers of two in FP32.

/// `2^exponent`, exact from `2^-149` to `2^127`; 0 below and +inf above.
pub const fn exp2(exponent: i32) -> f32 {
    f32::from_bits(if exponent > 127 {
        0x7F80_0000
    } else if exponent >= -126 {
        ((exponent + 127) as u32) << 23
    } else if exponent >= -149 {
        1 << (exponent + 149)
    } else {
        0
    })
}

/// The smallest power of two that is at least `x`, for a positive normal `x` up to `2^127`. Above that, +inf.
///
/// Exact where `exp2(ceil(log2(x)))` depends on the error of `log2`.
pub const fn pow2_ceil(x: f32) -> f32 {
    debug_assert!(x.is_normal() && x > 0.0);
    f32::from_bits((x.to_bits() + 0x007F_FFFF) & 0x7F80_0000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp2_matches_exact_f64_powers() {
        for exponent in -200..=200 {
            assert_eq!(exp2(exponent).to_bits(), (2f64.powi(exponent) as f32).to_bits(), "2^{exponent}");
        }
    }

    #[test]
    fn pow2_ceil_is_the_least_power_not_below() {
        for exponent in -126..=127 {
            let power = exp2(exponent);
            assert_eq!(pow2_ceil(power), power);
            if exponent > -126 {
                assert_eq!(pow2_ceil(power.next_down()), power, "just below 2^{exponent}");
            }
            assert_eq!(pow2_ceil(power.next_up()), exp2(exponent + 1), "just above 2^{exponent}");
            assert_eq!(pow2_ceil(power * 1.5), exp2(exponent + 1));
        }
    }
}

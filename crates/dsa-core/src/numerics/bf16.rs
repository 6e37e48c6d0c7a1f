//! BF16: the upper half of an FP32. Arithmetic is IEEE with one rounding to nearest even, without flushing subnormals;
//! every NaN result is `0x7FFF`.
//!
//! # Why [`fma`] is rounded once
//! The exact result is `p + c` with `p = a * b`. `p` has at most 16 significant bits and lies between 2^-266 and 2^256,
//! so it is an exact f64. `s = p + c` in f64 may be inexact, and rounding it again could be wrong (`p` half way between
//! two BF16 values, `c` tiny: `s` loses the part that breaks the tie). So the error of `s` is computed exactly (Knuth's
//! two-sum; no overflow or underflow in this range) and folded into the last bit: rounding **to odd**. A value rounded
//! to odd at `m + 2` or more bits rounds to `m` bits as the exact value does, and rounding to odd twice is rounding to odd
//! once; 53 bits (f64) and 24 bits (FP32, with 16 more bits than BF16 in its subnormal range too) are enough for 8.

/// The NaN that every operation produces.
pub const NAN: u16 = 0x7FFF;

/// Rounds FP32 to BF16, to nearest even; every NaN becomes [`NAN`].
pub const fn from_f32(x: f32) -> u16 {
    if x.is_nan() {
        return NAN;
    }
    let bits = x.to_bits();
    let tie_to_even = (bits >> 16) & 1;
    // The largest magnitudes carry into the exponent and become infinity, as they should. No wrap: NaNs are gone.
    ((bits + 0x7FFF + tie_to_even) >> 16) as u16
}

/// Rounds `max(x, 0)` to BF16: negatives and -0 become +0, NaN stays [`NAN`].
pub const fn from_f32_relu(x: f32) -> u16 {
    if x.is_nan() {
        NAN
    } else if x.is_sign_negative() {
        0
    } else {
        from_f32(x)
    }
}

/// The value of a BF16 pattern, exactly.
pub const fn to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// `a + b`, rounded once.
pub fn add(a: u16, b: u16) -> u16 {
    from_f64(sum_to_odd(widen(a), widen(b)))
}

/// `a * b`, rounded once.
pub fn mul(a: u16, b: u16) -> u16 {
    from_f64(widen(a) * widen(b))
}

/// `a * b + c`, rounded once (see the module's proof).
pub fn fma(a: u16, b: u16, c: u16) -> u16 {
    from_f64(sum_to_odd(widen(a) * widen(b), widen(c)))
}

fn widen(bits: u16) -> f64 {
    f64::from(to_f32(bits))
}

/// `x + y` rounded to odd in f64: exact sums as they are, others truncated with the last bit set.
fn sum_to_odd(x: f64, y: f64) -> f64 {
    let sum = x + y;
    if !sum.is_finite() {
        return sum;
    }
    let y_part = sum - x;
    let error = (x - (sum - y_part)) + (y - y_part);
    if error == 0.0 || sum.to_bits() & 1 == 1 {
        return sum; // exact, or already the odd neighbour of the exact value
    }
    if (error > 0.0) == (sum > 0.0) { f64::from_bits(sum.to_bits() + 1) } else { f64::from_bits(sum.to_bits() - 1) }
}

/// Rounds an f64 to BF16 once, through an FP32 rounded to odd.
fn from_f64(x: f64) -> u16 {
    let nearest = x as f32;
    if x.is_nan() || f64::from(nearest) == x {
        return from_f32(nearest);
    }
    let magnitude_too_large = f64::from(nearest).abs() > x.abs();
    let truncated = nearest.to_bits() - u32::from(magnitude_too_large);
    from_f32(f32::from_bits(truncated | 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16 as reference;
    use proptest::prelude::*;

    /// An exact fixed-point number: an integer of 640 bits counting units of 2^-300, two's complement, lowest word first.
    /// Slow and obvious; shares nothing with the code under test.
    #[derive(Clone, PartialEq)]
    struct Exact([u64; 10]);

    impl Exact {
        const UNIT_EXPONENT: i32 = -300;

        fn from_scaled(negative: bool, magnitude: u64, exponent: i32) -> Self {
            let shift = (exponent - Self::UNIT_EXPONENT) as usize;
            let mut words = [0; 10];
            let wide = u128::from(magnitude) << (shift % 64);
            words[shift / 64] = wide as u64;
            words[shift / 64 + 1] = (wide >> 64) as u64;
            let value = Self(words);
            if negative { value.negated() } else { value }
        }

        fn negated(&self) -> Self {
            let mut carry = true;
            Self(self.0.map(|word| {
                let (word, overflow) = (!word).overflowing_add(u64::from(carry));
                carry = overflow;
                word
            }))
        }

        fn plus(&self, other: &Self) -> Self {
            let mut carry = 0u128;
            let mut words = self.0;
            for (word, addend) in words.iter_mut().zip(other.0) {
                let sum = u128::from(*word) + u128::from(addend) + carry;
                *word = sum as u64;
                carry = sum >> 64;
            }
            Self(words)
        }

        fn is_negative(&self) -> bool {
            self.0[9] >> 63 == 1
        }

        /// Compares two non-negative numbers.
        fn less(&self, other: &Self) -> bool {
            self.0.iter().rev().lt(other.0.iter().rev())
        }

        fn of_bf16(bits: u16) -> Self {
            let (negative, magnitude, exponent) = parts(bits);
            Self::from_scaled(negative, magnitude, exponent)
        }

        /// Nearest BF16 by bisection over the 0x7F80 magnitudes and comparison of exact distances; ties to even.
        fn to_bf16(&self) -> u16 {
            let (sign, magnitude) = if self.is_negative() { (0x8000, self.negated()) } else { (0, self.clone()) };
            let (mut low, mut high) = (0u16, 0x7F80u16); // 0x7F80 stands for 2^128, as IEEE overflow rounding has it
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                if magnitude.less(&Self::of_bf16(middle)) { high = middle } else { low = middle }
            }
            let below = magnitude.plus(&Self::of_bf16(low).negated());
            let above = Self::of_bf16(high).plus(&magnitude.negated());
            let up = above.is_negative() || above.less(&below) || (above == below && low & 1 == 1);
            sign | if up { high } else { low }
        }
    }

    /// Sign, significand and exponent of its last bit.
    fn parts(bits: u16) -> (bool, u64, i32) {
        let (field, fraction) = (i32::from(bits >> 7) & 0xFF, u64::from(bits & 0x7F));
        let (significand, exponent) = if field == 0 { (fraction, -133) } else { (fraction | 0x80, field - 134) };
        (bits >> 15 == 1, significand, exponent)
    }

    fn fma_exact(a: u16, b: u16, c: u16) -> u16 {
        let [x, y, z] = [a, b, c].map(|bits| reference::from_bits(bits).to_f64());
        let special = x * y + z;
        if [x, y, z].iter().any(|v| !v.is_finite()) {
            return if special.is_nan() { 0x7FFF } else { reference::from_f64(special).to_bits() };
        }
        let ((na, ma, ea), (nb, mb, eb)) = (parts(a), parts(b));
        let sum = Exact::from_scaled(na != nb, ma * mb, ea + eb).plus(&Exact::of_bf16(c));
        if sum.0 == [0; 10] {
            // IEEE: an exact zero is -0 only when product and addend both are.
            return if (na != nb) && c == 0x8000 && ma * mb == 0 { 0x8000 } else { 0 };
        }
        sum.to_bf16()
    }

    #[track_caller]
    fn check_fma(a: u16, b: u16, c: u16) {
        assert_eq!(fma(a, b, c), fma_exact(a, b, c), "fma({a:04x}, {b:04x}, {c:04x})");
    }

    #[test]
    fn all_patterns_widen_as_the_reference_crate_and_round_back() {
        for bits in 0..=u16::MAX {
            let (got, want) = (to_f32(bits), reference::from_bits(bits).to_f32());
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan());
            let is_nan = reference::from_bits(bits).is_nan();
            assert_eq!(from_f32(got), if is_nan { NAN } else { bits });
            let relu = if is_nan {
                NAN
            } else if bits & 0x8000 != 0 {
                0
            } else {
                bits
            };
            assert_eq!(from_f32_relu(got), relu, "{bits:04x}");
        }
    }

    #[test]
    fn every_midpoint_ties_to_even_as_in_the_reference_crate() {
        for bits in 0..=u16::MAX {
            for low_half in [0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let x = f32::from_bits(u32::from(bits) << 16 | low_half);
                // The crate keeps a NaN's payload and sign; ours is always 0x7FFF.
                let want = if x.is_nan() { NAN } else { reference::from_f32(x).to_bits() };
                assert_eq!(from_f32(x), want, "{:08x}", x.to_bits());
            }
        }
    }

    #[test]
    fn specials_of_add_mul_fma() {
        const INF: u16 = 0x7F80;
        const ONE: u16 = 0x3F80;
        assert_eq!(add(INF, INF | 0x8000), NAN);
        assert_eq!(mul(INF, 0), NAN);
        assert_eq!(fma(0xFFC1, ONE, ONE), NAN);
        assert_eq!(fma(0, INF, ONE), NAN);
        assert_eq!(fma(INF, ONE, INF), INF);
        assert_eq!(fma(ONE, ONE, 0xBF80), 0, "exact cancellation is +0");
        assert_eq!(fma(0x8000, ONE, 0x8000), 0x8000, "-0 + -0");
        assert_eq!(add(0x8000, 0x8000), 0x8000);
        assert_eq!(mul(0x7F7F, 0x7F7F), INF, "overflow");
        assert_eq!(mul(0x0001, 0x0001), 0, "underflow");
        assert_eq!(mul(0x8001, 0x0001), 0x8000, "underflow keeps the sign");
        assert_eq!(mul(0x0001, ONE), 0x0001, "subnormals are not flushed");
    }

    #[test]
    fn a_tiny_addend_breaks_a_tie_of_the_product() {
        // Products of two 8-bit significands that lie exactly between two BF16 values, and addends 2^-133..2^-60.
        let mut ties = 0;
        for a in 0x3F80..0x4000u16 {
            for b in a..0x4000 {
                let significand = u32::from(a & 0x7F | 0x80) * u32::from(b & 0x7F | 0x80);
                let dropped = significand.ilog2() - 7;
                if significand & ((1 << dropped) - 1) != 1 << (dropped - 1) {
                    continue;
                }
                ties += 1;
                for tiny in [0x0001, 0x8001, 0x0080, 0x8080, 0x2180, 0xA180] {
                    check_fma(a, b, tiny);
                }
                assert_ne!(fma(a, b, 0x0001), fma(a, b, 0x8001));
            }
        }
        assert!(ties > 20, "{ties}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn fma_is_exact_for_any_patterns(a in any::<u16>(), b in any::<u16>(), c in any::<u16>()) {
            prop_assert_eq!(fma(a, b, c), fma_exact(a, b, c));
        }

        #[test]
        fn fma_is_exact_near_cancellation(a in 0x3000u16..0x5000, b in 0x3000u16..0x5000, nudge in -600i32..600) {
            let product = reference::from_f32(to_f32(a) * to_f32(b)).to_bits();
            let c = ((i32::from(product) + nudge) as u16) | 0x8000;
            prop_assert_eq!(fma(a, b, c), fma_exact(a, b, c));
        }

        #[test]
        fn fma_is_exact_among_subnormals(a in 0u16..0x2100, b in 0x1F00u16..0x4100, c in 0u16..0x0200, sign in any::<bool>()) {
            let c = if sign { c | 0x8000 } else { c };
            prop_assert_eq!(fma(a, b, c), fma_exact(a, b, c));
        }

        #[test]
        fn add_and_mul_are_exact(a in any::<u16>(), b in any::<u16>()) {
            prop_assert_eq!(add(a, b), fma_exact(a, 0x3F80, b));
            // -0 as addend leaves the sign of a zero product alone.
            prop_assert_eq!(mul(a, b), fma_exact(a, b, 0x8000 & (a ^ b)));
        }
    }
}

//! E4M3: sign, 4 exponent bits (bias 7), 3 fraction bits; no infinity, one NaN per sign (`0x7F`, `0xFF`), largest 448.

use super::round_to_grid;

/// Largest finite magnitude.
pub const MAX: f32 = 448.0;
/// The NaN that a conversion produces, whatever the sign of its input.
pub const NAN: u8 = 0x7F;

/// Every finite code is a multiple of `2^-FIXED_FRACTION_BITS`; see [`to_fixed`].
pub const FIXED_FRACTION_BITS: u32 = 9;

/// Rounds to nearest-even, saturating at ±448 (infinities too); NaN to [`NAN`]; the sign of zero is kept.
pub fn from_f32(x: f32) -> u8 {
    if x.is_nan() {
        return NAN;
    }
    let sign = ((x.to_bits() >> 31) as u8) << 7;
    if x.abs() >= MAX {
        return sign | 0x7E;
    }
    let (exponent, multiple) = round_to_grid(x, -6, 3);
    sign | (((exponent + 6) as u8) << 3).wrapping_add(multiple as u8)
}

/// The value of a code; both NaN codes give a NaN.
pub fn to_f32(code: u8) -> f32 {
    match to_fixed(code) {
        None => f32::NAN,
        Some(0) if code & 0x80 != 0 => -0.0,
        Some(fixed) => fixed as f32 * (1.0 / (1 << FIXED_FRACTION_BITS) as f32),
    }
}

/// The value of a code as a multiple of `2^-9`, at most 18 bits and a sign; `None` for NaN.
pub const fn to_fixed(code: u8) -> Option<i32> {
    let (exponent, fraction) = ((code >> 3) & 15, (code & 7) as i32);
    let magnitude = match exponent {
        15 if fraction == 7 => return None,
        0 => fraction,
        _ => (8 | fraction) << (exponent - 1),
    };
    Some(if code & 0x80 != 0 { -magnitude } else { magnitude })
}

#[cfg(test)]
mod tests {
    use super::*;
    use float8::F8E4M3;
    use proptest::prelude::*;

    #[test]
    fn all_codes_decode_as_the_reference_crate() {
        for code in 0..=u8::MAX {
            let (got, want) = (to_f32(code), F8E4M3::from_bits(code).to_f32());
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{code:02x}: {got} {want}");
        }
    }

    #[test]
    fn encode_inverts_decode() {
        for code in 0..=u8::MAX {
            assert_eq!(from_f32(to_f32(code)), if code & 0x7F == NAN { NAN } else { code });
        }
    }

    #[test]
    fn all_bf16_values_encode_as_the_reference_crate() {
        for bits in 0..=u16::MAX {
            let x = half::bf16::from_bits(bits).to_f32();
            // The crate keeps a NaN's sign; the hardware conversion and ours do not.
            let want = if x.is_nan() { NAN } else { F8E4M3::from_f32(x).to_bits() };
            assert_eq!(from_f32(x), want, "{x}");
        }
    }

    #[test]
    fn every_midpoint_ties_to_even_and_its_neighbours_do_not() {
        for code in 0..0x7Eu8 {
            let (low, high) = (to_f32(code), to_f32(code + 1));
            let midpoint = (low + high) / 2.0;
            let even = if code & 1 == 0 { code } else { code + 1 };
            for (x, want) in [(midpoint, even), (midpoint.next_down(), code), (midpoint.next_up(), code + 1)] {
                assert_eq!(from_f32(x), want, "{x}");
                assert_eq!(from_f32(-x), want | 0x80, "-{x}");
            }
        }
    }

    #[test]
    fn saturates_and_keeps_the_sign_of_zero() {
        for x in [448.0, 449.0, 464.0, 480.0, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!(from_f32(x), 0x7E, "{x}");
            assert_eq!(from_f32(-x), 0xFE, "-{x}");
        }
        assert_eq!(from_f32(0.0), 0);
        assert_eq!(from_f32(-0.0), 0x80);
        assert_eq!(from_f32(f32::from_bits(1)), 0);
        assert_eq!(from_f32(f32::from_bits(0xFFFF_FFFF)), NAN, "a negative NaN loses its sign");
    }

    proptest! {
        #[test]
        fn any_float_encodes_as_the_reference_crate(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            let want = if x.is_nan() { NAN } else { F8E4M3::from_f32(x).to_bits() };
            prop_assert_eq!(from_f32(x), want);
        }

        #[test]
        fn a_float_in_range_encodes_as_the_reference_crate(x in -500f32..500.0, shift in 0i32..14) {
            let x = x * crate::numerics::pow2::exp2(-shift);
            prop_assert_eq!(from_f32(x), F8E4M3::from_f32(x).to_bits());
        }
    }
}

//! E2M1: sign, 2 exponent bits (bias 1), 1 fraction bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; no NaN.

use super::round_to_grid;

/// Largest magnitude.
pub const MAX: f32 = 6.0;

/// Rounds to nearest-even, saturating at ±6; NaN to +6; the sign of zero is kept. The code is in the low nibble.
pub fn from_f32(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7;
    }
    let sign = ((x.to_bits() >> 31) as u8) << 3;
    if x.abs() >= MAX {
        return sign | 0x7;
    }
    let (exponent, multiple) = round_to_grid(x, 0, 1);
    sign | ((exponent as u8) << 1).wrapping_add(multiple as u8)
}

/// The value of the code in the low nibble; the high nibble is ignored.
pub const fn to_f32(code: u8) -> f32 {
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0][(code & 15) as usize]
}

/// Packs an even and an odd element into a byte: the even one is the low nibble.
pub const fn pack(even: u8, odd: u8) -> u8 {
    (even & 15) | (odd << 4)
}

/// The codes of the even (low nibble) and odd element of a byte.
pub const fn unpack(byte: u8) -> (u8, u8) {
    (byte & 15, byte >> 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The nearest of the eight magnitudes, by comparing distances in f64; a tie goes to the even code.
    fn nearest(x: f32) -> u8 {
        if x.is_nan() {
            return 7;
        }
        let distance = |code: u8| (f64::from(x.abs().min(100.0)) - f64::from(to_f32(code))).abs();
        let code = (0..8u8).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap();
        if x.is_sign_negative() { code | 8 } else { code }
    }

    #[test]
    fn all_bf16_values_go_to_the_nearest_code() {
        for bits in 0..=u16::MAX {
            let x = half::bf16::from_bits(bits).to_f32();
            assert_eq!(from_f32(x), nearest(x), "{x}");
        }
    }

    #[test]
    fn ties_go_to_the_even_code() {
        let ties = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)];
        for (x, want) in ties {
            assert_eq!(to_f32(from_f32(x)), want, "{x}");
            assert_eq!(to_f32(from_f32(-x)), -want, "-{x}");
        }
        assert_eq!(from_f32(-0.0), 8);
        assert_eq!(from_f32(-0.1), 8);
        assert_eq!(from_f32(f32::NEG_INFINITY), 15);
        assert_eq!(from_f32(-f32::NAN), 7);
    }

    #[test]
    fn encode_inverts_decode_and_pack_inverts_unpack() {
        assert!((0..16).all(|code| from_f32(to_f32(code)) == code));
        assert!((0..=u8::MAX).all(|byte| {
            let (even, odd) = unpack(byte);
            pack(even, odd) == byte
        }));
        assert_eq!(unpack(0x21), (1, 2));
    }

    proptest! {
        #[test]
        fn any_float_goes_to_the_nearest_code(bits in any::<u32>(), x in -7f32..7.0) {
            let any = f32::from_bits(bits);
            prop_assert_eq!(from_f32(any), nearest(any));
            prop_assert_eq!(from_f32(x), nearest(x));
        }
    }
}

//! UE8M0: an unsigned byte exponent, `2^(e - 127)`.

use super::pow2;

/// Bias of the exponent.
pub const BIAS: i32 = 127;

/// Decodes one byte to FP32: exact for `e < 255`, subnormal for `e = 0`.
///
/// `2^128` (`e = 255`, which block-scale formats reserve for NaN and no cache writer produces) is +inf in FP32.
pub const fn decode(e: u8) -> f32 {
    pow2::exp2(e as i32 - BIAS)
}

/// The byte of a power of two from `2^-127` to `2^127`, `None` for any other value.
pub const fn encode(x: f32) -> Option<u8> {
    let bits = x.to_bits();
    if bits == decode(0).to_bits() {
        Some(0)
    } else if bits & 0x807F_FFFF == 0 && bits != 0 && bits != 0x7F80_0000 {
        Some((bits >> 23) as u8)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_codes_decode_to_their_power() {
        for e in 0..=u8::MAX {
            assert_eq!(decode(e), 2f64.powi(i32::from(e) - 127) as f32, "{e}");
        }
        assert_eq!(decode(255), f32::INFINITY);
    }

    #[test]
    fn encode_inverts_decode_and_refuses_the_rest() {
        for e in 0..255 {
            assert_eq!(encode(decode(e)), Some(e));
            assert_eq!(encode(-decode(e)), None);
            assert_eq!(encode(decode(e) * 1.5), None);
        }
        for x in [0.0, -0.0, f32::INFINITY, f32::NAN, 3.0] {
            assert_eq!(encode(x), None, "{x}");
        }
    }
}

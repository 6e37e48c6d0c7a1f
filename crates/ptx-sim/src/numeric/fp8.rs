//! E4M3 conversions, on bits: sign, 4 exponent bits (bias 7), 3 fraction bits; no infinity, NaN is 0x7F and 0xFF.
//!
//! To E4M3 every conversion is `.rn.satfinite`: to nearest even, magnitudes above 448 (infinity too) become 448, every
//! NaN becomes 0x7F. From E4M3 conversions are exact.

use super::{F32_NAN, f16, float, pack2, pow2_f32, unpack2};

/// The code of NaN that conversions produce.
pub const E4M3_NAN: u8 = 0x7F;
/// The code of the largest magnitude, 448.
const E4M3_MAX: u32 = 0x7E;

/// The FP32 bits of an E4M3 code.
#[inline]
pub fn e4m3_to_f32(code: u8) -> u32 {
    let sign = u32::from(code & 0x80) << 24;
    let magnitude = u32::from(code & 0x7F);
    match magnitude {
        0x7F => F32_NAN,
        // Normal: the exponent's bias grows from 7 to 127.
        0x08.. => sign | ((magnitude << 20) + ((127 - 7) << 23)),
        // Subnormal or zero: a multiple of 2^-9.
        _ => sign | (magnitude as f32 * pow2_f32(-9)).to_bits(),
    }
}

/// The E4M3 code of FP32 bits: one element of `cvt.rn.satfinite.e4m3x2.f32`.
#[inline]
pub fn e4m3_from_f32(x: u32) -> u8 {
    if float::is_nan(x) {
        return E4M3_NAN;
    }
    let sign = (x >> 24) as u8 & 0x80;
    let magnitude = x & 0x7FFF_FFFF;
    let rounded = match magnitude {
        // 448 and above.
        0x43E0_0000.. => E4M3_MAX,
        // Normal, from 2^-6: rebias, then round away 20 bits; a carry moves into the exponent as it should.
        0x3C80_0000.. => (magnitude - ((127 - 7) << 23) + 0x7_FFFF + ((magnitude >> 20) & 1)) >> 20,
        // Subnormal: in FP32, adding 2^14 puts the last bit kept, 2^-9, at the end of the significand.
        _ => (f32::from_bits(magnitude) + 16384.0).to_bits() - 16384.0f32.to_bits(),
    };
    sign | rounded as u8
}

/// `cvt.rn.satfinite.e4m3x2.f32 d, high, low`: the first source goes to the high byte.
#[inline]
pub fn e4m3x2_from_f32(high: u32, low: u32) -> u16 {
    u16::from_le_bytes([e4m3_from_f32(low), e4m3_from_f32(high)])
}

/// `cvt.rn.satfinite.e4m3x2.f16x2`: the high half goes to the high byte.
#[inline]
pub fn e4m3x2_from_f16x2(x: u32) -> u16 {
    let (low, high) = unpack2(x);
    e4m3x2_from_f32(f16::to_f32(high), f16::to_f32(low))
}

/// `cvt.rn.f16x2.e4m3x2`: exact; the high byte goes to the high half, NaN to 0x7FFF.
#[inline]
pub fn e4m3x2_to_f16x2(codes: u16) -> u32 {
    let [low, high] = codes.to_le_bytes();
    pack2(f16::from_f32(e4m3_to_f32(low)), f16::from_f32(e4m3_to_f32(high)))
}

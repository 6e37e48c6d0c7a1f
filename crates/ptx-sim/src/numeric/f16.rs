//! FP16 conversions, on bits: to and from FP32, exact or rounded to nearest even, NaN canonical.

use super::{F32_NAN, HALF_NAN, float, pack2, pow2_f32};

const SIGN: u16 = 0x8000;

/// True for every NaN pattern.
#[inline]
pub fn is_nan(x: u16) -> bool {
    x & !SIGN > 0x7C00
}

/// `cvt.f32.f16`: exact; NaN gives [`F32_NAN`].
#[inline]
pub fn to_f32(x: u16) -> u32 {
    let sign = u32::from(x & SIGN) << 16;
    let magnitude = u32::from(x & !SIGN);
    match magnitude {
        0x7C01.. => F32_NAN,
        0x7C00 => sign | 0x7F80_0000,
        // Normal: the exponent's bias grows from 15 to 127.
        0x0400.. => sign | ((magnitude << 13) + ((127 - 15) << 23)),
        // Subnormal or zero: a multiple of 2^-24, exact in FP32.
        _ => sign | (magnitude as f32 * pow2_f32(-24)).to_bits(),
    }
}

/// `cvt.rn.f16.f32`: to nearest even; overflow gives infinity, NaN [`HALF_NAN`].
#[inline]
pub fn from_f32(x: u32) -> u16 {
    if float::is_nan(x) {
        return HALF_NAN;
    }
    let sign = (x >> 16) as u16 & SIGN;
    let magnitude = x & 0x7FFF_FFFF;
    let rounded = match magnitude {
        // 65520 and above, halfway to what would be 2^16.
        0x477F_F000.. => 0x7C00,
        // Normal: rebias, then round away 13 bits; a carry moves into the exponent as it should.
        0x3880_0000.. => (magnitude - ((127 - 15) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13,
        // Subnormal: in FP32, adding 2^-1 puts the last bit kept, 2^-24, at the end of the significand.
        _ => (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5f32.to_bits(),
    };
    sign | rounded as u16
}

/// `cvt.rn.f16x2.f32 d, high, low`: the first source goes to the high half.
#[inline]
pub fn from_f32_x2(high: u32, low: u32) -> u32 {
    pack2(from_f32(low), from_f32(high))
}

//! E2M1 elements and UE8M0 scales, the parts of MXFP4, on bits.
//!
//! E2M1: a sign and a magnitude among 0, 0.5, 1, 1.5, 2, 3, 4, 6; no infinity, no NaN. UE8M0: a byte `e` is 2^(e-127),
//! 255 is NaN. Only `sm_100a` converts these in hardware; the rules are those of the PTX ISA, not measured.

use super::{F32_NAN, HALF_NAN, f16, float, pack2, unpack2};

/// FP32 magnitudes of the codes 0 to 7.
const E2M1_MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The FP32 bits of an E2M1 code, the low nibble of `code`.
#[inline]
pub fn e2m1_to_f32(code: u8) -> u32 {
    u32::from(code & 8) << 28 | E2M1_MAGNITUDES[(code & 7) as usize].to_bits()
}

/// The E2M1 code (0 to 15) of FP32 bits: to nearest even, magnitudes above 6 become 6, the sign of a zero stays, NaN
/// becomes +6. One element of `cvt.rn.satfinite.e2m1x2.f32`.
#[inline]
pub fn e2m1_from_f32(x: u32) -> u8 {
    if float::is_nan(x) {
        return 7;
    }
    let sign = (x >> 28) as u8 & 8;
    // Midpoints between neighbours; a tie goes to the even code.
    let magnitude = match f32::from_bits(x & 0x7FFF_FFFF) {
        m if m <= 0.25 => 0,
        m if m < 0.75 => 1,
        m if m <= 1.25 => 2,
        m if m < 1.75 => 3,
        m if m <= 2.5 => 4,
        m if m < 3.5 => 5,
        m if m <= 5.0 => 6,
        _ => 7,
    };
    sign | magnitude
}

/// `cvt.rn.satfinite.e2m1x2.f32 d, high, low`: the first source goes to the high nibble.
#[inline]
pub fn e2m1x2_from_f32(high: u32, low: u32) -> u8 {
    e2m1_from_f32(high) << 4 | e2m1_from_f32(low)
}

/// `cvt.rn.satfinite.e2m1x2.f16x2`: the high half goes to the high nibble.
#[inline]
pub fn e2m1x2_from_f16x2(x: u32) -> u8 {
    let (low, high) = unpack2(x);
    e2m1x2_from_f32(f16::to_f32(high), f16::to_f32(low))
}

/// `cvt.rn.f16x2.e2m1x2`: exact; the high nibble goes to the high half.
#[inline]
pub fn e2m1x2_to_f16x2(codes: u8) -> u32 {
    pack2(f16::from_f32(e2m1_to_f32(codes)), f16::from_f32(e2m1_to_f32(codes >> 4)))
}

/// The FP32 bits of a UE8M0 scale: 2^(e-127), subnormal for 0, [`F32_NAN`] for 255.
#[inline]
pub fn ue8m0_to_f32(e: u8) -> u32 {
    match e {
        0 => 0x0040_0000,
        255 => F32_NAN,
        _ => u32::from(e) << 23,
    }
}

/// The BF16 bits of a UE8M0 scale, one element of `cvt.rn.bf16x2.ue8m0x2`: exact, 255 gives [`HALF_NAN`].
#[inline]
pub fn ue8m0_to_bf16(e: u8) -> u16 {
    if e == 255 { HALF_NAN } else { (ue8m0_to_f32(e) >> 16) as u16 }
}

/// `cvt.rn.bf16x2.ue8m0x2`: the high byte goes to the high half.
#[inline]
pub fn ue8m0x2_to_bf16x2(scales: u16) -> u32 {
    let [low, high] = scales.to_le_bytes();
    pack2(ue8m0_to_bf16(low), ue8m0_to_bf16(high))
}

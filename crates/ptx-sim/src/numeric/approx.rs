//! FP32 division and the approximate functions: `rsqrt`, `rcp`, `ex2`, `div.full`.
//!
//! # What is exact and what is a model
//!
//! | instruction | here | hardware |
//! |---|---|---|
//! | `rsqrt.approx` | the hardware's bits, from a recording of all 2^24 significands of an H200; in 8 of them, which the recording does not tell apart, the hardware is one ulp lower | at most 1.52 ulp |
//! | `div.full` by a constant | the hardware's bits where the divisor is an immediate of magnitude 2^-126 to 2^126: the assembler multiplies by the rounded reciprocal | by 1536 0.67 ulp, by 448 1.14 ulp |
//! | `div.full` by a register | the assembler's sequence around a correctly rounded reciprocal | at most 2 ulp |
//! | `rcp.approx` | correctly rounded (subnormal results: rounded twice) | at most 0.98 ulp |
//! | `ex2.approx` | correctly rounded (below 2^-126: the rounded square of a root) | at most 2.06 ulp |
//!
//! The GPU has one unit for these functions, which flushes subnormals; the forms without `.ftz` scale around it, and so
//! do the functions here.

use std::sync::LazyLock;

use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;

use super::{F32_NAN, float, pow2_f32, pow2_f64};

const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7F80_0000;

/// Magnitude above which the assembler scales a divisor down, lest its reciprocal be subnormal: 2^126.
const LARGE_DIVISOR: u32 = 0x7E80_0000;

#[inline]
fn is_subnormal_or_zero(x: u32) -> bool {
    x & INFINITY == 0
}

/// Two bits per significand, lowest first, of one binade of `rsqrt.approx`: the hardware's distance from the correctly
/// rounded result.
struct RsqrtTable(Vec<u8>);

/// Bytes of an unpacked table: 2^23 significands.
const RSQRT_TABLE_BYTES: usize = 1 << 21;

impl RsqrtTable {
    fn unpack(packed: &[u8]) -> Self {
        let bytes = decompress_to_vec_zlib_with_limit(packed, RSQRT_TABLE_BYTES).expect("embedded table is intact");
        assert_eq!(bytes.len(), RSQRT_TABLE_BYTES, "embedded table is complete");
        Self(bytes)
    }

    /// Ulps from the correctly rounded result to the hardware's, for a significand's 23 fraction bits.
    #[inline]
    fn correction(&self, fraction: u32) -> i32 {
        let code = (self.0[(fraction >> 2) as usize] >> (2 * (fraction & 3))) & 3;
        match code {
            0 => 0,
            1 => 1,
            2 => 2,
            _ => -1,
        }
    }
}

/// The recordings for inputs in [1, 2) and in [2, 4): 4 MiB when unpacked, so only on first use.
static RSQRT: LazyLock<[RsqrtTable; 2]> = LazyLock::new(|| {
    [
        RsqrtTable::unpack(include_bytes!("../../data/rsqrt_3f800000.diff2.zlib")),
        RsqrtTable::unpack(include_bytes!("../../data/rsqrt_40000000.diff2.zlib")),
    ]
});

/// The correctly rounded FP32 `1 / sqrt(x)` of a positive normal `x`.
///
/// FP64 evaluation is close enough: no significand's result lies within its error of a rounding boundary (tested for
/// all 2^24 by integer arithmetic).
#[inline]
pub fn rsqrt_correctly_rounded(x: f32) -> f32 {
    (1.0 / f64::from(x).sqrt()) as f32
}

/// The unit's reciprocal square root of a positive normal `x`. Exactly scale-invariant by powers of 4.
#[inline]
fn rsqrt_unit(x: u32) -> u32 {
    let exponent = (x >> 23) as i32 - 127;
    let (half_exponent, odd) = (exponent.div_euclid(2), exponent.rem_euclid(2) as u32);
    let fraction = x & 0x7F_FFFF;
    let rounded = rsqrt_correctly_rounded(f32::from_bits((127 + odd) << 23 | fraction)).to_bits();
    let hardware = rounded.wrapping_add_signed(RSQRT[odd as usize].correction(fraction));
    // A result in (0.5, 1] scaled by 2^-63 to 2^63 stays normal.
    hardware.wrapping_add_signed(-half_exponent << 23)
}

/// `rsqrt.approx.f32`. Zeros give the infinity of their sign, negative numbers NaN, +infinity +0.
pub fn rsqrt(x: u32) -> u32 {
    match x {
        _ if x & !SIGN == 0 => x | INFINITY,
        _ if float::is_nan(x) || x & SIGN != 0 => F32_NAN,
        INFINITY => 0,
        // 1 / sqrt(x * 2^24) * 2^12: both factors are powers of 2, so both products are exact.
        _ if is_subnormal_or_zero(x) => {
            let scaled = (f32::from_bits(x) * pow2_f32(24)).to_bits();
            rsqrt_unit(scaled) + (12 << 23)
        }
        _ => rsqrt_unit(x),
    }
}

/// `rsqrt.approx.ftz.f32`: a subnormal counts as the zero of its sign.
pub fn rsqrt_ftz(x: u32) -> u32 {
    rsqrt(float::ftz(x))
}

/// `rcp.approx.ftz.f32`, a model: see the module.
pub fn rcp_ftz(x: u32) -> u32 {
    float::ftz(float::canonical(1.0 / f32::from_bits(float::ftz(x))))
}

/// `rcp.approx.f32`, a model: see the module.
pub fn rcp(x: u32) -> u32 {
    let scale = divisor_scale(x).to_bits();
    float::mul(rcp_ftz(float::mul(x, scale)), scale)
}

/// What a divisor is multiplied by so that neither it nor its reciprocal is subnormal.
#[inline]
fn divisor_scale(divisor: u32) -> f32 {
    if is_subnormal_or_zero(divisor) {
        pow2_f32(24)
    } else if divisor & !SIGN > LARGE_DIVISOR && !float::is_nan(divisor) {
        0.25
    } else {
        1.0
    }
}

/// `div.full.f32`: `a` times the reciprocal of `b`, both scaled beforehand if `b` is very small or large.
pub fn div_full(a: u32, b: u32) -> u32 {
    let scale = divisor_scale(b).to_bits();
    float::mul(rcp_ftz(float::mul(b, scale)), float::mul(a, scale))
}

/// `div.full.ftz.f32`
pub fn div_full_ftz(a: u32, b: u32) -> u32 {
    let b = float::ftz(b);
    // A divisor that is zero needs no scale here: its reciprocal is infinite anyway.
    let scale = if is_subnormal_or_zero(b) { 1.0f32 } else { divisor_scale(b) }.to_bits();
    float::mul_ftz(rcp_ftz(float::mul_ftz(b, scale)), float::mul_ftz(a, scale))
}

/// The unit's 2^x: correctly rounded, subnormals flushed both ways.
fn ex2_unit(x: u32) -> u32 {
    let x = f32::from_bits(float::ftz(x));
    if x.is_nan() {
        return F32_NAN;
    }
    // Outside these bounds the result is 0 or infinite; clamping keeps the exponent below in range.
    let x = f64::from(x.clamp(-160.0, 160.0));
    let whole = x.round_ties_even();
    let power = exp_small((x - whole) * std::f64::consts::LN_2) * pow2_f64(whole as i32);
    float::ftz((power as f32).to_bits())
}

/// e^x for |x| <= ln(2) / 2 to about one FP64 ulp: 15 terms of its series. Written out rather than taken from the
/// platform's library so that every host computes the same bits.
fn exp_small(x: f64) -> f64 {
    (1..=15).rev().fold(1.0, |sum, n| 1.0 + sum * x / f64::from(n))
}

/// `ex2.approx.ftz.f32`, a model: see the module.
pub fn ex2_ftz(x: u32) -> u32 {
    ex2_unit(x)
}

/// `ex2.approx.f32`, a model: see the module. Below -126 the square of 2^(x/2), so that subnormal results survive.
pub fn ex2(x: u32) -> u32 {
    if f32::from_bits(x) < -126.0 {
        let root = ex2_unit((f32::from_bits(x) * 0.5).to_bits());
        float::mul(root, root)
    } else {
        ex2_unit(x)
    }
}

//! Scalar arithmetic of the simulated GPU: what one lane of an H200 computes, as pure functions on register bits.
//!
//! | file | holds |
//! |---|---|
//! | [`tensor_core`] | the FP8 and BF16 dot products of `wgmma` and `mma.sync` |
//! | [`float`](mod@float) | FP32 arithmetic, comparison-like selection, and conversions to and from integers |
//! | [`approx`] | FP32 division and the approximate functions |
//! | [`bf16`], [`f16`](mod@f16), [`fp8`], [`fp4`] | narrow floats: arithmetic and conversions |
//! | [`int`] | integers: bit fields, funnel shifts, byte permutation, division |
//!
//! A value is the bits of its register: `u32` for FP32 and for pairs of 16-bit elements (element 0 in the low half),
//! `u16` for a 16-bit float or a pair of bytes, `u8` for one byte. Results never depend on the host: arithmetic uses
//! only operations that IEEE 754 fixes, and every NaN that an operation makes is the canonical one of the GPU.
//!
//! Each file says which of its results are the hardware's bits and which are a model within the documented error.

pub mod approx;
pub mod bf16;
pub mod f16;
pub mod float;
pub mod fp4;
pub mod fp8;
pub mod int;
pub mod tensor_core;

/// The NaN that FP32 operations return.
pub const F32_NAN: u32 = 0x7FFF_FFFF;
/// The NaN that BF16 and FP16 operations return; in both formats it is all ones below the sign.
pub const HALF_NAN: u16 = 0x7FFF;

/// 2^n; `n` must be the exponent of a normal FP32.
#[inline]
fn pow2_f32(n: i32) -> f32 {
    debug_assert!((-126..=127).contains(&n));
    f32::from_bits(((127 + n) as u32) << 23)
}

/// 2^n; `n` must be the exponent of a normal FP64.
#[inline]
fn pow2_f64(n: i32) -> f64 {
    debug_assert!((-1022..=1023).contains(&n));
    f64::from_bits(((1023 + n) as u64) << 52)
}

/// The halves of a pair: (low, high).
#[inline]
fn unpack2(pair: u32) -> (u16, u16) {
    (pair as u16, (pair >> 16) as u16)
}

/// The pair of a low and a high half.
#[inline]
fn pack2(low: u16, high: u16) -> u32 {
    u32::from(high) << 16 | u32::from(low)
}

/// `a + b` in FP64 rounded to odd: inexact results get an odd last bit, so that a second rounding to a format at least
/// two bits shorter rounds as if `a + b` had been rounded once. Infinities and NaN as in `a + b`.
#[inline]
fn add_round_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    if !sum.is_finite() {
        return sum;
    }
    // Error of the rounded sum, exact (Knuth's two-sum).
    let b_part = sum - a;
    let error = (a - (sum - b_part)) + (b - b_part);
    if error == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    // The exact sum lies strictly between `sum` and its neighbour on the error's side, which is odd.
    let away_from_zero = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if away_from_zero { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// `x` as FP32, rounded to odd (see [`add_round_to_odd`]); overflow gives the largest finite value, which is odd.
#[inline]
fn f32_round_to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest) == x || x.is_nan() {
        return nearest;
    }
    let toward_zero = if f64::from(nearest).abs() > x.abs() { f32::from_bits(nearest.to_bits() - 1) } else { nearest };
    f32::from_bits(toward_zero.to_bits() | 1)
}

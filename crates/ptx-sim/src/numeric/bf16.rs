//! BF16 arithmetic and conversions, on bits. All of it is the hardware's, bit for bit.
//!
//! `add`, `sub`, `mul` and `fma` round once, to nearest even, keep subnormals, and return [`HALF_NAN`] for every NaN. The
//! `x2` functions work on both halves of a register.

use super::{F32_NAN, HALF_NAN, add_round_to_odd, f32_round_to_odd, float, pack2, unpack2};

const SIGN: u16 = 0x8000;

/// True for every NaN pattern.
#[inline]
pub fn is_nan(x: u16) -> bool {
    x & !SIGN > 0x7F80
}

/// `cvt.f32.bf16`: the same number; the payload of a NaN is kept, since the hardware only shifts.
#[inline]
pub fn to_f32(x: u16) -> u32 {
    u32::from(x) << 16
}

/// `cvt.rn.bf16.f32`: to nearest even; overflow gives infinity, NaN [`HALF_NAN`].
#[inline]
pub fn from_f32(x: u32) -> u16 {
    if float::is_nan(x) {
        return HALF_NAN;
    }
    ((x + 0x7FFF + ((x >> 16) & 1)) >> 16) as u16
}

/// `cvt.rn.relu.bf16.f32`: as [`from_f32`], then negative numbers and -0 become +0.
#[inline]
pub fn from_f32_relu(x: u32) -> u16 {
    relu(from_f32(x))
}

/// Clamps a result to +0 from below; a canonical NaN stays.
#[inline]
fn relu(x: u16) -> u16 {
    if x & SIGN != 0 { 0 } else { x }
}

#[inline]
fn widen(x: u16) -> f64 {
    f64::from(f32::from_bits(to_f32(x)))
}

/// Rounds an FP64 that is exact or rounded to odd.
#[inline]
fn narrow(x: f64) -> u16 {
    let x = f32_round_to_odd(x);
    if x.is_nan() { HALF_NAN } else { from_f32(x.to_bits()) }
}

/// `add.rn.bf16`
#[inline]
pub fn add(a: u16, b: u16) -> u16 {
    narrow(add_round_to_odd(widen(a), widen(b)))
}

/// `sub.rn.bf16`
#[inline]
pub fn sub(a: u16, b: u16) -> u16 {
    narrow(add_round_to_odd(widen(a), -widen(b)))
}

/// `mul.rn.bf16`
#[inline]
pub fn mul(a: u16, b: u16) -> u16 {
    narrow(widen(a) * widen(b))
}

/// `fma.rn.bf16`: `a * b + c`, rounded once.
#[inline]
pub fn fma(a: u16, b: u16, c: u16) -> u16 {
    narrow(add_round_to_odd(widen(a) * widen(b), widen(c)))
}

/// `fma.rn.relu.bf16`: as [`fma`], then negative numbers and -0 become +0.
#[inline]
pub fn fma_relu(a: u16, b: u16, c: u16) -> u16 {
    relu(fma(a, b, c))
}

/// `neg.bf16`; of a NaN, the canonical one.
#[inline]
pub fn neg(x: u16) -> u16 {
    if is_nan(x) { HALF_NAN } else { x ^ SIGN }
}

/// `abs.bf16`; of a NaN, the canonical one.
#[inline]
pub fn abs(x: u16) -> u16 {
    if is_nan(x) { HALF_NAN } else { x & !SIGN }
}

/// A selection of FP32 done on BF16: widening keeps order, zeros' signs and NaN.
#[inline]
fn select(op: fn(u32, u32) -> u32, a: u16, b: u16) -> u16 {
    match op(to_f32(a), to_f32(b)) {
        F32_NAN => HALF_NAN,
        chosen => (chosen >> 16) as u16,
    }
}

/// `max.bf16`: the other operand if one is NaN; +0 is larger than -0.
#[inline]
pub fn max(a: u16, b: u16) -> u16 {
    select(float::max, a, b)
}

/// `min.bf16`: the other operand if one is NaN; -0 is smaller than +0.
#[inline]
pub fn min(a: u16, b: u16) -> u16 {
    select(float::min, a, b)
}

/// `max.NaN.bf16`: [`HALF_NAN`] if an operand is NaN.
#[inline]
pub fn max_nan(a: u16, b: u16) -> u16 {
    select(float::max_nan, a, b)
}

/// `min.NaN.bf16`: [`HALF_NAN`] if an operand is NaN.
#[inline]
pub fn min_nan(a: u16, b: u16) -> u16 {
    select(float::min_nan, a, b)
}

/// Applies `op` to the low and to the high halves.
#[inline]
fn map1(op: fn(u16) -> u16, a: u32) -> u32 {
    let (low, high) = unpack2(a);
    pack2(op(low), op(high))
}

/// Applies `op` to the low and to the high halves.
#[inline]
fn map2(op: fn(u16, u16) -> u16, a: u32, b: u32) -> u32 {
    let ((a0, a1), (b0, b1)) = (unpack2(a), unpack2(b));
    pack2(op(a0, b0), op(a1, b1))
}

/// Applies `op` to the low and to the high halves.
#[inline]
fn map3(op: fn(u16, u16, u16) -> u16, a: u32, b: u32, c: u32) -> u32 {
    let ((a0, a1), (b0, b1), (c0, c1)) = (unpack2(a), unpack2(b), unpack2(c));
    pack2(op(a0, b0, c0), op(a1, b1, c1))
}

/// `add.rn.bf16x2`
#[inline]
pub fn add_x2(a: u32, b: u32) -> u32 {
    map2(add, a, b)
}

/// `sub.rn.bf16x2`
#[inline]
pub fn sub_x2(a: u32, b: u32) -> u32 {
    map2(sub, a, b)
}

/// `mul.rn.bf16x2`
#[inline]
pub fn mul_x2(a: u32, b: u32) -> u32 {
    map2(mul, a, b)
}

/// `fma.rn.bf16x2`
#[inline]
pub fn fma_x2(a: u32, b: u32, c: u32) -> u32 {
    map3(fma, a, b, c)
}

/// `fma.rn.relu.bf16x2`
#[inline]
pub fn fma_relu_x2(a: u32, b: u32, c: u32) -> u32 {
    map3(fma_relu, a, b, c)
}

/// `neg.bf16x2`
#[inline]
pub fn neg_x2(x: u32) -> u32 {
    map1(neg, x)
}

/// `abs.bf16x2`
#[inline]
pub fn abs_x2(x: u32) -> u32 {
    map1(abs, x)
}

/// `max.bf16x2`
#[inline]
pub fn max_x2(a: u32, b: u32) -> u32 {
    map2(max, a, b)
}

/// `min.bf16x2`
#[inline]
pub fn min_x2(a: u32, b: u32) -> u32 {
    map2(min, a, b)
}

/// `max.NaN.bf16x2`
#[inline]
pub fn max_nan_x2(a: u32, b: u32) -> u32 {
    map2(max_nan, a, b)
}

/// `min.NaN.bf16x2`
#[inline]
pub fn min_nan_x2(a: u32, b: u32) -> u32 {
    map2(min_nan, a, b)
}

/// `cvt.rn.bf16x2.f32 d, high, low`: the first source goes to the high half.
#[inline]
pub fn from_f32_x2(high: u32, low: u32) -> u32 {
    pack2(from_f32(low), from_f32(high))
}

/// `cvt.rn.relu.bf16x2.f32 d, high, low`: the first source goes to the high half.
#[inline]
pub fn from_f32_relu_x2(high: u32, low: u32) -> u32 {
    pack2(from_f32_relu(low), from_f32_relu(high))
}

//! FP32 arithmetic as PTX defines it, on bits.
//!
//! All of it is the hardware's, bit for bit: `add`, `sub`, `mul`, `fma`, `div.rn` and `sqrt.rn` are IEEE 754 with
//! rounding to nearest even, and a NaN result is always [`F32_NAN`], whatever NaN went in.
//!
//! The `.ftz` form of an instruction is its plain form between two flushes, [`ftz`] of each input and of the result; a
//! flush keeps the sign. That a result is flushed after it is rounded is an assumption: only a result that rounds up to
//! the smallest normal number could tell.

use super::F32_NAN;

const SIGN: u32 = 0x8000_0000;

/// Bits of a computed value, with every NaN made canonical.
#[inline]
pub fn canonical(x: f32) -> u32 {
    if x.is_nan() { F32_NAN } else { x.to_bits() }
}

#[inline]
fn value(bits: u32) -> f32 {
    f32::from_bits(bits)
}

/// True for every NaN pattern.
#[inline]
pub fn is_nan(x: u32) -> bool {
    x & !SIGN > 0x7F80_0000
}

/// Flushes a subnormal to the zero of its sign.
#[inline]
pub fn ftz(x: u32) -> u32 {
    if x & 0x7F80_0000 == 0 { x & SIGN } else { x }
}

/// `add.rn.f32`
#[inline]
pub fn add(a: u32, b: u32) -> u32 {
    canonical(value(a) + value(b))
}

/// `sub.rn.f32`
#[inline]
pub fn sub(a: u32, b: u32) -> u32 {
    canonical(value(a) - value(b))
}

/// `mul.rn.f32`
#[inline]
pub fn mul(a: u32, b: u32) -> u32 {
    canonical(value(a) * value(b))
}

/// `fma.rn.f32`: `a * b + c`, rounded once.
#[inline]
pub fn fma(a: u32, b: u32, c: u32) -> u32 {
    // The product is exact in FP64, and FP64 rounded to odd is long enough to be rounded again.
    let product = f64::from(value(a)) * f64::from(value(b));
    canonical(super::add_round_to_odd(product, f64::from(value(c))) as f32)
}

/// `add.rn.ftz.f32`
#[inline]
pub fn add_ftz(a: u32, b: u32) -> u32 {
    ftz(add(ftz(a), ftz(b)))
}

/// `sub.rn.ftz.f32`
#[inline]
pub fn sub_ftz(a: u32, b: u32) -> u32 {
    ftz(sub(ftz(a), ftz(b)))
}

/// `mul.rn.ftz.f32`
#[inline]
pub fn mul_ftz(a: u32, b: u32) -> u32 {
    ftz(mul(ftz(a), ftz(b)))
}

/// `fma.rn.ftz.f32`
#[inline]
pub fn fma_ftz(a: u32, b: u32, c: u32) -> u32 {
    ftz(fma(ftz(a), ftz(b), ftz(c)))
}

/// `div.rn.f32`
#[inline]
pub fn div(a: u32, b: u32) -> u32 {
    canonical(value(a) / value(b))
}

/// `sqrt.rn.f32`
#[inline]
pub fn sqrt(x: u32) -> u32 {
    canonical(value(x).sqrt())
}

/// `neg.f32`; of a NaN, the canonical one.
#[inline]
pub fn neg(x: u32) -> u32 {
    if is_nan(x) { F32_NAN } else { x ^ SIGN }
}

/// `abs.f32`; of a NaN, the canonical one.
#[inline]
pub fn abs(x: u32) -> u32 {
    if is_nan(x) { F32_NAN } else { x & !SIGN }
}

/// Integers in the order of the numbers they stand for, -0 just below +0; NaN has no meaning here.
#[inline]
fn ordered(x: u32) -> i32 {
    if x & SIGN == 0 { x as i32 } else { !(x & !SIGN) as i32 }
}

/// `max.f32`: the other operand if one is NaN; +0 is larger than -0.
#[inline]
pub fn max(a: u32, b: u32) -> u32 {
    match (is_nan(a), is_nan(b)) {
        (true, true) => F32_NAN,
        (true, false) => b,
        (false, true) => a,
        (false, false) => {
            if ordered(a) >= ordered(b) {
                a
            } else {
                b
            }
        }
    }
}

/// `min.f32`: the other operand if one is NaN; -0 is smaller than +0.
#[inline]
pub fn min(a: u32, b: u32) -> u32 {
    match (is_nan(a), is_nan(b)) {
        (true, true) => F32_NAN,
        (true, false) => b,
        (false, true) => a,
        (false, false) => {
            if ordered(a) <= ordered(b) {
                a
            } else {
                b
            }
        }
    }
}

/// `max.NaN.f32`: [`F32_NAN`] if an operand is NaN.
#[inline]
pub fn max_nan(a: u32, b: u32) -> u32 {
    if is_nan(a) || is_nan(b) { F32_NAN } else { max(a, b) }
}

/// `min.NaN.f32`: [`F32_NAN`] if an operand is NaN.
#[inline]
pub fn min_nan(a: u32, b: u32) -> u32 {
    if is_nan(a) || is_nan(b) { F32_NAN } else { min(a, b) }
}

/// How a conversion picks an integer: the PTX modifiers `.rni`, `.rzi`, `.rmi`, `.rpi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToInt {
    /// `.rni`: nearest, ties to even.
    Nearest,
    /// `.rzi`: toward zero.
    Zero,
    /// `.rmi`: toward minus infinity.
    Down,
    /// `.rpi`: toward plus infinity.
    Up,
}

/// `cvt.<r>i.f32.f32`: rounds to an integral value, keeping the sign of a zero.
#[inline]
pub fn round(x: u32, mode: ToInt) -> u32 {
    let x = value(x);
    canonical(match mode {
        ToInt::Nearest => x.round_ties_even(),
        ToInt::Zero => x.trunc(),
        ToInt::Down => x.floor(),
        ToInt::Up => x.ceil(),
    })
}

/// `cvt.<r>i.s32.f32`: saturates; NaN gives 0.
#[inline]
pub fn to_s32(x: u32, mode: ToInt) -> i32 {
    value(round(x, mode)) as i32
}

/// `cvt.<r>i.u32.f32`: saturates; NaN gives 0.
#[inline]
pub fn to_u32(x: u32, mode: ToInt) -> u32 {
    value(round(x, mode)) as u32
}

/// `cvt.<r>i.s64.f32`: saturates; NaN gives the smallest integer.
#[inline]
pub fn to_s64(x: u32, mode: ToInt) -> i64 {
    if is_nan(x) { i64::MIN } else { value(round(x, mode)) as i64 }
}

/// `cvt.<r>i.u64.f32`: saturates; NaN gives 2^63.
#[inline]
pub fn to_u64(x: u32, mode: ToInt) -> u64 {
    if is_nan(x) { 1 << 63 } else { value(round(x, mode)) as u64 }
}

/// `cvt.rn.f32.s32`
#[inline]
pub fn from_s32(x: i32) -> u32 {
    (x as f32).to_bits()
}

/// `cvt.rn.f32.u32`
#[inline]
pub fn from_u32(x: u32) -> u32 {
    (x as f32).to_bits()
}

/// `cvt.rn.f32.s64`
#[inline]
pub fn from_s64(x: i64) -> u32 {
    (x as f32).to_bits()
}

/// `cvt.rn.f32.u64`
#[inline]
pub fn from_u64(x: u64) -> u32 {
    (x as f32).to_bits()
}

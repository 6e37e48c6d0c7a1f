//! The dot products of the Hopper tensor cores, bit for bit.
//!
//! One MMA step adds K products and the accumulator at once. `wgmma` on E4M3 has K = 32, `wgmma` and `mma.sync` on BF16
//! have K = 16; a longer dot is a chain of steps, each step's result being the next one's accumulator.
//!
//! # Model
//!
//! | step | E4M3, K = 32 | BF16, K = 16 |
//! |---|---|---|
//! | 1. exponent of a product | sum of its operands' exponents | same |
//! | 2. E = largest exponent of the non-zero terms, the accumulator among them | | |
//! | 3. cut every term toward zero to a multiple of | 2^(E-13) | 2^(E-25) |
//! | 4. add the cut terms exactly | | |
//! | 5. truncate toward zero to FP32 with this many fraction bits | 13 | 23 |
//!
//! Exponents come from the operands' exponent fields: a product is not normalised, and a subnormal has its format's
//! smallest exponent (-6, -126). A zero sum is +0. Every NaN result is 0x7FFFFFFF.
//!
//! # What is measured
//!
//! Steps 1 to 5 reproduce 102,400 of 102,400 results of an H200 for each of `wgmma` E4M3, `wgmma` BF16 and `mma.sync`
//! BF16 (`tests/hardware`). Infinities and the overflow of a finite sum follow IEEE 754 by assumption: a NaN operand,
//! inf * 0 and inf - inf give NaN, any other infinite term gives that infinity, and a sum of 2^128 or more is infinite.

use super::{F32_NAN, pow2_f32, pow2_f64};

/// Products per E4M3 step.
const E4M3_K: usize = 32;
/// Products per BF16 step.
const BF16_K: usize = 16;
/// Position of the cut of an E4M3 step below the largest exponent.
const E4M3_CUT: i32 = 13;
/// Position of the cut of a BF16 step below the largest exponent.
const BF16_CUT: i32 = 25;
/// Bits of an FP32 that an E4M3 step keeps: 13 of the 23 fraction bits.
const E4M3_KEPT: u32 = !0x3FF;

/// Bias of the exponents in [`E4m3Vector`]: the sum of two is at least `2 * (BIAS - 6)` for a product that counts and at
/// most `BIAS + 8` for one that is zero, so one comparison tells them apart.
const E4M3_BIAS: i32 = 32;
/// Smallest sum of two biased exponents that belongs to a non-zero product.
const E4M3_COUNTS: u8 = (2 * (E4M3_BIAS - 6)) as u8;

/// The 32 operands of one side of a step.
#[derive(Clone)]
struct E4m3Vector {
    /// Values; a NaN's is arbitrary, since `has_nan` decides.
    value: [f32; E4M3_K],
    /// [`E4M3_BIAS`] plus the exponent; 0 for a zero.
    exponent: [u8; E4M3_K],
    has_nan: bool,
}

impl E4m3Vector {
    /// Branch-free, so that the compiler vectorises it.
    #[inline]
    fn decode(codes: &[u8; E4M3_K]) -> Self {
        let mut nan = false;
        for &code in codes {
            nan |= code & 0x7F == 0x7F;
        }
        let exponent = codes.map(|code| {
            let field = (code >> 3) & 15;
            let biased = field.max(1) + (E4M3_BIAS - 7) as u8;
            if code & 0x7F == 0 { 0 } else { biased }
        });
        let value = codes.map(|code| {
            let sign = u32::from(code & 0x80) << 24;
            let magnitude = u32::from(code & 0x7F);
            // Rebias the exponent from 7 to 127. A subnormal gets the hidden bit it lacks, 2^-6, and loses it again.
            let (rebias, surplus) = if magnitude < 8 { (121 << 23, pow2_f32(-6)) } else { (120 << 23, 0.0) };
            let value = f32::from_bits((magnitude << 20) + rebias) - surplus;
            f32::from_bits(value.to_bits() | sign)
        });
        Self { value, exponent, has_nan: nan }
    }
}

/// FP32 with an ulp of 1: what is added to it is rounded to an integer, found in the low bits.
const INTEGER_GRID: f32 = 1.5 * (1 << 23) as f32;

/// `x` cut toward zero, as an integer above the bits of [`INTEGER_GRID`], for an `x` below 2^15 of 8 significant bits that
/// is a product of two E4M3 significands (at most 225) scaled by a power of 2.
///
/// The fraction of such an `x` is at most 127/128, or 225/256 below 1. Moved toward zero by 127/256, which is exact, it is
/// less than 1/2 away from the cut integer, so rounding to nearest finds that. Unlike `as i32`, this needs no saturation.
#[inline]
fn cut_e4m3(x: f32) -> u32 {
    const SHIFT: f32 = 127.0 / 256.0;
    (x - SHIFT.copysign(x) + INTEGER_GRID).to_bits()
}

#[inline]
fn e4m3_step(a: &E4m3Vector, b: &E4m3Vector, acc: f32) -> f32 {
    if a.has_nan || b.has_nan || acc.is_nan() {
        return f32::from_bits(F32_NAN);
    }
    if acc.is_infinite() {
        return acc;
    }
    let mut largest = 0;
    for k in 0..E4M3_K {
        largest = largest.max(a.exponent[k].wrapping_add(b.exponent[k]));
    }
    if largest < E4M3_COUNTS {
        return truncate_e4m3(acc);
    }
    let mut exponent = i32::from(largest) - 2 * E4M3_BIAS;
    if acc != 0.0 {
        exponent = exponent.max(exponent_f32(acc));
    }
    // In units of the cut each product is below 2^15 and the sum below 2^21: scaling is exact (what underflows is cut to
    // zero anyway), and so is the sum when it becomes FP32 again.
    let to_units = pow2_f32(E4M3_CUT - exponent);
    let mut sum = 0u32;
    for k in 0..E4M3_K {
        sum = sum.wrapping_add(cut_e4m3(a.value[k] * b.value[k] * to_units));
    }
    let grids = INTEGER_GRID.to_bits().wrapping_mul(E4M3_K as u32);
    let sum = sum.wrapping_sub(grids) as i32 + (acc * to_units) as i32;
    truncate_e4m3(sum as f32) * pow2_f32(exponent - E4M3_CUT)
}

/// Step 5 for E4M3; a value cut to zero loses its sign.
#[inline]
fn truncate_e4m3(value: f32) -> f32 {
    f32::from_bits(value.to_bits() & E4M3_KEPT) + 0.0
}

/// One E4M3 `wgmma` step: `acc` plus the 32 products of `a` and `b` (E4M3 codes), by the module's model.
pub fn dot_e4m3_k32(a: &[u8; E4M3_K], b: &[u8; E4M3_K], acc: f32) -> f32 {
    e4m3_step(&E4m3Vector::decode(a), &E4m3Vector::decode(b), acc)
}

/// One E4M3 `wgmma` step of a tile: `acc[m * N + n] = dot_e4m3_k32(a_rows[m], b_cols[n], acc[m * N + n])` with N the
/// number of columns. Each operand is decoded once.
///
/// # Panics
///
/// If `acc` does not hold one element per row and column.
pub fn mma_e4m3_k32(a_rows: &[[u8; E4M3_K]], b_cols: &[[u8; E4M3_K]], acc: &mut [f32]) {
    assert_eq!(acc.len(), a_rows.len() * b_cols.len(), "accumulators must be rows x columns");
    if b_cols.is_empty() {
        return;
    }
    let columns: Vec<E4m3Vector> = b_cols.iter().map(E4m3Vector::decode).collect();
    for (codes, acc_row) in a_rows.iter().zip(acc.chunks_exact_mut(b_cols.len())) {
        let row = E4m3Vector::decode(codes);
        for (acc, column) in acc_row.iter_mut().zip(&columns) {
            *acc = e4m3_step(&row, column, *acc);
        }
    }
}

/// Exponent of a zero BF16 operand: low enough that its products never win step 2.
const BF16_ZERO: i32 = -4096;
/// Smallest exponent of a non-zero BF16 product.
const BF16_COUNTS: i32 = -252;

/// The 16 operands of one side of a BF16 step.
#[derive(Clone)]
struct Bf16Vector {
    /// Significands with their sign, as integers of 8 bits.
    significand: [i32; BF16_K],
    exponent: [i32; BF16_K],
    /// An infinity or NaN is among the operands: the step leaves the integer path.
    is_special: bool,
    bits: [u16; BF16_K],
}

impl Bf16Vector {
    #[inline]
    fn decode(bits: &[u16; BF16_K]) -> Self {
        let mut vector = Self { significand: [0; BF16_K], exponent: [0; BF16_K], is_special: false, bits: *bits };
        for (k, &x) in bits.iter().enumerate() {
            let field = i32::from((x >> 7) & 0xFF);
            let fraction = i32::from(x & 0x7F);
            let magnitude = if field == 0 { fraction } else { fraction | 0x80 };
            vector.significand[k] = if x >> 15 == 1 { -magnitude } else { magnitude };
            vector.exponent[k] = if magnitude == 0 { BF16_ZERO } else { field.max(1) - 127 };
            vector.is_special |= field == 0xFF;
        }
        vector
    }
}

#[inline]
fn bf16_step(a: &Bf16Vector, b: &Bf16Vector, acc: f32) -> f32 {
    if a.is_special || b.is_special || !acc.is_finite() {
        return bf16_special(a, b, acc);
    }
    let mut exponent = if acc == 0.0 { 2 * BF16_ZERO } else { exponent_f32(acc) };
    for k in 0..BF16_K {
        exponent = exponent.max(a.exponent[k].wrapping_add(b.exponent[k]));
    }
    if exponent < BF16_COUNTS {
        return 0.0;
    }
    // A product has 16 significant bits and 14 fraction bits: in units of the cut it is below 2^27, and FP32 scales it
    // exactly. The conversion to integer is the cut. Eight of them fit an i32, hence two partial sums.
    let mut partial = [0i32; 2];
    for k in 0..BF16_K {
        let below = exponent.wrapping_sub(a.exponent[k].wrapping_add(b.exponent[k]));
        let to_units = f32::from_bits((127 + BF16_CUT - 14i32).wrapping_sub(below).max(0).wrapping_shl(23) as u32);
        let term = (a.significand[k].wrapping_mul(b.significand[k]) as f32 * to_units) as i32;
        partial[k / 8] = partial[k / 8].wrapping_add(term);
    }
    let mut sum = i64::from(partial[0]) + i64::from(partial[1]);
    sum += (f64::from(acc) * pow2_f64(BF16_CUT - exponent)) as i64;
    truncate_f64(sum as f64 * pow2_f64(exponent - BF16_CUT))
}

/// A BF16 step with an infinite or NaN term: IEEE 754 addition of the special terms alone.
#[cold]
fn bf16_special(a: &Bf16Vector, b: &Bf16Vector, acc: f32) -> f32 {
    let widen = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
    // Finite products cannot overflow FP64, and finite terms do not matter beside an infinity.
    let sum: f64 = (0..BF16_K)
        .map(|k| widen(a.bits[k]) * widen(b.bits[k]))
        .chain([f64::from(acc)])
        .filter(|term| !term.is_finite())
        .sum();
    if sum.is_nan() { f32::from_bits(F32_NAN) } else { sum as f32 }
}

/// Step 5 for BF16: toward zero to FP32, on the subnormal grid where that is coarser; infinite from 2^128.
#[inline]
fn truncate_f64(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest).abs() > value.abs() && value.abs() < pow2_f64(128) {
        // One step toward zero; a value that was rounded up from zero is the smallest subnormal, and loses its sign.
        f32::from_bits(nearest.to_bits() - 1) + 0.0
    } else {
        nearest + 0.0
    }
}

/// Exponent field of a finite FP32, unbiased, as step 1 takes it: -126 for subnormals, which are not normalised.
#[inline]
fn exponent_f32(x: f32) -> i32 {
    (((x.to_bits() >> 23) & 0xFF) as i32).max(1) - 127
}

/// One BF16 `wgmma` or `mma.sync` step: `acc` plus the 16 products of `a` and `b` (BF16 bits), by the module's model.
pub fn dot_bf16_k16(a: &[u16; BF16_K], b: &[u16; BF16_K], acc: f32) -> f32 {
    bf16_step(&Bf16Vector::decode(a), &Bf16Vector::decode(b), acc)
}

/// One BF16 step of a tile: `acc[m * N + n] = dot_bf16_k16(a_rows[m], b_cols[n], acc[m * N + n])` with N the number of
/// columns. Each operand is decoded once.
///
/// # Panics
///
/// If `acc` does not hold one element per row and column.
pub fn mma_bf16_k16(a_rows: &[[u16; BF16_K]], b_cols: &[[u16; BF16_K]], acc: &mut [f32]) {
    assert_eq!(acc.len(), a_rows.len() * b_cols.len(), "accumulators must be rows x columns");
    if b_cols.is_empty() {
        return;
    }
    let columns: Vec<Bf16Vector> = b_cols.iter().map(Bf16Vector::decode).collect();
    for (bits, acc_row) in a_rows.iter().zip(acc.chunks_exact_mut(b_cols.len())) {
        let row = Bf16Vector::decode(bits);
        for (acc, column) in acc_row.iter_mut().zip(&columns) {
            *acc = bf16_step(&row, column, *acc);
        }
    }
}

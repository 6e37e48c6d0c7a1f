//! The score of one row.
//!
//! ```text
//! dot(h) = q[h] . key                                  FP32, from the given dot product
//! r[h]   = bf16(relu(dot(h)))
//! s0, s1 = BF16x2 chains from 0: for i = 0, 4, .. 28   s0 = fma((r[i], r[i+1]), (w[i], w[i+1]), s0), s1 with i+2, i+3
//! total  = (s0 + s1).lo + (s0 + s1).hi                 BF16 adds
//! logit  = bf16(float(total) * scale)                  -0 stored as +0, NaN as 0xFFFE
//! ```
//! The product with the scale is one FP32 multiplication, then one conversion to BF16; with a power-of-two scale that is
//! the exact product rounded once.

use crate::consts::{DIM, HEADS, KEYS_PER_TOP};
use crate::numerics::{bf16, e4m3, order16, pow2};

/// E4M3 codes as multiples of 2^-9; `None` for NaN.
const FIXED: [Option<i32>; 256] = {
    let mut table = [None; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e4m3::to_fixed(code as u8);
        code += 1;
    }
    table
};

/// The exact dot product of two E4M3 vectors, rounded once to FP32; NaN if any code is.
///
/// A product has at most 36 bits and the sum 43, in units of 2^-18: exact in an `i64`.
pub fn dot_exact(query: &[u8; DIM], key: &[u8; DIM]) -> f32 {
    let mut sum = 0i64;
    for (&a, &b) in query.iter().zip(key) {
        let (Some(a), Some(b)) = (FIXED[a as usize], FIXED[b as usize]) else { return f32::NAN };
        sum += i64::from(a) * i64::from(b);
    }
    // The integer conversion is the one rounding; the power of two is exact (no result lies near FP32's ends).
    sum as f32 * pow2::exp2(-2 * e4m3::FIXED_FRACTION_BITS as i32)
}

/// The weighted head sum of one key, BF16, from the dot products of its 32 heads.
pub fn head_sum(dots: &[f32; HEADS], weights: &[u16; HEADS]) -> u16 {
    let relu = dots.map(bf16::from_f32_relu);
    let (mut s0, mut s1) = ([0u16; 2], [0u16; 2]);
    for i in (0..HEADS).step_by(4) {
        for lane in 0..2 {
            s0[lane] = bf16::fma(relu[i + lane], weights[i + lane], s0[lane]);
            s1[lane] = bf16::fma(relu[i + 2 + lane], weights[i + 2 + lane], s1[lane]);
        }
    }
    let [lo, hi] = [bf16::add(s0[0], s1[0]), bf16::add(s0[1], s1[1])];
    bf16::add(lo, hi)
}

/// The stored logit of a head sum under a key scale (1 where the scales are inside the dot product, as in MXFP4).
pub fn logit(total: u16, scale: f32) -> u16 {
    order16::canonical_logit(bf16::from_f32(bf16::to_f32(total) * scale))
}

/// The logits of one row, BF16, one per `(codes, scale)` of `keys`.
///
/// `dot` is the dot product of one head: [`dot_exact`], or a model of a tensor core.
pub fn score_row<'a>(
    query: &[u8; HEADS * DIM],
    weights: &[u16; HEADS],
    keys: impl IntoIterator<Item = (&'a [u8; DIM], f32)>,
    dot: impl Fn(&[u8; DIM], &[u8; DIM]) -> f32,
) -> Vec<u16> {
    let (heads, _) = query.as_chunks::<DIM>();
    keys.into_iter()
        .map(|(key, scale)| {
            let dots = std::array::from_fn(|head| dot(&heads[head], key));
            logit(head_sum(&dots, weights), scale)
        })
        .collect()
}

/// The largest key of every 8 consecutive logits; logits at or past `row_len` count as no key. `logits` may be longer or
/// shorter than the row; the result has `ceil(logits.len() / 8)` entries.
pub fn tops(logits: &[u16], row_len: usize) -> Vec<u16> {
    let keys: Vec<u16> = logits
        .iter()
        .enumerate()
        .map(|(i, &bits)| if i < row_len { order16::key_of(bits) } else { order16::KEY_NONE })
        .collect();
    keys.chunks(KEYS_PER_TOP).map(|eight| eight.iter().copied().max().unwrap_or(order16::KEY_NONE)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16 as reference;
    use proptest::prelude::*;

    const ONE: u16 = 0x3F80;

    /// `(heads' dots, weights)` with zeros but for the given leading heads.
    fn heads(dots: &[f32], weights: &[f32]) -> ([f32; HEADS], [u16; HEADS]) {
        let at = |values: &[f32], i: usize| values.get(i).copied().unwrap_or(0.0);
        (std::array::from_fn(|i| at(dots, i)), std::array::from_fn(|i| reference::from_f32(at(weights, i)).to_bits()))
    }

    #[test]
    fn relu_comes_before_the_head_weight() {
        let (dots, weights) = heads(&[-3.0, 2.0], &[1.0, -1.0]);
        assert_eq!(bf16::to_f32(logit(head_sum(&dots, &weights), 1.0)), -2.0);
    }

    #[test]
    fn heads_are_summed_in_four_chains() {
        // 256 + 1 is not a BF16: a 1 added to a chain at 256 is lost, 1s that met in another chain first are not.
        let mut dots = [0.0; HEADS];
        let weights = [ONE; HEADS];
        (dots[0], dots[4], dots[8]) = (256.0, 1.0, 1.0);
        assert_eq!(bf16::to_f32(head_sum(&dots, &weights)), 256.0, "one chain: heads 0, 4, 8");
        (dots[4], dots[8], dots[2], dots[6]) = (0.0, 0.0, 1.0, 1.0);
        assert_eq!(bf16::to_f32(head_sum(&dots, &weights)), 258.0, "heads 2 and 6 meet first");
        (dots[2], dots[6], dots[1], dots[3]) = (0.0, 0.0, 1.0, 1.0);
        assert_eq!(bf16::to_f32(head_sum(&dots, &weights)), 258.0, "heads 1 and 3 meet before head 0");
        (dots[1], dots[3], dots[2], dots[5]) = (0.0, 0.0, 1.0, 1.0);
        assert_eq!(bf16::to_f32(head_sum(&dots, &weights)), 256.0, "head 2 joins head 0 first, then heads 5's chain");
    }

    #[test]
    fn stored_logits_are_never_minus_zero_and_have_one_nan() {
        assert_eq!(logit(0x8000, 1.0), 0);
        assert_eq!(logit(0x8001, pow2::exp2(-20)), 0, "underflow to -0");
        for (total, scale) in [(bf16::NAN, 1.0), (ONE, f32::NAN), (0, f32::INFINITY), (0xFFC0, -1.0)] {
            assert_eq!(logit(total, scale), order16::LOGIT_NAN);
        }
        assert_eq!(logit(0xBF80, f32::INFINITY), 0xFF80);
    }

    #[test]
    fn a_nan_code_or_weight_makes_the_logit_nan() {
        let mut key = [0x38; DIM];
        let query = [[0x38; DIM]; HEADS];
        let (mut weights, dot) = ([ONE; HEADS], dot_exact);
        let score = |weights: &[u16; HEADS], key: &[u8; DIM]| {
            score_row(query.as_flattened().try_into().unwrap(), weights, [(key, 1.0)], dot)[0]
        };
        assert_eq!(bf16::to_f32(score(&weights, &key)), 4096.0);
        key[77] = 0xFF;
        assert_eq!(score(&weights, &key), order16::LOGIT_NAN);
        key[77] = 0x38;
        weights[31] = 0xFFFF;
        assert_eq!(score(&weights, &key), order16::LOGIT_NAN);
    }

    #[test]
    fn dot_exact_spans_the_whole_range() {
        assert_eq!(dot_exact(&[0x7E; DIM], &[0x7E; DIM]), 448.0 * 448.0 * 128.0);
        assert_eq!(dot_exact(&[0x01; DIM], &[0x81; DIM]), -128.0 / (1 << 18) as f32);
        assert_eq!(dot_exact(&[0x80; DIM], &[0x01; DIM]).to_bits(), 0);
        let mut query = [0; DIM];
        (query[0], query[1]) = (0x7E, 0x01);
        let mut key = [0; DIM];
        (key[0], key[1]) = (0x7E, 0x01);
        // 448^2 + 2^-18 needs 36 bits: rounded to the nearest FP32.
        assert_eq!(dot_exact(&query, &key), 448.0 * 448.0);
    }

    #[test]
    fn tops_count_positions_past_the_row_as_no_key() {
        let logits: Vec<u16> = (0..20).map(|i| reference::from_f32(i as f32).to_bits()).collect();
        let key = |x: f32| order16::order16(reference::from_f32(x).to_bits());
        assert_eq!(tops(&logits, 20), [key(7.0), key(15.0), key(19.0)]);
        assert_eq!(tops(&logits, 9), [key(7.0), key(8.0), 0]);
        assert_eq!(tops(&logits, 0), [0, 0, 0]);
        assert_eq!(tops(&[0xFFFF, 0x7FC0], 2), [order16::KEY_NAN], "foreign NaNs rank lowest but are keys");
    }

    proptest! {
        #[test]
        fn dot_exact_is_the_f64_dot_rounded_once(query in any::<[u8; 32]>(), key in any::<[u8; 32]>()) {
            // 43 bits at most: f64 sums without rounding.
            let tile = |codes: [u8; 32]| -> [u8; DIM] { std::array::from_fn(|i| codes[i % 32].rotate_left(i as u32 / 32)) };
            let (query, key) = (tile(query), tile(key));
            let want = query.iter().zip(&key).map(|(&a, &b)| f64::from(e4m3::to_f32(a)) * f64::from(e4m3::to_f32(b))).sum::<f64>();
            let got = dot_exact(&query, &key);
            prop_assert!(got == want as f32 || got.is_nan() && want.is_nan(), "{} {}", got, want);
        }

        #[test]
        fn a_power_of_two_scale_rounds_the_exact_product_once(total in any::<u16>(), exponent in -127i32..=127) {
            let exact = reference::from_bits(total).to_f64() * 2f64.powi(exponent);
            // Eight significant bits times a power of two: FP32 drops bits only far below BF16's smallest half.
            let want = order16::canonical_logit(reference::from_f64(exact).to_bits());
            prop_assert_eq!(logit(total, pow2::exp2(exponent)), want);
        }
    }
}

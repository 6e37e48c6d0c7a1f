//! The MLA query and KV insert of one token.
//!
//! ```text
//! q_c     = bf16((q_a * r) * w_qa)      r = rsqrt(sum(q_a^2) / 1536 + eps), in one of two forms
//! q[h]    = bf16(q_c . Q_B[h])          192 rows: 128 latent, 64 rope
//! query   = bf16(q[h][..128] . W_UK[h]) then q[h][128..]; FP8: e4m3(that * q_scale_inv)
//! latent  = bf16((kv_c * r) * w_kva)    r = rsqrt(fma(sum(kv_c^2), 1/512, eps))
//! entry   = latent and k_pe in the cache's form
//! ```
//! Sums of squares have the order that the small-batch kernel fixes: eight contiguous values by FMA, then a tree over 32
//! neighbours with distances 1, 2, 4, 8, 16, then one group of 256 values after the other. Dot products are exact (f64,
//! rounded once to FP32): a kernel may differ in the last bit.
//!
//! A NaN element does not count in an amax and becomes the format's NaN, or +6 in E2M1 and -448 in the K3 form.

use crate::consts::{KV_LORA, NOPE, Q_HEAD, Q_LORA, ROPE};
use crate::layout::mla_entry::{
    self, DS_LATENT, DS_ROPE, DS_TILE, FP8_LATENT, FP8_ROPE, MlaCacheForm, NVFP4_BLOCK, NVFP4_LATENT, NVFP4_ROPE,
};
use crate::layout::mla_rows::{K_PE, KV_C, LATENT, Q_A, QKV, QUERY, QUERY_ROPE};
use crate::numerics::{bf16, e2m1, e4m3, pow2};

/// The two functions whose last bits are the hardware's own.
#[derive(Clone, Copy)]
pub struct Approximate<'a> {
    /// `rsqrt.approx` of a normal number.
    pub rsqrt: &'a dyn Fn(f32) -> f32,
    /// `div.full` by 1536.
    pub div_full_1536: &'a dyn Fn(f32) -> f32,
}

impl Approximate<'static> {
    /// Both correctly rounded: what an exact machine would do.
    pub fn exact() -> Self {
        Approximate { rsqrt: &|x| (1.0 / f64::from(x).sqrt()) as f32, div_full_1536: &|x| x / Q_LORA as f32 }
    }
}

/// How the query's RMSNorm divides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueryNorm {
    /// IEEE division (DSA).
    Dsa,
    /// `div.full`, subnormals flushed (K3).
    K3,
}

/// The weights of one layer on one rank, BF16.
#[derive(Debug, Clone, Copy)]
pub struct MlaWeights<'a> {
    /// `[1536]`
    pub q_a: &'a [u16],
    /// `[512]`
    pub kv_a: &'a [u16],
    /// `[heads * 192, 1536]`
    pub q_b: &'a [u16],
    /// `[heads, 128, 512]`
    pub uk: &'a [u16],
}

/// Sum of squares in the fixed order.
pub fn sum_of_squares(x: &[u16]) -> f32 {
    let threads: Vec<f32> = x
        .chunks(8)
        .map(|chunk| chunk.iter().map(|&x| bf16::to_f32(x)).fold(0.0, |sum: f32, x| x.mul_add(x, sum)))
        .collect();
    let warps = threads.chunks(32).map(|warp| {
        let mut tree = warp.to_vec();
        while tree.len() > 1 {
            tree = tree.chunks(2).map(|pair| pair[0] + pair[1]).collect();
        }
        tree[0]
    });
    warps.fold(0.0, |total, warp| total + warp)
}

fn normalise(x: &[u16], r: f32, weights: &[u16]) -> Vec<u16> {
    x.iter().zip(weights).map(|(&x, &w)| bf16::from_f32(bf16::to_f32(x) * r * bf16::to_f32(w))).collect()
}

/// The normalised compressed query, BF16 `[1536]`, of a `qkv` row.
pub fn query_c(qkv: &[u16], weights: &[u16], eps: f32, norm: QueryNorm, approximate: Approximate<'_>) -> Vec<u16> {
    assert_eq!(qkv.len(), QKV);
    let total = sum_of_squares(&qkv[Q_A]);
    let mean = match norm {
        QueryNorm::Dsa => total / Q_LORA as f32,
        QueryNorm::K3 => (approximate.div_full_1536)(total),
    };
    normalise(&qkv[Q_A], (approximate.rsqrt)(mean + eps), weights)
}

fn dot(a: &[u16], b: impl Iterator<Item = u16>) -> f32 {
    a.iter().zip(b).map(|(&a, b)| f64::from(bf16::to_f32(a)) * f64::from(bf16::to_f32(b))).sum::<f64>() as f32
}

/// The query of head `head`, BF16 `[576]`: 512 latent columns, then 64 rope.
pub fn query_head(q_c: &[u16], weights: &MlaWeights<'_>, head: usize) -> Vec<u16> {
    let rows: Vec<u16> = (0..Q_HEAD)
        .map(|row| {
            let at = (head * Q_HEAD + row) * Q_LORA;
            bf16::from_f32(dot(q_c, weights.q_b[at..at + Q_LORA].iter().copied()))
        })
        .collect();
    let mut query = vec![0; QUERY];
    for (column, out) in query[LATENT].iter_mut().enumerate() {
        let down = (0..NOPE).map(|p| weights.uk[(head * NOPE + p) * KV_LORA + column]);
        *out = bf16::from_f32(dot(&rows[..NOPE], down));
    }
    query[QUERY_ROPE].copy_from_slice(&rows[NOPE..]);
    query
}

/// BF16 query values as E4M3.
pub fn query_fp8(query: &[u16], q_scale_inv: f32) -> Vec<u8> {
    query.iter().map(|&x| e4m3::from_f32(bf16::to_f32(x) * q_scale_inv)).collect()
}

/// The normalised latent, BF16 `[512]`, of a `qkv` row.
pub fn latent(qkv: &[u16], weights: &[u16], eps: f32, approximate: Approximate<'_>) -> Vec<u16> {
    let mean = sum_of_squares(&qkv[KV_C]).mul_add(1.0 / KV_LORA as f32, eps);
    normalise(&qkv[KV_C], (approximate.rsqrt)(mean), weights)
}

/// Largest magnitude; a NaN does not count.
fn amax(x: &[u16]) -> f32 {
    x.iter().map(|&x| bf16::to_f32(x).abs()).fold(0.0, f32::max)
}

/// `fp8_ds_mla`: the scale of a tile, `2^ceil(log2(max(amax / 448, 1e-4)))`.
pub fn ds_scale(amax: f32) -> f32 {
    let quotient = (amax / e4m3::MAX).max(1e-4);
    if quotient.is_infinite() { quotient } else { pow2::pow2_ceil(quotient) }
}

/// `nvfp4_ds_mla`: the E4M3 code of a block's scale: `max(amax / 6, 2^-9)`, rounded up to a code where there is one.
pub fn nvfp4_scale(amax: f32) -> u8 {
    let f = (amax / e2m1::MAX).max(pow2::exp2(-9));
    let code = e4m3::from_f32(f);
    if e4m3::to_f32(code) < f && code < 0x7E { code + 1 } else { code }
}

/// The cache entry of a normalised latent and a `k_pe`. `k_scale` is the per-tensor scale, of which the K3 form
/// multiplies by the inverse; the block-scaled forms take none.
pub fn entry(form: MlaCacheForm, latent: &[u16], k_pe: &[u16], k_scale: f32) -> Vec<u8> {
    assert_eq!((latent.len(), k_pe.len()), (KV_LORA, ROPE));
    let mut entry = vec![0; form.entry_bytes()];
    let wide = |x: u16| bf16::to_f32(x);
    match form {
        MlaCacheForm::Fp8Ds => {
            for (t, tile) in latent.chunks(DS_TILE).enumerate() {
                let scale = ds_scale(amax(tile));
                for (out, &x) in entry[DS_LATENT][t * DS_TILE..].iter_mut().zip(tile) {
                    *out = e4m3::from_f32(wide(x) / scale);
                }
                let at = mla_entry::ds_scale(t);
                entry[at..at + 4].copy_from_slice(&scale.to_le_bytes());
            }
            for (out, x) in entry[DS_ROPE].chunks_mut(2).zip(k_pe) {
                out.copy_from_slice(&x.to_le_bytes());
            }
        }
        MlaCacheForm::Fp8Divide | MlaCacheForm::Fp8Multiply => {
            let inverse = 1.0 / k_scale;
            #[allow(clippy::manual_clamp)] // unlike `clamp`, takes a NaN to the lower bound
            let code = |x: u16| match form {
                MlaCacheForm::Fp8Multiply => e4m3::from_f32((wide(x) * inverse).max(-e4m3::MAX).min(e4m3::MAX)),
                _ => e4m3::from_f32(wide(x) / k_scale),
            };
            entry[FP8_LATENT].iter_mut().zip(latent).for_each(|(out, &x)| *out = code(x));
            entry[FP8_ROPE].iter_mut().zip(k_pe).for_each(|(out, &x)| *out = code(x));
        }
        MlaCacheForm::Nvfp4Ds => {
            for (b, block) in latent.chunks(NVFP4_BLOCK).enumerate() {
                let code = nvfp4_scale(amax(block));
                let inverse = 1.0 / e4m3::to_f32(code);
                let nibbles: Vec<u8> = block.iter().map(|&x| e2m1::from_f32(wide(x) * inverse)).collect();
                let bytes = &mut entry[NVFP4_LATENT][b * NVFP4_BLOCK / 2..];
                for (out, pair) in bytes.iter_mut().zip(nibbles.chunks(2)) {
                    *out = e2m1::pack(pair[0], pair[1]);
                }
                entry[mla_entry::nvfp4_scale(b)] = code;
            }
            entry[NVFP4_ROPE].iter_mut().zip(k_pe).for_each(|(out, &x)| *out = e4m3::from_f32(wide(x)));
        }
    }
    entry
}

/// The cache entry of a `qkv` row.
pub fn insert(
    form: MlaCacheForm,
    qkv: &[u16],
    weights: &[u16],
    eps: f32,
    k_scale: f32,
    approximate: Approximate<'_>,
) -> Vec<u8> {
    entry(form, &latent(qkv, weights, eps, approximate), &qkv[K_PE], k_scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(x: f32) -> u16 {
        bf16::from_f32(x)
    }

    #[test]
    fn the_sum_takes_eight_then_neighbours_then_groups() {
        // 2^24 swallows a 1 that is added to it alone: the place of each 1 shows in the sum.
        let big = bits(4096.0);
        let mut x = vec![0; 512];
        (x[0], x[1]) = (big, bits(1.0));
        assert_eq!(sum_of_squares(&x), 16_777_216.0, "1 after 2^24 in one chain");
        (x[0], x[1]) = (bits(1.0), big);
        x[2] = bits(1.0);
        assert_eq!(sum_of_squares(&x), 16_777_216.0, "2^24 + 1 ties to even, twice");
        x = vec![0; 512];
        (x[0], x[8], x[16]) = (big, bits(1.0), bits(1.0));
        assert_eq!(sum_of_squares(&x), 16_777_216.0, "neighbours 0 and 1 first");
        x = vec![0; 512];
        (x[0], x[16], x[24]) = (big, bits(1.0), bits(1.0));
        assert_eq!(sum_of_squares(&x), 16_777_218.0, "2 and 3 add up before they meet 0 and 1");
        x = vec![0; 512];
        (x[0], x[256], x[256 + 8]) = (big, bits(1.0), bits(1.0));
        assert_eq!(sum_of_squares(&x), 16_777_218.0, "groups of 256 are summed on their own");
    }

    #[test]
    fn a_zero_row_stays_zero_and_weights_pass_through_ones() {
        let zero = vec![0; QKV];
        let weights: Vec<u16> = (0..Q_LORA).map(|i| bits([1.0, 2.0][i % 2])).collect();
        for norm in [QueryNorm::Dsa, QueryNorm::K3] {
            assert!(query_c(&zero, &weights, 1e-5, norm, Approximate::exact()).iter().all(|x| *x == 0));
            let ones = vec![bits(1.0); QKV];
            assert_eq!(query_c(&ones, &weights, 1e-5, norm, Approximate::exact()), weights);
        }
    }

    #[test]
    fn ds_scales_are_the_least_powers_of_two_that_fit() {
        for (amax, scale) in
            [(0.0, 2f32.powi(-13)), (3e-38, 2f32.powi(-13)), (56.0, 0.125), (56.000004, 0.25), (57.3, 0.25)]
        {
            assert_eq!(ds_scale(amax), scale, "{amax}");
            assert!(scale >= amax / 448.0);
        }
        assert_eq!(ds_scale(f32::INFINITY), f32::INFINITY);
    }

    #[test]
    fn nvfp4_scales_round_up() {
        for x in 0..=0x7F7F {
            let amax = bf16::to_f32(x);
            let (code, f) = (nvfp4_scale(amax), (amax / 6.0).max(2f32.powi(-9)));
            assert!((1..=0x7E).contains(&code), "{amax}");
            assert!(e4m3::to_f32(code) >= f || code == 0x7E, "{amax}: {code:02x}");
            assert!(code == 1 || e4m3::to_f32(code - 1) < f, "{amax}: {code:02x} is not the least");
        }
    }

    #[test]
    fn a_nan_is_left_out_of_scales_and_stored_as_the_form_says() {
        let mut latent = vec![bits(3.0); KV_LORA];
        latent[5] = 0xFFC1;
        let k_pe = vec![bits(-1.0); ROPE];
        let ds = entry(MlaCacheForm::Fp8Ds, &latent, &k_pe, f32::NAN);
        let clean = entry(MlaCacheForm::Fp8Ds, &[bits(3.0); KV_LORA], &k_pe, f32::NAN);
        assert_eq!((ds[5], &ds[512..528]), (0x7F, &clean[512..528]));
        assert_eq!(entry(MlaCacheForm::Fp8Divide, &latent, &k_pe, 1.0)[5], 0x7F);
        assert_eq!(entry(MlaCacheForm::Fp8Multiply, &latent, &k_pe, 1.0)[5], 0xFE);
        let nvfp4 = entry(MlaCacheForm::Nvfp4Ds, &latent, &k_pe, f32::NAN);
        assert_eq!(nvfp4[2], 0x77, "3 is the block's largest, 6 in its scale; NaN is +6 too");
    }
}

//! Number formats and the norm's arithmetic, as every kernel of the crate does them.

use dsa_core::consts::Q_LORA;
use ptx::*;

use crate::shape::MlaShape;

/// BF16 pairs as FP32, in order.
#[track_caller]
pub(crate) fn unpack<const N: usize>(pairs: [Reg<u32>; N]) -> Vec<Reg<f32>> {
    pairs
        .into_iter()
        .flat_map(|pair| {
            let pair = Reg::<Bf16x2>::from_bits(pair);
            [pair.low_f32(), pair.high_f32()]
        })
        .collect()
}

/// As [`unpack`], in instructions that the assembler does not take for the same.
#[track_caller]
pub(crate) fn unpack_by_bytes<const N: usize>(pairs: [Reg<u32>; N]) -> Vec<Reg<f32>> {
    // Two bytes of zero below either half.
    let halves = |pair: Reg<u32>| [0x1044u32, 0x3244].map(|selector| pair.permute(0u32, selector).bitcast());
    pairs.into_iter().flat_map(halves).collect()
}

/// Eight FP32 as BF16 pairs.
#[track_caller]
pub(crate) fn pack(values: &[Reg<f32>]) -> [Reg<u32>; 4] {
    std::array::from_fn(|i| Reg::<Bf16x2>::from_f32(values[2 * i], values[2 * i + 1]).to_bits())
}

/// Sum of squares of a thread's eight values, by FMA in order.
#[track_caller]
pub(crate) fn squares(values: &[Reg<f32>]) -> Reg<f32> {
    values.iter().fold(Reg::from(0.0f32), |sum, x| x.fma(*x, sum))
}

/// The factor of the query's RMSNorm for a sum of squares.
#[track_caller]
pub(crate) fn query_rsqrt(shape: &MlaShape, total: Reg<f32>, eps: Reg<f32>) -> Reg<f32> {
    if shape.is_k3() {
        (total.div_full(Q_LORA as f32) + eps).math(Math::RsqrtApproxFtz)
    } else {
        (total.div_rn(Q_LORA as f32) + eps).math(Math::RsqrtApprox)
    }
}

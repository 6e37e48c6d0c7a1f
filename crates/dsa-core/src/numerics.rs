//! The number formats of the indexer, host side: one module per format, each exact.
//!
//! All conversions work on bit patterns (`u16` for BF16, `u8` for E4M3 and UE8M0, the low nibble of a `u8` for E2M1),
//! as the kernels do, so that NaN patterns and signed zeros are visible.

pub mod bf16;
pub mod e2m1;
pub mod e4m3;
pub mod order16;
pub mod pow2;
pub mod ue8m0;

/// Rounds a finite `x` to nearest-even on a binary grid of `fraction_bits` bits below the leading one, the grid's
/// spacing being constant below `2^exponent_min` (subnormals). Returns the exponent of `x`'s binade (at least
/// `exponent_min`) and the magnitude as a multiple of `2^(exponent - fraction_bits)`.
///
/// The multiple may reach `2^(fraction_bits + 1)`, the first value of the next binade: adding it to the exponent field
/// carries, so a caller need not look at that case.
fn round_to_grid(x: f32, exponent_min: i32, fraction_bits: i32) -> (i32, u32) {
    debug_assert!(x.is_finite());
    let magnitude = x.abs();
    let exponent = (((magnitude.to_bits() >> 23) as i32) - 127).max(exponent_min);
    // Scaling by a power of two is exact here: the formats' grids are far above the FP32 subnormals.
    let multiple = (magnitude * pow2::exp2(fraction_bits - exponent)).round_ties_even();
    (exponent, multiple as u32)
}

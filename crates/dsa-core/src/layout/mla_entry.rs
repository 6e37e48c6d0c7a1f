//! One token's entry in the MLA cache, in its three layouts. Entries of a page are a token stride apart (at least an
//! entry), pages a page stride.
//!
//! `fp8_ds_mla`, 656 bytes: latent in 128-column tiles, each with a power-of-two scale, and the rope part in BF16.
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | latent | `0..512` | E4M3 | 512 | 16 | the MLA query | sparse attention |
//! | scales | `512..528` | FP32, one per 128 columns | 4 | 16 | the MLA query | sparse attention |
//! | rope | `528..656` | BF16 | 64 | 16 | the MLA query | sparse attention |
//!
//! Per-tensor FP8, 576 bytes; the divide (DSA) and the multiply (K3) form of the conversion share it:
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | latent | `0..512` | E4M3 | 512 | 16 | the MLA query | sparse attention |
//! | rope | `512..576` | E4M3 | 64 | 16 | the MLA query | sparse attention |
//!
//! `nvfp4_ds_mla`, 352 bytes:
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | latent | `0..256` | E2M1 pairs, low nibble = even column | 256 | 16 | the MLA query | sparse attention |
//! | rope | `256..320` | E4M3, unscaled | 64 | 16 | the MLA query | sparse attention |
//! | scales | `320..352` | E4M3, one per 16 columns, order of [`nvfp4_scale`] | 32 | 16 | the MLA query | sparse attention |

use std::ops::Range;

use super::field::Field;
use crate::consts::{KV_LORA, ROPE};

/// `fp8_ds_mla`: columns that share a scale.
pub const DS_TILE: usize = 128;
/// `fp8_ds_mla`: the latent.
pub const DS_LATENT: Range<usize> = 0..KV_LORA;
/// `fp8_ds_mla`: the scales.
pub const DS_SCALES: Range<usize> = DS_LATENT.end..DS_LATENT.end + 4 * (KV_LORA / DS_TILE);
/// `fp8_ds_mla`: the rope part.
pub const DS_ROPE: Range<usize> = DS_SCALES.end..DS_SCALES.end + 2 * ROPE;
/// `fp8_ds_mla`: bytes of an entry.
pub const DS_BYTES: usize = DS_ROPE.end;

/// Per-tensor FP8: the latent.
pub const FP8_LATENT: Range<usize> = 0..KV_LORA;
/// Per-tensor FP8: the rope part.
pub const FP8_ROPE: Range<usize> = FP8_LATENT.end..FP8_LATENT.end + ROPE;
/// Per-tensor FP8: bytes of an entry.
pub const FP8_BYTES: usize = FP8_ROPE.end;

/// `nvfp4_ds_mla`: columns that share a scale.
pub const NVFP4_BLOCK: usize = 16;
/// `nvfp4_ds_mla`: the latent.
pub const NVFP4_LATENT: Range<usize> = 0..KV_LORA / 2;
/// `nvfp4_ds_mla`: the rope part.
pub const NVFP4_ROPE: Range<usize> = NVFP4_LATENT.end..NVFP4_LATENT.end + ROPE;
/// `nvfp4_ds_mla`: the scales.
pub const NVFP4_SCALES: Range<usize> = NVFP4_ROPE.end..NVFP4_ROPE.end + KV_LORA / NVFP4_BLOCK;
/// `nvfp4_ds_mla`: bytes of an entry.
pub const NVFP4_BYTES: usize = NVFP4_SCALES.end;

/// Entries, tokens and pages lie at multiples of this many bytes.
pub const ALIGN: usize = 16;

const _: () = assert!(DS_BYTES == 656 && DS_SCALES.start == 512 && DS_ROPE.start == 528);
const _: () = assert!(FP8_BYTES == 576);
const _: () = assert!(NVFP4_BYTES == 352 && NVFP4_ROPE.start == 256 && NVFP4_SCALES.start == 320);
const _: () = assert!(DS_BYTES.is_multiple_of(ALIGN) && FP8_BYTES.is_multiple_of(ALIGN));
const _: () = assert!(NVFP4_BYTES.is_multiple_of(ALIGN));

/// `fp8_ds_mla`: byte of the scale of column tile `tile` (0..4).
pub const fn ds_scale(tile: usize) -> usize {
    assert!(tile < KV_LORA / DS_TILE);
    DS_SCALES.start + 4 * tile
}

/// `nvfp4_ds_mla`: byte of the scale of columns `16 * block ..` (block in 0..32): the 8 x 4 array of scales transposed.
pub const fn nvfp4_scale(block: usize) -> usize {
    assert!(block < KV_LORA / NVFP4_BLOCK);
    NVFP4_SCALES.start + 8 * (block & 3) + (block >> 2)
}

/// What an MLA cache holds per token, and how a value becomes a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MlaCacheForm {
    /// `fp8_ds_mla`: tile scales that are powers of two, BF16 rope.
    Fp8Ds,
    /// Per-tensor FP8, divided by the scale (DSA).
    Fp8Divide,
    /// Per-tensor FP8, multiplied by the inverse scale and clamped (K3).
    Fp8Multiply,
    /// `nvfp4_ds_mla`: E2M1 in blocks of 16 with E4M3 scales, E4M3 rope.
    Nvfp4Ds,
}

impl MlaCacheForm {
    /// Every form.
    pub const ALL: [MlaCacheForm; 4] =
        [MlaCacheForm::Fp8Ds, MlaCacheForm::Fp8Divide, MlaCacheForm::Fp8Multiply, MlaCacheForm::Nvfp4Ds];

    /// Bytes of one token's entry.
    pub const fn entry_bytes(self) -> usize {
        match self {
            MlaCacheForm::Fp8Ds => DS_BYTES,
            MlaCacheForm::Fp8Divide | MlaCacheForm::Fp8Multiply => FP8_BYTES,
            MlaCacheForm::Nvfp4Ds => NVFP4_BYTES,
        }
    }

    /// The table of its entry.
    pub fn fields(self) -> Vec<Field> {
        let field = |name, bytes: Range<usize>, element_bytes| Field {
            name,
            count: bytes.len() / element_bytes,
            bytes,
            element_bytes,
            align: ALIGN,
        };
        match self {
            MlaCacheForm::Fp8Ds => {
                vec![field("latent", DS_LATENT, 1), field("scales", DS_SCALES, 4), field("rope", DS_ROPE, 2)]
            }
            MlaCacheForm::Fp8Divide | MlaCacheForm::Fp8Multiply => {
                vec![field("latent", FP8_LATENT, 1), field("rope", FP8_ROPE, 1)]
            }
            MlaCacheForm::Nvfp4Ds => {
                vec![field("latent", NVFP4_LATENT, 1), field("rope", NVFP4_ROPE, 1), field("scales", NVFP4_SCALES, 1)]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::field::tiles;

    #[test]
    fn fields_tile_every_entry() {
        for form in MlaCacheForm::ALL {
            assert!(tiles(&form.fields(), form.entry_bytes()), "{form:?}");
        }
    }

    #[test]
    fn scales_have_a_place_each() {
        let mut places: Vec<usize> = (0..32).map(nvfp4_scale).collect();
        // The inverse, as the format's readers state it: byte p holds block 4 * (p & 7) + (p >> 3).
        for (block, place) in places.iter().enumerate() {
            let p = place - NVFP4_SCALES.start;
            assert_eq!(4 * (p & 7) + (p >> 3), block);
        }
        places.sort_unstable();
        assert!(places.into_iter().eq(NVFP4_SCALES));
        assert!((0..4).map(ds_scale).eq(DS_SCALES.step_by(4)));
    }
}

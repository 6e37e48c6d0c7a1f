//! The index query of one row: 4096 bytes, in either form.
//!
//! FP8:
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | heads | `0..4096` | E4M3 | 32 x 128 | 16 | the index projection | score |
//!
//! MXFP4, packed into a row of the same size so that both forms share the row stride:
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | heads | `0..2048` | E2M1 pairs, low nibble = even element | 32 x 64 | 16 | the index projection | score |
//! | scales | `2048..2176` | 4 UE8M0 bytes per head | 32 | 16 | the index projection | score |
//! | reserved | `2176..4096` | bytes | 1920 | 16 | nobody | nobody |

use super::field::Field;
use crate::consts::{DIM, HEADS, MX_BLOCK};
use std::ops::Range;

/// Bytes of a row in both forms.
pub const BYTES: usize = HEADS * DIM;
/// MXFP4: the packed heads.
pub const MX_HEADS: Range<usize> = 0..HEADS * DIM / 2;
/// MXFP4: the block scales.
pub const MX_SCALES: Range<usize> = MX_HEADS.end..MX_HEADS.end + HEADS * (DIM / MX_BLOCK);
/// MXFP4: the unused rest.
pub const MX_RESERVED: Range<usize> = MX_SCALES.end..BYTES;

const _: () = assert!(BYTES == 4096 && MX_SCALES.start == 2048 && MX_SCALES.end == 2176);

/// The FP8 table above.
pub fn fields_fp8() -> [Field; 1] {
    [Field { name: "heads", bytes: 0..BYTES, element_bytes: 1, count: HEADS * DIM, align: 16 }]
}

/// The MXFP4 table above.
pub fn fields_mxfp4() -> [Field; 3] {
    [
        Field { name: "heads", bytes: MX_HEADS, element_bytes: 1, count: HEADS * DIM / 2, align: 16 },
        Field { name: "scales", bytes: MX_SCALES, element_bytes: 4, count: HEADS, align: 16 },
        Field {
            name: "reserved",
            bytes: MX_RESERVED,
            element_bytes: 1,
            count: MX_RESERVED.end - MX_RESERVED.start,
            align: 16,
        },
    ]
}

/// FP8: bytes of head `head` (0..32) of a row.
pub const fn head_fp8(head: usize) -> Range<usize> {
    assert!(head < HEADS);
    head * DIM..(head + 1) * DIM
}

/// MXFP4: bytes of head `head` (0..32) of a row.
pub const fn head_mxfp4(head: usize) -> Range<usize> {
    assert!(head < HEADS);
    head * (DIM / 2)..(head + 1) * (DIM / 2)
}

/// MXFP4: bytes of the scale word of head `head` (0..32) of a row.
pub const fn scale_mxfp4(head: usize) -> Range<usize> {
    assert!(head < HEADS);
    MX_SCALES.start + head * 4..MX_SCALES.start + (head + 1) * 4
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::field::tiles;

    #[test]
    fn fields_tile_the_row_in_both_forms() {
        assert!(tiles(&fields_fp8(), BYTES));
        assert!(tiles(&fields_mxfp4(), BYTES));
    }

    #[test]
    fn heads_and_scales_tile_their_fields() {
        let mut ends = (0, 0, MX_SCALES.start);
        for head in 0..HEADS {
            assert_eq!((head_fp8(head).start, head_mxfp4(head).start, scale_mxfp4(head).start), ends);
            ends = (head_fp8(head).end, head_mxfp4(head).end, scale_mxfp4(head).end);
        }
        assert_eq!(ends, (BYTES, MX_HEADS.end, MX_SCALES.end));
    }
}

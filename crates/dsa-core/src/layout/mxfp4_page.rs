//! A page of the MXFP4 indexer cache: 64 keys of E2M1, then their block-scale words.
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | keys | `0..4096` | E2M1 pairs, low nibble = even element | 64 x 64 | 16 | the cache writer | score |
//! | scales | `4096..4352` | 4 UE8M0 bytes | 64 | 16 | the cache writer | score |
//!
//! Byte `i` of a scale word scales elements `32i..32i + 32` of its key.

use super::field::Field;
use crate::consts::{DIM, MX_BLOCK, PAGE, PAGE_STRIDE_MULTIPLE};
use crate::numerics::{e2m1, ue8m0};
use std::ops::Range;

/// Bytes of one key.
pub const KEY_BYTES: usize = DIM / 2;
/// Bytes of one scale word: one per block of 32 elements.
pub const SCALE_BYTES: usize = DIM / MX_BLOCK;
/// The keys of a page.
pub const KEYS: Range<usize> = 0..PAGE * KEY_BYTES;
/// The scale words of a page.
pub const SCALES: Range<usize> = KEYS.end..KEYS.end + PAGE * SCALE_BYTES;
/// Bytes of a page.
pub const BYTES: usize = SCALES.end;

const _: () = assert!(KEYS.end == 4096 && SCALE_BYTES == 4 && BYTES == 4352);
const _: () = assert!(SCALES.start.is_multiple_of(16) && BYTES.is_multiple_of(PAGE_STRIDE_MULTIPLE));

/// The table above.
pub fn fields() -> [Field; 2] {
    [
        Field { name: "keys", bytes: KEYS, element_bytes: 1, count: PAGE * KEY_BYTES, align: 16 },
        Field { name: "scales", bytes: SCALES, element_bytes: SCALE_BYTES, count: PAGE, align: 16 },
    ]
}

/// Bytes of key `token` (0..64) of a page.
pub const fn key(token: usize) -> Range<usize> {
    assert!(token < PAGE);
    token * KEY_BYTES..(token + 1) * KEY_BYTES
}

/// Bytes of the scale word of key `token` (0..64) of a page.
pub const fn scale(token: usize) -> Range<usize> {
    assert!(token < PAGE);
    SCALES.start + token * SCALE_BYTES..SCALES.start + (token + 1) * SCALE_BYTES
}

/// Writes key `token` and its four block scales into a page.
pub fn write(page: &mut [u8], token: usize, packed: &[u8; KEY_BYTES], block_scales: [u8; SCALE_BYTES]) {
    page[key(token)].copy_from_slice(packed);
    page[scale(token)].copy_from_slice(&block_scales);
}

/// Key `token` of a page and its four block scales.
pub fn read(page: &[u8], token: usize) -> (&[u8; KEY_BYTES], [u8; SCALE_BYTES]) {
    let packed = page[key(token)].try_into().expect("a key's range has KEY_BYTES bytes");
    (packed, page[scale(token)].try_into().expect("a scale's range has SCALE_BYTES bytes"))
}

/// Unpacks a key (or a query head) to its 128 E2M1 codes.
pub fn unpack(packed: &[u8; KEY_BYTES]) -> [u8; DIM] {
    std::array::from_fn(|i| {
        let (even, odd) = e2m1::unpack(packed[i / 2]);
        if i % 2 == 0 { even } else { odd }
    })
}

/// Packs 128 E2M1 codes.
pub fn pack(codes: &[u8; DIM]) -> [u8; KEY_BYTES] {
    std::array::from_fn(|i| e2m1::pack(codes[2 * i], codes[2 * i + 1]))
}

/// The 128 values of a key, block scales applied: exact in FP32 for scale bytes up to 252, overflowing above.
pub fn decode(packed: &[u8; KEY_BYTES], block_scales: [u8; SCALE_BYTES]) -> [f32; DIM] {
    let codes = unpack(packed);
    std::array::from_fn(|i| e2m1::to_f32(codes[i]) * ue8m0::decode(block_scales[i / MX_BLOCK]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::field::tiles;

    #[test]
    fn fields_tile_the_page() {
        assert!(tiles(&fields(), BYTES));
    }

    #[test]
    fn keys_and_scales_tile_their_fields_in_token_order() {
        let mut ends = (KEYS.start, SCALES.start);
        for token in 0..PAGE {
            assert_eq!((key(token).start, scale(token).start), ends);
            ends = (key(token).end, scale(token).end);
        }
        assert_eq!(ends, (KEYS.end, SCALES.end));
    }

    #[test]
    fn write_then_read_returns_each_key_and_pack_inverts_unpack() {
        let mut page = vec![0xA5; BYTES];
        let codes = |token: usize| std::array::from_fn(|i| ((token * 7 + i * 3) & 15) as u8);
        for token in 0..PAGE {
            write(&mut page, token, &pack(&codes(token)), [token as u8; 4]);
        }
        for token in 0..PAGE {
            let (packed, scales) = read(&page, token);
            assert_eq!((unpack(packed), scales), (codes(token), [token as u8; 4]));
        }
    }

    #[test]
    fn each_scale_byte_scales_its_block_of_32() {
        let values = decode(&pack(&[2; DIM]), [127, 128, 126, 120]); // code 2 is 1.0
        for (i, value) in values.into_iter().enumerate() {
            assert_eq!(value, [1.0, 2.0, 0.5, 1.0 / 128.0][i / 32]);
        }
    }
}

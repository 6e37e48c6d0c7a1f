//! A page of the FP8 indexer cache: 64 keys, then their scale words. Keys and scales are not interleaved.
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | keys | `0..8192` | E4M3 | 64 x 128 | 16 | the cache writer | score |
//! | scales | `8192..8448` | 4 bytes | 64 | 16 | the cache writer | score |
//!
//! A scale word is four equal UE8M0 bytes (the low one counts) or one FP32: [`ScaleForm`].

use super::field::Field;
use crate::consts::{DIM, PAGE, PAGE_STRIDE_MULTIPLE};
use crate::numerics::ue8m0;
use std::ops::Range;

/// Bytes of one key.
pub const KEY_BYTES: usize = DIM;
/// Bytes of one scale word.
pub const SCALE_BYTES: usize = 4;
/// The keys of a page.
pub const KEYS: Range<usize> = 0..PAGE * KEY_BYTES;
/// The scale words of a page.
pub const SCALES: Range<usize> = KEYS.end..KEYS.end + PAGE * SCALE_BYTES;
/// Bytes of a page.
pub const BYTES: usize = SCALES.end;

const _: () = assert!(KEYS.end == 8192 && BYTES == 8448);
const _: () = assert!(SCALES.start.is_multiple_of(16) && BYTES.is_multiple_of(PAGE_STRIDE_MULTIPLE));

/// The table above.
pub fn fields() -> [Field; 2] {
    [
        Field { name: "keys", bytes: KEYS, element_bytes: 1, count: PAGE * DIM, align: 16 },
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

/// What a scale word means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleForm {
    /// Four equal UE8M0 bytes; the low byte counts.
    Ue8m0,
    /// One FP32 (Hopper caches).
    Fp32,
}

impl ScaleForm {
    /// The scale as the FP32 that a logit is multiplied by.
    pub const fn decode(self, word: u32) -> f32 {
        match self {
            Self::Ue8m0 => ue8m0::decode(word as u8),
            Self::Fp32 => f32::from_bits(word),
        }
    }

    /// The word of a scale, `None` if the form cannot hold it (UE8M0: powers of two only).
    pub const fn encode(self, scale: f32) -> Option<u32> {
        match self {
            Self::Fp32 => Some(scale.to_bits()),
            Self::Ue8m0 => match ue8m0::encode(scale) {
                Some(e) => Some(u32::from_le_bytes([e; 4])),
                None => None,
            },
        }
    }
}

/// Writes key `token` and its scale word into a page.
pub fn write(page: &mut [u8], token: usize, codes: &[u8; KEY_BYTES], scale_word: u32) {
    page[key(token)].copy_from_slice(codes);
    page[scale(token)].copy_from_slice(&scale_word.to_le_bytes());
}

/// Key `token` of a page and its scale word.
pub fn read(page: &[u8], token: usize) -> (&[u8; KEY_BYTES], u32) {
    let codes = page[key(token)].try_into().expect("a key's range has KEY_BYTES bytes");
    let word = page[scale(token)].try_into().expect("a scale's range has SCALE_BYTES bytes");
    (codes, u32::from_le_bytes(word))
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
    fn write_then_read_returns_each_key() {
        let mut page = vec![0xA5; BYTES];
        let codes = |token: usize| std::array::from_fn(|i| (token * 31 + i) as u8);
        for token in 0..PAGE {
            write(&mut page, token, &codes(token), token as u32 * 0x0101_0101);
        }
        for token in 0..PAGE {
            assert_eq!(read(&page, token), (&codes(token), token as u32 * 0x0101_0101));
        }
    }

    #[test]
    fn scale_words_decode_by_form() {
        assert_eq!(ScaleForm::Ue8m0.decode(0xFFFF_FF7F), 1.0, "only the low byte counts");
        assert_eq!(ScaleForm::Ue8m0.encode(0.25), Some(0x7D7D_7D7D));
        assert_eq!(ScaleForm::Ue8m0.encode(0.3), None);
        assert_eq!(ScaleForm::Fp32.decode(0.3f32.to_bits()), 0.3);
        assert_eq!(ScaleForm::Fp32.encode(0.3), Some(0.3f32.to_bits()));
    }
}

//! The B' row: a rank's first N keys of a row, as they are exchanged.
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | words | `0..4 N` | u32: `order16 << 16 \| (0xFFFF - (l & 0xFFFF))` of local key `l`, 0 if empty | N | 16 | local top-k | merge |
//! | planes | `4 N..4 N + N / 8` | bit `j % 32` of word `j / 32`: bit 16 of slot `j`'s `l` | N / 32 | 16 | local top-k | merge |
//!
//! Slots: the keys above the row's threshold in index order, then the ties taken in index order, then empty ones.

use super::field::Field;
use crate::consts::{LOCAL_CONTEXT_MAX, TOPK_MULTIPLE};

/// The layout of rows of `n` slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BRow {
    n: usize,
}

/// One occupied slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// The key's order16, at least 1.
    pub key: u16,
    /// Its index on its rank, below [`LOCAL_CONTEXT_MAX`].
    pub local: u32,
}

impl BRow {
    /// Rows of `n` slots, a positive multiple of 128.
    pub const fn new(n: usize) -> Self {
        assert!(n > 0 && n.is_multiple_of(TOPK_MULTIPLE));
        Self { n }
    }

    /// Slots.
    pub const fn n(&self) -> usize {
        self.n
    }

    /// 32-bit words of a row.
    pub const fn words(&self) -> usize {
        self.n + self.n / 32
    }

    /// The table above.
    pub fn fields(&self) -> [Field; 2] {
        let n = self.n;
        [
            Field { name: "words", bytes: 0..4 * n, element_bytes: 4, count: n, align: 16 },
            Field { name: "planes", bytes: 4 * n..4 * self.words(), element_bytes: 4, count: n / 32, align: 16 },
        ]
    }

    /// The row of `slots`, empty after them.
    ///
    /// # Panics
    /// More slots than the row has, a key 0, or a local index of more than 17 bits.
    pub fn encode(&self, slots: &[Candidate]) -> Vec<u32> {
        assert!(slots.len() <= self.n);
        let mut row = vec![0; self.words()];
        for (j, slot) in slots.iter().enumerate() {
            assert!(slot.key > 0 && (slot.local as usize) < LOCAL_CONTEXT_MAX);
            row[j] = u32::from(slot.key) << 16 | (0xFFFF - (slot.local & 0xFFFF));
            row[self.n + j / 32] |= (slot.local >> 16) << (j % 32);
        }
        row
    }

    /// The occupied slots of a row, in order.
    ///
    /// # Panics
    /// A row of another length.
    pub fn decode(&self, row: &[u32]) -> Vec<Candidate> {
        assert_eq!(row.len(), self.words());
        (0..self.n)
            .filter(|&j| row[j] != 0)
            .map(|j| Candidate {
                key: (row[j] >> 16) as u16,
                local: (row[self.n + j / 32] >> (j % 32) & 1) << 16 | (0xFFFF - (row[j] & 0xFFFF)),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::field::tiles;
    use proptest::prelude::*;

    #[test]
    fn fields_tile_the_row_in_whole_vectors() {
        for n in (128..4096).step_by(128) {
            let row = BRow::new(n);
            assert!(tiles(&row.fields(), 4 * row.words()));
            assert!(row.words().is_multiple_of(4), "rows are copied 16 bytes at a time");
        }
    }

    #[test]
    fn a_word_is_key_and_complement_and_the_plane_has_bit_16() {
        let row = BRow::new(128);
        let at = |key, local| Candidate { key, local };
        let words = row.encode(&[at(0xFFFF, 0), at(1, 0xFFFF), at(0x8000, 0x1_0000), at(0x8000, 0x1_FFFF)]);
        assert_eq!(words[..5], [0xFFFF_FFFF, 0x0001_0000, 0x8000_FFFF, 0x8000_0000, 0]);
        assert_eq!(words[128..], [0b1100, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn decode_inverts_encode(
            slots in prop::collection::vec((1..=u16::MAX, 0..LOCAL_CONTEXT_MAX as u32), 0..=256),
        ) {
            let slots: Vec<_> = slots.into_iter().map(|(key, local)| Candidate { key, local }).collect();
            let row = BRow::new(256);
            prop_assert_eq!(row.decode(&row.encode(&slots)), slots);
        }
    }
}

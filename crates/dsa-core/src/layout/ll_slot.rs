//! The exchange's slots: one row of LL pairs per (parity, source rank, row), the same on every rank.
//!
//! A pair carries two words of a [`BRow`] and its call's epoch twice, so that each 8-byte half, which memory keeps whole,
//! says by itself whether it has arrived:
//!
//! | field of pair `c` | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | word `2 c` | `0..4` | u32 | 1 | 16 | the source's local top-k | merge |
//! | epoch | `4..8` | u32 | 1 | 4 | the source's local top-k | merge |
//! | word `2 c + 1` | `8..12` | u32 | 1 | 8 | the source's local top-k | merge |
//! | epoch | `12..16` | u32 | 1 | 4 | the source's local top-k | merge |
//!
//! Slots are `[parity][source rank][row][pair]`, parity the epoch's low bit: a rank may push a call's words while a peer
//! still reads the call before.

use super::b_row::BRow;
use super::field::Field;

/// Bytes of a pair.
pub const PAIR_BYTES: usize = 16;
/// Slots of the same rank and row, used in turn.
pub const PARITIES: usize = 2;

/// The fields of one pair.
pub fn fields() -> [Field; 4] {
    let word = |name, at, align| Field { name, bytes: at..at + 4, element_bytes: 4, count: 1, align };
    [word("word 2c", 0, 16), word("epoch", 4, 4), word("word 2c + 1", 8, 8), word("epoch", 12, 4)]
}

/// The epoch that follows the counter `epoch`.
///
/// Zeroed slots hold epoch 0, so no call may have it. 1 is skipped with it: parities must alternate, and the epoch
/// before, `u32::MAX`, is odd.
pub const fn next_epoch(epoch: u32) -> u32 {
    match epoch.wrapping_add(1) {
        0 => 2,
        next => next,
    }
}

/// Where the slots of an exchange lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LlSlots {
    ranks: usize,
    rows: usize,
    row: BRow,
}

impl LlSlots {
    /// Slots for `rows` rows of each of `ranks` ranks.
    pub const fn new(ranks: usize, rows: usize, row: BRow) -> Self {
        Self { ranks, rows, row }
    }

    /// Pairs of one row.
    pub const fn pairs(&self) -> usize {
        self.row.words() / 2
    }

    /// Bytes of all slots.
    pub const fn bytes(&self) -> usize {
        PARITIES * self.ranks * self.rows * self.pairs() * PAIR_BYTES
    }

    /// First byte of the slot that `source` fills for `row` in a call of `epoch`.
    pub const fn slot(&self, epoch: u32, source: usize, row: usize) -> usize {
        assert!(source < self.ranks && row < self.rows);
        let parity = epoch as usize % PARITIES;
        ((parity * self.ranks + source) * self.rows + row) * self.pairs() * PAIR_BYTES
    }

    /// Byte of word `j` within a slot.
    pub const fn word(j: usize) -> usize {
        j / 2 * PAIR_BYTES + j % 2 * (PAIR_BYTES / 2)
    }

    /// A row's words as pairs of `epoch`.
    pub fn encode(words: &[u32], epoch: u32) -> Vec<u32> {
        words.iter().flat_map(|&word| [word, epoch]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::field::tiles;
    use std::collections::HashSet;

    #[test]
    fn fields_tile_the_pair() {
        assert!(tiles(&fields(), PAIR_BYTES));
    }

    #[test]
    fn slots_and_words_tile_the_buffer() {
        let slots = LlSlots::new(3, 2, BRow::new(128));
        assert_eq!(slots.pairs(), 66);
        let mut halves = HashSet::new();
        for (epoch, source, row) in (0..2).flat_map(|e| (0..3).flat_map(move |s| (0..2).map(move |r| (e, s, r)))) {
            for j in 0..BRow::new(128).words() {
                let at = slots.slot(epoch, source, row) + LlSlots::word(j);
                assert!(at.is_multiple_of(8) && at < slots.bytes() && halves.insert(at));
            }
        }
        assert_eq!(halves.len() * 8, slots.bytes());
    }

    #[test]
    fn encoded_words_lie_where_word_says() {
        let words: Vec<u32> = (100..232).collect();
        let pairs = LlSlots::encode(&words, 7);
        for (j, &word) in words.iter().enumerate() {
            assert_eq!(pairs[LlSlots::word(j) / 4..][..2], [word, 7]);
        }
    }

    #[test]
    fn epochs_skip_zero_and_their_parities_alternate() {
        let mut epoch = u32::MAX - 5;
        for _ in 0..20 {
            let next = next_epoch(epoch);
            assert!(next != 0 && next % 2 != epoch % 2, "{epoch} -> {next}");
            epoch = next;
        }
        assert_eq!(next_epoch(0), 1);
    }
}

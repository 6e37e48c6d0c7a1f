//! The pitched (DCP) score scratch: row `t` starts at `t * pitch`, every request is scored.
//!
//! | field of row `t` | elements | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | logits | `t * pitch..(t + 1) * pitch` | BF16 | `pitch` | 1024 B | score | local top-k |
//! | tops (second buffer) | `t * pitch / 8..(t + 1) * pitch / 8` | order16 | `pitch / 8` | 128 B | score | local top-k |

use crate::consts::{KEYS_PER_TOP, PITCH_MULTIPLE};

/// Where the rows of a pitched scratch lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PitchedScratch {
    rows: usize,
    pitch: usize,
}

impl PitchedScratch {
    /// Scratch for `rows` rows of up to `len_max` keys each.
    pub const fn new(rows: usize, len_max: usize) -> Self {
        Self { rows, pitch: len_max.next_multiple_of(PITCH_MULTIPLE) }
    }

    /// Rows.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Elements from one row to the next, a multiple of 512.
    pub const fn pitch(&self) -> usize {
        self.pitch
    }

    /// First element of row `row`.
    pub const fn row_start(&self, row: usize) -> usize {
        assert!(row < self.rows);
        row * self.pitch
    }

    /// Elements of the logits buffer.
    pub const fn logits_len(&self) -> usize {
        self.rows * self.pitch
    }

    /// Elements of the tops buffer.
    pub const fn tops_len(&self) -> usize {
        self.logits_len() / KEYS_PER_TOP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_tile_the_scratch_and_hold_the_longest_row() {
        for len_max in [1, 511, 512, 513, 131_072] {
            let scratch = PitchedScratch::new(5, len_max);
            assert!(scratch.pitch() >= len_max && scratch.pitch() < len_max + PITCH_MULTIPLE);
            assert_eq!(scratch.pitch() % PITCH_MULTIPLE, 0);
            let ends: Vec<_> = (0..5).map(|row| scratch.row_start(row) + scratch.pitch()).collect();
            assert_eq!(ends.last(), Some(&scratch.logits_len()));
            assert!((1..5).all(|row| scratch.row_start(row) == ends[row - 1]));
            assert_eq!(scratch.tops_len() * 8, scratch.logits_len());
        }
    }
}

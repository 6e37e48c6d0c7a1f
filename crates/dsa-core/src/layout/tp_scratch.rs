//! The request-compact (TP) score scratch: only requests that need scoring take room, in whole 128-key tiles.
//!
//! | field of request `r`, row `i` | elements | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | logits | `start + i * n..start + (i + 1) * n` | BF16 | `n = tiles(r) * 128` | 256 B | score | select |
//! | tops (second buffer) | the same range / 8 | order16 | `n / 8` | 32 B | score | select |
//!
//! `start = q * 128 * (tiles of the requests before r)`. `tiles(r)` covers the longest row of `r` (a row may see any
//! number of keys, not necessarily more than the row before), and is 0 if every row has at most top-k keys: such rows
//! take all their keys and need no logits.

use crate::consts::{KEYS_PER_TOP, TILE};
use crate::error::ShapeError;

/// The tiles of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestTiles {
    /// Tiles of the requests before this one.
    pub first: usize,
    /// Tiles of this request; 0 if it is not scored.
    pub count: usize,
}

/// Where the rows of a request-compact scratch lie, for the row ends of one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TpScratch {
    q: usize,
    requests: Vec<RequestTiles>,
}

impl TpScratch {
    /// Plans the scratch of a step. `row_ends` holds `q` consecutive rows per request; an end at or below 0 sees no key,
    /// one above `len_max` (what the table and the scratch allow) counts as `len_max`.
    ///
    /// # Errors
    /// `q` is 0, or `row_ends` is no whole number of requests.
    pub fn plan(row_ends: &[i32], q: usize, topk: usize, len_max: usize) -> Result<Self, ShapeError> {
        if q == 0 {
            return Err(ShapeError::RowsPerRequestOutOfRange { q });
        }
        if !row_ends.len().is_multiple_of(q) {
            return Err(ShapeError::RowsNotWholeRequests { rows: row_ends.len(), q });
        }
        let mut first = 0;
        let requests = row_ends
            .chunks_exact(q)
            .map(|ends| {
                let longest = ends.iter().map(|&end| clamp_row_end(end, len_max)).max().unwrap_or(0);
                let count = if longest <= topk { 0 } else { longest.div_ceil(TILE) };
                let tiles = RequestTiles { first, count };
                first += count;
                tiles
            })
            .collect();
        Ok(Self { q, requests })
    }

    /// The tiles of each request.
    pub fn requests(&self) -> &[RequestTiles] {
        &self.requests
    }

    /// Tiles of the step: the unit of the score kernel's schedule.
    pub fn tiles(&self) -> usize {
        self.requests.last().map_or(0, |last| last.first + last.count)
    }

    /// First element of row `row`, `None` if its request is not scored.
    pub fn row_start(&self, row: usize) -> Option<usize> {
        let tiles = self.requests[row / self.q];
        (tiles.count > 0).then(|| (self.q * tiles.first + row % self.q * tiles.count) * TILE)
    }

    /// Elements that the step uses of the logits buffer.
    pub fn logits_len(&self) -> usize {
        self.q * self.tiles() * TILE
    }

    /// Elements that the step uses of the tops buffer.
    pub fn tops_len(&self) -> usize {
        self.logits_len() / KEYS_PER_TOP
    }

    /// Elements that a logits buffer needs for any step of `rows` rows of up to `len_max` keys; `usize::MAX` if their
    /// number is larger.
    pub const fn capacity(rows: usize, len_max: usize) -> usize {
        match len_max.checked_next_multiple_of(TILE) {
            Some(width) => rows.saturating_mul(width),
            None if rows == 0 => 0,
            None => usize::MAX,
        }
    }
}

/// The number of keys a row sees: none for an end at or below 0, at most `len_max`.
pub fn clamp_row_end(end: i32, len_max: usize) -> usize {
    usize::try_from(end).unwrap_or(0).min(len_max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counts(row_ends: &[i32], q: usize, topk: usize, len_max: usize) -> Vec<usize> {
        TpScratch::plan(row_ends, q, topk, len_max).unwrap().requests().iter().map(|tiles| tiles.count).collect()
    }

    #[test]
    fn tiles_come_from_the_longest_row_not_the_last() {
        assert_eq!(counts(&[300, 10, 0, 0], 4, 128, 1 << 20), [3]);
        assert_eq!(counts(&[300, 700, -5, 129], 2, 128, 1 << 20), [6, 2]);
    }

    #[test]
    fn a_request_whose_rows_all_fit_topk_takes_no_tiles() {
        assert_eq!(counts(&[512, 513, 0, -1, i32::MIN], 1, 512, 1 << 20), [0, 5, 0, 0, 0]);
    }

    #[test]
    fn ends_past_the_limit_are_clamped() {
        assert_eq!(counts(&[i32::MAX, 1000], 1, 512, 640), [5, 5]);
        assert_eq!(counts(&[i32::MAX], 1, 512, 512), [0], "clamped to what top-k takes whole");
    }

    #[test]
    fn rows_of_a_request_are_consecutive_runs() {
        let scratch = TpScratch::plan(&[200, 100, 5, 5, 129, 300], 2, 128, 1000).unwrap();
        let starts: Vec<_> = (0..6).map(|row| scratch.row_start(row)).collect();
        assert_eq!(starts, [Some(0), Some(256), None, None, Some(512), Some(896)]);
        assert_eq!((scratch.tiles(), scratch.logits_len(), scratch.tops_len()), (5, 1280, 160));
    }

    #[test]
    fn a_step_without_requests_is_empty_and_partial_requests_are_refused() {
        assert_eq!(TpScratch::plan(&[], 3, 512, 1000).unwrap().logits_len(), 0);
        let refused = ShapeError::RowsNotWholeRequests { rows: 4, q: 3 };
        assert_eq!(TpScratch::plan(&[1; 4], 3, 512, 1000), Err(refused));
        assert_eq!(TpScratch::plan(&[], 0, 512, 1000), Err(ShapeError::RowsPerRequestOutOfRange { q: 0 }));
    }

    #[test]
    fn the_capacity_saturates() {
        assert_eq!(TpScratch::capacity(3, 129), 3 * 256);
        assert_eq!(TpScratch::capacity(2, usize::MAX - 127), usize::MAX);
        assert_eq!(TpScratch::capacity(1, usize::MAX - 127), usize::MAX - 127);
        for (rows, len_max) in [(1, usize::MAX), (usize::MAX, usize::MAX), (usize::MAX, 2)] {
            assert_eq!(TpScratch::capacity(rows, len_max), usize::MAX);
        }
        assert_eq!(TpScratch::capacity(0, usize::MAX), 0);
    }

    proptest! {
        #[test]
        fn scored_rows_tile_the_scratch_within_capacity(
            q in 1usize..=8,
            ends in prop::collection::vec(-10i32..3000, 1..20),
            len_max in 1usize..2500,
        ) {
            let rows = ends.len() / q * q;
            let scratch = TpScratch::plan(&ends[..rows], q, 512, len_max).unwrap();
            let mut next = 0;
            for (row, &end) in ends[..rows].iter().enumerate() {
                if let Some(start) = scratch.row_start(row) {
                    prop_assert_eq!(start, next);
                    let width = scratch.requests()[row / q].count * TILE;
                    prop_assert!(clamp_row_end(end, len_max) <= width);
                    next += width;
                } else {
                    prop_assert!(clamp_row_end(end, len_max) <= 512);
                }
            }
            prop_assert_eq!(next, scratch.logits_len());
            prop_assert!(next <= TpScratch::capacity(rows, len_max));
        }
    }
}

//! The exact top-k of one row.
//!
//! A key precedes another if its order16 is larger, or equal with a lower index; the first `min(length, K)` are
//! selected. A NaN logit ranks below -inf and is selected only when nothing else is left; -0 ties with +0. Ids and physical
//! rows are in ascending order of id, -1 after.

use crate::error::ShapeError;
use crate::layout::tp_scratch::clamp_row_end;
use crate::numerics::order16;
use std::cmp::Reverse;

/// What fills ids and rows past the count.
pub const EMPTY: i32 = -1;

/// Where the MLA cache rows of one request lie.
#[derive(Debug, Clone, Copy)]
pub struct KvTableRow<'a> {
    /// Block ids; only those that a selected key needs are read.
    pub blocks: &'a [i32],
    /// Tokens per page.
    pub page: usize,
    /// Cache rows from one block to the next.
    pub block_rows: usize,
}

impl KvTableRow<'_> {
    /// The physical row of key `id`, computed in 64 bits.
    ///
    /// # Errors
    /// The row is negative or does not fit an `i32`.
    pub fn physical_row(&self, id: usize) -> Result<i32, ShapeError> {
        let block = self.blocks[id / self.page];
        let row = i64::from(block) * self.block_rows as i64 + (id % self.page) as i64;
        match i32::try_from(row) {
            Ok(physical) if physical >= 0 => Ok(physical),
            _ => Err(ShapeError::PhysicalRowOutOfRange { id, block, row }),
        }
    }
}

/// The answer for one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// Selected keys ascending, then -1: `[topk]`.
    pub ids: Vec<i32>,
    /// Their physical rows in the same order, then -1: `[topk]`.
    pub rows: Vec<i32>,
    /// Selected keys.
    pub count: usize,
    /// The smallest selected order16, `None` if the row selects nothing.
    pub threshold: Option<u16>,
}

/// The selected ids of a row whose keys are `logits`, ascending.
pub fn select_ids(logits: &[u16], topk: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by_key(|&id| (Reverse(order16::key_of(logits[id])), id));
    order.truncate(topk);
    order.sort();
    order
}

/// The selection of a row that sees `row_end` keys of `logits` (clamped to `0..=logits.len()`).
///
/// # Errors
/// The physical row of a selected key does not fit.
pub fn select_row(logits: &[u16], row_end: i32, topk: usize, kv: KvTableRow) -> Result<Selection, ShapeError> {
    let selected = select_ids(&logits[..clamp_row_end(row_end, logits.len())], topk);
    let mut ids: Vec<i32> = selected.iter().map(|&id| id as i32).collect();
    let mut rows = selected.iter().map(|&id| kv.physical_row(id)).collect::<Result<Vec<i32>, _>>()?;
    ids.resize(topk, EMPTY);
    rows.resize(topk, EMPTY);
    let threshold = selected.iter().map(|&id| order16::key_of(logits[id])).min();
    Ok(Selection { ids, rows, count: selected.len(), threshold })
}

/// The first place where an output differs from the oracle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SelectionMismatch {
    /// A row's count.
    #[error("row {row}: count {got}, want {want}")]
    Count {
        /// Row of the step.
        row: usize,
        /// Found.
        got: i32,
        /// Expected.
        want: i32,
    },
    /// A selected key, or the filler past the count.
    #[error("row {row} slot {slot}: id {got}, want {want}")]
    Id {
        /// Row of the step.
        row: usize,
        /// Slot of the row.
        slot: usize,
        /// Found.
        got: i32,
        /// Expected.
        want: i32,
    },
    /// A physical row, or the filler past the count.
    #[error("row {row} slot {slot}: physical row {got}, want {want}")]
    PhysicalRow {
        /// Row of the step.
        row: usize,
        /// Slot of the row.
        slot: usize,
        /// Found.
        got: i32,
        /// Expected.
        want: i32,
    },
    /// An output buffer of another size.
    #[error("{output} has {got} elements, want {want}")]
    Length {
        /// Which output.
        output: &'static str,
        /// Found.
        got: usize,
        /// Expected.
        want: usize,
    },
}

/// Compares the outputs of a step with the oracle's `want`, row by row: count, then ids, then physical rows.
///
/// `rows` and `ids` are `[rows, topk]`, `counts` `[rows]`; `ids` may be absent.
///
/// # Errors
/// The first difference.
pub fn check_selection(
    want: &[Selection],
    topk: usize,
    rows: &[i32],
    counts: &[i32],
    ids: Option<&[i32]>,
) -> Result<(), SelectionMismatch> {
    let check_len = |output, got: usize, want: usize| {
        if got == want { Ok(()) } else { Err(SelectionMismatch::Length { output, got, want }) }
    };
    check_len("rows", rows.len(), want.len() * topk)?;
    check_len("counts", counts.len(), want.len())?;
    check_len("ids", ids.map_or(want.len() * topk, <[i32]>::len), want.len() * topk)?;
    for (row, expected) in want.iter().enumerate() {
        let count = expected.count as i32;
        if counts[row] != count {
            return Err(SelectionMismatch::Count { row, got: counts[row], want: count });
        }
        let slots = row * topk..(row + 1) * topk;
        if let Some(ids) = ids
            && let Some((slot, got, want)) = first_difference(&ids[slots.clone()], &expected.ids)
        {
            return Err(SelectionMismatch::Id { row, slot, got, want });
        }
        if let Some((slot, got, want)) = first_difference(&rows[slots], &expected.rows) {
            return Err(SelectionMismatch::PhysicalRow { row, slot, got, want });
        }
    }
    Ok(())
}

fn first_difference(got: &[i32], want: &[i32]) -> Option<(usize, i32, i32)> {
    let slot = got.iter().zip(want).position(|(got, want)| got != want)?;
    Some((slot, got[slot], want[slot]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(values: &[f32]) -> Vec<u16> {
        values.iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect()
    }

    const KV: KvTableRow = KvTableRow { blocks: &[3, 0], page: 4, block_rows: 10 };

    #[track_caller]
    fn check(values: &[f32], row_end: i32, topk: usize, want: &[i32]) {
        let got = select_row(&bits(values), row_end, topk, KV).unwrap();
        assert_eq!(got.ids, want);
        assert_eq!(got.count, want.iter().filter(|&&id| id >= 0).count());
    }

    #[test]
    fn ties_go_to_the_lowest_index_and_ids_ascend() {
        check(&[1.0, 5.0, 2.0, 5.0, 2.0, 2.0], 6, 3, &[1, 2, 3]);
        check(&[2.0; 8], 8, 3, &[0, 1, 2]);
        check(&[0.0, -0.0, 0.0, -1.0], 4, 2, &[0, 1]);
    }

    #[test]
    fn nan_is_taken_last_and_minus_infinity_before_it() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        check(&[nan, -inf, inf, -nan, -inf, 1.0], 6, 4, &[1, 2, 4, 5]);
        check(&[nan, -inf, inf, -nan, -inf, 1.0], 6, 5, &[0, 1, 2, 4, 5]);
        check(&[nan, nan, 1.0], 3, 3, &[0, 1, 2]);
    }

    #[test]
    fn short_empty_and_negative_rows() {
        check(&[3.0, 1.0, 2.0], 2, 4, &[0, 1, -1, -1]);
        check(&[3.0, 1.0, 2.0], 99, 4, &[0, 1, 2, -1]);
        for row_end in [0, -1, i32::MIN] {
            check(&[3.0, 1.0, 2.0], row_end, 2, &[-1, -1]);
        }
        assert_eq!(select_row(&[], 0, 2, KV).unwrap().threshold, None);
    }

    #[test]
    fn a_position_past_the_row_is_never_picked() {
        check(&[1.0, 2.0, 3.0, f32::INFINITY], 3, 2, &[1, 2]);
    }

    #[test]
    fn physical_rows_follow_the_table_and_are_checked() {
        let got = select_row(&bits(&[1.0, 5.0, 0.0, 0.0, 0.0, 4.0]), 6, 2, KV).unwrap();
        assert_eq!((got.rows, got.threshold), (vec![31, 1], Some(order16::order16(bits(&[4.0])[0]))));
        let largest = KvTableRow { blocks: &[(1 << 25) - 1], page: 64, block_rows: 64 };
        assert_eq!(largest.physical_row(63), Ok(i32::MAX));
        for (block, row) in [(1 << 25, 1i64 << 31), (-1, -64), (i32::MAX, i64::from(i32::MAX) * 64)] {
            let kv = KvTableRow { blocks: &[block], page: 64, block_rows: 64 };
            assert_eq!(kv.physical_row(0), Err(ShapeError::PhysicalRowOutOfRange { id: 0, block, row }));
        }
    }

    #[test]
    fn check_selection_names_the_first_difference() {
        let want: Vec<_> =
            [6, 1].map(|end| select_row(&bits(&[1.0, 5.0, 2.0, 5.0, 2.0, 2.0]), end, 3, KV).unwrap()).into();
        let (ids, rows, counts) = ([1, 2, 3, 0, -1, -1], [31, 32, 33, 30, -1, -1], [3, 1]);
        assert_eq!(check_selection(&want, 3, &rows, &counts, Some(&ids)), Ok(()));
        assert_eq!(check_selection(&want, 3, &rows, &counts, None), Ok(()));
        let spoil = |values: [i32; 6], slot: usize| {
            let mut values = values;
            values[slot] = 7;
            values
        };
        let id = SelectionMismatch::Id { row: 1, slot: 1, got: 7, want: -1 };
        assert_eq!(check_selection(&want, 3, &rows, &counts, Some(&spoil(ids, 4))), Err(id));
        let physical = SelectionMismatch::PhysicalRow { row: 0, slot: 2, got: 7, want: 33 };
        assert_eq!(check_selection(&want, 3, &spoil(rows, 2), &counts, None), Err(physical));
        let count = SelectionMismatch::Count { row: 1, got: 3, want: 1 };
        assert_eq!(check_selection(&want, 3, &rows, &[3, 3], Some(&ids)), Err(count));
        let length = SelectionMismatch::Length { output: "ids", got: 5, want: 6 };
        assert_eq!(check_selection(&want, 3, &rows, &counts, Some(&ids[..5])), Err(length));
    }
}

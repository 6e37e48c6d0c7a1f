//! The oracles over a whole [`DecodeStep`].

use super::{score, select};
use crate::consts::DIM;
use crate::error::ShapeError;
use crate::step::DecodeStep;
use select::{KvTableRow, Selection};

/// Row-keys below which starting threads costs more than it saves.
const PARALLEL_ROW_KEYS_MIN: usize = 4096;

/// The logits of every row, BF16: row `t` has as many as it sees keys. Rows are spread over the machine's cores.
///
/// `dot` as in [`score::score_row`].
///
/// # Panics
/// If the step does not pass [`DecodeStep::validate`].
pub fn logits(step: &DecodeStep, dot: impl Fn(&[u8; DIM], &[u8; DIM]) -> f32 + Sync) -> Vec<Vec<u16>> {
    // A long row is cut as well: few rows, long contexts are the common case.
    const SEGMENT_KEYS: usize = 2048;
    let segments: Vec<(usize, std::ops::Range<usize>)> = (0..step.rows)
        .flat_map(|row| {
            let len = step.row_len(row);
            (0..len).step_by(SEGMENT_KEYS).map(move |start| (row, start..len.min(start + SEGMENT_KEYS)))
        })
        .collect();
    let score_segment = |(row, keys): &(usize, std::ops::Range<usize>)| {
        let keys = keys.clone().map(|token| step.key(row / step.q, token));
        score::score_row(step.query(*row), step.head_weights(*row), keys, &dot)
    };
    let row_keys: usize = segments.iter().map(|(_, keys)| keys.len()).sum();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let scored: Vec<Vec<u16>> = if row_keys < PARALLEL_ROW_KEYS_MIN || threads == 1 {
        segments.iter().map(score_segment).collect()
    } else {
        let share = segments.len().div_ceil(threads);
        std::thread::scope(|scope| {
            let workers: Vec<_> = segments
                .chunks(share)
                .map(|part| scope.spawn(|| part.iter().map(score_segment).collect::<Vec<_>>()))
                .collect();
            workers.into_iter().flat_map(|worker| worker.join().expect("the oracle panicked")).collect()
        })
    };
    let mut rows = vec![Vec::new(); step.rows];
    for ((row, _), part) in segments.iter().zip(scored) {
        rows[*row].extend(part);
    }
    rows
}

/// The selection of every row from its logits (as [`logits`] returns them, or a device's own).
///
/// # Errors
/// The physical row of a selected key does not fit.
pub fn select(step: &DecodeStep, logits: &[Vec<u16>]) -> Result<Vec<Selection>, ShapeError> {
    logits
        .iter()
        .enumerate()
        .map(|(row, logits)| {
            let kv = KvTableRow {
                blocks: step.kv_table_row(row / step.q),
                page: step.kv_page,
                block_rows: step.kv_block_rows,
            };
            select::select_row(logits, step.row_len(row) as i32, step.topk, kv)
        })
        .collect()
}

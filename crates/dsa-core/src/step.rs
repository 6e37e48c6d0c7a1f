//! One decode step of the indexer as host buffers: what a fixture holds, a generator makes, and an oracle answers.

use crate::consts::{HEADS, PAGE};
use crate::error::ShapeError;
use crate::layout::fp8_page::{self, ScaleForm};
use crate::layout::query_row;
use crate::layout::tp_scratch::clamp_row_end;
use crate::shape::{IndexCacheShape, IndexShape, KvShape};

/// Inputs of score and select. Requests own `q` consecutive rows; every buffer is dense unless a stride is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodeStep {
    /// Rows per request.
    pub q: usize,
    /// Rows: requests x `q`.
    pub rows: usize,
    /// Keys picked per row.
    pub topk: usize,
    /// Longest context that the scratch holds, in tokens; longer row ends are clamped to it.
    pub context_len_max: usize,
    /// E4M3 queries `[rows, 32, 128]`.
    pub queries: Vec<u8>,
    /// BF16 head weights `[rows, 32]`.
    pub weights: Vec<u16>,
    /// FP8 index cache: `blocks` pages of [`fp8_page::BYTES`] bytes, `page_stride` apart.
    pub cache: Vec<u8>,
    /// Bytes from one page to the next.
    pub page_stride: usize,
    /// Pages in the cache.
    pub blocks: usize,
    /// How a scale word is read.
    pub scale_form: ScaleForm,
    /// Block ids of the index cache: `requests` rows of `table_width`, `table_stride` entries apart. Entries past a request's
    /// pages are garbage.
    pub table: Vec<i32>,
    /// Entries from one row of `table` to the next.
    pub table_stride: usize,
    /// Entries of a row of `table`.
    pub table_width: usize,
    /// Keys that each row sees `[rows]`; at or below 0 none.
    pub row_ends: Vec<i32>,
    /// Block ids of the MLA cache, as `table`.
    pub kv_table: Vec<i32>,
    /// Entries from one row of `kv_table` to the next.
    pub kv_table_stride: usize,
    /// Entries of a row of `kv_table`.
    pub kv_table_width: usize,
    /// Tokens per MLA page, a power of two.
    pub kv_page: usize,
    /// MLA cache rows from one block to the next.
    pub kv_block_rows: usize,
}

impl DecodeStep {
    /// Checks every size and buffer length, and every block id that a row needs.
    ///
    /// # Errors
    /// The first violated limit or relation.
    pub fn validate(&self) -> Result<IndexShape, ShapeError> {
        let shape = IndexShape::from_rows(self.rows, self.q, self.topk, self.context_len_max)?;
        IndexCacheShape::new(self.blocks, fp8_page::BYTES, self.page_stride)?;
        KvShape::new(self.kv_page, self.kv_block_rows, 0)?;
        let needed_table = |table, stride: usize, width: usize| match shape.requests() {
            _ if stride < width => Err(ShapeError::TableStrideTooSmall { table, stride, width }),
            0 => Ok(0),
            requests => Ok((requests - 1).saturating_mul(stride).saturating_add(width)),
        };
        let table_needed = needed_table("table", self.table_stride, self.table_width)?;
        let kv_table_needed = needed_table("kv_table", self.kv_table_stride, self.kv_table_width)?;
        // The last page need not be followed by its stride's padding.
        let cache_needed = match self.blocks {
            0 => 0,
            blocks => (blocks - 1).saturating_mul(self.page_stride).saturating_add(fp8_page::BYTES),
        };
        check_len("queries", self.queries.len(), self.rows * query_row::BYTES)?;
        check_len("weights", self.weights.len(), self.rows * HEADS)?;
        check_len("row_ends", self.row_ends.len(), self.rows)?;
        check_len("cache", self.cache.len(), cache_needed)?;
        check_len("table", self.table.len(), table_needed)?;
        check_len("kv_table", self.kv_table.len(), kv_table_needed)?;
        self.check_blocks()?;
        Ok(shape)
    }

    fn check_blocks(&self) -> Result<(), ShapeError> {
        for row in 0..self.rows {
            let request = row / self.q;
            for (column, &id) in self.table_row(request)[..self.row_len(row).div_ceil(PAGE)].iter().enumerate() {
                if usize::try_from(id).is_ok_and(|id| id < self.blocks) {
                    continue;
                }
                return Err(ShapeError::BlockOutOfRange { table: "table", request, column, id, blocks: self.blocks });
            }
        }
        Ok(())
    }

    /// Requests of the step.
    pub fn requests(&self) -> usize {
        self.rows / self.q
    }

    /// Longest row that the tables and the scratch allow.
    pub fn len_max(&self) -> usize {
        // A table of no rows may claim any width.
        let tables = self.table_width.saturating_mul(PAGE).min(self.kv_table_width.saturating_mul(self.kv_page));
        self.context_len_max.min(tables)
    }

    /// Keys that row `row` sees, its end clamped to `0..=len_max`.
    pub fn row_len(&self, row: usize) -> usize {
        clamp_row_end(self.row_ends[row], self.len_max())
    }

    /// Query of row `row`, 32 heads of 128 E4M3.
    pub fn query(&self, row: usize) -> &[u8; query_row::BYTES] {
        self.queries[row * query_row::BYTES..][..query_row::BYTES].try_into().expect("sliced to the row's size")
    }

    /// Head weights of row `row`, BF16.
    pub fn head_weights(&self, row: usize) -> &[u16; HEADS] {
        self.weights[row * HEADS..][..HEADS].try_into().expect("sliced to the row's size")
    }

    /// Block ids of a request in the index cache.
    pub fn table_row(&self, request: usize) -> &[i32] {
        &self.table[request * self.table_stride..][..self.table_width]
    }

    /// Block ids of a request in the MLA cache.
    pub fn kv_table_row(&self, request: usize) -> &[i32] {
        &self.kv_table[request * self.kv_table_stride..][..self.kv_table_width]
    }

    /// Codes and scale of key `token` of a request.
    ///
    /// # Panics
    /// If the table names no block for it; [`DecodeStep::validate`] rules that out for keys that a row sees.
    pub fn key(&self, request: usize, token: usize) -> (&[u8; fp8_page::KEY_BYTES], f32) {
        let block = self.table_row(request)[token / PAGE] as usize;
        assert!(block < self.blocks, "request {request} token {token}: no such block");
        let (codes, word) = fp8_page::read(&self.cache[block * self.page_stride..], token % PAGE);
        (codes, self.scale_form.decode(word))
    }
}

fn check_len(buffer: &'static str, found: usize, needed: usize) -> Result<(), ShapeError> {
    if found >= needed { Ok(()) } else { Err(ShapeError::BufferLength { buffer, found, needed }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::StepSpec;

    #[track_caller]
    fn check(spoil: impl FnOnce(&mut DecodeStep), want: ShapeError) {
        let mut step = StepSpec::new(1, 2, 128, &[70, 65, 1, 0]).build().unwrap();
        spoil(&mut step);
        assert_eq!(step.validate(), Err(want));
    }

    #[test]
    fn validate_names_the_buffer_that_is_too_short() {
        let short = |buffer, found, needed| ShapeError::BufferLength { buffer, found, needed };
        check(|step| step.queries.truncate(4 * 4096 - 1), short("queries", 4 * 4096 - 1, 4 * 4096));
        check(|step| step.weights.clear(), short("weights", 0, 4 * 32));
        check(|step| step.row_ends.truncate(3), short("row_ends", 3, 4));
        check(|step| step.cache.truncate(6 * 8448 - 1), short("cache", 6 * 8448 - 1, 6 * 8448));
        // Two rows of 4 entries, 7 apart: the gap after the last row is not needed.
        check(|step| step.table.truncate(10), short("table", 10, 11));
        check(|step| step.kv_table.truncate(10), short("kv_table", 10, 11));
        let mut step = StepSpec::new(1, 2, 128, &[70, 65, 1, 0]).build().unwrap();
        step.table.truncate(11);
        assert_eq!(step.validate().map(|shape| shape.rows()), Ok(4));
    }

    #[test]
    fn validate_refuses_bad_sizes_without_overflow() {
        check(|step| step.q = 3, ShapeError::RowsNotWholeRequests { rows: 4, q: 3 });
        check(|step| step.topk = 100, ShapeError::TopkUnsupported { topk: 100 });
        check(|step| step.kv_page = 48, ShapeError::PageNotPowerOfTwo { page: 48 });
        let stride = ShapeError::PageStrideUnsupported { stride: 8440, page_bytes: 8448 };
        check(|step| step.page_stride = 8440, stride);
        let narrow = ShapeError::TableStrideTooSmall { table: "table", stride: 3, width: 4 };
        check(|step| step.table_stride = 3, narrow);
        let huge = usize::MAX - 15;
        let cache = ShapeError::BufferLength { buffer: "cache", found: 6 * 8448, needed: usize::MAX };
        check(|step| step.page_stride = huge, cache);
        let table = ShapeError::BufferLength { buffer: "table", found: 14, needed: usize::MAX };
        check(|step| (step.table_stride, step.table_width) = (huge, huge), table);
    }

    #[test]
    fn validate_refuses_needed_blocks_that_do_not_exist_and_ignores_the_rest() {
        let outside = |id| ShapeError::BlockOutOfRange { table: "table", request: 0, column: 1, id, blocks: 6 };
        check(|step| step.table[1] = 6, outside(6));
        check(|step| step.table[1] = -1, outside(-1));
        let mut step = StepSpec::new(1, 2, 128, &[70, 65, 1, 0]).build().unwrap();
        step.table[2] = i32::MIN;
        assert!(step.validate().is_ok());
    }

    #[test]
    fn row_lengths_are_clamped_by_both_tables_and_the_scratch() {
        let spec = StepSpec { context_len_max: 448, ..StepSpec::new(1, 1, 128, &[300, i32::MAX, -3]) };
        let mut step = spec.build().unwrap();
        let lens = |step: &DecodeStep| [0, 1, 2].map(|row| step.row_len(row));
        assert_eq!(lens(&step), [300, 448, 0]);
        step.kv_table_width = 4;
        assert_eq!(lens(&step), [256, 256, 0]);
        step.table_width = 3;
        assert_eq!(lens(&step), [192, 192, 0]);
        step.context_len_max = 100;
        assert_eq!(lens(&step), [100, 100, 0]);
    }

    #[test]
    fn tables_of_any_width_do_not_overflow_the_longest_row() {
        let mut step = StepSpec::new(1, 1, 128, &[]).build().unwrap();
        (step.table_stride, step.table_width) = (1 << 60, 1 << 60);
        (step.kv_table_stride, step.kv_table_width) = (usize::MAX, usize::MAX);
        assert_eq!(step.validate().map(|shape| shape.rows()), Ok(0));
        assert_eq!(step.len_max(), step.context_len_max);
    }
}

//! One decode step of the indexer as host buffers: what a fixture holds, a generator makes, and an oracle answers.

use crate::consts::{HEADS, PAGE};
use crate::error::ShapeError;
use crate::layout::fp8_page::{self, ScaleForm};
use crate::layout::query_row;
use crate::layout::tp_scratch::clamp_row_end;
use crate::shape::{IndexCacheShape, IndexShape};

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
        crate::shape::KvShape::new(self.kv_page, self.kv_block_rows, 0)?;
        let needed_table = |table, stride: usize, width: usize| match shape.requests() {
            _ if stride < width => Err(ShapeError::TableStrideTooSmall { table, stride, width }),
            0 => Ok(0),
            requests => Ok((requests - 1) * stride + width),
        };
        let table_needed = needed_table("table", self.table_stride, self.table_width)?;
        let kv_table_needed = needed_table("kv_table", self.kv_table_stride, self.kv_table_width)?;
        // The last page need not be followed by its stride's padding.
        let cache_needed =
            self.blocks.saturating_sub(1) * self.page_stride + fp8_page::BYTES.min(self.blocks * fp8_page::BYTES);
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
        self.context_len_max.min(self.table_width * PAGE).min(self.kv_table_width * self.kv_page)
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

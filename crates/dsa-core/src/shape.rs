//! Validated sizes. A value of these types proves that the limits of [`crate::consts`] hold.

use crate::consts::*;
use crate::error::ShapeError;

/// Sizes of the indexer of one step: how many requests and rows, how many keys are picked, how long a context may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IndexShape {
    requests: usize,
    q: usize,
    topk: usize,
    context_len_max: usize,
}

impl IndexShape {
    /// `requests` of `q` rows each, `topk` keys per row, contexts up to `context_len_max` tokens.
    ///
    /// No requests at all is a legal (empty) step.
    ///
    /// # Errors
    /// The first violated limit: `q`, `requests`, `topk`, `context_len_max`.
    pub fn new(requests: usize, q: usize, topk: usize, context_len_max: usize) -> Result<Self, ShapeError> {
        check_rows_per_request(q)?;
        if requests > REQUESTS_MAX {
            return Err(ShapeError::TooManyRequests { requests });
        }
        check_topk(topk)?;
        if !(1..=CONTEXT_MAX).contains(&context_len_max) {
            return Err(ShapeError::ContextOutOfRange { context_len_max });
        }
        Ok(Self { requests, q, topk, context_len_max })
    }

    /// As [`IndexShape::new`], from a row count.
    ///
    /// # Errors
    /// Also if `rows` is no multiple of `q`.
    pub fn from_rows(rows: usize, q: usize, topk: usize, context_len_max: usize) -> Result<Self, ShapeError> {
        check_rows_per_request(q)?;
        if !rows.is_multiple_of(q) {
            return Err(ShapeError::RowsNotWholeRequests { rows, q });
        }
        Self::new(rows / q, q, topk, context_len_max)
    }

    /// Requests of the step.
    pub const fn requests(&self) -> usize {
        self.requests
    }

    /// Rows per request.
    pub const fn q(&self) -> usize {
        self.q
    }

    /// Rows of the step.
    pub const fn rows(&self) -> usize {
        self.requests * self.q
    }

    /// Keys picked per row.
    pub const fn topk(&self) -> usize {
        self.topk
    }

    /// Longest context, in tokens.
    pub const fn context_len_max(&self) -> usize {
        self.context_len_max
    }
}

fn check_rows_per_request(q: usize) -> Result<(), ShapeError> {
    if (1..=Q_MAX).contains(&q) { Ok(()) } else { Err(ShapeError::RowsPerRequestOutOfRange { q }) }
}

/// Checks the tokens of an MLA page that a kernel divides by: a power of two up to the longest context.
///
/// # Errors
/// Which of the two is violated.
pub fn check_kv_page(page: usize) -> Result<(), ShapeError> {
    if !page.is_power_of_two() {
        return Err(ShapeError::PageNotPowerOfTwo { page });
    }
    if page > CONTEXT_MAX { Err(ShapeError::KvPageTooLarge { page }) } else { Ok(()) }
}

fn check_topk(topk: usize) -> Result<(), ShapeError> {
    let supported = (TOPK_MULTIPLE..=TOPK_MAX).contains(&topk) && topk.is_multiple_of(TOPK_MULTIPLE);
    if supported { Ok(()) } else { Err(ShapeError::TopkUnsupported { topk }) }
}

/// Sizes of the paged indexer cache of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IndexCacheShape {
    blocks: usize,
    page_stride: usize,
}

impl IndexCacheShape {
    /// `blocks` pages of `page_bytes` bytes, `page_stride` bytes apart.
    ///
    /// # Errors
    /// A stride below `page_bytes` or off [`PAGE_STRIDE_MULTIPLE`]; more blocks than an `i32` numbers.
    pub fn new(blocks: usize, page_bytes: usize, page_stride: usize) -> Result<Self, ShapeError> {
        if page_stride < page_bytes || !page_stride.is_multiple_of(PAGE_STRIDE_MULTIPLE) {
            return Err(ShapeError::PageStrideUnsupported { stride: page_stride, page_bytes });
        }
        if blocks > i32::MAX as usize {
            return Err(ShapeError::TooManyBlocks { blocks });
        }
        Ok(Self { blocks, page_stride })
    }

    /// Pages in the cache.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes from one page to the next.
    pub const fn page_stride(&self) -> usize {
        self.page_stride
    }
}

/// Sizes of the paged MLA cache whose rows are selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvShape {
    page: usize,
    block_rows: usize,
    blocks: usize,
}

impl KvShape {
    /// `blocks` blocks, `block_rows` rows apart, of `page` tokens each.
    ///
    /// # Errors
    /// A page that is no power of two, overlapping blocks, or a pool of 2^31 rows or more.
    pub fn new(page: usize, block_rows: usize, blocks: usize) -> Result<Self, ShapeError> {
        if !page.is_power_of_two() {
            return Err(ShapeError::PageNotPowerOfTwo { page });
        }
        if block_rows < page {
            return Err(ShapeError::KvBlockTooSmall { block_rows, page });
        }
        match (blocks as u64).checked_mul(block_rows as u64) {
            Some(rows) if rows <= POOL_ROWS_MAX => Ok(Self { page, block_rows, blocks }),
            _ => Err(ShapeError::PoolTooLarge { blocks, block_rows }),
        }
    }

    /// Tokens per page.
    pub const fn page(&self) -> usize {
        self.page
    }

    /// Rows from one block to the next.
    pub const fn block_rows(&self) -> usize {
        self.block_rows
    }

    /// Blocks in the pool.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_shape_accepts_every_limit_and_refuses_one_beyond() {
        let shape = IndexShape::new(REQUESTS_MAX, Q_MAX, TOPK_MAX, CONTEXT_MAX).unwrap();
        assert_eq!((shape.rows(), shape.topk()), (REQUESTS_MAX * Q_MAX, TOPK_MAX));
        assert_eq!(IndexShape::new(0, 1, 128, 1).unwrap().rows(), 0);
        assert_eq!(IndexShape::new(1, 0, 128, 1), Err(ShapeError::RowsPerRequestOutOfRange { q: 0 }));
        assert_eq!(IndexShape::new(1, 9, 128, 1), Err(ShapeError::RowsPerRequestOutOfRange { q: 9 }));
        assert_eq!(IndexShape::new(1025, 1, 128, 1), Err(ShapeError::TooManyRequests { requests: 1025 }));
        for topk in [0, 1, 127, 129, 2051, 4224] {
            assert_eq!(IndexShape::new(1, 1, topk, 1), Err(ShapeError::TopkUnsupported { topk }));
        }
        for context_len_max in [0, CONTEXT_MAX + 1] {
            let refused = Err(ShapeError::ContextOutOfRange { context_len_max });
            assert_eq!(IndexShape::new(1, 1, 128, context_len_max), refused);
        }
    }

    #[test]
    fn from_rows_needs_whole_requests() {
        assert_eq!(IndexShape::from_rows(12, 4, 512, 100), IndexShape::new(3, 4, 512, 100));
        assert_eq!(IndexShape::from_rows(13, 4, 512, 100), Err(ShapeError::RowsNotWholeRequests { rows: 13, q: 4 }));
        assert_eq!(IndexShape::from_rows(13, 0, 512, 100), Err(ShapeError::RowsPerRequestOutOfRange { q: 0 }));
    }

    #[test]
    fn cache_strides_are_aligned_and_cover_the_page() {
        assert_eq!(IndexCacheShape::new(3, 8448, 8448).unwrap().page_stride(), 8448);
        assert!(IndexCacheShape::new(3, 8448, 3 * 8448 + 576).is_ok());
        for stride in [0, 8432, 8449, 8456] {
            let refused = Err(ShapeError::PageStrideUnsupported { stride, page_bytes: 8448 });
            assert_eq!(IndexCacheShape::new(3, 8448, stride), refused);
        }
        let blocks = 1 << 31;
        assert_eq!(IndexCacheShape::new(blocks, 8448, 8448), Err(ShapeError::TooManyBlocks { blocks }));
    }

    #[test]
    fn a_pool_of_two_to_the_31_rows_is_refused() {
        assert!(KvShape::new(64, 64, (1 << 25) - 1).is_ok());
        let too_large = ShapeError::PoolTooLarge { blocks: 1 << 25, block_rows: 64 };
        assert_eq!(KvShape::new(64, 64, 1 << 25), Err(too_large));
        let overflowing = ShapeError::PoolTooLarge { blocks: usize::MAX, block_rows: 4 };
        assert_eq!(KvShape::new(4, 4, usize::MAX), Err(overflowing));
        for page in [0, 3, 48] {
            assert_eq!(KvShape::new(page, 64, 1), Err(ShapeError::PageNotPowerOfTwo { page }));
        }
        assert_eq!(KvShape::new(64, 63, 1), Err(ShapeError::KvBlockTooSmall { block_rows: 63, page: 64 }));
        assert_eq!(KvShape::new(256, 2048, 9).unwrap().block_rows(), 2048, "strided blocks");
    }
}

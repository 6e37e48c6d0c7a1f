//! What can be wrong with a shape or with the host's view of a step.

use crate::consts::*;

/// A violated limit or relation between sizes. Returned before anything is launched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// Rows per request outside 1..=[`Q_MAX`].
    #[error("q = {q} rows per request is outside 1..={Q_MAX}")]
    RowsPerRequestOutOfRange {
        /// Rows per request asked for.
        q: usize,
    },
    /// A row count that is no multiple of `q`.
    #[error("{rows} rows are not a whole number of requests of q = {q} rows")]
    RowsNotWholeRequests {
        /// Rows given.
        rows: usize,
        /// Rows per request.
        q: usize,
    },
    /// More than [`REQUESTS_MAX`] requests.
    #[error("{requests} requests exceed the limit of {REQUESTS_MAX}")]
    TooManyRequests {
        /// Requests asked for.
        requests: usize,
    },
    /// A top-k that is 0, no multiple of [`TOPK_MULTIPLE`], or above [`TOPK_MAX`].
    #[error("top-k {topk} is not a positive multiple of {TOPK_MULTIPLE} up to {TOPK_MAX}")]
    TopkUnsupported {
        /// Top-k asked for.
        topk: usize,
    },
    /// A context limit outside 1..=[`CONTEXT_MAX`] tokens.
    #[error("a context of {context_len_max} tokens is outside 1..={CONTEXT_MAX}")]
    ContextOutOfRange {
        /// Longest context asked for, in tokens.
        context_len_max: usize,
    },
    /// Ranks outside 1..=[`RANKS_MAX`].
    #[error("{ranks} context-parallel ranks are outside 1..={RANKS_MAX}")]
    RanksOutOfRange {
        /// Ranks asked for.
        ranks: usize,
    },
    /// An interleave that is no power of two up to [`LOCAL_CONTEXT_MAX`].
    #[error("an interleave of {interleave} tokens is not a power of two up to {LOCAL_CONTEXT_MAX}")]
    InterleaveUnsupported {
        /// Interleave asked for, in tokens.
        interleave: usize,
    },
    /// More tokens on one rank than a local index numbers.
    #[error(
        "a context of {context_len_max} tokens puts {local_len} on one of {ranks} ranks, the limit is {LOCAL_CONTEXT_MAX}"
    )]
    LocalContextTooLong {
        /// Longest context asked for, in tokens.
        context_len_max: usize,
        /// Ranks.
        ranks: usize,
        /// Most tokens of a rank.
        local_len: usize,
    },
    /// A local top-N that is 0, no multiple of [`TOPK_MULTIPLE`], or not below the top-k.
    #[error("local top-{n} is not a positive multiple of {TOPK_MULTIPLE} below top-{topk}")]
    LocalTopkUnsupported {
        /// Local top-N asked for.
        n: usize,
        /// Top-k.
        topk: usize,
    },
    /// CTAs that cannot share a row.
    #[error("clusters of {cluster} CTAs cannot share rows: 1, 2, 4 and 8 can")]
    ClusterUnsupported {
        /// CTAs asked for.
        cluster: u32,
    },
    /// An MLA page that is no power of two.
    #[error("a KV page of {page} tokens is not a power of two")]
    PageNotPowerOfTwo {
        /// Tokens per page.
        page: usize,
    },
    /// An MLA page of more than [`CONTEXT_MAX`] tokens.
    #[error("a KV page of {page} tokens is longer than the longest context, {CONTEXT_MAX}")]
    KvPageTooLarge {
        /// Tokens per page.
        page: usize,
    },
    /// MLA blocks that would overlap.
    #[error("KV blocks {block_rows} rows apart overlap: a page has {page} tokens")]
    KvBlockTooSmall {
        /// Rows from one block to the next.
        block_rows: usize,
        /// Tokens per page.
        page: usize,
    },
    /// A pool whose rows an `i32` cannot number.
    #[error("a KV pool of {blocks} blocks of {block_rows} rows has 2^31 rows or more: physical rows are 32-bit")]
    PoolTooLarge {
        /// Blocks in the pool.
        blocks: usize,
        /// Rows from one block to the next.
        block_rows: usize,
    },
    /// A page stride that is smaller than the page or misaligned.
    #[error("a page stride of {stride} bytes is not a multiple of {PAGE_STRIDE_MULTIPLE} of at least {page_bytes}")]
    PageStrideUnsupported {
        /// Bytes from one page to the next.
        stride: usize,
        /// Bytes of a page.
        page_bytes: usize,
    },
    /// A number of cache blocks that an `i32` table entry cannot name.
    #[error("{blocks} cache blocks cannot be named by 32-bit table entries")]
    TooManyBlocks {
        /// Blocks in the cache.
        blocks: usize,
    },
    /// Table rows that would overlap.
    #[error("{table} rows are {stride} entries apart but {width} wide")]
    TableStrideTooSmall {
        /// Which table.
        table: &'static str,
        /// Entries from one row to the next.
        stride: usize,
        /// Entries of a row.
        width: usize,
    },
    /// A buffer that is not as long as the shape needs.
    #[error("{buffer} has {found} elements, the shape needs {needed}")]
    BufferLength {
        /// Which buffer.
        buffer: &'static str,
        /// Elements found.
        found: usize,
        /// Elements needed.
        needed: usize,
    },
    /// A table entry among those that a row needs which names no block.
    #[error("{table} entry {column} of request {request} is block {id}, the cache has {blocks}")]
    BlockOutOfRange {
        /// Which table.
        table: &'static str,
        /// Row of the table.
        request: usize,
        /// Column of the table.
        column: usize,
        /// The entry.
        id: i32,
        /// Blocks in the cache.
        blocks: usize,
    },
    /// A selected key whose physical row is negative or does not fit an `i32`.
    #[error("key {id} lies in block {block}: its physical row {row} is not a non-negative 32-bit number")]
    PhysicalRowOutOfRange {
        /// The selected key.
        id: usize,
        /// Its block, from the KV table.
        block: i32,
        /// The row that follows.
        row: i64,
    },
}

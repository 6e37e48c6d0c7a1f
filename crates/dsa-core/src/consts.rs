//! Fixed sizes and limits of the indexer. Everything that is bounded is bounded here.

/// Heads of the lightning indexer.
pub const HEADS: usize = 32;
/// Elements of one indexer head and of one key.
pub const DIM: usize = 128;
/// Tokens of one page of the indexer cache.
pub const PAGE: usize = 64;
/// Keys the score kernel processes at a time: the unit of scheduling and of the TP scratch.
pub const TILE: usize = 128;
/// Consecutive logits summarised by one entry of `tops`.
pub const KEYS_PER_TOP: usize = 8;
/// Elements covered by one MXFP4 block scale.
pub const MX_BLOCK: usize = 32;

/// Elements of the compressed query (`q_lora`).
pub const Q_LORA: usize = 1536;
/// Elements of the compressed key and value (`kv_lora`): the latent.
pub const KV_LORA: usize = 512;
/// Elements of a query head that are absorbed into the latent.
pub const NOPE: usize = 128;
/// Elements of a query head, and of a key, beside the latent.
pub const ROPE: usize = 64;
/// Rows of Q_B per head: its latent part, then its rope part.
pub const Q_HEAD: usize = NOPE + ROPE;
/// Most attention heads of one rank.
pub const MLA_HEADS_MAX: usize = 96;

/// Most requests of one step.
pub const REQUESTS_MAX: usize = 1024;
/// Most rows (verified tokens) of one request.
pub const Q_MAX: usize = 8;
/// Largest top-k.
pub const TOPK_MAX: usize = 4096;
/// Every top-k and every local top-N is a multiple of this.
pub const TOPK_MULTIPLE: usize = 128;
/// Longest context, in tokens.
pub const CONTEXT_MAX: usize = 1 << 20;
/// Most ranks of decode context parallelism.
pub const RANKS_MAX: usize = 16;
/// Most tokens of one request on one rank under context parallelism: a local index is 17 bits.
pub const LOCAL_CONTEXT_MAX: usize = 1 << 17;
/// The pitch of pitched (DCP) logits rows is a multiple of this many elements.
pub const PITCH_MULTIPLE: usize = 512;
/// Most rows of the MLA cache pool: a physical row is a non-negative `i32`.
pub const POOL_ROWS_MAX: u64 = i32::MAX as u64;
/// Page strides of the indexer cache are multiples of this many bytes, the unit of a bulk copy.
pub const PAGE_STRIDE_MULTIPLE: usize = 16;

const _: () = assert!(TILE.is_multiple_of(PAGE) && TILE.is_multiple_of(KEYS_PER_TOP));
const _: () = assert!(PITCH_MULTIPLE.is_multiple_of(TILE), "a tile never straddles two pitched rows");
const _: () = assert!(TOPK_MAX.is_multiple_of(TOPK_MULTIPLE));
const _: () = assert!(CONTEXT_MAX <= RANKS_MAX * LOCAL_CONTEXT_MAX);

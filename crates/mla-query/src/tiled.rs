//! `MlaQuery` for larger batches: the same results on the tensor core.
//!
//! The math, the rows, the cache and the arguments are those of [`query`](crate::query); so is the order of the norms' sums,
//! so `q_c` and the cache do not depend on the batch. The products are accumulated in FP32 by the tensor core.
//!
//! # Layout
//! Shared memory of a CTA with T = 16, 32 or 64 tokens:
//!
//! | field | shape | dtype | written by | read by |
//! |---|---|---|---|---|
//! | `q_b` | 3 x 192 x 64, with T = 64 6 x 96 x 64, 128-byte swizzle | BF16 | tensor copies | projection |
//! | `w_uk` | 128 x 64, 128-byte swizzle | BF16 | tensor copy | absorption |
//! | `q_c` | 3 x T x 64, 128-byte swizzle | BF16 | norm | projection |
//! | sums, over `q_c`'s first line | T x 8 x 4, swizzled | FP32 | the cluster's asynchronous stores | norm |
//! | `norm_weights` | 192, with T = 64 384 | BF16 | bulk copies | norm |
//! | `parts` | 8, with T = 64 4, x T/16 x 3 x 32 x 4 | FP32 | the cluster's asynchronous stores, and the CTA | gather |
//! | `latent_rows` | T/16 x 8 x 32 x 4 pairs | BF16 | the cluster's asynchronous stores | absorption |
//! | `signals` | 8, with T = 64 2 x 8, none with T = 16 | u32 | the cluster's asynchronous stores | nobody |
//! | `staged`, over `q_c` | T x 72 | the query's element | gather, absorption | publication, if the shape publishes |
//!
//! `parts` are tensor-core tiles as their lanes hold them, `latent_rows` A fragments likewise: two tiles of sums, side by
//! side, are one such fragment. With T > 16 both take the place of `q_b`: the latent rows that of its second line, of the
//! last two with T = 64. All is small enough for two CTAs per multiprocessor, so that the next launch loads its weights beside
//! this one.
//!
//! # Decomposition
//! A cluster of 8 CTAs per head and T tokens. A CTA owns 192 of the 1536 columns of `q_c` and Q_B, for all 192 rows, so each
//! element is loaded and normalised once per head, not once per CTA. With T = 64 it owns 384 columns for half of the rows: the
//! same bytes of Q_B, twice those of `q_c`, and less than half of the parts to exchange. A team of 8 lanes normalises a row or
//! two. For the norm's factors the CTAs exchange the sums of squares of lines of 64 columns, which the trees of the order of
//! sums hold. The products go by warps (`mma.sync`, 24 rows and all tokens each) or, with T = 64, by two warpgroups (`wgmma`, 48
//! rows each), the further lines normalised beside the products of the first; their sums go to the CTA that adds the parts of
//! each result in order, those of two eighths of the columns first: CTA c has latent rows 16 c .. 16 c + 16 and rope rows 8 c .. 8
//! c + 8, so that with halves those of a half's rows are its own four CTAs. Every CTA sends to the one after it first, because
//! those that send to one at a time share what it can take in. Of the absorption a CTA takes 64 columns, a warp 16 tokens and as
//! many tiles of 8 columns as there are groups of 16 tokens. Two more warps insert KV rows.
//!
//! # Synchronisation
//! As in [`query`](crate::query); every exchange completes on an mbarrier of its target. Where sums take the place of lines of
//! Q_B, every CTA first tells the cluster that it has read them: after a barrier of its computing warps, the first one stores one
//! word to each CTA asynchronously. Its completion releases what came before it at the scope of the cluster, without the fence
//! of a releasing arrival, which takes 1,200 cycles here.
//!
//! # Bound
//! Memory for the weights of the first tile of tokens, L2 for further ones. Behind a predecessor that has loaded them: one
//! load of rows, three exchanges over the cluster at 16 bytes a cycle from a CTA, of which that of `parts` is the largest
//! (672 bytes a token, 288 with T = 64), and the tensor core's 2 x T x 192 x 192 operations per CTA.

mod absorb;
mod cut;
mod exchange;
mod kernel;
mod norm;
mod products;

use dsa_core::consts::{KV_LORA, NOPE, Q_HEAD, Q_LORA};

pub(crate) use cut::{COPY_ROWS, Cut};
pub(crate) use kernel::build;

/// CTAs of a cluster.
const CLUSTER: u32 = 8;
/// Q_B rows that a CTA adds up.
const ROWS: u32 = Q_HEAD as u32 / CLUSTER;
/// Tensor-core tiles of 8 such rows.
const TILES: u32 = ROWS / 8;
/// An eighth of the columns of `q_c` and Q_B.
const SLICE: u32 = Q_LORA as u32 / CLUSTER;
/// Lines of 64 such columns: what a swizzled row of shared memory holds.
const LINES: u32 = SLICE / 64;
/// Words of a line's row.
const LINE: u32 = 32;
/// Words that a CTA sends of a token's sums of squares: its lines', padded.
const SUMS: u32 = LINES + 1;
/// Latent columns of a CTA.
const COLUMNS: u32 = KV_LORA as u32 / CLUSTER;
/// 16-row steps of the absorption.
const STEPS: u32 = NOPE as u32 / 16;

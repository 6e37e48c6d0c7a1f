//! `MlaQuery` for more than 8 tokens: the same results on the tensor core.
//!
//! The math, the rows, the cache and the arguments are those of [`query`](crate::query); so is the order of the norms' sums,
//! so `q_c` and the cache do not depend on the batch. The products are accumulated in FP32 by the tensor core.
//!
//! # Layout
//! Shared memory of a CTA with T tokens:
//!
//! | field | shape | dtype | written by | read by |
//! |---|---|---|---|---|
//! | `w_uk` | 128 x 64, 128-byte swizzle | BF16 | tensor copy | absorption |
//! | `w_qa` | 1536 | BF16 | bulk copy | norm |
//! | `q_c` | T x 1536, rows 3136 bytes apart | BF16 | norm | projection, its store |
//! | `parts` | 8 warps x T x 24 | FP32 | projection | gather, rope |
//! | `staged` | T x 88 | the query's element | gather, absorption | publication, if the shape publishes |
//! | `latent_rows` | T x 128, rows 272 bytes apart | BF16 | the cluster's asynchronous stores | absorption |
//!
//! The row pitches spread the rows that a warp reads together over all banks.
//!
//! # Decomposition
//! A cluster of 8 CTAs per head and T = 16 or 32 tokens; a CTA owns 24 rows of Q_B and 64 latent columns. A warp normalises
//! every eighth row, 48 values per lane. Of the projection it takes 192 of the 1536 columns, for all T x 24 results: its
//! share of Q_B waits in registers, 8 consecutive values per lane, in which order both operands take them. Eight partial
//! sums per result are added in order of warps. Of the absorption a warp takes 16 tokens and 16 columns; even columns
//! make one tensor-core tile and odd ones another, so that a word of W_UK serves both. Two more warps insert KV rows.
//!
//! # Synchronisation
//! As in [`query`](crate::query), with W_UK and the norm's weights on mbarriers: with the latter in registers, beside Q_B, the
//! norm would spill.
//!
//! # Bound
//! Memory for the weights of one tile of tokens; with more tiles, L2 and the latency of the steps above.

mod kernel;

pub(crate) use kernel::build;

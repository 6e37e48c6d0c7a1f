//! `MlaQuery`: the query of every head of a few tokens, and their KV rows into the cache.
//!
//! ```text
//! q_c     = bf16((q_a * r) * w_qa)                  r = rsqrt(sum(q_a^2) / 1536 + eps)
//! q[h]    = bf16(q_c . Q_B[h])                      192 rows: 128 latent, 64 rope
//! out[h]  = q[h][..128] . W_UK[h], then q[h][128..] BF16, or e4m3(bf16(x) * q_scale_inv)
//! entry   = latent bf16((kv_c * r') * w_kva) and k_pe, in the cache's form, at the token's slot
//! ```
//!
//! # Layout
//! Rows: [`mla_rows`](dsa_core::layout::mla_rows). Cache: [`mla_entry`](dsa_core::layout::mla_entry). Slots are int64: a
//! negative one is skipped, one at or past the cache's capacity is counted in `dropped` and changes nothing. Shared
//! memory of a CTA with R = 192 / cluster rows, L = 512 / cluster columns, T tokens, G = 512 / L column groups:
//!
//! | field | shape | dtype | written by | read by |
//! |---|---|---|---|---|
//! | `q_b` | R x 1536 | BF16 | bulk copy, or copies by all threads | projection |
//! | `w_uk` | 128 x L | BF16 | tensor copy | absorption |
//! | `q_c` | T x 1536 | BF16 | norm | projection, its store |
//! | `rows` | splits x T x R | FP32 | projection | gather, rope |
//! | `latent_rows` | T x 128 | FP32 | the cluster's asynchronous stores | absorption |
//! | `columns` | G x T x L | FP32 | absorption | output |
//! | `staged` | T x (L + R) | the query's element | rope, output | publication, if the shape publishes |
//!
//! # Decomposition
//! A cluster of 8 CTAs (16 for few heads) per head and T <= 8 tokens. Each CTA normalises all T rows (192 threads, 8
//! values each), multiplies its R rows of Q_B (a warp three rows; with R = 12 two warps share the 1536 columns), sends
//! the latent part of the result to every CTA of the cluster, and absorbs its L columns. Two more warps, in the CTAs of
//! head 0, each insert one token's KV row meanwhile. Larger batches are [tiled](crate::tiled).
//!
//! # Publication
//! With a [mailbox](dsa_dcp::mailbox) the two inserting warps also start its next call (fence, count, refill) while the others
//! compute, and then send the CTA's rows to every rank, from shared memory, 16 bytes at a time: to each rank's address, or
//! once to the multicast address.
//!
//! # Order of sums
//! RMSNorms: eight contiguous values by FMA, a tree over lanes with distances 1, 2, 4, 8, 16, then warps in order. The
//! products keep their own order, fixed by the shape: results are bit-reproducible.
//!
//! # Synchronisation
//! Weights are static and loaded before the dependency wait, `q_b` and `w_uk` each onto an mbarrier; or `q_b` in a copy group
//! of every thread, which waits for it before the barrier that hands `q_c` over. A late kernel waits at its end alone. A relaxed
//! cluster barrier makes every CTA's start and mbarriers known before the first store to a peer; the stores complete on the
//! target's `gathered` mbarrier, for which the target waits before it can end. Named barrier 1 joins the eight computing
//! warps, 2 the two inserting ones. Rows to publish are handed to the latter on mbarrier `staged_full`, at which every
//! computing thread arrives.
//!
//! # Bound
//! Memory: [`cost`] bytes of weights over bandwidth; behind a predecessor they are loaded already, and what is left is
//! latency: two norms' worth of reductions, 48 dependent FMAs, one exchange over the cluster.

pub(crate) mod insert;
pub(crate) mod kernel;
mod launch;
pub(crate) mod numbers;
pub(crate) mod output;
pub(crate) mod publish;
pub(crate) mod reduce;

pub use kernel::{MlaArgs, MlaParams, build, qb_map, uk_map};
pub use launch::{MlaCache, MlaQuery, MlaStep, MlaWeights};

use dsa_core::consts::{KV_LORA, NOPE, Q_HEAD, Q_LORA};
use dsa_core::layout::mla_rows::{QKV, QUERY};
use dsa_kernels::Cost;

use crate::shape::MlaShape;

/// Unique bytes and operations of one step of `tokens` tokens that all have a slot.
pub fn cost(shape: &MlaShape, tokens: usize) -> Cost {
    let heads = shape.heads() as usize;
    let weights = 2 * (heads * (Q_HEAD * Q_LORA + NOPE * KV_LORA) + Q_LORA + KV_LORA);
    let q_c = if shape.store_qc() { 2 * Q_LORA } else { 0 };
    let token = 2 * QKV + 8 + heads * QUERY * shape.query_bytes() + q_c + shape.form().entry_bytes();
    Cost {
        hbm_bytes: (weights + tokens * token) as u64,
        flops: (2 * tokens * heads * (Q_HEAD * Q_LORA + NOPE * KV_LORA)) as u64,
    }
}

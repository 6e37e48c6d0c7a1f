//! The rows that the MLA query reads and writes.
//!
//! A row of the fused projection `qkv`, 4224 bytes; rows are any 16-byte multiple apart:
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | q_a | `0..3072` | BF16 | 1536 | 16 | the fused projection | the MLA query |
//! | kv_c | `3072..4096` | BF16 | 512 | 16 | the fused projection | the MLA query |
//! | k_pe | `4096..4224` | BF16 | 64 | 16 | the fused projection | the MLA query |
//!
//! One head of the query, 576 elements of BF16 or E4M3, by elements:
//!
//! | field | elements | written by | read by |
//! |---|---|---|---|
//! | latent | `0..512` | the MLA query | sparse attention |
//! | rope | `512..576` | the MLA query | sparse attention |

use std::ops::Range;

use super::field::Field;
use crate::consts::{KV_LORA, Q_LORA, ROPE};

/// Elements of `q_a` in a `qkv` row.
pub const Q_A: Range<usize> = 0..Q_LORA;
/// Elements of `kv_c` in a `qkv` row.
pub const KV_C: Range<usize> = Q_A.end..Q_A.end + KV_LORA;
/// Elements of `k_pe` in a `qkv` row.
pub const K_PE: Range<usize> = KV_C.end..KV_C.end + ROPE;
/// Elements of a `qkv` row.
pub const QKV: usize = K_PE.end;

/// Latent elements of a query head.
pub const LATENT: Range<usize> = 0..KV_LORA;
/// Rope elements of a query head.
pub const QUERY_ROPE: Range<usize> = LATENT.end..LATENT.end + ROPE;
/// Elements of a query head.
pub const QUERY: usize = QUERY_ROPE.end;

const _: () = assert!(QKV == 2112 && QUERY == 576);

/// The table of a `qkv` row.
pub fn fields_qkv() -> [Field; 3] {
    [("q_a", Q_A), ("kv_c", KV_C), ("k_pe", K_PE)].map(|(name, elements)| Field {
        name,
        bytes: 2 * elements.start..2 * elements.end,
        element_bytes: 2,
        count: elements.len(),
        align: 16,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_tile_a_row() {
        assert!(super::super::field::tiles(&fields_qkv(), 2 * QKV));
        assert_eq!(QUERY_ROPE.end, LATENT.len() + QUERY_ROPE.len());
    }
}

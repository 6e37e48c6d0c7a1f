//! The memory of a query mailbox: one allocation per rank, the same layout on every rank.
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | box 0 | `0..box` | the query's element, rows of 576: `[token][q head]` | tokens x q_heads | 16 | every rank's query kernel | whoever gathers, attention |
//! | box 1 | `box..2 box` | as box 0 | tokens x q_heads | 16 | as box 0 | as box 0 |
//! | box 2 | `2 box..3 box` | as box 0 | tokens x q_heads | 16 | as box 0 | as box 0 |
//!
//! Calls use the boxes in turn. Of a token's `q_heads` rows, rank r fills the `heads` from
//! `r * heads` on; what is left to 64 or 128 is sparse attention's padding, which nobody touches: sentinels, NaN as BF16 and
//! as E4M3. A word of all ones has not arrived.
//!
//! The state is this rank's own:
//!
//! | field | words | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | call | 0 | u32: number of the last call published | 1 | 16 | last CTA of the query kernel | query kernel, whoever gathers |
//! | tokens | 1 | u32: tokens of that call | 1 | 4 | last CTA of the query kernel | query kernel |
//! | box | 2 | u32: box of that call, which is not its number modulo 3 | 1 | 8 | last CTA of the query kernel | query kernel, whoever gathers |
//! | arrived | 3 | u32: CTAs of the running query kernel that have read the above; 0 between kernels | 1 | 4 | query kernel | query kernel |

use dsa_core::layout::field::Field;

use super::MailboxShape;

/// Boxes used in turn.
pub const BOXES: usize = 3;
/// Bytes that are looked at together.
pub const CHUNK_BYTES: usize = 16;
/// A word that has not arrived.
pub const SENTINEL: u32 = u32::MAX;
/// Every byte of [`SENTINEL`].
pub const SENTINEL_BYTE: u8 = u8::MAX;
/// Words of the state.
pub const STATE_WORDS: usize = 4;
/// Word of the state: number of the last call published.
pub const CALL: u32 = 0;
/// Word of the state: tokens of that call.
pub const TOKENS: u32 = 1;
/// Word of the state: its box.
pub const BOX: u32 = 2;
/// Word of the state: CTAs that have read the others.
pub const ARRIVED: u32 = 3;

/// The first table above.
pub fn fields(shape: &MailboxShape) -> [Field; BOXES] {
    let (rows, bytes) = (shape.tokens() * shape.q_heads(), shape.box_bytes());
    let field = |name, start| Field {
        name,
        bytes: start..start + bytes,
        element_bytes: shape.row_bytes(),
        count: rows,
        align: CHUNK_BYTES,
    };
    [field("box 0", 0), field("box 1", bytes), field("box 2", 2 * bytes)]
}

#[cfg(test)]
mod tests {
    use dsa_core::layout::field::tiles;
    use dsa_core::numerics::{bf16, e4m3};

    use super::*;
    use crate::mailbox::QueryElement;

    #[test]
    fn boxes_tile_the_memory() {
        for (ranks, heads, q_heads, tokens, element) in
            [(2, 6, 64, 1, QueryElement::Bf16), (8, 12, 128, 1024, QueryElement::E4m3)]
        {
            let shape = MailboxShape::new(ranks, heads, q_heads, tokens, element).unwrap();
            assert!(tiles(&fields(&shape), shape.bytes()));
        }
    }

    #[test]
    fn no_converted_value_is_a_sentinel() {
        // Every BF16 there is, as the source of both conversions, and what rounds to each.
        for bits in 0..=u16::MAX {
            let exact = bf16::to_f32(bits);
            for x in [exact, f32::from_bits(exact.to_bits() | 0x7FFF), f32::from_bits(exact.to_bits() | 0x8001)] {
                assert_ne!(bf16::from_f32(x), 0xFFFF, "{x}");
                assert_ne!(e4m3::from_f32(x), SENTINEL_BYTE, "{x}");
            }
        }
    }
}

//! What all ranks of a mailbox agree on.

use dsa_core::ShapeError;
use dsa_core::consts::{RANKS_MAX, REQUESTS_MAX};
use dsa_core::layout::mla_rows::QUERY;

use super::layout::{BOXES, CHUNK_BYTES};
use crate::error::DcpError;
use crate::group_shape::GroupShape;

/// Element of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueryElement {
    /// BF16; converted values are never 0xFFFF.
    Bf16,
    /// E4M3; converted values are never 0xFF.
    E4m3,
}

impl QueryElement {
    /// Bytes of one.
    pub const fn bytes(self) -> usize {
        match self {
            QueryElement::Bf16 => 2,
            QueryElement::E4m3 => 1,
        }
    }
}

/// Sizes of a mailbox; equal on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MailboxShape {
    ranks: u32,
    heads: u32,
    q_heads: u32,
    tokens: u32,
    element: QueryElement,
}

/// Head rows per token that sparse attention takes.
pub const Q_HEADS: [usize; 2] = [64, 128];

impl std::fmt::Display for MailboxShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MailboxShape { ranks, heads, q_heads, tokens, element } = self;
        write!(f, "{ranks} ranks with {heads} heads each, rows of {q_heads} heads, {tokens} tokens, {element:?}")
    }
}

impl MailboxShape {
    /// Calls of up to `tokens` tokens, `heads` heads from each of `ranks` ranks, in rows of `q_heads` heads per token.
    ///
    /// # Errors
    /// Ranks outside 1..=16, tokens outside 1..=1024, rows of other than 64 or 128 heads or of fewer than all ranks have.
    pub fn new(
        ranks: usize,
        heads: usize,
        q_heads: usize,
        tokens: usize,
        element: QueryElement,
    ) -> Result<Self, DcpError> {
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(ShapeError::RanksOutOfRange { ranks }.into());
        }
        if !(1..=REQUESTS_MAX).contains(&tokens) {
            return Err(DcpError::TokensOutOfRange { tokens, max: REQUESTS_MAX });
        }
        if !Q_HEADS.contains(&q_heads) || heads == 0 || heads.saturating_mul(ranks) > q_heads {
            return Err(DcpError::HeadsUnsupported { ranks, heads, q_heads });
        }
        let word = |n: usize| n as u32;
        Ok(MailboxShape {
            ranks: word(ranks),
            heads: word(heads),
            q_heads: word(q_heads),
            tokens: word(tokens),
            element,
        })
    }

    /// As [`new`](Self::new), in the shortest rows that hold all ranks' heads.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn padded(ranks: usize, heads: usize, tokens: usize, element: QueryElement) -> Result<Self, DcpError> {
        let [short, long] = Q_HEADS;
        let q_heads = if heads.saturating_mul(ranks) <= short { short } else { long };
        Self::new(ranks, heads, q_heads, tokens, element)
    }

    /// Ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks as usize
    }

    /// Heads of each rank.
    pub const fn heads(&self) -> usize {
        self.heads as usize
    }

    /// Head rows of a token.
    pub const fn q_heads(&self) -> usize {
        self.q_heads as usize
    }

    /// Most tokens of a call.
    pub const fn tokens(&self) -> usize {
        self.tokens as usize
    }

    /// Element of the rows.
    pub const fn element(&self) -> QueryElement {
        self.element
    }

    /// Head rows of a token that are published; those after them stay as they are.
    pub const fn published(&self) -> usize {
        self.ranks() * self.heads()
    }

    /// Bytes of one head's row.
    pub const fn row_bytes(&self) -> usize {
        QUERY * self.element.bytes()
    }

    /// Bytes of one token's rows.
    pub const fn token_bytes(&self) -> usize {
        self.q_heads() * self.row_bytes()
    }

    /// 16-byte chunks of a token that are published.
    pub const fn chunks(&self) -> usize {
        self.published() * self.row_bytes() / CHUNK_BYTES
    }

    /// Bytes of one box.
    pub const fn box_bytes(&self) -> usize {
        self.tokens() * self.token_bytes()
    }

    /// Bytes of a rank's memory: three boxes, 453 MB for 1,024 tokens of 128 BF16 heads.
    pub const fn bytes(&self) -> usize {
        BOXES * self.box_bytes()
    }

    /// First byte of the row of `head` of `rank` for `token` in box `index`.
    pub const fn row(&self, index: usize, token: usize, rank: usize, head: usize) -> usize {
        assert!(index < BOXES && token < self.tokens() && rank < self.ranks() && head < self.heads());
        let row = token * self.q_heads() + rank * self.heads() + head;
        index * self.box_bytes() + row * self.row_bytes()
    }
}

const _: () = assert!(QUERY.is_multiple_of(CHUNK_BYTES), "rows are whole chunks");

impl GroupShape for MailboxShape {
    fn ranks(&self) -> usize {
        MailboxShape::ranks(self)
    }

    fn encode(&self) -> Vec<u8> {
        let MailboxShape { ranks, heads, q_heads, tokens, element } = *self;
        [ranks, heads, q_heads, tokens, element.bytes() as u32].iter().flat_map(|n| n.to_le_bytes()).collect()
    }

    fn describe(bytes: &[u8]) -> String {
        let numbers: Vec<usize> = bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes) as usize).collect();
        let shape = match numbers[..] {
            [ranks, heads, q_heads, tokens, element @ 1..=2] => {
                let element = if element == 1 { QueryElement::E4m3 } else { QueryElement::Bf16 };
                MailboxShape::new(ranks, heads, q_heads, tokens, element).ok()
            }
            _ => None,
        };
        shape.map_or_else(|| format!("an unknown kind ({} bytes)", bytes.len()), |shape| shape.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn rows_tile_what_is_published() {
        for element in [QueryElement::Bf16, QueryElement::E4m3] {
            let shape = MailboxShape::new(4, 12, 64, 3, element).unwrap();
            let mut rows = HashSet::new();
            for (index, token, rank, head) in (0..BOXES)
                .flat_map(|n| (0..3).flat_map(move |t| (0..4).flat_map(move |r| (0..12).map(move |h| (n, t, r, h)))))
            {
                let at = shape.row(index, token, rank, head);
                assert!(at.is_multiple_of(CHUNK_BYTES) && at + shape.row_bytes() <= shape.bytes() && rows.insert(at));
            }
            assert_eq!(shape.chunks() * CHUNK_BYTES, 48 * 576 * element.bytes());
        }
    }

    #[test]
    fn limits_are_refused_by_name() {
        let new = |ranks, heads, q_heads, tokens| MailboxShape::new(ranks, heads, q_heads, tokens, QueryElement::Bf16);
        assert!(new(16, 8, 128, 1024).is_ok() && new(1, 1, 64, 1).is_ok());
        assert!(matches!(new(17, 1, 64, 1), Err(DcpError::Shape(ShapeError::RanksOutOfRange { ranks: 17 }))));
        assert!(matches!(new(0, 1, 64, 1), Err(DcpError::Shape(ShapeError::RanksOutOfRange { ranks: 0 }))));
        for tokens in [0, 1025] {
            assert!(matches!(new(1, 1, 64, tokens), Err(DcpError::TokensOutOfRange { max: 1024, .. })));
        }
        for (ranks, heads, q_heads) in [(8, 12, 64), (8, 17, 128), (2, 6, 12), (2, 0, 64), (2, usize::MAX, 64)] {
            let refused = new(ranks, heads, q_heads, 1);
            assert!(matches!(refused, Err(DcpError::HeadsUnsupported { .. })), "{ranks} {heads} {q_heads}");
        }
    }

    #[test]
    fn padded_rows_are_the_shortest() {
        let padded = |ranks, heads| MailboxShape::padded(ranks, heads, 1, QueryElement::Bf16);
        for (ranks, heads, q_heads) in [(1, 1, 64), (8, 8, 64), (5, 13, 128), (8, 16, 128)] {
            assert_eq!(padded(ranks, heads).unwrap().q_heads(), q_heads, "{ranks} {heads}");
        }
        for (ranks, heads) in [(8, 17), (2, usize::MAX), (2, 0)] {
            assert!(matches!(padded(ranks, heads), Err(DcpError::HeadsUnsupported { .. })), "{ranks} {heads}");
        }
    }

    #[test]
    fn a_shape_survives_the_wire() {
        let shape = MailboxShape::new(8, 12, 128, 64, QueryElement::E4m3).unwrap();
        assert_eq!(MailboxShape::describe(&shape.encode()), shape.to_string());
        assert_eq!(MailboxShape::describe(&[1, 2]), "an unknown kind (2 bytes)");
        assert_eq!(MailboxShape::describe(&[0; 20]), "an unknown kind (20 bytes)");
    }
}

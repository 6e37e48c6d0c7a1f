//! The memory of an exchange that peers write: one allocation per rank, the same layout on every rank.
//!
//! | field | bytes | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | slots | `0..slots` | LL pairs, [`ll_slot`](dsa_core::layout::ll_slot), of N words, or of K if the exchange is direct | 2 x ranks x rows x pairs | 16 | every rank's local top-k, or merge if it is direct | merge |
//! | lists | to the end | LL pairs of K words and the row's sequence, `[rescue slot][row]`; none if it is direct | rescue slots x rows x pairs | 16 | saturated ranks' merges | merge |
//!
//! The status block is this rank's own:
//!
//! | field | words | dtype | count | align | written by | read by |
//! |---|---|---|---|---|---|---|
//! | what | 0 | u32: 0 works, 1 words late, 2 list late, 3 query late, 0x100 gather given up | 1 | 16 | merge, gather, host | local top-k, merge, query, gather, host |
//! | row | 1 | u32: row, or the query's token | 1 | 4 | merge, gather | host |
//! | rank | 2 | u32: who is late | 1 | 4 | merge, gather | host |
//! | epoch | 3 | u32: what was expected; the query's call | 1 | 4 | merge, gather | host |
//!
//! The exchange and the query mailbox have one each.

use dsa_core::layout::field::Field;
use dsa_core::layout::ll_slot::PAIR_BYTES;

use crate::error::{DcpError, Waiting};
use crate::shape::ExchangeShape;

/// Words of the status block.
pub const STATUS_WORDS: usize = 4;
/// `what` of words that are late.
pub const LATE_WORDS: u32 = 1;
/// `what` of a list that is late.
pub const LATE_LIST: u32 = 2;
/// `what` of query rows that are late.
pub const LATE_QUERY: u32 = 3;
/// `what` of a gather that the host gave up on; it knows no row and no rank.
pub const LATE_GATHER: u32 = 0x100;

/// Byte offsets of the shared fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SymmetricLayout {
    shape: ExchangeShape,
}

impl SymmetricLayout {
    /// The layout of an exchange.
    pub fn new(shape: ExchangeShape) -> Self {
        SymmetricLayout { shape }
    }

    /// First byte of the lists; the slots end here.
    pub fn lists(&self) -> usize {
        self.shape.slots().bytes()
    }

    /// Bytes of a list.
    pub fn list_bytes(&self) -> usize {
        self.shape.list().words() / 2 * PAIR_BYTES
    }

    fn list_count(&self) -> usize {
        if self.shape.is_direct() { 0 } else { self.shape.rescue_slots() * self.shape.rows() }
    }

    /// Bytes in use.
    pub fn bytes(&self) -> usize {
        self.lists() + self.list_count() * self.list_bytes()
    }

    /// The first table above.
    pub fn fields(&self) -> [Field; 2] {
        let field = |name, bytes, element_bytes, count| Field { name, bytes, element_bytes, count, align: PAIR_BYTES };
        [
            field("slots", 0..self.lists(), PAIR_BYTES, self.lists() / PAIR_BYTES),
            field("lists", self.lists()..self.bytes(), self.list_bytes(), self.list_count()),
        ]
    }
}

/// What a status block of `rank` says.
///
/// # Errors
/// [`DcpError::PeerLate`] unless the exchange works.
pub fn decode_status(status: &[u32], rank: usize) -> Result<(), DcpError> {
    let waiting = match status[0] {
        0 => return Ok(()),
        LATE_WORDS => Waiting::Words,
        LATE_QUERY => Waiting::Query,
        _ => Waiting::Rescue,
    };
    let (row, peer, epoch) = (status[1] as usize, status[2] as usize, status[3]);
    Err(DcpError::PeerLate { rank, peer, row, epoch, waiting })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsa_core::Ownership;
    use dsa_core::layout::field::tiles;

    #[test]
    fn fields_tile_the_memory_in_vectors() {
        for (ranks, rows, n, topk) in
            [(1, 1, 128, 256), (3, 5, 384, 512), (2, 9, 512, 2048), (16, 7, 512, 2048), (8, 64, 128, 4096)]
        {
            let own = Ownership::new(ranks, 1).unwrap();
            let shape = ExchangeShape::new(own, rows, n, topk, 4096).unwrap();
            let layout = SymmetricLayout::new(shape);
            assert!(tiles(&layout.fields(), layout.bytes()));
            assert_eq!(layout.lists() == layout.bytes(), shape.is_direct(), "{shape}");
        }
    }

    #[test]
    fn a_status_names_who_is_late() {
        assert!(decode_status(&[0; 4], 3).is_ok());
        let late = decode_status(&[2, 5, 1, 77], 3).unwrap_err();
        let text = "rank 3 waited in vain for the rescue list of rank 1, row 5, epoch 77: reset the exchange";
        assert_eq!(late.to_string(), text);
        let late = decode_status(&[1, 0, 2, 1], 0).unwrap_err();
        assert!(matches!(late, DcpError::PeerLate { rank: 0, peer: 2, row: 0, epoch: 1, waiting: Waiting::Words }));
    }
}

//! What all ranks of an exchange agree on.

use dsa_core::consts::{Q_MAX, REQUESTS_MAX};
use dsa_core::layout::b_row::BRow;
use dsa_core::layout::ll_slot::LlSlots;
use dsa_core::{Ownership, ShapeError};
use dsa_kernels::local_topk::LocalTopkShape;

use crate::error::DcpError;
use crate::group_shape::GroupShape;

/// Keys that all ranks' first K may be in a [direct](ExchangeShape::is_direct) exchange: 32 KB, so that two merges share a
/// multiprocessor.
const DIRECT_KEYS_MAX: usize = 8192;

/// Sizes of an exchange; equal on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExchangeShape {
    own: Ownership,
    rows: usize,
    n: usize,
    topk: usize,
    context_len_max: usize,
    local_len_max: usize,
}

impl std::fmt::Display for ExchangeShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ExchangeShape { own, rows, n, topk, context_len_max, .. } = self;
        let (ranks, interleave) = (own.ranks(), own.interleave());
        write!(
            f,
            "{ranks} ranks (interleave {interleave}), {rows} rows, local top-{n} of top-{topk}, {context_len_max} tokens"
        )
    }
}

impl ExchangeShape {
    /// Steps of up to `rows` rows with the first `topk` keys of contexts up to `context_len_max` tokens, of which each rank
    /// sends its first `n`.
    ///
    /// # Errors
    /// The first violated limit.
    pub fn new(own: Ownership, rows: usize, n: usize, topk: usize, context_len_max: usize) -> Result<Self, DcpError> {
        LocalTopkShape::new(n, topk)?;
        let local_len_max = own.local_len_max(context_len_max)?;
        ExchangeShape { own, rows, n, topk, context_len_max, local_len_max }.with_rows(rows)
    }

    /// The same exchange for steps of other sizes. Kernels do not depend on it.
    ///
    /// # Errors
    /// [`DcpError::RowsOutOfRange`].
    pub fn with_rows(self, rows: usize) -> Result<Self, DcpError> {
        let max = Q_MAX * REQUESTS_MAX;
        if !(1..=max).contains(&rows) {
            return Err(DcpError::RowsOutOfRange { rows, max });
        }
        Ok(ExchangeShape { rows, ..self })
    }

    /// Whether kernels built for one serve the other: all but the rows agrees.
    pub fn shares_kernels(&self, other: &ExchangeShape) -> bool {
        ExchangeShape { rows: other.rows, ..*self } == *other
    }

    /// The dealing of tokens to ranks.
    pub fn ownership(&self) -> Ownership {
        self.own
    }

    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.own.ranks()
    }

    /// Most rows of a step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Keys that each rank sends of a row.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Keys selected of a row.
    pub fn topk(&self) -> usize {
        self.topk
    }

    /// Longest context, in tokens.
    pub fn context_len_max(&self) -> usize {
        self.context_len_max
    }

    /// Most tokens of a context on one rank.
    pub fn local_len_max(&self) -> usize {
        self.local_len_max
    }

    /// One more than the largest global id that a rank with as many tokens could send.
    pub fn ids(&self) -> usize {
        let interleave = self.own.interleave();
        self.local_len_max.next_multiple_of(interleave) * self.ranks()
    }

    /// Whether merges select and push each rank's first K keys by themselves, without a local top-k: where all ranks' first N
    /// are no more than K, some rank always has to send more, and few enough ranks are better asked for it at once.
    pub fn is_direct(&self) -> bool {
        self.ranks() * self.n <= self.topk && self.ranks() * self.topk <= DIRECT_KEYS_MAX
    }

    /// Lists of saturated ranks that a row may need: each saturated rank has N keys among the first K - 1.
    pub fn rescue_slots(&self) -> usize {
        ((self.topk - 1) / self.n).min(self.ranks())
    }

    /// Layout of what local top-k selects.
    pub fn words(&self) -> BRow {
        BRow::new(self.n)
    }

    /// Layout of what a saturated rank sends, and every rank of a direct exchange.
    pub fn list(&self) -> BRow {
        BRow::new(self.topk)
    }

    /// Layout of what every rank sends.
    pub fn sent(&self) -> BRow {
        if self.is_direct() { self.list() } else { self.words() }
    }

    /// Where that arrives.
    pub fn slots(&self) -> LlSlots {
        LlSlots::new(self.ranks(), self.rows, self.sent())
    }

    /// The local top-k kernel that pushes into this exchange; none if it is [direct](ExchangeShape::is_direct).
    ///
    /// # Errors
    /// None that the shape has not already excluded.
    pub fn local_topk(&self) -> Result<Option<LocalTopkShape>, ShapeError> {
        let pushing = || LocalTopkShape::new(self.n, self.topk)?.with_push(self.ranks());
        if self.is_direct() { Ok(None) } else { pushing().map(Some) }
    }
}

impl GroupShape for ExchangeShape {
    fn ranks(&self) -> usize {
        ExchangeShape::ranks(self)
    }

    fn encode(&self) -> Vec<u8> {
        let numbers = [self.own.ranks(), self.own.interleave(), self.rows, self.n, self.topk, self.context_len_max];
        numbers.iter().flat_map(|&n| (n as u64).to_le_bytes()).collect()
    }

    fn describe(bytes: &[u8]) -> String {
        let numbers: Vec<usize> = bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes) as usize).collect();
        let shape = match numbers[..] {
            [ranks, interleave, rows, n, topk, context_len_max] => Ownership::new(ranks, interleave)
                .map_err(DcpError::from)
                .and_then(|own| ExchangeShape::new(own, rows, n, topk, context_len_max))
                .ok(),
            _ => None,
        };
        shape.map_or_else(|| format!("an unknown kind ({} bytes)", bytes.len()), |shape| shape.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(ranks: usize, n: usize, topk: usize) -> ExchangeShape {
        ExchangeShape::new(Ownership::new(ranks, 1).unwrap(), 4, n, topk, 1 << 16).unwrap()
    }

    #[test]
    fn rescue_slots_follow_from_the_keys_that_saturated_ranks_hold() {
        assert_eq!(shape(8, 512, 2048).rescue_slots(), 3);
        assert_eq!(shape(8, 256, 2048).rescue_slots(), 7);
        assert_eq!(shape(2, 128, 2048).rescue_slots(), 2, "no more than ranks");
        assert_eq!(shape(8, 384, 512).rescue_slots(), 1);
    }

    #[test]
    fn ids_cover_what_any_rank_could_send() {
        for (ranks, interleave, context) in [(3, 4, 1000), (16, 64, 70_000), (1, 1, 17), (5, 1, 1)] {
            let own = Ownership::new(ranks, interleave).unwrap();
            let shape = ExchangeShape::new(own, 1, 128, 256, context).unwrap();
            let last = (0..ranks).map(|rank| own.global_of(rank, shape.local_len_max() - 1)).max();
            assert!(last.unwrap() < shape.ids() && shape.ids() <= 1 << own.gid_bits(), "{shape}");
        }
    }

    #[test]
    fn limits_are_refused_by_name() {
        let own = Ownership::new(2, 1).unwrap();
        let refused = |rows, n, topk, context| ExchangeShape::new(own, rows, n, topk, context).unwrap_err();
        assert!(matches!(refused(0, 128, 256, 9), DcpError::RowsOutOfRange { rows: 0, max: 8192 }));
        assert!(matches!(refused(8193, 128, 256, 9), DcpError::RowsOutOfRange { rows: 8193, .. }));
        let long = refused(1, 128, 256, (1 << 18) + 1);
        assert!(matches!(long, DcpError::Shape(ShapeError::LocalContextTooLong { .. })));
        assert!(matches!(refused(1, 256, 256, 9), DcpError::Shape(ShapeError::LocalTopkUnsupported { .. })));
    }

    #[test]
    fn a_shape_survives_the_wire() {
        let shape = shape(3, 128, 512);
        assert_eq!(ExchangeShape::describe(&shape.encode()), shape.to_string());
        assert_eq!(ExchangeShape::describe(&[1, 2]), "an unknown kind (2 bytes)");
    }
}

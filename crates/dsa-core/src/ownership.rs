//! Which rank owns a token under decode context parallelism, and where it keeps it.
//!
//! Tokens are dealt to `W` ranks in blocks of `I` (the interleave, a power of two): token `g` lives on rank
//! `(g / I) % W` at local index `(g / (I W)) I + g % I`. On each rank, local order is global order.
//!
//! A row's local length follows from the row's *global* end, rank by rank. It never follows from another row's local
//! length: one global step back shortens the row of a single rank.

use crate::consts::{CONTEXT_MAX, LOCAL_CONTEXT_MAX, RANKS_MAX};
use crate::error::ShapeError;

/// The dealing of tokens to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ownership {
    ranks: usize,
    interleave: usize,
}

impl Ownership {
    /// `ranks` ranks, blocks of `interleave` tokens.
    ///
    /// # Errors
    /// Ranks outside 1..=[`RANKS_MAX`]; an interleave that is no power of two up to [`LOCAL_CONTEXT_MAX`].
    pub fn new(ranks: usize, interleave: usize) -> Result<Self, ShapeError> {
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(ShapeError::RanksOutOfRange { ranks });
        }
        if !interleave.is_power_of_two() || interleave > LOCAL_CONTEXT_MAX {
            return Err(ShapeError::InterleaveUnsupported { interleave });
        }
        Ok(Self { ranks, interleave })
    }

    /// Number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// Tokens dealt to a rank at a time.
    pub const fn interleave(&self) -> usize {
        self.interleave
    }

    /// The rank that owns token `global`.
    pub const fn rank_of(&self, global: usize) -> usize {
        global / self.interleave % self.ranks
    }

    /// The index of token `global` on the rank that owns it.
    pub const fn local_of(&self, global: usize) -> usize {
        global / (self.interleave * self.ranks) * self.interleave + global % self.interleave
    }

    /// The token that `rank` keeps at `local`.
    pub const fn global_of(&self, rank: usize, local: usize) -> usize {
        (local / self.interleave * self.ranks + rank) * self.interleave + local % self.interleave
    }

    /// How many of the first `global_len` tokens `rank` owns.
    pub fn local_len(&self, rank: usize, global_len: usize) -> usize {
        assert!(rank < self.ranks);
        let round = self.interleave * self.ranks;
        let whole = global_len / round * self.interleave;
        whole + (global_len % round).saturating_sub(rank * self.interleave).min(self.interleave)
    }

    /// As [`local_len`](Ownership::local_len) of a row end: at or below 0 is none.
    pub fn local_end(&self, rank: usize, global_end: i32) -> i32 {
        self.local_len(rank, global_end.max(0) as usize) as i32
    }

    /// Most tokens of a context of `context_len_max` on one rank.
    ///
    /// # Errors
    /// A context outside 1..=[`CONTEXT_MAX`], or more than [`LOCAL_CONTEXT_MAX`] tokens on a rank: a local index is 17
    /// bits.
    pub fn local_len_max(&self, context_len_max: usize) -> Result<usize, ShapeError> {
        if !(1..=CONTEXT_MAX).contains(&context_len_max) {
            return Err(ShapeError::ContextOutOfRange { context_len_max });
        }
        // Rank 0 comes first in every round.
        let local_len = self.local_len(0, context_len_max);
        if local_len > LOCAL_CONTEXT_MAX {
            return Err(ShapeError::LocalContextTooLong { context_len_max, ranks: self.ranks, local_len });
        }
        Ok(local_len)
    }

    /// Bits of a global id: of [`LOCAL_CONTEXT_MAX`] tokens on each rank.
    pub const fn gid_bits(&self) -> u32 {
        (self.ranks * LOCAL_CONTEXT_MAX).next_power_of_two().trailing_zeros()
    }
}

const _: () = assert!(LOCAL_CONTEXT_MAX == 1 << 17);

#[cfg(test)]
mod tests {
    use super::*;

    fn each() -> impl Iterator<Item = Ownership> {
        (1..=RANKS_MAX).flat_map(|ranks| [1, 2, 4, 16, 64].map(|interleave| Ownership::new(ranks, interleave).unwrap()))
    }

    #[test]
    fn dealing_token_by_token_gives_owner_index_and_lengths() {
        for own in each() {
            let mut held = vec![Vec::new(); own.ranks()];
            for global in 0..700 {
                for (rank, tokens) in held.iter().enumerate() {
                    assert_eq!(own.local_len(rank, global), tokens.len(), "{own:?}, rank {rank} of {global} tokens");
                }
                // Block by block, round robin.
                let (rank, local) = (own.rank_of(global), own.local_of(global));
                assert_eq!(rank, (global / own.interleave()) % own.ranks());
                assert_eq!(local, held[rank].len(), "{own:?}: token {global} is appended");
                assert_eq!(own.global_of(rank, local), global);
                held[rank].push(global);
            }
            assert!(held.iter().all(|tokens| tokens.is_sorted()), "local order is global order");
        }
    }

    #[test]
    fn draft_rows_are_bounded_rank_by_rank() {
        // W = 4, global length 9, three rows: bounds 7, 8, 9.
        let own = Ownership::new(4, 1).unwrap();
        let counts = [0, 1, 2, 3].map(|rank| [7, 8, 9].map(|end| own.local_end(rank, end)));
        assert_eq!(counts, [[2, 2, 3], [2, 2, 2], [2, 2, 2], [1, 2, 2]]);
    }

    #[test]
    fn blocks_of_tokens_are_dealt_whole() {
        let lengths = |interleave, len| {
            let own = Ownership::new(2, interleave).unwrap();
            [0, 1].map(|rank| own.local_len(rank, len))
        };
        assert_eq!(lengths(64, 130), [66, 64]);
        assert_eq!(lengths(1, 130), [65, 65]);
        assert_eq!([127, 128, 129].map(|len| lengths(64, len)), [[64, 63], [64, 64], [65, 64]]);
    }

    #[test]
    fn a_global_position_is_no_local_slot() {
        let own = Ownership::new(4, 1).unwrap();
        assert_eq!((own.rank_of(21), own.local_of(21)), (1, 5));
        for global in 0..64 {
            assert_eq!((own.rank_of(global), own.local_of(global)), (global % 4, global / 4));
        }
    }

    #[test]
    fn a_rank_may_own_nothing() {
        let own = Ownership::new(4, 1).unwrap();
        assert_eq!([0, 1, 2, 3].map(|rank| own.local_len(rank, 2)), [1, 1, 0, 0]);
        assert_eq!([0, -1, i32::MIN].map(|end| own.local_end(0, end)), [0; 3]);
    }

    #[test]
    fn ids_fit_their_bits_and_long_contexts_are_refused() {
        for own in each() {
            let last = own.global_of(own.ranks() - 1, LOCAL_CONTEXT_MAX - 1);
            assert!(last < 1 << own.gid_bits(), "{own:?}");
        }
        assert_eq!([1, 2, 3, 4, 8, 16].map(|w| Ownership::new(w, 1).unwrap().gid_bits()), [17, 18, 19, 19, 20, 21]);
        let eight = Ownership::new(8, 1).unwrap();
        assert_eq!(eight.local_len_max(CONTEXT_MAX), Ok(LOCAL_CONTEXT_MAX));
        let seven = Ownership::new(7, 1).unwrap();
        assert_eq!(seven.local_len_max(7 << 17), Ok(LOCAL_CONTEXT_MAX));
        let refused = ShapeError::LocalContextTooLong { context_len_max: (7 << 17) + 1, ranks: 7, local_len: 131_073 };
        assert_eq!(seven.local_len_max((7 << 17) + 1), Err(refused));
        assert_eq!(seven.local_len_max(0), Err(ShapeError::ContextOutOfRange { context_len_max: 0 }));
        for ranks in [0, 17] {
            assert_eq!(Ownership::new(ranks, 1), Err(ShapeError::RanksOutOfRange { ranks }));
        }
        for interleave in [0, 3, 96, 1 << 18] {
            assert_eq!(Ownership::new(2, interleave), Err(ShapeError::InterleaveUnsupported { interleave }));
        }
    }
}

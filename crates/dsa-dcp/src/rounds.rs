//! How many keys each rank should send, and how often that is enough.
//!
//! Of the first K keys of tokens that are dealt to W ranks at random, a rank has a binomial number: K / W in the mean, with a
//! variance of K / W (1 - 1 / W).

use dsa_core::consts::TOPK_MULTIPLE;
use dsa_core::{Ownership, ShapeError};
use dsa_kernels::local_topk::LocalTopkShape;

use crate::shape::ExchangeShape;

/// Standard deviations above the mean that a rank seldom has.
const DEVIATIONS: f64 = 4.0;

/// Keys that a rank out of `ranks` seldom has more of among the first `topk`.
fn seldom_more(ranks: usize, topk: usize) -> f64 {
    let mean = topk as f64 / ranks as f64;
    mean + DEVIATIONS * (mean * (1.0 - 1.0 / ranks as f64)).sqrt()
}

/// The local top-N to choose if nothing speaks for another: K / W and four standard deviations, at least K / 4 since the keys
/// of real rows are not dealt at random, rounded up to a multiple of 128 below K. 512 for 8 ranks and a top-k of 2048, 1152 for 2.
///
/// # Errors
/// Ranks or a top-k outside the limits; a top-k that no local top-N is below.
pub fn recommended_local_topk(ranks: usize, topk: usize) -> Result<usize, ShapeError> {
    Ownership::new(ranks, 1)?;
    LocalTopkShape::full(topk)?;
    let wanted = (seldom_more(ranks, topk).ceil() as usize).max(topk / 4).next_multiple_of(TOPK_MULTIPLE);
    let n = wanted.min(topk - TOPK_MULTIPLE);
    LocalTopkShape::new(n.max(TOPK_MULTIPLE), topk)?;
    Ok(n)
}

/// How many rounds the rows of an exchange take, if they have more keys than are selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Rounds {
    /// One: every rank sends its first K keys at once.
    One,
    /// Two in every row: all ranks' first N keys are no more than K.
    Two,
    /// A second one in many rows: ranks often have more than N of the first K keys.
    OftenTwo,
    /// Seldom a second one.
    SeldomTwo,
}

impl std::fmt::Display for Rounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Rounds::One => "one round, of every rank's first keys up to the top-k",
            Rounds::Two => "two rounds in every row: choose a larger local top-N",
            Rounds::OftenTwo => "often two rounds: choose a larger local top-N",
            Rounds::SeldomTwo => "one round, seldom two",
        })
    }
}

impl ExchangeShape {
    /// How many rounds its rows take.
    pub fn rounds(&self) -> Rounds {
        if self.is_direct() {
            Rounds::One
        } else if self.ranks() * self.n() <= self.topk() {
            Rounds::Two
        } else if (self.n() as f64) < seldom_more(self.ranks(), self.topk()) {
            Rounds::OftenTwo
        } else {
            Rounds::SeldomTwo
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsa_core::consts::{RANKS_MAX, TOPK_MAX};

    fn rounds(ranks: usize, n: usize, topk: usize) -> Rounds {
        ExchangeShape::new(Ownership::new(ranks, 1).unwrap(), 4, n, topk, 1 << 16).unwrap().rounds()
    }

    #[test]
    fn deployed_ranks_get_the_deployed_local_topk() {
        assert_eq!(recommended_local_topk(8, 2048), Ok(512));
        assert_eq!(recommended_local_topk(16, 2048), Ok(512));
        // 1024 + 4 x 22.6.
        assert_eq!(recommended_local_topk(2, 2048), Ok(1152));
        // 512 + 4 x 19.6.
        assert_eq!(recommended_local_topk(4, 2048), Ok(640));
    }

    #[test]
    fn the_recommended_one_is_legal_and_seldom_takes_two_rounds() {
        for ranks in 1..=RANKS_MAX {
            for topk in (256..=TOPK_MAX).step_by(TOPK_MULTIPLE) {
                let n = recommended_local_topk(ranks, topk).unwrap();
                // With two ranks and a small top-k there is no larger one.
                let largest = n == topk - TOPK_MULTIPLE;
                let got = rounds(ranks, n, topk);
                assert!(largest || got == Rounds::SeldomTwo, "{ranks} ranks, top-{topk}: {n}, {got:?}");
            }
        }
    }

    #[test]
    fn what_leaves_no_choice_is_refused() {
        let none = ShapeError::LocalTopkUnsupported { n: 128, topk: 128 };
        assert_eq!(recommended_local_topk(2, 128), Err(none));
        assert_eq!(recommended_local_topk(17, 2048), Err(ShapeError::RanksOutOfRange { ranks: 17 }));
        assert_eq!(recommended_local_topk(2, 100), Err(ShapeError::TopkUnsupported { topk: 100 }));
    }

    #[test]
    fn rounds_follow_from_the_keys_that_ranks_send() {
        assert_eq!([rounds(2, 512, 2048), rounds(2, 1024, 2048), rounds(4, 512, 2048)], [Rounds::One; 3]);
        assert_eq!(rounds(8, 256, 2048), Rounds::Two);
        assert_eq!(rounds(8, 384, 2048), Rounds::SeldomTwo);
        // 341.3 + 4 x 16.9.
        assert_eq!(rounds(6, 384, 2048), Rounds::OftenTwo);
        assert_eq!(rounds(2, 1152, 2048), Rounds::SeldomTwo);
    }
}

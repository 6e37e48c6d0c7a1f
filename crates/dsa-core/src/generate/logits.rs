//! Rows of logits that selectors get wrong.

use super::rng::SplitMix64;
use crate::numerics::bf16;
use crate::numerics::order16::{bits_of, order16};

const INFINITY: u16 = 0x7F80;
const MINUS_INFINITY: u16 = 0xFF80;
const MINUS_ZERO: u16 = 0x8000;

/// A named family of logits rows. Rows are *foreign*: they may hold -0 and any NaN pattern; map them by
/// [`crate::numerics::order16::canonical_logit`] for what the scorer would have stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LogitPattern {
    /// Roughly normal, rounded to BF16.
    Gaussian,
    /// `1 + ((i * 7919) mod 32) / 128`: 32 levels that share their high byte, so a coarse radix bin holds every key.
    Ties,
    /// One value everywhere.
    AllEqual,
    /// Never increasing, from the largest finite value to the smallest.
    Descending,
    /// Never decreasing, from the smallest finite value to the largest.
    Ascending,
    /// NaNs of both signs and many payloads at even positions, finite values between.
    NanMix,
    /// Both infinities, largest finite values of both signs, and a few ordinary ones.
    Infinities,
    /// Zeros of both signs and, rarely, the smallest subnormals beside them.
    SignedZeros,
    /// Subnormals of both signs.
    Denormals,
    /// The given number (at least 1) of distinct values in random order.
    FewDistinct(u16),
}

impl LogitPattern {
    /// One of each.
    pub const ALL: [Self; 11] = [
        Self::Gaussian,
        Self::Ties,
        Self::AllEqual,
        Self::Descending,
        Self::Ascending,
        Self::NanMix,
        Self::Infinities,
        Self::SignedZeros,
        Self::Denormals,
        Self::FewDistinct(2),
        Self::FewDistinct(100),
    ];

    /// A row of `len` logits, BF16.
    ///
    /// # Panics
    /// On `FewDistinct(0)`.
    pub fn row(self, seed: u64, len: usize) -> Vec<u16> {
        let mut rng = SplitMix64::new(seed);
        match self {
            Self::Gaussian => (0..len).map(|_| gaussian(&mut rng)).collect(),
            Self::Ties => (0..len).map(|i| bf16::from_f32(1.0 + (i * 7919 % 32) as f32 / 128.0)).collect(),
            Self::AllEqual => vec![gaussian(&mut rng); len],
            Self::Descending => (0..len).map(|i| finite_by_rank(len - 1 - i, len)).collect(),
            Self::Ascending => (0..len).map(|i| finite_by_rank(i, len)).collect(),
            Self::NanMix => (0..len).map(|i| if i % 2 == 0 { nan(&mut rng) } else { gaussian(&mut rng) }).collect(),
            Self::Infinities => {
                let values = [INFINITY, MINUS_INFINITY, INFINITY - 1, MINUS_INFINITY - 1];
                let mut draw = || match rng.below(6) {
                    choice @ 0..4 => values[choice],
                    _ => gaussian(&mut rng),
                };
                (0..len).map(|_| draw()).collect()
            }
            Self::SignedZeros => {
                let sign = |rng: &mut SplitMix64| if rng.next_u64() & 1 == 1 { MINUS_ZERO } else { 0 };
                (0..len).map(|_| sign(&mut rng) | u16::from(rng.below(16) == 0)).collect()
            }
            Self::Denormals => (0..len).map(|_| (rng.next_u64() as u16 & 0x807F) | 1).collect(),
            Self::FewDistinct(count) => {
                let values: Vec<u16> =
                    (0..count).map(|i| bf16::from_f32(f32::from(i) - f32::from(count) / 2.0)).collect();
                (0..len).map(|_| values[rng.below(values.len())]).collect()
            }
        }
    }
}

fn gaussian(rng: &mut SplitMix64) -> u16 {
    bf16::from_f32(rng.gaussian())
}

fn nan(rng: &mut SplitMix64) -> u16 {
    let payload = 1 + rng.below(0x7F) as u16;
    INFINITY | payload | (rng.next_u64() as u16 & MINUS_ZERO)
}

/// The finite BF16 at place `rank` of `len` evenly spaced ones, never -0.
fn finite_by_rank(rank: usize, len: usize) -> u16 {
    let (low, high) = (order16(MINUS_INFINITY) as usize + 1, order16(INFINITY) as usize - 1);
    let bits = bits_of((low + (high - low) * rank / len.max(2).saturating_sub(1)) as u16);
    if bits == MINUS_ZERO { 0 } else { bits }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::order16::{KEY_NAN, key_of};
    use std::collections::HashSet;

    const LEN: usize = 4096;

    #[test]
    fn rows_are_reproducible_and_any_length_works() {
        for pattern in LogitPattern::ALL {
            assert_eq!(pattern.row(7, LEN), pattern.row(7, LEN), "{pattern:?}");
            for len in [0, 1, 2, 3] {
                assert_eq!(pattern.row(7, len).len(), len, "{pattern:?}");
            }
        }
        assert_ne!(LogitPattern::Gaussian.row(7, LEN), LogitPattern::Gaussian.row(8, LEN));
    }

    #[test]
    fn patterns_are_what_their_names_say() {
        let keys = |pattern: LogitPattern| pattern.row(3, LEN).into_iter().map(key_of).collect::<Vec<_>>();
        let distinct = |pattern| keys(pattern).into_iter().collect::<HashSet<_>>().len();
        assert!(keys(LogitPattern::Descending).is_sorted_by(|a, b| a >= b));
        assert!(keys(LogitPattern::Ascending).is_sorted());
        assert_eq!(distinct(LogitPattern::Ascending), LEN);
        assert_eq!(distinct(LogitPattern::AllEqual), 1);
        assert_eq!(distinct(LogitPattern::Ties), 32);
        assert_eq!(distinct(LogitPattern::FewDistinct(100)), 100);
        let high_bytes: HashSet<u8> = keys(LogitPattern::Ties).into_iter().map(|key| (key >> 8) as u8).collect();
        assert_eq!(high_bytes.len(), 1);
        assert_eq!(keys(LogitPattern::NanMix).iter().filter(|&&key| key == KEY_NAN).count(), LEN / 2);
        let nans: HashSet<u16> = LogitPattern::NanMix.row(3, LEN).into_iter().step_by(2).collect();
        assert!(nans.len() > 200, "{} of 254 NaN patterns", nans.len());
        let row = LogitPattern::Infinities.row(3, LEN);
        assert!(row.contains(&INFINITY) && row.contains(&MINUS_INFINITY));
        let row = LogitPattern::SignedZeros.row(3, LEN);
        assert!([0, MINUS_ZERO, 1, MINUS_ZERO | 1].iter().all(|bits| row.contains(bits)));
        assert!(LogitPattern::Denormals.row(3, LEN).iter().all(|bits| bits & 0x7F80 == 0 && bits & 0x7F != 0));
        assert_eq!(LogitPattern::Descending.row(3, 2), [INFINITY - 1, MINUS_INFINITY - 1]);
    }
}

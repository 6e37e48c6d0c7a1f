//! The order-preserving 16-bit key of a BF16 logit.
//!
//! A larger logit has a larger key. Key 0 means "no key", key 1 is NaN: it ranks below -inf, above an empty
//! slot alone.

/// The key of "no key here": an empty slot, or a position at or past the row's end.
pub const KEY_NONE: u16 = 0;
/// The key of every NaN logit.
pub const KEY_NAN: u16 = 1;
/// The one NaN pattern that a stored logit may have; its key is [`KEY_NAN`].
pub const LOGIT_NAN: u16 = 0xFFFE;

/// The order-preserving map itself: a bijection of the 16-bit patterns.
///
/// Right as a key only for a *stored* logit, which is never -0 and whose only NaN is [`LOGIT_NAN`]; see [`key_of`].
pub const fn order16(bits: u16) -> u16 {
    if bits & 0x8000 == 0 { bits ^ 0x8000 } else { bits ^ 0xFFFF }
}

/// The inverse of [`order16`].
pub const fn bits_of(key: u16) -> u16 {
    if key & 0x8000 != 0 { key ^ 0x8000 } else { key ^ 0xFFFF }
}

/// The BF16 pattern that is stored for a logit: -0 becomes +0, every NaN [`LOGIT_NAN`].
pub const fn canonical_logit(bits: u16) -> u16 {
    if bits & 0x7FFF > 0x7F80 {
        LOGIT_NAN
    } else if bits == 0x8000 {
        0
    } else {
        bits
    }
}

/// The key of any BF16 pattern, foreign logits included: every NaN is [`KEY_NAN`], -0 ties with +0.
pub const fn key_of(bits: u16) -> u16 {
    order16(canonical_logit(bits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn order16_is_a_bijection_and_bits_of_its_inverse() {
        let mut seen = vec![false; 1 << 16];
        for bits in 0..=u16::MAX {
            assert_eq!(bits_of(order16(bits)), bits);
            assert!(!std::mem::replace(&mut seen[order16(bits) as usize], true));
        }
    }

    #[test]
    fn key_order_is_numeric_order_with_nan_lowest() {
        // Neighbours in key order suffice: the relation is transitive. Sorting all patterns by value gives them.
        let mut patterns: Vec<u16> = (0..=u16::MAX).collect();
        patterns.sort_by_key(|&bits| key_of(bits));
        let rank = |bits: u16| {
            let value = bf16::from_bits(bits).to_f64();
            if value.is_nan() { (0, 0.0) } else { (1, value) }
        };
        for pair in patterns.windows(2) {
            let (low, high) = (rank(pair[0]), rank(pair[1]));
            assert!(low <= high, "{:04x} before {:04x}", pair[0], pair[1]);
            assert_eq!(low == high, key_of(pair[0]) == key_of(pair[1]), "{:04x} {:04x}", pair[0], pair[1]);
        }
    }

    #[test]
    fn no_logit_has_the_key_of_an_empty_slot() {
        assert!((0..=u16::MAX).all(|bits| key_of(bits) != KEY_NONE));
    }

    #[test]
    fn canonical_logit_keeps_all_but_nan_and_minus_zero() {
        for bits in 0..=u16::MAX {
            let want = match bits {
                0x8000 => 0,
                _ if bf16::from_bits(bits).is_nan() => LOGIT_NAN,
                _ => bits,
            };
            assert_eq!(canonical_logit(bits), want);
            assert_eq!(key_of(bits), order16(want));
        }
        assert_eq!(order16(LOGIT_NAN), KEY_NAN);
        assert_eq!(key_of(0xFF80), 0x7F, "-inf is above NaN");
    }
}

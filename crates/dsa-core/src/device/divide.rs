//! Division by a constant without a division: the assembler turns `div` by a constant into some twenty instructions that
//! depend on each other, a conversion to floating point and a reciprocal among them.

use ptx::Reg;

/// `n / d` is `(n * multiplier >> 32) >> shift` for every `n` below 2^31.
///
/// With `2^shift < d < 2^(shift + 1)` the multiplier, `2^(32 + shift) / d` rounded up, has 32 bits, and its error times
/// `n / d` stays below one `d`-th.
const fn reciprocal(d: u32) -> (u32, u32) {
    assert!(!d.is_power_of_two());
    let shift = d.ilog2();
    ((1u64 << (32 + shift)).div_ceil(d as u64) as u32, shift)
}

/// `n / d` for `n` below 2^31.
///
/// # Panics
/// If `d` is 0.
#[track_caller]
pub fn divide(n: Reg<u32>, d: u32) -> Reg<u32> {
    assert!(d > 0);
    if d.is_power_of_two() {
        return if d == 1 { n } else { n >> d.trailing_zeros() };
    }
    let (multiplier, shift) = reciprocal(d);
    let high = n.mul_hi(multiplier);
    if shift == 0 { high } else { high >> shift }
}

/// `(n / d, n % d)` for `n` below 2^31.
///
/// # Panics
/// If `d` is 0.
#[track_caller]
pub fn divide_rest(n: Reg<u32>, d: u32) -> (Reg<u32>, Reg<u32>) {
    let quotient = divide(n, d);
    let rest = if d.is_power_of_two() { n & (d - 1) } else { n - quotient * d };
    (quotient, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reciprocal_divides_everything_below_2_to_31() {
        let divisors = (3..5000).chain([65_535, 65_537, 1_000_003, (1 << 31) - 1, (1 << 31) + 1, u32::MAX]);
        for d in divisors.filter(|d| !d.is_power_of_two()) {
            let (multiplier, shift) = reciprocal(d);
            let quotient = |n: u32| (((u64::from(n) * u64::from(multiplier)) >> 32) >> shift) as u32;
            let last = (1u32 << 31) - 1;
            let multiples = [1, 2, 3, 1000, last / d / 2, last / d].map(|i| i.saturating_mul(d).min(last));
            for n in multiples.into_iter().flat_map(|n| [n.saturating_sub(1), n, (n + 1).min(last)]).chain([0, last]) {
                assert_eq!(quotient(n), n / d, "{n} / {d}");
            }
        }
    }
}

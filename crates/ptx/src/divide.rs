//! Division by a constant without a division.
//!
//! The assembler makes some twenty instructions that depend on each other of `div` and `rem` by a constant, even by a power
//! of two: a conversion to floating point, a reciprocal, corrections. Here such a division becomes shifts, or the high half of
//! a product (Granlund and Montgomery, "Division by invariant integers using multiplication").

use crate::op::{Bin, Operand};
use crate::ty::{Int, Ty};
use crate::value::{Reg, bin};

/// How an unsigned 32-bit number is divided by a constant that is no power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    /// `mul_hi(n >> before, multiplier) >> after`.
    Short { before: u32, multiplier: u32, after: u32 },
    /// With `high = mul_hi(n, multiplier)`, whose multiplier lacks its 33rd bit: `(((n - high) >> 1) + high) >> after`.
    Long { multiplier: u32, after: u32 },
}

impl Plan {
    /// Exact for every `n`.
    fn of(d: u32) -> Plan {
        assert!(d > 0 && !d.is_power_of_two());
        let before = d.trailing_zeros();
        let odd = u64::from(d >> before);
        let after = odd.ilog2();
        // 2^(32 + after) / odd rounded up: 32 bits, because 2^after < odd. What the rounding adds to n / odd stays below 1 / odd,
        // so that no quotient changes, if its error times the largest n is below 2^(32 + after).
        let multiplier = (1u64 << (32 + after)).div_ceil(odd);
        let error = multiplier * odd - (1 << (32 + after));
        let largest = u64::from(u32::MAX >> before);
        if error * largest < 1 << (32 + after) {
            return Plan::Short { before, multiplier: multiplier as u32, after };
        }
        // One bit more is always exact.
        let after = d.ilog2();
        let multiplier = (1u128 << (33 + after)).div_ceil(u128::from(d)) as u64;
        Plan::Long { multiplier: multiplier as u32, after }
    }

    #[track_caller]
    fn emit(self, n: Reg<u32>) -> Reg<u32> {
        let shifted = |value: Reg<u32>, by: u32| if by == 0 { value } else { value >> by };
        match self {
            Plan::Short { before, multiplier, after } => shifted(shifted(n, before).mul_hi(multiplier), after),
            Plan::Long { multiplier, after } => {
                let high = n.mul_hi(multiplier);
                shifted(((n - high) >> 1) + high, after)
            }
        }
    }
}

/// `a / b`, or `None` if that is best left to the hardware's instruction.
#[track_caller]
pub(crate) fn quotient<T: Int>(a: Operand, b: Operand) -> Option<Reg<T>> {
    let Operand::Imm(d) = b else { return None };
    match (T::TY, a) {
        (Ty::U32 | Ty::U64, Operand::Imm(n)) if d != 0 => Some(Reg::from_operand(Operand::Imm(n / d))),
        (Ty::U32 | Ty::U64, _) if d == 1 => Some(Reg::from_operand(a)),
        (Ty::U32 | Ty::U64, _) if d.is_power_of_two() => {
            Some(bin(Bin::Shr, a, Operand::Imm(u64::from(d.trailing_zeros()))))
        }
        (Ty::U32, _) if d != 0 => Some(Reg::from_operand(Plan::of(d as u32).emit(Reg::from_operand(a)).operand())),
        _ => None,
    }
}

/// `a % b`, or `None` if that is best left to the hardware's instruction.
#[track_caller]
pub(crate) fn rest<T: Int>(a: Operand, b: Operand) -> Option<Reg<T>> {
    let Operand::Imm(d) = b else { return None };
    match T::TY {
        Ty::U32 | Ty::U64 if d.is_power_of_two() => Some(bin(Bin::And, a, Operand::Imm(d - 1))),
        _ => {
            let product: Reg<T> = bin(Bin::Mul, quotient::<T>(a, b)?.operand(), b);
            Some(bin(Bin::Sub, a, product.operand()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The host's form of what is emitted.
    fn divide(plan: Plan, n: u32) -> u32 {
        let mul_hi = |a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32;
        match plan {
            Plan::Short { before, multiplier, after } => mul_hi(n >> before, multiplier) >> after,
            Plan::Long { multiplier, after } => {
                let high = mul_hi(n, multiplier);
                (((n - high) >> 1) + high) >> after
            }
        }
    }

    #[test]
    fn every_plan_divides_exactly() {
        let large = (0..32).flat_map(|bit| [(1u64 << bit) - 1, (1 << bit) + 1, (1 << bit) * 3 / 2]);
        let divisors = (3..20_000u64).chain(large).chain([u64::from(u32::MAX), 1_000_003]);
        let (mut short, mut long) = (0, 0);
        for d in divisors.filter(|d| *d > 2 && *d <= u64::from(u32::MAX) && !d.is_power_of_two()).map(|d| d as u32) {
            let plan = Plan::of(d);
            match plan {
                Plan::Short { .. } => short += 1,
                Plan::Long { .. } => long += 1,
            }
            // A quotient can only be wrong next to a multiple, and most easily next to the last ones.
            let last = u32::MAX / d;
            for multiple in [0, 1, 2, 3, last / 2, last.saturating_sub(1), last].map(|i: u32| i.min(last) * d) {
                for n in [multiple.wrapping_sub(1), multiple, multiple.wrapping_add(1), u32::MAX] {
                    assert_eq!(divide(plan, n), n / d, "{n} / {d}, {plan:?}");
                }
            }
        }
        assert!(short > 1000 && long > 1000, "{short} short, {long} long");
    }

    #[test]
    fn whole_ranges_divide_exactly() {
        for d in [3, 6, 7, 11, 28, 264, 641, 65_537] {
            let plan = Plan::of(d);
            for n in (0..1 << 20)
                .chain((1u32 << 31) - (1 << 19)..(1 << 31) + (1 << 19))
                .chain(u32::MAX - (1 << 20)..=u32::MAX)
            {
                assert_eq!(divide(plan, n), n / d, "{n} / {d}, {plan:?}");
            }
        }
    }
}

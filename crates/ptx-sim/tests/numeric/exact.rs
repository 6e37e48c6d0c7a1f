//! Exact sums of scaled integers, rounded once: the oracle of the floating-point tests.

/// `significand * 2^exponent`; at most 50 significant bits.
#[derive(Clone, Copy, Debug)]
pub struct Term {
    pub significand: i128,
    pub exponent: i32,
}

/// A binary floating-point format with IEEE 754 encoding.
#[derive(Clone, Copy)]
pub struct Format {
    pub fraction_bits: i32,
    pub exponent_bits: i32,
}

pub const F32: Format = Format { fraction_bits: 23, exponent_bits: 8 };
pub const BF16: Format = Format { fraction_bits: 7, exponent_bits: 8 };

impl Format {
    fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    fn infinity(self) -> u32 {
        ((1 << self.exponent_bits) - 1) << self.fraction_bits
    }

    pub fn sign(self) -> u32 {
        1 << (self.fraction_bits + self.exponent_bits)
    }

    pub fn is_finite(self, bits: u32) -> bool {
        bits & self.infinity() != self.infinity()
    }

    /// A finite number as a term.
    pub fn term(self, bits: u32) -> Term {
        assert!(self.is_finite(bits));
        let field = ((bits & self.infinity()) >> self.fraction_bits) as i32;
        let fraction = i128::from(bits & ((1 << self.fraction_bits) - 1));
        let magnitude = if field == 0 { fraction } else { fraction | 1 << self.fraction_bits };
        Term {
            significand: if bits & self.sign() != 0 { -magnitude } else { magnitude },
            exponent: field.max(1) - self.bias() - self.fraction_bits,
        }
    }

    /// `significand * 2^exponent` to nearest even; the caller settles the sign of a zero.
    fn round(self, sum: Term) -> u32 {
        let sign = if sum.significand < 0 { self.sign() } else { 0 };
        let magnitude = sum.significand.unsigned_abs();
        if magnitude == 0 {
            return 0;
        }
        let top = 127 - magnitude.leading_zeros() as i32 + sum.exponent;
        let last = top.max(1 - self.bias()) - self.fraction_bits;
        let dropped = last - sum.exponent;
        let kept = if dropped <= 0 {
            magnitude << -dropped
        } else if dropped > 126 {
            0
        } else {
            let (kept, rest, half) = (magnitude >> dropped, magnitude % (1 << dropped), 1 << (dropped - 1));
            kept + u128::from(rest > half || rest == half && kept % 2 == 1)
        };
        // `kept` holds the hidden bit if normal, so the exponent field starts one lower; a carry raises it.
        let field = (last + self.fraction_bits + self.bias() - 1) as u128;
        let bits = (field << self.fraction_bits) + kept;
        sign | bits.min(u128::from(self.infinity())) as u32
    }

    /// The sum of two terms, rounded once to nearest even.
    pub fn sum(self, a: Term, b: Term) -> u32 {
        self.round(add(a, b))
    }
}

pub fn product(a: Term, b: Term) -> Term {
    Term { significand: a.significand * b.significand, exponent: a.exponent + b.exponent }
}

/// Exact where both fit 120 bits; else the smaller term only leaves a last bit that says "and a little more".
fn add(a: Term, b: Term) -> Term {
    if a.significand == 0 || b.significand == 0 {
        return if a.significand == 0 { b } else { a };
    }
    let (high, low) = if a.exponent >= b.exponent { (a, b) } else { (b, a) };
    let apart = high.exponent - low.exponent;
    if apart <= 60 {
        return Term { significand: (high.significand << apart) + low.significand, exponent: low.exponent };
    }
    // A term has at most 50 bits, so `low` is below the last bit of `high << 60` and can only break ties.
    assert!(low.significand.unsigned_abs() < 1 << 50);
    Term { significand: (high.significand << 60) + low.significand.signum(), exponent: high.exponent - 60 }
}

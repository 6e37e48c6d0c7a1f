//! Order-preserving keys of BF16 logits, two per 32-bit word (element 0 in the low half).

use ptx::Reg;

/// `order16` of both halves: the host form is [`crate::numerics::order16::order16`].
///
/// A logit as the scorer stores it is never -0 and its only NaN is `0xFFFE`, whose key is 1, so nothing else is needed
/// for the project's own logits; see [`foreign_keys`] for anybody else's.
#[track_caller]
pub fn order16_x2(bits: Reg<u32>) -> Reg<u32> {
    // Bytes 1 and 3 sign-replicated over their halves: 0xFFFF for a negative element, else 0.
    let negative = bits.permute(0, 0xBB99u32);
    // bits ^ (negative | 0x8000)
    bits.lop3(negative, 0x8000_8000u32, 0xF0 ^ (0xCC | 0xAA))
}

/// As [`order16_x2`] for logits of unknown origin: every NaN pattern has key 1 and -0 is +0, as
/// [`crate::numerics::order16::key_of`] says.
#[track_caller]
pub fn foreign_keys(bits: Reg<u32>) -> Reg<u32> {
    let magnitude = bits & 0x7FFF_7FFFu32;
    let key = order16_x2(bits);
    let half = |shift: u32| {
        let m = (magnitude >> shift) & 0xFFFF;
        let k = (key >> shift) & 0xFFFF;
        let k = m.eq(0).select::<u32>(0x8000u32, k);
        m.gt(0x7F80).select::<u32>(1u32, k)
    };
    half(0) | (half(16) << 16)
}

/// The larger of the two halves.
#[track_caller]
pub fn max_half(keys: Reg<u32>) -> Reg<u32> {
    (keys & 0xFFFF).max(keys >> 16)
}

/// Half `e` (0 low, 1 high) of `keys`.
#[track_caller]
pub fn half(keys: Reg<u32>, e: u32) -> Reg<u32> {
    if e == 0 { keys & 0xFFFF } else { keys >> 16 }
}

/// Both halves set to `value` (below 2^16).
#[track_caller]
pub fn both_halves(value: Reg<u32>) -> Reg<u32> {
    value.permute(0, 0x1010u32)
}

/// Eight packed keys, in order: element `2 w + h` is half `h` of word `w`.
pub type Keys8 = [Reg<u32>; 4];

/// Two bits for each key, key `i` at bit `2 i`: 2 if it is more than one above `below`, 1 if it is one above, else 0; `below` in
/// both halves. Bits 16 and up of the result mean nothing.
#[track_caller]
pub fn compare_codes(keys: Keys8, below: Reg<u32>) -> Reg<u32> {
    let [a, b, c, d] = keys.map(|k| (k.max_u16x2(below) - below).min_u16x2(0x0002_0002u32));
    let spread = b.mad(16, a) + d.mad(16, c) * 256; // even elements at bits 0, 4, .., odd ones 16 higher
    spread | (spread >> 14)
}

/// The four keys in each half of the words, sorted: word 0 holds the larger.
#[track_caller]
pub fn sort_halves([a, b, c, d]: Keys8) -> Keys8 {
    let order = |x: Reg<u32>, y: Reg<u32>| (x.max_u16x2(y), x.min_u16x2(y));
    let ((a, b), (c, d)) = (order(a, b), order(c, d));
    let ((a, c), (b, d)) = (order(a, c), order(b, d));
    let (b, c) = order(b, c);
    [a, b, c, d]
}

/// Index of the lowest set bit.
#[track_caller]
pub fn lowest_bit(mask: Reg<u32>) -> Reg<u32> {
    mask.reverse_bits().clz()
}

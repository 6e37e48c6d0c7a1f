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

/// Bit `i` of the result: key `i` is greater than the threshold, given in both halves.
#[track_caller]
pub fn above_mask(keys: Keys8, threshold: Reg<u32>) -> Reg<u32> {
    gather_bits(keys.map(|k| (k.max_u16x2(threshold) ^ threshold).min_u16x2(0x0001_0001u32)))
}

/// Bit `i` of the result: key `i` equals `value`, given in both halves.
#[track_caller]
pub fn equal_mask(keys: Keys8, value: Reg<u32>) -> Reg<u32> {
    gather_bits(keys.map(|k| (k ^ value).min_u16x2(0x0001_0001u32))) ^ 0xFF
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

/// How many bits each byte of `mask` has, each in its byte.
#[track_caller]
pub fn byte_counts(mask: Reg<u32>) -> Reg<u32> {
    let pairs = mask - ((mask >> 1) & 0x5555_5555u32);
    let nibbles = (pairs & 0x3333_3333u32) + ((pairs >> 2) & 0x3333_3333u32);
    (nibbles + (nibbles >> 4)) & 0x0F0F_0F0Fu32
}

/// Bits 0 and 16 of the four words to bits 0..8 in element order.
#[track_caller]
fn gather_bits([a, b, c, d]: [Reg<u32>; 4]) -> Reg<u32> {
    let spread = b.mad(4, a) + d.mad(4, c) * 16; // even elements at bits 0, 2, .., odd ones 16 higher
    (spread | (spread >> 15)) & 0xFF
}

/// Index of the lowest set bit.
#[track_caller]
pub fn lowest_bit(mask: Reg<u32>) -> Reg<u32> {
    mask.reverse_bits().clz()
}

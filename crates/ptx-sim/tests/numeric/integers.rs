//! Integer instructions against bit-by-bit readings of their definitions.

use proptest::prelude::*;
use ptx_sim::numeric::int::{self, FunnelShift};

fn bit(word: u64, position: u32) -> u64 {
    if position < 64 { word >> position & 1 } else { 0 }
}

/// Assembles a word of `width` bits, bit by bit.
fn word(width: u32, bit_at: impl Fn(u32) -> u64) -> u64 {
    (0..width).fold(0, |word, position| word | bit_at(position) << position)
}

/// A field as the PTX ISA defines it: positions past the top read as the extension bit.
fn extract(a: u64, width: u32, position: u32, length: u32, signed: bool) -> u64 {
    let top = (position + length).saturating_sub(1).min(width - 1);
    let fill = if signed && length != 0 { bit(a, top) } else { 0 };
    word(width, |i| if i < length && position + i < width { bit(a, position + i) } else { fill })
}

fn insert(a: u64, b: u64, width: u32, position: u32, length: u32) -> u64 {
    word(width, |i| if i >= position && i < position + length { bit(a, i - position) } else { bit(b, i) })
}

/// Positions and lengths: mostly near the widths, sometimes past them.
fn amount() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0u32..70, 1 => 0u32..256]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50_000))]

    #[test]
    fn bit_fields_follow_their_definition(a: u64, b: u64, position in amount(), length in amount()) {
        let (low, other) = (a as u32, b as u32);
        prop_assert_eq!(int::bfe_u32(low, position, length), extract(a, 32, position, length, false) as u32);
        prop_assert_eq!(int::bfe_s32(low as i32, position, length) as u32, extract(u64::from(low), 32, position, length, true) as u32);
        prop_assert_eq!(int::bfe_u64(a, position, length), extract(a, 64, position, length, false));
        prop_assert_eq!(int::bfe_s64(a as i64, position, length) as u64, extract(a, 64, position, length, true));
        prop_assert_eq!(int::bfi_b32(low, other, position, length), insert(a, b, 32, position, length) as u32);
        prop_assert_eq!(int::bfi_b64(a, b, position, length), insert(a, b, 64, position, length));
        // Only the low 8 bits of position and length count.
        prop_assert_eq!(int::bfe_u32(low, position + 256, length + 512), int::bfe_u32(low, position, length));
        prop_assert_eq!(int::bfi_b64(a, b, position + 256, length + 512), int::bfi_b64(a, b, position, length));
    }

    #[test]
    fn shifts_clamp(a: u64, amount in amount()) {
        let shifted = |width: u32, up: bool, fill: u64| word(width, |i| match (up, i.checked_sub(amount)) {
            (true, Some(from)) => bit(a, from),
            (true, None) => 0,
            (false, _) => if i + amount < width { bit(a, i + amount) } else { fill },
        });
        prop_assert_eq!(u64::from(int::shl_b16(a as u16, amount)), shifted(16, true, 0));
        prop_assert_eq!(u64::from(int::shl_b32(a as u32, amount)), shifted(32, true, 0));
        prop_assert_eq!(int::shl_b64(a, amount), shifted(64, true, 0));
        prop_assert_eq!(u64::from(int::shr_u16(a as u16, amount)), shifted(16, false, 0));
        prop_assert_eq!(u64::from(int::shr_u32(a as u32, amount)), shifted(32, false, 0));
        prop_assert_eq!(int::shr_u64(a, amount), shifted(64, false, 0));
        prop_assert_eq!(u64::from(int::shr_s16(a as i16, amount) as u16), shifted(16, false, bit(a, 15)));
        prop_assert_eq!(u64::from(int::shr_s32(a as i32, amount) as u32), shifted(32, false, bit(a, 31)));
        prop_assert_eq!(int::shr_s64(a as i64, amount) as u64, shifted(64, false, bit(a, 63)));
    }

    #[test]
    fn funnel_shifts_take_a_window_of_the_pair(low: u32, high: u32, amount in amount()) {
        let pair = u64::from(high) << 32 | u64::from(low);
        for (mode, effective) in [(FunnelShift::Wrap, amount % 32), (FunnelShift::Clamp, amount.min(32))] {
            let left = word(32, |i| bit(pair, 32 + i - effective)) as u32;
            let right = word(32, |i| bit(pair, i + effective)) as u32;
            prop_assert_eq!(int::shf_l(low, high, amount, mode), left);
            prop_assert_eq!(int::shf_r(low, high, amount, mode), right);
        }
    }

    #[test]
    fn lop3_looks_each_bit_up(a: u32, b: u32, c: u32, table: u8) {
        let expected = word(32, |i| {
            let row = bit(a.into(), i) << 2 | bit(b.into(), i) << 1 | bit(c.into(), i);
            bit(table.into(), row as u32)
        });
        prop_assert_eq!(u64::from(int::lop3(a, b, c, table)), expected);
    }

    #[test]
    fn prmt_selects_bytes_or_their_signs(a: u32, b: u32, selector: u32) {
        let source = u64::from(b) << 32 | u64::from(a);
        let expected = word(32, |i| {
            let nibble = selector >> (4 * (i / 8)) & 15;
            let first = 8 * (nibble & 7);
            bit(source, if nibble & 8 != 0 { first + 7 } else { first + i % 8 })
        });
        prop_assert_eq!(u64::from(int::prmt(a, b, selector)), expected);
    }

    #[test]
    fn high_products_are_the_upper_halves(a: u64, b: u64) {
        let (x, y) = (a as u32, b as u32);
        prop_assert_eq!(int::mul_hi_u32(x, y), ((u128::from(x) * u128::from(y)) >> 32) as u32);
        prop_assert_eq!(int::mul_hi_s32(x as i32, y as i32), ((i128::from(x as i32) * i128::from(y as i32)) >> 32) as i32);
        // Schoolbook, by 32-bit digits.
        let (a1, a0, b1, b0) = (a >> 32, a & 0xFFFF_FFFF, b >> 32, b & 0xFFFF_FFFF);
        let middle = a1 * b0 + ((a0 * b0) >> 32);
        let carried = a0 * b1 + (middle & 0xFFFF_FFFF);
        let high = a1 * b1 + (middle >> 32) + (carried >> 32);
        prop_assert_eq!(int::mul_hi_u64(a, b), high);
        let signed = high.wrapping_sub(if (a as i64) < 0 { b } else { 0 }).wrapping_sub(if (b as i64) < 0 { a } else { 0 });
        prop_assert_eq!(int::mul_hi_s64(a as i64, b as i64) as u64, signed);
    }

    #[test]
    fn counts_and_searches_follow_their_definition(a: u64, shift in 0u32..65) {
        let a = int::shr_u64(a, shift);
        let highest = |width: u32, wanted: u64| (0..width).rev().find(|&i| bit(a, i) == wanted).unwrap_or(u32::MAX);
        let low = a as u32;
        prop_assert_eq!(int::bfind_u32(low), highest(32, 1));
        prop_assert_eq!(int::bfind_u64(a), highest(64, 1));
        prop_assert_eq!(int::bfind_s32(low as i32), highest(32, 1 - bit(a, 31)));
        prop_assert_eq!(int::bfind_s64(a as i64), highest(64, 1 - bit(a, 63)));
        prop_assert_eq!(int::bfind_shiftamt_u32(low), if low == 0 { u32::MAX } else { 31 - highest(32, 1) });
        prop_assert_eq!(int::clz_b32(low), if low == 0 { 32 } else { 31 - highest(32, 1) });
        prop_assert_eq!(int::clz_b64(a), if a == 0 { 64 } else { 63 - highest(64, 1) });
        prop_assert_eq!(u64::from(int::popc_b32(low)), (0..32).map(|i| bit(a, i)).sum::<u64>());
        prop_assert_eq!(u64::from(int::popc_b64(a)), (0..64).map(|i| bit(a, i)).sum::<u64>());
        prop_assert_eq!(u64::from(int::brev_b32(low)), word(32, |i| bit(a, 31 - i)));
        prop_assert_eq!(int::brev_b64(a), word(64, |i| bit(a, 63 - i)));
    }

    #[test]
    fn packed_selection_compares_each_half(a: u32, b: u32) {
        for half in [0, 16] {
            let (x, y) = ((a >> half) as u16, (b >> half) as u16);
            let at = |pair: u32| (pair >> half) as u16;
            prop_assert_eq!(at(int::max_u16x2(a, b)), if x > y { x } else { y });
            prop_assert_eq!(at(int::min_u16x2(a, b)), if x > y { y } else { x });
            let greater = x as i16 > y as i16;
            prop_assert_eq!(at(int::max_s16x2(a, b)), if greater { x } else { y });
            prop_assert_eq!(at(int::min_s16x2(a, b)), if greater { y } else { x });
        }
    }
}

#[test]
fn division_by_zero_gives_all_ones() {
    assert_eq!(int::div_u32(7, 0), u32::MAX);
    assert_eq!(int::rem_u32(7, 0), u32::MAX);
    assert_eq!(int::div_s32(7, 0), -1);
    assert_eq!(int::rem_s32(-7, 0), -1);
    assert_eq!(int::div_u64(7, 0), u64::MAX);
    assert_eq!(int::rem_u64(7, 0), u64::MAX);
    assert_eq!(int::div_s64(-7, 0), -1);
    assert_eq!(int::rem_s64(7, 0), -1);
}

#[test]
fn signed_division_truncates_and_wraps() {
    assert_eq!(int::div_s32(-7, 2), -3);
    assert_eq!(int::rem_s32(-7, 2), -1);
    assert_eq!(int::div_s32(i32::MIN, -1), i32::MIN);
    assert_eq!(int::rem_s32(i32::MIN, -1), 0);
    assert_eq!(int::div_s64(i64::MIN, -1), i64::MIN);
    assert_eq!(int::rem_s64(i64::MIN, -1), 0);
    assert_eq!(int::div_u64(u64::MAX, 10), 1_844_674_407_370_955_161);
    assert_eq!(int::rem_u32(17, 5), 2);
}

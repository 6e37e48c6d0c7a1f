//! Integer instructions whose rules differ from Rust's operators: shifts that clamp, bit fields, permutations, division
//! by zero. All but division by zero is defined by the PTX ISA; that is what the hardware's code sequences return.

/// `mul.hi.u32`
#[inline]
pub fn mul_hi_u32(a: u32, b: u32) -> u32 {
    ((u64::from(a) * u64::from(b)) >> 32) as u32
}

/// `mul.hi.s32`
#[inline]
pub fn mul_hi_s32(a: i32, b: i32) -> i32 {
    ((i64::from(a) * i64::from(b)) >> 32) as i32
}

/// `mul.hi.u64`
#[inline]
pub fn mul_hi_u64(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

/// `mul.hi.s64`
#[inline]
pub fn mul_hi_s64(a: i64, b: i64) -> i64 {
    ((i128::from(a) * i128::from(b)) >> 64) as i64
}

/// `div.u32`; by zero, all ones.
#[inline]
pub fn div_u32(a: u32, b: u32) -> u32 {
    a.checked_div(b).unwrap_or(u32::MAX)
}

/// `rem.u32`; by zero, all ones.
#[inline]
pub fn rem_u32(a: u32, b: u32) -> u32 {
    a.checked_rem(b).unwrap_or(u32::MAX)
}

/// `div.s32`; by zero, -1. The smallest integer by -1 is itself.
#[inline]
pub fn div_s32(a: i32, b: i32) -> i32 {
    if b == 0 { -1 } else { a.wrapping_div(b) }
}

/// `rem.s32`: the sign of the dividend; by zero, -1.
#[inline]
pub fn rem_s32(a: i32, b: i32) -> i32 {
    if b == 0 { -1 } else { a.wrapping_rem(b) }
}

/// `div.u64`; by zero, all ones.
#[inline]
pub fn div_u64(a: u64, b: u64) -> u64 {
    a.checked_div(b).unwrap_or(u64::MAX)
}

/// `rem.u64`; by zero, all ones.
#[inline]
pub fn rem_u64(a: u64, b: u64) -> u64 {
    a.checked_rem(b).unwrap_or(u64::MAX)
}

/// `div.s64`; by zero, -1. The smallest integer by -1 is itself.
#[inline]
pub fn div_s64(a: i64, b: i64) -> i64 {
    if b == 0 { -1 } else { a.wrapping_div(b) }
}

/// `rem.s64`: the sign of the dividend; by zero, -1.
#[inline]
pub fn rem_s64(a: i64, b: i64) -> i64 {
    if b == 0 { -1 } else { a.wrapping_rem(b) }
}

/// `shl.b16`: an amount of 16 or more gives 0.
#[inline]
pub fn shl_b16(a: u16, amount: u32) -> u16 {
    a.checked_shl(amount).unwrap_or(0)
}

/// `shl.b32`: an amount of 32 or more gives 0.
#[inline]
pub fn shl_b32(a: u32, amount: u32) -> u32 {
    a.checked_shl(amount).unwrap_or(0)
}

/// `shl.b64`: an amount of 64 or more gives 0.
#[inline]
pub fn shl_b64(a: u64, amount: u32) -> u64 {
    a.checked_shl(amount).unwrap_or(0)
}

/// `shr.u16`: an amount of 16 or more gives 0.
#[inline]
pub fn shr_u16(a: u16, amount: u32) -> u16 {
    a.checked_shr(amount).unwrap_or(0)
}

/// `shr.u32`: an amount of 32 or more gives 0.
#[inline]
pub fn shr_u32(a: u32, amount: u32) -> u32 {
    a.checked_shr(amount).unwrap_or(0)
}

/// `shr.u64`: an amount of 64 or more gives 0.
#[inline]
pub fn shr_u64(a: u64, amount: u32) -> u64 {
    a.checked_shr(amount).unwrap_or(0)
}

/// `shr.s16`: an amount of 16 or more gives 0 or -1, the sign.
#[inline]
pub fn shr_s16(a: i16, amount: u32) -> i16 {
    a >> amount.min(15)
}

/// `shr.s32`: an amount of 32 or more gives 0 or -1, the sign.
#[inline]
pub fn shr_s32(a: i32, amount: u32) -> i32 {
    a >> amount.min(31)
}

/// `shr.s64`: an amount of 64 or more gives 0 or -1, the sign.
#[inline]
pub fn shr_s64(a: i64, amount: u32) -> i64 {
    a >> amount.min(63)
}

/// What a funnel shift does with an amount above 31: the PTX modifiers `.wrap` and `.clamp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FunnelShift {
    /// `.wrap`: the amount modulo 32.
    Wrap,
    /// `.clamp`: 32.
    Clamp,
}

impl FunnelShift {
    #[inline]
    fn amount(self, amount: u32) -> u32 {
        match self {
            Self::Wrap => amount & 31,
            Self::Clamp => amount.min(32),
        }
    }
}

/// `shf.l`: the high word of `high:low` shifted left.
#[inline]
pub fn shf_l(low: u32, high: u32, amount: u32, mode: FunnelShift) -> u32 {
    let pair = u64::from(high) << 32 | u64::from(low);
    ((pair << mode.amount(amount)) >> 32) as u32
}

/// `shf.r`: the low word of `high:low` shifted right.
#[inline]
pub fn shf_r(low: u32, high: u32, amount: u32, mode: FunnelShift) -> u32 {
    let pair = u64::from(high) << 32 | u64::from(low);
    (pair >> mode.amount(amount)) as u32
}

/// `prmt.b32`, default mode: byte i of the result is the byte of `b:a` that nibble i of `selector` names (its low three
/// bits; `a` holds bytes 0 to 3), or eight copies of that byte's sign if the nibble's top bit is set.
#[inline]
pub fn prmt(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    u32::from_le_bytes(std::array::from_fn(|i| {
        let nibble = (selector >> (4 * i)) & 0xF;
        let byte = bytes[(nibble & 7) as usize];
        if nibble & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 }
    }))
}

/// `lop3.b32`: bit `4 * a + 2 * b + c` of `table`, for every bit position.
#[inline]
pub fn lop3(a: u32, b: u32, c: u32, table: u8) -> u32 {
    (0..8).filter(|row| table >> row & 1 == 1).fold(0, |result, row| {
        let take = |word: u32, bit: u32| if row >> bit & 1 == 1 { word } else { !word };
        result | take(a, 2) & take(b, 1) & take(c, 0)
    })
}

/// `bfe.u32`: `length` bits of `a` from `position`, zero-extended. Only the low 8 bits of both count; bits past 31 are 0.
#[inline]
pub fn bfe_u32(a: u32, position: u32, length: u32) -> u32 {
    bfe_u64(u64::from(a), position, length) as u32
}

/// `bfe.s32`: as [`bfe_u32`], but extended by the field's top bit, or by the sign of `a` where the field passes bit 31.
#[inline]
pub fn bfe_s32(a: i32, position: u32, length: u32) -> i32 {
    bfe_s64(i64::from(a), position, length) as i32
}

/// `bfe.u64`: `length` bits of `a` from `position`, zero-extended. Only the low 8 bits of both count; bits past 63 are 0.
#[inline]
pub fn bfe_u64(a: u64, position: u32, length: u32) -> u64 {
    shr_u64(a, position & 0xFF) & low_bits_u64(length & 0xFF)
}

/// `bfe.s64`: as [`bfe_u64`], but extended by the field's top bit, or by the sign of `a` where the field passes bit 63.
#[inline]
pub fn bfe_s64(a: i64, position: u32, length: u32) -> i64 {
    match length & 0xFF {
        0 => 0,
        length => {
            let unused = 64 - length.min(64);
            shr_s64(a, position & 0xFF) << unused >> unused
        }
    }
}

/// `bfi.b32`: `b` with `length` bits from `position` replaced by the low bits of `a`. Only the low 8 bits of both count;
/// what would pass bit 31 is dropped.
#[inline]
pub fn bfi_b32(a: u32, b: u32, position: u32, length: u32) -> u32 {
    bfi_b64(u64::from(a), u64::from(b), position, length) as u32
}

/// `bfi.b64`: `b` with `length` bits from `position` replaced by the low bits of `a`. Only the low 8 bits of both count;
/// what would pass bit 63 is dropped.
#[inline]
pub fn bfi_b64(a: u64, b: u64, position: u32, length: u32) -> u64 {
    let mask = shl_b64(low_bits_u64(length & 0xFF), position & 0xFF);
    b & !mask | shl_b64(a, position & 0xFF) & mask
}

/// `length` ones, at most 64.
#[inline]
fn low_bits_u64(length: u32) -> u64 {
    shl_b64(1, length).wrapping_sub(1)
}

/// `popc.b32`: number of ones.
#[inline]
pub fn popc_b32(a: u32) -> u32 {
    a.count_ones()
}

/// `popc.b64`: number of ones.
#[inline]
pub fn popc_b64(a: u64) -> u32 {
    a.count_ones()
}

/// `clz.b32`: leading zeros, 32 for 0.
#[inline]
pub fn clz_b32(a: u32) -> u32 {
    a.leading_zeros()
}

/// `clz.b64`: leading zeros, 64 for 0.
#[inline]
pub fn clz_b64(a: u64) -> u32 {
    a.leading_zeros()
}

/// `brev.b32`: bits in reverse order.
#[inline]
pub fn brev_b32(a: u32) -> u32 {
    a.reverse_bits()
}

/// `brev.b64`: bits in reverse order.
#[inline]
pub fn brev_b64(a: u64) -> u64 {
    a.reverse_bits()
}

/// What a search that finds no bit returns.
const NOT_FOUND: u32 = u32::MAX;

/// `bfind.u32`: position of the highest one; all ones for 0.
#[inline]
pub fn bfind_u32(a: u32) -> u32 {
    a.checked_ilog2().unwrap_or(NOT_FOUND)
}

/// `bfind.s32`: position of the highest bit that differs from the sign; all ones for 0 and -1.
#[inline]
pub fn bfind_s32(a: i32) -> u32 {
    bfind_u32((a ^ a >> 31) as u32)
}

/// `bfind.u64`: position of the highest one; all ones for 0.
#[inline]
pub fn bfind_u64(a: u64) -> u32 {
    a.checked_ilog2().unwrap_or(NOT_FOUND)
}

/// `bfind.s64`: position of the highest bit that differs from the sign; all ones for 0 and -1.
#[inline]
pub fn bfind_s64(a: i64) -> u32 {
    bfind_u64((a ^ a >> 63) as u64)
}

/// `bfind.shiftamt.u32`: how far left the highest one must go to reach bit 31; all ones for 0.
#[inline]
pub fn bfind_shiftamt_u32(a: u32) -> u32 {
    if a == 0 { NOT_FOUND } else { a.leading_zeros() }
}

/// Applies `op` to the low and to the high halves.
#[inline]
fn map_x2(op: impl Fn(u16, u16) -> u16, a: u32, b: u32) -> u32 {
    let ((a0, a1), (b0, b1)) = (super::unpack2(a), super::unpack2(b));
    super::pack2(op(a0, b0), op(a1, b1))
}

/// `max.u16x2`
#[inline]
pub fn max_u16x2(a: u32, b: u32) -> u32 {
    map_x2(u16::max, a, b)
}

/// `min.u16x2`
#[inline]
pub fn min_u16x2(a: u32, b: u32) -> u32 {
    map_x2(u16::min, a, b)
}

/// `max.s16x2`
#[inline]
pub fn max_s16x2(a: u32, b: u32) -> u32 {
    map_x2(|a, b| (a as i16).max(b as i16) as u16, a, b)
}

/// `min.s16x2`
#[inline]
pub fn min_s16x2(a: u32, b: u32) -> u32 {
    map_x2(|a, b| (a as i16).min(b as i16) as u16, a, b)
}

//! Values: typed register handles, predicates, loop-carried variables, and their operators.

use std::marker::PhantomData;
use std::ops;

use crate::builder::{emit, fresh};
use crate::divide;
use crate::op::{Bin, Cmp, Cvt, DivMode, Logic, Math, Op, Operand, RegId, Un};
use crate::ty::{Bf16, Class, Int, Num, Scalar, Ty};

/// A value of type `T` in a register, or a constant. Never changes once made; see [`Var`] for what does.
pub struct Reg<T> {
    operand: Operand,
    ty: PhantomData<(T, *const ())>, // not Send: belongs to the kernel being built on this thread
}

impl<T> Clone for Reg<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Reg<T> {}
impl<T> std::fmt::Debug for Reg<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.operand.fmt(f)
    }
}

impl<T> Reg<T> {
    pub(crate) fn from_operand(operand: Operand) -> Self {
        Reg { operand, ty: PhantomData }
    }

    /// The operand, for instruction constructors.
    pub(crate) fn operand(self) -> Operand {
        self.operand
    }

    /// The constant's bits, if this is one.
    pub fn constant(self) -> Option<u64> {
        match self.operand {
            Operand::Imm(v) => Some(v),
            Operand::Reg(_) => None,
        }
    }
}

/// Emits `make(dst)` and returns `dst` as a value.
#[track_caller]
pub(crate) fn def<T: Scalar>(make: impl FnOnce(RegId) -> Op) -> Reg<T> {
    let dst = fresh(T::TY.class());
    emit(make(dst));
    Reg::from_operand(Operand::Reg(dst))
}

/// Emits `make(dst)` and returns `dst` as a predicate.
#[track_caller]
pub(crate) fn def_pred(make: impl FnOnce(RegId) -> Op) -> Pred {
    let dst = fresh(Class::Pred);
    emit(make(dst));
    Pred { reg: dst }
}

impl<T: Scalar> From<T> for Reg<T> {
    fn from(v: T) -> Self {
        Reg::from_operand(Operand::Imm(v.bits()))
    }
}
// Unsuffixed literals fall back to i32 and f64.
macro_rules! from_literal {
    ($($lit:ty => $t:ty;)*) => {$(
        impl From<$lit> for Reg<$t> {
            fn from(v: $lit) -> Self { Reg::from(v as $t) }
        }
    )*};
}
from_literal! { i32 => u32; i32 => u64; i32 => i64; u32 => u64; f64 => f32; i32 => u16; }

impl<T: Scalar> Reg<T> {
    /// The same bits in a register of their own.
    #[track_caller]
    pub fn copied(self) -> Reg<T> {
        def(|dst| Op::Mov { dst, src: self.operand })
    }

    /// The value in a register: packed arithmetic and conversions of narrow floats take no constants.
    #[track_caller]
    pub(crate) fn in_register(self) -> Operand {
        match self.operand {
            Operand::Reg(_) => self.operand,
            Operand::Imm(_) => self.copied().operand,
        }
    }

    /// The same bits seen as another type of the same width.
    ///
    /// # Panics
    /// If the widths differ.
    #[track_caller]
    pub fn bitcast<U: Scalar>(self) -> Reg<U> {
        assert_eq!(T::TY.class(), U::TY.class(), "bitcast keeps the width");
        Reg::from_operand(self.operand)
    }
}

fn fold<T: Scalar>(op: Bin, a: Operand, b: Operand) -> Option<u64> {
    let (Operand::Imm(a), Operand::Imm(b)) = (a, b) else {
        return None;
    };
    let mask = match T::TY {
        Ty::U32 | Ty::S32 => u32::MAX as u64,
        Ty::U64 | Ty::S64 => u64::MAX,
        _ => return None,
    };
    let v = match op {
        Bin::Add => a.wrapping_add(b),
        Bin::Sub => a.wrapping_sub(b),
        Bin::Mul => a.wrapping_mul(b),
        Bin::And => a & b,
        Bin::Or => a | b,
        Bin::Xor => a ^ b,
        Bin::Shl if b < 64 => a << b,
        _ => return None,
    };
    Some(v & mask)
}

#[track_caller]
pub(crate) fn bin<T: Scalar>(op: Bin, a: Operand, b: Operand) -> Reg<T> {
    if let Some(v) = fold::<T>(op, a, b) {
        return Reg::from_operand(Operand::Imm(v));
    }
    def(|dst| Op::Bin { op, ty: T::TY, dst, a, b })
}

macro_rules! operator {
    ($($trait:ident $method:ident $bound:ident $op:ident;)*) => {$(
        impl<T: $bound, R: Into<Reg<T>>> ops::$trait<R> for Reg<T> {
            type Output = Reg<T>;
            #[track_caller]
            fn $method(self, rhs: R) -> Reg<T> { bin(Bin::$op, self.operand, rhs.into().operand) }
        }
    )*};
}
operator! {
    Add add Num Add; Sub sub Num Sub; Mul mul Num Mul;
    BitAnd bitand Int And; BitOr bitor Int Or; BitXor bitxor Int Xor;
}

impl<T: Int, R: Into<Reg<T>>> ops::Div<R> for Reg<T> {
    type Output = Reg<T>;
    /// Shifts and multiplications for an unsigned 32-bit number and a constant.
    #[track_caller]
    fn div(self, rhs: R) -> Reg<T> {
        let (a, b) = (self.operand, rhs.into().operand);
        match divide::quotient(a, b) {
            Some(quotient) => quotient,
            None => bin(Bin::Div, a, b),
        }
    }
}
impl<T: Int, R: Into<Reg<T>>> ops::Rem<R> for Reg<T> {
    type Output = Reg<T>;
    /// As division.
    #[track_caller]
    fn rem(self, rhs: R) -> Reg<T> {
        let (a, b) = (self.operand, rhs.into().operand);
        match divide::rest(a, b) {
            Some(rest) => rest,
            None => bin(Bin::Rem, a, b),
        }
    }
}

impl<T: Int, R: Into<Reg<u32>>> ops::Shl<R> for Reg<T> {
    type Output = Reg<T>;
    #[track_caller]
    fn shl(self, rhs: R) -> Reg<T> {
        bin(Bin::Shl, self.operand, rhs.into().operand)
    }
}
impl<T: Int, R: Into<Reg<u32>>> ops::Shr<R> for Reg<T> {
    type Output = Reg<T>;
    #[track_caller]
    fn shr(self, rhs: R) -> Reg<T> {
        bin(Bin::Shr, self.operand, rhs.into().operand)
    }
}
impl<T: Int> ops::Not for Reg<T> {
    type Output = Reg<T>;
    #[track_caller]
    fn not(self) -> Reg<T> {
        def(|dst| Op::Un { op: Un::Not, ty: T::TY, dst, a: self.operand })
    }
}

impl ops::Neg for Reg<f32> {
    type Output = Reg<f32>;
    #[track_caller]
    fn neg(self) -> Reg<f32> {
        def(|dst| Op::Un { op: Un::Neg, ty: Ty::F32, dst, a: self.operand })
    }
}

impl<T: Num> Reg<T> {
    /// The smaller (floats: a NaN operand is dropped).
    #[track_caller]
    pub fn min(self, other: impl Into<Reg<T>>) -> Reg<T> {
        bin(Bin::Min, self.operand, other.into().operand)
    }

    /// The larger (floats: a NaN operand is dropped).
    #[track_caller]
    pub fn max(self, other: impl Into<Reg<T>>) -> Reg<T> {
        bin(Bin::Max, self.operand, other.into().operand)
    }

    #[track_caller]
    fn compare(self, cmp: Cmp, other: Reg<T>) -> Pred {
        def_pred(|dst| Op::Setp { cmp, ty: T::TY, dst, a: self.operand, b: other.operand })
    }

    /// `self == other`
    #[track_caller]
    pub fn eq(self, other: impl Into<Reg<T>>) -> Pred {
        self.compare(Cmp::Eq, other.into())
    }

    /// `self != other`
    #[track_caller]
    pub fn ne(self, other: impl Into<Reg<T>>) -> Pred {
        self.compare(Cmp::Ne, other.into())
    }

    /// `self < other`
    #[track_caller]
    pub fn lt(self, other: impl Into<Reg<T>>) -> Pred {
        self.compare(Cmp::Lt, other.into())
    }

    /// `self <= other`
    #[track_caller]
    pub fn le(self, other: impl Into<Reg<T>>) -> Pred {
        self.compare(Cmp::Le, other.into())
    }

    /// `self > other`
    #[track_caller]
    pub fn gt(self, other: impl Into<Reg<T>>) -> Pred {
        self.compare(Cmp::Gt, other.into())
    }

    /// `self >= other`
    #[track_caller]
    pub fn ge(self, other: impl Into<Reg<T>>) -> Pred {
        self.compare(Cmp::Ge, other.into())
    }
}

impl<T: Int> Reg<T> {
    /// `self * b + c`, low half.
    #[track_caller]
    pub fn mad(self, b: impl Into<Reg<T>>, c: impl Into<Reg<T>>) -> Reg<T> {
        let (b, c) = (b.into().operand, c.into().operand);
        def(|dst| Op::Mad { ty: T::TY, dst, a: self.operand, b, c })
    }

    /// Number of set bits.
    #[track_caller]
    pub fn popc(self) -> Reg<u32> {
        def(|dst| Op::Un { op: Un::Popc, ty: T::TY, dst, a: self.operand })
    }

    /// Number of leading zeros.
    #[track_caller]
    pub fn clz(self) -> Reg<u32> {
        def(|dst| Op::Un { op: Un::Clz, ty: T::TY, dst, a: self.operand })
    }

    /// High half of the product.
    #[track_caller]
    pub fn mul_hi(self, b: impl Into<Reg<T>>) -> Reg<T> {
        bin(Bin::MulHi, self.operand, b.into().operand)
    }
}

impl Reg<u32> {
    /// Zero-extended to 64 bits.
    #[track_caller]
    pub fn to_u64(self) -> Reg<u64> {
        match self.constant() {
            Some(v) => Reg::from(v),
            None => def(|dst| Op::Cvt { op: Cvt::U32ToU64, dst, a: self.operand }),
        }
    }

    /// The full 64-bit product.
    #[track_caller]
    pub fn mul_wide(self, b: impl Into<Reg<u32>>) -> Reg<u64> {
        let b = b.into();
        if let (Some(x), Some(y)) = (self.constant(), b.constant()) {
            return Reg::from(x * y);
        }
        def(|dst| Op::MulWide { ty: Ty::U32, dst, a: self.operand, b: b.operand })
    }

    /// The full 64-bit product plus `c`.
    #[track_caller]
    pub fn mad_wide(self, b: impl Into<Reg<u32>>, c: impl Into<Reg<u64>>) -> Reg<u64> {
        let (b, c) = (b.into().operand, c.into().operand);
        def(|dst| Op::MadWide { ty: Ty::U32, dst, a: self.operand, b, c })
    }

    /// As FP32, round to nearest even.
    #[track_caller]
    pub fn to_f32(self) -> Reg<f32> {
        def(|dst| Op::Cvt { op: Cvt::U32ToF32, dst, a: self.operand })
    }

    /// The low 16 bits in a 16-bit register.
    #[track_caller]
    pub fn to_u16(self) -> Reg<u16> {
        def(|dst| Op::Cvt { op: Cvt::U32ToU16, dst, a: self.operand })
    }

    /// As a signed value of the same bits.
    pub fn as_i32(self) -> Reg<i32> {
        Reg::from_operand(self.operand)
    }

    /// Bits `pos .. pos + len`, zero-extended.
    #[track_caller]
    pub fn bits(self, pos: impl Into<Reg<u32>>, len: impl Into<Reg<u32>>) -> Reg<u32> {
        let (pos, len) = (pos.into().operand, len.into().operand);
        def(|dst| Op::Bfe { dst, a: self.operand, pos, len })
    }

    /// Bit-reversed.
    #[track_caller]
    pub fn reverse_bits(self) -> Reg<u32> {
        def(|dst| Op::Un { op: Un::Brev, ty: Ty::U32, dst, a: self.operand })
    }

    /// Byte permutation: nibble `i` of `selector` picks result byte `i` from the eight bytes of `{other, self}`.
    #[track_caller]
    pub fn permute(self, other: impl Into<Reg<u32>>, selector: impl Into<Reg<u32>>) -> Reg<u32> {
        let (b, selector) = (other.into().operand, selector.into().operand);
        def(|dst| Op::Prmt { dst, a: self.operand, b, selector })
    }

    /// Bitwise function of three values given by its truth table (`0xF0`, `0xCC`, `0xAA` stand for the inputs).
    #[track_caller]
    pub fn lop3(self, b: impl Into<Reg<u32>>, c: impl Into<Reg<u32>>, table: u8) -> Reg<u32> {
        let (b, c) = (b.into().operand, c.into().operand);
        def(|dst| Op::Lop3 { dst, a: self.operand, b, c, table })
    }

    /// `{hi, self} << n`, high word; `n` is clamped to 32.
    #[track_caller]
    pub fn funnel_shl(self, hi: impl Into<Reg<u32>>, n: impl Into<Reg<u32>>) -> Reg<u32> {
        let (hi, n) = (hi.into().operand, n.into().operand);
        def(|dst| Op::ShfL { dst, lo: self.operand, hi, n, wrap: false })
    }

    /// `{hi, self} >> n`, low word; `n` is clamped to 32.
    #[track_caller]
    pub fn funnel_shr(self, hi: impl Into<Reg<u32>>, n: impl Into<Reg<u32>>) -> Reg<u32> {
        let (hi, n) = (hi.into().operand, n.into().operand);
        def(|dst| Op::ShfR { dst, lo: self.operand, hi, n, wrap: false })
    }

    /// Lane-wise maximum of two packed 16-bit unsigned values.
    #[track_caller]
    pub fn max_u16x2(self, b: impl Into<Reg<u32>>) -> Reg<u32> {
        let (a, b) = (self.in_register(), b.into().in_register());
        def(|dst| Op::Bin { op: Bin::Max, ty: Ty::U16x2, dst, a, b })
    }

    /// Lane-wise minimum of two packed 16-bit unsigned values.
    #[track_caller]
    pub fn min_u16x2(self, b: impl Into<Reg<u32>>) -> Reg<u32> {
        let (a, b) = (self.in_register(), b.into().in_register());
        def(|dst| Op::Bin { op: Bin::Min, ty: Ty::U16x2, dst, a, b })
    }

    /// 64 bits from two halves, `self` the low one.
    #[track_caller]
    pub fn pack(self, hi: impl Into<Reg<u32>>) -> Reg<u64> {
        let hi = hi.into().operand;
        def(|dst| Op::Pack { dst, lo: self.operand, hi })
    }
}

impl Reg<u16> {
    /// Zero-extended to 32 bits.
    #[track_caller]
    pub fn to_u32(self) -> Reg<u32> {
        def(|dst| Op::Cvt { op: Cvt::U16ToU32, dst, a: self.operand })
    }

    /// 32 bits from two halves, `self` the low one.
    #[track_caller]
    pub fn pack(self, hi: impl Into<Reg<u16>>) -> Reg<u32> {
        let hi = hi.into().operand;
        def(|dst| Op::Pack { dst, lo: self.operand, hi })
    }
}

impl Reg<i32> {
    /// Sign-extended to 64 bits.
    #[track_caller]
    pub fn to_i64(self) -> Reg<i64> {
        def(|dst| Op::Cvt { op: Cvt::S32ToS64, dst, a: self.operand })
    }

    /// The full signed 64-bit product.
    #[track_caller]
    pub fn mul_wide(self, b: impl Into<Reg<i32>>) -> Reg<i64> {
        let b = b.into().operand;
        def(|dst| Op::MulWide { ty: Ty::S32, dst, a: self.operand, b })
    }

    /// As FP32, round to nearest even.
    #[track_caller]
    pub fn to_f32(self) -> Reg<f32> {
        def(|dst| Op::Cvt { op: Cvt::S32ToF32, dst, a: self.operand })
    }

    /// As an unsigned value of the same bits.
    pub fn as_u32(self) -> Reg<u32> {
        Reg::from_operand(self.operand)
    }
}

impl Reg<i64> {
    /// As an unsigned value of the same bits.
    pub fn as_u64(self) -> Reg<u64> {
        Reg::from_operand(self.operand)
    }
}

impl Reg<u64> {
    /// The low 32 bits.
    #[track_caller]
    pub fn low(self) -> Reg<u32> {
        def(|dst| Op::Cvt { op: Cvt::U64ToU32, dst, a: self.operand })
    }

    /// (low, high) halves.
    #[track_caller]
    pub fn unpack(self) -> (Reg<u32>, Reg<u32>) {
        let (lo, hi) = (fresh(Class::B32), fresh(Class::B32));
        emit(Op::Unpack { lo, hi, src: self.operand });
        (Reg::from_operand(Operand::Reg(lo)), Reg::from_operand(Operand::Reg(hi)))
    }

    /// As a signed value of the same bits.
    pub fn as_i64(self) -> Reg<i64> {
        Reg::from_operand(self.operand)
    }
}

impl Reg<f32> {
    /// `self * b + c`, one rounding.
    #[track_caller]
    pub fn fma(self, b: impl Into<Reg<f32>>, c: impl Into<Reg<f32>>) -> Reg<f32> {
        let (b, c) = (b.into().operand, c.into().operand);
        def(|dst| Op::Fma { dst, a: self.operand, b, c })
    }

    /// IEEE quotient.
    #[track_caller]
    pub fn div_rn(self, b: impl Into<Reg<f32>>) -> Reg<f32> {
        let b = b.into().operand;
        def(|dst| Op::Div { mode: DivMode::Rn, dst, a: self.operand, b })
    }

    /// Quotient to 2 ulp.
    #[track_caller]
    pub fn div_full(self, b: impl Into<Reg<f32>>) -> Reg<f32> {
        let b = b.into().operand;
        def(|dst| Op::Div { mode: DivMode::Full, dst, a: self.operand, b })
    }

    /// A [`Math`] function.
    #[track_caller]
    pub fn math(self, op: Math) -> Reg<f32> {
        def(|dst| Op::Math { op, dst, a: self.operand })
    }

    /// Absolute value.
    #[track_caller]
    pub fn abs(self) -> Reg<f32> {
        def(|dst| Op::Un { op: Un::Abs, ty: Ty::F32, dst, a: self.operand })
    }

    /// Toward zero, saturating.
    #[track_caller]
    pub fn to_u32(self) -> Reg<u32> {
        def(|dst| Op::Cvt { op: Cvt::F32ToU32Rz, dst, a: self.operand })
    }

    /// To BF16, round to nearest even.
    #[track_caller]
    pub fn to_bf16(self) -> Reg<Bf16> {
        def(|dst| Op::Cvt { op: Cvt::F32ToBf16, dst, a: self.operand })
    }
}

impl Reg<Bf16> {
    /// Exact.
    #[track_caller]
    pub fn to_f32(self) -> Reg<f32> {
        let a = self.in_register();
        def(|dst| Op::Cvt { op: Cvt::Bf16ToF32, dst, a })
    }
}

/// One bit per lane.
#[derive(Clone, Copy, Debug)]
pub struct Pred {
    reg: RegId,
}

impl Pred {
    pub(crate) fn reg(self) -> RegId {
        self.reg
    }

    /// A constant.
    #[track_caller]
    pub fn constant(value: bool) -> Pred {
        def_pred(|dst| Op::PredConst { dst, value })
    }

    /// `self ? a : b`, without a branch.
    #[track_caller]
    pub fn select<T: Scalar>(self, a: impl Into<Reg<T>>, b: impl Into<Reg<T>>) -> Reg<T> {
        let (a, b) = (a.into().operand, b.into().operand);
        def(|dst| Op::Selp { ty: T::TY, dst, a, b, p: self.reg })
    }

    /// 1 where it holds, else 0.
    #[track_caller]
    pub fn as_u32(self) -> Reg<u32> {
        self.select(1u32, 0u32)
    }

    #[track_caller]
    fn logic(self, op: Logic, other: Pred) -> Pred {
        def_pred(|dst| Op::PredLogic { op, dst, a: self.reg, b: other.reg })
    }
}

impl ops::BitAnd for Pred {
    type Output = Pred;
    #[track_caller]
    fn bitand(self, rhs: Pred) -> Pred {
        self.logic(Logic::And, rhs)
    }
}
impl ops::BitOr for Pred {
    type Output = Pred;
    #[track_caller]
    fn bitor(self, rhs: Pred) -> Pred {
        self.logic(Logic::Or, rhs)
    }
}
impl ops::BitXor for Pred {
    type Output = Pred;
    #[track_caller]
    fn bitxor(self, rhs: Pred) -> Pred {
        self.logic(Logic::Xor, rhs)
    }
}
impl ops::Not for Pred {
    type Output = Pred;
    #[track_caller]
    fn not(self) -> Pred {
        def_pred(|dst| Op::PredNot { dst, a: self.reg })
    }
}

/// A register that changes: anything carried round a loop or out of a branch.
///
/// [`Var::get`] copies, so a value taken earlier never changes under the reader; the assembler removes the copy.
pub struct Var<T> {
    reg: RegId,
    ty: PhantomData<(T, *const ())>,
}
impl<T> Clone for Var<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Var<T> {}

impl<T: Scalar> Var<T> {
    /// A new variable holding `value`.
    #[track_caller]
    pub fn new(value: impl Into<Reg<T>>) -> Var<T> {
        let src = value.into().operand;
        let reg = fresh(T::TY.class());
        emit(Op::Mov { dst: reg, src });
        Var { reg, ty: PhantomData }
    }

    /// A new variable without a value; reading it before a write is a fault in the simulator.
    pub fn undefined() -> Var<T> {
        Var { reg: fresh(T::TY.class()), ty: PhantomData }
    }

    /// The value at this point.
    #[track_caller]
    pub fn get(self) -> Reg<T> {
        def(|dst| Op::Mov { dst, src: Operand::Reg(self.reg) })
    }

    /// Overwrites it.
    #[track_caller]
    pub fn set(self, value: impl Into<Reg<T>>) {
        emit(Op::Mov { dst: self.reg, src: value.into().operand });
    }
}

impl<T: Num> Var<T> {
    /// Adds to it.
    #[track_caller]
    pub fn add(self, value: impl Into<Reg<T>>) {
        let b = value.into().operand;
        emit(Op::Bin { op: Bin::Add, ty: T::TY, dst: self.reg, a: Operand::Reg(self.reg), b });
    }
}

impl<T: Int> Var<T> {
    /// Flips the bits of `value` in it.
    #[track_caller]
    pub fn xor(self, value: impl Into<Reg<T>>) {
        let b = value.into().operand;
        emit(Op::Bin { op: Bin::Xor, ty: T::TY, dst: self.reg, a: Operand::Reg(self.reg), b });
    }
}

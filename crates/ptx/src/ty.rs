//! Scalar types: what a register holds, what a memory element is, and how PTX spells both.

/// The register classes of the emitted text. PTX accepts an untyped register of the right width for any use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// One bit per lane.
    Pred,
    /// 16 bits.
    B16,
    /// 32 bits.
    B32,
    /// 64 bits.
    B64,
}

impl Class {
    /// Every class, in declaration order of the emitted text.
    pub const ALL: [Class; 4] = [Class::Pred, Class::B16, Class::B32, Class::B64];

    /// The PTX type of the declaration and the register name prefix.
    pub fn spelling(self) -> (&'static str, &'static str) {
        match self {
            Class::Pred => ("pred", "p"),
            Class::B16 => ("b16", "h"),
            Class::B32 => ("b32", "r"),
            Class::B64 => ("b64", "d"),
        }
    }
}

/// How an instruction interprets its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ty {
    /// 8-bit memory element (loads zero-extend into a 32-bit register).
    U8,
    /// 16-bit unsigned.
    U16,
    /// 32-bit unsigned.
    U32,
    /// 32-bit signed.
    S32,
    /// 64-bit unsigned.
    U64,
    /// 64-bit signed.
    S64,
    /// FP32.
    F32,
    /// One BF16.
    Bf16,
    /// Two BF16 in 32 bits, element 0 in the low half.
    Bf16x2,
    /// Two FP16 in 32 bits, element 0 in the low half.
    F16x2,
    /// Two 16-bit unsigned in 32 bits.
    U16x2,
}

impl Ty {
    /// Size of one element in bytes.
    pub fn bytes(self) -> u32 {
        match self {
            Ty::U8 => 1,
            Ty::U16 | Ty::Bf16 => 2,
            Ty::U32 | Ty::S32 | Ty::F32 | Ty::Bf16x2 | Ty::F16x2 | Ty::U16x2 => 4,
            Ty::U64 | Ty::S64 => 8,
        }
    }

    /// The register class that holds an operand of this type in arithmetic.
    pub fn class(self) -> Class {
        match self {
            Ty::U8 | Ty::U16 | Ty::Bf16 => Class::B16,
            Ty::U32 | Ty::S32 | Ty::F32 | Ty::Bf16x2 | Ty::F16x2 | Ty::U16x2 => Class::B32,
            Ty::U64 | Ty::S64 => Class::B64,
        }
    }

    /// PTX spelling in arithmetic (`add.u32`).
    pub fn ptx(self) -> &'static str {
        match self {
            Ty::U8 => "u8",
            Ty::U16 => "u16",
            Ty::U32 => "u32",
            Ty::S32 => "s32",
            Ty::U64 => "u64",
            Ty::S64 => "s64",
            Ty::F32 => "f32",
            Ty::Bf16 => "bf16",
            Ty::Bf16x2 => "bf16x2",
            Ty::F16x2 => "f16x2",
            Ty::U16x2 => "u16x2",
        }
    }

    /// PTX spelling as a memory element: unsigned below 32 bits so that loads zero-extend, untyped above.
    pub fn ptx_memory(self) -> &'static str {
        match self {
            Ty::U8 => "u8",
            Ty::U16 | Ty::Bf16 => "u16",
            Ty::U32 | Ty::S32 | Ty::F32 | Ty::Bf16x2 | Ty::F16x2 | Ty::U16x2 => "b32",
            Ty::U64 | Ty::S64 => "b64",
        }
    }

    /// PTX spelling as untyped bits (`mov.b32`, `and.b32`).
    pub fn ptx_bits(self) -> &'static str {
        match self.class() {
            Class::Pred => "pred",
            Class::B16 => "b16",
            Class::B32 => "b32",
            Class::B64 => "b64",
        }
    }

    /// Whether the type is a signed integer.
    pub fn is_signed(self) -> bool {
        matches!(self, Ty::S32 | Ty::S64)
    }

    /// Whether the type is an integer that `add`, `mul.lo`, `div`, … accept.
    pub fn is_integer(self) -> bool {
        matches!(self, Ty::U16 | Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64)
    }
}

/// BF16 in a 16-bit register (bits; arithmetic goes through FP32 or [`Bf16x2`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bf16(pub u16);

/// Two BF16 in one 32-bit register, element 0 in the low half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bf16x2(pub u32);

/// Two FP16 in one 32-bit register, element 0 in the low half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct F16x2(pub u32);

/// A type that a register can hold.
pub trait Scalar: Copy + 'static {
    /// How instructions interpret it.
    const TY: Ty;
    /// The bits of a constant, zero-extended.
    fn bits(self) -> u64;
}

macro_rules! scalar {
    ($($t:ty, $ty:ident, |$x:ident| $bits:expr;)*) => {$(
        impl Scalar for $t {
            const TY: Ty = Ty::$ty;
            fn bits(self) -> u64 { let $x = self; $bits }
        }
    )*};
}
scalar! {
    u16, U16, |x| x as u64;
    u32, U32, |x| x as u64;
    i32, S32, |x| x as u32 as u64;
    u64, U64, |x| x;
    i64, S64, |x| x as u64;
    f32, F32, |x| x.to_bits() as u64;
    Bf16, Bf16, |x| x.0 as u64;
    Bf16x2, Bf16x2, |x| x.0 as u64;
    F16x2, F16x2, |x| x.0 as u64;
}

/// Integers with wrapping arithmetic, shifts and bit operations.
pub trait Int: Scalar {}
impl Int for u32 {}
impl Int for i32 {}
impl Int for u64 {}
impl Int for i64 {}

/// Types with `+ - *`.
pub trait Num: Scalar {}
impl Num for u32 {}
impl Num for i32 {}
impl Num for u64 {}
impl Num for i64 {}
impl Num for f32 {}

/// A memory element and the register type that a load of it fills.
///
/// 8- and 16-bit elements are loaded zero-extended into a 32-bit register and stored from its low bits.
pub trait Elem: Copy + 'static {
    /// The memory type.
    const TY: Ty;
    /// What a load yields.
    type Value: Scalar;
}
macro_rules! elem {
    ($($t:ty => $v:ty, $ty:ident;)*) => {$(impl Elem for $t { const TY: Ty = Ty::$ty; type Value = $v; })*};
}
elem! {
    u8 => u32, U8; u16 => u32, U16;
    u32 => u32, U32; i32 => i32, S32; u64 => u64, U64; i64 => i64, S64; f32 => f32, F32;
    Bf16x2 => Bf16x2, Bf16x2; F16x2 => F16x2, F16x2;
}

//! Conversions and packed 16-bit arithmetic.

use std::ops;

use crate::builder::{emit, fresh};
use crate::op::{Bf16Bin, Cvt, CvtPack, Op, Operand};
use crate::ty::{Bf16x2, Class, F16x2};
use crate::value::{Reg, def};

impl Reg<Bf16x2> {
    /// Two FP32 to a BF16 pair, round to nearest even.
    #[track_caller]
    pub fn from_f32(lo: Reg<f32>, hi: Reg<f32>) -> Self {
        def(|dst| Op::CvtPack { op: CvtPack::Bf16x2, dst, hi: hi.operand(), lo: lo.operand() })
    }

    /// Two FP32 to a BF16 pair, negatives and -0 to +0, NaN kept as 0x7FFF.
    #[track_caller]
    pub fn from_f32_relu(lo: Reg<f32>, hi: Reg<f32>) -> Self {
        def(|dst| Op::CvtPack { op: CvtPack::Bf16x2Relu, dst, hi: hi.operand(), lo: lo.operand() })
    }

    /// The packed bits.
    pub fn to_bits(self) -> Reg<u32> {
        Reg::from_operand(self.operand())
    }

    /// From packed bits.
    pub fn from_bits(bits: Reg<u32>) -> Self {
        Reg::from_operand(bits.operand())
    }

    #[track_caller]
    fn bf16(self, op: Bf16Bin, b: Reg<Bf16x2>) -> Self {
        let (a, b) = (self.in_register(), b.in_register());
        def(|dst| Op::Bf16Bin { op, dst, a, b })
    }

    /// Lane-wise maximum, dropping a NaN operand.
    #[track_caller]
    pub fn max(self, b: Reg<Bf16x2>) -> Self {
        self.bf16(Bf16Bin::Max, b)
    }

    /// Lane-wise minimum, dropping a NaN operand.
    #[track_caller]
    pub fn min(self, b: Reg<Bf16x2>) -> Self {
        self.bf16(Bf16Bin::Min, b)
    }

    /// Lane-wise maximum, NaN if either operand is.
    #[track_caller]
    pub fn max_nan(self, b: Reg<Bf16x2>) -> Self {
        self.bf16(Bf16Bin::MaxNan, b)
    }

    /// Lane-wise `self * b + c`, each lane rounded once.
    #[track_caller]
    pub fn fma(self, b: Reg<Bf16x2>, c: Reg<Bf16x2>) -> Self {
        let (a, b, c) = (self.in_register(), b.in_register(), c.in_register());
        def(|dst| Op::Bf16Fma { dst, a, b, c, relu: false })
    }

    /// Lane-wise `max(self * b + c, +0)`.
    #[track_caller]
    pub fn fma_relu(self, b: Reg<Bf16x2>, c: Reg<Bf16x2>) -> Self {
        let (a, b, c) = (self.in_register(), b.in_register(), c.in_register());
        def(|dst| Op::Bf16Fma { dst, a, b, c, relu: true })
    }

    /// Element 0 in both lanes and element 1 in both lanes. Packed arithmetic selects a half for nothing.
    #[track_caller]
    pub fn splat(self) -> [Self; 2] {
        let (lo, hi) = (fresh(Class::B16), fresh(Class::B16));
        emit(Op::Unpack { lo, hi, src: self.operand() });
        [lo, hi].map(|half| {
            let half = Operand::Reg(half);
            def(|dst| Op::Pack { dst, lo: half, hi: half })
        })
    }

    /// Element 0 as FP32, exact.
    #[track_caller]
    pub fn low_f32(self) -> Reg<f32> {
        (self.to_bits() << 16).bitcast()
    }

    /// Element 1 as FP32, exact.
    #[track_caller]
    pub fn high_f32(self) -> Reg<f32> {
        (self.to_bits() & 0xFFFF_0000u32).bitcast()
    }
}

impl Reg<F16x2> {
    /// From an E4M3 pair, exact.
    #[track_caller]
    pub fn from_e4m3x2(pair: Reg<u16>) -> Self {
        let a = pair.in_register();
        def(|dst| Op::Cvt { op: Cvt::E4m3x2ToF16x2, dst, a })
    }

    /// Two FP32 to an FP16 pair, round to nearest even.
    #[track_caller]
    pub fn from_f32(lo: Reg<f32>, hi: Reg<f32>) -> Self {
        def(|dst| Op::CvtPack { op: CvtPack::F16x2, dst, hi: hi.operand(), lo: lo.operand() })
    }

    /// To an E4M3 pair, round to nearest even, saturating at 448, NaN to 0x7F.
    #[track_caller]
    pub fn to_e4m3x2(self) -> Reg<u16> {
        let a = self.in_register();
        def(|dst| Op::Cvt { op: Cvt::F16x2ToE4m3x2, dst, a })
    }

    /// The packed bits.
    pub fn to_bits(self) -> Reg<u32> {
        Reg::from_operand(self.operand())
    }
}

/// Two FP32 to an E4M3 pair in 16 bits (`lo` in the low byte), round to nearest even, saturating at 448, NaN to 0x7F.
#[track_caller]
pub fn e4m3x2_from_f32(lo: Reg<f32>, hi: Reg<f32>) -> Reg<u16> {
    def(|dst| Op::CvtPack { op: CvtPack::E4m3x2, dst, hi: hi.operand(), lo: lo.operand() })
}

/// Lane-wise sum, each lane rounded once.
impl ops::Add for Reg<Bf16x2> {
    type Output = Self;
    #[track_caller]
    fn add(self, b: Self) -> Self {
        self.bf16(Bf16Bin::Add, b)
    }
}

/// Lane-wise product, each lane rounded once.
impl ops::Mul for Reg<Bf16x2> {
    type Output = Self;
    #[track_caller]
    fn mul(self, b: Self) -> Self {
        self.bf16(Bf16Bin::Mul, b)
    }
}

/// Lane-wise product, each lane rounded once.
impl ops::Mul for Reg<F16x2> {
    type Output = Self;
    #[track_caller]
    fn mul(self, b: Self) -> Self {
        let (a, b) = (self.in_register(), b.in_register());
        def(|dst| Op::F16x2Mul { dst, a, b })
    }
}

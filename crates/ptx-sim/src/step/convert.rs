//! Conversions and packed 16-bit arithmetic.

use ptx::op::{Bf16Bin, Cvt, CvtPack, Operand, RegId};

use super::alu::lanes;
use super::{Exec, Step};
use crate::numeric::{bf16, f16, float, fp8};

impl Exec<'_> {
    /// One-source conversion.
    pub(super) fn cvt(&mut self, op: Cvt, dst: RegId, a: Operand) -> Step {
        match op {
            Cvt::U32ToU64 => {
                let x = self.r32(a)?;
                self.w64(dst, &lanes!(|a: x| u64::from(a)))
            }
            Cvt::S32ToS64 => {
                let x = self.r32(a)?;
                self.w64(dst, &lanes!(|a: x| i64::from(a as i32) as u64))
            }
            Cvt::U64ToU32 => {
                let x = self.r64(a)?;
                self.w32(dst, &lanes!(|a: x| a as u32))
            }
            Cvt::U16ToU32 => {
                let x = self.r16(a)?;
                self.w32(dst, &lanes!(|a: x| u32::from(a)))
            }
            Cvt::U32ToU16 => {
                let x = self.r32(a)?;
                self.w16(dst, &lanes!(|a: x| a as u16))
            }
            Cvt::U32ToF32 => {
                let x = self.r32(a)?;
                self.w32(dst, &lanes!(|a: x| float::from_u32(a)))
            }
            Cvt::S32ToF32 => {
                let x = self.r32(a)?;
                self.w32(dst, &lanes!(|a: x| float::from_s32(a as i32)))
            }
            Cvt::F32ToU32Rz => {
                let x = self.r32(a)?;
                self.w32(dst, &lanes!(|a: x| float::to_u32(a, float::ToInt::Zero)))
            }
            Cvt::F32ToS32Rz => {
                let x = self.r32(a)?;
                self.w32(dst, &lanes!(|a: x| float::to_s32(a, float::ToInt::Zero) as u32))
            }
            Cvt::Bf16ToF32 => {
                let x = self.r16(a)?;
                self.w32(dst, &lanes!(|a: x| bf16::to_f32(a)))
            }
            Cvt::F32ToBf16 => {
                let x = self.r32(a)?;
                self.w16(dst, &lanes!(|a: x| bf16::from_f32(a)))
            }
            Cvt::E4m3x2ToF16x2 => {
                let x = self.r16(a)?;
                self.w32(dst, &lanes!(|a: x| fp8::e4m3x2_to_f16x2(a)))
            }
            Cvt::F16x2ToE4m3x2 => {
                let x = self.r32(a)?;
                self.w16(dst, &lanes!(|a: x| fp8::e4m3x2_from_f16x2(a)))
            }
        }
    }

    /// Two-source conversion.
    pub(super) fn cvt_pack(&mut self, op: CvtPack, dst: RegId, hi: Operand, lo: Operand) -> Step {
        let (h, l) = (self.r32(hi)?, self.r32(lo)?);
        match op {
            CvtPack::Bf16x2 => self.w32(dst, &lanes!(|h: h, l: l| bf16::from_f32_x2(h, l))),
            CvtPack::Bf16x2Relu => self.w32(dst, &lanes!(|h: h, l: l| bf16::from_f32_relu_x2(h, l))),
            CvtPack::F16x2 => self.w32(dst, &lanes!(|h: h, l: l| f16::from_f32_x2(h, l))),
            CvtPack::E4m3x2 => self.w16(dst, &lanes!(|h: h, l: l| fp8::e4m3x2_from_f32(h, l))),
        }
    }

    /// BF16x2 arithmetic.
    pub(super) fn bf16_bin(&mut self, op: Bf16Bin, dst: RegId, a: Operand, b: Operand) -> Step {
        let (x, y) = (self.r32(a)?, self.r32(b)?);
        let out = match op {
            Bf16Bin::Add => lanes!(|a: x, b: y| bf16::add_x2(a, b)),
            Bf16Bin::Mul => lanes!(|a: x, b: y| bf16::mul_x2(a, b)),
            Bf16Bin::Max => lanes!(|a: x, b: y| bf16::max_x2(a, b)),
            Bf16Bin::Min => lanes!(|a: x, b: y| bf16::min_x2(a, b)),
            Bf16Bin::MaxNan => lanes!(|a: x, b: y| bf16::max_nan_x2(a, b)),
        };
        self.w32(dst, &out)
    }

    /// BF16x2 `a * b + c`.
    pub(super) fn bf16_fma(&mut self, dst: RegId, a: Operand, b: Operand, c: Operand, relu: bool) -> Step {
        let (x, y, z) = (self.r32(a)?, self.r32(b)?, self.r32(c)?);
        let out = if relu {
            lanes!(|a: x, b: y, c: z| bf16::fma_relu_x2(a, b, c))
        } else {
            lanes!(|a: x, b: y, c: z| bf16::fma_x2(a, b, c))
        };
        self.w32(dst, &out)
    }

    /// FP16x2 product: the FP32 product of two FP16 is exact, so one rounding remains.
    pub(super) fn f16x2_mul(&mut self, dst: RegId, a: Operand, b: Operand) -> Step {
        let (x, y) = (self.r32(a)?, self.r32(b)?);
        let mul = |a: u16, b: u16| float::mul(f16::to_f32(a), f16::to_f32(b));
        let out =
            lanes!(|a: x, b: y| f16::from_f32_x2(mul((a >> 16) as u16, (b >> 16) as u16), mul(a as u16, b as u16)));
        self.w32(dst, &out)
    }
}

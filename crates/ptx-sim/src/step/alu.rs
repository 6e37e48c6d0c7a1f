//! Integer, FP32 and predicate arithmetic, moves and constants. Every function is computed in all 32 lanes and written
//! to the active ones: none of them can fault.

use ptx::Ty;
use ptx::op::{Bin, Cmp, DivMode, Logic, Math, Op, Operand, RegId, Un};

use super::{Exec, Step};
use crate::numeric::{approx, float, int};
use crate::registers::LANES;
use crate::trap::Stop;

/// Applies a function of one, two or three rows lane by lane.
macro_rules! lanes {
    (|$a:ident: $x:ident| $f:expr) => {{
        let x = $x;
        std::array::from_fn(|i| {
            let $a = x[i];
            $f
        })
    }};
    (|$a:ident: $x:ident, $b:ident: $y:ident| $f:expr) => {{
        let (x, y) = ($x, $y);
        std::array::from_fn(|i| {
            let ($a, $b) = (x[i], y[i]);
            $f
        })
    }};
    (|$a:ident: $x:ident, $b:ident: $y:ident, $c:ident: $z:ident| $f:expr) => {{
        let (x, y, z) = ($x, $y, $z);
        std::array::from_fn(|i| {
            let ($a, $b, $c) = (x[i], y[i], z[i]);
            $f
        })
    }};
}
pub(super) use lanes;

/// One bit per lane where the function holds.
macro_rules! bits {
    (|$a:ident: $x:ident, $b:ident: $y:ident| $f:expr) => {{
        let (x, y) = ($x, $y);
        let mut bits = 0u32;
        for i in 0..LANES {
            let ($a, $b) = (x[i], y[i]);
            bits |= u32::from($f) << i;
        }
        bits
    }};
}

impl Exec<'_> {
    /// Two-operand arithmetic.
    #[inline(always)]
    pub(super) fn bin(&mut self, op: Bin, ty: Ty, dst: RegId, a: Operand, b: Operand) -> Step {
        match ty {
            Ty::U32 | Ty::S32 => self.bin32(op, ty == Ty::S32, dst, a, b),
            Ty::U64 | Ty::S64 => self.bin64(op, ty == Ty::S64, dst, a, b),
            Ty::F32 => self.bin_f32(op, dst, a, b),
            Ty::U16 | Ty::Bf16 => self.bin16(op, dst, a, b),
            Ty::U16x2 => self.bin_u16x2(op, dst, a, b),
            Ty::Bf16x2 | Ty::F16x2 => self.bin_bits32(op, ty, dst, a, b),
            Ty::U8 => Err(Stop::unsupported(format!("{op:?} on {ty:?}"))),
        }
    }

    #[inline(always)]
    fn bin32(&mut self, op: Bin, signed: bool, dst: RegId, a: Operand, b: Operand) -> Step {
        let (x, y) = (self.r32(a)?, self.r32(b)?);
        let out: [u32; LANES] = match (op, signed) {
            (Bin::Add, _) => lanes!(|a: x, b: y| a.wrapping_add(b)),
            (Bin::Sub, _) => lanes!(|a: x, b: y| a.wrapping_sub(b)),
            (Bin::Mul, _) => lanes!(|a: x, b: y| a.wrapping_mul(b)),
            (Bin::MulHi, false) => lanes!(|a: x, b: y| int::mul_hi_u32(a, b)),
            (Bin::MulHi, true) => lanes!(|a: x, b: y| int::mul_hi_s32(a as i32, b as i32) as u32),
            (Bin::Div, false) => lanes!(|a: x, b: y| int::div_u32(a, b)),
            (Bin::Div, true) => lanes!(|a: x, b: y| int::div_s32(a as i32, b as i32) as u32),
            (Bin::Rem, false) => lanes!(|a: x, b: y| int::rem_u32(a, b)),
            (Bin::Rem, true) => lanes!(|a: x, b: y| int::rem_s32(a as i32, b as i32) as u32),
            (Bin::Min, false) => lanes!(|a: x, b: y| a.min(b)),
            (Bin::Min, true) => lanes!(|a: x, b: y| (a as i32).min(b as i32) as u32),
            (Bin::Max, false) => lanes!(|a: x, b: y| a.max(b)),
            (Bin::Max, true) => lanes!(|a: x, b: y| (a as i32).max(b as i32) as u32),
            (Bin::And, _) => lanes!(|a: x, b: y| a & b),
            (Bin::Or, _) => lanes!(|a: x, b: y| a | b),
            (Bin::Xor, _) => lanes!(|a: x, b: y| a ^ b),
            (Bin::Shl, _) => lanes!(|a: x, b: y| int::shl_b32(a, b)),
            (Bin::Shr, false) => lanes!(|a: x, b: y| int::shr_u32(a, b)),
            (Bin::Shr, true) => lanes!(|a: x, b: y| int::shr_s32(a as i32, b) as u32),
        };
        self.w32(dst, &out)
    }

    fn bin64(&mut self, op: Bin, signed: bool, dst: RegId, a: Operand, b: Operand) -> Step {
        let x = self.r64(a)?;
        let out: [u64; LANES] = if matches!(op, Bin::Shl | Bin::Shr) {
            let y = self.r32(b)?;
            match (op, signed) {
                (Bin::Shl, _) => lanes!(|a: x, b: y| int::shl_b64(a, b)),
                (_, false) => lanes!(|a: x, b: y| int::shr_u64(a, b)),
                (_, true) => lanes!(|a: x, b: y| int::shr_s64(a as i64, b) as u64),
            }
        } else {
            let y = self.r64(b)?;
            match (op, signed) {
                (Bin::Add, _) => lanes!(|a: x, b: y| a.wrapping_add(b)),
                (Bin::Sub, _) => lanes!(|a: x, b: y| a.wrapping_sub(b)),
                (Bin::Mul, _) => lanes!(|a: x, b: y| a.wrapping_mul(b)),
                (Bin::MulHi, false) => lanes!(|a: x, b: y| int::mul_hi_u64(a, b)),
                (Bin::MulHi, true) => lanes!(|a: x, b: y| int::mul_hi_s64(a as i64, b as i64) as u64),
                (Bin::Div, false) => lanes!(|a: x, b: y| int::div_u64(a, b)),
                (Bin::Div, true) => lanes!(|a: x, b: y| int::div_s64(a as i64, b as i64) as u64),
                (Bin::Rem, false) => lanes!(|a: x, b: y| int::rem_u64(a, b)),
                (Bin::Rem, true) => lanes!(|a: x, b: y| int::rem_s64(a as i64, b as i64) as u64),
                (Bin::Min, false) => lanes!(|a: x, b: y| a.min(b)),
                (Bin::Min, true) => lanes!(|a: x, b: y| (a as i64).min(b as i64) as u64),
                (Bin::Max, false) => lanes!(|a: x, b: y| a.max(b)),
                (Bin::Max, true) => lanes!(|a: x, b: y| (a as i64).max(b as i64) as u64),
                (Bin::And, _) => lanes!(|a: x, b: y| a & b),
                (Bin::Or, _) => lanes!(|a: x, b: y| a | b),
                (Bin::Xor, _) => lanes!(|a: x, b: y| a ^ b),
                (Bin::Shl | Bin::Shr, _) => unreachable!("handled above"),
            }
        };
        self.w64(dst, &out)
    }

    fn bin16(&mut self, op: Bin, dst: RegId, a: Operand, b: Operand) -> Step {
        let x = self.r16(a)?;
        let out: [u16; LANES] = if matches!(op, Bin::Shl | Bin::Shr) {
            let y = self.r32(b)?;
            match op {
                Bin::Shl => lanes!(|a: x, b: y| int::shl_b16(a, b)),
                _ => lanes!(|a: x, b: y| int::shr_u16(a, b)),
            }
        } else {
            let y = self.r16(b)?;
            match op {
                Bin::Add => lanes!(|a: x, b: y| a.wrapping_add(b)),
                Bin::Sub => lanes!(|a: x, b: y| a.wrapping_sub(b)),
                Bin::Mul => lanes!(|a: x, b: y| a.wrapping_mul(b)),
                Bin::MulHi => lanes!(|a: x, b: y| ((u32::from(a) * u32::from(b)) >> 16) as u16),
                Bin::Div => lanes!(|a: x, b: y| a.checked_div(b).unwrap_or(u16::MAX)),
                Bin::Rem => lanes!(|a: x, b: y| a.checked_rem(b).unwrap_or(u16::MAX)),
                Bin::Min => lanes!(|a: x, b: y| a.min(b)),
                Bin::Max => lanes!(|a: x, b: y| a.max(b)),
                Bin::And => lanes!(|a: x, b: y| a & b),
                Bin::Or => lanes!(|a: x, b: y| a | b),
                Bin::Xor => lanes!(|a: x, b: y| a ^ b),
                Bin::Shl | Bin::Shr => unreachable!("handled above"),
            }
        };
        self.w16(dst, &out)
    }

    fn bin_f32(&mut self, op: Bin, dst: RegId, a: Operand, b: Operand) -> Step {
        let (x, y) = (self.r32(a)?, self.r32(b)?);
        let out: [u32; LANES] = match op {
            Bin::Add => lanes!(|a: x, b: y| float::add(a, b)),
            Bin::Sub => lanes!(|a: x, b: y| float::sub(a, b)),
            Bin::Mul => lanes!(|a: x, b: y| float::mul(a, b)),
            Bin::Min => lanes!(|a: x, b: y| float::min(a, b)),
            Bin::Max => lanes!(|a: x, b: y| float::max(a, b)),
            Bin::Div => lanes!(|a: x, b: y| float::div(a, b)),
            Bin::And | Bin::Or | Bin::Xor | Bin::Shl | Bin::Shr | Bin::MulHi | Bin::Rem => {
                return self.bin_bits32(op, Ty::F32, dst, a, b);
            }
        };
        self.w32(dst, &out)
    }

    fn bin_u16x2(&mut self, op: Bin, dst: RegId, a: Operand, b: Operand) -> Step {
        let (x, y) = (self.r32(a)?, self.r32(b)?);
        let pair = |f: fn(u16, u16) -> u16, a: u32, b: u32| {
            u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
        };
        let out: [u32; LANES] = match op {
            Bin::Add => lanes!(|a: x, b: y| pair(u16::wrapping_add, a, b)),
            Bin::Min => lanes!(|a: x, b: y| int::min_u16x2(a, b)),
            Bin::Max => lanes!(|a: x, b: y| int::max_u16x2(a, b)),
            Bin::And | Bin::Or | Bin::Xor => return self.bin_bits32(op, Ty::U16x2, dst, a, b),
            Bin::Sub | Bin::Mul | Bin::MulHi | Bin::Div | Bin::Rem | Bin::Shl | Bin::Shr => {
                return Err(Stop::unsupported(format!("{op:?} on U16x2")));
            }
        };
        self.w32(dst, &out)
    }

    /// The operations that treat 32 bits as bits, whatever the type.
    fn bin_bits32(&mut self, op: Bin, ty: Ty, dst: RegId, a: Operand, b: Operand) -> Step {
        match op {
            Bin::And | Bin::Or | Bin::Xor => self.bin32(op, false, dst, a, b),
            Bin::Add
            | Bin::Sub
            | Bin::Mul
            | Bin::MulHi
            | Bin::Div
            | Bin::Rem
            | Bin::Min
            | Bin::Max
            | Bin::Shl
            | Bin::Shr => Err(Stop::unsupported(format!("{op:?} on {ty:?}"))),
        }
    }

    /// One-operand arithmetic.
    pub(super) fn un(&mut self, op: Un, ty: Ty, dst: RegId, a: Operand) -> Step {
        match ty {
            Ty::U64 | Ty::S64 => {
                let x = self.r64(a)?;
                match op {
                    Un::Popc => self.w32(dst, &lanes!(|a: x| int::popc_b64(a))),
                    Un::Clz => self.w32(dst, &lanes!(|a: x| int::clz_b64(a))),
                    Un::Not => self.w64(dst, &lanes!(|a: x| !a)),
                    Un::Neg => self.w64(dst, &lanes!(|a: x| a.wrapping_neg())),
                    Un::Abs => self.w64(dst, &lanes!(|a: x| (a as i64).wrapping_abs() as u64)),
                    Un::Brev => self.w64(dst, &lanes!(|a: x| int::brev_b64(a))),
                }
            }
            Ty::F32 => {
                let x = self.r32(a)?;
                let out = match op {
                    Un::Neg => lanes!(|a: x| float::neg(a)),
                    Un::Abs => lanes!(|a: x| float::abs(a)),
                    Un::Not => lanes!(|a: x| !a),
                    Un::Popc => lanes!(|a: x| int::popc_b32(a)),
                    Un::Clz => lanes!(|a: x| int::clz_b32(a)),
                    Un::Brev => lanes!(|a: x| int::brev_b32(a)),
                };
                self.w32(dst, &out)
            }
            Ty::U32 | Ty::S32 | Ty::Bf16x2 | Ty::F16x2 | Ty::U16x2 => {
                let x = self.r32(a)?;
                let out = match (op, ty) {
                    (Un::Not, _) => lanes!(|a: x| !a),
                    (Un::Popc, _) => lanes!(|a: x| int::popc_b32(a)),
                    (Un::Clz, _) => lanes!(|a: x| int::clz_b32(a)),
                    (Un::Brev, _) => lanes!(|a: x| int::brev_b32(a)),
                    (Un::Neg, Ty::Bf16x2) => lanes!(|a: x| crate::numeric::bf16::neg_x2(a)),
                    (Un::Abs, Ty::Bf16x2) => lanes!(|a: x| crate::numeric::bf16::abs_x2(a)),
                    (Un::Neg, Ty::U32 | Ty::S32) => lanes!(|a: x| a.wrapping_neg()),
                    (Un::Abs, Ty::U32 | Ty::S32) => lanes!(|a: x| (a as i32).wrapping_abs() as u32),
                    (Un::Neg | Un::Abs, _) => return Err(Stop::unsupported(format!("{op:?} on {ty:?}"))),
                };
                self.w32(dst, &out)
            }
            Ty::U16 | Ty::Bf16 => {
                let x = self.r16(a)?;
                let out = match (op, ty) {
                    (Un::Not, _) => lanes!(|a: x| !a),
                    (Un::Neg, Ty::Bf16) => lanes!(|a: x| crate::numeric::bf16::neg(a)),
                    (Un::Abs, Ty::Bf16) => lanes!(|a: x| crate::numeric::bf16::abs(a)),
                    (Un::Neg, _) => lanes!(|a: x| a.wrapping_neg()),
                    (Un::Abs, _) => lanes!(|a: x| (a as i16).wrapping_abs() as u16),
                    (Un::Popc | Un::Clz | Un::Brev, _) => {
                        return Err(Stop::unsupported(format!("{op:?} on {ty:?}")));
                    }
                };
                self.w16(dst, &out)
            }
            Ty::U8 => Err(Stop::unsupported(format!("{op:?} on {ty:?}"))),
        }
    }

    /// 32 x 32 to 64 bits.
    pub(super) fn mul_wide(&mut self, ty: Ty, dst: RegId, a: Operand, b: Operand) -> Step {
        let (x, y) = (self.r32(a)?, self.r32(b)?);
        self.w64(dst, &wide(ty, &x, &y))
    }

    /// 32 x 32 + 64 to 64 bits.
    pub(super) fn mad_wide(&mut self, ty: Ty, dst: RegId, a: Operand, b: Operand, c: Operand) -> Step {
        let (x, y, z) = (self.r32(a)?, self.r32(b)?, self.r64(c)?);
        let product = wide(ty, &x, &y);
        self.w64(dst, &lanes!(|p: product, c: z| p.wrapping_add(c)))
    }

    /// Integer `a * b + c`.
    pub(super) fn mad(&mut self, ty: Ty, dst: RegId, a: Operand, b: Operand, c: Operand) -> Step {
        match ty {
            Ty::U32 | Ty::S32 => {
                let (x, y, z) = (self.r32(a)?, self.r32(b)?, self.r32(c)?);
                self.w32(dst, &lanes!(|a: x, b: y, c: z| a.wrapping_mul(b).wrapping_add(c)))
            }
            Ty::U64 | Ty::S64 => {
                let (x, y, z) = (self.r64(a)?, self.r64(b)?, self.r64(c)?);
                self.w64(dst, &lanes!(|a: x, b: y, c: z| a.wrapping_mul(b).wrapping_add(c)))
            }
            Ty::U16 => {
                let (x, y, z) = (self.r16(a)?, self.r16(b)?, self.r16(c)?);
                self.w16(dst, &lanes!(|a: x, b: y, c: z| a.wrapping_mul(b).wrapping_add(c)))
            }
            Ty::U8 | Ty::F32 | Ty::Bf16 | Ty::Bf16x2 | Ty::F16x2 | Ty::U16x2 => {
                Err(Stop::unsupported(format!("Mad on {ty:?}")))
            }
        }
    }

    /// FP32 `a * b + c`.
    pub(super) fn fma(&mut self, dst: RegId, a: Operand, b: Operand, c: Operand) -> Step {
        let (x, y, z) = (self.r32(a)?, self.r32(b)?, self.r32(c)?);
        self.w32(dst, &lanes!(|a: x, b: y, c: z| float::fma(a, b, c)))
    }

    /// FP32 division.
    pub(super) fn div(&mut self, mode: DivMode, dst: RegId, a: Operand, b: Operand) -> Step {
        let (x, y) = (self.r32(a)?, self.r32(b)?);
        let out = match mode {
            DivMode::Rn => lanes!(|a: x, b: y| float::div(a, b)),
            DivMode::Full => lanes!(|a: x, b: y| approx::div_full(a, b)),
        };
        self.w32(dst, &out)
    }

    /// FP32 function.
    pub(super) fn math(&mut self, op: Math, dst: RegId, a: Operand) -> Step {
        let x = self.r32(a)?;
        let f = match op {
            Math::RcpApproxFtz => approx::rcp_ftz,
            Math::RsqrtApprox => approx::rsqrt,
            Math::RsqrtApproxFtz => approx::rsqrt_ftz,
            Math::Ex2ApproxFtz => approx::ex2_ftz,
            Math::SqrtRn => float::sqrt,
        };
        self.w32(dst, &lanes!(|a: x| f(a)))
    }

    /// Comparison.
    #[inline(always)]
    pub(super) fn setp(&mut self, cmp: Cmp, ty: Ty, dst: RegId, a: Operand, b: Operand) -> Step {
        macro_rules! compare {
            ($x:expr, $y:expr, |$v:ident| $view:expr) => {{
                let (x, y) = ($x, $y);
                match cmp {
                    Cmp::Eq => bits!(|a: x, b: y| {
                        let ($v, b) = ((a), b);
                        let l = $view;
                        let $v = b;
                        l == $view
                    }),
                    Cmp::Ne => bits!(|a: x, b: y| {
                        let ($v, b) = ((a), b);
                        let l = $view;
                        let $v = b;
                        l != $view
                    }),
                    Cmp::Lt => bits!(|a: x, b: y| {
                        let ($v, b) = ((a), b);
                        let l = $view;
                        let $v = b;
                        l < $view
                    }),
                    Cmp::Le => bits!(|a: x, b: y| {
                        let ($v, b) = ((a), b);
                        let l = $view;
                        let $v = b;
                        l <= $view
                    }),
                    Cmp::Gt => bits!(|a: x, b: y| {
                        let ($v, b) = ((a), b);
                        let l = $view;
                        let $v = b;
                        l > $view
                    }),
                    Cmp::Ge => bits!(|a: x, b: y| {
                        let ($v, b) = ((a), b);
                        let l = $view;
                        let $v = b;
                        l >= $view
                    }),
                }
            }};
        }
        let out = match ty {
            Ty::U32 => compare!(self.r32(a)?, self.r32(b)?, |v| v),
            Ty::S32 => compare!(self.r32(a)?, self.r32(b)?, |v| v as i32),
            Ty::U64 => compare!(self.r64(a)?, self.r64(b)?, |v| v),
            Ty::S64 => compare!(self.r64(a)?, self.r64(b)?, |v| v as i64),
            Ty::U16 => compare!(self.r16(a)?, self.r16(b)?, |v| v),
            Ty::F32 => {
                let (x, y) = (self.r32(a)?, self.r32(b)?);
                if cmp == Cmp::Ne {
                    // Ordered: false if either is NaN.
                    bits!(|a: x, b: y| {
                        let (a, b) = (f32::from_bits(a), f32::from_bits(b));
                        a.partial_cmp(&b).is_some_and(std::cmp::Ordering::is_ne)
                    })
                } else {
                    compare!(x, y, |v| f32::from_bits(v))
                }
            }
            Ty::U8 | Ty::Bf16 | Ty::Bf16x2 | Ty::F16x2 | Ty::U16x2 => {
                return Err(Stop::unsupported(format!("Setp on {ty:?}")));
            }
        };
        self.w_pred(dst, out)
    }

    /// The rest of the family: moves, constants, bit operations, selection.
    pub(super) fn alu(&mut self, op: &Op) -> Step {
        match *op {
            Op::Mov { dst, src } => match dst.class {
                ptx::Class::B16 => {
                    let v = self.r16(src)?;
                    self.w16(dst, &v)
                }
                ptx::Class::B32 => {
                    let v = self.r32(src)?;
                    self.w32(dst, &v)
                }
                ptx::Class::B64 => {
                    let v = self.r64(src)?;
                    self.w64(dst, &v)
                }
                ptx::Class::Pred => {
                    let v = match src {
                        Operand::Reg(p) => self.r_pred(p)?,
                        Operand::Imm(v) => {
                            if v != 0 {
                                u32::MAX
                            } else {
                                0
                            }
                        }
                    };
                    self.w_pred(dst, v)
                }
            },
            Op::Pack { dst, lo, hi } => {
                if dst.class == ptx::Class::B64 {
                    let (x, y) = (self.r32(lo)?, self.r32(hi)?);
                    self.w64(dst, &lanes!(|a: x, b: y| u64::from(a) | u64::from(b) << 32))
                } else {
                    let (x, y) = (self.r16(lo)?, self.r16(hi)?);
                    self.w32(dst, &lanes!(|a: x, b: y| u32::from(a) | u32::from(b) << 16))
                }
            }
            Op::Unpack { lo, hi, src } => {
                if lo.class == ptx::Class::B32 {
                    let x = self.r64(src)?;
                    self.w32(lo, &lanes!(|a: x| a as u32))?;
                    self.w32(hi, &lanes!(|a: x| (a >> 32) as u32))
                } else {
                    let x = self.r32(src)?;
                    self.w16(lo, &lanes!(|a: x| a as u16))?;
                    self.w16(hi, &lanes!(|a: x| (a >> 16) as u16))
                }
            }
            Op::Prmt { dst, a, b, selector } => {
                let (x, y, s) = (self.r32(a)?, self.r32(b)?, self.r32(selector)?);
                self.w32(dst, &lanes!(|a: x, b: y, s: s| int::prmt(a, b, s)))
            }
            Op::Lop3 { dst, a, b, c, table } => {
                let (x, y, z) = (self.r32(a)?, self.r32(b)?, self.r32(c)?);
                self.w32(dst, &lanes!(|a: x, b: y, c: z| int::lop3(a, b, c, table)))
            }
            Op::Bfe { dst, a, pos, len } => {
                let (x, y, z) = (self.r32(a)?, self.r32(pos)?, self.r32(len)?);
                self.w32(dst, &lanes!(|a: x, p: y, l: z| int::bfe_u32(a, p, l)))
            }
            Op::ShfL { dst, lo, hi, n, wrap } => {
                let (x, y, z) = (self.r32(lo)?, self.r32(hi)?, self.r32(n)?);
                let mode = funnel(wrap);
                self.w32(dst, &lanes!(|l: x, h: y, n: z| int::shf_l(l, h, n, mode)))
            }
            Op::ShfR { dst, lo, hi, n, wrap } => {
                let (x, y, z) = (self.r32(lo)?, self.r32(hi)?, self.r32(n)?);
                let mode = funnel(wrap);
                self.w32(dst, &lanes!(|l: x, h: y, n: z| int::shf_r(l, h, n, mode)))
            }
            Op::Selp { ty, dst, a, b, p } => {
                let p = self.r_pred(p)?;
                match ty.class() {
                    ptx::Class::B64 => {
                        let (x, y) = (self.r64(a)?, self.r64(b)?);
                        self.w64(dst, &std::array::from_fn(|i| if p >> i & 1 == 1 { x[i] } else { y[i] }))
                    }
                    ptx::Class::B32 => {
                        let (x, y) = (self.r32(a)?, self.r32(b)?);
                        self.w32(dst, &std::array::from_fn(|i| if p >> i & 1 == 1 { x[i] } else { y[i] }))
                    }
                    ptx::Class::B16 | ptx::Class::Pred => {
                        let (x, y) = (self.r16(a)?, self.r16(b)?);
                        self.w16(dst, &std::array::from_fn(|i| if p >> i & 1 == 1 { x[i] } else { y[i] }))
                    }
                }
            }
            Op::PredLogic { op, dst, a, b } => {
                let (x, y) = (self.r_pred(a)?, self.r_pred(b)?);
                self.w_pred(
                    dst,
                    match op {
                        Logic::And => x & y,
                        Logic::Or => x | y,
                        Logic::Xor => x ^ y,
                    },
                )
            }
            Op::PredNot { dst, a } => {
                let x = self.r_pred(a)?;
                self.w_pred(dst, !x)
            }
            Op::PredConst { dst, value } => self.w_pred(dst, if value { u32::MAX } else { 0 }),
            _ => unreachable!("`step` sends only this family here"),
        }
    }
}

fn funnel(wrap: bool) -> int::FunnelShift {
    if wrap { int::FunnelShift::Wrap } else { int::FunnelShift::Clamp }
}

#[inline(always)]
fn wide(ty: Ty, x: &[u32; LANES], y: &[u32; LANES]) -> [u64; LANES] {
    if ty == Ty::S32 {
        lanes!(|a: x, b: y| (i64::from(a as i32) * i64::from(b as i32)) as u64)
    } else {
        lanes!(|a: x, b: y| u64::from(a) * u64::from(b))
    }
}

//! Which registers an instruction reads and writes, and of which class each must be.

use crate::op::{Address, Cvt, CvtPack, MmaInput, Op, Operand, RegId, ScaleD, Un, WgmmaA};
use crate::ty::{Class, Ty};

/// How an instruction uses a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Written.
    Def,
    /// Read.
    Use,
    /// Read and written (accumulators).
    DefUse,
}

impl MmaInput {
    /// Elements along K that one instruction consumes.
    pub fn k(self) -> u32 {
        match self {
            MmaInput::E4m3 => 32,
            MmaInput::Bf16 => 16,
        }
    }
}

impl Cvt {
    /// (destination, source) classes.
    pub fn classes(self) -> (Class, Class) {
        match self {
            Cvt::U32ToU64 | Cvt::S32ToS64 => (Class::B64, Class::B32),
            Cvt::U64ToU32 => (Class::B32, Class::B64),
            Cvt::U16ToU32 | Cvt::Bf16ToF32 | Cvt::E4m3x2ToF16x2 => (Class::B32, Class::B16),
            Cvt::U32ToU16 | Cvt::F32ToBf16 | Cvt::F16x2ToE4m3x2 => (Class::B16, Class::B32),
            Cvt::U32ToF32 | Cvt::S32ToF32 | Cvt::F32ToU32Rz | Cvt::F32ToS32Rz => (Class::B32, Class::B32),
        }
    }
}

impl CvtPack {
    /// Destination class.
    pub fn class(self) -> Class {
        match self {
            CvtPack::Bf16x2 | CvtPack::Bf16x2Relu | CvtPack::F16x2 => Class::B32,
            CvtPack::E4m3x2 => Class::B16,
        }
    }
}

/// Register class that holds one element of a load or store: sub-word elements live in 32-bit registers.
pub fn memory_class(ty: Ty) -> Class {
    match ty {
        Ty::U8 | Ty::U16 | Ty::Bf16 => Class::B32,
        _ => ty.class(),
    }
}

impl Op {
    /// Calls `f(role, class, operand)` for every register operand and constant, destinations first.
    ///
    /// `class` is what the instruction requires there; the verifier compares it with the operand's own.
    pub fn slots(&self, mut f: impl FnMut(Role, Class, Operand)) {
        use Class::{B16, B32, B64, Pred};
        use Role::{Def, DefUse, Use};
        let r = Operand::Reg;
        macro_rules! def {
            ($class:expr, $reg:expr) => {
                f(Def, $class, r($reg))
            };
        }
        macro_rules! uses {
            ($class:expr, $($operand:expr),+) => {{ $( f(Use, $class, $operand); )+ }};
        }
        let space_class = |s: crate::op::Space| match s {
            crate::op::Space::Global => B64,
            crate::op::Space::Shared | crate::op::Space::Cluster => B32,
        };
        let at = |a: &Address| a.base;
        match self {
            Op::Mov { dst, src } => {
                def!(dst.class, *dst);
                uses!(dst.class, *src);
            }
            Op::Special { dst, reg } => def!(reg.class(), *dst),
            Op::LdParam { dst, .. } => def!(dst.class, *dst),
            Op::ParamAddress { dst, .. } => def!(B64, *dst),
            Op::SharedBase { dst } => def!(B32, *dst),
            Op::Pack { dst, lo, hi } => {
                def!(dst.class, *dst);
                let half = if dst.class == B64 { B32 } else { B16 };
                uses!(half, *lo, *hi);
            }
            Op::Unpack { lo, hi, src } => {
                def!(lo.class, *lo);
                def!(lo.class, *hi);
                uses!(if lo.class == B32 { B64 } else { B32 }, *src);
            }
            Op::Bin { op, ty, dst, a, b } => {
                def!(ty.class(), *dst);
                uses!(ty.class(), *a);
                let shift = matches!(op, crate::op::Bin::Shl | crate::op::Bin::Shr);
                uses!(if shift { B32 } else { ty.class() }, *b);
            }
            Op::Un { op, ty, dst, a } => {
                let out = if matches!(op, Un::Popc | Un::Clz) { B32 } else { ty.class() };
                def!(out, *dst);
                uses!(ty.class(), *a);
            }
            Op::MulWide { ty, dst, a, b } => {
                def!(B64, *dst);
                uses!(ty.class(), *a, *b);
            }
            Op::Mad { ty, dst, a, b, c } => {
                def!(ty.class(), *dst);
                uses!(ty.class(), *a, *b, *c);
            }
            Op::MadWide { ty, dst, a, b, c } => {
                def!(B64, *dst);
                uses!(ty.class(), *a, *b);
                uses!(B64, *c);
            }
            Op::Fma { dst, a, b, c } => {
                def!(B32, *dst);
                uses!(B32, *a, *b, *c);
            }
            Op::Div { dst, a, b, .. } => {
                def!(B32, *dst);
                uses!(B32, *a, *b);
            }
            Op::Math { dst, a, .. } => {
                def!(B32, *dst);
                uses!(B32, *a);
            }
            Op::Prmt { dst, a, b, selector } => {
                def!(B32, *dst);
                uses!(B32, *a, *b, *selector);
            }
            Op::Lop3 { dst, a, b, c, .. } => {
                def!(B32, *dst);
                uses!(B32, *a, *b, *c);
            }
            Op::Bfe { dst, a, pos, len } => {
                def!(B32, *dst);
                uses!(B32, *a, *pos, *len);
            }
            Op::ShfL { dst, lo, hi, n, .. } | Op::ShfR { dst, lo, hi, n, .. } => {
                def!(B32, *dst);
                uses!(B32, *lo, *hi, *n);
            }
            Op::Selp { ty, dst, a, b, p } => {
                def!(ty.class(), *dst);
                uses!(ty.class(), *a, *b);
                uses!(Pred, r(*p));
            }
            Op::Setp { ty, dst, a, b, .. } => {
                def!(Pred, *dst);
                uses!(ty.class(), *a, *b);
            }
            Op::PredLogic { dst, a, b, .. } => {
                def!(Pred, *dst);
                uses!(Pred, r(*a), r(*b));
            }
            Op::PredNot { dst, a } => {
                def!(Pred, *dst);
                uses!(Pred, r(*a));
            }
            Op::PredConst { dst, .. } => def!(Pred, *dst),
            Op::Cvt { op, dst, a } => {
                let (d, s) = op.classes();
                def!(d, *dst);
                uses!(s, *a);
            }
            Op::CvtPack { op, dst, hi, lo } => {
                def!(op.class(), *dst);
                uses!(B32, *hi, *lo);
            }
            Op::Bf16Bin { dst, a, b, .. } | Op::F16x2Mul { dst, a, b } => {
                def!(B32, *dst);
                uses!(B32, *a, *b);
            }
            Op::Bf16Fma { dst, a, b, c, .. } => {
                def!(B32, *dst);
                uses!(B32, *a, *b, *c);
            }
            Op::Label { .. } | Op::NoUnroll | Op::Exit | Op::Trap => {}
            Op::Bra { cond, .. } => {
                if let Some((p, _)) = cond {
                    uses!(Pred, r(*p));
                }
            }
            Op::Ld { space, ty, cache, dsts, addr, .. } => {
                for d in dsts {
                    def!(memory_class(*ty), *d);
                }
                uses!(space_class(*space), at(addr));
                if let Some(p) = cache.policy {
                    uses!(B64, r(p));
                }
            }
            Op::St { space, ty, policy, srcs, addr, .. } => {
                uses!(space_class(*space), at(addr));
                for s in srcs {
                    uses!(memory_class(*ty), *s);
                }
                if let Some(p) = policy {
                    uses!(B64, r(*p));
                }
            }
            Op::Atom { space, ty, dst, addr, a, b, .. } => {
                if let Some(d) = dst {
                    def!(ty.class(), *d);
                }
                uses!(space_class(*space), at(addr));
                uses!(ty.class(), *a);
                if let Some(b) = b {
                    uses!(ty.class(), *b);
                }
            }
            Op::MultimemSt { ty, srcs, addr } => {
                uses!(B64, at(addr));
                for s in srcs {
                    uses!(memory_class(*ty), r(*s));
                }
            }
            Op::Fence { .. } | Op::FenceSc { .. } | Op::FenceProxyAsync | Op::FenceMbarrierInit => {}
            Op::CreatePolicy { dst, .. } => def!(B64, *dst),
            Op::PrefetchL2 { addr, bytes } => {
                uses!(B64, at(addr));
                uses!(B32, *bytes);
            }
            Op::Shfl { dst, src, lane, .. } => {
                def!(B32, *dst);
                uses!(B32, *src, *lane);
            }
            Op::Vote { dst, p, .. } => {
                def!(Pred, *dst);
                uses!(Pred, r(*p));
            }
            Op::Ballot { dst, p, .. } => {
                def!(B32, *dst);
                uses!(Pred, r(*p));
            }
            Op::Redux { dst, src, .. } | Op::MatchAny { dst, src, .. } => {
                def!(B32, *dst);
                uses!(B32, *src);
            }
            Op::ActiveMask { dst } => def!(B32, *dst),
            Op::Elect { dst } => def!(Pred, *dst),
            Op::BarWarp { .. } => {}
            Op::BarSync { id, .. } | Op::BarArrive { id, .. } => uses!(B32, *id),
            Op::Mapa { dst, addr, rank } => {
                def!(B32, *dst);
                uses!(B32, r(*addr), *rank);
            }
            Op::StAsync { ty, srcs, addr, mbar } => {
                uses!(B32, at(addr), at(mbar));
                for s in srcs {
                    uses!(memory_class(*ty), *s);
                }
            }
            Op::ClusterArrive { .. } | Op::ClusterWait => {}
            Op::MbarInit { addr, .. } | Op::MbarInval { addr } | Op::MbarArrive { addr, .. } => uses!(B32, at(addr)),
            Op::MbarArriveExpectTx { addr, bytes } | Op::MbarExpectTx { addr, bytes } => uses!(B32, at(addr), *bytes),
            Op::MbarTryWait { dst, addr, parity, .. } | Op::MbarTestWait { dst, addr, parity } => {
                def!(Pred, *dst);
                uses!(B32, at(addr), *parity);
            }
            Op::TensorG2s { dst, map, coords, mbar, policy } => {
                uses!(B32, at(dst), at(mbar));
                uses!(B64, r(*map));
                for c in coords {
                    uses!(B32, *c);
                }
                if let Some(p) = policy {
                    uses!(B64, r(*p));
                }
            }
            Op::BulkG2s { dst, src, bytes, mbar, policy } => {
                uses!(B32, at(dst), at(mbar), *bytes);
                uses!(B64, at(src));
                if let Some(p) = policy {
                    uses!(B64, r(*p));
                }
            }
            Op::BulkS2g { dst, src, bytes } => {
                uses!(B64, at(dst));
                uses!(B32, at(src), *bytes);
            }
            Op::CpAsync { dst, src, policy } => {
                uses!(B32, at(dst));
                uses!(B64, at(src));
                if let Some(p) = policy {
                    uses!(B64, r(*p));
                }
            }
            Op::CpAsyncCommit | Op::CpAsyncWait { .. } => {}
            Op::BulkCommit | Op::BulkWait { .. } => {}
            Op::PrefetchTensormap { map } => uses!(B64, r(*map)),
            Op::LdMatrix { dsts, addr, .. } => {
                for d in dsts {
                    def!(B32, *d);
                }
                uses!(B32, at(addr));
            }
            Op::MmaBf16 { acc, a, b } => {
                for d in acc {
                    f(DefUse, B32, r(*d));
                }
                for x in a.iter().chain(b) {
                    uses!(B32, r(*x));
                }
            }
            Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait { .. } => {}
            Op::Wgmma { acc, a, b, scale_d, .. } => {
                // With a constant `scale_d` of false the old accumulator is not read.
                let role = if *scale_d == ScaleD::Const(false) { Def } else { DefUse };
                for d in acc {
                    f(role, B32, r(*d));
                }
                match a {
                    WgmmaA::Descriptor(d) => uses!(B64, *d),
                    WgmmaA::Regs(regs) => {
                        for x in regs {
                            uses!(B32, r(*x));
                        }
                    }
                }
                uses!(B64, *b);
                if let ScaleD::Pred(p) = scale_d {
                    uses!(Pred, r(*p));
                }
            }
            Op::GridDepWait | Op::GridDepLaunch | Op::SetMaxNReg { .. } => {}
            Op::Nanosleep { ns } => uses!(B32, *ns),
        }
    }
}

impl Operand {
    /// The register, if it is one.
    pub fn reg(self) -> Option<RegId> {
        match self {
            Operand::Reg(r) => Some(r),
            Operand::Imm(_) => None,
        }
    }
}

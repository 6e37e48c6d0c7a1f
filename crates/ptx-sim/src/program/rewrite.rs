//! Maps the registers and labels of an instruction.

use ptx::op::{Address, Cache, LabelId, Op, Operand, RegId, ScaleD, WgmmaA};

/// `op` with every register and label replaced.
pub(super) fn rewrite(op: &Op, map: impl Fn(RegId) -> RegId, label: impl Fn(LabelId) -> LabelId) -> Op {
    let r = |reg: &RegId| map(*reg);
    let o = |operand: &Operand| match operand {
        Operand::Reg(reg) => Operand::Reg(map(*reg)),
        Operand::Imm(v) => Operand::Imm(*v),
    };
    let at = |a: &Address| Address { base: o(&a.base), offset: a.offset };
    let mut op = op.clone();
    macro_rules! regs { ($($x:expr),*) => {{ $( *$x = r($x); )* }}; }
    macro_rules! operands { ($($x:expr),*) => {{ $( *$x = o($x); )* }}; }
    match &mut op {
        Op::Mov { dst, src } => {
            regs!(dst);
            operands!(src);
        }
        Op::Special { dst, .. }
        | Op::LdParam { dst, .. }
        | Op::ParamAddress { dst, .. }
        | Op::SharedBase { dst }
        | Op::PredConst { dst, .. }
        | Op::CreatePolicy { dst, .. }
        | Op::ActiveMask { dst }
        | Op::Elect { dst } => regs!(dst),
        Op::Pack { dst, lo, hi } => {
            regs!(dst);
            operands!(lo, hi);
        }
        Op::Unpack { lo, hi, src } => {
            regs!(lo, hi);
            operands!(src);
        }
        Op::Bin { dst, a, b, .. }
        | Op::MulWide { dst, a, b, .. }
        | Op::Div { dst, a, b, .. }
        | Op::Setp { dst, a, b, .. }
        | Op::Bf16Bin { dst, a, b, .. }
        | Op::F16x2Mul { dst, a, b } => {
            regs!(dst);
            operands!(a, b);
        }
        Op::CvtPack { dst, hi, lo, .. } => {
            regs!(dst);
            operands!(hi, lo);
        }
        Op::Un { dst, a, .. } | Op::Math { dst, a, .. } | Op::Cvt { dst, a, .. } => {
            regs!(dst);
            operands!(a);
        }
        Op::Mad { dst, a, b, c, .. }
        | Op::MadWide { dst, a, b, c, .. }
        | Op::Fma { dst, a, b, c }
        | Op::Lop3 { dst, a, b, c, .. }
        | Op::Bf16Fma { dst, a, b, c, .. } => {
            regs!(dst);
            operands!(a, b, c);
        }
        Op::Prmt { dst, a, b, selector } => {
            regs!(dst);
            operands!(a, b, selector);
        }
        Op::Bfe { dst, a, pos, len } => {
            regs!(dst);
            operands!(a, pos, len);
        }
        Op::ShfL { dst, lo, hi, n, .. } | Op::ShfR { dst, lo, hi, n, .. } => {
            regs!(dst);
            operands!(lo, hi, n);
        }
        Op::Selp { dst, a, b, p, .. } => {
            regs!(dst, p);
            operands!(a, b);
        }
        Op::PredLogic { dst, a, b, .. } => regs!(dst, a, b),
        Op::PredNot { dst, a } => regs!(dst, a),
        Op::Label { label: l } => *l = label(*l),
        Op::NoUnroll | Op::Exit | Op::Trap => {}
        Op::Bra { target, cond } => {
            *target = label(*target);
            if let Some((p, _)) = cond {
                regs!(p);
            }
        }
        Op::Ld { cache, dsts, addr, .. } => {
            *cache = Cache { policy: cache.policy.as_ref().map(r), ..*cache };
            dsts.iter_mut().for_each(|d| *d = r(d));
            *addr = at(addr);
        }
        Op::St { policy, srcs, addr, .. } => {
            *policy = policy.as_ref().map(r);
            srcs.iter_mut().for_each(|s| *s = o(s));
            *addr = at(addr);
        }
        Op::Atom { dst, addr, a, b, .. } => {
            *dst = dst.as_ref().map(r);
            *addr = at(addr);
            operands!(a);
            *b = b.as_ref().map(o);
        }
        Op::MultimemSt { srcs, addr, .. } => {
            srcs.iter_mut().for_each(|s| *s = r(s));
            *addr = at(addr);
        }
        Op::Fence { .. } | Op::FenceSc { .. } | Op::FenceProxyAsync | Op::FenceMbarrierInit => {}
        Op::PrefetchL2 { addr, bytes } => {
            *addr = at(addr);
            operands!(bytes);
        }
        Op::Shfl { dst, src, lane, .. } => {
            regs!(dst);
            operands!(src, lane);
        }
        Op::Vote { dst, p, .. } | Op::Ballot { dst, p, .. } => regs!(dst, p),
        Op::Redux { dst, src, .. } | Op::MatchAny { dst, src, .. } => {
            regs!(dst);
            operands!(src);
        }
        Op::BarWarp { .. } => {}
        Op::BarSync { id, .. } | Op::BarArrive { id, .. } => operands!(id),
        Op::Mapa { dst, addr, rank } => {
            regs!(dst, addr);
            operands!(rank);
        }
        Op::StAsync { srcs, addr, mbar, .. } => {
            srcs.iter_mut().for_each(|s| *s = o(s));
            *addr = at(addr);
            *mbar = at(mbar);
        }
        Op::ClusterArrive { .. } | Op::ClusterWait => {}
        Op::MbarInit { addr, .. } | Op::MbarInval { addr } | Op::MbarArrive { addr, .. } => *addr = at(addr),
        Op::MbarArriveExpectTx { addr, bytes } | Op::MbarExpectTx { addr, bytes } => {
            *addr = at(addr);
            operands!(bytes);
        }
        Op::MbarTryWait { dst, addr, parity, .. } | Op::MbarTestWait { dst, addr, parity } => {
            regs!(dst);
            *addr = at(addr);
            operands!(parity);
        }
        Op::TensorG2s { dst, map: tensor_map, coords, mbar, policy } => {
            *dst = at(dst);
            regs!(tensor_map);
            coords.iter_mut().for_each(|c| *c = o(c));
            *mbar = at(mbar);
            *policy = policy.as_ref().map(r);
        }
        Op::BulkG2s { dst, src, bytes, mbar, policy } => {
            *dst = at(dst);
            *src = at(src);
            operands!(bytes);
            *mbar = at(mbar);
            *policy = policy.as_ref().map(r);
        }
        Op::BulkS2g { dst, src, bytes } => {
            *dst = at(dst);
            *src = at(src);
            operands!(bytes);
        }
        Op::CpAsync { dst, src, policy } => {
            *dst = at(dst);
            *src = at(src);
            *policy = policy.as_ref().map(r);
        }
        Op::CpAsyncCommit | Op::CpAsyncWait { .. } => {}
        Op::BulkCommit | Op::BulkWait { .. } => {}
        Op::PrefetchTensormap { map: tensor_map } => regs!(tensor_map),
        Op::LdMatrix { dsts, addr, .. } => {
            dsts.iter_mut().for_each(|d| *d = r(d));
            *addr = at(addr);
        }
        Op::MmaBf16 { acc, a, b } => {
            acc.iter_mut().chain(a).chain(b).for_each(|x| *x = r(x));
        }
        Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait { .. } => {}
        Op::Wgmma { acc, a, b, scale_d, .. } => {
            acc.iter_mut().for_each(|x| *x = r(x));
            match a {
                WgmmaA::Descriptor(d) => operands!(d),
                WgmmaA::Regs(fragment) => fragment.iter_mut().for_each(|x| *x = r(x)),
            }
            operands!(b);
            if let ScaleD::Pred(p) = scale_d {
                regs!(p);
            }
        }
        Op::GridDepWait | Op::GridDepLaunch | Op::SetMaxNReg { .. } => {}
        Op::Nanosleep { ns } => operands!(ns),
    }
    op
}

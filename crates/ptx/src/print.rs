//! The PTX text of a kernel.

use std::collections::HashMap;
use std::fmt::Write;

use crate::args::ParamKind;
use crate::kernel::KernelIr;
use crate::op::*;
use crate::ty::{Class, Ty};

/// Name of the dynamic shared memory symbol.
const SHARED_SYMBOL: &str = "smem";

/// Prints `ir`. Line information (`.file`, `.loc`) names the Rust source that emitted each instruction.
pub fn print(ir: &KernelIr) -> String {
    let mut p = Printer { ir, out: String::with_capacity(ir.insts.len() * 48), files: HashMap::new() };
    p.header();
    p.body();
    p.out
}

struct Printer<'a> {
    ir: &'a KernelIr,
    out: String,
    files: HashMap<&'static str, usize>,
}

macro_rules! line {
    ($p:expr, $($fmt:tt)*) => { writeln!($p.out, $($fmt)*).expect("writing to a String cannot fail") };
}

impl Printer<'_> {
    fn header(&mut self) {
        let ir = self.ir;
        line!(self, ".version {}\n.target {}\n.address_size 64", ir.target.ptx_version(), ir.target);
        for inst in &ir.insts {
            let next = self.files.len() + 1;
            let file = inst.loc.file();
            if !self.files.contains_key(file) {
                self.files.insert(file, next);
                line!(self, ".file {next} \"{}\"", file.replace('\\', "/"));
            }
        }
        if ir.shared_bytes > 0 {
            line!(self, ".extern .shared .align 1024 .b8 {SHARED_SYMBOL}[];");
        }
        let params: Vec<String> = ir
            .params
            .iter()
            .enumerate()
            .map(|(i, p)| match p.kind {
                ParamKind::B32 => format!(".param .b32 {}", param_name(i, p.name)),
                ParamKind::B64 => format!(".param .b64 {}", param_name(i, p.name)),
                ParamKind::TensorMap => format!(".param .align 64 .b8 {}[128]", param_name(i, p.name)),
            })
            .collect();
        line!(self, ".visible .entry {}(\n    {}\n)", ir.name, params.join(",\n    "));
        let b = ir.bounds;
        let max = b.max_registers.map_or(String::new(), |n| format!(" .maxnreg {n}"));
        // `.maxnreg` and `.minnctapersm` exclude each other in effect; the explicit cap wins.
        let min = if b.max_registers.is_some() { String::new() } else { format!(" .minnctapersm {}", b.min_ctas) };
        let cluster = b.cluster.map_or(String::new(), |n| format!(" .reqnctapercluster {n}, 1, 1"));
        line!(self, ".reqntid {}, 1, 1{min}{max}{cluster}", b.threads);
    }

    fn body(&mut self) {
        line!(self, "{{");
        for class in Class::ALL {
            let n = self.ir.register_count(class);
            if n > 0 {
                let (ty, prefix) = class.spelling();
                line!(self, "    .reg .{ty} %{prefix}<{n}>;");
            }
        }
        let mut last = None;
        for inst in &self.ir.insts {
            let here = (inst.loc.file(), inst.loc.line(), inst.loc.column());
            let marker = matches!(inst.op, Op::Label { .. } | Op::NoUnroll);
            if !marker && last != Some(here) {
                line!(self, "    .loc {} {} {}", self.files[here.0], here.1, here.2);
                last = Some(here);
            }
            self.inst(&inst.op);
        }
        line!(self, "}}");
    }

    fn inst(&mut self, op: &Op) {
        match op {
            Op::Mov { dst, src } => line!(self, "    mov.{} {}, {};", bits(dst.class), r(*dst), raw(*src)),
            Op::Special { dst, reg } => {
                let ty = if reg.class() == Class::B64 { "u64" } else { "u32" };
                line!(self, "    mov.{ty} {}, {};", r(*dst), special(*reg));
            }
            Op::LdParam { dst, param } => {
                let name = param_name(*param as usize, self.ir.params[*param as usize].name);
                line!(self, "    ld.param.{} {}, [{name}];", bits(dst.class), r(*dst));
            }
            Op::ParamAddress { dst, param } => {
                let name = param_name(*param as usize, self.ir.params[*param as usize].name);
                line!(self, "    mov.b64 {0}, {name};\n    cvta.param.u64 {0}, {0};", r(*dst));
            }
            Op::SharedBase { dst } => line!(self, "    mov.u32 {}, {SHARED_SYMBOL};", r(*dst)),
            Op::Pack { dst, lo, hi } => {
                line!(self, "    mov.{} {}, {{{}, {}}};", bits(dst.class), r(*dst), raw(*lo), raw(*hi));
            }
            Op::Unpack { lo, hi, src } => {
                let ty = if lo.class == Class::B32 { "b64" } else { "b32" };
                line!(self, "    mov.{ty} {{{}, {}}}, {};", r(*lo), r(*hi), raw(*src));
            }
            Op::Bin { op, ty, dst, a, b } => self.bin(*op, *ty, *dst, *a, *b),
            Op::Un { op, ty, dst, a } => {
                let spelled = match op {
                    Un::Not => format!("not.{}", ty.ptx_bits()),
                    Un::Neg => format!("neg.{}", ty.ptx()),
                    Un::Abs => format!("abs.{}", ty.ptx()),
                    Un::Popc => format!("popc.{}", ty.ptx_bits()),
                    Un::Clz => format!("clz.{}", ty.ptx_bits()),
                    Un::Brev => format!("brev.{}", ty.ptx_bits()),
                };
                line!(self, "    {spelled} {}, {};", r(*dst), v(*a, *ty));
            }
            Op::MulWide { ty, dst, a, b } => {
                line!(self, "    mul.wide.{} {}, {}, {};", ty.ptx(), r(*dst), v(*a, *ty), v(*b, *ty));
            }
            Op::Mad { ty, dst, a, b, c } => {
                let (a, b, c) = (v(*a, *ty), v(*b, *ty), v(*c, *ty));
                line!(self, "    mad.lo.{} {}, {a}, {b}, {c};", ty.ptx(), r(*dst));
            }
            Op::MadWide { ty, dst, a, b, c } => {
                let wide = if *ty == Ty::S32 { Ty::S64 } else { Ty::U64 };
                let (a, b, c) = (v(*a, *ty), v(*b, *ty), v(*c, wide));
                line!(self, "    mad.wide.{} {}, {a}, {b}, {c};", ty.ptx(), r(*dst));
            }
            Op::Fma { dst, a, b, c } => {
                line!(self, "    fma.rn.f32 {}, {}, {}, {};", r(*dst), f(*a), f(*b), f(*c));
            }
            Op::Div { mode, dst, a, b } => {
                let mode = match mode {
                    DivMode::Rn => "rn",
                    DivMode::Full => "full",
                };
                line!(self, "    div.{mode}.f32 {}, {}, {};", r(*dst), f(*a), f(*b));
            }
            Op::Math { op, dst, a } => {
                let name = match op {
                    Math::RcpApproxFtz => "rcp.approx.ftz",
                    Math::RsqrtApprox => "rsqrt.approx",
                    Math::RsqrtApproxFtz => "rsqrt.approx.ftz",
                    Math::Ex2ApproxFtz => "ex2.approx.ftz",
                    Math::SqrtRn => "sqrt.rn",
                };
                line!(self, "    {name}.f32 {}, {};", r(*dst), f(*a));
            }
            Op::Prmt { dst, a, b, selector } => {
                line!(self, "    prmt.b32 {}, {}, {}, {};", r(*dst), raw(*a), raw(*b), raw(*selector));
            }
            Op::Lop3 { dst, a, b, c, table } => {
                line!(self, "    lop3.b32 {}, {}, {}, {}, {table:#x};", r(*dst), raw(*a), raw(*b), raw(*c));
            }
            Op::Bfe { dst, a, pos, len } => {
                line!(self, "    bfe.u32 {}, {}, {}, {};", r(*dst), raw(*a), raw(*pos), raw(*len));
            }
            Op::ShfL { dst, lo, hi, n, wrap } => self.funnel("l", *dst, [*lo, *hi, *n], *wrap),
            Op::ShfR { dst, lo, hi, n, wrap } => self.funnel("r", *dst, [*lo, *hi, *n], *wrap),
            Op::Selp { ty, dst, a, b, p } => {
                line!(self, "    selp.{} {}, {}, {}, {};", ty.ptx_bits(), r(*dst), raw(*a), raw(*b), r(*p));
            }
            Op::Setp { cmp, ty, dst, a, b } => {
                let cmp = match cmp {
                    Cmp::Eq => "eq",
                    Cmp::Ne => "ne",
                    Cmp::Lt => "lt",
                    Cmp::Le => "le",
                    Cmp::Gt => "gt",
                    Cmp::Ge => "ge",
                };
                line!(self, "    setp.{cmp}.{} {}, {}, {};", ty.ptx(), r(*dst), v(*a, *ty), v(*b, *ty));
            }
            Op::PredLogic { op, dst, a, b } => {
                let op = match op {
                    Logic::And => "and",
                    Logic::Or => "or",
                    Logic::Xor => "xor",
                };
                line!(self, "    {op}.pred {}, {}, {};", r(*dst), r(*a), r(*b));
            }
            Op::PredNot { dst, a } => line!(self, "    not.pred {}, {};", r(*dst), r(*a)),
            Op::PredConst { dst, value } => {
                line!(self, "    setp.{}.u32 {}, 0, 0;", if *value { "eq" } else { "ne" }, r(*dst));
            }
            Op::Cvt { op, dst, a } => {
                let (name, source) = match op {
                    Cvt::U32ToU64 => ("u64.u32", Ty::U32),
                    Cvt::S32ToS64 => ("s64.s32", Ty::S32),
                    Cvt::U64ToU32 => ("u32.u64", Ty::U64),
                    Cvt::U16ToU32 => ("u32.u16", Ty::U16),
                    Cvt::U32ToU16 => ("u16.u32", Ty::U32),
                    Cvt::U32ToF32 => ("rn.f32.u32", Ty::U32),
                    Cvt::S32ToF32 => ("rn.f32.s32", Ty::S32),
                    Cvt::F32ToU32Rz => ("rzi.u32.f32", Ty::F32),
                    Cvt::F32ToS32Rz => ("rzi.s32.f32", Ty::F32),
                    Cvt::Bf16ToF32 => ("f32.bf16", Ty::Bf16),
                    Cvt::F32ToBf16 => ("rn.bf16.f32", Ty::F32),
                    Cvt::E4m3x2ToF16x2 => ("rn.f16x2.e4m3x2", Ty::U16),
                    Cvt::F16x2ToE4m3x2 => ("rn.satfinite.e4m3x2.f16x2", Ty::F16x2),
                };
                line!(self, "    cvt.{name} {}, {};", r(*dst), v(*a, source));
            }
            Op::CvtPack { op, dst, hi, lo } => {
                let name = match op {
                    CvtPack::Bf16x2 => "rn.bf16x2.f32",
                    CvtPack::Bf16x2Relu => "rn.relu.bf16x2.f32",
                    CvtPack::E4m3x2 => "rn.satfinite.e4m3x2.f32",
                    CvtPack::F16x2 => "rn.f16x2.f32",
                };
                line!(self, "    cvt.{name} {}, {}, {};", r(*dst), f(*hi), f(*lo));
            }
            Op::Bf16Bin { op, dst, a, b } => {
                let name = match op {
                    Bf16Bin::Add => "add.rn",
                    Bf16Bin::Mul => "mul.rn",
                    Bf16Bin::Max => "max",
                    Bf16Bin::Min => "min",
                    Bf16Bin::MaxNan => "max.NaN",
                };
                line!(self, "    {name}.bf16x2 {}, {}, {};", r(*dst), raw(*a), raw(*b));
            }
            Op::Bf16Fma { dst, a, b, c, relu } => {
                let relu = if *relu { ".relu" } else { "" };
                line!(self, "    fma.rn{relu}.bf16x2 {}, {}, {}, {};", r(*dst), raw(*a), raw(*b), raw(*c));
            }
            Op::F16x2Mul { dst, a, b } => {
                line!(self, "    mul.rn.f16x2 {}, {}, {};", r(*dst), raw(*a), raw(*b));
            }
            Op::Label { label } => line!(self, "{}:", l(*label)),
            Op::NoUnroll => line!(self, "    .pragma \"nounroll\";"),
            Op::Bra { target, cond: None } => line!(self, "    bra {};", l(*target)),
            Op::Bra { target, cond: Some((p, true)) } => line!(self, "    @{} bra {};", r(*p), l(*target)),
            Op::Bra { target, cond: Some((p, false)) } => line!(self, "    @!{} bra {};", r(*p), l(*target)),
            Op::Exit => line!(self, "    ret;"),
            Op::Trap => line!(self, "    trap;"),
            Op::Ld { space, ty, sem, cache, dsts, addr } => {
                let nc = if cache.nc { ".nc" } else { "" };
                let l1 = if cache.no_allocate { ".L1::no_allocate" } else { "" };
                let hint = if cache.policy.is_some() { ".L2::cache_hint" } else { "" };
                let dst = vector(dsts.iter().map(|d| r(*d)));
                let policy = cache.policy.map_or(String::new(), |p| format!(", {}", r(p)));
                line!(
                    self,
                    "    ld{}.{}{nc}{l1}{hint}{}.{} {dst}, {}{policy};",
                    sem_suffix(*sem),
                    space_name(*space),
                    width(dsts.len()),
                    ty.ptx_memory(),
                    addr_text(addr)
                );
            }
            Op::St { space, ty, sem, policy, srcs, addr } => {
                let hint = if policy.is_some() { ".L2::cache_hint" } else { "" };
                let src = vector(srcs.iter().map(|s| raw(*s)));
                let policy = policy.map_or(String::new(), |p| format!(", {}", r(p)));
                line!(
                    self,
                    "    st{}.{}{hint}{}.{} {}, {src}{policy};",
                    sem_suffix(*sem),
                    space_name(*space),
                    width(srcs.len()),
                    ty.ptx_memory(),
                    addr_text(addr)
                );
            }
            Op::Atom { space, op, ty, sem, dst, addr, a, b } => {
                let name = if dst.is_some() { "atom" } else { "red" };
                let arithmetic = matches!(op, Atomic::Add | Atomic::Min | Atomic::Max);
                let a = if arithmetic { v(*a, *ty) } else { raw(*a) };
                let (op, ty) = match op {
                    // There is no `add.s64`; the sum's bits are the same.
                    Atomic::Add => ("add", if *ty == Ty::S64 { "u64" } else { ty.ptx() }),
                    Atomic::Min => ("min", ty.ptx()),
                    Atomic::Max => ("max", ty.ptx()),
                    Atomic::And => ("and", ty.ptx_bits()),
                    Atomic::Or => ("or", ty.ptx_bits()),
                    Atomic::Xor => ("xor", ty.ptx_bits()),
                    Atomic::Exch => ("exch", ty.ptx_bits()),
                    Atomic::Cas => ("cas", ty.ptx_bits()),
                };
                let dst = dst.map_or(String::new(), |d| format!("{}, ", r(d)));
                let b = b.map_or(String::new(), |b| format!(", {}", raw(b)));
                line!(
                    self,
                    "    {name}{}.{}.{op}.{ty} {dst}{}, {}{b};",
                    sem_suffix(*sem),
                    space_name(*space),
                    addr_text(addr),
                    a
                );
            }
            Op::MultimemSt { ty, srcs, addr } => {
                // A vector's elements have a floating-point type, one element has none.
                let ty = if srcs.len() > 1 { ty.ptx() } else { ty.ptx_memory() };
                line!(
                    self,
                    "    multimem.st.relaxed.sys.global{}.{ty} {}, {};",
                    width(srcs.len()),
                    addr_text(addr),
                    vector(srcs.iter().map(|s| r(*s)))
                );
            }
            Op::Fence { scope } => line!(self, "    fence.acq_rel.{};", scope_name(*scope)),
            Op::FenceSc { scope } => line!(self, "    fence.sc.{};", scope_name(*scope)),
            Op::FenceProxyAsync => line!(self, "    fence.proxy.async.shared::cta;"),
            Op::FenceMbarrierInit => line!(self, "    fence.mbarrier_init.release.cluster;"),
            Op::CreatePolicy { dst, eviction } => {
                let eviction = match eviction {
                    Eviction::First => "first",
                    Eviction::Last => "last",
                };
                line!(self, "    createpolicy.fractional.L2::evict_{eviction}.b64 {}, 1.0;", r(*dst));
            }
            Op::PrefetchL2 { addr, bytes } => {
                line!(self, "    cp.async.bulk.prefetch.L2.global {}, {};", addr_text(addr), raw(*bytes));
            }
            Op::Shfl { mode, dst, src, lane, mask } => {
                let (name, clamp) = match mode {
                    Shuffle::Bfly => ("bfly", 31),
                    Shuffle::Idx => ("idx", 31),
                    Shuffle::Up => ("up", 0),
                    Shuffle::Down => ("down", 31),
                };
                line!(self, "    shfl.sync.{name}.b32 {}, {}, {}, {clamp}, {mask:#x};", r(*dst), raw(*src), raw(*lane));
            }
            Op::Vote { op, dst, p, mask } => {
                let name = match op {
                    Vote::All => "all",
                    Vote::Any => "any",
                };
                line!(self, "    vote.sync.{name}.pred {}, {}, {mask:#x};", r(*dst), r(*p));
            }
            Op::Ballot { dst, p, mask } => {
                line!(self, "    vote.sync.ballot.b32 {}, {}, {mask:#x};", r(*dst), r(*p));
            }
            Op::Redux { op, dst, src, mask } => {
                let name = match op {
                    Redux::AddU32 => "add.u32",
                    Redux::MinU32 => "min.u32",
                    Redux::MaxU32 => "max.u32",
                    Redux::MinS32 => "min.s32",
                    Redux::MaxS32 => "max.s32",
                    Redux::And => "and.b32",
                    Redux::Or => "or.b32",
                    Redux::Xor => "xor.b32",
                };
                line!(self, "    redux.sync.{name} {}, {}, {mask:#x};", r(*dst), raw(*src));
            }
            Op::MatchAny { dst, src, mask } => {
                line!(self, "    match.any.sync.b32 {}, {}, {mask:#x};", r(*dst), raw(*src));
            }
            Op::ActiveMask { dst } => line!(self, "    activemask.b32 {};", r(*dst)),
            Op::Elect { dst } => line!(self, "    elect.sync _|{}, 0xffffffff;", r(*dst)),
            Op::BarWarp { mask } => line!(self, "    bar.warp.sync {mask:#x};"),
            Op::BarSync { id, threads: None } => line!(self, "    bar.sync {};", raw(*id)),
            Op::BarSync { id, threads: Some(n) } => line!(self, "    bar.sync {}, {n};", raw(*id)),
            Op::BarArrive { id, threads } => line!(self, "    bar.arrive {}, {threads};", raw(*id)),
            Op::Mapa { dst, addr, rank } => {
                line!(self, "    mapa.shared::cluster.u32 {}, {}, {};", r(*dst), r(*addr), raw(*rank));
            }
            Op::StAsync { ty, srcs, addr, mbar } => line!(
                self,
                "    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{}.{} {}, {}, {};",
                width(srcs.len()),
                ty.ptx_memory(),
                addr_text(addr),
                vector(srcs.iter().map(|s| raw(*s))),
                addr_text(mbar)
            ),
            Op::ClusterArrive { release } => {
                line!(self, "    barrier.cluster.arrive.{}.aligned;", if *release { "release" } else { "relaxed" });
            }
            Op::ClusterWait => line!(self, "    barrier.cluster.wait.acquire.aligned;"),
            Op::MbarInit { addr, count } => {
                line!(self, "    mbarrier.init.shared::cta.b64 {}, {count};", addr_text(addr));
            }
            Op::MbarInval { addr } => line!(self, "    mbarrier.inval.shared::cta.b64 {};", addr_text(addr)),
            Op::MbarArrive { addr, count } => {
                let count = if *count == 1 { String::new() } else { format!(", {count}") };
                line!(
                    self,
                    "    {{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, {}{count}; }}",
                    addr_text(addr)
                );
            }
            Op::MbarArriveExpectTx { addr, bytes } => line!(
                self,
                "    {{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, {}, {}; }}",
                addr_text(addr),
                raw(*bytes)
            ),
            Op::MbarExpectTx { addr, bytes } => {
                line!(self, "    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 {}, {};", addr_text(addr), raw(*bytes));
            }
            Op::MbarTryWait { dst, addr, parity, scope } => line!(
                self,
                "    mbarrier.try_wait.parity{}.shared::cta.b64 {}, {}, {};",
                // Acquire at the CTA's scope is the default.
                if *scope == Scope::Cta { String::new() } else { format!(".acquire.{}", scope_name(*scope)) },
                r(*dst),
                addr_text(addr),
                raw(*parity)
            ),
            Op::MbarTestWait { dst, addr, parity } => line!(
                self,
                "    mbarrier.test_wait.parity.shared::cta.b64 {}, {}, {};",
                r(*dst),
                addr_text(addr),
                raw(*parity)
            ),
            Op::TensorG2s { dst, map, coords, mbar, policy } => {
                let hint = if policy.is_some() { ".L2::cache_hint" } else { "" };
                let policy = policy.map_or(String::new(), |p| format!(", {}", r(p)));
                let coords_text = coords.iter().map(|c| signed(*c)).collect::<Vec<_>>().join(", ");
                line!(
                    self,
                    "    cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{hint} {}, [{}, {{{coords_text}}}], {}{policy};",
                    coords.len(),
                    addr_text(dst),
                    r(*map),
                    addr_text(mbar)
                );
            }
            Op::BulkG2s { dst, src, bytes, mbar, policy } => {
                let hint = if policy.is_some() { ".L2::cache_hint" } else { "" };
                let policy = policy.map_or(String::new(), |p| format!(", {}", r(p)));
                line!(
                    self,
                    "    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint} {}, {}, {}, {}{policy};",
                    addr_text(dst),
                    addr_text(src),
                    raw(*bytes),
                    addr_text(mbar)
                );
            }
            Op::BulkS2g { dst, src, bytes } => line!(
                self,
                "    cp.async.bulk.global.shared::cta.bulk_group {}, {}, {};",
                addr_text(dst),
                addr_text(src),
                raw(*bytes)
            ),
            Op::CpAsync { dst, src, policy } => {
                let hint = if policy.is_some() { ".L2::cache_hint" } else { "" };
                let policy = policy.map_or(String::new(), |p| format!(", {}", r(p)));
                line!(self, "    cp.async.cg.shared.global{hint} {}, {}, 16{policy};", addr_text(dst), addr_text(src));
            }
            Op::CpAsyncCommit => line!(self, "    cp.async.commit_group;"),
            Op::CpAsyncWait { pending } => line!(self, "    cp.async.wait_group {pending};"),
            Op::BulkCommit => line!(self, "    cp.async.bulk.commit_group;"),
            Op::BulkWait { pending, read } => {
                line!(self, "    cp.async.bulk.wait_group{} {pending};", if *read { ".read" } else { "" });
            }
            Op::PrefetchTensormap { map } => line!(self, "    prefetch.tensormap [{}];", r(*map)),
            Op::LdMatrix { dsts, addr, transposed } => line!(
                self,
                "    ldmatrix.sync.aligned.m8n8.x{}{}.shared.b16 {{{}}}, {};",
                dsts.len(),
                if *transposed { ".trans" } else { "" },
                dsts.iter().map(|d| r(*d)).collect::<Vec<_>>().join(", "),
                addr_text(addr)
            ),
            Op::MmaBf16 { acc, a, b } => {
                let [acc, a, b] = [&acc[..], a, b].map(|regs| vector(regs.iter().map(|x| r(*x))));
                line!(self, "    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {acc}, {a}, {b}, {acc};");
            }
            Op::WgmmaFence => line!(self, "    wgmma.fence.sync.aligned;"),
            Op::Wgmma { input, n, acc, a, b, scale_d } => {
                let (ty, transpose) = match input {
                    MmaInput::E4m3 => ("e4m3", ""),
                    // Both operands K-major: no transposition.
                    MmaInput::Bf16 => ("bf16", ", 0, 0"),
                };
                let k = input.k();
                let acc = acc.iter().map(|d| r(*d)).collect::<Vec<_>>().join(", ");
                let (a, transpose) = match a {
                    WgmmaA::Descriptor(d) => (raw(*d), transpose),
                    WgmmaA::Regs(x) => {
                        let only_b = if *input == MmaInput::Bf16 { ", 0" } else { "" };
                        (vector(x.iter().map(|x| r(*x))), only_b)
                    }
                };
                let scale = match scale_d {
                    ScaleD::Const(c) => if *c { "1" } else { "0" }.to_string(),
                    ScaleD::Pred(p) => r(*p),
                };
                line!(
                    self,
                    "    wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{ty}.{ty} {{{acc}}}, {a}, {}, {scale}, 1, 1{transpose};",
                    raw(*b)
                );
            }
            Op::WgmmaCommit => line!(self, "    wgmma.commit_group.sync.aligned;"),
            Op::WgmmaWait { pending } => line!(self, "    wgmma.wait_group.sync.aligned {pending};"),
            Op::GridDepWait => line!(self, "    griddepcontrol.wait;"),
            Op::GridDepLaunch => line!(self, "    griddepcontrol.launch_dependents;"),
            Op::SetMaxNReg { inc, count } => {
                line!(self, "    setmaxnreg.{}.sync.aligned.u32 {count};", if *inc { "inc" } else { "dec" });
            }
            Op::Nanosleep { ns } => line!(self, "    nanosleep.u32 {};", raw(*ns)),
        }
    }

    fn bin(&mut self, op: Bin, ty: Ty, dst: RegId, a: Operand, b: Operand) {
        let float = ty == Ty::F32;
        let name = match op {
            Bin::Add => format!("add.{}{}", if float { "rn." } else { "" }, ty.ptx()),
            Bin::Sub => format!("sub.{}{}", if float { "rn." } else { "" }, ty.ptx()),
            Bin::Mul => format!("mul.{}{}", if float { "rn." } else { "lo." }, ty.ptx()),
            Bin::MulHi => format!("mul.hi.{}", ty.ptx()),
            Bin::Div => format!("div.{}", ty.ptx()),
            Bin::Rem => format!("rem.{}", ty.ptx()),
            Bin::Min => format!("min.{}", ty.ptx()),
            Bin::Max => format!("max.{}", ty.ptx()),
            Bin::And => format!("and.{}", ty.ptx_bits()),
            Bin::Or => format!("or.{}", ty.ptx_bits()),
            Bin::Xor => format!("xor.{}", ty.ptx_bits()),
            Bin::Shl => format!("shl.{}", ty.ptx_bits()),
            Bin::Shr => format!("shr.{}", ty.ptx()),
        };
        line!(
            self,
            "    {name} {}, {}, {};",
            r(dst),
            v(a, ty),
            v(b, if matches!(op, Bin::Shl | Bin::Shr) { Ty::U32 } else { ty })
        );
    }

    fn funnel(&mut self, side: &str, dst: RegId, [lo, hi, n]: [Operand; 3], wrap: bool) {
        let mode = if wrap { "wrap" } else { "clamp" };
        line!(self, "    shf.{side}.{mode}.b32 {}, {}, {}, {};", r(dst), raw(lo), raw(hi), raw(n));
    }
}

fn param_name(index: usize, name: &str) -> String {
    format!("p{index}_{name}")
}

fn r(reg: RegId) -> String {
    format!("%{}{}", reg.class.spelling().1, reg.index)
}

fn l(label: LabelId) -> String {
    format!("L{}", label.0)
}

fn bits(class: Class) -> &'static str {
    class.spelling().0
}

/// An operand as plain bits.
fn raw(o: Operand) -> String {
    match o {
        Operand::Reg(reg) => r(reg),
        Operand::Imm(v) if v < 1 << 16 => v.to_string(),
        Operand::Imm(v) => format!("{v:#x}"),
    }
}

/// An FP32 operand.
fn f(o: Operand) -> String {
    match o {
        Operand::Reg(reg) => r(reg),
        Operand::Imm(v) => format!("0f{:08X}", v as u32),
    }
}

/// A 32-bit signed operand.
fn signed(o: Operand) -> String {
    match o {
        Operand::Reg(reg) => r(reg),
        Operand::Imm(v) => (v as u32 as i32).to_string(),
    }
}

/// An operand as the type reads it.
fn v(o: Operand, ty: Ty) -> String {
    match (o, ty) {
        (Operand::Imm(_), Ty::F32) => f(o),
        (Operand::Imm(_), Ty::S32) => signed(o),
        (Operand::Imm(x), Ty::S64) => (x as i64).to_string(),
        _ => raw(o),
    }
}

fn addr_text(a: &Address) -> String {
    match (a.base, a.offset) {
        (base, 0) => format!("[{}]", raw(base)),
        (base, offset) => format!("[{}+{offset}]", raw(base)),
    }
}

fn vector(items: impl ExactSizeIterator<Item = String>) -> String {
    let single = items.len() == 1;
    let joined = items.collect::<Vec<_>>().join(", ");
    if single { joined } else { format!("{{{joined}}}") }
}

fn width(n: usize) -> &'static str {
    match n {
        1 => "",
        2 => ".v2",
        4 => ".v4",
        _ => unreachable!("the verifier admits vectors of 1, 2 and 4 elements"),
    }
}

fn space_name(s: Space) -> &'static str {
    match s {
        Space::Global => "global",
        Space::Shared => "shared",
        Space::Cluster => "shared::cluster",
    }
}

fn scope_name(s: Scope) -> &'static str {
    match s {
        Scope::Cta => "cta",
        Scope::Cluster => "cluster",
        Scope::Gpu => "gpu",
        Scope::Sys => "sys",
    }
}

fn sem_suffix(s: Sem) -> String {
    match s {
        Sem::Weak => String::new(),
        Sem::Volatile => ".volatile".into(),
        Sem::Relaxed(scope) => format!(".relaxed.{}", scope_name(scope)),
        Sem::Acquire(scope) => format!(".acquire.{}", scope_name(scope)),
        Sem::Release(scope) => format!(".release.{}", scope_name(scope)),
        Sem::AcqRel(scope) => format!(".acq_rel.{}", scope_name(scope)),
    }
}

fn special(s: Special) -> &'static str {
    match s {
        Special::TidX => "%tid.x",
        Special::NtidX => "%ntid.x",
        Special::CtaidX => "%ctaid.x",
        Special::CtaidY => "%ctaid.y",
        Special::CtaidZ => "%ctaid.z",
        Special::NctaidX => "%nctaid.x",
        Special::ClusterCtarank => "%cluster_ctarank",
        Special::ClusterNctarank => "%cluster_nctarank",
        Special::Laneid => "%laneid",
        Special::Smid => "%smid",
        Special::Globaltimer => "%globaltimer",
        Special::Clock64 => "%clock64",
    }
}

//! Everything that the builder can emit, through NVIDIA's assembler for each target: with operands in registers and,
//! wherever the builder takes them, with constants.

mod common;

use std::collections::BTreeSet;

use common::{EveryKind, Ir, i};
use ptx::op::{Address, Bin, Cache, Cvt, CvtPack, Eviction, Logic, MmaInput, Op, Operand, ScaleD, Space, Un, WgmmaA};
use ptx::*;
use ptxas::Ptxas;

/// Names of the instructions that a list holds. The match has no default: a new variant does not compile until it is
/// named here, and fails the test below until it is emitted somewhere in this file.
macro_rules! variants {
    ($($name:ident),* $(,)?) => {
        fn name(op: &Op) -> &'static str {
            match op { $(Op::$name { .. } => stringify!($name)),* }
        }
        const VARIANTS: &[&str] = &[$(stringify!($name)),*];
    };
}
variants! {
    Mov, Special, LdParam, ParamAddress, SharedBase, Pack, Unpack,
    Bin, Un, MulWide, Mad, MadWide, Fma, Div, Math, Prmt, Lop3, Bfe, ShfL, ShfR, Selp, Setp, PredLogic, PredNot, PredConst,
    Cvt, CvtPack, Bf16Bin, Bf16Fma, F16x2Mul,
    Label, NoUnroll, Bra, Exit, Trap,
    Ld, St, MultimemSt, Atom, Fence, FenceSc, FenceProxyAsync, FenceMbarrierInit, CreatePolicy, PrefetchL2,
    Shfl, Vote, Ballot, Redux, MatchAny, ActiveMask, Elect, BarWarp, BarSync, BarArrive,
    Mapa, StAsync, ClusterArrive, ClusterWait,
    MbarInit, MbarInval, MbarArrive, MbarArriveExpectTx, MbarExpectTx, MbarTryWait, MbarTestWait,
    CpAsync, CpAsyncCommit, CpAsyncWait, TensorG2s, BulkG2s, BulkS2g, BulkCommit, BulkWait, PrefetchTensormap,
    LdMatrix, MmaBf16, WgmmaFence, Wgmma, WgmmaCommit, WgmmaWait,
    GridDepWait, GridDepLaunch, SetMaxNReg, Nanosleep,
}

/// Stores a value where the assembler cannot discard it.
fn keep<T: Scalar>(out: Global<u32>, value: Reg<T>) {
    match T::TY.class() {
        Class::B64 => out.cast::<u64>().store(value.bitcast::<u64>()),
        Class::B32 => out.store(value.bitcast::<u32>()),
        Class::B16 => out.store(value.bitcast::<u16>().to_u32()),
        Class::Pred => unreachable!("no scalar type is a predicate"),
    }
}

/// Values of every type, constant or not.
struct Values {
    word: Reg<u32>,
    signed: Reg<i32>,
    long: Reg<u64>,
    long_signed: Reg<i64>,
    float: Reg<f32>,
}

impl Values {
    fn constant() -> Values {
        Values {
            word: Reg::from(0xF_FFF0u32),
            signed: Reg::from(-7),
            long: Reg::from(0x1234_5678_9ABCu64),
            long_signed: Reg::from(-5i64),
            float: Reg::from(-1.5f32),
        }
    }

    fn loaded(p: &<EveryKind as KernelArgs>::Params) -> Values {
        let [word, signed, float, _] = p.out.load_vec_as::<4>(LoadMode::VOLATILE);
        let [long, long_signed] = p.out.cast::<u64>().offset(2).load_vec_as::<2>(LoadMode::VOLATILE);
        Values { word, signed: signed.as_i32(), long, long_signed: long_signed.as_i64(), float: float.bitcast() }
    }
}

fn arithmetic(out: Global<u32>, v: &Values) {
    let Values { word: w, signed: s, long: l, long_signed: ls, float: f } = *v;
    let x = out.load_as(LoadMode::VOLATILE);
    macro_rules! integers {
        ($($a:expr, $b:expr;)*) => {$(
            for r in [$a + $b, $a - $b, $a * $b, $a / $b, $a % $b, $a & $b, $a | $b, $a ^ $b, $a << 3, $a >> 3, !$a] {
                keep(out, r);
            }
            for r in [$a.min($b), $a.max($b), $a.mul_hi($b), $a.mad($b, $b), $a << x, $a >> x] {
                keep(out, r);
            }
            keep(out, $a.popc() + $a.clz());
            for p in [$a.eq($b), $a.ne($b), $a.lt($b), $a.le($b), $a.gt($b), $a.ge($b)] {
                keep(out, p.as_u32());
            }
        )*};
    }
    integers! { w, w; s, s; l, l; ls, ls; x, w; x.as_i32(), s; x.to_u64(), l; x.to_u64().as_i64(), ls; }
    let y: Reg<f32> = x.bitcast();
    for b in [f, y] {
        for r in [f + b, f - b, f * b, f.min(b), f.max(b), f.fma(b, b), f.div_rn(b), f.div_full(b), -f, f.abs()] {
            keep(out, r);
        }
        for p in [f.eq(b), f.ne(b), f.lt(b), f.le(b), f.gt(b), f.ge(b)] {
            keep(out, p.select::<f32>(f, 2.0));
        }
    }
    for op in [Math::RcpApproxFtz, Math::RsqrtApprox, Math::RsqrtApproxFtz, Math::Ex2ApproxFtz, Math::SqrtRn] {
        keep(out, f.math(op));
    }
    for r in [w.to_u64(), w.mul_wide(w), w.mul_wide(x), w.mad_wide(w, l), x.mad_wide(3u32, l), w.pack(w)] {
        keep(out, r);
    }
    for r in [s.to_i64(), s.mul_wide(s), x.as_i32().mul_wide(-3)] {
        keep(out, r);
    }
    for r in [w.bits(3, 5), x.bits(w & 31, w & 31), w.reverse_bits(), w.permute(x, 0x5410), w.lop3(x, w, 0xE8)] {
        keep(out, r);
    }
    for r in [w.funnel_shl(w, 3), w.funnel_shr(x, w), w.max_u16x2(w), w.min_u16x2(0xFFFE_FFFEu32)] {
        keep(out, r);
    }
    keep(out, w.to_u16().pack(w.to_u16()));
    keep(out, w.to_f32() + s.to_f32());
    keep(out, f.to_u32() + l.low() + s.as_u32());
    let (low, high) = l.unpack();
    keep(out, low + high);
    let p = x.eq(1);
    keep(out, ((p & !p) | (p ^ Pred::constant(false))).select::<u64>(l, 7u64));
}

fn conversions(out: Global<u32>, v: &Values) {
    let (f, word) = (v.float, v.word);
    let pair = Reg::<Bf16x2>::from_f32(f, f);
    let relu = Reg::<Bf16x2>::from_f32_relu(f, f);
    let constant = Reg::from(Bf16x2(0x3F80_3F80));
    for r in [pair + relu, pair * constant, pair.max(relu), pair.min(constant), pair.max_nan(relu)] {
        keep(out, r);
    }
    for r in [pair.fma(constant, relu), pair.fma_relu(relu, constant), Reg::<Bf16x2>::from_bits(word)] {
        keep(out, r);
    }
    pair.splat().into_iter().for_each(|half| keep(out, half));
    keep(out, pair.low_f32() + pair.high_f32() + f.to_bf16().to_f32());
    let e4m3 = e4m3x2_from_f32(f, f);
    let halves = Reg::<F16x2>::from_e4m3x2(e4m3) * Reg::<F16x2>::from_f32(f, f);
    keep(out, halves.to_bits());
    keep(out, halves.to_e4m3x2());
    // Constants that only a conversion can take.
    keep(out, Reg::from(Bf16(0x3F80)).to_f32());
    keep(out, Reg::<F16x2>::from_e4m3x2(Reg::from(0x3838u16)).to_bits());
    keep(out, Reg::from(F16x2(0x3C00_3C00)).to_e4m3x2());
    keep(out, Reg::from(5u16).to_u32() + Reg::from(5u16).pack(6));
}

fn memory(out: Global<u32>, v: &Values) {
    let policy = Policy::evict_first();
    let modes = [
        LoadMode::WEAK,
        LoadMode::STREAM,
        LoadMode::NO_ALLOCATE,
        LoadMode::STREAM.policy(policy),
        LoadMode::VOLATILE,
        LoadMode::relaxed(Scope::Cta),
        LoadMode::relaxed(Scope::Cluster),
        LoadMode::acquire(Scope::Gpu),
        LoadMode::acquire(Scope::Sys),
    ];
    for mode in modes {
        keep(out, out.at(v.word).load_as(mode));
        keep(out, out.at64(v.long).offset(-1).cast::<u8>().load_as(mode));
        keep(out, out.byte_at(v.long).cast::<u16>().load_as(mode));
        keep(out, out.cast::<u64>().load_vec_as::<2>(mode)[1]);
    }
    keep(out, out.offset(-1).address());
    let sems = [Sem::Weak, Sem::Volatile, Sem::Relaxed(Scope::Gpu), Sem::Release(Scope::Cta), Sem::Release(Scope::Sys)];
    for sem in sems {
        out.store_as(sem, v.word);
        out.cast::<u64>().store_vec_as(sem, [v.long, v.long]);
        out.cast::<f32>().store_vec_as(sem, [v.float; 4]);
    }
    out.store_vec_with(policy, [v.word]);
    out.cast::<u64>().store_vec_with(Policy::evict_last(), [v.long; 2]);
    out.cast::<u8>().store(v.word);
    out.cast::<u16>().store(v.word);
    let shared = SharedArray::<u32>::aligned("scratch", 64, 256);
    for s in [shared.at(3), shared.at(v.word & 63).byte_offset(4), shared.ptr().byte_at(v.word)] {
        s.store(v.word);
        keep(out, s.load());
        keep(out, s.address());
    }
    keep(out, shared.cast::<u8>().at(5).load());
    keep(out, shared.ptr().load_vec::<4>()[3]);
    shared.ptr().store_vec([v.word; 2]);

    let arithmetic = [Atomic::Add, Atomic::Min, Atomic::Max];
    let bitwise = [Atomic::And, Atomic::Or, Atomic::Xor];
    for sem in [Sem::Relaxed(Scope::Gpu), Sem::Acquire(Scope::Cta), Sem::Release(Scope::Sys), Sem::AcqRel(Scope::Gpu)] {
        for op in arithmetic.into_iter().chain(bitwise) {
            keep(out, out.atomic(op, sem, v.word));
            keep(out, out.cast::<i32>().atomic(op, sem, v.signed));
            keep(out, out.cast::<u64>().atomic(op, sem, v.long));
            keep(out, out.cast::<i64>().atomic(op, sem, v.long_signed));
            keep(out, shared.ptr().atomic(op, sem, v.word));
        }
        keep(out, out.atomic(Atomic::Exch, sem, v.word));
        keep(out, out.cast::<f32>().atomic(Atomic::Add, sem, v.float));
        keep(out, out.compare_swap(sem, v.word, 1));
        keep(out, shared.cast::<u64>().ptr().compare_swap(sem, v.long, 1));
    }
    for op in arithmetic.into_iter().chain(bitwise) {
        out.reduce(op, Sem::Release(Scope::Gpu), v.word);
        out.cast::<i32>().reduce(op, Sem::Relaxed(Scope::Sys), v.signed);
        shared.ptr().reduce(op, Sem::Relaxed(Scope::Cta), v.word);
    }
    for scope in [Scope::Cta, Scope::Cluster, Scope::Gpu, Scope::Sys] {
        fence(scope);
        fence_sc(scope);
    }
    out.prefetch_l2(256);
    out.prefetch_l2(v.word);
}

fn warp(out: Global<u32>, v: &Values) {
    for mode in [Shuffle::Bfly, Shuffle::Idx, Shuffle::Up, Shuffle::Down] {
        keep(out, shuffle(mode, v.word, 3));
        keep(out, shuffle(mode, v.float, v.word));
    }
    keep(out, shuffle_xor(v.signed, 16));
    keep(out, broadcast(v.word, 0));
    let p = lane_index().lt(7);
    keep(out, (all(p) | any(p) | elect()).as_u32() + ballot(p) + match_any(v.word) + active_mask());
    for op in [Redux::AddU32, Redux::MinU32, Redux::MaxU32, Redux::And, Redux::Or, Redux::Xor] {
        keep(out, redux(op, v.word));
    }
    for op in [Redux::MinS32, Redux::MaxS32] {
        keep(out, redux(op, v.signed));
    }
    sync_warp();
    sync_threads();
    arrive_named(2, 128);
    sync_named(2, 128);
    sync_named(warp_index() + 1, 32);
    arrive_named(v.word & 7, 64);
    nanosleep(20);
    nanosleep(v.word);
    keep(out, globaltimer() + clock64());
    let ids = [
        Special::TidX,
        Special::NtidX,
        Special::CtaidX,
        Special::CtaidY,
        Special::CtaidZ,
        Special::NctaidX,
        Special::ClusterCtarank,
        Special::ClusterNctarank,
        Special::Laneid,
        Special::Smid,
    ];
    for id in ids {
        keep(out, special(id));
    }
    keep(out, thread_index() + cta_index());
}

fn copies(out: Global<u32>, map: TensorMapHandle, v: &Values) {
    let bytes = SharedArray::<u8>::aligned("bytes", 16_384, 1024);
    let barriers = MbarrierArray::new("barriers", 2);
    assert_eq!(barriers.len(), 2);
    let policy = Policy::evict_first();
    prefetch_tensor_map(map);
    let bar = barriers.at(1);
    bar.init(1);
    fence_mbarrier_init();
    fence_proxy_async();
    for policy in [None, Some(policy)] {
        for rank in 1..=5 {
            copy_tensor(bytes.ptr(), map, &vec![v.word; rank], bar, policy);
        }
        copy_bulk(bytes.at(1024), out.cast(), 64, bar, policy);
        copy_bulk(bytes.at(2048), out.cast(), v.word, barriers.at(v.word & 1), policy);
    }
    for policy in [None, Some(policy)] {
        copy_16(bytes.at(4096), out.cast(), policy);
        copy_16(bytes.at(v.word & 0xF0), out.cast(), policy);
        commit_copies();
    }
    wait_copies(1);
    wait_copies(0);
    bar.expect(512);
    bar.expect(v.word);
    bar.arrive_expect(16);
    bar.arrive_expect(v.word);
    bar.arrive();
    keep(out, bar.try_wait(v.word & 1).as_u32());
    bar.wait(0);
    store_bulk(out.cast(), bytes.ptr(), 32);
    store_bulk(out.cast(), bytes.ptr(), v.word);
    commit_bulk();
    wait_bulk_read(1);
    wait_bulk(0);
    bar.invalidate();
}

fn clusters(out: Global<u32>, v: &Values) {
    let words = SharedArray::<u32>::aligned("exchanged", 64, 16);
    let longs = SharedArray::<u64>::aligned("exchanged_longs", 8, 16);
    let arrived = MbarrierArray::new("arrived", 1).at(0);
    cluster_arrive_relaxed();
    cluster_wait();
    keep(out, cluster_rank() + cluster_size());
    for rank in [v.word & 1, Reg::from(1)] {
        let theirs = words.at(4).of_cta(rank);
        theirs.store(v.word);
        theirs.offset(4).store_vec([v.word; 2]);
        keep(out, theirs.load());
        let [a, b, c, d] = theirs.load_vec();
        keep(out, a + b + c + d);
        let mbar = arrived.of_cta(rank);
        theirs.store_async([v.word], mbar);
        theirs.store_async([v.word, Reg::from(5)], mbar);
        theirs.store_async([v.word, a, b, c], mbar);
        longs.at(1).of_cta(rank).store_async([v.long], mbar);
        longs.at(2).of_cta(rank).store_async([v.long, v.long], mbar);
    }
    arrived.wait_cluster(v.word & 1);
    cluster_sync();
}

fn multicast(out: Global<u32>, v: &Values) {
    let base = Multicast::from_address(out.cast::<u64>().load());
    for at in [base, base.byte_offset(-32)] {
        at.store(v.word);
        at.byte_offset(8).store_u64(v.long);
        at.byte_at(v.long << 4).store_vec([v.word; 2]);
        at.store_vec([v.word, Reg::from(1), v.word, Reg::from(2)]);
    }
}

fn warp_products(out: Global<u32>, v: &Values) {
    let pair = Reg::<Bf16x2>::from_bits(v.word);
    let tile = MmaTile::zero();
    tile.mma_bf16([pair; 4], [pair; 2]);
    (0..4).for_each(|j| keep(out, tile.get(j)));
    let rows = SharedArray::<u16>::aligned("rows", 256, 16);
    let at = rows.at(lane_index() * 8);
    let kept = |pairs: &[Reg<Bf16x2>]| pairs.iter().for_each(|pair| keep(out, pair.to_bits()));
    kept(&at.load_matrices::<1>());
    kept(&at.load_matrices::<2>());
    kept(&at.load_matrices::<4>());
    kept(&rows.ptr().load_matrices_transposed::<1>());
    kept(&at.load_matrices_transposed::<2>());
    kept(&at.load_matrices_transposed::<4>());
}

fn control(out: Global<u32>, v: &Values) {
    let sum = Var::new(v.word);
    when(lane_index().lt(3), || sum.add(1));
    when_else(lane_index().gt(3), || sum.set(v.word), || sum.xor(5));
    for_range(0, v.word & 7, 1, |at| sum.add(at));
    repeat(|l| {
        sum.add(3);
        l.continue_if(sum.get().eq(4));
        l.break_if(sum.get().gt(100));
    });
    while_(|| sum.get().lt(9), || sum.add(v.word));
    keep(out, sum.get().copied());
    exit_if(sum.get().eq(17));
    when(sum.get().eq(18), trap);
    when(sum.get().eq(19), exit);
}

fn products(out: Global<u32>) {
    let tile = SharedArray::<u8>::aligned("tile", 2048, 1024);
    let descriptor = tile.ptr().descriptor_k_major_128();
    let acc = Accumulator::new(8);
    wgmma_fence();
    acc.mma_e4m3(descriptor, descriptor, false);
    acc.mma_e4m3(descriptor + 2, descriptor + 2, true);
    acc.mma_bf16(descriptor, descriptor, true);
    wgmma_commit();
    wgmma_wait(0);
    keep(out, acc.get(3));
}

/// A kernel that calls every function of the builder.
fn by_the_builder(target: Target, constant: bool) -> Ir {
    let bounds = LaunchBounds::threads(128).min_ctas(1).cluster(2);
    let kernel = build::<EveryKind>("kitchen_sink", target, bounds, |p| {
        let v = if constant { Values::constant() } else { Values::loaded(&p) };
        assert_eq!((ptx::target(), ptx::bounds()), (target, bounds));
        wait_for_dependencies();
        arithmetic(p.out, &v);
        conversions(p.out, &v);
        memory(p.out, &v);
        warp(p.out, &v);
        copies(p.out, p.map, &v);
        clusters(p.out, &v);
        multicast(p.out, &v);
        warp_products(p.out, &v);
        if target == Target::Sm90a {
            products(p.out);
        }
        control(p.out, &v);
        p.out.store(p.n);
        launch_dependents();
        when(warp_index().lt(4), || {
            shrink_registers(40);
            grow_registers(64);
        });
    })
    .expect("the builder emits sound kernels");
    Ir(KernelIr::clone(kernel.ir()))
}

/// Adds what the instruction list has and the builder does not use yet.
fn by_hand(ir: &mut Ir) {
    let (word, long, pred, half) = (ir.word(), ir.long(), ir.pred(), ir.half());
    let (w, l, h) = (Operand::Reg(word), Operand::Reg(long), Operand::Reg(half));
    let shared = Address { base: Operand::Reg(ir.shared_base()), offset: 64 };
    for addr in [shared, Address { offset: -8, ..shared }] {
        ir.push(Op::MbarTestWait { dst: pred, addr, parity: w });
        ir.push(Op::MbarArrive { addr, count: 3 });
    }
    for wrap in [false, true] {
        ir.push(Op::ShfL { dst: word, lo: w, hi: w, n: w, wrap });
        ir.push(Op::ShfR { dst: word, lo: i(1), hi: i(2), n: i(3), wrap });
    }
    ir.push(Op::Unpack { lo: half, hi: half, src: w });
    ir.push(Op::Pack { dst: word, lo: h, hi: i(7) });
    ir.push(Op::MadWide { ty: Ty::S32, dst: long, a: w, b: i(u32::MAX as u64), c: i(u64::MAX) });
    for (op, ty, dst, a) in [
        (Un::Neg, Ty::S32, word, w),
        (Un::Neg, Ty::S64, long, l),
        (Un::Abs, Ty::S32, word, w),
        (Un::Abs, Ty::S64, long, l),
        (Un::Brev, Ty::U64, long, l),
        (Un::Not, Ty::U64, long, l),
    ] {
        ir.push(Op::Un { op, ty, dst, a });
    }
    for op in [Bin::Min, Bin::Max] {
        ir.push(Op::Bin { op, ty: Ty::U16x2, dst: word, a: w, b: w });
    }
    for op in [Logic::And, Logic::Or, Logic::Xor] {
        ir.push(Op::PredLogic { op, dst: pred, a: pred, b: pred });
    }
    ir.push(Op::Cvt { op: Cvt::F32ToS32Rz, dst: word, a: w });
    ir.push(Op::CvtPack { op: CvtPack::F16x2, dst: word, hi: i(0x3F80_0000), lo: w });
    // Atomics on other memory types, and streaming stores.
    let global = Address { base: l, offset: -16 };
    let policy = Some(long);
    ir.push(Op::CreatePolicy { dst: long, eviction: Eviction::First });
    ir.push(Op::St {
        space: Space::Global,
        ty: Ty::F32,
        sem: Sem::Weak,
        policy,
        srcs: vec![w; 4].into(),
        addr: global,
    });
    let cache = Cache { nc: false, no_allocate: false, policy };
    ir.push(Op::Ld { space: Space::Global, ty: Ty::U32, sem: Sem::Weak, cache, dsts: [word].into(), addr: global });
    ir.push(Op::BarSync { id: w, threads: None });
    if ir.0.target == Target::Sm90a {
        let acc: Box<[_]> = (0..4).map(|_| ir.word()).collect();
        for input in [MmaInput::E4m3, MmaInput::Bf16] {
            for (a, scale_d) in
                [(WgmmaA::Regs([word; 4]), ScaleD::Const(true)), (WgmmaA::Descriptor(l), ScaleD::Pred(pred))]
            {
                ir.push(Op::WgmmaFence);
                ir.push(Op::Wgmma { input, n: 8, acc: acc.clone(), a, b: l, scale_d });
                ir.push(Op::WgmmaCommit);
                ir.push(Op::WgmmaWait { pending: 0 });
            }
        }
    }
    // Kept alive, so that nothing above is dead code.
    ir.push(Op::St { space: Space::Shared, ty: Ty::U32, sem: Sem::Weak, policy: None, srcs: [w].into(), addr: shared });
    ir.push(Op::Selp { ty: Ty::U32, dst: word, a: w, b: i(0), p: pred });
}

fn assemble(target: Target, constant: bool) {
    let mut ir = by_the_builder(target, constant);
    by_hand(&mut ir);
    ir.verify().expect("sound");
    let Some(ptxas) = Ptxas::for_test() else { return };
    let text = print::print(&ir.0);
    let report = ptxas
        .assemble(target.name(), &text)
        .unwrap_or_else(|error| panic!("{error}\n{}", excerpt(&text, &error.to_string())));
    assert_eq!(report.entry, "kitchen_sink");
}

/// The lines of `text` that an assembler's log names.
fn excerpt(text: &str, log: &str) -> String {
    let numbers = log.split("line ").skip(1).filter_map(|rest| rest.split(';').next()?.parse::<usize>().ok());
    numbers.filter_map(|n| text.lines().nth(n - 1).map(|line| format!("{n}: {line}\n"))).collect()
}

#[test]
fn the_sink_holds_every_instruction() {
    let mut ir = by_the_builder(Target::Sm90a, false);
    by_hand(&mut ir);
    let emitted: BTreeSet<&str> = ir.0.insts.iter().map(|inst| name(&inst.op)).collect();
    assert_eq!(emitted, VARIANTS.iter().copied().collect());
}

#[test]
fn everything_assembles_for_hopper() {
    assemble(Target::Sm90a, false);
}

#[test]
fn everything_but_warpgroup_products_assembles_for_blackwell() {
    assemble(Target::Sm100a, false);
}

#[test]
fn constants_assemble_wherever_the_builder_takes_them() {
    assemble(Target::Sm90a, true);
    assemble(Target::Sm100a, true);
}

#[test]
fn clusters_of_every_size_assemble() {
    let Some(ptxas) = Ptxas::for_test() else { return };
    for size in 1..=16 {
        let kernel = build::<()>("meets", Target::Sm90a, LaunchBounds::threads(64).cluster(size), |()| cluster_sync());
        ptxas.assemble("sm_90a", &kernel.unwrap().ptx()).unwrap();
    }
}

#[test]
fn register_caps_assemble() {
    let Some(ptxas) = Ptxas::for_test() else { return };
    for bounds in [LaunchBounds::threads(1024).min_ctas(2), LaunchBounds::threads(64).max_registers(40)] {
        let kernel = build::<()>("capped", Target::Sm90a, bounds, |()| sync_threads()).unwrap();
        let report = ptxas.assemble("sm_90a", &kernel.ptx()).unwrap();
        assert!(report.notes.is_empty(), "{:?}", report.notes);
    }
}

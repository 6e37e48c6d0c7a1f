//! The verifier's checklist: one broken kernel per rule, each reported with the rule and the line that broke it.

mod common;

use std::panic::Location;

use common::{Ir, i};
use ptx::op::{Address, Bf16Bin, Cache, Cmp, Cvt, LabelId, MmaInput, Op, Operand, RegId, ScaleD, Space, WgmmaA};
use ptx::*;

/// Expects `op`, appended to a sound kernel, to break a rule that says `rule`, at the caller's line.
#[track_caller]
fn check(ir: Ir, op: Op, rule: &str) {
    let mut ir = ir;
    ir.push(op);
    let error = ir.verify().expect_err("the instruction breaks a rule");
    assert!(error.rule.contains(rule), "{rule:?} is not in {:?}", error.rule);
    let here = Location::caller();
    let at = error.at.as_deref().expect("one instruction is at fault");
    assert!(at.starts_with(&format!("{}:{}:", here.file(), here.line())), "{at} is not {here}");
    assert!(at.contains("tests/verify.rs"), "{at}");
    // The message for people names kernel, rule and line.
    let message = error.to_string();
    assert!(message.contains("kernel sound") && message.contains(rule) && message.contains(at), "{message}");
}

/// Expects a kernel-wide rule to break.
fn check_kernel(change: impl FnOnce(&mut KernelIr), rule: &str) {
    let mut ir = Ir::sound();
    change(&mut ir.0);
    let error = ir.verify().expect_err("the kernel breaks a rule");
    assert!(error.rule.contains(rule), "{rule:?} is not in {:?}", error.rule);
    assert_eq!(error.at, None);
}

#[test]
fn the_sound_kernel_is_sound() {
    assert_eq!(Ir::sound().verify(), Ok(()));
}

#[test]
fn registers_exist_and_have_the_class_needed() {
    let mut ir = Ir::sound();
    let (word, long) = (ir.word(), ir.long());
    check(ir.clone(), Op::Fma { dst: word, a: Operand::Reg(long), b: i(0), c: i(0) }, "needs a B32 register");
    check(ir.clone(), Op::CreatePolicy { dst: word, eviction: ptx::op::Eviction::First }, "needs a B64 register");
    let foreign = RegId { class: Class::B32, index: 1000 };
    check(ir, Op::Mov { dst: foreign, src: i(0) }, "belongs to another kernel");
}

#[test]
fn packed_arithmetic_and_narrow_conversions_take_no_constants() {
    let mut ir = Ir::sound();
    let dst = ir.word();
    let x = Operand::Reg(dst);
    let rule = "takes no constants";
    check(ir.clone(), Op::Bf16Bin { op: Bf16Bin::Add, dst, a: x, b: i(0) }, rule);
    check(ir.clone(), Op::Bf16Fma { dst, a: x, b: x, c: i(0), relu: false }, rule);
    check(ir.clone(), Op::F16x2Mul { dst, a: i(0), b: x }, rule);
    check(ir.clone(), Op::Bin { op: op::Bin::Max, ty: Ty::U16x2, dst, a: x, b: i(0) }, rule);
    let half = ir.half();
    check(ir.clone(), Op::Cvt { op: Cvt::Bf16ToF32, dst, a: i(0) }, rule);
    check(ir.clone(), Op::Cvt { op: Cvt::E4m3x2ToF16x2, dst, a: i(0) }, rule);
    check(ir, Op::Cvt { op: Cvt::F16x2ToE4m3x2, dst: half, a: i(0) }, rule);
}

#[test]
fn registers_are_written_above_their_first_use() {
    let mut ir = Ir::sound();
    let unwritten = ir.fresh(Class::B32);
    let dst = ir.word();
    check(ir, Op::Mov { dst, src: Operand::Reg(unwritten) }, "before anything writes it");
}

#[test]
fn accumulators_are_written_before_they_are_added_to() {
    let mut ir = Ir::sound();
    let acc: Box<[RegId]> = (0..4).map(|_| ir.fresh(Class::B32)).collect();
    let a = WgmmaA::Descriptor(i(0));
    let wgmma =
        |on| Op::Wgmma { input: MmaInput::E4m3, n: 8, acc: acc.clone(), a, b: i(0), scale_d: ScaleD::Const(on) };
    check(ir.clone(), wgmma(true), "before anything writes it");
    // Without the old accumulator there is nothing to read.
    ir.push(wgmma(false));
    assert_eq!(ir.verify(), Ok(()));
}

#[test]
fn branch_targets_exist_once() {
    let mut ir = Ir::sound();
    check(ir.clone(), Op::Bra { target: LabelId(9), cond: None }, "branch target 9 is placed 0 times");
    check(ir.clone(), Op::Label { label: LabelId(9) }, "label 9 does not exist");
    let label = ir.label();
    check(ir.clone(), Op::Bra { target: label, cond: None }, "is placed 0 times");
    ir.push(Op::Label { label });
    assert_eq!(ir.verify(), Ok(()));
    let mut twice = ir;
    twice.push(Op::Label { label });
    assert!(twice.verify().is_err_and(|e| e.rule.contains("is placed 2 times") && e.at.is_some()));
}

#[test]
fn kernels_end() {
    let rule = "runs past its last instruction";
    check_kernel(|ir| ir.insts.clear(), rule);
    check_kernel(|ir| assert_eq!(ir.insts.pop().map(|last| last.op), Some(Op::Exit)), rule);
}

#[test]
fn parameters_exist_and_are_read_as_declared() {
    let mut ir = Ir::sound();
    let (word, long) = (ir.word(), ir.long());
    let param = |name| ir.0.params.iter().position(|p| p.name == name).unwrap() as u32;
    let (map, n, out) = (param("map"), param("n"), param("out"));
    check(ir.clone(), Op::LdParam { dst: word, param: 17 }, "parameter 17 (None) is read as B32");
    check(ir.clone(), Op::LdParam { dst: long, param: n }, "(Some(B32)) is read as B64");
    check(ir.clone(), Op::LdParam { dst: word, param: out }, "(Some(B64)) is read as B32");
    check(ir.clone(), Op::LdParam { dst: long, param: map }, "(Some(TensorMap)) is read as B64");
    check(ir, Op::ParamAddress { dst: long, param: n }, "is used as a tensor map");
}

#[test]
fn parameters_fit_their_block() {
    let many = |n: usize, kind| args::lay_out(&vec![("x", kind); n]);
    check_kernel(|ir| ir.params = many(args::PARAMS_MAX + 1, args::ParamKind::B32), "49 parameters");
    check_kernel(|ir| ir.params = many(9, args::ParamKind::TensorMap), "of 1152 bytes");
}

#[test]
fn entry_names_are_identifiers() {
    check_kernel(|ir| ir.name = String::new(), "is not an identifier");
    check_kernel(|ir| ir.name = "sound kernel".into(), "is not an identifier");
}

fn load(space: Space, ty: Ty, sem: Sem, cache: Cache, dsts: Vec<RegId>, base: RegId, offset: i32) -> Op {
    let addr = op::Address { base: Operand::Reg(base), offset };
    Op::Ld { space, ty, sem, cache, dsts: dsts.into(), addr }
}

#[test]
fn vectors_have_1_2_or_4_elements_and_16_bytes() {
    let mut ir = Ir::sound();
    let (word, long) = (ir.word(), ir.long());
    let none = Cache::default();
    let global = |ty, dsts| load(Space::Global, ty, Sem::Weak, none, dsts, long, 0);
    check(ir.clone(), global(Ty::U32, vec![word; 3]), "a vector access of 3 x 4 bytes");
    check(ir.clone(), global(Ty::U32, vec![]), "a vector access of 0 x 4 bytes");
    check(ir.clone(), global(Ty::U64, vec![long; 4]), "a vector access of 4 x 8 bytes");
    let addr = op::Address { base: Operand::Reg(long), offset: 0 };
    let srcs = vec![Operand::Reg(word); 8].into();
    check(
        ir,
        Op::St { space: Space::Global, ty: Ty::U32, sem: Sem::Weak, policy: None, srcs, addr },
        "a vector access of 8 x 4 bytes",
    );
}

#[test]
fn constant_shared_addresses_are_aligned() {
    let mut ir = Ir::sound();
    let (word, base) = (ir.word(), ir.shared_base());
    let shared =
        |n: usize, offset| load(Space::Shared, Ty::U32, Sem::Weak, Cache::default(), vec![word; n], base, offset);
    check(ir.clone(), shared(1, 2), "a 4-byte access at shared offset 2");
    check(ir.clone(), shared(4, 8), "a 16-byte access at shared offset 8");
    let long = ir.long();
    let at = |offset| Address { base: Operand::Reg(base), offset };
    let src = Address { base: Operand::Reg(long), offset: 0 };
    check(ir.clone(), Op::CpAsync { dst: at(8), src, policy: None }, "a 16-byte access at shared offset 8");
    let matrices = |n: usize, offset| Op::LdMatrix { dsts: vec![word; n].into(), addr: at(offset), transposed: false };
    check(ir.clone(), matrices(1, 24), "a 16-byte access at shared offset 24");
    ir.push(shared(4, 16));
    ir.push(Op::CpAsync { dst: at(32), src, policy: None });
    ir.push(matrices(4, 16));
    assert_eq!(ir.verify(), Ok(()));
}

#[test]
fn ldmatrix_loads_1_2_or_4_matrices() {
    let mut ir = Ir::sound();
    let (word, base) = (ir.word(), ir.shared_base());
    for n in [0, 3, 8] {
        let addr = Address { base: Operand::Reg(base), offset: 0 };
        let op = Op::LdMatrix { dsts: vec![word; n].into(), addr, transposed: true };
        check(ir.clone(), op, &format!("ldmatrix of {n} matrices"));
    }
}

#[test]
fn ordering_fits_the_access() {
    let mut ir = Ir::sound();
    let (word, long, base) = (ir.word(), ir.long(), ir.shared_base());
    let addr = op::Address { base: Operand::Reg(long), offset: 0 };
    let ld = |sem, cache| load(Space::Global, Ty::U32, sem, cache, vec![word], long, 0);
    let st = |sem, policy| Op::St { space: Space::Global, ty: Ty::U32, sem, policy, srcs: [i(1)].into(), addr };
    let none = Cache::default();
    let hinted =
        [Cache { nc: true, ..none }, Cache { no_allocate: true, ..none }, Cache { policy: Some(long), ..none }];
    check(ir.clone(), ld(Sem::Release(Scope::Gpu), none), "a load cannot be Release(Gpu)");
    check(ir.clone(), ld(Sem::AcqRel(Scope::Sys), none), "a load cannot be AcqRel(Sys)");
    check(ir.clone(), st(Sem::Acquire(Scope::Gpu), None), "a store cannot be Acquire(Gpu)");
    check(ir.clone(), st(Sem::AcqRel(Scope::Gpu), None), "a store cannot be AcqRel(Gpu)");
    check(ir.clone(), st(Sem::Relaxed(Scope::Gpu), Some(long)), "only a weak global store");
    for cache in hinted {
        check(ir.clone(), ld(Sem::Acquire(Scope::Gpu), cache), "a Acquire(Gpu) load cannot have cache hints");
        let shared = load(Space::Shared, Ty::U32, Sem::Weak, cache, vec![word], base, 0);
        check(ir.clone(), shared, "a shared load cannot have cache hints");
    }
    let atom =
        |sem| Op::Atom { space: Space::Global, op: Atomic::Add, ty: Ty::U32, sem, dst: None, addr, a: i(1), b: None };
    check(ir.clone(), atom(Sem::Weak), "an atomic cannot be Weak");
    check(ir, atom(Sem::Volatile), "an atomic cannot be Volatile");
}

#[test]
fn atomics_exist_for_their_operation_and_type() {
    let mut ir = Ir::sound();
    let (word, long) = (ir.word(), ir.long());
    let addr = op::Address { base: Operand::Reg(long), offset: 0 };
    let sem = Sem::Relaxed(Scope::Gpu);
    let atom = |op, ty, dst, b| Op::Atom { space: Space::Global, op, ty, sem, dst, addr, a: i(1), b };
    check(ir.clone(), atom(Atomic::Cas, Ty::U32, Some(word), None), "Cas has too few operands");
    check(ir.clone(), atom(Atomic::Add, Ty::U32, Some(word), Some(i(1))), "Add has too many operands");
    check(ir.clone(), atom(Atomic::Exch, Ty::U32, None, None), "Exch without its old value");
    check(ir.clone(), atom(Atomic::Cas, Ty::U32, None, Some(i(1))), "Cas without its old value");
    check(ir.clone(), atom(Atomic::Max, Ty::F32, Some(word), None), "atomic Max on F32 does not exist");
    check(ir.clone(), atom(Atomic::Add, Ty::Bf16x2, Some(word), None), "atomic Add on Bf16x2 does not exist");
    let half = ir.half();
    check(ir, atom(Atomic::And, Ty::U16, Some(half), None), "atomic And on U16 does not exist");
}

#[test]
fn the_shared_layout_and_the_threads_fit_the_target() {
    check_kernel(|ir| ir.shared_bytes = 232_449, "shared layout of 232449 bytes, sm_90a allows 232448");
    for threads in [0, 16, 1056] {
        check_kernel(|ir| ir.bounds.threads = threads, "a multiple of 32 up to 1024 is needed");
    }
    check_kernel(|ir| ir.bounds.min_ctas = 0, "at least one CTA");
}

#[test]
fn named_barriers_have_ids_below_16_and_whole_warps() {
    let ir = Ir::sound();
    check(ir.clone(), Op::BarSync { id: i(16), threads: None }, "barrier 16, ids are below 16");
    check(ir.clone(), Op::BarSync { id: i(1), threads: Some(48) }, "a barrier of 48 threads");
    check(ir.clone(), Op::BarArrive { id: i(1), threads: 0 }, "a barrier of 0 threads");
    check(ir, Op::BarArrive { id: i(1), threads: 256 }, "a barrier of 256 threads in a CTA of 128");
}

#[test]
fn mbarriers_count_what_they_can() {
    let mut ir = Ir::sound();
    let addr = op::Address { base: Operand::Reg(ir.shared_base()), offset: 0 };
    check(ir.clone(), Op::MbarInit { addr, count: 0 }, "mbarrier count 0 is not in 1..2^20");
    check(ir.clone(), Op::MbarArrive { addr, count: 1 << 20 }, "mbarrier count 1048576");
    check(ir.clone(), Op::MbarExpectTx { addr, bytes: i(1 << 20) }, "expects 1048576 bytes");
    check(ir.clone(), Op::MbarArriveExpectTx { addr, bytes: i(u32::MAX as u64) }, "expects 4294967295 bytes");
    let dst = ir.fresh(Class::Pred);
    check(ir.clone(), Op::MbarTryWait { dst, addr, parity: i(2), scope: Scope::Cta }, "parity 2 is neither 0 nor 1");
    check(ir, Op::MbarTestWait { dst, addr, parity: i(3) }, "parity 3 is neither 0 nor 1");
}

#[test]
fn bit_fields_lie_within_reach() {
    let mut ir = Ir::sound();
    let dst = ir.word();
    check(ir.clone(), Op::Bfe { dst, a: i(0), pos: i(256), len: i(1) }, "a bit field of");
    check(ir, Op::Bfe { dst, a: i(0), pos: i(1), len: i(256) }, "at most 255 are possible");
}

#[test]
fn warpgroup_products_have_a_shape_a_warpgroup_and_the_target() {
    let mut ir = Ir::sound();
    let word = ir.word();
    let wgmma = |n, registers| Op::Wgmma {
        input: MmaInput::Bf16,
        n,
        acc: vec![word; registers].into(),
        a: WgmmaA::Descriptor(i(0)),
        b: i(0),
        scale_d: ScaleD::Const(true),
    };
    check(ir.clone(), wgmma(12, 6), "with n = 12 and 6 accumulators");
    check(ir.clone(), wgmma(264, 132), "with n = 264");
    check(ir.clone(), wgmma(0, 0), "with n = 0");
    check(ir.clone(), wgmma(16, 4), "with n = 16 and 4 accumulators");
    let mut small = ir.clone();
    small.0.bounds.threads = 96;
    check(small.clone(), wgmma(8, 4), "a CTA of 96 threads has no warpgroup");
    check(small, Op::WgmmaCommit, "a CTA of 96 threads has no warpgroup");
    let mut blackwell = ir;
    blackwell.0.target = Target::Sm100a;
    check(blackwell.clone(), wgmma(8, 4), "does not exist on sm_100a");
    for op in [Op::WgmmaFence, Op::WgmmaCommit, Op::WgmmaWait { pending: 0 }] {
        check(blackwell.clone(), op, "does not exist on sm_100a");
    }
}

#[test]
fn register_counts_are_what_setmaxnreg_takes() {
    let ir = Ir::sound();
    for count in [16, 44, 264] {
        check(ir.clone(), Op::SetMaxNReg { inc: true, count }, "a multiple of 8 in 24..=256 is needed");
    }
    let mut small = ir;
    small.0.bounds.threads = 64;
    check(small, Op::SetMaxNReg { inc: false, count: 40 }, "a CTA of 64 threads has no warpgroup");
}

#[test]
fn copies_have_coordinates_and_whole_chunks() {
    let mut ir = Ir::sound();
    let long = ir.long();
    let shared = op::Address { base: Operand::Reg(ir.shared_base()), offset: 0 };
    let global = op::Address { base: Operand::Reg(long), offset: 0 };
    let tensor = |n| Op::TensorG2s { dst: shared, map: long, coords: vec![i(0); n].into(), mbar: shared, policy: None };
    check(ir.clone(), tensor(0), "a tensor copy with 0 coordinates");
    check(ir.clone(), tensor(6), "a tensor copy with 6 coordinates");
    for bytes in [0, 8, 24] {
        let rule = format!("a bulk copy of {bytes} bytes");
        let load = Op::BulkG2s { dst: shared, src: global, bytes: i(bytes), mbar: shared, policy: None };
        check(ir.clone(), load, &rule);
        check(ir.clone(), Op::BulkS2g { dst: global, src: shared, bytes: i(bytes) }, &rule);
        check(ir.clone(), Op::PrefetchL2 { addr: global, bytes: i(bytes) }, &rule);
    }
}

#[test]
fn dependents_are_launched_only_by_a_kernel_that_waits() {
    let mut ir = Ir::sound();
    check(ir.clone(), Op::GridDepLaunch, "never waits for its own dependencies");
    ir.push(Op::GridDepWait);
    ir.push(Op::GridDepLaunch);
    assert_eq!(ir.verify(), Ok(()));
}

#[test]
fn a_build_names_the_line_of_the_kernels_author() {
    let line = line!() + 3;
    let error = build::<()>("uninitialised", Target::Sm90a, LaunchBounds::threads(32), |()| {
        let value = Var::<u32>::undefined();
        let _ = value.get().eq(1);
    })
    .unwrap_err();
    assert_eq!(error.kernel, "uninitialised");
    let at = error.at.unwrap();
    assert!(at.contains(&format!("tests/verify.rs:{line}:")), "{at}");
}

#[test]
fn the_first_violation_in_text_order_is_reported() {
    let mut ir = Ir::sound();
    let dst = ir.fresh(Class::Pred);
    ir.push(Op::BarSync { id: i(16), threads: None });
    ir.push(Op::Setp { cmp: Cmp::Eq, ty: Ty::U64, dst, a: Operand::Reg(dst), b: i(0) });
    assert!(ir.verify().unwrap_err().rule.contains("barrier 16"));
}

#[test]
fn multicast_stores_have_one_element_or_pairs_of_bf16() {
    let mut ir = Ir::sound();
    let (word, long) = (ir.word(), ir.long());
    let addr = Address { base: Operand::Reg(long), offset: 0 };
    let store = |ty, reg, n| Op::MultimemSt { ty, srcs: vec![reg; n].into(), addr };
    for op in [store(Ty::U32, word, 1), store(Ty::U64, long, 1), store(Ty::Bf16x2, word, 2), store(Ty::Bf16x2, word, 4)]
    {
        let mut sound = ir.clone();
        sound.push(op);
        sound.verify().unwrap();
    }
    check(ir.clone(), store(Ty::U16, word, 1), "a multicast store of 1 x U16 does not exist");
    check(ir.clone(), store(Ty::U32, word, 4), "a multicast store of 4 x U32 does not exist");
    check(ir.clone(), store(Ty::U64, long, 2), "a multicast store of 2 x U64 does not exist");
    check(ir, store(Ty::Bf16x2, word, 3), "a vector access of 3 x 4 bytes");
}

#[test]
fn cluster_instructions_need_a_cluster_that_holds_them() {
    let mut alone = Ir::sound();
    let (word, pred, base) = (alone.word(), alone.pred(), alone.shared_base());
    let addr = Address { base: Operand::Reg(word), offset: 0 };
    let shared = Address { base: Operand::Reg(base), offset: 0 };
    let mapa = |rank| Op::Mapa { dst: word, addr: base, rank: i(rank) };
    let st_async = |ty, n| Op::StAsync { ty, srcs: vec![Operand::Reg(word); n].into(), addr, mbar: addr };
    let ld = Op::Ld {
        space: Space::Cluster,
        ty: Ty::U32,
        sem: Sem::Weak,
        cache: Cache::default(),
        dsts: [word].into(),
        addr,
    };
    let st = Op::St { space: Space::Cluster, ty: Ty::U32, sem: Sem::Weak, policy: None, srcs: [i(1)].into(), addr };
    let wait = |scope| Op::MbarTryWait { dst: pred, addr: shared, parity: i(0), scope };
    let all = [
        mapa(0),
        st_async(Ty::U32, 4),
        ld.clone(),
        st.clone(),
        wait(Scope::Cluster),
        Op::ClusterArrive { release: true },
        Op::ClusterWait,
        Op::Special { dst: word, reg: Special::ClusterCtarank },
        Op::Special { dst: word, reg: Special::ClusterNctarank },
    ];
    let mut together = alone.clone();
    together.0.bounds.cluster = Some(8);
    for op in all {
        check(alone.clone(), op.clone(), "a cluster instruction in a kernel without clusters");
        let mut sound = together.clone();
        sound.push(op);
        sound.verify().unwrap();
    }
    check(together.clone(), mapa(8), "rank 8 in clusters of 8 CTAs");
    check(together.clone(), st_async(Ty::U16, 2), "elements have 4 or 8 bytes");
    check(together.clone(), st_async(Ty::U32, 3), "a vector access of 3 x 4 bytes");
    check(together.clone(), wait(Scope::Gpu), "scope Gpu, which is more than a cluster");
    let hinted = Op::Ld {
        space: Space::Cluster,
        ty: Ty::U32,
        sem: Sem::Weak,
        cache: Cache { no_allocate: true, ..Cache::default() },
        dsts: [word].into(),
        addr,
    };
    check(together.clone(), hinted, "a shared load cannot have cache hints");
    let sem = Sem::Relaxed(Scope::Cluster);
    let (op, ty, dst, a, b) = (Atomic::Add, Ty::U32, None, i(1), None);
    check(together, Op::Atom { space: Space::Cluster, op, ty, sem, dst, addr, a, b }, "atomics on shared memory");
    for size in [0, 17] {
        let mut odd = alone.clone();
        odd.0.bounds.cluster = Some(size);
        let error = odd.verify().unwrap_err();
        assert!(error.rule.contains(&format!("clusters of {size} CTAs")), "{error}");
    }
}

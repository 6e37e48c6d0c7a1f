//! The PTX text of each instruction family.

mod common;

use common::{EveryKind, EveryKindParams, Ir, i};
use ptx::op::{MmaInput, Op, Operand, ScaleD, WgmmaA};
use ptx::*;

/// The instructions of a kernel of 128 threads for `sm_90a`, one a line, without declarations and line information.
fn text(body: impl FnOnce(EveryKindParams)) -> Vec<String> {
    let kernel = build::<EveryKind>("printed", Target::Sm90a, LaunchBounds::threads(128), body).unwrap();
    instructions(&kernel.ptx())
}

fn instructions(ptx: &str) -> Vec<String> {
    let (_, body) = ptx.split_once("{\n").expect("a body");
    let lines = body.lines().map(str::trim).filter(|line| !line.starts_with(".loc") && !line.starts_with(".reg"));
    lines.take_while(|line| *line != "}").map(String::from).collect()
}

/// Expects `body` to print exactly `want` between the parameter reads and the final return.
#[track_caller]
fn check(body: impl FnOnce(EveryKindParams), want: &[&str]) {
    let all = text(body);
    // n in %r0, out in %d0, map in %d1.
    let (params, rest) = all.split_at(4);
    assert_eq!(
        params,
        [
            "ld.param.b32 %r0, [p0_n];",
            "ld.param.b64 %d0, [p1_out];",
            "mov.b64 %d1, p2_map;",
            "cvta.param.u64 %d1, %d1;"
        ]
    );
    let (last, got) = rest.split_last().expect("a return");
    assert_eq!(last, "ret;");
    assert_eq!(got, want);
}

#[test]
fn the_header_names_version_target_parameters_and_bounds() {
    let bounds = LaunchBounds::threads(256).min_ctas(2);
    let kernel = build::<EveryKind>("header", Target::Sm100a, bounds, |p| {
        SharedArray::<u32>::new("words", 8).at(0).store(p.n);
    })
    .unwrap();
    let ptx = kernel.ptx();
    let lines: Vec<&str> = ptx.lines().collect();
    assert_eq!(&lines[..3], [".version 8.8", ".target sm_100a", ".address_size 64"]);
    let files: Vec<_> = lines.iter().filter(|line| line.starts_with(".file")).collect();
    // Parameter reads belong to the macro's use, everything else to the body.
    assert!(files.iter().any(|line| line.contains("tests/print.rs")), "{files:?}");
    let at = lines.iter().position(|line| line.starts_with(".extern")).unwrap();
    assert_eq!(
        &lines[at..at + 9],
        [
            ".extern .shared .align 1024 .b8 smem[];",
            ".visible .entry header(",
            "    .param .b32 p0_n,",
            "    .param .b64 p1_out,",
            "    .param .align 64 .b8 p2_map[128]",
            ")",
            ".reqntid 256, 1, 1 .minnctapersm 2",
            "{",
            "    .reg .b32 %r<2>;",
        ]
    );
}

#[test]
fn a_register_cap_replaces_the_residency() {
    let bounds = LaunchBounds::threads(64).min_ctas(4).max_registers(40);
    let kernel = build::<()>("capped", Target::Sm90a, bounds, |()| {}).unwrap();
    assert!(kernel.ptx().contains(".reqntid 64, 1, 1 .maxnreg 40\n"));
    assert!(!kernel.ptx().contains(".extern .shared"), "no shared memory, no symbol");
}

#[test]
fn every_instruction_carries_the_line_that_emitted_it() {
    let line = line!() + 2;
    let kernel = build::<()>("lines", Target::Sm90a, LaunchBounds::threads(32), |()| {
        sync_warp();
        sync_threads();
        sync_threads();
    })
    .unwrap();
    let ptx = kernel.ptx();
    let locs: Vec<(&str, &str)> =
        ptx.lines().zip(ptx.lines().skip(1)).filter(|(loc, _)| loc.trim().starts_with(".loc")).collect();
    for (n, instruction) in ["bar.warp.sync 0xffffffff;", "bar.sync 0;", "bar.sync 0;"].into_iter().enumerate() {
        assert!(locs[n].0.contains(&format!(" {} ", line + n as u32)), "{locs:?}");
        assert_eq!(locs[n].1.trim(), instruction);
    }
}

#[test]
fn integers() {
    check(
        |p| {
            let x = p.n;
            let _ = (x + 3, x - 1, x * 70_000, x / x, x % x);
            let _ = (x & 0xFF, x | 1, x ^ x, x << 4, x >> x, !x);
            let _ = (x.as_i32() + -3, x.as_i32() >> 2, x.as_i32().max(-1));
            let _ = (x.mad(4, x), x.mul_hi(x), x.mul_wide(8), x.mad_wide(4, 1u64));
            let _ = (x.popc(), x.clz(), x.reverse_bits());
        },
        &[
            "add.u32 %r1, %r0, 3;",
            "sub.u32 %r2, %r0, 1;",
            "mul.lo.u32 %r3, %r0, 0x11170;",
            "div.u32 %r4, %r0, %r0;",
            "rem.u32 %r5, %r0, %r0;",
            "and.b32 %r6, %r0, 255;",
            "or.b32 %r7, %r0, 1;",
            "xor.b32 %r8, %r0, %r0;",
            "shl.b32 %r9, %r0, 4;",
            "shr.u32 %r10, %r0, %r0;",
            "not.b32 %r11, %r0;",
            "add.s32 %r12, %r0, -3;",
            "shr.s32 %r13, %r0, 2;",
            "max.s32 %r14, %r0, -1;",
            "mad.lo.u32 %r15, %r0, 4, %r0;",
            "mul.hi.u32 %r16, %r0, %r0;",
            "mul.wide.u32 %d2, %r0, 8;",
            "mad.wide.u32 %d3, %r0, 4, 1;",
            "popc.b32 %r17, %r0;",
            "clz.b32 %r18, %r0;",
            "brev.b32 %r19, %r0;",
        ],
    );
}

#[test]
fn division_by_a_constant_is_no_division() {
    check(
        |p| {
            let x = p.n;
            let _ = (x / 1, x / 64, x % 64);
            let _ = (x / 264, x / 7, x % 3);
            let _ = (x.to_u64() / 8u64, x.to_u64() % 5u64);
            let _ = (x.as_i32() / 4, Reg::<u32>::from(20) / 3);
        },
        &[
            "shr.u32 %r1, %r0, 6;",
            "and.b32 %r2, %r0, 63;",
            "shr.u32 %r3, %r0, 3;",
            "mul.hi.u32 %r4, %r3, 0xf83e0f84;",
            "shr.u32 %r5, %r4, 5;",
            "mul.hi.u32 %r6, %r0, 0x24924925;",
            "sub.u32 %r7, %r0, %r6;",
            "shr.u32 %r8, %r7, 1;",
            "add.u32 %r9, %r8, %r6;",
            "shr.u32 %r10, %r9, 2;",
            "mul.hi.u32 %r11, %r0, 0xaaaaaaab;",
            "shr.u32 %r12, %r11, 1;",
            "mul.lo.u32 %r13, %r12, 3;",
            "sub.u32 %r14, %r0, %r13;",
            "cvt.u64.u32 %d2, %r0;",
            "shr.u64 %d3, %d2, 3;",
            // These stay: 64-bit numbers by other constants, and signed ones.
            "cvt.u64.u32 %d4, %r0;",
            "rem.u64 %d5, %d4, 5;",
            "div.s32 %r15, %r0, 4;",
        ],
    );
}

#[test]
fn bits() {
    check(
        |p| {
            let x = p.n;
            let _ = (x.bits(3, 5), x.permute(x, 0x5410), x.lop3(x, 7, 0xE8));
            let _ = (x.funnel_shl(x, 3), x.funnel_shr(5, x), x.max_u16x2(x));
            let (low, high) = x.pack(9).unpack();
            let _ = low.to_u16().pack(high.to_u16());
        },
        &[
            "bfe.u32 %r1, %r0, 3, 5;",
            "prmt.b32 %r2, %r0, %r0, 21520;",
            "lop3.b32 %r3, %r0, %r0, 7, 0xe8;",
            "shf.l.clamp.b32 %r4, %r0, %r0, 3;",
            "shf.r.clamp.b32 %r5, %r0, 5, %r0;",
            "max.u16x2 %r6, %r0, %r0;",
            "mov.b64 %d2, {%r0, 9};",
            "mov.b64 {%r7, %r8}, %d2;",
            "cvt.u16.u32 %h0, %r7;",
            "cvt.u16.u32 %h1, %r8;",
            "mov.b32 %r9, {%h0, %h1};",
        ],
    );
}

#[test]
fn floats() {
    check(
        |p| {
            let x: Reg<f32> = p.n.bitcast();
            let _ = (x + 1.0, x * -0.5, x.fma(2.0, x), x.div_rn(3.0), x.div_full(x), -x, x.abs());
            let _ = (x.max(0.0), x.math(Math::RsqrtApprox), x.to_u32(), p.n.to_f32(), x.lt(f32::INFINITY));
        },
        &[
            "add.rn.f32 %r1, %r0, 0f3F800000;",
            "mul.rn.f32 %r2, %r0, 0fBF000000;",
            "fma.rn.f32 %r3, %r0, 0f40000000, %r0;",
            "div.rn.f32 %r4, %r0, 0f40400000;",
            "div.full.f32 %r5, %r0, %r0;",
            "neg.f32 %r6, %r0;",
            "abs.f32 %r7, %r0;",
            "max.f32 %r8, %r0, 0f00000000;",
            "rsqrt.approx.f32 %r9, %r0;",
            "cvt.rzi.u32.f32 %r10, %r0;",
            "cvt.rn.f32.u32 %r11, %r0;",
            "setp.lt.f32 %p0, %r0, 0f7F800000;",
        ],
    );
}

#[test]
fn predicates() {
    check(
        |p| {
            let (a, b) = (p.n.ge(3), p.n.as_i32().ne(-2));
            let _ = (a & b, a | b, a ^ b, !a, Pred::constant(true), Pred::constant(false));
            let _ = (a.select::<f32>(1.0, 2.0), b.as_u32());
        },
        &[
            "setp.ge.u32 %p0, %r0, 3;",
            "setp.ne.s32 %p1, %r0, -2;",
            "and.pred %p2, %p0, %p1;",
            "or.pred %p3, %p0, %p1;",
            "xor.pred %p4, %p0, %p1;",
            "not.pred %p5, %p0;",
            "setp.eq.u32 %p6, 0, 0;",
            "setp.ne.u32 %p7, 0, 0;",
            "selp.b32 %r1, 0x3f800000, 0x40000000, %p0;",
            "selp.b32 %r2, 1, 0, %p1;",
        ],
    );
}

#[test]
fn packed_and_converted() {
    check(
        |p| {
            let x: Reg<f32> = p.n.bitcast();
            let (a, b) = (Reg::<Bf16x2>::from_f32(x, 1.0.into()), Reg::<Bf16x2>::from_f32_relu(x, x));
            let _ = (a + b, a * b, a.max(b), a.max_nan(b), a.fma(b, a), a.fma_relu(b, a));
            let _ = a + Reg::from(Bf16x2(0));
            let _ = b.splat();
            let _ = Reg::<F16x2>::from_e4m3x2(e4m3x2_from_f32(x, x)).to_e4m3x2();
            let _ = Reg::from(1.0f32).to_bf16().to_f32();
            let _ = Reg::from(-7i32).to_i64();
        },
        &[
            "cvt.rn.bf16x2.f32 %r1, 0f3F800000, %r0;",
            "cvt.rn.relu.bf16x2.f32 %r2, %r0, %r0;",
            "add.rn.bf16x2 %r3, %r1, %r2;",
            "mul.rn.bf16x2 %r4, %r1, %r2;",
            "max.bf16x2 %r5, %r1, %r2;",
            "max.NaN.bf16x2 %r6, %r1, %r2;",
            "fma.rn.bf16x2 %r7, %r1, %r2, %r1;",
            "fma.rn.relu.bf16x2 %r8, %r1, %r2, %r1;",
            "mov.b32 %r9, 0;",
            "add.rn.bf16x2 %r10, %r1, %r9;",
            "mov.b32 {%h0, %h1}, %r2;",
            "mov.b32 %r11, {%h0, %h0};",
            "mov.b32 %r12, {%h1, %h1};",
            "cvt.rn.satfinite.e4m3x2.f32 %h2, %r0, %r0;",
            "cvt.rn.f16x2.e4m3x2 %r13, %h2;",
            "cvt.rn.satfinite.e4m3x2.f16x2 %h3, %r13;",
            "cvt.rn.bf16.f32 %h4, 0f3F800000;",
            "cvt.f32.bf16 %r14, %h4;",
            "cvt.s64.s32 %d2, -7;",
        ],
    );
}

#[test]
fn global_memory() {
    check(
        |p| {
            let at = p.out.at(p.n);
            let _ = (at.load(), at.offset(-2).load(), at.cast::<u8>().load(), p.out.cast::<u64>().load_vec::<2>());
            let stream = LoadMode::STREAM.policy(Policy::evict_first());
            let _ = (at.load_as(stream), at.load_as(LoadMode::acquire(Scope::Sys)), at.load_as(LoadMode::VOLATILE));
            at.store(5);
            at.cast::<u16>().store(p.n);
            at.store_vec_as(Sem::Relaxed(Scope::Gpu), [p.n; 4]);
            at.store_as(Sem::Release(Scope::Sys), p.n);
            at.prefetch_l2(256);
        },
        &[
            "mad.wide.u32 %d2, %r0, 4, %d0;",
            "ld.global.b32 %r1, [%d2];",
            "ld.global.b32 %r2, [%d2+-8];",
            "ld.global.u8 %r3, [%d2];",
            "ld.global.v2.b64 {%d3, %d4}, [%d0];",
            "createpolicy.fractional.L2::evict_first.b64 %d5, 1.0;",
            "ld.global.nc.L1::no_allocate.L2::cache_hint.b32 %r4, [%d2], %d5;",
            "ld.acquire.sys.global.b32 %r5, [%d2];",
            "ld.volatile.global.b32 %r6, [%d2];",
            "st.global.b32 [%d2], 5;",
            "st.global.u16 [%d2], %r0;",
            "st.relaxed.gpu.global.v4.b32 [%d2], {%r0, %r0, %r0, %r0};",
            "st.release.sys.global.b32 [%d2], %r0;",
            "cp.async.bulk.prefetch.L2.global [%d2], 256;",
        ],
    );
}

#[test]
fn shared_memory() {
    let all = text(|p| {
        let words = SharedArray::<u32>::aligned("words", 16, 64);
        words.at(p.n).store(p.n);
        let _ = words.at(3).load();
    });
    // The base is read once, above everything.
    assert_eq!(all[0], "mov.u32 %r1, smem;");
    assert_eq!(
        &all[5..9],
        ["shl.b32 %r2, %r0, 2;", "add.u32 %r3, %r1, %r2;", "st.shared.b32 [%r3], %r0;", "ld.shared.b32 %r4, [%r1+12];"]
    );
}

#[test]
fn atomics() {
    check(
        |p| {
            let relaxed = Sem::Relaxed(Scope::Gpu);
            let _ = p.out.atomic(Atomic::Add, Sem::AcqRel(Scope::Sys), 1);
            p.out.reduce(Atomic::Or, Sem::Release(Scope::Gpu), 1);
            let _ = p.out.cast::<f32>().atomic(Atomic::Add, relaxed, 1.0);
            let _ = p.out.cast::<i32>().atomic(Atomic::Min, relaxed, -1);
            let _ = p.out.cast::<i64>().atomic(Atomic::Add, relaxed, -1i64);
            let _ = p.out.compare_swap(relaxed, 0, 7);
            fence(Scope::Gpu);
            fence_sc(Scope::Sys);
        },
        &[
            "atom.acq_rel.sys.global.add.u32 %r1, [%d0], 1;",
            "red.release.gpu.global.or.b32 [%d0], 1;",
            "atom.relaxed.gpu.global.add.f32 %r2, [%d0], 0f3F800000;",
            "atom.relaxed.gpu.global.min.s32 %r3, [%d0], -1;",
            "atom.relaxed.gpu.global.add.u64 %d2, [%d0], -1;",
            "atom.relaxed.gpu.global.cas.b32 %r4, [%d0], 0, 7;",
            "fence.acq_rel.gpu;",
            "fence.sc.sys;",
        ],
    );
}

#[test]
fn warps_and_barriers() {
    check(
        |p| {
            let pred = p.n.eq(0);
            let _ = (shuffle_xor(p.n, 16), shuffle(Shuffle::Up, p.n, 1), broadcast(p.n, 3));
            let _ = (all(pred), any(pred), ballot(pred), redux(Redux::AddU32, p.n), match_any(p.n));
            let _ = (elect(), active_mask(), lane_index(), globaltimer());
            sync_warp();
            sync_threads();
            sync_named(p.n, 64);
            arrive_named(3, 96);
            nanosleep(20);
        },
        &[
            "setp.eq.u32 %p0, %r0, 0;",
            "shfl.sync.bfly.b32 %r1, %r0, 16, 31, 0xffffffff;",
            "shfl.sync.up.b32 %r2, %r0, 1, 0, 0xffffffff;",
            "shfl.sync.idx.b32 %r3, %r0, 3, 31, 0xffffffff;",
            "vote.sync.all.pred %p1, %p0, 0xffffffff;",
            "vote.sync.any.pred %p2, %p0, 0xffffffff;",
            "vote.sync.ballot.b32 %r4, %p0, 0xffffffff;",
            "redux.sync.add.u32 %r5, %r0, 0xffffffff;",
            "match.any.sync.b32 %r6, %r0, 0xffffffff;",
            "elect.sync _|%p3, 0xffffffff;",
            "activemask.b32 %r7;",
            "mov.u32 %r8, %laneid;",
            "mov.u64 %d2, %globaltimer;",
            "bar.warp.sync 0xffffffff;",
            "bar.sync 0;",
            "bar.sync %r0, 64;",
            "bar.arrive 3, 96;",
            "nanosleep.u32 20;",
        ],
    );
}

#[test]
fn mbarriers_and_copies() {
    let all = text(|p| {
        let tile = SharedArray::<u8>::aligned("tile", 1024, 1024);
        let bar = MbarrierArray::new("bar", 1).at(0);
        bar.init(1);
        fence_mbarrier_init();
        fence_proxy_async();
        bar.arrive_expect(128);
        bar.expect(p.n);
        bar.arrive();
        copy_tensor(tile.ptr(), p.map, &[Reg::from(0), p.n, Reg::from(u32::MAX)], bar, None);
        copy_bulk(tile.ptr(), p.out.cast(), 64, bar, Some(Policy::evict_first()));
        let _ = bar.try_wait(1);
        store_bulk(p.out.cast(), tile.ptr(), p.n);
        commit_bulk();
        wait_bulk_read(1);
        wait_bulk(0);
        prefetch_tensor_map(p.map);
        bar.invalidate();
    });
    let copy = "cp.async.bulk";
    let complete = "mbarrier::complete_tx::bytes";
    assert_eq!(
        &all[5..all.len() - 1],
        [
            "mbarrier.init.shared::cta.b64 [%r1+1024], 1;".to_string(),
            "fence.mbarrier_init.release.cluster;".into(),
            "fence.proxy.async.shared::cta;".into(),
            "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%r1+1024], 128; }".into(),
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1+1024], %r0;".into(),
            "{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%r1+1024]; }".into(),
            format!(
                "{copy}.tensor.3d.shared::cluster.global.tile.{complete} [%r1], [%d1, {{0, %r0, -1}}], [%r1+1024];"
            ),
            "createpolicy.fractional.L2::evict_first.b64 %d2, 1.0;".into(),
            format!("{copy}.shared::cluster.global.{complete}.L2::cache_hint [%r1], [%d0], 64, [%r1+1024], %d2;"),
            "mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r1+1024], 1;".into(),
            "cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], %r0;".into(),
            "cp.async.bulk.commit_group;".into(),
            "cp.async.bulk.wait_group.read 1;".into(),
            "cp.async.bulk.wait_group 0;".into(),
            "prefetch.tensormap [%d1];".into(),
            "mbarrier.inval.shared::cta.b64 [%r1+1024];".into(),
        ]
    );
}

#[test]
fn warpgroup_products() {
    check(
        |_| {
            let acc = Accumulator::new(8);
            wgmma_fence();
            acc.mma_e4m3(Reg::from(1u64), Reg::from(2u64), false);
            acc.mma_bf16(Reg::from(1u64), Reg::from(2u64), true);
            wgmma_commit();
            wgmma_wait(1);
        },
        &[
            "wgmma.fence.sync.aligned;",
            "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%r1, %r2, %r3, %r4}, 1, 2, 0, 1, 1;",
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1, %r2, %r3, %r4}, 1, 2, 1, 1, 1, 0, 0;",
            "wgmma.commit_group.sync.aligned;",
            "wgmma.wait_group.sync.aligned 1;",
        ],
    );
    // The forms that the builder does not use: A in registers has one transposition less, scale-d a predicate.
    let mut ir = Ir::sound();
    let (word, pred) = (ir.word(), ir.pred());
    let fragment = WgmmaA::Regs([word; 4]);
    let acc: Box<[_]> = [word; 4].into();
    let scale_d = ScaleD::Pred(pred);
    ir.push(Op::Wgmma { input: MmaInput::Bf16, n: 8, acc, a: fragment, b: i(2), scale_d });
    let r = |n| format!("%r{n}");
    let all = instructions(&print::print(&ir.0));
    let w = r(word.index);
    let p = format!("%p{}", pred.index);
    assert_eq!(
        all[all.len() - 2],
        format!(
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{w}, {w}, {w}, {w}}}, {{{w}, {w}, {w}, {w}}}, 2, {p}, 1, 1, 0;"
        )
    );
    assert_eq!(Operand::Reg(word).reg(), Some(word));
}

#[test]
fn launches() {
    check(
        |_| {
            wait_for_dependencies();
            launch_dependents();
            shrink_registers(40);
            grow_registers(232);
        },
        &[
            "griddepcontrol.wait;",
            "griddepcontrol.launch_dependents;",
            "setmaxnreg.dec.sync.aligned.u32 40;",
            "setmaxnreg.inc.sync.aligned.u32 232;",
        ],
    );
}

#[test]
fn branches_and_loops() {
    check(
        |p| {
            when(p.n.eq(0), sync_warp);
            when_else(p.n.eq(1), sync_warp, trap);
        },
        &[
            "setp.eq.u32 %p0, %r0, 0;",
            "@!%p0 bra L0;",
            "bar.warp.sync 0xffffffff;",
            "L0:",
            "setp.eq.u32 %p1, %r0, 1;",
            "@!%p1 bra L1;",
            "bar.warp.sync 0xffffffff;",
            "bra L2;",
            "L1:",
            "trap;",
            "L2:",
        ],
    );
    check(
        |p| {
            repeat(|l| {
                l.continue_if(p.n.eq(2));
                l.break_if(p.n.eq(3));
            });
            exit_if(p.n.eq(4));
        },
        &[
            ".pragma \"nounroll\";",
            "L0:",
            "setp.eq.u32 %p0, %r0, 2;",
            "@%p0 bra L0;",
            "setp.eq.u32 %p1, %r0, 3;",
            "@%p1 bra L1;",
            "bra L0;",
            "L1:",
            "setp.eq.u32 %p2, %r0, 4;",
            "@!%p2 bra L2;",
            "ret;",
            "L2:",
        ],
    );
    // The condition runs every round; the counter is read anew for condition and body.
    check(
        |p| for_range(0, p.n, 2, |at| nanosleep(at)),
        &[
            "mov.b32 %r1, 0;",
            ".pragma \"nounroll\";",
            "L0:",
            "mov.b32 %r2, %r1;",
            "setp.lt.u32 %p0, %r2, %r0;",
            "@!%p0 bra L1;",
            "mov.b32 %r3, %r1;",
            "nanosleep.u32 %r3;",
            "add.u32 %r1, %r1, 2;",
            "bra L0;",
            "L1:",
        ],
    );
}

#[test]
fn multicast_stores() {
    check(
        |p| {
            let at = Multicast::from_address(p.out.address());
            at.byte_offset(4).store(p.n);
            at.store_u64(p.out.address());
            at.store_vec([p.n; 2]);
            at.byte_at(p.out.address()).store_vec([p.n, p.n, p.n, Reg::from(3)]);
        },
        &[
            "multimem.st.relaxed.sys.global.b32 [%d0+4], %r0;",
            "multimem.st.relaxed.sys.global.b64 [%d0], %d0;",
            "multimem.st.relaxed.sys.global.v2.bf16x2 [%d0], {%r0, %r0};",
            "add.u64 %d2, %d0, %d0;",
            "mov.b32 %r1, 3;",
            "multimem.st.relaxed.sys.global.v4.bf16x2 [%d2], {%r0, %r0, %r0, %r1};",
        ],
    );
}

#[test]
fn clusters() {
    let bounds = LaunchBounds::threads(64).cluster(8);
    let kernel = build::<EveryKind>("in_clusters", Target::Sm90a, bounds, |p| {
        let words = SharedArray::<u32>::aligned("words", 8, 16);
        let full = MbarrierArray::new("full", 1).at(0);
        cluster_arrive_relaxed();
        cluster_wait();
        let theirs = words.at(4).of_cta(p.n);
        theirs.store(p.n);
        let [a, b] = theirs.offset(2).load_vec();
        theirs.store_async([p.n, a, b, a], full.of_cta(3));
        theirs.store_async([p.n], full.of_cta(cluster_rank()));
        full.wait_cluster(0);
        cluster_sync();
        let _ = cluster_size();
    })
    .unwrap();
    let ptx = kernel.ptx();
    assert!(ptx.contains(".reqntid 64, 1, 1 .minnctapersm 1 .reqnctapercluster 8, 1, 1\n"), "{ptx}");
    let complete = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes";
    let got = instructions(&ptx);
    let want = [
        "barrier.cluster.arrive.relaxed.aligned;",
        "barrier.cluster.wait.acquire.aligned;",
        "add.u32 %r2, %r1, 16;",
        "mapa.shared::cluster.u32 %r3, %r2, %r0;",
        "st.shared::cluster.b32 [%r3], %r0;",
        "ld.shared::cluster.v2.b32 {%r4, %r5}, [%r3+8];",
        "add.u32 %r6, %r1, 32;",
        "mapa.shared::cluster.u32 %r7, %r6, 3;",
        &format!("{complete}.v4.b32 [%r3], {{%r0, %r4, %r5, %r4}}, [%r7];"),
        "mov.u32 %r8, %cluster_ctarank;",
        "add.u32 %r9, %r1, 32;",
        "mapa.shared::cluster.u32 %r10, %r9, %r8;",
        &format!("{complete}.b32 [%r3], %r0, [%r10];"),
        "L0:",
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p0, [%r1+32], 0;",
        "@!%p0 bra L0;",
        "barrier.cluster.arrive.release.aligned;",
        "barrier.cluster.wait.acquire.aligned;",
        "mov.u32 %r11, %cluster_nctarank;",
        "ret;",
    ];
    assert_eq!(&got[got.len() - want.len()..], want);
}

#[test]
fn warp_products() {
    check(
        |p| {
            let pair = Reg::<Bf16x2>::from_bits(p.n);
            let tile = MmaTile::zero();
            tile.mma_bf16([pair; 4], [pair; 2]);
            let _ = tile.get(2);
        },
        &[
            "mov.b32 %r1, 0;",
            "mov.b32 %r2, 0;",
            "mov.b32 %r3, 0;",
            "mov.b32 %r4, 0;",
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1, %r2, %r3, %r4}, {%r0, %r0, %r0, %r0}, \
             {%r0, %r0}, {%r1, %r2, %r3, %r4};",
            "mov.b32 %r5, %r3;",
        ],
    );
}

#[test]
fn matrix_loads() {
    let all = text(|_| {
        let rows = SharedArray::<u16>::aligned("rows", 256, 16);
        let _ = rows.ptr().load_matrices::<1>();
        let _ = rows.at(8).load_matrices::<2>();
        let _ = rows.ptr().load_matrices::<4>();
        let _ = rows.ptr().load_matrices_transposed::<4>();
    });
    assert_eq!(
        &all[5..all.len() - 1],
        [
            "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];",
            "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r3, %r4}, [%r1+16];",
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r1];",
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r9, %r10, %r11, %r12}, [%r1];",
        ]
    );
}

#[test]
fn copies_by_threads() {
    let all = text(|p| {
        let rows = SharedArray::<u32>::aligned("rows", 64, 16);
        copy_16(rows.at(4), p.out, None);
        copy_16(rows.ptr(), p.out.offset(4), Some(Policy::evict_first()));
        commit_copies();
        wait_copies(1);
    });
    assert_eq!(
        &all[5..all.len() - 1],
        [
            "cp.async.cg.shared.global [%r1+16], [%d0], 16;",
            "createpolicy.fractional.L2::evict_first.b64 %d2, 1.0;",
            "cp.async.cg.shared.global.L2::cache_hint [%r1], [%d0+16], 16, %d2;",
            "cp.async.commit_group;",
            "cp.async.wait_group 1;",
        ]
    );
}

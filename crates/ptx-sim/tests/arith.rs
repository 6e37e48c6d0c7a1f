//! Every arithmetic instruction against scalar Rust, through hand-made instruction lists: 32 lanes of awkward operands,
//! in all lanes and in half of them.

use std::panic::Location;
use std::sync::Arc;

use ptx::args::{ParamDecl, ParamKind};
use ptx::op::*;
use ptx::*;
use ptx_sim::*;

const CASES: [u64; 32] = [
    0,
    1,
    2,
    3,
    31,
    32,
    33,
    63,
    64,
    0x7FFF_FFFF,
    0x8000_0000,
    0x8000_0001,
    0xFFFF_FFFF,
    0xFFFF_FFFE,
    0x1_0000_0000,
    0x7FFF_FFFF_FFFF_FFFF,
    0x8000_0000_0000_0000,
    u64::MAX,
    u64::MAX - 6,
    0x3F80_0000,
    0xBF80_0000,
    0x7F80_0000,
    0xFF80_0000,
    0x7FC0_0000,
    0xFFC0_1234,
    0x0000_0005,
    0x8000_0000,
    0x4248_F5C3,
    0xC2C8_0000,
    0x3C00_4000,
    0x0123_4567_89AB_CDEF,
    0x7F7F_FFFF,
];

fn reg(class: Class, index: u32) -> RegId {
    RegId { class, index }
}

/// Builds a kernel of one warp: loads `inputs` operands per lane (u64 words of `src[lane][k]`), converts them to their
/// classes, executes `op` (destinations first, `skip` lanes excluded), and stores the destinations as u64 words.
struct Harness {
    insts: Vec<Inst>,
    registers: [u32; 4],
}

impl Harness {
    fn fresh(&mut self, class: Class) -> RegId {
        let n = &mut self.registers[class as usize];
        *n += 1;
        reg(class, *n - 1)
    }

    #[track_caller]
    fn emit(&mut self, op: Op) {
        self.insts.push(Inst { op, loc: Location::caller() });
    }

    fn widen(&mut self, r: RegId) -> RegId {
        match r.class {
            Class::B64 => r,
            Class::B32 => {
                let d = self.fresh(Class::B64);
                self.emit(Op::Cvt { op: Cvt::U32ToU64, dst: d, a: Operand::Reg(r) });
                d
            }
            Class::B16 => {
                let w = self.fresh(Class::B32);
                self.emit(Op::Cvt { op: Cvt::U16ToU32, dst: w, a: Operand::Reg(r) });
                self.widen(w)
            }
            Class::Pred => {
                let w = self.fresh(Class::B32);
                self.emit(Op::Selp { ty: Ty::U32, dst: w, a: Operand::Imm(1), b: Operand::Imm(0), p: r });
                self.widen(w)
            }
        }
    }

    fn narrow(&mut self, r: RegId, class: Class) -> RegId {
        match class {
            Class::B64 => r,
            Class::B32 => {
                let w = self.fresh(Class::B32);
                self.emit(Op::Cvt { op: Cvt::U64ToU32, dst: w, a: Operand::Reg(r) });
                w
            }
            Class::B16 => {
                let w = self.narrow(r, Class::B32);
                let h = self.fresh(Class::B16);
                self.emit(Op::Cvt { op: Cvt::U32ToU16, dst: h, a: Operand::Reg(w) });
                h
            }
            Class::Pred => {
                let w = self.narrow(r, Class::B32);
                let bit = self.fresh(Class::B32);
                self.emit(Op::Bin { op: Bin::And, ty: Ty::U32, dst: bit, a: Operand::Reg(w), b: Operand::Imm(1) });
                let p = self.fresh(Class::Pred);
                self.emit(Op::Setp { cmp: Cmp::Ne, ty: Ty::U32, dst: p, a: Operand::Reg(bit), b: Operand::Imm(0) });
                p
            }
        }
    }
}

/// Results of `op` per lane and destination.
fn execute(
    outs: &[Class],
    ins: &[Class],
    inputs: &[[u64; 3]; 32],
    half: bool,
    make: &dyn Fn(&[RegId], &[RegId]) -> Op,
) -> Vec<Vec<u64>> {
    let mut h = Harness { insts: Vec::new(), registers: [0; 4] };
    let (base, lane, address) = (h.fresh(Class::B64), h.fresh(Class::B32), h.fresh(Class::B64));
    h.emit(Op::LdParam { dst: base, param: 0 });
    h.emit(Op::Special { dst: lane, reg: Special::Laneid });
    let (l, stride) = (Operand::Reg(lane), Operand::Imm(64));
    h.emit(Op::MadWide { ty: Ty::U32, dst: address, a: l, b: stride, c: Operand::Reg(base) });
    let at = |offset| Address { base: Operand::Reg(address), offset };
    let sources: Vec<RegId> = ins
        .iter()
        .enumerate()
        .map(|(k, class)| {
            let d = h.fresh(Class::B64);
            h.emit(Op::Ld {
                space: Space::Global,
                ty: Ty::U64,
                sem: Sem::Weak,
                cache: Cache::default(),
                dsts: Box::new([d]),
                addr: at(8 * k as i32),
            });
            h.narrow(d, *class)
        })
        .collect();
    let dsts: Vec<RegId> = outs
        .iter()
        .map(|class| {
            let zero = h.fresh(Class::B64);
            h.emit(Op::Mov { dst: zero, src: Operand::Imm(0x5A5A_5A5A_5A5A_5A5A) });
            h.narrow(zero, *class)
        })
        .collect();
    let p = h.fresh(Class::Pred);
    if half {
        h.emit(Op::Setp { cmp: Cmp::Ge, ty: Ty::U32, dst: p, a: l, b: Operand::Imm(16) });
        h.emit(Op::Bra { target: LabelId(0), cond: Some((p, true)) });
    }
    h.emit(make(&dsts, &sources));
    h.emit(Op::Label { label: LabelId(0) });
    for (k, d) in dsts.iter().enumerate() {
        let wide = h.widen(*d);
        h.emit(Op::St {
            space: Space::Global,
            ty: Ty::U64,
            sem: Sem::Weak,
            policy: None,
            srcs: Box::new([Operand::Reg(wide)]),
            addr: at(32 + 8 * k as i32),
        });
    }
    h.emit(Op::Exit);
    let ir = KernelIr {
        name: "arith".into(),
        target: Target::Sm90a,
        bounds: LaunchBounds::threads(32),
        params: vec![ParamDecl { name: "memory", kind: ParamKind::B64, offset: 0, bytes: 8 }],
        shared: Vec::new(),
        shared_bytes: 0,
        insts: h.insts,
        registers: h.registers,
        labels: 1,
    };
    verify::verify(&ir).unwrap();
    let mut machine = Machine::new(Config::default());
    let stream = machine.create_stream(DeviceId(0));
    let memory = machine.alloc(DeviceId(0), 64 * 32).unwrap();
    for (lane, row) in inputs.iter().enumerate() {
        for (k, v) in row.iter().enumerate() {
            machine.write(memory + 64 * lane as u64 + 8 * k as u64, &v.to_le_bytes()).unwrap();
        }
    }
    let params = memory.to_le_bytes().to_vec();
    let launch = Launch { kernel: Arc::new(ir), grid: [1, 1, 1], shared_bytes: 0, params, overlap: false };
    machine.enqueue(stream, Command::Launch(launch)).unwrap();
    machine.run().unwrap();
    (0..32)
        .map(|lane| {
            (0..outs.len())
                .map(|k| {
                    let mut b = [0; 8];
                    machine.read(memory + 64 * lane + 32 + 8 * k as u64, &mut b).unwrap();
                    u64::from_le_bytes(b)
                })
                .collect()
        })
        .collect()
}

fn truncate(class: Class, v: u64) -> u64 {
    match class {
        Class::Pred => v & 1,
        Class::B16 => v & 0xFFFF,
        Class::B32 => v & 0xFFFF_FFFF,
        Class::B64 => v,
    }
}

/// Checks an instruction of one destination against a scalar function of its (truncated) operands, over rotations of the
/// operand table.
#[track_caller]
fn check(
    what: &str,
    out: Class,
    ins: &[Class],
    make: impl Fn(RegId, &[RegId]) -> Op,
    scalar: impl Fn(u64, u64, u64) -> u64,
) {
    for (turn, half) in (0..32).map(|t| (t, false)).chain([(5, true)]) {
        let inputs: [[u64; 3]; 32] = std::array::from_fn(|lane| {
            let pick = |k: usize, step: usize| {
                let v = CASES[(lane * step + turn * (k + 1)) % 32];
                ins.get(k).map_or(0, |class| truncate(*class, v))
            };
            [pick(0, 1), pick(1, 1), pick(2, 3)]
        });
        let got = execute(&[out], ins, &inputs, half, &|dsts, srcs| make(dsts[0], srcs));
        for lane in 0..32 {
            let [a, b, c] = inputs[lane];
            let skipped = half && lane >= 16;
            let want = truncate(out, if skipped { 0x5A5A_5A5A_5A5A_5A5A } else { scalar(a, b, c) });
            assert_eq!(
                got[lane][0], want,
                "{what} of {a:#x}, {b:#x}, {c:#x} in lane {lane}: {:#x} != {want:#x}",
                got[lane][0]
            );
        }
    }
}

fn o(r: RegId) -> Operand {
    Operand::Reg(r)
}

fn bits(x: f32) -> u64 {
    if x.is_nan() { 0x7FFF_FFFF } else { x.to_bits().into() }
}

fn f(x: u64) -> f32 {
    f32::from_bits(x as u32)
}

#[test]
fn integers_of_32_bits() {
    let run = |op: Bin, ty: Ty, scalar: fn(u32, u32) -> u32| {
        let make = |dst, s: &[RegId]| Op::Bin { op, ty, dst, a: o(s[0]), b: o(s[1]) };
        check(&format!("{op:?} {ty:?}"), Class::B32, &[Class::B32; 2], make, |a, b, _| {
            scalar(a as u32, b as u32).into()
        });
    };
    for ty in [Ty::U32, Ty::S32] {
        run(Bin::Add, ty, u32::wrapping_add);
        run(Bin::Sub, ty, u32::wrapping_sub);
        run(Bin::Mul, ty, u32::wrapping_mul);
        run(Bin::And, ty, |a, b| a & b);
        run(Bin::Or, ty, |a, b| a | b);
        run(Bin::Xor, ty, |a, b| a ^ b);
        run(Bin::Shl, ty, |a, b| a.checked_shl(b).unwrap_or(0));
    }
    run(Bin::MulHi, Ty::U32, |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32);
    run(Bin::MulHi, Ty::S32, |a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32);
    run(Bin::Div, Ty::U32, |a, b| a.checked_div(b).unwrap_or(u32::MAX));
    run(Bin::Rem, Ty::U32, |a, b| a.checked_rem(b).unwrap_or(u32::MAX));
    run(Bin::Min, Ty::U32, u32::min);
    run(Bin::Min, Ty::S32, |a, b| (a as i32).min(b as i32) as u32);
    run(Bin::Max, Ty::U32, u32::max);
    run(Bin::Max, Ty::S32, |a, b| (a as i32).max(b as i32) as u32);
    run(Bin::Shr, Ty::U32, |a, b| a.checked_shr(b).unwrap_or(0));
    run(Bin::Shr, Ty::S32, |a, b| (a as i32).checked_shr(b).unwrap_or(a as i32 >> 31) as u32);
    run(Bin::Min, Ty::U16x2, |a, b| (a & 0xFFFF).min(b & 0xFFFF) | (a >> 16).min(b >> 16) << 16);
    run(Bin::Max, Ty::U16x2, |a, b| (a & 0xFFFF).max(b & 0xFFFF) | (a >> 16).max(b >> 16) << 16);
}

#[test]
fn integers_of_64_bits() {
    let run = |op: Bin, ty: Ty, scalar: fn(u64, u64) -> u64| {
        let make = |dst, s: &[RegId]| Op::Bin { op, ty, dst, a: o(s[0]), b: o(s[1]) };
        let shift = matches!(op, Bin::Shl | Bin::Shr);
        let ins = [Class::B64, if shift { Class::B32 } else { Class::B64 }];
        check(&format!("{op:?} {ty:?}"), Class::B64, &ins, make, |a, b, _| scalar(a, b));
    };
    run(Bin::Add, Ty::U64, u64::wrapping_add);
    run(Bin::Sub, Ty::S64, u64::wrapping_sub);
    run(Bin::Mul, Ty::U64, u64::wrapping_mul);
    run(Bin::MulHi, Ty::U64, |a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64);
    run(Bin::MulHi, Ty::S64, |a, b| ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64);
    run(Bin::Div, Ty::U64, |a, b| a.checked_div(b).unwrap_or(u64::MAX));
    run(Bin::Min, Ty::U64, u64::min);
    run(Bin::Max, Ty::S64, |a, b| (a as i64).max(b as i64) as u64);
    run(Bin::And, Ty::U64, |a, b| a & b);
    run(Bin::Or, Ty::S64, |a, b| a | b);
    run(Bin::Xor, Ty::U64, |a, b| a ^ b);
    run(Bin::Shl, Ty::U64, |a, b| a.checked_shl(b as u32).unwrap_or(0));
    run(Bin::Shr, Ty::U64, |a, b| a.checked_shr(b as u32).unwrap_or(0));
    run(Bin::Shr, Ty::S64, |a, b| (a as i64).checked_shr(b as u32).unwrap_or(a as i64 >> 63) as u64);
}

#[test]
fn one_operand_and_wide_integers() {
    let un = |op: Un, ty: Ty, out: Class, scalar: fn(u64) -> u64| {
        let make = |dst, s: &[RegId]| Op::Un { op, ty, dst, a: o(s[0]) };
        check(&format!("{op:?} {ty:?}"), out, &[ty.class()], make, |a, _, _| scalar(a));
    };
    un(Un::Not, Ty::U32, Class::B32, |a| !a);
    un(Un::Neg, Ty::S32, Class::B32, |a| (a as u32).wrapping_neg().into());
    un(Un::Abs, Ty::S32, Class::B32, |a| u64::from((a as i32).unsigned_abs()));
    un(Un::Popc, Ty::U32, Class::B32, |a| a.count_ones().into());
    un(Un::Clz, Ty::U32, Class::B32, |a| (a as u32).leading_zeros().into());
    un(Un::Brev, Ty::U32, Class::B32, |a| (a as u32).reverse_bits().into());
    un(Un::Not, Ty::U64, Class::B64, |a| !a);
    un(Un::Popc, Ty::U64, Class::B32, |a| a.count_ones().into());
    un(Un::Clz, Ty::U64, Class::B32, |a| a.leading_zeros().into());
    un(Un::Brev, Ty::U64, Class::B64, u64::reverse_bits);
    un(Un::Not, Ty::U16, Class::B16, |a| !a);
    un(Un::Neg, Ty::F32, Class::B32, |a| if f(a).is_nan() { 0x7FFF_FFFF } else { a ^ 0x8000_0000 });
    un(Un::Abs, Ty::F32, Class::B32, |a| if f(a).is_nan() { 0x7FFF_FFFF } else { a & 0x7FFF_FFFF });

    let (w, d) = (Class::B32, Class::B64);
    for ty in [Ty::U32, Ty::S32] {
        let product = move |a: u64, b: u64| {
            if ty == Ty::S32 { (i64::from(a as i32) * i64::from(b as i32)) as u64 } else { a * b }
        };
        let make = move |dst, s: &[RegId]| Op::MulWide { ty, dst, a: o(s[0]), b: o(s[1]) };
        check("MulWide", d, &[w, w], make, |a, b, _| product(a, b));
        let make = move |dst, s: &[RegId]| Op::MadWide { ty, dst, a: o(s[0]), b: o(s[1]), c: o(s[2]) };
        check("MadWide", d, &[w, w, d], make, |a, b, c| product(a, b).wrapping_add(c));
        let make = move |dst, s: &[RegId]| Op::Mad { ty, dst, a: o(s[0]), b: o(s[1]), c: o(s[2]) };
        check("Mad", w, &[w, w, w], make, |a, b, c| a.wrapping_mul(b).wrapping_add(c));
    }
    let make = |dst, s: &[RegId]| Op::Mad { ty: Ty::U64, dst, a: o(s[0]), b: o(s[1]), c: o(s[2]) };
    check("Mad 64", d, &[d, d, d], make, |a, b, c| a.wrapping_mul(b).wrapping_add(c));
}

#[test]
fn bit_operations() {
    let w = [Class::B32; 3];
    let make = |dst, s: &[RegId]| Op::Lop3 { dst, a: o(s[0]), b: o(s[1]), c: o(s[2]), table: 0xB8 };
    check("Lop3", Class::B32, &w, make, |a, b, c| {
        (0..32).fold(0, |out, i| {
            let index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1);
            out | (0xB8 >> index & 1) << i
        })
    });
    let make = |dst, s: &[RegId]| Op::Prmt { dst, a: o(s[0]), b: o(s[1]), selector: o(s[2]) };
    check("Prmt", Class::B32, &w, make, |a, b, s| {
        let bytes = (b << 32 | a).to_le_bytes();
        (0..4).fold(0, |out, i| {
            let nibble = s >> (4 * i) & 15;
            let byte = bytes[nibble as usize & 7];
            let byte = if nibble & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
            out | u64::from(byte) << (8 * i)
        })
    });
    let make = |dst, s: &[RegId]| Op::Bfe { dst, a: o(s[0]), pos: o(s[1]), len: o(s[2]) };
    check("Bfe", Class::B32, &w, make, |a, pos, len| {
        // Position and length are the low bytes.
        let (pos, len) = (pos & 0xFF, len & 0xFF);
        (0..len.min(32)).fold(0, |out, i| if pos + i < 32 { out | (a >> (pos + i) & 1) << i } else { out })
    });
    for wrap in [false, true] {
        let amount = move |n: u64| if wrap { n & 31 } else { n.min(32) };
        let make = move |dst, s: &[RegId]| Op::ShfL { dst, lo: o(s[0]), hi: o(s[1]), n: o(s[2]), wrap };
        check("ShfL", Class::B32, &w, make, |lo, hi, n| ((u128::from(hi << 32 | lo) << amount(n)) >> 32) as u64);
        let make = move |dst, s: &[RegId]| Op::ShfR { dst, lo: o(s[0]), hi: o(s[1]), n: o(s[2]), wrap };
        check("ShfR", Class::B32, &w, make, |lo, hi, n| (hi << 32 | lo) >> amount(n));
    }
}

#[test]
fn single_precision() {
    let w = Class::B32;
    let run = |op: Bin, scalar: fn(f32, f32) -> f32| {
        let make = |dst, s: &[RegId]| Op::Bin { op, ty: Ty::F32, dst, a: o(s[0]), b: o(s[1]) };
        check(&format!("{op:?} F32"), w, &[w, w], make, |a, b, _| bits(scalar(f(a), f(b))));
    };
    run(Bin::Add, |a, b| a + b);
    run(Bin::Sub, |a, b| a - b);
    run(Bin::Mul, |a, b| a * b);
    // The sign of the zero is defined: -0 is below +0.
    run(Bin::Min, |a, b| if a == 0.0 && b == 0.0 { if a.is_sign_negative() { a } else { b } } else { a.min(b) });
    run(Bin::Max, |a, b| if a == 0.0 && b == 0.0 { if a.is_sign_positive() { a } else { b } } else { a.max(b) });
    let make = |dst, s: &[RegId]| Op::Fma { dst, a: o(s[0]), b: o(s[1]), c: o(s[2]) };
    check("Fma", w, &[w, w, w], make, |a, b, c| bits(f(a).mul_add(f(b), f(c))));
    let make = |dst, s: &[RegId]| Op::Div { mode: DivMode::Rn, dst, a: o(s[0]), b: o(s[1]) };
    check("Div", w, &[w, w], make, |a, b, _| bits(f(a) / f(b)));
    let make = |dst, s: &[RegId]| Op::Math { op: Math::SqrtRn, dst, a: o(s[0]) };
    check("SqrtRn", w, &[w], make, |a, _, _| bits(f(a).sqrt()));
    // The approximate functions have their own tests; here that the right one is called.
    for (op, scalar) in [
        (Math::RcpApproxFtz, (|x: f64| 1.0 / x) as fn(f64) -> f64),
        (Math::RsqrtApprox, |x| 1.0 / x.sqrt()),
        (Math::RsqrtApproxFtz, |x| 1.0 / x.sqrt()),
        (Math::Ex2ApproxFtz, f64::exp2),
    ] {
        let inputs = std::array::from_fn(|lane| [u64::from((0.5 + lane as f32 / 8.0).to_bits()), 0, 0]);
        let got = execute(&[w], &[w], &inputs, false, &|d, s| Op::Math { op, dst: d[0], a: o(s[0]) });
        for lane in 0..32 {
            let exact = scalar(f64::from(f(inputs[lane][0])));
            let relative = (f64::from(f(got[lane][0])) - exact).abs() / exact;
            assert!(relative < 3.0 * f64::from(f32::EPSILON), "{op:?} lane {lane}: {relative}");
        }
    }
}

#[test]
fn comparisons_and_selection() {
    let holds = |cmp: Cmp, order: Option<std::cmp::Ordering>| match (cmp, order) {
        (_, None) => false,
        (Cmp::Eq, Some(o)) => o.is_eq(),
        (Cmp::Ne, Some(o)) => o.is_ne(),
        (Cmp::Lt, Some(o)) => o.is_lt(),
        (Cmp::Le, Some(o)) => o.is_le(),
        (Cmp::Gt, Some(o)) => o.is_gt(),
        (Cmp::Ge, Some(o)) => o.is_ge(),
    };
    for cmp in [Cmp::Eq, Cmp::Ne, Cmp::Lt, Cmp::Le, Cmp::Gt, Cmp::Ge] {
        for ty in [Ty::U16, Ty::U32, Ty::S32, Ty::U64, Ty::S64, Ty::F32] {
            let make = |dst, s: &[RegId]| Op::Setp { cmp, ty, dst, a: o(s[0]), b: o(s[1]) };
            check(&format!("Setp {cmp:?} {ty:?}"), Class::Pred, &[ty.class(); 2], make, |a, b, _| {
                let order = match ty {
                    Ty::S32 => (a as i32).partial_cmp(&(b as i32)),
                    Ty::S64 => (a as i64).partial_cmp(&(b as i64)),
                    Ty::F32 => f(a).partial_cmp(&f(b)),
                    _ => a.partial_cmp(&b),
                };
                holds(cmp, order).into()
            });
        }
    }
    for (ty, class) in [(Ty::U16, Class::B16), (Ty::F32, Class::B32), (Ty::U64, Class::B64)] {
        let make = |dst, s: &[RegId]| Op::Selp { ty, dst, a: o(s[0]), b: o(s[1]), p: s[2] };
        check("Selp", class, &[class, class, Class::Pred], make, |a, b, p| if p != 0 { a } else { b });
    }
    let p = [Class::Pred; 2];
    for (op, scalar) in
        [(Logic::And, (|a, b| a & b) as fn(u64, u64) -> u64), (Logic::Or, |a, b| a | b), (Logic::Xor, |a, b| a ^ b)]
    {
        let make = |dst, s: &[RegId]| Op::PredLogic { op, dst, a: s[0], b: s[1] };
        check(&format!("{op:?}"), Class::Pred, &p, make, |a, b, _| scalar(a, b));
    }
    check("PredNot", Class::Pred, &p[..1], |dst, s| Op::PredNot { dst, a: s[0] }, |a, _, _| a ^ 1);
    for value in [false, true] {
        check("PredConst", Class::Pred, &[], |dst, _| Op::PredConst { dst, value }, |_, _, _| value.into());
    }
}

#[test]
fn moves() {
    for class in [Class::B16, Class::B32, Class::B64] {
        check("Mov", class, &[class], |dst, s| Op::Mov { dst, src: o(s[0]) }, |a, _, _| a);
    }
    check(
        "Mov imm",
        Class::B64,
        &[],
        |dst, _| Op::Mov { dst, src: Operand::Imm(u64::MAX - 4) },
        |_, _, _| u64::MAX - 4,
    );
    let pack = |dst, s: &[RegId]| Op::Pack { dst, lo: o(s[0]), hi: o(s[1]) };
    check("Pack 64", Class::B64, &[Class::B32; 2], pack, |a, b, _| b << 32 | a);
    check("Pack 32", Class::B32, &[Class::B16; 2], pack, |a, b, _| b << 16 | a);
    for (wide, half, shift) in [(Class::B64, Class::B32, 32), (Class::B32, Class::B16, 16)] {
        let inputs = std::array::from_fn(|lane| [truncate(wide, CASES[lane]), 0, 0]);
        let got =
            execute(&[half, half], &[wide], &inputs, false, &|d, s| Op::Unpack { lo: d[0], hi: d[1], src: o(s[0]) });
        for lane in 0..32 {
            assert_eq!(got[lane], [truncate(half, inputs[lane][0]), inputs[lane][0] >> shift]);
        }
    }
}

#[test]
fn conversions() {
    let run = |op: Cvt, scalar: fn(u64) -> u64| {
        let (out, class) = op.classes();
        check(&format!("{op:?}"), out, &[class], |dst, s| Op::Cvt { op, dst, a: o(s[0]) }, |a, _, _| scalar(a));
    };
    run(Cvt::U32ToU64, |a| a);
    run(Cvt::S32ToS64, |a| i64::from(a as i32) as u64);
    run(Cvt::U64ToU32, |a| a);
    run(Cvt::U16ToU32, |a| a);
    run(Cvt::U32ToU16, |a| a);
    run(Cvt::U32ToF32, |a| bits(a as u32 as f32));
    run(Cvt::S32ToF32, |a| bits(a as i32 as f32));
    run(Cvt::F32ToU32Rz, |a| (f(a) as u32).into());
    run(Cvt::F32ToS32Rz, |a| f(a) as i32 as u32 as u64);
    run(Cvt::Bf16ToF32, |a| a << 16);
    run(Cvt::F32ToBf16, |a| bf16(f(a)));
    run(Cvt::E4m3x2ToF16x2, |a| f16(e4m3_value(a as u8)) | f16(e4m3_value((a >> 8) as u8)) << 16);
    run(Cvt::F16x2ToE4m3x2, |a| e4m3(f16_value(a)) | e4m3(f16_value(a >> 16)) << 8);
    let pack = |op: CvtPack, scalar: fn(f32) -> u64, width: u32| {
        let make = |dst, s: &[RegId]| Op::CvtPack { op, dst, hi: o(s[0]), lo: o(s[1]) };
        check(&format!("{op:?}"), op.class(), &[Class::B32; 2], make, |hi, lo, _| {
            scalar(f(hi)) << width | scalar(f(lo))
        });
    };
    pack(CvtPack::Bf16x2, bf16, 16);
    pack(CvtPack::Bf16x2Relu, |x| if x.is_nan() { 0x7FFF } else { bf16(if x > 0.0 { x } else { 0.0 }) }, 16);
    pack(CvtPack::F16x2, f16, 16);
    pack(CvtPack::E4m3x2, e4m3, 8);
}

#[test]
fn packed_halves() {
    let w = Class::B32;
    let lanes = |a: u64, b: u64, c: u64, scalar: &dyn Fn(f32, f32, f32) -> u64| {
        let half = |x: u64, i: u64| half::bf16::from_bits((x >> (16 * i)) as u16).to_f32();
        (0..2).fold(0, |out, i| out | scalar(half(a, i), half(b, i), half(c, i)) << (16 * i))
    };
    let run = |op: Bf16Bin, scalar: fn(f32, f32) -> u64| {
        let make = |dst, s: &[RegId]| Op::Bf16Bin { op, dst, a: o(s[0]), b: o(s[1]) };
        check(&format!("{op:?}"), w, &[w, w], make, |a, b, _| lanes(a, b, 0, &|a, b, _| scalar(a, b)));
    };
    // The double holds the exact sum or product of these operands well enough to round once.
    run(Bf16Bin::Add, |a, b| bf16_of(f64::from(a) + f64::from(b)));
    run(Bf16Bin::Mul, |a, b| bf16_of(f64::from(a) * f64::from(b)));
    let ordered = |a: f32, b: f32, less: bool| {
        if a.is_nan() || b.is_nan() {
            if a.is_nan() { b } else { a }
        } else if a == b {
            if a.is_sign_negative() == less { a } else { b }
        } else if (a < b) == less {
            a
        } else {
            b
        }
    };
    let make = |op| move |dst, s: &[RegId]| Op::Bf16Bin { op, dst, a: o(s[0]), b: o(s[1]) };
    check("Max", w, &[w, w], make(Bf16Bin::Max), |a, b, _| lanes(a, b, 0, &|a, b, _| bf16(ordered(a, b, false))));
    check("Min", w, &[w, w], make(Bf16Bin::Min), |a, b, _| lanes(a, b, 0, &|a, b, _| bf16(ordered(a, b, true))));
    check("MaxNan", w, &[w, w], make(Bf16Bin::MaxNan), |a, b, _| {
        lanes(a, b, 0, &|a, b, _| if a.is_nan() || b.is_nan() { 0x7FFF } else { bf16(ordered(a, b, false)) })
    });
    for relu in [false, true] {
        let make = move |dst, s: &[RegId]| Op::Bf16Fma { dst, a: o(s[0]), b: o(s[1]), c: o(s[2]), relu };
        // Small exact operands: the product and sum fit a double.
        let inputs: [[u64; 3]; 32] = std::array::from_fn(|lane| {
            let pair = |x: f32, y: f32| bf16(y) << 16 | bf16(x);
            let l = lane as f32;
            [pair(l - 16.0, 1.5 * l), pair(0.25 * l, -3.0), pair(-l, 100.0 - l * l)]
        });
        let got = execute(&[w], &[w; 3], &inputs, false, &|d, s| make(d[0], s));
        for lane in 0..32 {
            let [a, b, c] = inputs[lane];
            let want = lanes(a, b, c, &|a, b, c| {
                let x = f64::from(a) * f64::from(b) + f64::from(c);
                bf16_of(if relu { if x > 0.0 { x } else { 0.0 } } else { x })
            });
            assert_eq!(got[lane][0], want, "lane {lane}");
        }
    }
    check(
        "F16x2Mul",
        w,
        &[w, w],
        |dst, s| Op::F16x2Mul { dst, a: o(s[0]), b: o(s[1]) },
        |a, b, _| {
            (0..2).fold(0, |out, i| {
                let x = f64::from(f16_value(a >> (16 * i))) * f64::from(f16_value(b >> (16 * i)));
                let y = half::f16::from_f64(x);
                out | (if y.is_nan() { 0x7FFF } else { u64::from(y.to_bits()) }) << (16 * i)
            })
        },
    );
}

fn bf16(x: f32) -> u64 {
    if x.is_nan() { 0x7FFF } else { half::bf16::from_f32(x).to_bits().into() }
}

fn bf16_of(x: f64) -> u64 {
    if x.is_nan() { 0x7FFF } else { half::bf16::from_f64(x).to_bits().into() }
}

fn f16(x: f32) -> u64 {
    if x.is_nan() { 0x7FFF } else { half::f16::from_f32(x).to_bits().into() }
}

fn f16_value(x: u64) -> f32 {
    half::f16::from_bits(x as u16).to_f32()
}

fn e4m3_value(code: u8) -> f32 {
    float8::F8E4M3::from_bits(code).to_f32()
}

fn e4m3(x: f32) -> u64 {
    if x.is_nan() {
        0x7F
    } else if x.abs() >= 448.0 {
        if x > 0.0 { 0x7E } else { 0xFE }
    } else {
        float8::F8E4M3::from_f32(x).to_bits().into()
    }
}

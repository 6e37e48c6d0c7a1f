//! What the builder promises to kernel authors: values stay what they were, constants fold, arguments lie where the
//! driver looks for them, shared arrays do not overlap.

mod common;

use common::EveryKind;
use proptest::prelude::*;
use ptx::args::{ParamKind, lay_out};
use ptx::op::{Op, Operand};
use ptx::*;

/// The instructions of a kernel without arguments.
fn ops(body: impl FnOnce()) -> Vec<Op> {
    let kernel = build::<()>("built", Target::Sm90a, LaunchBounds::threads(32), |()| body()).unwrap();
    kernel.ir().insts.iter().map(|inst| inst.op.clone()).collect()
}

#[test]
fn a_value_taken_from_a_variable_does_not_change_with_it() {
    let ops = ops(|| {
        let var = Var::<u32>::new(1u32);
        let before = var.get();
        var.set(2);
        var.add(before);
    });
    let Op::Mov { dst: var, src: Operand::Imm(1) } = ops[0] else { panic!("{ops:?}") };
    let Op::Mov { dst: copy, src: Operand::Reg(from) } = ops[1] else { panic!("{ops:?}") };
    assert_eq!(from, var);
    assert_ne!(copy, var, "reading copies");
    assert_eq!(ops[2], Op::Mov { dst: var, src: Operand::Imm(2) });
    let Op::Bin { dst, a, b, .. } = ops[3] else { panic!("{ops:?}") };
    assert_eq!((dst, a, b), (var, Operand::Reg(var), Operand::Reg(copy)));
}

#[test]
fn variables_of_every_width_start_and_change() {
    let ops = ops(|| {
        Var::<i64>::new(-1i64).add(2);
        Var::<f32>::new(1.5f32).set(0.5);
        Var::<u64>::new(7u64).xor(1u64);
        let _ = Var::<f32>::undefined();
    });
    assert!(matches!(ops[0], Op::Mov { src: Operand::Imm(u64::MAX), .. }));
    assert!(matches!(ops[2], Op::Mov { src: Operand::Imm(0x3FC0_0000), .. }));
    assert_eq!(ops.len(), 7, "an undefined variable emits nothing: {ops:?}");
}

/// The constant that `make` folds to. Panics if it emits an instruction.
fn folded<T: Scalar>(make: impl FnOnce() -> Reg<T>) -> u64 {
    let mut bits = None;
    let ops = ops(|| bits = make().constant());
    assert_eq!(ops, [Op::Exit], "folding emits nothing");
    bits.expect("a constant")
}

proptest! {
    #[test]
    fn constants_fold_as_the_device_computes(a: u32, b: u32, n in 0u32..40) {
        let (x, y) = (Reg::<u32>::from(a), Reg::<u32>::from(b));
        prop_assert_eq!(folded(|| x + y), a.wrapping_add(b) as u64);
        prop_assert_eq!(folded(|| x - y), a.wrapping_sub(b) as u64);
        prop_assert_eq!(folded(|| x * y), a.wrapping_mul(b) as u64);
        prop_assert_eq!(folded(|| (x & y) | (x ^ y)), (a | b) as u64);
        // Past the width a shift gives 0.
        prop_assert_eq!(folded(|| x << n), a.checked_shl(n).unwrap_or(0) as u64);
        prop_assert_eq!(folded(|| x.mul_wide(y)), a as u64 * b as u64);
        prop_assert_eq!(folded(|| x.to_u64()), a as u64);
        let (s, t) = (a as i32, b as i32);
        prop_assert_eq!(folded(|| Reg::<i32>::from(s) * t - t), s.wrapping_mul(t).wrapping_sub(t) as u32 as u64);
    }

    #[test]
    fn long_constants_fold_in_64_bits(a: u64, b: u64) {
        let (x, y) = (Reg::<u64>::from(a), Reg::<u64>::from(b));
        prop_assert_eq!(folded(|| x + y), a.wrapping_add(b));
        prop_assert_eq!(folded(|| x * y), a.wrapping_mul(b));
        prop_assert_eq!(folded(|| Reg::<i64>::from(a as i64) - (b as i64)), (a as i64).wrapping_sub(b as i64) as u64);
    }

    #[test]
    fn arguments_lie_where_the_declaration_says(kinds in prop::collection::vec(0..3usize, 0..args::PARAMS_MAX)) {
        let kinds: Vec<ParamKind> =
            kinds.iter().map(|k| [ParamKind::B32, ParamKind::B64, ParamKind::TensorMap][*k]).collect();
        let fields: Vec<_> = kinds.iter().map(|kind| ("x", *kind)).collect();
        let declared = lay_out(&fields);
        let end = declared.last().map_or(0, |p| p.offset + p.bytes);
        prop_assume!(end as usize <= args::PARAM_BYTES_MAX);
        let mut buf = ArgBuffer::default();
        for (n, kind) in kinds.iter().enumerate() {
            buf.push(&vec![n as u8 + 1; kind.layout().0 as usize], *kind);
        }
        prop_assert_eq!(buf.bytes().len(), end as usize);
        let mut covered = 0;
        for (n, p) in declared.iter().enumerate() {
            let (bytes, align) = p.kind.layout();
            prop_assert_eq!(p.bytes, bytes);
            prop_assert!(p.offset.is_multiple_of(align) && p.offset >= covered, "aligned and past its predecessor");
            prop_assert_eq!(buf.offsets()[n] as u32, p.offset);
            let range = p.offset as usize..(p.offset + bytes) as usize;
            prop_assert!(buf.bytes()[range].iter().all(|byte| *byte == n as u8 + 1));
            covered = p.offset + bytes;
        }
    }
}

#[test]
fn division_and_floats_are_left_to_the_device() {
    let ops = ops(|| {
        let _ = Reg::<u32>::from(7u32) / 0;
        let _ = Reg::<f32>::from(1.0f32) + 2.0;
        let _ = Reg::<u32>::from(8u32) >> 1;
    });
    assert_eq!(ops.len(), 4, "{ops:?}");
}

#[test]
fn packed_arguments_are_the_values_in_order() {
    let args = EveryKind {
        n: i32::MAX as u32,
        out: DevicePtr::from_address((1 << 47) + 5),
        map: TensorMap::from_bytes(std::array::from_fn(|at| at as u8)),
    };
    let packed = ArgBuffer::pack(&args);
    assert_eq!(packed.offsets(), [0, 8, 64]);
    assert_eq!(packed.bytes().len(), 192);
    assert_eq!(packed.bytes()[..4], i32::MAX.to_le_bytes());
    assert_eq!(packed.bytes()[8..16], ((1u64 << 47) + 5).to_le_bytes());
    assert_eq!(packed.bytes()[64..192], *args.map.bytes());
    // The driver reads the block in place, so it is as aligned as its most aligned parameter.
    assert!((packed.bytes().as_ptr() as usize).is_multiple_of(64));
    let declared = <EveryKind as KernelArgs>::declare();
    assert_eq!(declared.iter().map(|p| (p.name, p.offset)).collect::<Vec<_>>(), [("n", 0), ("out", 8), ("map", 64)]);
}

#[test]
fn device_addresses_move_by_bytes() {
    let p = DevicePtr::<f32>::from_address(0x100);
    assert_eq!((p.byte_add(8).address(), p.cast::<u8>().address()), (0x108, 0x100));
    assert_eq!(DevicePtr::<f32>::NULL.address(), 0);
    assert_eq!(format!("{p:?}"), "0x100");
}

#[test]
fn shared_arrays_are_aligned_and_apart() {
    let kernel = build::<()>("layout", Target::Sm90a, LaunchBounds::threads(32), |()| {
        let a = SharedArray::<u8>::new("a", 3);
        let b = SharedArray::<u64>::new("b", 2);
        let c = SharedArray::<u32>::aligned("c", 4, 1024);
        assert_eq!((a.byte_offset(), b.byte_offset(), c.byte_offset()), (0, 8, 1024));
        assert_eq!((a.len(), c.cast::<u8>().len(), c.cast::<u64>().len()), (3, 16, 2));
    })
    .unwrap();
    let ir = kernel.ir();
    assert_eq!(ir.shared_bytes, 1040);
    assert_eq!(ir.shared_field_at(2).unwrap().name, "a");
    assert_eq!(ir.shared_field_at(3), None, "padding belongs to nobody");
    assert_eq!(ir.shared_field_at(1039).unwrap().name, "c");
}

#[test]
#[should_panic(expected = "index 16 is outside the 16 elements")]
fn a_constant_shared_index_is_checked() {
    ops(|| {
        let _ = SharedArray::<u32>::new("words", 16).at(16);
    });
}

#[test]
#[should_panic(expected = "a constant offset fits 32 bits")]
fn a_constant_offset_does_not_wrap() {
    ops(|| {
        let _ = SharedArray::<u64>::new("words", 1).ptr().offset(i32::MAX);
    });
}

#[test]
#[should_panic(expected = "bitcast keeps the width")]
fn a_bitcast_keeps_the_width() {
    ops(|| {
        let _ = Reg::<u32>::from(1u32).bitcast::<u64>();
    });
}

#[test]
fn a_negative_offset_keeps_its_sign_in_64_bits() {
    let kernel = build::<EveryKind>("back", Target::Sm90a, LaunchBounds::threads(32), |p| {
        let _ = p.out.offset(-1).address();
    })
    .unwrap();
    let add = kernel.ir().insts.iter().find_map(|inst| match inst.op {
        Op::Bin { b: Operand::Imm(b), .. } => Some(b as i64),
        _ => None,
    });
    assert_eq!(add, Some(-4));
}

#[test]
fn kernels_do_not_nest_and_a_panic_leaves_the_builder_usable() {
    let nested = std::panic::catch_unwind(|| ops(|| drop(ops(|| {}))));
    let message = *nested.unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("kernels do not nest"), "{message}");
    assert_eq!(ops(|| {}), [Op::Exit]);
}

#[test]
fn the_same_kernel_prints_the_same_text() {
    let print = || {
        let body =
            |p: common::EveryKindParams| when(p.n.lt(3), || p.out.store(SharedArray::<u32>::new("s", 1).at(0).load()));
        build::<EveryKind>("twice", Target::Sm100a, LaunchBounds::threads(32), body).unwrap().ptx()
    };
    assert_eq!(print(), print());
}

#[test]
fn targets_are_found_by_name_and_capability() {
    for target in Target::ALL {
        assert_eq!(target.name().parse(), Ok(target));
        let (major, minor) = target.compute_capability();
        assert_eq!(Target::for_compute_capability(major, minor), Some(target));
    }
    assert!("sm_80".parse::<Target>().unwrap_err().contains("sm_90a"));
    assert_eq!(Target::for_compute_capability(8, 0), None);
}

#[test]
fn the_final_exit_belongs_to_the_call_of_build() {
    let line = line!() + 1;
    let kernel = build::<()>("exits", Target::Sm90a, LaunchBounds::threads(32), |()| {}).unwrap();
    let loc = kernel.ir().insts.last().unwrap().loc;
    assert_eq!((loc.file(), loc.line()), (file!(), line));
}

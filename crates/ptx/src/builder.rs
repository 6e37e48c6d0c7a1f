//! The kernel under construction. Handles and operators emit into the thread's current builder, so kernel code
//! reads as arithmetic; [`build`] opens it, closes it and verifies the result.

use std::cell::RefCell;
use std::panic::Location;

use crate::args::KernelArgs;
use crate::kernel::{Inst, Kernel, KernelIr, LaunchBounds, SharedField, Target};
use crate::op::{LabelId, Op, Operand, RegId};
use crate::ty::Class;
use crate::verify::{self, VerifyError};

struct Builder {
    ir: KernelIr,
    shared_base: Option<RegId>,
}

thread_local! {
    static CURRENT: RefCell<Option<Builder>> = const { RefCell::new(None) };
}

fn with<R>(f: impl FnOnce(&mut Builder) -> R) -> R {
    CURRENT.with(|c| f(c.borrow_mut().as_mut().expect("kernel code runs inside `ptx::build`")))
}

/// Removes the unfinished kernel if the body panics, so that the thread can build again.
struct Reset;
impl Drop for Reset {
    fn drop(&mut self) {
        CURRENT.with(|c| *c.borrow_mut() = None);
    }
}

/// Builds and verifies a kernel: `body` receives the device-side handles of its arguments and emits instructions.
///
/// # Errors
/// The first violation that [`verify`](mod@crate::verify) finds, with the Rust line that emitted it.
///
/// # Panics
/// If called while another kernel is being built on this thread.
#[track_caller] // the final exit belongs to the caller's line
pub fn build<A: KernelArgs>(
    name: &str,
    target: Target,
    bounds: LaunchBounds,
    body: impl FnOnce(A::Params),
) -> Result<Kernel<A>, VerifyError> {
    CURRENT.with(|c| {
        let mut current = c.borrow_mut();
        assert!(current.is_none(), "kernels do not nest: {name} is built inside another");
        *current = Some(Builder {
            ir: KernelIr {
                name: name.to_string(),
                target,
                bounds,
                params: A::declare(),
                shared: Vec::new(),
                shared_bytes: 0,
                insts: Vec::new(),
                registers: [0; 4],
                labels: 0,
            },
            shared_base: None,
        });
    });
    let reset = Reset;
    body(A::params());
    emit(Op::Exit);
    let ir = CURRENT.with(|c| c.borrow_mut().take()).expect("opened above").ir;
    drop(reset);
    verify::verify(&ir)?;
    Ok(Kernel::new(ir))
}

/// Appends an instruction, attributed to the caller's line.
#[track_caller]
pub(crate) fn emit(op: Op) {
    let loc = Location::caller();
    with(|b| b.ir.insts.push(Inst { op, loc }));
}

/// A new register.
pub(crate) fn fresh(class: Class) -> RegId {
    with(|b| {
        let n = &mut b.ir.registers[class as usize];
        let index = *n;
        *n += 1;
        RegId { class, index }
    })
}

/// A new label.
pub(crate) fn new_label() -> LabelId {
    with(|b| {
        let l = LabelId(b.ir.labels);
        b.ir.labels += 1;
        l
    })
}

/// The target of the kernel being built, for code that differs between architectures.
pub fn target() -> Target {
    with(|b| b.ir.target)
}

/// The launch bounds of the kernel being built.
pub fn bounds() -> LaunchBounds {
    with(|b| b.ir.bounds)
}

/// Reserves `bytes` of the shared layout.
pub(crate) fn reserve_shared(name: &'static str, bytes: u32, align: u32) -> u32 {
    assert!(align.is_power_of_two() && align <= 1024, "shared alignment {align} is a power of two up to 1024");
    with(|b| {
        let offset = b.ir.shared_bytes.next_multiple_of(align);
        b.ir.shared.push(SharedField { name, offset, bytes });
        b.ir.shared_bytes = offset + bytes;
        offset
    })
}

/// The register with the shared layout's base address, read once at the kernel's start.
#[track_caller]
pub(crate) fn shared_base() -> Operand {
    if let Some(r) = with(|b| b.shared_base) {
        return Operand::Reg(r);
    }
    let dst = fresh(Class::B32);
    let loc = Location::caller();
    with(|b| {
        // At the top, so that it dominates every use whatever control flow first asked for it.
        b.ir.insts.insert(0, Inst { op: Op::SharedBase { dst }, loc });
        b.shared_base = Some(dst);
    });
    Operand::Reg(dst)
}

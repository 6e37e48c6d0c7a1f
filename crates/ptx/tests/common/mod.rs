//! A sound kernel whose instruction list tests extend by hand, past what the typed builder lets through.
#![allow(dead_code)] // each test file uses its part

use std::panic::Location;

use ptx::op::{LabelId, Op, Operand, RegId};
use ptx::verify::verify;
use ptx::*;

kernel_args! {
    /// One parameter of each kind.
    pub struct EveryKind / EveryKindParams {
        /// a scalar
        pub n: u32,
        /// an address
        pub out: DevicePtr<u32>,
        /// a tensor map
        pub map: TensorMap,
    }
}

/// A constant.
pub fn i(value: u64) -> Operand {
    Operand::Imm(value)
}

/// An instruction list under the test's hands.
#[derive(Clone)]
pub struct Ir(pub KernelIr);

impl Ir {
    /// A kernel that breaks no rule: 128 threads, shared memory, every kind of parameter.
    pub fn sound() -> Ir {
        let kernel = build::<EveryKind>("sound", Target::Sm90a, LaunchBounds::threads(128), |p| {
            let words = SharedArray::<u32>::new("words", 256);
            words.at(thread_index()).store(p.n);
            p.out.store(words.at(0).load());
        });
        Ir(KernelIr::clone(kernel.expect("sound").ir()))
    }

    /// Adds `op` before the final exit, as the caller's line.
    #[track_caller]
    pub fn push(&mut self, op: Op) {
        let last = self.0.insts.len() - 1;
        self.0.insts.insert(last, Inst { op, loc: Location::caller() });
    }

    /// A register that nothing writes.
    pub fn fresh(&mut self, class: Class) -> RegId {
        let count = &mut self.0.registers[class as usize];
        *count += 1;
        RegId { class, index: *count - 1 }
    }

    fn written(&mut self, class: Class) -> RegId {
        let dst = self.fresh(class);
        self.push(Op::Mov { dst, src: i(1) });
        dst
    }

    /// A 16-bit register with a value.
    pub fn half(&mut self) -> RegId {
        self.written(Class::B16)
    }

    /// A 32-bit register with a value.
    pub fn word(&mut self) -> RegId {
        self.written(Class::B32)
    }

    /// A 64-bit register with a value.
    pub fn long(&mut self) -> RegId {
        self.written(Class::B64)
    }

    /// A predicate with a value.
    pub fn pred(&mut self) -> RegId {
        let dst = self.fresh(Class::Pred);
        self.push(Op::PredConst { dst, value: true });
        dst
    }

    /// A label that is not placed.
    pub fn label(&mut self) -> LabelId {
        self.0.labels += 1;
        LabelId(self.0.labels - 1)
    }

    /// The register that holds the shared layout's address.
    pub fn shared_base(&self) -> RegId {
        match self.0.insts[0].op {
            Op::SharedBase { dst } => dst,
            ref other => panic!("a kernel with shared memory starts with its base, not {other:?}"),
        }
    }

    /// The verifier's verdict.
    pub fn verify(&self) -> Result<(), VerifyError> {
        verify(&self.0)
    }
}

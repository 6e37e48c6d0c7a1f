//! Matrix products of one warp.

use crate::builder::{emit, fresh};
use crate::op::{Op, Operand, RegId};
use crate::ty::{Bf16x2, Class};
use crate::value::Reg;

/// A 16 x 8 tile of FP32 sums over the warp. With `g = lane / 4` and `q = lane % 4`:
///
/// | fragment | register | holds |
/// |---|---|---|
/// | A (16 x 16 of BF16 pairs) | `i` of 4 | row `g + 8 (i % 2)`, columns `2 q + 8 (i / 2)` and the next |
/// | B (16 x 8 of BF16 pairs) | `i` of 2 | column `g`, rows `2 q + 8 i` and the next |
/// | tile | `j` of 4 | row `g + 8 (j / 2)`, column `2 q + j % 2` |
#[derive(Clone, Copy, Debug)]
pub struct MmaTile {
    regs: [RegId; 4],
}

impl MmaTile {
    /// A tile of zeros.
    #[track_caller]
    pub fn zero() -> Self {
        let regs = [(); 4].map(|()| fresh(Class::B32));
        for dst in regs {
            emit(Op::Mov { dst, src: Operand::Imm(0) });
        }
        MmaTile { regs }
    }

    /// Register `j` as it is now.
    #[track_caller]
    pub fn get(self, j: u32) -> Reg<f32> {
        Reg::<f32>::from_operand(Operand::Reg(self.regs[j as usize])).copied()
    }

    /// Adds A . B (K = 16). The whole warp executes it together.
    #[track_caller]
    pub fn mma_bf16(self, a: [Reg<Bf16x2>; 4], b: [Reg<Bf16x2>; 2]) {
        let register = |x: Reg<Bf16x2>| x.in_register().reg().expect("put into a register");
        let mut fragments = [self.regs[0]; 6];
        for (to, from) in fragments.iter_mut().zip(a.into_iter().chain(b)) {
            *to = register(from);
        }
        let [a0, a1, a2, a3, b0, b1] = fragments;
        emit(Op::MmaBf16 { acc: self.regs, a: [a0, a1, a2, a3], b: [b0, b1] });
    }
}

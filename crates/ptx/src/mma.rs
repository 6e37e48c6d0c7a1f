//! Matrix products of one warp.

use crate::builder::{emit, fresh};
use crate::memory::Shared;
use crate::op::{Op, Operand, RegId};
use crate::ty::{Bf16x2, Class, Elem};
use crate::value::Reg;

impl<T: Elem> Shared<T> {
    /// Loads `N` (1, 2 or 4) matrices of 8 x 8 16-bit elements, the whole warp together (`ldmatrix`): the pointer in lane
    /// `8 m + r` is that of row r of matrix m, 16 bytes on a multiple of 16. Lane `4 g + q` receives elements `2 q` and
    /// `2 q + 1` of row g of each: a register of an A fragment, or, of a matrix whose rows are B's columns, of a B fragment
    /// of [`MmaTile`].
    #[track_caller]
    pub fn load_matrices<const N: usize>(self) -> [Reg<Bf16x2>; N] {
        self.load_matrices_n(false)
    }

    /// As [`load_matrices`](Self::load_matrices), but lane `4 g + q` receives elements `2 q` and `2 q + 1` of column g: of
    /// a matrix whose rows are B's rows, a register of a B fragment.
    #[track_caller]
    pub fn load_matrices_transposed<const N: usize>(self) -> [Reg<Bf16x2>; N] {
        self.load_matrices_n(true)
    }

    #[track_caller]
    fn load_matrices_n<const N: usize>(self, transposed: bool) -> [Reg<Bf16x2>; N] {
        let dsts = [(); N].map(|()| fresh(Class::B32));
        emit(Op::LdMatrix { dsts: Box::new(dsts), addr: self.operand(), transposed });
        dsts.map(|d| Reg::from_operand(Operand::Reg(d)))
    }
}

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

//! Warpgroup matrix products with register accumulators.

use crate::builder::{self, emit};
use crate::memory::Shared;
use crate::op::{MmaInput, Op, Operand, RegId, ScaleD, WgmmaA};
use crate::ty::{Class, Elem};
use crate::value::Reg;

impl<T: Elem> Shared<T> {
    /// The shared-memory matrix descriptor of a K-major operand in 128-byte rows with the 128-byte swizzle, at this
    /// (1024-byte aligned) address: bits 0..14 address >> 4, 32..46 the 1024-byte stride of 8-row groups >> 4,
    /// 62..64 the swizzle. Adding 2 moves 32 bytes along K.
    #[track_caller]
    pub fn descriptor_k_major_128(self) -> Reg<u64> {
        let low = (self.address() >> 4) & 0x3FFF;
        low.to_u64() | Reg::<u64>::from(DESCRIPTOR_K_MAJOR_128)
    }
}

/// Descriptor bits beside the address: see [`Shared::descriptor_k_major_128`].
pub const DESCRIPTOR_K_MAJOR_128: u64 = 1 << 16 | 64 << 32 | 1 << 62;

/// Accumulator of an m64 x n warpgroup MMA: n / 2 FP32 registers per thread.
///
/// Register `j` of thread `t` holds row `16 * (t / 32) + (t % 32) / 4 + 8 * ((j / 2) % 2)`, column
/// `8 * (j / 4) + 2 * (t % 4) + j % 2`.
#[derive(Clone)]
pub struct Accumulator {
    n: u32,
    regs: Vec<RegId>,
}

impl Accumulator {
    /// For `n` columns, a multiple of 8 up to 256.
    pub fn new(n: u32) -> Self {
        let regs = (0..n / 2).map(|_| builder::fresh(Class::B32)).collect();
        Accumulator { n, regs }
    }

    /// Register `j`. Valid between a [`wgmma_wait`] that covers the MMA and the next [`wgmma_fence`].
    pub fn get(&self, j: u32) -> Reg<f32> {
        Reg::from_operand(Operand::Reg(self.regs[j as usize]))
    }

    /// One FP8 k-step (K = 32): `self = a . b^T` (+ `self` if `accumulate`). Operands are descriptors.
    #[track_caller]
    pub fn mma_e4m3(&self, a: Reg<u64>, b: Reg<u64>, accumulate: bool) {
        self.mma(MmaInput::E4m3, a, b, accumulate);
    }

    /// One BF16 k-step (K = 16), both operands K-major.
    #[track_caller]
    pub fn mma_bf16(&self, a: Reg<u64>, b: Reg<u64>, accumulate: bool) {
        self.mma(MmaInput::Bf16, a, b, accumulate);
    }

    #[track_caller]
    fn mma(&self, input: MmaInput, a: Reg<u64>, b: Reg<u64>, accumulate: bool) {
        emit(Op::Wgmma {
            input,
            n: self.n,
            acc: self.regs.clone().into_boxed_slice(),
            a: WgmmaA::Descriptor(a.operand()),
            b: b.operand(),
            scale_d: ScaleD::Const(accumulate),
        });
    }
}

/// Orders earlier register and accumulator accesses before the following MMAs.
#[track_caller]
pub fn wgmma_fence() {
    emit(Op::WgmmaFence);
}

/// Closes the warpgroup's current MMA group.
#[track_caller]
pub fn wgmma_commit() {
    emit(Op::WgmmaCommit);
}

/// Waits until at most `pending` MMA groups of the warpgroup remain.
#[track_caller]
pub fn wgmma_wait(pending: u32) {
    emit(Op::WgmmaWait { pending });
}

//! Stores to multicast addresses: one store that writes to the same place of several devices' memory.
//!
//! A multicast address stands for one buffer on each of a group of devices. Only the instructions made for it may use it.

use crate::builder::emit;
use crate::op::{Address, Op};
use crate::ty::{Bf16x2, Scalar, Ty};
use crate::value::Reg;

/// A multicast address. Stores are relaxed at system scope; of one wider than 8 bytes only the 8-byte halves are sure to
/// become visible whole, and each device sees them at its own time.
#[derive(Clone, Copy, Debug)]
pub struct Multicast {
    base: Reg<u64>,
    offset: i32,
}

impl Multicast {
    /// From an address in bytes.
    pub fn from_address(base: Reg<u64>) -> Multicast {
        Multicast { base, offset: 0 }
    }

    /// `bytes` further on, known when the kernel is built.
    ///
    /// # Panics
    /// If the offset leaves 32 bits.
    pub fn byte_offset(self, bytes: i32) -> Multicast {
        Multicast { offset: self.offset.checked_add(bytes).expect("a constant offset fits 32 bits"), ..self }
    }

    /// `bytes` further on (64-bit).
    #[track_caller]
    pub fn byte_at(self, bytes: impl Into<Reg<u64>>) -> Multicast {
        Multicast { base: self.base + bytes.into(), ..self }
    }

    /// Stores 4 bytes.
    #[track_caller]
    pub fn store(self, value: Reg<u32>) {
        self.store_n(Ty::U32, [value]);
    }

    /// Stores 8 bytes.
    #[track_caller]
    pub fn store_u64(self, value: Reg<u64>) {
        self.store_n(Ty::U64, [value]);
    }

    /// Stores `N` (2 or 4) words in one access aligned to its size.
    #[track_caller]
    pub fn store_vec<const N: usize>(self, words: [Reg<u32>; N]) {
        self.store_n(Bf16x2::TY, words);
    }

    #[track_caller]
    fn store_n<T: Scalar, const N: usize>(self, ty: Ty, values: [Reg<T>; N]) {
        let srcs = values.map(|v| v.in_register().reg().expect("put into a register"));
        let addr = Address { base: self.base.operand(), offset: self.offset };
        emit(Op::MultimemSt { ty, srcs: Box::new(srcs), addr });
    }
}

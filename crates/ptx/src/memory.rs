//! Typed pointers into device and shared memory, their loads, stores and atomics.

use std::marker::PhantomData;

use crate::builder::{self, emit, fresh};
use crate::op::{Address, Atomic, Cache, Eviction, Op, Operand, RegId, Scope, Sem, Space};
use crate::slots::memory_class;
use crate::ty::{Class, Elem, Scalar};
use crate::value::Reg;

/// How a load behaves: ordering and caching.
#[derive(Clone, Copy, Debug)]
pub struct LoadMode {
    sem: Sem,
    cache: Cache,
}

impl LoadMode {
    /// An ordinary load.
    pub const WEAK: LoadMode =
        LoadMode { sem: Sem::Weak, cache: Cache { nc: false, no_allocate: false, policy: None } };
    /// `.volatile`.
    pub const VOLATILE: LoadMode = LoadMode { sem: Sem::Volatile, ..LoadMode::WEAK };
    /// Read-only data streamed past L1.
    pub const STREAM: LoadMode =
        LoadMode { sem: Sem::Weak, cache: Cache { nc: true, no_allocate: true, policy: None } };
    /// Data written before this launch, coherent path, not kept in L1.
    pub const NO_ALLOCATE: LoadMode =
        LoadMode { sem: Sem::Weak, cache: Cache { nc: false, no_allocate: true, policy: None } };

    /// Relaxed at `scope`.
    pub fn relaxed(scope: Scope) -> LoadMode {
        LoadMode { sem: Sem::Relaxed(scope), ..LoadMode::WEAK }
    }

    /// Acquire at `scope`.
    pub fn acquire(scope: Scope) -> LoadMode {
        LoadMode { sem: Sem::Acquire(scope), ..LoadMode::WEAK }
    }

    /// With an L2 policy.
    pub fn policy(mut self, policy: Policy) -> LoadMode {
        self.cache.policy = Some(policy.reg);
        self
    }
}

/// An L2 eviction policy.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    pub(crate) reg: RegId,
}

impl Policy {
    #[track_caller]
    fn new(eviction: Eviction) -> Policy {
        let dst = fresh(Class::B64);
        emit(Op::CreatePolicy { dst, eviction });
        Policy { reg: dst }
    }

    /// Lines accessed with it are evicted first.
    #[track_caller]
    pub fn evict_first() -> Policy {
        Policy::new(Eviction::First)
    }

    /// Lines accessed with it are evicted last.
    #[track_caller]
    pub fn evict_last() -> Policy {
        Policy::new(Eviction::Last)
    }
}

#[track_caller]
fn load_n<T: Elem, const N: usize>(space: Space, addr: Address, mode: LoadMode) -> [Reg<T::Value>; N] {
    let dsts: [RegId; N] = std::array::from_fn(|_| fresh(memory_class(T::TY)));
    emit(Op::Ld { space, ty: T::TY, sem: mode.sem, cache: mode.cache, dsts: Box::new(dsts), addr });
    dsts.map(|d| Reg::from_operand(Operand::Reg(d)))
}

#[track_caller]
fn store_n<T: Elem, const N: usize>(space: Space, addr: Address, sem: Sem, values: [Reg<T::Value>; N]) {
    let srcs = values.map(|v| v.operand());
    emit(Op::St { space, ty: T::TY, sem, policy: None, srcs: Box::new(srcs), addr });
}

macro_rules! pointer {
    ($name:ident, $word:ty, $space:ident, $doc:literal) => {
        #[doc = $doc]
        pub struct $name<T> {
            base: Reg<$word>,
            offset: i32,
            elem: PhantomData<T>,
        }
        impl<T> Clone for $name<T> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<T> Copy for $name<T> {}

        impl<T: Elem> $name<T> {
            /// From an address in bytes.
            pub fn from_address(base: Reg<$word>) -> Self {
                $name { base, offset: 0, elem: PhantomData }
            }

            /// The address in bytes.
            #[track_caller]
            pub fn address(self) -> Reg<$word> {
                if self.offset == 0 { self.base } else { self.base + self.offset as $word }
            }

            pub(crate) fn operand(self) -> Address {
                Address { base: self.base.operand(), offset: self.offset }
            }

            /// `n` elements further on, `n` known when the kernel is built.
            ///
            /// # Panics
            /// If the offset in bytes leaves 32 bits.
            #[track_caller]
            pub fn offset(self, n: i32) -> Self {
                self.byte_offset(n.checked_mul(T::TY.bytes() as i32).expect("a constant offset fits 32 bits"))
            }

            /// `bytes` further on, known when the kernel is built.
            ///
            /// # Panics
            /// If the offset in bytes leaves 32 bits.
            #[track_caller]
            pub fn byte_offset(self, bytes: i32) -> Self {
                $name { offset: self.offset.checked_add(bytes).expect("a constant offset fits 32 bits"), ..self }
            }

            /// The same address as another element type.
            pub fn cast<U: Elem>(self) -> $name<U> {
                $name { base: self.base, offset: self.offset, elem: PhantomData }
            }

            /// Loads one element.
            #[track_caller]
            pub fn load(self) -> Reg<T::Value> {
                self.load_as(LoadMode::WEAK)
            }

            /// Loads one element with the given ordering and caching.
            #[track_caller]
            pub fn load_as(self, mode: LoadMode) -> Reg<T::Value> {
                load_n::<T, 1>(Space::$space, self.operand(), mode)[0]
            }

            /// Loads `N` (2 or 4) consecutive elements in one access aligned to its size.
            #[track_caller]
            pub fn load_vec<const N: usize>(self) -> [Reg<T::Value>; N] {
                self.load_vec_as(LoadMode::WEAK)
            }

            /// As [`load_vec`](Self::load_vec) with the given ordering and caching.
            #[track_caller]
            pub fn load_vec_as<const N: usize>(self, mode: LoadMode) -> [Reg<T::Value>; N] {
                load_n::<T, N>(Space::$space, self.operand(), mode)
            }

            /// Stores one element.
            #[track_caller]
            pub fn store(self, value: impl Into<Reg<T::Value>>) {
                self.store_as(Sem::Weak, value)
            }

            /// Stores one element with the given ordering.
            #[track_caller]
            pub fn store_as(self, sem: Sem, value: impl Into<Reg<T::Value>>) {
                store_n::<T, 1>(Space::$space, self.operand(), sem, [value.into()])
            }

            /// Stores `N` (2 or 4) consecutive elements in one access aligned to its size.
            #[track_caller]
            pub fn store_vec<const N: usize>(self, values: [Reg<T::Value>; N]) {
                self.store_vec_as(Sem::Weak, values)
            }

            /// As [`store_vec`](Self::store_vec) with the given ordering.
            #[track_caller]
            pub fn store_vec_as<const N: usize>(self, sem: Sem, values: [Reg<T::Value>; N]) {
                store_n::<T, N>(Space::$space, self.operand(), sem, values)
            }

            /// Atomic read-modify-write; returns the old value.
            #[track_caller]
            pub fn atomic(self, op: Atomic, sem: Sem, value: impl Into<Reg<T::Value>>) -> Reg<T::Value> {
                let dst = fresh(<T::Value as Scalar>::TY.class());
                let a = value.into().operand();
                emit(Op::Atom {
                    space: Space::$space,
                    op,
                    ty: T::TY,
                    sem,
                    dst: Some(dst),
                    addr: self.operand(),
                    a,
                    b: None,
                });
                Reg::from_operand(Operand::Reg(dst))
            }

            /// Atomic read-modify-write without a result.
            #[track_caller]
            pub fn reduce(self, op: Atomic, sem: Sem, value: impl Into<Reg<T::Value>>) {
                let a = value.into().operand();
                emit(Op::Atom {
                    space: Space::$space,
                    op,
                    ty: T::TY,
                    sem,
                    dst: None,
                    addr: self.operand(),
                    a,
                    b: None,
                });
            }

            /// Atomic compare and swap; returns the old value.
            #[track_caller]
            pub fn compare_swap(
                self,
                sem: Sem,
                expected: impl Into<Reg<T::Value>>,
                new: impl Into<Reg<T::Value>>,
            ) -> Reg<T::Value> {
                let dst = fresh(<T::Value as Scalar>::TY.class());
                let (a, b) = (expected.into().operand(), new.into().operand());
                emit(Op::Atom {
                    space: Space::$space,
                    op: Atomic::Cas,
                    ty: T::TY,
                    sem,
                    dst: Some(dst),
                    addr: self.operand(),
                    a,
                    b: Some(b),
                });
                Reg::from_operand(Operand::Reg(dst))
            }
        }
    };
}

pointer!(Global, u64, Global, "A pointer into device memory (64-bit address).");
pointer!(Shared, u32, Shared, "A pointer into this CTA's shared memory (32-bit address).");

impl<T: Elem> Global<T> {
    /// As [`store_vec`](Self::store_vec) (also of one element) with an L2 policy.
    #[track_caller]
    pub fn store_vec_with<const N: usize>(self, policy: Policy, values: [Reg<T::Value>; N]) {
        emit(Op::St {
            space: Space::Global,
            ty: T::TY,
            sem: Sem::Weak,
            policy: Some(policy.reg),
            srcs: Box::new(values.map(|v| v.operand())),
            addr: self.operand(),
        });
    }

    /// Element `i`, a 32-bit unsigned index (the byte offset is formed in 64 bits).
    #[track_caller]
    pub fn at(self, i: impl Into<Reg<u32>>) -> Global<T> {
        let i = i.into();
        match i.constant() {
            Some(c) if c * (T::TY.bytes() as u64) < 1 << 20 => self.offset(c as i32),
            _ => Global { base: i.mad_wide(T::TY.bytes(), self.base), ..self },
        }
    }

    /// Element `i`, a 64-bit index.
    #[track_caller]
    pub fn at64(self, i: impl Into<Reg<u64>>) -> Global<T> {
        Global { base: self.base + (i.into() << T::TY.bytes().trailing_zeros()), ..self }
    }

    /// `bytes` further on (64-bit).
    #[track_caller]
    pub fn byte_at(self, bytes: impl Into<Reg<u64>>) -> Global<T> {
        Global { base: self.base + bytes.into(), ..self }
    }

    /// Asks for `bytes` (a multiple of 16) from here to be brought into L2.
    #[track_caller]
    pub fn prefetch_l2(self, bytes: impl Into<Reg<u32>>) {
        emit(Op::PrefetchL2 { addr: self.operand(), bytes: bytes.into().operand() });
    }
}

impl<T: Elem> Shared<T> {
    /// Element `i`.
    #[track_caller]
    pub fn at(self, i: impl Into<Reg<u32>>) -> Shared<T> {
        let i = i.into();
        match i.constant() {
            Some(c) => self.offset(c as i32),
            None => {
                let shift = T::TY.bytes().trailing_zeros();
                let bytes = if shift == 0 { i } else { i << shift };
                Shared { base: self.base + bytes, ..self }
            }
        }
    }

    /// `bytes` further on.
    #[track_caller]
    pub fn byte_at(self, bytes: impl Into<Reg<u32>>) -> Shared<T> {
        Shared { base: self.base + bytes.into(), ..self }
    }
}

/// An array in the kernel's shared layout.
pub struct SharedArray<T> {
    offset: u32,
    len: u32,
    elem: PhantomData<T>,
}
impl<T> Clone for SharedArray<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedArray<T> {}

impl<T: Elem> SharedArray<T> {
    /// Reserves `len` elements at their natural alignment.
    pub fn new(name: &'static str, len: u32) -> Self {
        Self::aligned(name, len, T::TY.bytes())
    }

    /// Reserves `len` elements at `align` bytes (a power of two up to 1024).
    pub fn aligned(name: &'static str, len: u32, align: u32) -> Self {
        let offset = builder::reserve_shared(name, len * T::TY.bytes(), align.max(T::TY.bytes()));
        SharedArray { offset, len, elem: PhantomData }
    }

    /// Number of elements.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(self) -> u32 {
        self.len
    }

    /// Byte offset in the layout.
    pub fn byte_offset(self) -> u32 {
        self.offset
    }

    /// Pointer to element 0.
    #[track_caller]
    pub fn ptr(self) -> Shared<T> {
        Shared::from_address(Reg::from_operand(builder::shared_base())).byte_offset(self.offset as i32)
    }

    /// Pointer to element `i`; a constant index is checked here, others by the simulator.
    #[track_caller]
    pub fn at(self, i: impl Into<Reg<u32>>) -> Shared<T> {
        let i = i.into();
        if let Some(c) = i.constant() {
            assert!(c < self.len as u64, "index {c} is outside the {} elements of the shared array", self.len);
        }
        self.ptr().at(i)
    }

    /// The same bytes as another element type.
    pub fn cast<U: Elem>(self) -> SharedArray<U> {
        SharedArray { offset: self.offset, len: self.len * T::TY.bytes() / U::TY.bytes(), elem: PhantomData }
    }
}

/// Fence for `scope`: earlier accesses of this thread are ordered before later ones.
#[track_caller]
pub fn fence(scope: Scope) {
    emit(Op::Fence { scope });
}

/// Sequentially consistent fence for `scope`.
#[track_caller]
pub fn fence_sc(scope: Scope) {
    emit(Op::FenceSc { scope });
}

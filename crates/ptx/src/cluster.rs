//! Clusters: CTAs that run together, reach each other's shared memory, and share a barrier.
//!
//! A peer's shared memory may be touched once the peer has surely started (a cluster barrier later) and as long as it
//! has surely not ended.

use std::marker::PhantomData;

use crate::builder::{emit, fresh};
use crate::memory::Shared;
use crate::op::{Address, Cache, Op, Operand, RegId, Sem, Space, Special};
use crate::slots::memory_class;
use crate::ty::Elem;
use crate::value::{Reg, def};
use crate::warp::special;

/// A pointer into the shared memory of some CTA of the cluster (32-bit address).
pub struct ClusterShared<T> {
    base: Reg<u32>,
    offset: i32,
    elem: PhantomData<T>,
}
impl<T> Clone for ClusterShared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for ClusterShared<T> {}

/// An mbarrier of some CTA of the cluster, for asynchronous stores to complete on.
#[derive(Clone, Copy)]
pub struct ClusterMbarrier {
    pub(crate) ptr: ClusterShared<u64>,
}

impl<T: Elem> Shared<T> {
    /// The same place in the shared memory of CTA `rank` of the cluster.
    #[track_caller]
    pub fn of_cta(self, rank: impl Into<Reg<u32>>) -> ClusterShared<T> {
        let (own, rank) = (self.address().in_register(), rank.into().operand());
        let addr = own.reg().expect("put into a register above");
        ClusterShared { base: def(|dst| Op::Mapa { dst, addr, rank }), offset: 0, elem: PhantomData }
    }
}

impl<T: Elem> ClusterShared<T> {
    fn operand(self) -> Address {
        Address { base: self.base.operand(), offset: self.offset }
    }

    /// `n` elements further on, `n` known when the kernel is built.
    ///
    /// # Panics
    /// If the offset in bytes leaves 32 bits.
    pub fn offset(self, n: i32) -> Self {
        let bytes = n.checked_mul(T::TY.bytes() as i32).and_then(|bytes| self.offset.checked_add(bytes));
        ClusterShared { offset: bytes.expect("a constant offset fits 32 bits"), ..self }
    }

    /// Loads one element.
    #[track_caller]
    pub fn load(self) -> Reg<T::Value> {
        self.load_n::<1>()[0]
    }

    /// Loads `N` (2 or 4) consecutive elements in one access aligned to its size.
    #[track_caller]
    pub fn load_vec<const N: usize>(self) -> [Reg<T::Value>; N] {
        self.load_n()
    }

    #[track_caller]
    fn load_n<const N: usize>(self) -> [Reg<T::Value>; N] {
        let dsts: [RegId; N] = std::array::from_fn(|_| fresh(memory_class(T::TY)));
        emit(Op::Ld {
            space: Space::Cluster,
            ty: T::TY,
            sem: Sem::Weak,
            cache: Cache::default(),
            dsts: Box::new(dsts),
            addr: self.operand(),
        });
        dsts.map(|d| Reg::from_operand(Operand::Reg(d)))
    }

    /// Stores one element.
    #[track_caller]
    pub fn store(self, value: impl Into<Reg<T::Value>>) {
        self.store_vec([value.into()]);
    }

    /// Stores `N` (2 or 4) consecutive elements in one access aligned to its size.
    #[track_caller]
    pub fn store_vec<const N: usize>(self, values: [Reg<T::Value>; N]) {
        emit(Op::St {
            space: Space::Cluster,
            ty: T::TY,
            sem: Sem::Weak,
            policy: None,
            srcs: Box::new(values.map(|v| v.operand())),
            addr: self.operand(),
        });
    }

    /// Stores `N` (1, 2 or 4) consecutive elements of 4 or 8 bytes, without waiting; their bytes complete on `mbar`,
    /// a barrier of the CTA that they go to, which [`wait_cluster`](crate::Mbarrier::wait_cluster) waits for.
    #[track_caller]
    pub fn store_async<const N: usize>(self, values: [Reg<T::Value>; N], mbar: ClusterMbarrier) {
        emit(Op::StAsync {
            ty: T::TY,
            srcs: Box::new(values.map(|v| v.operand())),
            addr: self.operand(),
            mbar: mbar.ptr.operand(),
        });
    }
}

/// Rank of the CTA in its cluster.
#[track_caller]
pub fn cluster_rank() -> Reg<u32> {
    special(Special::ClusterCtarank)
}

/// CTAs of the cluster.
#[track_caller]
pub fn cluster_size() -> Reg<u32> {
    special(Special::ClusterNctarank)
}

/// Arrives at the cluster's barrier: accesses before it are visible to the whole cluster after [`cluster_wait`]. Every
/// thread arrives, then waits; the warp does both together.
#[track_caller]
pub fn cluster_arrive() {
    emit(Op::ClusterArrive { release: true });
}

/// Arrives at the cluster's barrier without ordering anything but initialised mbarriers behind a
/// [`fence_mbarrier_init`](crate::fence_mbarrier_init): after the wait, every CTA has started.
#[track_caller]
pub fn cluster_arrive_relaxed() {
    emit(Op::ClusterArrive { release: false });
}

/// Waits until every thread of the cluster has arrived.
#[track_caller]
pub fn cluster_wait() {
    emit(Op::ClusterWait);
}

/// [`cluster_arrive`], then [`cluster_wait`].
#[track_caller]
pub fn cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

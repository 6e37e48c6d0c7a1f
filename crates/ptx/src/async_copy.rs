//! mbarriers, copies by threads, tensor-map and bulk copies, and dependent launches.

use crate::builder::{emit, new_label};
use crate::cluster::ClusterMbarrier;
use crate::memory::{Global, Policy, Shared, SharedArray};
use crate::op::{Address, Op, Scope};
use crate::tensor_map::TensorMapHandle;
use crate::ty::Elem;
use crate::value::{Pred, Reg, def_pred};

/// One mbarrier in shared memory.
#[derive(Clone, Copy)]
pub struct Mbarrier {
    ptr: Shared<u64>,
}

/// A row of mbarriers in the shared layout.
#[derive(Clone, Copy)]
pub struct MbarrierArray {
    words: SharedArray<u64>,
}

impl MbarrierArray {
    /// Reserves `n` barriers.
    pub fn new(name: &'static str, n: u32) -> Self {
        MbarrierArray { words: SharedArray::new(name, n) }
    }

    /// Barrier `i`.
    #[track_caller]
    pub fn at(self, i: impl Into<Reg<u32>>) -> Mbarrier {
        Mbarrier { ptr: self.words.at(i) }
    }

    /// Number of barriers.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(self) -> u32 {
        self.words.len()
    }
}

impl Mbarrier {
    pub(crate) fn operand(self) -> Address {
        self.ptr.operand()
    }

    /// Initialises for phases of `count` arrivals. One thread does it, then [`fence_mbarrier_init`] and a barrier.
    #[track_caller]
    pub fn init(self, count: u32) {
        emit(Op::MbarInit { addr: self.operand(), count });
    }

    /// Ends its life.
    #[track_caller]
    pub fn invalidate(self) {
        emit(Op::MbarInval { addr: self.operand() });
    }

    /// Arrives once.
    #[track_caller]
    pub fn arrive(self) {
        emit(Op::MbarArrive { addr: self.operand(), count: 1 });
    }

    /// Arrives once and announces `bytes` of asynchronous copies for this phase.
    #[track_caller]
    pub fn arrive_expect(self, bytes: impl Into<Reg<u32>>) {
        emit(Op::MbarArriveExpectTx { addr: self.operand(), bytes: bytes.into().operand() });
    }

    /// Announces `bytes` of asynchronous copies for this phase; somebody arrives later.
    #[track_caller]
    pub fn expect(self, bytes: impl Into<Reg<u32>>) {
        emit(Op::MbarExpectTx { addr: self.operand(), bytes: bytes.into().operand() });
    }

    /// Whether the phase of the given parity has completed (may suspend for a while).
    #[track_caller]
    pub fn try_wait(self, parity: impl Into<Reg<u32>>) -> Pred {
        self.try_wait_at(Scope::Cta, parity)
    }

    #[track_caller]
    fn try_wait_at(self, scope: Scope, parity: impl Into<Reg<u32>>) -> Pred {
        let parity = parity.into().operand();
        def_pred(|dst| Op::MbarTryWait { dst, addr: self.operand(), parity, scope })
    }

    /// Waits until the phase of the given parity has completed.
    #[track_caller]
    pub fn wait(self, parity: impl Into<Reg<u32>>) {
        self.wait_at(Scope::Cta, parity);
    }

    /// As [`wait`](Self::wait) for a phase that stores of other CTAs of the cluster complete.
    #[track_caller]
    pub fn wait_cluster(self, parity: impl Into<Reg<u32>>) {
        self.wait_at(Scope::Cluster, parity);
    }

    #[track_caller]
    fn wait_at(self, scope: Scope, parity: impl Into<Reg<u32>>) {
        // Spelled out so that every instruction is attributed to the caller, which a closure would hide.
        let retry = new_label();
        emit(Op::Label { label: retry });
        let done = self.try_wait_at(scope, parity);
        emit(Op::Bra { target: retry, cond: Some((done.reg(), false)) });
    }

    /// The barrier at the same place in CTA `rank` of the cluster.
    #[track_caller]
    pub fn of_cta(self, rank: impl Into<Reg<u32>>) -> ClusterMbarrier {
        ClusterMbarrier { ptr: self.ptr.of_cta(rank) }
    }
}

/// Makes initialised mbarriers visible to asynchronous copies.
#[track_caller]
pub fn fence_mbarrier_init() {
    emit(Op::FenceMbarrierInit);
}

/// Orders this thread's ordinary shared-memory writes before later asynchronous reads of them.
#[track_caller]
pub fn fence_proxy_async() {
    emit(Op::FenceProxyAsync);
}

/// Copies one box of `map` at `coords` (innermost first) to `dst`; completes on `mbar`. One lane issues it.
#[track_caller]
pub fn copy_tensor<T: Elem>(
    dst: Shared<T>,
    map: TensorMapHandle,
    coords: &[Reg<u32>],
    mbar: Mbarrier,
    policy: Option<Policy>,
) {
    emit(Op::TensorG2s {
        dst: dst.operand(),
        map: map.reg(),
        coords: coords.iter().map(|c| c.operand()).collect(),
        mbar: mbar.operand(),
        policy: policy.map(|p| p.reg),
    });
}

/// Copies `bytes` (a multiple of 16, both ends 16-byte aligned) to shared memory; completes on `mbar`. One lane
/// issues it.
#[track_caller]
pub fn copy_bulk<T: Elem>(
    dst: Shared<T>,
    src: Global<T>,
    bytes: impl Into<Reg<u32>>,
    mbar: Mbarrier,
    policy: Option<Policy>,
) {
    emit(Op::BulkG2s {
        dst: dst.operand(),
        src: src.operand(),
        bytes: bytes.into().operand(),
        mbar: mbar.operand(),
        policy: policy.map(|p| p.reg),
    });
}

/// Copies 16 bytes, both ends 16-byte aligned, to shared memory in the thread's current copy group, which
/// [`commit_copies`] closes; every lane copies its own. Until [`wait_copies`] nobody may touch the destination, after it
/// the bytes are as if the thread had stored them.
#[track_caller]
pub fn copy_16<T: Elem>(dst: Shared<T>, src: Global<T>, policy: Option<Policy>) {
    emit(Op::CpAsync { dst: dst.operand(), src: src.operand(), policy: policy.map(|p| p.reg) });
}

/// Closes the thread's current copy group.
#[track_caller]
pub fn commit_copies() {
    emit(Op::CpAsyncCommit);
}

/// Waits until at most `pending` copy groups of this thread remain.
#[track_caller]
pub fn wait_copies(pending: u32) {
    emit(Op::CpAsyncWait { pending });
}

/// Copies `bytes` (a multiple of 16) of shared memory to device memory in the thread's current bulk group.
#[track_caller]
pub fn store_bulk<T: Elem>(dst: Global<T>, src: Shared<T>, bytes: impl Into<Reg<u32>>) {
    emit(Op::BulkS2g { dst: dst.operand(), src: src.operand(), bytes: bytes.into().operand() });
}

/// Closes the thread's current bulk group.
#[track_caller]
pub fn commit_bulk() {
    emit(Op::BulkCommit);
}

/// Waits until at most `pending` bulk groups of this thread remain.
#[track_caller]
pub fn wait_bulk(pending: u32) {
    emit(Op::BulkWait { pending, read: false });
}

/// Waits until at most `pending` bulk groups of this thread still read shared memory.
#[track_caller]
pub fn wait_bulk_read(pending: u32) {
    emit(Op::BulkWait { pending, read: true });
}

/// Brings a tensor map into the descriptor cache.
#[track_caller]
pub fn prefetch_tensor_map(map: TensorMapHandle) {
    emit(Op::PrefetchTensormap { map: map.reg() });
}

/// Waits for the launches this one depends on to complete and be visible. Until then nothing they write may be read.
#[track_caller]
pub fn wait_for_dependencies() {
    emit(Op::GridDepWait);
}

/// Allows dependent launches to start once every CTA got here or ended.
#[track_caller]
pub fn launch_dependents() {
    emit(Op::GridDepLaunch);
}

/// Shrinks this warpgroup to `count` registers per thread (a multiple of 8).
#[track_caller]
pub fn shrink_registers(count: u32) {
    emit(Op::SetMaxNReg { inc: false, count });
}

/// Grows this warpgroup to `count` registers per thread (a multiple of 8), waiting until they are free.
#[track_caller]
pub fn grow_registers(count: u32) {
    emit(Op::SetMaxNReg { inc: true, count });
}

//! Device memory: allocation, fills and copies.

use cudarc::driver::sys::{self, CUresult};

use super::context::Context;
use super::stream::Stream;
use crate::error::Error;

impl Context {
    /// Allocates `bytes` > 0, uninitialised.
    pub(crate) fn alloc(&self, bytes: u64) -> Result<u64, Error> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: the context is bound and `address` outlives the call.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (mut free, mut total) = (0, 0);
                // SAFETY: the context is bound, and both results outlive the call.
                let asked = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
                let free = (asked == CUresult::CUDA_SUCCESS).then_some(free as u64);
                Err(Error::OutOfMemory { requested: bytes, free })
            }
            result => self.check("cuMemAlloc", result).map(|()| address),
        }
    }

    /// Frees what [`Context::alloc`] returned. Failures (after a fault) are nobody's to handle.
    pub(crate) fn free(&self, address: u64) {
        if self.bind().is_ok() {
            // SAFETY: the caller owns the allocation and gives it up here.
            let _ = unsafe { sys::cuMemFree_v2(address) };
        }
    }

    /// Copies `bytes` (not empty) to `address` and waits for it.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        self.bind()?;
        let (source, n, stream) = (bytes.as_ptr().cast(), bytes.len(), self.utility());
        // SAFETY: the caller checked that the range lies in one allocation; `bytes` outlives the copy, which the
        // synchronisation below waits for.
        self.check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(address, source, n, stream) })?;
        // SAFETY: the utility stream lives as long as the context.
        self.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
    }

    /// Fills `len` > 0 bytes and waits for it.
    pub(crate) fn fill(&self, address: u64, len: u64, byte: u8) -> Result<(), Error> {
        self.bind()?;
        let stream = self.utility();
        // SAFETY: the caller checked that the range lies in one allocation.
        self.check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, byte, len as usize, stream) })?;
        // SAFETY: the utility stream lives as long as the context.
        self.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
    }
}

impl Stream {
    /// Copies host bytes (not empty) in stream order and waits for it, so that the borrow may end.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        self.refuse_while_capturing("copying from the host")?;
        let (source, n) = (bytes.as_ptr().cast(), bytes.len());
        let copied = {
            // SAFETY: the context is bound by the check above, the range was checked by the caller, and `bytes`
            // outlives the copy, which the synchronisation below waits for.
            unsafe { sys::cuMemcpyHtoDAsync_v2(address, source, n, self.raw()) }
        };
        self.context().check("cuMemcpyHtoDAsync", copied)?;
        self.synchronize()
    }

    /// Copies device bytes (not empty) in stream order and waits for them.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.refuse_while_capturing("copying to the host")?;
        let (target, n) = (bytes.as_mut_ptr().cast(), bytes.len());
        // SAFETY: as in `write`; `bytes` is exclusively borrowed until the synchronisation below.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(target, address, n, self.raw()) };
        self.context().check("cuMemcpyDtoHAsync", copied)?;
        self.synchronize()
    }

    /// Fills `len` > 0 bytes in stream order.
    pub(crate) fn fill(&self, address: u64, len: u64, byte: u8) -> Result<(), Error> {
        self.context().bind()?;
        // SAFETY: the context is bound, and the caller checked that the range lies in one allocation.
        let filled = unsafe { sys::cuMemsetD8Async(address, byte, len as usize, self.raw()) };
        self.context().check("cuMemsetD8Async", filled)
    }

    /// Copies `len` > 0 bytes between device addresses in stream order; they may be of peer devices.
    pub(crate) fn copy(&self, target: u64, source: u64, len: u64) -> Result<(), Error> {
        self.context().bind()?;
        // SAFETY: the context is bound, and the caller checked that both ranges lie in allocations.
        let copied = unsafe { sys::cuMemcpyAsync(target, source, len as usize, self.raw()) };
        self.context().check("cuMemcpyAsync", copied)
    }
}

//! Memory shared between processes.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::context::Context;
use super::driver;
use crate::error::Error;

/// Bytes of the driver's handle.
pub(crate) const HANDLE_BYTES: usize = 64;

impl Context {
    /// The handle of the allocation that holds `address`, and the offset in it.
    pub(crate) fn export(&self, address: u64) -> Result<([u8; HANDLE_BYTES], u64), Error> {
        self.bind()?;
        let refuse = |reason: String| Error::NotShareable { address, reason };
        let (base, _) = self.range(address, refuse)?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: the context is bound and `handle` outlives the call, which checks the address.
        match unsafe { sys::cuIpcGetMemHandle(&mut handle, base) } {
            CUresult::CUDA_SUCCESS => Ok((bytemuck::cast(handle.reserved), address - base)),
            result if driver::is_sticky(result) => {
                self.check("cuIpcGetMemHandle", result).map(|()| unreachable!("a sticky result is an error"))
            }
            CUresult::CUDA_ERROR_INVALID_VALUE => Err(refuse(
                "the driver has no handle for it, as for memory of a pool or of virtual memory management; memory that \
                 cuMemAlloc gave is needed"
                    .into(),
            )),
            result => Err(refuse(driver::explain(result))),
        }
    }

    /// Base and size of the allocation that holds `address`. The context is bound.
    fn range(&self, address: u64, refuse: impl Fn(String) -> Error) -> Result<(u64, u64), Error> {
        let (mut base, mut size) = (0, 0);
        // SAFETY: the context is bound by the caller, and both results outlive the call, which checks the address.
        match unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut size, address) } {
            CUresult::CUDA_SUCCESS => Ok((base, size as u64)),
            result if driver::is_sticky(result) => {
                self.check("cuMemGetAddressRange", result).map(|()| unreachable!("a sticky result is an error"))
            }
            result => Err(refuse(driver::explain(result))),
        }
    }
}

/// Another process's allocation, mapped until dropped.
pub(crate) struct Mapping {
    context: Arc<Context>,
    base: u64,
}

impl Mapping {
    /// Maps the allocation of `handle`, which another process exported.
    pub(crate) fn open(context: &Arc<Context>, handle: &[u8; HANDLE_BYTES]) -> Result<Mapping, Error> {
        context.bind()?;
        let mut base = 0;
        let handle = sys::CUipcMemHandle { reserved: bytemuck::cast(*handle) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let refuse = |reason| Error::NotMappable { device: context.info().name.clone(), reason };
        // SAFETY: the context is bound and `base` outlives the call; the driver checks the handle.
        match unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, handle, flags) } {
            CUresult::CUDA_SUCCESS => Ok(Mapping { context: context.clone(), base }),
            result if driver::is_sticky(result) => {
                context.check("cuIpcOpenMemHandle", result).map(|()| unreachable!("a sticky result is an error"))
            }
            CUresult::CUDA_ERROR_INVALID_CONTEXT => {
                Err(refuse("the driver maps no memory into the process that exported it".into()))
            }
            CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED => {
                Err(refuse("it has no peer access to the device that owns it".into()))
            }
            result => Err(refuse(driver::explain(result))),
        }
    }

    /// Address of byte `offset`, if `bytes` from there on are mapped.
    pub(crate) fn checked_range(&self, offset: u64, bytes: u64) -> Result<u64, Error> {
        self.context.bind()?;
        let refuse = |reason| Error::NotMappable { device: self.context.info().name.clone(), reason };
        let (base, size) = self.context.range(self.base, refuse)?;
        let within = self.base - base;
        match within.checked_add(offset).and_then(|at| at.checked_add(bytes)) {
            Some(end) if end <= size => Ok(self.base + offset),
            _ => Err(refuse(format!("{bytes} bytes at {offset} are outside the allocation of {size}"))),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // As freeing does, wait for what may still use the memory. A failure (after a fault) is nobody's to handle.
            // SAFETY: the context is bound.
            let _ = unsafe { sys::cuCtxSynchronize() };
            // SAFETY: opened by `open` and given up here, and nothing uses it any more.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.base) };
        }
    }
}

//! A device's context: identity, binding, error bookkeeping, peers.

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};
use parking_lot::Mutex;

use super::driver::{self, check};
use super::module::{Loaded, ModuleKey, ModuleSlot};
use super::stream::Raw;
use crate::device::DeviceInfo;
use crate::error::Error;

/// One CUDA context and what this crate keeps for it. Shared by every handle of the device.
pub(crate) struct Context {
    owner: Arc<CudaContext>,
    info: DeviceInfo,
    /// Non-blocking stream for uploads and fills that name no stream.
    utility: Raw<sys::CUstream>,
    pub(super) modules: Mutex<HashMap<ModuleKey, ModuleSlot>>,
    fault: OnceLock<Error>,
    /// Kernel and graph names by launch id - 1.
    names: Mutex<Vec<Arc<str>>>,
    launches: Mutex<Vec<Weak<Launches>>>,
    sequence: AtomicU64,
}

/// Launches of one stream that are not known to have finished.
#[derive(Default)]
pub(crate) struct Launches {
    /// Sequence number << 32 | launch id of the oldest; 0 for none.
    first: AtomicU64,
    count: AtomicU64,
}

impl Launches {
    /// Everything launched on the stream has finished without fault.
    pub(super) fn finished(&self) {
        self.first.store(0, Ordering::Relaxed);
        self.count.store(0, Ordering::Relaxed);
    }
}

/// Contexts in use, so that every handle of a device shares one module cache and one fault record.
static CONTEXTS: Mutex<Vec<Weak<Context>>> = Mutex::new(Vec::new());

impl Context {
    /// Retains the primary context of device `ordinal`.
    pub(crate) fn primary(ordinal: usize) -> Result<Arc<Context>, Error> {
        let count = driver::device_count()?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let owner = CudaContext::new(ordinal).map_err(|e| match check("cuDevicePrimaryCtxRetain", e.0) {
            Err(error) => error,
            Ok(()) => unreachable!("an error result is not success"),
        })?;
        Context::wrap(owner)
    }

    /// Uses the context that `owner` holds.
    pub(crate) fn wrap(owner: Arc<CudaContext>) -> Result<Arc<Context>, Error> {
        let version = driver::init()?;
        let mut contexts = CONTEXTS.lock();
        contexts.retain(|c| c.strong_count() > 0);
        if let Some(known) = contexts.iter().filter_map(Weak::upgrade).find(|c| c.owner.cu_ctx() == owner.cu_ctx()) {
            return Ok(known);
        }
        let info = device_info(&owner, version)?;
        bind(owner.cu_ctx())?;
        let mut utility = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is bound (line above) and `utility` outlives the call.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut utility, flags) })?;
        let context = Arc::new(Context {
            owner,
            info,
            utility: Raw(utility),
            modules: Mutex::default(),
            fault: OnceLock::new(),
            names: Mutex::default(),
            launches: Mutex::default(),
            sequence: AtomicU64::new(0),
        });
        contexts.push(Arc::downgrade(&context));
        Ok(context)
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The bindings' context, for interoperation.
    pub(crate) fn owner(&self) -> &Arc<CudaContext> {
        &self.owner
    }

    /// Whether both are the same CUDA context.
    pub(crate) fn same(&self, other: &Context) -> bool {
        self.owner.cu_ctx() == other.owner.cu_ctx()
    }

    pub(super) fn utility(&self) -> sys::CUstream {
        self.utility.0
    }

    /// Makes the context current on the calling thread, as every driver call needs. A lost context refuses.
    pub(super) fn bind(&self) -> Result<(), Error> {
        if let Some(first) = self.fault.get() {
            return Err(first.clone());
        }
        // SAFETY: `owner` keeps the context alive.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.owner.cu_ctx()) })
    }

    /// Turns a driver result into an error, remembering the first fault for good.
    pub(super) fn check(&self, call: &'static str, result: CUresult) -> Result<(), Error> {
        if result == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        self.fail(call, result)
    }

    #[cold]
    fn fail(&self, call: &'static str, result: CUresult) -> Result<(), Error> {
        if let Some(first) = self.fault.get() {
            return Err(first.clone());
        }
        if driver::is_sticky(result) {
            return Err(self.fault.get_or_init(|| self.fault(call, result)).clone());
        }
        if driver::is_capture(result) {
            return Err(Error::Capture { reason: format!("{call}: {}", driver::explain(result)) });
        }
        if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::OutOfMemory { requested: 0, free: None });
        }
        check(call, result)
    }

    fn fault(&self, call: &'static str, result: CUresult) -> Error {
        let mut launched = 0;
        let mut oldest: Option<u64> = None;
        for stream in self.launches.lock().iter().filter_map(Weak::upgrade) {
            launched += stream.count.load(Ordering::Relaxed);
            let first = stream.first.load(Ordering::Relaxed);
            if first != 0 {
                oldest = Some(oldest.map_or(first, |o| o.min(first)));
            }
        }
        let kernel = oldest.map(|first| self.names.lock()[(first as u32 - 1) as usize].to_string());
        let reason = format!(
            "{call} reported {} ({}); {launched} launches were not known to have finished",
            driver::explain(result),
            result as u32
        );
        Error::Fault { kernel, reason }
    }

    /// Registers a kernel or graph name and returns its launch id.
    pub(super) fn register_name(&self, name: &str) -> u32 {
        let mut names = self.names.lock();
        names.push(name.into());
        names.len() as u32
    }

    /// A new stream's launch record.
    pub(super) fn register_stream(&self) -> Arc<Launches> {
        let launches = Arc::new(Launches::default());
        let mut all = self.launches.lock();
        all.retain(|l| l.strong_count() > 0);
        all.push(Arc::downgrade(&launches));
        launches
    }

    /// Notes a launch for fault reports: two relaxed atomics, nothing allocated.
    pub(super) fn note_launch(&self, stream: &Launches, id: u32) {
        stream.count.fetch_add(1, Ordering::Relaxed);
        if stream.first.load(Ordering::Relaxed) == 0 {
            let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
            stream.first.store(sequence << 32 | id as u64, Ordering::Relaxed);
        }
    }

    /// Sets the context's limit of persisting L2 lines and reads back what it became.
    pub(crate) fn reserve_l2(&self, bytes: usize) -> Result<usize, Error> {
        let (mut largest, device) = (0, self.owner.cu_device());
        let which = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE;
        // SAFETY: `device` is the valid device of a live context and `largest` outlives the call.
        self.check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut largest, which, device) })?;
        self.bind()?;
        let limit = sys::CUlimit::CU_LIMIT_PERSISTING_L2_CACHE_SIZE;
        // SAFETY: this context is bound (line above); the value is within the device's largest.
        self.check("cuCtxSetLimit", unsafe { sys::cuCtxSetLimit(limit, bytes.min(largest as usize)) })?;
        let mut granted = 0;
        // SAFETY: this context is bound and `granted` outlives the call.
        self.check("cuCtxGetLimit", unsafe { sys::cuCtxGetLimit(&mut granted, limit) })?;
        Ok(granted)
    }

    /// Lets kernels of this device access `other`'s memory.
    pub(crate) fn enable_peer(&self, other: &Context) -> Result<(), Error> {
        if self.same(other) {
            return Ok(());
        }
        let refuse =
            |reason: String| Error::PeerAccess { from: self.info.name.clone(), to: other.info.name.clone(), reason };
        let mut can = 0;
        // SAFETY: both devices exist as long as their contexts, which `self` and `other` keep.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.owner.cu_device(), other.owner.cu_device()) };
        self.check("cuDeviceCanAccessPeer", asked)?;
        if can == 0 {
            return Err(refuse("the driver reports no peer access between them".into()));
        }
        self.bind()?;
        // SAFETY: this context is bound (line above), `other` keeps the peer context alive, flags must be 0.
        match unsafe { sys::cuCtxEnablePeerAccess(other.owner.cu_ctx(), 0) } {
            CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            result if driver::is_sticky(result) => self.check("cuCtxEnablePeerAccess", result),
            result => Err(refuse(driver::explain(result))),
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // A lost context keeps nothing to release, and a failure has nobody to tell: results are dropped on purpose.
        if self.bind().is_err() {
            return;
        }
        for slot in self.modules.get_mut().values() {
            if let Some(loaded) = &*slot.lock() {
                Loaded::unload(loaded);
            }
        }
        // SAFETY: the context is bound, and the stream was made by `wrap` and is used by nobody else any more.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.utility.0) };
    }
}

fn bind(context: sys::CUcontext) -> Result<(), Error> {
    // SAFETY: the caller holds the context's owner.
    check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })
}

fn device_info(owner: &CudaContext, driver_version: crate::Version) -> Result<DeviceInfo, Error> {
    let device = owner.cu_device();
    let attribute = |which: CUdevice_attribute| -> Result<u32, Error> {
        let mut value = 0;
        // SAFETY: `device` is the valid device of a live context and `value` outlives the call.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
        Ok(value as u32)
    };
    let mut name = [0; 256];
    // SAFETY: the buffer is as long as stated and outlives the call, which terminates what it writes.
    let named = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device) };
    check("cuDeviceGetName", named)?;
    // SAFETY: the driver terminated the name within the buffer (success above).
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut memory_bytes = 0;
    // SAFETY: `device` is valid and `memory_bytes` outlives the call.
    check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) })?;
    use CUdevice_attribute::*;
    let capability = (
        attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    Ok(DeviceInfo {
        name: format!("cuda:{} {name}", owner.ordinal()),
        compute_capability: capability,
        target: ptx::Target::for_compute_capability(capability.0, capability.1),
        sms: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        l2_bytes: attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64,
        shared_bytes_max: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        memory_bytes: memory_bytes as u64,
        driver_version: Some(driver_version),
        simulated: false,
    })
}

//! The driver library: whether it is there, new enough and willing, asked once per process before anything else.
//!
//! The bindings panic when the library or a symbol is missing, so every symbol this crate can reach is looked up
//! first and its absence becomes a typed error.

use std::ffi::CStr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};

use crate::device::Version;
use crate::error::Error;

/// CUDA 12.4: the first driver level that assembles `.version 8.4`, the lowest PTX version generated.
pub(crate) const DRIVER_NEEDED: Version = Version { major: 12, minor: 4 };

/// Every driver function that this crate, or the part of the bindings it uses, can call.
const SYMBOLS: &[&CStr] = &[
    c"cuInit",
    c"cuDriverGetVersion",
    c"cuGetErrorName",
    c"cuGetErrorString",
    c"cuDeviceGet",
    c"cuDeviceGetCount",
    c"cuDeviceGetName",
    c"cuDeviceGetAttribute",
    c"cuDeviceTotalMem_v2",
    c"cuDeviceCanAccessPeer",
    c"cuDevicePrimaryCtxRetain",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuCtxGetCurrent",
    c"cuCtxGetLimit",
    c"cuCtxSetLimit",
    c"cuCtxSetCurrent",
    c"cuCtxSynchronize",
    c"cuCtxEnablePeerAccess",
    c"cuMemAlloc_v2",
    c"cuMemFree_v2",
    c"cuMemGetInfo_v2",
    c"cuMemGetAddressRange_v2",
    c"cuIpcGetMemHandle",
    c"cuIpcOpenMemHandle_v2",
    c"cuIpcCloseMemHandle",
    c"cuMemsetD8Async",
    c"cuMemcpyAsync",
    c"cuMemcpyHtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
    c"cuStreamCreate",
    c"cuStreamDestroy_v2",
    c"cuStreamSynchronize",
    c"cuStreamQuery",
    c"cuStreamWaitEvent",
    c"cuStreamIsCapturing",
    c"cuStreamBeginCapture_v2",
    c"cuStreamEndCapture",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventRecord",
    c"cuEventQuery",
    c"cuEventSynchronize",
    ELAPSED_TIME,
    c"cuModuleLoadDataEx",
    c"cuModuleUnload",
    c"cuModuleGetFunction",
    c"cuFuncLoad",
    c"cuFuncGetAttribute",
    c"cuFuncSetAttribute",
    c"cuLaunchKernelEx",
    c"cuTensorMapEncodeTiled",
    c"cuGraphInstantiateWithFlags",
    c"cuGraphUpload",
    c"cuGraphLaunch",
    c"cuGraphDestroy",
    c"cuGraphExecDestroy",
    c"cuGraphGetNodes",
    c"cuGraphGetEdges_v2",
];

/// Loads and initialises the driver, once; later calls repeat the first answer.
///
/// # Errors
/// [`Error::NoDriver`], [`Error::DriverTooOld`] or [`Error::NoDevice`].
pub(crate) fn init() -> Result<Version, Error> {
    static STATE: OnceLock<Result<Version, Error>> = OnceLock::new();
    STATE.get_or_init(init_once).clone()
}

fn no_driver(reason: impl Into<String>) -> Error {
    Error::NoDriver { reason: reason.into(), needed: DRIVER_NEEDED }
}

fn init_once() -> Result<Version, Error> {
    // SAFETY: opening the system's driver library runs only its own initialisers.
    if !unsafe { sys::is_culib_present() } {
        return Err(no_driver("libcuda was not found"));
    }
    if !has_symbol(c"cuInit") || !has_symbol(c"cuDriverGetVersion") {
        return Err(no_driver("the libcuda found has no cuInit, so it is no driver library"));
    }
    let mut level = 0;
    // SAFETY: the symbol exists (checked above), and `level` outlives the call, which needs no prior cuInit.
    let asked = unsafe { sys::cuDriverGetVersion(&mut level) };
    let found = match asked {
        CUresult::CUDA_SUCCESS => Version::from_level(level),
        other => return Err(no_driver(format!("cuDriverGetVersion gave {other:?}"))),
    };
    let missing = SYMBOLS.iter().find(|name| !has_symbol(name));
    // SAFETY: the symbol exists (checked above); flags must be 0.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => {}
        CUresult::CUDA_ERROR_NO_DEVICE => return Err(Error::NoDevice { ordinal: 0, count: 0 }),
        CUresult::CUDA_ERROR_STUB_LIBRARY => {
            return Err(no_driver("the libcuda found is the toolkit's link-time stub"));
        }
        other => return Err(no_driver(format!("cuInit gave {other:?} ({})", other as u32))),
    }
    if found < DRIVER_NEEDED || missing.is_some() {
        let missing = missing.map(|name| name.to_string_lossy().into_owned());
        return Err(Error::DriverTooOld { found, needed: DRIVER_NEEDED, missing });
    }
    Ok(found)
}

fn has_symbol(name: &CStr) -> bool {
    // SAFETY: the library is present (checked by the caller's first step), so this returns without panicking.
    let library = unsafe { sys::culib() };
    // SAFETY: the symbol is only looked up, never called through this type.
    unsafe { library.get::<unsafe extern "C" fn()>(name.to_bytes_with_nul()) }.is_ok()
}

/// `cuEventElapsedTime`, which the bindings of this level offer only as its second version of CUDA 12.8.
///
/// # Safety
/// As for the driver function: initialised driver, bound context, live events, `ms` valid for writing.
pub(crate) unsafe fn event_elapsed_time(ms: *mut f32, start: sys::CUevent, end: sys::CUevent) -> CUresult {
    type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;
    static FUNCTION: OnceLock<ElapsedTime> = OnceLock::new();
    let function = FUNCTION.get_or_init(|| {
        // SAFETY: the library is present, or there would be no events.
        let library = unsafe { sys::culib() };
        // SAFETY: this is the function's signature in every driver level.
        let symbol = unsafe { library.get::<ElapsedTime>(ELAPSED_TIME.to_bytes_with_nul()) };
        *symbol.expect("`init` looked the symbol up")
    });
    // SAFETY: the caller's duties are the function's own.
    unsafe { function(ms, start, end) }
}

const ELAPSED_TIME: &CStr = c"cuEventElapsedTime";

/// Number of devices the driver shows.
pub(crate) fn device_count() -> Result<usize, Error> {
    init()?;
    let mut count = 0;
    // SAFETY: the driver is initialised and `count` outlives the call.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(count as usize)
}

/// The error of a call that has no context to blame.
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), Error> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(Error::Driver { call, code: other as u32, name: explain(other) }),
    }
}

/// Name and explanation of a driver result.
pub(crate) fn explain(result: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver is initialised whenever it returns a result, and `text` outlives the call.
    let asked = unsafe { sys::cuGetErrorString(result, &mut text) };
    if asked != CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{result:?}");
    }
    // SAFETY: on success the driver returns a NUL-terminated string that lives as long as the library.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{result:?}: {}", text.to_string_lossy())
}

/// Whether a result means that the context is lost.
pub(crate) fn is_sticky(result: CUresult) -> bool {
    use CUresult::*;
    matches!(
        result,
        CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTAINED
            | CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUDA_ERROR_EXTERNAL_DEVICE
    )
}

/// Whether a result comes from the rules of stream capture.
pub(crate) fn is_capture(result: CUresult) -> bool {
    (900..=908).contains(&(result as u32))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Driver functions called by a source text, `sys::cuXyz(`.
    fn called(source: &str) -> BTreeSet<String> {
        source
            .split("sys::cu")
            .skip(1)
            .filter_map(|rest| rest.split_once('('))
            .filter(|(name, _)| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'))
            .map(|(name, _)| format!("cu{name}"))
            .filter(|name| name != "culib") // the library handle itself
            .collect()
    }

    #[test]
    fn every_driver_function_called_is_looked_up_first() {
        let sources = [
            include_str!("driver.rs").split("#[cfg(test)]").next().expect("code before the tests"),
            include_str!("context.rs"),
            include_str!("memory.rs"),
            include_str!("module.rs"),
            include_str!("stream.rs"),
            include_str!("graph.rs"),
            include_str!("ipc.rs"),
            include_str!("nccl.rs"),
            include_str!("launch.rs"),
        ];
        let listed: BTreeSet<String> = SYMBOLS.iter().map(|s| s.to_string_lossy().into_owned()).collect();
        let used: BTreeSet<String> = sources.into_iter().flat_map(called).collect();
        assert!(used.len() > 30, "the scan found only {used:?}");
        let unlisted: Vec<_> = used.difference(&listed).collect();
        assert!(unlisted.is_empty(), "called but not looked up: {unlisted:?}");
        // What the bindings' own context type calls on our behalf.
        let by_bindings = [
            "cuDeviceGet",
            "cuDevicePrimaryCtxRetain",
            "cuDevicePrimaryCtxRelease_v2",
            "cuCtxGetCurrent",
            "cuGetErrorName",
            "cuEventElapsedTime", // looked up by this crate itself
        ];
        let unused: Vec<_> = listed.difference(&used).filter(|s| !by_bindings.contains(&s.as_str())).collect();
        assert!(unused.is_empty(), "looked up but never called: {unused:?}");
    }
}

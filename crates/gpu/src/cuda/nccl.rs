//! The NCCL library and its communicators.
//!
//! The functions are looked up here and not by the bindings, which know no `libnccl.so.2`, the only name that NVIDIA's
//! packages install, and which take results for an enum that a newer library could overrun.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclUniqueId};
use libloading::Library;
use parking_lot::Mutex;

use super::context::Context;
use super::stream::Raw;
use crate::device::Version;
use crate::error::Error;

/// Bytes of an id.
pub(crate) const ID_BYTES: usize = 128;

/// The first version with communicators that do not block and whose creation can be given up.
const NEEDED: Version = Version { major: 2, minor: 18 };
/// Where the library may be.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// `ncclUint8`.
const BYTE: c_int = 1;

/// The functions used, under NCCL's names in lower case.
struct Functions {
    version: Version,
    get_unique_id: unsafe extern "C" fn(*mut ncclUniqueId) -> c_int,
    comm_init_rank_config:
        unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> c_int,
    comm_get_async_error: unsafe extern "C" fn(ncclComm_t, *mut c_int) -> c_int,
    comm_abort: unsafe extern "C" fn(ncclComm_t) -> c_int,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, ncclComm_t, CUstream) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_last_error: unsafe extern "C" fn(ncclComm_t) -> *const c_char,
    // Last: the functions above are its.
    _library: Library,
}

/// Loads the library, once; later calls repeat the first answer.
fn functions() -> Result<&'static Functions, Error> {
    static STATE: OnceLock<Result<Functions, Error>> = OnceLock::new();
    STATE.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load() -> Result<Functions, Error> {
    let refuse = |reason: String| Error::NoNccl { reason, needed: NEEDED };
    // SAFETY: opening the library runs only its own initialisers.
    let opened = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
    let library = opened.ok_or_else(|| refuse(format!("{} was not found", NAMES[0])))?;
    /// The function of this name, whose type the caller states.
    ///
    /// # Safety
    /// `F` is the function's signature.
    unsafe fn get<F: Copy>(library: &Library, name: &CStr) -> Result<F, Error> {
        // SAFETY: the caller's duty.
        let symbol = unsafe { library.get::<F>(name.to_bytes_with_nul()) };
        symbol.map(|symbol| *symbol).map_err(|_| Error::NoNccl {
            reason: format!("the library found has no {}", name.to_string_lossy()),
            needed: NEEDED,
        })
    }
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: the signature is that of every NCCL since 2.0.
    let get_version = unsafe { get::<GetVersion>(&library, c"ncclGetVersion") }?;
    let mut level = 0;
    // SAFETY: `level` outlives the call.
    let asked = unsafe { get_version(&mut level) };
    // 2.9 and later count 10,000 * major + 100 * minor + patch, earlier ones 1,000 * major.
    let version = Version { major: level as u32 / 10_000, minor: level as u32 / 100 % 100 };
    if asked != SUCCESS || version < NEEDED {
        return Err(refuse(format!("the library found is of level {level}")));
    }
    // SAFETY: the signatures are those of NCCL 2.18 and later, as checked above.
    unsafe {
        Ok(Functions {
            version,
            get_unique_id: get(&library, c"ncclGetUniqueId")?,
            comm_init_rank_config: get(&library, c"ncclCommInitRankConfig")?,
            comm_get_async_error: get(&library, c"ncclCommGetAsyncError")?,
            comm_abort: get(&library, c"ncclCommAbort")?,
            all_gather: get(&library, c"ncclAllGather")?,
            get_error_string: get(&library, c"ncclGetErrorString")?,
            get_last_error: get(&library, c"ncclGetLastError")?,
            _library: library,
        })
    }
}

impl Functions {
    fn check(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        if code == SUCCESS {
            return Ok(());
        }
        let text = |text: *const c_char| {
            if text.is_null() {
                return String::new();
            }
            // SAFETY: NCCL returns NUL-terminated strings that live at least until its next call on this thread.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        // SAFETY: any code is allowed.
        let name = text(unsafe { (self.get_error_string)(code) });
        // SAFETY: no communicator is allowed, and asks for the last error of all.
        let detail = text(unsafe { (self.get_last_error)(std::ptr::null_mut()) });
        let reason = if detail.is_empty() { name } else { format!("{name}: {detail}") };
        Err(Error::Nccl { call, code, reason })
    }
}

/// Version of the library.
pub(crate) fn version() -> Result<Version, Error> {
    functions().map(|functions| functions.version)
}

/// A new id.
pub(crate) fn unique_id() -> Result<[u8; ID_BYTES], Error> {
    let functions = functions()?;
    let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
    // SAFETY: `id` outlives the call.
    functions.check("ncclGetUniqueId", unsafe { (functions.get_unique_id)(&mut id) })?;
    Ok(bytemuck::cast(id.internal))
}

/// A communicator, until aborted.
pub(crate) struct NcclComm {
    functions: &'static Functions,
    context: Arc<Context>,
    /// NCCL allows one call at a time. `None` once aborted.
    raw: Mutex<Option<Raw<ncclComm_t>>>,
    limit: Duration,
}

impl NcclComm {
    pub(crate) fn join(
        context: &Arc<Context>,
        id: [u8; ID_BYTES],
        rank: c_int,
        ranks: c_int,
        limit: Duration,
    ) -> Result<NcclComm, Error> {
        let functions = functions()?;
        context.bind()?;
        let id = ncclUniqueId { internal: bytemuck::cast(id) };
        let undefined = c_int::MIN;
        let mut config = ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: NEEDED.major * 10_000 + NEEDED.minor * 100,
            blocking: 0,
            cgaClusterSize: undefined,
            minCTAs: undefined,
            maxCTAs: undefined,
            netName: std::ptr::null(),
            splitShare: undefined,
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is bound; `raw` and `config`, which states its size, outlive the call.
        let begun = unsafe { (functions.comm_init_rank_config)(&mut raw, ranks, id, rank, &mut config) };
        if begun != IN_PROGRESS {
            functions.check("ncclCommInitRankConfig", begun)?;
        }
        let comm = NcclComm { functions, context: context.clone(), raw: Mutex::new(Some(Raw(raw))), limit };
        // Dropped, and so aborted, if the others do not come.
        comm.finish("ncclCommInitRankConfig", &mut comm.raw.lock())?;
        Ok(comm)
    }

    /// Waits for the host side of the last call; when its time runs out, the communicator is aborted.
    fn finish(&self, call: &'static str, raw: &mut Option<Raw<ncclComm_t>>) -> Result<(), Error> {
        let deadline = Instant::now().checked_add(self.limit);
        loop {
            match self.state(raw)? {
                IN_PROGRESS if deadline.is_none_or(|deadline| Instant::now() < deadline) => {
                    std::thread::sleep(Duration::from_micros(50))
                }
                IN_PROGRESS => {
                    self.abort_locked(raw);
                    return Err(Error::NcclTimeout { call, limit: self.limit });
                }
                code => return self.functions.check(call, code),
            }
        }
    }

    /// What the communicator says of itself.
    fn state(&self, raw: &Option<Raw<ncclComm_t>>) -> Result<c_int, Error> {
        let comm = self.alive(raw)?;
        let mut state = SUCCESS;
        // SAFETY: the communicator is not aborted yet, and `state` outlives the call.
        let asked = unsafe { (self.functions.comm_get_async_error)(comm, &mut state) };
        self.functions.check("ncclCommGetAsyncError", asked)?;
        Ok(state)
    }

    fn alive(&self, raw: &Option<Raw<ncclComm_t>>) -> Result<ncclComm_t, Error> {
        let aborted =
            || Error::Nccl { call: "ncclCommAbort", code: SUCCESS, reason: "the communicator was aborted".into() };
        raw.map(|raw| raw.0).ok_or_else(aborted)
    }

    /// Enqueues an all-gather of `bytes` > 0 of each rank. Stream and addresses are of this context, as the caller checked.
    pub(crate) fn all_gather(&self, stream: CUstream, sent: u64, received: u64, bytes: u64) -> Result<(), Error> {
        let mut raw = self.raw.lock();
        let comm = self.alive(&raw)?;
        self.context.bind()?;
        let (sent, received) = (sent as *const c_void, received as *mut c_void);
        // SAFETY: the context is bound and the communicator alive; the stream is of this context and the ranges are as long
        // as stated, as the caller checked; addresses are numbers to NCCL's host side.
        let begun = unsafe { (self.functions.all_gather)(sent, received, bytes as usize, BYTE, comm, stream) };
        match begun {
            IN_PROGRESS => self.finish("ncclAllGather", &mut raw),
            code => self.functions.check("ncclAllGather", code),
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.state(&self.raw.lock())? {
            IN_PROGRESS => Ok(()),
            code => self.functions.check("ncclCommGetAsyncError", code),
        }
    }

    pub(crate) fn abort(&self) {
        self.abort_locked(&mut self.raw.lock());
    }

    fn abort_locked(&self, raw: &mut Option<Raw<ncclComm_t>>) {
        if let Some(raw) = raw.take()
            && !raw.0.is_null()
            && self.context.bind().is_ok()
        {
            // SAFETY: alive until now, and given up here. A failure is nobody's to handle.
            let _ = unsafe { (self.functions.comm_abort)(raw.0) };
        }
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        self.abort();
    }
}

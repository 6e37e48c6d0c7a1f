//! JIT compilation: text to a loaded function, once per device and text.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::{self, CUfunction_attribute, CUjit_option, CUresult};
use parking_lot::Mutex;
use ptx::KernelIr;

use super::context::Context;
use super::driver;
use super::stream::Raw;
use crate::error::Error;
use crate::jit::JitReport;

/// What makes two loads the same: the text, and the shared bytes that the text leaves open.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct ModuleKey {
    text: Arc<str>,
    shared_bytes: u32,
}

/// A load in progress or done; the lock makes a second request for the same kernel wait for the first.
pub(crate) type ModuleSlot = Arc<Mutex<Option<Arc<Loaded>>>>;

/// A compiled and resident kernel. The context unloads it.
pub(crate) struct Loaded {
    module: Raw<sys::CUmodule>,
    function: Raw<sys::CUfunction>,
    /// Launch id for fault reports.
    pub(super) id: u32,
    pub(crate) report: JitReport,
}

/// Room for each of the assembler's logs.
const LOG_BYTES: usize = 64 * 1024;

impl Context {
    /// Compiles and loads `ir`, or returns what an earlier load of the same text left.
    pub(crate) fn load(&self, ir: &KernelIr) -> Result<Arc<Loaded>, Error> {
        let text = ptx::print::print(ir);
        self.load_text(&ir.name, &text, ir.shared_bytes)
    }

    /// As [`Context::load`] for any text with one entry called `name`.
    pub(super) fn load_text(&self, name: &str, text: &str, shared_bytes: u32) -> Result<Arc<Loaded>, Error> {
        let key = ModuleKey { text: text.into(), shared_bytes };
        let slot = self.modules.lock().entry(key).or_default().clone();
        let mut slot = slot.lock();
        if let Some(loaded) = &*slot {
            return Ok(loaded.clone());
        }
        let loaded = Arc::new(self.compile(name, text, shared_bytes)?);
        *slot = Some(loaded.clone());
        Ok(loaded)
    }

    fn compile(&self, name: &str, text: &str, shared_bytes: u32) -> Result<Loaded, Error> {
        self.bind()?;
        let started = Instant::now();
        let (module, log) = self.assemble(name, text)?;
        // From here on the module must not leak.
        let resident = self.resolve(name, module, shared_bytes);
        let (function, attributes) = match resident {
            Ok(found) => found,
            Err(error) => {
                // SAFETY: loaded by `assemble`, and nothing else has seen it.
                let _ = unsafe { sys::cuModuleUnload(module.0) };
                return Err(error);
            }
        };
        let wall_ms = started.elapsed().as_secs_f64() * 1e3;
        let report = JitReport::new(log, attributes, shared_bytes, wall_ms);
        Ok(Loaded { module, function, id: self.register_name(name), report })
    }

    fn assemble(&self, name: &str, text: &str) -> Result<(Raw<sys::CUmodule>, String), Error> {
        let image = CString::new(text).map_err(|_| Error::PtxRefused {
            kernel: name.into(),
            ptx_version: version_line(text),
            driver: self.info().driver_version.unwrap_or_default(),
            reason: "the text contains a NUL byte".into(),
            log: String::new(),
        })?;
        let mut info = vec![0u8; LOG_BYTES];
        let mut errors = vec![0u8; LOG_BYTES];
        // Scalar options travel in the pointer-sized value slot itself.
        let number = |n: usize| n as *mut c_void;
        let mut options = [
            CUjit_option::CU_JIT_INFO_LOG_BUFFER,
            CUjit_option::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            CUjit_option::CU_JIT_LOG_VERBOSE,
            CUjit_option::CU_JIT_GENERATE_LINE_INFO,
        ];
        let mut values = [
            info.as_mut_ptr().cast(),
            number(info.len()),
            errors.as_mut_ptr().cast(),
            number(errors.len()),
            number(1),
            number(1),
        ];
        let mut module = std::ptr::null_mut();
        // SAFETY: the context is bound; the image is NUL-terminated; both logs are as long as their size options
        // say; every buffer outlives the call.
        let result = unsafe {
            sys::cuModuleLoadDataEx(
                &mut module,
                image.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        match result {
            CUresult::CUDA_ERROR_INVALID_PTX
            | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | CUresult::CUDA_ERROR_INVALID_IMAGE
            | CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUresult::CUDA_ERROR_INVALID_SOURCE
            | CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND
            | CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED => Err(Error::PtxRefused {
                kernel: name.into(),
                ptx_version: version_line(text),
                driver: self.info().driver_version.unwrap_or_default(),
                reason: driver::explain(result),
                log: until_nul(&errors),
            }),
            result => self.check("cuModuleLoadDataEx", result).map(|()| (Raw(module), until_nul(&info))),
        }
    }

    /// Finds the entry and makes it resident now: a first launch that loads code would wait for the device to drain,
    /// for ever if a kernel there waits for this one.
    fn resolve(
        &self,
        name: &str,
        module: Raw<sys::CUmodule>,
        shared_bytes: u32,
    ) -> Result<(Raw<sys::CUfunction>, Attributes), Error> {
        let entry = CString::new(name).expect("a verified kernel name is an identifier");
        let mut function = std::ptr::null_mut();
        // SAFETY: the context is bound by the caller, the module is loaded, and name and result outlive the call.
        let found = unsafe { sys::cuModuleGetFunction(&mut function, module.0, entry.as_ptr()) };
        self.check("cuModuleGetFunction", found)?;
        // SAFETY: `function` was found above.
        self.check("cuFuncLoad", unsafe { sys::cuFuncLoad(function) })?;
        let attribute = |which| -> Result<u32, Error> {
            let mut value = 0;
            // SAFETY: `function` was found above and `value` outlives the call.
            let asked = unsafe { sys::cuFuncGetAttribute(&mut value, which, function) };
            self.check("cuFuncGetAttribute", asked).map(|()| value as u32)
        };
        let attributes = Attributes {
            registers: attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            static_shared_bytes: attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
        };
        // Always, not only above 48 KiB: static shared memory counts towards the default limit too.
        let shared = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: `function` was found above.
        match unsafe { sys::cuFuncSetAttribute(function, shared, shared_bytes as i32) } {
            CUresult::CUDA_ERROR_INVALID_VALUE => {
                return Err(Error::SharedTooLarge {
                    kernel: name.into(),
                    requested: attributes.static_shared_bytes + shared_bytes,
                    limit: self.info().shared_bytes_max,
                });
            }
            set => self.check("cuFuncSetAttribute", set)?,
        }
        let large_clusters = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        // SAFETY: `function` was found above.
        let set = unsafe { sys::cuFuncSetAttribute(function, large_clusters, 1) };
        self.check("cuFuncSetAttribute", set)?;
        Ok((Raw(function), attributes))
    }

    /// The share of L1 and shared memory, in percent, that `loaded` would have as shared memory.
    pub(crate) fn prefer_shared_memory(&self, loaded: &Loaded, percent: u32) -> Result<(), Error> {
        self.bind()?;
        let carveout = CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the context is bound and the function loaded.
        let set = unsafe { sys::cuFuncSetAttribute(loaded.function(), carveout, percent as i32) };
        self.check("cuFuncSetAttribute", set)
    }
}

/// What the driver says about a loaded function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes {
    pub(crate) registers: u32,
    pub(crate) local_bytes: u32,
    pub(crate) static_shared_bytes: u32,
}

impl Loaded {
    pub(super) fn function(&self) -> sys::CUfunction {
        self.function.0
    }

    /// Called by the context's drop, when no function handle is left.
    pub(super) fn unload(&self) {
        // SAFETY: the context is bound by the caller, and nobody holds the function any more.
        let _ = unsafe { sys::cuModuleUnload(self.module.0) };
    }
}

fn until_nul(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).trim().to_string()
}

/// The argument of the text's `.version` line.
fn version_line(text: &str) -> String {
    let version = text.lines().find_map(|l| l.trim().strip_prefix(".version"));
    version.map_or("without .version", str::trim).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> Option<Error> {
        let context = match Context::primary(0) {
            Ok(context) => context,
            Err(error) if error.is_unavailable() => {
                eprintln!("SKIPPED: no CUDA device ({error})");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        Some(context.load_text("k", text, 0).map(|_| ()).expect_err("the text is not acceptable"))
    }

    const BODY: &str = ".target sm_90a\n.address_size 64\n.visible .entry k() { ret; }\n";

    #[test]
    fn a_ptx_version_from_the_future_is_refused_with_both_versions() {
        match refusal(&format!(".version 9.9\n{BODY}")) {
            Some(Error::PtxRefused { kernel, ptx_version, driver, reason, .. }) => {
                assert_eq!((kernel.as_str(), ptx_version.as_str()), ("k", "9.9"));
                assert!(driver >= driver::DRIVER_NEEDED);
                assert!(reason.contains("UNSUPPORTED_PTX_VERSION"), "{reason}");
            }
            Some(other) => panic!("{other}"),
            None => {}
        }
    }

    #[test]
    fn a_syntax_error_is_refused_with_the_assembler_log() {
        match refusal(&format!(".version 8.4\n{}", BODY.replace("ret;", "frobnicate;"))) {
            Some(Error::PtxRefused { log, .. }) => assert!(log.contains("frobnicate"), "{log}"),
            Some(other) => panic!("{other}"),
            None => {}
        }
    }

    #[test]
    fn static_and_dynamic_shared_memory_together_are_held_to_the_limit() {
        let Ok(context) = Context::primary(0) else {
            eprintln!("SKIPPED: no CUDA device");
            return;
        };
        let limit = context.info().shared_bytes_max;
        let text = ".version 8.4\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 dynamic[];\n\
            .visible .entry k() { .shared .align 4 .b32 word; .reg .b32 r; st.shared.b32 [word], 1; \
            ld.shared.b32 r, [dynamic]; st.shared.b32 [word], r; ret; }\n";
        context.load_text("k", text, limit - 16).expect("four bytes of static memory fit beside it");
        match context.load_text("k", text, limit).map(|_| ()) {
            Err(Error::SharedTooLarge { kernel, limit: found, .. }) => {
                assert_eq!((kernel.as_str(), found), ("k", limit))
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_version_line_is_found() {
        assert_eq!(version_line("// x\n.version 8.4\n.target sm_90a\n"), "8.4");
        assert_eq!(version_line(""), "without .version");
    }
}

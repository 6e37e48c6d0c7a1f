//! Loaded kernels and their launches.

use std::marker::PhantomData;
use std::sync::Arc;

use ptx::{ArgBuffer, Kernel, KernelArgs, KernelIr};

use crate::device::{Backend, Device};
use crate::error::Error;
use crate::jit::JitReport;
use crate::stream::{Stream, StreamBackend};
use crate::{cuda, graph};

/// The shape and attributes of one launch. Threads and shared memory are the kernel's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchConfig {
    /// CTAs in x, y and z. A zero launches nothing.
    pub grid: [u32; 3],
    /// Let the launch start before its predecessor in the stream has finished (programmatic dependent launch). Only for
    /// kernels that wait for their dependencies.
    pub overlap: bool,
    /// CTAs per cluster along x; `None` for those of the kernel, if it asks for any.
    pub cluster: Option<u32>,
}

impl LaunchConfig {
    /// `ctas` CTAs in stream order.
    pub fn new(ctas: u32) -> Self {
        LaunchConfig { grid: [ctas, 1, 1], overlap: false, cluster: None }
    }

    /// A grid of up to three dimensions in stream order.
    pub fn grid(grid: [u32; 3]) -> Self {
        LaunchConfig { grid, overlap: false, cluster: None }
    }

    /// With or without overlap of the predecessor.
    pub fn overlap(self, overlap: bool) -> Self {
        LaunchConfig { overlap, ..self }
    }

    /// In clusters of `size` CTAs along x.
    pub fn cluster(self, size: u32) -> Self {
        LaunchConfig { cluster: Some(size), ..self }
    }
}

/// Most CTAs of a grid in x, y and z.
const GRID_MAX: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// Most CTAs of a cluster (sizes above 8 are not portable, but every supported target has them).
const CLUSTER_MAX: u32 = 16;

enum FunctionBackend {
    Cuda(Arc<cuda::Loaded>),
    /// The simulator runs the instruction list itself.
    Sim(JitReport),
}

/// A kernel, compiled and resident on one device. Cheap to clone.
pub struct Function<A> {
    device: Device,
    ir: Arc<KernelIr>,
    waits_for_dependencies: bool,
    backend: Arc<FunctionBackend>,
    args: PhantomData<fn(&A)>,
}

impl<A> Clone for Function<A> {
    fn clone(&self) -> Self {
        Function {
            device: self.device.clone(),
            ir: self.ir.clone(),
            waits_for_dependencies: self.waits_for_dependencies,
            backend: self.backend.clone(),
            args: PhantomData,
        }
    }
}

impl<A> std::fmt::Debug for Function<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Function({} on {})", self.ir.name, self.device.info().name)
    }
}

impl<A: KernelArgs> Function<A> {
    pub(crate) fn load(device: &Device, kernel: &Kernel<A>) -> Result<Self, Error> {
        graph::refuse_while_capturing("loading a kernel")?;
        let ir = kernel.ir();
        if device.info().target != Some(ir.target) {
            return Err(Error::UnsupportedArchitecture {
                kernel: Some(ir.name.clone()),
                found: device.info().compute_capability,
                supported: vec![ir.target],
            });
        }
        let limit = device.info().shared_bytes_max;
        if ir.shared_bytes > limit {
            return Err(Error::SharedTooLarge { kernel: ir.name.clone(), requested: ir.shared_bytes, limit });
        }
        let backend = match device.backend() {
            Backend::Cuda(context) => FunctionBackend::Cuda(context.load(ir)?),
            Backend::Sim(_) => FunctionBackend::Sim(JitReport::simulated(ir.shared_bytes)),
        };
        Ok(Function {
            device: device.clone(),
            ir: ir.clone(),
            waits_for_dependencies: ir.waits_for_dependencies(),
            backend: Arc::new(backend),
            args: PhantomData,
        })
    }

    /// Kernel name.
    pub fn name(&self) -> &str {
        &self.ir.name
    }

    /// The device it is loaded on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The instruction list it came from.
    pub fn ir(&self) -> &Arc<KernelIr> {
        &self.ir
    }

    /// What the assembler said.
    pub fn report(&self) -> &JitReport {
        match &*self.backend {
            FunctionBackend::Cuda(loaded) => &loaded.report,
            FunctionBackend::Sim(report) => report,
        }
    }

    /// Asks for `percent` (0..=100) of what a multiprocessor divides between L1 and shared memory to be shared memory while
    /// this kernel runs there, for its launches from now on and those of its clones. Otherwise the driver takes what the
    /// kernel itself needs, and CTAs of another kernel that would fit beside it find no room. A hint; the simulator has no L1.
    ///
    /// # Errors
    /// [`Error::LaunchRefused`] for more than 100, [`Error::Fault`] if the device was lost earlier.
    pub fn prefer_shared_memory(&self, percent: u32) -> Result<(), Error> {
        if percent > 100 {
            let reason = format!("{percent} % of a multiprocessor's memory, 0..=100 are possible");
            return Err(Error::LaunchRefused { kernel: self.ir.name.clone(), reason });
        }
        match (self.device.backend(), &*self.backend) {
            (Backend::Cuda(context), FunctionBackend::Cuda(loaded)) => context.prefer_shared_memory(loaded, percent),
            _ => Ok(()),
        }
    }

    /// Enqueues the kernel. On CUDA this allocates nothing and waits for nothing. A grid with a zero launches nothing.
    ///
    /// # Errors
    /// [`Error::LaunchRefused`] for a shape or attribute that cannot be honoured, [`Error::WrongDevice`] for a stream
    /// of another device, [`Error::Fault`] if the device was lost earlier.
    pub fn launch(&self, stream: &Stream, config: LaunchConfig, args: &A) -> Result<(), Error> {
        self.device.expect_same("stream", stream.device())?;
        let config = LaunchConfig { cluster: config.cluster.or(self.ir.bounds.cluster), ..config };
        self.check(config)?;
        if config.grid.contains(&0) {
            return Ok(());
        }
        let args = ArgBuffer::pack(args);
        match (&*self.backend, stream.backend()) {
            (FunctionBackend::Cuda(loaded), StreamBackend::Cuda(stream)) => stream.launch(
                &cuda::Launch {
                    kernel: &self.ir.name,
                    loaded,
                    threads: self.ir.bounds.threads,
                    shared_bytes: self.ir.shared_bytes,
                    config,
                },
                &args,
            ),
            (FunctionBackend::Sim(_), StreamBackend::Sim(stream)) => stream.launch(&self.ir, config, &args),
            (FunctionBackend::Cuda(_), StreamBackend::Sim(_)) | (FunctionBackend::Sim(_), StreamBackend::Cuda(_)) => {
                unreachable!("one device has one backend")
            }
        }
    }

    fn check(&self, config: LaunchConfig) -> Result<(), Error> {
        let refuse = |reason: String| Err(Error::LaunchRefused { kernel: self.ir.name.clone(), reason });
        if config.overlap && !self.waits_for_dependencies {
            return refuse("overlap is for kernels that wait for their dependencies, and this one never does".into());
        }
        if let Some(size) = config.cluster {
            if let Some(own) = self.ir.bounds.cluster
                && own != size
            {
                return refuse(format!("clusters of {size} CTAs, the kernel is built for {own}"));
            }
            if size == 0 || size > CLUSTER_MAX {
                return refuse(format!("clusters of {size} CTAs, 1..={CLUSTER_MAX} are possible"));
            }
            if !config.grid[0].is_multiple_of(size) {
                return refuse(format!("{} CTAs are not whole clusters of {size}", config.grid[0]));
            }
        }
        if config.grid.iter().zip(GRID_MAX).any(|(n, max)| *n > max) {
            return refuse(format!("grid {:?}, at most {GRID_MAX:?} is possible", config.grid));
        }
        Ok(())
    }
}

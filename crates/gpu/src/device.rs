//! Devices.

use std::sync::Arc;

use bytemuck::Pod;
use ptx::{Kernel, KernelArgs, Target, TensorMap, TensorMapDesc};

use crate::buffer::{Buffer, View};
use crate::error::Error;
use crate::function::Function;
use crate::stream::{Event, Stream};
use crate::{cuda, graph, sim};

/// A CUDA driver level, as `13.0`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl Version {
    /// From the driver's encoding, 1000 * major + 10 * minor.
    pub(crate) fn from_level(level: i32) -> Version {
        let level = level.max(0) as u32;
        Version { major: level / 1000, minor: level % 1000 / 10 }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What a device is and has.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// `cuda:0` and the product name, or `sim:0`.
    pub name: String,
    /// Compute capability (major, minor).
    pub compute_capability: (u32, u32),
    /// The target to build kernels for, if this device has one.
    pub target: Option<Target>,
    /// Multiprocessors.
    pub sms: u32,
    /// L2 cache in bytes.
    pub l2_bytes: u64,
    /// Most shared memory of one CTA in bytes.
    pub shared_bytes_max: u32,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// Level of the CUDA driver; `None` on the simulator.
    pub driver_version: Option<Version>,
    /// Whether this is the simulator.
    pub simulated: bool,
}

/// How far the L2 cache widens the reads of a tensor map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum L2Promotion {
    /// Not at all.
    None,
    /// To 64 bytes.
    B64,
    /// To 128 bytes.
    B128,
    /// To 256 bytes.
    #[default]
    B256,
}

#[derive(Clone)]
pub(crate) enum Backend {
    Cuda(Arc<cuda::Context>),
    Sim(Arc<sim::Device>),
}

/// A device, CUDA or simulated. Cheap to clone; all clones are the same device.
#[derive(Clone)]
pub struct Device {
    backend: Backend,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({})", self.info().name)
    }
}

impl Device {
    /// CUDA device `ordinal` (in the driver's order, after `CUDA_VISIBLE_DEVICES`), through its primary context.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::DriverTooOld`], [`Error::NoDevice`], or what the driver reports.
    pub fn cuda(ordinal: usize) -> Result<Device, Error> {
        Ok(Device { backend: Backend::Cuda(cuda::Context::primary(ordinal)?) })
    }

    /// The device of a context that an engine already holds. Its event tracking setting does not matter here: this
    /// crate never uses the bindings' events.
    ///
    /// # Errors
    /// As [`Device::cuda`].
    pub fn from_cuda(context: Arc<cudarc::driver::CudaContext>) -> Result<Device, Error> {
        Ok(Device { backend: Backend::Cuda(cuda::Context::wrap(context)?) })
    }

    /// One simulated device of architecture `sm_90a`.
    ///
    /// # Panics
    /// If `config` has no device.
    pub fn simulated(config: ptx_sim::Config) -> Device {
        Device::simulated_group(config).swap_remove(0)
    }

    /// Every device of one simulated `sm_90a` machine; they see each other's memory.
    pub fn simulated_group(config: ptx_sim::Config) -> Vec<Device> {
        Device::simulated_group_as(config, Target::Sm90a)
    }

    /// Every device of one simulated machine of architecture `target`.
    pub fn simulated_group_as(config: ptx_sim::Config, target: Target) -> Vec<Device> {
        let devices = sim::Device::group(config, target);
        devices.into_iter().map(|device| Device { backend: Backend::Sim(device) }).collect()
    }

    /// The first CUDA device that kernels can be built for, else the simulator, and one line that says why.
    pub fn best() -> (Device, String) {
        let found = Device::cuda_count().and_then(|count| {
            let mut refused = None;
            for ordinal in 0..count {
                match Device::cuda(ordinal).and_then(|device| Ok((device.target()?, device))) {
                    Ok(found) => return Ok(found),
                    Err(error) => refused = refused.or(Some(error)),
                }
            }
            Err(refused.unwrap_or(Error::NoDevice { ordinal: 0, count }))
        });
        match found {
            Ok((target, device)) => {
                let why = format!("running on {} for {target}", device.info().name);
                (device, why)
            }
            Err(error) => (
                Device::simulated(ptx_sim::Config::default()),
                format!("running on the simulator, because no GPU is usable: {error}"),
            ),
        }
    }

    /// Number of CUDA devices.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::DriverTooOld`] or [`Error::NoDevice`].
    pub fn cuda_count() -> Result<usize, Error> {
        cuda::driver::device_count()
    }

    /// What this device is and has.
    pub fn info(&self) -> &DeviceInfo {
        match &self.backend {
            Backend::Cuda(context) => context.info(),
            Backend::Sim(device) => device.info(),
        }
    }

    /// The target to build kernels for.
    ///
    /// # Errors
    /// [`Error::UnsupportedArchitecture`] if there is none for this device.
    pub fn target(&self) -> Result<Target, Error> {
        self.info().target.ok_or_else(|| Error::UnsupportedArchitecture {
            kernel: None,
            found: self.info().compute_capability,
            supported: Target::ALL.to_vec(),
        })
    }

    /// The context that the bindings know this device by; `None` on the simulator.
    pub fn cuda_context(&self) -> Option<&Arc<cudarc::driver::CudaContext>> {
        match &self.backend {
            Backend::Cuda(context) => Some(context.owner()),
            Backend::Sim(_) => None,
        }
    }

    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Whether both handles are the same device.
    pub fn same(&self, other: &Device) -> bool {
        match (&self.backend, &other.backend) {
            (Backend::Cuda(a), Backend::Cuda(b)) => a.same(b),
            (Backend::Sim(a), Backend::Sim(b)) => a.same(b),
            (Backend::Cuda(_), Backend::Sim(_)) | (Backend::Sim(_), Backend::Cuda(_)) => false,
        }
    }

    /// [`Error::WrongDevice`] unless `what`, which lives on `found`, belongs here.
    pub fn expect_same(&self, what: &'static str, found: &Device) -> Result<(), Error> {
        if self.same(found) {
            return Ok(());
        }
        Err(Error::WrongDevice { what, found: found.info().name.clone(), expected: self.info().name.clone() })
    }

    /// `len` elements of uninitialised memory (poisoned on the simulator, where reading it is a fault). No memory is
    /// reserved for `len` 0.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Capture`] inside a [capture](crate::Graph::capture).
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<Buffer<T>, Error> {
        graph::refuse_while_capturing("allocating")?;
        let bytes = len.checked_mul(size_of::<T>()).ok_or(Error::OutOfMemory { requested: u64::MAX, free: None })?;
        let address = match (&self.backend, bytes) {
            (_, 0) => 0,
            (Backend::Cuda(context), bytes) => context.alloc(bytes as u64)?,
            (Backend::Sim(device), bytes) => device.alloc(bytes as u64)?,
        };
        Ok(Buffer::owned(self.clone(), address, len))
    }

    /// `len` elements of zero bytes, ready when this returns.
    ///
    /// # Errors
    /// As [`Device::alloc`].
    pub fn alloc_zeros<T: Pod>(&self, len: usize) -> Result<Buffer<T>, Error> {
        let buffer = self.alloc(len)?;
        if buffer.bytes() > 0 {
            match &self.backend {
                Backend::Cuda(context) => context.fill(buffer.address(), buffer.bytes(), 0)?,
                Backend::Sim(device) => device.zero(buffer.address(), buffer.bytes())?,
            }
        }
        Ok(buffer)
    }

    /// A buffer with a copy of `values`, ready when this returns.
    ///
    /// # Errors
    /// As [`Device::alloc`].
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<Buffer<T>, Error> {
        let buffer = self.alloc(values.len())?;
        if buffer.bytes() > 0 {
            match &self.backend {
                Backend::Cuda(context) => context.write(buffer.address(), bytemuck::cast_slice(values))?,
                Backend::Sim(device) => device.write(buffer.address(), bytemuck::cast_slice(values))?,
            }
        }
        Ok(buffer)
    }

    /// A view of what an engine allocated through the bindings: a `CudaSlice` or `CudaView`. The slice's own stream
    /// first waits for the slice's last tracked write; ordering between that stream and others is the caller's.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] if the slice lives elsewhere.
    pub fn wrap_cuda<'a, T: Pod, S: cudarc::driver::DevicePtr<T>>(&self, slice: &'a S) -> Result<View<'a, T>, Error> {
        graph::refuse_while_capturing("wrapping a slice of the bindings")?;
        let stream = slice.stream();
        let owner = Device::from_cuda(stream.context().clone())?;
        self.expect_same("slice", &owner)?;
        let (address, _sync) = slice.device_ptr(stream);
        Ok(View::borrowed(self.clone(), address, slice.len()))
    }

    /// A new stream. It does not synchronise with the legacy default stream.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn stream(&self) -> Result<Stream, Error> {
        Stream::new(self)
    }

    /// A new event.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn event(&self) -> Result<Event, Error> {
        Event::new(self)
    }

    /// Compiles `kernel` and makes it resident; the same kernel again costs a look-up. Do this when an object is
    /// built: it may take 100 ms.
    ///
    /// # Errors
    /// [`Error::UnsupportedArchitecture`] for a kernel of another target, [`Error::PtxRefused`] with the assembler's
    /// log, [`Error::SharedTooLarge`]; [`Error::Capture`] inside a [capture](crate::Graph::capture).
    pub fn load<A: KernelArgs>(&self, kernel: &Kernel<A>) -> Result<Function<A>, Error> {
        Function::load(self, kernel)
    }

    /// Encodes a tensor map whose reads the L2 widens to 256 bytes.
    ///
    /// # Errors
    /// [`Error::TensorMap`] if the driver does not accept it.
    pub fn tensor_map(&self, desc: &TensorMapDesc) -> Result<TensorMap, Error> {
        self.tensor_map_with(desc, L2Promotion::default())
    }

    /// As [`Device::tensor_map`] with another L2 promotion.
    ///
    /// # Errors
    /// [`Error::TensorMap`] if the driver does not accept it.
    pub fn tensor_map_with(&self, desc: &TensorMapDesc, promotion: L2Promotion) -> Result<TensorMap, Error> {
        match &self.backend {
            Backend::Cuda(context) => context.tensor_map(desc, promotion),
            Backend::Sim(_) => Ok(desc.to_simulated()),
        }
    }

    /// An address under which kernels of this device store to the first `bytes` bytes of every one of `members` at once,
    /// with multicast instructions only. Simulated devices have it; on CUDA this crate makes no multicast objects.
    ///
    /// # Errors
    /// [`Error::Multicast`] where there is none, or members that cannot be one object.
    pub fn multicast<T: Pod>(&self, members: &[View<'_, T>], bytes: u64) -> Result<u64, Error> {
        let refused = |reason: String| Error::Multicast { device: self.info().name.clone(), reason };
        let Backend::Sim(own) = &self.backend else {
            return Err(refused("this crate makes no multicast objects on CUDA devices".into()));
        };
        let mut addresses = Vec::new();
        for member in members {
            match &member.device().backend {
                Backend::Sim(device) if device.shares_machine(own) => addresses.push(member.ptr().address()),
                _ => return Err(refused("a simulated device sees only its own machine's memory".into())),
            }
            if member.bytes() < bytes {
                return Err(refused(format!("a member of {} bytes, {bytes} are needed", member.bytes())));
            }
        }
        own.multicast(&addresses, bytes).map_err(refused)
    }

    /// Lets lines that kernels store or load with an evict-last policy occupy up to `bytes` of the L2, which everything
    /// else then lacks, and returns how much the device grants: it rounds, and has a largest share. A limit of the
    /// device's primary context, shared by all that use it, so the application's to choose; nothing here sets it unasked. On
    /// the simulator it does nothing and grants 0.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn reserve_l2(&self, bytes: usize) -> Result<usize, Error> {
        match &self.backend {
            Backend::Cuda(context) => context.reserve_l2(bytes),
            Backend::Sim(_) => Ok(0),
        }
    }

    /// Lets kernels on this device access memory of `other`; doing it twice is fine. Each direction is enabled
    /// on its own.
    ///
    /// # Errors
    /// [`Error::PeerAccess`] where the machine does not allow it.
    pub fn peer_access(&self, other: &Device) -> Result<(), Error> {
        match (&self.backend, &other.backend) {
            (Backend::Cuda(a), Backend::Cuda(b)) => return a.enable_peer(b),
            (Backend::Sim(a), Backend::Sim(b)) if a.shares_machine(b) => return Ok(()),
            (Backend::Sim(_), _) | (_, Backend::Sim(_)) => {}
        }
        let (from, to) = (self.info().name.clone(), other.info().name.clone());
        Err(Error::PeerAccess { from, to, reason: "a simulated device sees only its own machine's memory".into() })
    }
}

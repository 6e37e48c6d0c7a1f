//! Device memory.

use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use bytemuck::Pod;
use ptx::DevicePtr;

use crate::device::{Backend, Device};
use crate::error::Error;
use crate::ipc::IpcHandle;
use crate::stream::{Stream, StreamBackend};
use crate::{cuda, graph};

/// Device memory that a buffer keeps.
pub(crate) enum Allocation {
    /// Its own, freed when dropped. Freeing waits for the device, as the driver does.
    Own { device: Device, address: u64 },
    /// Another process's, unmapped when dropped.
    Mapped { _mapping: cuda::Mapping },
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Allocation::Own { device, address } = self {
            match device.backend() {
                Backend::Cuda(context) => context.free(*address),
                Backend::Sim(device) => device.free(*address),
            }
        }
    }
}

/// `len` elements of `T` in device memory.
pub struct Buffer<T: Pod> {
    device: Device,
    address: u64,
    len: usize,
    /// `None` for foreign memory and for length 0.
    allocation: Option<Allocation>,
    elem: PhantomData<fn() -> T>,
}

impl<T: Pod> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} x {} at {:#x})", self.len, std::any::type_name::<T>(), self.address)
    }
}

impl<T: Pod> Drop for Buffer<T> {
    fn drop(&mut self) {
        if let Some(allocation) = self.allocation.take() {
            // A captured graph may use it on every replay: inside a capture the graph takes it over.
            graph::retain_while_capturing(allocation);
        }
    }
}

impl<T: Pod> Buffer<T> {
    pub(crate) fn owned(device: Device, address: u64, len: usize) -> Self {
        let allocation = (address != 0).then(|| Allocation::Own { device: device.clone(), address });
        Buffer { device, address, len, allocation, elem: PhantomData }
    }

    pub(crate) fn mapped(device: Device, address: u64, len: usize, mapping: cuda::Mapping) -> Self {
        Buffer { device, address, len, allocation: Some(Allocation::Mapped { _mapping: mapping }), elem: PhantomData }
    }

    /// `len` elements of memory that somebody else owns; dropping the buffer frees nothing.
    ///
    /// # Safety
    /// - `address .. address + len * size_of::<T>()` is device memory that `device` can access, for as long as the
    ///   buffer, and graphs that captured its use, exist;
    /// - `address` is a multiple of `T`'s size or alignment as the kernels that use it require.
    pub unsafe fn from_raw(device: &Device, address: u64, len: usize) -> Self {
        Buffer { device: device.clone(), address, len, allocation: None, elem: PhantomData }
    }

    /// The device that the memory belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The address of element 0, as kernels take it; null for a buffer of length 0.
    pub fn ptr(&self) -> DevicePtr<T> {
        DevicePtr::from_address(self.address)
    }

    /// The same address for a kernel that sees another element type.
    pub fn ptr_as<U>(&self) -> DevicePtr<U> {
        DevicePtr::from_address(self.address)
    }

    /// Everything, as a view.
    pub fn as_view(&self) -> View<'_, T> {
        View::borrowed(self.device.clone(), self.address, self.len)
    }

    /// The elements of `range`.
    ///
    /// # Errors
    /// [`Error::SizeMismatch`] if the range leaves the buffer.
    pub fn view(&self, range: impl RangeBounds<usize>) -> Result<View<'_, T>, Error> {
        self.as_view().view(range)
    }

    /// As [`View::copy_from`].
    ///
    /// # Errors
    /// As [`View::copy_from`].
    pub fn copy_from(&self, stream: &Stream, values: &[T]) -> Result<(), Error> {
        self.as_view().copy_from(stream, values)
    }

    /// As [`View::copy_from_device`].
    ///
    /// # Errors
    /// As [`View::copy_from_device`].
    pub fn copy_from_device(&self, stream: &Stream, source: &View<'_, T>) -> Result<(), Error> {
        self.as_view().copy_from_device(stream, source)
    }

    /// As [`View::copy_to_vec`].
    ///
    /// # Errors
    /// As [`View::copy_to_vec`].
    pub fn copy_to_vec(&self, stream: &Stream) -> Result<Vec<T>, Error> {
        self.as_view().copy_to_vec(stream)
    }

    /// As [`View::ipc_handle`].
    ///
    /// # Errors
    /// As [`View::ipc_handle`].
    pub fn ipc_handle(&self) -> Result<IpcHandle, Error> {
        self.as_view().ipc_handle()
    }

    /// As [`View::fill_bytes`].
    ///
    /// # Errors
    /// As [`View::fill_bytes`].
    pub fn fill_bytes(&self, stream: &Stream, byte: u8) -> Result<(), Error> {
        self.as_view().fill_bytes(stream, byte)
    }
}

/// A range of device memory that something else keeps alive.
#[derive(Clone)]
pub struct View<'a, T: Pod> {
    device: Device,
    address: u64,
    len: usize,
    memory: PhantomData<&'a T>,
}

impl<T: Pod> std::fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "View({} x {} at {:#x})", self.len, std::any::type_name::<T>(), self.address)
    }
}

impl<'a, T: Pod> View<'a, T> {
    pub(crate) fn borrowed(device: Device, address: u64, len: usize) -> Self {
        View { device, address, len, memory: PhantomData }
    }

    /// The device that the memory belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }

    /// The address of element 0, as kernels take it.
    pub fn ptr(&self) -> DevicePtr<T> {
        DevicePtr::from_address(self.address)
    }

    /// The same address for a kernel that sees another element type.
    pub fn ptr_as<U>(&self) -> DevicePtr<U> {
        DevicePtr::from_address(self.address)
    }

    /// The elements of `range` within this view.
    ///
    /// # Errors
    /// [`Error::SizeMismatch`] if the range leaves the view.
    pub fn view(&self, range: impl RangeBounds<usize>) -> Result<View<'a, T>, Error> {
        let start = match range.start_bound() {
            Bound::Included(n) => *n,
            Bound::Excluded(n) => n.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(n) => n.saturating_add(1),
            Bound::Excluded(n) => *n,
            Bound::Unbounded => self.len,
        };
        if end > self.len || start > end {
            let found = start.max(end);
            return Err(Error::SizeMismatch { what: "range of a buffer", found, expected: self.len });
        }
        let address = self.address + (start * size_of::<T>()) as u64;
        Ok(View::borrowed(self.device.clone(), address, end - start))
    }

    /// The same memory as elements of another type.
    ///
    /// # Errors
    /// [`Error::SizeMismatch`] unless it is whole elements of `U`, aligned for it.
    pub fn cast<U: Pod>(&self) -> Result<View<'a, U>, Error> {
        let (bytes, size) = (self.bytes() as usize, size_of::<U>().max(1));
        if !bytes.is_multiple_of(size) || !self.address.is_multiple_of(align_of::<U>() as u64) {
            let expected = bytes.next_multiple_of(size);
            return Err(Error::SizeMismatch { what: "bytes of another element type", found: bytes, expected });
        }
        Ok(View::borrowed(self.device.clone(), self.address, bytes / size))
    }

    /// Copies `values` into the memory in stream order and waits for it. Not for the hot path.
    ///
    /// # Errors
    /// [`Error::SizeMismatch`] unless there are as many values as elements; [`Error::Capture`] inside a capture, where
    /// the host memory would be read again on every replay.
    pub fn copy_from(&self, stream: &Stream, values: &[T]) -> Result<(), Error> {
        graph::refuse_while_capturing("copying from the host")?;
        self.device.expect_same("stream", stream.device())?;
        if values.len() != self.len {
            let found = values.len();
            return Err(Error::SizeMismatch { what: "copy to a buffer", found, expected: self.len });
        }
        if self.bytes() == 0 {
            return Ok(());
        }
        match stream.backend() {
            StreamBackend::Cuda(stream) => stream.write(self.address, bytemuck::cast_slice(values)),
            StreamBackend::Sim(stream) => stream.write(self.address, bytemuck::cast_slice(values)),
        }
    }

    /// Copies device memory in stream order. The source may be on a peer device with [access](Device::peer_access).
    ///
    /// # Errors
    /// [`Error::SizeMismatch`] unless both have the same length.
    pub fn copy_from_device(&self, stream: &Stream, source: &View<'_, T>) -> Result<(), Error> {
        self.device.expect_same("stream", stream.device())?;
        if source.len != self.len {
            let (found, expected) = (source.len, self.len);
            return Err(Error::SizeMismatch { what: "copy between buffers", found, expected });
        }
        if self.bytes() == 0 {
            return Ok(());
        }
        match stream.backend() {
            StreamBackend::Cuda(stream) => stream.copy(self.address, source.address, self.bytes()),
            StreamBackend::Sim(stream) => stream.copy(self.address, source.address, self.bytes()),
        }
    }

    /// The elements, after everything enqueued on `stream` so far. Waits; not for the hot path.
    ///
    /// # Errors
    /// [`Error::Fault`] of earlier work; [`Error::Capture`] inside a capture.
    pub fn copy_to_vec(&self, stream: &Stream) -> Result<Vec<T>, Error> {
        graph::refuse_while_capturing("copying to the host")?;
        self.device.expect_same("stream", stream.device())?;
        let mut values = vec![T::zeroed(); self.len];
        if self.bytes() == 0 {
            return Ok(values);
        }
        match stream.backend() {
            StreamBackend::Cuda(stream) => stream.read(self.address, bytemuck::cast_slice_mut(&mut values))?,
            StreamBackend::Sim(stream) => stream.read(self.address, bytemuck::cast_slice_mut(&mut values))?,
        }
        Ok(values)
    }

    /// Sets every byte in stream order.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn fill_bytes(&self, stream: &Stream, byte: u8) -> Result<(), Error> {
        self.device.expect_same("stream", stream.device())?;
        if self.bytes() == 0 {
            return Ok(());
        }
        match stream.backend() {
            StreamBackend::Cuda(stream) => stream.fill(self.address, self.bytes(), byte),
            StreamBackend::Sim(stream) => stream.fill(self.address, self.bytes(), byte),
        }
    }
}

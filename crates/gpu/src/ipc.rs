//! Device memory of other processes on the same node.

use bytemuck::Pod;

use crate::buffer::{Buffer, View};
use crate::cuda;
use crate::device::{Backend, Device};
use crate::error::Error;
use crate::graph;

/// By which another process maps a range of this process's device memory. Plain bytes, to be sent by any means.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IpcHandle {
    /// The driver's handle of the whole allocation.
    allocation: [u8; cuda::HANDLE_BYTES],
    /// First byte of the range within the allocation.
    offset: u64,
    /// Bytes of the range.
    bytes: u64,
}

impl std::fmt::Debug for IpcHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IpcHandle({} bytes at {} of an allocation)", self.bytes, self.offset)
    }
}

impl IpcHandle {
    /// Length of [`to_bytes`](IpcHandle::to_bytes).
    pub const BYTES: usize = cuda::HANDLE_BYTES + 16;

    /// The handle as bytes.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (allocation, range) = bytes.split_at_mut(cuda::HANDLE_BYTES);
        allocation.copy_from_slice(&self.allocation);
        range[..8].copy_from_slice(&self.offset.to_le_bytes());
        range[8..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// What [`to_bytes`](IpcHandle::to_bytes) of another process gave; `None` if the length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (allocation, range) = bytes.split_first_chunk()?;
        let (offset, length) = range.split_first_chunk()?;
        let length = length.first_chunk()?;
        let (offset, bytes) = (u64::from_le_bytes(*offset), u64::from_le_bytes(*length));
        Some(IpcHandle { allocation: *allocation, offset, bytes })
    }

    /// Bytes of the memory.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl<T: Pod> View<'_, T> {
    /// A handle by which other processes map this memory. It must stay allocated for as long as any of them has it mapped.
    ///
    /// What this crate allocates can be shared; what came from a memory pool or by virtual memory management cannot, not
    /// by such handles. The driver maps whole allocations, small ones together with their neighbours.
    ///
    /// # Errors
    /// [`Error::NotShareable`] for memory of another kind or of length 0, [`Error::NotSimulated`] on the simulator.
    pub fn ipc_handle(&self) -> Result<IpcHandle, Error> {
        let address = self.ptr().address();
        match self.device().backend() {
            Backend::Cuda(_) if self.bytes() == 0 => {
                Err(Error::NotShareable { address, reason: "it has no bytes".into() })
            }
            Backend::Cuda(context) => {
                let (allocation, offset) = context.export(address)?;
                Ok(IpcHandle { allocation, offset, bytes: self.bytes() })
            }
            Backend::Sim(_) => Err(not_simulated()),
        }
    }
}

impl Device {
    /// Maps another process's memory, so that this device reads and writes it, over peer access if it lies on another
    /// device. Dropping the buffer unmaps it. The other process must not free it before.
    ///
    /// # Errors
    /// [`Error::NotMappable`] where the driver does not allow it (a handle of this same process, of a device without peer
    /// access, or of memory that is gone); [`Error::SizeMismatch`] unless the memory is whole elements;
    /// [`Error::NotSimulated`] on the simulator; [`Error::Capture`] inside a capture.
    pub fn open_ipc<T: Pod>(&self, handle: &IpcHandle) -> Result<Buffer<T>, Error> {
        graph::refuse_while_capturing("mapping memory")?;
        let Backend::Cuda(context) = self.backend() else { return Err(not_simulated()) };
        let (bytes, size) = (handle.bytes as usize, size_of::<T>());
        if size == 0 || !bytes.is_multiple_of(size) || !handle.offset.is_multiple_of(align_of::<T>() as u64) {
            let expected = bytes.next_multiple_of(size.max(1));
            return Err(Error::SizeMismatch { what: "bytes of another process's memory", found: bytes, expected });
        }
        let mapping = cuda::Mapping::open(context, &handle.allocation)?;
        let address = mapping.checked_range(handle.offset, handle.bytes)?;
        Ok(Buffer::mapped(self.clone(), address, bytes / size, mapping))
    }
}

fn not_simulated() -> Error {
    Error::NotSimulated { what: "memory shared between processes".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_the_wire() {
        let mut allocation = [0; cuda::HANDLE_BYTES];
        allocation.iter_mut().zip(1..).for_each(|(byte, value)| *byte = value);
        let handle = IpcHandle { allocation, offset: 0x1122_3344_5566, bytes: u64::MAX - 7 };
        assert_eq!(IpcHandle::from_bytes(&handle.to_bytes()), Some(handle));
        assert_eq!(IpcHandle::from_bytes(&handle.to_bytes()[1..]), None);
        assert_eq!(IpcHandle::from_bytes(&[0; IpcHandle::BYTES + 1]), None);
    }
}

//! The shared memory of one CTA: bytes, which of them something wrote, and which of them asynchronous operations are
//! writing or reading.
//!
//! Shared addresses start at [`BASE`], so that address 0 is never valid.

use std::ops::Range;

use ptx::KernelIr;

use crate::bits::ByteBits;
use crate::memory::{load_le, store_le};
use crate::trap::{Stop, TrapKind};

/// Shared address of the first byte.
pub const BASE: u32 = 1024;

/// Shared memory of a CTA.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    data: Vec<u8>,
    init: ByteBits,
    /// Bytes that an asynchronous copy will write.
    arriving: ByteBits,
    /// Bytes that a bulk store or warpgroup MMA reads.
    leaving: ByteBits,
    /// Bytes that hold initialised mbarriers.
    barriers: ByteBits,
}

impl SharedMemory {
    /// `bytes` bytes, all undefined.
    pub(crate) fn new(bytes: u32) -> SharedMemory {
        let n = bytes as usize;
        SharedMemory {
            data: vec![0; n],
            init: ByteBits::new(n),
            arriving: ByteBits::new(n),
            leaving: ByteBits::new(n),
            barriers: ByteBits::new(n),
        }
    }

    /// Bytes of the CTA.
    pub(crate) fn len(&self) -> usize {
        self.data.len()
    }

    /// Byte offset of an access, which must lie inside the memory.
    #[inline(always)]
    pub(crate) fn offset(&self, ir: &KernelIr, address: u32, size: u32) -> Result<usize, Box<Stop>> {
        let offset = address.wrapping_sub(BASE) as usize;
        if address < BASE || offset + size as usize > self.data.len() {
            return Err(self.out_of_bounds(ir, address, size));
        }
        Ok(offset)
    }

    #[cold]
    fn out_of_bounds(&self, ir: &KernelIr, address: u32, size: u32) -> Box<Stop> {
        let near = match ir.shared.iter().rev().find(|f| address >= BASE + f.offset) {
            Some(f) => {
                format!(", {} bytes after the start of {:?} ({} bytes)", address - BASE - f.offset, f.name, f.bytes)
            }
            None => String::new(),
        };
        let message = format!("{size}-byte access outside the {} bytes of shared memory{near}", self.data.len());
        Stop::new(TrapKind::OutOfBounds, message).address(address.into())
    }

    fn stop(&self, ir: &KernelIr, kind: TrapKind, offset: usize, what: &str) -> Box<Stop> {
        let field = field(ir, offset);
        Stop::new(kind, format!("{what} {field}")).address(u64::from(BASE) + offset as u64)
    }

    /// An ordinary read of an aligned access of at most 16 bytes.
    #[inline(always)]
    pub(crate) fn load(&self, ir: &KernelIr, offset: usize, size: usize) -> Result<u128, Box<Stop>> {
        if !self.init.all_small(offset, size)
            || self.arriving.any_small(offset, size)
            || self.barriers.any_small(offset, size)
        {
            return Err(self.bad_load(ir, offset, size));
        }
        Ok(load_le(&self.data[offset..offset + size]))
    }

    #[cold]
    fn bad_load(&self, ir: &KernelIr, offset: usize, size: usize) -> Box<Stop> {
        let range = offset..offset + size;
        if let Some(at) = self.arriving.find(range.clone(), true) {
            let what = "read of bytes that an asynchronous copy is still writing:";
            return self.stop(ir, TrapKind::ResultPending, at, what);
        }
        if let Some(at) = self.barriers.find(range.clone(), true) {
            return self.stop(ir, TrapKind::Mbarrier, at, "ordinary read of an mbarrier:");
        }
        let at = self.init.find(range, false).unwrap_or(offset);
        self.stop(ir, TrapKind::Uninitialized, at, "read of bytes that nothing wrote:")
    }

    /// An ordinary write of an aligned access of at most 16 bytes; whether any byte changed.
    #[inline(always)]
    pub(crate) fn store(&mut self, ir: &KernelIr, offset: usize, size: usize, value: u128) -> Result<bool, Box<Stop>> {
        if self.arriving.any_small(offset, size)
            || self.leaving.any_small(offset, size)
            || self.barriers.any_small(offset, size)
        {
            return Err(self.bad_store(ir, offset..offset + size));
        }
        let fresh = !self.init.all_small(offset, size);
        self.init.set_small(offset, size);
        Ok(store_le(&mut self.data[offset..offset + size], value) || fresh)
    }

    #[cold]
    fn bad_store(&self, ir: &KernelIr, range: Range<usize>) -> Box<Stop> {
        if let Some(at) = self.leaving.find(range.clone(), true) {
            let what = "write to bytes that an asynchronous operation still reads:";
            return self.stop(ir, TrapKind::OperandInUse, at, what);
        }
        if let Some(at) = self.arriving.find(range.clone(), true) {
            let what = "write to bytes that an asynchronous copy is still writing:";
            return self.stop(ir, TrapKind::ResultPending, at, what);
        }
        self.stop(ir, TrapKind::Mbarrier, range.start, "ordinary write to an mbarrier:")
    }

    /// Marks the destination of an asynchronous copy: until [`arrive`](Self::arrive) nobody may touch it.
    pub(crate) fn expect(&mut self, ir: &KernelIr, range: Range<usize>) -> Result<(), Box<Stop>> {
        if self.arriving.find(range.clone(), true).is_some()
            || self.leaving.find(range.clone(), true).is_some()
            || self.barriers.find(range.clone(), true).is_some()
        {
            return Err(self.bad_store(ir, range));
        }
        self.arriving.fill(range, true);
        Ok(())
    }

    /// Bytes of an asynchronous copy arrive.
    pub(crate) fn arrive(&mut self, offset: usize, bytes: &[u8]) {
        let range = offset..offset + bytes.len();
        self.data[range.clone()].copy_from_slice(bytes);
        self.init.fill(range.clone(), true);
        self.arriving.fill(range, false);
    }

    /// Checks that an asynchronous operation may read the range now.
    pub(crate) fn check_async_read(&self, ir: &KernelIr, range: Range<usize>) -> Result<(), Box<Stop>> {
        if let Some(at) = self.arriving.find(range.clone(), true) {
            let what = "asynchronous read of bytes that a copy is still writing:";
            return Err(self.stop(ir, TrapKind::ResultPending, at, what));
        }
        if let Some(at) = self.barriers.find(range.clone(), true) {
            return Err(self.stop(ir, TrapKind::Mbarrier, at, "asynchronous read of an mbarrier:"));
        }
        if let Some(at) = self.init.find(range.clone(), false) {
            let what = "asynchronous read of bytes that nothing wrote:";
            return Err(self.stop(ir, TrapKind::Uninitialized, at, what));
        }
        Ok(())
    }

    /// Marks (or releases) bytes that an asynchronous operation reads.
    pub(crate) fn set_leaving(&mut self, range: Range<usize>, value: bool) {
        self.leaving.fill(range, value);
    }

    /// The bytes of a range.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.data[range]
    }

    /// All bytes.
    pub(crate) fn all(&self) -> &[u8] {
        &self.data
    }

    /// Reserves or releases the eight bytes of an mbarrier.
    pub(crate) fn set_barrier(&mut self, offset: usize, value: bool) {
        self.barriers.fill(offset..offset + 8, value);
        // A dead barrier leaves no defined bytes behind.
        self.init.fill(offset..offset + 8, false);
    }
}

/// Names a byte by the layout field that holds it.
pub(crate) fn field(ir: &KernelIr, offset: usize) -> String {
    match ir.shared_field_at(offset as u32) {
        Some(f) => format!("byte {} of {:?}", offset as u32 - f.offset, f.name),
        None => format!("byte {offset} of shared memory"),
    }
}

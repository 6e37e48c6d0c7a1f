//! Page tables of a step, and the checks of buffers that every launch makes.

use dsa_core::KvShape;
use dsa_core::consts::POOL_ROWS_MAX;
use gpu::View;

use crate::error::KernelError;

/// int32 block ids: one row per request, `stride` entries apart, of which the first `width` may be read.
///
/// For a table with one row per query row, take its stride times q: the rows of a request share their table.
#[derive(Clone, Debug)]
pub struct Table<'a> {
    /// The entries.
    pub ids: View<'a, i32>,
    /// Entries from one row to the next.
    pub stride: usize,
    /// Entries of a row.
    pub width: usize,
}

impl Table<'_> {
    /// Checks that `requests` rows are there.
    ///
    /// # Errors
    /// Rows that overlap, or too few entries.
    pub fn check(&self, kernel: &'static str, buffer: &'static str, requests: usize) -> Result<(), KernelError> {
        if self.stride < self.width {
            return Err(dsa_core::ShapeError::TableStrideTooSmall {
                table: buffer,
                stride: self.stride,
                width: self.width,
            }
            .into());
        }
        let needed = match requests {
            0 => 0,
            n => (n - 1).saturating_mul(self.stride).saturating_add(self.width),
        };
        check_len(kernel, buffer, self.ids.len(), needed)
    }
}

/// Checks that a buffer has the elements that a step needs.
///
/// # Errors
/// If it has not.
pub fn check_len(kernel: &'static str, buffer: &'static str, found: usize, needed: usize) -> Result<(), KernelError> {
    if found < needed { Err(KernelError::BufferTooShort { kernel, buffer, found, needed }) } else { Ok(()) }
}

/// Checks that a scratch buffer of `needed` elements starts where 16-byte accesses may.
///
/// # Errors
/// Too few elements, or a misaligned start.
pub fn check_scratch(
    kernel: &'static str,
    buffer: &'static str,
    view: &View<'_, u16>,
    needed: usize,
) -> Result<(), KernelError> {
    const ALIGN: u64 = 16;
    check_len(kernel, buffer, view.len(), needed)?;
    let address = view.ptr().address();
    if address.is_multiple_of(ALIGN) {
        Ok(())
    } else {
        Err(KernelError::Misaligned { kernel, buffer, address, align: ALIGN })
    }
}

/// Blocks that a table entry may name: those of the MLA cache, or, if their number is not known, as many as have rows that an
/// int32 numbers.
///
/// # Errors
/// More blocks than 32 bits count.
pub fn kv_blocks(kernel: &'static str, kv: &KvShape) -> Result<u32, KernelError> {
    match kv.blocks() {
        0 => Ok(((POOL_ROWS_MAX + 1 - kv.page() as u64) / kv.block_rows() as u64 + 1) as u32),
        n => word(kernel, "kv blocks", n),
    }
}

/// A size as the kernels take it.
///
/// # Errors
/// A size of more than 32 bits.
pub fn word(kernel: &'static str, buffer: &'static str, n: usize) -> Result<u32, KernelError> {
    u32::try_from(n).map_err(|_| KernelError::BufferTooShort { kernel, buffer, found: u32::MAX as usize, needed: n })
}

//! One step's inputs as an engine holds them on the device.

use dsa_core::consts::{HEADS, PAGE};
use dsa_core::layout::query_row;
use dsa_kernels::Table;
use gpu::{Device, View};

use crate::error::Error;
use crate::layer::StepShape;

/// What a row of a block table belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TablePer {
    /// A request.
    Request,
    /// A query row: each of a request's `q` rows has a copy of the request's table. The first copy is read.
    Row,
}

/// A block table of a step: int32, only the entries that a row's keys need are read.
#[derive(Debug, Clone)]
pub struct StepTable<'a> {
    /// The entries.
    pub ids: View<'a, i32>,
    /// Entries from one row to the next.
    pub stride: usize,
    /// Entries of a row.
    pub width: usize,
    /// What a row belongs to.
    pub per: TablePer,
}

impl<'a> StepTable<'a> {
    /// A table with one row per request.
    pub fn per_request(ids: View<'a, i32>, stride: usize, width: usize) -> Self {
        StepTable { ids, stride, width, per: TablePer::Request }
    }

    /// A table with one row per query row.
    pub fn per_row(ids: View<'a, i32>, stride: usize, width: usize) -> Self {
        StepTable { ids, stride, width, per: TablePer::Row }
    }

    /// The table of `requests` requests as the kernels take it.
    fn resolve(&self, name: &'static str, requests: usize, q: usize) -> Result<Table<'a>, Error> {
        if self.stride < self.width {
            return Err(Error::TableStride { table: name, stride: self.stride, width: self.width });
        }
        // The kernels take the stride as a 32-bit number.
        let stride = match self.per {
            TablePer::Request => self.stride,
            TablePer::Row => self.stride.saturating_mul(q),
        };
        if u32::try_from(stride).is_err() {
            return Err(Error::TableStride { table: name, stride, width: self.width });
        }
        let needed = match requests {
            0 => 0,
            n => (n - 1).saturating_mul(stride).saturating_add(self.width),
        };
        check_len(name, self.ids.len(), needed)?;
        Ok(Table { ids: self.ids.clone(), stride, width: self.width })
    }
}

/// The inputs of one step. Row ends and tables are step metadata: they are written before the sequence that the step is
/// launched (or captured) in, because the kernels read them before waiting for their predecessor.
#[derive(Debug, Clone)]
pub struct Step<'a> {
    /// The shape the step is captured with.
    pub shape: StepShape,
    /// E4M3 `[live rows, 32, 128]`, 16-byte aligned.
    pub queries: View<'a, u8>,
    /// BF16 `[live rows, 32]`.
    pub weights: View<'a, u16>,
    /// Keys that each live row sees: int32, at or below 0 none. Its length is the number of live rows, whole requests;
    /// the shape's rows beyond come out empty.
    pub row_ends: View<'a, i32>,
    /// Block ids of the indexer cache.
    pub index_table: StepTable<'a>,
    /// Block ids of the MLA cache.
    pub kv_table: StepTable<'a>,
}

/// A step that was checked.
pub(crate) struct Checked<'a> {
    pub(crate) index_table: Table<'a>,
    pub(crate) kv_table: Table<'a>,
    /// Longest row that both tables and the scratch allow: score and select must agree on it.
    pub(crate) length_max: usize,
}

/// The queries are read by tensor copies.
const QUERY_ALIGN: u64 = 16;

impl<'a> Step<'a> {
    /// Checks everything that the host can see, for MLA pages of `kv_page` tokens and scratch rows of `length_max` keys.
    pub(crate) fn check(&self, device: &Device, kv_page: usize, length_max: usize) -> Result<Checked<'a>, Error> {
        let StepShape { rows, q } = self.shape;
        let live = self.row_ends.len();
        if live > rows || !live.is_multiple_of(q) {
            return Err(Error::LiveRows { live, shape: self.shape });
        }
        expect_device(device, "queries", self.queries.device())?;
        expect_device(device, "weights", self.weights.device())?;
        expect_device(device, "row_ends", self.row_ends.device())?;
        expect_device(device, "index_table", self.index_table.ids.device())?;
        expect_device(device, "kv_table", self.kv_table.ids.device())?;
        check_len("queries", self.queries.len(), live * query_row::BYTES)?;
        check_len("weights", self.weights.len(), live * HEADS)?;
        let address = self.queries.ptr().address();
        if !address.is_multiple_of(QUERY_ALIGN) {
            return Err(Error::Misaligned { buffer: "queries", address, align: QUERY_ALIGN });
        }
        let index_table = self.index_table.resolve("index_table", live / q, q)?;
        let kv_table = self.kv_table.resolve("kv_table", live / q, q)?;
        let length_max =
            length_max.min(index_table.width.saturating_mul(PAGE)).min(kv_table.width.saturating_mul(kv_page));
        Ok(Checked { index_table, kv_table, length_max })
    }
}

/// [`Error::WrongDevice`] unless `found` is `device`.
pub(crate) fn expect_device(device: &Device, what: &'static str, found: &Device) -> Result<(), Error> {
    if device.same(found) {
        return Ok(());
    }
    Err(Error::WrongDevice { what, found: found.info().name.clone(), expected: device.info().name.clone() })
}

fn check_len(buffer: &'static str, found: usize, needed: usize) -> Result<(), Error> {
    if found < needed { Err(Error::TooShort { buffer, found, needed }) } else { Ok(()) }
}

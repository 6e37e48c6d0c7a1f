//! The merge on a device.

use dsa_core::KvShape;
use dsa_core::consts::KEYS_PER_TOP;
use dsa_kernels::score::check_pitch;
use dsa_kernels::table::{check_len, check_scratch, kv_blocks, word};
use dsa_kernels::{KernelError, Table};
use gpu::{Device, Function, LaunchConfig, Stream, View};
use ptx::{DevicePtr, Kernel};

use super::{MergeArgs, MergeShape, build};
use crate::error::DcpError;
use crate::exchange::Exchange;
use crate::gathered::GatheredExchange;
use crate::layout::SymmetricLayout;
use crate::shape::ExchangeShape;

const KERNEL: &str = "merge";

/// The inputs and outputs of one step. `row_ends` gives the live rows.
#[derive(Clone, Debug)]
pub struct MergeStep<'a> {
    /// The pitched logits that local top-k was given; 16-byte aligned.
    pub logits: View<'a, u16>,
    /// Their tops. Others than the logits' own give wrong rows, and may leave some before the count as they were.
    pub tops: View<'a, u16>,
    /// Elements from one logits row to the next, a multiple of 512.
    pub pitch: usize,
    /// The *local* row ends that local top-k was given.
    pub row_ends: View<'a, i32>,
    /// The longest row that local top-k was given.
    pub length_max: usize,
    /// MLA block ids per request on this rank.
    pub table: Table<'a>,
    /// Sizes of the MLA cache that the rows address; 0 blocks if their number is not known.
    pub kv: KvShape,
    /// int32 `[rows, topk]`: this rank's physical rows in ascending id order, -1 past the count. As many rows as local
    /// top-k pushed.
    pub rows_out: View<'a, i32>,
    /// int32 `[rows]`: its length gives the rows, equal on every rank.
    pub valid_out: View<'a, i32>,
    /// int32 `[rows, topk]`: all selected ids; needed exactly if the kernel writes them.
    pub ids: Option<View<'a, i32>>,
}

/// The merge kernel of one shape on one device.
#[derive(Clone)]
pub struct ExchangeMerge {
    function: Function<MergeArgs>,
    shape: MergeShape,
}

impl ExchangeMerge {
    /// Builds and compiles the kernel.
    ///
    /// # Errors
    /// A device that refuses it.
    pub fn new(device: &Device, shape: MergeShape) -> Result<Self, DcpError> {
        Self::from_kernel(device, shape, &build(&shape, device.target()?)?)
    }

    /// As [`ExchangeMerge::new`] with a kernel for `shape` that the caller built or rewrote.
    ///
    /// # Errors
    /// A device that refuses it.
    pub fn from_kernel(device: &Device, shape: MergeShape, kernel: &Kernel<MergeArgs>) -> Result<Self, DcpError> {
        Ok(ExchangeMerge { function: device.load(kernel)?, shape })
    }

    /// What it is specialised for.
    pub fn shape(&self) -> MergeShape {
        self.shape
    }

    /// The compiled kernel.
    pub fn function(&self) -> &Function<MergeArgs> {
        &self.function
    }

    /// Merges a step's rows. Collective: after local top-k has pushed the same rows on every rank. Starts while local top-k
    /// still runs. Rows that are late show in [`Exchange::check`].
    ///
    /// # Errors
    /// Sizes that disagree, before anything is launched; a launch that the device refuses.
    pub fn launch(&self, stream: &Stream, exchange: &Exchange, step: &MergeStep<'_>) -> Result<(), DcpError> {
        let shape = exchange.shape();
        let args = self.check(exchange.device(), &shape, false, step)?;
        let layout = SymmetricLayout::new(shape);
        let args = MergeArgs {
            memory: exchange.memory().ptr(),
            peers: exchange.peers().ptr(),
            epochs: exchange.epochs().ptr(),
            sequences: exchange.sequences().ptr(),
            status: exchange.status().ptr(),
            lists_at: layout.lists() as u64,
            timeout_ns: exchange.limits().poll_ns(),
            rank: exchange.rank() as u32,
            slot_rows: shape.rows() as u32,
            ..args
        };
        exchange.note_launch(stream)?;
        let config = LaunchConfig::new(step.valid_out.len() as u32).overlap(true);
        Ok(self.function.launch(stream, config, &args)?)
    }

    /// Merges a step's rows that were [gathered](GatheredExchange::launch) last.
    ///
    /// # Errors
    /// Sizes that disagree, before anything is launched; a launch that the device refuses.
    pub fn launch_gathered(
        &self,
        stream: &Stream,
        exchange: &GatheredExchange,
        step: &MergeStep<'_>,
    ) -> Result<(), DcpError> {
        let rows = step.valid_out.len() as u32;
        let args = MergeArgs {
            memory: exchange.received().ptr(),
            status: exchange.status().ptr(),
            rank: exchange.rank() as u32,
            slot_rows: rows,
            ..self.check(exchange.device(), &exchange.shape(), true, step)?
        };
        // What comes before is no kernel of this project, and need not let this one start early.
        Ok(self.function.launch(stream, LaunchConfig::new(rows), &args)?)
    }

    /// Checks a step against the kernel and an exchange of `shape` on the device `exchange`; the arguments that do not depend
    /// on the latter's memory.
    fn check(
        &self,
        exchange: &Device,
        shape: &ExchangeShape,
        gathered: bool,
        step: &MergeStep<'_>,
    ) -> Result<MergeArgs, DcpError> {
        if gathered != self.shape.gathered || !shape.shares_kernels(&self.shape.exchange()) {
            let name = |gathered, shape: &ExchangeShape| match gathered {
                true => format!("{shape}, gathered"),
                false => shape.to_string(),
            };
            let (merge, exchange) = (name(self.shape.gathered, &self.shape.exchange()), name(gathered, shape));
            return Err(DcpError::WrongExchange { merge, exchange });
        }
        for (what, device) in [
            ("exchange", exchange),
            ("logits", step.logits.device()),
            ("tops", step.tops.device()),
            ("row ends", step.row_ends.device()),
            ("kv table", step.table.ids.device()),
            ("rows_out", step.rows_out.device()),
            ("valid_out", step.valid_out.device()),
            ("ids", step.ids.as_ref().unwrap_or(&step.rows_out).device()),
        ] {
            self.function.device().expect_same(what, device)?;
        }
        let (q, topk) = (self.shape.q() as usize, shape.topk());
        let (live, rows) = (step.row_ends.len(), step.valid_out.len());
        if !live.is_multiple_of(q) {
            return Err(dsa_core::ShapeError::RowsNotWholeRequests { rows: live, q }.into());
        }
        check_len(KERNEL, "valid_out", rows, live)?;
        check_len(KERNEL, "exchange rows", shape.rows(), rows)?;
        check_len(KERNEL, "rows_out", step.rows_out.len(), rows * topk)?;
        let ids = match (&step.ids, self.shape.ids()) {
            (Some(ids), true) => {
                check_len(KERNEL, "ids", ids.len(), rows * topk)?;
                ids.ptr()
            }
            (None, false) => DevicePtr::NULL,
            (ids, _) => {
                let found = ids.as_ref().map_or(0, View::len);
                let needed = if self.shape.ids() { rows * topk } else { 0 };
                return Err(KernelError::BufferTooShort { kernel: KERNEL, buffer: "ids", found, needed }.into());
            }
        };
        check_len(KERNEL, "exchange rows in keys", shape.local_len_max(), step.length_max)?;
        check_len(KERNEL, "pitch", check_pitch(step.pitch)?, step.length_max)?;
        let needed = live.saturating_mul(step.pitch);
        check_scratch(KERNEL, "logits", &step.logits, needed)?;
        check_scratch(KERNEL, "tops", &step.tops, needed / KEYS_PER_TOP)?;
        step.table.check(KERNEL, "kv table", live / q)?;
        check_len(KERNEL, "kv table width x page", step.table.width.saturating_mul(step.kv.page()), step.length_max)?;
        if step.kv.page() != self.shape.page() as usize {
            let (found, needed) = (step.kv.page(), self.shape.page() as usize);
            return Err(KernelError::BufferTooShort { kernel: KERNEL, buffer: "kv page", found, needed }.into());
        }
        Ok(MergeArgs {
            rows_out: step.rows_out.ptr(),
            valid_out: step.valid_out.ptr(),
            ids,
            memory: DevicePtr::NULL,
            peers: DevicePtr::NULL,
            epochs: DevicePtr::NULL,
            sequences: DevicePtr::NULL,
            status: DevicePtr::NULL,
            logits: step.logits.ptr(),
            tops: step.tops.ptr(),
            table: step.table.ids.ptr(),
            row_ends: step.row_ends.ptr(),
            lists_at: 0,
            timeout_ns: 0,
            pitch: word(KERNEL, "pitch", step.pitch)?,
            length_max: step.length_max as u32,
            rows: live as u32,
            table_stride: word(KERNEL, "kv table stride", step.table.stride)?,
            block_rows: word(KERNEL, "kv block rows", step.kv.block_rows())?,
            blocks: kv_blocks(KERNEL, &step.kv)?,
            rank: 0,
            slot_rows: 0,
        })
    }
}

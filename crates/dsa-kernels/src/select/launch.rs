//! Select on a device.

use dsa_core::consts::KEYS_PER_TOP;
use dsa_core::layout::tp_scratch::TpScratch;
use dsa_core::{IndexShape, KvShape};
use gpu::{Device, Function, LaunchConfig, Stream, View};
use ptx::{DevicePtr, Kernel};

use super::{SelectArgs, SelectShape, build};
use crate::error::KernelError;
use crate::table::{Table, check_len, check_scratch, kv_blocks, word};

const KERNEL: &str = "select";

/// The inputs and outputs of one step.
#[derive(Clone, Debug)]
pub struct SelectStep<'a> {
    /// Compact BF16 logits, as score wrote them; 16-byte aligned. Logits and tops must be of the same launch of score, with
    /// these `row_ends` and this `length_max`: tops that are not their logits' largest give wrong ids of the row, but no
    /// fault.
    pub logits: View<'a, u16>,
    /// Tops, as score wrote them; 16-byte aligned.
    pub tops: View<'a, u16>,
    /// MLA block ids per request.
    pub table: Table<'a>,
    /// Sizes of the MLA cache that the rows address; 0 blocks if their number is not known.
    pub kv: KvShape,
    /// The row ends that score was given, whole requests.
    pub row_ends: View<'a, i32>,
    /// Rows per request.
    pub q: usize,
    /// The longest row that score was given.
    pub length_max: usize,
    /// int32 `[rows, topk]`: physical rows in ascending key order, -1 past the count. May have more rows than
    /// `row_ends`: they come out empty.
    pub out: View<'a, i32>,
    /// int32 `[rows]`.
    pub counts: View<'a, i32>,
    /// int32 `[rows, topk]`: key indices; needed exactly if the kernel writes them.
    pub ids: Option<View<'a, i32>>,
}

/// The select kernel of one shape on one device.
#[derive(Clone)]
pub struct IndexerSelect {
    function: Function<SelectArgs>,
    shape: SelectShape,
}

impl IndexerSelect {
    /// Builds and compiles the kernel.
    ///
    /// # Errors
    /// A device that refuses it.
    pub fn new(device: &Device, shape: SelectShape) -> Result<Self, KernelError> {
        Self::from_kernel(device, shape, &build(&shape, device.target()?)?)
    }

    /// As [`IndexerSelect::new`] with a kernel for `shape` that the caller built or rewrote.
    ///
    /// # Errors
    /// A device that refuses it.
    pub fn from_kernel(device: &Device, shape: SelectShape, kernel: &Kernel<SelectArgs>) -> Result<Self, KernelError> {
        Ok(IndexerSelect { function: device.load(kernel)?, shape })
    }

    /// What it is specialised for.
    pub fn shape(&self) -> SelectShape {
        self.shape
    }

    /// The compiled kernel.
    pub fn function(&self) -> &Function<SelectArgs> {
        &self.function
    }

    /// Selects a step's rows. Overlaps its predecessor in the stream as far as dependent launches allow.
    ///
    /// # Errors
    /// Sizes that disagree, before anything is launched; a launch that the device refuses.
    pub fn launch(&self, stream: &Stream, step: &SelectStep<'_>) -> Result<(), KernelError> {
        let topk = self.shape.topk() as usize;
        let (live, rows) = (step.row_ends.len(), step.counts.len());
        let shape = IndexShape::from_rows(live, step.q, topk, step.length_max.max(1))?;
        for (what, device) in [
            ("logits", step.logits.device()),
            ("tops", step.tops.device()),
            ("kv table", step.table.ids.device()),
            ("row ends", step.row_ends.device()),
            ("out", step.out.device()),
            ("counts", step.counts.device()),
            ("ids", step.ids.as_ref().unwrap_or(&step.out).device()),
        ] {
            self.function.device().expect_same(what, device)?;
        }
        check_len(KERNEL, "counts", rows, live)?;
        check_len(KERNEL, "out", step.out.len(), rows * topk)?;
        let ids = match (&step.ids, self.shape.ids()) {
            (Some(ids), true) => {
                check_len(KERNEL, "ids", ids.len(), rows * topk)?;
                ids.ptr()
            }
            (None, false) => DevicePtr::NULL,
            (ids, _) => {
                let found = ids.as_ref().map_or(0, View::len);
                let needed = if self.shape.ids() { rows * topk } else { 0 };
                return Err(KernelError::BufferTooShort { kernel: KERNEL, buffer: "ids", found, needed });
            }
        };
        let scratch = TpScratch::capacity(live, step.length_max);
        check_scratch(KERNEL, "logits", &step.logits, scratch)?;
        check_scratch(KERNEL, "tops", &step.tops, scratch / KEYS_PER_TOP)?;
        step.table.check(KERNEL, "kv table", shape.requests())?;
        check_len(KERNEL, "kv table width x page", step.table.width.saturating_mul(step.kv.page()), step.length_max)?;
        if step.kv.page() != self.shape.page() as usize {
            let (found, needed) = (step.kv.page(), self.shape.page() as usize);
            return Err(KernelError::BufferTooShort { kernel: KERNEL, buffer: "kv page", found, needed });
        }
        let args = SelectArgs {
            out: step.out.ptr(),
            counts: step.counts.ptr(),
            ids,
            logits: step.logits.ptr(),
            tops: step.tops.ptr(),
            table: step.table.ids.ptr(),
            row_ends: step.row_ends.ptr(),
            table_stride: word(KERNEL, "kv table stride", step.table.stride)?,
            block_rows: word(KERNEL, "kv block rows", step.kv.block_rows())?,
            blocks: kv_blocks(KERNEL, &step.kv)?,
            length_max: step.length_max as u32,
            rows: live as u32,
            q: step.q as u32,
        };
        let grid = word(KERNEL, "rows", rows.saturating_mul(self.shape.cluster() as usize))?;
        Ok(self.function.launch(stream, LaunchConfig::new(grid).overlap(true), &args)?)
    }
}

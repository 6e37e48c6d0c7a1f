//! Score on a device.

use dsa_core::consts::{CONTEXT_MAX, HEADS, KEYS_PER_TOP, PAGE, Q_MAX, REQUESTS_MAX, TILE};
use dsa_core::layout::tp_scratch::TpScratch;
use dsa_core::layout::{fp8_page, query_row};
use dsa_core::{IndexCacheShape, IndexShape};
use gpu::{Device, Function, L2Promotion, LaunchConfig, Stream, View};
use ptx::{DevicePtr, Kernel, Target, TensorMap};

use super::{ScoreArgs, ScoreForm, ScoreShape, build, check_pitch, key_map, query_map};
use crate::error::KernelError;
use crate::table::{Table, check_len, check_scratch, word};

const KERNEL: &str = "score";

/// A paged FP8 index cache of one layer, ready for tensor copies.
#[derive(Clone, Debug)]
pub struct KeyCache {
    device: Device,
    map: TensorMap,
    shape: IndexCacheShape,
}

impl KeyCache {
    /// The cache of `shape` in `bytes`. The memory must stay in place for as long as steps are launched on it.
    ///
    /// # Errors
    /// A buffer shorter than the shape, or a base that is not 16-byte aligned.
    pub fn new(device: &Device, bytes: &View<'_, u8>, shape: IndexCacheShape) -> Result<Self, KernelError> {
        let needed = match shape.blocks() {
            0 => 0,
            n => (n - 1).saturating_mul(shape.page_stride()).saturating_add(fp8_page::BYTES),
        };
        device.expect_same("index cache", bytes.device())?;
        check_len(KERNEL, "index cache", bytes.len(), needed)?;
        // Whole pages are read: promoting the sectors of a miss to more than a line only costs.
        let map = device.tensor_map_with(&key_map(bytes.ptr(), shape)?, L2Promotion::B128)?;
        Ok(KeyCache { device: device.clone(), map, shape })
    }

    /// Its sizes.
    pub fn shape(&self) -> IndexCacheShape {
        self.shape
    }
}

/// Where a launch writes. Logits and tops are 16-byte aligned.
#[derive(Clone, Debug)]
pub enum ScoreOutput<'a> {
    /// Request-compact logits and tops, with room for every row at the longest length
    /// ([`TpScratch::capacity`](dsa_core::layout::tp_scratch::TpScratch::capacity)).
    Compact {
        /// BF16 bits.
        logits: View<'a, u16>,
        /// order16 of the largest of every 8.
        tops: View<'a, u16>,
    },
    /// Row `t` at `t * pitch`.
    Pitched {
        /// BF16 bits.
        logits: View<'a, u16>,
        /// order16 of the largest of every 8, row `t` at `t * pitch / 8`; written if present.
        tops: Option<View<'a, u16>>,
        /// Elements from one row to the next, a multiple of 512.
        pitch: usize,
    },
}

/// The inputs of one step. `row_ends` gives the live rows.
#[derive(Clone, Debug)]
pub struct ScoreStep<'a> {
    /// E4M3 `[rows, 32, 128]`, 16-byte aligned.
    pub queries: View<'a, u8>,
    /// BF16 `[rows, 32]`.
    pub weights: View<'a, u16>,
    /// The layer's keys.
    pub cache: &'a KeyCache,
    /// Index block ids per request.
    pub table: Table<'a>,
    /// Keys that each live row sees. Written before anything that may overlap this launch.
    pub row_ends: View<'a, i32>,
    /// Longest row in keys; longer ends are clamped to it on the device. At most 64 times the table's width.
    pub length_max: usize,
}

/// The score kernel of one shape on one device.
#[derive(Clone)]
pub struct IndexerScore {
    function: Function<ScoreArgs>,
    shape: ScoreShape,
    device: Device,
    ctas: u32,
}

impl IndexerScore {
    /// Builds and compiles the kernel.
    ///
    /// # Errors
    /// A device whose architecture has no such kernel, or one that refuses it.
    pub fn new(device: &Device, shape: ScoreShape) -> Result<Self, KernelError> {
        let target = device.target()?;
        if target != Target::Sm90a {
            return Err(KernelError::UnsupportedTarget { kernel: KERNEL, target });
        }
        Self::from_kernel(device, shape, &build(&shape, target)?)
    }

    /// As [`IndexerScore::new`] with a kernel for `shape` that the caller built or rewrote.
    ///
    /// # Errors
    /// A device that refuses it.
    pub fn from_kernel(device: &Device, shape: ScoreShape, kernel: &Kernel<ScoreArgs>) -> Result<Self, KernelError> {
        let function = device.load(kernel)?;
        Ok(IndexerScore { function, shape, device: device.clone(), ctas: device.info().sms })
    }

    /// What it is specialised for.
    pub fn shape(&self) -> ScoreShape {
        self.shape
    }

    /// The compiled kernel.
    pub fn function(&self) -> &Function<ScoreArgs> {
        &self.function
    }

    /// Scores a step. Overlaps its predecessor in the stream as far as dependent launches allow.
    ///
    /// # Errors
    /// Sizes that disagree, before anything is launched; a launch that the device refuses.
    pub fn launch(&self, stream: &Stream, step: &ScoreStep<'_>, output: &ScoreOutput<'_>) -> Result<(), KernelError> {
        let q = self.shape.q() as usize;
        let rows = step.row_ends.len();
        let topk = match self.shape.form() {
            ScoreForm::Compact { topk } => topk as usize,
            ScoreForm::Pitched => dsa_core::consts::TOPK_MULTIPLE, // any: the pitched form has none
        };
        let shape = IndexShape::from_rows(rows, q, topk, step.length_max.max(1))?;
        if rows == 0 {
            return Ok(());
        }
        let (logits, tops) = match output {
            ScoreOutput::Compact { logits, tops } => (logits, Some(tops)),
            ScoreOutput::Pitched { logits, tops, .. } => (logits, tops.as_ref()),
        };
        for (what, device) in [
            ("queries", step.queries.device()),
            ("weights", step.weights.device()),
            ("index cache", &step.cache.device),
            ("table", step.table.ids.device()),
            ("row ends", step.row_ends.device()),
            ("logits", logits.device()),
            ("tops", tops.unwrap_or(logits).device()),
        ] {
            self.device.expect_same(what, device)?;
        }
        // A tensor map has at least one page: a table entry would reach it.
        check_len(KERNEL, "index cache blocks", step.cache.shape.blocks(), 1)?;
        check_len(KERNEL, "queries", step.queries.len(), rows * query_row::BYTES)?;
        check_len(KERNEL, "weights", step.weights.len(), rows * HEADS)?;
        step.table.check(KERNEL, "table", shape.requests())?;
        check_len(KERNEL, "table width x 64", step.table.width.saturating_mul(PAGE), step.length_max)?;
        let (logits, tops, pitch) = match (self.shape.form(), output) {
            (ScoreForm::Compact { .. }, ScoreOutput::Compact { logits, tops }) => {
                let needed = TpScratch::capacity(rows, step.length_max);
                check_scratch(KERNEL, "logits", logits, needed)?;
                check_scratch(KERNEL, "tops", tops, needed / KEYS_PER_TOP)?;
                (logits.ptr(), tops.ptr(), 0)
            }
            (ScoreForm::Pitched, ScoreOutput::Pitched { logits, tops, pitch }) => {
                check_len(KERNEL, "pitch", check_pitch(*pitch)?, step.length_max)?;
                let needed = rows.saturating_mul(*pitch);
                check_scratch(KERNEL, "logits", logits, needed)?;
                if let Some(tops) = tops {
                    check_scratch(KERNEL, "tops", tops, needed / KEYS_PER_TOP)?;
                }
                (logits.ptr(), tops.as_ref().map_or(DevicePtr::NULL, View::ptr), *pitch)
            }
            (ScoreForm::Compact { .. }, ScoreOutput::Pitched { .. }) => {
                return Err(KernelError::BufferTooShort { kernel: KERNEL, buffer: "tops", found: 0, needed: 1 });
            }
            (ScoreForm::Pitched, ScoreOutput::Compact { .. }) => {
                return Err(KernelError::BufferTooShort {
                    kernel: KERNEL,
                    buffer: "pitch",
                    found: 0,
                    needed: step.length_max,
                });
            }
        };
        let args = ScoreArgs {
            logits,
            tops,
            queries: self.device.tensor_map(&query_map(step.queries.ptr(), rows, q as u32)?)?,
            keys: step.cache.map,
            weights: step.weights.ptr(),
            table: step.table.ids.ptr(),
            row_ends: step.row_ends.ptr(),
            table_stride: word(KERNEL, "table stride", step.table.stride)?,
            rows: rows as u32,
            length_max: step.length_max as u32,
            pitch: word(KERNEL, "pitch", pitch)?,
        };
        Ok(self.function.launch(stream, LaunchConfig::new(self.ctas).overlap(true), &args)?)
    }
}

// A row's length fits 32 bits, and so do a step's rows.
const _: () = assert!(CONTEXT_MAX < u32::MAX as usize);
const _: () = assert!(Q_MAX * REQUESTS_MAX < u32::MAX as usize && TILE == 128);

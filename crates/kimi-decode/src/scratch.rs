//! The buffers of the indexer, reserved once per device and shared by all its layers.

use std::sync::Arc;

use dsa_core::consts::{KEYS_PER_TOP, Q_MAX, REQUESTS_MAX};
use dsa_core::layout::tp_scratch::TpScratch;
use dsa_core::{IndexShape, ShapeError};
use gpu::{Buffer, Device, View};

use crate::error::Error;
use crate::kernels::KernelSet;

/// How much to reserve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScratchSpec {
    /// Most rows of a step.
    pub rows_max: usize,
    /// Most keys of a row; longer row ends are clamped to it on the device. An engine takes the smaller of its longest
    /// context and what its indexer cache holds.
    pub length_max: usize,
    /// Most keys picked per row.
    pub topk: usize,
    /// Whether there is room for the selected key indices besides the physical rows.
    pub ids: bool,
}

impl ScratchSpec {
    pub(crate) fn validate(&self) -> Result<(), ShapeError> {
        IndexShape::new(0, 1, self.topk, self.length_max)?;
        if self.rows_max > REQUESTS_MAX * Q_MAX {
            return Err(ShapeError::TooManyRequests { requests: self.rows_max.div_ceil(Q_MAX) });
        }
        Ok(())
    }

    /// Device bytes that [`IndexerScratch::reserve`] takes; `u64::MAX` if their number is larger.
    pub fn bytes(&self) -> u64 {
        let logits = TpScratch::capacity(self.rows_max, self.length_max) as u64;
        let scores = logits.saturating_add(logits / KEYS_PER_TOP as u64);
        let slots = (self.topk as u64).saturating_mul(1 + u64::from(self.ids)).saturating_add(1);
        let outputs = (self.rows_max as u64).saturating_mul(slots);
        scores.saturating_mul(2).saturating_add(outputs.saturating_mul(4))
    }
}

/// Logits, tops, outputs and compiled kernels of the indexers of one device.
///
/// Layers use it one after another on one stream (or streams that the engine orders): a layer's outputs are valid until
/// the next layer's step. They start as -1 and 0, so that nothing is found before the first step.
pub struct IndexerScratch {
    device: Device,
    spec: ScratchSpec,
    /// BF16, request-compact.
    logits: Buffer<u16>,
    /// order16 of the largest of every 8 logits.
    tops: Buffer<u16>,
    /// int32 `[rows_max, topk]`.
    pub(crate) rows: Buffer<i32>,
    /// int32 `[rows_max]`.
    pub(crate) counts: Buffer<i32>,
    /// int32 `[rows_max, topk]`.
    pub(crate) ids: Option<Buffer<i32>>,
    pub(crate) kernels: KernelSet,
}

impl std::fmt::Debug for IndexerScratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IndexerScratch({:?} on {:?})", self.spec, self.device)
    }
}

impl IndexerScratch {
    /// Reserves the buffers.
    ///
    /// # Errors
    /// Sizes outside the limits, or a device without the memory.
    pub fn reserve(device: &Device, spec: ScratchSpec) -> Result<Arc<Self>, Error> {
        spec.validate()?;
        let logits = TpScratch::capacity(spec.rows_max, spec.length_max);
        let outputs = || -> Result<Buffer<i32>, gpu::Error> {
            let buffer = device.alloc(spec.rows_max * spec.topk)?;
            let stream = device.stream()?;
            buffer.fill_bytes(&stream, 0xFF)?;
            stream.synchronize()?;
            Ok(buffer)
        };
        Ok(Arc::new(IndexerScratch {
            device: device.clone(),
            spec,
            logits: device.alloc(logits)?,
            tops: device.alloc(logits / KEYS_PER_TOP)?,
            rows: outputs()?,
            counts: device.alloc_zeros(spec.rows_max)?,
            ids: spec.ids.then(outputs).transpose()?,
            kernels: KernelSet::default(),
        }))
    }

    /// The device it lies on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What was reserved.
    pub fn spec(&self) -> &ScratchSpec {
        &self.spec
    }

    /// BF16 logits of the last step, request-compact as
    /// [`tp_scratch`](dsa_core::layout::tp_scratch) lays them out; requests whose rows all fit the top-k have none.
    pub fn logits(&self) -> View<'_, u16> {
        self.logits.as_view()
    }

    /// order16 of the largest of every 8 logits.
    pub fn tops(&self) -> View<'_, u16> {
        self.tops.as_view()
    }

    /// Kernels compiled so far, by all layers together.
    pub fn kernels_compiled(&self) -> usize {
        self.kernels.len()
    }
}

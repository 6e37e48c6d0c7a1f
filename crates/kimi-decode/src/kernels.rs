//! The compiled kernels of one device, shared by its layers.

use std::collections::HashMap;

use dsa_kernels::KernelError;
use dsa_kernels::score::{IndexerScore, ScoreShape};
use dsa_kernels::select::{IndexerSelect, SelectShape};
use gpu::Device;
use parking_lot::Mutex;

/// Kernels by specialisation. Layers differ in their caches only, so a model with 60 layers compiles each kernel once.
#[derive(Default)]
pub(crate) struct KernelSet {
    score: Mutex<HashMap<ScoreShape, IndexerScore>>,
    select: Mutex<HashMap<SelectShape, IndexerSelect>>,
}

impl KernelSet {
    /// The score kernel of `shape`, compiled at its first use.
    pub(crate) fn score(&self, device: &Device, shape: ScoreShape) -> Result<IndexerScore, KernelError> {
        let mut kernels = self.score.lock();
        if let Some(kernel) = kernels.get(&shape) {
            return Ok(kernel.clone());
        }
        let kernel = IndexerScore::new(device, shape)?;
        kernels.insert(shape, kernel.clone());
        Ok(kernel)
    }

    /// The select kernel of `shape`, compiled at its first use.
    pub(crate) fn select(&self, device: &Device, shape: SelectShape) -> Result<IndexerSelect, KernelError> {
        let mut kernels = self.select.lock();
        if let Some(kernel) = kernels.get(&shape) {
            return Ok(kernel.clone());
        }
        let kernel = IndexerSelect::new(device, shape)?;
        kernels.insert(shape, kernel.clone());
        Ok(kernel)
    }

    /// Compiled kernels.
    pub(crate) fn len(&self) -> usize {
        self.score.lock().len() + self.select.lock().len()
    }
}

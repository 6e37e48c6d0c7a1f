//! The compiled kernels of one device, shared by its layers.

use std::collections::HashMap;
use std::hash::Hash;

use dsa_dcp::{DcpError, ExchangeMerge, MergeShape};
use dsa_kernels::KernelError;
use dsa_kernels::local_topk::{IndexerLocalTopk, LocalTopkShape};
use dsa_kernels::score::{IndexerScore, ScoreShape};
use dsa_kernels::select::{IndexerSelect, SelectShape};
use gpu::Device;
use parking_lot::Mutex;

/// Kernels by specialisation. Layers differ in their caches only, so a model with 60 layers compiles each kernel once.
#[derive(Default)]
pub(crate) struct KernelSet {
    score: Mutex<HashMap<ScoreShape, IndexerScore>>,
    select: Mutex<HashMap<SelectShape, IndexerSelect>>,
    local_topk: Mutex<HashMap<LocalTopkShape, IndexerLocalTopk>>,
    merge: Mutex<HashMap<MergeShape, ExchangeMerge>>,
}

/// The kernel of `shape`, built at its first use.
fn cached<S: Eq + Hash, K: Clone, E>(
    kernels: &Mutex<HashMap<S, K>>,
    shape: S,
    build: impl FnOnce(&S) -> Result<K, E>,
) -> Result<K, E> {
    let mut kernels = kernels.lock();
    if let Some(kernel) = kernels.get(&shape) {
        return Ok(kernel.clone());
    }
    let kernel = build(&shape)?;
    kernels.insert(shape, kernel.clone());
    Ok(kernel)
}

impl KernelSet {
    /// The score kernel of `shape`, compiled at its first use.
    pub(crate) fn score(&self, device: &Device, shape: ScoreShape) -> Result<IndexerScore, KernelError> {
        cached(&self.score, shape, |&shape| IndexerScore::new(device, shape))
    }

    /// The select kernel of `shape`, compiled at its first use.
    pub(crate) fn select(&self, device: &Device, shape: SelectShape) -> Result<IndexerSelect, KernelError> {
        cached(&self.select, shape, |&shape| IndexerSelect::new(device, shape))
    }

    /// The local top-k kernel of `shape`, compiled at its first use.
    pub(crate) fn local_topk(&self, device: &Device, shape: LocalTopkShape) -> Result<IndexerLocalTopk, KernelError> {
        cached(&self.local_topk, shape, |&shape| IndexerLocalTopk::new(device, shape))
    }

    /// The merge kernel of `shape`, compiled at its first use. Steps of any number of rows share it.
    pub(crate) fn merge(&self, device: &Device, shape: MergeShape) -> Result<ExchangeMerge, DcpError> {
        cached(&self.merge, shape, |&shape| ExchangeMerge::new(device, shape))
    }

    /// Compiled kernels.
    pub(crate) fn len(&self) -> usize {
        let whole = self.score.lock().len() + self.select.lock().len();
        whole + self.local_topk.lock().len() + self.merge.lock().len()
    }
}

//! Local top-k on a device.

use dsa_core::consts::{KEYS_PER_TOP, LOCAL_CONTEXT_MAX, Q_MAX, REQUESTS_MAX};
use gpu::{Device, Function, LaunchConfig, Stream, View};
use ptx::{DevicePtr, Kernel};

use super::{LocalTopkArgs, LocalTopkShape, build};
use crate::error::KernelError;
use crate::score::check_pitch;
use crate::table::{check_len, check_scratch, word};

const KERNEL: &str = "local_topk";

/// Where a kernel pushes its rows.
#[derive(Clone, Debug)]
pub struct Push<'a> {
    /// `[ranks]`: address of each rank's slots, in memory that this device may write.
    pub peers: View<'a, u64>,
    /// `[slot_rows]`: epoch of each row's last merge.
    pub epochs: View<'a, u32>,
    /// One word, 0 while the exchange works.
    pub status: View<'a, u32>,
    /// This rank.
    pub rank: usize,
    /// Longest local row that the receivers expect, in keys.
    pub length_max: usize,
}

/// The inputs and outputs of one step. `row_ends` gives the live rows.
#[derive(Clone, Debug)]
pub struct LocalTopkStep<'a> {
    /// Pitched BF16 logits, as score wrote them; 16-byte aligned.
    pub logits: View<'a, u16>,
    /// Pitched tops, as score wrote them; 16-byte aligned.
    pub tops: View<'a, u16>,
    /// Elements from one logits row to the next, a multiple of 512.
    pub pitch: usize,
    /// The *local* row ends that score was given.
    pub row_ends: View<'a, i32>,
    /// The longest row that score was given, at most 2^17 keys.
    pub length_max: usize,
    /// u32 `[rows, n + n / 32]`, 16-byte aligned. May have more rows than `row_ends`: they come out empty.
    pub out: View<'a, u32>,
    /// int32 `[rows]`: keys of each row. Its length gives the rows.
    pub counts: View<'a, i32>,
    /// Needed exactly if the kernel pushes.
    pub push: Option<Push<'a>>,
}

/// The local top-k kernel of one shape on one device.
#[derive(Clone)]
pub struct IndexerLocalTopk {
    function: Function<LocalTopkArgs>,
    shape: LocalTopkShape,
}

impl IndexerLocalTopk {
    /// Builds and compiles the kernel.
    ///
    /// # Errors
    /// A device that refuses it.
    pub fn new(device: &Device, shape: LocalTopkShape) -> Result<Self, KernelError> {
        Self::from_kernel(device, shape, &build(&shape, device.target()?)?)
    }

    /// As [`IndexerLocalTopk::new`] with a kernel for `shape` that the caller built or rewrote.
    ///
    /// # Errors
    /// A device that refuses it.
    pub fn from_kernel(
        device: &Device,
        shape: LocalTopkShape,
        kernel: &Kernel<LocalTopkArgs>,
    ) -> Result<Self, KernelError> {
        Ok(IndexerLocalTopk { function: device.load(kernel)?, shape })
    }

    /// What it is specialised for.
    pub fn shape(&self) -> LocalTopkShape {
        self.shape
    }

    /// The compiled kernel.
    pub fn function(&self) -> &Function<LocalTopkArgs> {
        &self.function
    }

    /// Selects a step's rows, and pushes them. Overlaps its predecessor in the stream as far as dependent launches allow.
    ///
    /// # Errors
    /// Sizes that disagree, before anything is launched; a launch that the device refuses.
    pub fn launch(&self, stream: &Stream, step: &LocalTopkStep<'_>) -> Result<(), KernelError> {
        let (live, rows) = (step.row_ends.len(), step.counts.len());
        if rows > Q_MAX * REQUESTS_MAX {
            return Err(dsa_core::ShapeError::TooManyRequests { requests: rows.div_ceil(Q_MAX) }.into());
        }
        let push = step.push.as_ref();
        for (what, device) in [
            ("logits", step.logits.device()),
            ("tops", step.tops.device()),
            ("row ends", step.row_ends.device()),
            ("out", step.out.device()),
            ("counts", step.counts.device()),
            ("exchange", push.map_or(step.out.device(), |push| push.peers.device())),
            ("exchange", push.map_or(step.out.device(), |push| push.epochs.device())),
            ("exchange", push.map_or(step.out.device(), |push| push.status.device())),
        ] {
            self.function.device().expect_same(what, device)?;
        }
        check_len(KERNEL, "counts", rows, live)?;
        check_len(KERNEL, "out", step.out.len(), rows * self.shape.row().words())?;
        check_len(KERNEL, "pitch", check_pitch(step.pitch)?, step.length_max)?;
        check_len(KERNEL, "local indices of 17 bits", LOCAL_CONTEXT_MAX, step.length_max)?;
        let needed = live.saturating_mul(step.pitch);
        check_scratch(KERNEL, "logits", &step.logits, needed)?;
        check_scratch(KERNEL, "tops", &step.tops, needed / KEYS_PER_TOP)?;
        let out = step.out.ptr().address();
        if !out.is_multiple_of(16) {
            return Err(KernelError::Misaligned { kernel: KERNEL, buffer: "out", address: out, align: 16 });
        }
        let mut args = LocalTopkArgs {
            out: step.out.ptr(),
            counts: step.counts.ptr(),
            logits: step.logits.ptr(),
            tops: step.tops.ptr(),
            row_ends: step.row_ends.ptr(),
            pitch: word(KERNEL, "pitch", step.pitch)?,
            length_max: step.length_max as u32,
            rows: live as u32,
            peers: DevicePtr::NULL,
            epochs: DevicePtr::NULL,
            status: DevicePtr::NULL,
            rank: 0,
            slot_rows: 0,
        };
        match (&step.push, self.shape.push_ranks()) {
            (None, None) => {}
            (Some(push), Some(ranks)) => {
                check_len(KERNEL, "peers", push.peers.len(), ranks as usize)?;
                check_len(KERNEL, "peers", ranks as usize, push.rank.saturating_add(1))?;
                check_len(KERNEL, "slot rows", push.epochs.len(), rows)?;
                check_len(KERNEL, "status", push.status.len(), 1)?;
                check_len(KERNEL, "exchange rows in keys", push.length_max, step.length_max)?;
                args.peers = push.peers.ptr();
                args.epochs = push.epochs.ptr();
                args.status = push.status.ptr();
                args.rank = push.rank as u32;
                args.slot_rows = word(KERNEL, "slot rows", push.epochs.len())?;
            }
            (push, ranks) => {
                let found = push.as_ref().map_or(0, |push| push.peers.len());
                let needed = ranks.unwrap_or(0) as usize;
                return Err(KernelError::BufferTooShort { kernel: KERNEL, buffer: "peers", found, needed });
            }
        }
        let grid = word(KERNEL, "rows", rows.saturating_mul(self.shape.cluster() as usize))?;
        Ok(self.function.launch(stream, LaunchConfig::new(grid).overlap(true), &args)?)
    }
}

//! `gather_query`: waits until every rank's heads of the last published call are in this rank's mailbox, and copies the rows
//! out if asked.
//!
//! ```text
//! wait until rows[t][h] is complete for every token t and published head h; out[t][h] = rows[t][h]
//! ```
//!
//! # Layout
//! [`layout`](super::layout). `out` is a box at a fixed address: `[tokens, q_heads, 576]`, of which only published heads are
//! written: with what has arrived, else, once the mailbox has failed, with NaN. Attention that takes a pointer known at
//! capture reads `out`; one that looks at the state reads the box that it names.
//!
//! # Decomposition
//! Tiles of up to 64 tokens, each polled by CTAs of its own, 4 chunks per thread under way at a time.
//!
//! # Synchronisation
//! Waits for its predecessors before it polls: the query kernel has then published, so no CTA spins for one of its own
//! device. Relaxed polls at system scope, then a fence: see [`mailbox`](super).
//!
//! # Bound
//! Latency of a link crossing; the bytes of one box from L2, twice with a copy.

use dsa_core::consts::RANKS_MAX;
use dsa_kernels::KernelError;
use dsa_kernels::table::check_len;
use gpu::{Device, Function, LaunchConfig, Stream, View};
use ptx::*;

use super::device::{Inbox, Team};
use super::{MailboxShape, QueryMailbox};
use crate::error::DcpError;

const KERNEL: &str = "gather query";
/// Threads of a CTA.
const THREADS: u32 = 256;
/// Tokens that CTAs poll together: above as many, a CTA polls those of its own tile only.
pub const TILE_TOKENS: usize = 64;
/// Most CTAs of a tile: about one per multiprocessor.
const PARTS_MAX: usize = 128;
/// Chunks that a CTA should have to itself.
const PART_CHUNKS: usize = 4 * THREADS as usize;

kernel_args! {
    /// Arguments of the gather.
    pub struct GatherArgs / GatherParams {
        /// the query's element `[tokens, q_heads, 576]`, output, unused without a copy
        pub out: DevicePtr<u32>,
        /// this rank's boxes
        pub boxes: DevicePtr<u64>,
        /// u32 `[4]`: the call's state
        pub state: DevicePtr<u32>,
        /// u32 `[4]`: the status block, in and out
        pub status: DevicePtr<u32>,
        /// how long a poll may take, in nanoseconds
        pub timeout_ns: u64,
        /// tokens of the call
        pub tokens: u32,
        /// CTAs of a tile
        pub parts: u32,
    }
}

/// What a gather kernel is specialised for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GatherShape {
    mailbox: MailboxShape,
    copy: bool,
    hold: bool,
}

impl GatherShape {
    /// The gather of a mailbox.
    pub fn new(mailbox: MailboxShape) -> Self {
        GatherShape { mailbox, copy: false, hold: false }
    }

    /// Also copies the rows to an output.
    pub fn with_copy(self, copy: bool) -> Self {
        GatherShape { copy, ..self }
    }

    /// Does not let the next kernel start before this one has ended.
    pub fn with_hold(self, hold: bool) -> Self {
        GatherShape { hold, ..self }
    }

    /// The mailbox.
    pub fn mailbox(&self) -> MailboxShape {
        self.mailbox
    }

    /// Whether rows are copied out.
    pub fn copy(&self) -> bool {
        self.copy
    }

    /// Entry name.
    pub fn name(&self) -> String {
        let (shape, flag) = (&self.mailbox, |set: bool, name: &'static str| if set { name } else { "" });
        format!(
            "gather_query_w{}x{}of{}_{}b{}{}",
            shape.ranks(),
            shape.heads(),
            shape.q_heads(),
            8 * shape.element().bytes(),
            flag(self.copy, "_copy"),
            flag(self.hold, "_hold")
        )
    }

    /// The grid for `tokens` tokens: parts of a tile, tiles.
    pub fn grid(&self, tokens: usize) -> [u32; 3] {
        let chunks = tokens.min(TILE_TOKENS) * self.mailbox.chunks();
        let parts = chunks.div_ceil(PART_CHUNKS).min(PARTS_MAX);
        [parts as u32, tokens.div_ceil(TILE_TOKENS) as u32, 1]
    }
}

/// Builds the kernel of `shape` for `target`.
///
/// # Errors
/// Only if the builder's verifier refuses the result, which is a defect here.
pub fn build(shape: &GatherShape, target: Target) -> Result<Kernel<GatherArgs>, VerifyError> {
    let shape = *shape;
    ptx::build::<GatherArgs>(&shape.name(), target, LaunchBounds::threads(THREADS), |p| {
        let inbox =
            Inbox { shape: shape.mailbox, boxes: p.boxes, state: p.state, status: p.status, timeout_ns: p.timeout_ns };
        let tile = special(Special::CtaidY);
        let team = Team { thread: thread_index(), threads: THREADS, cta: cta_index(), ctas: p.parts };
        let first = tile * TILE_TOKENS as u32;
        let end = (first + TILE_TOKENS as u32).min(p.tokens);
        // ORDER: this rank's publication and its number, before they are looked for; the outputs' last readers.
        wait_for_dependencies();
        if !shape.hold {
            launch_dependents();
        }
        let copy = |chunk: Reg<u32>, words| p.out.at64(chunk.mul_wide(4u32)).store_vec::<4>(words);
        inbox.wait(team, first, end, shape.copy.then_some(&copy));
    })
}

/// One gather.
#[derive(Clone, Debug)]
pub struct GatherStep<'a> {
    /// Tokens of the call, as the query kernel had; equal on every rank.
    pub tokens: usize,
    /// `[tokens, q_heads, 576]` of the query's element, as words, 16-byte aligned; given exactly if the kernel copies.
    pub out: Option<View<'a, u32>>,
}

/// The gather kernel of one shape on one device.
#[derive(Clone)]
pub struct Gather {
    function: Function<GatherArgs>,
    shape: GatherShape,
}

impl Gather {
    /// Builds and compiles the kernel.
    ///
    /// # Errors
    /// A device that refuses it.
    pub fn new(device: &Device, shape: GatherShape) -> Result<Self, DcpError> {
        Self::from_kernel(device, shape, &build(&shape, device.target()?)?)
    }

    /// As [`Gather::new`] with a kernel for `shape` that the caller built or rewrote.
    ///
    /// # Errors
    /// A device that refuses it.
    pub fn from_kernel(device: &Device, shape: GatherShape, kernel: &Kernel<GatherArgs>) -> Result<Self, DcpError> {
        Ok(Gather { function: device.load(kernel)?, shape })
    }

    /// What it is specialised for.
    pub fn shape(&self) -> GatherShape {
        self.shape
    }

    /// The compiled kernel.
    pub fn function(&self) -> &Function<GatherArgs> {
        &self.function
    }

    /// Gathers the call that a query kernel published just before on `stream`. Without tokens nothing is launched. What
    /// does not arrive shows in [`QueryMailbox::check`].
    ///
    /// # Errors
    /// Sizes that disagree, before anything is launched; a launch that the device refuses.
    pub fn launch(&self, stream: &Stream, mailbox: &QueryMailbox, step: &GatherStep<'_>) -> Result<(), DcpError> {
        let shape = self.shape.mailbox;
        if mailbox.shape() != shape {
            let (gather, mailbox) = (shape.to_string(), mailbox.shape().to_string());
            return Err(DcpError::WrongMailbox { kernel: gather, mailbox });
        }
        self.function.device().expect_same("mailbox", mailbox.device())?;
        if let Some(out) = &step.out {
            self.function.device().expect_same("out", out.device())?;
        }
        check_len(KERNEL, "mailbox tokens", shape.tokens(), step.tokens)?;
        let words = step.tokens * shape.token_bytes() / 4;
        let out = match (&step.out, self.shape.copy) {
            (Some(out), true) => {
                check_len(KERNEL, "out", out.len(), words)?;
                if !out.ptr().address().is_multiple_of(16) {
                    return Err(DcpError::Misaligned { buffer: "out", address: out.ptr().address() });
                }
                out.ptr()
            }
            (None, false) => DevicePtr::NULL,
            (None, true) => {
                return Err(
                    KernelError::BufferTooShort { kernel: KERNEL, buffer: "out", found: 0, needed: words }.into()
                );
            }
            (Some(_), false) => return Err(DcpError::UnusedOutput { buffer: "out" }),
        };
        if step.tokens == 0 {
            return Ok(());
        }
        let grid = self.shape.grid(step.tokens);
        let publish = mailbox.publish();
        let args = GatherArgs {
            out,
            boxes: publish.boxes.ptr(),
            state: publish.state.ptr(),
            status: publish.status.ptr(),
            timeout_ns: mailbox.limits().poll_ns(),
            tokens: step.tokens as u32,
            parts: grid[0],
        };
        Ok(self.function.launch(stream, LaunchConfig::grid(grid).overlap(true), &args)?)
    }
}

const _: () = assert!(RANKS_MAX <= 32, "late ranks fit a word");

//! `LocalEnds`: what a rank has of every row, from the rows' global ends.
//!
//! ```text
//! out[row] = keys that this rank owns of the first min(max(ends[row], 0), context_len_max)
//! ```
//!
//! Each row by itself: a shorter row of the same request may be shorter on another rank. One thread per row. Row ends are
//! step metadata, which the kernels of a step read before they wait for their predecessors: put something that is no kernel
//! between this and the first of them, or let this be done before.

use dsa_core::Ownership;
use dsa_core::device::ownership::local_end;
use dsa_kernels::table::{check_len, word};
use gpu::{Device, Function, LaunchConfig, Stream, View};
use ptx::*;

use crate::error::DcpError;

kernel_args! {
    /// Arguments of the local ends.
    pub struct LocalEndsArgs / LocalEndsParams {
        /// int32 `[rows]`: keys that each row sees in all; at or below 0 none
        pub ends: DevicePtr<i32>,
        /// int32 `[rows]`: those of them on this rank; output
        pub out: DevicePtr<i32>,
        /// rows
        pub rows: u32,
        /// this rank
        pub rank: u32,
        /// longest context, in tokens
        pub context_len_max: u32,
    }
}

const KERNEL: &str = "local_ends";
const THREADS: u32 = 128;

/// Builds the kernel for a dealing of tokens.
///
/// # Errors
/// Only if the builder's verifier refuses the result, which is a defect here.
pub fn build(own: Ownership, target: Target) -> Result<Kernel<LocalEndsArgs>, VerifyError> {
    let name = format!("local_ends_w{}_i{}", own.ranks(), own.interleave());
    ptx::build::<LocalEndsArgs>(&name, target, LaunchBounds::threads(THREADS), |p| {
        // ORDER: the ends, whoever wrote them, before they are read.
        wait_for_dependencies();
        let row = cta_index().mad(THREADS, thread_index());
        when(row.lt(p.rows), || {
            let end = p.ends.at(row).load().min(p.context_len_max.as_i32());
            p.out.at(row).store(local_end(own, p.rank, end).as_i32());
        });
    })
}

/// The kernel on one device.
#[derive(Clone)]
pub struct LocalEnds {
    function: Function<LocalEndsArgs>,
    rank: u32,
    context_len_max: u32,
}

impl LocalEnds {
    /// Builds and compiles the kernel of `rank`, for contexts of up to `context_len_max` tokens.
    ///
    /// # Errors
    /// A context that is too long for the ranks; a device that refuses the kernel.
    pub fn new(device: &Device, own: Ownership, rank: usize, context_len_max: usize) -> Result<Self, DcpError> {
        own.local_len_max(context_len_max)?;
        let function = device.load(&build(own, device.target()?)?)?;
        Ok(LocalEnds { function, rank: rank as u32, context_len_max: context_len_max as u32 })
    }

    /// Writes this rank's ends of the rows of `ends` to the front of `out`.
    ///
    /// # Errors
    /// An `out` that is too short, or memory of another device; a launch that the device refuses.
    pub fn launch(&self, stream: &Stream, ends: &View<'_, i32>, out: &View<'_, i32>) -> Result<(), DcpError> {
        self.function.device().expect_same("global ends", ends.device())?;
        self.function.device().expect_same("local ends", out.device())?;
        check_len(KERNEL, "out", out.len(), ends.len())?;
        let rows = word(KERNEL, "rows", ends.len())?;
        let args = LocalEndsArgs {
            ends: ends.ptr(),
            out: out.ptr(),
            rows,
            rank: self.rank,
            context_len_max: self.context_len_max,
        };
        Ok(self.function.launch(stream, LaunchConfig::new(rows.div_ceil(THREADS)), &args)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_bounded_from_its_own_global_end() {
        let ends: Vec<i32> = (-2..300).chain([i32::MIN, i32::MAX, 4095, 4096, 4097]).collect();
        let devices = test_devices::every_device();
        for device in &devices {
            let stream = device.stream().unwrap();
            let input = device.upload(&ends).unwrap();
            for (ranks, interleave) in [(1, 1), (2, 1), (3, 4), (8, 64), (16, 1)] {
                let own = Ownership::new(ranks, interleave).unwrap();
                for rank in 0..ranks {
                    let out = device.upload(&vec![-7; ends.len() + 1]).unwrap();
                    let kernel = LocalEnds::new(device, own, rank, 4096).unwrap();
                    kernel.launch(&stream, &input.as_view(), &out.as_view()).unwrap();
                    let want = ends.iter().map(|&end| own.local_end(rank, end.min(4096))).chain([-7]);
                    assert_eq!(out.copy_to_vec(&stream).unwrap(), want.collect::<Vec<_>>(), "{own:?}, rank {rank}");
                }
            }
            let kernel = LocalEnds::new(device, Ownership::new(2, 1).unwrap(), 1, 9).unwrap();
            kernel.launch(&stream, &input.view(..0).unwrap(), &input.as_view()).unwrap();
            assert!(kernel.launch(&stream, &input.as_view(), &input.view(1..).unwrap()).is_err());
        }
        assert!(LocalEnds::new(&devices[0], Ownership::new(2, 1).unwrap(), 0, (1 << 18) + 1).is_err());
    }
}

//! Devices and kernels that several test files share.
#![allow(dead_code, unused_imports)] // each test binary uses its part

use gpu::Error;
use ptx::*;
pub use test_devices::{cuda, on_every_device, simulated};

kernel_args! {
    /// `y += a * x`
    pub struct AxpyArgs / AxpyParams {
        /// [n] in and out
        pub y: DevicePtr<f32>,
        /// [n] input
        pub x: DevicePtr<f32>,
        /// factor
        pub a: f32,
        /// elements
        pub n: u32,
    }
}

pub const THREADS: u32 = 128;

/// `y += a * x`, able to overlap its predecessor.
pub fn axpy(target: Target) -> Kernel<AxpyArgs> {
    build::<AxpyArgs>("axpy", target, LaunchBounds::threads(THREADS), |p| {
        wait_for_dependencies();
        let i = cta_index().mad(THREADS, thread_index());
        when(i.lt(p.n), || {
            let y = p.y.at(i);
            y.store(p.x.at(i).load().fma(p.a, y.load()));
        });
        launch_dependents();
    })
    .expect("axpy is well formed")
}

kernel_args! {
    /// One output and how many words of it to write.
    pub struct FillArgs / FillParams {
        /// [n] output
        pub out: DevicePtr<u32>,
        /// words
        pub n: u32,
    }
}

/// Writes `value + i` to word `i`, never waiting for its dependencies.
pub fn iota(target: Target, value: u32) -> Kernel<FillArgs> {
    build::<FillArgs>("iota", target, LaunchBounds::threads(THREADS), |p| {
        let i = cta_index().mad(THREADS, thread_index());
        when(i.lt(p.n), || p.out.at(i).store(i + value));
    })
    .expect("iota is well formed")
}

/// Stages words through `bytes` of shared memory: word `i` goes in at the far end and comes out of there.
pub fn through_shared(target: Target, bytes: u32) -> Kernel<FillArgs> {
    build::<FillArgs>("through_shared", target, LaunchBounds::threads(THREADS), |p| {
        let words = SharedArray::<u32>::new("words", bytes / 4);
        let i = thread_index();
        let slot = words.at(Reg::<u32>::from(words.len() - 1) - i);
        slot.store(i * 3);
        sync_threads();
        let mirrored = words.at(Reg::<u32>::from(words.len() - THREADS) + i);
        when(i.lt(p.n), || p.out.at(i).store(mirrored.load()));
    })
    .expect("through_shared is well formed")
}

/// The error of a result that must be one.
pub fn error_of<T: std::fmt::Debug>(result: Result<T, Error>) -> Error {
    match result {
        Err(error) => error,
        Ok(value) => panic!("expected an error, got {value:?}"),
    }
}

//! One body, two executors: runs a test on the simulator always, and on a GPU when there is one.
//!
//! Without a GPU a line `SKIPPED` says so. A GPU that is there but cannot be used fails the test. `DSA_EXECUTOR=gpu` in the
//! environment leaves out the simulator, and fails without a GPU.
#![forbid(unsafe_code)]

use gpu::{Device, SimConfig};
use ptx_sim::Timing;

/// Runs `body` on the simulator, and on CUDA device 0 if there is one.
pub fn on_every_device(body: impl Fn(&Device)) {
    every_device().iter().for_each(body);
}

/// Runs `body` on the simulator with fixed orders and with `seeds` random ones, and on CUDA device 0 if there is one.
pub fn in_every_order(seeds: u64, body: impl Fn(&Device)) {
    if !gpu_only() {
        orders(seeds).into_iter().for_each(|config| body(&Device::simulated(config)));
    }
    on_gpu(body);
}

/// Runs `body` on CUDA device 0 if there is one.
pub fn on_gpu(body: impl Fn(&Device)) {
    if let Some(device) = cuda() {
        body(&device);
    }
}

/// The simulator, and CUDA device 0 if there is one.
pub fn every_device() -> Vec<Device> {
    (!gpu_only()).then(simulated).into_iter().chain(cuda()).collect()
}

/// Whether `DSA_EXECUTOR=gpu` leaves out the simulator where there is a choice; says so if it does.
pub fn gpu_only() -> bool {
    let only = std::env::var("DSA_EXECUTOR").is_ok_and(|only| only == "gpu");
    if only {
        println!("SKIPPED: the simulator (DSA_EXECUTOR=gpu)");
    }
    only
}

/// A fresh simulated device.
pub fn simulated() -> Device {
    Device::simulated(sim_config())
}

/// CUDA device 0, or `None` and a line that says why not.
///
/// # Panics
/// If there is a device that cannot be used or that kernels cannot be built for, or none with `DSA_EXECUTOR=gpu`.
pub fn cuda() -> Option<Device> {
    match Device::cuda(0).and_then(|device| device.target().map(|_| device)) {
        Ok(device) => Some(device),
        Err(error) if error.is_unavailable() => {
            assert!(!gpu_only(), "DSA_EXECUTOR=gpu, but there is no CUDA device: {error}");
            println!("SKIPPED: no CUDA device ({error})");
            None
        }
        Err(error) => panic!("the CUDA device is present but unusable: {error}"),
    }
}

/// The simulator's usual order, or the random one of the environment variable `SIM_SEED`.
///
/// # Panics
/// If `SIM_SEED` is no number.
pub fn sim_config() -> SimConfig {
    match std::env::var("SIM_SEED") {
        Ok(seed) => SimConfig::seeded(seed.parse().expect("SIM_SEED is a number")),
        Err(_) => SimConfig::default(),
    }
}

/// Fixed orders with asynchronous operations late and early, and `seeds` random ones.
pub fn orders(seeds: u64) -> Vec<SimConfig> {
    let early = SimConfig { timing: Timing::Early, ..SimConfig::default() };
    [sim_config(), early].into_iter().chain((1..=seeds).map(SimConfig::seeded)).collect()
}

/// `simulated` on the simulator, `gpu` on a GPU: the same claim at the size that the device affords.
pub fn sized<T>(device: &Device, simulated: T, gpu: T) -> T {
    if device.info().simulated { simulated } else { gpu }
}

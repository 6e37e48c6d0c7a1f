//! The devices of a context that is spread over ranks.

use dsa_core::consts::RANKS_MAX;
use gpu::{Device, SimConfig};

use super::Failure;
use super::device::{self, DeviceArg, DevicesArg};

/// A device for each of `ranks` ranks, and one line that says which and why: as many simulated ones, or the GPUs asked for
/// or found, dealt to the ranks in turn; ranks on one GPU have streams and memory of their own.
pub fn open(devices: Option<&DevicesArg>, seed: Option<u64>, ranks: usize) -> Result<(Vec<Device>, String), Failure> {
    if !(1..=RANKS_MAX).contains(&ranks) {
        return Err(Failure::Unusable(format!("--dcp: found {ranks}, needed 1..={RANKS_MAX} ranks")));
    }
    let (first, asked) = match devices {
        None => (None, Vec::new()),
        Some(DevicesArg::Sim) => (Some(DeviceArg::Sim), Vec::new()),
        Some(DevicesArg::Cuda(ordinals)) => (ordinals.first().map(|&first| DeviceArg::Cuda(first)), ordinals.clone()),
    };
    let (first, why) = device::open(first, seed)?;
    if first.info().simulated {
        let config = seed.map_or_else(SimConfig::default, SimConfig::seeded);
        let group = Device::simulated_group(SimConfig { devices: ranks, ..config });
        return Ok((group, format!("{why}; a device per rank")));
    }
    let mut gpus = vec![first.clone()];
    if devices.is_none() {
        // Every other GPU that kernels can be built for, but no more than ranks.
        let others = (0..Device::cuda_count().unwrap_or(1)).filter_map(|ordinal| Device::cuda(ordinal).ok());
        gpus.extend(others.filter(|gpu| !gpu.same(&first) && gpu.target().is_ok()).take(ranks - 1));
    }
    for &ordinal in asked.iter().skip(1) {
        gpus.push(Device::cuda(ordinal).map_err(|error| Failure::Unusable(format!("cuda:{ordinal}: {error}")))?);
    }
    let why = match gpus.len() {
        1 => format!("{why}; all ranks on it"),
        n => format!("{why}, and {} more, dealt to the ranks in turn", n - 1),
    };
    Ok((gpus.iter().cycle().take(ranks).cloned().collect(), why))
}

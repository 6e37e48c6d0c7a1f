//! The devices of a context that is spread over ranks.

use dsa_core::consts::RANKS_MAX;
use gpu::{Device, SimConfig};

use super::Failure;
use super::device::{self, DeviceArg};

/// A device for each of `ranks` ranks, and one line that says which and why: as many simulated ones, or one GPU for all of
/// them, each rank with a stream and memory of its own.
pub fn open(device: Option<DeviceArg>, seed: Option<u64>, ranks: usize) -> Result<(Vec<Device>, String), Failure> {
    if !(1..=RANKS_MAX).contains(&ranks) {
        return Err(Failure::Unusable(format!("--dcp: found {ranks}, needed 1..={RANKS_MAX} ranks")));
    }
    let (first, why) = device::open(device, seed)?;
    if !first.info().simulated {
        return Ok((vec![first; ranks], format!("{why}; all ranks on it")));
    }
    let config = seed.map_or_else(SimConfig::default, SimConfig::seeded);
    Ok((Device::simulated_group(SimConfig { devices: ranks, ..config }), format!("{why}; a device per rank")))
}

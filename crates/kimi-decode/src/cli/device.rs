//! The `--device` argument.

use std::str::FromStr;

use gpu::{Device, SimConfig};

use super::Failure;

/// Where to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceArg {
    /// The simulator.
    Sim,
    /// A CUDA device by number.
    Cuda(usize),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("cuda:").map(str::parse)) {
            ("sim", _) => Ok(DeviceArg::Sim),
            (_, Some(Ok(ordinal))) => Ok(DeviceArg::Cuda(ordinal)),
            _ => Err("needed sim or cuda:N".into()),
        }
    }
}

/// Where several ranks run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DevicesArg {
    /// The simulator.
    Sim,
    /// CUDA devices by number, in turn.
    Cuda(Vec<usize>),
}

impl FromStr for DevicesArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinals = text.strip_prefix("cuda:").map(|list| list.split(',').map(str::parse).collect());
        match (text, ordinals) {
            ("sim", _) => Ok(DevicesArg::Sim),
            (_, Some(Ok(ordinals))) => Ok(DevicesArg::Cuda(ordinals)),
            _ => Err("needed sim or cuda:N, with --dcp also cuda:N,M,...".into()),
        }
    }
}

impl DevicesArg {
    /// The only device.
    ///
    /// # Errors
    /// Several.
    pub fn single(&self) -> Result<DeviceArg, Failure> {
        match self {
            DevicesArg::Sim => Ok(DeviceArg::Sim),
            DevicesArg::Cuda(ordinals) => match ordinals[..] {
                [ordinal] => Ok(DeviceArg::Cuda(ordinal)),
                _ => Err(Failure::Unusable(format!(
                    "--device names {} devices: without --dcp one is needed",
                    ordinals.len()
                ))),
            },
        }
    }
}

/// The device asked for, else a usable GPU, else the simulator; and one line that says which and why. A seed means the
/// simulator.
pub fn open(device: Option<DeviceArg>, seed: Option<u64>) -> Result<(Device, String), Failure> {
    match (device, seed) {
        (None | Some(DeviceArg::Sim), Some(seed)) => {
            let why = format!("simulator, as --seed asks: random schedule and completion times of seed {seed}");
            Ok((Device::simulated(SimConfig::seeded(seed)), why))
        }
        (Some(DeviceArg::Sim), None) => {
            Ok((Device::simulated(SimConfig::default()), "simulator, as --device asks".into()))
        }
        (Some(DeviceArg::Cuda(ordinal)), None) => {
            let device =
                Device::cuda(ordinal).map_err(|error| Failure::Unusable(format!("cuda:{ordinal}: {error}")))?;
            let why = format!("{}, as --device asks", device.info().name);
            Ok((device, why))
        }
        (Some(DeviceArg::Cuda(ordinal)), Some(_)) => Err(Failure::Unusable(format!(
            "--seed chooses a schedule of the simulator: it cannot be used with --device cuda:{ordinal}"
        ))),
        (None, None) => Ok(Device::best()),
    }
}

//! Simulated devices, their memory, and the machine they share.

use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use ptx::Target;
use ptx_sim::{Command, Config, DeviceId, Fault, LaunchError, Machine, MemoryError, SimError, StreamId};

use crate::device::DeviceInfo;
use crate::error::Error;

/// One device of a simulated machine.
pub(crate) struct Device {
    machine: Arc<SharedMachine>,
    id: DeviceId,
    info: DeviceInfo,
}

/// The machine of a group of devices.
pub(super) struct SharedMachine {
    state: Mutex<State>,
    /// The first fault: the machine is lost for good, as a CUDA context would be.
    fault: OnceLock<Error>,
}

/// The machine and what waits in it.
pub(super) struct State {
    pub(super) machine: Machine,
    /// Number of completed runs; work stamped with it is still waiting.
    pub(super) runs: u64,
    /// The run that will execute each device's last enqueued command; [`NEVER`] before the first.
    enqueued_before: Vec<u64>,
}

/// An L2 the size of an H200's, for code that sizes its working set by it.
const L2_BYTES: u64 = 60 << 20;
/// No run.
pub(super) const NEVER: u64 = u64::MAX;
/// Zeroes are written in pieces of this many bytes.
const ZERO_CHUNK: usize = 1 << 20;

impl Device {
    /// Every device of a new machine, as devices of architecture `target`.
    pub(crate) fn group(config: Config, target: Target) -> Vec<Arc<Device>> {
        let state = State { machine: Machine::new(config), runs: 0, enqueued_before: vec![NEVER; config.devices] };
        let machine = Arc::new(SharedMachine { state: Mutex::new(state), fault: OnceLock::new() });
        (0..config.devices as u32)
            .map(|id| {
                let info = DeviceInfo {
                    name: format!("sim:{id}"),
                    compute_capability: target.compute_capability(),
                    target: Some(target),
                    sms: config.sms,
                    l2_bytes: L2_BYTES,
                    shared_bytes_max: target.shared_bytes_max(),
                    memory_bytes: config.memory_bytes,
                    driver_version: None,
                    simulated: true,
                };
                Arc::new(Device { machine: machine.clone(), id: DeviceId(id), info })
            })
            .collect()
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub(super) fn id(&self) -> DeviceId {
        self.id
    }

    pub(super) fn machine(&self) -> &Arc<SharedMachine> {
        &self.machine
    }

    /// Whether both are the same device of the same machine.
    pub(crate) fn same(&self, other: &Device) -> bool {
        self.id == other.id && self.shares_machine(other)
    }

    /// Whether both see each other's memory.
    pub(crate) fn shares_machine(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.machine, &other.machine)
    }

    /// Allocates `bytes` > 0, poisoned.
    pub(crate) fn alloc(&self, bytes: u64) -> Result<u64, Error> {
        self.machine.lock()?.machine.alloc(self.id, bytes).map_err(memory_error)
    }

    /// Frees an allocation after what is enqueued on its device, as the driver does.
    pub(crate) fn free(&self, address: u64) {
        // A fault is recorded and will be reported by the next call; a drop has nobody to tell.
        let Ok(mut state) = self.machine.lock() else { return };
        let pending = state.enqueued_before[self.id.0 as usize] == state.runs;
        if !pending || self.machine.run(&mut state).is_ok() {
            let _ = state.machine.free(address);
        }
    }

    /// A multicast address of the machine, or why not.
    pub(crate) fn multicast(&self, members: &[u64], bytes: u64) -> Result<u64, String> {
        let mut state = self.machine.lock().map_err(|error| error.to_string())?;
        state.machine.multicast(members, bytes).map_err(|error| error.to_string())
    }

    /// Writes to an allocation that nothing enqueued uses yet.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        self.machine.lock()?.machine.write(address, bytes).map_err(memory_error)
    }

    /// Zeroes an allocation that nothing enqueued uses yet.
    pub(crate) fn zero(&self, address: u64, len: u64) -> Result<(), Error> {
        let zeros = vec![0u8; ZERO_CHUNK.min(len as usize)];
        let mut state = self.machine.lock()?;
        for at in (0..len).step_by(ZERO_CHUNK) {
            let n = (len - at).min(ZERO_CHUNK as u64) as usize;
            state.machine.write(address + at, &zeros[..n]).map_err(memory_error)?;
        }
        Ok(())
    }
}

impl SharedMachine {
    /// The machine, unless it is lost.
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, State>, Error> {
        let state = self.state.lock();
        match self.fault.get() {
            Some(fault) => Err(fault.clone()),
            None => Ok(state),
        }
    }

    /// Enqueues `command` on `stream` of `device`. When the machine can hold no more, what waits runs first, as a full driver queue would.
    pub(super) fn enqueue(
        &self,
        state: &mut State,
        (device, stream): (DeviceId, StreamId),
        command: Command,
    ) -> Result<(), Error> {
        let kernel = match &command {
            Command::Launch(launch) => Some(launch.kernel.clone()),
            _ => None,
        };
        let kernel = || kernel.as_ref().map_or(String::new(), |ir| ir.name.clone());
        match state.machine.enqueue(stream, command.clone()) {
            Err(LaunchError::TooMany) => {
                self.run(state)?;
                state.machine.enqueue(stream, command).map_err(|error| launch_error(error, kernel()))?;
            }
            enqueued => enqueued.map_err(|error| launch_error(error, kernel()))?,
        }
        state.enqueued_before[device.0 as usize] = state.runs;
        Ok(())
    }

    /// Runs everything that waits.
    pub(super) fn run(&self, state: &mut State) -> Result<(), Error> {
        state.runs += 1;
        state.machine.run().map_err(|fault| self.fault.get_or_init(|| Error::Sim(Box::new(fault))).clone())
    }
}

pub(super) fn memory_error(error: MemoryError) -> Error {
    match error {
        MemoryError::OutOfMemory { requested, free, .. } => Error::OutOfMemory { requested, free: Some(free) },
        other => Error::Sim(Box::new(Fault::Sim(SimError::Command(other)))),
    }
}

fn launch_error(error: LaunchError, kernel: String) -> Error {
    let reason = error.to_string();
    match error {
        LaunchError::Shared { shared_bytes, allowed, .. } if shared_bytes > allowed => {
            Error::SharedTooLarge { kernel, requested: shared_bytes, limit: allowed }
        }
        LaunchError::Grid { .. }
        | LaunchError::Cluster { .. }
        | LaunchError::Shared { .. }
        | LaunchError::Params { .. }
        | LaunchError::Overlap { .. }
        | LaunchError::TooMany => Error::LaunchRefused { kernel, reason },
        LaunchError::Memory(error) => memory_error(error),
        LaunchError::NoStream(_) | LaunchError::NoEvent(_) => unreachable!("handles come from this machine: {reason}"),
    }
}

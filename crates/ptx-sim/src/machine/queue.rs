//! What the host asks for: commands, in stream order until they may start.

use std::collections::VecDeque;
use std::sync::Arc;

use ptx::KernelIr;

use super::Machine;
use crate::config::DeviceId;
use crate::grid::Grid;
use crate::program::Program;
use crate::race::{AgentSet, LaunchAgents};
use crate::stream::{EventId, LaunchId, StreamId};
use crate::trap::{Fault, LaunchError, SimError};
use crate::world::{BlockRef, LaunchInfo};

/// A kernel launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// What runs.
    pub kernel: Arc<KernelIr>,
    /// CTAs per dimension.
    pub grid: [u32; 3],
    /// Dynamic shared memory per CTA in bytes; at least the kernel's layout.
    pub shared_bytes: u32,
    /// The parameter block, as [`ptx::ArgBuffer::bytes`] gives it.
    pub params: Vec<u8>,
    /// Programmatic stream serialization: it may start before its predecessor in the stream has completed.
    pub overlap: bool,
}

/// Something to do in stream order.
#[derive(Clone, Debug)]
pub enum Command {
    /// Run a kernel.
    Launch(Launch),
    /// Write bytes to device memory.
    Write {
        /// First byte.
        address: u64,
        /// What to write.
        bytes: Vec<u8>,
    },
    /// Fill device memory.
    Fill {
        /// First byte.
        address: u64,
        /// Number of bytes.
        len: u64,
        /// Their value.
        byte: u8,
    },
    /// Copy device memory, between devices too.
    Copy {
        /// First byte written.
        dst: u64,
        /// First byte read.
        src: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Record an event.
    Record(EventId),
    /// Let later commands wait for the last record of an event.
    Wait(EventId),
}

/// A command that waits for its turn.
pub(super) enum Queued {
    Launch(Launch, Arc<Program>),
    Write(u64, Vec<u8>),
    Fill(u64, u64, u8),
    Copy(u64, u64, u64),
}

pub(super) struct Queue {
    pub(super) device: DeviceId,
    pub(super) commands: VecDeque<(LaunchId, Queued)>,
}

/// What a launch was, for messages about accesses of launches past and present.
#[derive(Clone)]
pub(super) struct Past {
    pub(super) program: Arc<Program>,
    pub(super) device: DeviceId,
    pub(super) grid: [u32; 3],
}
impl Machine {
    /// Queues a command, which [`run`](Self::run) executes.
    ///
    /// # Errors
    /// When it can be seen now that the command is invalid.
    pub fn enqueue(&mut self, stream: StreamId, command: Command) -> Result<(), LaunchError> {
        let device = self.queues.get(stream.0 as usize).ok_or(LaunchError::NoStream(stream.0))?.device;
        let memory = &self.world.memory;
        let queued = match command {
            Command::Record(event) | Command::Wait(event) if event.0 >= self.events => {
                return Err(LaunchError::NoEvent(event.0));
            }
            Command::Record(event) => {
                self.world.streams.record(stream, event);
                return Ok(());
            }
            Command::Wait(event) => {
                self.world.streams.wait(stream, event);
                return Ok(());
            }
            Command::Launch(launch) => {
                validate(&launch)?;
                let program = self.program(&launch.kernel);
                Queued::Launch(launch, program)
            }
            Command::Write { address, bytes } => {
                memory.check_host(address, bytes.len() as u64)?;
                Queued::Write(address, bytes)
            }
            Command::Fill { address, len, byte } => {
                memory.check_host(address, len)?;
                Queued::Fill(address, len, byte)
            }
            Command::Copy { dst, src, len } => {
                memory.check_host(dst, len)?;
                memory.check_host(src, len)?;
                Queued::Copy(dst, src, len)
            }
        };
        let device_bits = device.0 as u8 & 15;
        let (id, past) = match &queued {
            Queued::Launch(launch, program) => {
                let [x, y, z] = launch.grid;
                let warps = launch.kernel.bounds.threads / 32;
                let id = u64::from(x)
                    .checked_mul(u64::from(y) * u64::from(z))
                    .and_then(|ctas| u32::try_from(ctas).ok())
                    .and_then(|ctas| self.world.streams.launch(stream, ctas, warps, device_bits, launch.overlap));
                (id, Some(Past { program: program.clone(), device, grid: launch.grid }))
            }
            Queued::Write(..) | Queued::Fill(..) | Queued::Copy(..) => {
                (self.world.streams.host_command(stream, device_bits), None)
            }
        };
        let id = id.ok_or(LaunchError::TooMany)?;
        debug_assert_eq!(id.0 as usize, self.past.len());
        self.past.push(past);
        self.queues[stream.0 as usize].commands.push_back((id, queued));
        self.world.streams_changed = true;
        Ok(())
    }

    fn program(&mut self, kernel: &Arc<KernelIr>) -> Arc<Program> {
        self.programs.entry(Arc::as_ptr(kernel).addr()).or_insert_with(|| Arc::new(Program::new(kernel))).clone()
    }
    /// Starts what may start, and lets dependency waits pass.
    pub(super) fn advance_streams(&mut self) -> Result<(), Fault> {
        loop {
            let mut started = false;
            for q in 0..self.queues.len() {
                let Some(&(id, _)) = self.queues[q].commands.front() else { continue };
                if !self.world.streams.may_start(id) {
                    continue;
                }
                if let Some((id, command)) = self.queues[q].commands.pop_front() {
                    self.start(id, self.queues[q].device, command)?;
                    started = true;
                }
            }
            if !started {
                break;
            }
        }
        for g in 0..self.grids.len() {
            let Some(grid) = &mut self.grids[g] else { continue };
            if !grid.info.dependencies_done && self.world.streams.wait_passes(grid.info.id) {
                grid.info.dependencies_done = true;
                grid.info.wait_view = self.world.streams.wait_view(grid.info.id);
                grid.info.wait_learned = self.world.learned_by(&grid.info.wait_view);
                for b in 0..grid.blocks.len() {
                    self.wake_block(BlockRef { grid: g as u32, block: b as u32 });
                }
            }
        }
        Ok(())
    }

    fn start(&mut self, id: LaunchId, device: DeviceId, command: Queued) -> Result<(), Fault> {
        let result = match command {
            Queued::Launch(launch, program) => {
                let streams = &self.world.streams;
                let dependencies_done = streams.wait_passes(id);
                let cluster = program.ir.bounds.cluster.unwrap_or(1);
                let start_view = streams.start_view(id);
                let wait_view = if dependencies_done { streams.wait_view(id) } else { AgentSet::new() };
                let info = LaunchInfo {
                    id,
                    program,
                    grid: launch.grid,
                    shared_bytes: launch.shared_bytes,
                    params: launch.params,
                    device,
                    agents: LaunchAgents { cluster, ..streams.agents(id) },
                    start_learned: self.world.learned_by(&start_view),
                    start_view,
                    dependencies_done,
                    wait_learned: self.world.learned_by(&wait_view),
                    wait_view,
                };
                let grid = Grid::new(info, self.config.sms);
                let slot = self.grids.iter().position(Option::is_none).unwrap_or_else(|| {
                    self.grids.push(None);
                    self.grids.len() - 1
                });
                self.grids[slot] = Some(grid);
                self.fill(slot as u32);
                return Ok(());
            }
            Queued::Write(address, bytes) => self.world.memory.host_write(address, &bytes),
            Queued::Fill(address, len, byte) => self.world.memory.host_fill(address, len, byte),
            Queued::Copy(dst, src, len) => self.world.memory.host_copy(dst, src, len),
        };
        result.map_err(SimError::from)?;
        let view = self.world.streams.start_view(id);
        self.world.streams.end_cta(id, 0, &view);
        Ok(())
    }
}

/// Checks a launch against its kernel.
fn validate(launch: &Launch) -> Result<(), LaunchError> {
    let ir = &launch.kernel;
    let kernel = || ir.name.clone();
    let [x, y, z] = launch.grid;
    if x == 0 || x > i32::MAX as u32 || !(1..=65_535).contains(&y) || !(1..=65_535).contains(&z) {
        return Err(LaunchError::Grid { kernel: kernel(), grid: launch.grid });
    }
    if let Some(cluster) = ir.bounds.cluster
        && !x.is_multiple_of(cluster)
    {
        return Err(LaunchError::Cluster { kernel: kernel(), ctas: x, cluster });
    }
    let (needed, allowed) = (ir.shared_bytes, ir.target.shared_bytes_max());
    if launch.shared_bytes < needed || launch.shared_bytes > allowed {
        return Err(LaunchError::Shared { kernel: kernel(), shared_bytes: launch.shared_bytes, needed, allowed });
    }
    if launch.params.len() != ir.param_bytes() as usize {
        return Err(LaunchError::Params { kernel: kernel(), got: launch.params.len(), needed: ir.param_bytes() });
    }
    if launch.overlap && !ir.waits_for_dependencies() {
        return Err(LaunchError::Overlap { kernel: kernel() });
    }
    Ok(())
}

//! One launch under way: the CTAs that are resident, and how many there may be.

use std::ops::Range;

use ptx::KernelIr;

use crate::block::{Block, Cta};
use crate::cluster::Cluster;
use crate::registers::Registers;
use crate::warp::Warp;
use crate::world::LaunchInfo;

/// Per multiprocessor of every supported target.
const THREADS_MAX: u32 = 2048;
const CTAS_MAX: u32 = 32;
const REGISTERS: u32 = 65_536;
const SHARED_BYTES: u32 = 233_472;
/// Shared memory that the system takes from every CTA.
const SHARED_RESERVED: u32 = 1024;

/// A launch under way.
pub(crate) struct Grid {
    pub(crate) info: LaunchInfo,
    /// By residency slot.
    pub(crate) blocks: Vec<Option<Block>>,
    /// CTAs per cluster, 1 without clusters.
    pub(crate) cluster_size: u32,
    /// By slot of their first CTA over the size.
    pub(crate) clusters: Vec<Cluster>,
    /// CTAs started.
    started: u32,
    /// CTAs ended.
    pub(crate) ended: u32,
    total: u32,
    sms: u32,
    /// Register files of ended warps.
    spare: Vec<Registers>,
    /// Turns that ended at each instruction, to find hot loops.
    pub(crate) hits: Vec<u32>,
}

impl Grid {
    pub(crate) fn new(info: LaunchInfo, sms: u32) -> Grid {
        let [x, y, z] = info.grid;
        let cluster_size = info.agents.cluster;
        // At least one cluster runs, on however few multiprocessors.
        let clusters = (sms * occupancy(&info.program.ir, info.shared_bytes) / cluster_size).max(1);
        let resident = (clusters * cluster_size).min(x * y * z);
        let hits = vec![0; info.program.ops.len()];
        Grid {
            info,
            blocks: (0..resident).map(|_| None).collect(),
            cluster_size,
            clusters: (0..resident / cluster_size).map(|_| Cluster::default()).collect(),
            started: 0,
            ended: 0,
            total: x * y * z,
            sms,
            spare: Vec::new(),
            hits,
        }
    }

    /// Whether all CTAs have ended.
    pub(crate) fn is_complete(&self) -> bool {
        self.ended == self.total
    }

    /// Starts the next cluster (or CTA) in empty slots; its slots, `None` if there is none or no room left.
    pub(crate) fn start_next(&mut self) -> Option<Range<u32>> {
        if self.started == self.total {
            return None;
        }
        let size = self.cluster_size as usize;
        let first = self.blocks.chunks(size).position(|slots| slots.iter().all(Option::is_none))? * size;
        for slot in first..first + size {
            self.start(slot);
        }
        let warps = self.info.program.ir.bounds.threads / 32;
        self.clusters[first / size] = Cluster::new(self.cluster_size * warps);
        Some(first as u32..(first + size) as u32)
    }

    fn start(&mut self, slot: usize) {
        let linear = self.started;
        self.started += 1;
        let [x, y, _] = self.info.grid;
        let index = [linear % x, linear / x % y, linear / x / y];
        let agents = self.info.agents.cta(linear);
        let program = &self.info.program;
        let warps = program.ir.bounds.threads / 32;
        let allotted = launch_registers(&program.ir);
        let mut registers = || {
            self.spare.pop().map_or_else(
                || Registers::new(program.slots),
                |mut r| {
                    r.reset();
                    r
                },
            )
        };
        self.blocks[slot] = Some(Block {
            cta: Cta::new(index, linear, slot as u32 % self.sms, self.info.shared_bytes, agents),
            warps: (0..warps).map(|w| Warp::new(w, registers(), allotted)).collect(),
            clocks: (0..warps).map(|w| self.info.start_clock(agents, w)).collect(),
        });
    }

    /// Removes an ended CTA.
    pub(crate) fn end(&mut self, slot: u32) {
        if let Some(block) = self.blocks[slot as usize].take() {
            self.spare.extend(block.warps.into_iter().map(|w| w.registers));
            self.ended += 1;
        }
    }
}

/// Registers of each thread of a kernel when it starts: as many as its bounds allow.
fn launch_registers(ir: &KernelIr) -> u32 {
    let allowed = (REGISTERS / (ir.bounds.threads * ir.bounds.min_ctas)).min(255);
    ir.bounds.max_registers.unwrap_or(allowed).min(allowed).max(1).next_multiple_of(8)
}

/// CTAs of a kernel that surely fit one multiprocessor together: registers count as many as the bounds allow.
fn occupancy(ir: &KernelIr, shared_bytes: u32) -> u32 {
    let threads = ir.bounds.threads;
    let by_registers = (REGISTERS / (threads * launch_registers(ir))).max(ir.bounds.min_ctas);
    let by_shared = SHARED_BYTES / (shared_bytes + SHARED_RESERVED);
    (THREADS_MAX / threads).min(CTAS_MAX).min(by_registers).min(by_shared).max(1)
}

//! One launch under way: the CTAs that are resident, and how many there may be.

use ptx::KernelIr;

use crate::block::{Block, Cta};
use crate::race::Clock;
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
        let resident = (sms * occupancy(&info.program.ir, info.shared_bytes)).min(x * y * z);
        let hits = vec![0; info.program.ops.len()];
        Grid {
            info,
            blocks: (0..resident).map(|_| None).collect(),
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

    /// Starts the next CTA in an empty slot; the slot, `None` if there is no CTA or no slot left.
    pub(crate) fn start_next(&mut self) -> Option<u32> {
        if self.started == self.total {
            return None;
        }
        let slot = self.blocks.iter().position(Option::is_none)?;
        let linear = self.started;
        self.started += 1;
        let [x, y, _] = self.info.grid;
        let index = [linear % x, linear / x % y, linear / x / y];
        let agents = self.info.agents.cta(linear);
        let program = &self.info.program;
        let warps = program.ir.bounds.threads / 32;
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
            warps: (0..warps).map(|w| Warp::new(w, registers())).collect(),
            clocks: (0..warps).map(|w| Clock::new(agents, w, self.info.start_view.clone())).collect(),
        });
        Some(slot as u32)
    }

    /// Removes an ended CTA.
    pub(crate) fn end(&mut self, slot: u32) {
        if let Some(block) = self.blocks[slot as usize].take() {
            self.spare.extend(block.warps.into_iter().map(|w| w.registers));
            self.ended += 1;
        }
    }
}

/// CTAs of a kernel that surely fit one multiprocessor together: registers count as many as the bounds allow.
fn occupancy(ir: &KernelIr, shared_bytes: u32) -> u32 {
    let threads = ir.bounds.threads;
    let allowed = (REGISTERS / (threads * ir.bounds.min_ctas)).min(255);
    let registers = ir.bounds.max_registers.unwrap_or(allowed).min(allowed).max(1).next_multiple_of(8);
    let by_registers = (REGISTERS / (threads * registers)).max(ir.bounds.min_ctas);
    let by_shared = SHARED_BYTES / (shared_bytes + SHARED_RESERVED);
    (THREADS_MAX / threads).min(CTAS_MAX).min(by_registers).min(by_shared).max(1)
}

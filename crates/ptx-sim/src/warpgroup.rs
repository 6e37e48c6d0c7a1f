//! Warpgroup MMAs under way: four warps issue each one, it executes once all have, and each warp gets its part of the
//! result at its own wait.

use std::collections::VecDeque;
use std::ops::Range;

use ptx::op::{MmaInput, RegId};

use crate::block::Issuer;
use crate::race::AgentId;
use crate::wgmma::{K_BYTES, M, OperandRow, SharedOperand, Tile};

/// All four warps.
pub(crate) const ALL_WARPS: u8 = 0b1111;

/// The A operand of an MMA.
#[derive(Clone, Debug)]
pub(crate) enum MatrixA {
    Shared(SharedOperand),
    /// Rows, filled as the warps issue.
    Registers(Box<[OperandRow; M]>),
}

/// One MMA.
#[derive(Debug)]
pub(crate) struct Mma {
    pub(crate) issuer: Issuer,
    pub(crate) input: MmaInput,
    pub(crate) a: MatrixA,
    pub(crate) b: SharedOperand,
    /// The descriptors, to compare.
    pub(crate) descriptors: [u64; 2],
    pub(crate) accumulate: bool,
    /// Warps that have issued it.
    pub(crate) issued: u8,
    /// Number of its tile.
    pub(crate) tile: u64,
}

/// Accumulators under way.
#[derive(Debug)]
pub(crate) struct PendingTile {
    pub(crate) id: u64,
    pub(crate) registers: Box<[RegId]>,
    pub(crate) tile: Tile,
    /// Warps whose registers were taken, and warps that have the result.
    pub(crate) loaded: u8,
    pub(crate) stored: u8,
    /// Number of the last MMA of each warp that uses it.
    pub(crate) last: [u64; 4],
}

/// The MMAs of a warpgroup. MMAs and commits are numbered from 0 on; all warps issue the same sequence.
#[derive(Debug, Default)]
pub(crate) struct Warpgroup {
    pub(crate) queue: Option<AgentId>,
    /// MMAs that have not executed, of which the first is number `done`.
    pub(crate) mmas: VecDeque<Mma>,
    /// MMAs executed.
    pub(crate) done: u64,
    /// For every commit: MMAs issued before it.
    pub(crate) commits: Vec<u64>,
    pub(crate) tiles: Vec<PendingTile>,
    pub(crate) tiles_made: u64,
    /// By warp.
    pub(crate) issued: [u64; 4],
    pub(crate) committed: [usize; 4],
    pub(crate) fenced: [bool; 4],
}

impl Warpgroup {
    /// Shared byte ranges (offsets) that MMAs under way read.
    pub(crate) fn operands(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.mmas.iter().flat_map(Mma::operands)
    }

    /// Whether anything is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.mmas.is_empty() && self.tiles.is_empty()
    }
}

impl Mma {
    /// Shared byte ranges (offsets) that it reads.
    pub(crate) fn operands(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let a = match &self.a {
            MatrixA::Shared(a) => Some(*a),
            MatrixA::Registers(_) => None,
        };
        let b = self.b;
        a.into_iter().chain([b]).flat_map(|operand| operand.blocks()).map(|address| {
            let at = (address - crate::shared::BASE) as usize;
            at..at + K_BYTES
        })
    }
}

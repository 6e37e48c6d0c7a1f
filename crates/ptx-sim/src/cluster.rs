//! Clusters: what the CTAs of one share, and how one reaches the others.

use crate::block::{Block, Cta};
use crate::race::{ALL_LANES, Access, Race, Snapshot};

/// The barrier of a cluster under way.
#[derive(Debug, Default)]
pub(crate) struct Cluster {
    /// Completed rounds.
    pub(crate) generation: u32,
    /// Warps that have arrived in the round in progress.
    pub(crate) arrived: u32,
    /// Warps with lanes that have not ended.
    pub(crate) live_warps: u32,
    /// What the arrivals of the round publish.
    pub(crate) arriving: Snapshot,
    /// What the last completed round published.
    pub(crate) completed: Snapshot,
}

impl Cluster {
    /// Of `warps` warps in all its CTAs.
    pub(crate) fn new(warps: u32) -> Cluster {
        Cluster { live_warps: warps, ..Cluster::default() }
    }

    /// Ends the round if every warp that has not ended has arrived.
    pub(crate) fn advance(&mut self) -> bool {
        if self.arrived == 0 || self.arrived < self.live_warps {
            return false;
        }
        self.generation += 1;
        self.arrived = 0;
        self.completed = std::mem::take(&mut self.arriving);
        true
    }

    /// A warp has ended, which counts as its arrival; `arrival` is the generation at which it had arrived without
    /// waiting. Whether that ended the round.
    pub(crate) fn end_warp(&mut self, arrival: Option<u32>) -> bool {
        self.live_warps -= 1;
        if arrival == Some(self.generation) {
            self.arrived -= 1;
        }
        self.advance()
    }
}

/// The other CTAs of a cluster; `None` have ended.
pub(crate) struct Peers<'a> {
    before: &'a mut [Option<Block>],
    after: &'a mut [Option<Block>],
}

impl<'a> Peers<'a> {
    /// Those of lower and those of higher rank.
    pub(crate) fn new(before: &'a mut [Option<Block>], after: &'a mut [Option<Block>]) -> Peers<'a> {
        Peers { before, after }
    }

    /// CTA `rank` of the cluster, `own` being the executing one; `None` if it has ended.
    pub(crate) fn cta<'b>(&'b mut self, own: &'b mut Cta, rank: u32) -> Option<&'b mut Cta> {
        let (rank, mine) = (rank as usize, self.before.len());
        let block = match rank.cmp(&mine) {
            std::cmp::Ordering::Less => &mut self.before[rank],
            std::cmp::Ordering::Equal => return Some(own),
            std::cmp::Ordering::Greater => &mut self.after[rank - mine - 1],
        };
        block.as_mut().map(|block| &mut block.cta)
    }
}

/// An access to the CTA's shared memory that its end, after everything that its warps have done, is not ordered after.
pub(crate) fn exit_race(block: &mut Block, pc: u32) -> Option<Box<Race>> {
    let (last, others) = block.clocks.split_first_mut()?;
    for clock in others {
        let published = clock.release(ALL_LANES);
        last.acquire(&published);
    }
    last.sync_warp();
    let end = Access::generic(last, 0, pc, ptx::Sem::Weak);
    let bytes = block.cta.shared.len() as u32;
    block.cta.shadow.check_write(0, bytes, &end, last).err()
}

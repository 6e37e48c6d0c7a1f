//! One CTA: its warps and what they share.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::mbarrier::Mbarriers;
use crate::race::{AgentId, Clock, CtaAgents, Shadow, Snapshot};
use crate::shared::SharedMemory;
use crate::warp::Warp;
use crate::warpgroup::Warpgroup;

/// A resident CTA.
pub(crate) struct Block {
    pub(crate) cta: Cta,
    pub(crate) warps: Vec<Warp>,
    /// What each warp knows to have happened.
    pub(crate) clocks: Vec<Clock>,
}

/// What the warps of a CTA share.
pub(crate) struct Cta {
    pub(crate) index: [u32; 3],
    /// Index in the order of launching.
    pub(crate) linear: u32,
    /// Rank in its cluster.
    pub(crate) rank: u32,
    /// Multiprocessor that it runs on.
    pub(crate) sm: u32,
    pub(crate) shared: SharedMemory,
    pub(crate) shadow: Shadow,
    pub(crate) barriers: [NamedBarrier; 16],
    pub(crate) mbarriers: Mbarriers,
    /// Copies to shared memory under way.
    pub(crate) copies: Vec<CopyIn>,
    /// `cp.async` copies, by thread.
    pub(crate) thread_copies: BTreeMap<u32, ThreadCopies>,
    /// Their asynchronous queues, by warp.
    pub(crate) copy_queues: BTreeMap<u32, AgentId>,
    /// Bulk stores, by thread.
    pub(crate) stores: BTreeMap<u32, StoreQueue>,
    pub(crate) warpgroups: Vec<Warpgroup>,
    /// Registers, of a warp's threads each, that warps have given up and others may take.
    pub(crate) free_registers: u32,
    /// Counts whatever a waiting warp may be waiting for.
    pub(crate) events: u64,
    /// Dependent launches may start as far as this CTA is concerned.
    pub(crate) triggered: bool,
    /// Warps with lanes that have not ended.
    pub(crate) live_warps: u32,
    /// What `fence.mbarrier_init` has made known to the cluster, for a relaxed arrival to publish.
    pub(crate) init_fenced: Snapshot,
    pub(crate) agents: CtaAgents,
    slots: u32,
}

impl Cta {
    pub(crate) fn new(index: [u32; 3], linear: u32, sm: u32, shared_bytes: u32, agents: CtaAgents) -> Cta {
        Cta {
            index,
            linear,
            rank: linear % ((agents.cluster_end - agents.cluster_first) / (agents.warps + crate::race::ASYNC_SLOTS)),
            sm,
            shared: SharedMemory::new(shared_bytes),
            shadow: Shadow::new(),
            barriers: std::array::from_fn(|_| NamedBarrier::default()),
            mbarriers: Mbarriers::new(),
            copies: Vec::new(),
            thread_copies: BTreeMap::new(),
            copy_queues: BTreeMap::new(),
            stores: BTreeMap::new(),
            warpgroups: (0..agents.warps.div_ceil(4)).map(|_| Warpgroup::default()).collect(),
            free_registers: 0,
            events: 0,
            triggered: false,
            live_warps: agents.warps,
            init_fenced: Snapshot::new(),
            agents,
            slots: 0,
        }
    }

    /// The next unused asynchronous queue, `None` if all are taken.
    pub(crate) fn new_queue(&mut self) -> Option<AgentId> {
        // The last one is the start's.
        (self.slots < crate::race::ASYNC_SLOTS - 1).then(|| {
            self.slots += 1;
            self.agents.slot(self.slots - 1)
        })
    }

    /// Takes back the queue given last, which nothing used.
    pub(crate) fn return_queue(&mut self, queue: AgentId) {
        debug_assert_eq!(queue, self.agents.slot(self.slots - 1));
        self.slots -= 1;
    }

    /// Releases shared bytes that an asynchronous operation has read, except those that others still read.
    pub(crate) fn release_leaving(&mut self, ranges: impl Iterator<Item = Range<usize>>) {
        ranges.for_each(|range| self.shared.set_leaving(range, false));
        for warpgroup in &self.warpgroups {
            for range in warpgroup.operands() {
                self.shared.set_leaving(range, true);
            }
        }
        for queue in self.stores.values() {
            for store in queue.groups.iter().flatten().chain(&queue.open).filter(|s| s.bytes.is_none()) {
                self.shared.set_leaving(store.range(), true);
            }
        }
    }
}

/// A `bar.sync` barrier.
#[derive(Debug, Default)]
pub(crate) struct NamedBarrier {
    /// Completed rounds.
    pub(crate) generation: u32,
    /// Threads of the round in progress; `None`: all of the CTA that have not ended.
    pub(crate) threads: Option<u32>,
    /// Threads that have arrived, by warps.
    pub(crate) arrived: u32,
    /// Warps that wait for the round's end.
    pub(crate) waiting: u32,
    /// Where the first arrival of the round was.
    pub(crate) first: Option<u32>,
    /// What the arrivals of the round publish.
    pub(crate) arriving: Snapshot,
    /// What the last completed round published.
    pub(crate) completed: Snapshot,
}

impl NamedBarrier {
    /// Ends the round if `expected` threads have arrived.
    pub(crate) fn advance(&mut self, expected: u32) -> bool {
        if self.arrived == 0 || self.arrived < expected {
            return false;
        }
        self.generation += 1;
        self.arrived = 0;
        self.waiting = 0;
        self.threads = None;
        self.first = None;
        self.completed = std::mem::take(&mut self.arriving);
        true
    }
}

/// Who issued an asynchronous operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Issuer {
    pub(crate) warp: u32,
    pub(crate) lane: u32,
    pub(crate) pc: u32,
}

/// A contiguous piece of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Byte offset in shared memory.
    pub(crate) offset: u32,
    pub(crate) len: u32,
    /// Device address; `None` outside the tensor, which reads as zero.
    pub(crate) address: Option<u64>,
}

/// A copy to shared memory, from device memory or by an asynchronous store, that completes on an mbarrier.
#[derive(Debug)]
pub(crate) struct CopyIn {
    pub(crate) issuer: Issuer,
    pub(crate) pieces: Vec<Piece>,
    /// What an asynchronous store brings, in one piece.
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) bytes: u32,
    /// Byte offset of the mbarrier.
    pub(crate) mbarrier: u32,
}

/// A copy to shared memory by `cp.async`.
#[derive(Debug)]
pub(crate) struct ThreadCopy {
    pub(crate) issuer: Issuer,
    pub(crate) piece: Piece,
    /// Whether the bytes are there.
    pub(crate) arrived: bool,
}

/// The `cp.async` copies of one thread that it has not waited for, group by group.
#[derive(Debug)]
pub(crate) struct ThreadCopies {
    /// Number of the oldest group kept, from 1: its race epoch.
    pub(crate) first: u32,
    /// Committed groups, oldest first.
    pub(crate) groups: VecDeque<Vec<ThreadCopy>>,
    /// The group that is not committed yet.
    pub(crate) open: Vec<ThreadCopy>,
}

impl Default for ThreadCopies {
    fn default() -> Self {
        ThreadCopies { first: 1, groups: VecDeque::new(), open: Vec::new() }
    }
}

impl ThreadCopies {
    /// Race epoch of the open group.
    pub(crate) fn epoch(&self) -> u32 {
        self.first + self.groups.len() as u32
    }

    /// The first copy that was not waited for.
    pub(crate) fn oldest(&self) -> Option<&ThreadCopy> {
        self.groups.iter().flatten().chain(&self.open).next()
    }
}

/// A copy from shared memory to device memory.
#[derive(Debug)]
pub(crate) struct CopyOut {
    pub(crate) issuer: Issuer,
    pub(crate) offset: u32,
    pub(crate) len: u32,
    pub(crate) address: u64,
    /// The bytes, once read from shared memory.
    pub(crate) bytes: Option<Vec<u8>>,
}

impl CopyOut {
    /// Shared bytes that it reads.
    pub(crate) fn range(&self) -> Range<usize> {
        self.offset as usize..(self.offset + self.len) as usize
    }
}

/// Bulk stores of one thread, group by group.
#[derive(Debug)]
pub(crate) struct StoreQueue {
    /// Agents of the reads and of the writes.
    pub(crate) queues: [AgentId; 2],
    /// Number of the oldest group kept, from 1: its race epoch.
    pub(crate) first: u32,
    /// Committed groups, oldest first.
    pub(crate) groups: VecDeque<Vec<CopyOut>>,
    /// The group that is not committed yet.
    pub(crate) open: Vec<CopyOut>,
}

impl StoreQueue {
    /// Race epoch of the open group.
    pub(crate) fn epoch(&self) -> u32 {
        self.first + self.groups.len() as u32
    }
}

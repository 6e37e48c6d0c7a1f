//! Detection of data races in shared and global memory.
//!
//! Two accesses race when they touch a common byte, at least one writes, neither happened before the other, and they are
//! not both strong with scopes that include each other (PTX ISA, "Memory consistency model"). Happens-before is kept by
//! vector clocks as in FastTrack (Flanagan and Freund, PLDI 2009): a [`Clock`] per warp, and per piece of memory the
//! last write and the reads since ([`Shadow`]).
//!
//! One run sees one interleaving, but a race is found in every interleaving in which no chance synchronisation (a lock
//! or flag that happened to be passed in order) hides it.
//!
//! | simplification | effect |
//! |---|---|
//! | an acquire, or a wait, by one lane counts for its warp | may miss a race |
//! | past 32 concurrent readers of a place, readers of one launch are told apart from other launches only | may miss a race |
//! | a strong access replaces earlier accesses, those that happened before it and strong ones that did not | may miss a race |
//! | of a place that several lanes of a warp read, a release by several but not all lanes covers all | may miss a race |
//!
//! It never reports accesses that are ordered. Where a kernel relies on lanes of a warp running in step, that is a race.

mod agents;
mod cell;
mod record;
mod shadow;
mod sync;
#[cfg(test)]
mod tests;
mod vector_clock;

pub use agents::{ASYNC_SLOTS, Actor, AgentId, AgentSet, CtaAgents, LaunchAgents};
pub use shadow::Shadow;
pub use vector_clock::{ALL_LANES, Clock, Snapshot};

use std::fmt;

use ptx::{Scope, Sem};

/// Which path to memory an access takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proxy {
    /// Loads, stores and atomics of a thread.
    Generic,
    /// Bulk and tensor copies, and matrix operands read from shared memory.
    Async,
}

/// One access, as recorded. `lane` and `instruction` serve the report too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Who performs it: a warp, or an asynchronous queue.
    pub agent: AgentId,
    /// Epoch of the agent in which it is performed.
    pub epoch: u32,
    /// Lane, below 32.
    pub lane: u8,
    /// Position of the instruction in its kernel.
    pub instruction: u32,
    /// Scope of a strong access, `None` if it is weak.
    pub strong: Option<Scope>,
    /// Path to memory.
    pub proxy: Proxy,
}

impl Access {
    /// A load, store or atomic of `lane` now.
    pub fn generic(clock: &Clock, lane: u8, instruction: u32, sem: Sem) -> Self {
        Self {
            agent: clock.agent(),
            epoch: clock.epoch(),
            lane,
            instruction,
            strong: scope_of(sem),
            proxy: Proxy::Generic,
        }
    }

    /// An access that `queue` performs in its batch `epoch`, at some time between its issue by `lane` and the wait that
    /// observes the batch.
    pub fn asynchronous(queue: AgentId, epoch: u32, lane: u8, instruction: u32) -> Self {
        Self { agent: queue, epoch, lane, instruction, strong: None, proxy: Proxy::Async }
    }
}

/// The scope at which an access of these semantics is morally strong.
pub fn scope_of(sem: Sem) -> Option<Scope> {
    match sem {
        Sem::Weak => None,
        Sem::Volatile => Some(Scope::Sys),
        Sem::Relaxed(scope) | Sem::Acquire(scope) | Sem::Release(scope) | Sem::AcqRel(scope) => Some(scope),
    }
}

/// One side of a race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Party {
    /// Who performed it.
    pub agent: AgentId,
    /// Lane, `None` if several lanes did.
    pub lane: Option<u8>,
    /// Position of the instruction in the kernel of the agent's launch.
    pub instruction: u32,
    /// Whether it wrote.
    pub is_write: bool,
    /// Scope of a strong access, `None` if it is weak.
    pub strong: Option<Scope>,
    /// Path to memory.
    pub proxy: Proxy,
}

/// What would have ordered the two accesses of a race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Any synchronisation between two agents.
    Order,
    /// A warp barrier between lanes of one warp.
    WarpBarrier,
    /// A wait for an asynchronous operation.
    Wait,
    /// A `fence.proxy.async` between a generic write and an asynchronous access that is otherwise ordered.
    ProxyFence,
    /// Both are strong, but at scopes that do not include both parties.
    Scope,
}

/// Two unordered accesses to a common byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Race {
    /// Byte of the region, the first of those found in common.
    pub offset: u64,
    /// The access that the simulator performed first.
    pub first: Party,
    /// The access that was about to be performed.
    pub second: Party,
    /// What is missing between them.
    pub missing: Missing,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Missing::Order => "nothing orders them",
            Missing::WarpBarrier => "no warp barrier stands between these lanes of one warp",
            Missing::Wait => "the asynchronous operation has not been waited for",
            Missing::ProxyFence => "no fence.proxy.async stands between them",
            Missing::Scope => "both are strong, but not at a scope that includes both",
        })
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let strength = if self.strong.is_some() { "strong" } else { "weak" };
        let proxy = if self.proxy == Proxy::Async { "asynchronous " } else { "" };
        let kind = if self.is_write { "write" } else { "read" };
        write!(f, "{strength} {proxy}{kind} by agent {}", self.agent.0)?;
        match self.lane {
            Some(lane) => write!(f, " lane {lane}")?,
            None => f.write_str(", several lanes")?,
        }
        write!(f, " at instruction {}", self.instruction)
    }
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "data race at byte {}: (1) {}; (2) {}; {}", self.offset, self.first, self.second, self.missing)
    }
}

impl std::error::Error for Race {}

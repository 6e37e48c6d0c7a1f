//! One warp: registers, and its lanes in groups that share a program counter.
//!
//! The group with the lowest program counter runs, so groups that split meet again where their paths join. A group that
//! polls hands over at its backward branch, so a lane may wait for another lane of its own warp.

use crate::registers::Registers;

/// Why a group does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It can run.
    None,
    /// At an instruction that these lanes must execute together.
    Converge {
        /// Lanes that must be there.
        required: u32,
    },
    /// Past a barrier arrival, until the barrier's generation ends.
    Barrier {
        /// Barrier number.
        id: u32,
        /// Its generation at the arrival.
        generation: u32,
    },
    /// Past an arrival at the cluster's barrier, until its generation ends.
    Cluster {
        /// The generation at the arrival.
        generation: u32,
    },
    /// Until something happens in the CTA (a phase or copy completes): then the instruction is tried again.
    Event {
        /// The CTA's event count when it last tried.
        seen: u64,
    },
    /// Until the launches that this one depends on have completed.
    Dependencies,
    /// Until the clock has reached a time in picoseconds.
    Sleep {
        /// That time.
        until_ps: u64,
    },
}

/// Lanes that execute together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) pc: u32,
    pub(crate) mask: u32,
    pub(crate) wait: Wait,
}

/// Polls of a warp in a quiet period of the machine.
#[derive(Debug, Default)]
pub(crate) struct IdlePolls {
    pub(crate) period: u64,
    pub(crate) polls: u32,
    /// The machine counts the warp among those that have polled in vain.
    pub(crate) counted: bool,
}

/// A warp.
#[derive(Debug)]
pub(crate) struct Warp {
    /// Index in the CTA.
    pub(crate) index: u32,
    pub(crate) registers: Registers,
    /// Registers that each of its threads has on the device: `setmaxnreg` changes it.
    pub(crate) allotted: u32,
    /// The group that runs; an empty mask when none is chosen.
    pub(crate) current: Group,
    /// The other groups, in no order of program counters; polling groups queue at the end.
    pub(crate) others: Vec<Group>,
    /// Lanes that have ended.
    pub(crate) exited: u32,
    /// The current group has executed something that can observe other threads since its last backward branch.
    pub(crate) polled: bool,
    /// Backward branches of the current group since it was chosen.
    pub(crate) spins: u32,
    /// The wait of the current instruction has timed out.
    pub(crate) timed_out: bool,
    /// Half of the current group's 16-byte store that is done, if one is.
    pub(crate) half_stored: Option<u32>,
    /// Generation of the cluster's barrier at which the warp has arrived without waiting yet.
    pub(crate) cluster_arrival: Option<u32>,
    /// In the machine's ready list.
    pub(crate) queued: bool,
    /// What it has polled in vain.
    pub(crate) quiet: IdlePolls,
    /// Accumulators that warpgroup MMAs are using.
    pub(crate) pending: PendingRegisters,
}

/// A set of 32-bit registers.
#[derive(Debug, Default)]
pub(crate) struct PendingRegisters {
    bits: Vec<u64>,
    count: usize,
}

impl PendingRegisters {
    /// Whether the register is in the set.
    #[inline(always)]
    pub(crate) fn contains(&self, r: u32) -> bool {
        self.count != 0 && self.bits.get(r as usize / 64).is_some_and(|word| word >> (r % 64) & 1 == 1)
    }

    /// Adds a register that is not in the set.
    pub(crate) fn insert(&mut self, r: u32) {
        let word = r as usize / 64;
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        self.bits[word] |= 1 << (r % 64);
        self.count += 1;
    }

    /// Removes a register that is in the set.
    pub(crate) fn remove(&mut self, r: u32) {
        self.bits[r as usize / 64] &= !(1 << (r % 64));
        self.count -= 1;
    }
}

impl Warp {
    /// A full warp at the first instruction.
    pub(crate) fn new(index: u32, registers: Registers, allotted: u32) -> Warp {
        Warp {
            index,
            registers,
            allotted,
            current: Group { pc: 0, mask: u32::MAX, wait: Wait::None },
            others: Vec::new(),
            exited: 0,
            polled: false,
            spins: 0,
            timed_out: false,
            half_stored: None,
            cluster_arrival: None,
            queued: false,
            quiet: IdlePolls::default(),
            pending: PendingRegisters::default(),
        }
    }

    /// Whether every lane has ended.
    pub(crate) fn finished(&self) -> bool {
        self.exited == u32::MAX
    }

    /// Makes `others[i]` current. There must be no current group.
    pub(crate) fn choose(&mut self, i: usize) {
        debug_assert_eq!(self.current.mask, 0);
        self.current = self.others.remove(i);
        self.current.wait = Wait::None;
        self.spins = 0;
        self.polled = false;
        self.merge();
    }

    /// Parks the current group.
    pub(crate) fn park(&mut self, wait: Wait) {
        let Group { pc, mask, .. } = self.current;
        self.others.push(Group { pc, mask, wait });
        self.current.mask = 0;
    }

    /// Takes up groups that stand at the current group's instruction.
    pub(crate) fn merge(&mut self) {
        let Group { pc, .. } = self.current;
        let mut mask = self.current.mask;
        self.others.retain(|g| {
            let here = g.pc == pc && matches!(g.wait, Wait::None | Wait::Converge { .. });
            if here {
                mask |= g.mask;
            }
            !here
        });
        self.current.mask = mask;
    }

    /// All groups.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &Group> {
        self.others.iter().chain((self.current.mask != 0).then_some(&self.current))
    }
}

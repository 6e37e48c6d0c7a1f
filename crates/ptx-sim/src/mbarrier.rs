//! Mbarriers: arrivals and transaction bytes, phase by phase.
//!
//! A phase completes when no arrival and no transaction byte is pending; the next begins at once with the initial count.
//! A wait names the parity of the phase it waits for: it succeeds if the phase in progress has the other parity.
//!
//! Each mbarrier of a CTA is one asynchronous queue of the race detector: phase by phase its copies complete. Its
//! [`Mbarrier::epoch`] numbers phases without ever starting over, so that a barrier which is invalidated and initialised
//! again at the same address stays distinct from its past.

use std::collections::BTreeMap;

use ptx::Scope;

use crate::race::{AgentId, Clock, Snapshot};

/// Bytes of an mbarrier object, and its alignment.
pub const MBARRIER_BYTES: u32 = 8;
/// Largest arrival count and largest magnitude of the transaction count.
pub const COUNT_MAX: u32 = (1 << 20) - 1;

/// Misuse of an mbarrier.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MbarrierError {
    /// The address is not a multiple of 8.
    #[error("mbarrier address is not 8-byte aligned")]
    Misaligned,
    /// No live mbarrier is at the address.
    #[error("no mbarrier is initialised there")]
    NotInitialised,
    /// A live mbarrier is at the address, or overlaps it.
    #[error("a live mbarrier is already there")]
    AlreadyInitialised,
    /// An arrival count outside 1..=2^20-1.
    #[error("arrival count {0} is not in 1..=1048575")]
    BadCount(u32),
    /// More arrivals than the phase expects.
    #[error("{arrivals} arrivals where {pending} of {expected} are pending in phase {phase}")]
    TooManyArrivals {
        /// Arrivals of this operation.
        arrivals: u32,
        /// Pending ones before it.
        pending: u32,
        /// Arrivals of a phase.
        expected: u32,
        /// Phase in progress, from 0.
        phase: u64,
    },
    /// The transaction count leaves -(2^20-1)..=2^20-1.
    #[error("transaction count {0} is not in -1048575..=1048575")]
    TxOverflow(i64),
    /// Invalidated, or its CTA ended, in the middle of a phase that copies still have to complete.
    #[error("transaction count is {tx} bytes at its end, in phase {phase}")]
    PendingTx {
        /// Bytes expected and not completed (negative: completed and never expected).
        tx: i64,
        /// Phase in progress, from 0.
        phase: u64,
    },
}

/// One live mbarrier.
#[derive(Clone, Debug)]
pub struct Mbarrier {
    expected: u32,
    pending: u32,
    tx: i64,
    phase: u64,
    queue: AgentId,
    epoch: u32,
    /// What the arrivals of the phase in progress published.
    arriving: Snapshot,
    /// What the arrivals and copies of all completed phases published.
    completed: Snapshot,
    /// Asynchronous stores have completed on the phase in progress.
    stored: bool,
    /// What came before the asynchronous stores of the phase in progress.
    storing: Snapshot,
    /// The phases on which asynchronous stores completed, and what came before these: for waits at the scope of the cluster.
    stores: Snapshot,
}

impl Mbarrier {
    /// For phases of `count` arrivals. `queue` is the barrier's asynchronous agent and `epoch` its first unused epoch,
    /// from 1.
    ///
    /// # Errors
    /// When `count` is out of range.
    pub fn new(count: u32, queue: AgentId, epoch: u32) -> Result<Self, MbarrierError> {
        if !(1..=COUNT_MAX).contains(&count) {
            return Err(MbarrierError::BadCount(count));
        }
        Ok(Self {
            expected: count,
            pending: count,
            tx: 0,
            phase: 0,
            queue,
            epoch,
            arriving: Snapshot::new(),
            completed: Snapshot::new(),
            stored: false,
            storing: Snapshot::new(),
            stores: Snapshot::new(),
        })
    }

    /// Arrivals of a phase.
    pub fn expected(&self) -> u32 {
        self.expected
    }

    /// Arrivals that the phase still lacks.
    pub fn pending(&self) -> u32 {
        self.pending
    }

    /// Transaction count in bytes; negative while copies have completed that nobody expected yet.
    pub fn tx(&self) -> i64 {
        self.tx
    }

    /// Number of completed phases.
    pub fn phase(&self) -> u64 {
        self.phase
    }

    /// The asynchronous queue whose batches are this barrier's phases.
    pub fn queue(&self) -> AgentId {
        self.queue
    }

    /// Epoch of [`Mbarrier::queue`] in which copies that complete on the phase in progress are recorded.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Arrives `count` times for the given lanes, releasing what happened before. Returns whether the phase completed.
    ///
    /// # Errors
    /// When more arrive than the phase expects.
    pub fn arrive(&mut self, count: u32, lanes: u32, clock: &mut Clock) -> Result<bool, MbarrierError> {
        if !(1..=COUNT_MAX).contains(&count) {
            return Err(MbarrierError::BadCount(count));
        }
        if count > self.pending {
            return Err(MbarrierError::TooManyArrivals {
                arrivals: count,
                pending: self.pending,
                expected: self.expected,
                phase: self.phase,
            });
        }
        clock.release_into(lanes, &mut self.arriving);
        self.pending -= count;
        Ok(self.advance())
    }

    /// Expects `bytes` more in the phase in progress, which may balance bytes that came early. Returns whether the phase
    /// completed.
    ///
    /// # Errors
    /// When the transaction count overflows.
    pub fn expect_tx(&mut self, bytes: u32) -> Result<bool, MbarrierError> {
        self.add_tx(i64::from(bytes))?;
        Ok(self.advance())
    }

    /// [`Mbarrier::expect_tx`], then one arrival by the given lanes. Returns whether the phase completed.
    ///
    /// # Errors
    /// As for both.
    pub fn arrive_expect_tx(&mut self, bytes: u32, lanes: u32, clock: &mut Clock) -> Result<bool, MbarrierError> {
        // The expectation belongs to the phase that the arrival may complete, so it must not complete it alone.
        self.add_tx(i64::from(bytes))?;
        self.arrive(1, lanes, clock)
    }

    /// A copy has delivered `bytes`. Returns whether the phase completed.
    ///
    /// # Errors
    /// When the transaction count overflows.
    pub fn complete_tx(&mut self, bytes: u32) -> Result<bool, MbarrierError> {
        self.add_tx(-i64::from(bytes))?;
        Ok(self.advance())
    }

    /// Some lanes have issued an asynchronous store for the phase in progress: its completion releases what came before.
    pub fn store(&mut self, lanes: u32, clock: &mut Clock) {
        clock.release_into(lanes, &mut self.storing);
    }

    /// An asynchronous store has delivered `bytes`, which only waits at the scope of the cluster acquire. Returns whether
    /// the phase completed.
    ///
    /// # Errors
    /// When the transaction count overflows.
    pub fn complete_store(&mut self, bytes: u32) -> Result<bool, MbarrierError> {
        self.stored = true;
        self.complete_tx(bytes)
    }

    fn add_tx(&mut self, bytes: i64) -> Result<(), MbarrierError> {
        let tx = self.tx + bytes;
        if tx.unsigned_abs() > u64::from(COUNT_MAX) {
            return Err(MbarrierError::TxOverflow(tx));
        }
        self.tx = tx;
        Ok(())
    }

    fn advance(&mut self) -> bool {
        if self.pending != 0 || self.tx != 0 {
            return false;
        }
        self.completed.join(&std::mem::take(&mut self.arriving));
        let by_stores = std::mem::take(&mut self.stored);
        let observed = if by_stores { &mut self.stores } else { &mut self.completed };
        observed.observe(self.queue, self.epoch);
        self.stores.join(&std::mem::take(&mut self.storing));
        self.epoch += 1;
        self.phase += 1;
        self.pending = self.expected;
        true
    }

    /// Whether the phase of this parity (its lowest bit counts) has completed.
    pub fn is_complete(&self, parity: u32) -> bool {
        (self.phase & 1) as u32 != parity & 1
    }

    /// [`Mbarrier::is_complete`]; if so the warp acquires what the completed phases published as far as `scope` reaches.
    pub fn test_wait(&self, parity: u32, scope: Scope, clock: &mut Clock) -> bool {
        let complete = self.is_complete(parity);
        // A fresh barrier passes a wait for parity 1 without any phase having completed: there is nothing to join.
        if complete {
            clock.acquire(&self.completed);
            if scope >= Scope::Cluster {
                clock.acquire(&self.stores);
            }
        }
        complete
    }
}

/// The mbarriers in the shared memory of a CTA, by byte offset.
#[derive(Debug, Default)]
pub struct Mbarriers {
    live: BTreeMap<u32, Mbarrier>,
    /// Asynchronous agent of every address that ever held one, and the next unused epoch of those that hold none.
    queues: BTreeMap<u32, (AgentId, u32)>,
}

impl Mbarriers {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// Initialises one. `new_queue` gives an unused asynchronous agent of the CTA; it is called once per address.
    ///
    /// # Errors
    /// When the address or count is invalid, or a live barrier is there.
    pub fn init(
        &mut self,
        offset: u32,
        count: u32,
        new_queue: impl FnOnce() -> AgentId,
    ) -> Result<&mut Mbarrier, MbarrierError> {
        if !offset.is_multiple_of(MBARRIER_BYTES) {
            return Err(MbarrierError::Misaligned);
        }
        if self.live.contains_key(&offset) {
            return Err(MbarrierError::AlreadyInitialised);
        }
        let (queue, epoch) = *self.queues.entry(offset).or_insert_with(|| (new_queue(), 1));
        let barrier = Mbarrier::new(count, queue, epoch)?;
        Ok(self.live.entry(offset).or_insert(barrier))
    }

    /// The live barrier at an address.
    ///
    /// # Errors
    /// When there is none.
    pub fn get(&self, offset: u32) -> Result<&Mbarrier, MbarrierError> {
        self.live.get(&offset).ok_or_else(|| not_there(offset))
    }

    /// The live barrier at an address.
    ///
    /// # Errors
    /// When there is none.
    pub fn get_mut(&mut self, offset: u32) -> Result<&mut Mbarrier, MbarrierError> {
        self.live.get_mut(&offset).ok_or_else(|| not_there(offset))
    }

    /// Ends a barrier's life.
    ///
    /// # Errors
    /// When there is none, or copies of its phase are pending.
    pub fn invalidate(&mut self, offset: u32) -> Result<(), MbarrierError> {
        let barrier = self.get(offset)?;
        check_settled(barrier)?;
        self.queues.insert(offset, (barrier.queue, barrier.epoch + 1));
        self.live.remove(&offset);
        Ok(())
    }

    /// Address of a live barrier that overlaps a range: ordinary accesses there are a fault.
    pub fn overlapping(&self, offset: u32, len: u32) -> Option<u32> {
        let end = offset.saturating_add(len);
        let (at, _) = self.live.range(..end).next_back()?;
        (len > 0 && at + MBARRIER_BYTES > offset).then_some(*at)
    }

    /// All live barriers, by ascending offset.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Mbarrier)> {
        self.live.iter().map(|(offset, barrier)| (*offset, barrier))
    }

    /// The check when the CTA ends: no barrier has transaction bytes pending. The offset comes with the error.
    ///
    /// # Errors
    /// Names the first barrier that has.
    pub fn check_exit(&self) -> Result<(), (u32, MbarrierError)> {
        self.iter().try_for_each(|(offset, barrier)| check_settled(barrier).map_err(|error| (offset, error)))
    }
}

fn not_there(offset: u32) -> MbarrierError {
    if offset.is_multiple_of(MBARRIER_BYTES) { MbarrierError::NotInitialised } else { MbarrierError::Misaligned }
}

fn check_settled(barrier: &Mbarrier) -> Result<(), MbarrierError> {
    match barrier.tx {
        0 => Ok(()),
        tx => Err(MbarrierError::PendingTx { tx, phase: barrier.phase }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::race::{ALL_LANES, Access, AgentSet, LaunchAgents, Missing, Shadow};
    use ptx::Sem;

    const CTA: LaunchAgents = LaunchAgents { first: 0, ctas: 1, warps: 2, device: 0, cluster: 1 };

    fn clock(warp: u32) -> Clock {
        Clock::new(CTA.cta(0), warp, AgentSet::new())
    }

    fn barrier(count: u32) -> Mbarrier {
        Mbarrier::new(count, CTA.cta(0).slot(0), 1).unwrap()
    }

    #[test]
    fn a_phase_needs_all_arrivals_and_all_bytes() {
        let (mut b, mut c) = (barrier(2), clock(0));
        assert!(!b.is_complete(0) && b.is_complete(1), "the phase before the first counts as complete");
        assert!(!b.arrive_expect_tx(48, 1, &mut c).unwrap());
        assert!(!b.complete_tx(16).unwrap());
        assert!(!b.arrive(1, 1, &mut c).unwrap());
        assert_eq!((b.pending(), b.tx()), (0, 32));
        assert!(!b.is_complete(0));
        assert!(b.complete_tx(32).unwrap());
        assert!(b.is_complete(0) && !b.is_complete(1));
        assert_eq!((b.pending(), b.tx(), b.phase(), b.epoch()), (2, 0, 1, 2));
        assert!(b.arrive(2, 1, &mut c).unwrap());
        assert!(!b.is_complete(0) && b.is_complete(1) && b.is_complete(3), "parity is the lowest bit");
    }

    #[test]
    fn bytes_may_come_before_they_are_expected() {
        let (mut b, mut c) = (barrier(1), clock(0));
        assert!(!b.complete_tx(64).unwrap());
        assert_eq!(b.tx(), -64);
        assert!(b.arrive_expect_tx(64, 1, &mut c).unwrap());
    }

    #[test]
    fn an_expectation_of_zero_bytes_is_an_arrival() {
        let (mut b, mut c) = (barrier(1), clock(0));
        assert!(b.arrive_expect_tx(0, 1, &mut c).unwrap());
    }

    #[test]
    fn misuse_is_named() {
        let (mut b, mut c) = (barrier(2), clock(0));
        b.arrive(1, 1, &mut c).unwrap();
        assert_eq!(
            b.arrive(2, 1, &mut c),
            Err(MbarrierError::TooManyArrivals { arrivals: 2, pending: 1, expected: 2, phase: 0 })
        );
        assert_eq!(b.arrive(0, 1, &mut c), Err(MbarrierError::BadCount(0)));
        b.expect_tx(COUNT_MAX).unwrap();
        assert_eq!(b.expect_tx(1), Err(MbarrierError::TxOverflow(1 << 20)));
        assert_eq!(b.tx(), i64::from(COUNT_MAX), "a refused operation changes nothing");
        assert!(matches!(Mbarrier::new(0, CTA.cta(0).slot(0), 1), Err(MbarrierError::BadCount(0))));
        assert!(matches!(Mbarrier::new(1 << 20, CTA.cta(0).slot(0), 1), Err(MbarrierError::BadCount(_))));
    }

    #[test]
    fn addresses_are_checked() {
        let mut all = Mbarriers::new();
        let queue = || CTA.cta(0).slot(0);
        assert_eq!(all.init(12, 1, queue).unwrap_err(), MbarrierError::Misaligned);
        assert_eq!(all.get(16).unwrap_err(), MbarrierError::NotInitialised);
        assert_eq!(all.get(20).unwrap_err(), MbarrierError::Misaligned);
        all.init(16, 1, queue).unwrap();
        assert_eq!(all.init(16, 1, queue).unwrap_err(), MbarrierError::AlreadyInitialised);
        assert_eq!(
            [(8, 8), (8, 9), (23, 1), (24, 4), (16, 0)].map(|(offset, len)| all.overlapping(offset, len)),
            [None, Some(16), Some(16), None, None]
        );
        all.get_mut(16).unwrap().expect_tx(16).unwrap();
        let pending = MbarrierError::PendingTx { tx: 16, phase: 0 };
        assert_eq!(all.invalidate(16).unwrap_err(), pending);
        assert_eq!(all.check_exit(), Err((16, pending)));
        all.get_mut(16).unwrap().complete_tx(16).unwrap();
        all.check_exit().unwrap();
        all.invalidate(16).unwrap();
        assert_eq!(all.invalidate(16).unwrap_err(), MbarrierError::NotInitialised);
        let again = all.init(16, 1, || panic!("the address has its queue")).unwrap();
        assert_eq!((again.epoch(), again.phase()), (2, 0));
    }

    #[test]
    fn a_wait_orders_after_the_copies_of_its_phase_only() {
        let (mut b, mut producer, mut consumer) = (barrier(1), clock(0), clock(1));
        let mut shadow = Shadow::new();
        let read = |shadow: &mut Shadow, clock: &Clock, offset| {
            shadow.check_read(offset, 4, &Access::generic(clock, 0, 9, Sem::Weak), clock)
        };
        for stage in 0..2 {
            b.arrive_expect_tx(16, 1, &mut producer).unwrap();
            let copy = Access::asynchronous(b.queue(), b.epoch(), 0, 5);
            shadow.check_write(16 * stage, 16, &copy, &producer).unwrap();
            if stage == 0 {
                let race = read(&mut shadow, &consumer, 0).unwrap_err();
                assert_eq!((race.missing, race.first.instruction), (Missing::Wait, 5));
                assert_eq!(read(&mut shadow, &producer, 0).unwrap_err().missing, Missing::Wait, "not even the issuer");
                b.complete_tx(16).unwrap();
            }
        }
        assert!(b.test_wait(0, Scope::Cta, &mut consumer));
        read(&mut shadow, &consumer, 0).unwrap();
        assert_eq!(read(&mut shadow, &consumer, 16).unwrap_err().missing, Missing::Wait);
        b.complete_tx(16).unwrap();
        assert!(!b.test_wait(0, Scope::Cta, &mut consumer));
        assert!(read(&mut shadow, &consumer, 16).is_err(), "a failed test acquires nothing");
        assert!(b.test_wait(1, Scope::Cta, &mut consumer));
        read(&mut shadow, &consumer, 16).unwrap();
    }

    #[test]
    fn a_buffer_is_refilled_only_after_its_readers_arrived() {
        let (mut full, mut empty) = (barrier(1), Mbarrier::new(1, CTA.cta(0).slot(1), 1).unwrap());
        let (mut producer, mut consumer) = (clock(0), clock(1));
        let mut shadow = Shadow::new();
        let fill = |shadow: &mut Shadow, full: &Mbarrier, producer: &Clock| {
            shadow.check_write(0, 64, &Access::asynchronous(full.queue(), full.epoch(), 0, 5), producer)
        };
        full.arrive_expect_tx(64, 1, &mut producer).unwrap();
        fill(&mut shadow, &full, &producer).unwrap();
        full.complete_tx(64).unwrap();
        assert!(full.test_wait(0, Scope::Cta, &mut consumer));
        let lanes: [u64; 32] = std::array::from_fn(|lane| lane as u64 % 16 * 4);
        let who = Access::generic(&consumer, 0, 6, Sem::Weak);
        shadow.check_warp_read(&lanes, ALL_LANES, 4, &who, &consumer).unwrap();
        // One lane arrives for the warp: without a warp barrier the other lanes' reads are not covered.
        let mut hasty = (shadow_with(&consumer, &lanes), empty.clone(), consumer.clone(), producer.clone());
        hasty.1.arrive(1, 1, &mut hasty.2).unwrap();
        assert!(hasty.1.test_wait(0, Scope::Cta, &mut hasty.3));
        assert_eq!(fill(&mut hasty.0, &full, &hasty.3).unwrap_err().missing, Missing::Order);

        let race = fill(&mut shadow, &full, &producer).unwrap_err();
        assert_eq!((race.missing, race.first.instruction), (Missing::Wait, 5), "nobody told it that its copy is over");
        consumer.sync_warp();
        empty.arrive(1, 1, &mut consumer).unwrap();
        assert!(empty.test_wait(0, Scope::Cta, &mut producer));
        fill(&mut shadow, &full, &producer).unwrap();
    }

    fn shadow_with(clock: &Clock, lanes: &[u64; 32]) -> Shadow {
        let mut shadow = Shadow::new();
        let who = Access::generic(clock, 0, 6, Sem::Weak);
        shadow.check_warp_read(lanes, ALL_LANES, 4, &who, clock).unwrap();
        shadow
    }
}

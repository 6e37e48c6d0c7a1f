//! Vector clocks: what a warp knows to have happened before its next access.
//!
//! Every agent counts epochs; each synchronising operation ends one. Knowing an agent's epoch `e` means that all its
//! accesses of epochs up to `e` happened before. Two refinements:
//!
//! - Lanes: a warp's accesses are ordered among its lanes only by a warp or CTA barrier, so a release by some lanes
//!   publishes the accesses of those lanes only (a *partial* entry), besides everything the whole warp is known to have
//!   passed. An acquire by one lane counts for the whole warp (may miss a race, never invents one).
//! - Proxies: asynchronous accesses are ordered after generic writes only along a path with a proxy fence, so a clock
//!   carries a second, *fenced* view, which travels with every synchronisation.

use std::sync::Arc;

use ptx::Scope;

use super::agents::{AgentId, AgentSet, CtaAgents};

/// All lanes of a warp.
pub const ALL_LANES: u32 = u32::MAX;

/// Lane number that stands for "more than one lane".
pub(super) const SEVERAL_LANES: u8 = 32;

/// Accesses of some lanes of an agent, up to an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Partial {
    agent: AgentId,
    epoch: u32,
    lanes: u32,
}

/// Epochs known to have happened before: dense for one CTA, sparse for others, wholesale for entire launches.
#[derive(Clone, Debug, Default)]
struct Known {
    first: u32,
    dense: Vec<u32>,
    /// Ascending by agent.
    sparse: Arc<Vec<(AgentId, u32)>>,
    /// Ascending by agent; a few entries an agent.
    partial: Arc<Vec<Partial>>,
    launches: AgentSet,
}

impl Known {
    /// Whether an access by `lane` of `agent` in `epoch` is known. `self_lanes`: lanes of the agent whose accesses are
    /// known besides, because one of them asks.
    #[inline]
    fn covers(&self, agent: AgentId, epoch: u32, lane: u8, self_lanes: u32) -> bool {
        match self.dense.get(agent.0.wrapping_sub(self.first) as usize) {
            Some(known) if *known >= epoch => return true,
            Some(_) => {}
            None => {
                if self.launches.contains(agent) || self.sparse_epoch(agent) >= epoch {
                    return true;
                }
            }
        }
        !self.partial.is_empty() && self.covers_lane(agent, epoch, lane, self_lanes)
    }

    fn covers_lane(&self, agent: AgentId, epoch: u32, lane: u8, self_lanes: u32) -> bool {
        let published = self.partials_of(agent).iter().filter(|p| p.epoch >= epoch);
        let lanes = published.fold(0, |lanes, p| lanes | p.lanes);
        if lane == SEVERAL_LANES {
            // Which lanes is not recorded; only if a single one is known is one surely left out.
            return lanes != 0 && (lanes | self_lanes).count_ones() > 1;
        }
        lanes >> lane & 1 == 1
    }

    fn sparse_epoch(&self, agent: AgentId) -> u32 {
        match self.sparse.binary_search_by_key(&agent, |entry| entry.0) {
            Ok(at) => self.sparse[at].1,
            Err(_) => 0,
        }
    }

    fn epoch(&self, agent: AgentId) -> u32 {
        match self.dense.get(agent.0.wrapping_sub(self.first) as usize) {
            Some(epoch) => *epoch,
            None => self.sparse_epoch(agent),
        }
    }

    /// Learns that all accesses of `agent` up to `epoch` happened before.
    fn raise(&mut self, agent: AgentId, epoch: u32) {
        if let Some(known) = self.dense.get_mut(agent.0.wrapping_sub(self.first) as usize) {
            *known = (*known).max(epoch);
            return;
        }
        match self.sparse.binary_search_by_key(&agent, |entry| entry.0) {
            Ok(at) if self.sparse[at].1 >= epoch => {}
            Ok(at) => Arc::make_mut(&mut self.sparse)[at].1 = epoch,
            Err(at) => {
                if !self.launches.contains(agent) {
                    Arc::make_mut(&mut self.sparse).insert(at, (agent, epoch));
                }
            }
        }
    }

    /// The partial entries of one agent.
    fn partials_of(&self, agent: AgentId) -> &[Partial] {
        let first = self.partial.partition_point(|p| p.agent < agent);
        let len = self.partial[first..].iter().take_while(|p| p.agent == agent).count();
        &self.partial[first..first + len]
    }

    fn raise_lanes(&mut self, new: Partial) {
        if self.covers_fully(new) {
            return;
        }
        let partial = Arc::make_mut(&mut self.partial);
        // What the new entry implies goes; an equal epoch merges.
        let mut new = new;
        partial.retain(|p| {
            let same = p.agent == new.agent;
            if same && p.epoch == new.epoch {
                new.lanes |= p.lanes;
            }
            !(same && p.epoch <= new.epoch && p.lanes & !new.lanes == 0)
        });
        if new.lanes == ALL_LANES {
            self.raise(new.agent, new.epoch);
        } else {
            let at = partial.partition_point(|p| p.agent <= new.agent);
            partial.insert(at, new);
        }
    }

    fn covers_fully(&self, p: Partial) -> bool {
        self.epoch(p.agent) >= p.epoch
            || self.launches.contains(p.agent)
            || self.partials_of(p.agent).iter().any(|q| q.epoch >= p.epoch && p.lanes & !q.lanes == 0)
    }

    fn see(&mut self, launches: &AgentSet) {
        if self.launches.unite(launches) {
            self.forget_covered();
        }
    }

    /// Drops entries that the set of whole launches, or the dense part, makes redundant.
    fn forget_covered(&mut self) {
        if self.sparse.iter().any(|entry| self.launches.contains(entry.0)) {
            Arc::make_mut(&mut self.sparse).retain(|entry| !self.launches.contains(entry.0));
        }
        self.forget_covered_partials();
    }

    fn forget_covered_partials(&mut self) {
        let stale = |p: &Partial| self.launches.contains(p.agent) || self.epoch(p.agent) >= p.epoch;
        if self.partial.iter().any(stale) {
            let kept = self.partial.iter().copied().filter(|p| !stale(p)).collect();
            self.partial = Arc::new(kept);
        }
    }

    fn join(&mut self, other: &Known) {
        self.launches.unite(&other.launches);
        if self.dense.is_empty() {
            self.first = other.first;
            self.dense.clone_from(&other.dense);
            self.take_own_from_sparse();
        } else if self.first == other.first {
            for (mine, theirs) in self.dense.iter_mut().zip(&other.dense) {
                *mine = (*mine).max(*theirs);
            }
        } else {
            let theirs = other.dense.iter().enumerate().filter(|(_, epoch)| **epoch > 0);
            self.merge_sparse(theirs.map(|(i, epoch)| (AgentId(other.first + i as u32), *epoch)));
        }
        if !Arc::ptr_eq(&self.sparse, &other.sparse) {
            self.merge_sparse(other.sparse.iter().copied());
        }
        if !Arc::ptr_eq(&self.partial, &other.partial) {
            for p in other.partial.iter() {
                self.raise_lanes(*p);
            }
        }
        self.forget_covered();
    }

    /// After the dense part appeared: its agents leave the sparse part.
    fn take_own_from_sparse(&mut self) {
        let (first, len) = (self.first, self.dense.len() as u32);
        let own = |agent: AgentId| agent.0.wrapping_sub(first) < len;
        if self.sparse.iter().any(|entry| own(entry.0)) {
            let old = std::mem::take(&mut self.sparse);
            for (agent, epoch) in old.iter().filter(|entry| own(entry.0)) {
                self.raise(*agent, *epoch);
            }
            self.sparse = Arc::new(old.iter().copied().filter(|entry| !own(entry.0)).collect());
        }
    }

    /// Merges ascending entries.
    fn merge_sparse(&mut self, entries: impl Iterator<Item = (AgentId, u32)> + Clone) {
        let news =
            entries.clone().filter(|(agent, epoch)| self.epoch(*agent) < *epoch && !self.launches.contains(*agent));
        match news.clone().take(3).count() {
            0 => return,
            1 | 2 => {
                let few: Vec<_> = news.collect();
                for (agent, epoch) in few {
                    self.raise(agent, epoch);
                }
                return;
            }
            _ => {}
        }
        let (first, len) = (self.first, self.dense.len() as u32);
        let mut merged = Vec::with_capacity(self.sparse.len() + news.size_hint().1.unwrap_or(0));
        let mut mine = self.sparse.iter().copied().peekable();
        let mut own = Vec::new();
        for (agent, epoch) in news {
            if agent.0.wrapping_sub(first) < len {
                own.push((agent, epoch));
                continue;
            }
            while let Some(entry) = mine.next_if(|entry| entry.0 < agent) {
                merged.push(entry);
            }
            mine.next_if(|entry| entry.0 == agent);
            merged.push((agent, epoch));
        }
        merged.extend(mine);
        self.sparse = Arc::new(merged);
        for (agent, epoch) in own {
            self.raise(agent, epoch);
        }
    }
}

/// What a release publishes and an acquire joins: the state of a barrier, an mbarrier phase, or a flag. Starts empty;
/// releases accumulate.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    seen: Known,
    /// What asynchronous accesses may rely on; `None` is nothing.
    fenced: Option<Arc<Known>>,
}

impl Snapshot {
    /// Knows nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds what `other` knows.
    pub fn join(&mut self, other: &Snapshot) {
        self.seen.join(&other.seen);
        join_fenced(&mut self.fenced, &other.fenced);
    }

    /// Adds that everything `agent` did up to `epoch` has happened.
    pub fn observe(&mut self, agent: AgentId, epoch: u32) {
        self.seen.raise(agent, epoch);
    }
}

fn join_fenced(mine: &mut Option<Arc<Known>>, theirs: &Option<Arc<Known>>) {
    match (mine, theirs) {
        (_, None) => {}
        (mine @ None, theirs) => mine.clone_from(theirs),
        (Some(mine), Some(theirs)) => {
            if !Arc::ptr_eq(mine, theirs) {
                Arc::make_mut(mine).join(theirs);
            }
        }
    }
}

/// A fence whose lanes' later strong writes publish what came before it.
#[derive(Clone, Debug)]
pub(super) struct ReleaseFence {
    pub(super) scope: Scope,
    pub(super) lanes: u32,
    pub(super) snapshot: Arc<Snapshot>,
}

/// The clock of a warp.
#[derive(Clone, Debug)]
pub struct Clock {
    cta: CtaAgents,
    agent: AgentId,
    /// Current epoch; the dense entry of the own agent is the last epoch that all lanes have passed together.
    epoch: u32,
    seen: Known,
    fenced: Option<Arc<Known>>,
    fences: Vec<ReleaseFence>,
    /// Snapshots read by relaxed loads, by the scope that a fence needs to turn the read into an acquire.
    pending: [Option<Box<Snapshot>>; 4],
}

impl Clock {
    /// The clock of a warp at its start, which sees the launches in `visible` entirely.
    pub fn new(cta: CtaAgents, warp: u32, visible: AgentSet) -> Self {
        let seen =
            Known { first: cta.first, dense: vec![0; cta.warps as usize], launches: visible, ..Known::default() };
        Self {
            cta,
            agent: cta.warp(warp),
            epoch: 1,
            seen,
            fenced: None,
            fences: Vec::new(),
            pending: [const { None }; 4],
        }
    }

    /// The agents of the warp's CTA.
    pub fn cta(&self) -> &CtaAgents {
        &self.cta
    }

    /// The warp's agent.
    #[inline]
    pub fn agent(&self) -> AgentId {
        self.agent
    }

    /// Current epoch, from 1.
    #[inline]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The launches that are entirely visible.
    pub fn visible(&self) -> &AgentSet {
        &self.seen.launches
    }

    /// Sees more launches entirely (`griddepcontrol.wait`).
    pub fn see(&mut self, launches: &AgentSet) {
        self.seen.see(launches);
    }

    /// Orders all lanes of the warp (`bar.warp.sync`).
    pub fn sync_warp(&mut self) {
        self.seen.raise(self.agent, self.epoch);
        self.epoch += 1;
    }

    /// Publishes into `target` what happened before for the given lanes ([`ALL_LANES`] if all that exist).
    pub fn release_into(&mut self, lanes: u32, target: &mut Snapshot) {
        target.seen.join(&self.seen);
        if lanes == ALL_LANES {
            target.seen.raise(self.agent, self.epoch);
        } else {
            target.seen.raise_lanes(Partial { agent: self.agent, epoch: self.epoch, lanes });
        }
        join_fenced(&mut target.fenced, &self.fenced);
        self.epoch += 1;
    }

    /// As [`Clock::release_into`] an empty snapshot.
    pub fn release(&mut self, lanes: u32) -> Snapshot {
        let mut snapshot = Snapshot::new();
        self.release_into(lanes, &mut snapshot);
        snapshot
    }

    /// Joins a published snapshot.
    pub fn acquire(&mut self, snapshot: &Snapshot) {
        self.seen.join(&snapshot.seen);
        join_fenced(&mut self.fenced, &snapshot.fenced);
    }

    /// What the warp knows of agents that are neither of its launch nor of launches that it sees entirely; `None` if
    /// nothing. Whoever sees this warp's launch entirely knows it too.
    pub fn learned(&self) -> Option<Snapshot> {
        let foreign = |agent: AgentId| !self.cta.launch_contains(agent);
        let mut learned = Snapshot::new();
        let sparse = self.seen.sparse.iter().filter(|entry| foreign(entry.0));
        learned.seen.merge_sparse(sparse.copied());
        for partial in self.seen.partial.iter().filter(|partial| foreign(partial.agent)) {
            learned.seen.raise_lanes(*partial);
        }
        (!learned.seen.sparse.is_empty() || !learned.seen.partial.is_empty()).then_some(learned)
    }

    /// Learns that an asynchronous queue has completed everything up to `epoch`.
    pub fn observe(&mut self, queue: AgentId, epoch: u32) {
        self.seen.raise(queue, epoch);
    }

    /// As [`observe`](Clock::observe) for the operations that some lanes of this warp gave to the queue.
    pub fn observe_lanes(&mut self, queue: AgentId, epoch: u32, lanes: u32) {
        self.seen.raise_lanes(Partial { agent: queue, epoch, lanes });
    }

    /// `fence.acq_rel` or `fence.sc` by some lanes: relaxed reads before it become acquires, relaxed writes after it
    /// become releases of what came before it.
    pub fn fence(&mut self, scope: Scope, lanes: u32) {
        for needed in 0..=scope as usize {
            if let Some(snapshot) = self.pending[needed].take() {
                self.acquire(&snapshot);
            }
        }
        let snapshot = Arc::new(self.release(lanes));
        self.fences.retain(|old| old.scope > scope || old.lanes & !lanes != 0);
        self.fences.push(ReleaseFence { scope, lanes, snapshot });
    }

    /// `fence.proxy.async` by some lanes: asynchronous accesses ordered after it may touch what came before it.
    pub fn fence_proxy_async(&mut self, lanes: u32) {
        let mut published = Snapshot::new();
        self.release_into(lanes, &mut published);
        let mut fenced = published.seen;
        if let Some(old) = &self.fenced {
            fenced.join(old);
        }
        self.fenced = Some(Arc::new(fenced));
    }

    /// Publishes into `target` what the fences of at least `scope` cover: a relaxed arrival after them.
    pub fn release_fenced_into(&self, scope: Scope, target: &mut Snapshot) {
        for fence in self.fences.iter().filter(|fence| fence.scope >= scope) {
            target.join(&fence.snapshot);
        }
    }

    /// Whether everything that the agent, which is no part of this CTA, did up to `epoch` happened before.
    pub fn knows(&self, agent: AgentId, epoch: u32) -> bool {
        self.is_after_all_lanes(agent, epoch)
    }

    /// Whether an access of `lane` happened before whatever this warp does next; any lane's of this warp did.
    pub fn follows(&self, agent: AgentId, epoch: u32, lane: u8) -> bool {
        agent == self.agent || self.is_after(agent, epoch, lane, 0)
    }

    pub(super) fn fences(&self) -> &[ReleaseFence] {
        &self.fences
    }

    pub(super) fn defer_acquire(&mut self, needed: Scope, snapshot: &Snapshot) {
        self.pending[needed as usize].get_or_insert_default().join(snapshot);
    }

    /// Whether an access by `past_lane`, which may be [`SEVERAL_LANES`], happened before the next access that `lane`
    /// performs or issues.
    #[inline]
    pub(super) fn is_after(&self, agent: AgentId, epoch: u32, past_lane: u8, lane: u8) -> bool {
        if agent != self.agent {
            return self.seen.covers(agent, epoch, past_lane, 0);
        }
        (past_lane == lane && lane != SEVERAL_LANES)
            || self.seen.covers(agent, epoch, past_lane, 1u32.checked_shl(lane.into()).unwrap_or(0))
    }

    /// Whether all accesses of all lanes of an agent up to `epoch` happened before.
    #[inline]
    pub(super) fn is_after_all_lanes(&self, agent: AgentId, epoch: u32) -> bool {
        self.seen.epoch(agent) >= epoch || self.seen.launches.contains(agent)
    }

    /// Whether anything is known of some lanes of an agent only.
    #[inline]
    pub(super) fn knows_single_lanes(&self) -> bool {
        !self.seen.partial.is_empty() || self.fenced.as_ref().is_some_and(|known| !known.partial.is_empty())
    }

    /// Whether a proxy fence follows a generic write that happened before the next asynchronous access.
    pub(super) fn is_fenced(&self, agent: AgentId, epoch: u32, past_lane: u8) -> bool {
        self.seen.launches.contains(agent)
            || self.fenced.as_ref().is_some_and(|known| known.covers(agent, epoch, past_lane, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::super::agents::LaunchAgents;
    use super::*;

    const LAUNCH: LaunchAgents = LaunchAgents { first: 0, ctas: 3, warps: 4, device: 0, cluster: 1 };

    fn clock(cta: u32, warp: u32) -> Clock {
        Clock::new(LAUNCH.cta(cta), warp, AgentSet::new())
    }

    fn knows(clock: &Clock, other: &Clock, epoch: u32, lane: u8) -> bool {
        clock.is_after(other.agent(), epoch, lane, 0)
    }

    #[test]
    fn a_full_release_publishes_the_epoch_it_ends() {
        let (mut a, mut b) = (clock(0, 0), clock(0, 1));
        let snapshot = a.release(ALL_LANES);
        assert_eq!(a.epoch(), 2);
        assert!(!knows(&b, &a, 1, 7));
        b.acquire(&snapshot);
        assert!(knows(&b, &a, 1, 7) && knows(&b, &a, 1, SEVERAL_LANES) && !knows(&b, &a, 2, 7));
    }

    #[test]
    fn a_lane_publishes_its_own_accesses_and_what_the_warp_has_passed() {
        let (mut a, mut b) = (clock(0, 0), clock(1, 1));
        a.sync_warp();
        let snapshot = a.release(1 << 3);
        b.acquire(&snapshot);
        assert!(knows(&b, &a, 1, 7), "before the warp barrier");
        assert!(knows(&b, &a, 2, 3), "own");
        assert!(!knows(&b, &a, 2, 7), "another lane's");
        assert!(!knows(&b, &a, 2, SEVERAL_LANES));
        b.acquire(&a.release(1 << 7));
        assert!(knows(&b, &a, 3, 7) && knows(&b, &a, 2, 7) && !knows(&b, &a, 3, 3));
    }

    #[test]
    fn partial_releases_of_one_epoch_unite() {
        let mut known = Known::default();
        let agent = AgentId(9);
        known.raise_lanes(Partial { agent, epoch: 4, lanes: 0xFFFF });
        known.raise_lanes(Partial { agent, epoch: 4, lanes: 0xFFFF_0000 });
        assert_eq!(known.epoch(agent), 4);
        assert!(known.partial.is_empty());
    }

    #[test]
    fn lanes_of_a_warp_are_ordered_by_its_barrier_only() {
        let mut a = clock(0, 0);
        assert!(a.is_after(a.agent(), 1, 5, 5) && !a.is_after(a.agent(), 1, 5, 6));
        a.release(1);
        assert!(!a.is_after(a.agent(), 1, 5, 6));
        a.sync_warp();
        assert!(a.is_after(a.agent(), 1, 5, 6) && a.is_after(a.agent(), 2, 5, 6) && !a.is_after(a.agent(), 3, 5, 6));
    }

    #[test]
    fn knowledge_is_transitive_across_ctas() {
        let (mut a, mut b, mut c) = (clock(0, 2), clock(1, 0), clock(2, 3));
        b.acquire(&a.release(ALL_LANES));
        c.acquire(&b.release(ALL_LANES));
        assert!(knows(&c, &a, 1, 0) && knows(&c, &b, 1, 0) && !knows(&a, &c, 1, 0));
        // And home again, where the epoch is dense.
        let mut d = clock(0, 1);
        d.acquire(&c.release(ALL_LANES));
        assert!(knows(&d, &a, 1, 0) && knows(&d, &c, 1, 0));
    }

    #[test]
    fn a_snapshot_takes_a_home_after_sparse_entries() {
        let (mut a, mut d) = (clock(0, 2), clock(0, 1));
        let mut snapshot = Snapshot::new();
        snapshot.observe(a.agent(), 5);
        a.release_into(ALL_LANES, &mut snapshot);
        d.acquire(&snapshot);
        assert!(knows(&d, &a, 5, 0) && !knows(&d, &a, 6, 0));
    }

    #[test]
    fn whole_launches_replace_entries() {
        let other = LaunchAgents { first: 5000, ctas: 2, warps: 4, device: 0, cluster: 1 };
        let mut foreign = Clock::new(other.cta(1), 0, AgentSet::new());
        let mut a = clock(0, 0);
        a.acquire(&foreign.release(1));
        assert!(!a.seen.partial.is_empty());
        a.observe(other.cta(0).slot(1), 3);
        assert_eq!(a.seen.sparse.len(), 1);
        a.see(&AgentSet::from_range(other.range()));
        assert!(a.seen.sparse.is_empty() && a.seen.partial.is_empty());
        assert!(a.is_after(foreign.agent(), 77, 9, 0));
        assert!(a.is_fenced(foreign.agent(), 77, 9), "a launch boundary orders all proxies");
    }

    #[test]
    fn the_proxy_fence_may_stand_on_either_side_of_the_barrier() {
        for writer_fences in [true, false] {
            let (mut writer, mut issuer) = (clock(0, 0), clock(0, 1));
            if writer_fences {
                writer.fence_proxy_async(ALL_LANES);
            }
            let snapshot = writer.release(ALL_LANES);
            issuer.acquire(&snapshot);
            if !writer_fences {
                assert!(!issuer.is_fenced(writer.agent(), 1, 0));
                issuer.fence_proxy_async(1);
            }
            assert!(issuer.is_fenced(writer.agent(), 1, 0));
            assert_eq!(knows(&issuer, &writer, 2, 0), writer_fences);
            assert!(!issuer.is_fenced(writer.agent(), 2, 0), "a write after the writer's fence is not covered");
        }
    }

    #[test]
    fn many_foreign_agents_merge_in_order() {
        let launch = LaunchAgents { first: 0, ctas: 40, warps: 2, device: 0, cluster: 1 };
        let mut snapshot = Snapshot::new();
        let mut clocks: Vec<Clock> =
            (0..80).map(|i| Clock::new(launch.cta(i * 7 % 40), i / 40, AgentSet::new())).collect();
        for clock in &mut clocks {
            clock.release_into(ALL_LANES, &mut snapshot);
        }
        for i in 0..80 {
            clocks[i].acquire(&snapshot);
            assert!(clocks[i].seen.sparse.is_sorted());
            for j in 0..80 {
                assert!(clocks[i].is_after(clocks[j].agent(), 1, 4, 0));
                assert!(!clocks[i].is_after(clocks[j].agent(), 2, 4, 0));
            }
        }
    }
}

//! Numbering of the agents that touch memory, and sets of them.
//!
//! Agents are numbered across all launches between two drains of the machine. A launch owns a contiguous range, cut into
//! one block per CTA:
//!
//! | agents of a CTA | what they are |
//! |---|---|
//! | `0 .. warps` | its warps |
//! | `warps .. warps + ASYNC_SLOTS` | its asynchronous queues: one per mbarrier, bulk-copy queue, or MMA queue |
//!
//! A queue completes its batches (phases, groups) in order, so one epoch per queue describes what has completed.

use std::ops::Range;
use std::sync::Arc;

/// Asynchronous queues that a CTA may use.
pub const ASYNC_SLOTS: u32 = 256;

/// A warp or an asynchronous queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AgentId(pub u32);

/// The agents of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchAgents {
    /// First agent.
    pub first: u32,
    /// Number of CTAs.
    pub ctas: u32,
    /// Warps per CTA.
    pub warps: u32,
    /// Device that executes the launch, below 16.
    pub device: u8,
    /// CTAs of a cluster, consecutive ones; 1 without clusters.
    pub cluster: u32,
}

/// What an agent is within its launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Actor {
    /// A warp of the CTA.
    Warp(u32),
    /// An asynchronous queue of the CTA.
    Slot(u32),
}

impl LaunchAgents {
    /// Agents that a launch of this size needs, `None` if they cannot be numbered.
    pub fn count(ctas: u32, warps: u32) -> Option<u32> {
        warps.checked_add(ASYNC_SLOTS)?.checked_mul(ctas)
    }

    /// All agents.
    pub fn range(&self) -> Range<u32> {
        self.first..self.first + self.ctas * (self.warps + ASYNC_SLOTS)
    }

    /// The agents of CTA number `cta` (linear).
    pub fn cta(&self, cta: u32) -> CtaAgents {
        debug_assert!(cta < self.ctas);
        let range = self.range();
        let stride = self.warps + ASYNC_SLOTS;
        let cluster_first = self.first + cta / self.cluster * self.cluster * stride;
        CtaAgents {
            first: self.first + cta * stride,
            cluster_first,
            cluster_end: cluster_first + self.cluster * stride,
            warps: self.warps,
            device: self.device,
            launch_first: range.start,
            launch_end: range.end,
        }
    }

    /// CTA and role of an agent, `None` if it belongs to another launch.
    pub fn locate(&self, agent: AgentId) -> Option<(u32, Actor)> {
        if !self.range().contains(&agent.0) {
            return None;
        }
        let stride = self.warps + ASYNC_SLOTS;
        let (cta, index) = ((agent.0 - self.first) / stride, (agent.0 - self.first) % stride);
        let actor = if index < self.warps { Actor::Warp(index) } else { Actor::Slot(index - self.warps) };
        Some((cta, actor))
    }
}

/// The agents of one CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CtaAgents {
    /// First agent: warp 0.
    pub first: u32,
    /// Number of warps.
    pub warps: u32,
    /// Device that executes the CTA, below 16.
    pub device: u8,
    /// First agent of the cluster.
    pub cluster_first: u32,
    /// End of the cluster's agents.
    pub cluster_end: u32,
    /// First agent of the launch.
    pub launch_first: u32,
    /// End of the launch's agents.
    pub launch_end: u32,
}

impl CtaAgents {
    /// Warp `warp`.
    pub fn warp(&self, warp: u32) -> AgentId {
        debug_assert!(warp < self.warps);
        AgentId(self.first + warp)
    }

    /// Asynchronous queue `slot`, below [`ASYNC_SLOTS`].
    pub fn slot(&self, slot: u32) -> AgentId {
        assert!(slot < ASYNC_SLOTS, "a CTA has {ASYNC_SLOTS} asynchronous queues");
        AgentId(self.first + self.warps + slot)
    }

    /// Whether the agent belongs to this CTA.
    pub fn contains(&self, agent: AgentId) -> bool {
        agent.0.wrapping_sub(self.first) < self.warps + ASYNC_SLOTS
    }

    /// The agent whose only epoch, 1, stands for the CTA's start: the last queue, which nothing else uses.
    pub fn start(&self) -> AgentId {
        self.slot(ASYNC_SLOTS - 1)
    }

    /// Whether the agent belongs to this CTA's cluster.
    pub fn cluster_contains(&self, agent: AgentId) -> bool {
        (self.cluster_first..self.cluster_end).contains(&agent.0)
    }

    /// Whether the agent belongs to this CTA's launch.
    pub fn launch_contains(&self, agent: AgentId) -> bool {
        (self.launch_first..self.launch_end).contains(&agent.0)
    }
}

/// A set of agents as disjoint ascending ranges; in practice a set of whole launches. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentSet {
    ranges: Option<Arc<Vec<Range<u32>>>>,
}

impl AgentSet {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// One range.
    pub fn from_range(range: Range<u32>) -> Self {
        Self::from_ranges(vec![range])
    }

    fn from_ranges(mut ranges: Vec<Range<u32>>) -> Self {
        ranges.retain(|range| !range.is_empty());
        ranges.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u32>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        Self { ranges: (!merged.is_empty()).then(|| Arc::new(merged)) }
    }

    fn ranges(&self) -> &[Range<u32>] {
        self.ranges.as_ref().map_or(&[], |ranges| ranges)
    }

    /// Whether nothing is in the set.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_none()
    }

    /// Whether the agent is in the set.
    #[inline]
    pub fn contains(&self, agent: AgentId) -> bool {
        match self.ranges() {
            [] => false,
            [only] => only.contains(&agent.0),
            ranges => {
                let after = ranges.partition_point(|range| range.start <= agent.0);
                after > 0 && agent.0 < ranges[after - 1].end
            }
        }
    }

    /// Whether every agent of `other` is in the set.
    pub fn is_superset(&self, other: &AgentSet) -> bool {
        self.same(other)
            || other.ranges().iter().all(|range| {
                let ranges = self.ranges();
                let after = ranges.partition_point(|mine| mine.start <= range.start);
                after > 0 && range.end <= ranges[after - 1].end
            })
    }

    fn same(&self, other: &AgentSet) -> bool {
        match (&self.ranges, &other.ranges) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        }
    }

    /// Adds the agents of `other`; returns whether the set grew.
    pub fn unite(&mut self, other: &AgentSet) -> bool {
        if self.is_superset(other) {
            return false;
        }
        *self = if other.is_superset(self) {
            other.clone()
        } else {
            Self::from_ranges([self.ranges(), other.ranges()].concat())
        };
        true
    }

    /// Keeps only the agents that are also in `other`.
    pub fn intersect(&mut self, other: &AgentSet) {
        if other.is_superset(self) {
            return;
        }
        let mut both = Vec::new();
        for a in self.ranges() {
            for b in other.ranges() {
                both.push(a.start.max(b.start)..a.end.min(b.end));
            }
        }
        *self = Self::from_ranges(both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn agents_locate_themselves() {
        let launch = LaunchAgents { first: 1000, ctas: 3, warps: 4, device: 1, cluster: 1 };
        assert_eq!(launch.range().len() as u32, LaunchAgents::count(3, 4).unwrap());
        let cta = launch.cta(2);
        assert_eq!(launch.locate(cta.warp(3)), Some((2, Actor::Warp(3))));
        assert_eq!(launch.locate(cta.slot(5)), Some((2, Actor::Slot(5))));
        assert_eq!(launch.locate(AgentId(launch.range().end)), None);
        assert!(cta.contains(cta.slot(ASYNC_SLOTS - 1)) && !cta.contains(launch.cta(1).slot(ASYNC_SLOTS - 1)));
        assert!(cta.launch_contains(launch.cta(0).warp(0)) && !cta.launch_contains(AgentId(999)));
        assert_eq!(LaunchAgents::count(u32::MAX, 32), None);
    }

    proptest::proptest! {
        #[test]
        fn sets_behave_like_sets(a: Vec<(u8, u8)>, b: Vec<(u8, u8)>) {
            let model = |v: &[(u8, u8)]| -> BTreeSet<u32> {
                v.iter().flat_map(|(s, n)| u32::from(*s)..u32::from(*s) + u32::from(*n % 20)).collect()
            };
            let make = |v: &[(u8, u8)]| {
                let mut set = AgentSet::new();
                for (s, n) in v {
                    set.unite(&AgentSet::from_range(u32::from(*s)..u32::from(*s) + u32::from(*n % 20)));
                }
                set
            };
            let (ma, mb, sa, sb) = (model(&a), model(&b), make(&a), make(&b));
            let agree = |set: &AgentSet, model: &BTreeSet<u32>| (0..300).all(|i| set.contains(AgentId(i)) == model.contains(&i));
            assert!(agree(&sa, &ma));
            assert_eq!(sa.is_superset(&sb), ma.is_superset(&mb));
            let mut union = sa.clone();
            assert_eq!(union.unite(&sb), !ma.is_superset(&mb));
            assert!(agree(&union, &(&ma | &mb)));
            let mut both = sa.clone();
            both.intersect(&sb);
            assert!(agree(&both, &(&ma & &mb)));
            assert_eq!(both.is_empty(), (&ma & &mb).is_empty());
        }
    }
}

//! Order of the commands in streams: when a launch may start, and which launches its CTAs see entirely.
//!
//! A plain command starts when everything before it in its stream, and every event waited for, is complete; it sees all
//! of that. A launch with programmatic overlap may start when every CTA of its predecessor (the kernel directly before it
//! in the stream) has executed `griddepcontrol.launch_dependents` or ended, and then it sees only
//!
//! - at its start: what all CTAs of the predecessor saw when they triggered or ended, and the events waited for;
//! - after `griddepcontrol.wait`, which waits for the predecessor to complete: also the predecessor itself, and what any of
//!   its CTAs had seen by its end.
//!
//! The trap in this: the wait is not transitive by itself. If kernel 2 triggers and never waits, kernel 3 may pass its wait
//! while kernel 1 still runs, and does not see its results.
//!
//! Host commands (writes, fills, copies) are launches of one CTA without overlap. What is complete is not the same as what
//! is visible: visibility never depends on the schedule, so that a missing wait is found in every schedule.

use crate::race::{AgentId, AgentSet, LaunchAgents};

/// A stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u32);

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub u32);

/// A launch, or a host command that touches memory, numbered in the order of enqueueing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaunchId(pub u32);

#[derive(Debug)]
struct LaunchState {
    agents: LaunchAgents,
    /// Predecessor that this launch overlaps with; `None` for a plain start.
    overlapped: Option<LaunchId>,
    /// Launches that must be complete before the start.
    after: Vec<LaunchId>,
    /// Seen at the start, before what the predecessor's CTAs contribute.
    base: AgentSet,
    /// This launch and everything that is ordered before it by streams and events alone.
    through: AgentSet,
    /// CTAs that have neither triggered nor ended.
    untriggered: u32,
    /// CTAs that have not ended.
    running: u32,
    triggered: Vec<bool>,
    /// Intersection over the CTAs that have triggered or ended; `None` before the first.
    seen_by_all: Option<AgentSet>,
    /// Union over the CTAs that have ended.
    seen_by_any: AgentSet,
}

#[derive(Debug, Default)]
struct Stream {
    last: Option<LaunchId>,
    /// Everything enqueued so far, and everything waited for.
    through: AgentSet,
    /// All of the stream's commands and the launches waited for that a plain command must follow.
    tails: Vec<LaunchId>,
    /// Events waited for since the last command: launches that the next one must follow, and what it then sees.
    waited: Vec<LaunchId>,
    waited_through: AgentSet,
}

#[derive(Clone, Debug, Default)]
struct Event {
    tails: Vec<LaunchId>,
    through: AgentSet,
}

/// All streams of the machine, and the numbering of agents. See the module's documentation.
#[derive(Debug, Default)]
pub struct Streams {
    streams: Vec<Stream>,
    events: Vec<Event>,
    launches: Vec<LaunchState>,
    next_agent: u32,
}

impl Streams {
    /// No streams.
    pub fn new() -> Self {
        Self::default()
    }

    /// A new, empty stream.
    pub fn create_stream(&mut self) -> StreamId {
        self.streams.push(Stream::default());
        StreamId(self.streams.len() as u32 - 1)
    }

    /// A new event, which counts as complete until it is recorded.
    pub fn create_event(&mut self) -> EventId {
        self.events.push(Event::default());
        EventId(self.events.len() as u32 - 1)
    }

    /// Enqueues a launch of `ctas` CTAs of `warps` warps. `overlap`: it may start early against the kernel before it;
    /// without one it starts plainly. `None` if the agents cannot be numbered any more: drain and [`Streams::reset`].
    ///
    /// # Panics
    /// If the launch has no CTA.
    pub fn launch(&mut self, stream: StreamId, ctas: u32, warps: u32, device: u8, overlap: bool) -> Option<LaunchId> {
        assert!(ctas > 0, "a launch has a CTA");
        let count = LaunchAgents::count(ctas, warps)?;
        let agents = LaunchAgents { first: self.next_agent, ctas, warps, device, cluster: 1 };
        self.next_agent = self.next_agent.checked_add(count)?;
        let id = LaunchId(self.launches.len() as u32);

        let own = &mut self.streams[stream.0 as usize];
        let overlapped = own.last.filter(|_| overlap);
        let waited = std::mem::take(&mut own.waited);
        let waited_through = std::mem::take(&mut own.waited_through);
        let (after, base) = match overlapped {
            Some(_) => (waited, waited_through),
            None => (own.tails.clone(), own.through.clone()),
        };
        own.through.unite(&AgentSet::from_range(agents.range()));
        if overlapped.is_none() {
            // Nothing can be complete before what this launch itself follows.
            own.tails.clear();
        }
        own.tails.push(id);
        own.last = Some(id);
        let through = own.through.clone();
        self.launches.push(LaunchState {
            agents,
            overlapped,
            after,
            base,
            through,
            untriggered: ctas,
            running: ctas,
            triggered: vec![false; ctas as usize],
            seen_by_all: None,
            seen_by_any: AgentSet::new(),
        });
        Some(id)
    }

    /// Enqueues a host command (write, fill or copy): a launch of one CTA of one warp, in plain order, with which the
    /// next launch cannot overlap. `None` as for [`Streams::launch`].
    pub fn host_command(&mut self, stream: StreamId, device: u8) -> Option<LaunchId> {
        let id = self.launch(stream, 1, 1, device, false)?;
        self.streams[stream.0 as usize].last = None;
        Some(id)
    }

    /// Records in `event` everything enqueued in `stream` so far.
    pub fn record(&mut self, stream: StreamId, event: EventId) {
        let stream = &self.streams[stream.0 as usize];
        self.events[event.0 as usize] = Event { tails: stream.tails.clone(), through: stream.through.clone() };
    }

    /// Makes later commands of `stream` wait for what `event` recorded last.
    pub fn wait(&mut self, stream: StreamId, event: EventId) {
        let event = &self.events[event.0 as usize];
        let stream = &mut self.streams[stream.0 as usize];
        for tails in [&mut stream.tails, &mut stream.waited] {
            tails.extend(&event.tails);
            tails.sort();
            tails.dedup();
        }
        stream.through.unite(&event.through);
        stream.waited_through.unite(&event.through);
    }

    fn state(&self, launch: LaunchId) -> &LaunchState {
        &self.launches[launch.0 as usize]
    }

    /// The agents of a launch.
    pub fn agents(&self, launch: LaunchId) -> LaunchAgents {
        self.state(launch).agents
    }

    /// The launch that an agent belongs to.
    pub fn launch_of(&self, agent: AgentId) -> Option<LaunchId> {
        let after = self.launches.partition_point(|launch| launch.agents.first <= agent.0);
        let at = after.checked_sub(1)?;
        self.launches[at].agents.range().contains(&agent.0).then_some(LaunchId(at as u32))
    }

    /// Whether all CTAs of a launch have ended.
    pub fn is_complete(&self, launch: LaunchId) -> bool {
        self.state(launch).running == 0
    }

    /// Whether CTAs of a launch may start.
    pub fn may_start(&self, launch: LaunchId) -> bool {
        let state = self.state(launch);
        // A predecessor has triggered only if it started, and so did its own.
        state.after.iter().all(|before| self.is_complete(*before))
            && state.overlapped.is_none_or(|before| self.state(before).untriggered == 0)
    }

    /// What a CTA of the launch sees when it starts; call it once [`Streams::may_start`] holds.
    pub fn start_view(&self, launch: LaunchId) -> AgentSet {
        debug_assert!(self.may_start(launch));
        let state = self.state(launch);
        let mut view = state.base.clone();
        if let Some(before) = state.overlapped {
            let inherited =
                self.state(before).seen_by_all.as_ref().expect("every CTA of the predecessor has triggered");
            view.unite(inherited);
        }
        // What they had acquired from other devices or streams.
        for before in &state.after {
            view.unite(&self.state(*before).seen_by_any);
        }
        view
    }

    /// A CTA executes `griddepcontrol.launch_dependents` where its warp sees `view` ([`crate::race::Clock::visible`]);
    /// only the first time counts. Returns whether this was the last CTA of the launch to do so.
    pub fn trigger(&mut self, launch: LaunchId, cta: u32, view: &AgentSet) -> bool {
        let state = &mut self.launches[launch.0 as usize];
        if std::mem::replace(&mut state.triggered[cta as usize], true) {
            return false;
        }
        state.untriggered -= 1;
        match &mut state.seen_by_all {
            Some(seen) => seen.intersect(view),
            none => *none = Some(view.clone()),
        }
        state.untriggered == 0
    }

    /// A CTA ends, having seen `view` (the union over its warps), which triggers if it had not. Returns whether the launch
    /// is complete.
    pub fn end_cta(&mut self, launch: LaunchId, cta: u32, view: &AgentSet) -> bool {
        self.trigger(launch, cta, view);
        let state = &mut self.launches[launch.0 as usize];
        state.seen_by_any.unite(view);
        state.running -= 1;
        state.running == 0
    }

    /// Whether `griddepcontrol.wait` passes in a launch; in a plain launch it always does.
    pub fn wait_passes(&self, launch: LaunchId) -> bool {
        self.state(launch).overlapped.is_none_or(|before| self.is_complete(before))
    }

    /// What `griddepcontrol.wait` adds to what a CTA of the launch sees; call it once [`Streams::wait_passes`] holds.
    pub fn wait_view(&self, launch: LaunchId) -> AgentSet {
        debug_assert!(self.wait_passes(launch));
        let Some(before) = self.state(launch).overlapped else { return AgentSet::new() };
        let before = self.state(before);
        let mut view = AgentSet::from_range(before.agents.range());
        view.unite(&before.seen_by_any);
        view
    }

    /// This launch and everything that streams and events order before it: what the host sees after waiting for the
    /// stream at this point.
    pub fn through(&self, launch: LaunchId) -> &AgentSet {
        &self.state(launch).through
    }

    /// Forgets all launches once every stream has drained: the host has seen everything, so launches and agents are
    /// numbered from 0 again, and all shadows must be cleared. Streams and events stay.
    ///
    /// # Panics
    /// If a launch is not complete.
    pub fn reset(&mut self) {
        assert!(self.launches.iter().all(|launch| launch.running == 0), "every stream has drained");
        self.launches.clear();
        self.next_agent = 0;
        self.streams.iter_mut().for_each(|stream| *stream = Stream::default());
        self.events.iter_mut().for_each(|event| *event = Event::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(streams: &Streams, launch: LaunchId) -> AgentSet {
        AgentSet::from_range(streams.agents(launch).range())
    }

    fn union(sets: &[AgentSet]) -> AgentSet {
        sets.iter().fold(AgentSet::new(), |mut all, set| {
            all.unite(set);
            all
        })
    }

    /// One CTA, one warp.
    fn tiny(streams: &mut Streams, stream: StreamId, overlap: bool) -> LaunchId {
        streams.launch(stream, 1, 1, 0, overlap).unwrap()
    }

    fn end(streams: &mut Streams, launch: LaunchId) {
        let view = streams.start_view(launch);
        assert!(streams.end_cta(launch, 0, &view));
    }

    #[test]
    fn plain_commands_follow_each_other_and_see_all() {
        let mut s = Streams::new();
        let stream = s.create_stream();
        let (a, w) = (tiny(&mut s, stream, false), s.host_command(stream, 0).unwrap());
        let b = tiny(&mut s, stream, false);
        assert_eq!([a, w, b].map(|l| s.may_start(l)), [true, false, false]);
        assert!(s.start_view(a).is_empty());
        end(&mut s, a);
        assert_eq!([w, b].map(|l| s.may_start(l)), [true, false]);
        end(&mut s, w);
        assert_eq!(s.start_view(b), union(&[whole(&s, a), whole(&s, w)]));
        assert!(s.wait_passes(b) && s.wait_view(b).is_empty(), "the wait of a plain launch does nothing");
        assert_eq!(*s.through(b), union(&[whole(&s, a), whole(&s, w), whole(&s, b)]));
    }

    #[test]
    fn a_trigger_in_a_plain_launch_does_not_let_a_plain_launch_start() {
        let mut s = Streams::new();
        let stream = s.create_stream();
        let (a, b) = (tiny(&mut s, stream, false), tiny(&mut s, stream, false));
        s.trigger(a, 0, &AgentSet::new());
        assert!(!s.may_start(b));
    }

    #[test]
    fn an_overlapped_launch_starts_once_all_ctas_triggered_or_ended() {
        let mut s = Streams::new();
        let stream = s.create_stream();
        let a = s.launch(stream, 3, 2, 0, false).unwrap();
        let b = tiny(&mut s, stream, true);
        let view = s.start_view(a);
        assert!(!s.trigger(a, 0, &view) && !s.trigger(a, 0, &view), "a CTA counts once");
        assert!(!s.end_cta(a, 1, &view));
        assert!(!s.may_start(b));
        assert!(s.trigger(a, 2, &view));
        assert!(s.may_start(b) && !s.wait_passes(b));
        assert!(s.start_view(b).is_empty(), "triggering publishes nothing of the launch itself");
        s.end_cta(a, 0, &view);
        assert!(s.end_cta(a, 2, &view));
        assert!(s.start_view(b).is_empty(), "nor does completion without a wait");
        assert!(s.wait_passes(b));
        assert_eq!(s.wait_view(b), whole(&s, a));
    }

    #[test]
    fn what_all_ctas_saw_when_they_triggered_is_inherited() {
        let mut s = Streams::new();
        let stream = s.create_stream();
        let zero = tiny(&mut s, stream, false);
        let a = tiny(&mut s, stream, false);
        let b = s.launch(stream, 2, 1, 0, true).unwrap();
        let c = tiny(&mut s, stream, true);
        end(&mut s, zero);
        let a_view = s.start_view(a);
        s.trigger(a, 0, &a_view);
        let early = s.start_view(b);
        assert_eq!(early, whole(&s, zero), "a plain launch passes on what it saw at its start");
        s.end_cta(a, 0, &a_view);
        let waited = union(&[early.clone(), s.wait_view(b)]);
        assert!(waited.is_superset(&whole(&s, a)));
        // CTA 0 triggers before its wait, CTA 1 after it.
        s.trigger(b, 0, &early);
        s.trigger(b, 1, &waited);
        assert_eq!(s.start_view(c), whole(&s, zero), "the intersection");
        s.end_cta(b, 0, &early);
        s.end_cta(b, 1, &waited);
        let view = union(&[s.start_view(c), s.wait_view(c)]);
        assert_eq!(
            view,
            union(&[whole(&s, zero), whole(&s, a), whole(&s, b)]),
            "its end implies what any CTA waited for"
        );
    }

    #[test]
    fn a_middle_launch_that_never_waits_breaks_the_chain() {
        let mut s = Streams::new();
        let stream = s.create_stream();
        let (a, b, c) = (tiny(&mut s, stream, false), tiny(&mut s, stream, true), tiny(&mut s, stream, true));
        let d = tiny(&mut s, stream, false);
        let nothing = AgentSet::new();
        s.trigger(a, 0, &nothing);
        s.trigger(b, 0, &s.start_view(b));
        s.end_cta(b, 0, &s.start_view(b));
        assert!(s.may_start(c) && s.wait_passes(c) && !s.is_complete(a), "its wait passes while the first still runs");
        let view = union(&[s.start_view(c), s.wait_view(c)]);
        assert_eq!(view, whole(&s, b));
        s.end_cta(c, 0, &view);
        assert!(!s.may_start(d), "a plain launch follows the whole stream");
        s.end_cta(a, 0, &nothing);
        assert!(s.may_start(d));
        assert_eq!(s.start_view(d), union(&[whole(&s, a), whole(&s, b), whole(&s, c)]));
    }

    #[test]
    fn visibility_does_not_depend_on_the_schedule() {
        let mut s = Streams::new();
        let stream = s.create_stream();
        let (a, b, c) = (tiny(&mut s, stream, false), tiny(&mut s, stream, true), tiny(&mut s, stream, true));
        for launch in [a, b] {
            end(&mut s, launch);
        }
        assert!(s.is_complete(a));
        assert_eq!(union(&[s.start_view(c), s.wait_view(c)]), whole(&s, b), "complete, but not ordered");
    }

    #[test]
    fn host_commands_and_the_start_of_a_stream_cannot_be_overlapped() {
        let mut s = Streams::new();
        let stream = s.create_stream();
        let a = tiny(&mut s, stream, true);
        let w = s.host_command(stream, 0).unwrap();
        let b = tiny(&mut s, stream, true);
        assert!(s.may_start(a));
        s.trigger(a, 0, &AgentSet::new());
        assert!(!s.may_start(w));
        s.end_cta(a, 0, &AgentSet::new());
        assert!(s.may_start(w) && !s.may_start(b));
        end(&mut s, w);
        assert_eq!(s.start_view(b), union(&[whole(&s, a), whole(&s, w)]));
    }

    #[test]
    fn events_order_streams() {
        let mut s = Streams::new();
        let (x, y) = (s.create_stream(), s.create_stream());
        let (early, late) = (s.create_event(), s.create_event());
        let a = tiny(&mut s, x, false);
        s.record(x, early);
        let b = tiny(&mut s, x, false);
        s.wait(y, late);
        let c = tiny(&mut s, y, false);
        assert!(s.may_start(c), "an event that was not recorded does not hold");
        s.wait(y, early);
        s.record(x, early);
        let d = tiny(&mut s, y, false);
        end(&mut s, c);
        assert!(!s.may_start(d));
        end(&mut s, a);
        assert!(s.may_start(d), "what was recorded at the time of the wait counts");
        assert_eq!(s.start_view(d), union(&[whole(&s, a), whole(&s, c)]));
        let _ = b;
    }

    #[test]
    fn an_event_carries_the_whole_stream_past_overlapped_launches() {
        let mut s = Streams::new();
        let (x, y) = (s.create_stream(), s.create_stream());
        let event = s.create_event();
        let (a, b) = (tiny(&mut s, x, false), tiny(&mut s, x, true));
        s.record(x, event);
        s.wait(y, event);
        let c = tiny(&mut s, y, false);
        let nothing = AgentSet::new();
        s.trigger(a, 0, &nothing);
        s.end_cta(b, 0, &nothing);
        assert!(!s.may_start(c));
        s.end_cta(a, 0, &nothing);
        assert_eq!(s.start_view(c), union(&[whole(&s, a), whole(&s, b)]));
    }

    #[test]
    fn an_overlapped_launch_sees_the_events_it_waits_for() {
        let mut s = Streams::new();
        let (x, y) = (s.create_stream(), s.create_stream());
        let event = s.create_event();
        let other = tiny(&mut s, y, false);
        s.record(y, event);
        let a = tiny(&mut s, x, false);
        s.wait(x, event);
        let (b, c) = (tiny(&mut s, x, true), tiny(&mut s, x, true));
        s.trigger(a, 0, &AgentSet::new());
        assert!(!s.may_start(b));
        end(&mut s, other);
        assert!(s.may_start(b) && !s.is_complete(a));
        let view = s.start_view(b);
        assert_eq!(view, whole(&s, other));
        s.trigger(b, 0, &view);
        assert!(s.may_start(c));
        assert_eq!(s.start_view(c), view, "inherited, not waited for again");
    }

    #[test]
    fn agents_lead_back_to_their_launch() {
        let mut s = Streams::new();
        let stream = s.create_stream();
        let (a, b) = (tiny(&mut s, stream, false), s.launch(stream, 4, 8, 1, false).unwrap());
        assert_eq!(s.launch_of(s.agents(a).cta(0).slot(0)), Some(a));
        assert_eq!(s.launch_of(s.agents(b).cta(3).warp(7)), Some(b));
        assert_eq!(s.launch_of(AgentId(s.agents(b).range().end)), None);
        assert_eq!(s.launch(stream, u32::MAX / 8, 8, 0, false), None);
    }

    #[test]
    fn a_reset_keeps_streams_and_forgets_order() {
        let mut s = Streams::new();
        let (x, event) = (s.create_stream(), s.create_event());
        let a = tiny(&mut s, x, false);
        s.record(x, event);
        end(&mut s, a);
        s.reset();
        s.wait(x, event);
        let b = tiny(&mut s, x, true);
        assert_eq!((b, s.agents(b).first), (LaunchId(0), 0));
        assert!(s.may_start(b) && s.start_view(b).is_empty());
    }
}

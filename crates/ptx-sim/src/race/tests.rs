//! Litmus tests of the detector.

mod random;

use ptx::{Scope, Sem};

use super::*;

/// Two CTAs of two warps on device 0.
const LAUNCH: LaunchAgents = LaunchAgents { first: 100, ctas: 2, warps: 2, device: 0, cluster: 1 };
/// On device 1.
const PEER: LaunchAgents = LaunchAgents { first: 10_000, ctas: 1, warps: 2, device: 1, cluster: 1 };
const WEAK: Sem = Sem::Weak;

fn clock(cta: u32, warp: u32) -> Clock {
    Clock::new(LAUNCH.cta(cta), warp, AgentSet::new())
}

fn peer() -> Clock {
    Clock::new(PEER.cta(0), 0, AgentSet::new())
}

/// Memory in which lane 0 of a warp accesses words.
#[derive(Default)]
struct Memory(Shadow);

type Outcome = Result<(), Missing>;

impl Memory {
    fn load(&mut self, clock: &mut Clock, at: u64, sem: Sem) -> Outcome {
        let who = Access::generic(clock, 0, 1, sem);
        self.0.check_read(at, 4, &who, clock).map_err(|race| race.missing)?;
        self.0.sync_load(at, 4, sem, clock);
        Ok(())
    }

    fn store(&mut self, clock: &mut Clock, at: u64, sem: Sem) -> Outcome {
        let who = Access::generic(clock, 0, 2, sem);
        self.0.check_write(at, 4, &who, clock).map_err(|race| race.missing)?;
        self.0.sync_store(at, 4, sem, 0, clock);
        Ok(())
    }

    fn atomic(&mut self, clock: &mut Clock, at: u64, sem: Sem) -> Outcome {
        let who = Access::generic(clock, 0, 3, sem);
        self.0.check_write(at, 4, &who, clock).map_err(|race| race.missing)?;
        self.0.sync_atomic(at, 4, sem, 0, clock);
        Ok(())
    }
}

const DATA: u64 = 0;
const FLAG: u64 = 64;

/// Writer stores data and `publish`es; reader `observe`s and loads the data.
fn message(
    mut reader: Clock,
    publish: impl Fn(&mut Memory, &mut Clock) -> Outcome,
    observe: impl Fn(&mut Memory, &mut Clock) -> Outcome,
) -> Outcome {
    let (mut memory, mut writer) = (Memory::default(), clock(0, 0));
    memory.store(&mut writer, DATA, WEAK)?;
    publish(&mut memory, &mut writer)?;
    observe(&mut memory, &mut reader)?;
    memory.load(&mut reader, DATA, WEAK)
}

#[test]
fn unordered_weak_accesses_race_unless_both_read() {
    let (mut a, mut b) = (clock(0, 0), clock(0, 1));
    let mut memory = Memory::default();
    memory.load(&mut a, 0, WEAK).unwrap();
    memory.load(&mut b, 0, WEAK).unwrap();
    assert_eq!(memory.store(&mut b, 0, WEAK), Err(Missing::Order));
    memory.store(&mut a, 8, WEAK).unwrap();
    assert_eq!(memory.load(&mut b, 8, WEAK), Err(Missing::Order));
    assert_eq!(memory.store(&mut b, 8, WEAK), Err(Missing::Order));
}

#[test]
fn who_follows_a_strong_read_follows_the_strong_write_that_it_took() {
    let sys = Sem::Relaxed(Scope::Sys);
    let setup = |store, load| {
        let (mut memory, mut reader) = (Memory::default(), clock(0, 0));
        memory.store(&mut peer(), DATA, store).unwrap();
        memory.load(&mut reader, DATA, load).unwrap();
        (memory, reader)
    };
    // The reader itself, and whom it hands over to; not a warp beside it.
    let (mut memory, mut reader) = setup(sys, sys);
    let (mut next, mut beside) = (clock(0, 1), clock(1, 0));
    assert_eq!(memory.load(&mut beside, DATA, WEAK), Err(Missing::Order));
    memory.load(&mut reader, DATA, WEAK).unwrap();
    next.acquire(&reader.release(ALL_LANES));
    memory.load(&mut next, DATA, WEAK).unwrap();
    memory.store(&mut next, DATA, WEAK).unwrap();
    // Other places of the writer are not covered.
    let (mut memory, mut reader) = (Memory::default(), clock(0, 0));
    let mut writer = peer();
    memory.store(&mut writer, FLAG, WEAK).unwrap();
    memory.store(&mut writer, DATA, sys).unwrap();
    memory.load(&mut reader, DATA, sys).unwrap();
    assert_eq!(memory.load(&mut reader, FLAG, WEAK), Err(Missing::Order));
    // The scope must hold both.
    let gpu = Sem::Relaxed(Scope::Gpu);
    let mut memory = Memory::default();
    memory.store(&mut clock(0, 0), DATA, gpu).unwrap();
    let mut reader = clock(1, 0);
    memory.load(&mut reader, DATA, sys).unwrap();
    memory.load(&mut reader, DATA, WEAK).unwrap();
    let mut memory = Memory::default();
    memory.store(&mut clock(0, 0), DATA, Sem::Relaxed(Scope::Cta)).unwrap();
    assert!(memory.load(&mut clock(1, 0), DATA, gpu).is_err());
}

#[test]
fn a_race_names_both_accesses() {
    let (a, b) = (clock(0, 1), clock(1, 0));
    let mut shadow = Shadow::new();
    shadow.check_write(6, 8, &Access::generic(&a, 3, 17, WEAK), &a).unwrap();
    let race = shadow.check_read(12, 4, &Access::generic(&b, 9, 23, Sem::Relaxed(Scope::Gpu)), &b).unwrap_err();
    let first =
        Party { agent: a.agent(), lane: Some(3), instruction: 17, is_write: true, strong: None, proxy: Proxy::Generic };
    let second = Party {
        agent: b.agent(),
        lane: Some(9),
        instruction: 23,
        is_write: false,
        strong: Some(Scope::Gpu),
        proxy: Proxy::Generic,
    };
    assert_eq!(*race, Race { offset: 12, first, second, missing: Missing::Order });
    assert_eq!(
        race.to_string(),
        "data race at byte 12: (1) weak write by agent 101 lane 3 at instruction 17; \
         (2) strong read by agent 358 lane 9 at instruction 23; nothing orders them"
    );
    let race = shadow.check_write(0, 16, &Access::generic(&b, 9, 23, WEAK), &b).unwrap_err();
    assert_eq!(race.offset, 6, "the first common byte");
}

#[test]
fn message_passing_needs_a_release_and_an_acquire() {
    let release = |m: &mut Memory, c: &mut Clock| m.store(c, FLAG, Sem::Release(Scope::Gpu));
    let relaxed = |m: &mut Memory, c: &mut Clock| m.store(c, FLAG, Sem::Relaxed(Scope::Gpu));
    let acquire = |m: &mut Memory, c: &mut Clock| m.load(c, FLAG, Sem::Acquire(Scope::Gpu));
    let plain = |m: &mut Memory, c: &mut Clock| m.load(c, FLAG, Sem::Relaxed(Scope::Gpu));
    assert_eq!(message(clock(1, 0), release, acquire), Ok(()));
    assert_eq!(message(clock(1, 0), release, plain), Err(Missing::Order));
    assert_eq!(message(clock(1, 0), relaxed, acquire), Err(Missing::Order));
}

#[test]
fn fences_turn_relaxed_accesses_into_releases_and_acquires() {
    let fenced_store = |m: &mut Memory, c: &mut Clock| {
        c.fence(Scope::Gpu, 1);
        m.store(c, FLAG, Sem::Volatile)
    };
    let fenced_load = |m: &mut Memory, c: &mut Clock| {
        m.load(c, FLAG, Sem::Volatile)?;
        c.fence(Scope::Gpu, 1);
        Ok(())
    };
    let late_fence = |m: &mut Memory, c: &mut Clock| {
        m.store(c, FLAG, Sem::Volatile)?;
        c.fence(Scope::Gpu, 1);
        Ok(())
    };
    let early_fence = |m: &mut Memory, c: &mut Clock| {
        c.fence(Scope::Gpu, 1);
        m.load(c, FLAG, Sem::Volatile)
    };
    assert_eq!(message(clock(1, 0), fenced_store, fenced_load), Ok(()));
    assert_eq!(message(clock(1, 0), late_fence, fenced_load), Err(Missing::Order));
    assert_eq!(message(clock(1, 0), fenced_store, early_fence), Err(Missing::Order));
    assert_eq!(message(peer(), fenced_store, fenced_load), Err(Missing::Order), "gpu-scope fences across devices");
}

#[test]
fn what_follows_a_fence_is_not_published() {
    let publish = |m: &mut Memory, c: &mut Clock| {
        c.fence(Scope::Gpu, 1);
        m.store(c, DATA, WEAK)?;
        m.store(c, FLAG, Sem::Relaxed(Scope::Gpu))
    };
    let acquire = |m: &mut Memory, c: &mut Clock| m.load(c, FLAG, Sem::Acquire(Scope::Gpu));
    assert_eq!(message(clock(1, 0), publish, acquire), Err(Missing::Order));
}

#[test]
fn another_lanes_fence_does_not_count() {
    let publish = |m: &mut Memory, c: &mut Clock| {
        c.fence(Scope::Gpu, 1 << 5);
        m.store(c, FLAG, Sem::Relaxed(Scope::Gpu))
    };
    let acquire = |m: &mut Memory, c: &mut Clock| m.load(c, FLAG, Sem::Acquire(Scope::Gpu));
    assert_eq!(message(clock(1, 0), publish, acquire), Err(Missing::Order));
}

#[test]
fn scopes_must_include_both_parties() {
    use Scope::{Cta, Gpu, Sys};
    let same_cta = || clock(0, 1);
    let same_device = || clock(1, 0);
    for (reader, needed) in [(same_cta as fn() -> Clock, Cta), (same_device, Gpu), (peer, Sys)] {
        for released in [Cta, Gpu, Sys] {
            for acquired in [Cta, Gpu, Sys] {
                let outcome = message(
                    reader(),
                    |m, c| m.store(c, FLAG, Sem::Release(released)),
                    |m, c| m.load(c, FLAG, Sem::Acquire(acquired)),
                );
                let expected = if released.min(acquired) >= needed { Ok(()) } else { Err(Missing::Scope) };
                assert_eq!(outcome, expected, "{released:?} {acquired:?} {needed:?}");
            }
        }
    }
}

#[test]
fn strong_accesses_do_not_race_with_each_other_but_with_weak_ones() {
    let (mut a, mut b) = (clock(0, 0), clock(1, 0));
    let mut memory = Memory::default();
    memory.store(&mut a, FLAG, Sem::Volatile).unwrap();
    memory.load(&mut b, FLAG, Sem::Relaxed(Scope::Gpu)).unwrap();
    memory.atomic(&mut b, FLAG, Sem::Relaxed(Scope::Gpu)).unwrap();
    memory.atomic(&mut a, FLAG, Sem::Relaxed(Scope::Gpu)).unwrap();
    assert_eq!(memory.load(&mut b, FLAG, WEAK), Err(Missing::Order));
    assert_eq!(memory.store(&mut b, FLAG, WEAK), Err(Missing::Order));
    assert_eq!(memory.load(&mut b, FLAG, Sem::Relaxed(Scope::Cta)), Err(Missing::Scope));
}

#[test]
fn read_modify_writes_continue_a_release_sequence_and_stores_end_it() {
    let acquire = |m: &mut Memory, c: &mut Clock| m.load(c, FLAG, Sem::Acquire(Scope::Gpu));
    let release = Sem::Release(Scope::Gpu);
    let through = |by_third: fn(&mut Memory, &mut Clock) -> Outcome| {
        message(
            clock(1, 0),
            |m, c| {
                m.store(c, FLAG, release)?;
                by_third(m, &mut clock(1, 1))
            },
            acquire,
        )
    };
    assert_eq!(through(|m, c| m.atomic(c, FLAG, Sem::Relaxed(Scope::Gpu))), Ok(()));
    assert_eq!(through(|m, c| m.store(c, FLAG, Sem::Relaxed(Scope::Gpu))), Err(Missing::Order));
    assert_eq!(through(|m, c| m.store(c, FLAG, Sem::Release(Scope::Gpu))), Err(Missing::Order));
}

#[test]
fn a_counter_collects_what_every_arrival_released() {
    let (mut memory, mut last) = (Memory::default(), clock(1, 1));
    let mut others = [clock(0, 0), clock(0, 1), clock(1, 0)];
    for (i, other) in others.iter_mut().enumerate() {
        memory.store(other, 4 * i as u64, WEAK).unwrap();
        memory.atomic(other, FLAG, Sem::AcqRel(Scope::Gpu)).unwrap();
    }
    memory.atomic(&mut last, FLAG, Sem::AcqRel(Scope::Gpu)).unwrap();
    for i in 0..3 {
        memory.load(&mut last, 4 * i, WEAK).unwrap();
    }
    memory.load(&mut others[2], 0, WEAK).unwrap();
    assert_eq!(memory.load(&mut others[0], 8, WEAK), Err(Missing::Order), "it arrived before");
}

#[test]
fn a_weak_store_ends_what_a_flag_published() {
    let publish = |m: &mut Memory, c: &mut Clock| {
        m.store(c, FLAG, Sem::Release(Scope::Gpu))?;
        m.store(c, FLAG, WEAK)
    };
    let mut memory = Memory::default();
    let (mut writer, mut reader) = (clock(0, 0), clock(1, 0));
    publish(&mut memory, &mut writer).unwrap();
    memory.0.sync_load(FLAG, 4, Sem::Acquire(Scope::Gpu), &mut reader);
    assert!(!reader.is_after(writer.agent(), 1, 0, 0));
}

#[test]
fn a_vector_of_relaxed_words_publishes_in_each() {
    let (mut writer, mut reader) = (clock(0, 0), clock(1, 0));
    let mut memory = Memory::default();
    memory.store(&mut writer, DATA, WEAK).unwrap();
    writer.fence(Scope::Sys, 1);
    memory.0.sync_store(FLAG, 16, Sem::Volatile, 0, &mut writer);
    memory.0.sync_load(FLAG + 8, 8, Sem::Acquire(Scope::Gpu), &mut reader);
    memory.load(&mut reader, DATA, WEAK).unwrap();
}

#[test]
fn sync_is_skipped_only_where_it_does_nothing() {
    let (mut memory, mut c) = (Memory::default(), clock(0, 0));
    assert!(!memory.0.needs_sync(WEAK, &c) && !memory.0.needs_sync(Sem::Volatile, &c));
    assert!(memory.0.needs_sync(Sem::Release(Scope::Cta), &c));
    c.fence(Scope::Cta, ALL_LANES);
    assert!(memory.0.needs_sync(Sem::Volatile, &c) && !memory.0.needs_sync(WEAK, &c));
    memory.store(&mut c, FLAG, Sem::Volatile).unwrap();
    assert!(memory.0.needs_sync(WEAK, &c));
}

#[test]
fn barriers_join_all_participants() {
    let mut clocks = [clock(0, 0), clock(0, 1)];
    let mut memory = Memory::default();
    for round in 0..3 {
        for (i, c) in clocks.iter_mut().enumerate() {
            memory.store(c, 4 * ((i as u64 + round) % 2), WEAK).unwrap();
        }
        let mut barrier = Snapshot::new();
        clocks.iter_mut().for_each(|c| c.release_into(ALL_LANES, &mut barrier));
        clocks.iter_mut().for_each(|c| c.acquire(&barrier));
    }
    // An arrival without a wait orders in one direction.
    let mut barrier = Snapshot::new();
    memory.store(&mut clocks[0], 8, WEAK).unwrap();
    memory.store(&mut clocks[1], 12, WEAK).unwrap();
    clocks[0].release_into(ALL_LANES, &mut barrier);
    clocks[1].acquire(&barrier);
    memory.load(&mut clocks[1], 8, WEAK).unwrap();
    assert_eq!(memory.load(&mut clocks[0], 12, WEAK), Err(Missing::Order));
}

#[test]
fn lanes_of_a_warp_race_without_a_warp_barrier() {
    let mut c = clock(0, 0);
    let mut shadow = Shadow::new();
    let words: [u64; 32] = std::array::from_fn(|lane| 4 * lane as u64);
    let shifted: [u64; 32] = std::array::from_fn(|lane| 4 * (lane as u64 ^ 1));
    let who = |c: &Clock| Access::generic(c, 0, 0, WEAK);
    shadow.check_warp_write(&words, ALL_LANES, 4, &who(&c), &c).unwrap();
    shadow.check_warp_read(&words, ALL_LANES, 4, &who(&c), &c).unwrap();
    let race = shadow.check_warp_read(&shifted, ALL_LANES, 4, &who(&c), &c).unwrap_err();
    assert_eq!((race.missing, race.first.lane, race.second.lane), (Missing::WarpBarrier, Some(1), Some(0)));
    c.sync_warp();
    shadow.check_warp_read(&shifted, ALL_LANES, 4, &who(&c), &c).unwrap();
    let race = shadow.check_warp_write(&words, ALL_LANES, 4, &who(&c), &c).unwrap_err();
    assert_eq!((race.missing, race.first.is_write), (Missing::WarpBarrier, false));
    let same: [u64; 32] = [512; 32];
    shadow.check_warp_read(&same, ALL_LANES, 4, &who(&c), &c).unwrap();
    let race = shadow.check_write(512, 4, &who(&c), &c).unwrap_err();
    assert_eq!(race.first.lane, None, "several lanes read it");
    let race = shadow.check_warp_write(&[256; 32], 3, 4, &who(&c), &c).unwrap_err();
    assert_eq!(race.second.lane, Some(1), "two lanes store to one word");
}

#[test]
fn inactive_lanes_touch_nothing() {
    let (a, b) = (clock(0, 0), clock(0, 1));
    let mut shadow = Shadow::new();
    let words: [u64; 32] = std::array::from_fn(|lane| 4 * lane as u64);
    shadow.check_warp_write(&words, 0x0000_FFFF, 4, &Access::generic(&a, 0, 0, WEAK), &a).unwrap();
    shadow.check_warp_write(&words, 0xFFFF_0000, 4, &Access::generic(&b, 0, 0, WEAK), &b).unwrap();
}

#[test]
fn parts_of_a_word_are_told_apart() {
    let (a, b) = (clock(0, 0), clock(0, 1));
    let mut shadow = Shadow::new();
    let halves: [u64; 32] = std::array::from_fn(|lane| 2 * lane as u64);
    for round in 0..3 {
        // In place: each lane reads and rewrites its own half.
        let who = Access::generic(&a, 0, round, WEAK);
        shadow.check_warp_read(&halves, ALL_LANES, 2, &who, &a).unwrap();
        shadow.check_warp_write(&halves, ALL_LANES, 2, &who, &a).unwrap();
    }
    shadow.check_write(67, 1, &Access::generic(&a, 0, 7, WEAK), &a).unwrap();
    let who = Access::generic(&b, 0, 8, WEAK);
    shadow.check_write(65, 2, &who, &b).unwrap();
    shadow.check_write(64, 1, &who, &b).unwrap();
    let race = shadow.check_read(64, 4, &who, &b).unwrap_err();
    assert_eq!((race.offset, race.first.instruction), (67, 7));
    let race = shadow.check_read(64, 2, &Access::generic(&a, 0, 9, WEAK), &a).unwrap_err();
    assert_eq!((race.offset, race.first.instruction), (64, 8));
}

#[test]
fn accesses_cross_cells_and_pages() {
    let (a, b) = (clock(0, 0), clock(0, 1));
    let mut shadow = Shadow::new();
    shadow.check_write(1000, 3000, &Access::generic(&a, 0, 1, WEAK), &a).unwrap();
    let who = Access::generic(&b, 0, 2, WEAK);
    for (offset, races) in [(992, false), (1000, true), (2047, true), (3992, true), (4000, false), (1 << 20, false)] {
        assert_eq!(shadow.check_read(offset, 8, &who, &b).is_err(), races, "at {offset}");
    }
    shadow.clear();
    shadow.check_read(1000, 3000, &who, &b).unwrap();
}

#[test]
fn every_concurrent_reader_is_remembered() {
    let launch = LaunchAgents { first: 0, ctas: 1, warps: 32, device: 0, cluster: 1 };
    let mut clocks: Vec<Clock> = (0..32).map(|w| Clock::new(launch.cta(0), w, AgentSet::new())).collect();
    for missing in 0..32 {
        let mut shadow = Shadow::new();
        let mut barrier = Snapshot::new();
        for (w, c) in clocks.iter_mut().enumerate() {
            shadow.check_read(0, 4, &Access::generic(c, 0, w as u32, WEAK), c).unwrap();
            if w != missing {
                c.release_into(ALL_LANES, &mut barrier);
            }
        }
        let mut writer = clocks[(missing + 1) % 32].clone();
        writer.acquire(&barrier);
        let race = shadow.check_write(0, 4, &Access::generic(&writer, 0, 99, WEAK), &writer).unwrap_err();
        assert_eq!(race.first.instruction, missing as u32);
    }
}

#[test]
fn a_crowd_of_readers_still_races_with_the_next_launch() {
    let launch = LaunchAgents { first: 0, ctas: 100, warps: 1, device: 0, cluster: 1 };
    let next = LaunchAgents { first: launch.range().end, ctas: 1, warps: 1, device: 0, cluster: 1 };
    let mut shadow = Shadow::new();
    for cta in 0..100 {
        let c = Clock::new(launch.cta(cta), 0, AgentSet::new());
        shadow.check_read(0, 4, &Access::generic(&c, 0, 5, WEAK), &c).unwrap();
    }
    let early = Clock::new(next.cta(0), 0, AgentSet::new());
    let who = Access::generic(&early, 0, 6, WEAK);
    let race = shadow.check_write(0, 4, &who, &early).unwrap_err();
    assert_eq!((race.first.instruction, race.missing), (5, Missing::Order));
    let after = Clock::new(next.cta(0), 0, AgentSet::from_range(launch.range()));
    shadow.check_write(0, 4, &who, &after).unwrap();
}

#[test]
fn launches_are_ordered_by_what_they_see() {
    let next = LaunchAgents { first: LAUNCH.range().end, ctas: 1, warps: 1, device: 0, cluster: 1 };
    let (mut writer, mut memory) = (clock(1, 1), Memory::default());
    memory.store(&mut writer, DATA, WEAK).unwrap();
    let mut reader = Clock::new(next.cta(0), 0, AgentSet::new());
    assert_eq!(memory.load(&mut reader, DATA, WEAK), Err(Missing::Order));
    reader.see(&AgentSet::from_range(LAUNCH.range()));
    memory.load(&mut reader, DATA, WEAK).unwrap();
}

#[test]
fn generic_writes_need_a_proxy_fence_before_asynchronous_accesses() {
    let (mut writer, mut issuer) = (clock(0, 0), clock(0, 1));
    let queue = LAUNCH.cta(0).slot(0);
    let mut shadow = Shadow::new();
    let generic = Access::generic(&writer, 0, 1, WEAK);
    shadow.check_write(0, 16, &generic, &writer).unwrap();
    shadow.check_read(16, 16, &generic, &writer).unwrap();
    issuer.acquire(&writer.release(ALL_LANES));
    let who = Access::asynchronous(queue, 1, 0, 2);
    assert_eq!(shadow.check_read(0, 16, &who, &issuer).unwrap_err().missing, Missing::ProxyFence);
    assert_eq!(shadow.check_write(0, 16, &who, &issuer).unwrap_err().missing, Missing::ProxyFence);
    shadow.check_write(16, 16, &who, &issuer).unwrap();
    issuer.fence_proxy_async(1);
    shadow.check_read(0, 16, &who, &issuer).unwrap();
    // Also for the issuing thread's own writes, and only for those before the fence.
    shadow.check_write(64, 4, &Access::generic(&issuer, 0, 3, WEAK), &issuer).unwrap();
    assert_eq!(shadow.check_read(64, 4, &who, &issuer).unwrap_err().missing, Missing::ProxyFence);
    issuer.fence_proxy_async(1);
    shadow.check_read(64, 4, &who, &issuer).unwrap();
}

#[test]
fn asynchronous_reads_hold_their_source_until_waited_for() {
    let mut c = clock(0, 0);
    let queue = LAUNCH.cta(0).slot(7);
    let mut shadow = Shadow::new();
    shadow.check_read(0, 64, &Access::asynchronous(queue, 1, 0, 1), &c).unwrap();
    shadow.check_read(32, 64, &Access::asynchronous(queue, 2, 0, 2), &c).unwrap();
    let write = |shadow: &mut Shadow, c: &Clock, at| {
        shadow.check_write(at, 4, &Access::generic(c, 0, 3, WEAK), c).map_err(|race| race.missing)
    };
    assert_eq!(write(&mut shadow, &c, 0), Err(Missing::Wait));
    c.observe(queue, 1);
    write(&mut shadow, &c, 0).unwrap();
    assert_eq!(write(&mut shadow, &c, 32), Err(Missing::Wait));
    c.observe(queue, 2);
    write(&mut shadow, &c, 32).unwrap();
    // Two copies of one batch to the same place are not ordered.
    let copy = Access::asynchronous(queue, 3, 0, 4);
    shadow.check_write(512, 16, &copy, &c).unwrap();
    assert_eq!(shadow.check_write(520, 16, &copy, &c).unwrap_err().missing, Missing::Wait);
}

//! Random programs against an oracle that keeps happens-before as explicit sets.

use proptest::prelude::*;
use ptx::Sem;

use super::super::*;
use super::*;

/// One step of a random program. Warps are 0..4 (two per CTA), lanes 0..3 or so, queues 0..2, bytes 0..32.
#[derive(Clone, Debug)]
enum Step {
    Access {
        warp: usize,
        lane: u8,
        offset: u64,
        len: u32,
        is_write: bool,
        is_strong: bool,
    },
    Issue {
        warp: usize,
        lane: u8,
        queue: usize,
        offset: u64,
        len: u32,
        is_write: bool,
    },
    /// Eight or more lanes side by side, from `first`, over bytes 0..32; or all of them at byte `first`.
    Warp {
        warp: usize,
        first: u8,
        len: u32,
        broadcast: bool,
        is_write: bool,
        is_strong: bool,
    },
    Observe {
        warp: usize,
        queue: usize,
    },
    SyncWarp {
        warp: usize,
    },
    Release {
        warp: usize,
        lanes: u32,
        place: usize,
    },
    Acquire {
        warp: usize,
        place: usize,
    },
    Fence {
        warp: usize,
        lanes: u32,
    },
}

/// Sets of accesses as bits: what a warp knows to have happened before, and may touch asynchronously.
#[derive(Clone, Copy, Default)]
struct Sets {
    seen: u128,
    fenced: u128,
}

struct Oracle {
    warps: [Sets; 4],
    places: [Sets; 2],
    /// Accesses of each lane of each warp, and of each queue.
    lanes: [[u128; 32]; 4],
    queues: [Sets; 2],
    past: Vec<PastAccess>,
}

struct PastAccess {
    bytes: u32,
    is_write: bool,
    is_strong: bool,
    is_async: bool,
}

impl Oracle {
    fn new() -> Self {
        let none = Sets::default();
        Self { warps: [none; 4], places: [none; 2], lanes: [[0; 32]; 4], queues: [none; 2], past: Vec::new() }
    }

    fn of_lanes(&self, warp: usize, lanes: u32) -> u128 {
        (0..32).filter(|lane| lanes >> lane & 1 == 1).fold(0, |all, lane| all | self.lanes[warp][lane])
    }

    /// Whether the access races with an earlier one; records it.
    fn access(&mut self, warp: usize, lane: u8, now: PastAccess, queue: Option<usize>) -> bool {
        let seen = self.warps[warp].seen | self.lanes[warp][usize::from(lane)];
        let races = self.past.iter().enumerate().any(|(i, old)| {
            let needs_fence = now.is_async && old.is_write && !old.is_async;
            let before = if needs_fence { self.warps[warp].fenced & seen } else { seen };
            old.bytes & now.bytes != 0
                && (old.is_write || now.is_write)
                && !(old.is_strong && now.is_strong)
                && before >> i & 1 == 0
        });
        let bit = 1u128 << self.past.len();
        match queue {
            Some(queue) => self.queues[queue].seen |= bit,
            None => self.lanes[warp][usize::from(lane)] |= bit,
        }
        self.past.push(now);
        races
    }
}

/// The racing step and its first racing lane.
type Found = Option<(usize, u8)>;

/// Runs a program to its first race, in the detector and in the oracle.
fn run(program: &[Step]) -> (Found, Found) {
    let mut clocks: Vec<Clock> = (0..4).map(|i| clock(i / 2, i % 2)).collect();
    let mut places = [Snapshot::new(), Snapshot::new()];
    let queues = [LAUNCH.cta(0).slot(0), LAUNCH.cta(1).slot(3)];
    let mut epochs = [1u32; 2];
    // As the arrival that announces a copy does, an issue publishes what came before it to those who wait.
    let mut batches = [Snapshot::new(), Snapshot::new()];
    let mut shadow = Shadow::new();
    let mut oracle = Oracle::new();
    let mut found = (None, None);
    for (i, step) in program.iter().enumerate() {
        let bytes = |offset: u64, len: u32| (((1u64 << len) - 1) << offset) as u32;
        match *step {
            Step::Access { warp, lane, offset, len, is_write, is_strong } => {
                let c = &clocks[warp];
                let who = Access::generic(c, lane, i as u32, if is_strong { Sem::Volatile } else { WEAK });
                let outcome = if is_write {
                    shadow.check_write(offset, len, &who, c)
                } else {
                    shadow.check_read(offset, len, &who, c)
                };
                let now = PastAccess { bytes: bytes(offset, len), is_write, is_strong, is_async: false };
                if oracle.access(warp, lane, now, None) {
                    found.1 = Some((i, lane));
                }
                found.0 = outcome.err().map(|race| (i, race.second.lane.expect("one lane")));
            }
            Step::Warp { warp, first, len, broadcast, is_write, is_strong } => {
                let c = &clocks[warp];
                let count = 32 / len;
                let lanes = ((1 << count) - 1) << first;
                let offsets: [u64; 32] = std::array::from_fn(|lane| {
                    let nth = if broadcast { u32::from(first) } else { (lane as u32).wrapping_sub(first.into()) };
                    u64::from(nth % count * len)
                });
                let sem = if is_strong { Sem::Volatile } else { WEAK };
                let who = Access::generic(c, 0, i as u32, sem);
                let outcome = if is_write {
                    shadow.check_warp_write(&offsets, lanes, len, &who, c)
                } else {
                    shadow.check_warp_read(&offsets, lanes, len, &who, c)
                };
                let mut racing = None;
                for lane in (0..32u8).filter(|lane| lanes >> lane & 1 == 1) {
                    let bytes = bytes(offsets[usize::from(lane)], len);
                    let now = PastAccess { bytes, is_write, is_strong, is_async: false };
                    if oracle.access(warp, lane, now, None) {
                        racing = racing.or(Some(lane));
                    }
                }
                found.1 = racing.map(|lane| (i, lane));
                found.0 = outcome.err().map(|race| (i, race.second.lane.expect("one lane")));
            }
            Step::Issue { warp, lane, queue, offset, len, is_write } => {
                let c = &mut clocks[warp];
                let who = Access::asynchronous(queues[queue], epochs[queue], lane, i as u32);
                let outcome = if is_write {
                    shadow.check_write(offset, len, &who, c)
                } else {
                    shadow.check_read(offset, len, &who, c)
                };
                let now = PastAccess { bytes: bytes(offset, len), is_write, is_strong: false, is_async: true };
                if oracle.access(warp, lane, now, Some(queue)) {
                    found.1 = Some((i, lane));
                }
                clocks[warp].release_into(ALL_LANES, &mut batches[queue]);
                oracle.queues[queue].seen |= oracle.warps[warp].seen | oracle.of_lanes(warp, ALL_LANES);
                oracle.queues[queue].fenced |= oracle.warps[warp].fenced;
                found.0 = outcome.err().map(|race| (i, race.second.lane.expect("one lane")));
            }
            Step::Observe { warp, queue } => {
                batches[queue].observe(queues[queue], epochs[queue]);
                clocks[warp].acquire(&batches[queue]);
                epochs[queue] += 1;
                oracle.warps[warp].seen |= oracle.queues[queue].seen;
                oracle.warps[warp].fenced |= oracle.queues[queue].fenced;
            }
            Step::SyncWarp { warp } => {
                clocks[warp].sync_warp();
                oracle.warps[warp].seen |= oracle.of_lanes(warp, ALL_LANES);
            }
            Step::Release { warp, lanes, place } => {
                clocks[warp].release_into(lanes, &mut places[place]);
                oracle.places[place].seen |= oracle.warps[warp].seen | oracle.of_lanes(warp, lanes);
                oracle.places[place].fenced |= oracle.warps[warp].fenced;
            }
            Step::Acquire { warp, place } => {
                clocks[warp].acquire(&places[place]);
                oracle.warps[warp].seen |= oracle.places[place].seen;
                oracle.warps[warp].fenced |= oracle.places[place].fenced;
            }
            Step::Fence { warp, lanes } => {
                clocks[warp].fence_proxy_async(lanes);
                oracle.warps[warp].fenced |= oracle.warps[warp].seen | oracle.of_lanes(warp, lanes);
            }
        }
        if found != (None, None) || oracle.past.len() > 110 {
            break;
        }
    }
    found
}

fn steps(lanes: impl Strategy<Value = u32> + Clone + 'static, strong: bool) -> impl Strategy<Value = Vec<Step>> {
    let warp = || 0..4usize;
    let range = || {
        (0..32u64, prop_oneof![Just(1u32), Just(2), Just(4), Just(16), Just(32)])
            .prop_map(|(at, len)| (at / u64::from(len) * u64::from(len), len))
    };
    let step = prop_oneof![
        6 => (warp(), 0..3u8, range(), any::<bool>(), any::<bool>()).prop_map(move |(warp, lane, (offset, len), is_write, is_strong)| {
            Step::Access { warp, lane, offset, len, is_write, is_strong: is_strong && strong }
        }),
        2 => (warp(), 0..3u8, 0..2usize, range(), any::<bool>()).prop_map(|(warp, lane, queue, (offset, len), is_write)| {
            Step::Issue { warp, lane, queue, offset, len, is_write }
        }),
        4 => (warp(), 0..4u8, prop_oneof![Just(4u32), Just(8), Just(16)], any::<[bool; 3]>()).prop_map(
            move |(warp, first, len, [broadcast, is_write, is_strong])| {
                Step::Warp { warp, first, len, broadcast, is_write, is_strong: is_strong && strong }
            }
        ),
        2 => (warp(), 0..2usize).prop_map(|(warp, queue)| Step::Observe { warp, queue }),
        3 => warp().prop_map(|warp| Step::SyncWarp { warp }),
        4 => (warp(), lanes.clone(), 0..2usize).prop_map(|(warp, lanes, place)| Step::Release { warp, lanes, place }),
        6 => (warp(), 0..2usize).prop_map(|(warp, place)| Step::Acquire { warp, place }),
        3 => (warp(), lanes).prop_map(|(warp, lanes)| Step::Fence { warp, lanes }),
    ];
    prop::collection::vec(step, 1..100)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn finds_exactly_the_races_of_weak_accesses(program in steps(Just(ALL_LANES), false)) {
        let (detector, oracle) = run(&program);
        prop_assert_eq!(detector, oracle);
    }

    #[test]
    fn never_reports_ordered_accesses(program in steps(prop_oneof![Just(ALL_LANES), Just(1), Just(2), Just(4), Just(5)], true)) {
        let (detector, oracle) = run(&program);
        let step = |found: Found| found.map(|(step, _)| step);
        prop_assert!(detector.is_none() || step(detector) == step(oracle), "{:?}, oracle: {:?}", detector, oracle);
    }
}

//! Misuse of multicast addresses.

use crate::common::*;
use ptx::*;
use ptx_sim::*;

/// The trap of `body`, run on a machine whose `src` is the multicast address of two 64-byte buffers and whose `out` is one
/// of them; the second is freed first if asked.
fn trap_of(free: bool, body: impl FnOnce(TestParams)) -> Trap {
    let k = kernel(32, body);
    let mut bench = Bench::new(Config { devices: 2, ..Config::default() });
    let members = [0, 1].map(|device| bench.machine.alloc(DeviceId(device), 64).unwrap());
    bench.src = bench.machine.multicast(&members, 64).unwrap();
    bench.out = members[0];
    if free {
        bench.machine.free(members[1]).unwrap();
    }
    trapped(bench.run(&k, 1, 0))
}

fn first_lane(body: impl FnOnce()) {
    when(lane_index().eq(0u32), body);
}

#[test]
fn past_the_end() {
    let trap = trap_of(false, |p| first_lane(|| Multicast::from_address(p.src.address()).byte_offset(64).store(p.n)));
    assert_eq!(trap.kind, TrapKind::OutOfBounds, "{trap}");
    let crossing = trap_of(false, |p| {
        first_lane(|| Multicast::from_address(p.src.address()).byte_offset(-16).store_vec([p.n; 4]));
    });
    assert_eq!(crossing.kind, TrapKind::OutOfBounds, "{crossing}");
}

#[test]
fn misaligned() {
    let trap =
        trap_of(false, |p| first_lane(|| Multicast::from_address(p.src.address()).byte_offset(8).store_vec([p.n; 4])));
    assert_eq!((trap.kind, trap.lane), (TrapKind::Misaligned, Some(0)), "{trap}");
}

#[test]
fn a_freed_member() {
    let trap = trap_of(true, |p| first_lane(|| Multicast::from_address(p.src.address()).store(p.n)));
    assert_eq!(trap.kind, TrapKind::Freed, "{trap}");
}

#[test]
fn an_ordinary_address() {
    let trap = trap_of(false, |p| first_lane(|| Multicast::from_address(p.out.address()).store(p.n)));
    assert_eq!(trap.kind, TrapKind::OutOfBounds, "{trap}");
    assert!(trap.to_string().contains("outside every multicast object"), "{trap}");
}

#[test]
fn ordinary_access_to_a_multicast_address() {
    let load = trap_of(false, |p| first_lane(|| p.out.store(p.src.load())));
    let store = trap_of(false, |p| first_lane(|| p.src.store(p.n)));
    for trap in [load, store] {
        assert_eq!(trap.kind, TrapKind::OutOfBounds, "{trap}");
        assert!(trap.to_string().contains("which only multicast instructions may use"), "{trap}");
    }
}

#[test]
fn unordered_with_a_weak_access_of_a_member() {
    let k = kernel(32, |p| {
        when_else(
            p.n.eq(1u32),
            || first_lane(|| Multicast::from_address(p.src.address()).store(p.n)),
            || first_lane(|| p.out.store(p.n)),
        );
    });
    let mut bench = Bench::new(Config { devices: 2, ..Config::default() });
    let members = [0, 1].map(|device| bench.machine.alloc(DeviceId(device), 64).unwrap());
    bench.src = bench.machine.multicast(&members, 64).unwrap();
    bench.out = members[0];
    let other = bench.machine.create_stream(DeviceId(1));
    let [weak, multicast] = [0, 1].map(|n| bench.launch_of(&k, 1, n, false));
    bench.machine.enqueue(bench.stream, weak).unwrap();
    bench.machine.enqueue(other, multicast).unwrap();
    assert_eq!(trapped(bench.machine.run()).kind, TrapKind::DataRace);
}

//! Multicast stores: every member gets every byte, each at its own time.

mod common;

use std::collections::HashSet;

use common::*;
use ptx::*;
use ptx_sim::*;

const DEVICES: usize = 3;

/// A machine of three devices with a zeroed 256-byte buffer each, all behind one multicast address.
fn together(config: Config) -> (Bench, [u64; DEVICES], u64) {
    let mut bench = Bench::new(Config { devices: DEVICES, ..config });
    let members = [0, 1, 2].map(|device| {
        let address = bench.machine.alloc(DeviceId(device), 256).unwrap();
        bench.write(address, &[0; 64]);
        address
    });
    let address = bench.machine.multicast(&members, 256).unwrap();
    bench.src = address;
    (bench, members, address)
}

/// The multicast object at `src`.
fn target(p: &TestParams) -> Multicast {
    Multicast::from_address(p.src.address())
}

#[test]
fn every_member_gets_every_byte() {
    let store = kernel(32, |p| {
        when(lane_index().lt(8u32), || {
            let i = lane_index();
            let at = target(&p).byte_at((i * 32).to_u64());
            at.store_vec([i, i + 100, i + 200, i + 300]);
            at.byte_offset(16).store_u64((i + 1000).pack(i + 2000));
            at.byte_offset(24).store(i + 3000);
        });
    });
    for config in modes() {
        let (mut bench, members, _) = together(config);
        bench.run(&store, 1, 0).unwrap();
        let want: Vec<u32> =
            (0..8).flat_map(|i| [i, i + 100, i + 200, i + 300, i + 1000, i + 2000, i + 3000, 0]).collect();
        for member in members {
            assert_eq!(bench.read(member, 64), want, "{config:?}");
        }
    }
}

#[test]
fn the_halves_of_a_store_become_visible_apart_and_in_either_order() {
    let reader = kernel(32, |p| {
        when_else(
            p.n.eq(1u32),
            || {
                when(lane_index().eq(0u32), || target(&p).store_vec([1u32, 1, 1, 1].map(Reg::from)));
                // A CTA's end waits for its stores; this leaves them time to arrive by themselves.
                nanosleep(20_000u32);
            },
            || {
                when(lane_index().eq(0u32), || {
                    let all = Var::new(0u32);
                    let here = p.src.cast::<u64>();
                    while_(
                        || all.get().eq(0u32),
                        || {
                            let [a, b] = here.load_vec_as::<2>(LoadMode::relaxed(Scope::Sys)).map(|half| half.low());
                            all.set(a & b);
                            when(a.ne(b), || p.out.store(p.out.load() | (a + b * 2)));
                        },
                    );
                });
            },
        );
    });
    let mut seen = HashSet::new();
    for seed in 0..60 {
        let (mut bench, members, address) = together(Config::seeded(seed));
        let out = bench.out;
        bench.write(out, &[0]);
        let writer_stream = bench.machine.create_stream(DeviceId(1));
        // The reader looks at the memory of its own device.
        bench.src = members[0];
        let read = bench.launch_of(&reader, 1, 0, false);
        bench.src = address;
        let write = bench.launch_of(&reader, 1, 1, false);
        bench.machine.enqueue(bench.stream, read).unwrap();
        bench.machine.enqueue(writer_stream, write).unwrap();
        bench.machine.run().unwrap();
        seen.insert(bench.read(out, 1)[0]);
    }
    assert!(seen.contains(&1) && seen.contains(&2), "only one half was ever alone: {seen:?}");
}

#[test]
fn a_fence_before_the_store_publishes_what_was_written_before_it() {
    // Device 1 writes weakly to its own buffer at +128, fences, and stores 1 to everybody; device 0 polls, fences, and then
    // writes the same place. Without one of the fences that is a race.
    let run = |release: bool, acquire: bool| {
        let both = kernel(32, |p| {
            when(lane_index().eq(0u32), || {
                let theirs = Global::<u32>::from_address(p.out.cast::<u64>().load()).offset(32);
                when_else(
                    p.n.eq(1u32),
                    || {
                        theirs.store(5u32);
                        if release {
                            fence(Scope::Sys);
                        }
                        target(&p).store(Reg::from(1u32));
                    },
                    || {
                        let flag = Global::<u32>::from_address(p.out.cast::<u64>().offset(1).load());
                        while_(|| flag.load_as(LoadMode::relaxed(Scope::Sys)).eq(0u32), || {});
                        if acquire {
                            fence(Scope::Sys);
                        }
                        theirs.store(6u32);
                    },
                );
            });
        });
        (0..6).find_map(|seed| {
            let (mut bench, members, _) = together(Config::seeded(seed));
            let (out, words) = (bench.out, [members[1], members[0]].map(|a| [a as u32, (a >> 32) as u32]));
            bench.write(out, words.as_flattened());
            let other = bench.machine.create_stream(DeviceId(1));
            let (read, write) = (bench.launch_of(&both, 1, 0, false), bench.launch_of(&both, 1, 1, false));
            bench.machine.enqueue(bench.stream, read).unwrap();
            bench.machine.enqueue(other, write).unwrap();
            let fault = bench.machine.run().err();
            if fault.is_none() {
                assert_eq!(bench.read(members[1] + 128, 1), [6]);
            }
            fault
        })
    };
    assert!(run(true, true).is_none());
    for (release, acquire) in [(false, true), (true, false)] {
        assert_eq!(trapped(run(release, acquire).map_or(Ok(()), Err)).kind, TrapKind::DataRace);
    }
}

#[test]
fn what_cannot_be_a_member_is_refused() {
    let mut machine = Machine::new(Config { devices: 2, ..Config::default() });
    let [a, b] = [0, 1].map(|device| machine.alloc(DeviceId(device), 1024).unwrap());
    let same = machine.alloc(DeviceId(0), 1024).unwrap();
    assert_eq!(machine.multicast(&[a, same], 256), Err(MemoryError::NotMulticast(same)));
    assert_eq!(machine.multicast(&[a, b + 16], 256), Err(MemoryError::NotMulticast(b + 16)));
    assert!(matches!(machine.multicast(&[a, b + 256], 1024), Err(MemoryError::OutOfBounds { .. })));
    let (first, second) = (machine.multicast(&[a, b], 1024).unwrap(), machine.multicast(&[b, a], 256).unwrap());
    assert!(second >= first + 1024 + 256 - 256 && second.is_multiple_of(256));
    // The host has no multicast access.
    assert!(machine.write(first, &[0]).is_err());
}

//! Bounds, alignment, initialisation, freed buffers.

use crate::common::*;
use ptx::*;
use ptx_sim::*;

#[track_caller]
fn fails(kernel: &Kernel<TestArgs>, kind: TrapKind, line: u32) -> Trap {
    fails_in(&modes(), kernel, 1, kind, file!(), &[line])
}

#[test]
fn global_store_past_the_end() {
    let line = line!() + 2;
    let k = kernel(32, |p| {
        p.out.at(thread_index() + (WORDS as u32 - 16)).store(0u32);
    });
    let trap = fails(&k, TrapKind::OutOfBounds, line);
    assert_eq!(trap.lane, Some(16));
    assert!(trap.message.contains("16384-byte buffer") && trap.message.contains("4 bytes past its end"), "{trap}");
}

#[test]
fn global_load_before_the_start() {
    let line = line!() + 2;
    let k = kernel(32, |p| {
        let x = p.src.offset(-1).load();
        p.out.at(thread_index()).store(x);
    });
    fails(&k, TrapKind::OutOfBounds, line);
}

#[test]
fn null_pointer() {
    let line = line!() + 2;
    let k = kernel(32, |p| {
        let x = Global::<u32>::from_address(Reg::from(64u64)).load();
        p.out.at(thread_index()).store(x);
    });
    let trap = fails(&k, TrapKind::OutOfBounds, line);
    assert!(trap.message.contains("near-null"), "{trap}");
}

#[test]
fn misaligned_vector_load() {
    let line = line!() + 2;
    let k = kernel(32, |p| {
        let v = p.src.at(thread_index()).load_vec::<4>();
        p.out.at(thread_index()).store(v[0]);
    });
    let trap = fails(&k, TrapKind::Misaligned, line);
    assert_eq!(trap.lane, Some(1));
}

#[test]
fn misaligned_shared_store() {
    let line = line!() + 3;
    let k = kernel(32, |_| {
        let buf = SharedArray::<u32>::new("buf", 64);
        buf.ptr().byte_at(thread_index() * 2).store(1u32);
    });
    fails(&k, TrapKind::Misaligned, line);
}

#[test]
fn shared_store_past_the_end_names_the_array() {
    let line = line!() + 3;
    let k = kernel(64, |_| {
        let buf = SharedArray::<u32>::new("scores", 32);
        buf.at(thread_index()).store(1u32);
    });
    let trap = fails(&k, TrapKind::OutOfBounds, line);
    assert!(trap.message.contains("\"scores\""), "{trap}");
    assert_eq!((trap.warp, trap.lane), (1, Some(0)));
}

#[test]
fn shared_address_zero_is_invalid() {
    let line = line!() + 3;
    let k = kernel(32, |_| {
        SharedArray::<u32>::new("buf", 32);
        Shared::<u32>::from_address(Reg::from(0u32)).store(1u32);
    });
    fails(&k, TrapKind::OutOfBounds, line);
}

#[test]
fn uninitialised_register_on_one_path() {
    let k_line = line!() + 4;
    let k = kernel(32, |p| {
        let x = Var::<u32>::undefined();
        when(lane_index().lt(31u32), || x.set(Reg::from(1u32)));
        p.out.at(thread_index()).store(x.get());
    });
    let trap = fails(&k, TrapKind::Uninitialized, k_line);
    assert_eq!(trap.lane, Some(31));
}

#[test]
fn uninitialised_shared_memory_names_the_array() {
    let line = line!() + 3;
    let k = kernel(32, |p| {
        let buf = SharedArray::<u32>::new("keys", 64);
        let x = buf.at(thread_index() + 1).load();
        p.out.at(thread_index()).store(x);
    });
    let trap = fails(&k, TrapKind::Uninitialized, line);
    assert!(trap.message.contains("byte 4 of \"keys\""), "{trap}");
}

#[test]
fn uninitialised_device_memory() {
    let line = line!() + 2;
    let k = kernel(32, |p| {
        let x = p.out.at(thread_index()).load();
        p.out.at(thread_index()).store(x);
    });
    fails(&k, TrapKind::Uninitialized, line);
}

#[test]
fn freed_buffer() {
    let line = line!() + 2;
    let k = kernel(32, |p| {
        p.out.at(thread_index()).store(1u32);
    });
    let mut bench = Bench::new(Config::default());
    bench.machine.free(bench.out).unwrap();
    let trap = trapped(bench.run(&k, 1, 0));
    assert_eq!(trap.kind, TrapKind::Freed);
    assert!(trap.at.contains(&format!("memory.rs:{line}:")), "{trap}");
    assert_eq!(trap.address, Some(bench.out));
}

#[test]
fn trap_instruction() {
    let line = line!() + 2;
    let k = kernel(32, |_| {
        when(lane_index().eq(5u32), || ptx::trap());
    });
    let trap = fails(&k, TrapKind::TrapInstruction, line);
    assert_eq!(trap.lane, Some(5));
}

#[test]
fn traps_leave_the_machine_usable() {
    let bad = kernel(32, |p| p.out.at(thread_index() + WORDS as u32).store(0u32));
    let good = kernel(32, |p| p.out.at(thread_index()).store(7u32));
    let mut bench = Bench::new(Config::default());
    trapped(bench.run(&bad, 1, 0));
    bench.run(&good, 1, 0).unwrap();
    assert_eq!(bench.read(bench.out, 32), [7; 32]);
}

#[test]
fn peer_memory_is_accessible_and_checked() {
    let mut machine = Machine::new(Config { devices: 2, ..Config::default() });
    let stream = machine.create_stream(DeviceId(1));
    let far = machine.alloc(DeviceId(0), 128).unwrap();
    let line = line!() + 1;
    let k = kernel(32, |p| p.out.at(thread_index() + p.n).store(thread_index()));
    let mut run = |n: u32| {
        let args = TestArgs { out: DevicePtr::from_address(far), src: DevicePtr::NULL, n, m: 0 };
        let params = ArgBuffer::pack(&args).bytes().to_vec();
        let launch = Launch { kernel: k.ir().clone(), grid: [1, 1, 1], shared_bytes: 0, params, overlap: false };
        machine.enqueue(stream, Command::Launch(launch)).unwrap();
        machine.run()
    };
    run(0).unwrap();
    let trap = trapped(run(1));
    assert_eq!((trap.kind, trap.device), (TrapKind::OutOfBounds, DeviceId(1)));
    assert!(trap.at.contains(&format!("memory.rs:{line}:")), "{trap}");
    assert!(trap.message.contains("device 0"), "{trap}");
}

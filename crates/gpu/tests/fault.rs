//! After a fault: the first error stays, with the kernel's name, and dropping is safe. One test per device kind, since a
//! fault costs the process its context.

mod common;

use common::*;
use gpu::{Device, Error, Graph, LaunchConfig};
use ptx::DevicePtr;

/// Faults `device`, then uses and drops everything on it.
fn fault_and_drop(device: Device) -> Vec<Error> {
    let stream = device.stream().unwrap();
    let other = device.stream().unwrap();
    let event = device.event().unwrap();
    let buffer = device.alloc_zeros::<u32>(4).unwrap();
    let iota = device.load(&iota(device.target().unwrap(), 0)).unwrap();
    let args = FillArgs { out: buffer.ptr(), n: 4 };
    let graph = Graph::capture(&stream, |s| iota.launch(s, LaunchConfig::new(1), &args)).unwrap();
    graph.launch(&stream).unwrap();
    stream.synchronize().unwrap();

    let nowhere = FillArgs { out: DevicePtr::from_address(0x10), n: 4 };
    iota.launch(&stream, LaunchConfig::new(1), &nowhere).unwrap();
    let errors = vec![
        error_of(stream.synchronize()),
        error_of(stream.synchronize()),
        error_of(buffer.copy_to_vec(&stream)),
        error_of(other.synchronize()),
        error_of(device.alloc::<u32>(4)),
        error_of(Graph::capture(&stream, |_| Ok(()))),
    ];
    drop((graph, event, buffer, iota, other, stream, device));
    errors
}

#[test]
fn a_fault_on_the_simulator_is_reported_first_and_last() {
    let errors = fault_and_drop(simulated());
    for error in errors {
        assert!(error.is_fault(), "{error}");
        assert!(matches!(&error, Error::Sim(fault) if fault.to_string().contains("iota")), "{error}");
    }
    // Another machine is not concerned.
    simulated().alloc_zeros::<u32>(4).unwrap();
}

#[test]
fn a_fault_on_a_gpu_is_reported_first_and_last() {
    let Some(device) = cuda() else { return };
    let errors = fault_and_drop(device);
    let first = errors[0].to_string();
    for error in errors {
        match &error {
            Error::Fault { kernel, .. } => assert_eq!(kernel.as_deref(), Some("iota"), "{error}"),
            other => panic!("{other}"),
        }
        assert_eq!(error.to_string(), first, "the first fault stays");
    }
    // A CPU-side object still works.
    simulated().alloc_zeros::<u32>(4).unwrap();
}

#[test]
fn reading_uninitialised_memory_traps_on_the_simulator() {
    let device = simulated();
    let stream = device.stream().unwrap();
    let (x, y) = (device.alloc::<f32>(4).unwrap(), device.alloc_zeros::<f32>(4).unwrap());
    let axpy = device.load(&axpy(device.target().unwrap())).unwrap();
    axpy.launch(&stream, LaunchConfig::new(1), &AxpyArgs { y: y.ptr(), x: x.ptr(), a: 1.0, n: 4 }).unwrap();
    match error_of(stream.synchronize()) {
        Error::Sim(fault) => match *fault {
            gpu::SimFault::Trap(trap) => {
                assert_eq!((trap.kernel.as_str(), trap.kind), ("axpy", gpu::SimTrapKind::Uninitialized), "{trap}");
            }
            other => panic!("{other}"),
        },
        other => panic!("{other}"),
    }
}

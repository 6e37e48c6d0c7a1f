//! Device memory shared between processes. The other process is this binary once more.

mod common;

use std::process::{Command, Output};

use common::*;
use gpu::{Buffer, Device, Error, IpcHandle, LaunchConfig};
use ptx::DevicePtr;

/// Hands a child process its handle and the number of its device.
const HANDLE: &str = "GPU_TEST_IPC_HANDLE";
const DEVICE: &str = "GPU_TEST_IPC_DEVICE";

/// Elements that are shared, from this one on of a buffer.
const WORDS: usize = 3000;
const FIRST: usize = 1025;

/// Not a test of its own: what a child process does with the memory.
#[test]
fn child() {
    let Ok(handle) = std::env::var(HANDLE) else { return };
    let bytes: Vec<u8> =
        (0..handle.len()).step_by(2).map(|i| u8::from_str_radix(&handle[i..i + 2], 16).unwrap()).collect();
    let handle = IpcHandle::from_bytes(&bytes).unwrap();
    let device = Device::cuda(std::env::var(DEVICE).unwrap().parse().unwrap()).unwrap();
    let stream = device.stream().unwrap();
    let memory: Buffer<u32> = match device.open_ipc(&handle) {
        Ok(memory) => memory,
        Err(error) => {
            println!("CHILD {error:?}");
            return;
        }
    };
    assert_eq!((memory.len() as u64 * 4, memory.len()), (handle.bytes(), WORDS));
    let got = memory.copy_to_vec(&stream).unwrap();
    assert!(got.iter().zip(0..).all(|(got, i)| *got == 7 * i), "{:?}", &got[..8]);
    // Written by a kernel of this process.
    let kernel = device.load(&iota(device.target().unwrap(), 1000)).unwrap();
    let args = FillArgs { out: memory.ptr(), n: WORDS as u32 };
    kernel.launch(&stream, LaunchConfig::new((WORDS as u32).div_ceil(THREADS)), &args).unwrap();
    stream.synchronize().unwrap();
    drop(memory);
    println!("CHILD wrote");
}

fn run_child(handle: &IpcHandle, ordinal: usize) -> Output {
    let handle: String = handle.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env(HANDLE, handle).env(DEVICE, ordinal.to_string());
    command.output().unwrap()
}

#[test]
fn another_process_reads_and_writes_the_memory() {
    let Some(device) = cuda() else { return };
    let stream = device.stream().unwrap();
    // A second device sees the memory over peer access.
    for ordinal in 0..Device::cuda_count().unwrap().min(2) {
        let mut words = vec![9u32; FIRST];
        words.extend((0..WORDS as u32).map(|i| 7 * i));
        words.extend([9; 100]);
        let buffer = device.upload(&words).unwrap();
        let handle = buffer.view(FIRST..FIRST + WORDS).unwrap().ipc_handle().unwrap();
        let output = run_child(&handle, ordinal);
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && printed.contains("CHILD wrote"), "device {ordinal}: {output:?}");
        let got = buffer.copy_to_vec(&stream).unwrap();
        let want: Vec<u32> = [vec![9; FIRST], (1000..1000 + WORDS as u32).collect(), vec![9; 100]].concat();
        assert_eq!(got, want, "device {ordinal}");
    }
    if Device::cuda_count().unwrap() < 2 {
        eprintln!("SKIPPED: memory of another device (one CUDA device)");
    }
}

#[test]
fn memory_that_cannot_be_mapped_is_a_typed_error() {
    let Some(device) = cuda() else { return };
    let buffer = device.alloc_zeros::<u32>(64).unwrap();
    let handle = buffer.ipc_handle().unwrap();
    // The driver does not map memory into the process that owns it.
    let error = device.open_ipc::<u32>(&handle).unwrap_err();
    assert!(matches!(error, Error::NotMappable { .. }), "{error:?}");
    let odd = buffer.as_view().view(..1).unwrap().ipc_handle().unwrap();
    assert!(matches!(device.open_ipc::<u64>(&odd).unwrap_err(), Error::SizeMismatch { found: 4, .. }));
    let output = run_child(&IpcHandle::from_bytes(&[0x5A; IpcHandle::BYTES]).unwrap(), 0);
    assert!(String::from_utf8_lossy(&output.stdout).contains("CHILD "), "{output:?}");
    // Memory that is gone.
    drop(buffer);
    let output = run_child(&handle, 0);
    assert!(!String::from_utf8_lossy(&output.stdout).contains("CHILD wrote"), "{output:?}");
    // The device is none the worse.
    device.upload(&[1u32]).unwrap();
}

#[test]
fn memory_of_a_pool_and_no_memory_cannot_be_shared() {
    let Some(device) = cuda() else { return };
    let empty = device.alloc::<u32>(0).unwrap().ipc_handle().unwrap_err();
    assert!(matches!(empty, Error::NotShareable { .. }), "{empty:?}");
    let bindings = device.cuda_context().unwrap();
    if !bindings.has_async_alloc() {
        eprintln!("SKIPPED: memory of a pool (the device has no memory pools)");
        return;
    }
    let slice = bindings.default_stream().alloc_zeros::<u32>(1 << 16).unwrap();
    let error = device.wrap_cuda(&slice).unwrap().ipc_handle().unwrap_err();
    assert!(matches!(error, Error::NotShareable { .. }) && error.to_string().contains("pool"), "{error:?}");
    // SAFETY: never used; only that the driver knows no such memory.
    let nowhere = unsafe { Buffer::<u32>::from_raw(&device, 0x10, 4) }.ipc_handle().unwrap_err();
    assert!(matches!(nowhere, Error::NotShareable { address: 0x10, .. }), "{nowhere:?}");
}

#[test]
fn the_simulator_does_not_share_between_processes() {
    let device = simulated();
    let buffer = device.alloc_zeros::<u32>(4).unwrap();
    assert_ne!(buffer.ptr(), DevicePtr::NULL);
    assert!(matches!(buffer.ipc_handle().unwrap_err(), Error::NotSimulated { .. }));
    let handle = IpcHandle::from_bytes(&[0; IpcHandle::BYTES]).unwrap();
    assert!(matches!(device.open_ipc::<u32>(&handle).unwrap_err(), Error::NotSimulated { .. }));
}

#[test]
fn mapping_is_refused_inside_a_capture() {
    let Some(device) = cuda() else { return };
    let stream = device.stream().unwrap();
    let handle = IpcHandle::from_bytes(&[0; IpcHandle::BYTES]).unwrap();
    assert!(!stream.is_capturing().unwrap());
    let error = gpu::Graph::capture(&stream, |stream| {
        assert!(stream.is_capturing().unwrap());
        device.open_ipc::<u32>(&handle).map(drop)
    });
    assert!(matches!(error.unwrap_err(), Error::Capture { .. }));
    assert!(!stream.is_capturing().unwrap());
}

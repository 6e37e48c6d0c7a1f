//! Buffers, views, copies and events.

mod common;

use common::*;
use gpu::{Buffer, Device, Error, LaunchConfig, SimConfig};

#[test]
fn multicast_addresses_are_for_devices_of_one_simulated_machine() {
    let group = Device::simulated_group(SimConfig { devices: 2, ..SimConfig::default() });
    let buffers: Vec<_> = group.iter().map(|device| device.alloc_zeros::<u64>(64).unwrap()).collect();
    let views: Vec<_> = buffers.iter().map(|buffer| buffer.as_view()).collect();
    assert!(group[0].multicast(&views, 512).unwrap() > 0);
    let refused = |members: &[gpu::View<'_, u64>], bytes, why: &str| {
        let error = group[0].multicast(members, bytes).unwrap_err();
        assert!(matches!(error, Error::Multicast { .. }) && error.to_string().contains(why), "{error}");
    };
    refused(&views, 513, "a member of 512 bytes, 513 are needed");
    refused(&[views[0].clone(), views[0].clone()], 512, "a member already");
    let stranger = simulated().alloc_zeros::<u64>(64).unwrap();
    refused(&[views[0].clone(), stranger.as_view()], 512, "only its own machine's memory");
}

#[test]
fn the_l2_reserved_is_what_the_device_grants() {
    on_every_device(|device| {
        let granted = [0, 1 << 20, usize::MAX].map(|bytes| device.reserve_l2(bytes).unwrap());
        assert!(granted.is_sorted() && (granted[2] as u64) <= device.info().l2_bytes, "{device:?}: {granted:?}");
        assert_eq!((granted[0], device.reserve_l2(0).unwrap()), (0, 0), "{device:?}");
    });
}

#[test]
fn copies_round_trip_through_views() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let values: Vec<u32> = (0..1000).collect();
        let buffer = device.upload(&values).unwrap();
        assert_eq!((buffer.len(), buffer.bytes(), buffer.is_empty()), (1000, 4000, false));
        let middle = buffer.view(100..200).unwrap();
        assert_eq!(middle.ptr().address(), buffer.ptr().address() + 400);
        assert_eq!(middle.copy_to_vec(&stream).unwrap(), values[100..200]);
        let inner = middle.view(..=9).unwrap();
        inner.copy_from(&stream, &[7; 10]).unwrap();
        middle.view(90..).unwrap().fill_bytes(&stream, 0x11).unwrap();
        let got = buffer.copy_to_vec(&stream).unwrap();
        assert_eq!(got[99..111], [99, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 110]);
        assert_eq!(got[189..201], [[189].as_slice(), &[0x1111_1111; 10], &[200]].concat());
        let copy = device.alloc_zeros::<u32>(1000).unwrap();
        copy.copy_from_device(&stream, &buffer.as_view()).unwrap();
        assert_eq!(copy.copy_to_vec(&stream).unwrap(), got, "{device:?}");
    });
}

#[test]
fn odd_sizes_zero_and_copy_exactly() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        for len in [1, 3, 255, 257, (1 << 20) + 5] {
            assert!(device.alloc_zeros::<u8>(len).unwrap().copy_to_vec(&stream).unwrap().iter().all(|b| *b == 0));
            let values: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            assert_eq!(device.upload(&values).unwrap().copy_to_vec(&stream).unwrap(), values, "{device:?}, {len}");
        }
    });
}

#[test]
fn empty_buffers_need_no_memory_and_no_driver_call() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        for buffer in [device.alloc::<u64>(0).unwrap(), device.alloc_zeros(0).unwrap(), device.upload(&[]).unwrap()] {
            assert!(buffer.is_empty() && buffer.ptr() == ptx::DevicePtr::NULL);
            buffer.copy_from(&stream, &[]).unwrap();
            buffer.fill_bytes(&stream, 1).unwrap();
            buffer.copy_from_device(&stream, &buffer.as_view()).unwrap();
            assert_eq!(buffer.copy_to_vec(&stream).unwrap(), []);
        }
        let full = device.alloc_zeros::<u32>(4).unwrap();
        assert!(full.view(4..).unwrap().is_empty());
    });
}

#[test]
fn wrong_lengths_and_ranges_are_errors() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let buffer = device.alloc_zeros::<u32>(4).unwrap();
        for error in [
            error_of(buffer.copy_from(&stream, &[1, 2, 3])),
            error_of(buffer.view(2..5)),
            error_of(buffer.view(..usize::MAX)),
            #[allow(clippy::reversed_empty_ranges)] // the point of the case
            error_of(buffer.view(3..2)),
            error_of(buffer.copy_from_device(&stream, &buffer.view(1..).unwrap())),
        ] {
            assert!(matches!(error, Error::SizeMismatch { .. }), "{error}");
        }
    });
}

#[test]
fn exhausted_memory_is_an_error_with_the_request() {
    on_every_device(|device| {
        let len = (device.info().memory_bytes as usize + (1 << 20)) / 8;
        match error_of(device.alloc::<u64>(len)) {
            Error::OutOfMemory { requested, free } => {
                assert_eq!(requested, len as u64 * 8);
                assert!(free.is_some_and(|free| free < requested), "{free:?}");
            }
            other => panic!("{device:?}: {other}"),
        }
        assert!(matches!(error_of(device.alloc::<u64>(usize::MAX)), Error::OutOfMemory { .. }));
        // The device is none the worse.
        device.alloc_zeros::<u32>(4).unwrap();
    });
}

#[test]
fn foreign_memory_is_used_and_not_freed() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let owner = device.upload(&[1u32, 2, 3, 4]).unwrap();
        // SAFETY: the range lies in `owner`, which outlives the foreign handle.
        let foreign: Buffer<u16> = unsafe { Buffer::from_raw(device, owner.ptr().address() + 4, 4) };
        assert_eq!(foreign.copy_to_vec(&stream).unwrap(), [2, 0, 3, 0]);
        drop(foreign);
        assert_eq!(owner.copy_to_vec(&stream).unwrap(), [1, 2, 3, 4]);
    });
}

#[test]
fn memory_is_freed_only_after_the_work_that_uses_it() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let iota = device.load(&iota(device.target().unwrap(), 1)).unwrap();
        let kept = device.alloc_zeros::<u32>(256).unwrap();
        {
            let dropped = device.alloc_zeros::<u32>(256).unwrap();
            iota.launch(&stream, LaunchConfig::new(2), &FillArgs { out: dropped.ptr(), n: 256 }).unwrap();
            kept.copy_from_device(&stream, &dropped.as_view()).unwrap();
        }
        assert_eq!(kept.copy_to_vec(&stream).unwrap(), (1..=256).collect::<Vec<u32>>(), "{device:?}");
    });
}

#[test]
fn events_order_streams() {
    on_every_device(|device| {
        let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
        let (a, b) = (device.alloc_zeros::<u32>(256).unwrap(), device.alloc_zeros::<u32>(256).unwrap());
        let iota = device.load(&iota(device.target().unwrap(), 4)).unwrap();
        let event = device.event().unwrap();
        second.wait(&event).unwrap(); // never recorded: nothing to wait for
        iota.launch(&first, LaunchConfig::new(2), &FillArgs { out: a.ptr(), n: 256 }).unwrap();
        event.record(&first).unwrap();
        second.wait(&event).unwrap();
        b.copy_from_device(&second, &a.as_view()).unwrap();
        assert_eq!(b.copy_to_vec(&second).unwrap(), (4..260).collect::<Vec<u32>>(), "{device:?}");
        event.synchronize().unwrap();
        assert!(event.is_complete().unwrap() && second.is_idle().unwrap());
        second.wait(&event).unwrap(); // long done
        second.synchronize().unwrap();
    });
}

#[test]
fn elapsed_time_is_positive_on_cuda_and_unknown_on_the_simulator() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let buffer = device.alloc_zeros::<u8>(1 << 20).unwrap();
        let (start, end) = (device.event().unwrap(), device.event().unwrap());
        start.record(&stream).unwrap();
        buffer.fill_bytes(&stream, 1).unwrap();
        end.record(&stream).unwrap();
        stream.synchronize().unwrap();
        let ms = start.elapsed_ms(&end).unwrap();
        assert_eq!(ms.is_none(), device.info().simulated);
        assert!(ms.is_none_or(|ms| ms > 0.0 && ms < 1000.0), "{ms:?}");
    });
}

#[test]
fn devices_of_one_machine_share_memory_and_others_do_not() {
    let group = Device::simulated_group(SimConfig { devices: 2, ..SimConfig::default() });
    assert_eq!(group.len(), 2);
    group[0].peer_access(&group[1]).unwrap();
    group[0].peer_access(&group[1]).unwrap(); // twice is fine
    let stream = group[0].stream().unwrap();
    let theirs = group[1].upload(&[5u32, 6]).unwrap();
    let mine = group[0].alloc::<u32>(2).unwrap();
    mine.copy_from_device(&stream, &theirs.as_view()).unwrap();
    assert_eq!(mine.copy_to_vec(&stream).unwrap(), [5, 6]);
    let error = error_of(group[0].peer_access(&simulated()));
    assert!(matches!(&error, Error::PeerAccess { from, .. } if from == "sim:0"), "{error}");
}

#[test]
fn peers_of_a_gpu_are_itself_and_never_the_simulator() {
    let Some(device) = cuda() else { return };
    device.peer_access(&device).unwrap();
    assert!(matches!(error_of(device.peer_access(&simulated())), Error::PeerAccess { .. }));
    let count = Device::cuda_count().unwrap();
    if count < 2 {
        eprintln!("SKIPPED: one CUDA device, peer copies need two");
        return;
    }
    let other = Device::cuda(1).unwrap();
    device.peer_access(&other).unwrap();
    device.peer_access(&other).unwrap();
    let (stream, theirs) = (device.stream().unwrap(), other.upload(&[5u32, 6]).unwrap());
    let mine = device.alloc::<u32>(2).unwrap();
    mine.copy_from_device(&stream, &theirs.as_view()).unwrap();
    assert_eq!(mine.copy_to_vec(&stream).unwrap(), [5, 6]);
}

#[test]
fn slices_and_streams_of_the_bindings_are_used_in_place() {
    let Some(device) = cuda() else { return };
    let theirs = device.cuda_context().unwrap().clone();
    assert!(device.same(&Device::from_cuda(theirs.clone()).unwrap()), "one context, one device");
    let stream = theirs.new_stream().unwrap();
    let slice = stream.clone_htod(&[1.0f32, 2.0, 3.0]).unwrap();
    let ours = gpu::Stream::from_cuda(&device, stream.clone()).unwrap();
    let view = device.wrap_cuda(&slice).unwrap();
    let y = device.upload(&[10.0f32; 3]).unwrap();
    let axpy = device.load(&axpy(device.target().unwrap())).unwrap();
    axpy.launch(&ours, LaunchConfig::new(1), &AxpyArgs { y: y.ptr(), x: view.ptr(), a: 2.0, n: 3 }).unwrap();
    assert_eq!(y.copy_to_vec(&ours).unwrap(), [12.0, 14.0, 16.0]);
    // SAFETY: `stream` outlives the handle.
    let raw = unsafe { gpu::Stream::from_raw(&device, stream.cu_stream()) }.unwrap();
    assert_eq!(view.copy_to_vec(&raw).unwrap(), [1.0, 2.0, 3.0]);
}

#[test]
fn handles_work_from_any_thread() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let iota = device.load(&iota(device.target().unwrap(), 2)).unwrap();
        let buffers: Vec<Buffer<u32>> = (0..4).map(|_| device.alloc_zeros(128).unwrap()).collect();
        std::thread::scope(|scope| {
            for buffer in buffers {
                let (stream, iota) = (&stream, &iota);
                // Launched, read and dropped on a thread that has never seen the context.
                scope.spawn(move || {
                    iota.launch(stream, LaunchConfig::new(1), &FillArgs { out: buffer.ptr(), n: 128 }).unwrap();
                    assert_eq!(buffer.copy_to_vec(stream).unwrap(), (2..130).collect::<Vec<u32>>());
                });
            }
        });
        stream.synchronize().unwrap();
    });
}

#[test]
fn views_of_other_element_types_are_the_same_memory() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let buffer = device.upload(&[0x0000_0002_0000_0001u64, 0x0000_0004_0000_0003]).unwrap();
        let words = buffer.as_view().cast::<u32>().unwrap();
        assert_eq!(words.copy_to_vec(&stream).unwrap(), [1, 2, 3, 4]);
        assert_eq!(
            words.view(2..).unwrap().cast::<u64>().unwrap().copy_to_vec(&stream).unwrap(),
            [0x0000_0004_0000_0003]
        );
        for refused in [words.view(..3).unwrap().cast::<u64>(), words.view(1..3).unwrap().cast()] {
            assert!(matches!(error_of(refused), Error::SizeMismatch { .. }));
        }
    });
}

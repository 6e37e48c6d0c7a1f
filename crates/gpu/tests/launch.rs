//! Loading and launching: arguments arrive as declared, and what cannot be honoured is refused.

mod common;

use common::*;
use gpu::{Device, Error, LaunchConfig, SimConfig};
use ptx::*;

kernel_args! {
    /// One argument of every type, widths mixed so that a wrong offset or width shows.
    struct EchoArgs / EchoParams {
        /// [8] what arrived, zero-extended to 64 bits
        out: DevicePtr<u64>,
        a: u32,
        b: u64,
        c: i32,
        d: i64,
        e: f32,
        f: DevicePtr<f32>,
        g: u32,
    }
}

fn echo(target: Target) -> Kernel<EchoArgs> {
    build::<EchoArgs>("echo", target, LaunchBounds::threads(32), |p| {
        when(thread_index().eq(0), || {
            let zero_extended = |i: i32, value: Reg<u32>| p.out.offset(i).store(value.to_u64());
            zero_extended(0, p.a);
            p.out.offset(1).store(p.b);
            zero_extended(2, p.c.bitcast());
            p.out.offset(3).store(p.d.bitcast::<u64>());
            zero_extended(4, p.e.bitcast());
            p.out.offset(5).store(p.f.address());
            zero_extended(6, p.g);
        });
    })
    .expect("echo is well formed")
}

#[test]
fn arguments_arrive_with_every_bit() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let echo = device.load(&echo(device.target().unwrap())).unwrap();
        for value in [1u32, i32::MAX as u32, i32::MAX as u32 + 6] {
            let out = device.alloc_zeros::<u64>(8).unwrap();
            let wide = (value as u64) << 32 | !value as u64;
            let args = EchoArgs {
                out: out.ptr(),
                a: value,
                b: wide,
                c: value as i32,
                d: !wide as i64,
                e: f32::from_bits(value),
                f: DevicePtr::from_address(wide),
                g: !value,
            };
            echo.launch(&stream, LaunchConfig::new(1), &args).unwrap();
            let expected = [value as u64, wide, value as u64, !wide, value as u64, wide, !value as u64, 0];
            assert_eq!(out.copy_to_vec(&stream).unwrap(), expected, "{device:?}, value {value:#x}");
        }
    });
}

kernel_args! {
    struct BoxArgs / BoxParams {
        /// [512] the copied box, as it lies in shared memory
        out: DevicePtr<u32>,
        map: TensorMap,
        /// first row of the box
        row: u32,
    }
}

const BOX_ROWS: u32 = 16;
const ROW_BYTES: u32 = 128;

fn copy_box(target: Target) -> Kernel<BoxArgs> {
    build::<BoxArgs>("copy_box", target, LaunchBounds::threads(THREADS), |p| {
        let words = SharedArray::<u32>::aligned("words", BOX_ROWS * ROW_BYTES / 4, 1024);
        let arrived = MbarrierArray::new("arrived", 1).at(0);
        let thread = thread_index();
        when(thread.eq(0), || {
            arrived.init(1);
            fence_mbarrier_init();
        });
        sync_threads();
        when(thread.eq(0), || {
            arrived.arrive_expect(BOX_ROWS * ROW_BYTES);
            copy_tensor(words.ptr(), p.map, &[0.into(), p.row], arrived, None);
        });
        arrived.wait(0);
        for i in 0..words.len() / THREADS {
            let word = thread + i * THREADS;
            p.out.at(word).store(words.at(word).load());
        }
    })
    .expect("copy_box is well formed")
}

#[test]
fn tensor_maps_arrive_by_value_and_swizzle() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let copy_box = device.load(&copy_box(device.target().unwrap())).unwrap();
        let (rows, stride_words) = (40u32, 48u32); // the stride exceeds the row
        let tensor: Vec<u32> = (0..rows * stride_words).collect();
        let tensor = device.upload(&tensor).unwrap();
        let out = device.alloc_zeros::<u32>((BOX_ROWS * ROW_BYTES / 4) as usize).unwrap();
        let desc = TensorMapDesc::new(
            tensor.ptr().address(),
            &[ROW_BYTES as u64, rows as u64],
            &[stride_words as u64 * 4],
            &[ROW_BYTES, BOX_ROWS],
            Swizzle::B128,
        )
        .unwrap();
        let map = device.tensor_map(&desc).unwrap();
        let first = 32; // the last half of the box lies past the tensor and reads as zero
        copy_box.launch(&stream, LaunchConfig::new(1), &BoxArgs { out: out.ptr(), map, row: first }).unwrap();
        let got = out.copy_to_vec(&stream).unwrap();
        for row in 0..BOX_ROWS {
            for word in 0..ROW_BYTES / 4 {
                let at = row * (ROW_BYTES / 4) + ((word / 4) ^ (row & 7)) * 4 + word % 4;
                let want = if first + row < rows { (first + row) * stride_words + word } else { 0 };
                assert_eq!(got[at as usize], want, "{device:?}, row {row}, word {word}");
            }
        }
    });
}

#[test]
fn axpy_is_exact_and_its_report_names_registers() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let n = 1000u32;
        let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let (x_dev, y_dev) = (device.upload(&x).unwrap(), device.upload(&vec![1.0f32; n as usize]).unwrap());
        let axpy = device.load(&axpy(device.target().unwrap())).unwrap();
        let args = AxpyArgs { y: y_dev.ptr(), x: x_dev.ptr(), a: 0.5, n };
        axpy.launch(&stream, LaunchConfig::new(n.div_ceil(THREADS)), &args).unwrap();
        let want: Vec<f32> = x.iter().map(|x| 0.5 * x + 1.0).collect();
        assert_eq!(y_dev.copy_to_vec(&stream).unwrap(), want, "{device:?}");
        let report = axpy.report();
        assert_eq!(report.registers == 0, device.info().simulated, "{report:?}");
        assert_eq!((report.spill_bytes, report.performance_notes.len()), (0, 0), "{report:?}");
    });
}

#[test]
fn loading_the_same_kernel_again_does_not_compile_again() {
    let Some(device) = cuda() else { return };
    let kernel = || iota(device.target().unwrap(), 77);
    let first = device.load(&kernel()).unwrap();
    let again = Device::cuda(0).unwrap().load(&kernel()).unwrap();
    assert_eq!(first.report(), again.report(), "the wall time differs if it was compiled twice");
}

#[test]
fn an_empty_grid_launches_nothing() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let iota = device.load(&iota(device.target().unwrap(), 5)).unwrap();
        let out = device.alloc_zeros::<u32>(4).unwrap();
        for grid in [[0, 1, 1], [1, 0, 1], [1, 1, 0]] {
            iota.launch(&stream, LaunchConfig::grid(grid), &FillArgs { out: out.ptr(), n: 4 }).unwrap();
        }
        assert_eq!(out.copy_to_vec(&stream).unwrap(), [0; 4], "{device:?}");
    });
}

#[test]
fn a_kernel_of_another_architecture_is_refused_by_name() {
    on_every_device(|device| {
        let own = device.target().unwrap();
        let other = Target::ALL.into_iter().find(|t| *t != own).unwrap();
        match error_of(device.load(&iota(other, 0))) {
            Error::UnsupportedArchitecture { kernel, found, supported } => {
                assert_eq!(kernel.as_deref(), Some("iota"));
                assert_eq!(found, own.compute_capability());
                assert_eq!(supported, [other]);
            }
            other => panic!("{other}"),
        }
    });
}

#[test]
fn a_simulated_machine_can_be_of_either_architecture() {
    for target in Target::ALL {
        let device = Device::simulated_group_as(SimConfig::default(), target).swap_remove(0);
        let stream = device.stream().unwrap();
        let out = device.alloc::<u32>(4).unwrap();
        let iota = device.load(&iota(target, 9)).unwrap();
        iota.launch(&stream, LaunchConfig::new(1), &FillArgs { out: out.ptr(), n: 4 }).unwrap();
        assert_eq!(out.copy_to_vec(&stream).unwrap(), [9, 10, 11, 12]);
    }
}

#[test]
fn overlap_is_refused_for_a_kernel_that_never_waits() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let out = device.alloc_zeros::<u32>(4).unwrap();
        let iota = device.load(&iota(device.target().unwrap(), 5)).unwrap();
        let args = FillArgs { out: out.ptr(), n: 4 };
        let error = error_of(iota.launch(&stream, LaunchConfig::new(1).overlap(true), &args));
        assert!(matches!(&error, Error::LaunchRefused { kernel, .. } if kernel == "iota"), "{error}");
        assert_eq!(out.copy_to_vec(&stream).unwrap(), [0; 4], "{device:?}");
    });
}

#[test]
fn impossible_grids_and_clusters_are_refused() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let iota = device.load(&iota(device.target().unwrap(), 5)).unwrap();
        let args = FillArgs { out: DevicePtr::NULL, n: 0 };
        for config in [
            LaunchConfig::grid([1, 65_536, 1]),
            LaunchConfig::grid([1, 1, 65_536]),
            LaunchConfig::new(1 << 31),
            LaunchConfig::new(3).cluster(2),
            LaunchConfig::new(32).cluster(32),
            LaunchConfig::new(4).cluster(0),
        ] {
            let error = error_of(iota.launch(&stream, config, &args));
            assert!(matches!(error, Error::LaunchRefused { .. }), "{device:?}, {config:?}: {error}");
        }
        stream.synchronize().unwrap();
    });
}

#[test]
fn shared_memory_works_at_the_default_limit_and_at_the_largest() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        for bytes in [512, 48 * 1024, 48 * 1024 + 16, device.info().shared_bytes_max] {
            let kernel = through_shared(device.target().unwrap(), bytes);
            assert_eq!(kernel.ir().shared_bytes, bytes);
            let function = device.load(&kernel).unwrap();
            assert_eq!(function.report().shared_bytes, bytes, "{device:?}");
            let out = device.alloc_zeros::<u32>(THREADS as usize).unwrap();
            function.launch(&stream, LaunchConfig::new(1), &FillArgs { out: out.ptr(), n: THREADS }).unwrap();
            let want: Vec<u32> = (0..THREADS).map(|i| (THREADS - 1 - i) * 3).collect();
            assert_eq!(out.copy_to_vec(&stream).unwrap(), want, "{device:?}, {bytes} bytes");
        }
    });
}

#[test]
fn shared_memory_may_be_asked_for_by_share() {
    on_every_device(|device| {
        let function = device.load(&echo(device.target().unwrap())).unwrap();
        for percent in [0, 50, 100] {
            function.prefer_shared_memory(percent).unwrap();
        }
        let error = function.prefer_shared_memory(101).unwrap_err();
        assert!(matches!(error, Error::LaunchRefused { .. }), "{error}");
    });
}

#[test]
fn a_stream_of_another_device_is_refused() {
    let (mine, other) = (simulated(), simulated());
    let iota = mine.load(&iota(mine.target().unwrap(), 0)).unwrap();
    let out = mine.alloc::<u32>(4).unwrap();
    let stream = other.stream().unwrap();
    let error = error_of(iota.launch(&stream, LaunchConfig::new(1), &FillArgs { out: out.ptr(), n: 4 }));
    assert!(matches!(error, Error::WrongDevice { what: "stream", .. }), "{error}");
    assert!(matches!(error_of(out.copy_to_vec(&stream)), Error::WrongDevice { .. }));
}

#[test]
fn clusters_run_on_cuda_and_are_refused_by_name_on_the_simulator() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let iota = device.load(&iota(device.target().unwrap(), 3)).unwrap();
        let n = 16 * THREADS;
        let out = device.alloc_zeros::<u32>(n as usize).unwrap();
        for size in [1, 2, 8, 16] {
            let config = LaunchConfig::new(16).cluster(size);
            let launched = iota.launch(&stream, config, &FillArgs { out: out.ptr(), n });
            if device.info().simulated && size > 1 {
                assert!(matches!(error_of(launched), Error::NotSimulated { .. }));
            } else {
                launched.unwrap();
                assert_eq!(out.copy_to_vec(&stream).unwrap()[(n - 1) as usize], n - 1 + 3);
            }
        }
    });
}

kernel_args! {
    struct MeetArgs / MeetParams {
        /// [1] set by the other device
        mine: DevicePtr<u32>,
        /// [1] of the other device
        theirs: DevicePtr<u32>,
    }
}

/// Raises the other device's flag and waits for its own.
fn meet(target: Target) -> Kernel<MeetArgs> {
    build::<MeetArgs>("meet", target, LaunchBounds::threads(32), |p| {
        when(thread_index().eq(0), || {
            p.theirs.store_as(Sem::Release(Scope::Sys), 1);
            while_(|| p.mine.load_as(LoadMode::acquire(Scope::Sys)).eq(0), || {});
        });
    })
    .expect("meet is well formed")
}

#[test]
fn launches_on_two_devices_meet_when_both_are_enqueued() {
    let mut pairs = vec![Device::simulated_group(SimConfig { devices: 2, ..SimConfig::default() })];
    match Device::cuda_count() {
        Ok(count) if count >= 2 => pairs.push(vec![Device::cuda(0).unwrap(), Device::cuda(1).unwrap()]),
        _ => eprintln!("SKIPPED: no two CUDA devices"),
    }
    for pair in pairs {
        let flags: Vec<_> = pair.iter().map(|device| device.alloc_zeros::<u32>(1).unwrap()).collect();
        let streams: Vec<_> = pair.iter().map(|device| device.stream().unwrap()).collect();
        let functions: Vec<_> = pair.iter().map(|d| d.load(&meet(d.target().unwrap())).unwrap()).collect();
        pair[0].peer_access(&pair[1]).unwrap();
        pair[1].peer_access(&pair[0]).unwrap();
        for (i, function) in functions.iter().enumerate() {
            let args = MeetArgs { mine: flags[i].ptr(), theirs: flags[1 - i].ptr() };
            function.launch(&streams[i], LaunchConfig::new(1), &args).unwrap();
        }
        for (stream, flag) in streams.iter().zip(&flags) {
            assert_eq!(flag.copy_to_vec(stream).unwrap(), [1], "{pair:?}");
        }
    }
}

#[test]
fn waiting_for_an_idle_stream_does_not_run_another_on_the_simulator() {
    // Half of a meeting: running it alone would be a deadlock.
    let pair = Device::simulated_group(SimConfig { devices: 2, ..SimConfig::default() });
    let flags: Vec<_> = pair.iter().map(|device| device.alloc_zeros::<u32>(1).unwrap()).collect();
    let streams: Vec<_> = pair.iter().map(|device| device.stream().unwrap()).collect();
    let meet_of = |i: usize| {
        let args = MeetArgs { mine: flags[i].ptr(), theirs: flags[1 - i].ptr() };
        let function = pair[i].load(&meet(Target::Sm90a)).unwrap();
        function.launch(&streams[i], LaunchConfig::new(1), &args).unwrap();
    };
    meet_of(0);
    streams[1].synchronize().unwrap();
    assert_eq!(flags[1].copy_to_vec(&streams[1]).unwrap(), [0]);
    pair[1].upload(&[1u32, 2, 3]).unwrap();
    meet_of(1);
    streams[0].synchronize().unwrap();
    assert_eq!(flags[1].copy_to_vec(&streams[1]).unwrap(), [1]);
}

/// `out[i]` is the value that the next CTA of the cluster holds for thread `i`.
fn rotate(target: Target, size: u32) -> Kernel<FillArgs> {
    build::<FillArgs>("rotate", target, LaunchBounds::threads(THREADS).cluster(size), |p| {
        let words = SharedArray::<u32>::new("words", THREADS);
        let t = thread_index();
        words.at(t).store(cta_index().mad(THREADS, t));
        cluster_sync();
        let next = (cluster_rank() + 1) % size;
        let i = cta_index().mad(THREADS, t);
        when(i.lt(p.n), || p.out.at(i).store(words.at(t).of_cta(next).load()));
        // ORDER: the reads of peers, before they end.
        cluster_sync();
    })
    .expect("rotate is well formed")
}

#[test]
fn a_kernel_of_clusters_always_gets_them() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        for size in [1, 2, 8, 16] {
            let rotate = device.load(&rotate(device.target().unwrap(), size)).unwrap();
            let n = 32 * THREADS;
            let out = device.alloc_zeros::<u32>(n as usize).unwrap();
            let args = FillArgs { out: out.ptr(), n };
            rotate.launch(&stream, LaunchConfig::new(32), &args).unwrap();
            let want: Vec<u32> = (0..n)
                .map(|i| {
                    let cta = i / THREADS;
                    (cta / size * size + (cta + 1) % size) * THREADS + i % THREADS
                })
                .collect();
            assert_eq!(out.copy_to_vec(&stream).unwrap(), want, "{device:?}, clusters of {size}");
            let error = error_of(rotate.launch(&stream, LaunchConfig::new(32).cluster(4), &args));
            assert!(matches!(error, Error::LaunchRefused { .. }), "{error}");
            if size > 1 {
                let error = error_of(rotate.launch(&stream, LaunchConfig::new(33), &args));
                assert!(matches!(error, Error::LaunchRefused { .. }), "{error}");
            }
        }
    });
}

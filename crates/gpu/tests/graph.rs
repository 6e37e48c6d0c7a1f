//! Capture and replay.

mod common;

use common::*;
use gpu::{Error, Graph, LaunchConfig};

#[test]
fn replays_see_changed_contents() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let n = 300;
        let (x, y) = (device.alloc_zeros::<f32>(n).unwrap(), device.alloc_zeros::<f32>(n).unwrap());
        let axpy = device.load(&axpy(device.target().unwrap())).unwrap();
        let args = AxpyArgs { y: y.ptr(), x: x.ptr(), a: 1.0, n: n as u32 };
        let config = LaunchConfig::new(3);
        let graph = Graph::capture(&stream, |s| {
            y.fill_bytes(s, 0)?;
            axpy.launch(s, config, &args)?;
            axpy.launch(s, config.overlap(true), &args)
        })
        .unwrap();
        assert_eq!((graph.info().nodes, graph.info().edges), (3, 2), "{device:?}");
        assert_eq!(graph.info().programmatic_edges, 1, "{device:?}");
        let other = device.stream().unwrap();
        for round in 1..4 {
            let values: Vec<f32> = (0..n).map(|i| (i * round) as f32).collect();
            x.copy_from(&stream, &values).unwrap();
            graph.launch(&stream).unwrap();
            graph.launch(&stream).unwrap();
            let want: Vec<f32> = values.iter().map(|v| 2.0 * v).collect();
            assert_eq!(y.copy_to_vec(&stream).unwrap(), want, "{device:?}, round {round}");
            // Any stream of the device will do.
            graph.launch(&other).unwrap();
            assert_eq!(y.copy_to_vec(&other).unwrap(), want);
        }
    });
}

#[test]
fn capturing_runs_nothing() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let out = device.alloc_zeros::<u32>(4).unwrap();
        let iota = device.load(&iota(device.target().unwrap(), 5)).unwrap();
        let args = FillArgs { out: out.ptr(), n: 4 };
        let graph = Graph::capture(&stream, |s| iota.launch(s, LaunchConfig::new(1), &args)).unwrap();
        assert_eq!(out.copy_to_vec(&stream).unwrap(), [0; 4], "{device:?}");
        graph.launch(&stream).unwrap();
        assert_eq!(out.copy_to_vec(&stream).unwrap(), [5, 6, 7, 8], "{device:?}");
    });
}

#[test]
fn an_empty_capture_replays_as_nothing() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let graph = Graph::capture(&stream, |_| Ok(())).unwrap();
        assert_eq!(graph.info().nodes, 0);
        graph.launch(&stream).unwrap();
        stream.synchronize().unwrap();
    });
}

#[test]
fn what_would_wait_or_allocate_is_refused_inside_and_the_stream_survives() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let event = device.event().unwrap();
        let buffer = device.alloc_zeros::<u32>(4).unwrap();
        let kernel = iota(device.target().unwrap(), 0);
        let axpy_kernel = axpy(device.target().unwrap());
        let refused = |what: &str, attempt: &dyn Fn(&gpu::Stream) -> Result<(), Error>| {
            let error = error_of(Graph::capture(&stream, attempt));
            assert!(matches!(error, Error::Capture { .. }), "{device:?}, {what}: {error}");
        };
        refused("synchronize", &|s| s.synchronize());
        refused("is_idle", &|s| s.is_idle().map(|_| ()));
        refused("copy to host", &|s| buffer.copy_to_vec(s).map(|_| ()));
        refused("copy from host", &|s| buffer.copy_from(s, &[1; 4]));
        refused("alloc", &|_| device.alloc::<u32>(1).map(|_| ()));
        refused("upload", &|_| device.upload(&[1u32]).map(|_| ()));
        refused("load", &|_| device.load(&axpy_kernel).map(|_| ()));
        refused("capture", &|s| Graph::capture(s, |_| Ok(())).map(|_| ()));
        refused("event", &|s| {
            event.record(s)?;
            event.synchronize()
        });
        // None of it happened, and the stream captures and runs as before.
        let iota = device.load(&kernel).unwrap();
        let args = FillArgs { out: buffer.ptr(), n: 4 };
        let graph = Graph::capture(&stream, |s| iota.launch(s, LaunchConfig::new(1), &args)).unwrap();
        graph.launch(&stream).unwrap();
        assert_eq!(buffer.copy_to_vec(&stream).unwrap(), [0, 1, 2, 3], "{device:?}");
    });
}

#[test]
fn a_failing_closure_leaves_nothing_behind() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let out = device.alloc_zeros::<u32>(4).unwrap();
        let iota = device.load(&iota(device.target().unwrap(), 5)).unwrap();
        let args = FillArgs { out: out.ptr(), n: 4 };
        let error = error_of(Graph::capture(&stream, |s| {
            iota.launch(s, LaunchConfig::new(1), &args)?;
            Err(Error::SizeMismatch { what: "this", found: 1, expected: 2 })
        }));
        assert!(matches!(error, Error::SizeMismatch { .. }), "the closure's own error: {error}");
        assert_eq!(out.copy_to_vec(&stream).unwrap(), [0; 4], "{device:?}");
    });
}

#[test]
fn a_panicking_closure_leaves_nothing_behind() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let out = device.alloc_zeros::<u32>(4).unwrap();
        let iota = device.load(&iota(device.target().unwrap(), 5)).unwrap();
        let args = FillArgs { out: out.ptr(), n: 4 };
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            Graph::capture(&stream, |s| {
                iota.launch(s, LaunchConfig::new(1), &args)?;
                panic!("in the closure")
            })
        }));
        assert!(panicked.is_err());
        assert_eq!(out.copy_to_vec(&stream).unwrap(), [0; 4], "{device:?}");
        iota.launch(&stream, LaunchConfig::new(1), &args).unwrap();
        assert_eq!(out.copy_to_vec(&stream).unwrap(), [5, 6, 7, 8], "{device:?}");
    });
}

#[test]
fn buffers_dropped_inside_live_as_long_as_the_graph() {
    on_every_device(|device| {
        let stream = device.stream().unwrap();
        let out = device.alloc_zeros::<u32>(256).unwrap();
        let iota = device.load(&iota(device.target().unwrap(), 1)).unwrap();
        let mut scratch = Some(device.alloc_zeros::<u32>(256).unwrap());
        let graph = Graph::capture(&stream, |s| {
            let scratch = scratch.take().expect("captured once");
            iota.launch(s, LaunchConfig::new(2), &FillArgs { out: scratch.ptr(), n: 256 })?;
            out.copy_from_device(s, &scratch.as_view())
        })
        .unwrap();
        // Whoever gets the memory, it is not the graph's.
        let hog = device.alloc::<u8>(1 << 20).unwrap();
        for _ in 0..3 {
            out.fill_bytes(&stream, 0xff).unwrap();
            hog.fill_bytes(&stream, 0xff).unwrap();
            graph.launch(&stream).unwrap();
            assert_eq!(out.copy_to_vec(&stream).unwrap(), (1..257).collect::<Vec<u32>>(), "{device:?}");
            assert!(hog.copy_to_vec(&stream).unwrap().iter().all(|b| *b == 0xff), "{device:?}");
        }
    });
}

#[test]
fn a_second_stream_joins_through_events() {
    on_every_device(|device| {
        let (main, side) = (device.stream().unwrap(), device.stream().unwrap());
        let (a, b) = (device.alloc_zeros::<u32>(256).unwrap(), device.alloc_zeros::<u32>(256).unwrap());
        let iota = device.load(&iota(device.target().unwrap(), 1)).unwrap();
        let (forked, joined) = (device.event().unwrap(), device.event().unwrap());
        let capture = || {
            Graph::capture(&main, |main| {
                iota.launch(main, LaunchConfig::new(2), &FillArgs { out: a.ptr(), n: 256 })?;
                forked.record(main)?;
                side.wait(&forked)?;
                b.copy_from_device(&side, &a.as_view())?;
                joined.record(&side)?;
                main.wait(&joined)?;
                a.fill_bytes(main, 0)
            })
        };
        let graph = capture().unwrap();
        assert_eq!(graph.info().nodes, 3, "{device:?}");
        for _ in 0..3 {
            b.fill_bytes(&main, 0).unwrap();
            graph.launch(&main).unwrap();
            assert_eq!(b.copy_to_vec(&main).unwrap(), (1..257).collect::<Vec<u32>>(), "{device:?}");
            assert_eq!(a.copy_to_vec(&main).unwrap(), [0; 256], "{device:?}");
        }
        side.synchronize().unwrap(); // out of the capture again
        let unjoined = Graph::capture(&main, |main| {
            forked.record(main)?;
            side.wait(&forked)?;
            b.fill_bytes(&side, 1)
        });
        assert!(matches!(error_of(unjoined), Error::Capture { .. }), "{device:?}");
    });
}

#[test]
fn waiting_inside_for_an_event_from_outside_is_refused() {
    on_every_device(|device| {
        let (main, side) = (device.stream().unwrap(), device.stream().unwrap());
        let event = device.event().unwrap();
        event.record(&side).unwrap();
        let error = error_of(Graph::capture(&main, |main| main.wait(&event)));
        assert!(matches!(error, Error::Capture { .. }), "{device:?}: {error}");
        main.synchronize().unwrap();
    });
}

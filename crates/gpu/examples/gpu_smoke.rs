//! Runs `y += a * x` on the first usable GPU, or the simulator, and prints what the device is and what its assembler said.
//!
//! `cargo run --release -p gpu --example gpu_smoke`

use gpu::{Device, Error, Event, Graph, LaunchConfig, Stream};
use ptx::*;

kernel_args! {
    /// `y += a * x`
    struct AxpyArgs / AxpyParams {
        /// [n] in and out
        y: DevicePtr<f32>,
        /// [n] input
        x: DevicePtr<f32>,
        /// factor
        a: f32,
        /// elements
        n: u32,
    }
}

const THREADS: u32 = 256;

fn axpy(target: Target) -> Result<Kernel<AxpyArgs>, VerifyError> {
    build::<AxpyArgs>("axpy", target, LaunchBounds::threads(THREADS), |p| {
        wait_for_dependencies();
        let i = cta_index().mad(THREADS, thread_index());
        when(i.lt(p.n), || {
            let y = p.y.at(i);
            y.store(p.x.at(i).load().fma(p.a, y.load()));
        });
        launch_dependents();
    })
}

fn main() -> Result<(), Error> {
    let (device, why) = Device::best();
    println!("{why}");
    println!("{:#?}", device.info());

    let axpy = device.load(&axpy(device.target()?)?)?;
    println!("{:#?}", axpy.report());
    println!("second load: {:.3} ms", {
        let started = std::time::Instant::now();
        device.load(&self::axpy(device.target()?)?)?;
        started.elapsed().as_secs_f64() * 1e3
    });

    let n = if device.info().simulated { 10_000 } else { 10_000_000 };
    let x: Vec<f32> = (0..n).map(|i| (i % 1000) as f32).collect();
    let (x_dev, y_dev) = (device.upload(&x)?, device.alloc_zeros::<f32>(n)?);
    let stream = device.stream()?;
    let args = AxpyArgs { y: y_dev.ptr(), x: x_dev.ptr(), a: 2.0, n: n as u32 };
    let config = LaunchConfig::new((n as u32).div_ceil(THREADS));
    axpy.launch(&stream, config, &args)?;
    check(&y_dev.copy_to_vec(&stream)?, &x, 2.0);
    println!("launch: {n} elements correct");

    // Three dependent launches per replay, each allowed to start while its predecessor drains.
    let graph = Graph::capture(&stream, |s| (0..3).try_for_each(|_| axpy.launch(s, config.overlap(true), &args)))?;
    println!("{:?}", graph.info());
    let ms = timed(&device, &stream, || (0..10).try_for_each(|_| graph.launch(&stream)))?;
    check(&y_dev.copy_to_vec(&stream)?, &x, 62.0);
    match ms {
        Some(ms) => println!("graph: 30 overlapping launches correct, {:.1} us each", ms * 1e3 / 30.0),
        None => println!("graph: 30 overlapping launches correct"),
    }
    Ok(())
}

fn timed(device: &Device, stream: &Stream, work: impl FnOnce() -> Result<(), Error>) -> Result<Option<f32>, Error> {
    let (start, end): (Event, Event) = (device.event()?, device.event()?);
    start.record(stream)?;
    work()?;
    end.record(stream)?;
    stream.synchronize()?;
    start.elapsed_ms(&end)
}

fn check(y: &[f32], x: &[f32], factor: f32) {
    for (i, (y, x)) in y.iter().zip(x).enumerate() {
        assert_eq!(*y, factor * x, "element {i}");
    }
}

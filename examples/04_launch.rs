//! Launching: on a GPU if there is one, else on the simulator, with the same code; then as a graph.
//!
//! `cargo run --example 04_launch`

use gpu::{Device, Graph, LaunchConfig};
use ptx::*;

kernel_args! {
    /// `out[i] = x[i] + step`
    pub struct AddArgs / AddParams {
        /// [n] output
        pub out: DevicePtr<u32>,
        /// [n] input
        pub x: DevicePtr<u32>,
        /// what to add
        pub step: u32,
        /// elements
        pub n: u32,
    }
}

fn add(target: Target) -> Result<Kernel<AddArgs>, VerifyError> {
    build::<AddArgs>("add", target, LaunchBounds::threads(128), |p| {
        let i = cta_index().mad(128, thread_index());
        // ORDER: the previous launch's stores, before the loads below. What comes above this line overlaps it.
        wait_for_dependencies();
        launch_dependents();
        when(i.lt(p.n), || p.out.at(i).store(p.x.at(i).load() + p.step));
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (device, why) = Device::best();
    println!("{why}");
    let stream = device.stream()?;

    // Compiled here, once; a launch compiles, allocates and waits for nothing.
    let function = device.load(&add(device.target()?)?)?;
    let n = 1000;
    let (a, b) = (device.upload(&vec![0u32; n])?, device.alloc::<u32>(n)?);
    // Both launches may start before their predecessor has ended: the kernel waits where it must.
    let config = LaunchConfig::new(n.div_ceil(128) as u32).overlap(true);
    let there = AddArgs { out: b.ptr(), x: a.ptr(), step: 1, n: n as u32 };
    let back = AddArgs { out: a.ptr(), x: b.ptr(), step: 10, n: n as u32 };

    // Captured without running, then replayed by one call each.
    let graph = Graph::capture(&stream, |stream| {
        function.launch(stream, config, &there)?;
        function.launch(stream, config, &back)
    })?;
    println!("{:?}", graph.info());
    for _ in 0..3 {
        graph.launch(&stream)?;
    }
    let result = a.copy_to_vec(&stream)?;
    assert!(result.iter().all(|v| *v == 33), "three times 1 + 10");
    println!("3 replays of 2 launches: every element is {}", result[0]);
    Ok(())
}

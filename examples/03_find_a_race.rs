//! A missing barrier is found on any laptop, whatever the schedule, and named by line.
//!
//! `cargo run --example 03_find_a_race`

use gpu::{Device, Error, LaunchConfig, SimConfig, SimFault, SimTrapKind};
use ptx::*;

kernel_args! {
    /// `out[i] = i` of the opposite thread
    pub struct ReverseArgs / ReverseParams {
        /// [128] output
        pub out: DevicePtr<u32>,
    }
}

/// Threads exchange a word through shared memory. `barrier` false forgets to wait for the others.
fn reverse(barrier: bool) -> Result<Kernel<ReverseArgs>, VerifyError> {
    build::<ReverseArgs>("reverse", Target::Sm90a, LaunchBounds::threads(128), |p| {
        let words = SharedArray::<u32>::new("words", 128);
        let t = thread_index();
        words.at(t).store(t);
        if barrier {
            sync_threads(); // ORDER: every thread's store above, before the opposite thread's load below.
        }
        p.out.at(t).store(words.at(Reg::<u32>::from(127u32) - t).load());
    })
}

/// Runs the kernel in one schedule and returns what it wrote.
fn run(kernel: &Kernel<ReverseArgs>, config: SimConfig) -> Result<Vec<u32>, Error> {
    let device = Device::simulated(config);
    let stream = device.stream()?;
    let out = device.alloc::<u32>(128)?;
    device.load(kernel)?.launch(&stream, LaunchConfig::new(1), &ReverseArgs { out: out.ptr() })?;
    out.copy_to_vec(&stream)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let racy = reverse(false)?;
    for seed in 0..3 {
        // Depending on the schedule the load is of memory that nothing has written yet, or races with the store.
        let Err(Error::Sim(fault)) = run(&racy, SimConfig::seeded(seed)) else {
            return Err("the race was missed".into());
        };
        let SimFault::Trap(trap) = *fault else { return Err(fault) };
        assert!(matches!(trap.kind, SimTrapKind::DataRace | SimTrapKind::Uninitialized), "{trap}");
        println!("seed {seed}: {trap}\n");
    }

    let sound = reverse(true)?;
    for seed in 0..3 {
        let want: Vec<u32> = (0..128).rev().collect();
        assert_eq!(run(&sound, SimConfig::seeded(seed))?, want);
    }
    println!("with the barrier every schedule finishes, with the right answer");
    Ok(())
}

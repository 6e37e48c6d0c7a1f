//! The same instructions on the CPU: no GPU, no CUDA, every access checked.
//!
//! `cargo run --example 02_simulate`

use ptx::*;
use ptx_sim::{Command, Config, DeviceId, Launch, Machine};

/// Threads of a CTA: eight warps.
const THREADS: u32 = 256;

kernel_args! {
    /// `total += x[0] + .. + x[n - 1]`
    pub struct SumArgs / SumParams {
        /// the sum, in and out
        pub total: DevicePtr<u32>,
        /// [n] input
        pub x: DevicePtr<u32>,
        /// elements
        pub n: u32,
    }
}

/// Lanes add up with a warp reduction, warps through shared memory, CTAs with an atomic.
fn sum() -> Result<Kernel<SumArgs>, VerifyError> {
    build::<SumArgs>("sum", Target::Sm90a, LaunchBounds::threads(THREADS), |p| {
        let partial = SharedArray::<u32>::new("partial", THREADS / 32);
        let i = cta_index().mad(THREADS, thread_index());
        let mine = Var::<u32>::new(0);
        when(i.lt(p.n), || mine.set(p.x.at(i).load()));
        let warp = redux(Redux::AddU32, mine.get());
        // The warp's number comes from a shuffle, which all lanes execute: not inside `when`.
        let slot = partial.at(warp_index());
        when(lane_index().eq(0), || slot.store(warp));
        sync_threads(); // ORDER: the warps' partial sums, before warp 0 reads them.
        when(thread_index().lt(THREADS / 32), || {
            p.total.reduce(Atomic::Add, Sem::Relaxed(Scope::Gpu), partial.at(thread_index()).load());
        });
    })
}

fn run(config: Config, x: &[u32]) -> Result<u32, Box<dyn std::error::Error>> {
    let mut machine = Machine::new(config);
    let device = DeviceId(0);
    let stream = machine.create_stream(device);
    let input = machine.alloc(device, 4 * x.len() as u64)?;
    let total = machine.alloc(device, 4)?;
    machine.write(input, &x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())?;
    machine.write(total, &[0; 4])?;

    let args = SumArgs { total: DevicePtr::from_address(total), x: DevicePtr::from_address(input), n: x.len() as u32 };
    let kernel = sum()?;
    let launch = Launch {
        kernel: kernel.ir().clone(),
        grid: [(x.len() as u32).div_ceil(THREADS), 1, 1],
        shared_bytes: kernel.ir().shared_bytes,
        params: ArgBuffer::pack(&args).bytes().to_vec(),
        overlap: false,
    };
    machine.enqueue(stream, Command::Launch(launch))?;
    machine.run()?;
    let mut bytes = [0; 4];
    machine.read(total, &mut bytes)?;
    println!("{:?}: {} warp instructions", config.schedule, machine.executed());
    Ok(u32::from_le_bytes(bytes))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let x: Vec<u32> = (0..1000).collect();
    let want: u32 = x.iter().sum();
    // The default order of warps, then random ones; a seed replays its order exactly.
    for config in std::iter::once(Config::default()).chain((0..4).map(Config::seeded)) {
        assert_eq!(run(config, &x)?, want);
    }
    println!("sum of 0..1000 = {want} in every schedule");
    Ok(())
}

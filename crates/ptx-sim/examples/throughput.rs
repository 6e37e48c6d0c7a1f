//! How fast the simulator is: thread instructions per second for a few kinds of code, each with a checked result.
//!
//! `cargo run --release -p ptx-sim --example throughput`

use std::time::Instant;

use ptx::*;
use ptx_sim::*;

kernel_args! {
    /// Arguments of every kernel here.
    pub struct Args / Params {
        /// [threads of the grid] output
        pub out: DevicePtr<u32>,
        /// [threads of the grid + 32] input
        pub src: DevicePtr<u32>,
        /// rounds
        pub n: u32,
    }
}

const THREADS: u32 = 256;
const CTAS: u32 = 16;

fn measure(name: &str, rounds: u32, body: impl FnOnce(Params)) {
    let kernel = build::<Args>("throughput", Target::Sm90a, LaunchBounds::threads(THREADS), body).unwrap();
    let mut machine = Machine::new(Config::default());
    let stream = machine.create_stream(DeviceId(0));
    let words = u64::from(THREADS * CTAS);
    let out = machine.alloc(DeviceId(0), 4 * words).unwrap();
    let src = machine.alloc(DeviceId(0), 4 * (words + 32)).unwrap();
    machine.write(src, &vec![1; 4 * (words as usize + 32)]).unwrap();
    let args = Args { out: DevicePtr::from_address(out), src: DevicePtr::from_address(src), n: rounds };
    let launch = Launch {
        kernel: kernel.ir().clone(),
        grid: [CTAS, 1, 1],
        shared_bytes: kernel.ir().shared_bytes,
        params: ArgBuffer::pack(&args).bytes().to_vec(),
        overlap: false,
    };
    machine.enqueue(stream, Command::Launch(launch)).unwrap();
    let start = Instant::now();
    machine.run().unwrap();
    let seconds = start.elapsed().as_secs_f64();
    let mut bytes = vec![0; 4 * words as usize];
    machine.read(out, &mut bytes).unwrap();
    let sum = bytes.chunks_exact(4).map(|b| u64::from(u32::from_le_bytes(b.try_into().unwrap()))).sum::<u64>();
    let warp_instructions = machine.executed();
    println!(
        "{name:<22} {:>9.1} M thread instructions/s  {:>7.1} ns per warp instruction  ({warp_instructions} in {seconds:.2} s, result {sum:#x})",
        32.0 * warp_instructions as f64 / seconds / 1e6,
        1e9 * seconds / warp_instructions as f64,
    );
}

fn main() {
    let thread = || cta_index().mad(THREADS, thread_index());
    measure("integer", 4000, |p| {
        let x = Var::new(thread());
        for_range(0u32, p.n, 1u32, |i| {
            for _ in 0..8 {
                x.set((x.get() ^ i) * 1_664_525 + 1_013_904_223);
            }
        });
        p.out.at(thread()).store(x.get());
    });
    measure("fp32 fma", 4000, |p| {
        let x = Var::new(Reg::<f32>::from(1.0));
        for_range(0u32, p.n, 1u32, |_| {
            for _ in 0..16 {
                x.set(x.get().fma(0.999, 0.5));
            }
        });
        p.out.at(thread()).store(x.get().bitcast::<u32>());
    });
    measure("divergent", 400, |p| {
        let x = Var::new(Reg::<u32>::from(0));
        for_range(0u32, p.n, 1u32, |i| {
            when_else(((i ^ lane_index()) & 1).eq(0), || x.add(i), || x.set(x.get() ^ i));
        });
        p.out.at(thread()).store(x.get());
    });
    measure("shuffle and vote", 1000, |p| {
        let x = Var::new(thread());
        for_range(0u32, p.n, 1u32, |_| {
            x.set(shuffle_xor(x.get(), 1) + ballot(x.get().gt(7u32)));
        });
        p.out.at(thread()).store(x.get());
    });
    measure("shared memory", 400, |p| {
        let buf = SharedArray::<u32>::new("buf", THREADS);
        let t = thread_index();
        let x = Var::new(t);
        for_range(0u32, p.n, 1u32, |_| {
            buf.at(t).store(x.get());
            sync_threads();
            x.set(buf.at(t ^ 33).load() + 1);
            sync_threads();
        });
        p.out.at(thread()).store(x.get());
    });
    measure("global memory", 400, |p| {
        let x = Var::new(Reg::<u32>::from(0));
        for_range(0u32, p.n, 1u32, |i| {
            x.add(p.src.at(thread() + (i & 31)).load());
            p.out.at(thread()).store(x.get());
        });
    });
    measure("global vector loads", 400, |p| {
        let x = Var::new(Reg::<u32>::from(0));
        for_range(0u32, p.n, 1u32, |_| {
            let v = p.src.at(thread() & !3u32).load_vec::<4>();
            x.set(x.get() + v[0] + v[1] + v[2] + v[3]);
        });
        p.out.at(thread()).store(x.get());
    });
    // One MMA of n = 256 is 64 x 256 x 32 products; the two operands are 40 KB.
    measure("fp8 mma n256", 40, |p| {
        let a = SharedArray::<u32>::aligned("a", 64 * 32, 1024);
        let b = SharedArray::<u32>::aligned("b", 256 * 32, 1024);
        for_range(thread_index(), 64 * 32u32, THREADS, |i| a.at(i).store(i ^ 0x3830_2820u32));
        for_range(thread_index(), 256 * 32u32, THREADS, |i| b.at(i).store(i ^ 0x3830_2820u32));
        fence_proxy_async();
        sync_threads();
        let (a, b) = (a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128());
        let acc = Accumulator::new(256);
        for_range(0u32, p.n, 1u32, |_| {
            wgmma_fence();
            for step in 0..4u64 {
                acc.mma_e4m3(a + 2 * step, b + 2 * step, step > 0);
            }
            wgmma_commit();
            wgmma_wait(0);
        });
        p.out.at(thread()).store(acc.get(0).bitcast::<u32>());
    });
    measure("bulk copies of 8 KB", 400, |p| {
        let buf = SharedArray::<u32>::aligned("stage", 2048, 128);
        let bar = MbarrierArray::new("full", 1).at(0u32);
        when(thread_index().eq(0u32), || {
            bar.init(1);
            fence_mbarrier_init();
        });
        sync_threads();
        for_range(0u32, p.n, 1u32, |i| {
            when(thread_index().eq(0u32), || {
                bar.arrive_expect(8192u32);
                copy_bulk(buf.ptr(), p.src, 8192u32, bar, None);
            });
            bar.wait(i & 1);
            sync_threads();
        });
        p.out.at(thread()).store(buf.at(thread_index()).load());
    });
}

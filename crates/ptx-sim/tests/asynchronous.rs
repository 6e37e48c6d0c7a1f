//! Asynchronous copies and warpgroup MMAs that are used as they should be, in every schedule and timing.

mod common;

use common::*;
use ptx::*;
use ptx_sim::*;

kernel_args! {
    /// A tensor map, an output, and rounds.
    pub struct MapArgs / MapParams {
        /// where to read
        pub map: TensorMap,
        /// output
        pub out: DevicePtr<u32>,
        /// rounds
        pub n: u32,
    }
}

/// Initialises `bars`, by the first thread, for phases of `count` arrivals.
fn init(bars: MbarrierArray, count: u32) {
    when(thread_index().eq(0u32), || {
        for i in 0..bars.len() {
            bars.at(i).init(count);
        }
        fence_mbarrier_init();
    });
    sync_threads();
}

#[test]
fn bulk_copy_there_and_back() {
    let k = kernel(64, |p| {
        let buf = SharedArray::<u32>::aligned("stage", 1024, 128);
        let bars = MbarrierArray::new("full", 1);
        init(bars, 1);
        when(thread_index().eq(0u32), || {
            bars.at(0u32).arrive_expect(4096u32);
            copy_bulk(buf.ptr(), p.src, 4096u32, bars.at(0u32), None);
        });
        bars.at(0u32).wait(0u32);
        let x = buf.at(thread_index()).load();
        buf.at(thread_index()).store(x + 1u32);
        fence_proxy_async();
        sync_threads();
        when(thread_index().eq(0u32), || {
            store_bulk(p.out, buf.ptr(), 4096u32);
            commit_bulk();
            wait_bulk(0);
        });
    });
    check(&k, 1, |i| i as u32 + u32::from(i < 64), 1024);
}

#[test]
fn bulk_store_needs_no_wait_for_its_writes() {
    let k = kernel(32, |p| {
        let buf = SharedArray::<u32>::aligned("stage", 32, 128);
        buf.at(thread_index()).store(thread_index() * 5);
        fence_proxy_async();
        sync_threads();
        when(thread_index().eq(0u32), || {
            store_bulk(p.out, buf.ptr(), 128u32);
            commit_bulk();
            wait_bulk_read(0);
            buf.at(0u32).store(77u32);
        });
    });
    check(&k, 1, |i| 5 * i as u32, 32);
}

/// A producer warp and a consumer warp around a ring of stages.
#[test]
fn a_ring_of_stages() {
    const STAGES: u32 = 3;
    const ROUNDS: u32 = 20;
    let k = kernel(64, |p| {
        let buf = SharedArray::<u32>::aligned("ring", 32 * STAGES, 128);
        let (full, empty) = (MbarrierArray::new("full", STAGES), MbarrierArray::new("empty", STAGES));
        init(full, 1);
        init(empty, 32);
        when_else(
            warp_index().eq(0u32),
            || {
                when(elect(), || {
                    for_range(0u32, ROUNDS, 1u32, |i| {
                        let (stage, parity) = (i % STAGES, (i / STAGES) & 1);
                        empty.at(stage).wait(parity ^ 1);
                        full.at(stage).arrive_expect(128u32);
                        copy_bulk(buf.at(stage * 32), p.src.at(i * 32), 128u32, full.at(stage), None);
                    });
                });
            },
            || {
                let sum = Var::new(Reg::<u32>::from(0));
                for_range(0u32, ROUNDS, 1u32, |i| {
                    let (stage, parity) = (i % STAGES, (i / STAGES) & 1);
                    full.at(stage).wait(parity);
                    sum.add(buf.at(stage * 32 + lane_index()).load());
                    empty.at(stage).arrive();
                });
                p.out.at(lane_index()).store(sum.get());
            },
        );
    });
    check(&k, 1, |lane| (0..ROUNDS).map(|i| i * 32 + lane as u32).sum(), 32);
}

/// Bytes of the tensor: rows of 128 bytes, `byte(row, k)`.
fn byte(row: usize, k: usize) -> u8 {
    // E4M3 codes of small magnitude, no NaN.
    ((row * 37 + k * 11) % 0x58) as u8 | if (row + k).is_multiple_of(5) { 0x80 } else { 0 }
}

fn run_map(kernel: &Kernel<MapArgs>, config: Config, rows: usize, box_rows: u32, words: usize) -> Vec<u32> {
    let mut machine = Machine::new(config);
    let stream = machine.create_stream(DeviceId(0));
    let data = machine.alloc(DeviceId(0), 128 * rows as u64).unwrap();
    let out = machine.alloc(DeviceId(0), 4 * words as u64).unwrap();
    let bytes: Vec<u8> = (0..128 * rows).map(|i| byte(i / 128, i % 128)).collect();
    machine.write(data, &bytes).unwrap();
    let desc = TensorMapDesc::new(data, &[128, rows as u64], &[128], &[128, box_rows], Swizzle::B128).unwrap();
    let args = MapArgs { map: desc.to_simulated(), out: DevicePtr::from_address(out), n: 0 };
    let launch = Launch {
        kernel: kernel.ir().clone(),
        grid: [1, 1, 1],
        shared_bytes: kernel.ir().shared_bytes,
        params: ArgBuffer::pack(&args).bytes().to_vec(),
        overlap: false,
    };
    machine.enqueue(stream, Command::Launch(launch)).unwrap();
    if let Err(fault) = machine.run() {
        panic!("{config:?}: {fault}");
    }
    let mut bytes = vec![0; 4 * words];
    machine.read(out, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn tensor_copy_swizzles_and_fills_with_zeros() {
    // The box starts 3 rows before the tensor's end: 5 of its 8 rows are zero.
    let k = build::<MapArgs>("tensor", Target::Sm90a, LaunchBounds::threads(256), |p| {
        let buf = SharedArray::<u32>::aligned("tile", 256, 1024);
        let bars = MbarrierArray::new("full", 1);
        init(bars, 1);
        when(thread_index().eq(0u32), || {
            prefetch_tensor_map(p.map);
            bars.at(0u32).arrive_expect(1024u32);
            copy_tensor(buf.ptr(), p.map, &[Reg::from(0u32), Reg::from(13u32)], bars.at(0u32), None);
        });
        bars.at(0u32).wait(0u32);
        p.out.at(thread_index()).store(buf.at(thread_index()).load());
    })
    .unwrap();
    for config in modes() {
        let out = run_map(&k, config, 16, 8, 256);
        for (i, got) in out.iter().enumerate() {
            let (row, chunk, word) = (i / 32, i % 32 / 4, i % 4);
            let k = 16 * (chunk ^ row) + 4 * word;
            let want = if row < 3 { [0, 1, 2, 3].map(|b| byte(13 + row, k + b)) } else { [0; 4] };
            assert_eq!(*got, u32::from_le_bytes(want), "word {i} in {config:?}");
        }
    }
}

/// D = A . B^T with A 64 x 128 and B 24 x 128 E4M3, by tensor copy and four k-steps, twice, with two groups in flight.
#[test]
fn fp8_product_through_copies_and_mma() {
    const N: u32 = 24;
    let k = build::<MapArgs>("product", Target::Sm90a, LaunchBounds::threads(128), |p| {
        let tile = SharedArray::<u32>::aligned("tile", 96 * 32, 1024);
        let bars = MbarrierArray::new("full", 1);
        init(bars, 1);
        when(thread_index().eq(0u32), || {
            bars.at(0u32).arrive_expect(96 * 128u32);
            copy_tensor(tile.ptr(), p.map, &[Reg::from(0u32), Reg::from(0u32)], bars.at(0u32), None);
        });
        bars.at(0u32).wait(0u32);
        let a = tile.ptr().descriptor_k_major_128();
        let b = tile.at(64 * 32u32).descriptor_k_major_128();
        let (x, y) = (Accumulator::new(N), Accumulator::new(N));
        wgmma_fence();
        for step in 0..4u64 {
            x.mma_e4m3(a + 2 * step, b + 2 * step, step > 0);
        }
        wgmma_commit();
        for step in 0..4u64 {
            y.mma_e4m3(a + 2 * step, b + 2 * step, step > 0);
        }
        wgmma_commit();
        wgmma_wait(1);
        let sums: Vec<_> = (0..N / 2).map(|j| x.get(j)).collect();
        wgmma_wait(0);
        for j in 0..N / 2 {
            p.out.at(thread_index() * (N / 2) + j).store(sums[j as usize].bitcast::<u32>());
            p.out.at(thread_index() * (N / 2) + (j + 128 * N / 2)).store(y.get(j).bitcast::<u32>());
        }
    })
    .unwrap();
    let rows: Vec<[u8; 128]> = (0..88).map(|r| std::array::from_fn(|k| byte(r, k))).collect();
    for config in modes() {
        let out = run_map(&k, config, 96, 96, 2 * 64 * N as usize);
        for half in 0..2 {
            for t in 0..128 {
                for j in 0..N as usize / 2 {
                    let row = 16 * (t / 32) + t % 32 / 4 + 8 * (j / 2 % 2);
                    let column = 8 * (j / 4) + 2 * (t % 4) + j % 2;
                    let want = (0..4).fold(0.0, |acc, step| {
                        let part = |r: usize| -> [u8; 32] { rows[r][32 * step..32 * step + 32].try_into().unwrap() };
                        numeric::tensor_core::dot_e4m3_k32(&part(row), &part(64 + column), acc)
                    });
                    let got = out[half * 64 * N as usize + t * N as usize / 2 + j];
                    assert_eq!(got, want.to_bits(), "row {row} column {column} in {config:?}");
                }
            }
        }
    }
}

/// Accumulators that live over two batches, with register arithmetic between them.
#[test]
fn accumulators_are_ordinary_registers_between_batches() {
    let k = kernel(256, |p| {
        let (a, b) = (SharedArray::<u32>::aligned("a", 2048, 1024), SharedArray::<u32>::aligned("b", 256, 1024));
        for i in 0..8u32 {
            a.at(thread_index() + 256 * i).store(0x3838_3838u32);
        }
        b.at(thread_index()).store(0x3838_3838u32);
        fence_proxy_async();
        sync_threads();
        let (a, b) = (a.ptr().descriptor_k_major_128(), b.ptr().descriptor_k_major_128());
        let acc = Accumulator::new(8);
        wgmma_fence();
        acc.mma_e4m3(a, b, false);
        wgmma_commit();
        wgmma_wait(0);
        let first = acc.get(0) * 3.0;
        wgmma_fence();
        acc.mma_e4m3(a, b, true);
        acc.mma_e4m3(a, b, true);
        wgmma_commit();
        wgmma_wait(0);
        p.out.at(thread_index()).store((acc.get(0) + first).bitcast::<u32>());
    });
    check(&k, 1, |_| 192f32.to_bits(), 256);
}

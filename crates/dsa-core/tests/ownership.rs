//! The device forms of ownership and epochs against their host forms, in the simulator.

use dsa_core::Ownership;
use dsa_core::device::ownership as device;
use dsa_core::layout::ll_slot;
use ptx::*;
use ptx_sim::{Command, Config, DeviceId, Launch, Machine};

kernel_args! {
    /// A table of results.
    pub struct MapArgs / MapParams {
        /// `[inputs, 6]` output
        pub out: DevicePtr<u32>,
        /// `[inputs]`
        pub src: DevicePtr<u32>,
        /// a rank
        pub rank: u32,
        /// inputs
        pub n: u32,
    }
}

/// Rank, local index and, from them, the id again; the id of `local = x` on `rank`; the local end; the next epoch.
fn on_device(own: Ownership, rank: usize, inputs: &[u32]) -> Vec<[u32; 6]> {
    let kernel = build::<MapArgs>("map", Target::Sm90a, LaunchBounds::threads(128), |p| {
        for_range(thread_index(), p.n, 128u32, |i| {
            let x = p.src.at(i).load();
            let (owner, local) = (device::rank_of(own, x), device::local_of(own, x));
            let results = [
                owner,
                local,
                device::global_of(own, owner, local),
                device::global_of(own, p.rank, x),
                device::local_end(own, p.rank, x.as_i32()),
                device::next_epoch(x),
            ];
            for (column, result) in results.into_iter().enumerate() {
                p.out.at(i * 6 + column as u32).store(result);
            }
        });
    })
    .unwrap();
    let mut machine = Machine::new(Config::default());
    let stream = machine.create_stream(DeviceId(0));
    let out = machine.alloc(DeviceId(0), 24 * inputs.len() as u64).unwrap();
    let src = machine.alloc(DeviceId(0), 4 * inputs.len() as u64).unwrap();
    machine.write(src, bytemuck::cast_slice(inputs)).unwrap();
    let args = MapArgs {
        out: DevicePtr::from_address(out),
        src: DevicePtr::from_address(src),
        rank: rank as u32,
        n: inputs.len() as u32,
    };
    let launch = Launch {
        kernel: kernel.ir().clone(),
        grid: [1, 1, 1],
        shared_bytes: kernel.ir().shared_bytes,
        params: ArgBuffer::pack(&args).bytes().to_vec(),
        overlap: false,
    };
    machine.enqueue(stream, Command::Launch(launch)).unwrap();
    machine.run().unwrap();
    let mut results = vec![[0u32; 6]; inputs.len()];
    machine.read(out, bytemuck::cast_slice_mut(&mut results)).unwrap();
    results
}

#[test]
fn device_forms_equal_host_forms() {
    let mut inputs: Vec<u32> = (0..700).collect();
    inputs.extend([(1 << 17) - 1, 1 << 17, (1 << 20) - 1, 1 << 20]);
    for ranks in [1, 2, 3, 5, 7, 8, 12, 16] {
        for interleave in [1, 4, 64] {
            let own = Ownership::new(ranks, interleave).unwrap();
            for rank in [0, ranks / 2, ranks - 1] {
                for (&x, got) in inputs.iter().zip(on_device(own, rank, &inputs)) {
                    let g = x as usize;
                    let want = [own.rank_of(g), own.local_of(g), g, own.global_of(rank, g), own.local_len(rank, g)];
                    assert_eq!(got[..5], want.map(|v| v as u32), "{own:?}, rank {rank}, {x}");
                }
            }
        }
    }
}

#[test]
fn garbage_ends_and_wrapping_epochs() {
    let own = Ownership::new(3, 4).unwrap();
    let inputs = [u32::MAX, i32::MIN as u32, u32::MAX - 1, i32::MAX as u32];
    for rank in 0..3 {
        for (&x, got) in inputs.iter().zip(on_device(own, rank, &inputs)) {
            assert_eq!(got[4], own.local_end(rank, x as i32) as u32, "end {}", x as i32);
            assert_eq!(got[5], ll_slot::next_epoch(x), "epoch {x:#x}");
        }
    }
}

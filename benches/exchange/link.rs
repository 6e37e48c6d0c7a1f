//! Bare kernels that show what the link allows: the floor of everything that crosses it.

use dsa_core::device::ownership::next_epoch;
use dsa_core::layout::ll_slot::PAIR_BYTES;
use gpu::{Device, Function};
use ptx::{
    DevicePtr, Global, LaunchBounds, LoadMode, Reg, Scope, Sem, Target, Var, cta_index, for_range, globaltimer,
    launch_dependents, repeat, sync_threads, thread_index, wait_for_dependencies, when,
};

use crate::common::Result;

/// Threads of a CTA of the bare kernels.
pub const THREADS: u32 = 512;
/// No wait is longer, so that a bench that goes wrong ends.
const TIMEOUT_NS: u64 = 2_000_000_000;

ptx::kernel_args! {
    /// An all-gather of rows through LL pairs, and nothing else.
    pub struct GatherArgs / GatherParams {
        /// u32 `[ranks, rows, words]`: every rank's rows, output
        pub out: DevicePtr<u32>,
        /// u32 `[rows, words]`: this rank's rows
        pub rows: DevicePtr<u32>,
        /// LL pairs `[parity][rank][row]`, written by every rank
        pub memory: DevicePtr<u64>,
        /// `[ranks]`: address of every rank's memory
        pub peers: DevicePtr<u64>,
        /// u32 `[rows]`: epoch of each row's last gather, in and out
        pub epochs: DevicePtr<u32>,
        /// this rank
        pub rank: u32,
        /// rows of the memory
        pub slot_rows: u32,
    }
}

/// One CTA per row of `words` words pushes it to `ranks` ranks and waits for theirs.
pub fn gather(device: &Device, ranks: u32, words: u32) -> Result<Function<GatherArgs>> {
    let name = format!("ll_all_gather_w{ranks}_{words}");
    let kernel = ptx::build::<GatherArgs>(&name, Target::Sm90a, LaunchBounds::threads(THREADS), |p| {
        let (t, row, pairs) = (thread_index(), cta_index(), words / 2);
        // The row is this kernel's predecessor's to write.
        wait_for_dependencies();
        launch_dependents();
        let epoch = next_epoch(p.epochs.at(row).load());
        let slot = |rank: Reg<u32>| {
            let slot = (epoch & 1).mad(ranks, rank).mad_wide(p.slot_rows, row.to_u64());
            slot * (pairs * PAIR_BYTES as u32)
        };
        for_range(t, ranks * pairs, THREADS, |i| {
            let (rank, pair) = (i / pairs, i % pairs);
            let [a, b] = p.rows.at64(row.mul_wide(words)).at(pair * 2).load_vec::<2>();
            let base = Global::<u64>::from_address(p.peers.at(rank).load());
            let at = base.byte_at(slot(p.rank)).at(pair * 2);
            at.store_vec_as(Sem::Relaxed(Scope::Sys), [a.pack(epoch), b.pack(epoch)]);
        });
        for_range(t, ranks * pairs, THREADS, |i| {
            let (rank, pair) = (i / pairs, i % pairs);
            let at = p.memory.byte_at(slot(rank)).at(pair * 2);
            let [a, b] = poll_pair(at, epoch);
            p.out.at64(rank.mad_wide(p.slot_rows, row.to_u64()) * words).at(pair * 2).store_vec([a, b]);
        });
        sync_threads(); // ORDER: every thread's reads of the epoch, before it moves.
        when(t.eq(0), || p.epochs.at(row).store(epoch));
    })?;
    Ok(device.load(&kernel)?)
}

/// The words of a pair once both halves have `epoch`; whatever is there when the time is up.
fn poll_pair(at: Global<u64>, epoch: Reg<u32>) -> [Reg<u32>; 2] {
    let (w0, w1) = (Var::new(0u32), Var::new(0u32));
    let start = globaltimer();
    repeat(|l| {
        let [a, b] = at.load_vec_as::<2>(LoadMode::relaxed(Scope::Sys));
        let ((a, e0), (b, e1)) = (a.unpack(), b.unpack());
        w0.set(a);
        w1.set(b);
        l.break_if(e0.eq(epoch) & e1.eq(epoch));
        l.break_if((globaltimer() - start).gt(TIMEOUT_NS));
    });
    [w0.get(), w1.get()]
}

ptx::kernel_args! {
    /// A word that goes to and fro.
    pub struct PingPongArgs / PingPongParams {
        /// where the other rank's word arrives
        pub mine: DevicePtr<u64>,
        /// where the other rank waits
        pub theirs: DevicePtr<u64>,
        /// round trips
        pub rounds: u32,
        /// 1 for the rank that answers
        pub second: u32,
        /// nanoseconds of all round trips, output
        pub elapsed: DevicePtr<u64>,
    }
}

/// One lane sends 8 bytes and waits for the answer, `rounds` times.
pub fn ping_pong(device: &Device) -> Result<Function<PingPongArgs>> {
    let kernel = ptx::build::<PingPongArgs>("ll_ping_pong", Target::Sm90a, LaunchBounds::threads(32), |p| {
        when(thread_index().eq(0), || {
            let start = globaltimer();
            let wait_for = |value: Reg<u32>| {
                repeat(|l| {
                    let (word, epoch) = p.mine.load_as(LoadMode::relaxed(Scope::Sys)).unpack();
                    l.break_if(word.eq(value) & epoch.eq(value));
                    l.break_if((globaltimer() - start).gt(TIMEOUT_NS));
                });
            };
            let send = |value: Reg<u32>| p.theirs.store_as(Sem::Relaxed(Scope::Sys), value.pack(value));
            for_range(1u32, p.rounds + 1, 1u32, |round| {
                when(p.second.ne(0), || wait_for(round));
                send(round);
                when(p.second.eq(0), || wait_for(round));
            });
            p.elapsed.store(globaltimer() - start);
        });
    })?;
    Ok(device.load(&kernel)?)
}

ptx::kernel_args! {
    /// LL pairs to another rank, as fast as they go.
    pub struct PushArgs / PushParams {
        /// `[pairs]` of 16 bytes on the other rank
        pub theirs: DevicePtr<u64>,
        /// pairs, a multiple of the grid's threads
        pub pairs: u32,
        /// threads of the grid
        pub threads: u32,
    }
}

/// Every thread stores pairs, 16 bytes at a time.
pub fn push(device: &Device) -> Result<Function<PushArgs>> {
    let kernel = ptx::build::<PushArgs>("ll_push", Target::Sm90a, LaunchBounds::threads(THREADS), |p| {
        wait_for_dependencies();
        launch_dependents();
        for_range(cta_index().mad(THREADS, thread_index()), p.pairs, p.threads, |i| {
            let pair = i.pack(1u32);
            p.theirs.at64(i.mul_wide(2)).store_vec_as(Sem::Relaxed(Scope::Sys), [pair, pair]);
        });
    })?;
    Ok(device.load(&kernel)?)
}

//! What a simulated machine is made of, and the handles it gives out.

/// Order in which runnable warps execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Each runnable warp in turn for a bounded quantum. Deterministic.
    RoundRobin,
    /// A random runnable warp, changing often at memory and synchronisation instructions. Deterministic per seed.
    Random {
        /// Replays the same order.
        seed: u64,
    },
}

/// When asynchronous operations (bulk and tensor copies, warpgroup MMAs) complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// At issue.
    Early,
    /// When something waits for them and nothing else can run.
    Late,
    /// At random moments in between. Deterministic per seed.
    Seeded {
        /// Replays the same moments.
        seed: u64,
    },
}

/// Size and behaviour of the simulated machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Number of devices; all share one address space.
    pub devices: usize,
    /// Multiprocessors per device; bounds how many CTAs of a launch are resident at once.
    pub sms: u32,
    /// Order of warps.
    pub schedule: Schedule,
    /// Completion of asynchronous operations.
    pub timing: Timing,
    /// Most warp instructions that one [`run`](crate::Machine::run) may execute.
    pub fuel: u64,
    /// Most bytes allocated at once on one device. Host memory is used only for what is touched.
    pub memory_bytes: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            devices: 1,
            sms: 4,
            schedule: Schedule::RoundRobin,
            timing: Timing::Late,
            fuel: 20_000_000_000,
            memory_bytes: 64 << 30,
        }
    }
}

impl Config {
    /// Random schedule and random completion times from one seed, everything else as by default.
    pub fn seeded(seed: u64) -> Config {
        Config { schedule: Schedule::Random { seed }, timing: Timing::Seeded { seed }, ..Config::default() }
    }
}

/// A device, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

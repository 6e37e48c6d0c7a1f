//! What every simulator test needs: machines in several modes, buffers, launches, and checks of traps.
#![allow(dead_code)] // each test binary uses a part

use ptx::*;
use ptx_sim::*;

kernel_args! {
    /// Two buffers and two numbers, enough for every small kernel.
    pub struct TestArgs / TestParams {
        /// output
        pub out: DevicePtr<u32>,
        /// input
        pub src: DevicePtr<u32>,
        /// a number
        pub n: u32,
        /// another
        pub m: u32,
    }
}

/// A small kernel of `threads` threads.
pub fn kernel(threads: u32, body: impl FnOnce(TestParams)) -> Kernel<TestArgs> {
    build("test_kernel", Target::Sm90a, LaunchBounds::threads(threads), body).unwrap()
}

/// Configurations that a correct kernel must pass in.
pub fn modes() -> Vec<Config> {
    let mut modes = vec![
        Config::default(),
        Config { timing: Timing::Early, ..Config::default() },
        Config { schedule: Schedule::Random { seed: 7 }, timing: Timing::Late, ..Config::default() },
    ];
    modes.extend((0..4).map(Config::seeded));
    modes
}

/// A machine with one stream and two buffers of `WORDS` words on device 0.
pub struct Bench {
    pub machine: Machine,
    pub stream: StreamId,
    pub out: u64,
    pub src: u64,
}

/// Words of each buffer.
pub const WORDS: usize = 4096;

impl Bench {
    pub fn new(config: Config) -> Bench {
        let mut machine = Machine::new(config);
        let stream = machine.create_stream(DeviceId(0));
        let out = machine.alloc(DeviceId(0), 4 * WORDS as u64).unwrap();
        let src = machine.alloc(DeviceId(0), 4 * WORDS as u64).unwrap();
        Bench { machine, stream, out, src }
    }

    pub fn write(&mut self, address: u64, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.machine.write(address, &bytes).unwrap();
    }

    pub fn read(&self, address: u64, n: usize) -> Vec<u32> {
        let mut bytes = vec![0; 4 * n];
        self.machine.read(address, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn launch_of(&self, kernel: &Kernel<TestArgs>, grid: u32, n: u32, overlap: bool) -> Command {
        let args = TestArgs { out: DevicePtr::from_address(self.out), src: DevicePtr::from_address(self.src), n, m: 0 };
        Command::Launch(Launch {
            kernel: kernel.ir().clone(),
            grid: [grid, 1, 1],
            shared_bytes: kernel.ir().shared_bytes,
            params: ArgBuffer::pack(&args).bytes().to_vec(),
            overlap,
        })
    }

    pub fn enqueue(&mut self, kernel: &Kernel<TestArgs>, grid: u32, n: u32, overlap: bool) {
        let command = self.launch_of(kernel, grid, n, overlap);
        self.machine.enqueue(self.stream, command).unwrap();
    }

    pub fn run(&mut self, kernel: &Kernel<TestArgs>, grid: u32, n: u32) -> Result<(), Fault> {
        self.enqueue(kernel, grid, n, false);
        self.machine.run()
    }
}

/// Runs a kernel with `src` filled with its index and checks `out` in every mode.
#[track_caller]
pub fn check(kernel: &Kernel<TestArgs>, grid: u32, expected: impl Fn(usize) -> u32, words: usize) {
    for config in modes() {
        let mut bench = Bench::new(config);
        let src = bench.src;
        bench.write(src, &(0..WORDS as u32).collect::<Vec<_>>());
        if let Err(fault) = bench.run(kernel, grid, 0) {
            panic!("{config:?}: {fault}");
        }
        let out = bench.read(bench.out, words);
        for (i, got) in out.iter().enumerate() {
            assert_eq!(*got, expected(i), "word {i} in {config:?}");
        }
    }
}

/// The trap of a failing run.
#[track_caller]
pub fn trapped(result: Result<(), Fault>) -> Trap {
    match result {
        Err(Fault::Trap(trap)) => *trap,
        other => panic!("a trap was expected, not {other:?}"),
    }
}

/// Checks that a kernel traps with `kind` in every given mode, at one of `lines` of `file`.
#[track_caller]
pub fn fails_in(
    modes: &[Config],
    kernel: &Kernel<TestArgs>,
    grid: u32,
    kind: TrapKind,
    file: &str,
    lines: &[u32],
) -> Trap {
    let mut last = None;
    for config in modes {
        let mut bench = Bench::new(*config);
        let src = bench.src;
        bench.write(src, &(0..WORDS as u32).collect::<Vec<_>>());
        let trap = trapped(bench.run(kernel, grid, 0));
        assert_eq!(trap.kind, kind, "{config:?}: {trap}");
        let at_line = lines.iter().any(|line| trap.at.contains(&format!("{file}:{line}:")));
        assert!(at_line, "{config:?}: not at lines {lines:?} of {file}: {trap}");
        assert!(trap.to_string().contains("test_kernel"), "{trap}");
        last = Some(trap);
    }
    last.expect("at least one mode")
}

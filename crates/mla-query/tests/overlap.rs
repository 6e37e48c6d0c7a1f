//! Dependent launches and captured graphs.

mod common;

use common::*;
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_core::layout::mla_rows::{KV_C, QKV};
use gpu::{Buffer, Device, Function, Graph, LaunchConfig, Stream};
use mla_query::{MlaError, MlaQuery, MlaShape};
use ptx::*;

kernel_args! {
    /// Copies rows and slots, late.
    pub struct ProduceArgs / ProduceParams {
        /// `[words]` output
        pub to: DevicePtr<u32>,
        /// `[words]`
        pub from: DevicePtr<u32>,
        /// words
        pub words: u32,
        /// `[tokens]` output
        pub to_slots: DevicePtr<i64>,
        /// `[tokens]`
        pub from_slots: DevicePtr<i64>,
        /// tokens
        pub tokens: u32,
    }
}

const THREADS: u32 = 128;

/// A kernel that stands for whatever runs before: lets its successor start at once, sleeps, and only then writes.
struct Producer {
    function: Function<ProduceArgs>,
    qkv: Buffer<u16>,
    slots: Buffer<i64>,
}

impl Producer {
    fn new(device: &Device, step: &Step) -> Producer {
        let target = device.target().unwrap();
        let kernel = build::<ProduceArgs>("produce_late", target, LaunchBounds::threads(THREADS), |p| {
            wait_for_dependencies();
            launch_dependents();
            nanosleep(20_000);
            let t = thread_index();
            for_range(t, p.words, THREADS, |i| p.to.at(i).store(p.from.at(i).load()));
            for_range(t, p.tokens, THREADS, |i| p.to_slots.at(i).store(p.from_slots.at(i).load()));
        });
        Producer {
            function: device.load(&kernel.unwrap()).unwrap(),
            qkv: device.upload(&step.qkv).unwrap(),
            slots: device.upload(&step.slots).unwrap(),
        }
    }

    fn launch(&self, stream: &Stream, resident: &Resident) {
        let args = ProduceArgs {
            to: resident.qkv.ptr_as(),
            from: self.qkv.ptr_as(),
            words: self.qkv.len() as u32 / 2,
            to_slots: resident.slots.ptr(),
            from_slots: self.slots.ptr(),
            tokens: self.slots.len() as u32,
        };
        self.function.launch(stream, LaunchConfig::new(1).overlap(true), &args).unwrap();
    }
}

/// Rows of NaN and slots that would land in the cache: what a reader that does not wait would see.
fn spoil(resident: &Resident) {
    resident.qkv.fill_bytes(&resident.stream, 0xFF).unwrap();
    resident.slots.fill_bytes(&resident.stream, 0).unwrap();
}

#[test]
fn rows_and_slots_are_read_after_the_wait() {
    for config in orders(3) {
        delayed_producer(&Device::simulated(config), 1);
    }
    on_gpu(|device| delayed_producer(device, 250));
}

fn delayed_producer(device: &Device, runs: usize) {
    for (form, tokens) in MlaCacheForm::ALL.into_iter().chain([MlaCacheForm::Fp8Ds]).zip([3, 1, 2, 8, 12]) {
        for hold in [false, true] {
            let step = Step::random(14, 1, tokens);
            let shape = shape_of(&step, form).with_hold(hold);
            let query = MlaQuery::new(device, shape).unwrap();
            let resident = Resident::new(device, &step, shape);
            let producer = Producer::new(device, &step);
            for _ in 0..runs.div_ceil(8) {
                resident.poison();
                spoil(&resident);
                producer.launch(&resident.stream, &resident);
                resident.launch(&query, &step).unwrap();
                check(&step, shape, &resident.read(&step));
            }
        }
    }
}

#[test]
fn many_replays_behind_a_delayed_producer_equal_serial_execution() {
    let replays = |device: &Device, runs: usize| {
        let single = |shape: MlaShape| shape;
        let threads = |shape: MlaShape| shape.with_thread_copies(true).unwrap();
        let tile = |tokens: usize| move |shape: MlaShape| shape.with_tile(Some(tokens)).unwrap();
        let kernels: [(usize, &dyn Fn(MlaShape) -> MlaShape); 6] =
            [(1, &single), (3, &threads), (8, &single), (5, &tile(16)), (20, &tile(32)), (40, &tile(64))];
        for (form, (tokens, kernel)) in MlaCacheForm::ALL.into_iter().cycle().zip(kernels) {
            let step = Step::random(16, 2, tokens);
            let shape = kernel(shape_of(&step, form));
            let query = MlaQuery::new(device, shape).unwrap();
            let resident = Resident::new(device, &step, shape);
            let serial = resident.run(&query, &step);
            check(&step, shape, &serial);
            let producer = Producer::new(device, &step);
            let graph = Graph::capture_with::<MlaError>(&resident.stream, |stream| {
                producer.launch(stream, &resident);
                resident.launch(&query, &step)
            });
            let graph = graph.unwrap();
            for replay in 0..runs {
                resident.poison();
                spoil(&resident);
                graph.launch(&resident.stream).unwrap();
                assert_eq!(resident.read(&step), serial, "{}: replay {replay}", shape.name());
            }
        }
    };
    orders(1).into_iter().for_each(|config| replays(&Device::simulated(config), 1));
    on_gpu(|device| replays(device, 1000));
}

fn capture(resident: &Resident, query: &MlaQuery, step: &Step) -> Graph {
    Graph::capture_with::<MlaError>(&resident.stream, |_| resident.launch(query, step)).unwrap()
}

#[test]
fn replays_read_the_rows_and_slots_of_the_moment() {
    on_every_device(|device| {
        for form in [MlaCacheForm::Fp8Ds, MlaCacheForm::Nvfp4Ds] {
            // Captured over dummy rows without a slot.
            let mut dummy = Step::random(18, 2, 4);
            dummy.qkv.fill(0x7FC1);
            dummy.slots.fill(-1);
            let shape = shape_of(&dummy, form);
            let query = MlaQuery::new(device, shape).unwrap();
            let resident = Resident::new(device, &dummy, shape);
            let graph = capture(&resident, &query, &dummy);
            resident.poison();
            graph.launch(&resident.stream).unwrap();
            assert!(resident.read(&dummy).cache.iter().all(|b| *b == POISON), "dummies leave the cache alone");

            for seed in 0..3 {
                // One real token among dummies, then two, then three.
                let mut step = Step { qkv: Step::random(seed, 2, 4).qkv, ..dummy.clone() };
                let live = seed as usize + 1;
                step.slots = (0..4).map(|t| if t < live { 10 + t as i64 } else { -1 }).collect();
                for token in live..4 {
                    step.qkv[token * QKV + KV_C.start..][..QKV - KV_C.start].fill(0x7FC1);
                }
                resident.qkv.copy_from(&resident.stream, &step.qkv).unwrap();
                resident.slots.copy_from(&resident.stream, &step.slots).unwrap();
                resident.poison();
                graph.launch(&resident.stream).unwrap();
                let got = resident.read(&step);
                check(&step, shape, &got);
                assert_eq!(resident.run(&query, &step), got, "an eager call");
            }
        }
    });
}

kernel_args! {
    /// Copies words.
    pub struct CopyArgs / CopyParams {
        /// `[words]` output
        pub to: DevicePtr<u32>,
        /// `[words]`
        pub from: DevicePtr<u32>,
        /// words
        pub words: u32,
    }
}

/// A step beside an indexer: a producer of rows and slots; a kernel that lets its successor start and is busy for long, as
/// the indexer's last one; the late query; and a consumer, which reads what the busy kernel and the query have written.
struct Beside {
    producer: Producer,
    busy: Function<CopyArgs>,
    query: MlaQuery,
    consumer: Function<CopyArgs>,
    resident: Resident,
    source: Buffer<u32>,
    indexed: Buffer<u32>,
    consumed: Buffer<u32>,
}

const WORDS: u32 = 256;

impl Beside {
    fn new(device: &Device, step: &Step, shape: MlaShape, edit: impl Fn(&mut KernelIr)) -> Beside {
        let target = device.target().unwrap();
        let copy = |name: &str, ns: u32| {
            let kernel = build::<CopyArgs>(name, target, LaunchBounds::threads(THREADS), |p| {
                wait_for_dependencies();
                launch_dependents();
                nanosleep(ns);
                for_range(thread_index(), p.words, THREADS, |i| p.to.at(i).store(p.from.at(i).load()));
            });
            device.load(&kernel.unwrap()).unwrap()
        };
        let mut ir = KernelIr::clone(mla_query::query::build(&shape, target).unwrap().ir());
        edit(&mut ir);
        Beside {
            producer: Producer::new(device, step),
            busy: copy("busy", 200_000),
            query: MlaQuery::from_kernel(device, shape, &Kernel::from_ir(ir).unwrap()).unwrap(),
            consumer: copy("consume", 0),
            resident: Resident::new(device, step, shape),
            source: device.upload(&(0..WORDS).map(|i| i ^ 0x5A5A).collect::<Vec<_>>()).unwrap(),
            indexed: device.alloc_zeros(WORDS as usize).unwrap(),
            consumed: device.alloc_zeros(WORDS as usize).unwrap(),
        }
    }

    fn launch(&self, step: &Step) {
        let stream = &self.resident.stream;
        let copy = |function: &Function<CopyArgs>, to: &Buffer<u32>, from: &Buffer<u32>| {
            let args = CopyArgs { to: to.ptr(), from: from.ptr(), words: WORDS };
            function.launch(stream, LaunchConfig::new(1).overlap(true), &args).unwrap();
        };
        self.producer.launch(stream, &self.resident);
        copy(&self.busy, &self.indexed, &self.source);
        self.resident.launch(&self.query, step).unwrap();
        copy(&self.consumer, &self.consumed, &self.indexed);
    }

    fn clear(&self) {
        self.resident.poison();
        spoil(&self.resident);
        self.indexed.fill_bytes(&self.resident.stream, 0).unwrap();
        self.consumed.fill_bytes(&self.resident.stream, 0).unwrap();
    }

    fn check(&self, step: &Step) {
        check(step, self.resident.shape, &self.resident.read(step));
        let want = self.source.copy_to_vec(&self.resident.stream).unwrap();
        assert_eq!(self.consumed.copy_to_vec(&self.resident.stream).unwrap(), want, "what ran beside the query");
    }
}

#[test]
fn a_late_query_runs_beside_its_predecessor_and_ends_after_it() {
    let check_on = |device: &Device, runs: usize| {
        for (form, tokens) in [(MlaCacheForm::Fp8Ds, 2), (MlaCacheForm::Fp8Divide, 1), (MlaCacheForm::Nvfp4Ds, 12)] {
            for hold in [false, true] {
                let step = Step::random(15, 1, tokens);
                let shape = shape_of(&step, form).with_hold(hold).with_late(true).unwrap();
                let beside = Beside::new(device, &step, shape, |_| ());
                for _ in 0..runs {
                    beside.clear();
                    beside.launch(&step);
                    beside.check(&step);
                }
            }
        }
    };
    orders(3).into_iter().for_each(|config| check_on(&Device::simulated(config), 1));
    on_gpu(|device| check_on(device, 50));
}

#[test]
fn a_late_query_that_does_not_wait_at_its_end_is_found() {
    let step = Step::random(15, 1, 1);
    // The busy kernel's copy may still run when the query has ended, and the consumer waits for the query alone.
    let shape = shape_of(&step, MlaCacheForm::Fp8Ds).with_hold(true).with_late(true).unwrap();
    let unwaited = |ir: &mut KernelIr| {
        let waits = ir.insts.iter().filter(|inst| inst.op == ptx::op::Op::GridDepWait).count();
        assert_eq!(waits, 1, "a late kernel waits at its end alone");
        // Where nothing gets to: a kernel without any wait may not overlap.
        let at = ir.insts.iter().position(|inst| inst.op == ptx::op::Op::GridDepWait).unwrap();
        ir.insts[at].op = ptx::op::Op::Nanosleep { ns: ptx::op::Operand::Imm(0) };
        let exit = ir.insts.last().unwrap().clone();
        let wait = Inst { op: ptx::op::Op::GridDepWait, ..exit };
        ir.insts.push(wait);
        ir.insts.push(exit);
    };
    let beside = Beside::new(&Device::simulated(sim_config()), &step, shape, unwaited);
    beside.clear();
    beside.launch(&step);
    let error = beside.resident.stream.synchronize().unwrap_err();
    assert!(error.to_string().contains("DataRace"), "{error}");
}

#[test]
fn k3_has_no_indexer_to_be_late_beside() {
    let shape = MlaShape::new(1, 1, MlaCacheForm::Fp8Multiply, 64).unwrap();
    assert!(matches!(shape.with_late(true), Err(MlaError::LateUnsupported { .. })));
    assert_eq!(shape.with_late(false).unwrap(), shape);
}

#[test]
fn a_wait_that_is_left_out_is_found() {
    let step = Step::random(14, 1, 1);
    let device = Device::simulated(sim_config());
    let shape = shape_of(&step, MlaCacheForm::Fp8Ds).with_hold(true);
    let kernel = mla_query::query::build(&shape, device.target().unwrap()).unwrap();
    let mut ir = KernelIr::clone(kernel.ir());
    // Each kind of warp waits: the computing ones first in the text, then the inserting ones.
    let at = ir.insts.iter().position(|inst| inst.op == ptx::op::Op::GridDepWait).unwrap();
    ir.insts.remove(at);
    let kernel = Kernel::from_ir(ir).unwrap();
    let query = MlaQuery::from_kernel(&device, shape, &kernel).unwrap();
    let resident = Resident::new(&device, &step, shape);
    let producer = Producer::new(&device, &step);
    resident.poison();
    producer.launch(&resident.stream, &resident);
    resident.launch(&query, &step).unwrap();
    let error = resident.stream.synchronize().unwrap_err();
    assert!(error.to_string().contains("DataRace"), "{error}");
}

//! The MLA query and the indexer in one captured step, whose rows, slots and lengths change between replays. On the simulator
//! always, on a GPU where there is one.

#[path = "common/layer.rs"]
mod layer;

use dsa_core::DecodeStep;
use dsa_core::consts::{KV_LORA, NOPE, Q_HEAD, Q_LORA};
use dsa_core::generate::{SplitMix64, StepSpec};
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_core::layout::mla_rows::{QKV, QUERY};
use dsa_core::layout::query_row;
use dsa_core::numerics::bf16;
use gpu::{Buffer, Device, Function, Graph, LaunchConfig, Stream, View};
use kimi_decode::{DecodeLayer, Error, FusedIndexer, IndexerConfig, IndexerScratch, StepShape};
use layer::{Inputs, Outputs, devices, layer_of, scratch_of};
use mla_query::{MlaCache, MlaQuery, MlaShape, MlaStep, MlaWeights};
use ptx::{DevicePtr, LaunchBounds, Target, cta_index, for_range, kernel_args, thread_index, wait_for_dependencies};

const HEADS: usize = 2;
const PAGES: usize = 3;
const PAGE_TOKENS: usize = 64;
const FORM: MlaCacheForm = MlaCacheForm::Fp8Ds;
const POISON: u8 = 0xA5;
const TOPK: usize = 128;

kernel_args! {
    /// Makes indexer queries of `q_c` rows: a stand-in for the projection, whose owner is the engine.
    pub struct ProjectArgs / ProjectParams {
        /// E4M3 `[rows, 4096]`, output
        pub queries: DevicePtr<u8>,
        /// BF16 `[rows, 1536]`
        pub q_c: DevicePtr<u16>,
    }
}

/// The code of query element `i` of a row: some bits of a `q_c` element, never NaN.
fn projected(q_c: &[u16], i: usize) -> u8 {
    let bits = q_c[i % Q_LORA];
    ((bits >> 8) & 0x80) as u8 | ((bits >> 4) & 0x3F) as u8
}

fn projection(device: &Device) -> Function<ProjectArgs> {
    let kernel = ptx::build::<ProjectArgs>("project", Target::Sm90a, LaunchBounds::threads(256), |p| {
        wait_for_dependencies();
        let row = cta_index();
        let (to, from) =
            (p.queries.at64(row.mul_wide(query_row::BYTES as u32)), p.q_c.at64(row.mul_wide(Q_LORA as u32)));
        for_range(thread_index(), query_row::BYTES as u32, 256u32, |i| {
            let bits = from.at(i % Q_LORA as u32).load();
            to.at(i).store(((bits >> 8) & 0x80) | ((bits >> 4) & 0x3F));
        });
    });
    device.load(&kernel.unwrap()).unwrap()
}

/// A layer, its caches and a step's buffers.
struct Whole {
    stream: Stream,
    layer: DecodeLayer,
    /// The same query by itself, in order.
    alone: MlaQuery,
    project: Function<ProjectArgs>,
    step: DecodeStep,
    inputs: Inputs,
    weights: MlaWeights,
    _memory: [Buffer<u16>; 4],
    qkv: Buffer<u16>,
    slots: Buffer<i64>,
    query: Buffer<u8>,
    q_c: Buffer<u16>,
    cache: Buffer<u8>,
    dropped: Buffer<u32>,
    /// Copies of the selected rows, counts and ids.
    kept: [Buffer<i32>; 3],
}

fn random(seed: u64, n: usize, scale: f32) -> Vec<u16> {
    let mut rng = SplitMix64::new(seed);
    (0..n).map(|_| bf16::from_f32(scale * rng.gaussian())).collect()
}

impl Whole {
    fn new(device: &Device, step: &DecodeStep, late: bool) -> Whole {
        let scratch = IndexerScratch::reserve(device, scratch_of(step)).unwrap();
        let inputs = Inputs::upload(device, step);
        let indexer = FusedIndexer::new(IndexerConfig {
            scratch: &scratch,
            layer: layer_of(step),
            keys: inputs.cache.as_view(),
            shapes: &[StepShape { rows: step.rows, q: step.q }],
            hold: &[],
            ids: true,
        })
        .unwrap();
        let plain = MlaShape::new(HEADS, step.rows, FORM, PAGE_TOKENS).unwrap().with_qc(true);
        let shape = plain.with_late(late).unwrap();
        let memory = [(Q_LORA, 1.0), (KV_LORA, 1.0), (HEADS * Q_HEAD * Q_LORA, 0.05), (HEADS * NOPE * KV_LORA, 0.1)];
        let memory: [Buffer<u16>; 4] =
            std::array::from_fn(|i| device.upload(&random(i as u64, memory[i].0, memory[i].1)).unwrap());
        let [q_a, kv_a, q_b, uk] = memory.each_ref().map(Buffer::as_view);
        Whole {
            stream: device.stream().unwrap(),
            layer: DecodeLayer::new(MlaQuery::new(device, shape).unwrap(), indexer).unwrap(),
            alone: MlaQuery::new(device, plain).unwrap(),
            project: projection(device),
            step: step.clone(),
            weights: MlaWeights::new(device, &shape, &q_a, &kv_a, &q_b, &uk).unwrap(),
            qkv: device.upload(&random(50, step.rows * QKV, 2.0)).unwrap(),
            slots: device.upload(&(0..step.rows as i64).collect::<Vec<_>>()).unwrap(),
            query: device.alloc(step.rows * HEADS * QUERY * 2).unwrap(),
            q_c: device.alloc(step.rows * Q_LORA).unwrap(),
            cache: device.alloc(PAGES * PAGE_TOKENS * FORM.entry_bytes()).unwrap(),
            dropped: device.alloc_zeros(1).unwrap(),
            kept: [step.rows * TOPK, step.rows, step.rows * TOPK].map(|len| device.alloc(len).unwrap()),
            _memory: memory,
            inputs,
        }
    }

    fn mla(&self) -> MlaStep<'_> {
        let entry = FORM.entry_bytes();
        MlaStep {
            tokens: self.step.rows,
            qkv: self.qkv.as_view(),
            qkv_stride: QKV,
            slots: self.slots.as_view(),
            weights: &self.weights,
            q_scale_inv: None,
            k_scale: None,
            eps: 1e-5,
            query: self.query.as_view(),
            q_c: Some(self.q_c.as_view()),
            cache: MlaCache {
                bytes: self.cache.as_view(),
                pages: PAGES,
                page_stride: PAGE_TOKENS * entry,
                token_stride: entry,
            },
            mailbox: None,
            dropped: self.dropped.as_view(),
        }
    }

    /// A step on the stream. The indexer's queries are made of the query's `q_c`, or beside a late query of the rows that
    /// `q_c` holds already.
    fn run(&self) -> Result<(), Error> {
        let shape = StepShape { rows: self.step.rows, q: self.step.q };
        let project = |stream: &Stream, q_c: Option<&View<'_, u16>>| -> Result<(), Error> {
            assert_eq!(q_c.is_none(), self.layer.query().shape().late());
            let args = ProjectArgs { queries: self.inputs.queries.ptr(), q_c: self.q_c.ptr() };
            Ok(self.project.launch(stream, LaunchConfig::new(self.step.rows as u32).overlap(true), &args)?)
        };
        let selected = self.layer.run(&self.stream, &self.mla(), &self.inputs.step(shape), project)?;
        let outputs = [&selected.rows, &selected.counts, selected.ids.as_ref().expect("ids are asked for")];
        for (to, from) in self.kept.iter().zip(outputs) {
            to.copy_from_device(&self.stream, from)?;
        }
        Ok(())
    }

    /// New rows, slots and lengths in place.
    fn replace(&mut self, seed: u64, slots: &[i64], ends: &[i32]) {
        self.qkv.copy_from(&self.stream, &random(seed, self.step.rows * QKV, 2.0)).unwrap();
        self.slots.copy_from(&self.stream, slots).unwrap();
        self.inputs.row_ends.copy_from(&self.stream, ends).unwrap();
        self.step.row_ends = ends.to_vec();
    }

    fn poison(&self) {
        for output in [&self.query, &self.cache] {
            output.fill_bytes(&self.stream, POISON).unwrap();
        }
        self.q_c.fill_bytes(&self.stream, 0).unwrap();
        self.inputs.queries.fill_bytes(&self.stream, 0x7F).unwrap();
        self.dropped.fill_bytes(&self.stream, 0).unwrap();
        self.kept.iter().for_each(|kept| kept.fill_bytes(&self.stream, POISON).unwrap());
    }

    fn read_query(&self) -> (Vec<u8>, Vec<u16>, Vec<u8>, Vec<u32>) {
        let stream = &self.stream;
        let bytes = [&self.query, &self.cache].map(|output| output.copy_to_vec(stream).unwrap());
        let [query, cache] = bytes;
        (query, self.q_c.copy_to_vec(stream).unwrap(), cache, self.dropped.copy_to_vec(stream).unwrap())
    }

    /// `launch`ed once and checked: the query is that of the kernel alone, the selection the oracle's for the queries that
    /// follow from `q_c`.
    fn check(&mut self, what: &str, launch: impl Fn(&Whole)) {
        // The kernel alone, of which beside a late query also the indexer's queries come.
        self.poison();
        self.alone.launch(&self.stream, &self.mla()).unwrap();
        let alone = self.read_query();
        let late = self.layer.query().shape().late();
        self.poison();
        if late {
            self.q_c.copy_from(&self.stream, &alone.1).unwrap();
        }
        launch(self);
        assert_eq!(self.read_query(), alone, "{what}");
        self.step.queries =
            alone.1.chunks(Q_LORA).flat_map(|row| (0..query_row::BYTES).map(|i| projected(row, i))).collect();
        let [rows, counts, ids] = self.kept.each_ref().map(|kept| kept.copy_to_vec(&self.stream).unwrap());
        Outputs { rows, counts, ids }.expect(what, &self.step);
    }
}

fn step() -> DecodeStep {
    // Tables for the longest rows that occur.
    let step = StepSpec::new(11, 1, TOPK, &[300; 3]).build().unwrap();
    DecodeStep { row_ends: vec![300, 40, 129], ..step }
}

#[test]
fn one_graph_serves_new_rows_slots_and_lengths() {
    for late in [false, true] {
        for device in devices() {
            let what = |round: &str| format!("{round}, late {late}, on {device:?}");
            let mut whole = Whole::new(&device, &step(), late);
            whole.check(&what("eager"), |whole| whole.run().unwrap());
            let graph = Graph::capture_with(&whole.stream, |_| whole.run()).unwrap();
            // Captured with short rows, replayed with longer, shorter and empty ones, and the other way round; slots that
            // are skipped, the last one, and one past the cache.
            let last = (PAGES * PAGE_TOKENS) as i64 - 1;
            for (round, slots, ends) in [
                ("as captured", [0, 1, 2], [300, 40, 129]),
                ("short", [7, -1, last], [1, 0, TOPK as i32]),
                ("long", [last, 64, -5], [300, 299, 257]),
                ("empty", [-1, last + 1, 3], [0, -3, 0]),
                ("mixed", [5, 70, 130], [TOPK as i32 + 1, 300, 2]),
            ] {
                whole.replace(round.len() as u64, &slots, &ends);
                whole.check(&what(round), |whole| graph.launch(&whole.stream).unwrap());
            }
            whole.check(&what("eager again"), |whole| whole.run().unwrap());
        }
    }
}

#[test]
fn replays_in_a_row_are_bit_equal() {
    for device in devices() {
        let mut whole = Whole::new(&device, &step(), false);
        let graph = Graph::capture_with(&whole.stream, |_| whole.run()).unwrap();
        whole.check("ten replays", |whole| (0..10).for_each(|_| graph.launch(&whole.stream).unwrap()));
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let device = test_devices::simulated();
    let whole = Whole::new(&device, &step(), false);
    whole.poison();
    let shape = StepShape { rows: whole.step.rows, q: 1 };
    let fewer = MlaStep { tokens: 2, ..whole.mla() };
    let refused = whole.layer.run::<Error>(&whole.stream, &fewer, &whole.inputs.step(shape), |_, _| unreachable!());
    assert!(matches!(refused, Err(Error::TooShort { buffer: "tokens of the MLA query", found: 2, needed: 3 })));
    let short = MlaStep { slots: whole.slots.view(..2).unwrap(), ..whole.mla() };
    let refused = whole.layer.run::<Error>(&whole.stream, &short, &whole.inputs.step(shape), |_, _| unreachable!());
    assert!(matches!(refused, Err(Error::Query(mla_query::MlaError::BufferTooShort { buffer: "slots", .. }))));
    // What only the second of the two sees.
    let unplanned = StepShape { rows: 4, q: 1 };
    let step_of = |whole: &Whole| -> Option<Error> {
        let run =
            whole.layer.run::<Error>(&whole.stream, &whole.mla(), &whole.inputs.step(unplanned), |_, _| unreachable!());
        run.err()
    };
    assert!(matches!(step_of(&whole), Some(Error::NotPlanned { .. } | Error::Unsupported(_))), "{:?}", step_of(&whole));
    assert!(whole.read_query().0.iter().all(|byte| *byte == POISON), "nothing was launched");
    let late = Whole::new(&device, &step(), true);
    late.poison();
    let short = MlaStep { slots: late.slots.view(..2).unwrap(), ..late.mla() };
    let refused = late.layer.run::<Error>(&late.stream, &short, &late.inputs.step(shape), |_, _| unreachable!());
    assert!(matches!(refused, Err(Error::Query(mla_query::MlaError::BufferTooShort { buffer: "slots", .. }))));

    let silent = MlaQuery::new(&device, MlaShape::new(HEADS, 3, FORM, PAGE_TOKENS).unwrap()).unwrap();
    let Whole { layer, .. } = whole;
    let scratch = layer.indexer().scratch().clone();
    let indexer = FusedIndexer::new(IndexerConfig {
        scratch: &scratch,
        layer: layer_of(&step()),
        keys: whole.inputs.cache.as_view(),
        shapes: &[shape],
        hold: &[],
        ids: false,
    });
    assert!(matches!(DecodeLayer::new(silent, indexer.unwrap()), Err(Error::NoQc { .. })));
}

//! What the fused indexer refuses, with which reason, and that nothing is launched then.

#[path = "common/layer.rs"]
mod layer;

use dsa_core::generate::StepSpec;
use dsa_core::{DecodeStep, ShapeError};
use gpu::{Device, SimConfig};
use kimi_decode::{
    Error, FusedIndexer, IndexerConfig, IndexerScratch, LayerSpec, ScratchSpec, Step, StepShape, StepTable, Unsupported,
};
use layer::{Inputs, Layer, layer_of, scratch_of};
use ptx::Target;

fn step() -> DecodeStep {
    StepSpec::new(1, 2, 256, &[400, 401, 90, 91]).build().unwrap()
}

const SHAPE: StepShape = StepShape { rows: 4, q: 2 };

fn sim() -> Device {
    Device::simulated(SimConfig::default())
}

/// The reason, for a layer and scratch changed from ones that are served.
fn reason(change: impl FnOnce(&mut LayerSpec, &mut ScratchSpec, &mut StepShape)) -> Result<(), Unsupported> {
    let (mut layer, mut scratch, mut shape) = (layer_of(&step()), scratch_of(&step()), SHAPE);
    change(&mut layer, &mut scratch, &mut shape);
    FusedIndexer::supports(&sim(), &scratch, &layer, shape)
}

#[test]
fn supports_names_the_reason() {
    use ShapeError::*;
    let shape = |error| Err(Unsupported::Shape(error));
    assert_eq!(reason(|_, _, _| ()), Ok(()));
    assert_eq!(reason(|_, _, s| s.rows = 0), Ok(()), "an empty batch");
    assert_eq!(reason(|_, _, s| s.q = 0), shape(RowsPerRequestOutOfRange { q: 0 }));
    assert_eq!(reason(|_, _, s| s.q = 9), shape(RowsPerRequestOutOfRange { q: 9 }));
    assert_eq!(reason(|_, _, s| s.rows = 3), shape(RowsNotWholeRequests { rows: 3, q: 2 }));
    assert_eq!(reason(|_, _, s| s.rows = 2050), shape(TooManyRequests { requests: 1025 }));
    for topk in [0, 100, 4224] {
        assert_eq!(reason(|l, _, _| l.topk = topk), shape(TopkUnsupported { topk }));
    }
    assert_eq!(
        reason(|l, _, _| l.context_len_max = (1 << 20) + 1),
        shape(ContextOutOfRange { context_len_max: (1 << 20) + 1 })
    );
    assert_eq!(reason(|l, _, _| l.index_page = 128), Err(Unsupported::IndexPage { found: 128 }));
    assert_eq!(
        reason(|l, _, _| l.index_page_stride = 8440),
        shape(PageStrideUnsupported { stride: 8440, page_bytes: 8448 })
    );
    assert_eq!(reason(|l, _, _| l.index_blocks = 1 << 31), shape(TooManyBlocks { blocks: 1 << 31 }));
    assert_eq!(reason(|l, _, _| l.kv_page = 48), shape(PageNotPowerOfTwo { page: 48 }));
    let page = 1 << 21;
    assert_eq!(
        reason(|l, _, _| (l.kv_page, l.kv_block_rows, l.kv_blocks) = (page, page, 1)),
        shape(KvPageTooLarge { page })
    );
    assert!(
        KvPageTooLarge { page }.to_string().contains("2097152") && !KvPageTooLarge { page }.to_string().contains("two")
    );
    let page = 1 << 20;
    assert_eq!(reason(|l, _, _| (l.kv_page, l.kv_block_rows, l.kv_blocks) = (page, page, 1)), Ok(()));
    for found in [1 << 40, usize::MAX - 15] {
        assert_eq!(reason(|l, _, _| l.index_page_stride = found), Err(Unsupported::IndexPageStride { found }));
    }
    assert_eq!(reason(|l, _, _| l.index_page_stride = (1 << 40) - 16), Ok(()));
    assert_eq!(reason(|l, _, _| l.index_blocks = 0), Err(Unsupported::NoIndexPages { rows: 4 }));
    assert_eq!(reason(|l, _, s| (l.index_blocks, s.rows) = (0, 0)), Ok(()), "no rows need no pages");
    // A pool of unknown size.
    for found in [1 << 31, 1 << 32, usize::MAX] {
        let far = reason(|l, _, _| (l.kv_block_rows, l.kv_blocks) = (found, 0));
        assert_eq!(far, Err(Unsupported::KvBlockRows { found }));
    }
    assert_eq!(reason(|l, _, _| (l.kv_block_rows, l.kv_blocks) = (i32::MAX as usize, 0)), Ok(()));
    assert_eq!(reason(|l, _, _| l.kv_block_rows = 63), shape(KvBlockTooSmall { block_rows: 63, page: 64 }));
    assert_eq!(reason(|l, _, _| l.kv_blocks = 1 << 25), shape(PoolTooLarge { blocks: 1 << 25, block_rows: 64 }));
    assert_eq!(reason(|_, c, _| c.rows_max = 3), Err(Unsupported::ScratchRows { rows: 4, rows_max: 3 }));
    assert_eq!(reason(|_, c, _| c.topk = 128), Err(Unsupported::ScratchTopk { topk: 256, topk_max: 128 }));
    // A scratch that cannot be reserved.
    assert!(matches!(reason(|_, c, _| c.rows_max = 8193), Err(Unsupported::Shape(TooManyRequests { .. }))));
    assert_eq!(reason(|_, c, _| c.topk = usize::MAX), shape(TopkUnsupported { topk: usize::MAX }));
    let long = |l: &mut LayerSpec| (l.context_len_max, l.index_blocks) = (9000, 1000);
    let too_long = Unsupported::ScratchLength { length: 9000, length_max: step().context_len_max };
    assert_eq!(reason(|l, _, _| long(l)), Err(too_long));
    let pool = |l: &mut LayerSpec| (l.context_len_max, l.index_blocks) = (9000, 5);
    assert_eq!(reason(|l, _, _| pool(l)), Ok(()), "no row is longer than the cache");
}

#[test]
fn an_architecture_without_kernels_is_refused_before_anything_is_built() {
    let blackwell = Device::simulated_group_as(SimConfig::default(), Target::Sm100a).swap_remove(0);
    let refused = Unsupported::Architecture { found: (10, 0), needed: Target::Sm90a };
    let (layer, spec) = (layer_of(&step()), scratch_of(&step()));
    assert_eq!(FusedIndexer::supports(&blackwell, &spec, &layer, SHAPE), Err(refused.clone()));
    assert!(refused.to_string().contains("10.0") && refused.to_string().contains("sm_90a"), "{refused}");
    let scratch = IndexerScratch::reserve(&blackwell, spec).unwrap();
    let built = Layer::planned(&scratch, &step(), &blackwell.stream().unwrap(), &[SHAPE], &[]);
    assert!(matches!(built.err(), Some(Error::Unsupported(reason)) if reason == refused));
    assert_eq!(scratch.kernels_compiled(), 0);
}

#[test]
fn scratch_of_impossible_sizes_is_refused() {
    let device = sim();
    let reserve = |change: &dyn Fn(&mut ScratchSpec)| {
        let mut spec = scratch_of(&step());
        change(&mut spec);
        IndexerScratch::reserve(&device, spec).err()
    };
    assert!(matches!(reserve(&|s| s.topk = 100), Some(Error::Unsupported(Unsupported::Shape(_)))));
    assert!(matches!(reserve(&|s| s.length_max = 0), Some(Error::Unsupported(Unsupported::Shape(_)))));
    assert!(matches!(reserve(&|s| s.rows_max = 8193), Some(Error::Unsupported(Unsupported::Shape(_)))));
    let vast = |s: &mut ScratchSpec| (s.rows_max, s.length_max) = (8192, 1 << 20);
    let small = Device::simulated(SimConfig { memory_bytes: 1 << 30, ..SimConfig::default() });
    let mut spec = scratch_of(&step());
    vast(&mut spec);
    let refused = IndexerScratch::reserve(&small, spec).err();
    assert!(matches!(refused, Some(Error::Device(gpu::Error::OutOfMemory { .. }))), "{refused:?}");
    assert_eq!(spec.bytes(), 2 * (8192u64 << 20) * 9 / 8 + 4 * 8192 * (2 * 256 + 1));
    assert!(reserve(&|s| s.rows_max = 0).is_none(), "no rows are legal");
    let endless = ScratchSpec { rows_max: usize::MAX, length_max: usize::MAX, topk: usize::MAX, ids: true };
    assert_eq!(endless.bytes(), u64::MAX);
    for change in [
        |s: &mut ScratchSpec| s.rows_max = usize::MAX,
        |s: &mut ScratchSpec| s.length_max = usize::MAX,
        |s: &mut ScratchSpec| s.topk = usize::MAX,
    ] {
        let mut spec = scratch_of(&step());
        change(&mut spec);
        assert_eq!(spec.bytes(), u64::MAX);
        assert!(matches!(IndexerScratch::reserve(&device, spec).err(), Some(Error::Unsupported(_))), "{spec:?}");
    }
}

#[test]
fn new_refuses_holds_ids_and_caches_that_do_not_fit() {
    let device = sim();
    let (step, stream) = (step(), device.stream().unwrap());
    let scratch = IndexerScratch::reserve(&device, scratch_of(&step)).unwrap();
    let other = StepShape { rows: 2, q: 2 };
    let built = Layer::planned(&scratch, &step, &stream, &[SHAPE], &[other]);
    assert!(matches!(built.err(), Some(Error::NotPlanned { shape }) if shape == other));

    let without_ids = IndexerScratch::reserve(&device, ScratchSpec { ids: false, ..scratch_of(&step) }).unwrap();
    let built = Layer::planned(&without_ids, &step, &stream, &[SHAPE], &[]);
    assert!(matches!(built.err(), Some(Error::Unsupported(Unsupported::ScratchIds))));

    let inputs = Inputs::upload(&device, &step);
    let keys = |keys| IndexerConfig {
        scratch: &scratch,
        layer: layer_of(&step),
        keys,
        shapes: &[SHAPE],
        hold: &[],
        ids: true,
    };
    let short = FusedIndexer::new(keys(inputs.cache.view(..inputs.cache.len() - 1).unwrap())).err();
    assert!(matches!(short, Some(Error::Kernel(_))), "{short:?}");
    assert!(short.unwrap().to_string().contains("index cache"));
    let odd = FusedIndexer::new(IndexerConfig {
        layer: LayerSpec { index_blocks: 2, ..layer_of(&step) },
        ..keys(inputs.cache.view(8..).unwrap())
    });
    assert!(matches!(odd.err(), Some(Error::Kernel(_))), "a base off 16 bytes");
    let elsewhere = sim();
    let foreign = elsewhere.upload(&step.cache).unwrap();
    let foreign = FusedIndexer::new(keys(foreign.as_view())).err();
    assert!(matches!(foreign, Some(Error::WrongDevice { what: "indexer cache", .. })), "{foreign:?}");
}

#[test]
fn hold_compiles_a_select_of_its_own() {
    let device = sim();
    let (step, stream) = (step(), device.stream().unwrap());
    let scratch = IndexerScratch::reserve(&device, scratch_of(&step)).unwrap();
    let shapes = [SHAPE, StepShape { rows: 2, q: 2 }, StepShape { rows: 4, q: 1 }, SHAPE];
    Layer::planned(&scratch, &step, &stream, &shapes, &[]).unwrap();
    assert_eq!(scratch.kernels_compiled(), 3, "a score for each q");
    let held = Layer::planned(&scratch, &step, &stream, &shapes, &[SHAPE]).unwrap();
    assert_eq!(scratch.kernels_compiled(), 4, "and the select that holds");
    held.read(&held.run()).expect("held", &step);
}

/// What a deployment of 1 to 64 requests at q = 1, 2 and 4 compiles: cold, each kernel takes a driver a fifth of a second.
#[test]
fn select_is_compiled_once_for_all_q() {
    let device = Device::simulated(SimConfig { sms: 132, ..SimConfig::default() });
    let (length_max, topk) = (131_072, 2048);
    let spec = ScratchSpec { rows_max: 256, length_max, topk, ids: false };
    let scratch = IndexerScratch::reserve(&device, spec).unwrap();
    let layer = LayerSpec {
        context_len_max: length_max,
        topk,
        index_blocks: length_max / 64,
        index_page_stride: 8448,
        ..layer_of(&step())
    };
    let keys = device.alloc::<u8>(layer.index_blocks * layer.index_page_stride).unwrap();
    let shapes: Vec<StepShape> =
        [1, 2, 4].into_iter().flat_map(|q| (1..=64).map(move |n| StepShape { rows: n * q, q })).collect();
    let config =
        IndexerConfig { scratch: &scratch, layer, keys: keys.as_view(), shapes: &shapes, hold: &[], ids: false };
    FusedIndexer::new(config).unwrap();
    assert_eq!(scratch.kernels_compiled(), 3 + 4, "a score for each q, a select for each cluster of 1, 2, 4 and 8");
}

#[test]
fn run_refuses_steps_that_do_not_fit_before_launching() {
    let (device, step) = (sim(), step());
    let layer = Layer::new(&device, &step);
    let outputs = layer.run();
    layer.poison(&outputs);
    let elsewhere = sim();
    let foreign = Inputs::upload(&elsewhere, &step);
    let refused = |change: &dyn Fn(&mut Step<'_>)| {
        let mut spoilt = layer.inputs.step(SHAPE);
        change(&mut spoilt);
        layer.indexer.run(&layer.stream, &spoilt).expect_err("refused")
    };
    let short = |change: &dyn Fn(&mut Step<'_>), buffer: &str, found: usize, needed: usize| {
        let error = refused(change);
        let same =
            matches!(error, Error::TooShort { buffer: b, found: f, needed: n } if (b, f, n) == (buffer, found, needed));
        assert!(same, "{buffer}: {error:?}");
    };
    let other = StepShape { rows: 2, q: 2 };
    assert!(matches!(refused(&|s| s.shape = other), Error::NotPlanned { shape } if shape == other));
    let rows_max = Unsupported::ScratchRows { rows: 6, rows_max: 4 };
    assert!(matches!(refused(&|s| s.shape.rows = 6), Error::Unsupported(reason) if reason == rows_max));
    assert!(matches!(
        refused(&|s| s.row_ends = s.row_ends.view(..3).unwrap()),
        Error::LiveRows { live: 3, shape: SHAPE }
    ));
    let six = device.upload(&[0; 6]).unwrap();
    let more = Step { row_ends: six.as_view(), ..layer.inputs.step(SHAPE) };
    assert!(matches!(layer.indexer.run(&layer.stream, &more).err(), Some(Error::LiveRows { live: 6, .. })));

    short(&|s| s.queries = s.queries.view(1..).unwrap(), "queries", 4 * 4096 - 1, 4 * 4096);
    short(&|s| s.weights = s.weights.view(32..).unwrap(), "weights", 96, 128);
    // Two requests, one stride apart.
    let (stride, width) = (step.table_stride, step.table_width);
    let cut = |table: &StepTable<'_>, n: usize| table.ids.view(..n).unwrap().len();
    assert_eq!(cut(&layer.inputs.step(SHAPE).index_table, stride + width), stride + width);
    short(&|s| s.index_table.ids = s.index_table.ids.view(..stride).unwrap(), "index_table", stride, stride + width);
    short(
        &|s| s.kv_table.ids = s.kv_table.ids.view(..1).unwrap(),
        "kv_table",
        1,
        step.kv_table_stride + step.kv_table_width,
    );
    // Per row, the second request's table is two strides further.
    let found = step.table.len();
    let per_row = |s: &mut Step<'_>| s.index_table.per = kimi_decode::TablePer::Row;
    short(&per_row, "index_table", found, 2 * stride + width);
    assert!(matches!(
        refused(&|s| s.index_table.stride = width - 1),
        Error::TableStride { table: "index_table", stride: s, width: w } if (s, w) == (width - 1, width)
    ));
    assert!(matches!(refused(&|s| s.kv_table.stride = usize::MAX), Error::TableStride { table: "kv_table", .. }));

    let unaligned = device.alloc::<u8>(4 * 4096 + 8).unwrap();
    let odd = Step { queries: unaligned.view(8..).unwrap(), ..layer.inputs.step(SHAPE) };
    let odd = layer.indexer.run(&layer.stream, &odd).err();
    assert!(matches!(odd, Some(Error::Misaligned { buffer: "queries", align: 16, .. })), "{odd:?}");
    for what in ["queries", "weights", "row_ends", "index_table", "kv_table"] {
        let (mut spoilt, theirs) = (layer.inputs.step(SHAPE), foreign.step(SHAPE));
        match what {
            "queries" => spoilt.queries = theirs.queries,
            "weights" => spoilt.weights = theirs.weights,
            "row_ends" => spoilt.row_ends = theirs.row_ends,
            "index_table" => spoilt.index_table = theirs.index_table,
            _ => spoilt.kv_table = theirs.kv_table,
        }
        let error = layer.indexer.run(&layer.stream, &spoilt).err();
        assert!(matches!(error, Some(Error::WrongDevice { what: found, .. }) if found == what), "{error:?}");
    }
    let stream = elsewhere.stream().unwrap();
    let error = layer.indexer.run(&stream, &layer.inputs.step(SHAPE)).err();
    assert!(matches!(error, Some(Error::WrongDevice { what: "stream", .. })), "{error:?}");

    let untouched = layer.read(&outputs);
    let words = untouched.rows.iter().chain(&untouched.ids).chain(&untouched.counts);
    assert!(words.copied().all(|word| word == 0x5A5A_5A5A), "nothing was launched");
}

#[test]
fn outputs_are_empty_before_the_first_step() {
    let (device, step) = (sim(), step());
    let layer = Layer::new(&device, &step);
    // A capture runs nothing, but says where the outputs are.
    let mut outputs = None;
    gpu::Graph::capture(&layer.stream, |stream| {
        outputs = layer.indexer.run(stream, &layer.inputs.step(SHAPE)).ok();
        Ok(())
    })
    .unwrap();
    let outputs = layer.read(&outputs.unwrap());
    assert!(outputs.rows.iter().chain(&outputs.ids).all(|&slot| slot == -1));
    assert_eq!(outputs.counts, [0; 4]);
}

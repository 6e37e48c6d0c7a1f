//! The fused indexer as an engine uses it: layers over one scratch, captured steps whose lengths change, padding, tables
//! per row. On the simulator always, on a GPU where there is one.

#[path = "common/layer.rs"]
mod layer;

use dsa_core::DecodeStep;
use dsa_core::generate::{Contents, StepSpec};
use dsa_core::layout::fp8_page::{self, ScaleForm};
use gpu::{Device, Graph, SimConfig, Stream};
use kimi_decode::{IndexerScratch, Step, StepShape, StepTable};
use layer::{Layer, Outputs, devices, scratch_of};
use test_devices::{gpu_only, sim_config};

/// Captures one step.
fn capture(layer: &Layer) -> Graph {
    let mut run = Ok(());
    let graph = Graph::capture(&layer.stream, |stream: &Stream| {
        run = layer.indexer.run(stream, &layer.inputs.step(layer.shape)).map(drop);
        Ok(())
    });
    run.unwrap();
    graph.unwrap()
}

/// The same step with other row ends.
fn with_ends(step: &DecodeStep, ends: &[i32]) -> DecodeStep {
    DecodeStep { row_ends: ends.to_vec(), ..step.clone() }
}

/// Poisoned, run, read: twice, with equal bits.
fn run_twice(what: &str, layer: &Layer) -> Outputs {
    let run = || {
        layer.poison(&layer.run());
        layer.read(&layer.run())
    };
    let first = run();
    assert_eq!(first, run(), "{what}: two runs");
    first
}

#[test]
fn every_kind_of_step_equals_the_oracle() {
    let ends: [i32; 8] = [700, 1, 0, -5, 513, 512, 511, 2000];
    let small = StepSpec::new(1, 2, 512, &ends);
    let specs = [
        ("integers", small.clone()),
        ("gaussian", StepSpec { contents: Contents::Gaussian, ..small.clone() }),
        ("hostile", StepSpec { contents: Contents::Hostile, ..small.clone() }),
        ("fp32 scales", StepSpec { contents: Contents::Hostile, scale_form: ScaleForm::Fp32, ..small.clone() }),
        ("strided pages", StepSpec { page_stride: 2 * fp8_page::BYTES + 576, ..small.clone() }),
        ("strided KV blocks of 256", StepSpec { kv_page: 256, kv_block_rows: 2048, ..small.clone() }),
        ("q 1, largest top-k", StepSpec::new(2, 1, 4096, &[4096, 4097, 4500, 100])),
        ("q 3, smallest top-k", StepSpec::new(3, 3, 128, &[400, 401, 402, 127, 128, 129])),
        ("q 8", StepSpec::new(4, 8, 256, &[900, 901, 902, 903, 904, 905, 906, 907])),
        ("longer than the table", StepSpec { context_len_max: 640, ..StepSpec::new(5, 1, 256, &[i32::MAX, 5000, 3]) }),
    ];
    for (name, spec) in specs {
        let step = spec.build().unwrap();
        for device in devices() {
            let what = format!("{name} on {device:?}");
            run_twice(&what, &Layer::new(&device, &step)).expect(&what, &step);
        }
    }
}

#[test]
fn layers_share_scratch_and_kernels_one_after_another() {
    let ends = [900, 64, 300, 129];
    let steps = [1, 2].map(|seed| StepSpec { contents: Contents::Gaussian, ..StepSpec::new(seed, 1, 128, &ends) });
    let steps = steps.map(|spec| spec.build().unwrap());
    for device in devices() {
        let what = format!("on {device:?}");
        let stream = device.stream().unwrap();
        let scratch = IndexerScratch::reserve(&device, scratch_of(&steps[0])).unwrap();
        let layers = steps.each_ref().map(|step| Layer::sharing(&scratch, step, &stream));
        assert_eq!(scratch.kernels_compiled(), 2, "one score and one select for all layers");
        // The whole sequence is enqueued before anything is waited for; what a layer selected is copied away in between.
        let kept = layers.each_ref().map(|layer| {
            let selected = layer.run();
            let keep = |view: &gpu::View<'_, i32>| {
                let kept = device.alloc::<i32>(view.len()).unwrap();
                kept.copy_from_device(&stream, view).unwrap();
                kept
            };
            [keep(&selected.rows), keep(&selected.counts), keep(selected.ids.as_ref().unwrap())]
        });
        for ((rows_counts_ids, step), layer) in kept.iter().zip(&steps).zip(["first", "second"]) {
            let [rows, counts, ids] = rows_counts_ids.each_ref().map(|kept| kept.copy_to_vec(&stream).unwrap());
            Outputs { rows, counts, ids }.expect(&format!("{layer} layer {what}"), step);
        }
    }
}

#[test]
fn a_captured_step_follows_the_lengths_of_each_replay() {
    // Captured with short rows that need no scores, as a warm-up does; replayed long, at the top-k's edges, and empty.
    let lengths = [70_000, 2048, 2049, 0, 100];
    let captured = StepSpec::new(11, 1, 2048, &lengths).build().unwrap();
    let replays = [
        lengths,
        [100, 0, 2049, 2048, 70_000],
        [2049, 2048, 2049, 2048, 2049],
        [0; 5],
        [-1, i32::MIN, 0, -2048, -1],
        [100; 5],
        lengths,
    ];
    // Row r can see as many keys as its request has pages: cut the others to that.
    let replays = replays.map(|ends| std::array::from_fn::<i32, 5, _>(|row| ends[row].min(lengths[row])));
    // With multiprocessors for one CTA a row, and for eight.
    let wide = Device::simulated(SimConfig { sms: 40, ..sim_config() });
    for device in devices().into_iter().chain((!gpu_only()).then_some(wide)) {
        let layer = Layer::new(&device, &captured);
        layer.inputs.row_ends.copy_from(&layer.stream, &[100, 100, 100, 0, 100]).unwrap();
        let graph = capture(&layer);
        let info = graph.info();
        assert_eq!(
            (info.nodes, info.programmatic_edges),
            (2, 1),
            "two kernels, the second starts early, on {device:?}"
        );
        let selected = layer.run();
        for ends in replays {
            let what = format!("{ends:?} on {device:?}");
            layer.inputs.row_ends.copy_from(&layer.stream, &ends).unwrap();
            layer.poison(&selected);
            graph.launch(&layer.stream).unwrap();
            let replayed = layer.read(&selected);
            layer.poison(&selected);
            let eager = layer.read(&layer.run());
            assert_eq!(replayed, eager, "{what}");
            replayed.expect(&what, &with_ends(&captured, &ends));
        }
    }
}

#[test]
fn a_capture_outlives_the_step_it_was_made_from_and_memory_reused_since() {
    let step = StepSpec::new(12, 2, 128, &[400, 401, 90, 91]).build().unwrap();
    for device in devices() {
        let layer = Layer::new(&device, &step);
        let graph = capture(&layer); // the Step and its views are gone when this returns
        let hog = device.alloc::<u8>(256 << 20).unwrap();
        hog.fill_bytes(&layer.stream, 0xFF).unwrap();
        let selected = layer.run();
        for replay in 0..20 {
            layer.poison(&selected);
            graph.launch(&layer.stream).unwrap();
            layer.read(&selected).expect(&format!("replay {replay} on {device:?}"), &step);
        }
    }
}

#[test]
fn fewer_live_rows_leave_the_captured_rest_empty_and_nothing_else_is_touched() {
    let step = StepSpec::new(13, 2, 128, &[400, 401, 90, 91, 300, 7]).build().unwrap();
    let shapes = [StepShape { rows: 6, q: 2 }, StepShape { rows: 4, q: 2 }];
    for device in devices() {
        let stream = device.stream().unwrap();
        let scratch = IndexerScratch::reserve(&device, scratch_of(&step)).unwrap();
        let layer = Layer::planned(&scratch, &step, &stream, &shapes, &[]).unwrap();
        assert_eq!(scratch.kernels_compiled(), 2, "shapes of one q share kernels");
        let all = layer.run();
        for shape in shapes {
            for live in (0..=shape.rows).step_by(2) {
                let what = format!("{live} live of {shape} on {device:?}");
                layer.poison(&all);
                let whole = layer.inputs.step(shape);
                let some = Step {
                    row_ends: whole.row_ends.view(..live).unwrap(),
                    queries: whole.queries.view(..live * 4096).unwrap(),
                    weights: whole.weights.view(..live * 32).unwrap(),
                    ..whole
                };
                let selected = layer.indexer.run(&stream, &some).unwrap();
                let outputs = layer.read(&selected);
                assert_eq!(outputs.counts.len(), shape.rows);
                outputs.expect(&what, &DecodeStep { rows: live, ..with_ends(&step, &step.row_ends[..live]) });
                let rest = layer.read(&all);
                let slots = shape.rows * step.topk;
                let guard = rest.counts[shape.rows..].iter().chain(&rest.rows[slots..]).chain(&rest.ids[slots..]);
                assert!(guard.copied().all(|word| word == 0x5A5A_5A5A), "{what}: rows past the shape");
            }
        }
    }
}

#[test]
fn tables_per_row_equal_tables_per_request() {
    let step = StepSpec::new(14, 4, 128, &[400, 401, 402, 403, 200, 0, -1, 300]).build().unwrap();
    // Every row has its own copy of its request's table; the last copy is not followed by the stride's gap.
    let per_row = |table: &[i32], stride: usize, width: usize| -> Vec<i32> {
        let mut copies: Vec<i32> =
            (0..step.rows).flat_map(|row| table[row / 4 * stride..][..stride].to_vec()).collect();
        copies.truncate((step.rows - 1) * stride + width);
        copies
    };
    for device in devices() {
        let layer = Layer::new(&device, &step);
        let table = device.upload(&per_row(&step.table, step.table_stride, step.table_width)).unwrap();
        let kv_table = device.upload(&per_row(&step.kv_table, step.kv_table_stride, step.kv_table_width)).unwrap();
        let index_rows = StepTable::per_row(table.as_view(), step.table_stride, step.table_width);
        let kv_rows = StepTable::per_row(kv_table.as_view(), step.kv_table_stride, step.kv_table_width);
        let whole = layer.inputs.step(layer.shape);
        let mixes = [
            ("both", Step { index_table: index_rows.clone(), kv_table: kv_rows.clone(), ..whole.clone() }),
            ("index", Step { index_table: index_rows, ..whole.clone() }),
            ("kv", Step { kv_table: kv_rows, ..whole }),
        ];
        for (name, mixed) in mixes {
            layer.poison(&layer.run());
            let selected = layer.indexer.run(&layer.stream, &mixed).unwrap();
            layer.read(&selected).expect(&format!("{name} per row on {device:?}"), &step);
        }
    }
}

#[test]
fn padded_rows_with_negative_ends_are_empty() {
    // q = 4: a request of length 2 (ends -1, 0, 1, 2), and a padded slot of length 0.
    let step = StepSpec::new(15, 4, 2048, &[-1, 0, 1, 2, -3, -2, -1, 0]).build().unwrap();
    for device in devices() {
        let outputs = run_twice("negative ends", &Layer::new(&device, &step));
        assert_eq!(outputs.counts, [0, 0, 1, 2, 0, 0, 0, 0], "on {device:?}");
        outputs.expect(&format!("on {device:?}"), &step);
    }
}

#[test]
fn draft_rows_past_the_longest_context_are_clamped() {
    // Drafts extend a sequence past the limit that sized table and scratch: no page beyond either is read.
    for (context_len_max, ends) in [(320, [319, 320, 321, 322]), (333, [332, 333, 334, 335]), (320, [i32::MAX; 4])] {
        let spec = StepSpec { context_len_max, spare_blocks: 0, table_gap: 4, ..StepSpec::new(16, 4, 128, &ends) };
        let step = spec.build().unwrap();
        for device in devices() {
            let what = format!("{ends:?} of {context_len_max} on {device:?}");
            run_twice(&what, &Layer::new(&device, &step)).expect(&what, &step);
        }
    }
    // A table narrower than the scratch clamps as well.
    let step = StepSpec::new(17, 1, 128, &[600, 90]).build().unwrap();
    for device in devices() {
        let layer = Layer::new(&device, &step);
        let whole = layer.inputs.step(layer.shape);
        for (index_width, kv_width) in [(5, step.kv_table_width), (step.table_width, 3), (0, 3), (5, 0)] {
            let what = format!("widths {index_width}, {kv_width} on {device:?}");
            layer.poison(&layer.run());
            let narrow = Step {
                index_table: StepTable { width: index_width, ..whole.index_table.clone() },
                kv_table: StepTable { width: kv_width, ..whole.kv_table.clone() },
                ..whole.clone()
            };
            let selected = layer.indexer.run(&layer.stream, &narrow).unwrap();
            let step = DecodeStep { table_width: index_width, kv_table_width: kv_width, ..step.clone() };
            layer.read(&selected).expect(&what, &step);
        }
    }
}

#[test]
fn an_empty_batch_launches_nothing() {
    let step = StepSpec::new(18, 2, 128, &[400, 401]).build().unwrap();
    for device in devices() {
        let layer = Layer::new(&device, &step);
        let nothing = StepShape { rows: 0, q: 2 };
        let whole = layer.inputs.step(nothing);
        let empty = Step {
            row_ends: whole.row_ends.view(..0).unwrap(),
            queries: whole.queries.view(..0).unwrap(),
            weights: whole.weights.view(..0).unwrap(),
            ..whole
        };
        layer.poison(&layer.run());
        let before = layer.read(&layer.indexer.run(&layer.stream, &layer.inputs.step(layer.shape)).unwrap());
        let selected = layer.indexer.run(&layer.stream, &empty).unwrap();
        assert!(selected.rows.is_empty() && selected.counts.is_empty() && selected.ids.unwrap().is_empty());
        let mut run = Ok(());
        let graph = Graph::capture(&layer.stream, |stream| {
            run = layer.indexer.run(stream, &empty).map(drop);
            Ok(())
        });
        run.unwrap();
        assert_eq!(graph.unwrap().info().nodes, 0, "on {device:?}");
        before.expect("what was there before", &step);
    }
}

//! Capture and replay: nothing that the host saw at capture decides what a replay does.

mod common;

use common::*;
use dsa_core::DecodeStep;
use dsa_core::generate::{Contents, StepSpec};
use dsa_core::oracle;
use dsa_kernels::KernelError;
use dsa_kernels::score::{IndexerScore, KeyCache, ScoreOutput, ScoreStep};
use dsa_kernels::select::{IndexerSelect, SelectStep};
use gpu::{Device, Graph};

/// Captures score and select of a step.
fn capture(resident: &Resident, step: &DecodeStep, score: &IndexerScore, select: &IndexerSelect) -> Graph {
    Graph::capture(resident.stream(), |s| resident.launch(step, score, select, s).map_err(device_error)).unwrap()
}

fn device_error(error: KernelError) -> gpu::Error {
    match error {
        KernelError::Device(error) => error,
        other => panic!("{other}"),
    }
}

/// The step with other row ends, within what its tables hold.
fn with_ends(step: &DecodeStep, ends: &[i32]) -> DecodeStep {
    let step = DecodeStep { row_ends: ends.to_vec(), ..step.clone() };
    step.validate().unwrap();
    step
}

/// One replay of `graph` with the row ends of `step`, its outputs poisoned before.
fn replay(resident: &Resident, step: &DecodeStep, graph: &Graph) -> Outputs {
    resident.inputs.row_ends.copy_from(resident.stream(), &step.row_ends).unwrap();
    resident.poison(step);
    graph.launch(resident.stream()).unwrap();
    resident.read(step)
}

#[test]
fn replays_follow_the_lengths_of_the_moment() {
    on_every_device(|device| {
        let (topk, long) = sized(device, (128, 3000), (2048, 70_000));
        for q in [1, 2] {
            let largest = StepSpec::new(15, q, topk, &vec![long; 2 * q]).build().unwrap();
            let k = topk as i32;
            let short = with_ends(&largest, &vec![100; 2 * q]);
            let resident = Resident::new(device, &short);
            let (score, select) = kernels(device, &short);
            let graph = capture(&resident, &short, &score, &select);
            let lengths = [100, long, k, k + 1, 0, 100];
            for len in lengths.into_iter().chain(lengths.into_iter().rev()) {
                // The last row differs from the others.
                let mut ends = vec![len; 2 * q];
                ends[2 * q - 1] = (len - 1).max(0);
                let step = with_ends(&largest, &ends);
                let got = replay(&resident, &step, &graph);
                check_outputs(&step, &got);
                assert!(resident.run(&step, &score, &select) == got, "an eager call differs at {len}");
            }
            // And captured at the longest.
            resident.inputs.row_ends.copy_from(resident.stream(), &largest.row_ends).unwrap();
            let graph = capture(&resident, &largest, &score, &select);
            for len in [0, k + 1, long] {
                let step = with_ends(&largest, &vec![len; 2 * q]);
                check_outputs(&step, &replay(&resident, &step, &graph));
            }
        }
    });
}

#[test]
fn dummy_rows_of_a_capture_touch_nothing() {
    on_every_device(|device| {
        // Captured with NaN queries, NaN weights, tables that name page 0, and no key; then one request becomes real.
        let len = sized(device, 400, 5000);
        let mut step = StepSpec::new(18, 1, 128, &[len, len, len, len]).build().unwrap();
        let real = step.clone();
        for row in [0, 1, 3] {
            step.queries[row * 4096..][..4096].fill(0x7F);
            step.weights[row * 32..][..32].fill(0x7FFF);
            let start = row * step.table_stride;
            step.table[start..start + step.table_width].fill(0);
        }
        let dummy = with_ends(&step, &[0; 4]);
        let resident = Resident::new(device, &dummy);
        let (score, select) = kernels(device, &dummy);
        let graph = capture(&resident, &dummy, &score, &select);
        let stream = resident.stream();
        resident.logits.fill_bytes(stream, POISON).unwrap();
        resident.tops.fill_bytes(stream, POISON).unwrap();
        let got = replay(&resident, &dummy, &graph);
        assert_eq!((got.counts, got.out.iter().all(|row| *row == -1)), (vec![0; 4], true));
        assert!(resident.logits.copy_to_vec(stream).unwrap().iter().all(|x| *x == POISON16), "a dummy row wrote");
        assert!(resident.tops.copy_to_vec(stream).unwrap().iter().all(|x| *x == POISON16), "a dummy row wrote");

        let one = with_ends(&step, &[0, 0, len, 0]);
        let got = replay(&resident, &one, &graph);
        check_outputs(&one, &got);
        let alone = oracle::step::logits(&with_ends(&real, &[0, 0, len, 0]), dot_tensor_core);
        assert_eq!(got.logits[2].as_ref(), Some(&alone[2]));
        assert_eq!(resident.inputs.cache_bytes.copy_to_vec(stream).unwrap(), step.cache, "the cache changed");
    });
}

#[test]
fn a_graph_needs_nothing_of_what_captured_it() {
    on_every_device(|device| {
        let step = StepSpec { contents: Contents::Gaussian, ..StepSpec::new(58, 2, 128, &[300, 299, 600, 5]) };
        let step = step.build().unwrap();
        let resident = Resident::new(device, &step);
        let graph = {
            // Kernels, cache description and views live for the capture only; buffers stay.
            let (score, select) = kernels(device, &step);
            let shape = cache_shape(&step);
            let cache = KeyCache::new(device, &resident.inputs.cache_bytes.as_view(), shape).unwrap();
            let inputs = ScoreStep { cache: &cache, ..resident.inputs.score_step(&step) };
            Graph::capture(resident.stream(), |s| {
                let scratch = device_scratch(&resident);
                score.launch(s, &inputs, &scratch).map_err(device_error)?;
                select.launch(s, &resident.select_step(&step)).map_err(device_error)
            })
            .unwrap()
        };
        let garbage = device.alloc::<u8>(sized(device, 1 << 20, 4 << 30)).unwrap();
        garbage.fill_bytes(resident.stream(), 0xFF).unwrap();
        let first = replay(&resident, &step, &graph);
        check_outputs(&step, &first);
        for _ in 0..sized(device, 4, 100) {
            assert!(replay(&resident, &step, &graph) == first);
        }
    });
}

fn device_scratch(resident: &Resident) -> ScoreOutput<'_> {
    resident.compact()
}

#[test]
fn a_step_without_rows_launches_nothing() {
    on_every_device(|device| {
        let step = StepSpec::new(71, 2, 128, &[300, 200]).build().unwrap();
        let resident = Resident::new(device, &step);
        let (score, select) = kernels(device, &step);
        let stream = resident.stream();
        resident.logits.fill_bytes(stream, POISON).unwrap();
        resident.tops.fill_bytes(stream, POISON).unwrap();
        let empty = StepSpec::new(71, 2, 128, &[]).build().unwrap();
        assert_eq!(empty.row_ends.len(), 0);
        let nothing = Inputs::new(device, &empty);
        let none = device.alloc::<i32>(0).unwrap();
        let launch = |s: &gpu::Stream| {
            score.launch(s, &nothing.score_step(&empty), &resident.compact()).map_err(device_error)?;
            let views = || none.as_view();
            let step = SelectStep {
                row_ends: views(),
                out: views(),
                counts: views(),
                ids: Some(views()),
                table: dsa_kernels::Table { ids: views(), stride: 0, width: 0 },
                length_max: 0,
                ..resident.select_step(&step)
            };
            select.launch(s, &step).map_err(device_error)
        };
        launch(stream).unwrap();
        let graph = Graph::capture(stream, launch).unwrap();
        assert_eq!(graph.info().nodes, 0, "{device:?}");
        graph.launch(stream).unwrap();
        for buffer in [&resident.out, &resident.counts, &resident.ids] {
            assert!(buffer.copy_to_vec(stream).unwrap().iter().all(|x| *x == POISON32));
        }
        for buffer in [&resident.logits, &resident.tops] {
            assert!(buffer.copy_to_vec(stream).unwrap().iter().all(|x| *x == POISON16));
        }
    });
}

#[test]
fn captured_rows_beyond_the_live_ones_come_out_empty() {
    on_every_device(|device| {
        let step = StepSpec::new(72, 2, 128, &[300, 200, 150, 129, 400, 1]).build().unwrap();
        let resident = Resident::new(device, &step);
        let (score, select) = kernels(device, &step);
        for live in [0, 2, 4, 6] {
            let prefix = DecodeStep { rows: live, row_ends: step.row_ends[..live].to_vec(), ..step.clone() };
            resident.poison(&step);
            let graph = Graph::capture(resident.stream(), |s| {
                let row_ends = resident.inputs.row_ends.view(..live).unwrap();
                let inputs = ScoreStep { row_ends: row_ends.clone(), ..resident.inputs.score_step(&step) };
                score.launch(s, &inputs, &resident.compact()).map_err(device_error)?;
                let outputs = SelectStep { row_ends, ..resident.select_step(&step) };
                select.launch(s, &outputs).map_err(device_error)
            });
            graph.unwrap().launch(resident.stream()).unwrap();
            let all = with_ends(&step, &[&step.row_ends[..live], &[0; 6][live..]].concat());
            let got = resident.read(&all);
            check_outputs(&all, &got);
            assert_eq!(prefix.rows, live);
            assert_eq!(got.counts[live..], [0; 6][live..]);
        }
    });
}

#[test]
fn a_second_stream_replays_a_graph_of_the_first() {
    let body = |device: &Device| {
        let step = StepSpec::new(73, 1, 128, &[300, 1000]).build().unwrap();
        let resident = Resident::new(device, &step);
        let (score, select) = kernels(device, &step);
        let graph = capture(&resident, &step, &score, &select);
        let want = replay(&resident, &step, &graph);
        let second = device.stream().unwrap();
        resident.poison(&step);
        resident.stream().synchronize().unwrap();
        graph.launch(&second).unwrap();
        second.synchronize().unwrap();
        assert!(resident.read(&step) == want);
    };
    on_every_device(body);
}

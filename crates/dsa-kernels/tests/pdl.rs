//! Programmatic dependent launches: nothing that a predecessor writes is touched before the wait.

mod common;

use std::collections::{HashMap, HashSet};

use common::*;
use dsa_core::DecodeStep;
use dsa_core::generate::{Contents, LogitPattern, StepSpec};
use dsa_kernels::local_topk::{self, LocalTopkShape};
use dsa_kernels::score::{self, ScoreShape};
use dsa_kernels::select::{self, SelectShape};
use gpu::{Device, Graph, Stream};
use ptx::op::{LabelId, Op, Operand, RegId, Space};
use ptx::slots::Role;
use ptx::{KernelIr, Target};

/// Two steps of the same sizes, tables and row ends with different queries, weights and keys.
fn two_steps(device: &Device) -> [DecodeStep; 2] {
    let long = sized(device, 300, 9000);
    let ends = [long, long - 1, 129, 200, 5, 0];
    let first = StepSpec { contents: Contents::Gaussian, ..StepSpec::new(1, 2, 128, &ends) }.build().unwrap();
    let mut second = first.clone();
    second.queries.reverse();
    second.weights.reverse();
    let block = first.page_stride;
    for (to, from) in second.cache.chunks_mut(block).zip(first.cache.chunks(block).rev()) {
        to.copy_from_slice(from);
    }
    [first, second]
}

/// What a late producer copies into a step's inputs.
struct Sources {
    inputs: Inputs,
}

impl Sources {
    fn new(device: &Device, step: &DecodeStep) -> Sources {
        Sources { inputs: Inputs::new(device, step) }
    }

    fn to<'a>(&'a self, inputs: &'a Inputs) -> [Words<'a>; 3] {
        let from = &self.inputs;
        [
            Words::new(&inputs.queries.as_view(), &from.queries.as_view()),
            Words::new(&inputs.weights.as_view(), &from.weights.as_view()),
            Words::new(&inputs.cache_bytes.as_view(), &from.cache_bytes.as_view()),
        ]
    }
}

#[test]
fn score_and_select_see_what_a_late_producer_writes() {
    in_every_order(6, |device| {
        let steps = two_steps(device);
        let resident = Resident::new(device, &steps[0]);
        let (score, select) = kernels(device, &steps[0]);
        let want = steps.each_ref().map(|step| {
            let got = Resident::new(device, step).run(step, &score, &select);
            check_outputs(step, &got);
            got
        });
        assert_ne!(want[0], want[1]);
        let sources = steps.each_ref().map(|step| Sources::new(device, step));
        let producer = Producer::new(device);
        resident.poison(&steps[0]);
        for round in 0..sized(device, 4, 1000) {
            // Everything overlaps; what was there before is the other step's.
            let which = round % 2;
            producer.launch(resident.stream(), sources[which].to(&resident.inputs)).unwrap();
            resident.launch(&steps[which], &score, &select, resident.stream()).unwrap();
            assert!(resident.read(&steps[which]) == want[which], "round {round}");
        }
    });
}

#[test]
fn select_sees_logits_of_a_late_producer() {
    in_every_order(6, |device| {
        let long = sized(device, 17_000, 70_000);
        let rows = |seed: u64| {
            let lengths = [long, 100, 129, 1024, 0, 1100];
            let row = |(i, len): (usize, usize)| LogitPattern::Gaussian.row(seed + i as u64, len);
            Rows::new(128, lengths.into_iter().enumerate().map(row).collect())
        };
        let both = [rows(10), rows(20)];
        let [a, b] = both.each_ref().map(|rows| SelectRig::new(device, rows));
        for rig in [&a, &b] {
            // The producer copies whole buffers, pages that no row has included.
            rig.logits.fill_bytes(&rig.stream, 0x7F).unwrap();
            rig.tops.fill_bytes(&rig.stream, 0x7F).unwrap();
            rig.write(&rig.rows);
            rig.stream.synchronize().unwrap();
        }
        let rig = SelectRig::new(device, &both[0]);
        let kernels = both[0].kernels(device);
        let producer = Producer::new(device);
        let want = both.each_ref().map(Rows::expected);
        for round in 0..sized(device, 4, 1000) {
            let select = &kernels[round / 2 % kernels.len()];
            let from = [&a, &b][round % 2];
            producer.launch(&rig.stream, rig.taken_from(from)).unwrap();
            select.launch(&rig.stream, &rig.step()).unwrap();
            rig.check(&want[round % 2], &guarded_outputs(&rig));
        }
    });
}

/// The outputs, whatever their guards hold.
fn guarded_outputs(rig: &SelectRig) -> [Vec<i32>; 3] {
    let (rows, topk) = (rig.rows.live(), rig.rows.topk);
    [(&rig.out, rows * topk), (&rig.counts, rows), (&rig.ids, rows * topk)]
        .map(|(buffer, len)| buffer.view(..len).unwrap().copy_to_vec(&rig.stream).unwrap())
}

/// Producer, score and select as a graph.
fn capture(
    stream: &Stream,
    producer: &Producer,
    words: [Words<'_>; 3],
    launch: impl Fn(&Stream) -> Result<(), dsa_kernels::KernelError>,
) -> Graph {
    Graph::capture(stream, |s| {
        producer.launch(s, words)?;
        launch(s).map_err(|error| match error {
            dsa_kernels::KernelError::Device(error) => error,
            other => panic!("{other}"),
        })
    })
    .unwrap()
}

#[test]
fn overlapping_replays_equal_serial_launches() {
    in_every_order(2, |device| {
        let steps = two_steps(device);
        let resident = Resident::new(device, &steps[0]);
        let (score, select) = kernels(device, &steps[0]);
        let sources = steps.each_ref().map(|step| Sources::new(device, step));
        let mut producer = Producer::new(device);
        producer.sleep_ns = 2000;
        // Serially: each launch alone.
        let stream = resident.stream();
        let serial = [0, 1].map(|which| {
            producer.launch(stream, sources[which].to(&resident.inputs)).unwrap();
            stream.synchronize().unwrap();
            score.launch(stream, &resident.inputs.score_step(&steps[which]), &resident.compact()).unwrap();
            stream.synchronize().unwrap();
            select.launch(stream, &resident.select_step(&steps[which])).unwrap();
            resident.read(&steps[which])
        });
        let graphs = [0, 1].map(|which| {
            let words = sources[which].to(&resident.inputs);
            capture(stream, &producer, words, |s| resident.launch(&steps[which], &score, &select, s))
        });
        for graph in &graphs {
            let info = graph.info();
            assert_eq!((info.nodes, info.edges, info.programmatic_edges), (3, 2, 2), "{device:?}");
        }
        for round in 0..sized(device, 5, 500) {
            // Two replays back to back, then a look: 1,000 replays on a GPU.
            graphs[round % 2].launch(stream).unwrap();
            graphs[(round + 1) % 2].launch(stream).unwrap();
            assert!(resident.read(&steps[0]) == serial[(round + 1) % 2], "round {round}");
        }
    });
}

#[test]
fn score_and_select_are_one_programmatic_edge() {
    on_every_device(|device| {
        let [step, _] = two_steps(device);
        let resident = Resident::new(device, &step);
        let (score, select) = kernels(device, &step);
        let graph = Graph::capture(resident.stream(), |s| {
            resident.launch(&step, &score, &select, s).unwrap();
            Ok(())
        });
        let info = graph.unwrap().info();
        assert_eq!((info.nodes, info.edges, info.programmatic_edges), (2, 1, 1), "{device:?}");
    });
}

/// Every score kernel, a select kernel of every flag and top-k, and local top-k.
fn every_kernel() -> Vec<std::sync::Arc<KernelIr>> {
    let scores = ScoreShape::all(&[512, 1024, 2048]).into_iter();
    let mut kernels: Vec<_> = scores.map(|shape| score::build(&shape, Target::Sm90a).unwrap().ir().clone()).collect();
    for topk in [128, 512, 640, 1024, 2048, 4096] {
        for flags in 0..8 {
            let shape = SelectShape::new(topk, 64).unwrap().with_ids(flags & 1 != 0);
            let shape = shape.with_hold(flags & 2 != 0).with_foreign_logits(flags & 4 != 0);
            for cluster in [1, 2, 4, 8] {
                let shared = shape.with_cluster(cluster).unwrap();
                kernels.push(select::build(&shared, Target::Sm90a).unwrap().ir().clone());
            }
        }
    }
    for n in [128, 512, 3968] {
        let shape = LocalTopkShape::new(n, 4096).unwrap();
        let shared = [2, 4, 8].map(|cluster| shape.with_cluster(cluster).unwrap());
        for shape in [shape].into_iter().chain(shared).flat_map(|shape| [shape, shape.with_push(8).unwrap()]) {
            kernels.push(local_topk::build(&shape, Target::Sm90a).unwrap().ir().clone());
        }
    }
    kernels
}

/// Registers that hold something computed from a parameter, by parameter number, regardless of control flow.
fn derived_from_params(ir: &KernelIr) -> HashMap<RegId, HashSet<u32>> {
    let mut derived: HashMap<RegId, HashSet<u32>> = HashMap::new();
    loop {
        let mut changed = false;
        for inst in &ir.insts {
            let (mut from, mut to) = (HashSet::new(), Vec::new());
            match &inst.op {
                Op::LdParam { dst, param } | Op::ParamAddress { dst, param } => {
                    from.insert(*param);
                    to.push(*dst);
                }
                // What is loaded is data, not a pointer.
                Op::Ld { .. } => {}
                op => op.slots(|role, _, operand| {
                    let Operand::Reg(reg) = operand else { return };
                    match role {
                        Role::Def => to.push(reg),
                        Role::Use => from.extend(derived.get(&reg).into_iter().flatten().copied()),
                        Role::DefUse => {
                            to.push(reg);
                            from.extend(derived.get(&reg).into_iter().flatten().copied());
                        }
                    }
                }),
            }
            for reg in to {
                let known = derived.entry(reg).or_default();
                changed |= from.iter().any(|param| known.insert(*param));
            }
        }
        if !changed {
            return derived;
        }
    }
}

/// Positions that some path reaches without the dependency wait.
fn reached_without_wait(ir: &KernelIr) -> HashSet<usize> {
    let labels = ir.label_positions();
    let at = |label: LabelId| labels[label.0 as usize];
    let (mut reached, mut todo) = (HashSet::new(), vec![0]);
    while let Some(i) = todo.pop() {
        if i >= ir.insts.len() || !reached.insert(i) {
            continue;
        }
        match &ir.insts[i].op {
            Op::GridDepWait | Op::Exit | Op::Trap => {}
            Op::Bra { target, cond: None } => todo.push(at(*target)),
            Op::Bra { target, cond: Some(_) } => todo.extend([at(*target), i + 1]),
            _ => todo.push(i + 1),
        }
    }
    reached
}

#[test]
fn before_the_wait_every_specialisation_reads_only_step_metadata_and_writes_nothing() {
    for ir in every_kernel() {
        assert!(ir.waits_for_dependencies(), "{} never waits", ir.name);
        let derived = derived_from_params(&ir);
        let early = reached_without_wait(&ir);
        let mut metadata_loads = 0;
        for i in early {
            let inst = &ir.insts[i];
            match &inst.op {
                Op::Ld { space: Space::Global, addr, .. } => {
                    let params = addr.base.reg().and_then(|reg| derived.get(&reg)).expect("a pointer parameter");
                    let pointers = params.iter().map(|p| &ir.params[*p as usize]);
                    let pointers: Vec<_> = pointers.filter(|p| p.bytes == 8).map(|p| p.name).collect();
                    assert!(
                        pointers.iter().all(|name| ["row_ends", "table"].contains(name)) && !pointers.is_empty(),
                        "{} reads {pointers:?} before its wait, at {}",
                        ir.name,
                        inst.loc
                    );
                    metadata_loads += 1;
                }
                Op::St { space: Space::Global, .. }
                | Op::Atom { space: Space::Global, .. }
                | Op::TensorG2s { .. }
                | Op::BulkG2s { .. }
                | Op::BulkS2g { .. } => panic!("{} touches memory before its wait, at {}", ir.name, inst.loc),
                _ => {}
            }
        }
        assert!(metadata_loads > 0, "{}: row ends are read ahead", ir.name);
    }
}

#[test]
fn hold_keeps_the_next_launch_back_and_nothing_else_does() {
    for topk in [128, 640, 2048, 4096] {
        for hold in [false, true] {
            let shape = SelectShape::new(topk, 64).unwrap().with_hold(hold);
            let kernel = select::build(&shape, Target::Sm90a).unwrap();
            let launches = kernel.ir().insts.iter().filter(|inst| inst.op == Op::GridDepLaunch).count();
            assert_eq!(launches, if hold { 0 } else { 2 }, "{}: once on each of its two ways", shape.name());
            assert_eq!(kernel.ptx().contains("griddepcontrol.launch_dependents"), !hold);
            assert!(kernel.ptx().contains("griddepcontrol.wait"));
        }
    }
}

#[test]
fn hold_selects_the_same() {
    on_every_device(|device| {
        let rows =
            Rows::new(512, vec![LogitPattern::Gaussian.row(1, 700), LogitPattern::Ties.row(2, 9000), vec![0; 3]]);
        check_select_runs(device, &Rows { hold: true, ..rows }, 3);
    });
}

//! Indexers whose contexts are spread over ranks, against one that has the whole context.

#[path = "common/layer.rs"]
mod layer;

use std::sync::Arc;
use std::time::Duration;

use dsa_core::generate::{Contents, StepSpec};
use dsa_core::layout::b_row::BRow;
use dsa_core::oracle::merge::{local_slots, owned_rows};
use dsa_core::oracle::step::logits;
use dsa_core::{DecodeStep, Ownership, ShapeError};
use dsa_dcp::rendezvous::{InProcess, in_process};
use dsa_dcp::{AllGather, DcpError, Limits, Rendezvous, Waiting};
use gpu::{Buffer, Device, Graph, SimConfig, Stream, View};
use kimi_decode::check::device_dot;
use kimi_decode::{
    DcpGroup, DcpIndexerConfig, DcpScratch, DcpSpec, Error, FusedIndexer, LayerSpec, Sharded, Step, StepShape,
    Transport, Unsupported,
};
use layer::{Inputs, layer_of, oracle};

/// What a group of ranks is built for.
#[derive(Clone, Debug)]
struct Case {
    ranks: usize,
    interleave: usize,
    local_topk: usize,
    transport: Option<Transport>,
}

impl Case {
    fn new(ranks: usize, interleave: usize, local_topk: usize, transport: Transport) -> Case {
        Case { ranks, interleave, local_topk, transport: Some(transport) }
    }

    fn own(&self) -> Ownership {
        Ownership::new(self.ranks, self.interleave).unwrap()
    }
}

/// One rank.
struct Rank {
    device: Device,
    stream: Stream,
    scratch: Arc<DcpScratch>,
}

/// One layer of one rank, and its inputs.
struct Layer {
    indexer: FusedIndexer<Sharded>,
    inputs: Inputs,
    global_ends: Buffer<i32>,
    shard: DecodeStep,
}

fn as_every_rank<T: Send>(ranks: usize, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || body(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// One device per rank of a simulated machine; the GPUs here, dealt round robin, if there are any.
fn machines(ranks: usize) -> Vec<Vec<Device>> {
    let simulated = |config| Device::simulated_group(SimConfig { devices: ranks, ..config });
    let mut machines = vec![simulated(SimConfig::default()), simulated(SimConfig::seeded(5))];
    if test_devices::cuda().is_some() {
        let gpus: Vec<_> = (0..Device::cuda_count().unwrap()).map(|i| Device::cuda(i).unwrap()).collect();
        machines.push(gpus.iter().cycle().take(ranks).cloned().collect());
    }
    machines
}

fn spec(case: &Case, step: &DecodeStep, rows_max: usize) -> DcpSpec {
    DcpSpec {
        rows_max,
        push_rows_max: rows_max,
        interleave: case.interleave,
        context_len_max: step.context_len_max,
        topk: step.topk,
        ids: true,
    }
}

fn limits(devices: &[Device]) -> Limits {
    let poll = if devices[0].info().simulated { 200 } else { 1000 };
    Limits { poll: Duration::from_millis(poll), collective: Duration::from_secs(30) }
}

fn ranks(case: &Case, devices: &[Device], spec: DcpSpec, gather: bool) -> Vec<Rank> {
    let members: Vec<Arc<InProcess>> = in_process(case.ranks).into_iter().map(Arc::new).collect();
    (0..case.ranks)
        .map(|rank| {
            let member = members[rank].clone();
            let group = DcpGroup {
                group: member.clone(),
                gather: gather.then_some(member as Arc<dyn AllGather>),
                limits: limits(devices),
                transport: case.transport,
            };
            let device = devices[rank].clone();
            let scratch = DcpScratch::reserve(&device, group, spec).unwrap();
            Rank { stream: device.stream().unwrap(), scratch, device }
        })
        .collect()
}

/// A layer of a step on every rank. Collective.
fn layers(
    case: &Case,
    ranks: &[Rank],
    step: &DecodeStep,
    shapes: &[StepShape],
    hold: &[StepShape],
) -> Result<Vec<Layer>, Error> {
    let made = as_every_rank(case.ranks, |rank| {
        let Rank { device, scratch, .. } = &ranks[rank];
        let shard = step.shard(case.own(), rank).unwrap();
        let inputs = Inputs::upload(device, &shard);
        let indexer = FusedIndexer::sharded(DcpIndexerConfig {
            scratch,
            layer: LayerSpec { context_len_max: step.context_len_max, ..layer_of(&shard) },
            keys: inputs.cache.as_view(),
            local_topk: Some(case.local_topk),
            shapes,
            hold,
            ids: true,
        })?;
        Ok(Layer { indexer, global_ends: device.upload(&step.row_ends).unwrap(), inputs, shard })
    });
    made.into_iter().collect()
}

/// A step on every rank.
fn run(ranks: &[Rank], layers: &[Layer], shape: StepShape) {
    as_every_rank(ranks.len(), |rank| {
        let (Rank { stream, scratch, .. }, layer) = (&ranks[rank], &layers[rank]);
        let row_ends = scratch.local_ends(stream, &layer.global_ends.as_view()).unwrap();
        layer.indexer.run_push(stream, &Step { row_ends, ..layer.inputs.step(shape) }).unwrap();
    });
    // Ranks may share a device: nobody waits before all have pushed.
    for (Rank { stream, scratch, .. }, layer) in ranks.iter().zip(layers) {
        let row_ends = scratch.local_ends(stream, &layer.global_ends.as_view()).unwrap();
        layer.indexer.run_merge(stream, &Step { row_ends, ..layer.inputs.step(shape) }).unwrap();
    }
}

/// Every rank has the whole step's ids, and exactly its own rows of them.
#[track_caller]
fn verify(case: &Case, ranks: &[Rank], layers: &[Layer], step: &DecodeStep, shape: StepShape) {
    let (own, topk, want) = (case.own(), step.topk, oracle(step));
    for (rank, (Rank { stream, scratch, .. }, layer)) in ranks.iter().zip(layers).enumerate() {
        scratch.check(stream).unwrap();
        let selected = layer.indexer.selected(shape.rows).unwrap();
        let read = |output: &View<'_, i32>| output.copy_to_vec(stream).unwrap();
        let (ids, rows, counts) = (read(selected.ids.as_ref().unwrap()), read(&selected.rows), read(&selected.counts));
        for (row, want) in want.iter().enumerate() {
            let slots = row * topk..(row + 1) * topk;
            assert_eq!(ids[slots.clone()], want.ids, "{case:?}: rank {rank}, row {row}: ids");
            let selected: Vec<usize> = want.ids[..want.count].iter().map(|&id| id as usize).collect();
            let table = layer.shard.kv_table_row(row / step.q);
            let physical =
                |local: usize| table[local / step.kv_page] * step.kv_block_rows as i32 + (local % step.kv_page) as i32;
            let mut owned = owned_rows(&selected, rank, own, physical);
            assert_eq!(counts[row] as usize, owned.len(), "{case:?}: rank {rank}, row {row}: count");
            owned.resize(topk, -1);
            assert_eq!(rows[slots], owned, "{case:?}: rank {rank}, row {row}: rows");
        }
        let past = step.rows;
        assert!(counts[past..].iter().all(|&count| count == 0), "counts past the live rows");
        assert!(ids[past * topk..].iter().chain(&rows[past * topk..]).all(|&slot| slot == -1));
    }
}

fn step(seed: u64, q: usize, ends: &[i32]) -> DecodeStep {
    let contents = if seed.is_multiple_of(2) { Contents::SmallIntegers } else { Contents::Hostile };
    StepSpec { contents, context_len_max: 1600, ..StepSpec::new(seed, q, 256, ends) }.build().unwrap()
}

const ENDS: [i32; 6] = [1500, 1501, 900, 257, 3, 0];

#[test]
fn every_rank_selects_what_the_whole_context_would() {
    for transport in [Transport::Push, Transport::Gather] {
        for (ranks_of, interleave, local_topk) in [(1, 1, 128), (2, 64, 128), (3, 1, 128), (4, 4, 128)] {
            let case = Case::new(ranks_of, interleave, local_topk, transport);
            let step = step(ranks_of as u64, 2, &ENDS);
            let shape = StepShape { rows: 6, q: 2 };
            for devices in machines(ranks_of) {
                let ranks = ranks(&case, &devices, spec(&case, &step, 6), true);
                let layers = layers(&case, &ranks, &step, &[shape], &[]).unwrap();
                assert!(layers.iter().all(|layer| layer.indexer.exchanges(shape).unwrap() == transport));
                // Two layers' worth: the second call finds everything of the first in place.
                run(&ranks, &layers, shape);
                run(&ranks, &layers, shape);
                verify(&case, &ranks, &layers, &step, shape);
            }
        }
    }
}

#[test]
fn steps_of_fewer_rows_than_captured_and_layers_of_one_scratch() {
    let case = Case::new(3, 1, 128, Transport::Push);
    let (first, second) = (step(1, 1, &ENDS[..4]), step(2, 1, &[1024, 7, 0, 1333]));
    let shapes = [StepShape { rows: 4, q: 1 }, StepShape { rows: 8, q: 1 }];
    for devices in machines(3) {
        let ranks = ranks(&case, &devices, spec(&case, &first, 8), false);
        let hold = [shapes[1]];
        let layers = [&first, &second].map(|step| layers(&case, &ranks, step, &shapes, &hold).unwrap());
        // Kernels and exchange are shared: score, two local top-k, merge, and the merge that holds.
        assert!(ranks.iter().all(|rank| rank.scratch.kernels_compiled() == 5));
        for shape in shapes {
            for (layers, step) in layers.iter().zip([&first, &second]) {
                run(&ranks, layers, shape);
                verify(&case, &ranks, layers, step, shape);
            }
        }
    }
}

#[test]
fn a_captured_step_sees_the_ends_of_its_own_time() {
    let case = Case::new(2, 4, 128, Transport::Push);
    let shape = StepShape { rows: 6, q: 2 };
    let step = step(2, 2, &ENDS);
    for devices in machines(2) {
        let ranks = ranks(&case, &devices, spec(&case, &step, 6), false);
        let layers = layers(&case, &ranks, &step, &[shape], &[]).unwrap();
        let ends = |rank: usize, ends: &[i32]| {
            let (Rank { stream, scratch, .. }, layer) = (&ranks[rank], &layers[rank]);
            layer.global_ends.copy_from(stream, ends).unwrap();
            scratch.local_ends(stream, &layer.global_ends.as_view()).unwrap()
        };
        let graphs: Vec<Graph> = (0..2)
            .map(|rank| {
                let captured = Step { row_ends: ends(rank, &ENDS), ..layers[rank].inputs.step(shape) };
                Graph::capture_with(&ranks[rank].stream, |stream| {
                    layers[rank].indexer.run_exchange(stream, &captured).map(drop)
                })
                .unwrap()
            })
            .collect();
        for lengths in [ENDS, [1, 0, 257, 900, 2, 3], [0; 6], ENDS] {
            (0..2).for_each(|rank| drop(ends(rank, &lengths)));
            for (graph, rank) in graphs.iter().zip(&ranks) {
                graph.launch(&rank.stream).unwrap();
            }
            let now = DecodeStep { row_ends: lengths.to_vec(), ..step.clone() };
            verify(&case, &ranks, &layers, &now, shape);
        }
    }
}

#[test]
fn a_sequence_may_begin_with_the_ends_themselves() {
    let case = Case::new(2, 1, 128, Transport::Push);
    let (step, shape) = (step(2, 1, &ENDS), StepShape { rows: 6, q: 1 });
    for devices in machines(2) {
        let ranks = ranks(&case, &devices, spec(&case, &step, 6), false);
        let layers = layers(&case, &ranks, &step, &[shape], &[]).unwrap();
        let capture = |rank: usize| {
            let (Rank { stream, scratch, .. }, layer) = (&ranks[rank], &layers[rank]);
            let captured = |stream: &Stream| {
                let row_ends = scratch.local_ends(stream, &layer.global_ends.as_view())?;
                let step = Step { row_ends, ..layer.inputs.step(shape) };
                // Two layers, of one scratch.
                layer.indexer.run_exchange(stream, &step)?;
                layer.indexer.run_exchange(stream, &step).map(drop)
            };
            Graph::capture_with::<Error>(stream, captured).unwrap()
        };
        let graphs = [capture(0), capture(1)];
        for lengths in [ENDS, [7, 0, 900, 256, 2, 0]] {
            for ((graph, rank), layer) in graphs.iter().zip(&ranks).zip(&layers) {
                layer.global_ends.copy_from(&rank.stream, &lengths).unwrap();
                graph.launch(&rank.stream).unwrap();
            }
            let now = DecodeStep { row_ends: lengths.to_vec(), ..step.clone() };
            verify(&case, &ranks, &layers, &now, shape);
        }
    }
}

#[test]
fn packed_rows_are_each_rank_s_first_keys() {
    let case = Case { ranks: 3, interleave: 4, local_topk: 128, transport: None };
    let (step, shape) = (step(1, 2, &ENDS), StepShape { rows: 6, q: 2 });
    let all = logits(&step, device_dot(ptx::Target::Sm90a).unwrap());
    for devices in machines(3) {
        let ranks = ranks(&case, &devices, spec(&case, &step, 6), false);
        let layers = layers(&case, &ranks, &step, &[shape], &[]).unwrap();
        for (rank, (Rank { stream, scratch, .. }, layer)) in ranks.iter().zip(&layers).enumerate() {
            layer.indexer.packs(shape).unwrap();
            let row_ends = scratch.local_ends(stream, &layer.global_ends.as_view()).unwrap();
            let packed = layer.indexer.run_dcp(stream, &Step { row_ends, ..layer.inputs.step(shape) }).unwrap();
            let (rows, counts) =
                (packed.b_rows.copy_to_vec(stream).unwrap(), packed.counts.copy_to_vec(stream).unwrap());
            let b_row = BRow::new(128);
            for (row, logits) in all.iter().enumerate() {
                let own = case.own();
                let local: Vec<u16> =
                    (0..own.local_len(rank, logits.len())).map(|local| logits[own.global_of(rank, local)]).collect();
                let want = local_slots(&local, 128);
                assert_eq!(b_row.decode(&rows[row * b_row.words()..(row + 1) * b_row.words()]), want);
                assert_eq!(counts[row] as usize, want.len());
                let at = row * packed.pitch;
                let got = packed.logits.view(at..at + local.len()).unwrap().copy_to_vec(stream).unwrap();
                assert_eq!(got, local, "rank {rank}, row {row}: logits");
            }
        }
    }
}

#[test]
fn the_exchange_grows_with_the_layers_until_a_graph_has_captured_it() {
    let case = Case::new(2, 1, 128, Transport::Push);
    let small = step(2, 1, &[1200, 300]);
    let large = step(4, 1, &[1200, 300, 1, 0, 999, 1600]);
    let [two, six] = [2, 6].map(|rows| StepShape { rows, q: 1 });
    for devices in machines(2) {
        let ranks = ranks(&case, &devices, spec(&case, &large, 6), false);
        let first = layers(&case, &ranks, &small, &[two], &[]).unwrap();
        run(&ranks, &first, two);
        verify(&case, &ranks, &first, &small, two);
        let second = layers(&case, &ranks, &large, &[six], &[]).unwrap();
        for _ in 0..2 {
            run(&ranks, &second, six);
            verify(&case, &ranks, &second, &large, six);
            run(&ranks, &first, two);
            verify(&case, &ranks, &first, &small, two);
        }
    }
    // One rank captures; no rank grows.
    let ranks = ranks(&case, &machines(2)[0], spec(&case, &large, 6), false);
    let first = layers(&case, &ranks, &small, &[two], &[]).unwrap();
    let row_ends = ranks[1].scratch.local_ends(&ranks[1].stream, &first[1].global_ends.as_view()).unwrap();
    let captured = Step { row_ends, ..first[1].inputs.step(two) };
    let _graph =
        Graph::capture_with(&ranks[1].stream, |stream| first[1].indexer.run_exchange(stream, &captured).map(drop));
    let error = layers(&case, &ranks, &large, &[six], &[]).err().unwrap();
    assert!(matches!(error, Error::Dcp(DcpError::Captured { rank: 1, rows: 6, have: 2 })), "{error}");
    // As many rows or fewer need no growth.
    layers(&case, &ranks, &small, &[two], &[]).unwrap();
}

#[test]
fn a_rank_that_does_not_come_is_named_and_a_reset_restores_service() {
    let case = Case::new(2, 1, 128, Transport::Push);
    let (step, shape) = (step(2, 1, &ENDS), StepShape { rows: 6, q: 1 });
    for devices in machines(2) {
        let ranks = ranks(&case, &devices, spec(&case, &step, 6), false);
        let layers = layers(&case, &ranks, &step, &[shape], &[]).unwrap();
        let Rank { stream, scratch, .. } = &ranks[0];
        let row_ends = scratch.local_ends(stream, &layers[0].global_ends.as_view()).unwrap();
        let selected =
            layers[0].indexer.run_exchange(stream, &Step { row_ends, ..layers[0].inputs.step(shape) }).unwrap();
        let verdict = scratch.check(stream);
        assert!(
            matches!(verdict, Err(Error::Dcp(DcpError::PeerLate { rank: 0, peer: 1, waiting: Waiting::Words, .. }))),
            "{verdict:?}"
        );
        assert!(selected.counts.copy_to_vec(stream).unwrap().iter().all(|&count| count == 0));
        assert!(selected.rows.copy_to_vec(stream).unwrap().iter().all(|&row| row == -1));
        as_every_rank(2, |rank| ranks[rank].scratch.reset(&ranks[rank].stream).unwrap());
        run(&ranks, &layers, shape);
        verify(&case, &ranks, &layers, &step, shape);
    }
}

#[test]
fn transports_follow_from_the_group_and_the_rows() {
    let step = step(2, 1, &ENDS);
    let [three, six] = [3, 6].map(|rows| StepShape { rows, q: 1 });
    let case = Case { ranks: 2, interleave: 1, local_topk: 128, transport: None };
    let build = |devices: &[Device], transport, gather, push_rows_max| {
        let case = Case { transport, ..case.clone() };
        let spec = DcpSpec { push_rows_max, ..spec(&case, &step, 6) };
        let ranks = ranks(&case, devices, spec, gather);
        layers(&case, &ranks, &step, &[three, six], &[]).map(|layers| (ranks, layers))
    };
    let ways = |built: Result<(Vec<Rank>, Vec<Layer>), Error>| {
        let (_, layers) = built.unwrap();
        let of =
            |layer: &Layer| [three, six].map(|shape| layer.indexer.exchanges(shape).map_err(|error| error.to_string()));
        let all: Vec<_> = layers.iter().map(of).collect();
        assert_eq!(all[0], all[1], "the same on every rank");
        all[0].clone()
    };
    let group = Device::simulated_group(SimConfig { devices: 2, ..SimConfig::default() });
    let (push, gather) = (Ok(Transport::Push), Ok(Transport::Gather));
    assert_eq!(ways(build(&group, None, true, 6)), [push.clone(), push.clone()]);
    assert_eq!(ways(build(&group, None, true, 3)), [push.clone(), gather.clone()]);
    assert_eq!(ways(build(&group, Some(Transport::Gather), true, 6)), [gather.clone(), gather.clone()]);
    let [_, refused] = ways(build(&group, None, false, 3));
    assert!(refused.unwrap_err().contains("3 rows at most are pushed, and the group has no all-gather"));
    let [_, refused] = ways(build(&group, Some(Transport::Push), true, 3));
    assert!(refused.unwrap_err().contains("only pushes were asked for"));
    let [refused, _] = ways(build(&group, Some(Transport::Gather), false, 6));
    assert!(refused.unwrap_err().contains("no all-gather"));

    // Devices that do not see each other's memory.
    let strangers = [Device::simulated(SimConfig::default()), Device::simulated(SimConfig::default())];
    let [refused, _] = ways(build(&strangers, None, false, 6));
    assert!(refused.unwrap_err().contains("rank 0 cannot map the memory of rank 1"));
    let error = build(&strangers, Some(Transport::Push), true, 6).err().unwrap();
    assert!(matches!(error, Error::Dcp(DcpError::PeerUnmappable { rank: 0, peer: 1, .. })), "{error}");
    assert_eq!(ways(build(&strangers, None, true, 6)), [gather.clone(), gather]);
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let device = Device::simulated(SimConfig::default());
    let case = Case { ranks: 1, interleave: 1, local_topk: 128, transport: None };
    let input = step(2, 1, &ENDS);
    let shape = StepShape { rows: 6, q: 1 };
    let (layer, good) = (layer_of(&input), spec(&case, &input, 6));
    let ask = |spec: DcpSpec, ranks, layer: LayerSpec, n, shape| {
        FusedIndexer::supports_sharded(&device, &spec, ranks, &layer, Some(n), shape).map_err(|error| error.to_string())
    };
    assert_eq!(ask(good, 1, layer, 128, shape), Ok(()));
    let says = |result: Result<(), String>, text: &str| {
        let error = result.unwrap_err();
        assert!(error.contains(text), "no {text:?} in {error}");
    };
    let shape_error = |error: ShapeError| error.to_string();
    says(ask(good, 17, layer, 128, shape), &shape_error(ShapeError::RanksOutOfRange { ranks: 17 }));
    says(ask(DcpSpec { interleave: 3, ..good }, 2, layer, 128, shape), "3");
    says(ask(good, 2, layer, 256, shape), &shape_error(ShapeError::LocalTopkUnsupported { n: 256, topk: 256 }));
    says(ask(DcpSpec { rows_max: 5, ..good }, 2, layer, 128, shape), "6 rows: the scratch holds 5");
    says(ask(good, 2, LayerSpec { topk: 128, ..layer }, 128, shape), "the ranks share a scratch of top-256");
    says(ask(good, 2, LayerSpec { kv_page: 48, ..layer }, 128, shape), "48");
    let long = DcpSpec { context_len_max: 1 << 20, ..good };
    says(ask(long, 2, LayerSpec { context_len_max: 1 << 20, ..layer }, 128, shape), "524288");
    let bytes = DcpScratch::bytes(&good, 2).unwrap();
    // 6 rows of 1024 logits and 128 tops; 256 rows and ids, 264 words, an end and two counts.
    assert_eq!(bytes, 6 * 2 * (1024 + 128) + 6 * 4 * (2 * 256 + 264 + 3));

    // Shapes that were not planned, and buffers of another device.
    let ranks = ranks(&case, std::slice::from_ref(&device), good, false);
    let layers = layers(&case, &ranks, &input, &[shape], &[]).unwrap();
    let other = StepShape { rows: 4, q: 1 };
    let indexer = &layers[0].indexer;
    assert!(matches!(indexer.packs(other), Err(Error::NotPlanned { shape }) if shape == other));
    assert!(matches!(indexer.exchanges(other), Err(Error::NotPlanned { .. })));
    assert!(matches!(indexer.run_dcp(&ranks[0].stream, &layers[0].inputs.step(other)), Err(Error::NotPlanned { .. })));
    let stranger = Device::simulated(SimConfig::default());
    let foreign = stranger.upload(&[1i32]).unwrap();
    assert!(matches!(
        ranks[0].scratch.local_ends(&ranks[0].stream, &foreign.as_view()),
        Err(Error::WrongDevice { what: "row_ends", .. })
    ));
    let many = device.upload(&[1i32; 7]).unwrap();
    assert!(matches!(
        ranks[0].scratch.local_ends(&ranks[0].stream, &many.as_view()),
        Err(Error::TooShort { found: 6, needed: 7, .. })
    ));
    let no_ids = DcpScratch::reserve(
        &device,
        DcpGroup::new(Arc::new(in_process(1).remove(0)) as Arc<dyn Rendezvous>),
        DcpSpec { ids: false, ..good },
    );
    let config = DcpIndexerConfig {
        scratch: &no_ids.unwrap(),
        layer,
        keys: layers[0].inputs.cache.as_view(),
        local_topk: Some(128),
        shapes: &[shape],
        hold: &[],
        ids: true,
    };
    assert!(matches!(FusedIndexer::sharded(config.clone()), Err(Error::Unsupported(Unsupported::ScratchIds))));
    // Without a local top-N the recommended one.
    let chosen = FusedIndexer::sharded(DcpIndexerConfig { local_topk: None, ids: false, ..config }).unwrap();
    assert_eq!(Ok(chosen.local_topk()), dsa_dcp::recommended_local_topk(1, layer.topk));
    assert_eq!(chosen.rounds(), dsa_dcp::Rounds::One);
}

#[test]
fn a_step_of_no_rows_launches_nothing() {
    let case = Case::new(2, 1, 128, Transport::Push);
    let input = step(2, 1, &ENDS);
    let none = StepShape { rows: 0, q: 1 };
    let ranks = ranks(&case, &machines(2)[0], spec(&case, &input, 6), false);
    let layers = layers(&case, &ranks, &input, &[none], &[]).unwrap();
    let stream = &ranks[0].stream;
    let ends = ranks[0].device.alloc::<i32>(0).unwrap();
    let row_ends = ranks[0].scratch.local_ends(stream, &ends.as_view()).unwrap();
    let selected = layers[0].indexer.run_exchange(stream, &Step { row_ends, ..layers[0].inputs.step(none) }).unwrap();
    assert!(selected.rows.is_empty() && selected.counts.is_empty());
    ranks[0].scratch.check(stream).unwrap();
}

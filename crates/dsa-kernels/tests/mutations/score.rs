//! The score kernel.

use dsa_core::DecodeStep;
use dsa_core::generate::{Contents, StepSpec};
use dsa_core::layout::tp_scratch::TpScratch;
use dsa_kernels::KernelError;
use dsa_kernels::score::{self, IndexerScore, ScoreArgs, ScoreOutput, ScoreShape};
use gpu::{Device, SimConfig, SimTrapKind as Kind};
use ptx::op::{Bin, Op, Operand};
use ptx::{Kernel, Target};

use crate::common::*;

const SCORE: Source = Source { path: "score/kernel.rs", text: include_str!("../../src/score/kernel.rs") };
const CONSUME: Source = Source { path: "score/consume.rs", text: include_str!("../../src/score/consume.rs") };
const SCHEDULE: Source = Source { path: "score/schedule.rs", text: include_str!("../../src/score/schedule.rs") };

fn device_error(error: KernelError) -> gpu::Error {
    match error {
        KernelError::Device(error) => error,
        other => panic!("{other}"),
    }
}

/// 40 requests of q = 2 on tables that end where they are needed, most of them without keys: enough pages for the ring
/// of stages to wrap, requests so short that some groups have no page, a last tile whose second page does not exist.
fn score_step() -> DecodeStep {
    let mut ends = vec![700, 1, 500, 500, 300, 250];
    (0..3).for_each(|_| ends.extend([129, 5]));
    (0..33).for_each(|_| ends.extend([0, 0]));
    ends.extend([1460, 1459]);
    let spec = StepSpec { contents: Contents::Gaussian, ..StepSpec::new(6, 2, 128, &ends) };
    StepSpec { context_len_max: 1460, table_gap: 0, ..spec }.build().unwrap()
}

/// One long row: a few pages, one item.
fn small_score_step() -> DecodeStep {
    StepSpec::new(7, 1, 128, &[300]).build().unwrap()
}

/// Rows enough for two parts: each page has two groups, which store its rows while they multiply their next page.
fn wide_score_step() -> DecodeStep {
    let ends: Vec<i32> =
        [900, 0, 129, 300, 140, 700].into_iter().flat_map(|end| (0..5).map(move |i| end - i)).collect();
    let spec = StepSpec { contents: Contents::Gaussian, ..StepSpec::new(9, 5, 128, &ends) };
    StepSpec { context_len_max: 900, table_gap: 0, ..spec }.build().unwrap()
}

fn score_shape(step: &DecodeStep) -> ScoreShape {
    ScoreShape::new(step.q, compact(step), step.scale_form).unwrap()
}

fn try_score(inputs: &Inputs, step: &DecodeStep, score: &IndexerScore) -> Result<Scratch, gpu::Error> {
    let (device, stream) = (&inputs.device, &inputs.stream);
    let len = TpScratch::capacity(step.rows, step.len_max());
    let logits = device.alloc::<u16>(len + GUARD)?;
    let tops = device.alloc::<u16>(len / 8 + GUARD)?;
    logits.fill_bytes(stream, POISON)?;
    tops.fill_bytes(stream, POISON)?;
    let output = ScoreOutput::Compact { logits: logits.as_view(), tops: tops.as_view() };
    score.launch(stream, &inputs.score_step(step), &output).map_err(device_error)?;
    Ok(Scratch { logits: logits.copy_to_vec(stream)?, tops: tops.copy_to_vec(stream)? })
}

fn run_mutant(config: SimConfig, step: &DecodeStep, kernel: &Kernel<ScoreArgs>, want: &Scratch) -> End {
    let device = Device::simulated(config);
    let score = IndexerScore::from_kernel(&device, score_shape(step), kernel).unwrap();
    let inputs = Inputs::new(&device, step);
    End::of(try_score(&inputs, step, &score).map(|got| got == *want))
}

/// Breaks the score kernel of `step` and expects the simulator to say so.
#[track_caller]
fn check_score_mutant(step: &DecodeStep, expected: Expected<'_>, mutate: impl FnOnce(&mut Mutant)) {
    let whole = score::build(&score_shape(step), Target::Sm90a).unwrap();
    let want = {
        let device = Device::simulated(SimConfig::default());
        run_score(&Inputs::new(&device, step), step, &score_kernel(&device, step, compact(step)))
    };
    let mut mutant = Mutant::of(&whole);
    mutate(&mut mutant);
    let kernel = mutant.kernel();
    check_mutant(expected, |config| run_mutant(config, step, &kernel, &want));
}

fn in_score<'a>(kinds: &'a [Kind], orders: Orders) -> Expected<'a> {
    Expected { kinds, files: &["score/kernel.rs", "score/consume.rs", "score/head_sum.rs"], orders }
}

/// Breaks what the consumers do, with the rows in one part and in two.
#[track_caller]
fn check_consumer_mutant(expected: Expected<'_>, mutate: impl Fn(&mut Mutant)) {
    for step in [score_step(), wide_score_step()] {
        check_score_mutant(&step, expected, &mutate);
    }
}

/// Drops the instructions of a line of the consumers, in every order.
#[track_caller]
fn consumers_need(kinds: &[Kind], place: (&str, &str), which: impl Fn(&Op) -> bool) {
    check_consumer_mutant(in_score(kinds, Orders::Every), |m| m.drop(CONSUME, place, &which));
}

#[test]
fn score_as_it_is_passes_in_every_mutation_order() {
    for step in [score_step(), wide_score_step()] {
        let kernel = score::build(&score_shape(&step), Target::Sm90a).unwrap();
        let want = {
            let device = Device::simulated(SimConfig::default());
            run_score(&Inputs::new(&device, &step), &step, &score_kernel(&device, &step, compact(&step)))
        };
        for config in orders(4) {
            let end = run_mutant(SimConfig { sms: 1, ..config }, &step, &kernel, &want);
            assert!(matches!(end, End::Finished { right: true }), "{end:?}");
        }
    }
}

#[test]
fn score_needs_its_wgmma_wait() {
    let is_wait = |op: &Op| matches!(op, Op::WgmmaWait { .. });
    consumers_need(&[Kind::ResultPending], ("fn consume_part", "wgmma_wait(0);"), is_wait);
}

#[test]
fn score_needs_its_wgmma_commit() {
    consumers_need(&[Kind::ResultPending], ("fn multiply", "wgmma_commit();"), |op| *op == Op::WgmmaCommit);
}

#[test]
fn score_needs_its_wgmma_fence() {
    consumers_need(&[Kind::WgmmaFence], ("fn multiply", "wgmma_fence();"), |op| *op == Op::WgmmaFence);
}

#[test]
fn score_needs_the_wait_for_a_full_page() {
    let kinds = [Kind::ResultPending, Kind::DataRace];
    check_consumer_mutant(in_score(&kinds, Orders::Every), |m| {
        m.never_wait(CONSUME, ("fn consume_part", "smem.page_full.at(stage).wait("));
    });
}

#[test]
fn score_needs_the_wait_for_an_empty_stage() {
    let kinds = [Kind::Mbarrier, Kind::DataRace, Kind::OperandInUse];
    check_consumer_mutant(in_score(&kinds, Orders::Every), |m| {
        m.never_wait(SCORE, ("fn produce", "smem.page_empty.at(stage).wait("));
    });
}

#[test]
fn score_needs_the_wait_for_full_queries() {
    check_score_mutant(&score_step(), in_score(&[Kind::Uninitialized, Kind::DataRace], Orders::Every), |m| {
        m.never_wait(CONSUME, ("fn consume_part", "smem.query_full.at(slot).wait("));
    });
}

#[test]
fn score_needs_the_wait_for_an_empty_query_slot() {
    let kinds = [Kind::ResultPending, Kind::DataRace, Kind::OperandInUse, Kind::Mbarrier];
    check_score_mutant(&score_step(), in_score(&kinds, Orders::Every), |m| {
        m.never_wait(SCORE, ("fn produce", "smem.query_empty.at(slot).wait("));
    });
}

#[test]
fn score_without_an_arrival_deadlocks() {
    let arrivals = [
        (CONSUME, ("fn consume_part", "smem.page_empty.at(stage).arrive()")),
        (SCORE, ("fn produce", "full.arrive();")),
        (CONSUME, ("fn consume_part", "smem.query_empty.at(slot).arrive();")),
    ];
    for (source, place) in arrivals {
        check_score_mutant(&score_step(), in_score(&[Kind::Deadlock], Orders::Few), |m| {
            m.drop(source, place, |op| matches!(op, Op::MbarArrive { .. }));
        });
    }
}

#[test]
fn score_needs_its_warp_barrier_before_it_gives_a_page_back() {
    let place = ("fn consume_part", "sync_warp(); // ORDER: every lane's reads of the page");
    consumers_need(&[Kind::DataRace, Kind::OperandInUse], place, |op| matches!(op, Op::BarWarp { .. }));
}

/// One lane's arrival does not stand for the others' accesses.
#[test]
fn score_needs_every_threads_arrival_at_the_query_barriers() {
    let first_lane = |count: &u32| if *count == 32 { 1 } else { *count / 32 };
    for (init, source, arrival) in [
        ("smem.query_full.at(t.lane).init(32);", SCORE, ("fn produce", "full.arrive();")),
        (
            "smem.query_empty.at(t.lane).init(32 * producer_warp);",
            CONSUME,
            ("fn consume_part", "smem.query_empty.at(slot).arrive();"),
        ),
    ] {
        check_score_mutant(&score_step(), in_score(&[Kind::DataRace], Orders::Some), |m| {
            m.edit(SCORE, ("fn emit", init), |op| match op {
                Op::MbarInit { addr, count } => Some(Op::MbarInit { addr: *addr, count: first_lane(count) }),
                _ => None,
            });
            m.first_lane_only(source, arrival);
        });
    }
}

#[test]
fn score_needs_the_group_barrier_before_its_stores() {
    let place = ("fn consume_part", "sync_named(group + GROUP_BARRIER, 128);");
    consumers_need(&[Kind::DataRace, Kind::Uninitialized], place, |op| matches!(op, Op::BarSync { .. }));
}

#[test]
fn score_groups_cannot_share_a_barrier() {
    let kinds = [Kind::DataRace, Kind::Uninitialized];
    check_consumer_mutant(in_score(&kinds, Orders::Some), |m| {
        m.edit(CONSUME, ("fn consume_part", "sync_named(group + GROUP_BARRIER, 128);"), |op| match op {
            Op::BarSync { threads, .. } => Some(Op::BarSync { id: Operand::Imm(1), threads: *threads }),
            _ => None,
        });
    });
}

#[test]
fn score_lanes_cannot_name_different_barriers() {
    check_score_mutant(&score_step(), in_score(&[Kind::Mismatch], Orders::Every), |m| {
        let lane = Operand::Reg(m.lane());
        m.edit(CONSUME, ("fn consume_part", "sync_named(group + GROUP_BARRIER, 128);"), |op| match op {
            Op::BarSync { threads, .. } => Some(Op::BarSync { id: lane, threads: *threads }),
            _ => None,
        });
    });
}

#[test]
fn score_needs_two_staging_slots() {
    check_consumer_mutant(in_score(&[Kind::DataRace], Orders::Every), |m| {
        let place = ("fn advance(self)", "self.offset.set(Reg::<u32>::from(self.slot_bytes) - self.offset.get());");
        m.edit(CONSUME, place, |op| match op {
            Op::Bin { op: Bin::Sub, dst, b, .. } => Some(Op::Mov { dst: *dst, src: *b }),
            _ => None,
        });
    });
}

#[test]
fn score_expects_exactly_the_bytes_of_a_page() {
    for bytes in [8448 - 16, 8448 + 16] {
        check_score_mutant(&small_score_step(), in_score(&[Kind::ExpectTx], Orders::Few), |m| {
            m.edit(SCORE, ("fn produce", "full.arrive_expect("), |op| match op {
                Op::MbarArriveExpectTx { addr, .. } => {
                    Some(Op::MbarArriveExpectTx { addr: *addr, bytes: Operand::Imm(bytes) })
                }
                _ => None,
            });
        });
    }
    check_score_mutant(&small_score_step(), in_score(&[Kind::ExpectTx], Orders::Few), |m| {
        m.drop(SCORE, ("fn produce", "full.expect("), |op| matches!(op, Op::MbarExpectTx { .. }));
    });
}

#[test]
fn score_counts_the_warps_that_empty_a_stage() {
    let place = ("fn emit", "smem.page_empty.at(t.lane).init(4 * parts);");
    for (step, warps) in [(score_step(), 4), (wide_score_step(), 8)] {
        check_score_mutant(&step, in_score(&[Kind::Mbarrier], Orders::Every), |m| {
            m.drop(SCORE, place, |op| matches!(op, Op::MbarInit { .. }));
        });
        for (count, kinds) in [(warps - 1, [Kind::DataRace, Kind::Mbarrier]), (warps + 1, [Kind::Deadlock; 2])] {
            check_score_mutant(&step, in_score(&kinds, Orders::Few), |m| {
                m.edit(SCORE, place, |op| match op {
                    Op::MbarInit { addr, .. } => Some(Op::MbarInit { addr: *addr, count }),
                    _ => None,
                });
            });
        }
    }
}

/// One part's arrivals do not stand for the other's: a page then ends two phases, and the parities lose their meaning.
#[test]
fn score_waits_for_both_parts_of_the_rows_before_it_fills_a_stage() {
    let kinds = [Kind::Deadlock, Kind::DataRace, Kind::OperandInUse, Kind::Mbarrier];
    check_score_mutant(&wide_score_step(), in_score(&kinds, Orders::Few), |m| {
        m.edit(SCORE, ("fn emit", "smem.page_empty.at(t.lane).init(4 * parts);"), |op| match op {
            Op::MbarInit { addr, .. } => Some(Op::MbarInit { addr: *addr, count: 4 }),
            _ => None,
        });
    });
}

#[test]
fn score_needs_both_barriers_of_its_schedule() {
    for reason in ["every request's tiles", "the prefix sums"] {
        let kinds = [Kind::DataRace, Kind::Uninitialized];
        let expected = Expected { kinds: &kinds, files: &["score/schedule.rs"], orders: Orders::Every };
        check_score_mutant(&score_step(), expected, |m| {
            let place = ("fn compute", &*format!("sync_threads(); // ORDER: {reason}"));
            m.drop(SCHEDULE, place, |op| matches!(op, Op::BarSync { .. }));
        });
    }
}

#[test]
fn score_must_not_read_past_its_table() {
    check_score_mutant(&score_step(), in_score(&[Kind::OutOfBounds], Orders::Every), |m| {
        m.edit(SCORE, ("fn produce", "(item.page + t.lane).min(last)"), |op| match op {
            Op::Bin { op: Bin::Min, dst, a, .. } => Some(Op::Mov { dst: *dst, src: *a }),
            _ => None,
        });
    });
    // One page further than the longest row reaches.
    check_score_mutant(&score_step(), in_score(&[Kind::OutOfBounds], Orders::Every), |m| {
        m.edit(SCORE, ("fn produce", "let last = ((p.length_max + "), |op| match op {
            Op::Bin { op: Bin::Add, ty, dst, a, b: Operand::Imm(63) } => {
                Some(Op::Bin { op: Bin::Add, ty: *ty, dst: *dst, a: *a, b: Operand::Imm(127) })
            }
            _ => None,
        });
    });
}

/// Seven stages for four groups: a group could come to a stage whose copy before is still under way, and its parity
/// cannot tell that from its own copy having landed.
#[test]
fn score_stages_must_be_a_multiple_of_its_teams() {
    let step = StepSpec::new(8, 1, 128, &[3000]).build().unwrap();
    let mut mutant = Mutant::of(&score::build(&score_shape(&step), Target::Sm90a).unwrap());
    let seven = |operand: &Operand| if *operand == Operand::Imm(8) { Operand::Imm(7) } else { *operand };
    let fewer = |op: &Op| match op {
        Op::Setp { cmp, ty, dst, a, b } => Some(Op::Setp { cmp: *cmp, ty: *ty, dst: *dst, a: *a, b: seven(b) }),
        Op::Bin { op: op @ (Bin::Sub | Bin::Min), ty, dst, a, b } => {
            Some(Op::Bin { op: *op, ty: *ty, dst: *dst, a: *a, b: seven(b) })
        }
        _ => None,
    };
    mutant.edit(SCORE, ("fn advance(self, by", "next.ge(self.slots)"), fewer);
    mutant.edit(SCORE, ("fn advance(self, by", "next - self.slots"), fewer);
    mutant.edit(SCORE, ("fn produce", "let early = pages.min("), fewer);
    let kernel = mutant.kernel();
    let device = Device::simulated(SimConfig::default());
    let want = run_score(&Inputs::new(&device, &step), &step, &score_kernel(&device, &step, compact(&step)));
    check_mutant(in_score(&[Kind::ResultPending, Kind::DataRace], Orders::Some), |config| {
        run_mutant(config, &step, &kernel, &want)
    });
}

#[test]
fn score_must_consume_every_copy_before_it_ends() {
    check_score_mutant(&small_score_step(), in_score(&[Kind::ExitInFlight], Orders::Some), |m| {
        m.decide(CONSUME, ("fn consume_part", "next.get().lt(pages)"), false);
    });
}

#[test]
fn score_collectives_name_their_lanes() {
    check_score_mutant(&score_step(), in_score(&[Kind::Collective], Orders::Every), |m| {
        m.edit(SCORE, ("fn produce", "redux(Redux::MaxU32, length)"), |op| match op {
            Op::Redux { op, dst, src, .. } => Some(Op::Redux { op: *op, dst: *dst, src: *src, mask: 0xFFFF }),
            _ => None,
        });
    });
}

#[test]
fn score_copies_to_aligned_stages() {
    check_score_mutant(&score_step(), in_score(&[Kind::Operand, Kind::Misaligned], Orders::Every), |m| {
        for inst in &mut m.0.insts {
            if let Op::TensorG2s { dst, .. } = &mut inst.op {
                dst.offset += 64;
            }
        }
    });
}

#[test]
fn score_of_a_freed_cache_is_refused() {
    let step = small_score_step();
    let device = Device::simulated(sim_config());
    let mut inputs = Inputs::new(&device, &step);
    let score = score_kernel(&device, &step, compact(&step));
    inputs.cache_bytes = device.alloc(0).unwrap();
    let End::Trap(trap) = End::of(try_score(&inputs, &step, &score).map(|_| true)) else { panic!("not noticed") };
    assert_eq!(trap.kind, Kind::Freed, "{trap}");
    assert!(trap.at.contains("score/kernel.rs"), "{trap}");
}

/// What the simulator does not model: a right answer today, to be turned round when it does.
#[test]
fn score_without_the_fence_after_its_mbarriers_is_not_noticed() {
    let step = small_score_step();
    let mut mutant = Mutant::of(&score::build(&score_shape(&step), Target::Sm90a).unwrap());
    mutant.drop(SCORE, ("fn emit", "fence_mbarrier_init();"), |op| *op == Op::FenceMbarrierInit);
    let kernel = mutant.kernel();
    let device = Device::simulated(SimConfig::default());
    let want = run_score(&Inputs::new(&device, &step), &step, &score_kernel(&device, &step, compact(&step)));
    for config in orders(4) {
        assert!(matches!(run_mutant(config, &step, &kernel, &want), End::Finished { right: true }));
    }
}

/// Score after a producer that writes its inputs late, without the dependency wait after `anchor`.
fn run_score_without_wait(config: SimConfig, source: Source, anchor: &str) -> End {
    let step = small_score_step();
    let mut mutant = Mutant::of(&score::build(&score_shape(&step), Target::Sm90a).unwrap());
    mutant.drop_dependency_wait(source, anchor);
    // Room for both launches at once.
    let device = Device::simulated(SimConfig { sms: 4, ..config });
    let score = IndexerScore::from_kernel(&device, score_shape(&step), &mutant.kernel()).unwrap();
    let producer = Producer::new(&device);
    let (inputs, sources) = (Inputs::new(&device, &step), Inputs::new(&device, &step));
    let len = TpScratch::capacity(step.rows, step.len_max());
    let logits = device.alloc::<u16>(len).unwrap();
    let (tops, copy) = (device.alloc::<u16>(len / 8).unwrap(), device.alloc::<u16>(len).unwrap());
    logits.fill_bytes(&inputs.stream, POISON).unwrap();
    // It also reads the scratch, as a select before would.
    let words = [
        Words::new(&inputs.queries.as_view(), &sources.queries.as_view()),
        Words::new(&inputs.cache_bytes.as_view(), &sources.cache_bytes.as_view()),
        Words::new(&copy.as_view(), &logits.as_view()),
    ];
    producer.launch(&inputs.stream, words).unwrap();
    let output = ScoreOutput::Compact { logits: logits.as_view(), tops: tops.as_view() };
    score.launch(&inputs.stream, &inputs.score_step(&step), &output).unwrap();
    End::of(inputs.stream.synchronize().map(|()| true))
}

#[test]
fn score_needs_its_producers_dependency_wait() {
    let kinds = [Kind::DataRace, Kind::Uninitialized];
    check_mutant(in_score(&kinds, Orders::Every), |config| run_score_without_wait(config, SCORE, "fn produce"));
}

#[test]
fn score_consumers_come_after_the_producers_wait_in_any_case() {
    // Their own wait orders nothing that the full barriers do not: it is there for the permission that follows it.
    for config in orders(4) {
        let end = run_score_without_wait(config, CONSUME, "fn consume");
        assert!(matches!(end, End::Finished { .. }), "{end:?}");
    }
}

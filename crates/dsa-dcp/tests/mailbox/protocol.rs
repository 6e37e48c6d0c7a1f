//! Call after call on the same boxes: which box, refills, graphs, and ranks that do not come.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dsa_dcp::rendezvous::{RendezvousError, in_process};
use dsa_dcp::{
    DcpError, Gather, GatherShape, GatherStep, Limits, MailboxShape, QueryElement, QueryMailbox, Rendezvous, Waiting,
};
use dsa_kernels::KernelError;
use gpu::{Device, SimConfig};

use crate::common::{as_every_rank, full_or};
use crate::group::{Group, Spec, Step, everywhere};

/// Longer than a call takes on the simulator or a GPU, much shorter than the limit of a poll.
const SLEEP_MS: u32 = 20;

#[test]
fn every_rank_reads_every_rank_s_rows_call_after_call() {
    for ranks in [1, 2, 4, 8] {
        for multicast in [false, true] {
            let spec = Spec { multicast: multicast && ranks > 1, copy: ranks == 2, ..Spec::new(ranks) };
            everywhere(&spec, if ranks == 8 { 1 } else { full_or(4, 1) }, |group| {
                // Fewer and more tokens than the call before, and than the call before in the same box.
                for (call, tokens) in (0..).zip([3, 1, 2, 3, 1, 3, 2, 1]) {
                    group.run(&Step::new(group, call, tokens));
                }
                assert_eq!(group.calls(), vec![8; ranks]);
                group.all().into_iter().for_each(|rank| assert!(group.padding_is_untouched(rank)));
            });
        }
    }
}

#[test]
fn both_elements_and_both_paddings() {
    for (ranks, heads, q_heads, element) in
        [(2, 3, 64, QueryElement::Bf16), (3, 33, 128, QueryElement::E4m3), (2, 32, 64, QueryElement::E4m3)]
    {
        let shape = MailboxShape::new(ranks, heads, q_heads, 2, element).unwrap();
        everywhere(&Spec { shape, copy: true, hold: true, ..Spec::new(ranks) }, 1, |group| {
            (0..3).for_each(|call| group.run(&Step::new(group, call, 2)));
            assert!(group.padding_is_untouched(0));
        });
    }
}

#[test]
fn more_tokens_than_a_tile() {
    let shape = MailboxShape::new(2, 1, 64, 131, QueryElement::E4m3).unwrap();
    everywhere(&Spec { shape, ..Spec::new(2) }, 1, |group| {
        for (call, tokens) in (0..).zip([131, 64, 65, 128]) {
            group.run(&Step::new(group, call, tokens));
        }
    });
}

#[test]
fn calls_back_to_back_with_one_rank_behind() {
    for (ranks, multicast, overlap) in [(2, false, true), (2, false, false), (3, false, true), (3, true, true)] {
        let spec = Spec { multicast, overlap, ..Spec::new(ranks) };
        everywhere(&spec, full_or(20, 4), |group| {
            // More steps than boxes: no box gets the rows that it had.
            let steps = [1, 2, 3, 4].map(|seed| Step::new(group, seed, 2));
            // Nothing between the calls: a rank may be one ahead of another, and in half of them one is.
            for call in 0..9 {
                let late = (call % 2 == 1).then_some((call % ranks, SLEEP_MS));
                group.launch_on(&steps[call % steps.len()], &group.all(), late).unwrap();
            }
            group.check().into_iter().for_each(|verdict| verdict.unwrap());
            steps.iter().for_each(|step| step.verify(group));
            assert_eq!(group.calls(), vec![9; ranks]);
        });
    }
}

#[test]
fn call_numbers_wrap() {
    everywhere(&Spec::new(2), full_or(4, 2), |group| {
        group.set_calls(u32::MAX - 2);
        for call in 0..6 {
            group.run(&Step::new(group, call, 2));
        }
        assert_eq!(group.calls(), [3; 2]);
    });
}

#[test]
fn graphs_replay_with_new_rows_and_mix_with_eager_calls() {
    let spec = Spec { copy: true, ..Spec::new(2) };
    everywhere(&spec, full_or(4, 2), |group| {
        let mut steps = [(1, 2), (2, 3), (3, 1), (4, 2)].map(|(seed, tokens)| Step::new(group, seed, tokens));
        for _ in 0..3 {
            group.run(&steps[0]);
        }
        // No multiple of three calls per graph: neighbouring replays use other boxes for the same step.
        let calls: Vec<&Step> = steps.iter().collect();
        let graphs: Vec<_> = group.all().into_iter().map(|rank| group.capture(&calls, rank)).collect();
        let replay = || {
            for (graph, rank) in graphs.iter().zip(&group.ranks) {
                graph.launch(&rank.stream).unwrap();
            }
        };
        for round in 0..4 {
            for (i, step) in steps.iter_mut().enumerate() {
                step.replace(group, 10 * round + i as u64);
                step.poison(group);
            }
            replay();
            group.check().into_iter().for_each(|verdict| verdict.unwrap());
            steps.iter().for_each(|step| step.verify(group));
        }
        replay();
        group.launch(&steps[1]);
        replay();
        group.check().into_iter().for_each(|verdict| verdict.unwrap());
        steps.iter().for_each(|step| step.verify(group));
        assert_eq!(group.calls(), [3 + 4 * 6 + 1; 2]);
    });
}

#[test]
fn a_rank_that_never_comes_is_an_error_in_time_and_reset_restores_service() {
    for multicast in [false, true] {
        let spec = Spec { multicast, copy: true, ..Spec::new(3) };
        everywhere(&spec, full_or(4, 2), |group| {
            group.run(&Step::new(group, 1, 3));
            let step = Step::new(group, 2, 2);
            let start = Instant::now();
            group.launch_on(&step, &[0, 2], None).unwrap();
            for rank in [0, 2] {
                let verdict = group.ranks[rank].mailbox.check(&group.ranks[rank].stream);
                let Err(DcpError::PeerLate { rank: own, peer: 1, row: 0..2, epoch: 2, waiting: Waiting::Query }) =
                    verdict
                else {
                    panic!("{verdict:?}")
                };
                assert_eq!(own, rank);
                // The rows of the rank that did not come are NaN, those of the others are there.
                let heads = spec.shape.heads();
                let missing: Vec<bool> = (0..2).flat_map(|_| (0..3).flat_map(|r| vec![r == 1; heads])).collect();
                assert_eq!(step.missing(group, rank), missing);
            }
            assert!(start.elapsed() < Duration::from_secs(20));
            // A failed mailbox does nothing more, whoever comes now; rank 1 finds what the others published for the call that
            // it missed, and no more.
            group.launch(&step);
            let verdicts = group.check();
            assert!(verdicts[1].is_ok() && step.difference(group, 1).is_ok(), "{verdicts:?}");
            for rank in [0, 2] {
                assert!(matches!(verdicts[rank], Err(DcpError::PeerLate { peer: 1, epoch: 2, .. })), "{verdicts:?}");
                assert!(step.missing(group, rank).into_iter().all(|missing| missing), "nothing of an older call");
            }
            group.launch(&step);
            let verdict = group.ranks[1].mailbox.check(&group.ranks[1].stream);
            assert!(matches!(verdict, Err(DcpError::PeerLate { rank: 1, peer: 0 | 2, epoch: 3, .. })), "{verdict:?}");
            let text = verdict.unwrap_err().to_string();
            assert!(text.contains("query rows") && text.contains("reset the mailbox"), "{text}");

            group.reset();
            for call in 5..9 {
                group.run(&Step::new(group, call, 2));
            }
            assert_eq!(group.calls(), [4; 3]);
        });
    }
}

#[test]
fn a_late_rank_is_waited_for_until_the_limit() {
    everywhere(&Spec::new(2), full_or(4, 2), |group| {
        let step = Step::new(group, 1, 2);
        group.launch_on(&step, &[0, 1], Some((1, SLEEP_MS))).unwrap();
        group.check().into_iter().for_each(|verdict| verdict.unwrap());
        step.verify(group);
        // Later than the limit of 200 ms.
        group.launch_on(&step, &[0, 1], Some((1, 400))).unwrap();
        let verdicts = group.check();
        assert!(matches!(verdicts[0], Err(DcpError::PeerLate { rank: 0, peer: 1, epoch: 2, .. })), "{verdicts:?}");
        assert!(verdicts[1].is_ok(), "rank 0 had published: {verdicts:?}");
        group.reset();
        group.run(&Step::new(group, 2, 3));
    });
}

#[test]
fn a_call_without_tokens_launches_nothing() {
    let group = Group::simulated(&Spec::new(2), SimConfig::default());
    let rank = &group.ranks[0];
    let gather = Gather::new(rank.mailbox.device(), GatherShape::new(group.spec.shape)).unwrap();
    // It would fail: nobody publishes.
    gather.launch(&rank.stream, &rank.mailbox, &GatherStep { tokens: 0, out: None }).unwrap();
    rank.mailbox.check(&rank.stream).unwrap();
}

#[test]
fn launches_that_do_not_fit_are_refused() {
    let group = Group::simulated(&Spec::new(2), SimConfig::default());
    let (rank, shape) = (&group.ranks[0], group.spec.shape);
    let device = rank.mailbox.device();
    let plain = Gather::new(device, GatherShape::new(shape)).unwrap();
    let copying = Gather::new(device, GatherShape::new(shape).with_copy(true)).unwrap();
    let out = device.alloc::<u32>(3 * shape.token_bytes() / 4).unwrap();
    let refused = |gather: &Gather, tokens, out| {
        gather.launch(&rank.stream, &rank.mailbox, &GatherStep { tokens, out }).unwrap_err()
    };
    let short = |error: DcpError| match error {
        DcpError::Kernel(KernelError::BufferTooShort { buffer, .. }) => buffer,
        other => panic!("{other:?}"),
    };
    assert_eq!(short(refused(&plain, 4, None)), "mailbox tokens");
    assert_eq!(short(refused(&copying, 1, None)), "out");
    assert_eq!(short(refused(&copying, 3, Some(out.view(1..).unwrap()))), "out");
    assert!(matches!(refused(&copying, 1, Some(out.view(1..).unwrap())), DcpError::Misaligned { buffer: "out", .. }));
    assert!(matches!(refused(&plain, 1, Some(out.as_view())), DcpError::UnusedOutput { buffer: "out" }));
    let other = MailboxShape::new(2, 3, 64, 3, QueryElement::E4m3).unwrap();
    let wrong = Gather::new(device, GatherShape::new(other)).unwrap();
    assert!(matches!(refused(&wrong, 1, None), DcpError::WrongMailbox { .. }));
    // Memory of another device.
    let theirs = group.ranks[1].mailbox.device().alloc::<u32>(out.len()).unwrap();
    let wrong = |error: DcpError| matches!(error, DcpError::Device(gpu::Error::WrongDevice { .. }));
    assert!(wrong(refused(&copying, 1, Some(theirs.as_view()))));
    let step = GatherStep { tokens: 1, out: None };
    assert!(wrong(plain.launch(&rank.stream, &group.ranks[1].mailbox, &step).unwrap_err()));
    // Nothing was launched.
    assert!(rank.mailbox.check(&rank.stream).is_ok() && group.calls() == [0; 2]);
}

#[test]
fn ranks_that_disagree_or_stay_away_cannot_set_up() {
    let shapes = [4, 5].map(|heads| MailboxShape::new(2, heads, 64, 4, QueryElement::Bf16).unwrap());
    let devices = Device::simulated_group(SimConfig { devices: 2, ..SimConfig::default() });
    let members = || -> Vec<Arc<dyn Rendezvous>> {
        in_process(2).into_iter().map(|member| Arc::new(member) as Arc<dyn Rendezvous>).collect()
    };
    let group = members();
    let errors =
        as_every_rank(2, |rank| QueryMailbox::new(&devices[rank], group[rank].clone(), shapes[rank]).unwrap_err());
    for (rank, error) in errors.into_iter().enumerate() {
        let DcpError::PeerMismatch { rank: own, peer, theirs, .. } = error else { panic!("{error:?}") };
        assert_eq!((own, peer, theirs), (rank, 1 - rank, shapes[1 - rank].to_string()));
    }
    let limits = Limits { collective: Duration::from_millis(50), ..Limits::default() };
    let error = QueryMailbox::with_limits(&devices[0], members()[0].clone(), shapes[0], limits).unwrap_err();
    assert!(matches!(error, DcpError::Rendezvous(RendezvousError::Timeout { rank: 0, missing: 1, .. })), "{error:?}");
    let three = MailboxShape::new(3, 4, 64, 4, QueryElement::Bf16).unwrap();
    let error = QueryMailbox::new(&devices[0], members()[0].clone(), three).unwrap_err();
    assert!(matches!(error, DcpError::GroupSize { group: 2, shape: 3 }));
    let error = QueryMailbox::in_process(&devices, three, Limits::default()).unwrap_err();
    assert!(matches!(error, DcpError::GroupSize { group: 2, shape: 3 }));
    let strangers = [Device::simulated(SimConfig::default()), Device::simulated(SimConfig::default())];
    let group = members();
    let errors =
        as_every_rank(2, |rank| QueryMailbox::new(&strangers[rank], group[rank].clone(), shapes[0]).unwrap_err());
    assert!(errors.iter().all(|error| matches!(error, DcpError::PeerUnmappable { .. })));
}

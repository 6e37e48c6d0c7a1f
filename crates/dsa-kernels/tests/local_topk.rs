//! Local top-k against its oracle: every slot of every row, and every byte that a push leaves.

mod common;

use common::*;
use dsa_core::ShapeError;
use dsa_core::consts::LOCAL_CONTEXT_MAX;
use dsa_core::generate::{LogitPattern, SplitMix64};
use dsa_kernels::KernelError;
use dsa_kernels::local_topk::{IndexerLocalTopk, LocalTopkShape, LocalTopkStep, Push, cost};
use gpu::Device;

/// Tops of other logits, as in scratch that another step left: wrong keys, but of the row, and nothing is touched beside the
/// outputs.
#[test]
fn tops_that_are_not_their_logits_own_do_no_harm() {
    on_every_device(|device| {
        for n in [128, 512] {
            let layout = LocalTopkShape::new(n, 4096).unwrap().row();
            let lengths = [20_003, 100_000, 300];
            for pattern in [LogitPattern::Gaussian, LogitPattern::AllEqual, LogitPattern::Descending] {
                let rows: Vec<Vec<u16>> = lengths.iter().map(|len| pattern.row(*len as u64, *len)).collect();
                let rig = LocalRig::new(device, n, &rows, 0);
                let kernels = local_kernels(device, LocalTopkShape::new(n, 4096).unwrap(), seed_of(&rows));
                let mut rng = SplitMix64::new(n as u64);
                for (low, mask) in [(0, 0), (1, 0), (0x8000, 0), (0xFFFF, 0), (0, 0xFFFF), (0x8200, 1)] {
                    let garbage: Vec<u16> = (0..rig.tops.len()).map(|_| low ^ (rng.next_u64() as u16 & mask)).collect();
                    rig.tops.copy_from(&rig.stream, &garbage).unwrap();
                    for kernel in &kernels {
                        rig.out.fill_bytes(&rig.stream, POISON).unwrap();
                        kernel.launch(&rig.stream, &rig.step()).unwrap();
                        let (out, counts) = rig.read();
                        assert_eq!(counts, lengths.map(|len| len.min(n) as i32));
                        for (row, len) in out.chunks(layout.words()).zip(lengths) {
                            let local = |slot: usize| {
                                let high = row[n + slot / 32] >> (slot % 32) & 1;
                                (high << 16 | (0xFFFF - (row[slot] & 0xFFFF))) as usize
                            };
                            let strays = (0..n).filter(|slot| row[*slot] != 0 && local(*slot) >= len);
                            assert_eq!(strays.count(), 0, "{}, {pattern:?}, {len} keys", kernel.shape().name());
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn every_pattern_at_every_edge() {
    on_every_device(|device| {
        for n in [128, 384, 512] {
            // Rows of more than 2^14 keys take a list.
            let lengths = [0, 1, n - 1, n, n + 1, 2 * n + 3, 8 * n - 1, 8 * n + 1, 20 * n + 5, 16_384, 16_385, 20_000];
            for (seed, pattern) in LogitPattern::ALL.into_iter().enumerate() {
                let rows: Vec<_> = lengths.iter().map(|&len| canonical(pattern.row(seed as u64, len))).collect();
                check_local_topk(device, n, &rows, false, 1);
            }
        }
    });
}

#[test]
fn foreign_logits_rank_nan_last_and_minus_zero_as_zero() {
    on_every_device(|device| {
        let patterns = [LogitPattern::NanMix, LogitPattern::SignedZeros, LogitPattern::Infinities];
        let rows: Vec<_> = patterns.iter().flat_map(|p| [100, 129, 3000].map(|len| p.row(5, len))).collect();
        check_local_topk(device, 128, &rows, true, 0);
    });
}

#[test]
fn local_indices_have_17_bits() {
    on_every_device(|device| {
        let len = LOCAL_CONTEXT_MAX;
        let mut late = vec![0xC000u16; len]; // -2
        late[len - 200..].fill(0x4000); // more than N twos, all past 2^16
        late[65_530..65_540].fill(0x4080); // fours on both sides of 2^16
        let rows =
            vec![late, canonical(LogitPattern::Gaussian.row(3, len)), canonical(LogitPattern::Ties.row(4, 70_000))];
        check_local_topk(device, 128, &rows, false, 0);
        check_local_topk(device, 3968, &rows[1..2], false, 0);
    });
}

#[test]
fn results_do_not_depend_on_the_order() {
    in_every_order(4, |device| {
        let len = sized(device, 17_000, 60_000);
        let rows = [LogitPattern::Ties, LogitPattern::AllEqual, LogitPattern::Gaussian].map(|p| p.row(9, len));
        check_local_topk(device, 128, &rows.map(canonical), false, 1);
    });
}

#[test]
fn garbage_row_ends_are_bounded() {
    on_every_device(|device| {
        let rows = vec![canonical(LogitPattern::Gaussian.row(1, 640)); 4];
        let rig = LocalRig::with_ends(device, 128, &rows, 0, &[i32::MAX, -1, i32::MIN, 200], 640);
        let short = rows[0][..200].to_vec();
        let seen = [rows[0].clone(), vec![], vec![], short];
        for seed in 0..3 {
            let kernels = local_kernels(device, LocalTopkShape::new(128, 256).unwrap(), seed);
            check_local_with(&kernels, &rig, &seen);
        }
    });
}

#[test]
fn pushed_rows_arrive_at_every_rank_and_nothing_else_is_written() {
    in_every_order(4, |device| {
        let (n, ranks) = (128, 3);
        let patterns = [LogitPattern::Gaussian, LogitPattern::FewDistinct(5)];
        for pattern in patterns {
            let rows: Vec<_> = [0, 100, 700, 130].map(|len| canonical(pattern.row(2, len))).into();
            let rig = LocalRig::new(device, n, &rows, 1);
            let boxes = Boxes::new(device, n, [ranks, 1], &[0, u32::MAX, 7, 99, 5, 6]);
            let shape = LocalTopkShape::new(n, 256).unwrap().with_push(ranks).unwrap();
            for kernel in local_kernels(device, shape, seed_of(&rows)) {
                boxes.check_push(&kernel, &rig, &rows);
            }
        }
    });
}

#[test]
fn rows_are_pushed_to_any_number_of_ranks() {
    on_every_device(|device| {
        for ranks in 1..=16 {
            let n = [128, 512, 256][ranks % 3];
            let rows: Vec<_> =
                [2000, n, 5001].map(|len| canonical(LogitPattern::FewDistinct(30).row(ranks as u64, len))).into();
            let rig = LocalRig::new(device, n, &rows, 0);
            let boxes = Boxes::new(device, n, [ranks, ranks - 1], &[3, 4, 5]);
            let shape = LocalTopkShape::full(n).unwrap().with_push(ranks).unwrap();
            for kernel in local_kernels(device, shape, ranks) {
                boxes.check_push(&kernel, &rig, &rows);
            }
        }
    });
}

#[test]
fn a_step_without_rows_launches_nothing() {
    on_every_device(|device| {
        let rig = LocalRig::new(device, 128, &[], 0);
        let kernel = IndexerLocalTopk::new(device, LocalTopkShape::new(128, 256).unwrap()).unwrap();
        kernel.launch(&rig.stream, &rig.step()).unwrap();
        assert_eq!(rig.read(), (vec![], vec![]));
    });
}

#[test]
fn unsupported_sizes_are_refused() {
    for (n, topk) in [(0, 512), (64, 512), (512, 512), (640, 512), (4096, 4096)] {
        assert_eq!(LocalTopkShape::new(n, topk), Err(ShapeError::LocalTopkUnsupported { n, topk }));
    }
    assert_eq!(LocalTopkShape::new(128, 4224), Err(ShapeError::TopkUnsupported { topk: 4224 }));
    let shape = LocalTopkShape::new(128, 512).unwrap();
    for ranks in [0, 17] {
        assert_eq!(shape.with_push(ranks), Err(ShapeError::RanksOutOfRange { ranks }));
    }
}

#[test]
fn launches_that_do_not_fit_are_refused() {
    on_every_device(|device| {
        let rig = LocalRig::new(device, 128, &[vec![0; 600], vec![0; 300]], 0);
        let kernel = IndexerLocalTopk::new(device, LocalTopkShape::new(128, 256).unwrap()).unwrap();
        let refused = |step: LocalTopkStep<'_>| match kernel.launch(&rig.stream, &step) {
            Err(KernelError::BufferTooShort { buffer, .. }) => buffer,
            Err(KernelError::Misaligned { buffer, .. }) => buffer,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(LocalTopkStep { out: rig.out.view(..263).unwrap(), ..rig.step() }), "out");
        assert_eq!(refused(LocalTopkStep { out: rig.out.view(1..).unwrap(), ..rig.step() }), "out");
        assert_eq!(refused(LocalTopkStep { logits: rig.logits.view(..2047).unwrap(), ..rig.step() }), "logits");
        assert_eq!(refused(LocalTopkStep { tops: rig.tops.view(4..).unwrap(), ..rig.step() }), "tops");
        assert_eq!(refused(LocalTopkStep { pitch: 512, ..rig.step() }), "pitch");
        assert_eq!(refused(LocalTopkStep { counts: rig.counts.view(..1).unwrap(), ..rig.step() }), "counts");
        let long = LocalTopkStep { pitch: 1 << 18, length_max: LOCAL_CONTEXT_MAX + 1, ..rig.step() };
        assert_eq!(refused(long), "local indices of 17 bits");
        let words = device.alloc_zeros::<u32>(4).unwrap();
        let peers = device.alloc_zeros::<u64>(2).unwrap();
        let push =
            Push { peers: peers.as_view(), epochs: words.as_view(), status: words.as_view(), rank: 0, length_max: 600 };
        assert_eq!(refused(LocalTopkStep { push: Some(push.clone()), ..rig.step() }), "peers");
        let pushing = LocalTopkShape::new(128, 256).unwrap().with_push(2).unwrap();
        let kernel = IndexerLocalTopk::new(device, pushing).unwrap();
        let refused = |push| match kernel.launch(&rig.stream, &LocalTopkStep { push, ..rig.step() }) {
            Err(KernelError::BufferTooShort { buffer, .. }) => buffer,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(None), "peers");
        for rank in [2, usize::MAX] {
            assert_eq!(refused(Some(Push { rank, ..push.clone() })), "peers");
        }
        assert_eq!(refused(Some(Push { epochs: words.view(..1).unwrap(), ..push.clone() })), "slot rows");
        assert_eq!(refused(Some(Push { length_max: 599, ..push })), "exchange rows in keys");
    });
}

#[test]
fn views_of_another_device_are_refused() {
    let [device, other] = [(); 2].map(|()| Device::simulated(gpu::SimConfig::default()));
    let shape = LocalTopkShape::new(128, 256).unwrap().with_push(2).unwrap();
    let kernel = IndexerLocalTopk::new(&device, shape).unwrap();
    let rigs = [&device, &other].map(|device| LocalRig::new(device, 128, &[vec![0; 600]], 0));
    let words = [&device, &other].map(|device| device.alloc_zeros::<u32>(4).unwrap());
    let peers = [&device, &other].map(|device| device.alloc_zeros::<u64>(2).unwrap());
    let step = || rigs[0].step();
    let push = || Push {
        peers: peers[0].as_view(),
        epochs: words[0].as_view(),
        status: words[0].as_view(),
        rank: 0,
        length_max: 600,
    };
    let refused = |step: LocalTopkStep<'_>, push: Push<'_>| {
        let got = kernel.launch(&rigs[0].stream, &LocalTopkStep { push: Some(push), ..step });
        assert!(matches!(got, Err(KernelError::Device(gpu::Error::WrongDevice { .. }))), "{got:?}");
    };
    refused(LocalTopkStep { logits: rigs[1].logits.as_view(), ..step() }, push());
    refused(LocalTopkStep { tops: rigs[1].tops.as_view(), ..step() }, push());
    refused(LocalTopkStep { row_ends: rigs[1].row_ends.as_view(), ..step() }, push());
    refused(LocalTopkStep { out: rigs[1].out.as_view(), ..step() }, push());
    refused(LocalTopkStep { counts: rigs[1].counts.view(..1).unwrap(), ..step() }, push());
    refused(step(), Push { peers: peers[1].as_view(), ..push() });
    refused(step(), Push { epochs: words[1].as_view(), ..push() });
    refused(step(), Push { status: words[1].as_view(), ..push() });
}

#[test]
fn cost_counts_each_byte_once() {
    let shape = LocalTopkShape::new(128, 512).unwrap();
    // 132 words and a count out; in: 100 logits, 100 vectors, 200 tops and 128 vectors.
    assert_eq!(cost(&shape, &[100]).hbm_bytes, 200 + 528 + 4);
    assert_eq!(cost(&shape, &[800]).hbm_bytes, 1600 + 528 + 4);
    assert_eq!(cost(&shape, &[1600]).hbm_bytes, 400 + 2048 + 528 + 4);
    let pushing = shape.with_push(3).unwrap();
    assert_eq!(cost(&pushing, &[0]).hbm_bytes, 528 + 4 + 3 * 66 * 16);
}

//! Local top-k alone, on logits that no score kernel wrote.

use dsa_core::consts::{KEYS_PER_TOP, PAGE};
use dsa_core::layout::b_row::BRow;
use dsa_core::layout::ll_slot::{LlSlots, next_epoch};
use dsa_core::layout::pitched_scratch::PitchedScratch;
use dsa_core::numerics::order16::canonical_logit;
use dsa_core::oracle::merge::local_slots;
use dsa_core::oracle::score::tops;
use dsa_kernels::local_topk::{IndexerLocalTopk, LocalTopkShape, LocalTopkStep, Push};
use gpu::{Buffer, Device, Stream};

use super::{CLUSTERS, GUARD, POISON, POISON32};

/// Rows of logits on a device, laid out as the pitched score does: only pages that hold keys are written.
pub struct LocalRig {
    pub stream: Stream,
    pub logits: Buffer<u16>,
    pub tops: Buffer<u16>,
    pub row_ends: Buffer<i32>,
    pub out: Buffer<u32>,
    pub counts: Buffer<i32>,
    pub scratch: PitchedScratch,
    pub length_max: usize,
    /// All rows, spare ones included.
    pub rows: usize,
    pub n: usize,
}

impl LocalRig {
    pub fn new(device: &Device, n: usize, rows: &[Vec<u16>], spare: usize) -> LocalRig {
        let length_max = rows.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let ends: Vec<i32> = rows.iter().map(|row| row.len() as i32).collect();
        LocalRig::with_ends(device, n, rows, spare, &ends, length_max)
    }

    pub fn with_ends(
        device: &Device,
        n: usize,
        rows: &[Vec<u16>],
        spare: usize,
        ends: &[i32],
        length_max: usize,
    ) -> LocalRig {
        let stream = device.stream().unwrap();
        let scratch = PitchedScratch::new(rows.len(), length_max);
        let logits = device.alloc::<u16>(scratch.logits_len()).unwrap();
        let top_words = device.alloc::<u16>(scratch.tops_len()).unwrap();
        // On a GPU what is not written is the largest top and logit; in the simulator it may not be read.
        if !device.info().simulated {
            logits.fill_bytes(&stream, 0x7F).unwrap();
            top_words.fill_bytes(&stream, 0xFF).unwrap();
        }
        for (row, values) in rows.iter().enumerate() {
            let mut padded = values.clone();
            padded.resize(values.len().next_multiple_of(PAGE), 0x7F80); // +infinity past the end
            let at = scratch.row_start(row);
            logits.view(at..at + padded.len()).unwrap().copy_from(&stream, &padded).unwrap();
            let mut row_tops = tops(values, values.len());
            row_tops.resize(padded.len() / KEYS_PER_TOP, 0);
            let at = at / KEYS_PER_TOP;
            top_words.view(at..at + row_tops.len()).unwrap().copy_from(&stream, &row_tops).unwrap();
        }
        let total = rows.len() + spare;
        let words = BRow::new(n).words();
        let rig = LocalRig {
            logits,
            tops: top_words,
            row_ends: device.upload(ends).unwrap(),
            out: device.alloc(total * words + GUARD).unwrap(),
            counts: device.alloc(total + GUARD).unwrap(),
            scratch,
            length_max,
            rows: total,
            n,
            stream,
        };
        rig.out.fill_bytes(&rig.stream, POISON).unwrap();
        rig.counts.fill_bytes(&rig.stream, POISON).unwrap();
        rig
    }

    pub fn step(&self) -> LocalTopkStep<'_> {
        LocalTopkStep {
            logits: self.logits.as_view(),
            tops: self.tops.as_view(),
            pitch: self.scratch.pitch(),
            row_ends: self.row_ends.as_view(),
            length_max: self.length_max,
            out: self.out.view(..self.out.len() - GUARD).unwrap(),
            counts: self.counts.view(..self.rows).unwrap(),
            push: None,
        }
    }

    /// The output rows and counts; their guards must be intact.
    pub fn read(&self) -> (Vec<u32>, Vec<i32>) {
        let mut out = self.out.copy_to_vec(&self.stream).unwrap();
        let mut counts = self.counts.copy_to_vec(&self.stream).unwrap();
        assert!(out.split_off(out.len() - GUARD).iter().all(|x| *x == POISON32 as u32), "a write past the rows");
        assert!(counts.split_off(self.rows).iter().all(|x| *x == POISON32), "a write past the counts");
        (out, counts)
    }
}

/// The rows of the oracle, empty ones for the spare.
pub fn expected_b_rows(n: usize, rows: &[Vec<u16>], spare: usize) -> (Vec<u32>, Vec<i32>) {
    let layout = BRow::new(n);
    let none = vec![Vec::new(); spare];
    let all = rows.iter().chain(&none);
    let (words, counts): (Vec<_>, Vec<_>) = all
        .map(|row| {
            let slots = local_slots(row, n);
            (layout.encode(&slots), slots.len() as i32)
        })
        .unzip();
    (words.concat(), counts)
}

/// Panics at the first word that differs.
#[track_caller]
pub fn compare_b_rows(got: &(Vec<u32>, Vec<i32>), want: &(Vec<u32>, Vec<i32>), words: usize) {
    if let Some(at) = (0..want.0.len()).find(|&i| got.0[i] != want.0[i]) {
        let (row, word) = (at / words, at % words);
        panic!("row {row}, word {word}: {:#010x}, want {:#010x}", got.0[at], want.0[at]);
    }
    assert_eq!(got.1, want.1, "counts");
}

/// The kernels of each number of CTAs that can share rows of `shape`; on the simulator, without `DSA_FULL=1`, of one CTA and of one
/// other number, which changes with `seed`.
pub fn local_kernels(device: &Device, shape: LocalTopkShape, seed: usize) -> Vec<IndexerLocalTopk> {
    let all = !device.info().simulated || std::env::var_os("DSA_FULL").is_some_and(|v| v == "1");
    let other = [2, 4, 8, 2, 4, 2, 8][seed % 7];
    let wanted = CLUSTERS.into_iter().filter(|cluster| all || [1, other].contains(cluster));
    let shapes = wanted.map(|cluster| shape.with_cluster(cluster).unwrap());
    shapes.map(|shape| IndexerLocalTopk::new(device, shape).unwrap()).collect()
}

/// Some number that changes with the rows.
pub fn seed_of(rows: &[Vec<u16>]) -> usize {
    rows.iter().flatten().fold(rows.len(), |seed, bits| seed.wrapping_mul(31).wrapping_add(usize::from(*bits))) >> 7
}

/// Selects the first `n` of the rows twice with every number of CTAs; every run must be the oracle's answer.
#[track_caller]
pub fn check_local_topk(device: &Device, n: usize, rows: &[Vec<u16>], foreign: bool, spare: usize) {
    let shape = LocalTopkShape::full(n).unwrap().with_foreign_logits(foreign);
    check_local_with(&local_kernels(device, shape, seed_of(rows)), &LocalRig::new(device, n, rows, spare), rows);
}

/// As [`check_local_topk`] with kernels at hand, all of the rig's N.
#[track_caller]
pub fn check_local_with(kernels: &[IndexerLocalTopk], rig: &LocalRig, rows: &[Vec<u16>]) {
    let want = expected_b_rows(rig.n, rows, rig.rows - rows.len());
    for kernel in kernels {
        for _ in 0..2 {
            rig.out.fill_bytes(&rig.stream, POISON).unwrap();
            rig.counts.fill_bytes(&rig.stream, POISON).unwrap();
            kernel.launch(&rig.stream, &rig.step()).unwrap();
            let got = rig.read();
            println!("{}", kernel.shape().name());
            compare_b_rows(&got, &want, kernel.shape().row().words());
        }
    }
}

/// As score would have stored it.
pub fn canonical(row: Vec<u16>) -> Vec<u16> {
    row.into_iter().map(canonical_logit).collect()
}

/// The slots of every rank, all on one device, that rows of a rig are pushed to.
pub struct Boxes {
    slots: LlSlots,
    rank: usize,
    boxes: Vec<Buffer<u32>>,
    peers: Buffer<u64>,
    counters: Vec<u32>,
    pub epochs: Buffer<u32>,
}

impl Boxes {
    /// `ranks` ranks' slots for `counters.len()` rows of N, whose last epochs were those, of which this is `rank`.
    pub fn new(device: &Device, n: usize, [ranks, rank]: [usize; 2], counters: &[u32]) -> Boxes {
        let slots = LlSlots::new(ranks, counters.len(), BRow::new(n));
        let boxes: Vec<_> = (0..ranks).map(|_| device.alloc_zeros::<u32>(slots.bytes() / 4).unwrap()).collect();
        let addresses: Vec<_> = boxes.iter().map(|slots| slots.ptr().address()).collect();
        Boxes {
            slots,
            rank,
            peers: device.upload(&addresses).unwrap(),
            boxes,
            counters: counters.to_vec(),
            epochs: device.upload(counters).unwrap(),
        }
    }

    /// What a launch pushes by.
    pub fn push<'a>(&'a self, status: &'a Buffer<u32>, length_max: usize) -> Push<'a> {
        let (peers, epochs, status) = (self.peers.as_view(), self.epochs.as_view(), status.as_view());
        Push { peers, epochs, status, rank: self.rank, length_max }
    }

    /// What every rank's slots hold.
    pub fn read(&self, stream: &Stream) -> Vec<Vec<u32>> {
        self.boxes.iter().map(|slots| slots.copy_to_vec(stream).unwrap()).collect()
    }

    /// What `rows` (and empty ones up to `all`) leave in every rank's slots.
    pub fn expected(&self, n: usize, rows: &[Vec<u16>], all: usize) -> Vec<u32> {
        let mut want = vec![0u32; self.slots.bytes() / 4];
        let (b_rows, _) = expected_b_rows(n, rows, all - rows.len());
        for (row, words) in b_rows.chunks(BRow::new(n).words()).enumerate() {
            let epoch = next_epoch(self.counters[row]);
            let at = self.slots.slot(epoch, self.rank, row) / 4;
            let pairs = LlSlots::encode(words, epoch);
            want[at..at + pairs.len()].copy_from_slice(&pairs);
        }
        want
    }

    /// Launches a kernel that pushes the rig's rows, while the exchange has failed and while it works; checks every byte.
    #[track_caller]
    pub fn check_push(&self, kernel: &IndexerLocalTopk, rig: &LocalRig, rows: &[Vec<u16>]) {
        let (name, stream) = (kernel.shape().name(), &rig.stream);
        let want = self.expected(rig.n, rows, rig.rows);
        self.boxes.iter().for_each(|slots| slots.fill_bytes(stream, 0).unwrap());
        for failed in [true, false] {
            rig.out.fill_bytes(stream, POISON).unwrap();
            let status = kernel.function().device().upload(&[u32::from(failed), 0, 0, 0]).unwrap();
            let push = self.push(&status, rig.length_max);
            kernel.launch(stream, &LocalTopkStep { push: Some(push), ..rig.step() }).unwrap();
            for (rank, got) in self.read(stream).iter().enumerate() {
                match failed {
                    true => assert!(got.iter().all(|x| *x == 0), "{name}: a failed exchange pushes nothing"),
                    false => {
                        let differs = (0..want.len()).find(|i| got[*i] != want[*i]);
                        let differs = differs.map(|i| (i, format!("{:#010x}, want {:#010x}", got[i], want[i])));
                        assert_eq!(differs, None, "{name}: pushed pairs at rank {rank}");
                    }
                }
            }
            println!("{name}");
            compare_b_rows(&rig.read(), &expected_b_rows(rig.n, rows, rig.rows - rows.len()), BRow::new(rig.n).words());
        }
        assert_eq!(self.epochs.copy_to_vec(stream).unwrap(), self.counters, "only the merge moves the epochs");
    }
}

//! What the host can see is refused with a typed error, before anything is launched.

mod common;

use common::*;
use dsa_core::consts::{CONTEXT_MAX, REQUESTS_MAX};
use dsa_core::generate::StepSpec;
use dsa_core::layout::fp8_page::{self, ScaleForm};
use dsa_core::layout::tp_scratch::TpScratch;
use dsa_core::{DecodeStep, IndexCacheShape, KvShape, ShapeError};
use dsa_kernels::KernelError;
use dsa_kernels::Table;
use dsa_kernels::score::{IndexerScore, KeyCache, ScoreForm, ScoreOutput, ScoreShape, ScoreStep};
use dsa_kernels::select::{IndexerSelect, SelectShape, SelectStep};
use gpu::Device;
use ptx::Target;

/// A [`KernelError`] that can be compared.
#[derive(Debug, PartialEq)]
enum Refusal {
    Shape(ShapeError),
    Short { kernel: &'static str, buffer: &'static str, found: usize, needed: usize },
    Misaligned { kernel: &'static str, buffer: &'static str },
    TensorMap,
    WrongDevice,
}

fn refusal(result: Result<(), KernelError>) -> Refusal {
    match result.expect_err("must be refused") {
        KernelError::Shape(error) => Refusal::Shape(error),
        KernelError::BufferTooShort { kernel, buffer, found, needed } => {
            Refusal::Short { kernel, buffer, found, needed }
        }
        KernelError::Misaligned { kernel, buffer, .. } => Refusal::Misaligned { kernel, buffer },
        KernelError::TensorMap(_) => Refusal::TensorMap,
        KernelError::Device(gpu::Error::WrongDevice { .. }) => Refusal::WrongDevice,
        other => panic!("unexpected: {other}"),
    }
}

/// Two requests of two rows, both kernels, everything poisoned.
struct Rig {
    step: DecodeStep,
    resident: Resident,
    score: IndexerScore,
    pitched: IndexerScore,
    select: IndexerSelect,
}

impl Rig {
    fn new(device: &Device) -> Rig {
        let step = StepSpec::new(1, 2, 128, &[300, 200, 150, 129]).build().unwrap();
        let resident = Resident::new(device, &step);
        resident.logits.fill_bytes(resident.stream(), POISON).unwrap();
        resident.tops.fill_bytes(resident.stream(), POISON).unwrap();
        let (score, select) = kernels(device, &step);
        let pitched = score_kernel(device, &step, ScoreForm::Pitched);
        Rig { step, resident, score, pitched, select }
    }

    /// Nothing was launched: every output is poison.
    #[track_caller]
    fn check_untouched(&self) {
        let Resident { logits, tops, out, counts, ids, .. } = &self.resident;
        for buffer in [logits, tops] {
            assert!(buffer.copy_to_vec(self.resident.stream()).unwrap().iter().all(|x| *x == POISON16));
        }
        for buffer in [out, counts, ids] {
            assert!(buffer.copy_to_vec(self.resident.stream()).unwrap().iter().all(|x| *x == POISON32));
        }
    }

    #[track_caller]
    fn score_refuses<'a>(&'a self, want: Refusal, spoil: impl FnOnce(&mut ScoreStep<'a>)) {
        let mut step = self.resident.inputs.score_step(&self.step);
        spoil(&mut step);
        let got = self.score.launch(self.resident.stream(), &step, &self.resident.compact());
        assert_eq!(refusal(got), want);
        self.check_untouched();
    }

    #[track_caller]
    fn score_refuses_output(&self, score: &IndexerScore, want: Refusal, output: ScoreOutput<'_>) {
        let step = self.resident.inputs.score_step(&self.step);
        assert_eq!(refusal(score.launch(self.resident.stream(), &step, &output)), want);
        self.check_untouched();
    }

    #[track_caller]
    fn select_refuses<'a>(&'a self, want: Refusal, spoil: impl FnOnce(&mut SelectStep<'a>)) {
        let mut step = self.resident.select_step(&self.step);
        spoil(&mut step);
        assert_eq!(refusal(self.select.launch(self.resident.stream(), &step)), want);
        self.check_untouched();
    }
}

fn short(kernel: &'static str, buffer: &'static str, found: usize, needed: usize) -> Refusal {
    Refusal::Short { kernel, buffer, found, needed }
}

#[test]
fn score_refuses_sizes_outside_the_limits() {
    on_every_device(|device| {
        let rig = Rig::new(device);
        let inputs = &rig.resident.inputs;
        let whole = ShapeError::RowsNotWholeRequests { rows: 3, q: 2 };
        rig.score_refuses(Refusal::Shape(whole), |step| step.row_ends = inputs.row_ends.view(..3).unwrap());
        let many = device.alloc_zeros::<i32>(2 * REQUESTS_MAX + 2).unwrap();
        let mut step = inputs.score_step(&rig.step);
        step.row_ends = many.as_view();
        let got = rig.score.launch(rig.resident.stream(), &step, &rig.resident.compact());
        let requests = ShapeError::TooManyRequests { requests: REQUESTS_MAX + 1 };
        assert_eq!(refusal(got), Refusal::Shape(requests));
        for context_len_max in [CONTEXT_MAX + 1, usize::MAX] {
            let context = ShapeError::ContextOutOfRange { context_len_max };
            rig.score_refuses(Refusal::Shape(context), |step| step.length_max = context_len_max);
        }
    });
}

#[test]
fn score_refuses_inputs_that_are_too_short() {
    on_every_device(|device| {
        let rig = Rig::new(device);
        let inputs = &rig.resident.inputs;
        rig.score_refuses(short("score", "queries", 16_383, 16_384), |step| {
            step.queries = inputs.queries.view(..16_383).unwrap();
        });
        rig.score_refuses(short("score", "weights", 127, 128), |step| {
            step.weights = inputs.weights.view(..127).unwrap();
        });
        let (stride, width) = (rig.step.table_stride, rig.step.table_width);
        rig.score_refuses(short("score", "table", stride + width - 1, stride + width), |step| {
            step.table.ids = inputs.table.view(..stride + width - 1).unwrap();
        });
        let narrow = ShapeError::TableStrideTooSmall { table: "table", stride: width - 1, width };
        rig.score_refuses(Refusal::Shape(narrow), |step| step.table.stride = width - 1);
        let length_max = rig.step.len_max();
        rig.score_refuses(short("score", "table width x 64", 64 * (width - 1), length_max), |step| {
            step.table.width = width - 1;
        });
        let available = inputs.table.len();
        rig.score_refuses(short("score", "table", available, usize::MAX), |step| step.table.stride = usize::MAX);
    });
}

#[test]
fn score_refuses_outputs_of_the_wrong_size_or_form() {
    on_every_device(|device| {
        let rig = Rig::new(device);
        let resident = &rig.resident;
        let needed = TpScratch::capacity(4, rig.step.len_max());
        let logits = |len: usize| resident.logits.view(..len).unwrap();
        let tops = |len: usize| resident.tops.view(..len).unwrap();
        let compact = |logits, tops| ScoreOutput::Compact { logits, tops };
        let refuses = |want, output| rig.score_refuses_output(&rig.score, want, output);
        refuses(short("score", "logits", needed - 1, needed), compact(logits(needed - 1), tops(needed / 8)));
        refuses(short("score", "tops", needed / 8 - 1, needed / 8), compact(logits(needed), tops(needed / 8 - 1)));
        refuses(short("score", "tops", 0, 1), ScoreOutput::Pitched { logits: logits(needed), tops: None, pitch: 512 });

        let refuses = |want, output| rig.score_refuses_output(&rig.pitched, want, output);
        let length_max = rig.step.len_max();
        refuses(short("score", "pitch", 0, length_max), compact(logits(needed), tops(needed / 8)));
        for (pitch, needed) in [(0, 512), (500, 512), (513, 1024)] {
            let multiple = ShapeError::BufferLength { buffer: "pitch", found: pitch, needed };
            refuses(Refusal::Shape(multiple), ScoreOutput::Pitched { logits: logits(2048), tops: None, pitch });
        }
        refuses(
            short("score", "logits", 2047, 2048),
            ScoreOutput::Pitched { logits: logits(2047), tops: None, pitch: 512 },
        );
        let pitched = |tops| ScoreOutput::Pitched { logits: logits(2048), tops: Some(tops), pitch: 512 };
        refuses(short("score", "tops", 255, 256), pitched(tops(255)));
        for pitch in [1 << 33, 1 << 63] {
            let all = resident.logits.len();
            let needed = 4usize.saturating_mul(pitch);
            refuses(
                short("score", "logits", all, needed),
                ScoreOutput::Pitched { logits: logits(all), tops: None, pitch },
            );
        }
        // Longer rows than the pitch holds.
        let wide = StepSpec { context_len_max: 1024, ..StepSpec::new(1, 2, 128, &[300, 200]) }.build().unwrap();
        let inputs = Inputs::new(device, &wide);
        let output = ScoreOutput::Pitched { logits: logits(1024), tops: None, pitch: 512 };
        let got = rig.pitched.launch(resident.stream(), &inputs.score_step(&wide), &output);
        assert_eq!(refusal(got), short("score", "pitch", 512, 1024));
    });
}

#[test]
fn score_refuses_addresses_off_16_bytes() {
    on_every_device(|device| {
        let rig = Rig::new(device);
        let resident = &rig.resident;
        let padded = device.upload(&[&rig.step.queries[..], &[0; 16]].concat()).unwrap();
        let got = {
            let mut step = resident.inputs.score_step(&rig.step);
            step.queries = padded.view(8..).unwrap();
            rig.score.launch(resident.stream(), &step, &resident.compact())
        };
        assert_eq!(refusal(got), Refusal::TensorMap);
        let view = resident.inputs.cache_bytes.view(8..).unwrap();
        let shape = IndexCacheShape::new(1, fp8_page::BYTES, fp8_page::BYTES).unwrap();
        assert!(matches!(KeyCache::new(device, &view, shape), Err(KernelError::TensorMap(_))));
        let misaligned = |buffer| Refusal::Misaligned { kernel: "score", buffer };
        let (logits, tops) =
            (|at: usize| resident.logits.view(at..).unwrap(), |at: usize| resident.tops.view(at..).unwrap());
        for at in [1, 4, 7] {
            let output = ScoreOutput::Compact { logits: logits(at), tops: tops(0) };
            rig.score_refuses_output(&rig.score, misaligned("logits"), output);
            let output = ScoreOutput::Compact { logits: logits(0), tops: tops(at) };
            rig.score_refuses_output(&rig.score, misaligned("tops"), output);
            let output = ScoreOutput::Pitched { logits: logits(at), tops: None, pitch: 512 };
            rig.score_refuses_output(&rig.pitched, misaligned("logits"), output);
            let output = ScoreOutput::Pitched { logits: logits(0), tops: Some(tops(at)), pitch: 512 };
            rig.score_refuses_output(&rig.pitched, misaligned("tops"), output);
        }
    });
}

#[test]
fn a_key_cache_shorter_than_its_shape_is_refused() {
    on_every_device(|device| {
        for (blocks, page_stride) in [(1, fp8_page::BYTES), (3, fp8_page::BYTES), (2, 3 * fp8_page::BYTES + 576)] {
            let shape = IndexCacheShape::new(blocks, fp8_page::BYTES, page_stride).unwrap();
            let needed = (blocks - 1) * page_stride + fp8_page::BYTES;
            let bytes = device.alloc::<u8>(needed).unwrap();
            assert_eq!(KeyCache::new(device, &bytes.as_view(), shape).unwrap().shape(), shape);
            let cut = bytes.view(..needed - 1).unwrap();
            let refused = KeyCache::new(device, &cut, shape).map(|_| ());
            assert_eq!(refusal(refused), short("score", "index cache", needed - 1, needed));
        }
        for stride in [fp8_page::BYTES - 16, fp8_page::BYTES + 8] {
            let refused = IndexCacheShape::new(2, fp8_page::BYTES, stride);
            let page_bytes = fp8_page::BYTES;
            assert_eq!(refused, Err(ShapeError::PageStrideUnsupported { stride, page_bytes }));
        }
    });
}

#[test]
fn views_of_another_device_are_refused() {
    let rig = Rig::new(&Device::simulated(gpu::SimConfig::default()));
    let other = Rig::new(&Device::simulated(gpu::SimConfig::default()));
    let (theirs, their_inputs) = (&other.resident, &other.resident.inputs);
    rig.score_refuses(Refusal::WrongDevice, |step| step.queries = their_inputs.queries.as_view());
    rig.score_refuses(Refusal::WrongDevice, |step| step.weights = their_inputs.weights.as_view());
    rig.score_refuses(Refusal::WrongDevice, |step| step.cache = &their_inputs.cache);
    rig.score_refuses(Refusal::WrongDevice, |step| step.table.ids = their_inputs.table.as_view());
    rig.score_refuses(Refusal::WrongDevice, |step| step.row_ends = their_inputs.row_ends.as_view());
    rig.score_refuses_output(&rig.score, Refusal::WrongDevice, theirs.compact());
    rig.select_refuses(Refusal::WrongDevice, |step| step.logits = theirs.logits.as_view());
    rig.select_refuses(Refusal::WrongDevice, |step| step.tops = theirs.tops.as_view());
    rig.select_refuses(Refusal::WrongDevice, |step| step.table.ids = theirs.kv_table.as_view());
    rig.select_refuses(Refusal::WrongDevice, |step| step.out = theirs.out.as_view());
    rig.select_refuses(Refusal::WrongDevice, |step| step.counts = theirs.counts.view(..step.counts.len()).unwrap());
    rig.select_refuses(Refusal::WrongDevice, |step| step.ids = Some(theirs.ids.as_view()));
    let bytes = theirs.inputs.cache_bytes.as_view();
    let refused = KeyCache::new(&rig.resident.inputs.device, &bytes, their_inputs.cache.shape()).map(|_| ());
    assert_eq!(refusal(refused), Refusal::WrongDevice);
}

#[test]
fn a_key_cache_larger_than_the_address_space_is_refused() {
    let device = Device::simulated(gpu::SimConfig::default());
    let shape = IndexCacheShape::new((1 << 28) + 1, fp8_page::BYTES, 1 << 36).unwrap();
    let bytes = device.alloc::<u8>(fp8_page::BYTES).unwrap();
    let refused = KeyCache::new(&device, &bytes.as_view(), shape).map(|_| ());
    assert_eq!(refusal(refused), short("score", "index cache", fp8_page::BYTES, usize::MAX));
}

#[test]
fn score_refuses_rows_over_a_cache_without_pages() {
    on_every_device(|device| {
        let rig = Rig::new(device);
        let shape = IndexCacheShape::new(0, fp8_page::BYTES, fp8_page::BYTES).unwrap();
        let empty = KeyCache::new(device, &device.alloc::<u8>(0).unwrap().as_view(), shape).unwrap();
        let mut step = rig.resident.inputs.score_step(&rig.step);
        step.cache = &empty;
        let got = rig.score.launch(rig.resident.stream(), &step, &rig.resident.compact());
        assert_eq!(refusal(got), short("score", "index cache blocks", 0, 1));
        rig.check_untouched();
    });
}

#[test]
fn score_shapes_outside_the_limits_are_refused() {
    for q in [0, 9, usize::MAX] {
        let refused = ScoreShape::new(q, ScoreForm::Pitched, ScaleForm::Fp32);
        assert_eq!(refused, Err(ShapeError::RowsPerRequestOutOfRange { q }));
    }
    for topk in [0, 64, 1000, 4224] {
        let refused = ScoreShape::new(1, ScoreForm::Compact { topk }, ScaleForm::Fp32);
        assert_eq!(refused, Err(ShapeError::TopkUnsupported { topk: topk as usize }));
    }
}

#[test]
fn score_is_refused_on_an_architecture_it_has_no_kernel_for() {
    let device = Device::simulated_group_as(gpu::SimConfig::default(), Target::Sm100a).swap_remove(0);
    let shape = ScoreShape::new(1, ScoreForm::Pitched, ScaleForm::Fp32).unwrap();
    let refused = IndexerScore::new(&device, shape).map(|_| ());
    let target = Target::Sm100a;
    assert!(matches!(refused, Err(KernelError::UnsupportedTarget { kernel: "score", target: t }) if t == target));
    // Select needs nothing of one architecture.
    IndexerSelect::new(&device, SelectShape::new(128, 64).unwrap()).unwrap();
}

#[test]
fn streams_of_another_device_are_refused() {
    on_every_device(|device| {
        let rig = Rig::new(device);
        let other = Device::simulated(gpu::SimConfig::default());
        let stream = other.stream().unwrap();
        let step = rig.resident.inputs.score_step(&rig.step);
        let got = rig.score.launch(&stream, &step, &rig.resident.compact());
        assert_eq!(refusal(got), Refusal::WrongDevice);
        let got = rig.select.launch(&stream, &rig.resident.select_step(&rig.step));
        assert_eq!(refusal(got), Refusal::WrongDevice);
        rig.check_untouched();
    });
}

#[test]
fn select_refuses_sizes_outside_the_limits() {
    on_every_device(|device| {
        let rig = Rig::new(device);
        let row_ends = &rig.resident.inputs.row_ends;
        let whole = ShapeError::RowsNotWholeRequests { rows: 3, q: 2 };
        rig.select_refuses(Refusal::Shape(whole), |step| step.row_ends = row_ends.view(..3).unwrap());
        for q in [0, 9, usize::MAX] {
            let refused = Refusal::Shape(ShapeError::RowsPerRequestOutOfRange { q });
            rig.select_refuses(refused, |step| step.q = q);
        }
        let whole = ShapeError::RowsNotWholeRequests { rows: 4, q: 3 };
        rig.select_refuses(Refusal::Shape(whole), |step| step.q = 3);
        let many = device.alloc_zeros::<i32>(2 * REQUESTS_MAX + 2).unwrap();
        let mut step = rig.resident.select_step(&rig.step);
        step.row_ends = many.as_view();
        let requests = ShapeError::TooManyRequests { requests: REQUESTS_MAX + 1 };
        assert_eq!(refusal(rig.select.launch(rig.resident.stream(), &step)), Refusal::Shape(requests));
        for context_len_max in [CONTEXT_MAX + 1, usize::MAX] {
            let context = ShapeError::ContextOutOfRange { context_len_max };
            rig.select_refuses(Refusal::Shape(context), |step| step.length_max = context_len_max);
        }
        let page = KvShape::new(128, 128, 0).unwrap();
        rig.select_refuses(short("select", "kv page", 128, 64), |step| step.kv = page);
    });
}

#[test]
fn select_refuses_inputs_that_are_too_short_or_misaligned() {
    on_every_device(|device| {
        let rig = Rig::new(device);
        let resident = &rig.resident;
        let needed = TpScratch::capacity(4, rig.step.len_max());
        rig.select_refuses(short("select", "logits", needed - 1, needed), |step| {
            step.logits = resident.logits.view(..needed - 1).unwrap();
        });
        rig.select_refuses(short("select", "tops", needed / 8 - 1, needed / 8), |step| {
            step.tops = resident.tops.view(..needed / 8 - 1).unwrap();
        });
        for at in [1, 4, 7] {
            let misaligned = |buffer| Refusal::Misaligned { kernel: "select", buffer };
            rig.select_refuses(misaligned("logits"), |step| step.logits = resident.logits.view(at..).unwrap());
            rig.select_refuses(misaligned("tops"), |step| step.tops = resident.tops.view(at..).unwrap());
        }
        let (stride, width) = (rig.step.kv_table_stride, rig.step.kv_table_width);
        rig.select_refuses(short("select", "kv table", stride + width - 1, stride + width), |step| {
            step.table.ids = resident.kv_table.view(..stride + width - 1).unwrap();
        });
        let narrow = ShapeError::TableStrideTooSmall { table: "kv table", stride: width - 1, width };
        rig.select_refuses(Refusal::Shape(narrow), |step| step.table.stride = width - 1);
        let length_max = rig.step.len_max();
        rig.select_refuses(short("select", "kv table width x page", 64 * (width - 1), length_max), |step| {
            step.table = Table { width: width - 1, ..step.table.clone() };
        });
        let available = resident.kv_table.len();
        rig.select_refuses(short("select", "kv table", available, usize::MAX), |step| step.table.stride = usize::MAX);
    });
}

#[test]
fn select_refuses_outputs_that_are_too_short_or_not_its_own() {
    on_every_device(|device| {
        let rig = Rig::new(device);
        let resident = &rig.resident;
        rig.select_refuses(short("select", "counts", 3, 4), |step| step.counts = resident.counts.view(..3).unwrap());
        rig.select_refuses(short("select", "out", 511, 512), |step| step.out = resident.out.view(..511).unwrap());
        rig.select_refuses(short("select", "ids", 511, 512), |step| {
            step.ids = Some(resident.ids.view(..511).unwrap());
        });
        rig.select_refuses(short("select", "ids", 0, 512), |step| step.ids = None);
        // A kernel without ids refuses them: they would stay as they are.
        let without = IndexerSelect::new(device, rig.select.shape().with_ids(false)).unwrap();
        let got = without.launch(resident.stream(), &resident.select_step(&rig.step));
        assert_eq!(refusal(got), short("select", "ids", 512, 0));
        rig.check_untouched();
    });
}

#[test]
fn table_strides_and_blocks_beyond_32_bits_are_refused() {
    on_every_device(|device| {
        let rig = Rig::new(device);
        // One request: the stride itself is never used, so no buffer is too short for it.
        let step = StepSpec::new(1, 2, 128, &[300, 200]).build().unwrap();
        let (inputs, stride) = (Inputs::new(device, &step), 1 << 32);
        let mut wide = inputs.score_step(&step);
        wide.table.stride = stride;
        let got = rig.score.launch(rig.resident.stream(), &wide, &rig.resident.compact());
        assert_eq!(refusal(got), short("score", "table stride", u32::MAX as usize, stride));
        let mut wide = rig.resident.select_step(&rig.step);
        wide.row_ends = inputs.row_ends.as_view();
        wide.table.stride = stride;
        let got = rig.select.launch(rig.resident.stream(), &wide);
        assert_eq!(refusal(got), short("select", "kv table stride", u32::MAX as usize, stride));
        rig.select_refuses(short("select", "kv block rows", u32::MAX as usize, 1 << 32), |step| {
            step.kv = KvShape::new(64, 1 << 32, 0).unwrap();
        });
        rig.check_untouched();
    });
}

//! Score alone: every element of a poisoned scratch is compared, written or not.

use dsa_core::consts::{KEYS_PER_TOP, PAGE};
use dsa_core::layout::pitched_scratch::PitchedScratch;
use dsa_core::layout::tp_scratch::TpScratch;
use dsa_core::{DecodeStep, oracle};
use dsa_kernels::score::{IndexerScore, ScoreForm, ScoreOutput, ScoreShape};
use gpu::Device;

use super::{GUARD, Inputs, POISON, POISON16, dot_tensor_core};

/// A whole scratch, guards included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scratch {
    pub logits: Vec<u16>,
    pub tops: Vec<u16>,
}

/// The compact form with the step's top-k.
pub fn compact(step: &DecodeStep) -> ScoreForm {
    ScoreForm::Compact { topk: step.topk as u32 }
}

/// The score kernel of a step.
pub fn score_kernel(device: &Device, step: &DecodeStep, form: ScoreForm) -> IndexerScore {
    IndexerScore::new(device, ScoreShape::new(step.q, form, step.scale_form).unwrap()).unwrap()
}

/// The pitch that a step's rows need.
pub fn pitch(step: &DecodeStep) -> usize {
    PitchedScratch::new(step.rows, step.len_max()).pitch()
}

/// Elements of a step's logits, without the guard.
fn logits_len(step: &DecodeStep, form: ScoreForm) -> usize {
    match form {
        ScoreForm::Compact { .. } => TpScratch::capacity(step.rows, step.len_max()),
        ScoreForm::Pitched => step.rows * pitch(step),
    }
}

/// Scores a step into a poisoned scratch.
pub fn run_score(inputs: &Inputs, step: &DecodeStep, score: &IndexerScore) -> Scratch {
    let (device, stream) = (&inputs.device, &inputs.stream);
    let len = logits_len(step, score.shape().form());
    let logits = device.alloc::<u16>(len + GUARD).unwrap();
    let tops = device.alloc::<u16>(len / KEYS_PER_TOP + GUARD).unwrap();
    logits.fill_bytes(stream, POISON).unwrap();
    tops.fill_bytes(stream, POISON).unwrap();
    let output = match score.shape().form() {
        ScoreForm::Compact { .. } => {
            ScoreOutput::Compact { logits: logits.view(..len).unwrap(), tops: tops.view(..len / KEYS_PER_TOP).unwrap() }
        }
        ScoreForm::Pitched => ScoreOutput::Pitched {
            logits: logits.view(..len).unwrap(),
            tops: Some(tops.view(..len / KEYS_PER_TOP).unwrap()),
            pitch: pitch(step),
        },
    };
    score.launch(stream, &inputs.score_step(step), &output).unwrap();
    Scratch { logits: logits.copy_to_vec(stream).unwrap(), tops: tops.copy_to_vec(stream).unwrap() }
}

/// What a poisoned scratch must hold afterwards: the pages of each scored request's longest row, logit +0 and top 0 past
/// a row's end, and poison everywhere else.
pub fn expected_scratch(step: &DecodeStep, form: ScoreForm, logits: &[Vec<u16>]) -> Scratch {
    let len = logits_len(step, form);
    let mut scratch = Scratch { logits: vec![POISON16; len + GUARD], tops: vec![POISON16; len / KEYS_PER_TOP + GUARD] };
    let plan = TpScratch::plan(&step.row_ends, step.q, step.topk, step.len_max()).unwrap();
    for (row, row_logits) in logits.iter().enumerate() {
        let start = match form {
            ScoreForm::Compact { .. } => plan.row_start(row),
            ScoreForm::Pitched => Some(row * pitch(step)),
        };
        let Some(start) = start else { continue };
        let request = row / step.q * step.q;
        let longest = (request..request + step.q).map(|row| step.row_len(row)).max().unwrap();
        let mut written = row_logits.clone();
        written.resize(longest.next_multiple_of(PAGE), 0);
        let tops = oracle::score::tops(&written, row_logits.len());
        scratch.tops[start / KEYS_PER_TOP..][..tops.len()].copy_from_slice(&tops);
        scratch.logits[start..][..written.len()].copy_from_slice(&written);
    }
    scratch
}

/// Scores a step twice and compares every element of the scratch with the oracle's; returns the rows' logits.
#[track_caller]
pub fn check_score(device: &Device, step: &DecodeStep, form: ScoreForm) -> Vec<Vec<u16>> {
    check_score_of(&Inputs::new(device, step), step, form)
}

/// As [`check_score`] with inputs that the caller placed.
#[track_caller]
pub fn check_score_of(inputs: &Inputs, step: &DecodeStep, form: ScoreForm) -> Vec<Vec<u16>> {
    let score = score_kernel(&inputs.device, step, form);
    let got = run_score(inputs, step, &score);
    assert!(run_score(inputs, step, &score) == got, "two runs of {} differ", score.function().name());
    let want = oracle::step::logits(step, dot_tensor_core);
    check_scratch(&got, &expected_scratch(step, form, &want));
    want
}

/// Compares two scratches, naming the first difference.
#[track_caller]
pub fn check_scratch(got: &Scratch, want: &Scratch) {
    for (name, got, want) in [("logit", &got.logits, &want.logits), ("top", &got.tops, &want.tops)] {
        assert_eq!(got.len(), want.len(), "{name}s");
        if let Some(at) = (0..got.len()).find(|&i| got[i] != want[i]) {
            let wrong = (0..got.len()).filter(|&i| got[i] != want[i]).count();
            panic!("{name} {at}: {:#06x}, want {:#06x}; {wrong} of {} differ", got[at], want[at], got.len());
        }
    }
}

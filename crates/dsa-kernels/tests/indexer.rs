//! Score and select together, against the oracles.

mod common;

use common::*;
use dsa_core::generate::{Contents, StepSpec};
use dsa_core::layout::fp8_page::ScaleForm;

#[test]
fn one_row_matches_the_oracle() {
    on_every_device(|device| {
        check_step(device, &StepSpec::new(1, 1, 128, &[300]).build().unwrap());
    });
}

#[test]
fn every_q_and_scale_form_matches_the_oracle() {
    on_every_device(|device| {
        for q in 1..=8 {
            for scale_form in [ScaleForm::Ue8m0, ScaleForm::Fp32] {
                let ends: Vec<i32> = (0..2 * q as i32).map(|i| 200 + (i * 97) % 180).collect();
                let mut spec = StepSpec::new(q as u64, q, 128, &ends);
                spec.scale_form = scale_form;
                spec.contents = Contents::Hostile;
                check_step(device, &spec.build().unwrap());
            }
        }
    });
}

/// Longer than what fits the registers of select: its list comes from score's tops.
#[test]
fn a_row_that_takes_a_list_matches_the_oracle() {
    on_every_device(|device| {
        check_step(device, &StepSpec::new(2, 1, 128, &[16_500, 300]).build().unwrap());
    });
}

//! The small-batch query against the oracle.

mod common;

use common::*;
use dsa_core::layout::mla_entry::MlaCacheForm;

#[test]
fn every_form_at_every_number_of_tokens() {
    on_every_device(|device| {
        for tokens in 1..=8 {
            let step = Step::random(tokens as u64, 2, tokens);
            let form = MlaCacheForm::ALL[tokens % 4];
            let shape = shape_of(&step, form);
            check(&step, shape, &run(device, &step, shape));
        }
    });
}

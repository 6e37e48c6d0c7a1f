//! The hand-overs of the clusters in many random schedules: no fault, and the same bits.

mod common;

use common::*;
use dsa_core::layout::mla_entry::MlaCacheForm;
use gpu::Device;
use mla_query::{MlaQuery, MlaShape};
use ptx::Target;

/// `seeds` schedules of the kernel of `step`.
fn check_schedules(step: &Step, shape: MlaShape, seeds: u64) {
    let kernel = mla_query::query::build(&shape, Target::Sm90a).unwrap();
    let mut first = None;
    for seed in 1..=seeds {
        let device = Device::simulated(gpu::SimConfig::seeded(seed));
        let query = MlaQuery::from_kernel(&device, shape, &kernel).unwrap();
        let got = Resident::new(&device, step, shape).run(&query, step);
        if first.is_none() {
            check(step, shape, &got);
        }
        assert_eq!(*first.get_or_insert(got.clone()), got, "{}: seed {seed}", shape.name());
    }
}

/// 500 with `DSA_FULL=1`, else fewer.
fn seeds(few: u64) -> u64 {
    if std::env::var_os("DSA_FULL").is_some_and(|v| v == "1") { 500 } else { few }
}

#[test]
fn clusters_of_16() {
    let step = Step::random(71, 1, 1);
    let shape = shape_of(&step, MlaCacheForm::Fp8Ds);
    assert_eq!(shape.cluster(), 16);
    check_schedules(&step, shape, seeds(100));
}

#[test]
fn clusters_of_8() {
    let mut step = Step::random(72, 8, 1);
    // One head's work is that of all.
    step.slots = vec![7];
    let shape = shape_of(&step, MlaCacheForm::Nvfp4Ds);
    assert_eq!(shape.cluster(), 8);
    check_schedules(&step, shape, seeds(60));
}

#[test]
fn tiles_in_clusters_of_8() {
    let step = Step::random(73, 1, 9);
    for (tile, few) in [(16, 60), (32, 25), (64, 12)] {
        let shape = shape_of(&step, MlaCacheForm::Fp8Divide).with_tile(Some(tile)).unwrap();
        assert_eq!(shape.cluster(), 8);
        check_schedules(&step, shape, seeds(few));
    }
}

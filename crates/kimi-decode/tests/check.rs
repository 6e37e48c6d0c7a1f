//! The rules by which an answer matches a file, one by one.

use dsa_core::DecodeStep;
use dsa_core::generate::{Contents, StepSpec};
use dsa_core::numerics::order16::{bits_of, key_of};
use dsa_core::oracle::score::dot_exact;
use dsa_core::oracle::step;
use kimi_decode::check::{Answer, Dot, Mismatch, Report, check, device_dot};
use kimi_decode::step_file::{Expected, ExpectedLogits, Tolerance};

const WIDTH: usize = 640;

/// A step whose logits depend on the accumulator, one row per request.
fn gaussian() -> DecodeStep {
    StepSpec { contents: Contents::Gaussian, ..StepSpec::new(3, 1, 128, &[600, 127, 0, 129]) }.build().unwrap()
}

/// The answer of a device that computes `logits`.
fn answer(step: &DecodeStep, logits: Vec<Vec<u16>>) -> Answer {
    let selected = step::select(step, &logits).unwrap();
    Answer {
        logits,
        ids: selected.iter().flat_map(|row| row.ids.clone()).collect(),
        rows: selected.iter().flat_map(|row| row.rows.clone()).collect(),
        counts: selected.iter().map(|row| row.count as i32).collect(),
    }
}

/// A file that expects an answer.
fn expecting(answer: &Answer, tolerance: Tolerance) -> Expected {
    let mut bits = vec![0; answer.logits.len() * WIDTH];
    for (row, logits) in answer.logits.iter().enumerate() {
        bits[row * WIDTH..][..logits.len()].copy_from_slice(logits);
    }
    Expected {
        tolerance,
        logits: Some(ExpectedLogits { width: WIDTH, bits }),
        ids: Some(answer.ids.clone()),
        rows: Some(answer.rows.clone()),
        counts: Some(answer.counts.clone()),
    }
}

fn compare(step: &DecodeStep, got: &Answer, want: &Expected, dot: Option<Dot>) -> Result<Report, Mismatch> {
    let selected = step::select(step, &got.logits).unwrap();
    check(step, got, &selected, Some(want), dot)
}

/// The logit `ulp` values above.
fn above(bits: u16, ulp: u16) -> u16 {
    bits_of(key_of(bits) + ulp)
}

#[test]
fn equal_answers_match_under_every_tolerance() {
    let step = gaussian();
    let got = answer(&step, step::logits(&step, dot_exact));
    for tolerance in [Tolerance::BitExact, Tolerance::Ulp(0), Tolerance::Ulp(2)] {
        let report = compare(&step, &got, &expecting(&got, tolerance), None).unwrap();
        let logits = report.logits.unwrap();
        assert_eq!((logits.compared, logits.differing, logits.beyond, logits.ulp_max), (856, 0, 0, 0));
        assert_eq!((report.ids_differing, report.modelled), (0, false));
        assert_eq!(report.compared, ["counts", "ids", "rows"]);
    }
}

#[test]
fn logits_may_differ_by_the_tolerance_and_no_more() {
    let step = gaussian();
    let exact = step::logits(&step, dot_exact);
    let want = answer(&step, exact.clone());
    // A short row takes all its keys, whatever their logits.
    let off_by = |ulp| {
        let mut logits = exact.clone();
        logits[1][5] = above(logits[1][5], ulp);
        answer(&step, logits)
    };
    let report = compare(&step, &off_by(2), &expecting(&want, Tolerance::Ulp(2)), None).unwrap();
    let logits = report.logits.unwrap();
    assert_eq!((logits.differing, logits.beyond, logits.ulp_max), (1, 0, 2));
    for (ulp, tolerance) in [(3, Tolerance::Ulp(2)), (1, Tolerance::Ulp(0)), (1, Tolerance::BitExact)] {
        let refused = compare(&step, &off_by(ulp), &expecting(&want, tolerance), None);
        assert!(matches!(refused, Err(Mismatch::Logit { row: 1, key: 5, ulp: u, .. }) if u == ulp), "{refused:?}");
    }
    // Not even the tensor core explains a single wrong logit.
    let refused = compare(&step, &off_by(3), &expecting(&want, Tolerance::Ulp(2)), device_dot(ptx::Target::Sm90a));
    assert!(matches!(refused, Err(Mismatch::Logit { row: 1, key: 5, .. })), "{refused:?}");
}

#[test]
fn ids_may_differ_near_the_threshold_only() {
    let step = gaussian();
    let exact = step::logits(&step, dot_exact);
    // Row 3 leaves out one key of 129. Lift that key to the threshold, and another one in its place.
    let left_out = |answer: &Answer| {
        let ids = &answer.ids[3 * 128..];
        (0..129).find(|id| !ids.contains(id)).unwrap() as usize
    };
    let worst = left_out(&answer(&step, exact.clone()));
    let threshold = step::select(&step, &exact).unwrap()[3].threshold.unwrap();
    let mut level = exact.clone();
    level[3][worst] = bits_of(threshold);
    let weakest = (0..129).find(|&id| id != worst && key_of(exact[3][id]) == threshold).unwrap();
    let lifted = |key: usize| {
        let mut logits = level.clone();
        logits[3][key] = above(logits[3][key], 1);
        answer(&step, logits)
    };
    let (got, want) = (lifted(worst), lifted(weakest));
    assert_eq!((left_out(&got), left_out(&want)), (weakest, worst));
    let report = compare(&step, &got, &expecting(&want, Tolerance::Ulp(1)), None).unwrap();
    assert_eq!(report.ids_differing, 1);
    let refused = compare(&step, &got, &expecting(&want, Tolerance::Ulp(0)), None);
    assert!(matches!(refused, Err(Mismatch::Logit { row: 3, .. })), "{refused:?}");

    // Far from the threshold: the expected ids leave out the best key of the row instead.
    let got = answer(&step, exact.clone());
    let best = (0..129).max_by_key(|&id| key_of(exact[3][id])).unwrap() as i32;
    let mut spoilt = expecting(&got, Tolerance::Ulp(2));
    let (ids, rows) = (spoilt.ids.as_mut().unwrap(), spoilt.rows.as_mut().unwrap());
    let kept: Vec<i32> = (0..129).filter(|&id| id != best).collect();
    ids[3 * 128..].copy_from_slice(&kept);
    let block = |id: i32| step.kv_table_row(3)[id as usize / step.kv_page] * step.kv_block_rows as i32;
    for (row, &id) in rows[3 * 128..].iter_mut().zip(&kept) {
        *row = block(id) + id % step.kv_page as i32;
    }
    let refused = compare(&step, &got, &spoilt, None);
    assert!(matches!(refused, Err(Mismatch::Id { row: 3, id, expected_only: false, .. }) if id == best), "{refused:?}");
}

#[test]
fn a_difference_of_the_tensor_core_is_accepted_bit_for_bit_and_not_otherwise() {
    let step = gaussian();
    let dot = device_dot(ptx::Target::Sm90a).unwrap();
    let want = answer(&step, step::logits(&step, dot_exact));
    let got = answer(&step, step::logits(&step, dot));
    let strict = expecting(&want, Tolerance::Ulp(0));
    assert!(matches!(compare(&step, &got, &strict, None), Err(Mismatch::Logit { .. })), "it does differ");
    let report = compare(&step, &got, &strict, Some(dot)).unwrap();
    assert!(report.modelled && report.logits.unwrap().beyond > 0);
    // Never under bit-exact.
    let exact = expecting(&want, Tolerance::BitExact);
    assert!(matches!(compare(&step, &got, &exact, Some(dot)), Err(Mismatch::Logit { .. })));
    // A device that is one ulp off its own arithmetic.
    let mut logits = got.logits.clone();
    logits[0][300] = above(logits[0][300], 1);
    let off = answer(&step, logits);
    assert!(matches!(compare(&step, &off, &strict, Some(dot)), Err(Mismatch::Logit { .. })));
    // An expectation that exact dot products do not give.
    let mut spoilt = strict.clone();
    let bits = &mut spoilt.logits.as_mut().unwrap().bits[WIDTH + 9];
    *bits = above(*bits, 1);
    let refused = compare(&step, &got, &spoilt, Some(dot));
    assert!(matches!(refused, Err(Mismatch::ExpectedLogit { row: 1, key: 9, ulp: 1, .. })), "{refused:?}");
    // An expected selection that its own logits do not give.
    let spoil = |change: &dyn Fn(&mut Expected), tensor: &str, row: usize, slot: usize| {
        let mut spoilt = strict.clone();
        change(&mut spoilt);
        let refused = compare(&step, &got, &spoilt, Some(dot));
        let named = matches!(refused, Err(Mismatch::Expected { tensor: t, row: r, slot: s, .. }) if (t, r, s) == (tensor, row, slot));
        assert!(named, "{tensor}: {refused:?}");
    };
    spoil(&|e| e.counts.as_mut().unwrap()[1] = 128, "expected.counts", 1, 0);
    spoil(&|e| e.ids.as_mut().unwrap()[128 + 127] = 0, "expected.ids", 1, 127);
    spoil(&|e| e.rows.as_mut().unwrap()[2 * 128] = 0, "expected.rows", 2, 0);
}

#[test]
fn a_selection_that_its_own_logits_do_not_give_never_matches() {
    let step = gaussian();
    let logits = step::logits(&step, dot_exact);
    let selected = step::select(&step, &logits).unwrap();
    let good = answer(&step, logits);
    assert!(check(&step, &good, &selected, None, None).unwrap().compared.is_empty(), "nothing expected is fine");
    let spoil = |change: &dyn Fn(&mut Answer)| {
        let mut spoilt = good.clone();
        change(&mut spoilt);
        // Even if the file expects the same.
        let expected = expecting(&spoilt, Tolerance::BitExact);
        for expected in [None, Some(&expected)] {
            let refused = check(&step, &spoilt, &selected, expected, None);
            assert!(matches!(refused, Err(Mismatch::Selection(_))), "{refused:?}");
        }
    };
    spoil(&|a| a.ids[0] += 1);
    spoil(&|a| a.rows[200] += 1);
    spoil(&|a| a.counts[2] = 1);
    spoil(&|a| a.ids[2 * 128 + 5] = 0);
}

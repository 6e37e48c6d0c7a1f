//! A device's answer against the oracle and against a file's expected answers.
//!
//! 1. The selection must be exact for the logits that the device itself produced: ids, rows and counts equal the
//!    oracle's, whatever the tolerance.
//! 2. Under `bit-exact`, everything expected is equal bit for bit.
//! 3. Under `N BF16 ulp per logit`, each logit lies within N ulp of the expected one (values between them in the order
//!    of keys), counts are equal, a key that only one of both selected has an expected logit within N ulp of the expected
//!    threshold, and keys that both selected have the same physical row.
//! 4. Where 3 fails and the device's dot product is known bit for bit, the difference may be the tensor core's alone: a dot
//!    that is off by 2^-13 can flip a rounding of the head sum, and a sum that cancels shows that as any number of ulp.
//!    That is accepted only with no slack at all: every logit equals the oracle's with the device's dot product **bit for
//!    bit**, the expected logits are within N ulp of the oracle's with exact dot products, and the expected selection is
//!    exact for the expected logits.

mod mismatch;
pub mod query;

pub use mismatch::Mismatch;

use dsa_core::DecodeStep;
use dsa_core::consts::DIM;
use dsa_core::numerics::order16::{KEY_NONE, key_of};
use dsa_core::oracle::score::dot_exact;
use dsa_core::oracle::select::{Selection, SelectionMismatch, check_selection};
use dsa_core::oracle::step;
use half::bf16;
use ptx::Target;
use ptx_sim::numeric::tensor_core::dot_e4m3_k32;

use crate::step_file::{Expected, ExpectedLogits, Tolerance};

/// What a device computed for a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// BF16 logits: row `t` has as many as it sees keys.
    pub logits: Vec<Vec<u16>>,
    /// `[rows, topk]`, -1 past the count.
    pub ids: Vec<i32>,
    /// `[rows, topk]`, -1 past the count.
    pub rows: Vec<i32>,
    /// `[rows]`.
    pub counts: Vec<i32>,
}

/// The dot product of two E4M3 vectors as a device computes it.
pub type Dot = fn(&[u8; DIM], &[u8; DIM]) -> f32;

/// The dot product of a target's score kernel, if it is known bit for bit.
pub fn device_dot(target: Target) -> Option<Dot> {
    match target {
        Target::Sm90a => Some(|query, key| {
            let (query, key) = (query.as_chunks().0, key.as_chunks().0);
            query.iter().zip(key).fold(0.0, |sum, (query, key)| dot_e4m3_k32(query, key, sum))
        }),
        Target::Sm100a => None,
    }
}

/// What was compared, and how close it came.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// How close the logits came, if any are expected.
    pub logits: Option<LogitsReport>,
    /// Names of the other expected tensors that were compared.
    pub compared: Vec<&'static str>,
    /// Selected keys that are not among the expected ones.
    pub ids_differing: usize,
    /// Whether rule 4 was needed: the differences are exactly the tensor core's.
    pub modelled: bool,
}

/// How close logits came to the expected ones.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LogitsReport {
    /// Logits compared.
    pub compared: usize,
    /// Those that differ.
    pub differing: usize,
    /// Those that differ by more than the tolerance.
    pub beyond: usize,
    /// The largest difference in BF16 ulp.
    pub ulp_max: u16,
    /// The largest difference of two finite values.
    pub difference_max: f32,
}

/// Compares `answer` with `selected`, the oracle's selection for the answer's own logits
/// ([`oracle::step::select`](dsa_core::oracle::step::select)), and with `expected` if there is any. `dot` is the device's dot
/// product, if known.
///
/// # Errors
/// The first difference that is not allowed.
///
/// # Panics
/// If `step` does not pass [`DecodeStep::validate`], or a row of logits is shorter than the row.
pub fn check(
    step: &DecodeStep,
    answer: &Answer,
    selected: &[Selection],
    expected: Option<&Expected>,
    dot: Option<Dot>,
) -> Result<Report, Mismatch> {
    let mut report = Report { logits: None, compared: Vec::new(), ids_differing: 0, modelled: false };
    if let Some(expected) = expected {
        report.logits = expected.logits.as_ref().map(|logits| measure(&answer.logits, logits, expected.tolerance));
        let names = [("counts", &expected.counts), ("ids", &expected.ids), ("rows", &expected.rows)];
        report.compared = names.iter().filter(|(_, tensor)| tensor.is_some()).map(|(name, _)| *name).collect();
        if let Some(ids) = &expected.ids {
            let rows = answer.ids.chunks(step.topk).zip(ids.chunks(step.topk));
            report.ids_differing = rows.map(|(got, want)| missing_from(prefix(want), prefix(got))).sum();
        }
        if let Err(mismatch) = compare_all(step, answer, expected) {
            match (dot, expected.tolerance, &expected.logits) {
                (Some(dot), Tolerance::Ulp(ulp_max), Some(logits)) => {
                    explain(step, answer, expected, (logits, ulp_max), dot, mismatch)?;
                    report.modelled = true;
                }
                _ => return Err(mismatch),
            }
        }
    }
    // Last: a difference from the file says more than one from the oracle.
    check_selection(selected, step.topk, &answer.rows, &answer.counts, Some(&answer.ids))?;
    Ok(report)
}

/// BF16 values between two logits, in the order of keys.
fn ulps_apart(a: u16, b: u16) -> u16 {
    key_of(a).abs_diff(key_of(b))
}

/// Whether two logits are as close as the tolerance demands.
fn close(a: u16, b: u16, tolerance: Tolerance) -> bool {
    match tolerance {
        Tolerance::BitExact => a == b,
        Tolerance::Ulp(ulp_max) => ulps_apart(a, b) <= ulp_max,
    }
}

/// The expected logits of a row of `length` keys.
fn expected_row(logits: &ExpectedLogits, row: usize, length: usize) -> &[u16] {
    &logits.bits[row * logits.width..][..length]
}

fn measure(got: &[Vec<u16>], want: &ExpectedLogits, tolerance: Tolerance) -> LogitsReport {
    let mut report = LogitsReport::default();
    for (row, logits) in got.iter().enumerate() {
        for (&got, &want) in logits.iter().zip(expected_row(want, row, logits.len())) {
            report.compared += 1;
            report.differing += usize::from(got != want);
            report.beyond += usize::from(!close(got, want, tolerance));
            report.ulp_max = report.ulp_max.max(ulps_apart(got, want));
            let difference = (bf16::from_bits(got).to_f32() - bf16::from_bits(want).to_f32()).abs();
            if difference.is_finite() {
                report.difference_max = report.difference_max.max(difference);
            }
        }
    }
    report
}

/// Rules 2 and 3.
fn compare_all(step: &DecodeStep, answer: &Answer, expected: &Expected) -> Result<(), Mismatch> {
    let tolerance = expected.tolerance;
    if let Some(logits) = &expected.logits {
        for (row, got) in answer.logits.iter().enumerate() {
            let want = expected_row(logits, row, got.len());
            if let Some(key) = (0..got.len()).find(|&key| !close(got[key], want[key], tolerance)) {
                let (got, want) = (got[key], want[key]);
                return Err(Mismatch::Logit { row, key, got, want, ulp: ulps_apart(got, want), tolerance });
            }
        }
    }
    if let Some(counts) = &expected.counts {
        compare("expected.counts", &answer.counts, counts, 1)?;
    }
    match (tolerance, &expected.logits, &expected.ids) {
        (Tolerance::Ulp(ulp_max), Some(logits), Some(ids)) => {
            (0..step.rows).try_for_each(|row| compare_near(step, answer, expected, (logits, ulp_max), ids, row))
        }
        _ => {
            if let Some(ids) = &expected.ids {
                compare("expected.ids", &answer.ids, ids, step.topk)?;
            }
            if let Some(rows) = &expected.rows {
                compare("expected.rows", &answer.rows, rows, step.topk)?;
            }
            Ok(())
        }
    }
}

/// Equality of two tensors of `width` slots per row.
fn compare(tensor: &'static str, got: &[i32], want: &[i32], width: usize) -> Result<(), Mismatch> {
    match got.iter().zip(want).position(|(got, want)| got != want) {
        None => Ok(()),
        Some(at) => Err(Mismatch::Value { tensor, row: at / width, slot: at % width, got: got[at], want: want[at] }),
    }
}

/// Rule 3 for the selection of one row.
fn compare_near(
    step: &DecodeStep,
    answer: &Answer,
    expected: &Expected,
    (logits, ulp_max): (&ExpectedLogits, u16),
    expected_ids: &[i32],
    row: usize,
) -> Result<(), Mismatch> {
    let slots = row * step.topk..(row + 1) * step.topk;
    let (got_ids, want_ids) = (&answer.ids[slots.clone()], &expected_ids[slots.clone()]);
    let (got, want) = (prefix(got_ids), prefix(want_ids));
    let length = step.row_len(row);
    for (slot, &id) in want.iter().enumerate() {
        if id as usize >= length {
            return Err(Mismatch::NoSuchKey { row, slot, id, length });
        }
        if slot > 0 && id <= want[slot - 1] {
            return Err(Mismatch::NotAscending { row, slot, id, before: want[slot - 1] });
        }
    }
    if let Some(slot) = got.iter().position(|&id| id as usize >= length) {
        return Err(
            SelectionMismatch::Id { row, slot, got: got[slot], want: want.get(slot).copied().unwrap_or(-1) }.into()
        );
    }
    compare_filler("expected.ids", row, got.len().min(want.len()), got_ids, want_ids)?;
    if let Some(rows) = &expected.rows {
        compare_filler("expected.rows", row, got.len(), &answer.rows[slots.clone()], &rows[slots.clone()])?;
    }
    let logit = |id: i32| expected_row(logits, row, length)[id as usize];
    let threshold = want.iter().map(|&id| key_of(logit(id))).min().unwrap_or(KEY_NONE);
    let near = |id: i32, expected_only: bool| {
        let ulp = key_of(logit(id)).abs_diff(threshold);
        if ulp <= ulp_max {
            return Ok(());
        }
        let tolerance = expected.tolerance;
        Err(Mismatch::Id { row, id, expected_only, logit: logit(id), threshold, ulp, tolerance })
    };
    for (slot, &id) in got.iter().enumerate() {
        match want.binary_search(&id) {
            Err(_) => near(id, false)?,
            Ok(other) => {
                let Some(rows) = &expected.rows else { continue };
                let (got, want) = (answer.rows[slots.start + slot], rows[slots.start + other]);
                if got != want {
                    return Err(Mismatch::Value { tensor: "expected.rows", row, slot: other, got, want });
                }
            }
        }
    }
    want.iter().filter(|id| got.binary_search(id).is_err()).try_for_each(|&id| near(id, true))
}

/// Equality of a row's slots past its count.
fn compare_filler(tensor: &'static str, row: usize, count: usize, got: &[i32], want: &[i32]) -> Result<(), Mismatch> {
    match (count..got.len()).find(|&slot| got[slot] != want[slot]) {
        None => Ok(()),
        Some(slot) => Err(Mismatch::Value { tensor, row, slot, got: got[slot], want: want[slot] }),
    }
}

/// Rule 4; `mismatch` is what it would explain.
fn explain(
    step: &DecodeStep,
    answer: &Answer,
    expected: &Expected,
    (logits, ulp_max): (&ExpectedLogits, u16),
    dot: Dot,
    mismatch: Mismatch,
) -> Result<(), Mismatch> {
    if step::logits(step, dot) != answer.logits {
        return Err(mismatch);
    }
    let exact = step::logits(step, dot_exact);
    for (row, exact) in exact.iter().enumerate() {
        let want = expected_row(logits, row, exact.len());
        if let Some(key) = (0..exact.len()).find(|&key| ulps_apart(exact[key], want[key]) > ulp_max) {
            let (exact, want) = (exact[key], want[key]);
            let (got, ulp) = (answer.logits[row][key], ulps_apart(exact, want));
            return Err(Mismatch::ExpectedLogit { row, key, got, want, exact, ulp, tolerance: expected.tolerance });
        }
    }
    let own: Vec<Vec<u16>> = (0..step.rows).map(|row| expected_row(logits, row, step.row_len(row)).to_vec()).collect();
    let selected = step::select(step, &own)?;
    for (row, selected) in selected.iter().enumerate() {
        let slots = row * step.topk..(row + 1) * step.topk;
        let same = |tensor, want: &[i32], found: &[i32]| {
            let Some(slot) = (0..want.len()).find(|&slot| want[slot] != found[slot]) else { return Ok(()) };
            Err(Mismatch::Expected { tensor, row, slot, found: found[slot], implied: want[slot] })
        };
        if let Some(counts) = &expected.counts {
            same("expected.counts", &[selected.count as i32], &counts[row..=row])?;
        }
        if let Some(ids) = &expected.ids {
            same("expected.ids", &selected.ids, &ids[slots.clone()])?;
        }
        if let Some(rows) = &expected.rows {
            same("expected.rows", &selected.rows, &rows[slots])?;
        }
    }
    Ok(())
}

/// The ids before the filler.
fn prefix(ids: &[i32]) -> &[i32] {
    &ids[..ids.iter().position(|&id| id < 0).unwrap_or(ids.len())]
}

/// How many of `ids` are not in `others`, which ascend.
fn missing_from(others: &[i32], ids: &[i32]) -> usize {
    ids.iter().filter(|id| others.binary_search(id).is_err()).count()
}

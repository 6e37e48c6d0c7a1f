//! The oracles against independently computed answers.

use dsa_core::DecodeStep;
use dsa_core::consts::PAGE;
use dsa_core::layout::fp8_page::{self, ScaleForm};
use dsa_core::numerics::order16::key_of;
use dsa_core::oracle::{score::dot_exact, select::check_selection, step};
use safetensors::{Dtype, SafeTensors};

struct Fixture {
    step: DecodeStep,
    logits: Vec<u16>,
    width: usize,
    ids: Vec<i32>,
    rows: Vec<i32>,
    counts: Vec<i32>,
}

fn load(name: &str) -> Fixture {
    let path = format!("{}/../../tests/fixtures/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    let number = |key: &str| -> usize { metadata[key].parse().unwrap() };
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let get = |tensor: &str, dtype: Dtype| {
        let view = tensors.tensor(tensor).unwrap();
        assert_eq!(view.dtype(), dtype, "{tensor}");
        (view.data().to_vec(), view.shape().to_vec())
    };
    let i32s = |tensor: &str| {
        let (data, shape) = get(tensor, Dtype::I32);
        (data.as_chunks().0.iter().map(|&word| i32::from_le_bytes(word)).collect::<Vec<_>>(), shape)
    };
    let u16s = |tensor: &str| {
        let (data, shape) = get(tensor, Dtype::BF16);
        (data.as_chunks().0.iter().map(|&half| u16::from_le_bytes(half)).collect::<Vec<_>>(), shape)
    };
    let (queries, query_shape) = get("q", Dtype::F8_E4M3);
    let (cache, cache_shape) = get("index_cache", Dtype::U8);
    let (table, table_shape) = i32s("index_table");
    let (kv_table, kv_shape) = i32s("kv_table");
    let (logits, logits_shape) = u16s("expected.logits");
    let step = DecodeStep {
        q: number("q_per_request"),
        rows: query_shape[0],
        topk: number("topk"),
        context_len_max: logits_shape[1],
        queries,
        weights: u16s("head_weights").0,
        cache,
        page_stride: fp8_page::BYTES,
        blocks: cache_shape[0],
        scale_form: ScaleForm::Ue8m0,
        table,
        table_stride: table_shape[1],
        table_width: table_shape[1],
        row_ends: i32s("row_ends").0,
        kv_table,
        kv_table_stride: kv_shape[1],
        kv_table_width: kv_shape[1],
        kv_page: number("kv_page"),
        kv_block_rows: number("kv_block_rows"),
    };
    assert_eq!(cache_shape[1] * cache_shape[2], fp8_page::BYTES);
    step.validate().unwrap();
    let ids = i32s("expected.ids").0;
    Fixture {
        step,
        logits,
        width: logits_shape[1],
        ids,
        rows: i32s("expected.rows").0,
        counts: i32s("expected.counts").0,
    }
}

/// BF16 values between two logits, along the order of keys.
fn ulps_apart(a: u16, b: u16) -> u16 {
    key_of(a).abs_diff(key_of(b))
}

#[track_caller]
fn check(name: &str, ulps_max: u16) {
    let fixture = load(name);
    let logits = step::logits(&fixture.step, dot_exact);
    for (row, got) in logits.iter().enumerate() {
        let want = &fixture.logits[row * fixture.width..(row + 1) * fixture.width];
        assert_eq!(got.len(), usize::try_from(fixture.step.row_ends[row]).unwrap_or(0), "row {row}");
        for (token, (&got, &want)) in got.iter().zip(want).enumerate() {
            assert!(ulps_apart(got, want) <= ulps_max, "row {row} token {token}: got {got:04x} want {want:04x}");
        }
        assert!(want[got.len()..].iter().all(|&bits| bits == 0), "row {row}: the fixture is zero past the row's end");
    }
    // The selection is exact for the fixture's own logits, whatever the tolerance of the logits.
    let own: Vec<Vec<u16>> =
        (0..fixture.step.rows).map(|row| fixture.logits[row * fixture.width..][..logits[row].len()].to_vec()).collect();
    let selected = step::select(&fixture.step, &own).unwrap();
    check_selection(&selected, fixture.step.topk, &fixture.rows, &fixture.counts, Some(&fixture.ids)).unwrap();
    if ulps_max == 0 {
        assert_eq!(logits, own, "bit for bit");
    }
}

#[test]
fn index_exact_is_reproduced_bit_for_bit() {
    check("index_exact", 0);
}

#[test]
fn index_exact_ties_is_reproduced_bit_for_bit() {
    check("index_exact_ties", 0);
}

#[test]
fn index_realtext_is_within_two_ulp() {
    check("index_realtext", 2);
}

#[test]
fn index_realtext_mtp_is_within_two_ulp() {
    check("index_realtext_mtp", 2);
}

#[test]
fn fixture_tables_hold_garbage_past_each_request() {
    let step = load("index_exact").step;
    let needed = |request: usize| step.row_len(request * step.q).div_ceil(PAGE);
    let garbage = (0..step.requests()).flat_map(|request| &step.table_row(request)[needed(request)..]);
    assert!(garbage.clone().count() > 0 && garbage.copied().all(|id| id < 0 || id as usize >= step.blocks));
}

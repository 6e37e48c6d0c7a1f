//! How close a device's MLA query must be to the answers of its file.
//!
//! | output | tolerance |
//! |---|---|
//! | q_c | 1 BF16 ulp |
//! | BF16 query | 2 ulp, or 1/256 of the head row's largest magnitude |
//! | FP8 query | 1 code, or that; at most 1 % of the codes differ |
//! | latent codes of the cache | 1 code; at most 1 % differ |
//! | scales, rope and bytes of the cache that belong to no token | exact |

use dsa_core::consts::Q_LORA;
use dsa_core::layout::mla_entry::{DS_LATENT, FP8_LATENT, MlaCacheForm, NVFP4_LATENT};
use dsa_core::layout::mla_rows::QUERY;
use dsa_core::numerics::{bf16, e4m3, order16};

use crate::step_file::query::{QueryFile, cache_name};

/// What a device computed for the first `tokens` tokens of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueryAnswer {
    /// Tokens.
    pub tokens: usize,
    /// BF16 `[tokens, 1536]`.
    pub q_c: Vec<u16>,
    /// `[tokens, heads, 576]` of BF16 beside `fp8_ds_mla`, else of E4M3, as bytes.
    pub query: Vec<u8>,
    /// `[pages, page_tokens, bytes]`
    pub cache: Vec<u8>,
}

/// An output that was compared: its name in the file, elements, and how many differ within the tolerance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compared {
    /// Name of the expected tensor.
    pub name: &'static str,
    /// Elements compared.
    pub elements: usize,
    /// Elements that differ.
    pub differing: usize,
}

/// The first element out of tolerance.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name}, {place}: got {got}, expected {want}")]
pub struct QueryMismatch {
    /// Name of the expected tensor.
    pub name: &'static str,
    /// Which element.
    pub place: String,
    /// The device's value.
    pub got: String,
    /// The file's.
    pub want: String,
}

/// Compares an answer with whatever the file expects.
///
/// # Errors
/// The first element out of tolerance, or too many that differ at all.
pub fn check_query(file: &QueryFile, form: MlaCacheForm, answer: &QueryAnswer) -> Result<Vec<Compared>, QueryMismatch> {
    let mut compared = Vec::new();
    let expected = &file.expected;
    if let Some(want) = &expected.q_c {
        compared.push(check_q_c(&answer.q_c, want)?);
    }
    match (form, &expected.bf16, &expected.fp8) {
        (MlaCacheForm::Fp8Ds, Some(want), _) => compared.push(check_bf16(file, answer, want)?),
        (MlaCacheForm::Fp8Divide | MlaCacheForm::Fp8Multiply | MlaCacheForm::Nvfp4Ds, bf16, Some(want)) => {
            compared.push(check_fp8(file, answer, want, bf16.as_deref())?);
        }
        _ => {}
    }
    let at = MlaCacheForm::ALL.iter().position(|f| *f == form).expect("ALL has every form");
    if let Some(want) = &expected.caches[at] {
        compared.push(check_cache(file, form, answer, want)?);
    }
    Ok(compared)
}

fn ulps(a: u16, b: u16) -> u16 {
    order16::key_of(a).abs_diff(order16::key_of(b))
}

/// E4M3 codes between two, along the order of numbers.
fn steps(a: u8, b: u8) -> u32 {
    let line = |code: u8| i32::from(code & 0x7F) * if code & 0x80 != 0 { -1 } else { 1 };
    line(a).abs_diff(line(b))
}

fn check_q_c(got: &[u16], want: &[u16]) -> Result<Compared, QueryMismatch> {
    let name = "expected.qc";
    let mut differing = 0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        differing += usize::from(got != want);
        if ulps(*got, *want) > 1 {
            let place = format!("token {}, column {}", i / Q_LORA, i % Q_LORA);
            return Err(QueryMismatch { name, place, got: format!("{got:#06x}"), want: format!("{want:#06x}") });
        }
    }
    Ok(Compared { name, elements: got.len(), differing })
}

fn head_place(file: &QueryFile, i: usize) -> String {
    let row = i / QUERY;
    format!("token {}, head {}, column {}", row / file.heads, row % file.heads, i % QUERY)
}

/// Largest magnitude of a head row.
fn largest(row: impl Iterator<Item = f32>) -> f32 {
    row.map(f32::abs).fold(0.0, f32::max)
}

fn check_bf16(file: &QueryFile, answer: &QueryAnswer, want: &[u16]) -> Result<Compared, QueryMismatch> {
    let name = "expected.q_bf16";
    let got: Vec<u16> = answer.query.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
    let mut differing = 0;
    for (row, got) in got.chunks(QUERY).enumerate() {
        let want = &want[row * QUERY..(row + 1) * QUERY];
        let allowed = largest(want.iter().map(|x| bf16::to_f32(*x))) / 256.0;
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            differing += usize::from(got != want);
            let near = (bf16::to_f32(*got) - bf16::to_f32(*want)).abs() <= allowed;
            if ulps(*got, *want) > 2 && !near {
                let place = head_place(file, row * QUERY + i);
                return Err(QueryMismatch { name, place, got: format!("{got:#06x}"), want: format!("{want:#06x}") });
            }
        }
    }
    Ok(Compared { name, elements: got.len(), differing })
}

fn check_fp8(
    file: &QueryFile,
    answer: &QueryAnswer,
    want: &[u8],
    bf16: Option<&[u16]>,
) -> Result<Compared, QueryMismatch> {
    let name = "expected.q_fp8";
    let mut differing = 0;
    for (row, got) in answer.query.chunks(QUERY).enumerate() {
        let range = row * QUERY..(row + 1) * QUERY;
        // Codes saturate, so a row's largest magnitude is that of its BF16 form where the file has it.
        let largest = match bf16 {
            Some(row) => file.q_scale_inv.abs() * largest(row[range.clone()].iter().map(|x| bf16::to_f32(*x))),
            None => largest(want[range.clone()].iter().map(|code| e4m3::to_f32(*code))),
        };
        for (i, (got, want)) in got.iter().zip(&want[range]).enumerate() {
            differing += usize::from(got != want);
            let near = (e4m3::to_f32(*got) - e4m3::to_f32(*want)).abs() <= largest / 256.0;
            if steps(*got, *want) > 1 && !near {
                let place = head_place(file, row * QUERY + i);
                return Err(QueryMismatch { name, place, got: format!("{got:#04x}"), want: format!("{want:#04x}") });
            }
        }
    }
    few(Compared { name, elements: answer.query.len(), differing })
}

fn check_cache(
    file: &QueryFile,
    form: MlaCacheForm,
    answer: &QueryAnswer,
    want: &[u8],
) -> Result<Compared, QueryMismatch> {
    let (name, bytes) = (cache_name(form), form.entry_bytes());
    let latent = match form {
        MlaCacheForm::Fp8Ds => DS_LATENT,
        MlaCacheForm::Fp8Divide | MlaCacheForm::Fp8Multiply => FP8_LATENT,
        MlaCacheForm::Nvfp4Ds => NVFP4_LATENT,
    };
    let mut owned = vec![false; file.pages * file.page_tokens];
    for slot in &file.slots[..answer.tokens] {
        if let Some(owned) = usize::try_from(*slot).ok().and_then(|slot| owned.get_mut(slot)) {
            *owned = true;
        }
    }
    let fresh = vec![file.cache_fill; bytes];
    let (mut elements, mut differing) = (0, 0);
    for (slot, (got, owned)) in answer.cache.chunks(bytes).zip(owned).enumerate() {
        let want = if owned { &want[slot * bytes..(slot + 1) * bytes] } else { &fresh };
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let is_code = owned && latent.contains(&i);
            let close = match form {
                MlaCacheForm::Nvfp4Ds => [0, 4].into_iter().all(|n| nibble_steps(got >> n, want >> n) <= 1),
                MlaCacheForm::Fp8Ds | MlaCacheForm::Fp8Divide | MlaCacheForm::Fp8Multiply => steps(*got, *want) <= 1,
            };
            if got != want && !(is_code && close) {
                let place = format!("page {}, token {}, byte {i}", slot / file.page_tokens, slot % file.page_tokens);
                return Err(QueryMismatch { name, place, got: format!("{got:#04x}"), want: format!("{want:#04x}") });
            }
            elements += usize::from(is_code);
            differing += usize::from(got != want);
        }
    }
    few(Compared { name, elements, differing })
}

/// E2M1 codes between two, along the order of numbers.
fn nibble_steps(a: u8, b: u8) -> u32 {
    let line = |code: u8| i32::from(code & 7) * if code & 8 != 0 { -1 } else { 1 };
    line(a).abs_diff(line(b))
}

/// At most 1 % of codes may differ.
fn few(compared: Compared) -> Result<Compared, QueryMismatch> {
    let Compared { name, elements, differing } = compared;
    if differing * 100 <= elements {
        return Ok(compared);
    }
    let place = format!("all {elements} codes");
    Err(QueryMismatch { name, place, got: format!("{differing} that differ"), want: "at most 1 %".into() })
}

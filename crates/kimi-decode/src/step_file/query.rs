//! MLA query steps as safetensors files.
//!
//! | tensor | dtype, shape | meaning |
//! |---|---|---|
//! | `qkv` | BF16 `[tokens, 2112]` | q_a 1536, kv_c 512, k_pe 64 |
//! | `w_qa`, `w_kva` | BF16 `[1536]`, `[512]` | weights of the norms |
//! | `w_qb` | BF16 `[heads * 192, 1536]` | the query projection |
//! | `w_uk` | BF16 `[heads, 128, 512]` | the absorbed key projection |
//! | `slots` | I64 `[tokens]` | cache slot of each token; negative ones are skipped |
//! | `q_scale_inv`, `k_scale` | F32 `[1]` | scales of an FP8 query and of a per-tensor FP8 cache |
//! | `expected.qc` | BF16 `[tokens, 1536]` | optional |
//! | `expected.q_bf16`, `expected.q_fp8` | BF16, F8_E4M3 `[tokens, heads, 576]` | optional |
//! | `expected.cache_ds`, `_fp8_dsa`, `_fp8_k3`, `_nvfp4` | U8 `[pages, page_tokens, bytes]` | optional |
//!
//! Metadata, as strings: `heads`, `eps`, `pages`, `page_tokens`, `cache_fill` (a byte such as `0xA5`, what a fresh cache holds).

use std::path::Path;

use dsa_core::consts::{CONTEXT_MAX, KV_LORA, MLA_HEADS_MAX, NOPE, Q_HEAD, Q_LORA, REQUESTS_MAX};
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_core::layout::mla_rows::{QKV, QUERY};
use safetensors::Dtype;

use super::error::{Problem, StepFileError};
use super::reader::{self, Reader, u16s};

/// The answers that a file holds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ExpectedQuery {
    /// Normalised compressed queries, BF16 `[tokens, 1536]`.
    pub q_c: Option<Vec<u16>>,
    /// Queries, BF16 `[tokens, heads, 576]`.
    pub bf16: Option<Vec<u16>>,
    /// Queries, E4M3 `[tokens, heads, 576]`.
    pub fp8: Option<Vec<u8>>,
    /// The cache of each form after every token's insert, in the order of [`MlaCacheForm::ALL`].
    pub caches: [Option<Vec<u8>>; 4],
}

/// An MLA query step and its answers.
#[derive(Debug, Clone, PartialEq)]
pub struct QueryFile {
    /// Heads.
    pub heads: usize,
    /// Tokens.
    pub tokens: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Byte that a fresh cache is filled with.
    pub cache_fill: u8,
    /// Of both norms.
    pub eps: f32,
    /// BF16 `[tokens, 2112]`.
    pub qkv: Vec<u16>,
    /// BF16 `[1536]`.
    pub w_qa: Vec<u16>,
    /// BF16 `[512]`.
    pub w_kva: Vec<u16>,
    /// BF16 `[heads * 192, 1536]`.
    pub w_qb: Vec<u16>,
    /// BF16 `[heads, 128, 512]`.
    pub w_uk: Vec<u16>,
    /// `[tokens]`.
    pub slots: Vec<i64>,
    /// Factor of an FP8 query.
    pub q_scale_inv: f32,
    /// Scale of a per-tensor FP8 cache.
    pub k_scale: f32,
    /// Answers.
    pub expected: ExpectedQuery,
}

/// The suffix of a form's `expected.cache_*`.
pub fn cache_name(form: MlaCacheForm) -> &'static str {
    match form {
        MlaCacheForm::Fp8Ds => "expected.cache_ds",
        MlaCacheForm::Fp8Divide => "expected.cache_fp8_dsa",
        MlaCacheForm::Fp8Multiply => "expected.cache_fp8_k3",
        MlaCacheForm::Nvfp4Ds => "expected.cache_nvfp4",
    }
}

impl QueryFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// Whatever makes the file unusable, naming the file, the tensor or metadata key, what was found and what is needed.
    pub fn read(path: &Path) -> Result<Self, StepFileError> {
        let at = |problem| StepFileError { file: path.to_path_buf(), problem };
        let bytes = reader::read(path).map_err(at)?;
        Self::parse(&bytes).map_err(at)
    }

    /// Checks the bytes of a file.
    ///
    /// # Errors
    /// As [`QueryFile::read`].
    pub fn parse(bytes: &[u8]) -> Result<Self, Problem> {
        let file = Reader::new(bytes)?;
        let heads =
            file.number("heads", format!("1..={MLA_HEADS_MAX}"), |heads| (1..=MLA_HEADS_MAX).contains(&heads))?;
        let page_tokens =
            file.number("page_tokens", format!("1..={CONTEXT_MAX}"), |n| (1..=CONTEXT_MAX).contains(&n))?;
        let pages_max = CONTEXT_MAX / page_tokens;
        let pages =
            file.number("pages", format!("0..={pages_max}, {CONTEXT_MAX} tokens in all"), |n| n <= pages_max)?;
        let eps = parsed(&file, "eps", "a number of at least 0", |text| {
            text.parse().ok().filter(|eps: &f32| eps.is_finite() && *eps >= 0.0)
        })?;
        let cache_fill = parsed(&file, "cache_fill", "a byte such as 0xA5", |text| {
            u8::from_str_radix(text.strip_prefix("0x")?, 16).ok()
        })?;

        let needed = format!("[1..={REQUESTS_MAX}, {QKV}]");
        let qkv = file.tensor(
            "qkv",
            Dtype::BF16,
            &needed,
            |shape| matches!(shape, [n, QKV] if (1..=REQUESTS_MAX).contains(n)),
        )?;
        let tokens = qkv.shape()[0];
        let exactly =
            |name, dtype, shape: &[usize]| file.tensor(name, dtype, &format!("{shape:?}"), |found| found == shape);
        let weights = |name, shape: &[usize]| exactly(name, Dtype::BF16, shape).map(|view| u16s(&view));
        let scalar = |name| -> Result<f32, Problem> {
            let view = exactly(name, Dtype::F32, &[1])?;
            Ok(view.data().first_chunk().map_or(0.0, |bytes| f32::from_le_bytes(*bytes)))
        };
        let optional =
            |name, dtype, shape: &[usize]| file.optional(name, dtype, &format!("{shape:?}"), |found| found == shape);
        let slots = exactly("slots", Dtype::I64, &[tokens])?;
        let query = [tokens, heads, QUERY];
        let mut caches = [const { None }; 4];
        for (form, cache) in MlaCacheForm::ALL.into_iter().zip(&mut caches) {
            let shape = [pages, page_tokens, form.entry_bytes()];
            *cache = optional(cache_name(form), Dtype::U8, &shape)?.map(|view| view.data().to_vec());
        }
        Ok(QueryFile {
            heads,
            tokens,
            pages,
            page_tokens,
            cache_fill,
            eps,
            qkv: u16s(&qkv),
            w_qa: weights("w_qa", &[Q_LORA])?,
            w_kva: weights("w_kva", &[KV_LORA])?,
            w_qb: weights("w_qb", &[heads * Q_HEAD, Q_LORA])?,
            w_uk: weights("w_uk", &[heads, NOPE, KV_LORA])?,
            slots: slots.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
            q_scale_inv: scalar("q_scale_inv")?,
            k_scale: scalar("k_scale")?,
            expected: ExpectedQuery {
                q_c: optional("expected.qc", Dtype::BF16, &[tokens, Q_LORA])?.map(|view| u16s(&view)),
                bf16: optional("expected.q_bf16", Dtype::BF16, &query)?.map(|view| u16s(&view)),
                fp8: optional("expected.q_fp8", Dtype::F8_E4M3, &query)?.map(|view| view.data().to_vec()),
                caches,
            },
        })
    }
}

/// A metadata value that `parse` takes.
fn parsed<T>(
    file: &Reader<'_>,
    key: &'static str,
    needed: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<T, Problem> {
    let text = file.key(key).ok_or_else(|| Problem::MissingMetadata { key, needed: needed.to_string() })?;
    parse(text).ok_or_else(|| Problem::bad_metadata(key, text, needed))
}

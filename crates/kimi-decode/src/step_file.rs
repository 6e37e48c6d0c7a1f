//! Decode steps as safetensors files.
//!
//! | tensor | dtype, shape | meaning |
//! |---|---|---|
//! | `q` | F8_E4M3 `[rows, 32, 128]` | indexer queries |
//! | `head_weights` | BF16 `[rows, 32]` | head weights, the query scale folded in |
//! | `index_cache` | U8 `[blocks, 64, 132]` | pages of [`fp8_page`] |
//! | `index_table` | I32 `[requests, pages]` | block ids; past a request's pages anything |
//! | `row_ends` | I32 `[rows]` | keys that each row sees; at or below 0 none |
//! | `kv_table` | I32 `[requests, kv_pages]` | MLA block ids; past a request's pages anything |
//! | `expected.logits` | BF16 `[rows, width]` | optional; what follows a row's end is not looked at |
//! | `expected.ids`, `expected.rows` | I32 `[rows, topk]` | optional: selected keys and physical rows, -1 after |
//! | `expected.counts` | I32 `[rows]` | optional |
//!
//! Metadata, as strings: `q_per_request`, `topk`, `kv_page`, `kv_block_rows`; `scale_form` (`ue8m0`, the default, or
//! `fp32`); with anything expected also `tolerance` ([`Tolerance`]). A file of no rows is a valid, empty step.
//!
//! Unlike a device, which clamps, a file whose row ends exceed a table, or whose needed block ids name no block, is refused.

mod error;
mod header;
pub mod query;
mod reader;

pub use error::{Problem, StepFileError};

use std::path::Path;

use dsa_core::consts::{CONTEXT_MAX, DIM, HEADS, PAGE, POOL_ROWS_MAX, Q_MAX, REQUESTS_MAX, TOPK_MAX, TOPK_MULTIPLE};
use dsa_core::layout::fp8_page::{self, ScaleForm};
use dsa_core::layout::tp_scratch::clamp_row_end;
use dsa_core::{DecodeStep, IndexShape, KvShape};
use reader::{Reader, shape_text};
use safetensors::Dtype;

/// How close the device's answer must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tolerance {
    /// `bit-exact`: logits, ids, rows and counts bit for bit.
    BitExact,
    /// `N BF16 ulp per logit`: see [`check`](crate::check).
    Ulp(u16),
}

impl std::fmt::Display for Tolerance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Tolerance::BitExact => f.write_str("bit-exact"),
            Tolerance::Ulp(ulp) => write!(f, "{ulp} BF16 ulp per logit"),
        }
    }
}

impl std::str::FromStr for Tolerance {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        if text == "bit-exact" {
            return Ok(Tolerance::BitExact);
        }
        let ulp = text.strip_suffix(" BF16 ulp per logit").ok_or(())?;
        ulp.parse().map(Tolerance::Ulp).map_err(|_| ())
    }
}

/// Expected logits: BF16 `[rows, width]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedLogits {
    /// Elements per row, at least the longest row.
    pub width: usize,
    /// The bits.
    pub bits: Vec<u16>,
}

/// The answers that a file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// How close the device must be.
    pub tolerance: Tolerance,
    /// Logits.
    pub logits: Option<ExpectedLogits>,
    /// Selected keys `[rows, topk]`, ascending, -1 after.
    pub ids: Option<Vec<i32>>,
    /// Their physical rows `[rows, topk]`, -1 after.
    pub rows: Option<Vec<i32>>,
    /// Selected keys per row `[rows]`.
    pub counts: Option<Vec<i32>>,
}

/// A decode step and its answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepFile {
    /// The step; [`DecodeStep::validate`] holds, and no row end exceeds a table.
    pub step: DecodeStep,
    /// Sizes of the MLA cache: the smallest pool that holds every block the step needs.
    pub kv: KvShape,
    /// Answers, if the file has any.
    pub expected: Option<Expected>,
}

impl StepFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// Whatever makes the file unusable, naming the file, the tensor or metadata key, what was found and what is needed.
    pub fn read(path: &Path) -> Result<Self, StepFileError> {
        let at = |problem| StepFileError { file: path.to_path_buf(), problem };
        let bytes = reader::read(path).map_err(at)?;
        Self::parse(&bytes).map_err(at)
    }

    /// Keys of the longest row.
    pub fn longest(&self) -> usize {
        (0..self.step.rows).map(|row| self.step.row_len(row)).max().unwrap_or(0)
    }

    /// Elements per row of logits in an output file: as many as the file expects, else as the longest row has.
    pub fn logits_width(&self) -> usize {
        let expected = self.expected.as_ref().and_then(|expected| expected.logits.as_ref());
        expected.map_or_else(|| self.longest(), |logits| logits.width)
    }

    /// Checks the bytes of a file.
    ///
    /// # Errors
    /// As [`StepFile::read`].
    pub fn parse(bytes: &[u8]) -> Result<Self, Problem> {
        let file = Reader::new(bytes)?;
        let q = file.number("q_per_request", format!("1..={Q_MAX}"), |q| (1..=Q_MAX).contains(&q))?;
        let topk =
            file.number("topk", format!("a multiple of {TOPK_MULTIPLE} in {TOPK_MULTIPLE}..={TOPK_MAX}"), |k| {
                IndexShape::new(0, q, k, 1).is_ok()
            })?;
        let kv_page = file.number("kv_page", format!("a power of two up to {CONTEXT_MAX}"), |page| {
            page.is_power_of_two() && page <= CONTEXT_MAX
        })?;
        let kv_block_rows =
            file.number("kv_block_rows", format!("{kv_page} (kv_page) to {POOL_ROWS_MAX}"), |block_rows| {
                block_rows >= kv_page && block_rows as u64 <= POOL_ROWS_MAX
            })?;
        let scale_form = match file.key("scale_form") {
            None | Some("ue8m0") => ScaleForm::Ue8m0,
            Some("fp32") => ScaleForm::Fp32,
            Some(found) => return Err(Problem::bad_metadata("scale_form", found, "ue8m0 or fp32")),
        };

        let queries_needed =
            format!("[rows, {HEADS}, {DIM}], rows a multiple of q_per_request = {q}, at most {REQUESTS_MAX} requests");
        let queries = file.tensor(
            "q",
            Dtype::F8_E4M3,
            &queries_needed,
            |shape| matches!(shape, [rows, HEADS, DIM] if rows.is_multiple_of(q) && rows / q <= REQUESTS_MAX),
        )?;
        let rows = queries.shape()[0];
        let requests = rows / q;
        let exact = |name, dtype, shape: &[usize]| file.tensor(name, dtype, &shape_text(shape), |found| found == shape);
        let weights = exact("head_weights", Dtype::BF16, &[rows, HEADS])?;
        let row_ends = reader::i32s(&exact("row_ends", Dtype::I32, &[rows])?);
        let page_shape = [PAGE, fp8_page::BYTES / PAGE];
        let cache = file.tensor(
            "index_cache",
            Dtype::U8,
            &format!("[blocks, {}, {}], at most 2^31 - 1 blocks", page_shape[0], page_shape[1]),
            |shape| shape.len() == 3 && shape[1..] == page_shape && i32::try_from(shape[0]).is_ok(),
        )?;
        let blocks = cache.shape()[0];
        let table = |name| {
            let needed = format!("[{requests}, pages]: a row per request (rows / q_per_request)");
            file.tensor(name, Dtype::I32, &needed, |shape| matches!(shape, [n, _] if *n == requests))
        };
        let (index_table, kv_table) = (table("index_table")?, table("kv_table")?);
        let (table_width, kv_table_width) = (index_table.shape()[1], kv_table.shape()[1]);

        let length_max = [
            (table_width.saturating_mul(PAGE), format!("index_table has {table_width} pages of {PAGE} keys")),
            (
                kv_table_width.saturating_mul(kv_page),
                format!("kv_table has {kv_table_width} pages of {kv_page} tokens"),
            ),
            (CONTEXT_MAX, "the longest context".to_string()),
        ];
        for (row, &end) in row_ends.iter().enumerate() {
            for (needed, why) in &length_max {
                if clamp_row_end(end, usize::MAX) > *needed {
                    return Err(Problem::RowEnd { row, found: end, needed: *needed, why: why.clone() });
                }
            }
        }
        let longest = row_ends.iter().map(|&end| clamp_row_end(end, CONTEXT_MAX)).max().unwrap_or(0);
        let step = DecodeStep {
            q,
            rows,
            topk,
            context_len_max: longest.max(1),
            queries: queries.data().to_vec(),
            weights: reader::u16s(&weights),
            cache: cache.data().to_vec(),
            page_stride: fp8_page::BYTES,
            blocks,
            scale_form,
            table: reader::i32s(&index_table),
            table_stride: table_width,
            table_width,
            row_ends,
            kv_table: reader::i32s(&kv_table),
            kv_table_stride: kv_table_width,
            kv_table_width,
            kv_page,
            kv_block_rows,
        };
        check_blocks("index_table", &step, PAGE, blocks, |request| step.table_row(request))?;
        // The pool itself is not in the file: any block that a 32-bit physical row can lie in.
        let kv_blocks_max = (POOL_ROWS_MAX / kv_block_rows as u64) as usize;
        let kv_blocks = check_blocks("kv_table", &step, kv_page, kv_blocks_max, |request| step.kv_table_row(request))?;
        step.validate()?;
        let kv = KvShape::new(kv_page, kv_block_rows, kv_blocks)?;
        let expected = read_expected(&file, rows, topk, longest)?;
        Ok(StepFile { step, kv, expected })
    }
}

/// Checks the block ids that a request's rows need, and returns one more than the largest.
fn check_blocks<'a>(
    tensor: &'static str,
    step: &DecodeStep,
    page: usize,
    blocks: usize,
    table_row: impl Fn(usize) -> &'a [i32],
) -> Result<usize, Problem> {
    let mut end = 0;
    for row in 0..step.rows {
        let request = row / step.q;
        for (column, &id) in table_row(request)[..step.row_len(row).div_ceil(page)].iter().enumerate() {
            match usize::try_from(id) {
                Ok(block) if block < blocks => end = end.max(block + 1),
                _ => return Err(Problem::BlockId { tensor, request, column, found: id, blocks }),
            }
        }
    }
    Ok(end)
}

fn read_expected(file: &Reader, rows: usize, topk: usize, longest: usize) -> Result<Option<Expected>, Problem> {
    let optional = |name: &'static str, shape: &[usize]| {
        file.optional(name, Dtype::I32, &shape_text(shape), |found| found == shape)
    };
    let logits_needed = format!("[{rows}, width], width at least {longest}, the longest row");
    let logits = file.optional(
        "expected.logits",
        Dtype::BF16,
        &logits_needed,
        |shape| matches!(shape, [n, width] if *n == rows && *width >= longest),
    )?;
    let ids = optional("expected.ids", &[rows, topk])?;
    let physical = optional("expected.rows", &[rows, topk])?;
    let counts = optional("expected.counts", &[rows])?;
    if logits.is_none() && ids.is_none() && physical.is_none() && counts.is_none() {
        return Ok(None);
    }
    let needed = "bit-exact, or N BF16 ulp per logit";
    let text = file.key("tolerance");
    let text = text.ok_or_else(|| Problem::MissingMetadata { key: "tolerance", needed: needed.into() })?;
    let tolerance = text.parse().map_err(|()| Problem::bad_metadata("tolerance", text, needed))?;
    // Which differences of ids a tolerance allows follows from the expected logits.
    if matches!(tolerance, Tolerance::Ulp(_)) && (ids.is_some() || physical.is_some()) {
        let missing = |tensor: &'static str| Problem::MissingTensor {
            tensor,
            needed: format!("beside the other expected tensors under the tolerance {tolerance}"),
        };
        if logits.is_none() {
            return Err(missing("expected.logits"));
        }
        if ids.is_none() {
            return Err(missing("expected.ids"));
        }
    }
    Ok(Some(Expected {
        tolerance,
        logits: logits.map(|view| ExpectedLogits { width: view.shape()[1], bits: reader::u16s(&view) }),
        ids: ids.as_ref().map(reader::i32s),
        rows: physical.as_ref().map(reader::i32s),
        counts: counts.as_ref().map(reader::i32s),
    }))
}

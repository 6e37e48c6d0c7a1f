//! What will run for a step's sizes, and why, or why nothing can: before there is a device.

use std::fmt;

use dsa_core::layout::mla_entry::{ALIGN, MlaCacheForm};
use dsa_core::layout::mla_rows::QKV;

use crate::error::MlaError;
use crate::query::MlaQuery;
use crate::shape::MlaShape;

/// The sizes of an engine's steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaRequest {
    /// Heads of the rank.
    pub heads: usize,
    /// Most tokens of a step.
    pub batch: usize,
    /// What the cache holds.
    pub form: MlaCacheForm,
    /// Tokens per cache page.
    pub page_tokens: usize,
    /// Elements from one `qkv` row to the next.
    pub qkv_stride: usize,
    /// Bytes from one cache page to the next.
    pub page_stride: usize,
    /// Bytes from one entry of a page to the next.
    pub token_stride: usize,
}

impl MlaRequest {
    /// Contiguous rows, entries and pages.
    pub fn contiguous(heads: usize, batch: usize, form: MlaCacheForm, page_tokens: usize) -> MlaRequest {
        let token_stride = form.entry_bytes();
        let page_stride = page_tokens.saturating_mul(token_stride);
        MlaRequest { heads, batch, form, page_tokens, qkv_stride: QKV, page_stride, token_stride }
    }
}

/// What will run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaPlan {
    shape: MlaShape,
}

impl MlaPlan {
    /// The kernel's specialisation, to which flags may be added.
    pub fn shape(&self) -> MlaShape {
        self.shape
    }

    /// Clusters of a full step's launch.
    pub fn clusters(&self) -> u32 {
        let [_, heads, groups] = self.shape.grid(self.shape.batch() as usize);
        heads * groups
    }
}

impl fmt::Display for MlaPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = &self.shape;
        let clusters = self.clusters();
        write!(f, "{}: {clusters} {}", shape.name(), shape.plan())
    }
}

impl MlaQuery {
    /// What will run for steps of these sizes.
    ///
    /// # Errors
    /// Why nothing can: heads, batch or page outside the limits, strides that the kernels cannot use.
    pub fn plan(request: &MlaRequest) -> Result<MlaPlan, MlaError> {
        let shape = MlaShape::new(request.heads, request.batch, request.form, request.page_tokens)?;
        let MlaRequest { qkv_stride, page_stride, token_stride, .. } = *request;
        check_strides(&shape, qkv_stride, page_stride, token_stride)?;
        Ok(MlaPlan { shape })
    }
}

/// Checks strides against the kernels' accesses of 16 bytes and their 32-bit arguments.
pub(crate) fn check_strides(
    shape: &MlaShape,
    qkv_stride: usize,
    page_stride: usize,
    token_stride: usize,
) -> Result<(), MlaError> {
    check_stride("row stride of qkv in elements", qkv_stride, QKV, ALIGN / 2)?;
    check_stride("token stride of the cache in bytes", token_stride, shape.form().entry_bytes(), ALIGN)?;
    check_stride("page stride of the cache in bytes", page_stride, page_bytes(shape, token_stride), ALIGN)?;
    // The kernels form a row's bytes in 32 bits.
    word("row stride of qkv in bytes", qkv_stride.saturating_mul(2))?;
    word("token stride of the cache in bytes", token_stride)?;
    Ok(())
}

/// Bytes from a page's start to the end of its last entry.
pub(crate) fn page_bytes(shape: &MlaShape, token_stride: usize) -> usize {
    (shape.page_tokens() as usize - 1).saturating_mul(token_stride).saturating_add(shape.form().entry_bytes())
}

fn check_stride(what: &'static str, stride: usize, needed: usize, multiple: usize) -> Result<(), MlaError> {
    if stride >= needed && stride.is_multiple_of(multiple) {
        Ok(())
    } else {
        Err(MlaError::StrideUnsupported { what, stride, needed, multiple })
    }
}

pub(crate) fn word(what: &'static str, value: usize) -> Result<u32, MlaError> {
    u32::try_from(value).map_err(|_| MlaError::TooLarge { what, value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::{PAGE_TOKENS_MAX, TILES, TOKENS_MAX};

    fn contiguous(heads: usize, batch: usize) -> MlaRequest {
        MlaRequest::contiguous(heads, batch, MlaCacheForm::Fp8Ds, 64)
    }

    #[test]
    fn every_number_of_heads_and_tokens_is_planned_or_refused_with_its_reason() {
        for heads in 0..=97 {
            for batch in 0..=1025 {
                let plan = MlaQuery::plan(&contiguous(heads, batch));
                match (heads, batch) {
                    (1..=96, 1..=1024) => {
                        let plan = plan.unwrap();
                        let (tokens, shape) = (plan.shape().tokens(), plan.shape());
                        assert!(if shape.is_tiled() { TILES.contains(&tokens) } else { tokens <= TOKENS_MAX });
                        let [parts, y, groups] = shape.grid(batch);
                        assert_eq!((parts, y), (shape.cluster(), heads as u32));
                        assert!(groups * tokens >= batch as u32 && (groups - 1) * tokens < batch as u32);
                        assert_eq!(plan.clusters(), heads as u32 * groups);
                    }
                    (1..=96, _) => assert!(matches!(plan, Err(MlaError::BatchOutOfRange { batch: b }) if b == batch)),
                    _ => assert!(matches!(plan, Err(MlaError::HeadsOutOfRange { heads: h }) if h == heads)),
                }
            }
        }
    }

    #[test]
    fn pages_and_strides_are_planned_or_refused_with_their_reason() {
        for form in MlaCacheForm::ALL {
            let entry = form.entry_bytes();
            for page_tokens in [1, 7, 64, PAGE_TOKENS_MAX] {
                let request = MlaRequest::contiguous(6, 4, form, page_tokens);
                MlaQuery::plan(&request).unwrap();
                let wider = MlaRequest { qkv_stride: QKV + 8, token_stride: entry + 16, ..request };
                let page = page_tokens * (entry + 16);
                MlaQuery::plan(&MlaRequest { page_stride: page, ..wider }).unwrap();
                let refused = |request: MlaRequest| match MlaQuery::plan(&request).unwrap_err() {
                    MlaError::StrideUnsupported { what, .. } | MlaError::TooLarge { what, .. } => what,
                    other => panic!("{other}"),
                };
                for qkv_stride in [0, QKV - 8, QKV + 4, 1 << 31] {
                    assert!(refused(MlaRequest { qkv_stride, ..request }).contains("qkv"), "{qkv_stride}");
                }
                for token_stride in [0, entry - 16, entry + 8] {
                    assert!(refused(MlaRequest { token_stride, ..request }).contains("token"), "{token_stride}");
                }
                for page_stride in [0, page_tokens * entry - 16, page_tokens * entry + 8] {
                    assert!(refused(MlaRequest { page_stride, ..request }).contains("page"), "{page_stride}");
                }
                let huge = MlaRequest { token_stride: 1 << 32, page_stride: usize::MAX & !15, ..request };
                assert!(page_tokens > 1 << 19 || refused(huge).contains("token"));
            }
        }
        for page_tokens in [0, PAGE_TOKENS_MAX + 1] {
            let request = MlaRequest { page_tokens, ..contiguous(6, 4) };
            assert!(matches!(MlaQuery::plan(&request), Err(MlaError::PageOutOfRange { .. })), "{page_tokens}");
        }
    }

    #[test]
    fn a_plan_says_what_runs() {
        let text = |heads, batch| MlaQuery::plan(&contiguous(heads, batch)).unwrap().to_string();
        assert_eq!(
            text(6, 1),
            "mla_query_c16_t1_fp8ds_page64: 6 clusters of 16 CTAs, one head each (few heads), tokens per cluster: 1 (the \
             whole batch reads the weights once, FP32 FMAs)"
        );
        assert!(text(12, 64).contains("mla_query_tiled_t64_fp8ds_page64: 12 clusters of 8 CTAs"), "{}", text(12, 64));
    }
}

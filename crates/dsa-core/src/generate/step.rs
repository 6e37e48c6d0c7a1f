//! Whole decode steps with hostile surroundings: shuffled pages, garbage table entries past each request, random bytes
//! wherever no key is, strided tables and pages.

use super::rng::SplitMix64;
use crate::consts::{DIM, HEADS, PAGE};
use crate::error::ShapeError;
use crate::layout::fp8_page::{self, ScaleForm};
use crate::layout::query_row;
use crate::layout::tp_scratch::clamp_row_end;
use crate::numerics::{bf16, e4m3, pow2};
use crate::step::DecodeStep;

/// What queries, keys, weights and scales hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Contents {
    /// Codes in -2..=2 and small weights. Every dot product is an integer of at most 512, exact in any order of summation
    /// and under a tensor core's 13 fraction bits: logits must be equal bit for bit on every device.
    SmallIntegers,
    /// Roughly normal queries, keys and weights; the dot product depends on the accumulator.
    Gaussian,
    /// As `SmallIntegers`, but some keys hold NaN codes, some weights are NaN, infinite or -0, and some scales are extreme.
    Hostile,
}

/// Which step to make. Start from [`StepSpec::new`] and change fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepSpec {
    /// Seed of everything random.
    pub seed: u64,
    /// Rows per request.
    pub q: usize,
    /// Keys picked per row.
    pub topk: usize,
    /// Keys that each row sees, `q` consecutive rows per request. Ends above `context_len_max` are legal and clamped.
    pub row_ends: Vec<i32>,
    /// Longest context, in tokens: the tables' width follows from it.
    pub context_len_max: usize,
    /// Contents of queries, keys, weights and scales.
    pub contents: Contents,
    /// How key scales are stored.
    pub scale_form: ScaleForm,
    /// Bytes from one page of the index cache to the next.
    pub page_stride: usize,
    /// Blocks of the index cache that no request uses.
    pub spare_blocks: usize,
    /// Entries between the rows of both tables.
    pub table_gap: usize,
    /// Tokens per MLA page.
    pub kv_page: usize,
    /// MLA cache rows from one block to the next.
    pub kv_block_rows: usize,
    /// Smallest MLA block id in use: raise it for physical rows near 2^31.
    pub kv_block_first: usize,
}

impl StepSpec {
    /// A step of small integers, UE8M0 scales, dense pages, MLA pages of 64, with two garbage columns in the tables.
    pub fn new(seed: u64, q: usize, topk: usize, row_ends: &[i32]) -> Self {
        let longest = row_ends.iter().map(|&end| clamp_row_end(end, usize::MAX)).max().unwrap_or(0);
        Self {
            seed,
            q,
            topk,
            row_ends: row_ends.to_vec(),
            context_len_max: longest.next_multiple_of(PAGE) + 2 * PAGE,
            contents: Contents::SmallIntegers,
            scale_form: ScaleForm::Ue8m0,
            page_stride: fp8_page::BYTES,
            spare_blocks: 3,
            table_gap: 3,
            kv_page: 64,
            kv_block_rows: 64,
            kv_block_first: 0,
        }
    }

    /// Makes the step.
    ///
    /// # Errors
    /// The sizes violate a limit: see [`DecodeStep::validate`].
    pub fn build(&self) -> Result<DecodeStep, ShapeError> {
        // Sizes first: the generator itself relies on them.
        let shape = crate::IndexShape::from_rows(self.row_ends.len(), self.q, self.topk, self.context_len_max)?;
        crate::IndexCacheShape::new(0, fp8_page::BYTES, self.page_stride)?;
        crate::KvShape::new(self.kv_page, self.kv_block_rows, 0)?;
        let mut rng = SplitMix64::new(self.seed);
        let rows = shape.rows();
        let lens: Vec<usize> = self
            .row_ends
            .chunks_exact(self.q)
            .map(|ends| ends.iter().map(|&end| clamp_row_end(end, self.context_len_max)).max().unwrap_or(0))
            .collect();
        let pages: usize = lens.iter().map(|len| len.div_ceil(PAGE)).sum();
        let kv_pages: usize = lens.iter().map(|len| len.div_ceil(self.kv_page)).sum();
        let blocks = pages + self.spare_blocks;
        crate::KvShape::new(self.kv_page, self.kv_block_rows, self.kv_block_first + kv_pages)?;

        let table_width = self.context_len_max.div_ceil(PAGE);
        let kv_table_width = self.context_len_max.div_ceil(self.kv_page);
        let (table_stride, kv_table_stride) = (table_width + self.table_gap, kv_table_width + self.table_gap);
        let table = paged_table(&mut rng, &lens, PAGE, table_stride, 0, blocks);
        let kv_blocks = self.kv_block_first..self.kv_block_first + kv_pages;
        let kv_table = paged_table(&mut rng, &lens, self.kv_page, kv_table_stride, kv_blocks.start, kv_blocks.end);

        let codes = CodePool::new(&mut rng, self.contents);
        let mut queries = vec![0; rows * query_row::BYTES];
        codes.fill(&mut rng, &mut queries);
        let weights = (0..rows * HEADS).map(|_| self.weight(&mut rng)).collect();
        let mut cache = vec![0; blocks * self.page_stride];
        rng.fill(&mut cache);
        for (request, &len) in lens.iter().enumerate() {
            for token in 0..len {
                let block = table[request * table_stride + token / PAGE] as usize;
                let mut key = [0; DIM];
                codes.fill(&mut rng, &mut key);
                if self.contents == Contents::Hostile && rng.below(16) == 0 {
                    key[rng.below(DIM)] = e4m3::NAN | (rng.next_u64() as u8 & 0x80);
                }
                let word = self.scale_word(&mut rng);
                fp8_page::write(&mut cache[block * self.page_stride..], token % PAGE, &key, word);
            }
        }
        let step = DecodeStep {
            q: self.q,
            rows,
            topk: self.topk,
            context_len_max: self.context_len_max,
            queries,
            weights,
            cache,
            page_stride: self.page_stride,
            blocks,
            scale_form: self.scale_form,
            table,
            table_stride,
            table_width,
            row_ends: self.row_ends.clone(),
            kv_table,
            kv_table_stride,
            kv_table_width,
            kv_page: self.kv_page,
            kv_block_rows: self.kv_block_rows,
        };
        step.validate()?;
        Ok(step)
    }

    /// A BF16 head weight.
    fn weight(&self, rng: &mut SplitMix64) -> u16 {
        match self.contents {
            Contents::Hostile if rng.below(64) == 0 => [0x7FFF, 0xFFC1, 0x7F80, 0xFF80, 0x8000][rng.below(5)],
            Contents::SmallIntegers | Contents::Hostile => bf16::from_f32((rng.below(17) as f32 - 8.0) / 16.0),
            Contents::Gaussian => bf16::from_f32(rng.gaussian() * 0.125),
        }
    }

    /// A key's scale word in the step's form.
    fn scale_word(&self, rng: &mut SplitMix64) -> u32 {
        let hostile = self.contents == Contents::Hostile && rng.below(16) == 0;
        match self.scale_form {
            ScaleForm::Ue8m0 if hostile => u32::from_le_bytes([[0, 1, 240, 254][rng.below(4)]; 4]),
            ScaleForm::Ue8m0 => u32::from_le_bytes([(117 + rng.below(8)) as u8; 4]),
            ScaleForm::Fp32 if hostile => {
                [0.0, -0.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, f32::MAX][rng.below(6)].to_bits()
            }
            ScaleForm::Fp32 => ((1.0 + rng.below(1 << 23) as f32 * pow2::exp2(-23)) * pow2::exp2(-8)).to_bits(),
        }
    }
}

/// A table whose needed entries are the ids `first..end` in random order and whose other entries are garbage.
fn paged_table(rng: &mut SplitMix64, lens: &[usize], page: usize, stride: usize, first: usize, end: usize) -> Vec<i32> {
    let mut free: Vec<usize> = (first..end).collect();
    rng.shuffle(&mut free);
    let garbage = [i32::MAX, i32::MIN, -1, end as i32, 0x7F00_0000, -(1 << 20)];
    let mut table: Vec<i32> = (0..lens.len() * stride).map(|i| garbage[i % garbage.len()]).collect();
    let mut next = free.into_iter();
    for (row, &len) in table.chunks_mut(stride.max(1)).zip(lens) {
        for (entry, id) in row[..len.div_ceil(page)].iter_mut().zip(&mut next) {
            *entry = id as i32;
        }
    }
    table
}

/// E4M3 codes to draw from: a draw costs a few bits, where a fresh normal number would cost a dozen operations.
struct CodePool([u8; 256]);

impl CodePool {
    fn new(rng: &mut SplitMix64, contents: Contents) -> Self {
        Self(std::array::from_fn(|_| match contents {
            Contents::SmallIntegers | Contents::Hostile => e4m3::from_f32(rng.below(5) as f32 - 2.0),
            Contents::Gaussian => e4m3::from_f32(rng.gaussian() * 32.0),
        }))
    }

    fn fill(&self, rng: &mut SplitMix64, codes: &mut [u8]) {
        rng.fill(codes);
        codes.iter_mut().for_each(|code| *code = self.0[*code as usize]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::order16::LOGIT_NAN;
    use crate::oracle::score::dot_exact;
    use crate::oracle::step;
    use std::collections::HashSet;

    const ENDS: [i32; 8] = [0, 1, 63, 64, 65, -7, 300, 257];

    #[test]
    fn steps_are_valid_reproducible_and_depend_on_the_seed() {
        for contents in [Contents::SmallIntegers, Contents::Gaussian, Contents::Hostile] {
            for scale_form in [ScaleForm::Ue8m0, ScaleForm::Fp32] {
                let spec = StepSpec { contents, scale_form, ..StepSpec::new(5, 2, 128, &ENDS) };
                let step = spec.build().unwrap();
                assert_eq!(step, spec.build().unwrap());
                assert_ne!(step, StepSpec { seed: 6, ..spec }.build().unwrap());
                assert_eq!(step.requests(), 4);
            }
        }
    }

    #[test]
    fn needed_entries_are_distinct_and_all_others_garbage() {
        let step = StepSpec { kv_page: 16, kv_block_rows: 48, ..StepSpec::new(5, 2, 128, &ENDS) }.build().unwrap();
        let longest = [1, 64, 65, 300usize];
        let tables =
            [(&step.table, step.table_stride, PAGE, step.blocks), (&step.kv_table, step.kv_table_stride, 16, 29)];
        for (table, stride, page, blocks) in tables {
            let mut used = HashSet::new();
            for (row, len) in table.chunks(stride).zip(longest) {
                let (needed, garbage) = row.split_at(len.div_ceil(page));
                assert!(needed.iter().all(|&id| (id as usize) < blocks && used.insert(id)));
                assert!(garbage.iter().all(|&id| id < 0 || id as usize >= blocks) && garbage.len() >= 5);
            }
        }
    }

    #[test]
    fn page_stride_and_page_order_do_not_change_the_logits() {
        let dense = StepSpec::new(9, 2, 128, &ENDS);
        let answer = |spec: &StepSpec| {
            let step = spec.build().unwrap();
            (step::logits(&step, dot_exact), step)
        };
        let (want, step) = answer(&dense);
        assert_eq!(want.iter().map(Vec::len).collect::<Vec<_>>(), [0, 1, 63, 64, 65, 0, 300, 257]);
        // Move every page to a strided, reversed cache: same keys, other places.
        let stride = 3 * fp8_page::BYTES + 576;
        let mut moved = DecodeStep { page_stride: stride, cache: vec![0xA5; step.blocks * stride], ..step.clone() };
        for block in 0..step.blocks {
            let page = &step.cache[block * step.page_stride..][..fp8_page::BYTES];
            moved.cache[(step.blocks - 1 - block) * stride..][..fp8_page::BYTES].copy_from_slice(page);
        }
        moved
            .table
            .iter_mut()
            .filter(|id| (0..step.blocks as i32).contains(id))
            .for_each(|id| *id = step.blocks as i32 - 1 - *id);
        moved.validate().unwrap();
        assert_eq!(step::logits(&moved, dot_exact), want);
    }

    #[test]
    fn small_integer_dots_are_integers_of_at_most_512() {
        let step = StepSpec::new(1, 1, 128, &[200]).build().unwrap();
        for token in 0..200 {
            for head in step.query(0).as_chunks::<DIM>().0 {
                let dot = dot_exact(head, step.key(0, token).0);
                assert!(dot.fract() == 0.0 && dot.abs() <= 512.0);
            }
        }
    }

    #[test]
    fn hostile_steps_hold_nan_logits_beside_finite_ones() {
        let step = StepSpec { contents: Contents::Hostile, ..StepSpec::new(1, 1, 128, &[500; 6]) }.build().unwrap();
        let logits = step::logits(&step, dot_exact).concat();
        let nans = logits.iter().filter(|&&bits| bits == LOGIT_NAN).count();
        assert!(nans > 50 && nans < logits.len() - 50, "{nans} of {}", logits.len());
    }

    #[test]
    fn ends_past_the_context_are_clamped_and_rows_near_two_to_the_31_fit() {
        let spec =
            StepSpec { context_len_max: 200, kv_block_first: (1 << 25) - 5, ..StepSpec::new(1, 1, 128, &[i32::MAX]) };
        assert!(StepSpec { context_len_max: 1 << 21, ..spec.clone() }.build().is_err());
        let step = spec.build().unwrap();
        assert_eq!(step.row_len(0), 200);
        let selected = step::select(&step, &step::logits(&step, dot_exact)).unwrap();
        assert_eq!(selected[0].count, 128);
        assert!(selected[0].rows.iter().all(|&row| row > i32::MAX - 400));
        let refused = StepSpec { kv_block_first: (1 << 25) - 3, ..spec }.build();
        assert!(matches!(refused, Err(ShapeError::PoolTooLarge { .. })), "{refused:?}");
    }

    #[test]
    fn a_step_without_requests_is_valid() {
        let step = StepSpec::new(1, 4, 128, &[]).build().unwrap();
        assert_eq!((step.requests(), step::logits(&step, dot_exact).len()), (0, 0));
    }

    #[test]
    fn threads_do_not_change_the_logits() {
        // Long enough to be spread over threads; rows of a request share keys, so equal queries give equal prefixes.
        let mut step = StepSpec::new(3, 2, 128, &[5000, 4999]).build().unwrap();
        step.queries.copy_within(..query_row::BYTES, query_row::BYTES);
        step.weights.copy_within(..HEADS, HEADS);
        let logits = step::logits(&step, dot_exact);
        assert_eq!(logits[0][..4999], logits[1][..]);
        for token in (0..5000).step_by(613) {
            let alone =
                crate::oracle::score::score_row(step.query(0), step.head_weights(0), [step.key(0, token)], dot_exact);
            assert_eq!(alone, logits[0][token..=token]);
        }
    }
}

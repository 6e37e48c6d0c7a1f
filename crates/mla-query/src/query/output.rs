//! Where the query's rows go: the one place that rounds, converts and stores their elements.

use dsa_core::layout::mla_rows::QUERY;
use ptx::*;

use super::kernel::MlaParams;
use super::publish::Staged;
use crate::shape::MlaShape;

/// The query rows of one head.
#[derive(Clone, Copy)]
pub(crate) struct QueryRows {
    shape: MlaShape,
    p: MlaParams,
    head: Reg<u32>,
    staged: Option<Staged>,
}

impl QueryRows {
    pub(crate) fn new(shape: MlaShape, p: MlaParams, head: Reg<u32>, staged: Option<Staged>) -> QueryRows {
        QueryRows { shape, p, head, staged }
    }

    /// Stores consecutive elements of a token's row from `column` on, given as BF16 pairs: 2 or 4 pairs, aligned to
    /// themselves, so that a store is never less than a word. Nothing happens past the live tokens.
    #[track_caller]
    pub(crate) fn store<const PAIRS: usize>(&self, token: Reg<u32>, column: Reg<u32>, pairs: [Reg<Bf16x2>; PAIRS]) {
        assert!(PAIRS == 2 || PAIRS == 4, "{PAIRS} pairs make no store of whole words");
        when(token.lt(self.p.tokens), || {
            if !self.shape.is_fp8() {
                self.store_words(token, column, pairs.map(|pair| pair.to_bits()));
                return;
            }
            let scale = self.p.q_scale_inv.load();
            let codes = |pair: Reg<Bf16x2>| e4m3x2_from_f32(pair.low_f32() * scale, pair.high_f32() * scale);
            let word = |i: usize| codes(pairs[i]).pack(codes(pairs[i + 1]));
            match PAIRS {
                2 => self.store_words(token, column, [word(0)]),
                _ => self.store_words(token, column, [word(0), word(2)]),
            }
        });
    }

    #[track_caller]
    fn store_words<const N: usize>(&self, token: Reg<u32>, column: Reg<u32>, words: [Reg<u32>; N]) {
        self.at(token, column).cast::<u32>().store_vec(words);
        if let Some(staged) = &self.staged {
            staged.keep(token, column, words);
        }
    }

    /// Element `column` of a token's row.
    fn at(&self, token: Reg<u32>, column: Reg<u32>) -> Global<u8> {
        let bytes = self.shape.query_bytes() as u32;
        let row = token.mad(self.p.heads, self.head);
        self.p.query.byte_at(row.mul_wide(QUERY as u32 * bytes)).at(column * bytes)
    }
}

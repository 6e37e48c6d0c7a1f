//! From accumulators to logits: which heads and keys a consumer thread has, its weights, and the specification's sum.

use std::ops::Range;

use dsa_core::device::scan::Thread;
use dsa_core::layout::fp8_page::{self, ScaleForm};
use ptx::*;

use super::kernel::{HEADS_U32, Smem, WEIGHT_ROW_BYTES};

/// Which keys of a page and which chain of heads a consumer thread has.
#[derive(Clone, Copy)]
pub(super) struct Keys {
    /// The thread's chain, 0..4: its place in the quad.
    pub(super) quad: Reg<u32>,
    /// Row of the warp's 8-row block, 0..8: its two keys in the warp's sixteen are this and 8 more.
    pub(super) lane_row: Reg<u32>,
    /// The warp's block of 16 keys, 0..4.
    pub(super) block: Reg<u32>,
    /// Byte of its first key's scale word in the page; the second key's is 32 further on.
    scale_byte: Reg<u32>,
}

impl Keys {
    pub(super) fn new(t: Thread) -> Keys {
        let lane_row = t.lane >> 2;
        let block = t.warp & 3;
        // The page's last two 128-byte rows, swizzled as the copy left them: row 64 as is, row 65 with its 16-byte chunks
        // exchanged in pairs. Keys 8 apart in a block are on the same side of that.
        let first = block * 16 + lane_row;
        let scale_byte = (first << 2) ^ ((first >> 5) << 4);
        Keys { quad: t.lane & 3, lane_row, block, scale_byte }
    }

    /// The scales of this thread's two keys.
    pub(super) fn scales(self, page: Shared<u8>, form: ScaleForm) -> [Reg<f32>; 2] {
        [0, 32].map(|offset| {
            let at = page.byte_at(self.scale_byte).byte_offset(fp8_page::SCALES.start as i32 + offset);
            match form {
                ScaleForm::Fp32 => at.cast::<f32>().load(),
                // 2^(e - 127); byte 0 is the subnormal 2^-127.
                ScaleForm::Ue8m0 => (at.load() << 23).max(0x0040_0000u32).bitcast(),
            }
        })
    }

    /// The rows' totals `(chain 0 + chain 2) + (chain 1 + chain 3)`. Of up to four rows, thread `c` of the quad ends up
    /// with row `c` (four or three rows), `c / 2` (two) or 0 (one).
    pub(super) fn reduce_quad(self, sums: &[Reg<Bf16x2>]) -> Reg<Bf16x2> {
        let high = (self.quad & 2).ne(0);
        let odd = (self.quad & 1).ne(0);
        // Keeps `a` in the lanes where the bit is clear and `b` where it is set, adding what the partner sends.
        let exchange = |bit: Pred, mask: u32, a: Reg<Bf16x2>, b: Reg<Bf16x2>| {
            let (keep, send) = (bit.select::<Bf16x2>(b, a), bit.select::<Bf16x2>(a, b));
            keep + shuffle_xor(send, mask)
        };
        let fold = |mask: u32, a: Reg<Bf16x2>| a + shuffle_xor(a, mask);
        match *sums {
            [a] => fold(1, fold(2, a)),
            [a, b] => fold(1, exchange(high, 2, a, b)),
            // After the first exchange the high lanes hold the later row of each pair; the second deals out the pairs.
            [a, b, c] => exchange(odd, 1, exchange(high, 2, a, c), fold(2, b)),
            [a, b, c, d] => exchange(odd, 1, exchange(high, 2, a, c), exchange(high, 2, b, d)),
            _ => unreachable!("one to four rows"),
        }
    }
}

/// Head weights of this thread's chain, of every row of an item: two heads a register, in registers for as long as the
/// item lasts.
pub(super) struct Weights {
    rows: Vec<[Reg<Bf16x2>; 4]>,
}

impl Weights {
    /// Loads those of query slot `slot`.
    pub(super) fn new(smem: Smem, slot: Reg<u32>, q: u32, rows: Range<u32>, keys: Keys) -> Weights {
        let base = smem.weights.ptr().byte_at(slot * (q * WEIGHT_ROW_BYTES) + keys.quad * (WEIGHT_ROW_BYTES / 4));
        let rows = rows
            .map(|row| {
                let at = base.byte_offset((row * WEIGHT_ROW_BYTES) as i32).cast::<u32>();
                at.load_vec::<4>().map(Reg::<Bf16x2>::from_bits)
            })
            .collect();
        Weights { rows }
    }

    /// Row `row`'s chain over the products `dots(s)` of its eight heads in order, for two keys at a time.
    pub(super) fn chain(&self, row: u32, dots: impl Fn(u32) -> [Reg<f32>; 2]) -> Reg<Bf16x2> {
        const { assert!(HEADS_U32 == 4 * 8) };
        let weights = self.rows[row as usize].iter().flat_map(|pair| pair.splat());
        weights.zip(0u32..).fold(Reg::from(Bf16x2(0)), |sum, (weight, s)| {
            let [low, high] = dots(s);
            Reg::<Bf16x2>::from_f32_relu(low, high).fma(weight, sum)
        })
    }
}

//! `mma.sync` against the scalar model: which lane holds what, and the chain of two steps.

mod common;

use common::*;
use ptx::*;
use ptx_sim::numeric::tensor_core::dot_bf16_k16;

/// BF16 bits of element `i` of a matrix: small numbers of both signs, some with long fractions.
fn element(i: u32) -> u16 {
    let mixed = i.wrapping_mul(0x9E37_79B1) >> 16;
    ((0x3E00 + (mixed & 0x1FF)) | (mixed & 0x8000)) as u16
}

#[test]
fn every_lane_holds_its_elements() {
    // A is 16 x 32 (two steps), B 32 x 8; `src[i] = i` gives each fragment word its elements' numbers.
    const K: u32 = 32;
    let k = kernel(32, |p| {
        let lane = lane_index();
        let (g, q) = (lane >> 2, lane & 3);
        let pair = |first: Reg<u32>| {
            let bits = |i: Reg<u32>| {
                let mixed = (i * 0x9E37_79B1u32) >> 16;
                ((mixed & 0x1FF) + 0x3E00) | (mixed & 0x8000)
            };
            Reg::<Bf16x2>::from_bits(bits(first) | (bits(first + 1) << 16))
        };
        let tile = MmaTile::zero();
        for step in 0..2 {
            let a = std::array::from_fn(|i| {
                let i = i as u32;
                pair((g + 8 * (i % 2)).mad(K, q * 2 + 8 * (i / 2) + 16 * step))
            });
            let b = std::array::from_fn(|i| pair(g.mad(K, q * 2 + 8 * i as u32 + 16 * step) + 512));
            tile.mma_bf16(a, b);
        }
        for j in 0..4 {
            let at = (g + 8 * (j / 2)).mad(8, q * 2 + j % 2);
            p.out.at(at).store(tile.get(j).bitcast::<u32>());
        }
    });
    let expected = |i: usize| {
        let (row, column) = (i as u32 / 8, i as u32 % 8);
        let part = |first: u32| std::array::from_fn(|k| element(first + k as u32));
        (0..2).fold(0.0, |sum, step| dot_bf16_k16(&part(row * K + 16 * step), &part(512 + column * K + 16 * step), sum))
    };
    check(&k, 1, |i| f32::to_bits(expected(i)), 128);
}

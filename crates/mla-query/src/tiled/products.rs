//! `q_c` times Q_B over a CTA's columns.

use std::ops::Range;

use dsa_core::consts::{NOPE, Q_HEAD};
use ptx::*;

use super::kernel::{Tiled, frees};
use super::norm::Norm;
use super::{LINE, LINES, SLICE};

/// Lines of Q_B whose place exchanged sums take, in tiles of 32.
const FREED_FIRST: u32 = 2;
/// Lines that two warpgroups multiply at a time: the first as soon as it is there; those of the second eighth take the place of
/// the first one's.
const GROUPS: &[Range<u32>] = &[0..1, 1..LINES, LINES..2 * LINES];
/// The same where the assembler has no registers left for normalising beside the first product.
const GROUPS_K3: &[Range<u32>] = &[0..LINES, LINES..2 * LINES];

impl Tiled {
    /// Every token's `q_c` times 24 rows of Q_B: two tiles of latent rows and one of rope rows, which the CTA of the warp's
    /// number adds up.
    pub(super) fn project(&self) -> Vec<[MmaTile; 3]> {
        let Tiled { tokens, lane, warp, .. } = self;
        let sums: Vec<[MmaTile; 3]> = (0..tokens / 16).map(|_| std::array::from_fn(|_| MmaTile::zero())).collect();
        let within = *lane & 7;
        // A: lane l names row l % 16, chunk l / 16 of two. B: row l % 8, chunk l / 8 of four. Chunk c of row r lies at
        // c ^ (r % 8).
        let a_row = self.q_c.at((*lane & 15) * LINE);
        let b_rows = [warp.mad(16, within), warp.mad(8, within) + NOPE as u32].map(|row| self.q_b.at(row * LINE));
        let (a_chunk, b_chunk) = ((*lane >> 4) ^ within, (*lane >> 3) ^ within);
        let a: Vec<Shared<u32>> = (0..4u32).map(|i| a_row.at((a_chunk ^ (2 * i)) << 2)).collect();
        let b = b_rows.map(|row| [0u32, 4].map(|i| row.at((b_chunk ^ i) << 2)));
        self.q_b_full.wait(0);
        // 32 columns at a time.
        for step in 0..SLICE / 32 {
            let (line, half) = (step / 2, step % 2);
            let rows = |part: usize, row: u32| -> [Reg<Bf16x2>; 4] {
                b[part][half as usize].offset(((line * Q_HEAD as u32 + row) * LINE) as i32).load_matrices()
            };
            let fragments = [rows(0, 0), rows(0, 8), rows(1, 0)];
            if step + 1 == 2 * FREED_FIRST && frees(*tokens) > 0 {
                self.barrier(); // ORDER: all reads, before the first warp says so.
                self.free(0);
            }
            for (m, sums) in (0..).zip(&sums) {
                for k in 0..2 {
                    let at = a[(2 * half + k) as usize].offset(((line * tokens + 16 * m) * LINE) as i32);
                    let x = at.load_matrices::<4>();
                    for (tile, rows) in sums.iter().zip(&fragments) {
                        tile.mma_bf16(x, [rows[2 * k as usize], rows[2 * k as usize + 1]]);
                    }
                }
            }
        }
        sums
    }

    /// All 64 tokens' `q_c` times 48 rows of Q_B by each of two warpgroups: a warp holds 16 tokens and all 6 tiles of rows.
    /// The next line is normalised before a line's products have ended; three lines of `q_c` have a place. An eighth of the
    /// columns has its own sums, as in smaller tiles.
    pub(super) fn project_by_warpgroups(&self, norm: &Norm) -> Vec<Reg<f32>> {
        let (cut, n) = (self.cut, self.cut.rows() / 2);
        let accumulators: Vec<_> = (0..cut.eighths()).map(|_| Accumulator::new(n)).collect();
        let a = self.q_c.descriptor_k_major_128();
        let b = self.q_b.at((self.warp >> 2) * (n * LINE)).descriptor_k_major_128();
        let multiply = |line: u32| {
            let (eighth, within) = ((line / LINES) as usize, line % LINES);
            let line_at = |line: u32, rows: u32| u64::from(line) * u64::from(rows * LINE * 4 / 16);
            // A step along a line is 32 bytes.
            for step in 0..4 {
                let (a, b) =
                    (a + (line_at(within, self.tokens) + step * 2), b + (line_at(line, cut.rows()) + step * 2));
                accumulators[eighth].mma_bf16(a, b, within != 0 || step != 0);
            }
        };
        for lines in if self.shape.is_k3() { GROUPS_K3 } else { GROUPS } {
            lines.clone().for_each(|line| norm.scale(self, line));
            if lines.start == LINES {
                wgmma_wait(0);
                // ORDER: all products of the first eighth, before the next one takes the place of its q_c and peers that of its
                // lines of Q_B.
                self.barrier();
                self.free(0);
            }
            lines.clone().for_each(|line| norm.put(self, line));
            fence_proxy_async(); // ORDER: this thread's q_c, before warpgroup products read it.
            lines.clone().for_each(|line| norm.store(self, line));
            if lines.start == 0 {
                self.q_b_full.wait(0);
            }
            self.barrier(); // ORDER: q_c, before the products read it.
            wgmma_fence();
            lines.clone().for_each(multiply);
            wgmma_commit();
        }
        wgmma_wait(0);
        self.barrier(); // ORDER: all products, before peers take the place of the lines.
        self.free(1);
        let [first, second] = &accumulators[..] else { unreachable!("two eighths") };
        (0..n / 2).map(|j| first.get(j) + second.get(j)).collect()
    }
}

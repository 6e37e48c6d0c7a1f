//! `q_c` times Q_B over a CTA's columns.

use dsa_core::consts::{NOPE, Q_HEAD};
use ptx::*;

use super::kernel::{Tiled, frees};
use super::norm::Norm;
use super::{LINE, LINES, SLICE};

/// Lines of Q_B whose place the parts and, in tiles of 32, the latent rows take.
const FREED_FIRST: u32 = 2;

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
                sync_warp(); // ORDER: every lane's reads, before those that signal.
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

    /// All 64 tokens' `q_c` times 96 rows of Q_B by each of two warpgroups: a warp holds 16 tokens and all 12 tiles of rows.
    /// The next line is normalised before a line's products have ended.
    pub(super) fn project_by_warpgroups(&self, norm: &Norm) -> Accumulator {
        let half = self.warp >> 2;
        let accumulator = Accumulator::new(Q_HEAD as u32 / 2);
        let a = self.q_c.descriptor_k_major_128();
        let b = self.q_b.at(half * (Q_HEAD as u32 / 2 * LINE)).descriptor_k_major_128();
        let write = |line: u32| {
            norm.write(self, line);
            fence_proxy_async(); // ORDER: this thread's q_c, before warpgroup products read it.
            norm.store(self, line);
        };
        let multiply = |line: u32| {
            let line_at = |rows: u32| u64::from(line) * u64::from(rows * LINE * 4 / 16);
            // A step along a line is 32 bytes.
            for step in 0..4 {
                let (a, b) = (a + (line_at(self.tokens) + step * 2), b + (line_at(Q_HEAD as u32) + step * 2));
                accumulator.mma_bf16(a, b, line != 0 || step != 0);
            }
            wgmma_commit();
        };
        write(0);
        self.q_b_full.wait(0);
        wgmma_fence();
        for line in 0..LINES {
            self.barrier(); // ORDER: the line of q_c, before the products read it.
            multiply(line);
            if line + 1 < LINES {
                write(line + 1);
            }
        }
        wgmma_wait(LINES - FREED_FIRST);
        self.free(0);
        wgmma_wait(0);
        self.free(1);
        accumulator
    }
}

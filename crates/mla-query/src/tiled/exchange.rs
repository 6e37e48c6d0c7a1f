//! Sums of the products over the cluster: parts to the CTA that adds them up, its latent rows to every CTA.

use dsa_core::layout::mla_rows::QUERY_ROPE;
use ptx::*;

use super::kernel::{Tiled, WARPS};
use super::{CLUSTER, STEPS, TILES};

impl Tiled {
    /// Sends the warp's sums to the CTA of its number.
    pub(super) fn send_parts(&self, sums: &[[MmaTile; TILES as usize]]) {
        self.wait_freed(0);
        let rank = self.warp;
        let to = self.part_at(0u32.into());
        when_else(
            rank.eq(self.part),
            || {
                for (i, tile) in (0..).zip(sums.as_flattened()) {
                    to.offset(i * 128).store_vec(values(|j| tile.get(j)));
                }
            },
            || {
                let (to, full) = (to.of_cta(rank), self.parts_full.of_cta(rank));
                for (i, tile) in (0..).zip(sums.as_flattened()) {
                    to.offset(i * 128).store_async(values(|j| tile.get(j)), full);
                }
            },
        );
        self.parts_full.arrive(); // ORDER: this thread's parts that stay here, before they are added up.
    }

    /// Sends a warpgroup's sums to the CTAs of the half that add them up. Every CTA starts with the one after it, lest all send
    /// to the same one at a time; the order of registers is fixed by the instruction, so there is code for each.
    pub(super) fn send_parts_of_warpgroups(&self, sums: &[Reg<f32>]) {
        self.wait_freed(0);
        let to = self.part_at((self.warp & 3) * TILES);
        for index in 0..self.cut.parts() {
            when(self.share.index.eq(index), || {
                when_else(
                    self.warp.lt(WARPS / 2),
                    || self.send_from(index, to, sums, 0),
                    || self.send_from(index, to, sums, sums.len() as u32 / 4),
                );
            });
        }
        self.parts_full.arrive(); // ORDER: this thread's parts that stay here, before they are added up.
    }

    /// Sends, from CTA `index` of the half, tiles of its rows of Q_B from `first` on.
    fn send_from(&self, index: u32, to: Shared<f32>, sums: &[Reg<f32>], first: u32) {
        for owner in (1..=self.cut.parts()).map(|i| (index + i) % self.cut.parts()) {
            let held: Vec<_> = (first..)
                .zip(sums.chunks(4))
                .map(|(tile, sums)| (self.cut.owner(tile), values(|j| sums[j as usize])))
                .filter(|((by, _), _)| *by == owner)
                .collect();
            if held.is_empty() {
                continue;
            }
            let rank = self.share.rank(self.cut, owner);
            let (peer, full) = (to.of_cta(rank), self.parts_full.of_cta(rank));
            for ((_, tile), values) in held {
                let at = (tile * 128) as i32;
                match owner == index {
                    true => to.offset(at).store_vec(values),
                    false => peer.offset(at).store_async(values, full),
                }
            }
        }
    }

    /// Where the lane's values of this CTA's part of `tile` go.
    fn part_at(&self, tile: Reg<u32>) -> Shared<f32> {
        let tiles = self.tokens / 16 * TILES;
        self.parts.at((self.share.index.mad(tiles, tile) * 32 + self.lane) * 4)
    }

    /// Adds up the eight parts of the CTA's rows: latent rows go to every CTA, as they will multiply, rope rows to the query.
    pub(super) fn gather(&self) {
        let Tiled { tokens, warp, .. } = self;
        let groups = tokens / 16;
        self.parts_full.wait_cluster(0); // ORDER: the cluster's parts.
        self.wait_freed(1);
        when_else(
            warp.lt(groups),
            || {
                // Two tiles side by side are the A fragment of one step.
                let words = [0, 1].map(|tile| self.sum_of_parts(*warp * TILES + tile).map(|pair| pair.to_bits()));
                let to = self.latent_rows.at((warp.mad(STEPS, self.part) * 32 + self.lane) * 4);
                for i in 1..=CLUSTER {
                    // Every CTA starts with the one after it.
                    let rank = (self.part + i) % CLUSTER;
                    let [[a0, a1], [a2, a3]] = words;
                    to.of_cta(rank).store_async([a0, a1, a2, a3], self.latent_full.of_cta(rank));
                }
            },
            || {
                when(warp.lt(2 * groups), || {
                    let group = *warp - groups;
                    let column = self.part * 8 + QUERY_ROPE.start as u32;
                    self.store_tile(group * 16, column, self.sum_of_parts(group * TILES + 2));
                });
            },
        );
    }

    /// A tile's parts, added in order, those of two eighths of the columns first: rows `lane / 4` and 8 further on, two columns.
    fn sum_of_parts(&self, tile: Reg<u32>) -> [Reg<Bf16x2>; 2] {
        let words = self.tokens / 16 * TILES * 128;
        let from = self.parts.at((tile * 32 + self.lane) * 4);
        let parts: Vec<[Reg<f32>; 4]> =
            (0..self.cut.parts()).map(|part| from.offset((part * words) as i32).load_vec()).collect();
        let add = |a: [Reg<f32>; 4], b: [Reg<f32>; 4]| -> [Reg<f32>; 4] { std::array::from_fn(|i| a[i] + b[i]) };
        let pairs =
            parts.chunks(2 / self.cut.eighths() as usize).map(|pair| pair.iter().copied().reduce(add).expect("parts"));
        let sums = pairs.reduce(add).expect("some parts");
        [0, 2].map(|i| Reg::<Bf16x2>::from_f32(sums[i], sums[i + 1]))
    }
}

/// A lane's four values of a tile.
#[track_caller]
fn values(of: impl Fn(u32) -> Reg<f32>) -> [Reg<f32>; 4] {
    std::array::from_fn(|j| of(j as u32))
}

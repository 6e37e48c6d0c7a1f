//! Sums of the products over the cluster: parts to the CTA that adds them up, its latent rows to every CTA.

use dsa_core::layout::mla_rows::QUERY_ROPE;
use ptx::*;

use super::kernel::Tiled;
use super::{CLUSTER, STEPS, TILES};

/// One warp's part of a tensor-core tile of sums, and where it goes.
pub(super) struct Part {
    /// The CTA that adds it up.
    rank: Reg<u32>,
    /// Which tile of that CTA.
    tile: Reg<u32>,
    values: [Reg<f32>; 4],
}

impl Part {
    pub(super) fn new(rank: Reg<u32>, tile: Reg<u32>, values: [Reg<f32>; 4]) -> Part {
        Part { rank, tile, values }
    }
}

impl Tiled {
    /// Sends the warp's sums to the CTAs that add them up, as the tensor core left them.
    pub(super) fn send_parts(&self, parts: Vec<Part>) {
        let Tiled { tokens, lane, part, .. } = self;
        self.met(0);
        self.read(1);
        let tiles = tokens / 16 * TILES;
        for Part { rank, tile, values } in parts {
            let to = self.parts.at((part.mad(tiles, tile) * 32 + *lane) * 4);
            when_else(
                rank.eq(*part),
                || to.store_vec(values),
                || to.of_cta(rank).store_async(values, self.parts_full.of_cta(rank)),
            );
        }
        sync_warp(); // ORDER: every lane's parts that stay here, before the warp's arrival.
        when(lane.eq(0), || self.parts_full.arrive());
    }

    /// Adds up the eight parts of the CTA's rows: latent rows go to every CTA, as they will multiply, rope rows to the query.
    pub(super) fn gather(&self) {
        let Tiled { tokens, warp, .. } = self;
        let groups = tokens / 16;
        self.parts_full.wait_cluster(0); // ORDER: the cluster's parts.
        self.met(1);
        when_else(
            warp.lt(groups),
            || {
                // Two tiles side by side are the A fragment of one step.
                let words = [0, 1].map(|tile| self.sum_of_parts(*warp * TILES + tile).map(|pair| pair.to_bits()));
                let to = self.latent_rows.at((warp.mad(STEPS, self.part) * 32 + self.lane) * 4);
                for rank in 0..CLUSTER {
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

    /// A tile's parts, added in order: rows `lane / 4` and 8 further on, two columns.
    fn sum_of_parts(&self, tile: Reg<u32>) -> [Reg<Bf16x2>; 2] {
        let words = self.tokens / 16 * TILES * 128;
        let from = self.parts.at((tile * 32 + self.lane) * 4);
        let parts = (0..CLUSTER).map(|part| from.offset((part * words) as i32).load_vec::<4>());
        let sums = parts.reduce(|sums, more| std::array::from_fn(|i| sums[i] + more[i])).expect("some parts");
        [0, 2].map(|i| Reg::<Bf16x2>::from_f32(sums[i], sums[i + 1]))
    }
}

//! Latent rows times W_UK, and tensor-core tiles into the query.

use dsa_core::consts::NOPE;
use ptx::*;

use super::kernel::Tiled;
use super::{COLUMNS, LINE, STEPS};

impl Tiled {
    /// Latent rows times the CTA's columns of W_UK, into the query: the warps share the groups of 16 tokens, those of a
    /// group its columns.
    pub(super) fn absorb(&self) {
        let Tiled { tokens, lane, warp, .. } = self;
        let groups = tokens / 16;
        let (group, share) = (*warp % groups, *warp / groups);
        // A warp's tiles of 8 columns, as many as there are groups.
        let first_chunk = share * groups;
        self.w_uk_full.wait(0);
        // Lane l names row l of 32, whose chunk c lies at c ^ (l % 8).
        let weights: Vec<Vec<[Reg<Bf16x2>; 4]>> = (0..groups)
            .map(|tile| {
                let chunk = (first_chunk + tile) ^ (*lane & 7);
                let from = self.w_uk.at(lane.mad(LINE, chunk << 2));
                let rows = (0..NOPE as u32 / 32).map(|rows| from.offset((rows * 32 * LINE) as i32));
                rows.map(Shared::load_matrices_transposed).collect()
            })
            .collect();
        let latent = self.latent_rows.at((group * (STEPS * 32) + *lane) * 4);
        let tiles: Vec<_> = (0..groups).map(|_| MmaTile::zero()).collect();
        // ORDER: the cluster's rows have arrived; so have all stores to this CTA, which may then end.
        self.latent_full.wait_cluster(0);
        for step in 0..STEPS {
            let x = latent.offset((step * 128) as i32).load_vec::<4>().map(Reg::<Bf16x2>::from_bits);
            for (tile, weights) in tiles.iter().zip(&weights) {
                let w = &weights[step as usize / 2][2 * (step as usize % 2)..];
                tile.mma_bf16(x, [w[0], w[1]]);
            }
        }
        let pairs = |tile: &MmaTile| [0, 2].map(|j| Reg::<Bf16x2>::from_f32(tile.get(j), tile.get(j + 1)));
        let (row, column) = (group * 16, self.part.mad(COLUMNS, first_chunk * 8));
        match &tiles[..] {
            [tile] => self.store_tile(row, column, pairs(tile)),
            tiles => {
                for (i, two) in (0..).zip(tiles.chunks(2)) {
                    self.store_two_tiles(row, column + 16 * i, [pairs(&two[0]), pairs(&two[1])]);
                }
            }
        }
    }

    /// Stores a tensor-core tile of 16 tokens from `row` on and 8 elements from `column` on: neighbouring lanes exchange
    /// halves, so that each holds four elements of one token.
    pub(super) fn store_tile(&self, row: Reg<u32>, column: Reg<u32>, tile: [Reg<Bf16x2>; 2]) {
        let (group, quarter) = (self.lane >> 2, self.lane & 3);
        let pairs = swap((quarter & 1).ne(0), 1, tile.map(|pair| [pair.to_bits()])).concat();
        let token = self.first + row + group + (quarter & 1) * 8;
        self.out.store(token, column + (quarter >> 1) * 4, [pairs[0], pairs[1]].map(Reg::<Bf16x2>::from_bits));
    }

    /// As [`store_tile`](Self::store_tile) of two tiles side by side, eight elements of one token a lane.
    fn store_two_tiles(&self, row: Reg<u32>, column: Reg<u32>, tiles: [[Reg<Bf16x2>; 2]; 2]) {
        let (group, quarter) = (self.lane >> 2, self.lane & 3);
        let tiles = tiles.map(|tile| swap((quarter & 1).ne(0), 1, tile.map(|pair| [pair.to_bits()])).concat());
        let [low, high] = swap((quarter & 2).ne(0), 2, tiles.map(|pairs| [pairs[0], pairs[1]]));
        let token = self.first + row + group + (quarter & 1) * 8;
        let pairs = [low[0], low[1], high[0], high[1]].map(Reg::<Bf16x2>::from_bits);
        self.out.store(token, column + (quarter >> 1) * 8, pairs);
    }
}

/// Exchanges with the lane `distance` away: the lower lane gets both lanes' first words, the upper one both second ones; those
/// of the lower lane come first.
fn swap<const N: usize>(is_upper: Pred, distance: u32, [first, second]: [[Reg<u32>; N]; 2]) -> [[Reg<u32>; N]; 2] {
    let choose = |a: [Reg<u32>; N], b: [Reg<u32>; N]| -> [Reg<u32>; N] {
        std::array::from_fn(|i| is_upper.select::<u32>(a[i], b[i]))
    };
    let kept = choose(second, first);
    let received = choose(first, second).map(|word| shuffle_xor(word, distance));
    [choose(received, kept), choose(kept, received)]
}

//! RMSNorm of a CTA's columns of every token's `q_a` into `q_c`.
//!
//! A team of 8 lanes has a row or two, each lane a 16-byte chunk of every line of 64 columns: so a team's sums of squares are
//! those of a line, which the trees of the order of sums hold. The cluster exchanges these, each CTA those of its first eighth
//! of the columns, so that every CTA adds up whole rows in the order of the single kernel. A token's sums arrive where its team will write the first line of its `q_c`.

use dsa_core::consts::Q_LORA;
use ptx::*;

use super::kernel::{Tiled, WARPS};
use super::{CLUSTER, LINE, LINES, SLICE, SUMS};
use crate::query::numbers::{pack, query_rsqrt, squares, unpack, unpack_by_bytes};

/// Lanes of a team.
const TEAM: u32 = 8;
/// Lines whose sums are neighbours in the order's trees.
const TREE: usize = 4;

/// Four words of BF16 pairs, which branches set.
type Words = [Var<u32>; 4];

/// A lane's share of the rows of its team.
pub(super) struct Norm {
    /// Whether the warp has rows, if not all have.
    works: Option<Pred>,
    /// The team's first row of the tile.
    first_row: Reg<u32>,
    /// The lane's chunk of each line.
    chunk: Reg<u32>,
    /// Of the first line, in words of a row.
    column: Reg<u32>,
    /// Where the rows lie, each eighth of the columns.
    sources: Vec<Vec<Global<u32>>>,
    /// Of each row, the lines.
    values: Vec<Vec<Words>>,
    factors: Vec<Var<f32>>,
}

impl Norm {
    /// Works out where the rows lie, before the dependency wait.
    pub(super) fn new(k: &Tiled) -> Norm {
        let teams = WARPS * (32 / TEAM);
        let rows = k.tokens.div_ceil(teams);
        let works = (k.tokens < teams).then(|| k.warp.lt(k.tokens / (32 / TEAM)));
        let team = k.warp.mad(32 / TEAM, k.lane / TEAM);
        let (first_row, chunk) = (team * rows, k.lane % TEAM);
        let columns: Vec<_> = k.share.eighths.iter().map(|eighth| eighth.mad(SLICE / 2, chunk * 4)).collect();
        Norm {
            works,
            first_row,
            chunk,
            column: columns[0],
            sources: (0..rows)
                .map(|i| row(k, first_row + i))
                .map(|row| columns.iter().map(|column| row.at(*column)).collect())
                .collect(),
            values: (0..rows).map(|_| (0..k.cut.lines()).map(|_| words()).collect()).collect(),
            factors: (0..rows).map(|_| Var::undefined()).collect(),
        }
    }

    fn on_rows(&self, body: impl FnOnce()) {
        match self.works {
            Some(works) => when(works, body),
            None => body(),
        }
    }

    /// Loads the rows, exchanges their sums of squares and makes their factors, after the dependency wait.
    pub(super) fn start(&self, k: &Tiled) {
        let Norm { first_row, chunk, .. } = *self;
        let sums: Vec<[Var<f32>; LINES as usize]> =
            self.values.iter().map(|_| std::array::from_fn(|_| Var::undefined())).collect();
        self.on_rows(|| {
            // The first eighth of all rows first: the cluster waits for its squares.
            (0..k.cut.eighths()).for_each(|eighth| self.load(eighth));
            for (values, sums) in self.values.iter().zip(&sums) {
                for (words, sum) in values.iter().zip(sums) {
                    let own = squares(&unpack(words.map(Var::get)));
                    sum.set([1, 2, 4].into_iter().fold(own, |sum, distance| sum + shuffle_xor(sum, distance)));
                }
            }
        });
        cluster_wait(); // ORDER: every peer has started and knows its barriers.
        self.on_rows(|| {
            // Swizzled as q_c is, so that the rows of a warp lie in different banks.
            let places = |row: Reg<u32>| {
                let (first, swizzle) = (k.q_c.at(row * LINE).cast::<f32>(), row & 7);
                move |part: Reg<u32>| first.at((swizzle ^ part) * SUMS)
            };
            let full = k.sums_full.of_cta(chunk);
            for (i, sums) in (0u32..).zip(&sums) {
                // Lane i of a team sends to CTA i; the fourth word is padding.
                let [a, b, c] = sums.map(Var::get);
                places(first_row + i)(k.share.eighths[0]).of_cta(chunk).store_async([a, b, c, c], full);
            }
            k.sums_full.wait_cluster(0); // ORDER: the cluster's sums, and the norm's weights.
            // Lanes of a team take its rows in turn, then exchange factors.
            let row = first_row + chunk % self.factors.len() as u32;
            let place = places(row);
            let sums = (0..CLUSTER).flat_map(|part| {
                let [a, b, c, _] = place(part.into()).load_vec::<4>();
                [a, b, c]
            });
            let sums: Vec<_> = sums.collect();
            let trees = sums.chunks(TREE).map(|tree| (tree[0] + tree[1]) + (tree[2] + tree[3]));
            let total = trees.reduce(|total, tree| total + tree).expect("some trees");
            let factor = query_rsqrt(&k.shape, total, k.p.eps);
            match &self.factors[..] {
                [own] => own.set(factor),
                factors => {
                    let first_lane = k.lane - chunk;
                    factors.iter().zip(0u32..).for_each(|(to, i)| to.set(broadcast(factor, first_lane + i)));
                }
            }
            sync_warp(); // ORDER: the sums have been read, before q_c takes their place.
        });
    }

    /// Loads one of the eighths of the columns.
    fn load(&self, eighth: u32) {
        for (to, from) in self.values.iter().zip(&self.sources) {
            for (line, to) in (0..).zip(&to[(eighth * LINES) as usize..][..LINES as usize]) {
                let words = from[eighth as usize].offset(line * LINE as i32).load_vec::<4>();
                to.iter().zip(words).for_each(|(to, from)| to.set(from));
            }
        }
    }

    /// Normalises line `line` of the team's rows and writes it to `q_c`.
    pub(super) fn write(&self, k: &Tiled, line: u32) {
        self.on_rows(|| {
            self.scale(k, line);
            self.put(k, line);
        });
    }

    /// Normalises line `line` of the team's rows, in registers.
    pub(super) fn scale(&self, k: &Tiled, line: u32) {
        let weights = unpack(k.norm_weights.at(self.chunk * 4).offset((line * LINE) as i32).load_vec::<4>());
        for (values, factor) in self.values.iter().zip(&self.factors) {
            let (words, r) = (&values[line as usize], factor.get());
            let pairs = words.map(Var::get);
            // Where a division by call does not do it, another unpacking keeps the assembler from holding the FP32 values of the
            // squares until here, in more registers than there are.
            let values = if k.shape.is_k3() { unpack_by_bytes(pairs) } else { unpack(pairs) };
            let scaled: Vec<_> = values.iter().zip(&weights).map(|(x, w)| *x * r * *w).collect();
            words.iter().zip(pack(&scaled)).for_each(|(to, from)| to.set(from));
        }
    }

    /// Writes a normalised line of the team's rows to its place in `q_c`, of which there are three, its 16-byte chunks swizzled as the tensor copies do.
    pub(super) fn put(&self, k: &Tiled, line: u32) {
        for (i, values) in (0u32..).zip(&self.values) {
            let row = self.first_row + i;
            let to = k.q_c.at(row.mad(LINE, ((self.chunk ^ row) & 7) << 2));
            to.offset((line % LINES * k.tokens * LINE) as i32).store_vec(values[line as usize].map(Var::get));
        }
    }

    /// Stores a line that has been written to the caller's `q_c`, if the shape does: head i every eighth row from i on;
    /// without such a head, the first one. Of the eighths, the CTA has to store the first.
    pub(super) fn store(&self, k: &Tiled, line: u32) {
        if !k.shape.store_qc() || line >= LINES {
            return;
        }
        self.on_rows(|| {
            for (i, values) in (0u32..).zip(&self.values) {
                let row = self.first_row + i;
                let (nth, token) = (row & 7, k.first + row);
                let mine = k.head.eq(nth) | (k.head.eq(0) & k.p.heads.le(nth));
                when(mine & token.lt(k.p.tokens), || {
                    let to = k.p.q_c.at64(token.mul_wide(Q_LORA as u32 / 2)).at(self.column);
                    to.offset((line * LINE) as i32).store_vec(values[line as usize].map(Var::get));
                });
            }
        });
    }
}

/// Row `token` of `qkv`; past the live tokens the last one again, whose results are never stored.
fn row(k: &Tiled, token: Reg<u32>) -> Global<u32> {
    let token = (k.first + token).min(k.p.tokens - 1);
    k.p.qkv.byte_at(token.mul_wide(k.p.qkv_stride * 2)).cast()
}

#[track_caller]
fn words() -> Words {
    std::array::from_fn(|_| Var::undefined())
}

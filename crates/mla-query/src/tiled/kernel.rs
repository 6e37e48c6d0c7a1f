//! The device code of [`tiled`](super).

use dsa_core::consts::{NOPE, Q_HEAD, Q_LORA};
use dsa_core::layout::mla_rows::QUERY_ROPE;
use ptx::*;

use crate::query::insert::Insert;
use crate::query::kernel::{
    COMPUTE, COMPUTE_THREADS, INSERT, INSERT_THREADS, MlaArgs, MlaParams, NORM_THREADS, finish, pack, query_rsqrt,
    squares, start, unpack,
};
use crate::query::output::QueryRows;
use crate::query::publish::Staged;
use crate::query::reduce::warp_sum;
use crate::shape::MlaShape;

/// CTAs of a cluster.
const CLUSTER: u32 = 8;
/// Q_B rows of a CTA: three tensor-core tiles.
const ROWS: u32 = Q_HEAD as u32 / CLUSTER;
/// Latent columns of a CTA.
const COLUMNS: u32 = 512 / CLUSTER;
/// Warps that compute.
const WARPS: u32 = COMPUTE_THREADS / 32;
/// Words (BF16 pairs) from one `q_c` row to the next.
const Q_C_PITCH: u32 = (Q_LORA as u32 + 32) / 2;
/// Words from one latent row to the next.
const LATENT_PITCH: u32 = (NOPE as u32 + 8) / 2;
/// 256-column pieces of a row: 8 columns per lane.
const PIECES: u32 = Q_LORA as u32 / 256;
/// 32-column steps of a warp's share of the projection.
const STEPS: u32 = Q_LORA as u32 / WARPS / 32;
/// Rows that a warp normalises at a time.
const TOGETHER: u32 = 2;

/// Builds the kernel of a tiled `shape`.
pub(crate) fn build(shape: &MlaShape, target: Target) -> Result<Kernel<MlaArgs>, VerifyError> {
    let bounds = LaunchBounds::threads(COMPUTE_THREADS + INSERT_THREADS).cluster(CLUSTER);
    let shape = *shape;
    ptx::build::<MlaArgs>(&shape.name(), target, bounds, |p| Tiled::new(shape, p).emit())
}

type Words = [Reg<u32>; 4];

struct Tiled {
    shape: MlaShape,
    p: MlaParams,
    /// Tokens of the cluster.
    tokens: u32,
    thread: Reg<u32>,
    warp: Reg<u32>,
    lane: Reg<u32>,
    /// `lane / 4`: row of an A fragment, column of a B fragment.
    group: Reg<u32>,
    /// `lane % 4`
    quarter: Reg<u32>,
    part: Reg<u32>,
    head: Reg<u32>,
    /// First token of the cluster.
    first: Reg<u32>,
    out: QueryRows,
    staged: Option<Staged>,
    w_uk: SharedArray<u32>,
    w_qa: SharedArray<u32>,
    q_c: SharedArray<u32>,
    parts: SharedArray<f32>,
    latent_rows: SharedArray<u32>,
    w_uk_full: Mbarrier,
    w_qa_full: Mbarrier,
    gathered: Mbarrier,
}

impl Tiled {
    fn new(shape: MlaShape, p: MlaParams) -> Tiled {
        let tokens = shape.tokens();
        // The swizzle's period.
        let w_uk = SharedArray::aligned("w_uk", NOPE as u32 * COLUMNS / 2, 1024);
        let w_qa = SharedArray::aligned("w_qa", Q_LORA as u32 / 2, 16);
        let q_c = SharedArray::aligned("q_c", tokens * Q_C_PITCH, 16);
        let parts = SharedArray::aligned("parts", WARPS * tokens * ROWS, 16);
        let latent_rows = SharedArray::aligned("latent_rows", tokens * LATENT_PITCH, 16);
        let barriers = MbarrierArray::new("barriers", 3);
        let lane = lane_index();
        let head = special(Special::CtaidY);
        let (part, first) = (cluster_rank(), special(Special::CtaidZ) * tokens);
        let staged = Staged::new(shape, part, first);
        Tiled {
            shape,
            p,
            tokens,
            thread: thread_index(),
            warp: warp_index(),
            lane,
            group: lane >> 2,
            quarter: lane & 3,
            part,
            head,
            first,
            out: QueryRows::new(shape, p, head, staged),
            staged,
            w_uk,
            w_qa,
            q_c,
            parts,
            latent_rows,
            w_uk_full: barriers.at(0),
            w_qa_full: barriers.at(1),
            gathered: barriers.at(2),
        }
    }

    fn emit(&self) {
        when(self.thread.eq(0), || self.load_weights());
        // ORDER: a peer's barriers and start, before the first store to it.
        cluster_arrive_relaxed();
        when_else(self.warp.lt(WARPS), || self.compute(), || self.insert());
        finish(&self.shape);
    }

    /// Initialises the barriers and starts the copies of the norm's weights and of the CTA's columns.
    fn load_weights(&self) {
        [self.w_uk_full, self.w_qa_full, self.gathered].into_iter().for_each(|bar| bar.init(1));
        fence_mbarrier_init();
        self.w_qa_full.arrive_expect(2 * Q_LORA as u32);
        copy_bulk(self.w_qa.ptr(), self.p.w_qa, 2 * Q_LORA as u32, self.w_qa_full, None);
        self.w_uk_full.arrive_expect(NOPE as u32 * COLUMNS * 2);
        let coords = [self.part * (2 * COLUMNS), self.head * NOPE as u32];
        copy_tensor(self.w_uk.ptr(), self.p.w_uk, &coords, self.w_uk_full, None);
        self.gathered.arrive_expect(self.tokens * NOPE as u32 * 2);
    }

    /// The inserting warps: the tile's tokens are dealt to the CTAs of all its clusters.
    fn insert(&self) {
        let thread = self.thread - COMPUTE_THREADS;
        let insert = Insert::new(self.shape, self.p, thread);
        start(&self.shape);
        let call = self.staged.map(|staged| staged.begin(&self.p, self.head, thread));
        let cta = self.head.mad(CLUSTER, self.part);
        for_range(cta, self.tokens, self.p.heads * CLUSTER, |j| {
            let token = self.first + j;
            when(token.lt(self.p.tokens), || insert.emit(token));
            sync_named(INSERT, INSERT_THREADS); // ORDER: the sums have been read, before the next token's.
        });
        cluster_wait();
        if let (Some(staged), Some(call)) = (&self.staged, &call) {
            staged.send(&self.p, self.head, thread, call);
        }
    }

    fn barrier(&self) {
        sync_named(COMPUTE, COMPUTE_THREADS);
    }

    fn compute(&self) {
        let q_b = self.load_q_b();
        self.normalise();
        if self.shape.store_qc() {
            self.store_qc();
        }
        self.project(&q_b);
        cluster_wait(); // ORDER: every peer has started and knows its barriers.
        self.gather();
        // ORDER: the cluster's rows have arrived; so have all stores to this CTA, which may then end.
        self.w_uk_full.wait(0);
        self.gathered.wait_cluster(0);
        when(self.warp.lt(self.tokens / 16 * 4), || self.absorb());
        self.staged.iter().for_each(Staged::arrive);
    }

    /// The warp's share of the CTA's Q_B rows, per 32-column step and tile of 8 rows: static, so before the wait.
    fn load_q_b(&self) -> Vec<[Words; 3]> {
        let row = self.head.mad(Q_HEAD as u32, self.part.mad(ROWS, self.group));
        let column = self.warp.mad(STEPS * 32, self.quarter * 8);
        let base = self.p.w_qb.byte_at(row.mul_wide(2 * Q_LORA as u32)).cast::<u32>().at(column >> 1);
        let at = |step: u32, tile: u32| base.offset((step * 16 + tile * 8 * Q_LORA as u32 / 2) as i32);
        (0..STEPS)
            .map(|step| std::array::from_fn(|tile| at(step, tile as u32).load_vec_as::<4>(LoadMode::STREAM)))
            .collect()
    }

    /// RMSNorm of every token's `q_a` into `q_c`, a warp a row: lane l holds columns `256 i + 8 l ..` of piece i.
    fn normalise(&self) {
        let Tiled { p, lane, .. } = self;
        let pieces = |row: Global<u32>| -> Vec<Words> {
            (0..PIECES).map(|i| row.offset((i * 128) as i32).load_vec::<4>()).collect()
        };
        let weights = self.w_qa.at(*lane * 4);
        self.barrier(); // ORDER: the initialised mbarriers, before every warp waits on them.
        start(&self.shape);
        for round in 0..self.tokens / WARPS / TOGETHER {
            let rows: Vec<Reg<u32>> = (0..TOGETHER).map(|i| self.warp + (round * TOGETHER + i) * WARPS).collect();
            let loaded: Vec<Vec<Words>> = rows
                .iter()
                .map(|row| {
                    // Past the live tokens the last one again: never stored.
                    let token = (self.first + *row).min(p.tokens - 1);
                    pieces(p.qkv.byte_at(token.mul_wide(p.qkv_stride * 2)).cast::<u32>().at(*lane * 4))
                })
                .collect();
            if round == 0 {
                self.w_qa_full.wait(0);
            }
            for (row, loaded) in rows.iter().zip(loaded) {
                let sums = loaded.iter().map(|words| warp_sum(squares(&unpack(*words))));
                let total = sums.reduce(|total, sum| total + sum).expect("some pieces");
                let r = query_rsqrt(&self.shape, total, p.eps);
                let to = self.q_c.at(row.mad(Q_C_PITCH, *lane * 4));
                for (i, words) in (0..).zip(&loaded) {
                    let (values, weights) = (unpack(*words), unpack(weights.offset(i * 128).load_vec::<4>()));
                    let scaled: Vec<_> = values.iter().zip(&weights).map(|(x, w)| *x * r * *w).collect();
                    to.offset(i * 128).store_vec(pack(&scaled));
                }
            }
        }
        self.barrier(); // ORDER: q_c, before the projection and its store read it.
    }

    /// The CTAs of head 0 store the tokens' `q_c`.
    fn store_qc(&self) {
        let Tiled { p, thread, part, .. } = self;
        when(self.head.eq(0) & thread.lt(NORM_THREADS), || {
            for i in 0..self.tokens / CLUSTER {
                let row = *part + i * CLUSTER;
                let token = self.first + row;
                when(token.lt(p.tokens), || {
                    let own = self.q_c.at(row.mad(Q_C_PITCH, *thread * 4)).load_vec::<4>();
                    p.q_c.at64(token.mul_wide(Q_LORA as u32 / 2)).at(*thread * 4).store_vec(own);
                });
            }
        });
    }

    /// The warp's columns of the CTA's Q_B rows times every token's `q_c`: one part of each result.
    fn project(&self, q_b: &[[Words; 3]]) {
        let tiles = self.tokens / 16;
        let sums: Vec<[MmaTile; 3]> = (0..tiles).map(|_| std::array::from_fn(|_| MmaTile::zero())).collect();
        let x = self.q_c.at(self.group.mad(Q_C_PITCH, self.warp.mad(STEPS * 16, self.quarter * 4)));
        let pair = Reg::<Bf16x2>::from_bits;
        for (step, q_b) in (0..).zip(q_b) {
            for (m, sums) in (0..).zip(&sums) {
                let row = |half: u32| x.offset((step * 16 + (16 * m + 8 * half) * Q_C_PITCH) as i32).load_vec::<4>();
                let (upper, lower) = (row(0), row(1));
                for (tile, words) in sums.iter().zip(q_b) {
                    for s in [0, 2] {
                        let a = [upper[s], lower[s], upper[s + 1], lower[s + 1]].map(pair);
                        tile.mma_bf16(a, [words[s], words[s + 1]].map(pair));
                    }
                }
            }
        }
        for (m, sums) in (0..).zip(&sums) {
            for half in 0..2 {
                let token = self.group + (16 * m + 8 * half);
                let row = self.warp.mad(self.tokens, token);
                let to = self.parts.at(row.mad(ROWS, self.quarter * 2));
                for (n, tile) in (0..).zip(sums) {
                    to.offset(8 * n).store_vec([tile.get(2 * half), tile.get(2 * half + 1)]);
                }
            }
        }
        self.barrier(); // ORDER: the parts, before they are added up.
    }

    /// Adds up the parts, eight rows of a token per thread: latent rows go to every CTA, rope rows to the query.
    fn gather(&self) {
        let Tiled { tokens, thread, .. } = self;
        let eights = ROWS / 8;
        assert!(tokens * eights <= COMPUTE_THREADS);
        when(thread.lt(tokens * eights), || {
            let (j, b) = (*thread % eights * 8, *thread / eights);
            let from = self.parts.at(b.mad(ROWS, j));
            let part = |w: u32| -> Vec<Reg<f32>> {
                let at = from.offset((w * tokens * ROWS) as i32);
                [at.load_vec::<4>(), at.offset(4).load_vec::<4>()].concat()
            };
            let sums = (1..WARPS)
                .fold(part(0), |sums, w| sums.into_iter().zip(part(w)).map(|(sum, more)| sum + more).collect());
            let words = pack(&sums);
            let row = self.part.mad(ROWS, j);
            let token = self.first + b;
            when(row.lt(NOPE as u32), || {
                let to = self.latent_rows.at(b.mad(LATENT_PITCH, row >> 1));
                for rank in 0..CLUSTER {
                    to.of_cta(rank).store_async(words, self.gathered.of_cta(rank));
                }
            });
            when(row.ge(NOPE as u32), || {
                self.out.store(token, row + (QUERY_ROPE.start - NOPE) as u32, words.map(Reg::<Bf16x2>::from_bits));
            });
        });
    }

    /// 16 tokens' latent rows times 16 of the CTA's columns of W_UK, into the query.
    fn absorb(&self) {
        let Tiled { group, quarter, .. } = self;
        let (columns, m) = (self.warp & 3, self.warp >> 2);
        let [even, odd] = [(); 2].map(|()| MmaTile::zero());
        let latent = self.latent_rows.at((m * 16 + *group).mad(LATENT_PITCH, *quarter));
        // Columns 16 `columns` + 2 g and the next: 16-byte chunk 2 `columns` + g / 4, where the swizzle of row r puts it.
        let chunk = columns * 2 + (*group >> 2);
        let [near, next] = [0u32, 1].map(|i| {
            let row = *quarter * 2 + i;
            self.w_uk.at(row.mad(COLUMNS / 2, ((chunk ^ row) << 2) + (*group & 3)))
        });
        for step in 0..NOPE as u32 / 16 {
            let a = [(0, 0), (8, 0), (0, 4), (8, 4)]
                .map(|(row, word)| latent.offset((row * LATENT_PITCH + word + step * 8) as i32).load())
                .map(Reg::<Bf16x2>::from_bits);
            // Rows k and k + 1; eight rows further on the swizzle is the same.
            let words = [0u32, 8].map(|rows| {
                let at = ((step * 16 + rows) * COLUMNS / 2) as i32;
                (near.offset(at).load(), next.offset(at).load())
            });
            let halves = |selector: u32| {
                words.map(|(k, k1): (Reg<u32>, Reg<u32>)| Reg::<Bf16x2>::from_bits(k.permute(k1, selector)))
            };
            even.mma_bf16(a, halves(0x5410));
            odd.mma_bf16(a, halves(0x7632));
        }
        for half in 0..2 {
            let token = self.first + m * 16 + *group + 8 * half;
            let [x0, x1, x2, x3] =
                [even.get(2 * half), odd.get(2 * half), even.get(2 * half + 1), odd.get(2 * half + 1)];
            let column = self.part.mad(COLUMNS, columns * 16 + *quarter * 4);
            self.out.store(token, column, [(x0, x1), (x2, x3)].map(|(low, high)| Reg::<Bf16x2>::from_f32(low, high)));
        }
    }
}

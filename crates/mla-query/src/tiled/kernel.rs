//! The device code of [`tiled`](super).

use dsa_core::consts::{NOPE, Q_HEAD, Q_LORA};
use dsa_core::layout::mla_rows::QUERY_ROPE;
use ptx::*;

use super::{CHUNKS, CLUSTER, COLUMNS, ROWS, SLICE};
use crate::query::insert::Insert;
use crate::query::kernel::{COMPUTE, COMPUTE_THREADS, INSERT, INSERT_THREADS, MlaArgs, MlaParams, finish, start};
use crate::query::numbers::{pack, query_rsqrt, squares, unpack};
use crate::query::output::QueryRows;
use crate::query::publish::Staged;
use crate::shape::MlaShape;

/// Warps that compute.
const WARPS: u32 = COMPUTE_THREADS / 32;
/// Threads that each normalise one 16-byte column chunk of every eighth row.
const NORM_THREADS: u32 = CHUNKS * 8;
/// Columns whose sums of squares 8 neighbouring threads make.
const GROUP: u32 = 64;
/// Such groups of a CTA.
const GROUPS: u32 = SLICE / GROUP;
/// Words of a swizzled row: 64 BF16.
const LINE: u32 = 32;
/// Tensor-core tiles of 8 Q_B rows that a CTA adds up.
const TILES: u32 = ROWS / 8;
/// 16-row steps of the absorption.
const STEPS: u32 = NOPE as u32 / 16;

/// Builds the kernel of a tiled `shape`.
pub(crate) fn build(shape: &MlaShape, target: Target) -> Result<Kernel<MlaArgs>, VerifyError> {
    // Two per multiprocessor: the next launch loads its weights beside this one.
    let bounds = LaunchBounds::threads(COMPUTE_THREADS + INSERT_THREADS).cluster(CLUSTER).min_ctas(2);
    let shape = *shape;
    ptx::build::<MlaArgs>(&shape.name(), target, bounds, |p| Tiled::new(shape, p).emit())
}

struct Tiled {
    shape: MlaShape,
    p: MlaParams,
    /// Tokens of the cluster.
    tokens: u32,
    thread: Reg<u32>,
    warp: Reg<u32>,
    lane: Reg<u32>,
    part: Reg<u32>,
    head: Reg<u32>,
    /// First token of the cluster.
    first: Reg<u32>,
    out: QueryRows,
    staged: Option<Staged>,
    q_b: Shared<u32>,
    w_uk: Shared<u32>,
    q_c: Shared<u32>,
    /// The CTA's sums of squares of each token's groups.
    own_sums: Shared<f32>,
    /// Those of the cluster.
    sums: Shared<f32>,
    norms: Shared<f32>,
    parts: Shared<f32>,
    latent_rows: Shared<u32>,
    q_b_full: Mbarrier,
    w_uk_full: Mbarrier,
    sums_full: Mbarrier,
    parts_full: Mbarrier,
    latent_full: Mbarrier,
}

impl Tiled {
    fn new(shape: MlaShape, p: MlaParams) -> Tiled {
        let tokens = shape.tokens();
        // 1024: the swizzle's period.
        let q_b = SharedArray::aligned("q_b", Q_HEAD as u32 * SLICE / 2, 1024);
        let w_uk = SharedArray::aligned("w_uk", NOPE as u32 * COLUMNS / 2, 1024);
        let q_c = SharedArray::aligned("q_c", tokens * SLICE / 2, 1024);
        // Read before the first row of q_c is written there.
        let sums: Shared<f32> = q_c.ptr().cast();
        assert!((CLUSTER + 1) * tokens * GROUPS <= q_c.len());
        let norms = SharedArray::new("norms", tokens);
        let (parts_words, latent_words) = (CLUSTER * tokens * ROWS, tokens * NOPE as u32 / 2);
        let (parts, latent_rows) = if shares_q_b(tokens) {
            assert!(parts_words + latent_words <= q_b.len());
            (q_b.ptr(), q_b.ptr().offset(parts_words as i32))
        } else {
            let own = |name, words| SharedArray::<u32>::aligned(name, words, 16).ptr();
            (own("parts", parts_words), own("latent_rows", latent_words))
        };
        let barriers = MbarrierArray::new("barriers", 5);
        let head = special(Special::CtaidY);
        let (part, first) = (cluster_rank(), special(Special::CtaidZ) * tokens);
        // Kept once the products have read q_c.
        let staged = Staged::over(shape, part, first, q_c);
        Tiled {
            shape,
            p,
            tokens,
            thread: thread_index(),
            warp: warp_index(),
            lane: lane_index(),
            part,
            head,
            first,
            out: QueryRows::new(shape, p, head, staged),
            staged,
            q_b: q_b.ptr(),
            w_uk: w_uk.ptr(),
            q_c: q_c.ptr(),
            own_sums: sums.offset((CLUSTER * tokens * GROUPS) as i32),
            sums,
            norms: norms.ptr(),
            parts: parts.cast(),
            latent_rows,
            q_b_full: barriers.at(0),
            w_uk_full: barriers.at(1),
            sums_full: barriers.at(2),
            parts_full: barriers.at(3),
            latent_full: barriers.at(4),
        }
    }

    fn emit(&self) {
        when(self.thread.eq(0), || self.load_weights());
        // ORDER: a peer's barriers and start, before the first store to it.
        cluster_arrive_relaxed();
        when_else(self.warp.lt(WARPS), || self.compute(), || self.insert());
        finish(&self.shape);
    }

    /// Initialises the barriers and starts the copies of the CTA's share of the weights.
    fn load_weights(&self) {
        let Tiled { p, tokens, part, head, .. } = *self;
        [self.q_b_full, self.w_uk_full, self.sums_full, self.latent_full].into_iter().for_each(|bar| bar.init(1));
        // Every computing warp arrives with the parts that stay here.
        self.parts_full.init(1 + WARPS);
        fence_mbarrier_init();
        self.q_b_full.arrive_expect(Q_HEAD as u32 * SLICE * 2);
        for line in 0..SLICE / 64 {
            let to = self.q_b.offset((line * Q_HEAD as u32 * LINE) as i32);
            let coords = [part.mad(2 * SLICE, line * 128), head * Q_HEAD as u32];
            copy_tensor(to, p.w_qb_map, &coords, self.q_b_full, None);
        }
        self.w_uk_full.arrive_expect(NOPE as u32 * COLUMNS * 2);
        let coords = [part * (2 * COLUMNS), head * NOPE as u32];
        copy_tensor(self.w_uk, p.w_uk, &coords, self.w_uk_full, None);
        self.sums_full.arrive_expect(CLUSTER * tokens * GROUPS * 4);
        self.parts_full.arrive_expect((CLUSTER - 1) * tokens * ROWS * 4);
        self.latent_full.arrive_expect(tokens * NOPE as u32 * 2);
    }

    /// The inserting warps: the tile's tokens are dealt to the CTAs of all its clusters.
    fn insert(&self) {
        let thread = self.thread - COMPUTE_THREADS;
        let insert = Insert::new(self.shape, self.p, thread);
        start(&self.shape);
        cluster_wait();
        if shares_q_b(self.tokens) {
            cluster_arrive_relaxed(); // ORDER: none; these warps read nothing that is shared.
        }
        let call = self.staged.map(|staged| staged.begin(&self.p, self.head, thread));
        let cta = self.head.mad(CLUSTER, self.part);
        for_range(cta, self.tokens, self.p.heads * CLUSTER, |j| {
            let token = self.first + j;
            when(token.lt(self.p.tokens), || insert.emit(token));
            sync_named(INSERT, INSERT_THREADS); // ORDER: the sums have been read, before the next token's.
        });
        if shares_q_b(self.tokens) {
            cluster_wait();
        }
        if let (Some(staged), Some(call)) = (&self.staged, &call) {
            staged.send(&self.p, self.head, thread, call);
        }
    }

    fn barrier(&self) {
        sync_named(COMPUTE, COMPUTE_THREADS);
    }

    fn compute(&self) {
        self.normalise();
        let sums = if by_warpgroups(self.tokens) { self.project_by_warpgroups() } else { self.project() };
        self.send_parts(sums);
        self.gather();
        self.absorb();
        self.staged.iter().for_each(Staged::arrive);
    }

    /// Row `token` of `qkv`; past the live tokens the last one again, whose results are never stored.
    fn row(&self, token: Reg<u32>) -> Global<u32> {
        let token = (self.first + token).min(self.p.tokens - 1);
        self.p.qkv.byte_at(token.mul_wide(self.p.qkv_stride * 2)).cast()
    }

    /// RMSNorm of the CTA's columns of every token's `q_a` into `q_c`. The cluster exchanges the sums of squares of groups of
    /// 64 columns, so that every CTA adds up whole rows in the order of the single kernel.
    fn normalise(&self) {
        let Tiled { p, tokens, thread, part, .. } = self;
        let slice: Vec<[Var<u32>; 4]> = (0..tokens / 8).map(|_| words()).collect();
        let weights = words();
        let has_chunk = thread.lt(NORM_THREADS);
        let (chunk, first_row) = (*thread % CHUNKS, *thread / CHUNKS);
        let column = part.mad(SLICE / 2, chunk * 4);
        when(has_chunk, || set(&weights, p.w_qa.at(column).load_vec_as::<4>(LoadMode::STREAM)));
        start(&self.shape);
        when(has_chunk, || {
            (0u32..).zip(&slice).for_each(|(i, to)| set(to, self.row(first_row + 8 * i).at(column).load_vec::<4>()));
            for (i, words) in (0u32..).zip(&slice) {
                let own = squares(&unpack(words.map(Var::get)));
                let sum = [1, 2, 4].into_iter().fold(own, |sum, distance| sum + shuffle_xor(sum, distance));
                when((chunk & 7).eq(0), || {
                    self.own_sums.at((first_row + 8 * i).mad(GROUPS, chunk >> 3)).store(sum);
                });
            }
        });
        cluster_wait(); // ORDER: every peer has started and knows its barriers.
        self.barrier(); // ORDER: the CTA's sums, before they are sent.
        self.exchange_sums();
        when(has_chunk, || {
            let weights = unpack(weights.map(Var::get));
            // Rows of 64 columns, their 16-byte chunks swizzled as the tensor copies do.
            let line = (chunk >> 3).mad(*tokens, first_row);
            let to = self.q_c.at(line.mad(LINE, ((chunk ^ first_row) & 7) << 2));
            for (i, words) in (0u32..).zip(&slice) {
                let row = first_row + 8 * i;
                let r = self.norms.at(row).load();
                let values = unpack(words.map(Var::get));
                let scaled: Vec<_> = values.iter().zip(&weights).map(|(x, w)| *x * r * *w).collect();
                let normalised = pack(&scaled);
                to.offset((8 * i * LINE) as i32).store_vec(normalised);
                if self.shape.store_qc() {
                    // Head i stores every eighth row from i on; without such a head, the first one.
                    let mine = self.head.eq(i) | (self.head.eq(0) & p.heads.le(i));
                    let token = self.first + row;
                    when(mine & token.lt(p.tokens), || {
                        p.q_c.at64(token.mul_wide(Q_LORA as u32 / 2)).at(column).store_vec(normalised);
                    });
                }
            }
        });
        if by_warpgroups(*tokens) {
            fence_proxy_async(); // ORDER: this thread's q_c, before warpgroup products read it.
        }
        self.barrier(); // ORDER: q_c, before the projection reads it.
    }

    /// Sends the CTA's sums of squares to the cluster and makes each token's factor of all of them.
    fn exchange_sums(&self) {
        let Tiled { p, tokens, thread, part, .. } = self;
        let fours = tokens * GROUPS / 4;
        for round in 0..(CLUSTER * fours).div_ceil(COMPUTE_THREADS) {
            let item = *thread + round * COMPUTE_THREADS;
            when(item.lt(CLUSTER * fours), || {
                let (rank, four) = (item / fours, item % fours * 4);
                let to = self.sums.at(part.mad(tokens * GROUPS, four)).of_cta(rank);
                to.store_async(self.own_sums.at(four).load_vec::<4>(), self.sums_full.of_cta(rank));
            });
        }
        self.sums_full.wait_cluster(0); // ORDER: the cluster's sums.
        when(thread.lt(*tokens), || {
            let from = self.sums.at(*thread * GROUPS);
            let sum = |group: u32| from.offset((group / GROUPS * tokens * GROUPS + group % GROUPS) as i32).load();
            // The rest of the tree over 32 neighbours, then one after the other.
            let trees =
                (0..CLUSTER * GROUPS / 4).map(|i| (sum(4 * i) + sum(4 * i + 1)) + (sum(4 * i + 2) + sum(4 * i + 3)));
            let total = trees.reduce(|total, tree| total + tree).expect("some groups");
            self.norms.at(*thread).store(query_rsqrt(&self.shape, total, p.eps));
        });
        self.barrier(); // ORDER: the factors; the sums have been read, before q_c takes their place.
    }

    /// Every token's `q_c` times 24 rows of Q_B, over the CTA's columns: two tiles of latent rows and one of rope rows, which
    /// the CTA of the warp's number adds up.
    fn project(&self) -> Vec<Part> {
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
        let tiles = sums.iter().flatten().zip(0u32..);
        tiles.map(|(tile, i)| Part::new(*warp, i.into(), std::array::from_fn(|j| tile.get(j as u32)))).collect()
    }

    /// All 64 tokens' `q_c` times 96 rows of Q_B, over the CTA's columns, by each of two warpgroups: a warp holds 16 tokens
    /// and all 12 tiles of rows.
    fn project_by_warpgroups(&self) -> Vec<Part> {
        let half = self.warp >> 2;
        let accumulator = Accumulator::new(Q_HEAD as u32 / 2);
        let a = self.q_c.descriptor_k_major_128();
        let b = self.q_b.at(half * (Q_HEAD as u32 / 2 * LINE)).descriptor_k_major_128();
        self.q_b_full.wait(0);
        wgmma_fence();
        for step in 0..SLICE / 16 {
            // Lines of 64 columns; a step along one is 32 bytes.
            let (line, within) = (u64::from(step / 4), u64::from(step % 4));
            let at = |rows: u32| line * u64::from(rows * LINE * 4 / 16) + within * 2;
            accumulator.mma_bf16(a + at(self.tokens), b + at(Q_HEAD as u32), step != 0);
        }
        wgmma_commit();
        wgmma_wait(0);
        let is_second = half.ne(0);
        // CTA c adds up latent tiles 2 c and 2 c + 1 and rope tile c.
        let latent = NOPE as u32 / 8;
        let place = |tile: u32| if tile < latent { (tile / 2, tile % 2) } else { (tile - latent, 2) };
        (0..Q_HEAD as u32 / 16)
            .map(|tile| {
                let (first, second) = (place(tile), place(tile + Q_HEAD as u32 / 16));
                let rank = is_second.select::<u32>(second.0, first.0);
                let index = is_second.select::<u32>(second.1, first.1);
                let index = (self.warp & 3).mad(TILES, index);
                Part::new(rank, index, std::array::from_fn(|j| accumulator.get(4 * tile + j as u32)))
            })
            .collect()
    }

    /// Sends the warp's sums to the CTAs that add them up, as the tensor core left them.
    fn send_parts(&self, parts: Vec<Part>) {
        let Tiled { tokens, lane, part, warp, .. } = self;
        if shares_q_b(*tokens) {
            // ORDER: every CTA of the cluster has read its Q_B, before anyone writes there. The fence of a release is dear
            // while many warps wait for it, so one releases what the CTA's barrier has handed to it.
            self.barrier();
            when_else(warp.eq(0), cluster_arrive, cluster_arrive_relaxed);
            cluster_wait();
        }
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
    fn gather(&self) {
        let Tiled { tokens, warp, .. } = self;
        let groups = tokens / 16;
        self.parts_full.wait_cluster(0); // ORDER: the cluster's parts.
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

    /// Stores a tensor-core tile of 16 tokens from `row` on and 8 elements from `column` on: neighbouring lanes exchange
    /// halves, so that each holds four elements of one token.
    fn store_tile(&self, row: Reg<u32>, column: Reg<u32>, [upper, lower]: [Reg<Bf16x2>; 2]) {
        let (group, quarter) = (self.lane >> 2, self.lane & 3);
        let odd = (quarter & 1).ne(0);
        let choose = |p: Pred, a: Reg<Bf16x2>, b: Reg<Bf16x2>| p.select::<u32>(a.to_bits(), b.to_bits());
        let kept = choose(odd, lower, upper);
        let received = shuffle_xor(choose(odd, upper, lower), 1);
        let pairs = [odd.select::<u32>(received, kept), odd.select::<u32>(kept, received)];
        let token = self.first + row + group + (quarter & 1) * 8;
        self.out.store(token, column + (quarter >> 1) * 4, pairs.map(Reg::<Bf16x2>::from_bits));
    }

    /// Every token's latent rows times the warp's 8 of the CTA's columns of W_UK, into the query.
    fn absorb(&self) {
        let Tiled { tokens, lane, warp, .. } = self;
        self.w_uk_full.wait(0);
        // Lane l names row l of 32, of which the warp's chunk lies at warp ^ (l % 8).
        let from = self.w_uk.at(lane.mad(LINE, (*warp ^ (*lane & 7)) << 2));
        let weights: Vec<[Reg<Bf16x2>; 4]> = (0..NOPE as u32 / 32)
            .map(|rows| from.offset((rows * 32 * LINE) as i32).load_matrices_transposed())
            .collect();
        let latent = self.latent_rows.at(*lane * 4);
        // ORDER: the cluster's rows have arrived; so have all stores to this CTA, which may then end.
        self.latent_full.wait_cluster(0);
        for m in 0..tokens / 16 {
            let tile = MmaTile::zero();
            for step in 0..STEPS {
                let x = latent.offset(((m * STEPS + step) * 128) as i32).load_vec::<4>();
                let w = &weights[step as usize / 2][2 * (step as usize % 2)..];
                tile.mma_bf16(x.map(Reg::<Bf16x2>::from_bits), [w[0], w[1]]);
            }
            let pairs = [0, 2].map(|j| Reg::<Bf16x2>::from_f32(tile.get(j), tile.get(j + 1)));
            self.store_tile(Reg::from(16 * m), self.part.mad(COLUMNS, *warp * 8), pairs);
        }
    }
}

/// One warp's part of a tensor-core tile of sums, and where it goes.
struct Part {
    /// The CTA that adds it up.
    rank: Reg<u32>,
    /// Which tile of that CTA.
    tile: Reg<u32>,
    values: [Reg<f32>; 4],
}

impl Part {
    fn new(rank: Reg<u32>, tile: Reg<u32>, values: [Reg<f32>; 4]) -> Part {
        Part { rank, tile, values }
    }
}

/// Whether two warpgroups multiply, whose tiles are 64 tokens; fewer tokens go to each warp's own tensor core.
fn by_warpgroups(tokens: u32) -> bool {
    tokens == 64
}

/// Whether the exchanged sums take the place of Q_B, for which the cluster must meet once more.
fn shares_q_b(tokens: u32) -> bool {
    tokens > 16
}

/// Four words that a branch sets.
#[track_caller]
fn words() -> [Var<u32>; 4] {
    std::array::from_fn(|_| Var::undefined())
}

#[track_caller]
fn set(to: &[Var<u32>; 4], from: [Reg<u32>; 4]) {
    to.iter().zip(from).for_each(|(to, from)| to.set(from));
}

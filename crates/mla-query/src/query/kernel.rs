//! The device code of [`query`](super).

use dsa_core::consts::{KV_LORA, NOPE, Q_HEAD, Q_LORA};
use dsa_core::layout::mla_rows::QUERY_ROPE;
use ptx::*;

use super::insert::Insert;
use super::numbers::{pack, query_rsqrt, squares, unpack};
use super::output::QueryRows;
use super::publish::Staged;
use super::reduce::{warp_sum, warp_sums};
use crate::shape::MlaShape;
use crate::tiled;

kernel_args! {
    /// Arguments of the MLA query. E is the query's element: BF16 or E4M3.
    pub struct MlaArgs / MlaParams {
        /// E `[tokens, heads, 576]`, output
        pub query: DevicePtr<u8>,
        /// BF16 `[tokens, 1536]`, output, unused without `store_qc`
        pub q_c: DevicePtr<u32>,
        /// the cache's first entry, output
        pub cache: DevicePtr<u8>,
        /// int32 `[1]`: slots at or past the capacity are added to it
        pub dropped: DevicePtr<u32>,
        /// BF16 `[tokens, 2112]`, rows `qkv_stride` apart
        pub qkv: DevicePtr<u16>,
        /// BF16 `[1536]`
        pub w_qa: DevicePtr<u32>,
        /// BF16 `[512]`
        pub w_kva: DevicePtr<u32>,
        /// BF16 `[heads * 192, 1536]`, 8 tokens or fewer
        pub w_qb: DevicePtr<u16>,
        /// the same, tiles of tokens: [`qb_map`]
        pub w_qb_map: TensorMap,
        /// BF16 `[heads, 128, 512]`: [`uk_map`]
        pub w_uk: TensorMap,
        /// int64 `[tokens]`
        pub slots: DevicePtr<i64>,
        /// FP32 `[1]`, unused beside a BF16 query
        pub q_scale_inv: DevicePtr<f32>,
        /// FP32 `[1]`: the per-tensor scale (divide) or its inverse (multiply); unused in block-scaled forms
        pub k_scale: DevicePtr<f32>,
        /// this rank's boxes of the mailbox; this and what follows to `status` unused without publishing
        pub boxes: DevicePtr<u64>,
        /// `[ranks]`: address of every rank's boxes
        pub peers: DevicePtr<u64>,
        /// address of every rank's boxes at once
        pub multicast: u64,
        /// u32 `[4]`: the mailbox's state, in and out
        pub call: DevicePtr<u32>,
        /// u32: 0 while the mailbox works
        pub status: DevicePtr<u32>,
        /// entries that the cache holds
        pub capacity: u64,
        /// bytes from one page to the next
        pub page_stride: u64,
        /// bytes from one entry of a page to the next
        pub token_stride: u32,
        /// elements from one `qkv` row to the next
        pub qkv_stride: u32,
        /// live tokens, at least 1
        pub tokens: u32,
        /// heads
        pub heads: u32,
        /// this rank
        pub rank: u32,
        /// of both norms
        pub eps: f32,
    }
}

/// Threads that normalise, project and absorb.
pub(crate) const COMPUTE_THREADS: u32 = 256;
/// Threads that insert a KV row: 8 of its columns each.
pub(crate) const INSERT_THREADS: u32 = 64;
/// Named barrier of the computing warps.
pub(crate) const COMPUTE: u32 = 1;
/// Named barrier of the inserting warps.
pub(crate) const INSERT: u32 = 2;
/// Threads that hold a row of `q_a`.
pub(crate) const NORM_THREADS: u32 = Q_LORA as u32 / 8;
/// Q_B rows of a warp.
const WARP_ROWS: u32 = 3;
/// Columns that a warp multiplies at a time: 8 per lane.
const CHUNK: u32 = 256;

/// The tensor map of `W_UK` at `base`: one copy brings a CTA's columns of one head.
///
/// # Errors
/// A base off 16 bytes.
pub fn uk_map(base: DevicePtr<u16>, shape: &MlaShape) -> Result<TensorMapDesc, TensorMapError> {
    let row = 2 * KV_LORA as u64;
    let rows = u64::from(shape.heads()) * NOPE as u64;
    let columns = 2 * shape.columns();
    let swizzle = if shape.is_tiled() { Swizzle::B128 } else { Swizzle::None };
    TensorMapDesc::new(base.address(), &[row, rows], &[row], &[columns, NOPE as u32], swizzle)
}

/// The tensor map of `Q_B` at `base`: one copy brings 64 columns of `copy_rows` rows.
///
/// # Errors
/// A base off 16 bytes.
pub fn qb_map(base: DevicePtr<u16>, shape: &MlaShape, copy_rows: u32) -> Result<TensorMapDesc, TensorMapError> {
    let row = 2 * Q_LORA as u64;
    let rows = u64::from(shape.heads()) * Q_HEAD as u64;
    TensorMapDesc::new(base.address(), &[row, rows], &[row], &[128, copy_rows], Swizzle::B128)
}

/// Builds the kernel of `shape` for `target`.
///
/// # Errors
/// Only if the builder's verifier refuses the result, which is a defect here.
pub fn build(shape: &MlaShape, target: Target) -> Result<Kernel<MlaArgs>, VerifyError> {
    if shape.is_tiled() {
        return tiled::build(shape, target);
    }
    let bounds = LaunchBounds::threads(COMPUTE_THREADS + INSERT_THREADS).cluster(shape.cluster());
    let shape = *shape;
    ptx::build::<MlaArgs>(&shape.name(), target, bounds, |p| Query::new(shape, p).emit())
}

/// From here on `qkv` and slots may be read and outputs written: waits for the kernel that writes them, unless the shape is
/// late, when they were complete before this kernel started.
#[track_caller]
pub(crate) fn start(shape: &MlaShape) {
    if !shape.late() {
        wait_for_dependencies();
    }
    if !shape.hold() {
        launch_dependents();
    }
}

/// The end of every thread: a late kernel ends after the one that it ran beside, so that whoever waits for this one waits
/// for both.
#[track_caller]
pub(crate) fn finish(shape: &MlaShape) {
    if shape.late() {
        wait_for_dependencies();
    }
}

struct Query {
    shape: MlaShape,
    p: MlaParams,
    /// Tokens of the cluster.
    tokens: u32,
    /// Q_B rows of the CTA.
    rows: u32,
    /// Latent columns of the CTA.
    columns: u32,
    /// Warps that share a row.
    splits: u32,
    thread: Reg<u32>,
    warp: Reg<u32>,
    lane: Reg<u32>,
    part: Reg<u32>,
    head: Reg<u32>,
    /// First token of the cluster.
    first: Reg<u32>,
    out: QueryRows,
    staged: Option<Staged>,
    q_b: SharedArray<u32>,
    w_uk: SharedArray<u32>,
    q_c: SharedArray<u32>,
    norms: SharedArray<f32>,
    row_sums: SharedArray<f32>,
    latent_rows: SharedArray<f32>,
    column_sums: SharedArray<f32>,
    q_b_full: Mbarrier,
    w_uk_full: Mbarrier,
    gathered: Mbarrier,
}

impl Query {
    fn new(shape: MlaShape, p: MlaParams) -> Query {
        let (tokens, rows, columns) = (shape.tokens(), shape.rows(), shape.columns());
        let warps = COMPUTE_THREADS / 32;
        let splits = warps * WARP_ROWS / rows;
        let pairs = |n: u32| n / 2;
        let q_b = SharedArray::aligned("q_b", pairs(rows * Q_LORA as u32), 128);
        let w_uk = SharedArray::aligned("w_uk", pairs(NOPE as u32 * columns), 128);
        let q_c = SharedArray::aligned("q_c", pairs(tokens * Q_LORA as u32), 16);
        let norms = SharedArray::new("norms", NORM_THREADS / 32 * tokens);
        let row_sums = SharedArray::aligned("rows", splits * tokens * rows, 16);
        let latent_rows = SharedArray::aligned("latent_rows", tokens * NOPE as u32, 16);
        let column_sums = SharedArray::aligned("columns", 2 * COMPUTE_THREADS * tokens, 16);
        let barriers = MbarrierArray::new("barriers", 3);
        let head = special(Special::CtaidY);
        let (part, first) = (cluster_rank(), special(Special::CtaidZ) * tokens);
        let staged = Staged::new(shape, part, first);
        Query {
            shape,
            p,
            tokens,
            rows,
            columns,
            splits,
            thread: thread_index(),
            warp: warp_index(),
            lane: lane_index(),
            part,
            head,
            first,
            out: QueryRows::new(shape, p, head, staged),
            staged,
            q_b,
            w_uk,
            q_c,
            norms,
            row_sums,
            latent_rows,
            column_sums,
            q_b_full: barriers.at(0),
            w_uk_full: barriers.at(1),
            gathered: barriers.at(2),
        }
    }

    fn emit(&self) {
        when(self.thread.eq(0), || self.load_weights());
        // ORDER: a peer's barriers and start, before the first store to it.
        cluster_arrive_relaxed();
        when_else(
            self.warp.lt(COMPUTE_THREADS / 32),
            || self.compute(),
            || {
                let thread = self.thread - COMPUTE_THREADS;
                let insert = Insert::new(self.shape, self.p, thread);
                start(&self.shape);
                let begun = self.staged.map(|staged| (staged, staged.begin(&self.p, self.head, thread)));
                let token = self.first + self.part;
                when(self.head.eq(0) & self.part.lt(self.tokens) & token.lt(self.p.tokens), || insert.emit(token));
                cluster_wait();
                if let Some((staged, begun)) = begun {
                    staged.send(&self.p, self.head, thread, begun);
                }
            },
        );
        finish(&self.shape);
    }

    /// Initialises the barriers and starts the copies of the weights.
    fn load_weights(&self) {
        let Query { p, rows, columns, .. } = self;
        let q_b_full = (!self.shape.thread_copies()).then_some(self.q_b_full);
        q_b_full.into_iter().chain([self.w_uk_full, self.gathered]).for_each(|bar| bar.init(1));
        self.staged.iter().for_each(Staged::init);
        fence_mbarrier_init();
        if !self.shape.thread_copies() {
            let q_b_bytes = rows * Q_LORA as u32 * 2;
            self.q_b_full.arrive_expect(q_b_bytes);
            copy_bulk(self.q_b.ptr(), self.q_b_rows(), q_b_bytes, self.q_b_full, None);
        }
        self.w_uk_full.arrive_expect(NOPE as u32 * columns * 2);
        let coords = [self.part * (2 * columns), self.head * NOPE as u32];
        copy_tensor(self.w_uk.ptr(), p.w_uk, &coords, self.w_uk_full, None);
        self.gathered.arrive_expect(self.tokens * NOPE as u32 * 4);
    }

    /// The CTA's rows of Q_B.
    fn q_b_rows(&self) -> Global<u32> {
        let row = self.head.mad(Q_HEAD as u32, self.part * self.rows);
        self.p.w_qb.byte_at(row.mul_wide(2 * Q_LORA as u32)).cast()
    }

    /// Starts the copies of the CTA's rows of Q_B by all computing threads.
    fn copy_q_b(&self) {
        let from = self.q_b_rows();
        let (from, to) = (from.at(self.thread * 4), self.q_b.at(self.thread * 4));
        for round in 0..self.rows * Q_LORA as u32 / 8 / COMPUTE_THREADS {
            let at = (round * COMPUTE_THREADS * 4) as i32;
            copy_16(to.offset(at), from.offset(at), None);
        }
        commit_copies();
    }

    fn barrier(&self) {
        sync_named(COMPUTE, COMPUTE_THREADS);
    }

    fn compute(&self) {
        if self.shape.thread_copies() {
            self.copy_q_b();
        }
        self.normalise();
        if self.shape.store_qc() {
            self.store_qc();
        }
        self.project();
        cluster_wait(); // ORDER: every peer has started and knows its barriers.
        self.gather();
        self.store_rope();
        self.absorb();
        self.store_latent();
        self.staged.iter().for_each(Staged::arrive);
    }

    /// The token `b` of the cluster, the last live one for those past it.
    fn clamped(&self, b: u32) -> Reg<u32> {
        (self.first + b).min(self.p.tokens - 1)
    }

    /// RMSNorm of every token's `q_a` into `q_c`.
    fn normalise(&self) {
        let Query { p, thread, tokens, .. } = self;
        let warps = NORM_THREADS / 32;
        let weights: [Var<u32>; 4] = std::array::from_fn(|_| Var::undefined());
        let values: Vec<[Var<u32>; 4]> = (0..*tokens).map(|_| std::array::from_fn(|_| Var::undefined())).collect();
        let normalises = thread.lt(NORM_THREADS);
        when(normalises, || {
            let own = p.w_qa.at(*thread * 4).load_vec_as::<4>(LoadMode::STREAM);
            weights.iter().zip(own).for_each(|(to, from)| to.set(from));
        });
        start(&self.shape);
        when(normalises, || {
            for (b, values) in (0..*tokens).zip(&values) {
                let row = p.qkv.byte_at(self.clamped(b).mul_wide(p.qkv_stride * 2));
                let own = row.cast::<u32>().at(*thread * 4).load_vec::<4>();
                values.iter().zip(own).for_each(|(to, from)| to.set(from));
            }
            for (b, values) in (0..*tokens).zip(&values) {
                let sum = warp_sum(squares(&unpack(values.map(Var::get))));
                when(self.lane.eq(0), || self.norms.at(self.warp + b * warps).store(sum));
            }
        });
        self.barrier(); // ORDER: the warps' sums, before every thread adds them up.
        when(normalises, || {
            let weights = unpack(weights.map(Var::get));
            for (b, values) in (0..*tokens).zip(&values) {
                let sums = (0..warps).map(|w| self.norms.at(b * warps + w).load());
                let total = sums.reduce(|total, sum| total + sum).expect("some warps");
                let r = query_rsqrt(&self.shape, total, p.eps);
                let values = unpack(values.map(Var::get));
                let scaled: Vec<_> = values.iter().zip(&weights).map(|(x, w)| *x * r * *w).collect();
                self.q_c.at(*thread * 4 + b * (Q_LORA as u32 / 2)).store_vec(pack(&scaled));
            }
        });
        if self.shape.thread_copies() {
            wait_copies(0); // ORDER: the thread's share of Q_B, before the barrier hands it to the others.
        }
        self.barrier(); // ORDER: q_c, before the projection and its store read it.
    }

    /// Each CTA of head 0 stores one token's `q_c`.
    fn store_qc(&self) {
        let Query { p, thread, part, .. } = self;
        let token = self.first + *part;
        let mine = self.head.eq(0) & part.lt(self.tokens) & token.lt(p.tokens) & thread.lt(NORM_THREADS);
        when(mine, || {
            let own = self.q_c.at(part.mad(Q_LORA as u32 / 2, *thread * 4)).load_vec::<4>();
            p.q_c.at64(token.mul_wide(Q_LORA as u32 / 2)).at(*thread * 4).store_vec(own);
        });
    }

    /// The CTA's rows of Q_B times every token's `q_c`.
    fn project(&self) {
        let Query { tokens, rows, splits, lane, warp, .. } = self;
        let groups = rows / WARP_ROWS;
        let (group, split) = (*warp % groups, *warp / groups);
        let chunks = Q_LORA as u32 / CHUNK / splits;
        let pairs = Q_LORA as u32 / 2;
        // Pairs of this lane's first column.
        let column = (split * (chunks * CHUNK / 2)) + *lane * 4;
        let row = self.q_b.at((group * WARP_ROWS).mad(pairs, column));
        let token = self.q_c.at(column);
        let zero = [Reg::from(0.0f32); 2];
        let mut sums = vec![zero; (WARP_ROWS * tokens) as usize];
        if !self.shape.thread_copies() {
            self.q_b_full.wait(0);
        }
        for chunk in 0..chunks {
            let at = |i: u32| (i * pairs + chunk * CHUNK / 2) as i32;
            let weights: Vec<_> = (0..WARP_ROWS).map(|i| unpack(row.offset(at(i)).load_vec::<4>())).collect();
            for b in 0..*tokens {
                let x = unpack(token.offset(at(b)).load_vec::<4>());
                for (i, weights) in (0..WARP_ROWS).zip(&weights) {
                    let [even, odd] = &mut sums[(i * tokens + b) as usize];
                    for k in (0..8).step_by(2) {
                        *even = weights[k].fma(x[k], *even);
                        *odd = weights[k + 1].fma(x[k + 1], *odd);
                    }
                }
            }
        }
        let sums: Vec<_> = sums.into_iter().map(|[even, odd]| even + odd).collect();
        let (sum, slots) = warp_sums(&sums);
        let lanes = 32 / slots;
        let index = *lane / lanes;
        when((*lane & (lanes - 1)).eq(0) & index.lt(WARP_ROWS * tokens), || {
            let (i, b) = (index / *tokens, index % *tokens);
            let row = group.mad(WARP_ROWS, i);
            self.row_sums.at((split * *tokens + b).mad(*rows, row)).store(sum);
        });
        self.barrier(); // ORDER: the row sums, before they are sent and stored.
    }

    /// Four consecutive rows of token `b` from row `j` on.
    fn projected(&self, b: Reg<u32>, j: Reg<u32>) -> [Reg<Bf16x2>; 2] {
        let mut sums = self.row_sums.at(b.mad(self.rows, j)).load_vec::<4>();
        for split in 1..self.splits {
            let more = self.row_sums.at((b + split * self.tokens).mad(self.rows, j)).load_vec::<4>();
            sums = std::array::from_fn(|i| sums[i] + more[i]);
        }
        [0, 2].map(|i| Reg::<Bf16x2>::from_f32(sums[i], sums[i + 1]))
    }

    /// Sends the CTA's latent rows to every CTA of the cluster, 16 bytes at a time.
    fn gather(&self) {
        let Query { tokens, rows, .. } = self;
        let (cluster, fours) = (self.shape.cluster(), rows / 4);
        self.each(fours * tokens * cluster, |item| {
            let (rank, item) = (item % cluster, item / cluster);
            let (j, b) = (item % fours * 4, item / fours);
            let row = self.part.mad(*rows, j);
            when(row.lt(NOPE as u32), || {
                let to = self.latent_rows.at(b.mad(NOPE as u32, row)).of_cta(rank);
                let [low, high] = self.projected(b, j);
                let values = [low.low_f32(), low.high_f32(), high.low_f32(), high.high_f32()];
                to.store_async(values, self.gathered.of_cta(rank));
            });
        });
    }

    /// Writes the CTA's rope rows to the query.
    fn store_rope(&self) {
        let Query { tokens, rows, .. } = self;
        let fours = rows / 4;
        self.each(fours * tokens, |item| {
            let (j, b) = (item % fours * 4, item / fours);
            let row = self.part.mad(*rows, j);
            when(row.ge(NOPE as u32), || {
                let column = row + (QUERY_ROPE.start - NOPE) as u32;
                self.out.store(self.first + b, column, self.projected(b, j));
            });
        });
    }

    /// The gathered rows times the CTA's columns of W_UK: a thread takes two columns and a share of the 128 rows.
    fn absorb(&self) {
        let Query { tokens, columns, .. } = self;
        let (pair, group, share) = self.column_share();
        let weights = self.w_uk.at((group * share).mad(columns / 2, pair));
        let latent = self.latent_rows.at(group * share);
        let mut sums = vec![[Reg::from(0.0f32); 2]; *tokens as usize];
        self.w_uk_full.wait(0);
        // ORDER: the cluster's rows have arrived; so have all stores to this CTA, which may then end.
        self.gathered.wait_cluster(0);
        for four in (0..share).step_by(4) {
            let w: Vec<_> =
                (four..four + 4).map(|i| unpack([weights.offset((i * columns / 2) as i32).load()])).collect();
            for (b, [low, high]) in (0..*tokens).zip(&mut sums) {
                let x = latent.offset((b * NOPE as u32 + four) as i32).load_vec::<4>();
                for (x, w) in x.into_iter().zip(&w) {
                    *low = x.fma(w[0], *low);
                    *high = x.fma(w[1], *high);
                }
            }
        }
        for (b, sums) in (0..*tokens).zip(sums) {
            self.column_sums.at((group * *tokens + b).mad(*columns, pair * 2)).store_vec(sums);
        }
        self.barrier(); // ORDER: the groups' sums, before they are added up.
    }

    /// This thread's pair of columns, its group, and the rows of a group.
    fn column_share(&self) -> (Reg<u32>, Reg<u32>, u32) {
        let pairs = self.columns / 2;
        (self.thread % pairs, self.thread / pairs, NOPE as u32 * pairs / COMPUTE_THREADS)
    }

    /// Adds up the groups and writes the CTA's latent columns to the query.
    fn store_latent(&self) {
        let Query { tokens, columns, .. } = self;
        let fours = columns / 4;
        let groups = 2 * COMPUTE_THREADS / columns;
        self.each(fours * tokens, |item| {
            let (four, b) = (item % fours * 4, item / fours);
            let from = self.column_sums.at(b.mad(*columns, four));
            let sums = (0..groups).map(|g| from.offset((g * tokens * columns) as i32).load_vec::<4>());
            let sums = sums.reduce(|a, b| std::array::from_fn(|i| a[i] + b[i])).expect("some groups");
            let pairs = [0, 2].map(|i| Reg::<Bf16x2>::from_f32(sums[i], sums[i + 1]));
            self.out.store(self.first + b, self.part.mad(*columns, four), pairs);
        });
    }

    /// `body(item)` for every item below `n`, spread over the computing threads.
    fn each(&self, n: u32, body: impl Fn(Reg<u32>)) {
        for start in (0..n).step_by(COMPUTE_THREADS as usize) {
            let item = self.thread + start;
            if start + COMPUTE_THREADS <= n { body(item) } else { when(item.lt(n), || body(item)) }
        }
    }
}

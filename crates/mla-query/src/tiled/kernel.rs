//! The device code of [`tiled`](super): what a CTA holds, and who does what when.

use dsa_core::consts::{NOPE, Q_HEAD};
use ptx::*;

use super::norm::Norm;
use super::{CLUSTER, COLUMNS, LINE, LINES, ROWS, SLICE, SUMS};
use crate::query::insert::Insert;
use crate::query::kernel::{COMPUTE, COMPUTE_THREADS, INSERT, INSERT_THREADS, MlaArgs, MlaParams, finish, start};
use crate::query::output::QueryRows;
use crate::query::publish::Staged;
use crate::shape::MlaShape;

/// Warps that compute.
pub(super) const WARPS: u32 = COMPUTE_THREADS / 32;
/// Named barriers by which the computing warps hand over, to the warp that releases it to the cluster, that they have read
/// the first lines of Q_B, and all of it.
const FREED: [u32; 2] = [4, 5];

/// Builds the kernel of a tiled `shape`.
pub(crate) fn build(shape: &MlaShape, target: Target) -> Result<Kernel<MlaArgs>, VerifyError> {
    // Two per multiprocessor: the next launch loads its weights beside this one.
    let bounds = LaunchBounds::threads(COMPUTE_THREADS + INSERT_THREADS).cluster(CLUSTER).min_ctas(2);
    let shape = *shape;
    ptx::build::<MlaArgs>(&shape.name(), target, bounds, |p| Tiled::new(shape, p).emit())
}

pub(super) struct Tiled {
    pub(super) shape: MlaShape,
    pub(super) p: MlaParams,
    /// Tokens of the cluster.
    pub(super) tokens: u32,
    thread: Reg<u32>,
    pub(super) warp: Reg<u32>,
    pub(super) lane: Reg<u32>,
    pub(super) part: Reg<u32>,
    pub(super) head: Reg<u32>,
    /// First token of the cluster.
    pub(super) first: Reg<u32>,
    pub(super) out: QueryRows,
    staged: Option<Staged>,
    pub(super) q_b: Shared<u32>,
    pub(super) w_uk: Shared<u32>,
    pub(super) q_c: Shared<u32>,
    /// The CTA's columns of the norm's weights.
    pub(super) norm_weights: Shared<u32>,
    pub(super) parts: Shared<f32>,
    pub(super) latent_rows: Shared<u32>,
    pub(super) q_b_full: Mbarrier,
    pub(super) w_uk_full: Mbarrier,
    pub(super) sums_full: Mbarrier,
    pub(super) parts_full: Mbarrier,
    pub(super) latent_full: Mbarrier,
}

impl Tiled {
    fn new(shape: MlaShape, p: MlaParams) -> Tiled {
        let tokens = shape.tokens();
        // 1024: the swizzle's period.
        let q_b = SharedArray::aligned("q_b", Q_HEAD as u32 * SLICE / 2, 1024);
        let w_uk = SharedArray::aligned("w_uk", NOPE as u32 * COLUMNS / 2, 1024);
        let q_c = SharedArray::aligned("q_c", tokens * SLICE / 2, 1024);
        let norm_weights = SharedArray::aligned("norm_weights", SLICE / 2, 16);
        let (parts_words, latent_words) = (CLUSTER * tokens * ROWS, tokens * NOPE as u32 / 2);
        let (parts, latent_rows) = match lines_before_latents(tokens) {
            Some(lines) => {
                let at = lines * Q_HEAD as u32 * LINE;
                assert!(parts_words <= at && at + latent_words <= q_b.len());
                (q_b.ptr(), q_b.ptr().offset(at as i32))
            }
            None => {
                let own = |name, words| SharedArray::<u32>::aligned(name, words, 16).ptr();
                (own("parts", parts_words), own("latent_rows", latent_words))
            }
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
            norm_weights: norm_weights.ptr(),
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
        for line in 0..LINES {
            let to = self.q_b.offset((line * Q_HEAD as u32 * LINE) as i32);
            let coords = [part.mad(2 * SLICE, line * 128), head * Q_HEAD as u32];
            copy_tensor(to, p.w_qb_map, &coords, self.q_b_full, None);
        }
        self.w_uk_full.arrive_expect(NOPE as u32 * COLUMNS * 2);
        let coords = [part * (2 * COLUMNS), head * NOPE as u32];
        copy_tensor(self.w_uk, p.w_uk, &coords, self.w_uk_full, None);
        self.sums_full.arrive_expect(SLICE * 2 + CLUSTER * tokens * SUMS * 4);
        copy_bulk(self.norm_weights, p.w_qa.at(part * (SLICE / 2)), SLICE * 2, self.sums_full, None);
        self.parts_full.arrive_expect((CLUSTER - 1) * tokens * ROWS * 4);
        self.latent_full.arrive_expect(tokens * NOPE as u32 * 2);
    }

    fn compute(&self) {
        let norm = Norm::new(self);
        start(&self.shape);
        norm.start(self);
        let sums = if by_warpgroups(self.tokens) {
            self.project_by_warpgroups(&norm)
        } else {
            (0..LINES).for_each(|line| norm.write(self, line));
            self.barrier(); // ORDER: q_c, before the projection reads it.
            (0..LINES).for_each(|line| norm.store(self, line));
            self.project()
        };
        self.send_parts(sums);
        self.gather();
        self.absorb();
        self.staged.iter().for_each(Staged::arrive);
    }

    pub(super) fn barrier(&self) {
        sync_named(COMPUTE, COMPUTE_THREADS);
    }

    /// How often the cluster must meet before what it exchanges takes the place of Q_B.
    fn meetings(&self) -> usize {
        match lines_before_latents(self.tokens) {
            None => 0,
            Some(_) if by_warpgroups(self.tokens) => 2,
            Some(_) => 1,
        }
    }

    /// A computing warp has read the lines of Q_B that meeting `i` is about, and goes on.
    pub(super) fn read(&self, i: usize) {
        if i < self.meetings() {
            arrive_named(FREED[i], COMPUTE_THREADS + INSERT_THREADS); // ORDER: see `meet`.
            cluster_arrive_relaxed();
        }
    }

    /// Every CTA of the cluster has read the lines of Q_B that meeting `i` is about.
    pub(super) fn met(&self, i: usize) {
        if i < self.meetings() {
            cluster_wait(); // ORDER: see `meet`.
        }
    }

    /// The inserting warps' part of meeting `i`.
    fn meet(&self, i: usize) {
        // ORDER: what the CTA has read of Q_B, before anyone in the cluster writes there. The fence of a release takes as long
        // as a line of products, so a warp that does not multiply releases what the barrier has handed to it.
        sync_named(FREED[i], COMPUTE_THREADS + INSERT_THREADS);
        when_else(self.warp.eq(WARPS), cluster_arrive, cluster_arrive_relaxed);
    }

    /// The inserting warps: the tile's tokens are dealt to the CTAs of all its clusters.
    fn insert(&self) {
        let thread = self.thread - COMPUTE_THREADS;
        let insert = Insert::new(self.shape, self.p, thread);
        start(&self.shape);
        for i in 0..self.meetings() {
            cluster_wait();
            self.meet(i);
        }
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
}

/// Whether two warpgroups multiply, whose tiles are 64 tokens; fewer tokens go to each warp's own tensor core.
pub(super) fn by_warpgroups(tokens: u32) -> bool {
    tokens == 64
}

/// Where exchanged sums take the place of Q_B: its lines before the latent rows, which hold the parts.
fn lines_before_latents(tokens: u32) -> Option<u32> {
    (tokens > 16).then_some(tokens / 32)
}

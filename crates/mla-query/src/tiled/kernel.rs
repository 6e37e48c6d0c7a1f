//! The device code of [`tiled`](super): what a CTA holds, and who does what when.

use dsa_core::consts::{NOPE, Q_HEAD};
use ptx::*;

use super::cut::{Cut, Share, by_warpgroups};
use super::norm::Norm;
use super::{CLUSTER, COLUMNS, LINE, LINES, ROWS, SLICE, SUMS};
use crate::query::insert::Insert;
use crate::query::kernel::{COMPUTE, COMPUTE_THREADS, INSERT, INSERT_THREADS, MlaArgs, MlaParams, finish, start};
use crate::query::output::QueryRows;
use crate::query::publish::Staged;
use crate::shape::MlaShape;

/// Warps that compute.
pub(super) const WARPS: u32 = COMPUTE_THREADS / 32;

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
    pub(super) cut: Cut,
    pub(super) share: Share,
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
    /// Where the cluster says that it has read the first lines of Q_B, and all of it, and on which barriers.
    signals: Vec<(Shared<u32>, Mbarrier)>,
}

impl Tiled {
    fn new(shape: MlaShape, p: MlaParams) -> Tiled {
        let tokens = shape.tokens();
        let cut = Cut::of(tokens);
        // 1024: the swizzle's period.
        let q_b = SharedArray::aligned("q_b", Q_HEAD as u32 * SLICE / 2, 1024);
        let w_uk = SharedArray::aligned("w_uk", NOPE as u32 * COLUMNS / 2, 1024);
        let q_c = SharedArray::aligned("q_c", tokens * SLICE / 2, 1024);
        let norm_weights = SharedArray::aligned("norm_weights", cut.eighths() * SLICE / 2, 16);
        let (parts_words, latent_words) = (cut.parts() * tokens * ROWS, tokens * NOPE as u32 / 2);
        let (parts, latent_rows) = match lines_before_latents(tokens) {
            Some(lines) => {
                let at = lines * cut.line_words();
                assert!(parts_words <= at && at + latent_words <= q_b.len());
                (q_b.ptr(), q_b.ptr().offset(at as i32))
            }
            None => {
                let own = |name, words| SharedArray::<u32>::aligned(name, words, 16).ptr();
                (own("parts", parts_words), own("latent_rows", latent_words))
            }
        };
        let freed = frees(tokens);
        let barriers = MbarrierArray::new("barriers", 5 + freed);
        let words = (freed > 0).then(|| SharedArray::<u32>::new("signals", freed * CLUSTER).ptr());
        let signals = words.map_or(Vec::new(), |words| {
            (0..freed).map(|i| (words.offset((i * CLUSTER) as i32), barriers.at(5 + i))).collect()
        });
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
            cut,
            share: Share::new(cut, part),
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
            signals,
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
        let Tiled { p, tokens, part, head, cut, .. } = *self;
        let freed = self.signals.iter().map(|(_, freed)| *freed);
        [self.q_b_full, self.w_uk_full, self.sums_full, self.latent_full]
            .into_iter()
            .chain(freed.clone())
            .for_each(|bar| bar.init(1));
        // Every computing thread arrives with the parts that stay here: one lane for its warp is no faster, and racecheck does
        // not follow it.
        self.parts_full.init(1 + COMPUTE_THREADS);
        self.staged.iter().for_each(Staged::init);
        fence_mbarrier_init();
        self.q_b_full.arrive_expect(Q_HEAD as u32 * SLICE * 2);
        let copies = cut.copies(self.share.half);
        for (line, i) in (0..cut.lines()).zip(0i32..) {
            let eighth = self.share.eighths[(line / LINES) as usize];
            let column = eighth.mad(2 * SLICE, line % LINES * 128);
            for (row, first) in &copies {
                let to = self.q_b.offset(i * cut.line_words() as i32 + (row * LINE) as i32);
                copy_tensor(to, p.w_qb_map, &[column, head.mad(Q_HEAD as u32, *first)], self.q_b_full, None);
            }
        }
        self.w_uk_full.arrive_expect(NOPE as u32 * COLUMNS * 2);
        let coords = [part * (2 * COLUMNS), head * NOPE as u32];
        copy_tensor(self.w_uk, p.w_uk, &coords, self.w_uk_full, None);
        self.sums_full.arrive_expect(cut.eighths() * SLICE * 2 + CLUSTER * tokens * SUMS * 4);
        for (i, eighth) in (0i32..).zip(&self.share.eighths) {
            let to = self.norm_weights.offset(i * (SLICE / 2) as i32);
            copy_bulk(to, p.w_qa.at(*eighth * (SLICE / 2)), SLICE * 2, self.sums_full, None);
        }
        self.parts_full.arrive_expect((cut.parts() - 1) * tokens * ROWS * 4);
        self.latent_full.arrive_expect(tokens * NOPE as u32 * 2);
        freed.for_each(|freed| freed.arrive_expect(CLUSTER * 4));
    }

    fn compute(&self) {
        let norm = Norm::new(self);
        start(&self.shape);
        norm.start(self);
        if by_warpgroups(self.tokens) {
            self.send_parts_of_warpgroups(&self.project_by_warpgroups(&norm));
        } else {
            (0..LINES).for_each(|line| norm.write(self, line));
            self.barrier(); // ORDER: q_c, before the projection reads it.
            (0..LINES).for_each(|line| norm.store(self, line));
            self.send_parts(&self.project());
        }
        self.gather();
        self.absorb();
        self.staged.iter().for_each(Staged::arrive);
    }

    #[track_caller]
    pub(super) fn barrier(&self) {
        sync_named(COMPUTE, COMPUTE_THREADS);
    }

    /// After a barrier of the computing warps: the CTA has read what `signals[i]` is about. Stores that complete on a peer's barrier
    /// release what came before them, and need no fence for it, which would take longer than a line of products.
    pub(super) fn free(&self, i: usize) {
        let Some((words, freed)) = self.signals.get(i) else { return };
        when(self.thread.lt(CLUSTER), || {
            let to = words.at(self.part).of_cta(self.lane);
            to.store_async([self.warp], freed.of_cta(self.lane));
        });
    }

    /// The whole cluster has read what `signals[i]` is about.
    pub(super) fn wait_freed(&self, i: usize) {
        if let Some((_, freed)) = self.signals.get(i) {
            freed.wait_cluster(0); // ORDER: the cluster's reads, before the first store to their place.
        }
    }

    /// The inserting warps: the tile's tokens are dealt to the CTAs of all its clusters.
    fn insert(&self) {
        let thread = self.thread - COMPUTE_THREADS;
        let insert = Insert::new(self.shape, self.p, thread);
        start(&self.shape);
        cluster_wait();
        let begun = self.staged.map(|staged| (staged, staged.begin(&self.p, self.head, thread)));
        let cta = self.head.mad(CLUSTER, self.part);
        for_range(cta, self.tokens, self.p.heads * CLUSTER, |j| {
            let token = self.first + j;
            when(token.lt(self.p.tokens), || insert.emit(token));
            sync_named(INSERT, INSERT_THREADS); // ORDER: the sums have been read, before the next token's.
        });
        if let Some((staged, begun)) = begun {
            staged.send(&self.p, self.head, thread, begun);
        }
    }
}

/// How often the cluster says that it has read lines of Q_B whose place something takes: those before the latent rows and, with
/// warpgroups, all.
pub(super) fn frees(tokens: u32) -> u32 {
    match lines_before_latents(tokens) {
        None => 0,
        Some(_) if by_warpgroups(tokens) => 2,
        Some(_) => 1,
    }
}

/// Where exchanged sums take the place of Q_B: its lines before the latent rows, of which the first hold the parts. With
/// warpgroups the latent rows, which are sent last, take the last lines.
fn lines_before_latents(tokens: u32) -> Option<u32> {
    let last = tokens * NOPE as u32 / 2;
    (tokens > 16).then(|| match Cut::of(tokens) {
        cut if by_warpgroups(tokens) => cut.lines() - last.div_ceil(cut.line_words()),
        cut => (cut.parts() * tokens * ROWS).div_ceil(cut.line_words()),
    })
}

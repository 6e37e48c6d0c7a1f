//! The query's rows to the mailboxes of all ranks.
//!
//! The warps that store rows also leave them in shared memory, from where the inserting warps, idle by then, send them 16
//! bytes at a time. These fence and refill the last call's box while the others still compute.

use dsa_core::consts::{NOPE, ROPE};
use dsa_core::layout::mla_rows::{LATENT, QUERY_ROPE};
use dsa_dcp::mailbox::MailboxShape;
use dsa_dcp::mailbox::device::{Begun, Outbox, Team};
use ptx::*;

use super::kernel::{COMPUTE_THREADS, INSERT, INSERT_THREADS, MlaParams};
use crate::shape::MlaShape;

/// A CTA's part of every token's row: its latent columns, then its rows of Q_B, of which those that are rope, or in tiles its
/// 8 rope columns.
#[derive(Clone, Copy)]
pub(crate) struct Staged {
    rows: Shared<u32>,
    /// The rows are there.
    full: Mbarrier,
    shape: MlaShape,
    mailbox: MailboxShape,
    part: Reg<u32>,
    /// First token of the CTA.
    first: Reg<u32>,
}

impl Staged {
    /// Of a shape that publishes, `None` for others.
    pub(crate) fn new(shape: MlaShape, part: Reg<u32>, first: Reg<u32>) -> Option<Staged> {
        shape.publication()?;
        let rows = SharedArray::aligned("staged", shape.tokens() * pitch(&shape), 16);
        Staged::over(shape, part, first, rows)
    }

    /// As [`new`](Self::new), in the place of another array.
    pub(crate) fn over(shape: MlaShape, part: Reg<u32>, first: Reg<u32>, array: SharedArray<u32>) -> Option<Staged> {
        let mailbox = shape.publication()?.mailbox;
        assert!(shape.tokens() * pitch(&shape) <= array.len(), "the rows kept fit the array");
        let full = MbarrierArray::new("staged_full", 1).at(0);
        Some(Staged { rows: array.ptr(), full, shape, mailbox, part, first })
    }

    /// Initialises the barrier; in one thread.
    #[track_caller]
    pub(crate) fn init(&self) {
        self.full.init(COMPUTE_THREADS);
    }

    /// The rope column of the first place after the latent columns; below 0, that is large, where its row of Q_B is latent.
    #[track_caller]
    fn rope_first(&self) -> Reg<u32> {
        match self.shape.is_tiled() {
            true => self.part * rope_places(&self.shape),
            false => self.part * self.shape.rows() - NOPE as u32,
        }
    }

    /// Keeps what is stored to `column` and on of a token's row.
    #[track_caller]
    pub(crate) fn keep<const N: usize>(&self, token: Reg<u32>, column: Reg<u32>, words: [Reg<u32>; N]) {
        let columns = self.shape.columns();
        let rope = column + columns - (self.rope_first() + QUERY_ROPE.start as u32);
        let place = column.ge(LATENT.end as u32).select::<u32>(rope, column - self.part * columns);
        self.at(token - self.first, place).store_vec(words);
    }

    /// A computing thread has kept its last row.
    #[track_caller]
    pub(crate) fn arrive(&self) {
        self.full.arrive(); // ORDER: the rows that this thread kept, before they are sent.
    }

    /// Starts a call, as thread `thread` of the inserting warps; after the dependency wait.
    #[track_caller]
    pub(crate) fn begin(&self, p: &MlaParams, head: Reg<u32>, thread: Reg<u32>) -> Begun {
        let (shape, cluster) = (&self.shape, self.shape.cluster());
        let outbox = Outbox {
            shape: self.mailbox,
            boxes: p.boxes,
            peers: p.peers,
            multicast: shape.publication().is_some_and(|to| to.multicast).then_some(p.multicast),
            state: p.call,
            status: p.status,
            rank: p.rank,
        };
        let groups = (p.tokens + (shape.tokens() - 1)) / shape.tokens();
        let group = special(Special::CtaidZ);
        let team = Team {
            thread,
            threads: INSERT_THREADS,
            cta: group.mad(p.heads, head).mad(cluster, self.part),
            ctas: groups * p.heads * cluster,
        };
        outbox.begin(team, || sync_named(INSERT, INSERT_THREADS))
    }

    /// Sends the rows once they are there, as thread `thread` of the inserting warps.
    #[track_caller]
    pub(crate) fn send(&self, p: &MlaParams, head: Reg<u32>, thread: Reg<u32>, begun: Begun) {
        let live = (p.tokens - self.first).min(self.shape.tokens());
        let (columns, bytes) = (self.shape.columns(), self.shape.query_bytes() as u32);
        begun.publish(p.tokens, |call| {
            self.full.wait(0); // ORDER: see `arrive`.
            let chunk = 16 / bytes;
            let per_token = columns / chunk;
            for_range(thread, live * per_token, INSERT_THREADS, |i| {
                let (b, column) = (i / per_token, i % per_token * chunk);
                let words = self.at(b, column).load_vec::<4>();
                let at = self.part.mad(columns, column) * bytes;
                call.send(self.first + b, head, at, words);
            });
            // A head's first rope row is a multiple of as many rows of its CTA.
            let (places, first) = (rope_places(&self.shape), self.rope_first());
            let group = if places.is_multiple_of(8) { 8 } else { 4 };
            let per_token = places / group;
            when((first + (places - 1)).lt(ROPE as u32), || {
                for_range(thread, live * per_token, INSERT_THREADS, |i| {
                    let (b, j) = (i / per_token, i % per_token * group);
                    let column = first + j;
                    when(column.lt(ROPE as u32), || {
                        let from = self.at(b, j + columns);
                        let (token, at) = (self.first + b, (column + QUERY_ROPE.start as u32) * bytes);
                        match group * bytes / 4 {
                            1 => call.send(token, head, at, [from.load()]),
                            2 => call.send(token, head, at, from.load_vec::<2>()),
                            _ => call.send(token, head, at, from.load_vec::<4>()),
                        }
                    });
                });
            });
        });
    }

    /// The words of token `b` of the CTA from element `place` of its part on.
    fn at(&self, b: Reg<u32>, place: Reg<u32>) -> Shared<u32> {
        let per_word = 4 / self.shape.query_bytes() as u32;
        self.rows.at(b.mad(pitch(&self.shape), place / per_word))
    }
}

/// Places after the latent columns.
fn rope_places(shape: &MlaShape) -> u32 {
    if shape.is_tiled() { ROPE as u32 / shape.cluster() } else { shape.rows() }
}

/// Words from one token's part to the next: whole chunks.
fn pitch(shape: &MlaShape) -> u32 {
    ((shape.columns() + rope_places(shape)) * shape.query_bytes() as u32).next_multiple_of(16) / 4
}

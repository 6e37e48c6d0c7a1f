//! The mailbox on the device: what a query kernel does to publish ([`Outbox`]), and what waits for the gathered rows
//! ([`Inbox`]). Attention kernels may call the latter themselves.

use ptx::*;

use super::layout::{ARRIVED, BOX, BOXES, CALL, CHUNK_BYTES, SENTINEL, TOKENS};
use super::shape::MailboxShape;
use crate::layout::{LATE_QUERY, STATUS_WORDS};

/// Chunks that a thread polls at a time.
const POLLS: u32 = 4;

/// The threads that work on a mailbox together: some whole warps of every CTA.
#[derive(Clone, Copy)]
pub struct Team {
    /// This thread's place among those of its CTA.
    pub thread: Reg<u32>,
    /// Threads of a CTA.
    pub threads: u32,
    /// This CTA's place.
    pub cta: Reg<u32>,
    /// CTAs.
    pub ctas: Reg<u32>,
}

impl Team {
    /// `body(i)` for every `i` below `n`, spread over the whole team.
    #[track_caller]
    fn each(&self, n: Reg<u32>, body: impl FnOnce(Reg<u32>)) {
        for_range(self.cta.mad(self.threads, self.thread), n, self.ctas * self.threads, body);
    }
}

/// Element offset of chunk `i` of the published rows, in chunks from the start of a box.
fn chunk_at(shape: &MailboxShape, i: Reg<u32>) -> Reg<u32> {
    let chunks = shape.chunks() as u32;
    let token = i / chunks;
    (i - token * chunks) + token * (shape.token_bytes() / CHUNK_BYTES) as u32
}

/// Bytes from the first box to box `number`.
fn box_at(shape: &MailboxShape, number: Reg<u32>) -> Reg<u64> {
    number.mul_wide(1u32) * shape.box_bytes() as u64
}

/// A rank's outgoing side in a query kernel.
pub struct Outbox {
    /// The sizes.
    pub shape: MailboxShape,
    /// This rank's boxes.
    pub boxes: Global<u64>,
    /// `[ranks]`: address of every rank's boxes.
    pub peers: Global<u64>,
    /// Address of every rank's boxes at once; publishes there if given.
    pub multicast: Option<Reg<u64>>,
    /// The call's state.
    pub state: Global<u32>,
    /// Non-zero: the mailbox has failed.
    pub status: Global<u32>,
    /// This rank.
    pub rank: Reg<u32>,
}

/// The running call, in each thread of the team.
pub struct Call {
    /// Whether the mailbox works.
    pub works: Pred,
    /// This call's box on every rank, this thread's first target first, or under the multicast address.
    boxes: Vec<Reg<u64>>,
    /// Its number, and that of the call.
    box_and_number: [Reg<u32>; 2],
    /// CTAs counted before this one, in the team's thread 0.
    before: Var<u32>,
}

impl Outbox {
    /// Starts the next call: refills the box of the last one. After the dependency wait; `barrier` joins the team's threads of a
    /// CTA. The whole team calls it, and [`settle`](Outbox::settle) once later; then each thread may [`send`](Outbox::send). What
    /// takes long here is under way when it returns, so other work between the two costs nothing.
    #[track_caller]
    pub fn begin(&self, team: Team, barrier: impl Fn()) -> Call {
        let Outbox { shape, state, .. } = self;
        // Under way together.
        let status = self.status.load();
        let [number, past, last] = [CALL, TOKENS, BOX].map(|word| state.offset(word as i32).load());
        let bases = self.targets();
        let works = status.eq(0);
        barrier(); // ORDER: the CTA's reads of the state, before the fence of the thread that counts it.
        // ORDER: the refills before this call's, which the dependency wait has shown to this thread, before what it publishes: a
        // peer that has that may publish the next call, into the box of two calls before this one. And the CTA's reads, before
        // its count.
        fence(Scope::Sys);
        let before = Var::new(0u32);
        when(works & team.thread.eq(0), || {
            before.set(state.offset(ARRIVED as i32).atomic(Atomic::Add, Sem::Relaxed(Scope::Gpu), 1u32));
        });
        when(works, || {
            let here = self.boxes.byte_at(box_at(shape, last)).cast::<u32>();
            team.each(past * shape.chunks() as u32, |i| {
                here.at64(chunk_at(shape, i).mul_wide(CHUNK_BYTES as u32 / 4)).store_vec([Reg::from(SENTINEL); 4]);
            });
        });
        let next = last + 1;
        let next = next.ge(BOXES as u32).select::<u32>(0u32, next);
        let here = box_at(shape, next);
        let boxes = bases.into_iter().map(|base| base + here).collect();
        Call { works, boxes, box_and_number: [next, number + 1], before }
    }

    /// The last CTA to begin a call, of `tokens` tokens, moves its number.
    #[track_caller]
    pub fn settle(&self, team: Team, tokens: Reg<u32>, call: &Call) {
        let last = (call.before.get() + 1).eq(team.ctas);
        when(call.works & team.thread.eq(0) & last, || {
            fence(Scope::Gpu); // ORDER: every CTA's reads of the state come before these writes.
            let [next, number] = call.box_and_number;
            for (word, value) in [(ARRIVED, 0u32.into()), (TOKENS, tokens), (BOX, next), (CALL, number)] {
                self.state.offset(word as i32).store(value);
            }
        });
    }

    /// The memory of every rank, or all of it at once. Every rank begins with another, so that they do not all send to the
    /// same.
    fn targets(&self) -> Vec<Reg<u64>> {
        let ranks = self.shape.ranks() as u32;
        let peer = |i: u32| {
            let peer = self.rank + i;
            let peer = peer.ge(ranks).select::<u32>(peer - ranks, peer);
            self.peers.at(peer).load_as(LoadMode::STREAM)
        };
        self.multicast.map_or_else(|| (0..ranks).map(peer).collect(), |address| vec![address])
    }

    /// Publishes `words` at `bytes` into the row of `head` of this rank for `token`. Whole aligned words: 1, 2 or 4.
    #[track_caller]
    pub fn send<const N: usize>(
        &self,
        call: &Call,
        token: Reg<u32>,
        head: Reg<u32>,
        bytes: Reg<u32>,
        words: [Reg<u32>; N],
    ) {
        let shape = &self.shape;
        let row = token.mad(shape.q_heads() as u32, self.rank.mad(shape.heads() as u32, head));
        let at = row.mad_wide(shape.row_bytes() as u32, bytes.to_u64());
        for base in &call.boxes {
            if self.multicast.is_some() {
                let to = Multicast::from_address(*base + at);
                match words[..] {
                    [word] => to.store(word),
                    _ => to.store_vec(words),
                }
            } else {
                // ORDER: after `begin`'s fence. Each word says by itself that it has arrived.
                Global::<u32>::from_address(*base + at).store_vec_as(Sem::Relaxed(Scope::Sys), words);
            }
        }
    }
}

/// Takes the words of a chunk, given where it lies in chunks from the start of a box.
pub type Take<'a> = &'a dyn Fn(Reg<u32>, [Reg<u32>; 4]);

/// The gathered rows of the last call published here.
pub struct Inbox {
    /// The sizes.
    pub shape: MailboxShape,
    /// This rank's boxes.
    pub boxes: Global<u64>,
    /// The call's state.
    pub state: Global<u32>,
    /// The status block.
    pub status: Global<u32>,
    /// How long a poll may take, in nanoseconds.
    pub timeout_ns: Reg<u64>,
}

impl Inbox {
    /// First byte of this call's rows. After the dependency wait for the query kernel.
    #[track_caller]
    pub fn rows(&self) -> Global<u32> {
        self.boxes.byte_at(box_at(&self.shape, self.state.offset(BOX as i32).load())).cast()
    }

    /// Waits until every published row of the tokens `first..end` is there, or the time is up. After the dependency wait
    /// for the query kernel. `take(chunk, words)` gets what has arrived, and where it lies in chunks from the start of
    /// [`rows`](Inbox::rows). Warps stay whole.
    ///
    /// What is polled is split over the team; a barrier of whoever reads the rows must follow. If the mailbox fails here,
    /// what has not arrived is taken as sentinels, which are NaN; if it had failed before, everything is. In place such rows
    /// are whatever the box holds: the status tells.
    #[track_caller]
    pub fn wait(&self, team: Team, first: Reg<u32>, end: Reg<u32>, take: Option<Take<'_>>) {
        let shape = &self.shape;
        let chunks = shape.chunks() as u32;
        // Strong: a CTA of this launch may be failing.
        let broken = self.status.load_as(LoadMode::relaxed(Scope::Gpu));
        // One verdict per warp.
        let broken = any(broken.ne(0));
        let (start, total) = (first * chunks, (end - first) * chunks);
        if let Some(take) = take {
            when(broken, || team.each(total, |i| take(chunk_at(shape, start + i), [Reg::from(SENTINEL); 4])));
        }
        when(!broken, || {
            let rows = self.rows();
            let began = globaltimer();
            // The base is the same for all lanes: warps stay whole.
            for_range(team.cta * (team.threads * POLLS), total, team.ctas * (team.threads * POLLS), |base| {
                let polls: [Poll; POLLS as usize] = std::array::from_fn(|i| {
                    let index = base + team.thread + i as u32 * team.threads;
                    let (live, index) = (index.lt(total), index.min(total - 1));
                    let chunk = chunk_at(shape, start + index);
                    let at = rows.at64(chunk.mul_wide(CHUNK_BYTES as u32 / 4));
                    Poll { live, index, chunk, at, words: std::array::from_fn(|_| Var::new(SENTINEL)) }
                });
                repeat(|l| {
                    // All loads are under way together.
                    let loaded = polls.each_ref().map(|p| p.at.load_vec_as::<4>(LoadMode::relaxed(Scope::Sys)));
                    for (poll, loaded) in polls.iter().zip(loaded) {
                        poll.words.iter().zip(loaded).for_each(|(word, loaded)| word.set(loaded));
                    }
                    let here = polls.iter().map(Poll::is_here).reduce(|a, b| a & b).expect("some polls");
                    l.break_if(all(here));
                    let expired = any((globaltimer() - began).gt(self.timeout_ns));
                    when(expired, || {
                        let missing = polls
                            .iter()
                            .rev()
                            .fold(Reg::from(0u32), |missing, poll| poll.is_here().select::<u32>(missing, poll.index));
                        self.note_late(first, !here, missing);
                    });
                    l.break_if(expired);
                });
                if let Some(take) = take {
                    for poll in &polls {
                        when(poll.live, || take(poll.chunk, poll.words.each_ref().map(|w| w.get())));
                    }
                }
            });
            // ORDER: what peers did before they published (their refills), before what this rank does after this grid.
            fence(Scope::Sys);
        });
    }

    /// Notes the first of this warp's lanes with `missing` as late, unless somebody has noted another. The warp is whole.
    fn note_late(&self, first: Reg<u32>, missing: Pred, index: Reg<u32>) {
        let shape = &self.shape;
        let lane = ballot(missing).reverse_bits().clz();
        when(lane_index().eq(lane), || {
            let before = self.status.compare_swap(Sem::Relaxed(Scope::Gpu), 0u32, LATE_QUERY);
            when(before.eq(0), || {
                let (chunks, rank_chunks) = (shape.chunks() as u32, (shape.chunks() / shape.ranks()) as u32);
                let token = index / chunks;
                let rank = (index - token * chunks) / rank_chunks;
                let call = self.state.offset(CALL as i32).load();
                for (word, value) in (1..STATUS_WORDS as i32).zip([first + token, rank, call]) {
                    self.status.offset(word).store(value);
                }
            });
        });
    }
}

/// A chunk on its way.
struct Poll {
    live: Pred,
    /// Among the published chunks of the tokens waited for.
    index: Reg<u32>,
    /// In a box.
    chunk: Reg<u32>,
    at: Global<u32>,
    words: [Var<u32>; 4],
}

impl Poll {
    /// No word is a sentinel, which is the largest there is.
    fn is_here(&self) -> Pred {
        let largest = self.words.iter().map(|word| word.get()).reduce(|a, b| a.max(b)).expect("four words");
        !self.live | largest.ne(SENTINEL)
    }
}

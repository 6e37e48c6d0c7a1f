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

/// Bytes from the first box to box `index`.
fn box_at(shape: &MailboxShape, index: Reg<u32>) -> Reg<u64> {
    index.mul_wide(1u32) * shape.box_bytes() as u64
}

/// A rank's outgoing side in a query kernel.
#[derive(Clone, Copy)]
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

/// A call that has begun, in each thread of the team. [`publish`](Begun::publish) ends it.
#[must_use = "a call that is not published gets no number, and whoever gathers waits in vain"]
pub struct Begun {
    call: Call,
    /// Whether the mailbox works.
    works: Pred,
    team: Team,
    next_box: Reg<u32>,
    number: Reg<u32>,
    /// CTAs counted before this one, in the team's thread 0.
    before: Var<u32>,
}

/// A call of a mailbox that works.
pub struct Call {
    outbox: Outbox,
    /// Its box on every rank, this thread's first target first, or under the multicast address.
    boxes: Vec<Reg<u64>>,
}

impl Begun {
    /// The last CTA to begin moves the call's number; then, unless the mailbox has failed, `body` [sends](Call::send). The whole
    /// team calls it, once.
    ///
    /// `tokens` is the number of tokens that are sent, the same in every CTA and on every rank: the next call refills so many, and
    /// rows beyond them would be taken for those of a later call.
    #[track_caller]
    pub fn publish(self, tokens: Reg<u32>, body: impl FnOnce(&Call)) {
        let last = (self.before.get() + 1).eq(self.team.ctas);
        when(self.works & self.team.thread.eq(0) & last, || {
            fence(Scope::Gpu); // ORDER: every CTA's reads of the state come before these writes.
            for (word, value) in [(ARRIVED, 0u32.into()), (TOKENS, tokens), (BOX, self.next_box), (CALL, self.number)] {
                self.call.outbox.state.offset(word as i32).store(value);
            }
        });
        when(self.works, || body(&self.call));
    }
}

impl Outbox {
    /// Starts the next call: refills the box of the last one. After the dependency wait; `barrier` joins the team's threads of a
    /// CTA. The whole team calls it, and ends the call by [`publish`](Begun::publish). The CTA's count and refill are still under
    /// way when this returns: what is done between the two hides them.
    #[track_caller]
    pub fn begin(self, team: Team, barrier: impl Fn()) -> Begun {
        let Outbox { shape, state, .. } = &self;
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
        let next_box = next.ge(BOXES as u32).select::<u32>(0u32, next);
        let here = box_at(shape, next_box);
        let call = Call { outbox: self, boxes: bases.into_iter().map(|base| base + here).collect() };
        Begun { call, works, team, next_box, number: number + 1, before }
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
}

impl Call {
    /// Publishes `words` at `bytes` into the row of `head` of this rank for `token`. Whole aligned words: 1, 2 or 4.
    ///
    /// All CTAs together send every word of every head of every token once; none may be [`SENTINEL`].
    #[track_caller]
    pub fn send<const N: usize>(&self, token: Reg<u32>, head: Reg<u32>, bytes: Reg<u32>, words: [Reg<u32>; N]) {
        let Outbox { shape, rank, multicast, .. } = &self.outbox;
        let row = token.mad(shape.q_heads() as u32, rank.mad(shape.heads() as u32, head));
        let at = row.mad_wide(shape.row_bytes() as u32, bytes.to_u64());
        for base in &self.boxes {
            if multicast.is_some() {
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

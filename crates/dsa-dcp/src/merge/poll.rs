//! Waiting for the words of a row, and noting who is late.

use dsa_core::layout::ll_slot::PAIR_BYTES;
use ptx::*;

use super::kernel::Merge;
use crate::layout::{LATE_WORDS, STATUS_WORDS};

/// Most pairs that a thread polls at a time.
const POLLS_MAX: u32 = 10;

/// Pairs of `total` that each of `threads` threads polls at a time.
pub(super) fn polls(total: u32, threads: u32) -> u32 {
    total.div_ceil(threads).min(POLLS_MAX)
}

/// Most pairs of lists: enough for one list of 2048, and the merge needs its registers for what it has found so far.
pub(super) const LIST_POLLS_MAX: u32 = 3;

/// A pair on its way.
struct Poll {
    at: Global<u64>,
    words: [Var<u32>; 2],
}

/// What a pair holds, once it is here: its number, whether there is such a pair, its words.
type Take<'a> = &'a dyn Fn(Reg<u32>, Pred, [Reg<u32>; 2]);

/// Pairs that ranks push to this one.
pub(super) struct Incoming<'a> {
    /// How many.
    pub(super) pairs: Reg<u32>,
    /// At most, and whether it is always that many.
    pub(super) most: u32,
    pub(super) always: bool,
    /// How many each thread waits for at a time.
    pub(super) together: u32,
    /// Where pair `i` arrives.
    pub(super) at: &'a dyn Fn(Reg<u32>) -> Global<u64>,
    /// The rank that sends it.
    pub(super) rank: &'a dyn Fn(Reg<u32>) -> Reg<u32>,
    /// The epoch, or sequence, that both of its halves then have.
    pub(super) tag: Reg<u32>,
    /// What is late if they do not get it.
    pub(super) what: u32,
    /// Called for each pair by one thread.
    pub(super) take: Take<'a>,
}

impl Merge {
    /// Pairs of this row that a rank sends: without the planes where no index needs them.
    pub(super) fn sent_pairs(&self) -> u32 {
        if self.has_planes() { self.row_words() / 2 } else { self.n() / 2 }
    }

    /// Brings the row's words into shared memory as they arrive, and counts their upper digits. A merge that
    /// selects has its own already.
    pub(super) fn poll_words(&self, epoch: Reg<u32>) {
        let Merge { shape, p, smem, t, row, .. } = self;
        let (pairs, slot_pairs) = (self.sent_pairs(), self.row_words() / 2);
        let sources = if shape.selects() { self.ranks() - 1 } else { self.ranks() };
        if sources == 0 {
            return;
        }
        let first_rank = (epoch & 1) * self.ranks();
        let rank = |i: Reg<u32>| if shape.selects() { self.other(i / pairs) } else { i / pairs };
        self.poll(Incoming {
            pairs: (sources * pairs).into(),
            most: sources * pairs,
            always: true,
            together: polls(sources * pairs, t.threads),
            at: &|i| {
                let slot = (first_rank + rank(i)).mad_wide(p.slot_rows, row.to_u64());
                p.memory.byte_at(slot * (slot_pairs * PAIR_BYTES as u32)).at((i % pairs) * 2)
            },
            rank: &rank,
            tag: epoch,
            what: LATE_WORDS,
            take: &|i, live, words| {
                let pair = i % pairs;
                when(live, || smem.words.ptr().at(rank(i).mad(self.row_words(), pair * 2)).store_vec(words));
                // The last pairs of a rank may be planes.
                let holds_keys = live & pair.lt(self.n() / 2);
                words.into_iter().for_each(|word| self.count_upper_of(holds_keys & word.ne(0), word >> 16));
            },
        });
    }

    /// Waits for pairs, `together` of a thread's under way together.
    pub(super) fn poll(&self, incoming: Incoming<'_>) {
        let Merge { p, t, .. } = self;
        let Incoming { pairs, most, always, together, at, rank, tag, what, take } = incoming;
        let start = globaltimer();
        let whole = always && most.is_multiple_of(together * t.threads);
        for_range(0u32, pairs, t.threads * together, |base| {
            let index = |i: usize| base + t.index + i as u32 * t.threads;
            let live = |i: usize| if whole { Pred::constant(true) } else { index(i).lt(pairs) };
            // Beyond the end the last pair once more, so that warps stay whole.
            let clamped = |i: usize| if whole { index(i) } else { index(i).min(pairs - 1) };
            let poll = |i: usize| Poll { at: at(clamped(i)), words: [(); 2].map(|()| Var::new(0u32)) };
            let polls: Vec<Poll> = (0..together as usize).map(poll).collect();
            repeat(|l| {
                // ORDER: none. Each half is this call's iff its tag is. All loads are under way together.
                let load = |poll: &Poll| poll.at.load_vec_as::<2>(LoadMode::relaxed(Scope::Sys));
                let loaded: Vec<_> = polls.iter().map(load).collect();
                let is_here = |(poll, halves): (&Poll, [Reg<u64>; 2])| {
                    let [(w0, e0), (w1, e1)] = halves.map(Reg::unpack);
                    poll.words[0].set(w0);
                    poll.words[1].set(w1);
                    e0.eq(tag) & e1.eq(tag)
                };
                let here: Vec<Pred> = polls.iter().zip(loaded).map(is_here).collect();
                let ready = here.iter().copied().reduce(|a, b| a & b).expect("some poll");
                l.break_if(all(ready));
                let expired = any((globaltimer() - start).gt(p.timeout_ns));
                when(expired, || {
                    let missing = here
                        .iter()
                        .enumerate()
                        .rev()
                        .fold(Reg::<u32>::from(0), |late, (i, here)| here.select::<u32>(late, rank(clamped(i))));
                    self.note_late(what, !ready, missing, tag);
                });
                l.break_if(expired);
            });
            for (i, poll) in polls.iter().enumerate() {
                take(clamped(i), live(i), poll.words.map(Var::get));
            }
        });
    }

    /// Notes the first of this warp's lanes with `missing` as late, unless another warp has noted one. The warp is whole.
    pub(super) fn note_late(&self, what: u32, missing: Pred, rank: Reg<u32>, expected: Reg<u32>) {
        let late = self.smem.late;
        let first = ballot(missing).reverse_bits().clz();
        when(self.t.lane.eq(first), || {
            let before = late.at(0).compare_swap(Sem::Relaxed(Scope::Cta), 0u32, what);
            when(before.eq(0), || {
                late.at(1).store(self.row);
                late.at(2).store(rank);
                late.at(3).store(expected);
            });
        });
    }

    /// Thread 0: what was late becomes the exchange's status, unless it has one.
    pub(super) fn record_late(&self) {
        let Merge { p, smem, t, .. } = self;
        when(t.index.eq(0), || {
            let before = p.status.compare_swap(Sem::Relaxed(Scope::Gpu), 0u32, smem.late.at(0).load());
            when(before.eq(0), || {
                for word in 1..STATUS_WORDS as u32 {
                    p.status.at(word).store(smem.late.at(word).load());
                }
            });
        });
    }
}

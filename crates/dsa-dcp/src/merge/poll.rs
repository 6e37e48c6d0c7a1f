//! Waiting for the words of a row, and noting who is late.

use dsa_core::layout::ll_slot::PAIR_BYTES;
use ptx::*;

use super::kernel::Merge;
use crate::layout::{LATE_WORDS, STATUS_WORDS};

/// Most pairs that a thread polls at a time.
const POLLS_MAX: u32 = 10;

/// A pair on its way.
struct Poll {
    live: Pred,
    /// It is live and no pair of planes.
    holds_keys: Pred,
    rank: Reg<u32>,
    at: Global<u64>,
    word: Shared<u32>,
    w0: Var<u32>,
    w1: Var<u32>,
    here: Var<u32>,
}

impl Merge {
    /// Brings the row's words into shared memory as they arrive, and counts their upper digits.
    pub(super) fn poll_words(&self, epoch: Reg<u32>) {
        let Merge { p, smem, t, row, .. } = self;
        let pairs = self.row_words() / 2;
        let total = self.ranks() * pairs;
        let first_rank = (epoch & 1) * self.ranks();
        let start = globaltimer();
        // All of them under way together, unless that takes too many registers.
        let together = total.div_ceil(t.threads).min(POLLS_MAX);
        for_range(0u32, total, t.threads * together, |base| {
            let poll = |i: u32| {
                let index = base + t.index + i * t.threads;
                let live = index.lt(total);
                let index = index.min(total - 1);
                let rank = index / pairs;
                let pair = index - rank * pairs;
                let slot = (first_rank + rank).mad_wide(p.slot_rows, row.to_u64());
                let at = p.memory.byte_at(slot * (pairs * PAIR_BYTES as u32)).at(pair * 2);
                let word = smem.words.ptr().at(index * 2);
                let holds_keys = live & pair.lt(self.n() / 2);
                let [w0, w1, here] = [(); 3].map(|()| Var::new(0u32));
                Poll { live, holds_keys, rank, at, word, w0, w1, here }
            };
            let polls: Vec<Poll> = (0..together).map(poll).collect();
            repeat(|l| {
                // ORDER: none. Each half is this call's iff its epoch is. All loads are under way together.
                let load = |poll: &Poll| poll.at.load_vec_as::<2>(LoadMode::relaxed(Scope::Sys));
                let loaded: Vec<_> = polls.iter().map(load).collect();
                for (poll, [a, b]) in polls.iter().zip(loaded) {
                    let ((w0, e0), (w1, e1)) = (a.unpack(), b.unpack());
                    poll.w0.set(w0);
                    poll.w1.set(w1);
                    poll.here.set((!poll.live | (e0.eq(epoch) & e1.eq(epoch))).as_u32());
                }
                let here = polls.iter().map(|poll| poll.here.get()).reduce(|a, b| a & b).expect("some poll");
                let ready = here.ne(0);
                l.break_if(all(ready));
                let expired = any((globaltimer() - start).gt(p.timeout_ns));
                when(expired, || {
                    let missing = polls
                        .iter()
                        .rev()
                        .fold(Reg::<u32>::from(0), |rank, poll| poll.here.get().eq(0).select::<u32>(poll.rank, rank));
                    self.note_late(LATE_WORDS, !ready, missing, epoch);
                });
                l.break_if(expired);
            });
            for poll in &polls {
                let words = [poll.w0.get(), poll.w1.get()];
                when(poll.live, || poll.word.store_vec(words));
                for word in words {
                    when(poll.holds_keys & word.ne(0), || self.count_upper_of(word >> 16));
                }
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

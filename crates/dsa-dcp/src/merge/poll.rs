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

/// A pair on its way.
struct Poll {
    at: Global<u64>,
    words: [Var<u32>; 2],
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
        let together = polls(total, t.threads);
        for_range(0u32, total, t.threads * together, |base| {
            let index = |i: usize| base + t.index + i as u32 * t.threads;
            // Beyond the end the last pair once more, so that warps stay whole.
            let clamped = |i: usize| index(i).min(total - 1);
            let poll = |i: usize| {
                let (rank, pair) = (clamped(i) / pairs, clamped(i) % pairs);
                let slot = (first_rank + rank).mad_wide(p.slot_rows, row.to_u64());
                let at = p.memory.byte_at(slot * (pairs * PAIR_BYTES as u32)).at(pair * 2);
                Poll { at, words: [(); 2].map(|()| Var::new(0u32)) }
            };
            let polls: Vec<Poll> = (0..together as usize).map(poll).collect();
            repeat(|l| {
                // ORDER: none. Each half is this call's iff its epoch is. All loads are under way together.
                let load = |poll: &Poll| poll.at.load_vec_as::<2>(LoadMode::relaxed(Scope::Sys));
                let loaded: Vec<_> = polls.iter().map(load).collect();
                let is_here = |(poll, halves): (&Poll, [Reg<u64>; 2])| {
                    let [(w0, e0), (w1, e1)] = halves.map(Reg::unpack);
                    poll.words[0].set(w0);
                    poll.words[1].set(w1);
                    e0.eq(epoch) & e1.eq(epoch)
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
                        .fold(Reg::<u32>::from(0), |rank, (i, here)| here.select::<u32>(rank, clamped(i) / pairs));
                    self.note_late(LATE_WORDS, !ready, missing, epoch);
                });
                l.break_if(expired);
            });
            for (i, poll) in polls.iter().enumerate() {
                let words = poll.words.map(Var::get);
                when(index(i).lt(total), || {
                    smem.words.ptr().at(index(i) * 2).store_vec(words);
                });
                // The last pairs of a rank are planes.
                let holds_keys = index(i).lt(total) & (index(i) % pairs).lt(self.n() / 2);
                words.into_iter().for_each(|word| self.count_upper_of(holds_keys & word.ne(0), word >> 16));
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

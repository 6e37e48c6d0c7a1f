//! `ExchangeMerge`: the first K keys of every row over all ranks, from what each rank's local top-k pushed.
//!
//! ```text
//! key  = order16 << gid_bits | (2^gid_bits - 1 - gid), 0 for an empty word; larger keys first
//! k    = K-th of the W N words' keys (0 if fewer); rank r is saturated iff all its N keys are greater than k
//! ids  = first K keys of: the words of the ranks that are not saturated, the first K keys of each that is
//! rows_out[row, 0..count) = table[request, l / page] * block_rows + l % page of this rank's ids, ascending; -1 after,
//!                      and for a table entry that names no block
//! ```
//!
//! The ids are those of a single rank. A key that an unsaturated rank did not send comes after that rank's smallest sent
//! key, which is not above `k`; a saturated rank sends every key that can be selected. Every rank computes the same `k` and
//! so the same saturated ranks. Each of these has N keys among the first K - 1, so there are at most (K - 1) / N.
//!
//! Where W N <= K, every rank of N keys or more, but for one at most, would be saturated in every row. Few such ranks do without round 1
//! ([`ExchangeShape::is_direct`]): the merge selects its rank's first K keys itself, pushes them as its words, and selects
//! from everybody's; no local top-k runs before it.
//!
//! # Layout
//! [`layout`](crate::layout), [`ll_slot`](dsa_core::layout::ll_slot), [`b_row`](dsa_core::layout::b_row).
//!
//! # Algorithm
//! 1. Poll this row's words into shared memory. Each 8-byte half carries its call's epoch.
//! 2. Radix select of `k`: two digits of 8 bits of the key's order16, then the ids of the keys that tie with it.
//! 3. If ranks are saturated: each pushes the B' row of its first K keys, as pairs that carry the row's sequence; everybody
//!    counts them as they arrive, and selects again.
//! 4. This rank's selected keys lie in its own B' row in two ascending runs: merged by counting, they are the rows. Only a
//!    kernel that also writes all ids needs more: a bitmap over the ids, whose prefix counts give each its place.
//!
//! Behind an [all-gather](crate::gathered) instead of pushes, 1 and 3 only read what has arrived.
//!
//! # Decomposition
//! One CTA of 512 threads per row, every rank alike. Rows beyond the live ones take part without keys.
//!
//! # Synchronisation
//! Starts early: it polls while this rank's local top-k still runs. Before its dependency wait it reads only step
//! metadata, the peers' pushes and the epochs, which the merge before wrote and completed: that holds as long as every
//! kernel between two merges waits for its dependencies. It writes after the wait. The epoch is advanced last, after all
//! words are read *and* after the wait: the next local top-k must not overtake this one's push. Two parities of slots
//! suffice: a peer pushes call n + 2 after it merged n + 1, for which it needed this rank's push of n + 1, which followed
//! this rank's merge of n. For the same reason there is one set of rescue lists: a peer overwrites a list of call n once
//! it has this rank's words of a later call. Words and lists are written and read by relaxed accesses at system scope, whose
//! 8-byte halves each carry the epoch, or the sequence: no flag, no fence.
//!
//! A direct merge waits for its dependencies first: it reads the logits. Its lists lie in the two parities of slots, for the
//! same reason as words do.
//!
//! Polls are uniform over a warp and bounded. When time runs out the kernel notes who is late, leaves empty outputs, and
//! ends; the exchange then pushes and merges nothing until it is reset, and its other ranks run out of time in turn.
//!
//! Rows of different ranks wait for each other only in step 3, or in a direct merge, for rows with the same number; CTAs start
//! in the order of rows, so the lowest unfinished row is resident everywhere.
//!
//! # Bound
//! Latency: one link crossing, then some ten barriers and four passes over W N words in shared memory. Bytes: [`cost`].

mod gathered;
mod ids;
mod kernel;
mod keys;
mod launch;
mod poll;
mod rescue;
mod rows;

pub use kernel::{MergeArgs, MergeParams, build};
pub use launch::{ExchangeMerge, MergeStep};

use dsa_core::ShapeError;
use dsa_core::consts::{PAGE_STRIDE_MULTIPLE, Q_MAX};
use dsa_core::device::radix::WARP_BINS;
use dsa_core::layout::b_row::BRow;
use dsa_core::layout::ll_slot::PAIR_BYTES;
use dsa_core::shape::check_kv_page;
use dsa_kernels::Cost;
use dsa_kernels::topk::octets_of_cta;
use ptx::Target;

use crate::error::DcpError;
use crate::shape::ExchangeShape;

/// Rescue lists of up to this many words are searched in shared memory: 32 KB, so that CTAs still share a multiprocessor.
const LIST_WORDS_SHARED_MAX: usize = 8192;

/// Polls of a thread at a time that two CTAs' registers allow.
const POLLS_OF_TWO_CTAS: u32 = 5;
/// Keys of a list per thread that they allow.
const KEYS_OF_TWO_CTAS: u32 = 4;

/// Shared memory of one CTA.
fn shared_bytes_max() -> usize {
    Target::Sm90a.shared_bytes_max() as usize
}

/// What a merge kernel is specialised for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MergeShape {
    exchange: ExchangeShape,
    q: u32,
    page: u32,
    ids: bool,
    hold: bool,
    foreign: bool,
    gathered: bool,
}

impl MergeShape {
    /// The merge of an exchange, `q` rows per request, MLA pages of `page` tokens.
    ///
    /// # Errors
    /// `q` or `page` outside the supported limits; more candidates and ids than shared memory holds.
    pub fn new(exchange: ExchangeShape, q: usize, page: usize) -> Result<Self, DcpError> {
        if !(1..=Q_MAX).contains(&q) {
            return Err(ShapeError::RowsPerRequestOutOfRange { q }.into());
        }
        check_kv_page(page)?;
        let (q, page) = (q as u32, page as u32);
        let shape = MergeShape { exchange, q, page, ids: false, hold: false, foreign: false, gathered: false };
        // Also with ids, which cost the most.
        let needed = shape.with_ids(true).shared_bytes();
        if needed > shared_bytes_max() {
            return Err(DcpError::MergeTooLarge {
                ranks: exchange.ranks(),
                n: exchange.n(),
                topk: exchange.topk(),
                context_len_max: exchange.context_len_max(),
                needed,
                limit: shared_bytes_max(),
            });
        }
        Ok(shape)
    }

    /// Also writes all selected global ids.
    pub fn with_ids(self, ids: bool) -> Self {
        MergeShape { ids, ..self }
    }

    /// Does not let the next kernel start before this one has ended.
    pub fn with_hold(self, hold: bool) -> Self {
        MergeShape { hold, ..self }
    }

    /// For logits that this project's score did not write; local top-k must be built likewise.
    pub fn with_foreign_logits(self, foreign: bool) -> Self {
        MergeShape { foreign, ..self }
    }

    /// Reads what was [gathered](crate::GatheredExchange) instead of what was pushed.
    pub fn with_gathered(self, gathered: bool) -> Self {
        MergeShape { gathered, ..self }
    }

    /// The exchange.
    pub fn exchange(&self) -> ExchangeShape {
        self.exchange
    }

    /// Rows per request.
    pub fn q(&self) -> u32 {
        self.q
    }

    /// Tokens per MLA page.
    pub fn page(&self) -> u32 {
        self.page
    }

    /// Whether ids are written.
    pub fn ids(&self) -> bool {
        self.ids
    }

    /// Entry name.
    pub fn name(&self) -> String {
        let (own, n, topk) = (self.exchange.ownership(), self.exchange.n(), self.exchange.topk());
        let flag = |set: bool, name: &str| if set { format!("_{name}") } else { String::new() };
        format!(
            "merge_topk_w{}_i{}_n{n}_k{topk}_c{}_q{}_page{}{}{}{}{}",
            own.ranks(),
            own.interleave(),
            self.exchange.context_len_max(),
            self.q,
            self.page,
            flag(self.ids, "ids"),
            flag(self.hold, "hold"),
            flag(self.foreign, "foreign"),
            flag(self.gathered, "gathered")
        )
    }

    /// Whether every rank sends its first K keys at once, so that there is no round 2: [`ExchangeShape::is_direct`].
    pub(crate) fn is_direct(&self) -> bool {
        self.exchange.is_direct()
    }

    /// Whether the merge itself selects and pushes them.
    pub fn selects(&self) -> bool {
        self.is_direct() && !self.gathered
    }

    /// What every rank sends in round 1.
    pub(crate) fn sent(&self) -> BRow {
        self.exchange.sent()
    }

    /// Threads of a CTA.
    pub fn threads(&self) -> u32 {
        512
    }

    /// CTAs that share a multiprocessor: two, unless one thread's polls, or the keys of its list, take the registers of both,
    /// or the ids the memory.
    pub(crate) fn ctas(&self) -> u32 {
        let pairs = (self.exchange.ranks() * self.sent().words() / 2) as u32;
        let few_registers = poll::polls(pairs, self.threads()) <= POLLS_OF_TWO_CTAS
            && self.exchange.topk() as u32 <= KEYS_OF_TWO_CTAS * self.threads();
        if few_registers && 2 * self.shared_bytes() <= shared_bytes_max() { 2 } else { 1 }
    }

    /// Groups of 128 ids, each 128 bits of the bitmap.
    pub(crate) fn groups(&self) -> u32 {
        self.exchange.ids().div_ceil(128) as u32
    }

    /// Words of the rescue lists, if there is room to keep them in shared memory while they are searched.
    pub(crate) fn list_words_shared(&self) -> Option<u32> {
        if self.is_direct() {
            return None;
        }
        let words = self.exchange.rescue_slots() * self.exchange.list().words();
        let fits = self.shared_bytes_without_lists() + 4 * words <= shared_bytes_max();
        (words <= LIST_WORDS_SHARED_MAX && fits).then_some(words as u32)
    }

    /// Shared memory in bytes, rounded up a little.
    fn shared_bytes(&self) -> usize {
        self.shared_bytes_without_lists() + 4 * self.list_words_shared().unwrap_or(0) as usize
    }

    fn shared_bytes_without_lists(&self) -> usize {
        let words = self.exchange.ranks() * self.sent().words();
        let list = self.exchange.list().words();
        let codes = octets_of_cta(self.exchange.topk() as u32, 1, self.threads()) as usize / 2;
        let select = 2 * WARP_BINS as usize + 2 * 32 + list + codes;
        let search = 2 * WARP_BINS as usize + keys::TIES as usize;
        let bitmap = if self.ids { self.groups() as usize * (16 + 2) } else { 0 };
        4 * (words + select + search) + bitmap + 1024
    }
}

/// Bytes of one step without a rescue: all ranks' pairs of `rows` rows, the outputs, and the page table entries of the
/// rank's share of the selected keys.
pub fn cost(shape: &MergeShape, rows: usize) -> Cost {
    let exchange = shape.exchange;
    let pairs = exchange.ranks() * exchange.slots().pairs() * PAIR_BYTES;
    let outputs = exchange.topk() * 4 * (1 + shape.ids as usize) + 4;
    let entries = exchange.topk() / exchange.ranks() * 4;
    Cost { hbm_bytes: (rows * (pairs + outputs + entries)) as u64, flops: 0 }
}

const _: () = assert!(PAIR_BYTES == PAGE_STRIDE_MULTIPLE, "both are one vector access");

#[cfg(test)]
mod tests {
    use dsa_core::consts::CONTEXT_MAX;

    use super::*;
    use dsa_core::Ownership;

    fn exchange(ranks: usize, n: usize, topk: usize, context_len_max: usize) -> ExchangeShape {
        ExchangeShape::new(Ownership::new(ranks, 1).unwrap(), 1, n, topk, context_len_max).unwrap()
    }

    #[test]
    fn deployed_sizes_fit_and_the_rest_is_refused() {
        for (ranks, n, topk) in [(8, 512, 2048), (8, 256, 2048), (16, 512, 2048), (16, 512, 4096), (16, 128, 512)] {
            assert!(MergeShape::new(exchange(ranks, n, topk, CONTEXT_MAX), 1, 64).is_ok(), "{ranks} {n} {topk}");
        }
        let large = MergeShape::new(exchange(16, 3968, 4096, CONTEXT_MAX), 1, 64).unwrap_err();
        assert!(matches!(large, DcpError::MergeTooLarge { ranks: 16, n: 3968, .. }), "{large}");
    }

    #[test]
    fn the_estimate_covers_the_layout() {
        for (ranks, n, topk, context) in [(1, 128, 256, 9), (3, 384, 512, 5000), (16, 512, 4096, CONTEXT_MAX)] {
            for ids in [false, true] {
                let shape = MergeShape::new(exchange(ranks, n, topk, context), 1, 64).unwrap().with_ids(ids);
                let declared = build(&shape, Target::Sm90a).unwrap().ir().shared_bytes as usize;
                let estimate = shape.shared_bytes();
                assert!((declared..=declared + 1024).contains(&estimate), "{declared} {estimate}");
            }
        }
    }

    #[test]
    fn cost_counts_what_moves() {
        let shape = MergeShape::new(exchange(8, 512, 2048, 4096), 1, 64).unwrap();
        // 8 x 264 pairs of 16 bytes, 2048 rows out and a count, 256 table entries.
        assert_eq!(cost(&shape, 3).hbm_bytes, 3 * (8 * 264 * 16 + 8192 + 4 + 1024));
        assert_eq!(cost(&shape.with_ids(true), 1).hbm_bytes, 8 * 264 * 16 + 16384 + 4 + 1024);
    }

    #[test]
    fn a_page_past_the_longest_context_is_refused_by_its_own_name() {
        for (page, want) in
            [(1 << 21, ShapeError::KvPageTooLarge { page: 1 << 21 }), (48, ShapeError::PageNotPowerOfTwo { page: 48 })]
        {
            let refused = MergeShape::new(exchange(2, 128, 256, 9), 1, page);
            assert!(matches!(refused, Err(DcpError::Shape(got)) if got == want), "{page}");
        }
    }
}

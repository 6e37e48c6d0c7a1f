//! Relaxed stores to another device's memory on their way there.
//!
//! Between devices a store takes as long as it likes: in random schedules each relaxed (or volatile) store to a peer
//! arrives at a time of its own, in any order. What the memory model promises is kept:
//!
//! - stores of a warp to the same 8 bytes arrive in order, and a thread sees its own;
//! - a release or a fence at system scope waits for every store that happened before it: of its own warp, of warps that it
//!   met at a barrier, of whoever it acquired from;
//! - an access that follows a store (as the race detector knows) sees it;
//! - a CTA does not end before its stores have arrived.

use std::collections::{HashMap, VecDeque};

use crate::memory::GlobalMemory;
use crate::race::AgentId;
use crate::random::Random;
use crate::world::BlockRef;

/// A store of at most 8 bytes that do not cross a multiple of 8.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Store {
    pub(crate) address: u64,
    pub(crate) bytes: u32,
    pub(crate) value: u64,
    /// Who stored it, and when.
    pub(crate) agent: AgentId,
    pub(crate) epoch: u32,
    pub(crate) lane: u8,
    pub(crate) block: BlockRef,
}

/// All stores on their way.
#[derive(Default)]
pub(crate) struct Delayed {
    /// By 8-byte word, oldest first.
    words: HashMap<u64, VecDeque<Store>>,
    /// A word for every store, in an order of no meaning; words may be left from stores that have arrived.
    tokens: Vec<u64>,
    len: usize,
}

impl Delayed {
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sends a store on its way.
    pub(crate) fn send(&mut self, store: Store) {
        debug_assert!(store.bytes <= 8 && store.address >> 3 == (store.address + u64::from(store.bytes) - 1) >> 3);
        self.words.entry(store.address >> 3).or_default().push_back(store);
        self.tokens.push(store.address >> 3);
        self.len += 1;
    }

    /// Lets some stores arrive, at least one; returns whether memory changed.
    pub(crate) fn deliver_some(&mut self, random: &mut Random, memory: &mut GlobalMemory) -> bool {
        let mut changed = false;
        let mut left = 1 + random.below(self.len);
        while left > 0 && !self.is_empty() {
            let at = random.below(self.tokens.len());
            let word = self.tokens.swap_remove(at);
            let Some(store) = self.words.get_mut(&word).and_then(VecDeque::pop_front) else { continue };
            self.len -= 1;
            left -= 1;
            changed |= arrive(&store, memory);
        }
        self.tidy();
        changed
    }

    /// Lets the stores for which `known` holds arrive, and those to the same words before them; returns whether memory
    /// changed.
    pub(crate) fn deliver(&mut self, known: impl Fn(&Store) -> bool, memory: &mut GlobalMemory) -> bool {
        let mut changed = false;
        for stores in self.words.values_mut() {
            changed |= deliver_word(stores, &known, &mut self.len, memory);
        }
        self.tidy();
        changed
    }

    /// As [`deliver`](Delayed::deliver), only for `size` bytes at `address`.
    pub(crate) fn deliver_at(
        &mut self,
        address: u64,
        size: u32,
        known: impl Fn(&Store) -> bool,
        memory: &mut GlobalMemory,
    ) -> bool {
        let mut changed = false;
        for word in address >> 3..=(address + u64::from(size) - 1) >> 3 {
            if let Some(stores) = self.words.get_mut(&word) {
                changed |= deliver_word(stores, &known, &mut self.len, memory);
            }
        }
        changed
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        *self = Delayed::default();
    }

    fn tidy(&mut self) {
        if self.is_empty() {
            self.words.clear();
            self.tokens.clear();
        }
    }
}

fn deliver_word(
    stores: &mut VecDeque<Store>,
    known: impl Fn(&Store) -> bool,
    len: &mut usize,
    memory: &mut GlobalMemory,
) -> bool {
    let mut changed = false;
    let through = stores.iter().rposition(known).map_or(0, |last| last + 1);
    for store in stores.drain(..through) {
        *len -= 1;
        changed |= arrive(&store, memory);
    }
    changed
}

fn arrive(store: &Store, memory: &mut GlobalMemory) -> bool {
    // It was there when the store was issued, and memory is freed only when nothing runs.
    let place = memory.place(store.address, store.bytes.into()).expect("a store was checked when it was issued");
    memory.at_mut(place).store(place.offset, store.bytes as usize, store.value.into())
}

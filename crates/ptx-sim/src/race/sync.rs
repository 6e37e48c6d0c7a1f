//! Release and acquire through memory.
//!
//! A strong write leaves at its location what it publishes: for a release what happened before it, for a relaxed write
//! what happened before the writer's last fence. A read-modify-write continues the release sequence it reads from. A
//! strong read joins what it finds if it acquires, or keeps it for the reader's next fence. Both sides' scopes must
//! include the other party.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use ptx::{Scope, Sem};

use super::vector_clock::{Clock, Snapshot};
use super::{AgentId, Shadow, scope_of};

/// Hashes a cell number by one multiplication.
#[derive(Default)]
struct CellHasher(u64);

impl Hasher for CellHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("cell numbers are u64");
    }

    fn write_u64(&mut self, n: u64) {
        // 2^64 / golden ratio; the table takes its index from both ends of the hash.
        let spread = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = spread ^ spread >> 32;
    }
}

/// Published by the writes of one release sequence that reach equally far.
#[derive(Clone, Debug)]
struct Published {
    /// Who can acquire it.
    reach: Scope,
    device: u8,
    /// First agent of the writer's CTA, `None` if several CTAs wrote.
    cta: Option<u32>,
    snapshot: Arc<Snapshot>,
}

/// What is published where, per 4-byte cell.
#[derive(Debug, Default)]
pub(super) struct SyncMap {
    cells: HashMap<u64, Vec<Published>, BuildHasherDefault<CellHasher>>,
}

fn cells(offset: u64, len: u32) -> impl Iterator<Item = u64> {
    offset / 4..(offset + u64::from(len)).div_ceil(4)
}

impl SyncMap {
    fn read(&self, offset: u64, len: u32, sem: Sem, clock: &mut Clock) {
        let Some(scope) = scope_of(sem) else { return };
        let mut last: Option<&Arc<Snapshot>> = None;
        for cell in cells(offset, len) {
            for published in self.cells.get(&cell).into_iter().flatten() {
                if last.is_some_and(|last| Arc::ptr_eq(last, &published.snapshot)) {
                    continue;
                }
                last = Some(&published.snapshot);
                let needed = if published.cta == Some(clock.cta().first) {
                    Scope::Cta
                } else if published.cta.is_some_and(|cta| clock.cta().cluster_contains(AgentId(cta))) {
                    Scope::Cluster
                } else if published.device == clock.cta().device {
                    Scope::Gpu
                } else {
                    Scope::Sys
                };
                if scope.min(published.reach) < needed {
                    continue;
                }
                match sem {
                    Sem::Acquire(_) | Sem::AcqRel(_) => clock.acquire(&published.snapshot),
                    _ => clock.defer_acquire(needed, &published.snapshot),
                }
            }
        }
    }

    fn write(&mut self, offset: u64, len: u32, sem: Sem, lane: u8, clock: &mut Clock, is_rmw: bool) {
        let published = publish(sem, lane, clock);
        if published.is_empty() && (is_rmw || self.cells.is_empty()) {
            return;
        }
        for cell in cells(offset, len) {
            if published.is_empty() {
                self.cells.remove(&cell);
            } else if is_rmw {
                let sequence = self.cells.entry(cell).or_default();
                for new in &published {
                    extend(sequence, new);
                }
            } else {
                self.cells.insert(cell, published.clone());
            }
        }
    }
}

/// What a write of these semantics by `lane` publishes.
fn publish(sem: Sem, lane: u8, clock: &mut Clock) -> Vec<Published> {
    let Some(scope) = scope_of(sem) else { return Vec::new() };
    let (device, cta) = (clock.cta().device, Some(clock.cta().first));
    let mut published: Vec<Published> = clock
        .fences()
        .iter()
        .filter(|fence| fence.lanes >> lane & 1 == 1)
        .map(|fence| Published { reach: scope.min(fence.scope), device, cta, snapshot: Arc::clone(&fence.snapshot) })
        .collect();
    if matches!(sem, Sem::Release(_) | Sem::AcqRel(_)) {
        let snapshot = Arc::new(clock.release(1 << lane));
        published.push(Published { reach: scope, device, cta, snapshot });
    }
    published
}

/// Adds to a release sequence, joining what reaches equally far.
fn extend(sequence: &mut Vec<Published>, new: &Published) {
    let same = sequence.iter_mut().find(|old| {
        old.reach == new.reach && old.device == new.device && (old.reach > Scope::Cluster || old.cta == new.cta)
    });
    match same {
        Some(old) => {
            Arc::make_mut(&mut old.snapshot).join(&new.snapshot);
            if old.cta != new.cta {
                old.cta = None;
            }
        }
        None => sequence.push(new.clone()),
    }
}

impl Shadow {
    /// Synchronisation by a load of `lane`. Call it after [`Shadow::check_read`].
    pub fn sync_load(&self, offset: u64, len: u32, sem: Sem, clock: &mut Clock) {
        if !self.sync.cells.is_empty() {
            self.sync.read(offset, len, sem, clock);
        }
    }

    /// Synchronisation by a store of `lane`. Call it after [`Shadow::check_write`]; a weak store ends what the location
    /// published.
    pub fn sync_store(&mut self, offset: u64, len: u32, sem: Sem, lane: u8, clock: &mut Clock) {
        self.sync.write(offset, len, sem, lane, clock, false);
    }

    /// Synchronisation by an atomic read-modify-write of `lane`. Call it after [`Shadow::check_write`].
    pub fn sync_atomic(&mut self, offset: u64, len: u32, sem: Sem, lane: u8, clock: &mut Clock) {
        self.sync_load(offset, len, sem, clock);
        self.sync.write(offset, len, sem, lane, clock, true);
    }

    /// Whether a weak or plain strong store needs [`Shadow::sync_store`] at all: false while nothing is published in the
    /// region and the store would publish nothing.
    #[inline]
    pub fn needs_sync(&self, sem: Sem, clock: &Clock) -> bool {
        !self.sync.cells.is_empty()
            || (scope_of(sem).is_some() && !clock.fences().is_empty())
            || matches!(sem, Sem::Acquire(_) | Sem::Release(_) | Sem::AcqRel(_))
    }
}

//! The accesses that 4 bytes, or a line as a whole, remember.

use super::record::{ASYNC, BYTES, CROWD, Record, WRITE};
use super::vector_clock::SEVERAL_LANES;
use super::{Clock, Missing};

/// Readers that a cell tells apart: as many as a CTA has warps.
const READERS_MAX: usize = 32;

#[derive(Clone, Copy, Default)]
pub(super) struct Cell {
    pub(super) write: Record,
    pub(super) read: Record,
    /// 1 + index of the list of further records, 0 if there is none.
    pub(super) spill: u32,
}

/// Lists of further records, by index.
#[derive(Default)]
pub(super) struct Spills {
    lists: Vec<Vec<Record>>,
    unused: Vec<u32>,
}

impl Spills {
    pub(super) fn of(&mut self, cell: &mut Cell) -> &mut Vec<Record> {
        if cell.spill == 0 {
            let index = self.unused.pop().unwrap_or_else(|| {
                self.lists.push(Vec::new());
                self.lists.len() as u32 - 1
            });
            cell.spill = index + 1;
        }
        &mut self.lists[cell.spill as usize - 1]
    }

    pub(super) fn get(&self, cell: &Cell) -> &[Record] {
        if cell.spill == 0 { &[] } else { &self.lists[cell.spill as usize - 1] }
    }

    /// Gives the list back.
    pub(super) fn release(&mut self, cell: &mut Cell) {
        if cell.spill != 0 {
            self.lists[cell.spill as usize - 1].clear();
            self.tidy(cell);
        }
    }

    /// Gives an empty list back.
    fn tidy(&mut self, cell: &mut Cell) {
        if cell.spill != 0 && self.lists[cell.spill as usize - 1].is_empty() {
            self.unused.push(cell.spill - 1);
            cell.spill = 0;
        }
    }
}

/// Checks `now` against a cell's records and adds it to them.
#[inline]
pub(super) fn touch(cell: &mut Cell, spills: &mut Spills, now: Record, clock: &Clock) -> Result<(), (Record, Missing)> {
    if let Err(race) = check(&cell.write, &now, clock) {
        observed(cell, spills, &now, clock).ok_or(race)?;
    }
    if now.is(WRITE) {
        check(&cell.read, &now, clock)?;
    }
    if cell.spill != 0 {
        for past in spills.get(cell).iter().filter(|past| now.is(WRITE) || past.is(WRITE)) {
            check(past, &now, clock)?;
        }
    }
    if now.is(WRITE) {
        record_write(cell, spills, now);
    } else {
        record_read(cell, spills, now, clock);
    }
    Ok(())
}

#[inline]
fn check(past: &Record, now: &Record, clock: &Clock) -> Result<(), (Record, Missing)> {
    if past.bytes() & now.bytes() == 0 || past.is_before(now, clock) {
        return Ok(());
    }
    past.conflict(now, clock).map_or(Ok(()), |missing| Err((*past, missing)))
}

/// A strong read that took the last write's value passes it on: what the read happened before comes after the write too
/// (the observation order of the memory model). From then on the write counts as the reader's.
#[cold]
fn observed(cell: &mut Cell, spills: &Spills, now: &Record, clock: &Clock) -> Option<()> {
    let write = cell.write;
    let observes = |read: &&Record| {
        !read.is(WRITE | CROWD)
            && write.bytes() & !read.bytes() == 0
            && read.observes(&write)
            && read.is_before(now, clock)
    };
    let reader = std::iter::once(&cell.read).chain(spills.get(cell)).filter(|read| read.is_present()).find(observes)?;
    cell.write = Record { instruction: write.instruction, meta: reader.meta | WRITE, ..*reader };
    Some(())
}

/// What remains of a record once `bytes` were overwritten.
#[inline]
fn trim(record: &mut Record, bytes: u32) {
    record.meta &= !bytes;
    if record.bytes() == 0 {
        *record = Record::default();
    }
}

#[inline]
fn record_write(cell: &mut Cell, spills: &mut Spills, mut now: Record) {
    trim(&mut cell.read, now.bytes());
    if cell.spill != 0 {
        let list = spills.of(cell);
        list.iter_mut().for_each(|record| trim(record, now.bytes()));
        list.retain(Record::is_present);
    }
    let mut old = cell.write;
    trim(&mut old, now.bytes());
    if old.is_present() {
        if old.agent == now.agent && old.epoch == now.epoch && (old.meta ^ now.meta) & !BYTES == 0 {
            now.meta |= old.bytes();
        } else {
            spills.of(cell).push(old);
        }
    }
    cell.write = now;
    if cell.spill != 0 {
        spills.tidy(cell);
    }
}

/// `old`, a read, replaced by `now` or merged with it, if no later write can tell the difference.
#[inline]
fn merge_read(old: &Record, now: &Record, clock: &Clock) -> Option<Record> {
    if old.agent == now.agent && old.bytes() == now.bytes() {
        if old.lane() == now.lane() || old.is_before(now, clock) {
            return Some(*now);
        }
        let mut new = *now;
        new.set_lane(SEVERAL_LANES);
        return (old.epoch == now.epoch && old.scope() == now.scope()).then_some(new);
    }
    (old.bytes() & !now.bytes() == 0 && !old.is(CROWD) && old.is_before(now, clock)).then_some(*now)
}

#[inline]
fn record_read(cell: &mut Cell, spills: &mut Spills, now: Record, clock: &Clock) {
    if !cell.read.is_present() {
        cell.read = now;
    } else if let Some(merged) = merge_read(&cell.read, &now, clock) {
        cell.read = merged;
    } else {
        spill_read(cell, spills, now, clock);
    }
}

#[cold]
fn spill_read(cell: &mut Cell, spills: &mut Spills, now: Record, clock: &Clock) {
    let list = spills.of(cell);
    let launch = clock.cta().launch_first;
    for record in list.iter_mut().filter(|record| !record.is(WRITE)) {
        if record.is(CROWD) {
            if record.agent == launch && now.bytes() & !record.bytes() == 0 && record.is(ASYNC) == now.is(ASYNC) {
                return;
            }
        } else if let Some(merged) = merge_read(record, &now, clock) {
            *record = merged;
            return;
        }
    }
    let readers = |list: &[Record]| list.iter().filter(|record| !record.is(WRITE)).count();
    if readers(list) >= READERS_MAX {
        list.retain(|old| old.is(WRITE | CROWD) || old.bytes() & !now.bytes() != 0 || !old.is_before(&now, clock));
    }
    if readers(list) >= READERS_MAX {
        // The launch's readers become a crowd, whose epoch no clock reaches: it ends with the launch.
        let mut crowd = Record { agent: launch, epoch: u32::MAX, ..now };
        crowd.meta |= CROWD;
        crowd.set_lane(SEVERAL_LANES);
        list.retain(|old| {
            let joins = !old.is(WRITE) && clock.cta().launch_contains(old.agent()) && old.is(ASYNC) == now.is(ASYNC);
            if joins {
                crowd.meta |= old.bytes();
            }
            !joins
        });
        list.push(crowd);
    } else {
        list.push(now);
    }
}

//! What memory remembers of its accesses.
//!
//! Per 4-byte cell: the last write and one read inline, and a list for the rare rest (several concurrent readers, or
//! accesses to parts of the cell). A record:
//!
//! | word | content |
//! |---|---|
//! | 0 | agent |
//! | 1 | epoch; 0: no record |
//! | 2 | instruction |
//! | 3 | bits 0..6 lane (32: several), 6..10 bytes, 10..13 scope + 1 if strong, 13 write, 14 asynchronous, 15 crowd, 16..20 device |
//!
//! A *crowd* stands for many readers of one launch.

use ptx::Scope;

use super::sync::SyncMap;
use super::vector_clock::SEVERAL_LANES;
use super::{Access, AgentId, Clock, Missing, Party, Proxy, Race};

const CELL_BYTES: u64 = 4;
const PAGE_CELLS: usize = 256;
/// Readers that a cell tells apart: as many as a CTA has warps.
const READERS_MAX: usize = 32;

const LANE: u32 = 0x3F;
const BYTES_SHIFT: u32 = 6;
const BYTES: u32 = 0xF << BYTES_SHIFT;
const SCOPE_SHIFT: u32 = 10;
const SCOPE: u32 = 7 << SCOPE_SHIFT;
const WRITE: u32 = 1 << 13;
const ASYNC: u32 = 1 << 14;
const CROWD: u32 = 1 << 15;
const DEVICE_SHIFT: u32 = 16;

#[derive(Clone, Copy, Default)]
struct Record {
    agent: u32,
    epoch: u32,
    instruction: u32,
    meta: u32,
}

const SCOPES: [Scope; 4] = [Scope::Cta, Scope::Cluster, Scope::Gpu, Scope::Sys];

impl Record {
    /// Of `who`, performed or issued by the owner of `clock`, on no bytes yet.
    fn new(who: &Access, is_write: bool, clock: &Clock) -> Self {
        let strong = who.strong.map_or(0, |scope| scope as u32 + 1);
        let meta = u32::from(who.lane)
            | strong << SCOPE_SHIFT
            | if is_write { WRITE } else { 0 }
            | if who.proxy == Proxy::Async { ASYNC } else { 0 }
            | u32::from(clock.cta().device & 15) << DEVICE_SHIFT;
        Self { agent: who.agent.0, epoch: who.epoch, instruction: who.instruction, meta }
    }

    #[inline]
    fn on(self, bytes: u32) -> Self {
        Self { meta: self.meta & !BYTES | bytes, ..self }
    }

    #[inline]
    fn is_present(&self) -> bool {
        self.epoch != 0
    }

    /// Touched bytes, in place in `meta`.
    #[inline]
    fn bytes(&self) -> u32 {
        self.meta & BYTES
    }

    #[inline]
    fn lane(&self) -> u8 {
        (self.meta & LANE) as u8
    }

    fn set_lane(&mut self, lane: u8) {
        self.meta = self.meta & !LANE | u32::from(lane);
    }

    fn scope(&self) -> Option<Scope> {
        match (self.meta & SCOPE) >> SCOPE_SHIFT {
            0 => None,
            n => Some(SCOPES[n as usize - 1]),
        }
    }

    #[inline]
    fn is(&self, flag: u32) -> bool {
        self.meta & flag != 0
    }

    fn agent(&self) -> AgentId {
        AgentId(self.agent)
    }

    fn party(&self) -> Party {
        Party {
            agent: self.agent(),
            lane: (self.lane() != SEVERAL_LANES).then(|| self.lane()),
            instruction: self.instruction,
            is_write: self.is(WRITE),
            strong: self.scope(),
            proxy: if self.is(ASYNC) { Proxy::Async } else { Proxy::Generic },
        }
    }

    /// Whether `self`, recorded earlier, happened before the access `now` that the owner of `clock` performs or issues.
    #[inline]
    fn is_before(&self, now: &Record, clock: &Clock) -> bool {
        let needs_fence = now.is(ASYNC) && self.meta & (WRITE | ASYNC) == WRITE;
        clock.is_after(self.agent(), self.epoch, self.lane(), now.lane())
            && (!needs_fence || clock.is_fenced(self.agent(), self.epoch, self.lane()))
    }

    /// `self` is earlier and unordered, and has bytes in common with `now`: what is missing, if it is a race.
    #[cold]
    fn conflict(&self, now: &Record, clock: &Clock) -> Option<Missing> {
        if self.is(CROWD) && clock.cta().launch_contains(self.agent()) {
            return None;
        }
        if let (Some(a), Some(b)) = (self.scope(), now.scope()) {
            let needed = if clock.cta().contains(self.agent()) {
                Scope::Cta
            } else if (self.meta ^ now.meta) >> DEVICE_SHIFT & 15 == 0 {
                Scope::Gpu
            } else {
                Scope::Sys
            };
            return (a.min(b) < needed).then_some(Missing::Scope);
        }
        Some(if self.is(ASYNC) {
            Missing::Wait
        } else if now.is(ASYNC) && clock.is_after(self.agent(), self.epoch, self.lane(), now.lane()) {
            Missing::ProxyFence
        } else if self.agent() == clock.agent() {
            Missing::WarpBarrier
        } else {
            Missing::Order
        })
    }
}

#[derive(Clone, Copy, Default)]
struct Cell {
    write: Record,
    read: Record,
    /// 1 + index of the list of further records, 0 if there is none.
    spill: u32,
}

/// Lists of further records, by index.
#[derive(Default)]
struct Spills {
    lists: Vec<Vec<Record>>,
    unused: Vec<u32>,
}

impl Spills {
    fn of(&mut self, cell: &mut Cell) -> &mut Vec<Record> {
        if cell.spill == 0 {
            let index = self.unused.pop().unwrap_or_else(|| {
                self.lists.push(Vec::new());
                self.lists.len() as u32 - 1
            });
            cell.spill = index + 1;
        }
        &mut self.lists[cell.spill as usize - 1]
    }

    fn get(&self, cell: &Cell) -> &[Record] {
        if cell.spill == 0 { &[] } else { &self.lists[cell.spill as usize - 1] }
    }

    /// Gives an empty list back.
    fn tidy(&mut self, cell: &mut Cell) {
        if cell.spill != 0 && self.lists[cell.spill as usize - 1].is_empty() {
            self.unused.push(cell.spill - 1);
            cell.spill = 0;
        }
    }
}

type Page = [Cell; PAGE_CELLS];

/// The accesses of one region: a global allocation, or the shared memory of a CTA. Offsets are bytes from its start;
/// bounds are the caller's to check.
#[derive(Default)]
pub struct Shadow {
    pages: Vec<Option<Box<Page>>>,
    spills: Spills,
    pub(super) sync: SyncMap,
}

impl Shadow {
    /// Nothing accessed yet. Memory is taken as cells are touched.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets all accesses: everything so far happened before whatever comes.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Checks and records a read of `len` bytes. `clock` is that of the warp that performs or issues it.
    ///
    /// # Errors
    /// When it races.
    pub fn check_read(&mut self, offset: u64, len: u32, who: &Access, clock: &Clock) -> Result<(), Box<Race>> {
        self.check_range(offset, len, Record::new(who, false, clock), clock)
    }

    /// Checks and records a write of `len` bytes (or an atomic, which is a write that also reads). `clock` is that of
    /// the warp that performs or issues it.
    ///
    /// # Errors
    /// When it races.
    pub fn check_write(&mut self, offset: u64, len: u32, who: &Access, clock: &Clock) -> Result<(), Box<Race>> {
        self.check_range(offset, len, Record::new(who, true, clock), clock)
    }

    /// [`Shadow::check_read`] of `len` bytes at `offsets[lane]` for each lane in `lanes`; `who.lane` does not matter.
    ///
    /// # Errors
    /// When a lane's access races; the earlier lanes' are recorded.
    pub fn check_warp_read(
        &mut self,
        offsets: &[u64; 32],
        lanes: u32,
        len: u32,
        who: &Access,
        clock: &Clock,
    ) -> Result<(), Box<Race>> {
        self.check_lanes(offsets, lanes, len, Record::new(who, false, clock), clock)
    }

    /// [`Shadow::check_write`] of `len` bytes at `offsets[lane]` for each lane in `lanes`; `who.lane` does not matter.
    ///
    /// # Errors
    /// When a lane's access races; the earlier lanes' are recorded.
    pub fn check_warp_write(
        &mut self,
        offsets: &[u64; 32],
        lanes: u32,
        len: u32,
        who: &Access,
        clock: &Clock,
    ) -> Result<(), Box<Race>> {
        self.check_lanes(offsets, lanes, len, Record::new(who, true, clock), clock)
    }

    fn check_lanes(
        &mut self,
        offsets: &[u64; 32],
        lanes: u32,
        len: u32,
        mut now: Record,
        clock: &Clock,
    ) -> Result<(), Box<Race>> {
        let mut rest = lanes;
        while rest != 0 {
            let lane = rest.trailing_zeros();
            rest &= rest - 1;
            now.set_lane(lane as u8);
            self.check_range(offsets[lane as usize], len, now, clock)?;
        }
        Ok(())
    }

    fn check_range(&mut self, offset: u64, len: u32, now: Record, clock: &Clock) -> Result<(), Box<Race>> {
        let end = offset + u64::from(len);
        let mut at = offset;
        while at < end {
            let number = (at / CELL_BYTES) as usize;
            let page_number = number / PAGE_CELLS;
            if page_number >= self.pages.len() {
                self.pages.resize_with(page_number + 1, || None);
            }
            let page = self.pages[page_number].get_or_insert_with(|| Box::new([Cell::default(); PAGE_CELLS]));
            let page_end = ((page_number + 1) * PAGE_CELLS) as u64 * CELL_BYTES;
            while at < end.min(page_end) {
                let next = (at / CELL_BYTES + 1) * CELL_BYTES;
                let from = at % CELL_BYTES;
                let to = CELL_BYTES - (next - next.min(end));
                let bytes = (((1u32 << to) - 1) & !((1 << from) - 1)) << BYTES_SHIFT;
                let cell = &mut page[(at / CELL_BYTES) as usize % PAGE_CELLS];
                touch(cell, &mut self.spills, now.on(bytes), clock).map_err(|(past, missing)| {
                    let common = (past.bytes() & bytes) >> BYTES_SHIFT;
                    Box::new(Race {
                        offset: at - from + u64::from(common.trailing_zeros()),
                        first: past.party(),
                        second: now.party(),
                        missing,
                    })
                })?;
                at = next;
            }
        }
        Ok(())
    }
}

/// Checks `now` against a cell's records and adds it to them.
#[inline]
fn touch(cell: &mut Cell, spills: &mut Spills, now: Record, clock: &Clock) -> Result<(), (Record, Missing)> {
    check(&cell.write, &now, clock)?;
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

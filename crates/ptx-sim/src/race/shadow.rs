//! What memory remembers of its accesses.
//!
//! Memory is seen as lines of 16 bytes. Accesses of whole lines (by a lane, by lanes side by side, or by a copy) are
//! remembered once per line; the first access of a part splits the line into cells of 4 bytes, until a write of the whole
//! line joins them again. A line or cell keeps the last write and one read inline, and a list for the rare rest (several
//! concurrent readers, or accesses to parts of a cell).

use super::cell::{Cell, Spills, touch};
use super::record::{BYTES_SHIFT, Record, WRITE};
use super::sync::SyncMap;
use super::vector_clock::SEVERAL_LANES;
use super::{Access, Clock, Missing, Race};

const CELL_BYTES: u64 = 4;
const LINE_BYTES: u64 = 16;
const LINE_CELLS: usize = 4;
const PAGE_LINES: usize = 64;

#[derive(Clone, Copy, Default)]
struct Line {
    /// Accesses of the whole line, while it is not split.
    whole: Cell,
    /// 1 + index of the line's cells, 0 while it is not split.
    split: u32,
}

type Page = [Line; PAGE_LINES];

/// The accesses of one region: a global allocation, or the shared memory of a CTA. Offsets are bytes from its start;
/// bounds are the caller's to check.
#[derive(Default)]
pub struct Shadow {
    pages: Vec<Option<Box<Page>>>,
    spills: Spills,
    split: Vec<[Cell; LINE_CELLS]>,
    unused: Vec<u32>,
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
        if !now.is(WRITE) && lanes.count_ones() > 1 && self.check_broadcast(offsets, lanes, len, now, clock) {
            return Ok(());
        }
        let group = match len {
            4 | 8 | 16 => (LINE_BYTES as u32) / len,
            _ => 0,
        };
        let mut rest = lanes;
        while rest != 0 {
            let lane = rest.trailing_zeros();
            let offset = offsets[lane as usize];
            if group != 0 && offset.is_multiple_of(LINE_BYTES) && lane + group <= 32 {
                let members = ((1u64 << group) - 1) << lane;
                let side_by_side = || (1..group).all(|i| offsets[(lane + i) as usize] == offset + u64::from(i * len));
                if u64::from(rest) & members == members && side_by_side() {
                    self.check_line(offset, now.striped(lane as u8, len / CELL_BYTES as u32), clock)?;
                    rest &= !(members as u32);
                    continue;
                }
            }
            rest &= rest - 1;
            now.set_lane(lane as u8);
            self.check_range(offset, len, now, clock)?;
        }
        Ok(())
    }

    /// A read of one place by several lanes; false if it must be checked lane by lane, to find which of them races.
    fn check_broadcast(&mut self, offsets: &[u64; 32], lanes: u32, len: u32, mut now: Record, clock: &Clock) -> bool {
        let offset = offsets[lanes.trailing_zeros() as usize];
        if (0..32).any(|lane| lanes >> lane & 1 == 1 && offsets[lane] != offset) {
            return false;
        }
        now.set_lane(SEVERAL_LANES);
        self.check_range(offset, len, now, clock).is_ok()
    }

    fn check_range(&mut self, offset: u64, len: u32, now: Record, clock: &Clock) -> Result<(), Box<Race>> {
        let end = offset + u64::from(len);
        let mut at = offset;
        while at < end {
            let line_end = (at / LINE_BYTES + 1) * LINE_BYTES;
            if at.is_multiple_of(LINE_BYTES) && line_end <= end {
                self.check_line(at, now.striped(now.lane(), 0), clock)?;
            } else {
                self.check_part(at, line_end.min(end), now, clock)?;
            }
            at = line_end;
        }
        Ok(())
    }

    #[inline]
    fn line(pages: &mut Vec<Option<Box<Page>>>, offset: u64) -> &mut Line {
        let number = (offset / LINE_BYTES) as usize;
        let page_number = number / PAGE_LINES;
        if page_number >= pages.len() {
            pages.resize_with(page_number + 1, || None);
        }
        let page = pages[page_number].get_or_insert_with(|| Box::new([Line::default(); PAGE_LINES]));
        &mut page[number % PAGE_LINES]
    }

    /// An access of the whole line at `offset`.
    #[inline]
    fn check_line(&mut self, offset: u64, now: Record, clock: &Clock) -> Result<(), Box<Race>> {
        let line = Self::line(&mut self.pages, offset);
        if line.split == 0 {
            let fits = line.whole.write.fits_line(&now, clock)
                && line.whole.read.fits_line(&now, clock)
                && self.spills.get(&line.whole).iter().all(|past| past.fits_line(&now, clock));
            if fits {
                return touch(&mut line.whole, &mut self.spills, now, clock)
                    .map_err(|(past, missing)| race(offset, past, now, missing));
            }
            split(line, &mut self.spills, &mut self.split, &mut self.unused);
        }
        let index = line.split - 1;
        for (i, cell) in self.split[index as usize].iter_mut().enumerate() {
            let now = now.of_cell(i as u32);
            let offset = offset + i as u64 * CELL_BYTES;
            touch(cell, &mut self.spills, now, clock).map_err(|(past, missing)| race(offset, past, now, missing))?;
        }
        if now.is(WRITE) {
            // The cells remember nothing but this write.
            line.whole = Cell { write: now, ..Cell::default() };
            line.split = 0;
            self.split[index as usize] = Default::default();
            self.unused.push(index);
        }
        Ok(())
    }

    /// An access of `offset..end`, a part of a line.
    fn check_part(&mut self, offset: u64, end: u64, now: Record, clock: &Clock) -> Result<(), Box<Race>> {
        let line = Self::line(&mut self.pages, offset);
        if line.split == 0 {
            split(line, &mut self.spills, &mut self.split, &mut self.unused);
        }
        let cells = &mut self.split[line.split as usize - 1];
        let mut at = offset;
        while at < end {
            let start = at - at % CELL_BYTES;
            let stop = (start + CELL_BYTES).min(end);
            let bytes = (1u32 << (stop - start)) - (1 << (at - start));
            let cell = &mut cells[(start % LINE_BYTES / CELL_BYTES) as usize];
            let now = now.on(bytes << BYTES_SHIFT);
            touch(cell, &mut self.spills, now, clock).map_err(|(past, missing)| race(start, past, now, missing))?;
            at = stop;
        }
        Ok(())
    }
}

/// The race of two records of the cell, or line, at `offset`.
#[cold]
fn race(offset: u64, past: Record, now: Record, missing: Missing) -> Box<Race> {
    let common = (past.bytes() & now.bytes()) >> BYTES_SHIFT;
    let offset = offset + u64::from(common.trailing_zeros());
    Box::new(Race { offset, first: past.party(), second: now.party(), missing })
}

/// Gives a line cells that remember what it does.
#[cold]
fn split(line: &mut Line, spills: &mut Spills, split: &mut Vec<[Cell; LINE_CELLS]>, unused: &mut Vec<u32>) {
    let index = unused.pop().unwrap_or_else(|| {
        split.push(Default::default());
        split.len() as u32 - 1
    });
    let list = spills.get(&line.whole).to_vec();
    spills.release(&mut line.whole);
    for (cell, i) in split[index as usize].iter_mut().zip(0..) {
        cell.write = line.whole.write.of_cell(i);
        cell.read = line.whole.read.of_cell(i);
        if !list.is_empty() {
            spills.of(cell).extend(list.iter().map(|record| record.of_cell(i)));
        }
    }
    *line = Line { split: index + 1, ..Line::default() };
}

//! Which pages a CTA scores: the prefix sum of the requests' tiles, and the walk over a CTA's range of pages.

use dsa_core::consts::REQUESTS_MAX;
use dsa_core::device::scan::{Thread, warp_inclusive};
use ptx::{Reg, SharedArray, Var, any, ballot, broadcast, for_range, sync_threads, when, while_};

use crate::rows::{longest_row, tiles};
use crate::score::kernel::ScoreParams;

/// `start[r]`: tiles of the requests before `r`; `start[requests]`: all tiles.
#[derive(Clone, Copy)]
pub(super) struct Schedule {
    start: SharedArray<u32>,
    requests: Reg<u32>,
}

impl Schedule {
    /// Computes the prefix sums; ends with a CTA barrier.
    pub(super) fn compute(p: &ScoreParams, requests: Reg<u32>, q: u32, topk: u32, t: Thread) -> Schedule {
        let start = SharedArray::<u32>::new("start", REQUESTS_MAX as u32 + 1);
        for_range(t.index, requests, t.threads, |r| {
            let longest = longest_row(p.row_ends, r, q, p.length_max);
            start.at(r + 1).store(tiles(longest, topk));
        });
        sync_threads(); // ORDER: every request's tiles, before warp 0 sums them.
        when(t.warp.eq(0), || {
            let carry = Var::new(0u32);
            for_range(0u32, requests, 32u32, |base| {
                let r = base + t.lane;
                let mine = Var::new(0u32);
                when(r.lt(requests), || mine.set(start.at(r + 1).load()));
                let through = warp_inclusive(mine.get(), t.lane) + carry.get();
                when(r.lt(requests), || start.at(r + 1).store(through));
                carry.set(broadcast(through, 31));
            });
            when(t.lane.eq(0), || start.at(0).store(0u32));
        });
        sync_threads(); // ORDER: the prefix sums, before every warp walks them.
        Schedule { start, requests }
    }

    /// All pages of the step (two per tile).
    pub(super) fn pages(self) -> Reg<u32> {
        self.start.at(self.requests).load() * 2
    }

    /// First tile of `request`.
    pub(super) fn first_tile(self, request: Reg<u32>) -> Reg<u32> {
        self.start.at(request).load()
    }

    /// A warp's walk over pages `first..end` of the step, request by request. Warp-uniform.
    pub(super) fn walk(self, first: Reg<u32>, end: Reg<u32>, t: Thread) -> Walk {
        // The last request whose first page is at or before `first`: 32 requests a step.
        let request = Var::new(0u32);
        let base = Var::new(0u32);
        while_(
            || base.get().lt(self.requests),
            || {
                let r = base.get() + t.lane;
                let before = Var::new(0u32);
                when(r.lt(self.requests), || {
                    let starts_before = (self.start.at(r).load() * 2).le(first);
                    before.set(starts_before.as_u32());
                });
                let starts_before = before.get().ne(0);
                let lanes = ballot(starts_before);
                when(lanes.ne(0), || request.set(base.get() + (Reg::<u32>::from(31) - lanes.clz())));
                // Starts ascend: once a lane is past `first`, so are all later requests.
                base.set(any(!starts_before).select::<u32>(self.requests, base.get() + 32));
            },
        );
        Walk { schedule: self, next: Var::new(first), end, request }
    }
}

/// The pages of one request within a CTA's range.
#[derive(Clone, Copy)]
pub(super) struct Item {
    /// The request.
    pub(super) request: Reg<u32>,
    /// Its first page in the range, counted within the request.
    pub(super) page: Reg<u32>,
    /// Pages in the range.
    pub(super) pages: Reg<u32>,
}

/// A cursor over the items of a range.
#[derive(Clone, Copy)]
pub(super) struct Walk {
    schedule: Schedule,
    next: Var<u32>,
    end: Reg<u32>,
    request: Var<u32>,
}

impl Walk {
    /// Whether the range has pages left.
    pub(super) fn more(self) -> ptx::Pred {
        self.next.get().lt(self.end)
    }

    /// The next item; call only while there are [more](Walk::more).
    pub(super) fn next(self) -> Item {
        let start = self.schedule.start;
        // Skip requests that end at or before the cursor (those without tiles).
        while_(|| (start.at(self.request.get() + 1).load() * 2).le(self.next.get()), || self.request.add(1));
        let request = self.request.get();
        let at = self.next.get();
        let page = at - start.at(request).load() * 2;
        let stop = (start.at(request + 1).load() * 2).min(self.end);
        self.next.set(stop);
        Item { request, page, pages: stop - at }
    }
}

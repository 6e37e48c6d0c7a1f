//! The device code of [`local_topk`](super).

use dsa_core::consts::KEYS_PER_TOP;
use dsa_core::device::ownership::next_epoch;
use dsa_core::device::scan::Thread;
use dsa_core::layout::ll_slot::PAIR_BYTES;
use ptx::*;

use super::LocalTopkShape;
use crate::rows::clamp_length;
use crate::topk::{BRowPart, Row, RowTopk};

kernel_args! {
    /// Arguments of local top-k. The last five are read by a kernel that pushes.
    pub struct LocalTopkArgs / LocalTopkParams {
        /// u32 `[rows of the grid, n + n / 32]`: B' rows, output
        pub out: DevicePtr<u32>,
        /// int32 `[rows of the grid]`: keys of each row, output
        pub counts: DevicePtr<i32>,
        /// BF16 logits, row `t` at `t * pitch`
        pub logits: DevicePtr<u16>,
        /// order16 of the largest of every 8 logits
        pub tops: DevicePtr<u16>,
        /// int32 `[rows]`: keys that each row has on this rank
        pub row_ends: DevicePtr<i32>,
        /// elements from one logits row to the next
        pub pitch: u32,
        /// longest row that the scratch allows, in keys
        pub length_max: u32,
        /// live rows; the rows of the grid beyond them are empty
        pub rows: u32,
        /// `[ranks]`: address of each rank's slots
        pub peers: DevicePtr<u64>,
        /// u32 `[slot_rows]`: epoch of each row's last merge
        pub epochs: DevicePtr<u32>,
        /// u32: 0 while the exchange works
        pub status: DevicePtr<u32>,
        /// this rank
        pub rank: u32,
        /// rows of the slots
        pub slot_rows: u32,
    }
}

/// Builds the kernel of `shape` for `target`.
///
/// # Errors
/// Only if the builder's verifier refuses the result, which is a defect here.
pub fn build(shape: &LocalTopkShape, target: Target) -> Result<Kernel<LocalTopkArgs>, VerifyError> {
    let bounds = LaunchBounds {
        max_registers: shape.registers(),
        cluster: (shape.cluster > 1).then_some(shape.cluster),
        ..LaunchBounds::threads(shape.threads())
    };
    let shape = *shape;
    ptx::build::<LocalTopkArgs>(&shape.name(), target, bounds, |p| {
        let t = Thread::current();
        let topk = RowTopk::with_b_row(shape.n, shape.cluster, shape.foreign, true, t);
        let peers = SharedArray::new("peers", shape.push_ranks.unwrap_or(1));
        let call = SharedArray::aligned("call", 2, 8);
        LocalTopk { shape, p, topk, t, peers, call }.emit()
    })
}

struct LocalTopk {
    shape: LocalTopkShape,
    p: LocalTopkParams,
    topk: RowTopk,
    t: Thread,
    /// Address of each rank's slots.
    peers: SharedArray<u64>,
    /// Epoch of the push and status of the exchange: the registers are the keys'.
    call: SharedArray<u32>,
}

/// Where and whether a row is pushed.
#[derive(Clone, Copy)]
struct Push {
    ranks: u32,
    epoch: Reg<u32>,
    status: Reg<u32>,
}

impl LocalTopk {
    fn emit(&self) {
        let LocalTopk { shape, p, topk, t, .. } = self;
        topk.arrive();
        let row = topk.row();
        let end = Var::new(0i32);
        when(row.lt(p.rows), || end.set(p.row_ends.at(row).load_as(LoadMode::STREAM)));
        let length = clamp_length(end.get(), p.length_max);
        topk.clear();
        // Here, where every CTA passes, whatever its row.
        topk.meet();
        sync_threads(); // ORDER: the cleared bins, before keys are counted.
        // ORDER: from here on the kernel reads what its predecessors wrote, and writes what they may read.
        wait_for_dependencies();
        launch_dependents();
        if let Some(ranks) = shape.push_ranks {
            self.prepare_push(row, ranks);
        }
        let first = row.mul_wide(p.pitch);
        let tops = p.tops.at64(first >> KEYS_PER_TOP.trailing_zeros());
        let (count, part) = topk.write_b_row(Row { logits: p.logits.at64(first), tops, length });
        sync_threads(); // ORDER: the finished row, before it is copied.
        if let Some(part) = &part {
            topk.send_planes(part);
        }
        let push = shape.push_ranks.map(|ranks| self.push_state(ranks));
        let row = topk.row();
        self.copy_row(row, part.as_ref());
        let writes_count = match part {
            None => t.index.eq(0),
            Some(_) => (t.index | topk.rank()).eq(0),
        };
        when(writes_count, || p.counts.at(row).store(count.as_i32()));
        if let Some(push) = push {
            // A failed exchange stays silent until it is reset: its epochs no longer tell calls apart.
            when(push.status.eq(0), || self.push(row, push, part.as_ref()));
        }
        if let Some(part) = &part {
            when(topk.rank().eq(0), || {
                topk.await_planes(part);
                self.copy_planes(row, part);
                if let Some(push) = push {
                    when(push.status.eq(0), || self.push_planes(row, push, part));
                }
            });
        }
    }

    /// Reads what the push needs, while the keys are on their way. A CTA barrier must follow.
    fn prepare_push(&self, row: Reg<u32>, ranks: u32) {
        let LocalTopk { p, t, .. } = self;
        when(t.index.lt(ranks), || self.peers.at(t.index).store(p.peers.at(t.index).load()));
        when(t.index.eq(0), || {
            self.call.ptr().store_vec([next_epoch(p.epochs.at(row).load()), p.status.load()]);
        });
    }

    /// What that left.
    fn push_state(&self, ranks: u32) -> Push {
        let [epoch, status] = self.call.ptr().load_vec::<2>();
        Push { ranks, epoch, status }
    }

    /// Where `out` has the row.
    fn out_row(&self, row: Reg<u32>) -> Global<u32> {
        self.p.out.at64(row.mul_wide(self.shape.row().words() as u32))
    }

    /// The row, or this CTA's part without the planes, to `out`.
    fn copy_row(&self, row: Reg<u32>, part: Option<&BRowPart>) {
        let LocalTopk { shape, topk, t, .. } = self;
        let (out, words) = (self.out_row(row), topk.b_row().ptr());
        match part {
            None => for_range(t.index, shape.row().words() as u32 / 4, t.threads, |i| {
                out.at(i * 4).store_vec(words.at(i * 4).load_vec::<4>());
            }),
            Some(part) => part.each_group(1, t.index, t.threads, |slot, _| out.at(slot).store(words.at(slot).load())),
        }
    }

    /// First byte of the row's slot on every rank.
    fn slot(&self, row: Reg<u32>, Push { ranks, epoch, .. }: Push) -> Reg<u64> {
        let p = &self.p;
        let slot = ((epoch & 1).mad(ranks, p.rank)).mul_wide(p.slot_rows) + row.to_u64();
        slot * (self.pairs() * PAIR_BYTES as u32)
    }

    /// Pairs of a row.
    fn pairs(&self) -> u32 {
        self.shape.row().words() as u32 / 2
    }

    /// The row, or this CTA's part without the planes, to this rank's slot on every rank.
    fn push(&self, row: Reg<u32>, push: Push, part: Option<&BRowPart>) {
        let LocalTopk { shape, topk, t, peers, .. } = self;
        let Push { ranks, epoch, .. } = push;
        let (pairs, first) = (self.pairs(), self.slot(row, push));
        let of_rank = |rank: Reg<u32>| Global::<u64>::from_address(peers.at(rank).load()).byte_at(first);
        let words_of = |pair: Reg<u32>| topk.b_row().ptr().at(pair * 2).load_vec::<2>().map(|word| word.pack(epoch));
        let Some(part) = part else {
            return for_range(t.index, ranks * pairs, t.threads, |i| {
                let (rank, pair) = (i / pairs, i % pairs);
                // ORDER: none. Each 8-byte half says by its epoch which call it belongs to.
                of_rank(rank).at(pair * 2).store_vec_as(Sem::Relaxed(Scope::Sys), words_of(pair));
            });
        };
        // As many threads to a rank as there are pairs in an equal share of the row; the others take other ranks.
        let share = (shape.n / 2 / shape.cluster).next_power_of_two().max(t.threads / ranks.next_power_of_two());
        let a_rank = share.clamp(32, t.threads);
        let at_once = t.threads / a_rank;
        let (rank, start) = (t.index / a_rank, t.index % a_rank);
        part.each_group(2, start, a_rank, |pair, run| {
            let halves = words_of(pair);
            let own = [0, 1].map(|i| (pair * 2 + i).ge(run.first) & (pair * 2 + i).lt(run.end));
            for r in (0..ranks).step_by(at_once as usize) {
                let rank = rank + r;
                let store = || {
                    let at = of_rank(rank).at(pair * 2);
                    // ORDER: none, as above. Another CTA, or another run, may have the other half.
                    when_else(
                        own[0] & own[1],
                        || at.store_vec_as(Sem::Relaxed(Scope::Sys), halves),
                        || {
                            for (i, (own, half)) in (0..).zip(own.into_iter().zip(halves)) {
                                when(own, || at.offset(i).store_as(Sem::Relaxed(Scope::Sys), half));
                            }
                        },
                    );
                };
                if r + at_once <= ranks { store() } else { when(rank.lt(ranks), store) }
            }
        });
    }

    /// The planes of all CTAs to `out`; by the first.
    fn copy_planes(&self, row: Reg<u32>, part: &BRowPart) {
        let LocalTopk { shape, topk, t, .. } = self;
        let planes = self.out_row(row).at(shape.n);
        for_range(t.index, self.plane_pairs(), t.threads, |pair| {
            planes.at(pair * 2).store_vec(topk.two_of_planes(part, pair * 2));
        });
    }

    /// The planes of all CTAs to this rank's slot on every rank; by the first.
    fn push_planes(&self, row: Reg<u32>, push: Push, part: &BRowPart) {
        let LocalTopk { shape, topk, t, peers, .. } = self;
        let (pairs, first) = (self.plane_pairs(), self.slot(row, push));
        for_range(t.index, push.ranks * pairs, t.threads, |i| {
            let (rank, pair) = (i / pairs, i % pairs);
            let at = Global::<u64>::from_address(peers.at(rank).load()).byte_at(first).at(pair * 2 + shape.n);
            let halves = topk.two_of_planes(part, pair * 2).map(|word| word.pack(push.epoch));
            at.store_vec_as(Sem::Relaxed(Scope::Sys), halves); // ORDER: none, as for words.
        });
    }

    /// Pairs of the planes.
    fn plane_pairs(&self) -> u32 {
        self.pairs() - self.shape.n / 2
    }
}

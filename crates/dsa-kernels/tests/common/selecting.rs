//! Select alone, on logits that no score kernel wrote.

use dsa_core::KvShape;
use dsa_core::consts::{KEYS_PER_TOP, PAGE};
use dsa_core::generate::SplitMix64;
use dsa_core::layout::tp_scratch::{TpScratch, clamp_row_end};
use dsa_core::numerics::order16::canonical_logit;
use dsa_core::oracle::score::tops;
use dsa_core::oracle::select::{KvTableRow, Selection, check_selection, select_row};
use dsa_kernels::Table;
use dsa_kernels::select::{IndexerSelect, SelectShape, SelectStep};
use gpu::{Buffer, Device, Stream};

use super::{GUARD, POISON, Words, read_guarded};

/// +infinity: what lies in the scratch past a row's end, where it must not be picked.
const PAST_END: u16 = 0x7F80;
/// What fills the GPU's scratch where a row has no page: the largest top, a NaN logit.
const UNWRITTEN: u8 = 0xFF;

/// CTAs that may share a row.
pub const CLUSTERS: [u32; 4] = [1, 2, 4, 8];

/// Rows of logits to select from.
#[derive(Debug, Clone)]
pub struct Rows {
    pub q: usize,
    pub topk: usize,
    pub page: usize,
    pub block_rows: usize,
    /// Smallest block id in use.
    pub block_first: usize,
    pub row_ends: Vec<i32>,
    /// Longest row that table and scratch allow.
    pub length_max: usize,
    /// Per row at least as many as it sees keys; what is more lies past its end.
    pub logits: Vec<Vec<u16>>,
    pub foreign: bool,
    pub ids: bool,
    pub hold: bool,
    /// CTAs that share a row.
    pub cluster: u32,
    /// Rows of the outputs beyond the live ones.
    pub spare: usize,
}

impl Rows {
    /// One request a row, each row seeing all its logits, canonical, pages of 64, ids.
    pub fn new(topk: usize, logits: Vec<Vec<u16>>) -> Rows {
        let row_ends: Vec<i32> = logits.iter().map(|row| row.len() as i32).collect();
        let longest = logits.iter().map(Vec::len).max().unwrap_or(0);
        Rows {
            q: 1,
            topk,
            page: 64,
            block_rows: 64,
            block_first: 0,
            row_ends,
            length_max: longest.max(1),
            logits,
            foreign: false,
            ids: true,
            hold: false,
            cluster: 1,
            spare: 0,
        }
    }

    /// Whether the logits may hold any NaN and -0, for a kernel that expects them.
    pub fn foreign(self, foreign: bool) -> Rows {
        Rows { foreign, ..self }
    }

    /// Shared by `cluster` CTAs each.
    pub fn cluster(self, cluster: u32) -> Rows {
        Rows { cluster, ..self }
    }

    pub fn shape(&self) -> SelectShape {
        let shape = SelectShape::new(self.topk, self.page).unwrap().with_cluster(self.cluster).unwrap();
        shape.with_ids(self.ids).with_hold(self.hold).with_foreign_logits(self.foreign)
    }

    /// The kernel of each number of CTAs that can share the rows; on the simulator, without `DSA_FULL=1`, of one CTA and of one
    /// other number, which changes with the rows.
    pub fn kernels(&self, device: &Device) -> Vec<IndexerSelect> {
        let all = !device.info().simulated || std::env::var_os("DSA_FULL").is_some_and(|v| v == "1");
        let other = [2, 4, 2, 2, 4, 2, 8][(self.live() + self.topk / 128 + usize::from(self.foreign)) % 7];
        let wanted = CLUSTERS.into_iter().filter(|cluster| all || [1, other].contains(cluster));
        let shapes = wanted.map(|cluster| self.shape().with_cluster(cluster).unwrap());
        shapes.map(|shape| IndexerSelect::new(device, shape).unwrap()).collect()
    }

    pub fn live(&self) -> usize {
        self.row_ends.len()
    }

    fn len(&self, row: usize) -> usize {
        clamp_row_end(self.row_ends[row], self.length_max)
    }

    /// The logits as the scratch holds them: a canonical kernel gets what score would have stored.
    fn stored(&self, row: usize) -> Vec<u16> {
        let canonical = |bits: &u16| if self.foreign { *bits } else { canonical_logit(*bits) };
        self.logits[row].iter().map(canonical).collect()
    }

    /// Block ids of every request: random and distinct where a row needs them, garbage elsewhere.
    fn table(&self) -> (Vec<i32>, usize) {
        let width = self.length_max.div_ceil(self.page);
        let stride = width + 3;
        let last = self.block_first + self.live() / self.q * width;
        let mut ids: Vec<i32> = (self.block_first..last).map(|id| id as i32).collect();
        SplitMix64::new(7).shuffle(&mut ids);
        let mut table = vec![i32::MIN; self.live() / self.q * stride];
        for (request, row) in table.chunks_mut(stride).enumerate() {
            let longest = (0..self.q).map(|i| self.len(request * self.q + i)).max().unwrap_or(0);
            let needed = longest.div_ceil(self.page);
            row[..needed].copy_from_slice(&ids[request * width..][..needed]);
        }
        (table, stride)
    }

    /// The oracle's answer, spare rows included.
    pub fn expected(&self) -> Vec<Selection> {
        let (table, stride) = self.table();
        let select = |row: usize| {
            let blocks = &table[row / self.q * stride..][..self.length_max.div_ceil(self.page)];
            let kv = KvTableRow { blocks, page: self.page, block_rows: self.block_rows };
            select_row(&self.stored(row), self.len(row) as i32, self.topk, kv).unwrap()
        };
        // Sorting long rows is most of the work of a test on a GPU: spread it over the cores.
        let keys: usize = self.logits.iter().map(Vec::len).sum();
        let threads = if keys < 1 << 20 { 1 } else { std::thread::available_parallelism().map_or(1, usize::from) };
        let live: Vec<usize> = (0..self.live()).collect();
        let rows: Vec<Selection> = std::thread::scope(|scope| {
            let share = live.len().div_ceil(threads).max(1);
            let parts = live.chunks(share).map(|part| scope.spawn(|| part.iter().map(|row| select(*row)).collect()));
            let parts: Vec<_> = parts.collect();
            parts.into_iter().flat_map(|part| -> Vec<Selection> { part.join().expect("the oracle panicked") }).collect()
        });
        let empty = || Selection { ids: vec![-1; self.topk], rows: vec![-1; self.topk], count: 0, threshold: None };
        rows.into_iter().chain((0..self.spare).map(|_| empty())).collect()
    }
}

/// [`Rows`] on a device.
pub struct SelectRig {
    pub stream: Stream,
    pub logits: Buffer<u16>,
    pub tops: Buffer<u16>,
    pub table: Buffer<i32>,
    pub stride: usize,
    pub row_ends: Buffer<i32>,
    pub out: Buffer<i32>,
    pub counts: Buffer<i32>,
    pub ids: Buffer<i32>,
    pub rows: Rows,
}

impl SelectRig {
    /// Lays the rows out as score would. Only the pages that a row's keys lie in are written: the simulator refuses to
    /// read anything else, and on a GPU the rest is garbage that would win.
    pub fn new(device: &Device, rows: &Rows) -> SelectRig {
        let stream = device.stream().unwrap();
        let capacity = TpScratch::capacity(rows.live(), rows.length_max);
        let (table, stride) = rows.table();
        let total = rows.live() + rows.spare;
        let rig = SelectRig {
            logits: device.alloc(capacity).unwrap(),
            tops: device.alloc(capacity / KEYS_PER_TOP).unwrap(),
            table: device.upload(&table).unwrap(),
            stride,
            row_ends: device.upload(&rows.row_ends).unwrap(),
            out: device.alloc(total * rows.topk + GUARD).unwrap(),
            counts: device.alloc(total + GUARD).unwrap(),
            ids: device.alloc(total * rows.topk + GUARD).unwrap(),
            stream,
            rows: rows.clone(),
        };
        if !device.info().simulated {
            rig.logits.fill_bytes(&rig.stream, UNWRITTEN).unwrap();
            rig.tops.fill_bytes(&rig.stream, UNWRITTEN).unwrap();
        }
        rig.write(rows);
        rig
    }

    /// Writes the rows' pages.
    pub fn write(&self, rows: &Rows) {
        let plan = TpScratch::plan(&rows.row_ends, rows.q, rows.topk, rows.length_max).unwrap();
        for row in 0..rows.live() {
            let len = rows.len(row);
            let Some(start) = plan.row_start(row).filter(|_| len > rows.topk) else { continue };
            let mut logits = rows.stored(row);
            logits.resize(len.next_multiple_of(PAGE), PAST_END);
            let tops = tops(&logits, len);
            self.logits.view(start..start + logits.len()).unwrap().copy_from(&self.stream, &logits).unwrap();
            let at = start / KEYS_PER_TOP;
            self.tops.view(at..at + tops.len()).unwrap().copy_from(&self.stream, &tops).unwrap();
        }
    }

    /// What a producer copies for the logits and tops to be those of `from`.
    pub fn taken_from<'a>(&'a self, from: &'a SelectRig) -> [Words<'a>; 3] {
        [
            Words::new(&self.logits.as_view(), &from.logits.as_view()),
            Words::new(&self.tops.as_view(), &from.tops.as_view()),
            Words::none(),
        ]
    }

    pub fn step(&self) -> SelectStep<'_> {
        let rows = &self.rows;
        let total = rows.live() + rows.spare;
        SelectStep {
            logits: self.logits.as_view(),
            tops: self.tops.as_view(),
            table: Table { ids: self.table.as_view(), stride: self.stride, width: self.stride - 3 },
            kv: KvShape::new(rows.page, rows.block_rows, 0).unwrap(),
            row_ends: self.row_ends.as_view(),
            q: rows.q,
            length_max: rows.length_max,
            out: self.out.view(..total * rows.topk).unwrap(),
            counts: self.counts.view(..total).unwrap(),
            ids: rows.ids.then(|| self.ids.view(..total * rows.topk).unwrap()),
        }
    }

    pub fn poison(&self) {
        for buffer in [&self.out, &self.counts, &self.ids] {
            buffer.fill_bytes(&self.stream, POISON).unwrap();
        }
    }

    /// Rows, counts and ids (without ids: the poison that they must have kept).
    pub fn read(&self) -> [Vec<i32>; 3] {
        let total = self.rows.live() + self.rows.spare;
        let ids = if self.rows.ids { total * self.rows.topk } else { 0 };
        [(&self.out, total * self.rows.topk), (&self.counts, total), (&self.ids, ids)]
            .map(|(buffer, len)| read_guarded(buffer, len, &self.stream))
    }

    pub fn run(&self, select: &IndexerSelect) -> [Vec<i32>; 3] {
        self.poison();
        select.launch(&self.stream, &self.step()).unwrap();
        self.read()
    }

    /// Compares a run with the oracle's answer.
    #[track_caller]
    pub fn check(&self, want: &[Selection], [out, counts, ids]: &[Vec<i32>; 3]) {
        let ids = self.rows.ids.then_some(&ids[..]);
        if let Err(mismatch) = check_selection(want, self.rows.topk, out, counts, ids) {
            let Rows { q, topk, page, row_ends, foreign, cluster, .. } = &self.rows;
            panic!(
                "{mismatch}: q {q}, top-k {topk}, page {page}, foreign {foreign}, clusters of {cluster}, row ends {row_ends:?}"
            );
        }
    }
}

/// Selects from the rows `runs` times with every number of CTAs a row; every run must be the oracle's answer.
#[track_caller]
pub fn check_select_runs(device: &Device, rows: &Rows, runs: usize) {
    check_select_with(device, &rows.kernels(device), rows, runs);
}

/// As [`check_select_runs`] with kernels at hand.
#[track_caller]
pub fn check_select_with(device: &Device, kernels: &[IndexerSelect], rows: &Rows, runs: usize) {
    let mut rig = SelectRig::new(device, rows);
    let want = rows.expected();
    for select in kernels {
        rig.rows.cluster = select.shape().cluster();
        for _ in 0..runs {
            rig.check(&want, &rig.run(select));
        }
    }
}

/// Selects from the rows once.
#[track_caller]
pub fn check_select(device: &Device, rows: &Rows) {
    check_select_runs(device, rows, 1);
}

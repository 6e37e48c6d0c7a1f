//! One case of the indexer on a device: pages, queries, tables, kernels, and the check of their answer.

use dsa_core::consts::{DIM, HEADS, PAGE};
use dsa_core::generate::SplitMix64;
use dsa_core::layout::fp8_page::{self, ScaleForm};
use dsa_core::layout::tp_scratch::TpScratch;
use dsa_core::{IndexCacheShape, KvShape, oracle};
use dsa_kernels::score::{IndexerScore, KeyCache, ScoreForm, ScoreOutput, ScoreShape, ScoreStep};
use dsa_kernels::select::{IndexerSelect, SelectShape, SelectStep};
use dsa_kernels::{KernelError, Table};
use gpu::{Buffer, Device, Graph, Stream};

use crate::What;
use crate::cases::{Case, Data};
use crate::common::{Result, number};

/// Key pages of a pool, filled once: E4M3 keys and UE8M0 scales.
pub struct Pool {
    cache: KeyCache,
    pages: Vec<u8>,
    _bytes: Buffer<u8>,
}

/// Distinct pages; the pool repeats them, which no kernel can tell.
const DISTINCT_PAGES: usize = 1000;

impl Pool {
    pub fn new(device: &Device, stream: &Stream, pages: usize, data: Data) -> Result<Pool> {
        let mut rng = SplitMix64::new(5);
        let distinct = DISTINCT_PAGES.min(pages);
        let mut new_key = || -> [u8; DIM] { std::array::from_fn(|_| moderate_e4m3(&mut rng)) };
        let few: Option<Vec<[u8; DIM]>> = data.distinct_keys().map(|n| (0..n).map(|_| new_key()).collect());
        let mut pick = SplitMix64::new(7);
        let mut chunk = vec![0u8; distinct * fp8_page::BYTES];
        for page in chunk.chunks_exact_mut(fp8_page::BYTES) {
            let (keys, scales) = page.split_at_mut(fp8_page::SCALES.start);
            for (key, scale) in keys.chunks_exact_mut(DIM).zip(scales.chunks_exact_mut(4)) {
                let choice = pick.next_u64();
                match &few {
                    None => {
                        key.copy_from_slice(&new_key());
                        scale.fill(120 + (choice & 3) as u8);
                    }
                    Some(few) => {
                        key.copy_from_slice(&few[choice as usize % few.len()]);
                        scale.fill(120);
                    }
                }
            }
        }
        let bytes = device.alloc::<u8>(pages * fp8_page::BYTES)?;
        for first in (0..pages).step_by(distinct) {
            let n = distinct.min(pages - first) * fp8_page::BYTES;
            let at = first * fp8_page::BYTES;
            bytes.view(at..at + n)?.copy_from(stream, &chunk[..n])?;
        }
        let shape = IndexCacheShape::new(pages, fp8_page::BYTES, fp8_page::BYTES)?;
        Ok(Pool { cache: KeyCache::new(device, &bytes.as_view(), shape)?, pages: chunk, _bytes: bytes })
    }
}

/// A finite E4M3 below 2 in magnitude.
fn moderate_e4m3(rng: &mut SplitMix64) -> u8 {
    let bits = rng.next_u64() as u8;
    (bits & 0x80) | ((bits & 0x7F) % 0x40)
}

/// One case on the device.
pub struct Rig {
    pub stream: Stream,
    pub score: IndexerScore,
    pub select: IndexerSelect,
    q: usize,
    topk: usize,
    pub lengths: Vec<usize>,
    length_max: usize,
    table_width: usize,
    host_queries: Vec<u8>,
    host_weights: Vec<u16>,
    host_tables: Vec<Vec<i32>>,
    queries: Buffer<u8>,
    weights: Buffer<u16>,
    row_ends: Buffer<i32>,
    tables: Vec<Buffer<i32>>,
    logits: Buffer<u16>,
    tops: Buffer<u16>,
    out: Buffer<i32>,
    counts: Buffer<i32>,
}

impl Rig {
    /// With the CTAs per row that select would choose, or with `cluster`.
    pub fn new(
        device: &Device,
        pool_pages: usize,
        case: &Case,
        q: usize,
        topk: usize,
        cluster: Option<u32>,
    ) -> Result<Rig> {
        let mut rng = SplitMix64::new(9);
        let rows = case.lengths.len() * q;
        let pages: Vec<usize> = case.lengths.iter().map(|len| len.div_ceil(PAGE)).collect();
        let total: usize = pages.iter().sum();
        let table_width = pages.iter().copied().max().unwrap_or(1);
        let length_max = table_width * PAGE;
        let scratch = TpScratch::capacity(rows, length_max);
        let host_queries: Vec<u8> = (0..rows * HEADS * DIM).map(|_| moderate_e4m3(&mut rng)).collect();
        // Small signed weights.
        let host_weights: Vec<u16> = (0..rows * HEADS).map(|_| (rng.next_u64() as u16 & 0x807F) | 0x3E00).collect();
        // Verify rows see one key more each.
        let row_ends: Vec<i32> =
            case.lengths.iter().flat_map(|len| (0..q).map(move |i| (len - (q - 1 - i)) as i32)).collect();
        let mut order: Vec<i32> = (0..pool_pages as i32).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, (rng.next_u64() % (i as u64 + 1)) as usize);
        }
        let sets = (pool_pages / total).clamp(1, 16);
        let mut next = order.iter().copied().cycle();
        let host_tables: Vec<Vec<i32>> = (0..sets)
            .map(|_| {
                let mut table = vec![0i32; pages.len() * table_width];
                for (request, n) in pages.iter().enumerate() {
                    let row = &mut table[request * table_width..][..*n];
                    row.iter_mut().for_each(|id| *id = next.next().expect("a cycle"));
                }
                table
            })
            .collect();
        let select = SelectShape::new(topk, PAGE)?;
        let select = match cluster {
            Some(cluster) => select.with_cluster(cluster)?,
            None => select.for_launch(rows, length_max, device.info().sms),
        };
        let form = ScoreForm::Compact { topk: topk as u32 };
        let score = ScoreShape::new(q, form, ScaleForm::Ue8m0)?.with_alone(std::env::var_os("BENCH_ALONE").is_some());
        let score = IndexerScore::new(device, score)?;
        let select = IndexerSelect::new(device, select)?;
        if let Some(percent) = number("BENCH_CARVEOUT")? {
            score.function().prefer_shared_memory(percent as u32)?;
            select.function().prefer_shared_memory(percent as u32)?;
        }
        Ok(Rig {
            stream: device.stream()?,
            score,
            select,
            q,
            topk,
            lengths: row_ends.iter().map(|end| *end as usize).collect(),
            length_max,
            table_width,
            queries: device.upload(&host_queries)?,
            weights: device.upload(&host_weights)?,
            row_ends: device.upload(&row_ends)?,
            tables: host_tables.iter().map(|t| device.upload(t)).collect::<Result<_, _>>()?,
            logits: device.alloc(scratch)?,
            tops: device.alloc(scratch / 8)?,
            out: device.alloc(rows * topk)?,
            counts: device.alloc(rows)?,
            host_queries,
            host_weights,
            host_tables,
        })
    }

    pub fn launch_score(&self, pool: &Pool, set: usize, stream: &Stream) -> Result<(), KernelError> {
        let table = Table { ids: self.tables[set].as_view(), stride: self.table_width, width: self.table_width };
        let step = ScoreStep {
            queries: self.queries.as_view(),
            weights: self.weights.as_view(),
            cache: &pool.cache,
            table,
            row_ends: self.row_ends.as_view(),
            length_max: self.length_max,
        };
        let output = ScoreOutput::Compact { logits: self.logits.as_view(), tops: self.tops.as_view() };
        self.score.launch(stream, &step, &output)
    }

    /// The index table serves as the KV table too: 64-token pages.
    pub fn launch_select(&self, set: usize, stream: &Stream) -> Result<(), KernelError> {
        let step = SelectStep {
            logits: self.logits.as_view(),
            tops: self.tops.as_view(),
            table: Table { ids: self.tables[set].as_view(), stride: self.table_width, width: self.table_width },
            kv: KvShape::new(PAGE, PAGE, 0).expect("64-token pages"),
            row_ends: self.row_ends.as_view(),
            q: self.q,
            length_max: self.length_max,
            out: self.out.as_view(),
            counts: self.counts.as_view(),
            ids: None,
        };
        self.select.launch(stream, &step)
    }

    /// A graph of `launches` rounds, table sets in turn.
    pub fn graph(&self, pool: &Pool, launches: usize, what: What) -> Result<Graph, KernelError> {
        Graph::capture_with(&self.stream, |stream| {
            for i in 0..launches {
                let set = i % self.tables.len();
                if what != What::Select {
                    self.launch_score(pool, set, stream)?;
                }
                if what != What::Score {
                    self.launch_select(set, stream)?;
                }
            }
            Ok(())
        })
    }

    /// Checks the first and the last row: logits against the exact dot product to 2 BF16 ulp on a sample of keys,
    /// the selection exactly for the device's own logits.
    pub fn check(&self, pool: &Pool) -> Result<()> {
        self.launch_score(pool, 0, &self.stream)?;
        self.launch_select(0, &self.stream)?;
        self.stream.synchronize()?;
        let ends: Vec<i32> = self.lengths.iter().map(|len| *len as i32).collect();
        let plan = TpScratch::plan(&ends, self.q, self.topk, self.length_max)?;
        let (out, counts) = (self.out.copy_to_vec(&self.stream)?, self.counts.copy_to_vec(&self.stream)?);
        for row in [0, ends.len() - 1] {
            let len = self.lengths[row];
            let table = &self.host_tables[0][row / self.q * self.table_width..][..self.table_width];
            let kv = oracle::select::KvTableRow { blocks: table, page: PAGE, block_rows: PAGE };
            let logits = match plan.row_start(row) {
                Some(at) => self.logits.view(at..at + len)?.copy_to_vec(&self.stream)?,
                None => vec![0; len],
            };
            let want = oracle::select::select_row(&logits, ends[row], self.topk, kv)?;
            let got = &out[row * self.topk..][..self.topk];
            oracle::select::check_selection(&[want], self.topk, got, &counts[row..=row], None)?;
            if plan.row_start(row).is_some() {
                self.check_logits(pool, row, table, &logits);
            }
        }
        Ok(())
    }

    fn check_logits(&self, pool: &Pool, row: usize, table: &[i32], logits: &[u16]) {
        let query: &[u8; HEADS * DIM] =
            self.host_queries[row * HEADS * DIM..][..HEADS * DIM].try_into().expect("a row");
        let weights: &[u16; HEADS] = self.host_weights[row * HEADS..][..HEADS].try_into().expect("a row");
        for key in (0..logits.len()).step_by(logits.len() / 64 + 1) {
            let page = &pool.pages[table[key / PAGE] as usize % DISTINCT_PAGES * fp8_page::BYTES..][..fp8_page::BYTES];
            let (bytes, word) = fp8_page::read(page, key % PAGE);
            let scale = ScaleForm::Ue8m0.decode(word);
            let dots: [f32; HEADS] = std::array::from_fn(|h| {
                let head: &[u8; DIM] = query[h * DIM..][..DIM].try_into().expect("a head");
                ptx_sim_dot(head, bytes)
            });
            let want = oracle::score::logit(oracle::score::head_sum(&dots, weights), scale);
            assert_eq!(logits[key], want, "logit of row {row}, key {key}");
        }
    }
}

/// The tensor core's dot product: four chained k-steps.
fn ptx_sim_dot(query: &[u8; DIM], key: &[u8; DIM]) -> f32 {
    let part = |x: &[u8; DIM], k: usize| -> [u8; 32] { x[32 * k..][..32].try_into().expect("32 bytes") };
    (0..4).fold(0.0, |acc, k| ptx_sim::numeric::tensor_core::dot_e4m3_k32(&part(key, k), &part(query, k), acc))
}

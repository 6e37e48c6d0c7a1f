//! A whole step over ranks as one captured sequence per rank: the query, published; score, exchange, merge; the gathered
//! query. On the simulator always, on the GPUs here if there are any.

#[path = "common/layer.rs"]
mod layer;

use std::sync::Arc;
use std::time::Duration;

use dsa_core::consts::{KV_LORA, NOPE, Q_HEAD, Q_LORA};
use dsa_core::generate::{SplitMix64, StepSpec};
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_core::layout::mla_rows::{QKV, QUERY};
use dsa_core::numerics::bf16;
use dsa_core::{DecodeStep, Ownership};
use dsa_dcp::rendezvous::{InProcess, in_process};
use dsa_dcp::{Gather, GatherShape, GatherStep, Limits, MailboxShape, QueryElement, QueryMailbox};
use gpu::{Buffer, Device, Graph, SimConfig, Stream};
use kimi_decode::{
    DcpGroup, DcpIndexerConfig, DcpScratch, DcpSpec, FusedIndexer, LayerSpec, Sharded, Step, StepShape, Transport,
};
use layer::{Inputs, layer_of, oracle};
use mla_query::{MlaCache, MlaQuery, MlaShape, MlaStep, MlaWeights, Publication};

const RANKS: usize = 2;
const ROWS: usize = 3;
const TOPK: usize = 256;
const PAGE_TOKENS: usize = 64;
const FORM: MlaCacheForm = MlaCacheForm::Fp8Ds;
const SHAPE: StepShape = StepShape { rows: ROWS, q: 1 };

fn mailbox_shape() -> MailboxShape {
    MailboxShape::new(RANKS, 1, 64, ROWS, QueryElement::Bf16).unwrap()
}

fn random(seed: u64, n: usize, scale: f32) -> Vec<u16> {
    let mut rng = SplitMix64::new(seed);
    (0..n).map(|_| bf16::from_f32(scale * rng.gaussian())).collect()
}

/// One rank: a head of its own, its part of every context.
struct Rank {
    stream: Stream,
    scratch: Arc<DcpScratch>,
    indexer: FusedIndexer<Sharded>,
    inputs: Inputs,
    global_ends: Buffer<i32>,
    mailbox: QueryMailbox,
    query: MlaQuery,
    gather: Gather,
    weights: MlaWeights,
    _memory: [Buffer<u16>; 4],
    qkv: Buffer<u16>,
    slots: Buffer<i64>,
    out: Buffer<u8>,
    gathered: Buffer<u32>,
    cache: Buffer<u8>,
    dropped: Buffer<u32>,
}

impl Rank {
    /// Collective.
    fn new(device: &Device, member: Arc<InProcess>, rank: usize, step: &DecodeStep) -> Rank {
        let poll = Duration::from_millis(if device.info().simulated { 200 } else { 1000 });
        let limits = Limits { poll, collective: Duration::from_secs(30) };
        let spec = DcpSpec {
            rows_max: ROWS,
            push_rows_max: ROWS,
            interleave: 1,
            context_len_max: step.context_len_max,
            topk: TOPK,
            ids: true,
        };
        let group = DcpGroup { group: member.clone(), gather: None, limits, transport: Some(Transport::Push) };
        let scratch = DcpScratch::reserve(device, group, spec).unwrap();
        let shard = step.shard(Ownership::new(RANKS, 1).unwrap(), rank).unwrap();
        let inputs = Inputs::upload(device, &shard);
        let indexer = FusedIndexer::sharded(DcpIndexerConfig {
            scratch: &scratch,
            layer: LayerSpec { context_len_max: step.context_len_max, ..layer_of(&shard) },
            keys: inputs.cache.as_view(),
            local_topk: Some(TOPK / 2),
            shapes: &[SHAPE],
            hold: &[],
            ids: true,
        });
        // The same group serves both.
        let mailbox = QueryMailbox::with_limits(device, member, mailbox_shape(), limits).unwrap();
        let publication = Publication { mailbox: mailbox_shape(), multicast: mailbox.has_multicast() };
        let shape = MlaShape::new(1, ROWS, FORM, PAGE_TOKENS).unwrap().with_publication(publication).unwrap();
        let sizes = [(Q_LORA, 1.0), (KV_LORA, 1.0), (Q_HEAD * Q_LORA, 0.05), (NOPE * KV_LORA, 0.1)];
        let memory: [Buffer<u16>; 4] =
            std::array::from_fn(|i| device.upload(&random((10 * rank + i) as u64, sizes[i].0, sizes[i].1)).unwrap());
        let [q_a, kv_a, q_b, uk] = memory.each_ref().map(Buffer::as_view);
        Rank {
            stream: device.stream().unwrap(),
            scratch,
            indexer: indexer.unwrap(),
            inputs,
            global_ends: device.upload(&step.row_ends).unwrap(),
            mailbox,
            query: MlaQuery::new(device, shape).unwrap(),
            gather: Gather::new(device, GatherShape::new(mailbox_shape()).with_copy(true)).unwrap(),
            weights: MlaWeights::new(device, &shape, &q_a, &kv_a, &q_b, &uk).unwrap(),
            _memory: memory,
            qkv: device.upload(&random(99, ROWS * QKV, 2.0)).unwrap(),
            slots: device.upload(&[0i64, -1, 2]).unwrap(),
            out: device.alloc(ROWS * QUERY * 2).unwrap(),
            gathered: device.alloc(ROWS * mailbox_shape().token_bytes() / 4).unwrap(),
            cache: device.alloc(PAGE_TOKENS * FORM.entry_bytes()).unwrap(),
            dropped: device.alloc_zeros(1).unwrap(),
        }
    }

    /// The step on the rank's stream.
    fn run(&self, stream: &Stream, step: &Step<'_>) {
        let entry = FORM.entry_bytes();
        let mla = MlaStep {
            tokens: ROWS,
            qkv: self.qkv.as_view(),
            qkv_stride: QKV,
            slots: self.slots.as_view(),
            weights: &self.weights,
            q_scale_inv: None,
            k_scale: None,
            eps: 1e-5,
            query: self.out.as_view(),
            q_c: None,
            cache: MlaCache {
                bytes: self.cache.as_view(),
                pages: 1,
                page_stride: PAGE_TOKENS * entry,
                token_stride: entry,
            },
            mailbox: Some(&self.mailbox),
            dropped: self.dropped.as_view(),
        };
        self.query.launch(stream, &mla).unwrap();
        self.indexer.run_exchange(stream, step).unwrap();
        let gather = GatherStep { tokens: ROWS, out: Some(self.gathered.as_view()) };
        self.gather.launch(stream, &self.mailbox, &gather).unwrap();
    }

    /// Sets the ends of the contexts, this rank's with them.
    fn set_ends(&self, ends: &[i32]) {
        self.global_ends.copy_from(&self.stream, ends).unwrap();
        self.scratch.local_ends(&self.stream, &self.global_ends.as_view()).unwrap();
    }
}

/// Every rank selected what the whole context would, and has every rank's rows of the query.
#[track_caller]
fn verify(ranks: &[Rank], step: &DecodeStep, what: &str) {
    let want = oracle(step);
    let own: Vec<Vec<u8>> = ranks.iter().map(|rank| rank.out.copy_to_vec(&rank.stream).unwrap()).collect();
    for (at, rank) in ranks.iter().enumerate() {
        rank.scratch.check(&rank.stream).unwrap();
        rank.mailbox.check(&rank.stream).unwrap();
        let ids = rank.indexer.selected(ROWS).unwrap().ids.unwrap().copy_to_vec(&rank.stream).unwrap();
        for (row, want) in want.iter().enumerate() {
            assert_eq!(ids[row * TOPK..][..TOPK], want.ids, "{what}: rank {at}, row {row}");
        }
        let gathered: Vec<u8> =
            rank.gathered.copy_to_vec(&rank.stream).unwrap().iter().flat_map(|word| word.to_le_bytes()).collect();
        let (row, token) = (mailbox_shape().row_bytes(), mailbox_shape().token_bytes());
        for (t, source) in (0..ROWS).flat_map(|t| (0..RANKS).map(move |source| (t, source))) {
            let got = &gathered[t * token + source * row..][..row];
            assert!(got == &own[source][t * row..][..row], "{what}: rank {at}, token {t}, head of rank {source}");
        }
    }
}

#[test]
fn one_graph_per_rank_serves_new_rows_and_lengths() {
    // Keys and tables for the longest rows that occur.
    let step = StepSpec::new(3, 1, TOPK, &[700; ROWS]).build().unwrap();
    let ends = [[700, 300, 40], [1, 0, TOPK as i32], [699, 700, 513], [0, -2, 0]];
    let simulated = |config| Device::simulated_group(SimConfig { devices: RANKS, ..config });
    let mut machines = vec![simulated(SimConfig::default()), simulated(SimConfig::seeded(6))];
    if test_devices::cuda().is_some() {
        let gpus: Vec<_> = (0..Device::cuda_count().unwrap()).map(|i| Device::cuda(i).unwrap()).collect();
        machines.push(gpus.iter().cycle().take(RANKS).cloned().collect());
    }
    for devices in machines {
        let members: Vec<Arc<InProcess>> = in_process(RANKS).into_iter().map(Arc::new).collect();
        let ranks: Vec<Rank> = std::thread::scope(|scope| {
            let step = &step;
            let ranks: Vec<_> = devices
                .iter()
                .zip(members)
                .enumerate()
                .map(|(rank, (device, member))| scope.spawn(move || Rank::new(device, member, rank, step)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let graphs: Vec<Graph> = ranks
            .iter()
            .map(|rank| {
                let row_ends = rank.scratch.local_ends(&rank.stream, &rank.global_ends.as_view()).unwrap();
                let captured = Step { row_ends, ..rank.inputs.step(SHAPE) };
                Graph::capture(&rank.stream, |stream| {
                    rank.run(stream, &captured);
                    Ok(())
                })
                .unwrap()
            })
            .collect();
        for (round, ends) in ends.iter().chain(&ends[..2]).enumerate() {
            for rank in &ranks {
                rank.set_ends(ends);
                rank.qkv.copy_from(&rank.stream, &random(round as u64, ROWS * QKV, 2.0)).unwrap();
            }
            for (graph, rank) in graphs.iter().zip(&ranks) {
                graph.launch(&rank.stream).unwrap();
            }
            let now = DecodeStep { row_ends: ends.to_vec(), ..step.clone() };
            verify(&ranks, &now, &format!("round {round} on {:?}", devices[0]));
        }
    }
}

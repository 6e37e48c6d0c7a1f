//! One rank's share of a query step: some heads of every token, and the KV rows of the tokens that it owns.

use std::ops::Range;

use dsa_core::consts::{KV_LORA, NOPE, Q_HEAD, Q_LORA};
use dsa_core::layout::mla_rows::{QKV, QUERY};
use dsa_dcp::QueryMailbox;
use gpu::{Buffer, Device, Stream};
use kimi_decode::step_file::query::QueryFile;
use mla_query::{MlaCache, MlaError, MlaQuery, MlaShape, MlaStep, MlaWeights};

/// A rank's buffers and kernel.
pub struct Rank {
    pub stream: Stream,
    query: MlaQuery,
    weights: MlaWeights,
    _memory: [Buffer<u16>; 4],
    qkv: Buffer<u16>,
    slots: Buffer<i64>,
    q_scale_inv: Buffer<f32>,
    k_scale: Buffer<f32>,
    out: Buffer<u8>,
    q_c: Buffer<u16>,
    cache: Buffer<u8>,
    dropped: Buffer<u32>,
    tokens: usize,
    eps: f32,
    pages: usize,
}

/// What a rank computed.
pub struct RankAnswer {
    /// BF16 `[tokens, 1536]`.
    pub q_c: Vec<u16>,
    /// `[tokens, heads of the rank, 576]`, as bytes.
    pub query: Vec<u8>,
    /// `[pages, page_tokens, bytes]`
    pub cache: Vec<u8>,
    /// Slots past the cache.
    pub dropped: u32,
}

impl Rank {
    /// Uploads the step's weights of `heads`, its rows and `slots`, one per token, over a fresh cache.
    pub fn new(
        device: &Device,
        file: &QueryFile,
        shape: MlaShape,
        heads: Range<usize>,
        slots: &[i64],
    ) -> Result<Self, MlaError> {
        let tokens = slots.len();
        let stream = device.stream()?;
        let of = |values: &[u16], per_head: usize| device.upload(&values[heads.start * per_head..heads.end * per_head]);
        let memory = [
            device.upload(&file.w_qa)?,
            device.upload(&file.w_kva)?,
            of(&file.w_qb, Q_HEAD * Q_LORA)?,
            of(&file.w_uk, NOPE * KV_LORA)?,
        ];
        let [q_a, kv_a, q_b, uk] = memory.each_ref().map(Buffer::as_view);
        let cache = device.alloc::<u8>(file.pages * file.page_tokens * shape.form().entry_bytes())?;
        cache.fill_bytes(&stream, file.cache_fill)?;
        Ok(Rank {
            query: MlaQuery::new(device, shape)?,
            weights: MlaWeights::new(device, &shape, &q_a, &kv_a, &q_b, &uk)?,
            qkv: device.upload(&file.qkv[..tokens * QKV])?,
            slots: device.upload(slots)?,
            q_scale_inv: device.upload(&[file.q_scale_inv])?,
            k_scale: device.upload(&[if shape.is_k3() { 1.0 / file.k_scale } else { file.k_scale }])?,
            out: device.alloc(tokens * heads.len() * QUERY * shape.query_bytes())?,
            q_c: device.alloc(tokens * Q_LORA)?,
            dropped: device.alloc_zeros(1)?,
            _memory: memory,
            cache,
            tokens,
            eps: file.eps,
            pages: file.pages,
            stream,
        })
    }

    /// Launches the step.
    pub fn launch(&self, mailbox: Option<&QueryMailbox>) -> Result<(), MlaError> {
        self.launch_on(&self.stream, mailbox)
    }

    /// As [`launch`](Rank::launch) on another stream, which must come after what the rank's own stream has done.
    pub fn launch_on(&self, stream: &Stream, mailbox: Option<&QueryMailbox>) -> Result<(), MlaError> {
        self.query.launch(stream, &self.step(mailbox))
    }

    /// The kernel.
    pub fn query(&self) -> &MlaQuery {
        &self.query
    }

    /// The step.
    pub fn step<'a>(&'a self, mailbox: Option<&'a QueryMailbox>) -> MlaStep<'a> {
        let shape = self.query.shape();
        let (entry, page_tokens) = (shape.form().entry_bytes(), shape.page_tokens() as usize);
        MlaStep {
            tokens: self.tokens,
            qkv: self.qkv.as_view(),
            qkv_stride: QKV,
            slots: self.slots.as_view(),
            weights: &self.weights,
            q_scale_inv: shape.is_fp8().then(|| self.q_scale_inv.as_view()),
            k_scale: shape.takes_k_scale().then(|| self.k_scale.as_view()),
            eps: self.eps,
            query: self.out.as_view(),
            q_c: shape.store_qc().then(|| self.q_c.as_view()),
            cache: MlaCache {
                bytes: self.cache.as_view(),
                pages: self.pages,
                page_stride: page_tokens * entry,
                token_stride: entry,
            },
            mailbox,
            dropped: self.dropped.as_view(),
        }
    }

    /// What the last step left.
    pub fn answer(&self) -> Result<RankAnswer, MlaError> {
        Ok(RankAnswer {
            q_c: self.q_c.copy_to_vec(&self.stream)?,
            query: self.out.copy_to_vec(&self.stream)?,
            cache: self.cache.copy_to_vec(&self.stream)?,
            dropped: self.dropped.copy_to_vec(&self.stream)?.first().copied().unwrap_or(0),
        })
    }
}

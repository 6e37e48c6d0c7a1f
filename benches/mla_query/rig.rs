//! One case of the MLA query on a device: layers whose weights together exceed the L2, and the check of what was timed.

use std::fmt;

use dsa_core::consts::{KV_LORA, NOPE, Q_HEAD, Q_LORA};
use dsa_core::generate::SplitMix64;
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_core::layout::mla_rows::{QKV, QUERY};
use dsa_core::numerics::{bf16, e4m3};
use dsa_core::oracle::mla_query::{self as oracle, Approximate, QueryNorm};
use dsa_dcp::mailbox::layout::BOX;
use dsa_dcp::{Gather, GatherShape, GatherStep, Limits, MailboxShape, QueryMailbox};
use gpu::{Buffer, Device, Graph, Stream};
use mla_query::{MlaCache, MlaQuery, MlaShape, MlaStep, MlaWeights, Publication};

use crate::common::Result;

/// Weights of all layers together: several times an L2.
const WEIGHT_BYTES: usize = 240 << 20;
const EPS: f32 = 1e-5;
const PAGE_TOKENS: usize = 64;
/// Ranks that [`Variant::Publish`] publishes to.
const RANKS: usize = 8;

/// Which of the kernels that a shape may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// What the shape plans.
    Planned,
    /// Tokens one by one.
    Single,
    /// Tokens one by one, Q_B by `cp.async`.
    Threads,
    /// Tiles of so many tokens.
    Tiled(usize),
    /// What the shape plans, published to the mailboxes of [`RANKS`] ranks, all of them on this device.
    Publish,
    /// What the shape plans, published to this rank alone, then gathered.
    Gathered,
}

impl Variant {
    pub const ALL: [Variant; 5] =
        [Variant::Single, Variant::Threads, Variant::Tiled(16), Variant::Tiled(32), Variant::Tiled(64)];

    pub fn parse(text: &str) -> Result<Variant> {
        let all = || Variant::ALL.into_iter().chain([Variant::Planned, Variant::Publish, Variant::Gathered]);
        Ok(all().find(|variant| variant.to_string() == text).ok_or("no such variant")?)
    }

    fn shape(self, shape: MlaShape) -> Result<MlaShape> {
        Ok(match self {
            Variant::Planned => shape,
            Variant::Single => shape.with_tile(None)?,
            Variant::Threads => shape.with_tile(None)?.with_thread_copies(true)?,
            Variant::Tiled(tokens) => shape.with_tile(Some(tokens))?,
            Variant::Publish => publishing(shape, RANKS)?,
            Variant::Gathered => publishing(shape, 1)?,
        })
    }
}

/// `shape` as a rank of `ranks` publishes it.
fn publishing(shape: MlaShape, ranks: usize) -> Result<MlaShape> {
    let mailbox = MailboxShape::padded(ranks, shape.heads() as usize, shape.batch() as usize, shape.element())?;
    Ok(shape.with_publication(Publication { mailbox, multicast: false })?)
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Variant::Planned => f.write_str("planned"),
            Variant::Single => f.write_str("single"),
            Variant::Threads => f.write_str("threads"),
            Variant::Tiled(tokens) => write!(f, "tile{tokens}"),
            Variant::Publish => write!(f, "publish{RANKS}"),
            Variant::Gathered => f.write_str("gathered"),
        }
    }
}

/// What a case's answer is computed from.
struct Host {
    q_a: Vec<u16>,
    kv_a: Vec<u16>,
    q_b: Vec<u16>,
    uk: Vec<u16>,
    qkv: Vec<u16>,
}

/// The layers of one case on a device.
pub struct Rig {
    pub stream: Stream,
    pub shape: MlaShape,
    pub tokens: usize,
    query: MlaQuery,
    layers: Vec<(MlaWeights, [Buffer<u16>; 4])>,
    host: Host,
    qkv: Buffer<u16>,
    slots: Buffer<i64>,
    scale: Buffer<f32>,
    out: Buffer<u8>,
    q_c: Buffer<u16>,
    cache: Buffer<u8>,
    dropped: Buffer<u32>,
    /// Of every rank, this one's first; none without publishing.
    mailboxes: Vec<QueryMailbox>,
    gather: Option<(Gather, Buffer<u32>)>,
}

impl Rig {
    /// As many layers as exceed the L2, or `layers`.
    pub fn new(
        device: &Device,
        heads: usize,
        tokens: usize,
        form: MlaCacheForm,
        variant: Variant,
        layers: Option<usize>,
    ) -> Result<Rig> {
        let shape = variant.shape(MlaShape::new(heads, tokens, form, PAGE_TOKENS)?.with_qc(true))?;
        let mut rng = SplitMix64::new(1);
        let mut values = |n: usize, scale: f32| -> Vec<u16> {
            (0..n).map(|_| bf16::from_f32(scale * (rng.next_u64() as i64 as f32) * 2f32.powi(-63))).collect()
        };
        let host = Host {
            q_a: values(Q_LORA, 1.0),
            kv_a: values(KV_LORA, 1.0),
            q_b: values(heads * Q_HEAD * Q_LORA, 0.05),
            uk: values(heads * NOPE * KV_LORA, 0.1),
            qkv: values(tokens * QKV, 2.0),
        };
        let layers = layers.unwrap_or(WEIGHT_BYTES / (2 * (host.q_b.len() + host.uk.len())));
        let layers = (0..layers)
            .map(|_| {
                let [a, b, c, d] = [&host.q_a, &host.kv_a, &host.q_b, &host.uk].map(|w| device.upload(w));
                let memory = [a?, b?, c?, d?];
                let [q_a, kv_a, q_b, uk] = memory.each_ref().map(Buffer::as_view);
                Ok((MlaWeights::new(device, &shape, &q_a, &kv_a, &q_b, &uk)?, memory))
            })
            .collect::<Result<Vec<_>>>()?;
        let pages = tokens.div_ceil(PAGE_TOKENS);
        let mailbox = shape.publication().map(|publication| publication.mailbox);
        let gather = match mailbox {
            Some(mailbox) if variant == Variant::Gathered => {
                let gather = Gather::new(device, GatherShape::new(mailbox).with_copy(true))?;
                Some((gather, device.alloc(tokens * mailbox.token_bytes() / 4)?))
            }
            _ => None,
        };
        let mailboxes = match mailbox {
            Some(mailbox) => {
                QueryMailbox::in_process(&vec![device.clone(); mailbox.ranks()], mailbox, Limits::default())?
            }
            None => Vec::new(),
        };
        Ok(Rig {
            stream: device.stream()?,
            shape,
            tokens,
            query: MlaQuery::new(device, shape)?,
            layers,
            qkv: device.upload(&host.qkv)?,
            host,
            slots: device.upload(&(0..tokens as i64).collect::<Vec<_>>())?,
            scale: device.upload(&[1.0])?,
            out: device.alloc(tokens * heads * QUERY * 2)?,
            q_c: device.alloc(tokens * Q_LORA)?,
            cache: device.alloc(pages * PAGE_TOKENS * form.entry_bytes())?,
            dropped: device.alloc_zeros(1)?,
            mailboxes,
            gather,
        })
    }

    /// Launches of a graph.
    pub fn launches(&self) -> usize {
        self.layers.len()
    }

    fn step(&self, layer: usize) -> MlaStep<'_> {
        let entry = self.shape.form().entry_bytes();
        MlaStep {
            tokens: self.tokens,
            qkv: self.qkv.as_view(),
            qkv_stride: QKV,
            slots: self.slots.as_view(),
            weights: &self.layers[layer].0,
            q_scale_inv: self.shape.is_fp8().then(|| self.scale.as_view()),
            k_scale: self.shape.takes_k_scale().then(|| self.scale.as_view()),
            eps: EPS,
            query: self.out.as_view(),
            q_c: Some(self.q_c.as_view()),
            cache: MlaCache {
                bytes: self.cache.as_view(),
                pages: self.tokens.div_ceil(PAGE_TOKENS),
                page_stride: PAGE_TOKENS * entry,
                token_stride: entry,
            },
            mailbox: self.mailboxes.first(),
            dropped: self.dropped.as_view(),
        }
    }

    /// One launch against the oracle: every row of `q_c` to 1 ulp of its `rsqrt`, the first and last token's query, and
    /// that every slot lands.
    pub fn check(&self) -> Result<()> {
        self.out.fill_bytes(&self.stream, 0xFF)?;
        self.launch(&self.stream, 0)?;
        let norm = if self.shape.is_k3() { QueryNorm::K3 } else { QueryNorm::Dsa };
        let got = self.q_c.copy_to_vec(&self.stream)?;
        for (row, got) in self.host.qkv.chunks(QKV).zip(got.chunks(Q_LORA)) {
            let want = oracle::query_c(row, &self.host.q_a, EPS, norm, Approximate::exact());
            let near = got.iter().zip(&want).all(|(a, b)| a.abs_diff(*b) <= 1);
            if !near {
                return Err("q_c is not the oracle's".into());
            }
        }
        let Host { q_a, kv_a, q_b, uk, .. } = &self.host;
        let weights = oracle::MlaWeights { q_a, kv_a, q_b, uk };
        let (bytes, heads) = (self.shape.query_bytes(), self.shape.heads() as usize);
        let out = self.out.copy_to_vec(&self.stream)?;
        for token in [0, self.tokens - 1] {
            let q_c = &got[token * Q_LORA..][..Q_LORA];
            for head in [0, heads - 1] {
                let want: Vec<f32> = oracle::query_head(q_c, &weights, head).into_iter().map(bf16::to_f32).collect();
                let row = &out[(token * heads + head) * QUERY * bytes..][..QUERY * bytes];
                let got: Vec<f32> = match bytes {
                    1 => row.iter().map(|code| e4m3::to_f32(*code)).collect(),
                    _ => row.chunks(2).map(|b| bf16::to_f32(u16::from_le_bytes([b[0], b[1]]))).collect(),
                };
                let largest = want.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
                // Two BF16 ulp, or one E4M3 code.
                let ulps = if bytes == 1 { 1.0 / 8.0 } else { 1.0 / 64.0 };
                let near = |got: f32, want: f32| (got - want).abs() <= largest / 256.0 + want.abs() * ulps;
                if !got.iter().zip(&want).all(|(got, want)| near(*got, *want)) {
                    return Err(format!("token {token}, head {head}: the query is not the oracle's").into());
                }
            }
        }
        if let Some((_, gathered)) = &self.gather {
            let gathered = gathered.copy_to_vec(&self.stream)?;
            let gathered: Vec<u8> = gathered.iter().flat_map(|word| word.to_le_bytes()).collect();
            let (own, all) = (heads * QUERY * bytes, gathered.len() / self.tokens);
            if !out.chunks(own).zip(gathered.chunks(all)).take(self.tokens).all(|(out, rows)| *out == rows[..own]) {
                return Err("what was gathered is not what was published".into());
            }
        }
        if let Some(own) = self.mailboxes.first() {
            own.check(&self.stream)?;
            let index = own.state().copy_to_vec(&self.stream)?[BOX as usize] as usize;
            for (rank, mailbox) in self.mailboxes.iter().enumerate() {
                for (token, head) in [(0, 0), (0, heads - 1), (self.tokens - 1, 0), (self.tokens - 1, heads - 1)] {
                    let at = own.shape().row(index, token, 0, head) / 8;
                    let words = mailbox.memory().view(at..at + QUERY * bytes / 8)?.copy_to_vec(&self.stream)?;
                    let got: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                    if got != out[(token * heads + head) * QUERY * bytes..][..QUERY * bytes] {
                        return Err(format!("rank {rank} got another row of token {token}, head {head}").into());
                    }
                }
            }
        }
        match self.dropped.copy_to_vec(&self.stream)?[0] {
            0 => Ok(()),
            n => Err(format!("{n} slots were dropped").into()),
        }
    }

    fn launch(&self, stream: &Stream, layer: usize) -> Result<()> {
        self.query.launch(stream, &self.step(layer))?;
        if let (Some((gather, out)), [mailbox, ..]) = (&self.gather, &self.mailboxes[..]) {
            gather.launch(stream, mailbox, &GatherStep { tokens: self.tokens, out: Some(out.as_view()) })?;
        }
        Ok(())
    }

    pub fn graph(&self) -> Result<Graph> {
        Graph::capture_with(&self.stream, |stream| {
            (0..self.layers.len()).try_for_each(|layer| self.launch(stream, layer))
        })
    }
}

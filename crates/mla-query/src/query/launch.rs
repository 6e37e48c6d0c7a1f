//! The MLA query on a device.

use bytemuck::Pod;
use dsa_core::consts::{KV_LORA, NOPE, Q_HEAD, Q_LORA};
use dsa_core::layout::mla_entry::ALIGN;
use dsa_core::layout::mla_rows::{QKV, QUERY};
use dsa_dcp::QueryMailbox;
use dsa_dcp::mailbox::Publish;
use gpu::{Device, Function, L2Promotion, LaunchConfig, Stream, View};
use ptx::{DevicePtr, Kernel, Target, TensorMap};

use super::{MlaArgs, build, qb_map, uk_map};
use crate::error::MlaError;
use crate::plan::{check_strides, page_bytes, word};
use crate::shape::MlaShape;
use crate::tiled::{COPY_ROWS, Cut};

/// The weights of one layer on one rank, ready for a shape's copies. The memory must stay in place for as long as steps
/// are launched with them.
#[derive(Clone, Debug)]
pub struct MlaWeights {
    device: Device,
    q_a: DevicePtr<u32>,
    kv_a: DevicePtr<u32>,
    q_b: DevicePtr<u16>,
    /// Per [`COPY_ROWS`].
    q_b_maps: [TensorMap; COPY_ROWS.len()],
    uk: TensorMap,
    heads: u32,
    columns: u32,
    tiled: bool,
}

impl MlaWeights {
    /// BF16 `q_a` `[1536]`, `kv_a` `[512]`, `q_b` `[heads * 192, 1536]`, `uk` `[heads, 128, 512]`, each 16-byte aligned.
    ///
    /// # Errors
    /// A buffer that is short, misaligned or of another device.
    pub fn new(
        device: &Device,
        shape: &MlaShape,
        q_a: &View<'_, u16>,
        kv_a: &View<'_, u16>,
        q_b: &View<'_, u16>,
        uk: &View<'_, u16>,
    ) -> Result<Self, MlaError> {
        for view in [q_a, kv_a, q_b, uk] {
            device.expect_same("weights", view.device())?;
        }
        let heads = shape.heads() as usize;
        check("q_a norm weights", q_a, Q_LORA)?;
        check("kv_a norm weights", kv_a, KV_LORA)?;
        check("q_b weights", q_b, heads * Q_HEAD * Q_LORA)?;
        check("w_uk weights", uk, heads * NOPE * KV_LORA)?;
        let uk = device.tensor_map_with(&uk_map(uk.ptr(), shape)?, L2Promotion::B128)?;
        let q_b_map = |rows: u32| -> Result<TensorMap, MlaError> {
            Ok(device.tensor_map_with(&qb_map(q_b.ptr(), shape, rows)?, L2Promotion::B128)?)
        };
        let [whole, halves] = COPY_ROWS;
        Ok(MlaWeights {
            device: device.clone(),
            q_a: q_a.ptr_as(),
            kv_a: kv_a.ptr_as(),
            q_b: q_b.ptr(),
            q_b_maps: [q_b_map(whole)?, q_b_map(halves)?],
            uk,
            heads: shape.heads(),
            columns: shape.columns(),
            tiled: shape.is_tiled(),
        })
    }
}

impl MlaWeights {
    /// What the copies are cut for: heads, columns per CTA, tiled.
    fn cut(&self) -> (u32, u32, bool) {
        (self.heads, self.columns, self.tiled)
    }
}

/// A paged MLA cache.
#[derive(Clone, Debug)]
pub struct MlaCache<'a> {
    /// Its bytes from page 0 on, 16-byte aligned.
    pub bytes: View<'a, u8>,
    /// Number of pages.
    pub pages: usize,
    /// Bytes from one page to the next, a multiple of 16 that no page exceeds.
    pub page_stride: usize,
    /// Bytes from one token's entry to the next, a multiple of 16 of at least an entry.
    pub token_stride: usize,
}

/// The inputs and outputs of one step.
#[derive(Clone, Debug)]
pub struct MlaStep<'a> {
    /// Live tokens, at most the shape's batch.
    pub tokens: usize,
    /// BF16 `[tokens, 2112]`: q_a, kv_c, k_pe; 16-byte aligned.
    pub qkv: View<'a, u16>,
    /// Elements from one `qkv` row to the next, a multiple of 8 of at least 2112.
    pub qkv_stride: usize,
    /// int64 `[tokens]`: the cache slot of each token; negative ones are skipped.
    pub slots: View<'a, i64>,
    /// The layer's weights.
    pub weights: &'a MlaWeights,
    /// FP32 `[1]`, given exactly for an FP8 query.
    pub q_scale_inv: Option<View<'a, f32>>,
    /// FP32 `[1]`, given exactly for a per-tensor cache: the scale where the form divides, its inverse where it multiplies.
    pub k_scale: Option<View<'a, f32>>,
    /// Epsilon of both norms.
    pub eps: f32,
    /// `[tokens, heads, 576]` of BF16 or E4M3, as bytes, 16-byte aligned; output.
    pub query: View<'a, u8>,
    /// BF16 `[tokens, 1536]`, 16-byte aligned, given exactly if the shape stores it; output.
    pub q_c: Option<View<'a, u16>>,
    /// The cache; output.
    pub cache: MlaCache<'a>,
    /// The mailbox, given exactly if the shape publishes: collective, every rank launches the same calls with the same
    /// tokens.
    pub mailbox: Option<&'a QueryMailbox>,
    /// int32 `[1]`: the number of slots at or past the cache's capacity is added to it.
    pub dropped: View<'a, u32>,
}

/// The query kernel of one shape on one device.
#[derive(Clone)]
pub struct MlaQuery {
    function: Function<MlaArgs>,
    shape: MlaShape,
}

impl MlaQuery {
    /// Builds and compiles the kernel.
    ///
    /// # Errors
    /// A device whose architecture has no such kernel, or one that refuses it.
    pub fn new(device: &Device, shape: MlaShape) -> Result<Self, MlaError> {
        let target = device.target()?;
        if target != Target::Sm90a {
            return Err(MlaError::UnsupportedTarget { target });
        }
        Self::from_kernel(device, shape, &build(&shape, target)?)
    }

    /// As [`MlaQuery::new`] with a kernel for `shape` that the caller built or rewrote.
    ///
    /// # Errors
    /// A device that refuses it.
    pub fn from_kernel(device: &Device, shape: MlaShape, kernel: &Kernel<MlaArgs>) -> Result<Self, MlaError> {
        Ok(MlaQuery { function: device.load(kernel)?, shape })
    }

    /// What it is specialised for.
    pub fn shape(&self) -> MlaShape {
        self.shape
    }

    /// The compiled kernel.
    pub fn function(&self) -> &Function<MlaArgs> {
        &self.function
    }

    /// Launches a step. Overlaps its predecessor in the stream as far as dependent launches allow: weights must not be
    /// written by it.
    ///
    /// # Errors
    /// Sizes that disagree, before anything is launched; a launch that the device refuses.
    pub fn launch(&self, stream: &Stream, step: &MlaStep<'_>) -> Result<(), MlaError> {
        let args = self.args(step)?;
        if step.tokens == 0 {
            return Ok(());
        }
        let config = LaunchConfig::grid(self.shape.grid(step.tokens)).overlap(true);
        Ok(self.function.launch(stream, config, &args)?)
    }

    /// Whether [`launch`](MlaQuery::launch) takes a step, for a caller that launches other things first.
    ///
    /// # Errors
    /// Sizes that disagree.
    pub fn check(&self, step: &MlaStep<'_>) -> Result<(), MlaError> {
        self.args(step).map(drop)
    }

    /// A checked step as the kernel takes it.
    fn args(&self, step: &MlaStep<'_>) -> Result<MlaArgs, MlaError> {
        let shape = &self.shape;
        let (tokens, heads) = (step.tokens, shape.heads() as usize);
        if tokens > shape.batch() as usize {
            return Err(MlaError::BatchOutOfRange { batch: tokens });
        }
        let (found, needed) = (step.weights.cut(), (shape.heads(), shape.columns(), shape.is_tiled()));
        if found != needed {
            let text = |(heads, columns, tiled): (u32, u32, bool)| {
                format!("{heads} heads, {columns} columns per CTA{}", if tiled { ", tiled" } else { "" })
            };
            return Err(MlaError::WrongWeights { found: text(found), needed: text(needed) });
        }
        self.check_devices(step)?;
        check_strides(shape, step.qkv_stride, step.cache.page_stride, step.cache.token_stride)?;
        let qkv = tokens.checked_sub(1).map_or(0, |rows| rows * step.qkv_stride + QKV);
        check("qkv", &step.qkv, qkv)?;
        check("slots", &step.slots, tokens)?;
        check("query", &step.query, tokens * heads * QUERY * shape.query_bytes())?;
        check("dropped", &step.dropped, 1)?;
        let q_scale_inv = self.scalar("q_scale_inv", &step.q_scale_inv, shape.is_fp8())?;
        let k_scale = self.scalar("k_scale", &step.k_scale, shape.takes_k_scale())?;
        self.present("q_c", step.q_c.is_some(), shape.store_qc())?;
        if let Some(q_c) = &step.q_c {
            check("q_c", q_c, tokens * Q_LORA)?;
        }
        let capacity = self.check_cache(&step.cache)?;
        let publish = self.check_mailbox(step.mailbox)?;
        Ok(MlaArgs {
            query: step.query.ptr(),
            q_c: step.q_c.as_ref().map_or(DevicePtr::NULL, View::ptr_as),
            cache: step.cache.bytes.ptr(),
            dropped: step.dropped.ptr(),
            qkv: step.qkv.ptr(),
            w_qa: step.weights.q_a,
            w_kva: step.weights.kv_a,
            w_qb: step.weights.q_b,
            w_qb_map: step.weights.q_b_maps[Cut::of(shape.tokens()).copy()],
            w_uk: step.weights.uk,
            slots: step.slots.ptr(),
            q_scale_inv,
            k_scale,
            boxes: publish.as_ref().map_or(DevicePtr::NULL, |to| to.boxes.ptr_as()),
            peers: publish.as_ref().map_or(DevicePtr::NULL, |to| to.peers.ptr_as()),
            multicast: publish.as_ref().and_then(|to| to.multicast).unwrap_or(0),
            call: publish.as_ref().map_or(DevicePtr::NULL, |to| to.state.ptr()),
            status: publish.as_ref().map_or(DevicePtr::NULL, |to| to.status.ptr()),
            rank: publish.as_ref().map_or(0, |to| to.rank as u32),
            capacity,
            page_stride: step.cache.page_stride as u64,
            token_stride: word("token stride of the cache in bytes", step.cache.token_stride)?,
            // The kernel forms its bytes in 32 bits.
            qkv_stride: word("row stride of qkv in bytes", 2 * step.qkv_stride)? / 2,
            tokens: tokens as u32,
            heads: shape.heads(),
            eps: step.eps,
        })
    }

    /// Everything lies on the kernel's device.
    fn check_devices(&self, step: &MlaStep<'_>) -> Result<(), MlaError> {
        let own = self.function.device();
        let scalars = [("q_scale_inv", &step.q_scale_inv), ("k_scale", &step.k_scale)];
        for (what, device) in [
            ("qkv", Some(step.qkv.device())),
            ("slots", Some(step.slots.device())),
            ("weights", Some(&step.weights.device)),
            ("query", Some(step.query.device())),
            ("q_c", step.q_c.as_ref().map(View::device)),
            ("cache", Some(step.cache.bytes.device())),
            ("mailbox", step.mailbox.map(QueryMailbox::device)),
            ("dropped", Some(step.dropped.device())),
        ]
        .into_iter()
        .chain(scalars.map(|(what, view)| (what, view.as_ref().map(View::device))))
        {
            if let Some(device) = device {
                own.expect_same(what, device)?;
            }
        }
        Ok(())
    }

    /// What the kernel publishes with.
    fn check_mailbox<'a>(&self, mailbox: Option<&'a QueryMailbox>) -> Result<Option<Publish<'a>>, MlaError> {
        self.present("mailbox", mailbox.is_some(), self.shape.publication().is_some())?;
        let (Some(mailbox), Some(publication)) = (mailbox, self.shape.publication()) else { return Ok(None) };
        if mailbox.shape() != publication.mailbox {
            let (kernel, mailbox) = (publication.mailbox.to_string(), mailbox.shape().to_string());
            return Err(MlaError::WrongMailbox { kernel, mailbox });
        }
        if publication.multicast && !mailbox.has_multicast() {
            return Err(MlaError::NoMulticast);
        }
        Ok(Some(mailbox.publish()))
    }

    fn present(&self, buffer: &'static str, given: bool, needed: bool) -> Result<(), MlaError> {
        if given == needed { Ok(()) } else { Err(MlaError::Presence { buffer, given, shape: self.shape.name() }) }
    }

    fn scalar(
        &self,
        buffer: &'static str,
        view: &Option<View<'_, f32>>,
        needed: bool,
    ) -> Result<DevicePtr<f32>, MlaError> {
        self.present(buffer, view.is_some(), needed)?;
        match view {
            None => Ok(DevicePtr::NULL),
            Some(view) if view.is_empty() => Err(MlaError::BufferTooShort { buffer, found: 0, needed: 1 }),
            Some(view) => Ok(view.ptr()),
        }
    }

    /// Entries that the cache holds.
    fn check_cache(&self, cache: &MlaCache<'_>) -> Result<u64, MlaError> {
        let page = page_bytes(&self.shape, cache.token_stride);
        let needed = match cache.pages {
            0 => 0,
            n => (n - 1).saturating_mul(cache.page_stride).saturating_add(page),
        };
        check("cache", &cache.bytes, needed)?;
        Ok(cache.pages as u64 * u64::from(self.shape.page_tokens()))
    }
}

/// Checks that a buffer has `needed` elements and starts where 16-byte accesses may, or at its element.
fn check<T: Pod>(buffer: &'static str, view: &View<'_, T>, needed: usize) -> Result<(), MlaError> {
    if view.len() < needed {
        return Err(MlaError::BufferTooShort { buffer, found: view.len(), needed });
    }
    // Slots and counts are read one by one.
    let align = if size_of::<T>() >= 4 { size_of::<T>() } else { ALIGN } as u64;
    let address = view.ptr().address();
    if address.is_multiple_of(align) { Ok(()) } else { Err(MlaError::Misaligned { buffer, address, align }) }
}

//! What a query kernel is specialised for, and how its work is cut.

use dsa_core::consts::{KV_LORA, MLA_HEADS_MAX, NOPE, Q_HEAD, REQUESTS_MAX};
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_dcp::{MailboxShape, QueryElement};

use crate::error::MlaError;

/// Most tokens of a page.
pub const PAGE_TOKENS_MAX: usize = 1 << 20;
/// Most tokens that one cluster multiplies one by one, in as many accumulators; more go to the tensor core in tiles.
pub const TOKENS_MAX: u32 = 8;
/// Tokens per cluster that the tensor core takes.
pub const TILES: [u32; 3] = [16, 32, 64];
/// Up to this many heads take clusters of 16, of which an H200 surely runs 7 at once; more heads fill the device with
/// clusters of 8.
const HEADS_WIDE_CLUSTER: u32 = 7;

/// Where a kernel publishes its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Publication {
    /// The mailbox.
    pub mailbox: MailboxShape,
    /// Through the mailbox's multicast address, else by a store per rank.
    pub multicast: bool,
}

/// A validated specialisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlaShape {
    heads: u32,
    batch: u32,
    form: MlaCacheForm,
    page_tokens: u32,
    store_qc: bool,
    hold: bool,
    late: bool,
    publication: Option<Publication>,
    tile: Option<u32>,
    thread_copies: bool,
}

/// Batches from this many tokens on are faster in tiles.
const TILED_FROM: u32 = 4;
/// Clusters of 8 CTAs that an H200 runs at once with a multiprocessor for each CTA.
const CLUSTERS: u32 = 15;

/// What was measured to be fastest: the smallest tiles whose clusters all run at once, each CTA on a multiprocessor of its own;
/// of tiles that cannot, the fewest.
fn best_tile(heads: u32, batch: u32) -> Option<u32> {
    if batch < TILED_FROM {
        return None;
    }
    let one_wave = TILES.into_iter().find(|tile| heads * batch.div_ceil(*tile) <= CLUSTERS);
    one_wave.or_else(|| TILES.into_iter().find(|tile| batch <= *tile)).or(Some(TILES[2]))
}

impl MlaShape {
    /// Up to `batch` tokens of `heads` heads, into a cache of `form` in pages of `page_tokens` tokens.
    ///
    /// The form also decides the query: BF16 beside `fp8_ds_mla`, E4M3 beside the others; and the query's norm: K3's
    /// beside the multiplying per-tensor form, else DSA's.
    ///
    /// # Errors
    /// Heads outside 1..=96, a batch outside 1..=1024, a page outside 1..=2^20 tokens.
    pub fn new(heads: usize, batch: usize, form: MlaCacheForm, page_tokens: usize) -> Result<Self, MlaError> {
        if !(1..=MLA_HEADS_MAX).contains(&heads) {
            return Err(MlaError::HeadsOutOfRange { heads });
        }
        if !(1..=REQUESTS_MAX).contains(&batch) {
            return Err(MlaError::BatchOutOfRange { batch });
        }
        if !(1..=PAGE_TOKENS_MAX).contains(&page_tokens) {
            return Err(MlaError::PageOutOfRange { page_tokens });
        }
        Ok(MlaShape {
            heads: heads as u32,
            batch: batch as u32,
            form,
            page_tokens: page_tokens as u32,
            store_qc: false,
            hold: false,
            late: false,
            publication: None,
            tile: best_tile(heads as u32, batch as u32),
            thread_copies: false,
        })
    }

    /// Also stores the normalised compressed query, which the indexer's projection reads.
    pub fn with_qc(mut self, store_qc: bool) -> Self {
        self.store_qc = store_qc;
        self
    }

    /// Does not let the next kernel start before this one has ended, for one that reads the outputs without waiting.
    pub fn with_hold(mut self, hold: bool) -> Self {
        self.hold = hold;
        self
    }

    /// Runs beside the kernel before it in the stream, of whose outputs it reads nothing, and waits for it only at the
    /// end: launched after the last kernel of the indexer, it fills the multiprocessors that this one leaves. Rows and slots
    /// must be complete before that kernel lets its dependents start; every kernel here waits for its own predecessors
    /// first, so any kernel between the one that writes them and this one is enough.
    ///
    /// # Errors
    /// K3's form, whose step has no indexer.
    pub fn with_late(mut self, late: bool) -> Result<Self, MlaError> {
        if late && self.is_k3() {
            return Err(MlaError::LateUnsupported { form: self.form });
        }
        if late && self.publication.is_some() {
            return Err(MlaError::LatePublication);
        }
        self.late = late;
        Ok(self)
    }

    /// Also publishes every row in the mailboxes of all ranks.
    ///
    /// # Errors
    /// A mailbox of other heads per rank, of another element, or of fewer tokens; a late kernel.
    pub fn with_publication(mut self, publication: Publication) -> Result<Self, MlaError> {
        let mailbox = publication.mailbox;
        let fits = (mailbox.heads(), mailbox.element()) == (self.heads as usize, self.element())
            && mailbox.tokens() >= self.batch as usize;
        if !fits {
            return Err(MlaError::MailboxUnsupported { mailbox: mailbox.to_string(), shape: self.name() });
        }
        if self.late {
            return Err(MlaError::LatePublication);
        }
        self.publication = Some(publication);
        Ok(self)
    }

    /// With tiles of so many tokens, or `None` for tokens one by one, instead of what was measured to be fastest.
    ///
    /// # Errors
    /// A tile other than 16, 32 and 64; one by one for more than 8 tokens, or with copies by threads in tiles.
    pub fn with_tile(self, tile: Option<usize>) -> Result<Self, MlaError> {
        let tile = match tile {
            None if self.batch <= TOKENS_MAX => None,
            Some(n) if TILES.iter().any(|tile| *tile as usize == n) => Some(n as u32),
            _ => return Err(MlaError::TileUnsupported { tile, batch: self.batch as usize }),
        };
        MlaShape { tile, ..self }.with_thread_copies(self.thread_copies)
    }

    /// Loads Q_B by `cp.async` of all threads instead of one bulk copy.
    ///
    /// # Errors
    /// A tiled shape, whose Q_B needs the swizzle of tensor copies.
    pub fn with_thread_copies(mut self, thread_copies: bool) -> Result<Self, MlaError> {
        match self.tile {
            Some(tile) if thread_copies => Err(MlaError::ThreadCopiesUnsupported { tile: tile as usize }),
            _ => {
                self.thread_copies = thread_copies;
                Ok(self)
            }
        }
    }

    /// Heads of the rank.
    pub fn heads(&self) -> u32 {
        self.heads
    }

    /// Most tokens of a step.
    pub fn batch(&self) -> u32 {
        self.batch
    }

    /// What the cache holds.
    pub fn form(&self) -> MlaCacheForm {
        self.form
    }

    /// Tokens per page.
    pub fn page_tokens(&self) -> u32 {
        self.page_tokens
    }

    /// Whether the normalised compressed query is stored.
    pub fn store_qc(&self) -> bool {
        self.store_qc
    }

    /// Whether the next kernel is held back.
    pub fn hold(&self) -> bool {
        self.hold
    }

    /// Whether it runs beside its predecessor.
    pub fn late(&self) -> bool {
        self.late
    }

    /// Where rows are published.
    pub fn publication(&self) -> Option<Publication> {
        self.publication
    }

    /// Whether the query is E4M3, else BF16.
    pub fn is_fp8(&self) -> bool {
        self.form != MlaCacheForm::Fp8Ds
    }

    /// The query's element, as a mailbox has it.
    pub fn element(&self) -> QueryElement {
        if self.is_fp8() { QueryElement::E4m3 } else { QueryElement::Bf16 }
    }

    /// Bytes of one query element.
    pub fn query_bytes(&self) -> usize {
        self.element().bytes()
    }

    /// Whether the cache form takes a per-tensor scale.
    pub fn takes_k_scale(&self) -> bool {
        matches!(self.form, MlaCacheForm::Fp8Divide | MlaCacheForm::Fp8Multiply)
    }

    /// Whether the query's norm is K3's, else DSA's.
    pub fn is_k3(&self) -> bool {
        self.form == MlaCacheForm::Fp8Multiply
    }

    /// CTAs of a cluster, which share one head.
    pub fn cluster(&self) -> u32 {
        if self.heads <= HEADS_WIDE_CLUSTER && !self.is_tiled() { 16 } else { 8 }
    }

    /// Q_B rows of one CTA.
    pub fn rows(&self) -> u32 {
        Q_HEAD as u32 / self.cluster()
    }

    /// Latent columns of one CTA.
    pub fn columns(&self) -> u32 {
        KV_LORA as u32 / self.cluster()
    }

    /// Whether tokens are tiled for the tensor core, else multiplied one by one.
    pub fn is_tiled(&self) -> bool {
        self.tile.is_some()
    }

    /// Whether Q_B is loaded by all threads.
    pub fn thread_copies(&self) -> bool {
        self.thread_copies
    }

    /// Tokens of one cluster.
    pub fn tokens(&self) -> u32 {
        self.tile.unwrap_or(self.batch)
    }

    /// The grid for `tokens` live tokens: parts of a head, heads, groups of tokens.
    pub fn grid(&self, tokens: usize) -> [u32; 3] {
        [self.cluster(), self.heads, (tokens as u32).div_ceil(self.tokens())]
    }

    /// Entry name. Heads and batch show only in the sizes that they lead to.
    pub fn name(&self) -> String {
        let form = match self.form {
            MlaCacheForm::Fp8Ds => "fp8ds",
            MlaCacheForm::Fp8Divide => "fp8div",
            MlaCacheForm::Fp8Multiply => "fp8mul",
            MlaCacheForm::Nvfp4Ds => "nvfp4",
        };
        let flag = |set: bool, name: &str| if set { format!("_{name}") } else { String::new() };
        format!(
            "mla_query_{}_t{}_{form}_page{}{}{}{}{}{}",
            if self.is_tiled() { "tiled".into() } else { format!("c{}", self.cluster()) },
            self.tokens(),
            self.page_tokens,
            flag(self.store_qc, "qc"),
            flag(self.hold, "hold"),
            flag(self.late, "late"),
            flag(self.thread_copies, "threads"),
            self.publication.map_or(String::new(), |to| {
                let (mailbox, how) = (to.mailbox, if to.multicast { "multicast" } else { "publish" });
                format!("_{how}{}x{}of{}", mailbox.ranks(), mailbox.heads(), mailbox.q_heads())
            })
        )
    }

    /// How the work is cut, in words, and why.
    pub fn plan(&self) -> String {
        let (cluster, tokens) = (self.cluster(), self.tokens());
        let why_cluster = match (cluster, self.is_tiled()) {
            (16, _) => "few heads",
            (_, true) if tokens == TILES[2] => "a quarter of the columns for half of the rows each",
            (_, true) => "an eighth of the columns each",
            _ => "enough heads",
        };
        let why_tokens = match self.tile {
            None => "the whole batch reads the weights once, FP32 FMAs",
            Some(tile) if self.batch <= tile => "the whole batch in one tile, tensor core",
            Some(_) => "tiles that each read the weights, tensor core",
        };
        format!(
            "clusters of {cluster} CTAs, one head each ({why_cluster}), tokens per cluster: {tokens} ({why_tokens})"
        )
    }
}

const _: () = assert!(Q_HEAD.is_multiple_of(16 * 4) && NOPE.is_multiple_of(4), "rows move by four");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::query::cost;

    fn shape(heads: usize, batch: usize, form: MlaCacheForm) -> MlaShape {
        MlaShape::new(heads, batch, form, 64).unwrap()
    }

    #[test]
    fn deployed_shapes_fill_one_wave() {
        for (heads, batch) in [(6, 1), (12, 1), (12, 8)] {
            let [x, y, z] = shape(heads, batch, MlaCacheForm::Fp8Ds).grid(batch);
            assert_eq!(x * y * z, 96, "{heads} heads, {batch} tokens");
        }
        for (heads, batch) in [(12, 9), (12, 32), (12, 64), (6, 32), (6, 64), (6, 128)] {
            let [x, y, z] = shape(heads, batch, MlaCacheForm::Fp8Ds).grid(batch);
            assert_eq!(x * y * z, 96, "{heads} heads, {batch} tokens");
        }
        assert_eq!(shape(6, 64, MlaCacheForm::Fp8Ds).grid(32), [8, 6, 1], "fewer live tokens");
    }

    #[test]
    fn every_head_count_cuts_evenly() {
        for heads in 1..=MLA_HEADS_MAX {
            let s = shape(heads, 2, MlaCacheForm::Nvfp4Ds);
            assert_eq!(s.rows() * s.cluster(), 192);
            assert_eq!(s.columns() * s.cluster(), 512);
            assert!(s.plan().contains(&format!("clusters of {}", s.cluster())));
        }
    }

    #[test]
    fn the_form_decides_query_norm_and_scales() {
        let of = |form| {
            let s = shape(1, 1, form);
            (s.query_bytes(), s.is_k3(), s.takes_k_scale())
        };
        assert_eq!(of(MlaCacheForm::Fp8Ds), (2, false, false));
        assert_eq!(of(MlaCacheForm::Fp8Divide), (1, false, true));
        assert_eq!(of(MlaCacheForm::Fp8Multiply), (1, true, true));
        assert_eq!(of(MlaCacheForm::Nvfp4Ds), (1, false, false));
    }

    #[test]
    fn names_say_what_differs() {
        let s = shape(6, 8, MlaCacheForm::Fp8Ds).with_tile(None).unwrap();
        assert_eq!(s.name(), "mla_query_c16_t8_fp8ds_page64");
        let full = s.with_qc(true).with_hold(true).with_late(true).unwrap();
        assert_eq!(full.name(), "mla_query_c16_t8_fp8ds_page64_qc_hold_late");
        let threads = s.with_thread_copies(true).unwrap();
        assert_eq!(threads.name(), "mla_query_c16_t8_fp8ds_page64_threads");
        assert_eq!(s.with_tile(Some(32)).unwrap().name(), "mla_query_tiled_t32_fp8ds_page64");
    }

    #[test]
    fn cost_counts_weights_once_and_rows_per_token() {
        let s = shape(6, 8, MlaCacheForm::Fp8Ds).with_qc(true);
        let weights = 2 * (6 * (192 * 1536 + 128 * 512) + 1536 + 512);
        let token = 4224 + 8 + 6 * 1152 + 3072 + 656;
        assert_eq!(cost(&s, 3).hbm_bytes, weights + 3 * token);
        assert_eq!(cost(&s, 3).flops, 2 * 3 * 6 * (192 * 1536 + 128 * 512));
        let nvfp4 = shape(12, 1, MlaCacheForm::Nvfp4Ds);
        assert_eq!(cost(&nvfp4, 1).hbm_bytes - cost(&nvfp4, 0).hbm_bytes, 4224 + 8 + 12 * 576 + 352);
    }
}

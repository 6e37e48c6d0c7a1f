//! Every supported specialisation of every kernel.

use dsa_core::Ownership;
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_dcp::local_ends;
use dsa_dcp::mailbox::gather;
use dsa_dcp::merge::{self, MergeShape};
use dsa_dcp::{ExchangeShape, GatherShape, MailboxShape, QueryElement};
use dsa_kernels::local_topk::{self, LocalTopkShape};
use dsa_kernels::score::{self, ScoreShape};
use dsa_kernels::select::{self, SelectShape};
use mla_query::shape::TILES;
use mla_query::{MlaShape, Publication, query};
use ptx::{KernelIr, Target};

/// The top-k values that deployments use, and the largest.
const TOPKS: [u32; 4] = [512, 1024, 2048, 4096];

/// One specialisation: what the host sees and the text that the driver gets.
pub struct Specialisation {
    pub ir: std::sync::Arc<KernelIr>,
    pub text: String,
}

/// Every supported specialisation of every kernel.
pub fn specialisations() -> Vec<Specialisation> {
    let mut all = Vec::new();
    let alone = ScoreShape::all(&[2048]).into_iter().map(|shape| shape.with_alone(true));
    for shape in ScoreShape::all(&TOPKS).into_iter().chain(alone) {
        let kernel = score::build(&shape, Target::Sm90a).unwrap();
        all.push(Specialisation { ir: kernel.ir().clone(), text: kernel.ptx() });
    }
    for shape in select_shapes() {
        let kernel = select::build(&shape, Target::Sm90a).unwrap();
        all.push(Specialisation { ir: kernel.ir().clone(), text: kernel.ptx() });
    }
    for shape in local_topk_shapes() {
        let kernel = local_topk::build(&shape, Target::Sm90a).unwrap();
        all.push(Specialisation { ir: kernel.ir().clone(), text: kernel.ptx() });
    }
    for shape in merge_shapes() {
        let kernel = merge::build(&shape, Target::Sm90a).unwrap();
        all.push(Specialisation { ir: kernel.ir().clone(), text: kernel.ptx() });
    }
    for (ranks, interleave) in [(1, 1), (3, 64), (8, 1), (16, 4)] {
        let kernel = local_ends::build(Ownership::new(ranks, interleave).unwrap(), Target::Sm90a).unwrap();
        all.push(Specialisation { ir: kernel.ir().clone(), text: kernel.ptx() });
    }
    for shape in gather_shapes() {
        let kernel = gather::build(&shape, Target::Sm90a).unwrap();
        all.push(Specialisation { ir: kernel.ir().clone(), text: kernel.ptx() });
    }
    for shape in mla_shapes().into_iter().chain(publishing_shapes()) {
        let kernel = query::build(&shape, Target::Sm90a).unwrap();
        all.push(Specialisation { ir: kernel.ir().clone(), text: kernel.ptx() });
    }
    all
}

/// Both cluster sizes, every number of tokens per cluster and every tile, and every form, page and flag with some of them.
fn mla_shapes() -> Vec<MlaShape> {
    let shape = |heads, batch, form, page| MlaShape::new(heads, batch, form, page).unwrap();
    let single = |heads, batch, form, page| shape(heads, batch, form, page).with_tile(None).unwrap();
    let mut shapes = Vec::new();
    for heads in [6, 12] {
        shapes.extend((1..=8).map(|batch| single(heads, batch, MlaCacheForm::Fp8Ds, 64).with_qc(true)));
        for (form, batch) in MlaCacheForm::ALL.into_iter().flat_map(|form| [1, 3, 8].map(|batch| (form, batch))) {
            shapes.push(single(heads, batch, form, 64));
            shapes.push(single(heads, batch, form, 1).with_qc(true).with_hold(true));
            shapes.push(single(heads, batch, form, 64).with_thread_copies(true).unwrap());
        }
        shapes.push(single(heads, 4, MlaCacheForm::Nvfp4Ds, 65).with_hold(true));
    }
    for (form, tile) in MlaCacheForm::ALL.into_iter().flat_map(|form| TILES.map(|tile| (form, tile as usize))) {
        let tiled = |page| shape(12, 64, form, page).with_tile(Some(tile)).unwrap();
        shapes.extend([tiled(64), tiled(64).with_qc(true), tiled(65), tiled(1).with_qc(true).with_hold(true)]);
    }
    let late = shapes.iter().filter_map(|shape| shape.with_late(true).ok()).collect::<Vec<_>>();
    shapes.extend(late);
    shapes
}

/// A mailbox of the deployed heads per rank.
fn mailbox(ranks: usize, heads: usize, element: QueryElement) -> MailboxShape {
    MailboxShape::new(ranks, heads, if ranks * heads <= 64 { 64 } else { 128 }, 128, element).unwrap()
}

/// Both cluster sizes, both tiles and a single token, each element, by a store per rank and by multicast.
fn publishing_shapes() -> Vec<MlaShape> {
    let mut shapes = Vec::new();
    for (heads, batch, ranks) in [6, 12]
        .into_iter()
        .flat_map(|heads| [1, 8, 9, 17, 64].map(|batch| (heads, batch)))
        .flat_map(|(heads, batch)| [(heads, batch, 2), (heads, batch, 8)])
    {
        for (form, element) in [(MlaCacheForm::Fp8Ds, QueryElement::Bf16), (MlaCacheForm::Nvfp4Ds, QueryElement::E4m3)]
        {
            let plain = MlaShape::new(heads, batch, form, 64).unwrap().with_qc(batch == 8);
            for multicast in [false, true] {
                let mailbox = mailbox(ranks, heads, element);
                shapes.push(plain.with_publication(Publication { mailbox, multicast }).unwrap());
            }
        }
    }
    let (one, most) = (mailbox(16, 1, QueryElement::Bf16), mailbox(16, 8, QueryElement::Bf16));
    for (heads, mailbox) in [(1, one), (8, most)] {
        let plain = MlaShape::new(heads, 8, MlaCacheForm::Fp8Ds, 64).unwrap().with_hold(true);
        shapes.push(plain.with_publication(Publication { mailbox, multicast: false }).unwrap());
    }
    shapes
}

/// Every flag and element of the deployed mailboxes.
fn gather_shapes() -> Vec<GatherShape> {
    let mailboxes = [(1, 1), (2, 6), (8, 6), (8, 12), (16, 8)].into_iter().flat_map(|(ranks, heads)| {
        [QueryElement::Bf16, QueryElement::E4m3].map(|element| mailbox(ranks, heads, element))
    });
    let flags = [(false, false), (false, true), (true, false), (true, true)];
    mailboxes
        .flat_map(|mailbox| flags.map(|(copy, hold)| GatherShape::new(mailbox).with_copy(copy).with_hold(hold)))
        .collect()
}

/// Every N with the deployed number of ranks, and every form of the deployed ones.
fn local_topk_shapes() -> Vec<LocalTopkShape> {
    let shape = |n| LocalTopkShape::new(n, 4096).unwrap();
    let mut shapes: Vec<_> = (128..4096).step_by(128).map(|n| shape(n).with_push(8).unwrap()).collect();
    shapes.extend(TOPKS.map(|topk| LocalTopkShape::full(topk as usize).unwrap()));
    for n in [128, 256, 512] {
        shapes.extend([1, 2, 3, 4, 16].map(|ranks| shape(n).with_push(ranks).unwrap()));
        shapes.extend([shape(n), shape(n).with_push(8).unwrap().with_foreign_logits(true)]);
    }
    // Several CTAs a row.
    for cluster in [2, 4, 8] {
        for n in [128, 256, 384, 512, 1024, 2048, 4096] {
            let quiet = LocalTopkShape::full(n).unwrap().with_cluster(cluster).unwrap();
            let foreign = quiet.with_push(3).unwrap().with_foreign_logits(true);
            shapes.extend([quiet, quiet.with_push(8).unwrap(), foreign]);
        }
    }
    shapes
}

fn merge_shapes() -> Vec<MergeShape> {
    let shape = |ranks, interleave, n, topk, q, page| {
        let own = Ownership::new(ranks, interleave).unwrap();
        let context = (ranks << 17).min(1 << 20);
        MergeShape::new(ExchangeShape::new(own, 8, n, topk, context).unwrap(), q, page).unwrap()
    };
    let mut shapes = Vec::new();
    for ranks in [1, 2, 3, 4, 7, 8, 16] {
        for (n, topk) in [(128, 512), (256, 1024), (256, 2048), (512, 2048), (512, 4096)] {
            shapes.extend([1, 64].map(|interleave| shape(ranks, interleave, n, topk, 1, 64)));
        }
    }
    for flags in 1..8 {
        let (ids, hold, foreign) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
        shapes.push(shape(8, 1, 512, 2048, 4, 1).with_ids(ids).with_hold(hold).with_foreign_logits(foreign));
    }
    for (ranks, n, topk) in [(2, 512, 2048), (8, 256, 2048), (16, 512, 4096), (3, 128, 512)] {
        shapes.push(shape(ranks, 1, n, topk, 1, 64).with_gathered(true));
    }
    let every_flag = shape(8, 1, 512, 2048, 4, 1).with_ids(true).with_hold(true).with_foreign_logits(true);
    shapes.push(every_flag.with_gathered(true));
    // Every other top-k.
    let others = (256..4096).step_by(256).filter(|topk| !TOPKS.contains(&(*topk as u32)));
    shapes.extend(others.map(|topk| shape(4, 4, topk - 128, topk, 8, 256)));
    shapes
}

fn select_shapes() -> Vec<SelectShape> {
    let shape = |topk, page| SelectShape::new(topk, page).unwrap();
    let mut shapes = Vec::new();
    for topk in TOPKS.map(|topk| topk as usize) {
        shapes.extend([1, 16, 32, 64, 128, 256, 1 << 20].map(|page| shape(topk, page)));
        for flags in 1..8 {
            let (ids, hold, foreign) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
            shapes.push(shape(topk, 64).with_ids(ids).with_hold(hold).with_foreign_logits(foreign));
        }
    }
    // Every other top-k, and every flag at once.
    let others = (128..=4096).step_by(128).filter(|topk| !TOPKS.contains(&(*topk as u32)));
    shapes.extend(others.map(|topk| shape(topk, 64).with_ids(true).with_foreign_logits(true)));
    // Several CTAs a row.
    for cluster in [2, 4, 8] {
        for topk in [128, 512, 1024, 2048, 4096] {
            let every_flag = shape(topk, 16).with_ids(true).with_hold(true).with_foreign_logits(true);
            shapes.extend([shape(topk, 64), every_flag].map(|shape| shape.with_cluster(cluster).unwrap()));
        }
    }
    shapes
}

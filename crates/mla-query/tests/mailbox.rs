//! The query of every rank, published and gathered: as many simulated devices as ranks always, and all ranks on one GPU when
//! there is one.

mod common;

use std::time::Duration;

use common::*;
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_core::layout::mla_rows::{K_PE, QKV, QUERY};
use dsa_dcp::mailbox::layout::BOX;
use dsa_dcp::{DcpError, Gather, GatherShape, GatherStep, Limits, MailboxShape, QueryElement, QueryMailbox, Waiting};
use gpu::{Buffer, Device, Graph, SimConfig};
use mla_query::{MlaError, MlaQuery, MlaShape, MlaStep, Publication, query};
use ptx::op::{Op, Operand, Space};
use ptx::{Kernel, KernelIr, Scope, Sem, Target};

const PAGE_TOKENS: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Spec {
    ranks: usize,
    heads: usize,
    /// Most tokens of a step.
    batch: usize,
    form: MlaCacheForm,
    multicast: bool,
}

impl Spec {
    fn element(&self) -> QueryElement {
        if self.form == MlaCacheForm::Fp8Ds { QueryElement::Bf16 } else { QueryElement::E4m3 }
    }

    fn mailbox(&self) -> MailboxShape {
        MailboxShape::padded(self.ranks, self.heads, self.batch, self.element()).unwrap()
    }

    fn shape(&self) -> MlaShape {
        let shape = MlaShape::new(self.heads, self.batch, self.form, PAGE_TOKENS).unwrap();
        shape.with_publication(Publication { mailbox: self.mailbox(), multicast: self.multicast }).unwrap()
    }
}

struct Rank {
    mailbox: QueryMailbox,
    query: MlaQuery,
    gather: Gather,
    resident: Resident,
    gathered: Buffer<u32>,
    step: Step,
}

struct Group {
    spec: Spec,
    ranks: Vec<Rank>,
}

impl Group {
    /// Every rank has its own weights; the tokens are the same.
    fn new(spec: Spec, devices: &[Device], rows: &[u16]) -> Group {
        Group::with(spec, devices, rows, &|_| {})
    }

    /// As [`Group::new`] with the query kernel rewritten.
    fn with(spec: Spec, devices: &[Device], rows: &[u16], rewrite: &dyn Fn(&mut KernelIr)) -> Group {
        let mut ir = KernelIr::clone(query::build(&spec.shape(), Target::Sm90a).unwrap().ir());
        rewrite(&mut ir);
        let kernel = Kernel::<query::MlaArgs>::from_ir(ir).unwrap();
        let limits = Limits { poll: Duration::from_millis(500), collective: Duration::from_secs(30) };
        let mailboxes = QueryMailbox::in_process(&devices[..spec.ranks], spec.mailbox(), limits).unwrap();
        let ranks = mailboxes.into_iter().zip(devices).enumerate().map(|(rank, (mailbox, device))| {
            let mut step = Step::random(100 + rank as u64, spec.heads, spec.batch);
            step.qkv = rows.to_vec();
            let gather = GatherShape::new(spec.mailbox()).with_copy(true);
            Rank {
                query: MlaQuery::from_kernel(device, spec.shape(), &kernel).unwrap(),
                gather: Gather::new(device, gather).unwrap(),
                resident: Resident::new(device, &step, spec.shape()),
                gathered: device.alloc(spec.batch * spec.mailbox().token_bytes() / 4).unwrap(),
                step,
                mailbox,
            }
        });
        Group { spec, ranks: ranks.collect() }
    }

    fn query(&self, rank: usize, tokens: usize) -> Result<(), MlaError> {
        let Rank { mailbox, query, resident, step, .. } = &self.ranks[rank];
        query.launch(&resident.stream, &MlaStep { tokens, mailbox: Some(mailbox), ..resident.step(step) })
    }

    fn gather(&self, rank: usize, tokens: usize) -> Result<(), DcpError> {
        let Rank { mailbox, gather, resident, gathered, .. } = &self.ranks[rank];
        gather.launch(&resident.stream, mailbox, &GatherStep { tokens, out: Some(gathered.as_view()) })
    }

    /// One call on every rank, all queries first: ranks that share a GPU may share its launch queues.
    fn launch(&self, tokens: usize) {
        (0..self.spec.ranks).for_each(|rank| self.query(rank, tokens).unwrap());
        (0..self.spec.ranks).for_each(|rank| self.gather(rank, tokens).unwrap());
    }

    fn poison(&self) {
        for Rank { resident, gathered, .. } in &self.ranks {
            resident.poison();
            gathered.fill_bytes(&resident.stream, POISON).unwrap();
        }
    }

    /// Every rank has gathered every rank's own rows, bit for bit, and nothing else was written.
    #[track_caller]
    fn verify(&self, tokens: usize) {
        for Rank { mailbox, resident, .. } in &self.ranks {
            mailbox.check(&resident.stream).unwrap();
        }
        let Spec { ranks, heads, .. } = self.spec;
        let shape = self.spec.mailbox();
        let row = shape.row_bytes();
        for (at, Rank { mailbox, resident, .. }) in self.ranks.iter().enumerate() {
            let last = mailbox.state().copy_to_vec(&resident.stream).unwrap()[BOX as usize] as usize;
            let words = mailbox.memory().copy_to_vec(&resident.stream).unwrap();
            for (index, words) in words.chunks(shape.box_bytes() / 8).enumerate() {
                let live = if index == last { tokens * shape.token_bytes() / 8 } else { 0 };
                assert!(words[live..].iter().all(|word| *word == u64::MAX), "rank {at}, box {index}: not refilled");
            }
        }
        let own: Vec<Vec<u8>> = self.ranks.iter().map(|rank| rank.resident.read(&rank.step).query).collect();
        for (at, Rank { resident, gathered, .. }) in self.ranks.iter().enumerate() {
            let gathered = gathered.copy_to_vec(&resident.stream).unwrap();
            let gathered: Vec<u8> = gathered.iter().flat_map(|word| word.to_le_bytes()).collect();
            for (index, got) in gathered.chunks(row).enumerate() {
                let (token, head) = (index / shape.q_heads(), index % shape.q_heads());
                let place = format!("rank {at}, token {token}, head {head} of {:?}", self.spec);
                if token < tokens && head < ranks * heads {
                    let want = &own[head / heads][(token * heads + head % heads) * row..][..row];
                    assert!(got == want, "{place}");
                    assert!(got.chunks(4).all(|word| *word != [0xFF; 4]), "a sentinel: {place}");
                } else {
                    assert!(got.iter().all(|byte| *byte == POISON), "{place}");
                }
            }
        }
    }
}

/// On simulated devices in a fixed order and `seeds` random ones, and with every rank on the one GPU if there is one.
fn everywhere(spec: Spec, seeds: u64, rows: &[u16], body: impl Fn(&Group)) {
    for config in [sim_config()].into_iter().chain((1..=seeds).map(SimConfig::seeded)) {
        let devices = Device::simulated_group(SimConfig { devices: spec.ranks, ..config });
        body(&Group::new(spec, &devices, rows));
    }
    if !spec.multicast {
        on_gpu(|device| body(&Group::new(spec, &vec![device.clone(); spec.ranks], rows)));
    }
}

fn rows(spec: &Spec) -> Vec<u16> {
    Step::random(7, 1, spec.batch).qkv
}

#[test]
fn every_rank_gathers_every_rank_s_query() {
    for (ranks, heads, batch, form, multicast) in [
        (2, 2, 2, MlaCacheForm::Fp8Ds, false),
        (2, 8, 1, MlaCacheForm::Nvfp4Ds, true),
        (4, 1, 2, MlaCacheForm::Fp8Multiply, false),
        (8, 1, 1, MlaCacheForm::Fp8Ds, true),
    ] {
        let spec = Spec { ranks, heads, batch, form, multicast };
        everywhere(spec, u64::from(ranks == 2), &rows(&spec), |group| {
            for tokens in [batch, batch.div_ceil(2), batch] {
                group.poison();
                group.launch(tokens);
                group.verify(tokens);
            }
        });
    }
}

#[test]
fn tiles_publish_too() {
    for (form, multicast, batch) in
        [(MlaCacheForm::Fp8Ds, false, 20), (MlaCacheForm::Fp8Divide, true, 9), (MlaCacheForm::Nvfp4Ds, false, 36)]
    {
        let spec = Spec { ranks: 2, heads: 1, batch, form, multicast };
        everywhere(spec, 1, &rows(&spec), |group| {
            for tokens in [batch, batch - 4, batch] {
                group.poison();
                group.launch(tokens);
                group.verify(tokens);
            }
        });
    }
}

#[test]
fn the_largest_tiles_publish() {
    // 64 tokens per cluster, of which some are past the live ones, and in a second tile all but one.
    let spec = Spec { ranks: 1, heads: 8, batch: 65, form: MlaCacheForm::Nvfp4Ds, multicast: false };
    assert_eq!(spec.shape().tokens(), 64);
    everywhere(spec, 0, &rows(&spec), |group| {
        group.poison();
        group.launch(65);
        group.verify(65);
    });
}

#[test]
fn what_a_kernel_publishes_is_what_one_that_does_not_computes() {
    for (batch, form) in [(3, MlaCacheForm::Fp8Ds), (3, MlaCacheForm::Fp8Divide), (17, MlaCacheForm::Nvfp4Ds)] {
        let spec = Spec { ranks: 1, heads: 2, batch, form, multicast: false };
        everywhere(spec, 0, &rows(&spec), |group| {
            let Rank { step, resident, mailbox, .. } = &group.ranks[0];
            group.poison();
            group.launch(batch);
            group.verify(batch);
            let published = resident.read(step);
            let plain = MlaShape::new(2, batch, form, PAGE_TOKENS).unwrap();
            let alone = run(mailbox.device(), step, plain);
            assert_eq!((alone.query, alone.cache), (published.query, published.cache));
        });
    }
}

#[test]
fn nan_and_infinity_are_no_sentinels() {
    for form in [MlaCacheForm::Fp8Ds, MlaCacheForm::Nvfp4Ds] {
        let spec = Spec { ranks: 2, heads: 1, batch: 4, form, multicast: false };
        let mut rows = rows(&spec);
        for (token, bits) in [0xFFFFu16, 0x7F81, 0xFF80, 0x7FFF].into_iter().enumerate() {
            rows[token * QKV..][..K_PE.end].fill(bits);
        }
        // One NaN among ordinary values is enough.
        rows[3 * QKV..][..QUERY].fill(0x3F80);
        everywhere(spec, 1, &rows, |group| {
            for _ in 0..3 {
                group.poison();
                group.launch(4);
                group.verify(4);
            }
        });
    }
}

#[test]
fn graphs_and_eager_calls_share_the_calls() {
    let spec = Spec { ranks: 2, heads: 1, batch: 2, form: MlaCacheForm::Fp8Ds, multicast: false };
    everywhere(spec, 1, &rows(&spec), |group| {
        // An odd number of calls per graph.
        let graphs: Vec<_> = (0..spec.ranks)
            .map(|rank| {
                Graph::capture(&group.ranks[rank].resident.stream, |_| {
                    for tokens in [2, 1, 2] {
                        group.query(rank, tokens).unwrap();
                        group.gather(rank, tokens).unwrap();
                    }
                    Ok(())
                })
                .unwrap()
            })
            .collect();
        for round in 0..3 {
            group.poison();
            for (graph, rank) in graphs.iter().zip(&group.ranks) {
                graph.launch(&rank.resident.stream).unwrap();
            }
            if round == 1 {
                group.launch(2);
            }
            group.verify(2);
        }
    });
}

#[test]
fn a_rank_that_never_comes_fails_the_others_and_reset_restores_service() {
    let spec = Spec { ranks: 3, heads: 1, batch: 2, form: MlaCacheForm::Fp8Divide, multicast: false };
    everywhere(spec, 1, &rows(&spec), |group| {
        group.launch(2);
        for rank in [0, 2] {
            group.query(rank, 2).unwrap();
        }
        for rank in [0, 2] {
            group.gather(rank, 2).unwrap();
        }
        for rank in [0, 2] {
            let Rank { mailbox, resident, .. } = &group.ranks[rank];
            let verdict = mailbox.check(&resident.stream);
            assert!(
                matches!(verdict, Err(DcpError::PeerLate { peer: 1, epoch: 2, waiting: Waiting::Query, .. })),
                "{verdict:?}"
            );
        }
        std::thread::scope(|scope| {
            for Rank { mailbox, resident, .. } in &group.ranks {
                scope.spawn(|| mailbox.reset(&resident.stream).unwrap());
            }
        });
        for _ in 0..3 {
            group.poison();
            group.launch(2);
            group.verify(2);
        }
    });
}

#[test]
fn mailboxes_that_do_not_fit_are_refused() {
    let spec = Spec { ranks: 2, heads: 2, batch: 4, form: MlaCacheForm::Fp8Ds, multicast: false };
    let plain = MlaShape::new(2, 4, spec.form, PAGE_TOKENS).unwrap();
    let with = |shape: MlaShape, mailbox| shape.with_publication(Publication { mailbox, multicast: false });
    let mailbox = |heads, tokens, element| MailboxShape::new(2, heads, 64, tokens, element).unwrap();
    for wrong in
        [mailbox(3, 4, QueryElement::Bf16), mailbox(2, 3, QueryElement::Bf16), mailbox(2, 4, QueryElement::E4m3)]
    {
        assert!(matches!(with(plain, wrong), Err(MlaError::MailboxUnsupported { .. })), "{wrong}");
    }
    let late = plain.with_late(true).unwrap();
    assert!(matches!(with(late, spec.mailbox()), Err(MlaError::LatePublication)));
    assert!(matches!(spec.shape().with_late(true), Err(MlaError::LatePublication)));

    // One device stands for both ranks: no multicast address.
    let device = Device::simulated(SimConfig::default());
    let group = Group::new(spec, &[device.clone(), device.clone()], &rows(&spec));
    let Rank { resident, step, mailbox: own, query, .. } = &group.ranks[0];
    let stream = &resident.stream;
    let refused = query.launch(stream, &MlaStep { mailbox: None, ..resident.step(step) });
    assert!(matches!(refused, Err(MlaError::Presence { buffer: "mailbox", given: false, .. })));
    let alone = MlaQuery::new(&device, plain).unwrap();
    let refused = alone.launch(stream, &MlaStep { mailbox: Some(own), ..resident.step(step) });
    assert!(matches!(refused, Err(MlaError::Presence { buffer: "mailbox", given: true, .. })));
    let other = with(plain, mailbox(2, 5, QueryElement::Bf16)).unwrap();
    let refused =
        MlaQuery::new(&device, other).unwrap().launch(stream, &MlaStep { mailbox: Some(own), ..resident.step(step) });
    assert!(matches!(refused, Err(MlaError::WrongMailbox { .. })));
    let multicast = Spec { multicast: true, ..spec }.shape();
    let refused = MlaQuery::new(&device, multicast)
        .unwrap()
        .launch(stream, &MlaStep { mailbox: Some(own), ..resident.step(step) });
    assert!(matches!(refused, Err(MlaError::NoMulticast)));
}

/// What goes wrong in calls back to back, of fewer and more tokens, in one of a few random orders.
fn fault(batch: usize, rewrite: &dyn Fn(&mut KernelIr)) -> Option<String> {
    let spec = Spec { ranks: 2, heads: 1, batch, form: MlaCacheForm::Fp8Ds, multicast: false };
    (1..=4).find_map(|seed| {
        let devices = Device::simulated_group(SimConfig { devices: 2, ..SimConfig::seeded(seed) });
        let group = Group::with(spec, &devices, &rows(&spec), rewrite);
        group.poison();
        // Other rows in every call, and nothing between them that the host waits for.
        let calls: Vec<(usize, Vec<Buffer<u16>>)> = (0..)
            .zip([batch, batch, 1, batch, batch])
            .map(|(call, tokens)| {
                let qkv = Step::random(call, 1, batch).qkv;
                (tokens, devices.iter().map(|device| device.upload(&qkv).unwrap()).collect())
            })
            .collect();
        for (tokens, qkv) in calls.iter().map(|(tokens, qkv)| (*tokens, qkv)) {
            for (Rank { mailbox, query, resident, step, .. }, qkv) in group.ranks.iter().zip(qkv) {
                let (qkv, mailbox) = (qkv.as_view(), Some(mailbox));
                query.launch(&resident.stream, &MlaStep { tokens, mailbox, qkv, ..resident.step(step) }).unwrap();
            }
            (0..2).for_each(|rank| group.gather(rank, tokens).unwrap());
        }
        let Rank { mailbox, resident, .. } = &group.ranks[0];
        if let Err(error) = mailbox.check(&resident.stream) {
            return Some(error.to_string());
        }
        let verified = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| group.verify(batch)));
        verified.err().map(|_| "rows differ".into())
    })
}

/// Removes the instructions for which `is` holds.
fn without(ir: &mut KernelIr, is: impl Fn(&Op) -> bool) {
    let before = ir.insts.len();
    ir.insts.retain(|inst| !is(&inst.op));
    assert!(ir.insts.len() < before, "{}", ir.name);
}

#[test]
fn the_kernels_steps_of_a_publication_are_all_needed() {
    let is_fence = |op: &Op| matches!(op, Op::Fence { scope: Scope::Sys });
    let is_sentinel = |src: &Operand| matches!(src, Operand::Imm(bits) if *bits as u32 == u32::MAX);
    let is_refill = |op: &Op| matches!(op, Op::St { space: Space::Global, sem: Sem::Weak, srcs, .. } if srcs.len() == 4 && srcs.iter().all(is_sentinel));
    // The inserting warps' wait for the rows, the last one in the text.
    let unwaited = |ir: &mut KernelIr| {
        let wait = ir.insts.iter().rposition(|inst| matches!(inst.op, Op::MbarTryWait { .. })).unwrap();
        assert!(matches!(ir.insts[wait + 1].op, Op::Bra { .. }), "a wait is a loop");
        ir.insts.drain(wait..=wait + 1);
    };
    // The rows' barrier has the last of the initialisations with as many arrivals as threads compute.
    let one_warp = |ir: &mut KernelIr| {
        let full = ir.insts.iter_mut().rev().find_map(|inst| match &mut inst.op {
            Op::MbarInit { count: count @ 256, .. } => Some(count),
            _ => None,
        });
        *full.expect("the rows' barrier") = 32;
    };
    for batch in [2, 9] {
        assert_eq!(fault(batch, &|_| {}), None, "as it is, {batch} tokens");
        for (what, broken) in [
            ("no fence", &(|ir: &mut KernelIr| without(ir, is_fence)) as &dyn Fn(&mut KernelIr)),
            ("no refill", &|ir| without(ir, is_refill)),
            ("no hand-over", &unwaited),
            ("one warp's arrival is enough", &one_warp),
        ] {
            let caught = fault(batch, broken).unwrap_or_else(|| panic!("{what}, {batch} tokens: nobody noticed"));
            println!("{what}, {batch} tokens: {}", caught.lines().next().unwrap_or_default());
        }
    }
}

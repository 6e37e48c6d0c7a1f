//! Every kernel at every supported specialisation through NVIDIA's assembler: no error, no performance note, no spill,
//! and no more registers or shared memory than `budgets.txt` allows.

use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use dsa_core::Ownership;
use dsa_core::consts::Q_MAX;
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
use ptxas::{Ptxas, Report};

/// Assemblers that run at once.
const THREADS: usize = 2;
/// The top-k values that deployments use, and the largest.
const TOPKS: [u32; 4] = [512, 1024, 2048, 4096];

/// One specialisation: what the host sees and the text that the driver gets.
struct Specialisation {
    ir: std::sync::Arc<KernelIr>,
    text: String,
}

/// Every supported specialisation of every kernel.
fn specialisations() -> Vec<Specialisation> {
    let mut all = Vec::new();
    for shape in ScoreShape::all(&TOPKS) {
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
    let shape = |q, topk, page| SelectShape::new(q, topk, page).unwrap();
    let mut shapes = Vec::new();
    for topk in TOPKS.map(|topk| topk as usize) {
        shapes.extend((1..=Q_MAX).map(|q| shape(q, topk, 64)));
        shapes.extend([1, 16, 32, 128, 256, 1 << 20].map(|page| shape(1, topk, page)));
        for flags in 1..8 {
            let (ids, hold, foreign) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
            shapes.push(shape(2, topk, 64).with_ids(ids).with_hold(hold).with_foreign_logits(foreign));
        }
    }
    // Every other top-k, and every flag at once.
    let others = (128..=4096).step_by(128).filter(|topk| !TOPKS.contains(&(*topk as u32)));
    shapes.extend(others.map(|topk| shape(1, topk, 64).with_ids(true).with_foreign_logits(true)));
    // Several CTAs a row.
    for cluster in [2, 4, 8, 16] {
        for topk in [128, 512, 1024, 2048, 3968, 4096] {
            let every_flag = shape(8, topk, 16).with_ids(true).with_hold(true).with_foreign_logits(true);
            let shared = [shape(1, topk, 64), every_flag].map(|shape| shape.with_cluster(cluster));
            shapes.extend(shared.into_iter().flatten());
        }
    }
    shapes
}

/// Most resources of the kernels whose names match a pattern.
#[derive(Debug, Clone, PartialEq)]
struct Budget<'a> {
    pattern: &'a str,
    registers: u32,
    shared_bytes: u32,
}

/// The lines of `budgets.txt`: pattern, registers, shared bytes; `#` starts a comment.
fn parse_budgets(text: &str) -> Result<Vec<Budget<'_>>, String> {
    text.lines()
        .map(|line| line.split('#').next().unwrap_or_default())
        .filter(|line| !line.trim().is_empty())
        .map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let number = |field: &str| field.parse::<u32>().map_err(|e| format!("{field:?} in {line:?}: {e}"));
            match fields[..] {
                [pattern, registers, shared] => {
                    Ok(Budget { pattern, registers: number(registers)?, shared_bytes: number(shared)? })
                }
                _ => Err(format!("{line:?} has {} fields, expected pattern, registers, shared bytes", fields.len())),
            }
        })
        .collect()
}

/// Whether `name` is `pattern` with every `*` replaced by some text.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, tail)) => name.strip_prefix(head).is_some_and(|rest| {
            (0..=rest.len()).filter(|at| rest.is_char_boundary(*at)).any(|at| matches(tail, &rest[at..]))
        }),
    }
}

/// The first line that matches a kernel.
fn budget_of(budgets: &[Budget<'_>], name: &str) -> Option<usize> {
    budgets.iter().position(|budget| matches(budget.pattern, name))
}

/// What is wrong with an assembled kernel.
fn faults(budget: &Budget<'_>, report: &Report, shared_bytes: u32) -> Vec<String> {
    let mut faults: Vec<String> = report.notes.clone();
    if report.spill_bytes() > 0 || report.stack_bytes > 0 {
        faults.push(format!("{} bytes of spills, {} of stack", report.spill_bytes(), report.stack_bytes));
    }
    let Budget { pattern, registers, shared_bytes: shared } = budget;
    if report.registers > *registers {
        faults.push(format!("{} registers, {pattern} allows {registers}", report.registers));
    }
    if shared_bytes > *shared {
        faults.push(format!("{shared_bytes} bytes of shared memory, {pattern} allows {shared}"));
    }
    faults
}

#[test]
fn every_specialisation_assembles_within_its_budget() {
    let Some(ptxas) = Ptxas::for_test() else { return };
    let budgets = parse_budgets(include_str!("budgets.txt")).unwrap();
    let all = specialisations();
    let next = AtomicUsize::new(0);
    let assemble = || {
        let mut done = Vec::new();
        while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push((one, ptxas.assemble(one.ir.target.name(), &one.text)));
        }
        done
    };
    let done: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS).map(|_| scope.spawn(assemble)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    assert_eq!(done.len(), all.len());

    let mut failures = String::new();
    let mut used = vec![(0u32, 0u32); budgets.len()];
    for (one, result) in &done {
        let name = &one.ir.name;
        let found = match (budget_of(&budgets, name), result) {
            (None, _) => vec!["no line of budgets.txt matches".to_string()],
            (_, Err(error)) => vec![error.to_string()],
            (Some(_), Ok(report)) if report.entry != *name => vec![format!("assembled as {}", report.entry)],
            (Some(_), Ok(report)) if report.shared_bytes > 0 => vec!["static shared memory".to_string()],
            (Some(line), Ok(report)) => {
                used[line].0 = used[line].0.max(report.registers);
                used[line].1 = used[line].1.max(one.ir.shared_bytes);
                faults(&budgets[line], report, one.ir.shared_bytes)
            }
        };
        for fault in found {
            writeln!(failures, "{name}: {fault}").unwrap();
        }
    }
    println!("{} kernels; most of each budget used:", all.len());
    for (budget, (registers, shared)) in budgets.iter().zip(&used) {
        println!(
            "{:40} {registers:4} of {:4} registers {shared:7} of {:7} shared bytes",
            budget.pattern, budget.registers, budget.shared_bytes
        );
        if *registers == 0 {
            writeln!(failures, "{}: the line of budgets.txt matches no kernel", budget.pattern).unwrap();
        }
    }
    assert!(failures.is_empty(), "\n{failures}");
}

#[test]
fn the_text_asks_for_the_pinned_version_and_target() {
    for one in specialisations() {
        let head: Vec<&str> = one.text.lines().take(3).collect();
        // Drivers of CUDA 12.4 and later load 8.4; raising it locks out older ones and is a decision, not an accident.
        assert_eq!(head, [".version 8.4", ".target sm_90a", ".address_size 64"], "{}", one.ir.name);
    }
}

#[test]
fn a_kernel_that_may_overlap_waits_for_its_dependencies() {
    for one in specialisations() {
        // Every kernel is launched with overlap; the attribute without the wait is a race.
        let waits = one.text.matches("griddepcontrol.wait;").count();
        assert!(waits > 0 && one.ir.waits_for_dependencies(), "{} never waits", one.ir.name);
        let launch = one.text.find("griddepcontrol.launch_dependents;");
        // A late kernel reads nothing of its predecessor and waits at its end, so that its successors wait for both.
        let late = one.ir.name.contains("_late");
        assert!(
            late || launch.is_none_or(|launch| one.text[..launch].contains("griddepcontrol.wait;")),
            "{} lets its dependents start above its own wait",
            one.ir.name
        );
    }
}

/// Size and alignment of every `.param` in a text.
fn params_in(text: &str) -> Vec<(u32, u32)> {
    text.lines()
        .map(str::trim)
        .filter_map(|line| line.strip_prefix(".param ").map(|rest| rest.trim_end_matches(',')))
        .map(|declaration| match declaration.split_whitespace().collect::<Vec<_>>()[..] {
            [".b32", _] => (4, 4),
            [".b64", _] => (8, 8),
            [".align", align, ".b8", name] => {
                let bytes = name.split_once('[').and_then(|(_, n)| n.strip_suffix(']')).expect("an array");
                (bytes.parse().unwrap(), align.parse().unwrap())
            }
            _ => panic!("unknown parameter declaration {declaration:?}"),
        })
        .collect()
}

/// What `pack` wrote against what the text declares: the driver copies each parameter from the host's offset with the
/// device's size.
fn check_params(text: &str, offsets: &[u16], bytes: usize) {
    let mut end = 0u32;
    let laid_out: Vec<u16> = params_in(text)
        .into_iter()
        .map(|(size, align)| {
            let at = end.next_multiple_of(align);
            end = at + size;
            at as u16
        })
        .collect();
    assert_eq!((laid_out.as_slice(), end as usize), (offsets, bytes));
}

#[test]
fn parameters_have_the_sizes_that_the_host_packs() {
    use ptx::{ArgBuffer, DevicePtr, TensorMap};
    let map = TensorMap::from_bytes([0xA5; 128]);
    let score_args = score::ScoreArgs {
        logits: DevicePtr::from_address(1),
        tops: DevicePtr::from_address(2),
        queries: map,
        keys: map,
        weights: DevicePtr::from_address(3),
        table: DevicePtr::from_address(4),
        row_ends: DevicePtr::from_address(5),
        table_stride: 6,
        rows: i32::MAX as u32,
        length_max: (1 << 31) + 5,
        pitch: 1,
    };
    let packed = ArgBuffer::pack(&score_args);
    let select_args = select::SelectArgs {
        out: DevicePtr::from_address(1),
        counts: DevicePtr::from_address(2),
        ids: DevicePtr::NULL,
        logits: DevicePtr::from_address(3),
        tops: DevicePtr::from_address(4),
        table: DevicePtr::from_address(5),
        row_ends: DevicePtr::from_address(6),
        table_stride: 7,
        block_rows: 8,
        blocks: 9,
        length_max: 9,
        rows: 10,
    };
    let select_packed = ArgBuffer::pack(&select_args);
    let mla_args = query::MlaArgs {
        query: DevicePtr::from_address(1),
        q_c: DevicePtr::from_address(2),
        cache: DevicePtr::from_address(3),
        dropped: DevicePtr::from_address(4),
        qkv: DevicePtr::from_address(5),
        w_qa: DevicePtr::from_address(6),
        w_kva: DevicePtr::from_address(7),
        w_qb: DevicePtr::from_address(8),
        w_qb_map: map,
        w_uk: map,
        slots: DevicePtr::from_address(9),
        q_scale_inv: DevicePtr::NULL,
        k_scale: DevicePtr::from_address(10),
        boxes: DevicePtr::from_address(11),
        peers: DevicePtr::NULL,
        multicast: 1 << 41,
        call: DevicePtr::from_address(12),
        status: DevicePtr::from_address(13),
        capacity: 14,
        page_stride: 1 << 40,
        token_stride: 15,
        qkv_stride: 16,
        tokens: 17,
        heads: 18,
        rank: 19,
        eps: 1e-5,
    };
    let gather_args = gather::GatherArgs {
        out: DevicePtr::NULL,
        boxes: DevicePtr::from_address(1),
        state: DevicePtr::from_address(2),
        status: DevicePtr::from_address(3),
        timeout_ns: 1 << 40,
        tokens: 4,
        parts: 5,
    };
    let mla_packed = ArgBuffer::pack(&mla_args);
    let local_args = local_topk::LocalTopkArgs {
        out: DevicePtr::from_address(1),
        counts: DevicePtr::from_address(2),
        logits: DevicePtr::from_address(3),
        tops: DevicePtr::from_address(4),
        row_ends: DevicePtr::from_address(5),
        pitch: 6,
        length_max: 7,
        rows: 8,
        peers: DevicePtr::from_address(9),
        epochs: DevicePtr::from_address(10),
        status: DevicePtr::NULL,
        rank: 11,
        slot_rows: 12,
    };
    let merge_args = merge::MergeArgs {
        rows_out: DevicePtr::from_address(1),
        valid_out: DevicePtr::from_address(2),
        ids: DevicePtr::NULL,
        memory: DevicePtr::from_address(3),
        peers: DevicePtr::from_address(4),
        epochs: DevicePtr::from_address(5),
        sequences: DevicePtr::from_address(6),
        status: DevicePtr::from_address(7),
        logits: DevicePtr::from_address(8),
        tops: DevicePtr::from_address(9),
        table: DevicePtr::from_address(10),
        row_ends: DevicePtr::from_address(11),
        lists_at: 1 << 40,
        timeout_ns: 1 << 42,
        pitch: 12,
        length_max: 13,
        rows: 14,
        table_stride: 15,
        block_rows: 16,
        blocks: 19,
        rank: 17,
        slot_rows: 18,
    };
    let ends_args = local_ends::LocalEndsArgs {
        ends: DevicePtr::from_address(1),
        out: DevicePtr::from_address(2),
        rows: 3,
        rank: 4,
        context_len_max: 5,
    };
    let kinds = [
        ("score", packed),
        ("select", select_packed),
        ("mla", mla_packed),
        ("local_topk", ArgBuffer::pack(&local_args)),
        ("merge", ArgBuffer::pack(&merge_args)),
        ("local_ends", ArgBuffer::pack(&ends_args)),
        ("gather", ArgBuffer::pack(&gather_args)),
    ];
    let mut seen = kinds.each_ref().map(|_| 0);
    for one in specialisations() {
        let kind = kinds.iter().position(|(kind, _)| one.ir.name.starts_with(kind)).expect("a kernel of a known kind");
        let packed = &kinds[kind].1;
        check_params(&one.text, packed.offsets(), packed.bytes().len());
        seen[kind] += 1;
    }
    assert!(seen.iter().all(|n| *n > 0), "{seen:?}");
}

#[test]
fn patterns_match_as_written() {
    assert!(matches("score_*_q1_*", "score_keys_fp8_q1_k512_ue8m0"));
    assert!(matches("score_*", "score_"));
    assert!(!matches("score_*_q1_*", "score_keys_fp8_q12"));
    assert!(!matches("select", "select_topk"));
}

#[test]
fn the_first_matching_line_holds() {
    let budgets = parse_budgets("# comment\na_b* 64 0\n\na_* 32 1024 # why\n").unwrap();
    assert_eq!(budgets[1], Budget { pattern: "a_*", registers: 32, shared_bytes: 1024 });
    assert_eq!(
        [budget_of(&budgets, "a_bc"), budget_of(&budgets, "a_c"), budget_of(&budgets, "c")],
        [Some(0), Some(1), None]
    );
    assert!(parse_budgets("a 1\n").is_err() && parse_budgets("a 1 many\n").is_err());
}

#[test]
fn every_excess_is_a_fault() {
    let budget = Budget { pattern: "k", registers: 32, shared_bytes: 1024 };
    let good = Report { entry: "k".into(), registers: 32, ..Report::default() };
    assert!(faults(&budget, &good, 1024).is_empty());
    assert_eq!(faults(&budget, &good, 1025).len(), 1);
    assert_eq!(faults(&budget, &Report { registers: 33, ..good.clone() }, 0).len(), 1);
    assert_eq!(faults(&budget, &Report { spill_load_bytes: 4, ..good.clone() }, 0).len(), 1);
    assert_eq!(faults(&budget, &Report { notes: vec!["(C7514)".into()], ..good }, 0).len(), 1);
}

//! Every ordering of the kernels is needed: with one left out, or made weaker, the simulator finds a fault.

mod common;

use common::*;
use dsa_core::layout::mla_entry::MlaCacheForm;
use gpu::Device;
use mla_query::{MlaQuery, MlaShape};
use ptx::op::Op;
use ptx::*;

/// A kernel with something left out.
struct Mutant {
    what: String,
    ir: KernelIr,
}

fn at(ir: &KernelIr, wanted: impl Fn(&Op) -> bool) -> Vec<usize> {
    (0..ir.insts.len()).filter(|i| wanted(&ir.insts[*i].op)).collect()
}

fn without(ir: &KernelIr, what: &str, removed: &[usize]) -> Mutant {
    let mut mutant = KernelIr::clone(ir);
    let mut i = 0;
    mutant.insts.retain(|_| {
        i += 1;
        !removed.contains(&(i - 1))
    });
    Mutant { what: format!("without the {what} at {}", ir.insts[removed[0]].loc), ir: mutant }
}

fn changed(ir: &KernelIr, what: &str, i: usize, op: Op) -> Mutant {
    let mut mutant = KernelIr::clone(ir);
    mutant.insts[i].op = op;
    Mutant { what: format!("with {what} at {}", ir.insts[i].loc), ir: mutant }
}

/// The instructions of the cluster's barrier: in the text the arrival of all warps comes first, then the wait of the computing
/// warps, then that of the inserting ones.
fn cluster_barrier(ir: &KernelIr) -> Vec<usize> {
    let found = at(ir, |op| matches!(op, Op::ClusterArrive { .. } | Op::ClusterWait));
    assert!(found.len() == 3, "a barrier of the cluster that this test does not know");
    found
}

/// Signals that something has been read, sent before the last reads: above the last wait for products, or above the three
/// last loads of matrices.
fn early_signals(ir: &KernelIr) -> Vec<Mutant> {
    let signals = at(ir, |op| matches!(op, Op::StAsync { srcs, .. } if srcs.len() == 1));
    let early = |signal: usize| {
        let is_read = |i: &usize| matches!(ir.insts[*i].op, Op::LdMatrix { .. } | Op::WgmmaWait { .. });
        let reads: Vec<usize> = (0..signal).rev().filter(is_read).take(3).collect();
        let to = if matches!(ir.insts[reads[0]].op, Op::WgmmaWait { .. }) { reads[0] } else { reads[2] };
        // With the barrier before it and the branch around it, which ends at the next label.
        let end = (signal..).find(|i| matches!(ir.insts[*i].op, Op::Label { .. })).expect("only some lanes signal");
        let mut mutant = KernelIr::clone(ir);
        mutant.insts[to..=end].rotate_right(end - reads[0]);
        Mutant { what: format!("with an early signal at {}", ir.insts[signal].loc), ir: mutant }
    };
    signals.into_iter().map(early).collect()
}

fn mutants(ir: &KernelIr) -> Vec<Mutant> {
    let mut all = Vec::new();
    all.push(without(ir, "barrier of the cluster", &cluster_barrier(ir)));
    for i in at(ir, |op| matches!(op, Op::FenceMbarrierInit | Op::FenceProxyAsync)) {
        all.push(without(ir, "fence", &[i]));
    }
    for i in at(ir, |op| matches!(op, Op::MbarTryWait { .. })) {
        assert!(matches!(ir.insts[i + 1].op, Op::Bra { .. }), "a wait is a loop");
        all.push(without(ir, "mbarrier wait", &[i, i + 1]));
        if let Op::MbarTryWait { dst, addr, parity, scope: Scope::Cluster } = ir.insts[i].op {
            let narrow = Op::MbarTryWait { dst, addr, parity, scope: Scope::Cta };
            all.push(changed(ir, "a wait at the CTA's scope", i, narrow));
        }
    }
    for i in at(ir, |op| matches!(op, Op::MbarInit { count: 2.., .. })) {
        let Op::MbarInit { addr, count } = ir.insts[i].op else { unreachable!() };
        all.push(changed(ir, "one arrival fewer", i, Op::MbarInit { addr, count: count - 1 }));
    }
    for i in at(ir, |op| matches!(op, Op::BarSync { .. })) {
        all.push(without(ir, "CTA barrier", &[i]));
    }
    for i in at(ir, |op| matches!(op, Op::BarWarp { .. })) {
        all.push(without(ir, "warp barrier", &[i]));
    }
    for i in at(ir, |op| matches!(op, Op::WgmmaWait { .. })) {
        let Op::WgmmaWait { pending } = ir.insts[i].op else { unreachable!() };
        all.push(changed(ir, "one more product pending", i, Op::WgmmaWait { pending: pending + 1 }));
    }
    all.extend(early_signals(ir));
    for i in at(ir, |op| matches!(op, Op::CpAsyncWait { .. })) {
        all.push(without(ir, "wait for copies", &[i]));
    }
    all
}

fn run_in(config: gpu::SimConfig, step: &Step, shape: MlaShape, ir: &KernelIr) -> Result<Outputs, String> {
    let device = Device::simulated(config);
    let kernel = Kernel::from_ir(ir.clone()).map_err(|error| error.to_string())?;
    let query = MlaQuery::from_kernel(&device, shape, &kernel).unwrap();
    let resident = Resident::new(&device, step, shape);
    resident.poison();
    resident.launch(&query, step).unwrap();
    resident.stream.synchronize().map_err(|error| error.to_string())?;
    Ok(resident.read(step))
}

/// Checks that every mutant of the kernel is caught in one of a few schedules.
fn check_mutants(tokens: usize, shape: impl Fn(MlaShape) -> MlaShape, at_least: usize) {
    let step = Step::random(70, 1, tokens);
    let shape = shape(shape_of(&step, MlaCacheForm::Fp8Ds));
    let kernel = mla_query::query::build(&shape, Target::Sm90a).unwrap();
    let want = run_in(sim_config(), &step, shape, kernel.ir()).expect("the kernel is sound");
    check(&step, shape, &want);
    let mutants = mutants(kernel.ir());
    println!("{} mutants of {}", mutants.len(), shape.name());
    assert!(mutants.len() >= at_least, "only {} mutants", mutants.len());
    for mutant in mutants {
        let caught = orders(12).into_iter().any(|config| run_in(config, &step, shape, &mutant.ir) != Ok(want.clone()));
        assert!(caught, "{}: {} goes unnoticed", shape.name(), mutant.what);
    }
}

#[test]
fn one_by_one_in_clusters_of_16() {
    check_mutants(2, |shape| shape, 8);
}

#[test]
fn one_by_one_with_copies_by_threads() {
    check_mutants(2, |shape| shape.with_thread_copies(true).unwrap(), 9);
}

#[test]
fn tiles_of_16() {
    check_mutants(16, |shape| shape, 12);
}

#[test]
fn tiles_of_32() {
    check_mutants(18, |shape| shape.with_tile(Some(32)).unwrap(), 14);
}

#[test]
fn tiles_of_64() {
    check_mutants(33, |shape| shape.with_tile(Some(64)).unwrap(), 15);
}

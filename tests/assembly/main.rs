//! Every kernel at every supported specialisation through NVIDIA's assembler: no error, no performance note, no spill,
//! and no more registers or shared memory than `budgets.txt` allows.

mod arguments;
mod budgets;
mod specialisations;

use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use ptxas::Ptxas;

use budgets::{budget_of, faults, parse_budgets};
use specialisations::specialisations;

/// Assemblers that run at once.
const THREADS: usize = 2;

#[test]
fn every_specialisation_assembles_within_its_budget() {
    let Some(ptxas) = Ptxas::for_test() else { return };
    let budgets = parse_budgets(include_str!("../budgets.txt")).unwrap();
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

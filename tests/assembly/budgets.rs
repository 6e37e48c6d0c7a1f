//! The lines of `budgets.txt`, and what exceeds them.

use ptxas::Report;

/// Most resources of the kernels whose names match a pattern.
#[derive(Debug, Clone, PartialEq)]
pub struct Budget<'a> {
    pub pattern: &'a str,
    pub registers: u32,
    pub shared_bytes: u32,
}

/// The lines of `budgets.txt`: pattern, registers, shared bytes; `#` starts a comment.
pub fn parse_budgets(text: &str) -> Result<Vec<Budget<'_>>, String> {
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
pub fn budget_of(budgets: &[Budget<'_>], name: &str) -> Option<usize> {
    budgets.iter().position(|budget| matches(budget.pattern, name))
}

/// What is wrong with an assembled kernel.
pub fn faults(budget: &Budget<'_>, report: &Report, shared_bytes: u32) -> Vec<String> {
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

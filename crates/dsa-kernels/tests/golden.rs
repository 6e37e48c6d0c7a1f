//! The PTX of each kernel at its canonical shapes, so that a change of the builder or of a shared helper shows in review.
//!
//! `BLESS=1 cargo test -p dsa-kernels --test golden` rewrites the files. Line information is left out: code that moves
//! does not change them.

use std::path::Path;

use dsa_core::layout::fp8_page::ScaleForm;
use dsa_kernels::local_topk::{self, LocalTopkShape};
use dsa_kernels::score::{self, ScoreForm, ScoreShape};
use dsa_kernels::select::{self, SelectShape};
use ptx::Target;

/// The text without `.file` and `.loc`.
fn without_lines(ptx: &str) -> String {
    let kept = ptx.lines().filter(|line| !line.trim_start().starts_with(".loc") && !line.starts_with(".file"));
    kept.flat_map(|line| [line, "\n"]).collect()
}

/// Name and text of each canonical kernel.
fn canonical() -> Vec<(String, String)> {
    let score = |q, form, scale_form| {
        let shape = ScoreShape::new(q, form, scale_form).unwrap();
        (shape.name(), score::build(&shape, Target::Sm90a).unwrap().ptx())
    };
    let select = |topk, page| {
        let shape = SelectShape::new(topk, page).unwrap();
        (shape.name(), select::build(&shape, Target::Sm90a).unwrap().ptx())
    };
    let local_topk = |n, cluster, ranks, target| {
        let shape = LocalTopkShape::new(n, 2048).unwrap().with_cluster(cluster).unwrap().with_push(ranks).unwrap();
        (shape.name(), local_topk::build(&shape, target).unwrap().ptx())
    };
    vec![
        score(1, ScoreForm::Compact { topk: 2048 }, ScaleForm::Ue8m0),
        score(2, ScoreForm::Pitched, ScaleForm::Fp32),
        select(2048, 64),
        local_topk(512, 1, 8, Target::Sm90a),
        local_topk(512, 2, 8, Target::Sm90a),
        local_topk(512, 4, 8, Target::Sm100a),
    ]
}

/// The first line in which the texts differ, for people.
fn difference(got: &str, want: &str) -> Option<String> {
    let (mut got, mut want) = (got.lines(), want.lines());
    for number in 1.. {
        match (got.next(), want.next()) {
            (None, None) => return None,
            (a, b) if a == b => {}
            (a, b) => {
                let text = |line: Option<&str>| line.map_or("the end".to_string(), |line| format!("{:?}", line.trim()));
                return Some(format!("line {number}: got {}, want {}", text(a), text(b)));
            }
        }
    }
    None
}

#[test]
fn every_canonical_kernel_prints_its_golden_text() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let bless = std::env::var_os("BLESS").is_some_and(|v| v == "1");
    let mut expected = Vec::new();
    let mut failures = Vec::new();
    for (name, ptx) in canonical() {
        let file = format!("{name}.ptx");
        let got = without_lines(&ptx);
        if bless {
            std::fs::write(folder.join(&file), &got).unwrap();
        }
        match std::fs::read_to_string(folder.join(&file)) {
            Ok(want) => failures.extend(difference(&got, &want).map(|d| format!("golden/{file}, {d}"))),
            Err(error) => failures.push(format!("golden/{file}: {error}")),
        }
        expected.push(file);
    }
    let present = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    failures.extend(present.filter(|file| !expected.contains(file)).map(|file| format!("golden/{file} has no kernel")));
    assert!(
        failures.is_empty(),
        "{}\nrefresh with `BLESS=1 cargo test -p dsa-kernels --test golden` and read the difference",
        failures.join("\n")
    );
}

#[test]
fn line_information_is_all_that_is_left_out() {
    let ptx = ".version 8.4\n.file 1 \"a.rs\"\n{\n    .loc 1 2 3\n    ret;\n}\n";
    assert_eq!(without_lines(ptx), ".version 8.4\n{\n    ret;\n}\n");
}

#[test]
fn a_difference_names_its_first_line() {
    assert_eq!(difference("a\nb\n", "a\nb\n"), None);
    assert_eq!(difference("a\n  b\n", "a\nc\n").unwrap(), "line 2: got \"b\", want \"c\"");
    assert_eq!(difference("a\n", "a\nc\n").unwrap(), "line 2: got the end, want \"c\"");
}

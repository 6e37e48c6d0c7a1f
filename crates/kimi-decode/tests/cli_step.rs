//! `step` on the fixtures: the same outputs as `index` and `query`, from one captured sequence.

mod common;

use std::path::Path;

use common::{Run, Tensors, fixture, folder, index, kimi_decode};
use safetensors::Dtype;

fn step(file: &Path, args: &[&str]) -> Run {
    kimi_decode(["step", file.to_str().unwrap(), "--device", "sim"].iter().chain(args))
}

/// Both fixtures in one file.
fn both() -> Tensors {
    // Of the tolerance, which both state, the indexer's.
    let (mut both, index) = (Tensors::fixture("mla_query_h6"), Tensors::fixture("index_exact"));
    both.tensors.extend(index.tensors);
    both.metadata.extend(index.metadata);
    both
}

/// A file of its own with both fixtures after `change`.
fn changed(test: &str, args: &[&str], change: impl FnOnce(&mut Tensors)) -> Run {
    let mut tensors = both();
    change(&mut tensors);
    let file = folder(test).join("step.safetensors");
    tensors.write(&file);
    step(&file, args)
}

#[test]
fn a_step_writes_what_its_parts_write() {
    let folder = folder("step-parts");
    let path = |name: &str| folder.join(name);
    let run = index(&fixture("index_exact"), &["--out", path("index").to_str().unwrap()]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let rows = Tensors::fixture("index_exact").tensors["row_ends"].1[0].to_string();
    for (form, late) in [("ds", false), ("ds", true), ("nvfp4", true), ("fp8-k3", false)] {
        let file = fixture("mla_query_h6");
        let file = file.to_str().unwrap();
        let (query_out, out) = (path("query"), path("step"));
        let run = kimi_decode([
            "query",
            file,
            "--device",
            "sim",
            "--cache",
            form,
            "--batch",
            &rows,
            "--out",
            query_out.to_str().unwrap(),
        ]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let mut args = vec!["--query", file, "--cache", form, "--out", out.to_str().unwrap()];
        args.extend(late.then_some("--late"));
        let run = step(&fixture("index_exact"), &args);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.stdout);
        let order = if late { "score, select, and the query beside it" } else { "query, score, select" };
        for text in [
            order,
            "selection   exact",
            "MATCH       within the file's tolerance: bit-exact",
            "MATCH       within the tolerances",
        ] {
            assert!(run.stdout.contains(text), "no {text:?} in\n{}", run.stdout);
        }
        let mut parts = Tensors::read(&path("index")).tensors;
        parts.extend(Tensors::read(&query_out).tensors);
        assert_eq!(parts.len(), 7);
        assert_eq!(Tensors::read(&out).tensors, parts, "{form}, late {late}");
    }
}

#[test]
fn ranks_write_what_the_parts_over_ranks_write() {
    let folder = folder("step-dcp");
    let path = |name: &str| folder.join(name);
    let query_file = fixture("mla_query_h6");
    let query_file = query_file.to_str().unwrap();
    let rows = Tensors::fixture("index_exact").tensors["row_ends"].1[0].to_string();
    for (ranks, seed) in [("2", None), ("3", Some("7"))] {
        let run = index(&fixture("index_exact"), &["--dcp", ranks, "--out", path("index").to_str().unwrap()]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let run = kimi_decode([
            "query",
            query_file,
            "--device",
            "sim",
            "--batch",
            &rows,
            "--out",
            path("query").to_str().unwrap(),
        ]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let out = path("step");
        let mut args = vec!["--query", query_file, "--dcp", ranks, "--out", out.to_str().unwrap()];
        args.extend(seed.iter().flat_map(|seed| ["--seed", seed]));
        let run = step(&fixture("index_exact"), &args);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.stdout);
        for text in
            ["one graph per rank", "exact       every rank's ids", "a device per rank", "MATCH       within the"]
        {
            assert!(run.stdout.contains(text), "no {text:?} in\n{}", run.stdout);
        }
        let mut parts = Tensors::read(&path("index")).tensors;
        parts.extend(Tensors::read(&path("query")).tensors);
        assert_eq!(Tensors::read(&out).tensors, parts, "{ranks} ranks");
    }
}

#[test]
fn ranks_that_cannot_be_are_refused_and_nothing_is_written() {
    let out = folder("step-dcp-refused").join("out.safetensors");
    let query_file = fixture("mla_query_h6");
    for (args, says) in [
        (&["--dcp", "0"][..], "--dcp: found 0, needed 1..=16 ranks"),
        (&["--dcp", "4"], "--dcp: found 4, needed a divisor of 6 (metadata heads)"),
        (&["--dcp", "2", "--late"], "--late"),
    ] {
        let fixed = ["--query", query_file.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let run = step(&fixture("index_exact"), &[&fixed[..], args].concat());
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{args:?}");
        assert!(run.stderr.contains(says) && run.stderr.lines().count() == 1, "{args:?}: {}", run.stderr);
    }
    assert!(!out.exists(), "nothing is written");
}

#[test]
fn a_step_without_its_query_says_how_to_give_it_one() {
    let run = step(&fixture("index_exact"), &[]);
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    for text in ["metadata heads: missing", "--query FILE takes the query's tensors from another file\n"] {
        assert!(run.stderr.contains(text), "{}", run.stderr);
    }
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
}

#[test]
fn one_file_may_hold_the_whole_step() {
    let run = changed("step-one-file", &[], |_| {});
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.stdout);
    let seeded = changed("step-one-file-seeded", &["--seed", "4", "--late"], |_| {});
    assert_eq!((seeded.code, seeded.stderr.as_str()), (0, ""), "{}", seeded.stdout);
}

#[test]
fn a_wrong_expectation_of_either_part_is_a_mismatch_and_is_named() {
    for tensor in ["expected.ids", "expected.qc", "expected.cache_ds"] {
        let run = changed(&format!("step-wrong-{tensor}"), &[], |tensors| {
            tensors.tensors.get_mut(tensor).unwrap().2.iter_mut().for_each(|byte| *byte ^= 0x7F);
        });
        assert_eq!(run.code, 1, "{tensor}: {}", run.stdout);
        let named = tensor.trim_start_matches("expected.").trim_end_matches("_ds");
        assert!(
            run.stdout.contains("MISMATCH") && (run.stderr.contains(named) || run.stderr.contains("id")),
            "{}",
            run.stderr
        );
        assert_eq!(run.stderr.lines().count(), 1);
    }
}

#[test]
fn unusable_input_is_one_line_and_writes_nothing() {
    let out = folder("step-unusable").join("out.safetensors");
    let out_arg = out.to_str().unwrap();
    type Change = fn(&mut Tensors);
    let cases: [(&str, &str, Change); 7] = [
        ("index", "tensor index_table: missing", |t| _ = t.tensors.remove("index_table")),
        ("query", "tensor w_qb: missing", |t| _ = t.tensors.remove("w_qb")),
        ("topk", "metadata topk", |t| _ = t.metadata.insert("topk".into(), "many".into())),
        ("heads", "metadata heads", |t| _ = t.metadata.remove("heads")),
        ("dtype", "tensor q: found dtype", |t| t.tensors.get_mut("q").unwrap().0 = Dtype::U8),
        ("shape", "tensor slots: found shape", |t| t.tensors.get_mut("slots").unwrap().1 = vec![4, 5]),
        ("tokens", "tensor qkv: found 1 tokens, needed one for each of", |t| {
            t.tensors.retain(|name, _| !name.starts_with("expected"));
            for (name, bytes) in [("qkv", 2 * 2112), ("slots", 8)] {
                let tensor = t.tensors.get_mut(name).unwrap();
                tensor.1[0] = 1;
                tensor.2.truncate(bytes);
            }
        }),
    ];
    for (name, says, change) in cases {
        let run = changed(&format!("step-bad-{name}"), &["--out", out_arg], change);
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{name}");
        assert!(run.stderr.contains(says) && run.stderr.lines().count() == 1, "{name}: {}", run.stderr);
    }
    // Neither input is overwritten, and a K3 step has no indexer to be late beside.
    let folder = folder("step-inputs");
    let [index_file, query_file] = [("index_exact", "i"), ("mla_query_h6", "q")].map(|(name, copy)| {
        let copy = folder.join(copy);
        std::fs::copy(fixture(name), &copy).unwrap();
        copy
    });
    let query_arg = query_file.to_str().unwrap();
    for target in [&index_file, &query_file] {
        let run = step(&index_file, &["--query", query_arg, "--out", target.to_str().unwrap()]);
        assert_eq!(run.code, 2);
        assert!(run.stderr.contains("is the input"), "{}", run.stderr);
    }
    let run = step(&index_file, &["--query", query_arg, "--cache", "fp8-k3", "--late", "--out", out_arg]);
    assert_eq!(run.code, 2, "{}", run.stdout);
    assert!(run.stderr.lines().count() == 1, "{}", run.stderr);
    let run = step(&fixture("index_exact"), &["--out", out_arg]);
    assert_eq!(run.code, 2, "no query in the file");
    let truncated = folder.join("truncated");
    std::fs::write(&truncated, &std::fs::read(&query_file).unwrap()[..100_000]).unwrap();
    let run = step(&index_file, &["--query", truncated.to_str().unwrap(), "--out", out_arg]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("truncated"), "{}", run.stderr);
    assert!(!out.exists(), "nothing is written");
}

//! `query` on the fixture: what matches, what is written, what a wrong file or argument does.

mod common;

use common::{Run, Tensors, fixture, folder, kimi_decode};
use safetensors::Dtype;

const FORMS: [(&str, &str, &str, usize); 4] = [
    ("ds", "q_bf16", "cache_ds", 656),
    ("fp8-dsa", "q_fp8", "cache_fp8_dsa", 576),
    ("fp8-k3", "q_fp8", "cache_fp8_k3", 576),
    ("nvfp4", "q_fp8", "cache_nvfp4", 352),
];

fn query(file: &std::path::Path, args: &[&str]) -> Run {
    let file = file.to_str().unwrap();
    kimi_decode(["query", file, "--device", "sim"].iter().chain(args))
}

#[test]
fn every_form_matches_and_writes_its_outputs() {
    let want = Tensors::fixture("mla_query_h6");
    for (form, q, cache, bytes) in FORMS {
        let out = folder(&format!("query-{form}")).join("out.safetensors");
        let run = query(&fixture("mla_query_h6"), &["--cache", form, "--batch", "3", "--out", out.to_str().unwrap()]);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.stdout);
        for text in
            ["3 of 20 tokens, 6 heads", "expected.qc", &format!("expected.{q}"), &format!("expected.{cache}"), "MATCH"]
        {
            assert!(run.stdout.contains(text), "no {text:?} in\n{}", run.stdout);
        }
        let got = Tensors::read(&out);
        let shape = |name: &str| (got.tensors[name].0, got.tensors[name].1.clone());
        assert_eq!(shape("qc"), (Dtype::BF16, vec![3, 1536]));
        assert_eq!(shape("q"), (if form == "ds" { Dtype::BF16 } else { Dtype::F8_E4M3 }, vec![3, 6, 576]));
        assert_eq!(shape("cache"), (Dtype::U8, vec![3, 64, bytes]));
        assert_eq!(got.tensors.len(), 3);
        // Tokens past the batch leave the fill.
        let fill = got.tensors["cache"].2.chunks(bytes).filter(|entry| entry.iter().all(|b| *b == 0xA5)).count();
        assert!(fill >= 3 * 64 - 3, "{fill}");
        assert_eq!(want.tensors[&format!("expected.{cache}")].1, [3, 64, bytes]);
    }
}

#[test]
fn the_whole_file_is_the_default() {
    let run = query(&fixture("mla_query_h6"), &[]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.stdout);
    assert!(run.stdout.contains("20 of 20 tokens"), "{}", run.stdout);
}

#[test]
fn a_seed_gives_the_same_bits() {
    let folder = folder("query-seed");
    let write = |name: &str, args: &[&str]| {
        let out = folder.join(name);
        let run = query(&fixture("mla_query_h6"), &[&["--batch", "1", "--out", out.to_str().unwrap()], args].concat());
        assert_eq!(run.code, 0, "{}", run.stderr);
        Tensors::read(&out)
    };
    assert_eq!(write("plain", &[]), write("seeded", &["--seed", "5"]));
}

/// The fixture after `change`, with what `query` says of it.
fn changed(test: &str, args: &[&str], change: impl FnOnce(&mut Tensors)) -> Run {
    let mut tensors = Tensors::fixture("mla_query_h6");
    change(&mut tensors);
    let file = folder(test).join("step.safetensors");
    tensors.write(&file);
    query(&file, args)
}

#[test]
fn a_wrong_expectation_is_a_mismatch_and_is_named() {
    for (tensor, args) in
        [("qc", "ds"), ("q_bf16", "ds"), ("cache_ds", "ds"), ("q_fp8", "nvfp4"), ("cache_nvfp4", "nvfp4")]
    {
        let run = changed(&format!("query-wrong-{tensor}"), &["--cache", args, "--batch", "3"], |tensors| {
            let data = &mut tensors.tensors.get_mut(&format!("expected.{tensor}")).unwrap().2;
            // Every byte: also that of a scale.
            data.iter_mut().for_each(|byte| *byte ^= 0x7F);
        });
        assert_eq!(run.code, 1, "{tensor}: {}", run.stdout);
        assert!(
            run.stdout.contains("MISMATCH") && run.stderr.contains(&format!("expected.{tensor}")),
            "{}",
            run.stderr
        );
        assert_eq!(run.stderr.lines().count(), 1);
    }
}

#[test]
fn a_file_without_answers_is_run_all_the_same() {
    let run = changed("query-bare", &["--batch", "1"], |tensors| {
        tensors.tensors.retain(|name, _| !name.starts_with("expected"))
    });
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout.contains("nothing in the file to compare with"), "{}", run.stdout);
}

#[test]
fn slots_past_the_cache_are_reported() {
    let run = changed("query-dropped", &["--batch", "1"], |tensors| {
        tensors.tensors.retain(|name, _| !name.starts_with("expected"));
        tensors.tensors.get_mut("slots").unwrap().2[..8].copy_from_slice(&192i64.to_le_bytes());
    });
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout.contains("0 tokens inserted, 0 skipped, 1 dropped"), "{}", run.stdout);
}

#[test]
fn unusable_input_is_one_line_and_writes_nothing() {
    let out = folder("query-unusable").join("out.safetensors");
    let out = out.to_str().unwrap();
    type Change = fn(&mut Tensors);
    let cases: [(&str, &str, Change); 9] = [
        ("heads", "metadata heads", |t| _ = t.metadata.insert("heads".into(), "97".into())),
        ("eps", "metadata eps", |t| _ = t.metadata.insert("eps".into(), "small".into())),
        ("fill", "metadata cache_fill", |t| _ = t.metadata.remove("cache_fill")),
        ("pages", "metadata pages", |t| _ = t.metadata.insert("pages".into(), "99999999".into())),
        ("page", "metadata page_tokens", |t| _ = t.metadata.insert("page_tokens".into(), "0".into())),
        ("missing", "tensor w_qb: missing", |t| _ = t.tensors.remove("w_qb")),
        ("dtype", "tensor w_uk: found dtype", |t| t.tensors.get_mut("w_uk").unwrap().0 = Dtype::F16),
        ("shape", "tensor slots: found shape", |t| t.tensors.get_mut("slots").unwrap().1 = vec![4, 5]),
        ("cache", "tensor expected.cache_ds", |t| {
            t.tensors.get_mut("expected.cache_ds").unwrap().1 = vec![64, 3, 656];
        }),
    ];
    for (name, says, change) in cases {
        let run = changed(&format!("query-bad-{name}"), &["--out", out], change);
        assert_eq!(run.code, 2, "{name}: {}", run.stdout);
        assert!(run.stderr.contains(says) && run.stderr.lines().count() == 1, "{name}: {}", run.stderr);
        assert_eq!(run.stdout, "");
    }
    for batch in ["0", "21"] {
        let run = query(&fixture("mla_query_h6"), &["--batch", batch, "--out", out]);
        assert_eq!(run.code, 2);
        assert!(run.stderr.contains("needed 1..=20"), "{}", run.stderr);
    }
    let run = query(&fixture("index_exact"), &["--out", out]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(!std::path::Path::new(out).exists(), "nothing is written");
}

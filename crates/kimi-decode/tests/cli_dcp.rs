//! `index --dcp`: contexts spread over ranks, from the command line.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use common::{Run, Tensors, fixture, folder, index, kimi_decode};
use dsa_core::Ownership;

/// Fixtures, and the largest local top-N that leaves something for other ranks to send.
const FIXTURES: [(&str, usize); 4] =
    [("index_exact", 1024), ("index_exact_ties", 384), ("index_realtext", 1024), ("index_realtext_mtp", 384)];
const RANKS: [usize; 6] = [1, 2, 3, 4, 8, 16];
const LOCAL_TOPKS: [usize; 4] = [128, 256, 512, 1024];
const INTERLEAVES: [usize; 3] = [1, 4, 64];

/// What a single rank writes for a fixture.
fn whole(name: &str) -> Tensors {
    static KNOWN: Mutex<BTreeMap<String, Tensors>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap();
    let run = || {
        let out = folder(&format!("dcp-whole-{name}")).join("out.safetensors");
        let run = index(&fixture(name), &["--out", out.to_str().unwrap()]);
        assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
        Tensors::read(&out)
    };
    known.entry(name.to_string()).or_insert_with(run).clone()
}

/// Runs a fixture spread over `ranks` ranks, and holds its output file to a single rank's.
#[track_caller]
fn spread(name: &str, ranks: usize, args: &[&str]) -> String {
    let key = args.join("").replace("--", "-");
    let out = folder(&format!("dcp-{name}-{ranks}{key}")).join("out.safetensors");
    let count = ranks.to_string();
    let args = [&["--dcp", &count, "--out", out.to_str().unwrap()], args].concat();
    let run = index(&fixture(name), &args);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{name} {args:?}: {}", run.stdout);
    assert!(run.stdout.contains("MATCH") && run.stdout.contains("exact       every rank's ids"), "{}", run.stdout);
    let interleave = args.iter().position(|arg| *arg == "--interleave").map_or(1, |at| args[at + 1].parse().unwrap());
    verify(name, &Tensors::read(&out), &whole(name), Ownership::new(ranks, interleave).unwrap());
    run.stdout
}

#[track_caller]
fn verify(name: &str, got: &Tensors, whole: &Tensors, own: Ownership) {
    let input = Tensors::fixture(name);
    let number = |key: &str| input.metadata[key].parse::<usize>().unwrap();
    let (q, page, block_rows) = (number("q_per_request"), number("kv_page"), number("kv_block_rows"));
    let (table, width) = (input.i32s("kv_table"), input.shape("kv_table")[1]);
    assert_eq!(got.tensors["ids"], whole.tensors["ids"], "{name}, {own:?}: ids");
    assert_eq!(got.tensors.len(), 1 + 2 * own.ranks(), "{:?}", got.tensors.keys());
    let [rows, topk] = whole.shape("ids")[..] else { panic!("ids are a matrix") };
    let ids = whole.i32s("ids");
    let mut total = vec![0; rows];
    for rank in 0..own.ranks() {
        let (out, counts) = (got.i32s(&format!("rows.{rank}")), got.i32s(&format!("counts.{rank}")));
        assert_eq!(got.shape(&format!("rows.{rank}")), [rows, topk]);
        for row in 0..rows {
            let selected = ids[row * topk..(row + 1) * topk].iter().filter(|id| **id >= 0).map(|&id| id as usize);
            let owned = selected.filter(|&id| own.rank_of(id) == rank).map(|id| own.local_of(id));
            let physical =
                |local: usize| table[row / q * width + local / page] * block_rows as i32 + (local % page) as i32;
            let mut want: Vec<i32> = owned.map(physical).collect();
            assert_eq!(counts[row] as usize, want.len(), "{name}, {own:?}, rank {rank}, row {row}: count");
            want.resize(topk, -1);
            assert_eq!(out[row * topk..(row + 1) * topk], want, "{name}, {own:?}, rank {rank}, row {row}");
            total[row] += counts[row];
        }
    }
    assert_eq!(total, whole.i32s("counts"), "{name}, {own:?}: all counts together");
}

/// Every fixture over `ranks` ranks: every local top-N and interleave once, or in every combination with `DSA_FULL=1`.
fn matrix(ranks: usize) {
    let full = std::env::var("DSA_FULL").is_ok_and(|v| v == "1");
    for (which, (name, largest)) in FIXTURES.into_iter().enumerate() {
        let local_topks: Vec<usize> = LOCAL_TOPKS.into_iter().filter(|&n| n <= largest).collect();
        let all = local_topks.iter().flat_map(|&n| INTERLEAVES.map(|interleave| (n, interleave)));
        let some = (local_topks[(which + ranks) % local_topks.len()], INTERLEAVES[(which + ranks) % INTERLEAVES.len()]);
        let chosen: Vec<(usize, usize)> = if full { all.collect() } else { vec![some] };
        for (n, interleave) in chosen {
            let stdout = spread(name, ranks, &["--topn", &n.to_string(), "--interleave", &interleave.to_string()]);
            let says = format!("{ranks}, tokens dealt {interleave} at a time, local top-{n}, pushed to every rank");
            assert!(stdout.contains(&says), "no {says:?} in {stdout}");
        }
    }
}

#[test]
fn every_fixture_over_1_2_and_3_ranks() {
    RANKS[..3].iter().for_each(|&ranks| matrix(ranks));
}

#[test]
fn every_fixture_over_4_and_8_ranks() {
    RANKS[3..5].iter().for_each(|&ranks| matrix(ranks));
}

#[test]
fn every_fixture_over_16_ranks() {
    matrix(RANKS[5]);
}

#[test]
fn gathers_schedules_and_defaults_give_the_same_files() {
    for (ranks, n) in [(2, 384), (5, 256)] {
        let stdout = spread("index_realtext_mtp", ranks, &["--transport", "gather", "--interleave", "4"]);
        assert!(stdout.contains(&format!("local top-{n}, gathered")), "{stdout}");
        assert!(stdout.contains("rounds      one round, seldom two\n"), "{stdout}");
    }
    spread("index_exact_ties", 3, &["--transport", "gather"]);
    spread("index_exact_ties", 3, &["--transport", "push", "--seed", "3"]);
    let stdout = spread("index_exact", 2, &[]);
    assert!(stdout.contains("tokens dealt 1 at a time, local top-1152"), "{stdout}");
    // What is asked for is done, and said to be what it is.
    let stdout = spread("index_exact", 2, &["--topn", "512"]);
    assert!(stdout.contains("local top-512"), "{stdout}");
    assert!(stdout.contains("rounds      one round, of every rank's first keys up to the top-k\n"), "{stdout}");
}

#[test]
fn on_a_gpu_if_there_is_one() {
    let Some(_) = test_devices::cuda() else { return };
    let count = gpu::Device::cuda_count().unwrap();
    let devices = (0..count.min(2)).map(|i| i.to_string()).collect::<Vec<_>>().join(",");
    for (name, _) in FIXTURES {
        let one = folder(&format!("dcp-gpu-{name}")).join("one.safetensors");
        let run = kimi_decode(["index", fixture(name).to_str().unwrap(), "--out", one.to_str().unwrap()]);
        assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
        for (ranks, interleave) in [(1, 1), (2, 4), (3, 1), (4, 64), (8, 1), (16, 1)] {
            // More ranks than launch queues gather.
            for transport in if ranks > 8 * count.min(2) { &["gather"][..] } else { &["push", "gather"] } {
                let out = folder(&format!("dcp-gpu-{name}-{ranks}-{transport}")).join("out.safetensors");
                let (count, interleave_arg) = (ranks.to_string(), interleave.to_string());
                let device = format!("cuda:{devices}");
                let run = kimi_decode([
                    "index",
                    fixture(name).to_str().unwrap(),
                    "--dcp",
                    &count,
                    "--interleave",
                    &interleave_arg,
                    "--transport",
                    transport,
                    "--device",
                    &device,
                    "--out",
                    out.to_str().unwrap(),
                ]);
                assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{name} {ranks} {transport}: {}", run.stdout);
                verify(name, &Tensors::read(&out), &Tensors::read(&one), Ownership::new(ranks, interleave).unwrap());
            }
        }
    }
}

#[test]
fn an_empty_batch_is_an_empty_result() {
    let folder = folder("dcp-empty");
    let mut tensors = Tensors::fixture("index_exact");
    for (name, (_, shape, data)) in &mut tensors.tensors {
        if name != "index_cache" {
            shape[0] = 0;
            data.clear();
        }
    }
    let (file, out) = (folder.join("empty.safetensors"), folder.join("out.safetensors"));
    tensors.write(&file);
    let run = index(&file, &["--dcp", "3", "--out", out.to_str().unwrap()]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.stdout);
    assert!(
        run.stdout.contains("nothing was launched") && run.stdout.contains("nothing to exchange"),
        "{}",
        run.stdout
    );
    let got = Tensors::read(&out);
    assert_eq!(
        (got.shape("ids"), got.shape("rows.2"), got.shape("counts.0")),
        (&[0, 2048][..], &[0, 2048][..], &[0][..])
    );
}

#[track_caller]
fn refused(run: &Run, says: &[&str]) {
    assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{says:?}: {}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "one line: {}", run.stderr);
    assert!(run.stderr.starts_with("kimi-decode: ") && !run.stderr.contains("panicked"), "{}", run.stderr);
    for text in says {
        assert!(run.stderr.contains(text), "no {text:?} in {}", run.stderr);
    }
}

#[test]
fn arguments_that_cannot_be_used() {
    let folder = folder("dcp-arguments");
    let out = folder.join("out.safetensors");
    let check = |args: &[&str], says: &[&str]| {
        let file = fixture("index_exact_ties");
        let args = [&["--out", out.to_str().unwrap()], args].concat();
        refused(&index(&file, &args), says);
        assert!(!out.exists(), "nothing is written");
    };
    for ranks in ["0", "17", "18446744073709551615"] {
        check(&["--dcp", ranks], &["--dcp", ranks]);
    }
    for ranks in ["-1", "two", "", "2.0", "18446744073709551616"] {
        check(&[&format!("--dcp={ranks}")], &["--dcp"]);
    }
    for interleave in ["0", "3", "96", "262144"] {
        check(&["--dcp", "2", "--interleave", interleave], &["--interleave", interleave]);
    }
    for n in ["0", "100", "512", "640", "2048"] {
        check(&["--dcp", "2", "--topn", n], &["--topn", n, "multiple of 128 in 128..=384"]);
    }
    check(&["--dcp", "2", "--transport", "pigeon"], &["--transport", "pigeon", "push", "gather"]);
    for alone in [&["--interleave", "4"][..], &["--topn", "128"], &["--transport", "push"]] {
        check(alone, &["--dcp"]);
    }
}

#[test]
fn devices_that_cannot_be_used() {
    let file = fixture("index_exact_ties");
    let run = |args: &[&str]| kimi_decode([&["index", file.to_str().unwrap()], args].concat());
    for device in ["cuda:", "cuda:0,", "cuda:,1", "cuda:0;1", "sim,cuda:0", "cuda:-1", "gpu"] {
        refused(
            &run(&["--dcp", "2", "--device", device]),
            &["--device", "needed sim or cuda:N, with --dcp also cuda:N,M"],
        );
    }
    refused(&run(&["--device", "cuda:0,1"]), &["names 2 devices", "--dcp"]);
    refused(&run(&["--dcp", "2", "--device", "cuda:4096,4097"]), &["cuda:4096"]);
    refused(&run(&["--dcp", "2", "--device", "cuda:0,1", "--seed", "1"]), &["--seed"]);
}

#[test]
fn steps_that_cannot_be_spread() {
    let folder = folder("dcp-steps");
    let file = folder.join("step.safetensors");
    let mut small = Tensors::fixture("index_exact_ties");
    small.tensors.retain(|name, _| !name.starts_with("expected."));
    small.key("topk", "128");
    small.write(&file);
    refused(&index(&file, &["--dcp", "2"]), &["top-k 128 leaves no local top-N"]);
    // The smallest top-k that can be.
    small.key("topk", "256");
    small.write(&file);
    let run = index(&file, &["--dcp", "2"]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.stdout);
    assert!(run.stdout.contains("local top-128"), "{}", run.stdout);
}

#[test]
fn a_wrong_expectation_is_named_all_the_same() {
    let folder = folder("dcp-wrong");
    let (file, out) = (folder.join("spoilt.safetensors"), folder.join("out.safetensors"));
    let mut tensors = Tensors::fixture("index_exact_ties");
    let first = tensors.i32s("expected.ids")[0];
    tensors.set_i32("expected.ids", 0, first + 1);
    tensors.write(&file);
    let run = index(&file, &["--dcp", "2", "--out", out.to_str().unwrap()]);
    assert_eq!(run.code, 1, "{}{}", run.stdout, run.stderr);
    assert!(run.stderr.contains("expected.ids") && run.stdout.contains("MISMATCH"), "{}{}", run.stdout, run.stderr);
    verify("index_exact_ties", &Tensors::read(&out), &whole("index_exact_ties"), Ownership::new(2, 1).unwrap());
    assert!(Path::new(&out).is_file());
}

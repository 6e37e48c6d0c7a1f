//! `ptx`, `info`, and the binary's manners.

mod common;

use std::io::Read;
use std::process::{Command, Stdio};

use common::kimi_decode;

#[track_caller]
fn refused(args: &[&str], says: &[&str]) {
    let run = kimi_decode(args);
    assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{args:?}: {}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    for text in says {
        assert!(run.stderr.contains(text), "no {text:?} in {}", run.stderr);
    }
}

#[test]
fn ptx_prints_the_specialisation_asked_for() {
    let print = |args: &[&str]| {
        let run = kimi_decode([&["ptx"], args].concat());
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{args:?}");
        run.stdout
    };
    let entry = |ptx: &str| {
        let at = ptx.find(".entry ").expect("an entry") + ".entry ".len();
        ptx[at..].split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap().to_string()
    };
    assert_eq!(entry(&print(&["score"])), "score_keys_fp8_q1_k2048_ue8m0");
    assert_eq!(entry(&print(&["score", "q=4", "topk=512", "scale=fp32"])), "score_keys_fp8_q4_k512_fp32");
    assert_eq!(entry(&print(&["score", "form=pitched", "q=2"])), "score_keys_fp8_q2_pitched_ue8m0");
    assert_eq!(
        entry(&print(&["select", "topk=1024", "page=256", "ids", "hold"])),
        "select_topk_k1024_page256_ids_hold"
    );
    assert_eq!(entry(&print(&["select", "cluster=8"])), "select_topk_k2048_page64_c8");
    assert_eq!(entry(&print(&["local_topk", "n=1152", "push=2"])), "local_topk_n1152_push2");
    assert_eq!(entry(&print(&["local_topk", "cluster=4", "push=2"])), "local_topk_n512_c4_push2");
    let merge = entry(&print(&["merge", "ranks=2", "context=65536", "gathered"]));
    assert!(merge.contains("_w2_") && merge.contains("_n1152_") && merge.contains("_gathered"), "{merge}");
    assert_eq!(
        entry(&print(&["query", "heads=6", "batch=2", "cache=nvfp4", "qc"])),
        "mla_query_c16_t2_nvfp4_page64_qc"
    );
    assert_eq!(entry(&print(&["query", "batch=64", "tile=32"])), "mla_query_tiled_t32_fp8ds_page64");
    let gather = entry(&print(&["gather", "ranks=2", "heads=32", "element=e4m3", "copy"]));
    assert!(gather.starts_with("gather_") && gather.contains("copy"), "{gather}");
    let hopper = print(&["select"]);
    assert!(hopper.contains(".target sm_90a"));
    let blackwell = print(&["select", "--target", "sm_100a"]);
    assert!(blackwell.contains(".target sm_100a") && blackwell != hopper);
    assert_eq!(print(&["select", "page=64"]), hopper, "the defaults");
}

#[test]
fn ptx_lists_kernels_and_refuses_what_it_does_not_know() {
    let list = kimi_decode(["ptx"]);
    assert_eq!(list.code, 0);
    for text in ["score", "select", "local_topk", "merge", "query", "gather", "form", "page", "hold"] {
        assert!(list.stdout.contains(text), "{}", list.stdout);
    }
    refused(&["ptx", "sort"], &["\"sort\"", "score or select or local_topk or merge or query or gather"]);
    refused(&["ptx", "score", "page=64"], &["\"page=64\"", "q=, topk=, form=, scale="]);
    refused(&["ptx", "select", "form=pitched"], &["topk=, page=, cluster=, ids, hold"]);
    refused(&["ptx", "select", "ids=1"], &["\"ids=1\"", "needed ids"]);
    refused(&["ptx", "select", "page"], &["needed page=VALUE"]);
    refused(&["ptx", "select", "page=64", "page=32"], &["page is given twice"]);
    refused(&["ptx", "select", "page=many"], &["\"many\"", "a number"]);
    refused(&["ptx", "select", "cluster=3"], &["clusters of 3", "1, 2, 4 and 8"]);
    refused(&["ptx", "select", "page=48"], &["48", "power of two"]);
    refused(&["ptx", "score", "q=9"], &["q = 9"]);
    refused(&["ptx", "local_topk", "n=2048"], &["2048"]);
    refused(&["ptx", "merge", "ranks=17"], &["17"]);
    refused(&["ptx", "query", "heads=97"], &["97"]);
    refused(&["ptx", "query", "batch=9", "tile=0"], &["9"]);
    refused(&["ptx", "query", "--target", "sm_100a"], &["kernel query: not built for sm_100a", "sm_90a"]);
    refused(&["ptx", "gather", "heads=9"], &["9"]);
    refused(&["ptx", "score", "topk=100"], &["top-k 100"]);
    refused(&["ptx", "score", "form=flat"], &["\"flat\"", "compact or pitched"]);
    refused(&["ptx", "score", "form=pitched", "topk=512"], &["topk"]);
    refused(&["ptx", "score", "--target", "sm_100a"], &["not built for sm_100a", "sm_90a"]);
    refused(&["ptx", "score", "--target", "sm_80"], &["\"sm_80\"", "sm_90a or sm_100a"]);
}

#[test]
fn info_says_what_runs_and_why_the_rest_does_not() {
    let run = kimi_decode(["info"]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    for text in
        ["CUDA ", "sim:0", "index on sim:0", "runs: ", "sm_100a", "MXFP4", "index --dcp on sim:0", "not built yet"]
    {
        assert!(run.stdout.contains(text), "no {text:?} in\n{}", run.stdout);
    }
    assert_eq!(gpu::Device::cuda_count().is_err(), run.stdout.contains("unavailable: "), "{}", run.stdout);
}

#[test]
fn a_reader_that_stops_early_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_kimi-decode"))
        .args(["ptx", "score", "q=8"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 8];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap(); // and drops the pipe
    let ended = child.wait_with_output().unwrap();
    assert_eq!((&first, ended.status.code(), &ended.stderr[..]), (b".version", Some(0), &b""[..]));
}

#[test]
fn arguments_that_cannot_be_used_are_told_in_one_line() {
    let refused = |args: &[&str], says: &[&str]| {
        refused(args, says);
        let stderr = kimi_decode(args).stderr;
        assert!(stderr.starts_with("kimi-decode: ") && stderr.ends_with("; try --help\n"), "{stderr}");
        assert!(!stderr.contains("error: ") && !stderr.contains("Usage"), "{stderr}");
    };
    refused(&[], &["a command is needed: index, query, step, ptx, info"]);
    refused(&["dance"], &["unrecognized subcommand 'dance'"]);
    refused(&["index"], &["required arguments", "<FILE>"]);
    refused(&["index", "file", "--device", "tpu"], &["'tpu'", "--device", "needed sim or cuda:N"]);
    refused(&["index", "file", "--seed", "x"], &["'x'", "--seed"]);
    refused(&["index", "file", "--ranks", "2"], &["unexpected argument '--ranks'"]);
    refused(&["index", "file", "another"], &["unexpected argument 'another'"]);
    refused(&["index", "file", "--out"], &["--out"]);
    refused(&["query", "file", "--cache", "nvfp5"], &["'nvfp5'", "[possible values: ds, fp8-dsa, fp8-k3, nvfp4]"]);
    refused(&["ptx", "--no\n\nsuch"], &["unexpected argument '--no"]);
}

#[test]
fn help_and_version_go_to_stdout() {
    for (args, says) in [
        (&["--help"][..], "Usage: kimi-decode <COMMAND>"),
        (&["help"], "Usage: kimi-decode <COMMAND>"),
        (&["index", "--help"], "Usage: kimi-decode index"),
        (&["--version"], concat!("kimi-decode ", env!("CARGO_PKG_VERSION"))),
    ] {
        let run = kimi_decode(args);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{args:?}");
        assert!(run.stdout.contains(says), "no {says:?} in\n{}", run.stdout);
    }
}

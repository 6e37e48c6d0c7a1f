//! `query --dcp`: heads spread over ranks give what one rank gives, and what cannot be spread is refused.

mod common;

use common::{Run, Tensors, fixture, folder, kimi_decode};

fn query(args: &[&str]) -> Run {
    let file = fixture("mla_query_h6");
    kimi_decode(["query", file.to_str().unwrap(), "--device", "sim"].iter().chain(args))
}

#[test]
fn every_number_of_ranks_writes_what_one_kernel_does() {
    for (form, ranks) in [("ds", "1"), ("ds", "2"), ("nvfp4", "3"), ("fp8-k3", "6")] {
        let folder = folder(&format!("query-dcp-{form}-{ranks}"));
        let [alone, spread] = ["alone", "spread"].map(|name| folder.join(name));
        let shared = ["--cache", form, "--batch", "3"];
        let run = query(&[&shared[..], &["--out", alone.to_str().unwrap()]].concat());
        assert_eq!(run.code, 0, "{}", run.stderr);
        let run = query(&[&shared[..], &["--dcp", ranks, "--out", spread.to_str().unwrap()]].concat());
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.stdout);
        let heads = 6 / ranks.parse::<usize>().unwrap();
        for text in
            [&format!("{ranks} with {heads} heads each"), "a device per rank", "2 tokens inserted, 1 skipped", "MATCH"]
        {
            assert!(run.stdout.contains(text), "no {text:?} in\n{}", run.stdout);
        }
        assert_eq!(Tensors::read(&spread), Tensors::read(&alone), "{form}, {ranks} ranks");
    }
}

#[test]
fn tiles_and_seeds_too() {
    let run = query(&["--dcp", "2", "--seed", "3"]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.stdout);
    assert!(run.stdout.contains("20 of 20 tokens") && run.stdout.contains("seed 3"), "{}", run.stdout);
}

#[test]
fn a_wrong_expectation_is_a_mismatch() {
    let mut tensors = Tensors::fixture("mla_query_h6");
    // The last head, which the last rank computes.
    let data = &mut tensors.tensors.get_mut("expected.q_bf16").unwrap().2;
    data[6 * 576 * 2 - 1] ^= 0x7F;
    let file = folder("query-dcp-wrong").join("step.safetensors");
    tensors.write(&file);
    let run = kimi_decode(["query", file.to_str().unwrap(), "--device", "sim", "--dcp", "3", "--batch", "1"]);
    assert_eq!(run.code, 1, "{}", run.stdout);
    assert!(run.stderr.contains("expected.q_bf16, token 0, head 5, column 575"), "{}", run.stderr);
}

#[test]
fn ranks_that_cannot_be_are_refused_and_nothing_is_written() {
    let out = folder("query-dcp-refused").join("out.safetensors");
    for (ranks, says) in [
        ("0", "--dcp: found 0, needed 1..=16 ranks"),
        ("17", "--dcp: found 17, needed 1..=16 ranks"),
        ("4", "--dcp: found 4, needed a divisor of 6 (metadata heads)"),
        ("two", "--dcp"),
    ] {
        let run = query(&["--dcp", ranks, "--batch", "1", "--out", out.to_str().unwrap()]);
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{ranks}");
        assert!(run.stderr.contains(says) && run.stderr.lines().count() == 1, "{ranks}: {}", run.stderr);
    }
    assert!(!out.exists(), "nothing is written");
}

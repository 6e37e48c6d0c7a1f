//! `index` on the fixtures: what matches, what is written, what a wrong expectation does.

mod common;

use common::{Run, Tensors, fixture, folder, index, kimi_decode};
use safetensors::Dtype;

const FIXTURES: [&str; 4] = ["index_exact", "index_exact_ties", "index_realtext", "index_realtext_mtp"];

#[track_caller]
fn expect_ok(run: &Run, says: &[&str]) {
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.stdout);
    for text in says {
        assert!(run.stdout.contains(text), "no {text:?} in\n{}", run.stdout);
    }
}

/// The rows of the table on stdout: row, length, count.
fn table(stdout: &str) -> Vec<[i32; 3]> {
    let rows = stdout.lines().skip_while(|line| !line.contains("threshold")).skip(1);
    rows.map_while(|line| {
        let numbers: Vec<i32> = line.split_whitespace().take(3).map_while(|word| word.parse().ok()).collect();
        numbers.try_into().ok()
    })
    .collect()
}

#[test]
fn exact_fixtures_match_bit_for_bit_and_so_does_the_output_file() {
    for name in ["index_exact", "index_exact_ties"] {
        let out = folder(&format!("exact-{name}")).join("out.safetensors");
        let run = index(&fixture(name), &["--out", out.to_str().unwrap()]);
        expect_ok(
            &run,
            &[
                "equal expected.logits bit for bit",
                "equal expected.counts, expected.ids, expected.rows bit for bit",
                "bit-exact",
            ],
        );
        let (want, got) = (Tensors::fixture(name), Tensors::read(&out));
        for tensor in ["ids", "rows", "counts", "logits"] {
            assert_eq!(got.tensors[tensor], want.tensors[&format!("expected.{tensor}")], "{name} {tensor}");
        }
        assert_eq!(got.tensors.len(), 4);
        let lengths = want.i32s("row_ends");
        let rows: Vec<[i32; 3]> = want
            .i32s("expected.counts")
            .iter()
            .enumerate()
            .map(|(row, &count)| [row as i32, lengths[row], count])
            .collect();
        assert_eq!(table(&run.stdout), rows);
    }
}

#[test]
fn realtext_fixtures_match_but_for_the_tensor_core_and_the_output_is_the_devices_own() {
    for name in ["index_realtext", "index_realtext_mtp"] {
        let out = folder(&format!("realtext-{name}")).join("out.safetensors");
        let run = index(&fixture(name), &["--out", out.to_str().unwrap()]);
        expect_ok(&run, &["selection   exact", "MATCH"]);
        let (want, got) = (Tensors::fixture(name), Tensors::read(&out));
        for tensor in ["ids", "rows", "counts", "logits"] {
            assert_eq!(got.shape(tensor), want.shape(&format!("expected.{tensor}")), "{name} {tensor}");
        }
        assert_eq!(got.i32s("counts"), want.i32s("expected.counts"));
        let (logits, width) = (got.u16s("logits"), got.shape("logits")[1]);
        for (row, &end) in want.i32s("row_ends").iter().enumerate() {
            let tail = &logits[row * width + end as usize..(row + 1) * width];
            assert!(tail.iter().all(|&bits| bits == 0), "row {row} is zero past its end");
        }
    }
}

#[test]
fn every_schedule_and_timing_gives_the_same_bits() {
    let folder = folder("seeds");
    let write = |name: &str, args: &[&str]| {
        let out = folder.join(name);
        let run = index(&fixture("index_realtext_mtp"), &[args, &["--out", out.to_str().unwrap()]].concat());
        assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
        (std::fs::read(out).unwrap(), run.stdout)
    };
    let (want, _) = write("default", &[]);
    for seed in ["1", "2"] {
        let (got, stdout) = write(seed, &["--seed", seed]);
        assert!(got == want, "seed {seed}");
        assert!(stdout.contains(&format!("completion times of seed {seed}")), "{stdout}");
    }
}

#[test]
fn a_wrong_expectation_is_named_and_the_outputs_are_written_all_the_same() {
    let folder = folder("wrong");
    let check = |name: &str, spoil: &dyn Fn(&mut Tensors), says: &[&str]| {
        let mut tensors = Tensors::fixture(name);
        spoil(&mut tensors);
        let (file, out) = (folder.join("spoilt.safetensors"), folder.join("out.safetensors"));
        tensors.write(&file);
        let run = index(&file, &["--out", out.to_str().unwrap()]);
        assert_eq!(run.code, 1, "{says:?}\n{}{}", run.stdout, run.stderr);
        assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
        for text in says {
            assert!(
                run.stdout.contains(text) && run.stderr.contains(text),
                "no {text:?} in\n{}{}",
                run.stdout,
                run.stderr
            );
        }
        let starts = |word: &str| run.stdout.lines().any(|line| line.starts_with(word));
        assert!(starts("MISMATCH") && !starts("MATCH"), "{}", run.stdout);
        std::fs::remove_file(out).expect("the outputs are written");
    };
    // Row 1 of index_exact: 2049 keys, so its slots hold all ids but one.
    check("index_exact", &|t| t.set_i32("expected.ids", 2048 + 7, 2048), &["row 1 slot 7", "expected.ids has 2048"]);
    check("index_exact", &|t| t.set_i32("expected.rows", 2 * 2048, 5), &["row 2 slot 0", "expected.rows has 5"]);
    check(
        "index_exact",
        &|t| t.set_i32("expected.counts", 3, 2048),
        &["row 3", "found 2047, expected.counts has 2048"],
    );
    check(
        "index_exact",
        &|t| t.set_u16("expected.logits", 4 * 4200 + 9, 0x3F80),
        &["row 4 key 9", "expected.logits has 1 "],
    );
    // Within a tolerance as well: a key far from the threshold, filler that is none, a logit three ulp from the exact one.
    check("index_realtext", &|t| t.set_i32("expected.ids", 2048, 1), &["row 1", "expected.ids has 1"]);
    check("index_realtext_mtp", &|t| t.set_i32("expected.ids", 512 * 4 - 1, -1), &["row 3 slot 511"]);
    let third = |t: &mut Tensors| {
        let at = 2 * t.shape("expected.logits")[1] + 100;
        let bits = t.u16s("expected.logits")[at];
        t.set_u16("expected.logits", at, bits + 3);
    };
    check("index_realtext_mtp", &third, &["row 2 key 100", "3 ulp"]);
    check("index_realtext", &|t| t.set_i32("expected.rows", 3 * 2048, 1), &["row 3 slot 0", "expected.rows has 1"]);
}

#[test]
fn a_file_without_expectations_is_run_and_written() {
    let folder = folder("plain");
    let mut tensors = Tensors::fixture("index_exact");
    let want = tensors.clone();
    tensors.tensors.retain(|name, _| !name.starts_with("expected."));
    tensors.metadata.remove("tolerance");
    let (file, out) = (folder.join("plain.safetensors"), folder.join("out.safetensors"));
    tensors.write(&file);
    expect_ok(&index(&file, &["--out", out.to_str().unwrap()]), &["nothing in the file to compare with"]);
    let got = Tensors::read(&out);
    assert_eq!(got.shape("logits"), [7, 4200], "as wide as the longest row");
    assert_eq!(got.i32s("rows"), want.i32s("expected.rows"));
}

#[test]
fn an_empty_batch_is_an_empty_result() {
    let folder = folder("empty");
    let mut tensors = Tensors::fixture("index_exact");
    for (name, (_, shape, data)) in &mut tensors.tensors {
        if name != "index_cache" {
            shape[0] = 0;
            data.clear();
        }
    }
    let (file, out) = (folder.join("empty.safetensors"), folder.join("out.safetensors"));
    tensors.write(&file);
    expect_ok(&index(&file, &["--out", out.to_str().unwrap()]), &["nothing was launched", "MATCH"]);
    // Tables of no rows may claim any width.
    let mut wide = tensors.clone();
    wide.set("index_table", Dtype::I32, &[0, 1 << 60], Vec::new());
    wide.set("kv_table", Dtype::I32, &[0, 1 << 62], Vec::new());
    wide.write(&file);
    expect_ok(&index(&file, &["--out", out.to_str().unwrap()]), &["nothing was launched", "MATCH"]);
    let got = Tensors::read(&out);
    assert_eq!(
        (got.shape("ids"), got.shape("counts"), got.shape("logits")),
        (&[0, 2048][..], &[0][..], &[0, 4200][..])
    );
}

#[test]
fn rows_without_keys_need_no_cache() {
    let folder = folder("keyless");
    let mut tensors = Tensors::fixture("index_exact");
    tensors.tensors.retain(|name, _| !name.starts_with("expected."));
    tensors.set("index_cache", Dtype::U8, &[0, 64, 132], Vec::new());
    tensors.set("index_table", Dtype::I32, &[7, 0], Vec::new());
    for (row, end) in [0, -1, -3, i32::MIN, 0, 0, 0].into_iter().enumerate() {
        tensors.set_i32("row_ends", row, end);
    }
    let (file, out) = (folder.join("keyless.safetensors"), folder.join("out.safetensors"));
    tensors.write(&file);
    expect_ok(&index(&file, &["--out", out.to_str().unwrap()]), &[]);
    let got = Tensors::read(&out);
    assert_eq!(got.i32s("counts"), [0; 7]);
    assert!(got.i32s("rows").iter().chain(&got.i32s("ids")).all(|&slot| slot == -1));
}

#[test]
fn fp32_scales_of_the_same_value_give_the_same_answer() {
    let folder = folder("fp32");
    let mut tensors = Tensors::fixture("index_exact");
    tensors.key("scale_form", "fp32");
    for page in tensors.data("index_cache").chunks_mut(8448) {
        for word in page[8192..].as_chunks_mut::<4>().0 {
            // The low byte is the exponent of a power of two; 0 (2^-127) and 255 (NaN) do not occur at keys.
            *word = (u32::from(word[0]) << 23).to_le_bytes();
        }
    }
    let file = folder.join("fp32.safetensors");
    tensors.write(&file);
    expect_ok(&index(&file, &[]), &["all 10409 equal expected.logits bit for bit", "MATCH"]);
}

#[test]
fn the_default_device_is_named_with_the_reason() {
    let file = fixture("index_exact_ties");
    let run = kimi_decode(["index", file.to_str().unwrap()]);
    expect_ok(&run, &["device      running on", "MATCH"]);
}

#[test]
fn every_fixture_is_covered() {
    let mut found: Vec<String> = std::fs::read_dir(fixture("x").parent().unwrap())
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_string())
        .filter(|name| name.starts_with("index_"))
        .collect();
    found.sort();
    assert_eq!(found, FIXTURES);
}

//! Unusable input: exit 2, one line on stderr that names file, tensor, found and needed, nothing written.

mod common;

use std::path::Path;

use common::{Run, Tensors, fixture, folder, index, kimi_decode};
use safetensors::Dtype;

/// Runs a spoilt file and checks how it is refused.
#[track_caller]
fn refused(folder: &Path, bytes: &[u8], says: &[&str]) {
    let (file, out) = (folder.join("spoilt.safetensors"), folder.join("out.safetensors"));
    std::fs::write(&file, bytes).unwrap();
    let run = index(&file, &["--out", out.to_str().unwrap()]);
    check(&run, says);
    assert!(run.stderr.contains("spoilt.safetensors"), "{}", run.stderr);
    let left: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["spoilt.safetensors"], "nothing is written");
}

#[track_caller]
fn check(run: &Run, says: &[&str]) {
    assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{says:?}: {}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "one line: {}", run.stderr);
    assert!(run.stderr.starts_with("kimi-decode: ") && !run.stderr.contains("panicked"), "{}", run.stderr);
    for text in says {
        assert!(run.stderr.contains(text), "no {text:?} in {}", run.stderr);
    }
}

#[test]
fn files_that_end_early_or_are_something_else() {
    let folder = folder("framing");
    let whole = Tensors::fixture("index_realtext_mtp").bytes();
    let header = u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let needed = format!("needs {}", whole.len());
    refused(&folder, &[], &["truncated", "found 0 bytes", "needs 8"]);
    refused(&folder, &whole[..5], &["truncated", "found 5 bytes", "needs 8"]);
    refused(&folder, &whole[..8], &["truncated", "found 8 bytes", &format!("needs {}", 8 + header)]);
    refused(&folder, &whole[..100], &["truncated", "found 100 bytes", &format!("needs {}", 8 + header)]);
    refused(&folder, &whole[..8 + header], &["truncated", &needed]);
    refused(&folder, &whole[..whole.len() - 1], &["truncated", &format!("found {} bytes", whole.len() - 1), &needed]);
    refused(&folder, &[&whole[..], &[0]].concat(), &["not a safetensors file", &needed]);
    refused(&folder, b"# a text file, longer than eight bytes\n", &["not a safetensors file"]);
    refused(&folder, &[0; 4096], &["not a safetensors file"]);
    refused(&folder, &[0xFF; 4096], &["not a safetensors file"]);
    let mut garbled = whole.clone();
    garbled[8..40].fill(b'\n');
    refused(&folder, &garbled, &["not a safetensors file"]);
    // A shape whose size overflows.
    let huge = br#"{"q":{"dtype":"U8","shape":[18446744073709551615,2],"data_offsets":[0,8]}}"#;
    let bytes = [&(huge.len() as u64).to_le_bytes()[..], huge, &[0; 8]].concat();
    refused(&folder, &bytes, &["not a safetensors file"]);
}

#[test]
fn missing_tensors_and_wrong_dtypes() {
    let folder = folder("dtypes");
    let good = Tensors::fixture("index_realtext_mtp");
    let tensors = [
        ("q", "F8_E4M3 [rows, 32, 128]"),
        ("head_weights", "BF16 [4, 32]"),
        ("index_cache", "U8 [blocks, 64, 132]"),
        ("index_table", "I32 [2, pages]"),
        ("row_ends", "I32 [4]"),
        ("kv_table", "I32 [2, pages]"),
    ];
    for (name, needed) in tensors {
        let mut spoilt = good.clone();
        spoilt.tensors.remove(name);
        refused(&folder, &spoilt.bytes(), &[&format!("tensor {name}: missing, needed {needed}")]);
    }
    for name in good.tensors.keys() {
        let mut spoilt = good.clone();
        let (dtype, shape, data) = spoilt.tensors.get_mut(name).unwrap();
        let wrong = match dtype {
            Dtype::F8_E4M3 => Dtype::F8_E5M2,
            Dtype::BF16 => Dtype::F16,
            Dtype::I32 => Dtype::F32,
            _ => Dtype::I8,
        };
        let says = format!("tensor {name}: found dtype {wrong}, needed {dtype}");
        *dtype = wrong;
        assert_eq!(shape.iter().product::<usize>() * wrong.bitsize() / 8, data.len());
        refused(&folder, &spoilt.bytes(), &[&says]);
    }
    // Another width of the same kind.
    let mut spoilt = good.clone();
    spoilt.set("row_ends", Dtype::I64, &[4], vec![0; 32]);
    refused(&folder, &spoilt.bytes(), &["tensor row_ends: found dtype I64, needed I32"]);
}

#[test]
fn wrong_shapes_alone_and_beside_each_other() {
    let folder = folder("shapes");
    let good = Tensors::fixture("index_realtext_mtp");
    let bytes_of = |dtype: Dtype, shape: &[usize]| vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
    let cases: [(&str, Dtype, &[usize], &str); 16] = [
        ("q", Dtype::F8_E4M3, &[4, 4096], "[rows, 32, 128]"),
        ("q", Dtype::F8_E4M3, &[4, 32, 64], "[rows, 32, 128]"),
        ("q", Dtype::F8_E4M3, &[5, 32, 128], "rows a multiple of q_per_request = 2"),
        ("q", Dtype::F8_E4M3, &[6, 32, 128], "needed [6, 32]"), // one row per weight row is missing now
        ("head_weights", Dtype::BF16, &[4, 31], "needed [4, 32]"),
        ("head_weights", Dtype::BF16, &[5, 32], "needed [4, 32]"),
        ("row_ends", Dtype::I32, &[3], "needed [4]"),
        ("row_ends", Dtype::I32, &[4, 1], "needed [4]"),
        ("index_cache", Dtype::U8, &[117, 8448], "[blocks, 64, 132]"),
        ("index_cache", Dtype::U8, &[117, 64, 68], "[blocks, 64, 132]"),
        ("index_table", Dtype::I32, &[4, 73], "needed [2, pages]"),
        ("kv_table", Dtype::I32, &[1, 19], "needed [2, pages]"),
        ("expected.logits", Dtype::BF16, &[4, 4499], "width at least 4500"),
        ("expected.ids", Dtype::I32, &[4, 511], "needed [4, 512]"),
        ("expected.rows", Dtype::I32, &[3, 512], "needed [4, 512]"),
        ("expected.counts", Dtype::I32, &[5], "needed [4]"),
    ];
    for (name, dtype, shape, needed) in cases {
        let mut spoilt = good.clone();
        spoilt.set(name, dtype, shape, bytes_of(dtype, shape));
        let named = if needed == "needed [6, 32]" { "head_weights" } else { name };
        let found = if named == name { format!("found shape {shape:?}") } else { String::new() };
        refused(&folder, &spoilt.bytes(), &[&format!("tensor {named}: "), &found, needed]);
    }
    let mut spoilt = good.clone();
    spoilt.key("q_per_request", "1");
    spoilt.set("q", Dtype::F8_E4M3, &[1025, 32, 128], vec![0; 1025 * 4096]);
    refused(&folder, &spoilt.bytes(), &["tensor q: found shape [1025, 32, 128]", "at most 1024 requests"]);
}

#[test]
fn missing_and_unusable_metadata() {
    let folder = folder("metadata");
    let good = Tensors::fixture("index_realtext_mtp");
    for key in ["q_per_request", "topk", "kv_page", "kv_block_rows", "tolerance"] {
        let mut spoilt = good.clone();
        spoilt.metadata.remove(key);
        refused(&folder, &spoilt.bytes(), &[&format!("metadata {key}: missing, needed")]);
    }
    let cases = [
        ("q_per_request", "0", "needed 1..=8"),
        ("q_per_request", "9", "needed 1..=8"),
        ("q_per_request", "two", "needed 1..=8"),
        ("topk", "100", "a multiple of 128 in 128..=4096"),
        ("topk", "0", "a multiple of 128"),
        ("topk", "4224", "a multiple of 128"),
        ("topk", "-512", "a multiple of 128"),
        ("topk", "512.0", "a multiple of 128"),
        ("kv_page", "48", "a power of two"),
        ("kv_page", "0", "a power of two"),
        ("kv_page", "99999999999999999999", "a power of two"),
        ("kv_block_rows", "255", "needed 256 (kv_page)"),
        ("kv_block_rows", "2147483648", "to 2147483647"),
        ("kv_block_rows", "", "needed 256 (kv_page)"),
        ("tolerance", "close enough", "bit-exact, or N BF16 ulp per logit"),
        ("tolerance", "-1 BF16 ulp per logit", "bit-exact, or N BF16 ulp per logit"),
        ("scale_form", "bf16", "ue8m0 or fp32"),
    ];
    for (key, value, needed) in cases {
        let mut spoilt = good.clone();
        spoilt.key(key, value);
        refused(&folder, &spoilt.bytes(), &[&format!("metadata {key}: found {value:?}"), needed]);
    }
    // q that fits the rows no longer.
    let mut spoilt = good.clone();
    spoilt.key("q_per_request", "3");
    refused(&folder, &spoilt.bytes(), &["tensor q: found shape [4, 32, 128]", "q_per_request = 3"]);
    // A top-k other than the expected tensors'.
    let mut spoilt = good.clone();
    spoilt.key("topk", "1024");
    refused(&folder, &spoilt.bytes(), &["tensor expected.ids: found shape [4, 512], needed [4, 1024]"]);
    // A value as long as the file is shown in part, on one line.
    let mut spoilt = good.clone();
    spoilt.key("topk", &"9\n".repeat(100_000));
    refused(&folder, &spoilt.bytes(), &["metadata topk: found"]);
    // No metadata at all.
    let mut spoilt = good;
    spoilt.metadata.clear();
    refused(&folder, &spoilt.bytes(), &["metadata q_per_request: missing"]);
}

#[test]
fn row_ends_and_block_ids_that_the_tables_and_caches_do_not_hold() {
    let folder = folder("tables");
    let good = Tensors::fixture("index_realtext_mtp");
    let spoil = |change: &dyn Fn(&mut Tensors), says: &[&str]| {
        let mut spoilt = good.clone();
        change(&mut spoilt);
        refused(&folder, &spoilt.bytes(), says);
    };
    // index_table has 73 pages: 4672 keys; kv_table 19 pages of 256: 4864.
    spoil(&|t| t.set_i32("row_ends", 1, 4673), &["row_ends, row 1: found 4673, needed at most 4672", "index_table"]);
    spoil(&|t| t.set_i32("row_ends", 1, i32::MAX), &["row_ends, row 1: found 2147483647"]);
    let narrow = |t: &mut Tensors| t.set("kv_table", Dtype::I32, &[2, 17], vec![0; 2 * 17 * 4]);
    spoil(&narrow, &["row_ends, row 0: found 4499, needed at most 4352", "kv_table"]);
    let narrow = |t: &mut Tensors| t.set("index_table", Dtype::I32, &[2, 70], vec![0; 2 * 70 * 4]);
    spoil(&narrow, &["row_ends, row 0: found 4499, needed at most 4480", "index_table"]);
    // 117 blocks in the cache; request 1 needs 41 pages of row 1's 73.
    spoil(&|t| t.set_i32("index_table", 5, 117), &["index_table, request 0, column 5: found block 117, needed 0..117"]);
    spoil(&|t| t.set_i32("index_table", 73 + 40, -1), &["index_table, request 1, column 40: found block -1"]);
    spoil(&|t| t.set_i32("kv_table", 3, -7), &["kv_table, request 0, column 3: found block -7, needed 0.."]);
    spoil(
        &|t| t.set_i32("kv_table", 19, 1 << 20),
        &["kv_table, request 1, column 0: found block 1048576, needed 0..1048575"],
    );
    // An expectation that a tolerance cannot be applied to.
    spoil(&|t| drop(t.tensors.remove("expected.logits")), &["tensor expected.logits: missing"]);
    spoil(&|t| drop(t.tensors.remove("expected.ids")), &["tensor expected.ids: missing"]);
}

#[test]
fn files_folders_devices_and_outputs_that_cannot_be_used() {
    let folder = folder("places");
    let file = fixture("index_exact");
    let file = file.to_str().unwrap();
    let nowhere = folder.join("nowhere.safetensors");
    check(&index(&nowhere, &[]), &["nowhere.safetensors: cannot be read"]);
    check(&index(&folder, &[]), &["places: is a folder, needed a regular file"]);
    check(&kimi_decode(["query", folder.to_str().unwrap()]), &["places: is a folder, needed a regular file"]);
    let out = folder.join("no").join("out.safetensors");
    check(
        &kimi_decode(["index", file, "--device", "sim", "--out", out.to_str().unwrap()]),
        &["--out", "there is no folder"],
    );
    check(
        &kimi_decode(["index", file, "--device", "sim", "--out", folder.to_str().unwrap()]),
        &["--out", "is a folder"],
    );
    check(&kimi_decode(["index", file, "--device", "cuda:0", "--seed", "1"]), &["--seed", "cuda:0"]);
    check(&kimi_decode(["index", file, "--device", "cuda:4096"]), &["cuda:4096: "]);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn pipes_and_devices_are_refused_unread() {
    let folder = folder("unreadable");
    let (fifo, link) = (folder.join("fifo"), folder.join("link"));
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    std::os::unix::fs::symlink("fifo", &link).unwrap();
    // Nobody writes to the pipe and zeros never end: reading would not return.
    for path in [&fifo, &link, Path::new("/dev/zero")] {
        for command in ["index", "query"] {
            check(&kimi_decode([command, path.to_str().unwrap()]), &["device, needed a regular file"]);
        }
    }
}

#[test]
fn names_that_occur_twice() {
    let folder = folder("twice");
    let whole = Tensors::fixture("index_realtext_mtp").bytes();
    let header = u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let text = std::str::from_utf8(&whole[8..8 + header]).unwrap().trim_end();
    let with = |text: String| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &whole[8 + header..]].concat();
    // The same bytes once more, as another dtype.
    let at = text.find("\"kv_table\":").unwrap();
    let entry = &text[at..=at + text[at..].find('}').unwrap()];
    let again = entry.replace("I32", "F32");
    for text in [format!("{},{again}}}", &text[..text.len() - 1]), format!("{{{again},{}", &text[1..])] {
        refused(&folder, &with(text), &["the header names kv_table twice"]);
    }
    let again = text.replacen("\"topk\":", "\"topk\":\"128\",\"topk\":", 1);
    refused(&folder, &with(again), &["the header names topk twice"]);
    assert_eq!(with(text.to_string()).len(), whole.len() + text.len() - header);
}

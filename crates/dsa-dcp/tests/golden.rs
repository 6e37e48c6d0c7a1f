//! The PTX of the merge and the gather at their canonical shapes, so that a change of the builder or of a shared helper shows in review.
//!
//! `BLESS=1 cargo test -p dsa-dcp --test golden` rewrites the files. Line information is left out: code that moves does
//! not change it.

use std::path::Path;

use dsa_core::Ownership;
use dsa_dcp::mailbox::gather;
use dsa_dcp::merge::build;
use dsa_dcp::{ExchangeShape, GatherShape, MailboxShape, MergeShape, QueryElement};
use ptx::Target;

/// Compares with the golden text, or rewrites it.
fn check(name: &str, ptx: &str) {
    let got = without_lines(ptx);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(format!("{name}.ptx"));
    if std::env::var_os("BLESS").is_some_and(|v| v == "1") {
        std::fs::write(&file, &got).unwrap();
    }
    let want = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let differs = got.lines().zip(want.lines()).position(|(got, want)| got != want);
    let line = differs.or((got != want).then(|| got.lines().count().min(want.lines().count())));
    assert_eq!(line, None, "{}: the first line (from 0) that differs", file.display());
}

/// The text without `.file` and `.loc`.
fn without_lines(ptx: &str) -> String {
    let kept = ptx.lines().filter(|line| !line.trim_start().starts_with(".loc") && !line.starts_with(".file"));
    kept.flat_map(|line| [line, "\n"]).collect()
}

#[test]
fn the_canonical_merge_prints_its_golden_text() {
    let exchange = ExchangeShape::new(Ownership::new(8, 1).unwrap(), 64, 512, 2048, 1 << 20).unwrap();
    let shape = MergeShape::new(exchange, 1, 64).unwrap().with_ids(true);
    check(&shape.name(), &build(&shape, Target::Sm90a).unwrap().ptx());
}

#[test]
fn the_canonical_gather_prints_its_golden_text() {
    let mailbox = MailboxShape::new(8, 12, 128, 64, QueryElement::Bf16).unwrap();
    let shape = GatherShape::new(mailbox).with_copy(true);
    check(&shape.name(), &gather::build(&shape, Target::Sm90a).unwrap().ptx());
}

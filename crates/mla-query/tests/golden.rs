//! The PTX of the kernel at its canonical shapes, so that a change of the builder or of a shared helper shows in review.
//!
//! `BLESS=1 cargo test -p mla-query --test golden` rewrites the files. Line information is left out: code that moves does
//! not change them.

use std::path::Path;

use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_dcp::{MailboxShape, QueryElement};
use mla_query::{MlaShape, Publication, query};
use ptx::Target;

/// The text without `.file` and `.loc`.
fn without_lines(ptx: &str) -> String {
    let kept = ptx.lines().filter(|line| !line.trim_start().starts_with(".loc") && !line.starts_with(".file"));
    kept.flat_map(|line| [line, "\n"]).collect()
}

#[test]
fn every_canonical_kernel_prints_its_golden_text() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let bless = std::env::var_os("BLESS").is_some_and(|v| v == "1");
    let shape = |heads, batch, form| MlaShape::new(heads, batch, form, 64).unwrap().with_qc(true);
    let mailbox = MailboxShape::new(8, 12, 128, 64, QueryElement::Bf16).unwrap();
    let publishing = |multicast| {
        shape(12, 4, MlaCacheForm::Fp8Ds)
            .with_tile(None)
            .unwrap()
            .with_publication(Publication { mailbox, multicast })
            .unwrap()
    };
    for shape in [
        shape(6, 1, MlaCacheForm::Fp8Ds),
        shape(12, 1, MlaCacheForm::Nvfp4Ds),
        shape(6, 16, MlaCacheForm::Fp8Divide),
        publishing(false),
        publishing(true),
    ] {
        let got = without_lines(&query::build(&shape, Target::Sm90a).unwrap().ptx());
        let file = folder.join(format!("{}.ptx", shape.name()));
        if bless {
            std::fs::write(&file, &got).unwrap();
        }
        let want = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let differs = got.lines().zip(want.lines()).position(|(got, want)| got != want);
        let line = differs.or((got != want).then(|| got.lines().count().min(want.lines().count())));
        assert_eq!(line, None, "{}: the first line (from 0) that differs", file.display());
    }
}

//! The layers that `ARCHITECTURE.md` promises, checked.

use std::fs;
use std::path::{Path, PathBuf};

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Name and folder of every crate.
fn crates() -> Vec<(String, PathBuf)> {
    let folders = fs::read_dir(workspace().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let named = folders.filter(|path| path.join("Cargo.toml").is_file());
    named.map(|path| (path.file_name().unwrap().to_str().unwrap().to_string(), path)).collect()
}

#[test]
fn only_gpu_has_unsafe_code() {
    for (name, path) in crates() {
        for root in
            ["lib.rs", "main.rs"].map(|file| path.join("src").join(file)).into_iter().filter(|root| root.is_file())
        {
            let text = fs::read_to_string(&root).unwrap();
            assert_eq!(text.contains("#![forbid(unsafe_code)]"), name != "gpu", "{}", root.display());
        }
    }
}

#[test]
fn only_gpu_depends_on_the_cuda_bindings() {
    for (name, path) in crates() {
        let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap();
        assert_eq!(manifest.lines().any(|line| line.starts_with("cudarc")), name == "gpu", "{name}");
    }
}

/// The crates, each above those that may use it.
const LAYERS: [&str; 8] = ["ptx", "ptx-sim", "gpu", "dsa-core", "dsa-kernels", "dsa-dcp", "mla-query", "kimi-decode"];

/// Crates that only tests use.
const FOR_TESTS: [&str; 2] = ["ptxas", "test-devices"];

#[test]
fn dependencies_point_up_the_list_of_crates() {
    for (name, path) in crates() {
        let Some(own) = LAYERS.iter().position(|layer| *layer == name) else {
            assert!(FOR_TESTS.contains(&name.as_str()), "{name}: a new crate needs its place in the layers");
            continue;
        };
        let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap();
        let dependencies = manifest.split("[dependencies]").nth(1).unwrap_or_default().split("\n[").next().unwrap();
        for line in dependencies.lines() {
            let dependency = line.split(['=', ' ']).next().unwrap();
            assert!(!FOR_TESTS.contains(&dependency), "{name} uses {dependency}");
            if let Some(other) = LAYERS.iter().position(|layer| *layer == dependency) {
                assert!(other < own, "{name} uses {dependency}");
            }
        }
    }
}

/// Every Rust file below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let below = |path: PathBuf| if path.is_dir() { sources(&path) } else { vec![path] };
    entries.flat_map(below).filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// The argument types of the kernels that a text declares: `pub struct FooArgs / FooParams {`.
fn declared_args(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.trim().strip_prefix("pub struct ")?.split_once(" / ").map(|(args, _)| args))
}

#[test]
fn every_kernel_is_assembled() {
    // `assembly/arguments.rs` packs each kind of arguments, and fails if no specialisation that it assembles takes them.
    let assembly = fs::read_to_string(workspace().join("tests/assembly/arguments.rs")).unwrap();
    let mut kernels = 0;
    for (name, path) in crates() {
        for source in sources(&path.join("src")) {
            let text = fs::read_to_string(&source).unwrap();
            for args in declared_args(&text) {
                assert!(
                    assembly.contains(&format!("{args} {{")),
                    "{}: tests/assembly/arguments.rs knows no kernel of {name} that takes {args}",
                    source.display()
                );
                kernels += 1;
            }
        }
    }
    assert!(kernels >= 7, "found {kernels} kernels");
}

#[test]
fn arguments_are_found_where_they_are_declared() {
    let text = "/// pub struct A / B {\n    pub struct FooArgs / FooParams {\npub struct Plain {";
    assert_eq!(declared_args(text).collect::<Vec<_>>(), ["FooArgs"]);
}

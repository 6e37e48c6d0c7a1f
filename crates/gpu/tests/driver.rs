//! Machines without a usable driver: a typed error, never a panic. Each case runs in a child process whose library
//! path starts with a directory that holds the case's `libcuda`.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::Command;

use gpu::{Device, Error};

/// Makes the child test print what it found.
const CHILD: &str = "GPU_TEST_DRIVER_CASE";

/// Not a test of its own: what a child process does.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let error = match Device::cuda(0) {
        Err(error) => error,
        Ok(device) => panic!("no case has a usable device, found {device:?}"),
    };
    let kind = match &error {
        Error::NoDriver { .. } => "NoDriver",
        Error::DriverTooOld { .. } => "DriverTooOld",
        Error::NoDevice { .. } => "NoDevice",
        _ => "other",
    };
    println!("ERROR {kind}: {error}");
    assert!(error.is_unavailable());
    // Asking again gives the same answer, and the simulator is at hand.
    assert_eq!(Device::cuda(0).unwrap_err().to_string(), error.to_string());
    let (device, why) = Device::best();
    assert!(device.info().simulated && why.contains("simulator"), "{why}");
}

/// Symbols this crate needs, from its own list.
fn symbols() -> Vec<String> {
    let source = include_str!("../src/cuda/driver.rs");
    let list = source.split("const SYMBOLS").nth(1).and_then(|s| s.split("];").next()).expect("the list is there");
    let named: Vec<String> =
        list.split("\n    c\"").skip(1).map(|s| s[..s.find('"').expect("closed")].to_string()).collect();
    assert!(named.len() > 40, "{named:?}");
    named.into_iter().chain(["cuEventElapsedTime".to_string()]).collect()
}

/// A `libcuda.so` with `symbols`, each returning `result`, of driver level `level`; `None` without a compiler.
fn library(case: &str, symbols: &[String], result: u32, level: i32) -> Option<PathBuf> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(case);
    std::fs::create_dir_all(&directory).expect("the target directory is writable");
    let mut source = String::new();
    for name in symbols {
        let body = match name.as_str() {
            "cuDriverGetVersion" => format!("(level: *mut i32) -> u32 {{ unsafe {{ *level = {level} }}; 0 }}"),
            _ => format!("() -> u32 {{ {result} }}"),
        };
        source += &format!("#[unsafe(no_mangle)] pub extern \"C\" fn {name}{body}\n");
    }
    let file = directory.join("libcuda.rs");
    std::fs::write(&file, source).expect("the target directory is writable");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut rustc = Command::new(compiler);
    rustc.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "cuda", "-C", "panic=abort"]);
    let built = match rustc.arg("--out-dir").arg(&directory).arg(&file).output() {
        Ok(built) => built,
        Err(error) => {
            eprintln!("SKIPPED: no rustc to make a library with ({error})");
            return None;
        }
    };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    assert!(directory.join("libcuda.so").exists());
    Some(directory)
}

/// What the child says with `directory` in front of the library path.
fn outcome(directory: &Path) -> String {
    let mut child = Command::new(std::env::current_exe().expect("this test has a path"));
    child.args(["child", "--exact", "--nocapture"]).env(CHILD, "1").env("LD_LIBRARY_PATH", directory);
    let output = child.output().expect("the child runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !errors.contains("panicked"), "{text}\n{errors}");
    let line = text.lines().find_map(|l| l.split_once("ERROR ")).unwrap_or_else(|| panic!("{text}\n{errors}"));
    line.1.to_string()
}

#[test]
fn a_machine_without_libcuda_is_a_typed_error() {
    match Device::cuda(0) {
        Err(error) => assert!(error.is_unavailable(), "{error}"),
        Ok(device) => eprintln!("SKIPPED: this machine has {device:?}"),
    }
}

#[test]
fn the_toolkit_stub_is_no_driver() {
    let stub_library = 34;
    let Some(directory) = library("stub", &symbols(), stub_library, 13_000) else { return };
    let said = outcome(&directory);
    assert!(said.starts_with("NoDriver") && said.contains("stub"), "{said}");
}

#[test]
fn a_library_that_only_has_the_name_is_no_driver() {
    let Some(directory) = library("empty", &["unrelated".to_string()], 0, 0) else { return };
    let said = outcome(&directory);
    assert!(said.starts_with("NoDriver"), "{said}");
}

#[test]
fn a_driver_without_the_newest_functions_is_too_old_and_names_one() {
    let mut symbols = symbols();
    symbols.retain(|s| s != "cuTensorMapEncodeTiled");
    let Some(directory) = library("gap", &symbols, 0, 12_040) else { return };
    let said = outcome(&directory);
    assert!(said.starts_with("DriverTooOld") && said.contains("cuTensorMapEncodeTiled"), "{said}");
}

#[test]
fn a_driver_of_an_older_level_is_too_old_and_names_both_levels() {
    let Some(directory) = library("old", &symbols(), 0, 11_080) else { return };
    let said = outcome(&directory);
    assert!(said.starts_with("DriverTooOld") && said.contains("11.8") && said.contains("12.4"), "{said}");
}

#[test]
fn a_driver_without_devices_is_no_device() {
    let no_device = 100;
    let Some(directory) = library("headless", &symbols(), no_device, 13_000) else { return };
    let said = outcome(&directory);
    assert!(said.starts_with("NoDevice"), "{said}");
}

//! The `--out` file.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use dsa_core::DecodeStep;
use kimi_decode::check::Answer;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::Failure;

/// Writes `ids`, `rows` `[rows, topk]`, `counts` `[rows]` (I32) and `logits` (BF16 `[rows, width]`, zero past each row's
/// end). The file appears whole or not at all.
pub fn write(path: &Path, step: &DecodeStep, answer: &Answer, width: usize) -> Result<(), Failure> {
    let mut logits = vec![0u16; step.rows * width];
    for (row, values) in answer.logits.iter().enumerate() {
        logits[row * width..][..values.len()].copy_from_slice(values);
    }
    let i32s = |values: &[i32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let tensors = [
        ("ids", Dtype::I32, vec![step.rows, step.topk], i32s(&answer.ids)),
        ("rows", Dtype::I32, vec![step.rows, step.topk], i32s(&answer.rows)),
        ("counts", Dtype::I32, vec![step.rows], i32s(&answer.counts)),
        ("logits", Dtype::BF16, vec![step.rows, width], logits.iter().flat_map(|bits| bits.to_le_bytes()).collect()),
    ];
    write_tensors(path, &tensors)
}

/// A tensor to write: name, dtype, shape, little-endian bytes.
pub type Tensor = (&'static str, Dtype, Vec<usize>, Vec<u8>);

/// Writes tensors. The file appears whole or not at all.
pub fn write_tensors(path: &Path, tensors: &[Tensor]) -> Result<(), Failure> {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        let view = TensorView::new(*dtype, shape.clone(), data);
        (*name, view.expect("the shape's elements were just written"))
    });
    let bytes = safetensors::serialize(views, None).map_err(|error| at(path, error))?;
    replace(path, &bytes)
}

/// Refuses a path that cannot be written, before time is spent on what to write.
pub fn check(path: &Path) -> Result<(), Failure> {
    if path.is_dir() {
        return Err(at(path, "is a folder, needed a file"));
    }
    if !folder(path).is_dir() {
        return Err(at(path, format!("there is no folder {}", folder(path).display())));
    }
    Ok(())
}

/// Writes beside the target, then renames over it.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let mut name = OsString::from(".");
    name.push(path.file_name().ok_or_else(|| at(path, "names no file"))?);
    name.push(format!(".{}.partial", std::process::id()));
    let partial = folder(path).join(name);
    let written = std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path));
    written.map_err(|error| {
        // What is left of a failed write; it may not even exist.
        let _ = std::fs::remove_file(&partial);
        at(path, error)
    })
}

fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

fn at(path: &Path, error: impl std::fmt::Display) -> Failure {
    Failure::Unusable(format!("--out {}: {error}", path.display()))
}

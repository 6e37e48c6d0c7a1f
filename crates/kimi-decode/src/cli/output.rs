//! The `--out` file.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use dsa_core::DecodeStep;
use kimi_decode::check::Answer;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::Failure;

/// A tensor to write: name, dtype, shape, little-endian bytes.
pub type Tensor<N = &'static str> = (N, Dtype, Vec<usize>, Vec<u8>);

/// A file that will appear, whole, when it is written; dropped unwritten, it leaves nothing behind.
#[derive(Debug)]
pub struct Output {
    /// The path asked for.
    path: PathBuf,
    /// The file to replace: `path` without links.
    target: PathBuf,
    /// The file written to, beside the target.
    partial: PathBuf,
    file: File,
}

impl Output {
    /// Makes sure that `path` can be written, before time is spent on what to write.
    ///
    /// # Errors
    /// A path that names one of `inputs`, something else than a regular file, or a place where no file can be made.
    pub fn create(path: &Path, inputs: &[&Path]) -> Result<Self, Failure> {
        let target = target(path)?;
        let same = |input: &&&Path| input.canonicalize().is_ok_and(|input| input == target);
        if let Some(input) = inputs.iter().find(same) {
            return Err(at(path, format!("is the input {}", input.display())));
        }
        // Of a length of its own: the longest name that a folder takes is a valid target.
        let partial = folder(&target).join(format!(".kimi-decode-{}.partial", std::process::id()));
        let file = OpenOptions::new().write(true).create_new(true).open(&partial);
        let file = file.map_err(|error| at(path, format!("cannot be written: {error}")))?;
        Ok(Output { path: path.to_path_buf(), target, partial, file })
    }

    /// Writes the tensors and puts the file in its place.
    ///
    /// # Errors
    /// What the file system refuses.
    pub fn write<N: AsRef<str>>(mut self, tensors: &[Tensor<N>]) -> Result<(), Failure> {
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            let view = TensorView::new(*dtype, shape.clone(), data);
            (name.as_ref(), view.expect("the shape's elements were just written"))
        });
        let bytes = safetensors::serialize(views, None).map_err(|error| at(&self.path, error))?;
        let written = self.file.write_all(&bytes).and_then(|()| std::fs::rename(&self.partial, &self.target));
        written.map_err(|error| at(&self.path, error))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // It is gone if it was renamed.
        let _ = std::fs::remove_file(&self.partial);
    }
}

/// The tensors of a step's answer: `ids`, `rows` `[rows, topk]`, `counts` `[rows]` (I32) and `logits` (BF16
/// `[rows, width]`, zero past each row's end).
pub fn tensors(step: &DecodeStep, answer: &Answer, width: usize) -> [Tensor; 4] {
    let mut logits = vec![0u16; step.rows * width];
    for (row, values) in answer.logits.iter().enumerate() {
        logits[row * width..][..values.len()].copy_from_slice(values);
    }
    let i32s = |values: &[i32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    [
        ("ids", Dtype::I32, vec![step.rows, step.topk], i32s(&answer.ids)),
        ("rows", Dtype::I32, vec![step.rows, step.topk], i32s(&answer.rows)),
        ("counts", Dtype::I32, vec![step.rows], i32s(&answer.counts)),
        ("logits", Dtype::BF16, vec![step.rows, width], logits.iter().flat_map(|bits| bits.to_le_bytes()).collect()),
    ]
}

/// The regular file that `path` names or would name, without links.
fn target(path: &Path) -> Result<PathBuf, Failure> {
    let resolve = |path: &Path| path.canonicalize().map_err(|error| at(path, error));
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(at(path, "is a folder, needed a file")),
        Ok(found) if !found.is_file() => Err(at(path, "is no regular file")),
        Ok(_) => {
            // A file that may not be written is not replaced either.
            OpenOptions::new().write(true).open(path).map_err(|error| at(path, error))?;
            resolve(path)
        }
        Err(error) if error.kind() != ErrorKind::NotFound => Err(at(path, error)),
        Err(_) if path.is_symlink() => Err(at(path, "is a link to nothing")),
        Err(_) => {
            // `Path` looks past a separator at the end.
            let bytes = path.as_os_str().as_encoded_bytes();
            let name = path.file_name().filter(|_| !bytes.ends_with(b"/") && !bytes.ends_with(b"/."));
            let name = name.ok_or_else(|| at(path, "names no file"))?;
            let folder = folder(path);
            if !folder.is_dir() {
                return Err(at(path, format!("there is no folder {}", folder.display())));
            }
            Ok(resolve(folder)?.join(name))
        }
    }
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn at(path: &Path, error: impl std::fmt::Display) -> Failure {
    Failure::Unusable(format!("--out {}: {error}", path.display()))
}

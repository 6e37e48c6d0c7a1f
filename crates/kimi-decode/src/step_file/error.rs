//! What makes a file unusable.

use std::path::PathBuf;

use dsa_core::ShapeError;
use safetensors::Dtype;

use super::reader::shape_text;

/// A file that is no usable decode step.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", .file.display())]
pub struct StepFileError {
    /// The file.
    pub file: PathBuf,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with a file: one line that names the tensor or metadata key, what was found and what is needed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(std::io::Error),
    /// Not a file that can be read from its beginning to its end.
    #[error("is {found}, needed a regular file")]
    NotRegular {
        /// What it is.
        found: &'static str,
    },
    /// The file ends before its data does.
    #[error("truncated: found {found} bytes, its header needs {needed}")]
    Truncated {
        /// Bytes of the file.
        found: u64,
        /// Bytes that its header announces.
        needed: u64,
    },
    /// The file is something else.
    #[error("not a safetensors file: {reason}")]
    NotSafetensors {
        /// Why not.
        reason: String,
    },
    /// A name that its header gives to two tensors, or to two metadata values.
    #[error("the header names {name} twice")]
    NamedTwice {
        /// The name, or its beginning.
        name: String,
    },
    /// A tensor that is not there.
    #[error("tensor {tensor}: missing, needed {needed}")]
    MissingTensor {
        /// The tensor.
        tensor: &'static str,
        /// Its dtype and shape, or why it is needed.
        needed: String,
    },
    /// A tensor of another dtype.
    #[error("tensor {tensor}: found dtype {found}, needed {needed}")]
    WrongDtype {
        /// The tensor.
        tensor: &'static str,
        /// Its dtype.
        found: Dtype,
        /// The dtype needed.
        needed: Dtype,
    },
    /// A tensor of another shape, on its own or beside the others and the metadata.
    #[error("tensor {tensor}: found shape {}, needed {needed}", shape_text(.found))]
    WrongShape {
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// The shape needed.
        needed: String,
    },
    /// A metadata key that is not there.
    #[error("metadata {key}: missing, needed {needed}")]
    MissingMetadata {
        /// The key.
        key: &'static str,
        /// Its values.
        needed: String,
    },
    /// A metadata value that cannot be used.
    #[error("metadata {key}: found {found:?}, needed {needed}")]
    BadMetadata {
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
        /// The values that can be used.
        needed: String,
    },
    /// A row that ends past what a table holds.
    #[error("tensor row_ends, row {row}: found {found}, needed at most {needed}: {why}")]
    RowEnd {
        /// The row.
        row: usize,
        /// Its end.
        found: i32,
        /// The largest end that fits.
        needed: usize,
        /// What limits it.
        why: String,
    },
    /// A block id, among those that a row needs, which names no block.
    #[error("tensor {tensor}, request {request}, column {column}: found block {found}, needed 0..{blocks}")]
    BlockId {
        /// The table.
        tensor: &'static str,
        /// Its row.
        request: usize,
        /// Its column.
        column: usize,
        /// The entry.
        found: i32,
        /// Blocks that can be named.
        blocks: usize,
    },
    /// Sizes that are outside the limits.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

impl Problem {
    pub(super) fn bad_metadata(key: &'static str, found: &str, needed: impl Into<String>) -> Self {
        Problem::BadMetadata { key, found: shown(found), needed: needed.into() }
    }

    pub(super) fn named_twice(name: &str) -> Self {
        Problem::NamedTwice { name: shown(name) }
    }
}

/// Enough to recognise it: a text may be as large as the file.
fn shown(text: &str) -> String {
    const SHOWN: usize = 60;
    text.chars().take(SHOWN).collect()
}

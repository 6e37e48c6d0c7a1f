//! Typed access to a safetensors file.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorView};
use safetensors::{Dtype, SafeTensorError, SafeTensors};

use super::error::Problem;
use super::header;

/// Bytes of the header's length, which a file starts with.
const LENGTH_BYTES: usize = 8;

/// The bytes of a regular file. A pipe or a device might never end.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Problem> {
    let found = std::fs::metadata(path).map_err(Problem::Unreadable)?;
    if found.is_dir() {
        return Err(Problem::NotRegular { found: "a folder" });
    }
    if !found.is_file() {
        return Err(Problem::NotRegular { found: "a pipe, socket or device" });
    }
    std::fs::read(path).map_err(Problem::Unreadable)
}

/// A parsed file.
pub(super) struct Reader<'a> {
    tensors: SafeTensors<'a>,
    metadata: HashMap<String, String>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Result<Self, Problem> {
        let (header_bytes, header) = SafeTensors::read_metadata(bytes).map_err(|error| diagnose(bytes, &error))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| diagnose(bytes, &error))?;
        // safetensors keeps the last of two, and which one is meant nobody knows.
        if let Some(name) = header::named_twice(&bytes[LENGTH_BYTES..LENGTH_BYTES + header_bytes]) {
            return Err(Problem::named_twice(&name));
        }
        Ok(Reader { tensors, metadata: header.metadata().clone().unwrap_or_default() })
    }

    /// A metadata value.
    pub(super) fn key(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    /// A number in the metadata.
    pub(super) fn number(
        &self,
        key: &'static str,
        needed: String,
        accept: impl Fn(usize) -> bool,
    ) -> Result<usize, Problem> {
        let Some(text) = self.key(key) else { return Err(Problem::MissingMetadata { key, needed }) };
        match text.parse() {
            Ok(number) if accept(number) => Ok(number),
            _ => Err(Problem::bad_metadata(key, text, needed)),
        }
    }

    /// A tensor that must be there; `needed` describes the shapes that `accept` takes.
    pub(super) fn tensor(
        &self,
        tensor: &'static str,
        dtype: Dtype,
        needed: &str,
        accept: impl Fn(&[usize]) -> bool,
    ) -> Result<TensorView<'a>, Problem> {
        self.optional(tensor, dtype, needed, accept)?
            .ok_or_else(|| Problem::MissingTensor { tensor, needed: format!("{dtype} {needed}") })
    }

    /// A tensor that may be absent.
    pub(super) fn optional(
        &self,
        tensor: &'static str,
        dtype: Dtype,
        needed: &str,
        accept: impl Fn(&[usize]) -> bool,
    ) -> Result<Option<TensorView<'a>>, Problem> {
        let Ok(view) = self.tensors.tensor(tensor) else { return Ok(None) };
        if view.dtype() != dtype {
            return Err(Problem::WrongDtype { tensor, found: view.dtype(), needed: dtype });
        }
        if !accept(view.shape()) {
            let (found, needed) = (view.shape().to_vec(), needed.to_string());
            return Err(Problem::WrongShape { tensor, found, needed });
        }
        Ok(Some(view))
    }
}

/// A file that ends too early, or one that is something else?
fn diagnose(bytes: &[u8], error: &SafeTensorError) -> Problem {
    let found = bytes.len() as u64;
    let reason = || Problem::NotSafetensors { reason: error.to_string() };
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Problem::Truncated { found, needed: LENGTH_BYTES as u64 };
    };
    let header_bytes = u64::from_le_bytes(*length);
    match error {
        // The header's first byte tells a cut header from a file that happens to start with a plausible length.
        SafeTensorError::InvalidHeaderLength if matches!(rest, [] | [b'{', ..]) => {
            Problem::Truncated { found, needed: header_bytes.saturating_add(LENGTH_BYTES as u64) }
        }
        SafeTensorError::MetadataIncompleteBuffer => {
            let header = usize::try_from(header_bytes).ok().and_then(|n| rest.get(..n));
            let Some(Ok(header)) = header.map(serde_json::from_slice::<Metadata>) else { return reason() };
            let needed = LENGTH_BYTES as u64 + header_bytes + header.data_len() as u64;
            if found < needed {
                Problem::Truncated { found, needed }
            } else {
                Problem::NotSafetensors { reason: format!("found {found} bytes, its header needs {needed}") }
            }
        }
        _ => reason(),
    }
}

/// The elements of an I32 tensor.
pub(super) fn i32s(view: &TensorView) -> Vec<i32> {
    view.data().as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes)).collect()
}

/// The bits of a BF16 tensor.
pub(super) fn u16s(view: &TensorView) -> Vec<u16> {
    view.data().as_chunks().0.iter().map(|&bytes| u16::from_le_bytes(bytes)).collect()
}

/// A shape as `[rows, 32]`.
pub(super) fn shape_text(shape: &[usize]) -> String {
    format!("{shape:?}")
}

//! What the suites share.
#![allow(dead_code)] // each suite uses a part

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// The path of a fixture.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(format!("{name}.safetensors"))
}

/// An empty folder of this test's own.
pub fn folder(test: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// How a run of the binary ended.
pub struct Run {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// Runs the binary.
pub fn kimi_decode<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Run {
    let Output { status, stdout, stderr } =
        Command::new(env!("CARGO_BIN_EXE_kimi-decode")).args(args).output().expect("the binary runs");
    Run {
        code: status.code().expect("the binary ended by itself"),
        stdout: String::from_utf8(stdout).unwrap(),
        stderr: String::from_utf8(stderr).unwrap(),
    }
}

/// Runs `index FILE --device sim` with further arguments.
pub fn index(file: &Path, args: &[&str]) -> Run {
    let file = file.to_str().unwrap();
    kimi_decode(["index", file, "--device", "sim"].iter().chain(args))
}

/// A safetensors file that can be taken apart and changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensors {
    pub tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    pub metadata: HashMap<String, String>,
}

impl Tensors {
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        Tensors {
            tensors: tensors
                .iter()
                .map(|(name, view)| (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
                .collect(),
            metadata: header.metadata().clone().unwrap_or_default(),
        }
    }

    pub fn fixture(name: &str) -> Self {
        Self::read(&fixture(name))
    }

    pub fn bytes(&self) -> Vec<u8> {
        let views = self
            .tensors
            .iter()
            .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
        safetensors::serialize(views, Some(self.metadata.clone())).unwrap()
    }

    pub fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).unwrap();
    }

    pub fn set(&mut self, name: &str, dtype: Dtype, shape: &[usize], data: Vec<u8>) {
        self.tensors.insert(name.into(), (dtype, shape.to_vec(), data));
    }

    pub fn shape(&self, name: &str) -> &[usize] {
        &self.tensors[name].1
    }

    pub fn data(&mut self, name: &str) -> &mut Vec<u8> {
        &mut self.tensors.get_mut(name).unwrap().2
    }

    pub fn i32s(&self, name: &str) -> Vec<i32> {
        self.tensors[name].2.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes)).collect()
    }

    pub fn u16s(&self, name: &str) -> Vec<u16> {
        self.tensors[name].2.as_chunks().0.iter().map(|&bytes| u16::from_le_bytes(bytes)).collect()
    }

    pub fn set_i32(&mut self, name: &str, at: usize, value: i32) {
        self.data(name)[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
    }

    pub fn set_u16(&mut self, name: &str, at: usize, value: u16) {
        self.data(name)[2 * at..2 * at + 2].copy_from_slice(&value.to_le_bytes());
    }

    pub fn key(&mut self, key: &str, value: &str) {
        self.metadata.insert(key.into(), value.into());
    }
}

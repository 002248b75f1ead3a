//! A tensor in an open file: cheap to clone, without lifetimes, readable from any thread.
//! Folders and adapters return it, so that a reader can keep one per weight.
//! Left out: the data itself.

use std::path::Path;
use std::sync::Arc;

use crate::content_hash::ContentHash;
use crate::element::Element;
use crate::safetensors::{SafetensorsError, SafetensorsFile, TensorEntry};

#[derive(Clone, Debug)]
pub struct TensorRef {
    file: Arc<SafetensorsFile>,
    position: usize,
    seen: Option<Seen>,
}

/// The hash of what is read of a tensor, and where the tensor begins in what is hashed.
#[derive(Clone, Debug)]
struct Seen {
    hash: Arc<ContentHash>,
    begin: u64,
}

impl TensorRef {
    /// The tensor at this position of `file.tensors()`.
    pub fn new(file: &Arc<SafetensorsFile>, position: usize) -> TensorRef {
        assert!(position < file.tensors().len(), "no tensor {position}");
        TensorRef { file: Arc::clone(file), position, seen: None }
    }

    /// The same tensor; what is read of it goes into `hash`, from `begin` on.
    pub fn hashed(self, hash: &Arc<ContentHash>, begin: u64) -> TensorRef {
        TensorRef { seen: Some(Seen { hash: Arc::clone(hash), begin }), ..self }
    }

    pub fn entry(&self) -> &TensorEntry {
        &self.file.tensors()[self.position]
    }

    pub fn name(&self) -> &str {
        &self.entry().name
    }

    pub fn element(&self) -> Element {
        self.entry().element
    }

    pub fn shape(&self) -> &[usize] {
        &self.entry().shape
    }

    pub fn bytes(&self) -> u64 {
        self.entry().bytes
    }

    pub fn elements(&self) -> u64 {
        self.bytes() / self.element().size_bytes() as u64
    }

    pub fn file_path(&self) -> &Path {
        self.file.path()
    }

    /// See [`SafetensorsFile::read_at`].
    pub fn read_at(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), SafetensorsError> {
        self.file.read_at(self.entry(), byte_offset, destination)?;
        if let Some(seen) = &self.seen {
            seen.hash.add(seen.begin + byte_offset, destination);
        }
        Ok(())
    }
}

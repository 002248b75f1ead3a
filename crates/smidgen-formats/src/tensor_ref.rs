//! A handle to a tensor in an open safetensors file.
//! It is cheap to clone, has no lifetime and can be read from any thread, so a reader can keep one per
//! weight.
//! Left out: the data, which stays on disk until it is read.

use std::path::Path;
use std::sync::Arc;

use crate::content_hash::ContentHash;
use crate::element::Element;
use crate::safetensors::{SafetensorsError, SafetensorsFile, TensorEntry};

#[derive(Clone, Debug)]
pub struct TensorRef {
    file: Arc<SafetensorsFile>,
    position: usize,
    /// A hash of all bytes that are read, and where the tensor begins in the hashed content.
    hash: Option<(Arc<ContentHash>, u64)>,
}

impl TensorRef {
    /// The tensor at this position of `file.tensors()`.
    pub fn new(file: &Arc<SafetensorsFile>, position: usize) -> TensorRef {
        assert!(position < file.tensors().len(), "no tensor {position}");
        TensorRef { file: Arc::clone(file), position, hash: None }
    }

    /// The same tensor, which adds every byte that is read to `hash`. `begin` is where the tensor begins in
    /// the hashed content.
    pub fn hashed(self, hash: &Arc<ContentHash>, begin: u64) -> TensorRef {
        TensorRef { hash: Some((Arc::clone(hash), begin)), ..self }
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
        if let Some((hash, begin)) = &self.hash {
            hash.add(begin + byte_offset, destination);
        }
        Ok(())
    }
}

/// Reads from `byte_offset` on of several tensors laid end to end. Returns the part of `destination` behind
/// the last one.
pub(crate) fn read_end_to_end<'a>(
    tensors: &[&TensorRef],
    byte_offset: u64,
    destination: &'a mut [u8],
) -> Result<&'a mut [u8], SafetensorsError> {
    let (mut offset, mut rest) = (byte_offset, destination);
    for tensor in tensors {
        let bytes = tensor.bytes().saturating_sub(offset).min(rest.len() as u64) as usize;
        let (part, behind) = rest.split_at_mut(bytes);
        if !part.is_empty() {
            tensor.read_at(offset, part)?;
        }
        (offset, rest) = (offset.saturating_sub(tensor.bytes()), behind);
    }
    Ok(rest)
}

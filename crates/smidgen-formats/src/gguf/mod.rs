//! GGUF, the model format of llama.cpp: one file with metadata, tokenizer and block-quantized weights.
//! A file is opened for reads by offset: the header is read and checked, the data stays on disk. With the first file of a
//! model that is split over several (`split.rs`), the others are opened too.
//! Left out: big-endian files, version 1, and decoding blocks.

pub mod architecture;
pub mod config;
pub mod header;
mod keys;
pub mod model;
pub mod model_problem;
pub mod problem;
pub mod rope_divisors;
mod split;
pub mod tensor;
pub mod tensor_names;
pub mod value;
pub mod write;

use std::collections::HashMap;
use std::path::Path;

use header::{Header, read_header};
pub use problem::{GgufError, GgufProblem};
use split::open_others;
pub use tensor::GgufTensor;
pub use value::{Metadata, MetadataProblem, Value};

use crate::open_file::{InFile, OpenFile};

#[derive(Debug)]
pub struct GgufFile {
    file: OpenFile,
    /// The other files of a split model, in their order.
    others: Vec<OpenFile>,
    alignment: u64,
    data_offset: u64,
    metadata: Metadata,
    tensors: Vec<GgufTensor>,
    by_name: HashMap<String, usize>,
}

impl GgufFile {
    /// Reads and checks the header; no tensor data is read.
    pub fn open(path: &Path) -> Result<GgufFile, GgufError> {
        open_checked(path).map_err(|problem| InFile { path: path.to_path_buf(), problem })
    }

    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.file.bytes + self.others.iter().map(|file| file.bytes).sum::<u64>()
    }

    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Where the tensor data begins.
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Frees the metadata, whose vocabulary takes more memory than all tensor descriptions together.
    /// Call it when the config and the tokenizer have been read and only weights are still needed.
    pub fn release_metadata(&mut self) {
        self.metadata = Metadata::default();
    }

    /// All tensors, in the order of the headers.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// The position in `tensors()` of the tensor with this name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.position(name).map(|position| &self.tensors[position])
    }

    /// Fills `destination` from `byte_offset` of a tensor of this file.
    ///
    /// # Panics
    /// If the range reaches beyond the tensor.
    pub fn read_at(
        &self,
        tensor: &GgufTensor,
        byte_offset: u64,
        destination: &mut [u8],
    ) -> Result<(), GgufError> {
        let file = tensor.file.checked_sub(1).map_or(&self.file, |other| &self.others[other]);
        file.read_tensor((&tensor.name, tensor.file_offset, tensor.bytes), byte_offset, destination)
    }
}

fn open_checked(path: &Path) -> Result<GgufFile, GgufProblem> {
    let file = OpenFile::open(path)?;
    let Header { metadata, mut tensors, alignment, data_offset } = read_header(&file)?;
    let others = open_others(path, &metadata, &mut tensors)?;
    let by_name =
        tensors.iter().enumerate().map(|(position, tensor)| (tensor.name.clone(), position)).collect();
    Ok(GgufFile { file, others, alignment, data_offset, metadata, tensors, by_name })
}

#[cfg(test)]
mod tests;

//! Writes a GGUF file, version 3: metadata, then tensors in the given order.
//! A callback writes one tensor at a time, so only its own buffer is in memory.
//! The file is written completely or not at all. Offsets are multiples of `general.alignment`, or of 32
//! without that key.
//! Left out: converting elements, and splitting a model into several files.

use std::collections::HashSet;
use std::io::{self, Write};
use std::path::Path;

use smidgen_ir::Storage;
use thiserror::Error;

use super::header::{MAGIC, alignment_of};
use super::tensor::{piece_of, type_of_storage};
use super::value::{Metadata, append_string};
use crate::exact_writer::write_exactly;
use crate::whole_file::{WriteFileError, write_whole};

const VERSION: u32 = 3;

/// A tensor to be written. Dimensions are row-major: the last one is contiguous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensorSpec {
    pub name: String,
    pub dims: Vec<usize>,
    pub storage: Storage,
}

#[derive(Debug, Error)]
pub enum WriteGgufError {
    #[error("tensor `{name}` is listed twice")]
    DuplicateName { name: String },
    #[error(
        "tensor `{name}` of dimensions {dims:?} cannot be written; 1 to 4 dimensions of at least 1 are allowed"
    )]
    Dimensions { name: String, dims: Vec<usize> },
    #[error("tensor `{name}` cannot be written as `{storage}`, which GGUF does not have")]
    Storage { name: String, storage: Storage },
    #[error(
        "tensor `{name}` has rows of {columns} elements, not a multiple of the `{storage}` block size {block}"
    )]
    PartialBlock { name: String, columns: usize, block: u64, storage: Storage },
    #[error("the tensors up to `{name}` take more than 2^64 bytes")]
    TooManyBytes { name: String },
    #[error("`general.alignment` is not a power of two from 8 to 2^30")]
    Alignment,
    #[error(transparent)]
    File(#[from] WriteFileError),
}

/// Writes the file completely or not at all. `source` is called with positions in `tensors`, in order, and
/// writes exactly the bytes of that tensor.
pub fn write_gguf(
    path: &Path,
    metadata: &Metadata,
    tensors: &[GgufTensorSpec],
    mut source: impl FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> Result<(), WriteGgufError> {
    let alignment = alignment_of(metadata).ok_or(WriteGgufError::Alignment)?;
    let layout = lay_out(tensors, alignment)?;
    let mut header = header_bytes(metadata, tensors, &layout);
    header.resize(header.len().next_multiple_of(alignment as usize), 0);
    Ok(write_whole(path, |writer| {
        writer.write_all(&header)?;
        for (position, (tensor, Placed { bytes, .. })) in tensors.iter().zip(&layout).enumerate() {
            write_exactly(writer, &tensor.name, *bytes, |out| source(position, out))?;
            let padding = bytes.next_multiple_of(alignment) - bytes;
            io::copy(&mut io::Read::take(io::repeat(0), padding), writer)?;
        }
        Ok(())
    })?)
}

struct Placed {
    /// From the start of the data.
    offset: u64,
    bytes: u64,
}

fn lay_out(tensors: &[GgufTensorSpec], alignment: u64) -> Result<Vec<Placed>, WriteGgufError> {
    let mut names = HashSet::new();
    let mut offset = 0_u64;
    let mut layout = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let name = || tensor.name.clone();
        if !names.insert(tensor.name.as_str()) {
            return Err(WriteGgufError::DuplicateName { name: name() });
        }
        if !(1..=4).contains(&tensor.dims.len()) || tensor.dims.contains(&0) {
            return Err(WriteGgufError::Dimensions { name: name(), dims: tensor.dims.clone() });
        }
        let storage = tensor.storage;
        if type_of_storage(storage).is_none() {
            return Err(WriteGgufError::Storage { name: name(), storage });
        }
        let (block, block_bytes) = piece_of(storage);
        let columns = tensor.dims[tensor.dims.len() - 1];
        if !(columns as u64).is_multiple_of(block) {
            return Err(WriteGgufError::PartialBlock { name: name(), columns, block, storage });
        }
        let rows = &tensor.dims[..tensor.dims.len() - 1];
        let bytes = rows
            .iter()
            .try_fold(columns as u64 / block, |blocks, &extent| blocks.checked_mul(extent as u64))
            .and_then(|blocks| blocks.checked_mul(block_bytes));
        let end = bytes.and_then(|bytes| offset.checked_add(bytes)?.checked_next_multiple_of(alignment));
        let (Some(bytes), Some(end)) = (bytes, end) else {
            return Err(WriteGgufError::TooManyBytes { name: name() });
        };
        layout.push(Placed { offset, bytes });
        offset = end;
    }
    Ok(layout)
}

fn header_bytes(metadata: &Metadata, tensors: &[GgufTensorSpec], layout: &[Placed]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&(metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata.iter() {
        append_string(key, &mut bytes);
        bytes.extend_from_slice(&value.kind().number().to_le_bytes());
        value.append_to(&mut bytes);
    }
    for (tensor, placed) in tensors.iter().zip(layout) {
        append_string(&tensor.name, &mut bytes);
        bytes.extend_from_slice(&(tensor.dims.len() as u32).to_le_bytes());
        for &extent in tensor.dims.iter().rev() {
            bytes.extend_from_slice(&(extent as u64).to_le_bytes());
        }
        let (number, _) = type_of_storage(tensor.storage).expect("the storage was checked by `lay_out`");
        bytes.extend_from_slice(&number.to_le_bytes());
        bytes.extend_from_slice(&placed.offset.to_le_bytes());
    }
    bytes
}

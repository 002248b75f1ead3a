//! A weight of a base model: plain, 4-bit with a quantization state, fp8 with scales, or GGUF blocks.
//!
//! It is read in one of two ways: as bytes of its own storage, in any range, or as rows of f32, to be
//! converted, quantized or merged. Only this file undoes what GGUF converters did: it reorders rows and
//! subtracts what was added.

use crate::bnb::{BnbError, BnbWeight};
use crate::content_hash::ContentHash;
use crate::element::Element;
use crate::fp8::Fp8Weight;
use crate::gguf::tensor_names::{RowOrder, TensorSource};
use crate::gguf::{GgufError, GgufFile, GgufTensor};
use crate::load::{LoadError, read_tensor_into};
use crate::packed::PackedWeight;
use crate::tensor_ref::{TensorRef, read_end_to_end};
use joined::{HeldMatrix, JoinedWeight};
use smidgen_ir::quant;
use smidgen_ir::{DType, Storage};
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

pub mod joined;

#[derive(Debug, Error)]
pub enum WeightError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Bnb(#[from] BnbError),
    #[error(transparent)]
    Gguf(#[from] GgufError),
}

#[derive(Clone, Debug)]
pub enum Weight {
    Plain(TensorRef),
    Bnb(BnbWeight),
    Fp8(Fp8Weight),
    Packed(PackedWeight),
    Gguf(GgufWeight),
    Merged(MergedWeight),
    Joined(Box<JoinedWeight>),
}

/// A plain weight and a LoRA in the same checkpoint, read as base + scale·B·A, rounded to the type of the
/// base.
#[derive(Clone, Debug)]
pub struct MergedWeight {
    pub base: TensorRef,
    pub a: TensorRef, // (R, K)
    pub b: TensorRef, // (N, R)
    pub scale: f32,
}

impl MergedWeight {
    /// The parts, in the order in which they are hashed.
    fn parts(&self) -> [&TensorRef; 3] {
        [&self.base, &self.a, &self.b]
    }
}

/// A tensor of a GGUF file under its Hugging Face name.
#[derive(Clone, Debug)]
pub struct GgufWeight {
    file: Arc<GgufFile>,
    source: TensorSource,
    /// A hash of all bytes that are read, and where the tensor begins in the hashed content.
    hash: Option<(Arc<ContentHash>, u64)>,
}

impl GgufWeight {
    pub fn new(file: &Arc<GgufFile>, source: &TensorSource) -> GgufWeight {
        GgufWeight { file: Arc::clone(file), source: source.clone(), hash: None }
    }

    fn tensor(&self) -> &GgufTensor {
        &self.file.tensors()[self.source.position]
    }

    /// Whether the converter added something that is subtracted again. The result is f32, because a narrower
    /// type would round it. Vectors stored in blocks are left as they are, because no model uses them.
    fn is_shifted(&self) -> bool {
        self.source.added != 0.0 && self.tensor().storage.plain().is_some()
    }

    /// Reads bytes in the file's storage, with rows in the order of the checkpoint.
    fn read_at(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), GgufError> {
        if self.source.rows == RowOrder::AsStored {
            return self.read_in_file(byte_offset, destination);
        }
        // A vector is a column: each of its elements is a row.
        let row_bytes = self.tensor().bytes / self.tensor().dims[0] as u64;
        let (mut rest, mut offset) = (destination, byte_offset);
        while !rest.is_empty() {
            let (row, in_row) = (offset / row_bytes, offset % row_bytes);
            let length = ((row_bytes - in_row) as usize).min(rest.len());
            let (part, behind) = rest.split_at_mut(length);
            let file_row = self.source.rows.file_row(row as usize) as u64;
            self.read_in_file(file_row * row_bytes + in_row, part)?;
            (rest, offset) = (behind, offset + length as u64);
        }
        Ok(())
    }

    /// Reads bytes in the order of the file.
    fn read_in_file(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), GgufError> {
        self.file.read_at(self.tensor(), byte_offset, destination)?;
        if let Some((hash, begin)) = &self.hash {
            hash.add(begin + byte_offset, destination);
        }
        Ok(())
    }
}

/// The type in which decoded quantized weights are written.
pub const DECODED: Element = Element::F16;

impl Weight {
    /// The type in which the weight is written to an unquantized model: its own, or [`DECODED`].
    pub fn written_element(&self) -> Element {
        match self.storage() {
            Some(Storage::Plain(DType::F32)) => Element::F32,
            Some(Storage::Plain(DType::Bf16)) => Element::Bf16,
            Some(Storage::Plain(DType::F16)) => Element::F16,
            _ => DECODED,
        }
    }

    /// The same weight, which adds every byte that is read from its file to `hash`.
    pub fn hashed(self, hash: &Arc<ContentHash>) -> Weight {
        self.hashed_from(hash, 0)
    }

    /// As [`Weight::hashed`], for a part of a joined weight that begins at `begin` of the hashed content.
    pub(crate) fn hashed_from(self, hash: &Arc<ContentHash>, begin: u64) -> Weight {
        match self {
            Weight::Plain(tensor) => Weight::Plain(tensor.hashed(hash, begin)),
            Weight::Bnb(weight) => Weight::Bnb(weight.hashed(hash, begin)),
            Weight::Fp8(weight) => Weight::Fp8(weight.hashed(hash, begin)),
            Weight::Packed(weight) => Weight::Packed(weight.hashed(hash, begin)),
            Weight::Gguf(weight) => {
                Weight::Gguf(GgufWeight { hash: Some((Arc::clone(hash), begin)), ..weight })
            }
            Weight::Joined(weight) => Weight::Joined(Box::new(weight.hashed(hash, begin))),
            Weight::Merged(MergedWeight { base, a, b, scale }) => {
                let (begin_a, begin_b) = (begin + base.bytes(), begin + base.bytes() + a.bytes());
                let (base, a, b) =
                    (base.hashed(hash, begin), a.hashed(hash, begin_a), b.hashed(hash, begin_b));
                Weight::Merged(MergedWeight { base, a, b, scale })
            }
        }
    }

    /// Size of the weight in its file.
    pub fn file_bytes(&self) -> u64 {
        let (rows, columns) = self.rows_and_columns();
        match self {
            Weight::Plain(tensor) => tensor.bytes(),
            Weight::Bnb(weight) => weight.storage.bytes(rows, columns) as u64,
            Weight::Fp8(weight) => weight.file_bytes(),
            Weight::Packed(weight) => weight.file_bytes(),
            Weight::Gguf(weight) => weight.tensor().bytes,
            Weight::Joined(weight) => weight.file_bytes(),
            Weight::Merged(merged) => merged.parts().iter().map(|part| part.bytes()).sum(),
        }
    }

    /// Reads the whole weight to hash its bytes.
    pub fn read_hash(&self) -> Result<String, WeightError> {
        let (hash, bytes) = (Arc::new(ContentHash::default()), self.file_bytes());
        let mut piece = vec![0; (16 << 10).min(bytes) as usize];
        let hashed = self.clone().hashed(&hash);
        let mut offset = 0;
        while offset < bytes {
            let length = (bytes - offset).min(piece.len() as u64) as usize;
            hashed.read_file(offset, &mut piece[..length])?;
            offset += length as u64;
        }
        Ok(hash.finish(bytes).expect("every byte was read once"))
    }

    /// Fills `destination` with bytes of the weight as they are in the file.
    pub(crate) fn read_file(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), WeightError> {
        match self {
            Weight::Gguf(weight) => weight.read_in_file(byte_offset, destination)?,
            Weight::Joined(weight) => weight.read_file(byte_offset, destination)?,
            Weight::Merged(merged) => {
                read_end_to_end(&merged.parts(), byte_offset, destination).map_err(LoadError::from)?;
            }
            Weight::Fp8(weight) => weight.read_file(byte_offset, destination).map_err(LoadError::from)?,
            Weight::Packed(weight) => weight.read_file(byte_offset, destination).map_err(LoadError::from)?,
            Weight::Plain(_) | Weight::Bnb(_) => self.read_stored(byte_offset, destination)?,
        }
        Ok(())
    }

    /// Whether both have the same shape and the same numbers. Reads until they differ.
    pub fn equals(&self, other: &Weight) -> Result<bool, WeightError> {
        if self.shape() != other.shape() {
            return Ok(false);
        }
        if self.element_name() != other.element_name() {
            return self.has_numbers_of(other);
        }
        let bytes = self.file_bytes();
        let mut pieces = [(); 2].map(|()| vec![0; (1 << 20).min(bytes) as usize]);
        let mut offset = 0;
        while offset < bytes && offset <= other.file_bytes() {
            let length = (bytes - offset).min(1 << 20) as usize;
            for (weight, piece) in [self, other].into_iter().zip(&mut pieces) {
                weight.read_file(offset, &mut piece[..length])?;
            }
            if pieces[0][..length] != pieces[1][..length] {
                return Ok(false);
            }
            offset += length as u64;
        }
        Ok(true)
    }

    /// [`Weight::equals`] for weights in different formats.
    fn has_numbers_of(&self, other: &Weight) -> Result<bool, WeightError> {
        let (rows, columns) = self.rows_and_columns();
        let mut readers = [WeightRows::open(self)?, WeightRows::open(other)?];
        let at_once = ((1 << 18) / columns.max(1)).max(1);
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            let mut numbers = [(); 2].map(|()| vec![0.0; count * columns]);
            for (reader, numbers) in readers.iter_mut().zip(&mut numbers) {
                reader.read(first, count, numbers)?;
            }
            if numbers[0] != numbers[1] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub fn shape(&self) -> &[usize] {
        match self {
            Weight::Plain(tensor) => tensor.shape(),
            Weight::Bnb(weight) => &weight.shape,
            Weight::Fp8(weight) => weight.shape(),
            Weight::Packed(weight) => weight.shape(),
            Weight::Gguf(weight) => &weight.tensor().dims,
            Weight::Merged(merged) => merged.base.shape(),
            Weight::Joined(weight) => weight.shape(),
        }
    }

    pub fn file_path(&self) -> &Path {
        match self {
            Weight::Plain(tensor) => tensor.file_path(),
            Weight::Bnb(weight) => weight.file_path(),
            Weight::Fp8(weight) => weight.file_path(),
            Weight::Packed(weight) => weight.file_path(),
            Weight::Gguf(weight) => weight.file.path(),
            Weight::Merged(merged) => merged.base.file_path(),
            Weight::Joined(weight) => weight.sources()[0].weight.file_path(),
        }
    }

    /// The experts whose matrices it holds, if it holds those of several.
    pub fn experts(&self) -> Option<usize> {
        match self {
            Weight::Joined(weight) => Some(weight.experts()),
            Weight::Packed(weight) => weight.experts(),
            Weight::Plain(_) | Weight::Bnb(_) | Weight::Fp8(_) | Weight::Gguf(_) | Weight::Merged(_) => None,
        }
    }

    /// Its storage, or `None` if no device can read it.
    pub fn storage(&self) -> Option<Storage> {
        match self {
            Weight::Plain(tensor) => tensor.element().dtype().map(Storage::Plain),
            Weight::Bnb(weight) => Some(weight.storage),
            Weight::Fp8(weight) => Some(weight.storage()),
            Weight::Packed(weight) => Some(weight.storage()),
            Weight::Gguf(weight) if weight.is_shifted() => Some(Storage::F32),
            Weight::Gguf(weight) => Some(weight.tensor().storage),
            Weight::Merged(merged) => merged.base.element().dtype().map(Storage::Plain),
            Weight::Joined(weight) => weight.storage(),
        }
    }

    /// Its element type, for messages.
    pub fn element_name(&self) -> String {
        match self {
            Weight::Plain(tensor) => tensor.element().to_string(),
            Weight::Bnb(weight) => weight.storage.to_string(),
            Weight::Fp8(weight) => weight.storage().to_string(),
            Weight::Packed(weight) => weight.storage().to_string(),
            Weight::Gguf(weight) => weight.tensor().storage.to_string(),
            Weight::Merged(merged) => merged.base.element().to_string(),
            Weight::Joined(weight) => weight.sources()[0].weight.element_name(),
        }
    }

    /// Rows and columns as `Storage` counts them: a vector is a column.
    pub fn rows_and_columns(&self) -> (usize, usize) {
        match self.shape() {
            [] => (1, 1),
            [rows, rest @ ..] => (*rows, rest.iter().product()),
        }
    }

    /// Fills `destination` with bytes of the weight in its own storage.
    pub fn read_stored(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), WeightError> {
        match self {
            Weight::Plain(tensor) => Ok(tensor.read_at(byte_offset, destination).map_err(LoadError::from)?),
            Weight::Bnb(weight) => Ok(weight.read_stored(byte_offset, destination)?),
            Weight::Fp8(weight) => {
                Ok(weight.read_stored(byte_offset, destination).map_err(LoadError::from)?)
            }
            Weight::Packed(weight) => {
                Ok(weight.read_stored(byte_offset, destination).map_err(LoadError::from)?)
            }
            Weight::Gguf(weight) if !weight.is_shifted() => Ok(weight.read_at(byte_offset, destination)?),
            Weight::Joined(weight) if weight.is_read_as_stored() => {
                weight.read_stored(byte_offset, destination)
            }
            Weight::Gguf(_) | Weight::Merged(_) | Weight::Joined(_) => {
                let storage = self.storage().unwrap_or(Storage::F32);
                WeightRows::open(self)?.read_as(storage, byte_offset as usize, destination)
            }
        }
    }

    /// Whether bytes of its own storage can be read in small pieces without computing them.
    pub fn is_read_as_stored(&self) -> bool {
        match self {
            Weight::Merged(_) => false,
            Weight::Joined(weight) => weight.is_read_as_stored(),
            Weight::Plain(_) | Weight::Bnb(_) | Weight::Fp8(_) | Weight::Packed(_) | Weight::Gguf(_) => true,
        }
    }
}

/// Reads a weight row by row as f32. It holds all stored bytes of a weight whose scales cover several rows;
/// of other weights it holds only what it reads at a time.
#[derive(Debug)]
pub struct WeightRows<'a> {
    weight: &'a Weight,
    columns: usize,
    /// All bytes of a 4-bit or fp8 weight; empty for others.
    whole: Vec<u8>,
    scratch: Vec<u8>,
    /// A of a merged weight, as f32.
    factor: Vec<f32>,
    /// A matrix of a joined weight whose rows cannot be read one by one.
    held: HeldMatrix,
}

impl<'a> WeightRows<'a> {
    pub fn open(weight: &'a Weight) -> Result<WeightRows<'a>, WeightError> {
        let (rows, columns) = weight.rows_and_columns();
        let mut whole = Vec::new();
        if let (Weight::Bnb(_) | Weight::Fp8(_), Some(storage)) = (weight, weight.storage()) {
            whole.resize(storage.bytes(rows, columns), 0);
            weight.read_stored(0, &mut whole)?;
        }
        let (scratch, factor, held) = (Vec::new(), Vec::new(), HeldMatrix::default());
        let mut rows = WeightRows { weight, columns, whole, scratch, factor, held };
        if let Weight::Merged(merged) = weight {
            rows.factor.resize(merged.a.shape().iter().product(), 0.0);
            read_floats(&merged.a, 0, &mut rows.factor, &mut rows.scratch)?;
        }
        Ok(rows)
    }

    /// Fills `destination` with the weight converted to a plain `storage`, from `byte_offset` on. The range
    /// may begin and end inside an element. Temporarily holds the rows that it covers.
    ///
    /// # Panics
    /// If `storage` is not f32, bf16 or f16.
    pub fn read_as(
        &mut self,
        storage: Storage,
        byte_offset: usize,
        destination: &mut [u8],
    ) -> Result<(), WeightError> {
        let row_bytes = storage.bytes(1, self.columns);
        let first = byte_offset / row_bytes;
        let rows = (byte_offset + destination.len()).div_ceil(row_bytes) - first;
        let mut floats = vec![0.0; rows * self.columns];
        self.read(first, rows, &mut floats)?;
        let bytes = quant::encode(storage, rows, self.columns, &floats).expect("the storage is plain");
        destination.copy_from_slice(&bytes[byte_offset - first * row_bytes..][..destination.len()]);
        Ok(())
    }

    /// Fills `target` with `rows` rows from `first_row` on.
    pub fn read(&mut self, first_row: usize, rows: usize, target: &mut [f32]) -> Result<(), WeightError> {
        let columns = self.columns;
        assert_eq!(target.len(), rows * columns, "{rows} rows of {columns}");
        match self.weight {
            Weight::Plain(tensor) => {
                read_floats(tensor, (first_row * columns) as u64, target, &mut self.scratch)?;
            }
            Weight::Merged(merged) => {
                read_floats(&merged.base, (first_row * columns) as u64, target, &mut self.scratch)?;
                let rank = self.factor.len() / columns.max(1);
                let mut b = vec![0.0; rows * rank];
                read_floats(&merged.b, (first_row * rank) as u64, &mut b, &mut self.scratch)?;
                for (target, b) in target.chunks_exact_mut(columns).zip(b.chunks_exact(rank)) {
                    for (share, a) in b.iter().zip(self.factor.chunks_exact(columns)) {
                        let share = merged.scale * share;
                        target.iter_mut().zip(a).for_each(|(number, a)| *number += share * a);
                    }
                }
            }
            Weight::Joined(weight) => weight.read_rows(first_row, target, &mut self.held)?,
            Weight::Bnb(_) | Weight::Fp8(_) => {
                let (all, _) = self.weight.rows_and_columns();
                let storage = self.weight.storage().expect("quantized weights have a storage");
                quant::decode(storage, all, columns, &self.whole, first_row * columns, target);
            }
            Weight::Packed(weight) => {
                let row_bytes = weight.storage().bytes(1, columns);
                self.scratch.resize(rows * row_bytes, 0);
                let read = weight.read_stored((first_row * row_bytes) as u64, &mut self.scratch);
                read.map_err(LoadError::from)?;
                quant::decode(weight.storage(), rows, columns, &self.scratch, 0, target);
            }
            Weight::Gguf(weight) => {
                let storage = weight.tensor().storage;
                let row_bytes = storage.bytes(1, columns);
                self.scratch.resize(rows * row_bytes, 0);
                weight.read_at((first_row * row_bytes) as u64, &mut self.scratch)?;
                quant::decode(storage, rows, columns, &self.scratch, 0, target);
                if weight.source.added != 0.0 {
                    target.iter_mut().for_each(|number| *number -= weight.source.added);
                }
            }
        }
        Ok(())
    }
}

/// Reads elements of a plain tensor as f32, from the element `first` on.
fn read_floats(
    tensor: &TensorRef,
    first: u64,
    target: &mut [f32],
    scratch: &mut Vec<u8>,
) -> Result<(), LoadError> {
    scratch.resize(4 * target.len() + PLAIN_SCRATCH, 0);
    let (floats, scratch) = scratch.split_at_mut(4 * target.len());
    read_tensor_into(tensor, first, Element::F32, floats, scratch)?;
    for (target, bytes) in target.iter_mut().zip(floats.as_chunks::<4>().0) {
        *target = f32::from_le_bytes(*bytes);
    }
    Ok(())
}

/// Scratch bytes for converting plain elements.
const PLAIN_SCRATCH: usize = 16 << 10;

#[cfg(test)]
#[path = "weight_tests.rs"]
mod tests;

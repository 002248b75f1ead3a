//! The model that is merged into: its tensors in a list, and one way to read rows of them as f32.
//! Whatever a checkpoint stores (plain numbers, quantised blocks), only this file knows; the rest of the room asks
//! for rows in f32, or copies bytes as they are.
//! Left out: GGUF files and bitsandbytes, whose rows would be dequantised here.

use std::collections::BTreeMap;
use std::path::Path;

use smidgen_runtime::cpu::convert::{bf16_to_f32, f16_to_f32};

use crate::checkpoint::element::Element;
use crate::checkpoint::folder::ModelFolder;
use crate::checkpoint::load::can_read_as;
use crate::checkpoint::tensor_ref::TensorRef;
use crate::failure::Failure;

/// Bytes that are read from a file at a time, on the stack.
const PIECE_BYTES: usize = 32 << 10;

pub struct OriginalModel {
    folder: ModelFolder,
    tensors: Vec<OriginalTensor>,
    by_name: BTreeMap<String, usize>,
}

/// One tensor; cheap to clone.
#[derive(Clone, Debug)]
pub struct OriginalTensor {
    stored: TensorRef,
}

impl OriginalModel {
    pub fn open(path: &Path) -> Result<OriginalModel, Failure> {
        let folder = ModelFolder::open(path).map_err(Failure::world)?;
        if !folder.has_weights() {
            return Err(Failure::world(format!("the model folder `{}` holds no weights", path.display())));
        }
        // The order of the files keeps what belongs together in one shard again.
        let tensors: Vec<OriginalTensor> = (folder.files().iter())
            .flat_map(|file| file.tensors())
            .filter_map(|entry| folder.tensor(&entry.name))
            .map(|stored| OriginalTensor { stored })
            .collect();
        let by_name = tensors.iter().map(|tensor| tensor.name().to_string()).zip(0..).collect();
        Ok(OriginalModel { folder, tensors, by_name })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The JSON object of `config.json`.
    pub fn config(&self) -> &serde_json::Value {
        self.folder.config()
    }

    /// In the order of the files.
    pub fn tensors(&self) -> &[OriginalTensor] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&OriginalTensor> {
        self.by_name.get(name).map(|&position| &self.tensors[position])
    }
}

impl OriginalTensor {
    pub fn name(&self) -> &str {
        self.stored.name()
    }

    pub fn shape(&self) -> &[usize] {
        self.stored.shape()
    }

    /// The type it is written in when nothing else is asked for.
    pub fn element(&self) -> Element {
        self.stored.element()
    }

    /// Whether rows of it can be read as f32.
    pub fn is_real(&self) -> bool {
        can_read_as(self.element(), Element::F32)
    }

    /// The first extent; one for a scalar.
    pub fn rows(&self) -> usize {
        self.shape().first().copied().unwrap_or(1)
    }

    /// The elements of a row: all extents but the first.
    pub fn row_elements(&self) -> usize {
        self.shape().iter().skip(1).product()
    }

    /// Bytes as they are stored, for a copy.
    pub fn read_bytes(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), Failure> {
        self.stored.read_at(byte_offset, destination).map_err(Failure::world)
    }
}

/// Fills `destination` with `rows` rows from `first_row` on. The tensor is real, and the rows are its own.
pub fn read_rows_f32(
    tensor: &OriginalTensor,
    first_row: usize,
    rows: usize,
    destination: &mut [f32],
) -> Result<(), Failure> {
    assert_eq!(destination.len(), rows * tensor.row_elements(), "rows of `{}`", tensor.name());
    read_f32(&tensor.stored, (first_row * tensor.row_elements()) as u64, destination)
}

/// Fills `destination` with elements of a tensor of F32, BF16 or F16.
pub fn read_f32(tensor: &TensorRef, first_element: u64, destination: &mut [f32]) -> Result<(), Failure> {
    let element = tensor.element();
    let mut piece = [0u8; PIECE_BYTES];
    let mut byte_offset = first_element * element.size_bytes() as u64;
    for values in destination.chunks_mut(PIECE_BYTES / element.size_bytes()) {
        let bytes = &mut piece[..values.len() * element.size_bytes()];
        tensor.read_at(byte_offset, bytes).map_err(Failure::world)?;
        byte_offset += bytes.len() as u64;
        match element {
            Element::F32 => widen(bytes, values, f32::from_le_bytes),
            Element::Bf16 => widen(bytes, values, |two| bf16_to_f32(u16::from_le_bytes(two))),
            Element::F16 => widen(bytes, values, |two| f16_to_f32(u16::from_le_bytes(two))),
            other => unreachable!("`{}` of type {other} is refused before", tensor.name()),
        }
    }
    Ok(())
}

#[inline(always)]
fn widen<const N: usize>(bytes: &[u8], values: &mut [f32], value_of: impl Fn([u8; N]) -> f32) {
    for (stored, value) in bytes.as_chunks::<N>().0.iter().zip(values) {
        *value = value_of(*stored);
    }
}

//! Base weights from disk into the reservation, and values of the reservation out again.
//!
//! Weights go from the file into place by offset, in the storage in which they lie where the plan says so; else a few
//! rows at a time are converted or quantized on the way. Nothing is ever held a second time.

use crate::failure::Failure;
use smidgen_formats::element::Element;
use smidgen_formats::load::{MAX_PIECE_BYTES, read_tensor_into};
use smidgen_formats::model::Model;
use smidgen_formats::tensor_ref::TensorRef;
use smidgen_formats::weight::{Weight, WeightError, WeightRows};
use smidgen_ir::quant::Encoding;
use smidgen_ir::storage::BNB4_BLOCK;
use smidgen_ir::{DType, LeafKind, Plan, Storage, ValueId};
use smidgen_runtime::{Device, Executor};
use std::io::{self, Write};
use std::ops::Range;

/// Bytes that pass through host memory at a time; below what the promise on allocations counts.
pub const PIECE_BYTES: usize = MAX_PIECE_BYTES / 2;

/// Elements that are converted or quantized at a time, or one row where that is more.
pub const PIECE_ELEMENTS: usize = 16 << 10;

/// Fills every base weight that is not trained from the checkpoint.
pub fn load_weights<D: Device>(executor: &mut Executor<D>, model: &Model) -> Result<(), Failure> {
    for (_, name) in leaf_names(executor.plan(), LeafKind::Weight) {
        load_weight(executor, model, &name)?;
    }
    Ok(())
}

/// Fills the leaf of one tensor of the model.
pub fn load_weight<D: Device>(executor: &mut Executor<D>, model: &Model, name: &str) -> Result<(), Failure> {
    let weight = model.weight(name).expect("the job has checked that every weight is there");
    let id = leaf(executor.plan(), name);
    let storage = executor.plan().value(id).ty.storage;
    if weight.storage() == Some(storage) {
        let fill = &mut |offset: usize, piece: &mut [u8]| weight.read_stored(offset as u64, piece);
        return executor.fill(id, fill).map_err(Failure::world);
    }
    if let (Weight::Plain(tensor), Some(_)) = (&weight, storage.plain()) {
        return fill_from_file(executor, id, tensor, &mut vec![0u8; PIECE_BYTES]);
    }
    executor
        .fill_at_once(id, &mut |offset, bytes| {
            assert!(offset == 0, "a weight is encoded in one piece");
            encode_weight(&weight, storage, bytes, &mut |_, _| {})
        })
        .map_err(Failure::world)
}

#[derive(Debug, thiserror::Error)]
pub enum EncodeWeightError {
    #[error(transparent)]
    Weight(#[from] WeightError),
    #[error(transparent)]
    Quant(#[from] smidgen_ir::quant::QuantError),
}

/// Converts a whole weight into `bytes`, some rows at a time, each shown to `look` with the number of its first.
pub fn encode_weight(
    weight: &Weight,
    storage: Storage,
    bytes: &mut [u8],
    look: &mut dyn FnMut(usize, &[f32]),
) -> Result<(), EncodeWeightError> {
    let (rows, columns) = weight.rows_and_columns();
    let mut encoding = Encoding::begin(storage, rows, columns, bytes)?;
    let step = rows_at_a_time(columns, encoding.piece_elements());
    let mut floats = vec![0.0; step.min(rows) * columns];
    let mut source = WeightRows::open(weight)?;
    for first in (0..rows).step_by(step) {
        let count = step.min(rows - first);
        let floats = &mut floats[..count * columns];
        source.read(first, count, floats)?;
        look(first, floats);
        encoding.append(floats);
    }
    encoding.finish();
    Ok(())
}

/// Heap that filling a value of `storage` from the weight takes for a while, in bytes.
pub fn load_scratch_bytes(weight: &Weight, storage: Storage) -> usize {
    if weight.storage() == Some(storage) {
        return 0;
    }
    let (rows, columns) = weight.rows_and_columns();
    let scales = match storage {
        Storage::Bnb4 { .. } => 4 * (rows * columns).div_ceil(BNB4_BLOCK),
        Storage::Plain(_) | Storage::Int8Rows | Storage::Gguf(_) | Storage::Dynamic8 { .. } => 0,
    };
    let whole = match weight {
        Weight::Bnb(bnb) => bnb.storage.bytes(rows, columns),
        Weight::Plain(_) | Weight::Gguf(_) => 0,
    };
    // The floats of a piece, and the bytes that they are read from.
    scales + whole + 8 * PIECE_ELEMENTS.max(columns)
}

/// Bytes of a weight that is encoded as a whole: on its way to a file it is in memory once.
pub fn at_once_bytes(weight: &Weight, storage: Storage) -> usize {
    let is_streamed = weight.storage() == Some(storage)
        || (matches!(weight, Weight::Plain(_)) && storage.plain().is_some());
    let (rows, columns) = weight.rows_and_columns();
    if is_streamed { 0 } else { storage.bytes(rows, columns) }
}

/// Rows whose elements are a multiple of `unit`, about [`PIECE_ELEMENTS`] of them.
pub fn rows_at_a_time(columns: usize, unit: usize) -> usize {
    let (mut common, mut rest) = (columns, unit);
    while rest > 0 {
        (common, rest) = (rest, common % rest);
    }
    (PIECE_ELEMENTS / columns).max(1).next_multiple_of(unit / common.max(1))
}

/// Streams bytes of a value from the device to a writer.
pub fn copy_out<D: Device>(
    executor: &mut Executor<D>,
    id: ValueId,
    range: Range<usize>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut piece = [0u8; 16 << 10];
    let mut offset = range.start;
    while offset < range.end {
        let length = piece.len().min(range.end - offset);
        executor.read_at(id, offset, &mut piece[..length]).map_err(io::Error::other)?;
        out.write_all(&piece[..length])?;
        offset += length;
    }
    Ok(())
}

/// Fills a value from a tensor of a file, converted to the value's storage.
pub fn fill_from_file<D: Device>(
    executor: &mut Executor<D>,
    id: ValueId,
    tensor: &TensorRef,
    scratch: &mut [u8],
) -> Result<(), Failure> {
    let storage = executor.plan().value(id).ty.storage;
    let Some(to) = element_of(storage) else {
        return Err(Failure::world(format!("`{}` cannot be loaded as {storage}", tensor.name())));
    };
    executor
        .fill(id, &mut |offset, piece| {
            read_tensor_into(tensor, (offset / to.size_bytes()) as u64, to, piece, scratch)
        })
        .map_err(Failure::world)
}

fn element_of(storage: Storage) -> Option<Element> {
    match storage.plain()? {
        DType::F32 => Some(Element::F32),
        DType::Bf16 => Some(Element::Bf16),
        DType::F16 => Some(Element::F16),
        DType::F64 | DType::I32 | DType::U64 => None,
    }
}

pub fn leaf_names(plan: &Plan, kind: LeafKind) -> Vec<(ValueId, String)> {
    plan.leaves(kind).map(|(id, value)| (id, value.name.clone())).collect()
}

pub fn leaf(plan: &Plan, name: &str) -> ValueId {
    plan.leaf_named(name).unwrap_or_else(|| panic!("the plan has no leaf `{name}`"))
}

#[cfg(test)]
#[path = "weights_tests.rs"]
mod tests;

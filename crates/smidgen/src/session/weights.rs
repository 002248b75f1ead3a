//! Loads base weights from disk into reserved memory, and copies values out of it.
//!
//! A weight is read directly into its place if the plan keeps its stored format; otherwise it is converted or
//! quantized a few rows at a time. No weight is ever in memory twice.

use crate::failure::Failure;
use smidgen_formats::at_once::at_once;
use smidgen_formats::content_hash::ContentHash;
use smidgen_formats::element::Element;
use smidgen_formats::encode::{COPY_BYTES, encode_part, encode_weight};
use smidgen_formats::load::read_tensor_into;
use smidgen_formats::model::Model;
use smidgen_formats::tensor_ref::TensorRef;
use smidgen_formats::weight::{Weight, WeightError, WeightRows};
use smidgen_ir::{DType, LeafKind, Plan, Space, Storage, ValueId};
use smidgen_runtime::device::FillError;
use smidgen_runtime::{Device, DeviceError, Executor};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

/// Bytes that are copied through host memory at a time: too few to count as a large allocation.
pub const PIECE_BYTES: usize = COPY_BYTES;

/// A read is split over threads only if each gets at least this many bytes.
const THREAD_BYTES: usize = 1 << 20;

/// Hashes of the stored bytes of weights, by name.
pub type WeightHashes = BTreeMap<String, String>;

/// Fills every frozen base weight from the model's files, except those that another rank fills.
pub fn load_weights<D: Device>(
    executor: &mut Executor<D>,
    model: &Model,
    threads: usize,
) -> Result<(), Failure> {
    let names = leaf_names(executor.plan(), LeafKind::Weight).into_iter();
    let own = names.filter(|(id, _)| executor.fills(*id)).collect::<Vec<_>>();
    own.iter().try_for_each(|(_, name)| load_weight(executor, model, name, threads))
}

/// Fills every frozen base weight and returns the hashes of their stored bytes.
pub fn load_hashed_weights<D: Device>(
    executor: &mut Executor<D>,
    model: &Model,
    threads: usize,
) -> Result<WeightHashes, Failure> {
    let mut hashes = WeightHashes::new();
    for (_, name) in leaf_names(executor.plan(), LeafKind::Weight) {
        let (weight, hash) = (stored(model, &name), Arc::new(ContentHash::default()));
        fill_weight(executor, &name, weight.clone().hashed(&hash), threads)?;
        // A tensor that is not read from beginning to end is small, and is read again.
        let hash = hash.finish(weight.file_bytes()).map_or_else(|| weight.read_hash(), Ok);
        hashes.insert(name, hash.map_err(Failure::model)?);
    }
    Ok(hashes)
}

/// Fills the leaf of one tensor of the model.
pub fn load_weight<D: Device>(
    executor: &mut Executor<D>,
    model: &Model,
    name: &str,
    threads: usize,
) -> Result<(), Failure> {
    fill_weight(executor, name, stored(model, name), threads)
}

/// A weight of a model whose weights have been checked.
pub fn stored(model: &Model, name: &str) -> Weight {
    model.weight(name).expect("the job has checked that no weight is missing")
}

fn fill_weight<D: Device>(
    executor: &mut Executor<D>,
    name: &str,
    weight: Weight,
    threads: usize,
) -> Result<(), Failure> {
    let id = leaf(executor.plan(), name);
    let storage = executor.plan().value(id).ty.storage;
    let own = own_bytes(executor.plan(), id);
    if weight.storage() == Some(storage) && weight.is_read_as_stored() {
        let fill =
            &mut |offset: usize, piece: &mut [u8]| read_stored(&weight, own.start + offset, piece, threads);
        return executor.fill(id, fill).map_err(Failure::from);
    }
    if let (Weight::Plain(tensor), Some(_)) = (&weight, storage.plain()) {
        return fill_from_file(executor, id, tensor, &mut vec![0u8; PIECE_BYTES]);
    }
    let is_on_disk = executor
        .plan()
        .bytes_of(id)
        .is_some_and(|(buffer, _)| executor.plan().buffer(buffer).space == Space::Disk);
    if is_on_disk && storage.plain().is_some() {
        let mut source = WeightRows::open(&weight).map_err(FillError::Source)?;
        let fill = &mut |offset: usize, piece: &mut [u8]| {
            encode_part(&mut source, storage, own.start + offset, piece)
        };
        return executor.fill(id, fill).map_err(Failure::from);
    }
    let whole_bytes = executor.plan().value(id).ty.bytes(&executor.plan().extent);
    executor
        .fill_at_once(id, &mut |offset, bytes| {
            assert!(offset == 0, "a weight is encoded in one piece");
            if bytes.len() == whole_bytes {
                return encode_weight(&weight, storage, bytes, threads);
            }
            // A scale may cover the whole tensor, so all of it is encoded and this rank's part is copied.
            let mut whole = vec![0u8; whole_bytes];
            encode_weight(&weight, storage, &mut whole, threads)?;
            bytes.copy_from_slice(&whole[own.clone()]);
            Ok(())
        })
        .map_err(Failure::from)
}

/// The bytes of a leaf that this rank stores.
fn own_bytes(plan: &Plan, id: ValueId) -> Range<usize> {
    let value = plan.value(id);
    value.role.shard().map_or(0..value.ty.bytes(&plan.extent), |shard| shard.own_bytes(&value.ty))
}

/// Reads a part of a stored weight on several threads.
fn read_stored(weight: &Weight, offset: usize, piece: &mut [u8], threads: usize) -> Result<(), WeightError> {
    let part_bytes = piece.len().div_ceil(threads.max(1)).max(THREAD_BYTES);
    let parts = piece.chunks_mut(part_bytes).enumerate();
    let reads =
        parts.map(|(index, part)| move || weight.read_stored((offset + index * part_bytes) as u64, part));
    at_once(reads.collect())
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
        return Err(Failure::model(format!("cannot load `{}` as {storage}", tensor.name())));
    };
    let first = own_bytes(executor.plan(), id).start;
    executor
        .fill(id, &mut |offset, piece| {
            read_tensor_into(tensor, ((first + offset) / to.size_bytes()) as u64, to, piece, scratch)
        })
        .map_err(Failure::from)
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

/// Reads the first `count` numbers of a leaf that is stored as f32.
pub fn read_floats<D: Device>(
    executor: &mut Executor<D>,
    id: ValueId,
    count: usize,
) -> Result<Vec<f32>, DeviceError> {
    let mut bytes = vec![0; 4 * count];
    executor.read(id, &mut bytes)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect())
}

/// Sets all leaves of a kind to zero.
pub fn clear<D: Device>(executor: &mut Executor<D>, kind: LeafKind) -> Result<(), Failure> {
    let plan = executor.plan();
    // A gradient that lives only within one lap has no persistent memory.
    let stored = plan.leaves(kind).map(|(id, _)| id).filter(|id| plan.bytes_of(*id).is_some());
    let stored: Vec<ValueId> = stored.collect();
    stored.into_iter().try_for_each(|id| fill_with(executor, id, |_, piece| piece.fill(0)))
}

/// Fills a leaf piece by piece. `write` gets the offset of a piece in the leaf.
pub fn fill_with<D: Device>(
    executor: &mut Executor<D>,
    id: ValueId,
    mut write: impl FnMut(usize, &mut [u8]),
) -> Result<(), Failure> {
    let fill = &mut |offset: usize, piece: &mut [u8]| {
        write(offset, piece);
        Ok::<(), Infallible>(())
    };
    executor.fill(id, fill).map_err(Failure::from)
}

#[cfg(test)]
#[path = "weights_tests.rs"]
mod tests;

//! Converts or quantizes a stored weight to another storage, a few rows at a time.
//!
//! The target is filled in place and the scratch memory is a few rows, so a weight is never in memory twice.
//! The size of the scratch memory is known beforehand, so that a plan can count it.
//! Left out: the encoders, which are in `smidgen_ir::quant`.

use crate::at_once::at_once;
use crate::load::MAX_PIECE_BYTES;
use crate::weight::{Weight, WeightError, WeightRows};
use smidgen_ir::Storage;
use smidgen_ir::quant::{Encoding, EncodingPart, held_scales};
use smidgen_ir::storage::BNB4_GROUP;
use std::ops::Range;

/// Bytes of a plain weight that are copied at a time.
pub const COPY_BYTES: usize = MAX_PIECE_BYTES / 2;

/// Elements that are converted or quantized at a time, or one row if that is more.
pub const PIECE_ELEMENTS: usize = 16 << 10;

/// With more threads than this, memory bandwidth is the limit.
const MOST_THREADS: usize = 32;

#[derive(Debug, thiserror::Error)]
pub enum EncodeWeightError {
    #[error(transparent)]
    Weight(#[from] WeightError),
    #[error(transparent)]
    Quant(#[from] smidgen_ir::quant::QuantError),
}

/// Converts a whole weight into `bytes` on several threads, each of which converts a few rows at a time.
pub fn encode_weight(
    weight: &Weight,
    storage: Storage,
    bytes: &mut [u8],
    threads: usize,
) -> Result<(), EncodeWeightError> {
    let (rows, columns) = weight.rows_and_columns();
    let mut encoding = Encoding::begin(storage, rows, columns, bytes)?;
    let step = rows_at_a_time(columns, encoding.piece_elements());
    let part_rows = rows.div_ceil(threads_for(weight, threads)).next_multiple_of(step);
    let encode = &|part: &mut EncodingPart<'_>, rows: Range<usize>| {
        let mut floats = vec![0.0; step.min(rows.len()) * columns];
        let mut source = WeightRows::open(weight)?;
        for first in rows.clone().step_by(step) {
            let count = step.min(rows.end - first);
            let floats = &mut floats[..count * columns];
            source.read(first, count, floats)?;
            part.append(floats);
        }
        Ok::<(), WeightError>(())
    };
    let mut parts = encoding.parts(part_rows);
    let tasks = parts.iter_mut().enumerate().map(|(index, part)| {
        let first = index * part_rows;
        move || encode(part, first..rows.min(first + part_rows))
    });
    at_once(tasks.collect())?;
    let groups = held_scales(storage, rows, columns).div_ceil(BNB4_GROUP).div_ceil(threads.max(1));
    let scales = encoding.scales(groups).into_iter();
    let tasks = scales.map(|part| {
        move || {
            part.encode();
            Ok(())
        }
    });
    at_once(tasks.collect())
}

/// Converts a part of a weight to a plain `storage`; see [`WeightRows::read_as`].
pub fn encode_part(
    source: &mut WeightRows<'_>,
    storage: Storage,
    offset: usize,
    piece: &mut [u8],
) -> Result<(), EncodeWeightError> {
    Ok(source.read_as(storage, offset, piece)?)
}

/// Threads that encode a weight: only one if each would hold all of it, because its scales cover several
/// rows.
fn threads_for(weight: &Weight, threads: usize) -> usize {
    match weight {
        Weight::Bnb(_) | Weight::Fp8(_) => 1,
        // Each thread would hold an expert.
        Weight::Joined(weight) if weight.held_bytes() > 0 => 1,
        Weight::Plain(_) | Weight::Packed(_) | Weight::Gguf(_) | Weight::Merged(_) | Weight::Joined(_) => {
            threads.clamp(1, MOST_THREADS)
        }
    }
}

/// Temporary heap bytes for filling a value of `storage` from the weight.
pub fn load_scratch_bytes(weight: &Weight, storage: Storage, threads: usize) -> usize {
    if weight.storage() == Some(storage) && weight.is_read_as_stored() {
        return 0;
    }
    let (rows, columns) = weight.rows_and_columns();
    let whole = match weight {
        Weight::Bnb(_) | Weight::Fp8(_) => weight.storage().map_or(0, |own| own.bytes(rows, columns)),
        // Each thread holds A as f32 and the buffers through which it was read.
        Weight::Merged(merged) => {
            threads_for(weight, threads) * 9 * merged.a.shape().iter().product::<usize>()
        }
        Weight::Joined(weight) => weight.held_bytes(),
        Weight::Plain(_) | Weight::Packed(_) | Weight::Gguf(_) => 0,
    };
    // Each thread holds a piece as f32 and the stored bytes of it.
    let pieces = threads_for(weight, threads) * 8 * PIECE_ELEMENTS.max(columns);
    4 * held_scales(storage, rows, columns) + whole + pieces
}

/// Bytes of the weight in `storage` if it must be encoded as a whole before it is written to a file, or 0.
pub fn at_once_bytes(weight: &Weight, storage: Storage) -> usize {
    let is_streamed =
        (weight.storage() == Some(storage) && weight.is_read_as_stored()) || storage.plain().is_some();
    let (rows, columns) = weight.rows_and_columns();
    if is_streamed { 0 } else { storage.bytes(rows, columns) }
}

/// The number of rows with about [`PIECE_ELEMENTS`] elements in total, which are a multiple of `unit`.
pub fn rows_at_a_time(columns: usize, unit: usize) -> usize {
    // The greatest common divisor.
    let (mut common, mut rest) = (columns, unit);
    while rest > 0 {
        (common, rest) = (rest, common % rest);
    }
    (PIECE_ELEMENTS / columns).max(1).next_multiple_of(unit / common.max(1))
}

/// Temporary heap bytes for copying a frozen weight.
pub fn save_scratch_bytes(weight: &Weight) -> usize {
    let (rows, columns) = weight.rows_and_columns();
    match weight {
        Weight::Plain(_) => COPY_BYTES,
        Weight::Bnb(_) | Weight::Fp8(_) => {
            weight.storage().map_or(0, |own| own.bytes(rows, columns)) + 8 * PIECE_ELEMENTS.max(columns)
        }
        Weight::Packed(_) | Weight::Gguf(_) => 12 * PIECE_ELEMENTS.max(columns),
        Weight::Joined(weight) => weight.held_bytes() + 12 * PIECE_ELEMENTS.max(columns),
        Weight::Merged(merged) => {
            9 * merged.a.shape().iter().product::<usize>() + 12 * PIECE_ELEMENTS.max(columns)
        }
    }
}

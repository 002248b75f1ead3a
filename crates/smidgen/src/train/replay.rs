//! Replays a step that was not finite, one operation at a time. Finds the operation that wrote the first NaN or
//! infinity, the sample, and whether a weight was not finite itself.
//!
//! The update of such a step changed nothing and cleared the gradients, so the replay computes the same values.
//! Nothing is written to disk. Quantized weights are not checked: the operation that reads them writes the NaN.

use crate::failure::Failure;
use smidgen_data::micro_batch::MicroBatch;
use smidgen_data::tokens::TokenSet;
use smidgen_ir::{DType, Dim, Entry, Extent, LeafKind, Step, ValueId, ValueRole};
use smidgen_runtime::{Device, DeviceError, Executor};
use std::ops::Range;

/// The first number that is not finite.
#[derive(Clone, Debug, PartialEq)]
pub struct Culprit {
    /// The operation that wrote it, named by its place in the model.
    operation: String,
    value: String,
    what: &'static str,
    /// Index in the token set, if the number belongs to a token.
    sample: Option<u32>,
    /// A weight that the operation read and that is not finite itself.
    weight: Option<String>,
}

impl Culprit {
    /// Describes the culprit, with the sample's place in the data.
    pub fn describe(&self, set: &TokenSet) -> String {
        let Culprit { operation, value, what, sample, weight } = self;
        let sample = sample.map_or(String::new(), |sample| format!(", at {}", set.place(sample as usize)));
        let weight =
            weight.as_ref().map_or(String::new(), |weight| format!("; the weight `{weight}` is not finite"));
        format!("the first {what} is in `{value}`, written by `{operation}`{sample}{weight}")
    }

    /// Whether the model or the adapter on disk is the cause.
    pub fn is_weight(&self) -> bool {
        self.weight.is_some()
    }
}

/// Runs an entry point on a micro-batch that is already on the device, up to the first operation that writes a
/// number that is not finite.
pub fn find_culprit<D: Device>(
    executor: &mut Executor<D>,
    entry: Entry,
    batch: Option<&MicroBatch>,
) -> Result<Option<Culprit>, Failure> {
    let extent = batch.map_or(executor.plan().extent, MicroBatch::extent);
    let steps = 0..executor.plan().entry(entry).steps.len();
    find_among(executor, entry, steps, &extent, batch)
}

/// Like `find_culprit`, for some steps of an entry point.
pub fn find_among<D: Device>(
    executor: &mut Executor<D>,
    entry: Entry,
    steps: Range<usize>,
    extent: &Extent,
    batch: Option<&MicroBatch>,
) -> Result<Option<Culprit>, Failure> {
    for index in steps {
        let step = executor.plan().entry(entry).steps[index].clone();
        // A sum over ranks would hide on which rank the number first appeared.
        if step.op.is_sum() {
            continue;
        }
        executor.run_step(entry, index, extent)?;
        let written = step.outputs.iter().chain(&step.updates);
        for id in written.copied() {
            let found = first_not_finite(executor, id, extent)?;
            let Some((element, what)) = found else { continue };
            let plan = executor.plan();
            return Ok(Some(Culprit {
                operation: plan.place(entry, index),
                value: plan.value(id).name.clone(),
                what,
                sample: batch.and_then(|batch| sample_of(executor, id, element, batch)),
                weight: broken_weight(executor, &step),
            }));
        }
    }
    Ok(None)
}

/// The first weight or adapter that a step reads and that is not finite.
fn broken_weight<D: Device>(executor: &mut Executor<D>, step: &Step) -> Option<String> {
    let mut inputs = step.inputs.iter().copied();
    let broken = inputs.find(|id| {
        let plan = executor.plan();
        let leaf = match &plan.value(*id).role {
            ValueRole::Leaf(_) => *id,
            ValueRole::Slice(slice) => slice.of,
            ValueRole::Temp => return false,
        };
        let ValueRole::Leaf(leaf) = &plan.value(leaf).role else { return false };
        let extent = plan.extent;
        // This rank has only a part of a divided leaf; the operation that gathers it shows a NaN.
        leaf.shard.is_none()
            && matches!(leaf.kind, LeafKind::Weight | LeafKind::Adapter | LeafKind::Derived)
            && first_not_finite(executor, *id, &extent).is_ok_and(|found| found.is_some())
    });
    broken.map(|id| executor.plan().value(id).name.clone())
}

/// The sample of an element, if the rows of the tensor are tokens.
fn sample_of<D: Device>(
    executor: &Executor<D>,
    id: ValueId,
    element: usize,
    batch: &MicroBatch,
) -> Option<u32> {
    let plan = executor.plan();
    let shape = &plan.value(id).ty.shape;
    let columns: usize = shape.0.get(1..)?.iter().map(|dim| dim.at(&plan.extent)).product();
    let row = element / columns;
    let token = match shape.0.first()? {
        Dim::Tokens => row,
        Dim::Tile { first, .. } => first + row,
        Dim::Rows => *batch.rows.get(row)? as usize,
        _ => return None,
    };
    batch.sample_of_token.get(token).copied()
}

/// Exponent bits, which are all set in NaN and infinity, and mantissa bits, of which at least one is set in NaN.
fn float_masks(dtype: DType) -> Option<(usize, u64, u64)> {
    match dtype {
        DType::F64 => Some((8, 0x7ff0_0000_0000_0000, 0x000f_ffff_ffff_ffff)),
        DType::F32 => Some((4, 0x7f80_0000, 0x007f_ffff)),
        DType::Bf16 => Some((2, 0x7f80, 0x007f)),
        DType::F16 => Some((2, 0x7c00, 0x03ff)),
        DType::I32 | DType::U64 => None,
    }
}

/// Position and kind of the first element that is not finite; integers and quantized blocks count as finite.
fn first_not_finite<D: Device>(
    executor: &mut Executor<D>,
    id: ValueId,
    extent: &Extent,
) -> Result<Option<(usize, &'static str)>, DeviceError> {
    let ty = &executor.plan().value(id).ty;
    let Some((size, exponent, mantissa)) = ty.storage.plain().and_then(float_masks) else { return Ok(None) };
    let bytes = ty.elements(extent) * size;
    let mut piece = [0u8; 16 << 10];
    for offset in (0..bytes).step_by(piece.len()) {
        let piece = &mut piece[..(16 << 10).min(bytes - offset)];
        executor.read_at(id, offset, piece)?;
        for (index, element) in piece.chunks_exact(size).enumerate() {
            let bits = element.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
            if bits & exponent == exponent {
                let what = if bits & mantissa == 0 { "infinity" } else { "NaN" };
                return Ok(Some((offset / size + index, what)));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_recognize_nan_and_infinity() {
        let is_finite = |dtype: DType, bits: u64| {
            let (_, exponent, _) = float_masks(dtype).unwrap();
            bits & exponent != exponent
        };
        for number in [0.0, -1.5, f32::MAX, f32::MIN_POSITIVE, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(is_finite(DType::F32, u64::from(number.to_bits())), number.is_finite());
            assert_eq!(is_finite(DType::F64, f64::from(number).to_bits()), number.is_finite());
            assert_eq!(
                is_finite(DType::Bf16, u64::from(half::bf16::from_f32(number).to_bits())),
                half::bf16::from_f32(number).is_finite()
            );
            assert_eq!(
                is_finite(DType::F16, u64::from(half::f16::from_f32(number).to_bits())),
                half::f16::from_f32(number).is_finite()
            );
        }
        assert_eq!(float_masks(DType::I32), None);
    }
}

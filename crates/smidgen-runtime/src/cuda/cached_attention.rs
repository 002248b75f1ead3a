//! Launches attention for generation: writes to the KV cache, and attention over it.
//!
//! One block per query and head. The caches have the type of activations.
//! Left out: head sizes above 256.

use super::modules::KernelFile;
use super::spans::{Place, SPAN, THREADS, count, int};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::AttentionShape;

pub const FILE: KernelFile = KernelFile {
    name: "cached_attention.cu",
    source: include_str!("../../kernels/cached_attention.cu"),
    kernels: &["cache_rows", "cached_attention_eight", "cached_attention_one"],
};

/// The largest head size that a warp can hold.
pub const MOST_HEAD_DIM: usize = 32 * SPAN;

/// The arguments from input `first` on: table of cache rows with its sizes, slots, positions.
fn places(stage: &Stage<'_>, step: &BoundStep, first: usize) -> [Arg; 5] {
    let [table, slots, positions] = [0, 1, 2].map(|index| &step.inputs[first + index]);
    let pointer = |operand: &Operand| Arg::Pointer(stage.pointer(operand));
    [pointer(table), int(stage.rows(table)), int(table.columns), pointer(slots), pointer(positions)]
}

/// Writes the keys and values of new tokens to their cache rows.
pub fn cache_rows(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let tokens = stage.rows(&step.inputs[0]);
    if tokens == 0 {
        return Ok(());
    }
    let [k, v] = [0, 1].map(|index| Place::of(stage, &step.inputs[index]));
    let [keys, values] = [0, 1].map(|index| Place::of(stage, &step.updates[index]));
    let (rows, columns) = (stage.rows(&step.updates[0]), step.updates[0].columns);
    let aligned = columns.is_multiple_of(SPAN) && [k, v, keys, values].iter().all(|place| place.aligned);
    let mut args = vec![k.pointer, k.stride, v.pointer, v.stride];
    args.extend(places(stage, step, 2));
    args.extend([keys.pointer, keys.stride, values.pointer, values.stride]);
    args.extend([int(rows), int(columns), Arg::Int(i32::from(aligned))]);
    stage.launch("cache_rows", [count(tokens), 1, 1], THREADS, 0, &args)
}

/// Attention over the cached rows of each query's slot.
pub fn cached_attention(
    stage: &Stage<'_>,
    step: &BoundStep,
    shape: &AttentionShape,
) -> Result<(), DeviceError> {
    let tokens = stage.rows(&step.inputs[0]);
    if tokens == 0 {
        return Ok(());
    }
    let head_dim = shape.head_dim;
    assert!(head_dim <= MOST_HEAD_DIM, "a head size of {head_dim}: kernels support up to {MOST_HEAD_DIM}");
    let [q, keys, values] = [0, 1, 2].map(|index| Place::of(stage, &step.inputs[index]));
    let o = Place::of(stage, &step.outputs[0]);
    let aligned = head_dim.is_multiple_of(SPAN) && [q, keys, values].iter().all(|place| place.aligned);
    // At least 8, which bounds the teams of a block.
    let lanes = head_dim.div_ceil(SPAN).next_power_of_two().max(8);
    let mut args = vec![q.pointer, q.stride, keys.pointer, keys.stride, values.pointer, values.stride];
    args.extend(places(stage, step, 3));
    args.extend([int(stage.rows(&step.inputs[1])), o.pointer, o.stride]);
    args.extend([int(shape.heads / shape.kv_heads), int(head_dim), int(lanes), Arg::Float(shape.scale)]);
    args.extend([int(shape.window.unwrap_or(0)), Arg::Float(shape.softcap.unwrap_or(0.0))]);
    let kernel = if aligned { "cached_attention_eight" } else { "cached_attention_one" };
    stage.launch(kernel, [count(tokens), count(shape.heads), 1], THREADS, 0, &args)
}

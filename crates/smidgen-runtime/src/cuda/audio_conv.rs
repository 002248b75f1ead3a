//! Launches of the convolutions over audio rows, and of the operations on whole rows around them.
//!
//! Left out: pointwise convolutions, which are linears (`linear.rs`).

use super::modules::KernelFile;
use super::spans::{Place, THREADS, count, int, stored_dtype};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::{Storage, StridedConv};

pub const FILE: KernelFile = KernelFile {
    name: "audio_conv.cu",
    source: include_str!("../../kernels/audio_conv.cu"),
    kernels: &["causal_conv", "strided_conv", "join_places", "mask_rows", "mask_rows_stored"],
};

/// Each channel's convolution within a chunk, or its gradient.
pub fn causal_conv(stage: &Stage<'_>, step: &BoundStep, backward: bool) -> Result<(), DeviceError> {
    let (marks, weight, shape) = (&step.inputs[1], &step.inputs[2], &step.outputs[0]);
    let (x, y) = (Place::of(stage, &step.inputs[0]), Place::of(stage, shape));
    let (rows, columns) = (stage.rows(shape), shape.columns);
    if rows == 0 {
        return Ok(());
    }
    let bias = match backward {
        false => stored(stage, &step.inputs[3]),
        true => [Arg::Pointer(0), Arg::Int(0)],
    };
    let mut args = vec![x.pointer, x.stride, Arg::Pointer(stage.pointer(marks))];
    args.extend(stored(stage, weight));
    args.extend(bias);
    args.extend([y.pointer, y.stride, int(columns), int(weight.columns), Arg::Int(i32::from(backward))]);
    let grid = [count(rows), blocks_of(columns), 1];
    stage.launch("causal_conv", grid, THREADS, 0, &args)
}

/// A 3 x 3 convolution with a stride of 2 over mel frames and bins.
pub fn strided_conv(stage: &Stage<'_>, step: &BoundStep, conv: &StridedConv) -> Result<(), DeviceError> {
    let (x, marks, y) = (&step.inputs[0], &step.inputs[1], &step.outputs[0]);
    assert!(x.is_dense() && y.is_dense(), "`strided_conv` works on dense rows");
    let (rows, channels) = (stage.rows(marks), y.columns);
    if rows == 0 {
        return Ok(());
    }
    let mut args = vec![Arg::Pointer(stage.pointer(x)), Arg::Pointer(stage.pointer(marks))];
    args.extend(stored(stage, &step.inputs[2]));
    args.extend(stored(stage, &step.inputs[3]));
    args.push(Arg::Pointer(stage.pointer(y)));
    args.extend([int(conv.frames), int(conv.bins), int(channels), Arg::Int(i32::from(conv.depthwise))]);
    let grid = [count(rows), count(conv.frames), blocks_of(channels)];
    stage.launch("strided_conv", grid, THREADS, 0, &args)
}

/// The places of a row, channel by channel.
pub fn join_places(stage: &Stage<'_>, step: &BoundStep, places: usize) -> Result<(), DeviceError> {
    let shape = &step.outputs[0];
    let (x, y) = (Place::of(stage, &step.inputs[0]), Place::of(stage, shape));
    let elements = stage.rows(shape) * shape.columns;
    if elements == 0 {
        return Ok(());
    }
    let sizes = [int(places), int(shape.columns), Arg::Long(elements as i64)];
    let args = [[x.pointer, x.stride, y.pointer, y.stride].as_slice(), &sizes].concat();
    stage.launch("join_places", [blocks_of(elements), 1, 1], THREADS, 0, &args)
}

/// Zero in rows without frames, as an activation or in f32 for the host.
pub fn mask_rows(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (kernel, shape) = match step.outputs.first() {
        Some(output) => ("mask_rows", output),
        None => ("mask_rows_stored", &step.updates[0]),
    };
    assert!(step.outputs.len() == 1 || shape.storage == Storage::F32, "the host reads rows in f32");
    let (x, y) = (Place::of(stage, &step.inputs[0]), Place::of(stage, shape));
    let elements = stage.rows(shape) * shape.columns;
    if elements == 0 {
        return Ok(());
    }
    let marks = Arg::Pointer(stage.pointer(&step.inputs[1]));
    let sizes = [int(shape.columns), Arg::Long(elements as i64)];
    let args = [[x.pointer, x.stride, marks, y.pointer, y.stride].as_slice(), &sizes].concat();
    stage.launch(kernel, [blocks_of(elements), 1, 1], THREADS, 0, &args)
}

/// Address and element type of a stored weight.
fn stored(stage: &Stage<'_>, weight: &Operand) -> [Arg; 2] {
    [Arg::Pointer(stage.pointer(weight)), stored_dtype(weight)]
}

/// Blocks with a thread for each of `items`.
fn blocks_of(items: usize) -> u32 {
    count(items.div_ceil(THREADS as usize))
}

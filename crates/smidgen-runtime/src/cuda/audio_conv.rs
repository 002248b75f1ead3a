//! Launches the convolutions over audio rows, and the operations on whole rows around them.
//!
//! Left out: causal convolutions (`causal_conv.rs`), and pointwise ones, which are linears (`linear.rs`).

use super::modules::KernelFile;
use super::spans::{MatrixAddress, THREADS, count, grid_over, int, stored_dtype};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::{Storage, StridedConv};

pub const FILE: KernelFile = KernelFile {
    name: "audio_conv.cu",
    source: include_str!("../../kernels/audio_conv.cu"),
    kernels: &["strided_conv", "join_places", "mask_rows", "mask_rows_stored"],
};

/// A 3 x 3 convolution with a stride of 2 over mel frames and bins.
pub fn strided_conv(stage: &Stage<'_>, step: &BoundStep, conv: &StridedConv) -> Result<(), DeviceError> {
    let (x, marks, y) = (&step.inputs[0], &step.inputs[1], &step.outputs[0]);
    assert!(x.is_dense() && y.is_dense(), "`strided_conv` works on dense rows");
    let (rows, channels) = (stage.rows(marks), y.columns);
    if rows == 0 {
        return Ok(());
    }
    let mut args = vec![stage.address(x), stage.address(marks)];
    args.extend(stored(stage, &step.inputs[2]));
    args.extend(stored(stage, &step.inputs[3]));
    args.push(stage.address(y));
    args.extend([int(conv.frames), int(conv.bins), int(channels), Arg::Int(i32::from(conv.depthwise))]);
    let grid = [count(rows), count(conv.frames), blocks_of(channels)];
    stage.launch("strided_conv", grid, THREADS, 0, &args)
}

/// Transposes the (places, channels) of each row to (channels, places).
pub fn join_places(stage: &Stage<'_>, step: &BoundStep, places: usize) -> Result<(), DeviceError> {
    let shape = &step.outputs[0];
    let (x, y) = (MatrixAddress::of(stage, &step.inputs[0]), MatrixAddress::of(stage, shape));
    let elements = stage.rows(shape) * shape.columns;
    let Some(grid) = grid_over(elements) else { return Ok(()) };
    let sizes = [int(places), int(shape.columns), Arg::Long(elements as i64)];
    let args = [[x.pointer, x.stride, y.pointer, y.stride].as_slice(), &sizes].concat();
    stage.launch("join_places", grid, THREADS, 0, &args)
}

/// y = x, with zeros in rows without frames. y is an activation, or f32 for the host.
pub fn mask_rows(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (kernel, shape) = match step.outputs.first() {
        Some(output) => ("mask_rows", output),
        None => ("mask_rows_stored", &step.updates[0]),
    };
    assert!(step.outputs.len() == 1 || shape.storage == Storage::F32, "the host reads rows in f32");
    let (x, y) = (MatrixAddress::of(stage, &step.inputs[0]), MatrixAddress::of(stage, shape));
    let elements = stage.rows(shape) * shape.columns;
    let Some(grid) = grid_over(elements) else { return Ok(()) };
    let marks = stage.address(&step.inputs[1]);
    let sizes = [int(shape.columns), Arg::Long(elements as i64)];
    let args = [[x.pointer, x.stride, marks, y.pointer, y.stride].as_slice(), &sizes].concat();
    stage.launch(kernel, grid, THREADS, 0, &args)
}

/// Address and element type of a stored weight.
fn stored(stage: &Stage<'_>, weight: &Operand) -> [Arg; 2] {
    [stage.address(weight), stored_dtype(weight)]
}

/// Blocks that give one thread to each of `items`.
fn blocks_of(items: usize) -> u32 {
    count(items.div_ceil(THREADS as usize))
}

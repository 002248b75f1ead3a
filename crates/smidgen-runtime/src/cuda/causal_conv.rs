//! Launches depthwise convolutions over the rows before a row, their gradients, and those of generation.
//!
//! Left out: the activation that follows (`plain_act.rs`).

use super::modules::KernelFile;
use super::spans::{MatrixAddress, THREADS, count, int, stored_dtype};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::Dim;

pub const FILE: KernelFile = KernelFile {
    name: "causal_conv.cu",
    source: include_str!("../../kernels/causal_conv.cu"),
    kernels: &["causal_conv", "causal_conv_weight_grad", "cached_conv"],
};

/// A causal convolution of each channel within a sample or chunk, or its gradient.
pub fn causal_conv(
    stage: &Stage<'_>,
    step: &BoundStep,
    bias: bool,
    backward: bool,
) -> Result<(), DeviceError> {
    let (reach, weight, shape) = (&step.inputs[1], &step.inputs[2], &step.outputs[0]);
    let (x, y) = (MatrixAddress::of(stage, &step.inputs[0]), MatrixAddress::of(stage, shape));
    let (rows, columns) = (stage.rows(shape), shape.columns);
    if rows == 0 {
        return Ok(());
    }
    // Chunks are given by marks, of which each row has its own.
    let samples = if reach.rows == Dim::Boundaries { stage.rows(reach) - 1 } else { 0 };
    let mut args = vec![x.pointer, x.stride, stage.address(reach), int(samples)];
    args.extend(stored(stage, weight));
    args.extend(optional(stage, bias.then(|| &step.inputs[3])));
    args.extend([y.pointer, y.stride, int(columns), int(weight.columns), Arg::Int(i32::from(backward))]);
    let grid = [count(rows), count(columns.div_ceil(THREADS as usize)), 1];
    stage.launch("causal_conv", grid, THREADS, 0, &args)
}

/// dw += Σ dy·x, for each channel and tap.
pub fn causal_conv_weight_grad(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (boundaries, dw) = (&step.inputs[2], &step.updates[0]);
    let [x, dy] = [0, 1].map(|index| MatrixAddress::of(stage, &step.inputs[index]));
    let (columns, taps) = (step.inputs[0].columns, dw.columns);
    let samples = int(stage.rows(boundaries) - 1);
    let args = [
        x.pointer,
        x.stride,
        dy.pointer,
        dy.stride,
        stage.address(boundaries),
        samples,
        stage.address(dw),
        int(columns),
        int(taps),
    ];
    let grid = [count(columns.div_ceil(32)), count(taps), 1];
    stage.launch("causal_conv_weight_grad", grid, THREADS, 0, &args)
}

/// The convolution of new tokens, from the windows of their slots.
pub fn cached_conv(stage: &Stage<'_>, step: &BoundStep, bias: bool) -> Result<(), DeviceError> {
    let (weight, shape, first) = (&step.inputs[1], &step.outputs[0], 2 + usize::from(bias));
    let (x, y) = (MatrixAddress::of(stage, &step.inputs[0]), MatrixAddress::of(stage, shape));
    let (rows, columns) = (stage.rows(shape), shape.columns);
    if rows == 0 {
        return Ok(());
    }
    let mut args = vec![x.pointer, x.stride];
    args.extend(stored(stage, weight));
    args.extend(optional(stage, bias.then(|| &step.inputs[2])));
    args.extend([&step.inputs[first], &step.inputs[first + 1], &step.updates[0]].map(|at| stage.address(at)));
    args.extend([y.pointer, y.stride, int(rows), int(columns), int(weight.columns)]);
    stage.launch("cached_conv", [count(columns.div_ceil(THREADS as usize)), 1, 1], THREADS, 0, &args)
}

/// Address and element type of a stored weight.
fn stored(stage: &Stage<'_>, weight: &Operand) -> [Arg; 2] {
    [stage.address(weight), stored_dtype(weight)]
}

/// The same of a weight that may not exist; the kernel then sees a null pointer.
fn optional(stage: &Stage<'_>, weight: Option<&Operand>) -> [Arg; 2] {
    weight.map_or([Arg::Pointer(0), Arg::Int(0)], |weight| stored(stage, weight))
}

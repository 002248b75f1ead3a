//! Launches layer norms (with a mean) and their gradients, with one block per row.
//!
//! A block keeps an aligned row of up to 8192 channels in registers between the passes. Other rows are read again.

use super::modules::KernelFile;
use super::norm::add_partial_rows;
use super::spans::{MatrixAddress, SPAN, count, int, stored_dtype};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::workspace_cuda::{NORM_GROUPS_PER_PARTIAL, rows_per_partial};

pub const FILE: KernelFile = KernelFile {
    name: "layer_norm.cu",
    source: include_str!("../../kernels/layer_norm.cu"),
    kernels: &[
        "layer_norm_two",
        "layer_norm_any",
        "layer_norm_grad_two",
        "layer_norm_grad_any",
        "layer_norm_weight_partials",
    ],
};

/// y = (x - mean) / deviation · weight + bias.
pub fn layer_norm(stage: &Stage<'_>, step: &BoundStep, eps: f32) -> Result<(), DeviceError> {
    let (weight, bias, shape) = (&step.inputs[1], step.inputs.get(2), &step.outputs[0]);
    let (x, y) = (MatrixAddress::of(stage, &step.inputs[0]), MatrixAddress::of(stage, shape));
    let of_weight = MatrixAddress::of_vector(stage, weight);
    let of_bias = bias.map_or(MatrixAddress::NONE, |bias| MatrixAddress::of_vector(stage, bias));
    if stage.rows(shape) == 0 {
        return Ok(());
    }
    let args = [
        x.pointer,
        x.stride,
        of_weight.pointer,
        stored_dtype(weight),
        of_bias.pointer,
        bias.map_or(Arg::Int(0), stored_dtype),
        Arg::Float(eps),
        y.pointer,
        y.stride,
        int(shape.columns),
    ];
    let (kernel, threads) =
        form(["layer_norm_two", "layer_norm_any"], shape.columns, &[x, y, of_weight, of_bias]);
    stage.launch(kernel, [count(stage.rows(shape)), 1, 1], threads, 0, &args)
}

/// Computes dx, plus an addend if there is one.
pub fn layer_norm_grad(stage: &Stage<'_>, step: &BoundStep, eps: f32) -> Result<(), DeviceError> {
    let (weight, shape) = (&step.inputs[1], &step.outputs[0]);
    let [x, dy] = [0, 2].map(|index| MatrixAddress::of(stage, &step.inputs[index]));
    let (of_weight, dx) = (MatrixAddress::of_vector(stage, weight), MatrixAddress::of(stage, shape));
    let addend = step.inputs.get(3).map_or(MatrixAddress::NONE, |addend| MatrixAddress::of(stage, addend));
    if stage.rows(shape) == 0 {
        return Ok(());
    }
    let args = [
        x.pointer,
        x.stride,
        of_weight.pointer,
        stored_dtype(weight),
        Arg::Float(eps),
        dy.pointer,
        dy.stride,
        addend.pointer,
        addend.stride,
        dx.pointer,
        dx.stride,
        int(shape.columns),
    ];
    let (kernel, threads) =
        form(["layer_norm_grad_two", "layer_norm_grad_any"], shape.columns, &[x, dy, addend, of_weight, dx]);
    stage.launch(kernel, [count(stage.rows(shape)), 1, 1], threads, 0, &args)
}

/// dweight += Σ dy·(x - mean) / deviation, with partial sums in the workspace.
pub fn layer_norm_weight_grad(stage: &Stage<'_>, step: &BoundStep, eps: f32) -> Result<(), DeviceError> {
    let (x, dweight) = (&step.inputs[0], &step.updates[0]);
    let (rows, columns) = (stage.rows(x), x.columns);
    if rows == 0 {
        return Ok(());
    }
    let per_partial = rows_per_partial(rows, NORM_GROUPS_PER_PARTIAL);
    let partials = rows.div_ceil(per_partial);
    let workspace = Arg::Pointer(stage.workspace_of(4 * partials * columns));
    let [x, dy] = [0, 1].map(|index| MatrixAddress::of(stage, &step.inputs[index]));
    let mut args = vec![x.pointer, x.stride, dy.pointer, dy.stride, Arg::Float(eps), workspace];
    args.extend([int(columns), int(rows), int(per_partial)]);
    stage.launch("layer_norm_weight_partials", [count(partials), 1, 1], 256, 0, &args)?;
    add_partial_rows(stage, workspace, partials, columns, stage.pointer(dweight))
}

/// Selects the kernel and its number of threads, which is a whole number of warps.
fn form([two, any]: [&'static str; 2], columns: usize, places: &[MatrixAddress]) -> (&'static str, u32) {
    const MOST_THREADS: usize = 512;
    let threads = columns.div_ceil(2 * SPAN).next_multiple_of(32);
    let is_aligned = columns.is_multiple_of(SPAN) && places.iter().all(|place| place.aligned);
    if is_aligned && threads <= MOST_THREADS { (two, threads as u32) } else { (any, 256) }
}

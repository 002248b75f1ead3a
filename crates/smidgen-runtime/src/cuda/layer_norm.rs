//! Launches layer norms (with a mean) and their gradients, with one block per row.
//!
//! A block keeps an aligned row of up to 8192 channels in registers between the passes. Other rows are read again.

use super::modules::KernelFile;
use super::spans::{Place, SPAN, count, int, stored_dtype};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};

pub const FILE: KernelFile = KernelFile {
    name: "layer_norm.cu",
    source: include_str!("../../kernels/layer_norm.cu"),
    kernels: &["layer_norm_two", "layer_norm_any", "layer_norm_grad_two", "layer_norm_grad_any"],
};

/// y = (x - mean) / deviation · weight + bias.
pub fn layer_norm(stage: &Stage<'_>, step: &BoundStep, eps: f32) -> Result<(), DeviceError> {
    let (weight, bias, shape) = (&step.inputs[1], &step.inputs[2], &step.outputs[0]);
    let (x, y) = (Place::of(stage, &step.inputs[0]), Place::of(stage, shape));
    let [of_weight, of_bias] = [weight, bias].map(|vector| Place::of_vector(stage, vector));
    if stage.rows(shape) == 0 {
        return Ok(());
    }
    let args = [
        x.pointer,
        x.stride,
        of_weight.pointer,
        stored_dtype(weight),
        of_bias.pointer,
        stored_dtype(bias),
        Arg::Float(eps),
        y.pointer,
        y.stride,
        int(shape.columns),
    ];
    let (kernel, threads) =
        form(["layer_norm_two", "layer_norm_any"], shape.columns, &[x, y, of_weight, of_bias]);
    stage.launch(kernel, [count(stage.rows(shape)), 1, 1], threads, 0, &args)
}

/// Computes dx.
pub fn layer_norm_grad(stage: &Stage<'_>, step: &BoundStep, eps: f32) -> Result<(), DeviceError> {
    let (weight, shape) = (&step.inputs[1], &step.outputs[0]);
    let [x, dy] = [0, 2].map(|index| Place::of(stage, &step.inputs[index]));
    let (of_weight, dx) = (Place::of_vector(stage, weight), Place::of(stage, shape));
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
        dx.pointer,
        dx.stride,
        int(shape.columns),
    ];
    let (kernel, threads) =
        form(["layer_norm_grad_two", "layer_norm_grad_any"], shape.columns, &[x, dy, of_weight, dx]);
    stage.launch(kernel, [count(stage.rows(shape)), 1, 1], threads, 0, &args)
}

/// Selects the kernel and its number of threads, which is a whole number of warps.
fn form([two, any]: [&'static str; 2], columns: usize, places: &[Place]) -> (&'static str, u32) {
    const MOST_THREADS: usize = 512;
    let threads = columns.div_ceil(2 * SPAN).next_multiple_of(32);
    let is_aligned = columns.is_multiple_of(SPAN) && places.iter().all(|place| place.aligned);
    match is_aligned && threads <= MOST_THREADS {
        true => (two, threads as u32),
        false => (any, 256),
    }
}

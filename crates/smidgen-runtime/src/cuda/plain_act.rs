//! Launches elementwise operations on one matrix: ReLU, SiLU, GELU and their gradients, a factor, a bias.
//!
//! Left out: activations with a gate (`act.rs`).

use super::modules::KernelFile;
use super::spans::{MatrixAddress, Spans, THREADS, stored_dtype};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::PlainActivation;

pub const FILE: KernelFile = KernelFile {
    name: "plain_act.cu",
    source: include_str!("../../kernels/plain_act.cu"),
    kernels: &[
        "plain_act_eight",
        "plain_act_one",
        "plain_act_grad_eight",
        "plain_act_grad_one",
        "plain_bias_eight",
        "plain_bias_one",
    ],
};

fn kind_of(kind: PlainActivation) -> Arg {
    Arg::Int(match kind {
        PlainActivation::Relu => 0,
        PlainActivation::Silu => 1,
        PlainActivation::Gelu => 2,
    })
}

/// y = act(x).
pub fn act(stage: &Stage<'_>, step: &BoundStep, kind: PlainActivation) -> Result<(), DeviceError> {
    map(stage, step, kind_of(kind), 1.0)
}

/// y = factor·x.
pub fn scale(stage: &Stage<'_>, step: &BoundStep, factor: f32) -> Result<(), DeviceError> {
    const KIND: Arg = Arg::Int(3);
    map(stage, step, KIND, factor)
}

fn map(stage: &Stage<'_>, step: &BoundStep, kind: Arg, factor: f32) -> Result<(), DeviceError> {
    let shape = &step.outputs[0];
    let (x, y) = (MatrixAddress::of(stage, &step.inputs[0]), MatrixAddress::of(stage, shape));
    let spans = Spans::of(stage.rows(shape), shape.columns, &[x, y]);
    let Some(grid) = spans.grid(1) else { return Ok(()) };
    let args =
        [kind, Arg::Float(factor), x.pointer, x.stride, y.pointer, y.stride, spans.spans_of_row, spans.spans];
    stage.launch(spans.form("plain_act_eight", "plain_act_one"), grid, THREADS, 0, &args)
}

/// dx = dy·act'(x).
pub fn act_grad(stage: &Stage<'_>, step: &BoundStep, kind: PlainActivation) -> Result<(), DeviceError> {
    let shape = &step.outputs[0];
    let [x, dy] = [0, 1].map(|index| MatrixAddress::of(stage, &step.inputs[index]));
    let dx = MatrixAddress::of(stage, shape);
    let spans = Spans::of(stage.rows(shape), shape.columns, &[x, dy, dx]);
    let Some(grid) = spans.grid(1) else { return Ok(()) };
    let args = [
        kind_of(kind),
        x.pointer,
        x.stride,
        dy.pointer,
        dy.stride,
        dx.pointer,
        dx.stride,
        spans.spans_of_row,
        spans.spans,
    ];
    stage.launch(spans.form("plain_act_grad_eight", "plain_act_grad_one"), grid, THREADS, 0, &args)
}

/// y = x + bias.
pub fn add_bias(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (shape, bias) = (&step.outputs[0], &step.inputs[1]);
    let (x, y) = (MatrixAddress::of(stage, &step.inputs[0]), MatrixAddress::of(stage, shape));
    let of_bias = MatrixAddress::of_vector(stage, bias);
    let spans = Spans::of(stage.rows(shape), shape.columns, &[x, y, of_bias]);
    let Some(grid) = spans.grid(1) else { return Ok(()) };
    let args = [
        x.pointer,
        x.stride,
        of_bias.pointer,
        stored_dtype(bias),
        y.pointer,
        y.stride,
        spans.spans_of_row,
        spans.spans,
    ];
    stage.launch(spans.form("plain_bias_eight", "plain_bias_one"), grid, THREADS, 0, &args)
}

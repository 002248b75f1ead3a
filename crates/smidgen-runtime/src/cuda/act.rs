//! Launches of the gated activations and their gradients.
//!
//! Gate and up may be column halves of one matrix: every operand has its own row stride. The gradient kernel can also
//! recompute the value of the activation, for a backward pass that needs it and did not keep it.

use super::modules::KernelFile;
use super::spans::{Place, Spans, THREADS};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::Activation;

pub const FILE: KernelFile = KernelFile {
    name: "act.cu",
    source: include_str!("../../kernels/act.cu"),
    kernels: &["gated_act_eight", "gated_act_one", "gated_act_grad_eight", "gated_act_grad_one"],
};

fn kind_arg(kind: Activation) -> Arg {
    Arg::Int(match kind {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
    })
}

/// y = act(gate)·up.
pub fn gated_act(stage: &Stage<'_>, step: &BoundStep, kind: Activation) -> Result<(), DeviceError> {
    let [gate, up] = [0, 1].map(|index| Place::of(stage, &step.inputs[index]));
    let y = Place::of(stage, &step.outputs[0]);
    let shape = &step.outputs[0];
    let spans = Spans::of(stage.rows(shape), shape.columns, &[gate, up, y]);
    let Some(grid) = spans.grid(2) else { return Ok(()) };
    let args = [
        kind_arg(kind),
        gate.pointer,
        gate.stride,
        up.pointer,
        up.stride,
        y.pointer,
        y.stride,
        spans.spans_of_row,
        spans.spans,
    ];
    stage.launch(spans.form("gated_act_eight", "gated_act_one"), grid, THREADS, 0, &args)
}

/// dgate and dup.
pub fn gated_act_grad(stage: &Stage<'_>, step: &BoundStep, kind: Activation) -> Result<(), DeviceError> {
    // No recomputed activation is asked for.
    let value = Place::NONE;
    let [gate, up, dy] = [0, 1, 2].map(|index| Place::of(stage, &step.inputs[index]));
    let [dgate, dup] = [0, 1].map(|index| Place::of(stage, &step.outputs[index]));
    let shape = &step.outputs[0];
    let spans = Spans::of(stage.rows(shape), shape.columns, &[gate, up, dy, dgate, dup, value]);
    let Some(grid) = spans.grid(2) else { return Ok(()) };
    let args = [
        kind_arg(kind),
        gate.pointer,
        gate.stride,
        up.pointer,
        up.stride,
        dy.pointer,
        dy.stride,
        dgate.pointer,
        dgate.stride,
        dup.pointer,
        dup.stride,
        value.pointer,
        value.stride,
        spans.spans_of_row,
        spans.spans,
    ];
    stage.launch(spans.form("gated_act_grad_eight", "gated_act_grad_one"), grid, THREADS, 0, &args)
}

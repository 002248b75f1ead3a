//! Launches the gated activations and their gradients.
//!
//! Gate and up may be column halves of one matrix: every operand has its own row stride. The gradient kernel can also
//! recompute the value of the activation, for a backward pass that needs it and did not keep it; no launch here does.
//! Both kernels can round what they write to fp8.

use super::fp8::{self, RoundedRows, Roundings};
use super::modules::KernelFile;
use super::spans::{MatrixAddress, SPAN, Spans, THREADS, count, int, word};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::Activation;

pub const FILE: KernelFile = KernelFile {
    name: "act.cu",
    source: concat!(include_str!("../../kernels/fp8.cuh"), include_str!("../../kernels/act.cu")),
    kernels: &[
        "gated_act_eight",
        "gated_act_one",
        "gated_act_round",
        "gated_act_grad_eight",
        "gated_act_grad_one",
        "gated_act_grad_round",
        "gated_act_groups_eight",
        "gated_act_groups_one",
        "gated_act_grad_groups",
    ],
};

/// Kind, limit and alpha.
fn kind_args(kind: Activation) -> [Arg; 3] {
    let (code, limit, alpha) = match kind {
        Activation::Silu => (0, 0.0, 0.0),
        Activation::GeluTanh => (1, 0.0, 0.0),
        Activation::Gelu => (2, 0.0, 0.0),
        Activation::Sigmoid => (3, 0.0, 0.0),
        Activation::ClampedSwiglu { limit, alpha } => (4, limit, alpha),
        Activation::Identity => (5, 0.0, 0.0),
    };
    [Arg::Int(code), Arg::Float(limit), Arg::Float(alpha)]
}

/// y = act(gate)·up. The kernel also rounds y to fp8 if rounding steps follow and a block can hold a row.
pub fn gated_act(
    stage: &Stage<'_>,
    step: &BoundStep,
    kind: Activation,
    roundings: &Roundings,
) -> Result<(), DeviceError> {
    let [gate, up] = [0, 1].map(|index| MatrixAddress::of(stage, &step.inputs[index]));
    let y = MatrixAddress::of(stage, &step.outputs[0]);
    let shape = &step.outputs[0];
    let spans = Spans::of(stage.rows(shape), shape.columns, &[gate, up, y]);
    let Some(grid) = spans.grid(2) else { return Ok(()) };
    let width = shape.columns / step.inputs[0].columns;
    let mut args = kind_args(kind).to_vec();
    if width > 1 {
        args.extend([gate, up, y].iter().flat_map(|place| [place.pointer, place.stride]));
        let aligned = [up, y].iter().all(|place| place.aligned) && width.is_multiple_of(SPAN);
        let (kernel, span) =
            if aligned { ("gated_act_groups_eight", SPAN) } else { ("gated_act_groups_one", 1) };
        let spans = stage.rows(shape) * shape.columns / span;
        args.extend([word(shape.columns / span), word(spans), int(width)]);
        let grid = [count(spans.div_ceil(THREADS as usize)), 1, 1];
        return stage.launch(kernel, grid, THREADS, 0, &args);
    }
    args.extend([gate, up, y].iter().flat_map(|place| [place.pointer, place.stride]));
    if let Some(threads) = held_threads(&spans, shape)
        && let Some([to, _]) = roundings.take()
    {
        args.push(int(shape.columns));
        return stage.launch_with("gated_act_round", count(stage.rows(shape)), threads, &to, &args);
    }
    args.extend([spans.spans_of_row, spans.spans]);
    stage.launch(spans.form("gated_act_eight", "gated_act_one"), grid, THREADS, 0, &args)
}

/// Threads of a block that keeps a row in registers; `None` if it cannot.
fn held_threads(spans: &Spans, shape: &Operand) -> Option<u32> {
    fp8::threads_of_held_row(shape.columns).filter(|_| spans.aligned)
}

/// The destinations of the rounded gradients. Must match the struct in `act.cu`.
#[repr(C)]
struct RoundedGate {
    gate: RoundedRows,
    up: RoundedRows,
}

/// Computes dgate and dup. Both or one of them are rounded to fp8 as in [`gated_act`].
pub fn gated_act_grad(
    stage: &Stage<'_>,
    step: &BoundStep,
    kind: Activation,
    roundings: &Roundings,
) -> Result<(), DeviceError> {
    let [gate, up, dy] = [0, 1, 2].map(|index| MatrixAddress::of(stage, &step.inputs[index]));
    let [dgate, dup] = [0, 1].map(|index| MatrixAddress::of(stage, &step.outputs[index]));
    let shape = &step.outputs[1];
    let spans = Spans::of(stage.rows(shape), shape.columns, &[gate, up, dy, dgate, dup]);
    let Some(grid) = spans.grid(2) else { return Ok(()) };
    let mut args = kind_args(kind).to_vec();
    args.extend([gate, up, dy, dgate, dup].iter().flat_map(|place| [place.pointer, place.stride]));
    let gates = step.inputs[0].columns;
    if shape.columns > gates {
        let items = stage.rows(shape) * gates;
        args.extend([int(gates), int(shape.columns / gates), word(items)]);
        let grid = [count(items.div_ceil(THREADS as usize / 32)), 1, 1];
        return stage.launch("gated_act_grad_groups", grid, THREADS, 0, &args);
    }
    if let Some(threads) = held_threads(&spans, shape)
        && let Some([gate, up]) = roundings.take()
    {
        args.push(int(shape.columns));
        let to = RoundedGate { gate, up };
        return stage.launch_with("gated_act_grad_round", count(stage.rows(shape)), threads, &to, &args);
    }
    // The kernel does not recompute the activation.
    let MatrixAddress { pointer, stride, .. } = MatrixAddress::NONE;
    args.extend([pointer, stride, spans.spans_of_row, spans.spans]);
    stage.launch(spans.form("gated_act_grad_eight", "gated_act_grad_one"), grid, THREADS, 0, &args)
}

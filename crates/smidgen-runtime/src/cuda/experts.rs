//! Launches the kernels of routed experts but their matmuls: routing, sorting, and rows copied to experts and summed.
//!
//! Counts of rows stay on the GPU. Kernels: `kernels/experts.cu`.

use super::modules::KernelFile;
use super::spans::{MatrixAddress, Spans, THREADS, count, int, stored_dtype};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::workspace_cuda::DISPATCH_BLOCK;
use smidgen_ir::{Router, RouterScores};

pub const FILE: KernelFile = KernelFile {
    name: "experts.cu",
    source: include_str!("../../kernels/experts.cu"),
    kernels: &[
        "route",
        "route_grad",
        "expert_scales_grad",
        "dispatch_count",
        "dispatch_offsets",
        "dispatch_place",
        "spread_rows_eight",
        "spread_rows_one",
        "combine_rows_eight",
        "combine_rows_one",
        "row_dots",
    ],
};

/// As in `experts.cu`.
#[repr(C)]
struct Routing {
    experts: i32,
    chosen: i32,
    sigmoid: i32,
    groups: i32,
    kept_groups: i32,
    best: i32,
    renormalizes: i32,
    added: f32,
    scale: f32,
}

impl Routing {
    fn of(router: &Router) -> Routing {
        let groups = router.groups.map_or([0; 3], |groups| [groups.count, groups.chosen, groups.best]);
        let [groups, kept_groups, best] = groups.map(|number| number as i32);
        Routing {
            experts: router.experts as i32,
            chosen: router.chosen as i32,
            sigmoid: i32::from(router.scores == RouterScores::Sigmoid),
            groups,
            kept_groups,
            best,
            renormalizes: i32::from(router.renormalizes),
            added: router.added_to_sum,
            scale: router.scale,
        }
    }
}

/// A warp, which has one token.
const WARP: u32 = 32;

fn vector(stage: &Stage<'_>, operand: Option<&Operand>) -> [Arg; 2] {
    operand.map_or([Arg::Pointer(0), Arg::Int(0)], |operand| [stage.address(operand), stored_dtype(operand)])
}

/// The weights and numbers of the experts of each token.
pub fn route(stage: &Stage<'_>, step: &BoundStep, router: &Router) -> Result<(), DeviceError> {
    let logits = &step.inputs[0];
    let rows = stage.rows(logits);
    if rows == 0 {
        return Ok(());
    }
    let correction = vector(stage, step.inputs.get(1).filter(|_| router.is_corrected));
    let scales = vector(stage, step.inputs.last().filter(|_| router.has_expert_scales));
    let place = MatrixAddress::of(stage, logits);
    let mut args = vec![place.pointer, place.stride];
    args.extend(correction.into_iter().chain(scales));
    args.extend(step.outputs.iter().map(|output| stage.address(output)));
    let shared_bytes = 3 * 4 * count(router.experts);
    stage.launch_structure("route", [count(rows), 1, 1], WARP, shared_bytes, &Routing::of(router), &args)
}

/// The gradient of the logits, and of the factors of experts if they are trained.
pub fn route_grad(stage: &Stage<'_>, step: &BoundStep, router: &Router) -> Result<(), DeviceError> {
    let (logits, choices) = (&step.inputs[0], &step.inputs[1]);
    let rows = stage.rows(logits);
    if rows == 0 {
        return Ok(());
    }
    let chosen = rows * router.chosen;
    let changes = step.updates.first().map_or(0, |_| stage.workspace_of(4 * chosen));
    let [from, to] = [logits, &step.outputs[0]].map(|operand| MatrixAddress::of(stage, operand));
    let mut args = vec![from.pointer, from.stride, stage.address(choices), stage.address(&step.inputs[2])];
    args.extend(vector(stage, step.inputs.get(3)));
    args.extend([to.pointer, to.stride, Arg::Pointer(changes)]);
    let (grid, shared_bytes) = ([count(rows), 1, 1], 4 * count(router.experts));
    stage.launch_structure("route_grad", grid, WARP, shared_bytes, &Routing::of(router), &args)?;
    let Some(dscales) = step.updates.first() else { return Ok(()) };
    let args =
        [stage.address(choices), Arg::Pointer(changes), Arg::Long(chosen as i64), stage.address(dscales)];
    stage.launch("expert_scales_grad", [count(router.experts), 1, 1], WARP, 0, &args)
}

/// The sorted row of each choice, and the expert of each sorted row.
pub fn dispatch(stage: &Stage<'_>, step: &BoundStep, experts: usize) -> Result<(), DeviceError> {
    let choices = &step.inputs[0];
    let chosen = stage.rows(choices) * choices.columns;
    let blocks = chosen.div_ceil(DISPATCH_BLOCK);
    if blocks == 0 {
        return Ok(());
    }
    let counts = stage.workspace_of(4 * experts * (blocks + 1));
    let totals = counts + (4 * experts * blocks) as u64;
    let (grid, block) = ([count(blocks), 1, 1], count(DISPATCH_BLOCK));
    let [count_args, place_args] = [0, 1].map(|_| [stage.address(choices), int(chosen), int(experts)]);
    let args: Vec<Arg> = count_args.into_iter().chain([Arg::Pointer(counts)]).collect();
    stage.launch("dispatch_count", grid, block, 0, &args)?;
    let args = [Arg::Pointer(counts), int(blocks), int(experts), Arg::Pointer(totals)];
    stage.launch("dispatch_offsets", [1, 1, 1], block, 0, &args)?;
    let [places, sorted] = [0, 1].map(|output| stage.address(&step.outputs[output]));
    let args: Vec<Arg> = place_args.into_iter().chain([Arg::Pointer(counts), places, sorted]).collect();
    stage.launch("dispatch_place", grid, block, 0, &args)
}

/// Copies each row to the experts that its token chose.
pub fn spread_rows(stage: &Stage<'_>, step: &BoundStep, weighted: bool) -> Result<(), DeviceError> {
    rows_of_experts(
        stage,
        step,
        weighted,
        ["spread_rows_eight", "spread_rows_one"],
        stage.rows(&step.inputs[0]),
    )
}

/// Sums the rows of the experts of each token.
pub fn combine_rows(stage: &Stage<'_>, step: &BoundStep, weighted: bool) -> Result<(), DeviceError> {
    rows_of_experts(
        stage,
        step,
        weighted,
        ["combine_rows_eight", "combine_rows_one"],
        stage.rows(&step.outputs[0]),
    )
}

fn rows_of_experts(
    stage: &Stage<'_>,
    step: &BoundStep,
    weighted: bool,
    [eight, one]: [&'static str; 2],
    tokens: usize,
) -> Result<(), DeviceError> {
    let (x, places, y) = (&step.inputs[0], &step.inputs[1], &step.outputs[0]);
    let [from, to] = [x, y].map(|operand| MatrixAddress::of(stage, operand));
    let spans = Spans::of(tokens, y.columns, &[from, to]);
    let Some(grid) = spans.grid(1) else { return Ok(()) };
    let weights = if weighted { stage.address(&step.inputs[2]) } else { Arg::Pointer(0) };
    let args = [
        from.pointer,
        from.stride,
        stage.address(places),
        weights,
        int(places.columns),
        to.pointer,
        to.stride,
        spans.spans_of_row,
        spans.spans,
    ];
    stage.launch(spans.form(eight, one), grid, THREADS, 0, &args)
}

/// The products of the row of each choice with the row of its token.
pub fn row_dots(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (a, b, places) = (&step.inputs[0], &step.inputs[1], &step.inputs[2]);
    let chosen = stage.rows(places) * places.columns;
    if chosen == 0 {
        return Ok(());
    }
    let [left, right] = [a, b].map(|operand| MatrixAddress::of(stage, operand));
    let mut args = vec![left.pointer, left.stride, right.pointer, right.stride, stage.address(places)];
    args.extend([int(places.columns), int(a.columns), Arg::Long(chosen as i64)]);
    args.push(stage.address(&step.outputs[0]));
    let blocks = chosen.div_ceil((THREADS / WARP) as usize);
    stage.launch("row_dots", [count(blocks), 1, 1], THREADS, 0, &args)
}

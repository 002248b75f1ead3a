//! Launches the kernels that add elements, gather and scatter rows, apply dropout, and sum columns.
//!
//! Dropout drops exactly the elements that the CPU drops: threshold and scale are computed in the same way.

use super::matmul::Matrix;
use super::modules::KernelFile;
use super::norm::add_partial_rows;
use super::spans::{MatrixAddress, SPAN, Spans, THREADS, count, grid_over, int, stored_dtype};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::HeadPart;
use smidgen_ir::workspace_cuda::{BIAS_ROWS_PER_PARTIAL, NORM_GROUPS_PER_PARTIAL, rows_per_partial};

pub const FILE: KernelFile = KernelFile {
    name: "elementwise.cu",
    source: concat!(include_str!("../../kernels/counter.cuh"), include_str!("../../kernels/elementwise.cu")),
    kernels: &[
        "add_eight",
        "add_one",
        "scale_by_eight",
        "scale_by_one",
        "dot_partials",
        "sink_partials",
        "place_heads_eight",
        "place_heads_one",
        "gather_rows_eight",
        "gather_rows_one",
        "scatter_rows_eight",
        "scatter_rows_one",
        "dropout_eight",
        "dropout_one",
        "column_partials_eight",
        "column_partials_one",
        "add_partial_rows",
    ],
};

/// Columns that a block of `column_partials` sums.
const TILE_COLUMNS: usize = 256;

/// y = a + scale·b.
pub fn add(stage: &Stage<'_>, step: &BoundStep, scale: f32) -> Result<(), DeviceError> {
    let [a, b] = [0, 1].map(|index| MatrixAddress::of(stage, &step.inputs[index]));
    let shape = &step.outputs[0];
    let y = MatrixAddress::of(stage, shape);
    let spans = Spans::of(stage.rows(shape), shape.columns, &[a, b, y]);
    let Some(grid) = spans.grid(2) else { return Ok(()) };
    let scale = Arg::Float(scale);
    let args = [
        a.pointer,
        a.stride,
        b.pointer,
        b.stride,
        scale,
        y.pointer,
        y.stride,
        spans.spans_of_row,
        spans.spans,
    ];
    stage.launch(spans.form("add_eight", "add_one"), grid, THREADS, 0, &args)
}

/// Must match the struct in `elementwise.cu`.
#[repr(C)]
struct PlacedHeads {
    x: u64,
    x_stride: i64,
    y: u64,
    y_stride: i64,
    rows: i32,
    /// Columns from one head of x to the next: 0 if all heads of y get the same.
    x_head: i32,
    y_head: i32,
    heads: i32,
    summed: i32,
    columns: i32,
    span: i32,
}

/// Columns of the heads of each input, in each head of the output. A launch also zeros the columns up to the next part.
pub fn place_heads(
    stage: &Stage<'_>,
    step: &BoundStep,
    heads: usize,
    head_dim: usize,
    parts: &[HeadPart],
) -> Result<(), DeviceError> {
    let (y, rows) = (stage.matrix(&step.outputs[0]), stage.rows(&step.outputs[0]));
    let launch = |x: Matrix, x_head: usize, summed: usize, to: usize, columns: usize, span: usize| {
        let y = y.at(0, to);
        let sizes = [x.stride, x_head, y.stride, head_dim, columns, span];
        let addresses = [x.pointer, y.pointer];
        let aligned = sizes.iter().all(|size| size.is_multiple_of(SPAN))
            && addresses.iter().all(|address| address.is_multiple_of(16));
        let unit = if aligned { SPAN } else { 1 };
        let Some(grid) = grid_over(rows * heads * span / unit) else { return Ok(()) };
        let placed = PlacedHeads {
            x: x.pointer,
            x_stride: x.stride as i64,
            y: y.pointer,
            y_stride: y.stride as i64,
            rows: rows as i32,
            x_head: x_head as i32,
            y_head: head_dim as i32,
            heads: heads as i32,
            summed: summed as i32,
            columns: columns as i32,
            span: span as i32,
        };
        let kernel = if aligned { "place_heads_eight" } else { "place_heads_one" };
        stage.launch_structure(kernel, grid, THREADS, 0, &placed, &[])
    };
    // Copies no column, and zeros those before the first part.
    launch(stage.matrix(&step.inputs[0]), 0, 1, 0, 0, parts[0].to)?;
    let ends = parts[1..].iter().map(|part| part.to).chain([head_dim]);
    for ((operand, part), end) in step.inputs.iter().zip(parts).zip(ends) {
        let x = stage.matrix(operand).at(0, part.from);
        let x_head = if part.heads == 1 { 0 } else { operand.columns / part.heads };
        let summed = if heads == 1 { part.heads } else { 1 };
        launch(x, x_head, summed, part.to, part.columns, end - part.to)?;
    }
    Ok(())
}

/// y = s·x, with a number of s for each of several groups of channels.
pub fn scale_by(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (x, scale, shape) = (MatrixAddress::of(stage, &step.inputs[0]), &step.inputs[1], &step.outputs[0]);
    let y = MatrixAddress::of(stage, shape);
    let spans = Spans::of(stage.rows(shape), shape.columns, &[x, y]);
    let Some(grid) = spans.grid(1) else { return Ok(()) };
    let width = int(shape.columns / stage.rows(scale));
    let mut args = vec![x.pointer, x.stride, stage.address(scale), stored_dtype(scale), width];
    args.extend([y.pointer, y.stride, spans.spans_of_row, spans.spans]);
    stage.launch(spans.form("scale_by_eight", "scale_by_one"), grid, THREADS, 0, &args)
}

/// ds += Σ x·dy over the channels of each number, with partial sums in the workspace.
pub fn scale_by_grad(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (x, ds) = (&step.inputs[0], &step.updates[0]);
    let (rows, columns) = (stage.rows(x), x.columns);
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let per_partial = rows_per_partial(rows, NORM_GROUPS_PER_PARTIAL);
    let partials = rows.div_ceil(per_partial);
    let factors = stage.rows(ds);
    let workspace = Arg::Pointer(stage.workspace_of(4 * partials * factors));
    let [x, dy] = [0, 1].map(|index| MatrixAddress::of(stage, &step.inputs[index]));
    let mut args = vec![x.pointer, x.stride, dy.pointer, dy.stride];
    args.extend([int(rows), int(columns / factors), int(per_partial), workspace]);
    stage.launch("dot_partials", [count(partials), count(factors), 1], THREADS, 0, &args)?;
    add_partial_rows(stage, workspace, partials, factors, stage.pointer(ds))
}

/// dsinks += the gradient of the sinks of attention, with partial sums in the workspace.
pub fn sinks_grad(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let [o, lse, o_gradient, sinks] = &step.inputs[..] else {
        unreachable!("the shape rule asks for four inputs")
    };
    let (rows, heads) = (stage.rows(lse), lse.columns);
    if rows == 0 {
        return Ok(());
    }
    let per_partial = rows_per_partial(rows, NORM_GROUPS_PER_PARTIAL);
    let partials = rows.div_ceil(per_partial);
    let workspace = Arg::Pointer(stage.workspace_of(4 * partials * heads));
    let [o_place, gradient] = [o, o_gradient].map(|operand| MatrixAddress::of(stage, operand));
    let mut args =
        vec![o_place.pointer, o_place.stride, stage.address(lse), gradient.pointer, gradient.stride];
    args.extend([stage.address(sinks), stored_dtype(sinks), workspace]);
    args.extend([int(rows), int(heads), int(o.columns / heads), int(per_partial)]);
    stage.launch("sink_partials", [count(partials), 1, 1], THREADS, 0, &args)?;
    add_partial_rows(stage, workspace, partials, heads, stage.pointer(&step.updates[0]))
}

/// y[r] = x[rows[r]].
pub fn gather_rows(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (x, rows, y) = (&step.inputs[0], &step.inputs[1], &step.outputs[0]);
    let (from, to) = (MatrixAddress::of(stage, x), MatrixAddress::of(stage, y));
    let spans = Spans::of(stage.rows(y), y.columns, &[from, to]);
    let Some(grid) = spans.grid(1) else { return Ok(()) };
    let args = [
        from.pointer,
        from.stride,
        int(stage.rows(x)),
        stage.address(rows),
        to.pointer,
        to.stride,
        spans.spans_of_row,
        spans.spans,
    ];
    stage.launch(spans.form("gather_rows_eight", "gather_rows_one"), grid, THREADS, 0, &args)
}

/// dx[rows[r]] = d[r], and all other rows of dx are zero.
pub fn scatter_rows(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (d, rows, dx) = (&step.inputs[0], &step.inputs[1], &step.outputs[0]);
    let (from, to) = (MatrixAddress::of(stage, d), MatrixAddress::of(stage, dx));
    let aligned = from.aligned && to.aligned && dx.columns.is_multiple_of(SPAN);
    if stage.rows(dx) == 0 || dx.columns == 0 {
        return Ok(());
    }
    let args = [
        from.pointer,
        from.stride,
        stage.address(rows),
        int(stage.rows(rows)),
        to.pointer,
        to.stride,
        int(stage.rows(dx)),
        int(dx.columns),
    ];
    let kernel = if aligned { "scatter_rows_eight" } else { "scatter_rows_one" };
    let rows_of_block = THREADS as usize / 32;
    stage.launch(kernel, [count(stage.rows(dx).div_ceil(rows_of_block)), 1, 1], THREADS, 0, &args)
}

/// y = dropout(x) with probability `p`, or x - dropout(x) if `rest`.
pub fn dropout(
    stage: &Stage<'_>,
    step: &BoundStep,
    p: f32,
    stream: u32,
    rest: bool,
) -> Result<(), DeviceError> {
    assert!((0.0..1.0).contains(&p), "`dropout`: probability {p} is not in [0, 1)");
    let (x, keys, y) = (&step.inputs[0], &step.inputs[1], &step.outputs[0]);
    let (from, to) = (MatrixAddress::of(stage, x), MatrixAddress::of(stage, y));
    let spans = Spans::of(stage.rows(y), y.columns, &[from, to]);
    let Some(grid) = spans.grid(2) else { return Ok(()) };
    let threshold = (f64::from(p) * 4_294_967_296.0) as u32;
    let scale = (1.0 / (1.0 - f64::from(p))) as f32;
    let args = [
        from.pointer,
        from.stride,
        stage.address(keys),
        Arg::Word(stream),
        Arg::Word(threshold),
        Arg::Float(scale),
        Arg::Int(i32::from(rest)),
        to.pointer,
        to.stride,
        spans.spans_of_row,
        spans.spans,
    ];
    stage.launch(spans.form("dropout_eight", "dropout_one"), grid, THREADS, 0, &args)
}

/// dbias += the sum of the rows of dy, with partial sums in the workspace.
pub fn bias_grad(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (dy, dbias) = (&step.inputs[0], &step.updates[0]);
    let (rows, columns) = (stage.rows(dy), dy.columns);
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let per_partial = rows_per_partial(rows, BIAS_ROWS_PER_PARTIAL);
    let partials = rows.div_ceil(per_partial);
    let workspace = Arg::Pointer(stage.workspace_of(4 * partials * columns));
    let place = MatrixAddress::of(stage, dy);
    let args = [place.pointer, place.stride, int(rows), int(columns), int(per_partial), workspace];
    let aligned = place.aligned && columns.is_multiple_of(SPAN);
    let kernel = if aligned { "column_partials_eight" } else { "column_partials_one" };
    let grid = [count(columns.div_ceil(TILE_COLUMNS)), count(partials), 1];
    stage.launch(kernel, grid, THREADS, 0, &args)?;
    add_partial_rows(stage, workspace, partials, columns, stage.pointer(dbias))
}

//! DoRA: the gain of each output channel, the gradient of the magnitudes, and the row norms that the gain divides by.
//!
//! For row norms, some rows of the weight at a time are decoded to f32 in the workspace. The kernel adds B·A in
//! registers, so the sum is never stored. Kernels: `kernels/columns.cu`.

use super::decode::{self, RowChoice, Target, is_aligned};
use super::modules::KernelFile;
use super::spans::stored_dtype;
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::Storage;
use smidgen_ir::workspace_cuda::{SUM_ROWS, magnitude_partials_bytes, norm_block_rows};

pub const FILE: KernelFile = KernelFile {
    name: "columns.cu",
    source: include_str!("../../kernels/columns.cu"),
    kernels: &["scale_columns", "magnitude_grad_partials", "magnitude_grad_total", "row_norms"],
};

/// Inputs z (rows, N), magnitude (N), norm (N), `[bias (N)]`; output (rows, N), which may be z.
pub fn scale_columns(stage: &Stage<'_>, step: &BoundStep, bias: bool) -> Result<(), DeviceError> {
    let (z, y) = (&step.inputs[0], &step.outputs[0]);
    let (rows, columns) = (stage.rows(z), z.columns);
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let bias = bias.then(|| &step.inputs[3]);
    let (z_pointer, y_pointer) = (stage.pointer(z), stage.pointer(y));
    let eight =
        columns.is_multiple_of(8) && is_aligned(z_pointer, z.stride) && is_aligned(y_pointer, y.stride);
    // If the matrix is narrow, a block handles several rows at once.
    let groups = columns.div_ceil(8);
    let lanes = groups.next_power_of_two().clamp(32, THREADS as usize);
    let rows_of_a_block = THREADS as usize / lanes * SCALED_ROWS;
    let args = [
        Arg::Pointer(z_pointer),
        Arg::Long(z.stride as i64),
        stage.address(&step.inputs[1]),
        stage.address(&step.inputs[2]),
        Arg::Pointer(bias.map_or(0, |bias| stage.pointer(bias))),
        bias.map_or(Arg::Int(0), stored_dtype),
        Arg::Pointer(y_pointer),
        Arg::Long(y.stride as i64),
        Arg::Int(rows as i32),
        Arg::Int(columns as i32),
        Arg::Int(lanes as i32),
        Arg::Int(i32::from(eight)),
    ];
    let grid = [groups.div_ceil(lanes) as u32, rows.div_ceil(rows_of_a_block) as u32, 1];
    stage.launch("scale_columns", grid, THREADS, 0, &args)
}

/// Inputs dy (rows, N), z (rows, N), norm (N); updates dmagnitude (N).
pub fn magnitude_grad(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (dy, z) = (&step.inputs[0], &step.inputs[1]);
    let (rows, columns) = (stage.rows(dy), dy.columns);
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let (dy_pointer, z_pointer) = (stage.pointer(dy), stage.pointer(z));
    let eight =
        columns.is_multiple_of(8) && is_aligned(dy_pointer, dy.stride) && is_aligned(z_pointer, z.stride);
    let partials = stage.workspace_of(magnitude_partials_bytes(rows, columns));
    let groups = rows.div_ceil(SUM_ROWS);
    let args = [
        Arg::Pointer(dy_pointer),
        Arg::Long(dy.stride as i64),
        Arg::Pointer(z_pointer),
        Arg::Long(z.stride as i64),
        Arg::Int(rows as i32),
        Arg::Int(columns as i32),
        Arg::Int(i32::from(eight)),
        Arg::Pointer(partials),
    ];
    let grid = [columns.div_ceil(8 * SUM_THREADS as usize) as u32, groups as u32, 1];
    stage.launch("magnitude_grad_partials", grid, SUM_THREADS, 0, &args)?;
    let args = [
        Arg::Pointer(partials),
        Arg::Int(groups as i32),
        Arg::Int(columns as i32),
        stage.address(&step.inputs[2]),
        stage.address(&step.updates[0]),
    ];
    let grid = [columns.div_ceil(SUM_THREADS as usize) as u32, 1, 1];
    stage.launch("magnitude_grad_total", grid, SUM_THREADS, 0, &args)
}

/// Inputs weight (N, K), a (R, K), b (N, R); updates norms (N).
pub fn row_norms(stage: &Stage<'_>, step: &BoundStep, scale: f32) -> Result<(), DeviceError> {
    let (weight, a, b) = (&step.inputs[0], &step.inputs[1], &step.inputs[2]);
    for matrix in [a, b] {
        assert!(matrix.storage == Storage::F32 && matrix.is_dense(), "an adapter that is not dense f32");
    }
    let (n, k, rank) = (stage.rows(weight), weight.columns, stage.rows(a));
    if n == 0 || k == 0 {
        return Ok(());
    }
    let block = norm_block_rows(n, k);
    let decoded = stage.workspace_of(block * k * 4);
    let a_pointer = stage.pointer(a);
    let eight = k.is_multiple_of(8) && is_aligned(a_pointer, k);
    for first in (0..n).step_by(block) {
        let rows = block.min(n - first);
        let target = Target { pointer: decoded, stride: k, wide: true };
        decode::decode(stage, weight, RowChoice::From(first), rows, target, 1.0)?;
        let args = [
            Arg::Pointer(decoded),
            Arg::Pointer(a_pointer),
            Arg::Pointer(stage.pointer(b) + 4 * (first * rank) as u64),
            Arg::Float(scale),
            Arg::Int(rank as i32),
            Arg::Int(rows as i32),
            Arg::Int(k as i32),
            Arg::Int(i32::from(eight)),
            Arg::Pointer(stage.pointer(&step.updates[0]) + 4 * first as u64),
        ];
        let shared_bytes = (rank * NORM_ROWS * 4) as u32;
        stage.launch("row_norms", [rows.div_ceil(NORM_ROWS) as u32, 1, 1], THREADS, shared_bytes, &args)?;
    }
    Ok(())
}

/// These must match `columns.cu`.
const THREADS: u32 = 256;
const SCALED_ROWS: usize = 4;
const SUM_THREADS: u32 = 64;
const NORM_ROWS: usize = 8;

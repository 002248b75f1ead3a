//! Linear layers whose weights are stored in fp8 and multiplied in fp8, and their gradients.
//!
//! Activations are rounded per token: by a step of its own, by the kernel that computes them, or, in generation, into
//! the workspace before a matmul. dx = dy·W sums over the rows of W, so the scales of these rows are multiplied into dy
//! before it is rounded, and the codes of W are transposed into the workspace, because a transposed copy of all weights
//! would double their memory. Adapters are separate matmuls in the type of activations, and the fp8 matmul adds to
//! their result. On Hopper the matmul is cuBLASLt's, before Hopper it is `kernels/fp8_matmul.cu`.
//! Kernels: `kernels/fp8.cuh`, `kernels/fp8.cu` and `kernels/fp8_matmul.cu`.

use super::matmul::{Element, Fp8, Matmul, Matrix};
use super::modules::KernelFile;
use super::operands::{AdapterRoom, Addends, Scratch, add_adapter, weight_matrix};
use super::spans::{SPAN, int, long};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::storage::row_scales;
use smidgen_ir::workspace_cuda::{MATMUL_BYTES, multiplies_in_fp8};
use smidgen_ir::{Fusion, Property, Storage};
use std::cell::Cell;

pub const FILE: KernelFile = KernelFile {
    name: "fp8.cu",
    source: concat!(include_str!("../../kernels/fp8.cuh"), include_str!("../../kernels/fp8.cu")),
    kernels: &["round_rows_fp8", "transpose_fp8"],
};

pub const MATMUL_FILE: KernelFile = KernelFile {
    name: "fp8_matmul.cu",
    source: concat!(
        include_str!("../../kernels/matrix_unit.cuh"),
        include_str!("../../kernels/fp8_matmul.cu")
    ),
    kernels: &["multiply_fp8"],
};

/// Side of a tile of the output, and the shared memory of a block. Both must match `fp8_matmul.cu`.
const TILE: usize = 128;
const TILE_SHARED_BYTES: u32 = 3 * 2 * 128 * 64;

/// Must match the struct in `fp8_matmul.cu`.
#[repr(C)]
struct Fp8Matmul {
    left: u64,
    left_scales: u64,
    right: u64,
    right_scales: u64,
    to: u64,
    to_stride: i64,
    addend: u64,
    addend_stride: i64,
    bias: u64,
    rows: i32,
    columns: i32,
    depth: i32,
    alpha: f32,
}

/// Most threads of a block that rounds a row, and the spans of the row that each thread keeps in registers. Both must
/// match `fp8.cuh`.
const MOST_THREADS: usize = 512;
const HELD: usize = 5;
/// Side of the square of bytes that a block transposes. Must match `fp8.cu`.
const SIDE: usize = 64;

/// A matrix of e4m3 codes without gaps between its rows, and a scale for each row.
#[derive(Clone, Copy, Debug)]
struct Rounded {
    codes: Matrix,
    scales: u64,
}

/// Addresses that a kernel writes rounded rows to; all are 0 if it rounds nothing. Must match the struct in `fp8.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundedRows {
    codes: u64,
    scales: u64,
    factors: u64,
}

impl RoundedRows {
    /// The addresses that a rounding step writes to.
    fn of(stage: &Stage<'_>, step: &BoundStep) -> RoundedRows {
        let to = stored(stage, &step.outputs[0]);
        let factors = step.inputs.get(1).map_or(0, |weight| stored(stage, weight).scales);
        RoundedRows { codes: to.codes.pointer, scales: to.scales, factors }
    }
}

/// The steps right after another one that round its outputs, at most one for each output.
#[derive(Debug, Default)]
pub struct Roundings {
    /// One for each output.
    to: [Option<RoundedRows>; 2],
    /// Whether the kernel that computes the outputs also rounds them.
    is_done: Cell<bool>,
}

impl Roundings {
    /// Finds the rounding steps right after the first of `steps`.
    pub fn after_first(stage: &Stage<'_>, steps: &[BoundStep]) -> Roundings {
        let mut roundings = Roundings::default();
        let Some((maker, rest)) = steps.split_first().filter(|(maker, _)| maker.op.has(Property::Rounds))
        else {
            return roundings;
        };
        for step in rest {
            if step.op.ends() != Some(Fusion::Rounding) {
                break;
            }
            let output = maker.outputs.iter().position(|output| *output == step.inputs[0]);
            let Some(free) = output.map(|output| &mut roundings.to[output]).filter(|to| to.is_none()) else {
                break;
            };
            *free = Some(RoundedRows::of(stage, step));
        }
        roundings
    }

    /// The addresses for a kernel that rounds its outputs itself, which makes the rounding steps count as done. `None`
    /// if there are no rounding steps.
    pub fn take(&self) -> Option<[RoundedRows; 2]> {
        let exist = self.to.iter().any(Option::is_some);
        self.is_done.set(exist);
        exist.then(|| self.to.map(Option::unwrap_or_default))
    }

    /// The number of rounding steps that are done.
    pub fn count_done(&self) -> usize {
        if self.is_done.get() { self.to.iter().flatten().count() } else { 0 }
    }
}

/// Threads of a block that keeps a whole row in registers; `None` if the row is too wide.
pub fn threads_of_held_row(columns: usize) -> Option<u32> {
    let threads = columns.div_ceil(SPAN * HELD).next_multiple_of(32);
    (threads <= MOST_THREADS).then_some(threads as u32)
}

fn codes(pointer: u64, stride: usize) -> Matrix {
    Matrix { pointer, stride, element: Element::E4m3 }
}

/// Whether the matmul with this weight is computed in fp8.
pub fn is_fp8(stage: &Stage<'_>, weight: &Operand) -> bool {
    multiplies_in_fp8(stage.step.precision, weight.storage, stage.rows(weight), weight.columns)
}

/// The codes and scales of an operand stored in fp8: a weight, or a rounded activation.
fn stored(stage: &Stage<'_>, matrix: &Operand) -> Rounded {
    let (first, total) = stage.rows_in_tensor(matrix);
    let start = stage.pointer(matrix);
    Rounded {
        codes: codes(start + (first * matrix.columns) as u64, matrix.columns),
        scales: start + (row_scales(total, matrix.columns) + 4 * first) as u64,
    }
}

/// Rounds activations.
pub fn round_fp8(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    launch_rounding(stage, &step.inputs[0], RoundedRows::of(stage, step))
}

fn launch_rounding(stage: &Stage<'_>, x: &Operand, to: RoundedRows) -> Result<(), DeviceError> {
    let rows = stage.rows(x);
    if rows == 0 {
        return Ok(());
    }
    let threads = (x.columns / SPAN).next_multiple_of(32).min(MOST_THREADS);
    let args = [stage.address(x), long(x.stride), int(x.columns)];
    stage.launch_with("round_rows_fp8", rows as u32, threads as u32, &to, &args)
}

/// Activations in fp8: as an earlier step rounded them, or rounded here into the workspace, after column j is
/// multiplied by the j-th of `factors`.
fn rounded(
    stage: &Stage<'_>,
    scratch: &mut Scratch,
    x: &Operand,
    factors: Option<u64>,
) -> Result<Rounded, DeviceError> {
    if x.storage == Storage::Fp8Rows {
        return Ok(stored(stage, x));
    }
    let (rows, columns) = (stage.rows(x), x.columns);
    let to = Rounded { codes: codes(scratch.take(rows * columns), columns), scales: scratch.take(4 * rows) };
    let target = RoundedRows { codes: to.codes.pointer, scales: to.scales, factors: factors.unwrap_or(0) };
    launch_rounding(stage, x, target)?;
    Ok(to)
}

/// The codes of a weight (N, K) as (K, N), with scales of one.
fn transposed(stage: &Stage<'_>, scratch: &mut Scratch, weight: &Operand) -> Result<Rounded, DeviceError> {
    let (rows, columns) = (stage.rows(weight), weight.columns);
    let transposed =
        Rounded { codes: codes(scratch.take(rows * columns), rows), scales: scratch.take(4 * columns) };
    let args = [
        Arg::Pointer(transposed.codes.pointer),
        Arg::Pointer(transposed.scales),
        Arg::Pointer(stored(stage, weight).codes.pointer),
        int(rows),
        int(columns),
    ];
    let grid = [columns.div_ceil(SIDE) as u32, rows.div_ceil(SIDE) as u32, 1];
    stage.launch("transpose_fp8", grid, 256, 0, &args)?;
    Ok(transposed)
}

/// alpha · left (M, K) · rightᵀ (N, K).
struct Factors {
    left: Rounded,
    right: Rounded,
    alpha: f32,
    /// Whether the tensor cores may sum with fewer bits. As usual in fp8, forward passes do, and gradients are summed
    /// in f32.
    fast_sums: bool,
}

/// output = alpha · left · rightᵀ + addends.
fn multiply(
    stage: &Stage<'_>,
    Factors { left, right, alpha, fast_sums }: Factors,
    output: &Operand,
    addends: Addends,
    scratch: u64,
) -> Result<(), DeviceError> {
    if !stage.has_hopper_kernels() {
        return multiply_by_own_kernel(stage, (left, right, alpha), output, addends);
    }
    let matrices = [left.codes, right.codes, stage.matrix(output)];
    let matmul = Matmul {
        right_transposed: true,
        addend: addends.matrix,
        bias: addends.bias,
        fp8: Some(Fp8 { left_scales: left.scales, right_scales: right.scales, fast_sums }),
        alpha,
        ..Matmul::of_tokens(matrices, stage.tokens(output), output.columns, left.codes.stride, scratch)
    };
    stage.cublas.run(stage.gpu, &matmul)
}

/// [`multiply`] by the kernel of `fp8_matmul.cu`.
fn multiply_by_own_kernel(
    stage: &Stage<'_>,
    (left, right, alpha): (Rounded, Rounded, f32),
    output: &Operand,
    addends: Addends,
) -> Result<(), DeviceError> {
    let (rows, to, addend) = (stage.rows(output), stage.matrix(output), addends.matrix);
    if rows == 0 {
        return Ok(());
    }
    let matmul = Fp8Matmul {
        left: left.codes.pointer,
        left_scales: left.scales,
        right: right.codes.pointer,
        right_scales: right.scales,
        to: to.pointer,
        to_stride: to.stride as i64,
        addend: addend.map_or(0, |addend| addend.pointer),
        addend_stride: addend.map_or(0, |addend| addend.stride as i64),
        bias: addends.bias.unwrap_or(0),
        rows: rows as i32,
        columns: output.columns as i32,
        depth: left.codes.stride as i32,
        alpha,
    };
    let grid = [output.columns.div_ceil(TILE) as u32, rows.div_ceil(TILE) as u32, 1];
    stage.launch_structure("multiply_fp8", grid, 256, TILE_SHARED_BYTES, &matmul, &[])
}

/// y = x·Wᵀ + bias + scale·h·Bᵀ, and `residual` if there is one.
pub fn linear(
    stage: &Stage<'_>,
    [x, weight, y]: [&Operand; 3],
    bias: Option<&Operand>,
    adapter: Option<(&Operand, &Operand, f32)>,
    residual: Option<&Operand>,
) -> Result<(), DeviceError> {
    let mut scratch = Scratch::of(stage);
    let x = rounded(stage, &mut scratch, x, None)?;
    let b = adapter.map(|(_, b, _)| weight_matrix(stage, &mut scratch, b, AdapterRoom::None)).transpose()?;
    let scratch = scratch.take(MATMUL_BYTES);
    let mut addends = Addends::of(stage, bias, residual, y)?;
    if let (Some((h, _, scale)), Some(b)) = (adapter, b) {
        add_adapter(stage, (h, b, scale), addends.matrix, y, scratch)?;
        addends.matrix = Some(stage.matrix(y));
    }
    let factors = Factors { left: x, right: stored(stage, weight), alpha: 1.0, fast_sums: true };
    multiply(stage, factors, y, addends, scratch)
}

/// dx = scale·d·W + `addend`, one term of the gradient of x.
pub fn linear_grad_term(
    stage: &Stage<'_>,
    (d, weight, scale): (&Operand, &Operand, f32),
    output: &Operand,
    addend: Option<Matrix>,
) -> Result<(), DeviceError> {
    let mut scratch = Scratch::of(stage);
    let d = rounded(stage, &mut scratch, d, Some(stored(stage, weight).scales))?;
    let weight = transposed(stage, &mut scratch, weight)?;
    let addends = Addends { matrix: addend, bias: None };
    let factors = Factors { left: d, right: weight, alpha: scale, fast_sums: false };
    multiply(stage, factors, output, addends, scratch.take(MATMUL_BYTES))
}

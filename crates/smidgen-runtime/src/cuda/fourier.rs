//! LS-LoRA: base + φ(scale·h·Bᵀ) and its gradients; the kernels compute the low-rank matmul themselves.
//!
//! A block handles 128 rows and some columns, and computes its part of the matmul in registers. Its partial sums for
//! the gradients of the module's parameters go to the workspace, and a second launch adds them in order.
//! Kernels: `kernels/fourier.cu`.

use super::decode::is_aligned;
use super::driver::NAME;
use super::generation::Generation;
use super::modules::KernelFile;
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::workspace_cuda::{FOURIER_SUMS, fourier_block_columns, fourier_blocks};
use smidgen_ir::{DType, Op, Storage};

pub const FILE: KernelFile = KernelFile {
    name: "fourier.cu",
    source: concat!(include_str!("../../kernels/matrix_unit.cuh"), include_str!("../../kernels/fourier.cu")),
    kernels: &["fourier", "fourier_grad", "fourier_grad_total"],
};

/// Refuses a rank whose columns of B do not fit the shared memory of a block.
pub fn check(step: &BoundStep, generation: Generation, activations: DType) -> Result<(), DeviceError> {
    let is_forward = matches!(step.op, Op::Fourier { .. });
    if !is_forward && !matches!(step.op, Op::FourierGrad { .. }) {
        return Ok(());
    }
    let h = &step.inputs[usize::from(is_forward)];
    let most = most_rank(generation, activations);
    if h.columns > most {
        let what = format!("a rank of {} of LS-LoRA: this GPU supports up to {most}", h.columns);
        return Err(DeviceError::Call { device: NAME, call: step.op.name(), what });
    }
    Ok(())
}

/// What a block uses in addition, for the module and its sums.
const OTHER_SHARED_BYTES: u32 = 512;

fn most_rank(generation: Generation, activations: DType) -> usize {
    let most = generation.most_shared_bytes() - OTHER_SHARED_BYTES;
    (1..).take_while(|rank| shared_bytes(activations, *rank) <= most).last().unwrap_or(0)
}

/// Inputs base (rows, N), h (rows, R), b (N, R), coefficients (1, 4), sigma (1, 1); output (rows, N), which may be base.
pub fn fourier(stage: &Stage<'_>, step: &BoundStep, scale: f32) -> Result<(), DeviceError> {
    let (base, y) = (&step.inputs[0], &step.outputs[0]);
    let (rows, columns) = (stage.rows(base), base.columns);
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let (base_pointer, y_pointer) = (stage.pointer(base), stage.pointer(y));
    let eight =
        columns.is_multiple_of(8) && is_aligned(base_pointer, base.stride) && is_aligned(y_pointer, y.stride);
    let rank = step.inputs[1].columns;
    let mut args = vec![Arg::Pointer(base_pointer), Arg::Long(base.stride as i64)];
    args.extend(product_args(stage, &step.inputs[1], &step.inputs[2]));
    args.extend([
        Arg::Pointer(stage.pointer(&step.inputs[3])),
        Arg::Pointer(stage.pointer(&step.inputs[4])),
        Arg::Float(scale),
        Arg::Int(rank as i32),
        Arg::Int(rows as i32),
        Arg::Int(columns as i32),
        Arg::Int(i32::from(eight)),
        Arg::Pointer(y_pointer),
        Arg::Long(y.stride as i64),
    ]);
    let (across, down) = fourier_blocks(rows, columns, stage.activations());
    let shared_bytes = shared_bytes(stage.activations(), rank);
    stage.launch("fourier", [across as u32, down as u32, 1], THREADS, shared_bytes, &args)
}

/// Inputs h (rows, R), b (N, R), coefficients (1, 4), sigma (1, 1), dy (rows, N); output dz (rows, N); updates
/// dcoefficients (1, 4), dsigma (1, 1).
pub fn fourier_grad(stage: &Stage<'_>, step: &BoundStep, scale: f32) -> Result<(), DeviceError> {
    let (dy, dz) = (&step.inputs[4], &step.outputs[0]);
    let (rows, columns) = (stage.rows(dy), dy.columns);
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let (dy_pointer, dz_pointer) = (stage.pointer(dy), stage.pointer(dz));
    let eight =
        columns.is_multiple_of(8) && is_aligned(dy_pointer, dy.stride) && is_aligned(dz_pointer, dz.stride);
    let (across, down) = fourier_blocks(rows, columns, stage.activations());
    let (partials, bytes) = stage.workspace();
    let needed = across * down * FOURIER_SUMS * 8;
    assert!(needed <= bytes, "a workspace of {bytes} bytes, {needed} are needed");
    let sigma = stage.pointer(&step.inputs[3]);
    let rank = step.inputs[0].columns;
    let mut args = product_args(stage, &step.inputs[0], &step.inputs[1]).to_vec();
    args.extend([
        Arg::Pointer(stage.pointer(&step.inputs[2])),
        Arg::Pointer(sigma),
        Arg::Float(scale),
        Arg::Int(rank as i32),
        Arg::Pointer(dy_pointer),
        Arg::Long(dy.stride as i64),
        Arg::Int(rows as i32),
        Arg::Int(columns as i32),
        Arg::Int(i32::from(eight)),
        Arg::Pointer(dz_pointer),
        Arg::Long(dz.stride as i64),
        Arg::Pointer(partials),
    ]);
    let grid = [across as u32, down as u32, 1];
    stage.launch("fourier_grad", grid, THREADS, shared_bytes(stage.activations(), rank), &args)?;
    let args = [
        Arg::Pointer(partials),
        Arg::Long((across * down) as i64),
        Arg::Pointer(sigma),
        Arg::Pointer(stage.pointer(&step.updates[0])),
        Arg::Pointer(stage.pointer(&step.updates[1])),
    ];
    stage.launch("fourier_grad_total", [FOURIER_SUMS as u32, 1, 1], THREADS, 0, &args)
}

/// h and b with their strides, both in the type of activations.
fn product_args(stage: &Stage<'_>, h: &Operand, b: &Operand) -> [Arg; 5] {
    for matrix in [h, b] {
        let expected = Storage::Plain(stage.activations());
        assert_eq!(matrix.storage, expected, "type of h and b");
    }
    let pointer = stage.pointer(h);
    // Two 16-bit numbers in one read.
    let pairs = pointer.is_multiple_of(4) && h.stride.is_multiple_of(2) && h.columns.is_multiple_of(2);
    [
        Arg::Pointer(pointer),
        Arg::Long(h.stride as i64),
        Arg::Int(i32::from(pairs)),
        Arg::Pointer(stage.pointer(b)),
        Arg::Long(b.stride as i64),
    ]
}

/// The columns of B that a block needs; with 16-bit activations R is rounded up to a multiple of 16.
fn shared_bytes(activations: DType, rank: usize) -> u32 {
    let columns = fourier_block_columns(activations);
    let bytes = match activations {
        DType::Bf16 | DType::F16 => rank.next_multiple_of(16) * columns * 2,
        DType::F32 | DType::F64 | DType::I32 | DType::U64 => rank * columns * 4,
    };
    bytes as u32
}

/// As in `fourier.cu`.
const THREADS: u32 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_rank_follows_from_the_shared_memory() {
        let of = |generation| [DType::F32, DType::F16].map(|activations| most_rank(generation, activations));
        assert_eq!(of(Generation::Turing), [254, 240]);
        assert_eq!(of(Generation::Ampere), [394, 384]);
    }
}

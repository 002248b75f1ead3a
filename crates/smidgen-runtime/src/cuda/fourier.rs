//! LS-LoRA: base + φ(scale·h·Bᵀ) and its gradients; the kernels compute the low-rank matmul themselves.
//!
//! A block handles 256 rows and some columns, and computes its part of the matmul in registers. It writes partial sums
//! for the gradients of the module's parameters to the workspace, and a second launch adds them in order.
//! Kernels: `kernels/fourier.cu`.

use super::decode::is_aligned;
use super::driver::NAME;
use super::gpu_generation::Generation;
use super::modules::KernelFile;
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::workspace_cuda::{FOURIER_SUMS, fourier_block_columns, fourier_blocks};
use smidgen_ir::{DType, Op, Storage};

pub const FILE: KernelFile = KernelFile {
    name: "fourier.cu",
    source: concat!(include_str!("../../kernels/matrix_unit.cuh"), include_str!("../../kernels/fourier.cu")),
    kernels: &[
        "fourier_eight",
        "fourier_one",
        "fourier_grad_eight",
        "fourier_grad_one",
        "fourier_grad_total",
    ],
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
        let what = format!("LS-LoRA has rank {}, and this GPU supports up to {most}", h.columns);
        return Err(DeviceError::Call { device: NAME, call: step.op.name(), what });
    }
    Ok(())
}

/// Shared memory of a block for the module's parameters and the sums.
const OTHER_SHARED_BYTES: u32 = 512;

fn most_rank(generation: Generation, activations: DType) -> usize {
    let most = generation.most_shared_bytes() - OTHER_SHARED_BYTES;
    (1..).take_while(|rank| shared_bytes(activations, *rank) <= most).last().unwrap_or(0)
}

/// Must match the struct in `fourier.cu`.
#[repr(C)]
struct LowRank {
    h: u64,
    h_stride: i64,
    b: u64,
    b_stride: i64,
    rank: i32,
    rows: i32,
    columns: i32,
}

/// Must match the struct in `fourier.cu`. Forward: `from` is base and `to` is y. Backward: `from` is dy and `to` is dz.
#[repr(C)]
struct Fourier {
    low_rank: LowRank,
    coefficients: u64,
    sigma: u64,
    scale: f32,
    from: u64,
    from_stride: i64,
    to: u64,
    to_stride: i64,
    /// Used by the backward kernels only.
    partials: u64,
}

/// h, b, coefficients and sigma of a module.
type ModuleOperands<'a> = [&'a Operand; 4];

/// Launches the first of two kernels if the operands are aligned, or else the second.
fn launch(
    stage: &Stage<'_>,
    kernels: [&'static str; 2],
    [h, b, coefficients, sigma]: ModuleOperands<'_>,
    scale: f32,
    [from, to]: [&Operand; 2],
    partials: u64,
) -> Result<(), DeviceError> {
    for matrix in [h, b] {
        let expected = Storage::Plain(stage.activations);
        assert_eq!(matrix.storage, expected, "type of h and b");
    }
    let (rows, columns, rank) = (stage.rows(from), from.columns, h.columns);
    let low_rank = LowRank {
        h: stage.pointer(h),
        h_stride: h.stride as i64,
        b: stage.pointer(b),
        b_stride: b.stride as i64,
        rank: rank as i32,
        rows: rows as i32,
        columns: columns as i32,
    };
    let fourier = Fourier {
        low_rank,
        coefficients: stage.pointer(coefficients),
        sigma: stage.pointer(sigma),
        scale,
        from: stage.pointer(from),
        from_stride: from.stride as i64,
        to: stage.pointer(to),
        to_stride: to.stride as i64,
        partials,
    };
    // Whether two 16-bit elements of h can be read at once.
    let pairs = fourier.low_rank.h.is_multiple_of(4) && h.stride.is_multiple_of(2) && rank.is_multiple_of(2);
    let spans = columns.is_multiple_of(8)
        && [from, to].iter().all(|operand| is_aligned(stage.pointer(operand), operand.stride));
    let kernel = kernels[usize::from(!(pairs && spans))];
    let (across, down) = fourier_blocks(rows, columns, stage.activations);
    let shared_bytes = shared_bytes(stage.activations, rank);
    stage.launch_structure(kernel, [across as u32, down as u32, 1], THREADS, shared_bytes, &fourier, &[])
}

/// Inputs base (rows, N), h (rows, R), b (N, R), coefficients (1, 4), sigma (1, 1); output (rows, N), which may be
/// base.
pub fn fourier(stage: &Stage<'_>, step: &BoundStep, scale: f32) -> Result<(), DeviceError> {
    let [base, h, b, coefficients, sigma] = &step.inputs[..] else {
        unreachable!("the shape rule asks for five")
    };
    if stage.rows(base) == 0 || base.columns == 0 {
        return Ok(());
    }
    let module = [h, b, coefficients, sigma];
    launch(stage, ["fourier_eight", "fourier_one"], module, scale, [base, &step.outputs[0]], 0)
}

/// Inputs h (rows, R), b (N, R), coefficients (1, 4), sigma (1, 1), dy (rows, N); output dz (rows, N); updates
/// dcoefficients (1, 4), dsigma (1, 1).
pub fn fourier_grad(stage: &Stage<'_>, step: &BoundStep, scale: f32) -> Result<(), DeviceError> {
    let [h, b, coefficients, sigma, dy] = &step.inputs[..] else {
        unreachable!("the shape rule asks for five")
    };
    let (rows, columns) = (stage.rows(dy), dy.columns);
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let (across, down) = fourier_blocks(rows, columns, stage.activations);
    let partials = stage.workspace_of(across * down * FOURIER_SUMS * 8);
    let (module, kernels) = ([h, b, coefficients, sigma], ["fourier_grad_eight", "fourier_grad_one"]);
    launch(stage, kernels, module, scale, [dy, &step.outputs[0]], partials)?;
    let args = [
        Arg::Pointer(partials),
        Arg::Long((across * down) as i64),
        stage.address(sigma),
        stage.address(&step.updates[0]),
        stage.address(&step.updates[1]),
    ];
    stage.launch("fourier_grad_total", [FOURIER_SUMS as u32, 1, 1], THREADS, 0, &args)
}

/// Shared memory for the part of B that a block needs. With 16-bit activations the rank is rounded up to a multiple of
/// 16.
fn shared_bytes(activations: DType, rank: usize) -> u32 {
    let columns = fourier_block_columns(activations);
    let bytes = match activations {
        DType::Bf16 | DType::F16 => rank.next_multiple_of(16) * columns * 2,
        DType::F32 | DType::F64 | DType::I32 | DType::U64 => rank * columns * 4,
    };
    bytes as u32
}

/// Must match `fourier.cu`.
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

//! The low-rank matmuls of an adapter, with kernels of their own: h = x·Aᵀ, sums over tokens, and dB and dh from one
//! read of dy.
//!
//! One operand is wide and the others have few columns, so reading the wide one takes nearly all of the time. A block
//! handles some tokens and some columns. Partial sums go to the workspace of the step's matmuls, and a second launch
//! adds them in order. The ranges of tokens and columns depend on planned sizes, so a shorter micro-batch only leaves
//! out ranges. Left to cuBLASLt: f32, ranks over 32 or not multiples of 8, rows that are not aligned to 16 bytes, GPUs
//! without the matrix instruction (Volta).
//! Kernels: `kernels/thin.cu`.

use super::gpu_generation::Generation;
use super::matmul::{Element, Matrix, Tokens};
use super::modules::KernelFile;
use super::spans::{int, long};
use super::stage::{Arg, Stage};
use crate::device::{DeviceError, Operand};
use smidgen_ir::workspace_cuda::{
    AdapterGradCut, MATMUL_BYTES, MOST_THIN_RANK, OUTER_SUM_COLUMNS, ThinMatmulCut, adapter_grad_bytes,
    outer_sum_bytes, outer_sum_range_tokens, padded_thin_rank,
};
use smidgen_ir::{DType, Storage};

/// For 16-bit activations only; in f32 the file has no kernels.
pub const FILE: KernelFile = KernelFile {
    name: "thin.cu",
    source: concat!(include_str!("../../kernels/matrix_unit.cuh"), include_str!("../../kernels/thin.cu")),
    kernels: &[
        "adapter_grad_256_16",
        "adapter_grad_256_32",
        "adapter_grad_512_16",
        "adapter_grad_512_32",
        "thin_sums_16",
        "thin_sums_32",
        "thin_sums_64",
        "thin_matmul_of_rows_16",
        "thin_matmul_of_rows_32",
        "thin_matmul_of_rows_64",
        "thin_matmul_of_columns_16",
        "thin_matmul_of_columns_32",
        "thin_matmul_of_columns_64",
        "thin_total",
    ],
};

/// Whether the kernels support a wide matrix of `columns` columns and thin ones of `rank`: the matrices have the type
/// of activations, gradients f32, and all rows are aligned to 16 bytes.
fn fits(activations: Element, rank: usize, columns: usize, matrices: &[Matrix]) -> bool {
    let whole = |number: usize| number > 0 && number.is_multiple_of(8);
    let is_supported = |matrix: &Matrix| {
        let known = matrix.element == activations || matrix.element == Element::F32;
        known
            && matrix.pointer.is_multiple_of(16)
            && (matrix.stride * matrix.element.bytes()).is_multiple_of(16)
    };
    let sixteen_bits = matches!(activations, Element::Bf16 | Element::F16);
    sixteen_bits
        && rank <= MOST_THIN_RANK
        && whole(rank)
        && whole(columns)
        && matrices.iter().all(is_supported)
}

/// Whether [`adapter_grad`] supports these operands: dy, h, b and dh, and db.
pub fn adapter_grad_fits(stage: &Stage<'_>, acts: [&Operand; 4], db: &Operand) -> bool {
    let [dy, h, b, dh] = acts;
    has_kernels(stage)
        && are_activations(stage, &acts)
        && db.storage == Storage::Plain(DType::F32)
        && fits(stage.element(), h.columns, dy.columns, &[dy, h, b, dh, db].map(|it| stage.matrix(it)))
}

/// Whether [`outer_sum`] supports these operands.
pub fn outer_sum_fits(stage: &Stage<'_>, left: Matrix, right: Matrix, gradient: &Operand) -> bool {
    let (rows, columns) = (stage.rows(gradient), gradient.columns);
    has_kernels(stage)
        && left.element == stage.element()
        && right.element == stage.element()
        && gradient.storage == Storage::Plain(DType::F32)
        && fits(stage.element(), rows.min(columns), rows.max(columns), &[left, right, stage.matrix(gradient)])
}

/// Whether [`thin_matmul`] supports these operands.
pub fn thin_matmul_fits(stage: &Stage<'_>, x: &Operand, a: &Operand, h: &Operand) -> bool {
    has_kernels(stage)
        && are_activations(stage, &[x, a, h])
        && fits(stage.element(), h.columns, x.columns, &[x, a, h].map(|operand| stage.matrix(operand)))
}

/// Whether the GPU has these kernels. Volta has no matrix instruction, and emulating it would take longer than reading
/// the wide matrix.
fn has_kernels(stage: &Stage<'_>) -> bool {
    stage.generation() > Generation::Volta
}

fn are_activations(stage: &Stage<'_>, operands: &[&Operand]) -> bool {
    operands.iter().all(|operand| operand.storage == Storage::Plain(stage.activations))
}

/// dh (T, R) = dy (T, N)·b (N, R), and db (N, R) += scale·dyᵀ·h (T, R).
pub fn adapter_grad(
    stage: &Stage<'_>,
    dy: &Operand,
    h: &Operand,
    b: &Operand,
    dh: &Operand,
    db: &Operand,
    scale: f32,
) -> Result<(), DeviceError> {
    let tokens = stage.tokens(dy);
    let (columns, rank) = (dy.columns, h.columns);
    let scratch = matmul_scratch(stage);
    let [wide, thin, right, output, gradient] = [dy, h, b, dh, db].map(|operand| stage.matrix(operand));
    let generation = stage.generation();
    let shared_bytes = |cut: &AdapterGradCut| {
        adapter_grad_shared_bytes(cut.block_columns, padded_thin_rank(rank), generation)
    };
    let cut = AdapterGradCut::of(tokens.planned, columns, rank)
        .filter(|cut| shared_bytes(cut) <= generation.most_shared_bytes());
    let Some(cut) = cut else {
        let factors = Factors { wide, thin: right, form: Form::OfColumns, columns, rank };
        matmul(stage, factors, tokens, output, scratch)?;
        return outer_sum(stage, wide, thin, tokens, scale, db, scratch);
    };
    let needed = adapter_grad_bytes(tokens.planned, columns, rank);
    assert!(needed <= MATMUL_BYTES, "{needed} bytes of partial sums");
    let kernel = match (cut.block_columns, padded_thin_rank(rank)) {
        (256, 16) => "adapter_grad_256_16",
        (256, _) => "adapter_grad_256_32",
        (_, 16) => "adapter_grad_512_16",
        (_, _) => "adapter_grad_512_32",
    };
    let across = columns.div_ceil(cut.block_columns);
    let sums = scratch + cut.matmul_bytes(columns, rank) as u64;
    for first in (0..tokens.rows).step_by(cut.launch_tokens) {
        let rows = cut.launch_tokens.min(tokens.rows - first);
        let places = SumPlaces::of(gradient, sums, scale, cut.ranges(), columns * rank, rank);
        let mut args = matrix_args(&[wide.at(first, 0), thin.at(first, 0), right]);
        args.extend([rows, columns, rank, cut.range_tokens].map(int));
        args.push(Arg::Pointer(scratch));
        args.extend(places.args);
        let ranges = rows.div_ceil(cut.range_tokens);
        let grid = [across as u32, ranges as u32, 1];
        stage.launch(kernel, grid, (cut.block_columns / 2) as u32, shared_bytes(&cut), &args)?;
        let sums = places.partial.then_some(Sums {
            parts: Parts { first: sums, count: ranges, rows: columns, width: rank },
            gradient,
            scale,
        });
        let matmul_parts = Parts { first: scratch, count: across, rows, width: rank };
        total(stage, sums, Some((matmul_parts, output.at(first, 0))))?;
    }
    Ok(())
}

/// gradient (P, Q) += scale·left (T, P)ᵀ·right (T, Q), where one of left and right is thin.
pub fn outer_sum(
    stage: &Stage<'_>,
    left: Matrix,
    right: Matrix,
    tokens: Tokens,
    scale: f32,
    gradient: &Operand,
    scratch: u64,
) -> Result<(), DeviceError> {
    if tokens.rows == 0 {
        return Ok(());
    }
    let (rows, width) = (stage.rows(gradient), gradient.columns);
    let across = rows <= width;
    let (wide, thin) = if across { (right, left) } else { (left, right) };
    let (columns, rank) = (rows.max(width), rows.min(width));
    let needed = outer_sum_bytes(tokens.planned, columns, rank);
    assert!(needed <= MATMUL_BYTES, "{needed} bytes of partial sums");
    let range_tokens = outer_sum_range_tokens(tokens.planned, columns, rank);
    let target = stage.matrix(gradient);
    let planned_ranges = tokens.planned.div_ceil(range_tokens);
    let places = SumPlaces::of(target, scratch, scale, planned_ranges, columns * rank, width);
    let mut args = matrix_args(&[wide, thin]);
    args.extend([tokens.rows, columns, rank, range_tokens].map(int));
    let [sums, range_stride, row_stride, adds, factor] = places.args;
    args.extend([sums, range_stride, row_stride, Arg::Int(i32::from(across)), adds, factor]);
    let padded = padded_thin_rank(rank);
    let kernel = match padded {
        16 => "thin_sums_16",
        32 => "thin_sums_32",
        _ => "thin_sums_64",
    };
    let ranges = tokens.rows.div_ceil(range_tokens);
    let grid = [columns.div_ceil(OUTER_SUM_COLUMNS) as u32, ranges as u32, 1];
    let shared_bytes = outer_sum_shared_bytes(padded, stage.generation());
    stage.launch(kernel, grid, (OUTER_SUM_COLUMNS / 2) as u32, shared_bytes, &args)?;
    if !places.partial {
        return Ok(());
    }
    let parts = Parts { first: scratch, count: ranges, rows, width };
    total(stage, Some(Sums { parts, gradient: target, scale }), None)
}

/// h (T, R) = x (T, K)·a (R, K)ᵀ.
pub fn thin_matmul(stage: &Stage<'_>, x: &Operand, a: &Operand, h: &Operand) -> Result<(), DeviceError> {
    let tokens = stage.tokens(x);
    let [wide, thin, output] = [x, a, h].map(|operand| stage.matrix(operand));
    let scratch = matmul_scratch(stage);
    let (columns, rank) = (x.columns, h.columns);
    matmul(stage, Factors { wide, thin, form: Form::OfRows, columns, rank }, tokens, output, scratch)
}

/// The layout of the thin operand.
#[derive(Clone, Copy)]
enum Form {
    /// (R, K).
    OfRows,
    /// (K, R).
    OfColumns,
}

/// A wide matrix (T, columns) and a thin matrix.
#[derive(Clone, Copy)]
struct Factors {
    wide: Matrix,
    thin: Matrix,
    form: Form,
    columns: usize,
    rank: usize,
}

fn matmul(
    stage: &Stage<'_>,
    Factors { wide, thin, form, columns, rank }: Factors,
    tokens: Tokens,
    output: Matrix,
    scratch: u64,
) -> Result<(), DeviceError> {
    if tokens.rows == 0 {
        return Ok(());
    }
    let cut = ThinMatmulCut::of(tokens.planned, columns, rank);
    let needed = cut.bytes(tokens.planned, columns, rank);
    assert!(needed <= MATMUL_BYTES, "{needed} bytes of partial sums");
    let padded = padded_thin_rank(rank);
    let kernel = match (form, padded) {
        (Form::OfRows, 16) => "thin_matmul_of_rows_16",
        (Form::OfRows, 32) => "thin_matmul_of_rows_32",
        (Form::OfRows, _) => "thin_matmul_of_rows_64",
        (Form::OfColumns, 16) => "thin_matmul_of_columns_16",
        (Form::OfColumns, 32) => "thin_matmul_of_columns_32",
        (Form::OfColumns, _) => "thin_matmul_of_columns_64",
    };
    let ranges = cut.ranges(columns);
    let mut args = matrix_args(&[wide, thin]);
    args.extend([tokens.rows, columns, rank, cut.range_columns].map(int));
    let parts = if ranges > 1 { scratch } else { 0 };
    args.extend([Arg::Pointer(parts), Arg::Pointer(output.pointer), long(output.stride)]);
    let grid = [ranges as u32, tokens.rows.div_ceil(cut.block_tokens) as u32, 1];
    stage.launch(kernel, grid, 128, matmul_shared_bytes(&cut, padded, stage.generation()), &args)?;
    if ranges == 1 {
        return Ok(());
    }
    let parts = Parts { first: scratch, count: ranges, rows: tokens.rows, width: rank };
    total(stage, None, Some((parts, output)))
}

/// Address and stride of each matrix.
fn matrix_args(matrices: &[Matrix]) -> Vec<Arg> {
    matrices.iter().flat_map(|matrix| [Arg::Pointer(matrix.pointer), long(matrix.stride)]).collect()
}

/// The destination of sums over tokens: the gradient if there is a single range of tokens, or else partial sums.
struct SumPlaces {
    /// Whether the destination is partial sums.
    partial: bool,
    /// Address, elements from one range to the next, row stride, whether to add, and the factor.
    args: [Arg; 5],
}

impl SumPlaces {
    fn of(
        gradient: Matrix,
        sums: u64,
        scale: f32,
        ranges: usize,
        elements: usize,
        width: usize,
    ) -> SumPlaces {
        let partial = ranges > 1;
        let (pointer, stride) = if partial { (sums, width) } else { (gradient.pointer, gradient.stride) };
        let adds = Arg::Int(i32::from(!partial));
        SumPlaces {
            partial,
            args: [Arg::Pointer(pointer), long(elements), long(stride), adds, Arg::Float(scale)],
        }
    }
}

/// Consecutive matrices (rows, width) of f32.
#[derive(Clone, Copy)]
struct Parts {
    first: u64,
    count: usize,
    rows: usize,
    width: usize,
}

impl Parts {
    const NONE: Parts = Parts { first: 0, count: 0, rows: 0, width: 4 };

    /// Blocks of `thin_total`.
    fn blocks(&self) -> usize {
        (self.rows * self.width / 4).div_ceil(64)
    }

    fn args(&self) -> [Arg; 5] {
        let stride = long(self.rows * self.width);
        [Arg::Pointer(self.first), int(self.count), stride, int(self.rows), int(self.width)]
    }
}

/// Partial sums over tokens that are added to a gradient, times a factor.
struct Sums {
    parts: Parts,
    gradient: Matrix,
    scale: f32,
}

/// Adds up partial sums: `sums` into a gradient, and the parts of a matmul into its output.
fn total(stage: &Stage<'_>, sums: Option<Sums>, matmul: Option<(Parts, Matrix)>) -> Result<(), DeviceError> {
    let nothing = Matrix { pointer: 0, stride: 0, element: Element::F32 };
    let sums = sums.unwrap_or(Sums { parts: Parts::NONE, gradient: nothing, scale: 0.0 });
    let (matmul_parts, output) = matmul.unwrap_or((Parts::NONE, nothing));
    let mut args = sums.parts.args().to_vec();
    args.extend([Arg::Pointer(sums.gradient.pointer), long(sums.gradient.stride), Arg::Float(sums.scale)]);
    args.push(int(sums.parts.blocks()));
    args.extend(matmul_parts.args());
    args.extend([Arg::Pointer(output.pointer), long(output.stride)]);
    let blocks = sums.parts.blocks() + matmul_parts.blocks();
    stage.launch("thin_total", [blocks as u32, 1, 1], 256, 0, &args)
}

/// The part of the step's workspace that belongs to matmuls: its end.
fn matmul_scratch(stage: &Stage<'_>) -> u64 {
    let (pointer, bytes) = stage.workspace();
    assert!(bytes >= MATMUL_BYTES, "a workspace of {bytes} bytes, matmuls need {MATMUL_BYTES}");
    pointer + (bytes - MATMUL_BYTES) as u64
}

/// Bytes of a tile of the wide matrix. Must match `thin.cu`.
const TILE_BYTES: usize = 16 << 10;

/// The number of pipeline stages. Must match `thin.cu`.
const fn stages(padded: usize, generation: Generation) -> usize {
    match (generation.copies_asynchronously(), padded) {
        (false, _) => 2,
        (true, 16) => 4,
        (true, _) => 3,
    }
}

/// Shared memory for a double buffer in which warps exchange dh, and for the tiles of dy and h.
const fn adapter_grad_shared_bytes(block_columns: usize, padded: usize, generation: Generation) -> u32 {
    let (warps, tokens) = (block_columns / 64, TILE_BYTES / 2 / block_columns);
    let exchange = 2 * warps * tokens * padded * 4;
    (exchange + stages(padded, generation) * (TILE_BYTES + tokens * padded * 2)) as u32
}

const fn outer_sum_shared_bytes(padded: usize, generation: Generation) -> u32 {
    let tokens = TILE_BYTES / 2 / OUTER_SUM_COLUMNS;
    (stages(padded, generation) * (TILE_BYTES + tokens * padded * 2)) as u32
}

const fn matmul_shared_bytes(cut: &ThinMatmulCut, padded: usize, generation: Generation) -> u32 {
    let columns = TILE_BYTES / 2 / cut.block_tokens;
    (stages(padded, generation) * (TILE_BYTES + columns * padded * 2)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_alignments_that_kernels_support() {
        let at = |pointer: u64, stride: usize, element: Element| Matrix { pointer, stride, element };
        let act = at(4096, 3600, Element::Bf16);
        let supports = |rank, columns, matrix: Matrix| fits(Element::Bf16, rank, columns, &[act, matrix]);
        assert!(
            supports(16, 3584, act)
                && supports(8, 8, at(16, 8, Element::F32))
                && supports(32, 64, at(16, 4, Element::F32))
                && !supports(64, 64, act)
        );
        assert!(!supports(72, 3584, act) && !supports(12, 3584, act) && !supports(0, 3584, act));
        assert!(!supports(16, 3580, act));
        assert!(!supports(16, 3584, at(8, 3584, Element::Bf16)), "rows aligned to 8 bytes only");
        assert!(!supports(16, 3584, at(16, 3588, Element::Bf16)), "odd rows aligned to 8 bytes only");
        assert!(!supports(16, 3584, at(16, 18, Element::F32)));
        assert!(!supports(16, 3584, at(16, 3584, Element::F16)));
        assert!(!fits(Element::F32, 16, 3584, &[]));
    }

    /// `thin.cu` uses the same sizes. Before Ampere the gradients of an adapter of rank 32 use two kernels instead.
    #[test]
    fn tiles_fit_shared_memory() {
        for generation in [Generation::Turing, Generation::Ampere] {
            let most = generation.most_shared_bytes();
            for (padded, columns) in [(16, 256), (16, 512), (32, 256), (32, 512)] {
                let fits = adapter_grad_shared_bytes(columns, padded, generation) <= most;
                assert_eq!(fits, padded == 16 || generation == Generation::Ampere, "{padded}, {columns}");
            }
            for padded in [16, 32, 64] {
                let cut = ThinMatmulCut::of(8192, 3584, padded);
                assert!(outer_sum_shared_bytes(padded, generation) <= most);
                assert!(matmul_shared_bytes(&cut, padded, generation) <= most);
            }
        }
        assert_eq!(adapter_grad_shared_bytes(256, 16, Generation::Ampere), 86_016);
        assert_eq!(adapter_grad_shared_bytes(512, 32, Generation::Ampere), 84_992);
        assert_eq!(adapter_grad_shared_bytes(256, 16, Generation::Turing), 51_200);
    }
}

//! Matmuls of rows sorted by expert with the matrices of their experts, which are decoded inside the matmul.
//!
//! Which rows belong to an expert is found on the GPU, so a launch has tiles for the most rows that there can be. A sum of
//! several terms is one launch for each, in order. Kernels: `kernels/grouped.cu` and `kernels/grouped_gguf.cu`, which share
//! `kernels/grouped.cuh`.

use super::decode::{is_aligned, reads_by_eights};
use super::modules::KernelFile;
use super::spans::{count, dtype_code, int, long};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::workspace_cuda::{GROUP_TILE, group_tiles};
use smidgen_ir::{Block, Code4, DType, ExpertRows, Storage};

pub const FILE: KernelFile = KernelFile {
    name: "grouped.cu",
    source: concat!(
        include_str!("../../kernels/dynamic_map.cuh"),
        include_str!("../../kernels/decode.cuh"),
        include_str!("../../kernels/decode_formats.cuh"),
        include_str!("../../kernels/matrix_unit.cuh"),
        include_str!("../../kernels/grouped.cuh"),
        include_str!("../../kernels/grouped.cu")
    ),
    kernels: &[
        "grouped_f32",
        "grouped_bf16",
        "grouped_f16",
        "grouped_int8",
        "grouped_fp8",
        "grouped_fp8_blocks",
        "grouped_bnb4",
        "grouped_bnb4_nested",
        "group_tiles",
        "grouped_weight_grad",
        "grouped_bias_grad",
    ],
};

pub const GGUF_FILE: KernelFile = KernelFile {
    name: "grouped_gguf.cu",
    source: concat!(
        include_str!("../../kernels/decode.cuh"),
        include_str!("../../kernels/decode_gguf.cu"),
        include_str!("../../kernels/matrix_unit.cuh"),
        include_str!("../../kernels/grouped.cuh"),
        include_str!("../../kernels/grouped_gguf.cu")
    ),
    kernels: &[
        "grouped_q4_0",
        "grouped_q4_1",
        "grouped_q5_0",
        "grouped_q5_1",
        "grouped_q8_0",
        "grouped_q4_k",
        "grouped_q5_k",
        "grouped_q6_k",
        "grouped_q2_k",
        "grouped_q3_k",
        "grouped_iq4_nl",
        "grouped_iq4_xs",
        "grouped_mxfp4",
        "grouped_int4_by_32",
        "grouped_int4_by_128",
    ],
};

/// Threads of a block, and the columns of a row of a tile in shared memory, as in `grouped.cuh`.
const THREADS: u32 = 128;
const STRIDE: usize = 40;

/// As in `decode.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Source {
    bytes: u64,
    rows: i64,
    stride: i64,
    columns: i32,
    code: i32,
}

/// As in `grouped.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Grouped {
    left: u64,
    left_stride: i64,
    left_aligned: i32,
    source: Source,
    source_row: i64,
    source_aligned: i32,
    rows_of_expert: i32,
    first: i32,
    rows: i32,
    turned: i32,
    to: u64,
    to_stride: i64,
    columns: i32,
    adds: i32,
    scale: f32,
    bias: u64,
    bias_type: i32,
    offsets: u64,
    first_tiles: u64,
    tiles: u64,
}

/// Where the rows of each expert begin, in the workspace of the step.
#[derive(Clone, Copy)]
struct Groups {
    offsets: u64,
    first_tiles: u64,
    tiles: u64,
    tile_count: usize,
}

impl Groups {
    /// Finds the rows of each expert; `None` without rows.
    fn find(stage: &Stage<'_>, sorted: &Operand, experts: usize) -> Result<Option<Groups>, DeviceError> {
        let rows = stage.rows(sorted);
        if rows == 0 {
            return Ok(None);
        }
        let tile_count = group_tiles(rows, experts);
        let offsets = stage.workspace_of(4 * (2 * (experts + 1) + tile_count));
        let first_tiles = offsets + 4 * (experts + 1) as u64;
        let tiles = first_tiles + 4 * (experts + 1) as u64;
        let args = [
            stage.address(sorted),
            int(rows),
            int(experts),
            Arg::Pointer(offsets),
            Arg::Pointer(first_tiles),
            Arg::Pointer(tiles),
            int(tile_count),
        ];
        stage.launch("group_tiles", [1, 1, 1], 256, 0, &args)?;
        Ok(Some(Groups { offsets, first_tiles, tiles, tile_count }))
    }
}

/// A matmul of sorted rows, and the part of each expert's matrix that it uses.
#[derive(Clone, Copy)]
struct Term<'a> {
    left: &'a Operand,
    matrix: &'a Operand,
    part: &'a ExpertRows,
    /// dx = d·W instead of y = x·Wᵀ.
    turned: bool,
    bias: Option<&'a Operand>,
    scale: f32,
}

/// Writes a term to the output of the step, or adds it.
fn launch(
    stage: &Stage<'_>,
    step: &BoundStep,
    groups: &Groups,
    term: Term<'_>,
    adds: bool,
) -> Result<(), DeviceError> {
    let Term { left, matrix, part, turned, bias, scale } = term;
    let (y, all) = (&step.outputs[0], stage.rows(matrix));
    let (source_row, total_rows) = stage.rows_in_tensor(matrix);
    let bytes = stage.pointer(matrix);
    let aligned = matrix.columns.is_multiple_of(8) && reads_by_eights(matrix, bytes, total_rows);
    let grouped = Grouped {
        left: stage.pointer(left),
        left_stride: left.stride as i64,
        left_aligned: i32::from(is_aligned(stage.pointer(left), left.stride)),
        source: Source {
            bytes,
            rows: total_rows as i64,
            stride: matrix.stride as i64,
            columns: matrix.columns as i32,
            code: i32::from(matches!(matrix.storage, Storage::Bnb4 { code: Code4::Fp4, .. })),
        },
        source_row: source_row as i64,
        source_aligned: i32::from(aligned),
        rows_of_expert: (all / part.experts) as i32,
        first: part.first as i32,
        rows: part.rows as i32,
        turned: i32::from(turned),
        to: stage.pointer(y),
        to_stride: y.stride as i64,
        columns: y.columns as i32,
        adds: i32::from(adds),
        scale,
        bias: bias.map_or(0, |bias| stage.pointer(bias)),
        bias_type: bias.map_or(0, dtype_code),
        offsets: groups.offsets,
        first_tiles: groups.first_tiles,
        tiles: groups.tiles,
    };
    let grid = [count(y.columns.div_ceil(GROUP_TILE)), count(groups.tile_count), 1];
    stage.launch_structure(kernel_of(matrix.storage), grid, THREADS, shared_bytes(stage), &grouped, &[])
}

/// Shared memory of both tiles.
fn shared_bytes(stage: &Stage<'_>) -> u32 {
    count(2 * GROUP_TILE * STRIDE * stage.activations.bytes())
}

/// Each row times the rows of its expert's matrix, plus bias and adapter.
pub fn grouped_linear(
    stage: &Stage<'_>,
    step: &BoundStep,
    part: &ExpertRows,
    bias: bool,
    lora: Option<f32>,
) -> Result<(), DeviceError> {
    let Some(groups) = Groups::find(stage, &step.inputs[2], part.experts)? else { return Ok(()) };
    let (turned, h) = (false, 3 + usize::from(bias));
    let bias = bias.then(|| &step.inputs[3]);
    let term = Term { left: &step.inputs[0], matrix: &step.inputs[1], part, turned, bias, scale: 1.0 };
    launch(stage, step, &groups, term, false)?;
    let Some(scale) = lora else { return Ok(()) };
    let (left, matrix) = (&step.inputs[h], &step.inputs[h + 1]);
    launch(stage, step, &groups, Term { left, matrix, part, turned, bias: None, scale }, true)
}

/// The sum of gradients times the rows of their experts' matrices.
pub fn grouped_linear_grad(
    stage: &Stage<'_>,
    step: &BoundStep,
    parts: &[ExpertRows],
    scales: &[f32],
) -> Result<(), DeviceError> {
    let sorted = &step.inputs[2 * parts.len()];
    let Some(groups) = Groups::find(stage, sorted, parts[0].experts)? else { return Ok(()) };
    for (index, (part, scale)) in parts.iter().zip(scales).enumerate() {
        let (left, matrix) = (&step.inputs[2 * index], &step.inputs[2 * index + 1]);
        let term = Term { left, matrix, part, turned: true, bias: None, scale: *scale };
        launch(stage, step, &groups, term, index > 0)?;
    }
    Ok(())
}

/// Adds scale·dyᵀ·x of the rows of each expert to its rows of the gradient.
pub fn grouped_weight_grad(
    stage: &Stage<'_>,
    step: &BoundStep,
    part: &ExpertRows,
    scale: f32,
) -> Result<(), DeviceError> {
    let (dy, x, dw) = (&step.inputs[0], &step.inputs[1], &step.updates[0]);
    let Some(groups) = Groups::find(stage, &step.inputs[2], part.experts)? else { return Ok(()) };
    let args = [
        stage.address(dy),
        long(dy.stride),
        int(dy.columns),
        stage.address(x),
        long(x.stride),
        int(x.columns),
        Arg::Float(scale),
        int(stage.rows(dw) / part.experts),
        int(part.first),
        stage.address(dw),
        long(dw.stride),
        Arg::Pointer(groups.offsets),
    ];
    let grid = [x.columns, dy.columns].map(|columns| count(columns.div_ceil(GROUP_TILE)));
    let grid = [grid[0], grid[1], count(part.experts)];
    stage.launch("grouped_weight_grad", grid, THREADS, shared_bytes(stage), &args)
}

/// Adds the sums of the rows of each expert to its part of the gradient.
pub fn grouped_bias_grad(stage: &Stage<'_>, step: &BoundStep, part: &ExpertRows) -> Result<(), DeviceError> {
    let (dy, dbias) = (&step.inputs[0], &step.updates[0]);
    let Some(groups) = Groups::find(stage, &step.inputs[1], part.experts)? else { return Ok(()) };
    let args = [
        stage.address(dy),
        long(dy.stride),
        int(dy.columns),
        int(stage.rows(dbias) / part.experts),
        int(part.first),
        stage.address(dbias),
        Arg::Pointer(groups.offsets),
    ];
    let grid = [count(dy.columns.div_ceil(256)), count(part.experts), 1];
    stage.launch("grouped_bias_grad", grid, 256, 0, &args)
}

fn kernel_of(storage: Storage) -> &'static str {
    match storage {
        Storage::Plain(DType::F32) => "grouped_f32",
        Storage::Plain(DType::Bf16) => "grouped_bf16",
        Storage::Plain(DType::F16) => "grouped_f16",
        Storage::Int8Rows => "grouped_int8",
        Storage::Fp8Rows => "grouped_fp8",
        Storage::Fp8Blocks => "grouped_fp8_blocks",
        Storage::Bnb4 { double: false, .. } => "grouped_bnb4",
        Storage::Bnb4 { double: true, .. } => "grouped_bnb4_nested",
        Storage::Gguf(Block::Q4_0) => "grouped_q4_0",
        Storage::Gguf(Block::Q4_1) => "grouped_q4_1",
        Storage::Gguf(Block::Q5_0) => "grouped_q5_0",
        Storage::Gguf(Block::Q5_1) => "grouped_q5_1",
        Storage::Gguf(Block::Q8_0) => "grouped_q8_0",
        Storage::Gguf(Block::Q4K) => "grouped_q4_k",
        Storage::Gguf(Block::Q5K) => "grouped_q5_k",
        Storage::Gguf(Block::Q6K) => "grouped_q6_k",
        Storage::Gguf(Block::Q2K) => "grouped_q2_k",
        Storage::Gguf(Block::Q3K) => "grouped_q3_k",
        Storage::Gguf(Block::Iq4Nl) => "grouped_iq4_nl",
        Storage::Gguf(Block::Iq4Xs) => "grouped_iq4_xs",
        Storage::Gguf(Block::Mxfp4) => "grouped_mxfp4",
        Storage::Gguf(Block::Int4By32) => "grouped_int4_by_32",
        Storage::Gguf(Block::Int4By128) => "grouped_int4_by_128",
        Storage::Plain(DType::F64 | DType::I32 | DType::U64) | Storage::Dynamic8 { .. } => {
            unreachable!("`check` refuses real numbers stored as {storage}")
        }
    }
}

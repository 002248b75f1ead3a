//! Launches attention to all rows of a chunk, and its gradient.
//!
//! Backward first computes one sum per row and head in the workspace, then dq, then dk and dv. The kernels on tiles
//! support 16-bit rows and heads of up to 64 channels; all other shapes use plain kernels.

use super::modules::KernelFile;
use super::spans::{addresses_and_strides, int, stored_dtype};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::workspace_cuda::attention_floats_bytes;
use smidgen_ir::{AttentionShape, DType};

macro_rules! file {
    ($head:literal, [$($kernel:literal),*]) => {
        KernelFile {
            name: concat!("chunk_attention_", $head),
            source: concat!(
                "#define HEAD ",
                $head,
                "\n",
                include_str!("../../kernels/matrix_unit.cuh"),
                include_str!("../../kernels/attention_tiles.cuh"),
                include_str!("../../kernels/chunk_attention.cu")
            ),
            kernels: &[$(concat!($kernel, $head)),*],
        }
    };
}

/// The files for heads of up to 64 channels and for larger ones.
pub const FILES: [KernelFile; 2] = [
    file!(
        64,
        [
            "chunk_attention_",
            "chunk_attention_dq_",
            "chunk_attention_dkv_",
            "chunk_attention_plain_",
            "chunk_attention_dq_plain_",
            "chunk_attention_dkv_plain_",
            "chunk_attention_deltas_"
        ]
    ),
    file!(
        256,
        [
            "chunk_attention_plain_",
            "chunk_attention_dq_plain_",
            "chunk_attention_dkv_plain_",
            "chunk_attention_deltas_"
        ]
    ),
];

/// The largest head size that kernels support.
pub const MOST_CHANNELS: usize = 256;
/// Largest head with kernels on tiles.
const HEAD_OF_TILES: usize = 64;
/// Rows of a tile. Must match `chunk_attention.cu`.
const TILE: usize = 64;
const THREADS: u32 = 128;
/// Shared memory of one tile, and of two pipeline stages of biases by distance, and of lse with delta.
const TILE_BYTES: u32 = (TILE * 2 * HEAD_OF_TILES) as u32;
const BIASES_BYTES: u32 = (2 * 2 * TILE * 4) as u32;
const STATISTICS_BYTES: u32 = BIASES_BYTES;

/// The file of a head size.
pub fn file(shape: &AttentionShape) -> KernelFile {
    FILES[usize::from(shape.head_dim > HEAD_OF_TILES)]
}

/// Computes o and lse.
pub fn chunk_attention(
    stage: &Stage<'_>,
    step: &BoundStep,
    shape: &AttentionShape,
) -> Result<(), DeviceError> {
    let [q, k, v, marks, bias] = [0, 1, 2, 3, 4].map(|index| &step.inputs[index]);
    let (o, lse) = (&step.outputs[0], &step.outputs[1]);
    let Some(grid) = grid(stage, q, shape) else { return Ok(()) };
    let mut args = addresses_and_strides(stage, &[q, k, v, o]);
    args.push(stage.address(lse));
    args.extend(score_args(stage, shape, q, marks, bias));
    let (kernel, shared_bytes) = match form(stage, shape, &[q, k, v, o]) {
        Form::Tiles => ("chunk_attention_64", 5 * TILE_BYTES + BIASES_BYTES),
        Form::Plain64 => ("chunk_attention_plain_64", 0),
        Form::Plain256 => ("chunk_attention_plain_256", 0),
    };
    stage.launch(kernel, grid, THREADS, shared_bytes, &args)
}

/// Computes dq, dk and dv.
pub fn chunk_attention_grad(
    stage: &Stage<'_>,
    step: &BoundStep,
    shape: &AttentionShape,
) -> Result<(), DeviceError> {
    let [q, k, v, o, lse, o_gradient, marks, bias] =
        [0, 1, 2, 3, 4, 5, 6, 7].map(|index| &step.inputs[index]);
    let [dq, dk, dv] = [0, 1, 2].map(|index| &step.outputs[index]);
    let Some(grid) = grid(stage, q, shape) else { return Ok(()) };
    let deltas = stage.workspace_of(attention_floats_bytes(stage.rows(q), shape));
    let form = form(stage, shape, &[q, k, v, o_gradient, dq, dk, dv]);
    let items = stage.rows(q) * shape.heads;
    let mut args = addresses_and_strides(stage, &[o, o_gradient]);
    args.extend([int(items), int(shape.heads), int(shape.head_dim), Arg::Pointer(deltas)]);
    let kernel = match form {
        Form::Tiles | Form::Plain64 => "chunk_attention_deltas_64",
        Form::Plain256 => "chunk_attention_deltas_256",
    };
    let warps = THREADS as usize / 32;
    stage.launch(kernel, [items.div_ceil(warps) as u32, 1, 1], THREADS, 0, &args)?;
    let launch_grad = |kernel, shared_bytes, outputs: &[&Operand]| {
        let mut args = addresses_and_strides(stage, &[q, k, v, o_gradient]);
        args.extend([stage.address(lse), Arg::Pointer(deltas)]);
        args.extend(addresses_and_strides(stage, outputs));
        args.extend(score_args(stage, shape, q, marks, bias));
        stage.launch(kernel, grid, THREADS, shared_bytes, &args)
    };
    let of_queries = 6 * TILE_BYTES + BIASES_BYTES;
    let of_keys = of_queries + STATISTICS_BYTES;
    let [(dq_kernel, dq_bytes), (dkv_kernel, dkv_bytes)] = match form {
        Form::Tiles => [("chunk_attention_dq_64", of_queries), ("chunk_attention_dkv_64", of_keys)],
        Form::Plain64 => [("chunk_attention_dq_plain_64", 0), ("chunk_attention_dkv_plain_64", 0)],
        Form::Plain256 => [("chunk_attention_dq_plain_256", 0), ("chunk_attention_dkv_plain_256", 0)],
    };
    launch_grad(dq_kernel, dq_bytes, &[dq])?;
    launch_grad(dkv_kernel, dkv_bytes, &[dk, dv])
}

#[derive(Clone, Copy)]
enum Form {
    Tiles,
    Plain64,
    Plain256,
}

fn form(stage: &Stage<'_>, shape: &AttentionShape, operands: &[&Operand]) -> Form {
    let element_bytes = stage.activations.bytes();
    let is_aligned = operands.iter().all(|operand| {
        stage.pointer(operand).is_multiple_of(16) && (operand.stride * element_bytes).is_multiple_of(16)
    });
    if shape.head_dim > HEAD_OF_TILES {
        Form::Plain256
    } else if stage.activations != DType::F32 && shape.head_dim.is_multiple_of(8) && is_aligned {
        Form::Tiles
    } else {
        Form::Plain64
    }
}

/// One block for each tile of rows and each head; `None` without rows.
fn grid(stage: &Stage<'_>, q: &Operand, shape: &AttentionShape) -> Option<[u32; 3]> {
    let blocks = stage.rows(q).div_ceil(TILE) * shape.heads;
    (blocks > 0).then_some([blocks as u32, 1, 1])
}

fn score_args(
    stage: &Stage<'_>,
    shape: &AttentionShape,
    q: &Operand,
    marks: &Operand,
    bias: &Operand,
) -> [Arg; 8] {
    [
        stage.address(marks),
        int(stage.rows(q)),
        stage.address(bias),
        stored_dtype(bias),
        int(stage.rows(bias) / 2),
        int(shape.heads),
        int(shape.head_dim),
        Arg::Float(shape.scale),
    ]
}

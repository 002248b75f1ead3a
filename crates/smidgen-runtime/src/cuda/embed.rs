//! Token embedding: rows of a stored table by their ids, times a scale, and the gradient of that table.
//!
//! The forward pass decodes the rows with these ids (`decode.rs`) and reads no others. The kernel of the gradient is
//! `kernels/embed.cu`.

use super::decode::{self, RowChoice, Target};
use super::modules::KernelFile;
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::Storage;

pub const FILE: KernelFile =
    KernelFile { name: "embed.cu", source: include_str!("../../kernels/embed.cu"), kernels: &["embed_grad"] };

/// Inputs ids (T), table (V, C); output (T, C).
pub fn embed(stage: &Stage<'_>, step: &BoundStep, scale: f32) -> Result<(), DeviceError> {
    let (ids, table, y) = (&step.inputs[0], &step.inputs[1], &step.outputs[0]);
    let target = Target { pointer: stage.pointer(y), stride: y.stride, wide: y.storage == Storage::F32 };
    decode::decode(stage, table, RowChoice::ByIds(stage.pointer(ids)), stage.rows(y), target, scale)
}

/// Inputs ids (T), dy (T, C); updates dtable (V, C) in all rows but `padding`.
pub fn embed_grad(
    stage: &Stage<'_>,
    step: &BoundStep,
    scale: f32,
    padding: Option<u32>,
) -> Result<(), DeviceError> {
    let (ids, dy, dtable) = (&step.inputs[0], &step.inputs[1], &step.updates[0]);
    assert!(dtable.storage == Storage::F32 && dtable.is_dense(), "the gradient of a table is dense f32");
    let (tokens, columns) = (stage.rows(dy), dy.columns);
    if tokens == 0 || columns == 0 {
        return Ok(());
    }
    let args = [
        stage.address(ids),
        Arg::Int(tokens as i32),
        stage.address(dy),
        Arg::Long(dy.stride as i64),
        Arg::Int(columns as i32),
        Arg::Float(scale),
        stage.address(dtable),
        Arg::Int(stage.rows(dtable) as i32),
        Arg::Int(padding.map_or(-1, |row| row as i32)),
    ];
    let grid = [tokens as u32, columns.div_ceil(COLUMNS_OF_A_BLOCK) as u32, 1];
    stage.launch("embed_grad", grid, THREADS, 0, &args)
}

/// These must match `embed.cu`.
const THREADS: u32 = 256;
const COLUMNS_OF_A_BLOCK: usize = 256 * 4;

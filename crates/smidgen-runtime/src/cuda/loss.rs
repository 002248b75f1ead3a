//! The loss of a chunk of logits, with their gradient written over them, and the sum of the losses of rows.
//!
//! The products around it are not here: the caller forms logits in activations, calls [`softmax_loss_chunk`] for each
//! chunk, multiplies what became of them, and adds up all rows once, at the end. Where the head comes in pieces, a
//! [`PieceChunk`] has the logits of one. Kernels: `kernels/loss.cu`.

use super::decode::is_aligned;
use super::matmul::Matrix;
use super::stage::{Arg, KernelFile, Stage};
use crate::device::DeviceError;
use smidgen_ir::DType;

pub const FILE: KernelFile = KernelFile {
    name: "loss.cu",
    source: include_str!("../../kernels/loss.cu"),
    kernels: &[
        "softmax_loss",
        "softmax_loss_capped",
        "sum_losses",
        "logits_of_act",
        "logits_of_f32",
        "head_sums",
        "head_sums_capped",
        "head_loss",
        "head_grad",
        "head_grad_capped",
        "round_rows",
    ],
};

/// Rows whose logits exist now; all addresses are the device's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossChunk {
    /// (rows, V) of activations.
    pub logits: u64,
    /// Elements from one row of logits to the next.
    pub stride: usize,
    pub rows: usize,
    pub vocabulary: usize,
    /// (rows) of i32, from the chunk's first row on.
    pub labels: u64,
    /// One f64.
    pub weight: u64,
    /// (rows) of f32, from the chunk's first row on: takes the negative log-likelihoods.
    pub row_losses: u64,
    pub softcap: Option<f32>,
    /// Whether the logits become weight · gradient; else they stay.
    pub gradient: bool,
}

/// Losses of rows, and the gradient in place.
pub fn softmax_loss_chunk(stage: &Stage<'_>, chunk: &LossChunk) -> Result<(), DeviceError> {
    if chunk.rows == 0 {
        return Ok(());
    }
    let mut args = vec![
        Arg::Pointer(chunk.logits),
        Arg::Long(chunk.stride as i64),
        Arg::Int(chunk.vocabulary as i32),
        Arg::Int(i32::from(is_aligned(chunk.logits, chunk.stride))),
        Arg::Pointer(chunk.labels),
        Arg::Pointer(chunk.weight),
        Arg::Pointer(chunk.row_losses),
        Arg::Int(i32::from(chunk.gradient)),
    ];
    let grid = [chunk.rows as u32, 1, 1];
    match chunk.softcap {
        None => stage.launch("softmax_loss", grid, THREADS, 0, &args),
        Some(cap) => {
            args.push(Arg::Float(cap));
            stage.launch("softmax_loss_capped", grid, THREADS, 0, &args)
        }
    }
}

/// loss (one f64) += weight (one f64) · the sum of `rows` losses (f32), in an order that depends on `rows` alone.
pub fn sum_losses(
    stage: &Stage<'_>,
    row_losses: u64,
    rows: usize,
    weight: u64,
    loss: u64,
) -> Result<(), DeviceError> {
    if rows == 0 {
        return Ok(());
    }
    let args = [Arg::Pointer(row_losses), Arg::Int(rows as i32), Arg::Pointer(weight), Arg::Pointer(loss)];
    stage.launch("sum_losses", [1, 1, 1], THREADS, 0, &args)
}

/// Rows whose logits of some words exist now; all addresses are the device's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PieceChunk {
    /// (rows, N) of activations.
    pub logits: u64,
    /// Elements from one row of logits to the next.
    pub stride: usize,
    pub rows: usize,
    /// N, and the first of them.
    pub words: usize,
    pub first_word: usize,
    /// (rows) of i32, from the chunk's first row on.
    pub labels: u64,
    pub softcap: Option<f32>,
}

impl PieceChunk {
    /// Launches a kernel whose arguments begin with the logits, or its twin with the cap behind all others.
    fn launch(&self, stage: &Stage<'_>, names: [&'static str; 2], more: &[Arg]) -> Result<(), DeviceError> {
        if self.rows == 0 {
            return Ok(());
        }
        let mut args = vec![
            Arg::Pointer(self.logits),
            Arg::Long(self.stride as i64),
            Arg::Int(self.words as i32),
            Arg::Int(i32::from(is_aligned(self.logits, self.stride))),
            Arg::Pointer(self.labels),
            Arg::Int(self.first_word as i32),
        ];
        args.extend_from_slice(more);
        args.extend(self.softcap.map(Arg::Float));
        let name = names[usize::from(self.softcap.is_some())];
        stage.launch(name, [self.rows as u32, 1, 1], THREADS, 0, &args)
    }

    /// Adds what the words come to: sums (rows, 3) of f32, `before` which may be the same, or 0.
    pub fn add_to_sums(&self, stage: &Stage<'_>, before: u64, sums: u64) -> Result<(), DeviceError> {
        let more = [Arg::Pointer(before), Arg::Pointer(sums)];
        self.launch(stage, ["head_sums", "head_sums_capped"], &more)
    }

    /// Makes the logits weight (one f64) · their gradient, by the sums of all words.
    pub fn to_gradients(&self, stage: &Stage<'_>, weight: u64, sums: u64) -> Result<(), DeviceError> {
        let more = [Arg::Pointer(weight), Arg::Pointer(sums)];
        self.launch(stage, ["head_grad", "head_grad_capped"], &more)
    }
}

/// loss (one f64) += weight (one f64) · the sum of the losses of rows, which go to `row_losses` (f32) unless it is 0.
pub fn loss_of_sums(
    stage: &Stage<'_>,
    sums: u64,
    rows: usize,
    weight: u64,
    loss: u64,
    row_losses: u64,
) -> Result<(), DeviceError> {
    if rows == 0 {
        return Ok(());
    }
    let args = [
        Arg::Pointer(sums),
        Arg::Int(rows as i32),
        Arg::Pointer(weight),
        Arg::Pointer(loss),
        Arg::Pointer(row_losses),
    ];
    stage.launch("head_loss", [1, 1, 1], THREADS, 0, &args)
}

/// Rows of f32 as activations.
pub fn round_rows(
    stage: &Stage<'_>,
    from: Matrix,
    to: Matrix,
    rows: usize,
    columns: usize,
) -> Result<(), DeviceError> {
    assert_eq!((from.element, to.element), (DType::F32, stage.activations()), "rows to round");
    if rows == 0 {
        return Ok(());
    }
    let args = [
        Arg::Pointer(from.pointer),
        Arg::Long(from.stride as i64),
        Arg::Pointer(to.pointer),
        Arg::Long(to.stride as i64),
        Arg::Int(columns as i32),
    ];
    stage.launch("round_rows", [rows as u32, columns.div_ceil(THREADS as usize) as u32, 1], THREADS, 0, &args)
}

/// A matrix of logits in device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitMatrix {
    pub pointer: u64,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Activations' or f32.
    pub element: DType,
}

/// Logits as f32, capped where there is a cap; `from` may be `to` if it is f32.
pub fn finish_logits(
    stage: &Stage<'_>,
    from: LogitMatrix,
    to: LogitMatrix,
    rows: usize,
    vocabulary: usize,
    softcap: Option<f32>,
) -> Result<(), DeviceError> {
    assert_eq!(to.element, DType::F32, "finished logits");
    if rows == 0 || (from == to && softcap.is_none()) {
        return Ok(());
    }
    let args = [
        Arg::Pointer(from.pointer),
        Arg::Long(from.stride as i64),
        Arg::Pointer(to.pointer),
        Arg::Long(to.stride as i64),
        Arg::Int(vocabulary as i32),
        Arg::Float(softcap.unwrap_or(0.0)),
    ];
    let kernel = if from.element == DType::F32 { "logits_of_f32" } else { "logits_of_act" };
    stage.launch(kernel, [vocabulary.div_ceil(THREADS as usize) as u32, rows as u32, 1], THREADS, 0, &args)
}

/// That of `loss.cu`.
const THREADS: u32 = 512;

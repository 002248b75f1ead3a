//! The loss of a chunk of logits, which are replaced by their gradient, and the sum of the row losses.
//!
//! The caller computes the logits, calls [`softmax_loss_chunk`] for each chunk, multiplies the gradients with the head,
//! and sums the losses of all rows once, at the end. If the head is in pieces, a [`PieceChunk`] has the logits of one
//! piece.
//! Left out: the matmuls (`head.rs`, `head_pieces.rs`). Kernels: `kernels/loss.cu`.

use super::decode::is_aligned;
use super::matmul::{Element, Matrix};
use super::modules::KernelFile;
use super::stage::{Arg, Stage};
use crate::device::{DeviceError, Operand};
use smidgen_ir::Storage;

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

/// The addresses of the weight of the loss: one f64 for all rows, or an f32 for each; the other one is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossWeight {
    one: u64,
    rows: u64,
}

impl LossWeight {
    pub fn of(stage: &Stage<'_>, operand: &Operand) -> LossWeight {
        let pointer = stage.pointer(operand);
        match operand.storage {
            Storage::F32 => LossWeight { one: 0, rows: pointer },
            _ => LossWeight { one: pointer, rows: 0 },
        }
    }

    /// For the rows from this one on.
    pub fn from_row(self, row: usize) -> LossWeight {
        let rows = if self.rows == 0 { 0 } else { self.rows + 4 * row as u64 };
        LossWeight { rows, ..self }
    }

    fn args(self) -> [Arg; 2] {
        [Arg::Pointer(self.one), Arg::Pointer(self.rows)]
    }
}

/// A chunk of rows with all their logits; all addresses are on the device.
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
    pub weight: LossWeight,
    /// (rows) of f32, from the chunk's first row on: receives the negative log likelihoods.
    pub row_losses: u64,
    pub softcap: Option<f32>,
    /// Whether the logits are replaced by weight · gradient.
    pub gradient: bool,
}

/// Computes the row losses, and the gradient in place.
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
        chunk.weight.args()[0],
        chunk.weight.args()[1],
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

/// loss (one f64) += weight · the sum of `rows` losses (f32), in an order that depends only on `rows`.
pub fn sum_losses(
    stage: &Stage<'_>,
    row_losses: u64,
    rows: usize,
    weight: LossWeight,
    loss: u64,
) -> Result<(), DeviceError> {
    if rows == 0 {
        return Ok(());
    }
    let [one, each] = weight.args();
    let args = [Arg::Pointer(row_losses), Arg::Int(rows as i32), one, each, Arg::Pointer(loss)];
    stage.launch("sum_losses", [1, 1, 1], THREADS, 0, &args)
}

/// A chunk of rows with the logits of one piece of the vocabulary; all addresses are on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PieceChunk {
    /// (rows, N) of activations.
    pub logits: u64,
    /// Elements from one row of logits to the next.
    pub stride: usize,
    pub rows: usize,
    /// N, the words of the piece, and its first word.
    pub words: usize,
    pub first_word: usize,
    /// (rows) of i32, from the chunk's first row on.
    pub labels: u64,
    pub softcap: Option<f32>,
}

impl PieceChunk {
    /// Launches `names[0]`, or `names[1]` if there is a softcap, which is then the last argument.
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

    /// sums (rows, 3) of f32 = `before` plus this piece. `before` may be `sums`, or 0 for the first piece.
    pub fn add_to_sums(&self, stage: &Stage<'_>, before: u64, sums: u64) -> Result<(), DeviceError> {
        let more = [Arg::Pointer(before), Arg::Pointer(sums)];
        self.launch(stage, ["head_sums", "head_sums_capped"], &more)
    }

    /// Replaces the logits by weight · their gradient; `sums` cover the whole vocabulary.
    pub fn to_gradients(&self, stage: &Stage<'_>, weight: LossWeight, sums: u64) -> Result<(), DeviceError> {
        let [one, each] = weight.args();
        let more = [one, each, Arg::Pointer(sums)];
        self.launch(stage, ["head_grad", "head_grad_capped"], &more)
    }
}

/// loss (one f64) += weight · the sum of the row losses, which are written to `row_losses` (f32) unless it is
/// 0.
pub fn loss_of_sums(
    stage: &Stage<'_>,
    sums: u64,
    rows: usize,
    weight: LossWeight,
    loss: u64,
    row_losses: u64,
) -> Result<(), DeviceError> {
    if rows == 0 {
        return Ok(());
    }
    let args = [
        Arg::Pointer(sums),
        Arg::Int(rows as i32),
        weight.args()[0],
        weight.args()[1],
        Arg::Pointer(loss),
        Arg::Pointer(row_losses),
    ];
    stage.launch("head_loss", [1, 1, 1], THREADS, 0, &args)
}

/// Rounds rows of f32 to the type of activations.
pub fn round_rows(
    stage: &Stage<'_>,
    from: Matrix,
    to: Matrix,
    rows: usize,
    columns: usize,
) -> Result<(), DeviceError> {
    assert_eq!((from.element, to.element), (Element::F32, stage.element()), "types of `round_rows`");
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

/// Writes logits as f32, with the softcap if there is one; `from` may be `to` if it is f32.
pub fn finish_logits(
    stage: &Stage<'_>,
    from: Matrix,
    to: Matrix,
    rows: usize,
    vocabulary: usize,
    softcap: Option<f32>,
) -> Result<(), DeviceError> {
    assert_eq!(to.element, Element::F32, "type of finished logits");
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
    let kernel = if from.element == Element::F32 { "logits_of_f32" } else { "logits_of_act" };
    stage.launch(kernel, [vocabulary.div_ceil(THREADS as usize) as u32, rows as u32, 1], THREADS, 0, &args)
}

/// Must match `loss.cu`.
const THREADS: u32 = 512;

//! The LM head in pieces of the vocabulary, for plans that do not hold the whole head on the device.
//!
//! Each piece is used twice: for the softmax sums over the vocabulary, and for the gradients. Each time the logits of a
//! chunk of rows are computed in the workspace. dx is summed over the pieces in f32 and rounded once, by the last
//! piece: rounding to 8 bits of mantissa after each piece would add an error to every gradient of the model.

use super::head::{Head, compute_logits};
use super::loss::{LossWeight, PieceChunk, loss_of_sums, round_rows};
use super::matmul::{Element, Matmul, Matrix, Tokens};
use super::operands::Scratch;
use super::stage::Stage;
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::HeadPiece;
use smidgen_ir::workspace_cuda::{MATMUL_BYTES, logit_stride};

/// Three f32 sums per row.
const SUMS_BYTES: u64 = 12;

/// Adds the softmax sums of this piece to those of the previous pieces.
pub fn head_sums(stage: &Stage<'_>, step: &BoundStep, piece: &HeadPiece) -> Result<(), DeviceError> {
    let before = if piece.continues { stage.pointer(&step.inputs[3]) } else { 0 };
    let sums = stage.pointer(&step.outputs[0]);
    for_each_chunk_of_logits(stage, step, piece, 0, |first, chunk, _| {
        let at = |sums: u64| if sums == 0 { 0 } else { sums + SUMS_BYTES * first as u64 };
        chunk.add_to_sums(stage, at(before), at(sums))
    })
}

/// Adds weight·Σ NLL to the loss.
pub fn head_loss(stage: &Stage<'_>, step: &BoundStep, row_losses: bool) -> Result<(), DeviceError> {
    let (sums, weight) = (&step.inputs[0], LossWeight::of(stage, &step.inputs[1]));
    let losses = if row_losses { stage.pointer(&step.updates[1]) } else { 0 };
    let loss = stage.pointer(&step.updates[0]);
    loss_of_sums(stage, stage.pointer(sums), stage.rows(sums), weight, loss, losses)
}

/// Recomputes the logits, replaces them by their gradient, and adds dlogits·W to the dx of the previous pieces.
pub fn head_grad(
    stage: &Stage<'_>,
    step: &BoundStep,
    piece: &HeadPiece,
    ends: bool,
) -> Result<(), DeviceError> {
    let (weight, sums) = (LossWeight::of(stage, &step.inputs[3]), stage.pointer(&step.inputs[4]));
    let dx = stage.matrix(&step.outputs[0]);
    let before = piece.continues.then(|| stage.matrix(&step.inputs[5]));
    let columns = step.inputs[0].columns;
    // A dx that is rounded is summed in f32 in the workspace.
    let is_rounded = ends && dx.element != Element::F32;
    let summed_bytes = if is_rounded { 4 * piece.chunk * columns } else { 0 };
    for_each_chunk_of_logits(stage, step, piece, summed_bytes, |first, chunk, parts| {
        chunk.to_gradients(stage, weight.from_row(first), sums + SUMS_BYTES * first as u64)?;
        let dx = dx.at(first, 0);
        let summed = if is_rounded {
            Matrix { pointer: parts.summed, stride: columns, element: Element::F32 }
        } else {
            dx
        };
        let mut addend = before.map(|before| before.at(first, 0));
        let tokens = Tokens { rows: chunk.rows, planned: parts.planned };
        for (first_word, words) in parts.head.blocks() {
            let right = parts.head.block(stage, first_word, words)?;
            let matrices = [parts.logits.at(0, first_word), right, summed];
            let matmul =
                Matmul { addend, ..Matmul::of_tokens(matrices, tokens, columns, words, parts.scratch) };
            stage.cublas.run(stage.gpu, &matmul)?;
            addend = Some(summed);
        }
        if is_rounded { round_rows(stage, summed, dx, chunk.rows, columns) } else { Ok(()) }
    })
}

/// The parts of a step's workspace.
struct PieceScratch<'a> {
    head: Head<'a>,
    /// (chunk, N) of activations.
    logits: Matrix,
    /// Address of dx in f32.
    summed: u64,
    /// Address of the workspace of matmuls.
    scratch: u64,
    /// Rows of the largest chunk.
    planned: usize,
}

/// Computes the logits chunk by chunk and calls `visit(first row, chunk, workspace)` for each.
fn for_each_chunk_of_logits(
    stage: &Stage<'_>,
    step: &BoundStep,
    piece: &HeadPiece,
    summed_bytes: usize,
    visit: impl Fn(usize, &PieceChunk, &PieceScratch<'_>) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let (x, labels) = (&step.inputs[0], stage.pointer(&step.inputs[2]));
    let mut scratch = Scratch::of(stage);
    let head = Head::of(stage, &mut scratch, &step.inputs[1]);
    let (words, element) = (head.rows, stage.element());
    let stride = logit_stride(words);
    let logits = Matrix { pointer: scratch.take(piece.chunk * stride * element.bytes()), stride, element };
    let (summed, scratch) = (scratch.take(summed_bytes), scratch.take(MATMUL_BYTES));
    let planned = piece.chunk.min(x.rows_at(stage.planned));
    let parts = PieceScratch { head, logits, summed, scratch, planned };
    let rows = stage.rows(x);
    for first in (0..rows).step_by(piece.chunk) {
        let tokens = Tokens { rows: piece.chunk.min(rows - first), planned };
        compute_logits(stage, &parts.head, x, None, (first, tokens), logits, scratch)?;
        let chunk = PieceChunk {
            logits: logits.pointer,
            stride,
            rows: tokens.rows,
            words,
            first_word: piece.first_word,
            labels: labels + 4 * first as u64,
            softcap: piece.softcap,
        };
        visit(first, &chunk, &parts)?;
    }
    Ok(())
}

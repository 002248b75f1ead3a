//! The LM head: logits of a chunk of rows, the loss on them, and their gradients.
//!
//! The logits of a chunk are computed in the workspace and replaced by their gradient, which is multiplied with the
//! head again for dx.
//! A head that is not stored in the matmul type is decoded in blocks of the vocabulary, with one matmul per block.

use super::decode::decode_rows;
use super::few_rows;
use super::linear::outer_sum;
use super::loss::{LossChunk, LossWeight, finish_logits, softmax_loss_chunk, sum_losses};
use super::matmul::{Matmul, Matrix, Tokens};
use super::operands::{AdapterRoom, Scratch, weight_matrix};
use super::stage::Stage;
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::workspace_cuda::{HEAD_ROWS, MATMUL_BYTES, logit_stride};
use smidgen_ir::{LossHead, Storage};

/// The weight of the head: as stored, or decoded in blocks of rows.
pub struct Head<'a> {
    operand: &'a Operand,
    /// Address of the decoded rows; `None` if the weight is used as stored.
    decoded: Option<u64>,
    pub rows: usize,
}

impl<'a> Head<'a> {
    pub fn of(stage: &Stage<'_>, scratch: &mut Scratch, operand: &'a Operand) -> Head<'a> {
        let rows = stage.rows(operand);
        let stored = operand.storage == Storage::Plain(stage.activations);
        let decoded = (!stored)
            .then(|| scratch.take(rows.min(HEAD_ROWS) * operand.columns * stage.activations.bytes()));
        Head { operand, decoded, rows }
    }

    /// First row and number of rows of each block.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let (rows, step) = (self.rows, if self.decoded.is_some() { HEAD_ROWS } else { self.rows });
        (0..rows).step_by(step).map(move |first| (first, step.min(rows - first)))
    }

    /// A block as a matrix, which is valid until the next block is decoded.
    pub fn block(&self, stage: &Stage<'_>, first: usize, rows: usize) -> Result<Matrix, DeviceError> {
        let Some(pointer) = self.decoded else { return Ok(stage.matrix(self.operand)) };
        decode_rows(stage, self.operand, first, rows, pointer, self.operand.columns)?;
        Ok(Matrix { pointer, stride: self.operand.columns, element: stage.element() })
    }
}

/// An adapter of the head: h (S, R), B (V, R) in the matmul type, and the scale.
pub type Adapter<'a> = (&'a Operand, Matrix, f32);

fn adapter<'a>(
    stage: &Stage<'_>,
    scratch: &mut Scratch,
    step: &'a BoundStep,
    h: usize,
    lora: Option<f32>,
) -> Result<Option<Adapter<'a>>, DeviceError> {
    let Some(scale) = lora else { return Ok(None) };
    let b = weight_matrix(stage, scratch, &step.inputs[h + 1], AdapterRoom::None)?;
    Ok(Some((&step.inputs[h], b, scale)))
}

/// logits = rows `first..` of x times the head, plus the adapter.
pub fn compute_logits(
    stage: &Stage<'_>,
    head: &Head<'_>,
    x: &Operand,
    adapter: Option<Adapter<'_>>,
    (first, tokens): (usize, Tokens),
    logits: Matrix,
    scratch: u64,
) -> Result<(), DeviceError> {
    for (first_word, words) in head.blocks() {
        let output = logits.at(0, first_word);
        let of_rows = |left: &Operand, right: Matrix| Matmul {
            right_transposed: true,
            ..Matmul::of_tokens(
                [stage.matrix(left).at(first, 0), right, output],
                tokens,
                words,
                left.columns,
                scratch,
            )
        };
        let right = head.block(stage, first_word, words)?;
        stage.cublas.run(stage.gpu, &of_rows(x, right))?;
        if let Some((h, b, scale)) = adapter {
            let matmul = Matmul { addend: Some(output), alpha: scale, ..of_rows(h, b.at(first_word, 0)) };
            stage.cublas.run(stage.gpu, &matmul)?;
        }
    }
    Ok(())
}

/// Adds weight·Σ NLL to the loss, and computes the gradients that the step asks for.
pub fn lm_head_loss(stage: &Stage<'_>, step: &BoundStep, head: &LossHead) -> Result<(), DeviceError> {
    let (x, labels) = (&step.inputs[0], &step.inputs[2]);
    let weight = LossWeight::of(stage, &step.inputs[3]);
    let vocabulary = stage.rows(&step.inputs[1]);
    let rows = stage.rows(x);
    let mut scratch = Scratch::of(stage);
    let head_weight = Head::of(stage, &mut scratch, &step.inputs[1]);
    let adapter = adapter(stage, &mut scratch, step, 4, head.lora)?;
    let stride = logit_stride(vocabulary);
    let element = stage.element();
    let logits = Matrix { pointer: scratch.take(head.chunk * stride * element.bytes()), stride, element };
    let row_losses = if head.row_losses { stage.pointer(&step.updates[1]) } else { scratch.take(4 * rows) };
    let scratch = scratch.take(MATMUL_BYTES);
    for first in (0..rows).step_by(head.chunk) {
        let tokens = Tokens { rows: head.chunk.min(rows - first), planned: head.chunk };
        compute_logits(stage, &head_weight, x, adapter, (first, tokens), logits, scratch)?;
        let chunk = LossChunk {
            logits: logits.pointer,
            stride,
            rows: tokens.rows,
            vocabulary,
            labels: stage.pointer(labels) + 4 * first as u64,
            weight: weight.from_row(first),
            row_losses: row_losses + 4 * first as u64,
            softcap: head.softcap,
            gradient: head.gradient,
        };
        softmax_loss_chunk(stage, &chunk)?;
        if head.gradient {
            chunk_gradients(stage, step, head, &head_weight, adapter, (first, tokens), logits, scratch)?;
        }
    }
    sum_losses(stage, row_losses, rows, weight, stage.pointer(&step.updates[0]))
}

/// dx = dlogits·head; dh = scale·dlogits·B, dB += scale·dlogitsᵀ·h; dhead += dlogitsᵀ·x.
fn chunk_gradients(
    stage: &Stage<'_>,
    step: &BoundStep,
    head: &LossHead,
    head_weight: &Head<'_>,
    adapter: Option<Adapter<'_>>,
    (first, tokens): (usize, Tokens),
    dlogits: Matrix,
    scratch: u64,
) -> Result<(), DeviceError> {
    let x = &step.inputs[0];
    let rows_of = |operand: &Operand| stage.matrix(operand).at(first, 0);
    let dx = rows_of(&step.outputs[0]);
    let mut addend = None;
    for (first_word, words) in head_weight.blocks() {
        let matrices = [dlogits.at(0, first_word), head_weight.block(stage, first_word, words)?, dx];
        let matmul = Matmul { addend, ..Matmul::of_tokens(matrices, tokens, x.columns, words, scratch) };
        stage.cublas.run(stage.gpu, &matmul)?;
        addend = Some(dx);
    }
    if let Some((h, b, scale)) = adapter {
        let matrices = [dlogits, b, rows_of(&step.outputs[1])];
        let vocabulary = head_weight.rows;
        let matmul =
            Matmul { alpha: scale, ..Matmul::of_tokens(matrices, tokens, h.columns, vocabulary, scratch) };
        stage.cublas.run(stage.gpu, &matmul)?;
        outer_sum(stage, dlogits, rows_of(h), tokens, scale, &step.updates[1], scratch)?;
    }
    if head.train_head {
        let gradient = step.updates.last().expect("a trained head has a gradient");
        outer_sum(stage, dlogits, rows_of(x), tokens, 1.0, gradient, scratch)?;
    }
    Ok(())
}

/// The logits of all rows, in f32 for the host. The head's first row is word `first_word` of the vocabulary.
pub fn all_logits(
    stage: &Stage<'_>,
    step: &BoundStep,
    lora: Option<f32>,
    softcap: Option<f32>,
    first_word: usize,
) -> Result<(), DeviceError> {
    let x = &step.inputs[0];
    let words = stage.rows(&step.inputs[1]);
    let mut scratch = Scratch::of(stage);
    let head = Head::of(stage, &mut scratch, &step.inputs[1]);
    let (stride, element) = (logit_stride(words), stage.element());
    let tokens = stage.tokens(x);
    let logits = Matrix { pointer: scratch.take(tokens.planned * stride * element.bytes()), stride, element };
    let addends = few_rows::Addends {
        adapter: lora.map(|scale| (&step.inputs[2], &step.inputs[3], scale)),
        ..few_rows::Addends::default()
    };
    let linear = few_rows::Linear { x, weight: &step.inputs[1], addends, y: logits };
    if few_rows::fits(stage, &linear) {
        few_rows::few_rows(stage, &[linear])?;
    } else {
        let adapter = adapter(stage, &mut scratch, step, 2, lora)?;
        let scratch = scratch.take(MATMUL_BYTES);
        compute_logits(stage, &head, x, adapter, (0, tokens), logits, scratch)?;
    }
    let target = &step.updates[0];
    finish_logits(stage, logits, stage.matrix(target).at(0, first_word), tokens.rows, words, softcap)
}

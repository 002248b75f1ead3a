//! The LM head: logits of a chunk of rows, the loss on them, and their gradients.
//!
//! A chunk of logits is computed in the workspace, replaced by its gradient, and multiplied with the head again.
//! A head that is not stored in the matmul type is decoded in blocks of the vocabulary, with one matmul per block.

use super::decode::decode_rows;
use super::few_rows;
use super::linear::outer_sum;
use super::loss::{LossChunk, finish_logits, softmax_loss_chunk, sum_losses};
use super::matmul::{Matmul, Matrix, Sizes};
use super::operands::{AdapterRoom, Scratch, weight_matrix};
use super::stage::{Stage, Tokens};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::workspace_cuda::{HEAD_ROWS, MATMUL_BYTES, logit_stride};
use smidgen_ir::{LossHead, Storage};

/// The weight of the head: as stored, or decoded in blocks of rows.
pub struct Head<'a> {
    operand: &'a Operand,
    /// Where rows are decoded to, unless the weight is used as stored.
    decoded: Option<u64>,
    pub rows: usize,
}

impl<'a> Head<'a> {
    pub fn of(stage: &Stage<'_>, scratch: &mut Scratch, operand: &'a Operand) -> Head<'a> {
        let rows = stage.rows(operand);
        let stored = operand.storage == Storage::Plain(stage.activations());
        let decoded = (!stored)
            .then(|| scratch.take(rows.min(HEAD_ROWS) * operand.columns * stage.activations().bytes()));
        Head { operand, decoded, rows }
    }

    /// First row and number of rows of each block.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let (rows, step) = (self.rows, if self.decoded.is_some() { HEAD_ROWS } else { self.rows });
        (0..rows).step_by(step).map(move |first| (first, step.min(rows - first)))
    }

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
pub fn form_logits(
    stage: &Stage<'_>,
    head: &Head<'_>,
    x: &Operand,
    adapter: Option<Adapter<'_>>,
    (first, tokens): (usize, Tokens),
    logits: Matrix,
    scratch: u64,
) -> Result<(), DeviceError> {
    for (first_word, words) in head.blocks() {
        let right = head.block(stage, first_word, words)?;
        let whole = |rows: usize, depth: usize| Sizes { rows, columns: words, depth };
        let output = logits.at(0, first_word);
        let matmul = Matmul {
            left: stage.matrix(x).at(first, 0),
            left_transposed: false,
            right,
            right_transposed: true,
            output,
            addend: None,
            bias: None,
            fp8: None,
            alpha: 1.0,
            sizes: whole(tokens.rows, x.columns),
            planned: whole(tokens.planned, x.columns),
            scratch,
        };
        stage.cublas.run(stage.gpu, &matmul)?;
        if let Some((h, b, scale)) = adapter {
            let matmul = Matmul {
                left: stage.matrix(h).at(first, 0),
                right: b.at(first_word, 0),
                addend: Some(output),
                alpha: scale,
                sizes: whole(tokens.rows, h.columns),
                planned: whole(tokens.planned, h.columns),
                ..matmul
            };
            stage.cublas.run(stage.gpu, &matmul)?;
        }
    }
    Ok(())
}

/// Adds weight·Σ NLL to the loss, and computes the gradients that the step asks for.
pub fn lm_head_loss(stage: &Stage<'_>, step: &BoundStep, head: &LossHead) -> Result<(), DeviceError> {
    let (x, labels, weight) = (&step.inputs[0], &step.inputs[2], &step.inputs[3]);
    let vocabulary = stage.rows(&step.inputs[1]);
    let rows = stage.rows(x);
    let mut scratch = Scratch::of(stage);
    let head_weight = Head::of(stage, &mut scratch, &step.inputs[1]);
    let adapter = adapter(stage, &mut scratch, step, 4, head.lora)?;
    let stride = logit_stride(vocabulary);
    let element = stage.element();
    let logits = Matrix { pointer: scratch.take(head.chunk * stride * element.bytes()), stride, element };
    let row_losses = match head.row_losses {
        true => stage.pointer(&step.updates[1]),
        false => scratch.take(4 * rows),
    };
    let scratch = scratch.take(MATMUL_BYTES);
    for first in (0..rows).step_by(head.chunk) {
        let tokens = Tokens { rows: head.chunk.min(rows - first), planned: head.chunk };
        form_logits(stage, &head_weight, x, adapter, (first, tokens), logits, scratch)?;
        let chunk = LossChunk {
            logits: logits.pointer,
            stride,
            rows: tokens.rows,
            vocabulary,
            labels: stage.pointer(labels) + 4 * first as u64,
            weight: stage.pointer(weight),
            row_losses: row_losses + 4 * first as u64,
            softcap: head.softcap,
            gradient: head.gradient,
        };
        softmax_loss_chunk(stage, &chunk)?;
        if head.gradient {
            chunk_gradients(stage, step, head, &head_weight, adapter, (first, tokens), logits, scratch)?;
        }
    }
    sum_losses(stage, row_losses, rows, stage.pointer(weight), stage.pointer(&step.updates[0]))
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
    let into = |operand: &Operand| stage.matrix(operand).at(first, 0);
    let mut addend = None;
    for (first_word, words) in head_weight.blocks() {
        let output = into(&step.outputs[0]);
        let whole = |rows: usize| Sizes { rows, columns: x.columns, depth: words };
        let matmul = Matmul {
            left: dlogits.at(0, first_word),
            left_transposed: false,
            right: head_weight.block(stage, first_word, words)?,
            right_transposed: false,
            output,
            addend,
            bias: None,
            fp8: None,
            alpha: 1.0,
            sizes: whole(tokens.rows),
            planned: whole(tokens.planned),
            scratch,
        };
        stage.cublas.run(stage.gpu, &matmul)?;
        addend = Some(output);
    }
    let vocabulary = head_weight.rows;
    if let Some((h, b, scale)) = adapter {
        let whole = |rows: usize| Sizes { rows, columns: h.columns, depth: vocabulary };
        let matmul = Matmul {
            left: dlogits,
            left_transposed: false,
            right: b,
            right_transposed: false,
            output: into(&step.outputs[1]),
            addend: None,
            bias: None,
            fp8: None,
            alpha: scale,
            sizes: whole(tokens.rows),
            planned: whole(tokens.planned),
            scratch,
        };
        stage.cublas.run(stage.gpu, &matmul)?;
        outer_sum(stage, dlogits, into(h), tokens, scale, &step.updates[1], scratch)?;
    }
    if head.train_head {
        let gradient = step.updates.last().expect("a trained head has a gradient");
        outer_sum(stage, dlogits, into(x), tokens, 1.0, gradient, scratch)?;
    }
    Ok(())
}

/// The logits of all rows, in f32 for the host: columns from `first_word` on, as many as the head has rows.
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
    let product = few_rows::Product { x, weight: &step.inputs[1], addends, y: logits };
    if few_rows::fits(stage, &product) {
        few_rows::few_rows(stage, &[product])?;
    } else {
        let adapter = adapter(stage, &mut scratch, step, 2, lora)?;
        let scratch = scratch.take(MATMUL_BYTES);
        form_logits(stage, &head, x, adapter, (0, tokens), logits, scratch)?;
    }
    let target = &step.updates[0];
    finish_logits(stage, logits, stage.matrix(target).at(0, first_word), tokens.rows, words, softcap)
}

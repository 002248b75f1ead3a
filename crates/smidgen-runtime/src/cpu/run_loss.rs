//! The LM head on the CPU: logits, the loss in chunks of rows, and its gradients.
//!
//! A chunk of logits is computed in the workspace and replaced by its gradient there, from which the gradients of the
//! hidden state and of an adapter on the head are computed.

use super::kernel::OutputView;
use super::loss;
use super::matmul_terms::{Init, Left, Output, Term};
use super::run::{Factor, Run};
use super::view::Src;
use smidgen_ir::{LossHead, Storage, workspace_cpu};

impl Run<'_> {
    /// For each chunk of rows: logits, loss, the gradient of the logits in place, and the other gradients.
    pub(super) fn lm_head_loss(&self, head: &LossHead) {
        let (x, table) = (self.input(0), self.input(1));
        let (rows, vocabulary) = (self.rows_of(x), self.rows_of(table));
        let labels = self.i32s(2);
        let weight = self.loss_weight(3);
        let total = self.elements::<f64>(self.update(0));
        let stride = workspace_cpu::logit_stride(vocabulary);
        let logit_floats = head.chunk * stride;
        let used = logit_floats + workspace_cpu::aligned_floats(head.chunk);
        let scratch = self.workspace_floats();
        let mut sum = 0.0;
        for first in (0..rows).step_by(head.chunk) {
            let count = head.chunk.min(rows - first);
            let logits = scratch.part(0, count * stride);
            let nll = scratch.part(logit_floats, count);
            let chunk = LossChunk { first, count, logits: logits.address(), stride };
            self.logits(head.lora, &chunk, used);
            let scale = |row: usize| weight.of(first + row) as f32;
            let grad_scale = head.gradient.then_some(&scale as &(dyn Fn(usize) -> f32 + Sync));
            loss::softmax_loss(
                logits.rows(stride).column_part(0, vocabulary),
                labels.part(first, count),
                head.softcap,
                grad_scale,
                nll,
            );
            sum +=
                (0..count).map(|row| weight.in_sum(first + row) * f64::from(nll.src().get(row))).sum::<f64>();
            if head.row_losses {
                let losses = self.floats_mut(self.update(1));
                (0..count).for_each(|row| losses.set(first + row, nll.src().get(row)));
            }
            if head.gradient {
                self.loss_gradients(head, &chunk, used);
            }
        }
        total.set(0, total.src().get(0) + sum * weight.of_sum());
    }

    /// The weight of the loss: one for all rows, or one for each.
    pub(super) fn loss_weight(&self, input: usize) -> LossWeight {
        match self.input(input).storage {
            Storage::F32 => LossWeight::Rows(self.floats(self.input(input))),
            _ => LossWeight::One(self.elements::<f64>(self.input(input)).src().get(0)),
        }
    }

    /// Logits of all rows for the tokens of the vocabulary from `first_word` on.
    pub(super) fn all_logits(&self, lora: Option<f32>, softcap: Option<f32>, first_word: usize) {
        let head = self.transposed_term(self.input(0), self.input(1), 1.0);
        let adapter = lora.map(|scale| self.transposed_term(self.input(2), self.input(3), scale));
        let words = self.rows_of(self.input(1));
        let logits = self.floats_mut(self.update(0)).rows(self.update(0).columns);
        let logits = logits.column_part(first_word, words);
        let whole = self.matmul_output(self.update(0));
        let view = OutputView { pointer: whole.view.pointer.wrapping_add(first_word), ..whole.view };
        self.adapted_matmul(head, adapter, Init::Overwrite, Output { view, columns: words, ..whole }, 0);
        if let Some(cap) = softcap {
            (0..logits.rows()).for_each(|row| loss::cap_logits(logits.row(row), cap));
        }
    }

    /// The logits of a chunk of rows: x times the head, plus h times B of an adapter.
    pub(super) fn logits(&self, lora: Option<f32>, chunk: &LossChunk, used: usize) {
        let vocabulary = self.rows_of(self.input(1));
        let head = self.chunk_term(0, 1, chunk, 1.0);
        let adapter = lora.map(|scale| self.chunk_term(4, 5, chunk, scale));
        let view = OutputView { pointer: chunk.logits, row_stride: chunk.stride, column_stride: 1 };
        let output = Output { view, rows: chunk.count, columns: vocabulary };
        self.adapted_matmul(head, adapter, Init::Overwrite, output, used);
    }

    /// A chunk of rows of an input, times a transposed matrix.
    fn chunk_term(&self, input: usize, matrix: usize, chunk: &LossChunk, scale: f32) -> Term {
        let operand = self.input(input);
        let left = Left {
            pointer: self.row_address(operand, chunk.first),
            row_stride: operand.columns,
            depth_stride: 1,
        };
        Term { left, right: self.matrix(self.input(matrix)), right_transposed: true, scale }
    }

    /// Computes dx = dz·W from the gradients dz of the logits, and for an adapter dh = s·dz·B and dB += s·dzᵀ·h.
    fn loss_gradients(&self, head: &LossHead, chunk: &LossChunk, used: usize) {
        let vocabulary = self.rows_of(self.input(1));
        let gradient = Left { pointer: chunk.logits, row_stride: chunk.stride, depth_stride: 1 };
        let into = |index: usize, matrix: usize, scale: f32| {
            let operand = self.output(index);
            let pointer = self.row_address(operand, chunk.first);
            let view = OutputView { pointer, row_stride: operand.columns, column_stride: 1 };
            let output = Output { view, rows: chunk.count, columns: operand.columns };
            let term = Term {
                left: gradient,
                right: self.matrix(self.input(matrix)),
                right_transposed: false,
                scale,
            };
            self.matmul(&[term], Init::Overwrite, output, used);
        };
        into(0, 1, 1.0);
        let mut update = 1;
        let mut outer = |input: usize, scale: f32| {
            let logits = Factor { pointer: chunk.logits, columns: vocabulary, stride: chunk.stride };
            let factor = self.factor(self.input(input), chunk.first);
            self.accumulate_outer(logits, factor, chunk.count, scale, self.update(update), used);
            update += 1;
        };
        if let Some(scale) = head.lora {
            into(1, 5, scale);
            outer(4, scale);
        }
        if head.train_head {
            outer(0, 1.0);
        }
    }
}

/// What the loss of a row is multiplied by.
#[derive(Clone, Copy)]
pub(super) enum LossWeight {
    One(f64),
    Rows(Src<f32>),
}

impl LossWeight {
    pub fn of(self, row: usize) -> f64 {
        match self {
            LossWeight::One(weight) => weight,
            LossWeight::Rows(weights) => f64::from(weights.get(row)),
        }
    }

    /// The factor of a row inside a sum over rows: one weight for all is multiplied once, after the sum.
    pub fn in_sum(self, row: usize) -> f64 {
        if let LossWeight::Rows(_) = self { self.of(row) } else { 1.0 }
    }

    /// The factor of a sum over rows.
    pub fn of_sum(self) -> f64 {
        if let LossWeight::One(weight) = self { weight } else { 1.0 }
    }
}

/// A chunk of rows of the loss.
pub(super) struct LossChunk {
    pub first: usize,
    pub count: usize,
    pub logits: *mut f32,
    /// Floats between two rows of logits.
    pub stride: usize,
}

//! The LM head in pieces of the vocabulary: running softmax sums, the loss, and gradients piece by piece.
//!
//! The sums of a row are m, the largest logit so far, s = Σ exp(z - m) and z[label]. A piece with m' and s' updates
//!
//! ```text
//! M = max(m, m')        S = s exp(m - M) + s' exp(m' - M)        nll = M + ln S - z[label]
//! ```
//!
//! and with M and S of all pieces dl = (exp(z - M) / S - onehot(label)) * scale * (1 - (z / c)²), as in `loss.rs`.
//! An ignored row has the sums 0, 1 and 0. If no piece contains the label, the loss is NaN.

use super::chunk::for_each_row;
use super::footprint::assert_disjoint;
use super::kernel::OutputView;
use super::loss::{IGNORED_LABEL, capped, largest_of, sum_below, write_gradient};
use super::matmul_terms::{Init, Left, Output, Term};
use super::run::Run;
use super::run_loss::LossChunk;
use super::simd::{Isa, exp, kernel};
use super::view::{Dst, DstRows, Src};
use smidgen_ir::{HeadPiece, workspace_cpu};

impl Run<'_> {
    /// Adds this piece to the sums of the earlier pieces.
    pub(super) fn head_sums(&self, piece: &HeadPiece) {
        let before = piece.continues.then(|| self.floats(self.input(3)));
        let (labels, sums) = (self.i32s(2), self.floats_mut(self.output(0))); // (S), (S, 3)
        self.for_each_chunk_of_logits(piece, |&LossChunk { first, count, .. }, logits| {
            let before = before.map(|sums| sums.part(3 * first, 3 * count));
            add_to_sums(logits, labels.part(first, count), piece, before, sums.part(3 * first, 3 * count));
        });
    }

    /// Adds weight·Σ NLL to the loss.
    pub(super) fn head_loss(&self, row_losses: bool) {
        let sums = self.floats(self.input(0));
        let weight = self.loss_weight(1);
        let total = self.elements::<f64>(self.update(0));
        let losses = row_losses.then(|| self.floats_mut(self.update(1)));
        let mut sum = 0.0;
        for row in 0..sums.len() / 3 {
            let nll = RowSums::read(sums, row).loss();
            sum += weight.in_sum(row) * f64::from(nll);
            if let Some(losses) = losses {
                losses.set(row, nll);
            }
        }
        total.set(0, total.src().get(0) + sum * weight.of_sum());
    }

    /// Recomputes the logits, replaces them by their gradient, and adds dl·W to the dx of the earlier pieces.
    pub(super) fn head_grad(&self, piece: &HeadPiece) {
        let (labels, sums) = (self.i32s(2), self.floats(self.input(4)));
        let weight = self.loss_weight(3);
        let dx = self.output(0);
        let init = if piece.continues { Init::Accumulate } else { Init::Overwrite };
        if piece.continues {
            self.floats_mut(dx).copy_from(self.floats(self.input(5)));
        }
        self.for_each_chunk_of_logits(piece, |chunk, logits| {
            let (first, count) = (chunk.first, chunk.count);
            let sums = sums.part(3 * first, 3 * count);
            let scale = |row: usize| weight.of(first + row) as f32;
            logits_to_gradients(logits, labels.part(first, count), piece, sums, &scale);
            let left = Left { pointer: chunk.logits, row_stride: chunk.stride, depth_stride: 1 };
            let term = Term { left, right: self.matrix(self.input(1)), right_transposed: false, scale: 1.0 };
            let pointer = self.row_address(dx, first);
            let view = OutputView { pointer, row_stride: dx.columns, column_stride: 1 };
            let output = Output { view, rows: count, columns: dx.columns };
            self.matmul(&[term], init, output, piece.chunk * chunk.stride);
        });
    }

    /// Computes the logits chunk by chunk, at the start of the workspace.
    fn for_each_chunk_of_logits(&self, piece: &HeadPiece, visit: impl Fn(&LossChunk, DstRows)) {
        let (rows, words) = (self.rows_of(self.input(0)), self.rows_of(self.input(1)));
        let stride = workspace_cpu::logit_stride(words);
        for first in (0..rows).step_by(piece.chunk) {
            let count = piece.chunk.min(rows - first);
            let logits = self.workspace_floats().part(0, count * stride);
            let chunk = LossChunk { first, count, logits: logits.address(), stride };
            self.logits(None, &chunk, piece.chunk * stride);
            visit(&chunk, logits.rows(stride).column_part(0, words));
        }
    }
}

/// The largest logit, the sum of exp(logit - largest) and the label's logit of a row, over some pieces.
#[derive(Clone, Copy, Debug, PartialEq)]
struct RowSums {
    largest: f32,
    sum: f32,
    labelled: f32,
}

impl RowSums {
    const EMPTY: RowSums = RowSums { largest: f32::NEG_INFINITY, sum: 0.0, labelled: f32::NAN };
    const IGNORED: RowSums = RowSums { largest: 0.0, sum: 1.0, labelled: 0.0 };

    fn read(sums: Src<f32>, row: usize) -> RowSums {
        let at = |index: usize| sums.get(3 * row + index);
        RowSums { largest: at(0), sum: at(1), labelled: at(2) }
    }

    fn write(self, sums: Dst<f32>, row: usize) {
        let all = [self.largest, self.sum, self.labelled];
        all.into_iter().enumerate().for_each(|(index, value)| sums.set(3 * row + index, value));
    }

    fn plus(self, (largest, sum): (f32, f64), labelled: Option<f32>) -> RowSums {
        let both = self.largest.max(largest);
        let factor = |largest: f32| f64::from(exp(largest - reference(both)));
        let sum = f64::from(self.sum) * factor(self.largest) + sum * factor(largest);
        RowSums { largest: both, sum: sum as f32, labelled: labelled.unwrap_or(self.labelled) }
    }

    fn loss(self) -> f32 {
        (f64::from(reference(self.largest)) + f64::from(self.sum).ln() - f64::from(self.labelled)) as f32
    }
}

/// Replaces a largest logit of -infinity by 0, so that differences are not NaN.
fn reference(largest: f32) -> f32 {
    if largest == f32::NEG_INFINITY { 0.0 } else { largest }
}

/// The column of the label, if the piece contains it.
fn column_of(label: i32, piece: &HeadPiece, words: usize) -> Option<usize> {
    usize::try_from(label).ok()?.checked_sub(piece.first_word).filter(|column| *column < words)
}

fn add_to_sums(
    logits: DstRows,  // (rows, N)
    labels: Src<i32>, // (rows)
    piece: &HeadPiece,
    before: Option<Src<f32>>, // (rows, 3)
    sums: Dst<f32>,           // (rows, 3)
) {
    let (rows, words) = (logits.rows(), logits.columns());
    assert_disjoint("head_sums", sums, [labels.into(), logits.into()]);
    let isa = Isa::current();
    for_each_row(rows, words, |row| {
        let label = labels.get(row);
        let after = if label == IGNORED_LABEL {
            RowSums::IGNORED
        } else {
            let before = before.map_or(RowSums::EMPTY, |before| RowSums::read(before, row));
            let logits = logits.row(row);
            let labelled = column_of(label, piece, words).map(|column| logits.src().get(column));
            let labelled = labelled.map(|logit| capped(logit, piece.softcap));
            before.plus(piece_sums(isa, logits, piece.softcap), labelled)
        };
        after.write(sums, row);
    });
}

fn logits_to_gradients(
    logits: DstRows,  // (rows, N)
    labels: Src<i32>, // (rows)
    piece: &HeadPiece,
    sums: Src<f32>, // (rows, 3)
    scale: &(dyn Fn(usize) -> f32 + Sync),
) {
    let (rows, words) = (logits.rows(), logits.columns());
    assert_disjoint("head_grad", logits, [labels.into(), sums.into()]);
    let isa = Isa::current();
    for_each_row(rows, words, |row| {
        let (label, sums) = (labels.get(row), RowSums::read(sums, row));
        if label == IGNORED_LABEL {
            logits.row(row).fill_zero();
        } else {
            let column = column_of(label, piece, words);
            gradient_row(isa, logits.row(row), column, piece.softcap, sums, scale(row));
        }
    });
}

kernel! {
    fn piece_sums(logits: Dst<f32>, softcap: Option<f32>) -> (f32, f64) {
        let largest = largest_of(logits, softcap);
        (largest, sum_below(logits, reference(largest), softcap, false))
    }
}

kernel! {
    fn gradient_row(
        logits: Dst<f32>,
        label: Option<usize>,
        softcap: Option<f32>,
        sums: RowSums,
        scale: f32,
    ) {
        let softmax = (reference(sums.largest), (1.0 / f64::from(sums.sum)) as f32);
        write_gradient(logits, false, label, sums.labelled, softmax, softcap, scale);
    }
}

#[cfg(test)]
mod tests {
    use super::super::loss::softmax_loss;
    use super::super::testing::*;
    use super::*;

    fn wide(seed: u64, len: usize) -> Vec<f32> {
        numbers(seed, len).iter().map(|value| value * 6.0).collect()
    }

    /// Losses and gradients of rows of logits, in pieces that begin at `firsts`.
    fn in_pieces(
        logits: &[f32],
        labels: &[i32],
        firsts: &[usize],
        softcap: Option<f32>,
        scale: f32,
    ) -> (Vec<f32>, Vec<f32>) {
        on_every_isa(|| {
            let columns = logits.len() / labels.len();
            let mut sums = vec![f32::NAN; 3 * labels.len()];
            let mut gradients = logits.to_vec();
            let all = dst(&mut gradients).rows(columns);
            let part = |index: usize| {
                let end = firsts.get(index + 1).copied().unwrap_or(columns);
                let piece = HeadPiece { chunk: 1, first_word: firsts[index], softcap, continues: index > 0 };
                (piece, all.column_part(firsts[index], end - firsts[index]))
            };
            let sums = dst(&mut sums);
            for index in 0..firsts.len() {
                let (piece, logits) = part(index);
                add_to_sums(logits, src(labels), &piece, piece.continues.then(|| sums.src()), sums);
            }
            for index in 0..firsts.len() {
                let (piece, logits) = part(index);
                logits_to_gradients(logits, src(labels), &piece, sums.src(), &|_| scale);
            }
            let losses = (0..labels.len()).map(|row| RowSums::read(sums.src(), row).loss()).collect();
            (losses, gradients)
        })
    }

    #[test]
    fn pieces_of_any_size_give_the_loss_and_the_gradients_of_the_whole() {
        let scale = 0.7;
        for (columns, firsts) in
            [(7, vec![0, 1, 6]), (33, vec![0, 16, 32]), (576, vec![0, 64]), (9000, vec![0, 4100, 8992])]
        {
            for softcap in [None, Some(4.0_f32)] {
                let rows = 5;
                let logits = wide(columns as u64, rows * columns);
                let mut labels: Vec<i32> = (0..rows).map(|row| (row * 977 % columns) as i32).collect();
                labels[3] = IGNORED_LABEL;
                let (losses, gradients) = in_pieces(&logits, &labels, &firsts, softcap, scale);
                let (mut want, mut nll) = (logits.clone(), vec![f32::NAN; rows]);
                let view = dst(&mut want).rows(columns);
                softmax_loss(view, src(&labels), softcap, Some(&|_| scale), dst(&mut nll));
                assert_close("nll", &losses, &widened(&nll), 1.0, 2e-7);
                assert_close("dl", &gradients, &widened(&want), 1.0, 2e-7);
            }
        }
    }

    #[test]
    fn empty_and_distant_pieces_stay_finite() {
        let hidden = [f32::NEG_INFINITY, f32::NEG_INFINITY, -300.0, -301.0];
        let (losses, gradients) = in_pieces(&hidden, &[2], &[0, 2], None, 1.0);
        let p = 1.0 / (1.0 + (-1.0_f64).exp());
        assert!((f64::from(losses[0]) + p.ln()).abs() < 1e-4, "{losses:?}");
        assert_close("dl", &gradients, &[0.0, 0.0, p - 1.0, 1.0 - p], 1.0, 1e-6);
        let (losses, gradients) = in_pieces(&[500.0, 0.0, -500.0], &[0], &[0, 1, 2], None, 1.0);
        assert_eq!((losses, gradients), (vec![0.0], vec![0.0; 3]));
    }

    #[test]
    fn nan_logits_and_labels_outside_all_pieces_give_nan() {
        let (losses, _) = in_pieces(&[1.0, f32::NAN, 0.0], &[0], &[0, 1], None, 1.0);
        assert!(losses[0].is_nan());
        for label in [3, -1] {
            let (losses, _) = in_pieces(&[1.0, 2.0, 0.0], &[label], &[0, 1], None, 1.0);
            assert!(losses[0].is_nan(), "{label}");
        }
    }
}

//! The steps of routed experts on the CPU: one matmul for each expert that has rows, with its rows of the stored matrix.
//!
//! Rows are sorted by expert, so those of an expert follow each other. Experts without rows are skipped, and every row of a
//! result belongs to one expert.

use super::kernel::OutputView;
use super::matmul_terms::{Init, Output, Term};
use super::run::{MAX_TERMS, Run};
use super::view::SrcRows;
use super::{elementwise, route, spread};
use crate::device::Operand;
use smidgen_ir::workspace_cpu::aligned_floats;
use smidgen_ir::{ExpertRows, Router};

/// Rows of one expert.
#[derive(Clone, Copy)]
struct Group {
    expert: usize,
    first: usize,
    rows: usize,
}

impl Run<'_> {
    pub(super) fn route(&self, router: &Router) {
        let correction = router.is_corrected.then(|| self.stored(self.input(1)));
        let scales =
            router.has_expert_scales.then(|| self.stored(self.input(1 + usize::from(router.is_corrected))));
        let choices = self.elements(self.output(1));
        route::route(router, self.input_rows(0), correction, scales, self.output_rows(0), choices);
    }

    pub(super) fn route_grad(&self, router: &Router) {
        let scales = router.has_expert_scales.then(|| self.stored(self.input(3)));
        let dscales = self.step.updates.first().map(|update| self.floats_mut(update));
        let (logits, dweights) = (self.input_rows(0), self.input_rows(2));
        route::route_grad(router, logits, self.i32s(1), dweights, scales, self.output_rows(0), dscales);
    }

    pub(super) fn dispatch(&self, experts: usize) {
        let [places, sorted] = [0, 1].map(|output| self.elements(self.output(output)));
        route::dispatch(self.i32s(0), experts, places, sorted);
    }

    pub(super) fn spread_rows(&self, weighted: bool) {
        spread::spread_rows(
            self.input_rows(0),
            self.i32s(1),
            self.choice_weights(weighted),
            self.output_rows(0),
        );
    }

    pub(super) fn combine_rows(&self, weighted: bool) {
        spread::combine_rows(
            self.input_rows(0),
            self.i32s(1),
            self.choice_weights(weighted),
            self.output_rows(0),
        );
    }

    pub(super) fn row_dots(&self) {
        spread::row_dots(self.input_rows(0), self.input_rows(1), self.i32s(2), self.output_rows(0));
    }

    fn choice_weights(&self, weighted: bool) -> Option<SrcRows> {
        weighted.then(|| self.input_rows(2))
    }

    /// Calls `work` for every expert that has rows.
    fn each_group(&self, experts: usize, mut work: impl FnMut(Group)) {
        let sorted = self.i32s(experts);
        let mut first = 0;
        while first < sorted.len() {
            let expert = sorted.get(first);
            let rows = (first..sorted.len()).take_while(|row| sorted.get(*row) == expert).count();
            work(Group { expert: expert as usize, first, rows });
            first += rows;
        }
    }

    /// Rows of a group times the rows of its expert in a stored matrix.
    fn group_term(
        &self,
        group: Group,
        left: &Operand,
        right: &Operand,
        part: &ExpertRows,
        scale: f32,
    ) -> Term {
        let mut term = self.plain_term(left, right, scale);
        term.left.pointer = self.row_address(left, group.first);
        term.right = term.right.row_slice(part.first_of(group.expert, self.rows_of(right)), part.rows);
        term
    }

    fn group_output(&self, group: Group) -> Output {
        let (y, columns) = (self.output(0), self.output(0).columns);
        let view =
            OutputView { pointer: self.row_address(y, group.first), row_stride: columns, column_stride: 1 };
        Output { view, rows: group.rows, columns }
    }

    pub(super) fn grouped_linear(&self, part: &ExpertRows, bias: bool, lora: Option<f32>) {
        let b = 3 + usize::from(bias);
        self.each_group(2, |group| {
            let transposed = |left: usize, right: usize, scale: f32| Term {
                right_transposed: true,
                ..self.group_term(group, self.input(left), self.input(right), part, scale)
            };
            let adapter = lora.map(|scale| transposed(b, b + 1, scale));
            let (init, used) = if bias {
                let stored = self.stored(self.input(3));
                let first = part.first_of(group.expert, stored.len());
                let row = self.workspace_floats().part(0, part.rows);
                (0..part.rows).for_each(|index| row.set(index, stored.get(first + index)));
                (Init::Bias(row.address()), aligned_floats(part.rows))
            } else {
                (Init::Overwrite, 0)
            };
            self.adapted_matmul(transposed(0, 1, 1.0), adapter, init, self.group_output(group), used);
        });
    }

    pub(super) fn grouped_linear_grad(&self, parts: &[ExpertRows], scales: &[f32]) {
        assert!(parts.len() <= MAX_TERMS, "{} terms in one matmul", parts.len());
        self.each_group(2 * parts.len(), |group| {
            let mut terms = [Term::EMPTY; MAX_TERMS];
            for (index, (part, scale)) in parts.iter().zip(scales).enumerate() {
                let (d, matrix) = (self.input(2 * index), self.input(2 * index + 1));
                terms[index] = self.group_term(group, d, matrix, part, *scale);
            }
            self.matmul(&terms[..parts.len()], Init::Overwrite, self.group_output(group), 0);
        });
    }

    pub(super) fn grouped_weight_grad(&self, part: &ExpertRows, scale: f32) {
        let ([dy, x], gradient) = ([self.input(0), self.input(1)], self.update(0));
        self.each_group(2, |group| {
            let factor = |operand: &Operand| self.factor(operand, group.first);
            let row = part.first_of(group.expert, self.rows_of(gradient));
            self.accumulate_outer_at(
                factor(dy),
                factor(x),
                group.rows,
                scale,
                self.row_address(gradient, row),
                0,
            );
        });
    }

    pub(super) fn grouped_bias_grad(&self, part: &ExpertRows) {
        let (dy, db) = (self.floats(self.input(0)), self.floats_mut(self.update(0)));
        self.each_group(1, |group| {
            let rows = dy.part(group.first * part.rows, group.rows * part.rows).rows(part.rows);
            elementwise::bias_grad(rows, db.part(part.first_of(group.expert, db.len()), part.rows));
        });
    }
}

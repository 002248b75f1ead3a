//! Shape rules of the LM head: logits and the loss, whole or in pieces of the head.
//!
//! Rows are the supervised ones. Sums are (S, 3) in f32, whatever activations are stored as.

use super::{Rule, ShapeError};
use crate::loss_head::{HeadPiece, LossHead};
use crate::objective::Objective;
use crate::shape::{Dim, Extent, Shape, Type};
use crate::storage::{DType, Storage};

impl Rule<'_> {
    pub(crate) fn lm_head_loss(&self, head: &LossHead) -> Result<Vec<Type>, ShapeError> {
        let adapted = head.lora.is_some();
        let gradients = usize::from(head.gradient && adapted) + usize::from(head.train_head);
        self.count(if adapted { 6 } else { 4 }, 1 + gradients + usize::from(head.row_losses))?;
        self.require(head.gradient || !head.train_head, || "a trained head without a gradient".into())?;
        self.require(!(head.gradient && head.row_losses), || "row losses together with a gradient".into())?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Rows)?;
        let (v, head_c) = self.weight(1)?;
        self.equal("channels", c, head_c)?;
        self.integers(2, Dim::Rows, DType::I32)?;
        self.loss_weight(3)?;
        self.scalars(self.updates[0], 1)?;
        let mut outputs = if head.gradient { vec![self.like_first(Shape::of(Dim::Rows, c))] } else { vec![] };
        if adapted {
            let (h_rows, rank) = self.activation(4)?;
            self.equal("rows", h_rows, Dim::Rows)?;
            self.equal("lora b", self.weight(5)?, (v, rank))?;
            if head.gradient {
                outputs.push(self.like_first(Shape::of(Dim::Rows, rank)));
                self.f32_update(1, &Shape::matrix(v, rank))?;
            }
        }
        if head.train_head {
            self.f32_update(gradients, &Shape::matrix(v, c))?;
        }
        if head.row_losses {
            self.f32_update(1, &Shape::rows_of(Dim::Rows))?;
        }
        Ok(outputs)
    }

    pub(crate) fn head_sums(&self, piece: &HeadPiece) -> Result<Vec<Type>, ShapeError> {
        self.count(3 + usize::from(piece.continues), 0)?;
        self.head_piece(piece, 3, 3)?;
        Ok(vec![Type::f32(Shape::of(Dim::Rows, 3))])
    }

    pub(crate) fn head_loss(&self, row_losses: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 1 + usize::from(row_losses))?;
        self.equal("sums", self.f32_rows(0)?, (Dim::Rows, 3))?;
        self.loss_weight(1)?;
        self.scalars(self.updates[0], 1)?;
        if row_losses {
            self.f32_update(1, &Shape::rows_of(Dim::Rows))?;
        }
        Ok(vec![])
    }

    pub(crate) fn head_grad(&self, piece: &HeadPiece, ends: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(5 + usize::from(piece.continues), 0)?;
        let c = self.activation(0)?.1;
        self.head_piece(piece, 5, c)?;
        self.loss_weight(3)?;
        self.equal("sums", self.f32_rows(4)?, (Dim::Rows, 3))?;
        let shape = Shape::of(Dim::Rows, c);
        Ok(vec![if ends { self.like_first(shape) } else { Type::f32(shape) }])
    }

    pub(crate) fn logits(&self, lora: bool, first_word: usize) -> Result<Vec<Type>, ShapeError> {
        self.count(if lora { 4 } else { 2 }, 1)?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Rows)?;
        let (n, head_c) = self.weight(1)?;
        self.equal("channels", c, head_c)?;
        if lora {
            let (h_rows, rank) = self.activation(2)?;
            self.equal("rows", h_rows, Dim::Rows)?;
            self.equal("lora b", self.weight(3)?, (n, rank))?;
        }
        let v = self.updates[0].shape.at(&Extent::default()).1;
        self.require(first_word + n <= v, || format!("words {first_word}+{n} of {v}"))?;
        self.f32_update(0, &Shape::of(Dim::Rows, v))?;
        Ok(vec![])
    }

    pub(crate) fn objective(&self, objective: &Objective) -> Result<Vec<Type>, ShapeError> {
        self.count(if objective.reads_rows() { 5 } else { 4 }, 2)?;
        self.row_numbers(0)?;
        self.scalars(self.inputs[1], 1)?;
        self.integers(2, Dim::Boundaries, DType::I32)?;
        let numbers = Shape::of(Dim::Boundaries, Objective::SEQUENCE_COLUMNS);
        let numbers = Type::new(numbers, Storage::Plain(DType::F64));
        self.require(*self.inputs[3] == numbers, || {
            format!("input 3 is {}, expected {numbers}", self.inputs[3])
        })?;
        if objective.reads_rows() {
            self.equal("before", self.f32_rows(4)?, (Dim::Rows, Objective::BEFORE_COLUMNS))?;
        }
        self.scalars(self.updates[0], 1)?;
        self.scalars(self.updates[1], Objective::FIGURES)?;
        Ok(vec![Type::f32(Shape::rows_of(Dim::Rows))])
    }

    /// One f64 for all rows, or an f32 for each.
    fn loss_weight(&self, input: usize) -> Result<(), ShapeError> {
        match self.inputs[input].storage {
            Storage::F32 => self.row_numbers(input),
            _ => self.scalars(self.inputs[input], 1),
        }
    }

    /// An f32 for each supervised row.
    fn row_numbers(&self, input: usize) -> Result<(), ShapeError> {
        let (got, expected) = (self.inputs[input], Type::f32(Shape::rows_of(Dim::Rows)));
        self.require(*got == expected, || format!("input {input} must be {expected}, got {got}"))
    }

    /// x, rows of the head and labels; input `before` is the result (S, `columns`) of earlier pieces.
    fn head_piece(&self, piece: &HeadPiece, before: usize, columns: usize) -> Result<(), ShapeError> {
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Rows)?;
        self.equal("channels", c, self.weight(1)?.1)?;
        self.integers(2, Dim::Rows, DType::I32)?;
        if piece.continues {
            self.equal("pieces before", self.f32_rows(before)?, (Dim::Rows, columns))?;
        }
        Ok(())
    }
}

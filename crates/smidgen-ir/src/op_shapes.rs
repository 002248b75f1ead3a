//! The shape rule of every operation: which operands fit, and the types of the outputs.
//!
//! `Op::infer` calls the rule that the operation's row names. `Graph::emit` applies it when a stage builds a node, and
//! `verify` applies it again between stages. A violation is a bug of the stage, so the message names the operation and
//! both sides. Here are the checks that rules are made of; the rules are in one file per group of operations.

mod attention;
mod audio;
mod experts;
mod fp8;
mod head;
mod matmul;
mod recurrence;
mod rows;
mod transfers;
mod update;

use crate::shape::{Dim, Shape, Type};
use crate::storage::{DType, Storage};
use thiserror::Error;

/// A node whose operands do not fit its operation: always a bug of the stage that built it.
#[derive(Debug, Error, PartialEq)]
#[error("`{op}`: {what}")]
pub struct ShapeError {
    pub op: &'static str,
    pub what: String,
}

/// The storages of the first and second moment in 8 bits.
pub(crate) const MOMENTS_IN_8_BITS: [Storage; 2] =
    [Storage::Dynamic8 { signed: true }, Storage::Dynamic8 { signed: false }];

/// The operands of one node, with the checks that rules are made of.
#[derive(Clone, Copy)]
pub(crate) struct Rule<'a> {
    pub op: &'static str,
    pub inputs: &'a [&'a Type],
    pub updates: &'a [&'a Type],
}

impl<'a> Rule<'a> {
    /// Applies the rule of a row; the signature lets rows leave out the type of `rule`.
    pub fn apply(
        self,
        rule: impl FnOnce(Rule<'a>) -> Result<Vec<Type>, ShapeError>,
    ) -> Result<Vec<Type>, ShapeError> {
        rule(self)
    }

    fn error(&self, what: String) -> ShapeError {
        ShapeError { op: self.op, what }
    }

    fn require(&self, holds: bool, what: impl FnOnce() -> String) -> Result<(), ShapeError> {
        if holds { Ok(()) } else { Err(self.error(what())) }
    }

    fn count(&self, inputs: usize, updates: usize) -> Result<(), ShapeError> {
        self.require(self.inputs.len() == inputs && self.updates.len() == updates, || {
            format!(
                "expected {inputs} inputs and {updates} updates, got {} and {}",
                self.inputs.len(),
                self.updates.len()
            )
        })
    }

    fn equal<T: PartialEq + std::fmt::Debug>(&self, what: &str, left: T, right: T) -> Result<(), ShapeError> {
        self.require(left == right, || format!("{what}: {left:?} against {right:?}"))
    }

    /// For operations with one output of the type of their first input.
    fn same_as_first(&self) -> Result<Vec<Type>, ShapeError> {
        Ok(vec![self.inputs[0].clone()])
    }

    /// The type of an output with the storage of the first input.
    fn like_first(&self, shape: Shape) -> Type {
        Type::new(shape, self.inputs[0].storage)
    }

    /// A matrix over T, S or audio rows or a tile of T, stored like the other activations.
    fn activation(&self, input: usize) -> Result<(Dim, usize), ShapeError> {
        let (operand, first) = (self.inputs[input], self.inputs[0]);
        let is_number =
            |ty: &Type| matches!(ty.storage, Storage::Plain(DType::F32 | DType::Bf16 | DType::F16));
        match self.rows_and_columns(input) {
            Some(size) if is_number(operand) && (operand.storage == first.storage || !is_number(first)) => {
                Ok(size)
            }
            _ => Err(self.error(format!("input {input} must be rows of numbers, got {operand}"))),
        }
    }

    fn rows_and_columns(&self, input: usize) -> Option<(Dim, usize)> {
        match self.inputs[input].shape.0.as_slice() {
            [
                rows @ (Dim::Tokens | Dim::Routed(_) | Dim::Tile { .. } | Dim::Rows | Dim::Audio(_)),
                Dim::Const(c),
            ] => Some((*rows, *c)),
            _ => None,
        }
    }

    /// An f32 matrix over T, S or audio rows, independent of the storage of activations.
    fn f32_rows(&self, input: usize) -> Result<(Dim, usize), ShapeError> {
        let operand = self.inputs[input];
        match operand.shape.0.as_slice() {
            [rows @ (Dim::Tokens | Dim::Rows | Dim::Audio(_)), Dim::Const(c)]
                if operand.storage == Storage::F32 =>
            {
                Ok((*rows, *c))
            }
            _ => Err(self.error(format!("input {input} must be f32 rows, got {operand}"))),
        }
    }

    /// A constant matrix of any storage.
    fn weight(&self, input: usize) -> Result<(usize, usize), ShapeError> {
        let operand = self.inputs[input];
        match operand.shape.0.as_slice() {
            [Dim::Const(n), Dim::Const(k)] if operand.storage.is_real() => Ok((*n, *k)),
            _ => Err(self.error(format!("input {input} must be a matrix, got {operand}"))),
        }
    }

    fn real_vector(&self, operand: &Type, n: usize) -> Result<(), ShapeError> {
        let fits = operand.shape == Shape::vector(n) && operand.storage.is_real();
        self.require(fits, || format!("expected {n} numbers, got {operand}"))
    }

    fn f32_vector(&self, operand: &Type, n: usize) -> Result<(), ShapeError> {
        let expected = Type::f32(Shape::vector(n));
        self.require(*operand == expected, || format!("expected {expected}, got {operand}"))
    }

    fn integers(&self, input: usize, dim: Dim, dtype: DType) -> Result<(), ShapeError> {
        let expected = Type::new(Shape::rows_of(dim), Storage::Plain(dtype));
        let got = self.inputs[input];
        self.require(*got == expected, || format!("input {input} must be {expected}, got {got}"))
    }

    fn scalars(&self, operand: &Type, n: usize) -> Result<(), ShapeError> {
        let expected = Type::new(Shape::vector(n), Storage::Plain(DType::F64));
        self.require(*operand == expected, || format!("expected {expected}, got {operand}"))
    }

    fn f32_update(&self, update: usize, shape: &Shape) -> Result<(), ShapeError> {
        let got = self.updates[update];
        self.require(got.storage == Storage::F32 && got.shape == *shape, || {
            format!("update {update} must be f32 {shape}, got {got}")
        })
    }
}

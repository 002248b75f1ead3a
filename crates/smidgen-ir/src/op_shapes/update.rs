//! Shape rules of the optimizer step: norms of gradients, AdamW, rounded copies of trained weights.
//!
//! Gradients are in f32 and have the shape of their parameter; moments are in f32 or in 8 bits.

use super::{MOMENTS_IN_8_BITS, Rule, ShapeError};
use crate::op_attributes::ACTIVITY_COLUMNS;
use crate::shape::{Dim, Shape, Type};
use crate::storage::{DType, Storage};

impl Rule<'_> {
    pub(crate) fn fourier_reg(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 2)?;
        let (modules, four) = self.weight(0)?;
        self.equal("coefficients", four, 4)?;
        self.scalars(self.inputs[1], 3)?;
        self.scalars(self.updates[0], 1)?;
        self.f32_update(1, &Shape::matrix(modules, 4))?;
        Ok(vec![])
    }

    pub(crate) fn round(&self, to: Option<DType>) -> Result<Vec<Type>, ShapeError> {
        let (n, k) = self.weight(0)?;
        if let Some(dtype) = to {
            self.count(1, 0)?;
            return Ok(vec![Type::new(Shape::matrix(n, k), Storage::Plain(dtype))]);
        }
        self.count(1, 1)?;
        let fits = self.updates[0].shape == Shape::matrix(n, k) && self.updates[0].storage.plain().is_some();
        self.require(fits && self.updates[0].storage.is_real(), || format!("rounded {}", self.updates[0]))?;
        Ok(vec![])
    }

    pub(crate) fn widen(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(1, 0)?;
        let (n, k) = self.weight(0)?;
        self.require(self.inputs[0].storage == Storage::Plain(DType::Bf16), || {
            format!("weight {}", self.inputs[0])
        })?;
        Ok(vec![Type::f32(Shape::matrix(n, k))])
    }

    pub(crate) fn round_at_random(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 1)?;
        let (n, k) = self.weight(0)?;
        let expected = Type::new(Shape::matrix(n, k), Storage::Plain(DType::Bf16));
        self.require(self.inputs[0].storage == Storage::F32 && *self.updates[0] == expected, || {
            format!("{} as {}", self.inputs[0], self.updates[0])
        })?;
        self.scalars(self.inputs[1], 3)?;
        Ok(vec![])
    }

    pub(crate) fn squared_norm(&self) -> Result<Vec<Type>, ShapeError> {
        self.require(!self.inputs.is_empty() && self.updates.len() == 1, || {
            "expected at least one part and one sum".into()
        })?;
        self.scalars(self.updates[0], 1)?;
        for part in self.inputs {
            self.require(part.storage == Storage::F32, || format!("part {part}"))?;
        }
        Ok(vec![])
    }

    pub(crate) fn grad_norm(&self, squares: bool) -> Result<Vec<Type>, ShapeError> {
        self.require(self.inputs.len() >= 2 + usize::from(squares) && self.updates.len() == 1, || {
            "expected a loss, hyperparameters and one report".into()
        })?;
        let (inputs, more) = self.inputs.split_at(self.inputs.len() - usize::from(squares));
        let is_vector = |squares: &&Type| {
            squares.storage == Storage::Plain(DType::F64)
                && matches!(squares.shape.0.as_slice(), [Dim::Const(_)])
        };
        self.require(more.iter().all(is_vector), || "squares must be an f64 vector".into())?;
        self.scalars(inputs[0], 1)?;
        self.scalars(inputs[1], 3)?;
        self.scalars(self.updates[0], 4)?;
        for gradient in &inputs[2..] {
            self.require(gradient.storage == Storage::F32, || format!("gradient {gradient}"))?;
        }
        Ok(vec![])
    }

    pub(crate) fn adamw_on_host(&self) -> Result<Vec<Type>, ShapeError> {
        let in_f32 = self.updates.get(1).is_some_and(|moment| moment.storage == Storage::F32);
        let moments = if in_f32 { [Storage::F32; 2] } else { MOMENTS_IN_8_BITS };
        self.adamw(moments)
    }

    pub(crate) fn zero(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(0, 1)?;
        Ok(vec![])
    }

    /// `moments` are the storages of the first and the second moment.
    pub(crate) fn adamw(&self, moments: [Storage; 2]) -> Result<Vec<Type>, ShapeError> {
        self.count(3, 4)?;
        let gradient = self.inputs[0];
        self.require(gradient.storage == Storage::F32, || format!("gradient {gradient}"))?;
        self.f32_update(0, &gradient.shape)?;
        for (moment, storage) in moments.into_iter().enumerate() {
            let (got, expected) = (self.updates[1 + moment], Type::new(gradient.shape.clone(), storage));
            self.require(*got == expected, || {
                format!("update {} must be {expected}, got {got}", 1 + moment)
            })?;
        }
        self.f32_update(3, &Shape::matrix(1, ACTIVITY_COLUMNS))?;
        self.scalars(self.inputs[1], 4)?;
        self.scalars(self.inputs[2], 3)?;
        Ok(vec![])
    }
}

//! Shape rules around fp8: activations that are rounded to it, and matmuls that take them.
//!
//! A rounded activation is stored like a weight in fp8, with a scale for each row. Its results are in bf16.

use super::{Rule, ShapeError};
use crate::shape::{Dim, Shape, Type};
use crate::storage::{DType, Storage};

impl Rule<'_> {
    pub(crate) fn round_fp8(&self, scaled: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(1 + usize::from(scaled), 0)?;
        let (rows, n) = self.activation(0)?;
        if scaled {
            let weight = self.inputs[1];
            self.equal("rows of the weight", self.weight(1)?.0, n)?;
            self.require(weight.storage == Storage::Fp8Rows, || format!("weight {weight}"))?;
        }
        Ok(vec![Type::new(Shape::of(rows, n), Storage::Fp8Rows)])
    }

    /// The left operand of a matmul: an activation, possibly rounded to fp8.
    pub(crate) fn matmul_input(&self, input: usize) -> Result<(Dim, usize), ShapeError> {
        match self.rows_and_columns(input) {
            Some(size) if self.inputs[input].storage == Storage::Fp8Rows => Ok(size),
            _ => self.activation(input),
        }
    }

    /// The result of a matmul, in the element type of activations.
    pub(crate) fn matmul_output(&self, shape: Shape) -> Type {
        let storage = match self.inputs[0].storage {
            Storage::Fp8Rows => Storage::Plain(DType::Bf16),
            storage => storage,
        };
        Type::new(shape, storage)
    }
}

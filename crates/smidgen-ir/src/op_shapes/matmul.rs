//! Shape rules of matmuls with weights and of what adapters add to them: LoRA, DoRA's gain, LS-LoRA.
//!
//! The inner sizes agree, and an adapter's B (N, R) has the rows of the weight.

use super::{Rule, ShapeError};
use crate::shape::{Dim, Shape, Type};

impl Rule<'_> {
    pub(crate) fn linear(&self, bias: bool, lora: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(2 + usize::from(bias) + if lora { 2 } else { 0 }, 0)?;
        let (rows, k) = self.matmul_input(0)?;
        let (n, weight_k) = self.weight(1)?;
        self.equal("inner size", k, weight_k)?;
        if bias {
            self.real_vector(self.inputs[2], n)?;
        }
        if lora {
            let first = 2 + usize::from(bias);
            let (h_rows, rank) = self.activation(first)?;
            self.equal("rows", rows, h_rows)?;
            self.equal("lora b", self.weight(first + 1)?, (n, rank))?;
        }
        Ok(vec![self.matmul_output(Shape::of(rows, n))])
    }

    pub(crate) fn scale_columns(&self, bias: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(3 + usize::from(bias), 0)?;
        let (_, n) = self.activation(0)?;
        self.f32_vector(self.inputs[1], n)?;
        self.f32_vector(self.inputs[2], n)?;
        if bias {
            self.real_vector(self.inputs[3], n)?;
        }
        self.same_as_first()
    }

    pub(crate) fn fourier(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(5, 0)?;
        let (rows, n) = self.activation(0)?;
        self.fourier_operands(1, rows, n)?;
        self.same_as_first()
    }

    pub(crate) fn linear_grad(&self, terms: usize) -> Result<Vec<Type>, ShapeError> {
        self.count(2 * terms, 0)?;
        self.require(terms > 0, || "no terms".into())?;
        let (rows, _) = self.matmul_input(0)?;
        let (_, k) = self.weight(1)?;
        for term in 0..terms {
            let (n, term_k) = self.weight(2 * term + 1)?;
            self.equal("term", self.matmul_input(2 * term)?, (rows, n))?;
            self.equal("columns", term_k, k)?;
        }
        Ok(vec![self.matmul_output(Shape::of(rows, k))])
    }

    pub(crate) fn weight_grad(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 1)?;
        let (rows, n) = self.activation(0)?;
        let (x_rows, k) = self.activation(1)?;
        self.equal("rows", rows, x_rows)?;
        self.f32_update(0, &Shape::matrix(n, k))?;
        Ok(vec![])
    }

    pub(crate) fn bias_grad(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(1, 1)?;
        let (_, n) = self.activation(0)?;
        self.f32_update(0, &Shape::vector(n))?;
        Ok(vec![])
    }

    pub(crate) fn magnitude_grad(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(3, 1)?;
        let shape = self.activation(0)?;
        self.equal("operands", shape, self.activation(1)?)?;
        self.f32_vector(self.inputs[2], shape.1)?;
        self.f32_update(0, &Shape::vector(shape.1))?;
        Ok(vec![])
    }

    pub(crate) fn fourier_grad(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(5, 2)?;
        let (rows, n) = self.activation(4)?;
        self.fourier_operands(0, rows, n)?;
        self.f32_update(0, &Shape::matrix(1, 4))?;
        self.f32_update(1, &Shape::matrix(1, 1))?;
        Ok(vec![self.like_first(Shape::of(rows, n))])
    }

    pub(crate) fn row_norms(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(3, 1)?;
        let (n, k) = self.weight(0)?;
        let (rank, a_k) = self.weight(1)?;
        self.equal("columns", k, a_k)?;
        self.equal("lora b", self.weight(2)?, (n, rank))?;
        self.f32_update(0, &Shape::vector(n))?;
        Ok(vec![])
    }

    /// h, b, coefficients and sigma, from input `first` on, for activations (rows, n).
    fn fourier_operands(&self, first: usize, rows: Dim, n: usize) -> Result<(), ShapeError> {
        let (h_rows, rank) = self.activation(first)?;
        self.equal("rows", rows, h_rows)?;
        self.equal("lora b", self.weight(first + 1)?, (n, rank))?;
        self.equal("coefficients", self.inputs[first + 2], &Type::f32(Shape::matrix(1, 4)))?;
        self.equal("sigma", self.inputs[first + 3], &Type::f32(Shape::matrix(1, 1)))
    }
}

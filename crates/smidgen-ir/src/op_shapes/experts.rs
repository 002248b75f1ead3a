//! Shape rules of routed experts: what belongs to a choice has J columns and T rows, or J·T sorted rows.
//!
//! The matrices of all experts are one matrix with E·P rows, of which a matmul uses some rows of each expert.

use super::{Rule, ShapeError};
use crate::expert_attributes::{ExpertRows, Router};
use crate::shape::{Dim, Shape, Type};
use crate::storage::{DType, Storage};

const INTEGERS: Storage = Storage::Plain(DType::I32);

impl Rule<'_> {
    pub(crate) fn route(&self, router: &Router) -> Result<Vec<Type>, ShapeError> {
        let vectors = usize::from(router.is_corrected) + usize::from(router.has_expert_scales);
        self.count(1 + vectors, 0)?;
        self.equal("logits", self.activation(0)?, (Dim::Tokens, router.experts))?;
        for vector in &self.inputs[1..] {
            self.real_vector(vector, router.experts)?;
        }
        self.require((1..=router.experts).contains(&router.chosen), || {
            format!("{} of {} experts", router.chosen, router.experts)
        })?;
        let shape = Shape::of(Dim::Tokens, router.chosen);
        Ok(vec![Type::f32(shape.clone()), Type::new(shape, INTEGERS)])
    }

    pub(crate) fn route_grad(&self, router: &Router) -> Result<Vec<Type>, ShapeError> {
        let scales = usize::from(router.has_expert_scales);
        self.require(self.updates.len() <= scales, || "an update without expert scales".into())?;
        self.count(3 + scales, self.updates.len())?;
        self.equal("logits", self.activation(0)?, (Dim::Tokens, router.experts))?;
        self.equal("choices", self.choices(1)?, router.chosen)?;
        self.equal("dweights", self.f32_rows(2)?, (Dim::Tokens, router.chosen))?;
        for vector in self.inputs[3..].iter().chain(self.updates) {
            self.real_vector(vector, router.experts)?;
        }
        self.same_as_first()
    }

    pub(crate) fn dispatch(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(1, 0)?;
        let chosen = self.choices(0)?;
        Ok(vec![self.inputs[0].clone(), Type::new(Shape::rows_of(Dim::Routed(chosen)), INTEGERS)])
    }

    pub(crate) fn spread_rows(&self, weighted: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(2 + usize::from(weighted), 0)?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Tokens)?;
        let chosen = self.placed(1, weighted)?;
        Ok(vec![self.like_first(Shape::of(Dim::Routed(chosen), c))])
    }

    pub(crate) fn combine_rows(&self, weighted: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(2 + usize::from(weighted), 0)?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Routed(self.placed(1, weighted)?))?;
        Ok(vec![self.like_first(Shape::of(Dim::Tokens, c))])
    }

    pub(crate) fn row_dots(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(3, 0)?;
        let (chosen, (rows, c)) = (self.choices(2)?, self.activation(0)?);
        self.equal("rows", rows, Dim::Routed(chosen))?;
        self.equal("b", self.activation(1)?, (Dim::Tokens, c))?;
        Ok(vec![Type::f32(Shape::of(Dim::Tokens, chosen))])
    }

    pub(crate) fn grouped_linear(
        &self,
        part: &ExpertRows,
        bias: bool,
        lora: bool,
    ) -> Result<Vec<Type>, ShapeError> {
        self.count(3 + usize::from(bias) + if lora { 2 } else { 0 }, 0)?;
        let (rows, k) = self.sorted_rows(0, 2)?;
        let (all, weight_k) = self.expert_matrix(1, part)?;
        self.equal("inner size", k, weight_k)?;
        if bias {
            self.real_vector(self.inputs[3], all)?;
        }
        if lora {
            let first = 3 + usize::from(bias);
            let (h_rows, rank) = self.activation(first)?;
            self.equal("rows", rows, h_rows)?;
            self.equal("lora b", self.weight(first + 1)?, (all, rank))?;
        }
        Ok(vec![self.like_first(Shape::of(rows, part.rows))])
    }

    pub(crate) fn grouped_linear_grad(&self, parts: &[ExpertRows]) -> Result<Vec<Type>, ShapeError> {
        self.count(2 * parts.len() + 1, 0)?;
        self.require(!parts.is_empty(), || "no terms".into())?;
        let (rows, _) = self.sorted_rows(0, 2 * parts.len())?;
        let (_, k) = self.weight(1)?;
        for (term, part) in parts.iter().enumerate() {
            let (_, term_k) = self.expert_matrix(2 * term + 1, part)?;
            self.equal("term", self.activation(2 * term)?, (rows, part.rows))?;
            self.equal("columns", term_k, k)?;
        }
        Ok(vec![self.like_first(Shape::of(rows, k))])
    }

    pub(crate) fn grouped_weight_grad(&self, part: &ExpertRows) -> Result<Vec<Type>, ShapeError> {
        self.count(3, 1)?;
        let (rows, n) = self.sorted_rows(0, 2)?;
        let (x_rows, k) = self.activation(1)?;
        self.equal("rows", (rows, n), (x_rows, part.rows))?;
        let shape = &self.updates[0].shape;
        let fits = matches!(shape.0.as_slice(), [Dim::Const(all), Dim::Const(columns)]
            if *columns == k && has_rows(*all, part));
        self.require(fits, || format!("{part} of {k} columns are not in {shape}"))?;
        self.f32_update(0, shape)?;
        Ok(vec![])
    }

    pub(crate) fn grouped_bias_grad(&self, part: &ExpertRows) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 1)?;
        let (_, n) = self.sorted_rows(0, 1)?;
        self.equal("columns", n, part.rows)?;
        let shape = &self.updates[0].shape;
        let fits = matches!(shape.0.as_slice(), [Dim::Const(all)] if has_rows(*all, part));
        self.require(fits, || format!("{part} are not in {shape}"))?;
        self.f32_update(0, shape)?;
        Ok(vec![])
    }

    /// J integers for each token.
    fn choices(&self, input: usize) -> Result<usize, ShapeError> {
        let operand = self.inputs[input];
        match operand.shape.0.as_slice() {
            [Dim::Tokens, Dim::Const(chosen)] if operand.storage == INTEGERS => Ok(*chosen),
            _ => Err(self.error(format!("input {input} must be integers of each token, got {operand}"))),
        }
    }

    /// The J of `places`, which the weights behind it share.
    fn placed(&self, places: usize, weighted: bool) -> Result<usize, ShapeError> {
        let chosen = self.choices(places)?;
        if weighted {
            self.equal("weights", self.f32_rows(places + 1)?, (Dim::Tokens, chosen))?;
        }
        Ok(chosen)
    }

    /// Sorted rows and the expert of each.
    fn sorted_rows(&self, input: usize, experts: usize) -> Result<(Dim, usize), ShapeError> {
        let (rows, columns) = self.activation(input)?;
        self.require(matches!(rows, Dim::Routed(_)), || format!("input {input} must have sorted rows"))?;
        self.integers(experts, rows, DType::I32)?;
        Ok((rows, columns))
    }

    /// The rows and columns of a matrix that holds those of all experts.
    fn expert_matrix(&self, input: usize, part: &ExpertRows) -> Result<(usize, usize), ShapeError> {
        let (all, k) = self.weight(input)?;
        self.require(has_rows(all, part), || format!("input {input} has {all} rows, which lack {part}"))?;
        Ok((all, k))
    }
}

fn has_rows(all: usize, part: &ExpertRows) -> bool {
    part.rows > 0
        && part.experts > 0
        && all.is_multiple_of(part.experts)
        && part.first + part.rows <= all / part.experts
}

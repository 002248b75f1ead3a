//! Shape rules of norms, gates and factors, which compute each row by itself.
//!
//! So the rows may be those of tokens, of supervised tokens or of audio.

use super::{Rule, ShapeError};
use crate::op_attributes::HeadPart;
use crate::shape::{Dim, Shape, Type};
use crate::storage::{DType, Storage};

impl Rule<'_> {
    pub(crate) fn embed(&self, element: DType) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        self.integers(0, Dim::Tokens, DType::I32)?;
        let (_, c) = self.weight(1)?;
        Ok(vec![Type::new(Shape::of(Dim::Tokens, c), Storage::Plain(element))])
    }

    pub(crate) fn dropout(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        let (rows, _) = self.activation(0)?;
        self.integers(1, rows, DType::U64)?;
        self.same_as_first()
    }

    pub(crate) fn add(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        let shape = self.activation(0)?;
        self.equal("operands", shape, self.activation(1)?)?;
        self.same_as_first()
    }

    pub(crate) fn gather_rows(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Tokens)?;
        self.integers(1, Dim::Rows, DType::I32)?;
        Ok(vec![self.like_first(Shape::of(Dim::Rows, c))])
    }

    pub(crate) fn scatter_rows(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Rows)?;
        self.integers(1, Dim::Rows, DType::I32)?;
        Ok(vec![self.like_first(Shape::of(Dim::Tokens, c))])
    }

    pub(crate) fn embed_grad(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 1)?;
        self.integers(0, Dim::Tokens, DType::I32)?;
        let (_, c) = self.activation(1)?;
        let table = &self.updates[0].shape;
        self.require(table.0.len() == 2 && table.0[1] == Dim::Const(c), || format!("table {table}"))?;
        self.f32_update(0, table)?;
        Ok(vec![])
    }

    pub(crate) fn rms_norm(&self, unweighted: Option<usize>) -> Result<Vec<Type>, ShapeError> {
        self.count(1 + usize::from(unweighted.is_none()), 0)?;
        let (_, c) = self.activation(0)?;
        self.norm_groups(unweighted, c)?;
        self.same_as_first()
    }

    pub(crate) fn rms_norm_grad(
        &self,
        unweighted: Option<usize>,
        addend: bool,
    ) -> Result<Vec<Type>, ShapeError> {
        let weights = usize::from(unweighted.is_none());
        self.count(2 + weights + usize::from(addend), 0)?;
        let shape = self.activation(0)?;
        self.norm_groups(unweighted, shape.1)?;
        for operand in 1 + weights..self.inputs.len() {
            self.equal("operands", shape, self.activation(operand)?)?;
        }
        self.same_as_first()
    }

    pub(crate) fn norm_weight_grad(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 1)?;
        let shape = self.activation(0)?;
        self.equal("operands", shape, self.activation(1)?)?;
        self.norm_weight(self.updates[0], shape.1)?;
        self.f32_update(0, &self.updates[0].shape)?;
        Ok(vec![])
    }

    pub(crate) fn layer_norm(&self, bias: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(2 + usize::from(bias), 0)?;
        let (_, c) = self.activation(0)?;
        for vector in &self.inputs[1..] {
            self.real_vector(vector, c)?;
        }
        self.same_as_first()
    }

    pub(crate) fn layer_norm_grad(&self, addend: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(3 + usize::from(addend), 0)?;
        let shape = self.activation(0)?;
        self.real_vector(self.inputs[1], shape.1)?;
        for operand in 2..self.inputs.len() {
            self.equal("operands", self.activation(operand)?, shape)?;
        }
        self.same_as_first()
    }

    pub(crate) fn gated_act(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        self.gate_and_up()?;
        Ok(vec![self.inputs[1].clone()])
    }

    pub(crate) fn gated_act_grad(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(3, 0)?;
        self.gate_and_up()?;
        self.equal("dy", self.activation(2)?, self.activation(1)?)?;
        Ok(vec![self.inputs[0].clone(), self.inputs[1].clone()])
    }

    pub(crate) fn scale_by(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        let (_, c) = self.activation(0)?;
        self.factors(&self.inputs[1].shape, c)?;
        self.require(self.inputs[1].storage.is_real(), || format!("factors stored as {}", self.inputs[1]))?;
        self.same_as_first()
    }

    /// One number for each of several equal groups of channels.
    fn factors(&self, shape: &Shape, channels: usize) -> Result<(), ShapeError> {
        let fits = matches!(shape.0.as_slice(), [Dim::Const(n)] if *n > 0 && channels.is_multiple_of(*n));
        self.require(fits, || format!("factors {shape} of {channels} channels"))
    }

    pub(crate) fn scale_by_grad(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 1)?;
        let shape = self.activation(0)?;
        self.equal("operands", shape, self.activation(1)?)?;
        self.factors(&self.updates[0].shape, shape.1)?;
        self.f32_update(0, &self.updates[0].shape)?;
        Ok(vec![])
    }

    pub(crate) fn slice_columns(
        &self,
        first: usize,
        columns: usize,
        groups: usize,
    ) -> Result<Vec<Type>, ShapeError> {
        self.count(1, 0)?;
        let (rows, c) = self.activation(0)?;
        let fits = groups > 0 && c.is_multiple_of(groups) && columns > 0 && first + columns <= c / groups;
        self.require(fits, || format!("columns {first}+{columns} of {c} in {groups} groups"))?;
        Ok(vec![self.like_first(Shape::of(rows, groups * columns))])
    }

    /// Parts are in order and do not overlap.
    pub(crate) fn place_columns(
        &self,
        firsts: &[usize],
        columns: usize,
        groups: usize,
    ) -> Result<Vec<Type>, ShapeError> {
        self.count(firsts.len(), 0)?;
        self.require(!firsts.is_empty(), || "no parts".into())?;
        let ((rows, _), mut end) = (self.activation(0)?, 0);
        for (part, first) in firsts.iter().enumerate() {
            let (part_rows, c) = self.activation(part)?;
            self.equal("rows", part_rows, rows)?;
            self.require(groups > 0 && c.is_multiple_of(groups), || {
                format!("{c} columns in {groups} groups")
            })?;
            self.require(*first >= end, || {
                format!("part {part} begins at {first}, the one before ends at {end}")
            })?;
            end = first + c / groups;
        }
        self.require(end <= columns, || format!("parts up to {end} of {columns} columns"))?;
        Ok(vec![self.like_first(Shape::of(rows, groups * columns))])
    }

    /// Parts are in the order of their places and do not overlap there.
    pub(crate) fn place_heads(
        &self,
        heads: usize,
        head_dim: usize,
        parts: &[HeadPart],
    ) -> Result<Vec<Type>, ShapeError> {
        self.count(parts.len(), 0)?;
        self.require(!parts.is_empty(), || "no parts".into())?;
        let ((rows, _), mut end) = (self.activation(0)?, 0);
        for (index, part) in parts.iter().enumerate() {
            let (part_rows, channels) = self.activation(index)?;
            self.equal("rows", part_rows, rows)?;
            let is_matched = part.heads == heads || part.heads == 1 || (heads == 1 && part.heads > 0);
            let fits = is_matched
                && channels.is_multiple_of(part.heads)
                && part.columns > 0
                && part.from + part.columns <= channels / part.heads;
            self.require(fits, || format!("{part} for {heads} heads, of {channels} channels"))?;
            self.require(part.to >= end, || format!("{part}, where the part before ends at {end}"))?;
            end = part.to + part.columns;
        }
        self.require(heads > 0 && end <= head_dim, || format!("parts up to {end} of {head_dim} channels"))?;
        Ok(vec![self.like_first(Shape::of(rows, heads * head_dim))])
    }

    /// The weight of a norm, or the size of its groups if it has none.
    fn norm_groups(&self, unweighted: Option<usize>, channels: usize) -> Result<(), ShapeError> {
        match unweighted {
            None => self.norm_weight(self.inputs[1], channels),
            Some(group) => self.require(group > 0 && channels.is_multiple_of(group), || {
                format!("a norm over {channels} channels cannot have groups of {group}")
            }),
        }
    }

    /// A vector as long as all channels, or as one of several equal groups of them.
    fn norm_weight(&self, operand: &Type, channels: usize) -> Result<(), ShapeError> {
        let fits = match operand.shape.0.as_slice() {
            [Dim::Const(n)] => operand.storage.is_real() && *n > 0 && channels.is_multiple_of(*n),
            _ => false,
        };
        self.require(fits, || format!("a norm over {channels} channels cannot have the weight {operand}"))
    }

    /// A gate for each channel, or for each group of neighbouring channels.
    fn gate_and_up(&self) -> Result<(), ShapeError> {
        let ((gate_rows, gates), (rows, channels)) = (self.activation(0)?, self.activation(1)?);
        self.equal("rows", gate_rows, rows)?;
        self.require(channels.is_multiple_of(gates), || format!("{gates} gates for {channels} channels"))
    }
}

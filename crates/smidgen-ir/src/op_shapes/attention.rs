//! Shape rules of attention, its cache, and rotary embeddings.
//!
//! Queries, keys and values are rows of heads; sinks are one number per head.

use super::{Rule, ShapeError};
use crate::op_attributes::AttentionShape;
use crate::rope::RopeSpec;
use crate::shape::{Dim, Shape, Type};
use crate::storage::{DType, Storage};

impl Rule<'_> {
    pub(crate) fn rope_table(&self, rope: &RopeSpec) -> Result<Vec<Type>, ShapeError> {
        self.count(1 + usize::from(rope.depends_on_length()), 0)?;
        self.integers(0, Dim::Tokens, DType::I32)?;
        if rope.depends_on_length() {
            let lengths = self.inputs[1].shape == Shape::rows_of(Dim::Tokens);
            self.integers(1, if lengths { Dim::Tokens } else { Dim::Boundaries }, DType::I32)?;
        }
        Ok(vec![Type::f32(Shape::of(Dim::Tokens, rope.dim))])
    }

    pub(crate) fn rope(&self, heads: usize) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        let (rows, c) = self.activation(0)?;
        let (table_rows, dim) = self.f32_rows(1)?;
        self.equal("rows", rows, table_rows)?;
        self.require(c % heads == 0 && dim <= c / heads && dim % 2 == 0, || {
            format!("{c} channels in {heads} heads, {dim} of each rotated")
        })?;
        self.same_as_first()
    }

    pub(crate) fn attention(&self, shape: &AttentionShape) -> Result<Vec<Type>, ShapeError> {
        self.count(4 + usize::from(shape.sinks), 0)?;
        self.attention_operands(shape)?;
        self.integers(3, Dim::Boundaries, DType::I32)?;
        self.sinks(shape, 4)?;
        let (q, _) = shape.channels();
        let lse = Type::f32(Shape::of(Dim::Tokens, shape.heads));
        Ok(vec![self.like_first(Shape::of(Dim::Tokens, q)), lse])
    }

    pub(crate) fn attention_grad(&self, shape: &AttentionShape) -> Result<Vec<Type>, ShapeError> {
        self.count(7, 0)?;
        self.attention_operands(shape)?;
        let (q, kv) = shape.channels();
        self.equal("o", self.activation(3)?, (Dim::Tokens, q))?;
        self.equal("lse", self.f32_rows(4)?, (Dim::Tokens, shape.heads))?;
        self.equal("do", self.activation(5)?, (Dim::Tokens, q))?;
        self.integers(6, Dim::Boundaries, DType::I32)?;
        Ok([q, kv, kv].map(|c| self.like_first(Shape::of(Dim::Tokens, c))).to_vec())
    }

    pub(crate) fn sinks_grad(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(4, 1)?;
        let (rows, channels) = self.activation(0)?;
        let (lse_rows, heads) = self.f32_rows(1)?;
        self.equal("rows", rows, lse_rows)?;
        self.equal("do", self.activation(2)?, (rows, channels))?;
        self.require(channels.is_multiple_of(heads), || format!("{channels} channels in {heads} heads"))?;
        self.real_vector(self.inputs[3], heads)?;
        self.f32_update(0, &Shape::vector(heads))?;
        Ok(vec![])
    }

    pub(crate) fn cache_rows(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(5, 2)?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Tokens)?;
        self.equal("v", self.activation(1)?, (rows, c))?;
        self.cache_places(2)?;
        for update in self.updates {
            let fits = matches!(update.shape.0.as_slice(), [Dim::Const(_), Dim::Const(width)] if *width == c);
            self.require(fits && update.storage == self.inputs[0].storage, || format!("cache {update}"))?;
        }
        self.equal("keys and values", &self.updates[0].shape, &self.updates[1].shape)?;
        Ok(vec![])
    }

    pub(crate) fn cached_attention(&self, shape: &AttentionShape) -> Result<Vec<Type>, ShapeError> {
        self.count(6 + usize::from(shape.sinks), 0)?;
        let (q, kv) = self.attention_channels(shape)?;
        self.equal("q", self.activation(0)?, (Dim::Tokens, q))?;
        let (rows, c) = self.weight(1)?;
        self.equal("keys", c, kv)?;
        for cache in [1, 2] {
            self.equal("cache", self.inputs[cache], &self.like_first(Shape::matrix(rows, kv)))?;
        }
        self.cache_places(3)?;
        self.sinks(shape, 6)?;
        Ok(vec![self.like_first(Shape::of(Dim::Tokens, q))])
    }

    fn attention_operands(&self, shape: &AttentionShape) -> Result<(), ShapeError> {
        let (q, kv) = self.attention_channels(shape)?;
        self.equal("q", self.activation(0)?, (Dim::Tokens, q))?;
        self.equal("k", self.activation(1)?, (Dim::Tokens, kv))?;
        self.equal("v", self.activation(2)?, (Dim::Tokens, kv))
    }

    /// Scores are compared before they are scaled, so the scale is positive.
    pub(crate) fn attention_channels(&self, shape: &AttentionShape) -> Result<(usize, usize), ShapeError> {
        let fits = shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads);
        self.require(fits && shape.scale > 0.0 && shape.window != Some(0), || format!("{shape:?}"))?;
        Ok(shape.channels())
    }

    fn sinks(&self, shape: &AttentionShape, input: usize) -> Result<(), ShapeError> {
        if shape.sinks { self.real_vector(self.inputs[input], shape.heads) } else { Ok(()) }
    }

    /// The table of cache rows, and the slot and position of each token, from input `first` on.
    fn cache_places(&self, first: usize) -> Result<(), ShapeError> {
        let table = self.inputs[first];
        let fits = matches!(table.shape.0.as_slice(), [Dim::Const(_), Dim::Const(_)])
            && table.storage == Storage::Plain(DType::I32);
        self.require(fits, || format!("expected a table of cache rows, got {table}"))?;
        self.integers(first + 1, Dim::Tokens, DType::I32)?;
        self.integers(first + 2, Dim::Tokens, DType::I32)
    }
}

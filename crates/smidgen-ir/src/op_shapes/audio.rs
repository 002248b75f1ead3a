//! Shape rules of the operations that turn sound into rows of the residual stream.
//!
//! Audio rows have one row for every 80 ms; finer rows, such as mel frames, are a multiple of them. Marks say for each
//! audio row which chunk and clip it belongs to.

use super::{Rule, ShapeError};
use crate::audio_rows::{MARK_COLUMNS, StridedConv};
use crate::op_attributes::AttentionShape;
use crate::shape::{Dim, Shape, Type};
use crate::storage::{DType, Storage};

impl Rule<'_> {
    pub(crate) fn place_rows(&self, clear: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(if clear { 2 } else { 3 }, 0)?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Tokens)?;
        self.integers(1, Dim::Audio(1), DType::I32)?;
        if !clear {
            self.equal("audio", self.activation(2)?, (Dim::Audio(1), c))?;
        }
        self.same_as_first()
    }

    pub(crate) fn take_rows(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Tokens)?;
        self.integers(1, Dim::Audio(1), DType::I32)?;
        Ok(vec![self.like_first(Shape::of(Dim::Audio(1), c))])
    }

    pub(crate) fn add_bias(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        let (_, c) = self.activation(0)?;
        self.real_vector(self.inputs[1], c)?;
        self.same_as_first()
    }

    pub(crate) fn one_activation(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(1, 0)?;
        self.activation(0)?;
        self.same_as_first()
    }

    pub(crate) fn act_grad(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        let shape = self.activation(0)?;
        self.equal("dy", self.activation(1)?, shape)?;
        self.same_as_first()
    }

    pub(crate) fn chunk_attention(&self, shape: &AttentionShape) -> Result<Vec<Type>, ShapeError> {
        self.count(5, 0)?;
        let (c, _) = self.attention_channels(shape)?;
        for operand in 0..3 {
            self.equal("operands", self.activation(operand)?, (Dim::Audio(1), c))?;
        }
        self.marks(3)?;
        let (distances, heads) = self.weight(4)?;
        self.require(heads == shape.heads && distances % 2 == 0 && distances > 0, || {
            format!("a bias of {distances} distances and {heads} heads")
        })?;
        Ok(vec![
            self.like_first(Shape::of(Dim::Audio(1), c)),
            Type::f32(Shape::of(Dim::Audio(1), shape.heads)),
        ])
    }

    pub(crate) fn chunk_attention_grad(&self, shape: &AttentionShape) -> Result<Vec<Type>, ShapeError> {
        self.count(8, 0)?;
        let (c, _) = self.attention_channels(shape)?;
        for operand in [0, 1, 2, 3, 5] {
            self.equal("operands", self.activation(operand)?, (Dim::Audio(1), c))?;
        }
        self.equal("lse", self.f32_rows(4)?, (Dim::Audio(1), shape.heads))?;
        self.marks(6)?;
        self.equal("bias", self.weight(7)?.1, shape.heads)?;
        Ok(vec![self.inputs[0].clone(); 3])
    }

    pub(crate) fn strided_conv(&self, conv: &StridedConv) -> Result<Vec<Type>, ShapeError> {
        self.count(4, 0)?;
        let (rows, columns) = self.activation(0)?;
        self.marks(1)?;
        let (c, taps) = self.weight(2)?;
        self.equal("taps", taps, 9)?;
        self.real_vector(self.inputs[3], c)?;
        let frames = 2 * conv.frames;
        let expected = if conv.depthwise {
            (Dim::Audio(frames * 2 * conv.bins), c)
        } else {
            (Dim::Audio(frames), 2 * conv.bins)
        };
        self.equal("input", (rows, columns), expected)?;
        Ok(vec![self.like_first(Shape::of(Dim::Audio(conv.frames * conv.bins), c))])
    }

    pub(crate) fn join_places(&self, places: usize) -> Result<Vec<Type>, ShapeError> {
        self.count(1, 0)?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Audio(places))?;
        Ok(vec![self.like_first(Shape::of(Dim::Audio(1), c * places))])
    }

    pub(crate) fn mask_rows(&self, stored: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(2, usize::from(stored))?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Audio(1))?;
        self.marks(1)?;
        if stored {
            self.f32_update(0, &Shape::of(rows, c))?;
            return Ok(vec![]);
        }
        self.same_as_first()
    }

    /// An integer matrix (A, 4).
    fn marks(&self, input: usize) -> Result<(), ShapeError> {
        let expected = Type::new(Shape::of(Dim::Audio(1), MARK_COLUMNS), Storage::Plain(DType::I32));
        self.require(*self.inputs[input] == expected, || {
            format!("input {input} must be marks, got {}", self.inputs[input])
        })
    }
}

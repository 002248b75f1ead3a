//! Shape rules of recurrent mixers: causal convolutions, decays, scans, and the same with the states of generation.
//!
//! Queries and keys are rows of key heads, values of all heads. Decays are f32, one number per head. States of generation
//! are f32 rows, one per slot.

use super::{Rule, ShapeError};
use crate::audio_rows::MARK_COLUMNS;
use crate::recurrence::{DecayShape, ScanShape};
use crate::shape::{Dim, Shape, Type};
use crate::storage::{DType, Storage};

impl Rule<'_> {
    pub(crate) fn causal_conv(&self, bias: bool, backward: bool) -> Result<Vec<Type>, ShapeError> {
        self.count(3 + usize::from(bias), 0)?;
        self.require(!(bias && backward), || "a gradient has no bias".into())?;
        let (rows, c) = self.activation(0)?;
        if rows == Dim::Audio(1) {
            let marks = Type::new(Shape::of(rows, MARK_COLUMNS), Storage::Plain(DType::I32));
            self.equal("marks", self.inputs[1], &marks)?;
        } else {
            self.equal("rows", rows, Dim::Tokens)?;
            self.integers(1, Dim::Boundaries, DType::I32)?;
        }
        self.taps(2, c)?;
        if bias {
            self.real_vector(self.inputs[3], c)?;
        }
        self.same_as_first()
    }

    /// Rows of a convolution's weight, one per channel; returns its taps.
    fn taps(&self, input: usize, channels: usize) -> Result<usize, ShapeError> {
        let (rows, taps) = self.weight(input)?;
        self.equal("channels", rows, channels)?;
        Ok(taps)
    }

    pub(crate) fn causal_conv_weight_grad(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(3, 1)?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Tokens)?;
        self.equal("dy", self.activation(1)?, (rows, c))?;
        self.integers(2, Dim::Boundaries, DType::I32)?;
        let shape = &self.updates[0].shape;
        let fits = matches!(shape.0.as_slice(), [Dim::Const(n), Dim::Const(_)] if *n == c);
        self.require(fits, || format!("a gradient {shape} for {c} channels"))?;
        self.f32_update(0, shape)?;
        Ok(vec![])
    }

    /// Rows and heads of a decay's inputs.
    fn decay_inputs(&self, shape: &DecayShape) -> Result<(Dim, usize), ShapeError> {
        self.require(shape.least <= shape.most, || format!("{shape:?}"))?;
        let (rows, heads) = self.activation(0)?;
        self.real_vector(self.inputs[1], heads)?;
        self.real_vector(self.inputs[2], heads)?;
        if shape.write.is_some() {
            self.equal("b", self.activation(3)?, (rows, heads))?;
        }
        Ok((rows, heads))
    }

    pub(crate) fn decay(&self, shape: &DecayShape) -> Result<Vec<Type>, ShapeError> {
        self.count(3 + usize::from(shape.write.is_some()), 0)?;
        let (rows, heads) = self.decay_inputs(shape)?;
        Ok(vec![Type::f32(Shape::of(rows, heads)); 2])
    }

    pub(crate) fn decay_grad(&self, shape: &DecayShape, trains: [bool; 2]) -> Result<Vec<Type>, ShapeError> {
        let first = 3 + usize::from(shape.write.is_some());
        self.count(first + 2, trains.into_iter().filter(|trains| *trains).count())?;
        let (rows, heads) = self.decay_inputs(shape)?;
        for gradient in [first, first + 1] {
            self.equal("gradients", self.f32_rows(gradient)?, (rows, heads))?;
        }
        for update in 0..self.updates.len() {
            self.f32_update(update, &Shape::vector(heads))?;
        }
        Ok(vec![self.inputs[0].clone(); first - 2])
    }

    pub(crate) fn scan(&self, shape: &ScanShape) -> Result<Vec<Type>, ShapeError> {
        self.count(6, 0)?;
        self.scan_operands(shape)?;
        self.integers(5, Dim::Boundaries, DType::I32)?;
        Ok(vec![self.inputs[2].clone()])
    }

    pub(crate) fn scan_grad(&self, shape: &ScanShape) -> Result<Vec<Type>, ShapeError> {
        self.count(7, 0)?;
        self.scan_operands(shape)?;
        self.equal("do", self.activation(5)?, self.activation(2)?)?;
        self.integers(6, Dim::Boundaries, DType::I32)?;
        Ok(self.inputs[..5].iter().map(|input| (*input).clone()).collect())
    }

    /// q, k, v, g and beta.
    fn scan_operands(&self, shape: &ScanShape) -> Result<(), ShapeError> {
        let fits = shape.key_heads > 0 && shape.heads.is_multiple_of(shape.key_heads) && shape.chunk > 0;
        self.require(fits && shape.state() > 0, || format!("{shape:?}"))?;
        let (keys, values) = shape.channels();
        self.equal("q", self.activation(0)?, (Dim::Tokens, keys))?;
        self.equal("k", self.activation(1)?, (Dim::Tokens, keys))?;
        self.equal("v", self.activation(2)?, (Dim::Tokens, values))?;
        for gate in [3, 4] {
            self.equal("gates", self.f32_rows(gate)?, (Dim::Tokens, shape.heads))?;
        }
        Ok(())
    }

    pub(crate) fn cached_conv(&self, bias: bool) -> Result<Vec<Type>, ShapeError> {
        let places = 2 + usize::from(bias);
        self.count(places + 2, 1)?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Tokens)?;
        let taps = self.taps(1, c)?;
        if bias {
            self.real_vector(self.inputs[2], c)?;
        }
        self.slot_rows(places, (taps - 1) * c)?;
        self.same_as_first()
    }

    pub(crate) fn cached_scan(&self, shape: &ScanShape) -> Result<Vec<Type>, ShapeError> {
        self.count(7, 1)?;
        self.scan_operands(shape)?;
        self.slot_rows(5, shape.heads * shape.state())?;
        Ok(vec![self.inputs[2].clone()])
    }

    /// The slot and position of each token from input `first` on, and a row of f32 for each slot in update 0.
    fn slot_rows(&self, first: usize, columns: usize) -> Result<(), ShapeError> {
        self.integers(first, Dim::Tokens, DType::I32)?;
        self.integers(first + 1, Dim::Tokens, DType::I32)?;
        let rows = self.updates[0];
        let fits = matches!(rows.shape.0.as_slice(), [Dim::Const(_), Dim::Const(width)] if *width == columns);
        self.require(fits && rows.storage == Storage::F32, || format!("states {rows} of {columns} numbers"))
    }
}

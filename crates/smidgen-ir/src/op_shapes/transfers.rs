//! Shape rules of copies between memory spaces and of exchanges between ranks.
//!
//! Bytes are copied as stored, so types agree. A part has fewer rows than the whole, and the same columns.

use super::{Rule, ShapeError};
use crate::shape::Type;
use crate::storage::{DType, Storage};

impl Rule<'_> {
    pub(crate) fn one_copy(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(1, 0)?;
        Ok(vec![self.inputs[0].clone()])
    }

    pub(crate) fn stow(&self) -> Result<Vec<Type>, ShapeError> {
        self.require(self.inputs.len() == 1 && self.updates.len() <= 1, || {
            "expected one input and at most one update".into()
        })?;
        let Some(copy) = self.updates.first() else { return Ok(vec![self.inputs[0].clone()]) };
        self.require(*copy == self.inputs[0], || format!("{} stowed as {copy}", self.inputs[0]))?;
        Ok(vec![])
    }

    pub(crate) fn all_reduce(&self) -> Result<Vec<Type>, ShapeError> {
        self.require(self.inputs.is_empty() && !self.updates.is_empty(), || "expected only updates".into())?;
        let is_summed = |ty: &&Type| matches!(ty.storage, Storage::Plain(DType::F32 | DType::F64));
        self.require(self.updates.iter().all(is_summed), || "only f32 and f64 are summed".into())?;
        Ok(vec![])
    }

    pub(crate) fn reduce_scatter(&self) -> Result<Vec<Type>, ShapeError> {
        self.require(self.inputs.len() == self.updates.len() && !self.inputs.is_empty(), || {
            "expected one part for each input".into()
        })?;
        for (whole, part) in self.inputs.iter().zip(self.updates) {
            let fits = whole.storage == Storage::F32
                && part.storage == Storage::F32
                && whole.shape.0[1..] == part.shape.0[1..];
            self.require(fits, || format!("{part} is not a part of {whole}"))?;
        }
        Ok(vec![])
    }

    pub(crate) fn stowed(&self) -> Result<Vec<Type>, ShapeError> {
        self.count(2, 0)?;
        // What was scattered over ranks has fewer rows here.
        let fits = self.inputs[0].storage == self.inputs[1].storage
            && self.inputs[0].shape.0[1..] == self.inputs[1].shape.0[1..];
        self.require(fits, || format!("{} stowed as {}", self.inputs[0], self.inputs[1]))?;
        Ok(vec![])
    }

    pub(crate) fn all_gather(&self) -> Result<Vec<Type>, ShapeError> {
        match self.inputs {
            [] => {
                self.require(!self.updates.is_empty(), || "expected an input or updates".into())?;
                Ok(vec![])
            }
            [divided] => {
                self.count(1, 0)?;
                Ok(vec![(*divided).clone()])
            }
            [divided, part] => {
                self.count(2, 0)?;
                let fits = divided.shape.0[1..] == part.shape.0[1..];
                self.require(fits, || format!("{part} is not a part of {divided}"))?;
                Ok(vec![Type::new(divided.shape.clone(), part.storage)])
            }
            _ => Err(self.error("expected at most a value and its part".into())),
        }
    }
}

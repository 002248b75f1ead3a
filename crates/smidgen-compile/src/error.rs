//! What can be wrong with a model or with the choice of what to train.
//!
//! The user can fix these errors, so they carry names and numbers. A budget that is too small is `SolveError` in
//! `solution.rs`. A graph or a plan that is not sound is our own mistake: it panics in `verify`.

use thiserror::Error;

/// A `config.json` that cannot be compiled, or an adapter that does not fit it.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ModelError {
    #[error("`{key}` is missing in config.json")]
    Missing { key: &'static str },
    #[error("`{key}` in config.json must be {expected}, got {got}")]
    WrongType { key: String, expected: &'static str, got: String },
    #[error("the architecture `{model_type}` is not supported (supported: {supported})")]
    UnknownArchitecture { model_type: String, supported: String },
    #[error("`{key} = {got}` in config.json is not supported (supported: {supported})")]
    Unsupported { key: String, got: String, supported: &'static str },
    #[error("config.json contradicts itself: {what}")]
    Contradiction { what: String },
    #[error("adapter target `{target}` matches no linear of the model (there are: {known})")]
    UnknownTarget { target: String, known: String },
    #[error("adapter layer {layer} does not exist, the model has layers 0 to {last}")]
    UnknownLayer { layer: usize, last: usize },
    #[error("`adapter.layers = last:{count}` asks for more than the model's {layers} layers")]
    TooManyLayers { count: usize, layers: usize },
    #[error("recompute layer {layer} does not exist, the model has layers 0 to {last}")]
    UnknownRecomputeLayer { layer: usize, last: usize },
}

impl ModelError {
    pub(crate) fn unsupported(
        key: impl Into<String>,
        got: impl Into<String>,
        supported: &'static str,
    ) -> ModelError {
        ModelError::Unsupported { key: key.into(), got: got.into(), supported }
    }
}

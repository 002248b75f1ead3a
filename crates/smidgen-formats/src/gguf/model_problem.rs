//! Errors about the model in an intact GGUF file: unsupported keys, tensors and sizes.
//! Each is wrapped in an error with the path of the file (`InFile`).
//! Left out: errors about the bytes of the file (`problem`).

use smidgen_ir::Storage;
use thiserror::Error;

use super::problem::GgufError;
use super::value::MetadataProblem;
use crate::open_file::InFile;

pub type GgufModelError = InFile<GgufModelProblem>;

#[derive(Debug, Error)]
pub enum GgufModelProblem {
    #[error(transparent)]
    Metadata(#[from] MetadataProblem),
    #[error("the architecture `{got}` is not supported (supported: {supported})")]
    UnknownArchitecture { got: String, supported: String },
    #[error("`{key} = {got}` is not supported (supported: {supported})")]
    Unsupported { key: String, got: String, supported: &'static str },
    #[error("`{key} = {got}` is not supported for architecture `{architecture}`")]
    UnknownKey { key: String, got: String, architecture: &'static str },
    #[error(
        "{count} tensors do not belong to a `{architecture}` model of {layers} layers, among them {first}"
    )]
    UnknownTensors { count: String, architecture: &'static str, layers: usize, first: String },
    #[error("the tensor `{tensor}` is missing")]
    MissingTensor { tensor: String },
    #[error(
        "tensor `{tensor}` should have {expected} numbers of type `f32`, but it is {dims:?} of type `{storage}`"
    )]
    SmallTensor { tensor: String, expected: usize, dims: Vec<usize>, storage: Storage },
    #[error("tensor `{tensor}` holds {got}; its numbers must be positive and finite")]
    SmallNumber { tensor: String, got: f32 },
    #[error("{what}")]
    Contradiction { what: String },
    #[error(transparent)]
    Read(#[from] GgufError),
}

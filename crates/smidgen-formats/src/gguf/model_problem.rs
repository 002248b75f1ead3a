//! What can be wrong with the model in a GGUF file that is not damaged: unsupported keys, tensors and sizes.
//! Every problem is wrapped in an error that has the path of the file.
//! Left out: problems of the bytes (`problem`).

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
    #[error("this is file {number} of {count} of a split model; merge them with `llama-gguf-split --merge`")]
    Split { number: u64, count: u64 },
    #[error("`{key} = {got}` is not supported (supported: {supported})")]
    Unsupported { key: String, got: String, supported: &'static str },
    #[error("`{key} = {got}` is not supported for architecture `{architecture}`")]
    UnknownKey { key: String, got: String, architecture: &'static str },
    #[error("{count} tensors have no place in a `{architecture}` of {layers} layers, among them {first}")]
    UnknownTensors { count: String, architecture: &'static str, layers: usize, first: String },
    #[error("the tensor `{tensor}` is missing")]
    MissingTensor { tensor: &'static str },
    #[error("tensor `{tensor}` should be {expected} positive numbers of f32, it is {dims:?} of `{storage}`")]
    RopeTensor { tensor: &'static str, expected: usize, dims: Vec<usize>, storage: Storage },
    #[error("tensor `{tensor}` holds {got}, which divides no frequency")]
    RopeFactor { tensor: &'static str, got: f32 },
    #[error("{what}")]
    Contradiction { what: String },
    #[error(transparent)]
    Read(#[from] GgufError),
}

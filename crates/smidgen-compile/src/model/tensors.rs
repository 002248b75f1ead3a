//! A linear of a model, and a tensor of its checkpoint.
//!
//! Left out: which ones a model has (`spec.rs`, `audio.rs`).

use smidgen_ir::Shape;

/// A linear of the model: a weight (n, k), perhaps a bias, and the path that adapters use.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    pub path: String,
    pub n: usize,
    pub k: usize,
    pub bias: bool,
    pub layer: Option<usize>,
}

/// A tensor that the checkpoint must contain.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub shape: Shape,
    pub layer: Option<usize>,
}

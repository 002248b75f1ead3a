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
    pub kind: LinearKind,
}

/// What a linear does in its layer, which decides who adapts and quantizes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinearKind {
    #[default]
    Dense,
    /// PEFT refuses adapters on it in models of this type.
    Unadapted,
    /// Scores experts. It is adapted only by name, and never quantized.
    Router,
    /// Holds the matrices of so many experts, one after the other. It is adapted by the name `experts`.
    Experts(usize),
}

impl LinearKind {
    /// How many matrices the linear holds.
    pub fn matrices(self) -> usize {
        match self {
            LinearKind::Experts(experts) => experts,
            LinearKind::Dense | LinearKind::Unadapted | LinearKind::Router => 1,
        }
    }
}

/// A tensor that the checkpoint must contain.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub shape: Shape,
    pub layer: Option<usize>,
}

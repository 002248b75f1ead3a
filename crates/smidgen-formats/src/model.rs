//! A base model: a Hugging Face folder, which may be quantized in several ways, or a GGUF file.
//!
//! Callers need not know which: they see a config with Hugging Face keys, and weights by their Hugging Face
//! names.
//! Left out: downloads and tokenizers.

use crate::bnb::{BnbError, BnbWeights, find_bnb_weights};
use crate::experts::ExpertWeights;
use crate::folder::{FolderError, ModelFolder};
use crate::fp8::{Fp8Error, Fp8Weights, find_fp8_weights};
use crate::gguf::model::GgufModel;
use crate::gguf::model_problem::GgufModelError;
use crate::gguf::{GgufError, GgufFile};
use crate::packed::{PackedError, PackedWeights, find_packed_weights};
use crate::phi4mm::{Phi4mm, speech_factors};
use crate::tensor_ref::TensorRef;
use crate::text_names::is_wrapped;
use crate::weight::{GgufWeight, Weight, WeightRows};
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum ModelOpenError {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Bnb(#[from] BnbError),
    #[error(transparent)]
    Fp8(#[from] Fp8Error),
    #[error(transparent)]
    Packed(#[from] PackedError),
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    GgufModel(#[from] GgufModelError),
}

#[derive(Debug)]
pub enum Model {
    Folder {
        folder: Box<ModelFolder>,
        bnb: BnbWeights,
        fp8: Fp8Weights,
        packed: Box<PackedWeights>,
        phi4mm: Option<Phi4mm>,
        experts: Box<ExpertWeights>,
    },
    Gguf {
        file: Arc<GgufFile>,
        model: Box<GgufModel>,
    },
}

impl Model {
    pub fn open_folder(path: &Path) -> Result<Model, ModelOpenError> {
        let folder = Box::new(ModelFolder::open(path)?);
        let (bnb, fp8) = (find_bnb_weights(&folder)?, find_fp8_weights(&folder)?);
        let packed = Box::new(find_packed_weights(&folder)?);
        let phi4mm = Phi4mm::of_config(folder.config());
        let quantized = |name: &str| quantized_weight(&bnb, &fp8, &packed, name);
        let names = packed.weights.keys().map(String::as_str);
        let experts = Box::new(ExpertWeights::find(&folder, names, quantized));
        Ok(Model::Folder { folder, bnb, fp8, packed, phi4mm, experts })
    }

    /// A model without files, for planning and measuring. `name` is used as its path.
    pub fn from_config(name: &str, config: serde_json::Value) -> Model {
        let folder = Box::new(ModelFolder::from_config(name, config));
        let phi4mm = Phi4mm::of_config(folder.config());
        let (bnb, fp8) = (BnbWeights::default(), Fp8Weights::default());
        Model::Folder { folder, bnb, fp8, packed: Box::default(), phi4mm, experts: Box::default() }
    }

    /// Stops merging the speech adapter in a Phi-4-multimodal checkpoint into its weights. Returns whether
    /// the model is such a checkpoint.
    pub fn stop_merging_speech(&mut self) -> bool {
        match self {
            Model::Folder { phi4mm: Some(phi4mm), .. } => {
                phi4mm.is_merged = false;
                true
            }
            Model::Folder { phi4mm: None, .. } | Model::Gguf { .. } => false,
        }
    }

    /// A and B of a module of the speech adapter in a Phi-4-multimodal checkpoint.
    pub fn speech_factors(&self, module: &str) -> Option<[TensorRef; 2]> {
        match self {
            Model::Folder { folder, phi4mm: Some(_), .. } => speech_factors(folder, module),
            Model::Folder { phi4mm: None, .. } | Model::Gguf { .. } => None,
        }
    }

    pub fn open_gguf(path: &Path) -> Result<Model, ModelOpenError> {
        let mut file = GgufFile::open(path)?;
        let model = Box::new(GgufModel::read(&file)?);
        // Most of the metadata is the vocabulary, which only a tokenizer needs.
        file.release_metadata();
        Ok(Model::Gguf { file: Arc::new(file), model })
    }

    /// Opens a folder, or a file, which must be GGUF.
    pub fn open(path: &Path) -> Result<Model, ModelOpenError> {
        if path.is_file() { Model::open_gguf(path) } else { Model::open_folder(path) }
    }

    pub fn path(&self) -> &Path {
        match self {
            Model::Folder { folder, .. } => folder.path(),
            Model::Gguf { file, .. } => file.path(),
        }
    }

    /// The file that holds the config.
    pub fn config_path(&self) -> &Path {
        match self {
            Model::Folder { folder, .. } => folder.config_path(),
            Model::Gguf { file, .. } => file.path(),
        }
    }

    /// The `config.json`, with the keys of Hugging Face.
    pub fn config(&self) -> &serde_json::Value {
        match self {
            Model::Folder { folder, .. } => folder.config(),
            Model::Gguf { model, .. } => &model.config,
        }
    }

    pub fn has_weights(&self) -> bool {
        match self {
            Model::Folder { folder, .. } => folder.has_weights(),
            Model::Gguf { .. } => true,
        }
    }

    /// Whether some weights are stored quantized.
    pub fn is_quantized(&self) -> bool {
        match self {
            Model::Folder { bnb, fp8, packed, .. } => {
                !bnb.weights.is_empty() || !fp8.weights.is_empty() || !packed.weights.is_empty()
            }
            Model::Gguf { file, .. } => file.tensors().iter().any(|tensor| tensor.storage.plain().is_none()),
        }
    }

    /// A weight of experts in MXFP4, if there is one.
    pub fn mxfp4_experts(&self) -> Option<&str> {
        match self {
            Model::Folder { packed, .. } => packed.mxfp4_experts(),
            Model::Gguf { .. } => None,
        }
    }

    /// The weight with this Hugging Face name.
    pub fn weight(&self, name: &str) -> Option<Weight> {
        match self {
            Model::Folder { folder, phi4mm: Some(phi4mm), .. } => phi4mm.weight(folder, name),
            Model::Folder { folder, bnb, fp8, packed, phi4mm: None, experts } => {
                let is_part = bnb.parts.contains(name) || fp8.scales.contains(name);
                match quantized_weight(bnb, fp8, packed, name) {
                    Some(weight) => Some(weight),
                    None if is_part || packed.parts.contains(name) => None,
                    None => experts.weight(folder, name).or_else(|| folder.tensor(name).map(Weight::Plain)),
                }
            }
            Model::Gguf { file, model } => {
                model.source(name).map(|source| Weight::Gguf(GgufWeight::new(file, source)))
            }
        }
    }

    /// A whole weight as f32, for tests on small models.
    ///
    /// # Panics
    /// If there is no such weight, or it cannot be read.
    #[doc(hidden)]
    pub fn weight_values(&self, name: &str) -> Vec<f32> {
        let weight = self.weight(name).unwrap_or_else(|| panic!("no weight `{name}`"));
        let (rows, columns) = weight.rows_and_columns();
        let mut values = vec![0.0; rows * columns];
        let mut reader = WeightRows::open(&weight).expect("the weight opens");
        reader.read(0, rows, &mut values).expect("the weight is read");
        values
    }

    /// Why tensors in the files do not form a weight of all experts.
    pub fn problem_of(&self, name: &str) -> Option<&str> {
        match self {
            Model::Folder { experts, .. } => experts.problem(name),
            Model::Gguf { .. } => None,
        }
    }

    /// Whether the model is the text part of one with towers.
    pub fn is_wrapped(&self) -> bool {
        is_wrapped(self.config())
    }

    /// Whether the weight with this name is not part of the text model, and so is never read.
    pub fn is_beside_text(&self, name: &str) -> bool {
        match self {
            Model::Folder { folder, .. } => {
                folder.tensor(name).is_some_and(|tensor| folder.is_beside_text(tensor.name()))
            }
            Model::Gguf { .. } => false,
        }
    }

    /// The Hugging Face names of all weights.
    pub fn weight_names(&self) -> Vec<&str> {
        match self {
            Model::Folder { folder, bnb, fp8, packed, experts, .. } => folder
                .tensor_names()
                .filter(|name| !packed.parts.contains(*name))
                .chain(packed.weights.keys().map(String::as_str))
                .filter(|name| !experts.is_part(name))
                .chain(experts.names())
                .filter(|name| !bnb.parts.contains(*name) || bnb.weights.contains_key(*name))
                .filter(|name| !fp8.scales.contains(*name))
                .collect(),
            Model::Gguf { model, .. } => model.sources().map(|(name, _)| name).collect(),
        }
    }
}

/// A weight of a folder that is no plain tensor.
fn quantized_weight(
    bnb: &BnbWeights,
    fp8: &Fp8Weights,
    packed: &PackedWeights,
    name: &str,
) -> Option<Weight> {
    let packed = packed.weights.get(name).map(|weight| Weight::Packed(weight.clone()));
    let bnb = || bnb.weights.get(name).map(|weight| Weight::Bnb(weight.clone()));
    let fp8 = || fp8.weights.get(name).map(|weight| Weight::Fp8(weight.clone()));
    packed.or_else(bnb).or_else(fp8)
}

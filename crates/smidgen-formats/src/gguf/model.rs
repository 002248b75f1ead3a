//! A GGUF file as a Hugging Face model: its metadata becomes a `config.json` with the keys of transformers 5
//! (`config`), and its tensors get their Hugging Face names (`tensor_names`).
//! Nothing is guessed: an unknown architecture, key or tensor is refused with its name, because ignoring it
//! would silently compute another model.
//! Settings that GGUF does not store are lost, such as the sliding window of the first Mistral.
//! Left out: mixtures of experts, and the tokenizer.

use std::collections::BTreeMap;

use serde_json::Value as Json;
use smidgen_ir::Storage;

use super::GgufFile;
use super::architecture::Architecture;
use super::config::{Parts, described_model};
use super::model_problem::{GgufModelError, GgufModelProblem};
use super::tensor_names::{TensorSource, map_tensors};
use super::value::Metadata;
use crate::open_file::InFile;

/// The config and the tensors of the model in a GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufModel {
    pub architecture: &'static Architecture,
    /// What `config.json` would contain.
    pub config: Json,
    sources: BTreeMap<String, TensorSource>,
}

impl GgufModel {
    /// Reads the metadata, and the small tensors that become keys of the config: rotary factors, and the norms of queries
    /// and keys of Muse Glimmer.
    pub fn read(file: &GgufFile) -> Result<GgufModel, GgufModelError> {
        read_checked(file).map_err(|problem| InFile { path: file.path().to_path_buf(), problem })
    }

    /// Where the tensor with this Hugging Face name is in the file.
    pub fn source(&self, name: &str) -> Option<&TensorSource> {
        self.sources.get(name)
    }

    /// All tensors, sorted by their Hugging Face names.
    pub fn sources(&self) -> impl Iterator<Item = (&str, &TensorSource)> {
        self.sources.iter().map(|(name, source)| (name.as_str(), source))
    }
}

fn read_checked(file: &GgufFile) -> Result<GgufModel, GgufModelProblem> {
    let described = described_model(file)?;
    let architecture = described.architecture;
    let sources = map_tensors(file, architecture, described.layers, described.head_dim)?;
    Ok(GgufModel { architecture, config: described.config, sources })
}

impl Parts for GgufFile {
    fn metadata(&self) -> &Metadata {
        GgufFile::metadata(self)
    }

    fn dims(&self, tensor: &str) -> Option<&[usize]> {
        self.tensor(tensor).map(|tensor| tensor.dims.as_slice())
    }

    fn small(&self, name: &str, expected: usize) -> Result<Vec<f32>, GgufModelProblem> {
        let missing = || GgufModelProblem::MissingTensor { tensor: name.to_string() };
        let tensor = self.tensor(name).ok_or_else(missing)?;
        if tensor.dims != [expected] || tensor.storage != Storage::F32 {
            let (dims, storage) = (tensor.dims.clone(), tensor.storage);
            return Err(GgufModelProblem::SmallTensor { tensor: name.to_string(), expected, dims, storage });
        }
        let mut bytes = vec![0; tensor.bytes as usize];
        self.read_at(tensor, 0, &mut bytes)?;
        let (numbers, _) = bytes.as_chunks();
        let numbers: Vec<f32> = numbers.iter().map(|number| f32::from_le_bytes(*number)).collect();
        match numbers.iter().find(|number| !(**number > 0.0 && number.is_finite())) {
            Some(&got) => Err(GgufModelProblem::SmallNumber { tensor: name.to_string(), got }),
            None => Ok(numbers),
        }
    }
}

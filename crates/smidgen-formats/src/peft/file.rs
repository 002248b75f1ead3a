//! An adapter folder opened for reading: its config, and its tensors by their keys.
//! Tensors may be F32, F16 and BF16 in one file, as PEFT and TRL write them. Data stays on disk until it is
//! read. The bias of an adapted module has two names in published adapters, `q_proj.base_layer.bias` and the
//! older `q_proj.bias`; both are read as the first. Adapters with unsupported settings are refused here, for
//! all callers.
//! Left out: pickled `adapter_model.bin`, and named adapters in subfolders (open the subfolder).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use super::config::{AdapterConfig, AdapterConfigError};
use super::experts;
use super::key::{AdapterKey, unwrapped_key};
use super::unsupported::UnsupportedAdapter;
use crate::element::Element;
use crate::safetensors::{SafetensorsError, SafetensorsFile};
use crate::tensor_ref::TensorRef;

pub(super) const CONFIG_FILE: &str = "adapter_config.json";
pub(super) const WEIGHTS_FILE: &str = "adapter_model.safetensors";
const PICKLE_FILE: &str = "adapter_model.bin";

#[derive(Debug)]
pub struct AdapterFile {
    path: PathBuf,
    config: AdapterConfig,
    file: Arc<SafetensorsFile>,
    /// In file order.
    keys: Vec<AdapterKey>,
    positions: BTreeMap<AdapterKey, usize>,
}

#[derive(Debug, Error)]
pub enum AdapterError {
    #[error("the adapter folder `{}` does not exist", path.display())]
    Missing { path: PathBuf },
    #[error("`{}` is not a folder; give the folder that holds `{CONFIG_FILE}`", path.display())]
    NotAFolder { path: PathBuf },
    #[error("the adapter folder `{}` could not be read: {source}", path.display())]
    ReadFolder { path: PathBuf, source: io::Error },
    #[error("`{}` has no `{CONFIG_FILE}`; give the folder of a PEFT adapter", path.display())]
    NoConfig { path: PathBuf },
    #[error("`{}` holds a model and not an adapter: it has `config.json` but no `{CONFIG_FILE}`", path.display())]
    ModelFolder { path: PathBuf },
    #[error("`{}` has no `{WEIGHTS_FILE}`", path.display())]
    NoWeights { path: PathBuf },
    #[error(
        "`{}` has only `{PICKLE_FILE}`, which is pickled; convert it with `python -c \
         \"import torch, safetensors.torch as s; s.save_file(torch.load('{}/{PICKLE_FILE}', map_location='cpu', \
         weights_only=True), '{}/{WEIGHTS_FILE}', {{'format': 'pt'}})\"`",
        path.display(), path.display(), path.display()
    )]
    OnlyPickle { path: PathBuf },
    #[error("tensor `{key}` in `{}` is of type {element}; adapters may be F32, F16 or BF16", path.display())]
    ElementNotFloat { path: PathBuf, key: String, element: Element },
    #[error(transparent)]
    Unsupported(#[from] UnsupportedAdapter),
    #[error(transparent)]
    Config(#[from] AdapterConfigError),
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
}

impl AdapterFile {
    pub fn open(path: &Path) -> Result<AdapterFile, AdapterError> {
        let path = path.to_path_buf();
        match std::fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => return Err(AdapterError::NotAFolder { path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(AdapterError::Missing { path });
            }
            Err(source) => return Err(AdapterError::ReadFolder { path, source }),
        }
        let has = |name: &str| path.join(name).exists();
        match (has(CONFIG_FILE), has(WEIGHTS_FILE)) {
            (true, true) => {}
            (false, _) if has("config.json") => return Err(AdapterError::ModelFolder { path }),
            (false, _) => return Err(AdapterError::NoConfig { path }),
            (true, false) if has(PICKLE_FILE) => return Err(AdapterError::OnlyPickle { path }),
            (true, false) => return Err(AdapterError::NoWeights { path }),
        }
        let config = AdapterConfig::read(&path.join(CONFIG_FILE))?;
        let found = config.unsupported();
        if !found.is_empty() {
            return Err(UnsupportedAdapter { path, found }.into());
        }
        let file = SafetensorsFile::open(&path.join(WEIGHTS_FILE))?;
        if let Some(tensor) = (file.tensors().iter()).find(|tensor| tensor.element.dtype().is_none()) {
            return Err(AdapterError::ElementNotFloat {
                path: file.path().to_path_buf(),
                key: tensor.name.clone(),
                element: tensor.element,
            });
        }
        let keys = read_keys(&file, &config);
        let is_wrapped = (file.tensors().iter()).any(|tensor| unwrapped_key(&tensor.name) != tensor.name);
        let config = AdapterConfig { is_wrapped, ..config };
        let positions = keys.iter().cloned().zip(0..).collect();
        Ok(AdapterFile { path, config, file: Arc::new(file), keys, positions })
    }

    /// Opens an adapter's folder, or the adapter inside the folder of a run.
    pub fn open_adapter_or_run(path: &Path) -> Result<AdapterFile, AdapterError> {
        let inside = path.join("adapter");
        let is_run = !path.join(CONFIG_FILE).exists() && inside.join(CONFIG_FILE).exists();
        AdapterFile::open(if is_run { &inside } else { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (AdapterKey, TensorRef)> {
        (self.keys.iter().enumerate())
            .map(|(position, key)| (key.clone(), TensorRef::new(&self.file, position)))
    }

    pub fn tensor(&self, key: &AdapterKey) -> Option<TensorRef> {
        let position = *self.positions.get(key)?;
        Some(TensorRef::new(&self.file, position))
    }
}

/// The keys of a file. `q_proj.bias` of an adapted module becomes `q_proj.base_layer.bias`, unless the file
/// has both.
fn read_keys(file: &SafetensorsFile, config: &AdapterConfig) -> Vec<AdapterKey> {
    let names: BTreeSet<String> = file.tensors().iter().map(|tensor| unwrapped_key(&tensor.name)).collect();
    let has = |key: &AdapterKey| names.contains(&key.to_string());
    let key_of = |name: &str| match AdapterKey::parse(&unwrapped_key(name)) {
        AdapterKey::ModuleBias(path) if has(&AdapterKey::LoraA(path.clone())) => {
            let current = AdapterKey::BaseLayerBias(path.clone());
            if has(&current) { AdapterKey::ModuleBias(path) } else { current }
        }
        key => key,
    };
    let targets = &config.target_parameters;
    let parameter = |key: AdapterKey| {
        let of_experts = experts::with_path(&key, |path| experts::parameter_path(path, targets));
        of_experts.filter(|_| !targets.is_empty()).unwrap_or(key)
    };
    file.tensors().iter().map(|tensor| parameter(key_of(&tensor.name))).collect()
}

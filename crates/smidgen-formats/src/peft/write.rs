//! Writes an adapter folder: weights and config, which are both complete on disk before either is renamed
//! into place. Config and tensors must agree, because PEFT ignores tensors of modules that the config does
//! not target, and takes each module's rank and alpha from the config.
//! Left out: the model card, and tokenizer files.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;
use thiserror::Error;

use super::config::AdapterConfig;
use super::experts;
use super::file::{CONFIG_FILE, WEIGHTS_FILE};
use super::key::{AdapterKey, wrapped_key};
use super::pattern::PatternError;
use crate::element::Element;
use crate::safetensors::write::{TensorSpec, WriteSafetensorsError, pytorch_metadata, stage_safetensors};
use crate::whole_file::{StagedFile, WriteFileError, commit_together, folder_of, sync_folder};

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterTensor {
    pub key: AdapterKey,
    pub element: Element,
    pub shape: Vec<usize>,
}

#[derive(Debug, Error)]
pub enum WriteAdapterError {
    #[error("tensor `{key}` is of type {element}; adapters may be F32, F16 or BF16")]
    ElementNotFloat { key: AdapterKey, element: Element },
    #[error(
        "tensor `{key}` of shape {shape:?} does not have rank {rank}, which the config sets for its module"
    )]
    RankDisagrees { key: AdapterKey, shape: Vec<usize>, rank: usize },
    #[error(
        "`{name}` sets {listed} for module `{module}`, but {sorted} once its keys are sorted, as they are in the file; \
         make the keys mutually exclusive"
    )]
    PatternOrder { name: &'static str, module: String, listed: f64, sorted: f64 },
    #[error("the config's `target_modules` do not include module `{module}`, which has tensors")]
    ModuleNotTargeted { module: String },
    #[error(transparent)]
    Pattern(#[from] PatternError),
    #[error("the adapter folder `{}` could not be created: {source}", path.display())]
    MakeFolder { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Weights(#[from] WriteSafetensorsError),
    #[error(transparent)]
    File(#[from] WriteFileError),
}

/// Writes `adapter_model.safetensors` and `adapter_config.json` into the folder, which is created if needed.
/// `source` is called with positions in `tensors`, in file order, and writes exactly the bytes of that
/// tensor. On an error, existing files are unchanged.
pub fn write_adapter(
    folder: &Path,
    config: &AdapterConfig,
    tensors: &[AdapterTensor],
    source: impl FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> Result<(), WriteAdapterError> {
    check_agreement(config, tensors)?;
    make_folder(folder)?;
    let modules: BTreeSet<&str> = tensors.iter().filter_map(|tensor| tensor.key.module()).collect();
    let specs: Vec<TensorSpec> = tensors
        .iter()
        .map(|tensor| TensorSpec {
            name: name_in_file(config, &tensor.key, &modules),
            element: tensor.element,
            shape: tensor.shape.clone(),
        })
        .collect();
    let weights = stage_safetensors(&folder.join(WEIGHTS_FILE), &pytorch_metadata(), &specs, source)?;
    let mut text = StagedFile::create(&folder.join(CONFIG_FILE))?;
    text.write(|writer| writer.write_all(config.to_json().as_bytes()))?;
    // The config comes last, because readers recognize an adapter by its config.
    Ok(commit_together(vec![weights, text])?)
}

/// The key of a tensor in the file.
fn name_in_file(config: &AdapterConfig, key: &AdapterKey, modules: &BTreeSet<&str>) -> String {
    let key = experts::key_in_file(key, modules);
    if config.is_wrapped { wrapped_key(&key) } else { key.to_string() }
}

fn make_folder(folder: &Path) -> Result<(), WriteAdapterError> {
    if folder.is_dir() {
        return Ok(());
    }
    std::fs::create_dir_all(folder)
        .map_err(|source| WriteAdapterError::MakeFolder { path: folder.to_path_buf(), source })?;
    Ok(sync_folder(folder_of(folder))?)
}

/// Checks that [`write_adapter`] would accept this adapter, so that a run can fail before it starts and not
/// at its end.
pub fn check_agreement(config: &AdapterConfig, tensors: &[AdapterTensor]) -> Result<(), WriteAdapterError> {
    let mut on_disk = config.clone();
    on_disk.rank_pattern.sort_by(|left, right| left.0.cmp(&right.0));
    on_disk.alpha_pattern.sort_by(|left, right| left.0.cmp(&right.0));
    let (listed, sorted) = (config.module_scales()?, on_disk.module_scales()?);
    for tensor in tensors {
        if tensor.element.dtype().is_none() {
            return Err(WriteAdapterError::ElementNotFloat {
                key: tensor.key.clone(),
                element: tensor.element,
            });
        }
        let has_rank = matches!(
            tensor.key,
            AdapterKey::LoraA(_)
                | AdapterKey::LoraB(_)
                | AdapterKey::LoraEmbeddingA(_)
                | AdapterKey::LoraEmbeddingB(_)
        );
        if let Some(module) = tensor.key.module().filter(|_| has_rank) {
            let rank = listed.rank_for(module);
            let found = tensor.key.rank_of(&tensor.shape);
            let is_of_all = experts::is_of_experts(module);
            let has_rank = |found: usize| found == rank || (is_of_all && found.is_multiple_of(rank));
            if !found.is_some_and(has_rank) {
                return Err(WriteAdapterError::RankDisagrees {
                    key: tensor.key.clone(),
                    shape: tensor.shape.clone(),
                    rank,
                });
            }
        }
    }
    // Trained token rows belong to embeddings, which need not be targets.
    let modules: BTreeSet<&str> = tensors
        .iter()
        .filter(|tensor| !matches!(tensor.key, AdapterKey::TrainableTokens(_)))
        .filter_map(|tensor| tensor.key.module())
        .collect();
    for module in modules {
        let parameters = Value::from(config.target_parameters.clone());
        if !is_targeted(&config.target_modules, module) && !is_targeted(&parameters, module) {
            return Err(WriteAdapterError::ModuleNotTargeted { module: module.to_string() });
        }
        for (name, listed, sorted) in [
            ("rank_pattern", listed.rank_for(module) as f64, sorted.rank_for(module) as f64),
            ("alpha_pattern", listed.alpha_for(module), sorted.alpha_for(module)),
        ] {
            if listed != sorted {
                return Err(WriteAdapterError::PatternOrder {
                    name,
                    module: module.to_string(),
                    listed,
                    sorted,
                });
            }
        }
    }
    Ok(())
}

/// Whether a list of target modules includes the module, by PEFT's rule. Regexes and default lists are not
/// checked.
fn is_targeted(target_modules: &Value, module: &str) -> bool {
    match target_modules {
        Value::Array(entries) => entries.iter().filter_map(Value::as_str).any(|entry| {
            module.strip_suffix(entry).is_some_and(|before| before.is_empty() || before.ends_with('.'))
        }),
        _ => true,
    }
}

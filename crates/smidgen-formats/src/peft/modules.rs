//! Groups the tensors of an adapter by module: A, B and the tensors that its kind adds.
//! Adapters are read this way without a recipe, to merge or inspect them.
//! All problems are reported together: a missing A or B, a rank that is not the config's, tensors of another
//! kind.
//! Left out: whether the modules fit a base model.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use super::config::ModuleScales;
use super::experts::is_of_experts;
use super::file::AdapterFile;
use super::key::AdapterKey;
use super::kind::StoredKind;
use super::pattern::PatternError;
use crate::tensor_ref::TensorRef;
use crate::text_names::text_name;

/// How many problems an error lists before it only counts the rest.
const NAMED_AT_MOST: usize = 8;

/// One adapted linear.
#[derive(Clone, Debug)]
pub struct AdapterModule {
    /// Path in the base model, such as `model.layers.0.self_attn.q_proj`.
    pub path: String,
    pub rank: usize,
    pub alpha: f64,
    /// The factor of B·A.
    pub scale: f64,
    /// (R, in), or (E·R, in) with the rows of an expert together.
    pub a: TensorRef,
    /// (out, R), or (out, R·E) with the columns of a rank together.
    pub b: TensorRef,
    /// (out), with DoRA.
    pub magnitude: Option<TensorRef>,
    /// (out), replaces the bias of the base model.
    pub bias: Option<TensorRef>,
    /// Coefficients (4) and sigma (), with LS-LoRA.
    pub fourier: Option<(TensorRef, TensorRef)>,
}

impl AdapterModule {
    pub fn columns(&self) -> usize {
        self.a.shape()[1]
    }

    pub fn rows(&self) -> usize {
        self.b.shape()[0]
    }

    /// How many experts A and B are of; 1 for a linear.
    pub fn experts(&self) -> usize {
        self.a.shape()[0] / self.rank
    }

    /// The number of the layer; see [`split_layer`].
    pub fn layer(&self) -> Option<usize> {
        split_layer(&self.path).0
    }
}

/// Splits a module path after its layer number: `model.layers.3.mlp.up_proj` gives `3` and `mlp.up_proj`.
/// A path without a number is returned whole.
pub fn split_layer(path: &str) -> (Option<usize>, &str) {
    let mut remaining = path;
    while let Some((part, rest)) = remaining.split_once('.') {
        if let Ok(layer) = part.parse() {
            return (Some(layer), rest);
        }
        remaining = rest;
    }
    (None, path)
}

#[derive(Clone, Debug)]
pub struct AdapterModules {
    /// Sorted by layer, then by name.
    pub modules: Vec<AdapterModule>,
    /// Modules without an adapter whose bias was trained, by path.
    pub biases: Vec<(String, TensorRef)>,
    /// Other tensors of the base model that were trained (`modules_to_save`), by name.
    pub saved: Vec<(String, TensorRef)>,
}

/// The problems of an adapter whose tensors do not form complete modules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncompleteAdapter {
    pub path: PathBuf,
    pub problems: Vec<String>,
}

impl std::error::Error for IncompleteAdapter {}

impl fmt::Display for IncompleteAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the tensors of the adapter in `{}` do not fit its config", self.path.display())?;
        for problem in self.problems.iter().take(NAMED_AT_MOST) {
            write!(f, "\n  {problem}")?;
        }
        match self.problems.len().saturating_sub(NAMED_AT_MOST) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

/// Groups all tensors of a file by module. A tensor that belongs to no module is an error.
pub fn read_modules(file: &AdapterFile) -> Result<AdapterModules, IncompleteAdapter> {
    let incomplete = |problems| IncompleteAdapter { path: file.path().to_path_buf(), problems };
    let scales =
        file.config().module_scales().map_err(|error: PatternError| incomplete(vec![error.to_string()]))?;
    let kind = file.config().kind();
    let tensors: BTreeMap<AdapterKey, TensorRef> = file.tensors().collect();
    let paths: BTreeSet<&str> = tensors.keys().filter_map(AdapterKey::module).collect();
    let mut problems = Vec::new();
    let mut modules = Vec::new();
    for path in paths {
        match read_module(path, &tensors, &scales, kind) {
            Ok(module) => modules.push(module),
            Err(found) => problems.extend(found),
        }
    }
    let modules_to_save = || file.config().modules_to_save.iter().flatten();
    let (mut biases, mut saved) = (Vec::new(), Vec::new());
    for (key, tensor) in &tensors {
        match key {
            AdapterKey::ModuleBias(path) => biases.push((path.clone(), tensor.clone())),
            AdapterKey::BaseTensor(name) => {
                if modules_to_save().any(|module| is_of_module(name, module)) {
                    saved.push((name.clone(), tensor.clone()))
                } else {
                    problems.extend(unexpected(key, kind))
                }
            }
            _ => problems.extend(unexpected(key, kind)),
        }
    }
    for module in modules_to_save() {
        let has_saved = saved.iter().any(|(name, _)| is_of_module(name, module));
        if !has_saved && !biases.iter().any(|(path, _)| is_saved_module(path, module)) {
            problems.push(format!("`modules_to_save` names `{module}`, but the adapter has no tensor of it"));
        }
    }
    if modules.is_empty() && problems.is_empty() {
        problems.push("there is no `lora_A` tensor".to_string());
    }
    if !problems.is_empty() {
        return Err(incomplete(problems));
    }
    // The modules are in the order of their paths, which this sort keeps within a layer.
    modules.sort_by_key(|module| (module.layer().is_none(), module.layer()));
    Ok(AdapterModules { modules, biases, saved })
}

fn is_of_module(name: &str, module: &str) -> bool {
    is_saved_module(name.rsplit_once('.').map_or(name, |(path, _)| path), module)
}

/// Whether an entry of `modules_to_save` names a module: it is the end of its path, or the path beside towers.
pub fn is_saved_module(path: &str, entry: &str) -> bool {
    path.ends_with(entry) || text_name(entry).is_some_and(|entry| path == entry)
}

fn read_module(
    path: &str,
    tensors: &BTreeMap<AdapterKey, TensorRef>,
    scales: &ModuleScales,
    kind: StoredKind,
) -> Result<AdapterModule, Vec<String>> {
    let mut problems = Vec::new();
    let mut find = |make: fn(String) -> AdapterKey| {
        let key = make(path.to_string());
        let found = tensors.get(&key).cloned();
        if found.is_none() {
            problems.push(format!("`{key}` is missing"));
        }
        found
    };
    let (a, b) = (find(AdapterKey::LoraA), find(AdapterKey::LoraB));
    let magnitude = kind.has_magnitude().then(|| find(AdapterKey::LoraMagnitude)).flatten();
    let fourier = match kind {
        StoredKind::LsLora => find(AdapterKey::FourierWeight).zip(find(AdapterKey::FourierSigma)),
        _ => None,
    };
    let bias = tensors.get(&AdapterKey::BaseLayerBias(path.to_string())).cloned();
    let (Some(a), Some(b)) = (a, b) else { return Err(problems) };
    let rank = scales.rank_for(path);
    let (columns, rows) = match (a.shape(), b.shape()) {
        (&[a_rank, columns], &[rows, b_rank]) if a_rank == rank && b_rank == rank => (columns, rows),
        (&[a_rank, columns], &[rows, b_rank])
            if is_of_experts(path) && a_rank == b_rank && a_rank.is_multiple_of(rank) =>
        {
            (columns, rows)
        }
        _ => {
            problems.push(format!(
                "`{path}` has A {:?} and B {:?}, the config sets its rank to {rank}",
                a.shape(),
                b.shape()
            ));
            return Err(problems);
        }
    };
    let mut expect = |tensor: Option<&TensorRef>, shape: &[usize]| {
        if let Some(tensor) = tensor.filter(|tensor| tensor.shape() != shape) {
            problems.push(format!("`{}` is {:?}, expected {shape:?}", tensor.name(), tensor.shape()));
        }
    };
    expect(magnitude.as_ref(), &[rows]);
    expect(bias.as_ref(), &[rows]);
    expect(fourier.as_ref().map(|(weight, _)| weight), &[4]);
    expect(fourier.as_ref().map(|(_, sigma)| sigma), &[]);
    if columns == 0 || rows == 0 {
        problems.push(format!("`{path}` maps {columns} channels to {rows}"));
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let (alpha, scale) = (scales.alpha_for(path), scales.scaling_for(path));
    Ok(AdapterModule { path: path.to_string(), rank, alpha, scale, a, b, magnitude, bias, fourier })
}

/// The problem with a tensor that adapters of this kind do not have.
fn unexpected(key: &AdapterKey, kind: StoredKind) -> Option<String> {
    let reason = match key {
        AdapterKey::LoraA(_)
        | AdapterKey::LoraB(_)
        | AdapterKey::BaseLayerBias(_)
        | AdapterKey::ModuleBias(_) => return None,
        AdapterKey::LoraMagnitude(_) if kind.has_magnitude() => return None,
        AdapterKey::FourierWeight(_) | AdapterKey::FourierSigma(_) if kind == StoredKind::LsLora => {
            return None;
        }
        AdapterKey::LoraMagnitude(_) => "belongs to DoRA",
        AdapterKey::FourierWeight(_) | AdapterKey::FourierSigma(_) => "belongs to LS-LoRA",
        AdapterKey::LoraBBias(_) => "belongs to `lora_bias`",
        AdapterKey::LoraEmbeddingA(_) | AdapterKey::LoraEmbeddingB(_) => "adapts an embedding",
        AdapterKey::TrainableTokens(_) => "belongs to `trainable_token_indices`",
        AdapterKey::BaseTensor(_) => "is a tensor of the base model that `modules_to_save` does not name",
        AdapterKey::Foreign(_) => "is not a key that PEFT writes",
    };
    Some(format!("`{key}` {reason}, the config says `{kind}`"))
}

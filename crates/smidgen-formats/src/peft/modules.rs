//! The tensors of an adapter sorted into modules: each with its A, its B and what its kind adds, or a refusal.
//! This is how an adapter is read without a recipe, for merging and inspecting it.
//! All problems are reported at once: a missing half, a rank other than the config's, tensors of another kind.
//! Left out: whether the modules fit a base model, which needs one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use super::config::ModuleScales;
use super::file::AdapterFile;
use super::key::AdapterKey;
use super::kind::StoredKind;
use super::pattern::PatternError;
use crate::tensor_ref::TensorRef;

/// How many problems an error spells out before it counts the rest.
const NAMED_AT_MOST: usize = 8;

/// One adapted linear.
#[derive(Clone, Debug)]
pub struct AdapterModule {
    /// As in the base model: `model.layers.0.self_attn.q_proj`.
    pub path: String,
    pub rank: usize,
    pub alpha: f64,
    /// What B A is multiplied by.
    pub scale: f64,
    /// (R, in)
    pub a: TensorRef,
    /// (out, R)
    pub b: TensorRef,
    /// (out), of DoRA.
    pub magnitude: Option<TensorRef>,
    /// (out), trained in place of the base's.
    pub bias: Option<TensorRef>,
    /// Coefficients (4) and sigma (), of LS-LoRA.
    pub fourier: Option<(TensorRef, TensorRef)>,
}

impl AdapterModule {
    pub fn columns(&self) -> usize {
        self.a.shape()[1]
    }

    pub fn rows(&self) -> usize {
        self.b.shape()[0]
    }

    /// See [`split_layer`].
    pub fn layer(&self) -> Option<usize> {
        split_layer(&self.path).0
    }
}

/// The layer's number in a module's path, and what follows it: `3` and `mlp.up_proj` of `model.layers.3.mlp.up_proj`.
/// A path without a number is all name.
pub fn split_layer(path: &str) -> (Option<usize>, &str) {
    let mut behind = path;
    while let Some((part, rest)) = behind.split_once('.') {
        if let Ok(layer) = part.parse() {
            return (Some(layer), rest);
        }
        behind = rest;
    }
    (None, path)
}

#[derive(Clone, Debug)]
pub struct AdapterModules {
    /// By layer, then by name.
    pub modules: Vec<AdapterModule>,
    /// Paths of modules without an adapter and their trained biases.
    pub biases: Vec<(String, TensorRef)>,
    /// Names of other tensors of the base, which were trained in addition to the adapter (`modules_to_save`).
    pub saved: Vec<(String, TensorRef)>,
}

/// Why an adapter's tensors do not make up modules.
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

/// Sorts all tensors of a file into modules; a tensor that belongs to none is an error.
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
                match modules_to_save().any(|module| is_of_module(name, module)) {
                    true => saved.push((name.clone(), tensor.clone())),
                    false => problems.extend(unread(key, kind)),
                }
            }
            _ => problems.extend(unread(key, kind)),
        }
    }
    for module in modules_to_save() {
        let has_saved = saved.iter().any(|(name, _)| is_of_module(name, module));
        if !has_saved && !biases.iter().any(|(path, _)| path.ends_with(module.as_str())) {
            problems.push(format!("`modules_to_save` names `{module}`, of which there is no tensor"));
        }
    }
    if modules.is_empty() && problems.is_empty() {
        problems.push("there is no `lora_A` among them".to_string());
    }
    if !problems.is_empty() {
        return Err(incomplete(problems));
    }
    modules.sort_by(|left, right| left.path.cmp(&right.path));
    modules.sort_by_key(|module| (module.layer().is_none(), module.layer()));
    Ok(AdapterModules { modules, biases, saved })
}

/// Whether a tensor belongs to a module that `modules_to_save` names by the end of its path.
fn is_of_module(name: &str, module: &str) -> bool {
    name.rsplit_once('.').map_or(name, |(path, _)| path).ends_with(module)
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
        _ => {
            problems.push(format!(
                "`{path}` has A {:?} and B {:?}, the config gives it the rank {rank}",
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

/// What is wrong with a tensor that no module of this kind has.
fn unread(key: &AdapterKey, kind: StoredKind) -> Option<String> {
    let reason = match key {
        AdapterKey::LoraA(_) | AdapterKey::LoraB(_) | AdapterKey::BaseLayerBias(_) => return None,
        AdapterKey::ModuleBias(_) => return None,
        AdapterKey::LoraMagnitude(_) if kind.has_magnitude() => return None,
        AdapterKey::FourierWeight(_) | AdapterKey::FourierSigma(_) if kind == StoredKind::LsLora => {
            return None;
        }
        AdapterKey::LoraMagnitude(_) => "belongs to DoRA",
        AdapterKey::FourierWeight(_) | AdapterKey::FourierSigma(_) => "belongs to LS-LoRA",
        AdapterKey::LoraBBias(_) => "belongs to `lora_bias`",
        AdapterKey::LoraEmbeddingA(_) | AdapterKey::LoraEmbeddingB(_) => "adapts an embedding",
        AdapterKey::TrainableTokens(_) => "belongs to `trainable_token_indices`",
        AdapterKey::BaseTensor(_) => "is a whole tensor of the base that `modules_to_save` does not name",
        AdapterKey::Foreign(_) => "is not in the form PEFT saves",
    };
    Some(format!("`{key}` {reason}, the config says `{kind}`"))
}

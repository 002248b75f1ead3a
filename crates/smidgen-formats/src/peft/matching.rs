//! Checks that an adapter has exactly the tensors that a run expects, with all differences in one error.
//! A list of keys seldom shows why two adapters differ, so the error adds hints that follow from keys and
//! shapes: another rank, DoRA, LS-LoRA or biases on one side only, other target modules, another base model.
//! Left out: using only a part of an adapter. A tensor that the run does not use is an error.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use super::file::AdapterFile;
use super::key::AdapterKey;
use crate::some_of::some_of;
use crate::tensor_ref::TensorRef;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedTensor {
    pub key: AdapterKey,
    pub shape: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeMismatch {
    pub key: AdapterKey,
    pub expected: Vec<usize>,
    pub found: Vec<usize>,
}

/// All differences between an adapter and what a run expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterMismatch {
    pub path: PathBuf,
    pub missing: Vec<AdapterKey>,
    pub unexpected: Vec<AdapterKey>,
    pub shapes: Vec<ShapeMismatch>,
    pub hints: Vec<String>,
}

/// Returns the adapter's tensors in the order of `expected`, whose keys are distinct.
pub fn match_adapter(
    expected: &[ExpectedTensor],
    file: &AdapterFile,
) -> Result<Vec<TensorRef>, Box<AdapterMismatch>> {
    let mut found = Vec::with_capacity(expected.len());
    let mut missing = Vec::new();
    let mut shapes = Vec::new();
    for ExpectedTensor { key, shape } in expected {
        match file.tensor(key) {
            None => missing.push(key.clone()),
            Some(tensor) if tensor.shape() != shape => shapes.push(ShapeMismatch {
                key: key.clone(),
                expected: shape.clone(),
                found: tensor.shape().to_vec(),
            }),
            Some(tensor) => found.push(tensor),
        }
    }
    let expected_keys: BTreeSet<&AdapterKey> = expected.iter().map(|tensor| &tensor.key).collect();
    let mut unexpected: Vec<AdapterKey> =
        file.tensors().map(|(key, _)| key).filter(|key| !expected_keys.contains(key)).collect();
    unexpected.sort();
    if missing.is_empty() && unexpected.is_empty() && shapes.is_empty() {
        return Ok(found);
    }
    let hints = hints(expected, file, &missing, &unexpected, &shapes);
    Err(Box::new(AdapterMismatch { path: file.path().to_path_buf(), missing, unexpected, shapes, hints }))
}

impl std::error::Error for AdapterMismatch {}

impl fmt::Display for AdapterMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the adapter in `{}` does not fit the recipe", self.path.display())?;
        let quoted = |key: &AdapterKey| format!("`{key}`");
        write_some(f, "missing", &self.missing, quoted)?;
        write_some(f, "unexpected", &self.unexpected, quoted)?;
        write_some(f, "with another shape", &self.shapes, |mismatch| {
            format!("`{}` is {:?}, expected {:?}", mismatch.key, mismatch.found, mismatch.expected)
        })?;
        if !self.hints.is_empty() {
            write!(f, "\n\nhint: {}", self.hints.join("; "))?;
        }
        Ok(())
    }
}

fn write_some<T>(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    items: &[T],
    text: impl Fn(&T) -> String,
) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    let texts: Vec<String> = items.iter().map(text).collect();
    write!(f, "\n  {} {what}: {}", items.len(), some_of(&texts))
}

fn hints(
    expected: &[ExpectedTensor],
    file: &AdapterFile,
    missing: &[AdapterKey],
    unexpected: &[AdapterKey],
    shapes: &[ShapeMismatch],
) -> Vec<String> {
    let mut hints = Vec::new();
    if unexpected.iter().any(|key| matches!(key, AdapterKey::Foreign(_))) {
        hints.push("keys without the prefix `base_model.model.` are not written by PEFT".to_string());
    }
    hints.extend(rank_hint(shapes));
    if shapes.iter().any(|mismatch| !only_the_rank_differs(mismatch)) {
        hints.push(match &file.config().base_model_name_or_path {
            Some(base) => format!("the adapter was made for another base model, `{base}`"),
            None => "the adapter was made for another base model".to_string(),
        });
    }
    for (what, is_part) in PARTS {
        match (missing.iter().any(is_part), unexpected.iter().any(is_part)) {
            (true, false) => hints.push(format!("the recipe uses {what}, the adapter does not")),
            (false, true) => hints.push(format!("the adapter uses {what}, the recipe does not")),
            (true, true) | (false, false) => {}
        }
    }
    let recipe_modules: BTreeSet<String> =
        (expected.iter()).filter_map(|tensor| last_name(&tensor.key)).collect();
    let adapter_modules: BTreeSet<String> = file.tensors().filter_map(|(key, _)| last_name(&key)).collect();
    if recipe_modules != adapter_modules {
        hints.push(format!(
            "the adapter targets {}, the recipe targets {}",
            names(&adapter_modules),
            names(&recipe_modules)
        ));
    }
    hints
}

type Part = (&'static str, fn(&AdapterKey) -> bool);

/// Features of an adapter beyond A and B, and the keys that show them.
const PARTS: [Part; 4] = [
    ("DoRA", |key| matches!(key, AdapterKey::LoraMagnitude(_))),
    ("LS-LoRA", |key| matches!(key, AdapterKey::FourierWeight(_) | AdapterKey::FourierSigma(_))),
    ("trained tensors of the base model", |key| matches!(key, AdapterKey::BaseTensor(_))),
    ("trained biases", |key| matches!(key, AdapterKey::BaseLayerBias(_) | AdapterKey::ModuleBias(_))),
];

fn rank_hint(shapes: &[ShapeMismatch]) -> Option<String> {
    let pairs: BTreeSet<(usize, usize)> = (shapes.iter().filter(|m| only_the_rank_differs(m)))
        .filter_map(|m| Some((m.key.rank_of(&m.found)?, m.key.rank_of(&m.expected)?)))
        .collect();
    match (pairs.first(), pairs.len()) {
        (None, _) => None,
        (Some((found, expected)), 1) => {
            Some(format!("the adapter has rank {found}, the recipe says {expected}"))
        }
        (Some(_), _) => {
            Some("the adapter's ranks differ from module to module, or the recipe's do".to_string())
        }
    }
}

fn only_the_rank_differs(mismatch: &ShapeMismatch) -> bool {
    match (&mismatch.key, &mismatch.found[..], &mismatch.expected[..]) {
        (AdapterKey::LoraA(_) | AdapterKey::LoraEmbeddingA(_), [_, found], [_, expected]) => {
            found == expected
        }
        (AdapterKey::LoraB(_) | AdapterKey::LoraEmbeddingB(_), [found, _], [expected, _]) => {
            found == expected
        }
        _ => false,
    }
}

/// The last name in a path: `q_proj` for `model.layers.0.self_attn.q_proj`.
fn last_name(key: &AdapterKey) -> Option<String> {
    let path = key.module()?;
    path.rsplit('.').next().map(String::from)
}

fn names(modules: &BTreeSet<String>) -> String {
    if modules.is_empty() {
        return "no module".to_string();
    }
    let quoted: Vec<String> = modules.iter().map(|name| format!("`{name}`")).collect();
    some_of(&quoted)
}

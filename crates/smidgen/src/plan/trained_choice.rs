//! Which tensors of the base are trained, with `adapter.kind = "full"` or next to an adapter, and their storage format.
//!
//! `adapter.targets` and `adapter.layers` choose them as they choose adapted linear layers.
//! Left out: the graph (`smidgen_compile`) and the files (`run_folder/trained_weights.rs`).

use crate::failure::Failure;
use smidgen_compile::DecoderSpec;
use smidgen_compile::adapter::{self, LoraModule};
use smidgen_compile::request::Master;
use smidgen_formats::peft::ModulePattern;
use smidgen_formats::text_names::wrapped_name;
use smidgen_ir::Storage;
use smidgen_recipe::{self as recipe, Layers, Recipe, Targets};
use std::collections::{BTreeSet, HashMap};

/// The tensors of the base that are trained.
pub fn chosen_tensors(recipe: &Recipe, spec: &DecoderSpec) -> Result<BTreeSet<String>, Failure> {
    let (targets, layers) = choices(recipe, spec)?;
    let trained = adapter::trained_tensors(spec, &targets, &layers).map_err(Failure::recipe)?;
    refuse_turned(spec, &trained)?;
    if trained.is_empty() {
        return Err(Failure::recipe("`adapter.targets` and `adapter.layers` together choose no weight")
            .hint("the LM head belongs to no layer: `adapter.layers = \"all\"` trains it"));
    }
    Ok(trained)
}

/// Refuses to train experts whose files have their matrices transposed, which no file of a trained model has.
fn refuse_turned(spec: &DecoderSpec, trained: &BTreeSet<String>) -> Result<(), Failure> {
    let is_trained = |path: &String| trained.iter().any(|name| name.starts_with(&format!("{path}.")));
    let turned = spec.experts().filter(|(_, experts)| experts.names.takes_turns);
    let mut paths =
        turned.flat_map(|(layer, experts)| experts.paths().map(|path| DecoderSpec::layer_path(layer, &path)));
    match paths.find(is_trained) {
        None => Ok(()),
        Some(path) => {
            Err(Failure::recipe(format!("`{path}` of a {} model cannot be trained", spec.model_type)).hint(
                "adapt it: `adapter.kind = \"lora\"` with \"experts\" in `adapter.targets`, or leave it out",
            ))
        }
    }
}

/// Base tensors that `adapter.train` names, which are trained in addition to an adapter on these modules.
pub fn tensors_next_to(
    recipe: &Recipe,
    spec: &DecoderSpec,
    adapters: &[LoraModule],
) -> Result<BTreeSet<String>, Failure> {
    let parts = &recipe.adapter.train;
    if parts.is_empty() {
        return Ok(BTreeSet::new());
    }
    let targets = adapter::Targets::Names(parts.clone());
    let trained = adapter::trained_tensors(spec, &targets, &adapter::Layers::All)
        .map_err(|error| Failure::recipe(error).context("`adapter.train`"))?;
    if let Some((_, experts)) = spec.experts().next()
        && let Some(name) = trained.iter().find(|name| name.contains(experts.names.experts))
    {
        return Err(Failure::recipe(format!("`adapter.train` cannot train `{name}` next to an adapter"))
            .hint("adapt the experts: \"experts\" in `adapter.targets`"));
    }
    let is_trained =
        |module: &LoraModule| trained.iter().any(|name| name.starts_with(&format!("{}.", module.path)));
    match adapters.iter().find(|module| is_trained(module)) {
        None => Ok(trained),
        Some(module) => Err(Failure::recipe(format!(
            "`{}` is both trained by `adapter.train` and adapted by `adapter.targets`",
            module.path
        ))
        .hint("leave it out of one of them")),
    }
}

/// Sets the storage of trained tensors to that of `train.master`, whatever their type in the checkpoint.
pub fn store_trained(
    storage: &mut HashMap<String, Storage>,
    spec: &DecoderSpec,
    trained: &BTreeSet<String>,
    master: Master,
) {
    let projector = spec.audio.iter().flat_map(|audio| audio.projector_tensors());
    let tensors = spec.tensors().into_iter().chain(projector);
    let tensors = tensors.filter(|tensor| trained.contains(&tensor.name));
    storage.extend(tensors.map(|tensor| (tensor.name, master.storage(tensor.shape.0.len()))));
}

/// The type in which trained weights are kept; bf16 has the seed of its random rounding.
pub fn master_of(recipe: &Recipe) -> Master {
    match recipe.train.master {
        recipe::Master::F32 => Master::F32,
        recipe::Master::Bf16 => Master::Bf16 { seed: recipe.train.seed },
    }
}

/// The trained part of the base in a few words, for titles.
pub fn chosen_words(recipe: &Recipe) -> String {
    let layers = match &recipe.adapter.layers {
        Layers::All => "all layers".to_owned(),
        Layers::Last(1) => "the last layer".to_owned(),
        Layers::Last(count) => format!("the last {count} layers"),
        Layers::List(list) if list.len() == 1 => "1 layer".to_owned(),
        Layers::List(list) => format!("{} layers", list.len()),
    };
    match &recipe.adapter.targets {
        Targets::AllLinear => layers,
        Targets::Names(names) => format!("{} of {layers}", names.join(", ")),
        Targets::Expression(expression) => format!("`{expression}` of {layers}"),
    }
}

/// The recipe's targets and layers as types of the compiler.
pub fn choices(recipe: &Recipe, spec: &DecoderSpec) -> Result<(adapter::Targets, adapter::Layers), Failure> {
    let targets = match &recipe.adapter.targets {
        Targets::AllLinear => adapter::Targets::AllLinear,
        Targets::Names(names) => adapter::Targets::Names(names.clone()),
        Targets::Expression(expression) => adapter::Targets::Names(matched_paths(expression, spec)?),
    };
    let layers = match &recipe.adapter.layers {
        Layers::All => adapter::Layers::All,
        Layers::Last(count) => adapter::Layers::Last(*count),
        Layers::List(list) => adapter::Layers::List(list.clone()),
    };
    Ok((targets, layers))
}

/// Paths of the linear layers that an expression matches. In a model with towers it may also match the longer paths that
/// PEFT sees.
fn matched_paths(expression: &str, spec: &DecoderSpec) -> Result<Vec<String>, Failure> {
    let pattern = ModulePattern::whole(expression)
        .map_err(|error| Failure::recipe(error).context("`adapter.targets`"))?;
    let is_matched = |path: &String| pattern.matches(path) || pattern.matches(&wrapped_name(path));
    let paths = spec.all_linears().into_iter().map(|linear| linear.path);
    let matched: Vec<String> = paths.filter(is_matched).collect();
    if matched.is_empty() {
        let example = spec.all_linears().swap_remove(0).path;
        return Err(Failure::recipe(format!(
            "`adapter.targets`: `{expression}` matches no linear of the model"
        ))
        .hint(format!("an expression has to match whole paths, such as `{example}`")));
    }
    Ok(matched)
}

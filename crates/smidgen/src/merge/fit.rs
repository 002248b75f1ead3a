//! Decides what happens to each tensor of the base: merged with a module, replaced by a trained one, converted, or
//! copied.
//! The published Phi-4-multimodal has a LoRA inside its checkpoint. An adapter is merged into the weight that this LoRA
//! is added to; an adapter that continues this LoRA replaces it.
//! An adapter of another model is refused here, before anything is written, with every tensor that does not fit.
//! Left out: the file of a tensor (`shards`) and its numbers (`fold`).

use std::collections::BTreeMap;

use crate::failure::Failure;
use crate::model_files::original::{MatricesOfExperts, OriginalModel};
use crate::model_files::output::{Action, Fold, OutputTensor};
use crate::session::adapters::UNTIED_HEAD;
use smidgen_compile::model::spec::EMBEDDING;
use smidgen_formats::element::Element;
use smidgen_formats::peft::{AdapterFile, AdapterModule, AdapterModules};
use smidgen_formats::phi4mm::speech_names;

/// Maximum number of tensors that an error names.
const NAMED_AT_MOST: usize = 8;

/// One output for each tensor of the base, in its order.
pub fn fit_adapter(
    adapter: &AdapterFile,
    read: &AdapterModules,
    original: &OriginalModel,
    element: Option<Element>,
) -> Result<Vec<OutputTensor>, Failure> {
    let mut problems = Vec::new();
    let mut actions: BTreeMap<String, Action> = BTreeMap::new();
    for module in &read.modules {
        if original.leaves_out_speech() {
            for (name, factor) in speech_names(&module.path).into_iter().zip([&module.a, &module.b]) {
                match check(original, &name, factor.shape()) {
                    Ok(()) => drop(actions.insert(name, Action::Replace(factor.clone()))),
                    Err(problem) => problems.push(problem),
                }
            }
            continue;
        }
        if module.magnitude.is_some() && original.has_speech(&module.path) {
            problems.push(format!(
                "`{}` has magnitudes and a LoRA inside the base: magnitudes scale that LoRA too, so they cannot be merged into the weight alone",
                module.path
            ));
            continue;
        }
        if let Some(matrices) = original.matrices_of_experts(&module.path) {
            match fold_experts(module, &matrices) {
                Ok(folds) => actions.extend(folds),
                Err(problem) => problems.push(problem),
            }
            continue;
        }
        let name = original.file_name(&format!("{}.weight", module.path));
        match check(original, &name, &[module.rows(), module.columns()]) {
            Ok(()) => drop(actions.insert(name, Action::Fold(Box::new(Fold::whole(module.clone()))))),
            Err(problem) => problems.push(problem),
        }
    }
    let adapted = read.modules.iter().filter_map(|module| Some((&module.path, module.bias.as_ref()?)));
    for (path, bias) in adapted.chain(read.biases.iter().map(|(path, bias)| (path, bias))) {
        let name = original.file_name(&format!("{path}.bias"));
        match check(original, &name, bias.shape()) {
            Ok(()) => drop(actions.insert(name, Action::Replace(bias.clone()))),
            Err(problem) => problems.push(problem),
        }
    }
    let is_saved = |wanted: &str| read.saved.iter().any(|(name, _)| name == wanted);
    for (name, tensor) in &read.saved {
        // The untied head of a model with a tied head; `merge` has compared it with the embedding.
        if name == UNTIED_HEAD && original.tensor(name).is_none() && is_saved(EMBEDDING) {
            continue;
        }
        let name = original.file_name(name);
        match check(original, &name, tensor.shape()) {
            Ok(()) => drop(actions.insert(name, Action::Replace(tensor.clone()))),
            Err(problem) => problems.push(problem),
        }
    }
    if !problems.is_empty() {
        return Err(misfit(adapter, original, &problems));
    }
    let outputs = original.tensors().iter().map(|tensor| {
        let element = element.filter(|_| tensor.is_real()).unwrap_or(tensor.element());
        let action = match actions.remove(tensor.name()) {
            Some(action) => action,
            None if tensor.is_stored_as(element) => Action::Copy,
            None => Action::Convert,
        };
        OutputTensor { original: tensor.clone(), element, action }
    });
    Ok(outputs.collect())
}

fn check(original: &OriginalModel, name: &str, shape: &[usize]) -> Result<(), String> {
    match original.tensor(name) {
        None if name == "lm_head.weight" => Err(format!(
            "`{name}` is not in the base: it is tied to the embedding, so merging would change the embedding too"
        )),
        None => Err(format!("`{name}` is not in the base")),
        Some(tensor) if tensor.shape() != shape => {
            Err(format!("`{name}` is {:?} in the base, the adapter is for {shape:?}", tensor.shape()))
        }
        Some(tensor) if !tensor.is_real() => {
            Err(format!("`{name}` is {} in the base, which cannot be merged", tensor.element()))
        }
        Some(_) => Ok(()),
    }
}

/// What happens to each tensor that holds matrices of the experts that a module adapts.
fn fold_experts(
    module: &AdapterModule,
    matrices: &MatricesOfExperts,
) -> Result<Vec<(String, Action)>, String> {
    let MatricesOfExperts { experts, rows, columns, is_turned, ref names } = *matrices;
    let shape = [module.experts(), module.rows(), module.columns()];
    if shape != [experts, rows, columns] {
        return Err(format!(
            "`{}` is {:?} in the base, the adapter is for {shape:?}",
            module.path,
            [experts, rows, columns]
        ));
    }
    let of_each = experts * rows / names.len();
    let fold = |number: usize| Fold {
        module: module.clone(),
        experts,
        is_turned,
        first_row: if is_turned { 0 } else { number * of_each },
    };
    let folds = names.iter().enumerate();
    Ok(folds.map(|(number, name)| (name.clone(), Action::Fold(Box::new(fold(number))))).collect())
}

fn misfit(adapter: &AdapterFile, original: &OriginalModel, problems: &[String]) -> Failure {
    let mut message = format!(
        "the adapter in `{}` does not fit the base model `{}`",
        adapter.path().display(),
        original.path().display()
    );
    for problem in problems.iter().take(NAMED_AT_MOST) {
        message.push_str(&format!("\n  {problem}"));
    }
    if problems.len() > NAMED_AT_MOST {
        message.push_str(&format!("\n  and {} more", problems.len() - NAMED_AT_MOST));
    }
    match &adapter.config().base_model_name_or_path {
        Some(name) => Failure::model(message).hint(format!("the adapter was trained on `{name}`")),
        None => Failure::model(message),
    }
}

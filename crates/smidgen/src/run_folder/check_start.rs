//! Checks that a run can start: its adapter can be saved, and the adapter or checkpoint that it starts from fits.
//!
//! Only headers are read, so a run is refused before anything is written.

use super::resume::Checkpoint;
use super::trained_weights;
use crate::failure::Failure;
use crate::plan::artifact::Artifact;
use crate::plan::job::Job;
use crate::session::adapters::{adapter_config, adapter_places, find_tensors};
use smidgen_formats::peft::{AdapterFile, AdapterTensor, check_agreement};
use smidgen_ir::Plan;
use smidgen_recipe::Init;

/// Refuses a job whose adapter could not be saved, and an initial adapter that does not fit the job. Returns a note
/// if the initial adapter was trained with another scale.
pub fn check_start(plan: &Plan, job: &Job, start: Option<&Checkpoint>) -> Result<Option<String>, Failure> {
    if Artifact::of(&job.recipe) == Artifact::Model {
        if let Some(checkpoint) = start {
            trained_weights::check_trained(plan, &job.request, &checkpoint.folder)?;
        }
        return Ok(None);
    }
    let places = adapter_places(plan, &job.request);
    let tensors: Vec<AdapterTensor> = places.iter().map(|place| place.tensor.clone()).collect();
    check_agreement(&adapter_config(job), &tensors).map_err(Failure::recipe)?;
    let folder = match (start, &job.recipe.adapter.init) {
        (Some(checkpoint), _) => &checkpoint.folder,
        (None, Init::Adapter(path)) => &path.resolved,
        (None, Init::Default | Init::BuiltinSpeech) => return Ok(None),
    };
    let opened = match start {
        Some(_) => AdapterFile::open(folder),
        None => AdapterFile::open_adapter_or_run(folder),
    };
    let file = opened.map_err(|error| {
        let failure = Failure::model(error);
        if folder.exists() {
            return failure;
        }
        failure.hint("`adapter.init` is `default`, or the folder of a PEFT adapter or of a run")
    })?;
    let (found, expected) = (file.config().kind().name(), job.recipe.adapter.kind.to_string());
    if found != expected {
        return Err(Failure::model(format!(
            "the adapter in `{}` is of kind `{found}`, the recipe asks for `{expected}`",
            file.path().display()
        ))
        .hint(format!("start from an adapter of kind `{expected}`, or with `adapter.init = \"default\"`")));
    }
    find_tensors(&places, &file)?;
    compare_scales(job, &file)
}

/// An adapter adds B·A times its scale, so with another scale the same tensors add something else.
fn compare_scales(job: &Job, file: &AdapterFile) -> Result<Option<String>, Failure> {
    let scales = file.config().module_scales().map_err(Failure::model)?;
    let other = job.request.adapters.iter().find(|module| {
        let (theirs, ours) = (scales.scaling_for(&module.path), f64::from(module.scale));
        (theirs - ours).abs() > 1e-6 * theirs.abs().max(ours.abs())
    });
    Ok(other.map(|module| {
        format!(
            "the adapter in `{}` was trained with a scale of {} (its `alpha` is {}), this run uses a scale of {} (`adapter.alpha` \
             is {})",
            file.path().display(),
            scales.scaling_for(&module.path),
            scales.alpha_for(&module.path),
            module.scale,
            job.recipe.adapter.alpha
        )
    }))
}

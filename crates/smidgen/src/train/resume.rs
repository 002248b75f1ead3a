//! Exact resume: what a checkpoint holds, and which checkpoint a run continues from.
//!
//! A checkpoint is the adapter as PEFT has it, the optimizer's moments, the number of updates done, how evaluations
//! stand, its job and the memory choices of its plan. Everything else (data order, dropout, learning rate) is a pure function
//! of the recipe and the step, so nothing else needs to be kept.

use super::metrics::last_step;
use super::run_dir::RunDir;
use super::standing::Standing;
use super::trainer::RunPolicy;
use super::trainer_state::was_stopped_early;
use super::{adapters, weights};
use crate::checkpoint::element::Element;
use crate::checkpoint::json_file::read_json_file;
use crate::checkpoint::safetensors::SafetensorsFile;
use crate::checkpoint::safetensors_write::{TensorSpec, pytorch_metadata, write_safetensors};
use crate::checkpoint::tensor_ref::TensorRef;
use crate::checkpoint::whole_file::write_whole;
use crate::failure::Failure;
use crate::job::Job;
use crate::recipe::{KeyDifference, Length, Recipe, differences, read_recipe, render_job};
use serde::{Deserialize, Serialize};
use smidgen_compile::Policy;
use smidgen_compile::options::Recompute;
use smidgen_ir::LeafKind;
use smidgen_runtime::{Device, Executor};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const STATE_FILE: &str = "smidgen_state.json";
const MOMENTS_FILE: &str = "optimizer.safetensors";
/// The job that made the checkpoint: that of the run folder may have been resumed with other memory since.
const JOB_FILE: &str = "job.toml";

/// Where a run begins.
#[derive(Clone, Debug)]
pub enum Start {
    Beginning,
    Checkpoint {
        step: u64,
        folder: PathBuf,
        run_policy: RunPolicy,
        standing: Standing,
        /// The best evaluated step, if its checkpoint was removed since.
        lost_best: Option<u64>,
    },
}

impl Start {
    pub fn updates_done(&self) -> u64 {
        match self {
            Start::Beginning => 0,
            Start::Checkpoint { step, .. } => *step,
        }
    }

    pub fn standing(&self) -> Standing {
        match self {
            Start::Beginning => Standing::default(),
            Start::Checkpoint { standing, .. } => *standing,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct State {
    version: u32,
    step: u64,
    micro_tokens: usize,
    recompute: Vec<usize>,
    loss_chunk: usize,
    #[serde(default)]
    standing: Standing,
}

const STATE_VERSION: u32 = 1;

/// The newest checkpoint of a run folder, or its beginning.
pub fn find_start(dir: &RunDir) -> Result<Start, Failure> {
    let Some(step) = dir.checkpoints().pop() else { return Ok(Start::Beginning) };
    let folder = dir.checkpoint(step);
    let path = folder.join(STATE_FILE);
    let state: State = read_json_file(&path, 1 << 20).map_err(Failure::world)?;
    if state.version != STATE_VERSION || state.step != step {
        return Err(Failure::world(format!(
            "`{}` is version {} of step {}, expected version {STATE_VERSION} of step {step}",
            path.display(),
            state.version,
            state.step
        ))
        .hint("remove that checkpoint folder to continue from the one before"));
    }
    let policy = Policy { recompute: Recompute { layers: state.recompute }, loss_chunk: state.loss_chunk };
    let run_policy = RunPolicy { micro_tokens: state.micro_tokens, policy };
    let mut standing = state.standing;
    let lost_best = standing.best_saved.map(|best| best.step).filter(|best| !dir.checkpoint(*best).exists());
    if lost_best.is_some() {
        standing.forget_saved();
    }
    Ok(Start::Checkpoint { step, folder, run_policy, standing, lost_best })
}

/// Writes a checkpoint into an empty folder.
pub fn write_state<D: Device>(
    executor: &mut Executor<D>,
    job: &Job,
    run_policy: &RunPolicy,
    step: u64,
    standing: &Standing,
    folder: &Path,
) -> Result<(), Failure> {
    adapters::save_adapter(executor, job, folder)?;
    let moments = weights::leaf_names(executor.plan(), LeafKind::Moment);
    let specs: Vec<TensorSpec> = moments
        .iter()
        .map(|(id, name)| {
            let plan = executor.plan();
            let shape = plan.value(*id).ty.shape.0.iter().map(|dim| dim.at(&plan.extent)).collect();
            TensorSpec { name: name.clone(), element: Element::F32, shape }
        })
        .collect();
    write_safetensors(&folder.join(MOMENTS_FILE), &pytorch_metadata(), &specs, |index, out| {
        let id = moments[index].0;
        let bytes = executor.plan().value(id).ty.bytes(&executor.plan().extent);
        weights::copy_out(executor, id, 0..bytes, out)
    })
    .map_err(Failure::world)?;
    let state = State {
        version: STATE_VERSION,
        step,
        micro_tokens: run_policy.micro_tokens,
        recompute: run_policy.policy.recompute.layers.clone(),
        loss_chunk: run_policy.policy.loss_chunk,
        standing: *standing,
    };
    let state = serde_json::to_string_pretty(&state).map_err(Failure::world)?;
    for (name, text) in [(JOB_FILE, render_job(&job.recipe)), (STATE_FILE, state)] {
        write_whole(&folder.join(name), |out| out.write_all(text.as_bytes())).map_err(Failure::world)?;
    }
    Ok(())
}

/// Reads the adapter and the moments of a checkpoint.
pub fn read_state<D: Device>(executor: &mut Executor<D>, job: &Job, folder: &Path) -> Result<(), Failure> {
    adapters::read_adapter(executor, &job.request, folder)?;
    let path = folder.join(MOMENTS_FILE);
    let file = Arc::new(SafetensorsFile::open(&path).map_err(Failure::world)?);
    let mut scratch = vec![0u8; 16 << 10];
    for (id, name) in weights::leaf_names(executor.plan(), LeafKind::Moment) {
        let broken = |what: &str| {
            Failure::world(format!("`{}`: tensor `{name}` {what}", path.display()))
                .hint("remove that checkpoint folder to continue from the one before")
        };
        let position = file.position(&name).ok_or_else(|| broken("is missing"))?;
        let tensor = TensorRef::new(&file, position);
        let plan = executor.plan();
        if tensor.elements() as usize != plan.value(id).ty.elements(&plan.extent) {
            return Err(broken("has another size than the plan"));
        }
        weights::fill_from_file(executor, id, &tensor, &mut scratch)?;
    }
    Ok(())
}

/// What a resumed run may not change, and what it says about what it may.
pub fn check_job(dir: &RunDir, recipe: &Recipe) -> Result<Vec<String>, Failure> {
    let path = dir.file("job.toml");
    if !path.exists() {
        return Ok(vec![]);
    }
    let old =
        read_recipe(&path, &[]).map_err(|error| Failure::world(format!("`{}`: {error}", path.display())))?;
    let (mut notes, mut refused) = (Vec::new(), Vec::new());
    for difference in differences(&old, recipe) {
        match verdict(&difference, &old, recipe) {
            Verdict::Free => {}
            Verdict::Note(note) => notes.push(note),
            Verdict::Refused => refused.push(difference),
        }
    }
    if refused.is_empty() {
        return Ok(notes);
    }
    let lines: Vec<String> = refused.iter().map(render_difference).collect();
    Err(Failure::recipe(format!(
        "the recipe differs from the run in `{}`\n  {}",
        dir.path().display(),
        lines.join("\n  ")
    ))
    .hint("resume with the recipe of the run, or choose another `output.dir`"))
}

enum Verdict {
    Free,
    Note(String),
    Refused,
}

fn verdict(difference: &KeyDifference, old: &Recipe, new: &Recipe) -> Verdict {
    match difference.key.as_str() {
        "train.log_every" | "train.save_every" | "train.eval_every" | "train.keep" | "output.dir" => {
            Verdict::Free
        }
        key if key.starts_with("memory.") || key.starts_with("expect.") => Verdict::Free,
        "train.steps" => match (old.train.length, new.train.length) {
            (Length::Steps(before), Length::Steps(now)) if now > before => Verdict::Note(format!(
                "`train.steps` grew from {before} to {now}: the learning rate follows the longer schedule from here on"
            )),
            _ => Verdict::Refused,
        },
        _ => Verdict::Refused,
    }
}

fn render_difference(difference: &KeyDifference) -> String {
    let words = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".into());
    format!("`{}` was {}, is {}", difference.key, words(&difference.old), words(&difference.new))
}

/// Whether the memory section differs from that of a checkpoint.
pub fn memory_changed(checkpoint: &Path, recipe: &Recipe) -> bool {
    read_recipe(&checkpoint.join(JOB_FILE), &[]).is_ok_and(|old| old.memory != recipe.memory)
}

/// Whether the final adapter is there and the run was as long as it is to be, or had stopped early.
pub fn is_finished(dir: &RunDir, recipe: &Recipe, total_steps: u64) -> bool {
    let adapter = dir.file("adapter");
    adapter.join("adapter_config.json").exists()
        && (last_step(&dir.file("metrics.jsonl")) == Some(total_steps)
            || (recipe.train.early_stop > 0 && was_stopped_early(&adapter)))
}

//! Exact resume: what a checkpoint holds, and which checkpoint a run continues from.
//!
//! A checkpoint holds the adapter in PEFT's format, or the trained base tensors; the optimizer state; the number of
//! updates done; the best evaluation; its job, and the memory choices of its plan. Everything else (data order,
//! dropout, learning rate) is a pure function of the recipe and the step, so it is not stored.

use super::checksums::{self, verify_checksums};
use super::contents::Contents;
use super::history::PartEnd;
use super::loss_scale::LossScale;
use super::moments;
use super::run_dir::{RunDir, checkpoint_name};
use super::trained_state;
use crate::failure::Failure;
use crate::logs::evaluations::Evaluations;
use crate::logs::log_history::Totals;
use crate::logs::metrics::last_step;
use crate::logs::trainer_state::was_stopped_early;
use crate::plan::arithmetic::Arithmetic;
use crate::plan::artifact::Artifact;
use crate::plan::job::Job;
use serde::{Deserialize, Serialize};
use smidgen_formats::json_file::read_json_file;
use smidgen_formats::whole_file::write_whole;
use smidgen_ir::{OffloadV1, Policy};
use smidgen_recipe::{KeyDifference, Length, Recipe, Schedule, differences, read_recipe, render_job};
use smidgen_runtime::cpu::bf16_unit::F32Unit;
use smidgen_runtime::{Device, Executor};
use std::path::{Path, PathBuf};

const STATE_FILE: &str = "smidgen_state.json";
/// The job that wrote the checkpoint. The job in the run folder may be a later one with other memory settings.
pub const JOB_FILE: &str = "job.toml";
/// The device's matmul algorithms, if they were chosen by timing.
pub const ALGORITHMS_FILE: &str = "products.txt";

/// The checkpoint that a run continues from.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    pub folder: PathBuf,
    pub state: State,
    /// The best evaluated step, if its checkpoint was removed since.
    pub lost_best: Option<u64>,
}

/// What a checkpoint stores besides tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// Updates done.
    pub step: u64,
    #[serde(flatten)]
    pub policy: Policy,
    #[serde(default, rename = "standing")]
    pub evaluations: Evaluations,
    /// The arithmetic that computed it; `f32` in checkpoints without this field.
    #[serde(default = "f32_name")]
    pub compute: String,
    /// Only where gradients pass through f16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    /// Since version 3.
    #[serde(default, rename = "made_of")]
    pub contents: Option<Contents>,
    /// `None` if an earlier smidgen wrote it; then `metrics.jsonl` has the row of every step.
    #[serde(default)]
    pub totals: Option<Totals>,
}

#[derive(Serialize, Deserialize)]
struct StateFile {
    version: u32,
    #[serde(flatten)]
    state: State,
    /// What version 1 offloaded; later versions have it in the policy.
    #[serde(default, skip_serializing)]
    away: Option<OffloadV1>,
}

fn f32_name() -> String {
    Arithmetic::F32(F32Unit::Vectors).name()
}

/// 0.17 writes version 4, with other names for what is offloaded. Version 3 (0.11) added `made_of`, version 2 (0.10) has
/// the whole policy, version 1 (0.9) parts of it; all are still read.
const STATE_VERSION: u32 = 4;
/// The hashes of a model with a thousand tensors take about 100 KiB.
const MAX_STATE_BYTES: u64 = 16 << 20;

/// The newest checkpoint of a run folder.
pub fn find_checkpoint(dir: &RunDir) -> Result<Option<Checkpoint>, Failure> {
    let Some(step) = dir.checkpoints().pop() else { return Ok(None) };
    let folder = dir.checkpoint(step);
    let path = folder.join(STATE_FILE);
    let file: StateFile = read_json_file(&path, MAX_STATE_BYTES).map_err(Failure::model)?;
    let StateFile { version, mut state, away } = file;
    if !(1..=STATE_VERSION).contains(&version) || state.step != step {
        let failure = Failure::model(format!(
            "`{}` is version {version} of step {}, expected version 1 to {STATE_VERSION} of step {step}",
            path.display(),
            state.step
        ));
        return Err(failure.hint(if version > STATE_VERSION {
            "a later version of smidgen wrote that checkpoint: continue with it"
        } else {
            "remove that checkpoint folder to continue from the one before"
        }));
    }
    if let Some(offload) = away {
        state.policy = offload.added_to(state.policy);
    }
    let best_saved = state.evaluations.best_saved.map(|best| best.step);
    let lost_best = best_saved.filter(|best| !dir.checkpoint(*best).exists());
    if lost_best.is_some() {
        state.evaluations.forget_saved();
    }
    Ok(Some(Checkpoint { folder, state, lost_best }))
}

/// Writes a checkpoint into an empty folder.
pub fn write_state<D: Device>(
    executor: &mut Executor<D>,
    job: &Job,
    state: State,
    folder: &Path,
) -> Result<(), Failure> {
    trained_state::save_trained(executor, job, folder)?;
    moments::write(executor, folder)?;
    let file = StateFile { version: STATE_VERSION, state, away: None };
    let state = serde_json::to_string_pretty(&file).map_err(Failure::disk)?;
    let algorithms = executor.device().chosen_algorithms().map(|chosen| (ALGORITHMS_FILE, chosen));
    for (name, text) in
        algorithms.into_iter().chain([(JOB_FILE, render_job(&job.recipe)), (STATE_FILE, state)])
    {
        write_whole(&folder.join(name), |out| out.write_all(text.as_bytes())).map_err(Failure::disk)?;
    }
    Ok(())
}

/// Takes part in gathering tensors while another rank writes a checkpoint.
pub fn help_write_state<D: Device>(executor: &mut Executor<D>, job: &Job) -> Result<(), Failure> {
    trained_state::help_save_trained(executor, job)?;
    moments::help_write(executor)
}

/// Makes the device use the matmul algorithms of the run that wrote the checkpoint. Returns the reason if it cannot.
pub fn use_stored_algorithms<D: Device>(device: &mut D, folder: &Path) -> Option<String> {
    let path = folder.join(ALGORITHMS_FILE);
    let chosen = match std::fs::read_to_string(&path) {
        Ok(chosen) => chosen,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => return Some(format!("cannot read `{}`: {error}", path.display())),
    };
    let owner = chosen.lines().next().unwrap_or_default();
    (!device.adopt_algorithms(&chosen))
        .then(|| format!("the matmul algorithms of this run were chosen on {owner}"))
}

/// Reads the trained tensors and the optimizer state of a checkpoint.
pub fn read_state<D: Device>(executor: &mut Executor<D>, job: &Job, folder: &Path) -> Result<(), Failure> {
    trained_state::read_saved(executor, job, folder)?;
    moments::read(executor, folder)
}

/// Refuses changes of the recipe that would change results, and returns notes about some of the others.
pub fn check_job(dir: &RunDir, recipe: &Recipe) -> Result<Vec<String>, Failure> {
    compare_jobs(dir.path(), recipe)
}

/// Refuses a newest checkpoint that is damaged or is one of another run, and a finished run without any, which would start
/// again at step 0 and replace its result. Returns a note if a checkpoint cannot be checked.
pub fn check_checkpoint(dir: &RunDir, recipe: &Recipe) -> Result<Option<String>, Failure> {
    let checkpoints = dir.checkpoints();
    let artifact = Artifact::of(recipe);
    let result = dir.file(artifact.folder());
    let is_finished = result.join(artifact.config()).exists();
    let [earlier @ .., newest] = checkpoints.as_slice() else {
        if !is_finished {
            return Ok(None);
        }
        return Err(Failure::command(format!(
            "the run in `{}` is finished and has no checkpoint to continue from",
            dir.path().display()
        ))
        .hint(format!("start another run from its result, `{}`, with another `output.dir`", result.display()))
        .hint("the last state is saved unless `train.save_every` is 0 in full training"));
    };
    let (name, folder) = (checkpoint_name(*newest), dir.checkpoint(*newest));
    // Only one of several ranks reads all of it.
    let has_checksums = !dir.is_written()
        || verify_checksums(&folder).map_err(|failure| {
            failure.hint(match earlier.last() {
                Some(step) => {
                    format!("remove `{name}` to continue from `{}`", checkpoint_name(*step))
                }
                None if is_finished => {
                    "restore that file, or start again with another `output.dir`".to_owned()
                }
                None => format!("remove `{name}` to start again at step 0"),
            })
        })?;
    // Someone may have copied a checkpoint of another run into this folder.
    compare_jobs(&folder, recipe)?;
    Ok((!has_checksums).then(|| {
        format!(
            "an earlier smidgen wrote `{name}`, without `{}`: cannot check whether its files are damaged",
            checksums::FILE_NAME
        )
    }))
}

fn compare_jobs(folder: &Path, recipe: &Recipe) -> Result<Vec<String>, Failure> {
    let path = folder.join(JOB_FILE);
    if !path.exists() {
        return Ok(vec![]);
    }
    let old = read_recipe(&path, &[])
        .map_err(|error| Failure::model(error).context(format!("`{}`", path.display())))?;
    let (mut notes, mut refused) = (Vec::new(), Vec::new());
    for difference in differences(&old, recipe) {
        match verdict(&difference, &old, recipe) {
            Verdict::Allowed => {}
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
        folder.display(),
        lines.join("\n  ")
    ))
    .hint("resume with the recipe of the run, or choose another `output.dir`"))
}

enum Verdict {
    Allowed,
    Note(String),
    Refused,
}

fn verdict(difference: &KeyDifference, old: &Recipe, new: &Recipe) -> Verdict {
    match difference.key.as_str() {
        "train.log_every" | "train.save_every" | "train.eval_every" | "train.keep" | "output.dir" => {
            Verdict::Allowed
        }
        key if key.starts_with("memory.") || key.starts_with("expect.") => Verdict::Allowed,
        "train.steps" | "train.epochs" => match (old.train.length, new.train.length) {
            (Length::Steps(before), Length::Steps(now)) if now > before => {
                Verdict::Note(grown(difference, new))
            }
            (Length::Epochs(before), Length::Epochs(now)) if now > before => {
                Verdict::Note(grown(difference, new))
            }
            _ => Verdict::Refused,
        },
        _ => Verdict::Refused,
    }
}

fn grown(difference: &KeyDifference, recipe: &Recipe) -> String {
    let [before, now] = [&difference.old, &difference.new].map(|value| value.as_deref().unwrap_or("not set"));
    let schedule = match recipe.train.schedule {
        Schedule::Constant => "the learning rate stays constant",
        Schedule::Linear | Schedule::Cosine => {
            "the learning rate follows the longer schedule from here on, so the result differs from a run that was planned for it"
        }
    };
    format!("`{}` grew from {before} to {now}: {schedule}", difference.key)
}

fn render_difference(difference: &KeyDifference) -> String {
    let KeyDifference { key, old, new } = difference;
    let is_length = key == "train.steps" || key == "train.epochs";
    let rule = if is_length && old.is_some() && new.is_some() { ": a run can only grow" } else { "" };
    let [old, new] = [old, new].map(|value| value.as_deref().unwrap_or("not set"));
    format!("`{key}` was {old}, is {new}{rule}")
}

/// Whether the memory section differs from that of a checkpoint.
pub fn memory_changed(checkpoint: &Path, recipe: &Recipe) -> bool {
    read_recipe(&checkpoint.join(JOB_FILE), &[]).is_ok_and(|old| old.memory != recipe.memory)
}

/// Whether the run has done all its steps or stopped early, and its result is saved.
pub fn is_finished(dir: &RunDir, recipe: &Recipe, total_steps: u64) -> bool {
    let artifact = Artifact::of(recipe);
    let result = dir.file(artifact.folder());
    result.join(artifact.config()).exists()
        && (last_step(&dir.file("metrics.jsonl")) == Some(total_steps)
            || (recipe.train.early_stop > 0 && was_stopped_early(&result)))
}

/// How a finished run ended, and after which step.
pub fn how_it_ended(dir: &RunDir, recipe: &Recipe) -> (PartEnd, u64) {
    let result = dir.file(Artifact::of(recipe).folder());
    let is_early = recipe.train.early_stop > 0 && was_stopped_early(&result);
    let ended = if is_early { PartEnd::StoppedEarly } else { PartEnd::Done };
    (ended, last_step(&dir.file("metrics.jsonl")).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use smidgen_ir::Space;

    #[test]
    fn a_checkpoint_of_version_1_has_the_same_policy() {
        let old = r#"{"version": 1, "step": 4, "micro_tokens": 96, "recompute": [0, 1], "loss_chunk": 32,
            "away": {"weights": [0, 2], "tables": true, "head_pieces": 8, "activations": [1], "moments": true,
            "window_bytes": 7}}"#;
        let file: StateFile = serde_json::from_str(old).unwrap();
        let policy = file.away.unwrap().added_to(file.state.policy);
        let expected = Policy {
            micro_tokens: 96,
            weights: Space::Host,
            offloaded_weights: [0, 2].into_iter().collect(),
            embedding_offloaded: true,
            tables_offloaded: true,
            head_pieces: 8,
            activations: Space::Host,
            offloaded_activations: [1].into_iter().collect(),
            optimizer_state: Space::Host,
            window_bytes: 7,
            ..Policy::resident([0, 1].into_iter().collect(), 32)
        };
        assert_eq!(policy, expected);
    }

    /// 0.16 called what is offloaded "away"; today's names say the same.
    #[test]
    fn a_checkpoint_of_version_3_has_the_same_policy() {
        let old = r#"{"version": 3, "step": 4, "micro_tokens": 96, "recompute": [0], "loss_chunk": 32,
            "activations": "host", "activations_away": [1], "weights": "disk", "weights_away": [0, 2],
            "embedding_away": true, "tables_away": true, "optimizer_state": "host", "optimizer_state_away": [2],
            "gradients": "host", "gradients_away": [1, 2]}"#;
        let expected = Policy {
            micro_tokens: 96,
            activations: Space::Host,
            offloaded_activations: [1].into_iter().collect(),
            weights: Space::Disk,
            offloaded_weights: [0, 2].into_iter().collect(),
            embedding_offloaded: true,
            tables_offloaded: true,
            optimizer_state: Space::Host,
            offloaded_moments: [2].into_iter().collect(),
            gradients: Space::Host,
            offloaded_gradients: [1, 2].into_iter().collect(),
            ..Policy::resident([0].into_iter().collect(), 32)
        };
        for text in [old.to_owned(), old.replace("_away", "_offloaded")] {
            let state: State = serde_json::from_str(&text).unwrap();
            assert_eq!(state.policy, expected);
        }
        assert!(!serde_json::to_string(&expected).unwrap().contains("away"));
    }
}

//! Runs a job: plans, trains, saves and reports it, with a callback after each step.
//!
//! [`train`] writes the same run folder as `smidgen train`, and either can resume the other's run. It installs no
//! signal handler, and on the CPU it does not check the memory of the process against the plan: both are up to the
//! program that calls it.

use crate::console::colour::plain;
use crate::failure::Failure;
use crate::logs::metrics::MetricsRow;
use crate::plan::artifact::Artifact;
use crate::plan::job::Job;
use crate::rows::data::Data;
use crate::run_folder::outcome::Ending;
use crate::train::replanning::RunOptions;
use crate::train::run::{claim_folder, run_job};
use smidgen_recipe::render_job;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Options of [`train`]. The default starts a new run, without callbacks.
#[derive(Default)]
pub struct TrainOptions<'a> {
    resume: bool,
    accept_changes: bool,
    on_step: Option<StepCallback<'a>>,
    on_message: Option<MessageCallback<'a>>,
}

type StepCallback<'a> = Box<dyn FnMut(&MetricsRow) -> ControlFlow<()> + 'a>;
type MessageCallback<'a> = Box<dyn Fn(&str) + 'a>;

impl<'a> TrainOptions<'a> {
    /// Continues the run in the recipe's `output.dir` from its last checkpoint, if there is one.
    pub fn resume(self) -> TrainOptions<'a> {
        TrainOptions { resume: true, ..self }
    }

    /// Continues even if data or model changed since the checkpoint. Checkpoints and the report record the changes.
    pub fn accept_changes(self) -> TrainOptions<'a> {
        TrainOptions { accept_changes: true, ..self }
    }

    /// Calls `on_step` after each optimizer step. `ControlFlow::Break(())` stops the run and saves its state in a
    /// checkpoint; a GPU may finish one more step first.
    pub fn on_step(self, on_step: impl FnMut(&MetricsRow) -> ControlFlow<()> + 'a) -> TrainOptions<'a> {
        TrainOptions { on_step: Some(Box::new(on_step)), ..self }
    }

    /// Calls `on_message` with each line that `smidgen train` would print: the plan, warnings, evaluations.
    pub fn on_message(self, on_message: impl Fn(&str) + 'a) -> TrainOptions<'a> {
        TrainOptions { on_message: Some(Box::new(on_message)), ..self }
    }
}

/// The result of [`train`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Run {
    /// The run folder: plan, metrics, checkpoints, report.
    pub folder: PathBuf,
    /// The folder of the trained adapter, or with `adapter.kind = "full"` of the model. Written when the run is done.
    pub product: PathBuf,
    /// Optimizer steps done, including those before a resume.
    pub steps: u64,
    /// Optimizer steps of the whole run.
    pub total_steps: u64,
    /// Loss of the first step of this call; NaN if nothing was left to do.
    pub first_loss: f64,
    /// Loss of the last step of this call.
    pub last_loss: f64,
    /// Peak of the plan that the run used last.
    pub planned_bytes: u64,
    /// Why it ended.
    pub ending: Ending,
}

/// Plans, trains and saves a job, into the `output.dir` of its recipe.
///
/// The adapter is a PEFT folder, which [`Adapter::open`](crate::Adapter::open) and PEFT can read.
///
/// # Errors
/// The run does not fit its budget (nothing is written then); the output folder holds another run; a loss is not
/// finite; a device or a disk fails.
pub fn train(job: Job, options: TrainOptions<'_>) -> Result<Run, Failure> {
    let TrainOptions { resume, accept_changes, on_step, on_message } = options;
    let say = |line: &str| on_message.iter().for_each(|on_message| on_message(&plain(line)));
    let folder = job.recipe.output.dir.resolved.clone();
    let (dir, _lock) = claim_folder(&folder, resume, true)?;
    let total_steps = match &job.data {
        Data::Rows(rows) => rows.batches.total_steps(),
        Data::Assumed { reason } => {
            return Err(Failure::data(format!("there are no rows to train on: {reason}"))
                .hint("prepare the job with `Purpose::Train`"));
        }
    };
    let (product, recipe_text) = (folder.join(Artifact::of(&job.recipe).folder()), render_job(&job.recipe));
    let options = RunOptions {
        recipe_text: &recipe_text,
        resumes: resume,
        accepts_changes: accept_changes,
        quiet: true,
        is_monitored: true,
        owns_process: false,
        say: &say,
        on_step: &mut *on_step.unwrap_or_else(|| Box::new(|_| ControlFlow::Continue(()))),
    };
    let went = run_job(job, &dir, None, options)?;
    let outcome = went.as_ref().map(|went| went.outcome);
    Ok(Run {
        folder,
        product,
        steps: outcome.map_or(total_steps, |outcome| outcome.steps),
        total_steps,
        first_loss: outcome.map_or(f64::NAN, |outcome| outcome.first_loss),
        last_loss: outcome.map_or(f64::NAN, |outcome| outcome.last_loss),
        planned_bytes: went.map_or(0, |went| went.planned_bytes),
        ending: outcome.map_or(Ending::Done, |outcome| outcome.ending),
    })
}

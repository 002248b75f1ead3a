//! Runs a job: plans, trains, saves and reports it, with a callback after each step.
//!
//! [`train`] writes the same run folder as `smidgen train`, and either can resume the other's run. It installs no
//! signal handler, and on the CPU it does not check the memory of the process against the plan: both are up to the
//! program that calls it.

use crate::console::colour::{WARNING, plain};
use crate::failure::Failure;
use crate::plan::job::Job;
use crate::plan::product::Product;
use crate::report::choices::describe_changes;
use crate::report::page_file::{self, write_report};
use crate::report::plan_texts::render_plan_texts;
use crate::rows::data::Data;
use crate::train::begin::{Begin, Ready, prepare_run};
use crate::train::course::Course;
use crate::train::free_memory::Machine;
use crate::train::history;
use crate::train::metrics::MetricsRow;
use crate::train::outcome::{Ending, RunResult};
use crate::train::resume::how_it_ended;
use crate::train::run_dir::RunDir;
use crate::train::run_lock::RunLock;
use smidgen_recipe::{Recipe, render_job};
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
pub fn train(mut job: Job, options: TrainOptions<'_>) -> Result<Run, Failure> {
    let TrainOptions { resume, accept_changes, on_step, on_message } = options;
    let say = |line: &str| on_message.iter().for_each(|on_message| on_message(&plain(line)));
    let folder = job.recipe.output.dir.resolved.clone();
    let dir = RunDir::at(&folder)?;
    let _lock = RunLock::take(&dir)?;
    if !resume {
        dir.refuse_run()?;
    }
    let product = Product::of(&job.recipe);
    if product == Product::Model {
        dir.refuse_foreign_model(job.model.path())?;
    }
    let total_steps = match &job.data {
        Data::Rows(rows) => rows.batches.total_steps(),
        Data::Assumed { reason } => {
            return Err(Failure::data(format!("there are no rows to train on: {reason}"))
                .hint("prepare the job with `Purpose::Train`"));
        }
    };
    let begin = if resume { Begin::Resume { accept_changes } } else { Begin::New };
    let mut run = Run {
        product: folder.join(product.folder()),
        folder,
        steps: total_steps,
        total_steps,
        first_loss: f64::NAN,
        last_loss: f64::NAN,
        planned_bytes: 0,
        ending: Ending::Done,
    };
    let Some(Ready { start, planned, device, made_of }) = prepare_run(&mut job, &dir, begin, &say, None)?
    else {
        tidy_finished(&dir, &job.recipe, &say)?;
        return Ok(run);
    };
    let recipe_text = render_job(&job.recipe);
    let course = Course {
        dir: dir.clone(),
        recipe_text: &recipe_text,
        free_memory: &mut Machine,
        quiet: true,
        is_monitored: true,
        say: &say,
        on_step: &mut *on_step.unwrap_or_else(|| Box::new(|_| ControlFlow::Continue(()))),
        owns_process: false,
        render_plan: &render_plan_texts,
        describe_changes: &describe_changes,
        made_of,
        accept_changes,
        team: None,
    };
    let went = course.run(&mut job, planned, device, start);
    report_run(&dir, &went, &say);
    let RunResult { outcome, planned_bytes, .. } = went?;
    (run.steps, run.first_loss, run.last_loss) = (outcome.steps, outcome.first_loss, outcome.last_loss);
    (run.planned_bytes, run.ending) = (planned_bytes, outcome.ending);
    Ok(run)
}

/// Records how the run ended, writes its report and prints a summary. A failure here is only printed, because the
/// trained weights are already saved.
pub fn report_run(dir: &RunDir, went: &Result<RunResult, Failure>, say: &dyn Fn(&str)) {
    // A run that was refused has nothing to report.
    if !dir.file(history::FILE_NAME).exists() {
        return;
    }
    match history::end_run(dir, went).and_then(|()| write_report(dir.path())) {
        Ok(summary) => {
            if summary.steps > 0 {
                summary.render_memory_line().iter().for_each(|line| say(line));
            }
            say(&format!("report in `{}`", dir.file(page_file::FILE_NAME).display()));
        }
        Err(failure) => say(&format!("{WARNING} there is no report: {}", failure.message)),
    }
}

/// Completes the record and the report of a run that was killed after everything was trained and saved.
pub fn tidy_finished(dir: &RunDir, recipe: &Recipe, say: &dyn Fn(&str)) -> Result<(), Failure> {
    dir.sweep()?;
    dir.forget_aside(Product::of(recipe))?;
    let (ended, last_step) = how_it_ended(dir, recipe);
    let was_killed = history::end_killed(dir, ended, last_step)?;
    if (was_killed || !dir.file(page_file::FILE_NAME).exists())
        && let Err(failure) = write_report(dir.path())
    {
        say(&format!("{WARNING} there is no report: {}", failure.message));
    }
    Ok(())
}

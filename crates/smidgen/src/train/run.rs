//! A run from its claimed folder to its report: what `smidgen train` and the library's `train` both do.
//!
//! The folder is claimed before the data is read, so that two processes never prepare the same run. Everything that can
//! refuse the run comes before anything is written.
//! Left out: reading the recipe and making the job, and the words for how the run ended.

use super::cautions::{Facts, cautions};
use super::free_memory::Machine;
use super::prepare::{
    compare_contents, find_start, is_finished, keep_arithmetic, limit_waiting, open_device, plan_start,
};
use super::replanning::{Ready, Run, RunOptions};
use crate::console::colour::{NOTE, WARNING};
use crate::failure::Failure;
use crate::plan::artifact::Artifact;
use crate::plan::job::Job;
use crate::ranks::join::Joined;
use crate::report::page_file::{self, write_report};
use crate::run_folder::check_start::check_start;
use crate::run_folder::history;
use crate::run_folder::outcome::RunResult;
use crate::run_folder::resume::how_it_ended;
use crate::run_folder::run_dir::RunDir;
use crate::run_folder::run_lock::RunLock;
use crate::session::encoding::encode_job;
use smidgen_recipe::Recipe;
use std::path::Path;

/// The folder of a run, and the right to write it; a rank that `writes` nothing needs no lock.
///
/// # Errors
/// Another process trains there; the folder holds a run, and this one does not resume it.
pub fn claim_folder(
    output: &Path,
    resumes: bool,
    writes: bool,
) -> Result<(RunDir, Option<RunLock>), Failure> {
    let dir = RunDir::at(output)?;
    if !writes {
        return Ok((dir.without_writing(), None));
    }
    let lock = RunLock::take(&dir)?;
    if !resumes {
        dir.refuse_run()?;
    }
    Ok((dir, Some(lock)))
}

/// Plans, trains, saves and reports a job, in a folder that was claimed; `None` if the resumed run is already finished.
pub fn run_job(
    job: Job,
    dir: &RunDir,
    mut joined: Option<&mut Joined>,
    options: RunOptions<'_>,
) -> Result<Option<RunResult>, Failure> {
    let say = options.say;
    if Artifact::of(&job.recipe) == Artifact::Model {
        dir.refuse_foreign_model(job.model.path())?;
    }

    // Where it starts, and from which data and model.
    let mut start = None;
    if options.resumes {
        let team = joined.as_mut().map(|joined| &mut joined.team);
        if is_finished(&job, dir, team, say)? {
            return tidy_finished(dir, &job.recipe, say).map(|()| None);
        }
        start = find_start(&job, dir, say)?;
    }
    let start_step = start.as_ref().map_or(0, |checkpoint| checkpoint.state.step);
    let contents = compare_contents(&job, dir, start.as_ref(), options.accepts_changes, say)?;
    if let Some(joined) = &mut joined {
        let mut facts = vec![("start", format!("step {start_step}"))];
        facts.extend(contents.facts());
        joined.team.link().agree(&facts)?;
    }
    if start.is_none() {
        for caution in cautions(&Facts::of(&job, job.rows())) {
            say(&format!("{WARNING} {caution}"));
        }
    }

    // On which device, and with which plan.
    let job = keep_arithmetic(job, start.as_ref(), say);
    let (mut device, mut facts) = open_device(&job, joined.as_deref_mut(), say)?;
    let team = joined.as_mut().map(|joined| &mut joined.team);
    let planned = plan_start(&job, start.as_ref(), &mut facts, team, say)?;
    if let Some(joined) = &mut joined {
        limit_waiting(joined, &mut device, &planned);
    }
    let device = encode_job(&job, contents.encoder(), device, say)?;
    if let Some(note) = check_start(&planned.solution.plan, &job, start.as_ref())? {
        say(&format!("{NOTE} {note}"));
    }
    let device = device.with_spill_folder(dir.path().to_path_buf());

    let team = joined.map(|joined| &mut joined.team);
    let run = Run { job: &job, dir, free_memory: &mut Machine, team, options };
    let went = run.run(Ready { start, facts, planned, device, contents });
    if dir.is_written() {
        report_run(dir, &went, say);
    }
    went.map(Some)
}

/// Records how the run ended, writes its report and prints a summary. A failure here is only printed, because the
/// trained weights are already saved.
fn report_run(dir: &RunDir, went: &Result<RunResult, Failure>, say: &dyn Fn(&str)) {
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
fn tidy_finished(dir: &RunDir, recipe: &Recipe, say: &dyn Fn(&str)) -> Result<(), Failure> {
    say(&format!("the run in `{}` is finished", dir.path().display()));
    dir.sweep()?;
    dir.forget_aside(Artifact::of(recipe))?;
    let (ended, last_step) = how_it_ended(dir, recipe);
    let was_killed = history::end_killed(dir, ended, last_step)?;
    if (was_killed || !dir.file(page_file::FILE_NAME).exists())
        && let Err(failure) = write_report(dir.path())
    {
        say(&format!("{WARNING} there is no report: {}", failure.message));
    }
    Ok(())
}

//! The beginning of a run: the state it starts from, the arithmetic it computes in, and its plan.
//!
//! A new run starts at step 0 and is planned freely. A resumed run keeps the arithmetic and the plan of its checkpoint
//! if this machine can run them, because only then is the result the same to the bit; otherwise it prints a note.
//! Left out: training itself (`course.rs`).

use super::cautions::{Facts, cautions};
use super::check_start::check_start;
use super::resume::{self, Start};
use super::run_dir::RunDir;
use crate::console::colour::WARNING;
use crate::failure::Failure;
use crate::plan::arithmetic::Arithmetic;
use crate::plan::job::Job;
use crate::plan::planning::{Planned, plan_job, plan_job_as_before};
use crate::rows::data::Data;
use smidgen_runtime::AnyDevice;

/// A run that is ready to start.
#[derive(Debug)]
pub struct Ready {
    pub start: Start,
    pub planned: Planned,
    pub device: AnyDevice,
}

/// Plans a run and opens its device; `None` if the resumed run is already finished.
pub fn prepare_run(
    job: &mut Job,
    dir: &RunDir,
    is_resumed: bool,
    say: &dyn Fn(&str),
) -> Result<Option<Ready>, Failure> {
    let start = if is_resumed {
        for note in resume::check_job(dir, &job.recipe)? {
            say(&format!("{WARNING} {note}"));
        }
        if is_finished(job, dir) {
            return Ok(None);
        }
        find_start(dir, say)?
    } else {
        Start::Beginning
    };
    if let (Data::Rows(rows), Start::Beginning) = (&job.data, &start) {
        for caution in cautions(&Facts::of(job, rows)) {
            say(&format!("{WARNING} {caution}"));
        }
    }
    keep_arithmetic(job, &start, say);
    // Opened before planning, because the plan includes the memory of the driver's context.
    let device = job.place.open_and_measure(job.request.threads, job.arithmetic)?;
    let planned = plan_run(job, &start, say)?;
    if !planned.fits {
        return Err(planned.refusal());
    }
    check_start(&planned.solution.plan, job, &start)?;
    let device = device.with_spill_folder(dir.path().to_path_buf());
    Ok(Some(Ready { start, planned, device }))
}

fn is_finished(job: &Job, dir: &RunDir) -> bool {
    let Data::Rows(rows) = &job.data else { return false };
    resume::is_finished(dir, &job.recipe, rows.batches.total_steps())
}

fn find_start(dir: &RunDir, say: &dyn Fn(&str)) -> Result<Start, Failure> {
    let start = resume::find_start(dir)?;
    match &start {
        Start::Beginning => say("no checkpoint found: starting at step 0"),
        Start::Checkpoint { step, lost_best, .. } => {
            say(&format!("continuing after step {step}"));
            if let Some(best) = lost_best {
                say(&format!(
                    "{WARNING} `checkpoint-{best}`, the best evaluated, is gone: best-checkpoint tracking restarts"
                ));
            }
        }
    }
    Ok(start)
}

/// A resumed run uses the arithmetic of its checkpoint if this machine supports it.
fn keep_arithmetic(job: &mut Job, start: &Start, say: &dyn Fn(&str)) {
    let Start::Checkpoint { compute, .. } = start else { return };
    job.set_arithmetic(Arithmetic::continuing(job.recipe.model.compute, job.request.device, compute));
    let now = job.arithmetic.name();
    if now != *compute {
        say(&format!(
            "the checkpoint was computed in {compute}, this run computes in {now}: results equal within rounding"
        ));
    }
}

/// A resumed run keeps the plan of its checkpoint while it fits; then the result is the same to the bit.
fn plan_run(job: &Job, start: &Start, say: &dyn Fn(&str)) -> Result<Planned, Failure> {
    let Start::Checkpoint { policy, folder, .. } = start else { return plan_job(job) };
    if resume::memory_changed(folder, &job.recipe) {
        say("the memory section changed: replanning; results equal within rounding");
        return plan_job(job);
    }
    match plan_job_as_before(job, policy)? {
        Some(planned) => Ok(planned),
        None => {
            say("the checkpoint's plan no longer fits: replanning; results equal within rounding");
            plan_job(job)
        }
    }
}

//! Prepares a run: the state it starts from, its arithmetic, its device and its plan.
//!
//! A new run starts at step 0 and is planned freely. A resumed run keeps the arithmetic and the plan of its
//! checkpoint if this machine can run them, because only then is the result bit-identical; otherwise it prints a
//! note.
//! Left out: training itself (`course.rs`).

use super::cautions::{Facts, cautions};
use super::check_start::check_start;
use super::made_of::{MadeOf, PROGRAM, accept_or_refuse};
use super::resume::{self, Start};
use super::run_dir::RunDir;
use crate::console::colour::{NOTE, WARNING};
use crate::failure::Failure;
use crate::plan::job::Job;
use crate::plan::planning::{Planned, plan_job, plan_job_as_before};
use crate::ranks::join::Joined;
use crate::ranks::team::Team;
use crate::rows::data::Data;
use crate::session::encoding::encode_job;
use smidgen_formats::digest::Hasher;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{Plan, Policy, ValueId};
use smidgen_runtime::{AnyDevice, Device};
use std::time::Duration;

/// A run that is ready to start.
#[derive(Debug)]
pub struct Ready {
    pub start: Start,
    pub planned: Planned,
    pub device: AnyDevice,
    pub made_of: MadeOf,
}

/// How a run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    New,
    /// From the last checkpoint of its folder, or from step 0 if there is none.
    Resume {
        accept_changes: bool,
    },
}

/// Plans a run and opens its device; `None` if the resumed run is already finished.
pub fn prepare_run(
    job: &mut Job,
    dir: &RunDir,
    begin: Begin,
    say: &dyn Fn(&str),
    mut joined: Option<&mut Joined>,
) -> Result<Option<Ready>, Failure> {
    let (start, accepts) = match begin {
        Begin::New => (Start::Beginning, false),
        Begin::Resume { accept_changes } => {
            for note in resume::check_job(dir, &job.recipe)? {
                say(&format!("{WARNING} {note}"));
            }
            let mut is_finished = match &job.data {
                Data::Rows(rows) => resume::is_finished(dir, &job.recipe, rows.batches.total_steps()),
                Data::Assumed { .. } => false,
            };
            if let Some(joined) = &mut joined {
                is_finished = joined.team.broadcast_first(&is_finished)?;
            }
            if is_finished {
                return Ok(None);
            }
            if let Some(note) = resume::check_checkpoint(dir, &job.recipe)? {
                say(&format!("{NOTE} {note}"));
            }
            (find_start(dir, say)?, accept_changes)
        }
    };
    let made_of = compare_contents(job, dir, &start, accepts, say)?;
    if let Some(joined) = &mut joined {
        let mut facts = vec![("start", format!("step {}", start.updates_done()))];
        facts.extend(made_of.facts());
        joined.team.link().agree(&facts)?;
    }
    if let (Data::Rows(rows), Start::Beginning) = (&job.data, &start) {
        for caution in cautions(&Facts::of(job, rows)) {
            say(&format!("{WARNING} {caution}"));
        }
    }
    keep_arithmetic(job, &start, say);
    // Opened before planning, because the plan includes the memory of the driver's context.
    let mut device = job.place.open_and_measure(job.request.threads, job.arithmetic)?;
    if let Some(failure) = device.cache_failure() {
        say(&format!("{WARNING} {failure}"));
    }
    let planned = match &mut joined {
        None => plan_run(job, &start, say)?,
        Some(joined) => {
            let free = |device: &mut AnyDevice| device.memory().map(|memory| memory.free_bytes);
            let before = free(&mut device);
            device = joined.connect(device)?;
            let taken = before.zip(free(&mut device)).map(|(before, after)| before.saturating_sub(after));
            job.place.add_to_context(taken.unwrap_or(0));
            let planned = plan_together(job, &start, say, &mut joined.team)?;
            let limit = exchange_limit(&planned);
            device.limit_exchanges(limit + GRACE);
            if let Some(progress) = device.exchange_progress() {
                joined.team.link().watch(progress, limit);
            }
            planned
        }
    };
    if !planned.fits {
        return Err(planned.refusal());
    }
    device = encode_job(job, made_of.encoder(), device, say)?;
    if let Some(note) = check_start(&planned.solution.plan, job, &start)? {
        say(&format!("{NOTE} {note}"));
    }
    let device = device.with_spill_folder(dir.path().to_path_buf());
    Ok(Some(Ready { start, planned, device, made_of }))
}

/// One plan for all ranks: rank 0 makes it, for the smallest budget of all ranks.
fn plan_together(
    job: &mut Job,
    start: &Start,
    say: &dyn Fn(&str),
    team: &mut Team,
) -> Result<Planned, Failure> {
    let (smallest, rank) = team.smallest(job.budget.bytes)?;
    if smallest < job.budget.bytes {
        let [own, least] = [job.budget.bytes, smallest].map(format_bytes);
        say(&format!("{NOTE} planned for the budget of rank {rank}, {least}; this rank has {own}"));
    }
    job.budget.bytes = smallest;
    let is_first = job.world.is_first();
    let own = is_first.then(|| plan_run(job, start, say)).transpose()?;
    // If the plan does not fit, every rank refuses, and rank 0 says why.
    let policy = own.as_ref().filter(|planned| planned.fits).map(|planned| planned.solution.policy.clone());
    let policy: Option<Policy> = team.broadcast_first(&policy)?;
    let planned = match (own, policy) {
        (Some(planned), None) => return Ok(planned),
        (Some(planned), Some(_)) => planned,
        (None, Some(policy)) => plan_job_as_before(job, &policy)?
            .ok_or_else(|| Failure::memory("the plan of rank 0 does not fit this rank"))?,
        (None, None) => return Err(Failure::memory("no plan fits: see rank 0")),
    };
    // Ranks whose plans exchange different tensors would wait for each other forever.
    team.link().agree(&[("exchanges of the plan", exchanges(&planned.solution.plan))])?;
    Ok(planned)
}

/// Added to the device's limit, so that the heartbeat fails first: it knows which rank is late.
const GRACE: Duration = Duration::from_secs(20);

/// How long a rank waits for the others: many steps, and at least as long as rank 0 may take to save.
fn exchange_limit(planned: &Planned) -> Duration {
    const STEPS: f64 = 50.0;
    const LEAST: Duration = Duration::from_secs(600);
    LEAST.max(Duration::from_secs_f64(STEPS * planned.solution.step_ms.clamp(0.0, 1e9) / 1e3))
}

/// The number of a plan's exchanges between ranks, and a hash of them in order.
fn exchanges(plan: &Plan) -> String {
    let mut hasher = Hasher::sha256();
    let mut count = 0;
    for (entry, step) in
        plan.entries.iter().flat_map(|entry| entry.steps.iter().map(|step| (entry.entry, step)))
    {
        if step.op.is_collective() {
            // Each rank has its own rows of a divided tensor, so the whole tensor is named.
            let whole = |id: &ValueId| plan.value(plan.value(*id).role.whole(*id)).name.as_str();
            let operands = step.inputs.iter().chain(&step.updates).map(whole);
            hasher.update(
                format!("{entry} {} {}", step.op.name(), operands.collect::<Vec<_>>().join(" ")).as_bytes(),
            );
            count += 1;
        }
    }
    format!("{count}, {}", hasher.finish_hex())
}

/// Reads what the run is made of. A checkpoint of other data or another model is refused, unless that is accepted.
fn compare_contents(
    job: &Job,
    dir: &RunDir,
    start: &Start,
    accepts: bool,
    say: &dyn Fn(&str),
) -> Result<MadeOf, Failure> {
    let mut made_of = MadeOf::read(job)?;
    let Start::Checkpoint { step, made_of: before, .. } = start else { return Ok(made_of) };
    let Some(before) = before else {
        say(&format!(
            "{WARNING} smidgen 0.10 or earlier wrote the checkpoint: cannot check whether data and model are the same"
        ));
        return Ok(made_of);
    };
    if before.program != PROGRAM {
        let program = &before.program;
        say(&format!(
            "{WARNING} smidgen {program} wrote the checkpoint, this is {PROGRAM}: results may differ by rounding"
        ));
    }
    made_of.continue_from(before);
    let changes = accept_or_refuse(made_of.changes_since(before, Some(&job.model)), dir.path(), accepts)?;
    made_of.accept(*step, changes, say);
    Ok(made_of)
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
    job.set_arithmetic(job.place.continuing_arithmetic(job.recipe.model.compute, compute));
    let now = job.arithmetic.name();
    if now != *compute {
        say(&format!(
            "the checkpoint was computed in {compute}, this run computes in {now}: results equal within rounding"
        ));
    }
}

/// A resumed run keeps the plan of its checkpoint if it fits, so that the result is bit-identical.
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

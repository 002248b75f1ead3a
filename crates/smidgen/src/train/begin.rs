//! The beginning of a run: the state it starts from, the arithmetic it computes in, and its plan.
//!
//! A new run starts at step 0 and is planned freely. A resumed run keeps the arithmetic and the plan of its checkpoint
//! if this machine can run them, because only then is the result the same to the bit; otherwise it prints a note.
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
    /// From the last checkpoint of its folder, or from step 0 where there is none.
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
            if of_first(&mut joined, is_finished(job, dir))? {
                return Ok(None);
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

/// What rank 0 says, where there are several.
fn of_first(joined: &mut Option<&mut Joined>, own: bool) -> Result<bool, Failure> {
    joined.as_mut().map_or(Ok(own), |joined| joined.team.of_first(&own))
}

/// One plan for all ranks: made by the first of them, for the smallest budget of any.
fn plan_together(
    job: &mut Job,
    start: &Start,
    say: &dyn Fn(&str),
    team: &mut Team,
) -> Result<Planned, Failure> {
    let (smallest, rank) = team.smallest(job.budget.bytes)?;
    if smallest < job.budget.bytes {
        let [own, least] = [job.budget.bytes, smallest].map(format_bytes);
        say(&format!("{NOTE} planned for rank {rank}, which has {least}; this one has {own}"));
    }
    job.budget.bytes = smallest;
    let is_first = job.world.is_first();
    let own = is_first.then(|| plan_run(job, start, say)).transpose()?;
    // A plan that does not fit is refused by everyone, by the words of the first.
    let policy = own.as_ref().filter(|planned| planned.fits).map(|planned| planned.solution.policy.clone());
    let policy: Option<Policy> = team.of_first(&policy)?;
    let planned = match (own, policy) {
        (Some(planned), None) => return Ok(planned),
        (Some(planned), Some(_)) => planned,
        (None, Some(policy)) => plan_job_as_before(job, &policy)?
            .ok_or_else(|| Failure::memory("the plan of rank 0 does not fit this rank"))?,
        (None, None) => return Err(Failure::memory("no plan fits: see rank 0")),
    };
    // Ranks that exchange different things would wait for each other for ever.
    team.link().agree(&[("exchanges of the plan", exchanges(&planned.solution.plan))])?;
    Ok(planned)
}

/// The heartbeat, which knows who is late, comes first.
const GRACE: Duration = Duration::from_secs(20);

/// How long a rank waits for the others: many steps, and in any case as long as the first rank may take to save.
fn exchange_limit(planned: &Planned) -> Duration {
    const STEPS: f64 = 50.0;
    const LEAST: Duration = Duration::from_secs(600);
    LEAST.max(Duration::from_secs_f64(STEPS * planned.solution.step_ms.clamp(0.0, 1e9) / 1e3))
}

/// Which exchanges a plan makes, in order.
fn exchanges(plan: &Plan) -> String {
    let mut hasher = Hasher::sha256();
    let mut count = 0;
    for (entry, step) in
        plan.entries.iter().flat_map(|entry| entry.steps.iter().map(|step| (entry.entry, step)))
    {
        if step.op.is_collective() {
            // Rows of a tensor are other ones on each rank.
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

/// What the run is made of now. A checkpoint that was made of something else is refused, unless that is accepted.
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
            "{WARNING} the checkpoint is of smidgen 0.10 or earlier: whether data and model are the same cannot be compared"
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
    job.set_arithmetic(job.place.continuing_arithmetic(job.recipe.model.compute, compute));
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

//! Prepares a run: the state it starts from, its arithmetic, its device and its plan.
//!
//! A new run starts at step 0 and is planned freely. A resumed run keeps the arithmetic and the plan of its
//! checkpoint if this machine can run them, because only then is the result bit-identical; otherwise it prints a
//! note. Several ranks agree on one plan, for the smallest budget of all.
//! Left out: training itself (`replanning.rs`).

use crate::console::colour::{NOTE, WARNING};
use crate::failure::Failure;
use crate::plan::facts::{Before, MemoryFacts};
use crate::plan::job::Job;
use crate::plan::planning::{Planned, plan};
use crate::ranks::join::Joined;
use crate::ranks::team::Team;
use crate::run_folder::contents::{Contents, PROGRAM, accept_or_refuse};
use crate::run_folder::resume::{self, Checkpoint};
use crate::run_folder::run_dir::RunDir;
use smidgen_formats::digest::Hasher;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{Plan, Policy, ValueId};
use smidgen_runtime::{AnyDevice, Device};
use std::time::Duration;

/// Whether the run that is resumed has nothing left to do. A run with another recipe is refused.
pub fn is_finished(
    job: &Job,
    dir: &RunDir,
    team: Option<&mut Team>,
    say: &dyn Fn(&str),
) -> Result<bool, Failure> {
    for note in resume::check_job(dir, &job.recipe)? {
        say(&format!("{WARNING} {note}"));
    }
    let is_finished = resume::is_finished(dir, &job.recipe, job.rows().batches.total_steps());
    team.map_or(Ok(is_finished), |team| team.broadcast_first(&is_finished))
}

/// The checkpoint that a resumed run continues from; `None` is step 0.
pub fn find_start(job: &Job, dir: &RunDir, say: &dyn Fn(&str)) -> Result<Option<Checkpoint>, Failure> {
    if let Some(note) = resume::check_checkpoint(dir, &job.recipe)? {
        say(&format!("{NOTE} {note}"));
    }
    let start = resume::find_checkpoint(dir)?;
    match &start {
        None => say("no checkpoint found: starting at step 0"),
        Some(checkpoint) => {
            say(&format!("continuing after step {}", checkpoint.state.step));
            if let Some(best) = checkpoint.lost_best {
                say(&format!(
                    "{WARNING} `checkpoint-{best}`, the best evaluated, is gone: best-checkpoint tracking restarts"
                ));
            }
        }
    }
    Ok(start)
}

/// Reads what the run is made of. A checkpoint of other data or another model is refused, unless that is accepted.
pub fn compare_contents(
    job: &Job,
    dir: &RunDir,
    start: Option<&Checkpoint>,
    accepts: bool,
    say: &dyn Fn(&str),
) -> Result<Contents, Failure> {
    let mut contents = Contents::read(job)?;
    let Some(state) = start.map(|checkpoint| &checkpoint.state) else { return Ok(contents) };
    let Some(before) = &state.contents else {
        say(&format!(
            "{WARNING} smidgen 0.10 or earlier wrote the checkpoint: cannot check whether data and model are the same"
        ));
        return Ok(contents);
    };
    if before.program != PROGRAM {
        let program = &before.program;
        say(&format!(
            "{WARNING} smidgen {program} wrote the checkpoint, this is {PROGRAM}: results may differ by rounding"
        ));
    }
    contents.continue_from(before);
    let changes = accept_or_refuse(contents.changes_since(before, Some(&job.model)), dir.path(), accepts)?;
    contents.accept(state.step, changes, say);
    Ok(contents)
}

/// A resumed run uses the arithmetic of its checkpoint if this machine supports it.
pub fn keep_arithmetic(job: Job, start: Option<&Checkpoint>, say: &dyn Fn(&str)) -> Job {
    let Some(compute) = start.map(|checkpoint| &checkpoint.state.compute) else { return job };
    let arithmetic = job.place.continuing_arithmetic(job.recipe.model.compute, compute);
    let now = arithmetic.name();
    if now != *compute {
        say(&format!(
            "the checkpoint was computed in {compute}, this run computes in {now}: results equal within rounding"
        ));
    }
    job.with_arithmetic(arithmetic)
}

/// Opens the device, connects it to those of other ranks, and measures the memory that both take. Planning comes after,
/// because the plan includes that memory.
pub fn open_device(
    job: &Job,
    joined: Option<&mut Joined>,
    say: &dyn Fn(&str),
) -> Result<(AnyDevice, MemoryFacts), Failure> {
    let mut facts = MemoryFacts::of(job);
    let mut device = facts.place.open_and_measure(job.request.threads, job.arithmetic)?;
    if let Some(failure) = device.cache_failure() {
        say(&format!("{WARNING} {failure}"));
    }
    if let Some(joined) = joined {
        let free = |device: &mut AnyDevice| device.memory().map(|memory| memory.free_bytes);
        let before = free(&mut device);
        device = joined.connect(device)?;
        let taken = before.zip(free(&mut device)).map(|(before, after)| before.saturating_sub(after));
        facts.place.add_to_context(taken.unwrap_or(0));
    }
    Ok((device, facts))
}

/// The plan that the run begins with: one for all ranks.
pub fn plan_start(
    job: &Job,
    start: Option<&Checkpoint>,
    facts: &mut MemoryFacts,
    team: Option<&mut Team>,
    say: &dyn Fn(&str),
) -> Result<Planned, Failure> {
    let Some(team) = team else { return plan_from(job, start, facts, say)?.or_refuse() };
    let own = facts.budget.bytes;
    let (smallest, rank) = team.smallest(own)?;
    if smallest < own {
        let [own, least] = [own, smallest].map(format_bytes);
        say(&format!("{NOTE} planned for the budget of rank {rank}, {least}; this rank has {own}"));
    }
    facts.budget.bytes = smallest;
    let own = job.world.is_first().then(|| plan_from(job, start, facts, say)).transpose()?;
    // If the plan does not fit, every rank refuses, and rank 0 says why.
    let policy = own.as_ref().filter(|planned| planned.fits).map(|planned| planned.solution.policy.clone());
    let policy: Option<Policy> = team.broadcast_first(&policy)?;
    let planned = match (own, policy) {
        (Some(planned), None) => return Err(planned.refusal()),
        (Some(planned), Some(_)) => planned,
        (None, Some(policy)) => {
            facts.before = Before::FirstRank(policy);
            plan(job, facts)?
        }
        (None, None) => return Err(Failure::memory("no plan fits: see rank 0")),
    };
    // Ranks whose plans exchange different tensors would wait for each other forever.
    team.link().agree(&[("exchanges of the plan", exchanges(&planned.solution.plan))])?;
    Ok(planned)
}

/// Plans from the checkpoint. Changes of the memory section are a wish for another plan.
fn plan_from(
    job: &Job,
    start: Option<&Checkpoint>,
    facts: &mut MemoryFacts,
    say: &dyn Fn(&str),
) -> Result<Planned, Failure> {
    if let Some(checkpoint) = start {
        if resume::memory_changed(&checkpoint.folder, &job.recipe) {
            say("the memory section changed: replanning; results equal within rounding");
        } else {
            facts.before = Before::Checkpoint(checkpoint.state.policy.clone());
        }
    }
    let planned = plan(job, facts)?;
    if matches!(facts.before, Before::Checkpoint(_)) && !planned.keeps_before {
        say("the checkpoint's plan no longer fits: replanning; results equal within rounding");
    }
    Ok(planned)
}

/// Limits how long this rank waits for the others.
pub fn limit_waiting(joined: &mut Joined, device: &mut AnyDevice, planned: &Planned) {
    let limit = exchange_limit(planned);
    device.limit_exchanges(limit + GRACE);
    if let Some(progress) = device.exchange_progress() {
        joined.team.link().watch(progress, limit);
    }
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

//! The course of a run: reserve, load, train, save; repeated with another plan when free memory changes.
//!
//! Free memory is read again just before it is reserved, because other processes may have taken some since planning.
//! A plan that no longer fits, or whose reservation fails, is replaced by a smaller one; the run is refused only if
//! none fits. With `memory.adapt` a run also checks free memory at each checkpoint, and continues from it with a
//! better plan.
//! Every change is printed, and no training is lost: a run that changes its plan resumes from its own checkpoint.

use super::adapt::{Watch, lacks, may_grow, plan_larger, plan_smaller};
use super::free_memory::FreeMemory;
use super::history;
use super::interrupt::Interrupt;
use super::journal::Journal;
use super::made_of::{MadeOf, accept_or_refuse};
use super::monitor::{self, Measurement};
use super::outcome::{Ending, RunResult};
use super::phases::{Phase, PhaseMeter, folder_bytes};
use super::resume::{self, Start};
use super::run_dir::RunDir;
use super::thinning::describe_thinning;
use super::trainer::{OnStep, Trainer};
use crate::console::colour::{WARNING, plain};
use crate::console::progress::Progress;
use crate::failure::Failure;
use crate::machine::host;
use crate::plan::demand::describe_packing;
use crate::plan::disk::{Footprint, check_room, with_room};
use crate::plan::job::Job;
use crate::plan::life::LifePhase;
use crate::plan::planning::Planned;
use crate::plan::product::Product;
use crate::ranks::shared_memory::share_host;
use crate::ranks::team::Team;
use crate::rows::data::{Data, Rows};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::text::render_plan;
use smidgen_ir::{DeviceKind, Policy};
use smidgen_recipe::{Budget, render_job};
use smidgen_runtime::device::Reservation;
use smidgen_runtime::{Device, DeviceError, Executor};

/// How many plans are tried before the run fails.
const MOST_ATTEMPTS: usize = 12;

/// Everything a run needs besides its job and its plan.
pub struct Course<'a> {
    pub dir: RunDir,
    /// The text of the recipe file.
    pub recipe_text: &'a str,
    pub free_memory: &'a mut dyn FreeMemory,
    pub quiet: bool,
    /// Whether memory is measured after every step.
    pub is_monitored: bool,
    pub say: &'a dyn Fn(&str),
    pub on_step: OnStep<'a>,
    /// Whether the process does nothing but this run. Then the run handles signals, and on the CPU it checks the
    /// memory of the process against the plan. A program that calls the library does both itself.
    pub owns_process: bool,
    /// Renders `plan.txt` and `plan.json`.
    pub render_plan: &'a dyn Fn(&Job, &Planned) -> PlanTexts,
    /// Describes the differences between two policies of a model with this many layers.
    pub describe_changes: &'a dyn Fn(&Policy, &Policy, usize) -> String,
    /// Hashes of the data and the model; those of the weights are compared when they are loaded.
    pub made_of: MadeOf,
    /// Whether to continue even if the weights changed.
    pub accept_changes: bool,
    /// The other ranks, if there are any.
    pub team: Option<&'a mut Team>,
}

/// A plan as a table and as JSON.
#[derive(Clone, Debug)]
pub struct PlanTexts {
    pub table: String,
    pub json: String,
}

/// The part of a plan that is still needed once its steps are on the device.
#[derive(Clone, Debug)]
struct Chosen {
    policy: Policy,
    peak_bytes: u64,
    context_bytes: u64,
    disk_bytes: u64,
    life: Vec<LifePhase>,
}

impl Chosen {
    fn of(planned: &Planned) -> Chosen {
        let solution = &planned.solution;
        Chosen {
            policy: solution.policy.clone(),
            peak_bytes: solution.peak_bytes,
            context_bytes: solution.context_bytes,
            disk_bytes: solution.plan.disk.bytes() as u64,
            life: planned.life.clone(),
        }
    }
}

impl Course<'_> {
    /// Runs a job from `start` to its end.
    pub fn run<D: Device>(
        mut self,
        job: &mut Job,
        mut planned: Planned,
        mut device: D,
        mut start: Start,
    ) -> Result<RunResult, Failure> {
        let mut meter = PhaseMeter::begin();
        let (mut journal, mut interrupt, mut progress) = (None, None, None);
        let (mut first_loss, mut plans) = (f64::NAN, 1);
        let total_steps = rows_of(job).batches.total_steps();
        loop {
            if job.world.is_alone() {
                planned = self.settle(job, planned, &mut device)?;
            }
            if plans == 1 {
                (self.say)((self.render_plan)(job, &planned).table.trim_end());
                let (policy, ranks) = (&planned.solution.policy, job.request.rank.of);
                (self.say)(&format!("  packing: {}", describe_packing(rows_of(job), policy, ranks)?));
                if let Some(thinned) = describe_thinning(total_steps) {
                    (self.say)(&format!("  {thinned}"));
                }
            }
            check_room(
                self.dir.path(),
                self.dir.checkpoints().len() as u64,
                &Footprint::of(&planned.solution.plan, job, total_steps),
            )?;
            // Several ranks keep the plan that they share.
            let adapts = job.recipe.memory.adapt && job.world.is_alone();
            let grows = adapts && may_grow(job, &planned)?;
            // A run is refused above if it cannot succeed. From here on the folder is written.
            let is_new = self.dir.is_empty();
            self.dir.make()?;
            if plans == 1 {
                self.dir.sweep()?;
            }
            let phase = if start.is_checkpoint() { Phase::Resume } else { Phase::Load };
            let measured = monitor::measure(&mut device);
            meter.enter(phase, &measured);
            if plans == 1
                && self.owns_process
                && let Some(bytes) = above_plan(&measured, planned.solution.peak_bytes)
            {
                (self.say)(&format!(
                    "{WARNING} preparing the data took {}, more than the planned {}: tokenizing long rows takes up to 250 bytes per byte of text",
                    format_bytes(bytes),
                    format_bytes(planned.solution.peak_bytes)
                ));
            }
            if let Start::Checkpoint { folder, .. } = &start
                && let Some(obstacle) = resume::use_stored_algorithms(&mut device, folder)
            {
                (self.say)(&format!("{WARNING} {obstacle}: results stay equal within rounding"));
            }
            // A run that cannot start leaves no files behind.
            let dir = self.dir.clone();
            let remove_files = |_: &Failure| {
                if is_new {
                    dir.clear()
                }
            };
            let shares = self.share_host(job, &planned, &mut device).inspect_err(remove_files)?;
            let (executor, chosen) = self.reserve(job, planned, device).inspect_err(remove_files)?;
            let first = start.updates_done();
            // Moved, not copied: the order of a large data set is large, and the plan counts it once.
            let mut batches = std::mem::take(&mut rows_of(job).batches);
            let policy = chosen.policy.clone();
            // No rank reads shared weights before all are loaded.
            let are_loaded = || match self.team.as_deref_mut().filter(|_| shares) {
                Some(team) => team.link().barrier(),
                None => Ok(()),
            };
            let mut trainer = Trainer::fill(job, executor, self.dir.clone(), policy, &start, are_loaded)
                .inspect_err(remove_files)?;
            // Checked before any file of the run changes.
            self.compare_weights(&mut trainer, job, first)?;
            if plans == 1 {
                self.dir.set_aside(Product::of(&job.recipe))?;
            }
            let journal = match &mut journal {
                Some(journal) => journal,
                none => none.insert(match self.dir.is_written() {
                    true => Journal::resume(self.dir.path(), first)?.with_totals(start.totals()),
                    false => Journal::unwritten(),
                }),
            };
            let accepted = self.made_of.accepted_after(first);
            history::begin_part(&self.dir, total_steps, first, chosen.peak_bytes, accepted)?;
            if self.owns_process || job.request.device == DeviceKind::Cuda {
                trainer = trainer.with_planned_peak(chosen.peak_bytes);
            }
            trainer.meter = Some(&mut meter);
            trainer.is_monitored = self.is_monitored;
            trainer.team = self.team.as_deref_mut();
            if adapts {
                trainer.watch = Some(Watch {
                    free_memory: &mut *self.free_memory,
                    job,
                    peak_bytes: chosen.peak_bytes,
                    budget_bytes: job.budget.bytes,
                    may_grow: grows,
                });
            }
            let (log_every, quiet) = (job.recipe.train.log_every, self.quiet);
            let bar = progress.get_or_insert_with(|| Progress::new(total_steps, first, log_every, quiet));
            bar.plan_memory(chosen.peak_bytes);
            let interrupt = interrupt.get_or_insert_with(|| match self.owns_process {
                true => Interrupt::listen(),
                false => Interrupt::never(),
            });
            let result = trainer.run_watched(&mut batches, first, journal, bar, interrupt, self.on_step);
            // The memory measured from here on does not belong to the trainer's last phase.
            meter.enter(Phase::Prepare, &Measurement::default());
            self.write_phases(&meter, &chosen);
            let (mut outcome, returned) = result.inspect_err(|_| bar.finish())?;
            if first_loss.is_nan() {
                first_loss = outcome.first_loss;
            }
            outcome.first_loss = first_loss;
            let (Ending::MemoryMoved { reachable_bytes }, Some(returned)) = (outcome.ending, returned) else {
                bar.finish();
                return Ok(RunResult { outcome, total_steps, planned_bytes: chosen.peak_bytes, plans });
            };
            history::end_plan(&self.dir, outcome.steps)?;
            device = returned;
            // Freed before the next plan is made: the memory of planning is not counted in this plan.
            device.reserve(&Reservation::default())?;
            rows_of(job).batches = batches;
            start = resume::find_start(&self.dir)?;
            planned = self.replan(job, &chosen, outcome.steps, reachable_bytes, bar)?;
            plans += 1;
        }
    }

    /// Makes the ranks of a machine share the frozen weights that they offload to host memory. Returns whether they
    /// do.
    fn share_host<D: Device>(
        &mut self,
        job: &Job,
        planned: &Planned,
        device: &mut D,
    ) -> Result<bool, Failure> {
        let bytes = planned.solution.plan.host.shared_bytes;
        match self.team.as_deref_mut() {
            Some(team) if bytes > 0 && job.world.local.of > 1 => {
                device.share_host(share_host(team, bytes)?);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Refuses weights that differ from those of the checkpoint, unless changes are accepted.
    fn compare_weights<D: Device>(
        &mut self,
        trainer: &mut Trainer<'_, D>,
        job: &Job,
        first: u64,
    ) -> Result<(), Failure> {
        let hashes = std::mem::take(&mut trainer.weight_hashes);
        let change = self.made_of.see_weights(hashes, &job.model);
        let changes = accept_or_refuse(change.into_iter().collect(), self.dir.path(), self.accept_changes)?;
        self.made_of.accept(first, changes, self.say);
        trainer.made_of = self.made_of.clone();
        Ok(())
    }

    /// Returns the plan, or a smaller one if other programs took memory since it was made.
    fn settle<D: Device>(
        &mut self,
        job: &mut Job,
        mut planned: Planned,
        device: &mut D,
    ) -> Result<Planned, Failure> {
        let noise = self.free_memory.noise_bytes();
        for _ in 0..MOST_ATTEMPTS {
            let chosen = Chosen::of(&planned);
            let reachable = self.free_memory.reachable_bytes(device.memory(), chosen.context_bytes);
            let Some(reachable) = reachable.filter(|reachable| lacks(chosen.peak_bytes, *reachable, noise))
            else {
                break;
            };
            (self.say)(&format!(
                "free memory shrank since the plan was made: it needs {}, and {} is available",
                format_bytes(chosen.peak_bytes),
                format_bytes(reachable)
            ));
            job.budget = job.budget_for(reachable);
            planned = self.shrink(job, &chosen)?;
        }
        Ok(planned)
    }

    /// Reserves the memory of the plan, or of a smaller one if that fails.
    fn reserve<D: Device>(
        &mut self,
        job: &mut Job,
        mut planned: Planned,
        mut device: D,
    ) -> Result<(Executor<D>, Chosen), Failure> {
        let mut attempts = 0;
        loop {
            self.write_run_files(job, &planned)?;
            let chosen = Chosen::of(&planned);
            // Moved, not copied: a plan takes memory too, which is counted once.
            let (error, returned) = match Executor::try_load(planned.solution.plan, device) {
                Ok(executor) => {
                    if let Some(products) = executor.device().chosen_algorithms() {
                        self.dir.write_text(resume::PRODUCTS_FILE, &products)?;
                    }
                    return Ok((executor, chosen));
                }
                Err(failed) => failed,
            };
            attempts += 1;
            let is_refused = matches!(error, DeviceError::Reserve { .. });
            if !is_refused || attempts == MOST_ATTEMPTS {
                return Err(self.with_numbers(job, &chosen, error));
            }
            device = returned;
            (self.say)(&format!("{error}, for a plan of {}", format_bytes(chosen.peak_bytes)));
            // The reported free memory was not enough.
            let below = chosen.peak_bytes - chosen.peak_bytes / 8;
            let reachable = self.free_memory.reachable_bytes(device.memory(), chosen.context_bytes);
            job.budget = job.budget_for(reachable.unwrap_or(below));
            job.budget.bytes = job.budget.bytes.min(below);
            planned = self.shrink(job, &chosen)?;
        }
    }

    /// Describes what changes with another plan.
    fn describe_change(&self, job: &Job, before: &Chosen, planned: &Planned) -> String {
        let now = &planned.solution;
        let changes = (self.describe_changes)(&before.policy, &now.policy, job.request.layers());
        let [new, old] = [now.peak_bytes, before.peak_bytes].map(format_bytes);
        format!("now {changes}, {new} instead of {old}")
    }

    fn shrink(&self, job: &Job, before: &Chosen) -> Result<Planned, Failure> {
        let planned = plan_smaller(job, &before.policy)?;
        let change = self.describe_change(job, before, &planned);
        (self.say)(&format!("{change}; results equal within rounding"));
        Ok(planned)
    }

    /// Plans for the memory available now; the result may be the same plan.
    fn replan(
        &self,
        job: &mut Job,
        before: &Chosen,
        step: u64,
        reachable_bytes: u64,
        progress: &Progress,
    ) -> Result<Planned, Failure> {
        job.budget = job.budget_for(reachable_bytes);
        let planned = match lacks(before.peak_bytes, reachable_bytes, self.free_memory.noise_bytes()) {
            true => plan_smaller(job, &before.policy)?,
            false => plan_larger(job, &before.policy)?,
        };
        if Chosen::of(&planned).policy == before.policy {
            return Ok(planned);
        }
        progress.say(&format!(
            "after step {step}: {} of memory is available: {}; results equal within rounding",
            format_bytes(reachable_bytes),
            self.describe_change(job, before, &planned)
        ));
        let (current, kept) = (self.dir.file("plan.json"), self.dir.file(&format!("plan-until-{step}.json")));
        std::fs::copy(&current, kept).map_err(|error| Failure::file("copy", &current, error))?;
        Ok(planned)
    }

    /// Adds the available memory or disk space to a failure of the device.
    fn with_numbers(&self, job: &Job, chosen: &Chosen, error: DeviceError) -> Failure {
        match error {
            DeviceError::File { .. } => {
                with_room(Failure::from(error), self.dir.path(), "the offload file", chosen.disk_bytes)
            }
            DeviceError::Pinned { bytes, .. } => {
                let free = host::free_memory_bytes().map_or("unknown".into(), format_bytes);
                let budget = match job.recipe.memory.host_budget {
                    Budget::Auto => "auto".to_owned(),
                    Budget::Bytes(bytes) => format_bytes(bytes),
                };
                let (pinned, less) = (format_bytes(bytes as u64), format_bytes(bytes as u64 / 2));
                Failure::from(error)
                    .detail(format!("the plan pins {pinned} of host memory; {free} is free, `memory.host_budget` is {budget}"))
                    .hint(format!(
                    "`memory.host_budget` below {less} plans with less; `ulimit -l` limits what a process may pin"
                ))
            }
            _ => Failure::from(error),
        }
    }

    fn write_run_files(&self, job: &Job, planned: &Planned) -> Result<(), Failure> {
        let PlanTexts { table, json } = (self.render_plan)(job, planned);
        let table = plain(&table);
        let dir = &self.dir;
        history::note_recipe(dir, self.recipe_text)?;
        dir.write_text("recipe.toml", self.recipe_text)?;
        dir.write_text("plan.json", &json)?;
        dir.write_text("plan.txt", &format!("{table}\n{}", render_plan(&planned.solution.plan)))?;
        dir.write_text("job.toml", &render_job(&job.recipe))
    }

    /// A failure here is only a warning: the training matters more than its measurements.
    fn write_phases(&self, meter: &PhaseMeter, chosen: &Chosen) {
        let disk_bytes = folder_bytes(self.dir.path()) + chosen.disk_bytes;
        let phases = meter.render_json(&chosen.life, disk_bytes);
        if let Err(failure) = self.dir.write_text("phases.json", &format!("{phases:#}\n")) {
            (self.say)(&format!("{WARNING} {}", failure.message));
        }
    }
}

/// The peak memory of the process so far, if the device is the CPU and it is above the plan's.
fn above_plan(measured: &Measurement, planned_bytes: u64) -> Option<u64> {
    let is_cpu = measured.own_device_bytes().is_none();
    measured.rss_peak_bytes.filter(|bytes| is_cpu && *bytes > planned_bytes)
}

fn rows_of(job: &mut Job) -> &mut Rows {
    match &mut job.data {
        Data::Rows(rows) => rows,
        Data::Assumed { .. } => unreachable!("training without data is refused before"),
    }
}

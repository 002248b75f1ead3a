//! A run with one plan after another: reserve, load, train, save, and again when free memory changes.
//!
//! Free memory is read again just before it is reserved, because other processes may have taken some since planning.
//! A plan that no longer fits, or whose reservation fails, is replaced by a smaller one; the run is refused only if
//! none fits. With `memory.adapt` a run also checks free memory at each checkpoint, and continues from it with a
//! better plan.
//! Every change is printed, and no training is lost: a run that changes its plan resumes from its own checkpoint.

use super::free_memory::FreeMemory;
use super::interrupt::Interrupt;
use super::memory_watch::{FreeWatch, lacks, may_grow};
use super::trainer::{OnStep, Trainer};
use crate::console::colour::{WARNING, plain};
use crate::console::progress::Progress;
use crate::failure::Failure;
use crate::logs::journal::Journal;
use crate::logs::monitor::{self, Measurement};
use crate::logs::phases::{Phase, PhaseMeter, folder_bytes};
use crate::logs::thinning::describe_thinning;
use crate::machine::host;
use crate::plan::artifact::Artifact;
use crate::plan::demand::describe_packing;
use crate::plan::disk::{Footprint, check_room, with_room};
use crate::plan::facts::MemoryFacts;
use crate::plan::job::Job;
use crate::plan::phases::PhaseMemory;
use crate::plan::planning::{Planned, plan};
use crate::ranks::shared_memory::share_host;
use crate::ranks::team::Team;
use crate::report::choices::describe_changes;
use crate::report::plan_texts::{PlanTexts, render_plan_texts};
use crate::run_folder::contents::{Contents, accept_or_refuse};
use crate::run_folder::history;
use crate::run_folder::outcome::{Ending, RunResult};
use crate::run_folder::resume::{self, Checkpoint};
use crate::run_folder::run_dir::RunDir;
use crate::session::weights::WeightHashes;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::text::render_plan;
use smidgen_ir::{DeviceKind, Policy};
use smidgen_recipe::{Budget, render_job};
use smidgen_runtime::device::Reservation;
use smidgen_runtime::{Device, DeviceError, Executor};

/// How many plans are tried before the run fails.
const MOST_ATTEMPTS: usize = 12;

/// How a run is driven, besides its job.
pub struct RunOptions<'a> {
    /// The text of the recipe file.
    pub recipe_text: &'a str,
    /// Continues from the last checkpoint of its folder, or from step 0 if there is none.
    pub resumes: bool,
    /// Continues even if data or model changed.
    pub accepts_changes: bool,
    pub quiet: bool,
    /// Whether memory is measured after every step.
    pub is_monitored: bool,
    /// Whether the process does nothing but this run. Then the run handles signals, and on the CPU it checks the
    /// memory of the process against the plan. A program that calls the library does both itself.
    pub owns_process: bool,
    pub say: &'a dyn Fn(&str),
    pub on_step: OnStep<'a>,
}

/// A run that is ready to reserve its memory.
#[derive(Debug)]
pub struct Ready<D> {
    /// `None`: from step 0.
    pub start: Option<Checkpoint>,
    pub facts: MemoryFacts,
    pub planned: Planned,
    pub device: D,
    /// Hashes of the data and the model; those of the weights are compared when they are loaded.
    pub contents: Contents,
}

/// A run while it goes on.
pub struct Run<'a, 'o> {
    pub job: &'a Job,
    pub dir: &'a RunDir,
    pub free_memory: &'a mut dyn FreeMemory,
    /// The other ranks, if there are any.
    pub team: Option<&'a mut Team>,
    pub options: RunOptions<'o>,
}

/// The part of a plan that is still needed once its steps are on the device.
#[derive(Clone, Debug)]
struct Chosen {
    policy: Policy,
    peak_bytes: u64,
    context_bytes: u64,
    disk_bytes: u64,
    life: Vec<PhaseMemory>,
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

/// What lasts from the first step to the last, whatever the plan.
struct Lasting {
    journal: Journal,
    progress: Progress,
    interrupt: Interrupt,
}

impl Run<'_, '_> {
    /// Runs the job from its start to its end.
    pub fn run<D: Device>(mut self, ready: Ready<D>) -> Result<RunResult, Failure> {
        let Ready { mut start, mut facts, mut planned, mut device, mut contents } = ready;
        let (job, dir) = (self.job, self.dir);
        let total_steps = job.rows().batches.total_steps();
        // Several ranks keep the plan that they share.
        let is_alone = job.world.is_alone();
        let adapts = job.recipe.memory.adapt && is_alone;
        let mut meter = PhaseMeter::begin();
        let (mut lasting, mut first_loss, mut plans) = (None, f64::NAN, 1);
        loop {
            if is_alone {
                planned = self.settle(&mut facts, planned, &mut device)?;
            }
            if plans == 1 {
                self.announce(&planned, total_steps)?;
            }
            let footprint = Footprint::of(&planned.solution.plan, job, total_steps);
            check_room(dir.path(), dir.checkpoints().len() as u64, &footprint)?;
            let may_grow = adapts && may_grow(job, &facts, &planned)?;
            // A run is refused above if it cannot succeed. From here on the folder is written.
            let is_new = dir.is_empty();
            dir.make()?;
            let measured = monitor::measure(&mut device);
            meter.enter(if start.is_some() { Phase::Resume } else { Phase::Load }, &measured);
            if plans == 1 {
                dir.sweep()?;
                self.warn_above_plan(&measured, planned.solution.peak_bytes);
            }
            if let Some(checkpoint) = &start
                && let Some(obstacle) = resume::use_stored_algorithms(&mut device, &checkpoint.folder)
            {
                self.say(&format!("{WARNING} {obstacle}: results stay equal within rounding"));
            }

            // A run that cannot start leaves no files behind.
            let remove_files = |_: &Failure| {
                if is_new {
                    dir.clear()
                }
            };
            let shares = self.share_host(&planned, &mut device).inspect_err(remove_files)?;
            let (executor, chosen) = self.reserve(&mut facts, planned, device).inspect_err(remove_files)?;
            // No rank reads shared weights before all are loaded.
            let are_loaded = || match self.team.as_deref_mut().filter(|_| shares) {
                Some(team) => team.link().barrier(),
                None => Ok(()),
            };
            let policy = chosen.policy.clone();
            let (mut trainer, hashes) =
                Trainer::fill(job, executor, dir.clone(), policy, start.as_ref(), are_loaded)
                    .inspect_err(remove_files)?;
            let first = start.as_ref().map_or(0, |checkpoint| checkpoint.state.step);
            // Checked before any file of the run changes.
            self.compare_weights(&mut contents, hashes, first)?;
            if plans == 1 {
                dir.set_aside(Artifact::of(&job.recipe))?;
            }

            let Lasting { journal, progress, interrupt } = match &mut lasting {
                Some(lasting) => lasting,
                none => none.insert(self.begin_lasting(start.as_ref(), total_steps)?),
            };
            progress.plan_memory(chosen.peak_bytes);
            history::begin_part(dir, total_steps, first, chosen.peak_bytes, contents.accepted_after(first))?;
            trainer.contents = contents.clone();
            trainer.team = self.team.as_deref_mut();
            trainer.memory.is_monitored = self.options.is_monitored;
            trainer.memory.meter = Some(&mut meter);
            if self.options.owns_process || job.request.device == DeviceKind::Cuda {
                trainer.memory.limit_to(chosen.peak_bytes);
            }
            if adapts {
                let (peak_bytes, budget) = (chosen.peak_bytes, facts.budget);
                let free_memory = &mut *self.free_memory;
                trainer.memory.free = Some(FreeWatch { free_memory, job, peak_bytes, budget, may_grow });
            }
            let trained = trainer.train(first, journal, progress, interrupt, self.options.on_step);
            // The memory measured from here on does not belong to the trainer's last phase.
            meter.enter(Phase::Prepare, &Measurement::default());
            self.write_phases(&meter, &chosen);
            let (mut outcome, returned) = trained.inspect_err(|_| progress.finish())?;
            if first_loss.is_nan() {
                first_loss = outcome.first_loss;
            }
            outcome.first_loss = first_loss;
            let (Ending::MemoryMoved { reachable_bytes }, Some(returned)) = (outcome.ending, returned) else {
                progress.finish();
                return Ok(RunResult { outcome, total_steps, planned_bytes: chosen.peak_bytes, plans });
            };

            history::end_plan(dir, outcome.steps)?;
            device = returned;
            // Freed before the next plan is made: the memory of planning is not counted in this plan.
            device.reserve(&Reservation::default())?;
            start = resume::find_checkpoint(dir)?;
            facts = facts.changed(job, reachable_bytes, &chosen.policy);
            planned = self.replan(&facts, &chosen, outcome.steps, reachable_bytes, progress)?;
            plans += 1;
        }
    }

    fn say(&self, line: &str) {
        (self.options.say)(line);
    }

    fn announce(&self, planned: &Planned, total_steps: u64) -> Result<(), Failure> {
        self.say(render_plan_texts(self.job, planned).table.trim_end());
        let (policy, ranks) = (&planned.solution.policy, self.job.request.rank.of);
        self.say(&format!("  packing: {}", describe_packing(self.job.rows(), policy, ranks)?));
        if let Some(thinned) = describe_thinning(total_steps) {
            self.say(&format!("  {thinned}"));
        }
        Ok(())
    }

    /// On the CPU, data and plan are prepared in the memory that the plan counts.
    fn warn_above_plan(&self, measured: &Measurement, planned_bytes: u64) {
        let is_cpu = measured.own_device_bytes().is_none();
        let above = measured.rss_peak_bytes.filter(|bytes| is_cpu && *bytes > planned_bytes);
        if let Some(bytes) = above.filter(|_| self.options.owns_process) {
            self.say(&format!(
                "{WARNING} preparing the data took {}, more than the planned {}: tokenizing long rows takes up to 250 bytes per byte of text",
                format_bytes(bytes),
                format_bytes(planned_bytes)
            ));
        }
    }

    fn begin_lasting(&self, start: Option<&Checkpoint>, total_steps: u64) -> Result<Lasting, Failure> {
        let first = start.map_or(0, |checkpoint| checkpoint.state.step);
        let totals = start.and_then(|checkpoint| checkpoint.state.totals);
        let (log_every, quiet) = (self.job.recipe.train.log_every, self.options.quiet);
        Ok(Lasting {
            journal: if self.dir.is_written() {
                Journal::resume(self.dir.path(), first)?.with_totals(totals)
            } else {
                Journal::unwritten()
            },
            progress: Progress::new(total_steps, first, log_every, quiet),
            interrupt: if self.options.owns_process { Interrupt::listen() } else { Interrupt::never() },
        })
    }

    /// Makes the ranks of a machine share the frozen weights that they offload to host memory. Returns whether they
    /// do.
    fn share_host<D: Device>(&mut self, planned: &Planned, device: &mut D) -> Result<bool, Failure> {
        let bytes = planned.solution.plan.host.shared_bytes;
        match self.team.as_deref_mut() {
            Some(team) if bytes > 0 && self.job.world.local.of > 1 => {
                device.share_host(share_host(team, bytes)?);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Refuses weights that differ from those of the checkpoint, unless changes are accepted.
    fn compare_weights(
        &self,
        contents: &mut Contents,
        hashes: WeightHashes,
        first: u64,
    ) -> Result<(), Failure> {
        let change = contents.see_weights(hashes, &self.job.model);
        let accepts = self.options.accepts_changes;
        let changes = accept_or_refuse(change.into_iter().collect(), self.dir.path(), accepts)?;
        contents.accept(first, changes, self.options.say);
        Ok(())
    }

    /// Returns the plan, or a smaller one if other programs took memory since it was made.
    fn settle<D: Device>(
        &mut self,
        facts: &mut MemoryFacts,
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
            self.say(&format!(
                "free memory shrank since the plan was made: it needs {}, and {} is available",
                format_bytes(chosen.peak_bytes),
                format_bytes(reachable)
            ));
            *facts = facts.changed(self.job, reachable, &chosen.policy);
            planned = self.shrink(facts, &chosen)?;
        }
        Ok(planned)
    }

    /// Reserves the memory of the plan, or of a smaller one if that fails.
    fn reserve<D: Device>(
        &mut self,
        facts: &mut MemoryFacts,
        mut planned: Planned,
        mut device: D,
    ) -> Result<(Executor<D>, Chosen), Failure> {
        let mut attempts = 0;
        loop {
            self.write_run_files(&planned)?;
            let chosen = Chosen::of(&planned);
            // Moved, not copied: a plan takes memory too, which is counted once.
            let (error, returned) = match Executor::try_load(planned.solution.plan, device) {
                Ok(executor) => {
                    if let Some(algorithms) = executor.device().chosen_algorithms() {
                        self.dir.write_text(resume::ALGORITHMS_FILE, &algorithms)?;
                    }
                    return Ok((executor, chosen));
                }
                Err(failed) => failed,
            };
            attempts += 1;
            let is_refused = matches!(error, DeviceError::Reserve { .. });
            if !is_refused || attempts == MOST_ATTEMPTS {
                return Err(self.with_numbers(&chosen, error));
            }
            device = returned;
            self.say(&format!("{error}, for a plan of {}", format_bytes(chosen.peak_bytes)));
            // The reported free memory was not enough.
            let below = chosen.peak_bytes - chosen.peak_bytes / 8;
            let reachable = self.free_memory.reachable_bytes(device.memory(), chosen.context_bytes);
            *facts = facts.changed(self.job, reachable.unwrap_or(below), &chosen.policy);
            facts.budget.bytes = facts.budget.bytes.min(below);
            planned = self.shrink(facts, &chosen)?;
        }
    }

    /// Describes what changes with another plan.
    fn describe_change(&self, before: &Chosen, planned: &Planned) -> String {
        let now = &planned.solution;
        let changes = describe_changes(&before.policy, &now.policy, self.job.request.layers());
        let [new, old] = [now.peak_bytes, before.peak_bytes].map(format_bytes);
        format!("now {changes}, {new} instead of {old}")
    }

    fn shrink(&self, facts: &MemoryFacts, before: &Chosen) -> Result<Planned, Failure> {
        let planned = plan(self.job, facts)?.or_refuse()?;
        let change = self.describe_change(before, &planned);
        self.say(&format!("{change}; results equal within rounding"));
        Ok(planned)
    }

    /// Plans for the memory available now; the result may be the same plan.
    fn replan(
        &self,
        facts: &MemoryFacts,
        before: &Chosen,
        step: u64,
        reachable_bytes: u64,
        progress: &Progress,
    ) -> Result<Planned, Failure> {
        let planned = plan(self.job, facts)?.or_refuse()?;
        if planned.keeps_before {
            return Ok(planned);
        }
        progress.say(&format!(
            "after step {step}: {} of memory is available: {}; results equal within rounding",
            format_bytes(reachable_bytes),
            self.describe_change(before, &planned)
        ));
        let (current, kept) = (self.dir.file("plan.json"), self.dir.file(&format!("plan-until-{step}.json")));
        std::fs::copy(&current, kept).map_err(|error| Failure::file("copy", &current, error))?;
        Ok(planned)
    }

    /// Adds the available memory or disk space to a failure of the device.
    fn with_numbers(&self, chosen: &Chosen, error: DeviceError) -> Failure {
        match error {
            DeviceError::File { .. } => {
                with_room(Failure::from(error), self.dir.path(), "the offload file", chosen.disk_bytes)
            }
            DeviceError::Pinned { bytes, .. } => {
                let free = host::free_memory_bytes().map_or("unknown".into(), format_bytes);
                let budget = match self.job.recipe.memory.host_budget {
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

    fn write_run_files(&self, planned: &Planned) -> Result<(), Failure> {
        let PlanTexts { table, json } = render_plan_texts(self.job, planned);
        let (dir, table, recipe_text) = (self.dir, plain(&table), self.options.recipe_text);
        history::note_recipe(dir, recipe_text)?;
        dir.write_text("recipe.toml", recipe_text)?;
        dir.write_text("plan.json", &json)?;
        dir.write_text("plan.txt", &format!("{table}\n{}", render_plan(&planned.solution.plan)))?;
        dir.write_text("job.toml", &render_job(&self.job.recipe))
    }

    /// A failure here is only a warning: the training matters more than its measurements.
    fn write_phases(&self, meter: &PhaseMeter, chosen: &Chosen) {
        let disk_bytes = folder_bytes(self.dir.path()) + chosen.disk_bytes;
        let phases = meter.render_json(&chosen.life, disk_bytes);
        if let Err(failure) = self.dir.write_text("phases.json", &format!("{phases:#}\n")) {
            self.say(&format!("{WARNING} {}", failure.message));
        }
    }
}

//! The training loop.
//!
//! `Trainer::train` is the whole loop, from the first step to the saved result. A run ends after its last step, when
//! evaluations stop improving (`logs/evaluations.rs`), or when it is asked to stop.
//! What a step computes is in `steps.rs`, the loss of held-out rows in `evaluation.rs`, and files in `saving.rs`.
//! Left out: choosing a plan, and continuing with another one (`replanning.rs`).

use super::evaluation::evaluate;
use super::interrupt::Interrupt;
use super::lr::LearningRate;
use super::memory_watch::MemoryWatch;
use super::rollouts::Rollouts;
use super::steps::{FinishedStep, QueuedStep, Steps};
use crate::console::colour::WARNING;
use crate::console::progress::Progress;
use crate::failure::Failure;
use crate::logs::evaluations::{Evaluated, Evaluations};
use crate::logs::journal::Journal;
use crate::logs::metrics::{EvalRow, MetricsRow};
use crate::logs::phases::Phase;
use crate::plan::artifact::saves_end;
use crate::plan::disk::Footprint;
use crate::plan::job::Job;
use crate::ranks::team::{RankReport, Team, TeamReport};
use crate::rewards::RewardError;
use crate::run_folder::contents::Contents;
use crate::run_folder::outcome::{Ending, Outcome};
use crate::run_folder::resume::{Checkpoint, read_state};
use crate::run_folder::run_dir::RunDir;
use crate::run_folder::trained_state;
use crate::session::adapters::copy_to_reference;
use crate::session::weights::{self, WeightHashes, clear};
use smidgen_compile::request::Reference;
use smidgen_ir::{Entry, LeafKind, Plan, Policy};
use smidgen_runtime::{Device, Executor};
use std::ops::ControlFlow;
use std::time::Instant;

/// Receives the metrics of each step. `Break` stops the run as an interrupt does, with its state saved.
pub type OnStep<'a> = &'a mut dyn FnMut(&MetricsRow) -> ControlFlow<()>;

/// A loaded plan with the state of its run.
#[derive(Debug)]
pub struct Trainer<'a, D> {
    pub(super) steps: Steps<'a, D>,
    pub(super) dir: RunDir,
    /// The other ranks, if there are any.
    pub(super) team: Option<&'a mut Team>,
    pub(super) evaluations: Evaluations,
    /// Stored in every checkpoint.
    pub(super) contents: Contents,
    pub(super) memory: MemoryWatch<'a>,
}

impl<'a, D: Device> Trainer<'a, D> {
    /// Reserves the memory of the plan on the device and fills it.
    pub fn load(
        job: &'a Job,
        plan: Plan,
        device: D,
        dir: RunDir,
        policy: Policy,
        start: Option<&Checkpoint>,
    ) -> Result<Trainer<'a, D>, Failure> {
        let executor = Executor::load(plan, device)?;
        Trainer::fill(job, executor, dir, policy, start, || Ok(())).map(|(trainer, _)| trainer)
    }

    /// Fills memory that is already reserved: base weights, then the initial adapter, or the trained tensors and the
    /// optimizer state of a checkpoint. `are_loaded` returns once the other ranks have loaded the weights that they
    /// share with this one. Also returns the hashes of the weights on the rank that writes checkpoints.
    pub fn fill(
        job: &'a Job,
        mut executor: Executor<D>,
        dir: RunDir,
        policy: Policy,
        start: Option<&Checkpoint>,
        are_loaded: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(Trainer<'a, D>, WeightHashes), Failure> {
        let threads = job.request.threads;
        let hashes = if job.world.is_first() {
            weights::load_hashed_weights(&mut executor, &job.model, threads)?
        } else {
            weights::load_weights(&mut executor, &job.model, threads)?;
            WeightHashes::new()
        };
        are_loaded()?;
        for kind in [LeafKind::Gradient, LeafKind::Moment, LeafKind::State] {
            clear(&mut executor, kind)?;
        }
        let extent = executor.plan().extent;
        if job.request.reference == Some(Reference::Adapter) {
            trained_state::start(&mut executor, job)?;
            executor.run(Entry::Refresh, &extent)?;
            copy_to_reference(&mut executor)?;
        }
        match start {
            None => trained_state::start(&mut executor, job)?,
            Some(checkpoint) => read_state(&mut executor, job, &checkpoint.folder)?,
        }
        executor.run(Entry::Refresh, &extent)?;
        let state = start.map(|checkpoint| &checkpoint.state);
        let trainer = Trainer {
            steps: Steps::of(job, executor, policy, state.and_then(|state| state.loss_scale)),
            dir,
            team: None,
            evaluations: state.map(|state| state.evaluations).unwrap_or_default(),
            contents: Contents::default(),
            memory: MemoryWatch::rows_only(),
        };
        Ok((trainer, hashes))
    }

    /// Stops and saves if measured memory exceeds the planned peak by more than the measuring error.
    pub fn with_planned_peak(mut self, peak_bytes: u64) -> Trainer<'a, D> {
        self.memory.limit_to(peak_bytes);
        self
    }

    /// Trains from `first` (updates already done) to the end and saves the result. Calls `on_step` after each step, and
    /// returns the device if the run continues with another plan.
    pub fn train(
        mut self,
        first: u64,
        journal: &mut Journal,
        progress: &Progress,
        interrupt: &Interrupt,
        on_step: OnStep<'_>,
    ) -> Result<(Outcome, Option<D>), Failure> {
        let job = self.steps.job();
        let (settings, batches) = (&job.recipe.train, &job.rows().batches);
        let total = batches.total_steps();
        let schedule = LearningRate::of(settings, total);
        let footprint = Footprint::of(self.steps.executor.plan(), job, total);
        let (mut first_loss, mut last_loss, mut done, mut ending) = (f64::NAN, f64::NAN, first, Ending::Done);
        // A killed run may have left one checkpoint too many.
        self.prune_checkpoints()?;
        self.steps.watch_liveness((0..first).map(|step| schedule.lr(step)));
        self.enter(Phase::Train);
        self.steps.prepare_reference(&self.dir, first)?;
        self.steps.prepare_rollouts(&self.dir, first)?;
        if first < total && self.steps.run_largest(first)? {
            self.memory.refuse_above_plan(self.steps.executor.device_mut())?;
        }
        let mut queued: Option<QueuedStep> = None;
        let mut reported = Reported { at: Instant::now(), is_stopping: false, exceeded_bytes: None };
        for step in first..total {
            // Also true at once if the run was killed between its last evaluation and its end.
            if self.evaluations.is_over(settings.early_stop) {
                ending = Ending::StoppedEarly;
                break;
            }
            if self.steps.lacks_answers(step) {
                self.generate(step, first, journal, progress, &footprint)?;
            }
            let mut record = |row: &MetricsRow| {
                progress.step(&row.step_progress());
                if row.step == first + 1 {
                    first_loss = row.loss;
                }
                (last_loss, done) = (row.loss, row.step);
                journal.write_step(row)?;
                if on_step(row).is_break() {
                    interrupt.request();
                }
                Ok::<(), Failure>(())
            };

            // Queue this step. Meanwhile the device finishes the step before, whose report is read now.
            let begun = self.steps.begin(step, schedule.lr(step))?;
            if let Some(before) = queued.take() {
                record(&self.report(before, &mut reported, progress, interrupt)?)?;
            }
            self.steps.update(&begun)?;
            queued = Some(begun);

            // Evaluating, saving and stopping need the report of this step; otherwise it is read during the next
            // step.
            let updates = step + 1;
            let is_last = updates == total;
            let evaluates =
                settings.eval_every > 0 && (updates.is_multiple_of(settings.eval_every) || is_last);
            let saves = settings.save_every > 0 && updates.is_multiple_of(settings.save_every);
            let is_stopped = self.is_asked_to_stop(&reported, interrupt) || reported.exceeded_bytes.is_some();
            let settles = evaluates || saves || is_last || is_stopped;
            if (settles || self.steps.must_wait())
                && let Some(begun) = queued.take()
            {
                record(&self.report(begun, &mut reported, progress, interrupt)?)?;
            }
            // The callback or a signal may have asked to stop while the report was read.
            if !settles && (queued.is_some() || !self.is_asked_to_stop(&reported, interrupt)) {
                continue;
            }

            let mut is_new_best = false;
            if evaluates {
                self.enter(Phase::Eval);
                let row = evaluate(&mut self.steps, self.team.as_deref_mut(), updates, progress)?;
                self.enter(Phase::Train);
                journal.write_evaluation(&row)?;
                is_new_best = self.evaluations.record(Evaluated { step: updates, eval_loss: row.eval_loss });
                progress.say(&render_evaluation(&row, total, is_new_best));
            }

            let is_end = is_last || self.evaluations.is_over(settings.early_stop);
            let stop = match reported.exceeded_bytes {
                Some(bytes) => Some(Ending::Exceeded { bytes }),
                None => self.is_asked_to_stop(&reported, interrupt).then_some(Ending::Interrupted),
            };
            let stop = stop.filter(|_| !is_end);
            // A run that ended can be given more steps.
            let keeps_end = is_end && saves_end(&job.recipe);
            if saves || is_new_best || stop.is_some() || keeps_end {
                self.enter(Phase::Save);
                self.save_checkpoint(updates, journal, progress, &footprint)?;
                self.enter(Phase::Train);
            }
            let moved = if saves && !is_end { self.memory_moved() } else { None };
            if let Some(stop) = stop.or(moved) {
                ending = stop;
                break;
            }
            // Time spent evaluating or saving does not count towards the next step.
            reported.at = Instant::now();
        }
        self.steps.rollouts.iter().filter_map(Rollouts::summary).for_each(|line| progress.say(&line));
        let outcome = Outcome { steps: done, first_loss, last_loss, evaluations: self.evaluations, ending };
        match ending {
            Ending::Done | Ending::StoppedEarly => {
                self.enter(Phase::Save);
                self.save_result(done, journal, progress, &footprint)?;
                Ok((outcome, None))
            }
            Ending::Interrupted | Ending::Exceeded { .. } => Ok((outcome, None)),
            Ending::MemoryMoved { .. } => Ok((outcome, Some(self.steps.executor.into_device()))),
        }
    }

    /// Generates and scores the answers of a step, after the reports of all steps before were read. If a program of the
    /// user's that scores them fails, the state is saved, and the run fails.
    fn generate(
        &mut self,
        step: u64,
        first: u64,
        journal: &mut Journal,
        progress: &Progress,
        footprint: &Footprint,
    ) -> Result<(), Failure> {
        self.enter(Phase::Rollout);
        let generated = self.steps.generate(step);
        self.enter(Phase::Train);
        let failure = match generated {
            Ok(news) => {
                news.iter().for_each(|line| progress.say(&format!("{WARNING} {line}")));
                return Ok(());
            }
            Err(failure) => failure,
        };
        if failure.cause::<RewardError>().is_none() || step == 0 {
            return Err(failure);
        }
        if step > first && !self.dir.checkpoint(step).exists() {
            self.save_checkpoint(step, journal, progress, footprint)?;
        }
        Err(failure.hint(format!(
            "step {step} is saved: `smidgen resume` continues from it and generates the same answers again"
        )))
    }

    /// Waits for the report of a step and returns its row of metrics.
    fn report(
        &mut self,
        mut step: QueuedStep,
        before: &mut Reported,
        progress: &Progress,
        interrupt: &Interrupt,
    ) -> Result<MetricsRow, Failure> {
        let FinishedStep { report, overflows, warnings, figures } =
            self.steps.finish(&mut step, self.team.as_deref_mut())?;
        warnings.iter().for_each(|warning| progress.say(&format!("{WARNING} {warning}")));
        let own_seconds = before.at.elapsed().as_secs_f64();
        before.at = Instant::now();
        let measured = self.memory.measure_step(self.steps.executor.device_mut());
        let exceeded_bytes = self.memory.exceeded_bytes(&measured);
        let together = match &mut self.team {
            None => TeamReport { slowest_s: own_seconds, ..TeamReport::default() },
            Some(team) => team.end_step(&RankReport {
                step: step.step + 1,
                seconds: own_seconds,
                is_stopping: interrupt.is_requested(),
                exceeded_bytes,
                device_bytes: measured.device_bytes(),
            })?,
        };
        before.is_stopping = together.is_stopping;
        before.exceeded_bytes = together.exceeded_bytes.or(exceeded_bytes);
        Ok(MetricsRow {
            ranks: self.steps.job().request.rank.of as u64,
            rank_bytes: together.rank_bytes,
            step: step.step + 1,
            epoch: step.epoch,
            loss: report.loss,
            reg_loss: report.reg_loss,
            figures,
            grad_norm: report.grad_norm,
            lr: step.lr,
            tokens: step.tokens,
            supervised_tokens: step.supervised,
            step_ms: together.slowest_s * 1e3,
            tokens_per_s: step.tokens as f64 / together.slowest_s,
            overflows,
            device_bytes: measured.device_bytes(),
            device_free_bytes: measured.free_bytes,
            device_peak_bytes: measured.device_peak_bytes(),
            gpu_util: measured.gpu_util,
            arena_peak_bytes: self.steps.arena_peak_bytes,
            pinned_bytes: measured.pinned_bytes(),
            host_rss_bytes: measured.rss_bytes,
            host_peak_bytes: measured.rss_peak_bytes,
            monitor_ms: measured.ms,
        })
    }

    /// Whether the run ends after this step. Several ranks stop together, once all of them know.
    fn is_asked_to_stop(&self, reported: &Reported, interrupt: &Interrupt) -> bool {
        if self.team.is_some() { reported.is_stopping } else { interrupt.is_requested() }
    }

    fn memory_moved(&mut self) -> Option<Ending> {
        let reachable_bytes = self.memory.moved(self.steps.executor.device_mut())?;
        Some(Ending::MemoryMoved { reachable_bytes })
    }

    fn enter(&mut self, phase: Phase) {
        self.memory.enter(phase, self.steps.executor.device_mut());
    }
}

/// The newest report of a step, of all ranks together.
struct Reported {
    /// When it was read.
    at: Instant,
    /// On several ranks: whether any of them was asked to stop.
    is_stopping: bool,
    /// Memory measured on the device (not the excess alone), if it is above the limit; the most of all ranks.
    exceeded_bytes: Option<u64>,
}

fn render_evaluation(row: &EvalRow, total: u64, is_best: bool) -> String {
    let best = if is_best { ", the best so far" } else { "" };
    let scores = row.scores.iter().filter(|(name, _)| !name.ends_with("_stderr"));
    let scores: String = scores.map(|(name, value)| format!("  {name} {value:.4}")).collect();
    format!("step {}/{total}  eval_loss {:.4}{best}{scores}", row.step, row.eval_loss)
}

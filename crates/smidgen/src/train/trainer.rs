//! The training loop: batches in, metrics and adapters out.
//!
//! One optimizer step runs `micro_step` for each micro-batch, then `update` and `refresh`. The loss is
//! divided once, by the supervised tokens of the whole step, so the split into micro-batches changes only rounding.
//! Between the first and the last step nothing large is allocated: buffers are made for the plan's extent and reused.
//! A run ends after its last step, when evaluations no longer improve (`standing.rs`), or when it is asked to.

use super::adapt::Watch;
use super::begun_step::BegunStep;
use super::interrupt::Interrupt;
use super::journal::Journal;
use super::liveness::{self, Liveness};
use super::loss_scale::LossScale;
use super::lr::{LearningRate, Schedule};
use super::made_of::MadeOf;
use super::metrics::MetricsRow;
use super::monitor::{self, Looked};
use super::outcome::{Ending, Outcome};
use super::phases::{Phase, PhaseMeter};
use super::replay::Culprit;
use super::resume::{self, Start};
use super::run_dir::{RunDir, checkpoint_name};
use super::standing::{Evaluated, Standing};
use super::trained_state;
use super::trained_weights;
use super::trainer_state::{Moment, write_trainer_state};
use crate::console::colour::WARNING;
use crate::console::progress::Progress;
use crate::console::saving::Saving;
use crate::failure::Failure;
use crate::plan::disk::{Footprint, with_room};
use crate::plan::job::Job;
use crate::plan::product::Product;
use crate::ranks::team::{OwnStep, Team, Together};
use crate::rows::data::Data;
use crate::session::feed::{Feed, StepReport};
use crate::session::weights::{WeightHashes, clear};
use crate::session::{adapters, weights};
use smidgen_data::batch::BatchPlan;
use smidgen_data::micro_batch::{MicroBatch, Packing};
use smidgen_data::share::Shares;
use smidgen_data::tokens::TokenSet;
use smidgen_formats::tokenizer::copy::copy_tokenizer;
use smidgen_ir::{Entry, Extent, LeafKind, Plan, PlannedValue, Policy};
use smidgen_recipe::{Batch, Warmup};
use smidgen_runtime::{Device, Executor};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

/// Sees the metrics of each step; `Break` stops the run as an interrupt does, with its state saved.
pub type OnStep<'a> = &'a mut dyn FnMut(&MetricsRow) -> ControlFlow<()>;

#[derive(Debug)]
pub struct Trainer<'a, D> {
    pub(super) executor: Executor<D>,
    pub(super) job: &'a Job,
    dir: RunDir,
    pub(super) policy: Policy,
    pub(super) feed: Feed,
    pub(super) micro_batch: MicroBatch,
    pub(super) packing: Packing,
    /// Of the micro-batches of a step, in breadth-first order.
    pub(super) extents: Vec<Extent>,
    pub(super) shares: Shares,
    pub(super) team: Option<&'a mut Team>,
    /// Whether a rank was asked to stop, as all of them know.
    is_stopping: bool,
    standing: Standing,
    pub(super) liveness: Option<Liveness>,
    loss_scale: Option<LossScale>,
    weight_hashes: WeightHashes,
    made_of: MadeOf,
    /// Measured device memory above this stops the run.
    pub(super) limit_bytes: Option<u64>,
    /// Whether memory is measured after every step; only a benchmark of the monitor turns it off.
    is_monitored: bool,
    /// Samples memory, phase by phase.
    meter: Option<&'a mut PhaseMeter>,
    /// Checked at checkpoints: has free memory changed?
    watch: Option<Watch<'a>>,
    /// Of the plan.
    arena_peak_bytes: u64,
    /// The measured memory, if it exceeded the limit.
    exceeded_bytes: Option<u64>,
    /// The step whose report has not arrived yet.
    begun: Option<BegunStep>,
    /// The sample list of a finished step, reused by the next.
    pub(super) spare_samples: Vec<u32>,
    last_row: Instant,
}

impl<'a, D: Device> Trainer<'a, D> {
    /// Reserves the memory of the plan on the device and fills it: weights, adapters, moments.
    pub fn load(
        job: &'a Job,
        plan: Plan,
        device: D,
        dir: RunDir,
        policy: Policy,
        start: &Start,
    ) -> Result<Trainer<'a, D>, Failure> {
        let executor = Executor::load(plan, device)?;
        Trainer::fill(job, executor, dir, policy, start, || Ok(()))
    }

    /// The same for memory that is already reserved. `are_loaded` returns once other ranks have loaded the weights that
    /// they share with this one.
    pub fn fill(
        job: &'a Job,
        mut executor: Executor<D>,
        dir: RunDir,
        policy: Policy,
        start: &Start,
        are_loaded: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<Trainer<'a, D>, Failure> {
        let feed = Feed::of(executor.plan(), job.recipe.train.seed);
        let extent = executor.plan().extent;
        let arena_peak_bytes = executor.plan().peak_live_bytes() as u64;
        let threads = job.request.threads;
        let weight_hashes = match job.world.is_first() {
            true => weights::load_hashed_weights(&mut executor, &job.model, threads)?,
            // One rank states what the run is made of.
            false => {
                weights::load_weights(&mut executor, &job.model, threads).map(|()| WeightHashes::new())?
            }
        };
        are_loaded()?;
        clear(&mut executor, LeafKind::Gradient)?;
        clear(&mut executor, LeafKind::Moment)?;
        clear(&mut executor, LeafKind::State)?;
        match start {
            Start::Beginning => trained_state::start(&mut executor, job)?,
            Start::Checkpoint { folder, .. } => resume::read_state(&mut executor, job, folder)?,
        }
        executor.run(Entry::Refresh, &extent)?;
        Ok(Trainer {
            liveness: None,
            loss_scale: start.loss_scale().or(LossScale::of(job.request.precision)),
            weight_hashes,
            made_of: MadeOf::default(),
            limit_bytes: None,
            is_monitored: true,
            meter: None,
            watch: None,
            arena_peak_bytes,
            exceeded_bytes: None,
            standing: start.standing(),
            executor,
            job,
            dir,
            policy,
            feed,
            micro_batch: MicroBatch::with_capacity(extent),
            packing: Packing::default(),
            extents: Vec::new(),
            shares: Shares::default(),
            team: None,
            is_stopping: false,
            begun: None,
            spare_samples: Vec::new(),
            last_row: Instant::now(),
        })
    }

    /// Hashes of the weights that were loaded.
    pub fn take_weight_hashes(&mut self) -> WeightHashes {
        std::mem::take(&mut self.weight_hashes)
    }

    /// What checkpoints say that the run is made of.
    pub fn set_made_of(&mut self, made_of: MadeOf) {
        self.made_of = made_of;
    }

    /// Stops and saves if measured memory exceeds the planned peak by more than the measuring error.
    pub fn with_planned_peak(self, peak_bytes: u64) -> Trainer<'a, D> {
        Trainer { limit_bytes: Some(measurable_peak(peak_bytes)), ..self }
    }

    /// Trains together with other ranks.
    pub fn with_team(self, team: &'a mut Team) -> Trainer<'a, D> {
        Trainer { team: Some(team), ..self }
    }

    /// Whether to measure memory after every step.
    pub fn with_monitor(self, is_monitored: bool) -> Trainer<'a, D> {
        Trainer { is_monitored, ..self }
    }

    /// Has the meter sample memory in every phase.
    pub fn with_meter(self, meter: &'a mut PhaseMeter) -> Trainer<'a, D> {
        Trainer { meter: Some(meter), ..self }
    }

    /// Ends at a checkpoint if free memory changed.
    pub fn with_watch(self, watch: Watch<'a>) -> Trainer<'a, D> {
        Trainer { watch: Some(watch), ..self }
    }

    /// Trains from `first` (updates done) to the end and saves what was trained.
    pub fn run(
        self,
        batches: &mut BatchPlan,
        first: u64,
        journal: &mut Journal,
        progress: &Progress,
        interrupt: &Interrupt,
    ) -> Result<Outcome, Failure> {
        let on_step = &mut |_: &MetricsRow| ControlFlow::Continue(());
        self.run_watched(batches, first, journal, progress, interrupt, on_step).map(|(outcome, _)| outcome)
    }

    /// The same; calls `on_step` after each step, which may stop the run, and returns the device if the run continues
    /// with another plan.
    pub fn run_watched(
        mut self,
        batches: &mut BatchPlan,
        first: u64,
        journal: &mut Journal,
        progress: &Progress,
        interrupt: &Interrupt,
        on_step: OnStep<'_>,
    ) -> Result<(Outcome, Option<D>), Failure> {
        let job = self.job;
        let Data::Rows(rows) = &job.data else { unreachable!("training without data is refused before") };
        let (train, total) = (&rows.train, batches.total_steps());
        let schedule = learning_rate(&job.recipe, total);
        let settings = &job.recipe.train;
        let updated = (0..first).filter(|step| schedule.lr(*step) > 0.0).take(liveness::UPDATES as usize);
        if (updated.count() as u64) < liveness::UPDATES {
            self.liveness = Some(Liveness::begin(job));
        }
        let mut outcome = Outcome {
            steps: first,
            first_loss: f64::NAN,
            last_loss: f64::NAN,
            standing: self.standing,
            ending: Ending::Done,
        };
        let footprint = Footprint::of(self.executor.plan(), job, total);
        let folder = self.dir.path().to_path_buf();
        let unwritten = |failure: Failure| with_room(failure, &folder, "a row", ROW_BYTES);
        let mut moment = Moment {
            step: first,
            epoch: batches.epochs_after(first),
            total_steps: total,
            epochs: batches.epochs(),
            samples: train.len(),
            batch: match settings.batch {
                Batch::Samples(samples) => Some(samples),
                Batch::Tokens(_) => None,
            },
            eval_every: settings.eval_every,
            save_every: settings.save_every,
            early_stop: settings.early_stop,
            standing: self.standing,
            is_end: false,
            run_folder: &folder,
        };
        // A killed run may have left one checkpoint too many.
        self.dir.prune_checkpoints(settings.keep, self.standing.best_saved.map(|best| best.step))?;
        self.enter(Phase::Train);
        if first < total {
            self.run_dry_step(batches, train, first)?;
        }
        self.last_row = Instant::now();
        for step in first..total {
            // Also if a run was killed between its last evaluation and its end.
            if self.standing.is_over(settings.early_stop) {
                outcome.ending = Ending::StoppedEarly;
                break;
            }
            let mut record = |row: &MetricsRow, progress: &Progress| {
                progress.step(&row.news());
                if row.step == first + 1 {
                    outcome.first_loss = row.loss;
                }
                (outcome.last_loss, outcome.steps) = (row.loss, row.step);
                journal.write_step(row).map_err(unwritten)?;
                if on_step(row).is_break() {
                    interrupt.request();
                }
                Ok::<(), Failure>(())
            };
            let begun = self.begin_step(batches, train, step, schedule.lr(step))?;
            // The previous step's report arrived while this step's work was queued behind it.
            if let Some(before) = self.begun.take() {
                record(&self.finish_step(train, before, progress, interrupt)?, progress)?;
            }
            self.begin_update(&begun)?;
            self.begun = Some(begun);
            let (done, epoch) = (step + 1, self.begun.as_ref().map_or(0.0, |begun| begun.epoch));
            let evaluates =
                settings.eval_every > 0 && (done.is_multiple_of(settings.eval_every) || done == total);
            let saves = settings.save_every > 0 && done.is_multiple_of(settings.save_every);
            // Evaluation and saving need the state after this step.
            let settles = evaluates
                || saves
                || done == total
                || self.is_asked_to_stop(interrupt)
                || self.exceeded_bytes.is_some();
            // A step that overflowed is repeated before the next; a guard that reads waits for nothing but its own step.
            let waits = self.loss_scale.is_some() || self.liveness.as_ref().is_some_and(Liveness::ends_next);
            if (settles || waits || !self.executor.device().is_asynchronous())
                && let Some(begun) = self.begun.take()
            {
                record(&self.finish_step(train, begun, progress, interrupt)?, progress)?;
            }
            // The step that was just recorded may have been the one to stop after.
            if !settles && (self.begun.is_some() || !self.is_asked_to_stop(interrupt)) {
                continue;
            }
            let mut is_new_best = false;
            if evaluates {
                self.enter(Phase::Eval);
                let row = self.evaluate(rows, done, epoch)?;
                self.enter(Phase::Train);
                journal.write_eval(&row).map_err(unwritten)?;
                is_new_best = self.standing.record(Evaluated { step: done, eval_loss: row.eval_loss });
                let best = if is_new_best { ", the best so far" } else { "" };
                let score = |(name, value): (&String, &f64)| match name.ends_with("_stderr") {
                    true => String::new(),
                    false => format!("  {name} {value:.4}"),
                };
                let scores: String = row.scores.iter().map(score).collect();
                progress.say(&format!("step {done}/{total}  eval_loss {:.4}{best}{scores}", row.eval_loss));
            }
            (moment.step, moment.epoch) = (done, epoch);
            let is_last = done == total || self.standing.is_over(settings.early_stop);
            let ending = match self.exceeded_bytes {
                Some(bytes) => Some(Ending::Exceeded { bytes }),
                None => self.is_asked_to_stop(interrupt).then_some(Ending::Interrupted),
            };
            let ending = ending.filter(|_| !is_last);
            if saves || ending.is_some() || is_new_best {
                journal.sync().map_err(unwritten)?;
                self.enter(Phase::Save);
                let unfinished = self.dir.unfinished(&checkpoint_name(moment.step));
                let saving = Saving::begin(progress, "a checkpoint", unfinished, footprint.checkpoint_bytes);
                self.save_checkpoint(&mut moment, journal).map_err(|failure| {
                    with_room(failure, &folder, "a checkpoint", footprint.checkpoint_bytes)
                })?;
                drop(saving);
                self.enter(Phase::Train);
            }
            let moved = (saves && !is_last).then(|| self.memory_moved()).flatten();
            if let Some(ending) = ending.or(moved) {
                outcome.ending = ending;
                break;
            }
            // Time spent evaluating or saving does not count towards the next step.
            self.last_row = Instant::now();
        }
        (moment.standing, outcome.standing) = (self.standing, self.standing);
        match outcome.ending {
            Ending::Done | Ending::StoppedEarly => {}
            Ending::Interrupted | Ending::Exceeded { .. } => return Ok((outcome, None)),
            Ending::MemoryMoved { .. } => return Ok((outcome, Some(self.executor.into_device()))),
        }
        journal.sync().map_err(unwritten)?;
        moment.is_end = true;
        self.enter(Phase::Save);
        let Footprint { product, product_bytes, .. } = footprint;
        let unfinished = self.dir.unfinished(product.folder());
        let _saving = Saving::begin(progress, product.one(), unfinished, product_bytes);
        self.save_final(&moment, journal, progress).map_err(|failure| {
            with_room(failure, &folder, footprint.product.one(), footprint.product_bytes)
        })?;
        Ok((outcome, None))
    }

    fn enter(&mut self, phase: Phase) {
        if let Some(meter) = &mut self.meter {
            meter.enter(phase, &monitor::look(self.executor.device_mut()));
        }
    }

    fn memory_moved(&mut self) -> Option<Ending> {
        let reachable_bytes = self.watch.as_mut()?.look(self.executor.device_mut().memory())?;
        Some(Ending::MemoryMoved { reachable_bytes })
    }

    /// Writes `adapter/` or `model/`: the last state, or with early stopping the best evaluated one.
    fn save_final(self, moment: &Moment<'_>, journal: &Journal, progress: &Progress) -> Result<(), Failure> {
        let Trainer { mut executor, job, dir, standing, mut meter, .. } = self;
        // What ranks divide, all of them read and gather.
        let is_divided = |(_, value): (_, &PlannedValue)| value.role.shard().is_some();
        if !dir.is_written() && !executor.plan().leaves(LeafKind::Adapter).any(is_divided) {
            return Ok(());
        }
        if job.recipe.train.early_stop > 0
            && let Some(best) = standing.best_saved.filter(|best| best.step != moment.step)
        {
            trained_state::read_saved(&mut executor, job, &dir.checkpoint(best.step))?;
        }
        let product = Product::of(&job.recipe);
        if !dir.is_written() {
            return trained_weights::help_write_model(&mut executor, job);
        }
        let mut warnings = Vec::new();
        dir.write_folder(product.folder(), |folder| {
            match product {
                Product::Adapter => adapters::save_adapter(&mut executor, job, folder)?,
                Product::Model => trained_weights::write_model(&mut executor, job, folder)?,
            }
            if let Some(meter) = &mut meter {
                meter.sample(&monitor::look(executor.device_mut()));
            }
            // The arena is freed first: the plan does not count a tokenizer next to it.
            drop(executor);
            match product {
                // A missing tokenizer is only a warning: the adapter is what counts.
                Product::Adapter => warnings.extend(
                    copy_tokenizer(&job.model, folder)
                        .err()
                        .map(|error| format!("the tokenizer was not saved with the adapter: {error}")),
                ),
                Product::Model => warnings = trained_weights::write_beside(&job.model, folder)?,
            }
            write_prompt(job, folder)?;
            write_trainer_state(folder, moment, journal.history())
        })?;
        for warning in warnings {
            progress.say(&format!("{WARNING} {warning}"));
        }
        Ok(())
    }

    /// Whether the run ends after this step: on several ranks once all of them know it.
    fn is_asked_to_stop(&self, interrupt: &Interrupt) -> bool {
        match self.team {
            Some(_) => self.is_stopping,
            None => interrupt.is_requested(),
        }
    }

    /// The loss scale.
    pub(super) fn scale(&self) -> f64 {
        self.loss_scale.map_or(1.0, |loss_scale| loss_scale.scale())
    }

    /// Queues the update of a step and its report.
    fn begin_update(&mut self, begun: &BegunStep) -> Result<(), Failure> {
        let BegunStep { step, lr, .. } = *begun;
        let scale = self.scale();
        self.feed.write_hyper(&mut self.executor, lr, step + 1, scale);
        let extent = self.executor.plan().extent;
        self.executor.run(Entry::Update, &extent)?;
        self.executor.run(Entry::Refresh, &extent)?;
        self.feed.begin_report(&mut self.executor).map_err(Failure::from)
    }

    /// Waits for the report of a step and makes its row.
    fn finish_step(
        &mut self,
        train: &TokenSet,
        begun: BegunStep,
        progress: &Progress,
        interrupt: &Interrupt,
    ) -> Result<MetricsRow, Failure> {
        let mut report = self.feed.finish_report(&mut self.executor)?;
        let mut overflows = 0;
        while !report.finite && self.loss_scale.as_mut().is_some_and(LossScale::shrink) {
            overflows += 1;
            self.run_micro_batches(train, &begun.samples, begun.step, begun.supervised, begun.rounds)?;
            self.begin_update(&begun)?;
            report = self.feed.finish_report(&mut self.executor)?;
        }
        if let Some(loss_scale) = self.loss_scale.as_mut().filter(|_| report.finite) {
            loss_scale.see_finite();
        }
        if !report.finite {
            let culprit = self.replay(train, &begun.samples, begun.step)?;
            let failure = not_finite(train, &begun.samples, begun.step + 1, &report, culprit.as_ref());
            return Err(match &mut self.team {
                Some(team) => team.most_telling(failure, culprit.is_some())?,
                None => failure,
            });
        }
        if let Some(mut liveness) = self.liveness.take() {
            match liveness.see_update(begun.lr) {
                true => {
                    for warning in liveness.end(&mut self.executor, self.team.as_deref_mut())? {
                        progress.say(&format!("{WARNING} {warning}"));
                    }
                }
                false => self.liveness = Some(liveness),
            }
        }
        let own_seconds = self.last_row.elapsed().as_secs_f64();
        self.last_row = Instant::now();
        let looked = match self.is_monitored {
            true => monitor::look(self.executor.device_mut()),
            false => Looked::default(),
        };
        if let Some(meter) = &mut self.meter {
            meter.sample(&looked);
        }
        let is_above = |bytes: &u64| self.limit_bytes.is_some_and(|limit| *bytes > limit);
        self.exceeded_bytes = looked.device_bytes().filter(is_above);
        let together = match &mut self.team {
            None => Together { slowest_s: own_seconds, ..Together::default() },
            Some(team) => team.end_step(&OwnStep {
                step: begun.step + 1,
                seconds: own_seconds,
                is_stopping: interrupt.is_requested(),
                exceeded_bytes: self.exceeded_bytes,
                device_bytes: looked.device_bytes(),
            })?,
        };
        let seconds = together.slowest_s;
        self.is_stopping = together.is_stopping;
        self.exceeded_bytes = together.exceeded_bytes.or(self.exceeded_bytes);
        let row = MetricsRow {
            ranks: self.job.request.rank.of as u64,
            rank_bytes: together.rank_bytes,
            step: begun.step + 1,
            epoch: begun.epoch,
            loss: report.loss,
            reg_loss: report.reg_loss,
            grad_norm: report.grad_norm,
            lr: begun.lr,
            tokens: begun.tokens,
            supervised_tokens: begun.supervised,
            step_ms: seconds * 1e3,
            tokens_per_s: begun.tokens as f64 / seconds,
            overflows,
            device_bytes: looked.device_bytes(),
            device_free_bytes: looked.free_bytes(),
            device_peak_bytes: looked.device_peak_bytes(),
            gpu_util: looked.gpu_util,
            arena_peak_bytes: self.arena_peak_bytes,
            pinned_bytes: looked.pinned_bytes(),
            host_rss_bytes: looked.rss_bytes,
            host_peak_bytes: looked.rss_peak_bytes,
            monitor_ms: looked.ms,
        };
        self.spare_samples = begun.samples;
        Ok(row)
    }

    fn save_checkpoint(&mut self, moment: &mut Moment<'_>, journal: &Journal) -> Result<(), Failure> {
        self.standing.note_saved(moment.step);
        moment.standing = self.standing;
        let Trainer { executor, job, dir, policy, standing, loss_scale, made_of, .. } = self;
        if !dir.is_written() {
            return resume::help_write_state(executor, job);
        }
        dir.write_folder(&checkpoint_name(moment.step), |folder| {
            resume::write_state(executor, job, policy, moment.step, standing, *loss_scale, made_of, folder)?;
            write_prompt(job, folder)?;
            write_trainer_state(folder, moment, journal.history())
        })?;
        dir.prune_checkpoints(job.recipe.train.keep, standing.best_saved.map(|best| best.step))
    }
}

/// How prompts were written, for those who generate with what was trained.
fn write_prompt(job: &Job, folder: &Path) -> Result<(), Failure> {
    let Data::Rows(rows) = &job.data else { return Ok(()) };
    rows.prompt.iter().try_for_each(|prompt| prompt.write(folder).map_err(Failure::writing))
}

/// The largest measured memory that a run with this planned peak may show.
pub fn measurable_peak(planned_bytes: u64) -> u64 {
    const MEASURE_BYTES: u64 = 8 << 20;
    planned_bytes + planned_bytes / 100 + MEASURE_BYTES
}

/// More than the size of one metrics row.
const ROW_BYTES: u64 = 4096;

fn learning_rate(recipe: &smidgen_recipe::Recipe, total: u64) -> LearningRate {
    let schedule = match recipe.train.schedule {
        smidgen_recipe::Schedule::Constant => Schedule::Constant,
        smidgen_recipe::Schedule::Linear => Schedule::Linear,
        smidgen_recipe::Schedule::Cosine => Schedule::Cosine,
    };
    let warmup = match recipe.train.warmup {
        Warmup::Steps(steps) => steps as f64,
        Warmup::Fraction(fraction) => fraction,
    };
    LearningRate::new(schedule, recipe.train.lr, warmup, total)
}

fn not_finite(
    train: &TokenSet,
    samples: &[u32],
    step: u64,
    report: &StepReport,
    culprit: Option<&Culprit>,
) -> Failure {
    let places: Vec<String> =
        samples.iter().take(4).map(|sample| train.place(*sample as usize).to_string()).collect();
    let more = if samples.len() > 4 { format!(" and {} more", samples.len() - 4) } else { String::new() };
    let first = culprit.map_or(String::new(), |culprit| format!("\n  {}", culprit.describe(train)));
    let failure = Failure::training(format!(
        "step {step} is not finite: loss {}, gradient norm {}; its samples are {}{more}; trained weights are unchanged{first}",
        report.loss,
        report.grad_norm,
        places.join(", ")
    ));
    match (step, culprit.is_some_and(|culprit| culprit.is_weight())) {
        (1, _) | (_, true) => {
            failure.hint("the weights are suspect: look for NaN in the checkpoint or the initial adapter")
        }
        _ => failure.hint("a lower `train.lr` is the usual remedy; checkpoints written before are intact"),
    }
}

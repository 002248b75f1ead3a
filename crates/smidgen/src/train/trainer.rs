//! The training loop.
//!
//! One optimizer step is `micro_step` for each micro-batch, then `update` and `refresh`. The loss is divided once, by
//! the supervised tokens of the whole step, so the split into micro-batches changes only rounding.
//! Nothing large is allocated between the first and the last step: buffers are sized by the plan and reused.
//! A run ends after its last step, when evaluations stop improving (`standing.rs`), or when it is asked to stop.
//! Other methods of the trainer: `loading.rs`, `begin_step.rs`, `finish_step.rs`, `evaluation.rs`, `saving.rs`.

use super::adapt::Watch;
use super::interrupt::Interrupt;
use super::journal::Journal;
use super::liveness::Liveness;
use super::loss_scale::LossScale;
use super::lr::LearningRate;
use super::made_of::MadeOf;
use super::metrics::MetricsRow;
use super::monitor;
use super::outcome::{Ending, Outcome};
use super::phases::{Phase, PhaseMeter};
use super::run_dir::RunDir;
use super::standing::Standing;
use crate::console::progress::Progress;
use crate::failure::Failure;
use crate::plan::disk::Footprint;
use crate::plan::job::Job;
use crate::plan::product::saves_end;
use crate::ranks::team::Team;
use crate::rows::data::{Data, Rows};
use crate::session::feed::Feed;
use crate::session::weights::WeightHashes;
use smidgen_data::batch::BatchPlan;
use smidgen_data::micro_batch::{MicroBatch, Packing};
use smidgen_data::share::Shares;
use smidgen_ir::{Extent, Policy};
use smidgen_runtime::{Device, Executor};
use std::ops::ControlFlow;
use std::time::Instant;

/// Receives the metrics of each step. `Break` stops the run as an interrupt does, with its state saved.
pub type OnStep<'a> = &'a mut dyn FnMut(&MetricsRow) -> ControlFlow<()>;

#[derive(Debug)]
pub struct Trainer<'a, D> {
    pub(super) executor: Executor<D>,
    pub(super) job: &'a Job,
    pub(super) dir: RunDir,
    pub(super) policy: Policy,
    /// The other ranks, if there are any.
    pub(super) team: Option<&'a mut Team>,
    /// On several ranks: whether any of them was asked to stop.
    pub(super) is_stopping: bool,

    pub(super) feed: Feed,
    // Buffers that every step reuses.
    pub(super) micro_batch: MicroBatch,
    pub(super) packing: Packing,
    pub(super) shares: Shares,
    /// The extents of a step's micro-batches, in breadth-first order.
    pub(super) extents: Vec<Extent>,
    pub(super) spare_samples: Vec<u32>,

    /// The step that is queued on the device and whose report has not been read.
    pub(super) pending: Option<PendingStep>,
    pub(super) standing: Standing,
    /// Only where gradients pass through f16.
    pub(super) loss_scale: Option<LossScale>,
    /// Only until the first updates have been checked.
    pub(super) liveness: Option<Liveness>,

    /// Hashes of the loaded weights.
    pub(super) weight_hashes: WeightHashes,
    /// Stored in every checkpoint.
    pub(super) made_of: MadeOf,

    /// Whether memory is measured after every step; only a benchmark of the monitor turns it off.
    pub(super) is_monitored: bool,
    /// Records the measured memory of each phase.
    pub(super) meter: Option<&'a mut PhaseMeter>,
    /// Measured device memory above this stops the run.
    pub(super) limit_bytes: Option<u64>,
    /// Memory measured on the device (not the excess alone), if it is above the limit; the most of all ranks.
    pub(super) exceeded_bytes: Option<u64>,
    /// Checked at checkpoints: does the free memory call for another plan?
    pub(super) watch: Option<Watch<'a>>,
    pub(super) arena_peak_bytes: u64,
    /// When the last step ended.
    pub(super) last_row: Instant,
}

/// A step whose work is queued on the device.
#[derive(Debug)]
pub struct PendingStep {
    pub step: u64,
    /// Epochs finished after this step.
    pub epoch: f64,
    pub lr: f64,
    /// Tokens of the step, summed over ranks.
    pub tokens: u64,
    pub supervised: u64,
    /// The samples of this rank.
    pub samples: Vec<u32>,
    /// Micro-batches that this rank runs: its own, then empty ones while other ranks have more.
    pub rounds: usize,
    /// The sample that an empty micro-batch computes with weight 0.
    pub filler: u32,
}

impl<'a, D: Device> Trainer<'a, D> {
    /// Trains from `first` (updates already done) to the end and saves the result.
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

    /// Like `run`, but calls `on_step` after each step, and returns the device if the run continues with another
    /// plan.
    pub fn run_watched(
        mut self,
        batches: &mut BatchPlan,
        first: u64,
        journal: &mut Journal,
        progress: &Progress,
        interrupt: &Interrupt,
        on_step: OnStep<'_>,
    ) -> Result<(Outcome, Option<D>), Failure> {
        let (settings, total) = (&self.job.recipe.train, batches.total_steps());
        let schedule = LearningRate::of(settings, total);
        let footprint = Footprint::of(self.executor.plan(), self.job, total);
        self.liveness = Liveness::begin(self.job, (0..first).map(|step| schedule.lr(step)));
        let mut outcome = Outcome {
            steps: first,
            first_loss: f64::NAN,
            last_loss: f64::NAN,
            standing: self.standing,
            ending: Ending::Done,
        };
        // A killed run may have left one checkpoint too many.
        self.prune_checkpoints()?;
        self.enter(Phase::Train);
        if first < total {
            self.run_dry_step(batches, first)?;
        }
        self.last_row = Instant::now();
        for step in first..total {
            // Also true at once if the run was killed between its last evaluation and its end.
            if self.standing.is_over(settings.early_stop) {
                outcome.ending = Ending::StoppedEarly;
                break;
            }
            let mut record = |row: &MetricsRow| {
                progress.step(&row.step_progress());
                if row.step == first + 1 {
                    outcome.first_loss = row.loss;
                }
                (outcome.last_loss, outcome.steps) = (row.loss, row.step);
                journal.write_step(row)?;
                if on_step(row).is_break() {
                    interrupt.request();
                }
                Ok::<(), Failure>(())
            };

            // Queue this step. Meanwhile the device finishes the step before, whose report is read now.
            let begun = self.begin_step(batches, step, schedule.lr(step))?;
            if let Some(before) = self.pending.take() {
                record(&self.finish_step(before, progress, interrupt)?)?;
            }
            self.begin_update(&begun)?;
            self.pending = Some(begun);

            // Evaluating, saving and stopping need the report of this step; otherwise it is read during the next
            // step.
            let done = step + 1;
            let is_last = done == total;
            let evaluates = settings.eval_every > 0 && (done.is_multiple_of(settings.eval_every) || is_last);
            let saves = settings.save_every > 0 && done.is_multiple_of(settings.save_every);
            let is_stopped = self.is_asked_to_stop(interrupt) || self.exceeded_bytes.is_some();
            let settles = evaluates || saves || is_last || is_stopped;
            if (settles || self.must_wait())
                && let Some(begun) = self.pending.take()
            {
                record(&self.finish_step(begun, progress, interrupt)?)?;
            }
            // The callback or a signal may have asked to stop while the report was read.
            if !settles && (self.pending.is_some() || !self.is_asked_to_stop(interrupt)) {
                continue;
            }

            let is_new_best = evaluates && self.evaluate_and_log(batches, done, journal, progress)?;
            let is_end = is_last || self.standing.is_over(settings.early_stop);
            let stop = match self.exceeded_bytes {
                Some(bytes) => Some(Ending::Exceeded { bytes }),
                None => self.is_asked_to_stop(interrupt).then_some(Ending::Interrupted),
            };
            let stop = stop.filter(|_| !is_end);
            // A run that ended can be given more steps.
            let keeps_end = is_end && saves_end(&self.job.recipe);
            if saves || is_new_best || stop.is_some() || keeps_end {
                self.save_checkpoint(batches, done, journal, progress, &footprint)?;
            }
            let moved = if saves && !is_end { self.memory_moved() } else { None };
            if let Some(ending) = stop.or(moved) {
                outcome.ending = ending;
                break;
            }
            // Time spent evaluating or saving does not count towards the next step.
            self.last_row = Instant::now();
        }
        outcome.standing = self.standing;
        match outcome.ending {
            Ending::Done | Ending::StoppedEarly => {
                self.save_final(batches, outcome.steps, journal, progress, &footprint)?;
                Ok((outcome, None))
            }
            Ending::Interrupted | Ending::Exceeded { .. } => Ok((outcome, None)),
            Ending::MemoryMoved { .. } => Ok((outcome, Some(self.executor.into_device()))),
        }
    }

    /// Whether the report of every step is read before the next step begins: a step that overflowed must be repeated
    /// first, the liveness check reads the device anyway, and a CPU has nothing to overlap.
    fn must_wait(&self) -> bool {
        self.loss_scale.is_some()
            || self.liveness.as_ref().is_some_and(Liveness::ends_next)
            || !self.executor.device().is_asynchronous()
    }

    /// Whether the run ends after this step. Several ranks stop together, once all of them know.
    fn is_asked_to_stop(&self, interrupt: &Interrupt) -> bool {
        match self.team {
            Some(_) => self.is_stopping,
            None => interrupt.is_requested(),
        }
    }

    fn memory_moved(&mut self) -> Option<Ending> {
        let reachable_bytes = self.watch.as_mut()?.check(self.executor.device_mut().memory())?;
        Some(Ending::MemoryMoved { reachable_bytes })
    }

    pub(super) fn enter(&mut self, phase: Phase) {
        if let Some(meter) = &mut self.meter {
            meter.enter(phase, &monitor::measure(self.executor.device_mut()));
        }
    }

    pub(super) fn rows(&self) -> &'a Rows {
        match &self.job.data {
            Data::Rows(rows) => rows,
            Data::Assumed { .. } => unreachable!("training without data is refused before"),
        }
    }
}

/// The largest measured memory that a run with this planned peak may show.
pub fn measurable_peak(planned_bytes: u64) -> u64 {
    const MEASURE_BYTES: u64 = 8 << 20;
    planned_bytes + planned_bytes / 100 + MEASURE_BYTES
}

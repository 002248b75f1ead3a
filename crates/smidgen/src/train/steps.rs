//! Optimizer steps on a device: samples into micro-batches, their gradients summed, one update, one report.
//!
//! One step is `micro_step` for each micro-batch, then `update` and `refresh`. Its samples are divided over ranks by
//! their tokens. The loss is divided once, by the supervised tokens of the whole step over all ranks, so the split into
//! micro-batches changes only rounding. The last micro-batch also sums the gradients over ranks.
//! Nothing large is allocated between steps: buffers are sized by the plan and reused.
//! Left out: evaluating, saving and stopping (`trainer.rs`).

use super::liveness::Liveness;
use super::objective_numbers::{ObjectiveNumbers, Passes, Which};
use super::replay::{Culprit, find_among, find_culprit};
use super::rollouts::Rollouts;
use crate::failure::Failure;
use crate::plan::demand::{largest_samples, longest_together, pack};
use crate::plan::job::Job;
use crate::ranks::team::Team;
use crate::run_folder::loss_scale::LossScale;
use crate::run_folder::run_dir::RunDir;
use crate::session::feed::{Feed, StepReport};
use crate::session::weights::clear;
use smidgen_data::example::GroupKind;
use smidgen_data::mask::EncodedSample;
use smidgen_data::micro_batch::{MicroBatch, Packing, token_and_row_count};
use smidgen_data::share::Shares;
use smidgen_data::token_builder::TokenSetBuilder;
use smidgen_data::tokens::{TokenLimits, TokenSet};
use smidgen_ir::objective::RowsNeeded;
use smidgen_ir::{Entry, Extent, LeafKind, Policy};
use smidgen_recipe::Overflow;
use smidgen_runtime::executor::Turn;
use smidgen_runtime::{Device, Executor};
use std::collections::BTreeMap;
use std::ops::Deref;
use std::rc::Rc;

#[derive(Debug)]
pub struct Steps<'a, D> {
    pub(super) executor: Executor<D>,
    pub(super) feed: Feed,
    pub(super) micro_batch: MicroBatch,
    /// Live bytes of the arena at the peak, from the plan.
    pub(super) arena_peak_bytes: u64,
    job: &'a Job,
    policy: Policy,
    packing: Packing,
    shares: Shares,
    /// The extents of a step's micro-batches, in breadth-first order.
    extents: Vec<Extent>,
    spare_samples: Vec<u32>,
    /// Only where gradients pass through f16.
    loss_scale: Option<LossScale>,
    /// Only until the first updates have been checked.
    liveness: Option<Liveness>,
    /// `None` if the loss is the mean negative log-likelihood.
    pub(super) objective: Option<ObjectiveNumbers>,
    /// `None` if the answers are given.
    pub(super) rollouts: Option<Rollouts<'a>>,
}

/// The samples that a step trains on.
#[derive(Clone)]
enum Samples<'a> {
    OfData(&'a TokenSet),
    /// Answers of the current batch.
    Generated(Rc<TokenSet>),
}

impl Deref for Samples<'_> {
    type Target = TokenSet;

    fn deref(&self) -> &TokenSet {
        match self {
            Samples::OfData(set) => set,
            Samples::Generated(set) => set,
        }
    }
}

/// A step whose work is queued on the device.
#[derive(Debug)]
pub struct QueuedStep {
    pub step: u64,
    /// Epochs finished after this step.
    pub epoch: f64,
    pub lr: f64,
    /// Tokens of the step, summed over ranks.
    pub tokens: u64,
    pub supervised: u64,
    /// The samples of this rank.
    samples: Vec<u32>,
    /// Micro-batches that this rank runs: its own, then empty ones while other ranks have more.
    rounds: usize,
    /// The sample that an empty micro-batch computes with weight 0.
    filler: u32,
}

/// The report of a step that is finite.
pub struct FinishedStep {
    pub report: StepReport,
    /// How often the step overflowed in f16 and was repeated with a smaller loss scale.
    pub overflows: u64,
    pub warnings: Vec<String>,
    /// What the objective reports.
    pub figures: BTreeMap<String, f64>,
}

impl<'a, D: Device> Steps<'a, D> {
    /// `executor` has the weights and the state that training starts from.
    pub fn of(
        job: &'a Job,
        executor: Executor<D>,
        policy: Policy,
        loss_scale: Option<LossScale>,
    ) -> Steps<'a, D> {
        Steps {
            feed: Feed::of(executor.plan(), job.recipe.train.seed),
            micro_batch: MicroBatch::with_capacity(executor.plan().extent),
            arena_peak_bytes: executor.plan().peak_live_bytes() as u64,
            executor,
            job,
            policy,
            packing: Packing::default(),
            shares: Shares::default(),
            extents: Vec::new(),
            spare_samples: Vec::new(),
            loss_scale: loss_scale.or(LossScale::of(job.request.precision)),
            liveness: None,
            objective: ObjectiveNumbers::of(job),
            rollouts: None,
        }
    }

    pub fn job(&self) -> &'a Job {
        self.job
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    pub fn loss_scale(&self) -> Option<LossScale> {
        self.loss_scale
    }

    /// Checks after the first updates that every tensor is trained; `lrs_before` are the rates of earlier updates.
    pub fn watch_liveness(&mut self, lrs_before: impl Iterator<Item = f64>) {
        self.liveness = Liveness::begin(self.job, lrs_before);
    }

    /// Whether the report of every step is read before the next step begins: a step that overflowed must be repeated
    /// first, the liveness check and an objective read the device anyway, and a CPU has nothing to overlap.
    pub fn must_wait(&self) -> bool {
        self.loss_scale.is_some()
            || self.objective.is_some()
            || self.liveness.as_ref().is_some_and(Liveness::ends_next)
            || !self.executor.device().is_asynchronous()
    }

    /// Queues the micro-batches of an optimizer step.
    pub fn begin(&mut self, step: u64, lr: f64) -> Result<QueuedStep, Failure> {
        let train = self.train_set();
        let batch = self.job.rows().batches.step_samples(step);
        let generated: Vec<u32>;
        let chosen = match &train {
            Samples::OfData(_) => &batch.samples[..],
            Samples::Generated(set) => {
                generated = (0..set.len() as u32).collect();
                &generated
            }
        };
        let length = |sample: u32| train.length(sample as usize);
        let tokens = chosen.iter().map(|sample| u64::from(length(*sample))).sum();
        let supervised = chosen.iter().map(|sample| u64::from(train.supervised(*sample as usize))).sum();
        let shortest = chosen.iter().copied().min_by_key(|sample| length(*sample));
        let rank = self.job.request.rank;
        self.shares.divide(chosen, length, rank.of);
        let mut samples = std::mem::take(&mut self.spare_samples);
        samples.clear();
        samples.extend_from_slice(self.shares.of(rank.index));
        let queued = QueuedStep {
            step,
            epoch: batch.epoch_after,
            lr,
            tokens,
            supervised,
            samples,
            rounds: self.count_rounds()?,
            filler: shortest.expect("a step has a sample"),
        };
        self.prepare_objective(&queued)?;
        if self.executor.has_laps() {
            // Without clipping, a lap already runs the updates of the layers that it completes.
            let scale = self.scale();
            self.feed.write_hyper(&mut self.executor, lr, step + 1, scale);
        }
        self.run_micro_batches(&queued)?;
        Ok(queued)
    }

    /// Passes without gradients that the objective needs of a step.
    fn prepare_objective(&mut self, step: &QueuedStep) -> Result<(), Failure> {
        let (train, batch) = (self.train_set(), self.job.rows().batches.batch_of(step.step));
        let Steps { executor, feed, micro_batch, objective, .. } = self;
        let Some(objective) = objective else { return Ok(()) };
        let mut passes = Passes { executor, feed, micro_batch };
        objective.prepare(&mut passes, (&train, Which::Train), &step.samples, Some(batch))
    }

    /// What generates answers, if the run does.
    pub fn prepare_rollouts(&mut self, dir: &RunDir, first_step: u64) -> Result<(), Failure> {
        self.rollouts = Rollouts::of(self.job, &self.executor, dir, first_step)?;
        Ok(())
    }

    /// Whether a step needs answers that are not generated yet.
    pub fn lacks_answers(&self, step: u64) -> bool {
        self.rollouts.as_ref().is_some_and(|rollouts| rollouts.lacks(step))
    }

    /// Generates and scores the answers of a step. Returns what to say about them.
    pub fn generate(&mut self, step: u64) -> Result<Option<String>, Failure> {
        let Steps { executor, rollouts, .. } = self;
        rollouts.as_mut().map_or(Ok(None), |rollouts| rollouts.generate(executor, step))
    }

    /// Log-probabilities of the reference that are computed before the first step, or were in an earlier part of the run.
    pub fn prepare_reference(&mut self, dir: &RunDir, first_step: u64) -> Result<(), Failure> {
        let rows = self.job.rows();
        let Steps { executor, feed, micro_batch, objective, .. } = self;
        let Some(objective) = objective else { return Ok(()) };
        if first_step > 0 {
            objective.read_before(&dir.checkpoint(first_step))?;
        }
        let mut passes = Passes { executor, feed, micro_batch };
        objective.prepare_cache(&mut passes, [Some(&rows.train), rows.eval.as_ref()], dir, first_step)
    }

    /// Queues the update of a step and the copy of its report.
    pub fn update(&mut self, step: &QueuedStep) -> Result<(), Failure> {
        let scale = self.scale();
        self.feed.write_hyper(&mut self.executor, step.lr, step.step + 1, scale);
        let extent = self.executor.plan().extent;
        self.executor.run(Entry::Update, &extent)?;
        self.executor.run(Entry::Refresh, &extent)?;
        self.feed.begin_report(&mut self.executor).map_err(Failure::from)
    }

    /// Waits for the report of a step. A step that overflowed in f16 is repeated with a smaller loss scale. A step that
    /// is not finite changed nothing: it is replayed to find the cause, and the run fails.
    pub fn finish(
        &mut self,
        step: &mut QueuedStep,
        team: Option<&mut Team>,
    ) -> Result<FinishedStep, Failure> {
        let mut report = self.feed.finish_report(&mut self.executor)?;
        let mut overflows = 0;
        while !report.finite && self.loss_scale.as_mut().is_some_and(LossScale::shrink) {
            overflows += 1;
            self.run_micro_batches(step)?;
            self.update(step)?;
            report = self.feed.finish_report(&mut self.executor)?;
        }
        if !report.finite {
            let culprit = self.replay(&step.samples, step.step)?;
            let failure = not_finite(&self.train_set(), step, &report, culprit.as_ref());
            return Err(match team {
                Some(team) => team.first_informed(failure, culprit.is_some())?,
                None => failure,
            });
        }
        if let Some(loss_scale) = &mut self.loss_scale {
            loss_scale.see_finite();
        }
        let mut warnings = Vec::new();
        // Answers with equal rewards, or pairs beyond a hinge, have no gradient: nothing can be said about such a step.
        let is_shown = self.objective.is_none() || report.grad_norm > 0.0;
        if is_shown && let Some(liveness) = self.liveness.take_if(|liveness| liveness.see_update(step.lr)) {
            warnings = liveness.end(&mut self.executor, team)?;
        }
        self.spare_samples = std::mem::take(&mut step.samples);
        let sums = self.feed.read_figures(&mut self.executor)?;
        let mut figures =
            self.objective.as_ref().map(|objective| objective.figures(&sums)).unwrap_or_default();
        figures.extend(self.rollouts.iter().flat_map(Rollouts::figures));
        Ok(FinishedStep { report, overflows, warnings, figures })
    }

    /// Computes the largest micro-batch of the run and discards the result, so that a run that would later run out of
    /// memory or exceed its plan fails before anything is trained. Skipped if step `first` begins with a micro-batch
    /// that is as large.
    pub fn run_largest(&mut self, first: u64) -> Result<bool, Failure> {
        if self.job.rows().prompts.is_some() {
            let set = longest_answers(self.job, self.executor.plan().extent)?;
            return self.run_discarded(&set, 0..set.len() as u32, first).map(|()| true);
        }
        let (train, batches) = (&self.job.rows().train, &self.job.rows().batches);
        let ranks = self.job.request.rank.of;
        let largest = largest_samples(batches, train, &self.policy, ranks)?;
        // Several ranks always run it: all of them or none have to.
        if ranks == 1 {
            let samples = batches.step_samples(first).samples;
            self.pack(&samples)?;
            let begins = self.packing.micro_batches().next().unwrap_or_default();
            let begins = begins.iter().map(|position| samples[*position as usize]);
            if token_and_row_count(train, begins) >= token_and_row_count(train, largest.iter().copied()) {
                return Ok(false);
            }
        }
        self.run_discarded(train, largest, first).map(|()| true)
    }

    /// Computes a micro-batch and discards the result.
    fn run_discarded(
        &mut self,
        set: &TokenSet,
        samples: impl IntoIterator<Item = u32>,
        first: u64,
    ) -> Result<(), Failure> {
        self.micro_batch.fill(set, samples).map_err(Failure::disk)?;
        // Where the micro-step contains updates, a loss that is not finite keeps them from changing anything.
        self.feed.write_loss_weight(&mut self.executor, f64::NAN);
        self.feed.write_micro_batch(&mut self.executor, &self.micro_batch, first)?;
        let extent = self.micro_batch.extent();
        if self.executor.has_laps() {
            self.executor.run_laps(&[extent], |_, _| Ok::<(), Failure>(()))?;
        } else {
            self.executor.run_with_sums(Entry::MicroStep, &extent, false)?;
        }
        // Waits for the device, so that its failure is reported here.
        self.feed.read_report(&mut self.executor)?;
        clear(&mut self.executor, LeafKind::Gradient)?;
        clear(&mut self.executor, LeafKind::State)
    }

    fn train_set(&self) -> Samples<'a> {
        match &self.rollouts {
            Some(rollouts) => Samples::Generated(rollouts.set()),
            None => Samples::OfData(&self.job.rows().train),
        }
    }

    fn pack(&mut self, samples: &[u32]) -> Result<(), Failure> {
        let train = self.train_set();
        pack(&mut self.packing, &self.policy, &train, samples)
    }

    /// The loss scale; 1 where gradients have the range of f32.
    fn scale(&self) -> f64 {
        self.loss_scale.map_or(1.0, |loss_scale| loss_scale.scale())
    }

    /// How many micro-batches this rank runs: at least one, because every rank takes part in the sum of a step. Where
    /// weights are gathered for each micro-batch, all ranks run equally many.
    fn count_rounds(&mut self) -> Result<usize, Failure> {
        let (train, rank) = (self.train_set(), self.job.request.rank);
        let gathers = self.policy.divides_gradients() && !rank.is_only();
        let ranks = if gathers { 0..rank.of } else { rank.index..rank.index + 1 };
        let mut count = 1;
        for index in ranks {
            pack(&mut self.packing, &self.policy, &train, self.shares.of(index))?;
            count = count.max(self.packing.micro_batches().len());
        }
        Ok(count)
    }

    /// Runs the micro-batches of this rank's samples, and empty ones while other ranks have more.
    fn run_micro_batches(&mut self, step: &QueuedStep) -> Result<(), Failure> {
        let train = self.train_set();
        self.pack(&step.samples)?;
        // An objective divides by its own counts.
        let divisor = if self.objective.is_some() { 1.0 } else { step.supervised as f64 };
        let loss_weight = self.scale() / divisor;
        self.feed.write_loss_weight(&mut self.executor, loss_weight);
        self.feed.clear_figures(&mut self.executor);
        if self.executor.has_laps() {
            return self.run_laps(step);
        }
        let Steps { executor, packing, micro_batch, feed, liveness, objective, .. } = self;
        let mut own = packing.micro_batches();
        for round in 1..=step.rounds {
            match own.next() {
                Some(positions) => {
                    let chosen = positions.iter().map(|position| step.samples[*position as usize]);
                    micro_batch.fill(&train, chosen).map_err(Failure::disk)?;
                    objective.iter().for_each(|objective| objective.add_to(micro_batch));
                }
                None => {
                    micro_batch.fill(&train, [step.filler]).map_err(Failure::disk)?;
                    feed.write_loss_weight(executor, 0.0);
                }
            }
            feed.write_micro_batch(executor, micro_batch, step.step)?;
            executor.run_with_sums(Entry::MicroStep, &micro_batch.extent(), round == step.rounds)?;
            if let Some(liveness) = liveness {
                liveness.see_micro_batch(micro_batch);
            }
        }
        Ok(())
    }

    /// Runs the micro-batches of a step in breadth-first order: only the rank's own, or an empty one if it has no samples.
    fn run_laps(&mut self, step: &QueuedStep) -> Result<(), Failure> {
        let train = self.train_set();
        let mut micro_batches = self.packed_samples(&step.samples);
        let Steps { executor, micro_batch, feed, liveness, extents, objective, .. } = self;
        if micro_batches.is_empty() {
            micro_batches.push(vec![step.filler]);
            feed.write_loss_weight(executor, 0.0);
        }
        extents.clear();
        extents.extend(micro_batches.iter().map(|samples| train.extent(samples.iter().copied())));
        executor.run_laps(extents, |executor, number| {
            micro_batch.fill(&train, micro_batches[number].iter().copied()).map_err(Failure::disk)?;
            objective.iter().for_each(|objective| objective.add_to(micro_batch));
            feed.write_micro_batch(executor, micro_batch, step.step)?;
            if let Some(liveness) = liveness {
                liveness.see_micro_batch(micro_batch);
            }
            Ok(())
        })
    }

    /// The samples of each packed micro-batch.
    fn packed_samples(&self, samples: &[u32]) -> Vec<Vec<u32>> {
        let chosen =
            |positions: &[u32]| positions.iter().map(|position| samples[*position as usize]).collect();
        self.packing.micro_batches().map(chosen).collect()
    }

    /// Finds the first operation of a step that wrote a NaN or infinity. The step itself changed only its report,
    /// which the replay does not read, and where updates are early, finite tensors by finite gradients.
    fn replay(&mut self, samples: &[u32], step: u64) -> Result<Option<Culprit>, Failure> {
        clear(&mut self.executor, LeafKind::Gradient)?;
        clear(&mut self.executor, LeafKind::State)?;
        // Another step may have been packed since.
        self.pack(samples)?;
        let (train, micro_batches) = (self.train_set(), self.packed_samples(samples));
        let Steps { executor, micro_batch, feed, objective, .. } = self;
        let mut culprit = None;
        let fill = |executor: &mut Executor<D>, micro_batch: &mut MicroBatch, number: usize| {
            micro_batch.fill(&train, micro_batches[number].iter().copied()).map_err(Failure::disk)?;
            objective.iter().for_each(|objective| objective.add_to(micro_batch));
            feed.write_micro_batch(executor, micro_batch, step)
        };
        if executor.has_laps() {
            let extents: Vec<Extent> =
                micro_batches.iter().map(|samples| train.extent(samples.iter().copied())).collect();
            executor.visit_laps(&extents, |executor, turn| {
                match turn {
                    _ if culprit.is_some() => {}
                    Turn::Feed(number) => fill(executor, micro_batch, number)?,
                    Turn::Run(steps, extent) => {
                        culprit = find_among(executor, Entry::MicroStep, steps, &extent, Some(micro_batch))?;
                    }
                }
                Ok::<(), Failure>(())
            })?;
        } else {
            for number in 0..micro_batches.len() {
                fill(executor, micro_batch, number)?;
                culprit = find_culprit(executor, Entry::MicroStep, Some(micro_batch))?;
                if culprit.is_some() {
                    break;
                }
            }
        }
        match culprit {
            Some(culprit) => Ok(Some(culprit)),
            // Every gradient is finite, so it is their norm.
            None => find_culprit(executor, Entry::Update, None),
        }
    }
}

/// As many samples of the largest length as fit the plan: the longest prompt with the longest answer.
fn longest_answers(job: &Job, extent: Extent) -> Result<TokenSet, Failure> {
    let rows = job.rows();
    let prompt = rows.train.longest();
    let limits = TokenLimits {
        vocab_size: job.request.spec.vocabulary as u32,
        max_tokens: u32::MAX,
        overflow: Overflow::Error,
    };
    let longest = longest_together(job, rows);
    let mut builder = TokenSetBuilder::new(limits).needing(RowsNeeded::Answers { count: 1 });
    for _ in 0..(extent.tokens / longest).clamp(1, extent.segments.max(1)) {
        let sample = EncodedSample::of_tokens(vec![0; longest], prompt);
        builder
            .push_group(rows.train.place(0), GroupKind::Rewarded, &[(sample, 0.0)])
            .map_err(Failure::data)?;
    }
    builder.finish().map_err(Failure::data)
}

fn not_finite(
    train: &TokenSet,
    step: &QueuedStep,
    report: &StepReport,
    culprit: Option<&Culprit>,
) -> Failure {
    let (samples, number) = (&step.samples, step.step + 1);
    let places: Vec<String> =
        samples.iter().take(4).map(|sample| train.place(*sample as usize).to_string()).collect();
    let more = if samples.len() > 4 { format!(" and {} more", samples.len() - 4) } else { String::new() };
    let first = culprit.map_or(String::new(), |culprit| format!("\n  {}", culprit.describe(train)));
    let failure = Failure::training(format!(
        "step {number} is not finite: loss {}, gradient norm {}; its samples are {}{more}; trained weights are unchanged{first}",
        report.loss,
        report.grad_norm,
        places.join(", ")
    ));
    if number == 1 || culprit.is_some_and(Culprit::is_weight) {
        return failure
            .hint("the weights are suspect: look for NaN in the checkpoint or the initial adapter");
    }
    failure.hint("a lower `train.lr` is the usual remedy; checkpoints written before are intact")
}

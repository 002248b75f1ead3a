//! The training loop: batches in, metrics and adapters out.
//!
//! One optimizer step runs `micro_step` for each micro-batch, then `update` and `refresh`. The loss is
//! divided once, by the supervised tokens of the whole step, so how a step is cut changes no result.
//! Between the first and the last step nothing large is allocated: buffers are made for the plan's
//! extent and used again.

use super::lr::{LearningRate, Schedule};
use super::metrics::{EvalRow, MetricsRow, MetricsWriter, read_rss};
use super::progress::Progress;
use super::resume::{self, Start};
use super::run_dir::RunDir;
use super::tensors;
use crate::data::batch::BatchPlan;
use crate::data::micro_batch::{MicroBatch, Packing};
use crate::data::tokens::TokenSet;
use crate::failure::Failure;
use crate::host;
use crate::job::{Data, Job};
use crate::planning::for_each_eval_batch;
use crate::recipe::{self, Warmup};
use smidgen_compile::Policy;
use smidgen_compile::forward::{input, state};
use smidgen_ir::{Entry, LeafKind, Plan, ValueId};
use smidgen_runtime::{Device, DeviceError, Executor, counter};
use std::collections::BTreeMap;
use std::time::Instant;

/// What a finished run reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    pub steps: u64,
    pub first_loss: f64,
    pub last_loss: f64,
}

/// The choices that a checkpoint holds, so that a resumed run makes the same.
#[derive(Clone, Debug, PartialEq)]
pub struct RunPolicy {
    pub micro_tokens: usize,
    pub policy: Policy,
}

#[derive(Debug)]
pub struct Trainer<'a, D> {
    executor: Executor<D>,
    job: &'a Job,
    dir: RunDir,
    run_policy: RunPolicy,
    inputs: Inputs,
    micro_batch: MicroBatch,
    packing: Packing,
    dropout_keys: Vec<u64>,
}

/// The leaves that the loop writes and reads.
#[derive(Clone, Copy, Debug)]
struct Inputs {
    ids: ValueId,
    positions: ValueId,
    boundaries: ValueId,
    rows: ValueId,
    labels: ValueId,
    dropout_keys: Option<ValueId>,
    loss_weight: ValueId,
    hyper: ValueId,
    report: ValueId,
    eval_loss: ValueId,
}

impl Inputs {
    fn of(plan: &Plan) -> Inputs {
        let leaf = |name: &str| plan.leaf_named(name).unwrap_or_else(|| panic!("the plan has no `{name}`"));
        Inputs {
            ids: leaf(input::IDS),
            positions: leaf(input::POSITIONS),
            boundaries: leaf(input::BOUNDARIES),
            rows: leaf(input::ROWS),
            labels: leaf(input::LABELS),
            dropout_keys: plan.leaf_named(input::DROPOUT_KEYS),
            loss_weight: leaf(input::LOSS_WEIGHT),
            hyper: leaf(input::HYPER),
            report: leaf(state::REPORT),
            eval_loss: leaf(state::EVAL_LOSS),
        }
    }
}

/// What `update` reports of a step.
#[derive(Clone, Copy, Debug)]
struct StepReport {
    loss: f64,
    grad_norm: f64,
    finite: bool,
}

impl<'a, D: Device> Trainer<'a, D> {
    /// Reserves the memory of the plan on the device and fills it: weights, adapters, moments.
    pub fn load(
        job: &'a Job,
        plan: Plan,
        device: D,
        dir: RunDir,
        run_policy: RunPolicy,
        start: &Start,
    ) -> Result<Trainer<'a, D>, Failure> {
        let inputs = Inputs::of(&plan);
        let extent = plan.extent;
        let mut executor = Executor::load(plan, device).map_err(device_failure)?;
        tensors::load_weights(&mut executor, &job.model)?;
        clear(&mut executor, LeafKind::Gradient);
        clear(&mut executor, LeafKind::Moment);
        clear(&mut executor, LeafKind::State);
        match start {
            Start::Beginning => tensors::start_adapters(&mut executor, job)?,
            Start::Checkpoint { folder, .. } => resume::read_state(&mut executor, job, folder)?,
        }
        executor.run(Entry::Refresh, &extent).map_err(device_failure)?;
        Ok(Trainer {
            executor,
            job,
            dir,
            run_policy,
            inputs,
            micro_batch: MicroBatch::with_capacity(extent),
            packing: Packing::default(),
            dropout_keys: Vec::with_capacity(extent.tokens),
        })
    }

    /// Trains from `first` (updates done) to the end and saves the adapter.
    pub fn run(
        mut self,
        batches: &mut BatchPlan,
        first: u64,
        metrics: &mut MetricsWriter,
        progress: &Progress,
    ) -> Result<Outcome, Failure> {
        let job = self.job;
        let Data::Rows(rows) = &job.data else { unreachable!("training without data is refused before") };
        let (train, total) = (&rows.train, batches.total_steps());
        let schedule = learning_rate(&job.recipe, total);
        let settings = &job.recipe.train;
        let mut outcome = Outcome { steps: total, first_loss: f64::NAN, last_loss: f64::NAN };
        for step in first..total {
            let started = Instant::now();
            let (epoch, row) = self.step(batches, train, step, schedule.lr(step))?;
            let done = step + 1;
            let row = self.finish_row(row, done, epoch, schedule.lr(step), started);
            metrics.write_step(&row)?;
            progress.step(done, row.loss, row.lr, row.tokens_per_s);
            if step == first {
                outcome.first_loss = row.loss;
            }
            outcome.last_loss = row.loss;
            if settings.eval_every > 0 && (done.is_multiple_of(settings.eval_every) || done == total) {
                let eval = rows.eval.as_ref().expect("the recipe refuses `eval_every` without `data.eval`");
                let row = self.evaluate(eval, done, epoch)?;
                metrics.write_eval(&row)?;
                progress.say(&format!("step {done}/{total}  eval_loss {:.4}", row.eval_loss));
            }
            if settings.save_every > 0 && done.is_multiple_of(settings.save_every) {
                metrics.sync()?;
                self.save_checkpoint(done)?;
            }
        }
        metrics.sync()?;
        let Trainer { executor, dir, .. } = &mut self;
        dir.write_folder("adapter", |folder| tensors::save_adapter(executor, job, folder))?;
        Ok(outcome)
    }

    /// One optimizer step. Returns the epochs done after it and a row without times and memory.
    fn step(
        &mut self,
        batches: &mut BatchPlan,
        train: &TokenSet,
        step: u64,
        lr: f64,
    ) -> Result<(f64, MetricsRow), Failure> {
        let batch = batches.step_samples(step);
        let (samples, epoch) = (batch.samples, batch.epoch_after);
        let tokens: u64 = samples.iter().map(|sample| u64::from(train.length(*sample as usize))).sum();
        let supervised: u64 =
            samples.iter().map(|sample| u64::from(train.supervised(*sample as usize))).sum();
        let lengths = samples.iter().map(|sample| train.length(*sample as usize));
        self.packing.pack(lengths, self.run_policy.micro_tokens).map_err(Failure::world)?;
        self.write_f64(self.inputs.loss_weight, &[1.0 / supervised as f64]);
        let packing = std::mem::take(&mut self.packing);
        for positions in packing.micro_batches() {
            self.micro_batch.fill(train, positions.iter().map(|position| samples[*position as usize]));
            self.write_micro_batch(step);
            let extent = self.micro_batch.extent();
            self.executor.run(Entry::MicroStep, &extent).map_err(device_failure)?;
        }
        self.packing = packing;
        self.write_f64(self.inputs.hyper, &[lr, (step + 1) as f64]);
        let extent = self.executor.plan().extent;
        self.executor.run(Entry::Update, &extent).map_err(device_failure)?;
        self.executor.run(Entry::Refresh, &extent).map_err(device_failure)?;
        let report = self.read_report();
        if !report.finite {
            return Err(not_finite(train, samples, step + 1, &report));
        }
        let row = MetricsRow {
            step: step + 1,
            epoch,
            loss: report.loss,
            reg_loss: None,
            grad_norm: report.grad_norm,
            lr,
            tokens,
            supervised_tokens: supervised,
            step_ms: 0.0,
            tokens_per_s: 0.0,
            device_bytes: None,
            device_free_bytes: None,
            device_peak_bytes: None,
            pinned_bytes: 0,
            host_rss_bytes: None,
            host_peak_bytes: None,
        };
        Ok((epoch, row))
    }

    fn finish_row(&self, row: MetricsRow, step: u64, epoch: f64, lr: f64, started: Instant) -> MetricsRow {
        let seconds = started.elapsed().as_secs_f64();
        let memory = read_rss();
        let (rss, peak) = (memory.map(|memory| memory.rss_bytes), memory.map(|memory| memory.peak_bytes));
        MetricsRow {
            step,
            epoch,
            lr,
            step_ms: seconds * 1e3,
            tokens_per_s: row.tokens as f64 / seconds,
            // On the CPU the device's memory is the process's.
            device_bytes: rss,
            device_free_bytes: host::free_memory_bytes(),
            device_peak_bytes: peak,
            host_rss_bytes: rss,
            host_peak_bytes: peak,
            ..row
        }
    }

    fn write_micro_batch(&mut self, step: u64) {
        let Trainer { executor, micro_batch, inputs, dropout_keys, job, .. } = self;
        write_i32(executor, inputs.ids, &micro_batch.ids);
        write_i32(executor, inputs.positions, &micro_batch.positions);
        write_i32(executor, inputs.boundaries, &micro_batch.segments);
        write_i32(executor, inputs.rows, &micro_batch.rows);
        write_i32(executor, inputs.labels, &micro_batch.labels);
        if let Some(id) = inputs.dropout_keys {
            let seed = job.recipe.train.seed;
            dropout_keys.clear();
            dropout_keys.extend(micro_batch.sample_of_token.iter().zip(&micro_batch.positions).map(
                |(sample, position)| counter::token_key(seed, step, u64::from(*sample), *position as u64),
            ));
            write_pieces(executor, id, dropout_keys.iter().map(|key| key.to_le_bytes()));
        }
    }

    /// Loss over the evaluation samples: summed NLL ÷ supervised tokens.
    fn evaluate(&mut self, set: &TokenSet, step: u64, epoch: f64) -> Result<EvalRow, Failure> {
        let started = Instant::now();
        let micro_tokens = self.executor.plan().extent.tokens;
        self.write_f64(self.inputs.eval_loss, &[0.0]);
        self.write_f64(self.inputs.loss_weight, &[1.0]);
        let (mut samples, mut tokens, mut supervised) = (0, 0, 0);
        for_each_eval_batch(set, self.job.recipe.eval.limit, micro_tokens, |range| {
            self.micro_batch.fill(set, range.clone());
            self.write_micro_batch(step);
            let extent = self.micro_batch.extent();
            samples += u64::from(range.end - range.start);
            tokens += extent.tokens as u64;
            supervised += extent.rows as u64;
            self.executor.run(Entry::Eval, &extent).map_err(device_failure)
        })?;
        let mut sum = [0u8; 8];
        self.executor.read(self.inputs.eval_loss, &mut sum);
        Ok(EvalRow {
            step,
            epoch,
            eval_loss: f64::from_le_bytes(sum) / supervised as f64,
            eval_samples: samples,
            eval_tokens: tokens,
            eval_supervised_tokens: supervised,
            eval_ms: started.elapsed().as_secs_f64() * 1e3,
            scores: BTreeMap::new(),
        })
    }

    fn save_checkpoint(&mut self, step: u64) -> Result<(), Failure> {
        let Trainer { executor, job, dir, run_policy, .. } = self;
        dir.write_folder(&format!("checkpoint-{step}"), |folder| {
            resume::write_state(executor, job, run_policy, step, folder)
        })?;
        dir.prune_checkpoints(job.recipe.train.keep)
    }

    fn read_report(&mut self) -> StepReport {
        let mut bytes = [0u8; 32];
        self.executor.read(self.inputs.report, &mut bytes);
        let number = |index: usize| {
            f64::from_le_bytes(bytes[8 * index..8 * index + 8].try_into().expect("eight bytes"))
        };
        StepReport { loss: number(0), grad_norm: number(1), finite: number(3) == 1.0 }
    }

    fn write_f64(&mut self, id: ValueId, numbers: &[f64]) {
        write_pieces(&mut self.executor, id, numbers.iter().map(|number| number.to_le_bytes()));
    }
}

fn learning_rate(recipe: &recipe::Recipe, total: u64) -> LearningRate {
    let schedule = match recipe.train.schedule {
        recipe::Schedule::Constant => Schedule::Constant,
        recipe::Schedule::Linear => Schedule::Linear,
        recipe::Schedule::Cosine => Schedule::Cosine,
    };
    let warmup = match recipe.train.warmup {
        Warmup::Steps(steps) => steps as f64,
        Warmup::Fraction(fraction) => fraction,
    };
    LearningRate::new(schedule, recipe.train.lr, warmup, total)
}

fn not_finite(train: &TokenSet, samples: &[u32], step: u64, report: &StepReport) -> Failure {
    let places: Vec<String> =
        samples.iter().take(4).map(|sample| train.place(*sample as usize).to_string()).collect();
    let more = if samples.len() > 4 { format!(" and {} more", samples.len() - 4) } else { String::new() };
    Failure::world(format!(
        "step {step} is not finite: loss {}, gradient norm {}; its samples are {}{more}; the adapter was not changed by it",
        report.loss,
        report.grad_norm,
        places.join(", ")
    ))
    .hint("a lower `train.lr` is the usual remedy; the last checkpoint is intact")
}

pub fn device_failure(error: DeviceError) -> Failure {
    Failure::world(error)
}

/// Sets all leaves of a kind to zero.
fn clear<D: Device>(executor: &mut Executor<D>, kind: LeafKind) {
    for (id, _) in tensors::leaf_names(executor.plan(), kind) {
        let result: Result<(), std::convert::Infallible> = executor.fill(id, &mut |_, piece| {
            piece.fill(0);
            Ok(())
        });
        match result {
            Ok(()) => {}
        }
    }
}

fn write_i32<D: Device>(executor: &mut Executor<D>, id: ValueId, numbers: &[i32]) {
    write_pieces(executor, id, numbers.iter().map(|number| number.to_le_bytes()));
}

/// Writes fixed-size elements through a small buffer, in little-endian order on any host.
fn write_pieces<D: Device, const N: usize>(
    executor: &mut Executor<D>,
    id: ValueId,
    elements: impl Iterator<Item = [u8; N]>,
) {
    let mut piece = [0u8; 4096];
    let (mut offset, mut filled) = (0, 0);
    for element in elements {
        piece[filled..filled + N].copy_from_slice(&element);
        filled += N;
        if filled + N > piece.len() {
            executor.write_at(id, offset, &piece[..filled]);
            offset += filled;
            filled = 0;
        }
    }
    executor.write_at(id, offset, &piece[..filled]);
}

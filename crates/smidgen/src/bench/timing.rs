//! Times a plan: loads it, fills it with synthetic numbers, and measures its steps.
//!
//! A step does what the trainer does: write the inputs, run the micro-batches, update, refresh, read the report. The
//! profile runs one step operation by operation and waits after each, so its sum is more than the time of a step.

use super::synthetic::Synthetic;
use crate::failure::Failure;
use crate::session::feed::Feed;
use crate::session::weights::clear;
use smidgen_compile::names::input;
use smidgen_ir::{Entry, Extent, LeafKind, Plan, ValueId};
use smidgen_runtime::device::FillError;
use smidgen_runtime::{Device, Executor, counter};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Instant;

/// A batch of samples of equal length, split into micro-batches.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    pub samples: usize,
    pub tokens: usize,
    /// Samples per micro-batch.
    pub together: usize,
}

impl Batch {
    pub fn step_tokens(&self) -> usize {
        self.samples * self.tokens
    }

    /// The extent of this many samples. The last token of a sample predicts nothing.
    fn extent(&self, samples: usize) -> Extent {
        let tokens = samples * self.tokens;
        Extent { tokens, rows: tokens - samples, segments: samples, audio: 0 }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Times {
    pub load_s: f64,
    /// From the beginning of loading to the end of the first step.
    pub first_step_s: f64,
    /// The time of each step after the warm-up.
    pub step_ms: Vec<f64>,
    /// Time of one step by phase and operation: (name, milliseconds, count); empty if not requested.
    pub profile: Vec<(String, f64, usize)>,
}

impl Times {
    /// Times from the beginning of loading until now.
    pub fn loaded(begin: Instant) -> Times {
        Times { load_s: begin.elapsed().as_secs_f64(), ..Times::default() }
    }

    /// Times steps after a warm-up.
    pub fn add_steps(
        &mut self,
        begin: Instant,
        warm_up: usize,
        steps: usize,
        mut step: impl FnMut() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        for index in 0..warm_up + steps {
            let started = Instant::now();
            step()?;
            if index == 0 {
                self.first_step_s = begin.elapsed().as_secs_f64();
            }
            if index >= warm_up {
                self.step_ms.push(started.elapsed().as_secs_f64() * 1e3);
            }
        }
        Ok(())
    }

    pub fn median_ms(&self) -> f64 {
        let mut sorted = self.step_ms.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// A loaded plan with synthetic contents.
#[derive(Debug)]
pub struct Bench<D> {
    pub executor: Executor<D>,
    feed: Feed,
    batch: Batch,
    vocabulary: usize,
    updates: u64,
}

impl<D: Device> Bench<D> {
    pub fn load(plan: Plan, device: D, batch: Batch, vocabulary: usize) -> Result<Bench<D>, Failure> {
        let feed = Feed::of(&plan, 1);
        let mut executor = Executor::load(plan, device)?;
        fill_synthetic(&mut executor, LeafKind::Weight)?;
        fill_synthetic(&mut executor, LeafKind::Adapter)?;
        for kind in [LeafKind::Gradient, LeafKind::Moment, LeafKind::State] {
            clear(&mut executor, kind)?;
        }
        let extent = executor.plan().extent;
        executor.run(Entry::Refresh, &extent)?;
        Ok(Bench { executor, feed, batch, vocabulary, updates: 0 })
    }

    /// Runs one optimizer step and returns its loss.
    pub fn step(&mut self) -> Result<f64, Failure> {
        let Batch { samples, together, .. } = self.batch;
        self.feed.write_loss_weight(&mut self.executor, 1.0 / self.batch.step_tokens() as f64);
        self.updates += 1;
        self.feed.write_hyper(&mut self.executor, 1e-5, self.updates, 1.0);
        let sizes = (0..samples).step_by(together).map(|first| together.min(samples - first));
        if self.executor.has_laps() {
            self.run_laps(sizes.collect())?;
        } else {
            for size in sizes {
                let extent = self.write_inputs(size);
                self.executor.run(Entry::MicroStep, &extent)?;
            }
        }
        let extent = self.executor.plan().extent;
        self.executor.run(Entry::Update, &extent)?;
        self.executor.run(Entry::Refresh, &extent)?;
        let report = self.feed.read_report(&mut self.executor)?;
        Ok(report.loss)
    }

    /// Runs the micro-batches of a step in breadth-first order; `sizes` are the samples of each micro-batch.
    fn run_laps(&mut self, sizes: Vec<usize>) -> Result<(), Failure> {
        let Bench { executor, batch, vocabulary, .. } = self;
        let extents: Vec<Extent> = sizes.iter().map(|samples| batch.extent(*samples)).collect();
        executor.run_laps(&extents, |executor, number| {
            write_inputs(executor, *batch, *vocabulary, sizes[number]);
            Ok::<(), Failure>(())
        })
    }

    fn write_inputs(&mut self, samples: usize) -> Extent {
        write_inputs(&mut self.executor, self.batch, self.vocabulary, samples);
        self.batch.extent(samples)
    }

    /// Times each operation of one step, waiting after each: (phase and operation, milliseconds, count).
    pub fn profile(&mut self) -> Result<Vec<(String, f64, usize)>, Failure> {
        let mut times = Vec::new();
        let extent = self.begin_micro_step();
        let planned = self.executor.plan().extent;
        for (entry, extent) in
            [(Entry::MicroStep, extent), (Entry::Update, planned), (Entry::Refresh, planned)]
        {
            let seconds = self.time_each(entry, &extent, 1)?;
            for (step, seconds) in self.executor.plan().entry(entry).steps.iter().zip(seconds) {
                let name = format!("{:?} {}", step.phase, step.op.name()).to_lowercase();
                times.push((name, seconds * 1e3));
            }
        }
        Ok(sum_by_name(times))
    }

    /// Writes the inputs of a micro-batch.
    pub fn begin_micro_step(&mut self) -> Extent {
        self.feed.write_loss_weight(&mut self.executor, 1.0 / self.batch.step_tokens() as f64);
        self.write_inputs(self.batch.together.min(self.batch.samples))
    }

    /// Times a whole entry point, in seconds.
    pub fn time_entry(&mut self, entry: Entry, extent: &Extent) -> Result<f64, Failure> {
        self.wait()?;
        let begin = Instant::now();
        self.executor.run(entry, extent)?;
        self.wait()?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Times each step of an entry point, in seconds, waiting after each. `repeats` runs share one wait, because a wait
    /// takes long compared with the shortest kernels of a GPU.
    pub fn time_each(&mut self, entry: Entry, extent: &Extent, repeats: usize) -> Result<Vec<f64>, Failure> {
        self.wait()?;
        let mut times = Vec::new();
        for index in 0..self.executor.plan().entry(entry).steps.len() {
            let begin = Instant::now();
            for _ in 0..repeats {
                self.executor.run_step(entry, index, extent)?;
            }
            self.wait()?;
            times.push(begin.elapsed().as_secs_f64() / repeats as f64);
        }
        Ok(times)
    }

    fn wait(&mut self) -> Result<(), Failure> {
        self.feed.read_report(&mut self.executor)?;
        Ok(())
    }
}

/// Sums times with the same name: (name, sum, count), largest sum first.
pub(super) fn sum_by_name(times: Vec<(String, f64)>) -> Vec<(String, f64, usize)> {
    let mut sums: BTreeMap<String, (f64, usize)> = BTreeMap::new();
    for (name, ms) in times {
        let sum = sums.entry(name).or_default();
        *sum = (sum.0 + ms, sum.1 + 1);
    }
    let mut rows: Vec<_> = sums.into_iter().map(|(name, (ms, count))| (name, ms, count)).collect();
    rows.sort_by(|a, b| b.1.total_cmp(&a.1));
    rows
}

fn write_inputs<D: Device>(executor: &mut Executor<D>, batch: Batch, vocabulary: usize, samples: usize) {
    let (length, tokens) = (batch.tokens, samples * batch.tokens);
    let id = |token: usize| (counter::uniform(3, token as u64) * (vocabulary - 1) as f32) as i32;
    let mut write = |name: &str, numbers: &mut dyn Iterator<Item = i32>| {
        if let Some(leaf) = executor.plan().leaf_named(name) {
            let bytes: Vec<u8> = numbers.flat_map(i32::to_le_bytes).collect();
            executor.write(leaf, &bytes);
        }
    };
    write(input::IDS, &mut (0..tokens).map(id));
    write(input::POSITIONS, &mut (0..tokens).map(|token| (token % length) as i32));
    write(input::BOUNDARIES, &mut (0..=samples).map(|sample| (sample * length) as i32));
    let rows = || (0..tokens).filter(|token| (token + 1) % length > 0);
    write(input::ROWS, &mut rows().map(|token| token as i32));
    write(input::LABELS, &mut rows().map(|token| id(token + 1)));
}

pub(super) fn fill_synthetic<D: Device>(executor: &mut Executor<D>, kind: LeafKind) -> Result<(), Failure> {
    let leaves: Vec<ValueId> = executor.plan().leaves(kind).map(|(id, _)| id).collect();
    for id in leaves {
        let plan = executor.plan();
        let (rows, columns) = plan.value(id).ty.shape.at(&plan.extent);
        let source = Synthetic::of(plan.value(id).ty.storage, rows, columns);
        let fill = &mut |offset: usize, piece: &mut [u8]| {
            source.fill(offset, piece);
            Ok(())
        };
        let filled: Result<(), FillError<Infallible>> = executor.fill(id, fill);
        filled?;
    }
    Ok(())
}

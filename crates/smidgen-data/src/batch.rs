//! Which samples make up which optimizer step: a pure function of (data, seed, step).
//!
//! Each epoch is a new permutation by (seed, epoch); with several sources it is the mixture of `mix.rs`. Batches never
//! cross epochs; the last, smaller batch of an epoch is a step too. A batch is a number of samples, or samples in order
//! until the next would exceed a number of tokens.
//! A resumed run asks for any step and must get the same samples, so the permutation must never change; a test pins it.
//! How a batch is cut into micro-batches is in `micro_batch.rs`.

use std::cell::{Ref, RefCell};
use std::ops::Range;
use thiserror::Error;

use crate::mix::Mix;
use crate::permutation::permute;
use crate::tokens::TokenSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchSize {
    Samples(u64),
    /// At most this many tokens, but at least one sample.
    Tokens(u64),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RunLength {
    Steps(u64),
    /// May be fractional.
    Epochs(f64),
}

#[derive(Clone, Copy, Debug)]
pub struct BatchOptions {
    pub batch: BatchSize,
    pub run_length: RunLength,
    pub seed: u64,
    pub shuffle: bool,
    /// Consecutive steps that train on the same batch; usually 1.
    pub repeats: u64,
}

#[derive(Debug, Error, PartialEq)]
pub enum BatchError {
    #[error("`train.batch` is 0, a step needs at least one sample")]
    NoSamples,
    #[error("`train.batch_tokens` is 0, a step needs at least one token")]
    NoTokens,
    #[error("`train.steps` is 0, there is nothing to train")]
    NoSteps,
    #[error("`train.epochs` is {epochs}, it must be a number above 0")]
    BadEpochs { epochs: f64 },
    #[error("the data has {samples} samples, at most {} can be batched", u32::MAX)]
    TooManySamples { samples: usize },
}

/// The samples of one optimizer step.
#[derive(Debug)]
pub struct StepSamples<'a> {
    /// From 0.
    pub epoch: u64,
    /// Indices into the token set, in the order in which they are packed.
    pub samples: Ref<'a, [u32]>,
    /// Epochs finished after this step: `epoch` plus the fraction of its batches that is done.
    pub epoch_after: f64,
}

/// The order of all samples over a whole run.
#[derive(Clone, Debug)]
pub struct BatchPlan {
    options: BatchOptions,
    /// Rows of the set.
    samples: u32,
    /// Samples of a row, which are consecutive and stay in one batch.
    sequences: u32,
    /// `None` if there is one source.
    mix: Option<Mix>,
    /// Tokens of each sample; empty if batches are counted in samples.
    lengths: Vec<u32>,
    epochs: EpochStarts,
    total_steps: u64,
    /// The loaded epoch. Only one is in memory, because an epoch of a large data set is large: a cell, so that all who
    /// read the order share its buffers.
    current: RefCell<Epoch>,
}

/// One epoch's permutation and where its batches start in it.
#[derive(Clone, Debug, Default)]
struct Epoch {
    index: Option<u64>,
    order: Vec<u32>,
    /// Batch b is `order[starts[b]..starts[b + 1]]`.
    starts: Vec<u32>,
    /// Scratch of `Mix::fill`.
    pass: Vec<u32>,
}

#[derive(Clone, Debug)]
enum EpochStarts {
    /// Every epoch has the same number of batches.
    Uniform { batches: u64 },
    /// The first step of each epoch, then the number of steps of all epochs. Needed for batches of tokens, whose number
    /// depends on the permutation.
    Table(Vec<u64>),
}

/// Samples that a walk over all steps visits, in whole epochs: it takes about 0.1 s, and planning walks about 14 times.
const MOST_VISITED: u64 = 2_000_000;

impl BatchPlan {
    pub fn new(set: &TokenSet, options: BatchOptions) -> Result<Self, BatchError> {
        BatchPlan::mixed(set, &[], options)
    }

    /// `weights` has a weight for each source of the set; it is empty if there is one source.
    pub fn mixed(set: &TokenSet, weights: &[f64], options: BatchOptions) -> Result<Self, BatchError> {
        let lengths: Vec<u32> = match options.batch {
            BatchSize::Samples(0) => return Err(BatchError::NoSamples),
            BatchSize::Tokens(0) => return Err(BatchError::NoTokens),
            BatchSize::Samples(_) => Vec::new(),
            BatchSize::Tokens(_) => (0..set.len()).map(|sample| set.length(sample)).collect(),
        };
        match options.run_length {
            RunLength::Steps(0) => return Err(BatchError::NoSteps),
            RunLength::Epochs(epochs) if !(epochs.is_finite() && epochs > 0.0) => {
                return Err(BatchError::BadEpochs { epochs });
            }
            RunLength::Steps(_) | RunLength::Epochs(_) => {}
        }
        let samples =
            u32::try_from(set.len()).map_err(|_| BatchError::TooManySamples { samples: set.len() })?;
        let sequences = set.rows().sequences();
        let rows_of = |samples: Range<usize>| samples.start / sequences..samples.end / sequences;
        let mut plan = BatchPlan {
            options,
            samples: samples / sequences as u32,
            sequences: sequences as u32,
            mix: (weights.len() > 1).then(|| Mix::new(set.sources().map(rows_of), weights)),
            lengths,
            epochs: EpochStarts::Uniform { batches: 0 },
            total_steps: 0,
            current: RefCell::default(),
        };
        let mut epoch = Epoch::default();
        let epochs_differ = options.shuffle || plan.mix.is_some();
        match (options.batch, epochs_differ) {
            (BatchSize::Tokens(_), true) => plan.tabulate_epochs(&mut epoch),
            (BatchSize::Samples(_), _) | (BatchSize::Tokens(_), false) => {
                plan.load_epoch(&mut epoch, 0);
                let batches = epoch.batches();
                plan.epochs = EpochStarts::Uniform { batches };
                plan.total_steps = match options.run_length {
                    RunLength::Steps(steps) => steps,
                    RunLength::Epochs(epochs) => (epochs * batches as f64).ceil() as u64 * options.repeats,
                };
            }
        }
        // The buffers have held an epoch, and all epochs are equally large: none grows later.
        plan.current = RefCell::new(epoch);
        Ok(plan)
    }

    /// Samples of each source per epoch; empty if there is one source.
    pub fn samples_of_sources(&self) -> Vec<u32> {
        self.mix.as_ref().map_or(Vec::new(), Mix::samples_per_epoch)
    }

    pub fn total_steps(&self) -> u64 {
        self.total_steps
    }

    /// Steps of the whole first epoch. Later epochs may have another number if batches are counted in tokens.
    pub fn first_epoch_steps(&self) -> u64 {
        match &self.epochs {
            EpochStarts::Uniform { batches } => *batches * self.options.repeats,
            EpochStarts::Table(starts) => starts[1],
        }
    }

    /// The number of a step's batch, counted over all epochs.
    pub fn batch_of(&self, step: u64) -> u64 {
        step / self.options.repeats
    }

    /// Batches of the run.
    fn total_batches(&self) -> u64 {
        self.total_steps.div_ceil(self.options.repeats)
    }

    /// Number of epochs that the run starts, including an unfinished last one.
    pub fn epochs(&self) -> u64 {
        self.total_steps.checked_sub(1).map_or(0, |last| self.locate(last).0 + 1)
    }

    /// Epochs finished after this many steps, like [`StepSamples::epoch_after`].
    pub fn epochs_after(&self, steps: u64) -> f64 {
        let Some(last) = steps.checked_sub(1) else { return 0.0 };
        let (epoch, batch) = self.locate(last);
        let batches = match &self.epochs {
            EpochStarts::Uniform { batches } => *batches,
            EpochStarts::Table(starts) => starts[epoch as usize + 1] - starts[epoch as usize],
        };
        epoch as f64 + (batch + 1) as f64 / batches as f64
    }

    /// The samples of a step, counted from 0. Cheap within an epoch; a new epoch is permuted into the same buffers.
    /// The samples must be dropped before another step is asked for.
    pub fn step_samples(&self, step: u64) -> StepSamples<'_> {
        assert!(step < self.total_steps, "step {step} of a run of {} steps", self.total_steps);
        let (epoch, batch) = self.locate(step);
        if self.current.borrow().index != Some(epoch) {
            self.load_epoch(&mut self.current.borrow_mut(), epoch);
        }
        let current = self.current.borrow();
        let epoch_after = epoch as f64 + (batch + 1) as f64 / current.batches() as f64;
        StepSamples { epoch, samples: Ref::map(current, |current| current.batch(batch)), epoch_after }
    }

    pub fn heap_bytes(&self) -> usize {
        let table = match &self.epochs {
            EpochStarts::Uniform { .. } => 0,
            EpochStarts::Table(starts) => starts.capacity() * size_of::<u64>(),
        };
        let current = self.current.borrow();
        let orders = current.order.capacity() + current.pass.capacity();
        let indices = self.lengths.capacity() + orders + current.starts.capacity();
        table + indices * size_of::<u32>()
    }

    /// Calls `on_batch` with the samples of every step. If all epochs are the same, only the first one is visited, and
    /// of a very long run only the first epochs. Returns whether no other batch is possible.
    pub(crate) fn for_each_distinct_batch<E>(
        &self,
        mut on_batch: impl FnMut(&[u32]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut epoch = self.current.borrow_mut();
        let (mut step, mut visited) = (0, 0);
        while step < self.total_batches() {
            if visited >= MOST_VISITED {
                return Ok(false);
            }
            visited += u64::from(self.samples);
            let (index, batch) = self.locate_batch(step);
            self.load_epoch(&mut epoch, index);
            let end = epoch.batches().min(batch + self.total_batches() - step);
            for batch in batch..end {
                on_batch(epoch.batch(batch))?;
            }
            step += end - batch;
            if !self.options.shuffle && self.mix.is_none() {
                break;
            }
        }
        Ok(true)
    }

    /// Samples of a step at most.
    pub(crate) fn most_samples(&self) -> usize {
        match self.options.batch {
            BatchSize::Samples(samples) => {
                let rows = usize::try_from(samples).unwrap_or(usize::MAX).min(self.samples as usize);
                rows * self.sequences as usize
            }
            BatchSize::Tokens(_) => self.samples as usize,
        }
    }

    /// Tokens of a step at most, if they are limited.
    pub(crate) fn most_tokens(&self) -> Option<usize> {
        match self.options.batch {
            BatchSize::Samples(_) => None,
            BatchSize::Tokens(tokens) => Some(usize::try_from(tokens).unwrap_or(usize::MAX)),
        }
    }

    /// Calls `on_batch` with the samples of every step of the first epoch, or of the run if it is shorter.
    pub(crate) fn for_each_first_batch<E>(
        &self,
        mut on_batch: impl FnMut(&[u32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut epoch = self.current.borrow_mut();
        self.load_epoch(&mut epoch, 0);
        let batches = epoch.batches().min(self.total_batches());
        (0..batches).try_for_each(|batch| on_batch(epoch.batch(batch)))
    }

    /// Epoch and batch within it.
    fn locate(&self, step: u64) -> (u64, u64) {
        self.locate_batch(self.batch_of(step))
    }

    fn locate_batch(&self, step: u64) -> (u64, u64) {
        match &self.epochs {
            EpochStarts::Uniform { batches } => (step / batches, step % batches),
            EpochStarts::Table(starts) => {
                let epoch = starts.partition_point(|&start| start <= step) - 1;
                (epoch as u64, step - starts[epoch])
            }
        }
    }

    fn load_epoch(&self, epoch: &mut Epoch, index: u64) {
        let options = &self.options;
        match &self.mix {
            None => permute(&mut epoch.order, self.samples, options.seed, index, options.shuffle),
            Some(mix) => {
                mix.fill(&mut epoch.order, &mut epoch.pass, options.seed, index, options.shuffle);
            }
        }
        epoch.index = Some(index);
        epoch.starts.clear();
        match options.batch {
            BatchSize::Samples(batch) => {
                let batch = usize::try_from(batch).unwrap_or(usize::MAX);
                epoch.starts.extend((0..self.samples).step_by(batch.min(self.samples as usize)));
            }
            BatchSize::Tokens(target) => {
                let mut tokens = 0;
                for (position, &sample) in epoch.order.iter().enumerate() {
                    let length = u64::from(self.lengths[sample as usize]);
                    tokens += length;
                    if position == 0 || tokens > target {
                        epoch.starts.push(position as u32);
                        tokens = length;
                    }
                }
            }
        }
        epoch.starts.push(self.samples);
        if self.sequences > 1 {
            let samples = |row: u32| row * self.sequences..(row + 1) * self.sequences;
            epoch.order = epoch.order.iter().copied().flat_map(samples).collect();
            epoch.starts.iter_mut().for_each(|start| *start *= self.sequences);
        }
    }

    fn tabulate_epochs(&mut self, epoch: &mut Epoch) {
        let mut starts = vec![0];
        let mut first_step = 0;
        for index in 0.. {
            self.load_epoch(epoch, index);
            let batches = epoch.batches();
            first_step += batches;
            starts.push(first_step);
            match self.options.run_length {
                RunLength::Steps(steps) if first_step >= steps => {
                    self.total_steps = steps;
                    break;
                }
                RunLength::Epochs(epochs) if epochs <= (index + 1) as f64 => {
                    let last_share = epochs - index as f64;
                    let last_steps = (last_share * batches as f64).ceil() as u64;
                    self.total_steps = first_step - batches + last_steps;
                    break;
                }
                RunLength::Steps(_) | RunLength::Epochs(_) => {}
            }
        }
        starts.shrink_to_fit();
        self.epochs = EpochStarts::Table(starts);
    }
}

impl Epoch {
    fn batches(&self) -> u64 {
        self.starts.len() as u64 - 1
    }

    fn batch(&self, batch: u64) -> &[u32] {
        let batch = batch as usize;
        &self.order[self.starts[batch] as usize..self.starts[batch + 1] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token_builder::test_sets::set_of_lengths;
    use proptest::prelude::*;

    fn plan(lengths: &[usize], batch: BatchSize, run_length: RunLength, shuffle: bool) -> BatchPlan {
        let options = BatchOptions { batch, run_length, seed: 42, shuffle, repeats: 1 };
        BatchPlan::new(&set_of_lengths(lengths), options).unwrap()
    }

    fn all_steps(plan: &BatchPlan) -> Vec<(u64, Vec<u32>, f64)> {
        (0..plan.total_steps())
            .map(|step| {
                let step = plan.step_samples(step);
                (step.epoch, step.samples.to_vec(), step.epoch_after)
            })
            .collect()
    }

    #[test]
    fn batches_do_not_cross_epochs_and_the_small_one_is_stepped() {
        let plan = plan(&[2; 5], BatchSize::Samples(2), RunLength::Steps(7), false);
        let expected = [
            (0, vec![0, 1], 1.0 / 3.0),
            (0, vec![2, 3], 2.0 / 3.0),
            (0, vec![4], 1.0),
            (1, vec![0, 1], 1.0 + 1.0 / 3.0),
            (1, vec![2, 3], 1.0 + 2.0 / 3.0),
            (1, vec![4], 2.0),
            (2, vec![0, 1], 2.0 + 1.0 / 3.0),
        ];
        assert_eq!(all_steps(&plan), expected);
    }

    #[test]
    fn epochs_are_known_without_visiting_every_step() {
        for (batch, run_length) in [
            (BatchSize::Samples(2), RunLength::Steps(7)),
            (BatchSize::Tokens(9), RunLength::Epochs(2.5)),
            (BatchSize::Tokens(9), RunLength::Steps(8)),
        ] {
            let plan = plan(&[2, 5, 3, 7, 4], batch, run_length, true);
            let steps = all_steps(&plan);
            assert_eq!(plan.epochs(), steps.last().unwrap().0 + 1, "{batch:?}");
            assert_eq!(plan.epochs_after(0), 0.0);
            for (step, (_, _, epoch_after)) in steps.iter().enumerate() {
                assert_eq!(plan.epochs_after(step as u64 + 1), *epoch_after, "{batch:?} {step}");
            }
        }
    }

    #[test]
    fn shuffled_batches_are_slices_of_the_epochs_permutation() {
        let plan = plan(&[2; 10], BatchSize::Samples(4), RunLength::Steps(6), true);
        assert_eq!(*plan.step_samples(0).samples, [3, 5, 6, 9]);
        assert_eq!(*plan.step_samples(2).samples, [7, 4]);
        assert_eq!(*plan.step_samples(4).samples, [3, 6, 7, 4]);
    }

    #[test]
    fn token_batches_stop_before_the_target_is_exceeded() {
        let lengths = [3, 5, 4, 9, 2, 2, 4];
        let plan = plan(&lengths, BatchSize::Tokens(8), RunLength::Epochs(1.0), false);
        let batches: Vec<Vec<u32>> = all_steps(&plan).into_iter().map(|step| step.1).collect();
        // 3 + 5 = 8; 4 (9 would exceed); 9 alone though longer than the target; 2 + 2 + 4 = 8.
        assert_eq!(batches, [vec![0, 1], vec![2], vec![3], vec![4, 5, 6]]);
    }

    #[test]
    fn epochs_become_steps_rounded_up() {
        for (epochs, expected) in [(1.0, 3), (2.0, 6), (0.5, 2), (1.4, 5), (0.01, 1)] {
            let length = RunLength::Epochs(epochs);
            let by_samples = plan(&[2; 5], BatchSize::Samples(2), length, true);
            assert_eq!(by_samples.total_steps(), expected, "{epochs} epochs");
            // Equal lengths: the same batches, through the table of epochs.
            let by_tokens = plan(&[2; 5], BatchSize::Tokens(4), length, true);
            assert_eq!(by_tokens.total_steps(), expected, "{epochs} epochs of tokens");
        }
        let large = plan(&[2; 5], BatchSize::Samples(u64::MAX), RunLength::Epochs(3.0), true);
        assert_eq!(large.total_steps(), 3);
    }

    #[test]
    fn senseless_options_are_refused() {
        let refused = |batch, run_length| {
            let options = BatchOptions { batch, run_length, seed: 1, shuffle: true, repeats: 1 };
            BatchPlan::new(&set_of_lengths(&[2]), options).unwrap_err()
        };
        let (one, steps) = (BatchSize::Samples(1), RunLength::Steps(1));
        assert_eq!(refused(BatchSize::Samples(0), steps), BatchError::NoSamples);
        assert_eq!(refused(BatchSize::Tokens(0), steps), BatchError::NoTokens);
        assert_eq!(refused(one, RunLength::Steps(0)), BatchError::NoSteps);
        for epochs in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(refused(one, RunLength::Epochs(epochs)), BatchError::BadEpochs { .. }));
        }
    }

    #[test]
    fn a_new_epoch_reuses_the_memory_of_the_last() {
        for batch in [BatchSize::Samples(3), BatchSize::Tokens(40)] {
            let lengths: Vec<usize> = (0..500).map(|i| 2 + i * 7 % 31).collect();
            let plan = plan(&lengths, batch, RunLength::Epochs(6.0), true);
            let before = plan.heap_bytes();
            all_steps(&plan);
            assert_eq!(plan.heap_bytes(), before);
        }
    }

    fn any_batch() -> impl Strategy<Value = BatchSize> {
        prop_oneof![(1u64..12).prop_map(BatchSize::Samples), (1u64..60).prop_map(BatchSize::Tokens)]
    }

    proptest! {
        #[test]
        fn every_sample_appears_once_per_epoch(
            lengths in prop::collection::vec(2usize..20, 1..40),
            batch in any_batch(),
            shuffle: bool,
        ) {
            let plan = plan(&lengths, batch, RunLength::Epochs(3.0), shuffle);
            let steps = all_steps(&plan);
            for epoch in 0..3 {
                let of_epoch = steps.iter().filter(|step| step.0 == epoch);
                let mut seen: Vec<u32> = of_epoch.flat_map(|step| step.1.iter().copied()).collect();
                seen.sort_unstable();
                prop_assert_eq!(seen, (0..lengths.len() as u32).collect::<Vec<_>>());
            }
            prop_assert_eq!(steps.last().map(|step| step.2), Some(3.0));
            for (_, samples, _) in &steps {
                let tokens: usize = samples.iter().map(|&sample| lengths[sample as usize]).sum();
                match batch {
                    BatchSize::Samples(batch) => prop_assert!(samples.len() as u64 <= batch),
                    BatchSize::Tokens(target) => {
                        prop_assert!(samples.len() == 1 || tokens as u64 <= target);
                    }
                }
            }
        }

        #[test]
        fn any_step_can_be_asked_for_first(
            lengths in prop::collection::vec(2usize..20, 1..40),
            batch in any_batch(),
            steps in 1u64..60,
            at in 0.0f64..1.0,
        ) {
            let step = (at * steps as f64) as u64;
            let walked = plan(&lengths, batch, RunLength::Steps(steps), true);
            let all = all_steps(&walked);
            // A longer run starts with the same steps.
            let fresh = plan(&lengths, batch, RunLength::Steps(steps + 9), true);
            let asked = fresh.step_samples(step);
            let (epoch, samples, epoch_after) = &all[step as usize];
            prop_assert_eq!(asked.epoch, *epoch);
            prop_assert_eq!(&*asked.samples, &samples[..]);
            prop_assert_eq!(asked.epoch_after, *epoch_after);
        }
    }
}

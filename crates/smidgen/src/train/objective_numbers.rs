//! The numbers that an objective needs of a step before its gradients: from the reference, from the policy as it was, and
//! counts over the whole step.
//!
//! Nothing here is a loss: devices compute losses and weights from these numbers (`smidgen_ir::objective`). Everything that
//! TRL pools over a micro-batch is pooled over the optimizer step, or over all rows of an evaluation, so splitting changes
//! nothing. Log-probabilities without gradients come from the entry points `reference` and `eval`.
//! Left out: the order of a step (`steps.rs`).

use crate::failure::Failure;
use crate::plan::job::Job;
use crate::run_folder::run_dir::RunDir;
use crate::session::feed::Feed;
use smidgen_data::micro_batch::MicroBatch;
use smidgen_data::tokens::TokenSet;
use smidgen_formats::whole_file::write_whole;
use smidgen_ir::objective::{Measure, PairLoss, figure, sequence};
use smidgen_ir::{Entry, Extent, Objective};
use smidgen_recipe::{AnswerMean, AnswerSettings, ReferenceMemory, RewardScale};
use smidgen_runtime::{Device, Executor};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// What the passes run with.
pub struct Passes<'a, D> {
    pub executor: &'a mut Executor<D>,
    pub feed: &'a Feed,
    pub micro_batch: &'a mut MicroBatch,
}

/// Where log-probabilities of the reference come from.
#[derive(Debug)]
enum Source {
    /// The objective has no reference.
    None,
    /// A pass in every step.
    Pass,
    /// Computed before the first step: those of the training rows, and of the evaluation rows.
    Cached([RowsOfSamples; 2]),
}

/// Log-probabilities of the supervised rows of samples.
type RowsOfSamples = HashMap<u32, Vec<f32>>;

/// Which set samples belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Train,
    Eval,
}

#[derive(Debug)]
pub struct ObjectiveNumbers {
    objective: Objective,
    /// Longer sequences are cut.
    max_tokens: usize,
    answers: AnswerSettings,
    source: Source,
    is_nll_reported: bool,
    /// The numbers of each sample.
    numbers: HashMap<u32, [f64; Objective::SEQUENCE_COLUMNS]>,
    /// Of the answers of the training batch, and of evaluated ones: an evaluation between two updates with the same
    /// answers must not change what the second update reads.
    before: [Before; 2],
    /// The set that the numbers are about.
    which: Which,
    counts: Counts,
}

/// Log-probabilities of the rows of answers: before the updates, and of the reference.
#[derive(Debug, Default)]
struct Before {
    /// The training batch that they are about.
    batch: Option<u64>,
    rows: HashMap<u32, Vec<[f32; Objective::BEFORE_COLUMNS]>>,
}

/// Counts over a step, or over an evaluation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    chosen: f64,
    rejected: f64,
    tokens: f64,
    answers: f64,
    divergence: f64,
    reward: f64,
    reward_std: f64,
    zero_std: f64,
}

/// The file of cached log-probabilities, in the run folder.
const CACHE_FILE: &str = "reference.bin";
/// The file of a checkpoint with log-probabilities of the current answers.
const BEFORE_FILE: &str = "answers.bin";

impl ObjectiveNumbers {
    /// `None` if the run minimizes the mean negative log-likelihood.
    pub fn of(job: &Job) -> Option<ObjectiveNumbers> {
        let objective = job.request.objective.clone()?;
        let recipe = &job.recipe;
        let is_cached = match recipe.memory.reference {
            ReferenceMemory::Auto => recipe.changes_base(),
            ReferenceMemory::Pass => false,
            ReferenceMemory::Cached => true,
        };
        let is_nll_reported = matches!(&objective, Objective::Pairs(_)) && !recipe.reports_as_dpo();
        Some(ObjectiveNumbers {
            objective,
            max_tokens: recipe.data.max_tokens,
            answers: recipe.answer_settings(),
            source: match (recipe.has_reference(), is_cached) {
                (false, _) => Source::None,
                (true, false) => Source::Pass,
                (true, true) => Source::Cached(Default::default()),
            },
            is_nll_reported,
            numbers: HashMap::new(),
            before: Default::default(),
            which: Which::Train,
            counts: Counts::default(),
        })
    }

    /// Computes log-probabilities that are cached and writes them to the run folder; or reads them, if the run continues.
    pub fn prepare_cache<D: Device>(
        &mut self,
        passes: &mut Passes<'_, D>,
        sets: [Option<&TokenSet>; 2],
        dir: &RunDir,
        first_step: u64,
    ) -> Result<(), Failure> {
        let Source::Cached(cached) = &mut self.source else { return Ok(()) };
        let path = dir.file(CACHE_FILE);
        if first_step > 0 {
            *cached = read_cache(&path, sets)?;
            return Ok(());
        }
        // Before the first update the policy is the reference, unless an adapter was given and the base is meant.
        let has_entry = passes.executor.plan().entries.iter().any(|entry| entry.entry == Entry::Reference);
        let entry = if has_entry { Entry::Reference } else { Entry::Eval };
        let mut bytes = Vec::new();
        for (set, cached) in sets.into_iter().zip(cached) {
            let Some(set) = set else { continue };
            let samples: Vec<u32> = (0..set.len() as u32).collect();
            *cached = rows_by(passes, entry, set, &samples)?;
            for sample in samples {
                bytes.extend(cached[&sample].iter().flat_map(|value| value.to_le_bytes()));
            }
        }
        if dir.is_written() {
            write_whole(&path, |out| out.write_all(&bytes)).map_err(Failure::disk)?;
        }
        Ok(())
    }

    /// Writes what a checkpoint between two updates with the same answers needs: log-probabilities before the first.
    pub fn write_before(&self, folder: &Path) -> Result<(), Failure> {
        let Before { batch, rows } = &self.before[Which::Train as usize];
        let Some(batch) = batch.filter(|_| self.answers.num_iterations > 1) else { return Ok(()) };
        let mut bytes = batch.to_le_bytes().to_vec();
        let mut samples: Vec<(&u32, _)> = rows.iter().collect();
        samples.sort_unstable_by_key(|(sample, _)| **sample);
        for (sample, rows) in samples {
            bytes.extend(sample.to_le_bytes());
            bytes.extend((rows.len() as u32).to_le_bytes());
            bytes.extend(rows.iter().flatten().flat_map(|value| value.to_le_bytes()));
        }
        write_whole(&folder.join(BEFORE_FILE), |out| out.write_all(&bytes)).map_err(Failure::disk)
    }

    /// Reads what [`Self::write_before`] wrote, if the checkpoint has it.
    pub fn read_before(&mut self, folder: &Path) -> Result<(), Failure> {
        let path = folder.join(BEFORE_FILE);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Failure::file("read", &path, error)),
        };
        let damaged = || Failure::disk(format!("`{}` is damaged", path.display()));
        let mut words = bytes.as_chunks::<4>().0.iter();
        let mut word = || words.next().copied().ok_or_else(damaged);
        let (low, high) = (u32::from_le_bytes(word()?), u32::from_le_bytes(word()?));
        let mut before = Before { batch: Some(u64::from(low) | u64::from(high) << 32), rows: HashMap::new() };
        while let Ok(sample) = word() {
            let mut rows = Vec::new();
            for _ in 0..u32::from_le_bytes(word()?) {
                rows.push([f32::from_le_bytes(word()?), f32::from_le_bytes(word()?)]);
            }
            before.rows.insert(u32::from_le_bytes(sample), rows);
        }
        self.before[Which::Train as usize] = before;
        Ok(())
    }

    /// Makes the numbers of a step, or of all samples of an evaluation. `batch` is the batch that the step trains on.
    pub fn prepare<D: Device>(
        &mut self,
        passes: &mut Passes<'_, D>,
        (set, which): (&TokenSet, Which),
        samples: &[u32],
        batch: Option<u64>,
    ) -> Result<(), Failure> {
        self.numbers.clear();
        self.counts = Counts::default();
        self.which = which;
        match &self.objective {
            Objective::Pairs(_) => self.prepare_pairs(passes, set, which, samples),
            Objective::Labels(_) => self.prepare_labels(passes, set, which, samples),
            Objective::Answers(_) => self.prepare_answers(passes, set, which, samples, batch),
        }
    }

    fn prepare_pairs<D: Device>(
        &mut self,
        passes: &mut Passes<'_, D>,
        set: &TokenSet,
        which: Which,
        samples: &[u32],
    ) -> Result<(), Failure> {
        let reference = self.reference_rows(passes, set, which, samples)?;
        let pairs = samples.len() as f64 / 2.0;
        let chosen = samples.iter().step_by(2);
        let tokens: f64 = chosen.map(|sample| f64::from(set.supervised(*sample as usize))).sum();
        self.counts.chosen = pairs;
        for &sample in samples {
            let skipped = f64::from(set.mark(sample as usize));
            let own = self.numbers.entry(sample).or_default();
            own[sequence::SKIPPED] = skipped;
            own[sequence::REFERENCE] = sum_after(&reference, sample, skipped as usize);
            own[sequence::SHARE] = 1.0 / pairs;
            own[sequence::ROLE] = 1.0 / tokens;
        }
        Ok(())
    }

    fn prepare_labels<D: Device>(
        &mut self,
        passes: &mut Passes<'_, D>,
        set: &TokenSet,
        which: Which,
        samples: &[u32],
    ) -> Result<(), Failure> {
        let reference = self.reference_rows(passes, set, which, samples)?;
        let compares = matches!(&self.objective, Objective::Labels(loss) if loss.compares_divergence);
        let divergence = if compares { self.divergence(passes, set, samples)? } else { 0.0 };
        self.counts.divergence = divergence;
        for &sample in samples {
            let label = f64::from(set.mark(sample as usize));
            let count = if label > 0.0 { &mut self.counts.chosen } else { &mut self.counts.rejected };
            *count += 1.0;
            let own = self.numbers.entry(sample).or_default();
            own[sequence::REFERENCE] = sum_after(&reference, sample, 0);
            own[sequence::SHARE] = 1.0 / samples.len() as f64;
            own[sequence::ROLE] = label;
            own[sequence::DIVERGENCE] = divergence;
        }
        Ok(())
    }

    /// KTO's divergence of the policy from the reference: the mean over prompts with the completion of the row before.
    fn divergence<D: Device>(
        &self,
        passes: &mut Passes<'_, D>,
        set: &TokenSet,
        samples: &[u32],
    ) -> Result<f64, Failure> {
        if samples.len() < 2 {
            return Err(Failure::data("kto compares rows with each other, and a step has only one").hint(
                "raise `train.batch`; the rows must leave at least two for the last step of an epoch",
            ));
        }
        let before = samples.iter().cycle().skip(samples.len() - 1);
        let pairs: Vec<(u32, u32)> = samples.iter().copied().zip(before.copied()).collect();
        let mut sum = 0.0;
        for (entry, sign) in [(Entry::Eval, 1.0), (Entry::Reference, -1.0)] {
            let (most, max_tokens) = (passes.executor.plan().extent, self.max_tokens);
            let fits = |pairs: &[(u32, u32)]| most.contains(&mismatched_extent(set, pairs, max_tokens));
            let mut first = 0;
            while first < pairs.len() {
                let mut end = first + 1;
                while end < pairs.len() && fits(&pairs[first..=end]) {
                    end += 1;
                }
                let chosen = &pairs[first..end];
                passes.micro_batch.fill_mismatched(set, chosen, max_tokens).map_err(Failure::disk)?;
                run_pass(passes, entry, |_, value| sum += sign * f64::from(value))?;
                first = end;
            }
        }
        Ok((sum / samples.len() as f64).max(0.0))
    }

    fn prepare_answers<D: Device>(
        &mut self,
        passes: &mut Passes<'_, D>,
        set: &TokenSet,
        which: Which,
        samples: &[u32],
        batch: Option<u64>,
    ) -> Result<(), Failure> {
        let AnswerSettings { num_iterations, max_completion_length, mean, .. } = self.answers;
        if batch.is_none() || self.before[which as usize].batch != batch {
            let reference = self.reference_rows(passes, set, which, samples)?;
            // With one update per batch, the policy is still the one before the update.
            let old = match num_iterations > 1 && batch.is_some() {
                true => rows_by(passes, Entry::Eval, set, samples)?,
                false => RowsOfSamples::new(),
            };
            let mut before = Before { batch, rows: HashMap::new() };
            for &sample in samples {
                let row = |rows: &RowsOfSamples, index: usize| {
                    rows.get(&sample).map_or(f32::NAN, |rows| rows[index])
                };
                let count = set.supervised(sample as usize) as usize;
                let rows = (0..count).map(|index| [row(&old, index), row(&reference, index)]);
                before.rows.insert(sample, rows.collect());
            }
            self.before[which as usize] = before;
        }
        let rewards: Vec<f64> = samples.iter().map(|sample| f64::from(set.mark(*sample as usize))).collect();
        let advantages =
            advantages(&rewards, self.answers.num_generations, self.answers.scale, &mut self.counts);
        let tokens = |sample: u32| f64::from(set.supervised(sample as usize));
        let all_tokens: f64 = samples.iter().map(|sample| tokens(*sample)).sum();
        let answers = samples.len() as f64;
        (self.counts.tokens, self.counts.answers) = (all_tokens, answers);
        for (&sample, advantage) in samples.iter().zip(advantages) {
            let own = self.numbers.entry(sample).or_default();
            own[sequence::SHARE] = match mean {
                AnswerMean::Answers => 1.0 / (tokens(sample) * answers),
                AnswerMean::Tokens => 1.0 / all_tokens,
                AnswerMean::Longest => 1.0 / (answers * max_completion_length as f64),
            };
            own[sequence::ROLE] = advantage;
        }
        Ok(())
    }

    /// Log-probabilities by the reference; empty if there is none.
    fn reference_rows<D: Device>(
        &self,
        passes: &mut Passes<'_, D>,
        set: &TokenSet,
        which: Which,
        samples: &[u32],
    ) -> Result<RowsOfSamples, Failure> {
        match &self.source {
            Source::None => Ok(RowsOfSamples::new()),
            Source::Pass => rows_by(passes, Entry::Reference, set, samples),
            Source::Cached(cached) => {
                let cached = &cached[usize::from(which == Which::Eval)];
                Ok(samples.iter().map(|sample| (*sample, cached[sample].clone())).collect())
            }
        }
    }

    /// Adds the numbers of its samples to a micro-batch. Samples without numbers count nothing.
    pub fn add_to(&self, micro_batch: &mut MicroBatch) {
        let MicroBatch { segments, sample_of_token, numbers, before, .. } = micro_batch;
        for range in segments.windows(2) {
            let sample = sample_of_token[range[0] as usize];
            numbers.extend(self.numbers.get(&sample).unwrap_or(&Default::default()));
            if let Some(rows) = self.before[self.which as usize].rows.get(&sample) {
                before.extend(rows.iter().flatten());
            }
        }
    }

    /// The figures of a step or an evaluation, under TRL's names, from the sums of the device.
    pub fn figures(&self, sums: &[f64; Objective::FIGURES]) -> BTreeMap<String, f64> {
        let mut found = BTreeMap::new();
        let mut add = |name: &str, value: f64| {
            found.insert(name.to_owned(), value);
        };
        let Counts { chosen, rejected, tokens, answers, .. } = self.counts;
        match &self.objective {
            Objective::Pairs(PairLoss { terms, .. }) => {
                add("rewards_chosen", sums[figure::REWARD_CHOSEN]);
                add("rewards_rejected", sums[figure::REWARD_REJECTED]);
                add("rewards_margins", sums[figure::REWARD_CHOSEN] - sums[figure::REWARD_REJECTED]);
                add("rewards_accuracies", sums[figure::ACCURATE]);
                add("logps_chosen", sums[figure::LOGP_CHOSEN]);
                add("logps_rejected", sums[figure::LOGP_REJECTED]);
                if self.is_nll_reported {
                    add("nll_loss", sums[figure::NLL]);
                }
                if terms.iter().any(|term| term.measure == Measure::Odds) {
                    add("log_odds_ratio", sums[figure::ODDS_RATIO]);
                    add("log_odds_chosen", sums[figure::ODDS]);
                }
            }
            Objective::Labels(loss) => {
                if chosen > 0.0 {
                    add("rewards_chosen", sums[figure::REWARD_CHOSEN] / chosen);
                    add("logps_chosen", sums[figure::LOGP_CHOSEN] / chosen);
                }
                if rejected > 0.0 {
                    add("rewards_rejected", sums[figure::REWARD_REJECTED] / rejected);
                    add("logps_rejected", sums[figure::LOGP_REJECTED] / rejected);
                }
                if chosen > 0.0 && rejected > 0.0 {
                    let margin =
                        sums[figure::REWARD_CHOSEN] / chosen - sums[figure::REWARD_REJECTED] / rejected;
                    add("rewards_margins", margin);
                }
                if loss.compares_divergence {
                    add("kl", self.counts.divergence);
                }
            }
            Objective::Answers(loss) => {
                let ratios = if loss.by_sequence { answers } else { tokens };
                let [low, high] = [figure::CLIPPED_LOW, figure::CLIPPED_HIGH].map(|at| sums[at] / ratios);
                add("clip_ratio_low_mean", low);
                add("clip_ratio_high_mean", high);
                add("clip_ratio_region_mean", low + high);
                add("reward", self.counts.reward);
                add("reward_std", self.counts.reward_std);
                add("frac_reward_zero_std", self.counts.zero_std);
                if loss.beta > 0.0 {
                    add("kl", sums[figure::PENALTY] / tokens);
                }
            }
        }
        found
    }
}

/// How far each reward is above the mean of its group, divided as `scale` says.
pub fn advantages(rewards: &[f64], group: usize, scale: RewardScale, counts: &mut Counts) -> Vec<f64> {
    const LEAST: f64 = 1e-4;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let deviation = |values: &[f64]| {
        // Equal rewards have no deviation, also where their mean is rounded.
        if values.len() < 2 || values.iter().all(|value| *value == values[0]) {
            return 0.0;
        }
        let center = mean(values);
        let squares: f64 = values.iter().map(|value| (value - center).powi(2)).sum();
        (squares / (values.len() - 1) as f64).sqrt()
    };
    let of_batch = deviation(rewards);
    (counts.reward, counts.reward_std) = (mean(rewards), of_batch);
    let mut found = Vec::with_capacity(rewards.len());
    let mut without_signal = 0;
    for own in rewards.chunks(group) {
        let (center, of_group) = (mean(own), deviation(own));
        let divisor = match scale {
            RewardScale::Group => of_group + LEAST,
            RewardScale::Batch => of_batch + LEAST,
            RewardScale::None => 1.0,
        };
        let std = if scale == RewardScale::Batch { of_batch } else { of_group };
        without_signal += if std == 0.0 { own.len() } else { 0 };
        let center = if of_group == 0.0 { own[0] } else { center };
        found.extend(own.iter().map(|reward| (reward - center) / divisor));
    }
    counts.zero_std = without_signal as f64 / rewards.len() as f64;
    found
}

/// The sum of a sample's log-probabilities after the first rows; 0 if they are unknown.
fn sum_after(rows: &RowsOfSamples, sample: u32, skipped: usize) -> f64 {
    rows.get(&sample).map_or(0.0, |rows| rows[skipped..].iter().map(|value| f64::from(*value)).sum())
}

fn mismatched_extent(set: &TokenSet, pairs: &[(u32, u32)], max_tokens: usize) -> Extent {
    let (rows, tokens) = pairs.iter().fold((0, 0), |(rows, tokens), &(prompt, other)| {
        let prompt = (set.length(prompt as usize) - set.supervised(prompt as usize)) as usize;
        let length = max_tokens.min(prompt + set.supervised(other as usize) as usize);
        (rows + length.saturating_sub(prompt), tokens + length)
    });
    Extent { tokens, rows, segments: pairs.len(), audio: 0 }
}

/// The log-probabilities of some samples' rows, from passes of an entry point that fit the plan.
fn rows_by<D: Device>(
    passes: &mut Passes<'_, D>,
    entry: Entry,
    set: &TokenSet,
    samples: &[u32],
) -> Result<RowsOfSamples, Failure> {
    let most = passes.executor.plan().extent;
    let mut found = RowsOfSamples::new();
    let mut first = 0;
    while first < samples.len() {
        let mut end = first + 1;
        while end < samples.len() && most.contains(&set.extent(samples[first..=end].iter().copied())) {
            end += 1;
        }
        let chosen = &samples[first..end];
        passes.micro_batch.fill(set, chosen.iter().copied()).map_err(Failure::disk)?;
        let rows_of = |sample: &u32| std::iter::repeat_n(*sample, set.supervised(*sample as usize) as usize);
        let of_rows: Vec<u32> = chosen.iter().flat_map(rows_of).collect();
        run_pass(passes, entry, |row, value| found.entry(of_rows[row]).or_default().push(value))?;
        first = end;
    }
    Ok(found)
}

/// Runs an entry point on the micro-batch, and calls `see` with each row's log-probability.
fn run_pass<D: Device>(
    passes: &mut Passes<'_, D>,
    entry: Entry,
    mut see: impl FnMut(usize, f32),
) -> Result<(), Failure> {
    let Passes { executor, feed, micro_batch } = passes;
    feed.write_loss_weight(executor, 0.0);
    feed.write_micro_batch(executor, micro_batch, 0)?;
    executor.run(entry, &micro_batch.extent())?;
    let mut row = 0;
    feed.read_row_losses(executor, micro_batch.rows.len(), |loss| {
        see(row, -loss);
        row += 1;
    })?;
    Ok(())
}

fn read_cache(path: &Path, sets: [Option<&TokenSet>; 2]) -> Result<[RowsOfSamples; 2], Failure> {
    let bytes = std::fs::read(path).map_err(|error| {
        Failure::file("read", path, error)
            .hint("the reference cannot be computed in the middle of a run: start it again")
    })?;
    let samples =
        |set: &TokenSet| (0..set.len()).map(|sample| set.supervised(sample) as usize).sum::<usize>();
    let rows: usize = sets.iter().flatten().map(|set| samples(set)).sum();
    if bytes.len() != 4 * rows {
        let (path, given) = (path.display(), bytes.len() / 4);
        return Err(Failure::disk(format!("`{path}` has {given} log-probabilities, the data {rows}"))
            .hint("the data has changed since the run began: start it again"));
    }
    let mut values = bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four));
    let mut read = |set: Option<&TokenSet>| -> RowsOfSamples {
        let all = set.into_iter().flat_map(|set| (0..set.len()).map(move |sample| (sample, set)));
        all.map(|(sample, set)| {
            (sample as u32, values.by_ref().take(set.supervised(sample) as usize).collect())
        })
        .collect()
    };
    Ok([read(sets[0]), read(sets[1])])
}

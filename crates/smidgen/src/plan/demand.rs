//! The micro-batch sizes that the solver may choose from, and for each of them the largest micro-batch of the run.
//!
//! The plan is made for the largest micro-batch that the run will meet, found by packing every step beforehand.
//! Without data, every sample is assumed to have `data.max_tokens` tokens, all but the first of them supervised.
//! Left out: choosing one of the sizes, which the solver does.

use crate::failure::Failure;
use crate::plan::audio::longest_rows;
use crate::plan::job::Job;
use crate::rows::data::{Data, Rows};
use smidgen_compile::Demand;
use smidgen_compile::model::audio::AudioInput;
use smidgen_data::batch::BatchPlan;
use smidgen_data::eval_batch::{eval_extent, largest_extent};
use smidgen_data::micro_batch::{self, Packing, largest_micro_batch, packed_epoch};
use smidgen_data::tokens::TokenSet;
use smidgen_ir::grouped_digits::Grouped;
use smidgen_ir::objective::RowsNeeded;
use smidgen_ir::{Extent, Objective, Policy};
use smidgen_recipe::{AnswerSettings, Batch};

/// Packs samples into micro-batches of the policy's size.
pub fn pack(packing: &mut Packing, policy: &Policy, set: &TokenSet, samples: &[u32]) -> Result<(), Failure> {
    packing.pack_samples(set, samples, policy.micro_tokens).map_err(Failure::data)
}

/// The samples of the run's largest micro-batch, of the policy's size.
pub fn largest_samples(
    batches: &BatchPlan,
    set: &TokenSet,
    policy: &Policy,
    ranks: usize,
) -> Result<Vec<u32>, Failure> {
    micro_batch::largest_samples(batches, set, policy.micro_tokens, ranks).map_err(Failure::data)
}

/// One line: how many rows of an epoch, or of a shorter run, are packed into how many sequences.
pub fn describe_packing(rows: &Rows, policy: &Policy, ranks: usize) -> Result<String, Failure> {
    let tokens = policy.micro_tokens;
    if rows.prompts.is_some() {
        return Ok(format!("the answers of a step, in sequences of up to {} tokens", Grouped(tokens as u64)));
    }
    let packed = packed_epoch(&rows.batches, &rows.train, tokens, ranks).map_err(Failure::data)?;
    let is_whole = rows.train.stats().rows.kept == rows.train.len() as u64;
    let noun = match (is_whole, packed.samples) {
        (true, 1) => "row",
        (true, _) => "rows",
        (false, 1) => "sample",
        (false, _) => "samples",
    };
    let sequences = if packed.sequences == 1 { "sequence" } else { "sequences" };
    let is_shorter = rows.batches.total_steps() < rows.batches.first_epoch_steps();
    let span = if is_shorter { "in this run" } else { "per epoch" };
    let full = 100.0 * packed.tokens as f64 / (packed.sequences.max(1) * tokens as u64) as f64;
    Ok(format!(
        "{} {noun} in {} {sequences} of up to {} tokens {span} ({full:.0} % full)",
        Grouped(packed.samples),
        Grouped(packed.sequences),
        Grouped(tokens as u64)
    ))
}

/// Tokens of the longest samples that stay in one micro-batch, over the whole run.
pub fn longest_together(job: &Job, rows: &Rows) -> usize {
    let recipe = &job.recipe;
    if rows.prompts.is_some() {
        return rows.train.longest() + recipe.answer_settings().max_completion_length;
    }
    longest_in(job, &rows.train)
}

/// The same for one set; KTO's prompts also meet the completions of other rows.
fn longest_in(job: &Job, set: &TokenSet) -> usize {
    match compares_divergence(job) {
        true => set.longest_together().max(set.longest_mismatch().min(job.recipe.data.max_tokens)),
        false => set.longest_together(),
    }
}

fn compares_divergence(job: &Job) -> bool {
    matches!(&job.request.objective, Some(Objective::Labels(loss)) if loss.compares_divergence)
}

/// What training needs from a plan.
pub struct DemandShape {
    /// One for each micro-batch size, largest first.
    pub demands: Vec<Demand>,
    /// Tokens per average optimizer step of one rank.
    pub step_tokens: f64,
    /// Tokens per average optimizer step of all ranks together.
    pub all_tokens: f64,
}

impl DemandShape {
    /// With the micro-batch size of a policy, or else of the recipe.
    pub fn of(job: &Job, policy: Option<&Policy>) -> Result<DemandShape, Failure> {
        let pinned = policy.map(|policy| policy.micro_tokens);
        DemandShape::with(job, pinned.or(job.recipe.memory.pins.micro_tokens))
    }

    /// With every micro-batch size, also if the recipe pins one.
    pub fn unpinned(job: &Job) -> Result<DemandShape, Failure> {
        DemandShape::with(job, None)
    }

    fn with(job: &Job, pinned: Option<usize>) -> Result<DemandShape, Failure> {
        match &job.data {
            Data::Rows(rows) => DemandShape::of_rows(job, rows, pinned),
            Data::Assumed { .. } => DemandShape::assumed(job, pinned),
        }
    }

    fn of_rows(job: &Job, rows: &Rows, pinned: Option<usize>) -> Result<DemandShape, Failure> {
        if rows.prompts.is_some() {
            return DemandShape::of_prompts(job, rows, pinned);
        }
        let longest = longest_together(job, rows);
        let ranks = job.request.rank.of;
        let largest = |micro_tokens: usize| {
            largest_micro_batch(&rows.batches, &rows.train, micro_tokens, ranks).map_err(Failure::data)
        };
        let whole = largest(usize::MAX)?;
        let stats = rows.train.stats();
        let mean = stats.tokens as f64 / rows.train.len() as f64;
        let sequences = job.recipe.rows_needed().sequences();
        let step_tokens = match job.recipe.train.batch {
            Batch::Samples(rows) => {
                (mean * (rows * sequences) as f64 / ranks as f64).min(whole.step_tokens as f64)
            }
            Batch::Tokens(_) => whole.step_tokens as f64,
        };
        let mut demands = Vec::new();
        for micro_tokens in micro_token_choices(pinned, whole.step_tokens, longest)? {
            let largest = largest(micro_tokens)?;
            let mut extent = largest.micro_batch;
            let evaluated = rows.eval.iter().chain(rows.choices.as_ref().map(|choices| &choices.set));
            let longest_evaluated = evaluated.clone().map(|set| longest_in(job, set)).max().unwrap_or(0);
            let mut tokens = extent.tokens.max(longest_evaluated);
            if compares_divergence(job) {
                // Prompts meet the completions of other rows, so any of their tokens may be supervised.
                tokens = tokens.max(longest);
                let mixed = Extent { tokens, rows: tokens, segments: extent.segments, audio: 0 };
                extent = largest_extent(extent, mixed);
            }
            for set in evaluated {
                extent = largest_extent(extent, eval_extent(set, 0, tokens));
            }
            let micro_steps = step_tokens / largest.micro_batch.tokens as f64;
            demands.push(Demand { micro_tokens, extent, step: whole.micro_batch, micro_steps });
        }
        Ok(DemandShape { demands, step_tokens, all_tokens: step_tokens * ranks as f64 })
    }

    /// Answers are not known yet, so each may be as long as it may get, and as short as one token.
    fn of_prompts(job: &Job, rows: &Rows, pinned: Option<usize>) -> Result<DemandShape, Failure> {
        let AnswerSettings { num_generations, max_completion_length, .. } = job.recipe.answer_settings();
        let Batch::Samples(batch) = job.recipe.train.batch else {
            unreachable!("the recipe refuses a batch of tokens")
        };
        let stats = rows.train.stats();
        let answers = batch.min(rows.train.len()) * num_generations;
        let longest = longest_together(job, rows);
        let step_tokens = answers * longest;
        let mean = stats.mean_tokens + max_completion_length as f64;
        let extent = |tokens: usize| {
            let segments = answers.min(tokens / (stats.shortest_tokens + 1));
            Extent { tokens, rows: tokens.min(segments * max_completion_length), segments, audio: 0 }
        };
        let demand = |micro_tokens: usize| Demand {
            micro_tokens,
            extent: extent(micro_tokens.min(step_tokens)),
            step: extent(step_tokens),
            micro_steps: (mean * answers as f64 / micro_tokens as f64).max(1.0),
        };
        let choices = micro_token_choices(pinned, step_tokens, longest)?;
        let tokens = mean * answers as f64;
        Ok(DemandShape {
            demands: choices.into_iter().map(demand).collect(),
            step_tokens: tokens,
            all_tokens: tokens,
        })
    }

    fn assumed(job: &Job, pinned: Option<usize>) -> Result<DemandShape, Failure> {
        let max_tokens = job.recipe.data.max_tokens;
        let needed = job.recipe.rows_needed();
        let sequences = match needed {
            RowsNeeded::Prompts => job.recipe.answer_settings().num_generations,
            _ => needed.sequences(),
        };
        let samples = match job.recipe.train.batch {
            Batch::Samples(rows) => rows * sequences,
            Batch::Tokens(tokens) => (tokens / max_tokens).max(1),
        };
        let all_tokens = (samples * max_tokens) as f64;
        // For the rank with the most samples.
        let samples = samples.div_ceil(job.request.rank.of);
        let step_tokens = samples * max_tokens;
        let clip_rows = match job.request.audio {
            AudioInput::None => 0,
            AudioInput::Embeddings | AudioInput::Encoded | AudioInput::Subsampled => {
                longest_rows(job.recipe.data.max_audio_seconds).min(max_tokens)
            }
        };
        let demand = |micro_tokens: usize| {
            let segments = micro_tokens / max_tokens / needed.together() * needed.together();
            let tokens = segments * max_tokens;
            Demand {
                micro_tokens: if pinned.is_some() { micro_tokens } else { tokens },
                extent: Extent { tokens, rows: tokens - segments, segments, audio: segments * clip_rows },
                step: Extent {
                    tokens: step_tokens,
                    rows: step_tokens - samples,
                    segments: samples,
                    audio: samples * clip_rows,
                },
                micro_steps: samples as f64 / segments as f64,
            }
        };
        let choices = micro_token_choices(pinned, step_tokens, max_tokens * needed.together())?;
        let mut demands: Vec<Demand> = choices.into_iter().map(demand).collect();
        demands.dedup();
        Ok(DemandShape { demands, step_tokens: step_tokens as f64, all_tokens })
    }
}

/// A micro-batch of this many samples, each of the maximum length.
pub fn samples_at_once(samples: usize, max_tokens: usize) -> Demand {
    let tokens = samples * max_tokens;
    let extent = Extent { tokens, rows: tokens - samples, segments: samples, audio: 0 };
    Demand { micro_tokens: tokens, extent, step: extent, micro_steps: 1.0 }
}

/// Micro-batch sizes in tokens: parts of a step that hold the longest sample.
fn micro_token_choices(
    pinned: Option<usize>,
    step_tokens: usize,
    longest: usize,
) -> Result<Vec<usize>, Failure> {
    if let Some(pinned) = pinned {
        if pinned < longest {
            return Err(Failure::recipe(format!(
                "`memory.micro_tokens = {pinned}` is below the longest sample, which has {longest} tokens"
            ))
            .hint(format!(
                "`memory.micro_tokens = {longest}`, or `data.max_tokens = {pinned}` to shorten the samples"
            )));
        }
        return Ok(vec![pinned.min(step_tokens)]);
    }
    let mut choices: Vec<usize> = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
        .into_iter()
        .map(|parts| step_tokens.div_ceil(parts))
        .filter(|tokens| *tokens > longest)
        .collect();
    choices.push(longest);
    Ok(choices)
}

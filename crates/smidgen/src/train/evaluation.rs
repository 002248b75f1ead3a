//! Evaluations during a run: the loss of held-out rows, and the accuracy on their choices.
//!
//! They run between two steps through the plan's `eval` entry. They reuse the memory of the steps and change nothing
//! that a step reads. Left out: generated answers, which `smidgen eval` scores after training.

use super::objective_numbers::{Passes, Which};
use super::replay::find_culprit;
use super::steps::Steps;
use crate::console::progress::{Counted, Progress};
use crate::failure::Failure;
use crate::logs::metrics::EvalRow;
use crate::ranks::team::Team;
use crate::rows::choice::{ChoiceScores, ChoiceSet};
use crate::session::likelihood::{check_finite, evaluated_samples, log_likelihoods, run_eval_batches};
use smidgen_data::eval_batch::for_each_eval_batch;
use smidgen_data::micro_batch::MicroBatch;
use smidgen_data::tokens::TokenSet;
use smidgen_ir::{Entry, Rank, Sharding};
use smidgen_runtime::Device;
use std::collections::BTreeMap;
use std::time::Instant;

/// The loss of the evaluation samples after a step, and the accuracy on their choices. If all rows are choices, the
/// loss is that of the right choices.
pub fn evaluate<D: Device>(
    steps: &mut Steps<'_, D>,
    mut team: Option<&mut Team>,
    step: u64,
    progress: &Progress,
) -> Result<EvalRow, Failure> {
    let rows = steps.job().rows();
    let started = Instant::now();
    let mut row = EvalRow {
        step,
        epoch: rows.batches.epochs_after(step),
        eval_loss: f64::NAN,
        eval_samples: 0,
        eval_tokens: 0,
        eval_supervised_tokens: 0,
        eval_ms: 0.0,
        scores: BTreeMap::new(),
    };
    if let Some(set) = &rows.eval {
        evaluate_loss(steps, team.as_deref_mut(), set, &mut row, progress)?;
    }
    if let Some(choices) = &rows.choices {
        let scores = score_choices(steps, team, choices, step, progress)?;
        if rows.eval.is_none() {
            row.eval_loss = scores.gold_nll / scores.gold_tokens as f64;
            row.eval_samples = choices.rows.len() as u64;
            row.eval_tokens = choices.set.stats().tokens;
            row.eval_supervised_tokens = scores.gold_tokens;
        }
        let means = [("acc", scores.acc), ("acc_norm", scores.acc_norm), ("acc_bytes", scores.acc_bytes)];
        for (name, mean) in means {
            row.scores.insert(format!("eval_{name}"), mean.value);
            row.scores.extend(mean.stderr.map(|stderr| (format!("eval_{name}_stderr"), stderr)));
        }
    }
    let has_rows = rows.eval.is_some() || rows.choices.is_some();
    assert!(has_rows, "the recipe refuses `eval_every` without `data.eval`");
    row.eval_ms = started.elapsed().as_secs_f64() * 1e3;
    Ok(row)
}

/// Which evaluation batches this rank runs. Where weights are gathered for each batch, all ranks run all of them.
fn eval_part<D: Device>(steps: &Steps<'_, D>) -> Rank {
    if steps.policy().divides(Sharding::Weights) { Rank::ONLY } else { steps.job().request.rank }
}

/// Adds the numbers of the ranks, if each ran a part of the batches.
fn sum_parts(team: Option<&mut Team>, part: Rank, numbers: &mut [f64]) -> Result<(), Failure> {
    team.filter(|_| !part.is_only()).map_or(Ok(()), |team| team.sum(numbers))
}

fn score_choices<D: Device>(
    steps: &mut Steps<'_, D>,
    team: Option<&mut Team>,
    choices: &ChoiceSet,
    step: u64,
    progress: &Progress,
) -> Result<ChoiceScores, Failure> {
    let (set, part) = (&choices.set, eval_part(steps));
    let counted = Counted::new("evaluating choices", set.len());
    let on_samples = |done: usize| progress.evaluating(&counted, done);
    let Steps { executor, feed, micro_batch, .. } = steps;
    let mut found = log_likelihoods(executor, feed, micro_batch, set, 0, part, &on_samples)?;
    // Each sample was scored by one rank; the others have 0 for it.
    sum_parts(team, part, &mut found)?;
    check_finite(set, &found, &format!("the evaluation after step {step}"))?;
    Ok(choices.score(&found))
}

/// The loss is the summed negative log-likelihood divided by the supervised tokens.
fn evaluate_loss<D: Device>(
    steps: &mut Steps<'_, D>,
    team: Option<&mut Team>,
    set: &TokenSet,
    row: &mut EvalRow,
    progress: &Progress,
) -> Result<(), Failure> {
    let (limit, part) = (steps.job().recipe.eval.limit, eval_part(steps));
    let samples = evaluated_samples(set, limit);
    let counted = Counted::new("evaluating", samples);
    let Steps { executor, feed, micro_batch, objective, .. } = &mut *steps;
    if let Some(objective) = objective {
        let all: Vec<u32> = (0..samples as u32).collect();
        let mut passes = Passes { executor, feed, micro_batch };
        objective.prepare(&mut passes, (set, Which::Eval), &all, None)?;
        feed.clear_figures(executor);
    }
    feed.clear_eval_loss(executor);
    let add_numbers = |micro_batch: &mut MicroBatch| {
        objective.iter().for_each(|objective| objective.add_to(micro_batch));
    };
    run_eval_batches(executor, feed, micro_batch, set, limit, part, add_numbers, |_, _, range| {
        progress.evaluating(&counted, range.end as usize);
        Ok(())
    })?;
    let figures = match objective {
        Some(objective) => objective.figures(&feed.read_figures(executor)?),
        None => BTreeMap::new(),
    };
    row.scores.extend(figures.into_iter().map(|(name, value)| (format!("eval_{name}"), value)));
    let is_mean = objective.is_some();
    let mut sum = [feed.read_eval_loss(executor)?];
    sum_parts(team, part, &mut sum)?;
    if !sum[0].is_finite() {
        return Err(not_finite(steps, set, row.step, sum[0]));
    }
    let extent = set.extent(0..samples as u32);
    // An objective divides by its own counts.
    row.eval_loss = if is_mean { sum[0] } else { sum[0] / extent.rows as f64 };
    row.eval_samples = samples as u64;
    row.eval_tokens = extent.tokens as u64;
    row.eval_supervised_tokens = extent.rows as u64;
    Ok(())
}

fn not_finite<D: Device>(steps: &mut Steps<'_, D>, set: &TokenSet, step: u64, sum: f64) -> Failure {
    let limit = steps.job().recipe.eval.limit;
    let Steps { executor, feed, micro_batch, .. } = steps;
    let micro_tokens = executor.plan().extent.tokens;
    let mut culprit = None;
    feed.clear_eval_loss(executor);
    let replayed = for_each_eval_batch(set, limit, micro_tokens, |range| {
        if culprit.is_none() {
            micro_batch.fill(set, range).map_err(Failure::disk)?;
            feed.write_micro_batch(executor, micro_batch, step)?;
            culprit = find_culprit(executor, Entry::Eval, Some(micro_batch))?;
        }
        Ok::<(), Failure>(())
    });
    let place = culprit.map_or(String::new(), |culprit| format!("\n  {}", culprit.describe(set)));
    let failure = Failure::training(format!(
        "the evaluation after step {step} is not finite: summed loss {sum}{place}"
    ))
    .hint("the run so far was finite: look at the rows of `data.eval`");
    replayed.err().unwrap_or(failure)
}

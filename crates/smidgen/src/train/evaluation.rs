//! Evaluations during a run: the loss of held-out rows, and the accuracy on their choices.
//!
//! They run between two steps through the plan's `eval` entry. They reuse the memory of the steps and change nothing
//! that a step reads. Left out: generated answers, which `smidgen eval` scores after training.

use super::journal::Journal;
use super::metrics::EvalRow;
use super::phases::Phase;
use super::replay::find_culprit;
use super::standing::Evaluated;
use super::trainer::Trainer;
use crate::console::progress::{Counted, Progress};
use crate::failure::Failure;
use crate::rows::choice::{ChoiceScores, ChoiceSet};
use crate::session::likelihood::{check_finite, evaluated_samples, log_likelihoods, run_eval_batches};
use smidgen_data::batch::BatchPlan;
use smidgen_data::eval_batch::for_each_eval_batch;
use smidgen_data::tokens::TokenSet;
use smidgen_ir::{Entry, Rank, Sharding};
use smidgen_runtime::Device;
use std::collections::BTreeMap;
use std::time::Instant;

impl<D: Device> Trainer<'_, D> {
    /// Evaluates after a step, writes and prints the result. Returns whether it is the best so far.
    pub(super) fn evaluate_and_log(
        &mut self,
        batches: &BatchPlan,
        step: u64,
        journal: &mut Journal,
        progress: &Progress,
    ) -> Result<bool, Failure> {
        self.enter(Phase::Eval);
        let row = self.evaluate(step, batches.epochs_after(step), progress)?;
        self.enter(Phase::Train);
        journal.write_evaluation(&row)?;
        let is_new_best = self.standing.record(Evaluated { step, eval_loss: row.eval_loss });
        let best = if is_new_best { ", the best so far" } else { "" };
        let scores: String = row
            .scores
            .iter()
            .filter(|(name, _)| !name.ends_with("_stderr"))
            .map(|(name, value)| format!("  {name} {value:.4}"))
            .collect();
        let (total, loss) = (batches.total_steps(), row.eval_loss);
        progress.say(&format!("step {step}/{total}  eval_loss {loss:.4}{best}{scores}"));
        Ok(is_new_best)
    }

    /// The loss of the evaluation samples, and the accuracy on their choices. If all rows are choices, the loss is
    /// that of the right choices.
    fn evaluate(&mut self, step: u64, epoch: f64, progress: &Progress) -> Result<EvalRow, Failure> {
        let rows = self.rows();
        let started = Instant::now();
        let mut row = EvalRow {
            step,
            epoch,
            eval_loss: f64::NAN,
            eval_samples: 0,
            eval_tokens: 0,
            eval_supervised_tokens: 0,
            eval_ms: 0.0,
            scores: BTreeMap::new(),
        };
        if let Some(set) = &rows.eval {
            self.evaluate_loss(set, &mut row, progress)?;
        }
        if let Some(choices) = &rows.choices {
            let scores = self.score_choices(choices, step, progress)?;
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

    fn score_choices(
        &mut self,
        choices: &ChoiceSet,
        step: u64,
        progress: &Progress,
    ) -> Result<ChoiceScores, Failure> {
        let (set, part) = (&choices.set, self.eval_part());
        let counted = Counted::new("evaluating choices", set.len());
        let on_samples = |done: usize| progress.evaluating(&counted, done);
        let (executor, micro_batch) = (&mut self.executor, &mut self.micro_batch);
        let mut found = log_likelihoods(executor, &self.feed, micro_batch, set, 0, part, &on_samples)?;
        if let Some(team) = self.team.as_mut().filter(|_| !part.is_only()) {
            // Each sample was scored by one rank; the others have 0 for it.
            team.sum(&mut found)?;
        }
        check_finite(set, &found, &format!("the evaluation after step {step}"))?;
        Ok(choices.score(&found))
    }

    /// Which evaluation batches this rank runs. Where weights are gathered for each batch, all ranks run all of them.
    fn eval_part(&self) -> Rank {
        if self.policy.divides(Sharding::Weights) { Rank::ONLY } else { self.job.request.rank }
    }

    /// The loss is the summed negative log-likelihood divided by the supervised tokens.
    fn evaluate_loss(
        &mut self,
        set: &TokenSet,
        row: &mut EvalRow,
        progress: &Progress,
    ) -> Result<(), Failure> {
        let (limit, part) = (self.job.recipe.eval.limit, self.eval_part());
        self.feed.clear_eval_loss(&mut self.executor);
        let (executor, micro_batch) = (&mut self.executor, &mut self.micro_batch);
        let counted = Counted::new("evaluating", evaluated_samples(set, limit));
        run_eval_batches(executor, &self.feed, micro_batch, set, limit, part, |_, _, range| {
            progress.evaluating(&counted, range.end as usize);
            Ok(())
        })?;
        let mut sum = [self.feed.read_eval_loss(&mut self.executor)?];
        if let Some(team) = self.team.as_mut().filter(|_| !part.is_only()) {
            team.sum(&mut sum)?;
        }
        if !sum[0].is_finite() {
            return Err(self.eval_not_finite(set, row.step, sum[0]));
        }
        let samples = evaluated_samples(set, limit);
        let extent = set.extent(0..samples as u32);
        row.eval_loss = sum[0] / extent.rows as f64;
        row.eval_samples = samples as u64;
        row.eval_tokens = extent.tokens as u64;
        row.eval_supervised_tokens = extent.rows as u64;
        Ok(())
    }

    fn eval_not_finite(&mut self, set: &TokenSet, step: u64, sum: f64) -> Failure {
        let micro_tokens = self.executor.plan().extent.tokens;
        let mut culprit = None;
        self.feed.clear_eval_loss(&mut self.executor);
        let replayed = for_each_eval_batch(set, self.job.recipe.eval.limit, micro_tokens, |range| {
            if culprit.is_none() {
                self.micro_batch.fill(set, range).map_err(Failure::disk)?;
                self.feed.write_micro_batch(&mut self.executor, &self.micro_batch, step)?;
                culprit = find_culprit(&mut self.executor, Entry::Eval, Some(&self.micro_batch))?;
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
}

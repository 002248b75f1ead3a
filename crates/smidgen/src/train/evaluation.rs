//! Evaluations during a run: the loss of held-out rows, and the accuracy of their choices.
//!
//! They run between two steps through the plan's `eval` entry, reuse the memory of the steps and change nothing that a
//! step reads. Left out: generated answers, which `smidgen eval` scores after training.

use super::metrics::EvalRow;
use super::replay::find_culprit;
use super::trainer::Trainer;
use crate::failure::Failure;
use crate::rows::data::Rows;
use crate::session::likelihood::{check_finite, log_likelihoods};
use smidgen_data::eval_batch::for_each_eval_batch;
use smidgen_data::tokens::TokenSet;
use smidgen_ir::{Entry, Rank, Sharding};
use smidgen_runtime::Device;
use std::collections::BTreeMap;
use std::time::Instant;

impl<D: Device> Trainer<'_, D> {
    /// The loss of the evaluation samples, and the accuracy of their choices. For rows that are only choices, the loss is
    /// that of the right choices.
    pub(super) fn evaluate(&mut self, rows: &Rows, step: u64, epoch: f64) -> Result<EvalRow, Failure> {
        let started = Instant::now();
        let loss = rows.eval.as_ref().map(|set| self.evaluate_loss(set, step, epoch)).transpose()?;
        let scored = match &rows.choices {
            None => None,
            Some(choices) => {
                let set = &choices.set;
                let part = self.eval_part();
                let mut found =
                    log_likelihoods(&mut self.executor, &self.feed, &mut self.micro_batch, set, 0, part)?;
                if let Some(team) = self.team.as_mut().filter(|_| !part.is_only()) {
                    // Every sample is another rank's; all others have nothing for it.
                    team.sum(&mut found)?;
                }
                check_finite(set, &found, &format!("the evaluation after step {step}"))?;
                Some((choices, choices.score(&found)))
            }
        };
        let mut row = match (loss, &scored) {
            (Some(row), _) => row,
            (None, Some((choices, scores))) => EvalRow {
                step,
                epoch,
                eval_loss: scores.gold_nll / scores.gold_tokens as f64,
                eval_samples: choices.rows.len() as u64,
                eval_tokens: choices.set.stats().tokens,
                eval_supervised_tokens: scores.gold_tokens,
                eval_ms: 0.0,
                scores: BTreeMap::new(),
            },
            (None, None) => unreachable!("the recipe refuses `eval_every` without `data.eval`"),
        };
        if let Some((_, scores)) = scored {
            let means = [("acc", scores.acc), ("acc_norm", scores.acc_norm), ("acc_bytes", scores.acc_bytes)];
            for (name, mean) in means {
                row.scores.insert(format!("eval_{name}"), mean.value);
                row.scores.extend(mean.stderr.map(|stderr| (format!("eval_{name}_stderr"), stderr)));
            }
        }
        row.eval_ms = started.elapsed().as_secs_f64() * 1e3;
        Ok(row)
    }

    /// The part of the evaluation batches that this rank has. Where weights are gathered for each, all ranks run all.
    fn eval_part(&self) -> Rank {
        if self.policy.divides(Sharding::Weights) { Rank::ONLY } else { self.job.request.rank }
    }

    /// Summed NLL ÷ supervised tokens.
    fn evaluate_loss(&mut self, set: &TokenSet, step: u64, epoch: f64) -> Result<EvalRow, Failure> {
        let micro_tokens = self.executor.plan().extent.tokens;
        self.feed.clear_eval_loss(&mut self.executor);
        self.feed.write_loss_weight(&mut self.executor, 1.0);
        let (mut samples, mut tokens, mut supervised) = (0, 0, 0);
        let (part, mut index) = (self.eval_part(), 0);
        for_each_eval_batch(set, self.job.recipe.eval.limit, micro_tokens, |range| {
            index += 1;
            if index % part.of != part.index {
                return Ok(());
            }
            self.micro_batch.fill(set, range.clone()).map_err(Failure::disk)?;
            self.feed.write_micro_batch(&mut self.executor, &self.micro_batch, step)?;
            let extent = self.micro_batch.extent();
            samples += u64::from(range.end - range.start);
            tokens += extent.tokens as u64;
            supervised += extent.rows as u64;
            self.executor.run(Entry::Eval, &extent).map_err(Failure::from)
        })?;
        let mut sum = self.feed.read_eval_loss(&mut self.executor)?;
        if let Some(team) = self.team.as_mut().filter(|_| !part.is_only()) {
            let mut numbers = [sum, samples as f64, tokens as f64, supervised as f64];
            team.sum(&mut numbers)?;
            sum = numbers[0];
            [samples, tokens, supervised] = [1, 2, 3].map(|index| numbers[index] as u64);
        }
        if !sum.is_finite() {
            return Err(self.eval_not_finite(set, step, sum));
        }
        Ok(EvalRow {
            step,
            epoch,
            eval_loss: sum / supervised as f64,
            eval_samples: samples,
            eval_tokens: tokens,
            eval_supervised_tokens: supervised,
            eval_ms: 0.0,
            scores: BTreeMap::new(),
        })
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

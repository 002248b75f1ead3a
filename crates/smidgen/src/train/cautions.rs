//! Warnings before step 0 about settings that are allowed but rarely intended.
//!
//! The rules are a table of conditions and messages. Values that can never be intended (a learning rate of 0, an
//! `alpha` of 0) are refused when the recipe is read. Left out: warnings about the data itself.

use super::lr::warmup_steps;
use crate::plan::job::Job;
use crate::rows::data::Rows;
use smidgen_recipe::Batch;

/// The settings and sizes that the rules test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    pub lr: f64,
    /// The base weights are trained.
    pub is_full: bool,
    pub weight_decay: f64,
    pub dropout: f64,
    pub warmup_steps: u64,
    pub total_steps: u64,
    pub epochs: u64,
    pub samples: usize,
    /// `train.batch`; `None` if the batch is given in tokens.
    pub batch: Option<usize>,
    /// Samples that `data.split` takes from the training rows; 0 if they are evaluated.
    pub unused: usize,
}

impl Facts {
    pub fn of(job: &Job, rows: &Rows) -> Facts {
        let train = &job.recipe.train;
        let total_steps = rows.batches.total_steps();
        Facts {
            lr: train.lr,
            is_full: job.request.adapters.is_empty(),
            weight_decay: train.weight_decay,
            dropout: job.recipe.adapter.dropout,
            warmup_steps: warmup_steps(train.warmup, total_steps),
            total_steps,
            epochs: rows.batches.epochs(),
            samples: rows.train.row_count(),
            batch: match train.batch {
                Batch::Samples(samples) => Some(samples),
                Batch::Tokens(_) => None,
            },
            unused: match &rows.eval {
                Some(eval) if job.recipe.data.eval.is_empty() && train.eval_every == 0 => eval.row_count(),
                _ => 0,
            },
        }
    }
}

/// One line each, without `warning:`.
pub fn cautions(facts: &Facts) -> Vec<String> {
    let Facts { lr, is_full, weight_decay, dropout, .. } = *facts;
    let Facts { warmup_steps, total_steps, epochs, samples, batch, unused, .. } = *facts;
    let batch = batch.unwrap_or(0);
    let rules = [
        (
            is_full && lr > 1e-4,
            format!(
                "`train.lr = {lr}` is high for full training: 5e-6 to 5e-5 is usual, and more may destroy what the model knows"
            ),
        ),
        (
            !is_full && lr > 1e-2,
            format!(
                "`train.lr = {lr}` is high for an adapter: 1e-4 to 1e-3 is usual; expect loss spikes or NaN"
            ),
        ),
        (
            !is_full && lr < 1e-6,
            format!(
                "`train.lr = {lr}` is low for an adapter: 1e-4 to 1e-3 is usual, and little will be learned"
            ),
        ),
        (
            // The first step of a warm-up has learning rate 0.
            warmup_steps > 0 && total_steps == 1,
            "`train.warmup` leaves the only step a learning rate of 0, so nothing is learned: set `train.warmup = 0`, or more \
             steps with `train.epochs`"
                .into(),
        ),
        (
            unused > 0,
            format!(
                "`data.split` holds {unused} samples back, and nothing evaluates them: set `train.eval_every`, or remove it"
            ),
        ),
        (
            warmup_steps >= total_steps && total_steps > 1,
            format!(
                "`train.warmup` takes {warmup_steps} steps of a run of {total_steps}: the learning rate never reaches `train.lr`"
            ),
        ),
        (weight_decay > 1.0, format!("`train.weight_decay = {weight_decay}` is high: 0 to 0.1 is usual")),
        (
            batch > samples,
            format!(
                "`train.batch = {batch}` is more than the {samples} samples of the data: each step takes all of them"
            ),
        ),
        (
            epochs > 50,
            format!(
                "{total_steps} steps go over the {samples} samples {epochs} times: a few epochs are usual, more overfits"
            ),
        ),
        (
            dropout > 0.5,
            format!("`adapter.dropout = {dropout}` drops most of the adapter's input: 0 to 0.1 is usual"),
        ),
    ];
    rules.into_iter().filter(|(applies, _)| *applies).map(|(_, words)| words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Facts = Facts {
        lr: 2e-4,
        is_full: false,
        weight_decay: 0.0,
        dropout: 0.0,
        warmup_steps: 6,
        total_steps: 200,
        epochs: 1,
        samples: 4957,
        batch: Some(16),
        unused: 0,
    };

    #[test]
    fn usual_settings_give_no_warning() {
        assert_eq!(cautions(&USUAL), [""; 0]);
        let bounds = Facts {
            lr: 1e-2,
            weight_decay: 1.0,
            dropout: 0.5,
            warmup_steps: 199,
            epochs: 50,
            samples: 16,
            ..USUAL
        };
        assert_eq!(cautions(&bounds), [""; 0]);
        assert_eq!(cautions(&Facts { lr: 1e-6, batch: None, samples: 1, ..USUAL }), [""; 0]);
    }

    #[test]
    fn each_rule_names_its_numbers() {
        for (facts, words) in [
            (Facts { lr: 0.2, ..USUAL }, "`train.lr = 0.2` is high"),
            (Facts { lr: 1e-7, ..USUAL }, "`train.lr = 0.0000001` is low"),
            (Facts { is_full: true, ..USUAL }, "`train.lr = 0.0002` is high for full training"),
            (Facts { warmup_steps: 200, ..USUAL }, "`train.warmup` takes 200 steps of a run of 200"),
            (Facts { warmup_steps: 1, total_steps: 1, ..USUAL }, "`train.warmup` leaves the only step"),
            (Facts { unused: 12, ..USUAL }, "`data.split` holds 12 samples back"),
            (Facts { weight_decay: 1.5, ..USUAL }, "`train.weight_decay = 1.5` is high"),
            (Facts { samples: 15, ..USUAL }, "`train.batch = 16` is more than the 15 samples"),
            (Facts { epochs: 51, ..USUAL }, "200 steps go over the 4957 samples 51 times"),
            (Facts { dropout: 0.6, ..USUAL }, "`adapter.dropout = 0.6` drops most"),
        ] {
            let said = cautions(&facts);
            assert_eq!(said.len(), 1, "{said:?}");
            assert!(said[0].starts_with(words), "{said:?}");
        }
    }

    #[test]
    fn several_rules_can_apply() {
        let facts = Facts { lr: 0.2, dropout: 0.9, epochs: 99, ..USUAL };
        assert_eq!(cautions(&facts).len(), 3);
    }
}

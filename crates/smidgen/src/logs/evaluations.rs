//! The best evaluation so far, the best that was saved, and when early stopping applies.
//!
//! Only a lower loss is better. Checkpoints store the evaluations, so a resumed run stops at the same step as one that
//! was never interrupted. Every new best is saved at once and kept in addition to `keep`. With `train.early_stop` the
//! final adapter is the best evaluated one; without it, the adapter of the last step, as in other trainers.

use serde::{Deserialize, Serialize};

/// An evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    pub step: u64,
    pub eval_loss: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluations {
    pub best: Option<Evaluated>,
    /// The best one that has a checkpoint, which `keep` never removes.
    pub best_saved: Option<Evaluated>,
    pub latest: Option<Evaluated>,
    /// Evaluations since the best.
    pub since_best: u64,
}

impl Evaluations {
    /// Records an evaluation; returns whether it is the best.
    pub fn record(&mut self, evaluated: Evaluated) -> bool {
        self.latest = Some(evaluated);
        let improved = is_lower(evaluated, self.best);
        if improved {
            (self.best, self.since_best) = (Some(evaluated), 0)
        } else {
            self.since_best += 1
        }
        improved
    }

    /// Called before a checkpoint is written, so that the checkpoint's own evaluations includes it.
    pub fn note_saved(&mut self, step: u64) {
        if let Some(latest) = self.latest.filter(|latest| latest.step == step)
            && is_lower(latest, self.best_saved)
        {
            self.best_saved = Some(latest);
        }
    }

    /// Called when the checkpoint of the best evaluation was removed: it no longer counts as the best.
    pub fn forget_saved(&mut self) {
        if self.best == self.best_saved {
            self.best = None;
        }
        self.best_saved = None;
    }

    /// Whether the last `early_stop` evaluations brought no improvement; 0 never stops.
    pub fn is_over(&self, early_stop: u64) -> bool {
        early_stop > 0 && self.since_best >= early_stop
    }
}

fn is_lower(evaluated: Evaluated, than: Option<Evaluated>) -> bool {
    than.is_none_or(|than| evaluated.eval_loss < than.eval_loss)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64, eval_loss: f64) -> Evaluated {
        Evaluated { step, eval_loss }
    }

    #[test]
    fn the_lowest_is_the_best_and_equal_is_no_improvement() {
        let mut evaluations = Evaluations::default();
        assert!(evaluations.record(at(1, 2.0)));
        assert!(evaluations.record(at(2, 1.5)));
        assert!(!evaluations.record(at(3, 1.5)));
        assert!(!evaluations.record(at(4, 1.75)));
        assert_eq!((evaluations.best, evaluations.since_best), (Some(at(2, 1.5)), 2));
        assert!(!evaluations.is_over(3) && evaluations.is_over(2) && !evaluations.is_over(0));
        assert!(evaluations.record(at(5, 1.0)));
        assert!(!evaluations.is_over(1));
    }

    #[test]
    fn only_an_evaluated_step_counts_as_saved() {
        let mut evaluations = Evaluations::default();
        evaluations.record(at(3, 1.0));
        evaluations.note_saved(4);
        assert_eq!(evaluations.best_saved, None);
        evaluations.record(at(6, 1.2));
        evaluations.note_saved(6);
        assert_eq!(evaluations.best_saved, Some(at(6, 1.2)));
        evaluations.record(at(8, 1.3));
        evaluations.note_saved(8);
        assert_eq!(evaluations.best_saved, Some(at(6, 1.2)));
    }

    #[test]
    fn tracking_restarts_without_the_best_checkpoint() {
        let mut evaluations = Evaluations::default();
        evaluations.record(at(1, 1.0));
        evaluations.note_saved(1);
        evaluations.record(at(2, 2.0));
        evaluations.forget_saved();
        assert_eq!((evaluations.best, evaluations.best_saved, evaluations.since_best), (None, None, 1));
        assert!(evaluations.record(at(3, 1.9)));
        // A best without a checkpoint is not forgotten.
        evaluations.forget_saved();
        assert_eq!(evaluations.best, Some(at(3, 1.9)));
    }

    #[test]
    fn a_checkpoint_restores_it_bit_for_bit() {
        let mut evaluations = Evaluations::default();
        evaluations.record(at(7, 0.1 + 0.2));
        evaluations.note_saved(7);
        evaluations.record(at(9, 1.0 / 3.0 + 1.0));
        let text = serde_json::to_string(&evaluations).unwrap();
        assert_eq!(serde_json::from_str::<Evaluations>(&text).unwrap(), evaluations);
    }
}

//! The check that a run trains what it should: soon after the start, every trained tensor must have had a gradient
//! and must have changed.
//!
//! `B` has a gradient at the first update, `A` and LS-LoRA's scales only after other tensors have changed. Three
//! updates with a rate above zero are enough for all. The update kernels record activity (`names::state::ACTIVITY`),
//! so the check costs one small read. A run that is resumed after its third update is not checked again.
//! A zero gradient that the data or the settings explain is only a warning: with one token to attend to, queries and
//! keys get no gradient, and a dropout near 1 may drop everything. A tensor with a gradient counts as stuck only if
//! the rate was large enough to change an f32 of its size: AdamW's first steps are about as large as the rate if the
//! gradient is well above `eps`.

use crate::failure::Failure;
use crate::plan::job::Job;
use crate::ranks::team::Team;
use crate::session::weights::{leaf, read_floats};
use smidgen_compile::names::state;
use smidgen_data::micro_batch::MicroBatch;
use smidgen_ir::{ACTIVITY_COLUMNS, LeafKind, Precision};
use smidgen_runtime::{Device, Executor};

/// Updates with a rate above zero after which every tensor must have changed.
const UPDATES: u64 = 3;

/// A dropout above this may leave a tensor without a gradient for three updates.
const HIGH_DROPOUT: f64 = 0.9;
/// How far above `eps` a gradient must be for AdamW's step to be about the rate.
const CLEARLY_ABOVE_EPS: f64 = 100.0;
/// A change below this fraction of a number may be lost in an f32.
const SURE_TO_CHANGE: f64 = 1e-6;

#[derive(Debug)]
pub struct Liveness {
    updates: u64,
    largest_lr: f64,
    eps: f64,
    dropout: f64,
    /// Some supervised token had another token to attend to.
    attends: bool,
    /// Gradients pass through f16, in which small ones vanish.
    in_f16: bool,
    /// The base weights are trained.
    is_full: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Findings {
    /// Names of tensors whose gradient was zero throughout.
    without_gradient: Vec<String>,
    /// Names of tensors that have a gradient and did not change.
    stuck: Vec<String>,
    /// Names of tensors that did not change, but the learning rate was too small to expect it.
    too_slow: Vec<String>,
}

impl Liveness {
    /// `None` if the updates before a resume already cover the check; `lrs_before` are their learning rates.
    pub fn begin(job: &Job, lrs_before: impl Iterator<Item = f64>) -> Option<Liveness> {
        let updates_before = lrs_before.filter(|lr| *lr > 0.0).take(UPDATES as usize).count() as u64;
        (updates_before < UPDATES).then(|| Liveness {
            updates: 0,
            largest_lr: 0.0,
            eps: job.recipe.train.eps,
            dropout: job.recipe.adapter.dropout,
            attends: false,
            in_f16: job.request.precision == Precision::F16,
            is_full: job.request.adapters.is_empty(),
        })
    }

    /// Notes whether the supervised tokens of a micro-batch of the next update have tokens to attend to.
    pub fn see_micro_batch(&mut self, batch: &MicroBatch) {
        self.attends |= batch.rows.iter().any(|row| batch.positions[*row as usize] > 0);
    }

    /// Whether the next update with a rate above zero is the last one to check.
    pub fn ends_next(&self) -> bool {
        self.updates + 1 >= UPDATES
    }

    /// Counts an update; returns whether it was the last one to check.
    pub fn see_update(&mut self, lr: f64) -> bool {
        if lr > 0.0 {
            self.updates += 1;
            self.largest_lr = self.largest_lr.max(lr);
        }
        self.updates >= UPDATES
    }

    /// Reads the recorded activity. Returns warnings, or an error that names the tensors that are not trained.
    pub fn end<D: Device>(
        mut self,
        executor: &mut Executor<D>,
        team: Option<&mut Team>,
    ) -> Result<Vec<String>, Failure> {
        let plan = executor.plan();
        let names: Vec<String> =
            plan.leaves(LeafKind::Adapter).map(|(_, value)| value.name.clone()).collect();
        let activity = leaf(plan, state::ACTIVITY);
        let count = ACTIVITY_COLUMNS * names.len();
        let mut numbers = read_floats(executor, activity, count)?;
        if let Some(on_host) = executor.plan().leaf_named(state::HOST_ACTIVITY) {
            let others = read_floats(executor, on_host, count)?;
            numbers.iter_mut().zip(others).for_each(|(number, other)| *number = number.max(other));
        }
        if let Some(team) = team {
            // A rank may update only some rows of a tensor, and see only short samples.
            numbers.push(f32::from(u8::from(self.attends)));
            team.largest(&mut numbers)?;
            self.attends = numbers.pop() == Some(1.0);
        }
        let mut findings = Findings::default();
        for (name, row) in names.into_iter().zip(numbers.as_chunks::<ACTIVITY_COLUMNS>().0) {
            let [gradient, parameter, change] = row.map(f64::from);
            let sure =
                self.largest_lr > SURE_TO_CHANGE * parameter && gradient > CLEARLY_ABOVE_EPS * self.eps;
            match (gradient == 0.0, change == 0.0) {
                (true, _) => findings.without_gradient.push(name),
                (false, false) => {}
                (false, true) if sure => findings.stuck.push(name),
                (false, true) => findings.too_slow.push(name),
            }
        }
        self.judge(&findings)
    }

    fn judge(&self, findings: &Findings) -> Result<Vec<String>, Failure> {
        let mut warnings = Vec::new();
        if !findings.too_slow.is_empty() {
            warnings.push(format!(
                "{UPDATES} updates did not change {}: a learning rate of {:.2e} is too small for them so far",
                listed(&findings.too_slow),
                self.largest_lr
            ));
        }
        // The gradient of A passes through B, which starts at zero and grows.
        let is_tiny = |key: &String| self.in_f16 && key.contains(".lora_A.");
        let excused = |key: &String| {
            self.dropout > HIGH_DROPOUT || is_tiny(key) || (!self.attends && is_query_or_key(key))
        };
        let (expected, wrong): (Vec<String>, Vec<String>) =
            findings.without_gradient.iter().cloned().partition(excused);
        if !expected.is_empty() {
            let why = if self.in_f16 {
                "they may be too small for f16; bf16 and f32 have the range"
            } else if self.attends {
                "this may be chance at this dropout"
            } else {
                "no supervised token has another token to attend to"
            };
            warnings.push(format!("no gradient in {UPDATES} updates for {}: {why}", listed(&expected)));
        }
        let failure = match (wrong.is_empty(), findings.stuck.is_empty()) {
            (true, true) => return Ok(warnings),
            (false, _) => Failure::training(format!(
                "{UPDATES} updates gave no gradient to {}: they would not be trained",
                listed(&wrong)
            ))
            .hint(if self.is_full {
"check whether the loss is 0, or base weights next to them are zero"
} else {
"check whether the loss is 0, or both matrices of the adapter in `adapter.init` are zero"
})
            .hint("if the data causes it, leave these modules out of `adapter.targets` or `adapter.layers`"),
            (true, false) => Failure::training(format!(
                "{UPDATES} updates with a learning rate up to {:e} did not change {}, which had a gradient",
                self.largest_lr,
                listed(&findings.stuck)
            ))
            .hint(if self.is_full {
"check these weights for values so large that an update of this size is lost in rounding"
} else {
"check the adapter in `adapter.init` for values so large that an update of this size is lost in rounding"
}),
        };
        Err(failure)
    }
}

/// The first three names, and the number of the others.
fn listed(keys: &[String]) -> String {
    let names: Vec<String> = keys.iter().take(3).map(|key| format!("`{key}`")).collect();
    match keys.len() {
        0..=3 => names.join(", "),
        more => format!("{} and {} more tensors", names.join(", "), more - 3),
    }
}

fn is_query_or_key(key: &str) -> bool {
    ["q_proj", "k_proj", "qkv_proj", "q_norm", "k_norm"].iter().any(|name| key.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn liveness(dropout: f64, attends: bool) -> Liveness {
        let (updates, largest_lr, eps) = (3, 1e-3, 1e-8);
        Liveness { updates, largest_lr, eps, dropout, attends, in_f16: false, is_full: false }
    }

    fn keys(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| name.to_string()).collect()
    }

    #[test]
    fn a_rate_of_zero_does_not_count_as_an_update() {
        let mut liveness = Liveness { updates: 0, largest_lr: 0.0, ..liveness(0.0, true) };
        let rates = [0.0, 1e-4, 0.0, 2e-4, 1e-4];
        let seen = rates.map(|lr| (liveness.ends_next(), liveness.see_update(lr)));
        assert_eq!(seen, [(false, false), (false, false), (false, false), (false, false), (true, true)]);
        assert_eq!(liveness.largest_lr, 2e-4);
    }

    #[test]
    fn tensors_without_a_gradient_are_named() {
        let findings = Findings {
            without_gradient: keys(&["a.q_proj", "b.o_proj", "c.o_proj", "d.o_proj", "e.o_proj"]),
            ..Findings::default()
        };
        let said = liveness(0.0, true).judge(&findings).unwrap_err().to_string();
        let words = "3 updates gave no gradient to `a.q_proj`, `b.o_proj`, `c.o_proj` and 2 more tensors";
        assert!(said.contains(words), "{said}");
        // Only queries and keys can blame data of two tokens.
        let said = liveness(0.0, false).judge(&findings).unwrap_err().to_string();
        assert!(said.contains("no gradient to `b.o_proj`, `c.o_proj`, `d.o_proj` and 1 more"), "{said}");
    }

    #[test]
    fn an_explained_zero_gradient_is_a_warning() {
        let findings = Findings { without_gradient: keys(&["a.q_proj", "b.k_proj"]), ..Findings::default() };
        let said = liveness(0.0, false).judge(&findings).unwrap();
        assert_eq!(
            said,
            [
                "no gradient in 3 updates for `a.q_proj`, `b.k_proj`: no supervised token has another token to attend to"
            ]
        );
        assert_eq!(liveness(0.95, true).judge(&findings).unwrap().len(), 1);
        assert!(liveness(0.5, true).judge(&findings).is_err());
    }

    #[test]
    fn underflow_in_f16_is_a_warning_only_for_lora_a() {
        let findings = |names| Findings { without_gradient: keys(names), ..Findings::default() };
        let half = Liveness { in_f16: true, ..liveness(0.0, true) };
        let said = half.judge(&findings(&["q_proj.lora_A.weight"])).unwrap();
        assert!(said[0].contains("too small for f16"), "{said:?}");
        assert!(half.judge(&findings(&["q_proj.lora_B.weight"])).is_err());
    }

    #[test]
    fn stuck_is_an_error_and_slow_a_warning() {
        let stuck = Findings { stuck: keys(&["a"]), ..Findings::default() };
        let said = liveness(0.0, true).judge(&stuck).unwrap_err().to_string();
        assert!(
            said.contains("a learning rate up to 1e-3 did not change `a`, which had a gradient"),
            "{said}"
        );
        let slow = Findings { too_slow: keys(&["a"]), ..Findings::default() };
        assert_eq!(liveness(0.0, true).judge(&slow).unwrap().len(), 1);
    }
}

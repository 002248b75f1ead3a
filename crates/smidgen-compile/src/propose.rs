//! Measures the points that sketches predict to be fastest.
//!
//! For each size of micro-batch and each way to treat activations, the sketch gives the fastest point that should fit. The
//! one with the best prediction is scheduled. If it needs more or less than predicted, the sketch is asked again with a
//! budget corrected by the difference. The search ends when no prediction is better than what was found.

use crate::attempt::{Attempt, Measured};
use crate::choices::{Freedom, Offload, Point, activations_are_open};
use crate::sketch::{Predicted, Sketches};

/// Share of the effort that may be used, after the fewest measurements.
const SHARE_OF_EFFORT: f64 = 0.6;
const FEWEST_MEASURED: usize = 8;
/// The fewest measurements as long as no point fits.
const FEWEST_WITHOUT_SUCCESS: usize = 24;
/// Most measurements for one idea.
const MOST_MEASURED: usize = 4;
/// Until this many points are found, predictions up to `NEARLY_AS_FAST` times the best time are measured too: a search for
/// mixtures around them may still find a faster point.
const MOST_FOUND: usize = 5;
const NEARLY_AS_FAST: f64 = 1.02;
/// Predictions above this many times the best prediction are dropped.
const HOPELESS: f64 = 1.5;

/// A size and a way to treat activations, with the best prediction that is not measured yet.
struct Idea {
    size: usize,
    activations: Offload,
    predicted: Predicted,
    measured: usize,
}

/// Measured points that fit, with their size, the fastest first.
pub fn propose(attempts: &[Attempt], sketches: &Sketches) -> Vec<(usize, Point, Measured)> {
    let choices = attempts[0].freedom.activation_choices();
    let budget_bytes = attempts[0].room_bytes() as f64;
    // Measured time ÷ predicted time, for each way to treat activations.
    let mut ratios = vec![1.0f64; choices.len()];
    let ratio_of =
        |activations: Offload| choices.iter().position(|choice| *choice == activations).unwrap_or(0);
    let mut ideas: Vec<Idea> = Vec::new();
    let (mut best_ms, mut promised_ms) = (f64::INFINITY, f64::INFINITY);
    for (size, attempt) in attempts.iter().enumerate() {
        let sketch = sketches.at(attempt);
        for activations in &choices {
            let predicted = sketch.fastest(*activations, budget_bytes, HOPELESS * promised_ms);
            promised_ms = predicted.map_or(promised_ms, |predicted| promised_ms.min(predicted.ms));
            ideas.extend(predicted.map(|predicted| Idea {
                size,
                activations: *activations,
                predicted,
                measured: 0,
            }));
        }
    }
    let mut found: Vec<(usize, Point, Measured)> = Vec::new();
    for count in 0.. {
        let promise = |idea: &Idea| idea.predicted.ms * ratios[ratio_of(idea.activations)];
        let next =
            (0..ideas.len()).min_by(|one, other| promise(&ideas[*one]).total_cmp(&promise(&ideas[*other])));
        let most_ms = best_ms * if found.len() < MOST_FOUND { NEARLY_AS_FAST } else { 1.0 };
        let Some(next) = next.filter(|next| promise(&ideas[*next]) < most_ms) else { break };
        let Idea { size, activations, predicted, measured: times } = ideas.swap_remove(next);
        let attempt = &attempts[size];
        let fewest = if found.is_empty() { FEWEST_WITHOUT_SUCCESS } else { FEWEST_MEASURED };
        if attempt.is_spent(SHARE_OF_EFFORT) && count >= fewest {
            break;
        }
        let measured = attempt.measure(&predicted.point);
        ratios[ratio_of(activations)] = measured.ms / predicted.ms;
        if attempt.is_within(&measured) {
            best_ms = best_ms.min(measured.ms);
            found.push((size, predicted.point, measured));
        }
        // The error is mostly in activations, which grow with the tokens.
        let tokens = |size: usize| attempts[size].request.extent.tokens as f64;
        let wrong_bytes = measured.bytes as f64 - predicted.bytes;
        let corrected = |other: usize| {
            let budget_bytes = budget_bytes - wrong_bytes * tokens(other) / tokens(size);
            sketches.at(&attempts[other]).fastest(activations, budget_bytes, HOPELESS * promised_ms)
        };
        for idea in ideas.iter_mut().filter(|idea| idea.activations == activations && idea.measured == 0) {
            idea.predicted = corrected(idea.size).unwrap_or(idea.predicted);
        }
        let again =
            corrected(size).filter(|again| again.point != predicted.point && times + 1 < MOST_MEASURED);
        ideas.extend(again.map(|predicted| Idea { size, activations, predicted, measured: times + 1 }));
    }
    found.sort_by(|one, other| one.2.ms.total_cmp(&other.2.ms));
    found
}

impl Freedom<'_> {
    /// The ways to offload activations that are tried.
    fn activation_choices(&self) -> Vec<Offload> {
        let parts = [4, 2].map(|part| Offload::Some(self.layers / part));
        let three = Offload::Some(3 * self.layers / 4);
        let all = [Offload::None, Offload::OfRecomputed, Offload::All, three].into_iter().chain(parts);
        all.filter(|choice| *choice == Offload::None || activations_are_open(self.pins)).collect()
    }
}

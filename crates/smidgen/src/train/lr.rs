//! The learning rate of each step: warm-up, then constant, linear or cosine.
//!
//! The formulas are those of Hugging Face's trainer: the first update uses s = 0, so with a warm-up its rate is 0.
//! The rate is a pure function of the step, so resume needs no state.
//! Left out: restarts, polynomial decay and floors.

use smidgen_recipe::{Schedule, Train, Warmup};
use std::f64::consts::PI;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    schedule: Schedule,
    peak: f64,
    warmup_steps: u64,
    total_steps: u64,
}

impl LearningRate {
    pub fn of(settings: &Train, total_steps: u64) -> LearningRate {
        let warmup_steps = warmup_steps(settings.warmup, total_steps);
        LearningRate { schedule: settings.schedule, peak: settings.lr, warmup_steps, total_steps }
    }

    /// The rate that update `step` (from 0) uses.
    pub fn lr(&self, step: u64) -> f64 {
        self.peak * self.multiplier(step)
    }

    /// The rate as a share of the peak.
    fn multiplier(&self, step: u64) -> f64 {
        let (s, w, t) = (step as f64, self.warmup_steps as f64, self.total_steps as f64);
        if step < self.warmup_steps {
            return s / w.max(1.0);
        }
        let decay_steps = (t - w).max(1.0);
        match self.schedule {
            Schedule::Constant => 1.0,
            Schedule::Linear => ((t - s) / decay_steps).max(0.0),
            Schedule::Cosine => (0.5 * (1.0 + (PI * ((s - w) / decay_steps)).cos())).max(0.0),
        }
    }
}

pub fn warmup_steps(warmup: Warmup, total_steps: u64) -> u64 {
    match warmup {
        Warmup::Steps(steps) => steps,
        Warmup::Fraction(fraction) => (total_steps as f64 * fraction).ceil() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(schedule: Schedule, warmup_steps: u64, total_steps: u64) -> LearningRate {
        LearningRate { schedule, peak: 1.0, warmup_steps, total_steps }
    }

    fn multipliers(schedule: Schedule, warmup_steps: u64, total: u64) -> Vec<f64> {
        let rate = rate(schedule, warmup_steps, total);
        (0..=total).map(|step| rate.multiplier(step)).collect()
    }

    #[test]
    fn warmup_is_steps_or_a_fraction_rounded_up() {
        assert_eq!(warmup_steps(Warmup::Fraction(0.0), 200), 0);
        assert_eq!(warmup_steps(Warmup::Fraction(0.03), 200), 6);
        assert_eq!(warmup_steps(Warmup::Fraction(0.03), 201), 7); // 6.03
        assert_eq!(warmup_steps(Warmup::Fraction(0.5), 3), 2);
        assert_eq!(warmup_steps(Warmup::Steps(1), 200), 1);
        assert_eq!(warmup_steps(Warmup::Steps(25), 200), 25);
    }

    #[test]
    fn linear_rises_to_the_peak_and_falls_to_zero() {
        // W = 2, T = 6: 0/2, 1/2, then (6 - s) / 4.
        assert_eq!(multipliers(Schedule::Linear, 2, 6), [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]);
        // W = 0: the first update has the full rate.
        assert_eq!(multipliers(Schedule::Linear, 0, 4), [1.0, 0.75, 0.5, 0.25, 0.0]);
    }

    #[test]
    fn cosine_falls_by_half_a_wave() {
        // W = 2, T = 8: p = (s - 2) / 6, 0.5 (1 + cos(pi p)); cos 30, 60, 90, 120, 150 degrees.
        let root = 3f64.sqrt() / 2.0;
        let expected = [0.0, 0.5, 1.0, 0.5 * (1.0 + root), 0.75, 0.5, 0.25, 0.5 * (1.0 - root), 0.0];
        let got = multipliers(Schedule::Cosine, 2, 8);
        assert_eq!(got.len(), expected.len());
        for (step, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert!((got - expected).abs() < 1e-15, "step {step}: {got} {expected}");
        }
    }

    #[test]
    fn constant_warms_up_too() {
        assert_eq!(multipliers(Schedule::Constant, 4, 6), [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        assert_eq!(multipliers(Schedule::Constant, 0, 2), [1.0, 1.0, 1.0]);
    }

    #[test]
    fn the_rate_is_the_peak_times_the_multiplier() {
        let defaults = smidgen_recipe::Recipe::new("base".parse().unwrap()).train;
        let rate = LearningRate::of(&Train { schedule: Schedule::Linear, lr: 2e-4, ..defaults }, 200);
        assert_eq!(rate.warmup_steps, 6);
        assert_eq!(rate.lr(0), 0.0);
        assert_eq!(rate.lr(3), 1e-4);
        assert_eq!(rate.lr(6), 2e-4);
        assert_eq!(rate.lr(103), 1e-4); // 97 / 194
        assert_eq!(rate.lr(199), 2e-4 * (1.0 / 194.0));
    }

    #[test]
    fn steps_past_the_end_and_warmup_past_the_end_stay_in_range() {
        assert_eq!(rate(Schedule::Linear, 0, 4).multiplier(9), 0.0);
        // W = T: max(1, T - W) = 1.
        let whole = rate(Schedule::Cosine, 4, 4);
        assert_eq!(whole.multiplier(3), 0.75);
        assert_eq!(whole.multiplier(4), 1.0);
        assert_eq!(rate(Schedule::Linear, 10, 4).multiplier(2), 0.2);
    }
}

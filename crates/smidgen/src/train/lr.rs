//! The learning rate of each step: warm-up, then constant, linear or cosine.
//!
//! The formulas are those of Hugging Face's trainer: the first update has the multiplier of s = 0, so its rate is 0 if
//! there is a warm-up.
//! A pure function of the step: resume needs no state.
//! Leaves out restarts, polynomial decay and floors.

use std::f64::consts::PI;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    Constant,
    Linear,
    Cosine,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    schedule: Schedule,
    peak: f64,
    warmup_steps: u64,
    total_steps: u64,
}

impl LearningRate {
    /// `warmup` is a number of steps, or below 1 a fraction of all steps.
    pub fn new(schedule: Schedule, peak: f64, warmup: f64, total_steps: u64) -> Self {
        LearningRate { schedule, peak, warmup_steps: warmup_steps(warmup, total_steps), total_steps }
    }

    /// The rate that update `step` (from 0) uses.
    pub fn lr(&self, step: u64) -> f64 {
        self.peak * self.multiplier(step)
    }

    /// The rate as a share of the peak.
    pub fn multiplier(&self, step: u64) -> f64 {
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

/// Steps of warm-up: `warmup` itself, or below 1 that fraction of all steps, rounded up.
pub fn warmup_steps(warmup: f64, total_steps: u64) -> u64 {
    match warmup < 1.0 {
        true => (total_steps as f64 * warmup).ceil() as u64,
        false => warmup as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn multipliers(schedule: Schedule, warmup: f64, total: u64) -> Vec<f64> {
        let rate = LearningRate::new(schedule, 1.0, warmup, total);
        (0..=total).map(|step| rate.multiplier(step)).collect()
    }

    #[test]
    fn warmup_is_steps_or_a_fraction_rounded_up() {
        assert_eq!(warmup_steps(0.0, 200), 0);
        assert_eq!(warmup_steps(0.03, 200), 6);
        assert_eq!(warmup_steps(0.03, 201), 7); // 6.03
        assert_eq!(warmup_steps(0.5, 3), 2);
        assert_eq!(warmup_steps(1.0, 200), 1);
        assert_eq!(warmup_steps(25.0, 200), 25);
    }

    #[test]
    fn linear_rises_to_the_peak_and_falls_to_zero() {
        // W = 2, T = 6: 0/2, 1/2, then (6 - s) / 4.
        assert_eq!(multipliers(Schedule::Linear, 2.0, 6), [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]);
        // W = 0: the first update has the full rate.
        assert_eq!(multipliers(Schedule::Linear, 0.0, 4), [1.0, 0.75, 0.5, 0.25, 0.0]);
    }

    #[test]
    fn cosine_falls_by_half_a_wave() {
        // W = 2, T = 8: p = (s - 2) / 6, 0.5 (1 + cos(pi p)); cos 30, 60, 90, 120, 150 degrees.
        let root = 3f64.sqrt() / 2.0;
        let expected = [0.0, 0.5, 1.0, 0.5 * (1.0 + root), 0.75, 0.5, 0.25, 0.5 * (1.0 - root), 0.0];
        let got = multipliers(Schedule::Cosine, 0.25, 8);
        assert_eq!(got.len(), expected.len());
        for (step, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert!((got - expected).abs() < 1e-15, "step {step}: {got} {expected}");
        }
    }

    #[test]
    fn constant_warms_up_too() {
        assert_eq!(multipliers(Schedule::Constant, 4.0, 6), [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        assert_eq!(multipliers(Schedule::Constant, 0.0, 2), [1.0, 1.0, 1.0]);
    }

    #[test]
    fn the_rate_is_the_peak_times_the_multiplier() {
        // The defaults of a recipe: 200 steps, 6 of warm-up, peak 2e-4.
        let rate = LearningRate::new(Schedule::Linear, 2e-4, 0.03, 200);
        assert_eq!(rate.warmup_steps, 6);
        assert_eq!(rate.lr(0), 0.0);
        assert_eq!(rate.lr(3), 1e-4);
        assert_eq!(rate.lr(6), 2e-4);
        assert_eq!(rate.lr(103), 1e-4); // 97 / 194
        assert_eq!(rate.lr(199), 2e-4 * (1.0 / 194.0));
    }

    #[test]
    fn steps_past_the_end_and_warmup_past_the_end_stay_in_range() {
        let rate = LearningRate::new(Schedule::Linear, 1.0, 0.0, 4);
        assert_eq!(rate.multiplier(9), 0.0);
        // W = T: max(1, T - W) = 1.
        let rate = LearningRate::new(Schedule::Cosine, 1.0, 4.0, 4);
        assert_eq!(rate.multiplier(3), 0.75);
        assert_eq!(rate.multiplier(4), 1.0);
        let rate = LearningRate::new(Schedule::Linear, 1.0, 10.0, 4);
        assert_eq!(rate.multiplier(2), 0.2);
    }
}

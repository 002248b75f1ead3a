//! Training objectives on the CPU: the log-probabilities of a micro-batch become a loss, figures, and a weight per row.
//!
//! Per sequence, with lp the log-probabilities of its completion and dL the derivative of the loss:
//!
//! ```text
//! weight of a row = -dL/dlp, so that Σ weight·NLL has the gradient of the loss
//! pairs:   z = scale·(v(chosen) - v(rejected)) - shift, L = share·weight·curve(z), v a sum, a mean or log odds
//! labels:  L = share·w·(1 - σ(±beta·(Σ lp - reference - divergence)))
//! answers: r = e^(lp - old), L = share·(-min(r·A, clip(r)·A) + beta·k), k = e^(ref - lp) - (ref - lp) - 1
//! ```
//!
//! All sums are f64 and run in the order of the rows: there are few numbers. `kernels/objective.cu` computes the same.

use super::run::Run;
use super::view::{Dst, Src};
use smidgen_ir::Objective;
use smidgen_ir::objective::{AnswerLoss, Curve, LabelLoss, Measure, PairLoss, PairTerm, figure, sequence};
use std::ops::Range;

impl Run<'_> {
    pub(super) fn objective(&self, objective: &Objective) {
        let f64s = |operand| self.elements::<f64>(operand);
        let micro_batch = Sequences {
            nll: self.floats(self.input(0)),
            first_rows: self.i32s(2),
            numbers: f64s(self.input(3)).src(),
            before: objective.reads_rows().then(|| self.floats(self.input(4))),
            weights: self.floats_mut(self.output(0)),
            weight: f64s(self.input(1)).src().get(0),
        };
        let (loss, figures) = micro_batch.compute(objective);
        let add = |sums: Dst<f64>, index: usize, more: f64| sums.set(index, sums.src().get(index) + more);
        add(f64s(self.update(0)), 0, micro_batch.weight * loss);
        for (index, more) in figures.into_iter().enumerate() {
            add(f64s(self.update(1)), index, more);
        }
    }
}

/// The sequences of a micro-batch.
#[derive(Clone, Copy)]
struct Sequences {
    nll: Src<f32>,            // (S)
    first_rows: Src<i32>,     // (G + 1)
    numbers: Src<f64>,        // (G + 1, 5)
    before: Option<Src<f32>>, // (S, 2)
    weights: Dst<f32>,        // (S)
    /// The weight of the loss.
    weight: f64,
}

type Figures = [f64; Objective::FIGURES];

/// A loss and its derivative.
type Slope = (f64, f64);

/// The completion of one sequence.
#[derive(Clone)]
struct Completion {
    /// All supervised rows of the sequence, and those of the completion.
    all: Range<usize>,
    rows: Range<usize>,
    /// Σ log p of the completion.
    sum: f64,
    reference: f64,
    share: f64,
    role: f64,
    divergence: f64,
}

impl Completion {
    /// The measured log-probability without the reference, the same with it, and its derivative with respect to each
    /// token's log-probability.
    fn measure(&self, measure: Measure) -> (f64, f64, f64) {
        let count = self.rows.len() as f64;
        match measure {
            Measure::Sum => (self.sum, self.sum - self.reference, 1.0),
            Measure::Mean => (self.sum / count, (self.sum - self.reference) / count, 1.0 / count),
            Measure::Odds => {
                let mean = self.sum / count;
                let odds = mean - log_one_minus_exp(mean);
                (mean, odds, 1.0 / (count * -mean.exp_m1()))
            }
        }
    }
}

impl Sequences {
    fn compute(&self, objective: &Objective) -> (f64, Figures) {
        let count = self.first_rows.len() - 1;
        let mut figures = Figures::default();
        let loss = match objective {
            Objective::Pairs(loss) => {
                (0..count / 2).map(|pair| self.pair(loss, 2 * pair, &mut figures)).sum()
            }
            Objective::Labels(loss) => (0..count).map(|index| self.label(loss, index, &mut figures)).sum(),
            Objective::Answers(loss) => (0..count).map(|index| self.answer(loss, index, &mut figures)).sum(),
        };
        (loss, figures)
    }

    fn completion(&self, index: usize) -> Completion {
        let number = |column: usize| self.numbers.get(Objective::SEQUENCE_COLUMNS * index + column);
        let all = self.first_rows.get(index) as usize..self.first_rows.get(index + 1) as usize;
        let rows = all.start + number(sequence::SKIPPED) as usize..all.end;
        Completion {
            sum: -rows.clone().map(|row| f64::from(self.nll.get(row))).sum::<f64>(),
            all,
            rows,
            reference: number(sequence::REFERENCE),
            share: number(sequence::SHARE),
            role: number(sequence::ROLE),
            divergence: number(sequence::DIVERGENCE),
        }
    }

    /// Sets the weights of rows from the derivative of the loss with respect to their log-probabilities.
    fn set_weights(&self, rows: Range<usize>, slope: f64) {
        rows.for_each(|row| self.weights.set(row, (-slope * self.weight) as f32));
    }

    fn pair(&self, loss: &PairLoss, first: usize, figures: &mut Figures) -> f64 {
        let sides = [self.completion(first), self.completion(first + 1)];
        let share = sides[0].share;
        let (mut total, mut slopes) = (0.0, [0.0; 2]);
        for term in &loss.terms {
            let measured = sides.each_ref().map(|side| {
                let (_, value, slope) = side.measure(term.measure);
                let (value, bend) = transformed(value, loss.alpha);
                (value, slope * bend)
            });
            let PairTerm { weight, scale, shift, curve, .. } = *term;
            let margin = measured[0].0 - measured[1].0;
            let (value, slope) = curve_of(curve, scale * margin - shift);
            total += share * weight * value;
            for (side, sign) in [1.0, -1.0].into_iter().enumerate() {
                slopes[side] += share * weight * slope * scale * sign * measured[side].1;
            }
            if term.measure == Measure::Odds {
                figures[figure::ODDS_RATIO] += share * -softplus(-margin);
                figures[figure::ODDS] += share * margin;
            }
        }
        let [chosen, rejected] = &sides;
        let rows = chosen.all.clone();
        let nll: f64 = rows.map(|row| f64::from(self.nll.get(row))).sum::<f64>() * chosen.role;
        total += loss.nll * nll;
        let of_nll = -loss.nll * chosen.role;
        self.set_weights(chosen.all.start..chosen.rows.start, of_nll);
        self.set_weights(chosen.rows.clone(), slopes[0] + of_nll);
        self.set_weights(rejected.all.start..rejected.rows.start, 0.0);
        self.set_weights(rejected.rows.clone(), slopes[1]);

        let reported = sides.map(|side| {
            let (plain, compared, _) = side.measure(loss.reported);
            (plain, loss.beta * transformed(compared, loss.alpha).0)
        });
        figures[figure::REWARD_CHOSEN] += share * reported[0].1;
        figures[figure::REWARD_REJECTED] += share * reported[1].1;
        figures[figure::LOGP_CHOSEN] += share * reported[0].0;
        figures[figure::LOGP_REJECTED] += share * reported[1].0;
        figures[figure::ACCURATE] += if reported[0].1 > reported[1].1 { share } else { 0.0 };
        figures[figure::NLL] += if loss.nll == 0.0 { 0.0 } else { nll };
        total
    }

    fn label(&self, loss: &LabelLoss, index: usize, figures: &mut Figures) -> f64 {
        let own = self.completion(index);
        let (is_desirable, sign) = (own.role > 0.0, own.role.signum());
        let weight = if is_desirable { loss.desirable } else { loss.undesirable };
        let ratio = own.sum - own.reference;
        let divergence = if loss.compares_divergence { own.divergence } else { 0.0 };
        let right = sigmoid(sign * loss.beta * (ratio - divergence));
        let slope = -own.share * weight * right * (1.0 - right) * sign * loss.beta;
        self.set_weights(own.all.start..own.rows.start, 0.0);
        self.set_weights(own.rows.clone(), slope);
        let (reward, logp) = match is_desirable {
            true => (figure::REWARD_CHOSEN, figure::LOGP_CHOSEN),
            false => (figure::REWARD_REJECTED, figure::LOGP_REJECTED),
        };
        // Their counts differ from step to step, so the host divides.
        figures[reward] += loss.beta * ratio;
        figures[logp] += own.sum;
        own.share * weight * (1.0 - right)
    }

    fn answer(&self, loss: &AnswerLoss, index: usize, figures: &mut Figures) -> f64 {
        let own = self.completion(index);
        let (count, advantage) = (own.rows.len() as f64, own.role);
        let log_ratio = |row: usize| {
            let lp = -f64::from(self.nll.get(row));
            let old = self.before.map_or(f32::NAN, |before| before.get(Objective::BEFORE_COLUMNS * row));
            // Without a value from before, the policy has not changed since it gave the answers.
            if old.is_nan() { 0.0 } else { lp - f64::from(old) }
        };
        let mean: f64 = own.rows.clone().map(log_ratio).sum::<f64>() / count;
        let (mut total, mut penalty_sum, mut penalty_slope) = (0.0, 0.0, 0.0);
        let mut note = |ratio: f64| {
            let clipped = [
                ratio < 1.0 - loss.epsilon_low && advantage < 0.0,
                ratio > 1.0 + loss.epsilon_high && advantage > 0.0,
            ];
            figures[figure::CLIPPED_LOW] += f64::from(u8::from(clipped[0]));
            figures[figure::CLIPPED_HIGH] += f64::from(u8::from(clipped[1]));
        };
        if loss.by_sequence {
            note(mean.exp());
        }
        self.set_weights(own.all.start..own.rows.start, 0.0);
        for row in own.rows.clone() {
            let ratio = if loss.by_sequence { mean } else { log_ratio(row) }.exp();
            if !loss.by_sequence {
                note(ratio);
            }
            let (value, slope) = clipped_policy(loss, ratio, advantage);
            total += value;
            // The ratio of a sequence depends equally on all of its tokens, and its loss is repeated for each of them.
            let mut slope = slope * ratio;
            if loss.beta > 0.0 {
                let before = self.before.expect("a penalty has a reference");
                let reference = f64::from(before.get(Objective::BEFORE_COLUMNS * row + 1));
                let gap = reference + f64::from(self.nll.get(row));
                let plain = gap.exp() - gap - 1.0;
                let factor = if loss.corrects_penalty { ratio } else { 1.0 };
                let penalty = plain * factor;
                penalty_sum += penalty;
                slope += loss.beta * factor * (1.0 - gap.exp());
                match (loss.corrects_penalty, loss.by_sequence) {
                    (true, true) => penalty_slope += loss.beta * penalty / count,
                    (true, false) => slope += loss.beta * penalty,
                    (false, _) => {}
                }
            }
            self.weights.set(row, slope as f32);
        }
        for row in own.rows.clone() {
            let slope = f64::from(self.weights.src().get(row)) + penalty_slope;
            self.weights.set(row, (-own.share * slope * self.weight) as f32);
        }
        figures[figure::PENALTY] += penalty_sum;
        own.share * (total + loss.beta * penalty_sum)
    }
}

/// The loss -min(r·A, clip(r)·A), and its derivative with respect to r. Where both are equal, PyTorch's `min` gives each
/// half of the gradient.
fn clipped_policy(loss: &AnswerLoss, ratio: f64, advantage: f64) -> Slope {
    let clip = ratio.clamp(1.0 - loss.epsilon_low, 1.0 + loss.epsilon_high);
    let limited = ratio.min(loss.delta);
    let (one, other) = (limited * advantage, clip * advantage);
    let slope_of = |is_free: bool| if is_free { -advantage } else { 0.0 };
    let slopes = [slope_of(ratio <= loss.delta), slope_of(clip == ratio)];
    if one < other {
        (-one, slopes[0])
    } else if other < one {
        (-other, slopes[1])
    } else {
        (-one, 0.5 * (slopes[0] + slopes[1]))
    }
}

fn curve_of(curve: Curve, z: f64) -> Slope {
    match curve {
        Curve::Logistic { right, wrong } => {
            let value = right * softplus(-z) + wrong * softplus(z);
            (value, wrong * sigmoid(z) - right * sigmoid(-z))
        }
        Curve::Hinge if z < 1.0 => (1.0 - z, -1.0),
        // A NaN stays visible.
        Curve::Hinge => (0.0 * z, 0.0),
        Curve::Square => (z * z, 2.0 * z),
    }
}

/// AlphaPO's (1 - e^(-alpha v)) / alpha and its derivative.
fn transformed(value: f64, alpha: f64) -> Slope {
    if alpha == 0.0 { (value, 1.0) } else { (-(-alpha * value).exp_m1() / alpha, (-alpha * value).exp()) }
}

fn sigmoid(z: f64) -> f64 {
    if z >= 0.0 { 1.0 / (1.0 + (-z).exp()) } else { z.exp() / (1.0 + z.exp()) }
}

/// log(1 + e^z) = -log σ(-z)
fn softplus(z: f64) -> f64 {
    z.max(0.0) + (-z.abs()).exp().ln_1p()
}

/// log(1 - e^x) for x < 0
fn log_one_minus_exp(x: f64) -> f64 {
    if x < -std::f64::consts::LN_2 { (-x.exp()).ln_1p() } else { (-x.exp_m1()).ln() }
}

//! Training objectives as data: how log-probabilities of sequences become a loss, and a weight for every supervised row.
//!
//! An objective is a value that the recipe makes, the graph carries in one operation, and devices compute with. It says
//! which sequences belong together, how the log-probabilities of their completions are measured and which curve makes a
//! loss of the difference. What is pooled over an optimizer step (numbers of pairs and tokens, KTO's divergence) is an
//! input that the host writes, so that splitting a step into micro-batches changes nothing.
//! The formulas are those of TRL 1.16. Left out: numbers; kernels compute them.

use std::fmt;

/// The rows that a step is made of, and the sequences that a row becomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowsNeeded {
    /// Samples; a row is one sequence.
    #[default]
    Samples,
    /// A chosen and a rejected answer; two sequences.
    Pairs {
        /// Whether the prompt of the chosen answer counts in the negative log-likelihood.
        counts_prompt: bool,
    },
    /// A completion with a label.
    Labels,
    /// This many answers with their rewards.
    Answers { count: usize },
    /// A prompt, to which the run generates answers.
    Prompts,
}

impl RowsNeeded {
    /// Sequences of a row.
    pub fn sequences(self) -> usize {
        match self {
            RowsNeeded::Samples | RowsNeeded::Labels | RowsNeeded::Prompts => 1,
            RowsNeeded::Pairs { .. } => 2,
            RowsNeeded::Answers { count } => count,
        }
    }

    /// Sequences that stay in one micro-batch.
    pub fn together(self) -> usize {
        if let RowsNeeded::Pairs { .. } = self { 2 } else { 1 }
    }

    /// For messages.
    pub fn describe(self) -> &'static str {
        match self {
            RowsNeeded::Samples => "samples to imitate",
            RowsNeeded::Pairs { .. } => "rows with `chosen` and `rejected`",
            RowsNeeded::Labels => "rows with `completion` and `label`",
            RowsNeeded::Answers { .. } => "rows with `completions` and `rewards`",
            RowsNeeded::Prompts => "rows with a `prompt`",
        }
    }
}

/// What a step minimizes instead of the mean negative log-likelihood.
#[derive(Clone, Debug, PartialEq)]
pub enum Objective {
    /// A chosen and a rejected completion of each prompt: sequences 2i and 2i + 1 of a micro-batch.
    Pairs(PairLoss),
    /// Completions, each labelled as desirable or not.
    Labels(LabelLoss),
    /// Several completions of a prompt, each with an advantage.
    Answers(AnswerLoss),
}

/// A sum of curves over pairs, and the negative log-likelihood of the chosen sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct PairLoss {
    pub terms: Vec<PairTerm>,
    /// The factor of the mean negative log-likelihood of the chosen sequences; 0 if it is no part of the loss.
    pub nll: f64,
    /// Rewards in reports are this, times the measured log-probability, minus that of the reference.
    pub beta: f64,
    /// How reports measure a completion.
    pub reported: Measure,
    /// AlphaPO's exponent: a measured v becomes (1 - e^(-alpha v)) / alpha; 0 leaves v as it is.
    pub alpha: f64,
}

/// One curve: with v the measure of a completion, its loss is `weight` · curve(`scale` · (v of chosen - v of rejected) -
/// `shift`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairTerm {
    pub weight: f64,
    pub measure: Measure,
    pub scale: f64,
    pub shift: f64,
    pub curve: Curve,
}

/// One number for the log-probabilities of a completion's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Their sum, minus that of the reference.
    Sum,
    /// Their mean, minus that of the reference.
    Mean,
    /// The logarithm of the odds of e to the power of their mean.
    Odds,
}

impl Measure {
    pub const ALL: [Measure; 3] = [Measure::Sum, Measure::Mean, Measure::Odds];
}

/// The loss of a margin z.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Curve {
    /// -right · log σ(z) - wrong · log σ(-z)
    Logistic { right: f64, wrong: f64 },
    /// max(0, 1 - z)
    Hinge,
    /// z²
    Square,
}

/// KTO: with x the log-ratio of a completion to the reference, weight · (1 - σ(±beta · (x - kl))).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LabelLoss {
    pub beta: f64,
    pub desirable: f64,
    pub undesirable: f64,
    /// Whether x is compared with the divergence from the reference, which is measured on mismatched completions.
    pub compares_divergence: bool,
}

/// GRPO: the clipped ratio to the policy that gave the answers, times the advantage, and a penalty for leaving the
/// reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerLoss {
    /// One ratio per completion instead of one per token.
    pub by_sequence: bool,
    pub epsilon_low: f64,
    pub epsilon_high: f64,
    /// The largest ratio outside the clip; infinite if there is none.
    pub delta: f64,
    /// The factor of the penalty; 0 = none, and no reference.
    pub beta: f64,
    /// Whether the penalty of a token is multiplied by its ratio.
    pub corrects_penalty: bool,
    /// Logits are divided by this.
    pub temperature: f64,
}

impl Objective {
    /// Columns of the numbers that the host writes for each sequence ([`sequence`]).
    pub const SEQUENCE_COLUMNS: usize = 5;
    /// Columns of the log-probabilities that the host writes for each row: before the updates, and of the reference.
    pub const BEFORE_COLUMNS: usize = 2;
    /// Sums that reports are made of ([`figure`]).
    pub const FIGURES: usize = 8;

    /// Whether it reads log-probabilities of single tokens that the host measured before.
    pub fn reads_rows(&self) -> bool {
        matches!(self, Objective::Answers(_))
    }

    /// Logits are divided by this.
    pub fn temperature(&self) -> f64 {
        match self {
            Objective::Answers(loss) => loss.temperature,
            Objective::Pairs(_) | Objective::Labels(_) => 1.0,
        }
    }
}

/// Columns of the numbers of a sequence.
pub mod sequence {
    /// Supervised rows before the completion: they count in the negative log-likelihood of a chosen sequence alone.
    pub const SKIPPED: usize = 0;
    /// Summed log-probability of the completion by the reference.
    pub const REFERENCE: usize = 1;
    /// What the sequence's loss is multiplied by: 1 ÷ the number of pairs, rows or tokens of the whole step.
    pub const SHARE: usize = 2;
    /// Pairs: what a token's negative log-likelihood is multiplied by. Labels: 1 or -1. Answers: the advantage.
    pub const ROLE: usize = 3;
    /// Labels: the divergence from the reference.
    pub const DIVERGENCE: usize = 4;
}

/// The sums of a step that reports are made of. A sequence counts as chosen if it is the first of its pair or labelled
/// as desirable.
pub mod figure {
    pub const REWARD_CHOSEN: usize = 0;
    pub const REWARD_REJECTED: usize = 1;
    pub const LOGP_CHOSEN: usize = 2;
    pub const LOGP_REJECTED: usize = 3;
    /// Pairs whose chosen completion has the larger reward.
    pub const ACCURATE: usize = 4;
    /// The pooled negative log-likelihood of chosen sequences, without its factor in the loss.
    pub const NLL: usize = 5;
    /// log σ of the log odds ratio, and the ratio itself.
    pub const ODDS_RATIO: usize = 6;
    pub const ODDS: usize = 7;
    /// Answers: the penalty, and how many ratios were below and above the clip.
    pub const PENALTY: usize = 0;
    pub const CLIPPED_LOW: usize = 1;
    pub const CLIPPED_HIGH: usize = 2;
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Objective::Pairs(loss) => {
                f.write_str("pairs")?;
                for PairTerm { weight, measure, scale, shift, curve } in &loss.terms {
                    write!(f, " {weight}*{curve:?}({scale}*{measure:?}-{shift})")?;
                }
                if loss.nll != 0.0 { write!(f, " nll={}", loss.nll) } else { Ok(()) }
            }
            Objective::Labels(LabelLoss { beta, desirable, undesirable, .. }) => {
                write!(f, "labels beta={beta} weights={desirable}/{undesirable}")
            }
            Objective::Answers(loss) => {
                let level = if loss.by_sequence { "sequence" } else { "token" };
                write!(
                    f,
                    "answers {level} clip=-{}/+{} beta={}",
                    loss.epsilon_low, loss.epsilon_high, loss.beta
                )
            }
        }
    }
}

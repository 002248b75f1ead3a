//! The rewards of GRPO: how a generated answer is scored.
//!
//! The reward of an answer is the sum of all scores, each times its weight. Tables of a recipe are read in
//! `reward_tables.rs`; scoring is not here.

use smidgen_ir::words::RewardKind;

/// One of the scores that make a reward: a table of `[[train.reward]]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Reward {
    pub rule: RewardRule,
    pub weight: f64,
}

/// How an answer is scored; all but a command give 0 or 1.
#[derive(Debug, Clone, PartialEq)]
pub enum RewardRule {
    /// The answer, or what the pattern finds in it, equals a column of the row.
    Exact { column: String, pattern: Option<String> },
    /// The last number of the answer, or of what the pattern finds in it, equals the last number of a column.
    Number { column: String, pattern: Option<String> },
    /// The pattern is found in the answer.
    Regex { pattern: String },
    /// The pattern matches the whole answer.
    Format { pattern: String },
    /// The number of tokens of the answer.
    Length { least: usize, most: usize },
    /// The answer is JSON, and an object with these keys if there are any.
    Json { keys: Vec<String> },
    /// What a program of the user's answers.
    Command { command: String, workers: usize, timeout_s: f64 },
}

impl RewardRule {
    pub fn kind(&self) -> RewardKind {
        match self {
            RewardRule::Exact { .. } => RewardKind::Exact,
            RewardRule::Number { .. } => RewardKind::Number,
            RewardRule::Regex { .. } => RewardKind::Regex,
            RewardRule::Format { .. } => RewardKind::Format,
            RewardRule::Length { .. } => RewardKind::Length,
            RewardRule::Json { .. } => RewardKind::Json,
            RewardRule::Command { .. } => RewardKind::Command,
        }
    }
}

//! The attributes of operations on routed experts: how tokens choose them, and which rows of a stored matrix are theirs.
//!
//! The matrices of all experts of a layer are one stored matrix, one after the other.
//! Left out: the operations (`op.rs`) and their shapes (`op_shapes/experts.rs`).

use std::fmt;

/// How tokens choose experts, and how much each chosen expert counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    pub experts: usize,
    /// Experts of a token.
    pub chosen: usize,
    pub scores: RouterScores,
    /// Whether a stored number is added to the score of each expert, for the choice alone.
    pub is_corrected: bool,
    /// Experts are chosen from the best groups only.
    pub groups: Option<RouterGroups>,
    /// Whether the scores of the chosen experts are divided by their sum, to which this is added first.
    pub renormalizes: bool,
    pub added_to_sum: f32,
    pub scale: f32,
    /// Whether the weight of each expert is multiplied by a stored number.
    pub has_expert_scales: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScores {
    /// Of all experts. Renormalized, it is the softmax of the chosen ones.
    Softmax,
    Sigmoid,
}

/// Groups of neighbouring experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterGroups {
    pub count: usize,
    pub chosen: usize,
    /// A group counts as much as the sum of so many of its best scores.
    pub best: usize,
}

impl fmt::Display for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Router { experts, chosen, scores, scale, added_to_sum, .. } = self;
        write!(f, "{scores:?} {chosen} of {experts}")?;
        if let Some(RouterGroups { count, chosen, best }) = self.groups {
            write!(f, " groups={chosen} of {count} by {best}")?;
        }
        let flags = [
            (self.is_corrected, " corrected"),
            (self.renormalizes, " renormalized"),
            (self.has_expert_scales, " expert_scales"),
        ];
        flags.into_iter().filter(|(is_set, _)| *is_set).try_for_each(|(_, text)| f.write_str(text))?;
        if *added_to_sum != 0.0 {
            write!(f, " sum+{added_to_sum:e}")?;
        }
        if *scale == 1.0 { Ok(()) } else { write!(f, " scale={scale}") }
    }
}

/// Rows of each expert's matrix, in a stored matrix that holds those of all experts one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRows {
    pub experts: usize,
    /// First row in the matrix of an expert.
    pub first: usize,
    pub rows: usize,
}

impl ExpertRows {
    /// Where the rows of an expert begin, in a matrix with `all` rows.
    pub fn first_of(&self, expert: usize, all: usize) -> usize {
        expert * (all / self.experts) + self.first
    }
}

impl fmt::Display for ExpertRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExpertRows { experts, first, rows } = self;
        write!(f, "experts={experts} rows={first}+{rows}")
    }
}

pub(crate) fn expert_rows_text(parts: &[ExpertRows], scales: &[f32]) -> String {
    let parts = parts.iter().map(ExpertRows::to_string).collect::<Vec<_>>().join(", ");
    if scales.iter().all(|scale| *scale == 1.0) { parts } else { format!("{parts} scales={scales:?}") }
}

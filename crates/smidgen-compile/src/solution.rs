//! What the solver answers: the plan with its policy, what it takes and why; or that nothing fits.

use crate::options::Policy;
use crate::question::Demand;
use smidgen_ir::Plan;
use thiserror::Error;

#[derive(Clone, Debug)]
pub struct Solution {
    pub plan: Plan,
    pub policy: Policy,
    pub demand: Demand,
    /// Reservation and context.
    pub peak_bytes: u64,
    pub context_bytes: u64,
    pub step_ms: f64,
    /// Why this plan: one sentence a choice.
    pub reasons: Vec<String>,
    /// What each choice saves and costs; only of what [`solve`] returns.
    pub prices: Vec<Price>,
}

/// A choice, against the same plan without it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price {
    pub choice: &'static str,
    /// Of the device; below zero where it takes more.
    pub saved_bytes: i64,
    /// Of a step, as predicted.
    pub cost_ms: f64,
}

impl Solution {
    /// Bytes that lie in pinned memory beside a GPU, on disk beside a CPU.
    pub fn elsewhere_bytes(&self) -> u64 {
        elsewhere_bytes(&self.plan)
    }
}

/// What the budget for elsewhere counts: pinned memory beside a GPU, where disk is bounded by the disk alone.
pub(crate) fn elsewhere_bytes(plan: &Plan) -> u64 {
    plan.size(plan.device.elsewhere()).bytes() as u64
}

/// A run that no policy fits into the budget.
#[derive(Clone, Debug, Error)]
#[error("the leanest plan needs {} bytes, the budget is {budget_bytes}", leanest.peak_bytes)]
pub struct SolveError {
    pub budget_bytes: u64,
    /// The plan that needs least.
    pub leanest: Box<Solution>,
}

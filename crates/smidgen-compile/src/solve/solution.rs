//! The result of the solver: a plan with its policy, its needs and the reasons for its choices, or an error.
//!
//! Reasons and prices are data; reports turn them into sentences.

use crate::question::Demand;
use smidgen_ir::policy::Policy;
use smidgen_ir::{Choice, Plan};
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
    pub reasons: Vec<Reason>,
    /// What each choice saves and costs; empty if nothing fits.
    pub prices: Vec<Price>,
}

/// Why a choice is as it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reason {
    pub choice: Choice,
    pub why: Why,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Why {
    /// The user pinned it.
    Pinned,
    /// The plan fits without this choice saving memory.
    Fits,
    /// Part of the fastest policy found that needs at most these bytes.
    FastestWithin { budget_bytes: u64 },
    /// No policy fits; this one needs the fewest bytes.
    NeedsLeast { peak_bytes: u64 },
    /// Host memory is too small for the alternative.
    HostIsShort,
    /// An adapter on the head rules the choice out.
    HeadHasAdapter,
}

/// A choice, compared with the same plan without it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price {
    pub choice: Choice,
    /// On the device; negative if the choice needs more memory.
    pub saved_bytes: i64,
    /// Predicted, per step.
    pub cost_ms: f64,
}

impl Solution {
    /// Bytes offloaded to host RAM from a GPU, to disk from a CPU, by this many ranks of a machine.
    pub fn offloaded_bytes(&self, local_ranks: usize) -> u64 {
        offloaded_bytes(&self.plan, local_ranks)
    }
}

/// The bytes that the budget for offloading limits: host RAM with a GPU, disk space with a CPU. What a GPU offloads to disk
/// is not limited.
pub(crate) fn offloaded_bytes(plan: &Plan, local_ranks: usize) -> u64 {
    plan.size(plan.device.offload_space()).of_machine(local_ranks) as u64
}

/// No policy fits the budget.
#[derive(Clone, Debug, Error)]
#[error("the smallest plan needs {} bytes, the budget is {budget_bytes}", leanest.peak_bytes)]
pub struct SolveError {
    pub budget_bytes: u64,
    /// The plan that needs least.
    pub leanest: Box<Solution>,
}

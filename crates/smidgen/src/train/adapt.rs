//! Decides whether a run replans when free memory changes, and which plan it uses then.
//!
//! If memory is short, smaller micro-batches with all other choices unchanged are tried first. The solver's plan is
//! used instead if it is faster by more than the error of predictions. If memory is free again, a larger plan is used
//! only if it is faster by as much. Results change only by rounding: the batch is the same, only its sums are split
//! differently.

use super::free_memory::FreeMemory;
use crate::failure::Failure;
use crate::plan::job::Job;
use crate::plan::planning::{Planned, plan_job, plan_job_as_before, unlimited_step_ms};
use crate::rows::data::Data;
use smidgen_ir::{Choice, Policy};
use smidgen_runtime::device::DeviceMemory;
use std::iter::successors;

/// A plan is preferred if it is predicted to be faster by this factor.
const WORTHWHILE: f64 = 1.05;
/// A run looks for a faster plan if free memory has grown by at least a tenth of the budget and eight times the
/// measuring error.
const GROWTH_SHARE: u64 = 10;
const GROWTH_OVER_NOISE: u64 = 8;

/// The check of free memory that a run makes at its checkpoints.
#[derive(Debug)]
pub struct Watch<'a> {
    pub free_memory: &'a mut dyn FreeMemory,
    pub job: &'a Job,
    /// Peak of the plan, memory outside the arena included.
    pub peak_bytes: u64,
    /// The budget that the plan was made for.
    pub budget_bytes: u64,
    /// Whether more memory would make the run faster.
    pub may_grow: bool,
}

impl Watch<'_> {
    /// Returns the memory available now if it calls for another plan.
    pub fn check(&mut self, device: Option<DeviceMemory>) -> Option<u64> {
        let reachable = self.free_memory.reachable_bytes(device, self.peak_bytes)?;
        let noise = self.free_memory.noise_bytes();
        let is_short = lacks(self.peak_bytes, reachable, noise);
        let budget = self.job.budget_for(reachable).bytes;
        let grown = budget.saturating_sub(self.budget_bytes);
        let has_grown = grown >= GROWTH_OVER_NOISE * noise && grown >= self.budget_bytes / GROWTH_SHARE;
        (is_short || (has_grown && self.may_grow)).then_some(reachable)
    }
}

/// Whether a plan exceeds the available memory by more than the measuring error.
pub fn lacks(peak_bytes: u64, reachable_bytes: u64, noise_bytes: u64) -> bool {
    let tolerance = noise_bytes + if noise_bytes > 0 { peak_bytes / 100 } else { 0 };
    reachable_bytes + tolerance < peak_bytes
}

/// Whether unlimited memory would make the run faster by more than the error of predictions.
pub fn may_grow(job: &Job, planned: &Planned) -> Result<bool, Failure> {
    Ok(planned.solution.step_ms >= WORTHWHILE * unlimited_step_ms(job)?)
}

/// Plans for a new budget that the plan before does not fit.
pub fn plan_smaller(job: &Job, before: &Policy) -> Result<Planned, Failure> {
    let halved = halved_micro_batches(job, before)?;
    let solved = plan_job(job)?;
    match halved {
        Some(halved) if !solved.fits || is_close(&halved, &solved) => Ok(halved),
        _ if solved.fits => Ok(solved),
        _ => Err(solved.refusal()),
    }
}

fn is_close(one: &Planned, other: &Planned) -> bool {
    one.solution.step_ms <= WORTHWHILE * other.solution.step_ms
}

/// Halves the micro-batches until the plan fits, with all other choices unchanged.
fn halved_micro_batches(job: &Job, before: &Policy) -> Result<Option<Planned>, Failure> {
    let Data::Rows(rows) = &job.data else { return Ok(None) };
    if job.recipe.memory.pins.sets(Choice::MicroBatch) {
        return Ok(None);
    }
    let longest = rows.train.longest();
    let halves = |policy: &Policy| policy.with_halved_micro_batches(longest);
    for policy in successors(halves(before), halves) {
        if let Some(planned) = plan_job_as_before(job, &policy)? {
            return Ok(Some(planned));
        }
    }
    Ok(None)
}

/// Plans for a larger budget: the plan before, unless another one is faster by more than the error of predictions.
pub fn plan_larger(job: &Job, before: &Policy) -> Result<Planned, Failure> {
    let Some(kept) = plan_job_as_before(job, before)? else {
        return plan_smaller(job, before);
    };
    let solved = plan_job(job)?;
    Ok(if solved.fits && !is_close(&kept, &solved) { solved } else { kept })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_within_the_measuring_error_are_ignored() {
        let lacks = |reachable: u64, noise: u64| lacks(1000 << 20, reachable << 20, noise << 20);
        // The tolerance is 8 MiB and 1 %.
        assert!(!lacks(1000, 8) && !lacks(982, 8) && lacks(981, 8) && lacks(0, 8) && !lacks(2000, 8));
        assert!(!lacks(1000, 0) && lacks(999, 0));
    }
}

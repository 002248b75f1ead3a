//! What a plan depends on besides its job: the memory that may be used, and the plan before.
//!
//! A job is made once. It has the facts that were known then; a run opens the device, measures, and plans again
//! whenever free memory changes: each time with other facts, always with the same job.
//! Left out: how free memory is read (`train/free_memory.rs`).

use crate::plan::budget::{JobBudget, budget_within};
use crate::plan::devices::JobDevice;
use crate::plan::job::Job;
use smidgen_ir::Policy;

#[derive(Clone, Debug)]
pub struct MemoryFacts {
    pub budget: JobBudget,
    /// The device, with the memory of its driver's context: assumed at first, measured once the device is open.
    pub place: JobDevice,
    pub before: Before,
}

/// The plan that the run had before.
#[derive(Clone, Debug)]
pub enum Before {
    Nothing,
    /// The plan of the checkpoint stays if it fits: only then is the result bit-identical.
    Checkpoint(Policy),
    /// The plan stays, or becomes the same with smaller micro-batches, unless another plan is clearly faster.
    MemoryChanged(Policy),
    /// All ranks run the plan of rank 0.
    FirstRank(Policy),
}

impl MemoryFacts {
    /// What was known when the job was made.
    pub fn of(job: &Job) -> MemoryFacts {
        MemoryFacts { budget: job.budget, place: job.place.clone(), before: Before::Nothing }
    }

    /// Memory changed in a run that had this plan: now it could reserve this much.
    pub fn changed(&self, job: &Job, reachable_bytes: u64, before: &Policy) -> MemoryFacts {
        MemoryFacts {
            budget: budget_for(job, reachable_bytes),
            before: Before::MemoryChanged(before.clone()),
            ..self.clone()
        }
    }
}

/// The budget of a run that could reserve this much memory.
pub fn budget_for(job: &Job, reachable_bytes: u64) -> JobBudget {
    let budget = budget_within(&job.recipe, job.request.device, reachable_bytes);
    budget.shared_by(job.world.on_device).within(job.recipe.memory.budget, &job.profile)
}

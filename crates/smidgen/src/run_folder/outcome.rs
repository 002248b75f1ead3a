//! How a run ended.
//!
//! Plain data that the trainer returns and commands print.

use crate::logs::evaluations::Evaluations;

/// The result of one plan's part of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Updates done, including those before a resume.
    pub steps: u64,
    /// Loss of the first step of this part of the run; NaN if there was none.
    pub first_loss: f64,
    /// Loss of its last step; NaN if there was none.
    pub last_loss: f64,
    pub evaluations: Evaluations,
    pub ending: Ending,
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All steps are done, and the result is saved.
    Done,
    /// Evaluations no longer improved; the result is saved.
    StoppedEarly,
    /// A signal or a callback stopped it; the state is in the checkpoint of the last step.
    Interrupted,
    /// It used more memory than its plan; the state is in the checkpoint of the last step.
    Exceeded {
        /// Memory measured on the device; the most of all ranks.
        bytes: u64,
    },
    /// Free memory changed, and another plan follows; the state is in the checkpoint of the last step.
    #[doc(hidden)]
    MemoryMoved { reachable_bytes: u64 },
}

/// The result of a run, over all of its plans.
#[derive(Clone, Debug)]
pub struct RunResult {
    pub outcome: Outcome,
    pub total_steps: u64,
    /// Peak of the last plan.
    pub planned_bytes: u64,
    /// How many plans the run used.
    pub plans: usize,
}

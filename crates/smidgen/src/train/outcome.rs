//! How a run ended, and the choices it ran with.
//!
//! Plain data that the trainer returns, checkpoints hold and commands turn into words.

use super::standing::Standing;

/// What a run reports when it ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Updates done, those before a resume included.
    pub steps: u64,
    /// Of the first and the last step of this part of the run; NaN if there was none.
    pub first_loss: f64,
    pub last_loss: f64,
    pub standing: Standing,
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
    /// It took more memory than its plan; the state is in the checkpoint of the last step.
    Exceeded {
        /// Memory measured on the device.
        bytes: u64,
    },
    /// Free memory changed, and another plan follows; the state is in the checkpoint of the last step.
    #[doc(hidden)]
    MemoryMoved { reachable_bytes: u64 },
}

/// How a run went, over all of its plans.
#[derive(Clone, Debug)]
pub struct Went {
    pub outcome: Outcome,
    pub total_steps: u64,
    /// Of the last plan.
    pub planned_bytes: u64,
    /// Number of plans that the run used.
    pub plans: usize,
}

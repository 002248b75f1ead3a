//! A step that has begun: what is known of it until its report arrives.
//!
//! A GPU works on a step while the host prepares the next, so this waits in the trainer for a while.

/// A step whose work is queued on the device.
#[derive(Debug)]
pub struct BegunStep {
    pub step: u64,
    /// Epochs done after it.
    pub epoch: f64,
    pub lr: f64,
    pub tokens: u64,
    pub supervised: u64,
    /// Of this rank.
    pub samples: Vec<u32>,
    pub rounds: Rounds,
}

/// The micro-batches that a rank runs in a step: its own, and empty ones while others have more.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    pub count: usize,
    /// A sample that an empty micro-batch runs with weight 0.
    pub filler: u32,
}

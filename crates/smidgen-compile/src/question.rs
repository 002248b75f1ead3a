//! What the solver is asked: the sizes of micro-batch that the data allows, the budget, and what the user pinned.
//!
//! Plain data, so that everything that answers (`solve.rs`) and everything that searches can use it.

use crate::request::{Policy, Recompute};
use smidgen_ir::Extent;

/// What the data asks for at one size of micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    pub micro_tokens: usize,
    /// Largest micro-batch at that size.
    pub extent: Extent,
    /// Micro-batches of an average optimizer step.
    pub micro_steps: f64,
}

/// Bytes that a plan may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Reservation and context on the device.
    pub device_bytes: u64,
    /// Bytes for offloaded tensors: pinned memory with a GPU, disk with a CPU.
    pub elsewhere_bytes: u64,
}

impl Budget {
    /// So much on the device, and room enough elsewhere.
    pub fn device(device_bytes: u64) -> Budget {
        Budget { device_bytes, elsewhere_bytes: u64::MAX }
    }
}

/// Choices that the user has made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pins {
    /// All of them, as in a plan that was made before.
    pub policy: Option<Policy>,
    pub recompute: Option<Recompute>,
    pub loss_chunk: Option<usize>,
    /// Tokens for which wide activations exist at the same time; 0 = all.
    pub tile_tokens: Option<usize>,
    /// How many layers' weights are offloaded, and whether the embedding and head are.
    pub weights_away: Option<usize>,
    pub tables_away: Option<bool>,
    /// Whether those that are away are on disk, also beside a GPU.
    pub weights_on_disk: bool,
    /// Whether activations for the backward pass wait elsewhere.
    pub activations_away: Option<bool>,
    pub moments_away: Option<bool>,
}

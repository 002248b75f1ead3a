//! The input of the solver: what to run, the sizes of micro-batch that the data allows, the pins and the budget.
//!
//! Plain data, used by the solver (`mod.rs`) and by all of its searches.

use crate::context::Context;
use crate::profile::Profile;
use crate::request::{Purpose, Request};
use smidgen_ir::Extent;
use smidgen_ir::policy::Pins;

/// The question which policy is fastest for some work within a budget.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    pub purpose: Purpose,
    /// Its extents are replaced by those of the demand.
    pub request: &'a Request,
    /// Sizes to choose from, largest micro-batch first; a single one if `pins.micro_tokens` is set.
    pub demands: &'a [Demand],
    pub pins: &'a Pins,
    pub context: Context,
    pub budget: Budget,
    pub profile: &'a Profile,
}

/// The sizes that the data requires at one size of micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    pub micro_tokens: usize,
    /// Largest micro-batch at that size.
    pub extent: Extent,
    /// Largest optimizer step: all of its micro-batches together.
    pub step: Extent,
    /// Micro-batches of an average step, or of a whole evaluation if that is the purpose.
    pub micro_steps: f64,
}

/// Bytes that a plan may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Reservation and context on the device.
    pub device_bytes: u64,
    /// Bytes for offloaded tensors on the whole machine: pinned memory with a GPU, disk space with a CPU.
    pub offload_bytes: u64,
    /// Ranks on the machine. Each offloads the same amount, but they share frozen weights in pinned memory.
    pub local_ranks: usize,
}

impl Budget {
    /// A budget that limits the device, but not offloading.
    pub fn device(device_bytes: u64) -> Budget {
        Budget { device_bytes, offload_bytes: u64::MAX, local_ranks: 1 }
    }
}

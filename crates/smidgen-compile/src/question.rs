//! What the solver is asked: what to run, the sizes of micro-batch that the data allows, the pins and the budget.
//!
//! Plain data, so that everything that answers (`solve.rs`) and everything that searches can use it.

use crate::context::Context;
use crate::profile::Profile;
use crate::request::{Purpose, Request};
use smidgen_ir::Extent;
use smidgen_ir::policy::Pins;

/// Which policy is fastest for this work in this budget?
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    pub purpose: Purpose,
    /// Its extent is replaced by that of the demand.
    pub request: &'a Request,
    /// Sizes to choose from, largest micro-batch first; one where `pins.micro_tokens` is set.
    pub demands: &'a [Demand],
    pub pins: &'a Pins,
    pub context: Context,
    pub budget: Budget,
    pub profile: &'a Profile,
}

/// What the data asks for at one size of micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    pub micro_tokens: usize,
    /// Largest micro-batch at that size.
    pub extent: Extent,
    /// Largest optimizer step: all of its micro-batches together.
    pub step: Extent,
    /// Micro-batches of an average step; of a whole evaluation where that is the purpose.
    pub micro_steps: f64,
}

/// Bytes that a plan may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Reservation and context on the device.
    pub device_bytes: u64,
    /// Bytes of a machine for offloaded tensors: pinned memory with a GPU, disk with a CPU.
    pub offload_bytes: u64,
    /// Ranks of that machine; each offloads the same, and frozen weights in pinned memory exist once.
    pub local_ranks: usize,
}

impl Budget {
    /// A limit for the device, and none for what is offloaded.
    pub fn device(device_bytes: u64) -> Budget {
        Budget { device_bytes, offload_bytes: u64::MAX, local_ranks: 1 }
    }
}

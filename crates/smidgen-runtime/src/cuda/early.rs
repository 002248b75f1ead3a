//! Kernels of generation that start before the kernel in front of them has ended (programmatic dependent launch).
//!
//! A decode step is hundreds of kernels of a few microseconds each, and between two of them a GPU has little to do for
//! one or two more. These kernels call `await_previous` (`prelude.cuh`) before they read or write anything that another
//! kernel touches, so the results are the same. All others start as usual: after everything in front of them.
//! Only where nothing but kernels is in the stream: with transfers, a weight may arrive between two of them.

use super::generation::Capability;
use cudarc::driver::sys;

/// The first compute capability and driver that can do it, in graphs too.
const LEAST_CAPABILITY: Capability = (9, 0);
const LEAST_DRIVER: i32 = 12_040;

/// What the names of these kernels begin with.
const EARLY: [&str; 8] = [
    "cache_rows",
    "cached_attention_",
    "few_rows_",
    "gated_act_eight",
    "join_pieces",
    "rms_norm_heads",
    "rms_norm_two",
    "rope_eight",
];

/// Whether a GPU and its driver can start a kernel early.
pub fn is_possible(capability: Capability, driver: i32) -> bool {
    capability >= LEAST_CAPABILITY && driver >= LEAST_DRIVER
}

/// Whether a kernel waits by itself for those in front of it.
pub fn starts_early(kernel: &str) -> bool {
    EARLY.iter().any(|name| kernel.starts_with(name))
}

/// The attribute of a launch that lets it start early.
pub fn early_start() -> sys::CUlaunchAttribute {
    // SAFETY: plain numbers, for which zero is a value.
    let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    attribute
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hopper_starts_kernels_early_and_older_gpus_and_drivers_do_not() {
        assert!(is_possible((9, 0), 12_080) && is_possible((12, 0), 13_000));
        assert!(!is_possible((8, 9), 13_000) && !is_possible((9, 0), 12_020));
    }
}

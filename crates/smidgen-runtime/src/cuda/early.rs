//! Kernels of generation that start before the previous kernel has ended (programmatic dependent launch).
//!
//! A decode step is hundreds of kernels of a few microseconds each, and between two of them a GPU is nearly idle for
//! one or two microseconds. These kernels call `await_previous` (`prelude.cuh`) before they read or write anything that
//! another kernel touches, so the results are the same. All other kernels start after everything before them has ended.
//! Not used in plans with transfers, where a weight may arrive between two kernels.

use super::gpu_generation::Capability;
use cudarc::driver::sys;

/// The lowest compute capability and driver version that support it, also in graphs.
const LEAST_CAPABILITY: Capability = (9, 0);
const LEAST_DRIVER: i32 = 12_040;

/// The prefixes of the names of these kernels.
const EARLY: [&str; 9] = [
    "cache_rows",
    "cached_attention_",
    "few_rows_",
    "gated_act_eight",
    "join_pieces",
    "rms_norm_heads",
    "rms_norm_two",
    "rope_eight",
    "rope_interleaved_eight",
];

/// Whether a GPU and its driver can start a kernel early.
pub fn is_possible(capability: Capability, driver: i32) -> bool {
    capability >= LEAST_CAPABILITY && driver >= LEAST_DRIVER
}

/// Whether a kernel calls `await_previous`, so that it may start early.
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

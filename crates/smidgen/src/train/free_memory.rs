//! The memory that a run could reserve now.
//!
//! It is a trait, so that tests can simulate processes that reserve and free memory.

use crate::machine::host;
use crate::machine::process_memory::read_rss;
use smidgen_runtime::device::DeviceMemory;
use std::fmt::Debug;

pub trait FreeMemory: Debug {
    /// Bytes that this process holds or could reserve on its device; `None` if unknown. `device` is the memory of a
    /// device that has its own, of which the run holds `held_bytes`.
    fn reachable_bytes(&mut self, device: Option<DeviceMemory>, held_bytes: u64) -> Option<u64>;

    /// The measuring error: smaller differences are ignored.
    fn noise_bytes(&self) -> u64 {
        8 << 20
    }
}

/// The free memory of this machine, within the limits of its container.
#[derive(Debug)]
pub struct Machine;

impl FreeMemory for Machine {
    fn reachable_bytes(&mut self, device: Option<DeviceMemory>, held_bytes: u64) -> Option<u64> {
        match device {
            Some(device) => Some(device.free_bytes + held_bytes),
            // The page cache counts as free already.
            None => Some(host::free_memory_bytes()? + read_rss()?.anonymous_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_memory_counts_as_reachable() {
        let device =
            DeviceMemory { bytes: 900, peak_bytes: 900, free_bytes: 100, pinned_bytes: 0, mapped_bytes: 0 };
        // Other programs may have taken memory since the device was opened, so its total is no measure.
        assert_eq!(Machine.reachable_bytes(Some(device), 300), Some(400));
        let reachable = Machine.reachable_bytes(None, 0);
        assert!(reachable.is_none_or(|bytes| bytes > 0));
    }
}

//! Measures memory and load of the process, the device and the machine, after every step and at the end of a phase.
//!
//! Every metrics row has the time that measuring took, so a run shows what its monitor costs. It is time of the
//! thread that queues the work: a GPU keeps computing meanwhile.
//! Kernel counters are read, never reset, so `/usr/bin/time -v` still shows the real peak of the run.

use crate::machine::host;
use crate::machine::process_memory::read_rss;
use smidgen_runtime::Device;
use smidgen_runtime::device::DeviceMemory;
use std::time::Instant;

/// A measurement; fields are `None` where the system does not report them or monitoring is off.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measurement {
    /// Memory of a device that has its own.
    pub device: Option<DeviceMemory>,
    pub free_bytes: Option<u64>,
    pub rss_bytes: Option<u64>,
    /// Peak of the process so far.
    pub rss_peak_bytes: Option<u64>,
    /// Percent of time in which the GPU was busy.
    pub gpu_util: Option<u32>,
    /// The time that measuring took.
    pub ms: f64,
}

pub fn measure<D: Device>(device: &mut D) -> Measurement {
    let begun = Instant::now();
    let host = read_rss();
    let (gpu_util, device) = (device.busy_percent(), device.memory());
    // Memory that ranks share is pinned memory, although the kernel may count it as memory of the process.
    let mapped_bytes = device.map_or(0, |device| device.mapped_bytes);
    Measurement {
        device,
        gpu_util,
        free_bytes: device.map_or_else(host::free_memory_bytes, |device| Some(device.free_bytes)),
        rss_bytes: host.map(|host| host.rss_bytes.saturating_sub(mapped_bytes)),
        rss_peak_bytes: host.map(|host| host.peak_bytes.saturating_sub(mapped_bytes)),
        ms: begun.elapsed().as_secs_f64() * 1e3,
    }
}

impl Measurement {
    /// Memory in use by the run; on a CPU that is the memory of the process.
    pub fn device_bytes(&self) -> Option<u64> {
        self.own_device_bytes().or(self.rss_bytes)
    }

    /// Memory in use on a device that has its own.
    pub fn own_device_bytes(&self) -> Option<u64> {
        self.device.map(|device| device.bytes)
    }

    pub fn device_peak_bytes(&self) -> Option<u64> {
        self.device.map_or(self.rss_peak_bytes, |device| Some(device.peak_bytes))
    }

    pub fn pinned_bytes(&self) -> u64 {
        self.device.map_or(0, |device| device.pinned_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_memory_of_its_own_is_the_process() {
        let process = Measurement { rss_bytes: Some(5), rss_peak_bytes: Some(7), ..Measurement::default() };
        assert_eq!((process.device_bytes(), process.device_peak_bytes()), (Some(5), Some(7)));
        assert_eq!((process.free_bytes, process.pinned_bytes()), (None, 0));
        let memory =
            DeviceMemory { bytes: 90, peak_bytes: 95, free_bytes: 10, pinned_bytes: 4, mapped_bytes: 0 };
        let own = Measurement { device: Some(memory), free_bytes: Some(10), ..process };
        assert_eq!((own.device_bytes(), own.device_peak_bytes()), (Some(90), Some(95)));
        assert_eq!((own.free_bytes, own.pinned_bytes()), (Some(10), 4));
    }

    #[test]
    fn measuring_is_timed_and_sees_this_process() {
        let mut cpu = smidgen_runtime::Cpu::new(1).unwrap();
        let measured = measure(&mut cpu);
        assert_eq!(measured.rss_bytes.is_some(), std::path::Path::new("/proc/self/status").exists());
        assert!(measured.rss_peak_bytes >= measured.rss_bytes);
        assert!(measured.ms > 0.0);
    }
}

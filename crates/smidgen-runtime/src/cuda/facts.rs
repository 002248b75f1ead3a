//! The properties of a GPU that are known without a context: name, compute capability, memory, driver version.
//!
//! Free memory comes from NVML, which needs no context; without NVML it is unknown until the device is opened.

use super::driver::{check, find, init, named};
use super::gpu_generation::{Generation, supports};
use super::libraries;
use super::nvml;
use crate::device::DeviceError;
use cudarc::driver::{result, sys};
use smidgen_ir::Precision;

/// The properties of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuFacts {
    pub ordinal: usize,
    pub name: String,
    /// Such as (9, 0).
    pub capability: (u32, u32),
    pub total_bytes: u64,
    /// Free memory, if NVML is available.
    pub free_bytes: Option<u64>,
    /// Such as 13000 for CUDA 13.0.
    pub driver_version: i32,
}

impl GpuFacts {
    /// Whether kernels and matmuls run on this GPU: Volta or newer.
    pub fn can_train(&self) -> bool {
        Generation::of(self.capability).is_some()
    }

    /// Whether it computes in bf16; older GPUs compute in f16.
    pub fn has_bf16(&self) -> bool {
        supports(self.capability, Precision::Bf16)
    }
}

/// Queries a GPU without using any of its memory.
pub fn query(ordinal: usize) -> Result<GpuFacts, DeviceError> {
    libraries::require()?;
    init()?;
    let (device, capability) = find(ordinal)?;
    // SAFETY: the device exists.
    let total = named(unsafe { result::device::total_mem(device) }, "cuDeviceTotalMem")?;
    Ok(GpuFacts {
        ordinal,
        name: named(result::device::get_name(device), "cuDeviceGetName")?,
        capability,
        total_bytes: total as u64,
        free_bytes: nvml::free_bytes(device),
        driver_version: driver_version()?,
    })
}

/// The CUDA version of the driver, such as 12080.
pub(super) fn driver_version() -> Result<i32, DeviceError> {
    let mut version = 0;
    // SAFETY: the pointer is valid for the call.
    check(unsafe { sys::cuDriverGetVersion(&mut version) }, "cuDriverGetVersion")?;
    Ok(version)
}

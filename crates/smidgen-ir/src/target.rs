//! What a plan is made for: a kind of device, the precision of its matmuls, and the memory spaces that it has.
//!
//! Graphs, plans and sizes of scratch memory depend on these, and these on nothing but element types.

use crate::storage::DType;
use serde::{Deserialize, Serialize};

/// Where a value is stored. Operations work on the device; offloaded values are copied there and back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Space {
    /// The memory that the budget limits: the GPU's, or RAM if the device is the CPU.
    #[default]
    Device,
    /// Pinned host memory, if the device is a GPU.
    Host,
    /// A file on disk.
    Disk,
}

impl Space {
    pub const ALL: [Space; 3] = [Space::Device, Space::Host, Space::Disk];

    pub fn name(self) -> &'static str {
        match self {
            Space::Device => "device",
            Space::Host => "host",
            Space::Disk => "disk",
        }
    }
}

/// The number format of matmul operands. Their sums, and all other arithmetic, are f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    #[default]
    F32,
    /// Operands rounded to bf16.
    Bf16,
    /// Operands rounded to f16.
    F16,
    /// bf16, except that weights stored as [`crate::Storage::Fp8Rows`] are multiplied in e4m3 by activations that are
    /// rounded with a scale for each token.
    Fp8,
}

impl Precision {
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::F16 => "f16",
            Precision::Fp8 => "fp8",
        }
    }
}

/// The kinds of device that a plan can be made for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    #[default]
    Cpu,
    Cuda,
}

impl DeviceKind {
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        }
    }

    /// Where offloaded values go by default.
    pub fn offload_space(self) -> Space {
        match self {
            DeviceKind::Cpu => Space::Disk,
            DeviceKind::Cuda => Space::Host,
        }
    }

    /// The space that this device uses for `space`. On a CPU host memory is the device's own, so offloading goes to disk.
    pub fn resolve(self, space: Space) -> Space {
        match (self, space) {
            (DeviceKind::Cpu, Space::Host) => Space::Disk,
            _ => space,
        }
    }

    /// The element type of activations and their gradients: that of matmuls on a GPU, always f32 on a CPU.
    pub fn activations(self, precision: Precision) -> DType {
        match (self, precision) {
            (DeviceKind::Cpu, _) | (DeviceKind::Cuda, Precision::F32) => DType::F32,
            (DeviceKind::Cuda, Precision::Bf16 | Precision::Fp8) => DType::Bf16,
            (DeviceKind::Cuda, Precision::F16) => DType::F16,
        }
    }
}

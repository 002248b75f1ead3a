//! One of the devices, chosen when the program runs.
//!
//! Nothing but hands every call on: a device with generic methods cannot be behind a pointer.

use crate::cpu::Cpu;
use crate::cuda::Cuda;
use crate::device::{
    Address, BoundStep, Destination, Device, DeviceError, DeviceMemory, Fill, FillError, Reservation,
};
use smidgen_ir::Extent;
use std::path::PathBuf;

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a process has one device")]
pub enum AnyDevice {
    Cpu(Cpu),
    Cuda(Box<Cuda>),
}

impl AnyDevice {
    /// With a folder for the file of values that a plan puts on disk.
    pub fn with_spill_folder(self, folder: PathBuf) -> AnyDevice {
        match self {
            AnyDevice::Cpu(cpu) => AnyDevice::Cpu(cpu.with_spill_folder(folder)),
            AnyDevice::Cuda(cuda) => AnyDevice::Cuda(Box::new(cuda.with_spill_folder(folder))),
        }
    }

    /// Without graphs of launches, where there are any.
    pub fn launching_singly(self) -> AnyDevice {
        match self {
            AnyDevice::Cpu(cpu) => AnyDevice::Cpu(cpu),
            AnyDevice::Cuda(cuda) => AnyDevice::Cuda(Box::new(cuda.launching_singly())),
        }
    }
}

impl Device for AnyDevice {
    fn name(&self) -> &'static str {
        match self {
            AnyDevice::Cpu(device) => device.name(),
            AnyDevice::Cuda(device) => device.name(),
        }
    }

    fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError> {
        match self {
            AnyDevice::Cpu(device) => device.reserve(spaces),
            AnyDevice::Cuda(device) => device.reserve(spaces),
        }
    }

    fn check(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        match self {
            AnyDevice::Cpu(device) => device.check(step, extent),
            AnyDevice::Cuda(device) => device.check(step, extent),
        }
    }

    fn prepare(&mut self, steps: &[(Extent, &[BoundStep])]) -> Result<(), DeviceError> {
        match self {
            AnyDevice::Cpu(device) => device.prepare(steps),
            AnyDevice::Cuda(device) => device.prepare(steps),
        }
    }

    fn chosen(&self) -> Option<String> {
        match self {
            AnyDevice::Cpu(device) => device.chosen(),
            AnyDevice::Cuda(device) => device.chosen(),
        }
    }

    fn adopt(&mut self, chosen: &str) -> bool {
        match self {
            AnyDevice::Cpu(device) => device.adopt(chosen),
            AnyDevice::Cuda(device) => device.adopt(chosen),
        }
    }

    fn write(&mut self, at: Address, from: &[u8]) {
        match self {
            AnyDevice::Cpu(device) => device.write(at, from),
            AnyDevice::Cuda(device) => device.write(at, from),
        }
    }

    fn read(&mut self, at: Address, into: &mut [u8]) -> Result<(), DeviceError> {
        match self {
            AnyDevice::Cpu(device) => device.read(at, into),
            AnyDevice::Cuda(device) => device.read(at, into),
        }
    }

    fn begin_read(&mut self, slot: usize, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        match self {
            AnyDevice::Cpu(device) => device.begin_read(slot, offset, bytes),
            AnyDevice::Cuda(device) => device.begin_read(slot, offset, bytes),
        }
    }

    fn finish_read(&mut self, slot: usize, offset: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        match self {
            AnyDevice::Cpu(device) => device.finish_read(slot, offset, into),
            AnyDevice::Cuda(device) => device.finish_read(slot, offset, into),
        }
    }

    fn is_asynchronous(&self) -> bool {
        match self {
            AnyDevice::Cpu(device) => device.is_asynchronous(),
            AnyDevice::Cuda(device) => device.is_asynchronous(),
        }
    }

    fn memory(&mut self) -> Option<DeviceMemory> {
        match self {
            AnyDevice::Cpu(device) => device.memory(),
            AnyDevice::Cuda(device) => device.memory(),
        }
    }

    fn fill<E>(&mut self, to: Destination, fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        match self {
            AnyDevice::Cpu(device) => device.fill(to, fill),
            AnyDevice::Cuda(device) => device.fill(to, fill),
        }
    }

    fn run_all(&mut self, steps: &[BoundStep], extent: &Extent) -> Result<(), DeviceError> {
        match self {
            AnyDevice::Cpu(device) => device.run_all(steps, extent),
            AnyDevice::Cuda(device) => device.run_all(steps, extent),
        }
    }

    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        match self {
            AnyDevice::Cpu(device) => device.run(step, extent),
            AnyDevice::Cuda(device) => device.run(step, extent),
        }
    }
}

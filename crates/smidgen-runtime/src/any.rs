//! A device that is chosen at run time: the CPU or a GPU.
//!
//! `Device` has generic methods, so it cannot be a trait object; this enum forwards every call instead.

use crate::comm::Progress;
use crate::cpu::Cpu;
use crate::cuda::Cuda;
use crate::device::{
    Address, BoundStep, Destination, Device, DeviceError, DeviceMemory, Fill, FillError, Reservation,
};
use crate::shared_host::SharedHost;
use smidgen_ir::Extent;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

macro_rules! forward {
    ($any:expr, $device:ident => $call:expr) => {
        match $any {
            AnyDevice::Cpu($device) => $call,
            AnyDevice::Cuda($device) => $call,
        }
    };
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a process has one device")]
pub enum AnyDevice {
    Cpu(Cpu),
    Cuda(Box<Cuda>),
}

impl AnyDevice {
    /// Sets the folder for the file of tensors that a plan offloads to disk.
    pub fn with_spill_folder(self, folder: PathBuf) -> AnyDevice {
        match self {
            AnyDevice::Cpu(cpu) => AnyDevice::Cpu(cpu.with_spill_folder(folder)),
            AnyDevice::Cuda(cuda) => AnyDevice::Cuda(Box::new(cuda.with_spill_folder(folder))),
        }
    }

    /// Sets the time limit for an exchange with other ranks.
    pub fn limit_exchanges(&mut self, limit: Duration) {
        forward!(self, device => device.limit_exchanges(limit))
    }

    /// Why compiled kernels could not be cached, and the remedy; `None` on a CPU, which compiles none.
    pub fn cache_failure(&self) -> Option<String> {
        match self {
            AnyDevice::Cpu(_) => None,
            AnyDevice::Cuda(cuda) => cuda.cache_failure(),
        }
    }

    /// Counts the exchanges of this rank; `None` if it has no other ranks.
    pub fn exchange_progress(&self) -> Option<Arc<Progress>> {
        forward!(self, device => device.exchange_progress())
    }

    /// Turns CUDA graphs off; no effect on a CPU.
    pub fn without_graphs(self) -> AnyDevice {
        match self {
            AnyDevice::Cpu(cpu) => AnyDevice::Cpu(cpu),
            AnyDevice::Cuda(cuda) => AnyDevice::Cuda(Box::new(cuda.without_graphs())),
        }
    }
}

impl Device for AnyDevice {
    fn name(&self) -> &'static str {
        forward!(self, device => device.name())
    }

    fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError> {
        forward!(self, device => device.reserve(spaces))
    }

    fn share_host(&mut self, shared: SharedHost) {
        forward!(self, device => device.share_host(shared))
    }

    fn fills(&self, at: Address) -> bool {
        forward!(self, device => device.fills(at))
    }

    fn check(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        forward!(self, device => device.check(step, extent))
    }

    fn prepare(&mut self, steps: &[(Extent, &[BoundStep])]) -> Result<(), DeviceError> {
        forward!(self, device => device.prepare(steps))
    }

    fn chosen_algorithms(&self) -> Option<String> {
        forward!(self, device => device.chosen_algorithms())
    }

    fn adopt_algorithms(&mut self, chosen: &str) -> bool {
        forward!(self, device => device.adopt_algorithms(chosen))
    }

    fn write(&mut self, at: Address, from: &[u8]) {
        forward!(self, device => device.write(at, from))
    }

    fn read(&mut self, at: Address, into: &mut [u8]) -> Result<(), DeviceError> {
        forward!(self, device => device.read(at, into))
    }

    fn begin_read(&mut self, slot: usize, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        forward!(self, device => device.begin_read(slot, offset, bytes))
    }

    fn finish_read(&mut self, slot: usize, offset: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        forward!(self, device => device.finish_read(slot, offset, into))
    }

    fn is_asynchronous(&self) -> bool {
        forward!(self, device => device.is_asynchronous())
    }

    fn memory(&mut self) -> Option<DeviceMemory> {
        forward!(self, device => device.memory())
    }

    fn busy_percent(&mut self) -> Option<u32> {
        forward!(self, device => device.busy_percent())
    }

    fn fill<E>(&mut self, to: Destination, fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        forward!(self, device => device.fill(to, fill))
    }

    fn run_part(&mut self, steps: &[BoundStep], extent: &Extent) -> Result<(), DeviceError> {
        forward!(self, device => device.run_part(steps, extent))
    }

    fn finish_parts(&mut self, steps: &[BoundStep]) -> Result<(), DeviceError> {
        forward!(self, device => device.finish_parts(steps))
    }

    fn run_all(&mut self, steps: &[BoundStep], extent: &Extent, sums: bool) -> Result<(), DeviceError> {
        forward!(self, device => device.run_all(steps, extent, sums))
    }

    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        forward!(self, device => device.run(step, extent))
    }
}

//! Runs a plan: the device trait, the executor that walks a plan's steps, and the devices.
//!
//! The runtime decides nothing. Once a plan is loaded it does not plan, reorder, allocate or fall back: the plan
//! holds every buffer that a step touches, its workspace included.

pub mod any;
pub mod comm;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod executor;
pub mod lane;
pub mod null;
mod python_roots;
pub mod shared_host;
pub mod signals;

pub use any::AnyDevice;
pub use cpu::Cpu;
pub use cpu::counter;
pub use cuda::Cuda;
pub use device::{BoundStep, Device, DeviceError, Operand};
pub use executor::Executor;
pub use null::Null;
pub use shared_host::SharedHost;

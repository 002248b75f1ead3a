//! The device of a run: found before planning, and opened after it.
//!
//! `auto` is the first GPU that can train, else the CPU, unless `memory.profile` chooses the kind. A plan can be made
//! for a GPU that this machine does not have, but a run cannot use it. The memory of the driver's context is assumed at
//! first and measured when the device is opened.

use crate::failure::Failure;
use crate::plan::arithmetic::{Arithmetic, Processor};
use smidgen_compile::cards::{self, CONTEXT_BYTES};
use smidgen_compile::{DeviceProfile, Overhead};
use smidgen_hub::own_cache;
use smidgen_ir::DeviceKind;
use smidgen_recipe::{Compute, DeviceChoice};
use smidgen_runtime::cuda::gpu_generation::{Capability, LEAST_WITH_BF16};
use smidgen_runtime::cuda::{self, CudaOptions, GpuFacts};
use smidgen_runtime::{AnyDevice, Cpu, Cuda, DeviceError};

/// The device that a job is planned for.
#[derive(Clone, Debug, PartialEq)]
pub enum JobDevice {
    Cpu,
    Cuda {
        ordinal: usize,
        /// Properties of the GPU, if this machine has it.
        facts: Option<GpuFacts>,
        /// Memory of the driver's context, once it was measured: by opening the device, or by `smidgen doctor`.
        context_bytes: Option<u64>,
    },
    /// A GPU of another machine, of which only the profile is known. It can be planned for.
    Elsewhere {
        name: String,
        memory_bytes: Option<u64>,
        overhead: Overhead,
    },
}

impl JobDevice {
    /// Finds the device that the recipe chooses. `must_run`: a missing GPU is an error.
    pub fn find(choice: DeviceChoice, must_run: bool) -> Result<JobDevice, Failure> {
        match (JobDevice::detect(choice), choice) {
            (Err(_), DeviceChoice::Cuda(ordinal)) if !must_run => {
                Ok(JobDevice::Cuda { ordinal, facts: None, context_bytes: None })
            }
            (found, choice) => found.map_err(|error| {
                Failure::from(error)
                    .context(format!("`memory.device = \"{choice}\"`"))
                    .hint("`memory.device = \"cpu\"` trains without a GPU")
            }),
        }
    }

    /// The chosen device, if this machine has it.
    pub fn detect(choice: DeviceChoice) -> Result<JobDevice, DeviceError> {
        match choice {
            DeviceChoice::Cpu => Ok(JobDevice::Cpu),
            DeviceChoice::Auto => Ok(match cuda::query(0) {
                Ok(facts) if facts.can_train() => {
                    JobDevice::Cuda { ordinal: 0, facts: Some(facts), context_bytes: None }
                }
                _ => JobDevice::Cpu,
            }),
            DeviceChoice::Cuda(ordinal) => {
                Ok(JobDevice::Cuda { ordinal, facts: Some(cuda::query(ordinal)?), context_bytes: None })
            }
        }
    }

    pub fn kind(&self) -> DeviceKind {
        match self {
            JobDevice::Cpu => DeviceKind::Cpu,
            JobDevice::Cuda { .. } | JobDevice::Elsewhere { .. } => DeviceKind::Cuda,
        }
    }

    /// The compute capability of a GPU, if it is known.
    pub fn capability(&self) -> Option<Capability> {
        match self {
            JobDevice::Cpu => None,
            JobDevice::Cuda { facts, .. } => facts.as_ref().map(|facts| facts.capability),
            // A profile that `doctor` wrote has the driver's name.
            JobDevice::Elsewhere { name, .. } => {
                cards::find(name).or_else(|| cards::find_by_driver(name)).map(|card| card.capability)
            }
        }
    }

    /// An unknown GPU is assumed to have bf16.
    fn processor(&self) -> Processor {
        match self.kind() {
            DeviceKind::Cpu => Processor::Cpu,
            DeviceKind::Cuda => {
                let has_bf16 = self.capability().is_none_or(|capability| capability >= LEAST_WITH_BF16);
                Processor::Gpu { has_bf16 }
            }
        }
    }

    /// Resolves the recipe's `model.compute`.
    pub fn arithmetic(&self, compute: Compute) -> Arithmetic {
        Arithmetic::of(compute, self.processor())
    }

    /// Resolves `model.compute` for a run that continues a checkpoint of the arithmetic `name`.
    pub fn continuing_arithmetic(&self, compute: Compute, name: &str) -> Arithmetic {
        Arithmetic::continuing(compute, self.processor(), name)
    }

    /// Treats the GPU as one of a lower compute capability, to test the kernels of older GPUs.
    pub fn set_capability(&mut self, capability: Capability) -> Result<(), Failure> {
        match self {
            JobDevice::Cuda { facts: Some(facts), .. } => {
                facts.capability = capability;
                Ok(())
            }
            JobDevice::Cpu | JobDevice::Cuda { facts: None, .. } | JobDevice::Elsewhere { .. } => {
                let device = self.describe();
                Err(Failure::command(format!("`{device}` is not a GPU of this machine")))
            }
        }
    }

    /// The name of the device, for messages.
    pub fn describe(&self) -> String {
        match self {
            JobDevice::Cpu => "cpu".to_owned(),
            JobDevice::Cuda { facts: Some(facts), .. } => facts.name.clone(),
            JobDevice::Cuda { ordinal, facts: None, .. } => {
                format!("cuda:{ordinal} (not found on this machine)")
            }
            JobDevice::Elsewhere { name, .. } => name.clone(),
        }
    }

    /// Free memory of the GPU; all memory of a GPU of another machine counts as free.
    pub fn free_bytes(&self) -> Option<u64> {
        match self {
            JobDevice::Cpu => None,
            JobDevice::Cuda { facts, .. } => facts.as_ref().and_then(|facts| facts.free_bytes),
            JobDevice::Elsewhere { memory_bytes, .. } => *memory_bytes,
        }
    }

    /// Memory of the device outside the arena.
    pub fn overhead(&self) -> Overhead {
        match self {
            JobDevice::Cpu => Overhead::CPU,
            JobDevice::Cuda { context_bytes, .. } => Overhead::cuda(context_bytes.unwrap_or(CONTEXT_BYTES)),
            JobDevice::Elsewhere { overhead, .. } => *overhead,
        }
    }

    /// Assumes the memory of the driver's context that the profile has, until the device is opened.
    pub fn assume(&mut self, profile: &DeviceProfile) {
        if let JobDevice::Cuda { context_bytes, .. } = self {
            context_bytes.get_or_insert(profile.overhead.fixed_bytes);
        }
    }

    /// Adds memory that a library reserved on the device after it was opened.
    pub fn add_to_context(&mut self, bytes: u64) {
        if let JobDevice::Cuda { context_bytes: Some(context), .. } = self {
            *context += bytes;
        }
    }

    /// Opens the device and keeps the measured memory of its context.
    pub fn open_and_measure(&mut self, threads: usize, arithmetic: Arithmetic) -> Result<AnyDevice, Failure> {
        let device = self.open(threads, arithmetic)?;
        if let (JobDevice::Cuda { context_bytes, .. }, AnyDevice::Cuda(cuda)) = (self, &device) {
            *context_bytes = cuda.context_bytes();
        }
        Ok(device)
    }

    /// Opens the device with its context and kernels; the arena is reserved later. Tensors on disk go to the cache
    /// folder, unless the caller sets another one.
    pub fn open(&self, threads: usize, arithmetic: Arithmetic) -> Result<AnyDevice, Failure> {
        match self {
            JobDevice::Cpu => {
                let cpu = Cpu::new(threads).map_err(Failure::device)?;
                let cpu = match arithmetic {
                    Arithmetic::F32(unit) => cpu.with_f32_unit(unit),
                    Arithmetic::Bf16(_) | Arithmetic::Cuda(_) => cpu,
                };
                let folder = own_cache().unwrap_or_else(|_| std::env::temp_dir());
                Ok(AnyDevice::Cpu(cpu.with_spill_folder(folder)))
            }
            JobDevice::Cuda { ordinal, .. } => {
                let cache = own_cache().ok().map(|folder| folder.join("cuda"));
                let (precision, capability) = (arithmetic.precision(), self.capability());
                let options = CudaOptions { ordinal: *ordinal, precision, cache, capability };
                Ok(AnyDevice::Cuda(Box::new(Cuda::open(&options)?)))
            }
            JobDevice::Elsewhere { name, .. } => Err(Failure::device(format!(
                "the plan is for `{name}`, which is not a device of this machine"
            ))),
        }
    }
}

/// Lets only one test at a time use a GPU: another one would change the memory that is measured.
#[cfg(test)]
pub fn alone() -> std::sync::MutexGuard<'static, ()> {
    static GPU: std::sync::Mutex<()> = std::sync::Mutex::new(());
    GPU.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

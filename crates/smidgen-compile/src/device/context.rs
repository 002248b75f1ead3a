//! The memory that a run needs outside the arena: in the process on a CPU, in the driver on a GPU.
//!
//! One small model serves both. Its constants are part of the device profile ([`Overhead`]); the caller adds what is known
//! to the byte, such as data in RAM. The margin covers what the model leaves out: which pages of the program are resident,
//! what a tokenizer leaves in the heap, how a driver rounds. Plans show it as margin.
//! Measurements and limits: `docs/decisions/memory-outside-the-arena.md`.

use smidgen_ir::{DeviceKind, Plan, Space, Step};

/// Memory that a device needs outside the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overhead {
    /// The program with its libraries, or the driver's context with kernels and cuBLASLt.
    pub fixed_bytes: u64,
    /// Per thread.
    pub thread_bytes: u64,
    /// Per step of the plan, for the plan and the runtime's structures; on a GPU per kernel launch that a graph records.
    pub step_bytes: u64,
    /// Bytes that a run may need beyond the other terms.
    pub margin_bytes: u64,
}

impl Overhead {
    /// A process on a CPU. Runs of the set `fit` of `benches/grid.py` (one family, 2 and 4 threads) need about 16 MiB
    /// outside the arena, and about 20 MiB if text was tokenized; 9.8 to 14.4 MiB of the plan are left. 2 MiB were added for the code of 0.17, without
    /// which a development build takes 0.2 MiB more than its plan.
    pub const CPU: Overhead =
        Overhead { fixed_bytes: 18 << 20, thread_bytes: 128 << 10, step_bytes: 1536, margin_bytes: 12 << 20 };

    /// A GPU with a measured context, including the memory that `cuInit` needs. With these bytes per launch and this margin
    /// the 83 runs of `results/grid-h200.json` were 1.2 to 5.8 MiB below their plans; equal runs differ by a granule of
    /// 2 MiB.
    pub const fn cuda(context_bytes: u64) -> Overhead {
        Overhead { fixed_bytes: context_bytes, thread_bytes: 0, step_bytes: 3600, margin_bytes: 3_000_000 }
    }
}

/// The overhead of a device for one job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// The device whose memory is counted: the RAM of the process, or the memory of a GPU.
    pub device: DeviceKind,
    pub overhead: Overhead,
    pub threads: usize,
    /// Bytes in RAM for the whole run, known exactly: data, and the largest buffer used while loading.
    pub data_bytes: u64,
    /// Bytes per token of a micro-batch before it is copied to the device.
    pub token_bytes: u64,
    /// The largest buffer for values on disk, if a plan has any.
    pub spill_bytes: u64,
}

/// A driver allocates memory in multiples of this.
const GRANULE_BYTES: u64 = 2 << 20;
/// Pinned memory has page tables on the GPU: an entry of 8 bytes per page of 4 KiB.
const PINNED_BYTES_PER_TABLE_BYTE: u64 = 512;
/// Launches of a matmul whose matrix is decoded first.
const LAUNCHES_OF_CODED: u64 = 3;

impl Context {
    /// Everything outside the arena of this plan, the margin included.
    pub fn bytes_for(&self, plan: &Plan) -> u64 {
        let Overhead { fixed_bytes, thread_bytes, step_bytes, margin_bytes } = self.overhead;
        let (steps, rounding) = match self.device {
            DeviceKind::Cpu => (plan.entries.iter().map(|entry| entry.steps.len() as u64).sum(), 0),
            DeviceKind::Cuda => (recorded_launches(plan), granules(plan)),
        };
        let has_disk = plan.buffers.iter().any(|buffer| buffer.space == Space::Disk);
        let spill_bytes = if has_disk { self.spill_bytes } else { 0 };
        fixed_bytes
            + thread_bytes * self.threads as u64
            + step_bytes * steps
            + self.data_bytes
            + self.token_bytes * plan.extent.tokens as u64
            + spill_bytes
            + rounding
            + margin_bytes
    }
}

/// Kernel launches of the entry points that become graphs: those without transfers between memory spaces.
fn recorded_launches(plan: &Plan) -> u64 {
    let is_recorded = |steps: &[Step]| !steps.iter().any(|step| step.op.is_copy());
    let recorded = plan.entries.iter().filter(|entry| is_recorded(&entry.steps));
    let launches = |step: &Step| if step.cost.coded_operands > 0.0 { LAUNCHES_OF_CODED } else { 1 };
    recorded.flat_map(|entry| &entry.steps).map(launches).sum()
}

/// Bytes for rounding the arena up to whole granules, and for the page tables of pinned memory.
fn granules(plan: &Plan) -> u64 {
    let whole = |bytes: u64| bytes.next_multiple_of(GRANULE_BYTES);
    let reserved = plan.reserved_bytes() as u64;
    whole(reserved) - reserved + whole(plan.host.bytes() as u64 / PINNED_BYTES_PER_TABLE_BYTE)
}

//! The CPU device: one reservation of RAM, one thread pool, f32 activations with matmuls in f32 or bf16.
//!
//! It is the device for machines without a GPU and the reference for every other device. Work is divided by
//! shape alone, so any number of threads gives the same bytes. Every page of the arena is touched when it is
//! reserved, so the system cannot run out of memory for the plan later.
//! `run.rs` maps operations to the kernels in the files named after them.

mod act;
mod arena;
pub mod attention;
pub mod attention_gradient;
mod attention_tiles;
mod audio_conv;
#[cfg(target_arch = "x86_64")]
mod bf16_attention;
#[cfg(target_arch = "x86_64")]
pub mod bf16_matmul;
#[cfg(target_arch = "x86_64")]
mod bf16_packing;
pub mod bf16_unit;
mod block_columns;
mod cached_attention;
mod causal_conv;
mod chunk;
mod chunk_attention;
mod columns;
pub mod convert;
pub mod counter;
mod decay;
mod decode_rows;
mod decode_span;
mod direct_matmul;
mod elementwise;
mod embed;
mod footprint;
mod fourier;
mod gguf_columns;
mod head_pieces;
pub mod heap;
pub mod isa;
#[cfg(test)]
mod isa_accuracy;
mod isa_lanes;
mod isa_portable;
#[cfg(target_arch = "x86_64")]
mod isa_x86;
pub mod kernel;
mod layer_norm;
mod loss;
pub mod matmul;
pub mod matmul_terms;
#[cfg(all(test, target_arch = "x86_64"))]
mod matmul_testing;
mod norm;
mod objective;
mod optimizer;
mod optimizer8;
pub mod packing;
mod plain_act;
pub mod pool;
mod rope;
mod round_at_random;
mod round_fp8;
mod route;
pub mod row_matmul;
mod run;
mod run_adapter;
mod run_attention;
mod run_audio;
mod run_experts;
mod run_loss;
mod run_recurrence;
mod run_update;
mod scan;
mod scan_gradient;
pub mod simd;
mod slot_runs;
pub mod spill;
#[cfg(target_arch = "x86_64")]
pub mod split_matmul;
mod spread;
pub mod stored;
mod stored_bnb;
mod stored_gguf;
mod stored_rows;
#[cfg(test)]
mod stored_tests;
#[cfg(test)]
mod testing;
pub mod update_at;
pub mod view;

use crate::comm::{Comm, Progress, Span};
use crate::device::{
    Address, BoundStep, Destination, Device, DeviceError, Fill, FillError, Operand, Reservation, Transfer,
};
use crate::lane::{Lane, bind_exchange};
use arena::Arena;
use bf16_unit::{Bf16Unit, F32Unit};
use pool::Pool;
use smidgen_ir::{DType, DeviceKind, Extent, Fusion, Op, Precision, Property, Space, Storage};
use spill::{Direction, Spill};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const NAME: &str = "cpu";

/// The instructions that compute matmuls, detected when the device is created.
#[derive(Clone, Copy, Debug)]
struct Units {
    f32: F32Unit,
    bf16: Option<Bf16Unit>,
}

#[derive(Debug)]
pub struct Cpu {
    pool: Pool,
    // Dropped before the arena that their transfers use.
    lane: Option<Lane>,
    spill: Option<Spill>,
    arena: Arena,
    units: Units,
    /// The folder for the offload file.
    spill_folder: Option<PathBuf>,
    /// The number of the transfer or exchange that each step began.
    transfers: Vec<u64>,
    /// A failure inside a call that returns no `Result`.
    failed: Option<DeviceError>,
}

impl Cpu {
    /// A device with `threads` threads; the plan's workspaces must be sized for the same number.
    pub fn new(threads: usize) -> io::Result<Cpu> {
        Ok(Cpu {
            pool: Pool::new(threads)?,
            lane: None,
            spill: None,
            arena: Arena::empty(),
            units: Units { f32: F32Unit::detect(), bf16: Bf16Unit::detect() },
            spill_folder: None,
            transfers: Vec::new(),
            failed: None,
        })
    }

    /// Sets the folder for the file of tensors that a plan offloads to disk.
    pub fn with_spill_folder(self, folder: PathBuf) -> Cpu {
        Cpu { spill_folder: Some(folder), ..self }
    }

    /// Uses this unit for f32 matmuls instead of the fastest one, to reproduce the bytes of a run that used it.
    /// Panics if this machine does not have the unit.
    pub fn with_f32_unit(self, f32: F32Unit) -> Cpu {
        assert!(f32 == F32Unit::Vectors || f32 == F32Unit::detect(), "this machine has no {f32:?}");
        Cpu { units: Units { f32, ..self.units }, ..self }
    }

    /// Exchanges with other ranks through this communicator.
    pub fn with_comm(self, comm: Box<dyn Comm>) -> Cpu {
        Cpu { lane: Some(Lane::start(comm)), ..self }
    }

    /// Sets the time limit for an exchange with other ranks.
    pub fn limit_exchanges(&mut self, limit: Duration) {
        if let Some(lane) = &mut self.lane {
            lane.set_limit(limit);
        }
    }

    /// Counts the exchanges of this rank; `None` without a communicator.
    pub fn exchange_progress(&self) -> Option<Arc<Progress>> {
        self.lane.as_ref().map(Lane::counts)
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
}

impl Device for Cpu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError> {
        let Reservation { device: bytes, host, disk, .. } = *spaces;
        // The memory of an earlier plan is freed first, so that two plans are never held at once.
        (self.spill, self.arena) = (None, Arena::empty());
        if host > 0 {
            return Err(DeviceError::Space { device: NAME, space: Space::Host });
        }
        if disk > 0 {
            let no_folder = DeviceError::Space { device: NAME, space: Space::Disk };
            self.spill = Some(Spill::open(self.spill_folder.as_ref().ok_or(no_folder)?, disk)?);
        }
        let arena = Arena::reserve(bytes).ok_or(DeviceError::Reserve { device: NAME, bytes })?;
        self.pool.enter(|| arena.touch());
        self.arena = arena;
        Ok(())
    }

    fn check(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        if step.op.is_copy() || step.op.has(Property::Waits) {
            // Transfers copy bytes of any storage.
            return Ok(());
        }
        if step.op.is_collective() {
            let alone = DeviceError::NoOtherRanks { device: NAME, op: step.op.name() };
            return self.lane.as_ref().map_or(Err(alone), |_| Ok(()));
        }
        for (index, operand) in step.inputs.iter().enumerate() {
            check_storage(&step.op, operand, step.op.decodes(index))?;
        }
        for operand in &step.outputs {
            check_storage(&step.op, operand, step.op.ends() == Some(Fusion::Rounding))?;
        }
        for operand in &step.updates {
            // 8-bit optimizer state is the only updated storage that is not plain numbers.
            if !matches!((&step.op, operand.storage), (Op::AdamW8(_), Storage::Dynamic8 { .. })) {
                check_storage(&step.op, operand, false)?;
            }
        }
        let is_supported = match step.precision {
            Precision::F32 => true,
            Precision::Bf16 => self.units.bf16.is_some(),
            Precision::F16 | Precision::Fp8 => false,
        };
        if !is_supported {
            return Err(DeviceError::Precision { device: NAME, precision: step.precision });
        }
        let needed = step.workspace_bytes(DeviceKind::Cpu, self.threads(), extent);
        let given = step.workspace.map_or(0, |(_, bytes)| bytes);
        if given < needed {
            return Err(DeviceError::Workspace { device: NAME, op: step.op.name(), given, needed });
        }
        Ok(())
    }

    fn prepare(&mut self, steps: &[(Extent, &[BoundStep])]) -> Result<(), DeviceError> {
        let max_steps = steps.iter().map(|(_, steps)| steps.len()).max().unwrap_or(0);
        let is_used = self.spill.is_some() || self.lane.is_some();
        self.transfers = vec![0; if is_used { max_steps } else { 0 }];
        Ok(())
    }

    fn write(&mut self, at: Address, from: &[u8]) {
        match &self.spill {
            Some(spill) if at.space != Space::Device => {
                let result = spill.file().write(at.offset, from);
                self.failed = self.failed.take().or(result.err());
            }
            _ => self.arena.bytes_mut(at.offset, from.len()).copy_from_slice(from),
        }
    }

    fn read(&mut self, at: Address, into: &mut [u8]) -> Result<(), DeviceError> {
        match &self.spill {
            Some(spill) if at.space != Space::Device => spill.file().read(at.offset, into),
            _ => {
                into.copy_from_slice(self.arena.bytes_mut(at.offset, into.len()));
                Ok(())
            }
        }
    }

    fn fill<E>(&mut self, to: Destination, fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        assert!(to.rows.is_none(), "CPU plans have no gaps between rows");
        match &self.spill {
            Some(spill) if to.at.space != Space::Device => {
                let piece_bytes = if to.in_one_piece { to.bytes } else { spill::PIECE_BYTES };
                spill.file().fill(to.at.offset, to.bytes, piece_bytes, fill)
            }
            _ => fill(0, self.arena.bytes_mut(to.at.offset, to.bytes)).map_err(FillError::Source),
        }
    }

    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        self.run_all(std::slice::from_ref(step), extent, true)
    }

    fn run_part(&mut self, steps: &[BoundStep], extent: &Extent) -> Result<(), DeviceError> {
        self.begin_all(steps, extent, true)
    }

    fn finish_parts(&mut self, _steps: &[BoundStep]) -> Result<(), DeviceError> {
        self.wait_for_transfers()
    }

    fn run_all(&mut self, steps: &[BoundStep], extent: &Extent, sums: bool) -> Result<(), DeviceError> {
        self.begin_all(steps, extent, sums)?;
        self.wait_for_transfers()
    }
}

/// In `Cpu::transfers`, the lowest bit marks an exchange; the other bits are the number of the transfer or exchange.
const EXCHANGE: u64 = 1;

impl Cpu {
    /// Runs steps in order; their transfers may still be pending afterwards.
    fn begin_all(&mut self, steps: &[BoundStep], extent: &Extent, sums: bool) -> Result<(), DeviceError> {
        self.failed.take().map_or(Ok(()), Err)?;
        for step in steps.iter().filter(|step| sums || !step.is_sum()) {
            if step.op.is_collective() {
                self.wait_for(step)?;
                self.begin_exchange(step, extent);
                continue;
            }
            match (&mut self.spill, step.transfer()) {
                // A rank may have no rows of a divided tensor, and nothing on disk.
                (_, Some(Transfer { on_device, .. })) if on_device.bytes_at(extent) == 0 => {}
                (_, Some(Transfer { on_device, offloaded, to_device }))
                    if offloaded.space == Space::Device =>
                {
                    self.wait_for(step)?;
                    let bytes = on_device.bytes_at(extent);
                    let (from, to) = if to_device { (offloaded, on_device) } else { (on_device, offloaded) };
                    self.arena.copy(from.offset, to.offset, bytes);
                }
                (Some(spill), Some(Transfer { on_device, offloaded, to_device })) => {
                    // One thread runs the transfers in order, so a transfer need not wait for an earlier one, only for
                    // exchanges.
                    for number in exchanges(&self.transfers, step) {
                        self.lane.as_ref().map_or(Ok(()), |lane| lane.wait(number))?;
                    }
                    let direction = if to_device { Direction::In } else { Direction::Out };
                    let bytes = on_device.bytes_at(extent);
                    let pointer = self.arena.pointer(on_device.offset, bytes);
                    // SAFETY: `verify` has shown that no step touches the range before a step that awaits this
                    // transfer, or before the end of the entry point.
                    self.transfers[step.index] =
                        unsafe { spill.begin(direction, offloaded.offset, pointer, bytes) } << 1;
                }
                _ => {
                    self.wait_for(step)?;
                    if step.is_idle(extent) {
                        continue;
                    }
                    let (arena, spill, units) = (&self.arena, self.spill.as_ref(), self.units);
                    self.pool.enter(|| run::run_step(arena, spill, step, extent, units))?;
                }
            }
        }
        Ok(())
    }

    fn wait_for_transfers(&self) -> Result<(), DeviceError> {
        if let Some(lane) = &self.lane {
            lane.wait_for_all()?;
        }
        self.spill.as_ref().map_or(Ok(()), Spill::wait_for_all)
    }

    /// Waits for the transfers and exchanges that a step awaits. Copies inside the arena have already finished.
    fn wait_for(&self, step: &BoundStep) -> Result<(), DeviceError> {
        for awaited in &step.awaits {
            let Some(&number) = self.transfers.get(*awaited) else { continue };
            match (number & EXCHANGE == EXCHANGE, &self.lane, &self.spill) {
                (true, Some(lane), _) => lane.wait(number >> 1)?,
                (false, _, Some(spill)) => spill.wait(number >> 1)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn begin_exchange(&mut self, step: &BoundStep, extent: &Extent) {
        let span = |operand: &Operand| {
            let bytes = operand.bytes_at(extent);
            Span { pointer: self.arena.pointer(operand.offset, bytes), bytes }
        };
        let exchange = bind_exchange(step, span);
        let lane = self.lane.as_mut().expect("`check` has refused collectives without a communicator");
        // SAFETY: `verify` has shown that no step touches the memory before a step that awaits this one, or before the
        // end of the entry point.
        self.transfers[step.index] = unsafe { lane.begin(exchange) } << 1 | EXCHANGE;
    }
}

/// The numbers of the exchanges that a step awaits.
fn exchanges<'a>(transfers: &'a [u64], step: &'a BoundStep) -> impl Iterator<Item = u64> + 'a {
    let numbers = step.awaits.iter().filter_map(|awaited| transfers.get(*awaited));
    numbers.filter(|number| **number & EXCHANGE == EXCHANGE).map(|number| number >> 1)
}

fn check_storage(op: &Op, operand: &Operand, may_be_coded: bool) -> Result<(), DeviceError> {
    match operand.storage {
        Storage::Plain(DType::F32 | DType::Bf16 | DType::F16 | DType::F64 | DType::I32 | DType::U64) => {
            Ok(())
        }
        storage @ Storage::Gguf(block)
            if may_be_coded && !operand.columns.is_multiple_of(block.elements()) =>
        {
            Err(DeviceError::Columns { device: NAME, op: op.name(), storage, columns: operand.columns })
        }
        Storage::Int8Rows
        | Storage::Fp8Rows
        | Storage::Fp8Blocks
        | Storage::Bnb4 { .. }
        | Storage::Gguf(_)
            if may_be_coded =>
        {
            Ok(())
        }
        storage @ (Storage::Int8Rows
        | Storage::Fp8Rows
        | Storage::Fp8Blocks
        | Storage::Bnb4 { .. }
        | Storage::Gguf(_)
        | Storage::Dynamic8 { .. }) => Err(DeviceError::Storage { device: NAME, op: op.name(), storage }),
    }
}

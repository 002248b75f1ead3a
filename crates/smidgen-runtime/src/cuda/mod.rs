//! The CUDA device: one reservation on one GPU, kernels compiled for it, matmuls by cuBLASLt.
//!
//! Everything runs on one stream in the order of the plan, and the host never waits inside a step. Inputs go through
//! pinned memory, and results are copied back when they are read. All memory is allocated before the first step: the
//! context with its kernels, pinned memory, the arena, and CUDA graphs of the launches (`graphs.rs`).
//! `run.rs` maps operations to the launchers in the files named after them; kernels are in `kernels/`.

pub mod act;
pub mod attention;
pub mod attention_hopper;
mod audio;
mod audio_conv;
mod busy;
pub mod cached_attention;
mod causal_conv;
mod chunk_attention;
pub mod columns;
pub mod compiler;
pub mod cublas;
pub mod decode;
mod disk;
pub mod driver;
pub mod early;
pub mod elementwise;
pub mod embed;
mod experts;
pub mod facts;
mod few_rows;
pub mod fourier;
mod fp8;
pub mod gpu_generation;
mod graphs;
mod grouped;
mod head;
mod head_pieces;
mod host_updates;
mod kernel_cache;
mod layer_norm;
pub mod libraries;
mod linear;
pub mod loss;
pub mod matmul;
pub mod modules;
mod nccl_watch;
pub mod norm;
pub mod nvml;
mod objective;
mod operands;
pub mod optimizer;
mod own_memory;
pub mod peers;
mod pinned;
mod plain_act;
pub mod rope;
mod run;
mod scan;
pub mod spans;
pub mod stage;
mod staging;
pub mod thin;
pub mod transfer_rates;
mod transfers;

use crate::comm::{Progress, Span};
use crate::cpu::spill::PIECE_BYTES;
use crate::device::{
    Address, BoundStep, Destination, Device, DeviceError, DeviceMemory, Fill, FillError, Operand, Reservation,
};
use crate::lane::bind_exchange;
use crate::shared_host::SharedHost;
pub use attention_hopper::FILES as HOPPER_KERNEL_FILES;
use busy::Busy;
use cublas::CublasLt;
use cudarc::driver::{result, sys};
pub use disk::SLOT_BYTES as DISK_SLOT_BYTES;
use driver::{Gpu, NAME};
pub use facts::{GpuFacts, query};
use gpu_generation::{Capability, Generation, supports};
use graphs::Graphs;
use modules::Kernels;
use own_memory::OwnMemory;
use peers::Peers;
pub use run::{check as check_step, files as kernel_files};
use smidgen_ir::{DType, DeviceKind, Entry, Extent, Precision, Space};
use stage::Stage;
use staging::Staging;
use std::cell::{OnceCell, RefCell};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use transfers::Transfers;

/// How to open a CUDA device.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// The GPU's number in the driver.
    pub ordinal: usize,
    pub precision: Precision,
    /// The folder for compiled kernels and matmul algorithms.
    pub cache: Option<PathBuf>,
    /// Runs the kernels of a GPU with this compute capability, such as (7, 5). `None` means the GPU's own.
    pub capability: Option<Capability>,
}

#[derive(Debug)]
pub struct Cuda {
    // Dropped in this order.
    graphs: Graphs,
    peers: RefCell<Option<Peers>>,
    staging: Staging,
    transfers: Transfers,
    cublas: CublasLt,
    kernels: Kernels,
    gpu: Gpu,
    /// Address and bytes of the reservation.
    arena: (u64, usize),
    precision: Precision,
    records_launches: bool,
    /// Whether this GPU can start kernels early.
    starts_early: bool,
    /// Memory of the context with its kernels and libraries, if NVML is available.
    context_bytes: Option<u64>,
    /// Free memory before the context was opened.
    free_before: Option<u64>,
    own_memory: OwnMemory,
    busy: Busy,
    /// Opened when it is first needed; the inner `None` means that NVML is missing.
    nvml: OnceCell<Option<nvml::Session>>,
    peak_bytes: u64,
    /// The first failure inside a call that returns no `Result`.
    failed: Option<DeviceError>,
}

impl Cuda {
    /// Finds the libraries, opens the GPU and compiles the kernels.
    pub fn open(options: &CudaOptions) -> Result<Cuda, DeviceError> {
        let init_bytes = driver::init()?;
        let before = query(options.ordinal)?.free_bytes.map(|bytes| bytes + init_bytes);
        let gpu = Gpu::open(options.ordinal)?;
        let capability = options.capability.unwrap_or(gpu.capability);
        let generation = Generation::of(capability).filter(|_| supports(capability, options.precision));
        let Some(generation) = generation else {
            let ((major, minor), name, precision) = (capability, gpu.name.clone(), options.precision);
            return Err(DeviceError::Capability { name, major, minor, precision });
        };
        let activations = DeviceKind::Cuda.activations(options.precision);
        let mut kernels = Kernels::new(&gpu, capability, generation, activations, options.cache.as_deref())?;
        let mut files = run::files_of_every_plan();
        let has_thin = activations != DType::F32 && generation > Generation::Volta;
        files.extend(has_thin.then_some(thin::FILE));
        kernels.require(&files, &[])?;
        let cublas = CublasLt::open(&gpu, options.cache.as_deref())?;
        let (staging, transfers) = (Staging::new()?, Transfers::new()?);
        let after = gpu.free_bytes();
        let context_bytes = before.zip(after).map(|(before, after)| before.saturating_sub(after));
        Ok(Cuda {
            context_bytes,
            free_before: before,
            own_memory: OwnMemory::default(),
            busy: Busy::default(),
            nvml: OnceCell::new(),
            peak_bytes: 0,
            graphs: Graphs::default(),
            peers: RefCell::new(None),
            staging,
            transfers,
            cublas,
            kernels,
            gpu,
            arena: (0, 0),
            precision: options.precision,
            records_launches: true,
            starts_early: early::is_possible(capability, facts::driver_version()?),
            failed: None,
        })
    }

    /// GPU memory of driver and context with kernels and libraries, if NVML is available.
    pub fn context_bytes(&self) -> Option<u64> {
        self.context_bytes
    }

    /// The reason why compiled kernels could not be cached, and a remedy.
    pub fn cache_failure(&self) -> Option<String> {
        self.kernels.cache_failure()
    }

    /// The number of times that the host has waited for the GPU.
    pub fn waits(&self) -> u64 {
        self.staging.waits()
    }

    /// The number of CUDA graph launches of the loaded plan.
    pub fn graph_launches(&self) -> u64 {
        self.graphs.launches()
    }

    /// Bytes of pinned host memory.
    pub fn pinned_bytes(&self) -> usize {
        let peers = self.peers.borrow();
        self.staging.bytes() + self.transfers.bytes() + peers.as_ref().map_or(0, Peers::pinned_bytes)
    }

    /// Connects the device to other ranks.
    pub fn with_peers(mut self, peers: Peers) -> Cuda {
        *self.peers.get_mut() = Some(peers);
        self
    }

    /// Sets how long an exchange with other ranks may take.
    pub fn limit_exchanges(&mut self, limit: Duration) {
        if let Some(peers) = self.peers.get_mut() {
            peers.set_limit(limit);
        }
    }

    /// Counts the exchanges that this rank has reached and finished.
    pub fn exchange_progress(&self) -> Option<Arc<Progress>> {
        self.peers.borrow().as_ref().map(Peers::progress)
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn activations(&self) -> DType {
        DeviceKind::Cuda.activations(self.precision)
    }

    fn stage<'a>(&'a self, step: &'a BoundStep, extent: &'a Extent, planned: &'a Extent) -> Stage<'a> {
        Stage {
            gpu: &self.gpu,
            kernels: &self.kernels,
            cublas: &self.cublas,
            arena: self.arena.0,
            host: self.transfers.address(),
            step,
            extent,
            planned,
            activations: self.activations(),
            may_start_early: self.starts_early && step.entry == Entry::Decode && !self.transfers.are_used(),
        }
    }

    fn begin_exchange(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        let arena = self.arena.0;
        let span = |operand: &Operand| Span {
            pointer: (arena + operand.offset as u64) as *mut u8,
            bytes: operand.bytes_at(extent),
        };
        let exchange = bind_exchange(step, span);
        let accumulate = |to: u64, from: u64, floats: usize| {
            optimizer::accumulate(&self.stage(step, extent, &step.planned), to, from, floats)
        };
        let mut peers = self.peers.borrow_mut();
        let peers = peers.as_mut().expect("`check` has refused collectives without peers");
        let awaited = self.transfers.events(&step.awaits);
        // SAFETY: `verify` has shown that no step touches the memory before a step that awaits this one, or before the
        // end of the entry point.
        unsafe { peers.begin(&self.gpu, &exchange, &awaited, self.transfers.event(step.index), &accumulate) }
    }

    /// Launches steps in order. The caller has to wait for their transfers with [`Cuda::settle`].
    fn launch_all(&self, steps: &[BoundStep], extent: &Extent, sums: bool) -> Result<(), DeviceError> {
        let mut rest = steps;
        while let Some(first) = rest.first() {
            if first.op.is_collective() {
                if sums || !first.is_sum() {
                    self.begin_exchange(first, extent)?;
                }
                rest = &rest[1..];
                continue;
            }
            if first.op.is_transfer() {
                self.transfers.begin(&self.gpu, self.arena.0, first, extent)?;
                rest = &rest[1..];
                continue;
            }
            let together = launched_together(rest);
            for step in together.iter().take(2).filter(|step| !step.op.is_transfer()) {
                self.transfers.hold_for(&self.gpu, step)?;
            }
            if first.is_idle(extent) {
                rest = &rest[1..];
                continue;
            }
            let done = run::run_first(&self.stage(first, extent, &first.planned), together)?;
            rest = &rest[done..];
        }
        Ok(())
    }

    /// Makes later launches wait for all transfers of some steps.
    fn settle(&self, steps: &[BoundStep], sums: bool) -> Result<(), DeviceError> {
        self.transfers.settle(&self.gpu, steps.iter().filter(|step| sums || !step.is_sum()))
    }

    /// Keeps the error of a call that returns no `Result`; the next check reports it.
    fn keep_error(&mut self, result: Result<(), DeviceError>) {
        if let Err(error) = result {
            self.failed.get_or_insert(error);
        }
    }

    fn check_health(&mut self) -> Result<(), DeviceError> {
        let of_peers = || self.peers.borrow().as_ref().and_then(Peers::failure);
        self.failed.take().or_else(|| self.transfers.failure()).or_else(of_peers).map_or(Ok(()), Err)
    }

    /// Sets the folder for the file of tensors that a plan offloads to disk.
    pub fn with_spill_folder(mut self, folder: PathBuf) -> Cuda {
        self.transfers.set_folder(folder);
        self
    }

    /// Turns CUDA graphs off, for comparison. Graphs change only the speed.
    pub fn without_graphs(mut self) -> Cuda {
        self.records_launches = false;
        self
    }

    /// Waits until everything launched so far is done.
    pub fn wait(&mut self) -> Result<(), DeviceError> {
        self.check_health()?;
        self.gpu.wait()
    }

    /// Waits until no transfer or update uses pinned memory. The compute stream itself waits for every transfer at the
    /// end of an entry point.
    fn wait_for_host_memory(&self) -> Result<(), DeviceError> {
        self.gpu.wait()?;
        self.transfers.wait_for_updates()
    }

    /// Fills the reservation with random numbers, so that matmuls are timed as in a run.
    fn fill_with_noise(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        let (pointer, bytes) = self.arena;
        let args = [stage::Arg::Pointer(pointer), stage::Arg::Wide(bytes as u64 / 4)];
        let blocks = 8 * self.gpu.multiprocessors as u32;
        self.stage(step, extent, extent).launch("fill_with_noise", [blocks, 1, 1], 256, 0, &args)
    }

    fn clear(&self) -> Result<(), DeviceError> {
        // SAFETY: exactly the reservation.
        let code = unsafe { sys::cuMemsetD8Async(self.arena.0, 0, self.arena.1, self.gpu.stream) };
        driver::check(code, "cuMemsetD8Async")
    }

    /// Frees the reservation and the graphs that use it.
    fn release(&mut self) -> Result<(), DeviceError> {
        self.graphs = Graphs::default();
        let (pointer, _) = std::mem::take(&mut self.arena);
        if pointer == 0 {
            return Ok(());
        }
        self.gpu.wait()?;
        // SAFETY: allocated in `reserve`, freed once, and no work that uses it is pending.
        driver::named(unsafe { result::free_sync(pointer) }, "cuMemFree")
    }
}

/// The steps at the start of `steps` that may be combined into one launch. They end before the first step that has to
/// wait for a transfer. A second step of another operation may wait too: the caller waits for the transfers of both.
fn launched_together(steps: &[BoundStep]) -> &[BoundStep] {
    let waits = |index: usize| {
        let (step, before) = (&steps[index], &steps[index - 1]);
        !step.awaits.is_empty() && (index > 1 || step.op.joins(&before.op))
    };
    let end = (1..steps.len()).find(|index| waits(*index)).unwrap_or(steps.len());
    &steps[..end]
}

impl Device for Cuda {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError> {
        self.release()?;
        self.transfers.reserve(spaces)?;
        let bytes = spaces.device;
        // SAFETY: the memory is freed once, in `release`.
        let pointer = unsafe { result::malloc_sync(bytes.max(1)) };
        let pointer = pointer.map_err(|_| DeviceError::Reserve { device: NAME, bytes })?;
        self.arena = (pointer, bytes);
        self.clear()?;
        self.gpu.wait()
    }

    fn share_host(&mut self, shared: SharedHost) {
        self.transfers.share(shared);
    }

    fn fills(&self, at: Address) -> bool {
        at.space != Space::Host || self.transfers.fills(at.offset)
    }

    fn check(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        if step.op.is_collective() && self.peers.borrow().is_none() {
            return Err(DeviceError::NoOtherRanks { device: NAME, op: step.op.name() });
        }
        if step.precision != self.precision {
            return Err(DeviceError::Precision { device: NAME, precision: step.precision });
        }
        run::check(step, extent)?;
        fourier::check(step, self.kernels.generation(), self.activations())
    }

    /// Compiles kernels, times the matmuls of every new shape on random numbers, and captures graphs.
    fn prepare(&mut self, steps: &[(Extent, &[BoundStep])]) -> Result<(), DeviceError> {
        let ops = || steps.iter().flat_map(|(_, steps)| *steps).map(|step| &step.op);
        let mut files: Vec<_> = ops().flat_map(run::files_of).collect();
        if self.precision == Precision::Fp8 {
            files.extend([fp8::FILE, fp8::MATMUL_FILE]);
        }
        let hopper_files: Vec<_> = ops().flat_map(run::hopper_files_of).collect();
        self.kernels.require(&files, &hopper_files)?;
        let Some((extent, step)) = steps.iter().find_map(|(extent, steps)| Some((*extent, steps.first()?)))
        else {
            return Ok(());
        };
        self.transfers.prepare(steps.iter().flat_map(|(_, steps)| *steps))?;
        self.fill_with_noise(step, &extent)?;
        self.cublas.begin_plan();
        self.cublas.set_timing(true);
        let timed = steps.iter().try_for_each(|(extent, steps)| {
            self.launch_all(steps, extent, true)?;
            self.settle(steps, true)
        });
        self.cublas.set_timing(false);
        timed?;
        self.cublas.keep();
        self.clear()?;
        let mut graphs = Graphs::default();
        for (extent, steps) in steps.iter().filter(|_| self.records_launches) {
            let extent = graphs::recorded_extent(steps, extent);
            graphs.prepare(&self.gpu, steps, &extent, |part| self.launch_all(part, &extent, true))?;
        }
        self.graphs = graphs;
        self.gpu.wait()
    }

    fn chosen_algorithms(&self) -> Option<String> {
        Some(self.cublas.chosen())
    }

    fn adopt_algorithms(&mut self, chosen: &str) -> bool {
        self.cublas.adopt(chosen)
    }

    fn write(&mut self, at: Address, from: &[u8]) {
        if at.space == Space::Disk {
            let written = self.gpu.wait().and_then(|()| self.transfers.disk().file().write(at.offset, from));
            return self.keep_error(written);
        }
        if at.space == Space::Host {
            let waited = self.wait_for_host_memory();
            self.keep_error(waited);
            self.transfers.slice_mut(at.offset, from.len()).copy_from_slice(from);
            return;
        }
        assert!(at.offset + from.len() <= self.arena.1, "a write outside the reservation");
        let to = self.arena.0 + at.offset as u64;
        let result = self.staging.write(&self.gpu, to, from);
        self.keep_error(result);
    }

    fn read(&mut self, at: Address, into: &mut [u8]) -> Result<(), DeviceError> {
        self.check_health()?;
        if at.space == Space::Disk {
            self.gpu.wait()?;
            return self.transfers.disk().file().read(at.offset, into);
        }
        if at.space == Space::Host {
            self.wait_for_host_memory()?;
            into.copy_from_slice(self.transfers.slice_mut(at.offset, into.len()));
            return Ok(());
        }
        assert!(at.offset + into.len() <= self.arena.1, "a read outside the reservation");
        self.staging.read(&self.gpu, self.arena.0 + at.offset as u64, into)?;
        self.check_health()
    }

    fn begin_read(&mut self, slot: usize, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        self.staging.begin_read(&self.gpu, slot, self.arena.0 + offset as u64, bytes)
    }

    fn finish_read(&mut self, slot: usize, _offset: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        self.check_health()?;
        self.staging.finish_read(slot, into)?;
        // If an exchange was aborted in the meantime, the bytes are wrong.
        self.check_health()
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn memory(&mut self) -> Option<DeviceMemory> {
        let (free_bytes, _) = self.gpu.memory().ok()?;
        let taken = self.free_before.map_or(0, |before| before.saturating_sub(free_bytes));
        let bytes = self.own_memory.of(taken, || self.gpu.held_bytes());
        self.peak_bytes = self.peak_bytes.max(bytes);
        let pinned_bytes = self.pinned_bytes() as u64;
        let mapped_bytes = self.transfers.mapped_bytes() as u64;
        Some(DeviceMemory { bytes, peak_bytes: self.peak_bytes, free_bytes, pinned_bytes, mapped_bytes })
    }

    fn busy_percent(&mut self) -> Option<u32> {
        let session = self.nvml.get_or_init(|| self.gpu.watch());
        self.busy.at(Instant::now(), || session.as_ref()?.busy_percent())
    }

    fn fill<E>(&mut self, to: Destination, fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        if to.at.space == Space::Disk {
            let most = if to.in_one_piece { to.bytes } else { PIECE_BYTES };
            return self.transfers.disk().file().fill(to.at.offset, to.bytes, most, fill);
        }
        if to.at.space == Space::Host {
            self.wait_for_host_memory().map_err(FillError::Device)?;
            return fill(0, self.transfers.slice_mut(to.at.offset, to.bytes)).map_err(FillError::Source);
        }
        self.staging.fill(&self.gpu, self.arena.0, to, fill)
    }

    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        self.run_all(std::slice::from_ref(step), extent, true)
    }

    fn run_part(&mut self, steps: &[BoundStep], extent: &Extent) -> Result<(), DeviceError> {
        self.check_health()?;
        self.launch_all(steps, extent, true)
    }

    fn finish_parts(&mut self, steps: &[BoundStep]) -> Result<(), DeviceError> {
        self.settle(steps, true)
    }

    fn run_all(&mut self, steps: &[BoundStep], extent: &Extent, sums: bool) -> Result<(), DeviceError> {
        self.check_health()?;
        let mut graphs = std::mem::take(&mut self.graphs);
        let ran = graphs.run(&self.gpu, steps, extent, |part| self.launch_all(part, extent, sums));
        self.graphs = graphs;
        ran?;
        self.settle(steps, sums)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // `drop` cannot return an error.
        let _ = self.release();
    }
}

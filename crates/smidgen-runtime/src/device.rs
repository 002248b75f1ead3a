//! The device trait: reserve memory once, write and read bytes, run one step at a time.
//!
//! Steps arrive bound: every operand is an offset into the reservation with its storage and shape, so a
//! device never sees a graph, a name or a lifetime.

use crate::comm::CommError;
use crate::shared_host::SharedHost;
use smidgen_ir::workspace::Target;
use smidgen_ir::{
    DType, DeviceKind, Dim, Entry, Extent, Op, Plan, Precision, Route, Shape, Shard, Space, Storage, Type,
    ValueId, ValueRole,
};
use std::ops::Range;
use std::path::PathBuf;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum DeviceError {
    #[error("could not reserve {bytes} bytes on {device}")]
    Reserve { device: &'static str, bytes: usize },
    #[error("could not pin {bytes} bytes of host memory for {device}: {what}")]
    Pinned { device: &'static str, bytes: usize, what: String },
    #[error("{device} cannot run `{op}` on {storage} weights")]
    Storage { device: &'static str, op: &'static str, storage: Storage },
    #[error(
        "{device} cannot run `{op}` on {storage} weights with rows of {columns}: not a whole number of blocks"
    )]
    Columns { device: &'static str, op: &'static str, storage: Storage, columns: usize },
    #[error("{device} was given {given} bytes of workspace for `{op}` and needs {needed}")]
    Workspace { device: &'static str, op: &'static str, given: usize, needed: usize },
    #[error("{device} cannot offload to {}", space.name())]
    Space { device: &'static str, space: Space },
    #[error("{what} the offload file `{}`: {error}", path.display())]
    File { what: &'static str, path: PathBuf, error: std::io::Error },
    #[error("{device} does not support matmuls in {}", precision.name())]
    Precision { device: &'static str, precision: Precision },
    #[error("{device}: {call} failed: {what}")]
    Call { device: &'static str, call: &'static str, what: String },
    #[error("the kernels of {file} do not compile: {what}")]
    Compile { file: &'static str, what: String },
    #[error("GPU {ordinal} not found: the driver lists {count}")]
    NoSuchGpu { ordinal: usize, count: usize },
    #[error("{what} is missing ({file}): {remedy}")]
    Library { what: &'static str, file: &'static str, remedy: &'static str },
    #[error("{name} has compute capability {major}.{minor}, which does not support {}", precision.name())]
    Capability { name: String, major: u32, minor: u32, precision: Precision },
    #[error(
        "{name} has compute capability {}.{}, and kernels of {}.{} cannot run there (supported: 7.0 to {}.{})",
        own.0, own.1, wanted.0, wanted.1, own.0, own.1
    )]
    AsCapability { name: String, own: (u32, u32), wanted: (u32, u32) },
    #[error(
        "NVRTC {}.{} does not compile for {name} (compute capability {major}.{minor}): {remedy}",
        compiler.0, compiler.1
    )]
    Compiler { name: String, major: u32, minor: u32, compiler: (i32, i32), remedy: &'static str },
    #[error(
        "the driver is for CUDA {}.{} and cannot load the kernels of NVRTC {}.{} ({what}): update the driver, or install \
         an NVRTC of the driver's version",
        driver.0, driver.1, compiler.0, compiler.1
    )]
    OldDriver { driver: (i32, i32), compiler: (i32, i32), what: String },
    #[error("the micro-batch {actual:?} is larger than the plan's {planned:?}")]
    Extent { actual: Extent, planned: Extent },
    #[error("`{op}` needs other ranks, but {device} runs as a single rank")]
    NoOtherRanks { device: &'static str, op: &'static str },
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error("{0}")]
    Violation(String),
}

/// Bytes of each space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reservation {
    pub device: usize,
    pub host: usize,
    pub disk: usize,
    /// How many of the `host` bytes, from the first, the ranks of a machine share if they can.
    pub shared_host: usize,
}

impl Reservation {
    pub fn of(plan: &Plan) -> Reservation {
        let [device, host, disk] = Space::ALL.map(|space| plan.size(space).bytes());
        Reservation { device, host, disk, shared_host: plan.host.shared_bytes }
    }
}

/// A place in one of the spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub space: Space,
    /// From the start of the space's reservation.
    pub offset: usize,
}

impl Address {
    pub fn plus(self, bytes: usize) -> Address {
        Address { offset: self.offset + bytes, ..self }
    }
}

/// A value as a device sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    pub space: Space,
    /// From the start of the space's reservation.
    pub offset: usize,
    /// Bytes at the planned extent.
    pub bytes: usize,
    pub rows: Dim,
    pub columns: usize,
    pub storage: Storage,
    /// Elements from one row to the next; more than `columns` if the rows have gaps.
    pub stride: usize,
    /// Set for a slice of a matrix that stores codes and scales separately: which rows of the whole matrix it is.
    /// `offset` and `bytes` then describe the whole matrix.
    pub part: Option<RowPart>,
    /// How the value is divided over ranks, if it is. `bytes` then counts only this rank's part.
    pub shard: Option<Shard>,
}

/// Rows of a larger matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPart {
    pub first_row: usize,
    /// Rows of the whole matrix.
    pub total_rows: usize,
}

impl Operand {
    fn overlaps(&self, other: &Operand, extent: &Extent) -> bool {
        let end = |operand: &Operand| {
            let rows = operand.rows_at(extent) * operand.stride;
            operand.offset
                + operand.bytes.max(operand.storage.plain().map_or(0, |dtype| rows * dtype.bytes()))
        };
        self.space == other.space && self.offset < end(other) && other.offset < end(self)
    }

    pub fn of(plan: &Plan, id: ValueId) -> Operand {
        let value = plan.value(id);
        let buffer = plan.buffer(value.buffer.expect("`verify` checks that every operand has a buffer"));
        let mut dims = value.ty.shape.0.iter().copied();
        let rows = dims.next().unwrap_or(Dim::Const(1));
        let columns = dims.map(|dim| dim.at(&plan.extent)).product();
        let storage = value.ty.storage;
        let extent = plan.extent_of_lifetime(buffer.lifetime);
        let place = Operand {
            space: buffer.space,
            offset: buffer.offset + value.first_byte,
            bytes: value.role.stored_bytes(&value.ty, &extent),
            rows,
            columns,
            storage,
            stride: value.stride.unwrap_or(columns),
            part: None,
            shard: value.role.shard(),
        };
        let ValueRole::Slice(slice) = &value.role else { return place };
        if value.stride.is_some() {
            return place;
        }
        let (whole, shard) = (&plan.value(slice.of).ty, plan.value(slice.of).role.shard());
        if storage.has_contiguous_rows() {
            // The buffer of a divided value holds only this rank's rows.
            let first_row = slice.first_row - shard.map_or(0, |shard| shard.own_rows(whole).start);
            return Operand { offset: buffer.offset + storage.bytes(first_row, columns), ..place };
        }
        if shard.is_some() {
            return place;
        }
        let (total_rows, _) = whole.shape.at(&plan.extent);
        let part = Some(RowPart { first_row: slice.first_row, total_rows });
        Operand { bytes: whole.bytes(&plan.extent), part, ..place }
    }

    pub fn address(&self) -> Address {
        Address { space: self.space, offset: self.offset }
    }

    /// Whether rows follow each other without gaps.
    pub fn is_dense(&self) -> bool {
        self.stride == self.columns
    }

    pub fn rows_at(&self, extent: &Extent) -> usize {
        self.rows.at(extent)
    }

    pub fn elements_at(&self, extent: &Extent) -> usize {
        self.rows.at(extent) * self.columns
    }

    /// Bytes from the first element to the end of the last, gaps between rows included.
    pub fn span_at(&self, extent: &Extent) -> usize {
        let gaps = self.rows.at(extent).saturating_sub(1) * (self.stride - self.columns);
        self.bytes_at(extent) + gaps * self.storage.plain().map_or(0, DType::bytes)
    }

    pub fn bytes_at(&self, extent: &Extent) -> usize {
        if self.shard.is_some() {
            return self.bytes;
        }
        let rows = self.part.map_or_else(|| self.rows.at(extent), |part| part.total_rows);
        self.storage.bytes(rows, self.columns)
    }

    /// The byte range of each rank when the value is divided as `shard` says.
    pub fn parts(&self, shard: Shard) -> Vec<Range<usize>> {
        shard.bytes(&self.ty())
    }

    fn ty(&self) -> Type {
        let shape = match self.columns {
            1 => Shape::rows_of(self.rows),
            columns => Shape::of(self.rows, columns),
        };
        Type::new(shape, self.storage)
    }
}

/// A step whose operands are resolved to addresses.
#[derive(Clone, Debug)]
pub struct BoundStep {
    pub entry: Entry,
    /// Index among the steps of its entry point.
    pub index: usize,
    /// Steps of the same entry point whose transfers must have finished before this one runs.
    pub awaits: Vec<usize>,
    pub op: Op,
    pub precision: Precision,
    /// The largest extent at which it runs.
    pub planned: Extent,
    pub inputs: Vec<Operand>,
    pub outputs: Vec<Operand>,
    pub updates: Vec<Operand>,
    /// Offset and bytes of scratch memory.
    pub workspace: Option<(usize, usize)>,
}

impl BoundStep {
    /// Whether this step may run at the same time as an earlier one: neither writes bytes that the other reads or
    /// writes.
    pub fn is_independent_of(&self, before: &BoundStep) -> bool {
        let written = |step: &BoundStep| [&step.outputs[..], &step.updates].concat();
        let touched = |step: &BoundStep| [written(step), step.inputs.clone()].concat();
        let are_disjoint = |some: &[Operand], others: &[Operand]| {
            some.iter().all(|one| others.iter().all(|other| !one.overlaps(other, &self.planned)))
        };
        are_disjoint(&written(self), &touched(before)) && are_disjoint(&written(before), &touched(self))
    }

    pub fn of(plan: &Plan, entry: Entry, index: usize) -> BoundStep {
        let step = &plan.entry(entry).steps[index];
        let bind = |ids: &[ValueId]| ids.iter().map(|id| Operand::of(plan, *id)).collect();
        let workspace = step.workspace.map(|id| (plan.buffer(id).offset, plan.buffer(id).bytes));
        BoundStep {
            entry,
            index,
            awaits: step.awaits.clone(),
            op: step.op.clone(),
            precision: plan.precision,
            planned: plan.extent_of(entry),
            inputs: bind(&step.inputs),
            outputs: bind(&step.outputs),
            updates: bind(&step.updates),
            workspace,
        }
    }

    /// Whether the step has nothing to do at an extent, because its tile of tokens is empty.
    pub fn is_idle(&self, extent: &Extent) -> bool {
        let operands = || self.inputs.iter().chain(&self.outputs).chain(&self.updates);
        operands().any(|operand| matches!(operand.rows, Dim::Tile { .. }) && operand.rows_at(extent) == 0)
    }

    /// Whether the step sums over ranks what the micro-batches of an optimizer step have accumulated.
    pub fn is_sum(&self) -> bool {
        self.op.is_sum()
    }

    /// The copy that this step makes, if it is a transfer.
    pub fn transfer(&self) -> Option<Transfer<'_>> {
        let copy = || self.outputs.first().or(self.updates.first()).expect("a transfer writes a copy");
        match self.op.route()? {
            Route::ToDevice => {
                Some(Transfer { on_device: copy(), offloaded: &self.inputs[0], to_device: true })
            }
            Route::FromDevice => {
                Some(Transfer { on_device: &self.inputs[0], offloaded: copy(), to_device: false })
            }
            Route::Ranks { .. } | Route::Host => None,
        }
    }

    /// Workspace bytes that a device needs for the step at an extent.
    pub fn workspace_bytes(&self, device: DeviceKind, threads: usize, extent: &Extent) -> usize {
        let types: Vec<Type> = self.inputs.iter().map(Operand::ty).collect();
        let inputs: Vec<&Type> = types.iter().collect();
        self.op.workspace_bytes(&inputs, extent, Target { device, precision: self.precision, threads })
    }
}

/// A copy between the device and the host or disk.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    pub on_device: &'a Operand,
    /// In host memory or on disk.
    pub offloaded: &'a Operand,
    pub to_device: bool,
}

/// A source of bytes. The device calls it with `(offset in the value, buffer to fill)`, in order.
pub type Fill<'a, E> = &'a mut dyn FnMut(usize, &mut [u8]) -> Result<(), E>;

/// Where `fill` puts a value. The source delivers rows without gaps; the destination may have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    pub at: Address,
    pub bytes: usize,
    /// If rows have gaps: the bytes of a row, and the bytes from the start of one row to the next.
    pub rows: Option<(usize, usize)>,
    /// Whether the source must be called once, for the whole value.
    pub in_one_piece: bool,
}

impl Destination {
    pub fn of(operand: &Operand) -> Destination {
        let element = operand.storage.plain().map_or(0, DType::bytes);
        let rows = (!operand.is_dense()).then_some((operand.columns * element, operand.stride * element));
        Destination { at: operand.address(), bytes: operand.bytes, rows, in_one_piece: false }
    }
}

#[derive(Debug, Error)]
pub enum FillError<E> {
    #[error(transparent)]
    Source(E),
    #[error(transparent)]
    Device(DeviceError),
}

/// Asynchronous reads that can be pending at the same time.
pub const READ_SLOTS: usize = 4;
/// Most bytes of one asynchronous read.
pub const SLOT_BYTES: usize = 64;

/// Measured memory of a device with separate memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Used by this process, the device's context included.
    pub bytes: u64,
    pub peak_bytes: u64,
    /// Free on the device.
    pub free_bytes: u64,
    /// Pinned host memory.
    pub pinned_bytes: u64,
    /// The part of `pinned_bytes` that the operating system counts as memory of this process.
    pub mapped_bytes: u64,
}

pub trait Device {
    fn name(&self) -> &'static str;

    /// Reserves all memory of a plan; device memory is touched and zeroed. Called before anything else.
    fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError>;

    /// Uses memory that the ranks of this machine share for the first bytes of the next reservation's host memory.
    fn share_host(&mut self, _shared: SharedHost) {}

    /// Whether this process fills the memory at an address; false if another process that shares it does.
    fn fills(&self, _at: Address) -> bool {
        true
    }

    /// Returns an error if this device cannot run a step at the planned extent. Called before any step runs.
    fn check(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError>;

    /// Called once, after `reserve` and before anything is written. The device may time alternatives and compile what
    /// it needs to run each step at its planned extent.
    fn prepare(&mut self, _steps: &[(Extent, &[BoundStep])]) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The matmul algorithms of the loaded plan, if the device chose them by timing; for
    /// [`Device::adopt_algorithms`].
    fn chosen_algorithms(&self) -> Option<String> {
        None
    }

    /// Uses the matmul algorithms of an earlier run, so that plans loaded later sum in the same order.
    /// Returns false if they were chosen on another device or by another library version.
    fn adopt_algorithms(&mut self, _chosen: &str) -> bool {
        false
    }

    /// Writes bytes that the next step sees. A failure is reported by the next call that returns a `Result`.
    fn write(&mut self, at: Address, from: &[u8]);

    /// Reads bytes after everything launched so far has finished.
    fn read(&mut self, at: Address, into: &mut [u8]) -> Result<(), DeviceError>;

    /// Enqueues a read of a few bytes behind everything launched so far, and does not wait.
    /// There are [`READ_SLOTS`] slots of [`SLOT_BYTES`] each; a slot holds one pending read.
    fn begin_read(&mut self, _slot: usize, _offset: usize, _bytes: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Waits for a read that `begin_read` enqueued at the same offset. A synchronous device reads only now, so the
    /// caller must run nothing in between.
    fn finish_read(&mut self, _slot: usize, offset: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        self.read(Address { space: Space::Device, offset }, into)
    }

    /// Whether steps may still be running when `run` returns.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Memory in use and free now; `None` for a device that computes in host memory.
    fn memory(&mut self) -> Option<DeviceMemory> {
        None
    }

    /// Percentage of the last second in which the device was busy, for any process; `None` if unknown.
    fn busy_percent(&mut self) -> Option<u32> {
        None
    }

    /// Fills a value from a source, piece by piece, without a copy where the device computes in host memory.
    fn fill<E>(&mut self, to: Destination, fill: Fill<'_, E>) -> Result<(), FillError<E>>
    where
        Self: Sized;

    /// Runs one step. If it is a transfer, it has finished before any later call.
    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError>;

    /// Runs some steps of an entry point, with more to follow. Their transfers may still be pending afterwards.
    fn run_part(&mut self, steps: &[BoundStep], extent: &Extent) -> Result<(), DeviceError> {
        self.run_all(steps, extent, true)
    }

    /// Called after the last `run_part` of an entry point. All its transfers have finished before any later call.
    fn finish_parts(&mut self, _steps: &[BoundStep]) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Runs all steps of an entry point in order; without `sums` it skips sums over ranks. A device may overlap steps
    /// that do not touch each other's memory. All transfers have finished before any later call.
    fn run_all(&mut self, steps: &[BoundStep], extent: &Extent, sums: bool) -> Result<(), DeviceError> {
        let is_run = |step: &&BoundStep| sums || !step.is_sum();
        steps.iter().filter(is_run).try_for_each(|step| self.run(step, extent))
    }
}

//! What a device is: one reservation, bytes in, bytes out, and one step at a time.
//!
//! Steps arrive bound: every operand is an offset into the reservation with its storage and shape, so a
//! device never sees a graph, a name or a lifetime.

use smidgen_ir::workspace_cpu::{Target, workspace_bytes};
use smidgen_ir::{
    DType, DeviceKind, Dim, Entry, Extent, Op, Plan, Precision, Shape, Space, Storage, Type, ValueId,
    ValueRole,
};
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
        "{device} cannot run `{op}` on {storage} weights with rows of {columns}, which are no whole blocks"
    )]
    Columns { device: &'static str, op: &'static str, storage: Storage, columns: usize },
    #[error("{device} was given {given} bytes of workspace for `{op}` and needs {needed}")]
    Workspace { device: &'static str, op: &'static str, given: usize, needed: usize },
    #[error("{device} has no {} to put values on", space.name())]
    Space { device: &'static str, space: Space },
    #[error("{what} the file beside the memory, `{}`: {error}", path.display())]
    File { what: &'static str, path: PathBuf, error: std::io::Error },
    #[error("{device} has no instructions for products of {}", precision.name())]
    Precision { device: &'static str, precision: Precision },
    #[error("{device}: {call} failed: {what}")]
    Call { device: &'static str, call: &'static str, what: String },
    #[error("the kernels of {file} do not compile: {what}")]
    Compile { file: &'static str, what: String },
    #[error("there is no GPU {ordinal}: the driver knows {count}")]
    NoSuchGpu { ordinal: usize, count: usize },
    #[error("{what} is missing ({file}): {remedy}")]
    Library { what: &'static str, file: &'static str, remedy: &'static str },
    #[error("{name} has compute capability {major}.{minor}, which does not multiply {}", precision.name())]
    Capability { name: String, major: u32, minor: u32, precision: Precision },
    #[error("the micro-batch {actual:?} is larger than the plan's {planned:?}")]
    Extent { actual: Extent, planned: Extent },
    #[error("{0}")]
    Violation(String),
}

/// Bytes of each space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reservation {
    pub device: usize,
    pub host: usize,
    pub disk: usize,
}

impl Reservation {
    pub fn of(plan: &Plan) -> Reservation {
        let [device, host, disk] = Space::ALL.map(|space| plan.size(space).bytes());
        Reservation { device, host, disk }
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
    pub fn behind(self, bytes: usize) -> Address {
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
    /// Elements from one row to the next; more than `columns` where other columns lie between.
    pub stride: usize,
    /// Where codes and scales of a matrix lie apart, some of its rows are known by the whole.
    pub part: Option<RowPart>,
}

/// Rows of a larger matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPart {
    pub first_row: usize,
    /// Rows of the whole.
    pub total_rows: usize,
}

impl Operand {
    pub fn of(plan: &Plan, id: ValueId) -> Operand {
        let value = plan.value(id);
        let buffer = plan.buffer(value.buffer.expect("verify has checked that every operand has a buffer"));
        let mut dims = value.ty.shape.0.iter().copied();
        let rows = dims.next().unwrap_or(Dim::Const(1));
        let columns = dims.map(|dim| dim.at(&plan.extent)).product();
        let storage = value.ty.storage;
        let extent = plan.extent_of_lifetime(buffer.lifetime);
        let place = Operand {
            space: buffer.space,
            offset: buffer.offset + value.first_byte,
            bytes: value.ty.bytes(&extent),
            rows,
            columns,
            storage,
            stride: value.stride.unwrap_or(columns),
            part: None,
        };
        let ValueRole::Slice(slice) = &value.role else { return place };
        if value.stride.is_some() {
            return place;
        }
        if storage.has_contiguous_rows() {
            return Operand { offset: buffer.offset + storage.bytes(slice.first_row, columns), ..place };
        }
        let whole = &plan.value(slice.of).ty;
        let (total_rows, _) = whole.shape.at(&plan.extent);
        let part = Some(RowPart { first_row: slice.first_row, total_rows });
        Operand { bytes: whole.bytes(&plan.extent), part, ..place }
    }

    pub fn address(&self) -> Address {
        Address { space: self.space, offset: self.offset }
    }

    /// Whether row follows row without a gap.
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
        let rows = self.part.map_or_else(|| self.rows.at(extent), |part| part.total_rows);
        self.storage.bytes(rows, self.columns)
    }

    fn ty(&self) -> Type {
        let shape = match self.columns {
            1 => Shape::rows_of(self.rows),
            columns => Shape::of(self.rows, columns),
        };
        Type::new(shape, self.storage)
    }
}

/// A step whose operands are places in memory.
#[derive(Clone, Debug)]
pub struct BoundStep {
    pub entry: Entry,
    /// Its place among the steps of its entry point.
    pub index: usize,
    /// Those of them whose transfers must be over before.
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
}

/// A value on its way between the device and elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// On the device.
    pub here: &'a Operand,
    /// Elsewhere.
    pub there: &'a Operand,
    /// Whether it comes to the device.
    pub is_inward: bool,
}

impl BoundStep {
    /// Whether the step has nothing to do at an extent: its tile of tokens is empty.
    pub fn is_idle(&self, extent: &Extent) -> bool {
        let operands = || self.inputs.iter().chain(&self.outputs).chain(&self.updates);
        operands().any(|operand| matches!(operand.rows, Dim::Tile { .. }) && operand.rows_at(extent) == 0)
    }

    /// What the step moves, if that is what it does.
    pub fn transfer(&self) -> Option<Transfer<'_>> {
        let copy = || self.outputs.first().or(self.updates.first()).expect("a transfer writes a copy");
        self.op.is_transfer().then(|| match self.op == Op::Fetch {
            true => Transfer { here: copy(), there: &self.inputs[0], is_inward: true },
            false => Transfer { here: &self.inputs[0], there: copy(), is_inward: false },
        })
    }

    /// Bytes of scratch that a device needs for the step at an extent.
    pub fn workspace_bytes(&self, device: DeviceKind, threads: usize, extent: &Extent) -> usize {
        let types: Vec<Type> = self.inputs.iter().map(Operand::ty).collect();
        let inputs: Vec<&Type> = types.iter().collect();
        workspace_bytes(&self.op, &inputs, extent, Target { device, precision: self.precision, threads })
    }
}

/// Hands out pieces of device memory to be filled in order: `fill(offset in the operand, piece)`.
pub type Fill<'a, E> = &'a mut dyn FnMut(usize, &mut [u8]) -> Result<(), E>;

/// Where a value is filled: rows that come one behind the other, and lie so or with gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    pub at: Address,
    pub bytes: usize,
    /// Bytes of a row and from one row to the next, where those differ.
    pub rows: Option<(usize, usize)>,
    /// Whether the whole value must come as one piece.
    pub in_one_piece: bool,
}

impl Destination {
    pub fn of(operand: &Operand) -> Destination {
        let element = operand.storage.plain().map_or(0, DType::bytes);
        let rows = (!operand.is_dense()).then_some((operand.columns * element, operand.stride * element));
        Destination { at: operand.address(), bytes: operand.bytes, rows, in_one_piece: false }
    }
}

/// Failures of a fill: of the source, or of the device.
#[derive(Debug, Error)]
pub enum FillError<E> {
    #[error(transparent)]
    Source(E),
    #[error(transparent)]
    Device(DeviceError),
}

/// Reads that can be under way at the same time.
pub const READ_SLOTS: usize = 4;
/// Bytes of each at most.
pub const SLOT_BYTES: usize = 64;

/// Memory of a device that is not the host's, as it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Taken since the device was opened, its context included.
    pub bytes: u64,
    pub peak_bytes: u64,
    /// What no process holds.
    pub free_bytes: u64,
    /// Of the host, within reach of the device.
    pub pinned_bytes: u64,
}

pub trait Device {
    fn name(&self) -> &'static str;

    /// Takes the whole reservation, touched and zero on the device. Called once, before anything else.
    fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError>;

    /// Refuses a step that this device could not run at the planned extent, before any has run.
    fn check(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError>;

    /// Called once, after `reserve` and before anything is written: a chance to find the best way to run each
    /// step at its planned extent.
    fn prepare(&mut self, _steps: &[(Extent, &[BoundStep])]) -> Result<(), DeviceError> {
        Ok(())
    }

    /// How the loaded plan's products are formed, where a device chose that by timing: text for [`Device::adopt`].
    fn chosen(&self) -> Option<String> {
        None
    }

    /// Takes over choices that were made before, so that a plan loaded after it forms the same sums in the same order.
    /// False where they were made by another device or library, whose choices mean nothing here.
    fn adopt(&mut self, _chosen: &str) -> bool {
        false
    }

    /// Writes before whatever runs next. A device that fails says so when it is asked for something.
    fn write(&mut self, at: Address, from: &[u8]);

    /// Reads what everything that was run so far left there.
    fn read(&mut self, at: Address, into: &mut [u8]) -> Result<(), DeviceError>;

    /// Begins to read a few bytes of the device as everything launched so far leaves them, without waiting for it.
    /// A slot holds one read; there are [`READ_SLOTS`] of at most [`SLOT_BYTES`].
    fn begin_read(&mut self, _slot: usize, _offset: usize, _bytes: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Ends what `begin_read` began, with the same place. A device that runs each step at once reads only now, so
    /// nothing may have been run in between there.
    fn finish_read(&mut self, _slot: usize, offset: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        self.read(Address { space: Space::Device, offset }, into)
    }

    /// Whether steps are still under way when `run` returns.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// What the device's own memory is like now; nothing where it is the host's.
    fn memory(&mut self) -> Option<DeviceMemory> {
        None
    }

    /// Lets the caller write a value piece by piece, straight into place where the device's memory is the host's.
    fn fill<E>(&mut self, to: Destination, fill: Fill<'_, E>) -> Result<(), FillError<E>>
    where
        Self: Sized;

    /// Runs a step; its transfer is over for whatever is asked next.
    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError>;

    /// Runs all steps of an entry point in order; a device may start several at once that do not touch each other, and
    /// leaves none of their transfers behind.
    fn run_all(&mut self, steps: &[BoundStep], extent: &Extent) -> Result<(), DeviceError> {
        steps.iter().try_for_each(|step| self.run(step, extent))
    }
}

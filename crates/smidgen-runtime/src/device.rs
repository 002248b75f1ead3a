//! What a device is: one reservation, bytes in, bytes out, and one step at a time.
//!
//! Steps arrive bound: every operand is an offset into the reservation with its storage and shape, so a
//! device never sees a graph, a name or a lifetime.

use smidgen_ir::{Dim, Extent, Op, Plan, Precision, Step, Storage, ValueId, ValueRole};
use thiserror::Error;

#[derive(Debug, Error)]
pub enum DeviceError {
    #[error("could not reserve {bytes} bytes on {device}")]
    Reserve { device: &'static str, bytes: usize },
    #[error("{device} cannot run `{op}` on {storage} weights")]
    Storage { device: &'static str, op: &'static str, storage: Storage },
    #[error(
        "{device} cannot run `{op}` on {storage} weights with rows of {columns}, which are no whole blocks"
    )]
    Columns { device: &'static str, op: &'static str, storage: Storage, columns: usize },
    #[error("{device} was given {given} bytes of workspace for `{op}` and needs {needed}")]
    Workspace { device: &'static str, op: &'static str, given: usize, needed: usize },
    #[error("{device} has no instructions for products of {}", precision.name())]
    Precision { device: &'static str, precision: Precision },
    #[error("the micro-batch {actual:?} is larger than the plan's {planned:?}")]
    Extent { actual: Extent, planned: Extent },
    #[error("{0}")]
    Violation(String),
}

/// A value as a device sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    /// From the start of the reservation.
    pub offset: usize,
    /// Bytes at the planned extent.
    pub bytes: usize,
    pub rows: Dim,
    pub columns: usize,
    pub storage: Storage,
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
            offset: buffer.offset,
            bytes: value.ty.bytes(&extent),
            rows,
            columns,
            storage,
            part: None,
        };
        let ValueRole::Slice(slice) = &value.role else { return place };
        if storage.rows_lie_together() {
            return Operand { offset: buffer.offset + storage.bytes(slice.first_row, columns), ..place };
        }
        let whole = &plan.value(slice.of).ty;
        let (total_rows, _) = whole.shape.at(&plan.extent);
        let part = Some(RowPart { first_row: slice.first_row, total_rows });
        Operand { bytes: whole.bytes(&plan.extent), part, ..place }
    }

    pub fn rows_at(&self, extent: &Extent) -> usize {
        self.rows.at(extent)
    }

    pub fn elements_at(&self, extent: &Extent) -> usize {
        self.rows.at(extent) * self.columns
    }

    pub fn bytes_at(&self, extent: &Extent) -> usize {
        let rows = self.part.map_or_else(|| self.rows.at(extent), |part| part.total_rows);
        self.storage.bytes(rows, self.columns)
    }
}

/// A step whose operands are places in memory.
#[derive(Clone, Debug)]
pub struct BoundStep {
    pub op: Op,
    pub precision: Precision,
    pub inputs: Vec<Operand>,
    pub outputs: Vec<Operand>,
    pub updates: Vec<Operand>,
    /// Offset and bytes of scratch memory.
    pub workspace: Option<(usize, usize)>,
}

impl BoundStep {
    pub fn of(plan: &Plan, step: &Step) -> BoundStep {
        let bind = |ids: &[ValueId]| ids.iter().map(|id| Operand::of(plan, *id)).collect();
        let workspace = step.workspace.map(|id| (plan.buffer(id).offset, plan.buffer(id).bytes));
        BoundStep {
            op: step.op.clone(),
            precision: plan.precision,
            inputs: bind(&step.inputs),
            outputs: bind(&step.outputs),
            updates: bind(&step.updates),
            workspace,
        }
    }
}

/// Hands out pieces of device memory to be filled in order: `fill(offset in the operand, piece)`.
pub type Fill<'a, E> = &'a mut dyn FnMut(usize, &mut [u8]) -> Result<(), E>;

pub trait Device {
    fn name(&self) -> &'static str;

    /// Takes the whole reservation, touched and zero. Called once, before anything else.
    fn reserve(&mut self, bytes: usize) -> Result<(), DeviceError>;

    /// Refuses a step that this device could not run at the planned extent, before any has run.
    fn check(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError>;

    fn write(&mut self, offset: usize, from: &[u8]);

    fn read(&mut self, offset: usize, into: &mut [u8]);

    /// Lets the caller write `bytes` bytes at `offset` piece by piece, straight into place where the
    /// device's memory is the host's.
    fn fill<E>(&mut self, offset: usize, bytes: usize, fill: Fill<'_, E>) -> Result<(), E>
    where
        Self: Sized;

    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError>;
}

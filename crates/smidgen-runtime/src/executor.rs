//! The executor: loads a plan on a device, runs the steps of its entry points, reads and writes its values.
//!
//! Steps are bound to addresses once, when the plan is loaded; running one allocates nothing. In breadth-first order a
//! value that one lap leaves for a later one holds the rows of all micro-batches; the offset of a micro-batch's rows is
//! set before its steps run.
//! Left out: the meaning of values. Weights, batches and adapters are the caller's concern.

use crate::device::{BoundStep, Destination, Device, DeviceError, Fill, FillError, Operand, Reservation};
use smidgen_ir::{DType, Dim, Entry, Extent, Lap, LeafKind, Plan, ValueId, ValueRole};
use std::ops::Range;

#[derive(Debug)]
pub struct Executor<D> {
    plan: Plan,
    device: D,
    entries: Vec<(Entry, Vec<BoundStep>)>,
    /// The operands of `micro_step` whose offset depends on the micro-batch.
    carried: Vec<CarriedOperand>,
}

/// An operand of a transfer step that holds rows of all micro-batches: its first input or its first update.
#[derive(Clone, Copy, Debug)]
struct CarriedOperand {
    step: usize,
    is_input: bool,
    /// The offset of the first micro-batch's rows.
    offset: usize,
    rows: Dim,
    row_bytes: usize,
}

impl<D: Device> Executor<D> {
    /// Reserves the plan's memory on the device and checks that every step can run there.
    pub fn load(plan: Plan, device: D) -> Result<Executor<D>, DeviceError> {
        Executor::try_load(plan, device).map_err(|(error, _)| error)
    }

    /// Like `load`, but returns the device on failure, so that the caller can try a smaller plan.
    pub fn try_load(plan: Plan, mut device: D) -> Result<Executor<D>, (DeviceError, D)> {
        let entries: Vec<(Entry, Vec<BoundStep>)> = plan
            .entries
            .iter()
            .map(|entry| {
                let steps = (0..entry.steps.len()).map(|index| BoundStep::of(&plan, entry.entry, index));
                (entry.entry, steps.collect())
            })
            .collect();
        match bind(&plan, &mut device, &entries) {
            Ok(()) => Ok(Executor { carried: carried_operands(&plan), plan, device, entries }),
            Err(error) => Err((error, device)),
        }
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    pub fn into_device(self) -> D {
        self.device
    }

    /// For reading memory that belongs to no value, such as workspaces.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Runs one entry point for a micro-batch of the given extent.
    pub fn run(&mut self, entry: Entry, extent: &Extent) -> Result<(), DeviceError> {
        self.run_with_sums(entry, extent, true)
    }

    /// Like `run`. Without `sums`, gradients are not summed over ranks, because more micro-batches of the step follow.
    pub fn run_with_sums(&mut self, entry: Entry, extent: &Extent, sums: bool) -> Result<(), DeviceError> {
        let planned = self.plan.extent_of(entry);
        if !planned.contains(extent) {
            return Err(DeviceError::Extent { actual: *extent, planned });
        }
        self.device.run_all(steps_of(&self.entries, entry), extent, sums)
    }

    /// Whether `micro_step` is run by [`Executor::run_laps`].
    pub fn has_laps(&self) -> bool {
        !self.plan.entry(Entry::MicroStep).laps.is_empty()
    }

    /// Runs `micro_step` in breadth-first order for all micro-batches of a step. `feed` writes the inputs of a
    /// micro-batch.
    pub fn run_laps<E: From<DeviceError>>(
        &mut self,
        extents: &[Extent],
        mut feed: impl FnMut(&mut Executor<D>, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        self.visit_laps(extents, |executor, turn| match turn {
            Turn::Feed(number) => feed(executor, number),
            Turn::Run(steps, _) if steps.is_empty() => Ok(()),
            Turn::Run(steps, extent) => {
                let steps = &steps_of(&executor.entries, Entry::MicroStep)[steps];
                Ok(executor.device.run_part(steps, &extent)?)
            }
        })
    }

    /// Calls `visit` with each turn of a step in breadth-first order, and sets the offsets of carried operands between
    /// the turns.
    pub fn visit_laps<E: From<DeviceError>>(
        &mut self,
        extents: &[Extent],
        mut visit: impl FnMut(&mut Executor<D>, Turn) -> Result<(), E>,
    ) -> Result<(), E> {
        let planned = self.plan.extent;
        if let Some(actual) = extents.iter().find(|extent| !planned.contains(extent)) {
            return Err(DeviceError::Extent { actual: *actual, planned }.into());
        }
        let mut done = 0;
        for lap in 0..self.plan.entry(Entry::MicroStep).laps.len() {
            let Lap { each, end } = self.plan.entry(Entry::MicroStep).laps[lap].clone();
            visit(self, Turn::Run(done..each.start, planned))?;
            let mut before = Extent::default();
            for (number, extent) in extents.iter().enumerate() {
                if done == 0 || extents.len() > 1 {
                    visit(self, Turn::Feed(number))?;
                }
                self.place_carried(&each, &before);
                visit(self, Turn::Run(each.clone(), *extent))?;
                before = before.plus(extent);
            }
            visit(self, Turn::Run(each.end..end, planned))?;
            done = end;
        }
        Ok(self.device.finish_parts(steps_of(&self.entries, Entry::MicroStep))?)
    }

    /// Points the carried operands of steps `each` at the rows behind those of the earlier micro-batches.
    fn place_carried(&mut self, each: &Range<usize>, before: &Extent) {
        let Some((_, steps)) = self.entries.iter_mut().find(|(entry, _)| *entry == Entry::MicroStep) else {
            return;
        };
        for carried in self.carried.iter().filter(|carried| each.contains(&carried.step)) {
            let step = &mut steps[carried.step];
            let operand = if carried.is_input { &mut step.inputs[0] } else { &mut step.updates[0] };
            operand.offset = carried.offset + carried.rows.at(before) * carried.row_bytes;
        }
    }

    /// Runs one step of an entry point, so that a caller can read its results before a later step overwrites them.
    pub fn run_step(&mut self, entry: Entry, index: usize, extent: &Extent) -> Result<(), DeviceError> {
        if !self.plan.extent.contains(extent) {
            return Err(DeviceError::Extent { actual: *extent, planned: self.plan.extent });
        }
        self.device.run(&steps_of(&self.entries, entry)[index], extent)
    }

    /// Writes the first bytes of a value; not all of them if the micro-batch is smaller than planned.
    pub fn write(&mut self, value: ValueId, from: &[u8]) {
        self.write_at(value, 0, from);
    }

    pub fn write_at(&mut self, value: ValueId, offset: usize, from: &[u8]) {
        let place = self.place(value, offset + from.len());
        for (inside, range) in pieces(&place, offset, from.len()) {
            self.device.write(place.address().plus(inside), &from[range]);
        }
    }

    pub fn read(&mut self, value: ValueId, into: &mut [u8]) -> Result<(), DeviceError> {
        self.read_at(value, 0, into)
    }

    pub fn read_at(&mut self, value: ValueId, offset: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        let place = self.place(value, offset + into.len());
        for (inside, range) in pieces(&place, offset, into.len()) {
            self.device.read(place.address().plus(inside), &mut into[range])?;
        }
        Ok(())
    }

    /// Enqueues a read of the first bytes of a value; see [`Device::begin_read`].
    pub fn begin_read(&mut self, slot: usize, value: ValueId, bytes: usize) -> Result<(), DeviceError> {
        let place = self.place(value, bytes);
        self.device.begin_read(slot, place.offset, bytes)
    }

    pub fn finish_read(&mut self, slot: usize, value: ValueId, into: &mut [u8]) -> Result<(), DeviceError> {
        let place = self.place(value, into.len());
        self.device.finish_read(slot, place.offset, into)
    }

    /// Whether this process fills a value; false if another rank that shares its memory does.
    pub fn fills(&self, value: ValueId) -> bool {
        self.device.fills(Operand::of(&self.plan, value).address())
    }

    /// Fills a whole value from a source that can deliver any part of it.
    pub fn fill<E>(&mut self, value: ValueId, fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        self.device.fill(Destination::of(&Operand::of(&self.plan, value)), fill)
    }

    /// Like `fill`, from a source that can only deliver the whole value at once.
    pub fn fill_at_once<E>(&mut self, value: ValueId, fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        let to = Destination::of(&Operand::of(&self.plan, value));
        self.device.fill(Destination { in_one_piece: true, ..to }, fill)
    }

    fn place(&self, value: ValueId, bytes: usize) -> Operand {
        let place = Operand::of(&self.plan, value);
        assert!(
            bytes <= place.bytes,
            "`{}` has {} bytes, not {bytes}",
            self.plan.value(value).name,
            place.bytes
        );
        place
    }
}

/// The next thing to do in breadth-first order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Write the inputs of this micro-batch.
    Feed(usize),
    /// Run these steps of `micro_step` at this extent.
    Run(Range<usize>, Extent),
}

/// The steps of an entry point; none if the plan does not have it.
fn steps_of(entries: &[(Entry, Vec<BoundStep>)], entry: Entry) -> &[BoundStep] {
    entries.iter().find(|(own, _)| *own == entry).map_or(&[], |(_, steps)| steps)
}

fn carried_operands(plan: &Plan) -> Vec<CarriedOperand> {
    let Some(entry) = plan.entries.iter().find(|entry| entry.entry == Entry::MicroStep) else {
        return vec![];
    };
    let is_carried = |id: ValueId| match &plan.value(id).role {
        ValueRole::Leaf(leaf) => matches!(leaf.kind, LeafKind::Carried(_)),
        ValueRole::Slice(_) | ValueRole::Temp => false,
    };
    let mut all = Vec::new();
    for (step, planned) in entry.steps.iter().enumerate().filter(|(_, step)| step.op.is_transfer()) {
        let input = planned.inputs.first().map(|id| (*id, true));
        let update = planned.updates.first().map(|id| (*id, false));
        for (id, is_input) in input.into_iter().chain(update).filter(|(id, _)| is_carried(*id)) {
            let Operand { offset, rows, columns, storage, .. } = Operand::of(plan, id);
            let row_bytes = columns * storage.plain().map_or(0, DType::bytes);
            all.push(CarriedOperand { step, is_input, offset, rows, row_bytes });
        }
    }
    all
}

/// Checks every step of a plan on the device, reserves its memory and prepares its steps.
fn bind<D: Device>(
    plan: &Plan,
    device: &mut D,
    entries: &[(Entry, Vec<BoundStep>)],
) -> Result<(), DeviceError> {
    for (entry, steps) in entries {
        let extent = plan.extent_of(*entry);
        for step in steps {
            device.check(step, &extent)?;
        }
    }
    device.reserve(&Reservation::of(plan))?;
    let steps: Vec<(Extent, &[BoundStep])> =
        entries.iter().map(|(entry, steps)| (plan.extent_of(*entry), steps.as_slice())).collect();
    device.prepare(&steps)
}

/// Splits bytes `offset..offset + count` of a value into contiguous pieces: (offset inside the operand, range of
/// the `count` bytes). One piece if rows have no gaps, else one per row.
fn pieces(place: &Operand, offset: usize, count: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let gaps = Destination::of(place).rows;
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == count {
            return None;
        }
        let first = done;
        let (inside, bytes) = match gaps {
            None => (offset, count),
            Some((row_bytes, stride_bytes)) => {
                let (row, column) = ((offset + first) / row_bytes, (offset + first) % row_bytes);
                (row * stride_bytes + column, (row_bytes - column).min(count - first))
            }
        };
        done += bytes;
        Some((inside, first..done))
    })
}

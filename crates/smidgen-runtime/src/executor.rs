//! The executor: loads a plan on a device, runs the steps of its entry points, reads and writes its values.
//!
//! Steps are bound to addresses once, when the plan is loaded; running one allocates nothing.
//! It leaves out what the values mean: weights, batches and adapters are the caller's.

use crate::device::{BoundStep, Destination, Device, DeviceError, Fill, FillError, Operand, Reservation};
use smidgen_ir::{Entry, Extent, Plan, ValueId};

#[derive(Debug)]
pub struct Executor<D> {
    plan: Plan,
    device: D,
    entries: Vec<(Entry, Vec<BoundStep>)>,
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
            Ok(()) => Ok(Executor { plan, device, entries }),
            Err(error) => Err((error, device)),
        }
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    /// Returns the device, for another plan.
    pub fn into_device(self) -> D {
        self.device
    }

    /// For reading memory that belongs to no value, such as workspaces.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Runs one entry point for a micro-batch of the given extent.
    pub fn run(&mut self, entry: Entry, extent: &Extent) -> Result<(), DeviceError> {
        self.run_summing(entry, extent, true)
    }

    /// The same; without `sums` gradients stay those of this rank, because more micro-batches of the step follow.
    pub fn run_summing(&mut self, entry: Entry, extent: &Extent, sums: bool) -> Result<(), DeviceError> {
        let planned = self.plan.extent_of(entry);
        if !planned.contains(extent) {
            return Err(DeviceError::Extent { actual: *extent, planned });
        }
        let found = self.entries.iter().find(|(own, _)| *own == entry);
        self.device.run_all(found.map(|(_, steps)| steps.as_slice()).unwrap_or_default(), extent, sums)
    }

    /// Runs one step of an entry point, so that a caller can read its results before a later step overwrites them.
    pub fn run_step(&mut self, entry: Entry, index: usize, extent: &Extent) -> Result<(), DeviceError> {
        if !self.plan.extent.contains(extent) {
            return Err(DeviceError::Extent { actual: *extent, planned: self.plan.extent });
        }
        let steps = self.entries.iter().find(|(own, _)| *own == entry).map(|(_, steps)| steps);
        let step = steps.and_then(|steps| steps.get(index)).expect("the plan has this step");
        self.device.run(step, extent)
    }

    /// Writes the first bytes of a value; fewer than all for a micro-batch smaller than planned.
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
fn pieces(
    place: &Operand,
    offset: usize,
    count: usize,
) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
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

//! The executor: walks the steps of an entry point on a device.
//!
//! Steps are bound once, when the plan is loaded; running one allocates nothing.

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

    /// The same; where it fails the device comes back, for a plan that asks for less.
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

    /// Gives the device back, for another plan.
    pub fn into_device(self) -> D {
        self.device
    }

    /// For looking at places of the reservation that no value names, such as workspaces.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Runs one entry point for a micro-batch of the given extent.
    pub fn run(&mut self, entry: Entry, extent: &Extent) -> Result<(), DeviceError> {
        let planned = self.plan.extent_of(entry);
        if !planned.contains(extent) {
            return Err(DeviceError::Extent { actual: *extent, planned });
        }
        let found = self.entries.iter().find(|(own, _)| *own == entry);
        self.device.run_all(found.map(|(_, steps)| steps.as_slice()).unwrap_or_default(), extent)
    }

    /// Runs one step of an entry point, so that what it wrote can be looked at before the next overwrites it.
    pub fn run_step(&mut self, entry: Entry, index: usize, extent: &Extent) -> Result<(), DeviceError> {
        if !self.plan.extent.contains(extent) {
            return Err(DeviceError::Extent { actual: *extent, planned: self.plan.extent });
        }
        let steps = self.entries.iter().find(|(own, _)| *own == entry).map(|(_, steps)| steps);
        let step = steps.and_then(|steps| steps.get(index)).expect("the plan has this step");
        self.device.run(step, extent)
    }

    /// Writes the first bytes of a value; shorter than the value when a micro-batch is.
    pub fn write(&mut self, value: ValueId, from: &[u8]) {
        self.write_at(value, 0, from);
    }

    pub fn write_at(&mut self, value: ValueId, offset: usize, from: &[u8]) {
        let place = self.place(value, offset + from.len());
        for (inside, range) in pieces(&place, offset, from.len()) {
            self.device.write(place.address().behind(inside), &from[range]);
        }
    }

    pub fn read(&mut self, value: ValueId, into: &mut [u8]) -> Result<(), DeviceError> {
        self.read_at(value, 0, into)
    }

    pub fn read_at(&mut self, value: ValueId, offset: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        let place = self.place(value, offset + into.len());
        for (inside, range) in pieces(&place, offset, into.len()) {
            self.device.read(place.address().behind(inside), &mut into[range])?;
        }
        Ok(())
    }

    /// Begins to read the first bytes of a value without waiting; see [`Device::begin_read`].
    pub fn begin_read(&mut self, slot: usize, value: ValueId, bytes: usize) -> Result<(), DeviceError> {
        let place = self.place(value, bytes);
        self.device.begin_read(slot, place.offset, bytes)
    }

    pub fn finish_read(&mut self, slot: usize, value: ValueId, into: &mut [u8]) -> Result<(), DeviceError> {
        let place = self.place(value, into.len());
        self.device.finish_read(slot, place.offset, into)
    }

    /// Fills a whole value from a source that delivers it in pieces of any size.
    pub fn fill<E>(&mut self, value: ValueId, fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        self.device.fill(Destination::of(&Operand::of(&self.plan, value)), fill)
    }

    /// The same from a source that delivers it at once.
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

/// Has a device check, reserve and prepare what a plan asks for.
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

/// Where bytes `offset..offset + count` of a value's rows lie: places inside the operand, with their parts of the
/// whole. One piece where row follows row, else one for each row.
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

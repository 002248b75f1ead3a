//! Values in pinned memory of the host, and the two streams on which they come and go beside the steps.
//!
//! A transfer begins when everything launched before it is done and runs beside what is launched after it; a step that
//! awaits it makes the stream of steps wait, never the host. The GPU reaches pinned memory at its own address, so a
//! table of which few rows are needed is read where it lies. What lies on disk comes by way of a slot in pinned memory
//! (`disk.rs`).

use super::disk::Disk;
use super::driver::{self, Event, Gpu, Pinned, Stream};
use crate::device::{BoundStep, DeviceError, Operand, Transfer};
use smidgen_ir::{DType, Extent, Space};
use std::path::PathBuf;

#[derive(Debug)]
pub struct Transfers {
    memory: Option<Pinned>,
    disk: Option<Disk>,
    /// Of the file on disk.
    folder: Option<PathBuf>,
    inward: Stream,
    outward: Stream,
    /// What is launched before a transfer.
    before: Event,
    /// The ends of transfers, by the steps that began them.
    over: Vec<Option<Event>>,
}

impl Transfers {
    pub fn new() -> Result<Transfers, DeviceError> {
        let (inward, outward) = (Stream::new()?, Stream::new()?);
        let (memory, disk, folder) = (None, None, None);
        Ok(Transfers { memory, disk, folder, inward, outward, before: Event::new()?, over: Vec::new() })
    }

    pub fn set_folder(&mut self, folder: PathBuf) {
        self.folder = Some(folder);
    }

    /// Takes so many bytes of the host and of the disk, after what was held is given back.
    pub fn reserve(&mut self, bytes: usize, disk_bytes: usize) -> Result<(), DeviceError> {
        (self.memory, self.disk) = (None, None);
        if disk_bytes > 0 {
            let no_folder = DeviceError::Space { device: driver::NAME, space: Space::Disk };
            self.disk = Some(Disk::open(self.folder.as_ref().ok_or(no_folder)?, disk_bytes)?);
        }
        let pinned = (bytes > 0).then(|| Pinned::new(bytes)).transpose();
        self.memory = pinned.map_err(|error| match error {
            DeviceError::Call { device, what, .. } => DeviceError::Pinned { device, bytes, what },
            other => other,
        })?;
        Ok(())
    }

    /// Makes a mark for every transfer of some entry points.
    pub fn prepare<'a>(&mut self, steps: impl Iterator<Item = &'a BoundStep>) -> Result<(), DeviceError> {
        for step in steps.filter(|step| step.op.is_transfer()) {
            let more = (step.index + 1).saturating_sub(self.over.len());
            self.over.extend((0..more).map(|_| None));
            let mark = &mut self.over[step.index];
            *mark = Some(mark.take().map_or_else(Event::new, Ok)?);
        }
        Ok(())
    }

    /// What lies on disk.
    pub fn disk(&self) -> &Disk {
        self.disk.as_ref().expect("the plan has values on disk")
    }

    /// What went wrong beside the steps.
    pub fn failure(&self) -> Option<DeviceError> {
        self.disk.as_ref().and_then(Disk::failure)
    }

    pub fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, Pinned::bytes) + self.disk.as_ref().map_or(0, Disk::pinned_bytes)
    }

    /// Address of the pinned memory, for both sides.
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.pointer() as u64)
    }

    /// The memory; no transfer may be under way.
    pub fn slice_mut(&mut self, first: usize, bytes: usize) -> &mut [u8] {
        self.memory.as_mut().expect("the plan has values on the host").slice_mut(first, bytes)
    }

    /// Has the stream of steps wait for what a step awaits.
    pub fn wait_for(&self, gpu: &Gpu, awaits: &[usize]) -> Result<(), DeviceError> {
        awaits
            .iter()
            .filter_map(|transfer| self.over[*transfer].as_ref())
            .try_for_each(|over| over.hold(gpu.stream))
    }

    /// Begins the transfer of a step. `arena` is the address of the device's reservation.
    pub fn begin(&self, gpu: &Gpu, arena: u64, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        let Transfer { here, there, is_inward } = step.transfer().expect("only transfers come here");
        let stream = match (there.space, is_inward) {
            (Space::Disk, _) => self.disk().stream(),
            (_, true) => &self.inward,
            (_, false) => &self.outward,
        };
        assert!(here.space == Space::Device && there.is_dense());
        let over = self.over[step.index].as_ref().expect("every transfer has a mark");
        self.before.record(gpu)?;
        self.before.hold(stream.handle)?;
        let awaited = step.awaits.iter().filter_map(|transfer| self.over[*transfer].as_ref());
        awaited.into_iter().try_for_each(|other| other.hold(stream.handle))?;
        if there.space == Space::Disk {
            assert!(is_inward && here.is_dense(), "values only come from disk, row behind row");
            self.disk().bring(there.offset, arena + here.offset as u64, here.bytes_at(extent))?;
        } else {
            let sides = Sides::of(here, arena, there, self.address(), extent);
            // SAFETY: both ranges are reserved, and `verify` has shown that nobody touches them until somebody awaits
            // this.
            unsafe { driver::copy_rows(stream.handle, &sides.copy(is_inward))? };
        }
        over.record_in(stream.handle)
    }

    /// Has the stream of steps wait for all transfers of some steps.
    pub fn settle<'a>(
        &self,
        gpu: &Gpu,
        steps: impl Iterator<Item = &'a BoundStep>,
    ) -> Result<(), DeviceError> {
        steps.filter(|step| step.op.is_transfer()).try_for_each(|step| self.wait_for(gpu, &[step.index]))
    }
}

/// The two ends of a transfer, row by row.
struct Sides {
    here: (u64, usize),
    there: (u64, usize),
    row_bytes: usize,
    rows: usize,
}

impl Sides {
    fn of(here: &Operand, arena: u64, there: &Operand, host: u64, extent: &Extent) -> Sides {
        let (device, away) = (arena + here.offset as u64, host + there.offset as u64);
        let element = here.storage.plain().map_or(0, DType::bytes);
        match here.is_dense() {
            true => {
                let bytes = here.bytes_at(extent);
                Sides { here: (device, bytes), there: (away, bytes), row_bytes: bytes, rows: 1 }
            }
            false => {
                let row_bytes = here.columns * element;
                let (here_row, rows) = (here.stride * element, here.rows_at(extent));
                Sides { here: (device, here_row), there: (away, row_bytes), row_bytes, rows }
            }
        }
    }

    fn copy(&self, is_inward: bool) -> driver::RowCopy {
        let (from, to) = if is_inward { (self.there, self.here) } else { (self.here, self.there) };
        driver::RowCopy { from, to, row_bytes: self.row_bytes, rows: self.rows }
    }
}

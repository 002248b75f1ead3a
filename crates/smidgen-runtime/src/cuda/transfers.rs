//! Tensors offloaded to pinned host memory, and the two streams that copy them in parallel with compute.
//!
//! A transfer starts when everything launched before it is done, and overlaps what is launched after it. A step that
//! awaits it makes the compute stream wait, never the host. The GPU can read pinned memory directly, so a table of
//! which only a few rows are needed is read in place. Tensors on disk pass through a pinned buffer (`disk.rs`).

use super::disk::{DeviceRows, Disk};
use super::driver::{self, Event, Gpu, Stream};
use super::host_updates::HostUpdates;
use super::pinned::Pinned;
use crate::device::{BoundStep, DeviceError, Operand, Reservation, Transfer};
use crate::shared_host::SharedHost;
use smidgen_ir::{DType, Extent, Space};
use std::path::PathBuf;

#[derive(Debug)]
pub struct Transfers {
    // Dropped before the memory that the updates use.
    updates: Option<HostUpdates>,
    memory: Option<Pinned>,
    /// The shared memory for the first bytes of the next reservation, if ranks share them.
    shared: Option<SharedHost>,
    disk: Option<Disk>,
    /// The folder of the offload file.
    folder: Option<PathBuf>,
    to_device: Stream,
    to_host: Stream,
    /// Recorded on the compute stream before each transfer.
    launched: Event,
    /// The event at the end of each transfer, by the step that starts it.
    finished: Vec<Option<Event>>,
    /// Threads that update on the host.
    threads: usize,
}

impl Transfers {
    pub fn new() -> Result<Transfers, DeviceError> {
        Ok(Transfers {
            updates: None,
            memory: None,
            shared: None,
            disk: None,
            folder: None,
            to_device: Stream::new()?,
            to_host: Stream::new()?,
            launched: Event::new()?,
            finished: Vec::new(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        })
    }

    pub fn set_folder(&mut self, folder: PathBuf) {
        self.folder = Some(folder);
    }

    /// Uses memory that ranks share for the first bytes of the next reservation.
    pub fn share(&mut self, shared: SharedHost) {
        self.shared = Some(shared);
    }

    /// Whether this process fills an address in pinned memory, rather than another rank.
    pub fn fills(&self, offset: usize) -> bool {
        self.shared.as_ref().is_none_or(|shared| shared.is_filler() || offset >= shared.bytes())
    }

    /// Frees what an earlier plan reserved, and reserves pinned memory and disk space.
    pub fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError> {
        let Reservation { host: bytes, disk: disk_bytes, shared_host, .. } = *spaces;
        self.updates = None;
        (self.memory, self.disk) = (None, None);
        if disk_bytes > 0 {
            let no_folder = DeviceError::Space { device: driver::NAME, space: Space::Disk };
            self.disk = Some(Disk::open(self.folder.as_ref().ok_or(no_folder)?, disk_bytes)?);
        }
        // Without shared memory of this size, all of the pinned memory is private.
        self.shared = self.shared.take().filter(|shared| shared.bytes() == shared_host);
        let reserve =
            || self.shared.as_ref().map_or_else(|| Pinned::new(bytes), |shared| Pinned::over(shared, bytes));
        let pinned = (bytes > 0).then(reserve).transpose();
        self.memory = pinned.map_err(|error| match error {
            DeviceError::Call { device, what, .. } => DeviceError::Pinned { device, bytes, what },
            other => other,
        })?;
        Ok(())
    }

    /// Creates an event for every transfer of some entry points.
    pub fn prepare<'a>(
        &mut self,
        steps: impl Iterator<Item = &'a BoundStep> + Clone,
    ) -> Result<(), DeviceError> {
        self.updates = HostUpdates::prepare(steps.clone(), self.threads)?;
        for step in steps.filter(|step| step.op.is_transfer()) {
            let more = (step.index + 1).saturating_sub(self.finished.len());
            self.finished.extend((0..more).map(|_| None));
            let event = &mut self.finished[step.index];
            *event = Some(event.take().map_or_else(Event::new, Ok)?);
        }
        Ok(())
    }

    /// Whether the plan offloads anything.
    pub fn are_used(&self) -> bool {
        self.memory.is_some() || self.disk.is_some()
    }

    pub fn disk(&self) -> &Disk {
        self.disk.as_ref().expect("the plan offloads to disk")
    }

    /// A failure in a host callback that no call has returned yet.
    pub fn failure(&self) -> Option<DeviceError> {
        self.disk.as_ref().and_then(Disk::failure)
    }

    pub fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, Pinned::bytes) + self.disk.as_ref().map_or(0, Disk::pinned_bytes)
    }

    /// Bytes of pinned memory that the operating system counts as memory of this process.
    pub fn mapped_bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, Pinned::mapped_bytes)
    }

    /// Address of the pinned memory, on the host and on the GPU.
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.pointer() as u64)
    }

    /// The pinned memory; no transfer may be pending.
    pub fn slice_mut(&mut self, first: usize, bytes: usize) -> &mut [u8] {
        self.memory.as_mut().expect("the plan offloads to host memory").slice_mut(first, bytes)
    }

    /// Waits until no update runs on the host.
    pub fn wait_for_updates(&self) -> Result<(), DeviceError> {
        self.updates.as_ref().map_or(Ok(()), HostUpdates::wait)
    }

    /// Makes the compute stream wait for the transfers that a step awaits, and for host updates of the pinned memory
    /// that the step uses.
    pub fn hold_for(&self, gpu: &Gpu, step: &BoundStep) -> Result<(), DeviceError> {
        self.updates.as_ref().map_or(Ok(()), |updates| updates.hold(step, gpu.stream))?;
        self.events(&step.awaits).iter().try_for_each(|event| event.hold(gpu.stream))
    }

    /// The event at the end of a step's transfer.
    pub fn event(&self, step: usize) -> &Event {
        self.finished[step].as_ref().expect("`prepare` has seen every transfer")
    }

    /// The events at the end of the transfers that a step awaits.
    pub fn events(&self, awaits: &[usize]) -> Vec<&Event> {
        awaits.iter().filter_map(|transfer| self.finished[*transfer].as_ref()).collect()
    }

    /// Enqueues the transfer of a step, or its update on the host. `arena` is the address of the device's reservation.
    pub fn begin(&self, gpu: &Gpu, arena: u64, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        let awaited = self.events(&step.awaits);
        if step.op.runs_on_host() {
            let updates = self.updates.as_ref().expect("`prepare` has seen every update");
            return updates.begin(gpu, (&self.launched, &awaited), self.address(), step, extent);
        }
        let Transfer { on_device, offloaded, to_device } =
            step.transfer().expect("the caller passes transfers only");
        let stream = match (offloaded.space, to_device) {
            (Space::Disk, _) => self.disk().stream(),
            (_, true) => &self.to_device,
            (_, false) => &self.to_host,
        };
        assert!(on_device.space == Space::Device && offloaded.is_dense());
        let finished = self.event(step.index);
        self.launched.record(gpu)?;
        self.launched.hold(stream.handle)?;
        awaited.iter().try_for_each(|event| event.hold(stream.handle))?;
        self.updates.as_ref().map_or(Ok(()), |updates| updates.hold(step, stream.handle))?;
        // A rank may have no rows of a divided tensor.
        if on_device.bytes_at(extent) == 0 {
            return finished.record_in(stream.handle);
        }
        if offloaded.space == Space::Disk {
            self.disk().copy(offloaded.offset, &device_rows(on_device, arena, extent), to_device)?;
        } else {
            // The values that laps carry may be stored on the device.
            let base = if offloaded.space == Space::Device { arena } else { self.address() };
            let copy = row_copy(on_device, arena, offloaded, base, to_device, extent);
            // SAFETY: both ranges are reserved, and `verify` has shown that no step touches them before one that
            // awaits this transfer.
            unsafe { driver::copy_rows(stream.handle, &copy)? };
        }
        finished.record_in(stream.handle)
    }

    /// Makes the compute stream wait for all transfers of some steps, but not for updates on the host.
    pub fn settle<'a>(
        &self,
        gpu: &Gpu,
        steps: impl Iterator<Item = &'a BoundStep>,
    ) -> Result<(), DeviceError> {
        let mut transfers = steps.filter(|step| step.op.is_transfer() && !step.op.runs_on_host());
        transfers.try_for_each(|step| {
            self.finished[step.index].as_ref().map_or(Ok(()), |event| event.hold(gpu.stream))
        })
    }
}

/// A copy between a tensor on the device and its offloaded copy, whose rows have no gaps.
fn row_copy(
    on_device: &Operand,
    arena: u64,
    offloaded: &Operand,
    host: u64,
    to_device: bool,
    extent: &Extent,
) -> driver::RowCopy {
    let DeviceRows { address, row_bytes, stride_bytes, count } = device_rows(on_device, arena, extent);
    let host_side = (host + offloaded.offset as u64, row_bytes);
    let device_side = (address, stride_bytes);
    let (from, to) = if to_device { (host_side, device_side) } else { (device_side, host_side) };
    driver::RowCopy { from, to, row_bytes, rows: count }
}

/// The rows of a tensor on the device: a single row with all bytes if there are no gaps.
fn device_rows(on_device: &Operand, arena: u64, extent: &Extent) -> DeviceRows {
    let address = arena + on_device.offset as u64;
    let bytes = on_device.bytes_at(extent);
    if on_device.is_dense() {
        return DeviceRows { address, row_bytes: bytes, stride_bytes: bytes, count: 1 };
    }
    let element_bytes = on_device.storage.plain().map_or(0, DType::bytes);
    DeviceRows {
        address,
        row_bytes: on_device.columns * element_bytes,
        stride_bytes: on_device.stride * element_bytes,
        count: on_device.rows_at(extent),
    }
}

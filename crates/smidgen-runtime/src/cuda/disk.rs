//! Tensors offloaded to disk: they pass through a pinned buffer between the file and the GPU, on a stream of their own.
//!
//! The host enqueues steps far ahead of the GPU, so it must wait for neither the GPU nor the disk. For each piece of a
//! tensor it enqueues two things: a host callback that reads or writes the piece in the file, and the copy between the
//! buffer and the device. The stream order is the only synchronization: a piece enters the buffer when the previous one
//! has left it.
//!
//! A separate thread that makes the copies would deadlock: a launch into a full queue holds a lock of the driver that
//! the thread's calls need, while the queue waits for the thread. A host callback makes no driver call.

use super::driver::{self, RowCopy, Stream};
use super::pinned::Pinned;
use crate::cpu::spill::SpillFile;
use crate::device::DeviceError;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of the pinned buffer: large enough that the overhead of a callback is small against reading.
pub const SLOT_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub struct Disk {
    reader: Arc<Reader>,
    stream: Stream,
}

/// Rows on the device, which begin `stride_bytes` apart.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows {
    pub address: u64,
    pub row_bytes: usize,
    pub stride_bytes: usize,
    pub count: usize,
}

/// Shared by the host and the callbacks in the stream.
#[derive(Debug)]
struct Reader {
    file: SpillFile,
    slot: Pinned,
    /// The first failure.
    failed: Mutex<Option<DeviceError>>,
}

// SAFETY: only the callbacks and copies of one stream touch the slot, one after the other.
unsafe impl Sync for Reader {}

impl Reader {
    fn read(&self, offset: usize, bytes: usize) {
        // SAFETY: in bounds, and the stream runs nothing else during this callback.
        let slot = unsafe { std::slice::from_raw_parts_mut(self.slot.pointer().cast_mut(), bytes) };
        self.keep_error(self.file.read(offset, slot));
    }

    fn write(&self, offset: usize, bytes: usize) {
        // SAFETY: as above.
        let slot = unsafe { std::slice::from_raw_parts(self.slot.pointer(), bytes) };
        self.keep_error(self.file.write(offset, slot));
    }

    /// Keeps the first error.
    fn keep_error(&self, done: Result<(), DeviceError>) {
        if let Err(error) = done {
            let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
            failed.get_or_insert(error);
        }
    }
}

impl Disk {
    pub fn open(folder: &Path, bytes: usize) -> Result<Disk, DeviceError> {
        let (file, slot) = (SpillFile::open(folder, bytes)?, Pinned::new(SLOT_BYTES)?);
        let reader = Arc::new(Reader { file, slot, failed: Mutex::new(None) });
        Ok(Disk { reader, stream: Stream::new()? })
    }

    pub fn file(&self) -> &SpillFile {
        &self.reader.file
    }

    /// The stream of all copies from disk.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    pub fn pinned_bytes(&self) -> usize {
        self.reader.slot.bytes()
    }

    /// Enqueues the copy of rows between the file, where they have no gaps, and the device.
    pub fn copy(&self, offset: usize, rows: &DeviceRows, to_device: bool) -> Result<(), DeviceError> {
        let DeviceRows { address, row_bytes, stride_bytes, count } = *rows;
        let most = (SLOT_BYTES / row_bytes).max(1);
        for first in (0..count).step_by(most) {
            let here = most.min(count - first);
            // Only a tensor without gaps has a row larger than the buffer. It is copied in pieces.
            for within in (0..row_bytes).step_by(SLOT_BYTES) {
                let piece_bytes = SLOT_BYTES.min(row_bytes - within);
                let at = offset + first * row_bytes + within;
                let (reader, bytes) = (Arc::clone(&self.reader), here * piece_bytes);
                let device = (address + (first * stride_bytes + within) as u64, stride_bytes);
                let slot = (self.reader.slot.pointer() as u64, piece_bytes);
                let (from, to) = if to_device { (slot, device) } else { (device, slot) };
                let copy = RowCopy { from, to, row_bytes: piece_bytes, rows: here };
                if to_device {
                    driver::call_in_order(&self.stream, move || reader.read(at, bytes))?;
                    // SAFETY: only this stream uses the slot, and only this transfer the range on the device.
                    unsafe { driver::copy_rows(self.stream.handle, &copy)? };
                } else {
                    // SAFETY: as above.
                    unsafe { driver::copy_rows(self.stream.handle, &copy)? };
                    driver::call_in_order(&self.stream, move || reader.write(at, bytes))?;
                }
            }
        }
        Ok(())
    }

    /// Returns the first error, and forgets it.
    pub fn failure(&self) -> Option<DeviceError> {
        self.reader.failed.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The last owner of the slot frees it with a driver call, which a callback must not make.
        let _ = self.stream.wait();
    }
}

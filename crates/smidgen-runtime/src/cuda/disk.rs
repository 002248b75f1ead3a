//! Values on disk beside a GPU: read into a pinned slot and copied from there, on a stream of their own.
//!
//! The host lines up steps far ahead of the GPU, so it may wait for neither the GPU nor the disk. For each piece of a
//! value it lines up two things: a function of the host that reads the piece into the slot, and the copy to the device.
//! The stream's order is all the agreement there is: a piece is read when the copy of the one before it is over.
//!
//! A thread of our own that copied would deadlock: a launch into a full queue holds a lock that its calls need, while
//! the queue waits for it. Such a function makes no call of the driver. Values only come: what changes lies in pinned
//! memory.

use super::driver::{self, Pinned, RowCopy, Stream};
use crate::cpu::spill::SpillFile;
use crate::device::DeviceError;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of the slot: enough that asking costs little beside reading.
pub const SLOT_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub struct Disk {
    reader: Arc<Reader>,
    stream: Stream,
}

/// What the functions in the stream share with the host.
#[derive(Debug)]
struct Reader {
    file: SpillFile,
    slot: Pinned,
    /// The first thing that went wrong.
    failed: Mutex<Option<DeviceError>>,
}

// SAFETY: the slot is touched by what runs in one stream, one thing after the other.
unsafe impl Sync for Reader {}

impl Reader {
    fn read(&self, offset: usize, bytes: usize) {
        // SAFETY: in bounds, and the stream has nothing else under way.
        let slot = unsafe { std::slice::from_raw_parts_mut(self.slot.pointer().cast_mut(), bytes) };
        if let Err(error) = self.file.read(offset, slot) {
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

    /// The stream on which values come.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    pub fn pinned_bytes(&self) -> usize {
        self.reader.slot.bytes()
    }

    /// Lines up the copy of `bytes` of the file to an address of the device, behind what the stream waits for.
    pub fn bring(&self, offset: usize, to: u64, bytes: usize) -> Result<(), DeviceError> {
        for first in (0..bytes).step_by(SLOT_BYTES) {
            let (reader, piece_bytes) = (Arc::clone(&self.reader), SLOT_BYTES.min(bytes - first));
            driver::call_in_order(&self.stream, move || reader.read(offset + first, piece_bytes))?;
            let from = (self.reader.slot.pointer() as u64, piece_bytes);
            let copy =
                RowCopy { from, to: (to + first as u64, piece_bytes), row_bytes: piece_bytes, rows: 1 };
            // SAFETY: the slot is this stream's, and the place on the device is this transfer's.
            unsafe { driver::copy_rows(self.stream.handle, &copy)? };
        }
        Ok(())
    }

    /// What went wrong since it was asked last.
    pub fn failure(&self) -> Option<DeviceError> {
        self.reader.failed.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The last owner of the slot frees it by a call of the driver, which must not be a function in the stream.
        let _ = self.stream.wait();
    }
}

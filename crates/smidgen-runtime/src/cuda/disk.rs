//! Tensors offloaded to disk: read into a pinned buffer and copied to the GPU from there, on a stream of their own.
//!
//! The host enqueues steps far ahead of the GPU, so it must wait for neither the GPU nor the disk. For each piece of a
//! tensor it enqueues two things: a host callback that reads the piece into the buffer, and the copy to the device.
//! The order of the stream is the only synchronization: a piece is read when the copy of the previous one is done.
//!
//! A thread of our own that made the copies would deadlock: a launch into a full queue holds a lock of the driver that
//! the thread's calls need, while the queue waits for the thread. A host callback makes no driver call. Tensors on disk
//! are only read; everything that a run changes stays in memory.

use super::driver::{self, Pinned, RowCopy, Stream};
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

/// Shared by the host and the callbacks in the stream.
#[derive(Debug)]
struct Reader {
    file: SpillFile,
    slot: Pinned,
    /// The first failure.
    failed: Mutex<Option<DeviceError>>,
}

// SAFETY: only the work of one stream touches the slot, in order.
unsafe impl Sync for Reader {}

impl Reader {
    fn read(&self, offset: usize, bytes: usize) {
        // SAFETY: in bounds, and the stream runs nothing else meanwhile.
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

    /// The stream of all copies from disk.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    pub fn pinned_bytes(&self) -> usize {
        self.reader.slot.bytes()
    }

    /// Enqueues the copy of `bytes` bytes of the file to a device address.
    pub fn fetch(&self, offset: usize, to: u64, bytes: usize) -> Result<(), DeviceError> {
        for first in (0..bytes).step_by(SLOT_BYTES) {
            let (reader, piece_bytes) = (Arc::clone(&self.reader), SLOT_BYTES.min(bytes - first));
            driver::call_in_order(&self.stream, move || reader.read(offset + first, piece_bytes))?;
            let from = (self.reader.slot.pointer() as u64, piece_bytes);
            let copy =
                RowCopy { from, to: (to + first as u64, piece_bytes), row_bytes: piece_bytes, rows: 1 };
            // SAFETY: only this stream uses the slot, and only this transfer the range on the device.
            unsafe { driver::copy_rows(self.stream.handle, &copy)? };
        }
        Ok(())
    }

    /// Takes the failure, if there is one.
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

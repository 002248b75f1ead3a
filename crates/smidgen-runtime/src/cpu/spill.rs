//! The offload file: tensors that the plan keeps on disk, read and written by a separate thread.
//!
//! Transfers run in the order in which they began, so counting the finished ones is enough. The file is unlinked as soon
//! as it is open, so nothing is left behind when the process dies. Bytes that were read or written are dropped from the
//! page cache, which would otherwise keep the offloaded tensors in memory.

use crate::device::{DeviceError, Fill, FillError};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// Bytes of the host buffer through which a value on disk is filled.
pub const PIECE_BYTES: usize = 128 << 10;

/// The file without its thread.
#[derive(Debug)]
pub struct SpillFile {
    file: File,
    path: PathBuf,
}

impl SpillFile {
    /// Creates a file of `bytes` bytes in a folder, which is created if it does not exist.
    pub fn open(folder: &Path, bytes: usize) -> Result<SpillFile, DeviceError> {
        let path = folder.join(format!(".smidgen-{}.spill", std::process::id()));
        let failed = |what| {
            let path = path.clone();
            move |error| DeviceError::File { what, path, error }
        };
        std::fs::create_dir_all(folder).map_err(failed("cannot create the folder of"))?;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path);
        let file = file.map_err(failed("cannot create"))?;
        std::fs::remove_file(&path).map_err(failed("cannot unlink"))?;
        allocate(&file, bytes).map_err(failed("not enough disk space for"))?;
        Ok(SpillFile { file, path })
    }

    /// Reads on the calling thread; no transfer of these bytes may be pending.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        let read = self.file.read_exact_at(into, offset as u64);
        drop_from_cache(&self.file, offset as u64, into.len(), Direction::In);
        read.map_err(|error| self.failure("cannot read", error))
    }

    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), DeviceError> {
        self.file.write_all_at(from, offset as u64).map_err(|error| self.failure("cannot write", error))?;
        drop_from_cache(&self.file, offset as u64, from.len(), Direction::Out);
        Ok(())
    }

    /// Fills `bytes` bytes from a source, in pieces of at most `max_bytes`.
    pub fn fill<E>(
        &self,
        offset: usize,
        bytes: usize,
        max_bytes: usize,
        fill: Fill<'_, E>,
    ) -> Result<(), FillError<E>> {
        let piece_bytes = bytes.min(max_bytes).max(1);
        let mut piece = vec![0u8; piece_bytes];
        for first in (0..bytes).step_by(piece_bytes) {
            let piece = &mut piece[..piece_bytes.min(bytes - first)];
            fill(first, piece).map_err(FillError::Source)?;
            self.write(offset + first, piece).map_err(FillError::Device)?;
        }
        Ok(())
    }

    fn failure(&self, what: &'static str, error: io::Error) -> DeviceError {
        DeviceError::File { what, path: self.path.clone(), error }
    }
}

#[derive(Debug)]
pub struct Spill {
    file: Arc<SpillFile>,
    jobs: Option<Sender<Job>>,
    state: Arc<(Mutex<State>, Condvar)>,
    begun: u64,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct State {
    done: u64,
    failed: Option<(&'static str, io::Error)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file to memory.
    In,
    Out,
}

struct Job {
    direction: Direction,
    offset: u64,
    memory: Memory,
}

/// A range of the arena that belongs to one transfer until a step has awaited it.
struct Memory {
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: the range belongs to the transfer while it is pending, and the arena outlives it.
unsafe impl Send for Memory {}

impl Spill {
    pub fn open(folder: &Path, bytes: usize) -> Result<Spill, DeviceError> {
        let file = Arc::new(SpillFile::open(folder, bytes)?);
        let (jobs, inbox) = channel();
        let state = Arc::new((Mutex::new(State::default()), Condvar::new()));
        let (own_file, own_state) = (Arc::clone(&file), Arc::clone(&state));
        let worker = move || transfer_all(&own_file.file, &own_state, &inbox);
        let thread = std::thread::Builder::new().name("smidgen-disk".into()).spawn(worker);
        let thread = Some(thread.map_err(|error| file.failure("cannot start a thread for", error))?);
        Ok(Spill { file, jobs: Some(jobs), state, begun: 0, thread })
    }

    pub fn file(&self) -> &SpillFile {
        &self.file
    }

    /// Begins a transfer and returns its number.
    ///
    /// # Safety
    /// Until the caller has waited for the transfer, the memory stays allocated, and nothing else writes it; if the
    /// transfer is a read from the file, nothing else reads it either.
    pub unsafe fn begin(
        &mut self,
        direction: Direction,
        offset: usize,
        pointer: *mut u8,
        bytes: usize,
    ) -> u64 {
        let job = Job { direction, offset: offset as u64, memory: Memory { pointer, bytes } };
        let jobs = self.jobs.as_ref().expect("only `drop` takes the sender");
        jobs.send(job).expect("the thread runs until the sender is dropped");
        self.begun += 1;
        self.begun
    }

    /// Waits until transfer `number` and every earlier one are done.
    pub fn wait(&self, number: u64) -> Result<(), DeviceError> {
        let mut state = lock(&self.state.0);
        while state.done < number && state.failed.is_none() {
            state = self.state.1.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        match &state.failed {
            None => Ok(()),
            Some((what, error)) => {
                Err(self.file.failure(what, io::Error::new(error.kind(), error.to_string())))
            }
        }
    }

    pub fn wait_for_all(&self) -> Result<(), DeviceError> {
        self.wait(self.begun)
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        // Without a sender the thread ends once its last transfer is done.
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn transfer_all(file: &File, state: &(Mutex<State>, Condvar), inbox: &Receiver<Job>) {
    for Job { direction, offset, memory } in inbox {
        // SAFETY: the caller of `begin` promised not to touch the memory until the transfer is done.
        let memory = unsafe { std::slice::from_raw_parts_mut(memory.pointer, memory.bytes) };
        let result = match direction {
            Direction::In => file.read_exact_at(memory, offset).map_err(|error| ("cannot read", error)),
            Direction::Out => file.write_all_at(memory, offset).map_err(|error| ("cannot write", error)),
        };
        drop_from_cache(file, offset, memory.len(), direction);
        let mut now = lock(&state.0);
        now.done += 1;
        now.failed = now.failed.take().or(result.err());
        state.1.notify_all();
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Reserves the bytes on disk now, so that a full disk is found before the run.
fn allocate(file: &File, bytes: usize) -> io::Result<()> {
    file.set_len(bytes as u64)?;
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        // SAFETY: the descriptor is open.
        let code = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) };
        // Some file systems cannot reserve space; there a full disk is found at the first write.
        if code != 0 && code != libc::EOPNOTSUPP && code != libc::EINVAL {
            return Err(io::Error::from_raw_os_error(code));
        }
    }
    Ok(())
}

/// Hints that the page cache may drop these bytes. Starts the writeback of written bytes, which can be dropped after it.
fn drop_from_cache(file: &File, offset: u64, bytes: usize, direction: Direction) {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        let (descriptor, offset, bytes) = (file.as_raw_fd(), offset as libc::off64_t, bytes as libc::off64_t);
        // SAFETY: the descriptor is open, and the calls are only hints.
        unsafe {
            if direction == Direction::Out {
                libc::sync_file_range(descriptor, offset, bytes, libc::SYNC_FILE_RANGE_WRITE);
            }
            libc::posix_fadvise(descriptor, offset, bytes, libc::POSIX_FADV_DONTNEED);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, bytes, direction);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_out_and_come_back_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let mut spill = Spill::open(folder.path(), 1 << 20).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file has no name");
        let mut first: Vec<u8> = (0..100_000).map(|byte| byte as u8).collect();
        let (mut second, mut back) = (vec![7u8; 5000], vec![0u8; 100_000]);
        // SAFETY: the vectors are not touched until all transfers are waited for.
        unsafe {
            spill.begin(Direction::Out, 300, first.as_mut_ptr(), first.len());
            let number = spill.begin(Direction::Out, 1000, second.as_mut_ptr(), second.len());
            spill.begin(Direction::In, 300, back.as_mut_ptr(), back.len());
            spill.wait(number).unwrap();
            spill.wait_for_all().unwrap();
        }
        first[700..5700].fill(7);
        assert!(back == first);
        let mut some = [0u8; 10];
        spill.file().write(310, &[9; 5]).unwrap();
        spill.file().read(305, &mut some).unwrap();
        assert_eq!(some, [5, 6, 7, 8, 9, 9, 9, 9, 9, 9]);
    }

    #[test]
    fn waiting_for_a_transfer_past_the_end_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut spill = Spill::open(folder.path(), 100).unwrap();
        let mut bytes = vec![0u8; 50];
        // SAFETY: as above.
        let number = unsafe { spill.begin(Direction::In, 80, bytes.as_mut_ptr(), bytes.len()) };
        let error = spill.wait(number).unwrap_err().to_string();
        assert!(error.starts_with("cannot read the offload file"), "{error}");
    }

    #[test]
    fn the_error_names_a_folder_that_cannot_be_created() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let folder = file.path().join("below a file");
        let error = Spill::open(&folder, 100).unwrap_err().to_string();
        assert!(error.contains("below a file"), "{error}");
    }
}

//! Values on disk beside a GPU: a thread brings them through pinned memory while the GPU works.
//!
//! The host lines up steps far ahead of the GPU, so it may wait for neither the GPU nor the disk. The stream of steps
//! tells by a number in pinned memory that the place of a value is free; the thread then reads the value from its file
//! piece by piece through two slots and copies it there on a stream of its own, which tells by another number that it
//! has come. Values only come: what changes lies in pinned memory.
//!
//! While a stream waits for the thread, nothing may wait for the whole GPU, or both wait for ever: allocations and the
//! first use of a kernel do. So all memory is taken before the thread starts, and it starts after every step has run
//! once, in `Device::prepare`; until then nothing comes.

use super::driver::{self, Context, Event, Flags, Gpu, Pinned, RowCopy, Stream};
use crate::cpu::spill::SpillFile;
use crate::device::DeviceError;
use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes of a slot: enough that the disk and the bus are both busy most of the time.
const SLOT_BYTES: usize = 16 << 20;
/// How often the thread looks whether a place is free.
const LOOK_EVERY: Duration = Duration::from_micros(20);

#[derive(Debug)]
pub struct Disk {
    file: Arc<SpillFile>,
    reader: Option<Reader>,
}

impl Disk {
    pub fn open(folder: &Path, bytes: usize) -> Result<Disk, DeviceError> {
        Ok(Disk { file: Arc::new(SpillFile::open(folder, bytes)?), reader: None })
    }

    pub fn file(&self) -> &SpillFile {
        &self.file
    }

    /// Starts the thread for transfers of steps below `steps`; every step has run once.
    pub fn start(&mut self, gpu: &Gpu, steps: usize) -> Result<(), DeviceError> {
        self.reader = None;
        self.reader = Some(Reader::start(gpu.context(), Arc::clone(&self.file), steps)?);
        Ok(())
    }

    pub fn pinned_bytes(&self) -> usize {
        self.reader.as_ref().map_or(0, |_| 2 * SLOT_BYTES)
    }

    /// Begins to bring `bytes` from the file to an address of the device that is free once everything launched so far
    /// is done.
    pub fn begin(
        &self,
        gpu: &Gpu,
        step: usize,
        offset: usize,
        to: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.reader.as_ref().map_or(Ok(()), |reader| reader.begin(gpu, step, offset, to, bytes))
    }

    /// Has the stream of steps wait for the transfer that a step began last.
    pub fn hold(&self, gpu: &Gpu, step: usize) -> Result<(), DeviceError> {
        let Some(reader) = &self.reader else { return Ok(()) };
        match reader.last.get(step).map_or(0, Cell::get) {
            0 => Ok(()),
            number => reader.flags.hold(gpu.stream, come(step), number),
        }
    }

    /// What the thread failed at, once.
    pub fn failure(&self) -> Option<DeviceError> {
        self.reader.as_ref().and_then(|reader| lock(&reader.failed).take())
    }
}

/// The number that the stream of steps writes for a step, and the one that the thread's stream does.
fn free(step: usize) -> usize {
    2 * step
}

fn come(step: usize) -> usize {
    2 * step + 1
}

#[derive(Debug)]
struct Reader {
    flags: Arc<Flags>,
    /// By step: the number of its last transfer, and how many there were at all.
    last: Vec<Cell<u32>>,
    count: Cell<u32>,
    jobs: Option<Sender<Job>>,
    failed: Arc<Mutex<Option<DeviceError>>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Job {
    step: usize,
    number: u32,
    offset: usize,
    to: u64,
    bytes: usize,
}

impl Reader {
    fn start(context: Context, file: Arc<SpillFile>, steps: usize) -> Result<Reader, DeviceError> {
        let flags = Arc::new(Flags::new(2 * steps)?);
        let (jobs, inbox) = channel();
        let (failed, is_over) = (Arc::new(Mutex::new(None)), Arc::new(AtomicBool::new(false)));
        let (own_flags, own_failed, own_over) =
            (Arc::clone(&flags), Arc::clone(&failed), Arc::clone(&is_over));
        let lane = Lane::new()?;
        let worker = move || {
            let mut worker = Worker { file: &file, flags: &own_flags, is_over: &own_over, lane };
            let result = context.enter().and_then(|()| worker.work(&inbox));
            if let Err(error) = result {
                lock(&own_failed).get_or_insert(error);
                // Whoever waits goes on, and is told when something is asked of the device.
                (0..steps).for_each(|step| own_flags.number(come(step)).store(u32::MAX, Ordering::Release));
            }
        };
        let thread = std::thread::Builder::new().name("smidgen-disk".into()).spawn(worker);
        let thread = thread.map_err(|error| DeviceError::Call {
            device: driver::NAME,
            call: "a thread that reads the disk",
            what: error.to_string(),
        })?;
        let last = (0..steps).map(|_| Cell::new(0)).collect();
        let (jobs, thread) = (Some(jobs), Some(thread));
        Ok(Reader { flags, last, count: Cell::new(0), jobs, failed, is_over, thread })
    }

    fn begin(&self, gpu: &Gpu, step: usize, offset: usize, to: u64, bytes: usize) -> Result<(), DeviceError> {
        let number = self.count.get() + 1;
        self.count.set(number);
        self.last[step].set(number);
        self.flags.tell(gpu.stream, free(step), number)?;
        let jobs = self.jobs.as_ref().expect("it is there until the end");
        // A thread that has ended left its failure behind.
        let _ = jobs.send(Job { step, number, offset, to, bytes });
        Ok(())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The way from the file to the device.
struct Lane {
    stream: Stream,
    /// Each with a mark behind the last copy from it.
    slots: [(Pinned, Event); 2],
    next: usize,
}

impl Lane {
    fn new() -> Result<Lane, DeviceError> {
        let slot = || Ok((Pinned::new(SLOT_BYTES)?, Event::new()?));
        Ok(Lane { stream: Stream::new()?, slots: [slot()?, slot()?], next: 0 })
    }
}

/// What the thread works with.
struct Worker<'a> {
    file: &'a SpillFile,
    flags: &'a Flags,
    is_over: &'a AtomicBool,
    lane: Lane,
}

impl Worker<'_> {
    fn work(&mut self, inbox: &Receiver<Job>) -> Result<(), DeviceError> {
        for job in inbox {
            while self.flags.number(free(job.step)).load(Ordering::Acquire) < job.number {
                if self.is_over.load(Ordering::Acquire) {
                    return Ok(());
                }
                std::thread::sleep(LOOK_EVERY);
            }
            for first in (0..job.bytes).step_by(SLOT_BYTES) {
                let bytes = SLOT_BYTES.min(job.bytes - first);
                self.bring(job.offset + first, job.to + first as u64, bytes)?;
            }
            self.flags.tell(self.lane.stream.handle, come(job.step), job.number)?;
        }
        self.lane.slots.iter().try_for_each(|(_, copied)| copied.wait())
    }

    fn bring(&mut self, offset: usize, to: u64, bytes: usize) -> Result<(), DeviceError> {
        let Lane { stream, slots, next } = &mut self.lane;
        let (slot, copied) = &mut slots[*next];
        *next = 1 - *next;
        copied.wait()?;
        self.file.read(offset, slot.slice_mut(0, bytes))?;
        let copy =
            RowCopy { from: (slot.pointer() as u64, bytes), to: (to, bytes), row_bytes: bytes, rows: 1 };
        // SAFETY: the slot is not touched before its mark has passed, and the place on the device is this transfer's.
        unsafe { driver::copy_rows(stream.handle, &copy)? };
        copied.record_in(stream.handle)
    }
}

//! Collectives by MPI, over host memory.
//!
//! MPI only moves bytes; this file adds the numbers, in the order of the ranks. The standard only advises that
//! `MPI_Allreduce` is reproducible, and implementations choose the order of additions by message size, placement on
//! nodes and arrival. Adding here gives the same bytes with every MPI, for the same number of ranks. It costs no more
//! traffic: each rank receives the others' copies of its part and adds them, and the parts are gathered.
//! Calls come from one thread at a time, not always the same one. Errors are returned with MPI's text.
//! Left out: non-blocking calls, sub-communicators, device memory.

use super::mpi_abi::{self as abi, Abi, Aint, Count};
use super::{Comm, CommError, Number, Span, expect_numbers, expect_parts, mpi_places};
use std::ffi::c_int;
use std::ops::{AddAssign, Range};
use std::sync::atomic::{AtomicBool, Ordering};

/// Host memory of every rank for the numbers that it receives and adds.
pub const SCRATCH_BYTES: usize = 4 << 20;

/// Spans that together have at most this size are gathered whole and added by every rank: one call instead of two.
const SMALL_BYTES: usize = 16 << 10;

/// Bytes that are added at a time, so that the block of the sum stays in the cache.
const BLOCK_BYTES: usize = 16 << 10;

static STARTED: AtomicBool = AtomicBool::new(false);
static ABANDONED: AtomicBool = AtomicBool::new(false);

/// All ranks that one launcher started.
#[derive(Debug)]
pub struct Mpi {
    /// Never closed: MPI cannot be started again, and its threads may outlive this value.
    abi: &'static Abi,
    name: String,
    rank: usize,
    size: usize,
    scratch: Box<[u64]>,
    /// Whether a call failed. Other ranks may then wait for this one, or may be lost.
    pub(super) failed: bool,
}

/// Skips `MPI_Finalize`, which waits for all ranks, at the end of this process. For a process that ends early or has lost
/// a rank; may be called from any thread.
pub fn abandon() {
    ABANDONED.store(true, Ordering::SeqCst);
}

impl Mpi {
    /// Opens the library without starting MPI, and returns its version and path.
    pub fn describe_library() -> Result<String, CommError> {
        let abi = mpi_places::open_library()?;
        Ok(format!("MPI ({}), `{}`", abi.version(), abi.path.display()))
    }

    /// Starts MPI, once per process, and compares its ranks with the launcher's environment variables.
    pub fn start(rank: usize, size: usize) -> Result<Mpi, CommError> {
        let world = Mpi::start_alone()?;
        if (world.rank, world.size) != (rank, size) {
            abandon();
            return Err(CommError::World {
                name: world.name(),
                rank: world.rank,
                size: world.size,
                of_launcher: format!("rank {rank} of {size}"),
            });
        }
        Ok(world)
    }

    /// Starts MPI with any number of ranks.
    pub fn start_alone() -> Result<Mpi, CommError> {
        let abi = mpi_places::open_library()?;
        let name = abi.version();
        if STARTED.swap(true, Ordering::SeqCst) {
            return Err(CommError::Again);
        }
        let abi: &'static Abi = Box::leak(Box::new(abi));
        let check = |code, call| checked(abi, code, call);
        let mut provided = 0;
        // SAFETY: MPI is started once, without program arguments.
        let code = unsafe {
            (abi.init_thread)(
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                abi::THREAD_SERIALIZED,
                &mut provided,
            )
        };
        check(code, "MPI_Init_thread")?;
        if provided < abi::THREAD_SERIALIZED {
            return Err(CommError::Threads { name });
        }
        // Errors that belong to no communicator are reported on `COMM_SELF`.
        for comm in [abi::COMM_WORLD, abi::COMM_SELF] {
            // SAFETY: MPI is started, and the handles are predefined.
            let code = unsafe { (abi.comm_set_errhandler)(comm, abi::ERRORS_RETURN) };
            check(code, "MPI_Comm_set_errhandler")?;
        }
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is started, and `rank` is writable.
        check(unsafe { (abi.comm_rank)(abi::COMM_WORLD, &mut rank) }, "MPI_Comm_rank")?;
        // SAFETY: MPI is started, and `size` is writable.
        check(unsafe { (abi.comm_size)(abi::COMM_WORLD, &mut size) }, "MPI_Comm_size")?;
        let scratch = vec![0; SCRATCH_BYTES / 8].into_boxed_slice();
        Ok(Mpi { abi, name, rank: rank as usize, size: size as usize, scratch, failed: false })
    }

    /// Every rank gets the bytes of `root`; the bytes that other ranks pass are dropped.
    pub fn broadcast_bytes(&mut self, mut bytes: Vec<u8>, root: usize) -> Result<Vec<u8>, CommError> {
        let mut length = (bytes.len() as u64).to_ne_bytes();
        // SAFETY: memory of this function.
        unsafe { self.broadcast(span_of(&mut length), root)? };
        bytes.resize(u64::from_ne_bytes(length) as usize, 0);
        // SAFETY: memory of this function, as long on every rank.
        unsafe { self.broadcast(span_of(&mut bytes), root)? };
        Ok(bytes)
    }

    fn check(&mut self, code: c_int, call: &'static str) -> Result<(), CommError> {
        let checked = checked(self.abi, code, call);
        self.failed |= checked.is_err();
        checked
    }

    /// The scratch memory has one slot for each rank.
    fn slot_bytes(&self) -> usize {
        SCRATCH_BYTES / self.size / 64 * 64
    }

    /// Sums small spans: gathers all of them, and adds them on every rank.
    ///
    /// # Safety
    /// As for `all_reduce`. The padded bytes of all spans together fit into a slot.
    unsafe fn reduce_small(&mut self, spans: &[(Span, Number)]) -> Result<(), CommError> {
        let bytes: usize = spans.iter().map(|(span, _)| padded_bytes(*span)).sum();
        let scratch: *mut u8 = self.scratch.as_mut_ptr().cast();
        let mut at = self.rank * bytes;
        for (span, _) in spans {
            // SAFETY: the caller's memory, and this rank's slot.
            unsafe { scratch.add(at).copy_from_nonoverlapping(span.pointer, span.bytes) };
            at += padded_bytes(*span);
        }
        // SAFETY: the scratch memory has a slot for each rank, and this rank's slot is filled.
        let code = unsafe {
            (self.abi.allgather)(
                abi::IN_PLACE,
                0,
                abi::BYTE,
                scratch.cast(),
                bytes as Count,
                abi::BYTE,
                abi::COMM_WORLD,
            )
        };
        self.check(code, "MPI_Allgather_c")?;
        let mut at = 0;
        for &(span, number) in spans {
            // SAFETY: the same offset in every slot holds the numbers of this span.
            unsafe {
                add_slots(scratch.add(at), bytes, self.size, span.bytes, number);
                span.pointer.copy_from_nonoverlapping(scratch.add(at), span.bytes);
            }
            at += padded_bytes(span);
        }
        Ok(())
    }

    /// Every rank receives the others' copies of its part, in rounds of one slot, and adds them.
    ///
    /// # Safety
    /// As for `reduce_scatter`, with `number` instead of f32.
    unsafe fn reduce_parts(
        &mut self,
        span: Span,
        parts: &[Range<usize>],
        number: Number,
    ) -> Result<(), CommError> {
        let (slot, rank, size) = (self.slot_bytes(), self.rank, self.size);
        let scratch: *mut u8 = self.scratch.as_mut_ptr().cast();
        let rounds = parts.iter().map(|part| part.len().div_ceil(slot)).max().unwrap_or(0);
        let mut send = Lists::new(size);
        let mut receive = Lists::new(size);
        for round in 0..rounds {
            let piece = |part: &Range<usize>| {
                let start = part.end.min(part.start + round * slot);
                start..part.end.min(start + slot)
            };
            let own = piece(&parts[rank]);
            for other in (0..size).filter(|other| *other != rank) {
                let theirs = piece(&parts[other]);
                send.set(other, theirs.start, theirs.len());
                receive.set(other, other * slot, own.len());
            }
            // SAFETY: pieces are inside the span, slots are inside the scratch memory, and the two do not overlap.
            let code = unsafe {
                (self.abi.alltoallv)(
                    span.pointer.cast(),
                    send.counts.as_ptr(),
                    send.offsets.as_ptr(),
                    abi::BYTE,
                    scratch.cast(),
                    receive.counts.as_ptr(),
                    receive.offsets.as_ptr(),
                    abi::BYTE,
                    abi::COMM_WORLD,
                )
            };
            self.check(code, "MPI_Alltoallv_c")?;
            // SAFETY: this rank's piece, its slot, and as many numbers in every other slot.
            unsafe {
                let here = span.pointer.add(own.start);
                scratch.add(rank * slot).copy_from_nonoverlapping(here, own.len());
                add_slots(scratch, slot, size, own.len(), number);
                here.copy_from_nonoverlapping(scratch, own.len());
            }
        }
        Ok(())
    }
}

impl Comm for Mpi {
    fn name(&self) -> String {
        format!("MPI ({})", self.name)
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    unsafe fn all_reduce(&mut self, spans: &[(Span, Number)]) -> Result<(), CommError> {
        for &(span, number) in spans {
            expect_numbers(span, number);
        }
        if self.size == 1 {
            return Ok(());
        }
        let small_bytes = SMALL_BYTES.min(self.slot_bytes());
        let mut rest = spans;
        while let Some(&(first, number)) = rest.first() {
            // As many of the next spans as fit into `small_bytes` together.
            let mut bytes = 0;
            let fits = rest.iter().take_while(|(span, _)| {
                bytes += padded_bytes(*span);
                bytes <= small_bytes
            });
            let count = fits.count();
            if count > 0 {
                // SAFETY: the caller's promise; they fit into a slot.
                unsafe { self.reduce_small(&rest[..count])? };
                rest = &rest[count..];
            } else {
                let parts = even_parts(first.bytes, number.bytes(), self.size);
                // SAFETY: the caller's promise; the parts hold whole numbers.
                unsafe {
                    self.reduce_parts(first, &parts, number)?;
                    self.all_gather(first, &parts)?;
                }
                rest = &rest[1..];
            }
        }
        Ok(())
    }

    unsafe fn reduce_scatter(&mut self, span: Span, parts: &[Range<usize>]) -> Result<(), CommError> {
        expect_numbers(span, Number::F32);
        expect_parts(span, parts, self.size);
        assert!(parts.iter().all(|part| part.start.is_multiple_of(4)), "the parts {parts:?} cut a number");
        if self.size == 1 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.reduce_parts(span, parts, Number::F32) }
    }

    unsafe fn all_gather(&mut self, span: Span, parts: &[Range<usize>]) -> Result<(), CommError> {
        expect_parts(span, parts, self.size);
        if self.size == 1 {
            return Ok(());
        }
        let mut lists = Lists::new(self.size);
        for (rank, part) in parts.iter().enumerate() {
            lists.set(rank, part.start, part.len());
        }
        // SAFETY: the parts are inside the span, and this rank's part is in place.
        let code = unsafe {
            (self.abi.allgatherv)(
                abi::IN_PLACE,
                0,
                abi::BYTE,
                span.pointer.cast(),
                lists.counts.as_ptr(),
                lists.offsets.as_ptr(),
                abi::BYTE,
                abi::COMM_WORLD,
            )
        };
        self.check(code, "MPI_Allgatherv_c")
    }

    unsafe fn broadcast(&mut self, span: Span, root: usize) -> Result<(), CommError> {
        // SAFETY: the caller's memory.
        let code = unsafe {
            (self.abi.bcast)(
                span.pointer.cast(),
                span.bytes as Count,
                abi::BYTE,
                root as c_int,
                abi::COMM_WORLD,
            )
        };
        self.check(code, "MPI_Bcast_c")
    }

    fn barrier(&mut self) -> Result<(), CommError> {
        // SAFETY: MPI is started.
        let code = unsafe { (self.abi.barrier)(abi::COMM_WORLD) };
        self.check(code, "MPI_Barrier")
    }
}

impl Drop for Mpi {
    /// Finalizes MPI, which waits for all ranks. Skipped after a failure, because a lost rank never arrives.
    fn drop(&mut self) {
        if self.failed || ABANDONED.load(Ordering::SeqCst) || std::thread::panicking() {
            return;
        }
        // SAFETY: MPI is started, and nothing else uses it. Its result is ignored: there is nothing left to do.
        unsafe { (self.abi.finalize)() };
    }
}

/// Byte counts and byte offsets per rank, for calls such as `MPI_Allgatherv`.
struct Lists {
    counts: Vec<Count>,
    offsets: Vec<Aint>,
}

impl Lists {
    fn new(size: usize) -> Lists {
        Lists { counts: vec![0; size], offsets: vec![0; size] }
    }

    fn set(&mut self, rank: usize, offset: usize, count: usize) {
        self.counts[rank] = count as Count;
        self.offsets[rank] = offset as Aint;
    }
}

fn checked(abi: &Abi, code: c_int, call: &'static str) -> Result<(), CommError> {
    match code {
        abi::SUCCESS => Ok(()),
        code => Err(CommError::Call { engine: "MPI", call, what: abi.describe(code) }),
    }
}

fn span_of(bytes: &mut [u8]) -> Span {
    Span { pointer: bytes.as_mut_ptr(), bytes: bytes.len() }
}

/// The bytes of a span in a slot, where every span starts at a multiple of 8.
fn padded_bytes(span: Span) -> usize {
    span.bytes.next_multiple_of(8)
}

/// Splits `bytes` into one range per rank. Each range holds whole numbers; their counts differ by at most one.
fn even_parts(bytes: usize, number_bytes: usize, size: usize) -> Vec<Range<usize>> {
    let numbers = bytes / number_bytes;
    let start = |rank: usize| (numbers / size * rank + rank.min(numbers % size)) * number_bytes;
    (0..size).map(|rank| start(rank)..start(rank + 1)).collect()
}

/// Adds the numbers of all slots to those of the first, in the order of the slots.
///
/// # Safety
/// `first` holds `bytes` of aligned numbers, and so does every later slot, each `stride` bytes behind the one before.
unsafe fn add_slots(first: *mut u8, stride: usize, slots: usize, bytes: usize, number: Number) {
    match number {
        // SAFETY: the caller's promise.
        Number::F32 => unsafe { add_slots_of::<f32>(first, stride, slots, bytes) },
        // SAFETY: the caller's promise.
        Number::F64 => unsafe { add_slots_of::<f64>(first, stride, slots, bytes) },
    }
}

/// # Safety
/// As for `add_slots`.
unsafe fn add_slots_of<T: Copy + AddAssign>(first: *mut u8, stride: usize, slots: usize, bytes: usize) {
    for block in (0..bytes).step_by(BLOCK_BYTES) {
        let count = (bytes - block).min(BLOCK_BYTES) / size_of::<T>();
        for slot in 1..slots {
            // SAFETY: inside the first slot and a later one, which do not overlap.
            let (sums, addends) = unsafe {
                (
                    std::slice::from_raw_parts_mut(first.add(block).cast::<T>(), count),
                    std::slice::from_raw_parts(first.add(slot * stride + block).cast::<T>(), count),
                )
            };
            for (sum, addend) in sums.iter_mut().zip(addends) {
                *sum += *addend;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_parts_hold_whole_numbers() {
        assert_eq!(even_parts(28, 4, 3), [0..12, 12..20, 20..28]);
        assert_eq!(even_parts(8, 8, 3), [0..8, 8..8, 8..8]);
        assert_eq!(even_parts(0, 4, 2), [0..0, 0..0]);
    }

    #[test]
    fn slots_are_added_in_order() {
        // The order shows in the rounding: 1 + 1e8 - 1e8 is 0 in f32, and 1e8 - 1e8 + 1 is 1.
        for (values, sum) in [([1.0f32, 1e8, -1e8], 0.0), ([1e8, -1e8, 1.0], 1.0)] {
            let count = BLOCK_BYTES / 4 + 3;
            let mut slots: Vec<f32> = values.iter().flat_map(|value| vec![*value; count]).collect();
            // SAFETY: three slots of `count` numbers, one after another.
            unsafe { add_slots(slots.as_mut_ptr().cast(), 4 * count, 3, 4 * count, Number::F32) };
            assert!(slots[..count].iter().all(|value| *value == sum), "{values:?}");
        }
    }
}

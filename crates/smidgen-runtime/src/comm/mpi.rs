//! Collectives by MPI, over host memory.
//!
//! Sums are ours: MPI moves the bytes, and numbers are added here in the order of the ranks. The standard only advises
//! that `MPI_Allreduce` repeats, and implementations choose its order by message size, placement on nodes and arrival;
//! this way every MPI gives the same bytes for the same number of ranks. It costs no more traffic: each rank receives
//! the others' copies of its part, adds them, and the parts are gathered.
//! Calls come from one thread at a time, not always the same. Errors return, with MPI's text.
//! Left out: non-blocking calls, sub-communicators, device memory.

use super::mpi_abi::{self as abi, Abi, Aint, Count};
use super::{Comm, CommError, Number, Span, expect_numbers, expect_parts, mpi_places};
use std::ffi::c_int;
use std::ops::{AddAssign, Range};
use std::sync::atomic::{AtomicBool, Ordering};

/// Host memory that every rank keeps to receive what it adds.
pub const SCRATCH_BYTES: usize = 4 << 20;

/// Spans up to this size are gathered whole and added by everyone: one call instead of two.
const SMALL_BYTES: usize = 16 << 10;

/// Bytes of two slots of a sum that stay in the cache while they are added.
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
    /// A call failed: other ranks may wait for this one, or never come.
    pub(super) failed: bool,
}

/// Forgoes the orderly end of MPI, which waits for all ranks. For a process that ends early or has lost a rank; may be
/// called from any thread.
pub fn abandon() {
    ABANDONED.store(true, Ordering::SeqCst);
}

impl Mpi {
    /// Opens the library, without starting anything: the name of what is found.
    pub fn look() -> Result<String, CommError> {
        let abi = mpi_places::open_library()?;
        Ok(format!("MPI ({}), `{}`", abi.version(), abi.path.display()))
    }

    /// Starts MPI, once per process, and compares its ranks with what the launcher said in variables.
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

    /// Starts MPI with whatever ranks it has.
    pub fn start_alone() -> Result<Mpi, CommError> {
        let abi = mpi_places::open_library()?;
        let name = abi.version();
        if STARTED.swap(true, Ordering::SeqCst) {
            return Err(CommError::Again);
        }
        let abi: &'static Abi = Box::leak(Box::new(abi));
        let check = |code, call| checked(abi, code, call);
        let mut provided = 0;
        // SAFETY: MPI is started once; it takes no arguments of the program.
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
        // Errors that belong to no communicator belong to the process itself.
        for comm in [abi::COMM_WORLD, abi::COMM_SELF] {
            // SAFETY: MPI is started, and the handles are predefined.
            let code = unsafe { (abi.comm_set_errhandler)(comm, abi::ERRORS_RETURN) };
            check(code, "MPI_Comm_set_errhandler")?;
        }
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is started; a place for a number.
        check(unsafe { (abi.comm_rank)(abi::COMM_WORLD, &mut rank) }, "MPI_Comm_rank")?;
        // SAFETY: MPI is started; a place for a number.
        check(unsafe { (abi.comm_size)(abi::COMM_WORLD, &mut size) }, "MPI_Comm_size")?;
        let scratch = vec![0; SCRATCH_BYTES / 8].into_boxed_slice();
        Ok(Mpi { abi, name, rank: rank as usize, size: size as usize, scratch, failed: false })
    }

    /// Every rank gets the bytes of `root`; those that others pass are dropped.
    pub fn broadcast_bytes(&mut self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>, CommError> {
        let mut length = (bytes.len() as u64).to_ne_bytes();
        // SAFETY: memory of this function.
        unsafe { self.broadcast(span_of(&mut length), root)? };
        let mut bytes = bytes;
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

    /// Bytes of a slot of the scratch memory, which has one for each rank.
    fn slot_bytes(&self) -> usize {
        SCRATCH_BYTES / self.size / 64 * 64
    }

    /// Sums small spans: gathers all of them, and adds on every rank.
    ///
    /// # Safety
    /// As for `all_reduce`; together, each rounded up to 8 bytes, they fit into a slot.
    unsafe fn reduce_small(&mut self, spans: &[(Span, Number)]) -> Result<(), CommError> {
        let bytes: usize = spans.iter().map(|(span, _)| room(*span)).sum();
        let scratch: *mut u8 = self.scratch.as_mut_ptr().cast();
        let mut at = self.rank * bytes;
        for (span, _) in spans {
            // SAFETY: the caller's memory, and the own slot.
            unsafe { scratch.add(at).copy_from_nonoverlapping(span.pointer, span.bytes) };
            at += room(*span);
        }
        // SAFETY: a slot for each rank, the own one filled.
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
            // SAFETY: the same place in every slot holds the numbers of this span.
            unsafe {
                add_slots(scratch.add(at), bytes, self.size, span.bytes, number);
                span.pointer.copy_from_nonoverlapping(scratch.add(at), span.bytes);
            }
            at += room(span);
        }
        Ok(())
    }

    /// Every rank receives the others' copies of its part, in rounds of one slot, and adds them.
    ///
    /// # Safety
    /// As for `reduce_scatter`, of numbers of the given kind.
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
            // SAFETY: pieces are inside the span and slots inside the scratch memory, which is apart from it.
            let code = unsafe {
                (self.abi.alltoallv)(
                    span.pointer.cast(),
                    send.counts.as_ptr(),
                    send.places.as_ptr(),
                    abi::BYTE,
                    scratch.cast(),
                    receive.counts.as_ptr(),
                    receive.places.as_ptr(),
                    abi::BYTE,
                    abi::COMM_WORLD,
                )
            };
            self.check(code, "MPI_Alltoallv_c")?;
            // SAFETY: the own piece, its slot, and as many numbers in every other slot.
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
            // As many of the next spans as are small together.
            let mut bytes = 0;
            let fits = rest.iter().take_while(|(span, _)| {
                bytes += room(*span);
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
        // SAFETY: the parts are inside the span, and the own one is in place.
        let code = unsafe {
            (self.abi.allgatherv)(
                abi::IN_PLACE,
                0,
                abi::BYTE,
                span.pointer.cast(),
                lists.counts.as_ptr(),
                lists.places.as_ptr(),
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
    /// Ends MPI, which waits for all ranks: not after a failure, when one of them may never come.
    fn drop(&mut self) {
        if self.failed || ABANDONED.load(Ordering::SeqCst) || std::thread::panicking() {
            return;
        }
        // SAFETY: MPI is started and used by nobody else. A failure cannot be helped any more.
        unsafe { (self.abi.finalize)() };
    }
}

/// Counts and places, in bytes, of a call that has one of each per rank.
struct Lists {
    counts: Vec<Count>,
    places: Vec<Aint>,
}

impl Lists {
    fn new(size: usize) -> Lists {
        Lists { counts: vec![0; size], places: vec![0; size] }
    }

    fn set(&mut self, rank: usize, place: usize, count: usize) {
        self.counts[rank] = count as Count;
        self.places[rank] = place as Aint;
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

/// Bytes that a span takes in a slot, where every span starts at a multiple of 8.
fn room(span: Span) -> usize {
    span.bytes.next_multiple_of(8)
}

/// As many whole numbers for each rank as for any other, or one more.
fn even_parts(bytes: usize, number_bytes: usize, size: usize) -> Vec<Range<usize>> {
    let numbers = bytes / number_bytes;
    let start = |rank: usize| (numbers / size * rank + rank.min(numbers % size)) * number_bytes;
    (0..size).map(|rank| start(rank)..start(rank + 1)).collect()
}

/// Adds the numbers of all slots to those of the first, in the order of the slots.
///
/// # Safety
/// `first` and the same place in every later slot, `stride` bytes further each, hold `bytes` of aligned numbers.
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
        // In another order the one is lost in rounding: 1 + 1e8 - 1e8 is 0 in f32, and 1e8 - 1e8 + 1 is 1.
        for (values, sum) in [([1.0f32, 1e8, -1e8], 0.0), ([1e8, -1e8, 1.0], 1.0)] {
            let count = BLOCK_BYTES / 4 + 3;
            let mut slots: Vec<f32> = values.iter().flat_map(|value| vec![*value; count]).collect();
            // SAFETY: three slots of `count` numbers, one after another.
            unsafe { add_slots(slots.as_mut_ptr().cast(), 4 * count, 3, 4 * count, Number::F32) };
            assert!(slots[..count].iter().all(|value| *value == sum), "{values:?}");
        }
    }
}

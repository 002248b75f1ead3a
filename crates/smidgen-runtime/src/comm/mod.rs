//! Collectives between ranks: one trait, with NCCL for GPU ranks and MPI for CPU ranks behind it.
//!
//! A rank is one process with one device. All ranks call the same collectives in the same order, on memory that the plan
//! reserved. Both libraries are opened at run time, so neither is needed to build, and a run on one rank touches neither.
//! A communicator has no timeout. `progress.rs` counts exchanges, so that the program's heartbeat (`ranks/`) finds a rank
//! that keeps the others waiting; a thread watches NCCL's work and can abort it (`cuda/nccl_watch.rs`).
//! Left out: overlap (the caller's threads and streams), and finding out who the ranks are (the program's launcher).

mod functions;
pub mod mpi;
mod mpi_abi;
pub mod mpi_places;
#[cfg(test)]
mod mpi_tests;
pub mod nccl;
mod nccl_abi;
mod progress;

pub use mpi::Mpi;
pub use nccl::Nccl;
pub use progress::Progress;

use std::ops::Range;
use std::path::PathBuf;

/// Memory that a collective works on: host memory for MPI, device memory for NCCL.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub pointer: *mut u8,
    pub bytes: usize,
}

impl Span {
    /// # Panics
    /// If `bytes` are not inside the span.
    pub fn part(self, bytes: &Range<usize>) -> Span {
        assert!(bytes.start <= bytes.end && bytes.end <= self.bytes, "{bytes:?} of {} bytes", self.bytes);
        Span { pointer: self.pointer.wrapping_add(bytes.start), bytes: bytes.len() }
    }
}

// SAFETY: a span is only an address and a length; the caller of a collective promises that the memory is valid.
unsafe impl Send for Span {}

/// The type of the numbers that a sum adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    F32,
    F64,
}

impl Number {
    pub fn bytes(self) -> usize {
        match self {
            Number::F32 => 4,
            Number::F64 => 8,
        }
    }
}

/// Collectives between ranks. MPI has finished when a call returns; NCCL has enqueued the work on its stream.
pub trait Comm: Send + std::fmt::Debug {
    /// The library and its version, such as `MPI (MPICH 5.0.2)` or `NCCL 2.28.9`.
    fn name(&self) -> String;
    fn rank(&self) -> usize;
    fn size(&self) -> usize;

    /// Sums over ranks, in place. Every rank gets the same bytes, and a repetition with the same number of ranks gives
    /// the same bytes again.
    ///
    /// # Safety
    /// Every span is valid memory (of the host for MPI, of the device for NCCL), aligned to its number, and nothing else
    /// touches it until the sum is done.
    unsafe fn all_reduce(&mut self, spans: &[(Span, Number)]) -> Result<(), CommError>;

    /// Sums f32 over ranks. `parts[r]` (bytes of the span) belongs to rank r: afterwards this rank's part holds the
    /// sum, and the rest is undefined. Parts are ascending and cover the span; they may be uneven, and empty.
    ///
    /// # Safety
    /// As for `all_reduce`.
    unsafe fn reduce_scatter(&mut self, span: Span, parts: &[Range<usize>]) -> Result<(), CommError>;

    /// Fills in the parts of the other ranks. This rank's part is already in place.
    ///
    /// # Safety
    /// As for `all_reduce`; bytes need no alignment.
    unsafe fn all_gather(&mut self, span: Span, parts: &[Range<usize>]) -> Result<(), CommError>;

    /// Copies the bytes of rank `root` to every rank.
    ///
    /// # Safety
    /// As for `all_gather`.
    unsafe fn broadcast(&mut self, span: Span, root: usize) -> Result<(), CommError>;

    /// Returns after every rank has called it.
    fn barrier(&mut self) -> Result<(), CommError>;
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    #[error("{what} not found (`{file}`)")]
    Missing { what: &'static str, file: &'static str, remedy: &'static str },
    #[error("`{}` cannot be opened: {why}", path.display())]
    Open { path: PathBuf, why: String },
    #[error("`{}` has no function `{symbol}`", path.display())]
    Symbol { path: PathBuf, symbol: String },
    #[error("{found} does not have the standard MPI ABI (`libmpi_abi.so.1`)")]
    Abi { found: String },
    #[error("`{}` has version {major}.{minor} of the MPI ABI, and version 1 is supported", path.display())]
    AbiVersion { path: PathBuf, major: i32, minor: i32 },
    #[error("{name} does not support calls from several threads (MPI_THREAD_SERIALIZED)")]
    Threads { name: String },
    #[error("MPI can be started only once per process")]
    Again,
    #[error("{name} says this is rank {rank} of {size}, but the launcher says {of_launcher}")]
    World { name: String, rank: usize, size: usize, of_launcher: String },
    #[error("{engine}: {call} failed: {what}")]
    Call { engine: &'static str, call: &'static str, what: String },
}

impl CommError {
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            CommError::Missing { remedy, .. } => Some(remedy),
            CommError::Abi { .. } | CommError::AbiVersion { .. } => {
                Some("`pip install mpich` installs an MPI with the standard ABI, and its `mpiexec`")
            }
            CommError::Symbol { .. } => Some("a newer version of the library may have it"),
            CommError::World { .. } => Some(
                "start the ranks with the `mpiexec` of the same MPI, or with `--ranks`; Slurm's srun needs \
                 `--mpi=pmi2` or `--mpi=pmix`",
            ),
            CommError::Open { .. }
            | CommError::Threads { .. }
            | CommError::Again
            | CommError::Call { .. } => None,
        }
    }
}

/// Ends the process without running destructors or exit handlers. For a rank that lost another one while one of its
/// threads waits inside a collective; an orderly exit might wait for that thread.
pub fn quit(code: u8) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(i32::from(code)) }
}

/// Panics unless there is one part per rank and the parts are ascending and cover the span.
fn expect_parts(span: Span, parts: &[Range<usize>], size: usize) {
    assert_eq!(parts.len(), size, "a collective needs one part per rank");
    let mut end = 0;
    for part in parts {
        assert!(part.start == end && part.end >= end, "the parts {parts:?} leave a gap or overlap");
        end = part.end;
    }
    assert_eq!(end, span.bytes, "the parts {parts:?} do not cover the span");
}

/// Panics unless a span holds whole numbers at their alignment.
fn expect_numbers(span: Span, number: Number) {
    assert!(
        span.bytes.is_multiple_of(number.bytes()) && (span.pointer as usize).is_multiple_of(number.bytes()),
        "{} bytes at {:p} are not whole numbers of {number:?}",
        span.bytes,
        span.pointer
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(bytes: usize) -> Span {
        Span { pointer: std::ptr::null_mut(), bytes }
    }

    #[test]
    fn parts_may_be_uneven_and_empty() {
        expect_parts(span(12), &[0..0, 0..8, 8..12], 3);
        expect_parts(span(0), &[0..0, 0..0], 2);
    }

    #[test]
    #[should_panic(expected = "leave a gap")]
    fn parts_with_a_gap_are_refused() {
        expect_parts(span(12), &[0..4, 8..12], 2);
    }

    #[test]
    #[should_panic(expected = "do not cover")]
    fn parts_that_end_early_are_refused() {
        expect_parts(span(16), &[0..4, 4..12], 2);
    }

    #[test]
    #[should_panic(expected = "whole numbers")]
    fn half_a_number_is_refused() {
        expect_numbers(span(6), Number::F32);
    }
}

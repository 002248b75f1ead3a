//! Exchanges with other ranks: NCCL on a stream of its own, or a host communicator through pinned memory.
//!
//! NCCL's work starts when everything launched before it is done and overlaps what is launched after it, like a
//! transfer. Without NCCL the host waits for the GPU, copies piece by piece, and exchanges the pieces: correct, and
//! slow. Before a reduce-scatter, each rank adds its part of the earlier sum to the values, so that the sum over ranks
//! is the new part.

use super::driver::{self, Event, Gpu, Stream};
use super::nccl_watch::NcclWatch;
use super::pinned::Pinned;
use crate::comm::{Comm, CommError, Nccl, Number, Progress, Span};
use crate::device::DeviceError;
use crate::lane::{Exchange, Scattered};
use cudarc::driver::{result, sys};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Pinned memory that a host communicator exchanges through.
pub const STAGED_BYTES: usize = 32 << 20;

#[derive(Debug)]
pub enum Peers {
    // The fields are dropped in this order: the watch, NCCL, its stream.
    Nccl { watch: NcclWatch, comm: Nccl, stream: Stream, ready: Event },
    Staged { comm: Box<dyn Comm>, memory: Pinned, progress: Arc<Progress> },
}

/// Adds f32 values on the compute stream. The arguments are the target address, the source address and the count.
pub type Accumulate<'a> = &'a dyn Fn(u64, u64, usize) -> Result<(), DeviceError>;

impl Peers {
    /// Joins the NCCL communicator with this id; returns when all ranks have joined.
    pub fn nccl(id: [u8; 128], rank: usize, size: usize) -> Result<Peers, DeviceError> {
        let (stream, ready) = (Stream::new()?, Event::new()?);
        // SAFETY: a stream of the current context, which is dropped after the communicator.
        let mut comm = unsafe { Nccl::new(id, rank, size, stream.handle.cast())? };
        // The first collective makes NCCL allocate its memory, so that it is included when memory is measured.
        comm.barrier()?;
        stream.wait()?;
        let watch = NcclWatch::start(comm.handles())?;
        Ok(Peers::Nccl { watch, comm, stream, ready })
    }

    /// Exchanges everything through host memory.
    pub fn staged(comm: Box<dyn Comm>) -> Result<Peers, DeviceError> {
        Ok(Peers::Staged { comm, memory: Pinned::new(STAGED_BYTES)?, progress: Arc::default() })
    }

    /// Sets how long an exchange through NCCL may take. An exchange through the host has no limit.
    pub fn set_limit(&self, limit: Duration) {
        if let Peers::Nccl { watch, .. } = self {
            watch.set_limit(limit);
        }
    }

    pub fn progress(&self) -> Arc<Progress> {
        match self {
            Peers::Nccl { watch, .. } => watch.progress(),
            Peers::Staged { progress, .. } => Arc::clone(progress),
        }
    }

    pub fn pinned_bytes(&self) -> usize {
        match self {
            Peers::Nccl { .. } => 0,
            Peers::Staged { memory, .. } => memory.bytes(),
        }
    }

    /// A failure of NCCL that no call has returned yet.
    pub fn failure(&self) -> Option<DeviceError> {
        match self {
            Peers::Nccl { watch, comm, .. } => {
                watch.failure().or_else(|| comm.check_async().err()).map(DeviceError::from)
            }
            Peers::Staged { .. } => None,
        }
    }

    fn rank(&self) -> usize {
        match self {
            Peers::Nccl { comm, .. } => comm.rank(),
            Peers::Staged { comm, .. } => comm.rank(),
        }
    }

    /// Begins an exchange of device memory; `finished` is recorded at its end.
    ///
    /// # Safety
    /// Nothing touches the memory until `finished` has happened.
    pub unsafe fn begin(
        &mut self,
        gpu: &Gpu,
        exchange: &Exchange,
        awaited: &[&Event],
        finished: &Event,
        accumulate: Accumulate<'_>,
    ) -> Result<(), DeviceError> {
        let own = self.rank();
        if let Exchange::Scatter(all) = exchange {
            // A part may just be fetched.
            awaited.iter().try_for_each(|event| event.hold(gpu.stream))?;
            for Scattered { whole, parts, part } in all {
                let to = whole.part(&parts[own]);
                if to.pointer == part.pointer {
                    continue;
                }
                accumulate(to.pointer as u64, part.pointer as u64, part.bytes / size_of::<f32>())?;
            }
        }
        match self {
            Peers::Nccl { watch, comm, stream, ready } => {
                ready.record(gpu)?;
                ready.hold(stream.handle)?;
                awaited.iter().try_for_each(|event| event.hold(stream.handle))?;
                watch.begin(stream.handle)?;
                let mut copy = |from: Span, to: Span| copy_in(stream.handle, from, to);
                // SAFETY: as the caller promises; all memory is on the device.
                unsafe { run(comm, exchange, own, &mut copy)? };
                watch.end(stream.handle)?;
                finished.record_in(stream.handle)
            }
            Peers::Staged { comm, memory, progress } => {
                awaited.iter().try_for_each(|event| event.hold(gpu.stream))?;
                gpu.wait()?;
                let mut staged = Staged { comm: comm.as_mut(), memory };
                // The next copies through the host do not wait for the stream, so these must be done.
                let mut copy = |from: Span, to: Span| copy_in(gpu.stream, from, to).and_then(|()| gpu.wait());
                progress.reach();
                // SAFETY: as the caller promises; the GPU is idle.
                unsafe { run(&mut staged, exchange, own, &mut copy)? };
                progress.finish();
                finished.record(gpu)
            }
        }
    }
}

/// Runs the collectives of an exchange, with the copies before and after them.
///
/// # Safety
/// As for [`Peers::begin`].
unsafe fn run(
    comm: &mut dyn Comm,
    exchange: &Exchange,
    own: usize,
    copy: &mut dyn FnMut(Span, Span) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    // SAFETY: as the caller promises.
    unsafe {
        match exchange {
            Exchange::Sum(spans) => comm.all_reduce(spans)?,
            Exchange::Scatter(all) => {
                for Scattered { whole, parts, part } in all {
                    comm.reduce_scatter(*whole, parts)?;
                    copy(whole.part(&parts[own]), *part)?;
                }
            }
            Exchange::Complete(all) => {
                all.iter().try_for_each(|(span, parts)| comm.all_gather(*span, parts))?;
            }
            Exchange::Gather { own: part, whole, parts } => {
                copy(*part, whole.part(&parts[own]))?;
                comm.all_gather(*whole, parts)?;
            }
        }
    }
    Ok(())
}

fn copy_in(stream: sys::CUstream, from: Span, to: Span) -> Result<(), DeviceError> {
    assert_eq!(from.bytes, to.bytes);
    if from.bytes == 0 || from.pointer == to.pointer {
        return Ok(());
    }
    // SAFETY: spans of one plan, which nothing else touches until the exchange is over.
    let copied =
        unsafe { result::memcpy_dtod_async(to.pointer as u64, from.pointer as u64, from.bytes, stream) };
    driver::named(copied, "cuMemcpyDtoD")
}

/// A host communicator that exchanges device memory piece by piece.
#[derive(Debug)]
struct Staged<'a> {
    comm: &'a mut dyn Comm,
    memory: &'a mut Pinned,
}

impl Staged<'_> {
    /// Copies device memory to the pinned memory from `first` on, and returns this copy.
    fn fetch(&mut self, from: Span, first: usize) -> Result<Span, CommError> {
        let host = self.memory.slice_mut(first, from.bytes);
        // SAFETY: the lengths are equal, and the GPU is idle.
        unsafe { result::memcpy_dtoh_sync(host, from.pointer as u64) }
            .map_err(|error| failed("cuMemcpyDtoH", &error))?;
        Ok(Span { pointer: host.as_mut_ptr(), bytes: from.bytes })
    }

    /// Copies a range of the pinned memory to the device.
    fn stow(&mut self, bytes: Range<usize>, to: Span) -> Result<(), CommError> {
        let host = &*self.memory.slice_mut(bytes.start, bytes.len());
        // SAFETY: the lengths are equal, and the GPU is idle.
        unsafe { result::memcpy_htod_sync(to.pointer as u64, host) }
            .map_err(|error| failed("cuMemcpyHtoD", &error))
    }
}

fn failed(call: &'static str, error: &result::DriverError) -> CommError {
    CommError::Call { engine: "the GPU", call, what: format!("{error:?}") }
}

/// Pieces of a span that fit the pinned memory.
fn pieces(span: Span) -> impl Iterator<Item = Span> {
    let firsts = (0..span.bytes).step_by(STAGED_BYTES);
    firsts.map(move |first| span.part(&(first..span.bytes.min(first + STAGED_BYTES))))
}

/// Cuts the part of each rank into pieces. Every part gets the same number of pieces, some of them empty.
fn pieces_of_parts(parts: &[Range<usize>]) -> Vec<Vec<Range<usize>>> {
    let most = STAGED_BYTES / parts.len() / 256 * 256;
    let longest = parts.iter().map(Range::len).max().unwrap_or(0);
    let piece = |first: usize| {
        let of = |part: &Range<usize>| {
            let start = (part.start + first).min(part.end);
            start..(start + most).min(part.end)
        };
        parts.iter().map(of).collect()
    };
    (0..longest).step_by(most.max(1)).map(piece).collect()
}

impl Comm for Staged<'_> {
    fn name(&self) -> String {
        self.comm.name()
    }

    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn size(&self) -> usize {
        self.comm.size()
    }

    unsafe fn all_reduce(&mut self, spans: &[(Span, Number)]) -> Result<(), CommError> {
        for (span, number) in spans {
            for piece in pieces(*span) {
                let host = self.fetch(piece, 0)?;
                // SAFETY: pinned memory of this communicator.
                unsafe { self.comm.all_reduce(&[(host, *number)])? };
                self.stow(0..piece.bytes, piece)?;
            }
        }
        Ok(())
    }

    unsafe fn reduce_scatter(&mut self, span: Span, _parts: &[Range<usize>]) -> Result<(), CommError> {
        // Every rank gets the sum of all parts, which includes its own part.
        // SAFETY: as the caller promises.
        unsafe { self.all_reduce(&[(span, Number::F32)]) }
    }

    unsafe fn all_gather(&mut self, span: Span, parts: &[Range<usize>]) -> Result<(), CommError> {
        let own = self.comm.rank();
        for ranges in pieces_of_parts(parts) {
            let mut ends = 0;
            let staged: Vec<Range<usize>> = ranges
                .iter()
                .map(|range| {
                    let first = ends;
                    ends += range.len();
                    first..ends
                })
                .collect();
            if !ranges[own].is_empty() {
                self.fetch(span.part(&ranges[own]), staged[own].start)?;
            }
            let whole = Span { pointer: self.memory.slice_mut(0, ends).as_mut_ptr(), bytes: ends };
            // SAFETY: pinned memory of this communicator.
            unsafe { self.comm.all_gather(whole, &staged)? };
            for (range, staged) in ranges.iter().zip(staged) {
                if !range.is_empty() {
                    self.stow(staged, span.part(range))?;
                }
            }
        }
        Ok(())
    }

    unsafe fn broadcast(&mut self, span: Span, root: usize) -> Result<(), CommError> {
        for piece in pieces(span) {
            let host = self.fetch(piece, 0)?;
            // SAFETY: pinned memory of this communicator.
            unsafe { self.comm.broadcast(host, root)? };
            self.stow(0..piece.bytes, piece)?;
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), CommError> {
        self.comm.barrier()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_parts_cover_each_part_once() {
        let parts =
            [0..STAGED_BYTES, STAGED_BYTES..STAGED_BYTES + 1000, STAGED_BYTES + 1000..STAGED_BYTES + 1000];
        let pieces = pieces_of_parts(&parts);
        for (rank, part) in parts.iter().enumerate() {
            let mut end = part.start;
            for ranges in &pieces {
                assert_eq!(ranges[rank].start, end);
                end = ranges[rank].end;
            }
            assert_eq!(end, part.end);
        }
        assert!(pieces.iter().all(|ranges| ranges.iter().map(Range::len).sum::<usize>() <= STAGED_BYTES));
    }
}

//! Collectives by NCCL, over device memory, in the order of one CUDA stream.
//!
//! Every call puts work on the stream and returns, so it can be recorded in a CUDA graph; only `barrier` and `wait` wait
//! for the stream. For one number of ranks on one topology NCCL adds in the same order each time, and every rank gets
//! the same bytes. Uneven parts are one group of reductions or broadcasts, one per part.
//! A lost peer shows as an asynchronous error, which [`Nccl::check_async`] polls, or as a stream that never finishes. In
//! the second case another thread aborts the communicator ([`Handles`]), which ends the work on the stream.
//! Left out: several GPUs in one process, sub-communicators, non-blocking start.

use super::nccl_abi::{self as abi, Abi, Handle, Stream, UniqueId};
use super::{Comm, CommError, Number, Span, expect_numbers, expect_parts};
use cudarc::driver::{result, sys};
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

/// How often a wait polls for errors of other ranks.
const POLL: Duration = Duration::from_micros(100);

/// A communicator over the GPUs of all ranks.
#[derive(Debug)]
pub struct Nccl {
    abi: &'static Abi,
    handles: Handles,
    stream: Stream,
    rank: usize,
    size: usize,
    /// 4 bytes on the GPU that barriers sum; their value does not matter.
    token: sys::CUdeviceptr,
}

/// The communicator, for a thread that watches it. NCCL allows another thread to poll for errors and to abort.
#[derive(Clone, Debug)]
pub struct Handles {
    abi: &'static Abi,
    /// Null once the communicator has ended.
    handle: Arc<AtomicPtr<c_void>>,
}

impl Handles {
    fn get(&self) -> Handle {
        self.handle.load(Ordering::SeqCst)
    }

    fn take(&self) -> Handle {
        self.handle.swap(std::ptr::null_mut(), Ordering::SeqCst)
    }

    /// Returns an error if a collective failed, on this rank or another, or if the communicator was aborted.
    pub fn check_async(&self) -> Result<(), CommError> {
        let (handle, mut state) = (self.get(), abi::SUCCESS);
        if handle.is_null() {
            let what = "the communicator was aborted".to_owned();
            return Err(CommError::Call { engine: "NCCL", call: "a collective", what });
        }
        // SAFETY: the communicator exists, and `state` is writable.
        let code = unsafe { (self.abi.comm_get_async_error)(handle, &mut state) };
        check(self.abi, code, handle, "ncclCommGetAsyncError")?;
        match state {
            abi::IN_PROGRESS => Ok(()),
            state => check(self.abi, state, handle, "a collective"),
        }
    }

    /// Ends the communicator without waiting for other ranks; unfinished work on the stream is dropped.
    pub fn abort(&self) -> Result<(), CommError> {
        let handle = self.take();
        if handle.is_null() {
            return Ok(());
        }
        // SAFETY: the communicator exists, and is not used again.
        let code = unsafe { (self.abi.comm_abort)(handle) };
        check(self.abi, code, std::ptr::null_mut(), "ncclCommAbort")
    }
}

// SAFETY: NCCL accepts calls from any thread, one at a time, and this value is used by one thread at a time.
unsafe impl Send for Nccl {}

impl Nccl {
    /// The version and path of NCCL, if it is found.
    pub fn describe_library() -> Result<String, CommError> {
        let abi = Abi::get()?;
        Ok(format!("NCCL {}, `{}`", abi.version(), abi.path.display()))
    }

    /// Creates the id of a new communicator. Rank 0 calls this and sends the id to the other ranks.
    pub fn unique_id() -> Result<[u8; 128], CommError> {
        let abi = Abi::get()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: `id` is writable.
        check(abi, unsafe { (abi.get_unique_id)(&mut id) }, std::ptr::null_mut(), "ncclGetUniqueId")?;
        Ok(id.0)
    }

    /// Joins the communicator; returns when all ranks have joined. The context of this rank's GPU is current.
    ///
    /// # Safety
    /// `stream` is a stream (`CUstream`) of the current context, and outlives this value.
    pub unsafe fn new(
        id: [u8; 128],
        rank: usize,
        size: usize,
        stream: *mut c_void,
    ) -> Result<Nccl, CommError> {
        let abi = Abi::get()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is writable, and rank 0 made the id.
        let code = unsafe { (abi.comm_init_rank)(&mut handle, size as c_int, UniqueId(id), rank as c_int) };
        check(abi, code, std::ptr::null_mut(), "ncclCommInitRank")?;
        let handles = Handles { abi, handle: Arc::new(AtomicPtr::new(handle)) };
        let mut nccl = Nccl { abi, handles, stream, rank, size, token: 0 };
        // SAFETY: the context is current.
        nccl.token = unsafe { result::malloc_sync(4) }.map_err(|error| driver(error, "cuMemAlloc"))?;
        Ok(nccl)
    }

    /// See [`Handles::check_async`].
    pub fn check_async(&self) -> Result<(), CommError> {
        self.handles.check_async()
    }

    pub fn handles(&self) -> Handles {
        self.handles.clone()
    }

    /// Waits until all work on the stream is done or something has failed.
    pub fn wait(&self) -> Result<(), CommError> {
        loop {
            // SAFETY: the stream exists.
            match unsafe { sys::cuStreamQuery(self.stream.cast()) } {
                sys::CUresult::CUDA_SUCCESS => return self.check_async(),
                sys::CUresult::CUDA_ERROR_NOT_READY => {}
                code => return Err(driver(result::DriverError(code), "cuStreamQuery")),
            }
            self.check_async()?;
            std::thread::sleep(POLL);
        }
    }

    fn check(&self, code: c_int, call: &'static str) -> Result<(), CommError> {
        check(self.abi, code, self.handles.get(), call)
    }

    /// Runs several calls as one NCCL group. The group is ended even if a call fails.
    fn group(&self, calls: impl FnOnce() -> Result<(), CommError>) -> Result<(), CommError> {
        // SAFETY: groups may be started at any time.
        self.check(unsafe { (self.abi.group_start)() }, "ncclGroupStart")?;
        let called = calls();
        // SAFETY: a group was started.
        let ended = self.check(unsafe { (self.abi.group_end)() }, "ncclGroupEnd");
        called.and(ended)
    }

    /// The length of each part, if all have the same length and it is not zero.
    fn even(parts: &[Range<usize>]) -> Option<usize> {
        let length = parts.first()?.len();
        (length > 0 && parts.iter().all(|part| part.len() == length)).then_some(length)
    }

    /// # Safety
    /// As for `broadcast`.
    unsafe fn broadcast_part(&self, span: Span, root: usize) -> Result<(), CommError> {
        let here: *mut c_void = span.pointer.cast();
        // SAFETY: the caller's memory, in place.
        let code = unsafe {
            (self.abi.broadcast)(
                here,
                here,
                span.bytes,
                abi::UINT8,
                root as c_int,
                self.handles.get(),
                self.stream,
            )
        };
        self.check(code, "ncclBroadcast")
    }
}

impl Comm for Nccl {
    fn name(&self) -> String {
        format!("NCCL {}", self.abi.version())
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
        self.group(|| {
            for &(Span { pointer, bytes }, number) in spans.iter().filter(|(span, _)| span.bytes > 0) {
                let kind = match number {
                    Number::F32 => abi::FLOAT32,
                    Number::F64 => abi::FLOAT64,
                };
                let count = bytes / number.bytes();
                // SAFETY: the caller's memory, in place; the communicator and the stream exist.
                let code = unsafe {
                    (self.abi.all_reduce)(
                        pointer.cast(),
                        pointer.cast(),
                        count,
                        kind,
                        abi::SUM,
                        self.handles.get(),
                        self.stream,
                    )
                };
                self.check(code, "ncclAllReduce")?;
            }
            Ok(())
        })
    }

    unsafe fn reduce_scatter(&mut self, span: Span, parts: &[Range<usize>]) -> Result<(), CommError> {
        expect_numbers(span, Number::F32);
        expect_parts(span, parts, self.size);
        assert!(parts.iter().all(|part| part.start.is_multiple_of(4)), "the parts {parts:?} cut a number");
        if let Some(bytes) = Nccl::even(parts) {
            // SAFETY: the caller's memory; NCCL's in-place result is this rank's part of the span.
            let code = unsafe {
                (self.abi.reduce_scatter)(
                    span.pointer.cast(),
                    span.part(&parts[self.rank]).pointer.cast(),
                    bytes / 4,
                    abi::FLOAT32,
                    abi::SUM,
                    self.handles.get(),
                    self.stream,
                )
            };
            return self.check(code, "ncclReduceScatter");
        }
        self.group(|| {
            for (root, part) in parts.iter().enumerate().filter(|(_, part)| !part.is_empty()) {
                let here: *mut c_void = span.part(part).pointer.cast();
                // SAFETY: the caller's memory, in place.
                let code = unsafe {
                    (self.abi.reduce)(
                        here,
                        here,
                        part.len() / 4,
                        abi::FLOAT32,
                        abi::SUM,
                        root as c_int,
                        self.handles.get(),
                        self.stream,
                    )
                };
                self.check(code, "ncclReduce")?;
            }
            Ok(())
        })
    }

    unsafe fn all_gather(&mut self, span: Span, parts: &[Range<usize>]) -> Result<(), CommError> {
        expect_parts(span, parts, self.size);
        if let Some(bytes) = Nccl::even(parts) {
            // SAFETY: the caller's memory; NCCL's in-place input is this rank's part of the span.
            let code = unsafe {
                (self.abi.all_gather)(
                    span.part(&parts[self.rank]).pointer.cast(),
                    span.pointer.cast(),
                    bytes,
                    abi::UINT8,
                    self.handles.get(),
                    self.stream,
                )
            };
            return self.check(code, "ncclAllGather");
        }
        self.group(|| {
            for (root, part) in parts.iter().enumerate().filter(|(_, part)| !part.is_empty()) {
                // SAFETY: the caller's memory.
                unsafe { self.broadcast_part(span.part(part), root)? };
            }
            Ok(())
        })
    }

    unsafe fn broadcast(&mut self, span: Span, root: usize) -> Result<(), CommError> {
        if span.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's memory.
        unsafe { self.broadcast_part(span, root) }
    }

    /// Also waits until all work on the stream is done. Must not be called while a graph is recorded.
    fn barrier(&mut self) -> Result<(), CommError> {
        let token = Span { pointer: self.token as *mut u8, bytes: 4 };
        // SAFETY: four bytes on the GPU that only barriers touch.
        unsafe { self.all_reduce(&[(token, Number::F32)])? };
        self.wait()
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // After a failure or a panic, `ncclCommDestroy` could wait for other ranks forever.
        let is_sound = !std::thread::panicking() && self.check_async().is_ok();
        let handle = self.handles.take();
        if !handle.is_null() {
            let end = if is_sound { self.abi.comm_destroy } else { self.abi.comm_abort };
            // SAFETY: the communicator exists, and is not used again. The result is ignored: there is nothing left to do.
            unsafe { end(handle) };
        }
        if self.token != 0 {
            // SAFETY: reserved by `new`; the work on the stream is done or dropped.
            let _ = unsafe { result::free_sync(self.token) };
        }
    }
}

fn check(abi: &Abi, code: c_int, handle: Handle, call: &'static str) -> Result<(), CommError> {
    match code {
        abi::SUCCESS => Ok(()),
        code => Err(CommError::Call { engine: "NCCL", call, what: abi.describe(code, handle) }),
    }
}

fn driver(error: result::DriverError, call: &'static str) -> CommError {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    CommError::Call { engine: "NCCL", call, what: text.unwrap_or_else(|_| "unknown".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_even_or_not() {
        assert_eq!(Nccl::even(&[0..4, 4..8]), Some(4));
        assert_eq!(Nccl::even(&[0..4, 4..4]), None);
        assert_eq!(Nccl::even(&[0..0, 0..0]), None);
    }
}

//! The CUDA driver: one GPU, its context and streams, and events.
//!
//! Most driver calls are here, with their errors as text; launches, graphs and pinned memory are in their own files.
//! The process uses one GPU with one compute stream, and further streams for transfers.

use super::nvml;
use crate::device::DeviceError;
use cudarc::driver::{result, sys};
use std::sync::OnceLock;

pub const NAME: &str = "cuda";

/// Turns the status of a driver call into a result.
pub fn check(code: sys::CUresult, call: &'static str) -> Result<(), DeviceError> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(failure(result::DriverError(code), call)),
    }
}

fn failure(error: result::DriverError, call: &'static str) -> DeviceError {
    let text = |name: Result<&std::ffi::CStr, result::DriverError>| {
        name.map_or_else(|_| "unknown".to_owned(), |name| name.to_string_lossy().into_owned())
    };
    let what = format!("{} ({})", text(error.error_string()), text(error.error_name()));
    DeviceError::Call { device: NAME, call, what }
}

/// Adds the name of the call to an error.
pub fn named<T>(result: Result<T, result::DriverError>, call: &'static str) -> Result<T, DeviceError> {
    result.map_err(|error| failure(error, call))
}

/// One GPU with its context, which is current, and the compute stream.
#[derive(Debug)]
pub struct Gpu {
    pub name: String,
    /// Such as (9, 0).
    pub capability: (u32, u32),
    pub multiprocessors: usize,
    pub stream: sys::CUstream,
    device: sys::CUdevice,
}

// SAFETY: the handles may be used from any thread that has the context current; a device is moved between threads
// only before its first use on the new one, and never shared.
unsafe impl Send for Gpu {}

impl Gpu {
    /// Opens a GPU. The driver's library must have been found.
    pub fn open(ordinal: usize) -> Result<Gpu, DeviceError> {
        init()?;
        let (device, capability) = find(ordinal)?;
        let multiprocessors = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = attribute(device, multiprocessors)? as usize;
        // SAFETY: the device exists; its primary context stays retained as long as the process lives.
        let context = named(unsafe { result::primary_ctx::retain(device) }, "cuDevicePrimaryCtxRetain")?;
        // SAFETY: the context was just retained.
        named(unsafe { result::ctx::set_current(context) }, "cuCtxSetCurrent")?;
        let stream =
            named(result::stream::create(result::stream::StreamKind::NonBlocking), "cuStreamCreate")?;
        let name = named(result::device::get_name(device), "cuDeviceGetName")?;
        Ok(Gpu { name, capability, multiprocessors, stream, device })
    }

    /// Free bytes according to NVML.
    pub fn free_bytes(&self) -> Option<u64> {
        nvml::free_bytes(self.device)
    }

    /// Bytes that this process uses, according to NVML.
    pub fn held_bytes(&self) -> Option<u64> {
        nvml::held_bytes(self.device)
    }

    /// NVML for this GPU, kept open.
    pub fn watch(&self) -> Option<nvml::Session> {
        nvml::Session::open(self.device)
    }

    /// Free and total bytes of the GPU.
    pub fn memory(&self) -> Result<(u64, u64), DeviceError> {
        let (free, total) = named(result::mem_get_info(), "cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }

    /// Waits until everything launched so far is done.
    pub fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream belongs to this GPU.
        named(unsafe { result::stream::synchronize(self.stream) }, "cuStreamSynchronize")
    }
}

/// A GPU's handle and compute capability. The driver must be initialized.
pub fn find(ordinal: usize) -> Result<(sys::CUdevice, (u32, u32)), DeviceError> {
    let count = named(result::device::get_count(), "cuDeviceGetCount")?;
    if ordinal as i64 >= i64::from(count) {
        return Err(DeviceError::NoSuchGpu { ordinal, count: count as usize });
    }
    let device = named(result::device::get(ordinal as i32), "cuDeviceGet")?;
    use sys::CUdevice_attribute as Attribute;
    let major = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok((device, (major as u32, minor as u32)))
}

fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<i32, DeviceError> {
    // SAFETY: the device exists.
    named(unsafe { result::device::get_attribute(device, which) }, "cuDeviceGetAttribute")
}

/// Initializes the driver, if that was not done before. Returns the GPU memory that this took, which is not part of the
/// context: 3.25 MiB on an H200. Returns 0 if NVML is missing.
pub fn init() -> Result<u64, DeviceError> {
    static TAKEN_BYTES: OnceLock<u64> = OnceLock::new();
    let before = if TAKEN_BYTES.get().is_none() { nvml::free_bytes_of_all() } else { None };
    named(result::init(), "cuInit")?;
    Ok(*TAKEN_BYTES.get_or_init(|| {
        let both = before.zip(nvml::free_bytes_of_all());
        let taken = both.into_iter().flat_map(|(before, after)| before.into_iter().zip(after));
        // The driver takes about the same on every GPU.
        taken.map(|(before, after)| before.saturating_sub(after)).max().unwrap_or(0)
    }))
}

/// A stream for transfers.
#[derive(Debug)]
pub struct Stream {
    pub handle: sys::CUstream,
}

// SAFETY: a handle; see `Gpu`.
unsafe impl Send for Stream {}

impl Stream {
    pub fn new() -> Result<Stream, DeviceError> {
        let kind = result::stream::StreamKind::NonBlocking;
        Ok(Stream { handle: named(result::stream::create(kind), "cuStreamCreate")? })
    }

    /// Waits until everything enqueued in it is done.
    pub fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream belongs to the current context.
        named(unsafe { result::stream::synchronize(self.handle) }, "cuStreamSynchronize")
    }
}

type HostWork = Box<dyn FnOnce() + Send>;

/// Enqueues a host callback: the driver calls `work` on one of its threads, in stream order. `work` must not call the
/// driver.
pub fn call_in_order(stream: &Stream, work: impl FnOnce() + Send + 'static) -> Result<(), DeviceError> {
    unsafe extern "C" fn call(work: *mut std::ffi::c_void) {
        // SAFETY: the pointer comes from the box below, and the callback runs once.
        let work = unsafe { Box::from_raw(work.cast::<HostWork>()) };
        work();
    }
    let work = Box::into_raw(Box::new(Box::new(work) as HostWork));
    // SAFETY: the stream belongs to the current context, and `call` takes ownership of the box.
    let code = unsafe { sys::cuLaunchHostFunc(stream.handle, Some(call), work.cast()) };
    if code != sys::CUresult::CUDA_SUCCESS {
        // SAFETY: the callback was not enqueued, so the box is still ours.
        drop(unsafe { Box::from_raw(work) });
    }
    check(code, "cuLaunchHostFunc")
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once; the driver finishes enqueued work first.
        let _ = unsafe { result::stream::destroy(self.handle) };
    }
}

/// A CUDA event.
#[derive(Debug)]
pub struct Event {
    handle: sys::CUevent,
}

// SAFETY: a handle; see `Gpu`.
unsafe impl Send for Event {}

impl Event {
    /// An event for ordering only.
    pub fn new() -> Result<Event, DeviceError> {
        Event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event that also records the time.
    pub fn timed() -> Result<Event, DeviceError> {
        Event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn create(flags: sys::CUevent_flags) -> Result<Event, DeviceError> {
        Ok(Event { handle: named(result::event::create(flags), "cuEventCreate")? })
    }

    pub fn record(&self, gpu: &Gpu) -> Result<(), DeviceError> {
        self.record_in(gpu.stream)
    }

    pub(super) fn record_in(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
        // SAFETY: event and stream belong to the current context.
        named(unsafe { result::event::record(self.handle, stream) }, "cuEventRecord")
    }

    /// Makes a stream wait for the event; the host does not wait.
    pub(super) fn hold(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream belong to the current context.
        named(unsafe { result::stream::wait_event(stream, self.handle, flags) }, "cuStreamWaitEvent")
    }

    /// Whether everything enqueued before the event is done.
    pub fn has_happened(&self) -> Result<bool, DeviceError> {
        // SAFETY: the event belongs to the current context.
        match unsafe { sys::cuEventQuery(self.handle) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code, "cuEventQuery").map(|()| true),
        }
    }

    pub fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: the event belongs to the current context.
        named(unsafe { result::event::synchronize(self.handle) }, "cuEventSynchronize")
    }

    /// Milliseconds from `self` to `end`; both have happened.
    pub fn milliseconds_until(&self, end: &Event) -> Result<f32, DeviceError> {
        // SAFETY: both events were recorded in the current context.
        named(unsafe { result::event::elapsed(self.handle, end.handle) }, "cuEventElapsedTime")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::event::destroy(self.handle) };
    }
}

/// Copies from the host to the GPU, in stream order.
///
/// # Safety
/// `from` is pinned memory and `to` is inside the reservation, both for `bytes` bytes and until the copy is done.
pub unsafe fn copy_to_device(gpu: &Gpu, to: u64, from: *const u8, bytes: usize) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    check(unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, gpu.stream) }, "cuMemcpyHtoDAsync")
}

/// Copies from the GPU to the host, in stream order.
///
/// # Safety
/// As for [`copy_to_device`], with `to` and `from` exchanged.
pub unsafe fn copy_to_host(gpu: &Gpu, to: *mut u8, from: u64, bytes: usize) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    check(unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, gpu.stream) }, "cuMemcpyDtoHAsync")
}

/// Rows to copy. `from` and `to` are an address and the bytes from one row to the next.
#[derive(Clone, Copy, Debug)]
pub struct RowCopy {
    pub from: (u64, usize),
    pub to: (u64, usize),
    pub row_bytes: usize,
    pub rows: usize,
}

/// Copies rows between GPU memory and pinned memory, in either direction, in stream order.
///
/// # Safety
/// Until the copy is done, all rows are pinned memory or inside a reservation of the GPU.
pub unsafe fn copy_rows(stream: sys::CUstream, copy: &RowCopy) -> Result<(), DeviceError> {
    if copy.rows == 1 {
        let bytes = copy.row_bytes;
        // SAFETY: the caller's promise; addresses are unified.
        return check(unsafe { sys::cuMemcpyAsync(copy.to.0, copy.from.0, bytes, stream) }, "cuMemcpyAsync");
    }
    let unified = sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED;
    let rows = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: unified,
        srcHost: std::ptr::null(),
        srcDevice: copy.from.0,
        srcArray: std::ptr::null_mut(),
        srcPitch: copy.from.1,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: unified,
        dstHost: std::ptr::null_mut(),
        dstDevice: copy.to.0,
        dstArray: std::ptr::null_mut(),
        dstPitch: copy.to.1,
        WidthInBytes: copy.row_bytes,
        Height: copy.rows,
    };
    // SAFETY: the caller's promise.
    check(unsafe { sys::cuMemcpy2DAsync_v2(&rows, stream) }, "cuMemcpy2DAsync")
}

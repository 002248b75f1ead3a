//! Pinned host memory, which the GPU reads and writes directly.
//!
//! Usually the driver allocates it. If ranks of a machine share its first bytes, one range of addresses is reserved:
//! the first part maps the shared memory, the rest is private, and both are registered with the driver. Offsets mean
//! the same in both cases.

use super::driver::{NAME, check, named};
use crate::device::DeviceError;
use crate::shared_host::SharedHost;
use cudarc::driver::{result, sys};
use std::ffi::{c_int, c_void};

#[derive(Debug)]
pub struct Pinned {
    pointer: *mut u8,
    bytes: usize,
    /// Whether the driver allocated it.
    is_allocated: bool,
    /// The start of each part that was mapped here and is registered.
    registered: Vec<*mut c_void>,
}

// SAFETY: memory of this process; other ranks only read the shared part, and only once it is filled.
unsafe impl Send for Pinned {}

impl Pinned {
    pub fn new(bytes: usize) -> Result<Pinned, DeviceError> {
        // SAFETY: plain memory; it is freed once, in `drop`.
        let pointer = named(unsafe { result::malloc_host(bytes, 0) }, "cuMemHostAlloc")?;
        Ok(Pinned { pointer: pointer.cast(), bytes, is_allocated: true, registered: vec![] })
    }

    /// Pinned memory whose first bytes are shared.
    pub fn over(shared: &SharedHost, bytes: usize) -> Result<Pinned, DeviceError> {
        assert!(shared.bytes() <= bytes, "{} shared of {bytes} pinned bytes", shared.bytes());
        let (no_access, read_write) = (libc::PROT_NONE, libc::PROT_READ | libc::PROT_WRITE);
        let own = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let start = map(std::ptr::null_mut(), bytes, no_access, own | libc::MAP_NORESERVE, -1)?;
        // From here on `drop` unmaps the whole range.
        let mut pinned = Pinned { pointer: start.cast(), bytes, is_allocated: false, registered: vec![] };
        let parts = [
            (0, shared.bytes(), libc::MAP_SHARED, shared.descriptor()),
            (shared.bytes(), bytes - shared.bytes(), own, -1),
        ];
        for (first, length, kind, file) in parts.into_iter().filter(|(_, length, ..)| *length > 0) {
            // SAFETY: inside the range that was reserved above.
            let place = unsafe { pinned.pointer.add(first) }.cast();
            map(place, length, read_write, kind | libc::MAP_FIXED, file)?;
            let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            // SAFETY: memory that was mapped just now and stays mapped until it is unregistered, in `drop`.
            check(unsafe { sys::cuMemHostRegister_v2(place, length, flags) }, "cuMemHostRegister")?;
            pinned.registered.push(place);
            let mut address = 0;
            // SAFETY: registered memory; a place for an address.
            let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, place, 0) };
            check(code, "cuMemHostGetDevicePointer")?;
            if address != place as u64 {
                let what = "the GPU maps the shared memory at another address than the host".to_owned();
                return Err(DeviceError::Call { device: NAME, call: "cuMemHostGetDevicePointer", what });
            }
        }
        Ok(pinned)
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes that the operating system counts as memory of this process, because they were mapped here.
    pub fn mapped_bytes(&self) -> usize {
        if self.is_allocated { 0 } else { self.bytes }
    }

    pub fn pointer(&self) -> *const u8 {
        self.pointer
    }

    /// A range of the memory. No copy from or to it may be pending.
    pub fn slice_mut(&mut self, first: usize, bytes: usize) -> &mut [u8] {
        assert!(first + bytes <= self.bytes, "{first}+{bytes} of {} pinned bytes", self.bytes);
        // SAFETY: in bounds, initialized by the driver or the operating system, and borrowed as long as the slice
        // lives.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(first), bytes) }
    }
}

fn map(
    place: *mut c_void,
    bytes: usize,
    access: c_int,
    kind: c_int,
    file: c_int,
) -> Result<*mut c_void, DeviceError> {
    // SAFETY: the kernel chooses new addresses, or `place` is part of a range that the caller reserved.
    let pointer = unsafe { libc::mmap(place, bytes, access, kind, file, 0) };
    if pointer == libc::MAP_FAILED {
        let what = std::io::Error::last_os_error().to_string();
        return Err(DeviceError::Call { device: NAME, call: "mmap", what });
    }
    Ok(pointer)
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // `drop` cannot return an error.
        for place in &self.registered {
            // SAFETY: registered in `over`, once.
            let _ = unsafe { sys::cuMemHostUnregister(*place) };
        }
        if self.is_allocated {
            // SAFETY: allocated in `new`, freed once.
            let _ = unsafe { result::free_host(self.pointer.cast()) };
        } else {
            // SAFETY: mapped in `over`, unmapped once.
            let _ = unsafe { libc::munmap(self.pointer.cast(), self.bytes) };
        }
    }
}

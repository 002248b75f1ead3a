//! NVML, NVIDIA's management library: free memory and load of a GPU, and the processes that use it, without a context.
//!
//! The library is opened at run time and may be missing, so every answer is an `Option`.

use cudarc::driver::{result, sys};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Free bytes of a device.
pub fn free_bytes(device: sys::CUdevice) -> Option<u64> {
    let session = Session::open(device)?;
    session.nvml.free_bytes(session.device()?)
}

/// Free bytes of every device, in NVML's order. Unlike the other functions this does not need an initialized driver.
pub fn free_bytes_of_all() -> Option<Vec<u64>> {
    let (nvml, mut count) = (Nvml::open()?, 0);
    // SAFETY: the pointer is valid for the call.
    let has_count = unsafe { (nvml.count)(&mut count) } == 0;
    let free_bytes = |index: c_uint| {
        let mut device = std::ptr::null_mut();
        // SAFETY: the pointer is valid for the call.
        let found = unsafe { (nvml.by_index)(index, &mut device) } == 0;
        found.then(|| nvml.free_bytes(device)).flatten()
    };
    has_count.then(|| (0..count).map(free_bytes).collect()).flatten()
}

/// Bytes that this process uses on a device, if NVML knows it.
pub fn held_bytes(device: sys::CUdevice) -> Option<u64> {
    let own = std::process::id();
    Session::open(device)?.gpu_processes()?.into_iter().find(|holder| holder.process == own)?.bytes
}

/// A process that uses memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    pub process: u32,
    /// `None` if the driver does not say.
    pub bytes: Option<u64>,
}

/// The processes that compute on a GPU, including this one; `None` if NVML does not say, as in many containers.
pub fn gpu_processes(ordinal: usize) -> Option<Vec<GpuProcess>> {
    Session::open(result::device::get(ordinal as i32).ok()?)?.gpu_processes()
}

/// NVML kept initialized for one GPU: initializing takes milliseconds, a reading microseconds.
#[derive(Debug)]
pub struct Session {
    nvml: Nvml,
    bus: [c_char; 32],
}

impl Session {
    pub fn open(device: sys::CUdevice) -> Option<Session> {
        let mut bus = [0 as c_char; 32];
        // SAFETY: the buffer has the length that is given.
        let code = unsafe { sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), bus.len() as c_int, device) };
        if code != sys::CUresult::CUDA_SUCCESS {
            return None;
        }
        Some(Session { nvml: Nvml::open()?, bus })
    }

    /// NVML's handle of the GPU.
    fn device(&self) -> Option<*mut c_void> {
        let mut device = std::ptr::null_mut();
        // SAFETY: the bus id ends with zero, and the pointer is valid for the call.
        let found = unsafe { (self.nvml.by_bus)(self.bus.as_ptr(), &mut device) } == 0;
        found.then_some(device)
    }

    /// Percent of the last sample period (up to a second) in which a kernel of any process ran.
    pub fn busy_percent(&self) -> Option<u32> {
        let (device, mut busy) = (self.device()?, Utilization::default());
        let read = self.nvml.utilization?;
        // SAFETY: the pointer is valid for the call.
        (unsafe { read(device, &mut busy) } == 0).then_some(busy.gpu)
    }

    fn gpu_processes(&self) -> Option<Vec<GpuProcess>> {
        const MOST: usize = 64;
        let (processes, device) = (self.nvml.processes?, self.device()?);
        let (mut count, mut infos) = (MOST as c_uint, [ProcessInfo::default(); MOST]);
        // SAFETY: the array has `count` elements.
        let found = unsafe { processes(device, &mut count, infos.as_mut_ptr()) } == 0;
        let holder = |info: &ProcessInfo| GpuProcess {
            process: info.process,
            // All bits set: not available.
            bytes: Some(info.bytes).filter(|bytes| *bytes != u64::MAX),
        };
        found.then(|| infos[..MOST.min(count as usize)].iter().map(holder).collect())
    }
}

/// The functions of NVML that are used here. NVML is initialized as long as this value lives.
#[derive(Debug)]
struct Nvml {
    shutdown: unsafe extern "C" fn() -> c_int,
    count: unsafe extern "C" fn(*mut c_uint) -> c_int,
    by_index: unsafe extern "C" fn(c_uint, *mut *mut c_void) -> c_int,
    by_bus: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int,
    memory: unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int,
    processes: Option<unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut ProcessInfo) -> c_int>,
    utilization: Option<unsafe extern "C" fn(*mut c_void, *mut Utilization) -> c_int>,
}

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlProcessInfo_t` of `nvmlDeviceGetComputeRunningProcesses_v3`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    process: c_uint,
    bytes: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// A function of a library.
///
/// # Safety
/// `handle` is an open library that stays open, and `F` is the type of the function, a function pointer.
unsafe fn symbol<F>(handle: *mut c_void, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the name ends with zero.
    let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
    // SAFETY: the caller's promise; the sizes are equal.
    (!symbol.is_null()).then(|| unsafe { std::mem::transmute_copy::<*mut c_void, F>(&symbol) })
}

impl Nvml {
    /// Opens and initializes the library.
    fn open() -> Option<Nvml> {
        // SAFETY: the functions have the types of NVML's header, the library stays open, and `init` may be called
        // first.
        unsafe {
            let library = libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW);
            if library.is_null() {
                return None;
            }
            let init: unsafe extern "C" fn() -> c_int = symbol(library, c"nvmlInit_v2")?;
            let shutdown = symbol(library, c"nvmlShutdown")?;
            let count = symbol(library, c"nvmlDeviceGetCount_v2")?;
            let by_index = symbol(library, c"nvmlDeviceGetHandleByIndex_v2")?;
            let by_bus = symbol(library, c"nvmlDeviceGetHandleByPciBusId_v2")?;
            let memory = symbol(library, c"nvmlDeviceGetMemoryInfo")?;
            let processes = symbol(library, c"nvmlDeviceGetComputeRunningProcesses_v3");
            let utilization = symbol(library, c"nvmlDeviceGetUtilizationRates");
            if init() != 0 {
                return None;
            }
            Some(Nvml { shutdown, count, by_index, by_bus, memory, processes, utilization })
        }
    }

    fn free_bytes(&self, device: *mut c_void) -> Option<u64> {
        let mut memory = Memory::default();
        // SAFETY: NVML is initialized, and the pointer is valid for the call.
        (unsafe { (self.memory)(device, &mut memory) } == 0).then_some(memory.free)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: `open` has initialized it once.
        unsafe { (self.shutdown)() };
    }
}

//! What there is to know of a GPU before a context is made on it: its name, what it can do, whose memory is taken.
//!
//! Free memory comes from NVIDIA's management library, which needs no context; without it nothing is known of
//! memory until the device is opened.

use super::driver::{check, named};
use super::libraries;
use crate::device::DeviceError;
use cudarc::driver::{result, sys};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// A GPU, looked at from outside.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuFacts {
    pub ordinal: usize,
    pub name: String,
    /// Such as (9, 0).
    pub capability: (u32, u32),
    pub total_bytes: u64,
    /// What no process holds, where it can be told.
    pub free_bytes: Option<u64>,
    /// Such as 13000 for CUDA 13.0.
    pub driver_version: i32,
}

impl GpuFacts {
    /// Whether kernels and products run there: Ampere or newer.
    pub fn can_train(&self) -> bool {
        self.capability.0 >= 8
    }
}

/// Looks at a GPU without taking any of its memory.
pub fn look(ordinal: usize) -> Result<GpuFacts, DeviceError> {
    let libraries = libraries::find();
    if let Some(missing) = libraries.iter().find(|library| library.found.is_none()) {
        let (what, file, remedy) = (missing.what, missing.file, missing.remedy);
        return Err(DeviceError::Library { what, file, remedy });
    }
    named(result::init(), "cuInit")?;
    let count = named(result::device::get_count(), "cuDeviceGetCount")?;
    if ordinal as i64 >= i64::from(count) {
        return Err(DeviceError::NoSuchGpu { ordinal, count: count as usize });
    }
    let device = named(result::device::get(ordinal as i32), "cuDeviceGet")?;
    use sys::CUdevice_attribute as Attribute;
    let attribute = |which| {
        // SAFETY: the device was just got.
        named(unsafe { result::device::get_attribute(device, which) }, "cuDeviceGetAttribute")
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32;
    // SAFETY: the device was just got.
    let total = named(unsafe { result::device::total_mem(device) }, "cuDeviceTotalMem")?;
    let mut driver_version = 0;
    // SAFETY: the pointer is valid for the call.
    check(unsafe { sys::cuDriverGetVersion(&mut driver_version) }, "cuDriverGetVersion")?;
    Ok(GpuFacts {
        ordinal,
        name: named(result::device::get_name(device), "cuDeviceGetName")?,
        capability: (major, minor),
        total_bytes: total as u64,
        free_bytes: free_bytes(device),
        driver_version,
    })
}

/// Free bytes of a device by the management library.
pub fn free_bytes(device: sys::CUdevice) -> Option<u64> {
    let bus = bus_of(device)?;
    Management::open()?.free_bytes(&bus)
}

/// What this process holds of a device by the management library, where that knows it.
pub fn held_bytes(device: sys::CUdevice) -> Option<u64> {
    let own = std::process::id();
    Management::open()?.holders(&bus_of(device)?)?.into_iter().find(|holder| holder.process == own)?.bytes
}

/// A process that holds memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    pub process: u32,
    /// Where the driver tells.
    pub bytes: Option<u64>,
}

/// The processes that compute on a GPU, this one included; nothing where the management library does not tell, as in
/// many containers.
pub fn holders(ordinal: usize) -> Option<Vec<Holder>> {
    let device = result::device::get(ordinal as i32).ok()?;
    let bus = bus_of(device)?;
    Management::open()?.holders(&bus)
}

fn bus_of(device: sys::CUdevice) -> Option<[c_char; 32]> {
    let mut bus = [0 as c_char; 32];
    // SAFETY: the buffer has the length that is given.
    let code = unsafe { sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), bus.len() as c_int, device) };
    check(code, "cuDeviceGetPCIBusId").ok()?;
    Some(bus)
}

/// The functions of the management library that are used here.
struct Management {
    init: unsafe extern "C" fn() -> c_int,
    shutdown: unsafe extern "C" fn() -> c_int,
    by_bus: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int,
    memory: unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int,
    processes: Option<unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut ProcessInfo) -> c_int>,
}

/// `nvmlProcessInfo_t`, as the third version of the function below has it.
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

impl Management {
    fn open() -> Option<Management> {
        // SAFETY: names end with zero; the functions have the types of NVML's header; the library stays open.
        unsafe {
            let handle = libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW);
            if handle.is_null() {
                return None;
            }
            let find = |name: &CStr| {
                let symbol = libc::dlsym(handle, name.as_ptr());
                (!symbol.is_null()).then_some(symbol)
            };
            Some(Management {
                init: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(find(
                    c"nvmlInit_v2",
                )?),
                shutdown: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(find(
                    c"nvmlShutdown",
                )?),
                by_bus: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int,
                >(find(c"nvmlDeviceGetHandleByPciBusId_v2")?),
                memory: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int,
                >(find(c"nvmlDeviceGetMemoryInfo")?),
                processes: find(c"nvmlDeviceGetComputeRunningProcesses_v3").map(|symbol| {
                    std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut ProcessInfo) -> c_int,
                    >(symbol)
                }),
            })
        }
    }

    fn holders(&self, bus: &[c_char]) -> Option<Vec<Holder>> {
        const MOST: usize = 64;
        let processes = self.processes?;
        let (mut device, mut count) = (std::ptr::null_mut(), MOST as c_uint);
        let mut infos = [ProcessInfo::default(); MOST];
        // SAFETY: the calls follow NVML's order; the array has as many places as `count` says.
        let found = unsafe {
            if (self.init)() != 0 {
                return None;
            }
            let found = (self.by_bus)(bus.as_ptr(), &mut device) == 0
                && processes(device, &mut count, infos.as_mut_ptr()) == 0;
            (self.shutdown)();
            found
        };
        let holder = |info: &ProcessInfo| Holder {
            process: info.process,
            // All bits set: not available.
            bytes: Some(info.bytes).filter(|bytes| *bytes != u64::MAX),
        };
        found.then(|| infos[..MOST.min(count as usize)].iter().map(holder).collect())
    }

    fn free_bytes(&self, bus: &[c_char]) -> Option<u64> {
        let (mut device, mut memory) = (std::ptr::null_mut(), Memory::default());
        // SAFETY: the calls follow NVML's order, and every pointer is valid for its call.
        unsafe {
            if (self.init)() != 0 {
                return None;
            }
            let found =
                (self.by_bus)(bus.as_ptr(), &mut device) == 0 && (self.memory)(device, &mut memory) == 0;
            (self.shutdown)();
            found.then_some(memory.free)
        }
    }
}

//! NVML, the management library of NVIDIA: free memory and load of a GPU and the processes that use it, without a context.
//!
//! The library is opened at run time and may be missing; every answer is an `Option`.

use cudarc::driver::{result, sys};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Free bytes of a device.
pub fn free_bytes(device: sys::CUdevice) -> Option<u64> {
    let bus = bus_of(device)?;
    Nvml::open()?.free_bytes(&bus)
}

/// Free bytes of every device, in NVML's order; unlike the others this needs no driver that was initialized.
pub fn free_bytes_of_all() -> Option<Vec<u64>> {
    Nvml::open()?.free_bytes_of_all()
}

/// Bytes that this process uses on a device, if NVML knows it.
pub fn held_bytes(device: sys::CUdevice) -> Option<u64> {
    let own = std::process::id();
    Nvml::open()?.holders(&bus_of(device)?)?.into_iter().find(|holder| holder.process == own)?.bytes
}

/// A process that uses memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    pub process: u32,
    /// `None` if the driver does not say.
    pub bytes: Option<u64>,
}

/// The processes that compute on a GPU, this one included; `None` if NVML does not say, as in many containers.
pub fn holders(ordinal: usize) -> Option<Vec<Holder>> {
    let device = result::device::get(ordinal as i32).ok()?;
    let bus = bus_of(device)?;
    Nvml::open()?.holders(&bus)
}

/// NVML kept initialized for one GPU: initializing takes milliseconds, a reading microseconds.
#[derive(Debug)]
pub struct Session {
    nvml: Nvml,
    bus: [c_char; 32],
}

impl Session {
    pub fn open(device: sys::CUdevice) -> Option<Session> {
        let (nvml, bus) = (Nvml::open()?, bus_of(device)?);
        // SAFETY: no call of NVML needs anything before this one.
        (unsafe { (nvml.init)() } == 0).then_some(Session { nvml, bus })
    }

    /// Percent of the last sample period (up to a second) in which a kernel of any process ran.
    pub fn busy_percent(&self) -> Option<u32> {
        let (mut device, mut busy) = (std::ptr::null_mut(), Utilization::default());
        let read = self.nvml.utilization?;
        // SAFETY: NVML is initialized as long as this value lives, and both pointers are valid for their calls.
        let found = unsafe {
            (self.nvml.by_bus)(self.bus.as_ptr(), &mut device) == 0 && read(device, &mut busy) == 0
        };
        found.then_some(busy.gpu)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: it was initialized once by `open`.
        unsafe { (self.nvml.shutdown)() };
    }
}

fn bus_of(device: sys::CUdevice) -> Option<[c_char; 32]> {
    let mut bus = [0 as c_char; 32];
    // SAFETY: the buffer has the length that is given.
    let code = unsafe { sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), bus.len() as c_int, device) };
    (code == sys::CUresult::CUDA_SUCCESS).then_some(bus)
}

/// The functions of NVML that are used here.
#[derive(Debug)]
struct Nvml {
    init: unsafe extern "C" fn() -> c_int,
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

impl Nvml {
    fn open() -> Option<Nvml> {
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
            Some(Nvml {
                init: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(find(
                    c"nvmlInit_v2",
                )?),
                shutdown: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(find(
                    c"nvmlShutdown",
                )?),
                count: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_uint) -> c_int>(find(
                    c"nvmlDeviceGetCount_v2",
                )?),
                by_index: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_uint, *mut *mut c_void) -> c_int,
                >(find(c"nvmlDeviceGetHandleByIndex_v2")?),
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
                utilization: find(c"nvmlDeviceGetUtilizationRates").map(|symbol| {
                    std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn(*mut c_void, *mut Utilization) -> c_int,
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
        // SAFETY: the calls follow NVML's order; the array has `count` elements.
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

    fn free_bytes_of_all(&self) -> Option<Vec<u64>> {
        let mut count = 0;
        // SAFETY: the calls follow NVML's order, and every pointer is valid for its call.
        unsafe {
            if (self.init)() != 0 {
                return None;
            }
            let has_count = (self.count)(&mut count) == 0;
            let free_bytes = |index: c_uint| {
                let (mut device, mut memory) = (std::ptr::null_mut(), Memory::default());
                let found =
                    (self.by_index)(index, &mut device) == 0 && (self.memory)(device, &mut memory) == 0;
                found.then_some(memory.free)
            };
            let all = (0..count).map(free_bytes).collect::<Option<Vec<u64>>>();
            (self.shutdown)();
            all.filter(|_| has_count)
        }
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

//! Kernels: compiled for this GPU when a run needs them, and cached on disk.
//!
//! NVRTC compiles each file in a fraction of a second; the machine code is cached under a hash of source, options,
//! compiler version and driver version, so a second run loads it in well under a millisecond. Nothing but NVRTC has to
//! be installed, and no header: `prelude.cuh` is prepended to each file.

use super::driver::{Gpu, NAME, check};
use super::facts::driver_version;
use crate::device::DeviceError;
use cudarc::driver::sys;
use cudarc::nvrtc;
use smidgen_ir::DType;
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};

pub const PRELUDE: &str = include_str!("../../kernels/prelude.cuh");

/// A file of kernels, compiled as one module.
#[derive(Clone, Copy, Debug)]
pub struct KernelFile {
    pub name: &'static str,
    pub source: &'static str,
    pub kernels: &'static [&'static str],
}

/// The architecture of the Hopper-only kernels; its code runs on no later GPU.
pub const HOPPER: &str = "sm_90a";

/// The compiler options of a file. An example of `architecture` is `sm_90`.
pub fn options(architecture: &str, activations: DType) -> Vec<String> {
    let element = match activations {
        DType::Bf16 => "-DACT_BF16",
        DType::F16 => "-DACT_F16",
        DType::F32 | DType::F64 | DType::I32 | DType::U64 => "-DACT_F32",
    };
    vec![
        format!("--gpu-architecture={architecture}"),
        "-default-device".to_owned(),
        "--std=c++17".to_owned(),
        element.to_owned(),
    ]
}

/// Compiles a file to machine code.
pub fn compile(file: &KernelFile, options: &[String]) -> Result<Vec<u8>, DeviceError> {
    let refused = |what: String| DeviceError::Compile { file: file.name, what };
    let source = CString::new(format!("{PRELUDE}\n#line 1 \"{}\"\n{}", file.name, file.source))
        .map_err(|error| refused(error.to_string()))?;
    let name = CString::new(file.name).map_err(|error| refused(error.to_string()))?;
    let program =
        nvrtc::result::create_program(&source, Some(&name)).map_err(|error| refused(format!("{error:?}")))?;
    // SAFETY: the program was just created.
    let compiled = unsafe { nvrtc::result::compile_program(program, options) };
    let result = match compiled {
        // SAFETY: the program is compiled; the buffer has the size that NVRTC states.
        Ok(()) => unsafe { cubin(program) }.map_err(|error| refused(format!("{error:?}"))),
        Err(error) => {
            // SAFETY: the program exists.
            let log = unsafe { nvrtc::result::get_program_log(program) }.unwrap_or_default();
            let bytes: Vec<u8> =
                log.into_iter().map(|letter| letter as u8).take_while(|byte| *byte != 0).collect();
            Err(refused(format!("{error:?}\n{}", String::from_utf8_lossy(&bytes))))
        }
    };
    // SAFETY: the program exists and is not used again.
    let _ = unsafe { nvrtc::result::destroy_program(program) };
    result
}

unsafe fn cubin(program: nvrtc::sys::nvrtcProgram) -> Result<Vec<u8>, nvrtc::result::NvrtcError> {
    let mut bytes = 0usize;
    // SAFETY: the caller's program is compiled; the buffer has the size that NVRTC states.
    unsafe {
        nvrtc::sys::nvrtcGetCUBINSize(program, &mut bytes).result()?;
        let mut code = vec![0u8; bytes];
        nvrtc::sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast::<c_char>()).result()?;
        Ok(code)
    }
}

/// Version of the compiler, a part of the cache key.
pub fn compiler_version() -> Result<(i32, i32), DeviceError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the pointers are valid for the call.
    let code = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    match code.result() {
        Ok(()) => Ok((major, minor)),
        Err(error) => {
            Err(DeviceError::Call { device: NAME, call: "nvrtcVersion", what: format!("{error:?}") })
        }
    }
}

/// All kernels of a run, by name.
#[derive(Debug)]
pub struct Kernels {
    functions: HashMap<&'static str, Function>,
    options: Vec<String>,
    /// The options of Hopper-only files; `None` on other GPUs and in f32.
    hopper_options: Option<Vec<String>>,
    cache: Option<PathBuf>,
}

#[derive(Debug)]
struct Function {
    handle: sys::CUfunction,
    /// The limit of dynamic shared memory that was set for it, if it needs more than the default.
    shared_bytes: Cell<u32>,
}

/// Dynamic shared memory that a kernel may use without raising its limit.
const SHARED_BYTES_OF_ALL: u32 = 48 << 10;

// SAFETY: handles of one context; see `Gpu`.
unsafe impl Send for Kernels {}

impl Kernels {
    /// Holds no kernels yet; [`Kernels::require`] loads them.
    pub fn new(gpu: &Gpu, activations: DType, cache: Option<&Path>) -> Kernels {
        let (major, minor) = gpu.capability;
        let options = options(&format!("sm_{major}{minor}"), activations);
        let is_hopper = gpu.capability == (9, 0) && activations != DType::F32;
        let hopper_options = is_hopper.then(|| self::options(HOPPER, activations));
        Kernels { functions: HashMap::new(), options, hopper_options, cache: cache.map(Path::to_path_buf) }
    }

    /// Loads the files that are not loaded yet: from the cache, or compiled, all at the same time. Hopper-only files are
    /// left out on other GPUs.
    pub fn require(&mut self, files: &[KernelFile], hopper_files: &[KernelFile]) -> Result<(), DeviceError> {
        let general = files.iter().map(|file| (*file, &self.options));
        let hopper = self
            .hopper_options
            .iter()
            .flat_map(|options| hopper_files.iter().map(move |file| (*file, options)));
        let mut missing: Vec<(KernelFile, &Vec<String>)> = Vec::new();
        for (file, options) in general.chain(hopper) {
            let is_loaded = file.kernels.iter().all(|kernel| self.functions.contains_key(kernel));
            if !is_loaded && missing.iter().all(|(other, _)| other.name != file.name) {
                missing.push((file, options));
            }
        }
        let cache = self.cache.as_deref();
        let codes: Vec<Result<Vec<u8>, DeviceError>> = std::thread::scope(|scope| {
            let begun =
                missing.iter().map(|(file, options)| scope.spawn(move || cached_code(file, options, cache)));
            let begun: Vec<_> = begun.collect();
            begun.into_iter().map(|thread| thread.join().expect("compiling does not panic")).collect()
        });
        let files: Vec<KernelFile> = missing.into_iter().map(|(file, _)| file).collect();
        files.iter().zip(codes).try_for_each(|(file, code)| self.load(file, &code?))
    }

    /// Whether this GPU runs the Hopper-only kernels.
    pub fn has_hopper(&self) -> bool {
        self.hopper_options.is_some()
    }

    fn load(&mut self, file: &KernelFile, code: &[u8]) -> Result<(), DeviceError> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is machine code for this GPU, and the driver copies it.
        check(unsafe { sys::cuModuleLoadData(&mut module, code.as_ptr().cast()) }, "cuModuleLoadData")?;
        for kernel in file.kernels {
            let name = CString::new(*kernel).expect("kernels have plain names");
            let mut handle = std::ptr::null_mut();
            // SAFETY: the module was just loaded; the name ends with zero.
            let code = unsafe { sys::cuModuleGetFunction(&mut handle, module, CStr::as_ptr(&name)) };
            check(code, kernel)?;
            let function = Function { handle, shared_bytes: Cell::new(SHARED_BYTES_OF_ALL) };
            let before = self.functions.insert(*kernel, function);
            assert!(before.is_none(), "two kernels are called `{kernel}`");
        }
        Ok(())
    }

    /// A kernel, allowed to use `shared_bytes` of dynamic shared memory.
    pub fn function(&self, name: &'static str, shared_bytes: u32) -> Result<sys::CUfunction, DeviceError> {
        let function = self.functions.get(name).unwrap_or_else(|| panic!("no kernel `{name}`"));
        if shared_bytes > function.shared_bytes.get() {
            use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MOST;
            // SAFETY: the function belongs to a loaded module.
            let code = unsafe { sys::cuFuncSetAttribute(function.handle, MOST, shared_bytes as i32) };
            check(code, name)?;
            function.shared_bytes.set(shared_bytes);
        }
        Ok(function.handle)
    }
}

/// Loads the code from the cache, or compiles and caches it. A cache that cannot be written is ignored.
fn cached_code(file: &KernelFile, options: &[String], cache: Option<&Path>) -> Result<Vec<u8>, DeviceError> {
    let Some(folder) = cache else { return compile(file, options) };
    let path = folder.join(cache_name(file, options, compiler_version()?, driver_version()?));
    if let Ok(code) = std::fs::read(&path)
        && !code.is_empty()
    {
        return Ok(code);
    }
    let code = compile(file, options)?;
    let _ = write_whole(&path, &code);
    Ok(code)
}

/// The name of a file of code, which differs in all that the code depends on.
fn cache_name(file: &KernelFile, options: &[String], compiler: (i32, i32), driver: i32) -> String {
    let versions = format!("{compiler:?} {driver}");
    let parts = [PRELUDE, file.source, &options.join(" "), &versions];
    format!("{}-{:016x}.cubin", file.name, hash(&parts))
}

/// Writes to a temporary name and renames, so that no process reads half a file.
pub fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().map_or_else(PathBuf::new, Path::to_path_buf);
    std::fs::create_dir_all(&folder)?;
    let temporary = path.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&temporary, bytes)?;
    std::fs::rename(&temporary, path)
}

/// FNV-1a over all parts, with a separator after each.
pub fn hash(parts: &[&str]) -> u64 {
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0xff]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_cached_by_all_that_it_depends_on() {
        let file = KernelFile { name: "act.cu", source: "a", kernels: &[] };
        let options = options("sm_90", DType::Bf16);
        let name = cache_name(&file, &options, (12, 8), 12080);
        assert_eq!(name, cache_name(&file, &options, (12, 8), 12080));
        let others = [
            cache_name(&KernelFile { source: "b", ..file }, &options, (12, 8), 12080),
            cache_name(&file, &self::options("sm_80", DType::Bf16), (12, 8), 12080),
            cache_name(&file, &options, (12, 9), 12080),
            cache_name(&file, &options, (12, 8), 13000),
        ];
        assert!(others.iter().all(|other| *other != name && other.starts_with("act.cu-")), "{others:?}");
    }
}

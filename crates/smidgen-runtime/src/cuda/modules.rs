//! Kernels: compiled for this GPU when a run needs them, and cached on disk.
//!
//! NVRTC compiles each file in a fraction of a second. The machine code is cached under a hash of source, options,
//! compiler version and driver version (`kernel_cache.rs`). Only NVRTC has to be installed, and no header files:
//! `prelude.cuh` is prepended to each file.
//! For tests, the kernels of an older GPU also run on a newer one: NVRTC then makes PTX, which the driver compiles.

use super::compiler::{Compiler, compiler_version};
use super::driver::{Gpu, check};
use super::facts::driver_version;
use super::gpu_generation::{Capability, Generation, most_shared_bytes};
use super::kernel_cache::{KernelCache, hash};
use crate::device::DeviceError;
use cudarc::driver::sys;
use cudarc::nvrtc;
use smidgen_ir::DType;
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::path::Path;

pub const PRELUDE: &str = include_str!("../../kernels/prelude.cuh");

/// A file of kernels, compiled as one module.
#[derive(Clone, Copy, Debug)]
pub struct KernelFile {
    pub name: &'static str,
    pub source: &'static str,
    pub kernels: &'static [&'static str],
}

/// The architecture of the Hopper-only kernels, whose code does not run on later GPUs.
pub const HOPPER: &str = "sm_90a";

/// The compiler options of a file. An example of `architecture` is `sm_90`; `compute_75` makes PTX.
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

/// Compiles a file to machine code, or to PTX that ends with a zero byte.
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
        Ok(()) => unsafe { code_of(program) }.map_err(|error| refused(format!("{error:?}"))),
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

unsafe fn code_of(program: nvrtc::sys::nvrtcProgram) -> Result<Vec<u8>, nvrtc::result::NvrtcError> {
    let mut bytes = 0usize;
    // SAFETY: the caller's program is compiled; the buffer has the size that NVRTC states.
    unsafe {
        nvrtc::sys::nvrtcGetCUBINSize(program, &mut bytes).result()?;
        // Virtual architectures have no machine code.
        let is_ptx = bytes == 0;
        if is_ptx {
            nvrtc::sys::nvrtcGetPTXSize(program, &mut bytes).result()?;
        }
        let mut code = vec![0u8; bytes];
        let to = code.as_mut_ptr().cast::<c_char>();
        if is_ptx {
            nvrtc::sys::nvrtcGetPTX(program, to).result()?
        } else {
            nvrtc::sys::nvrtcGetCUBIN(program, to).result()?
        }
        Ok(code)
    }
}

/// All kernels of a run, by name.
#[derive(Debug)]
pub struct Kernels {
    functions: HashMap<&'static str, Function>,
    options: Vec<String>,
    /// The options of Hopper-only files; `None` on other GPUs and in f32.
    hopper_options: Option<Vec<String>>,
    generation: Generation,
    most_shared_bytes: u32,
    cache: Option<KernelCache>,
}

#[derive(Debug)]
struct Function {
    handle: sys::CUfunction,
    /// The current limit of its dynamic shared memory.
    shared_bytes: Cell<u32>,
}

/// Dynamic shared memory that every kernel may use without raising its limit.
const SHARED_BYTES_OF_ALL: u32 = 48 << 10;

// SAFETY: handles of one context; see `Gpu`.
unsafe impl Send for Kernels {}

impl Kernels {
    /// Loads no kernels yet; [`Kernels::require`] does. They are compiled for `capability`, which is the GPU's own or a
    /// lower one.
    pub fn new(
        gpu: &Gpu,
        capability: Capability,
        generation: Generation,
        activations: DType,
        cache: Option<&Path>,
    ) -> Result<Kernels, DeviceError> {
        let target = Compiler::query()?.target(&gpu.name, gpu.capability, capability)?;
        let mut options = options(&target.architecture, activations);
        options.extend(target.definition);
        let is_hopper = capability == (9, 0) && gpu.capability == capability && activations != DType::F32;
        let hopper_options = is_hopper.then(|| self::options(HOPPER, activations));
        let cache = cache.map(KernelCache::new);
        let most_shared_bytes = most_shared_bytes(capability, generation);
        Ok(Kernels {
            functions: HashMap::new(),
            options,
            hopper_options,
            generation,
            most_shared_bytes,
            cache,
        })
    }

    /// Loads the files that are not loaded yet, from the cache or compiled in parallel. Hopper-only files are ignored
    /// on other GPUs.
    pub fn require(&mut self, files: &[KernelFile], hopper_files: &[KernelFile]) -> Result<(), DeviceError> {
        let general = files.iter().map(|file| (*file, self.options.clone()));
        let hopper = self.hopper_options.iter();
        let hopper = hopper.flat_map(|options| hopper_files.iter().map(|file| (*file, options.clone())));
        let mut missing: Vec<(KernelFile, Vec<String>)> = Vec::new();
        for (file, options) in general.chain(hopper) {
            let is_loaded = file.kernels.iter().all(|kernel| self.functions.contains_key(kernel));
            if !is_loaded && missing.iter().all(|(other, _)| other.name != file.name) {
                missing.push((file, options));
            }
        }
        let cache = self.cache.as_ref();
        let codes: Vec<Result<Code, DeviceError>> = std::thread::scope(|scope| {
            let begun =
                missing.iter().map(|(file, options)| scope.spawn(move || cached_code(file, options, cache)));
            let begun: Vec<_> = begun.collect();
            begun.into_iter().map(|thread| thread.join().expect("compiling does not panic")).collect()
        });
        for ((file, options), code) in missing.into_iter().zip(codes) {
            let code = code?;
            match self.load(&file, &code.bytes) {
                // The cached file does not fit this driver, or is not what its name says.
                Err(_) if code.is_cached => {
                    let bytes = compile(&file, &options)?;
                    self.load(&file, &bytes)?;
                    if let Some(cache) = &self.cache {
                        cache.write(&cache_name_here(&file, &options)?, &bytes);
                    }
                }
                loaded => loaded?,
            }
        }
        Ok(())
    }

    /// The reason why compiled kernels could not be cached, and a remedy.
    pub fn cache_failure(&self) -> Option<String> {
        self.cache.as_ref().and_then(KernelCache::failure)
    }

    /// Shared memory that a block may use.
    pub fn most_shared_bytes(&self) -> u32 {
        self.most_shared_bytes
    }

    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Whether this GPU runs the Hopper-only kernels.
    pub fn has_hopper(&self) -> bool {
        self.hopper_options.is_some()
    }

    fn load(&mut self, file: &KernelFile, code: &[u8]) -> Result<(), DeviceError> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is machine code for this GPU or PTX that ends with a zero byte, and the driver copies it.
        let status = unsafe { sys::cuModuleLoadData(&mut module, code.as_ptr().cast()) };
        if let Err(error) = check(status, "cuModuleLoadData") {
            return Err(explain_load(error, compiler_version()?, driver_version()?));
        }
        let mut found = Vec::with_capacity(file.kernels.len());
        for kernel in file.kernels {
            let name = CString::new(*kernel).expect("kernels have plain names");
            let mut handle = std::ptr::null_mut();
            // SAFETY: the module was just loaded; the name ends with zero.
            let code = unsafe { sys::cuModuleGetFunction(&mut handle, module, CStr::as_ptr(&name)) };
            check(code, kernel)?;
            found.push((*kernel, Function { handle, shared_bytes: Cell::new(SHARED_BYTES_OF_ALL) }));
        }
        for (kernel, function) in found {
            let before = self.functions.insert(kernel, function);
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

struct Code {
    bytes: Vec<u8>,
    is_cached: bool,
}

/// Loads the code from the cache, or compiles and caches it.
fn cached_code(
    file: &KernelFile,
    options: &[String],
    cache: Option<&KernelCache>,
) -> Result<Code, DeviceError> {
    let Some(cache) = cache else {
        return Ok(Code { bytes: compile(file, options)?, is_cached: false });
    };
    let name = cache_name_here(file, options)?;
    if let Some(bytes) = cache.read(&name) {
        return Ok(Code { bytes, is_cached: true });
    }
    let bytes = compile(file, options)?;
    cache.write(&name, &bytes);
    Ok(Code { bytes, is_cached: false })
}

/// Turns a failed load into an error that names the cause, if the compiler is newer than the driver.
fn explain_load(error: DeviceError, compiler: (i32, i32), driver: i32) -> DeviceError {
    let (major, minor) = (driver / 1000, driver % 1000 / 10);
    match error {
        DeviceError::Call { what, .. } if compiler > (major, minor) => {
            DeviceError::OldDriver { driver: (major, minor), compiler, what }
        }
        error => error,
    }
}

fn cache_name_here(file: &KernelFile, options: &[String]) -> Result<String, DeviceError> {
    Ok(cache_name(file, options, compiler_version()?, driver_version()?))
}

/// The name of a file in the cache. It includes a hash of everything that the code depends on.
fn cache_name(file: &KernelFile, options: &[String], compiler: (i32, i32), driver: i32) -> String {
    let versions = format!("{compiler:?} {driver}");
    let parts = [PRELUDE, file.source, &options.join(" "), &versions];
    format!("{}-{:016x}.cubin", file.name, hash(&parts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::driver::NAME;

    #[test]
    fn names_in_the_cache_depend_on_all_that_the_code_depends_on() {
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

    #[test]
    fn kernels_that_do_not_load_are_blamed_on_a_driver_older_than_the_compiler() {
        let failed = || DeviceError::Call { device: NAME, call: "cuModuleLoadData", what: "no".to_owned() };
        let explained = explain_load(failed(), (13, 0), 12_040).to_string();
        assert!(explained.contains("CUDA 12.4") && explained.contains("NVRTC 13.0"), "{explained}");
        for driver in [13_000, 13_010] {
            assert!(matches!(explain_load(failed(), (13, 0), driver), DeviceError::Call { .. }));
        }
    }
}

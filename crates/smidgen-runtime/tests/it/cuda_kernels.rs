//! Every kernel compiles for every GPU architecture that it is meant for; no GPU is needed.
//!
//! The tests need only NVRTC: `cargo test -- --ignored kernels_compile` runs them, and `scripts/test_kernels.sh`
//! installs NVRTC first. Optimization takes most of the time and rejects no source, so only the kernels in bf16 for
//! capability 9.0 are optimized. For capability 8.9, PTX that was already assembled for 8.0 is not assembled again: PTX
//! that is valid for a GPU is valid for later ones, and most of it is the same.

use cudarc::nvrtc;
use smidgen_ir::DType;
use smidgen_runtime::cuda::early::starts_early;
use smidgen_runtime::cuda::modules::{KernelFile, PRELUDE};
use smidgen_runtime::cuda::{HOPPER_KERNEL_FILES, kernel_files, libraries, modules};
use std::collections::{BTreeMap, HashSet};
use std::ffi::CString;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const ALL: &[DType] = &[DType::F32, DType::Bf16, DType::F16];

/// Compute capabilities with their types of activations; GPUs before 8.0 have no bf16. The slowest jobs come first, so
/// that all cores end at about the same time.
const ARCHITECTURES: [(u32, &[DType]); 5] =
    [(90, ALL), (120, ALL), (75, &[DType::F32, DType::F16]), (80, ALL), (89, ALL)];
/// The capability and the type of activations for which kernels are compiled with optimization, as in a run.
const OPTIMISED: (u32, DType) = (90, DType::Bf16);
const UNOPTIMISED: &str = "--Ofast-compile=max";

fn find_compiler() {
    let found = libraries::find();
    let compiler = found.iter().find(|library| library.what == "NVRTC").unwrap();
    assert!(compiler.found.is_some(), "NVRTC is missing: {}", compiler.remedy);
}

/// Kernels are looked up by name.
#[test]
fn no_two_kernels_have_the_same_name() {
    let mut names = BTreeMap::new();
    for file in kernel_files().iter().chain(&HOPPER_KERNEL_FILES) {
        for kernel in file.kernels {
            let before = names.insert(*kernel, file.name);
            assert_eq!(before, None, "`{kernel}` of {} is in another file too", file.name);
        }
    }
}

/// The output of NVRTC for a file.
struct Compiled {
    ptx: String,
    /// Zero for a virtual architecture.
    machine_code_bytes: usize,
}

/// PTX and machine code of one compilation; `modules::compile` returns only one of them.
fn compile(file: &KernelFile, options: &[String]) -> Result<Compiled, String> {
    let source = CString::new(format!("{PRELUDE}\n#line 1 \"{}\"\n{}", file.name, file.source)).unwrap();
    let name = CString::new(file.name).unwrap();
    let program = nvrtc::result::create_program(&source, Some(&name)).unwrap();
    let text = |letters: Vec<std::ffi::c_char>| {
        let bytes: Vec<u8> = letters.into_iter().map(|letter| letter as u8).collect();
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
    };
    // SAFETY: the program was created above and is destroyed last.
    unsafe {
        let result = match nvrtc::result::compile_program(program, options) {
            Ok(()) => {
                let mut machine_code_bytes = 0;
                nvrtc::sys::nvrtcGetCUBINSize(program, &mut machine_code_bytes).result().unwrap();
                let ptx = text(nvrtc::result::get_ptx(program).unwrap());
                Ok(Compiled { ptx, machine_code_bytes })
            }
            Err(error) => {
                Err(format!("{error:?}\n{}", text(nvrtc::result::get_program_log(program).unwrap())))
            }
        };
        nvrtc::result::destroy_program(program).unwrap();
        result
    }
}

/// The PTX texts that were assembled to machine code, without comments and the line that names the target.
#[derive(Default)]
struct Assembled(Mutex<HashSet<String>>);

impl Assembled {
    fn text(ptx: &str) -> String {
        let is_code = |line: &&str| !line.starts_with(".target") && !line.starts_with("//");
        ptx.lines().filter(is_code).collect::<Vec<&str>>().join("\n")
    }

    /// Compiles to PTX, and to machine code unless the same PTX was already assembled for an older GPU.
    fn compile(&self, file: &KernelFile, capability: u32, activations: DType) -> Result<Compiled, String> {
        let options = |target: &str| {
            let mut options = modules::options(&format!("{target}_{capability}"), activations);
            options.extend(((capability, activations) != OPTIMISED).then(|| UNOPTIMISED.to_owned()));
            options
        };
        if capability == 89 {
            let compiled = compile(file, &options("compute"))?;
            if self.0.lock().unwrap().contains(&Assembled::text(&compiled.ptx)) {
                return Ok(compiled);
            }
        }
        let compiled = compile(file, &options("sm"))?;
        if compiled.machine_code_bytes == 0 {
            return Err("no machine code".to_owned());
        }
        self.0.lock().unwrap().insert(Assembled::text(&compiled.ptx));
        Ok(compiled)
    }
}

/// A kernel that starts early has to wait, or it would read values that are not written yet. Code that is not optimised
/// calls the function that waits.
fn check_waits(file: &KernelFile, ptx: &str) -> Result<(), String> {
    let functions: Vec<(&str, &str)> = ptx.split(".func ").skip(1).filter_map(function_of).collect();
    let mut waiting = vec!["griddepcontrol.wait"];
    let waits = |waiting: &[&str], body: &str| waiting.iter().any(|name| body.contains(name));
    while let Some((name, _)) =
        functions.iter().find(|(name, body)| !waiting.contains(name) && waits(&waiting, body))
    {
        waiting.push(name);
    }
    for body in ptx.split(".entry ").skip(1) {
        let body = body.split(".func ").next().unwrap();
        let name = &body[..body.find('(').unwrap()];
        if starts_early(name) && !waits(&waiting, body) {
            return Err(format!("`{name}` of {} starts early and does not wait", file.name));
        }
    }
    Ok(())
}

/// The name and the body of a function of a PTX text that follows the word `.func`; `None` for a declaration.
fn function_of(text: &str) -> Option<(&str, &str)> {
    let text = text.split(".entry ").next()?;
    let (head, body) = text.split_once('{')?;
    let head = match head.trim_start().strip_prefix('(') {
        Some(result) => result.split_once(')')?.1,
        None => head,
    };
    let name = head.split('(').next()?.trim();
    (!head.contains(';')).then_some((name, body))
}

/// Runs the jobs on all cores and collects what went wrong.
fn run_all<T: Sync>(jobs: &[T], run: impl Fn(&T) -> Result<(), String> + Sync) {
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |count| count.get()) {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = run(job) {
                        wrong.lock().unwrap().push(error);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
#[ignore = "needs NVRTC"]
fn kernels_compile_for_every_architecture() {
    find_compiler();
    let mut jobs = Vec::new();
    for (capability, all_activations) in ARCHITECTURES {
        for activations in all_activations {
            jobs.extend(kernel_files().into_iter().map(|file| (file, capability, *activations)));
        }
    }
    let (assembled, waiting) = (Assembled::default(), AtomicUsize::new(0));
    run_all(&jobs, |(file, capability, activations)| {
        let at = |error| format!("{} for {capability} with {activations:?}: {error}", file.name);
        let ptx = assembled.compile(file, *capability, *activations).map_err(at)?.ptx;
        if *capability >= 90 {
            check_waits(file, &ptx)?;
            waiting.fetch_add(ptx.matches("griddepcontrol.wait").count(), Ordering::Relaxed);
        }
        Ok(())
    });
    assert!(waiting.into_inner() > 0, "no kernel waits");
}

#[test]
#[ignore = "needs NVRTC"]
fn kernels_compile_for_volta_and_for_hopper_alone() {
    find_compiler();
    let mut jobs = Vec::new();
    // Volta, with an NVRTC that no longer has it as a target.
    for activations in [DType::F32, DType::F16] {
        let mut options = modules::options("compute_75", activations);
        options.extend(["-DCAPABILITY=70", UNOPTIMISED].map(str::to_owned));
        jobs.extend(kernel_files().into_iter().map(|file| (file, options.clone())));
    }
    for activations in [DType::Bf16, DType::F16] {
        let mut options = modules::options(modules::HOPPER, activations);
        options.extend((activations != OPTIMISED.1).then(|| UNOPTIMISED.to_owned()));
        jobs.extend(HOPPER_KERNEL_FILES.into_iter().map(|file| (file, options.clone())));
    }
    run_all(&jobs, |(file, options)| match modules::compile(file, options) {
        Ok(code) if code.is_empty() => Err(format!("{} with {options:?}: no code", file.name)),
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{options:?}: {error}")),
    });
}

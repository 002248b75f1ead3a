//! Every kernel compiles for every GPU architecture that it is meant for; no GPU is needed.
//!
//! It needs only NVRTC: `cargo test -- --ignored kernels_compile` runs it, and `scripts/test_kernels.sh` installs NVRTC
//! first.

use smidgen_ir::DType;
use smidgen_runtime::cuda::early::starts_early;
use smidgen_runtime::cuda::{HOPPER_KERNEL_FILES, kernel_files, libraries, modules};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// With the types of activations; GPUs before 8.0 have no bf16.
const ARCHITECTURES: [(&str, &[DType]); 5] = [
    ("sm_75", &[DType::F32, DType::F16]),
    ("sm_80", &[DType::F32, DType::Bf16, DType::F16]),
    ("sm_89", &[DType::F32, DType::Bf16, DType::F16]),
    ("sm_90", &[DType::F32, DType::Bf16, DType::F16]),
    ("sm_120", &[DType::F32, DType::Bf16, DType::F16]),
];

fn find_compiler() {
    let found = libraries::find();
    let compiler = found.iter().find(|library| library.what == "NVRTC").unwrap();
    assert!(compiler.found.is_some(), "NVRTC is missing: {}", compiler.remedy);
}

/// A kernel is found by its name alone.
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

#[test]
#[ignore = "needs NVRTC"]
fn kernels_compile_for_every_architecture() {
    find_compiler();
    let mut jobs = Vec::new();
    for (architecture, all_activations) in ARCHITECTURES {
        for activations in all_activations {
            let options = modules::options(architecture, *activations);
            jobs.extend(kernel_files().into_iter().map(|file| (file, options.clone())));
        }
    }
    // Volta, by an NVRTC that has no such target any more.
    for activations in [DType::F32, DType::F16] {
        let mut options = modules::options("compute_75", activations);
        options.push("-DCAPABILITY=70".to_owned());
        jobs.extend(kernel_files().into_iter().map(|file| (file, options.clone())));
    }
    for activations in [DType::Bf16, DType::F16] {
        let options = modules::options(modules::HOPPER, activations);
        jobs.extend(HOPPER_KERNEL_FILES.into_iter().map(|file| (file, options.clone())));
    }
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |count| count.get()) {
            scope.spawn(|| {
                while let Some((file, options)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match modules::compile(file, options) {
                        Ok(code) => assert!(!code.is_empty(), "{} with {options:?}", file.name),
                        Err(error) => wrong.lock().unwrap().push(format!("{options:?}: {error}")),
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A kernel that starts early and does not wait would read what is not written yet.
#[test]
#[ignore = "needs NVRTC"]
fn kernels_compile_with_a_wait_if_they_start_early() {
    find_compiler();
    let options = modules::options("compute_90", DType::Bf16);
    let mut found = 0;
    for file in kernel_files() {
        if !file.kernels.iter().any(|kernel| starts_early(kernel)) {
            continue;
        }
        let code = String::from_utf8(modules::compile(&file, &options).unwrap()).unwrap();
        for body in code.split(".entry ").skip(1) {
            let name = &body[..body.find('(').unwrap()];
            let waits = body.contains("griddepcontrol.wait");
            assert!(waits || !starts_early(name), "`{name}` of {} starts early and does not wait", file.name);
            found += usize::from(waits);
        }
    }
    assert!(found > 0, "no kernel waits");
}

//! Every kernel compiles for every GPU that is meant to run it, without one being there.
//!
//! NVRTC is all it takes; where it is not installed there is nothing to compile with, and the test is left out:
//! `cargo test -- --ignored kernels_compile` runs it, and `scripts/test_kernels.sh` installs NVRTC first.

use smidgen_ir::DType;
use smidgen_runtime::cuda::{HOPPER_KERNEL_FILES, kernel_files, libraries, modules};

const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_89", "sm_90", "sm_120"];

#[test]
#[ignore = "needs NVRTC"]
fn kernels_compile_for_every_architecture() {
    let found = libraries::find();
    let compiler = found.iter().find(|library| library.what == "NVRTC").unwrap();
    assert!(compiler.found.is_some(), "NVRTC is missing: {}", compiler.remedy);
    let mut wrong = Vec::new();
    for architecture in ARCHITECTURES {
        for activations in [DType::F32, DType::Bf16, DType::F16] {
            let options = modules::options(architecture, activations);
            for file in kernel_files() {
                match modules::compile(&file, &options) {
                    Ok(code) => assert!(!code.is_empty(), "{} for {architecture}", file.name),
                    Err(error) => wrong.push(format!("{architecture}, {activations}: {error}")),
                }
            }
        }
    }
    for activations in [DType::Bf16, DType::F16] {
        let options = modules::options(modules::HOPPER, activations);
        for file in HOPPER_KERNEL_FILES {
            if let Err(error) = modules::compile(&file, &options) {
                wrong.push(format!("{}, {activations}: {error}", modules::HOPPER));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

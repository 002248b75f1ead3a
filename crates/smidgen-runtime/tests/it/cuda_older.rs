//! The kernels of Turing (7.5) and Volta (7.0), run on the newer GPU of this machine.
//!
//! The tests need a GPU: `cargo test -- --ignored cuda_of` runs them. They are the tests of `cuda_agrees.rs` in f16 and
//! f32, and attention over several tiles, whose sizes differ from those of later GPUs. They do not measure the speed of
//! an older GPU, and cuBLASLt uses the algorithms of this machine's GPU.

use crate::attention_examples::attention_subject;
use crate::audio_examples::long_attention;
use crate::cuda_agrees::{
    alone, compare, decoders_agree, examples_agree, gpu_plan, in_numbers, open_as, tolerance,
};
use crate::subject::Subject;
use smidgen_ir::{DeviceKind, Precision};
use smidgen_runtime::cuda::CudaOptions;
use smidgen_runtime::cuda::gpu_generation::Capability;
use smidgen_runtime::{Cuda, DeviceError, Executor};
use std::path::PathBuf;

const TURING: Option<Capability> = Some((7, 5));
const VOLTA: Option<Capability> = Some((7, 0));

fn examples_of(precision: Precision, capability: Option<Capability>) {
    let _alone = alone();
    examples_agree(open_as(precision, capability), precision);
}

fn decoders_of(precision: Precision, capability: Option<Capability>) {
    let _alone = alone();
    decoders_agree(open_as(precision, capability), precision);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_of_turing_agrees_on_every_example_in_f16() {
    examples_of(Precision::F16, TURING);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_of_turing_agrees_on_every_example_in_f32() {
    examples_of(Precision::F32, TURING);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_of_turing_trains_decoders_as_the_cpu_does_in_f16() {
    decoders_of(Precision::F16, TURING);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_of_turing_trains_decoders_as_the_cpu_does_in_f32() {
    decoders_of(Precision::F32, TURING);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_of_volta_agrees_on_every_example_in_f16() {
    examples_of(Precision::F16, VOLTA);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_of_volta_trains_decoders_as_the_cpu_does_in_f16() {
    decoders_of(Precision::F16, VOLTA);
}

/// Every padded head size, smaller sizes, a window and a softcap, over segments of several tiles and of less than one
/// tile. With `None` the same shapes use the kernels of the GPU's own capability.
#[test]
#[ignore = "needs a GPU"]
fn cuda_of_older_gpus_attends_over_several_tiles() {
    let _alone = alone();
    let segments = [300, 1, 130, 64, 33];
    let mut subjects = Vec::new();
    for sizes in
        [[4, 2, 64], [2, 1, 40], [2, 1, 96], [3, 1, 80], [4, 1, 128], [2, 2, 104], [2, 1, 256], [2, 2, 136]]
    {
        subjects.push(attention_subject(&segments, sizes, None, None));
    }
    subjects.push(attention_subject(&segments, [4, 2, 128], Some(70), None));
    subjects.push(attention_subject(&segments, [4, 2, 128], None, Some(0.5)));
    subjects.push(attention_subject(&segments, [2, 1, 96], Some(33), Some(0.5)));
    subjects.push(attention_subject(&segments, [2, 1, 256], Some(33), Some(0.5)));
    subjects.push(attention_subject(&segments, [2, 2, 320], None, None));
    subjects.push(attention_subject(&segments, [3, 1, 512], Some(70), Some(0.5)));
    subjects.push(attention_subject(&segments, [2, 1, 512], None, None));
    subjects.extend([(2, 64), (3, 24), (2, 19), (1, 80)].map(|(heads, size)| long_attention(heads, size)));
    let precision = Precision::F16;
    let element = DeviceKind::Cuda.activations(precision);
    for capability in [None, TURING, VOLTA] {
        let mut device = open_as(precision, capability);
        let mut wrong = Vec::new();
        for subject in &subjects {
            let want = subject.run_once(&mut subject.load(subject.roomy_plan(1), 1));
            let graph = in_numbers(&subject.graph, element);
            let on_gpu = Subject { graph: graph.clone(), ..subject.clone() };
            let mut executor = Executor::load(gpu_plan(&graph, subject.extent, precision), device).unwrap();
            let got = on_gpu.run_once(&mut executor);
            wrong.extend(compare(subject, &graph, &got, &want, tolerance(precision)));
            if on_gpu.run_once(&mut executor) != got {
                wrong.push(format!("{}: a second run gives other bytes", subject.name));
            }
            device = executor.into_device();
        }
        assert!(wrong.is_empty(), "as {capability:?}:\n  {}", wrong.join("\n  "));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_of_older_gpus_refuses_bf16_and_capabilities_without_kernels() {
    let _alone = alone();
    let open = |precision, capability| {
        let capability = Some(capability);
        Cuda::open(&CudaOptions { ordinal: 0, precision, cache: None, capability }).map(|_| ())
    };
    for (precision, capability) in
        [(Precision::Bf16, (7, 5)), (Precision::Fp8, (7, 5)), (Precision::F32, (6, 1))]
    {
        let refused = open(precision, capability);
        assert!(matches!(refused, Err(DeviceError::Capability { .. })), "{refused:?}");
    }
    let refused = open(Precision::F16, (99, 0));
    assert!(matches!(refused, Err(DeviceError::AsCapability { .. })), "{refused:?}");
}

/// One cached file has the content of another, so its hash is right but its kernels are missing. The other is cut off.
#[test]
#[ignore = "needs a GPU"]
fn cuda_recompiles_wrong_files_of_the_cache() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let open = || {
        let cache = Some(folder.path().to_path_buf());
        Cuda::open(&CudaOptions { ordinal: 0, precision: Precision::F32, cache, capability: None }).unwrap()
    };
    let file = |begin: &str| -> PathBuf {
        let mut paths = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        paths.find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(begin)).unwrap()
    };
    assert_eq!(open().cache_failure(), None);
    let (act, embed) = (std::fs::read(file("act.cu-")).unwrap(), std::fs::read(file("embed.cu-")).unwrap());
    std::fs::write(file("act.cu-"), &embed).unwrap();
    std::fs::write(file("embed.cu-"), &embed[..100]).unwrap();
    drop(open());
    assert!(std::fs::read(file("act.cu-")).unwrap() == act, "the right kernels are cached again");
    assert!(std::fs::read(file("embed.cu-")).unwrap() == embed);
}

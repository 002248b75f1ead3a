//! Generation on a GPU: its logits are those of the CPU within rounding, in the storages that `few_rows.cu` reads and in
//! one that is left to cuBLASLt, and recorded launches change no byte.
//! It needs a GPU: `cargo test -- --ignored cuda` runs it.

use crate::cuda_agrees::{alone, error, open, tolerance};
use crate::decoder::{Choice, wide, without_biases};
use crate::decoder_cache::{RUNS, begin_generation, generation_request, integers, run_pieces, write_model};
use crate::subject::Subject;
use smidgen_compile::names::input;
use smidgen_compile::{DecoderSpec, Request, compile_decode};
use smidgen_ir::{Code4, DType, DeviceKind, LayerSet, Policy, Precision, Storage};
use smidgen_runtime::{Cpu, Device, Executor};

const HEAD: &[&str] = &["q_proj", "o_proj", "up_proj", "down_proj", "lm_head"];

/// Biases, adapters and residuals on rows of whole spans; one without any; one whose rows are left to cuBLASLt.
fn choices() -> Vec<Choice> {
    let spec = DecoderSpec { vocabulary: 515, ..wide() };
    vec![
        Choice { name: "lora on everything", spec: spec.clone(), adapted: HEAD, rank: 8, ..Choice::lora() },
        Choice { name: "base alone", spec: without_biases(spec), adapted: &[], ..Choice::lora() },
        Choice { name: "odd sizes", adapted: HEAD, ..Choice::lora() },
    ]
}

fn storages() -> Vec<Option<Storage>> {
    let bnb4 = |code, double| Some(Storage::Bnb4 { code, double });
    vec![
        None,
        Some(Storage::Plain(DType::F32)),
        Some(Storage::Plain(DType::F16)),
        Some(Storage::Int8Rows),
        Some(Storage::Fp8Rows),
        bnb4(Code4::Nf4, true),
        bnb4(Code4::Nf4, false),
        bnb4(Code4::Fp4, true),
    ]
}

fn request(choice: &Choice, storage: Option<Storage>) -> Request {
    let linears = choice.spec.all_linears().into_iter().map(|linear| format!("{}.weight", linear.path));
    let storage = storage.map(|storage| linears.map(|name| (name, storage)).collect()).unwrap_or_default();
    Request { storage, ..generation_request(choice, 2) }
}

/// The logits of several runs, of three sequences in pieces and token by token.
fn generate<D: Device>(subject: &Subject, request: &Request, device: D) -> (Vec<f64>, Executor<D>) {
    let mut executor = Executor::load(compile_decode(request, &Policy::default()), device).unwrap();
    write_model(&mut executor, subject);
    begin_generation(&mut executor);
    let one_by_one = (0..7).map(|position| vec![(0, position, 1)]);
    let runs = RUNS.into_iter().map(<[_]>::to_vec).chain(one_by_one);
    let ids = integers(subject, input::IDS);
    let logits = runs.flat_map(|pieces| run_pieces(&mut executor, ids, &pieces));
    let logits: Vec<f64> = logits.map(f64::from).collect();
    (logits, executor)
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_generates_as_the_cpu_does() {
    let _alone = alone();
    let mut wrong = Vec::new();
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        let (mut plain, mut recorded) = (open(precision).without_graphs(), open(precision));
        for choice in choices() {
            let subject = choice.subject_with(LayerSet::none());
            for storage in storages() {
                let name = format!("{}, {storage:?}, {precision:?}", choice.name);
                let on_cpu = request(&choice, storage);
                let (want, _) = generate(&subject, &on_cpu, Cpu::new(2).unwrap());
                let on_gpu = Request { device: DeviceKind::Cuda, precision, ..on_cpu };
                let (got, executor) = generate(&subject, &on_gpu, plain);
                plain = executor.into_device();
                let error = error(&got, &want);
                if error.is_nan() || error > tolerance(precision) {
                    wrong.push(format!("{name}: logits differ by {error:.2e}"));
                }
                let (again, executor) = generate(&subject, &on_gpu, recorded);
                recorded = executor.into_device();
                if again != got {
                    wrong.push(format!("{name}: recorded launches give other bytes"));
                }
                if recorded.graph_launches() == 0 {
                    wrong.push(format!("{name}: nothing was launched as a graph"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} findings:\n  {}", wrong.len(), wrong.join("\n  "));
}

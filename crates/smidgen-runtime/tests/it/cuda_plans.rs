//! Plans for a GPU, checked without one: the device accepts every step of evaluation, generation and training.
//!
//! The plans cover model families, adapter forms, storages and an adapter on the head. The checks are those that the
//! device makes before a run. On a machine with a GPU, `cuda_agrees.rs` compares the results with the CPU.

use crate::decoder::{
    ALL_FUSED, ALL_LINEARS, Choice, EXTENT, LAYERS, Trained, gemma2, llama, phi3, phi4, sized,
};
use smidgen_compile::adapter::LoraModule;
use smidgen_compile::leaves::{cache_names, rounded_name};
use smidgen_compile::model::audio::AudioSpec;
use smidgen_compile::model::spec::HEAD;
use smidgen_compile::names::state;
use smidgen_compile::offloaded_weights::offload_all_weights;
use smidgen_compile::{
    AdapterForm, DecodeShape, DecoderSpec, Request, compile, compile_decode, compile_eval,
};
use smidgen_ir::{
    Block, Code4, DType, DeviceKind, Entry, LayerSet, Op, Plan, Policy, Precision, Storage, ValueId,
    ValueRole, verify,
};
use smidgen_runtime::cuda::check_step;
use smidgen_runtime::{BoundStep, DeviceError};
use std::collections::HashSet;

const SHAPE: DecodeShape = DecodeShape { slots: 3, positions: 40, cache_rows: 70, new_tokens: 16 };
const BF16: Storage = Storage::Plain(DType::Bf16);
const NF4: Storage = Storage::Bnb4 { code: Code4::Nf4, double: true };

/// Sizes that are multiples of the block size of every storage.
fn wide(spec: DecoderSpec) -> DecoderSpec {
    let audio = spec.audio.map(|audio| AudioSpec { decoder_hidden: 256, ..audio });
    sized(DecoderSpec { audio, ..spec }, 256, 512).with_attention(|_, attention| {
        (attention.heads, attention.kv_heads, attention.head_dim) = (8, 4, 32);
    })
}

/// Requests for a GPU, by name.
fn requests() -> Vec<(String, Request)> {
    let mut requests = Vec::new();
    let families = [
        ("llama", llama(), ALL_LINEARS),
        ("fused", phi3(), ALL_FUSED),
        ("gemma2", gemma2(), ALL_LINEARS),
        ("hearing", phi4(), ALL_LINEARS),
    ];
    for (family, spec, adapted) in families {
        for form in [AdapterForm::Lora, AdapterForm::Dora, AdapterForm::Fourier { reg: 0.1 }] {
            for storage in [
                BF16,
                NF4,
                Storage::Fp8Rows,
                Storage::Int8Rows,
                Storage::Gguf(Block::Q8_0),
                Storage::Gguf(Block::Q4K),
            ] {
                for precision in [Precision::Bf16, Precision::F16, Precision::F32, Precision::Fp8] {
                    let (device, spec) = (DeviceKind::Cuda, wide(spec.clone()));
                    let choice = Choice { spec, adapted, form, device, precision, ..Choice::lora() };
                    let mut request = Request { row_losses: true, ..choice.request() };
                    for linear in request.spec.linears().into_iter().filter(|linear| linear.layer.is_some()) {
                        request.storage.insert(format!("{}.weight", linear.path), storage);
                    }
                    let mut name = format!("{family} {form:?} {storage} {precision:?}");
                    if form == AdapterForm::Lora && !request.spec.head.is_tied {
                        request.adapters.push(LoraModule { path: HEAD.into(), rank: 3, scale: 0.7 });
                        name += ", the head too";
                    }
                    requests.push((name, request));
                }
            }
        }
    }
    for (family, spec) in [("llama", llama()), ("fused", phi3()), ("gemma2", gemma2())] {
        for (trained, precision) in [Trained::Everything, Trained::LastLayer]
            .into_iter()
            .flat_map(|trained| [Precision::Bf16, Precision::F32].map(|precision| (trained, precision)))
        {
            let (device, spec) = (DeviceKind::Cuda, wide(spec.clone()));
            let choice = Choice { spec, device, precision, trained, ..Choice::full() };
            let mut request = Request { row_losses: true, ..choice.request() };
            for linear in request.spec.linears().into_iter().filter(|linear| linear.layer.is_some()) {
                request.storage.insert(format!("{}.weight", linear.path), NF4);
            }
            requests.push((format!("{family} {trained:?} {precision:?}"), request));
        }
    }
    requests
}

/// Every step has exactly the workspace that the device needs.
pub fn check(name: &str, plan: &Plan) {
    assert_eq!(verify::plan(plan), Vec::<String>::new(), "{name}");
    for entry in &plan.entries {
        let extent = plan.extent_of(entry.entry);
        for index in 0..entry.steps.len() {
            let mut step = BoundStep::of(plan, entry.entry, index);
            if let Err(error) = check_step(&step, &extent) {
                panic!("{name}, {}: {error}", entry.entry);
            }
            let Some((_, bytes)) = &mut step.workspace else { continue };
            *bytes -= 1;
            let refused = matches!(check_step(&step, &extent), Err(DeviceError::Workspace { .. }));
            assert!(refused, "{name}: `{}` with one byte less is accepted", step.op.name());
        }
    }
}

#[test]
fn a_gpu_would_accept_every_step_of_an_evaluation() {
    for (name, request) in requests() {
        let plan = compile_eval(&request, &Policy::resident(LayerSet::none(), 3));
        check(&name, &plan);
        let losses = plan.leaf_named(state::ROW_LOSSES).unwrap();
        assert_eq!(plan.value(losses).ty.storage, Storage::F32, "{name}");
        rounds_every_matrix(&name, &request, &plan);
    }
}

#[test]
fn a_gpu_would_accept_every_step_of_a_generation() {
    for (name, request) in requests() {
        let request = Request { decode: Some(SHAPE), extent: SHAPE.extent(), ..request };
        let plan = compile_decode(&request, &Policy::default());
        check(&name, &plan);
        // The host reads logits as f32 in every precision. The caches have the type of activations.
        let logits = plan.value(plan.leaf_named(state::DECODED_LOGITS).unwrap());
        assert_eq!((logits.ty.storage, logits.stride), (Storage::F32, None), "{name}");
        for cache in (0..LAYERS).flat_map(cache_names) {
            let cache = plan.value(plan.leaf_named(&cache).unwrap());
            assert_eq!(cache.ty.storage, Storage::Plain(request.activations()), "{name}");
        }
        rounds_every_matrix(&name, &request, &plan);
    }
}

#[test]
fn a_gpu_would_accept_every_step_of_a_training_that_generates_too() {
    for (name, request) in requests() {
        let request = Request { dropout: 0.1, decode: Some(SHAPE), ..request };
        let policy = Policy::resident(LayerSet::first(1), 3);
        let plan = compile(&request, &policy);
        assert_eq!(plan.extent, EXTENT);
        check(&name, &plan);
        rounds_every_matrix(&name, &request, &plan);
        let policy = Policy { head_pieces: 3, ..offload_all_weights(policy, &request, 1) };
        check(&format!("{name}, streamed"), &compile(&request, &policy));
    }
}

/// `refresh` rounds trained matrices to the matmul type, unless it is f32; rows of a tied embedding are looked up in
/// f32.
fn rounds_every_matrix(name: &str, request: &Request, plan: &Plan) {
    let steps = &plan.entry(Entry::Refresh).steps;
    let rounds = steps.iter().filter(|step| matches!(step.op, Op::Round { .. })).count();
    let of_adapters = request.adapters.iter().flat_map(|module| [module.a_name(), module.b_name()]);
    let mut multiplied: Vec<String> =
        request.spec.linears().iter().map(|l| format!("{}.weight", l.path)).collect();
    multiplied.push(request.spec.head_tensor().into());
    multiplied.dedup();
    let of_base = multiplied.into_iter().filter(|name| request.trained.contains(name));
    let rounded: Vec<String> = of_adapters.chain(of_base).collect();
    if request.precision == Precision::F32 {
        assert_eq!(rounds, 0, "{name}");
        return;
    }
    assert_eq!(rounds, rounded.len(), "{name}");
    for matrix in rounded {
        let rounded = plan.leaf_named(&rounded_name(&matrix)).unwrap();
        assert!(steps.iter().any(|step| step.updates.contains(&rounded)), "{name}: {matrix}");
        let [read, original] = [rounded, plan.leaf_named(&matrix).unwrap()].map(|leaf| {
            let entries = plan.entries.iter().filter(|entry| entry.entry != Entry::Refresh);
            let steps = entries.filter(|entry| entry.entry != Entry::Update).flat_map(|entry| &entry.steps);
            let multiplies = steps.filter(|step| !matches!(step.op, Op::Embed { .. }));
            multiplies.filter(|step| step.inputs.iter().any(|input| is_of(plan, *input, leaf))).count()
        });
        assert!(read > 0 && original == 0, "{name}: {matrix} is read {read} and {original} times");
    }
}

/// Whether a value is a leaf or some of its rows.
fn is_of(plan: &Plan, value: ValueId, leaf: ValueId) -> bool {
    value == leaf || matches!(plan.value(value).role, ValueRole::Slice(slice) if slice.of == leaf)
}

fn decode_plans() -> impl Iterator<Item = (String, Plan)> {
    requests().into_iter().map(|(name, request)| {
        let request = Request { decode: Some(SHAPE), extent: SHAPE.extent(), ..request };
        (name, compile_decode(&request, &Policy::default()))
    })
}

/// Kernels that start early read their first weights before the previous kernels have ended, so no step may write one.
#[test]
fn generation_writes_no_weight() {
    for (name, plan) in decode_plans() {
        let steps = &plan.entry(Entry::Decode).steps;
        let buffer = |id: &ValueId| plan.value(*id).buffer;
        let written: HashSet<_> =
            steps.iter().flat_map(|step| step.outputs.iter().chain(&step.updates)).map(buffer).collect();
        for step in steps.iter().filter(|step| matches!(step.op, Op::Linear { .. } | Op::Logits { .. })) {
            assert!(!written.contains(&buffer(&step.inputs[1])), "{name}: {}", step.op.name());
        }
    }
}

/// The linears of one input (q, k and v) follow each other directly, with every h of their adapters computed before
/// them, so that a GPU can launch them together. Linears with adapters are launched alone if they use the memory of h
/// again.
#[test]
fn projections_of_generation_do_not_depend_on_each_other() {
    let mut together = 0;
    for (name, plan) in decode_plans().filter(|(name, _)| name.starts_with("llama")) {
        let count = plan.entry(Entry::Decode).steps.len();
        let steps: Vec<BoundStep> =
            (0..count).map(|index| BoundStep::of(&plan, Entry::Decode, index)).collect();
        let is_plain = |step: &BoundStep| matches!(step.op, Op::Linear { lora: None, .. });
        for three in steps.windows(3) {
            let [q, k, v] = three else { unreachable!("a window of three") };
            let of_one = three.iter().all(|step| is_plain(step) && step.inputs[0] == q.inputs[0]);
            if of_one {
                assert!(k.is_independent_of(q) && v.is_independent_of(q) && v.is_independent_of(k), "{name}");
                together += 1;
            }
        }
        for (index, step) in steps.iter().enumerate() {
            if let Op::Linear { bias, lora: Some(_) } = step.op {
                let h = step.inputs[2 + usize::from(bias)];
                let writer = steps[..index].iter().rfind(|before| before.outputs.first() == Some(&h));
                assert!(!step.is_independent_of(writer.expect("h is computed")), "{name}");
            }
        }
    }
    assert!(together > 0, "no three linears of one input");
}

//! The CUDA device against the CPU: the same examples, and whole decoders over several updates.
//!
//! The tests need a GPU: `cargo test -- --ignored cuda` runs them. In f32 the devices differ by the order of sums.
//! 16-bit activations are rounded each time they are stored, and the tolerances allow for it: rounding to 8 bits of
//! mantissa is an error of 4e-3, to 11 bits 5e-4, and gradients are rounded a dozen times.
//! An error is that of a whole tensor, ‖got - want‖ / ‖want‖.

use crate::decoder::{
    ALL_FUSED, Choice, EXTENT, LAYERS, Trained, gemma2, gemma3, leaf_named, llama, padded, phi3, sized,
    without_biases,
};
use crate::examples::{self, Proof};
use crate::numbers::{decode_doubles, decode_reals};
use crate::offload_changes_nothing::{by_policy, outcome_of, policies};
use crate::subject::{Outcome, Scalar, Subject, plain_request, plan_with, roomy};
use smidgen_compile::names::state;
use smidgen_compile::request::{Master, Moments};
use smidgen_compile::{AdapterForm, Request, TrainedBiases};
use smidgen_ir::{
    DType, DeviceKind, Dim, Entry, Extent, Graph, LayerSet, LeafKind, Op, Plan, Policy, Precision, Space,
    Storage, Type,
};
use smidgen_runtime::cpu::convert::{bf16_to_f32, f16_to_f32};
use smidgen_runtime::cuda::CudaOptions;
use smidgen_runtime::cuda::gpu_generation::Capability;
use smidgen_runtime::{Cpu, Cuda, Device, Executor};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Largest error of a tensor.
pub fn tolerance(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 2e-5,
        Precision::Bf16 => 4e-2,
        Precision::F16 => 6e-3,
        Precision::Fp8 => 0.2,
    }
}

/// Lets one test run at a time: others would change the measured memory.
pub fn alone() -> MutexGuard<'static, ()> {
    static GPU: Mutex<()> = Mutex::new(());
    GPU.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn open(precision: Precision) -> Cuda {
    open_as(precision, None)
}

/// Opens the device with the kernels of an older GPU, if a capability is given.
pub fn open_as(precision: Precision, capability: Option<Capability>) -> Cuda {
    let cache = Some(std::env::temp_dir().join("smidgen-test-kernels"));
    Cuda::open(&CudaOptions { ordinal: 0, precision, cache, capability }).unwrap()
}

/// The graph with another type of activations: embeddings, everything computed from them, and row inputs. What an objective
/// is told of each sample stays f32.
pub fn in_numbers(graph: &Graph, element: DType) -> Graph {
    let mut graph = graph.clone();
    for value in &mut graph.values {
        let is_input = value.leaf().is_some_and(|leaf| leaf.kind == LeafKind::Input);
        let is_rows =
            matches!(value.ty.shape.0.as_slice(), [Dim::Tokens | Dim::Rows | Dim::Audio(_), Dim::Const(_)]);
        if is_input && is_rows && value.name != "before" && value.ty.storage == Storage::F32 {
            value.ty.storage = Storage::Plain(element);
        }
    }
    let mut entries = std::mem::take(&mut graph.entries);
    for node in entries.iter_mut().flat_map(|(_, nodes)| nodes) {
        if let Op::Embed { element: own, .. } = &mut node.op {
            *own = element;
        }
        let types = |ids: &[smidgen_ir::ValueId]| -> Vec<Type> {
            ids.iter().map(|id| graph.value(*id).ty.clone()).collect()
        };
        let (inputs, updates) = (types(&node.inputs), types(&node.updates));
        let outputs = node.op.infer(&inputs.iter().collect::<Vec<_>>(), &updates.iter().collect::<Vec<_>>());
        for (id, ty) in node.outputs.iter().zip(outputs.unwrap()) {
            graph.values[id.index()].ty = ty;
        }
    }
    graph.entries = entries;
    graph
}

pub fn reals(bytes: &[u8], storage: Storage) -> Vec<f64> {
    let halves = || bytes.chunks_exact(2).map(|bytes| u16::from_le_bytes(bytes.try_into().unwrap()));
    match storage {
        Storage::Plain(DType::F32) => decode_reals(bytes).into_iter().map(f64::from).collect(),
        Storage::Plain(DType::F64) => decode_doubles(bytes),
        Storage::Plain(DType::Bf16) => halves().map(|bits| f64::from(bf16_to_f32(bits))).collect(),
        Storage::Plain(DType::F16) => halves().map(|bits| f64::from(f16_to_f32(bits))).collect(),
        other => panic!("no reals in {other}"),
    }
}

/// ‖got - want‖ / ‖want‖.
pub fn error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(got, want)| got - want));
    difference / norm(&mut want.iter().copied()).max(1e-30)
}

pub fn compare(subject: &Subject, gpu: &Graph, got: &Outcome, want: &Outcome, most: f64) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut check = |name: &str, got: &[f64], want: &[f64]| {
        let error = error(got, want);
        if error.is_nan() || error > most {
            wrong.push(format!("{}: `{name}` differs by {error:.2e}", subject.name));
        }
    };
    for (name, want) in &want.gradients {
        check(name, &reals(&got.gradients[name], Storage::F32), &reals(want, Storage::F32));
    }
    let result = match &subject.scalar {
        Scalar::Dot { y, .. } => *y,
        Scalar::Loss { leaf, .. } => *leaf,
    };
    let (own, other) = (subject.graph.value(result).ty.storage, gpu.value(result).ty.storage);
    check("the result", &reals(&got.result, other), &reals(&want.result, own));
    wrong
}

pub fn gpu_plan(graph: &Graph, extent: Extent, precision: Precision) -> Plan {
    let request = Request { device: DeviceKind::Cuda, precision, extent: roomy(extent), ..plain_request() };
    plan_with(graph, &request)
}

/// Runs every example that is a graph on both devices.
pub fn examples_agree(mut device: Cuda, precision: Precision) {
    let element = DeviceKind::Cuda.activations(precision);
    let (mut wrong, mut ran) = (Vec::new(), 0);
    for example in examples::all() {
        let Proof::Gradient(subject, _) = example.proof else { continue };
        // The kernels of LS-LoRA need a rounded copy of B, which only a whole decoder has.
        let nodes = subject.graph.entries.iter().flat_map(|(_, nodes)| nodes);
        let rounds = nodes.clone().any(|node| matches!(node.op, Op::Fourier { .. }));
        if rounds && precision != Precision::F32 {
            continue;
        }
        let want = subject.run_once(&mut subject.load(subject.roomy_plan(1), 1));
        let graph = in_numbers(&subject.graph, element);
        let on_gpu = Subject { graph: graph.clone(), ..subject.clone() };
        let mut executor = Executor::load(gpu_plan(&graph, subject.extent, precision), device).unwrap();
        let got = on_gpu.run_once(&mut executor);
        wrong.extend(compare(&subject, &graph, &got, &want, tolerance(precision)));
        if on_gpu.run_once(&mut executor) != got {
            wrong.push(format!("{}: a second run gives other bytes", subject.name));
        }
        device = executor.into_device();
        ran += 1;
    }
    println!("{ran} examples in {}", precision.name());
    assert!(wrong.is_empty(), "{} findings:\n  {}", wrong.len(), wrong.join("\n  "));
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_agrees_on_every_example_in_f32() {
    let _alone = alone();
    examples_agree(open(Precision::F32), Precision::F32);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_agrees_on_every_example_in_bf16() {
    let _alone = alone();
    examples_agree(open(Precision::Bf16), Precision::Bf16);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_agrees_on_every_example_in_f16() {
    let _alone = alone();
    examples_agree(open(Precision::F16), Precision::F16);
}

fn choices() -> Vec<Choice> {
    let with = |name, choice: Choice| Choice { name, ..choice };
    let of = |name, spec| Choice { name, spec, ..Choice::lora() };
    // With rows aligned to 16 bytes, adapters are adjacent to their weights and use their own kernels.
    let aligned = |spec| sized(spec, 32, 48);
    let wide =
        |name, rank, choice: Choice| Choice { name, rank, spec: aligned(choice.spec.clone()), ..choice };
    let form = |form| Choice { form, ..Choice::lora() };
    vec![
        wide("aligned rank 8", 8, Choice::lora()),
        wide("aligned rank 16 without biases", 16, of("", without_biases(llama()))),
        wide("aligned rank 24", 24, Choice::lora()),
        wide("aligned rank 72", 72, Choice::lora()),
        wide("aligned fused", 16, Choice::fused()),
        wide("aligned phi3", 8, Choice { adapted: ALL_FUSED, ..of("", phi3()) }),
        wide("aligned gemma2", 16, of("", gemma2())),
        wide("aligned dora", 16, form(AdapterForm::Dora)),
        wide("aligned ls-lora", 16, form(AdapterForm::Fourier { reg: 0.1 })),
        wide("aligned dropout", 8, Choice { dropout: 0.3, ..Choice::lora() }),
        Choice::lora(),
        Choice::fused(),
        Choice { adapted: ALL_FUSED, ..of("phi3", phi3()) },
        of("gemma2", gemma2()),
        of("gemma3", gemma3()),
        with("dora", Choice { form: AdapterForm::Dora, ..Choice::lora() }),
        with("dora with dropout", Choice { form: AdapterForm::Dora, dropout: 0.2, ..Choice::lora() }),
        with("ls-lora", Choice { form: AdapterForm::Fourier { reg: 0.1 }, ..Choice::lora() }),
        with("dropout", Choice { dropout: 0.3, ..Choice::lora() }),
        with("trained biases", Choice { biases: TrainedBiases::All, ..Choice::lora() }),
        Choice::with_audio(),
        Choice { name: "hearing with dropout", dropout: 0.2, ..Choice::with_audio() },
        with("8-bit moments", Choice { moments: Moments::Bits8, ..Choice::lora() }),
        with("everything trained", Choice { trained: Trained::Everything, ..Choice::lora() }),
        with("full", Choice::full()),
        with("full, last layer", Choice { trained: Trained::LastLayer, ..Choice::full() }),
        with("full, tied", Choice { spec: gemma3(), ..Choice::full() }),
        with("full, tied, with padding", padded(Choice { spec: gemma3(), ..Choice::full() })),
        with("full, fused", Choice { adapted: &[], trained: Trained::Everything, ..Choice::fused() }),
        with("full, aligned", Choice { spec: aligned(llama()), ..Choice::full() }),
        with("full in 8 bits", Choice { moments: Moments::Bits8, ..Choice::full() }),
        with("the head in pieces", Choice { head_pieces: 3, ..Choice::lora() }),
        Choice { head_pieces: 2, ..wide("aligned gemma2, the head in pieces", 8, of("", gemma2())) },
    ]
}

/// The losses of three updates, and the trained leaves after them.
fn train<D: Device>(subject: &Subject, executor: &mut Executor<D>) -> (Vec<f64>, Vec<(String, Vec<f64>)>) {
    subject.write_contents(executor);
    let loss = leaf_named(&subject.graph, state::REPORT);
    let mut losses = Vec::new();
    for _ in 0..3 {
        for _ in 0..2 {
            executor.run(Entry::MicroStep, &subject.extent).unwrap();
        }
        executor.run(Entry::Update, &subject.extent).unwrap();
        executor.run(Entry::Refresh, &subject.extent).unwrap();
        losses.push(decode_doubles(&subject.read_bytes(executor, loss))[0]);
    }
    let trained = subject.trained().into_iter().map(|(leaf, _)| {
        let value = subject.graph.value(leaf);
        let bytes = subject.read_bytes(executor, leaf);
        (value.name.clone(), reals(&bytes, value.ty.storage))
    });
    let trained = trained.collect();
    (losses, trained)
}

pub fn decoders_agree(mut device: Cuda, precision: Precision) {
    let mut wrong = Vec::new();
    for choice in choices() {
        let mut kept = None;
        for layers in [LayerSet::none(), LayerSet::first(2)] {
            let cpu = choice.subject_with(layers.clone());
            let mut executor = Executor::load(cpu.roomy_plan(2), Cpu::new(2).unwrap()).unwrap();
            let want = train(&cpu, &mut executor);
            let gpu_choice = Choice { device: DeviceKind::Cuda, precision, ..choice.clone() };
            let mut gpu = gpu_choice.subject_with(layers);
            // Compared by name: leaves that only one device has shift the ids of the others.
            for (leaf, content) in &mut gpu.contents {
                let name = &gpu.graph.value(*leaf).name;
                let same = cpu.contents.iter().find(|(id, _)| cpu.graph.value(*id).name == *name);
                *content = same.unwrap_or_else(|| panic!("only the GPU has `{name}`")).1.clone();
            }
            let request = Request { extent: roomy(EXTENT), ..gpu_choice.request() };
            let mut executor = Executor::load(plan_with(&gpu.graph, &request), device).unwrap();
            let got = train(&gpu, &mut executor);
            let most = tolerance(precision);
            let error_of_losses = error(&got.0, &want.0);
            if error_of_losses.is_nan() || error_of_losses > most {
                wrong.push(format!("{}: losses {:?} for {:?}", choice.name, got.0, want.0));
            }
            // An update divides a gradient by its own size, so noise in a small gradient is amplified.
            let most = most
                * match precision {
                    Precision::F32 => 20.0,
                    Precision::Bf16 | Precision::Fp8 => 1.0,
                    Precision::F16 => 4.0,
                };
            for ((name, got), (_, want)) in got.1.iter().zip(&want.1) {
                let error = error(got, want);
                // Apart from the rotation, a bias of keys shifts all scores of a query equally, so its gradient nearly
                // cancels.
                let is_of_keys = name.ends_with("k_proj.bias") || name.ends_with("qkv_proj.bias");
                let most = if is_of_keys { 10.0 * most } else { most };
                if error.is_nan() || error > most {
                    wrong.push(format!("{}: `{name}` differs by {error:.2e}", choice.name));
                }
            }
            let before = kept.get_or_insert_with(|| got.clone());
            if *before != got {
                wrong.push(format!("{}: recomputed layers give other bytes", choice.name));
            }
            if train(&gpu, &mut executor) != got {
                wrong.push(format!("{}: a second run gives other bytes", choice.name));
            }
            device = executor.into_device();
        }
    }
    assert!(wrong.is_empty(), "{} findings:\n  {}", wrong.len(), wrong.join("\n  "));
}

/// Trains on micro-batches of several sizes, and returns the number of graph launches.
fn train_raggedly(choice: &Choice, device: Cuda) -> (Vec<(String, Vec<u8>)>, u64, Cuda) {
    // Parts of the micro-batch that contain whole segments, with their supervised rows.
    let parts = [
        EXTENT,
        Extent { tokens: 8, rows: 5, segments: 2, audio: 0 },
        Extent { tokens: 7, rows: 4, segments: 1, audio: 0 },
    ];
    let subject = choice.subject_with(LayerSet::first(1));
    let request = Request { extent: roomy(EXTENT), ..choice.request() };
    let mut executor = Executor::load(plan_with(&subject.graph, &request), device).unwrap();
    subject.write_contents(&mut executor);
    for extent in parts.iter().chain(&parts[1..]).chain(&parts[1..]).chain(&parts) {
        executor.run(Entry::MicroStep, extent).unwrap();
        executor.run(Entry::Update, &EXTENT).unwrap();
        executor.run(Entry::Refresh, &EXTENT).unwrap();
    }
    let read = |(leaf, _)| (subject.graph.value(leaf).name.clone(), subject.read_bytes(&mut executor, leaf));
    let trained = subject.trained().into_iter().map(read).collect();
    let launches = executor.device().graph_launches();
    (trained, launches, executor.into_device())
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_gives_the_same_bytes_whether_launches_are_recorded() {
    let _alone = alone();
    for precision in [Precision::F32, Precision::Bf16] {
        let (mut recording, mut single) = (open(precision), open(precision).without_graphs());
        let mut wrong = Vec::new();
        for choice in choices() {
            let choice = Choice { device: DeviceKind::Cuda, precision, ..choice };
            let (want, none, back) = train_raggedly(&choice, single);
            single = back;
            // Otherwise each device would time the matmul algorithms and might choose others.
            assert!(recording.adopt_algorithms(&single.chosen_algorithms().unwrap()));
            let (got, launches, back) = train_raggedly(&choice, recording);
            recording = back;
            assert_eq!(none, 0);
            // There is one graph before and one after the head, for each of ten micro-batches. Eight of these have no
            // audio: without the audio kernels the launches do not fit the captured graph.
            let fewest = if choice.spec.audio.is_some() { 10 } else { 20 };
            if got != want || launches < fewest {
                wrong.push(format!("{}: same bytes {}, {launches} graphs", choice.name, got == want));
            }
        }
        assert!(wrong.is_empty(), "{} findings:\n  {}", wrong.len(), wrong.join("\n  "));
    }
}

/// Offloading and the order of the layers change no byte. That includes fp8, where rounded gradients are scaled by
/// fetched weights. LoRA with offloaded bf16 weights is skipped: next to a resident weight, adapter and weight are one
/// matmul, but with a fetched weight they are two matmuls, each rounded.
#[test]
#[ignore = "needs a GPU"]
fn cuda_gives_the_same_bytes_wherever_things_are() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let master = Master::Bf16 { seed: 5 };
    let on_gpu = |choice: Choice| Choice { device: DeviceKind::Cuda, precision: Precision::Bf16, ..choice };
    let choices = [
        Choice { device: DeviceKind::Cuda, ..Choice::fp8() },
        on_gpu(Choice::lora()),
        on_gpu(Choice { name: "full", ..Choice::full() }),
        on_gpu(Choice { name: "full in 8 bits", moments: Moments::Bits8, ..Choice::full() }),
        on_gpu(Choice { name: "full, not clipped", clips: false, ..Choice::full() }),
        on_gpu(Choice { name: "full in bf16", master, ..Choice::full() }),
        on_gpu(Choice { name: "full in bf16 and 8 bits", master, moments: Moments::Bits8, ..Choice::full() }),
    ];
    let mut wrong = Vec::new();
    for choice in choices {
        let mut device = open(choice.precision).with_spill_folder(folder.path().into());
        let is_one_matmul = !choice.adapted.is_empty() && choice.precision != Precision::Fp8;
        let layers = LayerSet::first(LAYERS);
        let run = |subject: &Subject, device: Cuda| {
            let request = Request { extent: roomy(EXTENT), ..choice.request() };
            let mut executor = Executor::load(plan_with(&subject.graph, &request), device).unwrap();
            (outcome_of(subject, &mut executor), executor.into_device())
        };
        let (want, back) = run(&choice.subject_with(layers.clone()), device);
        device = back;
        for policy in policies() {
            let fetches_weights = !policy.offloaded_weights.is_empty() || policy.tables_offloaded;
            if fetches_weights && is_one_matmul {
                continue;
            }
            let places =
                [(Space::Host, Space::Device), (Space::Host, Space::Host), (Space::Disk, Space::Device)];
            for (space, updates) in places {
                let offloaded_to = |own: Space| if own == Space::Device { own } else { space };
                let policy = Policy {
                    recompute: layers.clone(),
                    weights: offloaded_to(policy.weights),
                    activations: offloaded_to(policy.activations),
                    optimizer_state: offloaded_to(policy.optimizer_state),
                    gradients: offloaded_to(policy.gradients),
                    updates,
                    ..policy.clone()
                };
                let (got, back) = run(&by_policy(&choice, &policy), device);
                device = back;
                if got != want {
                    wrong.push(format!("{}: {policy:?}: losses {:?} for {:?}", choice.name, got.0, want.0));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} findings:\n  {}", wrong.len(), wrong.join("\n  "));
}

/// The host enqueues steps with their inputs and reports without waiting, and device memory does not grow after the
/// first step.
#[test]
#[ignore = "needs a GPU"]
fn cuda_enqueues_steps_without_waiting_or_growing() {
    let _alone = alone();
    let choice = Choice { device: DeviceKind::Cuda, precision: Precision::Bf16, ..Choice::lora() };
    let subject = choice.subject_with(LayerSet::first(1));
    let request = Request { extent: roomy(EXTENT), ..choice.request() };
    let mut executor = Executor::load(plan_with(&subject.graph, &request), open(Precision::Bf16)).unwrap();
    subject.write_contents(&mut executor);
    let report = leaf_named(&subject.graph, state::REPORT);
    let enqueue = |executor: &mut Executor<Cuda>, steps: usize| {
        let before = executor.device().waits();
        for _ in 0..steps {
            subject.write_contents(executor);
            executor.run(Entry::MicroStep, &subject.extent).unwrap();
            executor.run(Entry::Update, &subject.extent).unwrap();
            executor.run(Entry::Refresh, &subject.extent).unwrap();
            executor.begin_read(0, report, 32).unwrap();
        }
        let waited = executor.device().waits() - before;
        executor.device_mut().wait().unwrap();
        (waited, executor.device_mut().memory().unwrap().bytes)
    };
    let (_, first_bytes) = enqueue(&mut executor, 1);
    let (waited, bytes) = enqueue(&mut executor, 20);
    assert_eq!((waited, bytes), (0, first_bytes));
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_trains_decoders_as_the_cpu_does_in_f32() {
    let _alone = alone();
    decoders_agree(open(Precision::F32), Precision::F32);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_trains_decoders_as_the_cpu_does_in_bf16() {
    let _alone = alone();
    decoders_agree(open(Precision::Bf16), Precision::Bf16);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_trains_decoders_as_the_cpu_does_in_f16() {
    let _alone = alone();
    decoders_agree(open(Precision::F16), Precision::F16);
}

//! Generation on a GPU against the CPU.
//!
//! Logits agree within rounding, for the storages that `few_rows.cu` reads and for one that cuBLASLt multiplies. CUDA
//! graphs change no byte. Attention over long sequences, in pieces, agrees too.
//! The tests need a GPU: `cargo test -- --ignored cuda` runs them.

use crate::cuda_agrees::{alone, error, open, reals, tolerance};
use crate::decoder::{Choice, wide, without_biases};
use crate::decoder_cache::{RUNS, begin_generation, generation_request, integers, run_pieces, write_model};
use crate::numbers::{Content, encode, random_reals};
use crate::subject::{Subject, plain_request, plan_with};
use smidgen_compile::names::input;
use smidgen_compile::{DecoderSpec, Request, compile_decode};
use smidgen_ir::{
    AttentionShape, Code4, DType, DeviceKind, Dim, Entry, Extent, Graph, LayerSet, LeafKind, Op, Phase,
    Policy, Precision, Shape, Storage, Type,
};
use smidgen_runtime::{Cpu, Device, Executor};

const HEAD: &[&str] = &["q_proj", "o_proj", "up_proj", "down_proj", "lm_head"];

/// One with biases, adapters and residuals, one without any of these, and one whose rows are left to cuBLASLt.
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

/// The logits of several runs: three sequences in pieces, and one token by token.
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
                // Otherwise each device would time the matmul algorithms and might choose others.
                assert!(recorded.adopt_algorithms(&plain.chosen_algorithms().unwrap()));
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

/// The most positions of a sequence: three pieces of cached positions, of which the last is not full.
const POSITIONS: usize = 700;
/// Positions of queries at both ends of a piece and inside: more queries than several blocks share.
const QUERIES: [usize; 10] = [0, 1, 255, 256, 257, 511, 512, 600, 690, 699];

/// Attention over two sequences whose rows alternate in the caches; returns the bytes of the queries' results.
fn attend<D: Device>(device: D, request: &Request, shape: AttentionShape, queries: &[usize]) -> (Vec<u8>, D) {
    let element = Storage::Plain(request.device.activations(request.precision));
    let (q_columns, kv_columns) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let mut graph = Graph::default();
    let mut leaf = |name, shape, storage, kind| graph.add_leaf(name, Type::new(shape, storage), kind);
    let (integers, tokens) = (Storage::Plain(DType::I32), Shape::rows_of(Dim::Tokens));
    let q = leaf("q", Shape::of(Dim::Tokens, q_columns), element, LeafKind::Input);
    let caches = ["keys", "values"]
        .map(|name| leaf(name, Shape::matrix(2 * POSITIONS, kv_columns), element, LeafKind::Weight));
    let table = leaf("table", Shape::matrix(2, POSITIONS), integers, LeafKind::Input);
    let slots = leaf("slots", tokens.clone(), integers, LeafKind::Input);
    let positions = leaf("positions", tokens, integers, LeafKind::Input);
    let (mut nodes, place) = (Vec::new(), (Phase::Forward, None));
    let sinks =
        shape.sinks.then(|| leaf("sinks", Shape::vector(shape.heads), Storage::F32, LeafKind::Weight));
    let inputs = [q, caches[0], caches[1], table, slots, positions].into_iter().chain(sinks).collect();
    let names = ["o".to_string()];
    let o = graph.emit(&mut nodes, Op::CachedAttention(shape), inputs, vec![], &names, place)[0];
    graph.entries = vec![(Entry::Decode, nodes)];

    let extent = Extent { tokens: queries.len(), rows: queries.len(), segments: 0, audio: 0 };
    let plan = plan_with(&graph, &Request { extent, ..request.clone() });
    let mut executor = Executor::load(plan, device).unwrap();
    let reals = |seed, count| Content::Reals(random_reals(seed, count));
    // The values of a query depend only on its position, not on the other queries.
    let all_queries = random_reals(1, POSITIONS * q_columns);
    let values =
        queries.iter().flat_map(|at| &all_queries[at * q_columns..(at + 1) * q_columns]).copied().collect();
    executor.write(q, &encode(&Content::Reals(values), element));
    executor.write(caches[0], &encode(&reals(2, 2 * POSITIONS * kv_columns), element));
    executor.write(caches[1], &encode(&reals(3, 2 * POSITIONS * kv_columns), element));
    if let Some(sinks) = sinks {
        executor.write(sinks, &encode(&reals(4, shape.heads), Storage::F32));
    }
    let mut numbers = |leaf, numbers: Vec<usize>| {
        let bytes: Vec<u8> = numbers.into_iter().flat_map(|number| (number as i32).to_le_bytes()).collect();
        executor.write(leaf, &bytes);
    };
    numbers(table, (0..2).flat_map(|slot| (0..POSITIONS).map(move |at| 2 * at + slot)).collect());
    numbers(slots, queries.iter().map(|at| at % 2).collect());
    numbers(positions, queries.to_vec());
    executor.run(Entry::Decode, &extent).unwrap();
    let mut bytes = vec![0; executor.plan().value(o).ty.bytes(&extent)];
    executor.read(o, &mut bytes).unwrap();
    (bytes, executor.into_device())
}

/// If there are few queries, several blocks share each of them. A query gives the same bits either way.
#[test]
#[ignore = "needs a GPU"]
fn cuda_attends_to_long_sequences_as_the_cpu_does() {
    let _alone = alone();
    let plain = AttentionShape {
        heads: 6,
        kv_heads: 2,
        head_dim: 64,
        scale: 0.125,
        window: None,
        softcap: None,
        sinks: false,
    };
    let shapes = [
        plain,
        AttentionShape { head_dim: 20, ..plain },
        AttentionShape { window: Some(300), softcap: Some(0.5), ..plain },
        AttentionShape { sinks: true, window: Some(300), ..plain },
        AttentionShape { head_dim: 512, sinks: true, ..plain },
        AttentionShape { head_dim: 300, ..plain },
    ];
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        let mut device = open(precision);
        for shape in shapes {
            let on_cpu = plain_request();
            let (want, _) = attend(Cpu::new(1).unwrap(), &on_cpu, shape, &QUERIES);
            let on_gpu = Request { device: DeviceKind::Cuda, precision, ..on_cpu };
            let (all, returned) = attend(device, &on_gpu, shape, &QUERIES);
            device = returned;
            let storage = Storage::Plain(DeviceKind::Cuda.activations(precision));
            let error = error(&reals(&all, storage), &reals(&want, Storage::F32));
            assert!(error < tolerance(precision), "{shape:?} in {precision:?}: {error:.2e}");
            let bytes_of_query = all.len() / QUERIES.len();
            for (query, together) in QUERIES.iter().zip(all.chunks(bytes_of_query)) {
                let (alone, returned) = attend(device, &on_gpu, shape, &[*query]);
                device = returned;
                assert!(alone == together, "{shape:?} in {precision:?}: position {query}");
            }
        }
    }
}

//! Generation with cached keys and values gives the logits of whole sequences, to the last bit.
//!
//! Three sequences are fed in pieces, several per run, through slots whose rows are scattered over the caches.
//! A training plan that can generate is tested too: other entry points may run between two generations.

use crate::decoder::{Choice, EXTENT, gemma2, gemma3};
use crate::decoder_kinds::kinds;
use crate::numbers::{Content, decode_reals, encode};
use crate::subject::Subject;
use smidgen_compile::model::spec::HEAD;
use smidgen_compile::names::{input, state};
use smidgen_compile::offloaded_weights::offload_all_weights;
use smidgen_compile::{
    AdapterForm, DecodeShape, Request, TrainedBiases, compile, compile_decode, compile_logits,
};
use smidgen_ir::{Entry, Extent, LayerSet, LeafKind, Op, Plan, Policy, Type, ValueId, quant};
use smidgen_runtime::{Cpu, Device, Executor, Null};
use std::collections::BTreeSet;

/// Lengths of the sequences, which are the segments of the whole micro-batch.
const LENGTHS: [usize; 3] = [7, 1, 5];
/// Slots of the sequences.
const SLOTS: [usize; 3] = [2, 0, 3];
const SHAPE: DecodeShape = DecodeShape { slots: 8, positions: 8, cache_rows: 17, new_tokens: 8 };
/// Runs of `decode`: pieces of sequences as (sequence, first position, tokens).
pub const RUNS: [&[(usize, usize, usize)]; 4] =
    [&[(2, 0, 3), (0, 0, 2)], &[(0, 2, 1), (2, 3, 1)], &[(1, 0, 1), (0, 3, 4), (2, 4, 1)], &[]];

pub fn choices() -> Vec<Choice> {
    let head: &[&str] = &["v_proj", "up_proj", "lm_head"];
    let mut choices = vec![
        Choice { name: "lora", adapted: head, ..Choice::lora() },
        Choice { name: "like gemma 2", spec: gemma2(), adapted: head, ..Choice::lora() },
        Choice { name: "like gemma 3", spec: gemma3(), ..Choice::lora() },
        Choice { name: "fused", biases: TrainedBiases::All, ..Choice::fused() },
        Choice { name: "dora, fused", form: AdapterForm::Dora, ..Choice::fused() },
        Choice { name: "ls-lora", form: AdapterForm::Fourier { reg: 0.1 }, ..Choice::lora() },
    ];
    choices.extend(kinds());
    choices
}

pub fn content<'a>(subject: &'a Subject, name: &str) -> &'a Content {
    let found = subject.contents.iter().find(|(leaf, _)| subject.graph.value(*leaf).name == name);
    &found.unwrap_or_else(|| panic!("no content of `{name}`")).1
}

pub fn integers<'a>(subject: &'a Subject, name: &str) -> &'a [i32] {
    let Content::Integers(integers) = content(subject, name) else { panic!("`{name}` are integers") };
    integers
}

pub fn write_integers<D: Device>(executor: &mut Executor<D>, name: &str, integers: &[i32]) {
    let Some(id) = executor.plan().leaf_named(name) else { return };
    let bytes: Vec<u8> = integers.iter().flat_map(|integer| integer.to_le_bytes()).collect();
    executor.write(id, &bytes);
}

/// Weights and adapters of the subject; all other bytes are 0xff, which is NaN. Then `refresh` runs.
pub fn write_model<D: Device>(executor: &mut Executor<D>, subject: &Subject) {
    write_leaves(executor, subject);
    let extent = executor.plan().extent;
    executor.run(Entry::Refresh, &extent).unwrap();
}

fn write_leaves<D: Device>(executor: &mut Executor<D>, subject: &Subject) {
    let plan = executor.plan().clone();
    for (index, value) in plan.values.iter().enumerate() {
        let id = ValueId(index as u32);
        let is = |kind: LeafKind| plan.leaves(kind).any(|(leaf, _)| leaf == id);
        if is(LeafKind::Weight) || is(LeafKind::Adapter) {
            executor.write(id, &encode_weight(content(subject, &value.name), &value.ty));
        } else if is(LeafKind::Derived) || is(LeafKind::State) {
            // Rounded adapters share a buffer with their weight.
            executor.write(id, &vec![0xff; value.ty.bytes(&plan.extent)]);
        }
    }
}

/// Encodes a weight, also in quantized storages.
fn encode_weight(content: &Content, ty: &Type) -> Vec<u8> {
    match (content, ty.storage) {
        (Content::Reals(values), storage) if storage.plain().is_none() => {
            let (rows, columns) = ty.shape.at(&EXTENT);
            quant::encode(storage, rows, columns, values).expect("an encoder")
        }
        (content, storage) => encode(content, storage),
    }
}

fn whole_logits(choice: &Choice, subject: &Subject) -> Vec<f32> {
    let extent = Extent { rows: EXTENT.tokens, ..EXTENT };
    let plan = compile_logits(&Request { extent, ..choice.request() });
    let mut executor = Executor::load(plan, Cpu::new(1).unwrap()).unwrap();
    write_model(&mut executor, subject);
    for name in [input::IDS, input::POSITIONS, input::BOUNDARIES] {
        write_integers(&mut executor, name, integers(subject, name));
    }
    write_integers(&mut executor, input::ROWS, &(0..EXTENT.tokens as i32).collect::<Vec<_>>());
    executor.run(Entry::Logits, &extent).unwrap();
    let id = executor.plan().leaf_named(state::LOGITS).unwrap();
    let mut bytes = vec![0; 4 * EXTENT.tokens * choice.spec.vocabulary];
    executor.read(id, &mut bytes).unwrap();
    decode_reals(&bytes)
}

/// Rows of the caches by slot and position: no two positions share a row, and consecutive positions are not adjacent.
fn table() -> Vec<i32> {
    let mut table = vec![0; SHAPE.slots * SHAPE.positions];
    let mut next = 0;
    for (sequence, length) in LENGTHS.into_iter().enumerate() {
        for position in 0..length {
            table[SLOTS[sequence] * SHAPE.positions + position] = (next * 11 + 4) % SHAPE.cache_rows as i32;
            next += 1;
        }
    }
    table
}

/// The table, and caches filled with NaN.
pub fn begin_generation<D: Device>(executor: &mut Executor<D>) {
    write_integers(executor, input::CACHE_TABLE, &table());
    let caches: Vec<ValueId> = executor.plan().leaves(LeafKind::Cache).map(|(id, _)| id).collect();
    for id in caches {
        let buffer = executor.plan().value(id).buffer.unwrap();
        let bytes = executor.plan().buffer(buffer).bytes;
        executor.write(id, &vec![0xff; bytes]);
    }
}

/// Runs some pieces and returns the logits of their tokens.
pub fn run_pieces<D: Device>(
    executor: &mut Executor<D>,
    ids: &[i32],
    pieces: &[(usize, usize, usize)],
) -> Vec<f32> {
    let starts = [0, LENGTHS[0], LENGTHS[0] + LENGTHS[1]];
    let tokens: Vec<(usize, usize)> = pieces
        .iter()
        .flat_map(|&(sequence, first, count)| {
            (first..first + count).map(move |position| (sequence, position))
        })
        .collect();
    let of = |number: &dyn Fn(usize, usize) -> usize| -> Vec<i32> {
        tokens.iter().map(|&(sequence, position)| number(sequence, position) as i32).collect()
    };
    write_integers(
        executor,
        input::IDS,
        &of(&|sequence, position| ids[starts[sequence] + position] as usize),
    );
    write_integers(executor, input::POSITIONS, &of(&|_, position| position));
    write_integers(executor, input::SLOTS, &of(&|sequence, _| SLOTS[sequence]));
    write_integers(executor, input::LENGTHS, &of(&|sequence, _| LENGTHS[sequence]));
    write_integers(executor, input::ROWS, &(0..tokens.len() as i32).collect::<Vec<_>>());
    let extent = Extent { tokens: tokens.len(), rows: tokens.len(), segments: 0, audio: 0 };
    executor.run(Entry::Decode, &extent).unwrap();
    let id = executor.plan().leaf_named(state::DECODED_LOGITS).unwrap();
    let (_, vocabulary) = executor.plan().value(id).ty.shape.at(&extent);
    let mut bytes = vec![0; 4 * tokens.len() * vocabulary];
    executor.read(id, &mut bytes).unwrap();
    decode_reals(&bytes)
}

/// Compares the logits of every run with those of the whole sequences.
fn compare_runs(choice: &Choice, subject: &Subject, executor: &mut Executor<Cpu>, whole: &[f32]) {
    let (ids, vocabulary) = (integers(subject, input::IDS), choice.spec.vocabulary);
    begin_generation(executor);
    for pieces in RUNS {
        let logits = run_pieces(executor, ids, pieces);
        let starts = [0, LENGTHS[0], LENGTHS[0] + LENGTHS[1]];
        let rows = pieces.iter().flat_map(|&(sequence, first, count)| {
            (first..first + count).map(move |position| starts[sequence] + position)
        });
        for (got, row) in logits.chunks(vocabulary).zip(rows) {
            let want = &whole[row * vocabulary..(row + 1) * vocabulary];
            let same = got.iter().zip(want).all(|(got, want)| got.to_bits() == want.to_bits());
            assert!(same, "{}: token {row}: {got:?} or {want:?}", choice.name);
        }
    }
}

fn generation_plan(choice: &Choice, threads: usize) -> Plan {
    compile_decode(&generation_request(choice, threads), &Policy::default())
}

pub fn generation_request(choice: &Choice, threads: usize) -> Request {
    Request { decode: Some(SHAPE), threads, extent: SHAPE.extent(), ..choice.request() }
}

/// Weights offloaded to disk, also with the head in pieces, give the logits of resident weights.
#[test]
fn offloaded_weights_generate_the_same() {
    for choice in choices() {
        let subject = choice.subject_with(LayerSet::none());
        let whole = whole_logits(&choice, &subject);
        let request = generation_request(&choice, 2);
        for (resident_layers, head_pieces) in [(0, 0), (2, 0), (0, 3)] {
            let all = offload_all_weights(Policy::default(), &request, resident_layers);
            let plan = compile_decode(&request, &Policy { head_pieces, ..all });
            let count = |is_it: fn(&Op) -> bool| {
                plan.entry(Entry::Decode).steps.iter().filter(|step| is_it(&step.op)).count()
            };
            assert!(count(|op| *op == Op::Fetch) > 0);
            let is_adapted = request.adapters.iter().any(|module| module.path == HEAD);
            let pieces = if is_adapted { 1 } else { head_pieces.max(1) };
            assert_eq!(count(|op| matches!(op, Op::Logits { .. })), pieces);
            let folder = tempfile::tempdir().unwrap();
            let cpu = Cpu::new(2).unwrap().with_spill_folder(folder.path().join("new"));
            let mut executor = Executor::load(plan, cpu).unwrap();
            write_model(&mut executor, &subject);
            compare_runs(&choice, &subject, &mut executor, &whole);
        }
    }
}

/// The example of the two cache operations, which run with the right logits as a result.
pub fn cached_logits_equal_those_of_whole_sequences() -> BTreeSet<&'static str> {
    let mut ran = BTreeSet::new();
    for choice in choices() {
        let subject = choice.subject_with(LayerSet::none());
        let whole = whole_logits(&choice, &subject);
        for threads in [1, 2] {
            let plan = generation_plan(&choice, threads);
            ran.extend(plan.entry(Entry::Decode).steps.iter().map(|step| step.op.name()));
            let mut executor = Executor::load(plan, Cpu::new(threads).unwrap()).unwrap();
            write_model(&mut executor, &subject);
            compare_runs(&choice, &subject, &mut executor, &whole);
        }
    }
    ran
}

#[test]
fn generation_reads_only_written_bytes() {
    for choice in choices() {
        let subject = choice.subject_with(LayerSet::none());
        let mut executor = Executor::load(generation_plan(&choice, 1), Null::default()).unwrap();
        write_model(&mut executor, &subject);
        begin_generation(&mut executor);
        for pieces in RUNS {
            run_pieces(&mut executor, integers(&subject, input::IDS), pieces);
        }
    }
}

/// Other entry points may reuse the memory of the caches between two generations, but not during one.
#[test]
fn a_training_plan_generates_too() {
    for choice in choices() {
        let subject = choice.subject_with(LayerSet::none());
        let whole = whole_logits(&choice, &subject);
        let policy = Policy::resident(LayerSet::none(), 3);
        let request = Request { decode: Some(SHAPE), ..choice.request() };
        let (plan, without) = (compile(&request, &policy), compile(&choice.request(), &policy));
        assert_eq!(plan.transient_bytes, without.transient_bytes, "{}: overlaid", choice.name);
        let mut executor = Executor::load(plan, Cpu::new(request.threads).unwrap()).unwrap();
        write_model(&mut executor, &subject);
        for (leaf, value) in subject.contents.iter().map(|(leaf, _)| (leaf, subject.graph.value(*leaf))) {
            if value.leaf().is_some_and(|leaf| leaf.kind == LeafKind::Input) {
                let bytes = encode(content(&subject, &subject.graph.value(*leaf).name), value.ty.storage);
                let id = executor.plan().leaf_named(&value.name).unwrap();
                executor.write(id, &bytes);
            }
        }
        executor.run(Entry::Eval, &EXTENT).unwrap();
        compare_runs(&choice, &subject, &mut executor, &whole);
        executor.run(Entry::Eval, &EXTENT).unwrap();
        compare_runs(&choice, &subject, &mut executor, &whole);
        for (_, cache) in executor.plan().leaves(LeafKind::Cache) {
            let buffer = executor.plan().buffer(cache.buffer.unwrap());
            assert!(buffer.offset >= executor.plan().persistent_bytes, "{}", cache.name);
        }
    }
}

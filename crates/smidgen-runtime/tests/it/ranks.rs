//! Ranks compute the same as one process: decoders are trained by one, two, three and four ranks.
//!
//! Here ranks are threads of one process that exchange bytes through shared memory, so these tests need no MPI; `comm/`
//! tests MPI and NCCL, and the tests of the program run real ranks. With one equal sample on each of two ranks the sum
//! is exact, so results are equal to the bit; with different samples they agree within rounding.

use crate::decoder::{ALL_FUSED, Choice, LAYERS, LOSS_CHUNK, Trained, leaf_named, phi3, wide};
use crate::decoder_kinds::kinds;
use crate::examples::{Example, Proof};
use crate::numbers::{decode_doubles, decode_reals};
use crate::offload_changes_nothing::{of_rank, offload_everything};
use crate::subject::{Subject, roomy};
use smidgen_compile::AdapterForm;
use smidgen_compile::names::{input, state};
use smidgen_compile::request::{Master, Moments};
use smidgen_ir::policy::Sharding;
use smidgen_ir::storage::dynamic8_codes;
use smidgen_ir::{
    Cut, Entry, Extent, Graph, LayerSet, LeafKind, Op, Order, Policy, Rank, Shard, Space, Storage, ValueId,
};
use smidgen_runtime::comm::{Comm, CommError, Number, Span};
use smidgen_runtime::cpu::bf16_unit::F32Unit;
use smidgen_runtime::{Cpu, DeviceError, Executor};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Barrier, Mutex};

/// Memory that the threads share.
#[derive(Debug)]
struct Board {
    slots: Vec<Mutex<Vec<u8>>>,
    turn: Barrier,
}

#[derive(Debug)]
struct Threads {
    rank: usize,
    board: Arc<Board>,
}

fn team(size: usize) -> Vec<Box<dyn Comm>> {
    let slots = (0..size).map(|_| Mutex::default()).collect();
    let board = Arc::new(Board { slots, turn: Barrier::new(size) });
    (0..size).map(|rank| Box::new(Threads { rank, board: Arc::clone(&board) }) as Box<dyn Comm>).collect()
}

impl Threads {
    /// Returns the bytes of every rank, in the order of ranks.
    fn exchange(&self, own: &[u8]) -> Vec<Vec<u8>> {
        *self.board.slots[self.rank].lock().unwrap() = own.to_vec();
        self.board.turn.wait();
        let all = self.board.slots.iter().map(|slot| slot.lock().unwrap().clone()).collect();
        self.board.turn.wait();
        all
    }
}

fn bytes_mut(span: Span) -> &'static mut [u8] {
    // SAFETY: the lane holds the memory for this call.
    unsafe { std::slice::from_raw_parts_mut(span.pointer, span.bytes) }
}

fn sum(all: &[Vec<u8>], number: Number) -> Vec<u8> {
    match number {
        Number::F32 => {
            let mut total = decode_reals(&all[0]);
            for other in &all[1..] {
                total.iter_mut().zip(decode_reals(other)).for_each(|(sum, more)| *sum += more);
            }
            total.into_iter().flat_map(f32::to_le_bytes).collect()
        }
        Number::F64 => {
            let mut total = decode_doubles(&all[0]);
            for other in &all[1..] {
                total.iter_mut().zip(decode_doubles(other)).for_each(|(sum, more)| *sum += more);
            }
            total.into_iter().flat_map(f64::to_le_bytes).collect()
        }
    }
}

impl Comm for Threads {
    fn name(&self) -> String {
        "threads".into()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.board.slots.len()
    }

    unsafe fn all_reduce(&mut self, spans: &[(Span, Number)]) -> Result<(), CommError> {
        for (span, number) in spans {
            let own = bytes_mut(*span);
            own.copy_from_slice(&sum(&self.exchange(own), *number));
        }
        Ok(())
    }

    unsafe fn reduce_scatter(&mut self, span: Span, parts: &[Range<usize>]) -> Result<(), CommError> {
        let own = bytes_mut(span);
        let total = sum(&self.exchange(own), Number::F32);
        own.fill(0xff);
        let part = parts[self.rank].clone();
        own[part.clone()].copy_from_slice(&total[part]);
        Ok(())
    }

    unsafe fn all_gather(&mut self, span: Span, parts: &[Range<usize>]) -> Result<(), CommError> {
        let own = bytes_mut(span);
        let all = self.exchange(&own[parts[self.rank].clone()]);
        for (part, bytes) in parts.iter().zip(all) {
            own[part.clone()].copy_from_slice(&bytes);
        }
        Ok(())
    }

    unsafe fn broadcast(&mut self, span: Span, root: usize) -> Result<(), CommError> {
        let own = bytes_mut(span);
        own.copy_from_slice(&self.exchange(own)[root]);
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), CommError> {
        self.board.turn.wait();
        Ok(())
    }
}

pub fn examples() -> Vec<Example> {
    vec![Example {
        covers: &["all_reduce", "all_gather", "reduce_scatter", "squared_norm"],
        proof: Proof::Values(everything_divided),
    }]
}

fn everything_divided() -> BTreeSet<&'static str> {
    let mut names = BTreeSet::new();
    // In these small models, gradients of adapters are too small to be divided.
    for choice in [Choice::lora(), Choice::full()] {
        let alone = outcome_alone(&choice, 2, true);
        for sharding in Sharding::ALL {
            let subjects = divided(&choice, 2, sharding);
            expect_close(&alone, &outcome(&subjects, true), &format!("{} {sharding:?}", choice.name));
            let nodes = subjects[0].graph.entries.iter().flat_map(|(_, nodes)| nodes);
            names.extend(nodes.map(|node| node.op.name()));
        }
    }
    names
}

/// Losses and norms agree within rounding.
fn expect_close(alone: &Outcome, together: &Outcome, what: &str) {
    for (one, other) in alone.reports.iter().zip(&together.reports) {
        assert!((one - other).abs() / one.abs() < 1e-6, "{what}: {one} and {other}");
    }
}

fn policy(sharding: Sharding) -> Policy {
    let resident = Policy::resident(LayerSet::first(1), LOSS_CHUNK);
    match sharding {
        Sharding::Weights => Policy {
            sharding,
            offloaded_weights: LayerSet::all(LAYERS),
            tables_offloaded: true,
            window_bytes: 4000,
            ..resident
        },
        _ => Policy { sharding, ..resident },
    }
}

/// The subject of each rank.
fn divided(choice: &Choice, ranks: usize, sharding: Sharding) -> Vec<Subject> {
    by_policy(choice, ranks, &policy(sharding))
}

fn by_policy(choice: &Choice, ranks: usize, policy: &Policy) -> Vec<Subject> {
    (0..ranks).map(|index| of_rank(choice, policy, Rank { index, of: ranks })).collect()
}

/// The result of training: losses and gradient norms, and every trained leaf with its moments.
#[derive(Debug, PartialEq)]
struct Outcome {
    reports: Vec<f64>,
    leaves: Vec<(String, Vec<u8>)>,
}

const UPDATES: usize = 3;

/// One process does the work of all ranks, a micro-batch for each.
/// A processor whose products are sums by themselves. AMX tiles start from what a gradient already holds, which rounds
/// differently for one process with two samples than for two with one each.
fn cpu() -> Cpu {
    Cpu::new(1).unwrap().with_f32_unit(F32Unit::Vectors)
}

fn outcome_alone(choice: &Choice, ranks: usize, own_samples: bool) -> Outcome {
    let rounds = if own_samples { 2 } else { 1 };
    let subject = choice.subject_with(LayerSet::first(1));
    let mut executor = Executor::load(subject.roomy_plan(1), cpu()).unwrap();
    subject.write_contents(&mut executor);
    let mut reports = Vec::new();
    for _ in 0..UPDATES {
        for micro_batch in 0..rounds * ranks {
            write_samples(&subject, &mut executor, if own_samples { micro_batch % ranks } else { 0 });
            executor.run(Entry::MicroStep, &subject.extent).unwrap();
        }
        end_step(&subject, &mut executor, &mut reports);
    }
    let leaves = kept(&subject.graph);
    let leaves = leaves.into_iter().map(|(id, name)| (name, subject.read_bytes(&mut executor, id))).collect();
    Outcome { reports, leaves }
}

/// Every rank has one micro-batch in each step, or two with its own samples.
fn outcome(subjects: &[Subject], own_samples: bool) -> Outcome {
    let comms = team(subjects.len());
    let mut outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let run = |(subject, comm): (&'_ Subject, Box<dyn Comm>)| run_rank(subject, comm, own_samples);
        let ranks: Vec<_> = subjects.iter().zip(comms).map(|pair| scope.spawn(move || run(pair))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for other in &outcomes[1..] {
        assert!(*other == outcomes[0], "every rank has the same bytes");
    }
    outcomes.swap_remove(0)
}

fn run_rank(subject: &Subject, comm: Box<dyn Comm>, own_samples: bool) -> Outcome {
    let rank = comm.rank();
    let plan = subject.roomy_plan(1);
    subject.run_on_null(plan.clone()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let cpu = cpu().with_comm(comm).with_spill_folder(folder.path().into());
    let mut executor = Executor::load(plan, cpu).unwrap();
    subject.write_contents(&mut executor);
    let mut reports = Vec::new();
    for _ in 0..UPDATES {
        let samples = if own_samples { rank } else { 0 };
        if executor.has_laps() {
            let feed = |executor: &mut Executor<Cpu>, _| {
                write_samples(subject, executor, samples);
                Ok::<(), DeviceError>(())
            };
            let rounds = if own_samples { 2 } else { 1 };
            executor.run_laps(&vec![subject.extent; rounds], feed).unwrap();
            end_step(subject, &mut executor, &mut reports);
            continue;
        }
        write_samples(subject, &mut executor, samples);
        if own_samples {
            executor.run_with_sums(Entry::MicroStep, &subject.extent, false).unwrap();
        }
        executor.run(Entry::MicroStep, &subject.extent).unwrap();
        end_step(subject, &mut executor, &mut reports);
    }
    Outcome { reports, leaves: collect(subject, &mut executor) }
}

fn end_step(subject: &Subject, executor: &mut Executor<Cpu>, reports: &mut Vec<f64>) {
    for entry in [Entry::Update, Entry::Refresh] {
        executor.run(entry, &subject.extent).unwrap();
    }
    let report = leaf_named(&subject.graph, state::REPORT);
    reports.extend(&decode_doubles(&subject.read_bytes(executor, report))[..2]);
}

/// Writes tokens that depend on the rank.
fn write_samples(subject: &Subject, executor: &mut Executor<Cpu>, rank: usize) {
    let ids = leaf_named(&subject.graph, input::IDS);
    let mut bytes = subject.content_bytes(ids);
    bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|four| {
        let id = i32::from_le_bytes(*four);
        *four = ((id + rank as i32) % 11).to_le_bytes();
    });
    executor.write(ids, &bytes);
}

fn kept(graph: &Graph) -> Vec<(ValueId, String)> {
    let all = graph.values.iter().enumerate();
    let leaves = all.filter(|(_, value)| {
        let leaf = value.leaf();
        leaf.is_some_and(|leaf| leaf.gradient.is_some() || leaf.kind == LeafKind::Moment)
    });
    leaves.map(|(index, value)| (ValueId(index as u32), value.name.clone())).collect()
}

/// Every trained leaf and its moments; divided ones are gathered.
fn collect(subject: &Subject, executor: &mut Executor<Cpu>) -> Vec<(String, Vec<u8>)> {
    let mut leaves = Vec::new();
    for (id, name) in kept(&subject.graph) {
        let Some(shard) = subject.graph.value(id).role.shard() else {
            leaves.push((name, subject.read_bytes(executor, id)));
            continue;
        };
        let steps = &executor.plan().entry(Entry::Collect).steps;
        let index = steps.iter().position(|step| step.inputs[0] == id).unwrap();
        let whole = steps[index].outputs[0];
        if steps[index].inputs.len() == 2 {
            executor.run_step(Entry::Collect, index - 1, &subject.extent).unwrap();
        }
        executor.run_step(Entry::Collect, index, &subject.extent).unwrap();
        let bytes = subject.read_bytes(executor, whole);
        leaves.push((name, in_order(&subject.graph, id, shard, &bytes)));
    }
    leaves
}

/// The bytes of a whole tensor from the bytes of its parts in order. In a whole 8-bit moment, all scales come first.
fn in_order(graph: &Graph, id: ValueId, shard: Shard, parts: &[u8]) -> Vec<u8> {
    assert_eq!(shard.cut, Cut::Rows);
    let ty = &graph.value(id).ty;
    let Storage::Dynamic8 { .. } = ty.storage else { return parts.to_vec() };
    let (_, columns) = ty.shape.at(&Extent::default());
    let ranges = shard.bytes(ty).into_iter().zip(shard.rows(ty));
    let halves = ranges.map(|(bytes, rows)| parts[bytes].split_at(dynamic8_codes(rows.len() * columns)));
    let (scales, codes): (Vec<&[u8]>, Vec<&[u8]>) = halves.unzip();
    [scales.concat(), codes.concat()].concat()
}

fn choices() -> Vec<Choice> {
    let (dora, fourier) = (AdapterForm::Dora, AdapterForm::Fourier { reg: 0.1 });
    let mut choices = vec![
        Choice::lora(),
        Choice { name: "phi3", spec: phi3(), adapted: ALL_FUSED, ..Choice::lora() },
        Choice { name: "dora", form: dora, ..Choice::fused() },
        Choice { name: "ls-lora in 8 bits", form: fourier, moments: Moments::Bits8, ..Choice::lora() },
        Choice { name: "full in 8 bits", moments: Moments::Bits8, ..Choice::full() },
        Choice { name: "full, last layer", trained: Trained::LastLayer, ..Choice::full() },
        wide_full(),
        Choice { name: "wide, in 8 bits", moments: Moments::Bits8, ..wide_full() },
        Choice { name: "wide, last layer", trained: Trained::LastLayer, ..wide_full() },
    ];
    // Routed experts and latent attention are divided as other weights are.
    let is_divided = |kind: &Choice| kind.name.contains("experts") || kind.name.contains("latent");
    choices.extend(kinds().into_iter().filter(is_divided));
    choices
}

fn wide_full() -> Choice {
    Choice { name: "wide", spec: wide(), ..Choice::full() }
}

/// Weights in bf16 are rounded stochastically after an update, which may amplify a gradient that differs by rounding.
fn in_bf16() -> Vec<Choice> {
    let bf16 = |name, moments| Choice {
        name,
        moments,
        trained: Trained::LastLayer,
        master: Master::Bf16 { seed: 5 },
        ..wide_full()
    };
    vec![bf16("bf16", Moments::F32), bf16("bf16, moments in 8 bits", Moments::Bits8)]
}

#[test]
fn two_ranks_with_equal_samples_agree_with_one_to_the_last_bit() {
    // The gradient of an embedding is added token by token, so there the order of a sum matters.
    let all = choices().into_iter().chain(in_bf16());
    for choice in all.filter(|choice| !matches!(choice.trained, Trained::Everything)) {
        let alone = outcome_alone(&choice, 2, false);
        // The norm of divided gradients is summed in the order of the ranks, which changes its rounding.
        let count = if matches!(choice.trained, Trained::Nothing) { 4 } else { 2 };
        for sharding in &Sharding::ALL[..count] {
            assert!(outcome(&divided(&choice, 2, *sharding), false) == alone, "{} {sharding:?}", choice.name);
        }
    }
}

#[test]
fn dividing_weights_changes_no_bit() {
    for choice in choices().into_iter().chain(in_bf16()) {
        for ranks in [2, 3] {
            let [gradients, weights] = [Sharding::Gradients, Sharding::Weights]
                .map(|sharding| outcome(&divided(&choice, ranks, sharding), true));
            assert!(gradients == weights, "{} on {ranks}", choice.name);
        }
    }
}

#[test]
fn ranks_with_their_own_samples_agree_with_one_within_rounding() {
    for choice in choices() {
        for ranks in [2, 3, 4] {
            let alone = outcome_alone(&choice, ranks, true);
            for sharding in Sharding::ALL {
                let together = outcome(&divided(&choice, ranks, sharding), true);
                expect_close(&alone, &together, &format!("{} on {ranks}, {sharding:?}", choice.name));
            }
        }
    }
}

/// Everything of a decoder offloaded to disk, or only its state, in both orders and for every division.
fn offloading() -> Vec<Policy> {
    let state = Policy {
        gradients: Space::Disk,
        optimizer_state: Space::Disk,
        window_bytes: 4000,
        ..Policy::resident(LayerSet::first(1), LOSS_CHUNK)
    };
    let some = Policy { offloaded_gradients: LayerSet::first(1), ..state.clone() };
    let moments = Policy { gradients: Space::Device, ..state.clone() };
    let depth = [state, some, moments, offload_everything(0), offload_everything(usize::MAX)];
    let breadth = depth.clone().map(|policy| Policy { order: Order::Breadth, ..policy });
    let all = depth.into_iter().chain(breadth);
    all.flat_map(|policy| Sharding::ALL.map(|sharding| Policy { sharding, ..policy.clone() }))
        // Divided weights are those that are not resident.
        .map(|policy| match policy.sharding {
            Sharding::Weights => {
                Policy { offloaded_weights: LayerSet::all(LAYERS), tables_offloaded: true, ..policy }
            }
            _ => policy,
        })
        .collect()
}

/// What ranks divide and what is offloaded add up: every rank offloads its part, and the results are those of one process.
#[test]
fn ranks_that_offload_agree_with_one_within_rounding() {
    let choices = [
        (wide_full(), 3, 1),
        (Choice { name: "wide, not clipped", clips: false, ..wide_full() }, 2, 3),
        (Choice { name: "wide, in 8 bits", moments: Moments::Bits8, ..wide_full() }, 2, 3),
        (Choice { name: "full, last layer", trained: Trained::LastLayer, ..Choice::full() }, 2, 3),
        (Choice::lora(), 2, 3),
        (Choice::with_audio(), 2, 3),
        (Choice { name: "hearing, not clipped", clips: false, ..Choice::with_audio() }, 3, 2),
    ];
    for (choice, ranks, every) in choices {
        let alone = outcome_alone(&choice, ranks, true);
        for policy in offloading().into_iter().step_by(every) {
            let together = outcome(&by_policy(&choice, ranks, &policy), true);
            expect_close(&alone, &together, &format!("{} on {ranks}, {policy:?}", choice.name));
        }
    }
}

/// Without divided gradients, offloading and order change no bit of a rank either.
#[test]
fn offloading_on_ranks_changes_no_bit() {
    let wide = Choice { clips: false, ..wide_full() };
    for choice in [wide_full(), Choice::full(), wide, Choice::with_audio()] {
        let resident = outcome(&divided(&choice, 2, Sharding::None), true);
        for policy in offloading().iter().filter(|policy| policy.sharding == Sharding::None) {
            assert!(outcome(&by_policy(&choice, 2, policy), true) == resident, "{}: {policy:?}", choice.name);
        }
    }
}

/// A rank stores only its part of divided leaves.
#[test]
fn a_rank_stores_its_part() {
    let stored = |choice: Choice, sharding: Sharding, kind: LeafKind| {
        let subject = &divided(&choice, 2, sharding)[1];
        let plan = subject.plan(roomy(subject.extent), 1);
        plan.leaves(kind).map(|(_, value)| value.role.stored_bytes(&value.ty, &plan.extent)).sum::<usize>()
    };
    // Norms stay whole, and parts of trained leaves end at multiples of a block, so small leaves belong to one rank.
    let is_less = |choice: fn() -> Choice, sharding: Sharding, kind: LeafKind, percent: usize| {
        let (whole, part) = (stored(choice(), Sharding::None, kind), stored(choice(), sharding, kind));
        assert!(100 * part < whole * percent, "{part} of {whole} {kind:?}");
    };
    is_less(Choice::lora, Sharding::Weights, LeafKind::Weight, 60);
    is_less(Choice::full, Sharding::Moments, LeafKind::Moment, 50);
    is_less(Choice::full, Sharding::Gradients, LeafKind::Gradient, 95);
    for (sharding, kind) in [
        (Sharding::Moments, LeafKind::Moment),
        (Sharding::Gradients, LeafKind::Gradient),
        (Sharding::Weights, LeafKind::Adapter),
    ] {
        is_less(wide_full, sharding, kind, 55);
    }
}

/// With divided weights, only vectors are gathered after an update, and a layer is gathered once for its forward and
/// once for its backward pass.
#[test]
fn trained_weights_are_gathered_where_they_are_used() {
    let subject = &divided(&wide_full(), 2, Sharding::Weights)[0];
    let gathered = |entry: Entry| {
        let nodes = subject.graph.nodes(entry).iter();
        let gathers = nodes.filter(|node| matches!(node.op, Op::AllGather(_)));
        let names = gathers.flat_map(|node| node.reads().collect::<Vec<_>>());
        names.map(|id| subject.graph.value(id).name.clone()).collect::<Vec<String>>()
    };
    let after_updates = gathered(Entry::Update);
    assert!(after_updates.iter().all(|name| name.ends_with("norm.weight") || name.ends_with(".bias")));
    let names = gathered(Entry::MicroStep);
    let count = |name: &str| names.iter().filter(|other| *other == name).count();
    for layer in 0..LAYERS {
        assert_eq!(count(&format!("model.layers.{layer}.mlp.down_proj.weight")), 2, "{names:?}");
    }
    assert_eq!(count("model.embed_tokens.weight"), 1, "{names:?}");
}

/// The sum of a layer's gradients starts while backward continues in earlier layers, and only the update waits for it.
#[test]
fn sums_begin_before_backward_ends() {
    let subject = &divided(&Choice::full(), 2, Sharding::None)[0];
    let nodes = subject.graph.nodes(Entry::MicroStep);
    let sums: Vec<usize> = nodes
        .iter()
        .enumerate()
        .filter(|(_, node)| matches!(node.op, Op::AllReduce(_)))
        .map(|(index, _)| index)
        .collect();
    assert!(!sums.is_empty());
    let plan = subject.plan(roomy(subject.extent), 1);
    let steps = &plan.entry(Entry::MicroStep).steps;
    assert!(
        steps
            .iter()
            .all(|step| step.awaits.iter().all(|awaited| !matches!(steps[*awaited].op, Op::AllReduce(_))))
    );
}

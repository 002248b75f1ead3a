//! What the solver divides over ranks if a recipe does not pin it, and what ranks gather.
//!
//! Plans are compiled here, so every stage is verified for ranks that divide trained weights, on a CPU and on a GPU.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::links::Link;
use smidgen_compile::offloaded_weights::offload_all_weights;
use smidgen_compile::request::{Master, Moments, Optimizer};
use smidgen_compile::{
    Budget, Context, Demand, Profile, Purpose, Question, Request, Solution, compile, solve,
};
use smidgen_ir::{
    Buffer, Category, DType, DeviceKind, Entry, Extent, LayerRule, LayerSet, LeafKind, Lifetime, Op, Order,
    Pins, Plan, Policy, Precision, Rank, Sharding, Space, Storage, ValueId,
};
use std::collections::BTreeSet;

const LAYERS: usize = 6;
const CONTEXT: Context = shapes::process(1_000_000, 100, 3000);

/// Full training on the second of four ranks.
fn request() -> Request {
    let spec = shapes::llama(64, 160, LAYERS, (4, 2), 256, false);
    let trained = spec.tensors().into_iter().map(|tensor| tensor.name).collect();
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 128, 1);
    Request { adapters: vec![], trained, rank: Rank { index: 1, of: 4 }, ..request }
}

fn solved(sharding: Option<Sharding>, budget: u64, bytes_per_s: f64, micro_steps: f64) -> Option<Solution> {
    let extent = Extent { tokens: 128, rows: 127, segments: 1, audio: 0 };
    let pins = Pins {
        sharding,
        weights: Some(Space::Device),
        activations: Some(Space::Device),
        optimizer_state: Some(Space::Device),
        gradients: Some(Space::Device),
        ..Pins::default()
    };
    let link = Link { bytes_per_s, latency_s: 1e-7 };
    let solution = solve(&Question {
        purpose: Purpose::Training,
        request: &request(),
        demands: &[Demand { micro_tokens: 128, extent, step: extent, micro_steps }],
        pins: &pins,
        context: CONTEXT,
        budget: Budget::device(budget),
        profile: &Profile { link, ..Profile::cpu(2, Precision::F32) },
    });
    solution.ok()
}

#[test]
fn gradients_are_divided_where_that_is_fastest() {
    const FAST: f64 = 1e12;
    let resident = |sharding| solved(Some(sharding), u64::MAX, FAST, 1.0).unwrap();
    let peaks = Sharding::ALL[..3].iter().map(|sharding| resident(*sharding).peak_bytes).collect::<Vec<_>>();
    assert!(peaks[0] > peaks[1] && peaks[1] > peaks[2], "{peaks:?}");
    assert_eq!(solved(None, peaks[0], FAST, 1.0).unwrap().policy.sharding, Sharding::None);
    assert_eq!(solved(None, peaks[1], FAST, 1.0).unwrap().policy.sharding, Sharding::Moments);
    let chosen = solved(None, peaks[2], FAST, 1.0).unwrap();
    assert_eq!(chosen.policy.sharding, Sharding::Gradients);
    for sharding in [Sharding::None, Sharding::Moments, Sharding::Weights] {
        let other = solved(Some(sharding), peaks[2], FAST, 1.0);
        assert!(other.is_none_or(|other| other.step_ms > chosen.step_ms), "{sharding:?}");
    }
    // Over a slow link, recomputing costs less than a sum per micro-batch.
    let slow = solved(None, peaks[2], 1e6, 8.0);
    assert!(slow.is_none_or(|slow| slow.policy.sharding < Sharding::Gradients));
}

fn divided(request: &Request) -> Plan {
    let policy = Policy {
        sharding: Sharding::Weights,
        offloaded_weights: LayerSet::all(LAYERS),
        tables_offloaded: true,
        window_bytes: 1 << 16,
        ..Policy::resident(LayerSet::first(1), 64)
    };
    compile(request, &policy)
}

fn stored(plan: &Plan, kind: LeafKind) -> usize {
    plan.leaves(kind).map(|(_, value)| value.role.stored_bytes(&value.ty, &plan.extent)).sum()
}

#[test]
fn all_trained_tensors_are_divided() {
    let request = request();
    let alone =
        compile(&Request { rank: Rank::ONLY, ..request.clone() }, &Policy::resident(LayerSet::first(1), 64));
    let plan = divided(&request);
    for kind in [LeafKind::Adapter, LeafKind::Gradient, LeafKind::Moment] {
        let (part, whole) = (stored(&plan, kind), stored(&alone, kind));
        assert!(4 * part < whole + whole / 20, "{part} of {whole} {kind:?}");
    }
}

/// A checkpoint gathers one tensor after the other: the memory for it is that of the largest.
#[test]
fn one_tensor_is_gathered_at_a_time() {
    let plan = divided(&request());
    let gathered = plan.entry(Entry::Collect).steps.iter().filter_map(|step| step.outputs.first());
    let largest = gathered.map(|whole| plan.value(*whole).ty.bytes(&plan.extent)).max().unwrap();
    assert_eq!(plan.live_bytes(Entry::Collect).into_iter().max(), Some(largest));
}

/// Ranks exchange the copies in bf16, not the f32 masters, and every rank stores its part of both.
#[test]
fn a_gpu_gathers_what_it_multiplies() {
    let bf16 = Precision::Bf16;
    for master in [Master::F32, Master::Bf16 { seed: 3 }] {
        let request = request();
        let optimizer = Optimizer { master, ..request.optimizer };
        let request = Request { device: DeviceKind::Cuda, precision: bf16, optimizer, ..request };
        let plan = divided(&request);
        let steps = plan.entry(Entry::MicroStep).steps.iter();
        let gathers = steps.filter(|step| matches!(step.op, Op::AllGather(_)));
        let names: Vec<(&str, Storage)> = gathers
            .map(|step| plan.value(step.inputs[0]))
            .map(|value| (value.name.as_str(), value.ty.storage))
            .collect();
        assert!(names.len() > 2 * LAYERS * 7 - 7, "{names:?}");
        for (name, storage) in names {
            // Rows of an embedding are looked up as they are trained.
            let is_looked_up = name == "model.embed_tokens.weight";
            assert!(storage == Storage::Plain(DType::Bf16) || is_looked_up, "{name} {storage}");
        }
        // A rank rounds its own rows of every copy, after each update.
        let rounds =
            plan.entry(Entry::Refresh).steps.iter().filter(|step| matches!(step.op, Op::Round { .. }));
        let rounded: Vec<ValueId> =
            rounds.map(|step| plan.value(step.updates[0]).role.whole(step.updates[0])).collect();
        for (id, value) in plan.leaves(LeafKind::Derived) {
            assert!(value.role.shard().is_some() && rounded.contains(&id), "{}", value.name);
        }
    }
}

/// The partial gradients of a layer are summed while earlier layers run, and their memory is freed afterwards, so far less
/// is in use than all gradients need. `verify` checks that the memory is not reused before a sum is complete.
#[test]
fn partial_gradients_exist_for_a_few_layers() {
    let spec = shapes::llama(512, 1408, LAYERS, (8, 4), 2048, false);
    let trained = spec.tensors().into_iter().map(|tensor| tensor.name).collect();
    let plain = shapes::request(spec, Targets::AllLinear, Layers::All, 64, 1);
    let request = Request { adapters: vec![], trained, rank: Rank { index: 1, of: 4 }, ..plain };
    let policy = Policy { sharding: Sharding::Gradients, ..Policy::resident(LayerSet::first(1), 64) };
    let plan = compile(&request, &policy);
    let steps = &plan.entry(Entry::MicroStep).steps;
    let sums = steps.iter().filter(|step| matches!(step.op, Op::ReduceScatter(_))).count();
    assert!(sums > 3, "{sums}");
    let partial = |buffer: &&Buffer| {
        buffer.category == Category::Gradients && matches!(buffer.lifetime, Lifetime::Steps { .. })
    };
    let live_bytes = |step: usize| {
        let partials = plan.buffers.iter().filter(partial);
        partials
            .filter(|buffer| buffer.lifetime.covers(Entry::MicroStep, step))
            .map(|buffer| buffer.bytes)
            .sum()
    };
    let all: usize = plan.buffers.iter().filter(partial).map(|buffer| buffer.bytes).sum();
    let most: usize = (0..steps.len()).map(live_bytes).max().unwrap();
    assert!(most > 0 && 2 * most < all, "{most} of {all}");
}

/// LoRA on a GPU that fetches all frozen weights from pinned memory, one of four ranks.
fn offloading() -> Request {
    let spec = shapes::llama(64, 160, LAYERS, (4, 2), 256, false);
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 128, 1);
    let rank = Rank { index: 1, of: 4 };
    Request { device: DeviceKind::Cuda, precision: Precision::Bf16, rank, ..request }
}

/// Buffers that are the same on every rank come first in pinned memory, in whole pages; all others follow.
#[test]
fn frozen_weights_in_pinned_memory_are_shared() {
    let policy = |request: &Request| {
        let resident = Policy { activations: Space::Host, ..Policy::resident(LayerSet::first(1), 64) };
        let activations = Policy { offloaded_activations: LayerSet::all(LAYERS), ..resident };
        offload_all_weights(activations, request, 1)
    };
    let request = offloading();
    let plan = compile(&request, &policy(&request));
    let shared = plan.host.shared_bytes;
    assert!(shared > 0 && shared.is_multiple_of(64 << 10) && shared < plan.host.bytes(), "{:?}", plan.host);
    let mut frozen = 0;
    for buffer in plan.buffers.iter().filter(|buffer| buffer.space == Space::Host) {
        if buffer.category == Category::BaseWeights {
            assert!(buffer.end() <= shared)
        } else {
            assert!(buffer.offset >= shared, "{buffer:?}")
        }
        frozen += usize::from(buffer.category == Category::BaseWeights);
    }
    assert!(frozen >= 7 * LAYERS, "{frozen}");
    assert_eq!(plan.host.of_machine(1), plan.host.bytes());
    assert_eq!(plan.host.of_machine(4), 4 * plan.host.bytes() - 3 * shared);
    let alone = Request { rank: Rank::ONLY, ..request };
    assert_eq!(compile(&alone, &policy(&alone)).host.shared_bytes, 0);
}

/// The budget of a machine counts one copy of what its ranks share, and everything else once per rank.
#[test]
fn a_machine_is_counted_once_for_what_its_ranks_share() {
    let extent = Extent { tokens: 128, rows: 127, segments: 1, audio: 0 };
    let pins = Pins {
        weights: Some(Space::Host),
        offloaded_weights: Some(LayerRule::All),
        tables_offloaded: Some(true),
        sharding: Some(Sharding::None),
        activations: Some(Space::Device),
        optimizer_state: Some(Space::Host),
        ..Pins::default()
    };
    let solved = |request: &Request, offload_bytes: u64, local_ranks: usize| {
        let question = Question {
            purpose: Purpose::Training,
            request,
            demands: &[Demand { micro_tokens: 128, extent, step: extent, micro_steps: 1.0 }],
            pins: &pins,
            context: CONTEXT,
            budget: Budget { offload_bytes, local_ranks, ..Budget::device(u64::MAX) },
            profile: &Profile::cpu(2, Precision::Bf16),
        };
        solve(&question).ok().map(|solution| solution.plan.host)
    };
    let request = offloading();
    let size = solved(&request, u64::MAX, 1).unwrap();
    let (all, shared) = (size.bytes() as u64, size.shared_bytes as u64);
    assert!(shared > 0 && all > shared, "moments are each rank's own");
    let needed = shared + 4 * (all - shared);
    assert_eq!(solved(&request, needed, 4), Some(size));
    assert_eq!(solved(&request, needed - 1, 4), None);
    // Four copies would not fit.
    assert!(needed < 4 * all);
}

/// Every rank of 2 and of 3, with whatever offloaded in either order: `compile` checks the graph after each stage. All ranks
/// exchange the same tensors in the same order.
#[test]
fn no_policy_of_a_rank_breaks_an_invariant() {
    let mut random: u64 = 0x5eed;
    let mut draw = |count: usize| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) as usize % count
    };
    for turn in 0..150 {
        let is_tied = draw(2) == 0;
        let spec = shapes::llama(64, 160, 3, (4, 2), 256, is_tied);
        let trained: BTreeSet<String> = match draw(4) {
            0 => BTreeSet::new(),
            _ => spec.tensors().into_iter().map(|tensor| tensor.name).collect(),
        };
        let plain = shapes::request(spec, Targets::AllLinear, Layers::All, 128, 1);
        let adapters = if trained.is_empty() { plain.adapters.clone() } else { vec![] };
        let (device, precision) =
            [(DeviceKind::Cpu, Precision::F32), (DeviceKind::Cuda, Precision::Bf16)][draw(2)];
        let master = [Master::F32, Master::Bf16 { seed: 3 }][draw(2)];
        let moments = [Moments::F32, Moments::Bits8][draw(2)];
        let clip = [0.0, 1.0][draw(2)];
        let optimizer = Optimizer { master, moments, clip, ..plain.optimizer };
        let of = 2 + draw(2);
        let request = Request { adapters, trained, device, precision, optimizer, ..plain };
        let spaces = [Space::Device, Space::Host, Space::Disk];
        let sets = [LayerSet::none(), LayerSet::from_iter([1]), LayerSet::all(3)];
        let sharding = Sharding::ALL[draw(4)];
        let tables_offloaded = draw(2) == 0;
        let policy = Policy {
            sharding,
            recompute: sets[draw(3)].clone(),
            loss_chunk: 64,
            weights: spaces[if sharding == Sharding::Weights { draw(3) } else { 1 + draw(2) }],
            offloaded_weights: sets[draw(3)].clone(),
            tables_offloaded,
            embedding_offloaded: tables_offloaded,
            activations: spaces[1 + draw(2)],
            offloaded_activations: sets[draw(3)].clone(),
            optimizer_state: spaces[draw(3)],
            offloaded_moments: sets[draw(3)].clone(),
            gradients: spaces[draw(3)],
            offloaded_gradients: sets[draw(3)].clone(),
            updates: spaces[draw(2)],
            order: Order::ALL[draw(2)],
            layers_per_lap: draw(3),
            window_bytes: [0, 1 << 14, 1 << 30][draw(3)],
            ..Policy::default()
        };
        let policy = policy.on(device);
        let exchanged = (0..of).map(|index| {
            let request = Request { rank: Rank { index, of }, ..request.clone() };
            let compiled = std::panic::catch_unwind(|| exchanges(&compile(&request, &policy)));
            compiled.unwrap_or_else(|_| panic!("turn {turn}, rank {index} of {of} on {device:?}: {policy:?}"))
        });
        let exchanged: Vec<Vec<String>> = exchanged.collect();
        for other in &exchanged[1..] {
            let differing = other.iter().zip(&exchanged[0]).find(|(one, other)| one != other);
            assert_eq!(differing, None, "turn {turn}, {of} ranks: {policy:?}");
            assert_eq!(other.len(), exchanged[0].len(), "turn {turn}, {of} ranks: {policy:?}");
        }
    }
}

/// What a plan exchanges between ranks, in order, by the names of whole tensors.
fn exchanges(plan: &Plan) -> Vec<String> {
    let steps = plan.entries.iter().flat_map(|entry| &entry.steps).filter(|step| step.op.is_collective());
    let name = |id: &ValueId| plan.value(plan.value(*id).role.whole(*id)).name.clone();
    let described = steps.map(|step| {
        let operands: Vec<String> = step.inputs.iter().chain(&step.updates).map(name).collect();
        format!("{} {}", step.op.name(), operands.join(" "))
    });
    described.collect()
}

fn all_offloaded() -> Policy {
    Policy {
        gradients: Space::Host,
        optimizer_state: Space::Host,
        weights: Space::Host,
        offloaded_weights: LayerSet::all(LAYERS),
        embedding_offloaded: true,
        tables_offloaded: true,
        ..Policy::resident(LayerSet::all(LAYERS), 64)
    }
}

/// The least that a rank of several needs is no more than one process needs, with the same micro-batches.
#[test]
fn a_rank_needs_no_more_memory_than_one_alone() {
    let spec = shapes::llama(256, 704, LAYERS, (8, 4), 2048, false);
    let trained = spec.tensors().into_iter().map(|tensor| tensor.name).collect();
    let plain = shapes::request(spec, Targets::AllLinear, Layers::All, 64, 1);
    let request = Request { adapters: vec![], trained, ..plain };
    let request = Request { device: DeviceKind::Cuda, precision: Precision::Bf16, ..request };
    for order in Order::ALL {
        let policy = Policy { order, ..all_offloaded() };
        let alone = compile(&request, &policy);
        for of in [2, 3] {
            for sharding in [Sharding::None, Sharding::Moments] {
                let rank = Rank { index: 1, of };
                let plan =
                    compile(&Request { rank, ..request.clone() }, &Policy { sharding, ..policy.clone() });
                let (own, most) = (plan.reserved_bytes(), alone.reserved_bytes());
                assert!(sharding != Sharding::None || own <= most, "{order:?} on {of}: {own} of {most}");
                let host = plan.host.of_machine(of);
                let limit = if sharding == Sharding::None { of } else { 2 } * alone.host.bytes();
                assert!(host <= limit, "{order:?} {sharding:?} on {of}: {host} of {limit}");
            }
        }
    }
}

/// Ranks that divide weights and offload them have together what one process offloads.
#[test]
fn what_ranks_divide_and_offload_adds_up() {
    let alone = Request { rank: Rank::ONLY, device: DeviceKind::Cuda, ..request() };
    let policy = |sharding| Policy { sharding, ..all_offloaded() };
    let whole = compile(&alone, &policy(Sharding::None)).host.bytes();
    let ranks = (0..4).map(|index| {
        let rank = Rank { index, of: 4 };
        compile(&Request { rank, ..alone.clone() }, &policy(Sharding::Weights)).host.bytes()
    });
    let together: usize = ranks.sum();
    assert!(together.abs_diff(whole) < whole / 50, "{together} and {whole}");
}

//! Offloading gives the same losses, gradients, moments and adapters, bit for bit.
//!
//! Whole decoders run several updates with weights, tables, activations and moments offloaded to disk, alone and
//! together, with and without recompute, with windows that allow no, some or full prefetch. `Null` checks that no step
//! touches the bytes of a pending transfer.

use crate::decoder::{ALL_FUSED, Choice, LAYERS, LOSS_CHUNK, Trained, find_leaf, gemma2, leaf_named, phi3};
use crate::decoder_kinds::kinds;
use crate::examples::{Example, Proof};
use crate::numbers::decode_doubles;
use crate::subject::{Subject, roomy};
use smidgen_compile::names::{input, state};
use smidgen_compile::passes::{
    breadth, head_pieces, offload, place, recompute, round_fp8, shard, stream, tile, update_early,
    update_in_pieces,
};
use smidgen_compile::request::{Master, Moments};
use smidgen_compile::{AdapterForm, DecoderSpec, Request};
use smidgen_ir::{
    Entry, LayerSet, Leaf, LeafKind, Op, Order, Phase, PlannedValue, Policy, Rank, Space, ValueId, ValueRole,
    verify,
};
use smidgen_runtime::{Cpu, Device, DeviceError, Executor};
use std::collections::BTreeSet;

pub fn examples() -> Vec<Example> {
    vec![Example { covers: &["fetch", "stow", "stowed"], proof: Proof::Values(everything_offloaded) }]
}

fn everything_offloaded() -> BTreeSet<&'static str> {
    let choice = Choice::lora();
    let resident = outcome(&choice.subject_with(LayerSet::none()));
    let subject = by_policy(&choice, &offload_everything(usize::MAX));
    assert!(outcome(&subject) == resident);
    let nodes = subject.graph.entries.iter().flat_map(|(_, nodes)| nodes);
    nodes.map(|node| node.op.name()).collect()
}

/// Offloads everything that can be offloaded to disk.
pub fn offload_everything(window_bytes: usize) -> Policy {
    Policy {
        offloaded_weights: LayerSet::all(LAYERS),
        tables_offloaded: true,
        offloaded_activations: LayerSet::all(LAYERS),
        optimizer_state: Space::Disk,
        gradients: Space::Disk,
        window_bytes,
        ..nothing_offloaded()
    }
}

/// Offloads nothing; what a test adds to it is offloaded to disk.
pub fn nothing_offloaded() -> Policy {
    let resident = Policy::resident(LayerSet::none(), LOSS_CHUNK);
    Policy { weights: Space::Disk, activations: Space::Disk, ..resident }
}

fn breadth_first(policy: Policy) -> Policy {
    Policy { order: Order::Breadth, ..policy }
}

/// The decoder after the passes that offload values.
pub fn by_policy(choice: &Choice, policy: &Policy) -> Subject {
    of_rank(choice, policy, Rank::ONLY)
}

/// The decoder of one of several ranks after these passes.
pub fn of_rank(choice: &Choice, policy: &Policy, rank: Rank) -> Subject {
    let request = Request { rank, ..choice.request() };
    let mut subject = choice.subject(|graph| recompute::keep_set(graph, policy));
    tile::apply(&mut subject.graph, policy, &roomy(subject.extent));
    verify::expect_sound("tile", &verify::graph(&subject.graph));
    round_fp8::apply(&mut subject.graph, &choice.request());
    verify::expect_sound("round_fp8", &verify::graph(&subject.graph));
    shard::divide_trained(&mut subject.graph, policy, rank);
    verify::expect_sound("divide_trained", &verify::graph(&subject.graph));
    if policy.order == Order::Depth {
        offload::apply(&mut subject.graph, policy, &subject.extent, choice.device);
        verify::expect_sound("offload", &verify::graph(&subject.graph));
    }
    head_pieces::apply(&mut subject.graph, policy);
    verify::expect_sound("head_pieces", &verify::graph(&subject.graph));
    place::apply(&mut subject.graph, policy, &subject.extent, (choice.device, rank), 1);
    shard::gather_offloaded(&mut subject.graph);
    let is_early = update_early::is_early(&request, policy);
    let squares =
        update_in_pieces::apply(&mut subject.graph, policy, &subject.extent, PIECE_ELEMENTS, is_early);
    if policy.order == Order::Breadth {
        let step = roomy(subject.extent).plus(&roomy(subject.extent));
        let early = if is_early {
            update_early::take(&mut subject.graph, &squares)
        } else {
            update_early::Early::default()
        };
        let target = (choice.device, rank);
        breadth::apply(&mut subject.graph, policy, (&subject.extent, &step), target, &squares, early);
    }
    stream::apply(&mut subject.graph, policy, &subject.extent);
    verify::expect_sound("stream", &verify::graph(&subject.graph));
    shard::sum_gradients(&mut subject.graph, rank, &subject.extent);
    verify::expect_sound("sum_gradients", &verify::graph(&subject.graph));
    subject
}

/// Small enough that matrices of the tests are updated in several pieces.
const PIECE_ELEMENTS: usize = 100;

/// Two micro-batches of different tokens and, if there is any, different sound.
fn run_micro_steps<D: Device>(subject: &Subject, executor: &mut Executor<D>) {
    let names = [input::IDS, input::AUDIO_ROWS];
    let leaves: Vec<ValueId> = names.into_iter().filter_map(|name| find_leaf(&subject.graph, name)).collect();
    let feed = |executor: &mut Executor<D>, number: usize| {
        for leaf in &leaves {
            let mut bytes = subject.content_bytes(*leaf);
            bytes.rotate_left(4 * number);
            executor.write(*leaf, &bytes);
        }
        Ok::<(), DeviceError>(())
    };
    if executor.has_laps() {
        return executor.run_laps(&[subject.extent; 2], feed).unwrap();
    }
    for number in 0..2 {
        feed(executor, number).unwrap();
        executor.run(Entry::MicroStep, &subject.extent).unwrap();
    }
}

/// Losses of three updates of two micro-batches each, and every leaf afterwards.
pub type Outcome = (Vec<f64>, Vec<Vec<u8>>);

pub fn outcome(subject: &Subject) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let plan = subject.roomy_plan(2);
    subject.run_on_null(plan.clone()).unwrap();
    let cpu = Cpu::new(2).unwrap().with_spill_folder(folder.path().into());
    outcome_of(subject, &mut Executor::load(plan, cpu).unwrap())
}

pub fn outcome_of<D: Device>(subject: &Subject, executor: &mut Executor<D>) -> Outcome {
    subject.write_contents(executor);
    let report = leaf_named(&subject.graph, state::REPORT);
    let mut losses = Vec::new();
    for _ in 0..3 {
        run_micro_steps(subject, executor);
        for entry in [Entry::Update, Entry::Refresh] {
            executor.run(entry, &subject.extent).unwrap();
        }
        losses.push(decode_doubles(&subject.read_bytes(executor, report))[0]);
    }
    executor.run(Entry::Eval, &subject.extent).unwrap();
    losses
        .push(decode_doubles(&subject.read_bytes(executor, leaf_named(&subject.graph, state::EVAL_LOSS)))[0]);
    let kept = [LeafKind::Adapter, LeafKind::Moment, LeafKind::Weight];
    let leaves = subject.graph.values.iter().enumerate().filter_map(|(index, value)| {
        let leaf = value.leaf().filter(|leaf| kept.contains(&leaf.kind));
        leaf.map(|_| subject.read_bytes(executor, ValueId(index as u32)))
    });
    (losses, leaves.collect())
}

#[test]
fn every_part_and_all_together_agree_to_the_last_bit() {
    let (dora, fourier) = (AdapterForm::Dora, AdapterForm::Fourier { reg: 0.1 });
    let choices = [
        Choice::lora(),
        Choice { name: "phi3", spec: phi3(), adapted: ALL_FUSED, ..Choice::lora() },
        Choice { name: "gemma2", spec: gemma2(), dropout: 0.25, ..Choice::lora() },
        Choice { name: "dora", form: dora, ..Choice::fused() },
        Choice { name: "full in 8 bits", moments: Moments::Bits8, ..Choice::full() },
        Choice { name: "full in bf16", master: Master::Bf16 { seed: 3 }, ..Choice::full() },
        Choice { name: "full, last layer", trained: Trained::LastLayer, ..Choice::full() },
        Choice { name: "full, not clipped", clips: false, ..Choice::full() },
        Choice {
            name: "bf16, not clipped",
            clips: false,
            master: Master::Bf16 { seed: 3 },
            ..Choice::full()
        },
        Choice { name: "ls-lora, not clipped", clips: false, form: fourier, ..Choice::lora() },
        Choice::with_audio(),
        Choice { name: "ls-lora in 8 bits", form: fourier, moments: Moments::Bits8, ..Choice::lora() },
    ];
    for choice in choices.into_iter().chain(kinds()) {
        for layers in [LayerSet::none(), LayerSet::first(1), LayerSet::first(LAYERS)] {
            let want = outcome(&choice.subject_with(layers.clone()));
            for part in policies() {
                let policy = Policy { recompute: layers.clone(), ..part };
                let subject = by_policy(&choice, &policy);
                assert!(outcome(&subject) == want, "{}: {policy:?}", choice.name);
            }
        }
    }
}

/// Laps pass the blocks of an audio encoder and the projector before the decoder: audio rows are carried as tokens are.
#[test]
fn laps_of_an_encoder_agree_to_the_last_bit() {
    let lora = Choice::with_audio();
    let blocks = lora.request().encoder_layers();
    let (encoder, all) = (LayerSet::first(blocks), LayerSet::all(blocks + LAYERS));
    let choices = [
        Choice { name: "hearing with dropout", dropout: 0.25, ..lora.clone() },
        Choice { name: "hearing, not clipped", clips: false, ..lora },
    ];
    let everything = |window_bytes| Policy {
        offloaded_weights: all.clone(),
        offloaded_activations: all.clone(),
        ..offload_everything(window_bytes)
    };
    let parts = [
        nothing_offloaded(),
        Policy { offloaded_activations: encoder.clone(), ..nothing_offloaded() },
        Policy { offloaded_weights: encoder.clone(), window_bytes: 3000, ..nothing_offloaded() },
        everything(0),
        everything(usize::MAX),
    ];
    for choice in choices {
        for recompute in [LayerSet::none(), encoder.clone(), all.clone()] {
            let want = outcome(&choice.subject_with(recompute.clone()));
            for part in &parts {
                for layers_per_lap in 1..=3 {
                    let recompute = recompute.clone();
                    let policy = breadth_first(Policy { recompute, layers_per_lap, ..part.clone() });
                    assert!(outcome(&by_policy(&choice, &policy)) == want, "{}: {policy:?}", choice.name);
                }
            }
        }
    }
}

/// Laps of two and of three layers over three layers, so that one lap is not full, or there is only one.
#[test]
fn laps_of_several_layers_agree_to_the_last_bit() {
    let lora = of_three_layers(Choice::lora());
    let full = of_three_layers(Choice::full());
    let choices = [
        Choice { name: "lora with dropout", dropout: 0.25, ..lora.clone() },
        full.clone(),
        Choice { name: "full, not clipped", clips: false, ..full.clone() },
        Choice { name: "full, last layer", trained: Trained::LastLayer, ..full },
    ];
    let all = LayerSet::all(3);
    let offloaded = || Policy {
        offloaded_weights: all.clone(),
        offloaded_activations: all.clone(),
        ..offload_everything(0)
    };
    let parts = [
        nothing_offloaded(),
        Policy { offloaded_activations: LayerSet::from_iter([0, 1]), ..nothing_offloaded() },
        Policy { offloaded_weights: all.clone(), window_bytes: usize::MAX, ..nothing_offloaded() },
        offloaded(),
        Policy { window_bytes: usize::MAX, ..offloaded() },
    ];
    for choice in choices {
        for recompute in [LayerSet::none(), LayerSet::first(1), LayerSet::from_iter([1, 2]), all.clone()] {
            let want = outcome(&choice.subject_with(recompute.clone()));
            for part in &parts {
                for layers_per_lap in [2, 3] {
                    let recompute = recompute.clone();
                    let policy = breadth_first(Policy { recompute, layers_per_lap, ..part.clone() });
                    assert!(outcome(&by_policy(&choice, &policy)) == want, "{}: {policy:?}", choice.name);
                }
            }
            // The start of a stretch between two attentions decides which sums are divided into tiles.
            let tiled =
                |policy: Policy| Policy { recompute: recompute.clone(), tile_tokens: Some(4), ..policy };
            let laps = Policy { layers_per_lap: 2, ..offloaded() };
            let [depth, breadth] = [tiled(offloaded()), breadth_first(tiled(laps))]
                .map(|policy| outcome(&by_policy(&choice, &policy)).0[0]);
            assert!(depth == breadth, "{}: {depth} and {breadth} in tiles", choice.name);
        }
    }
}

fn of_three_layers(choice: Choice) -> Choice {
    let layers = vec![choice.spec.layers[0].clone(); 3];
    Choice { spec: DecoderSpec { layers, ..choice.spec.clone() }, ..choice }
}

/// A lap of two recomputed layers carries only the input of the first layer. The input of the second is recomputed, which
/// takes only the last matmul of the first layer, because the values for its backward pass are kept.
#[test]
fn a_lap_of_two_layers_carries_one_input() {
    let counts = |choice: &Choice, layers_per_lap: usize| {
        let all = LayerSet::all(3);
        let part = Policy { offloaded_activations: all.clone(), recompute: all, ..nothing_offloaded() };
        let subject = by_policy(choice, &breadth_first(Policy { layers_per_lap, ..part }));
        let is_carried = |leaf: &Leaf| matches!(leaf.kind, LeafKind::Carried(_));
        let values = subject.graph.values.iter().filter(|value| value.space == Space::Disk);
        let carried = values.filter(|value| value.leaf().is_some_and(is_carried)).count();
        let again =
            subject.graph.nodes(Entry::MicroStep).iter().filter(|node| node.phase == Phase::Recompute);
        let matmuls = again.filter(|node| matches!(node.op, Op::Linear { .. })).count();
        (subject.graph.laps.len(), carried, matmuls)
    };
    let choice = of_three_layers(Choice { adapted: &[], ..Choice::full() });
    let (one, two) = (counts(&choice, 1), counts(&choice, 2));
    // Embedding, layers and head, forward and backward; head and loss are one lap.
    assert_eq!((one.0, two.0), (9, 7));
    assert_eq!((one.1, two.1), (3, 2));
    assert_eq!(two.2, one.2 + 1);
    // There is no backward pass below the last layer, so the layers below are not recomputed for its input.
    let last = Choice { trained: Trained::LastLayer, ..choice };
    assert_eq!(counts(&last, 3).2, counts(&last, 1).2);
}

/// Policies that offload to disk, in both orders.
pub fn policies() -> Vec<Policy> {
    let all = || LayerSet::all(LAYERS);
    vec![
        Policy { offloaded_weights: LayerSet::from_iter([1]), ..nothing_offloaded() },
        Policy { offloaded_weights: all(), window_bytes: 3000, ..nothing_offloaded() },
        Policy { tables_offloaded: true, ..nothing_offloaded() },
        Policy { embedding_offloaded: true, ..nothing_offloaded() },
        Policy { offloaded_activations: all(), ..nothing_offloaded() },
        Policy { optimizer_state: Space::Disk, window_bytes: 1000, ..nothing_offloaded() },
        Policy {
            optimizer_state: Space::Disk,
            offloaded_moments: LayerSet::from_iter([1]),
            ..nothing_offloaded()
        },
        Policy { gradients: Space::Disk, window_bytes: 1000, ..nothing_offloaded() },
        Policy {
            gradients: Space::Disk,
            offloaded_gradients: LayerSet::from_iter([0]),
            ..nothing_offloaded()
        },
        offload_everything(0),
        offload_everything(4000),
        offload_everything(usize::MAX),
        breadth_first(nothing_offloaded()),
        breadth_first(Policy { offloaded_activations: LayerSet::from_iter([0]), ..nothing_offloaded() }),
        breadth_first(Policy { offloaded_weights: all(), window_bytes: 3000, ..nothing_offloaded() }),
        breadth_first(Policy { gradients: Space::Disk, ..nothing_offloaded() }),
        breadth_first(offload_everything(0)),
        breadth_first(offload_everything(usize::MAX)),
        breadth_first(Policy { layers_per_lap: 2, ..offload_everything(0) }),
    ]
}

/// An offloaded value uses device memory only while it is needed, and prefetch stays within its window.
#[test]
fn offloaded_values_take_less_device_memory() {
    let choice = Choice::lora();
    let resident = choice.subject_with(LayerSet::first(LAYERS)).roomy_plan(2);
    let sizes = [0, 4000, usize::MAX].map(|window_bytes| {
        let policy = Policy { recompute: LayerSet::first(LAYERS), ..offload_everything(window_bytes) };
        let plan = by_policy(&choice, &policy).roomy_plan(2);
        assert!(plan.disk.persistent_bytes > 0 && plan.disk.transient_bytes > 0);
        assert!(plan.persistent_bytes < resident.persistent_bytes);
        let fetches = plan.entry(Entry::MicroStep).steps.iter().filter(|step| step.op == Op::Fetch);
        assert!(fetches.count() > 2 * LAYERS, "a layer's weights are fetched for forward and for backward");
        plan.reserved_bytes()
    });
    assert!(sizes[0] < resident.reserved_bytes(), "{sizes:?} against {}", resident.reserved_bytes());
    assert!(sizes[0] <= sizes[1] && sizes[1] <= sizes[2], "{sizes:?}");
}

/// Without clipping a gradient is used within its lap and not stored.
#[test]
fn gradients_that_are_not_clipped_are_not_kept() {
    let policy = Policy { recompute: LayerSet::first(LAYERS), ..breadth_first(offload_everything(0)) };
    let [clipped, not_clipped] = [true, false].map(|clips| {
        let subject = by_policy(&Choice { clips, ..Choice::full() }, &policy);
        let is_stored = |value: &PlannedValue| {
            value.buffer.is_some()
                && matches!(&value.role, ValueRole::Leaf(leaf) if leaf.kind == LeafKind::Gradient)
        };
        let plan = subject.roomy_plan(2);
        (plan.values.iter().filter(|value| is_stored(value)).count(), plan.disk.persistent_bytes)
    });
    assert!(clipped.0 > 0 && not_clipped.0 == 0, "{clipped:?}, {not_clipped:?}");
    assert!(not_clipped.1 < clipped.1);
}

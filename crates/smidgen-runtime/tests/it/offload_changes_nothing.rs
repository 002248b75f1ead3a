//! Offloading gives the same losses, gradients, moments and adapters, bit for bit.
//!
//! Whole decoders over several updates, with weights, tables, activations and moments offloaded to disk, alone and
//! together, with and without recompute, with windows that allow no, some or full prefetch. `Null` checks that no step
//! touches the bytes of a pending transfer.

use crate::decoder::{ALL_FUSED, Choice, LAYERS, LOSS_CHUNK, Trained, gemma2, leaf_named, phi3};
use crate::examples::{Example, Proof};
use crate::numbers::decode_doubles;
use crate::subject::{Subject, roomy};
use smidgen_compile::names::state;
use smidgen_compile::passes::{head_pieces, offload, recompute, stream, tile};
use smidgen_compile::request::{Away, Moments, Policy};
use smidgen_compile::{AdapterForm, Recompute};
use smidgen_ir::{Entry, LeafKind, Op, Space, ValueId, verify};
use smidgen_runtime::{Cpu, Executor};
use std::collections::BTreeSet;

pub fn examples() -> Vec<Example> {
    vec![Example { covers: &["fetch", "stow", "stowed"], proof: Proof::Values(everything_away) }]
}

fn everything_away() -> BTreeSet<&'static str> {
    let choice = Choice::lora();
    let resident = outcome(&choice.subject_with(Recompute::none()));
    let subject = sent_away(&choice, &Recompute::none(), everywhere(usize::MAX));
    assert!(outcome(&subject) == resident);
    let nodes = subject.graph.entries.iter().flat_map(|(_, nodes)| nodes);
    nodes.map(|node| node.op.name()).collect()
}

pub fn everywhere(window_bytes: usize) -> Away {
    let weights: Vec<usize> = (0..LAYERS).collect();
    let activations = weights.clone();
    Away { weights, tables: true, activations, moments: true, window_bytes, ..Away::default() }
}

/// The decoder after the passes that offload values.
fn sent_away(choice: &Choice, layers: &Recompute, away: Away) -> Subject {
    by_policy(choice, &Policy { away, ..Policy::resident(layers.clone(), LOSS_CHUNK) })
}

pub fn by_policy(choice: &Choice, policy: &Policy) -> Subject {
    let mut subject = choice.subject(|graph| recompute::keep_set(graph, &policy.recompute));
    tile::apply(&mut subject.graph, policy.tile_tokens, &roomy(subject.extent));
    verify::expect_sound("tile", &verify::graph(&subject.graph));
    offload::apply(&mut subject.graph, policy, &subject.extent, Space::Disk);
    verify::expect_sound("offload", &verify::graph(&subject.graph));
    if policy.away.tables {
        head_pieces::apply(&mut subject.graph, policy.away.head_pieces);
        verify::expect_sound("head_pieces", &verify::graph(&subject.graph));
    }
    stream::apply(&mut subject.graph, &policy.away, &subject.extent, Space::Disk, 1);
    verify::expect_sound("stream", &verify::graph(&subject.graph));
    subject
}

/// Losses of three updates of two micro-batches each, and every leaf that they leave.
pub fn outcome(subject: &Subject) -> (Vec<f64>, Vec<Vec<u8>>) {
    let folder = tempfile::tempdir().unwrap();
    let plan = subject.roomy_plan(2);
    subject.run_on_null(plan.clone()).unwrap();
    let cpu = Cpu::new(2).unwrap().with_spill_folder(folder.path().into());
    let mut executor = Executor::load(plan, cpu).unwrap();
    subject.write_contents(&mut executor);
    let report = leaf_named(&subject.graph, state::REPORT);
    let mut losses = Vec::new();
    for _ in 0..3 {
        for entry in [Entry::MicroStep, Entry::MicroStep, Entry::Update, Entry::Refresh] {
            executor.run(entry, &subject.extent).unwrap();
        }
        losses.push(decode_doubles(&subject.read_bytes(&mut executor, report))[0]);
    }
    executor.run(Entry::Eval, &subject.extent).unwrap();
    losses.push(
        decode_doubles(&subject.read_bytes(&mut executor, leaf_named(&subject.graph, state::EVAL_LOSS)))[0],
    );
    let kept = [LeafKind::Adapter, LeafKind::Moment, LeafKind::Weight];
    let leaves = subject.graph.values.iter().enumerate().filter_map(|(index, value)| {
        let leaf = value.leaf().filter(|leaf| kept.contains(&leaf.kind));
        leaf.map(|_| subject.read_bytes(&mut executor, ValueId(index as u32)))
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
        Choice { name: "full, last layer", trained: Trained::LastLayer, ..Choice::full() },
        Choice { name: "ls-lora in 8 bits", form: fourier, moments: Moments::Bits8, ..Choice::lora() },
    ];
    let all = everywhere(4000);
    let parts = [
        Away { weights: vec![1], ..Away::default() },
        Away { weights: all.weights.clone(), window_bytes: 3000, ..Away::default() },
        Away { tables: true, ..Away::default() },
        Away { embedding: true, ..Away::default() },
        Away { activations: all.activations.clone(), ..Away::default() },
        Away { moments: true, window_bytes: 1000, ..Away::default() },
        everywhere(0),
        all,
        everywhere(usize::MAX),
    ];
    for choice in choices {
        for layers in [Recompute::none(), Recompute::first(1), Recompute::first(LAYERS)] {
            let want = outcome(&choice.subject_with(layers.clone()));
            for away in &parts {
                let subject = sent_away(&choice, &layers, away.clone());
                assert!(outcome(&subject) == want, "{}: {layers:?} {away:?}", choice.name);
            }
        }
    }
}

/// An offloaded value uses device memory only while it is needed, and prefetch stays within its window.
#[test]
fn the_device_holds_less_and_the_disk_the_rest() {
    let choice = Choice::lora();
    let resident = choice.subject_with(Recompute::first(LAYERS)).roomy_plan(2);
    let sizes = [0, 4000, usize::MAX].map(|window_bytes| {
        let plan = sent_away(&choice, &Recompute::first(LAYERS), everywhere(window_bytes)).roomy_plan(2);
        assert!(plan.disk.persistent_bytes > 0 && plan.disk.transient_bytes > 0);
        assert!(plan.persistent_bytes < resident.persistent_bytes);
        let fetches = plan.entry(Entry::MicroStep).steps.iter().filter(|step| step.op == Op::Fetch);
        assert!(fetches.count() > 2 * LAYERS, "a layer's weights come for each turn");
        plan.reserved_bytes()
    });
    assert!(sizes[0] < resident.reserved_bytes(), "{sizes:?} against {}", resident.reserved_bytes());
    assert!(sizes[0] <= sizes[1] && sizes[1] <= sizes[2], "{sizes:?}");
}

//! Every stage after the forward graph leaves sound results, on random graphs.
//!
//! Plans are checked three times: by the stages themselves, by `verify`, and by a replay that follows every value through
//! memory by its identity.

use crate::random_graph::{grow, growths};
use crate::replay::replay;
use crate::shapes;
use proptest::prelude::*;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::passes::join_operands::Layout;
use smidgen_compile::passes::recompute::{self, KeepSet};
use smidgen_compile::passes::{remove_dead, reuse_in_place};
use smidgen_compile::{
    AdapterForm, DecoderSpec, Request, TrainedBiases, arena, autodiff, compile, compile_logits, schedule,
    update,
};
use smidgen_ir::{Entry, Extent, Graph, LayerSet, LeafKind, Phase, Plan, Policy, ValueId, ValueRole, verify};
use std::collections::HashSet;

fn request() -> Request {
    let request = shapes::request(shapes::tiny(), Targets::AllLinear, Layers::All, 12, 2);
    Request { extent: Extent { tokens: 9, rows: 5, segments: 2, audio: 0 }, ..request }
}

fn plan(graph: Graph) -> Plan {
    let request = request();
    let shared = reuse_in_place::find(&graph);
    arena::plan_memory(schedule::plan_lifetimes(graph, &shared, &Layout::default(), &request))
}

fn assert_sound(plan: &Plan) {
    verify::expect_sound("test", &verify::plan(plan));
    for entry in &plan.entries {
        verify::expect_sound("replay", &replay(plan, entry.entry));
    }
}

/// Forward values whose bit is set in the repeated `bits`, and all outputs of nodes that also update a leaf.
fn keep_by_bits(graph: &Graph, bits: &[bool]) -> KeepSet {
    let forward = graph.nodes(Entry::MicroStep).iter().filter(|node| node.phase == Phase::Forward);
    let mut keep = KeepSet::default();
    for (index, node) in forward.enumerate() {
        if bits[index % bits.len()] || !node.updates.is_empty() {
            keep.extend(&node.outputs);
        }
    }
    keep
}

/// Leaves whose gradient some node of `micro_step` adds to.
fn gradients_added_to(graph: &Graph) -> HashSet<ValueId> {
    graph.nodes(Entry::MicroStep).iter().flat_map(|node| &node.updates).copied().collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn forward_graphs_become_sound_plans(growths in growths()) {
        let graph = grow(&growths);
        prop_assert_eq!(verify::graph(&graph), Vec::<String>::new());
        assert_sound(&plan(graph));
    }

    #[test]
    fn any_keep_set_gives_a_sound_plan(growths in growths(), bits in prop::collection::vec(any::<bool>(), 1..20)) {
        let mut graph = grow(&growths);
        autodiff::append_backward(&mut graph);
        prop_assert_eq!(verify::graph(&graph), Vec::<String>::new());
        let gradients = gradients_added_to(&graph);

        let keep = keep_by_bits(&graph, &bits);
        recompute::apply(&mut graph, &keep);
        prop_assert_eq!(verify::graph(&graph), Vec::<String>::new());
        let dropped_and_read = graph
            .nodes(Entry::MicroStep)
            .iter()
            .filter(|node| node.phase != Phase::Forward)
            .flat_map(|node| &node.inputs)
            .find(|input| is_forward_output(&graph, **input) && !keep.contains(input));
        prop_assert_eq!(dropped_and_read, None, "backward reads what was dropped");

        remove_dead::apply(&mut graph);
        prop_assert_eq!(verify::graph(&graph), Vec::<String>::new());
        prop_assert_eq!(gradients_added_to(&graph), gradients, "a gradient was lost");
        update::append_update(&mut graph, &request());
        prop_assert_eq!(verify::graph(&graph), Vec::<String>::new());
        assert_sound(&plan(graph));
    }
}

fn is_forward_output(graph: &Graph, value: ValueId) -> bool {
    let nodes = graph.nodes(Entry::MicroStep);
    nodes.iter().any(|node| node.phase == Phase::Forward && node.outputs.contains(&value))
}

/// Plans of a real decoder replay too, with several recompute policies.
#[test]
fn decoders_replay_by_identity() {
    let spec = shapes::llama_1b();
    let layers = spec.layers.len();
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 512, 3);
    let list = LayerSet::from_iter([1, 5, 6]);
    for recompute in [LayerSet::none(), LayerSet::every(2, layers), LayerSet::first(layers), list] {
        assert_sound(&compile(&request, &Policy::resident(recompute, 64)));
    }
}

fn small_models() -> [DecoderSpec; 4] {
    [shapes::tiny(), shapes::small_phi3(3), shapes::small_gemma2(3), shapes::small_gemma3(3)]
}

/// So do plans of every model type with every form of adapter, with dropout and trained biases.
#[test]
fn every_model_type_and_form_replays_by_identity() {
    for spec in small_models() {
        for form in [AdapterForm::Lora, AdapterForm::Dora, AdapterForm::Fourier { reg: 0.1 }] {
            for dropout in [0.0, 0.1] {
                let request = shapes::request(spec.clone(), Targets::AllLinear, Layers::All, 24, 2);
                let biases = TrainedBiases::All;
                let spec = spec.clone().with_biases(true);
                let layers = spec.layers.len();
                let request = Request { form, biases, dropout, spec, ..request };
                for recompute in [LayerSet::none(), LayerSet::every(2, layers), LayerSet::first(layers)] {
                    assert_sound(&compile(&request, &Policy::resident(recompute, 8)));
                }
            }
        }
    }
}

/// A plan for inspecting a model has two entry points, trains nothing, and has only weights, adapters and inputs.
#[test]
fn logits_are_planned_without_training() {
    for spec in small_models() {
        for form in [AdapterForm::Lora, AdapterForm::Dora, AdapterForm::Fourier { reg: 0.1 }] {
            let request = shapes::request(spec.clone(), Targets::AllLinear, Layers::All, 24, 2);
            let request = Request { form, biases: TrainedBiases::All, dropout: 0.1, ..request };
            let plan = compile_logits(&request);
            assert_sound(&plan);
            let entries: Vec<Entry> = plan.entries.iter().map(|entry| entry.entry).collect();
            assert_eq!(entries, [Entry::Refresh, Entry::Logits]);
            for kind in [LeafKind::Gradient, LeafKind::Moment] {
                assert_eq!(plan.leaves(kind).count(), 0, "{kind:?} in a plan that trains nothing");
            }
            let roles = plan.values.iter().map(|value| &value.role);
            let trained = roles.filter(|role| match role {
                ValueRole::Leaf(leaf) => leaf.gradient.is_some(),
                ValueRole::Slice(slice) => slice.gradient.is_some(),
                ValueRole::Temp => false,
            });
            assert_eq!(trained.count(), 0);
            let logits = &plan.entry(Entry::Logits).steps;
            assert!(logits.iter().all(|step| step.phase == Phase::Forward && step.op.name() != "dropout"));
            let ends: Vec<usize> =
                (0..logits.len()).filter(|step| !logits[*step].updates.is_empty()).collect();
            assert_eq!(ends, [logits.len() - 1], "one step writes a leaf, the last");
            let written = plan.value(logits[ends[0]].updates[0]);
            assert_eq!((written.name.as_str(), written.ty.shape.at(&plan.extent)), ("logits", (22, 64)));
            let refreshed = plan.entry(Entry::Refresh).steps.len();
            let modules = request.adapters.len();
            assert_eq!(refreshed, if form == AdapterForm::Dora { modules } else { 0 });
        }
    }
}

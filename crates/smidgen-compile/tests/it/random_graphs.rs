//! Every stage behind the forward graph, on random graphs: what it leaves is sound.
//!
//! Plans are checked three times: by the stages themselves, by `verify`, and by a replay that follows
//! every value through memory by its identity.

use crate::random_graph::{grow, growths};
use crate::replay::replay;
use crate::shapes;
use proptest::prelude::*;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::passes::recompute::{self, KeepSet};
use smidgen_compile::passes::{remove_dead, reuse_in_place};
use smidgen_compile::{Policy, Recompute, arena, autodiff, compile, schedule, update};
use smidgen_ir::{Entry, Extent, Graph, Phase, Plan, ValueId, verify};
use std::collections::HashSet;

fn plan(graph: Graph) -> Plan {
    let mut request = shapes::request(shapes::tiny(), Targets::AllLinear, Layers::All, 12, 2);
    request.extent = Extent { tokens: 9, rows: 5, segments: 2 };
    let shared = reuse_in_place::find(&graph);
    arena::plan_memory(schedule::plan_lifetimes(graph, &shared, &request))
}

fn assert_sound(plan: &Plan) {
    verify::expect_sound("test", &verify::plan(plan));
    for entry in &plan.entries {
        verify::expect_sound("replay", &replay(plan, entry.entry));
    }
}

/// Forward values whose bit is set in the repeated `bits`, and what stands beside an update.
fn keep_by_bits(graph: &Graph, bits: &[bool]) -> KeepSet {
    let forward = graph.nodes(Entry::MicroStep).iter().filter(|node| node.phase == Phase::Forward);
    let mut keep = KeepSet::new();
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
        update::append_update(&mut graph, &shapes::optimizer());
        prop_assert_eq!(verify::graph(&graph), Vec::<String>::new());
        assert_sound(&plan(graph));
    }
}

fn is_forward_output(graph: &Graph, value: ValueId) -> bool {
    let nodes = graph.nodes(Entry::MicroStep);
    nodes.iter().any(|node| node.phase == Phase::Forward && node.outputs.contains(&value))
}

/// Decoders of real shape replay as well, under every kind of policy.
#[test]
fn decoders_replay_by_identity() {
    let spec = shapes::llama_1b();
    let layers = spec.layers;
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 512, 3);
    let list = Recompute { layers: vec![1, 5, 6] };
    for recompute in [Recompute::none(), Recompute::every(2, layers), Recompute::first(layers), list] {
        assert_sound(&compile(&request, &Policy { recompute, loss_chunk: 64 }));
    }
}

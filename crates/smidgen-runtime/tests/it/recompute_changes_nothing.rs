//! Recompute under any keep set gives the same gradients and the same loss, bit for bit.
//!
//! Random subsets of all forward values, not only those that a policy would choose.

use crate::decoder::{Choice, LAYERS};
use crate::numbers::random_reals;
use crate::subject::{Outcome, Subject};
use proptest::prelude::*;
use smidgen_compile::Recompute;
use smidgen_compile::passes::recompute::KeepSet;
use smidgen_ir::{Entry, Graph, Phase};

fn choice() -> Choice {
    Choice { name: "dropout", dropout: 0.25, ..Choice::lora() }
}

fn outcome(subject: &Subject) -> Outcome {
    subject.run_once(&mut subject.load(subject.roomy_plan(1), 1))
}

/// Each forward value with probability `share`; what a node leaves beside an update it has to keep.
fn random_keep_set(graph: &Graph, seed: u64, share: f32) -> KeepSet {
    let forward = graph.nodes(Entry::MicroStep).iter().filter(|node| node.phase == Phase::Forward);
    let chances = random_reals(seed, graph.values.len());
    let mut keep = KeepSet::new();
    for node in forward {
        keep.extend(
            node.outputs
                .iter()
                .filter(|output| !node.updates.is_empty() || (chances[output.index()] + 1.0) / 2.0 < share),
        );
    }
    keep
}

fn recomputed_nodes(subject: &Subject) -> usize {
    subject.graph.nodes(Entry::MicroStep).iter().filter(|node| node.phase == Phase::Recompute).count()
}

#[test]
fn policies_agree_to_the_last_bit() {
    let kept = outcome(&choice().subject_with(Recompute::none()));
    let lists = [vec![0], vec![1], (0..LAYERS).collect()];
    for layers in lists {
        let subject = choice().subject_with(Recompute { layers: layers.clone() });
        assert!(outcome(&subject) == kept, "recomputing {layers:?} changed a bit");
        subject.run_on_null(subject.roomy_plan(1)).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_keep_sets_agree_to_the_last_bit(seed in any::<u64>(), share in 0.0f32..1.0) {
        let everything = choice().subject(|graph| random_keep_set(graph, seed, 2.0));
        prop_assert_eq!(recomputed_nodes(&everything), 0);
        let subject = choice().subject(|graph| random_keep_set(graph, seed, share));
        if share < 0.5 {
            prop_assert!(recomputed_nodes(&subject) > 0, "nothing was recomputed");
        }
        prop_assert!(subject.run_on_null(subject.roomy_plan(1)).is_ok());
        prop_assert!(outcome(&subject) == outcome(&everything), "a keep set changed a bit");
    }
}

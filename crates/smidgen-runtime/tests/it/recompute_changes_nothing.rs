//! Recompute with any keep set gives the same gradients and the same loss, bit for bit.
//!
//! Keep sets are random subsets of all forward values, not only those that a policy would choose.

use crate::decoder::{Choice, gemma2, gemma3};
use crate::decoder_kinds::kinds;
use crate::numbers::random_reals;
use crate::subject::{Outcome, Subject};
use proptest::prelude::*;
use smidgen_compile::passes::recompute::KeepSet;
use smidgen_compile::{AdapterForm, TrainedBiases};
use smidgen_ir::{Entry, Graph, LayerSet, Phase};

fn choice() -> Choice {
    Choice { name: "dropout", dropout: 0.25, ..Choice::lora() }
}

fn outcome(subject: &Subject) -> Outcome {
    subject.run_once(&mut subject.load(subject.roomy_plan(1), 1))
}

/// Keeps each forward value with probability `share`; outputs of a node that also updates a leaf must be kept.
fn random_keep_set(graph: &Graph, seed: u64, share: f32) -> KeepSet {
    let forward = graph.nodes(Entry::MicroStep).iter().filter(|node| node.phase == Phase::Forward);
    let chances = random_reals(seed, graph.values.len());
    let mut keep = KeepSet::default();
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

/// Every model family and every form of adapter, with dropout, so that every value that a keep set can drop occurs.
fn all_choices() -> Vec<Choice> {
    let lora = choice();
    let fused = Choice { name: "fused", dropout: 0.25, ..Choice::fused() };
    let (dora, fourier) = (AdapterForm::Dora, AdapterForm::Fourier { reg: 0.1 });
    let mut choices = vec![
        lora.clone(),
        Choice { name: "gemma 2", spec: gemma2(), ..lora.clone() },
        Choice { name: "gemma 3", spec: gemma3(), ..lora.clone() },
        Choice { name: "dora", form: dora, ..lora.clone() },
        Choice { name: "dora without dropout", form: dora, dropout: 0.0, ..lora.clone() },
        Choice { name: "ls-lora", form: fourier, ..lora.clone() },
        Choice { name: "hearing", dropout: 0.25, ..Choice::with_audio() },
        Choice { name: "biases", biases: TrainedBiases::All, ..lora },
        Choice::full(),
        Choice { name: "full, gemma 3", spec: gemma3(), ..Choice::full() },
        Choice { name: "dora, fused", form: dora, ..fused.clone() },
        Choice { name: "ls-lora, fused", form: fourier, biases: TrainedBiases::Adapted, ..fused.clone() },
        fused,
    ];
    choices.extend(kinds());
    choices
}

#[test]
fn policies_agree_to_the_last_bit() {
    for choice in all_choices() {
        let nothing = choice.subject_with(LayerSet::none());
        let kept = outcome(&nothing);
        let lists = [vec![0], vec![1], (0..choice.request().layers()).collect()];
        for layers in lists {
            let subject = choice.subject_with(layers.iter().copied().collect());
            assert!(recomputed_nodes(&subject) > recomputed_nodes(&nothing), "{}: {layers:?}", choice.name);
            assert!(outcome(&subject) == kept, "{}: recomputing {layers:?} changed a bit", choice.name);
            subject.run_on_null(subject.roomy_plan(1)).unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_keep_sets_agree_to_the_last_bit(
        seed in any::<u64>(),
        share in 0.0f32..1.0,
        choice in prop::sample::select(all_choices()),
    ) {
        let everything = choice.subject(|graph| random_keep_set(graph, seed, 2.0));
        prop_assert_eq!(recomputed_nodes(&everything), 0);
        let subject = choice.subject(|graph| random_keep_set(graph, seed, share));
        if share < 0.5 {
            prop_assert!(recomputed_nodes(&subject) > 0, "nothing was recomputed");
        }
        prop_assert!(subject.run_on_null(subject.roomy_plan(1)).is_ok());
        prop_assert!(outcome(&subject) == outcome(&everything), "a keep set changed a bit");
    }
}

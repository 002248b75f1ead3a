//! The gradient of a whole decoder's loss with respect to every trained leaf, by finite differences.
//!
//! Curvature and rounding add up over two layers, so the tolerance is wider than for one operation.

use crate::check::check_subject;
use crate::decoder::{ALL_LINEARS, Choice};
use smidgen_compile::Recompute;
use smidgen_ir::{Activation, DType, Entry};

const TOLERANCE: f64 = 5e-3;

/// Checks a choice and returns the names of its trained leaves.
fn check(choice: &Choice) -> Vec<String> {
    let subject = choice.subject_with(Recompute { layers: vec![1] });
    check_subject(&subject, TOLERANCE);
    subject.trained().into_iter().map(|(leaf, _)| subject.graph.value(leaf).name.clone()).collect()
}

#[test]
fn adapters_on_every_linear() {
    let trained = check(&Choice::lora());
    assert_eq!(trained.len(), 2 * 2 * ALL_LINEARS.len());
}

#[test]
fn adapters_with_dropout() {
    let choice = Choice { name: "dropout", dropout: 0.25, stored: DType::F16, ..Choice::lora() };
    assert_eq!(check(&choice).len(), 2 * 2 * ALL_LINEARS.len());
}

#[test]
fn adapters_on_two_linears_and_the_head() {
    let choice = Choice {
        name: "q, v and head",
        adapted: &["q_proj", "v_proj", "lm_head"],
        activation: Activation::GeluTanh,
        biases: false,
        ..Choice::lora()
    };
    assert_eq!(check(&choice).len(), 2 * 5);
}

/// Rows of the head have dropout keys of their own.
#[test]
fn adapters_with_dropout_on_the_head_too() {
    let adapted = &["gate_proj", "lm_head"];
    let choice = Choice { name: "dropout, gate and head", dropout: 0.25, adapted, ..Choice::lora() };
    assert_eq!(check(&choice).len(), 2 * 3);
}

/// Norms, biases, linears, embedding and head, beside adapters.
#[test]
fn every_tensor_of_the_model() {
    let choice = Choice { name: "everything", stored: DType::F32, train_everything: true, ..Choice::lora() };
    let trained = check(&choice);
    let tensors = choice.request().spec.tensors().len();
    assert_eq!(trained.len(), tensors + 2 * 2 * ALL_LINEARS.len());
}

/// Normed queries and keys, whose weights are trained too, and a window shorter than the samples.
#[test]
fn every_tensor_of_a_model_with_normed_heads_and_a_window() {
    let choice = Choice {
        name: "normed heads, window",
        stored: DType::F32,
        biases: false,
        qk_norm: true,
        window: Some(3),
        train_everything: true,
        ..Choice::lora()
    };
    let trained = check(&choice);
    assert!(trained.iter().any(|name| name.ends_with("q_norm.weight")), "{trained:?}");
}

/// The embedding is the head: both gradients meet in one leaf.
#[test]
fn every_tensor_of_a_model_with_a_tied_head() {
    let choice = Choice {
        name: "everything, tied",
        stored: DType::F32,
        train_everything: true,
        tied_head: true,
        adapted: &[],
        biases: false,
        ..Choice::lora()
    };
    assert_eq!(check(&choice).len(), choice.request().spec.tensors().len());
}

/// Without dropout, evaluation and training see the same loss to the last bit.
#[test]
fn evaluation_is_the_loss_of_training() {
    let subject = Choice::lora().subject_with(Recompute::none());
    let mut executor = subject.load(subject.roomy_plan(2), 2);
    let evaluated = subject.evaluate(&mut executor);
    assert!(evaluated > 1.0, "a loss of {evaluated} over 8 rows");
    let loss = crate::decoder::leaf_named(&subject.graph, smidgen_compile::forward::state::LOSS);
    executor.run(Entry::MicroStep, &subject.extent).unwrap();
    let trained = crate::numbers::decode_doubles(&subject.read_bytes(&mut executor, loss))[0];
    assert_eq!(trained.to_bits(), evaluated.to_bits());
}

//! The list of operations: every one has an example, or this fails.
//!
//! An example is a subject whose gradients are checked or, for operations without a gradient, a comparison with a
//! reference. It names the operations that it is about, and they must have run.

use crate::check::check_subject;
use crate::subject::Subject;
use crate::{
    adapter_examples, attention_examples, audio_examples, expert_examples, linear_examples, loss_examples,
    objective_examples, offload_changes_nothing, ranks, recurrence_examples, row_examples, update_examples,
};
use smidgen_ir::Op;
use std::collections::BTreeSet;

pub struct Example {
    /// Names of the operations that the example is about.
    pub covers: &'static [&'static str],
    pub proof: Proof,
}

pub enum Proof {
    /// Gradients against finite differences, within a relative tolerance.
    Gradient(Subject, f64),
    /// A comparison with a reference; returns the operations that ran.
    Values(fn() -> BTreeSet<&'static str>),
}

pub fn gradient(covers: &'static [&'static str], subject: Subject) -> Example {
    Example { covers, proof: Proof::Gradient(subject, 2e-3) }
}

pub fn all() -> Vec<Example> {
    let families = [
        row_examples::examples(),
        linear_examples::examples(),
        adapter_examples::examples(),
        attention_examples::examples(),
        audio_examples::examples(),
        recurrence_examples::examples(),
        expert_examples::examples(),
        loss_examples::examples(),
        objective_examples::examples(),
        update_examples::examples(),
        offload_changes_nothing::examples(),
        ranks::examples(),
    ];
    families.into_iter().flatten().collect()
}

fn prove(examples: Vec<Example>) {
    for example in examples {
        let ran = match &example.proof {
            Proof::Gradient(subject, tolerance) => check_subject(subject, *tolerance),
            Proof::Values(compare) => compare(),
        };
        for name in example.covers {
            assert!(ran.contains(name), "an example claims to cover `{name}` but does not run it");
        }
    }
}

#[test]
fn every_operation_has_an_example() {
    let covered: BTreeSet<&str> = all().iter().flat_map(|example| example.covers).copied().collect();
    let known: BTreeSet<&str> = Op::NAMES.iter().copied().collect();
    assert_eq!(known.len(), Op::NAMES.len(), "two operations share a name");
    let missing: Vec<&&str> = known.difference(&covered).collect();
    assert!(missing.is_empty(), "no example for {missing:?}");
    let unknown: Vec<&&str> = covered.difference(&known).collect();
    assert!(unknown.is_empty(), "examples for {unknown:?}, which are not operations");
}

#[test]
fn operations_on_rows() {
    prove(row_examples::examples());
}

#[test]
fn operations_with_matmuls() {
    prove(linear_examples::examples());
}

#[test]
fn operations_of_adapters() {
    prove(adapter_examples::examples());
}

#[test]
fn operations_of_attention() {
    prove(attention_examples::examples());
}

#[test]
fn operations_of_audio() {
    prove(audio_examples::examples());
}

#[test]
fn operations_of_recurrent_mixers() {
    prove(recurrence_examples::examples());
}

#[test]
fn operations_of_experts() {
    prove(expert_examples::examples());
}

#[test]
fn operations_of_the_loss() {
    prove(loss_examples::examples());
}

#[test]
fn operations_of_objectives() {
    prove(objective_examples::examples());
}

#[test]
fn operations_of_the_update() {
    prove(update_examples::examples());
}

#[test]
fn operations_between_spaces() {
    prove(offload_changes_nothing::examples());
    prove(ranks::examples());
}

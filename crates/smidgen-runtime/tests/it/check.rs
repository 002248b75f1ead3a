//! Checks that every subject must pass.
//!
//! Its gradients agree with finite differences, accumulate, are the same bytes with 1, 2 and 4 threads and in
//! a plan for larger micro-batches, and its plan runs on the `Null` device without a violation.

use crate::finite_difference::check_gradient;
use crate::numbers::decode_reals;
use crate::subject::{Outcome, Subject};
use smidgen_ir::Entry;
use std::collections::BTreeSet;

/// Runs all checks and returns the names of the operations that ran.
pub fn check_subject(subject: &Subject, tolerance: f64) -> BTreeSet<&'static str> {
    let plan = subject.roomy_plan(1);
    if let Err(violation) = subject.run_on_null(plan.clone()) {
        panic!("{}: {violation}", subject.name);
    }
    let outcome = same_bytes_everywhere(subject);
    gradients_accumulate(subject, &outcome);

    let mut executor = subject.load(plan, 1);
    for (leaf, _) in subject.trained() {
        let value = subject.graph.value(leaf);
        let name = format!("{}: `{}`", subject.name, value.name);
        let gradient = decode_reals(&outcome.gradients[&value.name]);
        let point = subject.reals_of(leaf);
        check_gradient(&name, point, value.ty.storage, &gradient, tolerance, |moved| {
            subject.write_reals(&mut executor, leaf, moved);
            subject.evaluate(&mut executor)
        });
        subject.write_reals(&mut executor, leaf, point);
    }
    subject.graph.entries.iter().flat_map(|(_, nodes)| nodes).map(|node| node.op.name()).collect()
}

/// Runs the subject with several thread counts and extents, and checks that all give the same bytes.
pub fn same_bytes_everywhere(subject: &Subject) -> Outcome {
    let outcome = subject.run_once(&mut subject.load(subject.roomy_plan(1), 1));
    for (what, plan, threads) in [
        ("2 threads", subject.roomy_plan(2), 2),
        ("4 threads", subject.roomy_plan(4), 4),
        ("a plan without room", subject.plan(subject.extent, 2), 2),
    ] {
        let other = subject.run_once(&mut subject.load(plan, threads));
        assert!(other == outcome, "{}: other bytes with {what}", subject.name);
    }
    outcome
}

/// A second micro-batch with the same contents doubles every gradient.
fn gradients_accumulate(subject: &Subject, outcome: &Outcome) {
    let mut executor = subject.load(subject.roomy_plan(1), 1);
    for _ in 0..2 {
        executor.run(Entry::MicroStep, &subject.extent).unwrap();
    }
    for (leaf, gradient) in subject.trained() {
        let name = &subject.graph.value(leaf).name;
        let once = decode_reals(&outcome.gradients[name]);
        let twice = decode_reals(&subject.read_bytes(&mut executor, gradient));
        let largest = once.iter().fold(0.0f32, |max, value| max.max(value.abs()));
        for (index, (once, twice)) in once.iter().zip(&twice).enumerate() {
            let error = (twice - 2.0 * once).abs() / largest;
            assert!(error < 1e-5, "{}: `{name}`[{index}] is {once:e}, and {twice:e} after two", subject.name);
        }
    }
}
